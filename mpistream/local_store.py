"""A folder on a POSIX file system as a store.

What lies in the folder may be anybody's: no link below the root is followed, nothing but a regular file is read,
and no open waits for a FIFO. Each of these is `StoreError` of kind ``link`` or ``not_a_file``.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self

from mpistream.errors import FormatError, StoreError
from mpistream.together import run_together

__all__ = ["MAX_READ_NBYTES", "MAX_SYNC_THREADS", "Buffer", "LocalStore", "sync_time"]

# A sync waits and does nothing else, so these are no matter of cores: so many wait together.
MAX_SYNC_THREADS = 8

Buffer = Any  # anything with the buffer protocol: bytes, memoryview, a contiguous numpy array

# Linux takes at most IOV_MAX = 1,024 pieces in one writev (POSIX <limits.h>).
_IOV_MAX = 1024
# A fenced writer's file can appear in a folder while it is deleted. Each try removes what it finds; with a
# writer that does nothing else, about every second one still meets a new file.
_DELETE_TRIES = 100
# What is read whole is a document, or a chunk of at most 64 MiB before compression; no codec adds so much to one.
MAX_READ_NBYTES = 65 * 1024 * 1024
# How many folders are known: that no link leads to them, or that their names are durable; a long run forgets some.
_MAX_KNOWN_FOLDERS = 10_000
# What no part of a key may be.
_NO_NAMES = frozenset(("", ".", ".."))
# How often in a row an object may be replaced right between the open and the read of it, on NFS.
_STALE_TRIES = 10


def _is_gone(error: OSError) -> bool:
    # NFS answers ESTALE for a folder that another host renamed or removed.
    return error.errno in (errno.ENOENT, errno.ESTALE)


def _folders_of(keys: Iterable[str], known: Container[str]) -> set[str]:
    """Return the folders whose entries name ``keys``; the root only for keys right in it.

    The way up ends at a folder that is known: those above it were synced when it was new.
    """
    folders: set[str] = set()
    for key in keys:
        folder = key.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = "" if folder in known else folder.rpartition("/")[0]
        if "/" not in key:
            folders.add("")
    return folders


def _note_synced(folders: set[str], known: dict[str, None]) -> None:
    """Note the folders whose names are durable now, those that were of use last at the end."""
    for folder in folders:
        if folder in known or (folder and folder.rpartition("/")[0] in folders):
            known.pop(folder, None)
            known[folder] = None
    while len(known) > _MAX_KNOWN_FOLDERS:
        del known[next(iter(known))]


def _exists(path: str) -> bool:
    # Not os.path.lexists: that takes any error for absence, and absence means "fenced" or "deleted" here.
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class _FileReader:
    __slots__ = ("_fd", "_name", "nbytes")

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name
        self.nbytes = os.fstat(fd).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        try:
            data = os.pread(self._fd, nbytes, offset)
            # One pread gives at most 2 GiB - 4 KiB and may be cut short by a signal.
            while len(data) < nbytes and (more := os.pread(self._fd, nbytes - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise StoreError(f"read {self._name}: {error.strerror}", kind="io", errno=error.errno) from error
        return data

    def read_into(self, offset: int, buffer: Buffer) -> int:
        view, n = memoryview(buffer).cast("B"), 0
        try:
            # As above: one call may give less.
            while n < view.nbytes and (more := os.preadv(self._fd, [view[n:]], offset + n)):
                n += more
        except OSError as error:
            raise StoreError(f"read {self._name}: {error.strerror}", kind="io", errno=error.errno) from error
        return n

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Boundary:
    """Where an OSError becomes a StoreError. A class: one that a generator makes takes three times as long."""

    __slots__ = ("_key", "_may_be_gone", "_store", "_what")

    def __init__(self, store: LocalStore, what: str, key: str, may_be_gone: bool) -> None:
        self._store, self._what, self._key, self._may_be_gone = store, what, key, may_be_gone

    def __enter__(self) -> None:
        """Nothing has gone wrong yet."""

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            message = f"{self._what} {self._store._path(self._key)}: {error.strerror or error}"
            kind = "gone" if self._may_be_gone and _is_gone(error) else "io"
            raise StoreError(message, kind=kind, errno=error.errno) from error


class LocalStore:
    """A folder on a POSIX file system, shared by all ranks.

    Parameters
    ----------
    root
        The folder; it need not exist yet. It may be a link, or lie behind one.
    follow_links
        Follow links below the root, too: for stores that others wrote, and to read only.
    """

    def __init__(self, root: str | os.PathLike[str], *, follow_links: bool = False) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = self.root
        self._follow_links = follow_links
        self._known_folders: set[str] = set()

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    def above(self) -> LocalStore | None:
        folder = os.path.dirname(self.root)
        return None if folder == self.root else LocalStore(folder)

    def root_kind(self) -> str | None:
        """Return whether the root is a ``folder`` or a ``file``, None when nothing is there.

        Not collective.
        """
        with self._errors("look at", ""):
            try:
                return "folder" if stat.S_ISDIR(os.stat(self.root).st_mode) else "file"
            except (FileNotFoundError, NotADirectoryError):
                return None

    def following_links(self) -> Self:
        """Return this store for a reader that follows links.

        Not collective.
        """
        other = copy.copy(self)
        other._follow_links, other._known_folders = True, set()
        return other

    def _path(self, key: str) -> str:
        """Return where a key lies, once it is known that no link leads there; itself it may be one."""
        if not key:
            return self.root
        folder, _, name = key.rpartition("/")
        if folder in self._known_folders and name not in _NO_NAMES and "\0" not in name:
            return f"{self.root}/{key}"
        # The names of a schema are checked where they are read; this is for those that are not.
        if "\0" in key or not _NO_NAMES.isdisjoint(key.split("/")):
            raise StoreError(f"{self.root}: {key!r} is no key of a store; nothing was done", kind="key")
        self._check_folder(folder)
        return f"{self.root}/{key}"

    def _folder(self, key: str) -> str:
        """Return where a folder lies; itself it is no link either."""
        path = self._path(key)
        self._check_folder(key)
        return path

    def _check_folder(self, folder: str) -> None:
        # One look at each folder, and only at the first use of it: the system looks it up anyway.
        if not folder or self._follow_links or folder in self._known_folders:
            return
        self._check_folder(folder.rpartition("/")[0])
        path = f"{self.root}/{folder}"
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            return  # whatever it is, whoever goes there meets it
        if stat.S_ISLNK(mode):
            raise StoreError(
                f"{path} is a link; links in a store are not followed, put the folder itself there",
                kind="link",
                errno=errno.ELOOP,
            )
        if stat.S_ISDIR(mode):
            if len(self._known_folders) >= _MAX_KNOWN_FOLDERS:
                self._known_folders.clear()
            self._known_folders.add(folder)

    def _errors(self, what: str, key: str, *, may_be_gone: bool = False) -> _Boundary:
        """Return a context that translates every OSError: the one boundary."""
        return _Boundary(self, what, key, may_be_gone)

    # Readable

    def read(self, key: str) -> bytes | None:
        for _ in range(_STALE_TRIES):
            try:
                return self._read_once(key)
            except StoreError as error:
                # NFS: another host replaced the object after it was opened. The new one is whole, too.
                if error.errno != errno.ESTALE:
                    raise
        return self._read_once(key)

    def _read_once(self, key: str) -> bytes | None:
        reader = self.open(key)
        if reader is None:
            return None
        try:
            if reader.nbytes > MAX_READ_NBYTES:
                raise FormatError(
                    f"{key}: {reader.nbytes} bytes, at most {MAX_READ_NBYTES} are read of such an object", kind="size"
                )
            return reader.read(0, reader.nbytes)
        finally:
            reader.close()

    def open(self, key: str) -> _FileReader | None:
        path = self._path(key)
        # Not to wait for whoever writes into a FIFO, and not to make a terminal our own.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        with self._errors("open", key):
            try:
                fd = os.open(path, flags if self._follow_links else flags | os.O_NOFOLLOW)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                what = {errno.ELOOP: "link", errno.ENXIO: "not_a_file"}.get(error.errno or 0)
                if what is None:
                    raise
                raise _not_a_file(path, what, error.errno) from error
            try:
                mode = os.fstat(fd).st_mode
                if stat.S_ISREG(mode):
                    return _FileReader(fd, path)
                if not stat.S_ISDIR(mode):
                    raise _not_a_file(path, "not_a_file", None)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            return None

    # Listable

    def list(self, prefix: str = "") -> list[str]:
        with self._errors("list", prefix):
            try:
                return sorted(os.listdir(self._folder(prefix)))
            except (FileNotFoundError, NotADirectoryError):
                return []

    # Writable

    def make_folder(self, key: str, *, parents: bool = True) -> None:
        missing = [self._path(key)]
        with self._errors("make folder", key, may_be_gone=not parents):
            while parents and not os.path.isdir(above := os.path.dirname(missing[-1])):
                missing.append(above)
            for path in reversed(missing):
                try:
                    os.mkdir(path)
                except FileExistsError:
                    if not os.path.isdir(path):
                        raise
                    continue
                if parents:
                    # The folder above the store's root may be one that can be written but not read.
                    with contextlib.suppress(PermissionError):
                        _sync_path(os.path.dirname(path))

    def create(self, key: str, data: bytes) -> bool:
        with self._errors("create", key):
            try:
                fd = os.open(self._path(key), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                return False
            with self._removed_on_failure(key):
                try:
                    _write_all(fd, [data])
                    _sync(fd)
                finally:
                    os.close(fd)
                _sync_path(self._path(key.rpartition("/")[0]))
        return True

    def stage(self, key: str, pieces: Sequence[Buffer], *, sync: bool) -> int:
        with self._errors("stage", key, may_be_gone=True):
            fd = os.open(self._path(key), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with self._removed_on_failure(key):
                try:
                    nbytes = _write_all(fd, pieces)
                    if sync:
                        _sync(fd)
                finally:
                    os.close(fd)
        return nbytes

    @contextlib.contextmanager
    def _removed_on_failure(self, key: str) -> Iterator[None]:
        """Give the space back: on a full disk it is what the next try needs."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self._path(key))
            raise

    def place(self, staged: str, key: str) -> None:
        source, target = self._path(staged), self._path(key)
        with self._errors(f"place {source} as", key, may_be_gone=True):
            try:
                os.rename(source, target)
            except OSError as error:
                # ENOENT has two causes: the staged file is gone, or the folder of the key is not made yet.
                if not _is_gone(error) or not _exists(source):
                    raise
                _make_folders(target.rpartition("/")[0])
                os.rename(source, target)

    def sync_folders(self, keys: Iterable[str], known: dict[str, None] | None = None) -> None:
        # All at the same time: what waits for a disk, or for a server, waits once. Nothing hangs on their order, since
        # before all are synced nobody is told of the keys.
        folders = _folders_of(keys, known or ())
        below = [partial(self._sync_folder, folder) for folder in folders if folder]
        run_together(below, min(len(below), MAX_SYNC_THREADS))
        if "" in folders:
            self._sync_folder("")
        if folders:
            with self._errors("sync folders of", ""):
                _check_alive(self.root)
        if known is not None:
            _note_synced(folders, known)

    def _sync_folder(self, folder: str) -> None:
        with self._errors("sync folder", folder, may_be_gone=True):
            _sync_path(self._folder(folder))

    def move(self, source: str, target: str, *, parents: bool = True, sync: bool = True) -> bool:
        path = self._path(target)
        with self._errors("move", source, may_be_gone=not parents):
            if not _exists(self._path(source)):
                return False
            if parents:
                os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                os.rename(self._path(source), path)
            except OSError as error:
                if _is_gone(error) and not _exists(self._path(source)):
                    return False
                raise
        if sync:
            self.sync_folders([source, target])
        return True

    def copy(self, source: str, target: str) -> bool:
        # Under its final name a copy is always whole: written beside it, synced, then renamed.
        data = self.read(source)
        if data is None:
            return False
        self.make_folder(target.rpartition("/")[0])
        self.delete(f"{target}.partial")
        self.stage(f"{target}.partial", [data], sync=True)
        self.place(f"{target}.partial", target)
        self.sync_folders([target])
        return True

    def delete(self, key: str) -> bool:
        with self._errors("delete", key):
            try:
                os.unlink(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def delete_tree(self, key: str) -> None:
        path = self._path(key)
        with self._errors("delete", key):
            if os.path.islink(path) or not os.path.isdir(path):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(path)
                return
            for last in [*[False] * (_DELETE_TRIES - 1), True]:
                try:
                    shutil.rmtree(path)
                    return
                except OSError as error:
                    if not _exists(path):
                        return
                    if last or error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.ESTALE):
                        raise
                # Someone else adds or deletes below: a walk that doesn't stop at that.
                shutil.rmtree(path, ignore_errors=True)


def _not_a_file(path: str, kind: str, number: int | None) -> StoreError:
    what = "a link, and links in a store are not followed" if kind == "link" else "no regular file"
    return StoreError(f"open {path}: it is {what}", kind=kind, errno=number)


def _make_folders(path: str) -> None:
    """Make a folder that is missing, and those above it that are."""
    try:
        os.mkdir(path)
    except FileExistsError:  # another rank was faster; what is no folder is met by whoever goes there
        return
    except FileNotFoundError:
        _make_folders(path.rpartition("/")[0])
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)


def _sync_path(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(fd)
    finally:
        os.close(fd)


class _Clock(threading.local):
    seconds = 0.0


_synced = _Clock()


def sync_time() -> float:
    """Return the seconds that this thread has waited for syncs, as `time.thread_time` returns those of its core.

    Not collective.
    """
    return _synced.seconds


def _sync(fd: int) -> None:
    began = time.perf_counter()
    os.fsync(fd)
    # An XFS that shut itself down over an error of its disk answers fsync of a folder with success, and wrote nothing:
    # what would be written was thrown away by then, so nothing is left to do (Linux 6.18). fstat says EIO there.
    os.fstat(fd)
    _synced.seconds += time.perf_counter() - began


def _check_alive(folder: str) -> None:
    """Raise the error of a file system that takes no changes any more."""
    # An ext4 whose journal could not be written says that once, to whoever waited for it: another program, maybe. Then
    # fsync of a folder that was changed in there succeeds, and whatever else changes nothing (Linux 6.18). A file
    # without a name is a change that leaves nothing. Where there is no such thing, as on NFS, fsync is believed.
    if not hasattr(os, "O_TMPFILE"):  # a system that is no Linux
        return
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno in (errno.EIO, errno.EROFS):
            raise


def _write_all(fd: int, pieces: Sequence[Buffer]) -> int:
    """Write all pieces one after the other with as few calls as the system allows."""
    total = 0
    for first in range(0, len(pieces), _IOV_MAX):
        views = [memoryview(p) for p in pieces[first : first + _IOV_MAX]]
        nbytes = sum([v.nbytes for v in views])
        n = os.writev(fd, views)
        if n < nbytes:
            _write_rest(fd, views, n)
        total += nbytes
    return total


def _write_rest(fd: int, views: Sequence[memoryview], n: int) -> None:
    """Go on behind a short write, which is legal (a signal, a nearly full disk), of so many bytes."""
    for view in views:
        if n >= view.nbytes:
            n -= view.nbytes
            continue
        rest, n = view.cast("B")[n:], 0
        while rest.nbytes:
            rest = rest[os.writev(fd, [rest]) :]

"""A disk in memory, below `LocalStore`: it knows what was synced, and by whom, and can lose all that was not.

`SimOS` stands in the place of ``os`` and ``shutil`` in `mpistream.local_store`, so that the calls of the project's own
code are what is seen here. Every change and every sync is an `Event` with a vector clock: which events of the other
processes its own process can know of, through messages and through the folders that it finds made.

The first part of a path is the process: ``/2/store/zarr.json`` is ``store/zarr.json`` as process 2 calls for it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mpistream.local_store import LocalStore
from mpistream.store import ReadableStore

__all__ = ["ROOT", "Event", "LookStore", "Looks", "Node", "ProcessStore", "SimDisk", "SimOS"]

ROOT = "store"
_STAGE = f"{ROOT}/.mpistream/stage"
_LEASE = f"{ROOT}/.mpistream/lease"

Clock = dict[int, int]


class Node:
    """A file or a folder, whatever its names are."""

    __slots__ = ("data", "is_stage", "maker", "names", "number")

    def __init__(self, number: int, *, is_folder: bool, is_stage: bool) -> None:
        self.number = number
        self.names: dict[str, Node] | None = {} if is_folder else None
        self.data = b""
        self.is_stage = is_stage
        self.maker: Event | None = None
        """What made it, None: it lay there."""


@dataclass(slots=True, eq=False)
class Event:
    """One change or sync, or what a process was told (``ack``)."""

    who: int
    kind: str
    """``link``, ``unlink``, ``rename``, ``write``, ``sync_file``, ``sync_folder`` or ``ack``."""
    clock: Clock
    """Of each process, how many of its events have happened before this one ends, this one included."""
    folder: int = -1
    name: str = ""
    node: int = -1
    is_folder: bool = False
    target: int = -1
    target_name: str = ""
    data: bytes = b""
    is_visible: bool = True
    """Whether it changes anything outside the stage folders, the lease left out."""
    is_manifest: bool = False
    value: int = 0


class SimDisk:
    """The files and folders of one file system, and what happened to them.

    Parameters
    ----------
    files, folders
        What lies there, durably, by path.
    """

    def __init__(self, files: Mapping[str, bytes] | None = None, folders: Iterable[str] = ()) -> None:
        self._n_nodes = 0
        self.root = self._new(is_folder=True, is_stage=False)
        self.log: list[Event] = []
        self.clocks: dict[int, Clock] = {}
        self.open_files: dict[int, tuple[int, Node]] = {}
        self.n_calls: dict[int, int] = {}
        self.told: set[tuple[int, int]] = set()
        """Records that some process was told to be committed, with the run that wrote them."""
        self.watch: Callable[[int, str, str], None] = lambda who, call, path: None
        """Called before each call of the system, with the process, the call and the path."""
        self._next_fd = 1000
        made = {"": self.root}
        for folder in folders:
            self._base_folder(folder, made)
        for path, data in (files or {}).items():
            above, _, name = path.rpartition("/")
            node = self._new(is_folder=False, is_stage=(above + "/").startswith(_STAGE + "/"))
            node.data = data
            names = self._base_folder(above, made).names
            assert names is not None
            names[name] = node

    def _base_folder(self, path: str, made: dict[str, Node]) -> Node:
        if path not in made:
            above, _, name = path.rpartition("/")
            names = self._base_folder(above, made).names
            assert names is not None
            names[name] = made[path] = self._new(is_folder=True, is_stage=path.startswith(_STAGE))
        return made[path]

    def _new(self, *, is_folder: bool, is_stage: bool) -> Node:
        self._n_nodes += 1
        return Node(self._n_nodes, is_folder=is_folder, is_stage=is_stage)

    # What lies there now

    def tree(self) -> tuple[dict[str, bytes], list[str]]:
        """Return all files and all folders by path."""
        files: dict[str, bytes] = {}
        folders: list[str] = []
        todo = [("", self.root)]
        while todo:
            above, folder = todo.pop()
            for name, node in (folder.names or {}).items():
                path = f"{above}/{name}" if above else name
                if node.names is None:
                    files[path] = node.data
                else:
                    folders.append(path)
                    todo.append((path, node))
        return files, folders

    def look(self, path: str) -> bytes | tuple[str, ...] | None:
        """Return what lies at a path, a file's bytes or a folder's names; nobody's call, so nobody learns from it."""
        node = self.root
        for part in path.split("/"):
            if node.names is None or part not in node.names:
                return None
            node = node.names[part]
        return node.data if node.names is None else tuple(sorted(node.names))

    # Events

    def clock(self, who: int) -> Clock:
        """Return the clock of a process, to be sent with a message."""
        own = self.clocks.get(who)
        if own is None:
            own = self.clocks[who] = {who: 0}
        return own

    def learn(self, who: int, clock: Clock) -> None:
        """Note that a process knows what happened before a message."""
        own = self.clock(who)
        for other, n in clock.items():
            if own.get(other, 0) < n:
                own[other] = n

    def _learn_of(self, who: int, event: Event) -> None:
        """Note that a process knows of an event; whoever knows of it knows all that its process knew by then."""
        own, clock = self.clock(who), event.clock
        if own.get(event.who, 0) < clock[event.who]:
            self.learn(who, clock)

    def note(self, who: int, kind: str, **more: Any) -> Event:
        """Append an event."""
        own = self.clock(who)
        own[who] += 1
        event = Event(who, kind, own.copy(), **more)
        self.log.append(event)
        return event

    def ack(self, who: int, value: int) -> None:
        """Note that a process was told that this state is committed."""
        self.note(who, "ack", value=value, is_visible=False)

    # Paths

    def _enter(self, call: str, path: str) -> tuple[int, list[str]]:
        process, _, below = path[1:].partition("/")
        who = int(process)
        self.n_calls[who] = self.n_calls.get(who, 0) + 1
        self.watch(who, call, below)
        return who, below.split("/") if below else []

    def _folder(self, who: int, parts: Sequence[str], path: str) -> Node:
        node = self.root
        for part in parts:
            if node.names is None:
                raise _error(errno.ENOTDIR, path)
            if part not in node.names:
                raise _error(errno.ENOENT, path)
            node = node.names[part]
        if node.names is None:
            raise _error(errno.ENOTDIR, path)
        # Whoever finds a folder knows that it was made.
        if node.maker is not None:
            self._learn_of(who, node.maker)
        return node

    def _find(self, who: int, parts: Sequence[str], path: str) -> Node:
        if not parts:
            return self.root
        names = self._folder(who, parts[:-1], path).names
        assert names is not None
        if parts[-1] not in names:
            raise _error(errno.ENOENT, path)
        return names[parts[-1]]

    # The calls of the system

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise _error(errno.EOPNOTSUPP, path)  # as on NFS
        who, parts = self._enter("open", path)
        above = self._folder(who, parts[:-1], path) if parts else self.root
        node = self.root if not parts else (above.names or {}).get(parts[-1])
        if flags & os.O_CREAT:
            if node is not None:
                raise _error(errno.EEXIST, path)
            node = self._make(who, above, parts, is_folder=False)
        elif node is None:
            raise _error(errno.ENOENT, path)
        elif flags & os.O_DIRECTORY and node.names is None:
            raise _error(errno.ENOTDIR, path)
        self._next_fd += 1
        self.open_files[self._next_fd] = who, node
        return self._next_fd

    def _make(self, who: int, above: Node, parts: Sequence[str], *, is_folder: bool) -> Node:
        path = "/".join(parts)
        node = self._new(is_folder=is_folder, is_stage=path.startswith(_STAGE))
        assert above.names is not None
        above.names[parts[-1]] = node
        event = self.note(
            who,
            "link",
            folder=above.number,
            name=parts[-1],
            node=node.number,
            is_folder=is_folder,
            is_visible=not above.is_stage,
        )
        if is_folder:
            node.maker = event
        return node

    def mkdir(self, path: str) -> None:
        who, parts = self._enter("mkdir", path)
        above = self._folder(who, parts[:-1], path)
        assert above.names is not None
        if parts[-1] in above.names:
            if (maker := above.names[parts[-1]].maker) is not None:
                self._learn_of(who, maker)
            raise _error(errno.EEXIST, path)
        self._make(who, above, parts, is_folder=True)

    def writev(self, fd: int, views: Sequence[Any]) -> int:
        who, node = self._file("writev", fd)
        data = b"".join(views)
        node.data += data
        self.note(who, "write", node=node.number, data=node.data, is_visible=not node.is_stage)
        return len(data)

    def _file(self, call: str, fd: int) -> tuple[int, Node]:
        if fd not in self.open_files:
            raise _error(errno.EBADF, str(fd))
        who, node = self.open_files[fd]
        self.n_calls[who] = self.n_calls.get(who, 0) + 1
        self.watch(who, call, "")
        return who, node

    def fsync(self, fd: int) -> None:
        who, node = self._file("fsync", fd)
        if node.names is None:
            self.note(who, "sync_file", node=node.number, is_visible=not node.is_stage)
        else:
            self.note(who, "sync_folder", node=node.number, is_visible=not node.is_stage)

    def pread(self, fd: int, n: int, offset: int) -> bytes:
        return self._file("pread", fd)[1].data[offset : offset + n]

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        (buffer,) = buffers
        data = self.pread(fd, len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

    def fstat(self, fd: int) -> SimpleNamespace:
        return _status(self._file("fstat", fd)[1])

    def close(self, fd: int) -> None:
        del self.open_files[fd]

    def lstat(self, path: str) -> SimpleNamespace:
        who, parts = self._enter("lstat", path)
        return _status(self._find(who, parts, path))

    def stat(self, path: str) -> SimpleNamespace:
        who, parts = self._enter("stat", path)
        return _status(self._find(who, parts, path))

    def listdir(self, path: str) -> list[str]:
        who, parts = self._enter("listdir", path)
        return list(self._folder(who, parts, path).names or ())

    def unlink(self, path: str) -> None:
        who, parts = self._enter("unlink", path)
        above = self._folder(who, parts[:-1], path)
        assert above.names is not None
        node = above.names.get(parts[-1])
        if node is None or node.names is not None:
            raise _error(errno.ENOENT if node is None else errno.EISDIR, path)
        self._remove(who, above, parts[-1], node)

    def _remove(self, who: int, above: Node, name: str, node: Node) -> None:
        assert above.names is not None
        del above.names[name]
        self.note(who, "unlink", folder=above.number, name=name, node=node.number, is_visible=not above.is_stage)

    def rename(self, source: str, target: str) -> None:
        who, parts = self._enter("rename", source)
        to = target.split("/")[2:]
        above, into = self._folder(who, parts[:-1], source), self._folder(who, to[:-1], target)
        assert above.names is not None
        assert into.names is not None
        node, old = above.names.get(parts[-1]), into.names.get(to[-1])
        if node is None:
            raise _error(errno.ENOENT, source)
        if old is not None and old.names is not None:
            if node.names is None or old.names:
                raise _error(errno.ENOTEMPTY if node.names is not None else errno.EISDIR, target)
        elif old is not None and node.names is not None:
            raise _error(errno.ENOTDIR, target)
        del above.names[parts[-1]]
        into.names[to[-1]] = node
        path = "/".join(to)
        self.note(
            who,
            "rename",
            folder=above.number,
            name=parts[-1],
            node=node.number,
            is_folder=node.names is not None,
            target=into.number,
            target_name=to[-1],
            is_visible=not (above.is_stage and into.is_stage) and path != _LEASE,
            is_manifest=path == f"{ROOT}/.mpistream/manifest.json",
        )

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all below it, name by name."""
        who, parts = self._enter("rmdir", path)
        node = self._find(who, parts, path)
        for name, child in list((node.names or {}).items()):
            if child.names is not None:
                self.remove_tree(f"{path}/{name}")
            else:
                self.unlink(f"{path}/{name}")
        self._remove(who, self._folder(who, parts[:-1], path), parts[-1], node)

    def kind(self, path: str) -> str | None:
        """Return ``file``, ``folder`` or None."""
        who, parts = self._enter("stat", path)
        try:
            node = self._find(who, parts, path)
        except OSError:
            return None
        if node.names is None:
            return "file"
        if node.maker is not None:
            self._learn_of(who, node.maker)
        return "folder"


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _status(node: Node) -> SimpleNamespace:
    mode = stat.S_IFREG if node.names is None else stat.S_IFDIR
    return SimpleNamespace(st_size=len(node.data), st_mode=mode)


class _Path:
    """``os.path``."""

    abspath = staticmethod(os.path.normpath)
    dirname = staticmethod(os.path.dirname)

    def __init__(self, sim: SimOS) -> None:
        self._sim = sim

    def isdir(self, path: str) -> bool:
        return self._sim.disk.kind(path) == "folder"

    def islink(self, path: str) -> bool:
        return False


_CALLS = ("close", "fstat", "fsync", "listdir", "lstat", "mkdir", "open", "pread", "rename", "stat", "unlink", "writev")


class SimOS:
    """What `mpistream.local_store` uses of ``os`` and ``shutil``, over the disk that is put in."""

    PathLike = os.PathLike
    fspath = staticmethod(os.fspath)
    strerror = staticmethod(os.strerror)

    def __init__(self) -> None:
        self.disk = SimDisk()
        self.path = _Path(self)
        # The flags of open are those of the system; every call is the disk's.
        vars(self).update({name: flag for name, flag in vars(os).items() if name.startswith("O_")})

    @property
    def disk(self) -> SimDisk:
        return self._disk

    @disk.setter
    def disk(self, disk: SimDisk) -> None:
        self._disk = disk
        # Found without a detour, as they are called so often.
        vars(self).update({name: getattr(disk, name) for name in _CALLS})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def makedirs(self, path: str, *, exist_ok: bool) -> None:
        missing = [path]
        while not self.path.isdir(above := os.path.dirname(missing[-1])):
            missing.append(above)
        for each in reversed(missing):
            try:
                self.disk.mkdir(each)
            except FileExistsError:
                if not exist_ok:
                    raise

    def rmtree(self, path: str, ignore_errors: bool = False) -> None:
        try:
            self.disk.remove_tree(path)
        except OSError:
            if not ignore_errors:
                raise


class ProcessStore(LocalStore):
    """The store as one process sees it; it has one name for all of them."""

    def __init__(self, who: int) -> None:
        super().__init__(f"/{who}/{ROOT}")
        self.url = "sim"

    def __repr__(self) -> str:
        return "sim"

    def above(self) -> None:
        """Nothing: the store is alone on its disk."""


class _Opened:
    """A file that somebody looks into."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.nbytes = len(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.data[offset : offset + nbytes]

    def read_into(self, offset: int, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(offset, view.nbytes)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing: it was read."""


class LookStore:
    """The store for somebody who only looks, with all that was looked at."""

    url = "sim"

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self.seen: list[tuple[str, bytes | tuple[str, ...] | None]] = []

    def _look(self, key: str) -> bytes | tuple[str, ...] | None:
        path = f"{ROOT}/{key}" if key else ROOT
        found = self._disk.look(path)
        self.seen.append((path, found))
        return found

    def read(self, key: str) -> bytes | None:
        found = self._look(key)
        return found if isinstance(found, bytes) else None

    def open(self, key: str) -> _Opened | None:
        found = self.read(key)
        return None if found is None else _Opened(found)

    def list(self, prefix: str = "") -> list[str]:
        found = self._look(prefix)
        return list(found) if isinstance(found, tuple) else []


_END = ""  # no path
_MAX_FOUND = 1 << 13


class Looks:
    """What somebody found who read just these objects: whoever would read the same again finds the same.

    As a tree of questions, what lies at a path, with a branch for each answer that was met.
    """

    def __init__(self) -> None:
        self._first: dict[Any, Any] = {}
        self._n_found = 0

    def find(self, disk: SimDisk, read: Callable[[ReadableStore], Any]) -> Any:
        """Return what ``read`` finds on a disk; what it raises is not kept."""
        node = self._first
        while node:
            path = node[_END]
            if path == _END:
                return node["found"]
            answer = disk.look(path)
            if answer not in node:
                break
            node = node[answer]
        store = LookStore(disk)
        found = read(store)
        self._n_found += 1
        if self._n_found > _MAX_FOUND:
            self._first, self._n_found = {}, 1
        node = self._first
        for path, answer in store.seen:
            assert node.setdefault(_END, path) == path, "what is asked depends on more than the answers"
            node = node.setdefault(answer, {})
        node.update({_END: _END, "found": found})
        return found

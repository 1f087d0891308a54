"""A store in this process's memory, for tests and for ranks that are threads."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Sequence

from mpistream.errors import StoreError
from mpistream.local_store import Buffer

__all__ = ["BytesReader", "MemoryStore"]


class BytesReader:
    """An object whose bytes are in memory."""

    __slots__ = ("_data", "nbytes")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.nbytes = len(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._data[offset : offset + nbytes]

    def read_into(self, offset: int, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._data[offset : offset + view.nbytes]
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing is held."""


class MemoryStore:
    """A store in this process's memory, for tests and for ranks that are threads."""

    def __init__(self, url: str = "memory") -> None:
        self.url = url
        self._objects: dict[str, bytes] = {}
        self._folders: set[str] = {""}
        self._lock = threading.RLock()

    def read(self, key: str) -> bytes | None:
        with self._lock:
            return self._objects.get(key)

    def open(self, key: str) -> BytesReader | None:
        data = self.read(key)
        return None if data is None else BytesReader(data)

    def list(self, prefix: str = "") -> list[str]:
        start = f"{prefix}/" if prefix else ""
        with self._lock:
            names = {
                k[len(start) :].partition("/")[0]
                for k in (*self._objects, *self._folders)
                if k.startswith(start) and k != start.rstrip("/")
            }
        return sorted(names)

    def make_folder(self, key: str, *, parents: bool = True) -> None:
        with self._lock:
            if not parents:
                self._check_folder(key)
            while key:
                if key in self._objects:
                    raise StoreError(f"make folder {key}: an object", kind="io", errno=errno.EEXIST)
                self._folders.add(key)
                key = key.rpartition("/")[0]

    def _check_folder(self, key: str) -> None:
        if key.rpartition("/")[0] not in self._folders:
            raise StoreError(f"{key} is gone: no such folder", kind="gone", errno=errno.ENOENT)

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self._objects:
                return False
            if key.rpartition("/")[0] not in self._folders:
                raise StoreError(f"create {key}: no such folder", kind="io", errno=errno.ENOENT)
            self._objects[key] = bytes(data)
            return True

    def stage(self, key: str, pieces: Sequence[Buffer], *, sync: bool) -> int:
        del sync  # memory has nothing that is slower than itself
        data = b"".join(v.cast("B") for p in pieces if (v := memoryview(p)).nbytes)
        with self._lock:
            self._check_folder(key)
            if key in self._objects:
                raise StoreError(f"stage {key}: exists", kind="io", errno=errno.EEXIST)
            self._objects[key] = data
        return len(data)

    def place(self, staged: str, key: str) -> None:
        with self._lock:
            if staged not in self._objects:
                raise StoreError(f"{staged} is gone", kind="gone", errno=errno.ENOENT)
            self.make_folder(key.rpartition("/")[0])
            self._objects[key] = self._objects.pop(staged)

    def sync_folders(self, keys: Iterable[str], known: dict[str, None] | None = None) -> None:
        """Nothing to do: memory is as durable as it gets."""

    def move(self, source: str, target: str, *, parents: bool = True, sync: bool = True) -> bool:
        del sync  # memory has nothing that is slower than itself
        with self._lock:
            if source not in self._objects and source not in self._folders:
                return False
            if not parents:
                self._check_folder(target)
            if source in self._objects:
                self.place(source, target)
                return True
            below = f"{target}/"
            if target in self._objects or any(k.startswith(below) for k in (*self._objects, *self._folders)):
                raise StoreError(f"move {source}: {target} exists", kind="io", errno=errno.ENOTEMPTY)
            self.make_folder(target)
            for key in [k for k in self._objects if k.startswith(f"{source}/")]:
                self._objects[target + key[len(source) :]] = self._objects.pop(key)
            for key in [k for k in self._folders if k == source or k.startswith(f"{source}/")]:
                self._folders.remove(key)
                self._folders.add(target + key[len(source) :])
            return True

    def copy(self, source: str, target: str) -> bool:
        with self._lock:
            if source not in self._objects:
                return False
            self.make_folder(target.rpartition("/")[0])
            self._objects[target] = self._objects[source]
            return True

    def delete(self, key: str) -> bool:
        with self._lock:
            return self._objects.pop(key, None) is not None

    def delete_tree(self, key: str) -> None:
        with self._lock:
            below = f"{key}/" if key else ""
            for k in [k for k in self._objects if k == key or k.startswith(below)]:
                del self._objects[k]
            self._folders -= {k for k in self._folders if k == key or k.startswith(below)}
            self._folders.add("")

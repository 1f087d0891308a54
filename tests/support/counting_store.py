"""A store that counts what is asked of it, by operation, and the bytes that go in."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mpistream.store import ObjectReader, Store

__all__ = ["CountingStore"]


class CountingStore:
    """Wraps a store and counts the calls of each of its methods.

    Parameters
    ----------
    inner
        The store that does the work.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self._lock = threading.Lock()
        # Below, guarded by _lock: the writer's thread counts as well.
        self._calls: list[tuple[str, str]] = []
        self._nbytes_staged = 0
        self._n_open = 0

    @property
    def counts(self) -> dict[str, int]:
        """Operation -> calls since the start or the last `reset`."""
        with self._lock:
            return dict(Counter(operation for operation, _ in self._calls))

    @property
    def nbytes_staged(self) -> int:
        """Bytes of all staged objects since the start or the last `reset`."""
        with self._lock:
            return self._nbytes_staged

    @property
    def n_open(self) -> int:
        """Objects that are open now."""
        with self._lock:
            return self._n_open

    def keys(self, operation: str) -> list[str]:
        """Return the keys that an operation was called with, in the order of the calls."""
        with self._lock:
            return [key for name, key in self._calls if name == operation]

    def reset(self) -> None:
        """Forget all calls and bytes."""
        with self._lock:
            self._calls = []
            self._nbytes_staged = 0

    def _count(self, operation: str, key: str) -> None:
        with self._lock:
            self._calls.append((operation, key))

    def _opened(self, change: int) -> None:
        with self._lock:
            self._n_open += change

    def read(self, key: str) -> bytes | None:
        self._count("read", key)
        return self.inner.read(key)

    def open(self, key: str) -> ObjectReader | None:
        self._count("open", key)
        reader = self.inner.open(key)
        return None if reader is None else _CountingReader(self, key, reader)

    def list(self, prefix: str = "") -> list[str]:
        self._count("list", prefix)
        return self.inner.list(prefix)

    def make_folder(self, key: str, *, parents: bool = True) -> None:
        self._count("make_folder", key)
        self.inner.make_folder(key, parents=parents)

    def create(self, key: str, data: bytes) -> bool:
        self._count("create", key)
        return self.inner.create(key, data)

    def stage(self, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        self._count("stage", key)
        nbytes = self.inner.stage(key, pieces, sync=sync)
        with self._lock:
            self._nbytes_staged += nbytes
        return nbytes

    def place(self, staged: str, key: str) -> None:
        self._count("place", key)
        self.inner.place(staged, key)

    def sync_folders(self, keys: Iterable[str], known: dict[str, None] | None = None) -> None:
        keys = sorted(keys)
        self._count("sync_folders", " ".join(keys))
        self.inner.sync_folders(keys, known)

    def move(self, source: str, target: str, *, parents: bool = True, sync: bool = True) -> bool:
        self._count("move", source)
        return self.inner.move(source, target, parents=parents, sync=sync)

    def copy(self, source: str, target: str) -> bool:
        self._count("copy", source)
        return self.inner.copy(source, target)

    def delete(self, key: str) -> bool:
        self._count("delete", key)
        return self.inner.delete(key)

    def delete_tree(self, key: str) -> None:
        self._count("delete_tree", key)
        self.inner.delete_tree(key)


class _CountingReader:
    """An open object; each range that is read counts as ``read_range``."""

    def __init__(self, store: CountingStore, key: str, reader: ObjectReader) -> None:
        self._store = store
        self._key = key
        self._reader = reader
        self.nbytes = reader.nbytes
        self._is_open = True
        store._opened(1)

    def read(self, offset: int, nbytes: int) -> bytes:
        self._store._count("read_range", self._key)
        return self._reader.read(offset, nbytes)

    def read_into(self, offset: int, buffer: Any) -> int:
        self._store._count("read_range", self._key)
        return self._reader.read_into(offset, buffer)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._store._opened(-1)
        self._reader.close()

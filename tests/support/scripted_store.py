"""A store in memory that notes every call, fails when it is told to, and can be held up."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from mpistream.memory_store import MemoryStore

__all__ = ["ScriptedStore"]


class ScriptedStore(MemoryStore):
    """A `MemoryStore` with a script.

    ``calls`` holds (method, key) in the order of the calls. While ``gate`` is cleared nothing is staged, and
    ``n_held`` says how many calls wait for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.n_open = 0
        self.n_held = 0
        self._errors: defaultdict[str, deque[BaseException | None]] = defaultdict(deque)

    def fail(self, method: str, *errors: BaseException | None) -> None:
        """Let the next calls of a method fail, one error a call; None lets a call pass."""
        self._errors[method].extend(errors)

    def keys(self, method: str) -> list[Any]:
        """Return what a method was called with."""
        return [key for name, key in self.calls if name == method]

    def _called(self, method: str, key: Any) -> None:
        self.calls.append((method, key))
        if self._errors[method] and (error := self._errors[method].popleft()) is not None:
            raise error

    def stage(self, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        self.n_held += 1
        self.gate.wait(60)
        self.n_held -= 1
        self._called("stage", (key, sync))
        return super().stage(key, pieces, sync=sync)

    def place(self, staged: str, key: str) -> None:
        self._called("place", key)
        super().place(staged, key)

    def sync_folders(self, keys: Iterable[str], known: dict[str, None] | None = None) -> None:
        self._called("sync_folders", sorted(keys))

    def move(self, source: str, target: str, *, parents: bool = True, sync: bool = True) -> bool:
        self._called("move", source)
        return super().move(source, target, parents=parents, sync=sync)

    def delete(self, key: str) -> bool:
        self._called("delete", key)
        return super().delete(key)

    def read(self, key: str) -> bytes | None:
        self._called("read", key)
        return super().read(key)

    def list(self, prefix: str = "") -> list[str]:
        self._called("list", prefix)
        return super().list(prefix)

    def open(self, key: str) -> Any:
        found = super().open(key)
        return None if found is None else _Counted(self, found)


class _Counted:
    """An open object that is counted until it is closed."""

    def __init__(self, store: ScriptedStore, inner: Any) -> None:
        self._store = store
        self._inner = inner
        self.nbytes = inner.nbytes
        store.n_open += 1

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._inner.read(offset, nbytes))

    def read_into(self, offset: int, buffer: Any) -> int:
        return int(self._inner.read_into(offset, buffer))

    def close(self) -> None:
        self._store.n_open -= 1

"""One rank's view of a store in memory: it fails when told to, and dies with its job."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistream.errors import StoreError
from mpistream.memory_store import MemoryStore
from tests.model.turns import Turns

__all__ = ["Fault", "Fuse", "View"]


@dataclass(slots=True)
class Fault:
    """Calls of some kinds fail: the first ``after`` of them pass, then ``n`` fail."""

    calls: frozenset[str]
    after: int
    n: int
    key: str = ""
    """Only if this is part of the key."""
    is_resent: bool = False
    """A rename is done, and then said to have failed, as NFS does when it sends one again."""
    n_failed: int = 0

    def meets(self, call: str, key: str) -> bool:
        """Return whether this call, the next one of its kind, fails."""
        if call not in self.calls or self.key not in key:
            return False
        self.after -= 1
        if self.after >= 0 or self.n_failed >= self.n:
            return False
        self.n_failed += 1
        return True


@dataclass(slots=True)
class Fuse:
    """The job dies at its n-th change of the store, before or behind it."""

    n: int
    is_behind: bool


class View:
    """A `mpistream.store.Store` of one rank.

    Parameters
    ----------
    inner
        What all ranks share.
    turns
        The ranks.
    """

    def __init__(self, inner: MemoryStore, turns: Turns) -> None:
        self.inner = inner
        self.url = inner.url
        self.fault: Fault | None = None
        self.fuse: list[Fuse] = []
        self._turns = turns

    def __str__(self) -> str:
        return self.url

    def _do(self, call: str, key: str, *args: Any, **more: Any) -> Any:
        if self._turns.is_killed:
            self._turns.die()
        # The lease is refreshed by its own clock.
        if "/lease" in key:
            return getattr(self.inner, call)(*args, **more)
        self._turns.pause()
        if self._turns.is_killed:
            self._turns.die()
        fault = self.fault if self.fault is not None and self.fault.meets(call, key) else None
        if fault is not None and not (fault.is_resent and call == "place"):
            raise StoreError(f"{call} {key}: a fault", kind="io", errno=errno.ENOSPC)
        changes = call not in ("read", "open", "list")
        if changes and self.fuse:
            self._burn(call, args, more)
        found = getattr(self.inner, call)(*args, **more)
        if fault is not None:
            raise StoreError(f"{call} {key}: gone", kind="gone", errno=errno.ENOENT)
        return found

    def _burn(self, call: str, args: Any, more: Any) -> None:
        fuse = self.fuse[0]
        fuse.n -= 1
        if fuse.n < 0:
            if fuse.is_behind:
                getattr(self.inner, call)(*args, **more)
            self._turns.is_killed = True
            self._turns.die()

    def read(self, key: str) -> bytes | None:
        return self._do("read", key, key)

    def open(self, key: str) -> Any:
        return self._do("open", key, key)

    def list(self, prefix: str = "") -> list[str]:
        return self._do("list", prefix, prefix)

    def make_folder(self, key: str, *, parents: bool = True) -> None:
        self._do("make_folder", key, key, parents=parents)

    def create(self, key: str, data: bytes) -> bool:
        return self._do("create", key, key, data)

    def stage(self, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        return self._do("stage", key, key, pieces, sync=sync)

    def place(self, staged: str, key: str) -> None:
        self._do("place", key, staged, key)

    def sync_folders(self, keys: Iterable[str], known: dict[str, None] | None = None) -> None:
        found = sorted(keys)
        self._do("sync_folders", " ".join(found), found, known)

    def move(self, source: str, target: str, *, parents: bool = True, sync: bool = True) -> bool:
        return self._do("move", source, source, target, parents=parents, sync=sync)

    def copy(self, source: str, target: str) -> bool:
        return self._do("copy", source, source, target)

    def delete(self, key: str) -> bool:
        return self._do("delete", key, key)

    def delete_tree(self, key: str) -> None:
        self._do("delete_tree", key, key)

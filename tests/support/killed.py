"""A store in memory whose process dies, or is overtaken, at one of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpistream.memory_store import MemoryStore

__all__ = ["InterruptedStore", "Killed", "KilledStore", "copy_of"]


class Killed(BaseException):
    """The process is dead; no handler for errors is meant for it."""


def copy_of(store: MemoryStore) -> Any:
    """Return another store with the same objects and folders."""
    found = MemoryStore()
    found._objects, found._folders = dict(store._objects), set(store._folders)
    return found


class KilledStore(MemoryStore):
    """A copy of a store that is killed before one of its calls that change anything; then nothing reaches it any more.

    Parameters
    ----------
    source
        What lies in it.
    n_calls
        Calls that it takes.
    watch
        Called after each of them.
    """

    def __init__(self, source: MemoryStore, n_calls: int, watch: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._objects, self._folders = dict(source._objects), set(source._folders)
        self.n_left = n_calls
        self._depth = 0
        self._watch = watch

    def _end(self) -> None:
        raise Killed

    def _change(self, call: Callable[[], Any]) -> Any:
        # One change may be made of others; it counts once.
        if self._depth == 0:
            self.n_left -= 1
            if self.n_left < 0:
                self._end()
        self._depth += 1
        try:
            return call()
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._watch()

    def make_folder(self, key: str, *, parents: bool = True) -> None:
        self._change(lambda: super(KilledStore, self).make_folder(key, parents=parents))

    def create(self, key: str, data: bytes) -> bool:
        return bool(self._change(lambda: super(KilledStore, self).create(key, data)))

    def stage(self, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        return int(self._change(lambda: super(KilledStore, self).stage(key, pieces, sync=sync)))

    def place(self, staged: str, key: str) -> None:
        self._change(lambda: super(KilledStore, self).place(staged, key))

    def sync_folders(self, keys: Iterable[str], known: dict[str, None] | None = None) -> None:
        self._change(lambda: super(KilledStore, self).sync_folders(keys, known))

    def move(self, source: str, target: str, *, parents: bool = True, sync: bool = True) -> bool:
        return bool(self._change(lambda: super(KilledStore, self).move(source, target, parents=parents, sync=sync)))

    def delete(self, key: str) -> bool:
        return bool(self._change(lambda: super(KilledStore, self).delete(key)))

    def delete_tree(self, key: str) -> None:
        self._change(lambda: super(KilledStore, self).delete_tree(key))


class InterruptedStore(KilledStore):
    """A store in which something else happens before one of the calls of this process.

    Parameters
    ----------
    source
        The store; whatever happens is done to it as well.
    n_calls
        Calls before that.
    other
        What happens.
    """

    def __init__(self, source: MemoryStore, n_calls: int, other: Callable[[], object]) -> None:
        super().__init__(source, n_calls)
        self._objects, self._folders = source._objects, source._folders
        self._other = other

    @property
    def is_interrupted(self) -> bool:
        """Whether there were so many calls."""
        return self.n_left < 0

    def _end(self) -> None:
        if self.n_left == -1:
            self._other()

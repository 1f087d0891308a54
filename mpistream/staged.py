"""One object that is made and staged, by whichever thread.

An object of a shard that threads encode is made by them, too: it stands in the line of that shard, behind the records
that it holds, and its bytes come to be only when it is its turn.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mpistream.errors import StoreError
from mpistream.fence import fenced
from mpistream.local_store import sync_time
from mpistream.pipeline import Line, Loan, Pool
from mpistream.stats import WriterStats
from mpistream.store import Store, read_whole
from mpistream.zarr3.shard import Scratch

__all__ = ["Source", "StagedObject", "Work"]

# Enough to tell one object from another: a shard ends with its index and the index's checksum.
_TAIL_NBYTES = 64

_log = logging.getLogger("mpistream")


class Source(Protocol):
    """What the bytes of an object are made of: a shard, or something that makes one."""

    def finish(self, scratch: Scratch) -> list[Any]:
        """Return the bytes, as buffers; a call that fails may be made again."""


@dataclass(slots=True, kw_only=True, eq=False)
class StagedObject:
    """One object that this writer makes."""

    name: str
    """The array."""
    key: str
    records: frozenset[int] | None
    """Records in it that were not committed when it was made; None for an array without time."""
    n_cells: int
    """Cells of one record in it."""
    pieces: Sequence[Any] | None = None
    """The bytes, as buffers; None before they are made and once they are staged."""
    nbytes: int = 0
    """Before they are made, those that are held for it."""
    must_sync: bool
    shard: Source | None = None
    """What the bytes will be made of; None once they are."""
    line: Line | None = None
    """Where the jobs of that shard stand."""
    is_borrowing: bool = False
    """Whether the bytes may be those of a block: they count only until it was tried to stage them."""
    loan: Loan | None = None
    """In the background, what holds that block."""
    is_queued: bool = False
    """Whether it is in some line."""
    staged_key: str | None = None
    is_placed: bool = False
    tail: bytes = field(default=b"")
    error: Exception | None = None

    @property
    def is_staged(self) -> bool:
        """Whether it is durable, under the stage folder or under its key."""
        return self.staged_key is not None or self.is_placed

    def read_back(self, store: Store) -> bytes | None:
        """Return its bytes, from memory or from where they lie."""
        pieces = self.pieces  # the thread that stages sets staged_key first, then lets the pieces go
        if pieces is not None:
            return b"".join(bytes(p) for p in pieces)
        # Placed, or it was and the sync of its name failed: then its bytes lie under its key, as `Work.stage` says.
        key = self.key if self.is_placed or self.staged_key is None else self.staged_key
        return read_whole(store, key, self.nbytes)


class Work:
    """What is done for one writer, apart from `Stager` so that a thread does not keep that alive."""

    def __init__(self, store: Store, folder: str, epoch: int, stats: WriterStats, pool: Pool | None) -> None:
        self._store = store
        self._folder = folder
        self._epoch = epoch
        self._names = itertools.count()
        self._stats = stats
        self._stats_lock = threading.Lock()
        self._pool = pool
        self.failure: BaseException | None = None

    def name(self) -> str:
        return f"{self._folder}/{next(self._names)}"

    def encode(self, do: Callable[[Scratch], None], scratch: Scratch) -> None:
        began = time.perf_counter()
        do(scratch)
        self.note(encode=time.perf_counter() - began)

    def note(self, nbytes: int = 0, **seconds: float) -> None:
        """Count bytes and seconds, from whichever thread."""
        with self._stats_lock:
            self._stats.nbytes_encoded += nbytes
            for what, spent in seconds.items():
                self._stats.seconds[what] += spent

    def _failed(self, key: str, error: BaseException) -> None:
        if self.failure is None:
            # Once: on a full disk every object of a record fails.
            _log.info("%s could not be written, the next commit tries again or tells why: %s", key, error)
        self.failure = error

    def make(self, item: StagedObject, scratch: Scratch) -> None:
        assert item.shard is not None
        began = time.perf_counter()
        try:
            item.pieces = item.shard.finish(scratch)
        except BaseException as error:
            self._failed(item.key, error)
            raise
        item.nbytes = sum(map(len, item.pieces))
        item.shard = None
        self.note(encode=time.perf_counter() - began)

    def stage(self, item: StagedObject, scratch: Scratch) -> None:
        if item.shard is None:
            self._stage(item)
            return
        # What fails here stops the line, so that the shard does not grow meanwhile.
        self.make(item, scratch)
        if self._pool is not None:
            self._pool.count(item.nbytes)
        try:
            self._stage(item)
        finally:
            if self._pool is not None:
                self._pool.count(-item.nbytes)

    def _stage(self, item: StagedObject) -> None:
        key = self.name()
        began, synced = time.perf_counter(), sync_time()
        try:
            if item.pieces is None:
                # It was placed, and the sync of its name failed: its bytes lie under its key.
                data = read_whole(self._store, item.key, item.nbytes)
                if data is None:
                    raise StoreError(f"{item.key}: gone after the sync of its folder failed; roll back", kind="io")
                item.pieces = [data]
            self._store.stage(key, item.pieces, sync=item.must_sync)
        except StoreError as error:
            item.error = fenced(self._store, self._epoch, error)
            self._failed(item.key, item.error)
        except Exception as error:  # noqa: BLE001 (kept for the next arrive; a dead thread would hang flush)
            item.error = error
            self._failed(item.key, error)
        else:
            item.tail = bytes(item.pieces[-1])[-_TAIL_NBYTES:]
            item.staged_key, item.pieces, item.error = key, None, None
            synced = sync_time() - synced
            self.note(item.nbytes, write=time.perf_counter() - began - synced, sync=synced)
        if item.is_borrowing and item.pieces is not None:
            # The next try comes when the caller has its block back. Without memory for a copy the job fails as a whole:
            # in the background it keeps its loan, and without threads the record was taken in part.
            item.pieces = [bytes(p) for p in item.pieces]
        item.is_borrowing = False
        item.is_queued = False

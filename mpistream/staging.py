"""Objects on their way to their keys: encoded, then staged, then placed.

The memory of an object is released when it is staged, that is written whole under this writer's stage
folder and, if asked for, synced; until then a failed write can be tried again from memory. A sync that
failed is never tried again on the same file: what the system did with the dirty pages is unknown
(fsync(2), "EIO"), so the next try writes a new file.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpistream.errors import FencedError, ProtocolError, StoreError
from mpistream.fence import fenced
from mpistream.pipeline import Line, Loan, Member, Pool
from mpistream.staged import StagedObject, Work
from mpistream.stats import WriterStats
from mpistream.store import Store
from mpistream.zarr3.shard import Scratch

__all__ = ["Stager"]

# An object up to this size is written in a fraction of the time that its sync waits.
_SMALL_NBYTES = 1024 * 1024


class Stager:
    """Stages and places this writer's objects, and has the records encoded that go into them.

    Parameters
    ----------
    store
        Where to.
    folder
        This writer's stage folder. It was made at open and is never made again: that it is gone is how a
        writer learns that it was fenced.
    epoch
        This writer's epoch.
    threads
        0: everything is done in the calling thread. Otherwise so many threads of the pool work behind the caller's
        back.
    max_pending_nbytes
        Bytes that may wait for them; more block the caller.
    pool
        Whose threads; by default one of its own.
    stats
        Where they are counted.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        epoch: int,
        *,
        threads: int,
        max_pending_nbytes: int,
        pool: Pool | None = None,
        stats: WriterStats | None = None,
    ) -> None:
        self._store = store
        self._epoch = epoch
        stats = stats or WriterStats()
        self._scratch = Scratch()
        # Folders whose names were made durable here. Each holds an object that was placed, and within an epoch nobody
        # removes a folder, nor renames another one over it while it is not empty.
        self._durable_folders: dict[str, None] = {}
        self._pool: Pool | None = None
        self._member = Member(threads, max_pending_nbytes, stats)
        if threads > 0:
            self._pool = pool or Pool()
            self._pool.join(self._member)
            # The pool knows the member, not this object: a writer that nobody closed can still go.
            weakref.finalize(self, self._pool.leave, self._member)
        self._work = Work(store, folder, epoch, stats, self._pool)

    # Records

    def new_line(self, *, waits: bool = False) -> Line:
        """Return a line for the jobs of one shard, or for those that wait for a disk."""
        return Line(self._member, waits=waits)

    def lend(self, blocks: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Loan]:
        """Lend memory for the blocks of a record, as `Pool.lend` does."""
        assert self._pool is not None
        return self._pool.lend(self._member, blocks)

    def give_back(self, loans: Sequence[Loan]) -> None:
        """Say that the caller is done with it."""
        if self._pool is not None:
            self._pool.give_back(loans)

    def encode(self, do: Callable[[Scratch], None]) -> None:
        """Encode now."""
        self._work.encode(do, self._scratch)

    def encode_in(self, line: Line, do: Callable[[Scratch], None], loan: Loan | None) -> None:
        """Encode in the background what lies in a loan, when it is its turn."""
        assert self._pool is not None
        self._pool.add(line, functools.partial(self._work.encode, do), loan=loan)

    def do_in(self, line: Line, do: Callable[[], None]) -> None:
        """Let a thread do something that raises nothing, when it is its turn in a line."""
        assert self._pool is not None
        self._pool.add(line, lambda _: do())

    def wait_for(self, line: Line, timeout: float | None = None) -> bool:
        """Wait until nothing of a line is on its way, or for so many seconds; return whether nothing is."""
        return self._pool is None or self._pool.wait_for(line, timeout)

    # Objects

    @property
    def is_synchronous(self) -> bool:
        """Whether what is submitted is staged at once."""
        return self._pool is None

    def make(self, item: StagedObject) -> None:
        """Make the bytes of an object of a shard now."""
        self._work.make(item, self._scratch)

    def submit(self, item: StagedObject) -> None:
        """Stage an object, now or in the background; a failure is kept in ``item.error``."""
        if self._pool is None:
            self._work.stage(item, self._scratch)
            return
        # One that is made in the background is counted once it is.
        self._pool.reserve(self._member, item.nbytes)
        item.is_queued = True
        item.line = item.line or Line(self._member, waits=item.must_sync and item.nbytes <= _SMALL_NBYTES)
        loan, item.loan = item.loan, None
        self._pool.add(item.line, functools.partial(self._work.stage, item), loan=loan, nbytes=item.nbytes)

    def stage(self, items: Sequence[StagedObject]) -> None:
        """Stage objects now, whatever else waits; raise the first failure."""
        before = self._work.failure
        for item in items:
            self._work.stage(item, self._scratch)
        try:
            _raise_first(items)
        finally:
            # Said now: who looks for failures of the background shall not find it a second time, but one of its own.
            if any(self._work.failure is item.error for item in items):
                self._work.failure = before
            for item in items:
                item.error = None

    @property
    def failure(self) -> BaseException | None:
        """What went wrong last, until it is tried again."""
        return self._work.failure

    def wait(self) -> None:
        """Wait until nothing of this writer is on its way."""
        if self._pool is not None:
            self._pool.wait(self._member)

    def settle(self, item: StagedObject) -> None:
        """Wait until an object is made, and raise what prevents that."""
        if self._pool is None or item.line is None:
            return
        self._pool.wait_for(item.line)
        if item.shard is not None:
            self._pool.resume(self._member)
            self._pool.wait_for(item.line)
            if item.line.error is not None:
                raise item.line.error

    def retry(self, items: Sequence[StagedObject]) -> None:
        """Do again what could not be done, wait for it, and raise the first failure that remains."""
        self.wait()
        self._work.failure = None
        if self._pool is not None:
            self._pool.resume(self._member)
            self._pool.wait(self._member)
            if (error := self._pool.failure(self._member)) is not None:
                raise error
        for item in items:
            if not item.is_staged:
                if item.shard is not None and item.line is not None and item.line.is_dropped:
                    # Records that it is to hold never came into the shard: made now it would lack them.
                    raise ProtocolError(
                        f"{item.key}: what was on its way to it was dropped, in a rollback that failed, at the end of "
                        "the interpreter or in a forked process",
                        kind="dropped",
                    )
                self._work.stage(item, self._scratch)
        _raise_first(items)

    def kick(self, items: Sequence[StagedObject]) -> None:
        """Let what could not be done be done again in the background, and raise the first failure."""
        if self._pool is None:
            self.retry(items)
            return
        failure = self._pool.failure(self._member)
        self._work.failure = None
        self._pool.resume(self._member)
        for item in items:
            # In this order: a thread notes that it is staged before that it is no longer queued.
            if not item.is_queued and not item.is_staged:
                failure = failure or item.error
                item.error = None
                self.submit(item)
        if failure is not None:
            raise failure

    def place(self, items: Sequence[StagedObject], *, sync: bool) -> None:
        """Rename staged objects to their keys and sync the folders.

        Raises
        ------
        FencedError
            When a newer epoch removed the stage folder.
        StoreError
            For the first object that could not be placed.
        """
        for item in items:
            if not item.is_placed:
                self._place(item)
        if not sync or not items:
            return
        try:
            began = time.perf_counter()
            self._store.sync_folders([i.key for i in items], self._durable_folders)
            self._work.note(sync=time.perf_counter() - began)
        except StoreError:
            # The names may or may not be durable: take the objects back, so that the next try renames anew.
            for item in items:
                item.is_placed, item.staged_key = False, None
            raise

    def remove(self, key: str, *, sync: bool = False) -> None:
        """Remove an object or a whole folder, by way of the stage folder: a writer that was fenced removes nothing.

        With ``sync`` it stays removed after a loss of power.

        Raises
        ------
        FencedError
            When a newer epoch removed the stage folder.
        """
        name = self.name()
        self._durable_folders.clear()
        try:
            is_moved = self._store.move(key, name, parents=False, sync=False)
            if sync:
                try:
                    # Also when there was nothing to move: an earlier try may have ended between the two.
                    self._store.sync_folders([key])
                except StoreError as error:
                    if is_moved or error.kind != "gone":
                        raise
            if is_moved:
                self._store.delete_tree(name)
        except StoreError as error:
            raise self.fenced(error) from error

    def discard(self, items: Iterable[StagedObject]) -> None:
        """Forget objects that will not be placed, and remove what is staged of them."""
        items = list(items)
        for item in items:
            if self._pool is not None and item.line is not None:
                self._pool.wait_for(item.line)
        self._remove_staged(items)

    def drop(self, items: Iterable[StagedObject]) -> None:
        """Give up whatever is on its way, and forget these objects."""
        if self._pool is not None:
            self._pool.drop(self._member)
        self._work.failure = None
        self._remove_staged(items)

    def _remove_staged(self, items: Iterable[StagedObject]) -> None:
        for item in items:
            if item.staged_key is not None and not item.is_placed:
                # It lies in the stage folder, which is removed at close or by the next resume in any case.
                with contextlib.suppress(StoreError):
                    self._store.delete(item.staged_key)

    def close(self) -> None:
        """Leave the pool, whose threads end with the last writer; what is still queued is not written."""
        if self._pool is not None:
            self._pool.close(self._member)
            self._pool = None

    def name(self) -> str:
        """Return a new key in the stage folder."""
        return self._work.name()

    def fenced(self, error: StoreError) -> FencedError | StoreError:
        """Return what a failure of kind ``gone`` means: fenced, if there is a higher epoch."""
        return fenced(self._store, self._epoch, error)

    def _place(self, item: StagedObject) -> None:
        assert item.staged_key is not None, "only what is staged can be placed"
        try:
            self._store.place(item.staged_key, item.key)
        except StoreError as error:
            meaning = self.fenced(error)
            # NFS sends a rename again when the answer was lost, and then says ENOENT though it was done.
            if error.kind != "gone" or meaning is not error or not self._is_in_place(item):
                raise meaning from error
        item.is_placed = True

    def _is_in_place(self, item: StagedObject) -> bool:
        reader = self._store.open(item.key)
        if reader is None:
            return False
        try:
            n = len(item.tail)
            return reader.nbytes == item.nbytes and reader.read(item.nbytes - n, n) == item.tail
        finally:
            reader.close()


def _raise_first(items: Iterable[StagedObject]) -> None:
    for item in items:
        if item.error is not None:
            raise item.error

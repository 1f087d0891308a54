"""Objects on their way to their keys: encoded, then staged, then placed.

The memory of an object is released when it is staged, that is written whole under this writer's stage
folder and, if asked for, synced; until then a failed write can be tried again from memory. A sync that
failed is never tried again on the same file: what the system did with the dirty pages is unknown
(fsync(2), "EIO"), so the next try writes a new file.

The writers of one communicator share a `Pool`: one thread, and one bound for the bytes that wait for it. So a program
with ten streams has the memory and the thread of one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from mpistream.errors import FencedError, StoreError
from mpistream.manifest import EPOCHS_FOLDER, parse_epoch
from mpistream.store import Store

__all__ = ["Pool", "StagedObject", "Stager", "fenced", "highest_epoch", "pool_of"]

# Enough to tell one object from another: a shard ends with its index and the index's checksum.
_TAIL_NBYTES = 64


def highest_epoch(store: Store) -> int | None:
    """Return the highest epoch that was ever claimed in a store, None when none was.

    Not collective.
    """
    found = [e for name in store.list(EPOCHS_FOLDER) if (e := parse_epoch(name)) is not None]
    return max(found, default=None)


def fenced(store: Store, epoch: int, error: StoreError) -> FencedError | StoreError:
    """Return what a failure of the store means to a writer of an epoch.

    Not collective.

    Returns
    -------
    For a failure of kind ``gone``, and when there is a higher epoch, a FencedError; otherwise the error itself.
    """
    if error.kind == "gone":
        try:
            highest = highest_epoch(store)
        except StoreError:
            return error
        if highest is not None and highest > epoch:
            return FencedError(
                f"{store.url}: epoch {highest} took the store over from epoch {epoch}; this writer must stop, its "
                "uncommitted records are lost"
            )
    return error


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
    pieces: Sequence[Any] | None
    """The bytes, as buffers; None once they are staged, and until ``make`` has made them."""
    nbytes: int
    """How many; until they are made, those that they are made of."""
    must_sync: bool
    staged_key: str | None = None
    is_placed: bool = False
    make: Callable[[], Sequence[Any]] | None = None
    """What makes the bytes, where they are made when it is staged; a call that fails may be made again."""
    tail: bytes = field(default=b"")
    error: Exception | None = None

    def read_back(self, store: Store) -> bytes | None:
        """Return its bytes, from memory or from where they lie."""
        pieces = self.pieces  # the thread that stages sets staged_key first, then lets the pieces go
        if pieces is not None:
            return b"".join(bytes(p) for p in pieces)
        # Placed, or it was and the sync of its name failed: then its bytes lie under its key, as `_Work.stage` says.
        return store.read(self.key if self.is_placed or self.staged_key is None else self.staged_key)


class Stager:
    """Stages and places this writer's objects.

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
        0: write in the calling thread. Otherwise the pool's thread writes and syncs behind the caller's back.
    max_pending_nbytes
        Encoded bytes that may wait for that thread; more block the caller.
    pool
        Whose thread; by default one of its own.
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
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._work = _Work(store, folder, epoch)
        self._pool: Pool | None = None
        if threads > 0:
            self._pool = pool or Pool()
            self._pool.join(self._work, max_pending_nbytes)
            # The pool knows the work, not this object: a writer that nobody closed can still go.
            weakref.finalize(self, self._pool.leave, self._work)

    def submit(self, item: StagedObject) -> None:
        """Stage an object, now or in the background; a failure is kept in ``item.error``."""
        if self._pool is None:
            self._work.stage(item)
        else:
            self._pool.put(self._work, item)

    def wait(self) -> None:
        """Wait until nothing of this writer is on its way."""
        if self._pool is not None:
            self._pool.wait(self._work)

    @property
    def failure(self) -> Exception | None:
        """What went wrong last, until it is tried again."""
        return self._work.failure

    def take_made_nbytes(self) -> int:
        """Return the bytes that `StagedObject.make` has made since the last call; after `wait`."""
        made, self._work.made_nbytes = self._work.made_nbytes, 0
        return made

    def retry(self, items: Iterable[StagedObject]) -> None:
        """Stage again what could not be staged, and raise the first failure that remains."""
        self.wait()
        self._work.failure = None
        for item in items:
            if item.staged_key is None and not item.is_placed:
                self._work.stage(item)
        for item in items:
            if item.error is not None:
                raise item.error

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
            self._store.sync_folders([i.key for i in items])
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
        self.wait()
        for item in items:
            if item.staged_key is not None and not item.is_placed:
                # It lies in the stage folder, which is removed at close or by the next resume in any case.
                with contextlib.suppress(StoreError):
                    self._store.delete(item.staged_key)

    def close(self) -> None:
        """Leave the pool, whose thread ends with the last writer; what is still queued is not written."""
        if self._pool is not None:
            self._pool.close(self._work)
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


class Pool:
    """The thread that stages for several writers of this process, and the bytes that may wait for it.

    The bound is the largest of theirs. The thread begins with the first writer that joins and ends with the last.
    """

    def __init__(self) -> None:
        # An object with its writer, or None: a writer has left. Its `put` alone may be called by the garbage collector,
        # which can run in any thread, at any line, and so whatever lock is held.
        self._queue: SimpleQueue[tuple[_Work, StagedObject, int] | None] = SimpleQueue()
        # All below is guarded by _changed, and so is the n_pending of every work.
        self._changed = threading.Condition()
        self._pending_nbytes = 0
        self._in_flight: _Work | None = None
        self._bounds: dict[_Work, int] = {}
        self._thread: threading.Thread | None = None

    def join(self, work: _Work, max_pending_nbytes: int) -> None:
        """Let the thread stage for a writer, too."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="mpistream-stage", daemon=True)
                thread.start()
                self._thread = thread
            self._bounds[work] = max_pending_nbytes

    def leave(self, work: _Work) -> None:
        """Stage nothing more for a writer; what is queued of it is dropped. It takes no lock."""
        work.has_left = True
        self._queue.put(None)

    def close(self, work: _Work) -> None:
        """Leave, and wait for what is being written; with the last writer, for the end of the thread."""
        with self._changed:
            self.leave(work)
            self._forget_left()
            thread = self._thread
            while self._in_flight is work or (thread is not None and self._thread is thread and not self._bounds):
                self._changed.wait()
            has_ended = self._thread is not thread
        if thread is not None and has_ended:
            thread.join()

    def put(self, work: _Work, item: StagedObject) -> None:
        """Queue an object; wait while more than the bound is on its way."""
        with self._changed:
            # An object larger than the bound still goes, alone.
            while self._pending_nbytes and self._pending_nbytes + item.nbytes > max(self._bounds.values(), default=0):
                self._changed.wait()
            work.n_pending += 1
            self._pending_nbytes += item.nbytes
            nbytes = item.nbytes
        self._queue.put((work, item, nbytes))

    def wait(self, work: _Work) -> None:
        """Wait until nothing of a writer is on its way."""
        with self._changed:
            while work.n_pending:
                self._changed.wait()

    def _run(self) -> None:
        while self._has_more():
            pass

    def _has_more(self) -> bool:
        """Wait for the next object and stage it; False at the end of the thread. While it waits it holds no memory."""
        found = self._queue.get()
        if found is None:
            with self._changed:
                self._forget_left()
                if self._bounds:
                    return True
                self._thread = None
                self._changed.notify_all()
                return False
        work, item, nbytes = found
        with self._changed:
            self._in_flight = None if work.has_left else work
        try:
            if self._in_flight is work:
                work.stage(item)
        finally:
            with self._changed:
                self._in_flight = None
                work.n_pending -= 1
                self._pending_nbytes -= nbytes
                self._changed.notify_all()
        return True

    def _forget_left(self) -> None:
        self._bounds = {work: bound for work, bound in self._bounds.items() if not work.has_left}
        self._changed.notify_all()


_pools: weakref.WeakValueDictionary[tuple[int, Hashable], Pool] = weakref.WeakValueDictionary()
_pools_lock = threading.Lock()


def pool_of(communicator: Hashable) -> Pool:
    """Return the pool of the writers of one communicator in this process.

    Not collective.

    Parameters
    ----------
    communicator
        What stands for it.
    """
    # A forked child has none of its parent's threads.
    key = os.getpid(), communicator
    with _pools_lock:
        pool = _pools.get(key)
        if pool is None:
            pool = _pools[key] = Pool()
        return pool


class _Work:
    """What is done for one writer, apart from `Stager` so that a thread does not keep that alive."""

    def __init__(self, store: Store, folder: str, epoch: int) -> None:
        self._store = store
        self._folder = folder
        self._epoch = epoch
        self._names = itertools.count()
        self.n_pending = 0
        """Objects on their way; guarded by the pool."""
        self.has_left = False
        """Whether nothing more shall be staged."""
        self.failure: Exception | None = None
        self.made_nbytes = 0

    def name(self) -> str:
        return f"{self._folder}/{next(self._names)}"

    def stage(self, item: StagedObject) -> None:
        key = self.name()
        try:
            if item.make is not None:
                item.pieces = item.make()
                item.nbytes, item.make = sum(len(p) for p in item.pieces), None
                self.made_nbytes += item.nbytes
            if item.pieces is None:
                # It was placed, and the sync of its name failed: its bytes lie under its key.
                data = self._store.read(item.key)
                if data is None:
                    raise StoreError(f"{item.key}: gone after the sync of its folder failed; roll back", kind="io")
                item.pieces = [data]
            self._store.stage(key, item.pieces, sync=item.must_sync)
        except StoreError as error:
            item.error = self.failure = fenced(self._store, self._epoch, error)
            return
        except Exception as error:  # noqa: BLE001 (kept for the next arrive; a dead thread would hang flush)
            item.error = self.failure = error
            return
        item.tail = bytes(item.pieces[-1])[-_TAIL_NBYTES:]
        item.staged_key, item.pieces, item.error = key, None, None

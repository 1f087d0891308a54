"""Boxes out of many shards of a store, in a few threads where there is enough of it.

The calling thread and its helpers take one batch of inner chunks after the other (`mpistream.zarr3.extract`). Who comes
for the next one opens the next shard, if all of the last is given out; decoding, and most of reading, runs without
Python's lock. A shard has one descriptor, which is closed with its last batch, so few are open at any time.

The helpers live as long as the call: they cost some ten microseconds, and a process that forks has none of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from mpistream.errors import FormatError
from mpistream.store import ObjectReader, Readable
from mpistream.tiling import Box
from mpistream.zarr3.extract import Batch, DecodeScratch, plan_reads
from mpistream.zarr3.shard import ShardSpec

__all__ = ["Wanted", "n_cores", "read_boxes"]

# A thread is worth its start when it decodes for a millisecond.
_NBYTES_PER_THREAD = 4 * 1024 * 1024
# Beyond a few the page cache, or the network, is what limits.
_MAX_THREADS = 8
# Ranks on this node, as MPICH and its children, and Open MPI, tell each process.
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")

Wanted = tuple[str, Box, NDArray[Any]]
"""Key of a shard, a box in it, and an array of the box's shape."""


def n_cores(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of cores that a read may use, at least 1.

    Not collective.

    Parameters
    ----------
    environment
        Process environment: a launcher names in it the ranks on a node, and a job its cores a task.

    Notes
    -----
    Ranks that may all run on every core of the node share them. Nobody is asked: a reader may be any process.
    """
    known = os.environ if environment is None else environment

    def number(name: str) -> int | None:
        text = known.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None

    n_node = os.cpu_count() or 1
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else n_node
    n_ranks = next((found for name in _LOCAL_SIZES if (found := number(name)) is not None), 1)
    if n == n_node:
        n //= n_ranks
    return max(1, min(n, number("SLURM_CPUS_PER_TASK") or n))


def read_boxes(
    store: Readable, spec: ShardSpec, wanted: Iterable[Wanted], nbytes: int, absent: Callable[[str, NDArray[Any]], None]
) -> None:
    """Decode boxes of shards into arrays.

    Not collective.

    Parameters
    ----------
    store
        The store.
    spec
        The shards.
    wanted
        What to read; no two arrays share a cell.
    nbytes
        How much that is, decoded.
    absent
        Called with the key and the array of a shard that is not there.

    Raises
    ------
    FormatError
        With the key, for the first shard of ``wanted`` that is damaged.
    StoreError
        When it can't be read.
    """
    work = _Work(store, spec, wanted, absent)
    n_threads = 1
    if nbytes >= 2 * _NBYTES_PER_THREAD:
        n_threads = min(nbytes // _NBYTES_PER_THREAD, n_cores(), _MAX_THREADS)
    helpers = [threading.Thread(target=work.run, name="mpistream-read", daemon=True) for _ in range(n_threads - 1)]
    try:
        for helper in helpers:
            helper.start()
        work.run()
    finally:
        work.stop()
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
        work.close()
    work.raise_first()


class _Shard:
    """A shard that is being read."""

    def __init__(self, key: str, opened: ObjectReader) -> None:
        self.key = key
        self.opened = opened
        self.n_left = 0
        """Batches that are not done; guarded by the work's lock."""


class _Work:
    """Batches that are given out one after the other."""

    def __init__(
        self, store: Readable, spec: ShardSpec, wanted: Iterable[Wanted], absent: Callable[[str, NDArray[Any]], None]
    ) -> None:
        self._store = store
        self._spec = spec
        self._absent = absent
        self._lock = threading.Lock()
        # All below is guarded by _lock.
        self._batches = self._plan(wanted)
        self._n_given = 0
        self._is_stopped = False
        self._open: dict[str, _Shard] = {}
        # Number of a batch -> what went wrong. They are given out in order, so the first of all is among them.
        self._errors: dict[int, BaseException] = {}

    def run(self) -> None:
        """Do batches until there are no more, in any number of threads."""
        scratch = DecodeScratch()
        while (given := self._next()) is not None:
            number, shard, batch = given
            error: BaseException | None = None
            try:
                batch.decode(scratch)
            except FormatError as found:
                error = _with_key(shard.key, found)
            except BaseException as found:  # noqa: BLE001 (raised by the calling thread)
                error = found
            self._done(number, shard, error)

    def _next(self) -> tuple[int, _Shard, Batch] | None:
        with self._lock:
            if self._is_stopped:
                return None
            try:
                shard, batch = next(self._batches)
            except StopIteration:
                self._is_stopped = True
                return None
            except BaseException as error:  # noqa: BLE001 (raised by the calling thread)
                self._fail(self._n_given, error)
                return None
            self._n_given += 1
            return self._n_given - 1, shard, batch

    def _plan(self, wanted: Iterable[Wanted]) -> Iterator[tuple[_Shard, Batch]]:
        for key, box, out in wanted:
            opened = self._store.open(key)
            if opened is None:
                self._absent(key, out)
                continue
            shard = self._open[key] = _Shard(key, opened)
            try:
                batches = plan_reads(self._spec, opened, box, out)
            except FormatError as error:
                raise _with_key(key, error) from error
            shard.n_left = len(batches)
            if not batches:
                self._close(shard)
            for batch in batches:
                yield shard, batch

    def _done(self, number: int, shard: _Shard, error: BaseException | None) -> None:
        with self._lock:
            shard.n_left -= 1
            if shard.n_left == 0:
                self._close(shard)
            if error is not None:
                self._fail(number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        self._errors[number] = error
        self._is_stopped = True

    def _close(self, shard: _Shard) -> None:
        del self._open[shard.key]
        shard.opened.close()

    def stop(self) -> None:
        """Give nothing more out."""
        with self._lock:
            self._is_stopped = True

    def close(self) -> None:
        """Close what an error left open; no thread is at work any more."""
        for shard in list(self._open.values()):
            self._close(shard)

    def raise_first(self) -> None:
        """Raise what went wrong first, in the order of what was wanted."""
        if self._errors:
            raise self._errors[min(self._errors)]


def _with_key(key: str, error: FormatError) -> FormatError:
    found = FormatError(f"{key}: {error}", kind=error.kind)
    found.__cause__ = error
    return found

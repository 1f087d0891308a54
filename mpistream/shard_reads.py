"""Boxes out of many shards of a store, in a few threads where there is enough of it.

The threads take one batch of inner chunks after the other (`mpistream.zarr3.extract`). Who comes for the next one opens
the next shard, if all of the last is given out; decoding, and most of reading, runs without Python's lock. A shard has
one descriptor, which is closed with its last batch, so few are open at any time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray

from mpistream.errors import FormatError
from mpistream.store import ObjectReader, Readable
from mpistream.tiling import Box
from mpistream.together import run_together
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
    n_threads = 1
    if nbytes >= 2 * _NBYTES_PER_THREAD:
        n_threads = min(nbytes // _NBYTES_PER_THREAD, n_cores(), _MAX_THREADS)
    shards = _Shards(store, spec, absent)
    try:
        run_together(shards.jobs(wanted), n_threads)
    finally:
        shards.close()


class _Shards:
    """The shards that are open, and what is left to do of each."""

    def __init__(self, store: Readable, spec: ShardSpec, absent: Callable[[str, NDArray[Any]], None]) -> None:
        self._store = store
        self._spec = spec
        self._absent = absent
        self._scratch = threading.local()
        self._lock = threading.Lock()
        # Both by key, and guarded by _lock.
        self._opened: dict[str, ObjectReader] = {}
        self._n_left: dict[str, int] = {}

    def jobs(self, wanted: Iterable[Wanted]) -> Iterator[Callable[[], None]]:
        """Yield the batches, as calls that any thread may make; a shard is opened when its first one is asked for."""
        for key, box, out in wanted:
            opened = self._store.open(key)
            if opened is None:
                self._absent(key, out)
                continue
            with self._lock:
                self._opened[key] = opened
            try:
                batches = plan_reads(self._spec, opened, box, out)
            except FormatError as error:
                raise FormatError(f"{key}: {error}", kind=error.kind) from error
            # One more for this loop: a shard of which nothing is read is closed, too.
            self._n_left[key] = len(batches) + 1
            for batch in batches:
                yield partial(self._decode, key, batch)
            self._done(key)

    def _decode(self, key: str, batch: Batch) -> None:
        if not hasattr(self._scratch, "own"):
            self._scratch.own = DecodeScratch()
        try:
            batch.decode(self._scratch.own)
        except FormatError as error:
            raise FormatError(f"{key}: {error}", kind=error.kind) from error
        finally:
            self._done(key)

    def _done(self, key: str) -> None:
        with self._lock:
            self._n_left[key] -= 1
            if self._n_left[key] == 0:
                del self._n_left[key]
                self._opened.pop(key).close()

    def close(self) -> None:
        """Close what an error left open; no thread is at work any more."""
        for opened in self._opened.values():
            opened.close()

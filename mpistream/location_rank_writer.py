"""One writer of a location series, no communication: series in, staged and placed objects and a token out.

It is a `RankWriter` whose records are its own: no other rank has them, and they have no time.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from mpistream.arrays import ArraySpec
from mpistream.block import as_array, check_block
from mpistream.epoch import Share
from mpistream.errors import MPIStreamError, SchemaError
from mpistream.location_rows import Buffers, LocationRows, OpenChunk
from mpistream.locations import row_length
from mpistream.manifest import Manifest
from mpistream.options import Options
from mpistream.pipeline import Pool
from mpistream.ranges import Ranges, covers, inside, members
from mpistream.rank_writer import RankWriter
from mpistream.region import Region
from mpistream.staged import StagedObject
from mpistream.staging import Stager
from mpistream.store import Store

__all__ = ["LocationRankWriter", "Series", "rank_writer_of"]

Series = dict[str, NDArray[Any]]
"""Variable -> the series of one location, from the first time on, of a dtype that casts; shorter ones end before the
last time."""

# Kinds of dtypes of which one casts to another or does not, whatever the values.
_NUMBERS = set("biufc")
_NOTHING = contextlib.nullcontext()


class LocationRankWriter(RankWriter):
    """The part of one rank of a location series.

    Parameters
    ----------
    store, manifest, share, options, pool, n_cores
        As in `RankWriter`.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        share: Share,
        options: Options,
        pool: Pool | None = None,
        n_cores: int | None = None,
    ) -> None:
        self._series_rows: dict[str, LocationRows] = {}
        self._buffers: Buffers | None = None
        self._chunks: dict[int, OpenChunk] = {}
        _all.add(self)
        super().__init__(store, manifest, share, options, pool, n_cores)
        if self.stats.threads:
            self.stats.background = tuple(self._series_rows)
        # A variable that a location has not, or has cut short, is fill.
        self._none = {name: np.empty(0, a.dtype) for name, a in self._streaming.items()}
        # What each call needs of every variable is looked up once: a short series is copied in half a microsecond.
        self._length = row_length(self.schema)
        self._n_times = next(a.shape[0] for a in self._streaming.values())
        self._series_nbytes = sum(self._n_times * a.dtype.itemsize for a in self._streaming.values())
        # Variable -> dtypes of which an array may be copied into its row as it is.
        self._known_dtypes = {name: {a.dtype} for name, a in self._streaming.items()}
        self._casts = False
        # Looked for in vain a chunk costs more than the series.
        self._has_formats = all(rows.has_format for rows in self._series_rows.values())

    def _shard_rows(self, array: ArraySpec, stager: Stager) -> LocationRows:
        assert self._share.records is not None
        assert self.schema.n_total is not None
        if self._buffers is None:
            self._buffers = Buffers(self._max_open_nbytes)
        rows = self._series_rows[array.name] = LocationRows(
            array,
            self.schema.key_separator,
            store=self._store,
            records=self._share.records,
            n_total=self.schema.n_total,
            buffers=self._buffers,
            chunks=self._chunks,
            is_durable=self._is_durable,
            stager=stager,
        )
        return rows

    def _write_nbytes(self, array: ArraySpec) -> int:
        """What is written of an array at a time, before compression: a chunk."""
        return array.dtype.itemsize * math.prod(array.resolved_shard_shape)

    def _bound_open_rows(self) -> None:
        while sum(rows.nbytes for rows in self._series_rows.values()) > self._max_open_nbytes:
            several = [rows for rows in self._series_rows.values() if rows.n_open > 1]
            if not several:
                return
            for rows in several:
                self._submit(rows.leave_oldest())

    @property
    def last_t(self) -> float | None:
        """Nothing: a location has no time."""
        return None

    def times(self, records: Ranges) -> list[float]:  # noqa: ARG002 (as of other records)
        """Nothing: a location has no time."""
        return []

    @property
    def share(self) -> Share:
        """What this rank holds and writes."""
        return self._share

    def is_written(self, record: int) -> bool:
        """Whether a location was written since the last commit."""
        return record in self._pending

    def is_committed(self, record: int) -> bool:
        """Whether a location is committed."""
        return covers(self._manifest.committed, record)

    def checked_series(self, location: Any, series: Mapping[str, Any]) -> Series:
        """Return the series of a location, checked; nothing of them is taken.

        Raises
        ------
        SchemaError
            Unknown variable, a series that is too long, or of a dtype that loses values.
        """
        if type(series) is not dict and not isinstance(series, Mapping):
            raise SchemaError(
                f"location {location!r}: a {type(series).__name__}; give a mapping variable -> series", kind="series"
            )
        found = self._none.copy()
        for name, value in series.items():
            if name not in found:
                raise self._unknown(name, tuple(self._streaming))
            # In short series what is looked at twice costs more than the copy.
            if (
                type(value) is ndarray
                and value.dtype in self._known_dtypes[name]
                and value.ndim == 1
                and len(value) <= self._n_times
            ):
                found[name] = value
            else:
                found[name] = self._as_series(f"location {location!r}, variable {name!r}", name, value)
        return found

    def _as_series(self, what: str, name: str, value: Any) -> NDArray[Any]:
        """Return a series whose dtype casts to its variable's."""
        dtype = self._streaming[name].dtype
        block = as_array(what, value)
        if block.ndim != 1 or len(block) > self._n_times:
            raise SchemaError(
                f"{what}: series of shape {block.shape}; give at most {self._n_times} values along time", kind="shape"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            found = check_block(name, value, block.shape, dtype).astype(dtype, copy=False)
        if type(value) is ndarray and {value.dtype.kind, dtype.kind} <= _NUMBERS:
            # Whatever its values: the copy can cast the next one.
            self._known_dtypes[name].add(value.dtype)
            self._casts = True
        return found

    def check_may_take(self, what: str, record: int) -> None:
        """Refuse a location that is there already.

        Raises
        ------
        SchemaError
            Kind ``written`` or ``committed``.
        ProtocolError
            After a failure that left the writer's state unknown.
        """
        self._check_whole()
        if self.is_written(record):
            raise SchemaError(
                f"{what} was written since the last commit; rollback() drops what is not committed", kind="written"
            )
        if self.is_committed(record):
            raise SchemaError(
                f"{what} is committed; call invalidate([{record}]) on every rank before it is rewritten",
                kind="committed",
            )

    def raise_failure(self) -> None:
        """Raise what went wrong behind the caller's back since the last commit was tried.

        Raises
        ------
        StoreError, FencedError, FormatError
            As it was raised there.
        ProtocolError
            After a failure that left the writer's state unknown.
        """
        self._check_whole()
        if (failure := self._stager.failure) is not None:
            raise failure

    def take_whole(self, location: int, series: Mapping[str, Any]) -> bool:
        """Put a location in the place that is known for it, if it is this rank's, new, and whole; or take nothing.

        What it does not take is not wrong by that. It is the short way of `checked_series` and `take_series`, for all
        variables in their dtypes, at full length and contiguous: a short series costs its copy and little else.
        """
        chunk = self._chunks.get(location // self._length)
        if chunk is None or location not in chunk.free:
            return False
        # The last one may fill the rows.
        if len(chunk.free) == 1 or self._broken is not None or self._stager.failure is not None:
            return False
        start = (location - chunk.first) * self._n_times
        part = slice(start, start + self._n_times)
        try:
            # Other mappings may make values as they are asked.
            if type(series) is not dict or len(series) != len(chunk.targets):
                return False
            for name, target, strides in chunk.targets:
                values = series[name]
                # `memoryview` compares dtypes and lengths, but is slow where values don't lie side by side. What was
                # copied of a location that is refused lies where nothing was, and nothing is.
                if type(values) is not ndarray or values.strides != strides:
                    return False
                copied: Any = values  # a buffer, whether or not the types of the Python that runs say so
                target[part] = copied
        except (KeyError, TypeError, ValueError):
            return False
        chunk.new.add(location)
        self._pending[location] = math.nan
        chunk.free.remove(location)
        stats = self.stats
        stats.n_records += 1
        stats.nbytes_in += self._series_nbytes
        return True

    def take_series(self, record: int, series: Series) -> None:
        """Put a location that was checked."""
        row = record // self._length
        chunk = self._chunks.get(row)
        try:
            # Rows are open for all variables or for none, unless that has failed once: then nothing is taken.
            if chunk is None:
                self._open(record)
            full = self._put(record, series)
            self._pending[record] = math.nan
            if chunk is not None:
                chunk.free.discard(record)
            elif self._has_formats:
                self._know(row)
            for item in full:
                # What can't be made now, without a thread, is kept as what a thread can't make: for the next call.
                with contextlib.suppress(MPIStreamError):
                    self._submit([item])
        except MPIStreamError:
            raise  # a row that can't be read back
        except BaseException as error:
            # Some variables may have it and others not, and some objects may be nowhere: the next arrive tells all
            # ranks, rollback mends it.
            self._broken = error
            raise
        self.stats.n_records += 1

    def _put(self, record: int, series: Series) -> list[StagedObject]:
        """Put a location into its rows, which are open; return the objects of those that it fills."""
        full: list[StagedObject] = []
        nbytes = 0
        # Narrowing a float can overflow to infinity: that is what the dtype asked for. To say so takes as long as two
        # copies, so where nothing is cast it is not said.
        with np.errstate(over="ignore", invalid="ignore") if self._casts else _NOTHING:
            for name, rows in self._series_rows.items():
                values = series[name]
                nbytes += len(values) * rows.array.dtype.itemsize
                if items := rows.put(record, (values,)):
                    full += items
        self.stats.nbytes_in += nbytes
        return full

    def _know(self, row: int) -> None:
        """Note where series go, if the row is open for all variables."""
        held = self._share.region
        assert isinstance(held, Region)
        first = row * self._length
        there = range(first, first + self._length)
        new = self._pending.keys() & there
        targets: list[tuple[str, memoryview, tuple[int, ...]]] = []
        for name, rows in self._series_rows.items():
            if (memory := rows.target(row, new)) is None:
                return
            targets.append((name, memory, (memory.itemsize,)))
        # The row has locations of other ranks, too, where a share ends amid a chunk.
        start, stop = (0, 0) if held.is_empty else held.box[0]
        mine = range(max(first, start), min(there.stop, stop))
        committed = members(inside(self._manifest.committed, first, there.stop))
        self._chunks[row] = OpenChunk(first, set(mine).difference(committed, new), new, targets)

    def _open(self, record: int) -> None:
        for rows in self._series_rows.values():
            rows.open(record)
        self._bound_open_rows()


def rank_writer_of(
    store: Store,
    manifest: Manifest,
    share: Share,
    options: Options,
    pool: Pool | None = None,
    n_cores: int | None = None,
) -> RankWriter:
    """Return the writer of one rank of a stream, whatever its records are.

    Not collective.

    Parameters
    ----------
    store, manifest, share, options, pool, n_cores
        As in `RankWriter`.
    """
    made = LocationRankWriter if manifest.schema.is_location_series else RankWriter
    return made(store, manifest, share, options, pool, n_cores)


_all: weakref.WeakSet[LocationRankWriter] = weakref.WeakSet()


def _forget_chunks() -> None:
    # A forked child is told what it may not do by the long way.
    for writer in list(_all):
        writer._chunks.clear()


os.register_at_fork(after_in_child=_forget_chunks)

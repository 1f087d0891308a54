"""The writer of a location series: what a rank of a model of points calls.

It is a `StreamWriter` whose records are locations. Each rank writes those of its share, and what a commit commits are
the sets of all ranks together. What a rank holds of a chunk that another one writes it hands over when all commit.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from time import perf_counter
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpistream.agreement import Channel
from mpistream.arrays import Role
from mpistream.committing import on_every_rank
from mpistream.errors import CommitError, MPIStreamError, SchemaError, counted
from mpistream.location_rank_writer import LocationRankWriter, Series
from mpistream.locations import LOCATION_DIM
from mpistream.parallel import StreamWriter, others_of
from mpistream.ranges import Ranges, count, difference, members
from mpistream.region import Region
from mpistream.schema import StreamSchema

__all__ = ["LocationSeriesWriter", "writer_class"]

_MAX_NAMED = 8

# Far less than a lease is refreshed in; to ask its clock costs as much as to copy a short series.
_LEASE_SECONDS = 0.01


class LocationSeriesWriter(StreamWriter):
    """An open location series, on one rank; made by `write_open_locations`, `write_open` and `write_resume`."""

    _writer: LocationRankWriter

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        region, n = self._writer.region, self.schema.n_total or 0
        assert isinstance(region, Region)
        self._n_locations = n
        self._share = (n, n) if region.is_empty else region.box[0]
        self._numbers_of_ids: dict[str, int] = {}
        # Of the chunk that another rank writes: what waits for the next commit, and what that rank has and has not
        # committed yet. And what this rank got of others and could not take.
        self._lent: dict[int, Series] = {}
        self._handed_over: set[int] = set()
        self._got: dict[int, Series] = {}
        self._lease_due = 0.0
        self._seconds = self.stats.seconds

    @property
    def share(self) -> tuple[int, int]:
        """The locations that this rank writes, start and stop."""
        return self._share

    @property
    def n_records(self) -> int:
        """Locations that are committed, or were written on this rank."""
        return super().n_records + len(self._lent)

    def missing(self) -> list[int]:
        """Return the locations of this rank's share that are still to be written.

        Not collective.
        """
        to_do = difference((self.share,), self._stream.manifest.committed)
        return [i for i in members(to_do) if not self._is_written(i)]

    def _is_written(self, location: int) -> bool:
        return self._writer.is_written(location) or location in self._lent or location in self._handed_over

    def write_location(self, location: SupportsIndex | str, series: Mapping[str, ArrayLike]) -> None:
        """Put the series of one location.

        Not collective.

        Parameters
        ----------
        location
            Its number or its id; one of this rank's share, in any order, each once.
        series
            Variable -> values from the first time on, of a dtype that casts to the schema's without losing values
            (floats may be rounded). Times behind a short series are fill value, and so is a variable that is left
            out. Every array may be overwritten as soon as the call returns.

        Raises
        ------
        SchemaError
            On the calling rank, before anything is taken: a location that is unknown, outside the share, or there
            already; a variable that is unknown; a series of another shape or dtype.
        StoreError, FencedError, FormatError
            On the calling rank, before anything is taken: what an earlier call gave could not be written. It is
            kept; `commit` tries again.
        ProtocolError
            On the calling rank, when the writer is closed.

        Notes
        -----
        The series is copied into its chunk, and a chunk that is full is encoded and written in the background; the
        call waits while more than ``Options.max_pending_nbytes`` are on their way. Nothing is durable or visible
        until `commit` returns.
        """
        began = perf_counter()
        record: Any = location
        if type(location) is not int:
            self._check_open("write_location")
            record = self._record_of(location)
        if self._is_closed or self._channel.failure is not None or not self._writer.take_whole(record, series):
            self._take_location(location, series)
        ended = perf_counter()
        if ended >= self._lease_due:
            self._lease_due = ended + _LEASE_SECONDS
            self._keep_lease()
        self._seconds["record"] += ended - began

    def _take_location(self, location: SupportsIndex | str, series: Mapping[str, ArrayLike]) -> None:
        """Put whatever may be put, and say what is wrong with anything else."""
        self._check_open("write_location")
        writer = self._writer
        writer.raise_failure()
        record = self._record_of(location)
        start, stop = self._share
        if not start <= record < stop:
            raise SchemaError(
                f"{self._name(record)} is not in the share of rank {self._channel.rank}, {_range_text(start, stop)}; "
                "the rank that has it writes it",
                kind="share",
            )
        if record in self._lent or record in self._handed_over:
            raise SchemaError(f"{self._name(record)} was written since the last commit", kind="written")
        if writer.is_written(record) or writer.is_committed(record):
            writer.check_may_take(self._name(record), record)
        found = writer.checked_series(location, series)
        if (lent := writer.share.lent) is not None and lent[0] <= record < lent[1]:
            self._lent[record] = {name: values.copy() for name, values in found.items()}
        else:
            writer.take_series(record, found)

    def _record_of(self, location: SupportsIndex | str) -> int:
        if isinstance(location, str):
            if not self._numbers_of_ids:
                self._numbers_of_ids = {str(name): i for i, name in enumerate(self.reader.read_static(LOCATION_DIM))}
            if location not in self._numbers_of_ids:
                raise SchemaError(
                    f"location {location!r} is none of the {len(self._numbers_of_ids)} ids", kind="unknown"
                )
            return self._numbers_of_ids[location]
        try:
            record = -1 if isinstance(location, bool | np.bool_) else operator.index(location)
        except TypeError:
            record = -1
        if not 0 <= record < self._n_locations:
            raise SchemaError(
                f"location {location!r}: give an id, or the number of a location, 0 to {self._n_locations - 1}",
                kind="index",
            )
        return record

    def _name(self, record: int) -> str:
        return f"location {record} ({str(self.reader.read_static(LOCATION_DIM)[record])!r})"

    # Committing

    def _before_commit(self, channel: Channel, failure: MPIStreamError | None) -> MPIStreamError | None:
        """Hand over what other ranks write; return why this rank can't take part in the commit.

        Raises
        ------
        MPIStreamError
            On every rank, when one can't take part.
        """
        if not self._writer.share.is_lending:
            return failure
        lent = self._writer.share.lent
        to_rank = None if lent is None else lent[2]
        records = sorted(self._lent)
        gets = channel.exchange(
            "hand over",
            payload=[to_rank, records],
            failure=failure,
            answer=_by_target,
            others=others_of(channel),
        )
        names = [a.name for a in self.schema.arrays.values() if a.role is Role.VARIABLE]
        sends = [(to_rank, self._whole(name, records)) for name in names] if to_rank is not None and records else []
        receives = [
            (source, np.empty((len(found), *self.schema.arrays[name].shape), self.schema.arrays[name].dtype))
            for source, found in gets
            for name in names
        ]
        channel.swap(sends, receives)
        self._handed_over |= set(records)
        self._lent = {}
        arrays = iter(array for _, array in receives)
        for _, found in gets:
            by_name = {name: next(arrays) for name in names}
            self._got |= {r: {name: a[k] for name, a in by_name.items()} for k, r in enumerate(found)}
        try:
            while self._got:
                record, series = next(iter(self._got.items()))
                self._writer.take_series(record, series)
                del self._got[record]
        except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
            return on_every_rank(error, self._channel.rank)
        return None

    def _whole(self, name: str, records: list[int]) -> NDArray[Any]:
        """Return the series of some locations, of full length."""
        array = self.schema.arrays[name]
        whole = np.full((len(records), *array.shape), array.fill, array.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for k, record in enumerate(records):
                series = self._lent[record][name]
                whole[k, : len(series)] = series
        return whole

    def _after_commit(self) -> None:
        self._handed_over = {r for r in self._handed_over if not self._writer.is_committed(r)}

    def rollback(self) -> None:
        """Drop what is not committed, on every rank.

        Collective.

        Raises
        ------
        CommitError
            As `StreamWriter.rollback`.
        """
        self._check_open("rollback")
        self._lent, self._handed_over, self._got = {}, set(), {}
        super().rollback()

    def close(self, *, partial: bool = False) -> None:
        """Commit what is pending and release everything; a second call does nothing.

        Collective.

        Parameters
        ----------
        partial
            Whether locations may be missing, to be written after a `write_resume`; the same on every rank.

        Raises
        ------
        CommitError
            On every rank, when the last commit failed, and kind ``incomplete`` when locations are missing: those that
            were written are committed. Everything is released all the same.
        """
        self._may_be_partial = partial
        super().close()

    _may_be_partial = False

    def _why_not_close(self) -> MPIStreamError | None:
        if self._may_be_partial or not (missing := self._missing_anywhere()):
            return None
        texts = [_range_text(a, b) for a, b in missing[:_MAX_NAMED]]
        more = f" and {len(missing) - _MAX_NAMED} more ranges" if len(missing) > _MAX_NAMED else ""
        return CommitError(
            f"{self._store.url}: {count(missing)} of {counted(self.schema.n_total or 0, 'location')} not written: "
            f"{', '.join(texts)}{more}; what was written is committed, write_resume goes on with the others; "
            "close(partial=True) where that is meant",
            kind="incomplete",
        )

    def _missing_anywhere(self) -> Ranges:
        return difference(((0, self.schema.n_total or 0),), self._stream.manifest.committed)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{counted(self.n_records, 'location')}, {self.n_committed} committed"
        return f"LocationSeriesWriter({self._store.url!r}, rank {self._channel.rank} of {self._channel.size}, {state})"


def _by_target(votes: list[Any]) -> list[list[Any]]:
    """From (target, records) of each rank to (source, records) of what each rank gets."""
    gets: list[list[Any]] = [[] for _ in votes]
    for source, (target, records) in enumerate(votes):
        if target is not None and records:
            gets[target].append([source, records])
    return gets


def _range_text(start: int, stop: int) -> str:
    return f"{start} to {stop - 1}" if start < stop else "none"


def writer_class(schema: StreamSchema) -> type[StreamWriter]:
    """Return the class of the writer of a stream.

    Not collective.
    """
    return LocationSeriesWriter if schema.is_location_series else StreamWriter

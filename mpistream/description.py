"""What a user writes down: how time behaves, variables, coordinates. `mpistream.schema` checks it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mpistream.block import as_array
from mpistream.errors import SchemaError
from mpistream.names import json_object
from mpistream.times import check_units, encode_times

__all__ = [
    "AppendTime",
    "Coordinate",
    "IndexedTime",
    "LocationTime",
    "Shape",
    "Staggered",
    "StaggeredLength",
    "Variable",
]

Shape = Mapping[str, int] | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendTime:
    """Describe a time dimension that grows.

    Parameters
    ----------
    units
        CF units, for example ``"seconds since 2000-01-01"`` (CF conventions, section 4.4): a unit from days to
        nanoseconds and a date of the calendar; months in ``360_day`` and common_years in ``noleap`` alone, where
        readers know their length. Without "since", such as ``"s"``, they are numbers that no reader makes dates of.
    calendar
        CF calendar that readers know: ``standard``, ``proleptic_gregorian``, ``julian``, ``noleap``, ``all_leap``,
        ``360_day``, or another name of these.
    attrs
        More attributes of the time coordinate.
    is_stored
        In a schema that comes from a store; not to be given. What lies there is read, whatever its units are.
    """

    units: str
    calendar: str = "proleptic_gregorian"
    attrs: Mapping[str, Any] = field(default_factory=dict)
    is_stored: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_time(self, is_stored=self.is_stored)


def _check_time(time: AppendTime | IndexedTime, *, is_stored: bool) -> None:
    for name in ("units", "calendar"):
        value = getattr(time, name)
        if not isinstance(value, str) or not value:
            raise SchemaError(f"time {name} {value!r}: give a non-empty string", kind="time")
    if not is_stored:
        check_units(time.units, time.calendar)
    for name in json_object("time attributes", time.attrs):
        if name in ("units", "calendar"):
            raise SchemaError(f"time attribute {name!r} stands in attrs; give {name}=", kind="time")
        if name == "_FillValue":
            raise SchemaError("time attribute '_FillValue': a time is never missing; leave it out", kind="time")


class IndexedTime:
    """Describe a time dimension that is fixed: records are written in any order with ``write_record_at``.

    Parameters
    ----------
    times
        Time of every record, increasing: numbers in ``units``, or dates as in `StreamWriter.write_record`. None in a
        schema that comes from a store: there they lie.
    units, calendar, attrs
        As in `AppendTime`.
    n_records, digest
        In a schema that comes from a store; not to be given.
    """

    def __init__(
        self,
        times: ArrayLike | None,
        *,
        units: str,
        calendar: str = "proleptic_gregorian",
        attrs: Mapping[str, Any] | None = None,
        n_records: int = 0,
        digest: str = "",
    ) -> None:
        self.units = units
        self.calendar = calendar
        self.attrs: Mapping[str, Any] = {} if attrs is None else attrs
        _check_time(self, is_stored=times is None)
        self.times: NDArray[np.float64] | None = None
        self.n_records = n_records
        self.digest = digest
        if times is None and not (n_records > 0 and digest):
            raise SchemaError("times is None: give the time of every record", kind="time")
        if times is not None:
            self.times = _checked_times(encode_times(as_array("times", times), units, calendar))
            self.n_records = len(self.times)
            self.digest = hashlib.sha256(self.times.astype("<f8").tobytes()).hexdigest()


class LocationTime:
    """Describe the time axis of a location series, whose records are locations, each with all of its times.

    Made by `mpistream.location_schema`.

    Parameters
    ----------
    times
        As in `IndexedTime`.
    n_records
        Number of locations.
    units, calendar, attrs
        As in `AppendTime`.
    n_times, digest
        In a schema that comes from a store; not to be given.
    """

    def __init__(
        self,
        times: ArrayLike | None,
        *,
        n_records: int,
        units: str,
        calendar: str = "proleptic_gregorian",
        attrs: Mapping[str, Any] | None = None,
        n_times: int = 0,
        digest: str = "",
    ) -> None:
        along = IndexedTime(times, units=units, calendar=calendar, attrs=attrs, n_records=n_times, digest=digest)
        self.units, self.calendar, self.attrs = along.units, along.calendar, along.attrs
        self.times, self.digest = along.times, along.digest
        self.n_times = along.n_records
        self.n_records = n_records


def _checked_times(given: NDArray[Any]) -> NDArray[np.float64]:
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iuf":
        raise SchemaError(
            f"times of shape {given.shape} and dtype {given.dtype}: give a sequence of numbers in the time units, "
            "or of dates",
            kind="time",
        )
    checked = np.array(given, "float64")
    if not np.isfinite(checked).all() or not (checked[1:] > checked[:-1]).all():
        raise SchemaError("times must be finite and increasing", kind="time")
    checked.flags.writeable = False
    return checked


@dataclass(frozen=True, slots=True)
class Staggered:
    """Describe a dim whose points lie between, or around, those of another one: on a C-grid, the faces of cells.

    It is split over ranks as the other dim is: a region over that dim implies the same start and stop here, and the
    rank that holds the last cell holds the extra points, too.

    Parameters
    ----------
    dim
        The other dim.
    n_extra
        How many points more than that it has.
    """

    dim: str
    n_extra: int = 1


class StaggeredLength(int):
    """The length of a staggered dim; it says over which one, so that the dims of a schema make those of another."""

    staggered: Staggered

    @classmethod
    def of(cls, length: int, staggered: Staggered) -> StaggeredLength:
        """Return a length of a dim that is staggered.

        Not collective.
        """
        self = cls(length)
        self.staggered = staggered
        return self


@dataclass(frozen=True, slots=True)
class Variable:
    """Describe a streaming variable or a static.

    Parameters
    ----------
    dims
        Names of its dims, the time dim first; a static has no time dim.
    dtype
        Dtype on disk. For a static without partitioned dims also ``str``, or ``"U8"`` for up to 8 characters.
    attrs
        Attributes; numpy scalars and arrays are converted. ``_FillValue`` gets the form that xarray reads, and is the
        fill value if there is no other; ``bounds`` names an array of the schema.
    shard_shape, chunk_shape
        Shard and inner chunk, as mapping dim -> length or as a sequence over ``dims``; what is left out
        comes from the schema or from the default layout.
    codec
        A profile name, or a Zarr v3 codec chain, which gets a ``crc32c`` at its end if it has none; the schema's by
        default.
    fill_value
        By default NaN for floats, NaT for datetime64 and timedelta64, an empty string for strings, 0 otherwise.
    keep_bits
        Of a float variable or static: round mantissas to so many explicit bits before they are encoded, to nearest
        with ties to even, which can lead to infinity. NaN, infinities and the fill value are kept. By default
        nothing is rounded.
    """

    dims: Sequence[str]
    dtype: DTypeLike
    attrs: Mapping[str, Any] = field(default_factory=dict)
    shard_shape: Shape | None = None
    chunk_shape: Shape | None = None
    codec: str | Sequence[Mapping[str, Any]] | None = None
    fill_value: Any = None
    keep_bits: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Coordinate:
    """Describe a coordinate: its values are given here, or written by region with ``write_static``.

    Parameters
    ----------
    dims
        Names of its dims.
    values
        The whole array, the same on every rank, written by the owner; None: each rank writes its part.
    dtype
        Dtype on disk; that of ``values`` by default. ``str`` is for strings of any length.
    attrs
        Attributes, as in `Variable`.
    fill_value
        As in `Variable`.
    digest
        In a schema that comes from a store, the digest of values that lie there; not to be given.
    """

    dims: Sequence[str]
    values: ArrayLike | None = None
    dtype: DTypeLike | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    fill_value: Any = None
    digest: str | None = None

"""What a user writes down: how time behaves, variables, coordinates. `mpistream.schema` checks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from mpistream.block import as_array
from mpistream.errors import SchemaError
from mpistream.names import json_object

__all__ = ["AppendTime", "Coordinate", "IndexedTime", "Shape", "Variable"]

Shape = Mapping[str, int] | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendTime:
    """Describe a time dimension that grows.

    Parameters
    ----------
    units
        CF units, for example ``"seconds since 2000-01-01"`` (CF conventions, section 4.4).
    calendar
        CF calendar.
    attrs
        More attributes of the time coordinate.
    """

    units: str
    calendar: str = "proleptic_gregorian"
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_time(self)


def _check_time(time: AppendTime | IndexedTime) -> None:
    for name in ("units", "calendar"):
        value = getattr(time, name)
        if not isinstance(value, str) or not value:
            raise SchemaError(f"time {name} {value!r}: give a non-empty string", kind="time")
    for name in json_object("time attributes", time.attrs):
        if name in ("units", "calendar"):
            raise SchemaError(f"time attribute {name!r} stands in attrs; give {name}=", kind="time")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedTime:
    """Describe a time dimension that is fixed: records are written in any order with ``write_record_at``.

    Parameters
    ----------
    times
        Time of every record, increasing, in ``units``.
    units, calendar, attrs
        As in `AppendTime`.
    """

    times: ArrayLike
    units: str
    calendar: str = "proleptic_gregorian"
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_time(self)
        times = as_array("times", self.times)
        if times.ndim != 1 or times.size == 0 or times.dtype.kind not in "iuf":
            raise SchemaError(
                f"times of shape {times.shape} and dtype {times.dtype}: give a sequence of numbers in the time units",
                kind="time",
            )
        if not np.isfinite(times).all() or not (np.diff(times.astype("float64")) > 0).all():
            raise SchemaError("times must be finite and increasing", kind="time")


@dataclass(frozen=True, slots=True)
class Variable:
    """Describe a streaming variable or a static.

    Parameters
    ----------
    dims
        Names of its dims, the time dim first; a static has no time dim.
    dtype
        Dtype on disk.
    attrs
        Attributes; numpy scalars and arrays are converted.
    shard_shape, chunk_shape
        Shard and inner chunk, as mapping dim -> length or as a sequence over ``dims``; what is left out
        comes from the schema or from the default layout.
    codec
        A profile name, or a Zarr v3 codec chain; the schema's by default.
    fill_value
        By default NaN for floats, 0 otherwise.
    """

    dims: Sequence[str]
    dtype: DTypeLike
    attrs: Mapping[str, Any] = field(default_factory=dict)
    shard_shape: Shape | None = None
    chunk_shape: Shape | None = None
    codec: str | Sequence[Mapping[str, Any]] | None = None
    fill_value: Any = None


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
        Dtype on disk; that of ``values`` by default.
    attrs
        Attributes.
    fill_value
        By default NaN for floats, 0 otherwise.
    digest
        In a schema that comes from a store, the digest of values that lie there; not to be given.
    """

    dims: Sequence[str]
    values: ArrayLike | None = None
    dtype: DTypeLike | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    fill_value: Any = None
    digest: str | None = None

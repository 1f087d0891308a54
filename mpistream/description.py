"""What a user writes down: how time behaves, variables, coordinates. `mpistream.schema` checks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import ArrayLike, DTypeLike

from mpistream.errors import SchemaError
from mpistream.names import json_object

__all__ = ["AppendTime", "Coordinate", "Shape", "Variable"]

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
        for name in ("units", "calendar"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise SchemaError(f"time {name} {value!r}: give a non-empty string", kind="time")
        for name in json_object("time attributes", self.attrs):
            if name in ("units", "calendar"):
                raise SchemaError(f"time attribute {name!r} stands in attrs; give {name}=", kind="time")


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
        A profile name, or a Zarr v3 codec chain, which gets a ``crc32c`` at its end if it has none; the schema's by
        default.
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

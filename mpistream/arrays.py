"""`ArraySpec`: one array, checked and normal. It is what every room above the schema works with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.block import as_array, keeps_values
from mpistream.description import Coordinate, Shape, Staggered, StaggeredLength
from mpistream.errors import FormatError, SchemaError
from mpistream.grid import ShardGrid
from mpistream.names import (
    TIME_UNITS,
    cast_times,
    check_name,
    dtype_name,
    fill_to_json,
    json_value,
    stored_dtype,
)
from mpistream.rounding import Rounding
from mpistream.strings import is_string, string_array
from mpistream.zarr3.codecs import MAX_CHUNK_NBYTES, ChunkCodec, profile_chain
from mpistream.zarr3.shard import ShardSpec

__all__ = [
    "QUANTIZATION_NAME",
    "SERIES_CHUNK",
    "ArraySpec",
    "Role",
    "check_layout",
    "checked_array_dims",
    "checked_dims",
    "codec_chain",
    "coordinate_chunks",
    "coordinate_values",
    "shape_over",
]

# On disk. Do not change; see FORMAT.md. Records a chunk of the time coordinate and of variables over time alone.
SERIES_CHUNK = 1024
# The quantization variable (CF conventions, section 8.4.1): an array without dims and values that carries attributes.
QUANTIZATION_NAME = "quantization_info"


# A coordinate that the owner writes is one chunk, or several of at most this size.
_COORDINATE_CHUNK_NBYTES = 64 * 1024 * 1024
# On disk. Do not change; see FORMAT.md. An index of 64 MiB: whoever reads one value reads all of it.
MAX_CHUNKS = 2**22
# Readers with 32-bit sizes exist, and a shard is held in memory while it is written.
_MAX_SHARD_NBYTES = 2**31 - 1
# NaT as an integer, and the units that xarray decodes no timedelta to.
_NAT = -(2**63)
_COARSE_UNITS = ("D", "h", "m")


class Role(Enum):
    """Who writes an array, and how."""

    VARIABLE = "variable"
    """One row of shards at a time, each shard by one rank."""
    SERIES = "series"
    """A variable over time alone: in chunks of `SERIES_CHUNK` records, by the owner."""
    STATIC = "static"
    """Without time, each shard by one rank."""
    COORDINATE = "coordinate"
    """With values in the schema, by the owner when the store is made."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArraySpec:
    """One array, checked and normal."""

    name: str
    role: Role
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    """Extents without the time dim."""
    dtype: np.dtype[Any]
    fill: NDArray[Any]
    attrs: Mapping[str, Any]
    chain: tuple[Mapping[str, Any], ...]
    shard_shape: tuple[int | None, ...]
    """Over ``dims``, time included; None where the layout is still open."""
    chunk_shape: tuple[int | None, ...]
    keep_bits: int | None = None
    values: NDArray[Any] | None = None
    digest: str | None = None
    staggered: Mapping[str, Staggered] = field(default_factory=dict)
    """Dims that are split as another dim is."""

    @property
    def has_time(self) -> bool:
        """Whether the first dim is time."""
        return self.role in (Role.VARIABLE, Role.SERIES)

    @property
    def space_dims(self) -> tuple[str, ...]:
        """The dims without time."""
        return self.dims[1:] if self.has_time else self.dims

    @property
    def base_dims(self) -> tuple[str, ...]:
        """The dims without time, each as the dim as which it is split."""
        return tuple(self.staggered[d].dim if d in self.staggered else d for d in self.space_dims)

    @property
    def n_extra(self) -> tuple[int, ...]:
        """For each dim without time, the points that it has more than the dim as which it is split."""
        return tuple(self.staggered[d].n_extra if d in self.staggered else 0 for d in self.space_dims)

    @property
    def is_whole(self) -> bool:
        """Whether the owner writes it at once, in plain chunks: Zarr has no shard of an array without dims."""
        return self.role is Role.COORDINATE or (self.role is Role.STATIC and (not self.dims or is_string(self.dtype)))

    @property
    def is_sharded(self) -> bool:
        """Whether ranks write it in shards."""
        return self.role in (Role.VARIABLE, Role.STATIC) and not self.is_whole

    @property
    def is_resolved(self) -> bool:
        """Whether its layout is known."""
        return None not in self.shard_shape and None not in self.chunk_shape

    @property
    def resolved_shard_shape(self) -> tuple[int, ...]:
        """The shard shape over ``dims``, once it is resolved."""
        assert self.is_resolved, self.name
        return tuple(n for n in self.shard_shape if n is not None)

    @property
    def resolved_chunk_shape(self) -> tuple[int, ...]:
        """The inner chunk shape over ``dims``, once it is resolved."""
        assert self.is_resolved, self.name
        return tuple(n for n in self.chunk_shape if n is not None)

    @property
    def row_length(self) -> int:
        """Records that share a shard; 1 for an array without time."""
        return self.resolved_shard_shape[0] if self.has_time else 1

    @property
    def grid(self) -> ShardGrid:
        """The shard grid over the dims without time."""
        shard = self.resolved_shard_shape
        return ShardGrid(
            name=self.name,
            dims=self.space_dims,
            shape=self.shape,
            shard_shape=shard[1:] if self.has_time else shard,
            bases=self.base_dims,
            n_extra=self.n_extra,
        )

    @property
    def rounding(self) -> Rounding | None:
        """How values are rounded before they are encoded."""
        return None if self.keep_bits is None else Rounding(self.keep_bits, self.fill)

    @property
    def zarr_dtype(self) -> np.dtype[Any]:
        """The dtype in Zarr's document: int64 for times, which every reader knows."""
        return np.dtype("int64") if self.dtype.kind in "mM" else self.dtype

    @property
    def zarr_attrs(self) -> dict[str, Any]:
        """The attributes in Zarr's document, with those that follow from the dtype and from ``keep_bits``."""
        attrs = dict(self.attrs)
        if self.dtype.kind in "mM":
            unit, _ = np.datetime_data(self.dtype)
            attrs |= {"units": TIME_UNITS[unit], "_FillValue": _NAT}
            if self.dtype.kind == "M":
                attrs |= {"units": f"{TIME_UNITS[unit]} since 1970-01-01", "calendar": "proleptic_gregorian"}
            else:
                # xarray decodes to no unit above seconds, and without this attribute not at all.
                attrs["dtype"] = f"timedelta64[{'s' if unit in _COARSE_UNITS else unit}]"
        if self.keep_bits is not None:
            attrs |= {"quantization": QUANTIZATION_NAME, "quantization_nsb": self.keep_bits}
        return attrs

    def shard_spec(self) -> ShardSpec:
        """Return how its shards are encoded, with a time extent of 1 for an array without time.

        Not collective.
        """
        lead = () if self.has_time else (1,)
        return ShardSpec(
            shard_shape=(*lead, *self.resolved_shard_shape),
            chunk_shape=(*lead, *self.resolved_chunk_shape),
            codec=ChunkCodec(self.chain, self.dtype),
            fill=self.fill,
            rounding=self.rounding,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the array's entry in the manifest.

        Not collective.
        """
        return {
            "name": self.name,
            "role": self.role.value,
            "dims": list(self.dims),
            "dtype": dtype_name(self.dtype),
            "fill_value": fill_to_json(self.fill),
            "keep_bits": self.keep_bits,
            "attrs": dict(self.attrs),
            "codecs": [dict(c) for c in self.chain],
            "shard_shape": list(self.shard_shape),
            "chunk_shape": list(self.chunk_shape),
            "digest": self.digest,
        }


def shape_over(what: str, dims: Sequence[str], shape: Shape | None, default: Shape | None) -> list[int | None]:
    """Return a shard or chunk shape over ``dims``; None where neither ``shape`` nor ``default`` says."""
    if shape is not None and not isinstance(shape, Mapping | Sequence):
        raise SchemaError(f"{what} {shape!r}: give a mapping dim -> length or a sequence over the dims", kind="layout")
    if shape is not None and not isinstance(shape, Mapping):
        if len(shape) != len(dims):
            raise SchemaError(f"{what} {tuple(shape)} has {len(shape)} lengths for {len(dims)} dims", kind="layout")
        shape = dict(zip(dims, shape, strict=True))
    chosen = {**(default if isinstance(default, Mapping) else {}), **(shape or {})}
    for dim, length in chosen.items():
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise SchemaError(f"{what}: length {length!r} of dim {dim!r}; give an integer above 0", kind="layout")
    for dim in shape or {}:
        if dim not in dims:
            raise SchemaError(f"{what} names dim {dim!r}, which is not among {tuple(dims)}", kind="layout")
    return [int(chosen[d]) if d in chosen else None for d in dims]


def check_layout(
    name: str, dims: Sequence[str], itemsize: int, shard: Sequence[int | None], chunk: Sequence[int | None]
) -> None:
    """Check the lengths that are known; a layout that is open in part is checked again when it is resolved."""
    for dim, s, c in zip(dims, shard, chunk, strict=True):
        if any(n is not None and n < 1 for n in (s, c)):
            raise SchemaError(
                f"variable {name!r}: dim {dim!r} has shard length {s} and inner chunk length {c}; both must be above 0",
                kind="layout",
            )
        if s is not None and c is not None and s % c:
            raise SchemaError(
                f"variable {name!r}: shard length {s} of dim {dim!r} is not a multiple of the inner chunk's {c}; "
                f"use {-(-s // c) * c} or another chunk length",
                kind="layout",
            )
    for what, shape, limit in (("inner chunk", chunk, MAX_CHUNK_NBYTES), ("shard", shard, _MAX_SHARD_NBYTES)):
        nbytes = itemsize * math.prod(n for n in shape if n is not None)
        if nbytes > limit:
            raise SchemaError(
                f"variable {name!r}: {what} {tuple(shape)} has {nbytes} bytes, at most {limit} are possible; "
                f"give a smaller {'chunk_shape' if shape is chunk else 'shard_shape'}",
                kind="layout",
            )
    n_chunks = math.prod(s // c for s, c in zip(shard, chunk, strict=True) if s is not None and c is not None)
    if n_chunks > MAX_CHUNKS:
        raise SchemaError(
            f"variable {name!r}: a shard of {tuple(shard)} has {n_chunks} inner chunks of {tuple(chunk)}, at most "
            f"{MAX_CHUNKS} are possible; give a larger chunk_shape",
            kind="layout",
        )


def coordinate_chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return chunks of whole fastest dims, each at most 64 MiB."""
    chunk = list(shape)
    for i in range(len(chunk)):
        rest = itemsize * math.prod(chunk[i + 1 :])
        chunk[i] = max(1, min(chunk[i], _COORDINATE_CHUNK_NBYTES // rest))
        if rest <= _COORDINATE_CHUNK_NBYTES:
            break
    return tuple(chunk)


def checked_dims(dims: Mapping[str, int | Staggered | None]) -> tuple[str, dict[str, int], dict[str, Staggered]]:
    """Return the time dim, the length of every other dim, and the staggered dims."""
    if not isinstance(dims, Mapping) or not dims:
        raise SchemaError(f"dims {dims!r}: give a mapping dim -> length, the time dim first", kind="dims")
    time_dim, *others = dims
    if dims[time_dim] is not None:
        raise SchemaError(
            f"dim {time_dim!r} comes first, so it is the time dim: its length must be None, not {dims[time_dim]!r}",
            kind="dims",
        )
    for dim in dims:
        check_name("dim", dim)
    sizes: dict[str, int] = {}
    staggered: dict[str, Staggered] = {}
    for dim in others:
        n = dims[dim]
        if isinstance(n, StaggeredLength):
            n = n.staggered
        if isinstance(n, Staggered):
            staggered[dim] = n
            n = _staggered_length(dim, n, dims)
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise SchemaError(
                f"dim {dim!r} has length {n!r}; only the first dim grows, give an integer above 0",
                kind="dims",
            )
        sizes[dim] = StaggeredLength.of(n, staggered[dim]) if dim in staggered else int(n)
    return time_dim, sizes, staggered


def _staggered_length(dim: str, staggered: Staggered, dims: Mapping[str, int | Staggered | None]) -> int:
    base = dims.get(staggered.dim)
    extra = staggered.n_extra
    if isinstance(base, bool | StaggeredLength) or not isinstance(base, int | np.integer):
        raise SchemaError(
            f"dim {dim!r} is staggered over {staggered.dim!r}, which is no dim with a length; name one of "
            f"{tuple(dims)}",
            kind="dims",
        )
    if isinstance(extra, bool) or not isinstance(extra, int | np.integer) or extra < 0:
        raise SchemaError(f"dim {dim!r} has {extra!r} extra points; give an integer from 0 on", kind="dims")
    return int(base + extra)


def checked_array_dims(
    name: str, role: Role, dims: Sequence[str], time_dim: str, sizes: Mapping[str, int]
) -> tuple[str, ...]:
    if isinstance(dims, str) or not isinstance(dims, Sequence) or not all(isinstance(d, str) for d in dims):
        raise SchemaError(f"variable {name!r}: dims {dims!r}: give a tuple of names", kind="dims")
    dims = tuple(dims)
    for dim in dims:
        if dim != time_dim and dim not in sizes:
            raise SchemaError(f"variable {name!r}: dim {dim!r} is not among {(time_dim, *sizes)}", kind="dims")
    if len(set(dims)) != len(dims):
        raise SchemaError(f"variable {name!r}: dims {dims} name one dim twice", kind="dims")
    if role in (Role.VARIABLE, Role.SERIES):
        if dims[:1] != (time_dim,):
            raise SchemaError(
                f"variable {name!r}: dims {dims} must begin with the time dim {time_dim!r}; "
                "a variable without time belongs into statics",
                kind="dims",
            )
    elif time_dim in dims:
        raise SchemaError(
            f"{role.value} {name!r}: dims {dims} contain the time dim {time_dim!r}; put it into variables",
            kind="dims",
        )
    return dims


def coordinate_values(name: str, item: Coordinate, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the values of a coordinate in its dtype on disk, as a read-only copy.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``shape`` or ``dtype``.
    """
    wanted = None if item.dtype is None else stored_dtype(f"coordinate {name!r}", item.dtype)
    given = as_array(f"coordinate {name!r}", item.values)
    if _is_text(given) if wanted is None else is_string(wanted):
        given = string_array(f"coordinate {name!r}", item.values, wanted)
    if given.shape != shape:
        raise SchemaError(f"coordinate {name!r}: values of shape {given.shape}, its dims have {shape}", kind="shape")
    dtype = stored_dtype(f"coordinate {name!r}", given.dtype) if wanted is None else wanted
    values = _cast_values(given, dtype)
    if values is None:
        raise SchemaError(
            f"coordinate {name!r}: {given.dtype} into {dtype.name} loses values; give another dtype", kind="dtype"
        )
    values.flags.writeable = False
    return values


def _cast_values(given: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return a copy in another dtype, None when that changes a value."""
    if given.dtype.kind in "mM" or dtype.kind in "mM":
        cast = cast_times(given, dtype)
        return None if cast is None else np.array(cast, order="C")
    # numpy would parse strings as numbers.
    if (given.dtype.kind == "c" and dtype.kind != "c") or (given.dtype.kind in "SUT" and not is_string(dtype)):
        return None
    with np.errstate(all="ignore"):
        values = np.array(given, dtype, order="C")
    # Lists of Python ints have a dtype by accident, so equal values are as good as a safe cast.
    is_same = keeps_values(given.dtype, dtype) or np.array_equal(values, given, equal_nan=dtype.kind in "fc")
    return values if is_same else None


def _is_text(given: NDArray[Any]) -> bool:
    """An array of objects may hold strings, or something else that has a message of its own."""
    return given.dtype.kind in "SUT" or (given.dtype.kind == "O" and any(isinstance(x, str) for x in given.flat))


def codec_chain(
    name: str, codec: Any, dtype: np.dtype[Any], keep_bits: int | None = None
) -> tuple[Mapping[str, Any], ...]:
    """Return the codec chain of a profile, or a given one once it is known that we speak it.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``codec``.
    """
    if isinstance(codec, str):
        return tuple(profile_chain(codec, dtype, is_rounded=keep_bits is not None))
    if not isinstance(codec, Sequence) or not all(isinstance(c, Mapping) for c in codec):
        raise SchemaError(
            f"variable {name!r}: codec {codec!r}: give a profile name or a list of Zarr codecs", kind="codec"
        )
    try:
        chain = [json_value(f"codec {c.get('name')!r}", c) for c in codec]
        # A chain that is meant for all arrays of a schema: strings of any length have another serializer, and only
        # where a value has several bytes a byte order stands in it, and must.
        if chain[:1] and chain[0].get("name") == "bytes":
            if dtype.kind == "T":
                chain[0] = {"name": "vlen-utf8"}
            elif dtype.itemsize > 1 and not chain[0].get("configuration"):
                chain[0] = {"name": "bytes", "configuration": {"endian": "little"}}
        # What we write can always be verified, by every reader.
        if chain[-1:] and chain[-1].get("name") != "crc32c":
            chain.append({"name": "crc32c"})
        ChunkCodec(chain, dtype)
    except (FormatError, SchemaError) as error:
        raise SchemaError(f"variable {name!r}: {error}", kind="codec") from error
    return tuple(chain)

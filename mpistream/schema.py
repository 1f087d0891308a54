"""What a stream holds: dims, time, variables, statics, coordinates, and how they lie in shards.

`StreamSchema` checks what a user wrote down (`mpistream.description`) and turns it into `ArraySpec`, one per
array, which is what every other room works with. A schema is *resolved* when every array has its shard and
inner chunk shapes; `mpistream.layout` chooses those that were left open.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import (
    QUANTIZATION_NAME,
    SERIES_CHUNK,
    ArraySpec,
    Role,
    check_layout,
    checked_array_dims,
    checked_dims,
    codec_chain,
    coordinate_chunks,
    coordinate_values,
    shape_over,
)
from mpistream.cf import boundary_variables, checked_attrs, with_coordinates_attribute, with_encoded_fill_value
from mpistream.description import AppendTime, Coordinate, IndexedTime, LocationTime, Shape, Staggered, Variable
from mpistream.errors import FormatError, SchemaError
from mpistream.names import (
    canonical_json,
    check_name,
    dtype_name,
    fill_array,
    fill_from_json,
    fill_to_json,
    json_object,
    stored_dtype,
)
from mpistream.rounding import checked_keep_bits
from mpistream.strings import is_string
from mpistream.zarr3.codecs import profile_chain, vlen_utf8

__all__ = ["COMMITTED_NAME", "StreamSchema", "schema_fingerprint", "values_digest"]

# On disk. Do not change; see FORMAT.md.
COMMITTED_NAME = "committed"
# Whoever opens a store for writing makes a list of them, and no file system bears so many files a record.
MAX_SHARDS = 2**20
_COMMITTED_CHUNK = 65536
# Not the version of the package: the document of a store never changes, and what it says is fixed by the format.
_IMPLEMENTATION = "mpistream version 1 (store format 1; IEEE 754 round to nearest, ties to even)"


def _digest(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise TypeError(f"digest {value!r} is not a string")
    return value


def values_digest(values: NDArray[Any]) -> str:
    """Return the sha256 of a coordinate's values, as the manifest has it.

    Not collective.
    """
    if values.dtype.kind == "T":
        return hashlib.sha256(vlen_utf8(values)).hexdigest()
    return hashlib.sha256(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()).hexdigest()


class StreamSchema:
    """Describe everything that a stream holds.

    Parameters
    ----------
    dims
        Dim -> length, ordered, the time dim first with the length None: it grows. `Staggered` describes a dim by
        another one. In a location series the dim of locations stands first, and the time dim behind it.
    time
        How the time dim behaves.
    variables
        Streaming variables by name.
    statics
        Variables without time by name, written once with ``write_static``.
    coords
        Coordinates by name.
    shard_shape, chunk_shape
        Dim -> length of shards and inner chunks for all arrays; what is left out is chosen when the store
        is made.
    codec
        Codec profile for all arrays.
    key_separator
        ``"/"`` or ``"."`` in chunk keys.
    attrs
        Attributes of the group.

    Raises
    ------
    SchemaError
        On the calling rank, naming the array or dim, both numbers and the way out.
    """

    def __init__(
        self,
        *,
        dims: Mapping[str, int | Staggered | None],
        time: AppendTime | IndexedTime | LocationTime,
        variables: Mapping[str, Variable],
        statics: Mapping[str, Variable] | None = None,
        coords: Mapping[str, Coordinate] | None = None,
        shard_shape: Shape | None = None,
        chunk_shape: Shape | None = None,
        codec: str | Sequence[Mapping[str, Any]] = "fast",
        key_separator: str = "/",
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        self.record_dim, sizes, staggered = checked_dims(dims)
        """The dim of records: time, or in a location series that of the locations."""
        self.staggered: Mapping[str, Staggered] = MappingProxyType(staggered)
        self.dims: Mapping[str, int | None] = MappingProxyType({self.record_dim: None, **sizes})
        if not isinstance(time, AppendTime | IndexedTime | LocationTime):
            raise SchemaError(f"time is a {type(time).__name__}; give AppendTime or IndexedTime", kind="time")
        self.time = time
        self.time_dim = self.record_dim
        if isinstance(time, LocationTime):
            self.time_dim = self._location_time_dim(time, sizes)
        if self.n_total is not None and COMMITTED_NAME in self.dims:
            raise SchemaError(f"dim {COMMITTED_NAME!r}: an array of that name says what is committed", kind="name")
        if key_separator not in ("/", "."):
            raise SchemaError(f"key_separator {key_separator!r}: use '/' or '.'", kind="layout")
        self.key_separator = key_separator
        self.attrs: Mapping[str, Any] = MappingProxyType(
            json_object("group attributes", {} if attrs is None else attrs)
        )
        self.variables: Mapping[str, Variable] = MappingProxyType(dict(variables))
        self.statics: Mapping[str, Variable] = MappingProxyType(dict(statics or {}))
        self.coords: Mapping[str, Coordinate] = MappingProxyType(dict(coords or {}))
        self.codec = codec
        if not self.variables:
            raise SchemaError("a stream without variables has nothing to stream; give at least one", kind="schema")
        self._shapes = tuple(
            None if s is None else dict(zip(self.dims, shape_over(what, tuple(self.dims), s, None), strict=True))
            for what, s in (("shard_shape", shard_shape), ("chunk_shape", chunk_shape))
        )
        arrays = self._all_arrays(sizes)
        self._bounds = boundary_variables(arrays, self.time_array)
        self.arrays: Mapping[str, ArraySpec] = MappingProxyType(
            with_coordinates_attribute(arrays, self.coords, self._bounds)
        )
        self._check_names()
        self._check_strings()

    def _all_arrays(self, sizes: Mapping[str, int]) -> dict[str, ArraySpec]:
        arrays: dict[str, ArraySpec] = {}
        for group, kind in ((self.variables, Variable), (self.statics, Variable), (self.coords, Coordinate)):
            for name, item in group.items():
                check_name("variable", name)
                if name in arrays or name == self.time_dim or (name == COMMITTED_NAME and self.n_total is not None):
                    raise SchemaError(f"name {name!r} is used twice; names are unique in a stream", kind="name")
                if not isinstance(item, kind):
                    raise SchemaError(f"{name!r} is a {type(item).__name__}; give a {kind.__name__}", kind="schema")
                if group is self.variables:
                    role = Role.SERIES if list(item.dims or ()) == [self.record_dim] else Role.VARIABLE
                else:
                    is_given = isinstance(item, Coordinate) and (item.values is not None or item.digest is not None)
                    role = Role.COORDINATE if is_given else Role.STATIC
                if self.is_location_series:
                    self._check_location_array(name, role, item)
                arrays[name] = self._array(name, role, item, sizes)
        return arrays

    @staticmethod
    def _location_time_dim(time: LocationTime, sizes: Mapping[str, int]) -> str:
        if list(sizes.values()) != [time.n_times]:
            raise SchemaError(
                f"dims {dict(sizes)} beside that of the locations: give the time dim alone, of length {time.n_times}",
                kind="dims",
            )
        return next(iter(sizes))

    def _check_location_array(self, name: str, role: Role, item: Variable | Coordinate) -> None:
        """Whatever is no coordinate with values is a series of each location."""
        wanted = (self.record_dim, self.time_dim)
        if role is not Role.COORDINATE and (role is Role.STATIC or list(item.dims or ()) != list(wanted)):
            raise SchemaError(
                f"variable {name!r} of a location series has the dims {item.dims!r}; give it {wanted}: there is one "
                "time axis, and what a location has once is a coordinate with values",
                kind="dims",
            )

    def _array(self, name: str, role: Role, item: Variable | Coordinate, sizes: Mapping[str, int]) -> ArraySpec:
        record_dim = self.record_dim
        if self.n_total is not None and self.is_location_series and role is Role.COORDINATE:
            # Locations have coordinates of their own, of a length that is known.
            sizes, record_dim = {record_dim: self.n_total, **sizes}, ""
        dims = checked_array_dims(name, role, item.dims, record_dim, sizes)
        shape = tuple(sizes[d] for d in dims if d != record_dim)
        split = [self.staggered[d].dim if d in self.staggered else d for d in dims]
        if role is not Role.COORDINATE and len(set(split)) < len(split):
            raise SchemaError(
                f"variable {name!r}: two of its dims {dims} are split alike, because one is staggered over the other; "
                "give one of them a length of its own",
                kind="dims",
            )
        values = None
        if isinstance(item, Coordinate) and item.values is not None:
            values = coordinate_values(name, item, shape)
        elif item.dtype is None:
            missing = (
                "neither values nor dtype; give one of them" if isinstance(item, Coordinate) else "no dtype; give it"
            )
            raise SchemaError(f"variable {name!r} has {missing}", kind="dtype")
        dtype = values.dtype if values is not None else stored_dtype(f"variable {name!r}", item.dtype)
        attrs, missing_value = with_encoded_fill_value(f"variable {name!r}", item.attrs, dtype)
        fill_value = missing_value if item.fill_value is None else item.fill_value
        shard, chunk = self._array_layout(name, role, item, dims, shape, dtype)
        own_codec, keep_bits = None, None
        if isinstance(item, Variable):
            own_codec, keep_bits = item.codec, checked_keep_bits(name, item.keep_bits, dtype)
        fill = fill_array(f"variable {name!r}", dtype, fill_value)
        if keep_bits is not None and missing_value is not None and fill.tobytes() != missing_value.tobytes():
            # Only one of them could be kept when cells are rounded, and the other would no longer be missing.
            raise SchemaError(
                f"variable {name!r}: fill value {fill} and _FillValue {missing_value} differ, and keep_bits keeps one; "
                "leave fill_value out",
                kind="fill_value",
            )
        return ArraySpec(
            name=name,
            role=role,
            dims=dims,
            shape=shape,
            dtype=dtype,
            fill=fill,
            attrs=MappingProxyType(checked_attrs(name, attrs, dtype, keep_bits)),
            chain=codec_chain(name, own_codec or self.codec, dtype, keep_bits),
            shard_shape=shard,
            chunk_shape=chunk,
            keep_bits=keep_bits,
            values=values,
            digest=values_digest(values) if values is not None else getattr(item, "digest", None),
            staggered=MappingProxyType({d: self.staggered[d] for d in dims if d in self.staggered}),
        )

    def _array_layout(
        self,
        name: str,
        role: Role,
        item: Variable | Coordinate,
        dims: tuple[str, ...],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        if role is Role.SERIES:
            return (SERIES_CHUNK,), (SERIES_CHUNK,)
        own = (item.shard_shape, item.chunk_shape) if isinstance(item, Variable) else (None, None)
        if role is Role.COORDINATE or is_string(dtype):
            if own != (None, None):
                raise SchemaError(
                    f"variable {name!r}: strings are written whole; leave shard_shape and chunk_shape out",
                    kind="layout",
                )
            chunks = coordinate_chunks(shape, dtype.itemsize)
            return chunks, chunks
        defaults = [None if d is None else self._lengths_of(dims, d) for d in self._shapes]
        shard = shape_over(f"variable {name!r}: shard_shape", dims, own[0], defaults[0])
        chunk = shape_over(f"variable {name!r}: chunk_shape", dims, own[1], defaults[1])
        check_layout(name, dims, dtype.itemsize, shard, chunk)
        return tuple(shard), tuple(chunk)

    def _lengths_of(self, dims: Sequence[str], lengths: Mapping[str, int | None]) -> dict[str, int]:
        """The lengths that the schema gives for an array's dims; a staggered dim has the edges of the other one."""
        found = {d: lengths[d] or lengths.get(self.staggered[d].dim if d in self.staggered else d) for d in dims}
        return {d: n for d, n in found.items() if n is not None}

    def _check_names(self) -> None:
        if self.quantization_array is not None and QUANTIZATION_NAME in (*self.arrays, *self.dims):
            raise SchemaError(
                f"name {QUANTIZATION_NAME!r}: an array of that name says how keep_bits rounds; choose another name",
                kind="name",
            )
        for name, array in self.arrays.items():
            if name in self.dims and array.dims != (name,):
                raise SchemaError(
                    f"{name!r} is a dim, so the array of that name must have the dims ({name!r},), not {array.dims} "
                    "(CF conventions, coordinate variables); rename one of them",
                    kind="name",
                )

    def _check_strings(self) -> None:
        for name, array in self.arrays.items():
            partitioned = [d for d in array.space_dims if d in self.partitioned_dims]
            if not is_string(array.dtype) or array.role is Role.COORDINATE or (not partitioned and array.is_whole):
                continue
            if array.has_time:
                raise SchemaError(
                    f"variable {name!r}: strings don't stream; write integers with the attributes flag_values and "
                    "flag_meanings, or blobs",
                    kind="dtype",
                )
            raise SchemaError(
                f"static {name!r}: dim {partitioned[0]!r} is partitioned, and strings are written whole, the same on "
                "every rank; give them as the values of a coordinate",
                kind="dtype",
            )

    @property
    def is_resolved(self) -> bool:
        """Whether every array has its layout."""
        return all(a.is_resolved for a in self.arrays.values())

    @property
    def n_total(self) -> int | None:
        """Number of records there will ever be, None in append mode."""
        return None if isinstance(self.time, AppendTime) else self.time.n_records

    @property
    def is_location_series(self) -> bool:
        """Whether the records are locations: without times of their own, and each written by one rank alone."""
        return isinstance(self.time, LocationTime)

    @property
    def record_noun(self) -> str:
        """What messages call a record: ``"record"``, or ``"location"`` in a location series."""
        return "location" if self.is_location_series else "record"

    @property
    def mode(self) -> str:
        """``"append"``, ``"indexed"`` or ``"locations"``."""
        if self.is_location_series:
            return "locations"
        return "append" if self.n_total is None else "indexed"

    @property
    def partitioned_dims(self) -> tuple[str, ...]:
        """The dims that regions are made of: those of streaming variables, without time, in schema order.

        Without such, those of statics. Boundary variables don't count: nobody decomposes vertices. In a location
        series ranks divide the locations.
        """
        if self.is_location_series:
            return (self.record_dim,)
        arrays = [a for a in self.arrays.values() if a.name not in self._bounds]
        used = {d for a in arrays if a.has_time for d in a.base_dims}
        if not used:
            used = {d for a in arrays if a.is_sharded for d in a.base_dims}
        return tuple(d for d in self.dims if d in used)

    @property
    def partitioned_sizes(self) -> dict[str, int]:
        """Partitioned dim -> length."""
        lengths = {**self.dims, self.record_dim: self.n_total}
        return {d: n for d in self.partitioned_dims if (n := lengths[d]) is not None}

    @property
    def time_array(self) -> ArraySpec:
        """The time coordinate: float64, in chunks of `SERIES_CHUNK` records, written by the owner."""
        dtype = np.dtype("float64")
        attrs = {
            "standard_name": "time",
            "axis": "T",
            "units": self.time.units,
            "calendar": self.time.calendar,
            **json_object("time attributes", self.time.attrs),
        }
        time = self.time
        n = time.n_times if isinstance(time, LocationTime) else self.n_total
        chunks = (SERIES_CHUNK,) if n is None else coordinate_chunks((n,), dtype.itemsize)
        return ArraySpec(
            name=self.time_dim,
            role=Role.SERIES if n is None else Role.COORDINATE,
            dims=(self.time_dim,),
            shape=() if n is None else (n,),
            dtype=dtype,
            fill=np.array(np.nan),
            attrs=MappingProxyType(attrs),
            chain=tuple(profile_chain("compact", dtype)),
            shard_shape=chunks,
            chunk_shape=chunks,
            values=None if isinstance(time, AppendTime) else time.times,
            digest=None if isinstance(time, AppendTime) else time.digest,
        )

    @property
    def committed_array(self) -> ArraySpec | None:
        """Unless the time dim grows, the array that tells readers which do not know us what is committed."""
        if self.n_total is None:
            return None
        dtype = np.dtype("bool")
        chunks = (min(self.n_total, _COMMITTED_CHUNK),)
        return ArraySpec(
            name=COMMITTED_NAME,
            role=Role.COORDINATE,
            dims=(self.record_dim,),
            shape=(self.n_total,),
            dtype=dtype,
            fill=np.array(False),
            attrs=MappingProxyType({"long_name": f"whether the {self.record_noun} is committed"}),
            chain=tuple(profile_chain("compact", dtype)),
            shard_shape=chunks,
            chunk_shape=chunks,
        )

    @property
    def quantization_array(self) -> ArraySpec | None:
        """With ``keep_bits`` the array without values that says how (CF conventions, section 8.4.1)."""
        if all(a.keep_bits is None for a in self.arrays.values()):
            return None
        dtype = np.dtype("int8")
        attrs = {"algorithm": "bitround", "implementation": _IMPLEMENTATION}
        return ArraySpec(
            name=QUANTIZATION_NAME,
            role=Role.COORDINATE,
            dims=(),
            shape=(),
            dtype=dtype,
            fill=np.zeros((), dtype),
            attrs=MappingProxyType(attrs),
            chain=tuple(profile_chain("none", dtype)),
            shard_shape=(),
            chunk_shape=(),
        )

    @property
    def own_arrays(self) -> tuple[ArraySpec, ...]:
        """The arrays that no caller describes: time, `committed_array` and `quantization_array`, if there."""
        own = (self.time_array, self.committed_array, self.quantization_array)
        return tuple(array for array in own if array is not None)

    def with_attrs(self, attrs: Mapping[str, Any]) -> StreamSchema:
        """Return this schema with more attributes of the group.

        Not collective.

        Raises
        ------
        SchemaError
            Kind ``attribute`` for what JSON has no form for.
        """
        new = StreamSchema.__new__(StreamSchema)
        new.__dict__.update(self.__dict__)
        new.attrs = MappingProxyType(json_object("group attributes", {**self.attrs, **attrs}))
        return new

    def with_layout(self, layout: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> StreamSchema:
        """Return this schema with the layout of some arrays given.

        Not collective.

        Parameters
        ----------
        layout
            Array name -> shard shape and inner chunk shape over its dims.
        """
        # A coordinate by region has no layout of its own, so the schema's arrays carry all shapes from here on.
        new = StreamSchema.__new__(StreamSchema)
        new.__dict__.update(self.__dict__)
        arrays = dict(self.arrays)
        for name, (shard, chunk) in layout.items():
            if name not in arrays or not len(shard) == len(chunk) == len(arrays[name].dims):
                raise SchemaError(f"layout of {name!r}: {shard} and {chunk} are not for an array here", kind="layout")
            check_layout(name, arrays[name].dims, arrays[name].dtype.itemsize, shard, chunk)
            arrays[name] = replace(arrays[name], shard_shape=tuple(shard), chunk_shape=tuple(chunk))
            if arrays[name].is_resolved and arrays[name].is_sharded and arrays[name].grid.n_shards > MAX_SHARDS:
                raise SchemaError(
                    f"variable {name!r}: {arrays[name].grid.n_shards} shards of {tuple(shard)} a record, at most "
                    f"{MAX_SHARDS} are possible; give a larger shard_shape",
                    kind="layout",
                )
        new.arrays = MappingProxyType(arrays)
        return new

    def with_layout_of(self, stored: StreamSchema) -> StreamSchema:
        """Return this schema with whatever its layout leaves open taken from a stored one.

        Not collective.

        Parameters
        ----------
        stored
            A resolved schema.
        """
        layout = {}
        for name, array in self.arrays.items():
            other = stored.arrays.get(name)
            if other is not None and other.dims == array.dims and not array.is_resolved:
                layout[name] = tuple(
                    [n if n is not None else m for n, m in zip(own, theirs, strict=True)]
                    for own, theirs in (
                        (array.shard_shape, other.resolved_shard_shape),
                        (array.chunk_shape, other.resolved_chunk_shape),
                    )
                )
        return self.with_layout(layout)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON types, without values of coordinates.

        Not collective.
        """
        return {
            "dims": [[d, n] for d, n in self.dims.items()],
            "staggered": {d: s.dim for d, s in self.staggered.items()},
            "time": {
                "mode": self.mode,
                "n_records": self.n_total,
                "digest": self.time_array.digest,
                "units": self.time.units,
                "calendar": self.time.calendar,
                "attrs": json_object("time attributes", self.time.attrs),
            },
            "key_separator": self.key_separator,
            "attrs": dict(self.attrs),
            "arrays": [a.to_json() for a in self.arrays.values()],
            "coords": list(self.coords),
        }

    @classmethod
    def from_json(cls, document: Any) -> StreamSchema:
        """Return the schema that `to_json` described.

        Not collective.

        Raises
        ------
        FormatError
            Kind ``schema`` when the document is not such a description.
        """
        try:
            return cls._from_json(document)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise FormatError(f"the schema is damaged: {type(error).__name__}: {error}", kind="schema") from error

    @classmethod
    def _from_json(cls, document: Any) -> StreamSchema:
        groups: dict[str, dict[str, Any]] = {"variables": {}, "statics": {}, "coords": {}}
        layout: dict[str, tuple[list[int], list[int]]] = {}
        chains = {}
        for a in document["arrays"]:
            name, role, keep_bits = a["name"], Role(a["role"]), a["keep_bits"]
            fill = fill_from_json(stored_dtype(name, a["dtype"]), a["fill_value"])
            if name in document["coords"]:
                if keep_bits is not None:
                    raise FormatError(f"coordinate {name!r} has keep_bits {keep_bits!r}", kind="schema")
                groups["coords"][name] = Coordinate(
                    a["dims"], dtype=a["dtype"], attrs=a["attrs"], fill_value=fill, digest=_digest(a["digest"])
                )
            else:
                group = "statics" if role is Role.STATIC else "variables"
                groups[group][name] = Variable(
                    a["dims"],
                    a["dtype"],
                    attrs=a["attrs"],
                    codec=a["codecs"],
                    fill_value=fill,
                    keep_bits=keep_bits,
                )
            layout[name] = (
                [operator.index(n) for n in a["shard_shape"]],
                [operator.index(n) for n in a["chunk_shape"]],
            )
            chains[name] = codec_chain(name, a["codecs"], stored_dtype(name, a["dtype"]))
        time = document["time"]
        described = {"units": time["units"], "calendar": time["calendar"], "attrs": time["attrs"]}
        if time["mode"] == "append":
            mode: AppendTime | IndexedTime | LocationTime = AppendTime(**described, is_stored=True)
            if (time["n_records"], time["digest"]) != (None, None):
                raise FormatError("time of mode 'append' has a number of records", kind="schema")
        elif time["mode"] == "indexed":
            n, digest = operator.index(time["n_records"]), _digest(time["digest"]) or ""
            mode = IndexedTime(None, n_records=n, digest=digest, **described)
        elif time["mode"] == "locations":
            n, digest = operator.index(time["n_records"]), _digest(time["digest"]) or ""
            n_times = operator.index(document["dims"][1][1])
            mode = LocationTime(None, n_records=n, n_times=n_times, digest=digest, **described)
        else:
            raise FormatError(f"time mode {time['mode']!r} is not known", kind="schema")
        dims: dict[str, Any] = dict(document["dims"])
        lengths = dict(dims)
        for dim, base in document["staggered"].items():
            dims[dim] = Staggered(base, lengths[dim] - lengths[base])
        schema = cls(
            dims=dims,
            time=mode,
            key_separator=document["key_separator"],
            attrs=document["attrs"],
            variables=groups["variables"],
            statics=groups["statics"],
            coords=groups["coords"],
        )
        schema = schema.with_layout(layout)
        # A coordinate's chain has no place in Coordinate: it came from the schema's codec profile.
        schema.arrays = MappingProxyType({n: replace(a, chain=chains[n]) for n, a in schema.arrays.items()})
        return schema

    def fingerprint(self) -> str:
        """Return the sha256 of what makes two streams continue each other.

        Not collective.

        Notes
        -----
        Canonical JSON (sorted keys, separators "," and ":", ASCII, floats as ``float.hex()``) of dims with
        the time length (0 in append mode), time dim, mode, units, calendar, times digest, and name, dims, dtype,
        units, fill, keep_bits, codecs, chunk and shard shapes of variables and statics; see FORMAT.md.
        """
        described = {
            "dims": [[d, (self.n_total or 0) if d == self.record_dim else n] for d, n in self.dims.items()],
            "time_dim": self.time_dim,
            "mode": self.mode,
            "units": self.time.units,
            "calendar": self.time.calendar,
            "times_digest": self.time_array.digest,
            "key_separator": self.key_separator,
            "arrays": [
                {
                    "name": a.name,
                    "role": a.role.value,
                    "dims": list(a.dims),
                    "dtype": dtype_name(a.dtype),
                    "units": a.attrs.get("units"),
                    "fill_value": fill_to_json(a.fill),
                    "keep_bits": a.keep_bits,
                    "codecs": [dict(c) for c in a.chain],
                    "chunk_shape": list(a.chunk_shape),
                    "shard_shape": list(a.shard_shape),
                }
                for a in sorted(self.arrays.values(), key=lambda a: a.name)
                if a.role is not Role.COORDINATE
            ],
        }
        return hashlib.sha256(canonical_json(described)).hexdigest()

    def coordinates_digest(self) -> str:
        """Return the sha256 over name, dims, dtype and values of the coordinates that the owner writes.

        Not collective.
        """
        described = [
            [a.name, list(a.dims), dtype_name(a.dtype), a.digest]
            for a in sorted(self.arrays.values(), key=lambda a: a.name)
            if a.role is Role.COORDINATE
        ]
        return hashlib.sha256(canonical_json(described)).hexdigest()

    def __repr__(self) -> str:
        dims = ", ".join(f"{d}: {n}" for d, n in self.dims.items())
        return f"StreamSchema({dims}; {', '.join(self.variables)})"


def schema_fingerprint(schema: StreamSchema | str | bytes) -> str:
    """Return the fingerprint of a schema, or of one in its JSON form.

    Not collective.

    Raises
    ------
    FormatError
        Kind ``schema`` when the JSON form is none.
    """
    if not isinstance(schema, StreamSchema):
        try:
            document = json.loads(schema)
        except (RecursionError, TypeError, ValueError) as error:
            raise FormatError(f"the schema is not valid JSON: {error}", kind="schema") from error
        schema = StreamSchema.from_json(document)
    return schema.fingerprint()

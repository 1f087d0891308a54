"""From a schema and a number of writers to shapes, regions and their cost.

The default layout: inner chunks near 1 MiB, whole rows in the fastest dims; shards are the ranks' boxes
rounded up to inner chunks, towards 64 MiB an object; time extents 1. Lengths that the schema gives stand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from mpistream.arrays import ArraySpec
from mpistream.description import AppendTime, Variable
from mpistream.errors import AlignmentError, SchemaError, TilingError
from mpistream.grid import assign_shards, split_units
from mpistream.locations import resolve_locations, shares_of
from mpistream.region import AnyRegion, Region, regions_of
from mpistream.schema import StreamSchema
from mpistream.tiling import Box

__all__ = [
    "SMALL_OBJECT_NBYTES",
    "assign_writers",
    "shard_regions",
    "n_writers_for",
    "object_nbytes",
    "resolve_layout",
    "suggest_layout",
]

_MIB = 1024 * 1024
_CHUNK_NBYTES = _MIB
_OBJECT_NBYTES = 64 * _MIB
SMALL_OBJECT_NBYTES = 4 * _MIB
# Given regions may force shards that are smaller than the regions, up to this many objects a writer and record.
_MAX_FORCED_OBJECTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """What is known about one dim before its lengths are chosen."""

    shard: int | None
    chunk: int | None
    box: int
    """Extent of a writer's box; with ``is_exact`` the shard must divide it."""
    is_exact: bool


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for k in range(1, math.isqrt(n) + 1) if n % k == 0 for d in (k, n // k) if d <= max(limit, 1))


def _chunk_lengths(itemsize: int, time_extent: int, axes: Sequence[_Axis]) -> list[int]:
    """Fill an inner chunk from the fastest dim until it has about 1 MiB."""
    room = max(_CHUNK_NBYTES // (itemsize * time_extent), 1)
    lengths: list[int] = []
    for axis in reversed(axes):
        if axis.chunk is not None:
            length = axis.chunk
        elif axis.shard is not None or axis.is_exact:
            length = _largest_divisor(axis.shard or axis.box, room)
        else:
            # Equal parts: 10 rows of which 6 fit are 5 and 5, not 6 and 4.
            length = -(-axis.box // -(-axis.box // min(axis.box, room)))
        lengths.append(length)
        room = max(room // length, 1)
    return lengths[::-1]


def _shard_lengths(itemsize: int, time_extent: int, axes: Sequence[_Axis], chunk: Sequence[int]) -> list[int]:
    """Round the boxes up to inner chunks; cut the slowest dims where that is more than 64 MiB."""
    lengths = [a.shard or -(-a.box // c) * c for a, c in zip(axes, chunk, strict=True)]
    for i, axis in enumerate(axes):
        excess = -(-itemsize * time_extent * math.prod(lengths) // _OBJECT_NBYTES)
        n = lengths[i] // chunk[i]
        if axis.shard is not None or excess <= 1 or n <= 1:
            continue
        # Parts that divide the box evenly keep the ranks' loads equal: look for them up to twice as many.
        parts = range(min(excess, n), min(2 * excess, n) + 1)
        even = [k for k in parts if n % k == 0]
        if axis.is_exact:
            lengths[i] = _largest_divisor(n, n // min(excess, n)) * chunk[i]
        else:
            lengths[i] = -(-n // (even[0] if even else parts[0])) * chunk[i]
    return lengths


def _time_lengths(array: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not array.has_time:
        return (), ()
    shard, chunk = array.shard_shape[0], array.chunk_shape[0]
    if shard is None:
        shard = chunk or 1
    return (shard,), (chunk if chunk is not None else 1,)


def _space(array: ArraySpec, shape: Sequence[int | None]) -> Sequence[int | None]:
    return shape[1:] if array.has_time else shape


def _boxes_of(
    sizes: Mapping[str, int], units: Mapping[str, int], n_writers: int
) -> tuple[dict[str, int], dict[str, bool]]:
    """Return the largest box extent per dim of a balanced decomposition into whole units."""
    boxes = split_units([-(-n // units[d]) for d, n in sizes.items()], n_writers, list(units.values()))
    extents = {d: max(b[i][1] - b[i][0] for b in boxes) * units[d] for i, d in enumerate(sizes)}
    return extents, dict.fromkeys(sizes, False)


def _boxes_of_regions(
    sizes: Mapping[str, int], regions: Sequence[Region], given: Mapping[str, int | None], row_nbytes: int
) -> tuple[dict[str, int], dict[str, bool]]:
    """Return per dim the longest shard that puts every edge of the given regions on a shard edge."""
    extents: dict[str, int] = {}
    is_exact: dict[str, bool] = {}
    for i, (dim, size) in enumerate(sizes.items()):
        edges = {edge for r in regions for box in r.boxes for edge in box[i] if edge != size}
        common = math.gcd(*edges)
        extents[dim], is_exact[dim] = (common, True) if common else (size, False)
    active = max(sum(not r.is_empty for r in regions), 1)
    free = {d: n for d, n in sizes.items() if given.get(d) is None}
    n_objects = math.prod(-(-n // extents[d]) for d, n in free.items())
    if n_objects > _MAX_FORCED_OBJECTS * active and row_nbytes < n_objects * SMALL_OBJECT_NBYTES:
        dim = max(free, key=lambda d: free[d] / extents[d])
        at = list(sizes).index(dim)
        lengths = sorted({b[at][1] - b[at][0] for r in regions for b in r.boxes})
        raise AlignmentError(
            f"dim {dim!r}: the given regions have lengths {lengths}, whose edges share only multiples of "
            f"{extents[dim]}: that is {n_objects} objects a record for {active} writers; make all regions but the last "
            f"multiples of one shard length, for example {-(-sizes[dim] // active)}, or leave region or rearrange out",
            kind="layout",
        )
    return extents, is_exact


def _reference(schema: StreamSchema) -> ArraySpec:
    """Return the array that decides the shards: the largest of those that have the most partitioned dims."""
    dims = set(schema.partitioned_dims)
    sharded = [a for a in schema.arrays.values() if a.is_sharded]
    # A streaming variable that is not partitioned, such as the bounds of time, decides nothing where another can.
    cut = [a for a in sharded if not dims.isdisjoint(a.base_dims)]
    return max(
        cut or sharded or list(schema.arrays.values()),
        key=lambda a: (a.has_time, len(dims & set(a.base_dims)), a.dtype.itemsize * math.prod(a.shape)),
    )


def n_writers_for(schema: StreamSchema) -> int:
    """Return how many ranks give objects of about 64 MiB.

    Not collective.
    """
    array = _reference(schema)
    return max(round(array.dtype.itemsize * math.prod((*_time_lengths(array)[0], *array.shape)) / _OBJECT_NBYTES), 1)


def object_nbytes(schema: StreamSchema) -> int:
    """Return the bytes before compression of a shard of the largest array.

    Not collective.

    Parameters
    ----------
    schema
        A resolved schema.
    """
    array = _reference(schema)
    return array.dtype.itemsize * array.row_length * math.prod(map(min, array.shape, array.grid.shard_shape))


def resolve_layout(schema: StreamSchema, n_writers: int, regions: Sequence[AnyRegion] | None = None) -> StreamSchema:
    """Return the schema with the layout of every array chosen.

    Not collective.

    Parameters
    ----------
    schema
        Lengths that it gives stand.
    n_writers
        Number of ranks.
    regions
        The ranks' own regions, when they chose them.

    Raises
    ------
    AlignmentError
        When the given regions' edges share no useful shard length.
    """
    if schema.is_resolved or schema.is_location_series:
        return schema if schema.is_resolved else resolve_locations(schema, n_writers)
    if regions is not None and (chosen := _fitting_default(schema, regions)) is not None:
        return chosen
    reference = _reference(schema)
    # Of a staggered dim the edges are those of the other one.
    dims = reference.base_dims
    sizes = {d: n - extra for d, n, extra in zip(dims, reference.shape, reference.n_extra, strict=True)}
    given = dict(zip(dims, _space(reference, reference.shard_shape), strict=True))
    given_chunk = dict(zip(dims, _space(reference, reference.chunk_shape), strict=True))
    time_shard, time_chunk = _time_lengths(reference)
    itemsize = reference.dtype.itemsize
    edges: dict[str, int] = {}
    if regions is None:
        partitioned = {d: n for d, n in sizes.items() if d in schema.partitioned_dims}
        units = {d: given[d] or given_chunk[d] or 1 for d in partitioned}
        extents, is_exact = _boxes_of(partitioned, units, n_writers)
    else:
        row_nbytes = itemsize * math.prod((*time_shard, *reference.shape))
        own = regions_of(reference.name, regions)
        cut = {d: n for d, n in schema.partitioned_sizes.items() if d in own[0].dims}
        extents, is_exact = _boxes_of_regions(cut, own, given, row_nbytes)
        edges = {d: n for d, n in extents.items() if is_exact[d] and d not in sizes}
    axes = [
        _Axis(shard=given[d], chunk=given_chunk[d], box=min(extents.get(d, n), n), is_exact=is_exact.get(d, False))
        for d, n in sizes.items()
    ]
    chunk = _chunk_lengths(itemsize, math.prod(time_chunk), axes)
    shards = dict(zip(dims, _shard_lengths(itemsize, math.prod(time_shard), axes, chunk), strict=True))
    layout = {
        a.name: _layout_of(a, {**edges, **shards}, chunk if a is reference else None)
        for a in schema.arrays.values()
        if not a.is_resolved
    }
    return schema.with_layout(layout)


def suggest_layout(
    sizes: Mapping[str, int],
    dtype: DTypeLike = "float32",
    *,
    n_ranks: int | None = None,
    n_records: int = 1,
) -> dict[str, dict[str, int]]:
    """Return shard and inner chunk shapes that give few, large objects: what is chosen where a schema says nothing.

    Not collective.

    Parameters
    ----------
    sizes
        Dim -> length of a variable, without time; the fastest dim last. Any length, primes too.
    dtype
        Its dtype on disk.
    n_ranks
        Ranks that shall write it; by default as many as give objects of 64 MiB.
    n_records
        Records that are committed together. Where a record is less than 64 MiB a rank, so many of them, or as many
        as fit, share an object.

    Returns
    -------
    ``{"shard_shape": ..., "chunk_shape": ...}``, dim -> length, to be passed on to `StreamSchema` or `Variable`.

    Raises
    ------
    SchemaError
        For lengths, a dtype or numbers that are none.
    """
    for what, n in (("n_ranks", 1 if n_ranks is None else n_ranks), ("n_records", n_records)):
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise SchemaError(f"{what} {n!r}: give an integer above 0", kind="layout")
    if "time" in sizes:
        raise SchemaError(f"sizes {dict(sizes)} name 'time': give the lengths of the other dims", kind="layout")
    time = "time"

    def of(row_length: int) -> StreamSchema:
        return StreamSchema(
            dims={time: None, **sizes},
            time=AppendTime(units="seconds since 2000-01-01"),
            variables={"variable of this layout": Variable((time, *sizes), dtype)},
            shard_shape={time: row_length},
        )

    schema = resolve_layout(of(1), n_ranks or n_writers_for(of(1)))
    fit = max(_OBJECT_NBYTES // max(object_nbytes(schema), 1), 1)
    row_length = max(k for k in range(1, min(fit, n_records) + 1) if n_records % k == 0)
    array = schema.arrays["variable of this layout"]
    space = [dict(zip(sizes, s[1:], strict=True)) for s in (array.resolved_shard_shape, array.resolved_chunk_shape)]
    return {"shard_shape": {time: row_length, **space[0]}, "chunk_shape": {time: 1, **space[1]}}


def _fitting_default(schema: StreamSchema, regions: Sequence[AnyRegion]) -> StreamSchema | None:
    """Return the layout that would be chosen without regions, if these lie on its edges: `shard_regions` gives such."""
    n_active = sum(not r.is_empty for r in regions)
    for n_writers in dict.fromkeys((max(n_active, 1), len(regions))):
        chosen = resolve_layout(schema, n_writers)
        try:
            assign_writers(chosen, regions)
        except (AlignmentError, TilingError):
            continue
        return chosen
    return None


def _layout_of(array: ArraySpec, shards: Mapping[str, int], chunk: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Return shard and inner chunk of one array, its shards on the edges that all arrays share."""
    time_shard, time_chunk = _time_lengths(array)
    own = zip(
        array.base_dims,
        array.shape,
        _space(array, array.shard_shape),
        _space(array, array.chunk_shape),
        strict=True,
    )
    known = list(own)
    lengths = [s or _rounded(shards.get(d, n), c) for d, n, s, c in known]
    if chunk is None:
        # Not the reference: its shards may be far larger. Edges that arrays share are kept by whole divisors.
        itemsize = array.dtype.itemsize * math.prod(time_shard)
        for i, (dim, _, given, unit) in enumerate(known):
            excess = -(-itemsize * math.prod(lengths) // _OBJECT_NBYTES)
            if given is None and excess > 1:
                n = lengths[i] // (unit or 1)
                part = max(n // excess, 1)
                lengths[i] = (_largest_divisor(n, part) if dim in shards else _handy(part)) * (unit or 1)
        axes = [_Axis(shard=s, chunk=c, box=n, is_exact=False) for s, (_, n, _, c) in zip(lengths, known, strict=True)]
        chunk = _chunk_lengths(array.dtype.itemsize, math.prod(time_chunk), axes)
    return [*time_shard, *lengths], [*time_chunk, *chunk]


def _handy(n: int) -> int:
    """Return a number near ``n`` that has many divisors, so that inner chunks of any size fit."""
    step = 1 << max(n.bit_length() - 3, 0)
    return max(n // step * step, 1)


def _rounded(length: int, chunk: int | None) -> int:
    return length if chunk is None else -(-length // chunk) * chunk


def shard_regions(schema: StreamSchema, n_writers: int) -> list[Region]:
    """Split the grid into one balanced box of whole shards per rank.

    Not collective.

    Parameters
    ----------
    schema
        The schema; a layout that is open is chosen for ``n_writers`` first.
    n_writers
        Number of ranks. With more ranks than shards the last regions are empty.

    Returns
    -------
    One region per rank, over the partitioned dims.
    """
    if (schema := resolve_layout(schema, n_writers)).is_location_series:
        return shares_of(schema, n_writers)
    sizes = schema.partitioned_sizes
    units = {
        d: math.lcm(*(g.shard_shape[g.bases.index(d)] for a in _sharded(schema) for g in [a.grid] if d in g.bases))
        for d in sizes
    }
    boxes = split_units([-(-n // units[d]) for d, n in sizes.items()], n_writers, list(units.values()))
    regions = []
    for box in boxes:
        cells: Box = tuple(
            (min(a * u, n), min(b * u, n)) for (a, b), u, n in zip(box, units.values(), sizes.values(), strict=True)
        )
        regions.append(Region.of_box(tuple(sizes), cells))
    return regions


def _sharded(schema: StreamSchema) -> list[ArraySpec]:
    return [a for a in schema.arrays.values() if a.is_sharded]


def assign_writers(schema: StreamSchema, regions: Sequence[AnyRegion]) -> dict[str, list[tuple[Box, ...]]]:
    """Return which boxes of each array each rank writes; this is the tiling proof.

    Not collective.

    Parameters
    ----------
    schema
        A resolved schema.
    regions
        One region per rank, or one per rank and variable.

    Returns
    -------
    Array name -> per rank the boxes over the array's dims without time.

    Raises
    ------
    AlignmentError
        When a region does not lie on shard edges.
    TilingError
        When the regions overlap or leave a hole, or no rank holds a shard of an array of fewer dims whole.
    """
    found = {}
    for array in _sharded(schema):
        own = regions_of(array.name, regions)
        found[array.name] = assign_shards(array.grid, own[0].dims, own)
    return found

"""What a run will cost, before it writes anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mpistream.arrays import Role
from mpistream.layout import SMALL_OBJECT_NBYTES, assign_writers, resolve_layout
from mpistream.region import Region
from mpistream.schema import StreamSchema
from mpistream.tiling import box_n_cells

__all__ = ["Plan", "plan"]

_MANY_OBJECTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will write, per record, before it writes anything."""

    n_writers: int
    n_active_writers: int
    """Writers with a region that is not empty."""
    n_objects_per_record: float
    """Shards a record, over all variables; a row of R records counts 1/R."""
    n_folders_per_record: float
    nbytes_per_record: int
    """Bytes before compression."""
    max_writer_nbytes_per_record: int
    max_object_nbytes: int
    """Bytes before compression of the largest variable's shard."""
    writer_memory_nbytes: int
    """Most bytes that the rows of one writer hold in memory, if nothing compresses."""
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.n_active_writers} of {self.n_writers} ranks write {_size(self.nbytes_per_record)} a record "
            f"in {self.n_objects_per_record:g} objects of at most {_size(self.max_object_nbytes)}, "
            f"{self.n_folders_per_record:g} folders; at most {_size(self.max_writer_nbytes_per_record)} a rank and "
            f"record, {_size(self.writer_memory_nbytes)} in memory"
        )


def _is_partitioned(schema: StreamSchema, name: str) -> bool:
    return not set(schema.partitioned_dims).isdisjoint(schema.arrays[name].dims)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:  # noqa: PLR2004
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def plan(schema: StreamSchema, regions: Iterable[Region]) -> Plan:
    """Return what a run on these regions writes: objects, folders, bytes and memory, with warnings.

    Not collective.

    Parameters
    ----------
    schema
        The schema; a layout that is open is chosen for these regions.
    regions
        One region per rank, for example from `decompose`.

    Raises
    ------
    AlignmentError, TilingError
        As in `write_open`.
    """
    regions = list(regions)
    schema = resolve_layout(schema, len(regions), regions)
    owners = assign_writers(schema, regions)
    objects = folders = 0.0
    memory = [0] * len(regions)
    record = [0] * len(regions)
    for a in schema.arrays.values():
        if a.role is not Role.VARIABLE:
            continue
        objects += a.grid.n_shards / a.row_length
        if schema.key_separator == "/":
            folders += (1 + sum(math.prod(a.grid.grid_shape[:i]) for i in range(1, len(a.dims) - 1))) / a.row_length
        slab = a.resolved_chunk_shape[0] if a.resolved_chunk_shape[0] > 1 else 0
        for i, boxes in enumerate(owners[a.name]):
            nbytes = a.dtype.itemsize * sum(map(box_n_cells, boxes))
            record[i] += nbytes
            memory[i] += nbytes * (a.row_length + slab)
    shards = {
        a.name: a.dtype.itemsize * a.row_length * math.prod(map(min, a.shape, a.grid.shard_shape))
        for a in schema.arrays.values()
        if a.role is Role.VARIABLE
    }
    return Plan(
        n_writers=len(regions),
        n_active_writers=sum(not r.is_empty for r in regions),
        n_objects_per_record=objects,
        n_folders_per_record=folders,
        nbytes_per_record=sum(record),
        max_writer_nbytes_per_record=max(record),
        max_object_nbytes=max(shards.values(), default=0),
        writer_memory_nbytes=max(memory),
        # What is not partitioned is small, and is written by one rank.
        warnings=_warnings(schema, {n: b for n, b in shards.items() if _is_partitioned(schema, n)}, objects),
    )


def _warnings(schema: StreamSchema, shards: Mapping[str, int], n_objects: float) -> tuple[str, ...]:
    found = []
    small = {n: b for n, b in shards.items() if b < SMALL_OBJECT_NBYTES}
    if small:
        name = min(small, key=lambda n: small[n])
        row = schema.arrays[name].row_length
        found.append(
            f"objects of variable {name!r} have {_size(small[name])} before compression, under 4 MiB: "
            f"raise shard_shape, for example its {schema.time_dim!r} from {row} to "
            f"{row * -(-SMALL_OBJECT_NBYTES // small[name])}"
        )
    if n_objects > _MANY_OBJECTS:
        found.append(
            f"{n_objects:g} objects a record, over 10,000: raise shard_shape, or its {schema.time_dim!r} length"
        )
    return tuple(found)

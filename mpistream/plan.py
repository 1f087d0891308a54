"""What a run will cost, before it writes anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpistream.arrays import Role
from mpistream.decomposition import settle
from mpistream.epoch import EpochState
from mpistream.errors import SchemaError, counted
from mpistream.holding import checked_holdings, plain_region
from mpistream.layout import SMALL_OBJECT_NBYTES
from mpistream.locations import chunk_locations, row_length
from mpistream.manifest import CHECKPOINT_ATTR
from mpistream.names import check_writers
from mpistream.region import RegionLike
from mpistream.schema import StreamSchema
from mpistream.tiling import box_n_cells

__all__ = ["Plan", "plan", "plan_of", "size_text"]

_MANY_OBJECTS = 10_000
# A row of more records is no advice.
_MANY_ROWS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will write, per record, before it writes anything."""

    n_ranks: int
    writers: tuple[int, ...]
    """Ranks that write shards."""
    layouts: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Variable -> its shard shape and its inner chunk shape, over its dims."""
    n_objects_per_record: float
    """Shards a record, over all variables; a row of R records counts 1/R."""
    n_folders_per_record: float
    nbytes_per_record: int
    """Bytes before compression."""
    nbytes_moved_per_record: int
    """Bytes that go from the rank that holds them to another one that writes them."""
    max_writer_nbytes_per_record: int
    max_object_nbytes: int
    """Bytes before compression of the largest variable's shard."""
    writer_memory_nbytes: int
    """Most bytes that the rows of one writer and what waits for its threads hold in memory, if nothing compresses."""
    node_memory_nbytes: int
    """Most bytes that the writers of one node hold so."""
    warnings: tuple[str, ...]
    record_noun: str = "record"
    """What a record is: ``"location"`` in a location series."""

    @property
    def n_writers(self) -> int:
        """How many ranks write shards."""
        return len(self.writers)

    def n_objects(self, n_records: int) -> int:
        """Return the shards of a run of so many records.

        Not collective.
        """
        return math.ceil(self.n_objects_per_record * n_records)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON types.

        Not collective.
        """
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_json` described.

        Not collective.
        """
        layouts = {name: (tuple(shard), tuple(chunk)) for name, (shard, chunk) in document["layouts"].items()}
        lists = {name: tuple(document[name]) for name in ("writers", "warnings")}
        return cls(**{**document, **lists, "layouts": layouts})

    def __str__(self) -> str:
        n_moved = self.nbytes_moved_per_record
        moved = f", {size_text(n_moved)} moved between ranks" if n_moved else ""
        writers = f"{self.n_writers} of {counted(self.n_ranks, 'rank')} write{'s' if self.n_writers == 1 else ''}"
        return (
            f"{writers} {size_text(self.nbytes_per_record)} a {self.record_noun} "
            f"in {counted(self.n_objects_per_record, 'object')} of at most {size_text(self.max_object_nbytes)}, "
            f"{counted(self.n_folders_per_record, 'folder')}; at most {size_text(self.max_writer_nbytes_per_record)} "
            f"a rank and {self.record_noun}, {size_text(self.writer_memory_nbytes)} in memory{moved}"
        )


def _is_partitioned(schema: StreamSchema, name: str) -> bool:
    return schema.is_location_series or not set(schema.partitioned_dims).isdisjoint(schema.arrays[name].base_dims)


def size_text(nbytes: float) -> str:
    """Return a number of bytes as text, for example ``1.5 GiB``.

    Not collective.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:  # noqa: PLR2004
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def plan(
    schema: StreamSchema,
    regions: Iterable[RegionLike],
    *,
    nodes: Sequence[str] | None = None,
    writers: str | int = "auto",
    rearrange: str = "auto",
    max_pending_nbytes: int | None = None,
) -> Plan:
    """Return what a run on these regions writes and moves: objects, folders, bytes and memory, with warnings.

    Not collective.

    Parameters
    ----------
    schema
        The schema; a layout that is open is chosen for these regions.
    regions
        What each rank holds, as in `write_open`, one region per rank, for example from `decompose`.
    nodes
        Name of the node of each rank; by default all run on one.
    writers, rearrange
        Who writes what others hold, as in `Options`.
    max_pending_nbytes
        What may wait for a writer's threads, as in `Options`; 0 for a run without threads.

    Raises
    ------
    SchemaError, AlignmentError, TilingError
        As in `write_open`; for `Indices`, too.
    """
    check_writers(writers, rearrange)
    if not isinstance(regions, Iterable):
        raise SchemaError(f"regions {regions!r}: give the region of each rank, as decompose does", kind="region")
    given = [plain_region(region) for region in regions]
    if nodes is not None and len(nodes) != len(given):
        raise SchemaError(
            f"{len(nodes)} nodes for {len(given)} regions: give the name of the node of each rank", kind="region"
        )
    held = checked_holdings(given, schema)
    if held.indexed_dims:
        raise SchemaError(
            "plan takes boxes; what Indices cost is known when the ranks have compared them: see plan() of a writer",
            kind="region",
        )
    nodes = nodes or [""] * len(given)
    settled = settle(schema, held.regions, nodes, writers=writers, rearrange=rearrange)
    return plan_of(*settled, nodes, writers=writers, max_pending_nbytes=max_pending_nbytes)


def plan_of(
    schema: StreamSchema,
    epoch: EpochState,
    nodes: Sequence[str],
    *,
    writers: str | int,
    max_pending_nbytes: int | None = None,
) -> Plan:
    """Return what a run in an epoch writes and moves.

    Not collective.

    Parameters
    ----------
    schema
        A resolved schema.
    epoch
        Who holds and who writes what.
    nodes
        Name of the node of each rank.
    writers
        How many ranks should write, as in `Options`.
    max_pending_nbytes
        As in `plan`.
    """
    n_ranks = len(epoch.regions)
    objects = folders = 0.0
    n_moved = 0
    memory = [0] * n_ranks
    record = [0] * n_ranks
    is_writer = [False] * n_ranks
    for a in schema.arrays.values():
        if a.role is not Role.VARIABLE:
            continue
        objects += a.grid.n_shards / a.row_length
        if schema.key_separator == "/":
            folders += (1 + sum(math.prod(a.grid.grid_shape[:i]) for i in range(1, len(a.dims) - 1))) / a.row_length
        slab = a.resolved_chunk_shape[0] if a.resolved_chunk_shape[0] > 1 else 0
        is_rearranged = epoch.is_rearranged(a.name)
        n_moved += a.dtype.itemsize * epoch.n_moved_cells(a.name)
        for i, boxes in enumerate(epoch.boxes[a.name]):
            nbytes = a.dtype.itemsize * sum(map(box_n_cells, boxes))
            record[i] += nbytes
            # Of a rearranged array the record itself is received, too.
            memory[i] += nbytes * (a.row_length + slab + is_rearranged)
            is_writer[i] |= nbytes > 0
    memory = _with_pending(schema, memory, record, max_pending_nbytes)
    if schema.is_location_series:
        # Each location is one rank's, and so are its bytes.
        is_writer = [start < stop for start, stop in epoch.records]
        record, memory = record[:1], [n if writes else 0 for n, writes in zip(memory, is_writer, strict=True)]
    on_node: dict[str, int] = {}
    for node, nbytes in zip(nodes, memory, strict=True):
        on_node[node] = on_node.get(node, 0) + nbytes
    shards = {
        a.name: a.dtype.itemsize * a.row_length * math.prod(map(min, a.shape, a.grid.shard_shape))
        for a in schema.arrays.values()
        if a.role is Role.VARIABLE
    }
    return Plan(
        n_ranks=n_ranks,
        writers=tuple(rank for rank, writes in enumerate(is_writer) if writes),
        layouts={
            a.name: (a.resolved_shard_shape, a.resolved_chunk_shape) for a in schema.arrays.values() if a.has_time
        },
        n_objects_per_record=objects,
        n_folders_per_record=folders,
        nbytes_per_record=sum(record),
        nbytes_moved_per_record=n_moved,
        max_writer_nbytes_per_record=max(record),
        max_object_nbytes=max(shards.values(), default=0),
        writer_memory_nbytes=max(memory),
        node_memory_nbytes=max(on_node.values()),
        warnings=_warnings(schema, {n: b for n, b in shards.items() if _is_partitioned(schema, n)}, objects, n_ranks)
        + _few_ranks(n_ranks, writers),
        record_noun=schema.record_noun,
    )


def _with_pending(
    schema: StreamSchema, held: Sequence[int], record: Sequence[int], max_pending_nbytes: int | None
) -> list[int]:
    """Add what waits for the threads of each writer to what its rows hold; a rank without records is none."""
    at_a_time = record
    if schema.is_location_series:
        # A chunk of each variable. What is being filled has a bound of the same size.
        at_a_time = [row_length(schema) * n for n in record]
        held = [max(n, max_pending_nbytes or 2 * n) for n in at_a_time]
    pending = [2 * n if max_pending_nbytes is None else max_pending_nbytes for n in at_a_time]
    return [h + p if n else 0 for h, p, n in zip(held, pending, record, strict=True)]


def _few_ranks(n_ranks: int, writers: str | int) -> tuple[str, ...]:
    """A site may say for all runs how many ranks write; in one of fewer ranks that is no error."""
    if not isinstance(writers, int) or writers <= n_ranks:
        return ()
    return (f"Options(writers={writers}), but only {counted(n_ranks, 'rank')}: no more than those write",)


def _warnings(schema: StreamSchema, shards: Mapping[str, int], n_objects: float, n_ranks: int) -> tuple[str, ...]:
    found = []
    # A store of one record, and a new one at each save: longer rows are no advice, and small objects come again.
    is_state = CHECKPOINT_ATTR in schema.attrs
    most = min(_MANY_ROWS, schema.n_total or _MANY_ROWS)
    rows = {n: schema.arrays[n].row_length * -(-SMALL_OBJECT_NBYTES // max(b, 1)) for n, b in shards.items()}
    # Where an array lies in one shard, and no row of a fit length would be enough, its objects are small for good.
    small = {
        n: b
        for n, b in shards.items()
        if b < SMALL_OBJECT_NBYTES and (schema.arrays[n].grid.n_shards > 1 or rows[n] <= most)
    }
    if schema.is_location_series:
        found += _few_locations(schema, shards, n_ranks)
    elif small and not is_state:
        name = min(small, key=lambda n: small[n])
        row = schema.arrays[name].row_length
        example = f"for example its {schema.record_dim!r} from {row} to {rows[name]}"
        found.append(
            f"objects of variable {name!r} have {size_text(small[name])} before compression, under 4 MiB: "
            f"raise shard_shape, {example if rows[name] <= most else 'up to the whole array'}"
        )
    if n_objects > _MANY_OBJECTS:
        or_rows = "" if is_state else f", or its {schema.record_dim!r} length"
        found.append(f"{n_objects:g} objects a {schema.record_noun}, over 10,000: raise shard_shape{or_rows}")
    return tuple(found)


def _few_locations(schema: StreamSchema, shards: Mapping[str, int], n_ranks: int) -> list[str]:
    """What is chosen where nothing is given is as large as the ranks' shares allow."""
    name = min(shards, key=lambda n: shards[n])
    array, row = schema.arrays[name], row_length(schema)
    longest = chunk_locations(array.shape[0], -(-(schema.n_total or 1) // n_ranks), itemsize=array.dtype.itemsize)
    text = (
        f"objects of variable {name!r} have {size_text(shards[name])} before compression, under 4 MiB: raise "
        f"chunk_locations from {row} to {longest}"
    )
    return [text] if shards[name] < SMALL_OBJECT_NBYTES and row < longest else []

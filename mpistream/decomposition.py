"""Who holds and who writes what: the choice between aligned regions and rearranging.

Theory of operation
-------------------
When the regions lie on shard edges, each rank can write what it holds, and nothing moves. When they don't, or when
that would make many small objects, a few ranks write what many hold (`mpistream.rearrange`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpistream.epoch import EpochState, indexed_epoch, prove_epoch, prove_rearranged
from mpistream.errors import AlignmentError, TilingError
from mpistream.grid import split_units
from mpistream.layout import SMALL_OBJECT_NBYTES, n_writers_for, object_nbytes, resolve_layout, shard_regions
from mpistream.locations import row_length, shares_of
from mpistream.ranges import Ranges
from mpistream.region import AnyRegion, Region, regions_of
from mpistream.schema import StreamSchema

__all__ = ["decompose", "settle", "settle_indexed"]


def settle(
    schema: StreamSchema,
    regions: Sequence[AnyRegion] | None,
    nodes: Sequence[str],
    *,
    writers: str | int,
    rearrange: str,
    committed: Ranges = (),
) -> tuple[StreamSchema, EpochState]:
    """Return the schema with its layout, and the proven epoch.

    Not collective.

    Parameters
    ----------
    schema
        The schema; lengths that it gives stand.
    regions
        What each rank holds; None: that is chosen here.
    nodes
        Name of the node that each rank runs on.
    writers, rearrange
        As in `Options`.
    committed
        What is committed; in a location series the rest is spread over the ranks.

    Raises
    ------
    AlignmentError
        With ``rearrange="never"``: regions that don't lie on shard edges.
    TilingError
        Regions that overlap, leave a hole, or end beyond the grid.
    """
    n_ranks = len(nodes)
    if schema.is_location_series:
        resolved = resolve_layout(schema, n_ranks)
        epoch = prove_epoch(resolved, shares_of(resolved, n_ranks, committed) if regions is None else regions)
        if rearrange == "never":
            _check_nothing_lent(resolved, epoch)
        return resolved, epoch
    if rearrange == "never":
        return _aligned(schema, regions, n_ranks)
    n_writers = _n_writers(schema, nodes, writers)
    direct = _aligned_or_none(schema, regions, n_ranks)
    if direct is not None and _is_better_direct(schema, direct, regions, n_writers, writers):
        return direct
    resolved = resolve_layout(schema, n_writers)
    held: Sequence[AnyRegion] = regions if regions is not None else _balanced(resolved, n_ranks)
    return resolved, prove_rearranged(resolved, held, n_writers, _numbered(nodes))


def _check_nothing_lent(schema: StreamSchema, epoch: EpochState) -> None:
    for share in epoch.shares():
        if share.lent is not None:
            start, length = share.lent[0], row_length(schema)
            raise AlignmentError(
                f"rank {share.writer} has the locations from {start} on, which does not lie on the edge of a chunk of "
                f"{length}; the nearest are {start // length * length} and {-(-start // length) * length}",
                rank=share.writer,
            )


def decompose(schema: StreamSchema, n_ranks: int, *, nodes: Sequence[str] | None = None) -> list[Region]:
    """Split the grid into one balanced box per rank, as `write_open` does where it is given no region.

    Not collective.

    Parameters
    ----------
    schema
        The schema.
    n_ranks
        Number of ranks.
    nodes
        Name of the node of each rank; by default all run on one.

    Returns
    -------
    One region per rank, over the partitioned dims: of whole shards where there are enough of them and the objects are
    not small, of cells otherwise. With more ranks than cells the last are empty.
    """
    if schema.is_location_series:
        return shares_of(resolve_layout(schema, n_ranks), n_ranks)
    n_writers = _n_writers(schema, nodes or [""] * n_ranks, "auto")
    direct = _aligned_or_none(schema, None, n_ranks)
    if direct is not None and _is_better_direct(schema, direct, None, n_writers, "auto"):
        return regions_of("", direct[1].regions)
    return _balanced(schema, n_ranks)


def settle_indexed(
    schema: StreamSchema,
    regions: Sequence[AnyRegion],
    indexed_dims: Mapping[str, Sequence[str]],
    groups: Mapping[str, int],
    nodes: Sequence[str],
    *,
    writers: str | int,
) -> tuple[StreamSchema, EpochState]:
    """Return the schema with its layout, and the epoch of ranks that hold `Indices`, to be proven.

    Not collective.

    Parameters
    ----------
    schema, nodes, writers
        As in `settle`.
    regions, indexed_dims, groups
        As in `mpistream.epoch.indexed_epoch`.

    Raises
    ------
    TilingError
        As `settle`, for the arrays without indices.
    """
    n_writers = _n_writers(schema, nodes, writers)
    resolved = resolve_layout(schema, n_writers)
    return resolved, indexed_epoch(resolved, regions, indexed_dims, groups, n_writers, _numbered(nodes))


def _aligned(
    schema: StreamSchema, regions: Sequence[AnyRegion] | None, n_ranks: int
) -> tuple[StreamSchema, EpochState]:
    resolved = resolve_layout(schema, n_ranks, regions)
    return resolved, prove_epoch(resolved, regions if regions is not None else shard_regions(resolved, n_ranks))


def _aligned_or_none(
    schema: StreamSchema, regions: Sequence[AnyRegion] | None, n_ranks: int
) -> tuple[StreamSchema, EpochState] | None:
    try:
        return _aligned(schema, regions, n_ranks)
    except AlignmentError:
        return None
    except TilingError as error:
        # Anything but a shard that no rank holds whole is wrong with rearranging, too.
        if error.kind != "projection":
            raise
        return None


def _is_better_direct(
    schema: StreamSchema,
    direct: tuple[StreamSchema, EpochState],
    regions: Sequence[AnyRegion] | None,
    n_writers: int,
    writers: str | int,
) -> bool:
    resolved, epoch = direct
    n_ranks = len(epoch.regions)
    n_active = sum(not r.is_empty for r in epoch.regions)
    if writers == "all":
        return True
    if regions is None and n_active < n_ranks:
        # A grid of few shards is no decomposition for a model of many ranks.
        return False
    if writers != "auto":
        return n_active <= n_writers
    if _has_shards(schema):
        # The objects are what they are.
        return True
    return n_active <= n_writers or object_nbytes(resolved) >= SMALL_OBJECT_NBYTES


def _n_writers(schema: StreamSchema, nodes: Sequence[str], writers: str | int) -> int:
    n_nodes = len(set(nodes))
    if isinstance(writers, int):
        return min(writers, len(nodes))
    if writers == "node":
        return n_nodes
    if writers == "all" or _has_shards(schema):
        return len(nodes)
    return min(max(n_writers_for(schema), n_nodes), len(nodes))


def _numbered(nodes: Sequence[str]) -> list[int]:
    numbers: dict[str, int] = {}
    return [numbers.setdefault(node, len(numbers)) for node in nodes]


def _has_shards(schema: StreamSchema) -> bool:
    """Whether the schema says how large objects are; in time it is one record where it says nothing."""
    sharded = [a for a in schema.arrays.values() if a.is_sharded]
    return all(None not in (a.shard_shape[1:] if a.has_time else a.shard_shape) for a in sharded)


def _balanced(schema: StreamSchema, n_ranks: int) -> list[Region]:
    """Split the cells, not the shards, as evenly as a grid of boxes can."""
    sizes = schema.partitioned_sizes
    return [Region.of_box(tuple(sizes), box) for box in split_units(list(sizes.values()), n_ranks)]

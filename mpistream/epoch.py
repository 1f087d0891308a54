"""Who holds what and who writes what in an epoch, once it is proven that it tiles every array exactly once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpistream.arrays import Role
from mpistream.grid import ShardGrid, held_boxes
from mpistream.indices import Indices, Selection, axes_of, axis_lengths, indices_of
from mpistream.layout import assign_writers
from mpistream.locations import prove_shares, row_length, written_records
from mpistream.rearrange import Exchange, Piece, plan_exchange, target_boxes
from mpistream.region import AnyRegion, Region, region_from_json, regions_of
from mpistream.schema import StreamSchema
from mpistream.tiling import Box, Interval, box_n_cells

__all__ = ["EpochState", "Route", "Share", "indexed_epoch", "prove_epoch", "prove_rearranged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """What is fixed for an epoch. Made by `prove_epoch` and `prove_rearranged` only."""

    regions: tuple[AnyRegion, ...]
    """What each rank holds."""
    boxes: Mapping[str, Sequence[tuple[Box, ...]]]
    """Array name -> per rank the boxes it writes, over the dims without time; proven to tile it."""
    n_cells: Mapping[str, tuple[int, ...]]
    """Array name -> per rank the cells it writes of one record."""
    exchanges: Mapping[str, Exchange] = field(default_factory=dict)
    """Array name -> how its cells get to those who write them; without, each rank holds what it writes."""
    indexed: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    """Array name -> the boxes that are written of it, where the ranks hold `Indices`: who writes them is agreed on
    once it is known who holds how much of them."""
    indexed_moving: tuple[str, ...] = ()
    """Those of them that have an indexed dim; all others are rank 0's, which holds and writes them."""
    records: tuple[Interval, ...] = ()
    """In a location series, the records that each rank writes: disjoint, and together all. Of what it holds beyond
    them, the writer is the rank whose share has the first location of that chunk."""
    indexed_groups: Mapping[str, int] = field(default_factory=dict)
    """Array of `indexed` -> a number that arrays share of which each rank holds the same `Indices`."""
    indexed_moved: Mapping[str, int] = field(default_factory=dict)
    """Array of `indexed` -> its cells that go to another rank, once the owners are known."""
    nodes: tuple[int, ...] = ()
    """Where there is `indexed`, the number of the node that each rank runs on."""

    def is_rearranged(self, name: str) -> bool:
        """Return whether what is written of an array comes from elsewhere than the writers' own blocks.

        Not collective.
        """
        return name in self.exchanges or name in self.indexed

    def n_moved_cells(self, name: str) -> int:
        """Return the cells of an array that go to another rank.

        Not collective.
        """
        return self.exchanges[name].n_moved_cells if name in self.exchanges else self.indexed_moved.get(name, 0)

    @property
    def layout_regions(self) -> tuple[AnyRegion, ...] | None:
        """The regions as the layout document has them; None where the ranks hold `Indices`."""
        return None if self.indexed else self.regions

    def with_owners(
        self, schema: StreamSchema, owners: Mapping[str, Sequence[int]], moved: Mapping[str, int]
    ) -> EpochState:
        """Return the epoch in which it is known who writes the boxes of `indexed`, and how many cells move for it.

        Not collective.
        """
        boxes: dict[str, Sequence[tuple[Box, ...]]] = dict(self.boxes)
        for name, targets in self.indexed.items():
            by_rank: list[list[Box]] = [[] for _ in self.regions]
            for box, owner in zip(targets, owners[name], strict=True):
                by_rank[owner].append(box)
            boxes[name] = [tuple(b) for b in by_rank]
        return replace(self, boxes=boxes, n_cells=_n_cells(schema, boxes, len(self.regions)), indexed_moved=dict(moved))

    def shares(self) -> list[Share]:
        """Return what each rank holds and writes."""
        moving = {name for name, e in self.exchanges.items() if e.n_moved_cells} | set(self.indexed_moving)
        is_lending = any(self._lent(rank) is not None for rank in range(len(self.records)))
        # Arrays of one shape share an exchange, and it is taken apart once.
        apart: dict[int, list[list[Piece]]] = {}
        for exchange in self.exchanges.values():
            if id(exchange) not in apart:
                found = apart[id(exchange)] = [[] for _ in self.regions]
                for piece in exchange.pieces:
                    found[piece.source].append(piece)
                    if piece.target != piece.source:
                        found[piece.target].append(piece)
        return [
            Share(
                writer=rank,
                region=region,
                boxes={name: by_rank[rank] for name, by_rank in self.boxes.items()},
                pieces={name: tuple(apart[id(e)][rank]) for name, e in self.exchanges.items()},
                moving=tuple(sorted(moving)),
                records=self.records[rank] if self.records else None,
                lent=self._lent(rank),
                is_lending=is_lending,
            )
            for rank, region in enumerate(self.regions)
        ]

    def _lent(self, rank: int) -> tuple[int, int, int] | None:
        """Return the locations that a rank holds and another one writes, and that rank."""
        region = self.regions[rank]
        if not self.records or not isinstance(region, Region) or region.is_empty:
            return None
        ((start, stop),) = region.box
        end = min(stop, self.records[rank][0])
        if start == end:
            return None
        return start, end, next(r for r, (a, b) in enumerate(self.records) if a <= start < b)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """Cells that go from a block to a box that is written, as one end or both see them."""

    source: int
    """The rank that holds them."""
    patch: int
    """Which of its blocks they lie in."""
    target: int
    """The rank that writes them."""
    part: int
    """Which of the boxes that it writes they belong to."""
    source_at: tuple[Selection, ...]
    """Where in the block; on the target, if that is another rank, nothing is known."""
    target_at: tuple[Selection, ...]
    """Where in the box; on the source, if that is another rank, nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank holds and writes in an epoch."""

    writer: int
    region: AnyRegion
    boxes: Mapping[str, tuple[Box, ...]]
    """Sharded array -> the boxes it writes, over the dims without time."""
    pieces: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    """Rearranged array -> the pieces that this rank sends, gets, or has itself, in an order that all ranks share."""
    moving: tuple[str, ...] = ()
    """Arrays of which some rank sends a piece to another one."""
    indices: Indices | Mapping[str, Indices] | None = None
    """What it holds instead of a region, of all arrays or array by array; only this rank knows it."""
    routes: Mapping[str, tuple[Route, ...]] = field(default_factory=dict)
    """Array -> where the cells of its indices go, and those of others come; only this rank knows it."""
    records: Interval | None = None
    """In a location series, the records that this rank writes."""
    lent: tuple[int, int, int] | None = None
    """In a location series, (start, stop) of those that it holds and another rank writes, and that rank."""
    is_lending: bool = False
    """Whether any rank lends."""

    def n_cells(self, name: str) -> int:
        """Return the cells of one record of an array that it writes."""
        return sum(map(box_n_cells, self.boxes[name]))

    def is_rearranged(self, name: str) -> bool:
        """Return whether what is written of an array comes from elsewhere than this rank's own blocks."""
        return name in self.pieces or name in self.routes

    def holds(self, name: str) -> bool:
        """Return whether this rank holds cells of an array that anybody writes from here."""
        if not self.is_rearranged(name):
            return bool(self.boxes[name])
        sources = [p.source for p in self.pieces.get(name, ())] + [r.source for r in self.routes.get(name, ())]
        return self.writer in sources

    def held_boxes(self, grid: ShardGrid) -> list[Box]:
        """Return the boxes of this rank's blocks of an array; with indices they count its own cells."""
        indices = indices_of(self.indices, grid.name)
        if indices is None:
            region = self.region.of(grid.name)
            return held_boxes(grid, region.dims, region)
        return [tuple((0, n) for n in axis_lengths(axes_of(grid, indices)))]

    def to_json(self) -> dict[str, Any]:
        """Return the share as JSON types.

        Not collective.
        """
        # Most arrays have the pieces of another one.
        lists: list[tuple[Piece, ...]] = []
        at: dict[str, int] = {}
        for name, pieces in self.pieces.items():
            if pieces not in lists:
                lists.append(pieces)
            at[name] = lists.index(pieces)
        return {
            "writer": self.writer,
            "region": self.region.to_json(),
            "boxes": dict(self.boxes),
            "pieces": [[[p.source, p.patch, p.target, p.part, p.box] for p in pieces] for pieces in lists],
            "pieces_of": at,
            "moving": list(self.moving),
            "records": self.records,
            "lent": self.lent,
            "is_lending": self.is_lending,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Share:
        """Return the share that `to_json` described.

        Not collective.
        """

        def box_of(pairs: Any) -> Box:
            return tuple((int(a), int(b)) for a, b in pairs)

        lists = [
            tuple(
                Piece(source=source, patch=patch, target=target, part=part, box=box_of(box))
                for source, patch, target, part, box in found
            )
            for found in document["pieces"]
        ]
        return cls(
            writer=document["writer"],
            region=region_from_json(document["region"]),
            boxes={name: tuple(map(box_of, found)) for name, found in document["boxes"].items()},
            pieces={name: lists[k] for name, k in document["pieces_of"].items()},
            moving=tuple(document["moving"]),
            records=None if document["records"] is None else tuple(document["records"]),
            lent=None if document["lent"] is None else tuple(document["lent"]),
            is_lending=document["is_lending"],
        )


def prove_epoch(schema: StreamSchema, regions: Sequence[AnyRegion]) -> EpochState:
    """Return the epoch in which each rank writes what it holds, once it is proven that this tiles every array.

    Not collective.

    Raises
    ------
    AlignmentError, TilingError
        As `mpistream.layout.assign_writers`.
    """
    if schema.is_location_series:
        return _prove_locations(schema, regions)
    boxes = assign_writers(schema, regions)
    return EpochState(regions=tuple(regions), boxes=boxes, n_cells=_n_cells(schema, boxes, len(regions)))


def _prove_locations(schema: StreamSchema, regions: Sequence[AnyRegion]) -> EpochState:
    """Return the epoch in which each rank writes locations of its own, whole."""
    shares = prove_shares(schema, regions)
    length, n_records = row_length(schema), schema.n_total or 0
    boxes = {a.name: [(tuple((0, n) for n in a.shape),)] * len(regions) for a in schema.arrays.values() if a.is_sharded}
    return EpochState(
        regions=tuple(regions),
        boxes=boxes,
        n_cells=_n_cells(schema, boxes, len(regions)),
        records=tuple(written_records(share.box[0], length, n_records) for share in shares),
    )


def prove_rearranged(
    schema: StreamSchema, regions: Sequence[AnyRegion], n_writers: int, nodes: Sequence[int]
) -> EpochState:
    """Return the epoch in which some ranks write what others hold.

    Not collective.

    Parameters
    ----------
    schema
        A resolved schema.
    regions
        What each rank holds; its edges may lie anywhere.
    n_writers
        Ranks that write, for each array.
    nodes
        The number of the node that each rank runs on.

    Raises
    ------
    TilingError
        When the regions overlap, leave a hole, or end beyond an array.
    """
    exchanges = _exchanges(schema, [a.name for a in schema.arrays.values() if a.is_sharded], regions, n_writers, nodes)
    boxes = {name: e.boxes for name, e in exchanges.items()}
    return EpochState(
        regions=tuple(regions), boxes=boxes, n_cells=_n_cells(schema, boxes, len(regions)), exchanges=exchanges
    )


def _exchanges(
    schema: StreamSchema, names: Sequence[str], regions: Sequence[AnyRegion], n_writers: int, nodes: Sequence[int]
) -> dict[str, Exchange]:
    known: dict[Any, Exchange] = {}
    exchanges = {}
    is_shared = all(isinstance(region, Region) for region in regions)
    for name in names:
        array = schema.arrays[name]
        own = regions_of(name, regions)
        # Arrays of one region have it as one object.
        key = (array.base_dims, array.shape, array.grid.shard_shape, None if is_shared else tuple(map(id, own)))
        if key not in known:
            known[key] = plan_exchange(array.grid, own[0].dims, own, n_writers, nodes)
        exchanges[name] = known[key]
    return exchanges


def indexed_epoch(
    schema: StreamSchema,
    regions: Sequence[AnyRegion],
    indexed_dims: Mapping[str, Sequence[str]],
    groups: Mapping[str, int],
    n_writers: int,
    nodes: Sequence[int],
) -> EpochState:
    """Return the epoch of ranks that hold `Indices` of some arrays; for those nothing is proven, and nobody writes.

    Not collective.

    Parameters
    ----------
    schema
        A resolved schema.
    regions
        What each rank holds of the arrays without indices.
    indexed_dims
        Array -> the dims that its indices name.
    groups
        See `EpochState.indexed_groups`.
    n_writers
        Ranks that write, for each array.
    nodes
        The number of the node that each rank runs on.

    Raises
    ------
    TilingError
        As `prove_rearranged`, for the arrays without indices.
    """
    sharded = [a for a in schema.arrays.values() if a.is_sharded]
    moving = [a.name for a in sharded if set(a.base_dims) & set(indexed_dims.get(a.name, ()))]
    n_most = min(n_writers, len(regions))
    indexed = {
        a.name: tuple(target_boxes(a.grid, n_most if a.name in moving else 1))
        for a in sharded
        if a.name in indexed_dims
    }
    exchanges = _exchanges(schema, [a.name for a in sharded if a.name not in indexed], regions, n_writers, nodes)
    return EpochState(
        regions=tuple(regions),
        boxes={name: e.boxes for name, e in exchanges.items()},
        n_cells={},
        exchanges=exchanges,
        indexed=indexed,
        indexed_moving=tuple(sorted(moving)),
        indexed_groups=dict(groups),
        nodes=tuple(nodes),
    )


def _n_cells(
    schema: StreamSchema, boxes: Mapping[str, Sequence[Sequence[Box]]], n_ranks: int
) -> dict[str, tuple[int, ...]]:
    n_cells = {name: tuple(sum(map(box_n_cells, b)) for b in by_rank) for name, by_rank in boxes.items()}
    # What has no shards is the owner's: one cell a record of a variable over time alone, a static that is whole.
    for array in schema.arrays.values():
        if array.role is Role.SERIES or (array.role is Role.STATIC and array.is_whole):
            n_cells[array.name] = (math.prod(array.shape), *[0] * (n_ranks - 1))
    return n_cells

"""Which pieces of a record move from the ranks that hold them to the ranks that write them.

Theory of operation
-------------------
A model's regions need not lie on shard edges, and small regions on many ranks would make many small objects. So
what a rank *holds* and what it *writes* are two things. For each array

* the *sources* are the boxes that the ranks hold, each cell once: a cell that several ranks hold, of an array
  that lacks some of the partitioned dims, comes from the lowest of them;
* the *targets* are boxes of whole shards, as balanced as a grid of boxes can be;
* each target goes to the node, and there to the rank, that holds most of it (`mpistream.assigning`);
* a *piece* is what a source and a target share. Both ranks know it by its global cells, and the pieces between
  two ranks have one order, so the data travel without a word about where they belong.

The plan is made once, where the regions are known, and each rank gets its own part of it, whose size is that of
its neighbourhood.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpistream.assigning import best_owners
from mpistream.grid import ShardGrid, held_boxes, split_units
from mpistream.region import Region
from mpistream.tiling import Box, Interval, box_intersection, box_n_cells, find_overlap, prove_tiling

__all__ = ["Exchange", "Piece", "plan_exchange", "split_piece", "target_boxes"]

# One message. MPI counts are 32-bit in most libraries, and so are some of their inner offsets.
_MAX_MESSAGE_NBYTES = 1 << 30
# So many boxes are compared one by one.
_LEAF = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank sends to another."""

    source: int
    """The rank that holds it."""
    patch: int
    """Which of that rank's boxes it lies in."""
    target: int
    """The rank that writes it."""
    part: int
    """Which of the boxes that this rank writes it lies in."""
    box: Box
    """Its cells, in the array's own dims without time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The pieces of one array, and who writes what."""

    boxes: tuple[tuple[Box, ...], ...]
    """Per rank the boxes that it writes."""
    pieces: tuple[Piece, ...]
    n_moved_cells: int
    """Cells that go to another rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """Disjoint boxes that together are the array: shape (n, n_dims, 2), with rank and patch of each."""

    boxes: NDArray[np.int64]
    ranks: NDArray[np.int64]
    patches: NDArray[np.int64]


def plan_exchange(
    grid: ShardGrid, partitioned_dims: Collection[str], regions: Sequence[Region], n_targets: int, nodes: Sequence[int]
) -> Exchange:
    """Return who writes what of an array, and what moves for it.

    Not collective.

    Parameters
    ----------
    grid
        The array's shards.
    partitioned_dims
        The dims of the regions.
    regions
        What each rank holds; together every cell of the partitioned dims exactly once.
    n_targets
        Ranks that shall write it; fewer if it has fewer shards.
    nodes
        The number of the node that each rank runs on.

    Raises
    ------
    TilingError
        When the regions overlap, leave a hole, or end beyond the array.
    """
    if 0 in grid.shape:
        return Exchange(boxes=((),) * len(regions), pieces=(), n_moved_cells=0)
    if any(d in partitioned_dims for d in grid.bases):
        held = [held_boxes(grid, partitioned_dims, region) for region in regions]
        n_targets = min(n_targets, len(regions))
    else:
        # Every rank has all of it, and rank 0 writes it.
        held = [held_boxes(grid, partitioned_dims, regions[0]), *[[]] * (len(regions) - 1)]
        n_targets = 1
    is_shadow = not set(partitioned_dims) <= set(grid.bases)
    sources = _sources(grid, held, is_shadow=is_shadow)
    targets = target_boxes(grid, n_targets)
    which, where, shared = _crossings(sources.boxes, targets)
    n_cells = (shared[:, :, 1] - shared[:, :, 0]).prod(axis=1)
    owners = best_owners(nodes, len(targets), sources.ranks[which], where, n_cells)
    boxes: list[list[Box]] = [[] for _ in regions]
    part = []
    for target, owner in zip(targets, owners, strict=True):
        part.append(len(boxes[owner]))
        boxes[owner].append(target)
    pieces = tuple(
        Piece(
            source=int(sources.ranks[s]),
            patch=int(sources.patches[s]),
            target=owners[t],
            part=part[t],
            box=tuple((a, b) for a, b in box),
        )
        for s, t, box in zip(which.tolist(), where.tolist(), shared.tolist(), strict=True)
    )
    n_moved = n_cells[sources.ranks[which] != np.array(owners)[where]].sum()
    return Exchange(boxes=tuple(map(tuple, boxes)), pieces=pieces, n_moved_cells=int(n_moved))


def _sources(grid: ShardGrid, held: Sequence[Sequence[Box]], *, is_shadow: bool) -> _Sources:
    entries = [(r, patch, box) for r, boxes in enumerate(held) for patch, box in enumerate(boxes) if box_n_cells(box)]
    if not is_shadow:
        prove_tiling(grid.name, grid.dims, grid.shape, held)
    else:
        # Many ranks share few shadows; the lowest rank of each holds it.
        first: dict[Box, tuple[int, int]] = {}
        for rank, patch, box in entries:
            first.setdefault(box, (rank, patch))
        entries = [(rank, patch, box) for box, (rank, patch) in first.items()]
        if find_overlap([box for _, _, box in entries]) is not None:
            entries = _without_overlaps(entries)
        by_rank: list[list[Box]] = [[] for _ in held]
        for rank, _, box in entries:
            by_rank[rank].append(box)
        prove_tiling(grid.name, grid.dims, grid.shape, by_rank)
    return _Sources(
        boxes=np.array([e[2] for e in entries], dtype=np.int64).reshape(len(entries), len(grid.shape), 2),
        ranks=np.array([e[0] for e in entries], dtype=np.int64),
        patches=np.array([e[1] for e in entries], dtype=np.int64),
    )


def _without_overlaps(entries: Sequence[tuple[int, int, Box]]) -> list[tuple[int, int, Box]]:
    """Cut from each box what boxes before it, those of lower ranks, hold already.

    Space is halved until few boxes are left in a part of it; whatever comes behind a box that fills the part has
    nothing there. Shadows overlap as deep as the dim that is left out is cut, so comparing all pairs would not do.
    """
    every = np.array([box for _, _, box in entries], dtype=np.int64)
    which: list[int] = []
    kept: list[Box] = []
    stack = [(np.arange(len(every)), every)]
    while stack:
        ids, part = stack.pop()
        space = np.stack((part[:, :, 0].min(axis=0), part[:, :, 1].max(axis=0)), axis=1)
        fills = np.flatnonzero((part == space).all(axis=(1, 2)))
        if len(fills):
            ids, part = ids[: fills[0] + 1], part[: fills[0] + 1]
        if len(ids) <= _LEAF:
            for k, box in _few_without_overlaps(part):
                which.append(int(ids[k]))
                kept.append(box)
            continue
        # All but the last of them end somewhere inside, in some dim.
        inside = [e[(e > low) & (e < high)] for (low, high), e in zip(space, np.moveaxis(part, 1, 0), strict=True)]
        dim = max(range(len(inside)), key=lambda d: len(inside[d]))
        cut = int(np.partition(inside[dim], len(inside[dim]) // 2)[len(inside[dim]) // 2])
        for low, high in ((int(space[dim, 0]), cut), (cut, int(space[dim, 1]))):
            there = (part[:, dim, 0] < high) & (part[:, dim, 1] > low)
            clipped = part[there]
            np.clip(clipped[:, dim], low, high, out=clipped[:, dim])
            stack.append((ids[there], clipped))
    numbers, boxes = _joined(np.array(which, dtype=np.int64), np.array(kept, dtype=np.int64))
    return [
        (entries[k][0], entries[k][1], tuple((a, b) for a, b in box))
        for k, box in zip(numbers.tolist(), boxes.tolist(), strict=True)
    ]


def _few_without_overlaps(part: NDArray[np.int64]) -> list[tuple[int, Box]]:
    """Cut from each of few boxes what boxes before it hold; return pairs of its number and what is left of it."""
    boxes: list[Box] = [tuple((a, b) for a, b in box) for box in part.tolist()]
    kept: list[tuple[int, Box]] = []
    for k, (box, mine) in enumerate(zip(boxes, part, strict=True)):
        before = part[:k]
        crosses = ((before[:, :, 0] < mine[:, 1]) & (before[:, :, 1] > mine[:, 0])).all(axis=1)
        rest = [box]
        for other in np.flatnonzero(crosses).tolist():
            rest = [piece for left in rest for piece in _minus(left, boxes[other])]
            if not rest:
                break
        kept += [(k, piece) for piece in rest]
    return kept


def _joined(ids: NDArray[np.int64], boxes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join disjoint boxes of the same number that touch each other and are together a box, again and again."""
    n = len(ids) + 1
    while len(ids) < n:
        n = len(ids)
        for dim in range(boxes.shape[1]):
            across = np.delete(boxes, dim, axis=1).reshape(len(boxes), -1)
            order = np.lexsort((boxes[:, dim, 0], *across.T, ids))
            ids, boxes, across = ids[order], boxes[order], across[order]
            is_next = (ids[1:] == ids[:-1]) & (across[1:] == across[:-1]).all(axis=1)
            is_next &= boxes[1:, dim, 0] == boxes[:-1, dim, 1]
            first = np.flatnonzero(np.concatenate(([True], ~is_next)))
            last = np.concatenate((first[1:], [len(ids)])) - 1
            stops = boxes[last, dim, 1]
            ids, boxes = ids[first], boxes[first]
            boxes[:, dim, 1] = stops
    return ids, boxes


def _minus(box: Box, other: Box) -> list[Box]:
    """Return the part of a box that is outside of another one, as disjoint boxes."""
    both = box_intersection(box, other)
    if both is None:
        return [box]
    parts: list[Box] = []
    left = list(box)
    for dim, ((start, stop), (a, b)) in enumerate(zip(box, both, strict=True)):
        sides = [(lo, hi) for lo, hi in ((start, a), (b, stop)) if lo < hi]
        parts += [(*left[:dim], side, *left[dim + 1 :]) for side in sides]
        left[dim] = (a, b)
    return parts


def target_boxes(grid: ShardGrid, n_targets: int) -> list[Box]:
    """Return boxes of whole shards that together are an array, as balanced as a grid of boxes can be.

    Not collective.
    """
    n_targets = max(min(n_targets, grid.n_shards), 1)
    units = split_units(grid.grid_shape, n_targets, grid.shard_shape)
    axes = zip(grid.shard_shape, grid.shape, strict=True)
    lengths = list(axes)
    cells = [tuple((a * s, min(b * s, n)) for (a, b), (s, n) in zip(u, lengths, strict=True)) for u in units]
    if not grid.shape:
        return [()]
    return [box for box in cells if box_n_cells(box)]


def _crossings(
    sources: NDArray[np.int64], targets: Sequence[Box]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return all pairs of a source and a target that share cells: their numbers, and what they share.

    The targets are a product of intervals, one list a dim, in C order: so the targets of a source are found by
    bisection in each dim.
    """
    n_dims = sources.shape[1]
    starts = [sorted({box[d][0] for box in targets}) for d in range(n_dims)]
    shape = [len(s) for s in starts]
    low = np.empty((len(sources), n_dims), dtype=np.int64)
    n = np.empty((len(sources), n_dims), dtype=np.int64)
    for d, edges in enumerate(starts):
        low[:, d] = np.searchsorted(edges, sources[:, d, 0], side="right") - 1
        n[:, d] = np.searchsorted(edges, sources[:, d, 1], side="left") - low[:, d]
    per_source = n.prod(axis=1)
    which = np.repeat(np.arange(len(sources)), per_source)
    rest = np.arange(len(which)) - np.repeat(np.cumsum(per_source) - per_source, per_source)
    where = np.zeros(len(which), dtype=np.int64)
    for d in range(n_dims - 1, -1, -1):
        rest, k = np.divmod(rest, n[which, d])
        where += (low[which, d] + k) * math.prod(shape[d + 1 :])
    every = np.array(targets, dtype=np.int64).reshape(len(targets), n_dims, 2)
    shared = np.stack(
        (
            np.maximum(sources[which, :, 0], every[where, :, 0]),
            np.minimum(sources[which, :, 1], every[where, :, 1]),
        ),
        axis=2,
    )
    return which, where, shared


def split_piece(box: Box, itemsize: int, limit: int | None = None) -> list[Box]:
    """Return a piece as boxes that fit into a message each, in C order.

    Not collective.

    Parameters
    ----------
    box
        The piece.
    itemsize
        Bytes a cell.
    limit
        Bytes of a message.
    """
    limit = _MAX_MESSAGE_NBYTES if limit is None else limit
    if box_n_cells(box) * itemsize <= limit:
        return [box]
    dim = next(d for d, (a, b) in enumerate(box) if b - a > 1)
    (start, stop) = box[dim]
    rest = itemsize * math.prod(b - a for a, b in box[dim + 1 :])
    step = max(limit // rest, 1)
    parts: list[Interval] = [(a, min(a + step, stop)) for a in range(start, stop, step)]
    return [p for part in parts for p in split_piece((*box[:dim], part, *box[dim + 1 :]), itemsize, limit)]

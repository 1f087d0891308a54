"""Boxes, and the proof that boxes tile an array.

Pure: boxes in, boxes or an error out. Disjointness and the count of cells prove a tiling; the hole or the
overlap is searched for its name in the message.

Boxes are half-open and hold plain Python ints. A 0-d array has one box, ``()``, and that box has one cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistream.errors import TilingError, counted

__all__ = [
    "Box",
    "Interval",
    "box_contains",
    "box_intersection",
    "box_n_cells",
    "exact_dtype",
    "find_hole",
    "find_overlap",
    "format_box",
    "prove_tiling",
    "slices_in",
]

Interval = tuple[int, int]  # half-open: start, stop
Box = tuple[Interval, ...]  # one interval per dim

_Boxes = npt.NDArray[np.int64]  # shape (n, n_dims, 2), no box without cells

_LEAF = 64  # all pairs of so few boxes are compared at once; 64 x 64 x n_dims fits the cache


def format_box(dims: Sequence[str], box: Box) -> str:
    """Return a box as messages show it, for example ``y[0:256] x[0:512]``.

    Not collective.
    """
    return " ".join(f"{d}[{a}:{b}]" for d, (a, b) in zip(dims, box, strict=True)) or "()"


def box_n_cells(box: Box) -> int:
    """Count the cells of a box; ``()`` has one.

    Not collective.
    """
    return math.prod(max(0, stop - start) for start, stop in box)


def box_intersection(a: Box, b: Box) -> Box | None:
    """Return the cells that two boxes share, or None where they share none.

    Not collective.
    """
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if box_n_cells(both) else None


def box_contains(outer: Box, inner: Box) -> bool:
    """Return whether all cells of a box lie in another one.

    Not collective.
    """
    return all(a <= start and stop <= b for (a, b), (start, stop) in zip(outer, inner, strict=True))


def slices_in(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Return where a box lies in an array of the cells of another one.

    Not collective.
    """
    return tuple(slice(start - a, stop - a) for (a, _), (start, stop) in zip(outer, inner, strict=True))


# Both searches halve space along the cut whose fuller side keeps the fewest boxes. Of n disjoint boxes in
# d dims this cut keeps at least n / (4 d) off either side. Were there no such cut, each dim would have a
# place that more than n - n / (2 d) boxes stretch over, and more than half of all boxes would share one
# cell. So either the cut is good, which bounds the depth of the search, or that cell is an overlap.


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int, Box] | None:
    """Find two boxes that share cells.

    Not collective.

    Returns
    -------
    The indices of both, the lower one first, and their intersection; None when all are disjoint.
    """
    if not boxes:
        return None
    every = _as_array(boxes, len(boxes[0]))
    cells = np.flatnonzero((every[:, :, 0] < every[:, :, 1]).all(axis=1))
    stack = [(cells, every[cells])]
    while stack:
        ids, part = stack.pop()
        n, n_dims = len(ids), part.shape[1]
        pair: tuple[int, int] | None = None
        dim, cut, fuller = _best_cut(part) if n > _LEAF else (0, 0, 0)
        if n <= _LEAF:
            pair = _first_pair(part)
        elif 4 * n_dims * (n - fuller) < n:
            pair = _crowded_pair(part)
        else:
            bottom, top = int(part[:, dim, 0].min()), int(part[:, dim, 1].max())
            for low, high in ((cut, top), (bottom, cut)):
                inside, clipped = _clip(part, dim, low, high)
                stack.append((ids[inside], clipped))
        if pair is not None:
            i, j = sorted(int(ids[k]) for k in pair)
            both = box_intersection(_as_box(every[i]), _as_box(every[j]))
            assert both is not None
            return i, j, both
    return None


def find_hole(shape: Sequence[int], boxes: Sequence[Box]) -> Box | None:
    """Find a box that no box covers, given that the boxes are disjoint.

    Not collective.

    Returns
    -------
    A hole that cannot be stretched in any dim; None when every cell is covered.
    """
    hole: Box = tuple((0, n) for n in shape)
    every = _as_array(boxes, len(hole))
    for dim, n in enumerate(shape):
        every = _clip(every, dim, 0, n)[1]
    every = every[(every[:, :, 0] < every[:, :, 1]).all(axis=1)]
    if _n_missing(hole, every) <= 0:
        return None
    part = every
    # Invariant: the cells of `part` are fewer than those of `hole`. So some edge lies inside the hole
    # while there are boxes at all, and one of its two sides has too few cells again.
    while len(part):
        dim, cut, _ = _best_cut(part, hole)
        start, stop = hole[dim]
        below = (*hole[:dim], (start, cut), *hole[dim + 1 :])
        low = _clip(part, dim, start, cut)[1]
        if _n_missing(below, low) > 0:
            hole, part = below, low
        else:
            hole = (*hole[:dim], (cut, stop), *hole[dim + 1 :])
            part = _clip(part, dim, cut, stop)[1]
    return _stretch(hole, every, shape)


def prove_tiling(name: str, dims: Sequence[str], shape: Sequence[int], boxes_by_rank: Sequence[Sequence[Box]]) -> None:
    """Prove that the ranks' boxes cover every cell of an array exactly once.

    Not collective.

    Raises
    ------
    TilingError
        Kind ``"overlap"`` (two boxes share cells), ``"hole"`` (nobody owns a cell) or ``"outside"``
        (a box ends beyond the array); the message names the ranks and their boxes.
    """
    if 0 in shape:
        return
    boxes = [box for own in boxes_by_rank for box in own]
    ranks = [rank for rank, own in enumerate(boxes_by_rank) for _ in own]
    every = _as_array(boxes, len(shape))
    out = ((every[:, :, 0] < 0) | (every[:, :, 1] > np.array(shape, dtype=np.int64))).any(axis=1)
    if out.any():
        k = int(out.argmax())
        raise TilingError(
            f"array {name!r}: rank {ranks[k]} owns {format_box(dims, boxes[k])}, beyond the array's "
            f"{format_box(dims, tuple((0, n) for n in shape))}; end its region there",
            kind="outside",
            rank=ranks[k],
        )
    overlap = find_overlap(boxes)
    if overlap is not None:
        i, j, both = overlap
        raise TilingError(
            f"array {name!r}: rank {ranks[i]} owns {format_box(dims, boxes[i])} and rank {ranks[j]} owns "
            f"{format_box(dims, boxes[j])}; both own {format_box(dims, both)}; make the regions disjoint",
            kind="overlap",
            rank=ranks[j],
        )
    hole = find_hole(shape, boxes)
    if hole is not None:
        raise TilingError(
            f"array {name!r}: none of the {counted(len(boxes_by_rank), 'rank')} owns {format_box(dims, hole)}; "
            f"give it to a rank's region",
            kind="hole",
        )


def _as_array(boxes: Sequence[Box], n_dims: int) -> _Boxes:
    return np.array(boxes, dtype=np.int64).reshape(len(boxes), n_dims, 2)


def _as_box(row: npt.NDArray[np.int64]) -> Box:
    return tuple((int(start), int(stop)) for start, stop in row)


def _clip(part: _Boxes, dim: int, start: int, stop: int) -> tuple[npt.NDArray[np.bool_], _Boxes]:
    """Which boxes have cells between start and stop, and those boxes cut to it."""
    inside = (part[:, dim, 0] < stop) & (part[:, dim, 1] > start)
    clipped = part[inside]
    np.clip(clipped[:, dim], start, stop, out=clipped[:, dim])
    return inside, clipped


def _best_cut(part: _Boxes, space: Box | None = None) -> tuple[int, int, int]:
    """Dim and place of the cut whose fuller side keeps the fewest boxes, and that number.

    Without `space` only starts are tried: moving a cut up to the next start never adds a box to a side.
    With it every edge inside is, so that a lone box is cut free from its surroundings.
    """
    best = (0, 0, len(part) + 1)
    for dim in range(part.shape[1]):
        starts, stops = np.sort(part[:, dim, 0]), np.sort(part[:, dim, 1])
        cuts = starts
        if space is not None:
            edges = np.concatenate((starts, stops))
            cuts = edges[(edges > space[dim][0]) & (edges < space[dim][1])]
        if len(cuts):
            n_left = np.searchsorted(starts, cuts, side="left")
            n_right = len(part) - np.searchsorted(stops, cuts, side="right")
            fuller = np.maximum(n_left, n_right)
            k = int(fuller.argmin())
            if fuller[k] < best[2]:
                best = (dim, int(cuts[k]), int(fuller[k]))
    return best


def _first_pair(part: _Boxes) -> tuple[int, int] | None:
    """The first two boxes of few that overlap, comparing all pairs."""
    start = np.maximum(part[:, None, :, 0], part[None, :, :, 0])
    stop = np.minimum(part[:, None, :, 1], part[None, :, :, 1])
    hits = np.triu((start < stop).all(axis=2), 1)
    return divmod(int(hits.argmax()), len(part)) if hits.any() else None


def _crowded_pair(part: _Boxes) -> tuple[int, int]:
    """Two boxes that share a cell, where no cut parts the boxes well (see above)."""
    sharing = np.ones(len(part), dtype=bool)
    for dim in range(part.shape[1]):
        starts, stops = part[:, dim, 0], part[:, dim, 1]
        tried = np.sort(starts)
        n_over = np.arange(1, len(tried) + 1) - np.searchsorted(np.sort(stops), tried, side="right")
        cell = tried[n_over.argmax()]
        sharing &= (starts <= cell) & (stops > cell)
    first, second = np.flatnonzero(sharing)[:2]
    return int(first), int(second)


def _n_missing(space: Box, part: _Boxes) -> int:
    """Cells of a space minus cells of the boxes in it, exactly."""
    n_cells = box_n_cells(space)
    lengths = (part[:, :, 1] - part[:, :, 0]).astype(exact_dtype(n_cells * (len(part) + 1)))
    return n_cells - int(lengths.prod(axis=1).sum())


def exact_dtype(limit: int) -> Any:
    """A dtype in which numbers up to a limit are exact."""
    return np.int64 if limit < 2**63 else object


def _stretch(hole: Box, every: _Boxes, shape: Sequence[int]) -> Box:
    """The hole made as long as the boxes let it be, dim by dim."""
    grown = list(hole)
    for dim, n in enumerate(shape):
        beside = np.ones(len(every), dtype=bool)
        for k, (start, stop) in enumerate(grown):
            if k != dim:
                beside &= (every[:, k, 0] < stop) & (every[:, k, 1] > start)
        edges = every[beside, dim]
        low = edges[edges[:, 1] <= grown[dim][0], 1]
        high = edges[edges[:, 0] >= grown[dim][1], 0]
        grown[dim] = (int(low.max(initial=0)), int(high.min(initial=n)))
    return tuple(grown)

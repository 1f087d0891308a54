"""Regions, shard grids, and the proof that boxes tile an array.

Pure: boxes in, boxes or an error out. Three questions are answered here.

1. *Which cells does a rank own?* `Region`, `split_units`.
2. *Which shards does it write?* `ShardGrid`, `assign_shards`. A shard is one object and has one writer,
   so what a rank writes always lies on shard edges.
3. *Does everybody's part together cover each array exactly once?* `prove_tiling`. Disjointness and the
   count of cells prove it; the hole or the overlap is searched for its name in the message.

Boxes are half-open and hold plain Python ints. A 0-d array has one box, ``()``, and that box has one cell.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistream.errors import AlignmentError, SchemaError, TilingError

__all__ = [
    "Box",
    "Interval",
    "Region",
    "ShardGrid",
    "assign_shards",
    "block_box",
    "box_intersection",
    "box_n_cells",
    "find_hole",
    "find_overlap",
    "format_box",
    "prove_tiling",
    "split_units",
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


class Region(Mapping[str, Interval]):
    """The cells of the partitioned dims that one rank owns.

    Immutable and hashable. As a mapping it takes a dim to the (start, stop) of its only box; the empty
    region takes every dim to (0, 0). With several boxes there is no such mapping: use ``.boxes``.

    Parameters
    ----------
    dims
        The partitioned dims, in the schema's order.
    boxes
        One interval per dim each. Boxes without cells are dropped.
    """

    __slots__ = ("_boxes", "_dims")

    def __init__(self, dims: Iterable[str], boxes: Iterable[Box] = ()) -> None:
        self._dims = tuple(dims)
        kept = set()
        for box in boxes:
            plain = tuple((operator.index(start), operator.index(stop)) for start, stop in box)
            if len(plain) != len(self._dims) or any(not 0 <= start <= stop for start, stop in plain):
                raise SchemaError(
                    f"region over dims {self._dims}: box {plain} must have one 0 <= start <= stop per dim",
                    kind="region",
                )
            if box_n_cells(plain):
                kept.add(plain)
        # Invariant: sorted and without duplicates or empty boxes, so equal regions are written equally.
        self._boxes = tuple(sorted(kept))

    @classmethod
    def whole(cls, dims: Iterable[str], sizes: Mapping[str, int]) -> Region:
        """Return the region of all cells.

        Not collective.
        """
        names = tuple(dims)
        return cls(names, (tuple((0, sizes[d]) for d in names),))

    @classmethod
    def empty(cls, dims: Iterable[str]) -> Region:
        """Return the region of no cells.

        Not collective.
        """
        return cls(dims)

    @classmethod
    def of_box(cls, dims: Iterable[str], box: Box) -> Region:
        """Return the region of one box; a box without cells gives the empty region.

        Not collective.
        """
        return cls(dims, (box,))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None, sizes: Mapping[str, int]) -> Region:
        """Return the region that a caller described, checked against the dims.

        Not collective.

        Parameters
        ----------
        mapping
            Dim -> (start, stop) or a slice without step; a dim left out is whole; None is everything.
            A `Region` keeps all its boxes. Start equal to stop in any dim gives the empty region.
        sizes
            Partitioned dim -> length, in the schema's order.

        Raises
        ------
        SchemaError
            Kind ``"region"``: an unknown dim, something that is not an integer, or bounds out of
            0 <= start <= stop <= length.
        """
        given: Mapping[str, Any] = {} if mapping is None else mapping
        if not isinstance(given, Mapping):
            raise SchemaError(
                f"a region is a mapping dim -> (start, stop), not {type(given).__name__}", kind="region"
            )
        unknown = [dim for dim in given if dim not in sizes]
        if unknown:
            raise SchemaError(
                f"region: {unknown[0]!r} is no partitioned dim; name only {', '.join(sizes) or 'no dim'}",
                kind="region",
            )
        parts: list[Mapping[str, Any]] = [given]
        if isinstance(given, Region):
            parts = [dict(zip(given.dims, box, strict=True)) for box in given.boxes]
        return cls(
            sizes,
            [tuple(_interval(d, part.get(d, (0, n)), n) for d, n in sizes.items()) for part in parts],
        )

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Region:
        """Return the region that `to_json` described.

        Not collective.
        """
        return cls(document["dims"], document["boxes"])

    def to_json(self) -> dict[str, Any]:
        """Return dims and boxes as lists; equal regions give equal documents.

        Not collective.
        """
        return {"dims": list(self._dims), "boxes": [[list(pair) for pair in box] for box in self._boxes]}

    @property
    def dims(self) -> tuple[str, ...]:
        """The partitioned dims, in the schema's order."""
        return self._dims

    @property
    def boxes(self) -> tuple[Box, ...]:
        """All boxes, sorted; none for the empty region."""
        return self._boxes

    @property
    def is_empty(self) -> bool:
        """Whether the region has no cells."""
        return not self._boxes

    @property
    def n_cells(self) -> int:
        """Number of cells of all boxes together."""
        return sum(map(box_n_cells, self._boxes))

    @property
    def box(self) -> Box:
        """The only box; (0, 0) in every dim for the empty region."""
        if len(self._boxes) > 1:
            raise SchemaError(
                f"{self!r} has {len(self._boxes)} boxes, not 1: go through .boxes", kind="region"
            )
        return self._boxes[0] if self._boxes else ((0, 0),) * len(self._dims)

    def project(self, dims: Iterable[str]) -> Region:
        """Return the region's shadow on some of its dims, in the order given.

        Not collective.
        """
        names = tuple(dims)
        assert set(names) <= set(self._dims), f"{names} is no subset of {self._dims}"
        at = [self._dims.index(d) for d in names]
        return Region(names, [tuple(box[k] for k in at) for box in self._boxes])

    def __getitem__(self, dim: str) -> Interval:
        if dim not in self._dims:
            raise KeyError(dim)
        return self.box[self._dims.index(dim)]

    def __contains__(self, dim: object) -> bool:
        return dim in self._dims

    def __iter__(self) -> Iterator[str]:
        return iter(self._dims)

    def __len__(self) -> int:
        return len(self._dims)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Region):
            return self._dims == other._dims and self._boxes == other._boxes
        if isinstance(other, Mapping):
            return len(self._boxes) <= 1 and dict(self) == dict(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self._dims, self._boxes))

    def __repr__(self) -> str:
        if not self._boxes:
            return f"Region({', '.join(self._dims)}: empty)"
        return f"Region({' + '.join(format_box(self._dims, box) for box in self._boxes)})"


def _interval(dim: str, value: Any, size: int) -> Interval:
    """One dim of a caller's region as plain ints, or SchemaError."""
    if isinstance(value, slice):
        if value.step not in (None, 1):
            raise SchemaError(f"region dim {dim!r}: {value} has a step; leave it out", kind="region")
        value = (0 if value.start is None else value.start, size if value.stop is None else value.stop)
    try:
        low, high = value
        if isinstance(low, bool) or isinstance(high, bool):
            raise TypeError
        start, stop = operator.index(low), operator.index(high)
    except (TypeError, ValueError):
        raise SchemaError(
            f"region dim {dim!r}: {value!r} must be (start, stop), two integers", kind="region"
        ) from None
    if not 0 <= start <= stop <= size:
        raise SchemaError(
            f"region dim {dim!r} of length {size}: [{start}:{stop}] must be 0 <= start <= stop <= {size}",
            kind="region",
        )
    return start, stop


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGrid:
    """One array's grid of shards over its dims without time.

    The last shard of a dim is clipped to the shape.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.dims) == len(self.shape) == len(self.shard_shape)
        assert all(n >= 0 for n in self.shape)
        assert all(s > 0 for s in self.shard_shape)

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Number of shards per dim."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.shard_shape, strict=True))

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return math.prod(self.grid_shape)

    def shard_box(self, index: Sequence[int]) -> Box:
        """Return the cells of one shard.

        Not collective.
        """
        axes = zip(index, self.shard_shape, self.shape, strict=True)
        return tuple((i * s, min((i + 1) * s, n)) for i, s, n in axes)

    def shards_in(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Yield the indices of all shards that a box touches, in C order.

        Not collective.
        """
        return itertools.product(*itertools.starmap(range, self._touched(box)))

    def check_aligned(self, box: Box, rank: int) -> None:
        """Refuse a box whose edges are not shard edges.

        Not collective.

        Raises
        ------
        AlignmentError
            Start is no multiple of the shard length, or stop neither that nor the end of the array.
        """
        for dim, (start, stop), n, s in zip(self.dims, box, self.shape, self.shard_shape, strict=True):
            assert 0 <= start <= stop <= n
            if start % s or (stop % s and stop != n):
                # What is offered instead has at least one shard.
                first = min(_nearest_edge(start, s, n), (n - 1) // s * s)
                last = max(_nearest_edge(stop, s, n), min(first + s, n))
                raise AlignmentError(
                    f"array {self.name!r}, dim {dim!r}: rank {rank} owns [{start}:{stop}] of {n}, which does "
                    f"not lie on the edges of shards of length {s}; the nearest that does is "
                    f"[{first}:{last}], or choose another shard length",
                    rank=rank,
                )

    def _touched(self, box: Box) -> Box:
        """The shards a box touches, as a box of shard indices."""
        if not box_n_cells(box):
            return ((0, 0),) * len(box)
        return tuple((a // s, -(-b // s)) for (a, b), s in zip(box, self.shard_shape, strict=True))

    def _contained(self, box: Box) -> Box:
        """The shards that lie in a box whole, as a box of shard indices; maybe with start > stop."""
        axes = zip(box, self.shard_shape, self.shape, strict=True)
        return tuple((-(-a // s), -(-b // s) if b == n else b // s) for (a, b), s, n in axes)


def _nearest_edge(at: int, shard_length: int, n: int) -> int:
    low = at // shard_length * shard_length
    high = min(low + shard_length, n)
    return low if at - low <= high - at else high


# ---- exact tiling ------------------------------------------------------------------------------------
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


def prove_tiling(
    name: str, dims: Sequence[str], shape: Sequence[int], boxes_by_rank: Sequence[Sequence[Box]]
) -> None:
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
            f"array {name!r}: none of the {len(boxes_by_rank)} ranks owns {format_box(dims, hole)}; "
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
    lengths = (part[:, :, 1] - part[:, :, 0]).astype(_exact_dtype(n_cells * (len(part) + 1)))
    return n_cells - int(lengths.prod(axis=1).sum())


def _exact_dtype(limit: int) -> Any:
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


# ---- who writes what ---------------------------------------------------------------------------------


def assign_shards(
    grid: ShardGrid, partitioned_dims: Collection[str], regions: Sequence[Region]
) -> list[tuple[Box, ...]]:
    """Return for each rank the boxes of one array that it writes.

    Not collective.

    An array over all partitioned dims is written by each rank in its own region. If it lacks some, each
    of its shards goes to the lowest rank with a box whose projection contains the shard whole. Without
    any it goes to rank 0, even if that rank's region is empty.

    Returns
    -------
    Boxes in the array's own dims, on shard edges. Together they cover the array exactly once.

    Raises
    ------
    AlignmentError
        A region does not lie on the array's shard edges.
    TilingError
        As `prove_tiling`, or kind ``"projection"``: no rank holds some shard whole.
    """
    assert regions
    own = _own_dims(grid, partitioned_dims)
    if not own:
        return [(_lift(grid, own, ()),), *[()] * (len(regions) - 1)]
    if 0 in grid.shape:
        return [()] * len(regions)
    by_rank = [tuple(_lift(grid, own, box) for box in region.project(own).boxes) for region in regions]
    if len(own) < len(partitioned_dims):
        return _assign_projections(grid, by_rank)
    for rank, boxes in enumerate(by_rank):
        for box in boxes:
            grid.check_aligned(box, rank)
    prove_tiling(grid.name, grid.dims, grid.shape, by_rank)
    return by_rank


def block_box(grid: ShardGrid, partitioned_dims: Collection[str], region: Region) -> Box:
    """Return the box of an array that a rank passes as its block.

    Not collective.

    It is the region in the partitioned dims, (0, 0) there if the region is empty, and whole in the others.

    Raises
    ------
    SchemaError
        Kind ``"region"``: the region has several boxes.
    """
    own = _own_dims(grid, partitioned_dims)
    return _lift(grid, own, region.project(own).box)


def _own_dims(grid: ShardGrid, partitioned_dims: Collection[str]) -> tuple[str, ...]:
    return tuple(d for d in grid.dims if d in partitioned_dims)


def _lift(grid: ShardGrid, own: tuple[str, ...], box: Box) -> Box:
    """A box over the partitioned dims of an array as one over all its dims."""
    given = dict(zip(own, box, strict=True))
    return tuple(given.get(d, (0, n)) for d, n in zip(grid.dims, grid.shape, strict=True))


def _assign_projections(grid: ShardGrid, by_rank: Sequence[Sequence[Box]]) -> list[tuple[Box, ...]]:
    # Only the first rank with a box can win a shard by it, and many ranks share few projections.
    first_rank: dict[Box, int] = {}
    for rank, boxes in enumerate(by_rank):
        for box in boxes:
            first_rank.setdefault(box, rank)
    free, done = -1, len(by_rank)
    owner = np.full(grid.grid_shape, free, dtype=np.int64)
    for box, rank in first_rank.items():
        view = owner[_slices(grid._contained(box))]
        view[view == free] = rank
    if (owner == free).any():
        index = np.unravel_index(int((owner == free).argmax()), owner.shape)
        raise _split_shard_error(grid, grid.shard_box([int(i) for i in index]), first_rank)
    written: list[list[Box]] = [[] for _ in by_rank]
    for box, rank in first_rank.items():
        touched = grid._touched(box)
        view = owner[_slices(touched)]
        mine = view == rank
        if mine.all() and touched == grid._contained(box):
            written[rank].append(box)
        else:
            corner = np.array([start for start, _ in touched], dtype=np.int64)
            written[rank] += [grid.shard_box(i) for i in (np.argwhere(mine) + corner).tolist()]
        view[mine] = done  # projections of one rank's boxes may overlap: write a shard once
    return [tuple(boxes) for boxes in written]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, max(start, stop)) for start, stop in box)


def _split_shard_error(grid: ShardGrid, shard: Box, boxes: Iterable[Box]) -> TilingError:
    """Say which edges split a shard that no rank holds whole."""
    edges: dict[str, set[int]] = {dim: set() for dim in grid.dims}
    for box in boxes:
        if box_intersection(box, shard) is not None:
            for dim, pair, (start, stop) in zip(grid.dims, box, shard, strict=True):
                edges[dim].update(edge for edge in pair if start < edge < stop)
    split = [
        f"{dim!r} at {min(edges[dim])} (shard length {s})"
        for dim, s in zip(grid.dims, grid.shard_shape, strict=True)
        if edges[dim]
    ]
    why = "no region touches it; give it to a rank's region"
    if split:
        why = (
            f"the regions' edges split it in dim {', '.join(split)}; let their edges lie on this "
            f"array's shard edges, or make its shards smaller"
        )
    where = format_box(grid.dims, shard)
    return TilingError(
        f"array {grid.name!r}: no rank holds its shard {where} whole: {why}", kind="projection"
    )


# ---- decomposition -----------------------------------------------------------------------------------


def split_units(n_units: Sequence[int], n_writers: int, unit_cells: Sequence[int] | None = None) -> list[Box]:
    """Split a grid of units into one box per writer, as evenly as a grid of boxes can.

    Not collective.

    Parameters
    ----------
    n_units
        Units (shards) per dim.
    n_writers
        Number of boxes to return, at least 1.
    unit_cells
        Cells of a unit per dim, 1 each by default; they decide between boxes of equal size.

    Returns
    -------
    Boxes in units, in C order; then, for writers without work, boxes of (0, 0) in every dim. Without
    dims every box is ``()``, and it is for the caller to give that one cell to one writer.

    Notes
    -----
    The grid makes the largest box smallest, then its surface, then splits the first dims most.
    """
    assert n_writers >= 1
    none: Box = ((0, 0),) * len(n_units)
    if 0 in n_units:
        return [none] * n_writers
    process_grid = _process_grid(n_units, n_writers, unit_cells or [1] * len(n_units))
    axes = [
        [(i * n // p, (i + 1) * n // p) for i in range(p)] for n, p in zip(n_units, process_grid, strict=True)
    ]
    boxes: list[Box] = list(itertools.product(*axes))
    return boxes + [none] * (n_writers - len(boxes))


def _process_grid(n_units: Sequence[int], n_writers: int, unit_cells: Sequence[int]) -> tuple[int, ...]:
    """The best number of boxes per dim.

    Only the longest box of a dim counts, ceil(n / p), and it takes few values; the smallest p for each
    leaves the most writers to the other dims.
    """
    extents = [n * c for n, c in zip(n_units, unit_cells, strict=True)]
    dtype = _exact_dtype(2 * (len(extents) + 1) * math.prod(extents))
    used = np.ones(1, dtype=np.int64)  # writers taken, per candidate
    lengths = np.empty((1, 0), dtype=np.int64)  # units of the longest box, per candidate and dim
    for dim, n in enumerate(n_units):
        if dim == len(n_units) - 1:  # the last dim takes what is left
            last = -(-n // np.minimum(n, n_writers // used))
            lengths = np.concatenate((lengths, last[:, None]), axis=1)
            break
        p = np.arange(1, min(n, n_writers) + 1, dtype=np.int64)
        length = -(-n // p)
        distinct = np.diff(length, prepend=0) != 0
        p, length = p[distinct], length[distinct]
        old, new = np.nonzero(used[:, None] <= n_writers // p[None, :])
        used = used[old] * p[new]
        lengths = np.concatenate((lengths[old], length[new, None]), axis=1)
    sides = lengths.astype(dtype) * np.array(unit_cells, dtype=dtype)
    n_cells = sides.prod(axis=1)
    smallest = n_cells == n_cells.min()
    # Per cell the faces of a box are 1/side in each dim; multiplied out they are exact.
    surface = (n_cells[smallest, None] // sides[smallest]).sum(axis=1)
    tied = lengths[smallest][surface == surface.min()]
    return max(_most_boxes(n_units, n_writers, row) for row in tied.tolist())


def _most_boxes(n_units: Sequence[int], n_writers: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Boxes per dim for given longest boxes, the first dims split most, within the writers there are."""
    fewest = [-(-n // k) for n, k in zip(n_units, lengths, strict=True)]
    chosen: list[int] = []
    for dim, (n, k) in enumerate(zip(n_units, lengths, strict=True)):
        most = n if k == 1 else -(-n // (k - 1)) - 1
        chosen.append(min(most, n_writers // math.prod(chosen + fewest[dim + 1 :])))
    return tuple(chosen)

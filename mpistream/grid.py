"""Which shards a rank writes, and how a grid of shards is split over ranks.

A shard is one object and has one writer, so what a rank writes always lies on shard edges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpistream.errors import AlignmentError, TilingError
from mpistream.region import Region
from mpistream.tiling import Box, Interval, box_intersection, box_n_cells, exact_dtype, format_box, prove_tiling

__all__ = ["ShardGrid", "assign_shards", "held_boxes", "split_units", "with_extra"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGrid:
    """One array's grid of shards over its dims without time.

    The last shard of a dim is clipped to the shape.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    bases: tuple[str, ...] = ()
    """For each dim, the dim as which it is split: another one if it is staggered over that."""
    n_extra: tuple[int, ...] = ()
    """For each dim, the points that it has more than the dim as which it is split."""

    def __post_init__(self) -> None:
        if not self.bases:
            object.__setattr__(self, "bases", self.dims)
            object.__setattr__(self, "n_extra", (0,) * len(self.dims))
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
    if len(set(own)) < len(partitioned_dims):
        return _assign_projections(grid, by_rank)
    for rank, boxes in enumerate(by_rank):
        for box in boxes:
            grid.check_aligned(box, rank)
    prove_tiling(grid.name, grid.dims, grid.shape, by_rank)
    return by_rank


def held_boxes(grid: ShardGrid, partitioned_dims: Collection[str], region: Region) -> list[Box]:
    """Return the boxes of an array that a rank passes as its blocks, one per box of its region.

    Not collective.

    A box is the region's in the partitioned dims and whole in the others. An array without partitioned dims is
    passed whole, once. The empty region has one box, (0, 0) in the partitioned dims.
    """
    own = _own_dims(grid, partitioned_dims)
    if not own:
        return [_lift(grid, own, ())]
    at = [region.dims.index(d) for d in own]
    boxes = region.boxes or (region.box,)
    return [_lift(grid, own, tuple(box[k] for k in at)) for box in boxes]


def _own_dims(grid: ShardGrid, partitioned_dims: Collection[str]) -> tuple[str, ...]:
    return tuple(d for d in grid.bases if d in partitioned_dims)


def _lift(grid: ShardGrid, own: tuple[str, ...], box: Box) -> Box:
    """A box over the partitioned dims of an array as one over all its dims."""
    given = dict(zip(own, box, strict=True))
    axes = zip(grid.bases, grid.n_extra, grid.shape, strict=True)
    return tuple(with_extra(given[d], extra, n) if d in given else (0, n) for d, extra, n in axes)


def with_extra(interval: Interval, n_extra: int, n: int) -> Interval:
    """Return an interval of a dim in one that is staggered over it: whoever has the last point has the extra ones.

    Not collective.
    """
    start, stop = interval
    return (start, n) if start < stop == n - n_extra else interval


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
    return TilingError(f"array {grid.name!r}: no rank holds its shard {where} whole: {why}", kind="projection")


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
    axes = [[(i * n // p, (i + 1) * n // p) for i in range(p)] for n, p in zip(n_units, process_grid, strict=True)]
    boxes: list[Box] = list(itertools.product(*axes))
    return boxes + [none] * (n_writers - len(boxes))


def _process_grid(n_units: Sequence[int], n_writers: int, unit_cells: Sequence[int]) -> tuple[int, ...]:
    """The best number of boxes per dim.

    Only the longest box of a dim counts, ceil(n / p), and it takes few values; the smallest p for each
    leaves the most writers to the other dims.
    """
    extents = [n * c for n, c in zip(n_units, unit_cells, strict=True)]
    dtype = exact_dtype(2 * (len(extents) + 1) * math.prod(extents))
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

"""Regions of unstructured meshes: `Indices`, the global numbers of the cells that a rank holds.

Theory of operation
-------------------
The list of all numbers can be as long as a field, so nobody has it whole. Each rank compares its own list with the
boxes that will be written, and tells those who write them where its cells belong. The writer of a box counts: every
cell of it must have come once. That is the tiling proof, and it costs each rank what it holds and writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.block import as_array
from mpistream.errors import SchemaError, TilingError
from mpistream.grid import ShardGrid
from mpistream.tiling import Box, Interval

__all__ = [
    "Axis",
    "Indices",
    "Selection",
    "as_range",
    "axes_of",
    "axis_lengths",
    "crossing",
    "indices_of",
    "numbers_of",
    "parts_of",
    "prove_coverage",
    "selected_shape",
]

Selection = slice | NDArray[np.int64]
"""Cells of one axis of an array: a range, or numbers in any order."""
Axis = Interval | NDArray[np.int64]
"""Which global cells an axis of a rank's block has."""


class Indices(Mapping[str, NDArray[np.int64]]):
    """The cells that a rank holds of dims that are not split into boxes.

    Immutable. Pass it as ``region=`` on every rank: each number of a dim must stand in one rank's list, once. The
    rank's blocks have the cells in the order of its list; dims that are not named are whole.

    Parameters
    ----------
    indices
        Dim -> the global numbers of this rank's cells, from 0, one-dimensional, in any order, maybe empty.

    Raises
    ------
    SchemaError
        Kind ``region``: not one-dimensional, not integers, or below 0.
    """

    __slots__ = ("_indices",)

    def __init__(self, indices: Mapping[str, Any]) -> None:
        if not isinstance(indices, Mapping) or not indices:
            raise SchemaError(f"indices {indices!r}: give a mapping dim -> global numbers", kind="region")
        found = {}
        for dim, given in indices.items():
            array = as_array(f"indices of dim {dim!r}", given)
            if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
                raise SchemaError(
                    f"indices of dim {dim!r} have shape {array.shape} and dtype {array.dtype}; give a one-dimensional "
                    "array of integers",
                    kind="region",
                )
            for number in (int(array.min()), int(array.max())) if array.size else ():
                # A -1 that marks "no cell" is 2**64 - 1 in unsigned numbers.
                if not 0 <= number <= np.iinfo(np.int64).max:
                    raise SchemaError(f"indices of dim {dim!r} contain {number}; they begin at 0", kind="region")
            kept = np.array(array, dtype=np.int64)
            kept.flags.writeable = False
            found[str(dim)] = kept
        self._indices = found

    def __getitem__(self, dim: str) -> NDArray[np.int64]:
        return self._indices[dim]

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __repr__(self) -> str:
        return f"Indices({', '.join(f'{dim}: {len(a)} cells' for dim, a in self._indices.items())})"


def indices_of(indices: Indices | Mapping[str, Indices] | None, name: str) -> Indices | None:
    """Return a rank's indices of an array, of those that it has for all arrays or array by array; None: a region.

    Not collective.
    """
    return indices if indices is None or isinstance(indices, Indices) else indices.get(name)


def axes_of(grid: ShardGrid, indices: Mapping[str, NDArray[np.int64]]) -> list[Axis]:
    """Return which global cells the axes of a rank's block of an array have.

    Not collective.

    Of a staggered dim they are those of the dim over which it is; the extra points come last, where the last cell is.
    """
    return [
        _axis_of(indices.get(d), n, extra) for d, n, extra in zip(grid.bases, grid.shape, grid.n_extra, strict=True)
    ]


def _axis_of(numbers: NDArray[np.int64] | None, n: int, n_extra: int) -> Axis:
    if numbers is None:
        return 0, n
    if n_extra and (numbers == n - n_extra - 1).any():
        return np.concatenate((numbers, np.arange(n - n_extra, n)))
    return numbers


def axis_lengths(axes: Sequence[Axis]) -> tuple[int, ...]:
    """Return the shape of a block with these axes.

    Not collective.
    """
    return tuple(axis[1] - axis[0] if isinstance(axis, tuple) else len(axis) for axis in axes)


def crossing(axes: Sequence[Axis], box: Box) -> tuple[tuple[Selection, ...], tuple[Selection, ...]] | None:
    """Return where the cells of a box lie in a rank's block and where they belong in the box, None if there are none.

    Not collective.
    """
    source: list[Selection] = []
    target: list[Selection] = []
    for axis, (start, stop) in zip(axes, box, strict=True):
        if isinstance(axis, tuple):
            source.append(slice(start - axis[0], stop - axis[0]))
            target.append(slice(0, stop - start))
            continue
        at = np.flatnonzero((axis >= start) & (axis < stop))
        if not at.size:
            return None
        source.append(as_range(at))
        target.append(as_range(axis[at] - start))
    return tuple(source), tuple(target)


def as_range(numbers: NDArray[np.int64]) -> Selection:
    """Return numbers that follow each other as a slice: it can be sent and copied without a list.

    Not collective.
    """
    first = int(numbers[0])
    if int(numbers[-1]) - first + 1 == len(numbers) and (np.diff(numbers) == 1).all():
        return slice(first, first + len(numbers))
    return numbers


def numbers_of(selection: Selection) -> NDArray[np.int64]:
    """Return the numbers of the cells of a selection.

    Not collective.
    """
    return np.arange(selection.start, selection.stop) if isinstance(selection, slice) else selection


def parts_of(axis: Axis, length: int) -> Iterator[tuple[Interval, Selection, Selection]]:
    """Yield the cells of an axis shard by shard: a range with all of them, where they lie in it, and in the block.

    Not collective.

    Parameters
    ----------
    axis
        Global cells, in any order.
    length
        That of a shard.
    """
    if isinstance(axis, tuple):
        for start in range(axis[0] // length * length, axis[1], length):
            low, high = max(start, axis[0]), min(start + length, axis[1])
            yield (low, high), slice(0, high - low), slice(low - axis[0], high - axis[0])
        return
    shards = axis // length
    order = np.argsort(shards, kind="stable")
    for at in np.split(order, np.flatnonzero(np.diff(shards[order])) + 1):
        if at.size:
            low, high = int(axis[at].min()), int(axis[at].max()) + 1
            yield (low, high), axis[at] - low, at


def selected_shape(at: Sequence[Selection]) -> tuple[int, ...]:
    """Return how many cells a selection has in each axis.

    Not collective.
    """
    return tuple(s.stop - s.start if isinstance(s, slice) else len(s) for s in at)


def prove_coverage(
    grid: ShardGrid, box: Box, indexed: Collection[str], pieces: Sequence[tuple[int, Sequence[Selection]]]
) -> None:
    """Prove that every cell of a box comes once.

    Not collective.

    Parameters
    ----------
    grid
        The array.
    box
        The box.
    indexed
        Dims that are given by numbers; in the others every piece has the whole box.
    pieces
        Pairs of a rank and where in the box its cells belong.

    Raises
    ------
    TilingError
        Kind ``overlap`` or ``hole``, naming the cell and the ranks.
    """
    dims = [k for k, dim in enumerate(grid.bases) if dim in indexed]
    counts = np.zeros([box[k][1] - box[k][0] for k in dims], dtype=np.int32)
    for _, at in pieces:
        np.add.at(counts, _grid_of([at[k] for k in dims]), 1)
    wrong = np.argwhere(counts != 1)
    if not len(wrong):
        return
    cell = tuple(int(i) for i in wrong[0])
    name = " ".join(f"{grid.dims[k]}[{box[k][0] + i}]" for k, i in zip(dims, cell, strict=True))
    more = (
        f", and {len(wrong) - 1} more cells of {'x'.join(map(str, counts.shape))} are wrong" if len(wrong) > 1 else ""
    )
    if counts[cell] == 0:
        raise TilingError(f"array {grid.name!r}: no rank's indices contain {name}{more}; give it to one", kind="hole")
    holders = []
    for rank, at in pieces:
        one = np.zeros_like(counts)
        np.add.at(one, _grid_of([at[k] for k in dims]), 1)
        holders += [rank] * int(one[cell])
    raise TilingError(
        f"array {grid.name!r}: {name} stands in the indices of rank {', '.join(map(str, holders))}{more}; "
        "each cell belongs to one rank, once",
        kind="overlap",
        rank=holders[-1],
    )


def _grid_of(at: Sequence[Selection]) -> tuple[NDArray[np.int64], ...]:
    return np.ix_(*map(numbers_of, at))

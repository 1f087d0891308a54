"""Boxes drawn at random, and the painted array that says what they cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpistream.tiling import Box, box_n_cells

__all__ = ["boxes_in", "is_plain", "painted", "shape_and_boxes", "shape_and_partition", "slices"]

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def painted(shape: Sequence[int], boxes: Iterable[Box]) -> NDArray[Any]:
    """Return how many boxes cover each cell."""
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[slices(box)] += 1
    return count


def is_plain(value: object) -> bool:
    """Return whether nothing but tuples and Python ints is in there."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return type(value) is int


def boxes_in(shape: Sequence[int]) -> st.SearchStrategy[Box]:
    """Draw a box inside a space, maybe without cells."""

    def interval(n: int) -> st.SearchStrategy[Any]:
        return st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).map(tuple)

    return st.tuples(*map(interval, shape))


@st.composite
def shape_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a space and boxes in it that may overlap."""
    shape = draw(shapes)
    return shape, draw(st.lists(boxes_in(shape), max_size=9))


@st.composite
def shape_and_partition(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a space cut into disjoint boxes, in any order."""
    shape = draw(shapes)
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 12)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(*box[dim]))
        halves = [(*box[:dim], side, *box[dim + 1 :]) for side in ((box[dim][0], cut), (cut, box[dim][1]))]
        boxes += [half for half in halves if box_n_cells(half)]
    return shape, draw(st.permutations(boxes))

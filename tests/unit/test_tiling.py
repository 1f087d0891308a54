"""Boxes and the tiling proof, against painted arrays."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream import tiling
from mpistream.errors import TilingError
from mpistream.tiling import (
    box_intersection,
    box_n_cells,
    find_hole,
    find_overlap,
    format_box,
    prove_tiling,
)
from tests.support.boxes import is_plain, painted, shape_and_boxes, shape_and_partition, slices

# ---- boxes -------------------------------------------------------------------------------------------


def test_format_box_names_each_dim() -> None:
    """A box is shown dim by dim, the one of no dims as ()."""
    assert format_box(("y", "x"), ((0, 256), (0, 512))) == "y[0:256] x[0:512]"
    assert format_box((), ()) == "()"


def test_box_n_cells_counts_cells() -> None:
    """The box of no dims has one cell, one with equal bounds has none."""
    assert box_n_cells(((2, 5), (0, 4))) == 12
    assert box_n_cells(((2, 5), (4, 4))) == 0
    assert box_n_cells(((5, 2), (5, 2))) == 0
    assert box_n_cells(()) == 1


def test_box_intersection_is_what_both_cover() -> None:
    """Boxes that only touch share nothing; the box of no dims shares itself."""
    assert box_intersection(((0, 4), (0, 4)), ((2, 6), (3, 9))) == ((2, 4), (3, 4))
    assert box_intersection(((0, 4),), ((4, 6),)) is None
    assert box_intersection((), ()) == ()


# ---- overlap, hole, tiling ---------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", [1, 3, 64])
@given(shape_and_boxes())
@settings(deadline=None, max_examples=150)
def test_overlap_is_found_iff_a_cell_is_painted_twice(leaf, case) -> None:
    """The two boxes named share exactly the box named, however far the search divides."""
    shape, boxes = case
    with mock.patch.object(tiling, "_LEAF", leaf):
        found = find_overlap(boxes)
        assert found == find_overlap(boxes)
    if found is None:
        assert painted(shape, boxes).max() <= 1
    else:
        i, j, both = found
        assert i < j
        assert is_plain(found)
        shared = painted(shape, [boxes[i], boxes[j]]) == 2
        assert shared.any()
        assert (shared == (painted(shape, [both]) == 1)).all()


@pytest.mark.parametrize("leaf", [1, 64])
@given(shape_and_partition())
@settings(deadline=None)
def test_disjoint_boxes_have_no_overlap(leaf, case) -> None:
    """A space cut into pieces has no two that share a cell, and no hole."""
    shape, boxes = case
    with mock.patch.object(tiling, "_LEAF", leaf):
        assert find_overlap(boxes) is None
    assert find_hole(shape, boxes) is None


@given(shape_and_partition(), st.data())
@settings(deadline=None, max_examples=200)
def test_hole_is_bare_and_cannot_be_stretched(case, data) -> None:
    """With pieces left out, the hole has no painted cell and has one next to it on every side."""
    shape, boxes = case
    kept = data.draw(st.lists(st.sampled_from(boxes), unique=True))
    count = painted(shape, kept)
    hole = find_hole(shape, kept)
    if hole is None:
        assert (count == 1).all()
        return
    assert is_plain(hole)
    assert box_n_cells(hole) > 0
    assert not count[slices(hole)].any()
    for dim, (start, stop) in enumerate(hole):
        for side in ((start - 1, start), (stop, stop + 1)):
            if 0 <= side[0] < shape[dim]:
                assert count[slices((*hole[:dim], side, *hole[dim + 1 :]))].any()


def test_searches_without_boxes() -> None:
    """Nothing overlaps nothing; an uncovered space is one hole, one without cells has none."""
    assert find_overlap([]) is None
    assert find_hole((3, 4), []) == ((0, 3), (0, 4))
    assert find_hole((3, 0), []) is None
    assert find_hole((), []) == ()


def test_hole_ignores_what_lies_outside() -> None:
    """Only the part of a box inside the space covers anything."""
    assert find_hole((4,), [((2, 9),), ((-5, 1),)]) == ((1, 2),)
    assert find_hole((4, 2), [((0, 4), (1, 1)), ((0, 4), (0, 1))]) == ((0, 4), (1, 2))


def test_many_boxes_on_one_cell_are_found_at_once() -> None:
    """Boxes that no cut separates overlap, in no dims too."""
    assert find_overlap([((0, 5), (0, 5))] * 1000) == (0, 1, ((0, 5), (0, 5)))
    assert find_overlap([()] * 1000) == (0, 1, ())
    assert find_overlap([((3, 3), (0, 5))] * 1000) is None
    crowd, beside = ((0, 10),), ((10, 11),)
    assert find_overlap([*[crowd] * 1000, beside]) == (0, 1, crowd)


def test_hole_is_counted_exactly_beyond_64_bits() -> None:
    """One cell missing of 2**90 is found."""
    n = 2**30
    boxes = [((0, n), (0, n), (0, n - 1)), ((0, n), (0, n - 1), (n - 1, n))]
    assert find_hole((n, n, n), boxes) == ((0, n), (n - 1, n), (n - 1, n))
    boxes.append(((0, n - 1), (n - 1, n), (n - 1, n)))
    assert find_hole((n, n, n), boxes) == ((n - 1, n), (n - 1, n), (n - 1, n))
    boxes.append(((n - 1, n), (n - 1, n), (n - 1, n)))
    assert find_hole((n, n, n), boxes) is None


def test_a_hundred_thousand_boxes() -> None:
    """A regular decomposition is proven, and a planted overlap and hole are found."""
    n_boxes = (50, 50, 40)
    edge = 7
    shape = tuple(n * edge for n in n_boxes)
    boxes = [tuple((i * edge, (i + 1) * edge) for i in index) for index in np.ndindex(*n_boxes)]
    assert len(boxes) == 100_000
    assert find_overlap(boxes) is None
    assert find_hole(shape, boxes) is None
    planted = 54_321
    y, x, z = boxes[planted]
    without = boxes[:planted] + boxes[planted + 1 :]
    assert find_hole(shape, without) == (y, x, z)
    stretched = (y, x, (z[0], z[1] + 2))  # into its neighbour, the next box in C order
    assert find_overlap([*without, stretched]) == (planted, 99_999, (y, x, (z[1], z[1] + 2)))


@given(shape_and_boxes())
@settings(deadline=None, max_examples=200)
def test_tiling_is_proven_iff_every_cell_is_painted_once(case) -> None:
    """The proof raises an overlap where some cell is painted twice, else a hole where one is bare."""
    shape, boxes = case
    count = painted(shape, boxes)
    dims = ("y", "x", "z")[: len(shape)]
    expected = "overlap" if (count > 1).any() else "hole" if (count == 0).any() else None
    ranks = [[box] for box in boxes]
    if expected is None:
        prove_tiling("t", dims, shape, ranks)
    else:
        with pytest.raises(TilingError) as caught:
            prove_tiling("t", dims, shape, ranks)
        assert caught.value.kind == expected


@given(shape_and_partition())
@settings(deadline=None)
def test_partitions_tile(case) -> None:
    """Disjoint pieces of the whole tile it, however they are dealt out to ranks."""
    shape, boxes = case
    dims = ("y", "x", "z")[: len(shape)]
    prove_tiling("t", dims, shape, [boxes[::2], [], boxes[1::2]])


def test_overlap_message_names_ranks_boxes_and_the_shared_box() -> None:
    """Both ranks, both boxes by dim and their intersection are in the message."""
    ranks = [[((0, 4), (0, 6))], [], [((2, 8), (0, 6))]]
    with pytest.raises(TilingError) as caught:
        prove_tiling("t", ("y", "x"), (8, 6), ranks)
    text = str(caught.value)
    for part in ("'t'", "rank 0 owns y[0:4] x[0:6]", "rank 2 owns y[2:8] x[0:6]", "both own y[2:4] x[0:6]"):
        assert part in text
    assert (caught.value.kind, caught.value.rank) == ("overlap", 2)


def test_hole_message_names_the_box_nobody_owns() -> None:
    """The hole and the number of ranks are in the message."""
    with pytest.raises(TilingError, match=r"'t': none of the 2 ranks owns y\[4:8\] x\[3:6\]") as caught:
        prove_tiling("t", ("y", "x"), (8, 6), [[((0, 4), (0, 6))], [((4, 8), (0, 3))]])
    assert caught.value.kind == "hole"


def test_box_beyond_the_array_is_refused() -> None:
    """A box that ends outside is named with its rank, even where the cells inside are tiled."""
    with pytest.raises(TilingError, match=r"rank 1 owns y\[4:9\], beyond the array's y\[0:8\]") as caught:
        prove_tiling("t", ("y",), (8,), [[((0, 4),)], [((4, 9),)]])
    assert (caught.value.kind, caught.value.rank) == ("outside", 1)


def test_tiling_of_no_dims_and_of_no_cells() -> None:
    """An array of no dims needs exactly one writer, one without cells none."""
    prove_tiling("t", (), (), [[], [()]])
    prove_tiling("t", ("y", "x"), (0, 4), [[], []])
    with pytest.raises(TilingError) as caught:
        prove_tiling("t", (), (), [[()], [()]])
    assert caught.value.kind == "overlap"
    with pytest.raises(TilingError) as caught:
        prove_tiling("t", (), (), [[], []])
    assert caught.value.kind == "hole"

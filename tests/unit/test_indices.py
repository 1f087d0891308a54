"""Regions as lists of numbers: what is one, where its cells lie, and the proof that each comes once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistream.errors import SchemaError, TilingError
from mpistream.grid import ShardGrid
from mpistream.indices import (
    Indices,
    Selection,
    as_range,
    axes_of,
    axis_lengths,
    crossing,
    numbers_of,
    parts_of,
    prove_coverage,
    selected_shape,
)

GRID = ShardGrid(name="t", dims=("level", "cell"), shape=(2, 10), shard_shape=(2, 4))


def test_indices_are_a_mapping_of_arrays_of_their_own() -> None:
    """Copied, plain int64 and read-only, in the order given; an empty list is no cells."""
    mine = np.array([7, 2, 9], "uint16")
    indices = Indices({"cell": mine, "edge": []})
    mine[:] = 0
    assert indices["cell"].tolist() == [7, 2, 9]
    assert [a.dtype for a in indices.values()] == [np.dtype("int64")] * 2
    assert (list(indices), len(indices), indices["edge"].size) == (["cell", "edge"], 2, 0)
    assert repr(indices) == "Indices(cell: 3 cells, edge: 0 cells)"
    with pytest.raises(ValueError, match="read-only"):
        indices["cell"][0] = 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give a mapping dim -> global numbers"),
        ([1, 2], "give a mapping dim -> global numbers"),
        ({"cell": [[1, 2]]}, r"indices of dim 'cell' have shape \(1, 2\)"),
        ({"cell": 5}, r"have shape \(\)"),
        ({"cell": [0.0, 1.0]}, "dtype float64; give a one-dimensional array of integers"),
        ({"cell": np.array([0, 2**64 - 1], "uint64")}, "contain 18446744073709551615; they begin at 0"),
        ({"cell": [True]}, "dtype bool"),
        ({"cell": [3, -1]}, "contain -1; they begin at 0"),
        ({"cell": [[1], [1, 2]]}, "indices of dim 'cell'"),
    ],
    ids=repr,
)
def test_what_is_no_list_of_numbers_is_refused(given, message) -> None:
    """With the dim and what was given."""
    with pytest.raises(SchemaError, match=message) as caught:
        Indices(given)
    assert caught.value.kind in ("region", "shape")


def test_a_block_has_the_listed_cells_and_is_whole_elsewhere() -> None:
    """An axis per dim of the array, whatever else the indices name."""
    axes = axes_of(GRID, Indices({"cell": [7, 2, 9], "edge": [1]}))
    assert axes[0] == (0, 2)
    assert axis_lengths(axes) == (2, 3)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([4], slice(4, 5)), ([2, 3, 4], slice(2, 5)), ([2, 4], None), ([3, 2, 1], None), ([1, 3, 2, 4], None)],
)
def test_numbers_that_follow_each_other_are_a_slice(numbers, expected) -> None:
    """Ends that fit are not enough."""
    given = np.array(numbers)
    found = as_range(given)
    assert found == expected if expected is not None else found is given
    assert numbers_of(found).tolist() == numbers


@given(st.lists(st.integers(0, 9), unique=True), st.integers(0, 9), st.integers(1, 10))
def test_a_crossing_brings_the_cells_of_a_box(numbers, start, length) -> None:
    """What is selected of the block is what belongs into the box; None if that is nothing."""
    box = ((0, 2), (start, min(start + length, 10)))
    whole = np.arange(20).reshape(2, 10)
    block = whole[:, numbers]
    into = np.full((2, box[1][1] - start), -1)
    found = crossing(axes_of(GRID, Indices({"cell": numbers})), box)
    inside = [n for n in numbers if start <= n < box[1][1]]
    if not inside:
        assert found is None
        return
    assert found is not None
    source, target = found
    assert selected_shape(source) == selected_shape(target) == (2, len(inside))
    into[np.ix_(*map(numbers_of, target))] = block[np.ix_(*map(numbers_of, source))]
    expected = np.full((2, 10), -1)
    expected[:, inside] = whole[:, inside]
    np.testing.assert_array_equal(into, expected[:, start : box[1][1]])


BOX = ((0, 2), (4, 8))
LEVELS = slice(0, 2)


def test_each_cell_of_a_box_comes_once() -> None:
    """From any rank, in any order."""
    prove_coverage(
        GRID, BOX, ["cell"], [(3, (LEVELS, np.array([2, 0]))), (1, (LEVELS, slice(1, 2))), (0, (LEVELS, slice(3, 4)))]
    )


@pytest.mark.parametrize(
    ("pieces", "kind", "message"),
    [
        ([(0, [0, 1, 3])], "hole", r"array 't': no rank's indices contain cell\[6\]; give it to one"),
        ([], "hole", r"no rank's indices contain cell\[4\], and 3 more cells of 4 are wrong"),
        ([(0, [0, 1]), (2, [3, 2, 1])], "overlap", r"cell\[5\] stands in the indices of rank 0, 2; each cell belongs"),
        ([(5, [0, 1, 2, 3, 1])], "overlap", r"cell\[5\] stands in the indices of rank 5, 5;"),
    ],
)
def test_cells_that_do_not_come_once_are_named(pieces, kind, message) -> None:
    """The first of them by its global number, with the ranks, and how many more there are."""
    with pytest.raises(TilingError, match=message) as caught:
        prove_coverage(GRID, BOX, ["cell"], [(rank, (LEVELS, np.array(at))) for rank, at in pieces])
    assert caught.value.kind == kind
    assert caught.value.rank == (pieces[-1][0] if kind == "overlap" else None)


def test_several_lists_make_a_grid() -> None:
    """A cell is named by all of its numbers."""
    grid = ShardGrid(name="t", dims=("y", "x"), shape=(4, 4), shard_shape=(2, 2))
    box = ((2, 4), (0, 2))
    halves: list[tuple[int, list[Selection]]] = [
        (0, [np.array([1, 0]), slice(0, 1)]),
        (1, [slice(0, 2), slice(1, 2)]),
    ]
    prove_coverage(grid, box, ["y", "x"], halves)
    with pytest.raises(TilingError, match=r"no rank's indices contain y\[2\] x\[1\], and 1 more cells of 2x2"):
        prove_coverage(grid, box, ["y", "x"], halves[:1])


def test_cells_of_an_axis_shard_by_shard() -> None:
    """A range is cut at the edges of shards; a list is sorted by shard, whatever its order; nothing is in none."""
    assert list(parts_of((3, 9), 4)) == [
        ((3, 4), slice(0, 1), slice(0, 1)),
        ((4, 8), slice(0, 4), slice(1, 5)),
        ((8, 9), slice(0, 1), slice(5, 6)),
    ]
    found = [(interval, *map(list, map(numbers_of, at))) for interval, *at in parts_of(np.array([9, 1, 8, 1, 3]), 4)]
    assert found == [((1, 4), [0, 0, 2], [1, 3, 4]), ((8, 10), [1, 0], [0, 2])]
    assert list(parts_of(np.array([], np.int64), 4)) == []

"""Which pieces move, and who writes: against painted grids, and against all assignments there are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream import rearrange
from mpistream.errors import TilingError
from mpistream.grid import ShardGrid, held_boxes
from mpistream.rearrange import Exchange, plan_exchange, split_piece, target_boxes
from mpistream.region import Region
from mpistream.tiling import box_contains, box_n_cells
from tests.support.boxes import painted, slices
from tests.support.decompositions import deal, most_that_can_stay, tile

DIMS = ("w", "z", "y", "x")


def random_case(seed: int, max_ranks: int = 7):
    """A grid of up to four dims in shards, and what some ranks hold of it."""
    rng = random.Random(seed)
    n_dims = rng.randint(1, 4)
    shape = tuple(rng.randint(1, 6 if n_dims < 4 else 4) for _ in range(n_dims))
    dims = DIMS[-n_dims:]
    shards = {d: rng.randint(1, n + 2) for d, n in zip(dims, shape, strict=True)}
    held = deal(rng, tile(rng, shape, rng.randint(1, 12)), rng.randint(1, max_ranks))
    return rng, dict(zip(dims, shape, strict=True)), shards, [Region(dims, boxes) for boxes in held]


def grid_of(sizes, shards, dims=None) -> ShardGrid:
    names = tuple(sizes if dims is None else dims)
    shape = tuple(sizes[d] for d in names)
    return ShardGrid(name="t", dims=names, shape=shape, shard_shape=tuple(shards[d] for d in names))


def check(grid: ShardGrid, partitioned, regions, exchange: Exchange) -> None:
    """Assert that pieces bring each cell once from who holds it to who writes it, in whole shards."""
    assert len(exchange.boxes) == len(regions)
    assert (painted(grid.shape, [box for boxes in exchange.boxes for box in boxes]) == 1).all()
    for rank, boxes in enumerate(exchange.boxes):
        for box in boxes:
            grid.check_aligned(box, rank)
    assert (painted(grid.shape, [p.box for p in exchange.pieces]) == 1).all()
    for p in exchange.pieces:
        assert box_contains(exchange.boxes[p.target][p.part], p.box)
        assert box_contains(held_boxes(grid, partitioned, regions[p.source])[p.patch], p.box)
    # The data, moved piece by piece.
    whole = np.arange(np.prod(grid.shape, dtype=int)).reshape(grid.shape)
    moved = np.full(grid.shape, -1)
    for p in exchange.pieces:
        held = held_boxes(grid, partitioned, regions[p.source])[p.patch]
        block = whole[slices(held)]
        written = exchange.boxes[p.target][p.part]
        moved[slices(written)][slices(shifted(p.box, written))] = block[slices(shifted(p.box, held))]
    np.testing.assert_array_equal(moved, whole)


def shifted(box, outer):
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))


def labels(grid: ShardGrid, boxes_by_rank):
    """The rank of each cell."""
    found = np.full(grid.shape, -1)
    for rank, boxes in enumerate(boxes_by_rank):
        for box in boxes:
            found[slices(box)] = rank
    return found


# ---- exchanges ---------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 9))
def test_pieces_bring_every_cell_once_to_who_writes_it(seed, n_writers) -> None:
    """Of any tiling, into whole shards on at most as many ranks as were asked for; what moves is counted."""
    _, sizes, shards, regions = random_case(seed)
    grid = grid_of(sizes, shards)
    exchange = plan_exchange(grid, tuple(sizes), regions, n_writers, [0] * len(regions))
    check(grid, tuple(sizes), regions, exchange)
    assert all(len(boxes) <= 1 for boxes in exchange.boxes)
    n_writing = sum(map(bool, exchange.boxes))
    assert 1 <= n_writing <= min(n_writers, len(regions), grid.n_shards)
    holder = labels(grid, [r.boxes for r in regions])
    assert exchange.n_moved_cells == (holder != labels(grid, exchange.boxes)).sum()


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=60)
def test_as_few_cells_move_as_can(seed, n_writers) -> None:
    """No other choice of ranks for the same targets leaves more where it is."""
    _, sizes, shards, regions = random_case(seed, max_ranks=6)
    grid = grid_of(sizes, shards)
    exchange = plan_exchange(grid, tuple(sizes), regions, n_writers, [0] * len(regions))
    targets = [box for boxes in exchange.boxes for box in boxes]
    holder = labels(grid, [r.boxes for r in regions])
    gain = np.array([[(holder[slices(box)] == rank).sum() for rank in range(len(regions))] for box in targets])
    assert holder.size - exchange.n_moved_cells == most_that_can_stay(gain)


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_of_an_array_of_fewer_dims_the_lowest_rank_sends(seed, n_writers) -> None:
    """Where several ranks hold a cell; also where their boxes overlap in part."""
    rng, sizes, shards, regions = random_case(seed)
    some = [d for d in sizes if rng.random() < 0.6]
    grid = grid_of({**sizes, "level": 2}, {**shards, "level": 1}, [*some, "level"])
    exchange = plan_exchange(grid, tuple(sizes), regions, n_writers, [0] * len(regions))
    check(grid, tuple(sizes), regions, exchange)
    # From the highest rank down, so that the lowest one has the last word. Without these dims every rank has all.
    holder = np.full(grid.shape, -1)
    for rank, region in reversed(list(enumerate(regions))):
        if not some or not region.is_empty:
            for box in held_boxes(grid, tuple(sizes), region):
                holder[slices(box)] = rank
    sender = labels(grid, [[p.box for p in exchange.pieces if p.source == r] for r in range(len(regions))])
    np.testing.assert_array_equal(sender, holder)
    assert exchange.n_moved_cells == (holder != labels(grid, exchange.boxes)).sum()


def test_an_array_without_partitioned_dims_stays_on_rank_0() -> None:
    """Every rank has it, and nothing moves; also if rank 0 holds nothing else, and of an array without dims."""
    regions = [Region.empty(("x",)), Region.of_box(("x",), ((0, 6),))]
    for grid, box in (
        (ShardGrid(name="t", dims=("level",), shape=(5,), shard_shape=(2,)), ((0, 5),)),
        (ShardGrid(name="t", dims=(), shape=(), shard_shape=()), ()),
    ):
        exchange = plan_exchange(grid, ("x",), regions, 2, [0] * len(regions))
        assert exchange.boxes == ((box,), ())
        assert [(p.source, p.target, p.box) for p in exchange.pieces] == [(0, 0, box)]
        assert exchange.n_moved_cells == 0


def test_an_array_without_cells_has_no_pieces() -> None:
    """A dim of length 0 leaves nothing to hold, to write or to move."""
    grid = ShardGrid(name="t", dims=("y", "x"), shape=(0, 4), shard_shape=(2, 2))
    exchange = plan_exchange(grid, ("y", "x"), [Region.empty(("y", "x"))] * 3, 2, [0] * 3)
    assert exchange == Exchange(boxes=((), (), ()), pieces=(), n_moved_cells=0)
    assert exchange.n_moved_cells == 0


def test_who_holds_most_of_a_target_writes_it() -> None:
    """By hand: 12 cells in shards of 4 over two writers are 4 and 8; ranks that hold little send to those with most."""
    grid = ShardGrid(name="t", dims=("x",), shape=(12,), shard_shape=(4,))
    regions = [Region.of_box(("x",), (pair,)) for pair in ((7, 12), (3, 4), (4, 7), (0, 3))]
    exchange = plan_exchange(grid, ("x",), regions, 2, [0] * len(regions))
    assert exchange.boxes == ((((4, 12),),), (), (), (((0, 4),),))
    moves = {(p.source, p.target, p.box) for p in exchange.pieces if p.source != p.target}
    assert moves == {(1, 3, ((3, 4),)), (2, 0, ((4, 7),))}
    assert exchange.n_moved_cells == 4


@pytest.mark.parametrize("dims", [("y", "x"), ("y",)], ids=["all dims", "a shadow"])
def test_a_hole_is_named(dims) -> None:
    """No rank holds rows 4 to 8, which somebody would have to write."""
    grid = grid_of({"y": 8, "x": 6}, {"y": 3, "x": 6}, dims)
    regions = [Region.of_box(("y", "x"), ((0, 3), (0, 6))), Region.of_box(("y", "x"), ((3, 4), (0, 6)))]
    with pytest.raises(TilingError, match=r"none of the 2 ranks owns y\[4:8\]") as caught:
        plan_exchange(grid, ("y", "x"), regions, 2, [0] * len(regions))
    assert caught.value.kind == "hole"


def test_nothing_held_is_a_hole() -> None:
    """Of an array of fewer dims, too."""
    grid = ShardGrid(name="t", dims=("y",), shape=(8,), shard_shape=(3,))
    with pytest.raises(TilingError, match=r"none of the 2 ranks owns y\[0:8\]"):
        plan_exchange(grid, ("y", "x"), [Region.empty(("y", "x"))] * 2, 2, [0] * 2)


@pytest.mark.parametrize(
    ("boxes", "kind", "message"),
    [
        ([((0, 5),), ((4, 8),)], "overlap", r"rank 0 owns x\[0:5\] and rank 1 owns x\[4:8\]; both own x\[4:5\]"),
        ([((0, 8),), ((0, 8),)], "overlap", r"both own x\[0:8\]"),
        ([((0, 3),), ((5, 8),)], "hole", r"none of the 2 ranks owns x\[3:5\]"),
        ([((0, 3),), ((3, 9),)], "outside", r"rank 1 owns x\[3:9\], beyond the array's x\[0:8\]"),
    ],
)
def test_regions_that_do_not_tile_are_refused(boxes, kind, message) -> None:
    """With the ranks and their boxes, wherever their edges lie."""
    grid = ShardGrid(name="t", dims=("x",), shape=(8,), shard_shape=(3,))
    with pytest.raises(TilingError, match=message) as caught:
        plan_exchange(grid, ("x",), [Region.of_box(("x",), box) for box in boxes], 2, [0] * len(boxes))
    assert caught.value.kind == kind


def test_a_box_that_a_rank_gives_twice_is_an_overlap() -> None:
    """It would pass two blocks for the same cells."""
    grid = ShardGrid(name="t", dims=("x",), shape=(8,), shard_shape=(3,))
    with pytest.raises(TilingError, match=r"rank 0 .* and rank 0 .*; both own"):
        plan_exchange(grid, ("x",), [Region(("x",), [((0, 8),), ((0, 8),)])], 1, [0])


# ---- targets and owners ------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_targets_tile_in_whole_shards_in_c_order(seed, n_targets) -> None:
    """At most as many as were asked for, and as many as there are shards if these are fewer along one dim."""
    _, sizes, shards, _ = random_case(seed)
    grid = grid_of(sizes, shards)
    targets = target_boxes(grid, n_targets)
    assert (painted(grid.shape, targets) == 1).all()
    assert targets == sorted(targets)
    assert 1 <= len(targets) <= min(n_targets, grid.n_shards)
    for box in targets:
        grid.check_aligned(box, 0)


# ---- messages ----------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=4),
    st.sampled_from([1, 4, 16]),
    st.integers(16, 400),
)
def test_parts_of_a_piece_fit_into_messages(axes, itemsize, limit) -> None:
    """They are the piece, in C order, and none is larger than a message may be."""
    box = tuple((start, start + n) for start, n in axes)
    parts = split_piece(box, itemsize, limit)
    assert all(box_n_cells(part) * itemsize <= limit for part in parts)
    whole = np.arange(np.prod([b for _, b in box], dtype=int)).reshape([b for _, b in box])
    found = np.concatenate([whole[slices(part)].ravel() for part in parts])
    np.testing.assert_array_equal(found, whole[slices(box)].ravel())
    if box_n_cells(box) * itemsize <= limit:
        assert parts == [box]


def test_a_message_has_a_gibibyte_at_most() -> None:
    """Counts of MPI have 31 bits; a piece of 3 GiB is three messages."""
    assert split_piece(((0, 2**28),), 4) == [((0, 2**28),)]
    thirds = [((0, 1), (k * 2**27, (k + 1) * 2**27)) for k in range(3)]
    assert split_piece(((0, 1), (0, 3 * 2**27)), 8) == thirds


@pytest.mark.parametrize("leaf", [1, 2, 64])
@pytest.mark.parametrize("seed", range(6))
def test_of_boxes_that_overlap_each_cell_is_the_first_ones(
    monkeypatch: pytest.MonkeyPatch, seed: int, leaf: int
) -> None:
    """Against boxes that are painted over each other, the first one last; however few are compared at once."""
    monkeypatch.setattr(rearrange, "_LEAF", leaf)
    rng = random.Random(seed)
    shape = tuple(rng.randint(3, 9) for _ in range(rng.randint(1, 3)))
    boxes = [tuple((a := rng.randrange(n), rng.randint(a + 1, n)) for n in shape) for _ in range(80)]
    expected = np.full(shape, -1)
    for k in reversed(range(len(boxes))):
        expected[slices(boxes[k])] = k
    found = np.full(shape, -1)
    parts = rearrange._without_overlaps([(k, k + 1, box) for k, box in enumerate(boxes)])
    for rank, patch, box in parts:
        assert patch == rank + 1
        assert (found[slices(box)] == -1).all()
        found[slices(box)] = rank
    assert (found == expected).all()


def test_deep_shadows_are_compared_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as many boxes, half of them covered by earlier ones, cost about four times as many comparisons."""
    n_calls = 0
    minus = rearrange._minus

    def counted(*args: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return minus(*args)

    monkeypatch.setattr(rearrange, "_minus", counted)
    counts = []
    for n in (500, 2000):
        n_calls = 0
        # Each covers all before it and one cell more: compared in pairs they would be n * n / 2.
        parts = rearrange._without_overlaps([(k, 0, ((0, k + 1),)) for k in range(n)])
        assert [(rank, box) for rank, _, box in parts] == [(k, ((k, k + 1),)) for k in range(n)]
        counts.append(n_calls)
    assert counts[1] < 5 * counts[0]
    assert counts[1] < 100 * 2000

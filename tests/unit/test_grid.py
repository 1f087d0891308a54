"""Shard grids, who writes which shard, and the split of a grid over writers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream.errors import AlignmentError, TilingError
from mpistream.grid import ShardGrid, assign_shards, held_boxes, split_units
from mpistream.region import Region
from mpistream.tiling import box_n_cells
from tests.support.boxes import boxes_in, is_plain, painted, slices

SIZES = {"y": 8, "x": 6}


def shard_grid(shape, shard_shape, dims=("y", "x", "z"), name="t"):
    return ShardGrid(name=name, dims=tuple(dims[: len(shape)]), shape=shape, shard_shape=shard_shape)


def test_last_shard_is_clipped_to_the_shape() -> None:
    """10 cells in shards of 4 are 3 shards, the last of 2 cells."""
    g = shard_grid((10, 6), (4, 3))
    assert g.grid_shape == (3, 2)
    assert g.n_shards == 6
    assert g.shard_box((2, 1)) == ((8, 10), (3, 6))


def test_shards_in_lists_touched_shards_in_c_order() -> None:
    """Shards come last dim fastest; an empty box touches none."""
    g = shard_grid((10, 6), (4, 3))
    assert list(g.shards_in(((4, 10), (0, 6)))) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert list(g.shards_in(((5, 6), (2, 4)))) == [(1, 0), (1, 1)]
    assert list(g.shards_in(((5, 5), (0, 6)))) == []
    assert list(g.shards_in(((0, 0), (0, 0)))) == []


def test_zero_dims_are_one_shard() -> None:
    """An array without dims has one shard, one index and one box."""
    g = shard_grid((), ())
    assert g.grid_shape == ()
    assert g.n_shards == 1
    assert g.shard_box(()) == ()
    assert list(g.shards_in(())) == [()]
    g.check_aligned((), 0)


def test_zero_length_has_no_shards() -> None:
    """A dim of length 0 leaves no shard."""
    g = shard_grid((0, 4), (2, 2))
    assert g.n_shards == 0
    g.check_aligned(((0, 0), (0, 4)), 0)


@pytest.mark.parametrize("box", [((0, 4), (0, 6)), ((4, 10), (3, 6)), ((8, 10), (0, 3))])
def test_boxes_on_shard_edges_are_aligned(box) -> None:
    """Multiples of the shard length and the end of the array are edges."""
    shard_grid((10, 6), (4, 3)).check_aligned(box, 0)


@pytest.mark.parametrize(
    ("interval", "nearest"),
    [
        ((1, 8), "[0:8]"),
        ((2, 8), "[0:8]"),
        ((3, 8), "[4:8]"),
        ((4, 7), "[4:8]"),
        ((4, 5), "[4:8]"),
        ((9, 10), "[8:10]"),
    ],
)
def test_misaligned_box_is_refused_with_the_nearest_edges(interval, nearest) -> None:
    """The error names array, dim, rank, region, shard length and a region that would do."""
    g = shard_grid((10, 6), (4, 3), name="temperature")
    with pytest.raises(AlignmentError) as caught:
        g.check_aligned((interval, (0, 6)), 7)
    text = str(caught.value)
    for part in ("'temperature'", "'y'", "rank 7", "[{}:{}] of 10".format(*interval), "length 4", nearest):
        assert part in text
    assert caught.value.rank == 7
    assert caught.value.kind == "alignment"


@given(st.integers(1, 30), st.integers(1, 12), st.data())
@settings(deadline=None)
def test_offered_edges_are_aligned(n, shard, data) -> None:
    """Whatever the box, what the message offers is aligned and not empty."""
    g = shard_grid((n,), (shard,))
    start, stop = sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))
    try:
        g.check_aligned(((start, stop),), 0)
    except AlignmentError as error:
        offered = str(error).split("nearest that does is [")[1].split("]")[0].split(":")
        first, last = map(int, offered)
        assert 0 <= first < last <= n
        g.check_aligned(((first, last),), 0)
    else:
        assert start % shard == 0
        assert stop % shard == 0 or stop == n


# ---- assignment --------------------------------------------------------------------------------------

DIMS = ("y", "x")
QUADRANTS = [Region.of_box(DIMS, (y, x)) for y in ((0, 4), (4, 8)) for x in ((0, 3), (3, 6))]


def test_array_over_all_partitioned_dims_is_written_where_it_is_owned() -> None:
    """Each rank writes its own box, whole in the other dims and in the array's order of dims."""
    g = ShardGrid(name="t", dims=("x", "level", "y"), shape=(6, 5, 8), shard_shape=(3, 2, 2))
    assigned = assign_shards(g, DIMS, [*QUADRANTS, Region.empty(DIMS)])
    assert assigned == [
        (((0, 3), (0, 5), (0, 4)),),
        (((3, 6), (0, 5), (0, 4)),),
        (((0, 3), (0, 5), (4, 8)),),
        (((3, 6), (0, 5), (4, 8)),),
        (),
    ]


def test_misaligned_or_incomplete_regions_are_refused() -> None:
    """Alignment is checked rank by rank before the tiling."""
    regions = [Region.of_box(DIMS, ((0, 4), (0, 6))), Region.of_box(DIMS, ((3, 8), (0, 6)))]
    with pytest.raises(AlignmentError, match=r"rank 1 owns \[3:8\] of 8"):
        assign_shards(shard_grid((8, 6), (4, 3)), DIMS, regions)
    with pytest.raises(TilingError, match=r"y\[4:8\] x\[3:6\]"):
        assign_shards(shard_grid((8, 6), (4, 3)), DIMS, QUADRANTS[:3])


def test_array_without_partitioned_dims_goes_to_rank_0() -> None:
    """Rank 0 writes it whole, even with an empty region; so it is with an array of no dims."""
    regions = [Region.empty(DIMS), Region.whole(DIMS, SIZES)]
    assert assign_shards(shard_grid((5,), (2,), ("level",)), DIMS, regions) == [(((0, 5),),), ()]
    assert assign_shards(shard_grid((), ()), DIMS, regions) == [((),), ()]
    assert assign_shards(shard_grid((4,), (2,)), (), [Region.empty(())] * 2) == [(((0, 4),),), ()]


def test_array_without_cells_is_written_by_nobody() -> None:
    """A dim of length 0 leaves nothing to write."""
    g = ShardGrid(name="t", dims=("y", "none"), shape=(8, 0), shard_shape=(4, 1))
    assert assign_shards(g, ("y",), [Region.of_box(("y",), ((0, 4),)), Region.empty(("y",))]) == [(), ()]


def test_projection_goes_to_the_lowest_rank_that_holds_the_shard() -> None:
    """Of ranks with the same shadow only the first writes, and it writes its box as one."""
    g = ShardGrid(name="lat", dims=("level", "y"), shape=(3, 8), shard_shape=(3, 2))
    assert assign_shards(g, DIMS, QUADRANTS) == [(((0, 3), (0, 4)),), (), (((0, 3), (4, 8)),), ()]


def test_projection_that_is_won_in_part_is_written_shard_by_shard() -> None:
    """A rank whose shadow overlaps that of a lower rank writes one box per shard it won."""
    regions = [
        Region.of_box(DIMS, ((0, 4), (0, 3))),
        Region.of_box(DIMS, ((0, 8), (3, 6))),
        Region.empty(DIMS),
        Region.of_box(DIMS, ((4, 8), (0, 3))),
    ]
    g = ShardGrid(name="lat", dims=("y",), shape=(8,), shard_shape=(2,))
    assert assign_shards(g, DIMS, regions) == [(((0, 4),),), (((4, 6),), ((6, 8),)), (), ()]


def test_projection_that_ends_inside_a_shard_wins_only_whole_shards() -> None:
    """A shadow [0:5] over shards of 2 wins two of them; the third goes to the next rank."""
    regions = [Region.of_box(DIMS, ((0, 5), (0, 6))), Region.of_box(DIMS, ((4, 8), (0, 6)))]
    g = ShardGrid(name="lat", dims=("y",), shape=(8,), shard_shape=(2,))
    assert assign_shards(g, DIMS, regions) == [(((0, 2),), ((2, 4),)), (((4, 8),),)]


def test_boxes_of_one_rank_with_overlapping_shadows_write_a_shard_once() -> None:
    """A shard held by one box of a rank and touched by another is written once and whole."""
    region = Region(DIMS, [((0, 2), (0, 3)), ((0, 8), (3, 6))])
    g = ShardGrid(name="lat", dims=("y",), shape=(8,), shard_shape=(4,))
    assert assign_shards(g, DIMS, [region]) == [(((0, 4),), ((4, 8),))]


def test_shard_that_no_region_holds_whole_is_refused_with_the_edge() -> None:
    """The message names the shard, the edge that splits it, the shard length and both ways out."""
    g = ShardGrid(name="lat", dims=("level", "y"), shape=(3, 8), shard_shape=(2, 3))
    with pytest.raises(TilingError) as caught:
        assign_shards(g, DIMS, QUADRANTS)
    text = str(caught.value)
    for part in ("'lat'", "level[0:2] y[3:6]", "'y' at 4 (shard length 3)", "edges", "smaller"):
        assert part in text
    assert "'level' at" not in text
    assert caught.value.kind == "projection"


def test_shard_that_no_region_touches_is_refused() -> None:
    """Where the regions leave a hole the message says so."""
    g = ShardGrid(name="lat", dims=("y",), shape=(8,), shard_shape=(2,))
    with pytest.raises(TilingError, match=r"shard y\[4:6\] whole: no region touches it"):
        assign_shards(g, DIMS, QUADRANTS[:2])


@st.composite
def random_projection(draw):
    dims = ("z", "y", "x")
    sizes = dict(zip(dims, draw(st.tuples(*[st.integers(1, 7)] * 3)), strict=True))
    regions = [
        Region(dims, draw(st.lists(boxes_in(tuple(sizes.values())), max_size=2)))
        for _ in range(draw(st.integers(1, 5)))
    ]
    if draw(st.booleans()):  # makes success likely
        regions.insert(draw(st.integers(0, len(regions))), Region.whole(dims, sizes))
    own = draw(st.permutations(dims).map(lambda p: p[:2]))
    shape = tuple(sizes[d] for d in own)
    shard_shape = draw(st.tuples(*[st.integers(1, 4)] * 2))
    return dims, regions, ShardGrid(name="t", dims=tuple(own), shape=shape, shard_shape=shard_shape)


@given(random_projection())
@settings(deadline=None, max_examples=200)
def test_projections_match_a_search_shard_by_shard(case) -> None:
    """Every shard is written once, by the first rank with a box that contains it; else TilingError."""
    dims, regions, g = case
    expected = np.full(g.shape, -1)
    for index in np.ndindex(*g.grid_shape):
        shard = g.shard_box(index)
        for rank, region in reversed(list(enumerate(regions))):
            for box in region.boxes:
                bounds = dict(zip(dims, box, strict=True))
                if all(bounds[d][0] <= a and b <= bounds[d][1] for d, (a, b) in zip(g.dims, shard, strict=True)):
                    expected[slices(shard)] = rank
    if (expected < 0).any():
        with pytest.raises(TilingError):
            assign_shards(g, dims, regions)
        return
    assigned = assign_shards(g, dims, regions)
    assert is_plain(tuple(assigned))
    assert (painted(g.shape, itertools.chain(*assigned)) == 1).all()
    for rank, boxes in enumerate(assigned):
        for box in boxes:
            g.check_aligned(box, rank)
            assert (expected[slices(box)] == rank).all()


def test_ten_thousand_ranks_with_few_shadows() -> None:
    """Of 100 x 100 ranks in columns, 100 write the variable of one dim."""
    regions = [Region.of_box(DIMS, ((i, i + 1), (j, j + 1))) for i in range(100) for j in range(100)]
    g = ShardGrid(name="lat", dims=("y",), shape=(100,), shard_shape=(1,))
    assigned = assign_shards(g, DIMS, regions)
    assert [rank for rank, boxes in enumerate(assigned) if boxes] == list(range(0, 10_000, 100))
    assert assigned[4200] == (((42, 43),),)


def test_held_boxes_are_those_of_the_region_and_whole_elsewhere() -> None:
    """A block has the region's length in partitioned dims, none if it is empty, and all else whole."""
    g = ShardGrid(name="t", dims=("level", "x"), shape=(5, 6), shard_shape=(5, 3))
    assert held_boxes(g, DIMS, QUADRANTS[1]) == [((0, 5), (3, 6))]
    assert held_boxes(g, DIMS, Region.empty(DIMS)) == [((0, 5), (0, 0))]
    assert held_boxes(shard_grid((5,), (5,), ("level",)), DIMS, Region.empty(DIMS)) == [((0, 5),)]
    assert held_boxes(shard_grid((), ()), DIMS, Region.empty(DIMS)) == [()]


def test_held_boxes_are_as_many_as_the_region_has_in_its_order() -> None:
    """Also where an array lacks the dim in which they differ; but an array without partitioned dims is passed once."""
    two = Region(DIMS, [((4, 8), (3, 6)), ((0, 4), (3, 6))])
    assert held_boxes(shard_grid((8, 6), (4, 3)), DIMS, two) == [((4, 8), (3, 6)), ((0, 4), (3, 6))]
    assert held_boxes(shard_grid((6,), (3,), ("x",)), DIMS, two) == [((3, 6),), ((3, 6),)]
    assert held_boxes(shard_grid((5,), (5,), ("level",)), DIMS, two) == [((0, 5),)]


# ---- split_units -------------------------------------------------------------------------------------


def largest(p, n_units, unit_cells):
    """Cells and surface of the largest box of a process grid."""
    sides = [math.ceil(n / k) * c for n, k, c in zip(n_units, p, unit_cells, strict=True)]
    faces = [math.prod(sides[:i] + sides[i + 1 :]) for i in range(len(sides))]
    return math.prod(sides), 2 * sum(faces)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=3),
    st.integers(1, 30),
)
@settings(deadline=None, max_examples=200)
def test_split_is_the_best_of_all_process_grids(dims, n_writers) -> None:
    """The boxes tile the units; no grid has a smaller largest box, then surface, then a finer first dim."""
    n_units, unit_cells = zip(*dims, strict=True)
    boxes = split_units(n_units, n_writers, unit_cells)
    assert len(boxes) == n_writers
    assert is_plain(tuple(boxes))
    assert (painted(n_units, boxes) == 1).all()
    n_used = sum(box_n_cells(box) > 0 for box in boxes)
    assert all(box == ((0, 0),) * len(n_units) for box in boxes[n_used:])
    actual = tuple(len({box[dim] for box in boxes[:n_used]}) for dim in range(len(n_units)))
    grids = [p for p in itertools.product(*[range(1, n + 1) for n in n_units]) if math.prod(p) <= n_writers]
    best = min(largest(p, n_units, unit_cells) for p in grids)
    assert actual == max(p for p in grids if largest(p, n_units, unit_cells) == best)


@pytest.mark.parametrize(
    ("n_units", "n_writers", "unit_cells", "expected"),
    [
        ((8, 8), 4, None, (2, 2)),
        ((8, 8), 2, None, (2, 1)),
        ((8, 8), 2, (1, 4), (1, 2)),  # 32 x 8 cells: across the longer side
        ((3, 5), 5, None, (1, 5)),
        ((10,), 9, None, (9,)),
    ],
)
def test_process_grid(n_units, n_writers, unit_cells, expected) -> None:
    """Squarer boxes win, then the slowest dim is split."""
    boxes = [box for box in split_units(n_units, n_writers, unit_cells) if box_n_cells(box)]
    assert tuple(len({box[dim] for box in boxes}) for dim in range(len(n_units))) == expected


def test_split_lists_boxes_in_c_order_and_then_empty_ones() -> None:
    """The last dim runs fastest; surplus writers get (0, 0) in every dim."""
    assert split_units((3, 1), 5) == [
        ((0, 1), (0, 1)),
        ((1, 2), (0, 1)),
        ((2, 3), (0, 1)),
        ((0, 0), (0, 0)),
        ((0, 0), (0, 0)),
    ]
    assert split_units((5,), 2) == [((0, 2),), ((2, 5),)]


def test_split_of_nothing_and_of_no_dims() -> None:
    """Without units every writer is idle; without dims there is only the box ()."""
    assert split_units((4, 0), 2) == [((0, 0), (0, 0))] * 2
    assert split_units((), 3) == [()] * 3


def test_split_for_a_hundred_thousand_writers() -> None:
    """100,000 = 50 x 50 x 40 in three dims of 2,000 units, in cells beyond 64 bits too."""
    boxes = split_units((2000, 2000, 2000), 100_000)
    assert boxes[0] == ((0, 40), (0, 40), (0, 50))
    assert boxes[-1] == ((1960, 2000), (1960, 2000), (1950, 2000))
    assert sum(map(box_n_cells, boxes)) == 2000**3
    assert split_units((2000, 2000, 2000), 1000, (2**20, 2**20, 2**20))[0] == ((0, 200),) * 3

"""Regions, shard grids and the tiling proof, against closed forms and painted arrays."""

from __future__ import annotations

import itertools
import math
import pickle
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream import grid
from mpistream.errors import AlignmentError, SchemaError, TilingError
from mpistream.grid import (
    Region,
    ShardGrid,
    assign_shards,
    block_box,
    box_intersection,
    box_n_cells,
    find_hole,
    find_overlap,
    format_box,
    prove_tiling,
    split_units,
)

SIZES = {"y": 8, "x": 6}


def slices(box):
    return tuple(slice(start, stop) for start, stop in box)


def painted(shape, boxes):
    """How many boxes cover each cell."""
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[slices(box)] += 1
    return count


def is_plain(value):
    """Whether nothing but tuples and Python ints is in there."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return type(value) is int


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


def boxes_in(shape):
    def interval(n):
        return st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).map(tuple)

    return st.tuples(*map(interval, shape))


@st.composite
def shape_and_boxes(draw):
    shape = draw(shapes)
    return shape, draw(st.lists(boxes_in(shape), max_size=9))


@st.composite
def shape_and_partition(draw):
    """A space cut into disjoint boxes, in any order."""
    shape = draw(shapes)
    boxes = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 12)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(*box[dim]))
        halves = [(*box[:dim], side, *box[dim + 1 :]) for side in ((box[dim][0], cut), (cut, box[dim][1]))]
        boxes += [half for half in halves if box_n_cells(half)]
    return shape, draw(st.permutations(boxes))


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


# ---- Region ------------------------------------------------------------------------------------------


def test_region_is_a_mapping_of_its_only_box() -> None:
    """dict(region) gives dim -> (start, stop) in the order of the dims."""
    region = Region.of_box(("y", "x"), ((0, 4), (3, 6)))
    assert dict(region) == {"y": (0, 4), "x": (3, 6)}
    assert list(region) == ["y", "x"]
    assert len(region) == 2
    assert "x" in region
    assert "z" not in region
    assert region.box == ((0, 4), (3, 6))
    assert region.boxes == (((0, 4), (3, 6)),)
    assert region.dims == ("y", "x")
    assert region.n_cells == 12
    assert not region.is_empty
    with pytest.raises(KeyError):
        region["z"]


def test_empty_region_maps_every_dim_to_nothing() -> None:
    """The empty region has no boxes and reads as (0, 0) in every dim."""
    region = Region.empty(("y", "x"))
    assert region.is_empty
    assert region.boxes == ()
    assert region.n_cells == 0
    assert region.box == ((0, 0), (0, 0))
    assert dict(region) == {"y": (0, 0), "x": (0, 0)}
    assert Region.of_box(("y", "x"), ((0, 4), (5, 5))) == region


def test_region_of_several_boxes_refuses_item_access() -> None:
    """A region of two boxes has no single interval per dim; the message points to .boxes."""
    region = Region(("y",), [((4, 6),), ((0, 2),)])
    assert region.boxes == (((0, 2),), ((4, 6),))
    assert region.n_cells == 4
    with pytest.raises(SchemaError, match=r"2 boxes.*\.boxes") as caught:
        region["y"]
    assert caught.value.kind == "region"
    with pytest.raises(SchemaError):
        region.box  # noqa: B018
    assert "y" in region


def test_region_is_immutable_hashable_and_compares_by_content() -> None:
    """Equal dims and boxes are equal regions; a region of one box equals its plain mapping."""
    region = Region.of_box(("y", "x"), ((0, 4), (3, 6)))
    int64: type = np.int64
    same = Region(["y", "x"], [((0, 4), (3, 6)), ((int64(0), 4), (3, 6))])
    assert region == same
    assert hash(region) == hash(same)
    assert region != Region.of_box(("x", "y"), ((0, 4), (3, 6)))
    assert region == {"y": (0, 4), "x": (3, 6)}
    assert region != {"y": (0, 4)}
    assert Region(("y",), [((0, 1),), ((2, 3),)]) != {"y": (0, 1)}
    assert region != 5
    with pytest.raises(AttributeError):
        setattr(region, "dims", ())  # noqa: B010
    assert pickle.loads(pickle.dumps(region)) == region


def test_region_without_dims_is_everything_or_nothing() -> None:
    """Over no dims the whole region has one cell and the empty one none."""
    whole, empty = Region.whole((), {}), Region.empty(())
    assert whole.boxes == ((),)
    assert whole.n_cells == 1
    assert whole.box == empty.box == ()
    assert whole != empty
    assert Region.from_mapping({}, {}) == whole
    assert Region.from_mapping(empty, {}) == empty


def test_region_shows_its_boxes() -> None:
    """The repr names every dim and box."""
    assert repr(Region.of_box(("y", "x"), ((0, 4), (3, 6)))) == "Region(y[0:4] x[3:6])"
    assert repr(Region(("y",), [((0, 1),), ((2, 3),)])) == "Region(y[0:1] + y[2:3])"
    assert repr(Region.empty(("y", "x"))) == "Region(y, x: empty)"


@pytest.mark.parametrize("box", [((0, 4),), ((4, 0), (0, 1)), ((-1, 4), (0, 1))])
def test_region_refuses_malformed_boxes(box) -> None:
    """A box needs 0 <= start <= stop in every dim of the region."""
    with pytest.raises(SchemaError, match="0 <= start <= stop"):
        Region(("y", "x"), [box])


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (None, ((0, 8), (0, 6))),
        ({}, ((0, 8), (0, 6))),
        ({"x": (2, 4)}, ((0, 8), (2, 4))),
        ({"x": [2, 4], "y": np.array([0, 8])}, ((0, 8), (2, 4))),
        ({"y": slice(2, 4)}, ((2, 4), (0, 6))),
        ({"y": slice(None, 4, 1), "x": slice(3, None)}, ((0, 4), (3, 6))),
        ({"y": (np.int32(2), np.uint8(4))}, ((2, 4), (0, 6))),
        (Region.of_box(("x",), ((1, 2),)), ((0, 8), (1, 2))),
    ],
)
def test_from_mapping_fills_in_what_is_left_out(mapping, expected) -> None:
    """Pairs, slices and numpy integers are accepted; a dim left out is whole; plain ints come out."""
    region = Region.from_mapping(mapping, SIZES)
    assert region.dims == ("y", "x")
    assert region.boxes == (expected,)
    assert is_plain(region.boxes)


def test_from_mapping_keeps_empty_and_several_boxes() -> None:
    """A bound pair of no length gives the empty region; a given Region keeps all its boxes."""
    assert Region.from_mapping({"x": (3, 3)}, SIZES) == Region.empty(("y", "x"))
    assert Region.from_mapping(None, {"y": 0}) == Region.empty(("y",))
    two = Region(("y", "x"), [((0, 1), (0, 6)), ((4, 5), (0, 6))])
    assert Region.from_mapping(two, SIZES) == two
    assert Region.from_mapping(Region.empty(("y", "x")), SIZES).is_empty


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"z": (0, 1)}, "'z' is no partitioned dim; name only y, x"),
        ({"y": (4, 2)}, r"'y' of length 8: \[4:2\]"),
        ({"y": (-1, 2)}, r"'y' of length 8: \[-1:2\]"),
        ({"y": (0, 9)}, r"'y' of length 8: \[0:9\]"),
        ({"y": slice(-2, None)}, r"'y' of length 8: \[-2:8\]"),
        ({"y": slice(0, 8, 2)}, "'y'.* step"),
        ({"y": (0.0, 2)}, "'y'.* two integers"),
        ({"y": (True, 2)}, "'y'.* two integers"),
        ({"y": (0, True)}, "'y'.* two integers"),
        ({"y": (np.bool_(False), 2)}, "'y'.* two integers"),
        ({"y": 3}, "'y'.* two integers"),
        ({"y": (0, 1, 2)}, "'y'.* two integers"),
        ({"y": (0, None)}, "'y'.* two integers"),
        ({"y": "02"}, "'y'.* two integers"),
        (Region.of_box(("y",), ((0, 9),)), r"\[0:9\]"),
        (Region.empty(("z",)), "'z'"),
        ((0, 8), "mapping dim -> .*not tuple"),
    ],
)
def test_from_mapping_refuses_what_is_no_region(mapping, message) -> None:
    """Unknown dims, bounds out of the dim and anything but integers are refused with dim and numbers."""
    with pytest.raises(SchemaError, match=message) as caught:
        Region.from_mapping(mapping, SIZES)
    assert caught.value.kind == "region"


def test_from_mapping_names_that_nothing_is_partitioned() -> None:
    """Without partitioned dims a region may name none."""
    with pytest.raises(SchemaError, match="name only no dim"):
        Region.from_mapping({"y": (0, 1)}, {})


def test_project_keeps_some_dims_and_merges_equal_shadows() -> None:
    """The shadow of two stacked boxes is one box; that of nothing is nothing."""
    region = Region(("z", "y", "x"), [((0, 1), (0, 4), (0, 6)), ((1, 2), (0, 4), (0, 6))])
    assert region.project(("y",)) == Region.of_box(("y",), ((0, 4),))
    assert region.project(("x", "y")).boxes == (((0, 6), (0, 4)),)
    assert region.project(()) == Region.whole((), {})
    assert Region.empty(("y", "x")).project(("x",)) == Region.empty(("x",))
    assert Region.empty(("y", "x")).project(()) == Region.empty(())
    with pytest.raises(AssertionError):
        region.project(("t",))


@pytest.mark.parametrize(
    "region",
    [
        Region.whole(("y", "x"), SIZES),
        Region.empty(("y",)),
        Region(("y",), [((0, 1),), ((2, 3),)]),
        Region.whole((), {}),
        Region.empty(()),
    ],
)
def test_region_survives_json(region) -> None:
    """from_json takes back what to_json wrote."""
    assert Region.from_json(region.to_json()) == region


def test_region_json_is_lists() -> None:
    """The document holds dims and one [start, stop] per dim and box."""
    document = Region.of_box(("y", "x"), ((0, 4), (3, 6))).to_json()
    assert document == {"dims": ["y", "x"], "boxes": [[[0, 4], [3, 6]]]}


# ---- ShardGrid ---------------------------------------------------------------------------------------


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
    [((1, 8), "[0:8]"), ((3, 8), "[4:8]"), ((4, 7), "[4:8]"), ((4, 5), "[4:8]"), ((9, 10), "[8:10]")],
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


# ---- overlap, hole, tiling ---------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", [1, 3, 64])
@given(shape_and_boxes())
@settings(deadline=None, max_examples=150)
def test_overlap_is_found_iff_a_cell_is_painted_twice(leaf, case) -> None:
    """The two boxes named share exactly the box named, however far the search divides."""
    shape, boxes = case
    with mock.patch.object(grid, "_LEAF", leaf):
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
    with mock.patch.object(grid, "_LEAF", leaf):
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


def test_block_box_is_the_region_and_whole_elsewhere() -> None:
    """A block has the region's length in partitioned dims, none if it is empty, and all else whole."""
    g = ShardGrid(name="t", dims=("level", "x"), shape=(5, 6), shard_shape=(5, 3))
    assert block_box(g, DIMS, QUADRANTS[1]) == ((0, 5), (3, 6))
    assert block_box(g, DIMS, Region.empty(DIMS)) == ((0, 5), (0, 0))
    assert block_box(shard_grid((5,), (5,), ("level",)), DIMS, Region.empty(DIMS)) == ((0, 5),)
    assert block_box(shard_grid((), ()), DIMS, Region.empty(DIMS)) == ()
    with pytest.raises(SchemaError, match=r"\.boxes"):
        block_box(shard_grid((8,), (4,)), DIMS, Region(DIMS, [((0, 4), (0, 3)), ((4, 8), (3, 6))]))


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

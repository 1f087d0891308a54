"""Who writes what in an epoch: the proof, its counts, and one writer's share."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistream as ms
from mpistream.epoch import Route, Share, indexed_epoch, prove_epoch, prove_rearranged
from mpistream.errors import AlignmentError, TilingError
from mpistream.layout import shard_regions
from mpistream.region import Region
from tests.support.boxes import painted
from tests.support.streams import SIZES, resolved

DIMS = ("y", "x")
SCHEMA = resolved(
    variables={
        "temperature": ms.Variable(("time", "y", "x"), "f4"),
        "rows": ms.Variable(("time", "y"), "f4"),
        "energy": ms.Variable(("time",), "f8"),
    },
    statics={
        "topography": ms.Variable(("y", "x"), "i2"),
        "scalar": ms.Variable((), "f4"),
        "words": ms.Variable(("z",), str),
        "levels": ms.Variable(("z",), "f4"),
    },
    dims={"time": None, **SIZES, "z": 5},
)
LEFT = Region.of_box(DIMS, ((0, 8), (0, 3)))
RIGHT = Region.of_box(DIMS, ((0, 8), (3, 6)))
NONE = Region.empty(DIMS)
SHARDED = [name for name, array in SCHEMA.arrays.items() if array.is_sharded]


def test_cells_are_counted_per_array_and_writer() -> None:
    """Of one record: the own box, the projection of the lowest rank, and the owner's: one cell of a series, all
    cells of what is not partitioned."""
    epoch = prove_epoch(SCHEMA, [NONE, LEFT, RIGHT])
    assert epoch.regions == (NONE, LEFT, RIGHT)
    assert epoch.n_cells == {
        "temperature": (0, 24, 24),
        "rows": (0, 8, 0),
        "energy": (1, 0, 0),
        "topography": (0, 24, 24),
        "scalar": (1, 0, 0),
        "words": (5, 0, 0),
        "levels": (5, 0, 0),
        "lat": (0, 24, 24),
    }
    assert epoch.boxes["rows"] == [(), (((0, 8),),), ()]
    assert epoch.boxes.keys() == {"temperature", "rows", "topography", "levels", "lat"}
    assert "y" not in epoch.n_cells


def test_a_share_is_one_writers_column() -> None:
    """Its boxes, its region, its cells; the same after JSON."""
    epoch = prove_epoch(SCHEMA, [LEFT, RIGHT])
    share = epoch.shares()[1]
    assert (share.writer, share.region) == (1, RIGHT)
    assert share.boxes["temperature"] == (((0, 8), (3, 6)),)
    assert share.boxes["rows"] == ()
    assert (share.n_cells("temperature"), share.n_cells("rows")) == (24, 0)
    assert epoch.shares()[0].n_cells("rows") == 8
    assert Share.from_json(json.loads(json.dumps(share.to_json()))) == share


@pytest.mark.parametrize(
    ("regions", "error", "message"),
    [
        ([LEFT], TilingError, r"none of the 1 rank owns y\[0:8\] x\[3:6\]"),
        ([LEFT, RIGHT, RIGHT], TilingError, "rank 1 .* rank 2 .* both own"),
        (
            [Region.of_box(DIMS, ((0, 8), (0, 2))), Region.of_box(DIMS, ((0, 8), (2, 6)))],
            AlignmentError,
            r"'temperature', dim 'x': rank 0 owns \[0:2\] of 6",
        ),
    ],
    ids=["hole", "overlap", "alignment"],
)
def test_regions_that_do_not_tile_make_no_epoch(regions, error, message) -> None:
    """I3 begins here: no writer starts with regions that are not proven."""
    with pytest.raises(error, match=message):
        prove_epoch(SCHEMA, regions)


@given(st.integers(1, 12))
def test_every_cell_has_one_writer(n_writers) -> None:
    """I4: shares of an epoch are disjoint, and their cells add up to the array's."""
    epoch = prove_epoch(SCHEMA, shard_regions(SCHEMA, n_writers))
    shares = [epoch.shares()[w] for w in range(n_writers)]
    for name in epoch.boxes:
        array = SCHEMA.arrays[name]
        count = painted(array.shape, [box for share in shares for box in share.boxes[name]])
        assert (count == 1).all()
        assert tuple(share.n_cells(name) for share in shares) == epoch.n_cells[name]
        assert sum(epoch.n_cells[name]) == count.size


# ---- rearranged --------------------------------------------------------------------------------------

# Shards are 4 x 3 cells; these regions have no edge on theirs.
UPPER = Region.of_box(DIMS, ((0, 3), (0, 6)))
LOWER = Region.of_box(DIMS, ((3, 8), (0, 6)))


def test_a_rearranged_epoch_writes_whole_shards() -> None:
    """Both ranks write one half; the fourth row moves, of each array that has it, and of no other."""
    epoch = prove_rearranged(SCHEMA, [UPPER, LOWER], 2, [0, 0])
    assert epoch.boxes["temperature"] == ((((0, 4), (0, 6)),), (((4, 8), (0, 6)),))
    assert epoch.boxes["rows"] == ((((0, 4),),), (((4, 8),),))
    assert epoch.n_cells == {
        "temperature": (24, 24),
        "rows": (4, 4),
        "energy": (1, 0),
        "topography": (24, 24),
        "scalar": (1, 0),
        "words": (5, 0),
        "levels": (5, 0),
        "lat": (24, 24),
    }
    moved = {name: e.n_moved_cells for name, e in epoch.exchanges.items()}
    assert moved == {"temperature": 6, "rows": 1, "topography": 6, "levels": 0, "lat": 6}
    # Arrays of one shape have one plan.
    assert epoch.exchanges["temperature"] is epoch.exchanges["lat"]
    assert epoch.layout_regions == (UPPER, LOWER)


def test_a_share_has_the_pieces_of_its_rank_in_the_order_of_all() -> None:
    """Those that it sends, gets or has itself; what a pair of ranks shares stands in the same order on both."""
    regions = [Region(DIMS, [((k, k + 1), (0, 6)) for k in (r + 6, r + 3, r) if k < 8]) for r in range(3)]
    epoch = prove_rearranged(SCHEMA, regions, 2, [0, 0, 0])
    shares = epoch.shares()
    for name, exchange in epoch.exchanges.items():
        for share in shares:
            mine = [p for p in exchange.pieces if share.writer in (p.source, p.target)]
            assert list(share.pieces[name]) == mine
            assert share.is_rearranged(name)
            assert share.holds(name) == any(p.source == share.writer for p in mine)
        assert sum(share.n_cells(name) for share in shares) == sum(epoch.n_cells[name])
    assert {share.moving for share in shares} == {("lat", "rows", "temperature", "topography")}
    assert [Share.from_json(json.loads(json.dumps(share.to_json()))) for share in shares] == shares


def test_a_rank_may_write_what_it_does_not_hold() -> None:
    """And hold what it does not write."""
    whole = Region.of_box(DIMS, ((0, 8), (0, 6)))
    shares = prove_rearranged(SCHEMA, [whole, NONE], 2, [0, 0]).shares()
    assert [share.holds("temperature") for share in shares] == [True, False]
    assert [share.n_cells("temperature") for share in shares] == [24, 24]
    shares = prove_rearranged(SCHEMA, [UPPER, LOWER], 1, [0, 0]).shares()
    assert [share.holds("temperature") for share in shares] == [True, True]
    assert [share.n_cells("temperature") for share in shares] == [0, 48]


def test_what_is_aligned_does_not_move() -> None:
    """Each rank that holds the shards that it would be given keeps them, and no call is collective."""
    epoch = prove_rearranged(SCHEMA, [LEFT, RIGHT], 2, [0, 0])
    assert epoch.boxes["temperature"] in (
        ((((0, 8), (0, 3)),), (((0, 8), (3, 6)),)),
        ((((0, 4), (0, 6)),), (((4, 8), (0, 6)),)),
    )
    share = prove_epoch(SCHEMA, [LEFT, RIGHT]).shares()[0]
    assert share.moving == ()
    assert not share.is_rearranged("temperature")
    assert share.holds("temperature")


def test_an_epoch_of_indices_gets_its_owners_later() -> None:
    """The boxes are there; who writes which is said when it is known, and an array without indices is rank 0's."""
    epoch = indexed_epoch(SCHEMA, [NONE] * 3, dict.fromkeys(SHARDED, ("y",)), dict.fromkeys(SHARDED, 0), 2, [0] * 3)
    assert epoch.indexed["temperature"] == (((0, 4), (0, 6)), ((4, 8), (0, 6)))
    assert epoch.indexed["rows"] == (((0, 4),), ((4, 8),))
    assert epoch.layout_regions is None
    assert set(epoch.shares()[0].moving) == {
        name for name, a in SCHEMA.arrays.items() if a.is_sharded and "y" in a.dims
    }
    owners = {name: [2, 0][: len(boxes)] for name, boxes in epoch.indexed.items()}
    known = epoch.with_owners(SCHEMA, owners, {"temperature": 24})
    assert known.boxes["temperature"] == [(((4, 8), (0, 6)),), (), (((0, 4), (0, 6)),)]
    assert known.n_cells["temperature"] == (24, 0, 24)
    assert [known.n_moved_cells(name) for name in ("temperature", "rows")] == [24, 0]
    assert known.is_rearranged("temperature")
    assert known.n_cells["energy"] == (1, 0, 0)
    # What has no indexed dim is rank 0's, which holds it, too.
    with_y = {name for name, array in SCHEMA.arrays.items() if array.is_sharded and "y" in array.dims}
    assert set(known.shares()[2].moving) == with_y
    assert with_y < set(epoch.indexed)
    assert len(indexed_epoch(SCHEMA, [NONE], dict.fromkeys(SHARDED, ("y",)), {}, 2, [0]).indexed["temperature"]) == 1


def test_a_share_with_indices_holds_its_own_numbers() -> None:
    """Its blocks have the cells of its list, whole in other dims, and boxes that count them."""
    indices = ms.Indices({"y": [5, 1, 7]})
    here = Route(source=1, patch=0, target=0, part=0, source_at=(slice(0, 3),), target_at=())
    there = Route(source=0, patch=0, target=1, part=0, source_at=(), target_at=(slice(0, 3),))
    share = Share(
        writer=1,
        region=NONE,
        boxes={"temperature": (), "rows": ()},
        indices=indices,
        routes={"temperature": (here, there), "rows": (there,)},
    )
    assert share.held_boxes(SCHEMA.arrays["temperature"].grid) == [((0, 3), (0, 6))]
    assert share.held_boxes(SCHEMA.arrays["rows"].grid) == [((0, 3),)]
    assert (share.holds("temperature"), share.holds("rows")) == (True, False)

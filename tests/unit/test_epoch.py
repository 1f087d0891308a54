"""Who writes what in an epoch: the proof, its counts, and one writer's share."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistream as ms
from mpistream.epoch import Share, prove_epoch
from mpistream.errors import AlignmentError, TilingError
from mpistream.layout import decompose
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
    share = epoch.share(1)
    assert (share.writer, share.region) == (1, RIGHT)
    assert share.boxes["temperature"] == (((0, 8), (3, 6)),)
    assert share.boxes["rows"] == ()
    assert (share.n_cells("temperature"), share.n_cells("rows")) == (24, 0)
    assert epoch.share(0).n_cells("rows") == 8
    assert Share.from_json(json.loads(json.dumps(share.to_json()))) == share


@pytest.mark.parametrize(
    ("regions", "error", "message"),
    [
        ([LEFT], TilingError, r"none of the 1 ranks owns y\[0:8\] x\[3:6\]"),
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
    epoch = prove_epoch(SCHEMA, decompose(SCHEMA, n_writers))
    shares = [epoch.share(w) for w in range(n_writers)]
    for name in epoch.boxes:
        array = SCHEMA.arrays[name]
        count = painted(array.shape, [box for share in shares for box in share.boxes[name]])
        assert (count == 1).all()
        assert tuple(share.n_cells(name) for share in shares) == epoch.n_cells[name]
        assert sum(epoch.n_cells[name]) == count.size

"""`Region`: the mapping, what callers may give, projections and JSON."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mpistream.errors import SchemaError
from mpistream.region import Region
from tests.support.boxes import is_plain

SIZES = {"y": 8, "x": 6}


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
    with pytest.raises(KeyError, match="this region is over y, x; a staggered dim has the start"):
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
    assert region.boxes == (((4, 6),), ((0, 2),))
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
    same = Region(["y", "x"], [((int64(0), 4), (3, 6)), ((4, 4), (0, 6))])
    assert region == same
    assert hash(region) == hash(same)
    # The order of the boxes is that of the blocks; the cells are the same. A box given twice is an overlap to be named.
    boxes = [((0, 1), (0, 6)), ((4, 5), (0, 6))]
    assert Region(("y", "x"), boxes) == Region(("y", "x"), boxes[::-1])
    assert hash(Region(("y", "x"), boxes)) == hash(Region(("y", "x"), boxes[::-1]))
    assert Region(("y", "x"), [boxes[0], *boxes]) != Region(("y", "x"), boxes)
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


def test_from_boxes_keeps_the_order_of_the_boxes() -> None:
    """A dim left out is whole, in each box for itself; no box is the empty region."""
    region = Region.from_boxes([{"y": (4, 5)}, {"y": slice(None, 1), "x": (2, 3)}], SIZES)
    assert region.boxes == (((4, 5), (0, 6)), ((0, 1), (2, 3)))
    assert is_plain(region.boxes)
    assert Region.from_boxes([], SIZES) == Region.from_boxes([{"y": (3, 3)}], SIZES) == Region.empty(("y", "x"))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([{"y": (0, 1)}, {"z": (0, 1)}], "'z' is no partitioned dim; name only y, x"),
        ([{"y": (0, 1)}, {"y": (0, 9)}], r"'y' of length 8: \[0:9\]"),
        ([{"y": (0, 1)}, {"y": (2, 2)}], "box 1 of 2 is empty; leave it out"),
    ],
)
def test_from_boxes_refuses_what_is_no_box(boxes, message) -> None:
    """Also an empty box among others: its block would shift those behind it."""
    with pytest.raises(SchemaError, match=message) as caught:
        Region.from_boxes(boxes, SIZES)
    assert caught.value.kind == "region"


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

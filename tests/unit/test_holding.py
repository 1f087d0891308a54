"""What ranks say that they hold: its form on the way, and what rank 0 makes of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.errors import SchemaError
from mpistream.grid import ShardGrid
from mpistream.holding import checked_holdings, given_indices, plain_region
from mpistream.indices import axes_of
from mpistream.region import Region, RegionByVariable, region_from_json, regions_of

SCHEMA = ms.StreamSchema(
    dims={"time": None, "y": 8, "x": 6, "cell": 10, "x_u": ms.Staggered("x"), "level": 3},
    time=ms.AppendTime(units="s"),
    variables={
        "t": ms.Variable(("time", "y", "x"), "f4"),
        "u": ms.Variable(("time", "y", "x_u"), "f4"),
        "runoff": ms.Variable(("time", "cell"), "f4"),
        "energy": ms.Variable(("time",), "f8"),
    },
    statics={"y": ms.Variable(("y",), "f4"), "depths": ms.Variable(("level",), "f4")},
)
CELLS = ms.Indices({"cell": [3, 1]})
BOX = {"y": (0, 4)}


def by_variable(**changes: Any) -> dict[str, Any]:
    return {"t": BOX, "u": BOX, "runoff": CELLS, "y": BOX, **changes}


def held(*given: Any) -> Any:
    """What rank 0 makes of what it got, over the wire."""
    return checked_holdings([json.loads(json.dumps(plain_region(g))) for g in given], SCHEMA)


def test_a_region_of_its_own_is_over_the_dims_of_the_variable() -> None:
    """So its tiling is proven; only what a rank names beside them makes many ranks hold the same cells."""
    found = held(by_variable(), by_variable(t={"y": (4, 8)}, y={"y": (4, 8), "x": (0, 3)}))
    assert [r.of("t") for r in found.regions] == [
        Region(("y", "x"), [((0, 4), (0, 6))]),
        Region(("y", "x"), [((4, 8), (0, 6))]),
    ]
    assert [r.of("y").dims for r in found.regions] == [("y", "x")] * 2
    assert found.indexed_dims == {"runoff": ("cell",)}
    assert found.regions[0].of("depths") == Region((), [()])
    alike = held(by_variable())
    assert alike.regions[0].of("t") is alike.regions[0].of("u")


def test_indices_that_are_shared_are_one_group() -> None:
    """Where some rank has others for two variables, those are two."""
    other = ms.Indices({"y": [1]})
    one = held(by_variable(t=other, u=other), by_variable(t=other, u=other))
    assert one.groups["t"] == one.groups["u"] != one.groups["runoff"]
    two = held(by_variable(t=other, u=other), by_variable(t=other, u=ms.Indices({"y": [1]})))
    assert len(set(two.groups.values())) == 3


def test_one_region_for_all_is_one() -> None:
    """Boxes over all partitioned dims, or indices of every array that is written in shards, or nothing."""
    assert held(None, None).regions is None
    boxes = [Region(("y", "x", "cell"), [((0, 4), (0, 6), (0, 10))])]
    assert list(held(BOX).regions) == list(held([BOX]).regions) == list(held(boxes[0]).regions) == boxes
    assert held({"y": slice(None, 4)}).regions == held(BOX).regions
    assert held({}).regions[0].n_cells == 8 * 6 * 10
    assert held([]).regions[0].is_empty
    found = held(CELLS)
    assert found.indexed_dims == dict.fromkeys(("t", "u", "runoff", "y", "depths"), ("cell",))
    assert found.regions[0].is_empty


def test_what_only_the_rank_itself_knows() -> None:
    """Its index lists, for all variables or by variable."""
    assert given_indices(CELLS) is CELLS
    assert given_indices(by_variable()) == {"runoff": CELLS}
    assert given_indices(BOX) is given_indices([BOX]) is given_indices(None) is None


@pytest.mark.parametrize(
    ("region", "words"),
    [
        ({"y": (0, 4), "t": BOX}, "'y' has bounds, as a dim has, and 't' a region, as a variable has"),
        (by_variable(t=[[0, 4]]), "'t' has bounds"),
        (by_variable(t={"y": 4}), "region of variable 't' .*bounds 4 of dim 'y'"),
        (by_variable(t={"y": slice(0, 4, 2)}), "region of variable 't' .*give .start, stop."),
        ([BOX, 3], "region 3: give a mapping"),
        ("y", "region 'y': give a mapping"),
        ({"y": (True, 4)}, "bounds .* of dim 'y'"),
    ],
)
def test_what_is_no_region_is_refused_before_it_is_sent(region: Any, words: str) -> None:
    """Dims have bounds and variables have regions; a mapping of both is neither."""
    with pytest.raises(SchemaError, match=words) as caught:
        plain_region(region)
    assert caught.value.kind == "region"


@pytest.mark.parametrize(
    ("given", "words", "rank"),
    [
        ([BOX, None], "rank 1 gave no region, other ranks a region", 1),
        ([None, by_variable()], "rank 0 gave no region", 0),
        ([BOX, by_variable()], "rank 0 gave one region for all variables, other ranks one for each", 0),
        ([CELLS, BOX], "rank 1 gave no Indices, other ranks Indices", 1),
        ([by_variable(), by_variable(runoff={})], "variable 'runoff': rank 1 gave no Indices", 1),
        ([by_variable(), {"t": BOX}], "rank 1: region: 'u', 'runoff', 'y' missing", 1),
        ([by_variable(x=[])], "rank 0: region: 'x' is a dim, give it .start, stop.", 0),
        ([by_variable(salt=BOX)], "rank 0: region: 'salt' is no variable", 0),
        ([by_variable(), by_variable(t={"z": (0, 1)})], "variable 't': rank 1: region: 'z' is no partitioned dim", 1),
        ([by_variable(), by_variable(t={"y": (0, 9)})], r"variable 't': rank 1: .*\[0:9\]", 1),
        ([by_variable(t=CELLS)], "variable 't': its indices are of dims cell, .* name one of y, x", None),
        ([by_variable(runoff=ms.Indices({"cell": [10]}))], "variable 'runoff': rank 0: .* contain 10, .* is 10", 0),
        ([CELLS, ms.Indices({"y": [1]})], "rank 1: indices of dim 'y'; every rank gives indices of the same", 1),
        ([ms.Indices({"level": [1]})], "rank 0: indices of dim 'level'", 0),
        ([BOX, {"x_u": (0, 3)}], "rank 1: region: 'x_u' is staggered over 'x'; name that dim", 1),
        ([ms.Indices({"x": [1], "x_u": [1]})], "rank 0: region: 'x_u' is staggered over 'x'", 0),
        ([by_variable(u={"x_u": (0, 3)})], "variable 'u': rank 0: region: 'x_u' is staggered over 'x'", 0),
        ([{"t": (0, 4)}], "rank 0: region: 't' is no partitioned dim", 0),
    ],
)
def test_what_does_not_fit_names_rank_and_variable(given: list[Any], words: str, rank: int | None) -> None:
    """And every rank gives the same kind of it."""
    with pytest.raises(SchemaError, match=words) as caught:
        held(*given)
    assert (caught.value.kind, caught.value.rank) == ("region", rank)


def test_a_part_is_named_by_its_number() -> None:
    """It knows no other part's region."""
    with pytest.raises(SchemaError, match="rank 7: region: 'z'"):
        checked_holdings([plain_region({"z": (0, 1)})], SCHEMA, [7])


def test_regions_by_variable_survive_json_with_the_order_of_their_boxes() -> None:
    """Blocks are passed in that order, so regions of the same cells in another one are not shared."""
    first, second = ((0, 4),), ((4, 8),)
    region = RegionByVariable({"b": Region(("y",), [first, second]), "a": Region(("y",), [second, first])})
    found = region_from_json(json.loads(json.dumps(region.to_json())))
    assert found == region
    assert hash(found) == hash(region)
    assert (found.of("a").boxes, found.of("b").boxes) == ((second, first), (first, second))
    assert found != RegionByVariable({"a": region.of("a")})
    assert found != Region.empty(("y",))
    assert repr(found) == "RegionByVariable(a: Region(y[4:8] + y[0:4]), b: Region(y[0:4] + y[4:8]))"
    assert not found.is_empty
    assert RegionByVariable({"a": Region.empty(("y",))}).is_empty
    plain = Region(("y",), [first])
    assert region_from_json(plain.to_json()) == plain


def test_regions_of_a_file_are_over_the_same_dims() -> None:
    """Otherwise they are of different schemas."""
    with pytest.raises(SchemaError, match=r"array 'a': rank 1 has a region over \('x',\), rank 0 over \('y',\)"):
        regions_of("a", [Region.empty(("y",)), Region.empty(("x",))])


def test_indices_over_staggered_dims_have_the_extra_points_last() -> None:
    """The rank of the last cell has the last face."""
    grid = ShardGrid(name="u", dims=("x_u",), shape=(8,), shard_shape=(8,), bases=("x",), n_extra=(2,))
    for given, expected in (([5, 0], [5, 0, 6, 7]), ([0, 4], [0, 4])):
        (axis,) = axes_of(grid, ms.Indices({"x": given}))
        np.testing.assert_array_equal(np.asarray(axis), expected)
    assert axes_of(grid, ms.Indices({"y": [5]})) == [(0, 8)]

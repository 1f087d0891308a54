"""Regions of arrays by the names of their dims, by their axes, and what a stream's nodes are."""

from __future__ import annotations

from typing import Any

import pytest

import mpistream as ms
from mpistream.errors import SchemaError
from mpistream.manifest import Manifest
from mpistream.node import Node, box_of_region, is_node_name, stream_nodes


def array(dims: tuple[str | None, ...] | None, shape: tuple[int, ...] = (7, 12)) -> Node:
    return Node(path="v", kind="array", attrs={}, shape=shape, dtype="float32", dims=dims)


@pytest.mark.parametrize(
    ("dims", "region", "box"),
    [
        (("y", "x"), None, ((0, 7), (0, 12))),
        (("y", "x"), {"x": (3, 5)}, ((0, 7), (3, 5))),
        (("y", "x"), {"x": slice(3, None), "y": (2, 2)}, ((2, 2), (3, 12))),
        (("y", "x"), [(1, 2), (3, 5)], ((1, 2), (3, 5))),
        (("y", "x"), ((1, 2), slice(None)), ((1, 2), (0, 12))),
        (None, [(1, 2), (3, 5)], ((1, 2), (3, 5))),
        (None, {}, ((0, 7), (0, 12))),
        ((None, "x"), {"x": (3, 5)}, ((0, 7), (3, 5))),
        (("x", "x"), [(1, 2), (3, 5)], ((1, 2), (3, 5))),
        (("y", "x"), ms.Region(("z", "x"), [((0, 4), (6, 12))]), ((0, 7), (6, 12))),
        (("y", "x"), ms.Region(("y", "x")), ((0, 0), (0, 0))),
    ],
)
def test_a_region_is_a_box(dims: Any, region: Any, box: Any) -> None:
    """By name, by axis, all of it, or as a writer owns it, which may name dims that the array lacks."""
    assert box_of_region(array(dims), region) == box


def test_an_array_without_dims_has_one_cell() -> None:
    assert box_of_region(array((), ()), None) == box_of_region(array(None, ()), []) == ()


@pytest.mark.parametrize(
    ("dims", "region", "text"),
    [
        (("y", "x"), {"z": (0, 1)}, r"'z' is no dim of array 'v'.*name only \['y', 'x'\]"),
        ((None, "x"), {"axis 0": (0, 1)}, "'axis 0' is no dim"),
        (("x", "x"), {"x": (0, 1)}, r"'x' is no dim .*name only \[\]"),
        (("y", "x"), [(0, 1)], "a sequence of 2 such pairs"),
        (("y", "x"), "yx", "a sequence of 2 such pairs"),
        (("y", "x"), 3, "a sequence of 2 such pairs"),
        (("y", "x"), {"x": (0, 13)}, "'x' of length 12"),
        (None, [(0, 8), (0, 1)], "'axis 0' of length 7"),
        (("y", "x"), {"x": (0, 1, 2)}, "two integers"),
        (("y", "x"), ms.Region(("y",), [((0, 1),), ((3, 4),)]), "2 boxes"),
    ],
)
def test_what_is_no_region_of_an_array_is_refused_with_its_dims(dims: Any, region: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text) as caught:
        box_of_region(array(dims), region)
    assert caught.value.kind == "region"


@pytest.mark.parametrize(
    ("name", "may"),
    [
        *[(n, True) for n in ("a", "a.b", ".a", "_a", "é", "a b", "c")],
        *[(n, False) for n in ("", ".", "..", "...", "__a", "__", "a/b", "a\0", "/")],
    ],
)
def test_names_of_nodes_are_those_of_the_specification(name: str, may: bool) -> None:
    assert is_node_name(name) is may


@pytest.mark.parametrize("path", ["", "ocean"])
def test_nodes_of_a_stream_are_as_its_manifest_has_them(path: str) -> None:
    """Group and arrays, time first among the dims, with as many records as are committed, shards and inner chunks."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 6},
        time=ms.AppendTime(units="s"),
        variables={
            "u": ms.Variable(("time", "y"), "float32", attrs={"units": "m"}),
            "n": ms.Variable(("time",), "int8"),
            "since": ms.Variable(("time",), "timedelta64[h]"),
        },
        statics={"s": ms.Variable((), "bool"), "text": ms.Variable((), str)},
        coords={"y": ms.Coordinate(("y",), ["six", "to", "ten"] * 2)},
        shard_shape={"time": 2, "y": 4},
        chunk_shape={"time": 1, "y": 2},
        attrs={"title": "t"},
    )
    first = Manifest.first(store_id="0", run_id="0", epoch=1, schema=schema, layout_digest="")
    lead = f"{path}/" if path else ""
    nodes = stream_nodes(path, first)
    assert list(nodes) == [path, *(lead + n for n in ("n", "s", "since", "text", "time", "u", "y"))]
    assert [n.path for n in nodes.values()] == list(nodes)
    assert (nodes[path].kind, nodes[path].is_stream, nodes[path].attrs) == ("group", True, {"title": "t"})
    found = {n: (v.shape, v.dims, v.dtype, v.chunk_shape, v.shard_shape) for n, v in nodes.items() if n != path}
    assert found == {
        lead + "n": ((0,), ("time",), "int8", (1024,), None),
        lead + "s": ((), (), "bool", (), None),
        lead + "since": ((0,), ("time",), "timedelta64[h]", (1024,), None),
        lead + "text": ((), (), "string", (), None),
        lead + "time": ((0,), ("time",), "float64", (1024,), None),
        lead + "u": ((0, 6), ("time", "y"), "float32", (1, 2), (2, 4)),
        lead + "y": ((6,), ("y",), "U3", (6,), None),
    }
    assert nodes[lead + "u"].attrs == {"units": "m"}

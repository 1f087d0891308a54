"""Documents of nodes that others wrote: what is told of them, what is damage, what is left to zarr-python."""

from __future__ import annotations

import json
import math
import re
import reprlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistream.errors import FormatError
from mpistream.node import Node
from mpistream.zarr3.document import ArrayNode, parse_v2, parse_v3
from tests.support.json_damage import paths, replaced, values

KEY = "a/zarr.json"
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
ARRAY: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [7, 12],
    "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "fill_value": "NaN",
    "codecs": [BYTES, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}],
    "attributes": {"units": "K"},
    "dimension_names": ["y", None],
    "storage_transformers": [],
}
SHARDING = {"chunk_shape": [2, 3], "codecs": [BYTES], "index_codecs": [BYTES, CRC], "index_location": "start"}


def parse(document: Any) -> Node:
    return parse_v3("a", KEY, json.dumps(document).encode())


def parse_array(**changes: Any) -> ArrayNode:
    node = parse({**ARRAY, **changes})
    assert isinstance(node, ArrayNode)
    return node


def sharded(outer: Any = (), **changes: Any) -> dict[str, Any]:
    return {"codecs": [{"name": "sharding_indexed", "configuration": {**SHARDING, **changes}}, *outer]}


def without(*names: str) -> dict[str, Any]:
    return {k: v for k, v in ARRAY.items() if k not in names}


def test_an_array_is_told_by_its_document() -> None:
    node = parse_array()
    assert (node.path, node.kind, node.is_stream, node.attrs) == ("a", "array", False, {"units": "K"})
    assert (node.shape, node.chunk_shape, node.shard_shape) == ((7, 12), (4, 6), None)
    assert (node.dtype, node.dims, node.foreign) == ("float32", ("y", None), "")
    assert node.layout is not None
    assert (node.layout.dtype, node.layout.chunk_shape, node.layout.shards) == (np.dtype("f4"), (4, 6), None)


def test_a_sharded_array_is_told_by_its_document() -> None:
    node = parse_array(**sharded())
    assert (node.shape, node.chunk_shape, node.shard_shape) == ((7, 12), (2, 3), (4, 6))
    assert node.layout is not None
    assert node.layout.shards is not None
    assert node.layout.shards.is_index_first
    without_location = {k: v for k, v in SHARDING.items() if k != "index_location"}
    node = parse_array(codecs=[{"name": "sharding_indexed", "configuration": without_location}])
    assert node.layout is not None
    assert node.layout.shards is not None
    assert not node.layout.shards.is_index_first


def test_a_group_is_told_by_its_document() -> None:
    consolidated = {"consolidated_metadata": {"must_understand": False}}
    node = parse({"zarr_format": 3, "node_type": "group", "attributes": {"a": 1}, **consolidated})
    assert (node.kind, node.attrs, node.shape, node.dtype) == ("group", {"a": 1}, None, None)
    assert parse({"zarr_format": 3, "node_type": "group"}).attrs == {}


def test_optional_fields_may_be_left_out() -> None:
    node = parse(without("attributes", "dimension_names", "storage_transformers"))
    assert isinstance(node, ArrayNode)
    assert (node.attrs, node.dims, node.foreign) == ({}, None, "")
    assert parse_array(dimension_names=None).dims is None


@pytest.mark.parametrize(
    ("encoding", "index", "key"),
    [
        ({"name": "default", "configuration": {"separator": "/"}}, (1, 0), "c/1/0"),
        ({"name": "default", "configuration": {"separator": "."}}, (1, 10), "c.1.10"),
        ({"name": "default"}, (1, 0), "c/1/0"),
        ("default", (3,), "c/3"),
        ({"name": "default"}, (), "c"),
        ({"name": "v2", "configuration": {"separator": "/"}}, (1, 0), "1/0"),
        ({"name": "v2"}, (1, 0), "1.0"),
        ("v2", (), "0"),
    ],
)
def test_chunk_keys_are_those_of_the_specification(encoding: Any, index: tuple[int, ...], key: str) -> None:
    layout = parse_array(chunk_key_encoding=encoding).layout
    assert layout is not None
    assert layout.chunk_key(index) == key


NAN = np.uint32(0x7FC00001).tobytes()


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("bool", True, b"\x01"),
        ("int8", -128, b"\x80"),
        ("uint64", 2**64 - 1, b"\xff" * 8),
        ("float32", 1, np.float32(1).tobytes()),
        ("float32", 0.1, np.float32(0.1).tobytes()),
        ("float32", -0.0, b"\0\0\0\x80"),
        ("float64", "-Infinity", np.float64(-math.inf).tobytes()),
        ("float16", "Infinity", np.float16(math.inf).tobytes()),
        ("float32", "0x7fc00001", NAN),
        ("float64", "0x3ff0000000000000", np.float64(1).tobytes()),
        ("complex64", [1.5, "0x7fc00001"], np.float32(1.5).tobytes() + NAN),
        ("complex128", ["-Infinity", -0.0], np.array([-math.inf, -0.0]).tobytes()),
    ],
)
def test_fill_values_are_read_bitwise(dtype: str, value: Any, expected: bytes) -> None:
    """Numbers, the words for what JSON lacks, and bits in hexadecimal."""
    layout = parse_array(data_type=dtype, fill_value=value).layout
    assert layout is not None
    assert (layout.fill.dtype, layout.fill.shape, layout.fill.tobytes()) == (np.dtype(dtype), (), expected)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *[("bool", v) for v in (1, "true", None)],
        *[("int8", v) for v in (128, 1.0, True, "1", "0x01", None, [1])],
        *[("float32", v) for v in (True, "nan", "0x7fc0", "7fc00001", "0xzzzzzzzz", 1e39, 10**400, None, [1.0])],
        *[("complex64", v) for v in (1.0, [1.0], [1.0, 2.0, 3.0], "NaN", None, [1.0, "x"])],
    ],
)
def test_a_fill_value_that_does_not_fit_is_left_to_zarr_python(dtype: str, value: Any) -> None:
    node = parse_array(data_type=dtype, fill_value=value)
    assert node.layout is None
    assert node.foreign == f"fill value {reprlib.repr(value)} of {dtype}"


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_lacks_are_no_fill_value(word: str) -> None:
    """They are read where Python's json writes them, in attributes; a fill value has its own words for them."""
    text = json.dumps({**ARRAY, "fill_value": "@", "attributes": {"x": "@"}}).replace('"@"', word)
    node = parse_v3("a", KEY, text.encode())
    assert isinstance(node, ArrayNode)
    assert not math.isfinite(node.attrs["x"])
    assert node.layout is None


@pytest.mark.parametrize(
    ("changes", "foreign"),
    [
        ({"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "s"}}}, "data type 'numpy.datetime64'"),
        ({"data_type": "string"}, "data type 'string'"),
        ({"codecs": [{"name": "transpose", "configuration": {"order": [1, 0]}}, BYTES]}, "transpose"),
        ({"codecs": [BYTES, CRC, CRC]}, "crc32c -> crc32c"),
        ({"codecs": [BYTES, {"name": "blosc", "configuration": {"cname": "snappy"}}]}, "snappy"),
        (sharded([CRC]), "codecs over shards"),
        (sharded(codecs=[{"name": "sharding_indexed", "configuration": SHARDING}]), "sharding_indexed"),
        (sharded(index_codecs=[BYTES]), "index codecs"),
        (sharded(index_codecs=[{"name": "bytes", "configuration": {"endian": "big"}}, CRC]), "index codecs"),
        (sharded(chunk_shape=[2, 4]), r"inner chunks \(2, 4\)"),
        (sharded(chunk_shape=[2, 0]), r"inner chunks \(2, 0\)"),
        (
            {
                "shape": [],
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": []}},
                "dimension_names": [],
            }
            | sharded(chunk_shape=[]),
            r"inner chunks \(\)",
        ),
        ({"chunk_grid": {"name": "rectilinear"}}, "chunk grid"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 0]}}}, "chunk grid"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**15, 2**16]}}}, "more than 2 GiB"),
        ({"chunk_key_encoding": {"name": "suffix"}}, "chunk key encoding 'suffix'"),
        ({"storage_transformers": [{"name": "x"}]}, "storage transformers"),
        ({"hologram": True}, "field 'hologram'"),
        ({"hologram": {"must_understand": True}}, "field 'hologram'"),
    ],
)
def test_what_our_own_chain_does_not_speak_is_named(changes: dict[str, Any], foreign: str) -> None:
    """Such an array is listed as any other, with why zarr-python has to read it."""
    node = parse_array(**changes)
    assert node.layout is None
    assert re.search(foreign, node.foreign)


def test_a_grid_that_is_not_regular_has_no_chunk_shape() -> None:
    assert parse_array(chunk_grid="rectilinear").chunk_shape is None


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([1], "not a JSON object"),
        ({}, "zarr_format is None, expected 3"),
        ({**ARRAY, "zarr_format": 2}, "zarr_format is 2, expected 3"),
        ({"zarr_format": 3, "node_type": "leaf"}, "node_type is 'leaf', neither group nor array"),
        ({"zarr_format": 3, "node_type": "group", "attributes": [1]}, "attributes are not an object"),
        (without("shape", "codecs"), "lacks codecs, shape"),
        *[({**ARRAY, "shape": v}, "shape .* is not a list of lengths") for v in (7, [7, -1], [7.0], [True], [2**63])],
        *[
            ({**ARRAY, "data_type": v}, "data_type .* is not an object with a name")
            for v in (None, dict[str, Any](), {"name": 1})
        ],
        ({**ARRAY, "chunk_grid": {"name": "regular"}}, "chunk_shape None is not a list of 2 lengths"),
        (
            {**ARRAY, "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}}},
            r"chunk_shape \[4\] is not a list of 2 lengths",
        ),
        ({**ARRAY, "chunk_grid": {"name": "regular", "configuration": 1}}, "chunk_grid .* is not an object"),
        *[({**ARRAY, "codecs": v}, "codecs are not a list") for v in (None, dict[str, Any](), "bytes")],
        ({**ARRAY, "codecs": []}, "codecs are not a list"),
        ({**ARRAY, "codecs": [BYTES, 3]}, "codec 3 is not an object"),
        *[
            ({**ARRAY, "dimension_names": v}, "dimension_names .* are not 2 names")
            for v in ("yx", ["y"], ["y", 1], {"y": 1, "x": 2})
        ],
        ({**ARRAY, "chunk_key_encoding": {"name": "v2", "configuration": {"separator": ":"}}}, "separator ':' is"),
        ({**ARRAY, **sharded(chunk_shape=None)}, "chunk_shape of sharding_indexed None is not a list of 2 lengths"),
        ({**ARRAY, **sharded(codecs=None)}, "sharding_indexed lacks codecs or index_codecs"),
        ({**ARRAY, **sharded(index_codecs="x")}, "sharding_indexed lacks codecs or index_codecs"),
        ({**ARRAY, **sharded(codecs=[7])}, "codec of sharding_indexed 7 is not an object"),
        ({**ARRAY, **sharded(index_location="middle")}, "index_location 'middle' is neither start nor end"),
    ],
)
def test_a_damaged_document_is_a_format_error_with_its_key(document: Any, text: str) -> None:
    with pytest.raises(FormatError, match=f"^{KEY}: {text}"):
        parse(document)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b'{"zarr_format": 3, "zarr_format": 3}', b"[" * 5000])
def test_what_is_no_json_is_a_format_error_with_its_key(data: bytes) -> None:
    with pytest.raises(FormatError, match=f"^{KEY}: not "):
        parse_v3("a", KEY, data)


@pytest.mark.parametrize("name", ["shape", "fill_value", "dimension_names", "codecs", "zarr_format"])
def test_no_depth_ends_in_another_error(name: str) -> None:
    """Also where Python's parser can still follow and its writer can't."""
    for depth in range(700, 1100, 3):
        text = json.dumps({**ARRAY, name: "@"}).replace('"@"', "[" * depth + "]" * depth)
        try:
            parse_v3("a", KEY, text.encode())
        except FormatError as error:
            assert str(error).startswith(KEY)


V2: dict[str, Any] = {"zarr_format": 2, "shape": [7, 12], "chunks": [4, 6], "dtype": ">f4", "order": "F"}
V2_KEYS = ("a/.zarray", "a/.zattrs")


def test_an_array_of_zarr_v2_is_told_by_its_documents() -> None:
    """Dims are in an attribute there; what numpy has no name for keeps its own."""
    node = parse_v2("a", V2_KEYS, json.dumps(V2).encode(), b'{"_ARRAY_DIMENSIONS": ["y", "x"], "f": NaN}')
    assert isinstance(node, ArrayNode)
    assert (node.shape, node.chunk_shape, node.dims, node.dtype) == ((7, 12), (4, 6), ("y", "x"), "float32")
    assert (node.layout, node.foreign, node.zarr_format) == (None, "Zarr v2", 2)
    node = parse_v2("a", V2_KEYS, json.dumps({**V2, "dtype": [["x", "<f4"]]}).encode(), None)
    assert (node.dtype, node.dims, node.attrs) == ("[['x', '<f4']]", None, {})
    node = parse_v2("a", ("a/.zgroup", "a/.zattrs"), b'{"zarr_format": 2}', b'{"a": 1}')
    assert (node.kind, node.attrs) == ("group", {"a": 1})


@pytest.mark.parametrize(
    ("document", "attributes", "text"),
    [
        ({**V2, "zarr_format": 3}, None, "a/.zarray: zarr_format is 3, expected 2"),
        ({**V2, "shape": None}, None, "a/.zarray: shape None"),
        ({**V2, "dtype": "<q9"}, None, "a/.zarray: bad dtype"),
        ({k: v for k, v in V2.items() if k != "dtype"}, None, "a/.zarray: bad dtype"),
        ({**V2, "chunks": [4]}, None, r"a/.zarray: chunks \[4\] is not a list of 2 lengths"),
        (V2, b"[]", "a/.zattrs: not a JSON object"),
        (V2, b'{"_ARRAY_DIMENSIONS": ["y"]}', "a/.zattrs: dimension_names"),
    ],
)
def test_damaged_documents_of_zarr_v2_are_format_errors(document: Any, attributes: bytes | None, text: str) -> None:
    with pytest.raises(FormatError, match=f"^{text}"):
        parse_v2("a", V2_KEYS, json.dumps(document).encode(), attributes)


BASES = [ARRAY, {**ARRAY, **sharded()}, {"zarr_format": 3, "node_type": "group", "attributes": {"a": [1]}}]


@given(st.data())
def test_a_document_with_any_value_at_any_place_is_a_node_or_a_format_error(data: st.DataObject) -> None:
    """Whatever stands in a document, it is told, or refused with its key; nothing else is raised."""
    base = data.draw(st.sampled_from(BASES))
    document = replaced(base, data.draw(st.sampled_from(paths(base))), data.draw(st.just(...) | values))
    try:
        node = parse(document)
    except FormatError as error:
        assert str(error).startswith(KEY)
    else:
        assert node.path == "a"


@given(st.data())
def test_a_document_of_zarr_v2_with_any_value_at_any_place_is_a_node_or_a_format_error(data: st.DataObject) -> None:
    document = replaced(V2, data.draw(st.sampled_from(paths(V2))), data.draw(st.just(...) | values))
    try:
        parse_v2("a", V2_KEYS, json.dumps(document).encode(), None)
    except FormatError as error:
        assert str(error).startswith(V2_KEYS[0])

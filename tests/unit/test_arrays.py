"""`ArraySpec`, the values of coordinates and the codec chains that go into it."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from mpistream.arrays import (
    SERIES_CHUNK,
    ArraySpec,
    Role,
    codec_chain,
    coordinate_values,
)
from mpistream.description import Coordinate
from mpistream.errors import SchemaError
from mpistream.grid import ShardGrid

CHAIN = ({"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"})


def spec(**changes: Any) -> ArraySpec:
    given_: dict[str, Any] = {
        "name": "t",
        "role": Role.VARIABLE,
        "dims": ("time", "y", "x"),
        "shape": (10, 6),
        "dtype": np.dtype("float32"),
        "fill": np.array(np.nan, "float32"),
        "attrs": {"units": "K"},
        "chain": CHAIN,
        "shard_shape": (4, 4, 6),
        "chunk_shape": (2, 2, 3),
    }
    return ArraySpec(**{**given_, **changes})


STATIC = spec(role=Role.STATIC, dims=("y", "x"), shard_shape=(4, 6), chunk_shape=(2, 3))
SERIES = spec(role=Role.SERIES, dims=("time",), shape=(), shard_shape=(SERIES_CHUNK,), chunk_shape=(SERIES_CHUNK,))
COORDINATE = spec(role=Role.COORDINATE, dims=("y",), shape=(10,), shard_shape=(10,), chunk_shape=(10,))


# ---- ArraySpec ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "has_time", "space_dims", "is_sharded", "row_length"),
    [
        (spec(), True, ("y", "x"), True, 4),
        (SERIES, True, (), False, SERIES_CHUNK),
        (STATIC, False, ("y", "x"), True, 1),
        (COORDINATE, False, ("y",), False, 1),
    ],
    ids=["variable", "series", "static", "coordinate"],
)
def test_the_role_says_what_is_written_how(array, has_time, space_dims, is_sharded, row_length) -> None:
    """Time comes first or not at all; only variables over space and statics are sharded."""
    assert array.has_time is has_time
    assert array.space_dims == space_dims
    assert array.is_sharded is is_sharded
    assert array.row_length == row_length


def test_the_grid_is_over_the_dims_without_time() -> None:
    """The time extent of a shard is the row's, not the grid's."""
    expected = ShardGrid(name="t", dims=("y", "x"), shape=(10, 6), shard_shape=(4, 6))
    assert spec().grid == expected
    assert STATIC.grid == expected


def test_a_static_is_a_shard_with_one_record() -> None:
    """The shard spec has a time extent in front, 1 for an array without time."""
    found = spec().shard_spec()
    assert (found.shard_shape, found.chunk_shape) == ((4, 4, 6), (2, 2, 3))
    found = STATIC.shard_spec()
    assert (found.shard_shape, found.chunk_shape) == ((1, 4, 6), (1, 2, 3))
    assert found.codec.stored_dtype == np.dtype("<f4")
    assert np.isnan(found.fill)


@pytest.mark.parametrize("name", ["shard_shape", "chunk_shape"])
def test_a_layout_with_a_gap_is_not_resolved(name) -> None:
    """What is open can't be asked for."""
    array = spec(**{name: (4, None, 6)})
    assert not array.is_resolved
    assert spec().is_resolved
    assert spec().resolved_shard_shape == (4, 4, 6)
    assert spec().resolved_chunk_shape == (2, 2, 3)
    with pytest.raises(AssertionError, match="t"):
        getattr(array, f"resolved_{name}")


def test_the_entry_in_the_manifest() -> None:
    """Everything but the values, in JSON types."""
    expected = {
        "name": "t",
        "role": "variable",
        "dims": ["time", "y", "x"],
        "dtype": "float32",
        "fill_value": "NaN",
        "keep_bits": None,
        "attrs": {"units": "K"},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "shard_shape": [4, 4, 6],
        "chunk_shape": [2, 2, 3],
        "digest": None,
    }
    assert spec().to_json() == expected
    assert json.loads(json.dumps(spec().to_json())) == expected
    assert spec(digest="ab").to_json()["digest"] == "ab"
    assert spec(keep_bits=7).to_json()["keep_bits"] == 7


NAT = -9223372036854775808


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("M8[D]", {"units": "days since 1970-01-01", "calendar": "proleptic_gregorian", "_FillValue": NAT}),
        ("M8[ns]", {"units": "nanoseconds since 1970-01-01", "calendar": "proleptic_gregorian", "_FillValue": NAT}),
        ("m8[h]", {"units": "hours", "dtype": "timedelta64[s]", "_FillValue": NAT}),
        ("m8[s]", {"units": "seconds", "dtype": "timedelta64[s]", "_FillValue": NAT}),
        ("m8[us]", {"units": "microseconds", "dtype": "timedelta64[us]", "_FillValue": NAT}),
    ],
)
def test_times_are_integers_with_attributes_in_documents(dtype, expected) -> None:
    """The manifest has the dtype, and not what follows from it."""
    array = spec(dtype=np.dtype(dtype), fill=np.array("NaT", dtype), attrs={"long_name": "t"})
    assert (array.zarr_dtype, array.zarr_attrs) == (np.dtype("int64"), {"long_name": "t", **expected})
    assert (array.to_json()["dtype"], array.to_json()["fill_value"]) == (np.dtype(dtype).name, NAT)
    assert array.to_json()["attrs"] == {"long_name": "t"}
    assert (spec().zarr_dtype, spec().zarr_attrs) == (np.dtype("float32"), {"units": "K"})


def test_rounding_is_named_in_documents() -> None:
    """CF conventions, section 8.4.2."""
    array = spec(keep_bits=7)
    assert array.zarr_attrs == {"units": "K", "quantization": "quantization_info", "quantization_nsb": 7}
    assert array.to_json()["attrs"] == {"units": "K"}
    assert (spec().rounding, spec().shard_spec().rounding) == (None, None)
    assert array.shard_spec().rounding is not None


# ---- values of coordinates ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (np.array([0.5, 1.5, 2.5], ">f8"), None, np.array([0.5, 1.5, 2.5])),
        ([0, 1, 2], "float32", np.array([0, 1, 2], "float32")),
        ([0.1, 1, 2], "float32", np.array([0.1, 1, 2], "float32")),
        ([0.0, 1.0, 2.0], "int8", np.array([0, 1, 2], "int8")),
        ([0.0, np.nan, 2.0], "float32", np.array([0, np.nan, 2], "float32")),
        ([1, 2, 3], "complex64", np.array([1, 2, 3], "complex64")),
        (np.arange(6)[::2], None, np.array([0, 2, 4])),
    ],
)
def test_values_go_into_a_dtype_that_holds_them(values, dtype, expected) -> None:
    """Native byte order, C order, read-only and a copy; floats may be rounded, equal values are equal."""
    found = coordinate_values("y", Coordinate(("y",), values, dtype=dtype), (3,))
    assert found.dtype == expected.dtype
    assert found.dtype.isnative
    assert found.tobytes() == expected.tobytes()
    assert not found.flags.writeable
    assert not np.shares_memory(found, np.asarray(values))


@pytest.mark.parametrize(
    ("values", "dtype", "kind", "message"),
    [
        ([0.5, 1, 2], "int32", "dtype", "float64 into int32 loses values; give another dtype"),
        ([0, 1, 200], "int8", "dtype", "int64 into int8 loses values"),
        ([0, 1, np.nan], "int32", "dtype", "float64 into int32 loses values"),
        ([0, 1, 2j], "float32", "dtype", "complex128 into float32 loses values"),
        ([0, 1, 2**24 + 1], "float32", "dtype", "int64 into float32 loses values"),
        ([0, 1], None, "shape", r"values of shape \(2,\), its dims have \(3,\)"),
        (5.0, None, "shape", r"values of shape \(\), its dims have \(3,\)"),
        ([[0], [1, 2]], None, "shape", "inhomogeneous"),
        (["a", "b", 3], None, "dtype", "3 is a int; give str"),
        (["a", "b"], None, "shape", r"values of shape \(2,\), its dims have \(3,\)"),
        (["1", "2", "3"], "float64", "dtype", "<U1 into float64 loses values"),
        ([1, 2, 3], str, "dtype", "1 is a int; give str"),
        (np.array([b"a", b"b", b"c"]), None, "dtype", r"\|S1 instead of strings; pass np.char.decode"),
        (np.array([1j, {}, ()], object), None, "dtype", "dtype object is not supported"),
    ],
)
def test_values_that_do_not_fit_are_refused(values, dtype, kind, message) -> None:
    """Both dtypes or both shapes are in the message; numpy does not warn."""
    with pytest.raises(SchemaError, match=rf"^coordinate 'y': .*{message}") as caught:
        coordinate_values("y", Coordinate(("y",), values, dtype=dtype), (3,))
    assert caught.value.kind == kind


# ---- codec chains ------------------------------------------------------------------------------------


def test_a_chain_is_a_profile_or_itself() -> None:
    """A given chain does not change with the caller's list, and its numbers become plain ones."""
    dtype = np.dtype("float32")
    assert list(codec_chain("t", "none", dtype)) == list(CHAIN)
    mine = [dict(c) for c in CHAIN]
    found = codec_chain("t", mine, dtype)
    mine[0]["name"] = "other"
    assert [dict(c) for c in found] == list(CHAIN)
    found = codec_chain("t", [CHAIN[0], {"name": "gzip", "configuration": {"level": np.int64(3)}}, CHAIN[1]], dtype)
    assert type(found[1]["configuration"]["level"]) is int


def test_every_chain_ends_with_a_checksum() -> None:
    """What is written can be verified by every reader, whatever the caller gave."""
    dtype = np.dtype("float32")
    gzip = {"name": "gzip", "configuration": {"level": 3}}
    for given_, expected in (([CHAIN[0]], CHAIN), ([CHAIN[0], gzip], (CHAIN[0], gzip, CHAIN[1])), (CHAIN, CHAIN)):
        assert [dict(c) for c in codec_chain("t", given_, dtype)] == list(expected)


def test_a_chain_for_all_arrays_has_the_serializer_of_each() -> None:
    """Codec ``bytes`` 1.0: a byte order is required of several bytes and has no meaning for one; text has its own."""
    crc = {"name": "crc32c"}
    for dtype, serializer in (
        ("float32", CHAIN[0]),
        ("U3", CHAIN[0]),
        ("int8", {"name": "bytes"}),
        (np.dtypes.StringDType(), {"name": "vlen-utf8"}),
    ):
        assert [dict(c) for c in codec_chain("t", [{"name": "bytes"}], np.dtype(dtype))] == [serializer, crc]
    big = {"name": "bytes", "configuration": {"endian": "big"}}
    assert codec_chain("t", [big], np.dtype("float32"))[0] == big


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("best", "codec 'best' is unknown; use one of fast"),
        (5, "variable 't': codec 5: give a profile name or a list of Zarr codecs"),
        (["bytes"], "variable 't': codec ['bytes']: give a profile name or a list of Zarr codecs"),
        ([{"name": "crc32c"}], "variable 't': codec chain crc32c: only bytes, one of blosc, zstd or gzip, and crc32c"),
        ([], "variable 't': codec chain : only bytes"),
    ],
)
def test_a_chain_that_this_library_does_not_speak_is_refused(codec, message) -> None:
    """The variable and what may be given are in the message."""
    with pytest.raises(SchemaError, match=re.escape(message)) as caught:
        codec_chain("t", codec, np.dtype("float32"))
    assert caught.value.kind == "codec"

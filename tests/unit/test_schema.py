"""`StreamSchema`: what it makes of a description, and every way in which a description can be wrong."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest

import mpistream as ms
from mpistream.arrays import SERIES_CHUNK, Role
from mpistream.errors import SchemaError
from mpistream.names import dtype_name
from mpistream.zarr3.codecs import profile_chain
from tests.support.streams import make_schema, resolved

V = ms.Variable
FIXED = ms.IndexedTime([0.0, 1.0], units="s")


def one(*dims, dtype="float32", **more):
    """The variables of a stream that has only ``t``."""
    return {"t": V(dims or ("time", "y", "x"), dtype, **more)}


# ---- what it makes of a description ------------------------------------------------------------------


def test_every_array_has_its_role() -> None:
    """Variables over time alone are series; a coordinate with values is the owner's, another a static."""
    schema = make_schema()
    assert {n: a.role for n, a in schema.arrays.items()} == {
        "temperature": Role.VARIABLE,
        "energy": Role.SERIES,
        "topography": Role.STATIC,
        "y": Role.COORDINATE,
        "lat": Role.STATIC,
    }
    assert schema.arrays["temperature"].dims == ("time", "y", "x")
    assert schema.arrays["temperature"].shape == (8, 6)
    assert schema.arrays["energy"].shape == ()
    assert schema.arrays["topography"].attrs == {"coordinates": "lat"}
    assert schema.arrays["temperature"].attrs == {"units": "K", "coordinates": "lat"}
    assert dict(schema.dims) == {"time": None, "y": 8, "x": 6}
    assert schema.time_dim == "time"
    assert repr(schema) == "StreamSchema(time: None, y: 8, x: 6; temperature, energy)"


def test_the_time_coordinate() -> None:
    """Float64 in chunks of 1,024 records, with CF's attributes; the caller's own win."""
    time = make_schema(
        time=ms.AppendTime(units="days since 1850-01-01", calendar="noleap", attrs={"long_name": "t", "axis": "t"})
    ).time_array
    assert (time.name, time.role, time.dims, time.shape) == ("time", Role.SERIES, ("time",), ())
    assert time.dtype == np.dtype("float64")
    assert (time.resolved_shard_shape, time.resolved_chunk_shape) == ((1024,), (1024,))
    assert time.attrs == {
        "standard_name": "time",
        "axis": "t",
        "units": "days since 1850-01-01",
        "calendar": "noleap",
        "long_name": "t",
    }
    assert SERIES_CHUNK == 1024


def test_time_of_fixed_length() -> None:
    """In indexed mode time is a coordinate with all its values, and another array says what is committed."""
    schema = make_schema(time=ms.IndexedTime([0.5, 1.5, 9.0], units="s", attrs={"long_name": "t"}))
    assert (schema.mode, schema.n_total) == ("indexed", 3)
    time, committed = schema.own_arrays
    assert time.to_json() == schema.time_array.to_json()
    assert (time.name, time.role, time.dims, time.shape) == ("time", Role.COORDINATE, ("time",), (3,))
    assert time.values is not None
    assert time.values.tolist() == [0.5, 1.5, 9.0]
    assert time.digest == hashlib.sha256(struct.pack("<3d", 0.5, 1.5, 9.0)).hexdigest()
    assert time.attrs == {
        "standard_name": "time",
        "axis": "T",
        "units": "s",
        "calendar": "proleptic_gregorian",
        "long_name": "t",
    }
    assert (committed.name, committed.role, committed.dims, committed.shape) == (
        "committed",
        Role.COORDINATE,
        ("time",),
        (3,),
    )
    assert (committed.dtype, committed.fill.tolist(), committed.values) == (np.dtype("bool"), False, None)
    assert "committed" not in schema.arrays
    assert (time.resolved_shard_shape, committed.resolved_shard_shape) == ((3,), (3,))
    many = make_schema(time=ms.IndexedTime(np.arange(100_000.0), units="s"))
    assert many.own_arrays[1].resolved_chunk_shape == (65536,)


def test_in_append_mode_time_is_the_only_array_of_ours() -> None:
    """No length, and nothing beside the records says what is committed."""
    schema = make_schema()
    assert (schema.mode, schema.n_total, schema.committed_array) == ("append", None, None)
    assert [a.name for a in schema.own_arrays] == ["time"]
    assert make_schema(coords={"committed": ms.Coordinate((), 5)}).coords["committed"].values == 5


def test_values_of_a_coordinate_are_copied_and_digested() -> None:
    """The digest is over the little-endian bytes; the caller's array may change afterwards."""
    values = np.array([0.5, 1.5, 2.5, 3.5], ">f4")
    schema = make_schema(
        dims={"time": None, "y": 4}, variables=one("time", "y"), statics={}, coords={"y": ms.Coordinate(("y",), values)}
    )
    values[...] = 99
    y = schema.arrays["y"]
    assert y.dtype == np.dtype("float32")
    assert y.values is not None
    assert y.values.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert not y.values.flags.writeable
    assert y.digest == hashlib.sha256(struct.pack("<4f", 0.5, 1.5, 2.5, 3.5)).hexdigest()
    assert (y.resolved_shard_shape, y.resolved_chunk_shape) == ((4,), (4,))


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([0, 1, 2, 3], "float32", [0.0, 1.0, 2.0, 3.0]),
        ([0, 1, 2, 3], "uint8", [0, 1, 2, 3]),
        ([0.1, 1, 2, 3], "float32", np.array([0.1, 1, 2, 3], "float32").tolist()),
        ([0.0, 1.0, 2.0, 3.0], "int32", [0, 1, 2, 3]),
    ],
)
def test_values_of_a_coordinate_fit_its_dtype(values, dtype, expected) -> None:
    """Values decide, not the dtype that a list of numbers happens to get."""
    coords = {"y": ms.Coordinate(("y",), values, dtype=dtype)}
    y = make_schema(dims={"time": None, "y": 4}, variables=one("time", "y"), statics={}, coords=coords).arrays["y"]
    assert y.values is not None
    assert (y.dtype, y.values.tolist()) == (np.dtype(dtype), expected)


def test_shapes_come_from_the_variable_then_from_the_schema() -> None:
    """A default holds for every array with that dim, time only where there is time; the rest stays open."""
    schema = make_schema(
        shard_shape=(4, 4, 6),
        chunk_shape={"x": 3},
        variables={
            "temperature": V(("time", "y", "x"), "float32"),
            "own": V(("time", "x", "y"), "float32", shard_shape={"time": 2}, chunk_shape=(1, 2, 2)),
        },
    )
    assert schema.arrays["temperature"].shard_shape == (4, 4, 6)
    assert schema.arrays["temperature"].chunk_shape == (None, None, 3)
    assert schema.arrays["own"].shard_shape == (2, 6, 4)
    assert schema.arrays["own"].chunk_shape == (1, 2, 2)
    assert schema.arrays["topography"].shard_shape == (4, 6)
    assert schema.arrays["lat"].chunk_shape == (None, 3)
    assert schema.arrays["y"].shard_shape == (8,)
    assert not schema.is_resolved
    assert resolved().is_resolved


def test_codecs_come_from_the_variable_then_from_the_schema() -> None:
    """A profile name, or a Zarr chain, which gets a checksum."""
    chain = [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "gzip", "configuration": {"level": 1}}]
    schema = make_schema(
        codec="wasm",
        variables={"t": V(("time", "y"), "float32"), "u": V(("time", "y"), "float32", codec="none")},
        statics={"s": V(("y",), "float32", codec=chain)},
    )
    dtype = np.dtype("float32")
    assert list(schema.arrays["t"].chain) == profile_chain("wasm", dtype)
    assert list(schema.arrays["u"].chain) == profile_chain("none", dtype)
    assert list(schema.arrays["s"].chain) == [*chain, {"name": "crc32c"}]


def test_partitioned_dims_are_those_of_the_streaming_variables() -> None:
    """In the schema's order; statics count only where no variable has space; extents go with them."""
    dims = {"time": None, "z": 3, "y": 8, "x": 6}
    schema = make_schema(dims=dims, variables={"t": V(("time", "x", "y"), "f4"), "e": V(("time",), "f4")})
    assert schema.partitioned_dims == ("y", "x")
    assert schema.partitioned_sizes == {"y": 8, "x": 6}
    schema = make_schema(dims=dims, variables={"e": V(("time",), "f4")}, statics={"s": V(("z",), "f4")}, coords={})
    assert schema.partitioned_dims == ("z",)
    schema = make_schema(variables={"e": V(("time",), "f4")}, statics={}, coords={})
    assert (schema.partitioned_dims, schema.partitioned_sizes) == ((), {})


def test_a_layout_is_given_by_a_copy() -> None:
    """The schema stays as it was, and what the new one does not name keeps its layout."""
    schema = make_schema()
    new = schema.with_layout({"temperature": ((2, 4, 6), (1, 4, 3))})
    assert new.arrays["temperature"].resolved_shard_shape == (2, 4, 6)
    assert new.arrays["temperature"].resolved_chunk_shape == (1, 4, 3)
    assert new.arrays["topography"] is schema.arrays["topography"]
    assert not schema.arrays["temperature"].is_resolved


def test_an_open_layout_is_taken_from_a_stored_schema() -> None:
    """Lengths that the new schema gives stand; arrays that the stored one lacks stay open."""
    given = make_schema(
        chunk_shape={"y": 4},
        statics={"topography": V(("y", "x"), "int16"), "new": V(("y",), "int16"), "turned": V(("x", "y"), "int8")},
    )
    stored = make_schema(
        shard_shape={"y": 4, "x": 6, "time": 2},
        chunk_shape={"y": 2, "x": 3, "time": 1},
        statics={"topography": V(("y", "x"), "int16"), "turned": V(("y", "x"), "int8")},
    )
    found = given.with_layout_of(stored)
    assert found.arrays["temperature"].shard_shape == (2, 4, 6)
    assert found.arrays["temperature"].chunk_shape == (1, 4, 3)
    assert found.arrays["topography"].chunk_shape == (4, 3)
    assert found.arrays["new"].shard_shape == (None,)
    assert found.arrays["turned"].shard_shape == (None, None)


# ---- staggered dims ----------------------------------------------------------------------------------


def test_a_staggered_dim_is_split_as_another_one() -> None:
    """It has points of its own, no part in the regions, and the edges of the other dim's shards."""
    schema = make_schema(
        dims={"time": None, "y": 8, "x": 6, "x_face": ms.Staggered("x"), "y_face": ms.Staggered("y", 2)},
        variables={
            "t": V(("time", "y", "x"), "f4"),
            "u": V(("time", "y_face", "x_face"), "f4"),
            "v": V(("time", "x_face"), "f4", shard_shape={"x_face": 2}, chunk_shape={"x_face": 1}),
        },
        shard_shape={"time": 1, "y": 4, "x": 3},
        chunk_shape={"time": 1, "y": 2, "x": 3, "y_face": 4},
    )
    assert dict(schema.dims) == {"time": None, "y": 8, "x": 6, "x_face": 7, "y_face": 10}
    assert schema.partitioned_dims == ("y", "x")
    u = schema.arrays["u"]
    assert (u.shape, u.space_dims, u.base_dims, u.n_extra) == ((10, 7), ("y_face", "x_face"), ("y", "x"), (2, 1))
    assert (u.resolved_shard_shape, u.resolved_chunk_shape) == ((1, 4, 3), (1, 4, 3))
    assert schema.arrays["v"].resolved_shard_shape == (1, 2)
    assert (u.grid.bases, u.grid.n_extra) == (("y", "x"), (2, 1))
    assert schema.arrays["t"].base_dims == ("y", "x")
    assert schema.to_json()["staggered"] == {"x_face": "x", "y_face": "y"}


def test_a_coordinate_may_have_cells_and_faces() -> None:
    """One rank writes it whole, so how it would be split is no question."""
    values = np.zeros((6, 7))
    schema = make_schema(
        dims={"time": None, "y": 8, "x": 6, "x_face": ms.Staggered("x")},
        coords={"weights": ms.Coordinate(("x", "x_face"), values)},
    )
    assert schema.arrays["weights"].shape == (6, 7)


# ---- bad input ---------------------------------------------------------------------------------------


def refused(kind, *parts, **changes):
    return pytest.param(changes, kind, parts, id=parts[0][:50])


def test_the_dims_of_a_schema_make_those_of_another_one() -> None:
    """Staggered dims included, also over another length; they are numbers all the same."""
    dims = {"time": None, "y": 8, "x": 6, "x_face": ms.Staggered("x", 2)}

    def schema_of(dims):
        variables = {"u": ms.Variable(("time", "x_face"), "f4")}
        return ms.StreamSchema(dims=dims, time=ms.AppendTime(units="s since 2000-01-01"), variables=variables)

    first = schema_of(dims)
    assert first.dims == {"time": None, "y": 8, "x": 6, "x_face": 8}
    again = schema_of({**first.dims, "x": 10})
    assert again.staggered == first.staggered == {"x_face": ms.Staggered("x", 2)}
    assert again.dims["x_face"] == 12
    with pytest.raises(SchemaError, match="'z' is staggered over 'x_face', which is no dim with a length"):
        schema_of({**first.dims, "z": ms.Staggered("x_face")})


def staggered(dim, n_extra=1):
    """Dims of which one is staggered, and another one over that."""
    return {"time": None, "y": 8, "x": 6, "x_face": ms.Staggered(dim, n_extra), "x_out": ms.Staggered("y")}


def over(*dims):
    return {"t": V(("time", *dims), "f4")}


BAD = [
    refused("dims", "dims {}", "the time dim first", dims={}),
    refused("dims", "'y' comes first", "must be None, not 8", dims={"y": 8, "x": 6}),
    refused("dims", "'y' has length 0", "integer above 0", dims={"time": None, "y": 0, "x": 6}),
    *[
        refused("dims", f"'x_face' is staggered over {base!r}", "no dim with a length", dims=staggered(base))
        for base in ("z", "time", "x_face", "x_out")
    ],
    *[
        refused("dims", f"'x_face' has {extra!r} extra points", "from 0 on", dims=staggered("x", extra))
        for extra in (-1, 1.0, True)
    ],
    refused("dims", "variable 't': two of its dims", "split alike", dims=staggered("x"), variables=over("x", "x_face")),
    refused("name", "dim '..' begins with a dot", dims={"time": None, "..": 8, "x": 6}),
    refused("time", "time is a str; give AppendTime or IndexedTime", time="seconds since 2000-01-01"),
    refused("layout", "key_separator ':': use '/' or '.'", key_separator=":"),
    refused("schema", "a stream without variables has nothing to stream; give at least one", variables={}),
    refused("attribute", "group attributes['missing'] is nan", "leave it out", attrs={"missing": math.nan}),
    refused("attribute", "group attributes are a list", "mapping", attrs=["title"]),
    refused("attribute", "variable 't', attributes['a'] is a complex", variables=one(attrs={"a": 1j})),
    refused("attribute", "variable 't', attributes are a NoneType", variables=one(attrs=None)),
    # names
    refused("name", "variable '' is empty", variables={"": V(("time",), "f4")}),
    refused("name", "variable '..' begins with a dot", variables={"..": V(("time",), "f4")}),
    refused("name", "variable '.t' begins with a dot", variables={".t": V(("time",), "f4")}),
    refused("name", "variable 'a/b' contains a slash", variables={"a/b": V(("time",), "f4")}),
    refused("name", "variable '\\ud800' is not valid Unicode", variables={"\ud800": V(("time",), "f4")}),
    refused("name", "variable '../s' begins with a dot", statics={"../s": V(("y",), "f4")}),
    refused("name", "variable '/' contains a slash", coords={"/": ms.Coordinate(("y",), dtype="f4")}),
    refused("name", "variable 5 is not a string", variables={5: V(("time",), "f4")}),
    refused("name", "name 'topography' is used twice", variables={"topography": V(("time",), "f4")}),
    refused("name", "name 'lat' is used twice", "unique", statics={"lat": V(("y",), "f4")}),
    refused("name", "name 'time' is used twice", coords={"time": ms.Coordinate((), dtype="f4")}),
    refused("name", "name 'committed' is used twice", time=FIXED, coords={"committed": ms.Coordinate((), 5)}),
    refused("name", "dim 'committed'", time=FIXED, dims={"time": None, "y": 8, "x": 6, "committed": 2}),
    refused("name", "dim 'committed'", time=FIXED, dims={"committed": None, "y": 8, "x": 6}),
    refused("name", "'y' is a dim", "('y',), not ('time',)", variables={"y": V(("time",), "f4")}, coords={}),
    refused("name", "'x' is a dim", "('x',), not ('y',)", coords={"x": ms.Coordinate(("y",), dtype="f4")}),
    # dims of arrays
    refused("dims", "variable 't': dim 'z' is not among ('time', 'y', 'x')", variables=one("time", "z")),
    refused("dims", "variable 't': dims ('y', 'time') must begin with the time dim", variables=one("y", "time")),
    refused("dims", "variable 't': dims ('y', 'x') must", "belongs into statics", variables=one("y", "x")),
    refused("dims", "variable 't': dims ('time', 'y', 'y') name one dim twice", variables=one("time", "y", "y")),
    refused("dims", "variable 't': dims 'time'", "tuple of names", variables={"t": V("time", "f4")}),
    refused("dims", "variable 't': dims None", "tuple of names", variables={"t": V(None, "f4")}),  # type: ignore[arg-type]
    refused("dims", "static 's'", "put it into variables", statics={"s": V(("time", "y"), "f4")}),
    refused("dims", "coordinate 'c'", "put it into", coords={"c": ms.Coordinate(("time",), [1.0])}),
    # dtypes and fill values
    refused("dtype", "variable 't': dtype datetime64[Y] is not supported", variables=one(dtype="M8[Y]")),
    refused("dtype", "variable 't': 'float31' is not a dtype", variables=one(dtype="float31")),
    refused("dtype", "variable 't'", variables=one(dtype=None)),
    refused("dtype", "'c' has neither values nor dtype", coords={"c": ms.Coordinate(("y",))}),
    refused("fill_value", "variable 't': fill value -1 does not fit uint8", variables=one(dtype="u1", fill_value=-1)),
    refused("fill_value", "fill value 0 does not fit datetime64[s]", variables=one(dtype="M8[s]", fill_value=0)),
    # attributes that follow from the rest
    refused(
        "fill_value", "variable 't': xarray has no _FillValue", variables=one(dtype="M8[s]", attrs={"_FillValue": 1})
    ),
    refused(
        "fill_value",
        "variable 't': fill value 2.0 and _FillValue 0.1",
        "keep_bits",
        variables=one(keep_bits=3, fill_value=2.0, attrs={"_FillValue": 0.1}),
    ),
    *(
        refused("attribute", "variable 't'", repr(a), "dtype datetime64[s]", variables=one(dtype="M8[s]", attrs={a: 1}))
        for a in ("units", "calendar", "dtype")
    ),
    *(
        refused("attribute", "variable 't'", repr(a), "keep_bits", variables=one(keep_bits=7, attrs={a: 1}))
        for a in ("quantization", "quantization_nsb")
    ),
    # rounding
    refused("keep_bits", "variable 't': keep_bits 24", "float32 has 23", "1 to 23", variables=one(keep_bits=24)),
    refused("keep_bits", "'s'", "int8", statics={"s": V(("y",), "i1", keep_bits=3)}),
    refused("name", "'quantization_info'", variables=one(keep_bits=7), statics={"quantization_info": V(("y",), "f4")}),
    refused(
        "name",
        "'quantization_info'",
        variables=one("time", "y", keep_bits=7),
        coords={},
        statics={},
        dims={"time": None, "y": 8, "quantization_info": 6},
    ),
    # coordinates
    refused(
        "dtype", "coordinate 'x': int64 into datetime64[s]", coords={"x": ms.Coordinate(("x",), range(6), "M8[s]")}
    ),
    refused("shape", "coordinate 'x'", "(5,)", "(6,)", coords={"x": ms.Coordinate(("x",), np.arange(5.0))}),
    refused("shape", "coordinate 'x'", coords={"x": ms.Coordinate(("x",), [[1], [1, 2]])}),
    refused("dtype", "coordinate 'x'", "int32", coords={"x": ms.Coordinate(("x",), np.arange(6) / 2, dtype="i4")}),
    refused("dtype", "coordinate 'x'", "float32", coords={"x": ms.Coordinate(("x",), np.arange(6) * 1j, dtype="f4")}),
    refused("dtype", "coordinate 'x'", "int8", coords={"x": ms.Coordinate(("x",), np.arange(6) * 99, dtype="i1")}),
    # layout
    refused("layout", "shard_shape 4: give a mapping", shard_shape=4),
    refused("layout", "shard_shape (4, 6) has 2 lengths for 3 dims", shard_shape=(4, 6)),
    refused("layout", "chunk_shape names dim 'z'", "('time', 'y', 'x')", chunk_shape={"z": 4}),
    refused("layout", "chunk_shape: length 0 of dim 'y'", "above 0", chunk_shape={"y": 0}),
    refused("layout", "variable 't': shard_shape names dim 'x'", variables=one("time", "y", shard_shape={"x": 2})),
    refused("layout", "shard length 4 of dim 'y'", "chunk's 3", "use 6", shard_shape={"y": 4}, chunk_shape={"y": 3}),
    refused(
        "layout",
        "variable 't': inner chunk (1, 16384, 32768) has 2147483648 bytes, at most 2147483631",
        "give a smaller chunk_shape",
        variables=one(chunk_shape=(1, 2**14, 2**15)),
    ),
    refused(
        "layout",
        "variable 't': shard (8, 16384, 4096) has 2147483648 bytes, at most 2147483647",
        "give a smaller shard_shape",
        variables=one(shard_shape=(8, 2**14, 2**12)),
    ),
    # codecs
    refused("codec", "codec 'best' is unknown; use one of fast, compact, diagnostic", codec="best"),
    refused("codec", "variable 't': ", "blosc -> bytes", variables=one(codec=[{"name": "blosc"}, {"name": "bytes"}])),
    refused("codec", "variable 't'", "'blosc'", variables=one(codec=["blosc"])),
    refused("codec", "variable", codec=5),
    refused("codec", "'zstd'", codec=[{"name": "bytes"}, {"name": "zstd", "configuration": {"level": math.inf}}]),
]


@pytest.mark.parametrize(("changes", "kind", "parts"), BAD)
def test_bad_input_is_refused(changes, kind, parts) -> None:
    """The error names the thing, the numbers and the way out."""
    with pytest.raises(SchemaError) as caught:
        make_schema(**changes)
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.kind == kind


@pytest.mark.parametrize("group", ["variables", "statics", "coords"])
@pytest.mark.parametrize("item", [("time", "y"), {"dims": ("time",)}, "t", None], ids=repr)
def test_what_is_no_description_is_refused(group, item) -> None:
    """A tuple or a dict in the place of a Variable or Coordinate is named with its type."""
    with pytest.raises(SchemaError) as caught:
        make_schema(**{group: {"t": item}})
    for part in ("'t'", type(item).__name__):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ({"unknown": ((1, 4, 6), (1, 4, 6))}, ("'unknown'",)),
        ({"temperature": ((1, 4, 6), (1, 4))}, ("'temperature'", "(1, 4, 6)", "(1, 4)")),
        ({"temperature": ((1, 4, 6), (1, 3, 6))}, ("'temperature'", "'y'", "4", "3")),
        ({"temperature": ((1, 4, 0), (1, 4, 6))}, ("'temperature'", "'x'", "0")),
    ],
)
def test_an_impossible_layout_is_refused(layout, parts) -> None:
    """A layout that is given later is checked like one that is given at once."""
    with pytest.raises(SchemaError) as caught:
        make_schema().with_layout(layout)
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.kind == "layout"


# ---- strings -----------------------------------------------------------------------------------------


def test_strings_are_the_owners() -> None:
    """As coordinates with values over any dims, else without partitioned ones; they are never in shards."""
    schema = make_schema(
        dims={"time": None, "y": 8, "x": 6, "k": 3},
        statics={"note": V((), str), "labels": V(("k",), "U4", fill_value="none")},
        coords={
            "y": ms.Coordinate(("y",), list("abcdefgh")),
            "k": ms.Coordinate(("k",), None, dtype="string"),
            "cell": ms.Coordinate(("y", "x"), np.full((8, 6), "s", object)),
        },
        codec=[{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}],
        variables=one(dtype="uint8"),
    )
    arrays = schema.arrays
    assert {n: (a.role, a.is_whole, a.is_sharded, a.resolved_chunk_shape) for n, a in arrays.items() if n != "t"} == {
        "note": (Role.STATIC, True, False, ()),
        "labels": (Role.STATIC, True, False, (3,)),
        "y": (Role.COORDINATE, True, False, (8,)),
        "k": (Role.STATIC, True, False, (3,)),
        "cell": (Role.COORDINATE, True, False, (8, 6)),
    }
    assert [dtype_name(arrays[n].dtype) for n in arrays if n != "t"] == ["string", "U4", "U1", "string", "string"]
    assert arrays["labels"].fill.item() == "none"
    # The schema's own chain, with the serializer that strings of any length need.
    assert [c["name"] for c in arrays["note"].chain] == ["vlen-utf8", "gzip", "crc32c"]
    assert [c["name"] for c in arrays["labels"].chain] == ["bytes", "gzip", "crc32c"]
    assert schema.partitioned_dims == ("y", "x")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"variables": one(dtype=str)}, "dtype", "variable 't': strings don't stream; write integers with the attr"),
        ({"variables": one("time", dtype="U3")}, "dtype", "variable 't': strings don't stream"),
        (
            {"statics": {"s": V(("x",), str)}},
            "dtype",
            "static 's': dim 'x' is partitioned, and strings are written whole, .* as the values of a coordinate",
        ),
        ({"coords": {"s": ms.Coordinate(("x",), dtype="U3")}}, "dtype", "static 's': dim 'x' is partitioned"),
        (
            {"variables": one("time"), "statics": {"s": V(("x",), str), "n": V(("x",), "i4")}},
            "dtype",
            "static 's': dim 'x' is partitioned",
        ),
        (
            {"statics": {"s": V((), str, chunk_shape={})}},
            "layout",
            "variable 's': strings are written whole; leave shard_shape and chunk_shape out",
        ),
    ],
)
def test_strings_that_several_ranks_would_write_are_refused(changes, kind, message) -> None:
    """Along time or a partitioned dim there are none; what to do instead is in the message."""
    with pytest.raises(SchemaError, match=message) as caught:
        make_schema(**changes)
    assert caught.value.kind == kind

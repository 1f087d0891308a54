"""A schema's JSON form, and the digests that other openings and other tools have to find again."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistream as ms
from mpistream.errors import FormatError
from mpistream.names import dtype_name
from mpistream.schema import StreamSchema
from tests.support.json_damage import paths, replaced, values
from tests.support.streams import make_schema, resolved

# ---- fingerprint -------------------------------------------------------------------------------------

# Written by hand from the text of the format, one array a line; the digest was taken of it with sha256sum.
CANONICAL = (
    '{"arrays":['
    '{"chunk_shape":[1024],"codecs":[{"configuration":{"endian":"little"},"name":"bytes"},'
    '{"configuration":{"checksum":false,"level":5},"name":"zstd"},{"name":"crc32c"}],"dims":["time"],'
    '"dtype":"complex64","fill_value":["0x1.0000000000000p-1","NaN"],"keep_bits":null,"name":"e","role":"series",'
    '"shard_shape":[1024],"units":null},'
    '{"chunk_shape":[2,3],"codecs":[{"name":"bytes"},{"configuration":{"blocksize":0,"clevel":5,"cname":"lz4",'
    '"shuffle":"bitshuffle","typesize":1},"name":"blosc"},{"name":"crc32c"}],"dims":["y","x"],"dtype":"bool",'
    '"fill_value":false,"keep_bits":null,"name":"land","role":"static","shard_shape":[4,6],"units":null},'
    '{"chunk_shape":[1,2,3],"codecs":[{"configuration":{"endian":"little"},"name":"bytes"},{"name":"crc32c"}],'
    '"dims":["time","y","x"],"dtype":"float32","fill_value":"-0x1.f3c0000000000p+9","keep_bits":null,"name":"t",'
    '"role":"variable","shard_shape":[2,4,6],"units":"\\u00b0C"}'
    '],"calendar":"noleap","dims":[["time",0],["y",4],["x",6]],"key_separator":".","mode":"append",'
    '"time_dim":"time","times_digest":null,"units":"hours since 1970-01-01"}'
)
FINGERPRINT = "e2874009069c1cc7f4c26b5bdc9a0557ecf451580cd267e1dc1c3814b0f34630"


def described(**changes: Any) -> StreamSchema:
    """The schema of the canonical text above."""
    parts: dict[str, Any] = {
        "dims": {"time": None, "y": 4, "x": 6},
        "time": ms.AppendTime(units="hours since 1970-01-01", calendar="noleap"),
        "variables": {
            "t": ms.Variable(("time", "y", "x"), ">f4", attrs={"units": "°C"}, codec="none", fill_value=-999.5),
            "e": ms.Variable(("time",), "complex64", codec="wasm", fill_value=complex(0.5, math.nan)),
        },
        "statics": {"land": ms.Variable(("y", "x"), "bool")},
        "coords": {"y": ms.Coordinate(("y",), [0.0, 1.0, 2.0, 3.0])},
        "shard_shape": {"time": 2, "y": 4, "x": 6},
        "chunk_shape": {"time": 1, "y": 2, "x": 3},
        "key_separator": ".",
    }
    return StreamSchema(**{**parts, **changes})


def test_the_fingerprint_is_the_digest_of_the_canonical_text() -> None:
    """Anybody can compute it from the text of the format, without this library."""
    assert hashlib.sha256(CANONICAL.encode("ascii")).hexdigest() == FINGERPRINT
    assert described().fingerprint() == FINGERPRINT


def test_the_fingerprint_of_rounded_values_and_of_times() -> None:
    """The bits that are kept are part of it; a time has its dtype, its fill value as int64 and no units."""
    rounded = {
        "t": ms.Variable(("time", "y", "x"), "f4", attrs={"units": "°C"}, codec="none", fill_value=-999.5, keep_bits=7),
        "e": ms.Variable(("time",), "complex64", codec="wasm", fill_value=complex(0.5, math.nan)),
    }
    # That of the text above with 7 for the null in the entry of "t".
    assert described(variables=rounded).fingerprint() == (
        "950ff90fac4f637d2693939e4b9651e08a89b720f033b80f5cdf8c3ee09d59ee"
    )
    was = '"dtype":"bool","fill_value":false'
    assert CANONICAL.count(was) == 1
    text = CANONICAL.replace(was, '"dtype":"datetime64[s]","fill_value":-9223372036854775808')
    text = text.replace(
        '"codecs":[{"name":"bytes"},{"configuration":{"blocksize":0,"clevel":5,"cname":"lz4",'
        '"shuffle":"bitshuffle","typesize":1},"name":"blosc"},{"name":"crc32c"}]',
        '"codecs":[{"configuration":{"endian":"little"},"name":"bytes"},'
        '{"configuration":{"blocksize":0,"clevel":5,"cname":"lz4",'
        '"shuffle":"shuffle","typesize":8},"name":"blosc"},{"name":"crc32c"}]',
    )
    timed = described(statics={"land": ms.Variable(("y", "x"), "M8[s]")})
    assert timed.fingerprint() == hashlib.sha256(text.encode()).hexdigest()


def test_the_fingerprint_of_fixed_times() -> None:
    """In indexed mode the text has the number of records, and the sha256 of their times as little-endian float64."""
    times = hashlib.sha256(struct.pack("<3d", -1.0, 0.25, 7.0)).hexdigest()
    text = CANONICAL
    for was, comes in (
        ('["time",0]', '["time",3]'),
        ('"mode":"append"', '"mode":"indexed"'),
        ('"times_digest":null', f'"times_digest":"{times}"'),
    ):
        assert text.count(was) == 1
        text = text.replace(was, comes)
    time = ms.IndexedTime([-1, 0.25, 7], units="hours since 1970-01-01", calendar="noleap")
    assert described(time=time).fingerprint() == hashlib.sha256(text.encode()).hexdigest()


def test_the_fingerprint_leaves_out_what_may_differ() -> None:
    """Titles, long names and values of coordinates don't decide whether two streams continue each other."""
    variables = {
        "e": ms.Variable(("time",), "complex64", codec="wasm", fill_value=complex(0.5, math.nan)),
        "t": ms.Variable(
            ("time", "y", "x"), "float32", attrs={"long_name": "t", "units": "°C"}, codec="none", fill_value=-999.5
        ),
    }
    coords = {"x": ms.Coordinate(("x",), np.arange(6)), "y": ms.Coordinate(("y",), [0.0, 1.0, 2.0, 4.0])}
    other = described(attrs={"title": "another"}, variables=variables, coords=coords)
    assert other.fingerprint() == FINGERPRINT
    assert other.coordinates_digest() != described().coordinates_digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"dims": {"time": None, "y": 4, "x": 6, "z": 1}},
        {"dims": {"time": None, "x": 6, "y": 4}},
        {"time": ms.AppendTime(units="days since 1970-01-01", calendar="noleap")},
        {"time": ms.AppendTime(units="hours since 1970-01-01")},
        {"time": ms.IndexedTime([0.0], units="hours since 1970-01-01", calendar="noleap")},
        {"key_separator": "/"},
        {"statics": {}},
        {"statics": {"land": ms.Variable(("y", "x"), "uint8")}},
        {"statics": {"land": ms.Variable(("y", "x"), "bool", fill_value=True)}},
        {"statics": {"land": ms.Variable(("x", "y"), "bool")}},
        {"statics": {"land": ms.Variable(("y", "x"), "bool", attrs={"units": "1"})}},
        {"coords": {"lat": ms.Coordinate(("y", "x"), dtype="f4")}},
        {"shard_shape": {"time": 2, "y": 2, "x": 6}},
        {"chunk_shape": {"time": 2, "y": 2, "x": 3}},
        {"codec": "compact"},
    ],
    ids=" ".join,
)
def test_the_fingerprint_holds_what_a_stream_is(changes) -> None:
    """Dims, time, dtypes, fill values, units, layout and codecs."""
    assert described(**changes).fingerprint() != FINGERPRINT


def test_the_fingerprint_of_the_json_form() -> None:
    """Text, bytes and the schema itself have the same one; anything else is a FormatError."""
    text = json.dumps(described().to_json())
    for form in (described(), text, text.encode()):
        assert ms.schema_fingerprint(form) == FINGERPRINT
    for bad in ("garbage", b"\xff", "{}", "5", "[" * 100_000, '{"dims": NaN}'):
        with pytest.raises(FormatError):
            ms.schema_fingerprint(bad)


def test_the_digest_of_coordinates() -> None:
    """Canonical JSON of name, dims, dtype and the sha256 of the values, in the order of the names."""
    schema = described(
        coords={
            "y": ms.Coordinate(("y",), [0.0, 1.0, 2.0, 3.0]),
            "x": ms.Coordinate(("x",), np.arange(6, dtype=">i2")),
            "lat": ms.Coordinate(("y", "x"), dtype="f4"),
        }
    )
    x = hashlib.sha256(np.arange(6, dtype="<i2").tobytes()).hexdigest()
    y = hashlib.sha256(np.arange(4, dtype="<f8").tobytes()).hexdigest()
    text = f'[["x",["x"],"int16","{x}"],["y",["y"],"float64","{y}"]]'
    assert schema.coordinates_digest() == hashlib.sha256(text.encode()).hexdigest()
    words = described(coords={"y": ms.Coordinate(("y",), ["a", "", "bé", "d"], dtype=str)})
    # The bytes of vlen-utf8: their number, then of each its length and its UTF-8.
    content = b"\4\0\0\0\1\0\0\0a\0\0\0\0\3\0\0\0b\xc3\xa9\1\0\0\0d"
    text = f'[["y",["y"],"string","{hashlib.sha256(content).hexdigest()}"]]'
    assert words.coordinates_digest() == hashlib.sha256(text.encode()).hexdigest()
    words = described(coords={"y": ms.Coordinate(("y",), ["a", "", "bé", "d"])})
    content = "a\0\0\0béd\0".encode("utf-32-le")
    text = f'[["y",["y"],"U2","{hashlib.sha256(content).hexdigest()}"]]'
    assert words.coordinates_digest() == hashlib.sha256(text.encode()).hexdigest()
    assert make_schema(coords={}).coordinates_digest() == hashlib.sha256(b"[]").hexdigest()


# ---- JSON --------------------------------------------------------------------------------------------


def same(a: StreamSchema, b: StreamSchema) -> bool:
    return (
        a.to_json() == b.to_json()
        and a.fingerprint() == b.fingerprint()
        and a.coordinates_digest() == b.coordinates_digest()
        and a.time_array.to_json() == b.time_array.to_json()
        and [x.role for x in a.arrays.values()] == [x.role for x in b.arrays.values()]
        and a.partitioned_dims == b.partitioned_dims
        and dict(a.staggered) == dict(b.staggered)
    )


FACES = {"u": ms.Variable(("time", "y", "x_face"), "f4"), "t": ms.Variable(("time", "y", "x"), "f4")}


@pytest.mark.parametrize(
    "schema",
    [
        described(),
        resolved(),
        resolved(key_separator=".", attrs={"title": "t", "n": [1, 2.5, None]}, codec="checkpoint"),
        resolved(time=ms.AppendTime(units="s", calendar="360_day", attrs={"long_name": "model time"})),
        resolved(time=ms.IndexedTime([1.5, 2.5, 9], units="s", calendar="360_day", attrs={"long_name": "model time"})),
        resolved(statics={"scalar": ms.Variable((), "float64", fill_value=-0.0)}, coords={}),
        described(
            statics={"s": ms.Variable(("y", "x"), "f8", keep_bits=9), "d": ms.Variable((), "m8[h]")},
            coords={"y": ms.Coordinate(("y",), np.arange(4).astype("M8[D]"))},
        ),
        resolved(dims={"time": None, "y": 8, "x": 6, "x_face": ms.Staggered("x", 2)}, variables=FACES),
        resolved(coords={"name": ms.Coordinate((), 5, attrs={"a": 1}), "x": ms.Coordinate(("x",), np.arange(6.0))}),
    ],
)
def test_a_schema_survives_json(schema) -> None:
    """From its document comes a schema with the same document, digests and arrays, only values stay behind."""
    again = StreamSchema.from_json(json.loads(json.dumps(schema.to_json(), allow_nan=False)))
    assert same(again, schema)
    assert all(a.values is None for a in (*again.own_arrays, *again.arrays.values()))
    assert (again.mode, again.n_total) == (schema.mode, schema.n_total)
    for name, array in schema.arrays.items():
        assert again.arrays[name].fill.tobytes() == array.fill.tobytes()


DOCUMENT = json.loads(json.dumps(resolved().to_json()))
INDEXED = json.loads(json.dumps(resolved(time=ms.IndexedTime([1.5, 2.5, 9], units="s")).to_json()))
PATHS = paths(DOCUMENT)


@given(st.sampled_from([DOCUMENT, INDEXED]), st.sampled_from(PATHS), values | st.floats() | st.just(...))
def test_a_damaged_document_is_a_format_error(document, path, value) -> None:
    """One value replaced or left out: a schema that can be used, or FormatError, never another exception."""
    try:
        schema = StreamSchema.from_json(replaced(document, path, value))
    except FormatError as error:
        assert error.kind == "schema"
    else:
        assert same(StreamSchema.from_json(json.loads(json.dumps(schema.to_json()))), schema)


STAGGERED = json.loads(
    json.dumps(resolved(dims={"time": None, "y": 8, "x": 6, "x_face": ms.Staggered("x")}, variables=FACES).to_json())
)


@given(st.sampled_from(paths(STAGGERED)), values | st.sampled_from(["x", "y", "x_face", "time", ...]))
def test_a_damaged_document_with_staggered_dims_is_a_format_error(path, value) -> None:
    """Whatever the other dim is said to be."""
    try:
        schema = StreamSchema.from_json(replaced(STAGGERED, path, value))
    except FormatError as error:
        assert error.kind == "schema"
    else:
        assert same(StreamSchema.from_json(json.loads(json.dumps(schema.to_json()))), schema)


# Of an array, a digest is looked for in coordinates only.
NEEDED = [
    p
    for p in PATHS
    if isinstance(p[-1], str) and "attrs" not in p[:-1] and "configuration" not in p
    if p[-1] != "digest" or p[0] == "time" or DOCUMENT["arrays"][p[1]]["name"] in DOCUMENT["coords"]
]


@pytest.mark.parametrize("document", [DOCUMENT, INDEXED], ids=["append", "indexed"])
@pytest.mark.parametrize("path", NEEDED, ids=str)
def test_nothing_in_the_document_may_be_missing(document, path) -> None:
    """Each name of the document is needed, except inside attributes and codecs' configurations."""
    with pytest.raises(FormatError):
        StreamSchema.from_json(replaced(document, path, ...))


@pytest.mark.parametrize("value", [math.nan, 5, [], {"a": 1}, True], ids=repr)
def test_a_digest_is_a_string(value) -> None:
    """That of a coordinate, and that of the times."""
    at = [a["name"] for a in DOCUMENT["arrays"]].index("y")
    for document, path in ((DOCUMENT, ("arrays", at, "digest")), (INDEXED, ("time", "digest"))):
        with pytest.raises(FormatError, match="the schema is damaged: TypeError: digest"):
            StreamSchema.from_json(replaced(document, path, value))


@pytest.mark.parametrize("value", [1e300, -1e300, 3.4028235677973366e38])
def test_a_fill_value_beyond_its_dtype_is_damage(value) -> None:
    """A finite float that rounds to none of float32."""
    assert DOCUMENT["arrays"][0]["dtype"] == "float32"
    with pytest.raises(FormatError, match="the schema is damaged: FloatingPointError"):
        StreamSchema.from_json(replaced(DOCUMENT, ("arrays", 0, "fill_value"), value))
    infinite = StreamSchema.from_json(replaced(DOCUMENT, ("arrays", 0, "fill_value"), "Infinity"))
    assert infinite.arrays["temperature"].fill == np.inf


def test_coordinates_are_not_rounded() -> None:
    """Bits to keep in one are damage."""
    for array in DOCUMENT["arrays"]:
        at = DOCUMENT["arrays"].index(array)
        if array["name"] in DOCUMENT["coords"]:
            with pytest.raises(FormatError, match="has keep_bits 7"):
                StreamSchema.from_json(replaced(DOCUMENT, ("arrays", at, "keep_bits"), 7))


@given(values)
def test_any_other_json_is_a_format_error(value) -> None:
    """Whatever JSON says in its place."""
    with pytest.raises(FormatError, match="the schema is damaged"):
        StreamSchema.from_json(value)


def test_an_unknown_time_mode_is_refused_by_name() -> None:
    """A store of a later version says so instead of being read wrongly."""
    with pytest.raises(FormatError, match="time mode 'random' is not known"):
        StreamSchema.from_json(replaced(DOCUMENT, ("time", "mode"), "random"))


@pytest.mark.parametrize(
    ("document", "name", "value"),
    [
        (DOCUMENT, "n_records", 3),
        (DOCUMENT, "digest", "ab"),
        (DOCUMENT, "mode", "indexed"),
        (INDEXED, "mode", "append"),
        (INDEXED, "n_records", None),
        (INDEXED, "n_records", 0),
        (INDEXED, "n_records", -1),
        (INDEXED, "n_records", 2.0),
    ],
)
def test_the_number_of_records_belongs_to_the_mode(document, name, value) -> None:
    """Append mode has none and no digest, indexed mode one above zero."""
    with pytest.raises(FormatError) as caught:
        StreamSchema.from_json(replaced(document, ("time", name), value))
    assert caught.value.kind == "schema"


def test_strings_survive_the_json_form() -> None:
    """Their dtypes, fill values, chains and layout come back, as do boundary variables and missing values."""
    schema = resolved(
        dims={"time": None, "y": 8, "x": 6, "nv": 2},
        time=ms.AppendTime(units="s", attrs={"bounds": "ends"}),
        variables={
            "t": ms.Variable(("time", "y", "x"), "f4", attrs={"_FillValue": math.nan}),
            "ends": ms.Variable(("time", "nv"), "f8"),
        },
        statics={"note": ms.Variable((), str, fill_value="é"), "pair": ms.Variable(("nv",), "U9")},
        coords={"y": ms.Coordinate(("y",), list("abcdefgh"), dtype=str)},
    )
    document = json.loads(json.dumps(schema.to_json()))
    again = StreamSchema.from_json(document)
    assert again.to_json() == document
    assert again.fingerprint() == schema.fingerprint()
    assert again.coordinates_digest() == schema.coordinates_digest()
    assert again.partitioned_dims == ("y", "x")
    assert [dtype_name(again.arrays[n].dtype) for n in ("note", "pair", "y")] == ["string", "U9", "string"]
    assert [again.arrays[n].is_whole for n in ("note", "pair", "y")] == [True] * 3


def test_units_of_a_store_are_read_whatever_they_are() -> None:
    """What a program gives is checked for its readers; what lies there was committed."""
    document = resolved().to_json()
    document["time"]["units"] = "fortnights since 1970-01-01"
    assert ms.StreamSchema.from_json(document).time.units == "fortnights since 1970-01-01"
    with pytest.raises(ms.SchemaError, match="'fortnights' is none that readers know"):
        ms.AppendTime(units="fortnights since 1970-01-01")

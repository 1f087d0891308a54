"""Names, attributes, dtypes and fill values: what is taken, and what is refused with which words."""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistream.errors import SchemaError
from mpistream.names import (
    DTYPES,
    canonical_json,
    cast_times,
    check_name,
    fill_array,
    fill_from_json,
    fill_to_json,
    json_object,
    json_value,
    stored_dtype,
)

each_dtype = pytest.mark.parametrize("name", DTYPES)


def bits(array):
    return np.asarray(array).tobytes()


# ---- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t", "Temperatur °C", "a.b", "a b", "x" * 200, "é" * 100, "_x", "c", "zarr"])
def test_names_that_can_be_folders_are_taken(name) -> None:
    """Any text up to 200 bytes of UTF-8 that Zarr and file systems can name is a name."""
    assert check_name("variable", name) == name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (5, "is not a string"),
        (None, "is not a string"),
        (b"t", "is not a string"),
        ("", "is empty"),
        (".", "begins with a dot"),
        ("..", "begins with a dot"),
        (".mpistream", "begins with a dot"),
        ("__meta", "begins with two underscores, which Zarr keeps for itself"),
        ("a/b", "contains a slash"),
        ("/", "contains a slash"),
        ("a\\b", "contains a slash"),
        ("a\nb", "contains a control character"),
        ("a\x00", "contains a control character"),
        ("\x7f", "contains a control character"),
        ("zarr.json", "is the name of Zarr's own document"),
        ("x" * 201, "has 201 bytes, at most 200 are allowed"),
        ("é" * 101, "has 202 bytes, at most 200 are allowed"),
        ("\ud800", "is not valid Unicode, so it has no UTF-8 form"),
    ],
)
def test_unsafe_names_are_refused(name, problem) -> None:
    """The message shows the name, what is wrong with it and the way out."""
    with pytest.raises(SchemaError) as caught:
        check_name("dim", name)
    assert str(caught.value) == f"dim {name!r} {problem}; choose another name"
    assert caught.value.kind == "name"


# ---- attributes --------------------------------------------------------------------------------------


def test_numpy_values_become_plain_json() -> None:
    """Scalars and arrays of numpy, tuples and read-only mappings come out as Python's own types."""
    given_ = {
        "max": np.float32(1.5),
        "n": np.int64(2**40),
        "on": np.bool_(True),
        "name": np.str_("K"),
        "range": np.array([[1, 2], [3, 4]], "int16"),
        "both": (1, None, MappingProxyType({"deep": np.uint8(7)})),
        "text": "°C",
    }
    value = json_value("attributes", given_)
    assert value == {
        "max": 1.5,
        "n": 2**40,
        "on": True,
        "name": "K",
        "range": [[1, 2], [3, 4]],
        "both": [1, None, {"deep": 7}],
        "text": "°C",
    }
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert type(value["on"]) is bool
    assert type(value["n"]) is int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"missing": math.nan}, "attrs['missing'] is nan, which JSON can't hold; leave it out"),
        ({"a": [1.0, -math.inf]}, "attrs['a'][1] is -inf, which JSON can't hold; leave it out"),
        ({"a": np.array([0, np.inf])}, "attrs['a'][1] is inf, which JSON can't hold; leave it out"),
        ({"a": {1: 2}}, "attrs['a']: key 1 is not a string"),
        ({"a": ["x\ud800"]}, "attrs['a'][0] is not valid Unicode, so it has no UTF-8 form; give other text"),
        (
            {"a": {"x\udfff": 1}},
            "attrs['a']: key 'x\\udfff' is not valid Unicode, so it has no UTF-8 form; give other text",
        ),
        ({"a": 1j}, "attrs['a'] is a complex, which JSON can't hold; give a number, string, list or mapping"),
        ({"a": b"x"}, "attrs['a'] is a bytes, which JSON can't hold; give a number, string, list or mapping"),
        ({"a": {1}}, "attrs['a'] is a set, which JSON can't hold; give a number, string, list or mapping"),
        (
            {"a": np.datetime64("2000-01-01")},
            "attrs['a'] is a date, which JSON can't hold; give a number, string, list or mapping",
        ),
    ],
)
def test_attributes_that_json_can_not_hold_are_refused_by_name(value, message) -> None:
    """The path to the value stands in the message; NaN and infinity are named as such."""
    with pytest.raises(SchemaError) as caught:
        json_value("attrs", value)
    assert str(caught.value) == message
    assert caught.value.kind == "attribute"


def test_attributes_nested_beyond_sense_are_refused() -> None:
    """64 levels are more than enough, and the recursion of Python's json is never reached."""
    value: Any = 0
    for _ in range(64):
        value = [value]
    assert json_value("attrs", value) == value
    for deeper in ([value], {"a": value}, [[[[value]]]]):
        with pytest.raises(SchemaError, match="is nested deeper than 64 levels; flatten it") as caught:
            json_value("attrs", deeper)
        assert caught.value.kind == "attribute"


def test_attributes_are_a_mapping() -> None:
    """Any mapping becomes a dict; anything else is refused with its type."""
    assert json_object("attrs", MappingProxyType({"n": np.int8(1)})) == {"n": 1}
    for value in (None, [1], "text", [("a", 1)]):
        with pytest.raises(SchemaError, match=f"attrs are a {type(value).__name__}; give a mapping") as caught:
            json_object("attrs", value)
        assert caught.value.kind == "attribute"


def test_canonical_json_is_one_text_for_one_value() -> None:
    """Sorted keys, no spaces, ASCII, floats as hex, tuples as lists; integers and booleans stay."""
    value = {"b": (1, True, None), "a": {"z": 0.1, "y": MappingProxyType({"é": -0.0})}}
    expected = b'{"a":{"y":{"\\u00e9":"-0x0.0p+0"},"z":"0x1.999999999999ap-4"},"b":[1,true,null]}'
    assert canonical_json(value) == expected


@given(st.floats(allow_nan=False))
def test_canonical_json_tells_all_floats_apart(value) -> None:
    """A float comes back bitwise from its canonical form."""
    assert bits(float.fromhex(json.loads(canonical_json(value)))) == bits(value)


# ---- dtypes ------------------------------------------------------------------------------------------


@each_dtype
def test_dtypes_are_stored_in_native_order(name) -> None:
    """Byte order and spelling of the request don't matter: the dtype has its Zarr name."""
    for request in (name, np.dtype(name), np.dtype(name).newbyteorder(">"), np.dtype(name).type):
        assert stored_dtype("t", request) == np.dtype(name)
        assert stored_dtype("t", request).isnative


# Of no fixed length, without a unit, not one unit long, or without a name in CF.
TIMES_WITHOUT_NAME = [
    *("datetime64[Y]", "timedelta64[M]", "datetime64", "timedelta64", "datetime64[25s]", "datetime64[W]"),
    *("timedelta64[ps]", "datetime64[as]"),
]


@pytest.mark.parametrize("unit", ["D", "h", "m", "s", "ms", "us", "ns"])
@pytest.mark.parametrize("kind", ["datetime64", "timedelta64"])
def test_times_are_stored_in_the_units_that_cf_names(kind, unit) -> None:
    """From days to nanoseconds, in either byte order."""
    for request in (f"{kind}[{unit}]", np.dtype(f"{kind}[{unit}]").newbyteorder(">")):
        found = stored_dtype("t", request)
        assert (found.name, found.isnative) == (f"{kind}[{unit}]", True)


@pytest.mark.parametrize("dtype", ["S4", "O", [("a", "f4")], "(2,)f4", *TIMES_WITHOUT_NAME])
def test_dtypes_that_zarr_readers_do_not_share_are_refused(dtype) -> None:
    """Bytes, objects, records and odd times are no dtype of a stream; those that are stand in the message."""
    with pytest.raises(SchemaError, match=r"^variable 't': dtype .* is not supported; use one of bool, int8") as caught:
        stored_dtype("variable 't'", dtype)
    assert caught.value.kind == "dtype"


@pytest.mark.parametrize("dtype", ["float31", 5, {"a": 1}, {"names": ["a"]}, "f4,,", "\ud800"])
def test_what_is_no_dtype_is_refused(dtype) -> None:
    """Whatever numpy says about it, the error is ours and shows what was given."""
    with pytest.raises(SchemaError, match="is not a dtype; use one of bool") as caught:
        stored_dtype("variable 't'", dtype)
    assert repr(dtype) in str(caught.value)
    assert caught.value.kind == "dtype"


# ---- fill values -------------------------------------------------------------------------------------


@each_dtype
def test_default_fill_is_nan_for_floats_and_zero_otherwise(name) -> None:
    """Complex numbers have the fill 0."""
    dtype = np.dtype(name)
    fill = fill_array("t", dtype, None)
    expected = np.array(np.nan if name.startswith("float") else 0, dtype)
    assert (fill.dtype, fill.shape, bits(fill)) == (dtype, (), bits(expected))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("float32", 0.1, np.float32(0.1)),  # rounding is what the dtype asks for
        ("float32", -0.0, np.float32(-0.0)),
        ("float32", np.inf, np.float32(np.inf)),
        ("float32", np.float64(-np.inf), np.float32(-np.inf)),
        ("float32", 7, np.float32(7)),
        ("float32", True, np.float32(1)),
        ("float64", 10**30, np.float64(1e30)),
        ("int16", -999.0, np.int16(-999)),
        ("int16", np.array(5, ">i8"), np.int16(5)),
        ("uint64", 2**64 - 1, np.uint64(2**64 - 1)),
        ("bool", True, np.bool_(True)),
        ("bool", 0, np.bool_(False)),
        ("complex64", 1 - 2j, np.complex64(1 - 2j)),
        ("complex64", 3, np.complex64(3)),
        ("complex128", complex(np.nan, -np.inf), np.complex128(complex(np.nan, -np.inf))),
    ],
)
def test_fill_values_that_the_dtype_holds(name, value, expected) -> None:
    """A number that the dtype holds, up to rounding of floats, is the fill value."""
    fill = fill_array("t", np.dtype(name), value)
    assert (fill.dtype, fill.shape, bits(fill)) == (np.dtype(name), (), bits(expected))


@pytest.mark.parametrize("name", ["datetime64[D]", "datetime64[ns]", "timedelta64[h]", "timedelta64[us]"])
def test_the_default_fill_of_a_time_is_nat(name) -> None:
    """As an integer it is the least one of 64 bits."""
    for value in (None, np.array("NaT", name), np.dtype(name).type("NaT", np.datetime_data(name)[0])):
        fill = fill_array("t", np.dtype(name), value)
        assert (fill.dtype, fill.shape, int(fill.view("int64"))) == (np.dtype(name), (), -(2**63))
        assert fill_to_json(fill) == -(2**63)
        assert bits(fill_from_json(np.dtype(name), -(2**63))) == bits(fill)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("datetime64[s]", np.datetime64("1970-01-02", "D"), 86400),
        ("datetime64[D]", np.datetime64("1970-01-03T00", "h"), 2),
        ("datetime64[D]", np.array(np.datetime64("1970-02", "M"), ">M8[M]"), 31),
        ("datetime64[ns]", np.datetime64(2**63 - 1, "ns"), 2**63 - 1),
        ("timedelta64[ms]", np.timedelta64(-3, "s"), -3000),
    ],
)
def test_the_fill_of_a_time_is_a_time(name, value, expected) -> None:
    """In any unit in which the dtype has it."""
    fill = fill_array("t", np.dtype(name), value)
    assert (fill.dtype, fill.shape, int(fill.view("int64"))) == (np.dtype(name), (), expected)
    assert fill_to_json(fill) == expected
    assert bits(fill_from_json(np.dtype(name), expected)) == bits(fill)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("datetime64[s]", 0),
        ("datetime64[s]", "NaT"),
        ("datetime64[s]", np.timedelta64(5, "s")),
        ("datetime64[D]", np.datetime64("1970-01-03T01", "h")),
        ("datetime64[ns]", np.datetime64("20000-01-01", "s")),
        ("datetime64[s]", np.array(["NaT"], "M8[s]")),
        ("timedelta64[s]", np.datetime64("1970-01-03", "s")),
        ("timedelta64[s]", np.timedelta64(5, "M")),
    ],
)
def test_fill_values_that_are_no_such_time_are_refused(name, value) -> None:
    """The message says of which type a fill value must be."""
    with pytest.raises(SchemaError) as caught:
        fill_array("variable 't'", np.dtype(name), value)
    assert str(caught.value) == (
        f"variable 't': fill value {value!r} does not fit {name}; give a numpy.{name.split('[')[0]}"
    )
    assert caught.value.kind == "fill_value"


def test_times_in_another_unit_are_the_same_or_none() -> None:
    """NaT stays NaT; what has no room in the other unit is never wrapped."""
    seconds = np.array(["1970-01-02", "NaT", "1969-12-31T23:59:59"], "M8[s]")
    found = cast_times(seconds, np.dtype("M8[ns]"))
    assert found is not None
    assert found.view("int64").tolist() == [86400 * 10**9, -(2**63), -(10**9)]
    assert cast_times(seconds, np.dtype("M8[s]")) is seconds
    assert cast_times(seconds, np.dtype("M8[h]")) is None
    # The first value beyond the range of nanoseconds on both sides.
    for beyond in (-(2**63) // 10**9 - 1, 2**63 // 10**9 + 1):
        assert cast_times(np.array([beyond], "M8[s]"), np.dtype("M8[ns]")) is None
        assert cast_times(np.array([beyond], "m8[s]"), np.dtype("m8[ns]")) is None

    class Overflowing(np.ndarray):
        def astype(self, *args: Any, **kwargs: Any) -> Any:
            raise OverflowError

    assert cast_times(seconds.view(Overflowing), np.dtype("M8[ns]")) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_duration_without_a_unit_has_no_other_unit() -> None:
    """Five of what nobody said are not five seconds; numpy deprecates them, but lets them be made."""
    generic = np.array([5, -(2**63)], "m8")
    assert cast_times(generic, np.dtype("m8[s]")) is None
    nat = cast_times(generic[1:], np.dtype("m8[s]"))
    assert nat is not None
    assert np.isnat(nat).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("uint8", 256),
        ("uint8", -1),
        ("int32", 1.5),
        ("int32", math.nan),
        ("int32", 1e300),
        ("int64", 2**63),
        ("float32", 1e300),
        ("float32", 10**400),
        ("float32", 1 + 2j),
        ("int8", 1j),
        ("bool", 2),
        ("float32", "1"),
        ("float32", b"1"),
        ("float32", None.__class__),
        ("float32", [1.0]),
        ("float32", [1.0, 2.0]),
        ("float32", [math.nan, 2.0]),
        ("float32", [[1], [1, 2]]),
        ("complex64", 1e300 + 0j),
    ],
)
def test_fill_values_that_the_dtype_can_not_hold_are_refused(name, value) -> None:
    """The message shows value and dtype, and nothing else is said: no warning of numpy's."""
    with pytest.raises(SchemaError) as caught:
        fill_array("variable 't'", np.dtype(name), value)
    assert str(caught.value) == f"variable 't': fill value {value!r} does not fit {name}"
    assert caught.value.kind == "fill_value"


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_every_nan_is_the_same_fill(name) -> None:
    """A NaN of other bits becomes numpy's: a document has only one word for them."""
    dtype = np.dtype(name)
    odd = (np.array(np.nan, dtype).view(f"u{dtype.itemsize}") | 1).view(dtype)
    assert np.isnan(odd)
    assert bits(odd) != bits(np.array(np.nan, dtype))
    assert bits(fill_array("t", dtype, -odd)) == bits(np.array(np.nan, dtype))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("float32", None, "NaN"),
        ("float64", np.inf, "Infinity"),
        ("float64", -np.inf, "-Infinity"),
        ("float64", 0.25, 0.25),
        ("int8", -3, -3),
        ("bool", True, True),
        ("complex64", complex(1, np.nan), [1.0, "NaN"]),
        ("complex128", complex(-np.inf, np.inf), ["-Infinity", "Infinity"]),
    ],
)
def test_fill_values_have_zarrs_json_form(name, value, expected) -> None:
    """Zarr v3 core, "Fill value": names for what JSON has no number for, a pair for a complex number."""
    found = fill_to_json(fill_array("t", np.dtype(name), value))
    assert found == expected
    assert type(found) is type(expected)


@each_dtype
@given(st.data())
def test_fill_values_come_back_bitwise(name, data) -> None:
    """Whatever value a dtype holds, its JSON form gives it back, the sign of zero too."""
    dtype = np.dtype(name)
    raw = data.draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    value = np.frombuffer(b"\x01" if name == "bool" else raw, dtype)[0]
    fill = fill_array("t", dtype, value)
    again = fill_from_json(dtype, json.loads(json.dumps(fill_to_json(fill), allow_nan=False)))
    assert again.dtype == dtype
    for found, part in ((again.real, value.real), (again.imag, value.imag)):
        assert bits(found) == bits(part) or (np.isnan(found) and np.isnan(part))

"""How arrays lie in a netCDF-4 file: types, fill values, attributes, chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.arrays import ArraySpec
from mpistream.errors import SchemaError
from mpistream.netcdf import attribute_value, file_values, netcdf_variable, own_values
from tests.support.streams import resolved


def spec(dtype: Any, attrs: dict[str, Any] | None = None, **given: Any) -> ArraySpec:
    variables = {"v": ms.Variable(("time", "y", "x"), dtype, attrs=attrs or {}, **given)}
    return resolved(variables=variables).arrays["v"]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bool", "int8"), ("float16", "float32"), ("uint64", "uint64"), ("M8[D]", "int64"), ("complex64", "complex64")],
)
def test_types(dtype: str, expected: str) -> None:
    """What netCDF lacks has the next larger type, or that of xarray."""
    found = netcdf_variable(spec(dtype), (3, 8, 6), is_over_time=True, is_packed=False)
    assert found.dtype == np.dtype(expected)
    values = np.zeros((2, 2), dtype)
    assert file_values(values).dtype == np.dtype(expected)


def test_halves_become_floats_without_a_change() -> None:
    """All 65,536 of them; NaNs stay NaN."""
    halves = np.arange(65536, dtype="uint16").view("float16")
    found = file_values(halves)
    np.testing.assert_array_equal(found, [float(h) for h in halves])


def test_attributes_have_the_types_that_cf_asks_for() -> None:
    """CF 2.5.1 and 3.5: limits and flags are of the variable's type, where it can hold them."""
    attrs = {
        "valid_range": [0, 9],
        "flag_values": [1, 2],
        "flag_meanings": "a b",
        "valid_min": 1.5,
        "valid_max": 10**30,
        "actual_range": "?",
        "missing_value": ["x", 1],
        "_FillValue": -7,
    }
    found = netcdf_variable(spec("int16", attrs), (3, 8, 6), is_over_time=True, is_packed=False).attrs
    assert {n: found[n].dtype.name for n in ("valid_range", "flag_values", "_FillValue")} == dict.fromkeys(
        ("valid_range", "flag_values", "_FillValue"), "int16"
    )
    assert found["_FillValue"].tolist() == [-7]
    assert (found["valid_min"].dtype, found["valid_max"].dtype) == (np.float64, np.float64)
    assert (found["flag_meanings"], found["actual_range"]) == ("a b", "?")
    assert found["missing_value"] == '["x", 1]'
    floats = netcdf_variable(spec("f4", {"valid_min": 0.1}), (3, 8, 6), is_over_time=True, is_packed=False).attrs
    assert floats["valid_min"] == np.float32(0.1)
    assert floats["valid_min"].dtype == np.float32


def test_missing_values_and_marks() -> None:
    """_FillValue of a float is a number again; NaT is the least int64; bool says what it is; complex has none."""
    given = {"is_over_time": True, "is_packed": False}
    halves = netcdf_variable(spec("f2", {"_FillValue": -1.5}), (3, 8, 6), **given)
    assert (halves.attrs["_FillValue"].dtype, halves.fill) == (np.float32, np.float32(-1.5))
    days = netcdf_variable(spec("M8[D]"), (3, 8, 6), **given)
    assert days.attrs["_FillValue"].tolist() == [-(2**63)]
    assert (days.fill, days.attrs["units"]) == (-(2**63), "days since 1970-01-01")
    assert netcdf_variable(spec("bool"), (3, 8, 6), **given).attrs["dtype"] == "bool"
    numbers = netcdf_variable(spec("c8", {"_FillValue": 1j}), (3, 8, 6), **given)
    assert (dict(numbers.attrs), numbers.fill) == ({"coordinates": "lat"}, None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("K", "K"),
        (["a", "b"], ["a", "b"]),
        ("a\0b", '"a\\u0000b"'),
        (None, "null"),
        ([], "[]"),
        ({"a": [1]}, '{"a": [1]}'),
        ([[1], [2]], "[[1], [2]]"),
    ],
)
def test_attributes_that_are_text(value: Any, expected: Any) -> None:
    """What netCDF has no form for is its JSON text."""
    assert attribute_value(value) == expected


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((5, "int32"), (2**40, "int64"), (2**63, "uint64"), (10**30, "float64"), ([1, 2.5], "float64")),
        *(([True, False], "int8"), (True, "int8")),
    ],
)
def test_attributes_that_are_numbers(value: Any, dtype: str) -> None:
    found = attribute_value(value)
    assert isinstance(found, np.ndarray)
    assert (found.dtype.name, found.tolist()) == (dtype, np.array(value, dtype).tolist())


def test_strings() -> None:
    """They are objects; one with a NUL, where HDF5 would end it, is refused."""
    assert file_values(np.array(["é", ""])).tolist() == ["é", ""]
    with pytest.raises(SchemaError, match="NUL"):
        file_values(np.array(["a\0b"], np.dtypes.StringDType()))
    schema = resolved(coords={"y": ms.Coordinate(("y",), list("abcdefgh"))})
    found = netcdf_variable(schema.arrays["y"], (8,), is_over_time=False, is_packed=True)
    assert (found.dtype, found.fill, found.chunk_shape) == (None, None, None)


def test_chunks_are_records_or_parts_of_them() -> None:
    """A record a chunk up to 4 MiB; else whole fastest dims of it. What does not grow is contiguous, unless packed."""

    def chunks(shape: tuple[int, ...], *, is_over_time: bool, is_packed: bool = False) -> tuple[int, ...] | None:
        array = spec("f8")
        return netcdf_variable(array, shape, is_over_time=is_over_time, is_packed=is_packed).chunk_shape

    assert chunks((100, 64, 64), is_over_time=True) == (1, 64, 64)
    assert chunks((0, 1024, 1024), is_over_time=True) == (1, 512, 1024)
    assert chunks((9, 4, 2, 2**20), is_over_time=True) == (1, 1, 1, 2**19)
    assert chunks((100,), is_over_time=True) == (1024,)
    assert chunks((64, 64), is_over_time=False) is None
    assert chunks((64, 64), is_over_time=False, is_packed=True) == (64, 64)
    assert chunks((2**20,), is_over_time=False, is_packed=True) == (2**19,)
    assert chunks((), is_over_time=False, is_packed=True) is None


def test_values_come_back() -> None:
    """A file's bool is marked; other byte orders become ours."""
    assert own_values(np.array([0, 1], "i1"), {"dtype": "bool"}).tolist() == [False, True]
    assert own_values(np.array([0, 1], "i1"), {}).dtype == np.int8
    found = own_values(np.array([1.5], ">f8"), {"dtype": "bool"})
    assert (found.dtype.isnative, found.tolist()) == (True, [1.5])

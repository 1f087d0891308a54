"""Attributes as the CF conventions want them: auxiliary coordinates, boundary variables, missing values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.cf import with_encoded_fill_value
from mpistream.errors import SchemaError
from mpistream.layout import resolve_layout
from mpistream.names import DTYPES
from mpistream.schema import StreamSchema
from tests.support.streams import SIZES, make_schema

C, V = ms.Coordinate, ms.Variable


# ---- coordinates -------------------------------------------------------------------------------------


def test_auxiliary_coordinates_are_named_where_they_fit() -> None:
    """CF sections 5 and 5.7: each array over all their dims names them, unless it does so itself; coordinates don't."""
    schema = make_schema(
        variables={
            "t": V(("time", "y", "x"), "f4", attrs={"units": "K"}),
            "u": V(("time", "y", "x"), "f4", attrs={"coordinates": "mine"}),
            "energy": V(("time",), "f8"),
        },
        statics={"depth": V(("y", "x"), "f4")},
        coords={
            "y": C(("y",), np.arange(8.0)),
            "lat": C(("y", "x"), dtype="f4"),
            "zone": C(("y",), ["a"] * 8),
            "height": C((), 2.0),
        },
    )
    assert {n: a.attrs.get("coordinates") for n, a in schema.arrays.items()} == {
        "t": "lat zone height",
        "u": "mine",
        "energy": "height",
        "depth": "lat zone height",
        **dict.fromkeys(("y", "lat", "zone", "height")),
    }
    assert schema.arrays["t"].attrs["units"] == "K"
    assert "coordinates" not in schema.variables["t"].attrs


# ---- bounds ------------------------------------------------------------------------------------------


def bounded(**changes: Any) -> StreamSchema:
    """A schema with bounds of time, of a dim, of an auxiliary coordinate by region and of a scalar one."""
    parts: dict[str, Any] = {
        "dims": {"time": None, **SIZES, "nv": 2, "corner": 4},
        "time": ms.AppendTime(units="days since 2000-01-01", attrs={"bounds": "time_bnds"}),
        "variables": {"t": V(("time", "y", "x"), "f4"), "time_bnds": V(("time", "nv"), "f8")},
        "statics": {"lat_bnds": V(("y", "x", "corner"), "f8")},
        "coords": {
            "y": C(("y",), np.arange(8.0), attrs={"bounds": "y_bnds"}),
            "y_bnds": C(("y", "nv"), np.zeros((8, 2))),
            "lat": C(("y", "x"), dtype="f8", attrs={"bounds": "lat_bnds"}),
            "height": C((), 2.0, attrs={"bounds": "height_bnds"}),
            "height_bnds": C(("nv",), [1.0, 3.0]),
        },
        **changes,
    }
    return make_schema(**parts)


def test_boundary_variables_belong_to_their_coordinates() -> None:
    """CF section 7.1: they are named by ``bounds`` alone, and have no ``coordinates`` of their own."""
    schema = bounded()
    for form in (schema, StreamSchema.from_json(resolve_layout(schema, 2).to_json())):
        assert {n: a.attrs.get("coordinates") for n, a in form.arrays.items() if a.attrs.get("coordinates")} == {
            "t": "lat height"
        }


def test_vertices_are_never_partitioned() -> None:
    """Regions are over the dims of what is no boundary variable, whoever writes it."""
    schema = bounded()
    assert schema.partitioned_dims == ("y", "x")
    series = {"energy": V(("time",), "f8"), "time_bnds": V(("time", "nv"), "f8")}
    assert bounded(variables=series).partitioned_dims == ("y", "x")
    # Shared with a variable that is none, it is a dim like others.
    assert bounded(variables={**schema.variables, "flux": V(("time", "nv"), "f4")}).partitioned_dims == ("y", "x", "nv")
    climatology = ms.AppendTime(units="days since 2000-01-01", attrs={"climatology": "time_bnds"})
    assert bounded(time=climatology).partitioned_dims == ("y", "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variables": {"t": V(("time", "y"), "f4")}}, "'time', attribute 'bounds': 'time_bnds' is no array of this"),
        ({"time": ms.AppendTime(units="s", attrs={"bounds": 5})}, "'time', attribute 'bounds': 5 is no array"),
        (
            {"variables": {"t": V(("time", "y"), "f4"), "time_bnds": V(("time", "y", "nv"), "f8")}},
            r"'time_bnds' has the dims \('time', 'y', 'nv'\); bounds have those of 'time' .*, \('time', 'nv'\)$",
        ),
        (
            {"variables": {"t": V(("time", "y"), "f4"), "time_bnds": V(("time",), "f8")}},
            r"'time_bnds' has the dims \('time',\)",
        ),
        (
            {"variables": {"t": V(("time", "y"), "f4"), "time_bnds": V(("time", "corner"), "f8")}},
            "dim 'corner' of 'time_bnds' has length 4; an interval has 2 ends",
        ),
        (
            {"coords": {"h": C((), 1.0, attrs={"bounds": "b"}), "b": C((), 1.0)}, "statics": {}},
            r"'h', attribute 'bounds': 'b' has the dims \(\); .*, \('nv',\)",
        ),
        (
            {"coords": {"h": C((), 1.0, attrs={"bounds": "b"}), "b": C(("nv",), ["a", "b"])}, "statics": {}},
            "'b' holds strings; bounds are numbers",
        ),
        (
            {"variables": {"t": V(("time", "y"), "f4"), "time_bnds": V(("time", "nv"), "f8", attrs={"units": "s"})}},
            "units of 'time_bnds' is 's', that of 'time' is 'days since 2000-01-01'; leave it out of 'time_bnds'",
        ),
        (
            {"variables": {"t": V(("time", "y"), "f4"), "time_bnds": V(("time", "nv"), "datetime64[s]")}},
            r"days since 2000-01-01'; it follows from dtype datetime64\[s\]; give 'time_bnds' that of 'time', float64$",
        ),
        (
            {
                "time": ms.AppendTime(units="days since 1970-01-01", calendar="julian", attrs={"bounds": "time_bnds"}),
                "variables": {"t": V(("time", "y"), "f4"), "time_bnds": V(("time", "nv"), "datetime64[D]")},
            },
            "calendar of 'time_bnds' is 'proleptic_gregorian', that of 'time' is 'julian'; it follows from",
        ),
        (
            {
                "coords": {
                    "h": C((), np.datetime64("2000-01-01", "D"), attrs={"bounds": "b"}),
                    "b": C(("nv",), np.array([0, 1], "timedelta64[D]")),
                },
                "statics": {},
            },
            r"units of 'b' is 'days', that of 'h' is 'days since 1970-01-01'; .* that of 'h', datetime64\[D\]$",
        ),
    ],
)
def test_bounds_that_do_not_fit_are_refused(changes, message) -> None:
    """Both arrays are named, and what is wrong with the second."""
    with pytest.raises(SchemaError, match=message) as caught:
        bounded(**changes)
    assert caught.value.kind == "bounds"


def test_bounds_may_repeat_what_their_coordinate_says() -> None:
    """CF section 7.1: the same units are no contradiction."""
    attrs = {"units": "days since 2000-01-01", "calendar": "proleptic_gregorian", "long_name": "ends"}
    schema = bounded(variables={"t": V(("time", "y"), "f4"), "time_bnds": V(("time", "nv"), "f8", attrs=attrs)})
    assert schema.arrays["time_bnds"].attrs == attrs


def test_bounds_may_be_dates_in_the_units_of_their_coordinate() -> None:
    """The units and the calendar that follow from the dtype count like those that are given."""
    schema = bounded(
        time=ms.AppendTime(units="seconds since 1970-01-01", attrs={"bounds": "time_bnds"}),
        variables={"t": V(("time", "y"), "f4"), "time_bnds": V(("time", "nv"), "datetime64[s]")},
        coords={
            "day": C((), np.datetime64("2000-01-01", "D"), attrs={"bounds": "day_bnds"}),
            "day_bnds": C(("nv",), np.array(["1999-12-31", "2000-01-02"], "datetime64[D]")),
        },
        statics={},
    )
    assert schema.arrays["time_bnds"].zarr_attrs["units"] == schema.time_array.attrs["units"]


# ---- _FillValue --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "encoded"),
    [
        ("float64", -999.0, "AAAAAAA4j8A="),  # printf '\0\0\0\0\0\x38\x8f\xc0' | base64
        ("float64", math.nan, "AAAAAAAA+H8="),  # '\0\0\0\0\0\0\xf8\x7f'
        ("float32", np.float32(0.1), "AAAAoJmZuT8="),  # 0.1 as a float32 is 0x3fb99999a0000000 as a float64
        ("float32", 0.1, "AAAAoJmZuT8="),
        ("float16", np.int64(-2), "AAAAAAAAAMA="),
        ("complex64", complex(-2, math.nan), ["AAAAAAAAAMA=", "AAAAAAAA+H8="]),
        ("int16", -32768, -32768),
        ("int16", np.float64(5), 5),
        ("uint64", 2**64 - 1, 2**64 - 1),
        ("bool", np.True_, True),
    ],
)
def test_missing_values_have_the_form_of_xarray(dtype, value, encoded) -> None:
    """Floats as base64 of a float64, rounded to the dtype first; a second pass changes nothing."""
    dtype = np.dtype(dtype)
    attrs, found = with_encoded_fill_value("t", {"units": "K", "_FillValue": value}, dtype)
    assert attrs == {"units": "K", "_FillValue": encoded}
    assert type(attrs["_FillValue"]) is type(encoded)
    assert found.dtype == dtype
    again, same = with_encoded_fill_value("t", attrs, dtype)
    assert again == attrs
    assert same.tobytes() == found.tobytes()


def test_a_missing_value_fills_what_nobody_writes() -> None:
    """Unless there is a fill value of its own, ``_FillValue`` is it; None is as good as none."""
    schema = make_schema(
        variables={
            "a": V(("time", "y"), "i4", attrs={"_FillValue": -1}),
            "b": V(("time", "y"), "i4", attrs={"_FillValue": -1}, fill_value=7),
            "c": V(("time", "y"), "i4", attrs={"_FillValue": None}),
        },
    )
    assert [schema.arrays[n].fill.item() for n in "abc"] == [-1, 7, 0]
    assert schema.arrays["c"].attrs == {}


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("int8", 128, "variable 't', attribute '_FillValue': fill value 128 does not fit int8"),
        ("int16", 0.5, "fill value 0.5 does not fit int16"),
        ("uint8", -1, "fill value -1 does not fit uint8"),
        ("float32", 1e39, "fill value 1e.39 does not fit float32"),
        ("int16", "AAAAAAAA", "fill value 'AAAAAAAA' does not fit int16"),
        ("float32", "missing", "variable 't': _FillValue 'missing' is no number; give a number of float32"),
        ("float32", "AAAA", "_FillValue 'AAAA' is no number"),
        ("complex64", ["AAAAAAAAAMA="], "is no number; give a number of complex64"),
        ("complex64", [1.0, 2.0], "is no number; give a number of complex64"),
        ("bool", 2, "fill value 2 does not fit bool"),
        ("U3", "abc", "variable 't': xarray has no _FillValue of <U3; leave it out"),
    ],
)
def test_a_missing_value_that_does_not_fit_is_refused(dtype, value, message) -> None:
    """The array, the value and the dtype are named."""
    with pytest.raises(SchemaError, match=message) as caught:
        make_schema(coords={"t": C((), np.zeros((), dtype), attrs={"_FillValue": value})})
    assert caught.value.kind == "fill_value"


def test_times_are_never_missing() -> None:
    """CF section 2.5.1: a coordinate variable has no missing values; the time coordinate says so at once."""
    with pytest.raises(SchemaError, match="time attribute '_FillValue': a time is never missing; leave it out"):
        ms.AppendTime(units="s", attrs={"_FillValue": -1.0})


def test_no_array_has_a_missing_value_by_itself() -> None:
    """Zarr's fill value is no ``_FillValue``: zeros are zeros for whoever masks."""
    schema = make_schema(variables={n: V(("time", "y"), n) for n in DTYPES})
    assert [n for n, a in schema.arrays.items() if "_FillValue" in a.attrs] == []

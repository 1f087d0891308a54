"""What a user writes down: time is checked at once, the rest by the schema."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import struct

import numpy as np
import pytest

from mpistream.description import AppendTime, Coordinate, IndexedTime, Variable
from mpistream.errors import SchemaError

both = pytest.mark.parametrize(
    "make", [AppendTime, functools.partial(IndexedTime, [0.0, 1.0])], ids=["append", "indexed"]
)


def test_time_has_a_calendar_without_being_asked() -> None:
    """The default calendar is CF's proleptic_gregorian, with no more attributes."""
    time = AppendTime(units="seconds since 2000-01-01")
    assert (time.units, time.calendar, time.attrs) == ("seconds since 2000-01-01", "proleptic_gregorian", {})


@both
@pytest.mark.parametrize("value", ["", None, 5, b"s"])
@pytest.mark.parametrize("name", ["units", "calendar"])
def test_time_without_units_or_calendar_is_refused(make, name, value) -> None:
    """Both are non-empty strings; the message shows what was given."""
    with pytest.raises(SchemaError) as caught:
        make(**{"units": "s", name: value})
    assert str(caught.value) == f"time {name} {value!r}: give a non-empty string"
    assert caught.value.kind == "time"


@both
def test_time_attributes_are_checked_at_once(make) -> None:
    """NaN is refused with the path to it."""
    with pytest.raises(SchemaError, match=r"time attributes\['valid_max'\] is nan") as caught:
        make(units="s", attrs={"valid_max": math.nan})
    assert caught.value.kind == "attribute"


@both
@pytest.mark.parametrize("name", ["units", "calendar"])
def test_units_and_calendar_have_arguments_of_their_own(make, name) -> None:
    """They can't be given twice: the fingerprint holds them."""
    with pytest.raises(SchemaError) as caught:
        make(units="s", attrs={name: "days since 1970-01-01"})
    assert str(caught.value) == f"time attribute {name!r} stands in attrs; give {name}="
    assert caught.value.kind == "time"


@pytest.mark.parametrize(
    "item",
    [AppendTime(units="s"), Variable(("time",), "f4"), Coordinate(("y",), [0.0])],
    ids=lambda i: type(i).__name__,
)
def test_descriptions_do_not_change(item) -> None:
    """A schema may keep them as they are."""
    name = dataclasses.fields(item)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(item, name, "other")


def test_variables_and_coordinates_need_no_more_than_dims() -> None:
    """Layout, codec and fill value are open by default; attributes are empty."""
    variable = Variable(("time", "y"), "f4")
    assert (variable.shard_shape, variable.chunk_shape, variable.codec, variable.fill_value) == (None,) * 4
    assert variable.attrs == {}
    coordinate = Coordinate(("y",))
    assert (coordinate.values, coordinate.dtype, coordinate.fill_value, coordinate.digest) == (None,) * 4
    assert coordinate.attrs == {}


def test_fixed_times_are_copied_and_digested() -> None:
    """The digest is over the little-endian bytes; the caller's array may change afterwards."""
    given = np.array([-1.0, 0.25, 7.0], ">f8")
    time = IndexedTime(given, units="days since 1850-01-01", calendar="noleap", attrs={"long_name": "t"})
    given[...] = 0
    assert time.times is not None
    assert (time.times.dtype, time.times.tolist()) == (np.dtype("float64"), [-1.0, 0.25, 7.0])
    assert not time.times.flags.writeable
    assert (time.n_records, time.digest) == (3, hashlib.sha256(struct.pack("<3d", -1.0, 0.25, 7.0)).hexdigest())
    assert (time.units, time.calendar, time.attrs) == ("days since 1850-01-01", "noleap", {"long_name": "t"})
    assert (IndexedTime(range(3), units="s").calendar, IndexedTime([5], units="s").attrs) == ("proleptic_gregorian", {})


def test_fixed_times_may_be_dates() -> None:
    """They are the numbers that the same dates are as times of records, and so is their digest."""
    dates = ["2000-01-01", "2000-01-01T00:20", "2000-01-02T12"]
    expected = IndexedTime([0.0, 1 / 72, 1.5], units="days since 2000-01-01")
    minutes = np.array(dates, "M8[m]")
    for times in (minutes, minutes.astype("M8[ns]"), minutes.tolist(), list(minutes)):
        assert IndexedTime(times, units="days since 2000-01-01").digest == expected.digest
    with pytest.raises(SchemaError, match="finite and increasing"):
        IndexedTime(np.array(dates[::-1], "M8[m]"), units="days since 2000-01-01")


def test_fixed_times_of_a_stored_schema() -> None:
    """Their number and digest stand for them."""
    time = IndexedTime(None, units="s", n_records=3, digest="ab")
    assert (time.times, time.n_records, time.digest) == (None, 3, "ab")


@pytest.mark.parametrize(
    ("times", "part"),
    [
        ([], "shape (0,)"),
        (5.0, "shape ()"),
        ([[1.0, 2.0]], "shape (1, 2)"),
        ([True], "dtype bool"),
        (["0"], "dtype <U1"),
        ([1j], "dtype complex128"),
        (np.array(["2000-01-01"], "M8[s]"), "time units 's': a date can be counted in days"),
        (np.array([5], "m8[s]"), "dtype timedelta64[s]"),
        ([np.datetime64("2000-01-01"), 5], "dtype object"),
        ([0.0, 0.0], "finite and increasing"),
        ([1.0, 0.0], "finite and increasing"),
        ([0.0, math.nan], "finite and increasing"),
        ([0.0, math.inf], "finite and increasing"),
        ([2**53, 2**53 + 1], "finite and increasing"),
        (None, "times is None: give the time of every record"),
    ],
    ids=str,
)
def test_fixed_times_that_can_not_be_are_refused(times, part) -> None:
    """A sequence of numbers, increasing as float64."""
    with pytest.raises(SchemaError) as caught:
        IndexedTime(times, units="s")
    assert part in str(caught.value)
    assert caught.value.kind == "time"


def test_fixed_times_may_span_all_floats() -> None:
    """Their difference need not be one."""
    assert IndexedTime([-1.7e308, 1.7e308], units="s").n_records == 2

"""What a user writes down: time is checked at once, the rest by the schema."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mpistream.description import AppendTime, Coordinate, Variable
from mpistream.errors import SchemaError


def test_time_has_a_calendar_without_being_asked() -> None:
    """The default calendar is CF's proleptic_gregorian, with no more attributes."""
    time = AppendTime(units="seconds since 2000-01-01")
    assert (time.units, time.calendar, time.attrs) == ("seconds since 2000-01-01", "proleptic_gregorian", {})


@pytest.mark.parametrize("value", ["", None, 5, b"s"])
@pytest.mark.parametrize("name", ["units", "calendar"])
def test_time_without_units_or_calendar_is_refused(name, value) -> None:
    """Both are non-empty strings; the message shows what was given."""
    with pytest.raises(SchemaError) as caught:
        AppendTime(**{"units": "s", name: value})
    assert str(caught.value) == f"time {name} {value!r}: give a non-empty string"
    assert caught.value.kind == "time"


def test_time_attributes_are_checked_at_once() -> None:
    """NaN is refused with the path to it."""
    with pytest.raises(SchemaError, match=r"time attributes\['valid_max'\] is nan") as caught:
        AppendTime(units="s", attrs={"valid_max": math.nan})
    assert caught.value.kind == "attribute"


@pytest.mark.parametrize("name", ["units", "calendar"])
def test_units_and_calendar_have_arguments_of_their_own(name) -> None:
    """They can't be given twice: the fingerprint holds them."""
    with pytest.raises(SchemaError) as caught:
        AppendTime(units="s", attrs={name: "days since 1970-01-01"})
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

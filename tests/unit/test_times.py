"""Dates as numbers, compared with integers of other calendars' own arithmetic and with hand-made quotients."""

from __future__ import annotations

import datetime as dt
import random
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.errors import SchemaError
from mpistream.times import check_units, date_text, encode_time, encode_times, is_date

GREGORIAN = "proleptic_gregorian"
SIX = "2000-01-01T06:00:00"


def zone(hours: float) -> dt.timezone:
    return dt.timezone(dt.timedelta(hours=hours))


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("days since 2000-01-01", 0.25),
        ("day since 2000-01-01T00:00:00Z", 0.25),
        ("d since 2000-1-1 0", 0.25),
        ("hours since 2000-01-01", 6.0),
        ("h since 2000-01-01 02:30", 3.5),
        ("minutes since 2000-01-01 05:59:30", 0.5),
        ("seconds since 2000-01-01 06:00:00.25", -0.25),
        ("SECONDS SINCE 2000-01-01 UTC", 21600.0),
        ("milliseconds since 2000-01-01 06:00", 0.0),
        ("microseconds since 2000-01-01", 21600e6),
        ("nanoseconds since 2000-01-01 00:00:00", 21600e9),
        ("hours since 2000-01-01 00:00 +02:00", 8.0),
        ("hours since 2000-01-01 00:00:00 -5", 1.0),
        ("hours since 2000-01-01 00:00:00 +0130", 7.5),
        ("days since 1999-02-28", 307.25),
        ("days since 0000-03-01", 730425.25),
        ("days since -0001-03-01", 730791.25),
    ],
)
def test_a_date_is_counted_in_the_units(units, expected) -> None:
    """Days to nanoseconds, since a date with or without a time of day and an offset."""
    for t in (np.datetime64(SIX), np.datetime64(SIX, "ns"), dt.datetime(2000, 1, 1, 6), np.array(SIX, "M8[m]")):
        found = encode_time(t, units, GREGORIAN)
        assert (type(found), found) == (float, expected)


@pytest.mark.parametrize(
    "t",
    [
        dt.datetime(2000, 1, 1, 8, tzinfo=zone(2)),
        dt.datetime(1999, 12, 31, 19, tzinfo=zone(-11)),
        np.datetime64("2000-01-01T06", "h"),
        np.array(dt.datetime(2000, 1, 1, 6), object),
    ],
    ids=repr,
)
def test_the_same_point_in_time_is_the_same_number(t) -> None:
    """An aware datetime is taken to UTC, a naive one is in UTC."""
    assert encode_time(t, "days since 2000-01-01", GREGORIAN) == 0.25
    assert date_text(t) == date_text(dt.datetime(2000, 1, 1, 6)) == "946706400000000000000000000 as"


@pytest.mark.parametrize(
    ("t", "units", "expected"),
    [
        (np.datetime64("2024", "Y"), "days since 2024-01-01", 0.0),
        (np.datetime64("2024-03", "M"), "days since 2024-01-01", 60.0),
        (np.datetime64("1970-01-08", "W"), "days since 1970-01-01", 7.0),
        (np.datetime64(7 * 10**18, "as"), "seconds since 1970-01-01", 7.0),
        (np.array(3, "M8[12h]"), "days since 1970-01-01", 1.5),
        (dt.datetime.min, "days since 1970-01-01", -719162.0),
        (dt.datetime.max, "microseconds since 9999-12-31", 86399999999.0),
        (dt.datetime(1, 1, 1, tzinfo=zone(14)), "hours since 0001-01-01", -14.0),
        # A third of a day's third, a nanosecond after 50 years: each the float next to the exact number.
        (np.datetime64("2000-01-01T00:20"), "days since 2000-01-01", 1 / 72),
        (np.datetime64("2020-01-01T00:00:00.000000001"), "seconds since 2020-01-01", 1e-9),
        (np.datetime64("2020-01-01T00:00:00.123456789"), "hours since 1970-01-01", 1577836800123456789 / 3600e9),
    ],
    ids=str,
)
def test_dates_of_any_unit_are_exact(t, units, expected) -> None:
    """Nothing is lost before the one division; Python's division of integers is the nearest float."""
    assert encode_time(t, units, GREGORIAN) == expected


def test_steps_below_a_day_are_exact() -> None:
    """Every ten minutes of a century, in days: the float64 nearest to n / 144, for each kind of date."""
    rng = random.Random(5)
    start = np.datetime64("1950-01-01", "m")
    for n in rng.sample(range(144 * 36525), 300):
        t = start + np.timedelta64(10 * n, "m")
        found = {encode_time(x, "days since 1950-01-01", "standard") for x in (t, t.astype("M8[ns]"), t.item())}
        assert found == {float(Fraction(n, 144))}


def test_an_array_of_dates() -> None:
    """Element by element the same numbers; numbers and everything else stay as they are."""
    dates = np.array(["2000-01-01", "2000-01-01T12", "2000-01-03"], "M8[h]")
    for times in (dates, dates.astype("M8[ns]"), dates.astype(object), np.array([*dates, dt.datetime.max], object)):
        found = encode_times(times, "days since 2000-01-01", GREGORIAN)
        assert (found.dtype, found[:3].tolist()) == (np.dtype("float64"), [0.0, 0.5, 2.0])
    for other in (np.arange(3), np.array([], "M8[s]"), np.array([1, None], object), np.array([], object)):
        assert encode_times(other, "months since 2000-01-01", GREGORIAN) is other


@pytest.mark.parametrize("t", [5, 2.5, np.float32(1), np.int64(3), np.array(2.0), None, "2000-01-01", dt.date.max])
def test_what_is_no_date_is_left_alone(t) -> None:
    """Numbers are in the schema's units already, whatever these are; others are for someone else to refuse."""
    assert not is_date(t)
    assert encode_time(t, "months since whenever", "none") is t


def refused(t: Any, units: str = "days since 2000-01-01", calendar: str = GREGORIAN) -> str:
    with pytest.raises(SchemaError) as caught:
        encode_time(t, units, calendar)
    assert caught.value.kind == "time"
    return str(caught.value)


def test_nat_is_no_time() -> None:
    """Neither alone nor in an array nor as text."""
    nat = np.datetime64("NaT", "s")
    assert "NaT is no time of a record" in refused(nat)
    for call in (lambda: date_text(nat), lambda: encode_times(np.array([nat], "M8[s]"), "days since 2000-01-01", "x")):
        with pytest.raises(SchemaError, match="NaT is no time of a record"):
            call()


@pytest.mark.parametrize(
    "units",
    [
        "months since 2000-01-01",
        "years since 2000-01-01",
        "fortnights since 2000-01-01",
        "s",
        "days since start",
        "days after 2000-01-01",
        "days since 2000-01-01 noon",
        "days since 2000-01-01T",
        "",
    ],
)
def test_units_without_a_fixed_length_take_numbers_only(units) -> None:
    """The message says what dates can be counted in."""
    message = refused(dt.datetime(2000, 1, 1), units)
    assert message.startswith(f"time units {units!r}: a date can be counted in days, hours")
    assert message.endswith("give the time as a number in the schema's units")
    assert encode_time(2.5, units, GREGORIAN) == 2.5


@pytest.mark.parametrize("date", ["2001-02-29", "2000-13-01", "2000-00-10"])
@pytest.mark.parametrize("calendar", [GREGORIAN, "standard"])
def test_a_reference_that_is_no_date_is_refused(date, calendar) -> None:
    """Only when it is needed: numbers need it not."""
    assert "its reference date is none" in refused(dt.datetime(2000, 1, 1), f"days since {date}", calendar)


@pytest.mark.parametrize("date", ["1500-02-30", "1582-10-10", "0000-01-01", "1400-13-01"])
def test_a_reference_that_is_not_in_the_mixed_calendar_is_refused(date) -> None:
    """``standard`` has no year 0, and no days between its Julian and its Gregorian part."""
    assert "its reference date is none" in refused(dt.datetime(2000, 1, 1), f"days since {date}", "standard")


@pytest.mark.parametrize("calendar", ["noleap", "365_day", "360_day", "julian", "all_leap", "none", "tai"])
def test_other_calendars_take_no_gregorian_dates(calendar) -> None:
    """The message says which object to give, with the calendar's first name."""
    name = {"365_day": "noleap"}.get(calendar, calendar)
    for t in (np.datetime64(SIX), dt.datetime(2000, 1, 1)):
        assert f"give it as cftime.datetime(..., calendar={name!r})" in refused(t, calendar=calendar)


def test_before_the_gregorian_calendar_a_date_is_one_of_two() -> None:
    """In ``standard`` 1582-10-15 is the first day that numpy and datetime know by the same name."""
    assert encode_time(dt.datetime(1582, 10, 15), "days since 1582-10-04", "standard") == 1.0
    assert encode_time(dt.datetime(1582, 10, 15), "days since 1582-10-04", GREGORIAN) == 11.0
    assert "before 1582-10-15" in refused(dt.datetime(1582, 10, 14), calendar="gregorian")
    with pytest.raises(SchemaError, match="before 1582-10-15"):
        encode_times(np.array(["2000-01-01", "1500-01-01"], "M8[D]"), "days since 2000-01-01", "standard")


def test_a_date_that_days_have_no_room_for_is_refused() -> None:
    """datetime64 counts years up to 2^63."""
    assert "out of range" in refused(np.datetime64(2**62, "Y"))


# ---- pandas and cftime, whose objects are taken without importing them here --------------------------


def test_pandas_dates_have_nanoseconds_and_zones() -> None:
    """They are datetimes, but say less than they hold when they are taken for one."""
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    t = pandas.Timestamp("2000-01-01T06:00:00.000000001")
    assert encode_time(t, "nanoseconds since 2000-01-01 06:00", GREGORIAN) == 1.0
    assert encode_time(pandas.Timestamp("2000-01-01T08:00", tz="+02:00"), "hours since 2000-01-01", GREGORIAN) == 6.0
    index = pandas.date_range("2000-01-01", periods=3, freq="6h")
    assert encode_times(np.asarray(index), "hours since 2000-01-01", GREGORIAN).tolist() == [0.0, 6.0, 12.0]
    assert "NaT" in refused(pandas.NaT)


MICROSECONDS = {"days": 86400 * 10**6, "hours": 3600 * 10**6, "minutes": 60 * 10**6, "seconds": 10**6}
CALENDARS = ("standard", GREGORIAN, "noleap", "all_leap", "360_day", "julian")


@pytest.mark.parametrize("calendar", CALENDARS)
def test_dates_of_every_calendar_are_exact(calendar) -> None:
    """The nearest float to cftime's own number of whole microseconds, which is an integer."""
    cftime = pytest.importorskip("cftime", reason="needs cftime")
    rng = random.Random(calendar)

    def date(**fixed: int) -> Any:
        year, month = rng.randint(1, 3000), rng.randint(1, 12)
        seconds, microsecond = rng.randrange(86400), rng.randrange(10**6)
        clock = (seconds // 3600, seconds // 60 % 60, seconds % 60)
        day = rng.randint(15, 28)
        return cftime.datetime(year, month, day, *clock, fixed.get("microsecond", microsecond), calendar=calendar)

    for _ in range(100):
        reference, t = date(microsecond=0), date()
        since = f"since {reference.strftime('%Y-%m-%d %H:%M:%S')}"
        exact = cftime.date2num(t, f"microseconds {since}", calendar=calendar)
        assert isinstance(exact, np.integer)
        gregorian = []
        if calendar in ("standard", GREGORIAN) and (t.year, t.month, t.day) >= (1582, 10, 15):
            gregorian = [np.datetime64(t.isoformat()), dt.datetime.fromisoformat(t.isoformat())]
        for unit, length in MICROSECONDS.items():
            for x in (t, *gregorian):
                assert encode_time(x, f"{unit} {since}", calendar) == float(Fraction(int(exact), length))


def test_names_of_calendars_that_mean_the_same() -> None:
    """CF has two names for some; cftime's and the schema's need not be the same one."""
    cftime = pytest.importorskip("cftime", reason="needs cftime")
    for calendar, other in (("noleap", "365_day"), ("all_leap", "366_day"), ("standard", "gregorian")):
        for a, b in ((calendar, other), (other, calendar), (calendar, calendar.upper())):
            t = cftime.datetime(2001, 3, 1, 12, calendar=a)
            assert encode_time(t, "days since 2001-02-28 06:00 +06:00", b) == {"all_leap": 2.5}.get(calendar, 1.5)


def test_cftime_dates_of_the_two_gregorian_calendars_are_the_same_since_1582() -> None:
    """cftime's default is ``standard``, ours ``proleptic_gregorian``; before 1582 they are not taken for each other."""
    cftime = pytest.importorskip("cftime", reason="needs cftime")
    t = cftime.datetime(2000, 1, 1, 6, 0, 0, 5)
    assert t.calendar == "standard"
    assert encode_time(t, "microseconds since 2000-01-01", GREGORIAN) == 6 * 3600e6 + 5
    assert "its calendar is 'standard'" in refused(cftime.datetime(1500, 1, 1))
    t = cftime.datetime(1500, 1, 1, calendar=GREGORIAN)
    assert "its calendar is 'proleptic_gregorian'" in refused(t, calendar="standard")
    assert encode_time(cftime.datetime(1500, 1, 3), "days since 1500-01-01", "standard") == 2.0


def test_a_cftime_date_of_another_calendar_is_refused() -> None:
    """Both calendars stand in the message."""
    cftime = pytest.importorskip("cftime", reason="needs cftime")
    message = refused(cftime.datetime(2000, 1, 1, calendar="noleap"))
    assert "its calendar is 'noleap'" in message
    assert "calendar 'proleptic_gregorian'" in message
    assert "its calendar is 'standard'" in refused(cftime.datetime(2000, 1, 1), calendar="noleap")
    assert "its calendar is ''" in refused(cftime.datetime(2000, 1, 1, calendar=""))
    bad = refused(cftime.datetime(2000, 1, 1, calendar="noleap"), "days since 2000-02-29", "noleap")
    assert "its reference date is none" in bad


def test_the_text_of_a_cftime_date_has_its_calendar() -> None:
    """The same name is another point in time in another calendar."""
    cftime = pytest.importorskip("cftime", reason="needs cftime")
    assert date_text(cftime.datetime(2000, 1, 1, 6, calendar="noleap")) == "2000-01-01T06:00:00 noleap"
    times = np.array([cftime.datetime(2000, 2, d, calendar="360_day") for d in (29, 30)])
    assert encode_times(times, "hours since 2000-01-01", "360_day").tolist() == [58 * 24.0, 59 * 24.0]


GOOD_UNITS = [
    ("seconds since 2000-01-01", "standard"),
    ("days since 2000-1-1", "noleap"),
    ("msec since 2000-01-01T12:00:00Z", "proleptic_gregorian"),
    ("microsecs since 2000-01-01 12:00:00.5 +05:30", "gregorian"),
    ("nanoseconds since 2000-01-01T06:00", "standard"),
    ("hours since 2000-02-30 23:59:59", "360_day"),
    ("hours since 2000-02-29", "366_day"),
    ("hours since 1900-02-29", "julian"),
    ("hours since -0001-02-28", "standard"),
    ("days since 0000-01-01", "noleap"),
    ("days since 0000-02-29", "proleptic_gregorian"),
    ("months since 2000-01-01", "360_day"),
    ("common_years since 2000-01-01", "365_day"),
    ("s", "standard"),
    ("fortnights", "standard"),
]
BAD_UNITS = [
    ("fortnights since x", "standard", "give a unit, 'since' and a date"),
    ("fortnights since 2000-01-01", "standard", "'fortnights' is none that readers know"),
    ("us since 2000-01-01", "standard", "'us' is none that readers know; give days, "),
    ("seconds since", "standard", "give a unit, 'since' and a date"),
    ("since 2000-01-01", "standard", "give a unit, 'since' and a date"),
    ("hours since 2000-1", "noleap", "as in 'hours since 2000-01-31'"),
    ("hours since 2000-01-01 (start)", "standard", "give a unit, 'since' and a date"),
    ("hours since 2000-13-01", "standard", "has no 2000-13-01"),
    ("hours since 2000-00-01", "noleap", "has no 2000-00-01"),
    ("hours since 2001-02-29", "standard", "has no 2001-02-29"),
    ("hours since 1900-02-29", "standard", "has no 1900-02-29"),
    ("hours since 2000-02-29", "noleap", "the calendar 'noleap' has no 2000-02-29"),
    ("hours since 2000-01-31", "360_day", "has no 2000-01-31"),
    ("hours since 1582-10-10", "standard", "has no 1582-10-10"),
    ("hours since 0000-01-01", "standard", "has no 0000-01-01"),
    ("hours since 2000-01-01 24:00", "standard", "give a time of day from 00:00:00 to 23:59:59"),
    ("hours since 2000-01-01 00:60", "standard", "give a time of day"),
    ("hours since 2000-01-01 00:00:60", "standard", "give a time of day"),
    ("days since 2000-01-01", "lunar", "calendar 'lunar': give one of standard, proleptic_gregorian, "),
    ("s", "none", "calendar 'none': give one of standard, "),
    ("months since 2000-01-01", "proleptic_gregorian", "no reader makes dates of 'months' in the calendar"),
    ("months since 2000-01-01", "noleap", "only of months in '360_day' and of common_years in 'noleap'; give days"),
    ("common_year since 2000-01-01", "360_day", "to resume a store that has these units, leave schema out"),
    ("years since 2000-01-01", "noleap", "no reader makes dates of 'years' in the calendar 'noleap'"),
    ("year since 2000-01-01", "360_day", "no reader makes dates of 'year'"),
]


@pytest.mark.parametrize(("units", "calendar"), GOOD_UNITS)
def test_units_and_calendars_of_cf_are_taken(units: str, calendar: str) -> None:
    check_units(units, calendar)
    check_units(units, calendar.upper())


@pytest.mark.parametrize(("units", "calendar", "text"), BAD_UNITS)
def test_units_that_no_reader_decodes_are_refused(units: str, calendar: str, text: str) -> None:
    """By every description of time, so before anything is written; the message names them and the way out."""
    for make in (ms.AppendTime, lambda **time: ms.IndexedTime([0.0, 1.0], **time)):
        with pytest.raises(SchemaError) as caught:
            make(units=units, calendar=calendar)
        assert caught.value.kind == "time"
        assert str(caught.value).startswith("time ")
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("units", "calendar", "is_good"),
    [
        *((units, calendar, True) for units, calendar in GOOD_UNITS),
        *((units, calendar, False) for units, calendar, _ in BAD_UNITS if "since" in units and "(" not in units),
    ],
)
def test_xarray_agrees(units: str, calendar: str, is_good: bool) -> None:
    """It decodes what is taken, and refuses what is refused, but for words after the date, which it overlooks."""
    xr = pytest.importorskip("xarray", reason="needs xarray, from the extra test")
    time = ("time", np.array([0.0, 1.5]), {"units": units, "calendar": calendar})
    dataset = xr.Dataset(coords={"time": time})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if is_good:
            xr.decode_cf(dataset)
        else:
            with pytest.raises(ValueError, match="unable to decode"):
                xr.decode_cf(dataset)


@pytest.mark.filterwarnings("ignore:this date/calendar/year zero convention")
def test_reference_dates_are_those_of_calendars() -> None:
    """As cftime has them, around leap years, the reform of 1582 and the year 0."""
    cftime = pytest.importorskip("cftime", reason="needs cftime, from the extra test")
    for calendar in ("standard", "proleptic_gregorian", "julian", "noleap", "all_leap", "360_day"):
        for year in (-5, -4, -1, 0, 1, 4, 100, 1582, 1700, 2000, 2001):
            for month, day in ((1, 31), (2, 28), (2, 29), (2, 30), (4, 30), (4, 31), (10, 4), (10, 14), (13, 1)):
                if year == 0 and calendar in ("standard", "julian"):
                    continue  # cftime has them with a year 0, too; CF has not
                units = f"days since {year:05d}-{month:02d}-{day:02d}"
                is_refused = is_none = False
                try:
                    check_units(units, calendar)
                except SchemaError:
                    is_refused = True
                try:
                    cftime.datetime(year, month, day, calendar=calendar)
                except ValueError:
                    is_none = True
                assert (units, calendar, is_refused) == (units, calendar, is_none)

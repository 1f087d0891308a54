"""Dates as numbers: a point in time in the units and the calendar that a schema fixed.

A time on disk is a float64, a count of the schema's units since its reference date. A caller gives that number, or a
date: numpy.datetime64, datetime.datetime (pandas' is one) or cftime.datetime. A date becomes the float64 that is
nearest to the exact quotient: what comes before this one division is arithmetic of integers, in attoseconds, the
finest unit of numpy. A float64 has no room for the nanoseconds of a date, and the difference of two large floats has
lost its end.

numpy and datetime know one calendar, the Gregorian one, also before 1582; CF's ``standard`` is the same from
1582-10-15 on. Dates of all other calendars are cftime objects, and cftime subtracts them: exactly, in microseconds.

Source: CF conventions, section 4.4, "Time coordinate".
"""

from __future__ import annotations

import datetime as dt
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import SchemaError
from mpistream.names import cast_times

__all__ = ["TimeLike", "check_units", "date_text", "encode_time", "encode_times", "is_date"]

# And cftime.datetime, which has no type to name here.
TimeLike = float | np.datetime64 | dt.datetime

_SECOND = 10**18
_MICROSECOND = 10**12
_DAY = 86400 * _SECOND
# The names of UDUNITS that days to nanoseconds go by, as far as xarray and cftime know them.
_UNITS = {
    name: length
    for names, length in (
        ("day days d", _DAY),
        ("hour hours hr hrs h", 3600 * _SECOND),
        ("minute minutes min mins", 60 * _SECOND),
        ("second seconds sec secs s", _SECOND),
        ("millisecond milliseconds millisec millisecs msec msecs ms", 1000 * _MICROSECOND),
        ("microsecond microseconds microsec microsecs", _MICROSECOND),
        ("nanosecond nanoseconds", _MICROSECOND // 1000),
    )
    for name in names.split()
}
# Of numpy's units, without years and months, which have no fixed length.
_TICKS = {
    "W": 7 * _DAY,
    "D": _DAY,
    "h": 3600 * _SECOND,
    "m": 60 * _SECOND,
    **{unit: 1000**i for i, unit in enumerate(("as", "fs", "ps", "ns", "us", "ms", "s"))},
}
# Of no fixed length: a time in them is a number and no date. Where readers make dates of them, a calendar has one.
_MONTHS = {
    **dict.fromkeys(("month", "months"), "360_day"),
    **dict.fromkeys(("common_year", "common_years"), "noleap"),
    **dict.fromkeys(("year", "years"), None),
}
_SINCE = re.compile(
    r"\s*(?P<unit>\w+)\s+since\s+(?P<year>[+-]?\d{1,6})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"
    r"(?:(?:T|\s+)(?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<part>\d{1,18}))?)?)?)?"
    r"\s*(?P<zone>Z|UTC|GMT|(?P<sign>[+-])(?P<zone_hour>\d{1,2})(?::?(?P<zone_minute>\d{2}))?)?\s*",
    re.IGNORECASE,
)
_ALIASES = {"gregorian": "standard", "365_day": "noleap", "366_day": "all_leap"}
_GREGORIAN = ("standard", "proleptic_gregorian")
_CALENDARS = (*_GREGORIAN, "gregorian", "julian", "noleap", "365_day", "all_leap", "366_day", "360_day")
_MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EPOCH = dt.datetime(1970, 1, 1)
# Days since 1970-01-01 of 1582-10-15, and the Julian day number of 1970-01-01.
_FIRST_GREGORIAN = -141427
_JULIAN_DAY_OF_EPOCH = 2440588


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """What a date is counted in."""

    length: int
    """Of one unit, in attoseconds."""
    calendar: str
    date: tuple[int, int, int]
    time: int
    """Attoseconds from midnight of ``date`` to the reference, in UTC."""
    text: str

    def refused(self, t: Any, problem: str) -> SchemaError:
        return SchemaError(
            f"time {t!r}: {problem}; the schema has {self.text!r}, calendar {self.calendar!r}", kind="time"
        )


def check_units(units: str, calendar: str) -> None:
    """Check the units of a time coordinate, and its calendar: readers refuse a store whose dates they can't decode.

    Not collective.

    Parameters
    ----------
    units
        ``UNIT since DATE``; without "since" they are no dates for any reader, and anything.
    calendar
        One of CF.

    Raises
    ------
    SchemaError
        Kind ``time``: an unknown unit or calendar, no date, or one that the calendar lacks.
    """
    name = calendar.lower()
    if name not in _CALENDARS:
        raise SchemaError(f"time calendar {calendar!r}: give one of {', '.join(_CALENDARS)}", kind="time")
    if "since" not in units.lower():
        return
    found = _SINCE.fullmatch(units)
    if found is None:
        raise SchemaError(
            f"time units {units!r}: give a unit, 'since' and a date, as in 'hours since 2000-01-31' or "
            "'seconds since 2000-01-31 12:00:00'",
            kind="time",
        )
    unit = found["unit"].lower()
    if unit not in _UNITS and unit not in _MONTHS:
        raise SchemaError(
            f"time units {units!r}: {found['unit']!r} is none that readers know; give days, hours, minutes, seconds, "
            "milliseconds, microseconds or nanoseconds",
            kind="time",
        )
    if unit in _MONTHS and _MONTHS[unit] != _ALIASES.get(name, name):
        raise SchemaError(
            f"time units {units!r}: no reader makes dates of {found['unit']!r} in the calendar {calendar!r}, only of "
            "months in '360_day' and of common_years in 'noleap'; give days, or leave 'since' and the date out for "
            "numbers that are no dates; to resume a store that has these units, leave schema out",
            kind="time",
        )
    year, month, day = (int(found[part]) for part in ("year", "month", "day"))
    if not _has_date(year, month, day, _ALIASES.get(name, name)):
        date = f"{found['year']}-{found['month']}-{found['day']}"
        raise SchemaError(f"time units {units!r}: the calendar {calendar!r} has no {date}", kind="time")
    if any(int(found[part] or 0) >= n for part, n in (("hour", 24), ("minute", 60), ("second", 60))):
        raise SchemaError(f"time units {units!r}: give a time of day from 00:00:00 to 23:59:59", kind="time")


def _has_date(year: int, month: int, day: int, calendar: str) -> bool:
    if not 1 <= month <= len(_MONTH_DAYS):
        return False
    if calendar == "360_day":
        return 1 <= day <= 30  # noqa: PLR2004 (of every month)
    if calendar == "standard" and (1582, 10, 4) < (year, month, day) < (1582, 10, 15):
        return False
    is_julian = calendar == "julian" or (calendar == "standard" and (year, month, day) < (1582, 10, 15))
    if is_julian and year < 1:
        # The year before 1 is -1.
        if year == 0:
            return False
        year += 1
    is_leap = calendar == "all_leap" or (
        calendar != "noleap" and year % 4 == 0 and (is_julian or year % 100 != 0 or year % 400 == 0)
    )
    return 1 <= day <= _MONTH_DAYS[month - 1] + (month == 2 and is_leap)  # noqa: PLR2004 (February)


def is_date(t: Any) -> bool:
    """Return whether ``t`` is a date, and not a number.

    Not collective.
    """
    if isinstance(t, np.ndarray):
        return t.ndim == 0 and (t.dtype.kind == "M" or (t.dtype.kind == "O" and is_date(t[()])))
    return isinstance(t, np.datetime64 | dt.datetime) or _is_cftime(t)


def _is_cftime(t: Any) -> bool:
    # An object of that package can only be there once somebody has imported it.
    cftime = sys.modules.get("cftime")
    return cftime is not None and isinstance(t, cftime.datetime)


def encode_time(t: Any, units: str, calendar: str) -> Any:
    """Return a date as the float64 that is nearest to the exact number; what is no date is returned as it is.

    Not collective.

    Parameters
    ----------
    t
        A number, numpy.datetime64, datetime.datetime (in UTC if it has no zone) or cftime.datetime.
    units, calendar
        Of the schema's time.

    Raises
    ------
    SchemaError
        Kind ``time``: NaT, a date of another calendar, units in which dates can't be counted.
    """
    if not is_date(t):
        return t
    t = t[()] if isinstance(t, np.ndarray) else t
    parsed = _parsed(units, calendar)
    if _is_cftime(t):
        return _from_cftime(t, parsed)
    ticks, tick = _since_epoch(t)
    return _counts(parsed, [ticks], tick, t)[0]


def encode_times(times: NDArray[Any], units: str, calendar: str) -> NDArray[Any]:
    """Return an array of dates as float64; any other array is returned as it is.

    Not collective.

    Parameters
    ----------
    times
        Datetime64, or an object array of dates.
    units, calendar
        Of the schema's time.

    Raises
    ------
    SchemaError
        As `encode_time`.
    """
    if times.dtype.kind == "O" and times.size and all(map(is_date, times.flat)):
        return np.array([encode_time(t, units, calendar) for t in times.flat], "float64").reshape(times.shape)
    if times.dtype.kind != "M" or not times.size:
        return times
    ticks, tick = _ticks(times)
    values = _counts(_parsed(units, calendar), ticks.reshape(-1).tolist(), tick, times.min())
    return np.array(values, "float64").reshape(times.shape)


def date_text(t: Any) -> str:
    """Return a date as text: the same for the same point in time, whatever holds it.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``time`` for NaT.
    """
    t = t[()] if isinstance(t, np.ndarray) else t
    if _is_cftime(t):
        return f"{t.isoformat()} {t.calendar}"
    ticks, tick = _since_epoch(t)
    return f"{ticks * tick} as"


def _since_epoch(t: Any) -> tuple[int, int]:
    """Return a datetime or datetime64 as a number of ticks since 1970-01-01 in UTC, and their length."""
    if not hasattr(t, "to_datetime64") and isinstance(t, dt.datetime):
        delta = t.replace(tzinfo=None) - _EPOCH - (t.utcoffset() or dt.timedelta())
        return _microseconds(delta), _MICROSECOND
    # That of pandas has nanoseconds beyond those of its base class, and takes its zone off.
    ticks, tick = _ticks(np.asarray(t.to_datetime64() if hasattr(t, "to_datetime64") else t))
    return int(ticks), tick


def _microseconds(delta: dt.timedelta) -> int:
    return (delta.days * 86400 + delta.seconds) * 10**6 + delta.microseconds


def _ticks(times: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    if np.isnat(times).any():
        raise SchemaError("NaT is no time of a record; give a date", kind="time")
    unit, count = np.datetime_data(times.dtype)
    if unit not in _TICKS:
        days = cast_times(times, np.dtype("datetime64[D]"))
        if days is None:
            raise SchemaError(f"time {times.max()!r} is out of range", kind="time")
        times, unit, count = days, "D", 1
    return times.astype("int64"), count * _TICKS[unit]


def _counts(units: _Units, ticks: list[int], tick: int, first: Any) -> list[float]:
    """Return Gregorian dates in units; ``first`` stands for the earliest of them in messages."""
    if units.calendar not in _GREGORIAN:
        raise units.refused(first, f"give it as cftime.datetime(..., calendar={units.calendar!r})")
    if units.calendar == "standard" and min(ticks) * tick < _FIRST_GREGORIAN * _DAY:
        raise units.refused(
            first,
            "before 1582-10-15 it is a date of another calendar; give it as cftime.datetime(..., calendar='standard')",
        )
    try:
        days = _day_number(*units.date, units.calendar)
    except ValueError as error:
        raise units.refused(first, f"its reference date is none ({error}); give a number") from error
    reference, length = days * _DAY + units.time, units.length
    # Python divides integers of any size to the nearest float64.
    return [(n * tick - reference) / length for n in ticks]


def _day_number(year: int, month: int, day: int, calendar: str) -> int:
    """Return the days from 1970-01-01 to a date; ``standard`` is Julian before 1582-10-15 and has no year 0."""
    if calendar == "proleptic_gregorian" or (year, month, day) >= (1582, 10, 15):
        text = f"{year:05d}" if year < 0 else f"{year:04d}"
        return int(np.datetime64(f"{text}-{month:02d}-{day:02d}", "D").astype("int64"))
    february = 29 if year % 4 == 0 else 28
    lengths = dict(enumerate((31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), 1))
    if year < 1 or not 1 <= day <= lengths.get(month, 0) or (year, month, day) > (1582, 10, 4):
        raise ValueError(f"{year}-{month}-{day} is not in the calendar 'standard'")
    # The year is taken to begin with March, so that the leap day is its last.
    before_march = (14 - month) // 12
    years, months = year + 4800 - before_march, month + 12 * before_march - 3
    return day + (153 * months + 2) // 5 + 365 * years + years // 4 - 32083 - _JULIAN_DAY_OF_EPOCH


def _from_cftime(t: Any, units: _Units) -> Any:
    calendar = _ALIASES.get(t.calendar, t.calendar)
    if calendar != units.calendar:
        is_same = {calendar, units.calendar} <= set(_GREGORIAN) and (t.year, t.month, t.day) >= (1582, 10, 15)
        if not is_same:
            problem = f"its calendar is {calendar!r}; give it as cftime.datetime(..., calendar={units.calendar!r})"
            raise units.refused(t, problem)
        return encode_time(np.datetime64(t.isoformat(), "us"), units.text, units.calendar)
    cftime = sys.modules["cftime"]
    try:
        reference = cftime.datetime(*units.date, calendar=t.calendar, has_year_zero=t.has_year_zero)
    except ValueError as error:
        raise units.refused(t, f"its reference date is none ({error}); give a number") from error
    return (_microseconds(t - reference) * _MICROSECOND - units.time) / units.length


@lru_cache(maxsize=64)
def _parsed(units: str, calendar: str) -> _Units:
    found = _SINCE.fullmatch(units)
    length = _UNITS.get(found["unit"].lower()) if found else None
    if found is None or length is None:
        raise SchemaError(
            f"time units {units!r}: a date can be counted in days, hours, minutes, seconds, milliseconds, microseconds "
            "or nanoseconds since YYYY-MM-DD only; give the time as a number in the schema's units",
            kind="time",
        )
    hour, minute, second, zone_hour, zone_minute = (
        int(found[name] or 0) for name in ("hour", "minute", "second", "zone_hour", "zone_minute")
    )
    part = int((found["part"] or "0").ljust(18, "0"))
    offset = (zone_hour * 60 + zone_minute) * (-1 if found["sign"] == "-" else 1)
    return _Units(
        length=length,
        calendar=_ALIASES.get(calendar.lower(), calendar.lower()),
        date=(int(found["year"]), int(found["month"]), int(found["day"])),
        time=((hour * 60 + minute - offset) * 60 + second) * _SECOND + part,
        text=units,
    )

"""What may be said in a description: names, attributes and fill values, checked and made JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import SchemaError
from mpistream.strings import is_string, string_array, string_dtype

__all__ = [
    "DTYPES",
    "TIME_UNITS",
    "canonical_json",
    "cast_times",
    "check_name",
    "check_writers",
    "dtype_name",
    "fill_array",
    "fill_from_json",
    "fill_to_json",
    "json_object",
    "json_value",
    "stored_dtype",
]

# Zarr v3 core, "Core data types" and the complex extensions; the names are numpy's as well.
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)

# Units of datetime64 and timedelta64 with one length in seconds that CF and UDUNITS have a name for.
TIME_UNITS: Mapping[str, str] = {
    "D": "days",
    "h": "hours",
    "m": "minutes",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}

_KNOWN = (
    f"{', '.join(DTYPES)}, datetime64[...] or timedelta64[...] in {', '.join(TIME_UNITS)}, or for strings str or 'U<n>'"
)

# Far beyond any attribute, far below where Python's own json gives up.
_MAX_DEPTH = 64

# Linux NAME_MAX is 255 bytes; chunk keys with "." grow from the array's name only below its folder.
_MAX_NAME_NBYTES = 200


def check_writers(writers: Any, rearrange: Any) -> None:
    """Check who shall write, and whether pieces may move, as `Options` has them.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``option``.
    """
    is_count = isinstance(writers, int) and not isinstance(writers, bool) and writers > 0
    if not is_count and writers not in ("all", "node", "auto"):
        raise SchemaError(f"option writers {writers!r}: use 'all', 'node', 'auto' or a number above 0", kind="option")
    if rearrange not in ("auto", "never"):
        raise SchemaError(f"option rearrange {rearrange!r}: use 'auto' or 'never'", kind="option")


def check_name(what: str, name: Any) -> str:
    """Return ``name`` if it may name a dim or an array, which also makes it the name of a folder.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``name``, with what is wrong (Zarr v3 core, "Node names").
    """
    problem = ""
    if not isinstance(name, str):
        problem = "is not a string"
    elif name == "":
        problem = "is empty"
    elif name.startswith("."):
        problem = "begins with a dot"
    elif name.startswith("__"):
        problem = "begins with two underscores, which Zarr keeps for itself"
    elif "/" in name or "\\" in name:
        problem = "contains a slash"
    elif any(ord(c) < 32 or ord(c) == 127 for c in name):  # noqa: PLR2004 (ASCII control characters)
        problem = "contains a control character"
    elif name == "zarr.json":
        problem = "is the name of Zarr's own document"
    else:
        try:
            if len(name.encode()) > _MAX_NAME_NBYTES:
                problem = f"has {len(name.encode())} bytes, at most {_MAX_NAME_NBYTES} are allowed"
        except UnicodeEncodeError:
            problem = "is not valid Unicode, so it has no UTF-8 form"
    if problem:
        raise SchemaError(f"{what} {name!r} {problem}; choose another name", kind="name")
    return str(name)


def _text(what: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SchemaError(
            f"{what} is not valid Unicode, so it has no UTF-8 form; give other text", kind="attribute"
        ) from None
    return value


def json_value(what: str, value: Any, _depth: int = 0) -> Any:
    """Return ``value`` as plain JSON types; numpy scalars and arrays are converted.

    Not collective.

    Parameters
    ----------
    what
        Path of the value for messages, for example ``variable 'u', attribute 'valid_max'``.
    value
        The value.

    Raises
    ------
    SchemaError
        Kind ``attribute`` for what JSON has no form for; NaN and infinity are refused by name.
    """
    if _depth > _MAX_DEPTH:
        raise SchemaError(f"{what} is nested deeper than {_MAX_DEPTH} levels; flatten it", kind="attribute")
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _text(what, value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SchemaError(f"{what} is {value}, which JSON can't hold; leave it out", kind="attribute")
        return value
    if isinstance(value, list | tuple):
        return [json_value(f"{what}[{i}]", v, _depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SchemaError(f"{what}: key {key!r} is not a string", kind="attribute")
            _text(f"{what}: key {key!r}", key)
        return {k: json_value(f"{what}[{k!r}]", v, _depth + 1) for k, v in value.items()}
    raise SchemaError(
        f"{what} is a {type(value).__name__}, which JSON can't hold; give a number, string, list or mapping",
        kind="attribute",
    )


def canonical_json(value: Any) -> bytes:
    """Return the one byte form of a JSON value: sorted keys, no spaces, ASCII, floats as ``float.hex()``.

    Not collective.
    """

    def plain(v: Any) -> Any:
        if isinstance(v, float):
            return v.hex()
        if isinstance(v, Mapping):
            return {k: plain(x) for k, x in v.items()}
        if isinstance(v, list | tuple):
            return [plain(x) for x in v]
        return v

    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def stored_dtype(what: str, dtype: Any) -> np.dtype[Any]:
    """Return the dtype on disk, in native byte order.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``dtype`` for one that is neither among `DTYPES` nor datetime64 or timedelta64 in one of `TIME_UNITS`.
    """
    try:
        if (text := string_dtype(dtype)) is not None:
            return text
        found: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    except Exception as error:  # numpy raises TypeError, ValueError, SyntaxError, UnicodeError
        raise SchemaError(f"{what}: {dtype!r} is not a dtype; use one of {_KNOWN}", kind="dtype") from error
    if found.kind in "mM":
        unit, count = np.datetime_data(found)
        is_known = unit in TIME_UNITS and count == 1
    else:
        is_known = found.name in DTYPES
    if not is_known:
        raise SchemaError(f"{what}: dtype {found.name} is not supported; use one of {_KNOWN}", kind="dtype")
    return found


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype that `stored_dtype` takes, in the manifest and in messages.

    Not collective.
    """
    if is_string(dtype):
        return "string" if dtype.kind == "T" else dtype.str[1:]
    return dtype.name


def json_object(what: str, value: Any) -> dict[str, Any]:
    """Return a mapping of attributes as plain JSON types.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``attribute``, as `json_value`, or when it is no mapping.
    """
    if not isinstance(value, Mapping):
        raise SchemaError(f"{what} are a {type(value).__name__}; give a mapping name -> value", kind="attribute")
    found: dict[str, Any] = json_value(what, value)
    return found


def fill_array(what: str, dtype: np.dtype[Any], fill_value: Any) -> NDArray[Any]:
    """Return the fill value as a 0-d array; by default NaN, NaT, an empty string or 0, as the dtype is.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``fill_value`` when ``dtype`` can't hold the value.
    """
    if is_string(dtype):
        return _fill_string(what, dtype, fill_value)
    if dtype.kind in "mM":
        return _time_fill(what, dtype, fill_value)
    if fill_value is None:
        return np.array(np.nan if dtype.kind == "f" else 0, dtype)
    fill = np.zeros((), dtype)
    try:
        # A Python int beyond 64 bits has no integer dtype, but fits a float.
        given = np.asarray(float(fill_value) if isinstance(fill_value, int) and dtype.kind in "fc" else fill_value)
        fits = given.shape == () and given.dtype.kind in "biufc" and (given.dtype.kind != "c" or dtype.kind == "c")
        if fits:
            with np.errstate(all="ignore"):
                fill = given.astype(dtype)
            same = bool(np.array_equal(fill, given, equal_nan=dtype.kind in "fc"))
            # Rounding to the nearest float is fine, overflow to infinity is not.
            fits = same or (dtype.kind in "fc" and bool(np.isfinite(fill)))
    except (OverflowError, TypeError, ValueError):
        fits = False
    if not fits:
        raise SchemaError(f"{what}: fill value {fill_value!r} does not fit {dtype.name}", kind="fill_value")
    # One bit pattern for NaN, also in parts of a complex number: documents can't tell others apart.
    parts = fill.reshape(1).view(fill.real.dtype)
    if dtype.kind in "fc":
        parts[np.isnan(parts)] = np.nan
    return parts.view(dtype).reshape(())


def cast_times(given: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return datetime64 or timedelta64 values in another unit, None when that changes one of them.

    Not collective.
    """
    if given.dtype.kind != dtype.kind or not np.can_cast(given.dtype, dtype, "same_kind"):
        return None
    if given.dtype == dtype:
        return given
    unit, _ = np.datetime_data(given.dtype)
    missing = np.isnat(given)
    if unit == "generic" and not missing.all():
        return None
    try:
        # Beyond the range of a finer unit numpy wraps, without a word, and then the way back leads elsewhere.
        cast: NDArray[Any] = given.astype(dtype)
        is_same = ((cast.astype(given.dtype) == given) | missing).all()
    except OverflowError:
        return None
    return cast if is_same else None


def _time_fill(what: str, dtype: np.dtype[Any], fill_value: Any) -> NDArray[Any]:
    if fill_value is None:
        return np.array("NaT", dtype)
    given = np.asarray(fill_value)
    fill = cast_times(given, dtype) if given.shape == () and given.dtype.kind in "mM" else None
    if fill is None:
        raise SchemaError(
            f"{what}: fill value {fill_value!r} does not fit {dtype.name}; give a numpy.{dtype.type.__name__}",
            kind="fill_value",
        )
    return np.array(fill, dtype)


def _fill_string(what: str, dtype: np.dtype[Any], fill_value: Any) -> NDArray[Any]:
    try:
        fill = string_array(f"{what}: fill value", "" if fill_value is None else fill_value, dtype)
    except SchemaError as error:
        raise SchemaError(error.message, kind="fill_value") from error
    if fill.shape != ():
        raise SchemaError(f"{what}: fill value {fill_value!r} is not one string", kind="fill_value")
    return fill


def _float_to_json(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def fill_to_json(fill: NDArray[Any]) -> Any:
    """Return a fill value in Zarr v3's JSON form (core specification, "Fill value"); a time is its int64.

    Not collective.
    """
    value = fill.view("int64").item() if fill.dtype.kind in "mM" else fill.item()
    if isinstance(value, complex):
        return [_float_to_json(value.real), _float_to_json(value.imag)]
    return _float_to_json(value) if isinstance(value, float) else value


def fill_from_json(dtype: np.dtype[Any], value: Any) -> NDArray[Any]:
    """Return the fill value that `fill_to_json` wrote.

    Not collective.
    """
    if is_string(dtype):
        return _fill_string("damaged", dtype, value)
    # A finite number beyond the dtype's range is damage, an ArithmeticError here.
    with np.errstate(over="raise"):
        if dtype.kind in "mM":
            return np.array(value, "int64").view(dtype)
        if dtype.kind == "c":
            return np.array(complex(float(value[0]), float(value[1])), dtype)
        return np.array(float(value) if dtype.kind == "f" else value, dtype)

"""Strings: the two dtypes of them, and what is checked before they are stored.

``U<n>`` is numpy's fixed length, on disk Zarr's ``fixed_length_utf32``; `ANY_LENGTH` is numpy's ``StringDType``, on
disk Zarr's ``string``. Both are what zarr-python and xarray make of such arrays, so that everybody gets back what was
given. ``S<n>`` has no specification in Zarr v3, and xarray does not find its values by ``str``: it is refused.
"""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import SchemaError

__all__ = ["ANY_LENGTH", "MAX_TEXT_NBYTES", "is_string", "string_array", "string_dtype"]

ANY_LENGTH: np.dtype[Any] = np.dtypes.StringDType()

# On disk. Do not change; see FORMAT.md. Strings of any length say themselves how long they are, so a reader needs a
# bound for what it decodes.
MAX_TEXT_NBYTES = 64 * 1024 * 1024

_CHARACTER_NBYTES = 4


def is_string(dtype: np.dtype[Any]) -> bool:
    """Return whether an array of ``dtype`` holds strings."""
    return dtype.kind in "UT"


def string_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return the dtype of strings that ``dtype`` means, None if it means something else.

    Not collective.

    Parameters
    ----------
    dtype
        ``str``, ``"string"`` and numpy's ``StringDType`` are strings of any length, ``"U8"`` has up to 8 characters.

    Raises
    ------
    TypeError
        From numpy, for what is no dtype.
    """
    if isinstance(dtype, str) and dtype == "string":
        return ANY_LENGTH
    found: np.dtype[Any] = np.dtype(dtype)
    if found.kind == "T" or (found.kind == "U" and found.itemsize == 0):
        return ANY_LENGTH
    return found.newbyteorder("=") if found.kind == "U" else None


def string_array(what: str, value: Any, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """Return strings as an array, each of them whole.

    Not collective.

    Parameters
    ----------
    what
        What they are, for messages.
    value
        A string, nested sequences or an array of them.
    dtype
        Dtype on disk. By default that of an array of fixed length; else any length for an array, and the longest
        for a sequence, as in numpy.

    Raises
    ------
    SchemaError
        Kind ``dtype`` for values that are no strings, or that the dtype or UTF-8 would not give back.
    """
    is_array = hasattr(value, "__array__")
    # Not as numpy would: it makes "1" of 1, "None" of None, and drops a NUL at the end.
    given = np.asarray(value) if is_array else np.asarray(value, object)
    if given.dtype.kind not in "UTO":
        decode = "np.char.decode(values, 'utf-8')" if given.dtype.kind == "S" else "values.astype(str)"
        raise SchemaError(f"{what}: {given.dtype} instead of strings; pass {decode} if that is meant", kind="dtype")
    cells = np.array(given, object, order="C")
    nbytes = sum(_utf8_nbytes(what, cell) for cell in cells.flat)
    longest = max(map(len, cells.flat), default=0)
    if dtype is None and given.dtype.kind == "U":
        dtype = given.dtype.newbyteorder("=")
    elif dtype is None:
        dtype = ANY_LENGTH if is_array else np.dtype(f"U{max(longest, 1)}")
    if dtype.kind == "U":
        n = dtype.itemsize // _CHARACTER_NBYTES
        if longest > n:
            raise SchemaError(
                f"{what}: a string has {longest} characters, U{n} holds {n}; give dtype='U{longest}' or dtype=str",
                kind="dtype",
            )
        if any(cell.endswith("\0") for cell in cells.flat):
            raise SchemaError(f"{what}: U{n} drops the NUL at the end of a string; give dtype=str", kind="dtype")
    elif nbytes > MAX_TEXT_NBYTES:
        raise SchemaError(
            f"{what}: the strings have {nbytes} bytes in UTF-8, at most {MAX_TEXT_NBYTES} are possible; "
            "give integers, with their meaning in attributes",
            kind="dtype",
        )
    return cells.astype(dtype)


def _utf8_nbytes(what: str, cell: Any) -> int:
    """Return the bytes of a string with its length in front."""
    if not isinstance(cell, str):
        raise SchemaError(f"{what}: {reprlib.repr(cell)} is a {type(cell).__name__}; give str", kind="dtype")
    try:
        return len(cell.encode()) + _CHARACTER_NBYTES
    except UnicodeEncodeError as error:
        raise SchemaError(
            f"{what}: {reprlib.repr(cell)} is not valid Unicode, so it has no UTF-8 form", kind="dtype"
        ) from error

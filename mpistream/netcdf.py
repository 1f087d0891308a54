"""How the arrays of a stream lie in a netCDF-4 file: dtypes, fill values, attributes, chunks, names of dims.

A netCDF-4 file is an HDF5 file of a certain form, so one form serves both. What netCDF has no type for is stored as
xarray stores it: bool as int8 with the attribute ``dtype``, dates and durations as int64 with CF attributes, strings as
strings of any length. Floats of 16 bits become 32, which changes no value. A complex number is a compound of its two
parts, of a named type, as netCDF4-python writes it.

Sources: "NetCDF-4 format" in the NetCDF User's Guide; CF conventions 1.11, sections 2.2, 2.5.1 and 8.1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import ArraySpec
from mpistream.cf import with_encoded_fill_value
from mpistream.errors import SchemaError
from mpistream.strings import is_string

__all__ = [
    "COMPLEX_TYPES",
    "DIMENSION_ONLY",
    "NetcdfVariable",
    "attribute_value",
    "file_values",
    "netcdf_variable",
    "own_values",
]

# The NAME of a dimension scale that is no variable; the length stands at its end, ten wide.
DIMENSION_ONLY = "This is a netCDF dimension but not a netCDF variable."
# dtype -> the name under which netCDF4-python and nc-complex commit its compound type.
COMPLEX_TYPES = {
    np.dtype("complex64"): "_PFNC_FLOAT_COMPLEX_TYPE",
    np.dtype("complex128"): "_PFNC_DOUBLE_COMPLEX_TYPE",
}

# A chunk of a variable over time is one record, or a part of it of this size.
_CHUNK_NBYTES = 4 * 1024 * 1024
_SERIES_CHUNK = 1024
# Section 2.5.1 and 8.1: of the type of the variable's values.
_OF_THE_DTYPE = ("valid_min", "valid_max", "valid_range", "actual_range", "missing_value", "flag_values", "flag_masks")
_BOOL_MARK = "dtype"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetcdfVariable:
    """One variable of the file."""

    array: ArraySpec
    dtype: np.dtype[Any] | None
    """Of the file; None for strings."""
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...] | None
    """None: contiguous."""
    fill: Any
    """What cells hold that nobody wrote; None for strings and complex numbers."""
    attrs: Mapping[str, Any]


def netcdf_variable(array: ArraySpec, shape: Sequence[int], *, is_over_time: bool, is_packed: bool) -> NetcdfVariable:
    """Return how an array lies in the file.

    Not collective.

    Parameters
    ----------
    array
        The array.
    shape
        Of what is taken of it, the time dim first where it has one.
    is_over_time
        Whether its first dim is time, which is unlimited.
    is_packed
        Whether it will be compressed.
    """
    dtype = _file_dtype(array.dtype)
    chunks = None
    if is_over_time or (is_packed and shape and dtype is not None):
        chunks = _chunk_shape(shape, 16 if dtype is None else dtype.itemsize, is_over_time=is_over_time)
    fill = None if dtype is None or dtype.kind == "c" else file_values(array.fill)[()]
    return NetcdfVariable(
        array=array,
        dtype=dtype,
        shape=tuple(shape),
        chunk_shape=chunks,
        fill=fill,
        attrs=_attributes(array, dtype),
    )


def _file_dtype(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    if is_string(dtype):
        return None
    if dtype.kind == "b":
        return np.dtype("int8")
    if dtype.kind in "mM":
        return np.dtype("int64")
    return np.dtype("float32") if dtype == np.float16 else dtype


def file_values(values: NDArray[Any]) -> NDArray[Any]:
    """Return values as they stand in the file; strings as objects.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``dtype`` for a string with a NUL in it, where HDF5 would end it.
    """
    dtype = _file_dtype(values.dtype)
    if dtype is not None:
        is_same_size = dtype.itemsize == values.dtype.itemsize
        return np.asarray(values).view(dtype) if is_same_size else np.asarray(values).astype(dtype)
    cells = np.asarray(values).astype(object)
    if any("\0" in cell for cell in cells.flat):
        raise SchemaError("a string holds a NUL, where HDF5 would end it; select other variables", kind="dtype")
    return cells


def own_values(values: NDArray[Any], attrs: Mapping[str, Any]) -> NDArray[Any]:
    """Return what a file holds in native byte order, with bool where the attributes say so.

    Not collective.
    """
    if values.dtype == np.int8 and attrs.get(_BOOL_MARK) == "bool":
        return values.astype(bool)
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _chunk_shape(shape: Sequence[int], itemsize: int, *, is_over_time: bool) -> tuple[int, ...]:
    if is_over_time and len(shape) == 1:
        return (_SERIES_CHUNK,)
    chunk = [1 if is_over_time else shape[0], *shape[1:]]
    # Whole fastest dims, as many as fit.
    for i in range(len(chunk)):
        rest = itemsize * math.prod(chunk[i + 1 :])
        chunk[i] = max(1, min(chunk[i], _CHUNK_NBYTES // rest))
    return tuple(chunk)


def _attributes(array: ArraySpec, dtype: np.dtype[Any] | None) -> dict[str, Any]:
    attrs = dict(array.zarr_attrs)
    found: dict[str, Any] = {}
    if array.dtype.kind in "mM":
        found["_FillValue"] = np.array([attrs.pop("_FillValue")], "int64")
    elif "_FillValue" in attrs:
        _, value = with_encoded_fill_value(f"variable {array.name!r}", attrs, array.dtype)
        del attrs["_FillValue"]
        # An attribute of a compound type is what few readers of netCDF can read.
        if array.dtype.kind != "c":
            found["_FillValue"] = file_values(value).reshape(1)
    if array.dtype.kind == "b":
        attrs[_BOOL_MARK] = "bool"
    for name, value in attrs.items():
        kept = None
        if name in _OF_THE_DTYPE and dtype is not None and not isinstance(value, str):
            kept = _exactly(value, dtype)
        found[name] = attribute_value(value) if kept is None else kept
    return found


def _exactly(value: Any, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return numbers in a dtype, None where it can't hold them."""
    try:
        with np.errstate(all="ignore"):
            cast = np.array(value, dtype)
        given = np.array(value)
    except (OverflowError, TypeError, ValueError):
        return None
    is_number = given.dtype.kind in "biuf" and given.ndim <= 1
    # A decimal fraction is rounded to a float of any size, to an integer it is not.
    return cast if is_number and (dtype.kind in "fc" or bool((cast == given).all())) else None


def attribute_value(value: Any) -> str | list[str] | NDArray[Any]:
    """Return an attribute in a form that netCDF has: text, texts, or numbers of 32 or 64 bits.

    Not collective.

    Parameters
    ----------
    value
        Any JSON value. What netCDF has no form for (null, objects, lists of lists, text with a NUL)
        becomes its JSON text.
    """
    items = value if isinstance(value, list) else [value]
    # HDF5 would end a text at its first NUL.
    if items and all(isinstance(item, str) and "\0" not in item for item in items):
        return value if isinstance(value, str) else list(items)
    if not items or not all(isinstance(item, bool | int | float) for item in items):
        return json.dumps(value)
    dtype = "float64"
    if all(isinstance(item, bool) for item in items):
        dtype = "int8"
    elif all(isinstance(item, int) for item in items):
        dtype = next((d for d in ("int32", "int64", "uint64") if all(_holds(d, i) for i in items)), "float64")
    return np.array(value, dtype)


def _holds(dtype: str, number: int) -> bool:
    limits = np.iinfo(dtype)
    return limits.min <= number <= limits.max

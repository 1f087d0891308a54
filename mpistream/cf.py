"""What the CF conventions ask of attributes: auxiliary coordinates, boundary variables, missing values.

The conventions are those of version 1.11; ``_FillValue`` has the form that xarray gives it in a Zarr v3 array.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from mpistream.arrays import ArraySpec
from mpistream.errors import SchemaError
from mpistream.names import fill_array, json_object
from mpistream.strings import is_string

__all__ = ["boundary_variables", "checked_attrs", "with_coordinates_attribute", "with_encoded_fill_value"]

_FILL_VALUE = "_FillValue"

# Sections 7.1 and 7.4.
_BOUNDS = ("bounds", "climatology")
# Section 7.1: a boundary variable need not repeat these, and must not contradict them.
_SHARED = ("units", "standard_name", "axis", "positive", "calendar", "leap_month", "leap_year", "month_lengths")
_N_ENDS = 2

# Attributes that follow from the dtype or from keep_bits, in documents only.
_TIME_ATTRS = ("units", "calendar", "dtype")
_QUANTIZATION_ATTRS = ("quantization", "quantization_nsb")


def checked_attrs(name: str, attrs: Any, dtype: np.dtype[Any], keep_bits: int | None) -> dict[str, Any]:
    """Return an array's attributes as plain JSON types.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``attribute`` for what JSON has no form for, and for attributes that follow from the rest.
    """
    checked = json_object(f"variable {name!r}, attributes", attrs)
    derived = [
        *((a, f"dtype {dtype.name}") for a in (_TIME_ATTRS if dtype.kind in "mM" else ())),
        *((a, "keep_bits") for a in (_QUANTIZATION_ATTRS if keep_bits is not None else ())),
    ]
    for attribute, reason in derived:
        if attribute in checked:
            raise SchemaError(
                f"variable {name!r}, attribute {attribute!r}: it follows from {reason}; leave it out", kind="attribute"
            )
    return checked


def with_coordinates_attribute(
    arrays: dict[str, ArraySpec], coords: Collection[str], bounds: Collection[str]
) -> dict[str, ArraySpec]:
    """Name the auxiliary and scalar coordinates in each array's ``coordinates`` attribute (sections 5 and 5.7).

    A boundary variable belongs to its coordinate: it is not named, and names none (section 7.1).
    """
    auxiliary = [n for n in coords if arrays[n].dims != (n,) and n not in bounds]
    for name, array in arrays.items():
        fitting = [n for n in auxiliary if set(arrays[n].dims) <= set(array.dims)]
        if name not in coords and name not in bounds and fitting and "coordinates" not in array.attrs:
            attrs = MappingProxyType({**array.attrs, "coordinates": " ".join(fitting)})
            arrays[name] = replace(array, attrs=attrs)
    return arrays


def boundary_variables(arrays: Mapping[str, ArraySpec], time: ArraySpec) -> frozenset[str]:
    """Return the names of the boundary variables, once they fit to what they bound.

    Not collective.

    Parameters
    ----------
    arrays
        All arrays but time.
    time
        The time coordinate.

    Raises
    ------
    SchemaError
        Kind ``bounds``, for one that is missing, of other dims, or with attributes that differ.
    """
    found = set()
    for parent in (time, *arrays.values()):
        for attribute in _BOUNDS:
            if attribute in parent.attrs:
                found.add(_checked_bounds(attribute, parent, arrays))
    return frozenset(found)


def _checked_bounds(attribute: str, parent: ArraySpec, arrays: Mapping[str, ArraySpec]) -> str:
    name = parent.attrs[attribute]
    what = f"{parent.name!r}, attribute {attribute!r}"
    array = arrays.get(name) if isinstance(name, str) else None
    if array is None:
        raise SchemaError(f"{what}: {name!r} is no array of this schema; describe it, or leave it out", kind="bounds")
    if not array.dims or array.dims[:-1] != parent.dims:
        raise SchemaError(
            f"{what}: {name!r} has the dims {array.dims}; bounds have those of {parent.name!r} and then one for the "
            f"vertices, {(*parent.dims, 'nv')}",
            kind="bounds",
        )
    if len(parent.dims) <= 1 and array.shape[-1] != _N_ENDS:
        raise SchemaError(
            f"{what}: dim {array.dims[-1]!r} of {name!r} has length {array.shape[-1]}; an interval has {_N_ENDS} ends",
            kind="bounds",
        )
    if is_string(array.dtype):
        raise SchemaError(f"{what}: {name!r} holds strings; bounds are numbers", kind="bounds")
    # As readers see them: times bring units and a calendar of their own.
    own, given = array.zarr_attrs, parent.zarr_attrs
    for key in _SHARED:
        if key in own and own[key] != given.get(key):
            way = f"leave it out of {name!r}"
            if key not in array.attrs:
                dtypes = array.dtype.name, parent.dtype.name
                way = f"it follows from dtype {dtypes[0]}; give {name!r} that of {parent.name!r}, {dtypes[1]}"
            raise SchemaError(
                f"{what}: {key} of {name!r} is {own[key]!r}, that of {parent.name!r} is {given.get(key)!r}; {way}",
                kind="bounds",
            )
    return array.name


def with_encoded_fill_value(what: str, attrs: Any, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return attributes with ``_FillValue`` as xarray stores it, and its value, None without one.

    Not collective.

    Parameters
    ----------
    what
        The array, for messages.
    attrs
        Its attributes, ``_FillValue`` as a number or in the form that this returns.
    dtype
        Its dtype.

    Raises
    ------
    SchemaError
        Kind ``fill_value`` for one that the dtype can't hold.

    Notes
    -----
    Readers compare cells with it after the cast, so a float is rounded to the dtype first. JSON has no NaN: xarray
    stores a float as base64 of its eight bytes as a float64, little-endian, and a complex number as two of them.
    """
    if not isinstance(attrs, Mapping) or _FILL_VALUE not in attrs:
        return attrs, None
    if attrs[_FILL_VALUE] is None:
        return {k: v for k, v in attrs.items() if k != _FILL_VALUE}, None
    if dtype.kind not in "biufc":
        # xarray would not open the store; in dates NaT is missing by itself.
        raise SchemaError(f"{what}: xarray has no {_FILL_VALUE} of {dtype}; leave it out", kind="fill_value")
    given = attrs[_FILL_VALUE]
    try:
        if dtype.kind == "f" and isinstance(given, str):
            given = _float_of(given)
        elif dtype.kind == "c" and isinstance(given, list | tuple):
            real, imag = given
            given = complex(_float_of(real), _float_of(imag))
    except (TypeError, ValueError) as error:
        raise SchemaError(
            f"{what}: {_FILL_VALUE} {given!r} is no number; give a number of {dtype}", kind="fill_value"
        ) from error
    value = fill_array(f"{what}, attribute {_FILL_VALUE!r}", dtype, given)
    encoded: Any = value.item()
    if dtype.kind == "f":
        encoded = _text_of(encoded)
    elif dtype.kind == "c":
        encoded = [_text_of(encoded.real), _text_of(encoded.imag)]
    return {**attrs, _FILL_VALUE: encoded}, value


def _float_of(text: str) -> float:
    data = base64.b64decode(text, validate=True)
    if len(data) != 8:  # noqa: PLR2004 (a float64)
        raise ValueError(f"{len(data)} bytes")
    return float(struct.unpack("<d", data)[0])


def _text_of(value: float) -> str:
    return base64.b64encode(struct.pack("<d", value)).decode()

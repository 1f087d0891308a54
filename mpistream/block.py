"""A rank's block for one variable: checked against the schema, never copied when it need not be."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import SchemaError
from mpistream.strings import is_string, string_array

__all__ = ["as_array", "check_block", "check_time", "keeps_values"]


def check_block(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return ``value`` as an array of ``shape`` that casts to ``dtype`` without losing values.

    Not collective.

    Parameters
    ----------
    name
        The variable, for messages.
    value
        Array of any strides and byte order, or a Python scalar, which broadcasts; for strings sequences, too.
    shape
        The block's shape, without time.
    dtype
        Dtype on disk.

    Raises
    ------
    SchemaError
        Kind ``shape`` or ``dtype``. Rounding of floats to fewer bits is allowed; whatever else could change
        a value is refused, with the cast to write if it is meant.
    """
    is_text = is_string(dtype)
    if not is_text and isinstance(value, bool | int | float | complex):
        return np.broadcast_to(_scalar(name, value, dtype), shape)
    if np.ma.is_masked(value):
        # The values under a mask are undefined, and Zarr has no mask: what stands there is for the model to say.
        raise SchemaError(
            f"variable {name!r}: the block is masked; pass block.filled(value) with the variable's fill value",
            kind="mask",
        )
    block = string_array(f"variable {name!r}", value, dtype) if is_text else as_array(f"variable {name!r}", value)
    if isinstance(value, str) and is_text:
        return np.broadcast_to(block, shape)
    # A model may give an empty rank any block without cells.
    if block.size == 0 and 0 in shape and block.ndim == len(shape):
        block = block.reshape(shape)
    if block.shape != shape:
        raise SchemaError(
            f"variable {name!r}: block of shape {block.shape}, this rank's region has {shape}; "
            "pass the region's cells only, without the time dim",
            kind="shape",
        )
    if not keeps_values(block.dtype, dtype):
        raise SchemaError(
            f"variable {name!r}: {block.dtype} into {dtype.name} can lose values; "
            f"pass block.astype({dtype.name!r}) if that is meant",
            kind="dtype",
        )
    return block


def as_array(what: str, value: Any) -> NDArray[Any]:
    """Return ``value`` as an array.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``shape`` for nested sequences of different lengths.
    """
    try:
        return np.asarray(value)
    except ValueError as error:
        raise SchemaError(f"{what}: {error}; give an array", kind="shape") from error


def keeps_values(given: np.dtype[Any], stored: np.dtype[Any]) -> bool:
    """Return whether a cast can do no worse than round floats to fewer bits.

    Not collective.
    """
    rounds = (given.kind, stored.kind) in (("f", "f"), ("c", "c"), ("f", "c"))
    return rounds or np.can_cast(given, stored, "safe")


def _scalar(name: str, value: complex, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A Python number has no dtype of its own: its value decides."""
    cast: NDArray[Any] | None = None
    if not isinstance(value, complex) or dtype.kind == "c":
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                cast = np.array(value, dtype)
        except (OverflowError, ValueError):
            cast = None
    if cast is None or (dtype.kind in "biu" and not bool(cast == value)):
        raise SchemaError(f"variable {name!r}: {value!r} does not fit {dtype.name}", kind="dtype")
    return cast


def check_time(t: Any, last_t: float | None) -> float:
    """Return ``t`` as a float that is greater than ``last_t``.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``time``.
    """
    try:
        # float() also takes strings, and datetime64 as a count of its own units: neither is in the schema's.
        value = float(t) if isinstance(t, Real) or (isinstance(t, np.ndarray) and t.dtype.kind in "iuf") else None
    except (OverflowError, TypeError, ValueError):
        value = None
    if value is None:
        raise SchemaError(f"t = {t!r} is not a number; give it in the schema's time units", kind="time")
    if not np.isfinite(value):
        raise SchemaError(f"t = {value}: give a finite time in the schema's units", kind="time")
    if last_t is not None and value <= last_t:
        raise SchemaError(f"t = {value!r} does not come after the last record's {last_t!r}", kind="time")
    return value

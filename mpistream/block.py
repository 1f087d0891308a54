"""A rank's block for one variable: checked against the schema, never copied when it need not be."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import SchemaError

__all__ = ["check_block", "check_time"]


def check_block(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return ``value`` as an array of ``shape`` that casts to ``dtype`` without losing values.

    Not collective.

    Parameters
    ----------
    name
        The variable, for messages.
    value
        Array of any strides and byte order, or a Python scalar, which broadcasts.
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
    if isinstance(value, bool | int | float | complex):
        return np.broadcast_to(_scalar(name, value, dtype), shape)
    block = np.asarray(value)
    if block.shape != shape:
        raise SchemaError(
            f"variable {name!r}: block of shape {block.shape}, this rank's region has {shape}; "
            "pass the region's cells only, without the time dim",
            kind="shape",
        )
    rounds = (block.dtype.kind, dtype.kind) in (("f", "f"), ("c", "c"), ("f", "c"))
    if not rounds and not np.can_cast(block.dtype, dtype, "safe"):
        raise SchemaError(
            f"variable {name!r}: {block.dtype} into {dtype.name} can lose values; "
            f"pass block.astype({dtype.name!r}) if that is meant",
            kind="dtype",
        )
    return block


def _scalar(name: str, value: complex, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A Python number has no dtype of its own: its value decides."""
    try:
        with np.errstate(over="ignore"):
            cast = np.array(value).astype(dtype) if not isinstance(value, int) else np.array(value, dtype)
        fits = not (isinstance(value, complex) and dtype.kind != "c")
        if fits and dtype.kind in "biu":
            fits = bool(cast == value)
    except (OverflowError, ValueError, TypeError):
        fits = False
    if not fits:
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
        value = float(t)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"t = {t!r} is not a number; give it in the schema's time units", kind="time") from error
    if not np.isfinite(value):
        raise SchemaError(f"t = {value}: give a finite time in the schema's units", kind="time")
    if last_t is not None and value <= last_t:
        raise SchemaError(f"t = {value!r} does not come after the last record's {last_t!r}", kind="time")
    return value

"""A rank's block for one variable: checked against the schema, never copied when it need not be."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import SchemaError
from mpistream.names import cast_times
from mpistream.strings import is_string, string_array

__all__ = ["as_array", "check_block", "check_blocks", "check_time", "keeps_values"]


# Devices of the DLPack protocol whose memory this process reads: kDLCPU, and pinned host memory of CUDA and ROCm.
_HOST_DEVICES = (1, 3, 11)
_NUMBERS = (bool, int, float, complex, np.bool_, np.number)


def check_block(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return ``value`` as an array of ``shape`` that casts to ``dtype`` without losing values.

    Not collective.

    Parameters
    ----------
    name
        The variable, for messages.
    value
        Array of any strides and byte order, what gives one by ``__array__`` or, in this process's memory, by
        ``__dlpack__``, or a scalar of Python or numpy, which broadcasts; for strings sequences, too. Of a number alone
        the value decides whether it fits, not its dtype.
    shape
        The block's shape, without time.
    dtype
        Dtype on disk.

    Raises
    ------
    SchemaError
        Kind ``shape``, ``dtype``, ``device`` or ``mask``. Rounding of floats to fewer bits is allowed; whatever else
        could change a value is refused, with the cast to write if it is meant.
    """
    is_text = is_string(dtype)
    if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape and not is_text:
        return value  # what a model writes, mostly
    if isinstance(value, np.datetime64 | np.timedelta64):
        value = np.broadcast_to(np.asarray(value), shape)
    elif not is_text and isinstance(value, _NUMBERS):
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
    if dtype.kind in "mM":
        cast = cast_times(block, dtype)
        if cast is None:
            raise SchemaError(
                f"variable {name!r}: a value of the {block.dtype} block is beyond the range of {dtype.name}; "
                "give the variable a coarser unit",
                kind="dtype",
            )
        return cast
    return block


def check_blocks(name: str, value: Any, shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[NDArray[Any]]:
    """Return the blocks of a rank, one per box of its region, each as `check_block` returns it.

    Not collective.

    Parameters
    ----------
    name, dtype
        As in `check_block`.
    value
        The block, or a sequence of as many as there are shapes; a scalar broadcasts into all.
    shapes
        Their shapes.

    Raises
    ------
    SchemaError
        As `check_block`, and kind ``shape`` for another number of blocks.
    """
    if len(shapes) == 1:
        # A rank of one box, or of none, may pass a list, too, as it would with several.
        if isinstance(value, list | tuple | dict) and not value and 0 in shapes[0]:
            value = np.empty(shapes[0], dtype)
        elif isinstance(value, list | tuple) and len(value) == 1 and np.ndim(value[0]) == len(shapes[0]):
            value = value[0]
        return [check_block(name, value, shapes[0], dtype)]
    if isinstance(value, (*_NUMBERS, np.datetime64)):
        return [check_block(name, value, shape, dtype) for shape in shapes]
    if not isinstance(value, list | tuple) or len(value) != len(shapes):
        given = f"{len(value)} blocks" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
        raise SchemaError(
            f"variable {name!r}: {given}, this rank's region has {len(shapes)} boxes; pass a list with one block per "
            "box, in the region's order",
            kind="shape",
        )
    return [check_block(name, part, shape, dtype) for part, shape in zip(value, shapes, strict=True)]


def as_array(what: str, value: Any) -> NDArray[Any]:
    """Return ``value`` as an array.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``shape`` for nested sequences of different lengths, kind ``device`` for an array in the memory of a
        device, kind ``dtype`` for one that numpy can't take.
    """
    if type(value) is np.ndarray:
        return value
    _check_device(what, value)
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except ValueError as error:
        raise SchemaError(f"{what}: {error}; give an array", kind="shape") from error
    except Exception as error:  # whatever the other library raises, for example for a dtype that numpy lacks
        raise SchemaError(
            f"{what}: numpy can't take this {type(value).__name__}: {error}; give an array that numpy.asarray takes",
            kind="dtype",
        ) from error


def _check_device(what: str, value: Any) -> None:
    """Refuse an array in the memory of a device: the copy out of it is for the model to place in time."""
    where = None
    if hasattr(value, "__dlpack_device__"):
        try:
            device = int(value.__dlpack_device__()[0])
        except Exception:  # noqa: BLE001 (a sharded array has no one device, and may have a form for numpy)
            device = _HOST_DEVICES[0]
        if device not in _HOST_DEVICES:
            where = f"DLPack device type {device}"
    elif hasattr(value, "__cuda_array_interface__"):
        where = "it has __cuda_array_interface__"
    if where is not None:
        raise SchemaError(
            f"{what}: the {type(value).__name__} lies in the memory of a device ({where}); copy it to the host first, "
            "with jax.device_get(block) for JAX, block.cpu() for PyTorch, block.get() for CuPy",
            kind="device",
        )


def keeps_values(given: np.dtype[Any], stored: np.dtype[Any]) -> bool:
    """Return whether a cast can do no worse than round floats to fewer bits.

    Not collective.
    """
    if given.kind in "mM" or stored.kind in "mM":
        # To numpy an integer is as good as a timedelta, and one without a unit as one in any.
        is_timed = given.kind == stored.kind and np.datetime_data(given)[0] != "generic"
        return is_timed and np.can_cast(given, stored, "safe")
    rounds = (given.kind, stored.kind) in (("f", "f"), ("c", "c"), ("f", "c"))
    return rounds or np.can_cast(given, stored, "safe")


def _scalar(name: str, value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A Python number has no dtype of its own, and whoever has one of numpy has not chosen it: the value decides."""
    cast: NDArray[Any] | None = None
    # As an array of that dtype a number of numpy could be refused; as a number it must be kept.
    is_exact = isinstance(value, np.generic) and not keeps_values(value.dtype, dtype)
    if dtype.kind not in "mM" and (not np.iscomplexobj(value) or dtype.kind == "c"):
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                cast = np.array(value, dtype)
        except (OverflowError, ValueError):
            cast = None
    if cast is None or ((is_exact or dtype.kind in "biu") and not _is_same(cast, value)):
        raise SchemaError(f"variable {name!r}: {value!r} does not fit {dtype.name}", kind="dtype")
    return cast


def _is_same(cast: NDArray[Any], value: Any) -> bool:
    if isinstance(value, np.integer) and np.isfinite(cast):
        # As Python compares integers: numpy would make floats of both, rounded.
        return int(cast.real) == int(value)
    return bool(cast == value)


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
        raise SchemaError(f"t = {t!r} is neither a number in the schema's time units nor a date", kind="time")
    if not np.isfinite(value):
        raise SchemaError(f"t = {value}: give a finite time in the schema's units", kind="time")
    if last_t is not None and value <= last_t:
        raise SchemaError(f"t = {value!r} does not come after the last record's {last_t!r}", kind="time")
    return value

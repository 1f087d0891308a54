"""Mantissas rounded to fewer bits, so that they compress: the bits that a model can't vouch for become zero.

This is the algorithm ``bitround`` of the CF conventions, section 8.4: IEEE 754's round to nearest, ties to even,
for a format with fewer explicit mantissa bits. So a number that is nearer to the next power of two beyond the
dtype's range than to its largest number becomes infinite, as in a cast to a smaller float.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import SchemaError

__all__ = ["Rounding", "checked_keep_bits"]


def checked_keep_bits(name: str, keep_bits: Any, dtype: np.dtype[Any]) -> int | None:
    """Return how many explicit mantissa bits an array keeps, None: all.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``keep_bits`` for a dtype that is no float, or a number out of range.
    """
    if keep_bits is None:
        return None
    if dtype.kind != "f":
        raise SchemaError(
            f"variable {name!r}: keep_bits rounds floats, and its dtype is {dtype.name}; leave it out", kind="keep_bits"
        )
    most = np.finfo(dtype).nmant
    if isinstance(keep_bits, bool) or not isinstance(keep_bits, int | np.integer) or not 1 <= keep_bits <= most:
        raise SchemaError(
            f"variable {name!r}: keep_bits {keep_bits!r}; {dtype.name} has {most} explicit mantissa bits, "
            f"give an integer from 1 to {most}",
            kind="keep_bits",
        )
    return int(keep_bits)


class Rounding:
    """Rounds the mantissas of one array.

    Parameters
    ----------
    keep_bits
        Explicit mantissa bits that stay.
    fill
        0-d array of the array's dtype: cells that hold it bitwise keep it, else they would no longer be missing.
    """

    def __init__(self, keep_bits: int, fill: NDArray[Any]) -> None:
        info = np.finfo(fill.dtype)
        word = np.dtype(f"u{fill.dtype.itemsize}")
        n_dropped = info.nmant - keep_bits
        self._word = word
        # Just below one half of the last bit that stays; the tie is decided by that bit.
        self._below_half = word.type((1 << n_dropped) // 2 - 1 if n_dropped else 0)
        self._shift = word.type(n_dropped)
        self._one = word.type(1 if n_dropped else 0)
        self._mask = word.type(2 ** (8 * word.itemsize) - 2**n_dropped)
        self._fill: NDArray[Any] | None = None
        pattern = fill.reshape(1).copy()
        self.apply(pattern)
        if pattern.tobytes() != fill.tobytes():
            self._fill = fill.reshape(1).view(word)

    def apply(self, values: NDArray[Any]) -> None:
        """Round in place.

        Not collective.

        Parameters
        ----------
        values
            C-contiguous, of the array's dtype in either byte order.
        """
        if not self._one:
            return
        flat = values.reshape(-1)
        words = flat.view(self._word.newbyteorder(flat.dtype.byteorder))
        rounded = words >> self._shift
        rounded &= self._one
        rounded += self._below_half
        rounded += words
        rounded &= self._mask
        kept = np.isnan(flat)
        if self._fill is not None:
            kept |= words == self._fill
        if kept.any():
            np.copyto(rounded, words, where=kept)
        words[...] = rounded

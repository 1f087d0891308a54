"""The fields that are written, the same ones for every library."""

from __future__ import annotations

from typing import Any

import numpy as np

KINDS = ("smooth", "noise", "zeros", "plume")


def field_of(kind: str, rank: int, ny: int, nx: int) -> Any:
    """Return a rank's rows of a field of float32.

    *smooth*: waves of several lengths, and noise in the last bits. *noise*: nothing that could be compressed but the
    exponents. *plume*: zero, but for a round cloud on 1 % of the cells.
    """
    noise = np.random.default_rng(rank).standard_normal((ny, nx), "float32")
    if kind == "noise":
        return noise
    if kind == "zeros":
        return np.zeros((ny, nx), "float32")
    y, x = np.arange(ny)[:, None] / ny, np.arange(nx) / nx
    if kind == "plume":
        square = (y - 0.5) ** 2 + (x - 0.5) ** 2  # below 0.01 / pi: 1 % of the unit square
        return np.where(square < 0.01 / np.pi, np.exp(-100 * square) + 0.01 * noise, 0).astype("float32")
    y = y + rank
    smooth = 280 + 15 * np.sin(3 * y) * np.cos(5 * x) + 2 * np.sin(40 * (x + y))
    return (smooth + 0.01 * noise).astype("float32")

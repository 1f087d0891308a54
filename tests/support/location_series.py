"""Location series as closed forms: what each location has, and how it looks to plain readers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

__all__ = ["DTYPES", "IDS", "N_TIMES", "TIMES", "expected", "read_zarr", "series"]

N_TIMES = 7
IDS = tuple(f"cat-{4700 + i}" for i in range(23))
TIMES = np.array("2000-01-01", "datetime64[s]") + 3600 * np.arange(N_TIMES)
DTYPES: dict[str, Any] = {"flow": "float32", "soil": "float64", "code": "int32"}
_SCALES = {"flow": 0.25, "soil": 1.5, "code": 3}


def series(location: int, version: int = 0) -> dict[str, NDArray[Any]]:
    """Return the series of a location: location 5 is cut short, location 13 has no soil."""
    t = np.arange(4 if location == 5 else N_TIMES)
    found = {n: ((1000 * (location + 1) + t + 100 * version) * s).astype(DTYPES[n]) for n, s in _SCALES.items()}
    if location == 13:
        del found["soil"]
    return found


def expected(locations: Collection[int], n: int = len(IDS), versions: dict[int, int] | None = None) -> dict[str, Any]:
    """Return whole arrays in which these locations are written and all others are fill."""
    arrays = {name: np.full((n, N_TIMES), 0 if name == "code" else np.nan, dtype) for name, dtype in DTYPES.items()}
    for location in locations:
        for name, values in series(location, (versions or {}).get(location, 0)).items():
            arrays[name][location, : len(values)] = values
    return arrays


def read_zarr(url: Path) -> dict[str, Any]:
    """Return the variables as zarr-python reads them."""
    group: Any = zarr.open_group(url, mode="r")
    return {name: group[name][...] for name in DTYPES}

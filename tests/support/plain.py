"""Values with every bit pattern, their comparison bit by bit, and the plain readers of a Zarr store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

import mpistream as ms

__all__ = ["DTYPES", "QUICK", "READERS", "Arrays", "any_bits", "append_schema", "differing", "open_xarray"]

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)

# Nothing here loses power.
QUICK = ms.Options(durability="none", threads=0)

Arrays = Mapping[str, NDArray[Any]]


def any_bits(dtype: DTypeLike, shape: Sequence[int], *key: int) -> NDArray[Any]:
    """Return values that depend on the arguments alone: every bit pattern may occur, NaNs with payload too."""
    dtype = np.dtype(dtype)
    n = int(np.prod(shape, dtype=np.int64))
    raw = np.random.default_rng([dtype.num, *key]).integers(0, 256, n * dtype.itemsize, np.uint8)
    if dtype.kind == "b":
        raw &= 1
    return raw.view(dtype).reshape(shape)


def differing(found: Arrays, expected: Arrays) -> list[str]:
    """Return what is not bitwise equal, by name: an empty list if all is."""
    report = [f"{name} is there on one side only" for name in sorted(found.keys() ^ expected.keys())]
    for name in sorted(found.keys() & expected.keys()):
        a, b = np.asarray(found[name]), np.asarray(expected[name])
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            report.append(f"{name}: {a.dtype} {a.shape}, expected {b.dtype} {b.shape}")
        elif a.tobytes() != b.tobytes():
            cells = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(a.size, -1) for x in (a, b)]
            bad = np.flatnonzero((cells[0] != cells[1]).any(axis=1))
            first = tuple(int(i) for i in np.unravel_index(bad[0], a.shape))
            report.append(f"{name}: {len(bad)} cells, first at {first}: {a[first]!r}, expected {b[first]!r}")
    return report


def append_schema(
    dims: Mapping[str, int], variables: Mapping[str, ms.Variable], units: str = "seconds since 2000-01-01", **more: Any
) -> ms.StreamSchema:
    """Return a schema with an appended time dim before the others."""
    return ms.StreamSchema(
        dims={"time": None, **dims}, time=ms.AppendTime(units=units), variables=dict(variables), **more
    )


def open_xarray(path: Path, *, consolidated: bool = True, **more: Any) -> Any:
    """Open a store with xarray; without consolidated metadata exactly one warning is allowed.

    Then zarr looks at every name in the folder, and says that ours is none of a Zarr hierarchy.
    """
    import xarray

    store: Any = path
    if {"#", "?"} & set(str(path)):
        # xarray hands a path on as text, and a newer zarr takes text for a URL, which ends at these.
        from zarr.storage import LocalStore

        store = LocalStore(path, read_only=True)
    if consolidated:
        return xarray.open_zarr(store, consolidated=True, **more)
    with pytest.warns(match=r"^Object at \.mpistream is not recognized as a component of a Zarr hierarchy\.$"):
        return xarray.open_zarr(store, consolidated=False, **more)


def _with_zarr(path: Path, names: Sequence[str]) -> Arrays:
    import zarr

    group: Any = zarr.open_group(path, mode="r")
    return {name: np.asarray(group[name][...]) for name in names}


def _with_zarrs(path: Path, names: Sequence[str]) -> Arrays:
    import zarr
    from zarrs import ZarrsCodecPipeline

    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        group: Any = zarr.open_group(path, mode="r")
        for name in names:
            assert isinstance(group[name]._async_array.codec_pipeline, ZarrsCodecPipeline)
        return {name: np.asarray(group[name][...]) for name in names}


def _with_tensorstore(path: Path, names: Sequence[str]) -> Arrays:
    import tensorstore

    opened = [
        tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}/"}}, read=True, open=True
        )
        for name in names
    ]
    return {name: np.asarray(array.result().read().result()) for name, array in zip(names, opened, strict=True)}


def _with_xarray(path: Path, names: Sequence[str]) -> Arrays:
    dataset = open_xarray(path, decode_times=False)
    return {name: dataset[name].values for name in names}


def _with_xarray_not_consolidated(path: Path, names: Sequence[str]) -> Arrays:
    dataset = open_xarray(path, consolidated=False, decode_times=False)
    return {name: dataset[name].values for name in names}


READERS: dict[str, Callable[[Path, Sequence[str]], Arrays]] = {
    "zarr": _with_zarr,
    "zarrs": _with_zarrs,
    "tensorstore": _with_tensorstore,
    "xarray": _with_xarray,
    "xarray not consolidated": _with_xarray_not_consolidated,
}
"""Name -> a function that reads whole arrays by name with nothing of ours."""

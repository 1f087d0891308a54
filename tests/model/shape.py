"""The stream of one sequence: dims, arrays and layout drawn by its seed, and every value as a closed form."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistream as ms
from mpistream.zarr3.metadata import chunk_key

__all__ = ["Shape"]

# A prime below 2048: every value is exact in float16 and int16.
_PRIME = 2039
_DTYPES = ("float32", "float64", "int16", "float16", "uint8", "bool", "complex64", "int64")


class Shape:
    """Dims, arrays and layout.

    Parameters
    ----------
    seed
        Of all choices.
    """

    def __init__(self, seed: int | str) -> None:
        draw = random.Random(seed)
        self.sizes = {"y": draw.randint(2, 9), "x": draw.randint(1, 6)}
        self.is_indexed = draw.random() < 0.5
        self.separator = draw.choice("//.")
        row, inner = draw.choice([(1, 1), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)])
        chunk = {d: draw.randint(1, 2) for d in self.sizes}
        shard = {d: chunk[d] * draw.randint(1, 3) for d in self.sizes}
        self.dims: dict[str, tuple[str, ...]] = {"u": ("time", "y", "x")}
        rows = {"u": (row, inner)}
        for name, dims in (
            ("v", ("time", "y", "x")),
            ("zonal", ("time", "y")),
            ("merid", ("time", "x")),
            ("energy", ("time",)),
        ):
            if draw.random() < 0.4:
                self.dims[name] = dims
                rows[name] = draw.choice([(row, inner), (1, 1), (2, 1), (4, 2)])
        self.statics = {"topo": ("y", "x"), "gravity": (), "lat": ("y",)}
        self.row = {n: rows[n][0] if len(d) > 1 else 1024 for n, d in self.dims.items()}
        self.dtypes = {n: np.dtype(draw.choice(_DTYPES)) for n in (*self.dims, *self.statics)}
        self._shard = shard
        self.n_total = draw.randint(5, 14) if self.is_indexed else None
        steps = [draw.choice([0.5, 1 / 3, 0.1, 7.0]) for _ in range(self.n_total or 0)]
        self.times = [float(t) for t in np.cumsum([-2.0, *steps])[1:]]
        units = "seconds since 2000-01-01"
        self.schema = ms.StreamSchema(
            dims={"time": None, **self.sizes},
            time=ms.IndexedTime(self.times, units=units) if self.is_indexed else ms.AppendTime(units=units),
            variables={
                n: ms.Variable(
                    d,
                    self.dtypes[n],
                    shard_shape={"time": rows[n][0]} if len(d) > 1 else None,
                    chunk_shape={"time": rows[n][1]} if len(d) > 1 else None,
                    codec=draw.choice(["fast", "compact", "none", "wasm"]),
                )
                for n, d in self.dims.items()
            },
            statics={n: ms.Variable(self.statics[n], self.dtypes[n]) for n in ("topo", "gravity")},
            coords={
                "y": ms.Coordinate(("y",), 0.5 * np.arange(self.sizes["y"])),
                "lat": ms.Coordinate(("y",), None, dtype=self.dtypes["lat"]),
            },
            shard_shape=shard,
            chunk_shape=chunk,
            key_separator=self.separator,
        )
        self._whole = functools.lru_cache(maxsize=400)(self._compute)

    def whole(self, name: str, record: int, version: int) -> NDArray[Any]:
        """Return one record of a whole array, or a static, as the write with this number wrote it."""
        return self._whole(name, record, version)

    def _compute(self, name: str, record: int, version: int) -> NDArray[Any]:
        dims = self.dims[name][1:] if name in self.dims else self.statics[name]
        shape, dtype = tuple(self.sizes[d] for d in dims), self.dtypes[name]
        value = np.full(shape, zlib.crc32(name.encode()) % 1009 + 101 * record + 577 * version, np.int64)
        for step, index in zip((37, 311), np.indices(shape), strict=False):
            value += step * index
        value %= _PRIME
        if dtype.kind == "b":
            found = np.array(value % 3 == 0, dtype)
        elif dtype.kind == "c":
            found = np.array(value / 3 + 1j * (value % 7), dtype)
        else:
            found = np.array(value / 3 if dtype.kind == "f" else value % min(_PRIME, np.iinfo(dtype).max), dtype)
        # Whole inner chunks of fill value are left out of a shard: some records have some, some nothing else.
        fill = np.array(np.nan if dtype.kind in "fc" else 0).astype(dtype)
        if (record + version) % 5 == 0:
            found[...] = fill
        elif (record + version) % 5 == 1 and shape:
            found[: (shape[0] + 1) // 2] = fill
        found.flags.writeable = False
        return found

    def block(self, name: str, region: Mapping[str, tuple[int, int]], record: int, version: int) -> NDArray[Any]:
        """Return a rank's part of it."""
        dims = self.dims[name][1:] if name in self.dims else self.statics[name]
        return self.whole(name, record, version)[tuple(slice(*region[d]) if d in region else slice(None) for d in dims)]

    def record(self, region: Mapping[str, tuple[int, int]], record: int, version: int) -> dict[str, Any]:
        """Return a rank's blocks of all variables."""
        return {name: self.block(name, region, record, version) for name in self.dims}

    def row_keys(self, name: str, record: int) -> list[str]:
        """Return the keys of the objects that hold one record of a variable."""
        grid = [-(-self.sizes[d] // self._shard[d]) for d in self.dims[name][1:]]
        row = record // self.row[name]
        return [chunk_key(name, self.separator, (row, *index)) for index in np.ndindex(*grid)]

    def static_keys(self, name: str) -> list[str]:
        """Return the keys of the objects of a static."""
        grid = [-(-self.sizes[d] // self._shard[d]) for d in self.statics[name]]
        return [chunk_key(name, self.separator, index) for index in np.ndindex(*grid)]

    def keys(self, records: Any, statics: Any) -> set[str]:
        """Return the keys of all objects of the Zarr hierarchy with these records and statics."""
        own = ["time", "y", *(["committed"] if self.is_indexed else [])]
        found = {"zarr.json", *(f"{n}/zarr.json" for n in (*own, *self.dims, *self.statics))}
        found |= {chunk_key(n, self.separator, (0,)) for n in own if n != "time" or self.is_indexed or records}
        found |= {key for name in self.dims for r in records for key in self.row_keys(name, r)}
        return found | {key for name in statics for key in self.static_keys(name)}

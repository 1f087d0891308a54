"""What the golden stores hold, as closed forms: `tests/data/make_golden.py` writes it, a test compares with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistream as ms

__all__ = ["CASES", "FOLDER", "LOCATIONS", "Golden", "GoldenLocations", "payload"]

FOLDER = Path(__file__).parents[1] / "data" / "golden"

SIZES = {"y": 4, "x": 6}
_PLACES = {"time": 1000, "y": 100, "x": 1}


def payload(key: str, scope: int | str, writer: int) -> bytes:
    """Return the bytes of a blob."""
    return f"{key} of {scope} by {writer}\0".encode() * 3


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One golden store.

    Parameters
    ----------
    times
        Of all records; in indexed mode of those that are not committed too.
    variables, statics, coords
        Name -> description. Values are made of digits: 1000 record + 100 y + x, where the array has these dims.
    committed
        The records that are; all of them by default.
    blobs
        (key, scope, writer) of each.
    is_indexed
        Whether the times are fixed.
    layout
        Further arguments of the schema.
    """

    times: tuple[float, ...]
    variables: Mapping[str, ms.Variable]
    statics: Mapping[str, ms.Variable] = field(default_factory=dict)
    coords: Mapping[str, ms.Variable] = field(default_factory=dict)
    committed: tuple[int, ...] | None = None
    blobs: tuple[tuple[str, int | str, int], ...] = ()
    is_indexed: bool = False
    layout: Mapping[str, Any] = field(default_factory=dict)

    def schema(self) -> ms.StreamSchema:
        """Return the schema."""
        units = "hours since 2000-01-01"
        return ms.StreamSchema(
            dims={"time": None, **SIZES},
            time=ms.IndexedTime(np.array(self.times), units=units) if self.is_indexed else ms.AppendTime(units=units),
            variables=dict(self.variables),
            statics=dict(self.statics),
            coords={
                name: ms.Coordinate(c.dims, self.value(name) if self.is_in_schema(name) else None, dtype=c.dtype)
                for name, c in self.coords.items()
            },
            attrs={"title": "golden"},
            **self.layout,
        )

    @property
    def records(self) -> tuple[int, ...]:
        """The committed records."""
        return tuple(range(len(self.times))) if self.committed is None else self.committed

    def is_in_schema(self, name: str) -> bool:
        """Return whether the schema has the values of a coordinate; the others are written like statics."""
        return self.coords[name].dims == (name,) or np.dtype(self.coords[name].dtype).kind in "TU"

    def described(self, name: str) -> ms.Variable:
        """Return what an array was described with."""
        return {**self.variables, **self.statics, **self.coords}[name]

    def value(self, name: str, record: int = 0) -> NDArray[Any]:
        """Return one record of a variable, or a static or coordinate, as a whole, as it is stored."""
        value = self._given(name, record)
        keep_bits = self.described(name).keep_bits
        if keep_bits is None:
            return value
        # The nearest multiple of what the last bit that is kept is worth, in doubt the even one.
        _, exponent = np.frexp(value)
        unit = np.ldexp(1.0, exponent - 1 - keep_bits)
        return np.asarray(np.rint(value / unit) * unit, value.dtype)

    def _given(self, name: str, record: int) -> NDArray[Any]:
        described = self.described(name)
        dtype = np.dtype(described.dtype)
        space = [d for d in described.dims if d != "time"]
        digits = np.full([SIZES[d] for d in space], 1000 * record if "time" in described.dims else 0, np.int64)
        for d, index in zip(space, np.indices(digits.shape), strict=True):
            digits += _PLACES[d] * index
        if dtype.kind == "b":
            return digits % 2 == 1
        if dtype.kind in "mM":
            # NaT here and there.
            return np.where(digits % 5 == 4, np.iinfo(np.int64).min, digits).view(dtype)
        if dtype.kind in "TU":
            return np.asarray(np.char.add("é", digits.astype("U8"))).astype(dtype)
        return digits.astype(dtype)

    def record(self, record: int, region: Mapping[str, tuple[int, int]]) -> dict[str, NDArray[Any]]:
        """Return a writer's blocks of all variables."""
        return {name: self.block(name, region, record) for name in self.variables}

    def block(self, name: str, region: Mapping[str, tuple[int, int]], record: int = 0) -> NDArray[Any]:
        """Return a writer's block of an array, as it is given."""
        space = [d for d in self.described(name).dims if d != "time"]
        return self._given(name, record)[tuple(slice(*region[d]) if d in region else slice(None) for d in space)]


_FIELD = ("time", "y", "x")
_TEXT = np.dtypes.StringDType()

CASES = {
    "rows-of-one": Golden(
        times=(0.0, 0.5, 1.5),
        variables={
            "u": ms.Variable(_FIELD, "float32", attrs={"units": "m s-1"}),
            "ice": ms.Variable(_FIELD, "bool"),
            "zonal": ms.Variable(("time", "y"), "complex64"),
            "energy": ms.Variable(("time",), "float64"),
        },
        coords={"y": ms.Variable(("y",), "float64")},
        layout={"shard_shape": {"y": 2, "x": 6}, "chunk_shape": {"y": 2, "x": 3}},
    ),
    # Committed after 3, 4 and 6 records: a row that grew, and one that is filled in part.
    "rows-of-four": Golden(
        times=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0),
        variables={"u": ms.Variable(_FIELD, "float64", fill_value=-1.0), "n": ms.Variable(_FIELD, "int16")},
        layout={
            "shard_shape": {"time": 4, "y": 2, "x": 6},
            "chunk_shape": {"time": 2, "y": 2, "x": 6},
            "codec": "compact",
            "key_separator": ".",
        },
    ),
    # Records 5, 0, 1 and 3, then 1 was invalidated and 0 invalidated and written again.
    "indexed": Golden(
        times=(0.0, 0.25, 0.5, 1.0, 2.0, 4.0),
        variables={"u": ms.Variable(_FIELD, "float32"), "flag": ms.Variable(("time",), "uint8")},
        committed=(0, 3, 5),
        is_indexed=True,
        layout={"shard_shape": {"time": 2, "y": 4, "x": 6}, "codec": "wasm"},
    ),
    # Resumed once, which dropped the last of four records.
    "blobs-and-statics": Golden(
        times=(0.0, 1.0, 2.0, 3.0),
        variables={"u": ms.Variable(_FIELD, "float16")},
        statics={
            "topo": ms.Variable(("y", "x"), "int32"),
            "wet": ms.Variable(("y", "x"), "bool"),
            "gravity": ms.Variable((), "float64"),
        },
        coords={"x": ms.Variable(("x",), "float64"), "lat": ms.Variable(("y", "x"), "float64")},
        blobs=(("config", "static", 0), ("rng", 0, 0), ("rng", 2, 0), ("step", 2, 0), ("rng", 3, 0)),
        layout={"shard_shape": {"y": 2, "x": 3}, "codec": "none"},
    ),
    # Written by two parts, committed twice with their tokens.
    "parts": Golden(
        times=(0.0, 1.0, 2.0),
        variables={"u": ms.Variable(_FIELD, "float32"), "merid": ms.Variable(("time", "x"), "int64")},
        statics={"topo": ms.Variable(("y", "x"), "float32")},
        blobs=(("rng", 1, 0), ("rng", 1, 1)),
        layout={"shard_shape": {"time": 4, "y": 2, "x": 6}, "codec": "diagnostic"},
    ),
    # Dates, durations, strings of both kinds, and floats that were rounded.
    "dtypes": Golden(
        times=(0.0, 1.0, 2.0),
        variables={
            "u": ms.Variable(_FIELD, "float32", keep_bits=7),
            "w": ms.Variable(("time",), "float64", keep_bits=4),
            "day": ms.Variable(_FIELD, "datetime64[D]"),
            "launch": ms.Variable(("time",), "datetime64[ns]"),
        },
        statics={"lag": ms.Variable(("y", "x"), "timedelta64[ms]"), "version": ms.Variable((), _TEXT)},
        coords={
            "x": ms.Variable(("x",), "U3"),
            "station": ms.Variable(("y",), _TEXT),
            "start": ms.Variable(("y", "x"), "datetime64[s]"),
        },
        layout={"shard_shape": {"time": 2, "y": 2, "x": 6}},
    ),
}
"""Name of the folder, without ``.zarr`` -> what is in it."""


@dataclass(frozen=True, kw_only=True)
class GoldenLocations:
    """The golden location series: series are made of digits, 100 location + time; the last one lacks its last time."""

    ids: tuple[str, ...] = ("cat-1", "cat-2", "é", "cat-40", "cat-5")
    times: tuple[float, ...] = (0.0, 0.5, 2.0, 3.5)
    variables: Mapping[str, str] = field(default_factory=lambda: {"flow": "float32", "code": "int16"})
    committed: tuple[int, ...] = (0, 1, 3)

    def schema(self) -> ms.StreamSchema:
        """Return the schema."""
        return ms.location_schema(
            self.ids,
            ms.IndexedTime(np.array(self.times), units="hours since 2000-01-01"),
            self.variables,
            chunk_locations=2,
            inner_locations=1,
            coords={"lon": np.arange(5.0)},
            attrs={"title": "golden"},
        )

    def series(self, location: int) -> dict[str, NDArray[Any]]:
        """Return what is written of a location."""
        n = len(self.times) - (location == len(self.ids) - 1)
        return {name: (100 * location + np.arange(n)).astype(dtype) for name, dtype in self.variables.items()}

    def values(self, name: str, locations: Collection[int]) -> NDArray[Any]:
        """Return a whole variable in which these locations are written."""
        dtype = np.dtype(self.variables[name])
        whole = np.full((len(self.ids), len(self.times)), np.nan if dtype.kind == "f" else 0, dtype)
        for i in locations:
            series = self.series(i)[name]
            whole[i, : len(series)] = series
        return whole


# A chunk that was committed in two steps, one that is filled in part, and one without a location.
LOCATIONS = GoldenLocations()
"""Of the store ``locations``."""

"""The oracle: every value that a test writes is a closed form of variable, record and global index.

What is read back is compared with the whole array that the closed form gives, never with what a writer says.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistream as ms

__all__ = ["FULL", "PLANE", "Scene", "assert_holds", "plain", "time_of"]

Array = NDArray[Any]
Kinds = Mapping[str, tuple[str, str]]

# A prime below 2048: every value is exact in float16 and int16, and no stride of a grid divides it.
_PRIME = 2039
_STEPS = (1, 37, 311, 733)


def time_of(record: int) -> float:
    """Return the time of a record; no float error is made by it."""
    return 0.5 + 1.5 * record


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Dims and arrays of a made-up simulation.

    Parameters
    ----------
    sizes
        Dim -> length, without time.
    variables, statics, coords
        Name -> (dims in words, time left out; dtype). A coordinate whose name is a dim is written by the
        owner from the schema's values, any other one by region.
    """

    sizes: Mapping[str, int]
    variables: Kinds
    statics: Kinds = field(default_factory=dict)
    coords: Kinds = field(default_factory=dict)

    def schema(self, overrides: Mapping[str, Mapping[str, Any]] | None = None, **layout: Any) -> ms.StreamSchema:
        """Return the schema; ``overrides`` go to single variables, ``layout`` to the schema."""
        more = overrides or {}
        return ms.StreamSchema(
            dims={"time": None, **self.sizes},
            time=ms.AppendTime(units="seconds since 2000-01-01"),
            variables={
                name: ms.Variable(("time", *dims.split()), dtype, **more.get(name, {}))
                for name, (dims, dtype) in self.variables.items()
            },
            statics={
                name: ms.Variable(tuple(dims.split()), dtype, **more.get(name, {}))
                for name, (dims, dtype) in self.statics.items()
            },
            coords={
                name: ms.Coordinate(
                    tuple(dims.split()), self.whole(name) if self._is_owners(name) else None, dtype=dtype
                )
                for name, (dims, dtype) in self.coords.items()
            },
            **layout,
        )

    def _is_owners(self, name: str) -> bool:
        return name in self.sizes

    @property
    def region_statics(self) -> tuple[str, ...]:
        """What is written with ``write_static``."""
        return (*self.statics, *(name for name in self.coords if not self._is_owners(name)))

    def _kind(self, name: str) -> tuple[tuple[str, ...], np.dtype[Any]]:
        dims, dtype = {**self.variables, **self.statics, **self.coords}[name]
        return tuple(dims.split()), np.dtype(dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole array, without time."""
        return tuple(self.sizes[d] for d in self._kind(name)[0])

    def whole(self, name: str, record: int = 0, run: int = 0) -> Array:
        """Return one record of the whole array, as the run with this number computes it."""
        dims, dtype = self._kind(name)
        shape = tuple(self.sizes[d] for d in dims)
        value = np.full(shape, zlib.crc32(name.encode()) % 1009 + 101 * record + 577 * run, np.int64)
        for step, index in zip(_STEPS, np.indices(shape), strict=False):
            value += step * index
        value %= _PRIME
        if dtype.kind == "b":
            return (value % 3 == 0).astype(dtype)
        if dtype.kind == "c":
            return (value / 3 + 1j * (value % 7)).astype(dtype)
        # Thirds fill the mantissa, so that a detour over another float is seen.
        return (value / 3 if dtype.kind == "f" else value % min(_PRIME, np.iinfo(dtype).max)).astype(dtype)

    def block(self, name: str, region: Mapping[str, tuple[int, int]], record: int = 0, run: int = 0) -> Array:
        """Return a rank's part of it: the region's cells in the partitioned dims, all in the others."""
        dims, _ = self._kind(name)
        cut = tuple(slice(*region[d]) if d in region else slice(None) for d in dims)
        return self.whole(name, record, run)[cut]

    def record(self, region: Mapping[str, tuple[int, int]], record: int, run: int = 0) -> dict[str, Array]:
        """Return a rank's blocks of all variables."""
        return {name: self.block(name, region, record, run) for name in self.variables}

    def keys(
        self, n_records: int, shard: Mapping[str, int], separator: str = "/", statics: Sequence[str] | None = None
    ) -> set[str]:
        """Return the keys of all objects of a store: documents, shards and chunks, and nothing else.

        Parameters
        ----------
        n_records
            Committed records, at most 1,024.
        shard
            Dim -> shard length, ``time`` for the row.
        separator
            Of chunk keys.
        statics
            What was written once; all of them by default.
        """
        written = self.region_statics if statics is None else statics
        # One chunk each: time, variables over time alone, and coordinates that the owner writes.
        grids: dict[str, tuple[int, ...]] = {c: (1,) for c in self.coords if c in self.sizes}
        grids["time"] = (-(-n_records // 1024),)
        for name, (dims, _) in self.variables.items():
            row = (-(-n_records // shard["time"]),) if dims else (-(-n_records // 1024),)
            grids[name] = (*row, *(-(-self.sizes[d] // shard[d]) for d in dims.split()))
        for name in self.region_statics:
            grid = tuple(-(-self.sizes[d] // shard[d]) for d in self._kind(name)[0])
            grids[name] = grid if name in written else (0,)
        return {
            "zarr.json",
            *(f"{name}/zarr.json" for name in grids),
            *(
                f"{name}/" + separator.join(["c", *map(str, index)])
                for name, grid in grids.items()
                for index in np.ndindex(*grid)
            ),
        }

    def write(self, writer: ms.StreamWriter, record: int, run: int = 0) -> None:
        """Write one record."""
        writer.write_record(time_of(record), self.record(writer.region, record, run))

    def write_statics(self, writer: ms.StreamWriter) -> None:
        """Write everything that is written once."""
        for name in self.region_statics:
            writer.write_static(name, self.block(name, writer.region))


# No shard of the layouts below divides these.
FULL = Scene(
    sizes={"z": 3, "y": 11, "x": 13},
    variables={
        "u": ("z y x", "float32"),
        "p": ("y x", "float64"),
        "ice": ("y x", "bool"),
        "zonal": ("y", "int16"),
        "merid": ("x", "complex64"),
        "total": ("", "float64"),
    },
    statics={"topo": ("y x", "float32"), "depth": ("z", "float64"), "gravity": ("", "int32")},
    coords={"y": ("y", "float64"), "lat": ("y x", "float64"), "xmid": ("x", "float32")},
)

PLANE = Scene(sizes={"y": 8, "x": 6}, variables={"u": ("y x", "float32")}, statics={"topo": ("y x", "float32")})


def plain(url: str | os.PathLike[str]) -> Any:
    """Return the group as zarr-python finds it, through the consolidated metadata."""
    import zarr

    return zarr.open_group(Path(url), mode="r")


def assert_holds(
    url: str | os.PathLike[str],
    scene: Scene,
    runs: Sequence[int],
    *,
    statics: Sequence[str] | None = None,
    times: Sequence[float] | None = None,
) -> None:
    """Assert that zarr-python and `StoreReader` read exactly these records from a store.

    Parameters
    ----------
    url
        The store.
    scene
        What was simulated.
    runs
        Per record the number of the run that wrote it.
    statics
        What was written once, and is there; all of them by default.
    times
        Of the records; those of `time_of` by default.
    """
    group = plain(url)
    reader = ms.open_reader(url)
    expected_times = np.array([time_of(i) for i in range(len(runs))] if times is None else times, np.float64)
    np.testing.assert_array_equal(group["time"][...], expected_times, strict=True)
    np.testing.assert_array_equal(reader.times, expected_times, strict=True)
    assert reader.n_records == len(runs)
    for name in scene.variables:
        records = [scene.whole(name, i, run) for i, run in enumerate(runs)]
        expected = np.stack(records) if records else np.empty((0, *scene.shape(name)), scene.whole(name).dtype)
        np.testing.assert_array_equal(group[name][...], expected, err_msg=name, strict=True)
        for i, record in enumerate(records):
            np.testing.assert_array_equal(reader.read_record(name, i), record, err_msg=f"{name} {i}", strict=True)
    written = scene.region_statics if statics is None else statics
    assert reader.manifest.statics == tuple(sorted(written))
    for name in (*written, *(c for c in scene.coords if c in scene.sizes)):
        np.testing.assert_array_equal(group[name][...], scene.whole(name), err_msg=name, strict=True)
        np.testing.assert_array_equal(reader.read_static(name), scene.whole(name), err_msg=name, strict=True)

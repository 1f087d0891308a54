"""Plain Zarr readers see every committed value, bit by bit, whatever its dtype, codec and layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from tests.support.plain import DTYPES, QUICK, READERS, any_bits, append_schema, differing, open_xarray

NY, NX = 7, 5
N_RECORDS = 11
# Records whose cells are all fill, in the whole grid or in one shard: their inner chunks are not stored.
ALL_FILL, FILL_IN_ONE_SHARD = 3, 6
# Commits come after these numbers of records: with rows of 4 and 8, amid a row and at its end.
COMMITS = (1, 2, 4, 7, 8, 11)


@dataclass(frozen=True, kw_only=True)
class Layout:
    row: int = 1
    inner_time: int = 1
    separator: str = "/"
    codec: str = "fast"

    def __str__(self) -> str:
        return f"{self.codec}, rows of {self.row}, inner time {self.inner_time}, separator {self.separator!r}"


LAYOUTS = [
    Layout(),
    Layout(separator="."),
    Layout(row=4),
    Layout(row=4, inner_time=2, separator="."),
    Layout(row=8),
    Layout(row=8, inner_time=4, separator="."),
    Layout(codec="compact", row=4, inner_time=4),
    Layout(codec="diagnostic", row=8, inner_time=2, separator="."),
    Layout(codec="checkpoint", row=8, separator="."),
    Layout(codec="wasm", row=4, inner_time=2),
    Layout(codec="wasm", separator="."),
    Layout(codec="none", row=8, inner_time=4),
    Layout(codec="none"),
]
# xarray reads through zarr-python, so that not every layout is new to it.
XARRAY_LAYOUTS = [Layout(), Layout(row=8, inner_time=4, separator="."), Layout(codec="wasm", row=4, inner_time=2)]
STATIC_DTYPES = ("bool", "uint64", "float16", "complex128")


def fill_of(dtype: np.dtype[Any]) -> Any:
    return np.nan if dtype.kind == "f" else 0


def record_of(dtype: str, i: int) -> NDArray[Any]:
    values = any_bits(dtype, (NY, NX), i)
    if i == ALL_FILL:
        values[...] = fill_of(values.dtype)
    if i == FILL_IN_ONE_SHARD:
        values[:4, :4] = fill_of(values.dtype)
    return values


def scene_schema(layout: Layout) -> ms.StreamSchema:
    return append_schema(
        {"y": NY, "x": NX},
        {
            **{f"v_{dtype}": ms.Variable(("time", "y", "x"), dtype) for dtype in DTYPES},
            "column": ms.Variable(("time", "y"), "float32"),
            "count": ms.Variable(("time",), "int32"),
        },
        statics={
            **{f"s_{dtype}": ms.Variable(("y", "x"), dtype) for dtype in STATIC_DTYPES},
            "version": ms.Variable((), "int16"),
        },
        coords={
            "y": ms.Coordinate(("y",), np.arange(NY) * 0.1),
            "x": ms.Coordinate(("x",), np.arange(NX, dtype="int16") - 2),
            "lat": ms.Coordinate(("y", "x"), None, dtype="float64"),
        },
        # Shards of 4 x 4 on 7 x 5 cells: the last ones are cut in both dims, and so are inner chunks.
        shard_shape={"time": layout.row, "y": 4, "x": 4},
        chunk_shape={"time": layout.inner_time, "y": 2, "x": 4},
        codec=layout.codec,
        key_separator=layout.separator,
    )


def write_scene(path: Path, layout: Layout) -> dict[str, NDArray[Any]]:
    """Write a store; return what must be in it."""
    variables = {f"v_{dtype}": np.stack([record_of(dtype, i) for i in range(N_RECORDS)]) for dtype in DTYPES}
    variables["column"] = any_bits("float32", (N_RECORDS, NY), 1)
    variables["count"] = any_bits("int32", (N_RECORDS,), 2)
    statics = {f"s_{dtype}": any_bits(dtype, (NY, NX), 99) for dtype in STATIC_DTYPES}
    statics["version"] = np.array(-7, "int16")
    statics["lat"] = any_bits("float64", (NY, NX), 3)
    times = np.arange(N_RECORDS) * 0.1 + 1 / 3
    with ms.write_open(path, scene_schema(layout), options=QUICK) as writer:
        for name, values in statics.items():
            writer.write_static(name, values)
        for i in range(N_RECORDS):
            writer.write_record(times[i], {name: values[i] for name, values in variables.items()})
            if i + 1 in COMMITS:
                writer.commit()
    coordinates = {"time": times, "y": np.arange(NY) * 0.1, "x": np.arange(NX, dtype="int16") - 2}
    return {**variables, **statics, **coordinates}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_reader_sees_every_bit(tmp_path: Path, layout: Layout) -> None:
    """Variables, statics, coordinates and time of a store are bitwise the same for each plain reader."""
    path = tmp_path / "run.zarr"
    expected = write_scene(path, layout)
    readers = [name for name in READERS if layout in XARRAY_LAYOUTS or not name.startswith("xarray")]
    found = {name: differing(READERS[name](path, list(expected)), expected) for name in readers}
    assert found == {name: [] for name in readers}


@pytest.mark.parametrize("layout", [Layout(), Layout(row=8, inner_time=2, separator=".")], ids=str)
def test_our_reader_sees_every_bit(tmp_path: Path, layout: Layout) -> None:
    """The reader of this library sees the same bits as the plain ones."""
    path = tmp_path / "run.zarr"
    expected = write_scene(path, layout)
    reader = ms.open_reader(path)
    found = {
        name: np.stack([reader.read_record(name, i) for i in range(reader.n_records)])
        if reader.schema.arrays[name].has_time
        else reader.read_static(name)
        for name in reader.schema.arrays
    }
    assert differing({**found, "time": reader.times}, expected) == []


def test_dims_attributes_and_coordinates_arrive(tmp_path: Path) -> None:
    """xarray finds dims, attributes, the group's attributes, and coordinates as coordinates."""
    path = tmp_path / "run.zarr"
    schema = append_schema(
        {"y": 3, "x": 2},
        {"u": ms.Variable(("time", "y", "x"), "float32", attrs={"units": "m s-1", "valid_max": np.float32(0.5)})},
        coords={
            "y": ms.Coordinate(("y",), [0.5, 1.5, 2.5], attrs={"axis": "Y"}),
            "lat": ms.Coordinate(("y", "x"), None, dtype="float64", attrs={"standard_name": "latitude"}),
        },
        attrs={"title": "größer ➜", "Conventions": "CF-1.11"},
    )
    with ms.write_open(path, schema, options=QUICK) as writer:
        writer.write_static("lat", np.full((3, 2), 50.0))
        writer.write_record(0.0, {"u": 1.0})
    for consolidated in (True, False):
        dataset = open_xarray(path, consolidated=consolidated)
        assert dataset.attrs == {"title": "größer ➜", "Conventions": "CF-1.11"}
        assert dataset["u"].dims == ("time", "y", "x")
        assert dataset["u"].attrs == {"units": "m s-1", "valid_max": 0.5}
        assert sorted(dataset.coords) == ["lat", "time", "y"]
        assert dataset["y"].attrs == {"axis": "Y"}
        assert dataset["lat"].attrs == {"standard_name": "latitude"}
        assert dataset["time"].attrs == {"standard_name": "time", "axis": "T"}


def test_committed_shard_exists_though_all_its_cells_are_fill(tmp_path: Path) -> None:
    """A committed shard is always an object, so its absence means damage and never "all fill"."""
    path = tmp_path / "run.zarr"
    schema = append_schema(
        {"y": 4}, {"u": ms.Variable(("time", "y"), "float32")}, shard_shape={"y": 2}, chunk_shape={"y": 2}
    )
    with ms.write_open(path, schema, options=QUICK) as writer:
        writer.write_record(0.0, {"u": np.nan})
    keys = [p.relative_to(path).as_posix() for p in sorted((path / "u" / "c").rglob("*")) if p.is_file()]
    assert keys == ["u/c/0/0", "u/c/0/1"]
    # An index of one inner chunk that is absent: twice 2**64 - 1 and a checksum (sharding_indexed 1.0).
    assert [(path / key).read_bytes()[:16] for key in keys] == [b"\xff" * 16] * 2
    assert [(path / key).stat().st_size for key in keys] == [20, 20]


@pytest.mark.parametrize("reader", READERS)
def test_fill_values_come_back_where_nothing_is_stored(tmp_path: Path, reader: str) -> None:
    """Fill values other than the default ones are seen bitwise in inner chunks that are left out."""
    path = tmp_path / "run.zarr"
    fills: dict[str, tuple[str, Any]] = {
        "minus_zero": ("float32", -0.0),
        "infinite": ("float64", -math.inf),
        "half": ("float16", 0.1),
        "third": ("float64", 1 / 3),
        "lowest": ("int64", -(2**63)),
        "highest": ("uint64", 2**64 - 1),
        "yes": ("bool", True),
        "pair": ("complex128", complex(-0.0, math.inf)),
        "no_pair": ("complex64", complex(math.nan, math.nan)),
    }
    schema = append_schema(
        {"y": 4}, {n: ms.Variable(("time", "y"), dtype, fill_value=fill) for n, (dtype, fill) in fills.items()}
    )
    expected = {n: np.full((2, 4), fill, dtype) for n, (dtype, fill) in fills.items()}
    for values in expected.values():
        values[1, 2:] = 0
    with ms.write_open(path, schema, options=QUICK) as writer:
        for i in range(2):
            writer.write_record(float(i), {n: values[i] for n, values in expected.items()})
    assert differing(READERS[reader](path, list(fills)), expected) == []

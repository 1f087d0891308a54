"""What xarray makes of a store: zeros stay zeros, dtypes and times are exact, lengths agree at any time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.plain import DTYPES, QUICK, READERS, append_schema, differing, open_xarray

EITHER_WAY = pytest.mark.parametrize("consolidated", [True, False], ids=["consolidated", "not consolidated"])


@EITHER_WAY
def test_zeros_are_zeros_of_their_dtype(tmp_path: Path, consolidated: bool) -> None:
    """A field of zeros is no field of missing values, whatever its dtype and whatever the fill value (P-38)."""
    path = tmp_path / "run.zarr"
    schema = append_schema({"y": 4}, {dtype: ms.Variable(("time", "y"), dtype) for dtype in DTYPES})
    with ms.write_open(path, schema, options=QUICK) as writer:
        for i in range(3):
            writer.write_record(float(i), {dtype: np.zeros(4, dtype) for dtype in DTYPES})
    dataset = open_xarray(path, consolidated=consolidated)
    expected = {dtype: np.zeros((3, 4), dtype) for dtype in DTYPES}
    assert differing({dtype: dataset[dtype].values for dtype in DTYPES}, expected) == []


@EITHER_WAY
def test_dtypes_survive_a_resume(tmp_path: Path, consolidated: bool) -> None:
    """bool, uint8, float16 and complex keep their dtype through append, resume and xarray (P-48)."""
    path = tmp_path / "run.zarr"
    names = ("bool", "uint8", "float16", "complex64", "complex128")
    schema = append_schema({"y": 3}, {dtype: ms.Variable(("time", "y"), dtype) for dtype in names})
    expected = {dtype: (np.arange(12).reshape(4, 3) % 5).astype(dtype) for dtype in names}
    with ms.write_open(path, schema, options=QUICK) as writer:
        for i in (0, 1, 2):
            writer.write_record(float(i), {dtype: expected[dtype][i] for dtype in names})
    with ms.write_resume(path, at=1.0, options=QUICK) as writer:
        for i in (2, 3):
            writer.write_record(float(i), {dtype: expected[dtype][i] for dtype in names})
    dataset = open_xarray(path, consolidated=consolidated)
    assert differing({dtype: dataset[dtype].values for dtype in names}, expected) == []


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_nan_fill_has_two_parts(tmp_path: Path, dtype: str) -> None:
    """nan+nanj is stored as a pair, and xarray sees NaN in both parts (P-49)."""
    import json

    path = tmp_path / "run.zarr"
    fill = complex(math.nan, math.nan)
    schema = append_schema({"y": 4}, {"psi": ms.Variable(("time", "y"), dtype, fill_value=fill)}, chunk_shape={"y": 2})
    with ms.write_open(path, schema, options=QUICK) as writer:
        writer.write_record(0.0, {"psi": np.array([fill, fill, 1 + 2j, complex(math.nan, 3)], dtype)})
    assert json.loads((path / "psi" / "zarr.json").read_text())["fill_value"] == ["NaN", "NaN"]
    for consolidated in (True, False):
        found = open_xarray(path, consolidated=consolidated)["psi"]
        assert found.dtype == dtype
        values = found.values[0]
        np.testing.assert_array_equal(values.real, [math.nan, math.nan, 1, math.nan])
        np.testing.assert_array_equal(values.imag, [math.nan, math.nan, 2, 3])


STEPS = [0.0, 6 * 3600.0, 6 * 3600.0 + 90, 6 * 3600.0 + 90.5]
DATES = ["2000-01-01T00:00:00", "2000-01-01T06:00:00", "2000-01-01T06:01:30", "2000-01-01T06:01:30.500"]


@EITHER_WAY
@pytest.mark.parametrize(
    ("units", "seconds"),
    [
        ("seconds since 2000-01-01", 1),
        ("seconds since 2000-01-01 00:00:00", 1),
        ("milliseconds since 2000-01-01", 1e-3),
        ("hours since 2000-01-01", 3600),
        ("days since 2000-01-01", 86400),
    ],
)
def test_times_below_the_unit_are_decoded_exactly(
    tmp_path: Path, units: str, seconds: float, consolidated: bool
) -> None:
    """A first record at midnight does not fix times to whole units: +6 h, +90 s and +0.5 s come out exactly (P-37)."""
    path = tmp_path / "run.zarr"
    schema = append_schema({"y": 1}, {"u": ms.Variable(("time", "y"), "float32")}, units)
    with ms.write_open(path, schema, options=QUICK) as writer:
        for t in STEPS:
            writer.write_record(t / seconds, {"u": 0.0})
            writer.commit()
    found = open_xarray(path, consolidated=consolidated)["time"]
    assert found.values.astype("datetime64[ns]").tolist() == np.array(DATES, "datetime64[ns]").tolist()


@EITHER_WAY
@pytest.mark.parametrize("row", [1, 4])
def test_store_without_records_opens_and_the_first_record_is_at_index_zero(
    tmp_path: Path, consolidated: bool, row: int
) -> None:
    """A time dim that starts empty opens with length 0, and the first record put is its first (P-43)."""
    path = tmp_path / "run.zarr"
    schema = append_schema(
        {"y": 2},
        {"u": ms.Variable(("time", "y"), "float32"), "n": ms.Variable(("time",), "int64")},
        shard_shape={"time": row},
    )
    with ms.write_open(path, schema, options=QUICK) as writer:
        dataset = open_xarray(path, consolidated=consolidated)
        assert dict(dataset.sizes) == {"time": 0, "y": 2}
        assert dataset["time"].values.shape == (0,)
        assert dataset["u"].values.shape == (0, 2)
        writer.write_record(5.0, {"u": np.array([1.5, 2.5], "float32"), "n": 7})
        writer.commit()
        dataset = open_xarray(path, consolidated=consolidated)
        assert dataset["u"].values.tolist() == [[1.5, 2.5]]
        assert dataset["n"].values.tolist() == [7]
        assert dataset["time"].values.tolist() == np.array(["2000-01-01T00:00:05"], "datetime64[ns]").tolist()


def test_store_without_records_is_empty_for_every_reader(tmp_path: Path) -> None:
    """Each plain reader opens a store that has no record yet and finds the length 0."""
    path = tmp_path / "run.zarr"
    schema = append_schema({"y": 2}, {"u": ms.Variable(("time", "y"), "float32")}, shard_shape={"time": 4})
    ms.write_open(path, schema, options=QUICK).close()
    expected = {"u": np.empty((0, 2), "float32"), "time": np.empty(0)}
    found = {name: differing(read(path, ["u", "time"]), expected) for name, read in READERS.items()}
    assert found == {name: [] for name in READERS}


@pytest.mark.parametrize(("row", "inner_time"), [(1, 1), (4, 2)])
def test_both_kinds_of_metadata_agree_after_each_commit(tmp_path: Path, row: int, inner_time: int) -> None:
    """Consolidated metadata is never older than that of the arrays, through appends and a resume (P-42)."""
    path = tmp_path / "run.zarr"
    schema = append_schema(
        {"y": 3},
        {name: ms.Variable(("time", "y"), "float32") for name in ("u", "v", "w")},
        shard_shape={"time": row},
        chunk_shape={"time": inner_time},
    )

    def lengths() -> list[dict[Any, int]]:
        return [dict(open_xarray(path, consolidated=c).sizes) for c in (True, False)]

    def append(writer: ms.StreamWriter, i: int) -> None:
        writer.write_record(float(i), {name: float(i) for name in ("u", "v", "w")})
        writer.commit()
        assert lengths() == [{"time": i + 1, "y": 3}] * 2

    with ms.write_open(path, schema, options=QUICK) as writer:
        assert lengths() == [{"time": 0, "y": 3}] * 2
        for i in range(6):
            append(writer, i)
    with ms.write_resume(path, at=2.0, options=QUICK) as writer:
        assert lengths() == [{"time": 3, "y": 3}] * 2
        for i in range(3, 5):
            append(writer, i)
    assert open_xarray(path)["v"].values[:, 0].tolist() == [0, 1, 2, 3, 4]

"""Which stores are the same, and what is said of those that are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from mpistream.compare import Comparison, compare
from mpistream.testing import assert_stores_equal
from tests.support.plain import QUICK, append_schema

NY, NX = 4, 6


def field(i: int) -> NDArray[Any]:
    return np.add.outer(np.arange(NY) * 10.0, np.arange(NX)) + 1000.0 * i


def write(
    url: Path, n_records: int = 4, cells: Mapping[tuple[int, ...], float] | None = None, shard: int = 2, **more: Any
) -> Path:
    """Write ``n_records`` of `field`; ``cells`` are (record, y, x) -> another value."""
    given: dict[str, Any] = {
        "variables": {"t": ms.Variable(("time", "y", "x"), "f8"), "e": ms.Variable(("time",), "f8")},
        "statics": {"depth": ms.Variable(("y", "x"), "f4")},
        "coords": {"y": ms.Coordinate(("y",), ["a", "b", "c", "d"])},
    }
    schema = append_schema({"y": NY, "x": NX}, shard_shape={"y": shard, "x": NX}, **{**given, **more})
    with ms.write_open(url, schema, options=QUICK) as w:
        w.write_static("depth", 1.0)
        for i in range(n_records):
            block = field(i)
            for (record, y, x), value in (cells or {}).items():
                if record == i:
                    block[y, x] = value
            w.write_record(60.0 * i, {"t": block, "e": block.sum()} if "e" in schema.variables else {"t": block})
    return url


def found(a: Path, b: Path, **how: Any) -> dict[str, str]:
    return {d.array: f"{d.kind}: {d.text}" for d in compare(a, b, **how).differences}


def test_the_layout_does_not_count(tmp_path: Path) -> None:
    """Other shards, chunks and commits, the same values: no difference."""
    a, b = write(tmp_path / "a"), write(tmp_path / "b", shard=4, codec="compact")
    result = compare(a, b)
    assert result.is_same
    assert (result.n_arrays, result.n_records) == (5, 4)
    assert str(result) == f"{a} and {b} are the same bitwise: 5 arrays, 4 records"
    assert_stores_equal(a, b)


def test_the_first_difference_and_the_largest(tmp_path: Path) -> None:
    """By variable, record and index; how many cells; the largest differences, absolute and relative."""
    a = write(tmp_path / "a", cells={(1, 2, 3): 1024.0, (3, 0, 5): 3010.0}, variables={"t": V})
    b = write(tmp_path / "b", variables={"t": V})
    (d,) = compare(a, b).differences
    assert (d.array, d.kind, d.record, d.index, d.n_cells) == ("t", "values", 1, (2, 3), 2)
    assert d.max_abs == 5.0
    assert d.max_rel == pytest.approx(5 / 3005)
    assert d.text == (
        "first at record 1, y[2] x[3]: 1024.0 and 1023.0; 2 cells differ, by at most 5, relatively 0.00166389"
    )
    with pytest.raises(AssertionError, match=r"differ \(bitwise.*\n  t: first at record 1, y\[2\] x\[3\]"):
        assert_stores_equal(a, b)


V = ms.Variable(("time", "y", "x"), "f8")


def test_tolerances(tmp_path: Path) -> None:
    """As numpy.isclose with its own: |a - b| <= atol + rtol |b|."""
    a, b = write(tmp_path / "a", cells={(1, 0, 0): 1000.5}), write(tmp_path / "b")
    assert set(found(a, b)) == {"t", "e"}
    assert found(a, b, atol=0.5) == {}
    assert set(found(a, b, atol=0.4)) == {"t", "e"}
    assert found(a, b, rtol=0.0006) == {}
    assert_stores_equal(a, b, atol=0.5)
    assert found(a, b, variables=["depth"]) == {}
    for bad in ({"rtol": -1}, {"atol": np.nan}, {"variables": ["nothing"]}):
        with pytest.raises(ms.SchemaError):
            compare(a, b, **bad)


# dtype, two values, whether they are the same bit by bit, and within 0.01.
VALUES: dict[str, tuple[str, Any, Any, bool, bool]] = {
    "nan": ("f8", np.nan, np.nan, True, True),
    "zeros": ("f8", 0.0, -0.0, False, True),
    "infinities": ("f8", np.inf, -np.inf, False, False),
    "infinite": ("f8", np.inf, 1.0, False, False),
    "missing": ("f8", np.nan, 1.0, False, False),
    "half": ("f2", 1.0, 1.0009765625, False, True),
    "wraps": ("u1", 0, 255, False, False),
    "large": ("u8", 2**64 - 1, 2**64 - 2, False, False),
    "flag": ("bool", True, False, False, False),
    "complex": ("c16", 1 + 1e-4j, 1, False, True),
    "date": ("M8[s]", np.datetime64(5, "s"), np.datetime64(6, "s"), False, False),
}


def test_values_of_every_kind(tmp_path: Path) -> None:
    """Without a tolerance every bit counts; with one, NaN is NaN and infinity itself alone."""
    for side in (1, 2):
        schema = append_schema({"y": 2}, {n: ms.Variable(("time", "y"), v[0]) for n, v in VALUES.items()})
        with ms.write_open(tmp_path / str(side), schema, options=QUICK) as w:
            w.write_record(0.0, {n: np.array([v[side]] * 2, v[0]) for n, v in VALUES.items()})
    bitwise = compare(tmp_path / "1", tmp_path / "2")
    assert {d.array for d in bitwise.differences} == {n for n, v in VALUES.items() if not v[3]}
    assert set(found(tmp_path / "1", tmp_path / "2", atol=0.01)) == {n for n, v in VALUES.items() if not v[4]}
    gaps = {d.array: d.max_abs for d in bitwise.differences}
    assert (gaps["wraps"], gaps["large"], gaps["infinities"], gaps["missing"], gaps["flag"]) == (
        *(255.0, 1.0, np.inf, None, None),
    )
    document = json.dumps(bitwise.to_json(), allow_nan=False)
    assert json.loads(document)["is_same"] is False


def test_records_that_one_has_alone(tmp_path: Path) -> None:
    """The number is named, and what both have is compared; times count."""
    a, b = write(tmp_path / "a", 6, {(2, 0, 0): 7.0}), write(tmp_path / "b", 4)
    assert found(a, b)[""] == "records: 6 records in the first, 4 in the second"
    assert set(found(a, b)) == {"", "e", "t"}
    assert compare(a, b).n_records == 4
    schema = append_schema(
        {"y": NY, "x": NX},
        {"t": V, "e": ms.Variable(("time",), "f8")},
        statics={"depth": ms.Variable(("y", "x"), "f4")},
        coords={"y": ms.Coordinate(("y",), ["a", "b", "c", "d"])},
    )
    with ms.write_open(tmp_path / "c", schema, options=QUICK) as w:
        for i in range(4):
            w.write_record(60.0 * i + (i == 3), {"t": field(i), "e": field(i).sum()})
    assert found(b, tmp_path / "c") == {
        "depth": "missing: not committed in the second",
        "time": "values: first at record 3: 180.0 and 181.0; 1 cell differs, by at most 1, relatively 0.00552486",
    }


def test_records_of_an_indexed_stream(tmp_path: Path) -> None:
    """Those that are committed in one alone are named, the others are compared."""
    for name, records in (("a", (0, 1, 3)), ("b", (0, 3, 4, 5))):
        schema = ms.StreamSchema(
            dims={"time": None, "y": 2},
            time=ms.IndexedTime(np.arange(6.0), units="s"),
            variables={"v": ms.Variable(("time", "y"), "f4")},
        )
        with ms.write_open(tmp_path / name, schema, options=QUICK) as w:
            for i in records:
                w.write_record_at(i, float(i), {"v": float(i) + (name == "b" and i == 3)})
    assert found(tmp_path / "a", tmp_path / "b") == {
        "": "records: committed only in the first: 1; only in the second: 4 to 5",
        "v": "values: first at record 3, y[0]: 3.0 and 4.0; 2 cells differ, by at most 1, relatively 0.25",
    }


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    """Missing on one side, other dims, dtypes, shapes, strings; attributes on request."""
    a = write(tmp_path / "a")
    b = _other(tmp_path / "b")
    differences = found(a, b)
    assert differences == {
        "depth": "dims: dims ('y', 'x') and ('x', 'y')",
        "e": "missing: only in the first",
        "n": "missing: only in the second",
        "t": "dtype: dtype float64 and float32",
        "y": "values: first at y[1]: 'b' and 'B'; 1 cell differs",
    }
    more = compare(a, b, attrs=True).differences
    assert [(d.array, d.text) for d in more if d.kind == "attrs"] == [
        ("", "attributes: title None and 'b'"),
        ("t", "attributes: units None and 'K'"),
    ]


def _other(url: Path) -> Path:
    schema = append_schema(
        {"y": NY, "x": NX},
        {"t": ms.Variable(("time", "y", "x"), "f4", attrs={"units": "K"}), "n": ms.Variable(("time",), "i4")},
        statics={"depth": ms.Variable(("x", "y"), "f4")},
        coords={"y": ms.Coordinate(("y",), ["a", "B", "c", "d"])},
        attrs={"title": "b"},
    )
    with ms.write_open(url, schema, options=QUICK) as w:
        w.write_static("depth", 1.0)
        for i in range(4):
            w.write_record(60.0 * i, {"t": field(i), "n": i})
    return url


def test_stores_that_are_no_streams(tmp_path: Path) -> None:
    """Arrays of any Zarr store are compared by slab."""
    import zarr

    for name in ("a", "b"):
        group = zarr.open_group(tmp_path / name, mode="w", zarr_format=3)
        array = group.create_array("g/v", shape=(9, 5), chunks=(2, 5), dtype="i4")
        array[...] = np.arange(45, dtype="i4").reshape(9, 5)
        group.create_array("scalar", shape=(), dtype="f8")
        if name == "b":
            array[7, 2] = -1
    result: Comparison = compare(tmp_path / "a", tmp_path / "b")
    (d,) = result.differences
    assert (d.array, d.record, d.index, d.max_abs, result.n_arrays) == ("g/v", None, (7, 2), 38.0, 2)
    assert compare(tmp_path / "a", tmp_path / "a").is_same


def test_a_store_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ms.FormatError):
        compare(write(tmp_path / "a"), tmp_path / "nothing")

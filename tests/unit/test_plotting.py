"""What is drawn: values, axes with coordinates and units, and files that are pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.plotting import draw, picture
from tests.support.plain import QUICK, append_schema

NZ, NY, NX = 3, 4, 6
LAT, LON = np.meshgrid(np.linspace(48, 50, NY), np.linspace(-125, -122, NX), indexing="ij")


def field(i: int) -> Any:
    return np.arange(NZ * NY * NX).reshape(NZ, NY, NX) + 1000.0 * i


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("plot") / "s"
    schema = append_schema(
        {"z": NZ, "y": NY, "x": NX, "name": 3},
        {
            "t": ms.Variable(("time", "z", "y", "x"), "f4", attrs={"units": "K", "long_name": "cost in $ or $"}),
            "m": ms.Variable(("time", "y", "x"), "i2", attrs={"_FillValue": -9}),
            "c": ms.Variable(("time", "name"), "c8"),
            "e": ms.Variable(("time",), "f8", attrs={"units": "J"}),
            "lag": ms.Variable(("time", "y"), "m8[s]"),
        },
        statics={"depth": ms.Variable(("y", "x"), "f4", attrs={"units": "m"}), "one": ms.Variable((), "f4")},
        coords={
            "z": ms.Coordinate(("z",), [0.0, 10.0, 50.0], attrs={"units": "m"}),
            "name": ms.Coordinate(("name",), ["a", "b", "c"]),
            "lat": ms.Coordinate(("y", "x"), LAT, attrs={"units": "degrees_north"}),
            "lon": ms.Coordinate(("y", "x"), LON, attrs={"standard_name": "longitude"}),
        },
        units="hours since 2000-01-01",
    )
    with ms.write_open(found, schema, options=QUICK) as w:
        w.write_static("depth", 5.0)
        w.write_static("one", 5.0)
        for i in range(3):
            m = np.full((NY, NX), i, "i2")
            m[0, 0] = -9
            lag = np.array([1, 2, 3, "NaT"], "m8[s]")
            w.write_record(6.0 * i, {"t": field(i), "m": m, "c": 3 + 4j, "e": 2.0 * i, "lag": lag})
    return found


def test_a_map(url: Path, tmp_path: Path) -> None:
    """The last record at the nearest level, over latitude and longitude, with units; the file is a PNG."""
    found = picture(url, "t", at={"z": "12"})
    assert found.values.tolist() == field(2)[1].tolist()
    assert [a.label for a in found.axes] == ["lat [degrees_north]", "longitude"]
    np.testing.assert_array_equal(found.axes[0].values, LAT)
    np.testing.assert_array_equal(found.axes[1].values, LON)
    assert (found.label, found.title) == ("cost in $ or $ [K]", "t: record 2, 2000-01-01T12:00:00, z = 10 m")
    pytest.importorskip("matplotlib", reason="needs matplotlib, from the extra plot")
    draw(found, tmp_path / "t.png")
    data = (tmp_path / "t.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (960, 720)


def test_missing_values_are_left_out(url: Path) -> None:
    """_FillValue and NaT are NaN; a complex number is its magnitude."""
    found = picture(url, "m", record=1)
    assert np.isnan(found.values[0, 0])
    assert found.values[1, 1] == 1.0
    assert picture(url, "lag").values.tolist()[:3] == [1.0, 2.0, 3.0]
    assert np.isnan(picture(url, "lag").values[3])
    assert picture(url, "c").values.tolist() == [5.0, 5.0, 5.0]


def test_lines(url: Path, tmp_path: Path) -> None:
    """Along one dim of a record; over time where no other dim is left."""
    along = picture(url, "t", record=0, at={"y": "1", "x": "2"})
    assert (along.values.tolist(), along.axes[0].values.tolist()) == (field(0)[:, 1, 2].tolist(), [0.0, 10.0, 50.0])
    assert along.axes[0].label == "z [m]"
    for found in (picture(url, "e"), picture(url, "t", at={"z": "0", "y": "0", "x": "0"})):
        assert found.axes[0].values.tolist() == [0.0, 6.0, 12.0]
        assert found.axes[0].label == "time [hours since 2000-01-01]"
    assert picture(url, "e").values.tolist() == [0.0, 2.0, 4.0]
    assert picture(url, "depth", at={"y": "3"}).axes[0].label == "x (index)"
    pytest.importorskip("matplotlib", reason="needs matplotlib, from the extra plot")
    draw(along, tmp_path / "l.png")
    assert (tmp_path / "l.png").stat().st_size > 1000


def test_a_large_map_is_thinned(tmp_path: Path) -> None:
    """More cells than pixels are not drawn: every third, with its own coordinate."""
    n = 4000
    schema = append_schema(
        {"y": 2, "x": n},
        {"v": ms.Variable(("time", "y", "x"), "f4")},
        coords={"x": ms.Coordinate(("x",), np.arange(n))},
    )
    with ms.write_open(tmp_path / "s", schema, options=QUICK) as w:
        w.write_record(0.0, {"v": np.arange(2 * n, dtype="f4").reshape(2, n)})
    found = picture(tmp_path / "s", "v")
    assert found.values.shape == (2, 1334)
    np.testing.assert_array_equal(found.values[0], found.axes[1].values)


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("nothing", {}, "'nothing'"),
        ("name", {}, "not drawn"),
        ("t", {}, "--sel"),
        ("one", {}, "dims"),
        ("e", {"record": 0}, "another record"),
        ("depth", {"record": 0}, "no time"),
        ("t", {"record": 9}, "there are 3 records"),
        ("t", {"at": {"w": "0"}}, "no dim 'w'"),
        ("t", {"at": {"z": "deep"}}, "give a number"),
        ("c", {"at": {"name": "d"}}, "name has no 'd'"),
        ("m", {"at": {"y": "9"}}, "index from 0 to 3"),
    ],
)
def test_what_cannot_be_drawn(url: Path, name: str, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ms.SchemaError, match=text):
        picture(url, name, **given)


def test_files_that_cannot_be_written(url: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, from the extra plot")
    for path in ("out.what", "nowhere/out.png"):
        with pytest.raises(ms.StoreError, match=path):
            draw(picture(url, "e"), tmp_path / path)
    for module in ("matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ms.StoreError, match=r"mpistream\[plot\]"):
        draw(picture(url, "e"), tmp_path / "out.png")


def test_the_last_committed_record_of_an_indexed_stream(tmp_path: Path) -> None:
    """By default; before there is one, that is said."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4},
        time=ms.IndexedTime([0.0, 1.0, 2.0, 3.0], units="hours since 2000-01-01"),
        variables={"v": ms.Variable(("time", "y"), "f4")},
    )
    with ms.write_open(tmp_path / "s", schema, options=QUICK) as w:
        with pytest.raises(ms.SchemaError, match="no record is committed yet"):
            picture(tmp_path / "s", "v")
        for i in (2, 0):
            w.write_record_at(i, float(i), {"v": 10.0 + i})
    found = picture(tmp_path / "s", "v")
    assert (found.values.tolist(), found.title) == ([12.0] * 4, "v: record 2, 2000-01-01T02:00:00")

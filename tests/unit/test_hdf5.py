"""Files that others made, by region: netCDF-4 of xarray, plain HDF5, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms

h5py = pytest.importorskip("h5py", reason="needs h5py, from the extra hdf5")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of h5py's own: a group, an array without dims, one over dims, strings, an unlimited dim."""
    found = tmp_path / "mine.h5"
    with h5py.File(found, "w") as file:
        file.attrs["title"] = "mine"
        file["time"] = np.arange(3.0)
        file["ocean/t"] = np.arange(24, dtype=">i2").reshape(2, 3, 4)
        file["names"] = ["a", "é"]
        file["fixed"] = np.array([b"ab", b"c"])
        file["nothing"] = h5py.Empty("f4")
        file["mask"] = np.array([True, False])
        file["type"] = np.dtype("f8")
    return found


def test_hierarchy(path: Path) -> None:
    """Groups and arrays by path; what is neither is left out; an axis without a name has none."""
    with ms.open_hdf5(path) as r:
        nodes = r.hierarchy()
        assert list(nodes) == ["", "fixed", "mask", "names", "ocean", "ocean/t", "time"]
        assert {p: n.dtype for p, n in nodes.items() if n.dtype} == {
            "fixed": "string",
            "mask": "bool",
            "names": "string",
            "ocean/t": "int16",
            "time": "float64",
        }
        assert (nodes["ocean/t"].shape, nodes["ocean/t"].dims, nodes["ocean"].kind) == ((2, 3, 4), (None,) * 3, "group")
        assert (r.attrs, r.attrs_of("time")) == ({"title": "mine"}, {})
        assert repr(r) == f"HDF5Reader({str(path)!r})"


def test_arrays_by_region(path: Path) -> None:
    """In native byte order; strings of either kind as strings."""
    with ms.open_hdf5(path) as r:
        found = r.read_array("ocean/t", [(1, 2), (0, 2), (3, 4)])
        assert (found.tolist(), found.dtype) == ([[[15], [19]]], np.dtype("int16"))
        assert r.read_array("names").tolist() == ["a", "é"]
        assert r.read_static("fixed", [(0, 1)]).tolist() == ["ab"]  # type: ignore[arg-type]
        assert r.read_array("mask").tolist() == [True, False]


def test_a_file_of_xarray(tmp_path: Path) -> None:
    """Dims have their names, the unlimited one makes records, and scales are not applied."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf", reason="needs h5netcdf, from the extra test")
    values = np.arange(30.0).reshape(3, 5, 2)
    data = xarray.Dataset(
        {"t": (("time", "y", "x"), values, {"units": "K"}), "ice": (("y",), [True, False, True, True, False])},
        {"time": [0.0, 1.0, 2.0], "y": np.arange(5) * 10},
    )
    path, packed = tmp_path / "x.nc", {"dtype": "int16", "scale_factor": 0.5, "_FillValue": -1}
    data.to_netcdf(path, engine="h5netcdf", unlimited_dims=["time"], encoding={"t": packed})
    with ms.open_hdf5(path) as r:
        assert (r.record_dim, r.n_records, r.times.tolist()) == ("time", 3, [0.0, 1.0, 2.0])
        assert list(r.hierarchy()) == ["", "ice", "t", "time", "y"]
        assert r.hierarchy()["t"].dims == ("time", "y", "x")
        assert {n: r.attrs_of("t")[n] for n in ("units", "scale_factor", "_FillValue")} == {
            "units": "K",
            "scale_factor": 0.5,
            "_FillValue": -1,
        }
        assert r.read_record("t", -1, {"y": (1, 3)}).tolist() == (2 * values[2, 1:3]).tolist()
        assert r.read_array("t", {"time": (0, 1), "x": (1, 2)}).tolist() == (2 * values[:1, :, 1:]).tolist()
        assert r.read_static("ice").tolist() == [True, False, True, True, False]
        assert r.read_array("t", ms.Region(("y", "cell"), [((2, 3), (0, 9))])).shape == (3, 1, 2)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda r: r.read_array("nothing-here"), "unknown"),
        (lambda r: r.read_array("ocean"), "unknown"),
        (lambda r: r.read_array("type"), "unknown"),
        (lambda r: r.read_array(5), "unknown"),
        (lambda r: r.read_array("time", [(0, 9)]), "region"),
        (lambda r: r.read_array("ocean/t", {"y": (0, 1)}), "region"),
        (lambda r: r.read_record("time", 0), "records"),
        (lambda r: r.n_records, "records"),
    ],
)
def test_what_is_not_there(path: Path, call: Any, kind: str) -> None:
    with ms.open_hdf5(path) as r, pytest.raises(ms.SchemaError) as caught:
        call(r)
    assert caught.value.kind == kind


def test_records_that_are_not_there(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "r.h5", "w") as file:
        file.create_dataset("time", data=np.arange(2.0), maxshape=(None,))
        file["time"].make_scale("time")
        file["a"], file["b"] = np.zeros((2, 3)), np.zeros(3)
        file["a"].dims[0].attach_scale(file["time"])
    with ms.open_hdf5(tmp_path / "r.h5") as r:
        assert r.read_record("a", 1).shape == (3,)
        with pytest.raises(ms.SchemaError, match="there are 2 records"):
            r.read_record("a", 2)
        with pytest.raises(ms.SchemaError, match="has no records"):
            r.read_record("b", 0)


def test_a_file_that_is_none(tmp_path: Path, path: Path) -> None:
    """Missing, cut off, closed: each says so and names the file."""
    with pytest.raises(ms.FormatError, match=r"gone\.nc: no such file"):
        ms.open_hdf5(tmp_path / "gone.nc")
    cut = tmp_path / "cut.nc"
    cut.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ms.FormatError, match=r"cut\.nc"):
        ms.open_hdf5(cut)
    r = ms.open_hdf5(path)
    r.close()
    with pytest.raises(ms.StoreError, match="closed"):
        r.read_array("time")


def test_damage_names_the_array(tmp_path: Path) -> None:
    """A chunk whose checksum is wrong is an error, not values."""
    path = tmp_path / "c.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("v", data=np.arange(1000.0), chunks=(1000,), fletcher32=True)
        where = file["v"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[where + 100] ^= 1
    path.write_bytes(data)
    with ms.open_hdf5(path) as r, pytest.raises(ms.FormatError, match="'v'"):
        r.read_array("v")

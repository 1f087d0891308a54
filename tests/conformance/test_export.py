"""A stream as a netCDF-4 file: what h5py, xarray and the tools of netCDF and HDF5 find in it, bit by bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from mpistream.reader import StoreReader
from tests.support.golden import CASES, FOLDER, Golden
from tests.support.plain import QUICK, any_bits, append_schema, differing

h5py = pytest.importorskip("h5py", reason="needs h5py, from the extra hdf5")

each_golden = pytest.mark.parametrize("case", CASES)


def as_in_file(values: NDArray[Any]) -> NDArray[Any]:
    """Return values in the types that netCDF-4 has, from numpy alone."""
    if values.dtype.kind in "UT":
        return values.astype(object)
    name = {"bool": "int8", "float16": "float32"}.get(values.dtype.name, values.dtype.name)
    return values.view("int64") if values.dtype.kind in "mM" else values.astype(name)


def expected_of(golden: Golden) -> dict[str, NDArray[Any]]:
    """Return every array of a golden store from its closed form; records without commit are fill value."""
    found = {"time": np.array(golden.times)}
    names = [n for n, v in {**golden.statics, **golden.coords}.items() if v.dims[:1] != ("time",)]
    found |= {n: as_in_file(golden.value(n)) for n in names}
    for name in golden.variables:
        schema = golden.schema()
        fill = as_in_file(np.array(schema.arrays[name].fill))
        records = [as_in_file(golden.value(name, i)) for i in range(len(golden.times))]
        for i in set(range(len(records))) - set(golden.records):
            records[i] = np.broadcast_to(fill, records[i].shape)
        found[name] = np.stack(records)
    return found


def read_all(path: Path) -> dict[str, NDArray[Any]]:
    """Return every variable of a file, as h5py reads it."""
    with h5py.File(path) as file:
        datasets = {n: d for n, d in file.items() if isinstance(d, h5py.Dataset)}
        is_dim = {n for n, d in datasets.items() if b"not a netCDF variable" in bytes(d.attrs.get("NAME", b""))}
        text = {n for n, d in datasets.items() if h5py.check_string_dtype(d.dtype)}
        return {
            n: np.asarray(d.asstr()[()], object) if n in text else d[()] for n, d in datasets.items() if n not in is_dim
        }


@each_golden
def test_values_are_those_of_the_store(case: str, tmp_path: Path) -> None:
    """Every dtype, strings, dates, records that are not committed: bitwise the closed form."""
    out = tmp_path / "out.nc"
    done = ms.export(FOLDER / f"{case}.zarr", out)
    found, golden = read_all(out), CASES[case]
    assert (done.n_records, done.n_gaps) == (len(golden.times), len(golden.times) - len(golden.records))
    for own in ("committed", "quantization_info"):
        found.pop(own, None)
    expected = expected_of(golden)
    text = {n for n, v in expected.items() if v.dtype == object}
    assert {n: found.pop(n).tolist() for n in text} == {n: expected.pop(n).tolist() for n in text}
    assert differing(found, expected) == []


@each_golden
@pytest.mark.parametrize("engine", ["netcdf4", "h5netcdf"])
def test_xarray_sees_what_it_sees_in_the_store(case: str, engine: str, tmp_path: Path) -> None:
    """Values, dims, coordinates and decoded times; the time dim is unlimited."""
    xarray = pytest.importorskip("xarray")
    pytest.importorskip({"netcdf4": "netCDF4"}.get(engine, engine), reason=f"needs {engine}, from the extra test")
    out = tmp_path / "out.h5"
    ms.export(FOLDER / f"{case}.zarr", out)
    more = {"auto_complex": True} if engine == "netcdf4" else {}
    with xarray.open_dataset(out, engine=engine, **more) as found:
        expected = ms.open_reader(FOLDER / f"{case}.zarr").to_xarray()
        assert found.encoding["unlimited_dims"] == {"time"}
        assert set(found.variables) == set(expected.variables)
        kept = CASES[case].records
        for name in found.variables:
            a, b = found[name], expected[name]
            assert a.dims == b.dims, name
            if "time" in a.dims and name not in ("time", "committed"):
                a, b = a.isel(time=list(kept)), b.isel(time=list(kept))
            np.testing.assert_array_equal(a.values, b.values.astype(a.dtype), err_msg=str(name))


@each_golden
def test_ncdump_and_h5dump_read_it(case: str, tmp_path: Path) -> None:
    """Every value is printed, every dim has its name, and time is unlimited."""
    for tool in ("ncdump", "h5dump"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}, from Debian's netcdf-bin and hdf5-tools")
    out = tmp_path / "out.nc"
    ms.export(FOLDER / f"{case}.zarr", out)
    text = subprocess.run(["ncdump", out], capture_output=True, text=True, timeout=60, check=True).stdout
    golden = CASES[case]
    assert f"time = UNLIMITED ; // ({len(golden.times)} currently)" in text
    assert "y = 4 ;\n\tx = 6 ;" in text
    assert ":title = " in text
    for name, described in golden.variables.items():
        assert f" {name}({', '.join(described.dims)}) ;" in text
    subprocess.run(["h5dump", out], capture_output=True, timeout=60, check=True)


# ---- a store with attributes of every kind, in parts ---------------------------------------------------

NY, NX, N_RECORDS = 7, 5, 6


def write(url: Path, n_records: int = N_RECORDS) -> Path:
    many = {f"a{i}": i for i in range(20)}  # HDF5 keeps more than eight in another way
    schema = append_schema(
        {"y": NY, "x": NX},
        {
            "t": ms.Variable(("time", "y", "x"), "float32", attrs={"units": "K", "_FillValue": -9.0, **many}),
            "e": ms.Variable(("time",), "int32", attrs={"valid_range": [0, 9]}),
        },
        statics={"depth": ms.Variable(("y", "x"), "int16"), "late": ms.Variable(("y",), "int16")},
        coords={"y": ms.Coordinate(("y",), np.arange(NY) * 0.5, attrs={"axis": "Y"})},
        shard_shape={"time": 4, "y": 4, "x": 5},
        chunk_shape={"time": 2, "y": 2, "x": 5},
        attrs={"title": "é", "empty": "", "list": ["a", "b"], "n": 3, "nested": {"a": None}, **many},
    )
    with ms.write_open(url, schema, options=QUICK) as w:
        w.write_static("depth", any_bits("int16", (NY, NX), 1))
        for i in range(n_records):
            w.write_record(60.0 * i, {"t": any_bits("float32", (NY, NX), i), "e": i})
    return url


def test_attributes(tmp_path: Path) -> None:
    """Text, lists, numbers and what netCDF has no form for, many of them; netCDF and h5netcdf read them."""
    url, out = write(tmp_path / "s"), tmp_path / "out.nc"
    assert ms.export(url, out).left_out == ("late",)
    with ms.open_hdf5(out) as r:
        assert r.attrs["title"] == "é"
        assert r.attrs["empty"] == ""
        assert r.attrs["list"] == ["a", "b"]
        assert (r.attrs["n"], r.attrs["nested"], r.attrs["a19"]) == (3, '{"a": null}', 19)
        attrs = r.attrs_of("t")
        assert (attrs["units"], attrs["_FillValue"], attrs["a19"]) == ("K", -9.0, 19)
        assert r.attrs_of("e") == {"valid_range": [0, 9]}
    with h5py.File(out) as file:
        assert file["e"].attrs["valid_range"].dtype == np.int32
    for module in ("netCDF4", "h5netcdf.legacyapi"):
        package = pytest.importorskip(module)
        with package.Dataset(str(out)) as dataset:
            assert dataset.getncattr("title") == "é"
            assert len(dataset.variables["t"].ncattrs()) == 22
            assert dataset.dimensions["time"].isunlimited()
            assert not dataset.dimensions["x"].isunlimited()


def test_a_part(tmp_path: Path) -> None:
    """Named variables with their coordinates, some records, a box; compressed."""
    url, out = write(tmp_path / "s"), tmp_path / "out.nc"
    region = {"y": (1, 6), "x": (2, 4)}
    done = ms.export(url, out, variables=["t", "e"], records=slice(1, 6, 2), region=region, deflate=4)
    expected = {
        "time": np.array([60.0, 180.0, 300.0]),
        "t": np.stack([any_bits("float32", (NY, NX), i)[1:6, 2:4] for i in (1, 3, 5)]),
        "e": np.array([1, 3, 5], "int32"),
        "y": np.arange(1, 6) * 0.5,
    }
    assert differing(read_all(out), expected) == []
    assert done.nbytes == sum(v.nbytes for v in expected.values())
    with h5py.File(out) as file:
        assert (file["t"].compression, file["t"].compression_opts) == ("gzip", 4)


def test_an_empty_store(tmp_path: Path) -> None:
    """No record is no error: the file has the coordinates, and a time dim of length 0."""
    out = tmp_path / "out.nc"
    assert ms.export(write(tmp_path / "s", 0), out).n_records == 0
    assert read_all(out)["t"].shape == (0, NY, NX)


def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    url, seen = write(tmp_path / "s"), []
    done = ms.export(url, tmp_path / "out.nc", progress=lambda n, total: seen.append((n, total)))
    assert (seen[0], seen[-1]) == ((0, done.nbytes), (done.nbytes, done.nbytes))
    assert seen == sorted(seen)
    assert len(seen) > N_RECORDS // 2  # inner chunks of two records


@pytest.mark.parametrize("deflate", [0, 1])
@pytest.mark.parametrize(
    ("at_most", "records", "expected"),
    [
        # Inner chunks have two records and two rows of y: each is read once.
        (2 * NY * NX * 4, None, [((0, 2), (0, 7)), ((2, 4), (0, 7)), ((4, 6), (0, 7))]),
        (2 * NY * NX * 4, (1, 5), [(1, (0, 7)), ((2, 4), (0, 7)), (4, (0, 7))]),
        (2 * NY * NX * 4, slice(0, 6, 3), [(0, (0, 7)), (3, (0, 7))]),
        # Too much at once: slabs on their edges, of about a record.
        (NY * NX * 4, (0, 2), [((0, 2), (0, 4)), ((0, 2), (4, 7))]),
        (1, (0, 2), [((0, 2), (0, 4)), ((0, 2), (4, 7))]),
    ],
)
def test_each_inner_chunk_is_decoded_once(
    at_most: int, records: Any, expected: list[Any], deflate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that share inner chunks are read together, in parts where that is too much; values are the same."""
    url, out, seen = write(tmp_path / "s"), tmp_path / "out.nc", []
    real = StoreReader.read_record, StoreReader.read_array

    def read_record(reader: StoreReader, name: str, index: int, region: Any = None) -> NDArray[Any]:
        seen.append((index, region["y"]))
        return real[0](reader, name, index, region)

    def read_array(reader: StoreReader, name: str, region: Any = None) -> NDArray[Any]:
        if name == "t":
            seen.append((region["time"], region["y"]))
        return real[1](reader, name, region)

    monkeypatch.setattr(StoreReader, "read_record", read_record)
    monkeypatch.setattr(StoreReader, "read_array", read_array)
    monkeypatch.setattr("mpistream.exporting._MAX_TOGETHER", at_most)
    ms.export(url, out, records=records, deflate=deflate)
    chosen = range(N_RECORDS)[records if isinstance(records, slice) else slice(*(records or (0, N_RECORDS)))]
    if not deflate or at_most >= 2 * NY * NX * 4:
        assert seen == expected
    assert read_all(out)["t"].tobytes() == np.stack([any_bits("float32", (NY, NX), i) for i in chosen]).tobytes()


def test_the_store_is_not_read_while_hdf5_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread can use HDF5 during every read of the store."""
    from h5py._objects import phil

    url, is_free = write(tmp_path / "s"), []

    def probe() -> None:
        if got := phil.acquire(False):
            phil.release()
        is_free.append(got)

    for name in ("_read", "_series"):
        real = getattr(StoreReader, name)

        def read(*args: Any, real: Any = real) -> Any:
            thread = threading.Thread(target=probe)
            thread.start()
            thread.join()
            return real(*args)

        monkeypatch.setattr(StoreReader, name, read)
    ms.export(url, tmp_path / "out.nc")
    assert len(is_free) > N_RECORDS
    assert all(is_free)


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"path": "out.zarr"}, "path"),
        ({"deflate": 10}, "deflate"),
        ({"deflate": True}, "deflate"),
        ({"variables": ["nothing"]}, "unknown"),
        ({"records": 99}, "records"),
        ({"region": {"z": (0, 1)}}, "region"),
        ({"path": "there.nc"}, "exists"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path: Path, given: dict[str, Any], kind: str) -> None:
    url = write(tmp_path / "s", 1)
    (tmp_path / "there.nc").write_text("mine")
    before = sorted(tmp_path.iterdir())
    path = tmp_path / given.pop("path", "out.nc")
    with pytest.raises(ms.SchemaError) as caught:
        ms.export(url, path, **given)
    assert caught.value.kind == kind
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "there.nc").read_text() == "mine"
    ms.export(url, tmp_path / "there.nc", overwrite=True)
    assert read_all(tmp_path / "there.nc")["t"].shape == (1, NY, NX)


def test_a_failure_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    """A damaged shard, a folder that is not there: the error names it, and a file that was there is as it was."""
    url, out = write(tmp_path / "s"), tmp_path / "out.nc"
    out.write_text("mine")
    shard = next(p for p in sorted((url / "t").rglob("*")) if p.is_file() and p.name != "zarr.json")
    shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(ms.FormatError, match="t/c/0"):
        ms.export(url, out, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.nc", "s"]
    assert out.read_text() == "mine"
    with pytest.raises(ms.StoreError, match=r"nowhere/out\.nc"):
        ms.export(url, tmp_path / "nowhere" / "out.nc")


def test_only_streams_are_exported(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    with pytest.raises(ms.FormatError) as caught:
        ms.export(tmp_path, tmp_path / "out.nc")
    assert caught.value.kind == "no_manifest"


def test_without_h5py_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = write(tmp_path / "s", 1)
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    for call in (lambda: ms.export(url, tmp_path / "out.nc"), lambda: ms.open_hdf5(os.devnull)):
        with pytest.raises(ms.StoreError, match=r"mpistream\[hdf5\]") as caught:
            call()
        assert caught.value.kind == "missing_package"

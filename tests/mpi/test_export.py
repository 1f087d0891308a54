"""Export on every rank: one file, written by all with an h5py that has MPI, and refused on all without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, error_on_all
from tests.support.plain import any_bits, append_schema

if TYPE_CHECKING:
    from mpi4py import MPI

h5py = pytest.importorskip("h5py", reason="needs h5py, from the extra hdf5")

pytestmark = pytest.mark.mpi

NY, NX, N_RECORDS = 13, 6, 5
HAS_MPI = h5py.get_config().mpi


def _need_mpi(comm: MPI.Intracomm) -> None:
    # One rank alone writes without it.
    if comm.size > 1 and not HAS_MPI:
        pytest.skip("needs an h5py that was built with MPI; ci/hdf5 makes one")


def _write(comm: MPI.Intracomm, url: Path, *, is_indexed: bool = False) -> None:
    times = np.arange(N_RECORDS) * 60.0
    schema = append_schema(
        {"y": NY, "x": NX},
        {
            "t": ms.Variable(("time", "y", "x"), "float32"),
            "z": ms.Variable(("time", "y"), "complex128"),
            "e": ms.Variable(("time",), "float64"),
        },
        statics={"depth": ms.Variable(("y", "x"), "int16"), "name": ms.Variable((), str)},
        coords={"y": ms.Coordinate(("y",), [f"row {i}" for i in range(NY)])},
        shard_shape={"time": 2, "y": 3, "x": 4},
    )
    if is_indexed:
        schema = ms.StreamSchema(
            dims={"time": None, "y": NY, "x": NX},
            time=ms.IndexedTime(times, units="seconds since 2000-01-01"),
            variables={"t": ms.Variable(("time", "y", "x"), "float32")},
        )
    with ms.write_open(url, schema, comm=comm, options=OPTIONS) as w:
        rows = slice(*w.region["y"])
        cells = rows, slice(*w.region["x"])
        if not is_indexed:
            w.write_static("depth", any_bits("int16", (NY, NX), 9)[cells])
            w.write_static("name", "é")
        for i in range(N_RECORDS):
            blocks = {"t": any_bits("float32", (NY, NX), i)[cells]}
            if not is_indexed:
                w.write_record(times[i], {**blocks, "z": any_bits("complex128", (NY,), i)[rows], "e": 0.5 * i})
            elif i % 2:
                w.write_record_at(i, times[i], blocks)


def test_all_ranks_write_one_file(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Bitwise, on any number of ranks; each reads and writes its own shards, and the receipt is the same."""
    _need_mpi(comm)
    url, out = mpi_tmp_path / "s", mpi_tmp_path / "out.nc"
    _write(comm, url)
    done = ms.export(url, out, comm=comm)
    assert comm.allgather(done.n_records) == [N_RECORDS] * comm.size
    with ms.open_hdf5(out) as r:
        for i in range(N_RECORDS):
            assert r.read_record("t", i).tobytes() == any_bits("float32", (NY, NX), i).tobytes()
            assert r.read_record("z", i).tobytes() == any_bits("complex128", (NY,), i).tobytes()
        assert r.read_array("depth").tobytes() == any_bits("int16", (NY, NX), 9).tobytes()
        assert r.read_array("e").tolist() == [0.5 * i for i in range(N_RECORDS)]
        assert r.read_array("name").tolist() == "é"
        assert r.read_array("y").tolist() == [f"row {i}" for i in range(NY)]
    assert [p.name for p in sorted(mpi_tmp_path.iterdir())] == ["out.nc", "s"]


def test_gaps_are_fill_value(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Records that are not committed are NaN, not what the disk held."""
    _need_mpi(comm)
    url, out = mpi_tmp_path / "s", mpi_tmp_path / "out.h5"
    _write(comm, url, is_indexed=True)
    done = ms.export(url, out, comm=comm, region={"y": (1, 12)})
    assert (done.n_records, done.n_gaps) == (5, 3)
    with ms.open_hdf5(out) as r:
        assert np.isnan(r.read_array("t", {"time": (0, 1)})).all()
        assert r.read_record("t", 3).tobytes() == any_bits("float32", (NY, NX), 3)[1:12].tobytes()


def test_a_failure_on_one_rank_is_one_on_all(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A damaged shard that one rank reads: the same error everywhere, and no file."""
    _need_mpi(comm)
    url, out = mpi_tmp_path / "s", mpi_tmp_path / "out.nc"
    _write(comm, url)
    if comm.rank == 0:
        shard = max(p for p in (url / "t").rglob("*") if p.is_file() and p.name != "zarr.json")
        shard.write_bytes(b"\0" * shard.stat().st_size)
    comm.Barrier()
    error = error_on_all(comm, lambda: ms.export(url, out, comm=comm))
    assert "t/c/2" in str(error)
    assert [p.name for p in sorted(mpi_tmp_path.iterdir())] == ["s"]


def test_bad_arguments_are_refused_on_all(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Without MPI in h5py; compressed; and ranks that ask for different things. Nothing is written."""
    url, out = mpi_tmp_path / "s", mpi_tmp_path / "out.nc"
    _write(comm, url)
    if comm.size > 1:
        error = error_on_all(comm, lambda: ms.export(url, out, comm=comm, deflate=1))
        assert error.kind == "deflate"
        if not HAS_MPI:
            error = error_on_all(comm, lambda: ms.export(url, out, comm=comm))
            assert error.kind == "no_parallel_hdf5"
        error_on_all(comm, lambda: ms.export(url, out, comm=comm, records=comm.rank))
    else:
        assert ms.export(url, out, comm=comm).n_records == N_RECORDS
        out.unlink()
    assert [p.name for p in sorted(mpi_tmp_path.iterdir())] == ["s"]


def test_each_rank_reads_its_part_of_a_file(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """What a run starts from: every rank opens it for itself, and takes its own region."""
    url, path = mpi_tmp_path / "s", mpi_tmp_path / "initial.nc"
    values = any_bits("float32", (NY, NX), 3)
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file["t"] = values.astype(">f4")
            for axis, dim in enumerate(("y", "x")):
                file[dim] = np.arange(values.shape[axis], dtype="f8")
                file[dim].make_scale(dim)
                file["t"].dims[axis].attach_scale(file[dim])
    comm.Barrier()
    _write(comm, url)
    with ms.write_resume(url, comm=comm, options=OPTIONS) as w, ms.open_hdf5(path) as r:
        block = r.read_array("t", w.region)
    (y0, y1), (x0, x1) = w.region["y"], w.region["x"]
    assert block.tobytes() == values[y0:y1, x0:x1].tobytes()

"""Initial conditions that others wrote, read by region on all ranks."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, at_most, error_on_all, on_root
from tests.support.faults import FaultyStore

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

NY, NX = 12, 10
START = np.arange(NY * NX, dtype="float32").reshape(NY, NX)


def _make(path: Path) -> None:
    """Write a store with zarr-python: one array for our own codec chain, one for zarr-python alone."""
    import zarr

    group = zarr.create_group(path, attributes={"title": "start"})
    array = group.create_array("t", shape=START.shape, dtype=">f4", chunks=(2, 5), shards=(4, 10), dimension_names="yx")
    array[:] = START
    filters: Any = [{"name": "transpose", "configuration": {"order": [1, 0]}}]
    group.create_array("turned", data=START, chunks=(5, 3), filters=filters, dimension_names=("y", "x"))
    group.create_array("lat", data=START[:, 0], chunks=(5,), dimension_names=("y",))


def _schema() -> ms.StreamSchema:
    return ms.StreamSchema(
        dims={"time": None, "y": NY, "x": NX},
        time=ms.AppendTime(units="s"),
        variables={"t": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape={"y": 2, "x": 5},
    )


def test_each_rank_reads_its_own_part_of_what_others_wrote(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A model starts from a foreign store: every rank reads the region that it will write, and writes it."""
    on_root(comm, lambda: _make(mpi_tmp_path / "start.zarr"))
    with (
        ms.open_reader(mpi_tmp_path / "start.zarr", comm=comm) as r,
        ms.write_open(mpi_tmp_path / "run.zarr", _schema(), comm=comm, options=OPTIONS) as w,
    ):
        assert list(r.hierarchy()) == ["", "lat", "t", "turned"]
        assert (r.is_stream, r.attrs, r.hierarchy()["t"].dims) == (False, {"title": "start"}, ("y", "x"))
        (y0, y1), (x0, x1) = w.region["y"], w.region["x"]
        block = r.read_array("t", w.region)
        np.testing.assert_array_equal(block, START[y0:y1, x0:x1], strict=True)
        np.testing.assert_array_equal(r.read_array("turned", w.region), block, strict=True)
        assert r.read_array("lat", w.region).tolist() == START[y0:y1, 0].tolist()
        w.write_record(0.0, {"t": block})
    run = ms.open_reader(mpi_tmp_path / "run.zarr")
    np.testing.assert_array_equal(run.read_record("t", 0), START, strict=True)


def test_rank_0_alone_looks_what_lies_there(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Opening reads on rank 0 and tells all; what is no record of a stream is the same error on every rank."""
    url = mpi_tmp_path / "start.zarr"
    on_root(comm, lambda: _make(url))
    store = FaultyStore(url)
    if comm.rank != 0:
        store.fail("read", errno.EIO, when=lambda key, data: True)
    r = ms.open_reader(store, comm=comm)  # type: ignore[arg-type]
    store.heal()
    for call in (r.refresh, lambda: r.n_records, lambda: r.read_record("t", 0)):
        error = error_on_all(comm, call)
        assert (type(error), error.kind) == (ms.FormatError, "no_manifest")
    r.close()


@pytest.mark.parametrize("data", [b"{", b'{"zarr_format": 3, "node_type": "leaf"}'])
def test_a_damaged_root_is_an_error_on_every_rank(comm: MPI.Intracomm, mpi_tmp_path: Path, data: Any) -> None:
    """One FormatError on all ranks, with the key, within seconds."""
    on_root(comm, lambda: (mpi_tmp_path / "zarr.json").write_bytes(data))
    with at_most(10):
        error = error_on_all(comm, lambda: ms.open_reader(mpi_tmp_path, comm=comm))
    assert type(error) is ms.FormatError
    assert str(error).startswith("zarr.json: ")

"""Streams of different ranks in one hierarchy, opened at the same moment; what writers of one communicator share."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, at_most, error_on_all, on_root, options, sync, tree
from tests.support.scene import PLANE, Scene, assert_holds

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

OCEAN = Scene(sizes={"z": 3, "x": 15}, variables={"salt": ("z x", "float64")})
SHARD = {"time": 2, "y": 2, "x": 3}
SCENES = {"atmosphere": PLANE, "ocean": OCEAN}


def _schema(name: str) -> ms.StreamSchema:
    return PLANE.schema(shard_shape=SHARD) if name == "atmosphere" else OCEAN.schema(shard_shape={"x": 2})


def _check_tree(root: Path, lengths: dict[str, int]) -> None:
    import xarray

    found = xarray.open_datatree(root, engine="zarr", zarr_format=3, consolidated=False, decode_times=False)
    assert set(found.groups) == {"/", *(f"/{name}" for name in lengths)}
    for name, n in lengths.items():
        for variable in SCENES[name].variables:
            expected = np.stack([SCENES[name].whole(variable, i) for i in range(n)])
            np.testing.assert_array_equal(found[f"{name}/{variable}"].values, expected, strict=True)
    found.close()


def test_ranks_are_split_over_streams(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Half of the ranks write the ocean, the others the atmosphere; both make the group above."""
    name = "ocean" if comm.rank % 2 else "atmosphere"
    half = comm.Split(comm.rank % 2, comm.rank)
    root = mpi_tmp_path / "run.zarr"
    n = {"ocean": 3, "atmosphere": 2}
    sync(comm)
    w = ms.write_open(root / name, _schema(name), comm=half, options=OPTIONS)
    if name == "atmosphere":
        PLANE.write_statics(w)
    for i in range(n[name]):
        SCENES[name].write(w, i)
        w.commit()
    lengths = {k: v for k, v in n.items() if k == "atmosphere" or comm.size > 1}
    on_root(comm, lambda: _check_tree(root, lengths))
    w.close()
    # On another number of ranks, with the other stream's ranks elsewhere.
    with ms.write_resume(root / "atmosphere", comm=comm, options=OPTIONS) as again:
        PLANE.write(again, 2)
    on_root(comm, lambda: _check_tree(root, {**lengths, "atmosphere": 3}))
    on_root(comm, lambda: assert_holds(root / "atmosphere", PLANE, [0] * 3))


def test_stream_inside_a_stream_is_refused_on_every_rank(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The owner looks, every rank raises the same error, and nothing is written."""
    root = mpi_tmp_path / "run.zarr"
    with ms.write_open(root / "ocean", _schema("ocean"), comm=comm, options=OPTIONS):
        before = on_root(comm, lambda: tree(root))
        for below in ("b", "salt", "b/c"):
            error = error_on_all(
                comm,
                lambda: ms.write_open(root / "ocean" / below, _schema("ocean"), comm=comm, options=OPTIONS),  # noqa: B023
            )
            assert (type(error), error.kind) == (ms.StoreError, "hierarchy")
            assert f"lies inside {root / 'ocean'}, which is a stream" in str(error)
        assert on_root(comm, lambda: tree(root)) == before


def _threads(name: str) -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == f"mpistream-{name}"}


def test_writers_of_one_communicator_share_threads_and_bound(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """However many streams: one thread that stages on each rank, one that keeps leases on rank 0."""
    # Writers that other tests have left behind have theirs.
    before = _threads("stage")
    own: Any = comm.Dup()
    writers = []
    for i in range(3):
        w = ms.write_open(mpi_tmp_path / f"run.zarr/{i}", _schema("ocean"), comm=own, options=options(threads=1))
        writers.append(w)
        assert len(_threads("stage") - before) == 1
        assert len(_threads("lease")) == 1 or comm.rank
    apart = ms.write_open(mpi_tmp_path / "apart", _schema("ocean"), comm=comm.Dup(), options=options(threads=1))
    assert len(_threads("stage") - before) == 2
    for w in (*writers, apart):
        OCEAN.write(w, 0)
    with at_most(20):
        ms.commit_all([*writers, apart])
        for w in (*writers, apart):
            w.close()
    assert _threads("stage") <= before

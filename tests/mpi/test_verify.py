"""The checker on real ranks: they share the work, and all have the same report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, error_on_all, on_root, sync
from tests.support.scene import FULL

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("shard", [4, 5])
def test_every_rank_has_the_report_of_one_process(comm: MPI.Intracomm, mpi_tmp_path: Path, shard: int) -> None:
    """Shards that several ranks' cells lie in read clean as well (P-03); then one damaged shard is named on all."""
    url = mpi_tmp_path / "run.zarr"
    schema = FULL.schema(shard_shape={"time": 2, "z": 3, "y": shard, "x": 13}, chunk_shape={"time": 1})
    region = {"y": (11 * comm.rank // comm.size, 11 * (comm.rank + 1) // comm.size)}
    with ms.write_open(url, schema, comm=comm, region=region, options=OPTIONS) as w:
        FULL.write_statics(w)
        for i in range(3):
            FULL.write(w, i)
    sync(comm)
    alone = on_root(comm, lambda: ms.verify(url))
    assert (alone.exit_code, alone.is_complete) == (0, True)
    assert ms.verify(url, comm=comm) == alone

    on_root(comm, lambda: (url / "u/c/1/0/1/0").write_bytes(b""))
    report = ms.verify(url, comm=comm)
    assert comm.allgather(report) == [report] * comm.size
    (found,) = report.damage
    assert (found.variable, found.records) == ("u", (2, 3))
    assert found.box == ((0, 3), (shard, 2 * shard), (0, 13))
    sync(comm)


def test_no_store_is_the_same_error_on_every_rank(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    assert error_on_all(comm, lambda: ms.verify(mpi_tmp_path, comm=comm)).kind == "no_manifest"


def test_a_run_that_was_closed_leaves_nothing(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Not for the checker either: folders of the next row, made ahead of use, hold nothing; an object there counts."""
    url = mpi_tmp_path / "run.zarr"
    schema = FULL.schema(shard_shape={"time": 1, "z": 3, "y": 4, "x": 13})
    region = {"y": (11 * comm.rank // comm.size, 11 * (comm.rank + 1) // comm.size)}
    with ms.write_open(url, schema, comm=comm, region=region, options=OPTIONS) as w:
        FULL.write_statics(w)
        for i in range(2):
            FULL.write(w, i)
            w.commit()
    assert on_root(comm, lambda: ms.verify(url).exit_code) == 0

    def add() -> int:
        (url / "u/c/2/0/0").mkdir(parents=True, exist_ok=True)
        (url / "u/c/2/0/0/0").write_bytes(b"x")
        return ms.verify(url).exit_code

    assert on_root(comm, add) == 1

"""Streams of so many ranks that leaders stand between them and rank 0; here that many are two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import mpistream as ms
from mpistream import agreement
from tests.support.collective import at_most, error_on_all, on_root, options, sync
from tests.support.scene import PLANE, assert_holds

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi(min_size=4)

SHARD = {"time": 2, "y": 1, "x": 6}


@pytest.fixture(autouse=True)
def _low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_LEADERS_ABOVE", 1)


def test_a_stream_is_written_and_resumed(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The same receipts on every rank, and every record; a failed commit in between leaves no message behind."""
    url = mpi_tmp_path / "s"
    with ms.write_open(url, PLANE.schema(shard_shape=SHARD), comm=comm, options=options()) as w:
        PLANE.write_statics(w)
        for i in range(3):
            PLANE.write(w, i)
            receipt = w.commit()
            assert comm.allgather(receipt) == [receipt] * comm.size
            if i == 1 and comm.rank == comm.size - 1:
                PLANE.write(w, 2)  # one rank alone: the next commit is refused
            if i == 1:
                assert error_on_all(comm, w.commit).kind == "records"
                w.rollback()
    with ms.write_resume(url, comm=comm, options=options()) as w:
        assert w.n_records == 3
        PLANE.write(w, 3)
    on_root(comm, lambda: assert_holds(url, PLANE, [0] * 4))


@pytest.mark.parametrize("who", ["leader", "member"])
def test_a_rank_that_raises_ends_all(comm: MPI.Intracomm, mpi_tmp_path: Path, who: str) -> None:
    """Within a moment, and with its name; the store is resumed at once."""
    url, bad = mpi_tmp_path / "s", 2 if who == "leader" else 3

    def simulate() -> None:
        with ms.write_open(url, PLANE.schema(shard_shape=SHARD), comm=comm, options=options(timeout=60)) as w:
            PLANE.write_statics(w)
            PLANE.write(w, 0)
            w.commit()
            if comm.rank == bad:
                raise ArithmeticError("negative density")
            w.commit()

    with at_most(20), pytest.raises(ArithmeticError if comm.rank == bad else ms.CommitError) as caught:
        simulate()
    if isinstance(caught.value, ms.CommitError):
        assert (caught.value.kind, caught.value.rank) == ("left", bad)
    sync(comm)
    with at_most(20), ms.write_resume(url, comm=comm, options=options()) as w:
        assert w.n_records == 1


def test_a_leader_that_does_not_come_is_named(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Every other rank hears of it, its own group too, and none of that is blamed."""
    w = ms.write_open(mpi_tmp_path / "s", PLANE.schema(shard_shape=SHARD), comm=comm, options=options(timeout=1))
    PLANE.write_statics(w)
    PLANE.write(w, 0)
    if comm.rank != 2:
        with pytest.raises(ms.CommitError, match="commit: rank 2 did not come within 1 s") as caught:
            w.commit()
        assert (caught.value.kind, caught.value.rank) == ("timeout", 2)
    sync(comm)
    with pytest.raises(ms.CommitError):
        w.close()

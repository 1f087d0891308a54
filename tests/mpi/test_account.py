"""A run's own account: what is logged, on which rank, and what all ranks have done in the end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, error_on_all, options
from tests.support.location_series import DTYPES, IDS, TIMES, series
from tests.support.scene import PLANE, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

N_RECORDS = 5


def write(comm: MPI.Intracomm, url: Path) -> ms.StreamWriter:
    """Write records with a commit after each but the last, which `close` commits."""
    with ms.write_open(url, PLANE.schema(), comm=comm, options=options(durability="fsync")) as w:
        PLANE.write_statics(w)
        for i in range(N_RECORDS):
            PLANE.write(w, i)
            if i < N_RECORDS - 1:
                w.commit()
        assert w.stats.run is None
    return w


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level]


def test_the_account_of_all_ranks(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """After close every rank has the sums of the counts and the maxima of the seconds, as MPI itself reduces them."""
    w = write(comm, mpi_tmp_path / "s")
    own, run = w.stats, w.stats.run
    assert run is not None
    assert comm.allgather(run) == [run] * comm.size
    assert (run.n_ranks, run.n_records, run.n_commits) == (comm.size, N_RECORDS, N_RECORDS)
    for name in ("nbytes_in", "nbytes_encoded", "n_objects"):
        assert getattr(run, name) == comm.allreduce(getattr(own, name))
    # Every cell is some rank's, once.
    records = N_RECORDS * sum(PLANE.whole(name).nbytes for name in PLANE.variables)
    assert run.nbytes_in == records + sum(PLANE.whole(name).nbytes for name in PLANE.region_statics)
    seconds = {**own.seconds, "blocked": own.seconds["record"] + own.seconds["commit"]}
    maxima = {what: max(comm.allgather(spent)) for what, spent in seconds.items()}
    assert dict(run.seconds) == maxima
    assert min(maxima[what] for what in ("record", "commit", "encode", "write", "sync")) > 0
    assert run.blocked <= run.elapsed


def test_what_is_logged(comm: MPI.Intracomm, mpi_tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 speaks for all: opened and closed at INFO, commits and layout at DEBUG; a rank only of itself."""
    with caplog.at_level(logging.DEBUG, logger="mpistream"):
        w = write(comm, mpi_tmp_path / "s")
        write_on = ms.write_resume(mpi_tmp_path / "s", comm=comm, at=time_of(1), options=OPTIONS)
        write_on.rollback()
        write_on.close()
    infos, debugs = messages(caplog, logging.INFO), messages(caplog, logging.DEBUG)
    own = [text for text in debugs if f": rank {comm.rank} on " in text]
    assert len(own) == 2
    if comm.rank:
        assert (infos, [text for text in debugs if text not in own]) == ([], [])
        return
    url = str(mpi_tmp_path / "s")
    assert all(text.startswith(f"{url}: ") for text in infos + debugs)
    texts = [text.removeprefix(f"{url}: ") for text in infos]
    assert texts[0].startswith("created, epoch 1; ")
    assert texts[1] == f"closed: {w.stats.run}"
    assert texts[2].startswith(f"resumed with 2 records, t {time_of(1)!r}, {N_RECORDS - 2} dropped, epoch 2; ")
    assert texts[3:] == ["rolled back to commit 6, 2 records", f"closed: {write_on.stats.run}"]
    commits = [text.removeprefix(f"{url}: ") for text in debugs if ": commit " in text]
    assert [text.split(":")[0] for text in commits] == [f"commit {i + 1}" for i in range(N_RECORDS)]
    assert commits[-1].endswith(f"; {N_RECORDS} records, t {time_of(N_RECORDS - 1)!r}")


def test_no_account_after_a_failure(comm: MPI.Intracomm, mpi_tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A body that raises is no end in good order: nothing is agreed on, and rank 0 says what is committed."""

    def run() -> None:
        with w:
            PLANE.write(w, 0)
            w.commit()
            PLANE.write(w, 1)
            if comm.rank == comm.size - 1:
                raise ms.StoreError("gone wrong", kind="io")
            w.commit()

    w = ms.write_open(mpi_tmp_path / "s", PLANE.schema(), comm=comm, options=OPTIONS)
    with caplog.at_level(logging.INFO, logger="mpistream"), pytest.raises(ms.MPIStreamError):
        run()
    assert w.stats.run is None
    infos = messages(caplog, logging.INFO)
    assert len(infos) == (1 if comm.rank == 0 else 0)
    assert all("gone wrong" in text and text.endswith("1 of 2 records are committed") for text in infos)


def test_a_location_series_has_one_too(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Its records are locations; without all of them there is no good end, and no account."""
    url = mpi_tmp_path / "series.zarr"
    w = ms.write_open_locations(url, IDS, TIMES, DTYPES, comm=comm, chunk_locations=5, options=OPTIONS)
    for i in w.missing()[:-1]:
        w.write_location(i, series(i))
    n = comm.allreduce(len(w.missing()))
    assert error_on_all(comm, w.close).kind == "incomplete"
    assert w.stats.run is None
    again = ms.write_resume(url, comm=comm, options=OPTIONS)
    assert isinstance(again, ms.LocationSeriesWriter)
    for i in again.missing():
        again.write_location(i, series(i))
    again.close()
    assert again.stats.run is not None
    assert (again.stats.run.n_records, again.stats.run.n_ranks) == (n, comm.size)
    assert again.stats.run.seconds["record"] > 0

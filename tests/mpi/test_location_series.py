"""Location series on any number of ranks: shares, commits of what each rank has, resumes that spread the rest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import error_on_all, on_root, options, subcomm, sync
from tests.support.location_series import DTYPES, IDS, TIMES, expected, read_zarr, series
from tests.support.plain import open_xarray

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


def opened(comm: MPI.Intracomm, url: Path, n: int = len(IDS), **given: Any) -> ms.LocationSeriesWriter:
    changes = given.pop("options", {})
    return ms.write_open_locations(
        url, IDS[:n], TIMES, DTYPES, comm=comm, options=options(**changes), **{"chunk_locations": 5, **given}
    )


def resumed(comm: MPI.Intracomm, url: Path, **given: Any) -> ms.LocationSeriesWriter:
    w = ms.write_resume(url, comm=comm, options=options(), **given)
    assert isinstance(w, ms.LocationSeriesWriter)
    return w


def write(w: ms.LocationSeriesWriter, locations: Iterable[int]) -> None:
    for i in locations:
        w.write_location(i if i % 2 else IDS[i], series(i))


def n_objects(url: Path) -> dict[str, int]:
    return {name: sum(p.is_file() for p in (url / name / "c").rglob("*")) for name in DTYPES}


@pytest.mark.parametrize(("n", "length", "n_chunks"), [(23, 5, 5), (7, 3, 3)])
def test_each_chunk_is_one_object_of_one_rank(
    comm: MPI.Intracomm, mpi_tmp_path: Path, n: int, length: int, n_chunks: int
) -> None:
    """Ranks write at once, the last chunk is partial, one series short, a variable missing: values, fill, objects."""
    url = mpi_tmp_path / "series.zarr"
    w = opened(comm, url, n, chunk_locations=length)
    per_rank = -(-n // (comm.size * length)) * length
    assert w.share == (min(comm.rank * per_rank, n), min((comm.rank + 1) * per_rank, n))
    write(w, range(*w.share))
    receipt = w.commit()
    w.close()
    assert comm.allgather(receipt.n_new_records) == [n] * comm.size

    def check() -> None:
        assert n_objects(url) == dict.fromkeys(DTYPES, n_chunks)
        found = read_zarr(url)
        for name, values in expected(range(n), n).items():
            np.testing.assert_array_equal(found[name], values)

    on_root(comm, check)


@pytest.mark.mpi(min_size=4)
def test_three_of_four_ranks_have_locations(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Shares are whole chunks, so the last rank may have none, and takes part in every commit all the same."""
    part = subcomm(comm, 4)
    if part is not None:
        w = opened(part, mpi_tmp_path / "series.zarr")
        assert part.allgather(w.share) == [(0, 10), (10, 20), (20, 23), (23, 23)]
        write(w, reversed(w.missing()))
        w.close()
        part.Free()
    sync(comm)


def test_commits_and_resumes_on_other_ranks_lose_nothing(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Part-filled chunks are completed after a resume on any number of ranks, and what was committed stays."""
    url, done = mpi_tmp_path / "series.zarr", set(range(0, 23, 3)) | {22}
    w = opened(comm, url)
    write(w, [i for i in w.missing() if i in done])
    w.commit()
    w.close(partial=True)
    for size in (1, max(comm.size - 1, 1), comm.size):
        part, is_last = subcomm(comm, size), size == comm.size
        if part is not None:
            again = resumed(part, url)
            missing = again.missing()
            assert sorted(i for found in part.allgather(missing) for i in found) == sorted(set(range(23)) - done)
            write(again, missing if is_last else missing[::2])
            done |= {i for found in part.allgather(missing if is_last else missing[::2]) for i in found}
            again.close(partial=not is_last)
            part.Free()
        done = comm.bcast(done)
    assert done == set(range(23))

    def check() -> None:
        found = read_zarr(url)
        for name, values in expected(range(23)).items():
            np.testing.assert_array_equal(found[name], values)

    on_root(comm, check)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_share_a_chunk(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Shares with edges anywhere: the objects are the same, whoever holds the pieces of a chunk, commit by commit."""
    url = mpi_tmp_path / "series.zarr"
    edges = [round(23 * r / comm.size) for r in range(comm.size + 1)]
    share = (edges[comm.rank], edges[comm.rank + 1])
    w = opened(comm, url, share=share)
    assert w.share == share
    mine = list(range(*share))
    write(w, mine[::2])
    assert w.missing() == mine[1::2]
    w.commit()
    with pytest.raises(ms.SchemaError, match="is committed"):
        w.write_location(mine[0], series(mine[0]))
    write(w, mine[1::2])
    with pytest.raises(ms.SchemaError, match="was written"):
        w.write_location(mine[1], series(mine[1]))
    w.close()

    def check() -> None:
        assert n_objects(url) == dict.fromkeys(DTYPES, 5)
        found = read_zarr(url)
        for name, values in expected(range(23)).items():
            np.testing.assert_array_equal(found[name], values)

    on_root(comm, check)


@pytest.mark.mpi(min_size=2)
def test_shares_that_overlap_or_leave_a_hole(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The same error on every rank, naming the locations, before anything is written."""
    url = mpi_tmp_path / "series.zarr"
    last = comm.rank == comm.size - 1
    shares = {"overlap": (0, 23 if last else 1), "hole": (2, 23) if last else (0, 1 if comm.rank == 0 else 0)}
    for kind, share in shares.items():
        error = error_on_all(comm, lambda share=share: opened(comm, url, share=share))  # type: ignore[misc]
        assert (type(error), error.kind) == (ms.TilingError, kind)
    assert on_root(comm, lambda: not (url / "zarr.json").exists())


def test_a_location_of_another_rank_is_refused_by_name(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The error names the location and the share, and spoils nothing."""
    w = opened(comm, mpi_tmp_path / "series.zarr")
    for i in set(range(23)) - set(range(*w.share)):
        with pytest.raises(ms.SchemaError, match=f"location {i} .'{IDS[i]}'. is not in the share of rank {comm.rank}"):
            w.write_location(IDS[i], series(i))
    write(w, w.missing())
    w.close()


def test_close_requires_all_locations(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A close with locations missing commits what there is, and says on every rank which are missing."""
    url = mpi_tmp_path / "series.zarr"
    w = opened(comm, url)
    write(w, [i for i in w.missing() if i not in (3, 4, 21)])
    error = error_on_all(comm, w.close)
    assert (type(error), error.kind) == (ms.CommitError, "incomplete")
    assert "3 of 23 locations not written: 3 to 4, 21 to 21" in str(error)
    assert on_root(comm, lambda: ms.open_reader(url).committed) == ((0, 3), (5, 21), (22, 23))
    with resumed(comm, url) as again:
        write(again, again.missing())


def test_committed_with_another_stream(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A location series and a stream of fields are committed in one agreement."""
    schema = ms.StreamSchema(
        dims={"time": None, "x": 8},
        time=ms.AppendTime(units="s since 2000-01-01"),
        variables={"u": ms.Variable(("time", "x"), "int32")},
        shard_shape={"x": 1},
    )
    edges = [round(23 * r / comm.size) for r in range(comm.size + 1)]
    fields = ms.write_open(mpi_tmp_path / "fields.zarr", schema, comm=comm, options=options())
    w = opened(comm, mpi_tmp_path / "series.zarr", share=(edges[comm.rank], edges[comm.rank + 1]))
    write(w, w.missing())
    fields.write_record(0.0, {"u": np.arange(8, dtype="int32")[slice(*fields.region["x"])]})
    receipts = ms.commit_all([fields, w])
    assert [r.n_records for r in receipts] == [1, 23]
    fields.close()
    w.close()


def test_a_committed_location_is_run_again(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """After `invalidate` on every rank a location is missing, and what is written then takes its place."""
    url = mpi_tmp_path / "series.zarr"
    w = opened(comm, url)
    write(w, w.missing())
    w.commit()
    w.invalidate([4, 17])
    for i in w.missing():
        w.write_location(i, series(i, version=1))
    w.close()

    def check() -> None:
        found = read_zarr(url)
        for name, values in expected(range(23), versions={4: 1, 17: 1}).items():
            np.testing.assert_array_equal(found[name], values)
        assert open_xarray(url)["flow"].sel(id="cat-4711").values.tolist() == expected([11])["flow"][11].tolist()

    on_root(comm, check)

"""A reader on a communicator: one state on every rank, found by rank 0 alone, and reads that need nobody."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from mpistream import shard_reads
from tests.support.collective import OPTIONS, at_most, error_on_all, on_root, sync
from tests.support.faults import FaultyStore
from tests.support.scene import FULL, PLANE, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"time": 4, "y": 2, "x": 3}


def _opened(comm: MPI.Intracomm, url: Path, n: int = 3) -> ms.StreamWriter:
    w = ms.write_open(url, PLANE.schema(shard_shape=SHARD), comm=comm, options=OPTIONS)
    PLANE.write_statics(w)
    for i in range(n):
        PLANE.write(w, i)
    w.commit()
    return w


def test_every_rank_sees_the_state_that_rank_0_found(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Only rank 0 reads the manifest to open; all have its records and times until they refresh together."""
    url = mpi_tmp_path / "s"
    w = _opened(comm, url)
    store = FaultyStore(url)
    if comm.rank != 0:
        store.fail("read", errno.EIO, when=lambda key, data: key.endswith("manifest.json"))
    r = ms.open_reader(store, comm=comm)  # type: ignore[arg-type]
    store.heal()
    assert (r.n_records, r.committed) == (3, ((0, 3),))
    assert r.times.tolist() == [time_of(i) for i in range(3)]
    assert r.refresh() is False
    PLANE.write(w, 3)
    w.commit()
    assert r.n_records == 3
    assert r.refresh() is True
    assert r.n_records == 4
    assert r.read_record("u", -1).tobytes() == PLANE.whole("u", 3).tobytes()
    r.close()
    w.close()


def test_each_rank_reads_what_it_wants(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Reads are not collective: each rank reads other records, variables and regions, rank 0 none at all."""
    url = mpi_tmp_path / "s"
    schema = FULL.schema(shard_shape={"time": 2, "z": 2, "y": 4, "x": 6})
    with ms.write_open(url, schema, comm=comm, options=OPTIONS) as w:
        FULL.write_statics(w)
        for i in range(5):
            FULL.write(w, i)
    with ms.open_reader(url, comm=comm) as r:
        if comm.rank or comm.size == 1:
            for i in range(comm.rank % 5, 5):
                region = {"z": (i % 3, 3), "y": (i, 11 - i), "x": (comm.rank, 13)}
                for name in ("u", "p", "zonal", "total"):
                    own = {d: b for d, b in region.items() if d in FULL.variables[name][0].split()}
                    found = r.read_record(name, i - 5, region=own)
                    np.testing.assert_array_equal(found, FULL.block(name, region, i), strict=True)
                found = r.read_static("topo", region={"y": region["y"]})
                np.testing.assert_array_equal(found, FULL.block("topo", {"y": region["y"]}), strict=True)


def test_a_restart_reads_whole_fields_on_every_rank(
    comm: MPI.Intracomm, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `w.reader` and a reader on the communicator give is the field, whoever wrote its parts, in threads too."""
    monkeypatch.setattr(shard_reads, "_NBYTES_PER_THREAD", 16)
    monkeypatch.setattr(shard_reads, "n_cores", lambda: 2)
    url = mpi_tmp_path / "s"
    _opened(comm, url).close()
    expected = np.stack([PLANE.whole("u", i) for i in range(3)])
    with ms.write_resume(url, comm=comm, options=OPTIONS) as w, ms.open_reader(url, comm=comm) as r:
        for reader in (w.reader, r):
            np.testing.assert_array_equal(reader.read_array("u"), expected, strict=True)
            own = reader.read_record("u", -1, w.region)
            np.testing.assert_array_equal(own, PLANE.block("u", w.region, 2), strict=True)


def _missing(url: Path) -> None:
    pass


def _empty(url: Path) -> None:
    url.mkdir()


def _a_file(url: Path) -> None:
    url.write_bytes(b"x")


def _damaged(url: Path) -> None:
    (url / ".mpistream").mkdir(parents=True)
    (url / ".mpistream/manifest.json").write_bytes(b'{"format": "mpistream", "ver')


@pytest.mark.parametrize("make", [_missing, _empty, _a_file, _damaged])
def test_what_is_no_store_is_an_error_on_every_rank(
    comm: MPI.Intracomm, mpi_tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """No store, or a damaged manifest, is one FormatError on all ranks, within seconds."""
    on_root(comm, lambda: make(mpi_tmp_path / "s"))
    with at_most(10):
        error = error_on_all(comm, lambda: ms.open_reader(mpi_tmp_path / "s", comm=comm))
    assert type(error) is ms.FormatError
    assert str(mpi_tmp_path / "s") in str(error) or "manifest.json" in str(error)


def test_manifest_that_is_damaged_later_is_an_error_on_every_rank(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """refresh raises on all ranks when the manifest can't be read any more, and works again when it can."""
    url = mpi_tmp_path / "s"
    _opened(comm, url).close()
    manifest = url / ".mpistream/manifest.json"
    with ms.open_reader(url, comm=comm) as r:
        good = manifest.read_bytes()
        on_root(comm, lambda: manifest.write_bytes(good[:-40]))
        assert type(error_on_all(comm, r.refresh)) is ms.FormatError
        assert r.n_records == 3
        on_root(comm, lambda: manifest.write_bytes(good))
        assert r.refresh() is False


@pytest.mark.mpi(min_size=2)
def test_ranks_that_open_different_stores_are_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Another url, or another scheme, on one rank is an error on all that names it."""
    _opened(comm, mpi_tmp_path / "s").close()
    urls: list[tuple[Any, str]] = [(mpi_tmp_path / "t", "mismatch"), ("ftp://host/s", "scheme")]
    for odd, kind in urls:
        url = odd if comm.rank == 1 else mpi_tmp_path / "s"
        error = error_on_all(comm, lambda u=url: ms.open_reader(u, comm=comm))  # type: ignore[misc]
        assert (error.kind, error.rank) == (kind, 1)


@pytest.mark.mpi(min_size=2)
def test_rank_that_raises_in_the_body_does_not_keep_the_others(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The exception of one rank goes on, and the others don't wait for it in refresh or close."""

    class ToolError(Exception):
        pass

    _opened(comm, mpi_tmp_path / "s").close()

    def analyse() -> None:
        with ms.open_reader(mpi_tmp_path / "s", comm=comm) as r:
            if comm.rank == 1:
                raise ToolError
            r.refresh()

    with at_most(10), pytest.raises(ToolError if comm.rank == 1 else ms.CommitError) as caught:
        analyse()
    if isinstance(caught.value, ms.CommitError):
        assert (caught.value.kind, caught.value.rank) == ("left", 1)
    sync(comm)
    with ms.open_reader(mpi_tmp_path / "s", comm=comm) as r:
        assert r.n_records == 3


@pytest.mark.mpi(min_size=2)
def test_reader_without_communicator_is_one_rank_s_own(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Under mpirun a reader needs no communicator; then nothing of it is collective."""
    _opened(comm, mpi_tmp_path / "s").close()
    sync(comm)
    if comm.rank == 1:
        with ms.open_reader(mpi_tmp_path / "s") as r:
            assert r.refresh() is False
            assert r.read_record("u", 0).tobytes() == PLANE.whole("u", 0).tobytes()
    sync(comm)

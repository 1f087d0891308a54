"""Opening a store together: what may lie there, who may take part, how many times it can be done."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, error_on_all, keys, on_root, options, sync, tree
from tests.support.scene import PLANE, assert_holds

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"time": 2, "y": 2, "x": 3}


def _schema(**layout: Any) -> ms.StreamSchema:
    return PLANE.schema(shard_shape={**SHARD, **layout})


def _write(comm: MPI.Intracomm, url: Path, n_records: int, run: int = 0, **how: Any) -> None:
    with ms.write_open(url, _schema(), comm=comm, options=OPTIONS, **how) as w:
        PLANE.write_statics(w)
        for i in range(n_records):
            PLANE.write(w, i, run)


def test_fresh_and_existing_paths_open_again_and_again(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Twenty constructions in a row on new paths, on an existing folder and on an existing store all work (P-27)."""
    root = mpi_tmp_path / "deep" / "er"
    for i in range(20):
        url = root / f"s{i // 2}"
        w = ms.write_open(url, _schema(), comm=comm, overwrite=i % 2 == 1, options=OPTIONS)
        assert (w.epoch, w.n_records, w.last_t) == (1 + i % 2, 0, None)
        w.close()

    def check() -> None:
        for i in range(10):
            assert_holds(root / f"s{i}", PLANE, [], statics=())
            assert keys(root / f"s{i}") == PLANE.keys(0, SHARD, statics=())

    on_root(comm, check)


def test_new_store_is_empty_and_leaves_nothing_behind(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A store of no records opens in zarr-python (P-43), and after close only what the format names is there."""
    ms.write_open(mpi_tmp_path / "s", _schema(), comm=comm, options=OPTIONS).close()

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [], statics=()))
    expected = {f".mpistream/{name}" for name in ("manifest.json", "epochs/1", "layout-1.json", "lease")}
    assert on_root(comm, lambda: keys(mpi_tmp_path / "s", ours=True)) == expected


def test_existing_store_is_refused_and_left_as_it_is(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Without overwrite=True a store that is there is an error on every rank, and nothing of it changes."""
    _write(comm, mpi_tmp_path / "s", 3)
    before = on_root(comm, lambda: tree(mpi_tmp_path))

    error = error_on_all(
        comm, lambda: ms.write_open(mpi_tmp_path / "s", _schema(), comm=comm, options=options(timeout=15))
    )
    assert (type(error), error.kind) == (ms.StoreError, "exists")
    assert "overwrite=True" in str(error)
    assert on_root(comm, lambda: tree(mpi_tmp_path)) == before


def test_overwrite_replaces_a_store(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """With overwrite=True nothing of the old store is left, and epochs go on counting."""
    _write(comm, mpi_tmp_path / "s", 5)
    _write(comm, mpi_tmp_path / "s", 2, run=1, overwrite=True)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [1, 1]))
    assert on_root(comm, lambda: keys(mpi_tmp_path / "s")) == PLANE.keys(2, SHARD)
    expected = {f".mpistream/{name}" for name in ("manifest.json", "epochs/1", "epochs/2", "layout-2.json", "lease")}
    assert on_root(comm, lambda: keys(mpi_tmp_path / "s", ours=True)) == expected


def _make_file(path: Path) -> None:
    path.write_bytes(b"precious")


def _make_folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_bytes(b"precious")


def _make_zarr_array(path: Path) -> None:
    import zarr

    zarr.create_array(path, data=np.arange(4))


def _make_stream_below_a_group(path: Path) -> None:
    import zarr

    zarr.create_group(path)
    ms.write_open(path / "sub", _schema(), comm=_self(), options=OPTIONS).close()


def _self() -> MPI.Intracomm:
    from mpi4py import MPI

    return MPI.COMM_SELF


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_make_file, "not_a_folder"),
        (_make_folder_with_a_file, "not_empty"),
        (_make_zarr_array, "exists"),
        (_make_stream_below_a_group, "exists"),
    ],
)
def test_what_is_not_ours_is_never_replaced(
    comm: MPI.Intracomm, mpi_tmp_path: Path, make: Callable[[Path], None], kind: str, overwrite: bool
) -> None:
    """A file, a folder with other things, a Zarr array or a group with a stream below it is refused on every rank."""
    path = mpi_tmp_path / "s"
    on_root(comm, lambda: make(path))
    before = on_root(comm, lambda: tree(mpi_tmp_path))

    error = error_on_all(comm, lambda: ms.write_open(path, _schema(), comm=comm, overwrite=overwrite, options=OPTIONS))
    assert (type(error), error.kind) == (ms.StoreError, kind)
    assert on_root(comm, lambda: tree(mpi_tmp_path)) == before


def test_path_below_a_file_is_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A path that can't become a folder because a part of it is a file is a StoreError on every rank."""
    on_root(comm, lambda: _make_file(mpi_tmp_path / "f"))
    error = error_on_all(comm, lambda: ms.write_open(mpi_tmp_path / "f" / "s", _schema(), comm=comm, options=OPTIONS))
    assert type(error) is ms.StoreError
    assert on_root(comm, (mpi_tmp_path / "f").read_bytes) == b"precious"


def test_url_of_another_scheme_is_refused(comm: MPI.Intracomm) -> None:
    """A scheme that is not supported is a StoreError on every rank."""
    error = error_on_all(comm, lambda: ms.write_open("s3://bucket/s", _schema(), comm=comm, options=OPTIONS))
    assert (type(error), error.kind) == (ms.StoreError, "scheme")


def test_file_url_and_relative_path_name_the_same_folder(
    comm: MPI.Intracomm, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may be named by a path, a relative path or a file:// URL."""
    monkeypatch.chdir(mpi_tmp_path)
    ms.write_open("s", _schema(), comm=comm, options=OPTIONS).close()
    with ms.write_resume(f"file://{mpi_tmp_path}/s", comm=comm, options=OPTIONS) as w:
        PLANE.write_statics(w)
        PLANE.write(w, 0)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0]))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("has_a_store", [False, True])
def test_ranks_that_see_different_file_systems_are_named(
    comm: MPI.Intracomm, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_a_store: bool
) -> None:
    """A rank that finds another folder under the same url is a StoreError on every rank, naming it and its host."""
    stray = comm.size - 1
    here = mpi_tmp_path / ("there" if comm.rank == stray else "here")
    if comm.rank == 0:
        for name in ("here", "there"):
            (mpi_tmp_path / name).mkdir()
    sync(comm)
    if has_a_store and comm.rank == stray:
        ms.write_open(here / "s", _schema(), comm=_self(), options=OPTIONS).close()
    sync(comm)
    before = tree(mpi_tmp_path / "there")
    monkeypatch.chdir(here)

    error = error_on_all(comm, lambda: ms.write_open("s", _schema(), comm=comm, options=OPTIONS))
    assert (type(error), error.kind, error.rank) == (ms.StoreError, "not_shared", stray)
    assert f"rank {stray}" in str(error)
    assert os.uname().nodename in str(error)
    assert tree(mpi_tmp_path / "there") == before

    # What rank 0 left is no store, and is in nobody's way.
    monkeypatch.chdir(mpi_tmp_path / "here")
    _write(comm, Path("s"), 2)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "here" / "s", PLANE, [0, 0]))


@pytest.mark.mpi(min_size=2)
def test_no_communicator_in_one_of_several_processes_is_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Without comm under mpirun every rank would write the whole store: ProtocolError that names comm=."""
    for call in (
        lambda: ms.write_open(mpi_tmp_path / "s", _schema()),
        lambda: ms.write_resume(mpi_tmp_path / "s"),
    ):
        error = error_on_all(comm, call)
        assert (type(error), error.kind) == (ms.ProtocolError, "no_comm")
        assert "comm=" in str(error)
    assert not (mpi_tmp_path / "s").exists()


def test_communicator_may_be_a_fortran_handle(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The integer handle that a Fortran or C model has is as good as an mpi4py communicator."""
    _write(comm.py2f(), mpi_tmp_path / "s", 3)  # type: ignore[arg-type]

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 3))


def test_what_is_no_communicator_of_writers_is_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """COMM_NULL, an intercommunicator or any other object is a ProtocolError on every rank."""
    from mpi4py import MPI

    wrong: list[Any] = [MPI.COMM_NULL, "world", True]
    if comm.size > 1:
        half: Any = comm.Split(comm.rank % 2, comm.rank)
        wrong.append(half.Create_intercomm(0, comm, 1 - comm.rank % 2))
    for candidate in wrong:
        error = error_on_all(comm, partial(ms.write_open, mpi_tmp_path / "s", _schema(), comm=candidate))
        assert (type(error), error.kind) == (ms.ProtocolError, "comm")
    assert not (mpi_tmp_path / "s").exists()


def test_ranks_of_a_subcommunicator_write_alone(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Several groups of ranks may each write a store of their own at the same time, in any order of ranks."""
    color = comm.rank % 2
    part: Any = comm.Split(color, -comm.rank)
    _write(part, mpi_tmp_path / f"s{color}", 3, run=color)

    for c in range(min(comm.size, 2)):
        on_root(comm, partial(assert_holds, mpi_tmp_path / f"s{c}", PLANE, [c] * 3))


def test_plan_is_logged_once_with_its_warnings(
    comm: MPI.Intracomm, mpi_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 logs it as the store is opened, and warns of objects under 4 MiB with the setting to change."""
    with caplog.at_level(logging.INFO, logger="mpistream"):
        ms.write_open(mpi_tmp_path / "s", _schema(), comm=comm, options=OPTIONS).close()

    infos = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    # Opened and closed.
    assert (len(infos), len(warnings)) == ((2, 1) if comm.rank == 0 else (0, 0))
    if comm.rank == 0:
        # 8 x 6 cells of 4 bytes, 4 x 2 shards, rows of 2.
        assert "192 B a record in 4 objects" in infos[0]
        assert "shard_shape" in warnings[0]
        assert "4 MiB" in warnings[0]

"""A storage that fails on one rank is the same error on every rank, and the commit can be tried again."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mpistream as ms
from tests.support.collective import at_most, error_on_all, keys, on_root, options, tree
from tests.support.faults import FaultyStore
from tests.support.scene import PLANE, assert_holds, time_of
from tests.support.verified import assert_no_damage, assert_sound

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"time": 4, "y": 1, "x": 6}


def _opened(comm: MPI.Intracomm, store: FaultyStore, **changes: Any) -> ms.StreamWriter:
    """Open a store with three committed records, in the middle of a row, and two more that are not committed."""
    w = ms.write_open(
        store,  # type: ignore[arg-type]
        PLANE.schema(shard_shape=SHARD, chunk_shape={"time": 2}),
        comm=comm,
        options=options(**changes),
    )
    PLANE.write_statics(w)
    for i in range(3):
        PLANE.write(w, i)
    w.commit()
    return w


def _zarr_tree(root: Path) -> dict[str, tuple[int, int, int]]:
    return {k: v for k, v in tree(root).items() if k != "." and not k.startswith(".mpistream")}


def _holds_the_first_three(comm: MPI.Intracomm, root: Path) -> None:
    on_root(comm, lambda: assert_holds(root, PLANE, [0, 0, 0]))
    on_root(comm, lambda: assert_no_damage(root))


@pytest.mark.parametrize(
    ("number", "who", "threads"),
    [(errno.ENOSPC, "last", 1), (errno.ENOSPC, "first", 0), (errno.EIO, "first", 1), (errno.EDQUOT, "last", 0)],
)
def test_stage_that_fails_changes_no_key_and_can_be_tried_again(
    comm: MPI.Intracomm, mpi_tmp_path: Path, number: int, who: str, threads: int
) -> None:
    """A full or broken disk under one rank: no object of the store changes; with room again all is written (P-34)."""
    root, bad = mpi_tmp_path / "s", 0 if who == "first" else comm.size - 1
    store = FaultyStore(root)
    w = _opened(comm, store, threads=threads)
    before = on_root(comm, lambda: _zarr_tree(root))
    if comm.rank == bad:
        store.fail("stage", number)
    for i in range(3, 6):
        PLANE.write(w, i)
    for _ in range(2):
        with at_most(10):
            error = error_on_all(comm, w.commit)
        assert (type(error), error.kind, error.rank, error.errno) == (ms.CommitError, "io", bad, number)
        assert f"rank {bad}" in str(error)
        assert isinstance(error, OSError)
        assert on_root(comm, lambda: _zarr_tree(root)) == before
    _holds_the_first_three(comm, root)

    store.heal()
    assert w.commit().n_records == 6
    w.close()
    on_root(comm, lambda: assert_holds(root, PLANE, [0] * 6))
    assert on_root(comm, lambda: keys(root)) == PLANE.keys(6, SHARD)
    on_root(comm, lambda: assert_sound(root))


@pytest.mark.parametrize(
    ("call", "after", "durability"),
    [
        ("place", "commit", "none"),
        ("place", "rollback", "fsync"),
        ("sync_folders", "commit", "fsync"),
        ("sync_folders", "rollback", "fsync"),
    ],
)
def test_place_that_fails_commits_nothing_and_can_be_tried_again(
    comm: MPI.Intracomm, mpi_tmp_path: Path, call: str, after: str, durability: str
) -> None:
    """When a rename or the sync of a folder fails on one rank, the old records stay right, and go on being so."""
    root, bad = mpi_tmp_path / "s", comm.size - 1
    store = FaultyStore(root)
    w = _opened(comm, store, durability=durability)
    if comm.rank == bad:
        store.fail(call, errno.EIO, when=lambda key, data: key.startswith("u/"))
    for i in range(3, 6):
        PLANE.write(w, i)
    error = error_on_all(comm, w.commit)
    assert (type(error), error.kind, error.rank, error.errno) == (ms.CommitError, "io", bad, errno.EIO)
    _holds_the_first_three(comm, root)

    store.heal()
    run = 0
    if after == "rollback":
        w.rollback()
        run = 1
        for i in range(3, 6):
            PLANE.write(w, i, run)
    w.commit()
    on_root(comm, lambda: assert_holds(root, PLANE, [0, 0, 0, run, run, run]))
    for i in range(6, 9):
        PLANE.write(w, i)
    w.close()
    on_root(comm, lambda: assert_holds(root, PLANE, [0, 0, 0, run, run, run, 0, 0, 0]))
    assert on_root(comm, lambda: keys(root)) == PLANE.keys(9, SHARD)


def test_failure_that_goes_on_ends_in_one_error_of_close(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """close releases everything and raises once; then the store can be resumed with what was committed."""
    root, bad = mpi_tmp_path / "s", comm.size - 1
    store = FaultyStore(root)
    w = _opened(comm, store)
    if comm.rank == bad:
        store.fail("stage", errno.ENOSPC)
    PLANE.write(w, 3)
    error = error_on_all(comm, w.close)
    assert (type(error), error.kind, error.rank, error.errno) == (ms.CommitError, "io", bad, errno.ENOSPC)
    w.close()
    _holds_the_first_three(comm, root)
    assert not (root / ".mpistream/stage/1").exists()
    with ms.write_resume(root, comm=comm, options=options()) as again:
        PLANE.write(again, 3)
    on_root(comm, lambda: assert_holds(root, PLANE, [0] * 4))


def test_failure_at_the_end_of_a_with_body_is_raised_by_it(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A body that ends well over a disk that is full raises the commit's error on every rank."""
    root = mpi_tmp_path / "s"
    store = FaultyStore(root)

    def body() -> None:
        with _opened(comm, store) as w:
            if comm.rank == 0:
                store.fail("stage", errno.ENOSPC)
            PLANE.write(w, 3)

    error = error_on_all(comm, body)
    assert (type(error), error.rank, error.errno) == (ms.CommitError, 0, errno.ENOSPC)
    _holds_the_first_three(comm, root)


def test_exception_that_is_not_of_the_storage_is_told_to_every_rank(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Any other exception while a rank stages or places, such as MemoryError, is a CommitError that names its class."""
    root, bad = mpi_tmp_path / "s", comm.size - 1
    store = FaultyStore(root)
    w = _opened(comm, store)
    for call in ("stage", "place"):
        if comm.rank == bad:
            store.fail(call, error=MemoryError("none left"), when=lambda key, data: "u/" in key or b"\x02" in data[:8])
        PLANE.write(w, w.n_records)
        error = error_on_all(comm, w.commit)
        assert (type(error), error.kind, error.rank) == (ms.CommitError, "exception", bad)
        assert "MemoryError: none left" in str(error)
        store.heal()
    w.close()
    on_root(comm, lambda: assert_holds(root, PLANE, [0] * 5))


def test_rollback_that_can_not_read_is_an_error_on_every_rank(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A rank that can't read back its part of a row is a CommitError on all; a later rollback does it."""
    root, bad = mpi_tmp_path / "s", comm.size - 1
    store = FaultyStore(root)
    w = _opened(comm, store)
    PLANE.write(w, 3, run=7)
    if comm.rank == bad:
        store.fail("read", errno.EIO, when=lambda key, data: key.startswith("u/c/"))
    error = error_on_all(comm, w.rollback)
    assert (type(error), error.rank, error.errno) == (ms.CommitError, bad, errno.EIO)
    store.heal()
    w.rollback()
    PLANE.write(w, 3)
    w.close()
    on_root(comm, lambda: assert_holds(root, PLANE, [0] * 4))


def test_resume_that_can_not_read_is_an_error_on_every_rank(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A rank that can't read its part of a row: every rank raises within seconds, and can try again (P-18)."""
    root, bad = mpi_tmp_path / "s", comm.size - 1
    store = FaultyStore(root)
    _opened(comm, store).close()
    if comm.rank == bad:
        store.fail("read", errno.EACCES, when=lambda key, data: key.startswith("u/c/"))

    def resume() -> ms.StreamWriter:
        return ms.write_resume(store, comm=comm, options=options())  # type: ignore[arg-type]

    with at_most(10):
        error = error_on_all(comm, resume)
    assert (type(error), error.rank, error.errno) == (ms.StoreError, bad, errno.EACCES)
    store.heal()
    with resume() as w:
        PLANE.write(w, 3)
    on_root(comm, lambda: assert_holds(root, PLANE, [0] * 4))


@pytest.mark.parametrize("what", ["time chunk", "manifest"])
def test_owner_that_can_not_stage_commits_nothing(comm: MPI.Intracomm, mpi_tmp_path: Path, what: str) -> None:
    """A time chunk that can't be placed, a manifest that can't be staged: nothing is committed, and later it can be."""
    root = mpi_tmp_path / "s"
    store = FaultyStore(root)
    w = _opened(comm, store)
    PLANE.write(w, 3)
    if comm.rank == 0 and what == "manifest":
        store.fail("stage", errno.ENOSPC, when=lambda key, data: b'"commit_seq"' in data)
    elif comm.rank == 0:
        store.fail("place", errno.ENOSPC, when=lambda key, data: key.startswith("time/c"))
    for _ in range(2):
        error = error_on_all(comm, w.commit)
        assert (type(error), error.kind, error.rank, error.errno) == (ms.CommitError, "io", 0, errno.ENOSPC)
        _holds_the_first_three(comm, root)
    store.heal()
    assert w.commit().n_records == 4
    PLANE.write(w, 4)
    w.close()
    on_root(comm, lambda: assert_holds(root, PLANE, [0] * 5))


@pytest.mark.parametrize(("call", "n_committed"), [("place", 3), ("sync_folders", 4)])
def test_manifest_whose_fate_is_not_known_ends_the_writer(
    comm: MPI.Intracomm, mpi_tmp_path: Path, call: str, n_committed: int
) -> None:
    """When the manifest's rename or sync fails, every rank gets outcome_unknown, and only a resume tells what is."""
    root = mpi_tmp_path / "s"
    store = FaultyStore(root)
    w = _opened(comm, store, durability="fsync")
    PLANE.write(w, 3)
    if comm.rank == 0:
        store.fail(call, errno.EIO, when=lambda key, data: key.endswith("manifest.json"))
    error = error_on_all(comm, w.commit)
    assert (type(error), error.kind, error.rank, error.errno) == (ms.CommitError, "outcome_unknown", 0, errno.EIO)
    assert "write_resume" in str(error)
    store.heal()
    with at_most(5):
        calls: list[Callable[[], object]] = [w.commit, w.rollback, w.flush, lambda: PLANE.write(w, 4), w.close]
        assert [error_on_all(comm, c).kind for c in calls] == ["outcome_unknown"] * 5
        w.close()

    with ms.write_resume(root, comm=comm, options=options()) as again:
        assert (again.n_records, again.last_t) == (n_committed, time_of(n_committed - 1))
        for i in range(n_committed, 5):
            PLANE.write(again, i)
    on_root(comm, lambda: assert_holds(root, PLANE, [0] * 5))


@pytest.mark.parametrize("key", ["zarr.json", "u/zarr.json"])
def test_documents_that_lag_behind_are_a_warning_and_caught_up(
    comm: MPI.Intracomm, mpi_tmp_path: Path, key: str
) -> None:
    """A commit whose Zarr documents can't be written is done; rank 0's receipt warns, and the next commit mends it."""
    root = mpi_tmp_path / "s"
    store = FaultyStore(root)
    w = _opened(comm, store)
    PLANE.write(w, 3)
    if comm.rank == 0:
        store.fail("place", errno.ENOSPC, when=lambda k, data: k == key)
    receipt = w.commit()
    assert comm.allgather(receipt) == [receipt] * comm.size
    assert comm.allgather(len(receipt.warnings)) == [1] + [0] * (comm.size - 1)
    assert receipt.n_records == 4
    assert ms.read_record(root, "u", 3).tobytes() == PLANE.whole("u", 3).tobytes()
    again = w.commit()
    assert comm.allgather(len(again.warnings)) == [1] + [0] * (comm.size - 1)
    store.heal()
    again = w.commit()
    assert (again, again.warnings) == (receipt, ())
    on_root(comm, lambda: assert_holds(root, PLANE, [0] * 4))
    w.close()


def test_open_that_can_not_write_is_an_error_on_every_rank(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A disk that is full while a store is made is a StoreError on all; what is left of it is taken over."""
    root = mpi_tmp_path / "s"
    store = FaultyStore(root)
    schema = PLANE.schema(shard_shape=SHARD)
    if comm.rank == 0:
        store.fail("place", errno.ENOSPC, when=lambda key, data: key.endswith("manifest.json"))

    def create() -> ms.StreamWriter:
        return ms.write_open(store, schema, comm=comm, options=options())  # type: ignore[arg-type]

    error = error_on_all(comm, create)
    assert (type(error), error.errno) == (ms.StoreError, errno.ENOSPC)
    missing = error_on_all(comm, lambda: ms.write_resume(root, comm=comm, options=options()))
    assert (type(missing), missing.kind) == (ms.ResumeError, "no_store")
    store.heal()
    with create() as w:
        PLANE.write_statics(w)
        PLANE.write(w, 0)
    on_root(comm, lambda: assert_holds(root, PLANE, [0]))

"""Several streams in one commit: all or none, one agreement, and every rank is told the same."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mpistream as ms
from mpistream.comm import MPITransport
from tests.support.collective import OPTIONS, at_most, error_on_all, on_root, options, subcomm, tree
from tests.support.faults import FaultyStore
from tests.support.scene import PLANE, Scene, assert_holds, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

OCEAN = Scene(sizes={"z": 3, "x": 15}, variables={"salt": ("z x", "float64"), "heat": ("", "float32")})
SHARD = {"time": 2, "y": 2, "x": 3}


def _open(comm: MPI.Intracomm, *stores: FaultyStore, **changes: Any) -> list[ms.StreamWriter]:
    """Open the scenes PLANE, OCEAN, OCEAN, ... in these stores, with one committed record in each."""
    found = []
    for i, store in enumerate(stores):
        schema = OCEAN.schema(shard_shape={"x": 2}) if i else PLANE.schema(shard_shape=SHARD)
        w = ms.write_open(store, schema, comm=comm, options=options(**changes))  # type: ignore[arg-type]
        if i == 0:
            PLANE.write_statics(w)
        (OCEAN if i else PLANE).write(w, 0)
        w.commit()
        found.append(w)
    return found


def _hold(comm: MPI.Intracomm, root: Path, n_plane: int, n_ocean: int) -> None:
    def check() -> None:
        assert_holds(root / "a", PLANE, [0] * n_plane)
        assert_holds(root / "b", OCEAN, [0] * n_ocean)

    on_root(comm, check)


def test_streams_are_committed_together(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Receipts come in the order of the writers, the same on every rank; nothing pending in a stream is fine."""
    a, b = _open(comm, FaultyStore(mpi_tmp_path / "a"), FaultyStore(mpi_tmp_path / "b"))
    PLANE.write(a, 1)
    for i in range(1, 4):
        OCEAN.write(b, i)
    receipts = ms.commit_all([b, a])
    assert comm.allgather(receipts) == [receipts] * comm.size
    assert [(r.commit_seq, r.n_records, r.n_new_records, r.last_t) for r in receipts] == [
        (2, 4, 3, time_of(3)),
        (2, 2, 1, time_of(1)),
    ]
    _hold(comm, mpi_tmp_path, 2, 4)
    OCEAN.write(b, 4)
    again = ms.commit_all((a, b))
    assert (again[0], again[1].n_records) == (receipts[1], 5)
    before = on_root(comm, lambda: tree(mpi_tmp_path))
    assert ms.commit_all([a, b]) == again
    assert on_root(comm, lambda: tree(mpi_tmp_path)) == before
    a.close()
    b.close()
    _hold(comm, mpi_tmp_path, 2, 5)


def test_partial_rows_stay_pending(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """partial_rows=False holds for each stream: rows of two records here, of one there."""
    a, b = _open(comm, FaultyStore(mpi_tmp_path / "a"), FaultyStore(mpi_tmp_path / "b"))
    for i in range(1, 3):
        PLANE.write(a, i)
        OCEAN.write(b, i)
    receipts = ms.commit_all([a, b], partial_rows=False)
    assert [r.n_records for r in receipts] == [2, 3]
    a.close()
    b.close()
    _hold(comm, mpi_tmp_path, 3, 3)


@pytest.mark.parametrize("n_streams", [1, 3])
def test_cost_does_not_grow_with_streams(
    comm: MPI.Intracomm, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_streams: int
) -> None:
    """However many streams, a rank sends and gathers once; rank 0 answers each rank twice."""
    writers = _open(comm, *(FaultyStore(mpi_tmp_path / str(i)) for i in range(n_streams)))
    calls: list[str] = []
    for name in ("send", "gather"):
        original = getattr(MPITransport, name)

        def counted(self: MPITransport, *args: Any, _name: str = name, _original: Any = original) -> Any:
            calls.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(MPITransport, name, counted)
    for i, w in enumerate(writers):
        (OCEAN if i else PLANE).write(w, 1)
    ms.commit_all(writers)
    n_sent = 1 if comm.rank else 2 * (comm.size - 1)
    assert sorted(calls) == ["gather", *["send"] * n_sent]
    monkeypatch.undo()
    for w in writers:
        w.close()


@pytest.mark.parametrize("call", ["stage", "place"])
@pytest.mark.parametrize("which", ["a", "b"])
def test_failure_of_one_stream_commits_none(comm: MPI.Intracomm, mpi_tmp_path: Path, call: str, which: str) -> None:
    """A rank that can't stage or place its part of one stream is one error on all ranks; the next try takes all."""
    stores = {name: FaultyStore(mpi_tmp_path / name) for name in "ab"}
    a, b = _open(comm, *stores.values())
    # The last rank that owns a part of both; of seven ranks the last owns nothing.
    owns = comm.allgather(not a.region.is_empty and not b.region.is_empty)
    bad = max(rank for rank in range(comm.size) if owns[rank])
    PLANE.write(a, 1)
    OCEAN.write(b, 1)
    if comm.rank == bad:
        stores[which].fail(call, errno.ENOSPC, when=lambda key, data: call == "stage" or "/c" in key)
    # What the thread has staged already does not fail again.
    PLANE.write(a, 2)
    OCEAN.write(b, 2)
    for _ in range(2):
        error = error_on_all(comm, lambda: ms.commit_all([a, b]))
        assert (type(error), error.kind, error.rank, error.errno) == (ms.CommitError, "io", bad, errno.ENOSPC)
        assert str(mpi_tmp_path / which) in str(error)
        _hold(comm, mpi_tmp_path, 1, 1)
    stores[which].heal()
    assert [r.n_records for r in ms.commit_all([a, b])] == [3, 3]
    a.close()
    b.close()
    _hold(comm, mpi_tmp_path, 3, 3)


@pytest.mark.parametrize(
    "fails",
    [("stage", lambda key, data: b'"commit_seq"' in data), ("place", lambda key, data: key.startswith("time/c"))],
)
def test_owner_that_can_not_prepare_the_second_stream_commits_none(
    comm: MPI.Intracomm, mpi_tmp_path: Path, fails: tuple[str, Any]
) -> None:
    """A manifest that can't be staged, a time chunk that can't be placed: before the first manifest is renamed."""
    stores = [FaultyStore(mpi_tmp_path / name) for name in "ab"]
    a, b = _open(comm, *stores)
    PLANE.write(a, 1)
    OCEAN.write(b, 1)
    if comm.rank == 0:
        stores[1].fail(fails[0], errno.ENOSPC, when=fails[1])
    error = error_on_all(comm, lambda: ms.commit_all([a, b]))
    assert (type(error), error.kind, error.rank, error.errno) == (ms.CommitError, "io", 0, errno.ENOSPC)
    _hold(comm, mpi_tmp_path, 1, 1)
    stores[1].heal()
    assert [r.n_records for r in ms.commit_all([a, b])] == [2, 2]
    a.close()
    b.close()
    _hold(comm, mpi_tmp_path, 2, 2)


def test_differing_records_of_one_stream_commit_none(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The decision over each stream comes before anything is placed; rollback of that stream mends it."""
    if comm.size == 1:
        return
    a, b = _open(comm, FaultyStore(mpi_tmp_path / "a"), FaultyStore(mpi_tmp_path / "b"))
    PLANE.write(a, 1)
    if comm.rank:
        OCEAN.write(b, 1)
    error = error_on_all(comm, lambda: ms.commit_all([a, b]))
    assert (type(error), error.kind) == (ms.CommitError, "records")
    assert f"{mpi_tmp_path / 'b'}: nothing was committed: the ranks wrote different records" in str(error)
    _hold(comm, mpi_tmp_path, 1, 1)
    b.rollback()
    assert [r.n_records for r in ms.commit_all([a, b])] == [2, 1]
    a.close()
    b.close()


@pytest.mark.parametrize(("call", "n_ocean"), [("place", 1), ("sync_folders", 2)])
def test_second_manifest_whose_fate_is_not_known(
    comm: MPI.Intracomm, mpi_tmp_path: Path, call: str, n_ocean: int
) -> None:
    """outcome_unknown says of each stream what is known; all these writers are dead, and resumes tell the rest."""
    stores = [FaultyStore(mpi_tmp_path / name) for name in "abc"]
    writers = _open(comm, *stores, durability="fsync")
    for i, w in enumerate(writers):
        (OCEAN if i else PLANE).write(w, 1)
    if comm.rank == 0:
        stores[1].fail(call, errno.EIO, when=lambda key, data: key.endswith("manifest.json"))
    error = error_on_all(comm, lambda: ms.commit_all(writers))
    assert (type(error), error.kind, error.rank, error.errno) == (ms.CommitError, "outcome_unknown", 0, errno.EIO)
    urls = [store.url for store in stores]
    assert f"{urls[0]}: committed; {urls[1]}: not known whether it is committed; {urls[2]}: not committed" in str(error)
    # What is known to be committed is not called lost.
    assert [w.n_committed for w in writers] == [2, 1, 1]
    stores[1].heal()
    with at_most(5):
        for w in writers:
            assert error_on_all(comm, w.commit).kind == "outcome_unknown"
            assert error_on_all(comm, w.close).kind == "outcome_unknown"
    for name, n in (("a", 2), ("b", n_ocean), ("c", 1)):
        with ms.write_resume(mpi_tmp_path / name, comm=comm, options=OPTIONS) as again:
            assert again.n_records == n
    _hold(comm, mpi_tmp_path, 2, n_ocean)


def test_stream_that_is_taken_over_amid_the_manifests(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """partly_committed names both sides; the stream that is committed goes on, the other one is fenced."""
    stores = [FaultyStore(mpi_tmp_path / name) for name in "ab"]
    a, b = _open(comm, *stores)
    PLANE.write(a, 1)
    OCEAN.write(b, 1)
    if comm.rank == 0:
        # Another job takes b over in the moment in which the manifest of a is renamed.
        def take_over(key: str, data: bytes) -> bool:
            if key.endswith("manifest.json"):
                stores[0].heal()
                ms.write_resume(mpi_tmp_path / "b", comm=_alone(), takeover=True, options=OPTIONS).close()
            return False

        stores[0].fail("place", when=take_over)
    error = error_on_all(comm, lambda: ms.commit_all([a, b]))
    assert (type(error), error.kind, error.rank) == (ms.CommitError, "partly_committed", 0)
    assert f"({stores[0].url}: committed; {stores[1].url}: not committed)" in str(error)
    assert "epoch 2 took the store over" in str(error)
    PLANE.write(a, 2)
    assert a.commit().n_records == 3
    assert isinstance(error_on_all(comm, b.commit), ms.FencedError)
    a.close()
    assert isinstance(error_on_all(comm, b.close), ms.FencedError)
    _hold(comm, mpi_tmp_path, 3, 1)


def _alone() -> Any:
    from mpi4py import MPI

    return MPI.COMM_SELF


def _closed(a: ms.StreamWriter, b: ms.StreamWriter) -> list[Any]:
    b.close()
    return [a, b]


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda a, b: [a, b, a], "writers", "/a is given twice"),
        (lambda a, b: [a, b, "c"], "writers", "a str is no writer"),
        (lambda a, b: [a, None], "writers", "a NoneType is no writer"),
        (_closed, "closed", "/b is closed"),
    ],
    ids=["twice", "string", "none", "closed"],
)
def test_list_that_is_wrong_on_every_rank(
    comm: MPI.Intracomm,
    mpi_tmp_path: Path,
    make: Callable[[ms.StreamWriter, ms.StreamWriter], list[Any]],
    kind: str,
    text: str,
) -> None:
    """A writer twice, none at all, one that is closed: ProtocolError on every rank, and the writers go on."""
    a, b = _open(comm, FaultyStore(mpi_tmp_path / "a"), FaultyStore(mpi_tmp_path / "b"))
    given = make(a, b)
    error = error_on_all(comm, lambda: ms.commit_all(given))
    assert (type(error), error.kind) == (ms.ProtocolError, kind)
    assert text in str(error)
    PLANE.write(a, 1)
    a.close()
    b.close()
    _hold(comm, mpi_tmp_path, 2, 1)


def test_empty_list(comm: MPI.Intracomm) -> None:
    """There is nobody to agree with: every rank raises by itself."""
    error = error_on_all(comm, lambda: ms.commit_all([]))
    assert (type(error), error.kind) == (ms.ProtocolError, "writers")


def test_record_that_is_open(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A rank inside a record() of one of the streams ends the call on every rank."""
    a, b = _open(comm, FaultyStore(mpi_tmp_path / "a"), FaultyStore(mpi_tmp_path / "b"))

    def commit() -> None:
        if comm.rank == comm.size - 1:
            with b.record(time_of(1)):
                ms.commit_all([a, b])
        else:
            ms.commit_all([a, b])

    error = error_on_all(comm, commit)
    assert (type(error), error.kind) == (ms.ProtocolError, "nested")
    a.close()
    b.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("who", "call", "odd_call"),
    [
        ("first", lambda a, b, c: ms.commit_all([a, b]), lambda a, b, c: ms.commit_all([b, a])),
        ("last", lambda a, b, c: ms.commit_all([a, b]), lambda a, b, c: ms.commit_all([a, c])),
        ("first", lambda a, b, c: ms.commit_all([b, c]), lambda a, b, c: ms.commit_all([a, c])),
        ("last", lambda a, b, c: ms.commit_all([a, b]), lambda a, b, c: ms.commit_all([c])),
        ("first", lambda a, b, c: ms.commit_all([a, b]), lambda a, b, c: a.commit()),
        ("last", lambda a, b, c: a.commit(), lambda a, b, c: b.commit()),
        ("first", lambda a, b, c: ms.commit_all([a, b]), lambda a, b, c: c.rollback()),
        ("last", lambda a, b, c: ms.commit_all([a, b]), lambda a, b, c: ms.commit_all([a, b], partial_rows=False)),
    ],
)
def test_ranks_that_name_different_writers(
    comm: MPI.Intracomm, mpi_tmp_path: Path, who: str, call: Callable[..., object], odd_call: Callable[..., object]
) -> None:
    """Another order, another writer, a commit of one of them alone: ProtocolError on every rank, at once."""
    a, b, c = _open(comm, *(FaultyStore(mpi_tmp_path / name) for name in "abc"))
    OCEAN.write(b, 1)
    is_odd = comm.rank == (0 if who == "first" else comm.size - 1)
    with at_most(10):
        error = error_on_all(comm, lambda: (odd_call if is_odd else call)(a, b, c))
    assert (type(error), error.kind) == (ms.ProtocolError, "mismatch")
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "b", OCEAN, [0]))


def test_writers_of_the_same_ranks_over_two_communicators(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The same ranks in the same order are enough."""
    (a,) = _open(comm, FaultyStore(mpi_tmp_path / "a"))
    b = ms.write_open(mpi_tmp_path / "b", OCEAN.schema(shard_shape={"x": 2}), comm=comm.Dup(), options=OPTIONS)
    OCEAN.write(b, 0)
    assert [r.n_records for r in ms.commit_all([a, b])] == [1, 1]
    a.close()
    b.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("are_fewer", [True, False])
def test_writers_of_different_ranks(comm: MPI.Intracomm, mpi_tmp_path: Path, are_fewer: bool) -> None:
    """One stream on all ranks, another on some of them or in another order: refused on every rank, and each goes on."""
    (a,) = _open(comm, FaultyStore(mpi_tmp_path / "a"))
    other = subcomm(comm, comm.size - 1) if are_fewer else comm.Split(0, -comm.rank)
    writers = [a]
    if other is not None:
        b = ms.write_open(mpi_tmp_path / "b", OCEAN.schema(shard_shape={"x": 2}), comm=other, options=OPTIONS)
        OCEAN.write(b, 0)
        writers.append(b)
    error = error_on_all(comm, lambda: ms.commit_all(writers if len(writers) == 2 else [a, a]))
    assert (type(error), error.kind) == (ms.ProtocolError, "comm")
    assert "b was opened on other ranks than" in str(error)
    PLANE.write(a, 1)
    for w in writers:
        w.close()
    _hold(comm, mpi_tmp_path, 2, 1)

"""A rank that fails, does not come or does something else: every rank leaves with an error, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, at_most, error_on_all, keys, on_root, options, sync
from tests.support.scene import PLANE, assert_holds, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"time": 4, "y": 1, "x": 6}


class ModelError(Exception):
    """What a simulation raises by itself."""


def _opened(comm: MPI.Intracomm, url: Path, **changes: Any) -> ms.StreamWriter:
    """Open a store with two committed records."""
    w = ms.write_open(url, PLANE.schema(shard_shape=SHARD), comm=comm, options=options(**changes))
    PLANE.write_statics(w)
    for i in range(2):
        PLANE.write(w, i)
    w.commit()
    return w


def _goes_on(comm: MPI.Intracomm, root: Path, n_committed: int = 2) -> None:
    """Assert that so many records are there, and that a resume goes on at once and leaves no trace of the failure."""
    assert on_root(comm, lambda: ms.open_reader(root).n_records) == n_committed
    with at_most(10), ms.write_resume(root, comm=comm, options=OPTIONS) as w:
        assert w.n_records == n_committed
        PLANE.write(w, n_committed)
    on_root(comm, lambda: assert_holds(root, PLANE, [0] * (n_committed + 1)))
    assert on_root(comm, lambda: keys(root)) == PLANE.keys(n_committed + 1, SHARD)


def _closed_with(w: ms.StreamWriter, kind: str) -> None:
    with at_most(1), pytest.raises(ms.CommitError) as caught:
        w.close()
    assert caught.value.kind == kind


def _in_the_body(w: ms.StreamWriter) -> None:
    raise ModelError("negative density")


def _in_a_record(w: ms.StreamWriter) -> None:
    with w.record(time_of(2)) as rec:
        rec.put("u", PLANE.block("u", w.region, 2))
        raise ModelError("negative density")


def _after_a_record(w: ms.StreamWriter) -> None:
    PLANE.write(w, 2)
    w.flush()
    raise ModelError("negative density")


def _wrong_record(w: ms.StreamWriter) -> None:
    w.write_record(time_of(2), {"v": 1.0})


@pytest.mark.parametrize(
    ("who", "raiser"),
    [
        ("first", _in_the_body),
        ("first", _in_a_record),
        ("first", _wrong_record),
        ("second", _in_a_record),
        ("second", _after_a_record),
        ("last", _after_a_record),
        ("last", _wrong_record),
    ],
)
def test_rank_that_raises_in_the_body_ends_the_others_at_once(
    comm: MPI.Intracomm, mpi_tmp_path: Path, who: str, raiser: Callable[[ms.StreamWriter], None]
) -> None:
    """Its own exception goes on; the others get an error that names it in their next commit (P-26)."""
    bad = {"first": 0, "second": min(1, comm.size - 1), "last": comm.size - 1}[who]
    expected = ms.SchemaError if raiser is _wrong_record else ModelError

    def simulate() -> None:
        with _opened(comm, mpi_tmp_path / "s") as w:
            if comm.rank == bad:
                raiser(w)
            PLANE.write(w, 2)
            w.commit()

    with at_most(10):
        if comm.rank == bad:
            with pytest.raises(expected):
                simulate()
        else:
            with pytest.raises(ms.CommitError) as caught:
                simulate()
            assert (caught.value.kind, caught.value.rank) == ("left", bad)
            assert f"rank {bad}" in str(caught.value)
            assert ("negative density" if expected is ModelError else "'v'") in str(caught.value)
    _goes_on(comm, mpi_tmp_path / "s")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["commit", "rollback", "close"])
def test_rank_that_raises_is_named_by_every_later_call(comm: MPI.Intracomm, mpi_tmp_path: Path, call: str) -> None:
    """Whichever collective call the others are in, or come to later, it raises the same error, and again."""
    w = _opened(comm, mpi_tmp_path / "s")
    if comm.rank == 1:
        with pytest.raises(ModelError), w:
            raise ModelError("negative density")
    else:
        for again in [getattr(w, call)] * (1 if call == "close" else 2) + [w.commit] * (call != "close"):
            with at_most(10), pytest.raises(ms.CommitError) as caught:
                again()
            assert (caught.value.kind, caught.value.rank) == ("left", 1)
        w.close() if call == "close" else _closed_with(w, "left")
    sync(comm)
    _goes_on(comm, mpi_tmp_path / "s")


def test_every_rank_raises_in_the_body(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """When all ranks leave with an exception of their own, each one gets its own, and nobody waits."""

    def simulate() -> None:
        with _opened(comm, mpi_tmp_path / "s") as w:
            PLANE.write(w, 2)
            raise ModelError(f"of rank {comm.rank}")

    with at_most(10), pytest.raises(ModelError, match=f"of rank {comm.rank}"):
        simulate()
    sync(comm)
    _goes_on(comm, mpi_tmp_path / "s")


def test_interrupt_in_the_body_is_told_like_any_exception(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """KeyboardInterrupt and SystemExit on one rank end the others, too."""
    bad = comm.size - 1
    if comm.rank == bad:
        with pytest.raises(KeyboardInterrupt), _opened(comm, mpi_tmp_path / "s"):
            raise KeyboardInterrupt
    else:
        with pytest.raises(ms.CommitError) as caught, _opened(comm, mpi_tmp_path / "s"):
            pass  # the end of the body commits
        assert (caught.value.kind, caught.value.rank) == ("left", bad)
        assert "KeyboardInterrupt" in str(caught.value)
    _goes_on(comm, mpi_tmp_path / "s")


@pytest.mark.mpi(min_size=2)
def test_exception_is_told_to_the_ranks_of_all_open_writers(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A rank that leaves the body of one writer tells those who wait for it in another."""
    bad = comm.size - 1
    a = _opened(comm, mpi_tmp_path / "a")
    b = _opened(comm, mpi_tmp_path / "b")
    if comm.rank == bad:
        with pytest.raises(ModelError), a, b:
            raise ModelError("negative density")
    else:
        for w in (a, b):
            with at_most(10), pytest.raises(ms.CommitError) as caught:
                w.commit()
            assert (caught.value.kind, caught.value.rank) == ("left", bad)
            _closed_with(w, "left")
    sync(comm)
    for name in ("a", "b"):
        _goes_on(comm, mpi_tmp_path / name)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("who", ["first", "last"])
def test_rank_that_does_not_come_is_named_after_the_timeout(comm: MPI.Intracomm, mpi_tmp_path: Path, who: str) -> None:
    """The others wait `timeout` seconds and get an error that names the rank; when it comes, it gets one at once."""
    absent = 0 if who == "first" else comm.size - 1
    w = _opened(comm, mpi_tmp_path / "s", timeout=2)
    PLANE.write(w, 2)
    if comm.rank != absent:
        with at_most(6), pytest.raises(ms.CommitError) as caught:
            w.commit()
        assert (caught.value.kind, caught.value.rank) == ("timeout", absent)
        assert f"rank {absent}" in str(caught.value)
    sync(comm)
    with at_most(1), pytest.raises(ms.CommitError) as caught:
        w.commit()
    assert caught.value.kind == "timeout"
    sync(comm)
    _closed_with(w, "timeout")
    sync(comm)
    _goes_on(comm, mpi_tmp_path / "s")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("who", ["first", "last"])
def test_rank_that_does_not_come_to_the_opening_is_an_error(comm: MPI.Intracomm, mpi_tmp_path: Path, who: str) -> None:
    """Ranks that open without one of them raise after the timeout, and nothing is written."""
    absent = 0 if who == "first" else comm.size - 1
    team = comm.Dup()
    if comm.rank != absent:
        with at_most(6), pytest.raises(ms.ProtocolError) as caught:
            ms.write_open(mpi_tmp_path / "s", PLANE.schema(), comm=team, options=options(timeout=2))
        assert caught.value.kind == "timeout"
    sync(comm)
    assert not (mpi_tmp_path / "s").exists()


MISMATCHES: dict[str, tuple[Callable[[ms.StreamWriter], object], Callable[[ms.StreamWriter], object]]] = {
    "commit and rollback": (lambda w: w.commit(), lambda w: w.rollback()),
    "rollback and commit": (lambda w: w.rollback(), lambda w: w.commit()),
    "commits of other rows": (lambda w: w.commit(), lambda w: w.commit(partial_rows=False)),
    "rollback and close": (lambda w: w.rollback(), lambda w: w.close()),
    "close and rollback": (lambda w: w.close(), lambda w: w.rollback()),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("pair", MISMATCHES)
def test_calls_that_do_not_match_are_refused_on_every_rank(comm: MPI.Intracomm, mpi_tmp_path: Path, pair: str) -> None:
    """When one rank makes another call than the others, all get a ProtocolError that names it; rollback mends it."""
    others, odd = MISMATCHES[pair]
    w = _opened(comm, mpi_tmp_path / "s")
    PLANE.write(w, 2, run=7)
    error = error_on_all(comm, lambda: (odd if comm.rank == 1 else others)(w))
    assert (type(error), error.kind, error.rank) == (ms.ProtocolError, "mismatch", 1)
    assert "rank 1" in str(error)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0, 0]))
    if "close" in pair:
        # Who called close has gone; whoever comes later must not wait for it.
        if (comm.rank == 1) is (pair == "rollback and close"):
            w.close()
        else:
            _closed_with(w, "left")
        sync(comm)
        _goes_on(comm, mpi_tmp_path / "s")
        return
    w.rollback()
    PLANE.write(w, 2)
    w.close()
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 3))


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_records_name_each_last_time(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """One rank with a record more: CommitError on all with each rank's last t and rollback(), which mends it."""
    w = _opened(comm, mpi_tmp_path / "s")
    more = comm.size - 1
    for i in range(2, 4 + (comm.rank == more)):
        PLANE.write(w, i, run=7)
    for _ in range(2):
        error = error_on_all(comm, w.commit)
        assert (type(error), error.kind) == (ms.CommitError, "records")
        assert "rollback()" in str(error)
        for rank in range(comm.size):
            n = 2 + (rank == more)
            assert f"rank {rank} {n} records to t = {time_of(1 + n)}" in str(error)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0, 0]))
    w.rollback()
    for i in range(2, 5):
        PLANE.write(w, i)
    w.close()
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 5))


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_times_are_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Times that differ in one bit on one rank are a CommitError on all, naming it; rollback mends it."""
    w = _opened(comm, mpi_tmp_path / "s")
    t = time_of(2)
    w.write_record(t if comm.rank != 1 else t * (1 + 2**-52), PLANE.record(w.region, 2))
    error = error_on_all(comm, w.commit)
    assert (type(error), error.kind, error.rank) == (ms.CommitError, "times", 1)
    assert "rollback()" in str(error)
    w.rollback()
    PLANE.write(w, 2)
    w.close()
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 3))


@pytest.mark.mpi(min_size=2)
def test_static_that_one_rank_did_not_write_is_named(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A static with a part missing is a CommitError that names rank and static; written later, it is committed."""
    w = ms.write_open(mpi_tmp_path / "s", PLANE.schema(shard_shape=SHARD), comm=comm, options=OPTIONS)
    late = comm.size - 1
    PLANE.write(w, 0)
    if comm.rank != late:
        PLANE.write_statics(w)
    error = error_on_all(comm, w.commit)
    assert (type(error), error.kind, error.rank) == (ms.CommitError, "tiling", late)
    assert all(part in str(error) for part in (f"rank {late}", "'topo'"))
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [], statics=()))
    if comm.rank == late:
        PLANE.write_statics(w)
    w.close()
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0]))

"""What commit, rollback, flush and close do when nothing goes wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, error_on_all, keys, on_root, options, tree
from tests.support.scene import FULL, PLANE, Scene, assert_holds, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"y": 2, "x": 3}


def _opened(comm: MPI.Intracomm, url: Path, row: int = 4, inner: int = 1, **changes: Any) -> ms.StreamWriter:
    schema = PLANE.schema(shard_shape={"time": row, **SHARD}, chunk_shape={"time": inner})
    return ms.write_open(url, schema, comm=comm, options=options(**changes))


def test_receipt_is_the_same_on_every_rank_and_counts_what_is_on_disk(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Every rank gets one receipt; its records, statics, objects and bytes are those that lie in the store."""
    with _opened(comm, mpi_tmp_path / "s", row=1) as w:
        PLANE.write_statics(w)
        for i in range(3):
            PLANE.write(w, i)
        first = w.commit()
        PLANE.write(w, 3)
        second = w.commit()

    assert comm.allgather([first, second]) == [[first, second]] * comm.size
    facts = [(r.commit_seq, r.epoch, r.n_records, r.last_t, r.n_new_records, r.new_statics) for r in (first, second)]
    assert facts == [(1, 1, 3, time_of(2), 3, ("topo",)), (2, 1, 4, time_of(3), 1, ())]

    def on_disk() -> tuple[list[int], list[int]]:
        root = mpi_tmp_path / "s"
        objects = [k for k in keys(root) if "/c" in k and k.split("/")[0] in ("u", "topo")]
        new = [k for k in objects if k.startswith("u/c/3/")]
        old = [k for k in objects if k not in new]
        return [len(old), len(new)], [sum((root / k).stat().st_size for k in part) for part in (old, new)]

    n_objects, nbytes = on_root(comm, on_disk)
    # 4 x 2 shards a record, and as many of the static.
    assert [first.n_objects, second.n_objects] == n_objects == [32, 8]
    assert [first.nbytes, second.nbytes] == nbytes
    assert first.warnings == second.warnings == ()


def test_commit_with_nothing_pending_returns_the_last_receipt_and_touches_no_file(
    comm: MPI.Intracomm, mpi_tmp_path: Path
) -> None:
    """After open, a commit or a rollback, a commit of nothing leaves inode, time and size of every file."""
    with _opened(comm, mpi_tmp_path / "s") as w:
        before = on_root(comm, lambda: tree(mpi_tmp_path))
        empty = w.commit()
        assert on_root(comm, lambda: tree(mpi_tmp_path)) == before
        assert (empty.commit_seq, empty.n_records, empty.n_new_records, empty.last_t) == (0, 0, 0, None)

        PLANE.write_statics(w)
        PLANE.write(w, 0)
        receipt = w.commit()
        before = on_root(comm, lambda: tree(mpi_tmp_path))
        assert w.commit() == receipt
        assert w.commit(partial_rows=False) == receipt
        assert on_root(comm, lambda: tree(mpi_tmp_path)) == before

        PLANE.write(w, 1)
        w.rollback()
        before = on_root(comm, lambda: tree(mpi_tmp_path))
        assert w.commit() == receipt
        assert on_root(comm, lambda: tree(mpi_tmp_path)) == before
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0]))


def test_commit_without_partial_rows_leaves_an_unfinished_row_pending(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """commit(partial_rows=False) commits whole rows only, writes each shard once, and close commits the rest."""
    with _opened(comm, mpi_tmp_path / "s", row=4, inner=2) as w:
        PLANE.write_statics(w)
        committed, inodes = [], []
        for i in range(10):
            PLANE.write(w, i)
            receipt = w.commit(partial_rows=False)
            committed.append((receipt.n_records, w.n_committed, w.n_records))
            inodes.append(on_root(comm, lambda: {k: v for k, v in tree(mpi_tmp_path / "s").items() if "u/c/0/" in k}))

    assert committed == [((i + 1) // 4 * 4, (i + 1) // 4 * 4, i + 1) for i in range(10)]
    assert [bool(found) for found in inodes] == [False] * 3 + [True] * 7
    assert inodes[3:] == [inodes[3]] * 7
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 10))


def test_rows_of_different_lengths_are_whole_at_their_common_multiple(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """With rows of 2 and 3, commit(partial_rows=False) goes to the last multiple of 6, on ranks without a part too."""
    scene = Scene(sizes={"y": 4}, variables={"a": ("y", "float32"), "b": ("y", "float32"), "s": ("", "float64")})
    rows: dict[str, dict[str, Any]] = {"a": {"shard_shape": {"time": 2}}, "b": {"shard_shape": {"time": 3}}}
    with ms.write_open(mpi_tmp_path / "s", scene.schema(rows, shard_shape={"y": 2}), comm=comm, options=OPTIONS) as w:
        found = []
        for i in range(7):
            scene.write(w, i)
            found.append(w.commit(partial_rows=False).n_records)

    assert found == [0, 0, 0, 0, 0, 6, 6]
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", scene, [0] * 7))


@pytest.mark.parametrize("inner", [1, 4])
def test_a_row_that_grows_keeps_its_committed_records_readable(
    comm: MPI.Intracomm, mpi_tmp_path: Path, inner: int
) -> None:
    """After each commit into a row of 8, all records until then are right, also through the metadata of before."""
    import zarr

    root = mpi_tmp_path / "s"
    with _opened(comm, root, row=8, inner=inner) as w:
        PLANE.write_statics(w)
        old: list[Any] = []
        for i in range(8):
            PLANE.write(w, i)
            w.commit()

            def check(n: int = i + 1) -> None:
                assert_holds(root, PLANE, [0] * n)
                if old:
                    assert old[-1][n - 2].tobytes() == PLANE.whole("u", n - 2).tobytes()

            on_root(comm, check)
            if comm.rank == 0:
                old.append(zarr.open_array(root / "u", mode="r"))


@pytest.mark.mpi(min_size=2)
def test_rank_0_makes_the_folders_of_the_next_row(
    comm: MPI.Intracomm, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second row on no rank makes one in place, and a resume that drops rows meets nothing in its way."""
    url, made, mkdir = mpi_tmp_path / "s", [], os.mkdir

    def note(path: Any, *args: Any) -> None:
        made.append(str(path))
        mkdir(path, *args)

    with _opened(comm, url, row=1) as w:
        PLANE.write_statics(w)
        for i in range(4):
            PLANE.write(w, i)
            w.commit()
            if i == 0:
                monkeypatch.setattr(os, "mkdir", note)
    monkeypatch.undo()
    assert [path for path in made if "/.mpistream/stage/" not in path] == []
    assert bool(made) is (comm.rank == 0)
    ms.write_resume(url, comm=comm, at=time_of(1), options=OPTIONS).close()
    on_root(comm, lambda: ms.repair(url, restore_dropped=True))
    with ms.write_resume(url, comm=comm, options=OPTIONS) as w:
        PLANE.write(w, 4)
    on_root(comm, lambda: assert_holds(url, PLANE, [0] * 5))


def test_rollback_drops_what_is_not_committed(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """After rollback the writer is where the last commit left it, in a row filled in part, and goes on from there."""
    with _opened(comm, mpi_tmp_path / "s", row=4, inner=2) as w:
        for i in range(3):
            PLANE.write(w, i)
        w.commit()
        for i in range(3, 6):
            PLANE.write(w, i, run=7)
        PLANE.write_statics(w)
        assert (w.n_records, w.last_t) == (6, time_of(5))
        w.rollback()
        assert (w.n_records, w.last_t, w.n_committed) == (3, time_of(2), 3)
        assert w.is_committed("topo") is False
        PLANE.write_statics(w)
        for i in range(3, 6):
            PLANE.write(w, i, run=1)
        w.commit()
        assert w.is_committed("topo") is True

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0, 0, 0, 1, 1, 1]))
    assert on_root(comm, lambda: keys(mpi_tmp_path / "s")) == PLANE.keys(6, {"time": 4, **SHARD})


def test_rollback_after_flush_drops_what_was_flushed(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """What flush made durable is still not committed: a reader does not see it, and rollback drops it."""
    with _opened(comm, mpi_tmp_path / "s", row=2) as w:
        PLANE.write_statics(w)
        for i in range(3):
            PLANE.write(w, i, run=7)
        token = w.flush()
        assert (token.writer, token.epoch, token.records, token.last_t) == (comm.rank, 1, ((0, 3),), time_of(2))
        assert dict(token.n_cells) == {"u": 3 * w.region.n_cells}
        assert dict(token.statics) == {"topo": w.region.n_cells}
        on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [], statics=()))
        w.rollback()
        PLANE.write_statics(w)
        for i in range(3):
            PLANE.write(w, i)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0, 0, 0]))


def test_flush_before_commit_changes_nothing(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Flushes of some ranks between records, and again and again, do not change what is committed."""
    with _opened(comm, mpi_tmp_path / "s", row=4, inner=4) as w:
        PLANE.write_statics(w)
        for i in range(6):
            PLANE.write(w, i)
            if i % 2 == comm.rank % 2:
                w.flush()
                w.flush()
            if i == 4:
                w.commit()

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 6))


def test_statics_alone_and_records_alone_can_be_committed(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Each static may come with any commit, before, between or after records."""
    scene = FULL
    schema = scene.schema(shard_shape={"time": 2, "z": 2, "y": 4, "x": 6})
    names = scene.region_statics
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, options=OPTIONS) as w:
        seen = []
        for i, name in enumerate(names):
            w.write_static(name, scene.block(name, w.region))
            if i % 2:
                scene.write(w, i // 2)
            receipt = w.commit()
            seen.append((receipt.new_statics, receipt.n_new_records))
            assert w.is_committed(name)
        n = w.n_records

    assert seen == [((name,), i % 2) for i, name in enumerate(names)]
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", scene, [0] * n))


def test_close_commits_what_is_pending_and_may_be_called_again(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """close commits, ends the lease and the stage folder, and does nothing the second time."""
    w = _opened(comm, mpi_tmp_path / "s")
    PLANE.write_statics(w)
    PLANE.write(w, 0)
    w.close()
    before = on_root(comm, lambda: tree(mpi_tmp_path))
    w.close()
    assert on_root(comm, lambda: tree(mpi_tmp_path)) == before
    with w:
        pass
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0]))
    assert not (mpi_tmp_path / "s/.mpistream/stage/1").exists()


def test_close_inside_the_with_body_is_fine(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A body that closes the writer itself ends without a second commit."""
    with _opened(comm, mpi_tmp_path / "s") as w:
        PLANE.write_statics(w)
        PLANE.write(w, 0)
        w.close()

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0]))


def test_calls_after_close_are_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Every call on a closed writer is a ProtocolError that points to write_resume."""
    w = _opened(comm, mpi_tmp_path / "s")
    w.close()
    block = PLANE.block("topo", w.region)
    calls: list[Callable[[], object]] = [
        lambda: w.write_record(0.0, {"u": block}),
        lambda: w.record(0.0).__enter__(),
        lambda: w.write_static("topo", block),
        w.flush,
        w.commit,
        w.rollback,
    ]
    for call in calls:
        error = error_on_all(comm, call)
        assert (type(error), error.kind) == (ms.ProtocolError, "closed")
        assert "write_resume" in str(error)


def test_two_writers_are_open_on_one_communicator(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Two stores may be written alternately by the same ranks, and closed in either order."""
    a, b = (_opened(comm, mpi_tmp_path / name) for name in ("a", "b"))
    for w in (a, b):
        PLANE.write_statics(w)
    for i in range(4):
        PLANE.write(a, i, run=1)
        PLANE.write(b, i, run=2)
        (a if i % 2 else b).commit()
    a.close()
    PLANE.write(b, 4, run=2)
    b.close()

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "a", PLANE, [1] * 4))
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "b", PLANE, [2] * 5))


@pytest.mark.mpi(min_size=2)
def test_ranks_may_come_late(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A rank that comes to each call a moment after the others changes nothing, whichever it is."""
    with _opened(comm, mpi_tmp_path / "s", row=2) as w:
        PLANE.write_statics(w)
        for i in range(2 * comm.size):
            PLANE.write(w, i)
            if i % comm.size == comm.rank:
                time.sleep(0.05)
            w.commit()

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 2 * comm.size))

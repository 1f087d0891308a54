"""Commits that do not wait: what is durable on every rank by now, with ranks as threads over one folder."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.errors import StoreError
from mpistream.local_store import LocalStore
from tests.support.ranks import MemoryTransport, MemoryWorld, run_ranks
from tests.support.stager import DEADLINE
from tests.support.wait import wait_until

N = 3
OPTIONS = ms.Options(durability="none", threads=1, timeout=30, writers="all", max_pending_nbytes=10**6)


class GatedStore(LocalStore):
    """A folder in which threads stage nothing while ``gate`` is cleared, but for what they are let through."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.n_through = 0
        self.error: StoreError | None = None
        self.small_error: StoreError | None = None
        """What the next object that the caller's own thread stages meets."""

    def stage(self, key: str, pieces: Any, *, sync: bool) -> int:
        if threading.current_thread().name == "mpistream-stage":
            if self.n_through:
                self.n_through -= 1
            else:
                self.gate.wait(60)
            if self.error is not None:
                raise self.error
        elif self.small_error is not None:
            error, self.small_error = self.small_error, None
            raise error
        return super().stage(key, pieces, sync=sync)


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistream.session.connect", lambda comm, timeout: MemoryTransport(*comm))


def schema(rows: int = 1, n_total: int | None = None, **more: Any) -> ms.StreamSchema:
    time: Any = ms.AppendTime(units="s")
    if n_total is not None:
        time = ms.IndexedTime(times=[float(i) for i in range(n_total)], units="s")
    return ms.StreamSchema(
        dims={"time": None, "x": 2 * N},
        time=time,
        variables={
            "u": ms.Variable(("time", "x"), "i4", shard_shape={"time": rows, "x": 2}, chunk_shape={"time": 1, "x": 2}),
            "energy": ms.Variable(("time",), "f8"),
        },
        statics={"depth": ms.Variable(("x",), "f4", shard_shape={"x": 2}, chunk_shape={"x": 2})},
        **more,
    )


Run = Callable[[ms.StreamWriter, GatedStore, int], Any]


def on_ranks(root: Path, fn: Run, found: ms.StreamSchema | None = None) -> list[Any]:
    """Run ``fn`` on a writer of every rank; return what it returned."""
    world = MemoryWorld(N, 60)

    def run(transport: MemoryTransport) -> Any:
        store = GatedStore(root)
        comm = (world, transport.rank)
        given = found or schema()
        with ms.write_open(store, given, comm=comm, options=OPTIONS) as writer:  # type: ignore[arg-type]
            return fn(writer, store, transport.rank)

    return run_ranks(N, run, timeout=100)


def put(writer: ms.StreamWriter, *records: int) -> None:
    for i in records:
        block = np.arange(2 * N, dtype="i4")[slice(*writer.region["x"])] + 100 * i
        if writer.schema.n_total is None:
            writer.write_record(float(i), {"u": block, "energy": float(i)})
        else:
            writer.write_record_at(i, float(i), {"u": block, "energy": float(i)})


def staged(writer: ms.StreamWriter, n: int) -> None:
    """Wait until so many shards of this rank are durable."""
    found = writer._writer._objects
    wait_until(
        lambda: sum(o.is_staged for o in found.values() if o.name == "u") == n, DEADLINE, f"{n} objects", every=0.001
    )


def committed(root: Path) -> tuple[Any, list[str]]:
    """Return the committed records, whose values are checked, and statics."""
    reader = ms.open_reader(root)
    for record in (r for a, b in reader.manifest.committed for r in range(a, b)):
        values = reader.read_record("u", record)
        assert values.tolist() == (np.arange(2 * N) + 100 * record).tolist()
        assert reader.read_record("energy", record) == float(record)
    return reader.manifest.committed, list(reader.manifest.statics)


def test_longest_prefix_that_every_rank_has(tmp_path: Path) -> None:
    """One rank's disk is slow: what it has not staged waits on all, and goes with the next call."""

    def run(writer: ms.StreamWriter, store: GatedStore, rank: int) -> Any:
        if rank == 1:
            store.gate.clear()
            store.n_through = 2
        put(writer, 0, 1, 2, 3)
        staged(writer, 2 if rank == 1 else 4)
        first = writer.commit(wait=False)
        seen = committed(tmp_path)
        again = writer.commit(wait=False)
        store.gate.set()
        put(writer, 4)
        staged(writer, 3)
        last = writer.commit(wait=False)
        return first, seen, again, last, writer.n_records

    found = on_ranks(tmp_path, run)
    assert found == [found[0]] * N
    first, seen, again, last, n = found[0]
    assert (first.n_records, first.last_t, first.n_new_records, seen) == (2, 1.0, 2, (((0, 2),), []))
    assert again == first
    assert (last.n_records, last.commit_seq, n) == (5, first.commit_seq + 1, 5)
    assert committed(tmp_path)[0] == ((0, 5),)


def test_nothing_that_every_rank_has(tmp_path: Path) -> None:
    """The receipt is the last one, no file is touched, and the end of the body waits for all."""

    def run(writer: ms.StreamWriter, store: GatedStore, rank: int) -> Any:
        store.gate.clear()
        put(writer, 0, 1)
        before = writer.commit(wait=False)
        store.gate.set()
        return before.n_records, before.commit_seq

    assert len(set(on_ranks(tmp_path, run))) == 1
    assert committed(tmp_path)[0] == ((0, 2),)


def test_row_that_is_not_full_stays_pending(tmp_path: Path) -> None:
    """It has no object yet, whatever partial_rows says; a commit that waits takes it."""

    def run(writer: ms.StreamWriter, store: GatedStore, rank: int) -> Any:
        put(writer, *range(6))
        staged(writer, 1)
        first = writer.commit(wait=False)
        second = writer.commit(wait=False, partial_rows=False)
        put(writer, 6)
        third = writer.commit()
        put(writer, 7, 8)
        staged(writer, 1)
        return [r.n_records for r in (first, second, third, writer.commit(wait=False))]

    assert on_ranks(tmp_path, run, schema(rows=4)) == [[4, 4, 7, 8]] * N
    assert committed(tmp_path)[0] == ((0, 9),)


def test_records_in_any_order_are_the_common_ones(tmp_path: Path) -> None:
    """With fixed times nothing need be without gaps."""

    def run(writer: ms.StreamWriter, store: GatedStore, rank: int) -> Any:
        store.gate.clear()
        store.n_through = 3
        order = ([5, 2, 7, 0], [2, 7, 5, 0], [7, 2, 0, 5])[rank]
        put(writer, *order)
        staged(writer, 3)
        receipt = writer.commit(wait=False)
        store.gate.set()
        return receipt.n_records, writer.n_records

    assert on_ranks(tmp_path, run, schema(n_total=9)) == [(2, 4)] * N
    assert committed(tmp_path)[0] == ((0, 1), (2, 3), (5, 6), (7, 8))


def test_statics_and_blobs_go_when_they_are_due(tmp_path: Path) -> None:
    """A static once every rank has its part, a blob of a record with that record, a static blob at once."""

    def run(writer: ms.StreamWriter, store: GatedStore, rank: int) -> Any:
        part = np.full(2, rank, "f4")
        if rank:
            writer.write_static("depth", part)
            writer._writer._stager.wait()
        writer.write_blob("seed", bytes([rank]))
        first = writer.commit(wait=False)
        if not rank:
            writer.write_static("depth", part)
            writer._writer._stager.wait()
        store.gate.clear()
        put(writer, 0)
        writer.write_blob("rng", b"rng", 0)
        second = writer.commit(wait=False)
        store.gate.set()
        staged(writer, 1)
        third = writer.commit(wait=False)
        return [(r.n_records, r.new_statics, r.n_packs) for r in (first, second, third)]

    assert on_ranks(tmp_path, run) == [[(0, (), N), (0, ("depth",), 0), (1, (), N)]] * N
    reader = ms.open_reader(tmp_path)
    assert reader.read_static("depth").tolist() == [0, 0, 1, 1, 2, 2]
    assert [reader.read_blob("seed", writer=r) for r in range(N)] == [bytes([r]) for r in range(N)]
    assert reader.read_blob("rng", 0, 2) == b"rng"


def test_failure_of_what_only_a_commit_makes_is_raised_once(tmp_path: Path) -> None:
    """By that commit, on every rank; the next ones try again and say nothing of it."""

    def run(writer: ms.StreamWriter, store: GatedStore, rank: int) -> Any:
        put(writer, 0)
        writer.write_blob("rng", b"rng", 0)
        staged(writer, 1)
        if rank == 2:
            store.small_error = StoreError("no space left", kind="io", errno=errno.ENOSPC)
        with pytest.raises(ms.CommitError) as caught:
            writer.commit(wait=False)
        seen = committed(tmp_path)[0]
        n = sum(1 for _ in iter(lambda: writer.commit(wait=False).n_records, 1))
        return caught.value.rank, caught.value.errno, seen, n < 10_000

    assert on_ranks(tmp_path, run) == [(2, errno.ENOSPC, (), True)] * N
    assert ms.open_reader(tmp_path).read_blob("rng", 0, 2) == b"rng"


def test_failure_in_the_background_is_raised_on_every_rank(tmp_path: Path) -> None:
    """With nothing committed; it is tried again behind the caller's back, and a later call commits."""

    def run(writer: ms.StreamWriter, store: GatedStore, rank: int) -> Any:
        put(writer, 0)
        staged(writer, 1)
        if rank == 2:
            store.error = StoreError("no space left", kind="io", errno=errno.ENOSPC)
        put(writer, 1)
        if rank == 2:
            (late,) = [o for o in writer._writer._objects.values() if not o.is_staged]
            wait_until(lambda: late.error is not None, DEADLINE, "the failure", every=0.001)
            store.error = None
        with pytest.raises(ms.CommitError) as caught:
            writer.commit(wait=False)
        seen = committed(tmp_path)[0]
        staged(writer, 2)
        return caught.value.rank, caught.value.errno, seen, writer.commit(wait=False).n_records

    assert on_ranks(tmp_path, run) == [(2, errno.ENOSPC, (), 2)] * N


def test_times_that_differ_commit_nothing(tmp_path: Path) -> None:
    """They are seen only when everything is in place; a rollback and other records mend it."""

    def run(writer: ms.StreamWriter, store: GatedStore, rank: int) -> Any:
        put(writer, 0)
        staged(writer, 1)
        writer.commit(wait=False)
        block = np.zeros(2, "i4")
        writer.write_record(1.0 if rank < 2 else 1.5, {"u": block, "energy": 7.0})
        staged(writer, 1)
        text = r"rank 2: its times are not those of the commit: its last t = 1.5, the one of the commit is 1.0;"
        with pytest.raises(ms.CommitError, match=text) as caught:
            writer.commit(wait=False)
        seen = committed(tmp_path)[0]
        writer.rollback()
        put(writer, 1)
        staged(writer, 1)
        return caught.value.kind, seen, writer.commit(wait=False).n_records

    assert on_ranks(tmp_path, run) == [("times", ((0, 1),), 2)] * N
    assert committed(tmp_path)[0] == ((0, 2),)


def test_ranks_that_differ_in_whether_they_wait(tmp_path: Path) -> None:
    """It is a mismatch, on every rank."""

    def run(writer: ms.StreamWriter, store: GatedStore, rank: int) -> Any:
        put(writer, 0)
        with pytest.raises(ms.ProtocolError) as caught:
            writer.commit(wait=rank != 1)
        return caught.value.kind

    assert on_ranks(tmp_path, run) == ["mismatch"] * N


def test_several_streams_each_by_itself(tmp_path: Path) -> None:
    """commit_all without a wait takes of each stream what is ready, in one agreement."""
    worlds = [MemoryWorld(N, 60) for _ in range(2)]

    def run(transport: MemoryTransport) -> Any:
        stores = [GatedStore(tmp_path / str(i)) for i in range(2)]
        writers = [
            ms.write_open(store, schema(), comm=(world, transport.rank), options=OPTIONS)  # type: ignore[arg-type]
            for store, world in zip(stores, worlds, strict=True)
        ]
        stores[0].gate.clear()
        for w in writers:
            put(w, 0)
        # Each stream has a thread of its own here: its communicator is its own.
        staged(writers[1], 1)
        found = [r.n_records for r in ms.commit_all(writers, wait=False)]
        stores[0].gate.set()
        for w in writers:
            w.close()
        return found

    assert run_ranks(N, run, timeout=100) == [[0, 1]] * N
    assert [committed(tmp_path / str(i))[0] for i in range(2)] == [((0, 1),)] * 2


def test_synchronous_writer_has_everything_ready(tmp_path: Path) -> None:
    """Without threads a record is durable when the call returns."""
    comm: Any = (MemoryWorld(1, 60), 0)
    with ms.write_open(tmp_path, schema(rows=2), comm=comm, options=ms.Options(threads=0)) as writer:
        put(writer, 0, 1, 2)
        assert writer.commit(wait=False).n_records == 2
    assert committed(tmp_path)[0] == ((0, 3),)

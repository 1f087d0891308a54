"""Calls that end anywhere, by Ctrl-C or without memory: what was put in part is never committed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream import committing, rank_writer
from mpistream.agreement import Channel
from mpistream.errors import CommitError, MPIStreamError, ProtocolError, SchemaError
from mpistream.layout import resolve_layout
from mpistream.pipeline import Pool
from mpistream.staged import StagedObject
from mpistream.staging import Stager
from mpistream.zarr3.shard import OpenShard
from tests.support.ranks import run_ranks
from tests.support.stager import EPOCH, FOLDER, item, new_store, stagers
from tests.support.writers import Crew, read_array

SIZES = (8, 6)


def schema(rows: int = 1, inner: int = 1) -> ms.StreamSchema:
    shapes: dict[str, Any] = {
        "shard_shape": {"time": rows, "y": 4, "x": 6},
        "chunk_shape": {"time": inner, "y": 2, "x": 6},
    }
    variable = ms.Variable(("time", "y", "x"), "f8", **shapes)
    dims = {"time": None, "y": 8, "x": 6}
    return resolve_layout(ms.StreamSchema(dims=dims, time=ms.AppendTime(units="s"), variables={"a": variable}), 1)


def record(i: int) -> dict[str, Any]:
    return {"a": np.random.default_rng(i).standard_normal(SIZES)}


def check(crew: Crew, *expected: int) -> None:
    """The store holds these records."""
    assert crew.manifest.n_records == len(expected)
    whole = np.stack([record(i)["a"] for i in expected])
    assert read_array(crew.store, crew.schema, "a", len(expected)).tobytes() == whole.tobytes()


@pytest.mark.parametrize("rows", [1, 4])
def test_a_rollback_that_was_interrupted_leaves_nothing_to_commit(monkeypatch, rows) -> None:
    """What was on its way is dropped by then: objects made now would lack it (I5)."""
    monkeypatch.setattr(rank_writer, "_MIN_BACKGROUND_NBYTES", 1)
    crew = Crew(schema(rows), threads=1, max_pending_nbytes=10**6)
    (writer,) = crew.writers
    crew.store.gate.clear()
    for i in range(6):
        crew.write(float(i), record(i))
    drop = Pool.drop

    def interrupted(self: Pool, member: Any) -> None:
        with self._changed.lock:
            self._drop(member)
        raise KeyboardInterrupt

    monkeypatch.setattr(Pool, "drop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.rollback()
    monkeypatch.setattr(Pool, "drop", drop)
    crew.store.gate.set()
    for partial_rows in (True, False):
        with pytest.raises(ProtocolError, match="rollback"):
            writer.stage(partial_rows=partial_rows)
    with pytest.raises(ProtocolError, match="rollback"):
        writer.ready()
    writer.rollback()
    crew.write(0.0, record(7))
    crew.commit()
    check(crew, 7)
    writer.close()


def test_an_object_whose_records_were_dropped_is_not_made() -> None:
    """At the end of the interpreter threads give up what is queued: what is left is not taken for all."""
    store, pool = new_store(), Pool()
    other = Stager(store, FOLDER, EPOCH, threads=1, max_pending_nbytes=10**6, pool=pool)
    stager = Stager(store, FOLDER, EPOCH, threads=1, max_pending_nbytes=10**6, pool=pool)
    pool.leave(stager._member)
    shard = SimpleNamespace(finish=lambda _: [b"nothing was put"])
    found = StagedObject(name="t", key="t/c/0", records=frozenset([0]), n_cells=1, must_sync=False, shard=shard)
    stager.submit(found)
    stager.wait()
    with pytest.raises(ProtocolError) as caught:
        stager.retry([found])
    assert (caught.value.kind, found.is_staged) == ("dropped", False)
    assert found.line is not None
    with pytest.raises(ProtocolError) as caught:
        stager.encode_in(found.line, lambda _: None, None)
    assert caught.value.kind == "dropped"
    other.close()


def test_an_interrupted_record_is_pending_or_broken() -> None:
    """A record that is in its rows and not pending would be put into them twice: the slab of the others was lost."""
    crew = Crew(schema(4, 2))
    (writer,) = crew.writers
    crew.write(0.0, record(0))

    class Interrupted(dict[int, float]):
        def __setitem__(self, key: int, value: float) -> None:
            raise KeyboardInterrupt

    pending, writer._pending = writer._pending, Interrupted(writer._pending)
    with pytest.raises(KeyboardInterrupt):
        crew.write(1.0, record(1))
    writer._pending = pending
    with pytest.raises(ProtocolError, match="rollback"):
        crew.write(1.0, record(1))
    writer.rollback()
    for i in range(2):
        crew.write(float(i), record(i))
    crew.commit()
    check(crew, 0, 1)


def test_jobs_are_counted_anew_when_they_are_dropped() -> None:
    """Ctrl-C in the middle of `Pool.add`: a rollback waited for ever for jobs that nobody has."""
    store = new_store()
    with stagers(store) as make:
        stager = make(1)
        assert stager._pool is not None
        for wrong in (1, -1):
            stager._pool._count(stager._member, wrong)
            stager.drop([])
            assert (stager._member.n_pending, stager._pool._is_busy()) == (0, False)


@pytest.mark.parametrize("failing", [1, 2])
def test_an_object_of_an_open_row_that_could_not_be_made_is_made_by_the_next_commit(monkeypatch, failing) -> None:
    """Without memory for the first or the second shard of two: the commit fails, the next one has all."""
    crew = Crew(schema(4))
    (writer,) = crew.writers
    crew.write(0.0, record(0))
    crew.commit()
    crew.write(1.0, record(1))
    finish, n = OpenShard.finish, 0

    def once(self: OpenShard, scratch: Any = None) -> Any:
        nonlocal n
        n += 1
        if n == failing:
            raise MemoryError
        return finish(self, scratch)

    monkeypatch.setattr(OpenShard, "finish", once)
    with pytest.raises(MemoryError):
        writer.stage(partial_rows=True)
    crew.commit()
    check(crew, 0, 1)


def test_a_commit_that_was_interrupted_after_the_rename_ends_the_writer(monkeypatch, tmp_path) -> None:
    """The records are committed and the writer does not know: it must not say that nothing was."""
    w = ms.write_open(tmp_path / "run.zarr", schema(), options=ms.Options(threads=0))
    w.write_record(0.0, record(0))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(committing, "next_manifest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        w.commit()
    monkeypatch.undo()
    assert ms.open_reader(tmp_path / "run.zarr").n_records == 1
    with pytest.raises(CommitError) as caught:
        w.rollback()
    assert caught.value.kind == "outcome_unknown"
    with pytest.raises(CommitError):
        w.close()


def test_threads_end_though_one_was_begun_and_not_noted(monkeypatch) -> None:
    """Ctrl-C while a thread is begun: `close` waited for ever for those who were not told."""
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    store = new_store()
    with stagers(store) as make:
        stager = make(1)
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stager.submit(item("t/c/0", must_sync=True))
        monkeypatch.setattr(threading.Thread, "start", start)
        stager.drop([])
        for i in range(3):
            stager.submit(item(f"t/c/{i}", must_sync=True))
        stager.wait()
        stager.close()


def test_a_record_that_has_ended_gives_no_memory(monkeypatch, tmp_path) -> None:
    """What was lent to it is lent to another one, and read by threads."""
    monkeypatch.setattr(rank_writer, "_MIN_BACKGROUND_NBYTES", 1)
    shapes: dict[str, Any] = {"shard_shape": {"time": 1, "y": 8, "x": 6}, "chunk_shape": {"y": 8, "x": 6}}
    variables = {name: ms.Variable(("time", "y", "x"), "f8", **shapes) for name in "ab"}
    dims = {"time": None, "y": 8, "x": 6}
    two = ms.StreamSchema(dims=dims, time=ms.AppendTime(units="s"), variables=variables)
    with ms.write_open(tmp_path / "run.zarr", two, options=ms.Options(threads=1)) as w:
        with pytest.raises(ZeroDivisionError), w.record(0.0) as put:  # noqa: PT012
            put.put("a", record(0)["a"])
            raise ZeroDivisionError
        with pytest.raises(ProtocolError) as caught:
            put.put("b", record(0)["a"])
        assert caught.value.kind == "ended"


def test_an_object_that_is_staged_meanwhile_is_not_tried_again(monkeypatch) -> None:
    """Between the two questions of `kick` a thread may end its job: the object has no bytes then."""
    store = new_store()
    with stagers(store) as make:
        stager = make(1)
        store.gate.clear()
        found = item("t/c/0", b"new")
        stager.submit(found)
        is_staged = StagedObject.is_staged

        def late(self: StagedObject) -> bool:
            was = bool(is_staged.fget(self))  # type: ignore[attr-defined]
            store.gate.set()
            stager.wait()
            return was

        monkeypatch.setattr(StagedObject, "is_staged", property(late))
        stager.kick([found])
        monkeypatch.setattr(StagedObject, "is_staged", is_staged)
        store.gate.set()
        stager.wait()
        assert (found.error, store.keys("stage")) == (None, [(found.staged_key, False)])


def test_a_vote_that_comes_after_its_agreement_failed_does_not_end_a_reduction() -> None:
    """Rank 1 refuses and rank 2 comes late: its vote must not be taken for one against what follows."""
    failed, late = threading.Event(), threading.Event()

    def rank(transport: Any) -> Any:
        channel = Channel(transport, 10)
        if channel.rank == 2:
            assert failed.wait(10)
        failure = SchemaError("no", kind="shape") if channel.rank == 1 else None
        with pytest.raises(MPIStreamError):
            channel.exchange("open", digest="x", failure=failure)
        failed.set()
        if channel.rank == 2:
            late.set()
        if channel.rank == 1:
            assert late.wait(10)
            threading.Event().wait(0.2)
        return channel.highest("should_stop", [channel.rank])

    assert run_ranks(3, rank, timeout=30) == [[2]] * 3

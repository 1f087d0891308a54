"""A writer whose disk or memory fails, one that rolls back, and one that goes on from a store."""

from __future__ import annotations

import errno
import threading
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.errors import FencedError, FormatError, ProtocolError, StoreError
from mpistream.layout import resolve_layout
from mpistream.manifest import epoch_key, stage_folder
from mpistream.rows import ShardRows
from mpistream.token import times_sha256
from tests.support.writers import Crew, read_array

SIZES = (8, 6)


def schema(rows: int = 1) -> ms.StreamSchema:
    shapes: dict[str, Any] = {"shard_shape": {"time": rows, "y": 4, "x": 6}, "chunk_shape": {"y": 2, "x": 6}}
    return resolve_layout(
        ms.StreamSchema(
            dims={"time": None, "y": 8, "x": 6},
            time=ms.AppendTime(units="s"),
            variables={
                "a": ms.Variable(("time", "y", "x"), "f4", **shapes),
                "b": ms.Variable(("time", "y", "x"), "f8", **shapes),
                "energy": ms.Variable(("time",), "f8"),
            },
            statics={"depth": ms.Variable(("y", "x"), "f4", shard_shape=(4, 6)), "scalar": ms.Variable((), "i4")},
        ),
        1,
    )


def record(i: int) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    return {"a": rng.standard_normal(SIZES).astype("f4"), "b": rng.standard_normal(SIZES), "energy": float(i)}


def check(crew: Crew, *expected: int) -> None:
    """The store holds these records."""
    assert crew.manifest.n_records == len(expected)
    for name in ("a", "b"):
        whole = np.stack([record(i)[name] for i in expected])
        assert read_array(crew.store, crew.schema, name, len(expected)).tobytes() == whole.tobytes()


def no_space() -> StoreError:
    return StoreError("no space left", kind="io", errno=errno.ENOSPC)


# ---- the token ---------------------------------------------------------------------------------------


def test_a_token_counts_what_is_in_place() -> None:
    """Cells of the records since the last commit, from the objects; a grown row counts only its new records."""
    crew = Crew(schema(4), 2)
    crew.write(0.0, record(0))
    crew.commit()
    crew.write(1.0, record(1))
    crew.write(2.0, record(2))
    crew.write_static("depth", record(0)["a"])
    crew.write_static("scalar", 7)
    tokens = []
    for writer in crew.writers:
        records = writer.stage(partial_rows=True)
        writer.place(records)
        tokens.append(writer.token(records))
    first, second = tokens
    assert (first.records, first.last_t, first.times_sha256) == (((1, 3),), 2.0, times_sha256([1.0, 2.0]))
    assert (first.times, first.n_blobs) == (None, 0)
    assert first.n_cells == {"a": 2 * 24, "b": 2 * 24, "energy": 2}
    assert second.n_cells == {"a": 2 * 24, "b": 2 * 24, "energy": 0}
    assert first.statics == {"depth": 24, "scalar": 1}
    assert second.statics == {"depth": 24, "scalar": 0}
    assert [t.n_objects for t in tokens] == [2 + 1 + 1 + 1, 2 + 1]
    assert (first.epoch, first.base_seq, first.writer, second.writer) == (1, 1, 0, 1)
    assert (first.store_id, first.run_id, first.fingerprint) == ("store", "run", crew.schema.fingerprint())
    assert [dict(t.region.of("a")) for t in tokens] == [{"y": (0, 4), "x": (0, 6)}, {"y": (4, 8), "x": (0, 6)}]
    placed = {k: len(v) for k, v in crew.store._objects.items() if k.startswith(("b/c/0/1", "a/c/0/1", "depth/c/1"))}
    assert second.nbytes == sum(placed.values())


def test_a_token_may_carry_a_failure() -> None:
    """With this rank's number, for the others to see."""
    crew = Crew(schema(), 2)
    token = crew.writers[1].token((), no_space())
    assert token.failure is not None
    assert {k: token.failure[k] for k in ("class", "message", "kind", "rank", "errno")} == {
        "class": "StoreError",
        "message": "no space left",
        "kind": "io",
        "rank": 1,
        "errno": errno.ENOSPC,
    }
    assert crew.writers[0].token(()).failure is None
    assert crew.writers[0].token(()).last_t is None


def test_without_durability_only_replaced_records_are_synced() -> None:
    """What is staged for the first time need not be; a row with committed records, a series and a scalar are."""
    crew = Crew(schema(2), durability="none")
    crew.write(0.0, record(0))
    crew.commit()
    assert [sync for _, sync in crew.store.keys("stage")] == [False] * 4 + [True]
    assert crew.store.keys("sync_folders") == []
    crew.write(1.0, record(1))
    crew.commit()
    assert [sync for _, sync in crew.store.keys("stage")[5:]] == [True] * 5
    durable = Crew(schema(2))
    durable.write(0.0, record(0))
    durable.commit()
    assert [sync for _, sync in durable.store.keys("stage")] == [True] * 5
    check(crew, 0, 1)


# ---- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("n", range(5))
def test_a_disk_that_fails_once_costs_nothing(n, threads) -> None:
    """Whichever object it is: staging raises, changes no key, and works the second time."""
    crew = Crew(schema(2), threads=threads)
    (writer,) = crew.writers
    crew.store.fail("stage", *[None] * n, no_space(), *[None] * (4 - n), no_space())
    crew.write(0.0, record(0))
    with pytest.raises(StoreError, match="no space left"):
        writer.stage(partial_rows=True)
    assert crew.store.list() == [".mpistream"]
    crew.commit()
    crew.close()
    check(crew, 0)


def test_a_rename_that_fails_is_done_by_the_next_try() -> None:
    """What was placed before it stays, and the commit is whole."""
    crew = Crew(schema())
    (writer,) = crew.writers
    crew.write(0.0, record(0))
    records = writer.stage(partial_rows=True)
    crew.store.fail("place", None, no_space())
    with pytest.raises(StoreError, match="no space left"):
        writer.place(records)
    crew.commit()
    check(crew, 0)


def test_tries_without_commit_do_not_fill_the_disk() -> None:
    """At most one staged object a key: a row that has grown replaces what was staged of it."""
    crew = Crew(schema(8))
    (writer,) = crew.writers
    for i in range(6):
        crew.write(float(i), record(i))
        writer.stage(partial_rows=True)
        assert len(crew.store.list(stage_folder(1, 0))) == 2 + 2 + 1
    crew.commit()
    check(crew, *range(6))


def test_a_record_that_was_taken_in_part_stops_the_writer_until_it_rolls_back(monkeypatch) -> None:
    """One variable has it, another not: every call says so, and a rollback mends it."""
    crew = Crew(schema(4))
    (writer,) = crew.writers
    crew.write(0.0, record(0))
    crew.commit()
    put = ShardRows.put

    def fail(rows: ShardRows, *arguments: Any) -> Any:
        if rows.array.name == "b":
            raise MemoryError("no memory")
        return put(rows, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ShardRows, "put", fail)
        with pytest.raises(MemoryError):
            crew.write(1.0, record(1))
    assert writer.n_records == 1
    assert writer.has_pending(())
    with pytest.raises(ProtocolError, match=r"an earlier record was taken in part \(no memory\); call rollback"):
        crew.write(2.0, record(2))
    with pytest.raises(ProtocolError, match=r"in part \(MemoryError: no memory\); call rollback") as caught:
        writer.stage(partial_rows=True)
    assert caught.value.kind == "broken"
    writer.rollback()
    crew.write(3.0, record(3))
    crew.commit()
    check(crew, 0, 3)


def test_records_that_are_in_place_early_are_counted_by_their_own_commit() -> None:
    """A part of a row was staged and not committed; a commit of less places it with the records before."""
    crew = Crew(schema(4))
    crew.write(0.0, record(0))
    crew.commit()
    for i in (1, 2):
        crew.write(float(i), record(i))
    for writer in crew.writers:
        writer.stage(partial_rows=True)
    crew.write_static("scalar", 1)
    assert crew.commit(partial_rows=False).n_records == 1
    assert crew.commit().n_records == 3
    check(crew, 0, 1, 2)


def test_a_writer_that_is_fenced_stages_nothing() -> None:
    """Its records are lost, and it is told why."""
    crew = Crew(schema())
    (writer,) = crew.writers
    crew.write(0.0, record(0))
    crew.commit()
    crew.store.create(epoch_key(2), b"")
    crew.store.delete_tree(stage_folder(1))
    crew.write(1.0, record(1))
    with pytest.raises(FencedError, match="epoch 2 took the store over from epoch 1"):
        writer.stage(partial_rows=True)
    check(crew, 0)


# ---- rollback ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("staged", [False, True])
def test_a_rollback_is_as_if_nothing_had_been_written(rows, staged) -> None:
    """Records and statics since the last commit are gone, from memory and from the stage folder."""
    crew = Crew(schema(rows), 2)
    crew.write(0.0, record(0))
    crew.write(1.0, record(1))
    crew.commit()
    crew.write(2.0, record(2))
    crew.write_static("depth", record(2)["a"])
    for writer in crew.writers:
        if staged:
            writer.stage(partial_rows=True)
        writer.rollback()
        assert (writer.n_records, writer.last_t, writer.has_pending(())) == (2, 1.0, False)
        assert crew.store.list(stage_folder(1, writer.writer)) == []
    crew.write(1.5, record(3))
    crew.write_static("depth", record(3)["a"])
    crew.commit()
    check(crew, 0, 1, 3)
    assert crew.manifest.last_t == 1.5
    assert read_array(crew.store, crew.schema, "depth").tobytes() == record(3)["a"].tobytes()


def test_a_rollback_that_can_not_read_the_row_back_says_so() -> None:
    """Somebody removed a committed shard."""
    crew = Crew(schema(4))
    crew.write(0.0, record(0))
    crew.commit()
    crew.store.delete("b/c/0/1/0")
    (writer,) = crew.writers
    with pytest.raises(FormatError, match="b/c/0/1/0: the shard of committed records is missing"):
        writer.rollback()
    with pytest.raises(ProtocolError, match="a rollback that failed"):
        writer.write_record(1.0, record(1))
    with pytest.raises(ProtocolError, match="a rollback that failed"):
        writer.stage(partial_rows=True)


# ---- going on from a store ---------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("n_writers", [1, 2])
@pytest.mark.parametrize("n_committed", [1, 3, 4, 5])
def test_a_writer_goes_on_from_what_is_committed(rows, n_writers, n_committed) -> None:
    """On another number of ranks, in the middle of a row too; the series with it."""
    crew = Crew(schema(rows), 2)
    for i in range(n_committed):
        crew.write(float(i), record(i))
    crew.commit()
    again = Crew(crew.schema, n_writers, store=crew.store, manifest=crew.manifest)
    assert [(w.n_records, w.last_t) for w in again.writers] == [(n_committed, n_committed - 1.0)] * n_writers
    for i in range(n_committed, 8):
        again.write(float(i), record(i))
    again.commit()
    check(again, *range(8))
    spec = again.schema.arrays["energy"].shard_spec()
    data = again.store.read("energy/c/0")
    assert data is not None
    assert spec.codec.decode(data, (1024,))[:9].tolist()[:8] == [float(i) for i in range(8)]


def test_a_writer_that_can_not_begin_leaves_no_thread() -> None:
    """A shard of the open row is missing: the opening fails, and nothing of it stays."""
    crew = Crew(schema(4))
    crew.write(0.0, record(0))
    crew.commit()
    crew.store.delete("a/c/0/0/0")
    before = {t.ident for t in threading.enumerate()}
    with pytest.raises(FormatError, match="a/c/0/0/0: the shard of committed records is missing"):
        Crew(crew.schema, store=crew.store, manifest=crew.manifest, threads=1)
    assert {t.ident for t in threading.enumerate()} <= before

"""Blobs of one writer without communication: what is taken, what is in its pack, and what is left of a failure."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream import rank_writer
from mpistream.blobs import Scope, read_pack_index, read_payload
from mpistream.errors import SchemaError, StoreError
from mpistream.layout import resolve_layout
from mpistream.manifest import blob_key, parse_blob
from tests.support.writers import Crew, read_array

VALUES = np.arange(6, dtype="f4")


def schema(time: Any = None) -> ms.StreamSchema:
    return resolve_layout(
        ms.StreamSchema(
            dims={"time": None, "x": 6},
            time=time or ms.AppendTime(units="s"),
            variables={"t": ms.Variable(("time", "x"), "f4", shard_shape={"time": 4, "x": 3})},
            statics={"depth": ms.Variable(("x",), "f4", shard_shape=(3,)), "scalar": ms.Variable((), "f4")},
        ),
        1,
    )


def write(crew: Crew, *numbers: int) -> None:
    for n in numbers:
        crew.write(float(n), {"t": VALUES + n})


def blobs_of(crew: Crew, commit_seq: int, writer: int = 0) -> dict[tuple[Scope, str], bytes] | None:
    """What is in a pack in the store, None where there is none."""
    key = blob_key(1, commit_seq, writer)
    data = crew.store.read(key)
    if data is None:
        return None

    def read(offset: int, nbytes: int) -> bytes:
        assert data is not None
        return data[offset : offset + nbytes]

    return {(e.scope, e.key): read_payload(key, e, read) for e in read_pack_index(key, len(data), read)}


def committed_blobs(crew: Crew) -> dict[tuple[Scope, str], bytes]:
    """What is in all packs whose names say that they are committed."""
    found: dict[tuple[Scope, str], bytes] = {}
    for name in crew.store.list(".mpistream/blobs"):
        pack = parse_blob(name)
        assert pack is not None
        if crew.manifest.names_pack(*pack[:2]):
            blobs = blobs_of(crew, *pack[1:])
            assert blobs is not None
            assert not found.keys() & blobs.keys(), "a blob is in two packs"
            found |= blobs
    return found


def refused(call: Any, *parts: str) -> None:
    with pytest.raises(SchemaError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.kind == "blob"


# ---- in and out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1])
def test_the_blobs_of_a_commit_are_one_pack_a_writer(threads) -> None:
    """With its records or alone; the next commit has the next number, and one without blobs has no pack."""
    crew = Crew(schema(), 2, threads=threads)
    first, second = crew.writers
    write(crew, 0)
    first.write_blob("rng", b"abc", 0)
    first.write_blob("rng", bytearray(b"def"), "static")
    second.write_blob("rng", np.arange(3, dtype="u1"), np.int64(0))
    records = first.stage(partial_rows=True)
    assert (first.token(records).n_blobs, first.token(()).n_blobs) == (2, 2)
    crew.commit()
    assert blobs_of(crew, 1) == {(0, "rng"): b"abc", ("static", "rng"): b"def"}
    assert blobs_of(crew, 1, 1) == {(0, "rng"): b"\0\1\2"}
    second.write_blob("late", b"", 0)
    assert [w.has_pending(()) for w in crew.writers] == [False, True]
    assert second.token(()).n_blobs == 0
    crew.commit()
    assert (blobs_of(crew, 2), blobs_of(crew, 2, 1)) == (None, {(0, "late"): b""})
    assert not second.has_pending(())
    crew.close()


def test_the_callers_bytes_are_free_after_the_call() -> None:
    """Overwritten, they leave no trace."""
    crew = Crew(schema())
    payload = bytearray(b"abc")
    crew.writers[0].write_blob("a", payload, "static")
    payload[:] = b"xyz"
    crew.commit()
    assert blobs_of(crew, 1) == {("static", "a"): b"abc"}


def test_the_scope_of_a_growing_time_dim_is_a_record_that_was_written() -> None:
    """Committed or not."""
    crew = Crew(schema())
    (writer,) = crew.writers
    refused(lambda: writer.write_blob("a", b"", 0), "blob 'a': scope 0; give 'static' or the index of a record")
    write(crew, 0)
    crew.commit()
    write(crew, 1)
    for number in (0, 1):
        writer.write_blob("a", b"", number)
    wrong: list[Any] = [2, -1, 1.0, True, None, "record"]
    for scope in wrong:
        refused(lambda scope=scope: writer.write_blob("b", b"", scope), f"scope {scope!r}; give 'static'", "0 to 1")


def test_the_scope_of_a_fixed_time_dim_is_any_record() -> None:
    """Written or not."""
    (writer,) = Crew(schema(ms.IndexedTime(range(3), units="s"))).writers
    for scope in range(3):
        writer.write_blob("a", b"", scope)
    refused(lambda: writer.write_blob("a", b"", 3), "0 to 2")


def test_a_blob_is_written_once(monkeypatch) -> None:
    """Before its commit, and a static one after it; of a size that is no field, and of bytes."""
    crew = Crew(schema())
    (writer,) = crew.writers
    write(crew, 0)
    for scope in ("static", 0):
        writer.write_blob("a", b"1", scope)
        refused(lambda scope=scope: writer.write_blob("a", b"2", scope), f"blob 'a' of scope {scope!r} is written")
    crew.commit()
    refused(lambda: writer.write_blob("a", b"2", "static"), "is written already; it is written once")
    refused(lambda: writer.write_blob("b", "text", "static"), "blob 'b' is a str; give bytes")
    monkeypatch.setattr(rank_writer, "MAX_BLOB_NBYTES", 4)
    writer.write_blob("b", b"1234", "static")
    refused(lambda: writer.write_blob("c", b"12345", "static"), "blob 'c' has 5 bytes, at most 4 are possible")
    with pytest.raises(SchemaError):
        writer.write_blob("a/b", b"", "static")


# ---- what is not committed ---------------------------------------------------------------------------


def test_a_rollback_drops_blobs() -> None:
    """Staged or not; the same keys may be written again."""
    crew = Crew(schema())
    (writer,) = crew.writers
    write(crew, 0)
    writer.write_blob("a", b"1", "static")
    writer.stage(partial_rows=True)
    writer.rollback()
    assert not writer.has_pending(())
    write(crew, 0)
    writer.write_blob("a", b"2", "static")
    crew.commit()
    assert committed_blobs(crew) == {("static", "a"): b"2"}


def test_a_blob_of_a_record_that_stays_pending_waits_for_it() -> None:
    """A rollback drops both: another record at that number does not come with the blob of the first one."""
    crew = Crew(schema())
    (writer,) = crew.writers
    write(crew, 0, 1, 2, 3, 4)
    for number in (0, 4):
        writer.write_blob("a", b"1", number)
    writer.write_blob("b", b"1", "static")
    assert crew.commit(partial_rows=False).committed == ((0, 4),)
    assert committed_blobs(crew) == {(0, "a"): b"1", ("static", "b"): b"1"}
    assert not writer.has_pending(())
    with pytest.raises(SchemaError, match="is written already"):
        writer.write_blob("a", b"2", 4)
    writer.rollback()
    write(crew, 4)
    crew.commit()
    assert blobs_of(crew, 2) is None
    writer.write_blob("a", b"3", 4)
    crew.commit()
    assert blobs_of(crew, 3) == {(4, "a"): b"3"}


def test_a_blob_of_a_record_that_is_not_written_yet_waits_for_it() -> None:
    """In a fixed time dim it may come first, and is committed with its record."""
    crew = Crew(schema(ms.IndexedTime(range(3), units="s")))
    (writer,) = crew.writers
    writer.write_blob("a", b"1", 1)
    for number in (0, 1):
        crew.write_at(number, float(number), {"t": VALUES})
        crew.commit()
        assert committed_blobs(crew) == ({(1, "a"): b"1"} if number else {})


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_blobs_that_were_placed_and_rolled_back_are_not_in_the_next_commit(fails, others) -> None:
    """Their pack lies under the name of the next commit: what is committed then is what was written since."""
    crew = Crew(schema())
    (writer,) = crew.writers
    write(crew, 0)
    writer.write_blob("a", b"1", 0)
    records = writer.stage(partial_rows=True)
    if fails:
        crew.store.fail("sync_folders", StoreError("sync: input/output error", kind="io", errno=errno.EIO))
        with pytest.raises(StoreError, match="input/output error"):
            writer.place(records)
    else:
        writer.place(records)
    writer.rollback()
    write(crew, 0)
    if others:
        writer.write_blob("b", b"2", 0)
    crew.commit()
    write(crew, 1)
    crew.commit()
    assert committed_blobs(crew) == ({(0, "b"): b"2"} if others else {})
    assert blobs_of(crew, 2) is None


def test_blobs_that_were_placed_are_not_committed_by_an_invalidation() -> None:
    """It takes the number that their pack has; they stay pending for the next commit."""
    crew = Crew(schema(ms.IndexedTime(range(3), units="s")))
    (writer,) = crew.writers
    crew.write_at(0, 0.0, {"t": VALUES})
    crew.commit()
    crew.write_at(1, 1.0, {"t": VALUES})
    writer.write_blob("a", b"1", 1)
    writer.place(writer.stage(partial_rows=True))
    crew.invalidate(0)
    assert committed_blobs(crew) == {}
    crew.commit()
    assert committed_blobs(crew) == {(1, "a"): b"1"}
    assert crew.manifest.commit_seq == 3


def test_what_is_written_between_placing_and_the_commit_waits_for_the_next(monkeypatch) -> None:
    """As parts do it whose tokens somebody else commits: records, statics and blobs."""
    crew = Crew(schema())
    (writer,) = crew.writers
    write(crew, 0)
    writer.write_blob("a", b"1", "static")
    crew.write_static("depth", VALUES)
    token = writer.token

    def token_and_more(records: Any) -> Any:
        # commit() asks for it when all is placed.
        found = token(records)
        write(crew, 1)
        writer.write_blob("b", b"2", "static")
        crew.write_static("scalar", 5)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(writer, "token", token_and_more)
        assert crew.commit().statics == ("depth",)
    assert committed_blobs(crew) == {("static", "a"): b"1"}
    assert crew.commit().statics == ("depth", "scalar")
    assert committed_blobs(crew) == {("static", "a"): b"1", ("static", "b"): b"2"}
    assert read_array(crew.store, crew.schema, "t", 2)[:, 0].tolist() == [0, 1]
    with pytest.raises(SchemaError, match="written already"):
        writer.write_blob("b", b"", "static")

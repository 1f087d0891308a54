"""Packs of blobs: a record's blobs wait for it, are written once, and a pack that is deleted is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import mpistream as ms
from mpistream.memory_store import MemoryStore
from tests.support.killed import Killed, KilledStore, copy_of

OPTIONS = ms.Options(lease_ttl=100_000)


def make_schema(*, indexed: bool = False) -> ms.StreamSchema:
    times = [0.5 + i for i in range(8)]
    return ms.StreamSchema(
        dims={"time": None, "y": 2},
        time=ms.IndexedTime(times, units="s") if indexed else ms.AppendTime(units="s"),
        variables={"v": ms.Variable(("time", "y"), "int32")},
        shard_shape={"time": 4},
        chunk_shape={"time": 1},
    )


def write(w: ms.StreamWriter, records: Sequence[int]) -> None:
    for i in records:
        w.write_record(0.5 + i, {"v": i})
        w.write_blob("rng", f"{i}".encode(), i)


def blobs(store: Any) -> dict[tuple[int, int | str, str], bytes]:
    reader = ms.open_reader(store)
    return {(w, s, k): reader.read_blob(k, s, w) for w, s, k in reader.blobs()}


def test_a_blob_waits_for_its_record() -> None:
    """A commit of whole rows leaves records pending, and their blobs with them; static ones are committed."""
    store: Any = MemoryStore()
    with ms.write_open(store, make_schema(), options=OPTIONS) as w:
        write(w, range(6))
        w.write_blob("rng", b"static")
        w.commit(partial_rows=False)
        expected: dict[tuple[int, int | str, str], bytes] = {(0, i, "rng"): f"{i}".encode() for i in range(4)}
        assert blobs(store) == {**expected, (0, "static", "rng"): b"static"}
        before = ms.open_reader(store).manifest.commit_seq
        w.commit(partial_rows=False)
        assert ms.open_reader(store).manifest.commit_seq == before
        w.rollback()
        w.write_record(4.5, {"v": 40})
    assert blobs(store) == {**expected, (0, "static", "rng"): b"static"}


def test_blobs_of_a_commit_that_failed_wait_too() -> None:
    """A pack that was placed or staged for more records than the next commit has is not committed with it."""
    store: Any = MemoryStore()
    with ms.write_open(store, make_schema(), options=OPTIONS) as w:
        write(w, range(6))
        w.flush()
        assert w.commit(partial_rows=False).n_packs == 1
        assert blobs(store) == {(0, i, "rng"): f"{i}".encode() for i in range(4)}
        write(w, [6])
        w.flush()
        w.commit()
        write(w, [7])
        w._writer.stage(partial_rows=True)
        assert sorted(s for _, s, _ in blobs(store)) == list(range(7))
    assert blobs(store) == {(0, i, "rng"): f"{i}".encode() for i in range(8)}


def test_a_blob_of_a_committed_record_is_written_once() -> None:
    """A key that is committed for a record is refused until the record is given up; another key is taken."""
    store: Any = MemoryStore()
    with ms.write_open(store, make_schema(indexed=True), options=OPTIONS) as w:
        w.write_record_at(3, 3.5, {"v": 3})
        w.write_blob("rng", b"1", 3)
        w.commit()
        with pytest.raises(ms.SchemaError, match="blob 'rng' of record 3 is committed already"):
            w.write_blob("rng", b"2", 3)
        w.write_blob("late", b"3", 3)
        w.commit()
        assert blobs(store) == {(0, 3, "rng"): b"1", (0, 3, "late"): b"3"}
    with ms.write_resume(store, options=OPTIONS) as w:
        with pytest.raises(ms.SchemaError, match="blob 'late' of record 3 is committed already"):
            w.write_blob("late", b"4", 3)
        w.invalidate([3])
        w.write_blob("rng", b"5", 3)
        w.write_record_at(3, 3.5, {"v": 30})
    assert blobs(store) == {(0, 3, "rng"): b"5"}


def test_a_blob_is_not_taken_while_those_of_its_record_cannot_be_read(monkeypatch) -> None:
    """The call fails as the store does, nothing of it is kept, and the next one takes the blob."""
    store: Any = MemoryStore()

    def fail(key: str) -> None:
        raise ms.StoreError(f"open {key}: Input/output error", kind="io")

    with ms.write_open(store, make_schema(), options=OPTIONS) as w:
        write(w, [0])
        w.commit()
        with monkeypatch.context() as patched:
            patched.setattr(store, "open", fail)
            with pytest.raises(ms.StoreError, match="blobs/1-1-0: Input/output error"):
                w.write_blob("late", b"1", 0)
        w.commit()
        assert blobs(store) == {(0, 0, "rng"): b"0"}
        w.write_blob("late", b"2", 0)
    assert blobs(store) == {(0, 0, "rng"): b"0", (0, 0, "late"): b"2"}


@pytest.mark.parametrize("n_kept", [0, 1, 3, 5])
def test_a_pack_that_was_deleted_is_noticed(n_kept: int) -> None:
    """Whichever it was, also after a resume that dropped records: reading blobs names the folder and both counts."""
    store: Any = MemoryStore()
    with ms.write_open(store, make_schema(), options=OPTIONS) as w:
        for i in range(5):
            write(w, [i])
            w.commit()
    if n_kept < 5:
        with ms.write_resume(store, at=n_kept - 0.1, options=OPTIONS):
            pass
    for name in store.list(".mpistream/blobs"):
        left = copy_of(store)
        assert len(blobs(left)) == n_kept
        left.delete(f".mpistream/blobs/{name}")
        reader = ms.open_reader(left)
        for read in (reader.blobs, lambda reader=reader: reader.read_blob("rng", 0)):
            with pytest.raises(ms.FormatError, match=r"4 packs of committed blobs, the manifest counts 5") as caught:
                read()
            assert caught.value.kind == "missing"
        assert reader.n_records == n_kept


def test_reading_blobs_of_a_store_that_was_replaced_says_so() -> None:
    """The packs of this state are gone with it; that is no damage."""
    store: Any = MemoryStore()
    with ms.write_open(store, make_schema(), options=OPTIONS) as w:
        write(w, [0])
    reader = ms.open_reader(store)
    ms.write_open(store, make_schema(), overwrite=True, options=OPTIONS).close()
    with pytest.raises(ms.StoreError, match="refresh") as caught:
        reader.blobs()
    assert caught.value.kind == "superseded"


def test_a_pack_that_is_taken_back_is_taken_back_durably() -> None:
    """Else a loss of power brings it back, under a commit_seq that an invalidation has taken meanwhile."""

    class Noting(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def move(self, source: str, target: str, *, parents: bool = True, sync: bool = True) -> bool:
            self.calls.append(f"move {source}")
            return super().move(source, target, parents=parents, sync=sync)

        def sync_folders(self, keys: Any, known: Any = None) -> None:
            self.calls += [f"sync {key}" for key in keys]

        def place(self, staged: str, key: str) -> None:
            self.calls.append(f"place {key}")
            super().place(staged, key)

    store: Any = Noting()
    with ms.write_open(store, make_schema(indexed=True), options=OPTIONS) as w:
        w.write_record_at(3, 3.5, {"v": 3})
        w.write_record_at(4, 4.5, {"v": 4})
        w.commit()
        w.write_blob("rng", b"1", 4)
        w.flush()
        store.calls = []
        w.invalidate([3])
        pack = ".mpistream/blobs/1-2-0"
        steps = [store.calls.index(c) for c in (f"move {pack}", f"sync {pack}", "place .mpistream/manifest.json")]
        assert steps == sorted(steps)


def test_a_killed_invalidation_never_commits_the_pack_that_waits() -> None:
    """At every call: no blob is there whose commit did not come."""
    start: Any = MemoryStore()
    with ms.write_open(start, make_schema(indexed=True), options=OPTIONS) as w:
        w.write_record_at(3, 3.5, {"v": 3})
        w.write_record_at(4, 4.5, {"v": 4})
    for n_calls in range(0, 300, 3):
        store: Any = KilledStore(start, n_calls)
        try:
            w = ms.write_resume(store, takeover=True, options=ms.Options(lease_ttl=100_000, threads=0))
            w.write_blob("rng", b"1", 4)
            w.flush()
            w.invalidate([3])
        except Killed:
            pass
        else:
            break
        left = copy_of(store)
        assert blobs(left) == {}
        with ms.write_resume(left, takeover=True, options=OPTIONS):
            pass
        assert blobs(left) == {}
    assert n_calls > 20

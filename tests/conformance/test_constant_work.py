"""What a commit, a resume and the opening of a reader do, does not depend on how much is committed."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.local_store import LocalStore
from mpistream.manifest import Manifest
from mpistream.memory_store import MemoryStore
from mpistream.zarr3.codecs import ChunkCodec
from tests.support.counting_store import CountingStore
from tests.support.plain import QUICK, append_schema

FEW, MANY = 10, 1002  # both two records into a row of 8
TIME_CHUNK = 1024
MANIFEST = ".mpistream/manifest.json"

Counts = dict[str, int]


def schema_of(row: int, separator: str = "/") -> ms.StreamSchema:
    return append_schema(
        {"y": 4},
        {
            "u": ms.Variable(("time", "y"), "float32"),
            "v": ms.Variable(("time", "y"), "int16"),
            "count": ms.Variable(("time",), "int64"),
        },
        statics={"topo": ms.Variable(("y",), "float64")},
        shard_shape={"time": row, "y": 2},
        chunk_shape={"time": 1, "y": 2},
        key_separator=separator,
    )


def put_record(writer: ms.StreamWriter) -> None:
    i = writer.n_records
    writer.write_record(float(i), {"u": np.full(4, i % 1000, "float32"), "v": 1, "count": i})


def filled(n_records: int, row: int, separator: str) -> tuple[Any, Counts]:
    """Return a store of so many records, and what the commit of the last one asked of it."""
    store: Any = CountingStore(MemoryStore())
    with ms.write_open(store, schema_of(row, separator), options=QUICK) as writer:
        writer.write_static("topo", 0.0)
        for i in range(n_records - 1):
            put_record(writer)
            if i % 100 == 99:
                writer.commit()
        writer.commit()
        store.reset()
        put_record(writer)
        writer.commit()
        counts = store.counts
    return store, counts


def counts_of_resume(store: Any, at: float | None) -> Counts:
    store.reset()
    writer = ms.write_resume(store, at=at, options=QUICK)
    counts = store.counts
    writer.close()
    return counts


def counts_of_reading(store: Any) -> Counts:
    store.reset()
    reader = ms.open_reader(store)
    reader.read_record("u", -1)
    reader.read_record("count", -1)
    reader.read_static("topo")
    return store.counts


@pytest.mark.parametrize(("row", "separator"), [(1, "/"), (8, "/"), (8, ".")])
def test_operations_do_not_grow_with_records(row: int, separator: str) -> None:
    """A commit, a resume with and without at, and a reader ask the store as often at record 10 as at 1,002 (P-29)."""
    found: list[dict[str, Counts]] = []
    for n_records in (FEW, MANY):
        store, of_commit = filled(n_records, row, separator)
        of_reading = counts_of_reading(store)
        of_resume = counts_of_resume(store, None)
        found.append(
            {
                "commit": of_commit,
                "reading": of_reading,
                "resume": of_resume,
                "resume with at": counts_of_resume(store, n_records - 2.0),
            }
        )
    assert found[1] == found[0]


def test_commit_of_a_record_is_a_handful_of_operations() -> None:
    """A commit stages and places its objects, one time chunk, the manifest and four growing documents; no more."""
    _, counts = filled(FEW, 1, "/")
    # 2 variables x 2 shards, count, time, manifest, and documents of the group, time, u, v and count.
    assert counts == {"stage": 12, "place": 12}


def test_commit_with_nothing_pending_asks_nothing() -> None:
    """A commit without new records or statics touches no file."""
    store: Any = CountingStore(MemoryStore())
    with ms.write_open(store, schema_of(1), options=QUICK) as writer:
        put_record(writer)
        receipt = writer.commit()
        store.reset()
        assert writer.commit() == receipt
        assert store.counts == {}


def test_opening_a_reader_reads_one_file() -> None:
    """A reader opens with the manifest alone; times and shards are read when they are asked for."""
    store, _ = filled(FEW, 8, "/")
    store.reset()
    ms.open_reader(store)
    assert store.keys("read") == [MANIFEST]
    assert store.counts == {"read": 1}


class _Paper:
    """A store of which only the last objects exist; time chunks of the records before are made when asked for."""

    def __init__(self, *root: Any) -> None:
        super().__init__(*root)
        self._codec = ChunkCodec(schema_of(8).time_array.chain, np.dtype("float64"))

    def read(self, key: str) -> bytes | None:
        found: bytes | None = super().read(key)  # type: ignore[misc]
        if found is None and key.startswith("time/c/"):
            times = np.arange(TIME_CHUNK, dtype="float64") + TIME_CHUNK * int(key.removeprefix("time/c/"))
            found = b"".join(map(bytes, self._codec.encode(times)))
        return found


class PaperStore(_Paper, MemoryStore):
    """In memory."""


class PaperFolder(_Paper, LocalStore):
    """In a folder."""


def on_paper(n_records: int, folder: Path | None = None) -> Any:
    """Return a store that says it has so many records, in rows of 8, two inner chunks each."""
    schema = schema_of(8)
    store: Any = PaperStore() if folder is None else PaperFolder(folder)
    with ms.write_open(store, schema, options=QUICK) as writer:
        writer.write_static("topo", 0.0)
    manifest = Manifest.from_bytes(store.read(MANIFEST) or b"")
    store.make_folder("staging")
    grown = replace(manifest, committed=((0, n_records),), last_t=n_records - 1.0)
    store.stage("staging/0", [grown.to_bytes()], sync=True)
    store.place("staging/0", MANIFEST)
    store.delete_tree("staging")
    # The variable over time alone has to be read back: its last chunk is there.
    last = (n_records - 1) // TIME_CHUNK
    values = np.arange(TIME_CHUNK, dtype="int64") + last * TIME_CHUNK
    codec = ChunkCodec(schema.arrays["count"].chain, np.dtype("int64"))
    store.make_folder("count/c")
    store.create(f"count/c/{last}", b"".join(map(bytes, codec.encode(values))))
    return CountingStore(store)


def append_on_paper(n_records: int, at: float | None) -> tuple[Counts, int]:
    """Resume, append a row, commit and read; return what was asked of the store, and the peak of memory."""
    store = on_paper(n_records)
    store.reset()
    tracemalloc.start()
    try:
        with ms.write_resume(store, at=at, options=QUICK) as writer:
            for _ in range(8):
                put_record(writer)
                writer.commit()
        reader = ms.open_reader(store)
        assert reader.read_record("u", -1).tolist() == [(reader.n_records - 1) % 1000] * 4
        return store.counts, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def system_calls(store: Any, monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Append a row to a folder durably, a commit each record, and read; return what was asked of the system."""
    found: Counter[str] = Counter()

    def counted(name: str) -> Any:
        call, is_open = getattr(os, name), threading.Lock()

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with is_open:
                found[name] += 1
            return call(*args, **kwargs)

        return wrapped

    with ms.write_resume(store) as writer, monkeypatch.context() as patch:
        for name in ("open", "fsync", "mkdir", "rename", "unlink", "listdir", "pread", "preadv"):
            patch.setattr(os, name, counted(name))
        for _ in range(8):
            put_record(writer)
            writer.commit()
        reader = ms.open_reader(store)
        assert reader.read_record("u", -1).tolist() == [(reader.n_records - 1) % 1000] * 4
    return dict(found)


def test_durable_commits_ask_the_system_the_same_at_record_10_000(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and folders are opened, synced and renamed as often behind 10,000 records as behind 8; none is listed."""
    few, many = (system_calls(on_paper(n, tmp_path / str(n)), monkeypatch) for n in (8, 10_000))
    assert many == few
    assert few["fsync"] > 8 * 12
    assert "listdir" not in few


def test_opening_a_reader_on_100_000_records_reads_one_file() -> None:
    """It lists nothing, and a record takes the shards of the record; all times are one read per 1,024 of them."""
    store = on_paper(100_000)
    with ms.write_resume(store, options=QUICK) as writer:
        put_record(writer)
    store.reset()
    reader = ms.open_reader(store)
    assert reader.n_records == 100_001
    assert store.counts == {"read": 1}
    store.reset()
    assert reader.read_record("u", -1).tolist() == [0.0] * 4
    assert store.counts == {"open": 2, "read_range": 4, "read": 1}
    store.reset()
    assert reader.times.tolist() == list(range(100_001))
    assert store.counts == {"read": 98 + 1}


class MeetingStore(MemoryStore):
    """A store in which nothing of the owner's is staged alone, once ``must_meet`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting = threading.Barrier(2)
        self.must_meet = False

    def stage(self, key: str, pieces: Any, *, sync: bool) -> int:
        if self.must_meet and "/owner/" in key and "lease" not in key:
            self.meeting.wait(30)
        return super().stage(key, pieces, sync=sync)


def test_what_the_owner_stages_waits_for_the_disk_together() -> None:
    """Time chunk and manifest, then the documents of all variables: two by two they meet, none comes through alone."""
    store = MeetingStore()
    schema = append_schema({"y": 4}, {name: ms.Variable(("time", "y"), "int8") for name in "uv"})
    url: Any = store
    with ms.write_open(url, schema) as writer:
        writer.write_record(0.0, {"u": 1, "v": 2})
        # Then the documents of the group, of time and of two variables: four.
        store.must_meet = True
        writer.commit()
        store.must_meet = False
    assert ms.open_reader(url).n_records == 1


def test_two_hundred_million_inner_chunks_cost_nothing() -> None:
    """Resume and append do the same on 2e8 inner chunks as on 64, in less than 50 MB (P-40)."""
    few, _ = append_on_paper(32, None)
    many, peak = append_on_paper(100_000_000, None)
    assert many == few
    assert peak < 50e6


def test_resume_with_at_looks_for_the_time_by_bisection() -> None:
    """Finding ``at`` among 1e8 stored times reads a few time chunks, and not one more than bisection needs."""
    n = 100_000_000
    few, _ = append_on_paper(32, 23.0)
    many, peak = append_on_paper(n, n - 9.0)
    n_chunks = -(-n // TIME_CHUNK)
    reads: dict[str, Any] = {"read": many.pop("read") - few.pop("read")}
    assert many == few
    # Twice: what was found before the claim is looked for again behind the fence.
    assert 0 <= reads["read"] <= 4 * n_chunks.bit_length()
    assert peak < 50e6

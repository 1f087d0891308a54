"""What a commit, a resume and the opening of a reader do, does not depend on how much is committed."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mpistream as ms
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


class PaperStore(MemoryStore):
    """A store of which only the last objects exist; time chunks of the records before are made when asked for."""

    def __init__(self, schema: ms.StreamSchema) -> None:
        super().__init__()
        self._codec = ChunkCodec(schema.time_array.chain, np.dtype("float64"))

    def read(self, key: str) -> bytes | None:
        found = super().read(key)
        if found is None and key.startswith("time/c/"):
            times = np.arange(TIME_CHUNK, dtype="float64") + TIME_CHUNK * int(key.removeprefix("time/c/"))
            found = b"".join(map(bytes, self._codec.encode(times)))
        return found


def on_paper(n_records: int) -> Any:
    """Return a store that says it has so many records, in rows of 8, two inner chunks each."""
    schema = schema_of(8)
    store: Any = PaperStore(schema)
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

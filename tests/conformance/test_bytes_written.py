"""How many bytes go to the store, compared with the data encoded once."""

from __future__ import annotations

from typing import Any

import numcodecs
import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from mpistream.memory_store import MemoryStore
from tests.support.counting_store import CountingStore
from tests.support.plain import QUICK, append_schema

N_RECORDS, ROW = 80, 8
NY, NX, CHUNK_NY = 64, 128, 16  # 32 KiB a record


def record_of(i: int) -> NDArray[np.float32]:
    y, x = np.arange(NY)[:, None] / NY, np.arange(NX) / NX
    noise = np.random.default_rng(i).standard_normal((NY, NX), "float32")
    return np.asarray(280 + 15 * np.sin(3 * y + i / 20) * np.cos(5 * x) + 0.01 * noise, "float32")


def encoded_once(inner_time: int) -> int:
    """Return the bytes of all inner chunks with their checksums, made by numcodecs alone."""
    codec = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE, typesize=4)
    total = 0
    for start in range(0, N_RECORDS, inner_time):
        records = np.stack([record_of(i) for i in range(start, start + inner_time)])
        for y in range(0, NY, CHUNK_NY):
            total += len(codec.encode(np.ascontiguousarray(records[:, y : y + CHUNK_NY]))) + 4
    return total


def staged(inner_time: int, *, partial_rows: bool, n_records: int = N_RECORDS) -> Any:
    """Return the store, which has counted all bytes that were staged."""
    schema = append_schema(
        {"y": NY, "x": NX},
        {"u": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape={"time": ROW, "y": 2 * CHUNK_NY},
        chunk_shape={"time": inner_time, "y": CHUNK_NY, "x": NX},
    )
    store: Any = CountingStore(MemoryStore())
    with ms.write_open(store, schema, options=QUICK) as writer:
        for i in range(n_records):
            writer.write_record(float(i), {"u": record_of(i)})
            writer.commit(partial_rows=partial_rows)
    return store


@pytest.mark.parametrize("inner_time", [1, 2, 8])
def test_whole_rows_are_written_once(inner_time: int) -> None:
    """Without partial rows 80 commits of a record write at most 1.3 times the data, documents included."""
    store = staged(inner_time, partial_rows=False)
    assert 1.0 <= store.nbytes_staged / encoded_once(inner_time) <= 1.3
    assert ms.open_reader(store).n_records == N_RECORDS


def test_growing_row_is_written_with_each_commit() -> None:
    """With partial rows a row of 8 is written (1 + 2 + ... + 8) / 8 times, and no record is encoded twice."""
    store = staged(1, partial_rows=True)
    assert store.nbytes_staged / encoded_once(1) == pytest.approx(4.5, rel=0.1)
    # What is left is the data, once, and indexes of 16 bytes an inner chunk.
    shards = [store.inner.read(f"u/c/{row}/{y}/0") for row in range(N_RECORDS // ROW) for y in range(2)]
    assert sum(map(len, shards)) == encoded_once(1) + 20 * (16 * ROW * 2 + 4)


def test_rest_of_the_last_row_is_written_at_close() -> None:
    """What is pending when the writer closes is committed, though its row is not full."""
    store = staged(1, partial_rows=False, n_records=ROW + 3)
    assert ms.open_reader(store).n_records == ROW + 3

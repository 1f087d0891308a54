"""Reads of many shards: in threads or not, the same values, the same error, and few descriptors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpistream import shard_reads
from mpistream.errors import FormatError, StoreError
from mpistream.memory_store import MemoryStore
from mpistream.shard_reads import Wanted, n_cores, read_boxes
from tests.support.shards import make_spec, write_shard

SPEC = make_spec((1, 8, 6), (1, 2, 6), profile="fast")
N_SHARDS = 12
VALUES = np.random.default_rng(3).standard_normal((N_SHARDS, 8, 6)).astype("float32")
BOX = ((0, 1), (1, 8), (0, 6))


class Looked(MemoryStore):
    """A store that knows which threads read and how many objects were open at once."""

    def __init__(self, damaged: tuple[int, ...] = (), absent: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.readers: set[str] = set()
        self.n_open = self.max_open = 0
        self.both = threading.Barrier(2)
        self.must_meet = False
        for i in range(N_SHARDS):
            data = bytearray(write_shard(SPEC, [VALUES[i]]))
            data[20] ^= i in damaged
            if i not in absent:
                self.create(str(i), bytes(data))

    def open(self, key: str) -> Any:
        opened = super().open(key)
        if opened is None:
            return None
        with self.lock:
            self.n_open += 1
            self.max_open = max(self.max_open, self.n_open)
        return Opened(self, opened)


class Opened:
    def __init__(self, store: Looked, inner: Any) -> None:
        self.store, self.inner, self.nbytes = store, inner, inner.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.inner.read(offset, nbytes))

    def read_into(self, offset: int, buffer: Any) -> int:
        with self.store.lock:
            is_first = threading.current_thread().name not in self.store.readers
            self.store.readers.add(threading.current_thread().name)
        if is_first and self.store.must_meet:
            # Each thread waits in its first read until another one reads, too.
            self.store.both.wait(30)
        return int(self.inner.read_into(offset, buffer))

    def close(self) -> None:
        with self.store.lock:
            self.store.n_open -= 1


def read(store: Any) -> np.ndarray:
    out = np.full((N_SHARDS, 7, 6), 77, "float32")

    def wanted() -> Iterator[Wanted]:
        for i in range(N_SHARDS):
            yield str(i), BOX, out[i : i + 1]

    def absent(key: str, target: np.ndarray) -> None:
        target[...] = int(key)

    read_boxes(store, SPEC, wanted(), out.nbytes, absent)
    return out


@pytest.fixture(params=[1, 2, 5])
def n_threads(request, monkeypatch) -> int:
    monkeypatch.setattr(shard_reads, "_NBYTES_PER_THREAD", 1)
    monkeypatch.setattr(shard_reads, "n_cores", lambda: request.param)
    return int(request.param)


def test_any_number_of_threads_gives_the_values(n_threads) -> None:
    """What is stored, and what stands for a shard that is absent."""
    store = Looked(absent=(0, 7))
    expected = VALUES[:, 1:].copy()
    expected[[0, 7]] = np.array([0, 7])[:, None, None]
    assert read(store).tolist() == expected.tolist()
    assert store.n_open == 0
    assert store.max_open <= n_threads + 1


def test_the_first_damaged_shard_is_named(n_threads) -> None:
    """The same one whoever meets it; what was open is closed, and the threads are gone."""
    for damaged in ((3, 4, 9), (11,), (0, 1)):
        store = Looked(damaged=damaged)
        with pytest.raises(FormatError, match=f"^{damaged[0]}: the stored CRC32C differs") as caught:
            read(store)
        assert caught.value.kind == "checksum"
        assert store.n_open == 0
    assert all(thread.name != "mpistream-help" for thread in threading.enumerate())


def test_an_index_that_is_damaged_is_named(n_threads) -> None:
    """It is met where the shard is opened."""
    store = Looked()
    store.delete("5")
    store.create("5", b"short")
    with pytest.raises(FormatError, match=r"^5: object of 5 bytes has no room") as caught:
        read(store)
    assert caught.value.kind == "index"
    assert store.n_open == 0


def test_an_error_of_the_store_is_raised(n_threads, monkeypatch) -> None:
    """In whatever thread it came."""
    store = Looked()

    def fail(self: Any, offset: int, buffer: Any) -> int:
        raise StoreError("read 0: gone", kind="io")

    monkeypatch.setattr(Opened, "read_into", fail)
    with pytest.raises(StoreError, match="read 0: gone"):
        read(store)
    assert store.n_open == 0


def test_large_reads_use_the_cores_and_small_ones_do_not(monkeypatch) -> None:
    """Two threads read at the same time once each has enough to do; below that, and with one core, only the caller."""
    monkeypatch.setattr(shard_reads, "n_cores", lambda: 2)
    nbytes = N_SHARDS * 7 * 6 * 4
    small = Looked()
    monkeypatch.setattr(shard_reads, "_NBYTES_PER_THREAD", nbytes // 2 + 1)
    read(small)
    assert small.readers == {threading.current_thread().name}
    large = Looked()
    large.must_meet = True
    monkeypatch.setattr(shard_reads, "_NBYTES_PER_THREAD", nbytes // 2)
    read(large)
    assert large.readers == {threading.current_thread().name, "mpistream-help"}
    assert shard_reads._MAX_THREADS == 8


@pytest.mark.parametrize(
    ("affinity", "environment", "expected"),
    [
        (8, {}, 8),
        (3, {}, 3),
        (8, {"SLURM_CPUS_PER_TASK": "2"}, 2),
        (2, {"SLURM_CPUS_PER_TASK": "4"}, 2),
        (8, {"MPI_LOCALNRANKS": "4"}, 2),
        (8, {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 2),
        (8, {"MPI_LOCALNRANKS": "16"}, 1),
        # Bound to cores of their own, ranks don't share them.
        (2, {"MPI_LOCALNRANKS": "4"}, 2),
        (8, {"MPI_LOCALNRANKS": "many", "SLURM_CPUS_PER_TASK": "0"}, 8),
    ],
)
def test_cores_of_a_process(affinity, environment, expected, monkeypatch) -> None:
    """Those it is bound to; what ranks of a node may all use, they share; never more than the job asked for."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    assert n_cores(environment) == expected

"""Records that threads encode: the same bytes as without threads, whatever fails and whoever goes on meanwhile."""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.errors import StoreError
from mpistream.layout import resolve_layout
from mpistream.stats import WriterStats
from mpistream.zarr3.shard import ChunkEncoder, OpenShard
from tests.support.ranks import MemoryTransport, MemoryWorld, run_ranks
from tests.support.scripted_store import ScriptedStore
from tests.support.stager import DEADLINE, in_time
from tests.support.wait import wait_until
from tests.support.writers import Crew, read_array

RECORD_NBYTES = 8 * 6 * (4 + 8)


@pytest.fixture(autouse=True)
def _small_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistream.rank_writer._MIN_BACKGROUND_NBYTES", 48)


def schema(rows: int = 1, inner: int = 1, n_total: int | None = None) -> ms.StreamSchema:
    shapes: dict[str, Any] = {"shard_shape": {"time": rows, "y": 4, "x": 3}}
    time: Any = ms.AppendTime(units="s")
    if n_total is not None:
        time = ms.IndexedTime(times=[float(i) for i in range(n_total)], units="s")
    return resolve_layout(
        ms.StreamSchema(
            dims={"time": None, "y": 8, "x": 6},
            time=time,
            variables={
                "a": ms.Variable(
                    ("time", "y", "x"), "f4", keep_bits=9, chunk_shape={"time": inner, "y": 4, "x": 3}, **shapes
                ),
                "b": ms.Variable(("time", "y", "x"), ">f8", chunk_shape={"time": 1, "y": 2, "x": 3}, **shapes),
                # Its inner chunks are small, so the caller encodes it.
                "c": ms.Variable(("time", "y", "x"), "i1", chunk_shape={"time": 1, "y": 2, "x": 3}, **shapes),
                "energy": ms.Variable(("time",), "f8"),
            },
            statics={"depth": ms.Variable(("y", "x"), "f4", shard_shape=(4, 3))},
        ),
        1,
    )


def record(i: int) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    a, b = rng.standard_normal((8, 6)), rng.standard_normal((8, 6)).astype("f4")
    # A block that casts, one that is not contiguous, one with a chunk of fill.
    a[:4, :3] = np.nan
    return {"a": a, "b": b.T.copy().T, "c": np.full((8, 6), i % 100, "i1"), "energy": float(i)}


class Gate(threading.Event):
    """While it is cleared no thread encodes."""

    n_held = 0

    def wait_for_a_thread(self) -> None:
        wait_until(lambda: self.n_held, DEADLINE, "a thread to come", every=0.001)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found, put = Gate(), OpenShard.put
    found.set()

    def gated(self: OpenShard, *arguments: Any, **more: Any) -> None:
        if threading.current_thread().name == "mpistream-stage":
            found.n_held += not found.is_set()
            found.wait(60)
        put(self, *arguments, **more)

    monkeypatch.setattr(OpenShard, "put", gated)
    yield found
    found.set()


def objects(crew: Crew) -> dict[str, bytes]:
    """Everything in its place."""
    return {key: data for key, data in crew.store._objects.items() if not key.startswith(".mpistream/stage/")}


def check(crew: Crew, *expected: int) -> None:
    assert crew.manifest.n_records == len(expected)
    whole = np.stack([record(i)["b"] for i in expected])
    assert read_array(crew.store, crew.schema, "b", len(expected)).tobytes() == whole.astype("f8").tobytes()


def test_what_threads_encode() -> None:
    """Variables with inner chunks that are not small; statics, series and the others are the caller's."""
    found = [Crew(schema(), threads=n).writers[0].stats for n in (0, 2)]
    assert [(s.mode, s.threads, s.background) for s in found] == [("synchronous", 0, ()), ("background", 2, ("a", "b"))]
    shared = Crew(schema(), threads=None).writers[0]
    assert shared.stats.n_cores > 0


@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("n_writers", [1, 2])
def test_store_is_bitwise_the_same_in_every_mode(rows: int, inner: int, n_writers: int) -> None:
    """Full rows, rows that grow over commits, rounding, casts and chunks of fill."""
    stores = []
    for threads in (0, 1, 3):
        crew = Crew(schema(rows, inner), n_writers, threads=threads)
        for i in range(11):
            crew.write(float(i), record(i))
            if i in (1, 5, 6):
                crew.commit()
        crew.write_static("depth", record(0)["a"].astype("f4"))
        crew.commit(partial_rows=False)
        crew.commit()
        check(crew, *range(11))
        stores.append(objects(crew))
        crew.close()
    assert stores[1] == stores[0]
    assert stores[2] == stores[0]


@pytest.mark.parametrize("bound", [None, RECORD_NBYTES])
def test_records_in_any_order_are_bitwise_the_same_in_every_mode(bound: int | None) -> None:
    """Also rows that leave memory for the stage folder and come back."""
    order = np.random.default_rng(1).permutation(18).tolist()
    stores = []
    for threads in (0, 2):
        crew = Crew(schema(4, 2, n_total=18), 2, threads=threads, max_pending_nbytes=bound)
        for i, n in enumerate(order):
            crew.write_at(n, float(n), record(n))
            if i % 7 == 3:
                crew.commit(partial_rows=i % 2 == 0)
        crew.commit()
        crew.invalidate(2, 9)
        for n in (9, 2):
            crew.write_at(n, float(n), record(n))
        crew.commit()
        check(crew, *range(18))
        stores.append(objects(crew))
        crew.close()
    assert stores[1] == stores[0]


def test_caller_may_overwrite_its_blocks_at_once(gate: Gate) -> None:
    """Long before a thread has read them."""
    crew = Crew(schema(2), threads=2, max_pending_nbytes=10**6)
    gate.clear()
    for i in range(5):
        given = record(i)
        blocks = crew.blocks(crew.writers[0], given)
        in_time(crew.writers[0].write_record, float(i), blocks)
        for name in ("a", "b", "c"):
            given[name][...] = -1
            blocks[name][...] = -1
    gate.set()
    crew.commit()
    check(crew, *range(5))


def test_steady_rhythm_allocates_no_memory() -> None:
    """The blocks of two records wait at most, however many are written."""
    crew = Crew(schema(), threads=2)
    stats = crew.writers[0].stats
    for i in range(40):
        crew.write(float(i), record(i))
    assert stats.n_buffers <= 2 * 2
    assert stats.nbytes_copied == 40 * RECORD_NBYTES
    crew.commit()
    check(crew, *range(40))


def test_bound_holds_the_caller_up(gate: Gate) -> None:
    """Two records by default; the third waits for the first, and the wait is counted."""
    crew = Crew(schema(), threads=1)
    (writer,) = crew.writers
    gate.clear()
    crew.write(0.0, record(0))
    is_written = threading.Event()

    def write() -> None:
        for i in (1, 2, 3):
            crew.write(float(i), record(i))
        is_written.set()

    threading.Thread(target=write, daemon=True).start()
    assert not is_written.wait(0.1)
    assert writer.n_records < 4
    pool = writer._stager._pool
    assert pool is not None
    assert pool._pending_nbytes <= 2 * (RECORD_NBYTES + 48)
    gate.set()
    assert is_written.wait(DEADLINE)
    assert writer.stats.seconds["wait"] > 0
    crew.commit()
    check(crew, 0, 1, 2, 3)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("n", range(6))
def test_memory_that_lacks_once_costs_nothing(monkeypatch: pytest.MonkeyPatch, rows: int, n: int) -> None:
    """Whichever chunk it is: the block is kept, staging raises it, and the second try has every record in order."""
    encode, calls = ChunkEncoder.encode, [0]

    def fail(self: Any, *arguments: Any, **more: Any) -> Any:
        if threading.current_thread().name == "mpistream-stage":
            calls[0] += 1
            # Twice: staging tries once more by itself.
            if calls[0] in (5 * n + 3, 5 * n + 4) or (calls[0] > 5 * n + 3 and is_failing):
                raise MemoryError("no memory")
        return encode(self, *arguments, **more)

    is_failing = True
    monkeypatch.setattr(ChunkEncoder, "encode", fail)
    crew = Crew(schema(rows, min(rows, 2)), threads=1)
    for i in range(6):
        crew.write(float(i), record(i))
    with pytest.raises(MemoryError):
        crew.writers[0].stage(partial_rows=True)
    is_failing = False
    crew.write(6.0, record(6))
    crew.commit()
    check(crew, *range(7))
    assert crew.writers[0]._stager._pool._pending_nbytes == 0  # type: ignore[union-attr]


def test_full_disk_in_the_background_costs_nothing() -> None:
    """What could not be staged is kept in memory until it can."""
    crew = Crew(schema(), threads=2)
    (writer,) = crew.writers
    error = StoreError("no space left", kind="io", errno=errno.ENOSPC)
    crew.store.fail("stage", *[error] * 40)
    for i in range(3):
        crew.write(float(i), record(i))
    with pytest.raises(StoreError) as caught:
        writer.stage(partial_rows=True)
    assert caught.value.errno == errno.ENOSPC
    crew.store._errors.clear()
    crew.write(3.0, record(3))
    crew.commit()
    check(crew, 0, 1, 2, 3)


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("is_full", [False, True])
def test_block_that_is_written_as_it_lies_is_kept_when_that_fails(threads: int, is_full: bool) -> None:
    """Without a compressor no copy is made of it before; the next try finds it, though the caller has reused it."""
    plain = resolve_layout(
        ms.StreamSchema(
            dims={"time": None, "x": 64},
            time=ms.AppendTime(units="s"),
            variables={"u": ms.Variable(("time", "x"), "i4", shard_shape=(1, 32), chunk_shape=(1, 32), codec="none")},
        ),
        1,
    )
    crew = Crew(plain, threads=threads)
    if is_full:
        crew.store.fail("stage", *[StoreError("no space left", kind="io", errno=errno.ENOSPC)] * 3)
    block = np.empty(64, "i4")
    for i in range(5):
        block[:] = np.arange(64) + 100 * i
        crew.writers[0].write_record(float(i), {"u": block})
        block[:] = -1
    crew.commit()
    expected = np.arange(64) + 100 * np.arange(5)[:, None]
    assert read_array(crew.store, crew.schema, "u", 5).tolist() == expected.tolist()


def test_rollback_gives_up_what_waits(gate: Gate) -> None:
    """Nothing of it is encoded or staged afterwards, and its memory comes back."""
    crew = Crew(schema(4), threads=1, max_pending_nbytes=10**6)
    (writer,) = crew.writers
    crew.write(0.0, record(0))
    crew.commit()
    gate.clear()
    for i in (7, 8, 9):
        crew.write(float(i), record(i))
    gate.wait_for_a_thread()
    rolling = threading.Thread(target=writer.rollback, daemon=True)
    rolling.start()
    rolling.join(0.05)
    assert rolling.is_alive()
    gate.set()
    rolling.join(DEADLINE)
    assert writer.n_records == 1
    assert writer._stager._pool._pending_nbytes == 0  # type: ignore[union-attr]
    for i in (1, 2, 3):
        crew.write(float(i), record(i))
    crew.commit()
    check(crew, 0, 1, 2, 3)


def test_close_drops_what_waits(gate: Gate) -> None:
    """It waits for what a thread is doing, for no more."""
    before = set(threading.enumerate())
    crew = Crew(schema(), threads=1, max_pending_nbytes=10**6)
    gate.clear()
    for i in range(3):
        crew.write(float(i), record(i))
    gate.wait_for_a_thread()
    closing = threading.Thread(target=crew.close, daemon=True)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    gate.set()
    closing.join(DEADLINE)
    assert not closing.is_alive()
    assert not set(threading.enumerate()) - before


def test_a_writer_that_nobody_closed_takes_its_threads_along() -> None:
    """Though jobs of it were done in the background."""
    before = set(threading.enumerate())
    crew = Crew(schema(), threads=2)
    crew.write(0.0, record(0))
    crew.writers[0].stage(partial_rows=True)
    # Two that encode, and some that wait for the disk.
    writing = set(threading.enumerate()) - before
    assert 2 <= len(writing) <= 10
    crew.writers.clear()
    gc.collect()
    for thread in writing:
        thread.join(DEADLINE)
        assert not thread.is_alive()


# ---- record() ----------------------------------------------------------------------------------------


@pytest.fixture
def writer() -> Iterator[ms.StreamWriter]:
    options = ms.Options(threads=1, lease_ttl=1e6)
    with ms.write_open(ScriptedStore(), schema(), options=options) as found:  # type: ignore[arg-type]
        yield found


def put(writer: ms.StreamWriter, i: int) -> Any:
    with writer.record(float(i)) as rec:
        buffer = rec.buffer("b")
        buffer[...] = record(i)["b"]
        rec.put("a", record(i)["a"])
        rec.put("c", record(i)["c"])
        rec.put("energy", 1.0)
    return buffer


def test_buffer_of_a_record_is_what_is_encoded(writer: ms.StreamWriter) -> None:
    """It is not copied, and after the record nobody can write to it by its old name."""
    buffer = put(writer, 0)
    assert writer.stats.nbytes_copied == 0
    assert not buffer.flags.writeable
    put(writer, 1)
    writer.commit()
    assert writer.reader.read_record("b", 1).tobytes() == record(1)["b"].astype("f8").tobytes()
    assert writer.stats.n_buffers <= 4


def test_buffer_of_a_record_that_is_given_up_comes_back(writer: ms.StreamWriter) -> None:
    """A body that raises puts nothing."""
    for _ in range(5):
        with contextlib.suppress(ZeroDivisionError), writer.record(0.0) as rec:
            rec.buffer("b")
            raise ZeroDivisionError
    put(writer, 0)
    assert (writer.n_records, writer.stats.n_buffers) == (1, 2)


def test_writer_in_the_body_of_anothers_record_does_not_wait_for_it(writer: ms.StreamWriter) -> None:
    """What a caller holds is not on its way."""
    with writer.record(0.0) as rec:
        rec.buffer("a")[...] = 1
        lent = writer._writer.lent()
        in_time(lambda: lent.loans)
        lent.__exit__()
        for name in ("b", "c"):
            rec.put(name, 0)
        rec.put("energy", 1.0)
    wait_until(lambda: writer.stats.seconds["write"] > 0, DEADLINE, "the record to be staged", every=0.001)


# ---- several ranks -----------------------------------------------------------------------------------


@pytest.fixture
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistream.session.connect", lambda comm, timeout: MemoryTransport(*comm))


REGIONS = [{"y": (0, 3)}, {"y": (3, 4)}, {"y": (4, 8)}]  # shards end at 4 and 8


def rearranged(root: Path, threads: int, gate: Gate | None = None) -> tuple[dict[str, bytes], list[WriterStats]]:
    """Write records of three ranks, two of which share shards; return the files and what the writers did."""
    world = MemoryWorld(3, 60)

    def run(transport: MemoryTransport) -> Any:
        region: Any = REGIONS[transport.rank]
        comm: Any = (world, transport.rank)
        options = ms.Options(threads=threads, durability="none", max_pending_nbytes=10**6)
        with ms.write_open(root, schema(2), comm=comm, region=region, options=options) as w:
            for i in range(5):
                given = {
                    n: v if n == "energy" else np.array(v[slice(*region["y"])], order="C") for n, v in record(i).items()
                }
                w.write_record(float(i), given)
                for name in ("a", "b", "c"):
                    given[name][...] = -1
            if gate is not None:
                gate.set()
            return w.stats

    stats = run_ranks(3, run, timeout=100)
    return {str(f.relative_to(root)): f.read_bytes() for f in root.glob("*/c/**/*") if f.is_file()}, stats


@pytest.mark.usefixtures("_ranks_are_threads")
def test_rearranged_records_are_encoded_in_the_background(tmp_path: Path, gate: Gate) -> None:
    """What comes from other ranks lands in the memory that is encoded from; the files are those without threads."""
    expected, _ = rearranged(tmp_path / "0", 0)
    gate.clear()
    found, stats = rearranged(tmp_path / "1", 1, gate)
    assert found == expected
    assert len(found) > 3 * 2 * 4
    assert {s.mode for s in stats if s.nbytes_in} == {"background"}
    # Only what a rank holds whole is copied.
    assert sum(s.nbytes_copied for s in stats) < sum(s.nbytes_in for s in stats)


@pytest.mark.usefixtures("_ranks_are_threads")
@pytest.mark.parametrize(("cores", "expected"), [(2, (0, "write-behind", 1)), (6, (2, "background", 1))])
def test_ranks_of_a_node_share_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, expected: tuple[int, str, int]
) -> None:
    """By what they say of themselves when the store is opened."""
    said = {"mask": f"{2**cores - 1:x}", "promised": None}
    monkeypatch.setattr("mpistream.session.cores_of_this_process", lambda: said)
    world = MemoryWorld(3, 60)

    def run(transport: MemoryTransport) -> Any:
        comm: Any = (world, transport.rank)
        with ms.write_open(tmp_path / "s", schema(), comm=comm, options=ms.Options(writers="all")) as w:
            return w.stats.n_cores, w.stats.mode if transport.rank == 0 else "", w.stats.threads

    found = run_ranks(3, run, timeout=100)
    assert found[0] == expected
    assert [(f[0], f[2]) for f in found] == [(expected[0], expected[2])] * 3

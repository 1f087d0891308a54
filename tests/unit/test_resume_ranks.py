"""Runs that are resumed on every number of ranks after every other, with ranks as threads over one store in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from mpistream import session
from mpistream.memory_store import MemoryStore
from mpistream.resuming import Resumed
from tests.support.ranks import MemoryTransport, run_ranks

SIZES = [1, 2, 3, 4, 6]
PAIRS = list(itertools.product(SIZES, SIZES))
LAYOUTS = [(1, 1, "/"), (4, 1, "."), (4, 2, "/")]
NY, NX = 7, 5
N = 11
OPTIONS = ms.Options(durability="none", threads=0, lease_ttl=100_000, timeout=30)

Runs = dict[int, int]
"""Record -> the run that wrote it."""


@pytest.fixture(autouse=True)
def _threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "connect", lambda comm, timeout: comm)


def time_of(record: int) -> float:
    return 0.1 + 1.7 * record


def whole(record: int, run: int) -> NDArray[np.float64]:
    """Return a record in a closed form of its number, the run and the index of the cell; thirds fill the mantissa."""
    y, x = np.indices((NY, NX))
    return (1000 * record + 37 * y + 311 * x + 50_000 * run) / 3


def payload(rank: int, record: int, run: int) -> bytes:
    return f"rank {rank} record {record} run {run}".encode()


def make_schema(layout: tuple[int, int, str], *, indexed: bool) -> ms.StreamSchema:
    row, inner, separator = layout
    times = [time_of(i) for i in range(N)]
    return ms.StreamSchema(
        dims={"time": None, "y": NY, "x": NX},
        time=ms.IndexedTime(times, units="s") if indexed else ms.AppendTime(units="s"),
        variables={
            "u": ms.Variable(("time", "y", "x"), "float64"),
            "total": ms.Variable(("time",), "float64"),
        },
        statics={"topo": ms.Variable(("y", "x"), "float64")},
        coords={"y": ms.Coordinate(("y",), np.arange(NY) / 2)},
        shard_shape={"time": row, "y": 2, "x": 3},
        chunk_shape={"time": inner, "y": 1, "x": 3},
        key_separator=separator,
    )


def write(w: ms.StreamWriter, rank: int, record: int, run: int) -> None:
    y, x = w.region["y"], w.region["x"]
    block: dict[str, Any] = {"u": whole(record, run)[slice(*y), slice(*x)], "total": record / 3 + run}
    if w.schema.n_total is None:
        w.write_record(time_of(record), block)
    else:
        w.write_record_at(record, time_of(record), block)
    w.write_blob("rng", payload(rank, record, run), record)


def on(n: int, store: Any, body: Callable[[ms.StreamWriter, int], object], **resume: Any) -> list[ms.StreamWriter]:
    """Resume on n ranks, or create with a schema; do the body, and close."""

    def rank_main(transport: MemoryTransport) -> ms.StreamWriter:
        if (schema := resume.get("create")) is not None:
            writer = ms.write_open(store, schema, comm=transport, options=OPTIONS)
        else:
            writer = ms.write_resume(store, comm=transport, options=OPTIONS, **resume)
        with writer:
            body(writer, transport.rank)
        return writer

    return run_ranks(n, rank_main)


def assert_holds(store: Any, runs: Runs, writers: dict[int, int]) -> None:
    """Assert that a store has exactly these records, with a blob of every rank of the run that wrote each."""
    reader = ms.open_reader(store)
    assert [i for a, b in reader.committed for i in range(a, b)] == sorted(runs)
    assert reader.manifest.last_t == (time_of(max(runs)) if runs else None)
    n_times = N if reader.schema.n_total else len(runs)
    np.testing.assert_array_equal(reader.times, [time_of(i) for i in range(n_times)], strict=True)
    for i, run in runs.items():
        np.testing.assert_array_equal(reader.read_record("u", i), whole(i, run), err_msg=f"{i}", strict=True)
        assert reader.read_record("total", i) == i / 3 + run
    np.testing.assert_array_equal(reader.read_static("topo"), whole(0, 0), strict=True)
    np.testing.assert_array_equal(reader.read_static("y"), np.arange(NY) / 2, strict=True)
    assert reader.blobs() == sorted(
        [(rank, i, "rng") for i, run in runs.items() for rank in range(writers[run])], key=lambda b: (b[0], str(b[1]))
    )
    for i, run in runs.items():
        for rank in range(writers[run]):
            assert reader.read_blob("rng", i, rank) == payload(rank, i, run)


def assert_as_uninterrupted(store: Any, layout: tuple[int, int, str], runs: Runs, *, indexed: bool) -> None:
    """Assert that a store is the one that a single run on a single rank writes."""
    other: Any = MemoryStore()

    def body(w: ms.StreamWriter, rank: int) -> None:
        w.write_static("topo", whole(0, 0))
        for record, run in sorted(runs.items()):
            write(w, rank, record, run)

    on(1, other, body, create=make_schema(layout, indexed=indexed))
    ours, theirs = ms.open_reader(store), ms.open_reader(other)
    for name in ("committed", "last_t", "times_digest", "fingerprint", "coordinates_digest", "statics", "n_records"):
        assert getattr(ours.manifest, name) == getattr(theirs.manifest, name), name
    for i in runs:
        assert ours.read_record("u", i).tobytes() == theirs.read_record("u", i).tobytes()


CASES = [pytest.param(*pair, LAYOUTS[k % len(LAYOUTS)], id="{}-{}".format(*pair)) for k, pair in enumerate(PAIRS)]


@pytest.mark.parametrize(("before", "after", "layout"), CASES)
def test_a_time_dim_that_grows(before: int, after: int, layout: tuple[int, int, str]) -> None:
    """Inside a row, twice in a row with falling `at`, from a part-filled row, each on other ranks than the last."""
    store: Any = MemoryStore()
    writers = {0: before, 1: after, 2: before, 3: after}

    def create(w: ms.StreamWriter, rank: int) -> None:
        y, x = w.region["y"], w.region["x"]
        w.write_static("topo", whole(0, 0)[slice(*y), slice(*x)])
        for i in range(10):
            write(w, rank, i, 0)
            if i % 4 == 2:
                w.commit()

    def go_on(start: int, stop: int, run: int, *, commits: bool = True) -> Callable[[ms.StreamWriter, int], None]:
        def body(w: ms.StreamWriter, rank: int) -> None:
            assert (w.n_records, w.last_t) == (start, time_of(start - 1) if start else None)
            for i in range(start, stop):
                write(w, rank, i, run)
                if commits and i % 3 == 0:
                    w.commit()

        return body

    on(before, store, create, create=make_schema(layout, indexed=False))
    found = on(after, store, go_on(7, 9, 1), at=time_of(6), expect_last_t=time_of(6))
    assert found[-1].resumed == resumed_as(n_dropped=3, last=6, at=time_of(6), epoch=1)
    runs = {**dict.fromkeys(range(7), 0), 7: 1, 8: 1}
    assert_holds(store, runs, writers)

    # Two restarts that end at once, each further back; the third goes on.
    on(before, store, go_on(6, 6, 2), at=time_of(5) + 0.3)
    on(after, store, go_on(3, 3, 2), at=time_of(2))
    on(before, store, go_on(2, 5, 2), at=time_of(1), expect_last_t=time_of(1))
    runs = {0: 0, 1: 0, 2: 2, 3: 2, 4: 2}
    assert_holds(store, runs, writers)

    on(after, store, go_on(5, 7, 3), expect_last_t=time_of(4))
    runs |= {5: 3, 6: 3}
    assert_holds(store, runs, writers)
    assert_as_uninterrupted(store, layout, runs, indexed=False)


def resumed_as(*, n_dropped: int, last: int, at: float | None, epoch: int) -> Any:
    return Resumed(n_dropped=n_dropped, last_t=time_of(last), at=at, previous_epoch=epoch)


@pytest.mark.parametrize(("before", "after", "layout"), CASES)
def test_a_time_dim_that_is_fixed(before: int, after: int, layout: tuple[int, int, str]) -> None:
    """With holes, in any order: what `at` drops is written again, and a restore brings back what was dropped last."""
    store: Any = MemoryStore()
    writers = {0: before, 1: after, 2: before}

    def create(w: ms.StreamWriter, rank: int) -> None:
        y, x = w.region["y"], w.region["x"]
        w.write_static("topo", whole(0, 0)[slice(*y), slice(*x)])
        for k, i in enumerate([9, 2, 6, 0, 7, 3, 5]):
            write(w, rank, i, 0)
            if k % 3 == 1:
                w.commit()

    def put(*records: int, run: int) -> Callable[[ms.StreamWriter, int], None]:
        def body(w: ms.StreamWriter, rank: int) -> None:
            for i in records:
                write(w, rank, i, run)

        return body

    on(before, store, create, create=make_schema(layout, indexed=True))
    on(after, store, put(7, 1, run=1), at=time_of(5), expect_last_t=time_of(5))
    runs = {0: 0, 1: 1, 2: 0, 3: 0, 5: 0, 7: 1}
    assert_holds(store, runs, writers)

    on(before, store, put(run=2), at=time_of(6))
    on(after, store, put(run=2), at=time_of(2), expect_last_t=time_of(2))
    kept = {i: run for i, run in runs.items() if i <= 2}
    assert_holds(store, kept, writers)
    assert ms.repair(store, restore_dropped=True).n_new_records == 3
    assert_holds(store, runs, writers)

    on(before, store, put(10, 4, run=2))
    runs |= {10: 2, 4: 2}
    assert_holds(store, runs, writers)
    assert_as_uninterrupted(store, layout, runs, indexed=True)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2), (6, 1)])
def test_an_unexpected_last_time_is_refused_on_every_rank(before: int, after: int) -> None:
    """`expect_last_t` guards a checkpoint that is ahead of the output; nothing is changed, nothing is dropped."""
    store: Any = MemoryStore()
    layout = LAYOUTS[2]

    def create(w: ms.StreamWriter, rank: int) -> None:
        y, x = w.region["y"], w.region["x"]
        w.write_static("topo", whole(0, 0)[slice(*y), slice(*x)])
        for i in range(6):
            write(w, rank, i, 0)

    on(before, store, create, create=make_schema(layout, indexed=False))

    def resume(transport: MemoryTransport) -> object:
        return ms.write_resume(store, comm=transport, at=time_of(3), expect_last_t=time_of(4), options=OPTIONS)

    errors = run_ranks(after, resume, return_exceptions=True)
    assert {(type(e).__name__, getattr(e, "kind", None)) for e in errors} == {("ResumeError", "last_t")}
    assert_holds(store, dict.fromkeys(range(6), 0), {0: before})


@pytest.mark.parametrize("n", [1, 3])
def test_an_invalidation_that_plain_readers_do_not_see_yet_is_an_error(n: int) -> None:
    """The records are invalidated, the array `committed` lags: all ranks are told, and the next commit mends it."""

    class Failing(MemoryStore):
        is_failing = False
        order: list[str] = []  # noqa: RUF012 (one store)

        def place(self, staged: str, key: str) -> None:
            if self.is_failing and key.startswith("committed/"):
                raise ms.StoreError(f"place {key}: no space", kind="io", errno=28)
            self.order.append(key)
            super().place(staged, key)

    store: Any = Failing()
    layout = (4, 2, "/")

    def create(w: ms.StreamWriter, rank: int) -> None:
        y, x = w.region["y"], w.region["x"]
        w.write_static("topo", whole(0, 0)[slice(*y), slice(*x)])
        for i in range(4):
            write(w, rank, i, 0)

    on(n, store, create, create=make_schema(layout, indexed=True))
    chunk = store.read("committed/c/0")

    def rank_main(transport: MemoryTransport) -> list[tuple[str, str]]:
        found = []
        with ms.write_resume(store, comm=transport, options=OPTIONS) as w:
            store.is_failing = True
            for call in (lambda: w.invalidate([2]), w.commit):
                try:
                    call()
                    write(w, transport.rank, 2, 1)
                except ms.CommitError as error:
                    found.append((error.kind, str(error)))
                    if len(found) == 1:
                        write(w, transport.rank, 2, 1)
            # All ranks have the second error: the store is not written before the next commit.
            assert w.n_committed == 3
            w._channel.exchange("all here")
            store.is_failing = False
            store.order.clear()
            w._channel.exchange("all here")
        return found

    errors = run_ranks(n, rank_main)
    assert errors == [errors[0]] * n
    (kind, text), (second, why) = errors[0]
    assert (kind, second) == ("not_published", "io")
    assert "the records are invalidated (commit" in text
    assert "still names them to plain readers" in text
    assert "nothing was committed" in why
    assert ms.open_reader(store).committed == ((0, 4),)
    assert_holds(store, {0: 0, 1: 0, 2: 1, 3: 0}, {0: n, 1: n})
    # Withdrawn before anything was put where the record lies, and true again after the commit.
    first = [key for key in store.order if key.startswith(("committed/", "u/"))]
    assert first[0] == "committed/c/0"
    assert first[-1] == "committed/c/0"
    assert store.read("committed/c/0") == chunk

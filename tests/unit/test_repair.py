"""Dropped records come back as they were, whatever was written meanwhile and wherever a restore is killed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.manifest import epoch_key
from mpistream.memory_store import MemoryStore
from mpistream.zarr3.shard import MISSING, parse_index
from tests.support.killed import Killed, KilledStore, copy_of
from tests.support.plain import append_schema
from tests.support.verified import assert_sound

NY, NX = 4, 3  # shards of 2 x 3, inner chunks of 1 x 3
N = 10
LAYOUTS = [(1, 1, "/"), (4, 1, "/"), (4, 2, "."), (4, 4, "/"), (16, 2, "/")]
OPTIONS = ms.Options(lease_ttl=100_000)

Facts = dict[str, Any]


def time_of(record: int) -> float:
    return 0.1 + 1.5 * record


def values(record: int, run: int = 0) -> dict[str, Any]:
    """Return all variables of a record, in a closed form of record, index and run."""
    whole = np.arange(NY * NX).reshape(NY, NX) / 3 + 100 * record + 10_000 * run
    return {"u": whole, "zonal": whole[:, 0].astype("int32"), "total": 0.1 * record + run}


def make_schema(row: int, inner: int, separator: str, *, indexed: bool = False) -> ms.StreamSchema:
    times = [time_of(i) for i in range(N)]
    return ms.StreamSchema(
        dims={"time": None, "y": NY, "x": NX},
        time=ms.IndexedTime(times, units="s") if indexed else ms.AppendTime(units="s"),
        variables={
            "u": ms.Variable(("time", "y", "x"), "float64"),
            "zonal": ms.Variable(("time", "y"), "int32"),
            "total": ms.Variable(("time",), "float64"),
        },
        statics={"depth": ms.Variable(("y", "x"), "float32")},
        shard_shape={"time": row, "y": 2, "x": 3},
        chunk_shape={"time": inner, "y": 1, "x": 3},
        key_separator=separator,
    )


def write(w: ms.StreamWriter, record: int, run: int = 0, *, blob: bool = True) -> None:
    if w.schema.n_total is None:
        w.write_record(time_of(record), values(record, run))
    else:
        w.write_record_at(record, time_of(record), values(record, run))
    if blob:
        w.write_blob("rng", f"{record} {run}".encode(), record)


def create(store: Any, layout: tuple[int, int, str], *, records: Iterable[int] = range(N), **more: Any) -> None:
    """Write records, a commit every third, with blobs and a static."""
    with ms.write_open(store, make_schema(*layout, **more), options=OPTIONS) as w:
        w.write_static("depth", 2.5)
        w.write_blob("rng", b"static")
        for n, record in enumerate(records):
            write(w, record)
            if n % 3 == 1:
                w.commit()


def leave(store: Any, at: float | None, body: Callable[[ms.StreamWriter], object] = lambda w: None) -> None:
    """Resume and end without a commit, as a run that fails does."""

    def run() -> None:
        with ms.write_resume(store, at=at, takeover=True, options=OPTIONS) as w:
            body(w)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


def facts(store: Any) -> Facts:
    """Return everything that a reader can know, but for commit_seq and epoch."""
    reader = ms.open_reader(store)
    manifest = reader.manifest
    records = [i for a, b in reader.committed for i in range(a, b)]
    return {
        "committed": reader.committed,
        "times": [float(t).hex() for t in reader.times],
        "last_t": manifest.last_t,
        "times_digest": manifest.times_digest,
        "statics": manifest.statics,
        "records": {(i, n): reader.read_record(n, i).tobytes() for i in records for n in ("u", "zonal", "total")},
        "blobs": {(w, s, k): reader.read_blob(k, s, w) for w, s, k in reader.blobs()},
        "depth": reader.read_static("depth").tobytes(),
    }


def expected(runs: dict[int, int], blobs: Iterable[int] | None = None) -> Facts:
    """Return the facts of a store with these records, each of a run, from the closed form."""
    return {
        "records": {
            (i, n): np.asarray(v, {"u": "f8", "zonal": "i4", "total": "f8"}[n]).tobytes()
            for i, run in runs.items()
            for n, v in values(i, run).items()
        },
        "blobs": {
            (0, "static", "rng"): b"static",
            **{(0, i, "rng"): f"{i} {runs[i]}".encode() for i in (runs if blobs is None else blobs)},
        },
        "last_t": time_of(max(runs)) if runs else None,
        "depth": np.full((NY, NX), 2.5, "f4").tobytes(),
    }


def assert_facts(found: Facts, wanted: Facts) -> None:
    assert {k: found[k] for k in wanted} == wanted


def assert_nothing_aside(store: Any) -> None:
    assert_sound(store)
    assert ms.open_reader(store).manifest.dropped == ()
    assert store.list(".mpistream/dropped") == []
    assert store.list(".mpistream/stage") == []


def run_on(w: ms.StreamWriter) -> None:
    """Write what is never committed, in place of what was dropped."""
    for record in range(w.n_records, w.n_records + 3):
        write(w, record, run=7)
    w.flush()


# ---- restored ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drops", "is_written"),
    [([3], True), ([6, 3], False), ([6, 3], True), ([8, 5, 1], True), ([9, 0], True), ([3, None], True)],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dropped_records_come_back_bitwise(
    layout: tuple[int, int, str], drops: Sequence[int | None], is_written: bool
) -> None:
    """Records, times, blobs, digests: all is as before, after one resume or several, and the run goes on from there."""
    store: Any = MemoryStore()
    create(store, layout)
    before = facts(store)
    assert_facts(before, expected(dict.fromkeys(range(N), 0)))
    for n_keep in drops:
        at = None if n_keep is None else time_of(n_keep - 1)
        leave(store, at, run_on if is_written else lambda w: None)
    kept = min(n for n in drops if n is not None)
    assert_facts(facts(store), expected(dict.fromkeys(range(kept), 0)))

    receipt = ms.repair(store, restore_dropped=True)
    assert (receipt.n_new_records, receipt.n_records, receipt.last_t) == (N - kept, N, time_of(N - 1))
    assert facts(store) == before
    assert_nothing_aside(store)
    with ms.write_resume(store, options=OPTIONS) as w:
        write(w, N, run=1)
    assert_facts(facts(store), expected({**dict.fromkeys(range(N), 0), N: 1}))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_records_of_a_fixed_time_dim_come_back(layout: tuple[int, int, str]) -> None:
    """With holes; what was invalidated since the drop stays so, and what is written into the holes goes on."""
    store: Any = MemoryStore()
    records = [0, 1, 2, 5, 6, 7, 9]
    create(store, layout, records=[6, 0, 9, 1, 2, 7, 5], indexed=True)
    before = facts(store)

    def body(w: ms.StreamWriter) -> None:
        w.invalidate([1])
        write(w, 1, run=7)
        write(w, 8, run=7)
        w.flush()

    leave(store, time_of(6), body)
    assert ms.open_reader(store).committed == ((0, 1), (2, 3), (5, 7))
    ms.repair(store, restore_dropped=True)
    after = facts(store)
    left = [i for i in records if i != 1]
    assert after["committed"] == ((0, 1), (2, 3), (5, 8), (9, 10))
    assert_facts(after, expected(dict.fromkeys(left, 0)))
    assert after["times"] == before["times"]
    with ms.write_resume(store, options=OPTIONS) as w:
        write(w, 1, run=2)
        write(w, 8, run=2)
    assert_facts(facts(store), expected({**dict.fromkeys(left, 0), 1: 2, 8: 2}))


def test_times_and_series_of_whole_chunks_come_back(tmp_path: Path) -> None:
    """Behind 1,024 records a chunk of time is dropped whole, and another one in part; xarray reads what is restored."""
    n = 1100
    store = str(tmp_path / "s")
    schema = ms.StreamSchema(
        dims={"time": None, "y": 1},
        time=ms.AppendTime(units="s"),
        variables={"v": ms.Variable(("time", "y"), "int32"), "s": ms.Variable(("time",), "float64")},
        shard_shape={"time": 1000, "y": 1},
    )
    with ms.write_open(store, schema, options=OPTIONS) as w:
        for i in range(n):
            w.write_record(time_of(i), {"v": i, "s": i / 3})
    leave(store, time_of(499))
    assert ms.repair(store, restore_dropped=True).n_new_records == n - 500
    found = ms.open_reader(store).to_xarray()
    np.testing.assert_array_equal(found["time"].values, [time_of(i) for i in range(n)])
    np.testing.assert_array_equal(found["v"].values[:, 0], np.arange(n))
    np.testing.assert_array_equal(found["s"].values, np.arange(n) / 3)


def test_blobs_of_an_earlier_run_stay_gone() -> None:
    """A record that replaced another one has no blob when it comes back, if it had none."""
    store: Any = MemoryStore()
    create(store, (4, 2, "/"))
    with ms.write_resume(store, at=time_of(4), options=OPTIONS) as w:
        for record in range(5, N):
            write(w, record, run=1, blob=record % 2 == 0)
    runs = {i: int(i > 4) for i in range(N)}
    blobs = [0, 1, 2, 3, 4, 6, 8]
    assert_facts(before := facts(store), expected(runs, blobs))
    leave(store, time_of(6))
    leave(store, time_of(2))
    ms.repair(store, restore_dropped=True)
    assert facts(store) == before


def test_a_resume_may_drop_again_what_was_restored() -> None:
    """And that comes back as well."""
    store: Any = MemoryStore()
    create(store, (4, 1, "/"))
    before = facts(store)
    for n_keep in (6, 2, 9):
        leave(store, time_of(n_keep - 1))
        ms.repair(store, restore_dropped=True)
        assert facts(store) == before


# ---- refused -----------------------------------------------------------------------------------------


def refused(store: Any, error: type[ms.MPIStreamError], kind: str, **more: Any) -> str:
    before = copy.deepcopy((store._objects, store._folders))
    with pytest.raises(error) as caught:
        ms.repair(store, restore_dropped=True, **more)
    assert caught.value.kind == kind
    assert (store._objects, store._folders) == before
    return str(caught.value)


def test_without_dropped_records_there_is_nothing_to_restore() -> None:
    """Nor after a commit, which has deleted them; nothing is changed."""
    store: Any = MemoryStore()
    create(store, (4, 1, "/"))
    assert "nothing to restore" in refused(store, ms.ResumeError, "nothing_dropped")
    leave(store, time_of(5))
    with ms.write_resume(store, options=OPTIONS) as w:
        write(w, 6, run=1)
    assert "a commit since has deleted them" in refused(store, ms.ResumeError, "nothing_dropped")
    assert refused(MemoryStore(), ms.ResumeError, "no_store").endswith(
        "is not a stream: it is empty; there is nothing to repair"
    )


def test_a_live_writer_is_not_disturbed() -> None:
    """Its lease refuses a repair, unless it is taken over: then it is fenced."""
    store: Any = MemoryStore()
    create(store, (4, 1, "/"))
    before = facts(store)
    leave(store, time_of(5))
    w = ms.write_resume(store, options=OPTIONS)
    with pytest.raises(ms.StoreError, match="takeover=True") as caught:
        ms.repair(store, restore_dropped=True)
    assert caught.value.kind == "lease"
    write(w, 6, run=1)
    ms.repair(store, restore_dropped=True, takeover=True)
    with pytest.raises(ms.FencedError):
        w.commit()
    with pytest.raises(ms.FencedError):
        w.close()
    assert facts(store) == before
    # Nor does a writer that has nothing to commit end as if it still had the store.
    idle = ms.write_resume(store, options=OPTIONS)
    ms.repair(store, takeover=True)
    with pytest.raises(ms.FencedError, match="took the store over from epoch"):
        idle.close()
    assert facts(store) == before


def test_a_claim_that_ended_before_its_fence_has_taken_nothing() -> None:
    """The process died between the two steps: the writer goes on, and closes as the one that has the store."""
    store: Any = MemoryStore()
    w = ms.write_open(store, append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")}), options=OPTIONS)
    w.write_record(0.0, {"v": 1.0})
    store.create(epoch_key(2), b"claimed")
    w.close()
    with ms.write_resume(store, options=OPTIONS) as resumed:
        assert (resumed.n_records, resumed.epoch) == (1, 3)


@pytest.mark.parametrize(
    ("key", "is_gone"), [("u/c/2/1/0", True), ("u/c/1/0/0", False), ("u/c/2/1/0", False), ("time/c/0", False)]
)
def test_what_is_damaged_aside_is_named_and_nothing_restored(key: str, is_gone: bool) -> None:
    """The rest of the store is as the resume left it, and can be resumed."""
    store: Any = MemoryStore()
    create(store, (4, 1, "/"))
    leave(store, time_of(5))
    before = facts(store)
    aside = next(k for k in store._objects if k.startswith(".mpistream/dropped/") and k.endswith(key))
    if is_gone:
        store.delete(aside)
    elif key.startswith("u/"):
        store._objects[aside] = store._objects[aside][:-1] + b"\xff"
    else:
        store._objects[aside] = store._objects["total/c/0"]  # a whole chunk, of other values
    with pytest.raises(ms.FormatError) as caught:
        ms.repair(store, restore_dropped=True)
    assert key in str(caught.value) or "what was set aside is damaged" in str(caught.value)
    assert facts(store) == before
    assert store.list(".mpistream/stage") == []
    with ms.write_resume(store, options=OPTIONS) as w:
        write(w, 6, run=1)


# ---- without the flag --------------------------------------------------------------------------------


def test_a_repair_finishes_what_is_left_undone() -> None:
    """Leftovers of a run that died go, documents are in step; what is committed or aside stays."""
    store: Any = MemoryStore()
    create(store, (4, 1, "/"))
    leave(store, time_of(5), run_on)
    before = facts(store)
    document = store.read("zarr.json")
    for key in ("u/c/9/0/0", "total/c/5", ".mpistream/left", ".mpistream/stage/1/0/x"):
        store.make_folder(key.rpartition("/")[0])
        store.create(key, b"left over")
    store._objects["zarr.json"] = b"{}"
    receipt = ms.repair(store)
    assert (receipt.n_new_records, receipt.n_records, receipt.epoch) == (0, 6, 3)
    assert facts(store) == before
    assert store.read("zarr.json") == document
    assert [k for k in store._objects if store._objects[k] == b"left over"] == []
    assert ms.open_reader(store).manifest.dropped != ()
    ms.repair(store, restore_dropped=True)
    assert_facts(facts(store), expected(dict.fromkeys(range(N), 0)))


# ---- killed ------------------------------------------------------------------------------------------


def kept_chunks(store: Any, n_kept: int) -> dict[str, list[tuple[int, bytes]]]:
    """Return, by key, (offset, bytes) of the inner chunks that a plain reader of the kept records looks for."""
    found: dict[str, list[tuple[int, bytes]]] = {}
    reader = ms.open_reader(store)
    for name in ("u", "zonal"):
        spec = reader.schema.arrays[name].shard_spec()
        extent = spec.chunk_shape[0]
        for key, data in store._objects.items():
            if not key.startswith(f"{name}/c"):
                continue
            row = int(key.split("/c")[1][1:].replace(".", "/").split("/")[0])
            entries = parse_index(data[-spec.index_nbytes :], spec, len(data)).reshape(*spec.n_chunks, 2)
            slabs = [entries[i] for i in range(len(entries)) if row * spec.shard_shape[0] + i * extent < n_kept]
            found[key] = [
                (int(a), data[int(a) : int(a + n)]) for s in slabs for a, n in s.reshape(-1, 2) if a != MISSING
            ]
    return found


@pytest.mark.parametrize(
    ("layout", "is_written", "step"), [((4, 2, "/"), True, 2), ((4, 2, "/"), False, 7), ((3, 1, "."), True, 7)], ids=str
)
def test_a_restore_that_is_killed_leaves_the_state_of_before_or_the_one_after(
    layout: tuple[int, int, str], is_written: bool, step: int
) -> None:
    """I6, at every call: readers meanwhile, old indices too, a resume and another repair find one of the two."""
    start: Any = MemoryStore()
    create(start, layout)
    after = facts(start)
    leave(start, time_of(6), run_on if is_written else lambda w: None)
    leave(start, time_of(4), run_on if is_written else lambda w: None)
    before = facts(start)
    chunks = kept_chunks(start, 5)
    states = []

    def watch() -> None:
        # Only what the manifest's writer and a plain reader of the kept records see.
        found = facts(store)
        assert found in (before, after)
        states.append(found is not None and found == after)
        for key, pieces in chunks.items():
            data = store._objects[key] if pieces else b""
            assert [data[a : a + len(piece)] for a, piece in pieces] == [piece for _, piece in pieces]

    for n_calls in range(0, 1000, step):
        store: Any = KilledStore(start, n_calls)
        try:
            ms.repair(store, restore_dropped=True, takeover=True)
        except Killed:
            pass
        else:
            break
        other, left = copy_of(store), copy_of(store)
        found = facts(left)
        assert found in (before, after)
        if found == after:
            with pytest.raises(ms.ResumeError):
                ms.repair(left, restore_dropped=True, takeover=True)
            ms.repair(left, takeover=True)
        else:
            ms.repair(left, restore_dropped=True, takeover=True)
        assert facts(left) == after
        assert_nothing_aside(left)
        with ms.write_resume(other, takeover=True, options=OPTIONS) as w:
            assert facts(other) == found
            write(w, w.n_records, run=2)
        assert_facts(
            facts(other), expected({**dict.fromkeys(range(N if found == after else 5), 0), w.n_records - 1: 2})
        )
        assert_nothing_aside(other)
    assert n_calls > 50
    store = KilledStore(start, 1000, watch)
    ms.repair(store, restore_dropped=True, takeover=True)
    assert facts(store) == after
    assert {*states} == {True, False}


def test_what_a_killed_resume_set_aside_in_part_is_whole_in_the_end() -> None:
    """Also a row of which it had copied some objects, when a later resume drops all of it."""
    start: Any = MemoryStore()
    create(start, (4, 1, "/"))
    before = facts(start)
    # Before that it has no manifest of its own, so the later one finds what it finds without it.
    for n_calls in range(0, 1000, 2):
        store: Any = KilledStore(start, n_calls)
        try:
            ms.write_resume(store, at=time_of(5), takeover=True, options=OPTIONS).close()
        except Killed:
            left = copy_of(store)
        else:
            break
        leave(left, time_of(-1))
        ms.repair(left, restore_dropped=True)
        assert facts(left) == before
    assert n_calls > 20

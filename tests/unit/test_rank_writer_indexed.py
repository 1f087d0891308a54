"""Writers of a fixed time dim without communication: records in any order, rows that leave memory, invalidation."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistream as ms
from mpistream.arrays import SERIES_CHUNK
from mpistream.errors import FormatError, ProtocolError, SchemaError, StoreError
from mpistream.layout import resolve_layout
from mpistream.manifest import stage_folder
from mpistream.zarr3.codecs import ChunkCodec
from tests.support.writers import Crew, read_record

SIZES = (10, 6)
N = 10
TIMES = [0.5 * i - 1 for i in range(N)]
BLOCK_NBYTES = 10 * 6 * 4


def schema(rows: int = 4, inner: int = 1, **more: Any) -> ms.StreamSchema:
    """10 records of 10 x 6 cells in shards of 4 x 3, rows and inner chunks of so many records."""
    shapes: dict[str, Any] = {
        "shard_shape": {"time": rows, "y": 4, "x": 3},
        "chunk_shape": {"time": inner, "y": 2, "x": 3},
    }
    given_: dict[str, Any] = {
        "dims": {"time": None, "y": 10, "x": 6},
        "time": ms.IndexedTime(TIMES, units="s"),
        "variables": {
            "t": ms.Variable(("time", "y", "x"), "f4", **shapes),
            "rows": ms.Variable(("time", "y"), "f8", shard_shape={"time": 1, "y": 4}),
            "energy": ms.Variable(("time",), "f8"),
        },
    }
    return resolve_layout(ms.StreamSchema(**{**given_, **more}), 1)


def record(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "t": rng.standard_normal(SIZES).astype("f4"),
        "rows": rng.standard_normal(10),
        "energy": np.float64(rng.standard_normal()),
    }


def write(crew: Crew, *numbers: int, seed: int = 0) -> None:
    for n in numbers:
        crew.write_at(n, TIMES[n], record(seed + n))


def members(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [n for start, stop in ranges for n in range(start, stop)]


def check(crew: Crew, seeds: dict[int, int]) -> None:
    """Exactly these records are committed, bitwise as they were written."""
    assert members(crew.manifest.committed) == sorted(seeds)
    for n, seed in seeds.items():
        for name in ("t", "rows"):
            found = read_record(crew.store, crew.schema, name, n)
            assert found.tobytes() == record(seed)[name].tobytes(), (name, n)
    if seeds:
        array = crew.schema.arrays["energy"]
        data = crew.store.read("energy/c/0")
        assert data is not None
        values = ChunkCodec(array.chain, array.dtype).decode(data, (SERIES_CHUNK,))
        assert [values[n] for n in seeds] == [record(seed)["energy"] for seed in seeds.values()]


# ---- any order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("n_writers", [1, 3])
def test_records_come_in_any_order_and_are_committed_in_parts(n_writers, rows, inner, threads) -> None:
    """Each commit adds its records; the row that several of them share keeps those of the earlier ones."""
    crew = Crew(schema(rows, inner), n_writers, threads=threads)
    expected: dict[int, int] = {}
    for part in ([7], [2, 0, 9], [1, 8, 5], [3, 6, 4]):
        write(crew, *part)
        crew.commit()
        expected |= {n: n for n in part}
        check(crew, expected)
        assert [w.n_committed for w in crew.writers] == [len(expected)] * n_writers
    crew.close()
    assert crew.manifest.committed == ((0, N),)
    assert (crew.manifest.n_records, crew.manifest.last_t) == (N, TIMES[-1])
    for writer in range(n_writers):
        assert crew.store.list(stage_folder(1, writer)) == []


def test_a_commit_of_whole_rows_takes_the_rows_that_are_full_everywhere() -> None:
    """Wherever they are; the last one has fewer records; what is committed already counts."""
    crew = Crew(schema(4))
    (writer,) = crew.writers
    write(crew, 9, 4, 5, 7, 2)
    assert writer.records_to_commit(partial_rows=False) == ()
    write(crew, 8)
    assert writer.records_to_commit(partial_rows=False) == ((8, 10),)
    crew.commit(partial_rows=False)
    check(crew, {8: 8, 9: 9})
    assert writer.times(((2, 3), (4, 6), (7, 8))) == [TIMES[n] for n in (2, 4, 5, 7)]
    crew.commit()
    write(crew, 6, 0)
    assert writer.records_to_commit(partial_rows=False) == ((6, 7),)
    crew.commit(partial_rows=False)
    check(crew, {n: n for n in (2, 4, 5, 6, 7, 8, 9)})
    assert writer.records_to_commit(partial_rows=True) == ((0, 1),)


def test_the_last_time_is_that_of_the_highest_record() -> None:
    """Written or committed, in whatever order they came."""
    crew = Crew(schema())
    (writer,) = crew.writers
    seen = []
    for n in (3, 1, 6):
        write(crew, n)
        seen.append(writer.last_t)
    assert seen == [TIMES[3], TIMES[3], TIMES[6]]
    assert crew.commit().last_t == TIMES[6]
    write(crew, 2)
    assert writer.last_t == TIMES[6]
    assert crew.commit().last_t == TIMES[6]
    assert crew.invalidate(6).last_t == TIMES[3]


def test_a_token_counts_the_records_that_are_new() -> None:
    """Not their committed neighbours in the same objects."""
    crew = Crew(schema(4))
    (writer,) = crew.writers
    write(crew, 0, 3)
    crew.commit()
    write(crew, 6, 1)
    records = writer.stage(partial_rows=True)
    writer.place(records)
    token = writer.token(records)
    assert token.records == ((1, 2), (6, 7))
    assert token.n_cells == {"t": 2 * 60, "rows": 2 * 10, "energy": 2}
    # 6 shards of t a row, 3 of rows a record, and the chunk of energy
    assert token.n_objects == 2 * 6 + 2 * 3 + 1
    assert token.last_t == TIMES[6]


# ---- what is refused ---------------------------------------------------------------------------------


def refused(call: Any, kind: str, *parts: str) -> None:
    with pytest.raises(SchemaError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("index", "t", "kind", "parts"),
    [
        (10, 4.0, "index", ("index 10: there are 10 times, 0 to 9",)),
        (-1, 3.5, "index", ("index -1: there are 10 times, 0 to 9",)),
        (1.0, -0.5, "index", ("index 1.0 is not an integer",)),
        ("1", -0.5, "index", ("index '1' is not an integer",)),
        (1, -1.0, "time", ("t = -1.0 at index 1, the schema's time is -0.5",)),
        (1, float("nan"), "time", ("t = nan",)),
        (2, 0.0, "written", ("record 2 was written since the last commit",)),
        (0, -1.0, "committed", ("record 0 is committed; call invalidate([0]) on every rank",)),
    ],
)
def test_a_bad_record_changes_nothing(index, t, kind, parts) -> None:
    """Of a wrong index or time, or one that is there already."""
    crew = Crew(schema())
    (writer,) = crew.writers
    write(crew, 0)
    crew.commit()
    write(crew, 2)
    refused(lambda: writer.write_record_at(index, t, record(77)), kind, *parts)
    assert writer.records_to_commit(partial_rows=True) == ((2, 3),)
    write(crew, 1)
    crew.commit()
    check(crew, {0: 0, 1: 1, 2: 2})


def test_an_index_may_be_any_integer() -> None:
    """Of numpy too, and a 0-d array of one."""
    crew = Crew(schema())
    (writer,) = crew.writers
    for n, index in ((3, np.int32(3)), (5, np.array(5))):
        writer.write_record_at(index, TIMES[n], record(n))
    crew.commit()
    check(crew, {3: 3, 5: 5})


def test_each_kind_of_time_has_its_calls() -> None:
    """The other one's are refused, with the one to use."""
    (writer,) = Crew(schema()).writers
    refused(lambda: writer.write_record(0.0, record(0)), "mode", "use write_record_at(index, t, arrays)")
    (append,) = Crew(schema(time=ms.AppendTime(units="s"))).writers
    refused(lambda: append.write_record_at(0, 0.0, record(0)), "mode", "use write_record(t, arrays)")
    refused(lambda: append.checked_for_invalidate([0]), "mode", "invalidate does not fit")


# ---- rows that leave memory --------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize(("rows", "inner"), [(4, 1), (4, 2), (4, 4), (2, 1)])
def test_open_rows_beyond_the_bound_leave_memory_and_come_back(rows, inner, threads) -> None:
    """All records in an order that opens every row again and again; at most one row more than the bound is held."""
    crew = Crew(schema(rows, inner), 2, threads=threads, max_pending_nbytes=BLOCK_NBYTES)
    order = [0, 4, 8, 1, 5, 9, 2, 6, 3, 7]
    for n in order:
        write(crew, n)
        for writer in crew.writers:
            held = writer._rows["t"]
            assert held.n_open == 1 or held.nbytes <= BLOCK_NBYTES
    staged = [crew.store.list(stage_folder(1, w)) for w in range(2)]
    crew.commit()
    crew.close()
    assert all(staged)
    check(crew, {n: n for n in order})


def test_a_row_that_left_memory_is_one_object_a_shard_in_the_stage_folder() -> None:
    """What it was before is removed when more of it was staged."""
    crew = Crew(schema(4), max_pending_nbytes=1)
    for n in (0, 4, 1, 5, 2):
        write(crew, n)
    # Rows of t: the open one is staged too, as it was; rows: 3 objects a record.
    assert len(crew.store.list(stage_folder(1, 0))) == 2 * 6 + 5 * 3
    crew.commit()
    check(crew, {n: n for n in (0, 1, 2, 4, 5)})


def test_without_partial_rows_what_left_memory_waits_for_its_row() -> None:
    """It is staged and not placed; the next commit takes it."""
    crew = Crew(schema(4), max_pending_nbytes=1)
    write(crew, 0, 4, 1, 5, 6, 7)
    crew.commit(partial_rows=False)
    check(crew, {n: n for n in (4, 5, 6, 7)})
    write(crew, 8, 2)
    crew.commit()
    check(crew, {n: n for n in (0, 1, 2, 4, 5, 6, 7, 8)})


def test_a_staged_row_that_can_not_be_read_breaks_the_record_and_not_the_store() -> None:
    """The writer says so until it rolls back; what is committed stays."""
    crew = Crew(schema(4), max_pending_nbytes=1)
    (writer,) = crew.writers
    write(crew, 3)
    crew.commit()
    write(crew, 0, 4)
    crew.store.fail("read", StoreError("read: input/output error", kind="io", errno=errno.EIO))
    with pytest.raises(StoreError, match="input/output error"):
        write(crew, 1)
    assert writer.records_to_commit(partial_rows=True) == ((0, 1), (4, 5))
    with pytest.raises(ProtocolError, match="taken in part"):
        writer.stage(partial_rows=True)
    writer.rollback()
    assert crew.store.list(stage_folder(1, 0)) == []
    write(crew, 1, seed=50)
    crew.commit()
    check(crew, {1: 51, 3: 3})


def test_a_row_goes_on_after_the_sync_of_its_names_failed() -> None:
    """It left memory and was placed: its bytes lie under its key."""
    crew = Crew(schema(4), max_pending_nbytes=1)
    (writer,) = crew.writers
    write(crew, 0, 4)
    records = writer.stage(partial_rows=True)
    crew.store.fail("sync_folders", StoreError("sync: input/output error", kind="io", errno=errno.EIO))
    with pytest.raises(StoreError, match="input/output error"):
        writer.place(records)
    write(crew, 1)
    crew.commit()
    check(crew, {0: 0, 1: 1, 4: 4})


# ---- committed neighbours ----------------------------------------------------------------------------


def test_a_row_with_committed_records_that_is_missing_is_refused() -> None:
    """When more of it comes: nothing is started anew over committed records."""
    crew = Crew(schema(4))
    write(crew, 0)
    crew.commit()
    crew.store.delete("t/c/0/1/0")
    write(crew, 4)
    with pytest.raises(FormatError, match="t/c/0/1/0: the shard of committed records is missing"):
        write(crew, 1)


@pytest.mark.parametrize("inner", [1, 2, 4])
@pytest.mark.parametrize("n_writers", [1, 2])
def test_another_opening_goes_on_in_any_row(inner, n_writers) -> None:
    """On another number of ranks; what was placed and not committed before is dropped."""
    crew = Crew(schema(4, inner), 3)
    write(crew, 0, 2, 5)
    crew.commit()
    write(crew, 1, 6, seed=20)
    for writer in crew.writers:
        writer.place(writer.stage(partial_rows=True))
    again = Crew(crew.schema, n_writers, store=crew.store, manifest=crew.manifest)
    check(again, {0: 0, 2: 2, 5: 5})
    write(again, 3, 6, 9)
    again.commit()
    check(again, {n: n for n in (0, 2, 3, 5, 6, 9)})


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("staged", [False, True])
def test_a_rollback_drops_what_is_not_committed(rows, staged) -> None:
    """From memory and the stage folder; the same records may be written again."""
    crew = Crew(schema(rows), 2)
    write(crew, 1, 6)
    crew.commit()
    write(crew, 0, 9, seed=40)
    for writer in crew.writers:
        if staged:
            writer.stage(partial_rows=True)
        writer.rollback()
        assert (writer.n_records, writer.last_t, writer.has_pending(())) == (2, TIMES[6], False)
        assert crew.store.list(stage_folder(1, writer.writer)) == []
    write(crew, 0, 4)
    crew.commit()
    check(crew, {n: n for n in (0, 1, 4, 6)})


# ---- invalidation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [1, 2, 4])
def test_a_record_is_written_again_after_it_was_invalidated(inner) -> None:
    """Its neighbours in the row and in the inner chunk keep their bytes."""
    crew = Crew(schema(4, inner), 2)
    write(crew, *range(8))
    crew.commit()
    assert crew.invalidate(2, 5, 6).committed == ((0, 2), (3, 5), (7, 8))
    check(crew, {n: n for n in (0, 1, 3, 4, 7)})
    write(crew, 2, 6, seed=30)
    crew.commit()
    check(crew, {0: 0, 1: 1, 2: 32, 3: 3, 4: 4, 6: 36, 7: 7})


@pytest.mark.parametrize("inner", [1, 2, 4])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("max_pending_nbytes", [10**6, 1])
def test_pending_records_outlast_an_invalidation_of_their_row(inner, staged, max_pending_nbytes) -> None:
    """The row is open with the committed records in it: what is written again is what counts."""
    crew = Crew(schema(4, inner), max_pending_nbytes=max_pending_nbytes)
    write(crew, 0, 1, 4)
    crew.commit()
    write(crew, 2, 5)
    if staged:
        crew.writers[0].stage(partial_rows=True)
    crew.invalidate(0, 4)
    write(crew, 0, seed=60)
    crew.commit()
    check(crew, {0: 60, 1: 1, 2: 2, 5: 5})
    write(crew, 3, 4, seed=70)
    crew.commit()
    check(crew, {0: 60, 1: 1, 2: 2, 3: 73, 4: 74, 5: 5})


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([3], "record 3 is not committed, so it need not be invalidated"),
        ([0, 1, 2], "record 2 is not committed"),
        ([-1], "record -1 is not committed"),
        ([0.5], "give a sequence of integers"),
        (7, "give a sequence of integers"),
        (["0"], "give a sequence of integers"),
    ],
    ids=repr,
)
def test_only_committed_records_are_invalidated(indices, message) -> None:
    """One that is pending is not, nor one that was never written."""
    crew = Crew(schema())
    write(crew, 0, 1)
    crew.commit()
    write(crew, 3)
    refused(lambda: crew.writers[0].checked_for_invalidate(indices), "index", message)


def test_the_records_to_invalidate_are_a_set() -> None:
    """In any order, once or twice."""
    crew = Crew(schema())
    write(crew, 0, 1, 2, 7)
    crew.commit()
    assert crew.writers[0].checked_for_invalidate(iter([7, 1, 0, 1])) == ((0, 2), (7, 8))
    assert crew.writers[0].checked_for_invalidate([]) == ()


# ---- any history -------------------------------------------------------------------------------------

_CALLS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, N - 1)),
    st.tuples(st.just("write"), st.integers(0, N - 1)),
    st.tuples(st.sampled_from(["commit", "whole rows", "stage", "rollback"]), st.just(0)),
    st.tuples(st.just("invalidate"), st.integers(0, N - 1)),
)


@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (6, 3)]),
    st.sampled_from([10**6, 1, 3 * BLOCK_NBYTES]),
    st.lists(_CALLS, max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_any_order_of_calls_keeps_what_is_committed(n_writers, extents, max_pending_nbytes, calls) -> None:
    """Writes, commits, rollbacks and invalidations: the store holds the committed records, as last written."""
    crew = Crew(schema(*extents), n_writers, max_pending_nbytes=max_pending_nbytes)
    pending: dict[int, int] = {}
    committed: dict[int, int] = {}
    for step, (call, n) in enumerate(calls):
        if call == "write" and n not in pending and n not in committed:
            crew.write_at(n, TIMES[n], record(100 + step))
            pending[n] = 100 + step
        elif call == "invalidate" and n in committed:
            crew.invalidate(n)
            del committed[n]
        elif call == "rollback":
            for writer in crew.writers:
                writer.rollback()
            pending = {}
        elif call == "stage":
            for writer in crew.writers:
                writer.stage(partial_rows=True)
        elif call in ("commit", "whole rows"):
            crew.commit(partial_rows=call == "commit")
            rows = [range(a, min(a + extents[0], N)) for a in range(0, N, extents[0])]
            full = {i for row in rows if all(i in pending or i in committed for i in row) for i in row}
            taken = {k: s for k, s in pending.items() if call == "commit" or k in full}
            committed |= taken
            pending = {k: s for k, s in pending.items() if k not in taken}
        check(crew, committed)

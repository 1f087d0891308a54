"""Rows: blocks in, finished objects out, and back to what is committed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpistream.arrays import SERIES_CHUNK, ArraySpec, Role
from mpistream.errors import FormatError
from mpistream.memory_store import MemoryStore
from mpistream.ranges import Ranges
from mpistream.rows import ShardRows, encode_whole
from mpistream.series import SeriesRows, read_series_chunk
from mpistream.staged import StagedObject
from mpistream.staging import Stager
from mpistream.zarr3.codecs import ChunkCodec, profile_chain
from tests.support.shards import read_whole
from tests.support.zarr_bytes import ZarrArray

F4 = np.dtype("float32")
BLOCK_BOX = ((4, 10), (0, 6))  # of 10 x 6 cells, in shards of 4 x 3: the last row of them is cut
BOXES = [BLOCK_BOX]


def spec(**changes: Any) -> ArraySpec:
    given: dict[str, Any] = {
        "name": "t",
        "role": Role.VARIABLE,
        "dims": ("time", "y", "x"),
        "shape": (10, 6),
        "dtype": F4,
        "fill": np.array(np.nan, "f4"),
        "attrs": {},
        "chain": tuple(profile_chain("fast", F4)),
        "shard_shape": (1, 4, 3),
        "chunk_shape": (1, 2, 3),
    }
    return ArraySpec(**{**given, **changes})


ROW_OF_4 = spec(shard_shape=(4, 4, 3), chunk_shape=(2, 2, 3))
STATIC = spec(role=Role.STATIC, dims=("y", "x"), shard_shape=(4, 3), chunk_shape=(2, 3))


class Rows(ShardRows):
    """Rows whose objects are taken at once."""

    def put(self, *arguments: Any) -> list[StagedObject]:
        return list(super().put(*arguments))

    def partial(self) -> list[StagedObject]:
        return list(super().partial())

    def leave(self, records: Ranges) -> list[StagedObject]:
        return list(super().leave(records))

    def leave_oldest(self) -> list[StagedObject]:
        return list(super().leave_oldest())


def rows_of(
    array: ArraySpec,
    *,
    separator: str = "/",
    is_durable: bool = True,
    boxes: Any = BOXES,
    store: MemoryStore | None = None,
    n_total: int | None = None,
) -> Rows:
    found = store or MemoryStore()
    stager = Stager(found, "", 1, threads=0, max_pending_nbytes=1)
    return Rows(
        array, separator, [BLOCK_BOX], boxes, store=found, n_total=n_total, is_durable=is_durable, stager=stager
    )


def block(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((6, 6)).astype("f4")


def bytes_of(found: StagedObject) -> bytes:
    return b"".join(bytes(p) for p in found.pieces or ())


def records_of(objects: list[StagedObject]) -> list[int]:
    """The records of one row's objects: every object has the same."""
    (found,) = {o.records for o in objects}
    assert found is not None
    return sorted(found)


def values_of(array: ArraySpec, objects: list[StagedObject]) -> Any:
    """What the objects of one row hold of the block: records, y, x."""
    out = np.full((array.row_length, 6, 6), 77, "f4")
    for found in objects:
        y, x = map(int, found.key.replace(".", "/").split("/")[-2:])
        part = out[:, 4 * y - 4 : 4 * y, 3 * x : 3 * x + 3]
        part[...] = read_whole(array.shard_spec(), bytes_of(found))[:, : part.shape[1]]
    return out


# ---- sharded arrays ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("separator", "keys"), [("/", "t/c/{}/{}/{}"), (".", "t/c.{}.{}.{}")])
def test_a_record_a_row_gives_objects_at_once(separator, keys) -> None:
    """One a shard, with its key, its records, its cells inside the array and its bytes."""
    rows = rows_of(spec(), separator=separator)
    for i in range(3):
        objects = rows.put(i, [block(i)])
        assert [o.key for o in objects] == [keys.format(i, y, x) for y in (1, 2) for x in (0, 1)]
        assert [o.n_cells for o in objects] == [12, 12, 6, 6]
        assert {(o.name, o.records, o.must_sync) for o in objects} == {("t", frozenset([i]), True)}
        assert [o.nbytes for o in objects] == [len(bytes_of(o)) for o in objects]
        assert values_of(spec(), objects)[0].tolist() == block(i).tolist()
        assert rows.partial() == []
        assert (rows.n_open, rows.nbytes) == (0, 0)


def test_a_row_of_several_records_gives_objects_when_it_is_full() -> None:
    """Before that, nothing; then the whole row, and the next one begins."""
    rows = rows_of(ROW_OF_4)
    for row in range(2):
        found = [rows.put(4 * row + i, [block(4 * row + i)]) for i in range(4)]
        assert found[:3] == [[], [], []]
        assert records_of(found[3]) == list(range(4 * row, 4 * row + 4))
        assert {o.key.split("/")[2] for o in found[3]} == {str(row)}
        assert values_of(ROW_OF_4, found[3]).tolist() == [block(4 * row + i).tolist() for i in range(4)]
        assert rows.n_open == 0


def test_a_row_that_is_filled_in_part_is_given_on_demand() -> None:
    """Each time it has grown, under the same keys; the rest is fill."""
    rows = rows_of(ROW_OF_4)
    assert rows.partial() == []
    rows.put(0, [block(0)])
    first = rows.partial()
    assert records_of(first) == [0]
    assert rows.partial() == []
    rows.put(1, [block(1)])
    rows.put(2, [block(2)])
    second = rows.partial()
    assert [o.key for o in second] == [o.key for o in first]
    assert records_of(second) == [0, 1, 2]
    held = values_of(ROW_OF_4, second)
    assert held[:3].tolist() == [block(i).tolist() for i in range(3)]
    assert np.isnan(held[3]).all()
    full = rows.put(3, [block(3)])
    assert values_of(ROW_OF_4, full).tolist() == [block(i).tolist() for i in range(4)]
    assert rows.partial() == []


def test_a_static_is_one_row_without_time() -> None:
    """Its keys have no time, its objects no records."""
    objects = rows_of(STATIC).put(0, [block(0)])
    assert [o.key for o in objects] == ["t/c/1/0", "t/c/1/1", "t/c/2/0", "t/c/2/1"]
    assert {o.records for o in objects} == {None}
    assert [o.n_cells for o in objects] == [12, 12, 6, 6]
    assert values_of(STATIC, objects)[0].tolist() == block(0).tolist()


def test_only_the_own_boxes_are_written() -> None:
    """Of a block that holds more, for example where a lower rank holds the shard too."""
    rows = rows_of(spec(), boxes=[((4, 8), (3, 6)), ((8, 10), (0, 3))])
    assert [o.key for o in rows.put(0, [block(0)])] == ["t/c/0/1/1", "t/c/0/2/0"]
    assert rows.writes
    assert not rows_of(spec(), boxes=[]).writes


def test_objects_that_replace_committed_records_are_synced_always() -> None:
    """Without durability the others need not be."""
    rows = rows_of(ROW_OF_4, is_durable=False)
    rows.put(0, [block(0)])
    assert {o.must_sync for o in rows.partial()} == {False}
    rows.committed(((0, 1),))
    for i in range(1, 3):
        rows.put(i, [block(i)])
        objects = rows.partial()
        assert {o.must_sync for o in objects} == {True}
        assert records_of(objects) == list(range(1, i + 1))
    assert {o.must_sync for o in rows.put(3, [block(3)])} == {True}
    rows.committed(((0, 4),))
    rows.put(4, [block(4)])
    assert {o.must_sync for o in rows.partial()} == {False}


def test_an_object_that_may_replace_committed_records_later_is_synced_too() -> None:
    """What was placed before it can be committed before it is placed: without MPI somebody else commits."""
    store = MemoryStore()
    rows = rows_of(ROW_OF_4, is_durable=False, store=store)
    rows.put(0, [block(0)])
    first = rows.partial()
    assert {o.must_sync for o in first} == {False}
    stored(first, store)
    for i in range(1, 3):
        rows.put(i, [block(i)])
        assert {o.must_sync for o in rows.partial()} == {True}
    assert {o.must_sync for o in rows.put(3, [block(3)])} == {True}


# ---- back to what is committed -----------------------------------------------------------------------


def stored(objects: list[StagedObject], store: MemoryStore | None = None) -> MemoryStore:
    """Put the objects under their keys."""
    store = store or MemoryStore()
    for found in objects:
        store.make_folder(found.key.rpartition("/")[0])
        store.delete(found.key)
        store.create(found.key, bytes_of(found))
        found.pieces, found.staged_key, found.is_placed = None, "gone", True
    return store


@pytest.mark.parametrize("n_committed", range(1, 4))
def test_a_row_that_is_filled_in_part_is_read_back(n_committed) -> None:
    """Its committed records only; other ones follow."""
    store = MemoryStore()
    rows = rows_of(ROW_OF_4, store=store)
    for i in range(3):
        rows.put(i, [block(i)])
    stored(rows.partial(), store)
    for again in (rows, rows_of(ROW_OF_4, store=store)):
        again.reset(((0, n_committed),))
        assert again.n_open == 1
        assert again.partial() == []
        for i in range(n_committed, 4):
            objects = again.put(i, [block(10 + i)])
        assert records_of(objects) == list(range(n_committed, 4))
        expected = [block(i if i < n_committed else 10 + i).tolist() for i in range(4)]
        assert values_of(ROW_OF_4, objects).tolist() == expected
        assert {o.must_sync for o in objects} == {True}


def test_after_a_full_row_nothing_is_read() -> None:
    """The store may be empty."""
    rows = rows_of(ROW_OF_4)
    rows.put(0, [block(0)])
    rows.reset(((0, 8),))
    assert (rows.n_open, rows.partial()) == (0, [])
    assert {o.key.split("/")[2] for o in [rows.put(8 + i, [block(i)]) for i in range(4)][3]} == {"2"}


def damaged_at(objects: list[StagedObject], key: str, *, missing: bool) -> MemoryStore:
    """A store of the objects in which one is missing or has lost its last byte."""
    store = stored(objects)
    data = store.read(key)
    assert data is not None
    store.delete(key)
    if not missing:
        store.create(key, data[:-1])
    return store


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("t/c/0/2/0", "missing", r"^t/c/0/2/0: the shard of committed records is missing"),
        ("t/c/0/1/1", "index", r"^t/c/0/1/1: the index's stored CRC32C differs"),
    ],
)
def test_a_row_that_can_not_be_read_back_is_refused_with_its_key(key, kind, message) -> None:
    """Missing or damaged: FormatError, and the key in front; at once, or when more of the row comes."""
    rows = rows_of(ROW_OF_4)
    rows.put(0, [block(0)])
    store = damaged_at(rows.partial(), key, missing=kind == "missing")
    with pytest.raises(FormatError, match=message) as caught:
        rows_of(ROW_OF_4, store=store).reset(((0, 1),))
    assert caught.value.kind == kind
    indexed = rows_of(ROW_OF_4, store=store, n_total=8)
    indexed.reset(((0, 1),))
    indexed.put(4, [block(4)])
    with pytest.raises(FormatError, match=message) as caught:
        indexed.put(2, [block(2)])
    assert caught.value.kind == kind


def test_a_rank_without_shards_reads_nothing_back() -> None:
    """Whatever is committed."""
    rows = rows_of(ROW_OF_4, boxes=[])
    rows.reset(((0, 3),))
    assert rows.n_open == 0


# ---- records in any order ----------------------------------------------------------------------------


def expected_row(values: dict[int, int]) -> Any:
    """Record in the row -> seed; the others are fill."""
    out = np.full((4, 6, 6), np.nan, "f4")
    for n, seed in values.items():
        out[n] = block(seed)
    return out


def test_rows_of_a_fixed_time_dim_are_filled_in_any_order() -> None:
    """Several are open; each gives its objects when it has all its records, the last one with fewer."""
    rows = rows_of(ROW_OF_4, n_total=10)
    full = {}
    for n in (9, 2, 5, 0, 4, 8, 3, 7, 6, 1):
        if objects := rows.put(n, [block(n)]):
            full[n] = objects
    assert list(full) == [8, 6, 1]
    assert [records_of(o) for o in full.values()] == [[8, 9], [4, 5, 6, 7], [0, 1, 2, 3]]
    for n, start, length in ((8, 8, 2), (6, 4, 4), (1, 0, 4)):
        expected = expected_row({i: start + i for i in range(length)})
        assert values_of(ROW_OF_4, full[n]).tobytes() == expected.tobytes()
    assert (rows.n_open, rows.nbytes, rows.partial()) == (0, 0, [])


def test_partial_rows_of_a_fixed_time_dim_are_given_each() -> None:
    """Those that have grown since, with the records that they hold."""
    rows = rows_of(ROW_OF_4, n_total=8)
    rows.put(6, [block(6)])
    rows.put(1, [block(1)])
    found = rows.partial()
    assert [sorted(o.records or ()) for o in found] == [[6]] * 4 + [[1]] * 4
    rows.put(4, [block(4)])
    again = rows.partial()
    assert records_of(again) == [4, 6]
    assert values_of(ROW_OF_4, again).tobytes() == expected_row({0: 4, 2: 6}).tobytes()
    assert rows.partial() == []


@pytest.mark.parametrize("state", ["memory", "staged", "placed", "sync failed"])
@pytest.mark.parametrize("inner", [1, 2, 4])
def test_a_row_that_left_memory_is_read_back_when_more_of_it_comes(inner, state) -> None:
    """From memory while the disk is slow, from the stage folder, or from its key."""
    array = spec(shard_shape=(4, 4, 3), chunk_shape=(inner, 2, 3))
    store = MemoryStore()
    rows = rows_of(array, n_total=12, store=store)
    for n in (1, 4, 3, 9):
        rows.put(n, [block(n)])
    assert rows.n_open == 3
    alone = rows_of(array, n_total=12)
    alone.put(9, [block(9)])
    objects = rows.leave_oldest()
    # Row 0 was written to after row 1.
    assert {o.key.split("/")[2] for o in objects} == {"1"}
    objects = rows.leave_oldest()
    assert {o.key.split("/")[2] for o in objects} == {"0"}
    assert records_of(objects) == [1, 3]
    assert rows.n_open == 1
    assert rows.nbytes == alone.nbytes
    assert values_of(array, objects).tobytes() == expected_row({1: 1, 3: 3}).tobytes()
    for i, found in enumerate(objects if state != "memory" else []):
        found.staged_key = f"stage/{i}"
        store.make_folder("stage")
        store.create(found.staged_key, bytes_of(found))
        found.pieces = None
        if state != "staged":
            store.make_folder(found.key.rpartition("/")[0])
            store.place(found.staged_key, found.key)
            found.is_placed = True
        if state == "sync failed":
            found.is_placed, found.staged_key = False, None
    rows.put(0, [block(0)])
    assert rows.n_open == 2
    full = rows.put(2, [block(2)])
    assert records_of(full) == [0, 1, 2, 3]
    assert [o.key for o in full] == [o.key for o in objects]
    assert values_of(array, full).tobytes() == expected_row({i: i for i in range(4)}).tobytes()


def test_a_row_that_did_not_grow_leaves_memory_without_new_objects() -> None:
    """What was made of it stands, and is what is read back."""
    rows = rows_of(ROW_OF_4, n_total=8)
    rows.put(1, [block(1)])
    objects = rows.partial()
    assert rows.leave_oldest() == []
    assert rows.n_open == 0
    rows.put(2, [block(2)])
    again = rows.partial()
    assert records_of(again) == [1, 2]
    assert [o.key for o in again] == [o.key for o in objects]
    assert values_of(ROW_OF_4, again).tobytes() == expected_row({1: 1, 2: 2}).tobytes()


@pytest.mark.parametrize("inner", [1, 2, 4])
@pytest.mark.parametrize("again", [False, True])
def test_committed_neighbours_keep_their_bytes(inner, again) -> None:
    """A row with committed records is read back, now or by another writer, and only the new ones are counted."""
    array = spec(shard_shape=(4, 4, 3), chunk_shape=(inner, 2, 3))
    store = MemoryStore()
    rows = rows_of(array, n_total=8, store=store, is_durable=False)
    for n in (3, 0):
        rows.put(n, [block(n)])
    first = rows.partial()
    data = {o.key: bytes_of(o) for o in first}
    assert {o.must_sync for o in first} == {False}
    stored(first, store)
    committed = ((0, 1), (3, 4))
    if again:
        rows = rows_of(array, n_total=8, store=store, is_durable=False)
        rows.reset(committed)
    else:
        rows.committed(committed)
    assert rows.n_open == 0
    rows.put(1, [block(11)])
    objects = rows.partial()
    assert records_of(objects) == [1]
    assert {o.must_sync for o in objects} == {True}
    assert values_of(array, objects).tobytes() == expected_row({0: 0, 1: 11, 3: 3}).tobytes()
    spec_ = array.shard_spec()
    for found in objects:
        # Whoever read the old index still finds the committed records there.
        n = len(data[found.key]) - spec_.index_nbytes
        assert bytes_of(found)[:n] == data[found.key][:n]


@pytest.mark.parametrize("inner", [1, 2, 4])
def test_a_row_without_records_that_it_was_read_back_with_is_read_anew(inner) -> None:
    """They are not committed any more: other ones take their place, and the new records stay."""
    array = spec(shard_shape=(4, 4, 3), chunk_shape=(inner, 2, 3))
    store = MemoryStore()
    rows = rows_of(array, n_total=8, store=store)
    for n in (0, 1, 6):
        rows.put(n, [block(n)])
    stored(rows.partial(), store)
    rows.committed(((0, 2), (6, 7)))
    rows.put(2, [block(2)])
    rows.put(7, [block(7)])
    objects = rows.leave(((0, 1),))
    assert records_of(objects) == [2]
    assert rows.n_open == 1
    assert rows.leave(()) == []
    rows.committed(((1, 2), (6, 7)))
    rows.put(0, [block(10)])
    again = [o for o in rows.partial() if o.key.startswith("t/c/0/")]
    assert records_of(again) == [0, 2]
    assert values_of(array, again).tobytes() == expected_row({0: 10, 1: 1, 2: 2}).tobytes()


def test_records_of_a_row_are_committed_apart() -> None:
    """What a commit leaves out stays new, in memory or out of it."""
    store = MemoryStore()
    rows = rows_of(ROW_OF_4, n_total=8, store=store)
    for n in (0, 1, 6):
        rows.put(n, [block(n)])
    stored(rows.leave_oldest(), store)
    rows.put(5, [block(5)])
    rows.committed(((0, 1), (5, 6)))
    assert rows.n_open == 1
    assert records_of(rows.partial()) == [6]
    rows.put(2, [block(2)])
    assert rows.n_open == 2
    objects = rows.partial()
    assert records_of(objects) == [1, 2]
    assert values_of(ROW_OF_4, objects).tobytes() == expected_row({0: 0, 1: 1, 2: 2}).tobytes()
    stored(objects, store)
    rows.committed(((0, 3), (5, 7)))
    assert (rows.n_open, rows.nbytes) == (0, 0)
    assert records_of(rows.put(3, [block(3)])) == [3]


# ---- arrays that one rank writes whole ---------------------------------------------------------------


@pytest.mark.parametrize("separator", ["/", "."])
def test_a_coordinate_is_plain_chunks_that_zarr_python_reads(separator) -> None:
    """The last chunk of a dim is filled up."""
    array = spec(role=Role.COORDINATE, dims=("y", "x"), shard_shape=(4, 4), chunk_shape=(4, 4))
    values = np.arange(60, dtype="f4").reshape(10, 6)
    objects = encode_whole(array, separator, values)
    theirs = ZarrArray((10, 6), F4, array.chain, chunk_shape=(4, 4), fill=np.nan)
    for found, index in zip(objects, np.ndindex(3, 2), strict=True):
        assert found.key == f"t/c{separator}" + separator.join(map(str, index))
        theirs[index] = bytes_of(found)
    assert theirs.array[...].tolist() == values.tolist()
    assert [o.n_cells for o in objects] == [16, 8, 16, 8, 8, 4]
    assert {(o.records, o.must_sync) for o in objects} == {(None, True)}
    assert [o.nbytes for o in objects] == [len(bytes_of(o)) for o in objects]


def test_an_array_without_dims_is_one_chunk() -> None:
    """Its key ends with c."""
    array = spec(role=Role.STATIC, dims=(), shape=(), shard_shape=(), chunk_shape=())
    (found,) = encode_whole(array, "/", np.array(2.5, "f8"))
    assert (found.key, found.n_cells) == ("t/c", 1)
    assert ChunkCodec(array.chain, F4).decode(bytes_of(found), ())[()] == np.float32(2.5)


# ---- series ------------------------------------------------------------------------------------------

SERIES = spec(role=Role.SERIES, dims=("time",), shape=(), shard_shape=(SERIES_CHUNK,), chunk_shape=(SERIES_CHUNK,))
CODEC = ChunkCodec(SERIES.chain, F4)


def chunks_of(objects: list[StagedObject]) -> dict[str, list[float]]:
    """Key -> the values before the fill."""
    found = {}
    for each in objects:
        values = CODEC.decode(bytes_of(each), (SERIES_CHUNK,))
        n = int(np.isfinite(values).sum())
        assert np.isnan(values[n:]).all()
        assert (each.n_cells, each.must_sync, each.nbytes) == (1, True, len(bytes_of(each)))
        found[each.key] = values[:n].tolist()
    return found


def series(n: int) -> SeriesRows:
    found = SeriesRows(SERIES, "/", MemoryStore())
    for i in range(n):
        found.put(i, np.float32(i))
    return found


def numbers(start: int, stop: int) -> list[float]:
    return [float(i) for i in range(start, stop)]


def up_to(n: int) -> Ranges:
    return ((0, n),) if n else ()


def test_a_series_is_in_chunks_of_1024_records() -> None:
    """Filled up at the end; only the chunks that hold new records of the commit are given."""
    rows = series(2100)
    assert chunks_of(rows.objects(up_to(2100))) == {
        "t/c/0": numbers(0, 1024),
        "t/c/1": numbers(1024, 2048),
        "t/c/2": numbers(2048, 2100),
    }
    found = rows.objects(up_to(1500))
    assert [o.key for o in found] == ["t/c/0", "t/c/1"]
    assert [o.records for o in found] == [frozenset(range(1024)), frozenset(range(1024, 2048))]
    assert rows.objects(()) == []


@pytest.mark.parametrize(
    ("n_committed", "expected"),
    [
        (5, {"t/c/0": (0, 1024), "t/c/1": (1024, 1030)}),
        (1023, {"t/c/0": (0, 1024), "t/c/1": (1024, 1030)}),
        (1024, {"t/c/1": (1024, 1030)}),
        (1027, {"t/c/1": (1024, 1030)}),
    ],
)
def test_chunks_before_the_last_committed_record_are_not_written_again(n_committed, expected) -> None:
    """Nor kept in memory; a chunk that holds committed records is written with them, and counts only new ones."""
    rows = series(1030)
    rows.committed(up_to(n_committed))
    found = rows.objects(((n_committed, 1030),))
    assert chunks_of(found) == {k: numbers(*v) for k, v in expected.items()}
    assert sorted(r for o in found for r in o.records or ()) == list(range(n_committed, 1030))
    rows.committed(up_to(1030))
    assert rows.objects(()) == []
    assert list(rows._chunks) == [1]


@pytest.mark.parametrize("n_committed", [0, 5, 1023, 1024, 1027])
def test_uncommitted_values_are_dropped(n_committed) -> None:
    """Others take their place."""
    rows = series(1030)
    if n_committed:
        rows.committed(up_to(n_committed))
    rows.drop_uncommitted()
    assert rows.objects(up_to(1030)) == []
    rows.put(n_committed, np.float32(-1))
    last = chunks_of(rows.objects(((n_committed, n_committed + 1),)))[f"t/c/{n_committed // 1024}"]
    assert last == [*numbers(n_committed // 1024 * 1024, n_committed), -1.0]


@pytest.mark.parametrize("n_committed", [0, 5, 1023, 1024, 1027, 1030])
def test_a_series_is_read_back(n_committed) -> None:
    """The chunk of the last committed record, and of it only the committed values."""
    store = stored(series(1030).objects(up_to(1030)))
    rows = SeriesRows(SERIES, "/", store)
    rows.put(0, np.float32(9))
    rows.reset(up_to(n_committed))
    assert rows.objects(up_to(1030)) == []
    rows.put(n_committed, np.float32(-1))
    last = chunks_of(rows.objects(((n_committed, n_committed + 1),)))[f"t/c/{n_committed // 1024}"]
    assert last == [*numbers(n_committed // 1024 * 1024, n_committed), -1.0]


def test_values_of_a_series_come_in_any_order() -> None:
    """Between committed ones, which are read back when their chunk left memory; the others are fill."""
    store = MemoryStore()
    rows = SeriesRows(SERIES, "/", store)
    for n in (2500, 7, 3, 1024):
        rows.put(n, np.float32(n))
    assert [sorted(o.records or ()) for o in rows.objects(((3, 4), (1024, 1025)))] == [[3, 7], [1024]]
    stored(rows.objects(up_to(2501)), store)
    rows.committed(((3, 4), (7, 8), (1024, 1025), (2500, 2501)))
    assert list(rows._chunks) == [2]
    for n in (5, 2000):
        rows.put(n, np.float32(n))
    found = rows.objects(((5, 6), (2000, 2001)))
    assert [(o.key, o.records) for o in found] == [("t/c/0", frozenset([5])), ("t/c/1", frozenset([2000]))]
    values = [CODEC.decode(bytes_of(o), (SERIES_CHUNK,)) for o in found]
    held = [{1024 * k + int(i): float(v[i]) for i in np.flatnonzero(np.isfinite(v))} for k, v in enumerate(values)]
    assert held == [{3: 3.0, 5: 5.0, 7: 7.0}, {1024: 1024.0, 2000: 2000.0}]


def test_a_value_that_is_not_committed_is_not_read_back() -> None:
    """It is in the chunk in the store, put there by a commit that failed."""
    store = stored(series(10).objects(up_to(10)))
    rows = SeriesRows(SERIES, "/", store)
    rows.reset(((2, 4), (8, 9)))
    rows.put(5, np.float32(-1))
    values = CODEC.decode(bytes_of(rows.objects(((5, 6),))[0]), (SERIES_CHUNK,))
    assert {int(i): float(values[i]) for i in np.flatnonzero(np.isfinite(values))} == {2: 2, 3: 3, 5: -1, 8: 8}


def test_a_series_that_can_not_be_read_back_is_refused_with_its_key() -> None:
    """Missing or damaged; a chunk that is not needed is not looked for."""
    rows = SeriesRows(SERIES, ".", MemoryStore())
    rows.reset(up_to(2048))
    with pytest.raises(FormatError, match=r"^t/c\.2: the chunk of committed records is missing") as caught:
        rows.reset(up_to(2049))
    assert caught.value.kind == "missing"
    store = MemoryStore()
    store.make_folder("t")
    store.create("t/c.0", b"damaged")
    with pytest.raises(FormatError, match=r"^t/c\.0: the stored CRC32C differs") as caught:
        read_series_chunk(store, CODEC, "t/c.0")
    assert caught.value.kind == "checksum"

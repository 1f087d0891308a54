"""Rows: blocks in, finished objects out, and back to what is committed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpistream.arrays import SERIES_CHUNK, ArraySpec, Role
from mpistream.errors import FormatError
from mpistream.memory_store import MemoryStore
from mpistream.rows import SeriesRows, ShardRows, encode_whole, read_series_chunk
from mpistream.staging import StagedObject
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


def rows_of(array: ArraySpec, *, separator: str = "/", is_durable: bool = True, boxes: Any = BOXES) -> ShardRows:
    return ShardRows(array, separator, BLOCK_BOX, boxes, is_durable=is_durable)


def block(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((6, 6)).astype("f4")


def bytes_of(found: StagedObject) -> bytes:
    return b"".join(bytes(p) for p in found.pieces or ())


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
        objects = rows.add(block(i))
        assert [o.key for o in objects] == [keys.format(i, y, x) for y in (1, 2) for x in (0, 1)]
        assert [o.n_cells for o in objects] == [12, 12, 6, 6]
        assert {(o.name, o.start, o.stop, o.must_sync) for o in objects} == {("t", i, i + 1, True)}
        assert [o.nbytes for o in objects] == [len(bytes_of(o)) for o in objects]
        assert values_of(spec(), objects)[0].tolist() == block(i).tolist()
        assert rows.partial() == []
    assert rows.n_records == 3


def test_a_row_of_several_records_gives_objects_when_it_is_full() -> None:
    """Before that, nothing; then the whole row, and the next one begins."""
    rows = rows_of(ROW_OF_4)
    for row in range(2):
        found = [rows.add(block(4 * row + i)) for i in range(4)]
        assert found[:3] == [[], [], []]
        assert {(o.start, o.stop) for o in found[3]} == {(4 * row, 4 * row + 4)}
        assert {o.key.split("/")[2] for o in found[3]} == {str(row)}
        assert values_of(ROW_OF_4, found[3]).tolist() == [block(4 * row + i).tolist() for i in range(4)]
    assert (rows.n_records, rows.row_start) == (8, 8)


def test_a_row_that_is_filled_in_part_is_given_on_demand() -> None:
    """Each time it has grown, under the same keys; the rest is fill."""
    rows = rows_of(ROW_OF_4)
    assert rows.partial() == []
    rows.add(block(0))
    first = rows.partial()
    assert {(o.start, o.stop) for o in first} == {(0, 1)}
    assert rows.partial() == []
    rows.add(block(1))
    rows.add(block(2))
    second = rows.partial()
    assert [o.key for o in second] == [o.key for o in first]
    assert {(o.start, o.stop) for o in second} == {(0, 3)}
    held = values_of(ROW_OF_4, second)
    assert held[:3].tolist() == [block(i).tolist() for i in range(3)]
    assert np.isnan(held[3]).all()
    full = rows.add(block(3))
    assert values_of(ROW_OF_4, full).tolist() == [block(i).tolist() for i in range(4)]
    assert rows.partial() == []


def test_a_static_is_one_row_without_time() -> None:
    """Its keys have no time, its objects no records."""
    objects = rows_of(STATIC).add(block(0))
    assert [o.key for o in objects] == ["t/c/1/0", "t/c/1/1", "t/c/2/0", "t/c/2/1"]
    assert {(o.start, o.stop) for o in objects} == {(0, 0)}
    assert [o.n_cells for o in objects] == [12, 12, 6, 6]
    assert values_of(STATIC, objects)[0].tolist() == block(0).tolist()


def test_only_the_own_boxes_are_written() -> None:
    """Of a block that holds more, for example where a lower rank holds the shard too."""
    rows = rows_of(spec(), boxes=[((4, 8), (3, 6)), ((8, 10), (0, 3))])
    assert [o.key for o in rows.add(block(0))] == ["t/c/0/1/1", "t/c/0/2/0"]
    assert rows.writes
    assert not rows_of(spec(), boxes=[]).writes


def test_objects_that_replace_committed_records_are_synced_always() -> None:
    """Without durability the others need not be."""
    rows = rows_of(ROW_OF_4, is_durable=False)
    rows.add(block(0))
    assert {o.must_sync for o in rows.partial()} == {False}
    rows.committed(1)
    for i in range(1, 3):
        rows.add(block(i))
        assert {o.must_sync for o in rows.partial()} == {True}
    assert {o.must_sync for o in rows.add(block(3))} == {True}
    rows.committed(4)
    rows.add(block(4))
    assert {o.must_sync for o in rows.partial()} == {False}


# ---- back to what is committed -----------------------------------------------------------------------


def stored(objects: list[StagedObject]) -> MemoryStore:
    store = MemoryStore()
    for found in objects:
        store.make_folder(found.key.rpartition("/")[0])
        store.create(found.key, bytes_of(found))
    return store


@pytest.mark.parametrize("n_committed", range(1, 4))
def test_a_row_that_is_filled_in_part_is_read_back(n_committed) -> None:
    """Its committed records only; other ones follow."""
    rows = rows_of(ROW_OF_4)
    for i in range(3):
        rows.add(block(i))
    store = stored(rows.partial())
    for again in (rows, rows_of(ROW_OF_4)):
        again.reset(store, n_committed)
        assert (again.n_records, again.row_start) == (n_committed, 0)
        assert again.partial() == []
        for i in range(n_committed, 4):
            objects = again.add(block(10 + i))
        expected = [block(i if i < n_committed else 10 + i).tolist() for i in range(4)]
        assert values_of(ROW_OF_4, objects).tolist() == expected
        assert {o.must_sync for o in objects} == {True}


def test_after_a_full_row_nothing_is_read() -> None:
    """The store may be empty."""
    rows = rows_of(ROW_OF_4)
    rows.add(block(0))
    rows.reset(MemoryStore(), 8)
    assert (rows.n_records, rows.row_start) == (8, 8)
    assert {o.key.split("/")[2] for o in [rows.add(block(i)) for i in range(4)][3]} == {"2"}


def test_a_row_that_can_not_be_read_back_is_refused_with_its_key() -> None:
    """Missing or damaged: FormatError, and the key in front."""
    rows = rows_of(ROW_OF_4)
    rows.add(block(0))
    objects = rows.partial()
    with pytest.raises(FormatError, match=r"^t/c/0/2/0: the shard of committed records is missing") as caught:
        rows.reset(stored([o for o in objects if o.key != "t/c/0/2/0"]), 1)
    assert caught.value.kind == "missing"
    store = stored(objects)
    data = store.read("t/c/0/1/1")
    assert data is not None
    store.delete("t/c/0/1/1")
    store.create("t/c/0/1/1", data[:-1])
    with pytest.raises(FormatError, match=r"^t/c/0/1/1: the index's stored CRC32C differs") as caught:
        rows.reset(store, 1)
    assert caught.value.kind == "index"


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
    assert {(o.start, o.stop, o.must_sync) for o in objects} == {(0, 0, True)}
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
        n = each.stop - each.start
        assert np.isnan(values[n:]).all()
        assert (each.n_cells, each.must_sync, each.nbytes) == (1, True, len(bytes_of(each)))
        found[each.key] = values[:n].tolist()
    return found


def series(n: int) -> SeriesRows:
    found = SeriesRows(SERIES, "/")
    for i in range(n):
        found.add(np.float32(i))
    return found


def numbers(start: int, stop: int) -> list[float]:
    return [float(i) for i in range(start, stop)]


def test_a_series_is_in_chunks_of_1024_records() -> None:
    """From the last committed record on, filled up; what is behind the stop stays out."""
    rows = series(2100)
    assert rows.n_records == 2100
    assert chunks_of(rows.objects(2100)) == {
        "t/c/0": numbers(0, 1024),
        "t/c/1": numbers(1024, 2048),
        "t/c/2": numbers(2048, 2100),
    }
    assert chunks_of(rows.objects(1500)) == {"t/c/0": numbers(0, 1024), "t/c/1": numbers(1024, 1500)}
    assert rows.objects(0) == []
    assert [(o.start, o.stop) for o in rows.objects(1500)] == [(0, 1024), (1024, 1500)]


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
    """Nor kept in memory; a chunk that holds committed records is written with them."""
    rows = series(1030)
    rows.committed(n_committed)
    assert rows.n_records == 1030
    assert chunks_of(rows.objects(1030)) == {k: numbers(*v) for k, v in expected.items()}
    assert len(rows._values) == (1030 if n_committed < 1024 else 6)


@pytest.mark.parametrize("n_committed", [0, 5, 1023, 1024, 1027])
def test_uncommitted_values_are_dropped(n_committed) -> None:
    """Others take their place."""
    rows = series(1030)
    if n_committed:
        rows.committed(n_committed)
    rows.drop_uncommitted()
    assert rows.n_records == n_committed
    rows.add(np.float32(-1))
    last = chunks_of(rows.objects(n_committed + 1))[f"t/c/{n_committed // 1024}"]
    assert last == [*numbers(n_committed // 1024 * 1024, n_committed), -1.0]


@pytest.mark.parametrize("n_committed", [0, 5, 1023, 1024, 1027, 1030])
def test_a_series_is_read_back(n_committed) -> None:
    """The chunk of the last committed record, and of it only the committed values."""
    store = stored(series(1030).objects(1030))
    rows = SeriesRows(SERIES, "/")
    rows.add(np.float32(9))
    rows.reset(store, n_committed)
    assert rows.n_records == n_committed
    rows.add(np.float32(-1))
    last = chunks_of(rows.objects(n_committed + 1))[f"t/c/{n_committed // 1024}"]
    assert last == [*numbers(n_committed // 1024 * 1024, n_committed), -1.0]


def test_a_series_that_can_not_be_read_back_is_refused_with_its_key() -> None:
    """Missing or damaged; a chunk that is not needed is not looked for."""
    rows = SeriesRows(SERIES, ".")
    rows.reset(MemoryStore(), 2048)
    with pytest.raises(FormatError, match=r"^t/c\.2: the chunk of committed records is missing") as caught:
        rows.reset(MemoryStore(), 2049)
    assert caught.value.kind == "missing"
    store = MemoryStore()
    store.make_folder("t")
    store.create("t/c.0", b"damaged")
    with pytest.raises(FormatError, match=r"^t/c\.0: the stored CRC32C differs") as caught:
        read_series_chunk(store, CODEC, "t/c.0")
    assert caught.value.kind == "checksum"

"""`StoreReader` without MPI: what is committed and nothing else, by region, with an error for everything else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from mpistream.memory_store import MemoryStore
from mpistream.store import open_store
from tests.support.counting_store import CountingStore
from tests.support.plain import QUICK, any_bits, append_schema, differing

NY, NX = 7, 5
N_RECORDS = 6
Z = any_bits("float64", (3,), 1)


def schema_of(row: int = 4, inner_time: int = 2) -> ms.StreamSchema:
    return append_schema(
        {"y": NY, "x": NX, "z": 3},
        {
            "u": ms.Variable(("time", "y", "x"), "float32"),
            "column": ms.Variable(("time", "y"), "complex64"),
            "count": ms.Variable(("time",), "int32"),
        },
        statics={
            "topo": ms.Variable(("y", "x"), "float32"),
            "later": ms.Variable(("y", "x"), "int16"),
            "version": ms.Variable((), "int16"),
        },
        coords={
            "z": ms.Coordinate(("z",), Z),
            "lat": ms.Coordinate(("y", "x"), None, dtype="float64"),
        },
        shard_shape={"time": row, "y": 4, "x": 4},
        chunk_shape={"time": inner_time, "y": 2, "x": 4},
    )


def record_of(i: int) -> dict[str, NDArray[Any]]:
    return {
        "u": any_bits("float32", (NY, NX), i),
        "column": any_bits("complex64", (NY,), i),
        "count": any_bits("int32", (), i),
    }


STATICS = {
    "topo": any_bits("float32", (NY, NX), 90),
    "version": np.array(-3, "int16"),
    "lat": any_bits("float64", (NY, NX), 91),
}


def append(writer: ms.StreamWriter, stop: int) -> None:
    """Write records up to this one, and commit."""
    for i in range(writer.n_records, stop):
        writer.write_record(i * 1.5, record_of(i))
    writer.commit()


def create(url: Any, n_records: int = N_RECORDS, schema: ms.StreamSchema | None = None) -> ms.StreamWriter:
    """Return the open writer of a new store with committed records and statics."""
    writer = ms.write_open(url, schema or schema_of(), options=QUICK)
    for name, values in STATICS.items():
        writer.write_static(name, values)
    append(writer, n_records)
    return writer


@pytest.fixture
def store() -> Any:
    return CountingStore(MemoryStore())


def cut(region: Mapping[str, Any] | None, *dims: str) -> tuple[slice, ...]:
    return tuple(b if isinstance(b := (region or {}).get(d, slice(None)), slice) else slice(*b) for d in dims)


REGIONS = [
    None,
    {},
    {"y": (0, NY), "x": (0, NX)},
    {"y": (3, 5)},
    {"x": (4, 5)},
    {"y": (1, 2), "x": (2, 3)},
    {"y": (4, 7), "x": (0, 4)},
    {"x": (1, 4), "y": (2, 6)},
    {"y": slice(2, 6), "x": slice(None)},
    {"y": (np.int64(3), np.int64(7))},
    {"y": (3, 3)},
    ms.Region.of_box(("y", "x"), ((1, 6), (3, 5))),
]


@pytest.mark.parametrize(("row", "inner_time"), [(1, 1), (4, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("region", REGIONS, ids=str)
def test_records_and_statics_by_region(store: Any, region: Mapping[str, Any] | None, row: int, inner_time: int) -> None:
    """A region gives the cells that numpy cuts out of the whole, for variables, statics and coordinates."""
    create(store, schema=schema_of(row, inner_time)).close()
    reader = ms.open_reader(store)
    expected = {f"u {i}": record_of(i)["u"][cut(region, "y", "x")] for i in range(N_RECORDS)}
    expected |= {name: STATICS[name][cut(region, "y", "x")] for name in ("topo", "lat")}
    found = {f"u {i}": reader.read_record("u", i, region) for i in range(N_RECORDS)}
    found |= {name: reader.read_static(name, region) for name in ("topo", "lat")}
    assert differing(found, expected) == []
    assert store.n_open == 0


def test_arrays_of_fewer_dims(store: Any) -> None:
    """Arrays that lack dims are read in their own shape, also by a rank's region, which names all dims."""
    create(store).close()
    reader = ms.open_reader(store)
    found = {
        "column": reader.read_record("column", 2),
        "part": reader.read_record("column", 2, {"y": (3, 6), "x": (1, 2)}),
        "count": reader.read_record("count", 2, {"y": (3, 6)}),
        "version": reader.read_static("version"),
        "z": reader.read_static("z"),
        "part of z": reader.read_static("z", {"z": (1, 3)}),
        "time": reader.read_static("time"),
    }
    expected = {
        "column": record_of(2)["column"],
        "part": record_of(2)["column"][3:6],
        "count": record_of(2)["count"],
        "version": STATICS["version"],
        "z": Z,
        "part of z": Z[1:3],
        "time": np.arange(N_RECORDS) * 1.5,
    }
    assert differing(found, expected) == []


def test_negative_indices_count_from_the_last_committed_record(store: Any) -> None:
    """Index -1 is the last committed record, not the last written one; numpy integers are indices."""
    writer = create(store, 4)
    writer.write_record(100.0, record_of(4))
    reader = ms.open_reader(store)
    expected = {str(i): record_of(i % 4)["u"] for i in range(-4, 4)}
    indices: list[Any] = [*range(-4, 2), np.int64(2), np.uint8(3)]
    assert differing({str(i): reader.read_record("u", i) for i in indices}, expected) == []
    assert differing({"count": reader.read_record("count", -1)}, {"count": record_of(3)["count"]}) == []
    writer.rollback()
    writer.close()


Read = Callable[[ms.StoreReader], object]


@pytest.mark.parametrize(
    ("read", "kind", "message"),
    [
        (lambda r: r.read_record("u", 6), "index", r"record 6 of 'u': there are 6 records"),
        (lambda r: r.read_record("u", -7), "index", r"record -7 of 'u': there are 6 records"),
        (lambda r: r.read_record("count", 6), "index", r"record 6 of 'count'"),
        (lambda r: r.read_record("v", 0), "unknown", r"'v' is not among .*'u', 'column', 'count'"),
        (lambda r: r.read_record("topo", 0), "unknown", r"'topo' is not among the streaming variables"),
        (lambda r: r.read_static("u"), "unknown", r"'u' is not among the statics and coordinates"),
        (lambda r: r.read_static("nothing"), "unknown", r"'nothing' is not among"),
        (lambda r: r.read_static("later"), "not_committed", r"static 'later' is not committed"),
        (lambda r: r.read_record("u", 0, {"y": (0, 8)}), "region", r"dim 'y' of length 7: \[0:8\]"),
        (lambda r: r.read_record("u", 0, {"y": (-1, 3)}), "region", r"\[-1:3\]"),
        (lambda r: r.read_record("u", 0, {"y": (5, 3)}), "region", r"\[5:3\]"),
        (lambda r: r.read_record("u", 0, {"y": (0, 4.0)}), "region", r"two integers"),
        (lambda r: r.read_record("u", 0, {"y": slice(0, 4, 2)}), "region", r"has a step"),
        (lambda r: r.read_record("u", 0, {"time": (0, 1)}), "region", r"'time'"),
        (lambda r: r.read_record("u", 0, {"q": (0, 1)}), "region", r"'q' is no dim"),
        (lambda r: r.read_record("u", 0, [(0, 1), (0, 1)]), "region", r"a region is a mapping"),
        (lambda r: r.read_record("count", 0, {"q": (0, 1)}), "region", r"'q' is no dim"),
        (lambda r: r.read_static("topo", {"y": (0, 8)}), "region", r"dim 'y' of length 7"),
        (lambda r: r.read_static("version", {"time": (0, 1)}), "region", r"'time'"),
    ],
)
def test_what_is_not_there_is_refused(store: Any, read: Read, kind: str, message: str) -> None:
    """A record that is not committed, an unknown name or a bad region is SchemaError, and no shard is opened."""
    create(store).close()
    reader = ms.open_reader(store)
    store.reset()
    with pytest.raises(ms.SchemaError, match=message) as caught:
        read(reader)
    assert caught.value.kind == kind
    assert store.counts == {}


def test_store_without_records(store: Any) -> None:
    """A store that has no record yet opens, and any index is refused."""
    ms.write_open(store, schema_of(), options=QUICK).close()
    reader = ms.open_reader(store)
    assert (reader.n_records, reader.committed, reader.manifest.statics) == (0, (), ())
    assert reader.times.shape == (0,)
    for index in (0, -1):
        with pytest.raises(ms.SchemaError, match="there are 0 records"):
            reader.read_record("u", index)


def test_state_is_that_of_the_manifest(store: Any) -> None:
    """Number of records, ranges, times, schema and statics are those that were committed; times can't be changed."""
    create(store).close()
    reader = ms.open_reader(store)
    assert reader.n_records == N_RECORDS
    assert reader.committed == ((0, N_RECORDS),)
    assert reader.times.tolist() == [0.0, 1.5, 3.0, 4.5, 6.0, 7.5]
    assert reader.manifest.last_t == 7.5
    assert reader.manifest.statics == ("lat", "topo", "version")
    assert reader.schema.fingerprint() == schema_of().fingerprint()
    assert not reader.times.flags.writeable


@pytest.mark.parametrize(
    ("name", "region", "keys"),
    [
        ("u", None, ["u/c/1/0/0", "u/c/1/0/1", "u/c/1/1/0", "u/c/1/1/1"]),
        ("u", {"y": (4, 7)}, ["u/c/1/1/0", "u/c/1/1/1"]),
        ("u", {"y": (3, 4), "x": (0, 4)}, ["u/c/1/0/0"]),
        ("u", {"y": (3, 3)}, []),
        ("column", None, ["column/c/1/0", "column/c/1/1"]),
    ],
)
def test_each_shard_is_opened_once(store: Any, name: str, region: Mapping[str, Any] | None, keys: list[str]) -> None:
    """A read opens the shards that it touches, each once, and then looks whether they still belong to its state."""
    create(store).close()
    reader = ms.open_reader(store)
    store.reset()
    reader.read_record(name, 5, region)
    assert store.keys("open") == keys
    # One range for the index, and one for the inner chunks, which lie together.
    assert store.counts == ({"open": len(keys), "read_range": 2 * len(keys), "read": 1} if keys else {})
    assert store.keys("read") == ([".mpistream/manifest.json"] if keys else [])
    assert store.n_open == 0


def test_records_of_a_row_are_read_together(store: Any) -> None:
    """Several records at once: each shard is opened once for all of its records, and the state looked at once."""
    create(store).close()
    reader = ms.open_reader(store)
    store.reset()
    expected = np.stack([record_of(i)["u"] for i in range(1, 6)])[:, 3:5]
    assert reader.read_array("u", [(1, 6), (3, 5), (0, NX)]).tobytes() == expected.tobytes()
    assert store.keys("open") == [f"u/c/{row}/{y}/{x}" for row in (0, 1) for y in (0, 1) for x in (0, 1)]
    assert store.counts == {"open": 8, "read_range": 16, "read": 1}


def test_descriptors_of_a_local_store_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading records of a folder opens one file a shard, and leaves no descriptor open."""
    import os

    create(tmp_path / "run.zarr", 4, schema_of(1, 1)).close()
    reader = ms.open_reader(tmp_path / "run.zarr")
    opened: list[str] = []
    real_open = os.open

    def counting_open(path: Any, *args: Any, **more: Any) -> int:
        opened.append(os.path.relpath(path, tmp_path / "run.zarr"))
        return real_open(path, *args, **more)

    monkeypatch.setattr(os, "open", counting_open)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(4):
        reader.read_record("u", i)
    shards = [name for name in opened if name != ".mpistream/manifest.json"]
    assert shards == [f"u/c/{i}/{y}/{x}" for i in range(4) for y in range(2) for x in range(2)]
    assert len(opened) == len(shards) + 4
    assert len(os.listdir("/proc/self/fd")) == before


def test_functions_of_the_module(tmp_path: Path) -> None:
    """The functions read_record, read_static and read_output_manifest open the store by themselves."""
    path = tmp_path / "run.zarr"
    create(path).close()
    urls: list[Any] = [path, str(path), open_store(path)]
    for url in urls:
        found = {
            "last": ms.read_record(url, "u", -1),
            "part": ms.read_record(url, "u", 2, {"y": (3, 5)}),
            "topo": ms.read_static(url, "topo"),
            "part of topo": ms.read_static(url, "topo", region={"x": (1, 5)}),
        }
        expected = {
            "last": record_of(N_RECORDS - 1)["u"],
            "part": record_of(2)["u"][3:5],
            "topo": STATICS["topo"],
            "part of topo": STATICS["topo"][:, 1:5],
        }
        assert differing(found, expected) == []
    expected_manifest = {
        "format": "mpistream",
        "version": 1,
        "epoch": 1,
        "commit_seq": 1,
        "n_records": N_RECORDS,
        "last_t": 7.5,
        "committed": [[0, N_RECORDS]],
        "statics": ["lat", "topo", "version"],
    }
    manifest = ms.read_output_manifest(path)
    assert {name: manifest[name] for name in expected_manifest} == expected_manifest


def test_refresh_tells_whether_there_is_something_new(store: Any) -> None:
    """A reader stays at the state it was opened at, until refresh finds a newer one."""
    writer = create(store, 2)
    reader = ms.open_reader(store)
    assert reader.times.tolist() == [0.0, 1.5]
    append(writer, 3)
    assert reader.n_records == 2
    with pytest.raises(ms.SchemaError, match="there are 2 records"):
        reader.read_record("u", 2)
    assert [reader.refresh(), reader.refresh()] == [True, False]
    assert reader.n_records == 3
    assert reader.times.tolist() == [0.0, 1.5, 3.0]
    assert differing({"u": reader.read_record("u", 2)}, {"u": record_of(2)["u"]}) == []
    writer.close()


def test_writer_has_a_reader_of_what_is_committed(store: Any) -> None:
    """A writer's reader sees the committed records, not those that are only written."""
    writer = create(store, 2)
    writer.write_record(50.0, record_of(2))
    assert writer.reader.n_records == 2
    assert differing({"u": writer.reader.read_record("u", -1)}, {"u": record_of(1)["u"]}) == []
    append(writer, 3)
    assert writer.reader.n_records == 3
    writer.close()


def test_reader_is_a_context_manager(store: Any) -> None:
    """A reader may stand in a with statement."""
    create(store, 1).close()
    with ms.open_reader(store) as reader:
        assert reader.n_records == 1


class TestFollow:
    def test_yields_what_is_there_and_what_comes(self, tmp_path: Path) -> None:
        """Each record is yielded once, in order, readable at once, while another thread commits."""
        path = tmp_path / "run.zarr"
        writer = create(path, 2)
        seen_one = threading.Event()
        failures: list[BaseException] = []

        def commit_more() -> None:
            try:
                assert seen_one.wait(30)
                for stop in (3, 5, 8):
                    append(writer, stop)
            except BaseException as error:
                failures.append(error)
                raise

        thread = threading.Thread(target=commit_more)
        thread.start()
        reader = ms.open_reader(path)
        found = {}
        for i in reader.follow(timeout=20):
            found[str(i)] = reader.read_record("u", i)
            seen_one.set()
            if i == 7:
                break
        thread.join()
        assert failures == []
        assert differing(found, {str(i): record_of(i)["u"] for i in range(8)}) == []
        writer.close()

    def test_ends_when_nothing_comes(self, store: Any) -> None:
        """After the timeout without a new record it ends, and it has asked the manifest only."""
        create(store, 2).close()
        reader = ms.open_reader(store)
        store.reset()
        assert list(reader.follow(timeout=0.05)) == [0, 1]
        assert set(store.keys("read")) == {".mpistream/manifest.json"}
        assert set(store.counts) == {"read"}

    def test_yields_again_what_replaces_dropped_records(self, store: Any) -> None:
        """After a resume that dropped records, those that take their places are yielded."""
        create(store, 4).close()
        reader = ms.open_reader(store)
        following = reader.follow(timeout=0.05)
        assert [next(following) for _ in range(4)] == [0, 1, 2, 3]
        writer = ms.write_resume(store, at=1.5, options=QUICK)
        writer.write_record(1.6, record_of(52))
        writer.write_record(1.7, record_of(53))
        writer.commit()
        writer.close()
        found = [(i, differing({"u": reader.read_record("u", i)}, {"u": record_of(50 + i)["u"]})) for i in following]
        assert found == [(2, []), (3, [])]

    def test_begins_anew_when_the_store_was_replaced(self, store: Any) -> None:
        """After write_open with overwrite the records of the new store are yielded, however many there are."""
        create(store, 3).close()
        reader = ms.open_reader(store)
        following = reader.follow(timeout=0.05)
        assert [next(following) for _ in range(3)] == [0, 1, 2]
        with ms.write_open(store, schema_of(), overwrite=True, options=QUICK) as writer:
            append(writer, 4)
        assert list(following) == [0, 1, 2, 3]


def test_a_rank_reads_back_what_it_holds(tmp_path) -> None:
    """Its region or index list implies the points of staggered dims; several boxes are refused by name."""
    schema = ms.StreamSchema(
        dims={"time": None, "x": 8, "x_u": ms.Staggered("x")},
        time=ms.AppendTime(units="s since 2000-01-01"),
        variables={"u": ms.Variable(("time", "x_u"), "int32"), "h": ms.Variable(("time", "x"), "int32")},
    )
    with ms.write_open(tmp_path / "s", schema) as w:
        w.write_record(0.0, {"u": np.arange(9, dtype="int32"), "h": np.arange(8, dtype="int32")})
    reader = ms.open_reader(tmp_path / "s")
    upper, lower = ms.Region(("x",), [((4, 8),)]), ms.Region(("x",), [((0, 4),)])
    assert reader.read_record("u", 0, upper).tolist() == [4, 5, 6, 7, 8]
    assert reader.read_record("u", 0, lower).tolist() == [0, 1, 2, 3]
    assert reader.read_array("u", upper).tolist() == [[4, 5, 6, 7, 8]]
    assert reader.read_record("h", 0, upper).tolist() == [4, 5, 6, 7]
    assert reader.read_record("u", 0, ms.Indices({"x": [7, 3]})).tolist() == [7, 3, 8]
    assert reader.read_record("u", 0, ms.Indices({"x_u": [8, 3]})).tolist() == [8, 3]
    # So does a mapping of dims, whose bounds are looked at whatever the array has.
    for region in ({"x": (4, 8)}, {**upper}, {"x_u": (4, 9)}):
        assert reader.read_record("u", 0, region).tolist() == [4, 5, 6, 7, 8]
        assert reader.read_array("u", {"time": (0, 1), **region}).tolist() == [[4, 5, 6, 7, 8]]
    assert reader.read_record("u", 0, {"x": (2, 4)}).tolist() == [2, 3]
    for bad in ((5, 3), (0, 99), 3, (2.5, 4)):
        for name in ("u", "h"):
            with pytest.raises(ms.SchemaError, match="'x'"):
                reader.read_record(name, 0, {"x": bad})
    two = ms.Region(("x",), [((0, 2),), ((4, 6),)])
    for call in (lambda: reader.read_record("h", 0, two), lambda: reader.read_array("h", two)):
        with pytest.raises(ms.SchemaError, match="has 2 boxes; read them one by one"):
            call()
    with pytest.raises(ms.SchemaError, match="indices are for read_record and read_static"):
        reader.read_array("h", ms.Indices({"x": [3, 7]}))


@pytest.mark.parametrize("row", [1, 4])
def test_cells_of_index_lists(row: int) -> None:
    """In the order of the list, twice if they stand there twice; dims that an array lacks are ignored."""
    store: Any = MemoryStore()
    create(store, schema=schema_of(row, 1)).close()
    reader = ms.open_reader(store)
    y, x = [6, 0, 3, 3, 5], [4, 1]
    both = ms.Indices({"y": y, "x": x})
    for i in (0, N_RECORDS - 1):
        np.testing.assert_array_equal(reader.read_record("u", i, both), record_of(i)["u"][np.ix_(y, x)])
        np.testing.assert_array_equal(reader.read_record("u", i, ms.Indices({"x": x})), record_of(i)["u"][:, x])
        np.testing.assert_array_equal(reader.read_record("column", i, both), record_of(i)["column"][y])
        np.testing.assert_array_equal(reader.read_record("count", i, both), record_of(i)["count"])
    np.testing.assert_array_equal(reader.read_static("lat", both), STATICS["lat"][np.ix_(y, x)])
    np.testing.assert_array_equal(reader.read_static("z", ms.Indices({"z": [2, 0]})), Z[[2, 0]])
    assert reader.read_static("version", both) == -3
    assert reader.read_record("u", 0, ms.Indices({"y": []})).shape == (0, NX)
    for indices, words in (({"y": [7]}, "'y' contain 7, its length is 7"), ({"w": [0]}, "'w' is no dim of a record")):
        with pytest.raises(ms.SchemaError, match=words):
            reader.read_record("column", 0, ms.Indices(indices))


def test_only_the_shards_of_the_cells_are_opened(store: Any) -> None:
    """Of four, those of one list's cells; each once, though its cells stand apart in the list."""
    create(store).close()
    reader = ms.open_reader(store)
    for indices, shards in (
        ({"y": [6, 0, 5, 1], "x": [4]}, ["u/c/0/0/1", "u/c/0/1/1"]),
        ({"y": [3, 0]}, ["u/c/0/0/0", "u/c/0/0/1"]),
    ):
        store.reset()
        reader.read_record("u", 1, ms.Indices(indices))
        assert sorted(store.keys("open")) == shards
        assert store.counts["read"] == 1

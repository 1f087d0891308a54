"""A hierarchy that is no stream: what is listed, what is refused, damage by its key, and nothing beyond the store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream import foreign
from mpistream.local_store import LocalStore
from mpistream.manifest import MANIFEST_KEY
from mpistream.memory_store import MemoryStore
from tests.support.counting_store import CountingStore
from tests.support.plain import QUICK, append_schema

GROUP = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {"k": 1}}).encode()
GRID_OF_NONE = {"name": "regular", "configuration": {"chunk_shape": []}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def array(**changes: Any) -> bytes:
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [5],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 9,
        "codecs": [BYTES],
    }
    return json.dumps({**document, **changes}).encode()


def sharded(shard: int, inner: int, location: str = "end") -> dict[str, Any]:
    settings = {"chunk_shape": [inner], "codecs": [BYTES], "index_codecs": [BYTES, {"name": "crc32c"}]}
    settings["index_location"] = location
    grid = {"name": "regular", "configuration": {"chunk_shape": [shard]}}
    return {"chunk_grid": grid, "codecs": [{"name": "sharding_indexed", "configuration": settings}]}


def store_of(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore("mem")
    for key, data in objects.items():
        store.make_folder(key.rpartition("/")[0])
        store.create(key, data)
    return store


def reader_of(objects: dict[str, bytes]) -> ms.StoreReader:
    return ms.open_reader(store_of(objects))  # type: ignore[arg-type]


def test_absent_chunks_are_fill_value_and_edge_chunks_are_cut() -> None:
    """The last chunk is stored whole and reaches beyond the array; what is not stored is fill value."""
    reader = reader_of({"zarr.json": array(), "c/0": b"\1\2", "c/2": b"\5\6"})
    assert reader.read_array("").tolist() == [1, 2, 9, 9, 5]
    assert reader.read_array("", [(1, 3)]).tolist() == [2, 9]
    assert reader.read_array("", [(4, 5)]).tolist() == [5]
    assert reader.read_array("", [(3, 3)]).shape == (0,)


@pytest.mark.parametrize("names", [{}, {"dimension_names": [None]}], ids=["no names", "null"])
def test_a_writer_s_region_is_refused_where_axes_have_no_names(names: dict[str, Any]) -> None:
    """Each rank would read the whole array instead of its part; as a sequence, or with names, it is that part."""
    objects = {"zarr.json": array(**names), "c/0": b"\1\2", "c/1": b"\3\4", "c/2": b"\5\6"}
    region = ms.Region(("x",), [((1, 3),)])
    with pytest.raises(ms.SchemaError, match="axes without a name of their own, and 'x' may be one of them") as caught:
        reader_of(objects).read_array("", region)
    assert caught.value.kind == "region"
    assert reader_of(objects).read_array("", list(region.box)).tolist() == [2, 3]
    named = reader_of({**objects, "zarr.json": array(dimension_names=["x"])})
    assert named.read_array("", region).tolist() == [2, 3]
    # Of an array whose axes all have names, dims that it lacks are not its own.
    assert named.read_array("", ms.Region(("y",), [((1, 3),)])).tolist() == [1, 2, 3, 4, 5]
    scalar = reader_of({"zarr.json": array(shape=[], chunk_grid=GRID_OF_NONE), "c": b"\7"})
    assert scalar.read_array("", region) == 7


def test_only_the_chunks_of_a_region_are_read() -> None:
    """Each rank of a large job reads its own part, and the document once."""
    store = CountingStore(store_of({"zarr.json": GROUP, "v/zarr.json": array(), "v/c/0": b"\1\2", "v/c/1": b"\3\4"}))
    reader = ms.open_reader(store)  # type: ignore[arg-type]
    store.reset()
    assert reader.read_array("v", [(2, 3)]).tolist() == [3]
    assert (store.keys("open"), store.n_open) == (["v/c/1"], 0)
    store.reset()
    reader.read_array("v", [(0, 1)])
    assert store.counts == {"open": 1, "read_range": 1}


def test_names_that_are_no_node_are_passed_over() -> None:
    """Folders without a document, files, and names that Zarr keeps for itself are not listed."""
    reader = reader_of(
        {
            "zarr.json": GROUP,
            "v/zarr.json": array(),
            "v/c/0": b"\1\2",
            "v/inside/zarr.json": GROUP,
            "__reserved/zarr.json": GROUP,
            "plain/below/zarr.json": GROUP,
            "notes.txt": b"",
        }
    )
    assert list(reader.hierarchy()) == ["", "v"]


def test_half_a_stream_is_not_listed() -> None:
    """A folder whose creation was cut short is no group of arrays full of fill value."""
    reader = reader_of({"zarr.json": GROUP, "s/zarr.json": GROUP, "s/.mpistream/lease": b"", "s/v/zarr.json": array()})
    assert list(reader.hierarchy()) == [""]


@pytest.mark.parametrize("path", ["..", "../x", "/etc", "a//b", "a/../b", "a/", ".", "__a", "a\0b", 3, None])
def test_a_path_that_leaves_the_store_is_refused(path: Any) -> None:
    reader = reader_of({"zarr.json": GROUP, "a/zarr.json": GROUP, "a/b/zarr.json": GROUP})
    for call in (reader.read_array, reader.attrs_of):
        with pytest.raises(ms.SchemaError, match="is no path of a node") as caught:
            call(path)
        assert caught.value.kind == "unknown"


def test_what_is_not_there_is_refused_by_name() -> None:
    reader = reader_of({"zarr.json": GROUP, "v/zarr.json": array()})
    for call in (reader.read_array, reader.attrs_of):
        with pytest.raises(ms.SchemaError, match=r"no Zarr node 'v/w' in mem; hierarchy\(\)"):
            call("v/w")
    with pytest.raises(ms.SchemaError, match="'' is a group"):
        reader.read_array("")
    with pytest.raises(ms.SchemaError, match="'x' is no dim"):
        reader.read_array("v", {"x": (0, 1)})


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"zarr_format": 3}', b"\xff", array(shape=[-1])])
def test_a_damaged_document_is_named(data: bytes) -> None:
    """Listing and reading raise with its key; opening does, where it is the root's."""
    reader = reader_of({"zarr.json": GROUP, "g/zarr.json": GROUP, "g/v/zarr.json": data})
    for call in (reader.hierarchy, lambda: reader.read_array("g/v"), lambda: reader.attrs_of("g/v")):
        with pytest.raises(ms.FormatError, match=r"^g/v/zarr.json: "):
            call()
    with pytest.raises(ms.FormatError, match=r"^zarr.json: "):
        reader_of({"zarr.json": data})


def test_a_damaged_manifest_of_a_stream_below_is_named() -> None:
    reader = reader_of({"zarr.json": GROUP, "s/zarr.json": GROUP, f"s/{MANIFEST_KEY}": b"{}"})
    for call in (reader.hierarchy, lambda: reader.read_array("s/v")):
        with pytest.raises(ms.FormatError, match=rf"^s/{MANIFEST_KEY}: "):
            call()


@pytest.mark.parametrize(
    ("objects", "key"),
    [
        ({"v/zarr.json": array(), "v/c/1": b"\1"}, "v/c/1"),
        ({"v/zarr.json": array(codecs=[BYTES, {"name": "crc32c"}]), "v/c/1": b"\1\2\0\0\0\0"}, "v/c/1"),
        ({"v/zarr.json": array(**sharded(4, 2)), "v/c/1": b"\1\2"}, "v/c/1"),
        ({"v/zarr.json": array(**sharded(4, 2, "start")), "v/c/1": bytes(40)}, "v/c/1"),
        ({"v/zarr.json": array(**sharded(2**40, 1)), "v/c/0": bytes(40)}, "v/c/0"),
    ],
)
def test_a_damaged_chunk_is_named(tmp_path: Path, objects: dict[str, bytes], key: str) -> None:
    """A chunk that is cut, has another checksum, or an index that can't be as large as its document says."""
    store = CountingStore(LocalStore(tmp_path))
    for name, data in {"zarr.json": GROUP, **objects}.items():
        store.make_folder(name.rpartition("/")[0])
        store.create(name, data)
    reader = ms.open_reader(store)  # type: ignore[arg-type]
    with pytest.raises(ms.FormatError, match=f"^{key}: "):
        reader.read_array("v")
    assert store.n_open == 0


def test_an_array_too_large_for_memory_is_refused_by_its_region() -> None:
    """A document may claim any shape: the error says what was asked for, and a smaller region is read."""
    shape = [2**40, 2**40]
    grid = {"name": "regular", "configuration": {"chunk_shape": [2, 2]}}
    for lengths in (shape, [2**62, 2]):
        reader = reader_of({"zarr.json": array(shape=lengths, chunk_grid=grid), "c/0/0": b"\1\2\3\4"})
        with pytest.raises(ms.SchemaError, match="too large for memory; give a smaller one"):
            reader.read_array("")
        assert reader.read_array("", [(0, 2), (1, 2)]).tolist() == [[2], [4]]


def test_a_link_that_leads_back_ends_the_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are followed, but not for ever: neither down one that leads back nor through many."""
    (tmp_path / "g").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "g/zarr.json").write_bytes(GROUP)
    (tmp_path / "other/zarr.json").write_bytes(GROUP)
    os.symlink(tmp_path / "other", tmp_path / "g/elsewhere")
    reader = ms.open_reader(tmp_path / "g")
    assert list(reader.hierarchy()) == ["", "elsewhere"]
    os.symlink(".", tmp_path / "g/again")
    with pytest.raises(ms.FormatError, match="32 deep, are listed; does a link lead back") as caught:
        reader.hierarchy()
    assert caught.value.kind == "too_many"
    assert reader.attrs_of("again/again/elsewhere") == {"k": 1}
    monkeypatch.setattr(foreign, "_MAX_NODES", 3)
    os.symlink(".", tmp_path / "g/and_again")
    with pytest.raises(ms.FormatError, match="at most 3 nodes"):
        reader.hierarchy()


def test_a_stream_is_read_by_the_same_calls(tmp_path: Path) -> None:
    """hierarchy, attributes and read_array of a stream: what is committed, with time as one of the dims."""
    schema = append_schema(
        {"y": 3, "x": 4},
        {"u": ms.Variable(("time", "y", "x"), "float32", attrs={"units": "K"}), "n": ms.Variable(("time",), "int16")},
        statics={"topo": ms.Variable(("y", "x"), "int32")},
        coords={"y": ms.Coordinate(("y",), [1.0, 2.0, 3.0], attrs={"axis": "Y"})},
        shard_shape={"time": 2, "y": 2, "x": 4},
        attrs={"title": "t"},
    )
    u = np.arange(48, dtype="f4").reshape(4, 3, 4)
    topo = np.arange(12, dtype="i4").reshape(3, 4)
    with ms.write_open(tmp_path / "s", schema, options=QUICK) as w:
        w.write_static("topo", topo)
        for i in range(3):
            w.write_record(float(i), {"u": u[i], "n": i})
        w.commit()
        w.write_record(3.0, {"u": u[3], "n": 3})
        reader = ms.open_reader(tmp_path / "s")
        w.commit()
    assert (reader.is_stream, reader.attrs, reader.attrs_of("u")) == (True, {"title": "t"}, {"units": "K"})
    assert reader.attrs_of("y") == {"axis": "Y"}
    assert reader.attrs_of("time")["standard_name"] == "time"
    nodes = reader.hierarchy()
    assert list(nodes) == ["", "n", "time", "topo", "u", "y"]
    assert (nodes["u"].shape, nodes["u"].dims, nodes["u"].shard_shape) == ((3, 3, 4), ("time", "y", "x"), (2, 2, 4))
    assert reader.read_array("u").tobytes() == u[:3].tobytes()
    region = {"time": (1, 3), "y": (2, 3), "x": (1, 3)}
    assert reader.read_array("u", region).tolist() == u[1:3, 2:3, 1:3].tolist()
    assert reader.read_array("u", [(2, 2), (0, 3), (0, 4)]).shape == (0, 3, 4)
    assert reader.read_array("n", {"time": (1, 3)}).tolist() == [1, 2]
    assert reader.read_array("topo", [(1, 2), (0, 2)]).tolist() == [[4, 5]]
    assert reader.read_array("time", [(1, 3)]).tolist() == [1.0, 2.0]
    assert reader.read_array("y").tolist() == [1.0, 2.0, 3.0]
    for path, text in [("v", r"'v' is not among the arrays \['n', 'time'"), ("", "'' is a group")]:
        with pytest.raises(ms.SchemaError, match=text):
            reader.read_array(path)
    with pytest.raises(ms.SchemaError, match="'time' of length 3"):
        reader.read_array("u", {"time": (0, 4)})


def test_records_that_are_not_committed_are_not_read(tmp_path: Path) -> None:
    """In a stream with fixed times read_array raises like read_record, and the mask tells which records are there."""
    schema = ms.StreamSchema(
        dims={"time": None, "x": 2},
        time=ms.IndexedTime([0.0, 1.0, 2.0, 3.0], units="s"),
        variables={"u": ms.Variable(("time", "x"), "int8"), "n": ms.Variable(("time",), "int8")},
    )
    with ms.write_open(tmp_path / "s", schema, options=QUICK) as w:
        for i in (1, 2):
            w.write_record_at(i, float(i), {"u": np.full(2, i, "i1"), "n": i})
    reader = ms.open_reader(tmp_path / "s")
    assert reader.read_array("committed").tolist() == [False, True, True, False]
    assert reader.read_array("committed", [(2, 4)]).tolist() == [True, False]
    assert reader.read_array("u", {"time": (1, 3)}).tolist() == [[1, 1], [2, 2]]
    assert reader.read_array("n", {"time": (1, 3)}).tolist() == [1, 2]
    for name in ("u", "n"):
        with pytest.raises(ms.SchemaError, match=f"record 3 of '{name}' is not committed"):
            reader.read_array(name, {"time": (2, 4)})


def test_a_reader_needs_no_store_that_can_be_written() -> None:
    """A store that can be read and listed is enough to read it."""

    class ReadOnly:
        url = "mem"

        def __init__(self, inner: MemoryStore) -> None:
            self.read, self.open, self.list = inner.read, inner.open, inner.list

    store = ReadOnly(store_of({"zarr.json": array(), "c/0": b"\1\2"}))
    assert ms.open_reader(store).read_array("", [(0, 2)]).tolist() == [1, 2]  # type: ignore[arg-type]

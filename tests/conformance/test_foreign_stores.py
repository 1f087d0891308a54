"""Stores that zarr-python and tensorstore wrote, listed and read by region as they are."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tensorstore as ts
import xarray
import zarr
from numpy.typing import NDArray

import mpistream as ms
from mpistream.memory_store import MemoryStore
from mpistream.names import DTYPES
from tests.support.plain import any_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification"),
    # zarr-python, of a data type that is not in the specification yet.
    pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning"),
]

BYTES = {"little": {"name": "bytes", "configuration": {"endian": "little"}}}
BYTES["big"] = {"name": "bytes", "configuration": {"endian": "big"}}
CRC = {"name": "crc32c"}
COMPRESSORS: list[list[dict[str, Any]]] = [
    [],
    [{"name": "zstd", "configuration": {"level": 3, "checksum": False}}],
    [{"name": "zstd", "configuration": {"level": 1, "checksum": True}}, CRC],
    [{"name": "gzip", "configuration": {"level": 5}}],
    [CRC],
]


def blosc(itemsize: int, cname: str = "zstd", shuffle: str = "bitshuffle") -> dict[str, Any]:
    settings = {"typesize": itemsize, "cname": cname, "clevel": 5, "shuffle": shuffle, "blocksize": 0}
    return {"name": "blosc", "configuration": settings}


def document(rng: random.Random, dtype: str, n_dims: int, endian: str) -> dict[str, Any]:
    """Return the document of a random array that our own chain reads."""
    shape = [rng.randint(1, 13) for _ in range(n_dims)]
    inner = [rng.randint(1, 5) for _ in range(n_dims)]
    chain = [BYTES[endian], *rng.choice([*COMPRESSORS, [blosc(np.dtype(dtype).itemsize), CRC]])]
    chunks, codecs = inner, chain
    if n_dims and rng.random() < 0.6:
        chunks = [c * rng.randint(1, 4) for c in inner]
        sharding = {"chunk_shape": inner, "codecs": chain, "index_codecs": [BYTES["little"], CRC]}
        sharding["index_location"] = rng.choice(["start", "end"])
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    encoding = rng.choice([("default", "/"), ("default", "."), ("v2", "."), ("v2", "/")])
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": encoding[0], "configuration": {"separator": encoding[1]}},
        "fill_value": False if dtype == "bool" else [1.5, -2] if dtype.startswith("complex") else 7,
        "codecs": codecs,
        "dimension_names": [f"d{i}" for i in range(n_dims)],
        "attributes": {"i": n_dims},
    }


def random_region(rng: random.Random, shape: Sequence[int]) -> list[tuple[int, int]]:
    bounds = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape]
    return [(a, b) for a, b in bounds]


def write(path: Path, doc: dict[str, Any], values: NDArray[Any], written: tuple[slice, ...], by: str) -> None:
    """Write part of an array, the rest stays absent."""
    if by == "tensorstore":
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}, "metadata": doc, "create": True}
        ts.open(spec).result()[written].write(values[written]).result()
        return
    path.mkdir(parents=True)
    (path / "zarr.json").write_text(json.dumps(doc))
    zarr.open_array(path, mode="r+")[written] = values[written]


@pytest.mark.parametrize("by", ["zarr", "tensorstore"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_arrays_are_read_by_region_by_our_own_chain(
    tmp_path: Path, dtype: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any native dtype, shape, chunks, shards, byte order and chunk key, some parts never written: as numpy has it."""
    rng = random.Random(f"{dtype} {by}")
    for k in range(4):
        n_dims = rng.choice([0, 1, 2, 3])
        doc = document(rng, dtype, n_dims, rng.choice(["little", "big"]))
        shape = tuple(doc["shape"])
        values = any_bits(dtype, shape, k)
        written = tuple(slice(*b) for b in random_region(rng, shape)) if k % 2 else (slice(None),) * n_dims
        fill = complex(*doc["fill_value"]) if isinstance(doc["fill_value"], list) else doc["fill_value"]
        expected = np.full(shape, fill, dtype)
        expected[written] = values[written]
        path = tmp_path / f"{k}.zarr"
        write(path, doc, values, written, by)
        with monkeypatch.context() as patch:
            # zarr-python is for what our own chain does not speak.
            patch.setattr(zarr, "open_array", None)
            reader = ms.open_reader(path)
            for _ in range(5):
                region = random_region(rng, shape)
                found = reader.read_array("", region)
                part = expected[tuple(slice(*b) for b in region)]
                assert (found.dtype, found.shape) == (part.dtype, part.shape)
                assert found.tobytes() == part.tobytes(), (doc, region)
                by_name = reader.read_array("", {f"d{i}": b for i, b in enumerate(region)})
                assert by_name.tobytes() == part.tobytes()


def listed(group: zarr.Group) -> dict[str, tuple[Any, ...]]:
    """Return what zarr-python says of the nodes of a group."""
    found: dict[str, tuple[Any, ...]] = {"": ("group", dict(group.attrs))}
    for path, node in group.members(max_depth=None):
        attrs = dict(node.attrs)
        if isinstance(node, zarr.Group):
            found[path] = ("group", attrs)
        else:
            dims = getattr(node.metadata, "dimension_names", None)
            found[path] = ("array", attrs, node.shape, node.chunks, node.shards, dims)
    return found


def ours(reader: ms.StoreReader) -> dict[str, tuple[Any, ...]]:
    return {
        path: (n.kind, dict(n.attrs))
        if n.kind == "group"
        else (n.kind, dict(n.attrs), n.shape, n.chunk_shape, n.shard_shape, n.dims)
        for path, n in reader.hierarchy().items()
    }


@pytest.mark.filterwarnings("ignore:Object at notes is not recognized")
def test_a_hierarchy_is_listed_as_zarr_python_lists_it(tmp_path: Path) -> None:
    """Groups and arrays at any depth, with shapes, chunks, shards, dims and attributes, NaN among them."""
    group = zarr.create_group(tmp_path / "g.zarr", attributes={"title": "x", "nothing": None})
    group.create_group("a/b", attributes={"deep": [1, {"er": True}]})
    group.create_array("a/b/c", shape=(4, 6), chunks=(2, 3), shards=(4, 6), dtype="f4", dimension_names=("y", "x"))
    group.create_array("plain", shape=(5,), chunks=(2,), dtype="i2", attributes={"valid_max": 3, "scale": 0.5})
    group.create_array("scalar", shape=(), dtype="f8")
    group.create_array("half", shape=(2, 2), chunks=(1, 2), dtype="u1", dimension_names=(None, "x"))
    (tmp_path / "g.zarr/notes").mkdir()
    (tmp_path / "g.zarr/notes/readme.txt").write_text("no node")
    reader = ms.open_reader(tmp_path / "g.zarr")
    assert ours(reader) == listed(group)
    assert list(reader.hierarchy()) == ["", "a", "a/b", "a/b/c", "half", "plain", "scalar"]
    dtypes = {"a/b/c": "float32", "half": "uint8", "plain": "int16", "scalar": "float64"}
    assert {p: n.dtype for p, n in reader.hierarchy().items() if n.shape is not None} == dtypes
    assert (reader.is_stream, reader.attrs) == (False, {"title": "x", "nothing": None})
    assert reader.attrs_of("a/b") == {"deep": [1, {"er": True}]}
    assert reader.attrs_of("plain") == {"valid_max": 3, "scale": 0.5}
    group["plain"].attrs["missing_value"] = float("nan")
    group["plain"].attrs["largest"] = float("inf")
    attrs = ms.open_reader(tmp_path / "g.zarr").attrs_of("plain")
    assert math.isnan(attrs["missing_value"])
    assert attrs["largest"] == math.inf


def test_zarr_v2_is_listed_and_read(tmp_path: Path) -> None:
    """A store of the older format, with dims as xarray gives them there, big-endian and in Fortran order."""
    values = np.arange(35, dtype=">i4").reshape(5, 7)
    group = zarr.create_group(tmp_path / "g.zarr", zarr_format=2, attributes={"title": "old"})
    array = group.create_array("a/t", shape=(5, 7), chunks=(2, 3), dtype=">i4", order="F", fill_value=-1)
    array.attrs["_ARRAY_DIMENSIONS"] = ["y", "x"]
    array[:4] = values[:4]
    reader = ms.open_reader(tmp_path / "g.zarr")
    node = reader.hierarchy()["a/t"]
    assert list(reader.hierarchy()) == ["", "a", "a/t"]
    assert (node.shape, node.chunk_shape, node.shard_shape) == ((5, 7), (2, 3), None)
    assert (node.dtype, node.dims, reader.attrs) == ("int32", ("y", "x"), {"title": "old"})
    found = reader.read_array("a/t", {"y": (3, 5), "x": (1, 6)})
    assert found.tolist() == [values[3, 1:6].tolist(), [-1] * 5]
    assert found.dtype == np.dtype("int32")
    assert found.dtype.isnative


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_what_xarray_wrote_is_read_by_the_names_of_its_dims(tmp_path: Path, zarr_format: Literal[2, 3]) -> None:
    """A dataset with coordinates and dates: the box of a rank, dims and attributes, and raw values of the dates."""
    t2m = np.arange(24, dtype="f4").reshape(2, 3, 4)
    times = np.array(["2000-01-01", "2000-01-02"], "M8[ns]")
    dataset = xarray.Dataset(
        {"t2m": (("time", "lat", "lon"), t2m, {"units": "K"})},
        coords={"lat": [10.0, 20.0, 30.0], "lon": np.arange(4.0), "time": times},
        attrs={"source": "reanalysis"},
    )
    dataset.to_zarr(tmp_path / "ds.zarr", zarr_format=zarr_format, consolidated=False)
    reader = ms.open_reader(tmp_path / "ds.zarr")
    assert list(reader.hierarchy()) == ["", "lat", "lon", "t2m", "time"]
    assert {p: n.dims for p, n in reader.hierarchy().items() if p} == {p: dataset[p].dims for p in dataset.variables}
    assert reader.attrs["source"] == "reanalysis"
    assert reader.attrs_of("t2m")["units"] == "K"
    region = ms.Region(("lat", "lon", "depth"), [((1, 3), (2, 4), (0, 1))])
    np.testing.assert_array_equal(reader.read_array("t2m", region), t2m[:, 1:3, 2:4], strict=True)
    assert reader.read_array("lat", {"lat": (1, 3)}).tolist() == [20.0, 30.0]
    assert reader.read_array("time").tolist() == [0, 1]
    assert reader.attrs_of("time")["units"].startswith("days since 2000-01-01")


@pytest.mark.parametrize(
    "case",
    [
        {"filters": [{"name": "transpose", "configuration": {"order": [1, 0]}}]},
        {
            "compressors": [
                {"name": "zstd", "configuration": {"level": 1}},
                {"name": "gzip", "configuration": {"level": 1}},
            ]
        },
        {"dtype": "str", "values": np.array([["a", "bc"], ["", "dé"]] * 2)},
        {"dtype": "M8[s]", "values": np.arange(8).astype("M8[s]").reshape(4, 2)},
        {"shards": (4, 2), "compressors": None, "nested": True},
    ],
)
def test_what_our_chain_does_not_speak_is_read_by_zarr_python(tmp_path: Path, case: dict[str, Any]) -> None:
    """Other codecs, strings, dates, shards in shards: the region as zarr-python has it."""
    case = dict(case)
    values = case.pop("values", np.arange(8, dtype="f4").reshape(4, 2))
    dtype, path = case.pop("dtype", values.dtype), tmp_path / "g.zarr"
    if case.pop("nested", False):
        inner: dict[str, Any] = {
            "chunk_shape": [1, 2],
            "codecs": [BYTES["little"]],
            "index_codecs": [BYTES["little"], CRC],
        }
        nested: dict[str, Any] = {"name": "sharding_indexed", "configuration": inner}
        case = {"serializer": {**nested, "configuration": {**inner, "chunk_shape": [2, 2], "codecs": [nested]}}}
        case |= {"compressors": None}
    array = zarr.create_group(path).create_array(
        "v", shape=(4, 2), chunks=case.pop("chunks", (4, 2)), dtype=dtype, **case
    )
    array[:] = values
    reader = ms.open_reader(path)
    np.testing.assert_array_equal(reader.read_array("v", [(1, 4), (1, 2)]), values[1:4, 1:2])
    assert reader.hierarchy()["v"].shape == (4, 2)


def test_what_zarr_python_can_not_read_either_is_a_format_error(tmp_path: Path) -> None:
    """An extension that nobody knows is listed, and reading it says what it is and what zarr-python made of it."""
    array = zarr.create_array(tmp_path / "a.zarr", shape=(4,), dtype="f4", attributes={"k": 1})
    array[:] = 1
    path = tmp_path / "a.zarr/zarr.json"
    good = json.loads(path.read_text())
    changes: list[tuple[dict[str, Any], str]] = [
        ({"codecs": [*good["codecs"], {"name": "crystal"}]}, "crystal"),
        ({"data_type": {"name": "quaternion", "configuration": {}}}, "data type 'quaternion'"),
        ({"chunk_grid": {"name": "hexagonal"}}, "chunk grid"),
        ({"hologram": {"a": 1}}, "field 'hologram'"),
    ]
    for change, reason in changes:
        path.write_text(json.dumps({**good, **change}))
        reader = ms.open_reader(tmp_path / "a.zarr")
        assert (reader.hierarchy()[""].shape, reader.attrs) == ((4,), {"k": 1})
        with pytest.raises(ms.FormatError, match=reason) as caught:
            reader.read_array("")
        assert caught.value.kind == "zarr"
    path.write_text(json.dumps({**good, "hologram": {"must_understand": False}}))
    assert ms.open_reader(tmp_path / "a.zarr").read_array("").tolist() == [1.0] * 4


def test_native_arrays_are_read_without_zarr(tmp_path: Path) -> None:
    """A rank that reads initial conditions in a common codec chain never imports zarr."""
    zarr.create_group(tmp_path / "g.zarr").create_array("v", data=np.arange(6.0), chunks=(4,))
    code = (
        "import sys, mpistream as ms\n"
        f"r = ms.open_reader({str(tmp_path / 'g.zarr')!r})\n"
        "print(sorted(r.hierarchy()), r.read_array('v', [(3, 6)]).tolist(), 'zarr' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[0] == "['', 'v'] [3.0, 4.0, 5.0] False"


def test_arrays_of_a_stream_below_a_group_and_foreign_ones_beside_it(tmp_path: Path) -> None:
    """A plain group above streams: each stream is listed as it is committed, and read through its own reader."""
    group = zarr.create_group(tmp_path / "run.zarr", attributes={"experiment": 7})
    group.create_array("mask", data=np.arange(3, dtype="i1"))
    schema = ms.StreamSchema(
        dims={"time": None, "x": 4},
        time=ms.AppendTime(units="s"),
        variables={"u": ms.Variable(("time", "x"), "float32", attrs={"units": "m"})},
        attrs={"title": "air"},
    )
    options = ms.Options(durability="none", threads=0)
    with ms.write_open(tmp_path / "run.zarr/air", schema, options=options) as w:
        w.write_record(0.5, {"u": np.arange(4, dtype="f4")})
        w.commit()
        w.write_record(1.5, {"u": np.arange(4, dtype="f4")})
        reader = ms.open_reader(tmp_path / "run.zarr")
        nodes = reader.hierarchy()
        assert list(nodes) == ["", "air", "air/time", "air/u", "mask"]
        assert [p for p, n in nodes.items() if n.is_stream] == ["air"]
        assert (nodes["air/u"].shape, nodes["air/u"].dims, nodes["air/u"].attrs) == (
            (1, 4),
            ("time", "x"),
            {"units": "m"},
        )
        assert nodes["air"].attrs == {"title": "air"}
        assert (reader.attrs_of("air"), reader.attrs_of("air/u")) == ({"title": "air"}, {"units": "m"})
        with pytest.raises(ms.SchemaError, match=r"open_reader\('.*run.zarr/air'\)") as caught:
            reader.read_array("air/u")
        assert caught.value.kind == "stream"
        assert reader.read_array("mask").tolist() == [0, 1, 2]
        w.rollback()


def test_foreign_arrays_in_another_store_than_a_folder(tmp_path: Path) -> None:
    """What our own chain reads needs no folder; what only zarr-python reads says so."""
    group = zarr.create_group(tmp_path / "g")
    group.create_array("v", data=np.arange(6.0), chunks=(4,))
    group.create_array("s", data=np.array(["a", "b"]))
    store = MemoryStore()
    for path in (tmp_path / "g").rglob("*"):
        if path.is_file():
            key = str(path.relative_to(tmp_path / "g"))
            store.make_folder(key.rpartition("/")[0])
            store.create(key, path.read_bytes())
    reader = ms.open_reader(store)  # type: ignore[arg-type]
    assert list(reader.hierarchy()) == ["", "s", "v"]
    assert reader.read_array("v", [(2, 5)]).tolist() == [2.0, 3.0, 4.0]
    with pytest.raises(ms.StoreError, match="only a local folder") as caught:
        reader.read_array("s")
    assert caught.value.kind == "not_local"

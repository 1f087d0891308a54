"""What a store claims is compared with what can be before it is read; see also ``tests/crash/test_hostile.py``."""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np
import pytest

import mpistream as ms
from mpistream.blobs import MAX_BLOB_NBYTES, read_pack_index
from mpistream.local_store import MAX_READ_NBYTES, LocalStore
from mpistream.reader import _room
from mpistream.store import read_whole
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.extract import plan_reads
from mpistream.zarr3.shard import ShardSpec, index_bytes
from tests.support.shards import OpenedBytes

FLOAT = np.dtype("float32")


def chain(compressor: dict[str, Any] | None = None, serializer: str = "bytes") -> list[dict[str, Any]]:
    return [{"name": serializer}, *([compressor] if compressor else []), {"name": "crc32c"}]


@pytest.mark.parametrize(
    "compressor",
    [
        None,
        {
            "name": "blosc",
            "configuration": {"cname": "zstd", "clevel": 9, "shuffle": "bitshuffle", "typesize": 4, "blocksize": 0},
        },
        {"name": "zstd", "configuration": {"level": 19}},
        {"name": "gzip", "configuration": {"level": 9}},
    ],
    ids=lambda c: "none" if c is None else c["name"],
)
@pytest.mark.parametrize("n", [1, 100, 300_000])
def test_no_codec_makes_more_of_a_chunk_than_is_read(compressor: dict[str, Any] | None, n: int) -> None:
    """Of bytes that can't be compressed, too."""
    codec = ChunkCodec(chain(compressor), FLOAT)
    noise = np.frombuffer(np.random.default_rng(n).bytes(4 * n), FLOAT)
    assert sum(len(piece) for piece in codec.encode(noise)) <= codec.max_nbytes((n,))
    assert codec.max_nbytes((n,)) < 1.2 * 4 * n + 2000


def test_strings_have_a_bound_of_their_own() -> None:
    codec = ChunkCodec(chain(serializer="vlen-utf8"), np.dtypes.StringDType())
    assert codec.max_nbytes((3,)) == codec.max_nbytes((10**9,)) > 64 * 2**20


def test_an_inner_chunk_that_claims_too_much_is_not_read() -> None:
    """Its entry lies inside the object: what is read is the index, and nothing else."""
    spec = ShardSpec(shard_shape=(1, 2), chunk_shape=(1, 2), codec=ChunkCodec(chain(), FLOAT), fill=np.zeros((), FLOAT))
    most = spec.codec.max_nbytes((1, 2))
    index = index_bytes(np.array([[0, most + 1]], np.uint64))
    opened = OpenedBytes(bytes(most + 1) + index)
    with pytest.raises(ms.FormatError, match=rf"inner chunk claims {most + 1} bytes.*at most {most}") as caught:
        plan_reads(spec, opened, ((0, 1), (0, 2)), np.empty((1, 2), FLOAT))
    assert caught.value.kind == "chunk"
    assert opened.calls == [(most + 1, len(index))]
    assert spec.max_nbytes > 3 * most


def test_a_blob_larger_than_there_can_be_is_refused() -> None:
    """Also where the pack has the room that it claims."""
    text = b'{"blobs":[["a","static",0,%d,"00000000"]]}' % (MAX_BLOB_NBYTES + 1)
    tail = text + len(text).to_bytes(8, "little") + google_crc32c.value(text).to_bytes(4, "little")
    start = 2 * MAX_BLOB_NBYTES
    with pytest.raises(ms.FormatError, match=f"{MAX_BLOB_NBYTES + 1} bytes, at most {MAX_BLOB_NBYTES}") as caught:
        read_pack_index("p", start + len(tail), lambda offset, n: tail[offset - start : offset - start + n])
    assert caught.value.kind == "blob"


def test_an_object_larger_than_it_can_be_is_not_read(tmp_path: Any) -> None:
    """A document or chunk has a bound of the store, a shard one of its array."""
    store = LocalStore(tmp_path)
    (tmp_path / "a").write_bytes(b"abc")
    assert (read_whole(store, "a", 3), read_whole(store, "b", 3)) == (b"abc", None)
    with pytest.raises(ms.FormatError, match="a: 3 bytes, it can have at most 2") as caught:
        read_whole(store, "a", 2)
    assert caught.value.kind == "size"
    with open(tmp_path / "a", "r+b") as file:
        file.truncate(MAX_READ_NBYTES + 1)
    with pytest.raises(ms.FormatError, match=f"{MAX_READ_NBYTES + 1} bytes") as caught:
        store.read("a")
    assert caught.value.kind == "size"


@pytest.mark.parametrize("key", ["../a", "a/../b", "/a", "a//b", "a/", ".", "a/./b", "a\0b"])
@pytest.mark.parametrize(
    "call",
    [
        lambda s, k: s.read(k),
        lambda s, k: s.open(k),
        lambda s, k: s.list(k),
        lambda s, k: s.make_folder(k),
        lambda s, k: s.create(k, b""),
        lambda s, k: s.stage(k, [b""], sync=False),
        lambda s, k: s.place("x", k),
        lambda s, k: s.move("x", k),
        lambda s, k: s.move(k, "x"),
        lambda s, k: s.delete(k),
        lambda s, k: s.delete_tree(k),
        lambda s, k: s.copy(k, "y"),
    ],
)
def test_keys_that_lead_out_are_refused_by_every_call(tmp_path: Any, key: str, call: Any) -> None:
    root = tmp_path / "store"
    root.mkdir()
    (root / "x").touch()
    with pytest.raises(ms.StoreError, match="is no key of a store") as caught:
        call(LocalStore(root), key)
    assert caught.value.kind == "key"
    assert sorted(tmp_path.rglob("*")) == [root, root / "x"]


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.read("link/a"),
        lambda s: s.list("link"),
        lambda s: s.list("link/below"),
        lambda s: s.make_folder("link/new"),
        lambda s: s.create("link/new", b""),
        lambda s: s.stage("link/new", [b""], sync=False),
        lambda s: s.place("x", "link/a"),
        lambda s: s.move("x", "link/a"),
        lambda s: s.move("link/a", "y"),
        lambda s: s.delete("link/a"),
        lambda s: s.delete_tree("link/below"),
        lambda s: s.sync_folders(["link/a"]),
        lambda s: s.read("file"),
    ],
)
def test_links_are_followed_by_no_call(tmp_path: Any, call: Any) -> None:
    """A link to a folder outside, or to a file; what lies there stays as it is."""
    root, outside = tmp_path / "store", tmp_path / "outside"
    (outside / "below").mkdir(parents=True)
    (outside / "a").write_bytes(b"secret")
    root.mkdir()
    (root / "x").touch()
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "a")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ms.StoreError, match="link") as caught:
        call(LocalStore(root))
    assert caught.value.kind == "link"
    assert sorted(tmp_path.rglob("*")) == before
    assert (outside / "a").read_bytes() == b"secret"
    assert LocalStore(root, follow_links=True).read("link/a") == b"secret"


def test_a_link_itself_can_be_removed(tmp_path: Any) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    (outside / "a").touch()
    root.mkdir()
    for name in ("one", "two"):
        (root / name).symlink_to(outside)
    store = LocalStore(root)
    assert store.delete("one")
    store.delete_tree("two")
    assert sorted(tmp_path.rglob("*")) == [outside, outside / "a", root]


def test_folders_that_were_looked_at_are_forgotten_in_time(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on for long does not keep the names of all its rows."""
    monkeypatch.setattr("mpistream.local_store._MAX_KNOWN_FOLDERS", 3)
    store = LocalStore(tmp_path)
    for i in range(9):
        store.make_folder(f"a/{i}")
        store.create(f"a/{i}/x", b"")
    assert len(store._known_folders) <= 3


def test_more_values_than_memory_has_are_an_error() -> None:
    """Not numpy's own, of which there are two."""
    for shape in ([2**60, 2**60], [2**50]):
        with pytest.raises(ms.SchemaError, match=r"'m': .* too many for memory") as caught:
            _room("m", shape, np.dtype("int8"))
        assert caught.value.kind == "region"


def test_attributes_are_added_to_a_schema() -> None:
    """The first schema stays as it is, and so does the fingerprint."""
    schema = ms.StreamSchema(
        dims={"time": None},
        time=ms.AppendTime(units="s"),
        variables={"n": ms.Variable(("time",), "int8")},
        attrs={"a": 1, "b": 2},
    )
    more = schema.with_attrs({"b": 3, "c": 4})
    assert (dict(schema.attrs), dict(more.attrs)) == ({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4})
    assert more.fingerprint() == schema.fingerprint()
    with pytest.raises(ms.SchemaError):
        schema.with_attrs({"b": float("nan")})

"""Boxes out of shards: the cells, the reads that they need, and where they are decoded to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistream.errors import FormatError
from mpistream.zarr3 import extract
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.extract import DecodeScratch, plan_reads
from mpistream.zarr3.shard import ShardSpec, index_bytes
from tests.support.shards import OpenedBytes, make_spec, read_box, read_shard, write_shard

MISSING = 2**64 - 1
SPEC = make_spec((1, 4, 6), (1, 2, 3))
RECORD = np.arange(1, 25, dtype="float32").reshape(4, 6)
DATA = write_shard(SPEC, [RECORD])
CHUNK_NBYTES = 2 * 3 * 4 + 4
WHOLE = [(0, 1), (0, 4), (0, 6)]


@given(st.data())
def test_any_box_is_what_numpy_slices(data) -> None:
    """Half-open bounds in every dim, empty ones too, in either byte order and whatever lies around the output."""
    chunk_shape = data.draw(st.sampled_from([(2, 2, 5), (2, 3, 2), (1, 6, 5)]))
    spec = make_spec((4, 6, 10), chunk_shape, profile=data.draw(st.sampled_from(["none", "fast"])))
    if data.draw(st.booleans()):
        chain: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]
        codec = ChunkCodec(chain, np.dtype("float32"))
        spec = ShardSpec(shard_shape=spec.shard_shape, chunk_shape=chunk_shape, codec=codec, fill=spec.fill)
    values = np.random.default_rng(1).standard_normal((4, 6, 10)).astype("float32")
    stored = write_shard(spec, values)
    box = [tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in (4, 6, 10)]
    expected = values[tuple(slice(a, b) for a, b in box)]
    assert read_box(spec, stored, box).tolist() == expected.tolist()
    # A part of a larger array: what is around it stays.
    around = np.full([b - a + 2 for a, b in box], 77, "float32")
    read_shard(spec, OpenedBytes(stored), box, around[1:-1, 1:-1, 1:-1])
    assert around.tolist() == np.pad(expected, 1, constant_values=77).tolist()


def reads_of(spec, data, box):
    """The (offset, nbytes) of every read after that of the index."""
    opened = OpenedBytes(data)
    read_shard(spec, opened, box, np.empty([b - a for a, b in box], spec.fill.dtype))
    assert opened.calls[0] == (len(data) - spec.index_nbytes, spec.index_nbytes)
    return opened.calls[1:]


def test_neighbours_are_one_read() -> None:
    """A whole shard is the index and one read; a box reads from its first to its last inner chunk."""
    n = CHUNK_NBYTES
    assert reads_of(SPEC, DATA, WHOLE) == [(0, 4 * n)]
    assert reads_of(SPEC, DATA, [(0, 1), (1, 3), (4, 5)]) == [(n, 3 * n)]
    assert reads_of(SPEC, DATA, [(0, 1), (2, 4), (0, 3)]) == [(2 * n, n)]


def test_fill_is_not_read() -> None:
    """Where nothing is stored the index is enough."""
    data = write_shard(SPEC, [np.zeros((4, 6), "float32")])
    assert reads_of(SPEC, data, WHOLE) == []


@pytest.mark.parametrize(("n_values", "n_reads"), [(16 * 1024 - 1, 1), (16 * 1024, 2)])
def test_a_wide_gap_is_not_read(n_values, n_reads) -> None:
    """64 KiB between two inner chunks are read with them, more are not."""
    spec = make_spec((1, 3, n_values), (1, 1, n_values))
    data = write_shard(spec, [np.ones((3, n_values), "float32")])
    nbytes = 4 * n_values + 4
    # The middle one is taken out of the index, so that its bytes are a gap.
    entries = np.array([[0, nbytes], [MISSING, MISSING], [2 * nbytes, nbytes]], np.uint64)
    data = data[: -spec.index_nbytes] + index_bytes(entries)
    reads = reads_of(spec, data, [(0, 1), (0, 3), (0, 1)])
    assert reads == ([(0, 3 * nbytes)] if n_reads == 1 else [(0, nbytes), (2 * nbytes, nbytes)])


def test_a_read_has_a_limit(monkeypatch) -> None:
    """Neighbours are joined up to 2 MiB; one inner chunk that is larger is read alone."""
    n = CHUNK_NBYTES
    assert extract._MAX_READ_NBYTES == 2 * 2**20
    monkeypatch.setattr(extract, "_MAX_READ_NBYTES", 2 * n)
    assert reads_of(SPEC, DATA, WHOLE) == [(0, 2 * n), (2 * n, 2 * n)]
    monkeypatch.setattr(extract, "_MAX_READ_NBYTES", n - 1)
    assert reads_of(SPEC, DATA, WHOLE) == [(i * n, n) for i in range(4)]


def test_an_object_that_shrinks_while_it_is_read_is_refused() -> None:
    """Whatever fewer bytes a read returns than it was asked for."""
    for n in range(4 * CHUNK_NBYTES):
        with pytest.raises(FormatError) as caught:
            read_shard(SPEC, OpenedBytes(DATA, shrunk=n), WHOLE, np.empty((1, 4, 6), "float32"))
        assert caught.value.kind in ("checksum", "chunk")


class Destinations(ChunkCodec):
    """A codec that notes the arrays that it decodes into."""

    def __init__(self) -> None:
        super().__init__([{"name": "bytes", "configuration": {"endian": "little"}}], np.dtype("float32"))
        self.given: list[np.ndarray] = []

    def decode_into(self, data: Any, out: np.ndarray) -> None:
        self.given.append(out)
        super().decode_into(data, out)


@pytest.mark.parametrize(
    ("chunk_shape", "box", "n_direct"),
    [
        ((1, 2, 6), [(0, 1), (0, 4), (0, 6)], 2),
        ((1, 2, 6), [(0, 1), (1, 4), (0, 6)], 1),
        ((1, 2, 3), [(0, 1), (0, 4), (0, 6)], 0),
        ((1, 2, 3), [(0, 1), (0, 4), (3, 6)], 2),
    ],
)
def test_a_whole_chunk_is_decoded_where_it_belongs(chunk_shape, box, n_direct) -> None:
    """If it is one stretch of the output; all others go through one chunk of scratch memory."""
    codec = Destinations()
    spec = ShardSpec(shard_shape=(1, 4, 6), chunk_shape=chunk_shape, codec=codec, fill=np.zeros((), "float32"))
    out = np.empty([b - a for a, b in box], "float32")
    scratch = DecodeScratch()
    for batch in plan_reads(spec, OpenedBytes(write_shard(spec, [RECORD])), box, out):
        batch.decode(scratch)
    assert out.tolist() == RECORD[np.newaxis][tuple(slice(a, b) for a, b in box)].tolist()
    direct = [given for given in codec.given if np.shares_memory(given, out)]
    others = [given for given in codec.given if not np.shares_memory(given, out)]
    assert len(direct) == n_direct
    assert all(given is others[0] for given in others)


def test_strings_are_decoded_to_memory_of_their_own() -> None:
    """Of any length, so no buffer fits them; others write them in shards, and the box's cells are read."""
    dtype = np.dtypes.StringDType()
    codec = ChunkCodec([{"name": "vlen-utf8"}, {"name": "crc32c"}], dtype)
    spec = ShardSpec(shard_shape=(1, 4), chunk_shape=(1, 2), codec=codec, fill=np.array("none", dtype))
    encoded = b"".join(map(bytes, codec.encode(np.array([["a", "böö" * 20]], dtype))))
    data = encoded + index_bytes(np.array([[0, len(encoded)], [MISSING, MISSING]], np.uint64))
    out = np.empty((1, 3), dtype)
    read_shard(spec, OpenedBytes(data), [(0, 1), (1, 4)], out)
    assert out.tolist() == [["böö" * 20, "none", "none"]]

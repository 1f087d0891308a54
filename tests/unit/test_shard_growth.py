"""A shard that grows record by record: every version that a reader may hold goes on telling the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream.errors import FormatError
from mpistream.zarr3.codecs import ChunkCodec, profile_chain
from mpistream.zarr3.shard import ChunkEncoder, OpenShard, ShardSpec
from tests.support.shards import entries_of, joined, make_spec, read_whole, write_shard

ROW = 8
BOX = (3, 5)  # the shard has 4 x 6: an edge in both dims
extents = pytest.mark.parametrize("extent", [1, 2, 4, 8])


def row_spec(extent: int, *, fill: float = 0, profile: str = "none") -> ShardSpec:
    return make_spec((ROW, 4, 6), (extent, 2, 3), fill=fill, profile=profile)


def records(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(1, 100, (n, *BOX)).astype("float32")


def padded(spec: ShardSpec, values: Any) -> Any:
    """What a whole shard of these records holds."""
    found = np.full(spec.shard_shape, spec.fill, spec.fill.dtype)
    found[tuple(slice(n) for n in values.shape)] = values
    return found


class Version:
    """What a plain reader keeps of an object: its index, and what was committed in it."""

    def __init__(self, spec: ShardSpec, data: bytes, values: Any) -> None:
        self.spec = spec
        self.values = values.copy()
        self.entries = entries_of(spec, data)

    def check(self, later: bytes, n_records: int) -> None:
        """Decode every inner chunk of the old index from a later object: its committed records are right."""
        extent, ny, nx = self.spec.chunk_shape
        n = min(len(self.values), n_records)
        expected = padded(self.spec, self.values[:n])
        for (t, y, x), (offset, nbytes) in self.entries.items():
            n_committed = min(max(n - t * extent, 0), extent)
            if n_committed:
                chunk = self.spec.codec.decode(later[offset : offset + nbytes], self.spec.chunk_shape)
                there = expected[t * extent :, y * ny : (y + 1) * ny, x * nx : (x + 1) * nx][:n_committed]
                assert chunk[:n_committed].tobytes() == there.tobytes()


# ---- growth ------------------------------------------------------------------------------------------


@extents
@pytest.mark.parametrize("fill", [0, np.nan])
@pytest.mark.parametrize("profile", ["none", "fast"])
def test_every_earlier_index_holds_in_every_later_object(extent, fill, profile) -> None:
    """A commit after each record: old inner chunks stay where they were, byte for byte."""
    spec = row_spec(extent, fill=fill, profile=profile)
    values = records(ROW)
    shard = OpenShard(ChunkEncoder(spec), BOX)
    versions = []
    for n in range(1, ROW + 1):
        shard.put(n - 1, values[n - 1])
        data = joined(shard)
        assert read_whole(spec, data).tobytes() == padded(spec, values[:n]).tobytes()
        versions.append(Version(spec, data, values[:n]))
        for version in versions:
            version.check(data, n)


class Encoded(ChunkCodec):
    """Counts the inner chunks that it encodes."""

    n = 0

    def encode(self, chunk: Any, **more: Any) -> list[Any]:
        self.n += 1
        return super().encode(chunk, **more)


@pytest.mark.parametrize(("extent", "expected"), [(1, [4] * 8), (2, [4] * 8), (8, [4] * 8)])
def test_a_record_is_encoded_once_when_its_inner_chunk_is_one_record(extent, expected) -> None:
    """A commit costs the inner chunks of the records that came since; unchanged ones are not touched."""
    codec = Encoded(profile_chain("fast", np.dtype("float32")), np.dtype("float32"))
    spec = ShardSpec(shard_shape=(ROW, 4, 6), chunk_shape=(extent, 2, 3), codec=codec, fill=np.array(0, "float32"))
    shard = OpenShard(ChunkEncoder(spec), BOX)
    found = []
    for i, record in enumerate(records(ROW)):
        before = codec.n
        shard.put(i, record)
        first, again = joined(shard), joined(shard)
        assert first == again
        found.append(codec.n - before)
    assert found == expected


def test_with_one_record_an_inner_chunk_an_object_only_grows() -> None:
    """The chunks of the last object are the front of the next."""
    spec = row_spec(1)
    shard = OpenShard(ChunkEncoder(spec), BOX)
    last = b""
    for i, record in enumerate(records(ROW)):
        shard.put(i, record)
        chunks = joined(shard)[: -spec.index_nbytes]
        assert chunks.startswith(last)
        assert len(chunks) - len(last) == 4 * (2 * 3 * 4 + 4)
        last = chunks


def test_without_commits_a_row_holds_every_inner_chunk_once() -> None:
    """A row that is written at its end alone is as small as it can be."""
    for extent in (1, 2, 4, 8):
        spec = row_spec(extent)
        data = write_shard(spec, records(ROW))
        assert len(data) == 4 * (ROW // extent) * (extent * 2 * 3 * 4 + 4) + spec.index_nbytes


@extents
def test_the_callers_array_is_free_after_each_record(extent) -> None:
    """Overwritten with 0xFF, it leaves no trace in the row."""
    spec = row_spec(extent)
    values = records(ROW)
    shard = OpenShard(ChunkEncoder(spec), BOX)
    block = np.empty(BOX, "float32")
    for i, record in enumerate(values):
        block[...] = record
        shard.put(i, block)
        block.view(np.uint8)[...] = 0xFF
    assert read_whole(spec, joined(shard)).tobytes() == padded(spec, values).tobytes()


@extents
def test_memory_is_that_of_encoded_pieces_and_one_slab(extent) -> None:
    """With one record an inner chunk there is no slab."""
    spec = row_spec(extent)
    shard = OpenShard(ChunkEncoder(spec), BOX)
    assert shard.nbytes == 0
    for n, record in enumerate(records(ROW), 1):
        shard.put(n - 1, record)
        n_full, n_in_slab = divmod(n, extent)
        encoded = 4 * n_full * (extent * 2 * 3 * 4 + 4)
        slab = extent * 3 * 5 * 4 if n_in_slab else 0
        assert shard.nbytes == encoded + slab


# ---- read back by a resume ---------------------------------------------------------------------------


@extents
@pytest.mark.parametrize("n_keep", range(ROW + 1))
def test_a_row_goes_on_from_an_object_with_fewer_records(extent, n_keep) -> None:
    """What the object holds beyond them is gone, and other records take their place."""
    spec = row_spec(extent, profile="fast")
    old, new = records(ROW), records(ROW, seed=1)
    data = write_shard(spec, old)
    shard = OpenShard.from_object(ChunkEncoder(spec), BOX, data, range(n_keep))
    kept = Version(spec, data, old[:n_keep])
    assert read_whole(spec, joined(shard)).tobytes() == padded(spec, old[:n_keep]).tobytes()
    for n in range(n_keep, ROW):
        shard.put(n, new[n])
        later = joined(shard)
        expected = np.concatenate((old[:n_keep], new[n_keep : n + 1]))
        assert read_whole(spec, later).tobytes() == padded(spec, expected).tobytes()
        kept.check(later, n_keep)


@pytest.mark.parametrize("n_keep", [0, 1, 2, 3])
def test_bytes_behind_the_last_committed_inner_chunk_are_dropped(n_keep) -> None:
    """An object of a crash does not grow with what was never committed."""
    spec = row_spec(1)
    shard = OpenShard.from_object(ChunkEncoder(spec), BOX, write_shard(spec, records(ROW)), range(n_keep))
    assert joined(shard) == write_shard(spec, records(ROW)[:n_keep], BOX)


@extents
def test_inner_chunks_that_are_left_out_stay_so(extent) -> None:
    """A row of fill is an index, read back and grown."""
    spec = row_spec(extent, fill=5)
    fill = np.full((3, *BOX), 5, "float32")
    data = write_shard(spec, fill)
    assert len(data) == spec.index_nbytes
    shard = OpenShard.from_object(ChunkEncoder(spec), BOX, data, range(3))
    assert len(joined(shard)) == spec.index_nbytes
    shard.put(3, records(1)[0])
    assert read_whole(spec, joined(shard)).tobytes() == padded(spec, np.concatenate((fill, records(1)))).tobytes()


def test_a_damaged_slab_is_refused_when_it_is_read_back() -> None:
    """An inner chunk that must be decoded is checked; one that is only kept stays as it is."""
    spec = row_spec(4)
    data = bytearray(write_shard(spec, records(ROW)))
    offset, _ = entries_of(spec, bytes(data))[1, 0, 0]
    data[offset] ^= 1
    with pytest.raises(FormatError, match="CRC32C differs") as caught:
        OpenShard.from_object(ChunkEncoder(spec), BOX, bytes(data), range(6))
    assert caught.value.kind == "checksum"
    kept = OpenShard.from_object(ChunkEncoder(spec), BOX, bytes(data), range(4))
    assert read_whole(spec, joined(kept)).tobytes() == padded(spec, records(ROW)[:4]).tobytes()


# ---- any history -------------------------------------------------------------------------------------


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.0, -0.0, np.nan]),
    st.lists(st.tuples(st.sampled_from(["add", "fill", "commit", "resume"]), st.integers(0, ROW)), max_size=30),
)
@settings(max_examples=120)
def test_any_history_of_a_row_keeps_what_was_committed(extent, fill, history) -> None:
    """Records, commits and resumes that drop some: indexes of this epoch and the last hold for what was kept."""
    spec = row_spec(extent, fill=fill, profile="fast")
    encoder = ChunkEncoder(spec)
    shard = OpenShard(encoder, BOX)
    written = np.empty((0, *BOX), "float32")
    committed, data = written, b""
    old: list[Version] = []
    versions: list[Version] = []
    for step, (action, number) in enumerate(history):
        if action in ("add", "fill") and len(written) < ROW:
            record = (
                records(1, seed=step) if action == "add" else np.full((1, *BOX), [-0.0, fill][number % 2], "float32")
            )
            shard.put(len(written), record[0])
            written = np.concatenate((written, record))
        elif action == "commit":
            data, committed = joined(shard), written
            versions.append(Version(spec, data, committed))
        elif action == "resume" and data:
            committed = written = committed[:number]
            old, versions = versions, []
            for version in old:
                version.values = version.values[: len(committed)]  # it promises no more than what was kept
            shard = OpenShard.from_object(encoder, BOX, data, range(len(committed)))
            data = joined(shard)
        if data:
            assert read_whole(spec, data).tobytes() == padded(spec, committed).tobytes()
            for version in (*old, *versions):
                version.check(data, len(committed))

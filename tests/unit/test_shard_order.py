"""A shard whose records come in any order: what zarr-python reads of it, and what of it is read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream.errors import FormatError
from mpistream.zarr3.codecs import profile_chain
from mpistream.zarr3.shard import ChunkEncoder, OpenShard, ShardSpec
from tests.support.shards import entries_of, joined, make_spec, read_whole, write_shard
from tests.support.zarr_bytes import ZarrArray

ROW = 8
BOX = (3, 5)  # the shard has 4 x 6: an edge in both dims
F4 = np.dtype("float32")
extents = pytest.mark.parametrize("extent", [1, 2, 4])

Values = Mapping[int, Any]


def row_spec(extent: int, *, fill: float = 0, profile: str = "fast") -> ShardSpec:
    return make_spec((ROW, 4, 6), (extent, 2, 3), fill=fill, profile=profile)


def block(seed: int) -> Any:
    return np.random.default_rng(seed).integers(1, 100, BOX).astype(F4)


def some(numbers: Iterable[int], seed: int = 0) -> dict[int, Any]:
    """Values of these records."""
    return {n: block(100 * seed + n) for n in numbers}


def whole(values: Values, fill: float = 0) -> Any:
    """The row: these records, the others fill."""
    found = np.full((ROW, *BOX), fill, F4)
    for n, value in values.items():
        found[n] = value
    return found


def put(shard: OpenShard, values: Values) -> None:
    for n, value in values.items():
        shard.put(n, value)


def in_zarr(extent: int, fill: float, data: bytes) -> Any:
    """What zarr-python makes of the object."""
    theirs = ZarrArray(
        (ROW, *BOX), F4, profile_chain("fast", F4), chunk_shape=(extent, 2, 3), shard_shape=(ROW, 4, 6), fill=fill
    )
    theirs[0, 0, 0] = data
    return theirs.array[...]


def of_zarr(extent: int, values: Values) -> bytes:
    """The object that zarr-python makes of these records."""
    theirs = ZarrArray(
        (ROW, *BOX), F4, profile_chain("fast", F4), chunk_shape=(extent, 2, 3), shard_shape=(ROW, 4, 6), fill=0
    )
    theirs.array[...] = whole(values)
    found = theirs[0, 0, 0]
    assert found is not None
    return found


class Promise:
    """What a plain reader keeps of an object: its index, and the records that were committed in it."""

    def __init__(self, spec: ShardSpec, data: bytes, values: Values) -> None:
        self.spec = spec
        self.values = dict(values)
        self.entries = entries_of(spec, data)

    def keep(self, numbers: Iterable[int]) -> None:
        """Promise no more than these records."""
        self.values = {n: v for n, v in self.values.items() if n in set(numbers)}

    def check(self, later: bytes) -> None:
        """Read every promised record out of a later object, by way of the old index."""
        extent, ny, nx = self.spec.chunk_shape
        for n, value in self.values.items():
            found = np.full(self.spec.shard_shape[1:], self.spec.fill, F4)
            for (t, y, x), (offset, nbytes) in self.entries.items():
                if t == n // extent:
                    chunk = self.spec.codec.decode(later[offset : offset + nbytes], self.spec.chunk_shape)
                    found[y * ny : (y + 1) * ny, x * nx : (x + 1) * nx] = chunk[n % extent]
            assert found[: BOX[0], : BOX[1]].tobytes() == value.tobytes()


# ---- any order ---------------------------------------------------------------------------------------


@extents
@given(order=st.permutations(range(ROW)), n=st.integers(0, ROW), fill=st.sampled_from([0.0, np.nan]))
@settings(max_examples=40)
def test_zarr_python_reads_records_that_were_put_in_any_order(extent, order, n, fill) -> None:
    """Some or all of the row; the others are fill, and the object is made once or after every record."""
    spec = row_spec(extent, fill=fill)
    values = some(order[:n])
    at_once, each_time = OpenShard(ChunkEncoder(spec), BOX), OpenShard(ChunkEncoder(spec), BOX)
    for i, (number, value) in enumerate(values.items(), 1):
        at_once.put(number, value)
        each_time.put(number, value)
        there = whole({k: values[k] for k in order[:i]}, fill)
        assert in_zarr(extent, fill, joined(each_time)).tobytes() == there.tobytes()
    assert in_zarr(extent, fill, joined(at_once)).tobytes() == whole(values, fill).tobytes()


@extents
def test_the_order_of_records_changes_only_where_they_lie(extent) -> None:
    """Every inner chunk is there once, whole, with the same bytes."""
    spec = row_spec(extent)
    blocks = [block(n) for n in range(ROW)]
    forward = write_shard(spec, blocks)
    mixed = write_shard(spec, blocks, order=[5, 0, 7, 2, 6, 1, 4, 3])
    assert len(mixed) == len(forward)

    def chunks(data: bytes) -> dict[Any, bytes]:
        return {k: data[o : o + n] for k, (o, n) in entries_of(spec, data).items()}

    assert chunks(mixed) == chunks(forward)


@pytest.mark.parametrize("extent", [2, 4])
def test_several_slabs_are_held_until_they_are_full(extent) -> None:
    """Raw records of every inner chunk that was begun, and the encoded pieces of those that are full."""
    shard = OpenShard(ChunkEncoder(row_spec(extent, profile="none")), BOX)
    slab, encoded = extent * 3 * 5 * 4, 4 * (extent * 2 * 3 * 4 + 4)
    for i, first in enumerate(range(0, ROW, extent), 1):
        shard.put(first, block(first))
        assert shard.nbytes == i * slab
    for n in range(extent + 1, 2 * extent):
        shard.put(n, block(n))
    assert shard.nbytes == (ROW // extent - 1) * slab + encoded


def test_a_slab_is_encoded_again_only_when_it_grew() -> None:
    """One that did not change costs no bytes in the next object."""
    spec = row_spec(4, profile="none")
    shard = OpenShard(ChunkEncoder(spec), BOX)
    chunk = 4 * (4 * 2 * 3 * 4 + 4)
    sizes = []
    for n in (0, 5, 6):
        shard.put(n, block(n))
        assert joined(shard) == joined(shard)
        sizes.append(len(joined(shard)) - spec.index_nbytes)
    assert sizes == [chunk, 2 * chunk, 3 * chunk]


# ---- read back ---------------------------------------------------------------------------------------


@extents
@given(there=st.sets(st.integers(0, ROW - 1)), kept=st.sets(st.integers(0, ROW - 1)), by_zarr=st.booleans())
@settings(max_examples=40)
def test_any_set_of_records_is_read_back_and_the_row_filled_up(extent, there, kept, by_zarr) -> None:
    """Of an object of ours or of zarr-python; what is not kept is gone, and others take its place."""
    kept &= there
    spec = row_spec(extent)
    old = some(there)
    first = OpenShard(ChunkEncoder(spec), BOX)
    put(first, old)
    data = of_zarr(extent, old) if by_zarr and old else joined(first)
    shard = OpenShard.from_object(ChunkEncoder(spec), BOX, data, kept)
    values = {n: old[n] for n in kept}
    promise = Promise(spec, data, values)
    assert in_zarr(extent, 0, joined(shard)).tobytes() == whole(values).tobytes()
    for n in set(range(ROW)) - kept:
        values[n] = block(100 + n)
        shard.put(n, values[n])
        later = joined(shard)
        assert in_zarr(extent, 0, later).tobytes() == whole(values).tobytes()
        promise.check(later)


@extents
def test_inner_chunks_that_are_kept_whole_stay_where_they_are(extent) -> None:
    """Byte for byte at the old offset, whichever they are; the bytes behind the last of them go."""
    spec = row_spec(extent)
    data = write_shard(spec, [block(n) for n in range(ROW)])
    kept = range(extent, ROW - extent)
    later = joined(OpenShard.from_object(ChunkEncoder(spec), BOX, data, kept))
    old = entries_of(spec, data)
    new = entries_of(spec, later)
    assert new == {k: v for k, v in old.items() if extent <= k[0] * extent < ROW - extent}
    end = max((o + n for o, n in new.values()), default=0)
    assert later[:end] == data[:end]
    assert len(later) == end + spec.index_nbytes


@pytest.mark.parametrize("kept", [[], [0], [6], [1, 4], [0, 3, 7]])
def test_records_that_are_not_kept_leave_no_trace_in_their_slab(kept) -> None:
    """The inner chunk that held them is encoded anew, without them."""
    spec = row_spec(4)
    data = write_shard(spec, [block(n) for n in range(ROW)])
    later = joined(OpenShard.from_object(ChunkEncoder(spec), BOX, data, kept))
    assert read_whole(spec, later)[:, : BOX[0], : BOX[1]].tobytes() == whole(some(kept)).tobytes()
    assert {k[0] for k in entries_of(spec, later)} == {n // 4 for n in kept}


def test_an_inner_chunk_stays_stored_when_only_fill_is_left_of_it() -> None:
    """Its old version is what an old index reads, and must outlast a second reading back too."""
    spec = row_spec(2)
    data = write_shard(spec, [np.zeros(BOX, F4), block(1)])
    promise = Promise(spec, data, {0: np.zeros(BOX, F4)})
    later = data
    for _ in range(3):
        later = joined(OpenShard.from_object(ChunkEncoder(spec), BOX, later, {0}))
        promise.check(later)
        assert in_zarr(2, 0, later).tobytes() == whole({}).tobytes()
    shard = OpenShard.from_object(ChunkEncoder(spec), BOX, later, {0})
    shard.put(2, block(2))
    promise.check(joined(shard))


def test_only_what_is_decoded_is_checked() -> None:
    """A damaged inner chunk that is kept whole stays as it is, one that is not kept at all does not matter."""
    spec = row_spec(2)
    data = bytearray(write_shard(spec, [block(n) for n in range(ROW)]))
    data[entries_of(spec, bytes(data))[1, 0, 0][0]] ^= 1
    for kept in ([2], [3], [0, 1, 3]):
        with pytest.raises(FormatError) as caught:
            OpenShard.from_object(ChunkEncoder(spec), BOX, bytes(data), kept)
        assert caught.value.kind == "checksum"
    for kept in ([], [0], [2, 3], [0, 4, 7], [5, 6]):
        OpenShard.from_object(ChunkEncoder(spec), BOX, bytes(data), kept)


# ---- any history -------------------------------------------------------------------------------------


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.0, -0.0, np.nan]),
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["put", "fill"]), st.integers(0, ROW - 1)),
            st.tuples(st.just("commit"), st.none()),
            st.tuples(st.just("read back"), st.sets(st.integers(0, ROW - 1))),
        ),
        max_size=30,
    ),
)
@settings(max_examples=150)
def test_any_history_in_any_order_keeps_what_was_committed(extent, fill, history) -> None:
    """Records, commits, and rows read back without some records: every index holds for what was kept since."""
    spec = row_spec(extent, fill=fill)
    shard = OpenShard(ChunkEncoder(spec), BOX)
    written: dict[int, Any] = {}
    committed: dict[int, Any] = {}
    data = joined(shard)
    promises: list[Promise] = []
    for step, (action, what) in enumerate(history):
        if action in ("put", "fill") and what not in written:
            written[what] = block(step) if action == "put" else np.full(BOX, fill, F4)
            shard.put(what, written[what])
        elif action == "commit":
            data, committed = joined(shard), dict(written)
            promises.append(Promise(spec, data, committed))
        elif action == "read back":
            committed = {n: v for n, v in committed.items() if n in what}
            written = dict(committed)
            # Only the last object is there to be read; indexes before it hold for what nobody dropped.
            for promise in promises:
                promise.keep(what)
            shard = OpenShard.from_object(ChunkEncoder(spec), BOX, data, set(committed))
            data = joined(shard)
        found = read_whole(spec, data)[:, : BOX[0], : BOX[1]]
        assert found.tobytes() == whole(committed, fill).tobytes()
        for promise in promises:
            promise.check(data)

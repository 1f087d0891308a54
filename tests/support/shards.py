"""Shards made and taken apart in a few lines, for the tests of their format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.zarr3.codecs import ChunkCodec, profile_chain
from mpistream.zarr3.extract import DecodeScratch, OpenedObject, plan_reads
from mpistream.zarr3.shard import ChunkEncoder, OpenShard, ShardSpec, parse_index

__all__ = ["OpenedBytes", "entries_of", "joined", "make_spec", "read_box", "read_shard", "read_whole", "write_shard"]

Array = NDArray[Any]


def make_spec(
    shard_shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    *,
    dtype: str = "float32",
    fill: Any = 0,
    profile: str = "none",
) -> ShardSpec:
    """Return the spec of shards in a profile's codec chain."""
    found = np.dtype(dtype)
    codec = ChunkCodec(profile_chain(profile, found), found)
    return ShardSpec(shard_shape=shard_shape, chunk_shape=chunk_shape, codec=codec, fill=np.array(fill, found))


class OpenedBytes:
    """An opened object that notes what is read of it; from ``shrunk`` on it has no more bytes, whatever it said."""

    def __init__(self, data: bytes, shrunk: int | None = None) -> None:
        self.nbytes = len(data)
        self.calls: list[tuple[int, int]] = []
        self._data = data
        self._shrunk = shrunk

    def read(self, offset: int, nbytes: int) -> bytes:
        self.calls.append((offset, nbytes))
        return self._data[offset : offset + nbytes]

    def read_into(self, offset: int, buffer: Array) -> int:
        self.calls.append((offset, buffer.nbytes))
        data = self._data[offset : offset + buffer.nbytes]
        data = data if self._shrunk is None else data[: max(0, self._shrunk - offset)]
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)


def joined(shard: OpenShard) -> bytes:
    """Return the object as it is now."""
    return b"".join(bytes(piece) for piece in shard.finish())


def write_shard(
    spec: ShardSpec,
    records: Iterable[Array],
    box_shape: Sequence[int] | None = None,
    order: Iterable[int] | None = None,
) -> bytes:
    """Return the object that holds some records, put in this order or one after the other."""
    records = list(records)
    shard = OpenShard(ChunkEncoder(spec), tuple(records[0].shape if box_shape is None else box_shape))
    for i in range(len(records)) if order is None else order:
        shard.put(i, records[i])
    return joined(shard)


def read_shard(spec: ShardSpec, opened: OpenedObject, box: Sequence[tuple[int, int]], out: Array) -> None:
    """Decode a box of a shard into an array."""
    scratch = DecodeScratch()
    for batch in plan_reads(spec, opened, box, out):
        batch.decode(scratch)


def read_box(spec: ShardSpec, data: bytes, box: Sequence[tuple[int, int]]) -> Array:
    """Return what `read_shard` makes of a box, over memory full of other values."""
    out = np.full([b - a for a, b in box], 77, spec.fill.dtype)
    read_shard(spec, OpenedBytes(data), box, out)
    return out


def read_whole(spec: ShardSpec, data: bytes) -> Array:
    """Return all values of a shard."""
    return read_box(spec, data, [(0, n) for n in spec.shard_shape])


def entries_of(spec: ShardSpec, data: bytes) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return position of an inner chunk -> (offset, nbytes), without those that are left out."""
    entries = parse_index(data[-spec.index_nbytes :], spec, len(data)).tolist()
    positions = itertools.product(*map(range, spec.n_chunks))
    return {p: (o, n) for p, (o, n) in zip(positions, entries, strict=True) if o != 2**64 - 1}

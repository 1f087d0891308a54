"""Blocks to shard bytes and back.

Theory of operation
-------------------
A shard is one object: encoded inner chunks, then an index of (offset, nbytes) pairs, one per inner chunk
in C order, then the index's own CRC32C (Zarr v3, codec ``sharding_indexed`` 1.0, "Binary shard format").
An inner chunk that is all fill value is absent: both numbers are 2**64 - 1.

`OpenShard` is a shard that grows record by record. With an inner time extent of 1 a record is encoded
when it arrives and never again. With a larger one the records of the current inner chunk are kept raw in
a slab, and the slab is encoded when it is full or when a commit wants the shard as it is.

Rules of this room:

* An object that replaces an earlier one keeps every inner chunk of it at its old offset, byte for byte;
  what is new or changed follows, then the index. A plain reader that read the old index and reads its
  inner chunks from the new object still gets what the old index promised.
* Records may arrive in any order; inner chunks of one record lie in C order.
* "All fill" is bytewise: -0.0 is not 0.0, and NaN is NaN when its bits are the same.

An array without time (a static) is a shard with one record.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import FormatError
from mpistream.rounding import Rounding
from mpistream.zarr3.codecs import ChunkCodec, crc32c

__all__ = ["MISSING", "ChunkEncoder", "OpenShard", "Scratch", "ShardSpec", "index_bytes", "parse_index"]

# On disk. Do not change; see FORMAT.md.
MISSING = 2**64 - 1
_ENTRY = np.dtype("<u8")
_CRC_NBYTES = 4

# Far below what a process can hold, far above the shards that rows of many versions belong to.
_MIN_ROOM_NBYTES = 256 * 1024 * 1024

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """What is the same for all shards of one array: extents, codec and fill, time first (1 for a static)."""

    shard_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    codec: ChunkCodec
    fill: NDArray[Any]
    """0-d array of the array's dtype."""
    rounding: Rounding | None = None
    """What is done to values before they are encoded."""
    is_index_first: bool = False
    """Whether the index is at the start, as others may write it; ours never is."""

    @property
    def n_chunks(self) -> tuple[int, ...]:
        """Inner chunks per dim."""
        return tuple(s // c for s, c in zip(self.shard_shape, self.chunk_shape, strict=True))

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index with its checksum."""
        return 16 * math.prod(self.n_chunks) + _CRC_NBYTES

    @property
    def max_nbytes(self) -> int:
        """More than an object has that was written in good faith.

        Each inner chunk once for every record that it holds, and for two that were given up; runs that gave up many
        more are left room for, where the shards are small.
        """
        chunks = math.prod(self.n_chunks) * self.codec.max_nbytes(self.chunk_shape)
        return self.index_nbytes + max((2 + self.chunk_shape[0]) * chunks, _MIN_ROOM_NBYTES)


def index_bytes(entries: NDArray[np.uint64]) -> bytes:
    """Return the bytes of an index, checksum included.

    Not collective.
    """
    data = entries.astype(_ENTRY, copy=False).tobytes()
    return data + crc32c(data)


def parse_index(data: bytes, spec: ShardSpec, object_nbytes: int) -> NDArray[np.uint64]:
    """Return the (offset, nbytes) entries of an index, shape (number of inner chunks, 2).

    Not collective.

    Parameters
    ----------
    data
        The last `ShardSpec.index_nbytes` bytes of the object, the first where the index is at the start.
    spec
        The array's shards.
    object_nbytes
        Bytes of the whole object; an entry that points outside it is refused.

    Raises
    ------
    FormatError
        Kind ``index``.
    """
    if len(data) != spec.index_nbytes:
        raise FormatError(
            f"object of {object_nbytes} bytes has no room for an index of {spec.index_nbytes} bytes",
            kind="index",
        )
    if crc32c(data[:-_CRC_NBYTES]) != data[-_CRC_NBYTES:]:
        raise FormatError("the index's stored CRC32C differs from that of the data", kind="index")
    entries = np.frombuffer(data[:-_CRC_NBYTES], _ENTRY).astype(np.uint64).reshape(-1, 2)
    room = np.uint64(object_nbytes if spec.is_index_first else object_nbytes - spec.index_nbytes)
    present = entries[:, 0] != MISSING
    # offset + nbytes can pass 2**64; the two comparisons can't.
    bad = present & ((entries[:, 1] > room) | (entries[:, 0] > room - np.minimum(entries[:, 1], room)))
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        offset, nbytes = (int(v) for v in entries[i])
        raise FormatError(
            f"index entry {i} names bytes {offset} to {offset + nbytes}, the chunks end at {int(room)}",
            kind="index",
        )
    return entries


class Scratch:
    """Memory for one inner chunk at a time, used again and again, so that it stays in the cache; of one thread."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def chunk(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array that is valid until the next call.

        Not collective.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(dtype).reshape(shape)


class ChunkEncoder:
    """Encodes inner chunks of one array; it keeps no data, so several threads may use it.

    Parameters
    ----------
    spec
        The array's shards.
    """

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec
        # Looked up for each inner chunk, and there are thousands in a record.
        self._codec, self._dtype, self._rounding = spec.codec, spec.codec.stored_dtype, spec.rounding
        self._shape = spec.chunk_shape
        pattern = spec.fill.astype(self._dtype).reshape(1)
        # The widest word that numpy compares at memory speed; complex128 is two of them.
        word = f"u{min(pattern.itemsize, 8)}"
        self._word = np.dtype(word)
        self._pattern: NDArray[Any] = pattern.view(word)
        self._first_word = int(self._pattern[0])
        self.n_chunks_in_time = math.prod(spec.n_chunks[1:])
        """How many entries of the index a position in time has: they lie together (C order, time is the first dim)."""
        self.no_entries: NDArray[np.uint64] = np.full((math.prod(spec.n_chunks), 2), MISSING, np.uint64)
        """The index of an empty shard, to be copied."""
        self._spaces: dict[tuple[int, ...], list[tuple[int, Slices]]] = {}

    def space(self, box_shape: tuple[int, ...]) -> list[tuple[int, Slices]]:
        """Return, in C order, position and slices of the inner chunks of a box without time; the slices begin with all.

        Not collective. The shards of an array have few shapes, and small ones come by the thousand.
        """
        found = self._spaces.get(box_shape)
        if found is None:
            positions = np.arange(self.n_chunks_in_time).reshape(self.spec.n_chunks[1:])
            split = _split(box_shape, self.spec.chunk_shape[1:])
            found = self._spaces[box_shape] = [(int(positions[i]), (slice(None), *box)) for i, box in split]
        return found

    def encode(
        self, view: NDArray[Any], scratch: Scratch | None = None, *, is_stored: bool = False, is_borrowed: bool = False
    ) -> list[Any] | None:
        """Return the encoded inner chunk as buffers, or None when it is all fill.

        Not collective.

        Parameters
        ----------
        view
            At most ``chunk_shape``, any strides and byte order. At the edge of the array it is smaller; the
            rest of the chunk is fill.
        scratch
            Where it is put together if it can't be encoded as it lies; by default memory of this call.
        is_stored
            Encode it though it is all fill.
        is_borrowed
            The view stays as it is until the buffers are written, so they may be parts of it.
        """
        chunk = view
        is_whole = view.shape == self._shape
        if not is_whole or not view.flags.c_contiguous or view.dtype != self._dtype or self._rounding is not None:
            chunk = (scratch or Scratch()).chunk(self._shape, self._dtype)
            if not is_whole:
                chunk[...] = self.spec.fill
            chunk[tuple(slice(n) for n in view.shape)] = view
        if self._rounding is not None:
            # In the scratch chunk, since the values are the caller's. Cells that were rounded before stay as they are.
            self._rounding.apply(chunk)
        if not is_stored and self._is_fill(chunk):
            return None
        return self._codec.encode(chunk, is_borrowed=is_borrowed and chunk is view)

    def _is_fill(self, chunk: NDArray[Any]) -> bool:
        words = chunk.ravel().view(self._word)  # it is contiguous: no copy
        # One look at the first word spares most chunks the full comparison.
        if words.item(0) != self._first_word:
            return False
        return bool((words.reshape(-1, self._pattern.size) == self._pattern).all())


class OpenShard:
    """One shard that is being filled, record by record, in any order.

    Parameters
    ----------
    encoder
        The array's chunk encoder.
    box_shape
        Extents of the shard's part of the array without time: at the upper edge smaller than the shard.
    """

    def __init__(self, encoder: ChunkEncoder, box_shape: tuple[int, ...]) -> None:
        self._encoder = encoder
        self._spec = encoder.spec
        self._pieces: list[Any] = []
        self._end = 0
        # Invariant: every present entry names bytes below _end, in _pieces.
        self._n_in_time = encoder.n_chunks_in_time
        self._entries = encoder.no_entries.copy()
        self._time_extent = self._spec.chunk_shape[0]
        # Position of an inner chunk in time -> its records, raw, and those that are there. A full one is encoded
        # and leaves; one that is not stays, because it is encoded again when more of it has come.
        self._slabs: dict[int, _Slab] = {}
        self._space = encoder.space(box_shape)
        self._slab_shape = (self._time_extent, *box_shape)

    @classmethod
    def from_object(
        cls, encoder: ChunkEncoder, box_shape: tuple[int, ...], data: bytes, records: Collection[int]
    ) -> OpenShard:
        """Return the shard of an object, with some of its records only.

        Not collective.

        Parameters
        ----------
        encoder, box_shape
            As in the constructor.
        data
            The whole object.
        records
            Records of the row to keep; what else the object holds was dropped, invalidated or never committed.

        Raises
        ------
        FormatError
            For a damaged object.
        """
        self = cls(encoder, box_shape)
        spec = self._spec
        entries = parse_index(data[-spec.index_nbytes :], spec, len(data))
        by_slab: dict[int, set[int]] = {}
        for record in records:
            by_slab.setdefault(record // self._time_extent, set()).add(record % self._time_extent)
        for time_index, kept in sorted(by_slab.items()):
            chunks = slice(time_index * self._n_in_time, (time_index + 1) * self._n_in_time)
            self._entries[chunks] = entries[chunks]
            present = [int(i) for i in range(chunks.start, chunks.stop) if entries[i, 0] != MISSING]
            self._end = max([self._end, *(int(entries[i].sum()) for i in present)])
            if len(kept) < self._time_extent:
                # The stored chunk may hold more than was kept: it is encoded anew before it is written.
                self._slabs[time_index] = self._read_slab(entries, data, time_index, kept)
        # Kept inner chunks stay at their offsets; bytes behind the last of them belong to no committed record.
        if self._end:
            self._pieces.append(data[: self._end])
        return self

    def _read_slab(self, entries: NDArray[np.uint64], data: bytes, time_index: int, kept: set[int]) -> _Slab:
        slab = self._new_slab()
        for position, box in self._space:
            offset, nbytes = (int(v) for v in entries[time_index * self._n_in_time + position])
            if offset != MISSING:
                chunk = self._spec.codec.decode(data[offset : offset + nbytes], self._spec.chunk_shape)
                for record in kept:
                    part = slab.records[record][box[1:]]
                    part[...] = chunk[record][tuple(slice(n) for n in part.shape)]
        slab.present |= kept
        slab.is_dirty = True
        return slab

    @property
    def nbytes(self) -> int:
        """Bytes of encoded pieces and of raw records that are held in memory."""
        return self._end + sum(slab.records.nbytes for slab in self._slabs.values())

    def put(
        self, record: int, block: NDArray[Any], scratch: Scratch | None = None, *, is_borrowed: bool = False
    ) -> None:
        """Put a record of the row into the shard; a call that fails changes nothing, and may be made again.

        Not collective.

        Parameters
        ----------
        record
            Its position in the row; each is put once.
        block
            The shard's part of the record, shape ``box_shape``; it may be overwritten when the call returns.
        scratch
            As in `ChunkEncoder.encode`.
        is_borrowed
            The block stays as it is until the object is written.
        """
        time_index, in_slab = divmod(record, self._time_extent)
        if self._time_extent == 1:
            self._encode(time_index, block[np.newaxis], scratch, is_borrowed=is_borrowed)
            return
        slab = self._slabs.get(time_index)
        if slab is None:
            slab = self._slabs[time_index] = self._new_slab()
        assert in_slab not in slab.present, "a record is put once"
        slab.records[in_slab] = block
        if len(slab.present) + 1 == self._time_extent:
            self._encode(time_index, slab.records, scratch)
            del self._slabs[time_index]
        else:
            slab.present.add(in_slab)
            slab.is_dirty = True

    def put_rows(self, records: NDArray[Any], present: Collection[int], scratch: Scratch | None = None) -> None:
        """Put records of the row into an empty shard, all at once.

        Not collective.

        Parameters
        ----------
        records
            All records of the row, shape ``(records, *box_shape)``; those that are not present are fill.
        present
            Their positions in the row; inner chunks without any are left out.
        scratch
            As in `ChunkEncoder.encode`.
        """
        n = self._time_extent
        for time_index in sorted({record // n for record in present}):
            self._encode(time_index, records[time_index * n : (time_index + 1) * n], scratch)

    def finish(self, scratch: Scratch | None = None) -> list[Any]:
        """Return the object as it is now, as buffers to be written one after the other.

        Not collective. The shard goes on growing afterwards; a call that fails may be made again.

        Parameters
        ----------
        scratch
            As in `ChunkEncoder.encode`.
        """
        for time_index, slab in sorted(self._slabs.items()):
            if slab.is_dirty:
                self._encode(time_index, slab.records, scratch)
                slab.is_dirty = False
        return [*self._pieces, index_bytes(self._entries)]

    def _new_slab(self) -> _Slab:
        return _Slab(np.full(self._slab_shape, self._spec.fill, self._spec.codec.stored_dtype))

    def _encode(
        self, time_index: int, records: NDArray[Any], scratch: Scratch | None, *, is_borrowed: bool = False
    ) -> None:
        """Encode the inner chunks of a position in time: all of them, or none when one fails."""
        first, end = time_index * self._n_in_time, self._end
        # What an earlier object stored stays stored, also when the records that are left of it are all fill: its
        # bytes would otherwise lie behind all that the index names, and the next `from_object` would drop them.
        is_stored = (self._entries[first : first + self._n_in_time, 0] != MISSING).tolist() if end else None
        encode, encoded = self._encoder.encode, list[Any]()
        found: list[int] = []
        entries: list[tuple[int, int]] = []
        for position, box in self._space:
            must_store = is_stored is not None and is_stored[position]
            pieces = encode(records[box], scratch, is_stored=must_store, is_borrowed=is_borrowed)
            if pieces is None:
                continue
            nbytes = sum(map(len, pieces))
            found.append(first + position)
            entries.append((end, nbytes))
            encoded += pieces
            end += nbytes
        at, new = np.array(found, np.intp), np.array(entries, np.uint64).reshape(-1, 2)
        # What can fail comes first. An entry never names bytes that are not there.
        self._pieces += encoded
        self._entries[at] = new
        self._end = end


@dataclass(slots=True)
class _Slab:
    """The records of one inner chunk in time, raw; those that are not present are fill."""

    records: NDArray[Any]
    present: set[int] = field(default_factory=set)
    is_dirty: bool = False


def _split(shape: Sequence[int], chunk_shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Slices]]:
    """Yield, in C order, the index of every inner chunk that ``shape`` touches, and its clipped slices."""
    counts = [-(-n // c) for n, c in zip(shape, chunk_shape, strict=True)]
    for index in itertools.product(*map(range, counts)):
        yield (
            index,
            tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(index, chunk_shape, shape, strict=True)),
        )

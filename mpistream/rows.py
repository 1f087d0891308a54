"""The rows of one array on one writer: blocks in, finished objects out.

Two kinds of array are written record by record. A *sharded* one has one open shard per shard that this
writer owns. A *series* (time itself, and variables over time alone) has one value a record, in chunks of
`SERIES_CHUNK`, and only the owner writes it. Both give objects when a row is full, and on demand for a
row that is filled in part; both can be set back to what is committed by reading the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import SERIES_CHUNK, ArraySpec
from mpistream.errors import FormatError
from mpistream.staging import StagedObject
from mpistream.store import Store
from mpistream.tiling import Box, box_n_cells
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import chunk_key
from mpistream.zarr3.shard import ChunkEncoder, OpenShard

__all__ = ["SeriesRows", "ShardRows", "encode_whole"]


class ShardRows:
    """The open row of one sharded array.

    Parameters
    ----------
    array
        The array, resolved; one without time has a single row of one record.
    separator
        Of chunk keys.
    block_box
        The cells of this rank's block, over the dims without time.
    boxes
        The aligned boxes of it that this writer writes.
    is_durable
        Whether every object is synced; one that replaces committed records always is.
    """

    def __init__(
        self, array: ArraySpec, separator: str, block_box: Box, boxes: Sequence[Box], *, is_durable: bool
    ) -> None:
        self.array = array
        self._separator = separator
        self._is_durable = is_durable
        self._encoder = ChunkEncoder(array.shard_spec())
        self._row_length = array.row_length
        grid = array.grid
        self._shards: list[tuple[tuple[int, ...], Box, tuple[slice, ...]]] = []
        for index in (i for box in boxes for i in grid.shards_in(box)):
            box = grid.shard_box(index)
            slices = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(box, block_box, strict=True))
            self._shards.append((index, box, slices))
        self._open: list[OpenShard] = []
        self.n_records = 0
        """Records that were added or are committed."""
        self._n_staged = 0
        self._n_committed = 0

    @property
    def writes(self) -> bool:
        """Whether this writer has shards of the array."""
        return bool(self._shards)

    @property
    def row_start(self) -> int:
        """First record of the open row."""
        return self.n_records // self._row_length * self._row_length

    def add(self, block: NDArray[Any]) -> list[StagedObject]:
        """Encode the next record; return the row's objects when it is full."""
        if not self._open:
            self._open = [OpenShard(self._encoder, _shape(box)) for _, box, _ in self._shards]
        for shard, (_, _, slices) in zip(self._open, self._shards, strict=True):
            shard.add(block[slices])
        self.n_records += 1
        if self.n_records % self._row_length:
            return []
        objects = self._objects(self.n_records - self._row_length)
        self._open = []
        return objects

    def partial(self) -> list[StagedObject]:
        """Return the objects of a row that is filled in part, if it has grown since they were last made."""
        if not self.n_records % self._row_length or self.n_records == self._n_staged:
            return []
        return self._objects(self.row_start)

    def _objects(self, start: int) -> list[StagedObject]:
        self._n_staged = self.n_records
        row = (start // self._row_length,) if self.array.has_time else ()
        objects = []
        for shard, (index, box, _) in zip(self._open, self._shards, strict=True):
            pieces = shard.finish()
            objects.append(
                StagedObject(
                    name=self.array.name,
                    key=chunk_key(self.array.name, self._separator, (*row, *index)),
                    start=start if self.array.has_time else 0,
                    stop=self.n_records if self.array.has_time else 0,
                    n_cells=box_n_cells(box),
                    pieces=pieces,
                    nbytes=sum(len(p) for p in pieces),
                    must_sync=self._is_durable or start < self._n_committed,
                )
            )
        return objects

    def committed(self, n_records: int) -> None:
        """Note that the first ``n_records`` records are committed."""
        self._n_committed = n_records

    def reset(self, store: Store, n_committed: int) -> None:
        """Set the row back to what is committed; a row that is filled in part is read back from the store.

        Raises
        ------
        FormatError
            With the key, when a shard of it is missing or damaged.
        """
        self.n_records = self._n_staged = self._n_committed = n_committed
        self._open = []
        n_in_row = n_committed % self._row_length
        if not n_in_row:
            return
        opened = []
        for index, box, _ in self._shards:
            key = chunk_key(self.array.name, self._separator, (self.row_start // self._row_length, *index))
            data = store.read(key)
            if data is None:
                raise FormatError(f"{key}: the shard of committed records is missing", kind="missing")
            try:
                opened.append(OpenShard.from_object(self._encoder, _shape(box), data, n_in_row))
            except FormatError as error:
                raise FormatError(f"{key}: {error}", kind=error.kind) from error
        self._open = opened


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(b - a for a, b in box)


def encode_whole(array: ArraySpec, separator: str, values: NDArray[Any]) -> list[StagedObject]:
    """Return the objects of an array that one rank writes at once, in plain chunks: one without dims, a coordinate.

    Not collective.
    """
    codec = ChunkCodec(array.chain, array.dtype)
    chunks = array.resolved_chunk_shape
    objects = []
    for index in np.ndindex(*(-(-n // c) for n, c in zip(values.shape, chunks, strict=True))):
        part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))]
        chunk = np.full(chunks, array.fill, codec.stored_dtype)
        chunk[tuple(slice(n) for n in part.shape)] = part
        pieces = codec.encode(chunk)
        objects.append(
            StagedObject(
                name=array.name,
                key=chunk_key(array.name, separator, index),
                start=0,
                stop=0,
                n_cells=part.size,
                pieces=pieces,
                nbytes=sum(len(p) for p in pieces),
                must_sync=True,
            )
        )
    return objects


class SeriesRows:
    """The values of one array over time alone, from the chunk of the last committed record on.

    Parameters
    ----------
    array
        The array.
    separator
        Of chunk keys.
    """

    def __init__(self, array: ArraySpec, separator: str) -> None:
        self.array = array
        self._separator = separator
        self._codec = ChunkCodec(array.chain, array.dtype)
        self._n_committed = 0
        self._values: list[Any] = []

    @property
    def _first(self) -> int:
        return self._n_committed // SERIES_CHUNK * SERIES_CHUNK

    @property
    def n_records(self) -> int:
        """Records that were added or are committed."""
        return self._first + len(self._values)

    def add(self, value: Any) -> None:
        """Append the next record's value."""
        self._values.append(value)

    def objects(self, stop: int) -> list[StagedObject]:
        """Return the chunks that hold records from the last committed one to ``stop``."""
        found = []
        for start in range(self._first, stop, SERIES_CHUNK):
            values = self._values[start - self._first : min(stop, start + SERIES_CHUNK) - self._first]
            chunk = np.full(SERIES_CHUNK, self.array.fill, self._codec.stored_dtype)
            chunk[: len(values)] = values
            pieces = self._codec.encode(chunk)
            found.append(
                StagedObject(
                    name=self.array.name,
                    key=chunk_key(self.array.name, self._separator, (start // SERIES_CHUNK,)),
                    start=start,
                    stop=start + len(values),
                    n_cells=1,
                    pieces=pieces,
                    nbytes=sum(len(p) for p in pieces),
                    # It replaces a chunk of committed records, or will be replaced while it holds some.
                    must_sync=True,
                )
            )
        return found

    def drop_uncommitted(self) -> None:
        """Forget the values of records that are not committed."""
        del self._values[self._n_committed - self._first :]

    def committed(self, n_records: int) -> None:
        """Note that the first ``n_records`` records are committed; forget the chunks before them."""
        first = self._first
        self._n_committed = n_records
        del self._values[: self._first - first]

    def reset(self, store: Store, n_committed: int) -> None:
        """Set the values back to what is committed, by reading the last chunk.

        Raises
        ------
        FormatError
            With the key, when it is missing or damaged.
        """
        self._n_committed = n_committed
        self._values = []
        n = n_committed - self._first
        if n:
            key = chunk_key(self.array.name, self._separator, (self._first // SERIES_CHUNK,))
            self._values = list(read_series_chunk(store, self._codec, key)[:n])


def read_series_chunk(store: Store, codec: ChunkCodec, key: str) -> NDArray[Any]:
    """Return one chunk of a series.

    Not collective.

    Raises
    ------
    FormatError
        With the key, when it is missing or damaged.
    """
    data = store.read(key)
    if data is None:
        raise FormatError(f"{key}: the chunk of committed records is missing", kind="missing")
    try:
        return codec.decode(data, (SERIES_CHUNK,))
    except FormatError as error:
        raise FormatError(f"{key}: {error}", kind=error.kind) from error

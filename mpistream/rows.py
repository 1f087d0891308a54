"""The rows of one array on one writer: blocks in, finished objects out.

Two kinds of array are written record by record. A *sharded* one has one open shard per shard that this
writer owns and row. A *series* (time itself, and variables over time alone) has one value a record, in
chunks of `SERIES_CHUNK`, and only the owner writes it. Both give objects when a row is full, and on demand
for a row that is filled in part.

Append and indexed mode differ only in the order in which records come: in append mode at most one row is
open, in indexed mode any number. A row with committed records is opened by reading them back, so they keep
their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import SERIES_CHUNK, ArraySpec
from mpistream.errors import FormatError
from mpistream.ranges import Ranges, covers, inside, members
from mpistream.staging import StagedObject
from mpistream.store import Store, read_whole
from mpistream.tiling import Box, box_contains, box_n_cells, slices_in
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import chunk_key
from mpistream.zarr3.shard import ChunkEncoder, OpenShard

__all__ = ["SeriesRows", "ShardRows", "encode_whole", "rounded"]


@dataclass(frozen=True, slots=True)
class _Shard:
    """One shard that this writer writes: where it is in the array, and in which block its cells come."""

    index: tuple[int, ...]
    box: Box
    block: int
    slices: tuple[slice, ...]


@dataclass(slots=True)
class _Row:
    """One row that is open, or that was staged with records that are not committed yet."""

    shards: list[OpenShard]
    n_present: int
    """Records in it, committed or new."""
    new: set[int] = field(default_factory=set)
    """Records in it that are not committed."""
    objects: list[StagedObject] = field(default_factory=list)
    """What was last made of it."""
    is_dirty: bool = False
    """Whether it has grown since."""


class ShardRows:
    """The open rows of one sharded array.

    Parameters
    ----------
    array
        The array, resolved; one without time has a single row of one record.
    separator
        Of chunk keys.
    block_boxes
        The cells of the blocks that `put` gets, over the dims without time.
    boxes
        The aligned boxes that this writer writes; each of their shards lies in one of the blocks whole.
    store
        Where rows with committed records are read back from.
    n_total
        Records there will ever be (indexed mode), None: no end.
    is_durable
        Whether every object is synced; one that replaces committed records always is.
    """

    def __init__(
        self,
        array: ArraySpec,
        separator: str,
        block_boxes: Sequence[Box],
        boxes: Sequence[Box],
        *,
        store: Store,
        n_total: int | None = None,
        is_durable: bool,
    ) -> None:
        self.array = array
        self._separator = separator
        self._store = store
        self._n_total = n_total
        self._is_durable = is_durable
        self._encoder = ChunkEncoder(array.shard_spec())
        self._row_length = array.row_length
        grid = array.grid
        self._shards: list[_Shard] = []
        for index in (i for box in boxes for i in grid.shards_in(box)):
            box = grid.shard_box(index)
            block = next(k for k, outer in enumerate(block_boxes) if box_contains(outer, box))
            self._shards.append(_Shard(index, box, block, slices_in(block_boxes[block], box)))
        self._committed: Ranges = ()
        # Rows in memory, the one that was written last at the end.
        self._open: dict[int, _Row] = {}
        # Rows with new records that left memory for the stage folder; they are read back when more of them comes.
        self._staged: dict[int, _Row] = {}

    @property
    def writes(self) -> bool:
        """Whether this writer has shards of the array."""
        return bool(self._shards)

    @property
    def nbytes(self) -> int:
        """Bytes that the open rows hold in memory."""
        return sum(shard.nbytes for row in self._open.values() for shard in row.shards)

    @property
    def n_open(self) -> int:
        """Rows in memory."""
        return len(self._open)

    def put(self, record: int, blocks: Sequence[NDArray[Any]]) -> list[StagedObject]:
        """Encode a record, given as the blocks of its cells; return its row's objects when the row is full.

        Raises
        ------
        FormatError, StoreError
            When committed records of its row can't be read back.
        """
        row, in_row = divmod(record, self._row_length)
        found = self._open.pop(row, None) or self._read_row(row)
        self._open[row] = found
        for shard, at in zip(found.shards, self._shards, strict=True):
            shard.put(in_row, blocks[at.block][at.slices])
        found.n_present += 1
        found.new.add(record)
        found.is_dirty = True
        return self._leave(row) if found.n_present == self._n_records_of(row) else []

    def _n_records_of(self, row: int) -> int:
        start = row * self._row_length
        return self._row_length if self._n_total is None else min(self._row_length, self._n_total - start)

    def leave_oldest(self) -> list[StagedObject]:
        """Take the row that was not written to for longest out of memory; return its objects."""
        return self._leave(next(iter(self._open)))

    def leave(self, records: Ranges) -> list[StagedObject]:
        """Take the rows that hold any of these records out of memory; return their objects.

        For records that are not committed any more: when more of their row comes, it is read back without them.
        """
        n = self._row_length
        rows = [row for row in self._open if inside(records, row * n, (row + 1) * n)]
        return [item for row in rows for item in self._leave(row)]

    def _leave(self, row: int) -> list[StagedObject]:
        objects = self._objects(row)
        self._staged[row] = self._open.pop(row)
        self._staged[row].shards = []
        return objects

    def partial(self) -> list[StagedObject]:
        """Return the objects of rows that are filled in part and have grown since they were last made."""
        return [item for row, found in self._open.items() if found.is_dirty for item in self._objects(row)]

    def _objects(self, row: int) -> list[StagedObject]:
        found = self._open[row]
        if not found.is_dirty:
            return []
        start = row * self._row_length
        replaces = bool(inside(self._committed, start, start + self._row_length))
        # What was placed of the row may be committed before this is placed, without MPI.
        replaces = replaces or any(o.is_placed or o.must_sync for o in found.objects)
        found.objects = []
        for shard, at in zip(found.shards, self._shards, strict=True):
            pieces = shard.finish()
            found.objects.append(
                StagedObject(
                    name=self.array.name,
                    key=self._key(row, at.index),
                    records=frozenset(found.new) if self.array.has_time else None,
                    n_cells=box_n_cells(at.box),
                    pieces=pieces,
                    nbytes=sum(len(p) for p in pieces),
                    must_sync=self._is_durable or replaces,
                )
            )
        found.is_dirty = False
        return found.objects

    def _key(self, row: int, index: tuple[int, ...]) -> str:
        lead = (row,) if self.array.has_time else ()
        return chunk_key(self.array.name, self._separator, (*lead, *index))

    def _read_row(self, row: int) -> _Row:
        """Open a row: empty, from what is staged of it, or from what is committed."""
        start = row * self._row_length
        kept = set(members(inside(self._committed, start, start + self._row_length)))
        staged = self._staged.pop(row, None)
        new = staged.new if staged is not None else set()
        opened = []
        for i, at in enumerate(self._shards):
            shape = tuple(b - a for a, b in at.box)
            if not kept and not new:
                opened.append(OpenShard(self._encoder, shape))
                continue
            key = self._key(row, at.index)
            if staged is None:
                data = read_whole(self._store, key, self._encoder.spec.max_nbytes)
            else:
                data = staged.objects[i].read_back(self._store)
            if data is None:
                raise FormatError(f"{key}: the shard of committed records is missing", kind="missing")
            try:
                opened.append(OpenShard.from_object(self._encoder, shape, data, {r - start for r in kept | new}))
            except FormatError as error:
                raise FormatError(f"{key}: {error}", kind=error.kind) from error
        return _Row(opened, len(kept) + len(new), set(new), staged.objects if staged is not None else [])

    def committed(self, committed: Ranges) -> None:
        """Note which records are committed now; only a row that may still grow stays in memory."""
        self._committed = committed
        for row, found in [*self._staged.items(), *self._open.items()]:
            found.new = {r for r in found.new if not covers(committed, r)}
            if not found.new:
                self._staged.pop(row, None)
            # In append mode the open row goes on; in indexed mode it is read back if more of it ever comes.
            if self._n_total is not None and not found.new:
                self._open.pop(row, None)

    def reset(self, committed: Ranges) -> None:
        """Forget what is not committed; in append mode the row that goes on is read back now.

        Raises
        ------
        FormatError
            With the key, when a shard of it is missing or damaged.
        """
        self._committed, self._open, self._staged = committed, {}, {}
        n = committed[-1][1] if committed else 0
        if self._n_total is None and n % self._row_length and self.writes:
            self._open[n // self._row_length] = self._read_row(n // self._row_length)


def rounded(array: ArraySpec, block: NDArray[Any]) -> NDArray[Any]:
    """Return a block of an array that is not sharded in its dtype, rounded if the array is; never the caller's.

    Not collective.
    """
    values = block.astype(array.dtype, order="C")
    if array.rounding is not None:
        array.rounding.apply(values)
    return values


def encode_whole(array: ArraySpec, separator: str, values: NDArray[Any]) -> list[StagedObject]:
    """Return the objects of an array that one rank writes at once, in plain chunks: one without dims, a coordinate.

    Not collective.
    """
    codec = ChunkCodec(array.chain, array.dtype)
    chunks = array.resolved_chunk_shape
    objects = []
    for index in np.ndindex(*(-(-n // c) for n, c in zip(values.shape, chunks, strict=True))):
        # With ... an array without dims gives an array, not its string.
        where: tuple[Any, ...] = (..., *(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True)))
        part = values[where]
        chunk = np.full(chunks, array.fill, codec.stored_dtype)
        chunk[tuple(slice(n) for n in part.shape)] = part
        pieces = codec.encode(chunk)
        objects.append(
            StagedObject(
                name=array.name,
                key=chunk_key(array.name, separator, index),
                records=None,
                n_cells=part.size,
                pieces=pieces,
                nbytes=sum(len(p) for p in pieces),
                must_sync=True,
            )
        )
    return objects


class SeriesRows:
    """The chunks of one array over time alone that hold records which are not committed.

    Parameters
    ----------
    array
        The array.
    separator
        Of chunk keys.
    store
        Where chunks with committed records are read back from.
    """

    def __init__(self, array: ArraySpec, separator: str, store: Store) -> None:
        self.array = array
        self._separator = separator
        self._store = store
        self._codec = ChunkCodec(array.chain, array.dtype)
        self._committed: Ranges = ()
        self._chunks: dict[int, NDArray[Any]] = {}
        self._new: set[int] = set()

    def put(self, record: int, value: Any) -> None:
        """Put a record's value.

        Raises
        ------
        FormatError, StoreError
            When the committed values of its chunk can't be read back.
        """
        self._chunk(record // SERIES_CHUNK)[record % SERIES_CHUNK] = value
        self._new.add(record)

    def _chunk(self, chunk: int) -> NDArray[Any]:
        if chunk not in self._chunks:
            values = np.full(SERIES_CHUNK, self.array.fill, self._codec.stored_dtype)
            start = chunk * SERIES_CHUNK
            kept = inside(self._committed, start, start + SERIES_CHUNK)
            if kept:
                key = chunk_key(self.array.name, self._separator, (chunk,))
                stored = read_series_chunk(self._store, self._codec, key)
                for a, b in kept:
                    values[a - start : b - start] = stored[a - start : b - start]
            self._chunks[chunk] = values
        return self._chunks[chunk]

    def objects(self, records: Ranges) -> list[StagedObject]:
        """Return the chunks that hold new records out of ``records``."""
        found = []
        for chunk in sorted({r // SERIES_CHUNK for r in self._new if covers(records, r)}):
            start = chunk * SERIES_CHUNK
            pieces = self._codec.encode(self._chunks[chunk])
            found.append(
                StagedObject(
                    name=self.array.name,
                    key=chunk_key(self.array.name, self._separator, (chunk,)),
                    records=frozenset(r for r in self._new if start <= r < start + SERIES_CHUNK),
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
        for record in self._new:
            self._chunks[record // SERIES_CHUNK][record % SERIES_CHUNK] = self.array.fill
        self._new = set()

    def committed(self, committed: Ranges) -> None:
        """Note which records are committed now; the last chunk that has some stays in memory."""
        self._committed = committed
        self._new = {r for r in self._new if not covers(committed, r)}
        last = (committed[-1][1] - 1) // SERIES_CHUNK if committed else -1
        used = {r // SERIES_CHUNK for r in self._new}
        self._chunks = {k: v for k, v in self._chunks.items() if k == last or k in used}

    def reset(self, committed: Ranges) -> None:
        """Forget what is not committed; the last chunk of committed records is read back now.

        Raises
        ------
        FormatError
            With the key, when it is missing or damaged.
        """
        self._committed, self._chunks, self._new = committed, {}, set()
        if committed and committed[-1][1] % SERIES_CHUNK:
            self._chunk(committed[-1][1] // SERIES_CHUNK)


def read_series_chunk(store: Store, codec: ChunkCodec, key: str, length: int = SERIES_CHUNK) -> NDArray[Any]:
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
        return codec.decode(data, (length,))
    except FormatError as error:
        raise FormatError(f"{key}: {error}", kind=error.kind) from error

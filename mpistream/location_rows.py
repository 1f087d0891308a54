"""The rows of one array of a location series: whole series in, objects out.

As in `mpistream.rows`, a row is what shares shards: here a chunk of locations, one shard. Series come one by one, in
any order, and often: so a series is only copied into the buffer of its row, and a row that is full is encoded as a
whole when its object is staged, behind the caller's back. One that is not full is encoded by the caller, who may go on
filling it.

A row that was committed in part is read back when it is encoded: its committed locations keep their bytes. One that
leaves memory before it is full, because too many are open, goes through the stage folder.

Most calls bring one more series of each variable for rows that are open, and fill none of them. An `OpenChunk` says
where these go. It is known while nothing else than such series happens to its rows; whatever else does forgets it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import ArraySpec
from mpistream.errors import FormatError
from mpistream.memory_store import BytesReader
from mpistream.pipeline import Loan
from mpistream.ranges import Ranges, inside
from mpistream.staged import StagedObject
from mpistream.staging import Stager
from mpistream.store import Store, read_whole
from mpistream.tiling import Interval
from mpistream.zarr3.extract import DecodeScratch, plan_reads
from mpistream.zarr3.metadata import chunk_key
from mpistream.zarr3.shard import ChunkEncoder, OpenShard, Scratch

__all__ = ["Buffers", "LocationRows", "OpenChunk"]


class Buffers:
    """Memory for rows, used again and again: the pages of new memory cost as much as a copy.

    Parameters
    ----------
    max_nbytes
        Most bytes that are kept for the next row.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        # Both ends of a deque are safe in any thread; so many are free that the sum can wait for the next call.
        self._free: dict[int, deque[NDArray[np.uint8]]] = {}

    def borrow(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array with any values."""
        nbytes = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(nbytes, deque())
        memory = free.pop() if free else np.empty(nbytes, np.uint8)
        return memory.view(dtype).reshape(shape)

    def give_back(self, array: NDArray[Any]) -> None:
        """Take an array back that `borrow` gave; nobody may use it any more."""
        free = self._free[array.nbytes]
        if (len(free) + 1) * array.nbytes <= self._max_nbytes:
            free.append(array.reshape(-1).view(np.uint8))


@dataclass(slots=True, eq=False)
class OpenChunk:
    """The rows of one chunk of locations, open for all variables and dirty."""

    first: int
    """Its first location."""
    free: set[int]
    """Locations of this rank's share in it that are neither written nor committed."""
    new: set[int]
    """Locations with new series: the same set in all its rows."""
    targets: list[tuple[str, memoryview, tuple[int, ...]]]
    """Of each variable the memory of its row, flat, and the strides of a series that lies like it. What is assigned to
    a part of that memory must have its length and format."""


@dataclass(slots=True, eq=False)
class _Row:
    """One row with series that are not committed."""

    first: int
    """Its first location."""
    kept: set[int]
    """Locations that are committed."""
    buffer: NDArray[Any] | None
    """Series by position, as far as they are new; None while the row lies in the stage folder, or once it is made."""
    new: set[int] = field(default_factory=set)
    objects: list[StagedObject] = field(default_factory=list)
    """What was last made of it."""
    is_dirty: bool = False
    """Whether it has grown since."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """What the object of a row is made of."""

    rows: LocationRows
    key: str
    row: _Row

    def finish(self, scratch: Scratch) -> list[Any]:
        """Encode the row; a call that fails may be made again."""
        return self.rows.pieces(self.key, self.row, scratch)


class LocationRows:
    """The open rows of one array of a location series; as `mpistream.rows.ShardRows` to its writer.

    Parameters
    ----------
    array
        The array, resolved.
    separator
        Of chunk keys.
    store
        Where rows with committed series are read back from.
    records
        The locations that this writer writes: whole rows.
    n_total
        Number of all locations.
    buffers
        Where memory comes from.
    chunks
        Row -> what is known of it, for all variables.
    is_durable
        Whether every object is synced; one that replaces committed series always is.
    stager
        Who encodes and stages.
    """

    def __init__(
        self,
        array: ArraySpec,
        separator: str,
        *,
        store: Store,
        records: Interval,
        n_total: int,
        buffers: Buffers,
        chunks: dict[int, OpenChunk],
        is_durable: bool,
        stager: Stager,
    ) -> None:
        self.array = array
        # Whole rows are, but no record is lent memory: it goes straight into its row.
        self.is_background = False
        self._stager = stager
        self._writes = records[0] < records[1]
        self._separator = separator
        self._store = store
        self._n_total = n_total
        self._buffers = buffers
        self._chunks = chunks
        self._is_durable = is_durable
        self._encoder = ChunkEncoder(array.shard_spec())
        self._length = array.row_length
        self._n_times = array.shape[0]
        self._row_nbytes = self._length * self._n_times * array.dtype.itemsize
        self._committed: Ranges = ()
        # Rows in memory, the one that was opened last at the end.
        self._open: dict[int, _Row] = {}
        # Rows with new series that left memory.
        self._staged: dict[int, _Row] = {}
        self._memory_dtype = _memory_dtype(self._encoder.spec.codec.stored_dtype)

    @property
    def writes(self) -> bool:
        """Whether this writer has rows of the array."""
        return self._writes

    @property
    def borrowed(self) -> dict[int, tuple[int, ...]]:
        """Nothing must be lent."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes that the open rows hold in memory."""
        return len(self._open) * self._row_nbytes

    raw_nbytes = nbytes

    @property
    def n_open(self) -> int:
        """Rows in memory."""
        return len(self._open)

    @property
    def has_format(self) -> bool:
        """Whether Python has a format for values of the dtype."""
        return self._memory_dtype is not None

    def target(self, row: int, new: set[int]) -> memoryview | None:
        """Return the memory of an open row, flat; its new series are those of a set that it shares from now on.

        None, where it is not open, has other series, after a call that was interrupted, or has no `has_format`.
        """
        found = self._open.get(row)
        if found is None or self._memory_dtype is None or found.new != new:
            return None
        found.new = new
        assert found.buffer is not None
        return found.buffer.reshape(-1).view(self._memory_dtype).data

    def open(self, record: int) -> None:
        """Make room for a location.

        Raises
        ------
        FormatError, StoreError
            When a row that had left memory can't be read back from the stage folder.
        """
        row = record // self._length
        if row in self._open:
            return
        found = self._staged.get(row)
        if found is None:
            found = _Row(row * self._length, self._kept(row), None)
        for item in found.objects:
            # A full row that lost a committed location, and may still be on its way.
            self._stager.settle(item)
        if found.buffer is None:
            buffer = self._buffers.borrow(
                (self._n_records_of(row), *self.array.shape), self._encoder.spec.codec.stored_dtype
            )
            if found.new:
                self._read_back(found, buffer)
            found.buffer = buffer
        self._staged.pop(row, None)
        self._open[row] = found

    def put(
        self,
        record: int,
        blocks: Sequence[NDArray[Any]],
        loans: Mapping[int, Loan] | None = None,  # noqa: ARG002 (as of other rows)
    ) -> Sequence[StagedObject]:
        """Take a series, from its first time on; return its row's object when the row is full.

        The row is `open`. Times behind the series are fill.
        """
        row = record // self._length
        found = self._open[row]
        buffer, new, at = found.buffer, found.new, record - found.first
        assert buffer is not None
        (series,) = blocks
        n = len(series)
        if n == self._n_times:
            buffer[at] = series
        else:
            buffer[at, :n] = series
            buffer[at, n:] = self.array.fill
        new.add(record)
        found.is_dirty = True
        if len(new) + len(found.kept) < len(buffer):
            return ()
        # It can't grow any more, so it can wait for whoever stages it.
        item = self._object(row, found)
        item.nbytes = self._row_nbytes
        found.is_dirty = False
        self._leave(row)
        return [item]

    def leave_oldest(self) -> Iterable[StagedObject]:
        """Take the row that was opened first out of memory; yield its object."""
        row, found = next(iter(self._open.items()))
        items = self._made(row)
        self._leave(row)
        self._let_go(found)
        return items

    def _leave(self, row: int) -> None:
        self._chunks.pop(row, None)
        self._staged[row] = self._open.pop(row)

    def leave(self, records: Ranges) -> Iterable[StagedObject]:  # noqa: ARG002 (as of other rows)
        """Nothing leaves: an open row holds no committed series, and `committed` says which it has to keep."""
        return []

    def partial(self) -> Iterable[StagedObject]:
        """Yield the objects of rows that are filled in part and have grown since they were last made."""
        for row in list(self._open):
            yield from self._made(row)

    def _made(self, row: int) -> list[StagedObject]:
        """Return the object of a row that may go on growing, made, if the row has grown since it was made last."""
        found = self._open[row]
        if not found.is_dirty:
            return []
        before = found.objects
        item = self._object(row, found)
        try:
            self._stager.make(item)
        except BaseException:
            found.objects = before
            raise
        # A series that comes from now on makes it dirty again.
        self._chunks.pop(row, None)
        found.is_dirty = False
        return [item]

    def _n_records_of(self, row: int) -> int:
        return min(self._length, self._n_total - row * self._length)

    def _kept(self, row: int) -> set[int]:
        start = row * self._length
        return set().union(*(range(a, b) for a, b in inside(self._committed, start, start + self._length)))

    def _object(self, row: int, found: _Row) -> StagedObject:
        key = chunk_key(self.array.name, self._separator, (row, 0))
        # What was placed of the row may be committed before this is placed, without MPI.
        replaces = bool(found.kept) or any(o.is_placed or o.must_sync for o in found.objects)
        item = StagedObject(
            name=self.array.name,
            key=key,
            records=frozenset(found.new),
            n_cells=self.array.shape[0],
            must_sync=self._is_durable or replaces,
            shard=_Whole(self, key, found),
        )
        found.objects = [item]
        return item

    def pieces(self, key: str, found: _Row, scratch: Scratch) -> list[Any]:
        """Return the bytes of a row: the committed series as they lie, then the new ones."""
        buffer, new = found.buffer, sorted(r - found.first for r in found.new)
        assert buffer is not None
        if found.kept:
            data = read_whole(self._store, key, self._encoder.spec.max_nbytes)
            if data is None:
                raise FormatError(f"{key}: the shard of committed locations is missing", kind="missing")
            kept = [r - found.first for r in found.kept]
            try:
                shard = OpenShard.from_object(self._encoder, self.array.shape, data, kept)
            except FormatError as error:
                raise FormatError(f"{key}: {error}", kind=error.kind) from error
            for at in new:
                shard.put(at, buffer[at], scratch)
        else:
            shard = OpenShard(self._encoder, self.array.shape)
            if len(new) < len(buffer):
                buffer[np.isin(np.arange(len(buffer)), new, invert=True)] = self.array.fill
            shard.put_rows(buffer, new, scratch)
        pieces = shard.finish(scratch)
        if len(found.new) + len(found.kept) == len(buffer):
            self._let_go(found)
        return pieces

    def _read_back(self, found: _Row, buffer: NDArray[Any]) -> None:
        """Fill a buffer with the new series of a row that had left memory."""
        (item,) = found.objects
        data = item.read_back(self._store)
        if data is None:
            raise FormatError(f"{item.key}: gone from the stage folder; call rollback()", kind="missing")
        scratch = DecodeScratch()
        for batch in plan_reads(self._encoder.spec, BytesReader(data), [(0, n) for n in buffer.shape], buffer):
            batch.decode(scratch)

    def _let_go(self, found: _Row) -> None:
        if found.buffer is not None:
            self._buffers.give_back(found.buffer)
            found.buffer = None

    def committed(self, committed: Ranges) -> None:
        """Note which locations are committed now; only rows with others that are written stay in memory."""
        self._committed = committed
        self._chunks.clear()
        for rows in (self._staged, self._open):
            for row, found in list(rows.items()):
                found.kept = self._kept(row)
                found.new = found.new - found.kept
                if not found.new:
                    self._let_go(rows.pop(row))

    def reset(self, committed: Ranges) -> None:
        """Forget what is not committed."""
        self._chunks.clear()
        for found in (*self._staged.values(), *self._open.values()):
            self._let_go(found)
        self._committed, self._staged = committed, {}
        self._open.clear()


def _memory_dtype(stored: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return a dtype as `memoryview` knows it, None for one that it can't compare and copy: complex numbers, times."""
    dtype = stored.newbyteorder("=")
    try:
        np.empty(1, dtype).data[:] = np.empty(1, dtype).data
    except (NotImplementedError, ValueError):
        return None
    return dtype if stored.isnative else None

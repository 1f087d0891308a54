"""The rows of one sharded array on one writer: blocks in, finished objects out.

There is one open shard per shard that this writer owns and row. A row gives its objects when it is full, and on demand
when it is filled in part. Arrays over time alone are in `mpistream.series`.

Append and indexed mode differ only in the order in which records come: in append mode at most one row is
open, in indexed mode any number. A row with committed records is opened by reading them back, so they keep
their bytes.

The caller's thread keeps the books: which rows are open, and what is in them. The shards themselves belong to whoever
encodes: the caller, or, where rows are in the background, the threads of the stager, by the line of each shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import ArraySpec
from mpistream.errors import FormatError
from mpistream.pipeline import Line, Loan
from mpistream.ranges import Ranges, covers, inside, members
from mpistream.staged import StagedObject
from mpistream.staging import Stager
from mpistream.store import Store, read_whole
from mpistream.tiling import Box, box_contains, box_n_cells, slices_in
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import chunk_key
from mpistream.zarr3.shard import ChunkEncoder, OpenShard

__all__ = ["ShardRows", "encode_whole", "rounded"]


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
    lines: list[Line | None]
    """Where the jobs of each shard stand; None where the caller encodes."""
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
    stager
        Who encodes and stages.
    is_background
        Whether it encodes behind the caller's back.
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
        stager: Stager,
        is_background: bool = False,
    ) -> None:
        self.array = array
        self._separator = separator
        self._store = store
        self._n_total = n_total
        self._is_durable = is_durable
        self._stager = stager
        self.is_background = is_background
        self._encoder = ChunkEncoder(array.shard_spec())
        self._row_length = array.row_length
        self._block_boxes = block_boxes
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
    def borrowed(self) -> dict[int, tuple[int, ...]]:
        """Of the blocks that `put` gets those with shards of this writer, and their shapes, where they must be lent."""
        if not self.is_background:
            return {}
        blocks = sorted({shard.block for shard in self._shards})
        return {k: tuple(b - a for a, b in self._block_boxes[k]) for k in blocks}

    @property
    def raw_nbytes(self) -> int:
        """Bytes of all records in the open rows, before they are encoded."""
        record = sum(box_n_cells(shard.box) for shard in self._shards) * self.array.dtype.itemsize
        return record * sum(row.n_present for row in self._open.values())

    @property
    def nbytes(self) -> int:
        """Bytes that the open rows hold in memory, when nothing is on its way."""
        return sum(shard.nbytes for row in self._open.values() for shard in row.shards)

    @property
    def n_open(self) -> int:
        """Rows in memory."""
        return len(self._open)

    def put(
        self, record: int, blocks: Sequence[NDArray[Any]], loans: Mapping[int, Loan] | None = None
    ) -> Iterable[StagedObject]:
        """Encode a record, given as the blocks of its cells; yield its row's objects when the row is full.

        One after the other: when an object is staged before the next one is taken, no more than one is in memory.

        Parameters
        ----------
        record
            The record.
        blocks
            Its blocks.
        loans
            In the background: those that are `borrowed`, number of the block -> what holds it.

        Raises
        ------
        FormatError, StoreError
            When committed records of its row can't be read back.
        """
        row, in_row = divmod(record, self._row_length)
        found = self._open.pop(row, None) or self._read_row(row)
        self._open[row] = found
        found.n_present += 1
        found.new.add(record)
        found.is_dirty = True

        # A row of one record is written while its block is there.
        is_borrowed = self._row_length == 1 and (self.is_background or self._stager.is_synchronous)

        def put(shard: OpenShard, line: Line | None, at: _Shard) -> Loan | None:
            do = functools.partial(shard.put, in_row, blocks[at.block][at.slices], is_borrowed=is_borrowed)
            if line is None:
                self._stager.encode(do)
                return None
            assert loans is not None
            self._stager.encode_in(line, do, loans[at.block])
            return loans[at.block]

        if found.n_present == self._n_records_of(row):
            yield from self._objects(row, is_leaving=True, put=put, is_borrowing=is_borrowed)
        else:
            for shard, line, at in zip(found.shards, found.lines, self._shards, strict=True):
                put(shard, line, at)

    def _n_records_of(self, row: int) -> int:
        start = row * self._row_length
        return self._row_length if self._n_total is None else min(self._row_length, self._n_total - start)

    def leave_oldest(self) -> Iterable[StagedObject]:
        """Take the row that was not written to for longest out of memory; yield its objects."""
        return self._objects(next(iter(self._open)), is_leaving=True)

    def leave(self, records: Ranges) -> Iterable[StagedObject]:
        """Take the rows that hold any of these records out of memory; yield their objects.

        For records that are not committed any more: when more of their row comes, it is read back without them.
        """
        n = self._row_length
        for row in [row for row in self._open if inside(records, row * n, (row + 1) * n)]:
            yield from self._objects(row, is_leaving=True)

    def partial(self) -> Iterable[StagedObject]:
        """Yield the objects of rows that are filled in part and have grown since they were last made."""
        for row in list(self._open):
            yield from self._objects(row, is_leaving=False)

    def _objects(
        self,
        row: int,
        *,
        is_leaving: bool,
        put: Callable[[OpenShard, Line | None, _Shard], Loan | None] | None = None,
        is_borrowing: bool = False,
    ) -> Iterable[StagedObject]:
        """Yield the objects of an open row, each made after ``put`` has put a last record into its shard."""
        found = self._open[row]
        shards = found.shards[::-1]
        if is_leaving:
            self._staged[row] = self._open.pop(row)
            found.shards = []
        if not found.is_dirty:
            return
        start = row * self._row_length
        replaces = bool(inside(self._committed, start, start + self._row_length))
        # What was placed of the row may be committed before this is placed, without MPI.
        replaces = replaces or any(o.is_placed or o.must_sync for o in found.objects)
        objects: list[StagedObject] = []
        for at, line in zip(self._shards, found.lines, strict=True):
            shard = shards.pop()
            item = StagedObject(
                name=self.array.name,
                key=self._key(row, at.index),
                records=frozenset(found.new) if self.array.has_time else None,
                n_cells=box_n_cells(at.box),
                must_sync=self._is_durable or replaces,
                shard=shard,
                line=line,
            )
            if put is not None:
                loan = put(shard, line, at)
                if is_borrowing:
                    item.is_borrowing, item.loan = True, loan
            # Nothing but the object holds the shard from now on, once it is made.
            del shard
            if line is None:
                self._stager.make(item)
            objects.append(item)
            yield item
        # Once all are there: where one can't be made, a later call makes them all anew.
        found.objects, found.is_dirty = objects, False

    def _key(self, row: int, index: tuple[int, ...]) -> str:
        lead = (row,) if self.array.has_time else ()
        return chunk_key(self.array.name, self._separator, (*lead, *index))

    def _read_row(self, row: int) -> _Row:
        """Open a row: empty, from what is staged of it, or from what is committed."""
        start = row * self._row_length
        kept = set(members(inside(self._committed, start, start + self._row_length)))
        staged = self._staged.pop(row, None)
        new = staged.new if staged is not None else set()
        opened: list[OpenShard] = []
        for i, at in enumerate(self._shards):
            shape = tuple(b - a for a, b in at.box)
            if not kept and not new:
                opened.append(OpenShard(self._encoder, shape))
                continue
            key = self._key(row, at.index)
            if staged is None:
                data = read_whole(self._store, key, self._encoder.spec.max_nbytes)
            else:
                self._stager.settle(staged.objects[i])
                data = staged.objects[i].read_back(self._store)
            if data is None:
                raise FormatError(f"{key}: the shard of committed records is missing", kind="missing")
            try:
                opened.append(OpenShard.from_object(self._encoder, shape, data, {r - start for r in kept | new}))
            except FormatError as error:
                raise FormatError(f"{key}: {error}", kind=error.kind) from error
        lines = [self._stager.new_line() if self.is_background else None for _ in opened]
        return _Row(opened, lines, len(kept) + len(new), set(new), staged.objects if staged is not None else [])

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

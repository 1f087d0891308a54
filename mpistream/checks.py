"""What is wrong with a store, object by object: the checks behind ``mpistream verify``. Nothing is written.

A finding is *damage* when something committed can't be read as it was written, or when documents say what was never
true. It is a *leftover* when it harms no reader, and the next resume or ``mpistream repair`` mends it. It is *in
flight* when a writer that is alive, or may be, has put it there and has not committed it yet.

The store may be anybody's: sizes are compared with what they can be before anything is read, what is claimed is
counted in ranges and not one by one, and links and FIFOs are findings like others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.array_reader import ArrayReader
from mpistream.arrays import ArraySpec, Role
from mpistream.blobs import read_pack_index, read_payload
from mpistream.errors import FormatError, MPIStreamError, StoreError
from mpistream.manifest import Manifest, blob_key
from mpistream.ranges import Ranges, inside
from mpistream.recovery import growing, rows_in_place
from mpistream.schema import values_digest
from mpistream.store import ReadableStore
from mpistream.tiling import Box
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import chunk_key
from mpistream.zarr3.shard import MISSING, ShardSpec, parse_index

__all__ = ["Checker", "Finding", "Task", "committed_rows"]

# An object of at most so many bytes is read at once; of a larger one, inner chunk by inner chunk.
_MAX_READ_NBYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be."""

    level: str
    """``"damage"``, ``"leftover"`` or ``"in_flight"``."""
    kind: str
    """Short stable code, as ``kind`` of errors."""
    key: str
    """The object, or the folder."""
    text: str
    variable: str | None = None
    records: tuple[int, int] | None = None
    """Half-open; None where there are none."""
    box: Box | None = None
    """Cells of the variable without time, a (start, stop) a dim; None where it is not about cells."""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON types.

        Not collective.
        """
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Finding:
        """Return the finding that `to_json` described.

        Not collective.
        """
        records, box = document["records"], document["box"]
        return cls(
            **{
                **document,
                "records": None if records is None else (records[0], records[1]),
                "box": None if box is None else tuple((a, b) for a, b in box),
            }
        )


# What one object is found to be, and its bytes.
Task = Callable[[], tuple[list[Finding], int]]


def committed_rows(committed: Ranges, row_length: int) -> Iterator[tuple[int, int]]:
    """Yield the rows that hold committed records, as ranges, ascending and not overlapping.

    Not collective.
    """
    after = 0
    for start, stop in committed:
        first, last = max(start // row_length, after), -(-stop // row_length)
        if first < last:
            yield first, last
            after = last


class Checker:
    """The checks of one store in one committed state.

    Parameters
    ----------
    store
        The store.
    manifest
        The state.
    """

    def __init__(self, store: ReadableStore, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._separator = manifest.schema.key_separator
        self._specs: dict[str, ShardSpec] = {}
        self._reader = ArrayReader(store, self._separator)

    def tasks(self, rows: dict[str, Ranges], packs: Sequence[tuple[int, int, int]]) -> Iterator[Task]:
        """Yield a task for each object that is committed, in the same order wherever it is called.

        Not collective.

        Parameters
        ----------
        rows
            Array -> rows that are committed and lie in place.
        packs
            Committed packs of blobs that lie in place.
        """
        for array in growing(self._manifest.schema):
            if array.role is Role.VARIABLE:
                for a, b in rows[array.name]:
                    for row in range(a, b):
                        yield from (self._shard_task(array, row, index) for index in _grid(array))
            elif array.name != self._manifest.schema.time_dim:
                for a, b in rows[array.name]:
                    yield from (self._series_task(array, row) for row in range(a, b))
        for array in self._manifest.schema.arrays.values():
            if array.role is Role.COORDINATE or (array.name in self._manifest.statics and array.is_whole):
                yield lambda array=array: self._whole(array)  # type: ignore[misc]
            elif array.name in self._manifest.statics:
                yield from (self._shard_task(array, None, index) for index in _grid(array))
        yield from (lambda pack=pack: self._pack(pack) for pack in packs)

    def n_tasks(self, rows: dict[str, Ranges], n_packs: int) -> int:
        """Return how many `tasks` there are.

        Not collective.
        """
        n = n_packs
        for array in self._manifest.schema.arrays.values():
            n_objects = array.grid.n_shards if array.is_sharded else 1
            if array.has_time:
                n += n_objects * sum(b - a for a, b in rows[array.name])
            elif array.role is Role.COORDINATE or array.name in self._manifest.statics:
                n += n_objects
        return n

    def _shard_task(self, array: ArraySpec, row: int | None, index: tuple[int, ...]) -> Task:
        return lambda: self._shard(array, row, index)

    def _series_task(self, array: ArraySpec, row: int) -> Task:
        return lambda: self._series(array, row)

    def records_of(self, array: ArraySpec, row: int | None) -> Ranges:
        """Return the committed records of a row."""
        if row is None:
            return ()
        n = array.row_length
        return inside(self._manifest.committed, row * n, (row + 1) * n)

    def _damage(
        self, array: ArraySpec, key: str, error: MPIStreamError, records: Ranges = (), box: Box | None = None
    ) -> Finding:
        text = str(error).removeprefix(f"{key}: ")
        span = (records[0][0], records[-1][1]) if records else None
        return Finding(level="damage", kind=error.kind, key=key, text=text, variable=array.name, records=span, box=box)

    def _shard(self, array: ArraySpec, row: int | None, index: tuple[int, ...]) -> tuple[list[Finding], int]:
        """Check the index of a shard, and every inner chunk with committed cells."""
        key = chunk_key(array.name, self._separator, index if row is None else (row, *index))
        records, box = self.records_of(array, row), array.grid.shard_box(index)
        found: list[Finding] = []
        nbytes = 0
        if row is not None and not any(index):
            found += self._strangers(array, row)
        try:
            opened = self._store.open(key)
            if opened is None:
                raise FormatError("the committed shard is missing", kind="missing")
            try:
                nbytes = opened.nbytes
                found += self._chunks(array, row, key, box, nbytes, opened.read)
            finally:
                opened.close()
        except MPIStreamError as error:
            found.append(self._damage(array, key, error, records, box))
        return found, nbytes

    def _chunks(
        self,
        array: ArraySpec,
        row: int | None,
        key: str,
        box: Box,
        nbytes: int,
        read: Callable[[int, int], bytes],
    ) -> Iterator[Finding]:
        spec = self._spec(array)
        # Never more than there is: what an index should have is what a manifest claims.
        n_index = min(spec.index_nbytes, nbytes)
        entries = parse_index(read(nbytes - n_index, n_index), spec, nbytes)
        _check_overlap(entries)
        data = read(0, nbytes) if nbytes <= _MAX_READ_NBYTES else None
        most = spec.codec.max_nbytes(spec.chunk_shape)
        grid = np.arange(len(entries)).reshape(spec.n_chunks)
        extent = spec.chunk_shape[0]
        for time_index in range(spec.n_chunks[0]):
            first = 0 if row is None else row * array.row_length + time_index * extent
            records = () if row is None else inside(self._manifest.committed, first, first + extent)
            if row is not None and not records:
                continue
            for chunk in itertools.product(*_chunk_ranges(spec, box)):
                offset, n = (int(v) for v in entries[grid[(time_index, *chunk)]])
                if offset == MISSING:
                    continue
                try:
                    if n > most:
                        raise FormatError(f"inner chunk claims {n} bytes, it can have at most {most}", kind="chunk")
                    spec.codec.decode(read(offset, n) if data is None else data[offset : offset + n], spec.chunk_shape)
                except FormatError as error:
                    yield self._damage(array, key, error, records, _chunk_box(spec, box, chunk))

    def _spec(self, array: ArraySpec) -> ShardSpec:
        if array.name not in self._specs:
            self._specs[array.name] = array.shard_spec()
        return self._specs[array.name]

    def _strangers(self, array: ArraySpec, row: int) -> list[Finding]:
        """Find what lies in a row and is none of its shards."""
        if self._separator != "/":
            return []
        lengths = array.grid.grid_shape
        found = []
        waiting = [(f"{array.name}/c/{row}", 0)]
        while waiting and len(lengths):
            folder, depth = waiting.pop()
            try:
                names = self._store.list(folder)
            except MPIStreamError as error:
                found.append(self._damage(array, folder, error))
                continue
            for name in names:
                if not (name.isascii() and name.isdigit() and str(int(name)) == name and int(name) < lengths[depth]):
                    text = "no shard of this array"
                    found.append(
                        Finding(
                            level="leftover", kind="unknown", key=f"{folder}/{name}", text=text, variable=array.name
                        )
                    )
                elif depth + 1 < len(lengths):
                    waiting.append((f"{folder}/{name}", depth + 1))
        return found

    def _series(self, array: ArraySpec, row: int) -> tuple[list[Finding], int]:
        key = chunk_key(array.name, self._separator, (row,))
        try:
            return [], self.chunk(array, (row,)).nbytes
        except MPIStreamError as error:
            return [self._damage(array, key, error, self.records_of(array, row))], 0

    def chunk(self, array: ArraySpec, index: Sequence[int]) -> NDArray[Any]:
        """Return one chunk of an array that is not sharded.

        Raises
        ------
        FormatError, StoreError
            With the key.
        """
        return self._reader.chunk(array, ChunkCodec(array.chain, array.dtype), index)

    def _whole(self, array: ArraySpec) -> tuple[list[Finding], int]:
        """Check an array in plain chunks: of a coordinate also that its values are those of the schema."""
        key = f"{array.name}/c"
        chunks = array.resolved_chunk_shape
        n_chunks = math.prod(-(-n // c) for n, c in zip(array.shape, chunks, strict=True))
        try:
            # Counted before anything is taken for it: what a shape claims need not be there.
            there = len(self._store.list(key if self._separator == "/" else array.name))
            if chunks and there < min(n_chunks, max(-(-array.shape[0] // chunks[0]), 1)):
                raise FormatError(f"there are {there} chunks, its shape has {n_chunks}", kind="missing")
            values = np.empty(array.shape, array.dtype)
            self._reader.read_chunks(array, tuple((0, n) for n in array.shape), values)
        except MPIStreamError as error:
            where = str(error).partition(": ")[0] if str(error).startswith(f"{array.name}/") else key
            return [self._damage(array, where, error)], 0
        except (MemoryError, ValueError) as error:
            wrong = FormatError(f"its shape {array.shape} is too large for memory: {error}", kind="size")
            return [self._damage(array, key, wrong)], 0
        if array.digest is not None and values_digest(values) != array.digest:
            wrong = FormatError("its values have another digest than the manifest says", kind="digest")
            return [self._damage(array, key, wrong)], values.nbytes
        return [], values.nbytes

    def _pack(self, pack: tuple[int, int, int]) -> tuple[list[Finding], int]:
        key = blob_key(*pack)
        try:
            opened = self._store.open(key)
            if opened is None:
                raise FormatError("the pack of committed blobs is missing", kind="missing")
            try:
                for entry in read_pack_index(key, opened.nbytes, opened.read):
                    read_payload(key, entry, opened.read)
                return [], opened.nbytes
            finally:
                opened.close()
        except MPIStreamError as error:
            return [Finding(level="damage", kind=error.kind, key=key, text=str(error).removeprefix(f"{key}: "))], 0

    def rows_in_place(self, array: ArraySpec) -> set[int]:
        """Return the rows of an array that lie in place, from one listing."""
        return {row for row, _ in rows_in_place(self._store, array, self._separator)}

    def has_objects(self, array: ArraySpec, row: int) -> bool:
        """Return whether anything but folders lies in the place of a row."""
        if self._separator != "/":
            return True
        keys = [f"{array.name}/c/{row}"]
        while keys:
            key = keys.pop()
            below = self._store.list(key)
            keys += [f"{key}/{name}" for name in below]
            if not below:
                try:
                    opened = self._store.open(key)
                except StoreError:
                    return True  # a link, or a device
                if opened is not None:
                    opened.close()
                    return True
        return False


def _grid(array: ArraySpec) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, array.grid.grid_shape))


def _chunk_ranges(spec: ShardSpec, box: Box) -> list[range]:
    """Return, for each dim without time, the inner chunks that hold cells of the array."""
    return [range(-(-(b - a) // c)) for (a, b), c in zip(box, spec.chunk_shape[1:], strict=True)]


def _chunk_box(spec: ShardSpec, box: Box, chunk: Sequence[int]) -> Box:
    axes = zip(box, spec.chunk_shape[1:], chunk, strict=True)
    return tuple((a + i * c, min(a + (i + 1) * c, b)) for (a, b), c, i in axes)


def _check_overlap(entries: NDArray[np.uint64]) -> None:
    present = entries[entries[:, 0] != MISSING]
    order = present[np.argsort(present[:, 0], kind="stable")]
    # Entries lie inside the object, so no sum passes 2**64.
    overlaps = np.flatnonzero(order[1:, 0] < order[:-1, 0] + order[:-1, 1])
    if overlaps.size:
        at = int(order[overlaps[0] + 1, 0])
        raise FormatError(f"two entries of the index overlap, at byte {at}", kind="index")

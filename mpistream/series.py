"""The chunks of arrays over time alone: one value a record, written by the owner."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import SERIES_CHUNK, ArraySpec
from mpistream.errors import FormatError
from mpistream.ranges import Ranges, covers, inside
from mpistream.staged import StagedObject
from mpistream.store import Store
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import chunk_key

__all__ = ["SeriesRows", "read_series_chunk"]


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

"""Boxes of arrays out of a store, whatever is committed: by shard, by chunk, by record of a series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import SERIES_CHUNK, ArraySpec
from mpistream.errors import FormatError
from mpistream.store import Readable
from mpistream.tiling import Box, Interval
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import chunk_key
from mpistream.zarr3.shard import read_shard

__all__ = ["ArrayReader", "cells", "slices"]


def cells(box: Box, lengths: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Box, Box]]:
    """Yield each cell of a grid that a box touches: its index, and their common part as seen from cell and box."""
    ranges = [range(a // n, -(-b // n)) for (a, b), n in zip(box, lengths, strict=True)]
    for i in np.ndindex(*map(len, ranges)):
        index = tuple(r[k] for r, k in zip(ranges, i, strict=True))
        bounds = [(max(a, k * n), min(b, (k + 1) * n)) for (a, b), k, n in zip(box, index, lengths, strict=True)]
        yield (
            index,
            tuple((a - k * n, b - k * n) for (a, b), k, n in zip(bounds, index, lengths, strict=True)),
            tuple((a - lo, b - lo) for (a, b), (lo, _) in zip(bounds, box, strict=True)),
        )


def slices(box: Box) -> tuple[slice, ...]:
    """Return a box as an index of arrays."""
    return tuple(slice(a, b) for a, b in box)


class ArrayReader:
    """Reads arrays of one stream.

    Parameters
    ----------
    store
        The store.
    separator
        Of chunk keys.
    """

    def __init__(self, store: Readable, separator: str) -> None:
        self._store = store
        self._separator = separator

    def read_shards(self, array: ArraySpec, record: int | None, box: Box, out: NDArray[Any]) -> None:
        """Decode a box of one record, or of a static, from its shards into ``out``."""
        start = record or 0
        self.read_records(array, (start, start + 1), box, out[np.newaxis])

    def read_records(self, array: ArraySpec, records: Interval, box: Box, out: NDArray[Any]) -> None:
        """Decode a box of several records into ``out``; what shares an inner chunk is decoded once."""
        spec, grid = array.shard_spec(), array.grid
        for index, inside, within in cells((records, *box), (array.row_length, *grid.shard_shape)):
            key = chunk_key(array.name, self._separator, index if array.has_time else index[1:])
            opened = self._store.open(key)
            if opened is None:
                raise FormatError(f"{key}: the shard of committed records is missing", kind="missing")
            try:
                read_shard(spec, opened.nbytes, opened.read, inside, out[slices(within)])
            except FormatError as error:
                raise FormatError(f"{key}: {error}", kind=error.kind) from error
            finally:
                opened.close()

    def read_chunks(self, array: ArraySpec, box: Box, out: NDArray[Any]) -> None:
        """Decode a box of an array in plain chunks into ``out``."""
        codec, chunks = ChunkCodec(array.chain, array.dtype), array.resolved_chunk_shape
        for index, inside, within in cells(box, chunks):
            out[slices(within)] = self.chunk(array, codec, index)[slices(inside)]

    def chunk(self, array: ArraySpec, codec: ChunkCodec, index: Sequence[int]) -> NDArray[Any]:
        """Return one chunk of an array in plain chunks."""
        key = chunk_key(array.name, self._separator, index)
        data = self._store.read(key)
        if data is None:
            raise FormatError(f"{key}: the chunk of committed values is missing", kind="missing")
        try:
            return codec.decode(data, array.resolved_chunk_shape)
        except FormatError as error:
            raise FormatError(f"{key}: {error}", kind=error.kind) from error

    def read_series(self, array: ArraySpec, start: int, out: NDArray[Any]) -> None:
        """Decode records of a series from ``start`` on into ``out``."""
        codec, stop = ChunkCodec(array.chain, array.dtype), start + len(out)
        for i in range(start // SERIES_CHUNK, -(-stop // SERIES_CHUNK)):
            first = i * SERIES_CHUNK
            a, b = max(start, first), min(stop, first + SERIES_CHUNK)
            out[a - start : b - start] = self.chunk(array, codec, (i,))[a - first : b - first]

"""Boxes of arrays out of a store, whatever is committed: by shard, by chunk, by record of a series."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import SERIES_CHUNK, ArraySpec
from mpistream.errors import FormatError
from mpistream.shard_reads import Wanted, read_boxes
from mpistream.store import Readable
from mpistream.tiling import Box
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import chunk_key

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


def _refuse_absent(key: str, out: NDArray[Any]) -> None:
    del out
    raise FormatError(f"{key}: the committed shard is missing", kind="missing")


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

    def read_shards(self, array: ArraySpec, start: int, box: Box, out: NDArray[Any]) -> None:
        """Decode a box of the records from ``start`` on, or of a static (one record, 0), from its shards into ``out``.

        The first dim of ``out`` are the records.
        """
        wanted_box = ((start, start + len(out)), *box)

        def wanted() -> Iterator[Wanted]:
            for (row, *shard), inside, within in cells(wanted_box, (array.row_length, *array.grid.shard_shape)):
                index = (row, *shard) if array.has_time else shard
                yield chunk_key(array.name, self._separator, index), inside, out[slices(within)]

        read_boxes(self._store, array.shard_spec(), wanted(), out.nbytes, _refuse_absent)

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

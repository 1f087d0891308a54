"""Boxes of arrays out of a store, whatever is committed: by shard, by chunk, by record of a series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import SERIES_CHUNK, ArraySpec
from mpistream.errors import FormatError
from mpistream.store import Readable
from mpistream.tiling import Box
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import chunk_key
from mpistream.zarr3.shard import read_shard

__all__ = ["ArrayReader"]


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
        spec, grid = array.shard_spec(), array.grid
        row, in_row = divmod(record or 0, array.row_length)
        ranges = [range(a // s, -(-b // s)) for (a, b), s in zip(box, grid.shard_shape, strict=True)]
        for index in np.ndindex(*map(len, ranges)):
            shard = tuple(r[i] for r, i in zip(ranges, index, strict=True))
            lead = (row,) if array.has_time else ()
            key = chunk_key(array.name, self._separator, (*lead, *shard))
            bounds = [
                (max(a, i * s), min(b, (i + 1) * s)) for (a, b), i, s in zip(box, shard, grid.shard_shape, strict=True)
            ]
            inside = [(in_row, in_row + 1)]
            inside += [(a - i * s, b - i * s) for (a, b), i, s in zip(bounds, shard, grid.shard_shape, strict=True)]
            target = out[tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(bounds, box, strict=True))]
            opened = self._store.open(key)
            if opened is None:
                raise FormatError(f"{key}: the shard of committed records is missing", kind="missing")
            try:
                read_shard(spec, opened.nbytes, opened.read, inside, target[np.newaxis])
            except FormatError as error:
                raise FormatError(f"{key}: {error}", kind=error.kind) from error
            finally:
                opened.close()

    def read_chunks(self, array: ArraySpec, box: Box, out: NDArray[Any]) -> None:
        """Decode a box of an array in plain chunks into ``out``."""
        codec, chunks = ChunkCodec(array.chain, array.dtype), array.resolved_chunk_shape
        ranges = [range(a // c, -(-b // c)) for (a, b), c in zip(box, chunks, strict=True)]
        for i in np.ndindex(*map(len, ranges)):
            index = tuple(r[k] for r, k in zip(ranges, i, strict=True))
            chunk = self._chunk(array, codec, index)
            bounds = [(max(a, k * c), min(b, (k + 1) * c)) for (a, b), k, c in zip(box, index, chunks, strict=True)]
            to = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(bounds, box, strict=True))
            of = tuple(slice(a - k * c, b - k * c) for (a, b), k, c in zip(bounds, index, chunks, strict=True))
            out[to] = chunk[of]

    def _chunk(self, array: ArraySpec, codec: ChunkCodec, index: Sequence[int]) -> NDArray[Any]:
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
            out[a - start : b - start] = self._chunk(array, codec, (i,))[a - first : b - first]

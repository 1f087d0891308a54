"""Two versions of a shard to one: what a row that lost records in between gets back.

As in `mpistream.zarr3.shard`, an object that replaces another keeps all of its inner chunks at their offsets.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from mpistream.zarr3.shard import MISSING, ShardSpec, index_bytes, parse_index

__all__ = ["with_records_of"]


def with_records_of(spec: ShardSpec, current: bytes, other: bytes, records: Collection[int]) -> list[Any]:
    """Return an object with some records of another one, as buffers to be written one after the other.

    Not collective.

    Parameters
    ----------
    spec
        The array's shards.
    current
        The object to be replaced; all of its inner chunks stay where they are.
    other
        An object that holds the records. Records that share an inner chunk with them must be the same in both.
    records
        Positions in the row.

    Raises
    ------
    FormatError
        For a damaged index.
    """
    n = spec.index_nbytes
    entries = parse_index(current[-n:], spec, len(current))
    others = parse_index(other[-n:], spec, len(other))
    grid = np.arange(len(entries)).reshape(spec.n_chunks)
    end = max(len(current) - n, 0)
    pieces = [current[:end]]
    for time_index in sorted({record // spec.chunk_shape[0] for record in records}):
        for i in grid[time_index].reshape(-1):
            offset, nbytes = (int(v) for v in others[i])
            entries[i] = MISSING
            if offset != MISSING:
                entries[i] = end, nbytes
                pieces.append(other[offset : offset + nbytes])
                end += nbytes
    return [*pieces, index_bytes(entries)]

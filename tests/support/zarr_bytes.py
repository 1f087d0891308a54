"""Bytes to and from zarr-python: one array in its memory store, whose objects are plain bytes here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zarr
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

__all__ = ["ZarrArray"]


class ZarrArray:
    """An array of zarr-python in memory.

    Parameters
    ----------
    shape, dtype, chunk_shape, shard_shape, fill
        As in Zarr; without a shard shape the array has plain chunks.
    chain
        The codecs of a chunk, or of an inner chunk.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chain: Sequence[Mapping[str, Any]],
        *,
        chunk_shape: tuple[int, ...],
        shard_shape: tuple[int, ...] | None = None,
        fill: Any = 0,
    ) -> None:
        self._objects: dict[str, Any] = {}
        serializer, *compressors = map(dict, chain)
        self.array: Any = zarr.create_array(
            MemoryStore(self._objects),
            name="a",
            shape=shape,
            dtype=dtype.name,
            chunks=chunk_shape,
            shards=shard_shape,
            serializer=serializer,
            compressors=compressors or None,
            filters=(),
            fill_value=fill,
            config={"write_empty_chunks": False},
        )

    def __getitem__(self, index: Sequence[int]) -> bytes | None:
        """Return the object of a chunk or shard, None where there is none."""
        found = self._objects.get(self._key(index))
        return None if found is None else bytes(found.to_bytes())

    def __setitem__(self, index: Sequence[int], data: bytes) -> None:
        self._objects[self._key(index)] = cpu.Buffer.from_bytes(data)

    @staticmethod
    def _key(index: Sequence[int]) -> str:
        return "/".join(["a", "c", *map(str, index)])

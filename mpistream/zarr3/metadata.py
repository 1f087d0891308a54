"""``zarr.json`` documents and chunk keys.

The documents come out of zarr-python: the hierarchy is built in its memory store and the documents are
taken from there, so they are right for every dtype, fill value and codec. Only the owner calls that; a
contributor rank never imports zarr, because thousands of ranks importing it is a metadata storm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mpistream.schema import StreamSchema

__all__ = ["GROUP_KEY", "Documents", "array_key", "chunk_key", "make_documents"]

# On disk. Do not change; see FORMAT.md (Zarr v3 core, "Node names", "Metadata", "default chunk key encoding").
GROUP_KEY = "zarr.json"


def array_key(name: str) -> str:
    """Return the key of an array's document."""
    return f"{name}/zarr.json"


def chunk_key(name: str, separator: str, index: Sequence[int]) -> str:
    """Return the key of a chunk, which for a sharded array is a shard.

    Not collective.

    Parameters
    ----------
    name
        The array.
    separator
        ``"/"`` or ``"."``.
    index
        Position in the chunk grid, time first; empty for an array without dims.
    """
    return f"{name}/" + separator.join(["c", *map(str, index)])


class Documents:
    """The documents of a store, for any number of records.

    Parameters
    ----------
    group
        The group's document without consolidated metadata.
    arrays
        Array name -> document; the first length of a growing array is set anew for every state.
    growing
        Names of the arrays whose first dim is time.
    """

    def __init__(self, group: Mapping[str, Any], arrays: Mapping[str, dict[str, Any]], growing: Sequence[str]) -> None:
        self._group = group
        self._arrays = arrays
        self._growing = frozenset(growing)

    def group(self, n_records: int) -> bytes:
        """Return the group's document, with all arrays' documents consolidated in it."""
        consolidated = {
            "kind": "inline",
            "must_understand": False,
            "metadata": {name: self._array(name, n_records) for name in sorted(self._arrays)},
        }
        return _dump({**self._group, "consolidated_metadata": consolidated})

    def arrays(self, n_records: int, *, growing_only: bool) -> dict[str, bytes]:
        """Return key -> document of the arrays; those that don't grow never change."""
        names = [n for n in self._arrays if n in self._growing or not growing_only]
        return {array_key(n): _dump(self._array(n, n_records)) for n in names}

    def _array(self, name: str, n_records: int) -> dict[str, Any]:
        document = self._arrays[name]
        if name not in self._growing:
            return document
        return {**document, "shape": [n_records, *document["shape"][1:]]}


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2, allow_nan=False).encode()


def make_documents(schema: StreamSchema) -> Documents:
    """Build the documents of a store with zarr-python.

    Not collective.

    Parameters
    ----------
    schema
        A resolved schema.
    """
    import zarr  # noqa: PLC0415 (only the owner imports it)
    from zarr.storage import MemoryStore  # noqa: PLC0415

    objects: dict[str, Any] = {}
    store = MemoryStore(objects)
    zarr.create_group(store, attributes=dict(schema.attrs), zarr_format=3)

    for array in (*schema.own_arrays, *schema.arrays.values()):
        serializer, *compressors = map(dict, array.chain)
        zarr.create_array(
            store,
            name=array.name,
            shape=(schema.n_total or 0, *array.shape) if array.has_time else array.shape,
            dtype=array.dtype.name,
            chunks=array.resolved_chunk_shape,
            # Zarr has no shard of an array without dims: that is one chunk.
            shards=array.resolved_shard_shape if array.is_sharded and array.dims else None,
            serializer=serializer,
            compressors=compressors,
            filters=(),
            fill_value=array.fill.item(),
            attributes=dict(array.attrs),
            dimension_names=array.dims,
            chunk_key_encoding={"name": "default", "separator": schema.key_separator},
        )
    documents = {key: json.loads(buffer.to_bytes()) for key, buffer in objects.items()}
    group = documents.pop(GROUP_KEY)
    group.pop("consolidated_metadata", None)
    growing = [a.name for a in (schema.time_array, *schema.arrays.values()) if a.has_time]
    return Documents(group, {k.removesuffix("/zarr.json"): d for k, d in documents.items()}, growing)

"""``zarr.json`` documents and chunk keys.

The documents come out of zarr-python: the hierarchy is built in its memory store and the documents are
taken from there, so they are right for every dtype, fill value and codec. Only the owner calls that; a
contributor rank never imports zarr, because thousands of ranks importing it is a metadata storm.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mpistream.names import dtype_name
from mpistream.schema import StreamSchema

__all__ = ["GROUP_KEY", "Documents", "array_key", "chunk_key", "make_documents", "make_group_document"]

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

    Notes
    -----
    A commit needs them all with another number in them. They are rendered once, as text around the places of that
    number: with many arrays, the rendering would be most of what a commit computes.
    """

    def __init__(self, group: Mapping[str, Any], arrays: Mapping[str, dict[str, Any]], growing: Sequence[str]) -> None:
        self._growing = frozenset(growing)
        self._arrays = {name: _around_length(d, is_growing=name in self._growing) for name, d in arrays.items()}
        consolidated = {"kind": "inline", "must_understand": False, "metadata": {}}
        head, _, tail = _dump({**group, "consolidated_metadata": consolidated}).rpartition("{}")
        parts = [head + "{"]
        for i, name in enumerate(sorted(arrays)):
            # JSON strings have no raw line breaks, so this only indents.
            first, *rest = (part.replace("\n", _INDENT) for part in self._arrays[name])
            parts[-1] += f"{',' if i else ''}{_INDENT}{json.dumps(name)}: {first}"
            parts += rest
        parts[-1] += "\n    }" + tail
        self._group = parts

    def group(self, n_records: int) -> bytes:
        """Return the group's document, with all arrays' documents consolidated in it."""
        return str(n_records).join(self._group).encode()

    def arrays(self, n_records: int, *, growing_only: bool) -> dict[str, bytes]:
        """Return key -> document of the arrays; those that don't grow never change."""
        names = [n for n in self._arrays if n in self._growing or not growing_only]
        return {array_key(n): str(n_records).join(self._arrays[n]).encode() for n in names}


# A line break in the "metadata" of the group's document.
_INDENT = "\n" + 6 * " "


def _around_length(document: Mapping[str, Any], *, is_growing: bool) -> list[str]:
    """Return an array's document as text: in one part, or as what stands before and behind its first length."""
    if not is_growing:
        return [_dump(document)]
    _, *others = document["shape"]
    # "shape" stands first, so the first zero of the text is the length.
    text = _dump({"shape": [0, *others], **{k: v for k, v in document.items() if k != "shape"}})
    return text.split("0", maxsplit=1)


def _dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False)


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

    with warnings.catch_warnings():
        # zarr-python before 3.4 is older than the specification of this data type.
        warnings.filterwarnings("ignore", r"The data type \(FixedLengthUTF32\(.* does not have a Zarr V3 specification")
        for array in (*schema.own_arrays, *schema.arrays.values()):
            serializer, *compressors = map(dict, array.chain)
            zarr.create_array(
                store,
                name=array.name,
                shape=(schema.n_total or 0, *array.shape) if array.has_time else array.shape,
                dtype=dtype_name(array.zarr_dtype),
                chunks=array.resolved_chunk_shape,
                shards=array.resolved_shard_shape if array.is_sharded else None,
                serializer=serializer,
                compressors=compressors,
                filters=(),
                fill_value=array.fill.astype(array.zarr_dtype).item(),
                attributes=array.zarr_attrs,
                dimension_names=array.dims,
                chunk_key_encoding={"name": "default", "separator": schema.key_separator},
            )
    documents = {key: json.loads(buffer.to_bytes()) for key, buffer in objects.items()}
    group = documents.pop(GROUP_KEY)
    group.pop("consolidated_metadata", None)
    growing = [a.name for a in (schema.time_array, *schema.arrays.values()) if a.has_time]
    return Documents(group, {k.removesuffix("/zarr.json"): d for k, d in documents.items()}, growing)


def make_group_document() -> bytes:
    """Build the document of a group above streams: without attributes and without consolidated metadata.

    Not collective.
    """
    import zarr  # noqa: PLC0415 (only the owner imports it)
    from zarr.storage import MemoryStore  # noqa: PLC0415

    objects: dict[str, Any] = {}
    zarr.create_group(MemoryStore(objects), zarr_format=3)
    document = json.loads(objects[GROUP_KEY].to_bytes())
    document.pop("consolidated_metadata", None)
    return _dump(document).encode()

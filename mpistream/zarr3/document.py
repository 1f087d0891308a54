"""Documents of a Zarr hierarchy, whoever wrote them: bytes in, nodes out.

Rules of this room: a document is untrusted. What is not JSON, or contradicts what the specification says of a
node, is a `FormatError` that names the key. What is well formed but not spoken here (another codec, data type,
chunk grid, an extension) is no error: the node can be listed, and `ArrayNode.foreign` says why it takes zarr-python
to read it.

Sources: Zarr v3 core specification ("Array metadata", "Group metadata", "Chunk key encodings",
"Fill value") and codec ``sharding_indexed`` 1.0; Zarr v2 specification; for dims of v2 arrays the attribute
``_ARRAY_DIMENSIONS``, as xarray writes it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import FormatError
from mpistream.manifest import parse_json
from mpistream.names import DTYPES
from mpistream.node import Node
from mpistream.zarr3.codecs import MAX_CHUNK_NBYTES, ChunkCodec
from mpistream.zarr3.shard import ShardSpec

__all__ = ["ArrayNode", "Layout", "parse_v2", "parse_v3"]

# Zarr v3 core, "Array metadata" and "Group metadata"; any other name must say that it need not be understood.
_ARRAY_FIELDS = {
    *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"),
    *("attributes", "storage_transformers", "dimension_names"),
}
_GROUP_FIELDS = {"zarr_format", "node_type", "attributes"}
# Lengths are 64-bit integers in every implementation.
_MAX_LENGTH = 2**63 - 1
# Values in messages: whatever a document holds, as long and as deep as a person reads.
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 100
_INDEX_CODECS = ["bytes", "crc32c"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an array lies in chunks that our own codec chain decodes."""

    dtype: np.dtype[Any]
    fill: NDArray[Any]
    codec: ChunkCodec
    chunk_shape: tuple[int, ...]
    """Shape of what lies under one key."""
    shards: ShardSpec | None
    """How a shard is encoded, None where chunks are not sharded."""
    prefix: tuple[str, ...]
    """What a chunk's key begins with, before the indices."""
    separator: str

    def chunk_key(self, index: Sequence[int]) -> str:
        """Return the key of a chunk below the array's own.

        Not collective.
        """
        return self.separator.join([*self.prefix, *map(str, index)]) or "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayNode(Node):
    """An array, with how to read it."""

    zarr_format: int = field(default=3, repr=False)
    layout: Layout | None = field(default=None, repr=False)
    foreign: str = field(default="", repr=False)
    """Why there is no layout."""


class _ForeignError(Exception):
    """What our own codec chain does not serve."""


def _fail(key: str, text: str) -> FormatError:
    return FormatError(f"{key}: {text}", kind="document")


def _attributes(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _fail(key, "attributes are not an object")
    return value


def _lengths(key: str, what: str, value: Any, n_dims: int | None = None) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= _MAX_LENGTH for n in value)
        or n_dims not in (None, len(value))
    ):
        counted = "" if n_dims is None else f"{n_dims} "
        raise _fail(key, f"{what} {_SHOWN.repr(value)} is not a list of {counted}lengths")
    return tuple(value)


def _named(key: str, what: str, value: Any) -> tuple[str, Mapping[str, Any]]:
    """Return name and configuration of an extension point; a name alone is short for one without configuration."""
    if isinstance(value, str):
        return value, {}
    found = value.get("name") if isinstance(value, dict) else None
    configuration = value.get("configuration", {}) if isinstance(value, dict) else None
    if not isinstance(found, str) or not isinstance(configuration, dict):
        raise _fail(key, f"{what} {_SHOWN.repr(value)} is not an object with a name")
    return found, configuration


def parse_v3(path: str, key: str, data: bytes) -> Node:
    """Return the node that a ``zarr.json`` describes.

    Not collective.

    Parameters
    ----------
    path
        Path of the node.
    key
        Key of the document, for messages.
    data
        The document.

    Raises
    ------
    FormatError
        With the key, for what is no document of a node.
    """
    # Not JSON, but in attributes of many stores: NaN and infinities as Python writes them.
    document = parse_json(key, data, is_strict=False)
    if document.get("zarr_format") != 3:  # noqa: PLR2004
        raise _fail(key, f"zarr_format is {_SHOWN.repr(document.get('zarr_format'))}, expected 3")
    attrs = _attributes(key, document.get("attributes", {}))
    kind = document.get("node_type")
    if kind == "group":
        return Node(path=path, kind="group", attrs=attrs)
    if kind != "array":
        raise _fail(key, f"node_type is {_SHOWN.repr(kind)}, neither group nor array")
    if missing := sorted(_ARRAY_FIELDS - document.keys() - {"attributes", "storage_transformers", "dimension_names"}):
        raise _fail(key, f"lacks {', '.join(missing)}")
    shape = _lengths(key, "shape", document["shape"])
    chunks = None
    grid, configuration = _named(key, "chunk_grid", document["chunk_grid"])
    if grid == "regular":
        chunks = _lengths(key, "chunk_shape", configuration.get("chunk_shape"), len(shape))
    dtype = _named(key, "data_type", document["data_type"])[0]
    if not isinstance(document["codecs"], list) or not document["codecs"]:
        raise _fail(key, "codecs are not a list of codecs")
    codecs = [_named(key, "codec", c) for c in document["codecs"]]
    layout, foreign, inner = None, "", None
    try:
        if codecs[0][0] == "sharding_indexed":
            inner = _lengths(key, "chunk_shape of sharding_indexed", codecs[0][1].get("chunk_shape"), len(shape))
        layout = _layout(key, document, chunks, inner, codecs)
    except _ForeignError as error:
        foreign = str(error)
    return ArrayNode(
        path=path,
        kind="array",
        attrs=attrs,
        shape=shape,
        dtype=dtype,
        dims=_dims(key, document.get("dimension_names"), len(shape)),
        chunk_shape=chunks if inner is None else inner,
        shard_shape=None if inner is None else chunks,
        layout=layout,
        foreign=foreign,
    )


def _dims(key: str, value: Any, n_dims: int) -> tuple[str | None, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != n_dims or not all(d is None or isinstance(d, str) for d in value):
        raise _fail(key, f"dimension_names {_SHOWN.repr(value)} are not {n_dims} names")
    return tuple(value)


def _layout(
    key: str,
    document: Mapping[str, Any],
    chunks: tuple[int, ...] | None,
    inner: tuple[int, ...] | None,
    codecs: list[tuple[str, Mapping[str, Any]]],
) -> Layout:
    """Return how our own chain reads the array, or raise _ForeignError with why it does not."""
    unknown = [
        name
        for name, value in document.items()
        if name not in _ARRAY_FIELDS and not (isinstance(value, dict) and value.get("must_understand") is False)
    ]
    if unknown:
        raise _ForeignError(f"field {unknown[0]!r}")
    if document.get("storage_transformers"):
        raise _ForeignError("storage transformers")
    if chunks is None or 0 in chunks:
        raise _ForeignError("chunk grid")
    name, _ = _named(key, "data_type", document["data_type"])
    if name not in DTYPES:
        raise _ForeignError(f"data type {name!r}")
    dtype = np.dtype(name)
    fill = _fill(dtype, document["fill_value"])
    prefix, separator = _key_encoding(key, document["chunk_key_encoding"])
    shards = None
    if inner is not None:
        shards = _shards(key, chunks, inner, codecs, dtype, fill)
    codec = _codec(codecs, dtype) if shards is None else shards.codec
    if math.prod(chunks if inner is None else inner) * dtype.itemsize > MAX_CHUNK_NBYTES:
        raise _ForeignError("chunks of more than 2 GiB")
    return Layout(
        dtype=dtype, fill=fill, codec=codec, chunk_shape=chunks, shards=shards, prefix=prefix, separator=separator
    )


def _codec(codecs: Sequence[tuple[str, Mapping[str, Any]]], dtype: np.dtype[Any]) -> ChunkCodec:
    try:
        return ChunkCodec([{"name": n, "configuration": c} for n, c in codecs], dtype)
    except (FormatError, RecursionError) as error:  # a value nested so deep that it can't be printed
        raise _ForeignError(str(error)) from error


def _shards(
    key: str,
    chunks: tuple[int, ...],
    inner: tuple[int, ...],
    codecs: list[tuple[str, Mapping[str, Any]]],
    dtype: np.dtype[Any],
    fill: NDArray[Any],
) -> ShardSpec:
    configuration = codecs[0][1]
    lists = [configuration.get("codecs"), configuration.get("index_codecs")]
    if not all(isinstance(v, list) for v in lists):
        raise _fail(key, "sharding_indexed lacks codecs or index_codecs")
    chain, index = ([_named(key, "codec of sharding_indexed", c) for c in v] for v in lists if v is not None)
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise _fail(key, f"index_location {_SHOWN.repr(location)} is neither start nor end")
    if len(codecs) > 1:
        raise _ForeignError("codecs over shards")
    if [n for n, _ in index] != _INDEX_CODECS or index[0][1].get("endian") != "little":
        raise _ForeignError("index codecs")
    if not inner or 0 in inner or any(s % c for s, c in zip(chunks, inner, strict=True)):
        raise _ForeignError(f"inner chunks {inner} of shards {chunks}")
    return ShardSpec(
        shard_shape=chunks,
        chunk_shape=inner,
        codec=_codec(chain, dtype),
        fill=fill,
        is_index_first=location == "start",
    )


def _key_encoding(key: str, value: Any) -> tuple[tuple[str, ...], str]:
    name, configuration = _named(key, "chunk_key_encoding", value)
    if name not in ("default", "v2"):
        raise _ForeignError(f"chunk key encoding {name!r}")
    separator = configuration.get("separator", "/" if name == "default" else ".")
    if separator not in ("/", "."):
        raise _fail(key, f"separator {_SHOWN.repr(separator)} is neither / nor .")
    return ("c",) if name == "default" else (), separator


def _fill(dtype: np.dtype[Any], value: Any) -> NDArray[Any]:
    """Return a fill value, bitwise (Zarr v3 core, "Fill value")."""
    parts = value if dtype.kind == "c" else [value]
    part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    if not isinstance(parts, list) or len(parts) != dtype.itemsize // part.itemsize:
        raise _ForeignError(f"fill value {_SHOWN.repr(value)} of {dtype.name}")
    try:
        with np.errstate(over="raise"):
            return np.concatenate([_fill_part(part, v) for v in parts]).view(dtype).reshape(())
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _ForeignError(f"fill value {_SHOWN.repr(value)} of {dtype.name}") from error


def _fill_part(dtype: np.dtype[Any], value: Any) -> NDArray[Any]:
    if isinstance(value, str) and dtype.kind == "f":
        if value in ("NaN", "Infinity", "-Infinity"):
            return np.array([float(value)], dtype)
        digits = value.removeprefix("0x")
        if digits == value or len(digits) != 2 * dtype.itemsize:
            raise ValueError(value)
        return np.array([int(digits, 16)], f"u{dtype.itemsize}").view(dtype)
    if isinstance(value, bool) is not (dtype.kind == "b") or not isinstance(value, int | float):
        raise TypeError
    if isinstance(value, float) and (dtype.kind != "f" or not math.isfinite(value)):
        raise TypeError
    return np.array([value], dtype)


def parse_v2(path: str, keys: tuple[str, str], data: bytes, attributes: bytes | None) -> Node:
    """Return the node that a ``.zarray`` or ``.zgroup`` of Zarr v2 describes; zarr-python reads its arrays.

    Not collective.

    Parameters
    ----------
    path
        Path of the node.
    keys
        Keys of the two documents, for messages.
    data
        The document.
    attributes
        The ``.zattrs`` beside it, None when there is none.

    Raises
    ------
    FormatError
        With the key, for what is no document of a node.
    """
    key, attributes_key = keys
    document = parse_json(key, data, is_strict=False)
    attrs = {} if attributes is None else parse_json(attributes_key, attributes, is_strict=False)
    if document.get("zarr_format") != 2:  # noqa: PLR2004
        raise _fail(key, f"zarr_format is {_SHOWN.repr(document.get('zarr_format'))}, expected 2")
    if key.endswith(".zgroup"):
        return Node(path=path, kind="group", attrs=attrs)
    shape = _lengths(key, "shape", document.get("shape"))
    try:
        dtype = (
            np.dtype(document["dtype"]).name if isinstance(document["dtype"], str) else _SHOWN.repr(document["dtype"])
        )
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        raise _fail(key, f"bad dtype: {error!r}") from error
    dims = attrs.get("_ARRAY_DIMENSIONS")
    return ArrayNode(
        path=path,
        kind="array",
        attrs=attrs,
        shape=shape,
        dtype=dtype,
        dims=_dims(attributes_key, dims, len(shape)),
        chunk_shape=_lengths(key, "chunks", document.get("chunks"), len(shape)),
        zarr_format=2,
        foreign="Zarr v2",
    )

"""`Node`: a group or an array of a Zarr hierarchy, as it is listed, and regions of arrays by the names of dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpistream.errors import SchemaError
from mpistream.indices import Indices
from mpistream.manifest import Manifest
from mpistream.names import dtype_name
from mpistream.region import Region, box_of_mapping
from mpistream.tiling import Box

__all__ = ["Node", "box_of_region", "is_node_name", "stream_nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A group or an array of a Zarr hierarchy."""

    path: str
    """From the root of the store, with "/"; empty for the root itself."""
    kind: str
    """``"group"`` or ``"array"``."""
    attrs: Mapping[str, Any]
    """Attributes."""
    is_stream: bool = False
    """Whether a stream of mpistream lies in this group."""
    shape: tuple[int, ...] | None = None
    """Shape of an array, None for a group."""
    dtype: str | None = None
    """Name of an array's data type."""
    dims: tuple[str | None, ...] | None = None
    """Names of an array's dims, None where it gives none."""
    chunk_shape: tuple[int, ...] | None = None
    """Shape of an array's chunks, of the inner ones where it is sharded; None for a grid that is not regular."""
    shard_shape: tuple[int, ...] | None = None
    """Shape of an array's shards, None where it is not sharded."""


def is_node_name(name: str) -> bool:
    """Return whether a name may be that of a node (Zarr v3 core, "Node names").

    Not collective.
    """
    return bool(name.strip(".")) and not name.startswith("__") and "/" not in name and "\0" not in name


def stream_nodes(path: str, manifest: Manifest) -> dict[str, Node]:
    """Return path -> node of a stream: its group, and its arrays as they are committed, whatever documents say.

    Not collective.

    Parameters
    ----------
    path
        Path of the stream's group.
    manifest
        What is committed.
    """
    schema, lead = manifest.schema, f"{path}/" if path else ""
    found = {path: Node(path=path, kind="group", attrs=schema.attrs, is_stream=True)}
    for array in sorted((*schema.own_arrays, *schema.arrays.values()), key=lambda a: a.name):
        found[lead + array.name] = Node(
            path=lead + array.name,
            kind="array",
            attrs=array.attrs,
            shape=(manifest.n_records, *array.shape) if array.has_time else array.shape,
            dtype=dtype_name(array.dtype),
            dims=array.dims,
            chunk_shape=array.resolved_chunk_shape,
            shard_shape=array.resolved_shard_shape if array.is_sharded else None,
        )
    return found


def box_of_region(node: Node, region: Any) -> Box:
    """Return the box of an array that a region describes.

    Not collective.

    Parameters
    ----------
    node
        The array.
    region
        None for all, a mapping dim -> (start, stop) or a sequence of one (start, stop) an axis. A `Region`
        may name dims that the array lacks, where each axis has a name.

    Raises
    ------
    SchemaError
        Kind ``region``.
    """
    assert node.shape is not None
    dims = node.dims or (None,) * len(node.shape)
    # An axis without a name, or with one that another has too, is only reached by its position.
    labels = [d if d is not None and dims.count(d) == 1 else f"axis {i}" for i, d in enumerate(dims)]
    names = [d for d in labels if d in dims]
    what = f"array {node.path!r} with dims {dims} and shape {node.shape}"
    if isinstance(region, Indices):
        raise SchemaError(
            "indices are for read_record and read_static of a stream; read a box here and take the cells", kind="region"
        )
    if region is None:
        given: Mapping[str, Any] = {}
    elif isinstance(region, Mapping):
        given = {d: region[d] for d in region if d in names or not isinstance(region, Region)}
        lacking = [d for d in region if d not in given]
        if lacking and len(names) < len(labels):
            # It may be one of those: the whole axis would be a wrong answer, and by its position a guess.
            raise SchemaError(
                f"region over {tuple(region)}: {what} has axes without a name of their own, and {lacking[0]!r} may be "
                "one of them; give one (start, stop) an axis, say list(region.box)",
                kind="region",
            )
        if unknown := [d for d in given if d not in names]:
            raise SchemaError(
                f"region: {unknown[0]!r} is no dim of {what}; name only {names}, or give one (start, stop) an axis",
                kind="region",
            )
    elif isinstance(region, Sequence) and not isinstance(region, str) and len(region) == len(labels):
        given = dict(zip(labels, region, strict=True))
    else:
        raise SchemaError(
            f"region {str(region)[:200]}: give a mapping dim -> (start, stop) or a sequence of {len(labels)} such "
            f"pairs for {what}",
            kind="region",
        )
    return box_of_mapping(given, dict(zip(labels, node.shape, strict=True)))

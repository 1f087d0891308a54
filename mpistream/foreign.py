"""Reading what others wrote: the nodes of any Zarr hierarchy, and its arrays by region.

Our own codec chain reads what it speaks (`mpistream.zarr3.document` decides), range by range; everything else goes
through zarr-python, which only then is imported. Absent chunks are fill value, as Zarr has it: unlike in a
stream, nothing says that they should be there.

What is listed is found folder by folder, not in consolidated metadata, which may be older than the documents.
Links are followed, as every Zarr reader does: how deep and how many is bounded here, so a link that leads back
ends as an error.

And what lies where a stream was looked for and is none, in words for who gave the path.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.array_reader import cells, slices
from mpistream.errors import FormatError, MPIStreamError, SchemaError, StoreError
from mpistream.local_store import LocalStore
from mpistream.manifest import CHECKPOINT_ATTR, FOLDER, MANIFEST_KEY, Manifest
from mpistream.node import Node, box_of_region, is_node_name, stream_nodes
from mpistream.shard_reads import read_boxes
from mpistream.store import Nested, ReadableStore
from mpistream.tiling import Box
from mpistream.zarr3.document import ArrayNode, Layout, parse_v2, parse_v3
from mpistream.zarr3.metadata import GROUP_KEY

__all__ = ["ForeignStore", "meant_instead", "no_stream_text"]

# Of a folder with any number of others nobody reads more, and looking into each takes time.
_MAX_LOOKED_INTO = 100
_MAX_NAMED = 4
# Far beyond any hierarchy that a person made, and less than the 40 links that Linux follows in one path.
_MAX_DEPTH = 32
_MAX_NODES = 100_000


class ForeignStore:
    """A Zarr hierarchy that is not a stream of ours, though streams may lie in it.

    Parameters
    ----------
    store
        The store.
    """

    def __init__(self, store: ReadableStore) -> None:
        # What others wrote may be put together of links; a stream never is.
        self._store = store.following_links() if isinstance(store, LocalStore) else store
        # An array's document is read once: this reader stays with what it found.
        self._known: dict[str, Node] = {}

    def has_root(self) -> bool:
        """Return whether the store's own folder is a node."""
        return self._find("") is not None

    def nodes(self) -> dict[str, Node]:
        """Return path -> node of the whole hierarchy, sorted by path; the root's path is empty."""
        found: dict[str, Node] = {}
        waiting = [""]
        while waiting:
            path = waiting.pop()
            node = self._find(path)
            if node is None:
                continue
            found[path] = node
            if len(found) > _MAX_NODES or path.count("/") >= _MAX_DEPTH:
                raise FormatError(
                    f"{self._store.url}: at {path[:200]!r} there are {len(found)} nodes, {path.count('/') + 1} deep; "
                    f"at most {_MAX_NODES} nodes, {_MAX_DEPTH} deep, are listed; does a link lead back?",
                    kind="too_many",
                )
            if node.kind != "group":
                continue
            names = self._store.list(path)
            lead = f"{path}/" if path else ""
            if FOLDER in names:
                # A stream that was never created whole is none, and nothing else either.
                del found[path]
                found |= self._stream(path) or {}
            else:
                waiting += [lead + name for name in names if is_node_name(name)]
        return dict(sorted(found.items(), key=lambda item: item[0].split("/")))

    def _stream(self, path: str) -> dict[str, Node] | None:
        """Return the nodes of the stream in a group, None where there is none."""
        key = f"{path}/{MANIFEST_KEY}"
        data = self._store.read(key)
        return None if data is None else stream_nodes(path, Manifest.from_bytes(data, key))

    def node(self, path: str) -> Node:
        """Return the node at a path, from the root of the store and with "/"; an empty path is the root.

        Raises
        ------
        SchemaError
            Kind ``unknown`` when there is none.
        FormatError
            With the key, when its document is damaged.
        """
        if path in self._known:
            return self._known[path]
        parts = path.split("/") if isinstance(path, str) and path else []
        if not isinstance(path, str) or not all(map(is_node_name, parts)):
            raise SchemaError(
                f"{path!r} is no path of a node; give names with / between them, as hierarchy() has them",
                kind="unknown",
            )
        for i in range(1, len(parts) + 1):
            if (stream := self._stream("/".join(parts[:i]))) is not None:
                node = stream.get(path)
                break
        else:
            node = self._find(path)
            if node is not None:
                self._known[path] = node
        if node is None:
            raise SchemaError(
                f"there is no Zarr node {path!r} in {self._store.url}; hierarchy() lists those there are",
                kind="unknown",
            )
        return node

    def _find(self, path: str) -> Node | None:
        """Return the node that the documents in a folder describe."""
        lead = f"{path}/" if path else ""
        key = lead + GROUP_KEY
        if (data := self._store.read(key)) is not None:
            return parse_v3(path, key, data)
        for key in (lead + ".zarray", lead + ".zgroup"):
            if (data := self._store.read(key)) is not None:
                attributes = lead + ".zattrs"
                return parse_v2(path, (key, attributes), data, self._store.read(attributes))
        return None

    def read(self, path: str, region: Any) -> NDArray[Any]:
        """Return a region of an array.

        Raises
        ------
        SchemaError
            As `node`; a group; a region that does not fit; kind ``stream`` for an array of a stream.
        FormatError
            With the key: a damaged document or chunk, or an array that zarr-python can't read either.
        StoreError
            A failure of the storage.
        """
        node = self.node(path)
        if node.kind == "group":
            raise SchemaError(f"{path!r} is a group; hierarchy() lists its arrays", kind="unknown")
        if not isinstance(node, ArrayNode):
            stream = f"{self._store.url}/{path.rpartition('/')[0]}"
            raise SchemaError(
                f"{path!r} is an array of a stream of mpistream, which open_reader({stream!r}) reads", kind="stream"
            )
        box = box_of_region(node, region)
        if node.layout is None:
            return self._read_with_zarr(node, box)
        try:
            out = np.empty([b - a for a, b in box], node.layout.dtype)
        except (MemoryError, ValueError) as error:
            raise SchemaError(
                f"{path!r}: the region {box} is too large for memory; give a smaller one", kind="region"
            ) from error
        if out.size:
            self._read_chunks(path, node.layout, box, out)
        return out

    def _read_chunks(self, path: str, layout: Layout, box: Box, out: NDArray[Any]) -> None:
        lead = f"{path}/" if path else ""
        at = ((lead + layout.chunk_key(i), inside, within) for i, inside, within in cells(box, layout.chunk_shape))

        def fill(key: str, target: NDArray[Any]) -> None:
            del key
            target[...] = layout.fill

        if layout.shards is not None:
            wanted = ((key, inside, out[slices(within)]) for key, inside, within in at)
            read_boxes(self._store, layout.shards, wanted, out.nbytes, fill)
            return
        for key, inside, within in at:
            opened = self._store.open(key)
            if opened is None:
                # With ... an array without dims is still one.
                where: tuple[Any, ...] = (..., *slices(within))
                fill(key, out[where])
                continue
            try:
                chunk = layout.codec.decode(opened.read(0, opened.nbytes), layout.chunk_shape)
                out[slices(within)] = chunk[slices(inside)]
            except FormatError as error:
                raise FormatError(f"{key}: {error}", kind=error.kind) from error
            finally:
                opened.close()

    def _read_with_zarr(self, node: ArrayNode, box: Box) -> NDArray[Any]:
        if not isinstance(self._store, LocalStore):
            raise StoreError(
                f"array {node.path!r} has {node.foreign}, which only zarr-python reads, and only a local folder can be "
                f"given to zarr, not {self._store.url}",
                kind="not_local",
            )
        import zarr  # noqa: PLC0415 (a rank that needs it imports it, no other)

        root = f"{self._store.root}/{node.path}".rstrip("/")
        try:
            array = zarr.open_array(root, mode="r", zarr_format=2 if node.zarr_format == 2 else 3)  # noqa: PLR2004
            found = np.asarray(array[slices(box)])
        # Whatever zarr and its codecs make of what they don't know, or of a store that is damaged.
        except Exception as error:
            raise FormatError(
                f"array {node.path!r} of {self._store.url} has {node.foreign}, which is read by zarr-python, and that "
                f"failed: {type(error).__name__}: {error}",
                kind="zarr",
            ) from error
        return found if found.dtype.isnative else found.astype(found.dtype.newbyteorder("="))


def no_stream_text(store: ReadableStore) -> str:
    """Return what lies there instead of a stream, and which path may have been meant.

    Not collective.

    Parameters
    ----------
    store
        One without a manifest.

    Raises
    ------
    StoreError
        It can't be looked at.
    """
    kind = store.root_kind() if isinstance(store, LocalStore) else "folder"
    if kind is None:
        return f"no such folder: {store.url}"
    if kind == "file":
        return f"{store.url} is a file, and not the folder of a store"
    names = store.list()
    if FOLDER in names:
        return f"{store.url} was never created whole: it has {FOLDER} and no {MANIFEST_KEY}"
    if (text := meant_instead(store)) is not None:
        return text
    if not names:
        return f"{store.url} is not a stream: it is empty"
    if ForeignStore(store).has_root():
        return f"{store.url} is not a stream: it is a Zarr store that others wrote, without {MANIFEST_KEY}"
    return f"{store.url} is not a stream: there is no {MANIFEST_KEY}, and no document of another Zarr store either"


def meant_instead(store: ReadableStore) -> str | None:
    """Return which stream was meant with a folder above some, or with an array of one; None for any other place.

    Not collective.

    Parameters
    ----------
    store
        One without a manifest.

    Notes
    -----
    Of what can't be looked at nothing is said: whoever reads it meets the failure itself.
    """
    # What others wrote may be put together of links, as in `ForeignStore`.
    looked_at = store.following_links() if isinstance(store, LocalStore) else store
    with contextlib.suppress(StoreError):
        return _meant_instead(looked_at)
    return None


def _meant_instead(store: ReadableStore) -> str | None:
    names = store.list()
    if FOLDER in names:
        return None  # it is being made, or was left unfinished
    states, streams = _streams_below(store, names)
    if states:
        newest = max(states, key=lambda name: states[name])
        return (
            f"{store.url} is not a stream, it holds the states of a CheckpointPair, each a stream; give the folder of "
            f"one: {_named(store, sorted(states))}, of which {store.url}/{newest} is the newest"
        )
    if not streams:
        # In the groups below, and of a hierarchy only: any other folder may be a whole file system.
        with contextlib.suppress(FormatError):
            streams = [path for path, node in ForeignStore(store).nodes().items() if node.is_stream]
    if streams:
        return f"{store.url} is not a stream, it holds streams; give the folder of one: {_named(store, streams)}"
    above = store.above() if isinstance(store, Nested) and store.read(GROUP_KEY) is not None else None
    if above is None or (data := above.read(MANIFEST_KEY)) is None:
        return None
    # Others may put nodes of their own into a stream's folder.
    with contextlib.suppress(FormatError):
        if store.url.rpartition("/")[2] in stream_nodes("", Manifest.from_bytes(data)):
            return f"{store.url} is not a stream, it is an array of the stream {above.url}; give that one"
    return None


def _streams_below(store: ReadableStore, names: list[str]) -> tuple[dict[str, int], list[str]]:
    """Return the states of a `CheckpointPair` with their numbers, and the names of all streams."""
    states: dict[str, int] = {}
    streams = []
    for name in names[:_MAX_LOOKED_INTO]:
        # What is damaged is none that could be given instead.
        with contextlib.suppress(MPIStreamError):
            if (data := store.read(f"{name}/{MANIFEST_KEY}")) is None:
                continue
            manifest = Manifest.from_bytes(data)
            streams.append(name)
            number = manifest.schema.attrs.get(CHECKPOINT_ATTR)
            if isinstance(number, int) and manifest.committed:
                states[name] = number
    return states, streams


def _named(store: ReadableStore, names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(f"{store.url}/{name}" for name in names[:_MAX_NAMED]) + more

"""Where a stream may lie: the folders above it, and which of them are Zarr groups.

Several streams can lie in one Zarr hierarchy, as ``run.zarr/atmosphere`` and ``run.zarr/ocean``. The groups above them
belong to nobody: they are made with O_EXCL and never written again, so whoever opens a second stream at the same
moment finds them there and goes on. They hold nothing that a stream would have to bring in step; therefore no group
above a stream may have consolidated metadata, in which a reader would look for the stream in vain.

What is looked at reaches up to the root of the file system: a folder of a Zarr hierarchy knows its children by their
names only, so nothing nearer tells that there is no array or stream above.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from mpistream.comm import waiting
from mpistream.errors import FormatError, SchemaError, StoreError
from mpistream.manifest import FOLDER, MANIFEST_KEY, parse_json
from mpistream.names import check_name
from mpistream.store import Nested, Store
from mpistream.zarr3.metadata import GROUP_KEY, make_group_document

__all__ = ["check_above", "make_groups_above", "warn_if_hidden"]

_log = logging.getLogger("mpistream")

# A folder of this name is meant to be a Zarr group.
_SUFFIX = ".zarr"
# Between the creation of a group's document and its last byte another opening can see a part of it.
_BEING_MADE_SECONDS = 5.0
# Zarr v2's documents.
_V2 = {".zarray": "array", ".zgroup": "group"}


def check_above(store: Store) -> list[Store]:
    """Check what lies above a new stream; nothing is written.

    Not collective.

    Returns
    -------
    The folders above that have to become groups, the uppermost first: those from the uppermost one that is a Zarr
    group or whose name ends with ``.zarr`` down to the stream, as far as they are no groups yet.

    Raises
    ------
    StoreError
        Kind ``hierarchy``: inside a stream, an array, a group with consolidated metadata, or a Zarr v2 hierarchy.
    SchemaError
        Kind ``name``: a folder between that Zarr does not take for a node.
    """
    folders = _folders_above(store)
    is_group = []
    for folder in folders:
        _check_no_stream(store, folder)
        document = _read_document(folder)
        if document is not None:
            _check_plain_group(store, folder, document)
        is_group.append(document is not None)
    n = max((i + 1 for i, f in enumerate(folders) if is_group[i] or _is_meant_as_group(f)), default=0)
    if n:
        for node in (store, *folders[: n - 1]):
            try:
                check_name("group", _name(node))
            except SchemaError as error:
                raise SchemaError(f"{store.url} in the hierarchy {folders[n - 1].url}: {error}", kind="name") from error
    return [folders[i] for i in reversed(range(n)) if not is_group[i]]


def make_groups_above(store: Store) -> None:
    """Check what lies above a new stream once more, and make the groups that are missing.

    Not collective.

    Raises
    ------
    StoreError, SchemaError
        As `check_above`.
    """
    for folder in check_above(store):
        # Whoever was first has made it, of what kind ever.
        if not folder.create(GROUP_KEY, make_group_document()) and (document := _read_document(folder)) is not None:
            _check_plain_group(store, folder, document)


def warn_if_hidden(store: Store) -> None:
    """Log a warning when a group above an existing stream has consolidated metadata: readers there see an old state.

    Not collective.
    """
    for folder in _folders_above(store):
        document: dict[str, Any] = {}
        # What can't be read hides nothing, and is no reason against a resume.
        with contextlib.suppress(FormatError, StoreError):
            document = parse_json(GROUP_KEY, folder.read(GROUP_KEY) or b"{}")
        if document.get("consolidated_metadata") is not None:
            _log.warning(
                "%s: the group %s has consolidated metadata; who opens that group does not see what is written from "
                "now on. Take the metadata out, or consolidate it again when the stream is closed.",
                store.url,
                folder.url,
            )


def _folders_above(store: Store) -> list[Store]:
    """Return all folders above, the nearest first."""
    folders: list[Store] = []
    folder: Store | None = store
    while isinstance(folder, Nested) and (folder := folder.above()) is not None:
        folders.append(folder)
    return folders


def _name(store: Store) -> str:
    return store.url.rpartition("/")[2]


def _is_meant_as_group(folder: Store) -> bool:
    return _name(folder).endswith(_SUFFIX) and _name(folder) != _SUFFIX


def _check_no_stream(store: Store, folder: Store) -> None:
    # The folder, not only the manifest: that comes last, and two openings may be under way at the same moment.
    if not folder.list(FOLDER):
        return
    if folder.read(MANIFEST_KEY) is not None:
        text = "which is a stream, and a stream holds no other; give a path beside it, or below a plain group"
    else:
        text = f"where a stream is being made or was left unfinished; remove {folder.url}/{FOLDER} if nobody makes it"
    raise StoreError(f"{store.url} lies inside {folder.url}, {text}", kind="hierarchy")


def _check_plain_group(store: Store, folder: Store, document: dict[str, Any]) -> None:
    node = document.get("node_type")
    if document.get("zarr_format") != 3:  # noqa: PLR2004 (Zarr v3)
        text = f"a Zarr v2 {node}, in which readers see no stream; give a path outside"
    elif node != "group":
        text = f"a Zarr {node}, which has no nodes below it; give a path outside"
    elif document.get("consolidated_metadata") is not None:
        text = (
            "a group with consolidated metadata, in which readers would not find the stream; take "
            f"'consolidated_metadata' out of {folder.url}/{GROUP_KEY}, or give a path outside"
        )
    else:
        return
    raise StoreError(f"{store.url} lies inside {folder.url}, {text}", kind="hierarchy")


def _read_document(folder: Store) -> dict[str, Any] | None:
    """Return the document of a Zarr node, None for a plain folder."""
    failure: FormatError | None = None
    for _ in waiting(_BEING_MADE_SECONDS):
        data = folder.read(GROUP_KEY)
        if data is None:
            v2 = (kind for name, kind in _V2.items() if folder.read(name) is not None)
            kind = next(v2, None)
            return None if kind is None else {"zarr_format": 2, "node_type": kind}
        try:
            return parse_json(GROUP_KEY, data)
        except FormatError as error:
            failure = error
    raise StoreError(
        f"{folder.url}/{GROUP_KEY} is damaged ({failure}); remove it: the group is made anew", kind="hierarchy"
    ) from failure

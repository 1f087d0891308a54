"""What a resume does with objects that are no longer, or never were, committed. Every step can be done again."""

from __future__ import annotations

from mpistream.arrays import ArraySpec, Role
from mpistream.manifest import (
    BLOBS_FOLDER,
    DROPPED_FOLDER,
    EPOCHS_FOLDER,
    FOLDER,
    LEASE_KEY,
    MANIFEST_KEY,
    STAGE_FOLDER,
    Manifest,
    dropped_folder,
    layout_key,
    nonce_key,
    parse_blob,
    parse_epoch,
)
from mpistream.ranges import inside
from mpistream.schema import StreamSchema
from mpistream.store import Store

__all__ = ["remove_uncommitted", "remove_uncommitted_blobs", "set_aside_dropped", "tidy"]


def _growing(schema: StreamSchema) -> list[ArraySpec]:
    return [a for a in (schema.time_array, *schema.arrays.values()) if a.has_time]


def _rows_in_place(store: Store, array: ArraySpec, separator: str) -> list[tuple[int, str]]:
    """Return (row, path below the array) of everything that lies in place, from one listing."""
    if separator == "/":
        return [(int(n), f"c/{n}") for n in store.list(f"{array.name}/c") if parse_epoch(n) is not None]
    found = []
    for name in store.list(array.name):
        parts = name.split(".")
        if parts[0] == "c" and len(parts) > 1 and parse_epoch(parts[1]) is not None:
            found.append((int(parts[1]), name))
    return found


def _objects_of_row(store: Store, array: ArraySpec, path: str) -> list[str]:
    """Return the objects of one row below the array: the path itself, or all below it."""
    found, folders = [], [path]
    while folders:
        folder = folders.pop()
        below = store.list(f"{array.name}/{folder}")
        if not below:
            found.append(folder)
        folders += [f"{folder}/{name}" for name in below]
    return found


def set_aside_dropped(store: Store, manifest: Manifest) -> None:
    """Keep dropped records until the first commit: whole rows by rename, a row that keeps records by copy.

    What is there already was put there by a resume that died or by an earlier one; what then lies in place
    was never committed.
    """
    if not manifest.dropped:
        return
    for array in _growing(manifest.schema):
        in_place = _rows_in_place(store, array, manifest.schema.key_separator)
        for dropped in manifest.dropped:
            folder = f"{dropped_folder(dropped.epoch)}/{array.name}"
            first, after = dropped.start // array.row_length, -(-dropped.stop // array.row_length)
            for row, path in in_place:
                if not first <= row < after:
                    continue
                if _keeps_any(manifest, array, row):
                    for item in _objects_of_row(store, array, path):
                        if not _exists(store, f"{folder}/{item}"):
                            store.copy(f"{array.name}/{item}", f"{folder}/{item}")
                elif not _exists(store, f"{folder}/{path}"):
                    store.move(f"{array.name}/{path}", f"{folder}/{path}")


def _keeps_any(manifest: Manifest, array: ArraySpec, row: int) -> bool:
    return bool(inside(manifest.committed, row * array.row_length, (row + 1) * array.row_length))


def _exists(store: Store, key: str) -> bool:
    folder, _, name = key.rpartition("/")
    return name in store.list(folder)


def remove_uncommitted(store: Store, manifest: Manifest) -> None:
    """Remove what was placed and is not committed: rows without a committed record, and statics."""
    for array in _growing(manifest.schema):
        for row, path in _rows_in_place(store, array, manifest.schema.key_separator):
            if not _keeps_any(manifest, array, row):
                store.delete_tree(f"{array.name}/{path}")
    for array in manifest.schema.arrays.values():
        if array.role is Role.STATIC and array.name not in manifest.statics:
            for name in store.list(array.name):
                if name.startswith("c"):
                    store.delete_tree(f"{array.name}/{name}")


def remove_uncommitted_blobs(store: Store, manifest: Manifest) -> None:
    """Remove packs of blobs that the last committed state does not name: they were placed and never committed.

    Not collective.

    Parameters
    ----------
    store
        The store.
    manifest
        The committed state before the recovery: the new one takes the commit_seq of such a pack.
    """
    for name in store.list(BLOBS_FOLDER):
        found = parse_blob(name)
        if found is None or not manifest.names_pack(*found[:2]):
            store.delete_tree(f"{BLOBS_FOLDER}/{name}")


def tidy(store: Store, manifest: Manifest) -> None:
    """Remove what earlier openings left under ``.mpistream`` and nobody needs.

    Not collective.

    Parameters
    ----------
    store
        The store.
    manifest
        The committed state; what it does not name, of layouts and of records set aside, is left over.
    """
    keep = {
        *(layout_key(manifest.epoch), nonce_key(manifest.epoch)),
        *(MANIFEST_KEY, LEASE_KEY, EPOCHS_FOLDER, STAGE_FOLDER, BLOBS_FOLDER),
        *(dropped_folder(d.epoch) for d in manifest.dropped),
    }
    for folder in (FOLDER, DROPPED_FOLDER):
        for name in store.list(folder):
            path = f"{folder}/{name}"
            if path not in keep and path != DROPPED_FOLDER:
                store.delete_tree(path)

"""What a resume does with objects that are no longer, or never were, committed. Every step can be done again."""

from __future__ import annotations

from collections.abc import Iterator

from mpistream.arrays import ArraySpec, Role
from mpistream.errors import StoreError
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
from mpistream.staging import Stager
from mpistream.store import MAX_READ_NBYTES, ReadableStore, Store, read_whole

__all__ = [
    "SetAside",
    "growing",
    "keeps_any",
    "remove_uncommitted",
    "remove_uncommitted_blobs",
    "rows_in_place",
    "set_aside_dropped",
    "tidy",
]


def growing(schema: StreamSchema) -> list[ArraySpec]:
    """Return the arrays that have a row, or a chunk, for some records.

    Not collective.
    """
    return [a for a in (schema.time_array, *schema.arrays.values()) if a.has_time]


class SetAside:
    """Where things lie that the resumes since the last commit set aside.

    Parameters
    ----------
    store
        The store.
    manifest
        The committed state.
    """

    def __init__(self, store: ReadableStore, manifest: Manifest) -> None:
        self._store = store
        self._folders = [
            f"{DROPPED_FOLDER}/{name}" for name in store.list(DROPPED_FOLDER) if not _is_left_over(manifest, name)
        ]
        self._listed: dict[str, set[str]] = {}

    def find(self, key: str) -> str | None:
        """Return where an object, or a folder, of an array was set aside; None if it was not."""
        return next((found for folder in self._folders if self._exists(found := f"{folder}/{key}")), None)

    def _exists(self, key: str) -> bool:
        above, _, name = key.rpartition("/")
        if above not in self._listed:
            self._listed[above] = set(self._store.list(above))
        return name in self._listed[above]


def rows_in_place(store: ReadableStore, array: ArraySpec, separator: str) -> list[tuple[int, str]]:
    """Return (row, path below the array) of everything that lies in place, from one listing.

    Not collective.
    """
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


def set_aside_dropped(store: Store, stager: Stager, manifest: Manifest) -> None:
    """Keep dropped records until the first commit: whole rows by rename, a row that keeps records by copy.

    Not collective. What was set aside already, by a resume that died or by an earlier one, is not looked at
    again; what then lies in place was never committed. The folder comes out of the stage folder and is never
    made again, so a resume that was fenced can move nothing into it.

    Parameters
    ----------
    store
        The store.
    stager
        Of the owner of the new epoch.
    manifest
        The state after the resume.
    """
    todo = list(_to_set_aside(store, manifest))
    if not todo:
        return
    folder = dropped_folder(manifest.epoch, is_open=True)
    made_folders: set[str] = set()
    try:
        made = stager.name()
        store.make_folder(made, parents=False)
        store.move(made, folder)
        for key, most, is_copied in todo:
            for above in _folders_above(key):
                if above not in made_folders:
                    store.make_folder(f"{folder}/{above}", parents=False)
                    made_folders.add(above)
            if is_copied:
                name = stager.name()
                store.stage(name, [read_whole(store, key, most) or b""], sync=True)
                store.move(name, f"{folder}/{key}", parents=False, sync=False)
            else:
                store.move(key, f"{folder}/{key}", parents=False, sync=False)
        # Once for all: a rename that a loss of power takes back is done again by the next resume.
        store.sync_folders([f"{folder}/{key}" for key, _, _ in todo])
        store.sync_folders([key.rpartition("/")[0] for key, _, is_copied in todo if not is_copied])
        store.move(folder, dropped_folder(manifest.epoch))
    except StoreError as error:
        raise stager.fenced(error) from error


def _is_left_over(manifest: Manifest, name: str) -> bool:
    """Whether a folder of records set aside belongs to dropped records of before the last commit."""
    epoch = parse_epoch(name.removesuffix(".open"))
    return not manifest.dropped or epoch is None or epoch < manifest.dropped[0].epoch


def _folders_above(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _to_set_aside(store: Store, manifest: Manifest) -> Iterator[tuple[str, int, bool]]:
    """Yield what was not set aside before of dropped rows: key, bytes that it can have, whether it is copied."""
    if not manifest.dropped:
        return
    aside = SetAside(store, manifest)
    for array in growing(manifest.schema):
        in_place = rows_in_place(store, array, manifest.schema.key_separator)
        most = array.shard_spec().max_nbytes if array.is_sharded else MAX_READ_NBYTES
        for dropped in manifest.dropped:
            first, after = dropped.start // array.row_length, -(-dropped.stop // array.row_length)
            for row, path in in_place:
                if not first <= row < after:
                    continue
                is_copied = keeps_any(manifest, array, row)
                # Of a row that kept records when an earlier resume died, only some objects may have been copied.
                is_whole = not is_copied and aside.find(f"{array.name}/{path}") is None
                for item in [path] if is_whole else _objects_of_row(store, array, path):
                    key = f"{array.name}/{item}"
                    if aside.find(key) is None:
                        yield key, most, is_copied


def keeps_any(manifest: Manifest, array: ArraySpec, row: int) -> bool:
    """Return whether a row of an array holds a committed record.

    Not collective.
    """
    return bool(inside(manifest.committed, row * array.row_length, (row + 1) * array.row_length))


def remove_uncommitted(store: Store, stager: Stager, manifest: Manifest) -> None:
    """Remove what was placed and is not committed: rows without a committed record, and statics."""
    for array in growing(manifest.schema):
        for row, path in rows_in_place(store, array, manifest.schema.key_separator):
            if not keeps_any(manifest, array, row):
                stager.remove(f"{array.name}/{path}")
    for array in manifest.schema.arrays.values():
        if array.role is Role.STATIC and array.name not in manifest.statics:
            for name in store.list(array.name):
                if name.startswith("c"):
                    stager.remove(f"{array.name}/{name}")


def remove_uncommitted_blobs(store: Store, stager: Stager, manifest: Manifest) -> None:
    """Remove packs of blobs that the last committed state does not name: they were placed and never committed.

    Not collective.

    Parameters
    ----------
    store
        The store.
    stager
        Of the owner of the new epoch.
    manifest
        The committed state before the recovery: the new one takes the commit_seq of such a pack.
    """
    names = store.list(BLOBS_FOLDER)
    for name in names:
        found = parse_blob(name)
        if found is None or not manifest.names_pack(*found[:2]):
            stager.remove(f"{BLOBS_FOLDER}/{name}")
    if names or BLOBS_FOLDER.rpartition("/")[2] in store.list(FOLDER):
        # Durably, whoever removed them: one that came back with the power would be named by the manifest after next.
        store.sync_folders([f"{BLOBS_FOLDER}/-"])


def tidy(store: Store, stager: Stager, manifest: Manifest) -> None:
    """Remove what earlier openings left under ``.mpistream`` and nobody needs.

    Not collective.

    Parameters
    ----------
    store
        The store.
    stager
        Of the owner of the new epoch.
    manifest
        The committed state; what it does not name, of layouts and of records set aside, is left over.
    """
    keep = {
        *(layout_key(manifest.epoch), nonce_key(manifest.epoch)),
        *(MANIFEST_KEY, LEASE_KEY, EPOCHS_FOLDER, STAGE_FOLDER, DROPPED_FOLDER, BLOBS_FOLDER),
    }
    for name in store.list(FOLDER):
        if f"{FOLDER}/{name}" not in keep:
            stager.remove(f"{FOLDER}/{name}")
    for name in store.list(DROPPED_FOLDER):
        if _is_left_over(manifest, name):
            stager.remove(f"{DROPPED_FOLDER}/{name}")

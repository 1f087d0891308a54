"""A new store: what ``write_open`` does on the owner."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpistream.epoch import EpochState, prove_epoch
from mpistream.errors import FormatError, StoreError
from mpistream.layout import decompose, resolve_layout
from mpistream.manifest import (
    EPOCHS_FOLDER,
    FOLDER,
    MANIFEST_KEY,
    STAGE_FOLDER,
    Manifest,
    nonce_key,
    parse_json,
    stage_folder,
)
from mpistream.opening import Claim, checked_regions, log_plan, put_layout, put_manifest
from mpistream.options import Options
from mpistream.owner import Owner, put_documents
from mpistream.rows import encode_whole
from mpistream.schema import StreamSchema
from mpistream.staging import Stager
from mpistream.store import Store
from mpistream.zarr3.metadata import GROUP_KEY, make_documents

__all__ = ["CreateRequest"]

_REPLACED_FOLDER = f"{FOLDER}/replaced"


class CreateRequest:
    """A call of ``write_open``.

    Parameters
    ----------
    schema
        The schema as given.
    overwrite
        Whether what is there may be replaced.
    """

    def __init__(self, schema: StreamSchema, *, overwrite: bool) -> None:
        self._given = self.schema = schema
        self._overwrite = overwrite

    def digest_parts(self) -> list[Any]:
        """Return what must be the same on every rank."""
        return [self._given.to_json(), self._overwrite]

    def check(self, store: Store, regions: Sequence[Any]) -> EpochState:
        """Check the request; nothing is written.

        Raises
        ------
        SchemaError, AlignmentError, TilingError
            For regions that don't fit.
        StoreError
            For a store that exists.
        """
        given = checked_regions(regions, self._given)
        self.schema = resolve_layout(self._given, len(regions), given)
        epoch = prove_epoch(self.schema, given or decompose(self.schema, len(regions)))
        self.check_target(store)
        return epoch

    def check_target(self, store: Store) -> None:
        """Check what lies where the store shall be; nothing is written.

        Raises
        ------
        StoreError
            For a store that exists.
        """
        self._names = _check_target(store, overwrite=self._overwrite)

    def begin(self, store: Store, claimed: Claim, epoch: EpochState, options: Options) -> tuple[Owner, None]:
        """Write everything of a new store whose writers are known."""
        log_plan(store, self.schema, epoch)
        return self.create(store, claimed, epoch, len(epoch.regions), options), None

    def create(self, store: Store, claimed: Claim, epoch: EpochState | None, n_writers: int, options: Options) -> Owner:
        """Write everything of a new store, the manifest last but for the group's document."""
        stager = Stager(store, stage_folder(claimed.epoch, 0), claimed.epoch, threads=0, max_pending_nbytes=1)
        self._set_aside_old(store, claimed.epoch)
        digest = put_layout(store, claimed.epoch, n_writers, None if epoch is None else epoch.regions)
        schema = self.schema
        documents = make_documents(schema)
        for array in (schema.time_array, *schema.arrays.values()):
            if array.values is not None:
                objects = encode_whole(array, schema.key_separator, array.values)
                for item in objects:
                    stager.submit(item)
                stager.retry(objects)
                stager.place(objects, sync=True)
        put_documents(store, stager, documents.arrays(schema.n_total or 0, growing_only=False), sync=True)
        manifest = Manifest.first(
            store_id=os.urandom(16).hex(),
            run_id=claimed.run_id,
            epoch=claimed.epoch,
            schema=schema,
            layout_digest=digest,
        )
        put_manifest(store, stager, manifest)
        # Before its group document a store is not a Zarr store: plain readers see it whole or not at all.
        put_documents(store, stager, {GROUP_KEY: documents.group(manifest.n_records)}, sync=True)
        store.delete_tree(_REPLACED_FOLDER)
        return Owner(store, manifest, epoch, documents, claimed.keeper, options)

    def _set_aside_old(self, store: Store, epoch: int) -> None:
        """Rename what was there out of the way, the manifest first: from then on it is no store."""
        if store.delete(MANIFEST_KEY):
            store.sync_folders([MANIFEST_KEY])
        for name in store.list(FOLDER):
            if f"{FOLDER}/{name}" not in (
                EPOCHS_FOLDER,
                STAGE_FOLDER,
                _REPLACED_FOLDER,
                nonce_key(epoch),
            ) and (name != "lease"):
                store.delete_tree(f"{FOLDER}/{name}")
        for name in self._names:
            if name != FOLDER:
                store.move(name, f"{_REPLACED_FOLDER}/{epoch}/{name}")


def _check_target(store: Store, *, overwrite: bool) -> list[str]:
    """Return what lies where the store shall be, if it may be replaced."""
    names = store.list()
    if not names:
        try:
            store.make_folder("")
        except StoreError as error:
            raise StoreError(
                f"{store.url}: can't be made a folder ({error}); give a path that is free or a folder",
                kind="not_a_folder",
                errno=error.errno,
            ) from error
        return []
    manifest = store.read(MANIFEST_KEY)
    document = store.read(GROUP_KEY)
    if manifest is not None or (document is not None and FOLDER not in names):
        what = "a stream" if manifest is not None else "a Zarr node"
        if not overwrite:
            continues = "; write_resume continues it" if manifest is not None else ""
            raise StoreError(f"{store.url} holds {what} already; overwrite=True replaces it{continues}", kind="exists")
        if manifest is None and _node_type(document) != "group":
            raise StoreError(
                f"{store.url} is a Zarr {_node_type(document)}, not a group; it is not replaced, give another path",
                kind="exists",
            )
    elif FOLDER not in names:
        raise StoreError(
            f"{store.url} is a folder with other things in it ({names[0]!r}); it is not replaced, give another path",
            kind="not_empty",
        )
    if (below := _stream_below(store, "")) is not None:
        raise StoreError(f"{store.url}: a stream lies below it, in {below!r}; remove that one first", kind="exists")
    # A folder with .mpistream but no manifest was never created: it is taken over like an empty one.
    return names


def _node_type(document: bytes | None) -> str:
    try:
        return str(parse_json(GROUP_KEY, document or b"").get("node_type"))
    except FormatError:
        return "node"


def _stream_below(store: Store, prefix: str) -> str | None:
    """Return a stream in a folder below, if there is one; arrays have none below them."""
    for name in store.list(prefix):
        path = f"{prefix}/{name}" if prefix else name
        # Whatever is no array may hold a stream: a group, but also a plain folder.
        if path == FOLDER or _node_type(store.read(f"{path}/{GROUP_KEY}")) == "array":
            continue
        if store.read(f"{path}/{MANIFEST_KEY}") is not None:
            return path
        if (below := _stream_below(store, path)) is not None:
            return below
    return None

"""A new store: what ``write_open`` does on the owner."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mpistream.epoch import EpochState
from mpistream.errors import FormatError, SchemaError, StoreError
from mpistream.hierarchy import check_above, make_groups_above
from mpistream.manifest import (
    EPOCHS_FOLDER,
    FOLDER,
    LEASE_KEY,
    MANIFEST_KEY,
    STAGE_FOLDER,
    Manifest,
    nonce_key,
    parse_json,
    stage_folder,
)
from mpistream.opening import Claim, put_layout, put_manifest, settled
from mpistream.options import Options
from mpistream.owner import Owner
from mpistream.publishing import put_documents
from mpistream.rows import encode_whole
from mpistream.schema import StreamSchema
from mpistream.staging import Stager
from mpistream.store import Store
from mpistream.zarr3.metadata import GROUP_KEY, make_documents

__all__ = ["CreateRequest"]


class CreateRequest:
    """A call of ``write_open``.

    Parameters
    ----------
    schema
        The schema as given.
    overwrite
        Whether what is there may be replaced.

    Raises
    ------
    SchemaError
        Kind ``values`` for a schema that comes from a store: that has digests in the place of values.
    """

    def __init__(self, schema: StreamSchema, *, overwrite: bool) -> None:
        for array in (schema.time_array, *schema.arrays.values()):
            if array.digest is not None and array.values is None:
                raise SchemaError(
                    f"{array.name!r} has a digest and no values: this schema comes from a store; give "
                    "the values to create another one",
                    kind="values",
                )
        # An object of its own: what is rendered of a schema once for an opening is not another opening's, for which the
        # program may have changed attributes in between.
        self._given = self.schema = schema.with_layout({})
        self._overwrite = overwrite
        self.leftovers: list[str] = []
        """What was replaced, in the stage folder, to be deleted when the store is open."""

    def arguments(self) -> dict[str, Any]:
        """Return what must be the same on every rank, as JSON types by name."""
        return {"schema": self._given.to_json(), "overwrite": self._overwrite}

    def check(self, store: Store, votes: Sequence[Mapping[str, Any]], options: Options) -> EpochState:
        """Check the request; nothing is written.

        Parameters
        ----------
        store
            The store.
        votes
            Of each rank, its ``region`` and the ``node`` it runs on.
        options
            The options.

        Raises
        ------
        SchemaError, AlignmentError, TilingError
            For regions that don't fit.
        StoreError
            For a store that exists.
        """
        self.schema, epoch = settled(self._given, votes, options)
        self.check_target(store)
        return epoch

    def check_target(self, store: Store) -> None:
        """Check what lies where the store shall be; nothing is written.

        Raises
        ------
        StoreError
            For a store that exists, or a place that no stream can have.
        """
        check_above(store)
        self._found = _check_target(store, overwrite=self._overwrite)

    def begin(self, store: Store, claimed: Claim, epoch: EpochState, options: Options) -> tuple[Owner, None]:
        """Write everything of a new store whose writers are known."""
        return self.create(store, claimed, epoch, len(epoch.regions), options), None

    def create(self, store: Store, claimed: Claim, epoch: EpochState | None, n_writers: int, options: Options) -> Owner:
        """Write everything of a new store, the manifest last but for the group's document."""
        stager = Stager(store, stage_folder(claimed.epoch, 0), claimed.epoch, threads=0, max_pending_nbytes=1)
        # Once more, behind the fence: while this opening waited for the lease another may have come and gone.
        found = _check_target(store, overwrite=self._overwrite)
        if not self._overwrite and found != self._found:
            raise StoreError(f"{store.url} was changed by another process meanwhile; try again", kind="exists")
        # Of two openings of which one lies in the other at least one sees the other here: both have their folder now.
        make_groups_above(store)
        self.leftovers = self._set_aside_old(store, stager, claimed.epoch, found[0])
        digest = put_layout(store, claimed.epoch, n_writers, None if epoch is None else epoch.layout_regions)
        schema = self.schema
        documents = make_documents(schema)
        # Documents before chunks: what a creation that died leaves can be told from what it did not make.
        put_documents(store, stager, documents.arrays(schema.n_total or 0, growing_only=False), sync=True)
        for array in (schema.time_array, *schema.arrays.values()):
            if array.values is not None:
                objects = encode_whole(array, schema.key_separator, array.values)
                for item in objects:
                    stager.submit(item)
                stager.retry(objects)
                stager.place(objects, sync=True)
        manifest = Manifest.first(
            store_id=os.urandom(16).hex(),
            run_id=claimed.run_id,
            epoch=claimed.epoch,
            schema=schema,
            layout_digest=digest,
        )
        # A manifest must not outlast the names of the arrays in the root.
        store.sync_folders([GROUP_KEY])
        put_manifest(store, stager, manifest)
        # Before its group document a store is not a Zarr store: plain readers see it whole or not at all.
        put_documents(store, stager, {GROUP_KEY: documents.group(manifest.n_records)}, sync=True)
        return Owner(store, manifest, epoch, documents, claimed.keeper, options)

    @staticmethod
    def _set_aside_old(store: Store, stager: Stager, epoch: int, names: Sequence[str]) -> list[str]:
        """Rename what was there into the stage folder, the manifest first: from then on it is no store.

        Each rename fails if a newer epoch has fenced this one, so nothing of that one's is ever replaced.
        """
        keep = (EPOCHS_FOLDER, STAGE_FOLDER, LEASE_KEY, nonce_key(epoch))
        old = [MANIFEST_KEY]
        old += [p for name in store.list(FOLDER) if (p := f"{FOLDER}/{name}") not in (*keep, MANIFEST_KEY)]
        old += names
        moved = []
        for key in old:
            name = stager.name()
            try:
                # Synced one by one: after a loss of power there must be no manifest without its arrays.
                if store.move(key, name, parents=False):
                    moved.append(name)
            except StoreError as error:
                raise stager.fenced(error) from error
        return moved


def _check_target(store: Store, *, overwrite: bool) -> tuple[list[str], bytes | None]:
    """Return what lies where the store shall be, if it may be replaced: names but ``.mpistream``, and the manifest."""
    every = store.list()
    names = [name for name in every if name != FOLDER]
    if not every:
        try:
            store.make_folder("")
        except StoreError as error:
            raise StoreError(
                f"{store.url}: can't be made a folder ({error}); give a path that is free or a folder",
                kind="not_a_folder",
                errno=error.errno,
            ) from error
        return [], None
    manifest = store.read(MANIFEST_KEY)
    document = store.read(GROUP_KEY)
    if manifest is not None or document is not None:
        what = "a stream" if manifest is not None else "a Zarr node"
        if not overwrite and manifest is None and (below := _stream_below(store, "")) is not None:
            raise StoreError(
                f"{store.url} is a Zarr node with a stream below it, in {below!r}; give another path, inside it or not",
                kind="exists",
            )
        if not overwrite:
            continues = "; write_resume continues it" if manifest is not None else ""
            raise StoreError(f"{store.url} holds {what} already; overwrite=True replaces it{continues}", kind="exists")
        if manifest is None and _node_type(document) != "group":
            raise StoreError(
                f"{store.url} is a Zarr {_node_type(document)}, not a group; it is not replaced, give another path",
                kind="exists",
            )
    elif FOLDER not in every:
        raise _foreign(store, names[0])
    if (below := _stream_below(store, "")) is not None:
        raise StoreError(f"{store.url}: a stream lies below it, in {below!r}; remove that one first", kind="exists")
    if manifest is None and document is None:
        # A creation that died leaves .mpistream and arrays, but no group: that was never a store, and is taken over.
        for name in names:
            # An empty folder may be one that was made for a document.
            if store.list(name) and _node_type(store.read(f"{name}/{GROUP_KEY}")) != "array":
                raise _foreign(store, name)
    return names, manifest


def _foreign(store: Store, name: str) -> StoreError:
    return StoreError(
        f"{store.url} is a folder with other things in it ({name!r}); it is not replaced, give another path",
        kind="not_empty",
    )


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

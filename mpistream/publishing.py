"""What the owner does once a commit is done: small objects are brought in step, folders of the next rows are made."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from mpistream.arrays import ArraySpec, Role
from mpistream.epoch import EpochState
from mpistream.errors import StoreError
from mpistream.local_store import MAX_SYNC_THREADS, Buffer
from mpistream.manifest import Manifest
from mpistream.ranges import inside
from mpistream.schema import StreamSchema
from mpistream.staging import Stager
from mpistream.store import Store
from mpistream.together import run_together
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import chunk_key

__all__ = ["folders_of_row", "make_rows", "put_committed", "put_documents", "shared_rows"]

# One rank makes so many folders in a fraction of a second; more are made sooner by those who place in them.
_MAX_FOLDERS_AHEAD = 1000


def shared_rows(schema: StreamSchema, epoch: EpochState) -> tuple[ArraySpec, ...]:
    """Return the arrays in whose rows, which come one after the other, several ranks place objects in folders.

    Not collective.
    """
    if schema.key_separator != "/" or schema.n_total is not None:
        return ()
    return tuple(
        a for a in schema.arrays.values() if a.role is Role.VARIABLE and sum(map(bool, epoch.boxes.get(a.name, ()))) > 1
    )


def make_rows(store: Store, stager: Stager, arrays: Sequence[ArraySpec], n_records: int, *, sync: bool) -> None:
    """Make the folders of the rows that begin behind so many records.

    Not collective.

    Notes
    -----
    Else all ranks would try to make the same ones when they place the first object of a row. Every rank syncs all
    folders of its objects all the same (I2): what was durable before costs it little. A row is made under the stage
    folder and renamed, so that an owner that was fenced makes none. What fails is met by whoever places there.
    """
    made = []
    for array in arrays:
        row, in_row = divmod(n_records, array.row_length)
        if in_row:
            continue
        staged = stager.name()
        try:
            store.make_folder(staged, parents=False)
            for folder in folders_of_row(array.grid.grid_shape):
                store.make_folder(f"{staged}/{folder}", parents=False)
            store.move(staged, f"{array.name}/c/{row}", parents=False, sync=False)
        except StoreError:
            # There already, of a commit that failed, or something is wrong.
            with contextlib.suppress(StoreError):
                store.delete_tree(staged)
        else:
            made.append(f"{array.name}/c/{row}/")
    if made and sync:
        with contextlib.suppress(StoreError):
            store.sync_folders(made)


def folders_of_row(n_shards: Sequence[int]) -> list[str]:
    """Return the folders in that of a row, relative to it, those above first.

    Not collective.

    Parameters
    ----------
    n_shards
        Shards along each dim without time. Levels with very many folders are left to those who need them.
    """
    folders: list[str] = []
    level = [""]
    # The last dim names objects.
    for n in n_shards[:-1]:
        if n * len(level) > _MAX_FOLDERS_AHEAD:
            break
        level = [f"{above}{i}/" for above in level for i in range(n)]
        folders += [folder.rstrip("/") for folder in level]
    return folders


def put_documents(store: Store, stager: Stager, documents: Mapping[str, bytes], *, sync: bool) -> None:
    """Stage all documents together, then rename them one after the other.

    Not collective.
    """
    _put_objects(store, stager, {key: [data] for key, data in documents.items()}, sync=sync)


def put_committed(store: Store, stager: Stager, manifest: Manifest, chunks: Sequence[int], *, sync: bool) -> None:
    """Write chunks of the ``committed`` array.

    Not collective.
    """
    array = manifest.schema.committed_array
    assert array is not None
    length = array.resolved_chunk_shape[0]
    objects: dict[str, Sequence[Buffer]] = {}
    for chunk in chunks:
        values = np.zeros(length, bool)
        for a, b in inside(manifest.committed, chunk * length, (chunk + 1) * length):
            values[a - chunk * length : b - chunk * length] = True
        key = chunk_key(array.name, manifest.schema.key_separator, (chunk,))
        objects[key] = ChunkCodec(array.chain, array.dtype).encode(values)
    _put_objects(store, stager, objects, sync=sync)


def _put_objects(store: Store, stager: Stager, objects: Mapping[str, Sequence[Buffer]], *, sync: bool) -> None:
    """Stage small objects together, so that they wait for the disk once; rename them in their order."""
    staged = {key: stager.name() for key in objects}
    try:
        run_together(
            (partial(store.stage, staged[key], pieces, sync=sync) for key, pieces in objects.items()),
            min(len(objects), MAX_SYNC_THREADS) if sync else 1,
        )
    except StoreError:
        # On a full disk what is staged already is what the next try needs.
        for name in staged.values():
            with contextlib.suppress(StoreError):
                store.delete(name)
        raise
    for key, name in staged.items():
        store.place(name, key)
    if sync and staged:
        store.sync_folders(staged)

"""A committed state as a zarr store: documents from the manifest, chunks from the store.

The documents on disk follow the manifest a moment later, and after a crash they may lag behind it. Here
they are made anew, so what zarr and xarray see is exactly what is committed.
"""

from __future__ import annotations

from typing import Any

import zarr
import zarr.storage
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from mpistream.errors import StoreError
from mpistream.local_store import LocalStore
from mpistream.manifest import Manifest
from mpistream.store import ReadableStore
from mpistream.zarr3.metadata import GROUP_KEY, make_documents

__all__ = ["open_group"]


class _Snapshot(zarr.storage.WrapperStore[zarr.storage.LocalStore]):
    """A read-only local store whose documents are replaced."""

    def __init__(self, store: zarr.storage.LocalStore, documents: dict[str, bytes]) -> None:
        super().__init__(store)
        self._documents = documents

    def _with_store(self, store: Any) -> _Snapshot:
        return type(self)(store, self._documents)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if key in self._documents:
            return prototype.buffer.from_bytes(self._documents[key])
        return await super().get(key, prototype, byte_range)

    async def exists(self, key: str) -> bool:
        return key in self._documents or await super().exists(key)


def open_group(store: ReadableStore, manifest: Manifest) -> zarr.Group:
    """Return a read-only group of a committed state.

    Not collective.

    Raises
    ------
    StoreError
        Kind ``not_local`` for a store that is not a local folder.
    """
    if not isinstance(store, LocalStore):
        raise StoreError(f"{store.url}: only a local folder can be given to zarr", kind="not_local")
    documents = make_documents(manifest.schema)
    n = manifest.n_records
    replaced = {GROUP_KEY: documents.group(n), **documents.arrays(n, growing_only=False)}
    snapshot = _Snapshot(zarr.storage.LocalStore(store.root, read_only=True), replaced)
    return zarr.open_group(snapshot, mode="r", use_consolidated=True)

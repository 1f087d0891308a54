"""Where bytes live: three small capabilities, and the two stores that have them all.

A store maps keys (relative paths with "/") to objects. What the rest of the library needs is written
down as `Readable`, `Listable` and `Writable`; nothing above this room touches a file by itself.

Absence is a value (None), failure is an error: every OSError leaves this room as `StoreError` with
its errno and the key. One kind of failure has a name of its own, ``gone``: the stage folder or the
staged file that was there is there no more. It is how a writer learns that it was fenced, because a
resume renames the stage folder away before it does anything else.

Why writes have two steps: `Writable.stage` puts an object, whole and synced, under the writer's
stage folder; `Writable.place` renames it to its key. A reader sees the old object or the new one,
and a writer whose stage folder is gone can do neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable
from urllib.parse import unquote

from mpistream.errors import FormatError, StoreError
from mpistream.local_store import MAX_READ_NBYTES, Buffer, LocalStore

__all__ = [
    "MAX_READ_NBYTES",
    "Listable",
    "Nested",
    "ObjectReader",
    "Readable",
    "ReadableStore",
    "Store",
    "Writable",
    "open_readable",
    "open_store",
    "read_whole",
]


class ObjectReader(Protocol):
    """One opened object: its size and ranges of it, from one descriptor."""

    nbytes: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return at most ``nbytes`` bytes from ``offset``; fewer only at the end."""

    def read_into(self, offset: int, buffer: Buffer) -> int:
        """Fill a buffer from ``offset``; return the number of bytes, fewer only at the end.

        Several threads may read of one object.
        """

    def close(self) -> None:
        """Release the descriptor."""


@runtime_checkable
class Readable(Protocol):
    """A store whose objects can be read."""

    def read(self, key: str) -> bytes | None:
        """Return an object that is read whole, a document or a chunk; None when there is none.

        A local folder refuses one of more than `MAX_READ_NBYTES`, FormatError of kind ``size``: see `read_whole`.
        """

    def open(self, key: str) -> ObjectReader | None:
        """Open an object for reads of ranges, or None when there is none."""


@runtime_checkable
class Listable(Protocol):
    """A store whose names can be listed."""

    def list(self, prefix: str = "") -> list[str]:
        """Return the names right below ``prefix``, sorted; empty when there is no such folder."""


@runtime_checkable
class Writable(Protocol):
    """A store that can be written in two steps, stage and place."""

    def make_folder(self, key: str, *, parents: bool = True) -> None:
        """Make a folder; one that exists is fine.

        With ``parents`` the folders above are made too, all durably. Without, the one above must exist
        (else gone), and nothing is synced.
        """

    def create(self, key: str, data: bytes) -> bool:
        """Create an object that must not exist, durably; False when it exists. A failure leaves none."""

    def stage(self, key: str, pieces: Sequence[Buffer], *, sync: bool) -> int:
        """Write an object into a stage folder that must exist; return its bytes."""

    def place(self, staged: str, key: str) -> None:
        """Rename a staged object to its key, replacing what is there."""

    def sync_folders(self, keys: Iterable[str], known: dict[str, None] | None = None) -> None:
        """Make the names of ``keys`` durable: all folders from the leaf up to the first one below the root, together.

        The root itself is synced, last, when one of the keys lies right in it. The way up ends at a folder that is
        ``known``; those whose names are durable now are added. The caller knows that nobody removes one of these.
        """

    def move(self, source: str, target: str, *, parents: bool = True, sync: bool = True) -> bool:
        """Rename an object or a whole folder; False when the source is not there.

        Without ``parents`` the folder of the target must exist (else gone): it is how a fence holds for what
        destroys, as it does for what is placed.
        """

    def copy(self, source: str, target: str) -> bool:
        """Copy one object, durably; False when the source is not there."""

    def delete(self, key: str) -> bool:
        """Remove one object; False when it was not there. Durable after `sync_folders` of its key."""

    def delete_tree(self, key: str) -> None:
        """Remove a folder and all below it; nothing there is fine."""


@runtime_checkable
class Nested(Protocol):
    """A store that lies in a larger one; one without this capability is a world of its own."""

    def above(self) -> Store | None:
        """Return the folder above the root as a store, None at the uppermost."""


class ReadableStore(Readable, Listable, Protocol):
    """A store that can be read and listed, which is all that a reader needs, and a name for messages."""

    url: str


class Store(ReadableStore, Writable, Protocol):
    """A store with every capability."""


def read_whole(store: Readable, key: str, at_most: int) -> bytes | None:
    """Return an object that may be large, a shard; None when there is none.

    Not collective.

    Parameters
    ----------
    store
        The store.
    key
        The object.
    at_most
        Bytes that it can have.

    Raises
    ------
    FormatError
        Kind ``size`` for one that has more; it is not read.
    """
    opened = store.open(key)
    if opened is None:
        return None
    try:
        if opened.nbytes > at_most:
            raise FormatError(f"{key}: {opened.nbytes} bytes, it can have at most {at_most}", kind="size")
        return opened.read(0, opened.nbytes)
    finally:
        opened.close()


def open_store(url: str | os.PathLike[str] | Store) -> Store:
    """Return the store that ``url`` names, to be read and written.

    Not collective.

    Parameters
    ----------
    url
        A local path, a ``file://`` URL, or an object that is a store already.

    Raises
    ------
    StoreError
        For another scheme (kind ``scheme``), or for an object that lacks a capability (kind
        ``capability``), naming it.
    """
    if isinstance(url, str | os.PathLike):
        return _local_store(os.fspath(url))
    _check_capabilities(url, (Readable, Listable, Writable), "hold a stream")
    return url


def open_readable(url: str | os.PathLike[str] | ReadableStore) -> ReadableStore:
    """Return the store that ``url`` names, to be read; an object need not be `Writable`.

    Not collective.

    Parameters
    ----------
    url
        As in `open_store`.

    Raises
    ------
    StoreError
        As `open_store`.
    """
    if isinstance(url, str | os.PathLike):
        return _local_store(os.fspath(url))
    _check_capabilities(url, (Readable, Listable), "be read")
    return url


def _check_capabilities(store: object, capabilities: Sequence[type], what: str) -> None:
    for capability in capabilities:
        if not isinstance(store, capability):
            raise StoreError(
                f"{type(store).__name__} can't {what}: it lacks the capability {capability.__name__}",
                kind="capability",
            )


def _local_store(text: str) -> LocalStore:
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStore(text)
    if scheme == "file":
        path = rest.removeprefix("localhost")
        if not path.startswith("/"):
            raise StoreError(f"url {text!r}: give file:// and an absolute path, as in file:///data/run", kind="scheme")
        return LocalStore(unquote(path))
    raise StoreError(
        f"url {text!r}: scheme {scheme!r} is not supported; give a local path or a file:// URL", kind="scheme"
    )

"""What lies where a stream was looked for and is none, in words for who gave the path."""

from __future__ import annotations

import contextlib

from mpistream.errors import MPIStreamError
from mpistream.foreign import ForeignStore
from mpistream.local_store import LocalStore
from mpistream.manifest import CHECKPOINT_ATTR, FOLDER, MANIFEST_KEY, Manifest
from mpistream.store import ReadableStore

__all__ = ["no_stream_text"]

# Of a folder with any number of others nobody reads more, and looking into each takes time.
_MAX_LOOKED_INTO = 100
_MAX_NAMED = 4


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
    states, streams = _streams_below(store, names)
    if states:
        newest = max(states, key=lambda name: states[name])
        return (
            f"{store.url} is not a stream, it holds the states of a CheckpointPair, each a stream; give the folder of "
            f"one: {_named(store, sorted(states))}, of which {store.url}/{newest} is the newest"
        )
    if streams:
        return f"{store.url} is not a stream, it holds streams; give the folder of one: {_named(store, streams)}"
    if not names:
        return f"{store.url} is not a stream: it is empty"
    if ForeignStore(store).has_root():
        return f"{store.url} is not a stream: it is a Zarr store that others wrote, without {MANIFEST_KEY}"
    return f"{store.url} is not a stream: there is no {MANIFEST_KEY}, and no document of another Zarr store either"


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

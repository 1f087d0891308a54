"""A stager over a `ScriptedStore`, and objects for it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpistream.errors import StoreError
from mpistream.manifest import epoch_key, stage_folder
from mpistream.staged import StagedObject
from mpistream.staging import Stager
from tests.support.scripted_store import ScriptedStore
from tests.support.wait import wait_until

__all__ = ["DEADLINE", "EPOCH", "FOLDER", "gone", "in_time", "item", "new_store", "no_space", "staged", "stagers"]

EPOCH = 4
FOLDER = stage_folder(EPOCH, 1)
DEADLINE = 30.0


def new_store() -> ScriptedStore:
    """Return a store in which writer 1 of the epoch may begin."""
    found = ScriptedStore()
    found.make_folder(FOLDER)
    found.make_folder(".mpistream/epochs")
    found.create(epoch_key(EPOCH), b"")
    found.calls.clear()
    return found


@contextmanager
def stagers(store: ScriptedStore) -> Iterator[Callable[..., Stager]]:
    """Give a maker of stagers, and end them afterwards."""
    made: list[Stager] = []

    def make(threads: int = 0, max_pending_nbytes: int = 10**6) -> Stager:
        made.append(Stager(store, FOLDER, EPOCH, threads=threads, max_pending_nbytes=max_pending_nbytes))
        return made[-1]

    try:
        yield make
    finally:
        store.gate.set()
        for each in made:
            each.close()


def item(key: str = "t/c/0", *pieces: bytes, must_sync: bool = False) -> StagedObject:
    """Return an object that is not staged yet."""
    found = pieces or (b"head ", b"tail")
    return StagedObject(
        name="t",
        key=key,
        records=frozenset([0]),
        n_cells=4,
        pieces=list(found),
        nbytes=sum(map(len, found)),
        must_sync=must_sync,
    )


def staged(stager: Stager, *items: StagedObject) -> list[StagedObject]:
    """Stage objects and return them."""
    for each in items:
        stager.submit(each)
    stager.wait()
    return list(items)


def gone() -> StoreError:
    """Return what a store says when the stage folder is not there."""
    return StoreError("stage folder is gone", kind="gone", errno=errno.ENOENT)


def no_space() -> StoreError:
    """Return what a store says when the disk is full."""
    return StoreError("no space left", kind="io", errno=errno.ENOSPC)


def in_time(call: Callable[..., Any], *args: Any) -> None:
    """Run a call that might wait for ever in a thread; fail when it has not returned in time."""
    is_done = threading.Event()

    def run() -> None:
        call(*args)
        is_done.set()

    threading.Thread(target=run, daemon=True).start()
    wait_until(is_done.is_set, DEADLINE, f"{call.__name__} to return", every=0.001)

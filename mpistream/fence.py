"""The fence as a writer meets it: its stage folder is gone, because a newer epoch took the store over."""

from __future__ import annotations

import contextlib

from mpistream.errors import FencedError, StoreError
from mpistream.manifest import EPOCHS_FOLDER, STAGE_FOLDER, parse_epoch, stage_folder
from mpistream.store import Store

__all__ = ["displaced", "fenced", "highest_epoch"]


def highest_epoch(store: Store) -> int | None:
    """Return the highest epoch that was ever claimed in a store, None when none was.

    Not collective.
    """
    found = [e for name in store.list(EPOCHS_FOLDER) if (e := parse_epoch(name)) is not None]
    return max(found, default=None)


def displaced(store: Store, epoch: int) -> FencedError | None:
    """Return what a writer of an epoch is told when a newer one has taken the store over, None when it has not.

    Not collective.

    Notes
    -----
    One listing, and another one below a newer epoch: one whose claim ended before it fenced anything, with its process
    or by a loss of power, has taken nothing. What can't be looked at tells nothing.
    """
    try:
        error = _newer(store, epoch)
        is_fenced = error is not None and stage_folder(epoch).rpartition("/")[2] not in store.list(STAGE_FOLDER)
    except StoreError:
        return None
    return error if is_fenced else None


def fenced(store: Store, epoch: int, error: StoreError) -> FencedError | StoreError:
    """Return what a failure of the store means to a writer of an epoch.

    Not collective.

    Returns
    -------
    For a failure of kind ``gone``, and when there is a higher epoch, a FencedError; otherwise the error itself.
    """
    if error.kind != "gone":
        return error
    # That something is gone is the fence as it was met; to list it again might show what a cache still has.
    with contextlib.suppress(StoreError):
        return _newer(store, epoch) or error
    return error


def _newer(store: Store, epoch: int) -> FencedError | None:
    highest = highest_epoch(store)
    if highest is None or highest <= epoch:
        return None
    return FencedError(
        f"{store.url}: epoch {highest} took the store over from epoch {epoch}; this writer must stop, what it has not "
        "committed is lost"
    )

"""The fence as a writer meets it: its stage folder is gone, because a newer epoch took the store over."""

from __future__ import annotations

from mpistream.errors import FencedError, StoreError
from mpistream.manifest import EPOCHS_FOLDER, parse_epoch
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
    One listing. What can't be looked at tells nothing.
    """
    try:
        highest = highest_epoch(store)
    except StoreError:
        return None
    if highest is None or highest <= epoch:
        return None
    return FencedError(
        f"{store.url}: epoch {highest} took the store over from epoch {epoch}; this writer must stop, what it has not "
        "committed is lost"
    )


def fenced(store: Store, epoch: int, error: StoreError) -> FencedError | StoreError:
    """Return what a failure of the store means to a writer of an epoch.

    Not collective.

    Returns
    -------
    For a failure of kind ``gone``, and when there is a higher epoch, a FencedError; otherwise the error itself.
    """
    return (displaced(store, epoch) if error.kind == "gone" else None) or error

"""The fence as a writer meets it: its stage folder is gone, because a newer epoch took the store over."""

from __future__ import annotations

from mpistream.errors import FencedError, StoreError
from mpistream.manifest import EPOCHS_FOLDER, parse_epoch
from mpistream.store import Store

__all__ = ["fenced", "highest_epoch"]


def highest_epoch(store: Store) -> int | None:
    """Return the highest epoch that was ever claimed in a store, None when none was.

    Not collective.
    """
    found = [e for name in store.list(EPOCHS_FOLDER) if (e := parse_epoch(name)) is not None]
    return max(found, default=None)


def fenced(store: Store, epoch: int, error: StoreError) -> FencedError | StoreError:
    """Return what a failure of the store means to a writer of an epoch.

    Not collective.

    Returns
    -------
    For a failure of kind ``gone``, and when there is a higher epoch, a FencedError; otherwise the error itself.
    """
    if error.kind == "gone":
        try:
            highest = highest_epoch(store)
        except StoreError:
            return error
        if highest is not None and highest > epoch:
            return FencedError(
                f"{store.url}: epoch {highest} took the store over from epoch {epoch}; this writer must stop, what "
                "it has not committed is lost"
            )
    return error

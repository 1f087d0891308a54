"""The commit of several streams as users call it: which writers can be committed together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistream.errors import ProtocolError
from mpistream.parallel import StreamWriter, commit_writers
from mpistream.token import CommitReceipt

__all__ = ["commit_all"]


def commit_all(writers: Sequence[StreamWriter], *, partial_rows: bool = True, wait: bool = True) -> list[CommitReceipt]:
    """Commit what every rank has written to several streams, in one agreement.

    Collective.

    Parameters
    ----------
    writers
        Open writers over communicators of the same ranks; the same streams in the same order on every rank.
    partial_rows, wait
        As in `StreamWriter.commit`, for each stream by itself.

    Returns
    -------
    The receipts, in the order of ``writers``; of a stream with nothing pending it is the last one.

    Raises
    ------
    CommitError
        The same on every rank. Nothing was committed in any stream, but for two kinds: ``partly_committed``, where
        a newer opening took one stream over while the manifests were renamed, and ``outcome_unknown``, after
        which all these writers are dead. Both name the streams that are committed, and those that are not.
    ProtocolError
        On every rank: no writers, one that is closed or given twice, different ranks, or ranks that call differently.
    FencedError
        On every rank, when a newer opening owns one of the stores; nothing was committed.

    Notes
    -----
    It costs the messages of one commit. Manifests are renamed one after the other: a reader may see one stream grow
    a moment before the other. When it returns, all records are durable and visible.
    """
    found, failure = _checked_writers(writers)
    # The channel of the one that was opened first: ranks that name the same writers in another order meet there.
    commit_writers(min(found, key=lambda w: w._number)._channel, found, partial_rows, wait, failure)
    return [w._stream.receipt for w in found]


def _checked_writers(writers: Any) -> tuple[list[StreamWriter], ProtocolError | None]:
    """Return the writers through which the other ranks can be reached, and why these can't be committed together."""
    try:
        given = list(writers)
    except TypeError:
        given = [writers]
    for writer in given:
        # Nobody but this process hears of it, and there is no channel to ask the other ranks through.
        if isinstance(writer, StreamWriter) and writer._is_forked():
            writer._check_open("commit_all")
    reachable = [w for w in given if isinstance(w, StreamWriter) and not w._is_closed]
    failure: ProtocolError | None = None
    if not given or len(reachable) < len(given):
        closed = [w._store.url for w in given if isinstance(w, StreamWriter) and w._is_closed]
        others = [type(w).__name__ for w in given if not isinstance(w, StreamWriter)]
        what = f"{closed[0]} is closed" if closed else f"a {others[0]} is no writer" if others else "no writers"
        failure = ProtocolError(
            f"commit_all: {what}; give a list of open writers", kind="closed" if closed else "writers"
        )
    elif len({id(w) for w in given}) < len(given):
        twice = next(w for w in given if sum(w is other for other in given) > 1)
        failure = ProtocolError(f"commit_all: {twice._store.url} is given twice; give each writer once", kind="writers")
    elif any(w._commits_tokens for w in given):
        failure = ProtocolError("commit_all: parts without MPI are committed by commit(tokens), each", kind="role")
    elif other := next((w for w in given if not w._channel.has_ranks_of(given[0]._channel)), None):
        failure = ProtocolError(
            f"commit_all: {other._store.url} was opened on other ranks than {given[0]._store.url}; open both on "
            "communicators of the same ranks, or commit each by itself",
            kind="comm",
        )
    elif nested := next((w for w in given if w._record is not None), None):
        failure = ProtocolError(
            f"commit_all inside a record() of {nested._store.url}; end that one first", kind="nested"
        )
    if not reachable:
        assert failure is not None
        raise failure
    return reachable, failure

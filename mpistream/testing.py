"""For tests of a simulation: that two of its outputs are the same."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from mpistream.agreement import Channel
from mpistream.comm import connect
from mpistream.compare import compare

__all__ = ["assert_stores_equal"]

_TIMEOUT = 600.0


def assert_stores_equal(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    variables: Iterable[str] | None = None,
    attrs: bool = False,
    comm: Any = None,
) -> None:
    """Raise AssertionError, with what differs, unless two stores hold the same.

    Collective.

    Parameters
    ----------
    a, b, rtol, atol, variables, attrs
        As in `mpistream.compare.compare`, which is what ``mpistream diff`` prints.
    comm
        A communicator: all its ranks come, rank 0 compares, and all raise the same. Without it this process
        compares for itself.

    Raises
    ------
    AssertionError
        On every rank: they differ.
    MPIStreamError
        On every rank: one of them can't be read.
    """
    names = None if variables is None else list(variables)

    def found() -> str | None:
        comparison = compare(a, b, rtol=rtol, atol=atol, variables=names, attrs=attrs)
        return None if comparison.is_same else str(comparison)

    if comm is None:
        text = found()
    else:
        channel = Channel(connect(comm, _TIMEOUT), _TIMEOUT)
        try:
            text = channel.exchange("assert_stores_equal", answer=lambda votes: [found()] * len(votes))
        finally:
            channel.close()
    if text is not None:
        raise AssertionError(text)

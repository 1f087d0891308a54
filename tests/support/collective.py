"""What tests of collective calls need: errors compared over ranks, trees of files, waiting without spinning."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mpistream as ms
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["OPTIONS", "at_most", "error_on_all", "keys", "on_root", "options", "subcomm", "sync", "tree"]

T = TypeVar("T")

# Of messages on the communicator of the tests themselves.
_TAG = 7071


def options(**changes: Any) -> ms.Options:
    """Return the options of most tests: quick to give up, and a lease that is not refreshed meanwhile."""
    return ms.Options(
        **{"writers": "all", "durability": "none", "timeout": 20, "exit_timeout": 10, "lease_ttl": 100_000, **changes}
    )


OPTIONS = options()


def sync(comm: MPI.Intracomm) -> None:
    """Wait for all ranks."""
    on_root(comm, lambda: None)


def on_root(comm: MPI.Intracomm, fn: Callable[[], T]) -> T:
    """Return on every rank what ``fn`` returns on rank 0, when all ranks have come; nobody goes on before.

    A barrier of MPI waits at full speed, on cores that those who are waited for need; this one looks and sleeps.
    """
    if comm.rank:
        comm.send(None, 0, _TAG)
        return _receive(comm, 0)
    for rank in range(1, comm.size):
        _receive(comm, rank)
    value = fn()
    for rank in range(1, comm.size):
        comm.send(value, rank, _TAG)
    return value


def _receive(comm: MPI.Intracomm, source: int) -> Any:
    message = wait_until(lambda: comm.improbe(source, _TAG), 60, f"rank {source}", every=0.002)
    assert message is not None
    return message.recv()


def error_on_all(comm: MPI.Intracomm, call: Callable[[], object]) -> ms.MPIStreamError:
    """Return this rank's error from a call in which every rank must get the same one."""
    error: ms.MPIStreamError | None = None
    try:
        call()
    except ms.MPIStreamError as found:
        error = found
    sync(comm)
    facts = comm.allgather(None if error is None else _facts(error))
    assert facts == [facts[0]] * comm.size
    assert error is not None, "no rank raised"
    return error


def _facts(error: ms.MPIStreamError) -> tuple[Any, ...]:
    cause = error.cause_text if isinstance(error, ms.CommitError) else None
    return type(error).__name__, str(error), error.kind, error.rank, error.errno, cause


def subcomm(comm: MPI.Intracomm, size: int) -> MPI.Intracomm | None:
    """Return a communicator of the first ``size`` ranks, None on the others."""
    from mpi4py import MPI

    sub = comm.Split(0 if comm.rank < size else MPI.UNDEFINED, comm.rank)
    return sub if isinstance(sub, MPI.Intracomm) and sub != MPI.COMM_NULL else None


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Assert that the body ends within so many seconds."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def tree(root: str | os.PathLike[str]) -> dict[str, tuple[int, int, int]]:
    """Return inode, modification time and size of everything below a folder; nothing if it is not there."""
    found = {}
    for path in [Path(root), *Path(root).rglob("*")]:
        if path.exists():
            status = path.stat()
            found[str(path.relative_to(root))] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def keys(root: str | os.PathLike[str], *, ours: bool = False) -> set[str]:
    """Return the relative paths of all files of the Zarr hierarchy, or of those under ``.mpistream``."""
    files = (p.relative_to(root) for p in Path(root).rglob("*") if p.is_file())
    return {str(p) for p in files if (p.parts[0] == ".mpistream") is ours}

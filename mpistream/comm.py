"""Messages between ranks: the one room that imports mpi4py.MPI.

Rules of this room:

* All calls are made by the thread that opened the writer. Nothing here starts a thread.
* Everything runs on a duplicate of the user's communicator, so no message can meet one of the user's.
* Nothing here blocks without a deadline.
* A rank that waits spins for a millisecond and then sleeps: waiting ranks must not take the core from
  those that still compute.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import ProtocolError

__all__ = [
    "MPITransport",
    "SerialTransport",
    "SwapTimeoutError",
    "Transport",
    "connect",
    "for_mpi_library",
    "is_one_of_many",
    "waiting",
    "world",
]

_TAG_DATA = 1024  # and those behind it: of the pieces of records; the tags of agreements are below

_SPIN_SECONDS = 0.001
_MIN_SLEEP_SECONDS = 0.0001
_MAX_SLEEP_SECONDS = 0.005

# So many messages may be held before those that have left are let go.
_MIN_LOOK_AT = 16
# Between two looks for messages while arrays move: a look costs microseconds, and whoever left is heard in time.
_LOOK_SECONDS = 0.002


class SwapTimeoutError(TimeoutError):
    """Arrays of a swap that did not go or come in time.

    Parameters
    ----------
    ranks
        The ranks at their other ends.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"arrays to or from rank {', '.join(map(str, ranks))} did not go or come")
        self.ranks = tuple(ranks)


class Transport(Protocol):
    """What an agreement needs from a communicator."""

    rank: int
    size: int

    @property
    def communicator(self) -> Hashable:
        """What stands for the communicator that the user gave, in this process."""

    def send(self, dest: int, tag: int, data: bytes) -> None:
        """Send without waiting."""

    def poll(self, tag: int) -> tuple[int, bytes] | None:
        """Return one message that has come, with its source, or None."""

    def gather(self, data: bytes, timeout: float) -> list[bytes] | None:
        """Gather on rank 0, where the list is returned; TimeoutError after ``timeout`` seconds."""

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int] | None]:
        """Begin to find the highest of each number over all ranks; return what gives them, None until all came."""

    def swap(
        self,
        sends: Sequence[tuple[int, NDArray[Any]]],
        receives: Sequence[tuple[int, NDArray[Any]]],
        timeout: float,
        tag: int,
        look: Callable[[], None],
    ) -> None:
        """Send and receive arrays of any strides; SwapTimeoutError after ``timeout`` seconds.

        Between two ranks, what is sent and what is received are as many arrays of the same shapes and dtypes, in the
        same order. Only calls with the same tag find each other. Meanwhile ``look`` is called now and then; what it
        raises ends the call.
        """

    def has_ranks_of(self, other: Transport) -> bool:
        """Whether both connect the same processes in the same order."""

    def is_usable(self) -> bool:
        """Whether messages can still be sent; after MPI_Finalize they can't."""

    def free(self) -> None:
        """Release the communicator; every rank calls it."""


def waiting(timeout: float) -> Iterator[None]:
    """Yield until ``timeout`` seconds are over: spinning first, then sleeping longer and longer.

    Not collective.
    """
    began = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - began
        if waited > timeout:
            return
        if waited < _SPIN_SECONDS:
            time.sleep(0)
        else:
            # A share of the wait so far: what comes is seen late by no more than that share.
            time.sleep(min(max(waited / 16, _MIN_SLEEP_SECONDS), _MAX_SLEEP_SECONDS))


class SerialTransport:
    """One process that is all ranks there are."""

    rank = 0
    size = 1
    communicator: Hashable = None

    def send(self, dest: int, tag: int, data: bytes) -> None:
        """There is nobody to send to."""

    def poll(self, tag: int) -> tuple[int, bytes] | None:  # noqa: ARG002 (Transport)
        """Nobody sends."""
        return None

    def gather(self, data: bytes, timeout: float) -> list[bytes] | None:  # noqa: ARG002 (Transport)
        """Return the only token."""
        return [data]

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int] | None]:
        """Nobody else has numbers."""
        return lambda: list(values)

    def swap(
        self,
        sends: Sequence[tuple[int, NDArray[Any]]],
        receives: Sequence[tuple[int, NDArray[Any]]],
        timeout: float,
        tag: int,
        look: Callable[[], None],
    ) -> None:
        """There is nobody to swap with."""

    def has_ranks_of(self, other: Transport) -> bool:
        """Whether the other, too, is this process alone."""
        return other.size == 1

    def is_usable(self) -> bool:
        """There is nothing that could end."""
        return True

    def free(self) -> None:
        """Nothing is held."""


# What MPI may still read or write: the buffers and communicators of transports that were never freed. MPI has no way
# to take a collective back, so after a timeout they must stay where they are until the process ends.
_not_freed: list[Any] = []


class MPITransport:
    """A duplicate of an mpi4py communicator.

    Parameters
    ----------
    comm
        An mpi4py intracommunicator, or its Fortran handle.
    timeout
        Seconds to wait for the other ranks to come.

    Raises
    ------
    ProtocolError
        When ``comm`` is not a communicator that can be used, or the other ranks don't come.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        from mpi4py import MPI  # noqa: PLC0415 (import mpistream must not initialise MPI)

        if isinstance(comm, int) and not isinstance(comm, bool):
            comm = MPI.Comm.f2py(comm)
        if not isinstance(comm, MPI.Comm):
            raise ProtocolError(
                f"comm is a {type(comm).__name__}; pass an mpi4py communicator or a Fortran handle (int)",
                kind="comm",
            )
        if comm == MPI.COMM_NULL or comm.Is_inter():
            what = "MPI.COMM_NULL" if comm == MPI.COMM_NULL else "an intercommunicator"
            raise ProtocolError(f"comm is {what}; pass an intracommunicator of the ranks that write", kind="comm")
        self._mpi = MPI
        self.communicator: Hashable = comm.py2f()
        # Nonblocking, so that a rank that never comes is an error and not a hang.
        self._comm, request = comm.Idup()
        _not_freed.append((self, request))
        if not any(request.Test() for _ in waiting(timeout)):
            raise ProtocolError(f"rank {comm.rank}: other ranks did not come within {timeout} s", kind="timeout")
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self._sends: list[tuple[Any, bytes]] = []
        self._look_at = _MIN_LOOK_AT
        self._datatypes: dict[Any, Any] = {}
        # The first use of a communicator may set up connections: here, on this thread, not amid a commit.
        self.gather(b"", timeout)

    def send(self, dest: int, tag: int, data: bytes) -> None:
        """Send without waiting; the message is held until it has left."""
        if len(self._sends) >= self._look_at:
            self._sends = [(r, d) for r, d in self._sends if not r.Test()]
            # So that messages to very many ranks are not looked at again with each one more.
            self._look_at = max(_MIN_LOOK_AT, 2 * len(self._sends))
        self._sends.append((self._comm.Isend([data, self._mpi.BYTE], dest, tag), data))

    def poll(self, tag: int) -> tuple[int, bytes] | None:
        """Return one message that has come, with its source, or None."""
        status = self._mpi.Status()
        message = self._comm.Improbe(self._mpi.ANY_SOURCE, tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([data, self._mpi.BYTE])
        return status.source, bytes(data)

    def gather(self, data: bytes, timeout: float) -> list[bytes] | None:
        """Gather on rank 0 with ``MPI_Igather`` and ``MPI_Igatherv``."""
        deadline = time.monotonic() + timeout
        count = memoryview(len(data).to_bytes(8, sys.byteorder))
        counts = bytearray(8 * self.size) if self.rank == 0 else None
        self._complete(
            self._comm.Igather([count, 8, self._mpi.BYTE], [counts, 8, self._mpi.BYTE], 0), deadline, count, counts
        )
        if counts is None:
            self._complete(self._comm.Igatherv([data, self._mpi.BYTE], None, 0), deadline, data)
            return None
        sizes = [int.from_bytes(counts[i : i + 8], sys.byteorder) for i in range(0, len(counts), 8)]
        starts = [0, *itertools.accumulate(sizes)][:-1]
        found = bytearray(sum(sizes))
        self._complete(self._comm.Igatherv([data, self._mpi.BYTE], [found, sizes, starts, self._mpi.BYTE], 0), deadline)
        return [bytes(found[s : s + n]) for s, n in zip(starts, sizes, strict=True)]

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int] | None]:
        """Begin an ``MPI_Iallreduce``, which whoever waits tests until a deadline of its own."""
        mine = np.array(values, np.int64)
        highest = np.empty_like(mine)
        request = self._comm.Iallreduce([mine, self._mpi.INT64_T], [highest, self._mpi.INT64_T], self._mpi.MAX)
        kept = (self, request, mine, highest)
        # Until it is complete MPI may write there, whatever becomes of those who wait.
        _not_freed.append(kept)

        def found() -> list[int] | None:
            if not request.Test():
                return None
            _not_freed[:] = [other for other in _not_freed if other is not kept]
            return [int(n) for n in highest]

        return found

    def swap(
        self,
        sends: Sequence[tuple[int, NDArray[Any]]],
        receives: Sequence[tuple[int, NDArray[Any]]],
        timeout: float,
        tag: int,
        look: Callable[[], None],
    ) -> None:
        """Send and receive arrays with nonblocking point-to-point messages of derived datatypes."""
        arrays = [(peer, np.ascontiguousarray(a) if min(a.strides, default=1) <= 0 else a) for peer, a in sends]
        outs = [(self._buffer(array), peer) for peer, array in arrays]
        ins = [(self._buffer(array), peer) for peer, array in receives]
        requests: list[Any] = []
        try:
            requests += [self._comm.Irecv(buffer, peer, _TAG_DATA + tag) for buffer, peer in ins]
            requests += [self._comm.Isend(buffer, peer, _TAG_DATA + tag) for buffer, peer in outs]
            # Large messages move only while MPI is called: who waits for them polls, and gives up the core in between.
            looked = began = time.monotonic()
            while not self._mpi.Request.Testall(requests):
                now = time.monotonic()
                if now - began > timeout:
                    peers = [peer for _, peer in (*ins, *outs)]
                    missing = {p for r, p in zip(requests, peers, strict=True) if not r.Test()}
                    if missing:
                        raise SwapTimeoutError(sorted(missing))
                if now - looked > _LOOK_SECONDS:
                    look()
                    looked = now
                time.sleep(0)
        except BaseException:
            # MPI may still read and write them.
            _not_freed.append((self, requests, receives, arrays))
            raise

    def _buffer(self, array: NDArray[Any]) -> list[Any]:
        """Return an array as mpi4py takes it: where it begins, and a datatype that walks it in C order."""
        datatype = self._datatype(array.shape, array.strides, array.itemsize)
        span = array.itemsize + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
        return [self._mpi.memory.fromaddress(array.ctypes.data, span), 1, datatype]

    def _datatype(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Any:
        """Return the committed datatype of such arrays; the same one every time."""
        key = shape, strides, itemsize
        if key not in self._datatypes:
            datatype, nbytes = self._mpi.BYTE, itemsize
            axes = list(zip(shape, strides, strict=True))
            while axes and axes[-1][1] == nbytes:
                nbytes *= axes.pop()[0]
            datatype = self._mpi.BYTE.Create_contiguous(nbytes)
            for n, stride in reversed(axes):
                inner, datatype = datatype, datatype.Create_hvector(n, 1, stride)
                inner.Free()
            self._datatypes[key] = datatype.Commit()
        return self._datatypes[key]

    def _complete(self, request: Any, deadline: float, *buffers: Any) -> None:
        if not any(request.Test() for _ in waiting(deadline - time.monotonic())):
            _not_freed.append((self, request, buffers))
            raise TimeoutError

    def has_ranks_of(self, other: Transport) -> bool:
        """Compare the groups with ``MPI_Comm_compare``, which is local."""
        if not isinstance(other, MPITransport):
            return self.size == other.size == 1
        same = (self._mpi.IDENT, self._mpi.CONGRUENT)
        return self.is_usable() and self._mpi.Comm.Compare(self._comm, other._comm) in same

    def is_usable(self) -> bool:
        """Whether MPI is not finalised."""
        return not self._mpi.Is_finalized()

    def free(self) -> None:
        """Free the duplicate, unless a message has not left."""
        self._sends = [(r, d) for r, d in self._sends if not r.Test()]
        if not self._sends:
            for datatype in self._datatypes.values():
                datatype.Free()
            self._datatypes.clear()
            self._comm.Free()
            _not_freed[:] = [kept for kept in _not_freed if kept[0] is not self]


def connect(comm: Any, timeout: float) -> Transport:
    """Return the transport of a communicator; None is this process alone.

    Collective.

    Raises
    ------
    ProtocolError
        Without comm in one of several MPI processes, where every one of them would write the whole store.
    """
    if comm is not None:
        return MPITransport(comm, timeout)
    if is_one_of_many(os.environ):
        raise ProtocolError(
            "this process is one of several MPI ranks: pass comm=MPI.COMM_WORLD, or comm=MPI.COMM_SELF if this rank "
            "alone writes a store of its own",
            kind="no_comm",
        )
    return SerialTransport()


def for_mpi_library(transport: Transport) -> Any:
    """Return the mpi4py communicator for a library that speaks MPI itself, None where this process is alone.

    Not collective.

    Notes
    -----
    What such a library does with it (parallel HDF5 opens and closes files in collective calls) has no deadline. So
    the ranks agree first, through messages that have one, and only then call it.
    """
    return transport._comm if isinstance(transport, MPITransport) and transport.size > 1 else None


def is_one_of_many(environment: Mapping[str, str]) -> bool:
    """Return whether this process is one of several MPI ranks.

    Not collective.

    Parameters
    ----------
    environment
        Process environment; launchers name the number of ranks in it.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return bool(mpi.COMM_WORLD.Get_size() > 1)

    def number(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isascii() and text.isdigit() else 0

    # PMIX gives a rank, no size: only a rank above 0 shows that there are several.
    return number("PMI_SIZE") > 1 or number("OMPI_COMM_WORLD_SIZE") > 1 or number("PMIX_RANK") > 0


def world() -> Any:
    """Return MPI.COMM_WORLD where a launcher started this process, else None.

    Not collective. For programs of our own: a library takes the communicator that it is given.
    """
    if not any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
        return None
    from mpi4py import MPI  # noqa: PLC0415 (as in MPITransport)

    return MPI.COMM_WORLD

"""Agreement between ranks: the one room that imports mpi4py.MPI.

Theory of operation
-------------------
A plain MPI collective hangs for ever when one rank does not come. So ranks agree by messages that are
polled for with a deadline:

* *Arrive.* Each rank sends rank 0 one small vote: the operation, its number, a digest of its arguments,
  and whether it is ready or what is wrong. Rank 0 polls until all votes are there.
* *Answer.* Rank 0 sends each rank what it decided. At the first vote that says failure, at votes that do
  not match, or at the deadline, it sends everybody an error, also to those that have not come yet: they
  find it waiting when they do.
* *Gather.* The tokens travel in a real MPI gather, but a nonblocking one that is tested until a deadline.

Rules of this room:

* All calls are made by the thread that opened the writer. Nothing here starts a thread.
* Everything runs on a duplicate of the user's communicator, so no message can meet one of the user's.
* After a timeout the channel is dead: no more MPI on this communicator, and it is not freed, because a
  peer may still be inside.
* A rank that waits spins for a millisecond and then sleeps: waiting ranks must not take the core from
  those that still compute.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from mpistream.errors import CommitError, MPIStreamError, ProtocolError, error_from_json, error_to_json

__all__ = ["Channel", "MPITransport", "SerialTransport", "Transport", "connect", "is_one_of_many"]

_TAG_ARRIVE = 1
_TAG_ANSWER = 2

_SPIN_SECONDS = 0.001
_MIN_SLEEP_SECONDS = 0.0001
_MAX_SLEEP_SECONDS = 0.005


class Transport(Protocol):
    """What an agreement needs from a communicator."""

    rank: int
    size: int

    def send(self, dest: int, tag: int, data: bytes) -> None:
        """Send without waiting."""

    def poll(self, tag: int) -> tuple[int, bytes] | None:
        """Return one message that has come, with its source, or None."""

    def gather(self, data: bytes, timeout: float) -> list[bytes] | None:
        """Gather on rank 0, where the list is returned; TimeoutError after ``timeout`` seconds."""

    def is_usable(self) -> bool:
        """Whether messages can still be sent; after MPI_Finalize they can't."""

    def free(self) -> None:
        """Release the communicator; every rank calls it."""


def waiting(timeout: float) -> Iterator[None]:
    """Yield until ``timeout`` seconds are over: spinning first, then sleeping longer and longer.

    Not collective.
    """
    began = time.monotonic()
    pause = _MIN_SLEEP_SECONDS
    while True:
        yield
        waited = time.monotonic() - began
        if waited > timeout:
            return
        if waited < _SPIN_SECONDS:
            time.sleep(0)
        else:
            time.sleep(pause)
            pause = min(2 * pause, _MAX_SLEEP_SECONDS)


class SerialTransport:
    """One process that is all ranks there are."""

    rank = 0
    size = 1

    def send(self, dest: int, tag: int, data: bytes) -> None:
        """There is nobody to send to."""

    def poll(self, tag: int) -> tuple[int, bytes] | None:
        """Nobody sends."""
        return None

    def gather(self, data: bytes, timeout: float) -> list[bytes] | None:
        """Return the only token."""
        return [data]

    def is_usable(self) -> bool:
        """There is nothing that could end."""
        return True

    def free(self) -> None:
        """Nothing is held."""


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
                f"comm is a {type(comm).__name__}; pass an mpi4py communicator or a Fortran handle (int)", kind="comm"
            )
        if comm == MPI.COMM_NULL or comm.Is_inter():
            what = "MPI.COMM_NULL" if comm == MPI.COMM_NULL else "an intercommunicator"
            raise ProtocolError(f"comm is {what}; pass an intracommunicator of the ranks that write", kind="comm")
        self._mpi = MPI
        # Nonblocking, so that a rank that never comes is an error and not a hang.
        self._comm, request = comm.Idup()
        if not any(request.Test() for _ in waiting(timeout)):
            raise ProtocolError(f"rank {comm.rank}: other ranks did not come within {timeout} s", kind="timeout")
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self._sends: list[tuple[Any, bytes]] = []
        # The first use of a communicator may set up connections: here, on this thread, not amid a commit.
        self.gather(b"", timeout)

    def send(self, dest: int, tag: int, data: bytes) -> None:
        """Send without waiting; the message is held until it has left."""
        self._sends = [(r, d) for r, d in self._sends if not r.Test()]
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
        self._complete(self._comm.Igather([count, 8, self._mpi.BYTE], [counts, 8, self._mpi.BYTE], 0), deadline)
        if counts is None:
            self._complete(self._comm.Igatherv([data, self._mpi.BYTE], None, 0), deadline)
            return None
        sizes = [int.from_bytes(counts[i : i + 8], sys.byteorder) for i in range(0, len(counts), 8)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        found = bytearray(sum(sizes))
        self._complete(
            self._comm.Igatherv([data, self._mpi.BYTE], [found, sizes, starts, self._mpi.BYTE], 0), deadline
        )
        return [bytes(found[s : s + n]) for s, n in zip(starts, sizes, strict=True)]

    def _complete(self, request: Any, deadline: float) -> None:
        if not any(request.Test() for _ in waiting(deadline - time.monotonic())):
            raise TimeoutError

    def is_usable(self) -> bool:
        """Whether MPI is not finalised."""
        return not self._mpi.Is_finalized()

    def free(self) -> None:
        """Free the duplicate, unless a message has not left."""
        self._sends = [(r, d) for r, d in self._sends if not r.Test()]
        if not self._sends:
            self._comm.Free()


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


class Channel:
    """The agreements of one writer, in an order that is the same on every rank.

    Parameters
    ----------
    transport
        The communicator.
    timeout
        Seconds to wait for the other ranks in one agreement.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self._transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self._timeout = timeout
        self._n = 0
        self.failure: MPIStreamError | None = None
        """Why the channel is dead, once it is."""
        self._left_at: int | None = None

    def exchange(
        self,
        operation: str,
        *,
        digest: str = "",
        payload: Any = None,
        failure: MPIStreamError | None = None,
        answer: Callable[[list[Any]], list[Any]] | None = None,
    ) -> Any:
        """Agree: all votes to rank 0, one answer to each rank.

        Collective.

        Parameters
        ----------
        operation, digest
            What this rank is about to do; they must be the same on every rank.
        payload
            JSON value of this rank for ``answer``.
        failure
            What is wrong on this rank; then every rank raises it.
        answer
            On rank 0: from all payloads to one JSON value per rank. What it raises, every rank raises.

        Returns
        -------
        This rank's value.

        Raises
        ------
        MPIStreamError
            The same error on every rank.
        """
        if self.failure is not None:
            raise self.failure
        n = self._n
        self._n += 1
        vote = {
            "n": n,
            "operation": operation,
            "digest": digest,
            "payload": payload,
            "failure": None if failure is None else error_to_json(failure, rank=self.rank),
        }
        if self.rank != 0:
            self._transport.send(0, _TAG_ARRIVE, _dump(vote))
            try:
                return self.outcome(n)
            except MPIStreamError as error:
                raise error from failure
        try:
            payloads = self._votes(n, vote)
            answers = answer(payloads) if answer is not None else [None] * self.size
        except BaseException as error:
            document = error_to_json(error, rank=0)
            self._answer_all(n, document)
            if isinstance(error, Exception) and not isinstance(error, MPIStreamError):
                raise error_from_json(document) from error
            if isinstance(error, MPIStreamError) and error.kind == "left":
                self.failure = error
            raise
        for rank in range(1, self.size):
            self._transport.send(rank, _TAG_ANSWER, _dump({"n": n, "value": answers[rank]}))
        return answers[0]

    def _votes(self, n: int, own: dict[str, Any]) -> list[Any]:
        """Poll for the votes of agreement ``n``; raise at the first that says failure or does not match."""
        votes: dict[int, dict[str, Any]] = {}
        self._take_vote(votes, 0, own, own)
        for _ in waiting(self._timeout):
            while (found := self._transport.poll(_TAG_ARRIVE)) is not None:
                rank, data = found
                vote = json.loads(data)
                # An older one comes from a rank that was late for an agreement that has failed since.
                if vote["n"] == n:
                    self._take_vote(votes, rank, vote, own)
            if len(votes) == self.size:
                return [votes[rank]["payload"] for rank in range(self.size)]
        missing = [rank for rank in range(self.size) if rank not in votes]
        names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")  # noqa: PLR2004
        self.failure = CommitError(
            f"{own['operation']}: rank {names} did not come within {self._timeout:g} s; every rank must make the same "
            "calls, and an exception on one rank must end them all: start programs with python -m mpi4py",
            kind="timeout",
            rank=missing[0],
        )
        raise self.failure

    @staticmethod
    def _take_vote(votes: dict[int, dict[str, Any]], rank: int, vote: dict[str, Any], own: dict[str, Any]) -> None:
        if vote["failure"] is not None:
            raise error_from_json(vote["failure"])
        if (vote["operation"], vote["digest"]) != (own["operation"], own["digest"]):
            what = f"{own['operation']} with other arguments"
            if vote["operation"] != own["operation"]:
                what = vote["operation"]
            raise ProtocolError(
                f"rank {rank} called {what}, rank 0 {own['operation']}; every rank must make the same calls "
                "with the same arguments",
                kind="mismatch",
                rank=rank,
            )
        votes[rank] = vote

    def _answer_all(self, n: int, error: dict[str, Any]) -> None:
        for rank in range(1, self.size):
            self._transport.send(rank, _TAG_ANSWER, _dump({"n": n, "error": error}))

    def gather(self, data: bytes) -> list[bytes] | None:
        """Gather tokens on rank 0, after an agreement that all are there.

        Collective.

        Raises
        ------
        CommitError
            Kind ``timeout`` after the timeout; the channel is dead.
        """
        try:
            return self._transport.gather(data, self._timeout)
        except TimeoutError:
            self.failure = CommitError(f"tokens did not come within {self._timeout:g} s", kind="timeout")
            raise self.failure from None

    def announce(self, value: Any = None, error: BaseException | None = None) -> None:
        """On rank 0, send every rank the outcome of what the last agreement began.

        Not collective.
        """
        n = self._n
        self._n += 1
        if error is not None:
            self._answer_all(n, error_to_json(error, rank=0))
            return
        for rank in range(1, self.size):
            self._transport.send(rank, _TAG_ANSWER, _dump({"n": n, "value": value}))

    def await_announcement(self) -> Any:
        """On another rank, wait for what `announce` sends; believe nothing else.

        Not collective.

        Raises
        ------
        CommitError
            Kind ``outcome_unknown`` when nothing came within the timeout; the channel is dead.
        """
        n = self._n
        self._n += 1
        try:
            return self.outcome(n)
        except CommitError as error:
            if error is not self.failure:
                raise
            self.failure = CommitError(
                f"rank 0 did not say within {self._timeout:g} s whether the commit took place; this writer is dead, "
                "write_resume tells what is committed",
                kind="outcome_unknown",
                rank=0,
            )
            raise self.failure from None

    def outcome(self, n: int, timeout: float | None = None) -> Any:
        """Wait for rank 0's answer number ``n``."""
        for _ in waiting(self._timeout if timeout is None else timeout):
            while (found := self._transport.poll(_TAG_ANSWER)) is not None:
                answer = json.loads(found[1])
                # An older answer belongs to an agreement that this rank gave up or never came to.
                if answer["n"] < n:
                    continue
                if "error" in answer:
                    error = error_from_json(answer["error"])
                    if error.kind == "left":
                        self.failure = error
                    raise error
                return answer["value"]
        self.failure = CommitError(f"rank 0 did not answer within {self._timeout:g} s", kind="timeout", rank=0)
        raise self.failure

    def post_leave(self, error: BaseException) -> None:
        """Tell the others that this rank leaves because of ``error``, and that none may wait for it.

        Not collective. Nothing is waited for; whoever comes to the next agreement fails at once.
        """
        if self.failure is not None or self.size == 1:
            return
        reason = CommitError(
            f"rank {self.rank} left with {type(error).__name__}: {error}; nothing more is committed by this writer",
            kind="left",
            rank=self.rank,
        )
        document = error_to_json(reason)
        self._left_at = self._n
        self._n += 1
        if self.rank == 0:
            self._answer_all(self._left_at, document)
        else:
            vote = {"n": self._left_at, "operation": "leave", "digest": "", "payload": None, "failure": document}
            self._transport.send(0, _TAG_ARRIVE, _dump(vote))
        self.failure = reason

    def wait_left(self, exit_timeout: float) -> None:
        """After `post_leave`, wait at most ``exit_timeout`` seconds until rank 0 has heard.

        Not collective.
        """
        if self._left_at is None or self.rank == 0:
            return
        n, self._left_at, reason = self._left_at, None, self.failure
        # Rank 0's answer to the vote, another rank's reason, or silence: each ends the wait.
        with contextlib.suppress(MPIStreamError):
            self.outcome(n, exit_timeout)
        self.failure = reason

    def is_usable(self) -> bool:
        """Whether an agreement can still be tried."""
        return self.failure is None and self._transport.is_usable()

    def close(self) -> None:
        """Release the communicator; every rank does, after an agreement on it."""
        if self.is_usable():
            self._transport.free()


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()

"""Agreement between ranks, by messages that are polled for with a deadline.

Theory of operation
-------------------
A plain MPI collective hangs for ever when one rank does not come. So:

* *Arrive.* Each rank sends rank 0 one small vote: the operation, its number, a digest of its arguments,
  and whether it is ready or what is wrong. Rank 0 polls until all votes are there.
* *Answer.* Rank 0 sends each rank what it decided. At the first vote that says failure, at votes that do
  not match, or at the deadline, it sends everybody an error, also to those that have not come yet: they
  find it waiting when they do.
* *Leaders.* Above about a thousand ranks rank 0 would be busy with messages. So the ranks form groups of neighbours, as
  many groups as a group has ranks; the first of each sends on what its group votes, as it comes, and hands on what rank
  0 answers to all of them. What ends an agreement in an error goes to every rank straight from rank 0, and what a rank
  says when it leaves goes straight to rank 0: neither waits for a leader that is not in a call. A leader decides
  nothing. While it has not come, what its group voted is not known, and rank 0 names the leader.
* *Swap.* The pieces of a rearranged record travel straight between the ranks that hold and that write them. Whoever
  waits for one looks for votes and answers meanwhile: a rank that leaves ends the wait of all.
* *Gather.* Tokens travel in a real MPI gather, but a nonblocking one that is tested until a deadline.

After a timeout the channel is dead: no more MPI on this communicator, and it is not freed, because a peer
may still be inside.
"""

from __future__ import annotations

import json
import math
import re
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from mpistream.comm import SwapTimeoutError, Transport, waiting
from mpistream.errors import CommitError, MPIStreamError, ProtocolError, error_from_json, error_to_json

__all__ = ["Channel"]

_TAG_ARRIVE = 1
_TAG_ANSWER = 2

# After these nobody may count on this channel: a rank has left, was given up, or does not know what is committed.
_DEADLY = ("left", "timeout", "outcome_unknown")

# How long ranks wait for each other to free a communicator whose opening failed; a leak is no reason to wait more.
_FAREWELL_SECONDS = 2.0

# Rank 0 knows who is missing, so the others give it this much longer to say so before they blame it.
_PATIENCE = 1.25

# Swaps have tags of their own, again and again the same; MPI promises tags up to 32,767.
_N_SWAPS = 16_384

# Up to so many ranks all messages go straight to rank 0: 1,000 of them take it some milliseconds.
_LEADERS_ABOVE = 1000

# Between votes, or answers, in one message. JSON has no bare newline.
_NEXT = b"\n"

# A digest that is none says itself what a rank called with.
_HASH = re.compile(r"|[0-9a-f]{64}")
# A message names so many ranks; of 10,000 that did not come nobody reads all.
_MAX_NAMED = 8


class Channel:
    """The agreements of one writer, in an order that is the same on every rank.

    Parameters
    ----------
    transport
        The communicator.
    timeout
        Seconds that rank 0 waits for the others in one agreement; they wait a quarter longer for its answer.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self._transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.communicator = transport.communicator
        self._timeout = timeout
        self._n = 0
        self.failure: MPIStreamError | None = None
        """Why the channel is dead, once it is."""
        self._left_at: int | None = None
        # The last error that came out of an agreement: every rank has it.
        self._agreed: weakref.ref[MPIStreamError] | None = None
        # Votes that were looked at before their turn.
        self._seen: deque[dict[str, Any]] = deque()
        # Number -> rank 0's answer, looked at before its turn.
        self._answers: dict[int, dict[str, Any]] = {}
        self._group = math.isqrt(self.size) if self.size > _LEADERS_ABOVE else self.size
        self._leader = self.rank - self.rank % self._group
        # Of a leader other than rank 0, which hears and answers its own group like a leader does rank 0's.
        self._members = range(0)
        if self.rank == self._leader != 0:
            self._members = range(self.rank + 1, min(self.rank + self._group, self.size))

    def exchange(
        self,
        operation: str,
        *,
        digest: str = "",
        payload: Any = None,
        failure: MPIStreamError | None = None,
        answer: Callable[[list[Any]], list[Any]] | None = None,
        others: Sequence[Channel] = (),
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
        others
            On rank 0: channels of the same ranks. A rank that votes there meanwhile will not come here.

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
        try:
            return self._exchange(operation, digest, payload, failure, answer, others)
        except MPIStreamError as error:
            self._agreed = weakref.ref(error)
            raise

    def has_agreed_on(self, error: BaseException) -> bool:
        """Return whether an error is the last that came out of an agreement: then every rank has it.

        Not collective.
        """
        return self._agreed is not None and self._agreed() is error

    def _exchange(
        self,
        operation: str,
        digest: str,
        payload: Any,
        failure: MPIStreamError | None,
        answer: Callable[[list[Any]], list[Any]] | None,
        others: Sequence[Channel],
    ) -> Any:
        n = self._n
        self._n += 1
        if self.rank != 0:
            self._send_vote(n, operation, digest=digest, payload=payload, failure=failure)
            try:
                return self._await_answer(n, others)
            except MPIStreamError as error:
                raise error from failure
        try:
            if failure is not None:
                raise error_from_json(error_to_json(failure, rank=0)) from failure
            payloads = self._votes(n, operation, digest, payload, others)
            answers = answer(payloads) if answer is not None else [None] * self.size
        except MPIStreamError as error:
            self._answer_all(n, error_to_json(error))
            self.note(error)
            raise
        except BaseException as error:
            document = error_to_json(error, rank=0)
            self._answer_all(n, document)
            if isinstance(error, Exception):
                raise error_from_json(document) from error
            raise
        self._answer(n, answers)
        return answers[0]

    def note(self, error: BaseException) -> None:
        """Take note of an error that every rank has: after some kinds the channel is dead.

        Not collective.
        """
        if isinstance(error, CommitError) and error.kind in _DEADLY:
            self.failure = error

    def _votes(self, n: int, operation: str, digest: str, payload: Any, others: Sequence[Channel]) -> list[Any]:
        """Poll for the votes of agreement ``n``; raise at the first that says failure or does not match."""
        payloads = {0: payload}
        for _ in waiting(self._timeout):
            # All that have come, before any conclusion: a rank that gave up takes its vote back with a second one.
            while (vote := self._seen.popleft() if self._seen else self._poll_vote()) is not None:
                rank = vote["rank"]
                # An older one comes from a rank that was late for an agreement that has failed since; but a rank that
                # left will not come to this one either.
                if vote["n"] == n or vote["operation"] == "leave":
                    self._check_vote(rank, vote, operation, digest)
                    payloads[rank] = vote["payload"]
            if len(payloads) == self.size:
                return [payloads[rank] for rank in range(self.size)]
            for other in others:
                other._refuse(operation, payloads)
        # Of a group whose leader did not come nothing is known.
        missing = [
            rank
            for rank in range(self.size)
            if rank not in payloads and (rank % self._group == 0 or rank - rank % self._group in payloads)
        ]
        raise CommitError(
            f"{operation}: rank {_named(missing)} did not come within {self._timeout:g} s; every rank must make the "
            "same calls, and an exception on one rank must end them all: start programs with python -m mpi4py",
            kind="timeout",
            rank=missing[0],
        )

    def _poll_vote(self) -> dict[str, Any] | None:
        """Return one vote that has come; more of the same message are kept."""
        found = self._transport.poll(_TAG_ARRIVE)
        if found is None:
            return None
        first, *more = map(json.loads, found[1].split(_NEXT))
        self._seen += more
        return dict(first)

    def _relay_votes(self) -> None:
        """On a leader, send on what its group has voted by now."""
        votes = []
        while self._members and (found := self._transport.poll(_TAG_ARRIVE)) is not None:
            votes.append(found[1])
        if votes:
            self._transport.send(0, _TAG_ARRIVE, _NEXT.join(votes))

    def _take_answer(self) -> bool:
        """Keep one answer of rank 0 for its turn, if any has come; a leader hands on what is for its group."""
        found = self._transport.poll(_TAG_ANSWER)
        if found is None:
            return False
        own, *more = found[1].split(_NEXT)
        for rank, data in zip(self._members, more, strict=False):
            self._transport.send(rank, _TAG_ANSWER, data)
        answer = json.loads(own)
        self._answers[answer["n"]] = answer
        return True

    def _refuse(self, operation: str, present: Container[int]) -> None:
        """End the agreement in which one of the ranks waits that are not present in another; raise for that one."""
        if not self.is_usable():
            return
        while (found := self._poll_vote()) is not None:
            self._seen.append(found)
        for vote in self._seen:
            rank = vote["rank"]
            # One that leaves says so on every channel.
            if rank not in present and vote["n"] == self._n and vote["operation"] != "leave":
                error = ProtocolError(
                    f"rank {rank} called {vote['operation']} of another writer, rank 0 {operation}; every rank must "
                    "make the same calls with the same writers",
                    kind="mismatch",
                    rank=rank,
                )
                self.announce(error=error)
                raise error

    def has_ranks_of(self, other: Channel) -> bool:
        """Return whether both channels connect the same processes in the same order.

        Not collective.
        """
        return self._transport.has_ranks_of(other._transport)

    @staticmethod
    def _check_vote(rank: int, vote: dict[str, Any], operation: str, digest: str) -> None:
        if vote["failure"] is not None:
            raise error_from_json(vote["failure"])
        if (vote["operation"], vote["digest"]) != (operation, digest):
            theirs, ours = vote["operation"], operation
            if theirs == ours:
                is_readable = not any(_HASH.fullmatch(text) for text in (vote["digest"], digest))
                theirs, ours = (
                    (f"{operation} with {vote['digest']}", f"with {digest}")
                    if is_readable
                    else (f"{operation} with other arguments", operation)
                )
            raise ProtocolError(
                f"rank {rank} called {theirs}, rank 0 {ours}; every rank must make the same calls with the same "
                "arguments",
                kind="mismatch",
                rank=rank,
            )

    def _answer_all(self, n: int, error: dict[str, Any]) -> None:
        data = _dump({"n": n, "error": error})
        for rank in range(1, self.size):
            self._transport.send(rank, _TAG_ANSWER, data)

    def _answer(self, n: int, values: Sequence[Any]) -> None:
        """Send each rank its value: straight to those of the own group, to the others by way of their leaders."""
        for first in range(0, self.size, self._group):
            answers, known, data = [], object(), b""
            for value in values[first : first + self._group]:
                # Most answers say the same to all ranks.
                if value is not known:
                    known, data = value, _dump({"n": n, "value": value})
                answers.append(data)
            if first:
                self._transport.send(first, _TAG_ANSWER, _NEXT.join(answers))
                continue
            for rank, answer in enumerate(answers[1:], 1):
                self._transport.send(rank, _TAG_ANSWER, answer)

    def gather(self, data: bytes) -> list[bytes] | None:
        """Gather tokens on rank 0, after an agreement that all are there.

        Collective.

        Raises
        ------
        CommitError
            Kind ``timeout`` after the timeout; the channel is dead.
        """
        try:
            return self._transport.gather(data, self._timeout if self.rank == 0 else _PATIENCE * self._timeout)
        except TimeoutError:
            if self.rank == 0:
                text, kind = "a token did not come; nothing was committed", "timeout"
            else:
                # The token may have gone: what rank 0 made of it this rank can't know.
                text, kind = "rank 0 did not take the token; write_resume tells what is committed", "outcome_unknown"
            error = CommitError(f"{text} (timeout {self._timeout:g} s)", kind=kind, rank=None if self.rank == 0 else 0)
            self.note(error)
            raise error from None

    def highest(self, operation: str, values: Sequence[int]) -> list[int]:
        """Return the highest of each of some numbers over all ranks, in one reduction.

        Collective. Cheaper than `exchange` where there are many ranks; who does not come is not known.

        Raises
        ------
        CommitError
            Kind ``timeout``, or ``left`` when a rank has left.
        ProtocolError
            Kind ``mismatch`` when rank 0 hears that another rank does something else.
        """
        if self.failure is not None:
            raise self.failure
        n = self._n
        self._n += 1
        found = self._transport.start_max(values)
        try:
            for _ in waiting(self._timeout if self.rank == 0 else _PATIENCE * self._timeout):
                if (highest := found()) is not None:
                    return highest
                self._look_for_failure(n, operation)
            raise CommitError(
                f"{operation}: not all ranks came within {self._timeout:g} s; every rank must make the same calls, and "
                "an exception on one rank must end them all: start programs with python -m mpi4py",
                kind="timeout",
            )
        except MPIStreamError as error:
            # The reduction can't be taken back: nothing more goes over this communicator.
            self.failure = error
            raise

    def _look_for_failure(self, n: int, operation: str) -> None:
        """Raise when a rank that does not come to the reduction ``n`` has said why; keep what belongs to later calls.

        A reduction ends on one rank before it does on another: who is done with it may have sent its next vote.
        """
        if self.rank == 0:
            while (found := self._poll_vote()) is not None:
                self._seen.append(found)
            for vote in self._seen:
                # An older one is of a rank that was late for an agreement that has failed since, as in `_votes`.
                if vote["n"] == n or (vote["n"] < n and vote["operation"] == "leave"):
                    try:
                        self._check_vote(vote["rank"], vote, operation, "")
                    except MPIStreamError as error:
                        self._answer_all(n, error_to_json(error))
                        raise
            return
        self._relay_votes()
        while self._take_answer():
            pass
        for k, answer in self._answers.items():
            if k <= n and "error" in answer:
                raise error_from_json(answer["error"])

    def swap(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> None:
        """Send and receive arrays, after an agreement that all are there.

        Collective, over the ranks that are named.

        Parameters
        ----------
        sends, receives
            Pairs of the other rank and an array, in an order that both have.

        Raises
        ------
        CommitError
            Kind ``timeout`` after the timeout, with the first rank whose pieces are missing; kind ``left`` when another
            rank has left. The channel is dead then, and after any other exception: what was sent and not taken must
            not be taken for something else.
        """
        try:
            # By the number of the agreement: a piece that was left behind can't be taken for a later one.
            self._transport.swap(sends, receives, self._timeout, self._n % _N_SWAPS, self._look)
        except SwapTimeoutError as timeout:
            error = CommitError(
                f"rank {self.rank}: not all pieces of a record to or from rank {_named(timeout.ranks)} went and came "
                f"within {self._timeout:g} s; nothing was committed, and nothing more is by this writer",
                kind="timeout",
                rank=timeout.ranks[0],
            )
            self._leave(error)
            raise error from None
        except BaseException as error:
            self.post_leave(error)
            raise

    def _look(self) -> None:
        """While pieces move, raise for a rank that has left; whatever else came is kept for its turn."""
        if self.rank == 0:
            while (found := self._poll_vote()) is not None:
                self._seen.append(found)
            for vote in self._seen:
                if vote["operation"] == "leave":
                    error = error_from_json(vote["failure"])
                    self.announce(error=error)
                    self.failure = error
                    raise error
            return
        self._relay_votes()
        while self._take_answer():
            pass
        for n, answer in sorted(self._answers.items()):
            if n >= self._n and answer.get("error", {}).get("kind") in _DEADLY:
                # For all that follows, whatever the agreement: rank 0 goes on with none.
                self._n = n + 1
                self._open_answer(answer)

    def announce(self, value: Any = None, error: BaseException | None = None) -> None:
        """On rank 0, send every rank the outcome of what the last agreement began.

        Not collective.
        """
        n = self._n
        self._n += 1
        if error is not None:
            self._answer_all(n, error_to_json(error, rank=None if isinstance(error, MPIStreamError) else 0))
            self.note(error)
            return
        self._answer(n, [value] * self.size)

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
        answer = self._receive(n, _PATIENCE * self._timeout)
        if answer is None:
            self.failure = CommitError(
                f"rank 0 did not say within {self._timeout:g} s whether the commit took place; this writer is dead, "
                "write_resume tells what is committed",
                kind="outcome_unknown",
                rank=0,
            )
            raise self.failure
        return self._open_answer(answer)

    def _await_answer(self, n: int, others: Sequence[Channel] = ()) -> Any:
        """Wait for rank 0's answer in agreement ``n``."""
        answer = self._receive(n, _PATIENCE * self._timeout, others)
        if answer is None:
            self.failure = CommitError(
                f"rank 0 did not answer within {_PATIENCE * self._timeout:g} s: it did not come, or waits for "
                "a lease or a disk; every rank must make the same calls, or Options(timeout=) is too short",
                kind="timeout",
                rank=0,
            )
            # Should rank 0 come later, it must not go on with a vote of a rank that has given up.
            self._send_vote(n, "leave", failure=self.failure)
            raise self.failure
        return self._open_answer(answer)

    def _receive(self, n: int, timeout: float, others: Sequence[Channel] = ()) -> dict[str, Any] | None:
        """Return rank 0's message number ``n``, None when it does not come in time; a leader relays meanwhile."""
        for _ in waiting(timeout):
            self._relay_votes()
            for other in others:
                # Its group may vote there, which rank 0 must see to end it.
                if other.is_usable():
                    other._relay_votes()
            while n not in self._answers and self._take_answer():
                pass
            # An older one belongs to an agreement that this rank gave up or never came to. A newer one, an error
            # straight from rank 0, can have overtaken one that a leader hands on.
            self._answers = {k: answer for k, answer in self._answers.items() if k >= n}
            if n in self._answers:
                return self._answers.pop(n)
        return None

    def _open_answer(self, answer: dict[str, Any]) -> Any:
        if "error" in answer:
            error = error_from_json(answer["error"])
            self.note(error)
            raise error
        return answer["value"]

    def _send_vote(
        self, n: int, operation: str, *, digest: str = "", payload: Any = None, failure: MPIStreamError | None = None
    ) -> None:
        document = None if failure is None else error_to_json(failure, rank=self.rank)
        vote = {"rank": self.rank, "n": n, "operation": operation, "digest": digest, "payload": payload}
        # Who leaves may not wait for a leader, who may be in no call.
        dest = 0 if operation == "leave" or self.rank == self._leader else self._leader
        self._transport.send(dest, _TAG_ARRIVE, _dump({**vote, "failure": document}))

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
        self._left_at = self._n
        self._leave(reason)

    def _leave(self, reason: CommitError) -> None:
        """Tell the others why this rank leaves; the channel is then dead."""
        if self.rank == 0:
            self._answer_all(self._n, error_to_json(reason))
        else:
            self._send_vote(self._n, "leave", failure=reason)
        self._n += 1
        self.failure = reason

    def wait_left(self, exit_timeout: float) -> None:
        """After `post_leave`, wait at most ``exit_timeout`` seconds until rank 0 has heard.

        Not collective.
        """
        if self._left_at is None or self.rank == 0:
            return
        n, self._left_at = self._left_at, None
        # Rank 0's answer to the vote, another rank's reason, or silence: each ends the wait.
        self._receive(n, exit_timeout)

    def is_usable(self) -> bool:
        """Whether an agreement can still be tried."""
        return self.failure is None and self._transport.is_usable()

    def close(self) -> None:
        """Free the communicator; the last agreement was reached by every rank.

        Not collective. Messages of one rank don't overtake each other, so after an agreement that everybody has
        reached none is left in the communicator.
        """
        if self.is_usable():
            self._transport.free()

    def close_failed(self) -> None:
        """Free the communicator after an agreement that failed, if all ranks come within a moment.

        Collective. An agreement can fail before all votes are received, and a message that is left in a freed
        communicator would be found by the next one that MPI gives the same context. So there is one more
        agreement first; where it is not reached, the communicator is kept.
        """
        if not self.is_usable():
            return
        self._timeout = min(self._timeout, _FAREWELL_SECONDS)
        try:
            self.exchange("bye")
        except MPIStreamError as error:
            self.failure = error
            return
        self.close()


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return ", ".join(map(str, ranks[:_MAX_NAMED])) + more


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()

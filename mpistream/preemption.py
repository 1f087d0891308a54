"""A job that is told to end, or whose time is over, ends in good order: all ranks at the same step.

Theory of operation
-------------------
A signal reaches one rank, some, or all, at any moment, and clocks of nodes differ. So no rank acts on what it
alone knows: a handler only sets a flag, and once every few calls of `PreemptionGuard.should_stop` all ranks
combine their flags in one small nonblocking reduction. All get the same answer in the same call; then the
program commits, and leaves its loop.

Rules of this room:

* A handler does no I/O and no MPI. While the guard is open a second signal is one more flag, so what is being
  committed is committed.
* Time is rank 0's alone to judge.
* Once the answer was yes it stays yes, and costs nothing any more.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from mpistream.agreement import Channel
from mpistream.comm import connect
from mpistream.errors import MPIStreamError, ProtocolError, SchemaError
from mpistream.walltime import SCHEDULERS, end_of_job, scheduler_of

__all__ = ["PreemptionGuard"]

_log = logging.getLogger("mpistream")

# "Temporary failure, try again" (sysexits.h, EX_TEMPFAIL): no other program error looks like it.
_EX_TEMPFAIL = 75
# How long a rank that leaves with an exception waits until rank 0 has heard.
_EXIT_TIMEOUT = 10.0


class PreemptionGuard:
    """Tells all ranks, in the same call, that the job is about to be ended.

    It is a context manager, opened and closed on every rank. In its body the signals do nothing but count here.

    Parameters
    ----------
    comm
        An mpi4py communicator or a Fortran handle (int); without it this process is alone.
    signals
        Signals that mean "end soon". Handlers of the program's own are called as well, and are back at the end.
        Empty: none is handled, and then the guard may be opened in any thread.
    walltime
        Whose time limit counts: ``"slurm"``, ``"pbs"``, ``"lsf"``, ``"auto"`` for the one in whose job this
        process runs, if any, or None. Rank 0 asks once, when the guard is opened.
    deadline
        An end of your own, in seconds since the epoch or as a datetime with a zone; the earlier end counts.
    margin
        Seconds before the end at which to stop: what a step and a commit take, and some more.
    any_of
        Functions without arguments; the job ends when one of them returns something true on any rank.
    poll_every
        Ask the other ranks in every so many calls only.
    timeout
        Seconds to wait for ranks that don't come.
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        walltime: str | None = "auto",
        deadline: float | dt.datetime | None = None,
        margin: float = 120.0,
        any_of: Sequence[Callable[[], object]] = (),
        poll_every: int = 1,
        timeout: float = 600.0,
    ) -> None:
        self._comm = comm
        self._signals = signals
        self._walltime = walltime
        self._deadline = deadline
        self._margin = margin
        self._any_of = any_of
        self._poll_every = poll_every
        self._timeout = timeout
        self._channel: Channel | None = None
        self._previous: dict[int, Any] = {}
        self._signum = 0
        self._stop_at = math.inf
        self._n_calls = 0
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the job is to end, in a few words; None as long as it is not."""
        return self._reason

    @property
    def exit_code(self) -> int:
        """What the program should end with: 0, or 75 (EX_TEMPFAIL) when it is to be started again."""
        return 0 if self._reason is None else _EX_TEMPFAIL

    def should_stop(self) -> bool:
        """Return whether the job is to end now: the same answer on every rank.

        Collective.

        Every rank calls it equally often, at the same places; it waits for the slowest of them.

        Raises
        ------
        ProtocolError
            On every rank: a function of ``any_of`` raised on one of them (kind ``predicate``), or a rank does
            something else (kind ``mismatch``). On this rank: the guard is not open (kind ``closed``).
        CommitError
            Kind ``timeout``: another rank did not come. Kind ``left``: one left the guard with an exception.

        Notes
        -----
        Once it was True it stays so. After True there is ``margin`` to commit; nothing is committed here.
        """
        if self._channel is None:
            raise ProtocolError("should_stop: the guard is not open; call it in the body of `with`", kind="closed")
        if self._reason is not None:
            return True
        self._n_calls += 1
        if (self._n_calls - 1) % self._poll_every:
            return False
        met, failure = 0, None
        try:
            met = next((i for i, is_met in enumerate(self._any_of, 1) if is_met()), 0)
        except Exception as error:  # noqa: BLE001 (whatever it is, the others must not wait for this rank)
            failure = error
        rank = self._channel.rank
        mine = [self._signum, int(time.monotonic() >= self._stop_at), met, 0 if failure is None else rank + 1]
        signum, is_late, met, failed = self._channel.highest("should_stop", mine)
        if failed:
            raise ProtocolError(
                f"rank {failed - 1}: a function of any_of raised{'' if failure is None else f' {failure!r}'}; the "
                "other ranks were told",
                kind="predicate",
                rank=failed - 1,
            ) from failure
        if signum:
            self._reason = f"signal {signal.Signals(signum).name}"
        elif is_late:
            self._reason = "time is nearly over"
        elif met:
            self._reason = f"function {met} of any_of"
        if self._reason is not None and rank == 0:
            _log.info("the job is to end: %s", self._reason)
        return self._reason is not None

    def __enter__(self) -> Self:
        """Connect the ranks, ask for the job's end, and handle the signals.

        Collective.

        Raises
        ------
        SchemaError
            On every rank, kind ``option``: an argument that can't be.
        ProtocolError
            On every rank: arguments that differ (kind ``mismatch``), a scheduler that was named and says no end
            (kind ``walltime``), signals outside the main thread (kind ``thread``), or no ``comm`` in one of several
            MPI processes (kind ``no_comm``).
        """
        if self._channel is not None:
            raise ProtocolError("the guard is open already; make one for each `with`", kind="open")
        failure, digest, stop = None, "", None
        try:
            stop = self._checked()
            plain = [sorted(int(s) for s in self._signals), self._walltime, stop, self._margin, self._poll_every]
            digest = hashlib.sha256(repr([*plain, len(self._any_of)]).encode()).hexdigest()
        except MPIStreamError as error:
            # Not raised yet: the other ranks would wait for this one.
            failure = error
        timeout = self._timeout if failure is None else 600.0
        channel = Channel(connect(self._comm, timeout), timeout)
        try:
            channel.exchange(
                "PreemptionGuard",
                digest=digest,
                failure=failure,
                answer=lambda votes: [self._ask(stop)] * len(votes),
            )
        except MPIStreamError:
            channel.close_failed()
            raise
        self._channel = channel
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._note)
            # A handler that only sets a flag is no reason for foreign code to see an interrupted system call.
            signal.siginterrupt(number, False)
        return self

    def _checked(self) -> float | None:
        """Check the arguments; return the given deadline in seconds since the epoch."""
        for number in self._signals:
            if not isinstance(number, int) or number not in signal.valid_signals():
                raise SchemaError(f"signals: {number!r} is no signal; give numbers like signal.SIGTERM", kind="option")
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise ProtocolError(
                f"PreemptionGuard was opened in thread {threading.current_thread().name!r}: Python handles signals in "
                "the main thread alone; open it there, or pass signals=()",
                kind="thread",
            )
        if self._walltime not in (None, "auto", *SCHEDULERS):
            raise SchemaError(
                f"walltime {self._walltime!r}: use {', '.join(map(repr, SCHEDULERS))}, 'auto' or None", kind="option"
            )
        for name, value in (("margin", self._margin), ("timeout", self._timeout)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise SchemaError(f"{name} {value!r}: give seconds from 0 on", kind="option")
        if isinstance(self._poll_every, bool) or not isinstance(self._poll_every, int) or self._poll_every < 1:
            raise SchemaError(f"poll_every {self._poll_every!r}: give a number of calls from 1 on", kind="option")
        if not all(map(callable, self._any_of)):
            raise SchemaError("any_of: give a list of functions without arguments", kind="option")
        return _seconds(self._deadline)

    def _ask(self, deadline: float | None) -> None:
        """On rank 0, note when to stop."""
        name = scheduler_of(os.environ) if self._walltime == "auto" else self._walltime
        end = None if name is None else end_of_job(name, os.environ)
        if name is not None and end is None:
            text = f"{name} does not say when this job ends"
            if self._walltime != "auto":
                raise ProtocolError(
                    f"{text}, or this is none of its jobs; pass walltime='auto', or deadline=", kind="walltime"
                )
            _log.warning("%s: it is ended by signals alone; pass deadline= if it has a limit", text)
        ends = [e for e in (end, deadline) if e is not None]
        if ends:
            # From here on the clock that nobody sets.
            left = min(ends) - time.time()
            if left <= self._margin:
                _log.warning(
                    "%.0f s are left before the end of the job, and the margin is %.0f s: it is to stop at once; "
                    "a deadline is in seconds since 1970, as time.time() gives them",
                    left,
                    self._margin,
                )
            self._stop_at = time.monotonic() + left - self._margin

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signum = number
        previous = self._previous.get(number)
        # Python's own handler of SIGINT is what happens where nobody handles it.
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the communicator and the signals back.

        Collective, unless the body raised: then the other ranks are told.
        """
        channel, self._channel = self._channel, None
        assert channel is not None
        try:
            if exc is not None:
                channel.post_leave(exc)
                channel.wait_left(min(_EXIT_TIMEOUT, self._timeout))
            elif channel.is_usable():
                try:
                    channel.exchange("end of the guard")
                except MPIStreamError:
                    channel.close_failed()
                    raise
                channel.close()
        finally:
            for number, previous in self._previous.items():
                # None: what handled it was not installed by Python, which can't put it back.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
            self._previous = {}


def _seconds(deadline: Any) -> float | None:
    if deadline is None:
        return None
    if isinstance(deadline, dt.datetime):
        if deadline.tzinfo is None:
            raise SchemaError(
                f"deadline {deadline!r} has no zone; give deadline.astimezone() if it is local time", kind="option"
            )
        return deadline.timestamp()
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not math.isfinite(deadline):
        raise SchemaError(f"deadline {deadline!r}: give seconds since the epoch, or a datetime", kind="option")
    return float(deadline)

"""One call of the system fails, on one rank, once or from then on until the job has heard of it.

After each error a rank does what a program would do: it tries the commit again, or, when the writer is dead, opens the
store again. All ranks must have the same errors in the same order, and in the end the same store as without a fault.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mpistream as ms
from tests.support.sim_disk import ProcessStore, SimDisk
from tests.support.sim_job import (
    OPTIONS,
    ROW,
    STATIC,
    ViolationError,
    add_job,
    check_tidy,
    make_schema,
    resume_main,
    run_job,
    state_of,
    write,
)
from tests.support.sim_ranks import Sim, SimTransport, System

__all__ = ["NUMBERS", "SHORT", "Fault", "fail_every_call", "run_with"]

SHORT = -1  # in the place of an errno: half of what is to be written
NUMBERS = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ESTALE, SHORT)
_N_RECORDS = 3
_TRIES = 6
_MAX_OPENINGS = 20
_LOOK = 98  # the process that looks at what is there
# What a rank is told when others do not come: with a fault of the disk nobody has to be waited for.
_HANGS = {"timeout", "left", "mismatch"}


@dataclass(slots=True, kw_only=True)
class Fault:
    """Call number ``n`` of a process fails, and if ``is_lasting`` all after it."""

    who: int
    n: int
    number: int
    is_lasting: bool
    is_over: bool = False
    hit: str = ""
    """The first call that failed."""

    def meets(self, who: int, n: int) -> bool:
        """Whether this call fails."""
        return not self.is_over and who == self.who and (n >= self.n if self.is_lasting else n == self.n)


def _arm(disk: SimDisk, fault: Fault) -> None:
    seen, writev = disk.watch, disk.writev

    def watch(who: int, call: str, path: str) -> None:
        seen(who, call, path)
        if fault.meets(who, disk.n_calls[who]):
            fault.hit = fault.hit or f"{call} {path}"
            if fault.number != SHORT:
                raise OSError(fault.number, os.strerror(fault.number), path)

    def short(fd: int, views: Any) -> int:
        who, _ = disk.open_files[fd]
        if fault.number == SHORT and fault.meets(who, disk.n_calls.get(who, 0) + 1):
            whole = b"".join(bytes(v) for v in views)
            return writev(fd, [whole[: max(1, len(whole) // 2)]])
        return writev(fd, views)

    disk.watch = watch
    disk.writev = short  # type: ignore[method-assign]


class _Rank:
    """One rank of a job that makes a store, writes, resumes and writes again, whatever happens on the way."""

    def __init__(
        self, comm: SimTransport, disk: SimDisk, fault: Fault, options: ms.Options, worlds: list[list[SimTransport]]
    ) -> None:
        self.comm = comm
        self.errors: list[tuple[Any, ...]] = []
        self._disk = disk
        self._fault = fault
        self._options = options
        # Each opening is on a communicator of its own, as by Dup.
        self._transports = iter(world[comm.rank] for world in worlds)
        self._n_committed: int | None = None

    def tried(self, call: Callable[[], Any]) -> Any:
        """Return what a call does, None if it fails; the fault is over when this rank has heard of it."""
        try:
            return call()
        except ms.MPIStreamError as error:
            self.errors.append(
                (type(error).__name__, error.kind, error.rank, getattr(error, "errno", None), str(error))
            )
            if self.comm.who == self._fault.who:
                self._fault.is_over = True
            self._check_told(error)
            return None

    def _check_told(self, error: ms.MPIStreamError) -> None:
        if self._n_committed is not None and isinstance(error, ms.CommitError) and error.kind != "outcome_unknown":
            store: Any = ProcessStore(_LOOK)
            if ms.open_reader(store).n_records != self._n_committed:
                raise ViolationError(f"told that nothing was committed, but it was: {error}") from error

    def opened(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return a writer, None if the call fails."""
        store: Any = ProcessStore(self.comm.who)
        comm = next(self._transports)
        self._n_committed = None
        return self.tried(lambda: call(store, *args, comm=comm, takeover=True, options=self._options))

    def again(self) -> ms.StreamWriter:
        """Resume the store, or make it if there is none yet."""
        for _ in range(_TRIES):
            w = self.opened(ms.write_resume)
            if w is None and self.errors[-1][1] == "no_store":
                self.errors.pop()
                w = self.opened(ms.write_open, make_schema())
            if w is not None:
                return w
        raise ViolationError(f"the store can't be opened: {self.errors}")

    def commits(self, w: ms.StreamWriter) -> bool:
        """Commit, again and again while the writer lives; False when it does not."""
        self._n_committed = w.n_committed
        for _ in range(_TRIES):
            if self.tried(w.commit) is not None:
                return True
            if w._channel.failure is not None:
                break
        return False

    def put(self, w: ms.StreamWriter, n: int) -> None:
        """Write what comes next, unless it is written."""
        if n == 0 and not w.is_committed("s"):
            self.tried(lambda: w.write_static("s", STATIC[slice(*w.region["y"])]))
        if w.n_records == n:
            self.tried(lambda: write(w, self.comm.rank, n, 0))

    def run(self) -> list[tuple[Any, ...]]:
        """Do all of it; return the errors."""
        w = self.opened(ms.write_open, make_schema()) or self.again()
        while w.n_committed < _N_RECORDS:
            self.put(w, w.n_committed)
            if not self.commits(w) or w.n_committed == ROW:
                self.tried(w.close)
                w = self.again()
        self.tried(w.close)
        return self.errors


def run_with(system: System, n_ranks: int, fault: Fault, options: ms.Options = OPTIONS) -> SimDisk:
    """Run the job with a fault, and look at what it was told and at what it leaves."""
    disk = SimDisk()
    sim = Sim(disk)
    _arm(disk, fault)
    system.restart(disk, 1)
    worlds: list[list[SimTransport]] = [[] for _ in range(_MAX_OPENINGS)]
    for world in worlds:
        for rank in range(n_ranks):
            SimTransport(sim, 0, rank, world)
    processes = add_job(sim, n_ranks, lambda comm, disk: _Rank(comm, disk, fault, options, worlds).run())
    sim.run()
    for process in processes:
        if process.error is not None:
            raise ViolationError(f"rank {process.who}: {process.error!r}") from process.error
        if not process.has_ended:
            raise ViolationError(f"rank {process.who} has not ended")
    sim.kill()
    told = [p.result for p in processes]
    if told != [told[0]] * n_ranks:
        raise ViolationError(f"the ranks were told different things: {told}")
    for _, kind, rank, number, text in told[0]:
        if kind in _HANGS or (number is not None and number != fault.number) or rank not in (None, fault.who):
            raise ViolationError(f"an error of the disk on rank {fault.who} ends in: {kind}, rank {rank}, {text}")
    if disk.open_files:
        raise ViolationError(f"{len(disk.open_files)} files are left open after {told[0]}")
    fault.is_over = True
    if (state := state_of(system, disk)) != (0,) * _N_RECORDS:
        raise ViolationError(f"in the end there is {state}; the job was told {told[0]}")
    if fault.hit:
        # What could not be deleted, or brought in step with the manifest, was a warning: the next opening does it.
        run_job(system, disk, 1, resume_main(0, 0), generation=2)
    check_tidy(disk, (0,) * _N_RECORDS)
    return disk


def fail_every_call(
    system: System, n_ranks: int, who: int, faults: Callable[[int], Iterator[tuple[int, bool]]], options: ms.Options
) -> Counter[str]:
    """Let each call of a rank fail, one a run, until a run has no more of them; return what was counted.

    Parameters
    ----------
    system
        The simulated system.
    n_ranks, who
        How many ranks there are, and the one whose calls fail.
    faults
        From the number of the call to (errno, whether it lasts) of each run.
    options
        Of the writers.
    """
    counts: Counter[str] = Counter()
    n, was_hit = 0, True
    while was_hit:
        n, was_hit = n + 1, False
        for number, is_lasting in faults(n):
            fault = Fault(who=who, n=n, number=number, is_lasting=is_lasting)
            try:
                run_with(system, n_ranks, fault, options)
            except ViolationError as error:
                error.add_note(f"{n_ranks} ranks, {fault}")
                raise
            counts["runs"] += 1
            was_hit = was_hit or bool(fault.hit)
        counts["calls"] += was_hit
    return counts

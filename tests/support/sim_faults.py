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
    STATIC,
    Main,
    Violation,
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


def _main(fault: Fault, options: ms.Options, worlds: list[list[SimTransport]]) -> Main:
    """Return a job that makes a store, writes, resumes and writes again, whatever happens on the way."""

    def main(comm: SimTransport, disk: SimDisk) -> list[tuple[Any, ...]]:
        store: Any = ProcessStore(comm.who)
        errors: list[tuple[Any, ...]] = []
        n_opened = 0
        w: ms.StreamWriter | None = None

        def tried(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except ms.MPIStreamError as error:
                errors.append((type(error).__name__, error.kind, error.rank, getattr(error, "errno", None), str(error)))
                if comm.who == fault.who:
                    fault.is_over = True
                if w is not None and isinstance(error, ms.CommitError) and error.kind != "outcome_unknown":
                    look: Any = ProcessStore(_LOOK)
                    if ms.open_reader(look).n_records != w.n_committed:
                        raise Violation(f"told that nothing was committed, but it was: {error}") from error
                return None

        def opened(call: Callable[..., Any], *args: Any) -> Any:
            nonlocal n_opened
            # Each opening is on a communicator of its own, as by Dup.
            mine = worlds[n_opened][comm.rank]
            n_opened += 1
            return tried(lambda: call(store, *args, comm=mine, takeover=True, options=options))

        def again() -> Any:
            for _ in range(_TRIES):
                w = opened(ms.write_resume)
                if w is not None:
                    return w
                if errors[-1][1] == "no_store":
                    errors.pop()
                    w = opened(ms.write_open, make_schema())
                    if w is not None:
                        return w
            raise Violation(f"the store can't be opened: {errors}")

        n = 0
        w = opened(ms.write_open, make_schema()) or again()
        assert w is not None
        while n < _N_RECORDS:
            if w.n_records == n:
                if not w.is_committed("s") and n == 0:
                    tried(lambda: w.write_static("s", STATIC[slice(*w.region["y"])]))
                tried(lambda: write(w, comm.rank, n, 0))
            done = None
            for _ in range(_TRIES):
                done = tried(w.commit)
                if done is not None or w._channel.failure is not None:
                    break
            if done is None:
                tried(w.close)
                w = again()
                n = w.n_records
                continue
            n = w.n_records
            if n == 2:  # noqa: PLR2004 - between two rows
                tried(w.close)
                w = again()
        tried(w.close)
        return errors

    return main


def run_with(system: System, n_ranks: int, fault: Fault, options: ms.Options = OPTIONS) -> SimDisk:
    """Run the job with a fault, and look at what it was told and at what it leaves."""
    disk = SimDisk()
    system.restart(disk, 1)
    sim = Sim(disk)
    _arm(disk, fault)
    worlds: list[list[SimTransport]] = [[] for _ in range(_MAX_OPENINGS)]
    for world in worlds:
        for rank in range(n_ranks):
            SimTransport(sim, 0, rank, world)
    processes = add_job(sim, n_ranks, _main(fault, options, worlds))
    sim.run()
    for process in processes:
        if process.error is not None:
            raise Violation(f"rank {process.who}: {process.error!r}") from process.error
        if not process.has_ended:
            raise Violation(f"rank {process.who} has not ended")
    sim.kill()
    told = [p.result for p in processes]
    if told != [told[0]] * n_ranks:
        raise Violation(f"the ranks were told different things: {told}")
    for _, kind, rank, number, text in told[0]:
        if kind in _HANGS or (number is not None and number != fault.number) or rank not in (None, fault.who):
            raise Violation(f"an error of the disk on rank {fault.who} ends in: {kind}, rank {rank}, {text}")
    if disk.open_files:
        raise Violation(f"{len(disk.open_files)} files are left open after {told[0]}")
    fault.is_over = True
    if (state := state_of(system, disk)) != (0,) * _N_RECORDS:
        raise Violation(f"in the end there is {state}; the job was told {told[0]}")
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
            except Violation as error:
                error.add_note(f"{n_ranks} ranks, {fault}")
                raise
            counts["runs"] += 1
            was_hit = was_hit or bool(fault.hit)
        counts["calls"] += was_hit
    return counts

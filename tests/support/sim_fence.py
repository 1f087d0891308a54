"""Two jobs on one store at a time: one is stopped before one of its calls, and goes on when the other has taken over.

The lease is passed over (``takeover=True``): the fence has to hold without it. The job that is stopped does not know
of it; whatever either was told to be committed must be there in the end, with the data of that run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mpistream as ms
from tests.support.sim_disk import SimDisk
from tests.support.sim_job import Main, State, ViolationError, add_job, run_job, state_of
from tests.support.sim_kinds import Growing, Kind
from tests.support.sim_ranks import Process, Sim, System

__all__ = ["Duel", "Part"]

_FIRST = 10  # number of the second job's rank 0
_SHARED = ("rename", "unlink", "mkdir", "rmdir", "listdir")


def _is_shared(call: str, path: str) -> bool:
    """Whether another job can make this call end in another way, or notice it."""
    is_data = not path.startswith("store/.mpistream") or "/lease" in path
    return call in _SHARED or (call == "open" and not is_data)


def _last_ack(disk: SimDisk, who: set[int]) -> int:
    return max((e.value for e in disk.log if e.kind == "ack" and e.who in who), default=0)


@dataclass(frozen=True, slots=True)
class Part:
    """What one of two jobs changes: records that the other one leaves alone, and its states in their order."""

    records: Sequence[int]
    states: Sequence[State]


class Duel:
    """Two jobs over a store that lies there.

    Parameters
    ----------
    system
        The simulated system.
    tree
        What lies there.
    state
        What is committed of it.
    kind
        What a job does that resumes in the end.
    parts
        Where times are fixed, what each of the two jobs changes.
    """

    def __init__(
        self,
        system: System,
        tree: tuple[Mapping[str, bytes], Sequence[str]],
        state: State,
        *,
        kind: Kind | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        self._kind = kind or Growing()
        self._parts = parts
        self._system = system
        self._tree = tree
        self._state = state
        self._ends: set[object] = set()
        self._n = 0
        self.counts: Counter[str] = Counter()

    def fight(self, n_old: int, old: Main, who: int, n_new: int, new: Main, *, every: int = 1) -> None:
        """Stop rank ``who`` of the old job before each of its calls, and the new job's rank 0 before each of its own.

        Then the old one goes on to its end, and the new one after it.
        """
        stops = list(self._calls(n_old, old, 0))
        later = list(self._calls(n_new, new, _FIRST))
        for k in [c for c in stops if c[0] == who]:
            for m in [*[c for c in later if c[0] == _FIRST][self._n % every :: every], None]:
                try:
                    self._meet(n_old, old, k, n_new, new, m)
                except ViolationError as error:
                    error.add_note(f"{n_old} ranks, {k} frozen; {n_new} ranks took over, which waited at {m}")
                    raise
            self._n += 1

    def _calls(self, n: int, main: Main, first: int) -> Iterator[tuple[int, int, str, str]]:
        """Yield (process, number of the call, call, path) of those calls of a job that another job may notice."""
        disk = SimDisk(*self._tree)
        found: list[tuple[int, int, str, str]] = []
        self._system.restart(disk, 1)
        sim = Sim(disk)
        seen = disk.watch

        def watch(who: int, call: str, path: str) -> None:
            if _is_shared(call, path):
                found.append((who, disk.n_calls[who], call, path))
            seen(who, call, path)

        disk.watch = watch
        add_job(sim, n, main, first)
        sim.run()
        sim.kill()
        yield from found

    def _meet(
        self,
        n_old: int,
        old: Main,
        k: tuple[int, int, str, str],
        n_new: int,
        new: Main,
        m: tuple[int, int, str, str] | None,
    ) -> None:
        disk = SimDisk(*self._tree)
        self._system.restart(disk, 1)
        sim = Sim(disk)
        first = add_job(sim, n_old, old)
        first[k[0]].freeze_at = k[1]
        sim.run(first)
        second = add_job(sim, n_new, new, _FIRST)
        if m is not None:
            second[0].freeze_at = m[1]
        sim.run(second)
        for jobs in (first, second):
            for process in jobs:
                process.is_frozen = False
                process.freeze_at = None
            sim.run(jobs)
        sim.kill()
        self.counts["meetings"] += 1
        self._check(disk, first, second)

    def _check(self, disk: SimDisk, *jobs: list[Process]) -> None:
        ends = []
        for job in jobs:
            errors = {(type(p.error).__name__, getattr(p.error, "kind", None)) for p in job}
            if len(errors) != 1:
                raise ViolationError(f"the ranks of one job end differently: {errors}")
            error = job[0].error
            if error is not None and not isinstance(error, ms.MPIStreamError):
                raise ViolationError(f"{error!r}") from error
            ends.append(error)
        if all(error is not None for error in ends):
            raise ViolationError(f"both jobs fail: {ends}")
        self.counts["fenced"] += sum(isinstance(error, ms.FencedError) for error in ends)
        files, folders = disk.tree()
        acks = [_last_ack(disk, {p.who for p in job}) for job in jobs]
        key = frozenset(files.items()), tuple(folders), frozenset(disk.told), tuple(acks)
        if key in self._ends:
            return
        self._ends.add(key)
        self.counts["ends"] += 1
        state = state_of(self._system, SimDisk(files, folders))
        before = self._state or ()
        if state is None:
            raise ViolationError(f"of {before} there is no store in the end")
        if self._parts:
            self._check_parts(state, acks)
        elif state[: len(before)] != before:
            raise ViolationError(f"of {before} there is {state} in the end")
        for record, run in disk.told:
            if record >= len(state) or state[record] != run:
                raise ViolationError(
                    f"record {record} of run {run} was acknowledged, in the end there is {state}: {ends}"
                )
        again = SimDisk(files, folders)
        main, after = self._kind.again(state)
        processes = run_job(self._system, again, 1, main, generation=3)
        if processes[0].error is not None or state_of(self._system, again) != after[-1]:
            raise ViolationError(f"the end can't be resumed: {processes[0].error!r}") from processes[0].error
        self._kind.check_tidy(again, after[-1] or ())

    def _check_parts(self, state: Sequence[int | None], acks: Sequence[int]) -> None:
        """Check of each job's records that they are in the state it was told last, or in a later one of it."""
        for part, told in zip(self._parts, acks, strict=True):
            found = [state[r] for r in part.records]
            allowed = [[s[r] for r in part.records] for s in part.states[told:] if s is not None]
            if found not in allowed:
                raise ViolationError(f"records {part.records} are {found} in the end, possible are {allowed}")
        changed = {r for part in self._parts for r in part.records}
        kept = {r: run for r, run in enumerate(self._state or ()) if r not in changed}
        if any(state[r] != run for r, run in kept.items()):
            raise ViolationError(f"of {kept}, which no job changes, there is {state} in the end")

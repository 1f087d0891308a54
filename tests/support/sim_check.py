"""What has to be so after each crash of a simulated job: the invariants at the head of `mpistream.commit`.

Of each state of the disk: a reader finds the state that was told last, or the one whose manifest was being renamed (I1,
I6), whole and right in every record (I2, I3, I5), and Zarr documents show no more than that. A job that then resumes
finds the same state; when it has gone on and closed, all records are there and nothing is left over.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tests.support.sim_crash import Crash, crashes
from tests.support.sim_disk import SimDisk
from tests.support.sim_job import Main, State, ViolationError, run_job, state_of
from tests.support.sim_kinds import Growing, Kind
from tests.support.sim_ranks import System

__all__ = ["Explorer"]

Tree = tuple[Mapping[str, bytes], Sequence[str]]
_EMPTY: Tree = ({}, ())


class Explorer:
    """Explores the crashes of jobs; what was seen once is not looked at again.

    Parameters
    ----------
    system
        The simulated system.
    sizes
        On how many ranks each state is resumed: on these by turns, or on each of them.
    is_each
        Whether on each.
    depth
        How often in a row a job crashes.
    keep
        Whether a state is crashed into again; by default all are.
    kind
        What the jobs do that resume.
    """

    def __init__(
        self,
        system: System,
        sizes: Sequence[int],
        *,
        is_each: bool = False,
        depth: int = 1,
        keep: Callable[[int], bool] = lambda n: True,
        kind: Kind | None = None,
    ) -> None:
        self._system = system
        self._kind = kind or Growing()
        self._sizes = sizes
        self._turn = itertools.cycle(sizes)
        self._is_each = is_each
        self._depth = depth
        self._keep = keep
        self._states: dict[object, State] = {}
        self.counts: Counter[str] = Counter()

    def explore(
        self, n: int, main: Main, states: Sequence[State], tree: Tree = _EMPTY, depth: int | None = None
    ) -> Tree:
        """Run a job and look at every crash of it; return what it leaves.

        Parameters
        ----------
        n, main
            Its ranks, and what each of them does.
        states
            What is committed before it, and after each manifest of it; it is looked at after the run.
        tree
            What lies on the disk before it.
        depth
            How often in a row jobs crash from here on.
        """
        depth = self._depth if depth is None else depth
        disk = SimDisk(*tree)
        for process in run_job(self._system, disk, n, main, generation=1 + self._depth - depth):
            if process.error is not None:
                raise ViolationError(f"rank {process.who} of {n} failed: {process.error!r}") from process.error
        found = state_of(self._system, SimDisk(*disk.tree()))
        if found != states[-1]:
            raise ViolationError(f"the job leaves {found}, not {states[-1]}")
        self.counts["runs"] += 1
        for crash in crashes(SimDisk(*tree), disk.log):
            self.counts["crashes"] += 1
            try:
                self._check(crash, states, depth)
            except ViolationError as error:
                error.add_note(f"{n} ranks, cut {crash.cut}, survived: {crash.text}; told {crash.told} of {states}")
                raise
        return disk.tree()

    def _check(self, crash: Crash, states: Sequence[State], depth: int) -> None:
        key = frozenset(crash.files.items()), tuple(crash.folders), states[0]
        is_new = key not in self._states
        if is_new:
            self._states[key] = state = state_of(self._system, crash.disk())
            self.counts["states"] += 1
            self._kind.check_shown(crash.files, state, states[: crash.n_manifests + 1])
        state = self._states[key]
        allowed = states[crash.told : max(crash.told, crash.n_manifests) + 1]
        if state not in allowed:
            raise ViolationError(f"a reader finds {state}, possible are {allowed}")
        if is_new:
            for size in self._sizes if self._is_each else [next(self._turn)]:
                self._recover(crash, state, size, depth)

    def _recover(self, crash: Crash, state: State, size: int, depth: int) -> None:
        tree = crash.files, crash.folders
        main, after = self._kind.again(state)
        if depth > 1 and self._keep(self.counts["states"]):
            self.counts["crashes of a resume"] += 1
            end = self.explore(size, main, after, tree, depth - 1)
        else:
            disk = SimDisk(*tree)
            processes = run_job(self._system, disk, size, main, generation=2 + self._depth - depth)
            for process in processes:
                if process.error is not None:
                    raise ViolationError(f"resumed on {size} ranks: {process.error!r}") from process.error
            n_found = None if state is None else sum(run is not None for run in state)
            if n_found is not None and any(p.result != n_found for p in processes):
                raise ViolationError(f"resumed on {size} ranks from {processes[0].result} records, not {state}")
            found = state_of(self._system, disk)
            if found != after[-1]:
                raise ViolationError(f"resumed on {size} ranks and went on from {state}: {found}, not {after[-1]}")
            end = disk.tree()
        self.counts["resumes"] += 1
        self._kind.check_tidy(SimDisk(*end), after[-1] or ())

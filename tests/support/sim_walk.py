"""Chains of jobs that crash and are resumed: one chain at a time, of a seed, or between two numbers of ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mpistream as ms
from tests.support.sim_crash import Crash, Tree, crashes_after
from tests.support.sim_disk import LookStore, SimDisk
from tests.support.sim_job import (
    ALIGNED,
    OFF_EDGES,
    SCATTERED,
    Layout,
    Main,
    State,
    ViolationError,
    check_tidy,
    create_main,
    resume_main,
    run_job,
    state_of,
    time_of,
)
from tests.support.sim_kinds import N_TIMES, Growing, Indexed, Kind, Pipelined, Step
from tests.support.sim_ranks import System

__all__ = ["resume_at_four_points", "walk", "walk_apart"]


def _run(system: System, disk: SimDisk, n: int, main: Main, generation: int) -> None:
    for process in run_job(system, disk, n, main, generation=generation):
        if process.error is not None:
            raise ViolationError(f"rank {process.who} of {n} failed: {process.error!r}") from process.error


def _checked(system: System, crash: Crash, states: Sequence[State]) -> State:
    state = state_of(system, crash.seen)
    allowed = states[crash.told : max(crash.told, crash.n_manifests) + 1]
    if state not in allowed:
        raise ViolationError(f"a reader finds {state}, possible are {allowed}")
    return state


def resume_at_four_points(system: System, before: int, after: list[int]) -> int:
    """Crash a job on some ranks within its third commit, and resume it on others; return how many resumes there were.

    The points are before the first file is in place, half of them, the manifest's rename, and the middle of the
    documents; of what is not durable there is everything and nothing by turns.
    """
    disk, n_resumes = SimDisk(), 0
    _run(system, disk, before, create_main(3), 0)
    log = disk.log
    acks = [k for k, e in enumerate(log) if e.kind == "ack"]
    begin = max(k for k in acks if log[k].value == 3)
    manifest = next(k for k, e in enumerate(log) if k > begin and e.is_manifest)
    end = next(k for k in acks if log[k].value == 4)
    places = [k for k in range(begin, manifest) if log[k].kind == "rename" and log[k].is_visible]
    for i, k in enumerate((places[0], places[len(places) // 2], manifest + 1, (manifest + end) // 2)):
        of_cut = list(crashes_after(SimDisk(), log, k))
        for crash in of_cut[:1] if (i + before) % 2 else of_cut[-1:]:
            state = _checked(system, crash, [None, (), (0,), (0, 0), (0, 0, 0)])
            assert state is not None
            for n in after:
                again = crash.disk()
                _run(system, again, n, resume_main(5 - len(state), 0), 1)
                if state_of(system, again) != (0,) * 5:
                    raise ViolationError(f"{before} ranks, cut {crash.cut}, {n} ranks: not as an uninterrupted run")
                check_tidy(again, (0,) * 5)
                n_resumes += 1
    return n_resumes


def walk(system: System, seed: int, max_ranks: int = 6, max_jobs: int = 4) -> int:
    """Make a store and crash at a random event with a random survival, again and again; return the number of jobs."""
    rng = random.Random(seed)
    state: State = None
    before = SimDisk()
    tree: Tree = ({}, [])
    n_jobs = rng.randint(1, max_jobs)
    for job in range(n_jobs + 1):
        n, n_more = rng.randint(1, max_ranks), rng.randint(1, 3)
        states: list[State] = [state]
        if state is None:
            main = create_main(n_more)
            states += [(0,) * i for i in range(n_more + 1)]
        else:
            n_kept = rng.randint(0, len(state)) if rng.random() < 0.3 else len(state)
            at = None if n_kept == len(state) else time_of(n_kept - 1) if n_kept else -1.0
            main = resume_main(n_more, job, at=at, is_alone=at is None)
            states += [(*state[:n_kept], *(job,) * i) for i in range(n_more + 1)]
        disk = SimDisk(*tree)
        try:
            _run(system, disk, n, main, job)
            if state_of(system, disk) != states[-1]:
                raise ViolationError(f"in the end there is not {states[-1]}")
            if job == n_jobs:
                check_tidy(disk, states[-1] or ())
                return job + 1
            found = list(crashes_after(before, disk.log, rng.randint(0, len(disk.log))))
            crash = rng.choice(found)
            state = _checked(system, crash, states)
        except ViolationError as error:
            error.add_note(f"seed {seed}, job {job} on {n} ranks, from {states[0]}")
            raise
        before, tree = crash.seen, crash.tree
    raise AssertionError


# Layouts of the same shards: a job may hold other cells than the one before it.
_LAYOUTS: tuple[tuple[Layout, ...], ...] = ((ALIGNED,), (OFF_EDGES, SCATTERED))
_MAX_RANKS = 4


def walk_apart(system: System, seed: int, max_jobs: int = 4) -> int:
    """Walk as `walk` does, over stores whose commits do not wait, whose pieces move, or whose times are fixed."""
    rng = random.Random(seed)
    layouts = rng.choice([None, *_LAYOUTS])
    state: State = None
    history: list[State] = []
    before = SimDisk()
    tree: Tree = ({}, [])
    n_jobs = rng.randint(1, max_jobs)
    for job in range(n_jobs + 1):
        n = rng.randint(1, _MAX_RANKS)
        disk = SimDisk(*tree)
        if layouts is None:
            kind, main, states = _fixed(rng, state, job, has_static=state is not None and _has_static(disk))
        else:
            kind, main, states = _growing(rng, layouts, state, job)
        try:
            _run(system, disk, n, main, job)
            if state_of(system, disk) != states[-1]:
                raise ViolationError(f"in the end there is not {states[-1]}")
            if job == n_jobs:
                kind.check_tidy(disk, states[-1] or ())
                return job + 1
            crash = rng.choice(list(crashes_after(before, disk.log, rng.randint(0, len(disk.log)))))
            state = _checked(system, crash, states)
            # A crash before the array 'committed' is in step may come in several jobs in a row.
            kind.check_shown(crash.files, state, [*states[: crash.n_manifests + 1], *history])
            history += states
        except ViolationError as error:
            error.add_note(f"seed {seed}, job {job} on {n} ranks, its states: {states}")
            raise
        before, tree = crash.seen, crash.tree
    raise AssertionError


def _growing(
    rng: random.Random, layouts: Sequence[Layout], state: State, job: int
) -> tuple[Kind, Main, Sequence[State]]:
    layout, n_more = rng.choice(layouts), rng.randint(1, 4)
    if rng.random() < 0.6:
        # From no job at all to all of them, from either end.
        pace = [[rng.choice([0, 0, 1, 2, 3, -1, -2, 99]) for _ in range(n_more)] for _ in range(_MAX_RANKS)]
        lazy = Pipelined(pace, layout)
        return lazy, *(lazy.create(n_more) if state is None else lazy.resume(state, n_more, job))
    kind = Growing(layout)
    if state is None:
        return kind, create_main(n_more, layout), [None, *((0,) * i for i in range(n_more + 1))]
    n_kept = rng.randint(0, len(state)) if rng.random() < 0.3 else len(state)
    at = None if n_kept == len(state) else time_of(n_kept - 1) if n_kept else -1.0
    main = resume_main(n_more, job, at=at, is_alone=at is None, layout=layout)
    return kind, main, [state, *((*state[:n_kept], *(job,) * i) for i in range(n_more + 1))]


def _has_static(disk: SimDisk) -> bool:
    """Whether the static is committed: where all records were invalidated the state does not tell."""
    store: Any = LookStore(disk)
    return "s" in ms.open_reader(store).manifest.statics


def _fixed(rng: random.Random, state: State, job: int, *, has_static: bool) -> tuple[Kind, Main, Sequence[State]]:
    kind = Indexed()
    n_kept = N_TIMES if state is None or rng.random() < 0.8 else rng.randint(0, N_TIMES - 1)
    there = {i for i, run in enumerate(state or ()) if run is not None and i < n_kept}
    pending: set[int] = set()
    script: list[Step] = []
    for _ in range(rng.randint(2, 6)):
        free = sorted(set(range(N_TIMES)) - there - pending)
        what = rng.choice(["write", "write", "commit", "take", "invalidate"])
        if what == "write" and free:
            records = rng.sample(free, rng.randint(1, len(free)))
            pending |= set(records)
            script.append((what, tuple(records)))
        elif what == "invalidate" and there:
            records = rng.sample(sorted(there), rng.randint(1, len(there)))
            there -= set(records)
            script.append((what, tuple(records)))
        elif what == "commit":
            there, pending = there | pending, set()
            script.append((what, ()))
        elif what == "take":
            # What it takes is full rows, which `Indexed.states` knows; here nothing is done with those any more.
            script.append((what, ()))
            script.append(("commit", ()))
            there, pending = there | pending, set()
    if state is None:
        return kind, *kind.create(script)
    return kind, *kind.resume(state, script, 10 * job, n_kept, has_static=has_static)

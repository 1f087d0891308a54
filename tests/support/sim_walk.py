"""Chains of jobs that crash and are resumed: one chain at a time, of a seed, or between two numbers of ranks."""

from __future__ import annotations

import random

from tests.support.sim_crash import Crash, crashes_after
from tests.support.sim_disk import SimDisk
from tests.support.sim_job import (
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
from tests.support.sim_ranks import System

__all__ = ["resume_at_four_points", "walk"]


def _run(system: System, disk: SimDisk, n: int, main: Main, generation: int) -> None:
    for process in run_job(system, disk, n, main, generation=generation):
        if process.error is not None:
            raise ViolationError(f"rank {process.who} of {n} failed: {process.error!r}") from process.error


def _checked(system: System, crash: Crash, states: list[State]) -> State:
    state = state_of(system, crash.disk())
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
    tree: tuple[dict[str, bytes], list[str]] = ({}, [])
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
            if state_of(system, SimDisk(*disk.tree())) != states[-1]:
                raise ViolationError(f"in the end there is not {states[-1]}")
            if job == n_jobs:
                check_tidy(disk, states[-1] or ())
                return job + 1
            found = list(crashes_after(SimDisk(*tree), disk.log, rng.randint(0, len(disk.log))))
            crash = rng.choice(found)
            state = _checked(system, crash, states)
        except ViolationError as error:
            error.add_note(f"seed {seed}, job {job} on {n} ranks, from {states[0]}")
            raise
        tree = dict(crash.files), list(crash.folders)
    raise AssertionError

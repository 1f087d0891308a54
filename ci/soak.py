"""The long forms of the simulation. See ci/soak."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

from tests.support.sim_check import Explorer
from tests.support.sim_disk import SimDisk
from tests.support.sim_faults import NUMBERS, fail_every_call
from tests.support.sim_fence import Duel
from tests.support.sim_job import OFF_EDGES, OPTIONS, SCATTERED, State, create_main, resume_main, run_job
from tests.support.sim_kinds import Growing, Indexed, Pace, Pipelined, Script
from tests.support.sim_mutants import MUTANTS, mutated
from tests.support.sim_ranks import System, simulated
from tests.support.sim_scenarios import REWRITE, duel_of_indexed, duel_of_moving, duel_of_pipelined
from tests.support.sim_walk import walk, walk_apart


def say(text: str) -> None:
    print(f"soak: {time.process_time():8.0f} s  {text}", flush=True)


def crash(system: System, n_ranks: int = 4) -> None:
    for n in range(1, n_ranks + 1):
        x = Explorer(system, [1, 2, 3, 4], is_each=True)
        states: list[State] = [None, *((0,) * i for i in range(4))]
        tree = x.explore(n, create_main(3), states)
        say(f"{n} ranks, a new store and 3 records: {dict(x.counts)}")
        for n_kept, at in ((0, -1.0), (1, 0.5), (2, 1.5), (3, 2.5)):
            x = Explorer(system, [1, 2, 3, 4], is_each=True)
            kept = (0,) * n_kept
            x.explore(n, resume_main(2, 1, at=at), [(0, 0, 0), kept, (*kept, 1), (*kept, 1, 1)], tree)
            say(f"{n} ranks, a resume that keeps {n_kept} of 3 records and writes 2: {dict(x.counts)}")
    x = Explorer(system, [1, 2], depth=2, keep=lambda n: n % 20 == 0)
    x.explore(2, create_main(2), [None, (), (0,), (0, 0)])
    say(f"2 ranks, every 20th resume crashed as well: {dict(x.counts)}")


def fence(system: System, every: int = 1) -> None:
    disk = SimDisk()
    run_job(system, disk, 2, create_main(3), generation=0)
    for n_old, who, n_new in ((1, 0, 1), (2, 0, 1), (2, 1, 1), (2, 0, 2), (3, 0, 2), (3, 1, 1), (3, 2, 3), (4, 3, 2)):
        duel = Duel(system, disk.tree(), (0, 0, 0))
        old, new = resume_main(1, 1, is_alone=False), resume_main(1, 2, is_alone=False)
        duel.fight(n_old, old, who, n_new, new, every=every)
        say(f"rank {who} of {n_old} frozen, {n_new} take over: {dict(duel.counts)}")


_SEEDS = 50  # so many are given to a process at a time
_for_ever = contextlib.ExitStack()


@functools.cache
def _system() -> System:
    """Return the simulated system of this process, for all its life."""
    logging.getLogger("mpistream").setLevel(logging.CRITICAL)
    return _for_ever.enter_context(simulated())


def _walked(step: Callable[[System, int], int], seeds: Sequence[int]) -> tuple[int, str]:
    """Walk from some seeds, in a process of the pool; return the number of jobs, and what is wrong, empty: nothing."""
    n_jobs = 0
    for seed in seeds:
        try:
            n_jobs += step(_system(), seed)
        except Exception:  # noqa: BLE001 - the seed has to be named whatever it is
            return n_jobs, f"MPISTREAM_TEST_SEED={seed} fails:\n{traceback.format_exc()}"
    return n_jobs, ""


def _walk_all(step: Callable[[System, int], int], n: int) -> None:
    """Walk from ``n`` seeds in a row, on all cores; the first that fails ends it."""
    first = int(os.environ.get("MPISTREAM_TEST_SEED", random.SystemRandom().randrange(2**32)))
    n_processes = len(os.sched_getaffinity(0))
    print(f"soak: MPISTREAM_TEST_SEED={first}, {n} walks in {n_processes} processes", flush=True)
    began = said = time.monotonic()
    n_walks = n_jobs = 0
    # Not forked: a process that is has what the one before it had cached, and none of its threads.
    with ProcessPoolExecutor(n_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = [range(i, min(i + _SEEDS, first + n)) for i in range(first, first + n, _SEEDS)]
        todo = {pool.submit(_walked, step, part): part for part in parts}
        for done in as_completed(todo):
            more, wrong = done.result()
            if wrong:
                pool.shutdown(wait=False, cancel_futures=True)
                raise SystemExit(f"soak: {wrong}")
            n_walks, n_jobs = n_walks + len(todo[done]), n_jobs + more
            now = time.monotonic()
            if now > said + 10 or n_walks == n:
                said, rate = now, n_walks / (now - began)
                print(f"soak: {now - began:8.0f} s  {n_walks} walks of {n_jobs} jobs, {rate:.1f} a second", flush=True)


def walks(n: int = 10_000) -> None:
    _walk_all(walk, n)


def paces(n: int = 2000) -> None:
    _walk_all(walk_apart, n)


# Of each rank, by turns: how many jobs its background does before each of four commits.
PACES: tuple[Pace, ...] = (
    ((99, 99, 99, 99),),
    ((0, 0, 0, 0),),
    ((99, 99, 99, 99), (0, 0, 0, 99)),
    ((0, 0, 0, 99), (99, 99, 99, 99)),
    ((9, 9, 0, 1), (1, 1, 4, 0)),
    ((1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    ((-2, -2, -2, -2), (2, 2, 2, 2)),
    ((-1, 3, -1, 3), (-3, 1, -3, 1)),
)
SCRIPTS: tuple[Script, ...] = (
    REWRITE,
    (("write", (4,)), ("commit", ()), ("invalidate", (4,)), ("write", (1, 4)), ("commit", ()), ("write", (0,))),
    (("write", (1, 0, 2)), ("take", ()), ("write", (3,)), ("invalidate", (1,)), ("write", (1,)), ("take", ())),
    (("write", (2, 3)), ("commit", ()), ("invalidate", (2,)), ("invalidate", (3,)), ("write", (3, 2)), ("take", ())),
)


def apart(system: System, n_ranks: int = 3) -> None:
    sizes = [1, 2, 3]
    for n in range(1, n_ranks + 1):
        for pace in PACES:
            lazy = Pipelined(pace)
            x = Explorer(system, sizes, kind=lazy)
            main, states = lazy.create(4)
            x.explore(n, main, states)
            say(f"{n} ranks, no wait at pace {pace}, which gives {states}: {dict(x.counts)}")
        for layout in (OFF_EDGES, SCATTERED) if n > 1 else ():
            kind = Growing(layout)
            x = Explorer(system, sizes, is_each=True, kind=kind)
            tree = x.explore(n, create_main(3, layout), [None, *((0,) * i for i in range(4))])
            x.explore(n, resume_main(2, 1, at=0.5, layout=layout), [(0, 0, 0), (0,), (0, 1), (0, 1, 1)], tree)
            lazy = Pipelined(PACES[4], layout)
            x.explore(n, *lazy.create(4))
            say(f"{n} ranks, {layout.region(0, n)} on the first: {dict(x.counts)}")
        for script in SCRIPTS if n < 3 else SCRIPTS[:2]:
            fixed = Indexed()
            x = Explorer(system, sizes, kind=fixed)
            main, states = fixed.create(script)
            tree = x.explore(n, main, states)
            for n_kept in (5, 2):
                there = [i for i, run in enumerate((states[-1] or ())[:n_kept]) if run is not None]
                again: Script = [("invalidate", tuple(there[-1:])), ("write", tuple(there[-1:]))]
                x.explore(n, *fixed.resume(states[-1], again, 5, n_kept), tree)
            say(f"{n} ranks, {script}, then two resumes: {dict(x.counts)}")
    for duel in (duel_of_pipelined, duel_of_moving, duel_of_indexed):
        for who in (0, 1):
            say(f"{duel.__name__}, rank {who} of 2 frozen: {dict(duel(system, who, 3))}")


def every_way(_: int) -> Iterator[tuple[int, bool]]:
    yield from itertools.product(NUMBERS, (False, True))


def calls(system: System) -> None:
    for threads in (0, 1):
        for who in (0, 1):
            options = replace(OPTIONS, threads=threads)
            counts = fail_every_call(system, 2, who, every_way, options)
            say(f"threads={threads}, rank {who} of 2: {dict(counts)}")


def mutants(_: System) -> None:
    missed = []
    for mutant in MUTANTS:
        try:
            with simulated() as system, mutated(mutant) as scenario:
                scenario(system)
        except AssertionError as error:
            say(f"found: {mutant.name}: {str(error)[:100]}")
        else:
            missed.append(mutant.name)
            say(f"NOT FOUND: {mutant.name}")
    if missed:
        raise SystemExit(f"{len(missed)} of {len(MUTANTS)} mutants were not found")
    say(f"all {len(MUTANTS)} mutants were found")


def main() -> None:
    logging.getLogger("mpistream").setLevel(logging.CRITICAL)
    what, *how_much = sys.argv[1:]
    if what in ("walks", "paces"):  # each of their processes has a system of its own
        {"walks": walks, "paces": paces}[what](*map(int, how_much))
        return
    forms = (crash, fence, apart, calls, mutants)
    with simulated() as system:
        {form.__name__: form for form in forms}[what](system, *map(int, how_much))


if __name__ == "__main__":
    main()

"""Short simulations, one for each kind of promise: what a mutant of the protocol has to be found by."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import mpistream as ms
from tests.support.sim_check import Explorer
from tests.support.sim_disk import ProcessStore, SimDisk
from tests.support.sim_faults import SHORT, fail_every_call
from tests.support.sim_fence import Duel, Part
from tests.support.sim_job import (
    OFF_EDGES,
    OPTIONS,
    Layout,
    Main,
    ViolationError,
    create_main,
    resume_main,
    run_job,
    series,
    state_of,
    time_of,
    write,
    write_static,
)
from tests.support.sim_kinds import Growing, Indexed, Pace, Pipelined, Script
from tests.support.sim_ranks import SimTransport, System
from tests.support.sim_tokens import commit_every_choice

__all__ = [
    "REWRITE",
    "claims",
    "crash",
    "drop",
    "duel_of_indexed",
    "duel_of_moving",
    "duel_of_pipelined",
    "faults",
    "fixed",
    "moving",
    "pipelined",
    "refused",
    "rows",
    "tokens",
    "zombie",
]

Tree = tuple[Mapping[str, bytes], Sequence[str]]


def crash(system: System) -> Counter[str]:
    """Crash at every step of a job of two ranks that makes a store and commits two records, and resume."""
    x = Explorer(system, [1, 2])
    x.explore(2, create_main(2), [None, (), (0,), (0, 0)])
    return x.counts


def rows(system: System) -> Counter[str]:
    """Crash at every step of a job of one rank that makes a store and commits three records, the last in a new row."""
    x = Explorer(system, [1])
    x.explore(1, create_main(3), [None, (), (0,), (0, 0), (0, 0, 0)])
    return x.counts


def _three_records(system: System, n: int) -> tuple[dict[str, bytes], list[str]]:
    disk = SimDisk()
    for process in run_job(system, disk, n, create_main(3), generation=0):
        if process.error is not None:
            raise ViolationError(f"{process.error!r}") from process.error
    return disk.tree()


def drop(system: System) -> Counter[str]:
    """Crash at every step of a resume that drops two of three records, one of them in a row that stays."""
    tree = _three_records(system, 2)
    x = Explorer(system, [1, 2])
    x.explore(2, resume_main(1, 1, at=0.5), [(0, 0, 0), (0,), (0, 1)], tree)
    return x.counts


def zombie(system: System) -> Counter[str]:
    """Freeze one of two ranks before each of its calls, let another job resume, and let the first one go on."""
    tree = _three_records(system, 2)
    duel = Duel(system, tree, (0, 0, 0))
    for who in (1, 0):
        duel.fight(2, resume_main(1, 1, is_alone=False), who, 1, resume_main(1, 2, is_alone=False), every=6)
    return duel.counts


def claims(system: System) -> Counter[str]:
    """Let two jobs of one rank resume in the same second."""
    tree = _three_records(system, 1)
    duel = Duel(system, tree, (0, 0, 0))
    duel.fight(1, resume_main(1, 1, is_alone=False), 0, 1, resume_main(1, 2, is_alone=False), every=6)
    return duel.counts


def tokens(system: System) -> Counter[str]:
    """Commit every choice of up to three tokens out of right, late, double, strange and overlapping ones."""
    return commit_every_choice(system)


def faults(system: System) -> Counter[str]:
    """Let each call of rank 1 of two, then of rank 0, fail with EIO, and writes be short."""
    total: Counter[str] = Counter()
    for who in (1, 0):
        total += fail_every_call(system, 2, who, lambda n: iter([(errno.EIO, n % 2 == 0)]), OPTIONS)
    total += fail_every_call(system, 2, 1, lambda n: iter([(SHORT, True)]), OPTIONS)
    return total


# Rank 0 has its static at the first commit and the first row at the second, rank 1 each of them one commit later.
UNEVEN: Pace = ((9, 9, 0, 1), (1, 1, 4, 0))


def pipelined(system: System) -> Counter[str]:
    """Crash at every step of two ranks that commit two records without a wait, one slower than the other."""
    kind = Pipelined(UNEVEN)
    x = Explorer(system, [1, 2], kind=kind)
    x.explore(2, *kind.create(2))
    return x.counts


def moving(system: System, layout: Layout = OFF_EDGES) -> Counter[str]:
    """Crash at every step of two ranks that send each other what they hold of a row that has a record already."""
    x = Explorer(system, [3, 1, 2], kind=Growing(layout))
    tree = _made(system, 3, create_main(1, layout))
    x.explore(2, resume_main(1, 1, layout=layout), [(0,), (0,), (0, 1)], tree)
    return x.counts


def _refused_main(layout: Layout) -> Main:
    """Return a job of which rank 1 gives a block of a wrong shape first, of each record; then all write it again."""

    def main(comm: SimTransport, disk: SimDisk) -> None:
        store: Any = ProcessStore(comm.who)
        region = layout.region(comm.rank, comm.size)
        w = ms.write_open(store, layout.schema, comm=comm, region=region, takeover=True, options=OPTIONS)
        write_static(w)
        for i in range(2):
            n = 7 if comm.rank == 1 else w.shape_of("u")[0]
            try:
                w.write_record(time_of(i), {"u": np.zeros(n, np.int32), "n": series(i, 0)})
            except ms.SchemaError as error:
                if "rank 1" not in str(error):
                    raise ViolationError(f"rank {comm.rank} is told: {error}") from error
            else:
                raise ViolationError(f"rank {comm.rank} was told nothing of a wrong block of rank 1")
            write(w, comm.rank, i, 0)
        w.close()

    return main


def refused(system: System) -> Counter[str]:
    """Give a wrong block on one rank before anything moves: all ranks refuse it, and no piece is left behind."""
    disk = SimDisk()
    for process in run_job(system, disk, 2, _refused_main(OFF_EDGES), generation=0):
        if process.error is not None:
            raise ViolationError(f"rank {process.who}: {process.error!r}") from process.error
    if (state := state_of(system, disk)) != (0, 0):
        raise ViolationError(f"in the end there is {state}")
    return Counter(runs=1)


# A record is written again, beside one in its row that stays; another one only ceases to be committed.
REWRITE: Script = (("write", (3, 0, 2)), ("commit", ()), ("invalidate", (0, 3)), ("write", (3,)), ("commit", ()))


def fixed(system: System) -> Counter[str]:
    """Crash at every step of two ranks that invalidate two records, and write one of them again beside a new one."""
    kind = Indexed()
    x = Explorer(system, [1, 2], kind=kind)
    main, states = kind.create([("write", (3, 0, 1)), ("commit", ())])
    script: Script = [("invalidate", (0, 3)), ("write", (2, 0)), ("commit", ())]
    x.explore(2, *kind.resume(states[-1], script, 1), _made(system, 2, main))
    return x.counts


def _made(system: System, n: int, main: Main) -> Tree:
    disk = SimDisk()
    for process in run_job(system, disk, n, main, generation=0):
        if process.error is not None:
            raise ViolationError(f"{process.error!r}") from process.error
    return disk.tree()


def duel_of_pipelined(system: System, who: int, every: int) -> Counter[str]:
    """Freeze one of two ranks that do not wait for their commits, let another job resume, and let it go on."""
    kind = Pipelined(UNEVEN)
    main, states = kind.create(2)
    tree = _made(system, 2, main)
    duel = Duel(system, tree, states[-1], kind=kind)
    old, _ = kind.resume(states[-1], 3, 1)
    duel.fight(2, old, who, 1, resume_main(1, 2, is_alone=False), every=every)
    return duel.counts


def duel_of_moving(system: System, who: int, every: int) -> Counter[str]:
    """Freeze one of two ranks between which pieces move, let another job resume on one, and let it go on."""
    kind = Growing(OFF_EDGES)
    duel = Duel(system, _made(system, 2, create_main(3, OFF_EDGES)), (0, 0, 0), kind=kind)
    old, new = (resume_main(1, run, is_alone=False, layout=OFF_EDGES) for run in (1, 2))
    duel.fight(2, old, who, 1, new, every=every)
    return duel.counts


def duel_of_indexed(system: System, who: int, every: int) -> Counter[str]:
    """Freeze one of two ranks that write a record again, while another job does it to one of the same row."""
    kind = Indexed()
    main, states = kind.create([("write", (0, 1, 3)), ("commit", ())])
    tree, state = _made(system, 2, main), states[-1]
    first: Script = [("invalidate", (0,)), ("write", (0, 2)), ("commit", ())]
    second: Script = [("write", (4,)), ("invalidate", (1,)), ("write", (1,)), ("commit", ())]
    old, old_states = kind.resume(state, first, 1, is_alone=False)
    new, new_states = kind.resume(state, second, 2, is_alone=False)
    duel = Duel(system, tree, state, kind=kind, parts=[Part((0, 2), old_states), Part((1, 4), new_states)])
    duel.fight(2, old, who, 1, new, every=every)
    return duel.counts

"""Short simulations, one for each kind of promise: what a mutant of the protocol has to be found by."""

from __future__ import annotations

import errno
from collections import Counter

from tests.support.sim_check import Explorer
from tests.support.sim_disk import SimDisk
from tests.support.sim_faults import SHORT, fail_every_call
from tests.support.sim_fence import Duel
from tests.support.sim_job import OPTIONS, ViolationError, create_main, resume_main, run_job
from tests.support.sim_ranks import System
from tests.support.sim_tokens import commit_every_choice

__all__ = ["claims", "crash", "drop", "faults", "rows", "tokens", "zombie"]


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

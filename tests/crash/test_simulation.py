"""The project's own protocol, crashed and overtaken at every step of small jobs, over a disk that knows what is synced.

What is enumerated, by `tests.support.sim_check` and its neighbours:

* Jobs of 1 to 4 ranks that make a store and commit 1 to 3 records one by one (a static, a coordinate, a series, blobs,
  rows of two records), at *every* consistent cut of their events outside the stage folders; at each cut what survives
  is chosen as the head of `tests.support.sim_crash` says. Each distinct state that is left is read, compared with the
  closed form of the data, resumed and written on; the sizes 1 to 4 of the resuming job take turns over the states.
* The same for resumes that drop records, and, at a few of the states, for the resume that follows the crash.
* A job of two or three ranks of which one is frozen before each call that another job could notice, while another job
  resumes; that one stops before every n-th of its own such calls, where the frozen one goes on to its end. The same
  for two jobs that resume at once. The lease is passed over.
* A job of 1 to 6 ranks, crashed at four points of a commit and resumed on 1 to 6 ranks; chains of jobs at random.
* Every choice of up to three tokens out of fourteen, in a store that parts have written.

What is not: threads (they sync one by one here), commits that do not wait, other orders in which ranks get
messages (they change no name that two ranks share), a second crash at the states between, more than one change of turn
between two jobs (`ci/soak` has more of each), rearranging, fixed times, several streams (`tests/model` has
these, without loss of power).
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support import sim_scenarios
from tests.support.sim_check import Explorer
from tests.support.sim_crash import crashes_after
from tests.support.sim_disk import SimDisk
from tests.support.sim_fence import Duel
from tests.support.sim_job import create_main, resume_main, run_job
from tests.support.sim_mutants import MUTANTS, mutated
from tests.support.sim_ranks import System, simulated
from tests.support.sim_walk import resume_at_four_points, walk

pytestmark = pytest.mark.slow


@pytest.fixture
def system(caplog: pytest.LogCaptureFixture) -> Iterator[System]:
    """A simulated system in the place of the real one."""
    caplog.set_level(logging.CRITICAL, "mpistream")
    with simulated() as found:
        yield found


def _committed(system: System, n: int) -> tuple[dict[str, bytes], list[str]]:
    """Return a store with three records, of a job of n ranks."""
    disk = SimDisk()
    assert [p.error for p in run_job(system, disk, n, create_main(3), generation=0)] == [None] * n
    return disk.tree()


@pytest.mark.parametrize(("n", "n_records", "n_states"), [(1, 3, 300), (2, 3, 550), (3, 2, 750), (4, 1, 1200)])
def test_every_crash_of_a_job_is_recovered(system: System, n: int, n_records: int, n_states: int) -> None:
    """After a loss of power at any step the records that were told are there, whole, no others, and it goes on."""
    x = Explorer(system, [1, 2, 3, 4])
    x.explore(n, create_main(n_records), [None, *((0,) * i for i in range(n_records + 1))])
    print(dict(x.counts))
    assert x.counts["states"] > n_states


@pytest.mark.parametrize(("n", "at", "n_kept"), [(1, 0.5, 1), (2, 1.5, 2), (4, 0.5, 1)])
def test_every_crash_of_a_resume_is_recovered(system: System, n: int, at: float, n_kept: int) -> None:
    """A resume that drops records and loses power at any step is finished by the next one (I6)."""
    x = Explorer(system, [1, 2, 3, 4])
    kept = (0,) * n_kept
    x.explore(n, resume_main(1, 1, at=at), [(0, 0, 0), kept, (*kept, 1)], _committed(system, n))
    print(dict(x.counts))
    assert x.counts["states"] > 150


def test_every_crash_of_a_resume_after_a_crash_is_recovered(system: System) -> None:
    """A resume of what a crash has left loses power at any step, too."""
    x = Explorer(system, [1, 2], depth=2, keep=lambda n: n % 500 == 60)
    x.explore(1, create_main(2), [None, (), (0,), (0, 0)])
    print(dict(x.counts))
    assert x.counts["crashes of a resume"] >= 1
    assert x.counts["states"] > 400


@pytest.mark.parametrize(("n", "who", "n_new", "every"), [(2, 1, 1, 2), (2, 0, 2, 12), (3, 2, 1, 3)])
def test_a_frozen_rank_can_do_nothing_after_a_resume(system: System, n: int, who: int, n_new: int, every: int) -> None:
    """An owner or contributor frozen at any call changes nothing when it wakes, and is told; nothing is lost."""
    duel = Duel(system, _committed(system, 2), (0, 0, 0))
    duel.fight(n, resume_main(1, 1, is_alone=False), who, n_new, resume_main(1, 2, is_alone=False), every=every)
    print(dict(duel.counts))
    assert duel.counts["fenced"] > 100


def test_of_two_jobs_that_resume_at_once_one_goes_on(system: System) -> None:
    """Whoever claims the later epoch goes on; the other is fenced, or had committed before, and that stays."""
    counts = sim_scenarios.claims(system)
    print(dict(counts))
    assert counts["meetings"] > 900


def test_only_the_right_tokens_commit(system: System) -> None:
    """Of all choices of tokens that are right, late, double, strange, missing or overlapping one commits."""
    assert sim_scenarios.tokens(system) == Counter({"choices": 680, "commits": 1})


@pytest.mark.parametrize("before", [1, 2, 3, 4, 5, 6])
def test_a_job_is_resumed_on_any_number_of_ranks(system: System, before: int) -> None:
    """Crashed at four points of a commit and resumed on 1 to 6 ranks, the end is that of an uninterrupted run."""
    assert resume_at_four_points(system, before, [1, 2, 3, 4, 5, 6]) == 4 * 6


def test_random_chains_of_crashes(system: System) -> None:
    """Jobs on 1 to 6 ranks that crash at random, up to four in a row, with or without dropping records."""
    first = int(os.environ.get("MPISTREAM_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"MPISTREAM_TEST_SEED={first}")
    for seed in range(first, first + 30):
        walk(system, seed)


def test_blobs_that_a_resume_has_removed_do_not_come_back(system: System) -> None:
    """Of a commit that failed, resumes that lose power at once bring no blob back, however often (I1)."""
    disk = SimDisk()
    assert [p.error for p in run_job(system, disk, 2, create_main(2), generation=0)] == [None, None]
    # Everything of the second commit is in place but its manifest.
    manifests = [k for k, e in enumerate(disk.log) if e.is_manifest]
    crash = list(crashes_after(SimDisk(), disk.log, manifests[2]))[-1]
    for generation in (1, 2, 3):
        disk = SimDisk(crash.files, crash.folders)
        assert run_job(system, disk, 1, resume_main(0, 1), generation=generation)[0].error is None
        told = next(k for k, e in enumerate(disk.log) if e.kind == "ack")
        # Of all that is not durable when the resume returns, nothing is left.
        crash = next(crashes_after(SimDisk(crash.files, crash.folders), disk.log, told + 1))
    assert [p for p in crash.files if "/blobs/" in p] == ["store/.mpistream/blobs/1-1-1"]


# Those that take a second each; all of them are in ci/soak.
_QUICK = (
    "what is staged is not synced",
    "a manifest is not synced before its rename",
    "shards are not synced before their rename",
    "no folder is synced",
    "the folder of the manifest is not synced",
    "only the innermost folder is synced",
    "documents are published before the manifest",
    "a resume moves what it drops before its manifest",
    "an epoch is looked up before a rename, in the place of the fence",
    "the manifest is read before the fence",
    "an epoch is used again",
    "a file that is gone counts as placed",
    "what is removed does not go through the stage folder",
    "a failure in a token is passed over",
    "cells are not counted",
)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name in _QUICK], ids=lambda m: m.name)
def test_a_broken_protocol_is_found(system: System, mutant: object) -> None:
    """Each mutant of the protocol ends in a violation: the simulation sees what it is meant to see."""
    with mutated(mutant) as scenario, pytest.raises(AssertionError) as caught:  # type: ignore[arg-type]
        scenario(system)
    print(caught.value)


def test_there_are_thirty_mutants() -> None:
    """Fifteen are tried here and all in the long form; each has a name of its own."""
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 30
    assert {m.name for m in MUTANTS} >= set(_QUICK)
    assert len(_QUICK) == 15

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
* Commits that do not wait, of a rank whose background is ahead and one whose background is behind: each commit takes
  the rows and statics that are staged on both by then, and no others; close takes the rest.
* Ranks that hold no whole shards and send each other pieces, which go into a row with a committed record.
* Fixed times: records in any order, two of them invalidated, one of these written again beside a new one. Whatever the
  array ``committed`` names is, to a reader that knows Zarr alone, a whole record that is or was committed.
* Of each of these three a rank that is frozen while another job resumes, and chains of jobs at random.

What is not: threads (what is staged by when is up to the script, and small objects are synced one by one), other orders
in which ranks get messages (they change no name that two ranks share), a second crash at the states between, more than
one change of turn between two jobs, more paces and scripts (`ci/soak` has more of each), several streams and location
series (`tests/model` has these, without loss of power).
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.support import sim_scenarios
from tests.support.sim_check import Explorer
from tests.support.sim_crash import crashes_after
from tests.support.sim_disk import SimDisk
from tests.support.sim_fence import Duel
from tests.support.sim_job import OFF_EDGES, SCATTERED, Layout, create_main, resume_main, run_job
from tests.support.sim_mutants import MUTANTS, mutated
from tests.support.sim_ranks import System, simulated
from tests.support.sim_walk import resume_at_four_points, walk, walk_apart

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


def test_an_old_name_whose_folder_was_synced_does_not_come_back() -> None:
    """A renamed file may be there under both names, but for an old one whose folder was synced since."""
    tree: tuple[dict[str, bytes], list[str]] = ({"store/a/x": b"x", "store/a/y": b"y"}, ["store/a", "store/b"])
    disk = SimDisk(*tree)
    disk.rename("/0/store/a/x", "/0/store/b/x")
    disk.fsync(disk.open("/0/store/a", os.O_RDONLY | os.O_DIRECTORY))
    disk.rename("/0/store/a/y", "/0/store/b/y")
    found = [set(crash.files) for crash in crashes_after(SimDisk(*tree), disk.log, len(disk.log))]
    assert {"store/b/x", "store/a/y", "store/b/y"} in found
    assert not any("store/a/x" in names for names in found)


def test_every_crash_of_commits_that_do_not_wait_is_recovered(system: System) -> None:
    """Each commit takes what every rank has staged, durably: after a loss of power just that is there (I2)."""
    counts = sim_scenarios.pipelined(system)
    print(dict(counts))
    assert counts["states"] > 250


@pytest.mark.parametrize("layout", [OFF_EDGES, SCATTERED], ids=["off the edges", "scattered"])
def test_every_crash_of_ranks_that_send_pieces_is_recovered(system: System, layout: Layout) -> None:
    """Of shards that are put together from several ranks' pieces a loss of power at any step leaves whole ones (I3)."""
    counts = sim_scenarios.moving(system, layout)
    print(dict(counts))
    assert counts["states"] > 80


def test_every_crash_of_records_that_are_written_again_is_recovered(system: System) -> None:
    """A record is rewritten when no reader is told of it any more, and its neighbours stay what they were (I5)."""
    counts = sim_scenarios.fixed(system)
    print(dict(counts))
    assert counts["states"] > 80


def test_a_wrong_block_is_refused_before_pieces_move(system: System) -> None:
    """All ranks are told of one rank's wrong block, and what they write next is whole."""
    assert sim_scenarios.refused(system) == Counter(runs=1)


@pytest.mark.parametrize(
    ("duel", "who", "every"),
    [
        (sim_scenarios.duel_of_pipelined, 1, 40),
        (sim_scenarios.duel_of_moving, 1, 20),
        (sim_scenarios.duel_of_indexed, 1, 60),
    ],
)
def test_a_rank_frozen_in_other_jobs_can_do_nothing_after_a_resume(
    system: System, duel: Callable[[System, int, int], Counter[str]], who: int, every: int
) -> None:
    """What a job was told stays, whether its commits wait or not, pieces move or records are written again."""
    counts = duel(system, who, every)
    print(dict(counts))
    assert counts["fenced"] >= 10


def test_random_chains_of_other_jobs(system: System) -> None:
    """Chains of crashes of such jobs: paces, what ranks hold and the order of records are random."""
    first = int(os.environ.get("MPISTREAM_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"MPISTREAM_TEST_SEED={first}")
    for seed in range(first, first + 10):
        walk_apart(system, seed)


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
    "a commit takes a record whose sync is still under way on one rank",
    "a commit that does not wait takes what rank 0 has",
    "a record that one rank still stages is not waited for by close",
    "a static that one rank still stages is committed",
    "a record is taken before its pieces have come",
    "pieces move before all ranks have agreed",
    "a rewritten record is placed before the manifest withdrew it",
    "the array committed names a record while it is written again",
    "the array committed is withdrawn but not synced",
    "a resume leaves the array committed as it is",
    "a row is begun anew for a record of it that is written again",
    "blobs of a record that was invalidated stay",
)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name in _QUICK], ids=lambda m: m.name)
def test_a_broken_protocol_is_found(system: System, mutant: object) -> None:
    """Each mutant of the protocol ends in a violation: the simulation sees what it is meant to see."""
    with mutated(mutant) as scenario, pytest.raises(AssertionError) as caught:  # type: ignore[arg-type]
        scenario(system)
    print(caught.value)


def test_there_are_fifty_mutants() -> None:
    """Half of them are tried here and all in the long form; each has a name of its own."""
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 50
    assert {m.name for m in MUTANTS} >= set(_QUICK)
    assert len(_QUICK) >= 25

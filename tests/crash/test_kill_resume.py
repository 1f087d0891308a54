"""Real MPI jobs are killed with SIGKILL while they write; what was acknowledged is there, and a resume goes on."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from tests.support import writing_job
from tests.support.collective import at_most, keys
from tests.support.mpi_run import MPIJob, mpiexec, start_mpiexec
from tests.support.scene import assert_holds, plain, time_of
from tests.support.verified import assert_no_damage, assert_sound
from tests.support.wait import wait_until
from tests.support.writing_job import SCENE, SHARD, said_path

N_KILLS = int(os.environ.get("MPISTREAM_TEST_KILLS", "34"))
# Each a test of its own, with so many kills.
N_CHAINS = int(os.environ.get("MPISTREAM_TEST_CHAINS", "1"))
OPTIONS = ms.Options(durability="none", timeout=20)


def _args(url: Path, n_records: int, **how: Any) -> list[str]:
    return ["-m", "mpi4py", writing_job.__file__, str(url), str(n_records), json.dumps(how)]


def _start(n_ranks: int, url: Path, n_records: int, **how: Any) -> MPIJob:
    said_path(url).unlink(missing_ok=True)
    return start_mpiexec(n_ranks, _args(url, n_records, **how))


def _said(url: Path, word: str) -> list[dict[str, Any]]:
    """Return what the last job has said until now with this word in it; the last line may be cut short by a kill."""
    if not said_path(url).exists():
        return []
    lines = said_path(url).read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("}\n")]
    return [line for line in found if word in line]


def _has_ended(job: MPIJob) -> bool:
    # Looks only: the job itself still has to wait for its launcher.
    return os.waitid(os.P_PID, job.launcher_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait_for(job: MPIJob, url: Path, word: str, n: int = 1, timeout: float = 60) -> list[dict[str, Any]]:
    """Wait until the job has said so many lines with this word."""

    def enough() -> list[dict[str, Any]]:
        found = _said(url, word)
        if len(found) < n and _has_ended(job):
            raise AssertionError(f"the job ended before it said {word!r} {n} times")
        return found if len(found) >= n else []

    return wait_until(enough, timeout, f"{n} lines with {word!r}")


def _run_to_hang(n_ranks: int, url: Path, n_records: int, **how: Any) -> None:
    """Start a job that stops for good at the place that ``hang`` names, and kill it there."""
    with _start(n_ranks, url, n_records, **how) as job:
        _wait_for(job, url, "hanging")
        # Another rank than 0 may get so far before rank 0 has published the commit before.
        armed = how.get("arm_at", 0)
        wait_until(
            lambda: (
                not armed
                or {"committed": armed} in _said(url, "committed")
                or armed in [said["opened"] for said in _said(url, "opened")]
            ),
            60,
            f"commit {armed}",
        )
        job.kill_ranks()


def _assert_committed(url: Path, n_min: int, n_max: int, *, n_plain_min: int | None = None) -> int:
    """Assert that the store holds so many right records, for our reader and for zarr-python; return their number."""
    reader = ms.open_reader(url)
    n = reader.n_records
    assert n_min <= n <= n_max
    np.testing.assert_array_equal(reader.times, [time_of(i) for i in range(n)], strict=True)
    # The documents are written after the manifest: plain readers may see less than we, never more.
    group = plain(url)
    n_plain = group["time"].shape[0]
    assert (n_min if n_plain_min is None else n_plain_min) <= n_plain <= n
    for name in SCENE.variables:
        expected = np.stack([SCENE.whole(name, i) for i in range(max(n, 1))])[:n]
        np.testing.assert_array_equal(group[name][...], expected[:n_plain], err_msg=name, strict=True)
        for i in range(n):
            np.testing.assert_array_equal(reader.read_record(name, i), expected[i], err_msg=f"{name} {i}", strict=True)
    assert_no_damage(url)
    return n


def _resume_alone(url: Path, n_expected: int, **how: Any) -> ms.StreamWriter:
    """Resume in this process, at once, and assert that nothing but committed records is left."""
    with at_most(15):
        w = ms.write_resume(url, options=OPTIONS, **how)
    assert w.n_records == n_expected
    assert keys(url) == SCENE.keys(n_expected, SHARD, statics=w.reader.manifest.statics)
    assert os.listdir(url / ".mpistream/stage") == [str(w.epoch)]
    return w


def _finish(w: ms.StreamWriter, url: Path, n_more: int = 3) -> None:
    """Write some records more with a writer of this process, close it, and look at everything."""
    n = w.n_records + n_more
    with w:
        if not w.is_committed("topo"):
            SCENE.write_statics(w)
        for i in range(w.n_records, n):
            SCENE.write(w, i)
            w.commit()
    assert_holds(url, SCENE, [0] * n)
    assert keys(url) == SCENE.keys(n, SHARD)
    # Of the stage folder and of what was dropped nothing is left.
    expected = {"manifest.json", "lease", f"layout-{w.epoch}.json", *(f"epochs/{e}" for e in range(1, w.epoch + 1))}
    assert keys(url, ours=True) == {f".mpistream/{name}" for name in expected}
    assert_sound(url)


@pytest.mark.slow
@pytest.mark.parametrize("chain", range(N_CHAINS))
def test_job_killed_again_and_again_loses_nothing_that_was_acknowledged(tmp_path: Path, chain: int) -> None:
    """All ranks are killed at random points, on changing numbers of ranks, rearranging or not (P-15, P-16): each record
    acknowledged before is there and right, none beyond the manifest, nothing is left of the killed, and the end is a
    run's without a kill.
    """
    seed = int(os.environ.get("MPISTREAM_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"MPISTREAM_TEST_SEED={seed}")
    rng = random.Random(seed + 2**32 * chain)
    url, n = tmp_path / "s", 0
    n_unacknowledged = 0
    for _ in range(N_KILLS):
        every = rng.choice([1, 1, 2, 3])
        options = {"durability": rng.choice(["none", "fsync"]), "threads": rng.choice([0, 1, 2])}
        wait, rearranged = rng.random() < 2 / 3, rng.random() < 0.5
        how = {"every": every, "options": options, "wait": wait, "rearranged": rearranged}
        with _start(rng.randint(1, 4), url, 10_000, **how) as job:
            opened = _wait_for(job, url, "opened")[0]
            assert (opened["opened"], opened["stray"], opened["stage"]) == (n, [], [str(opened["epoch"])])
            _wait_for(job, url, "committed", rng.randint(1, 4))
            time.sleep(rng.random() * 0.1)  # a random point of the next commits
            job.kill_ranks()
            job.kill()
            acknowledged = _said(url, "committed")[-1]["committed"]
        # Without a wait any number may wait for the commit in which the job is killed.
        # Nor does it wait for the documents.
        bounds = (acknowledged, acknowledged + every) if wait else (acknowledged, 10_000)
        n = _assert_committed(url, *bounds, n_plain_min=acknowledged if wait else n)
        n_unacknowledged += n - acknowledged > 0
    print(f"{n} records, {n_unacknowledged} of {N_KILLS} kills between a commit and its acknowledgement")

    total = n + 5
    mpiexec(3, _args(url, total), timeout=60)
    mpiexec(2, _args(tmp_path / "whole", total, every=7), timeout=60)
    assert_holds(url, SCENE, [0] * total)
    assert keys(url) == SCENE.keys(total, SHARD)
    killed, whole = plain(url), plain(tmp_path / "whole")
    for name in ("time", *SCENE.variables, *SCENE.statics, *SCENE.coords):
        assert killed[name][...].tobytes() == whole[name][...].tobytes()
        assert (url / name / "zarr.json").read_bytes() == (tmp_path / "whole" / name / "zarr.json").read_bytes()
    assert_sound(url)


@pytest.mark.parametrize("rank", [0, 2])
def test_job_that_loses_one_rank_can_be_resumed(tmp_path: Path, rank: int) -> None:
    """When one rank is killed, the launcher ends the job, and all that was acknowledged is there."""
    url = tmp_path / "s"
    with _start(3, url, 10_000) as job:
        _wait_for(job, url, "committed", 3)
        job.kill_ranks(ranks=[rank])
        assert job.wait(30) != 0
        job.kill()
        acknowledged = _said(url, "committed")[-1]["committed"]
    n = _assert_committed(url, acknowledged, acknowledged + 1)
    mpiexec(2, _args(url, n + 3), timeout=60)
    assert_holds(url, SCENE, [0] * (n + 3))
    assert keys(url) == SCENE.keys(n + 3, SHARD)
    assert_sound(url)


# Where a job of three ranks is killed: who hangs in which call on which key, in the commit of which record, and how
# many records are committed then. Record 6 is within a row, record 8 begins one; rank 2 has two of the four shards, and
# where the ranks' rows have to be rearranged, one rank writes them.
PLACES: dict[str, tuple[dict[str, Any], int, int]] = {
    "within the write of a shard": ({"rank": 1, "call": "stage", "prefix": ""}, 6, 6),
    "between write and rename of a shard": ({"rank": 1, "call": "place", "prefix": "u/c/"}, 6, 6),
    "between the renames of two shards": ({"rank": 2, "call": "place", "prefix": "u/c/2/3/"}, 8, 8),
    "before a sync of folders": ({"rank": 2, "call": "sync_folders", "prefix": "u/c/"}, 6, 6),
    "before the time chunk": ({"rank": 0, "call": "place", "prefix": "time/c/"}, 6, 6),
    "before the manifest": ({"rank": 0, "call": "place", "prefix": ".mpistream/manifest.json"}, 8, 8),
    "before the first commit's": ({"rank": 0, "call": "place", "prefix": ".mpistream/manifest.json", "after": 1}, 0, 0),
    "after the manifest": ({"rank": 0, "call": "sync_folders", "prefix": ".mpistream/manifest.json"}, 6, 7),
    "before the group's document": ({"rank": 0, "call": "place", "prefix": "zarr.json"}, 6, 7),
    "before an array's document": ({"rank": 0, "call": "place", "prefix": "zonal/zarr.json"}, 8, 9),
    "rearranged, within the write of a shard": ({"rank": 0, "call": "stage", "prefix": ""}, 6, 6),
    "rearranged, between write and rename of a shard": ({"rank": 0, "call": "place", "prefix": "u/c/"}, 8, 8),
}


@pytest.mark.parametrize("place", PLACES)
def test_job_killed_at_a_step_of_a_commit_is_resumed_from_before_or_after_it(tmp_path: Path, place: str) -> None:
    """The record is committed iff the manifest was renamed; a resume removes what was placed or staged beyond it."""
    hang, record, n = PLACES[place]
    url = tmp_path / "s"
    _run_to_hang(3, url, 20, hang=hang, arm_at=record, rearranged=place.startswith("rearranged"))
    assert _assert_committed(url, record, record + 1) == n
    _finish(_resume_alone(url, n), url)


@pytest.mark.parametrize(
    "hang",
    [
        {"rank": 0, "call": "place", "prefix": ".mpistream/lease"},
        {"rank": 0, "call": "place", "prefix": "y/c/"},
        {"rank": 0, "call": "place", "prefix": "u/zarr.json"},
        {"rank": 0, "call": "place", "prefix": ".mpistream/manifest.json"},
    ],
    ids=lambda h: h["prefix"],
)
def test_job_killed_while_it_makes_the_store_has_made_none(tmp_path: Path, hang: dict[str, Any]) -> None:
    """What is left is no Zarr store and can't be resumed; write_open makes it anew in its place."""
    url = tmp_path / "s"
    _run_to_hang(2, url, 5, hang=hang)
    assert not (url / "zarr.json").exists()
    with pytest.raises(ms.ResumeError) as caught:
        ms.write_resume(url, options=OPTIONS)
    assert caught.value.kind == "no_store"
    mpiexec(2, _args(url, 5), timeout=60)
    assert_holds(url, SCENE, [0] * 5)
    assert keys(url) == SCENE.keys(5, SHARD)
    assert_sound(url)


def _aside(url: Path) -> dict[str, bytes]:
    """Return what is kept under dropped/<epoch>, by the keys that it had."""
    folders = sorted((url / ".mpistream/dropped").glob("*"), key=lambda p: int(p.name.split(".")[0]), reverse=True)
    return {k: (f / k).read_bytes() for f in folders for k in keys(f)}


def test_job_killed_right_after_a_resume_has_destroyed_nothing(tmp_path: Path) -> None:
    """Records dropped by `at` are still there under dropped/<epoch> (P-12), over restarts that die at once as well."""
    url = tmp_path / "s"
    mpiexec(2, _args(url, 11), timeout=60)
    old = {k: (url / k).read_bytes() for k in keys(url)}
    for n_kept, n_ranks in ((9, 3), (6, 2)):
        with _start(n_ranks, url, 20, at=time_of(n_kept - 1), only_open=True) as job:
            opened = _wait_for(job, url, "opened")[0]
            assert (opened["opened"], opened["stray"]) == (n_kept, [])
            job.kill_ranks()
    assert_holds(url, SCENE, [0] * 6)
    assert_no_damage(url)

    # Records 6 to 10 were in the rows 1 and 2; time, and what lies over time alone, is one chunk.
    lost = {k for k in old if k.startswith(("u/c/1/", "u/c/2/", "zonal/c/1/", "zonal/c/2/", "time/c/", "total/c/"))}
    assert _aside(url) == {k: old[k] for k in lost}
    w = _resume_alone(url, 6)
    assert _aside(url) == {k: old[k] for k in lost}
    _finish(w, url)


@pytest.mark.parametrize(
    ("hang", "n"),
    [
        ({"call": "place", "prefix": ".mpistream/manifest.json"}, 11),
        ({"call": "place", "prefix": "zarr.json"}, 6),
        ({"call": "place", "prefix": "zonal/zarr.json"}, 6),
        ({"call": "move", "prefix": "u/c/2"}, 6),
        ({"call": "move", "prefix": "zonal/c/2"}, 6),
        ({"call": "move", "prefix": ".mpistream/stage/2/0/", "after": 2}, 6),  # in the copies of row 1
        ({"call": "move", "prefix": ".mpistream/dropped/2.open"}, 6),
    ],
    ids=lambda v: f"{v['call']} {v['prefix']}" if isinstance(v, dict) else "",
)
def test_job_killed_within_a_resume_is_resumed_all_the_same(tmp_path: Path, hang: dict[str, Any], n: int) -> None:
    """A resume that dies at any step is finished by the next one (I6), and what it dropped is not lost."""
    url = tmp_path / "s"
    mpiexec(2, _args(url, 11), timeout=60)
    old = {k: (url / k).read_bytes() for k in keys(url)}
    _run_to_hang(2, url, 20, at=time_of(5), hang={"rank": 0, **hang})

    _resume_alone(url, n).close()
    w = _resume_alone(url, 6, at=time_of(5))
    lost = {k for k in old if k.startswith(("u/c/1/", "u/c/2/", "zonal/c/1/", "zonal/c/2/", "time/c/", "total/c/"))}
    assert _aside(url) == {k: old[k] for k in lost}
    _finish(w, url)


@pytest.mark.parametrize(
    "hang",
    [{"call": "move", "prefix": ".mpistream/dropped"}, {"call": "delete_tree", "prefix": ".mpistream/stage/2/0/"}],
    ids=lambda h: h["call"],
)
def test_job_killed_while_it_deletes_what_was_dropped_goes_on(tmp_path: Path, hang: dict[str, Any]) -> None:
    """The first commit after a resume deletes what was dropped; a kill within that leaves nothing for ever."""
    url = tmp_path / "s"
    mpiexec(2, _args(url, 11), timeout=60)
    _run_to_hang(2, url, 20, at=time_of(5), hang={"rank": 0, **hang}, arm_at=6)
    assert _assert_committed(url, 7, 7) == 7
    _finish(_resume_alone(url, 7), url)

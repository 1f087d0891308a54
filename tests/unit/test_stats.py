"""What a writer counts, alone and over all ranks, and how it says so."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path

import numpy as np
import pytest

import mpistream as ms
from mpistream.local_store import LocalStore, sync_time
from mpistream.stats import RunStats, WriterStats
from tests.support.faults import FaultyStore
from tests.support.plain import append_schema

WHAT = ("record", "commit", "wait", "encode", "write", "sync")
SCHEMA = append_schema({"y": 4, "x": 512}, {"v": ms.Variable(("time", "y", "x"), "f4")}, shard_shape={"y": 1})


def stats_of(rank: int) -> WriterStats:
    """Return those of a rank: each number of seconds is highest on another one."""
    found = WriterStats(nbytes_in=3000 * 2**20, nbytes_encoded=1000 * 2**20 + rank, n_objects=5)
    for i, what in enumerate(WHAT):
        found.seconds[what] = 1.0 + (i + rank) % 2
    return found


def test_sums_and_maxima_over_ranks() -> None:
    """Blocked is the most of one rank, not the sum of what is most of several."""
    ranks = [stats_of(rank) for rank in range(2)]
    assert [s.blocked for s in ranks] == [3.0, 3.0]
    run = RunStats.of([{**s.to_json(), "elapsed": 60.0 - k} for k, s in enumerate(ranks)], n_records=7, n_commits=3)
    assert (run.n_ranks, run.nbytes_in, run.nbytes_encoded, run.n_objects) == (2, 6000 * 2**20, 2000 * 2**20 + 1, 10)
    assert run.elapsed == 60.0
    assert dict(run.seconds) == {**dict.fromkeys(WHAT, 2.0), "blocked": 3.0}
    assert RunStats(**run.to_json()) == run


def test_the_line_says_it_all() -> None:
    run = RunStats.of([{**stats_of(0).to_json(), "elapsed": 60.0}], n_records=7, n_commits=3)
    assert str(run) == (
        "7 records in 3 commits by 1 rank, 2.93 GiB as 1000 MiB (ratio 3.00) in 5 objects; "
        "seconds of the slowest rank: blocked 3 of 60 (5.0%, 1000 MiB/s), wait 1, encode 2, write 1, sync 2"
    )
    nothing = RunStats.of([{**WriterStats().to_json(), "elapsed": 0.0}], n_records=0, n_commits=0)
    assert (nothing.ratio, WriterStats().ratio) == (None, None)
    assert str(nothing).startswith("0 records in 0 commits by 1 rank, 0 B as 0 B in 0 objects; seconds of the slowest")
    assert "blocked 0 of 0 (all), wait 0" in str(nothing)


def test_syncs_are_clocked_for_each_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sync waits counts where it waits, and apart from the write."""
    store = LocalStore(tmp_path)
    real, spent = os.fsync, 0.002

    def slow(fd: int) -> None:
        end = time.perf_counter() + spent
        while time.perf_counter() < end:
            pass
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    before = sync_time()
    store.stage("a", [b"x"], sync=False)
    assert sync_time() == before
    store.stage("b", [b"x"], sync=True)
    assert sync_time() - before >= spent
    options = ms.Options(threads=0)
    with ms.write_open(tmp_path / "s", SCHEMA, options=options) as w:
        w.write_record(0.0, {"v": 1.0})
    # Four shards and their folders, in the caller's own time.
    assert w.stats.seconds["sync"] > 4 * spent
    assert w.stats.blocked > w.stats.seconds["sync"]


def test_buffers_and_statics_count_as_blocked(tmp_path: Path) -> None:
    """All that is done in our calls: a record that is put piece by piece, a static, a flush."""
    schema = append_schema({"y": 4}, {"v": ms.Variable(("time", "y"), "f4")}, statics={"s": ms.Variable(("y",), "f8")})
    with ms.write_open(tmp_path / "s", schema, options=ms.Options(durability="none", threads=0)) as w:
        seen = [w.stats.blocked]
        with w.record(0.0) as record:
            record.buffer("v")[...] = 1
            seen.append(w.stats.blocked)
            record.put("v", np.zeros(4, "f4"))
            seen.append(w.stats.blocked)
        seen.append(w.stats.blocked)
        w.write_static("s", np.zeros(4))
        seen.append(w.stats.blocked)
        w.flush()
        seen.append(w.stats.blocked)
    assert seen[0] == 0
    assert seen == sorted(set(seen))
    assert (w.stats.nbytes_in, w.stats.seconds["record"]) == (4 * 4 + 4 * 8, seen[4])
    assert w.stats.seconds["commit"] > seen[5] - seen[4] > 0


def test_a_failure_behind_the_back_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the rank that met it, though each of the record's objects fails; the next commit raises it."""
    store = FaultyStore(tmp_path / "s")
    with caplog.at_level(logging.INFO, "mpistream"):
        w = ms.write_open(store, SCHEMA, options=ms.Options(durability="none", threads=1))  # type: ignore[arg-type]
        store.fail("stage", errno.ENOSPC)
        w.write_record(0.0, {"v": 1.0})
        with pytest.raises(ms.CommitError):
            w.commit()
        store.heal()
        w.close()
    found = [r.getMessage() for r in caplog.records if "could not be written" in r.getMessage()]
    # And once more as the commit tries again.
    assert 1 <= len(found) <= 2
    assert all("v/c/0/" in text and os.strerror(errno.ENOSPC) in text for text in found)


def test_parts_speak_for_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is a process of its own."""
    with caplog.at_level(logging.DEBUG, "mpistream"):
        parts = [
            ms.write_open_part(tmp_path / "s", SCHEMA, writer=i, n_writers=2, options=ms.Options(durability="none"))
            for i in range(2)
        ]
        for part in parts:
            part.write_record(0.0, {"v": 1.0})
        parts[0].commit([part.flush() for part in parts])
        for part in parts:
            part.close()
    infos = [r.getMessage().split(": ", 1)[1] for r in caplog.records if r.levelno == logging.INFO]
    assert [text.split(",")[0] for text in infos[:2]] == ["part 0", "part 1"]
    assert infos[2:] == [f"part {i} closed: {part.stats.run}" for i, part in enumerate(parts)]
    assert [part.stats.run.n_records for part in parts if part.stats.run] == [1, 1]
    debugs = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert len([text for text in debugs if ": commit 1: 1 record, 8 objects" in text]) == 1


def test_a_program_without_logging_sees_nothing_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The library installs no handler, and what is no warning goes nowhere by itself."""
    logger = logging.getLogger("mpistream")
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)
    ms.write_open(tmp_path / "s", append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")})).close()
    assert "closed" not in capfd.readouterr().err

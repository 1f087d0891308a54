"""`mpistream bench`: what it advises, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream import benchmarking
from mpistream.benchmarking import Advice, Trial, advise, benchmark, parse_nbytes

pytest.importorskip("typer", reason="needs typer, from the extra cli")
pytest.importorskip("rich", reason="needs rich, from the extra cli")

from typer.testing import CliRunner, Result

from mpistream.cli.verbs import app
from tests.support.mpi_run import mpiexec

KIB, MIB = 1024, 1024**2


def run(*args: str | Path) -> Result:
    # Wide: the help is compared as text.
    return CliRunner().invoke(app, ["bench", *map(str, args)], env={"COLUMNS": "200"})


def trial(profile: str, ratio: float, threads_0: float, default: float, chunk_nbytes: int = MIB) -> Trial:
    return Trial(
        profile=profile, chunk_nbytes=chunk_nbytes, ratio=ratio, limit=1e9, threads_0=threads_0, default=default
    )


def test_the_smallest_output_that_is_hardly_slower_is_advised() -> None:
    """0.95 of the fastest is hardly slower, 0.85 is not; the better of the two writers counts."""
    trials = [trial("none", 1.0, 100.0, 50.0), trial("fast", 1.9, 40.0, 95.0), trial("compact", 2.5, 85.0, 80.0)]
    assert advise(trials, [], 32 * MIB) == Advice(
        profile="fast", chunk_nbytes=MIB, shard_nbytes=32 * MIB, row_length=1, threads=None
    )
    assert advise(trials[:1], [], 32 * MIB).threads == 0


def test_other_inner_chunks_are_advised_only_if_clearly_faster() -> None:
    trials = [trial("fast", 1.9, 100.0, 90.0)]
    layouts = [trial("fast", 1.8, n, 1.0, c) for c, n in ((256 * KIB, 99.0), (MIB, 92.0), (4 * MIB, 100.0))]
    assert advise(trials, layouts, 32 * MIB).chunk_nbytes == MIB
    assert advise(trials, [*layouts[:2], trial("fast", 1.8, 120.0, 1.0, 4 * MIB)], 32 * MIB).chunk_nbytes == 4 * MIB


def test_records_of_small_blocks_share_a_shard_of_4_mib() -> None:
    advice = advise([trial("fast", 1.9, 100.0, 90.0)], [], 512 * KIB)
    assert (advice.row_length, advice.shard_nbytes) == (8, 4 * MIB)


@pytest.mark.parametrize(("text", "nbytes"), [("4KiB", 4096), ("32MiB", 32 * MIB), ("1GiB", 1024 * MIB)])
def test_sizes_have_a_unit(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "32", "32MB", "0MiB", "-4KiB", "6KiB", "1025MiB", "1.5GiB", "32MiB "])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ms.SchemaError, match="multiple of 4KiB") as caught:
        parse_nbytes(text)
    assert caught.value.kind == "option"


def test_speeds_are_those_of_the_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians over the rounds, the bytes of all records by them; no compression makes files of the values' size."""
    ticks = iter(np.cumsum([0, 2, 0, 4, 0, 1, 0, 2, 0, 8, 0, 1, 0, 5, 0, 6, 0, 1]).tolist())
    turns: list[int] = []

    def together(bench: Any, loop: Any) -> tuple[float, int]:
        began, n = next(ticks), loop()
        turns.append(n)
        return next(ticks) - began, n

    monkeypatch.setattr(benchmarking._Bench, "_together", together)
    found = benchmark(tmp_path, block_nbytes=8 * KIB, profiles=["none"], n_rounds=3, durability="none")
    # One shard of 4 MiB is the least, 512 records; 2 rows of 1,024 cells a block, and a checksum for both together.
    nbytes = 4 * MIB
    assert turns == [nbytes + 512 * 4, 0, 0] * 3
    (only,) = found["trials"]
    assert [only[k] * n for k, n in (("limit", 2), ("threads_0", 6), ("default", 1))] == [nbytes] * 3
    assert only["ratio"] == nbytes / turns[0]
    assert found["n_records"] == 512
    assert found["layouts"] == []


def test_it_prints_a_table_and_leaves_the_folder_empty(tmp_path: Path) -> None:
    done = run(tmp_path, "--block", "4MiB", "--codec", "fast", "--codec", "none", "--records", "1", "--rounds", "1")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}: 1 rank on ")
    assert lines[0].endswith("4 MiB a rank and record, 1 record a turn, 1 round, durability fsync")
    assert [line.split()[0] for line in lines[2:6]] == ["Profiles", "codec", "fast", "none"]
    chunks = [line.split()[1:3] for line in lines if line.startswith(("fast", "none"))][2:]
    assert chunks == [["256", "KiB"], ["1", "MiB"], ["4", "MiB"]]
    assert lines[-1].startswith("recommended: codec=")
    assert list(tmp_path.iterdir()) == []


def test_json_is_what_was_measured(tmp_path: Path) -> None:
    args = ("--block", "64KiB", "--codec", "compact", "--rounds", "1", "--durability", "none", "--json")
    found = json.loads(run(tmp_path, *args).stdout)
    expected = {"ranks": 1, "block_nbytes": 64 * KIB, "n_records": 64, "n_rounds": 1, "durability": "none"}
    assert {k: found[k] for k in expected} == expected
    assert [t["profile"] for t in found["trials"]] == ["compact"]
    assert found["trials"][0]["ratio"] > 1
    assert found["advice"]["row_length"] == 64
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--block", "32"), "block '32': give a multiple of 4KiB"),
        (("--codec", "gzip"), "codec 'gzip' is unknown; use one of fast, compact"),
        (("--durability", "maybe"), "option durability 'maybe'"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_1(tmp_path: Path, args: Sequence[str], words: str) -> None:
    done = run(tmp_path, *args)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {words}")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_or_not_empty_is_refused(tmp_path: Path) -> None:
    kept = tmp_path / "mine.txt"
    kept.write_text("mine")
    small = ("--block", "4KiB", "--codec", "none", "--rounds", "1", "--durability", "none")
    done = run(tmp_path, *small)
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"{tmp_path} is not empty (1 entries, the first is 'mine.txt'): give an empty folder" in done.stderr
    assert kept.read_text() == "mine"
    for path in (tmp_path / "none", kept):
        done = run(path, *small)
        assert done.exit_code == 1
        assert f"{path} is not a folder: make an empty one" in done.stderr


@pytest.mark.parametrize("call", ["writev", "fsync"])
def test_what_fails_midway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A disk that is full for the limit, or for a writer that syncs its manifest, is one line."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    done = run(tmp_path, "--block", "4KiB", "--codec", "none", "--rounds", "1", "--durability", "none")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "No space left on device" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_under_a_launcher_all_ranks_measure_and_rank_0_prints(tmp_path: Path) -> None:
    """What is wrong is said once, too."""
    args = ("-m", "mpistream", "bench", str(tmp_path), "--block", "4KiB", "--codec", "none", "--rounds", "1")
    done = mpiexec(2, [*args, "--durability", "none"])
    assert done.stdout.count("recommended: ") == 1
    assert ": 2 ranks on " in done.stdout
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.txt").touch()
    done = mpiexec(2, args, expect=None)
    assert done.returncode != 0
    assert (done.stdout.count("recommended"), done.stderr.count("is not empty")) == (0, 1)


def test_help_has_an_example() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert "mpiexec -n 4 mpistream bench DIR --block 64MiB" in " ".join(done.stdout.split())

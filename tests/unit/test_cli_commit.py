"""``mpistream commit``, and the job array that is there to be read: real processes, files for tokens, one commit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mpistream as ms

pytest.importorskip("typer", reason="needs typer, from the extra cli")
pytest.importorskip("rich", reason="needs rich, from the extra cli")

from typer.testing import CliRunner, Result

from mpistream.cli.verbs import app

ROOT = Path(__file__).parents[2]
JOB_ARRAY = ROOT / "examples" / "job_array"
N_PARTS = 2


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def environment() -> dict[str, str]:
    """Return one in which ``python`` is this interpreter, and no task of a job array."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT)}


def process(*args: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(a) for a in args],
        env={**environment(), **changes},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def url(tmp_path: Path) -> Path:
    return tmp_path / "run.zarr"


@pytest.fixture
def tokens(url: Path, tmp_path: Path) -> list[Path]:
    """Return the token files of a store whose parts have flushed two records and a static."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4},
        time=ms.AppendTime(units="s since 2000-01-01"),
        variables={"v": ms.Variable(("time", "y"), "int32")},
        statics={"depth": ms.Variable(("y",), "int32")},
        shard_shape={"time": 2, "y": 2},
    )
    files = []
    for i in range(N_PARTS):
        with ms.write_open_part(url, schema, writer=i, n_writers=N_PARTS) as part:
            part.write_static("depth", i)
            for record in range(2):
                part.write_record(0.5 + record, {"v": 10 * record + i})
            token = part.flush()
        files.append(tmp_path / f"part-{i}.json")
        files[-1].write_text(json.dumps(token.to_json()))
    return files


def test_commit_prints_what_it_did(url: Path, tokens: list[Path]) -> None:
    done = run("commit", url, *tokens)
    assert (done.exit_code, done.stderr) == (0, "")
    sizes = [p.stat().st_size for name in ("v", "depth") for p in (url / name / "c").rglob("*") if p.is_file()]
    assert done.stdout == (
        f"commit 1 in epoch 1: 2 new records, statics depth, {sum(sizes)} B in {len(sizes)} objects; "
        "2 records committed, last t 1.5\n"
    )
    reader = ms.open_reader(url)
    assert [reader.read_record("v", i).tolist() for i in range(2)] == [[0, 0, 1, 1], [10, 10, 11, 11]]
    assert reader.read_static("depth").tolist() == [0, 0, 1, 1]


def test_json_is_the_receipt(url: Path, tokens: list[Path]) -> None:
    """One JSON object, and the same one when it is run again."""
    first = run("commit", url, *tokens, "--json")
    assert (first.exit_code, first.stderr) == (0, "")
    receipt = json.loads(first.stdout)
    expected = {"commit_seq": 1, "epoch": 1, "n_records": 2, "n_new_records": 2, "last_t": 1.5, "warnings": []}
    assert {k: receipt[k] for k in expected} == expected
    assert receipt["new_statics"] == ["depth"]
    assert set(receipt) == {*expected, "new_statics", "n_packs", "n_objects", "nbytes"}
    manifest = (url / ".mpistream" / "manifest.json").read_bytes()
    again = run("commit", url, *reversed(tokens), "--json")
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert (url / ".mpistream" / "manifest.json").read_bytes() == manifest


def test_the_text_is_the_same_again(url: Path, tokens: list[Path]) -> None:
    assert run("commit", url, *tokens).stdout == run("commit", url, *tokens).stdout


def test_what_did_not_go_well_after_the_commit_is_a_warning(
    url: Path, tokens: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is committed, so the exit code is 0, and standard output holds the receipt alone."""

    def fail(*args: object, **options: object) -> None:
        raise ms.StoreError("disk\nfull", kind="io")

    monkeypatch.setattr("mpistream.owner.put_documents", fail)
    done = run("commit", url, *tokens, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["n_records"] == 2
    assert re.fullmatch(r"warning: committed, but the Zarr documents lag behind .*: disk full\n", done.stderr)
    assert ms.open_reader(url).n_records == 2


def change(i: int, **changes: object) -> Callable[[list[Path]], None]:
    def apply(files: list[Path]) -> None:
        files[i].write_text(json.dumps({**json.loads(files[i].read_text()), **changes}))

    return apply


def cut(files: list[Path]) -> None:
    data = files[1].read_text()
    files[1].write_text(data[: len(data) // 2])


def put_folder(files: list[Path]) -> None:
    files[1].unlink()
    files[1].mkdir()


BROKEN: dict[str, tuple[Callable[[list[Path]], object], str]] = {
    "half": (cut, r"part-1\.json: not valid JSON"),
    "empty": (lambda files: files[1].write_text(""), r"part-1\.json: not valid JSON"),
    "not text": (lambda files: files[1].write_bytes(b"\xff\x00"), r"part-1\.json: not valid JSON"),
    "an array": (lambda files: files[1].write_text("[]"), r"part-1\.json: not a JSON object"),
    "no token": (lambda files: files[1].write_text("{}"), r"part-1\.json: damaged token: KeyError"),
    "a wrong field": (change(1, epoch="one"), r"part-1\.json: damaged token: TypeError"),
    "not a number": (lambda files: files[1].write_text('{"last_t": NaN}'), r"part-1\.json: not valid JSON"),
    "not there": (lambda files: files[1].unlink(), r"part-1\.json: No such file or directory"),
    "a folder": (put_folder, r"part-1\.json: Is a directory"),
    "missing": (lambda files: files.pop(), "rank 1: no token"),
    "duplicate": (lambda files: files.append(files[0]), "rank 0: 2 tokens"),
    "another attempt": (change(1, run_id="0" * 32), "another attempt; nothing was committed"),
    "another store": (change(1, store_id="0" * 32), "nothing was committed"),
    "other times": (change(1, times_sha256="0" * 64), "rank 1: its times are not those"),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_bad_tokens_are_one_line_and_exit_code_1(url: Path, tokens: list[Path], what: str, more: list[str]) -> None:
    """Nothing is committed, and the good tokens are as good as before."""
    damage, words = BROKEN[what]
    good = [t.read_text() for t in tokens]
    files = list(tokens)
    damage(files)
    done = run("commit", url, *files, *more)
    assert isinstance(done.exception, SystemExit), done.exception
    assert (done.exit_code, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .+\n", done.stderr)
    assert re.search(words, done.stderr)
    assert ms.open_reader(url).n_records == 0
    assert ms.commit_tokens(url, [json.loads(text) for text in good]).n_records == 2


@pytest.mark.parametrize("where", ["nothing-here", "s3://bucket/run.zarr", __file__, ""])
def test_commit_to_what_is_no_store(tokens: list[Path], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tokens[0].parent)
    done = run("commit", where, *tokens)
    assert (done.exit_code, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .+\n", done.stderr)


def test_late_tokens_are_an_error(url: Path, tokens: list[Path]) -> None:
    assert run("commit", url, *tokens).exit_code == 0
    ms.write_resume(url, takeover=True).close()
    done = run("commit", url, *tokens)
    assert done.exit_code == 1
    assert "another attempt" in done.stderr


def test_commit_without_tokens_is_a_usage_error(url: Path) -> None:
    assert run("commit", url).exit_code == 2


def test_commit_starts_no_mpi(url: Path, tokens: list[Path]) -> None:
    """It runs on a login node, where MPI may not start."""
    code = """
import sys
from mpistream.__main__ import main
try:
    main()
finally:
    print("mpi4py.MPI" in sys.modules, file=sys.stderr)
"""
    done = process(sys.executable, "-c", code, "commit", url, *tokens, PMI_SIZE="4", OMPI_COMM_WORLD_SIZE="4")
    assert (done.returncode, done.stderr) == (0, "False\n")
    assert done.stdout.startswith("commit 1 in epoch 1: 2 new records")


# The job array


def check_wave(url: Path, n_records: int) -> None:
    """Compare the store with the wave sin(2 pi (x / 96 - t / 12)) cos(pi y / 64)."""
    reader = ms.open_reader(url)
    assert (reader.n_records, reader.schema.variables["height"].dtype) == (n_records, "float64")
    y, x = np.arange(64)[:, None], np.arange(96)
    for i in range(n_records):
        expected = np.sin(2 * np.pi * (x / 96 - reader.times[i] / 12)) * np.cos(np.pi * y / 64)
        np.testing.assert_allclose(reader.read_record("height", i), expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(reader.times, np.arange(n_records))


@pytest.mark.slow
def test_job_array_runs_as_processes(url: Path) -> None:
    """Three parts at once, then one commit; run once more, it is refused and what is there stays."""
    done = process(JOB_ARRAY / "run.sh", url, "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("commit 1 in epoch 1: 6 new records")
    assert sorted(p.name for p in Path(f"{url}.tokens").iterdir()) == [f"part-{i}.json" for i in range(3)]
    check_wave(url, 6)
    again = process(JOB_ARRAY / "run.sh", url, "3")
    assert again.returncode != 0
    assert "holds a stream already" in again.stderr
    check_wave(url, 6)


@pytest.mark.slow
def test_job_array_task_by_task(url: Path) -> None:
    """As a scheduler starts it: a part is a task, here one after the other, and the commit a job of its own."""
    for i in range(4):
        done = process(
            *(sys.executable, JOB_ARRAY / "part.py", url, "--parts", "4", "--records", "2", "--wait", "60"),
            SLURM_ARRAY_TASK_ID=str(i),
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        if i < 3:
            early = run("commit", url, *sorted(Path(f"{url}.tokens").iterdir()))
            assert (early.exit_code, ms.open_reader(url).n_records) == (1, 0)
    assert run("commit", url, *sorted(Path(f"{url}.tokens").iterdir())).exit_code == 0
    check_wave(url, 2)


@pytest.mark.slow
def test_job_array_without_one_part_commits_nothing(url: Path, tmp_path: Path) -> None:
    """A part that fails ends the script before the commit."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\ncase "$*" in *"--part 1"*) exit 3;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = process(JOB_ARRAY / "run.sh", url, "3", PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (3, "")
    assert not (Path(f"{url}.tokens") / "part-1.json").exists()


def test_job_array_needs_the_number_of_the_part(url: Path) -> None:
    done = process(sys.executable, JOB_ARRAY / "part.py", url, "--parts", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--part" in done.stderr
    assert not url.exists()

"""Real MPI jobs that are told to end: they commit, say so by their exit code, and the next one goes on."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from tests.support.mpi_run import find_mpiexec, mpiexec, start_mpiexec
from tests.support.verified import assert_sound
from tests.support.wait import wait_until

SLURM = Path(__file__).parents[2] / "examples" / "slurm"
NY, NX = 32, 48


def expected(n_records: int) -> NDArray[np.float64]:
    """Return all records as one process computes them without an end in between."""
    height = np.hypot(*np.mgrid[0:NY, 0:NX])
    records = []
    for t in range(n_records):
        records.append(height)
        height = 0.5 * height + np.sin(height + t)
    return np.stack(records)


def n_committed(url: Path) -> int:
    try:
        return ms.open_reader(url).n_records
    except ms.FormatError:  # not there yet
        return 0


def assert_whole(url: Path, n_records: int) -> None:
    reader = ms.open_reader(url)
    assert reader.times.tolist() == list(range(n_records))
    assert reader.read_array("height").tobytes() == expected(n_records).tobytes()
    assert_sound(url)


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, [1]), (signal.SIGUSR1, [0, 1, 2])])
def test_job_that_is_told_to_end_does_so_on_all_ranks_and_goes_on_elsewhere(
    tmp_path: Path, number: int, ranks: list[int]
) -> None:
    """One rank gets the signal, or all, again and again (P-62); the code is 75, and the result is that of one run."""
    url = tmp_path / "run.zarr"
    model: list[str | Path] = ["-m", "mpi4py", SLURM / "model.py", url]
    with start_mpiexec(3, [*model, "100000", "0.01"]) as job:
        wait_until(lambda: n_committed(url) >= 5, 60, "the first records")
        for _ in range(3):
            job.signal_ranks(number, ranks)
        assert job.wait(60) == 75
        text = job.output()
    n = ms.open_reader(url).n_records
    assert f"{n} of 100000 records; signal {signal.Signals(number).name}" in text
    assert_sound(url)
    mpiexec(2, [*model, str(n + 3)], timeout=60)
    assert_whole(url, n + 3)


def test_batch_script_hands_the_signal_on_and_asks_to_be_started_again(tmp_path: Path) -> None:
    """With commands in the place of SLURM's: USR1 before the limit, then a requeue, and the second run ends with 0."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    mpi = find_mpiexec()
    commands = {
        "scontrol": f'echo "$*" >>{tmp_path}/asked',
        "squeue": "echo 2099-01-01T00:00:00",
        "mpiexec": f'exec {shlex.join([shutil.which(mpi[0]) or mpi[0], *mpi[1:]])} "$@"',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    url = tmp_path / "run.zarr"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "2",
    }

    def start(*args: str) -> subprocess.Popen[bytes]:
        command = [bash or "bash", str(SLURM / "job.sh"), str(url), *args]
        return subprocess.Popen(command, cwd=SLURM, env=environment, start_new_session=True)

    with start("100000", "0.01") as job:
        wait_until(lambda: n_committed(url) >= 5, 60, "the first records")
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0
    assert (tmp_path / "asked").read_text() == "requeue 17\n"
    n = ms.open_reader(url).n_records + 3
    with start(str(n)) as job:
        assert job.wait(60) == 0
    assert (tmp_path / "asked").read_text() == "requeue 17\n"
    assert_whole(url, n)


def test_batch_script_hears_of_a_model_that_ends_before_it_looks_again(tmp_path: Path) -> None:
    """On a busy node the model may be gone when the script has handed on the signal; it asks for another start."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    commands = {
        "scontrol": f'echo "$*" >>{tmp_path}/asked',
        "mpiexec": f"trap 'exit 75' USR1; touch {tmp_path}/ready; while :; do sleep 0.05; done",
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    # A kill that takes until nobody is left.
    (tmp_path / "slow").write_text(
        'kill() { builtin kill "$@" || return; [ "$1" = -0 ] || while builtin kill -0 "$pid"; do :; done 2>/dev/null; }'
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "17", "BASH_ENV": str(tmp_path / "slow")}
    with subprocess.Popen([bash, str(SLURM / "job.sh"), "x", "1"], env=environment, start_new_session=True) as job:
        wait_until((tmp_path / "ready").exists, 60, "the model")
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0
    assert (tmp_path / "asked").read_text() == "requeue 17\n"

"""Real ranks whose calls of the system fail at random, by libfiu: one error on all ranks, then success."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support import fiu_job
from tests.support.mpi_run import mpiexec

N_RUNS = int(os.environ.get("MPISTREAM_TEST_FIU", "12"))


def _preloads() -> str:
    """Return what fiu-run preloads."""
    if shutil.which("fiu-run") is None:
        pytest.skip("needs fiu-run (fiu-utils)")
    command = ["fiu-run", "-x", "-f", "", "sh", "-c", "echo $LD_PRELOAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_calls_that_fail_at_random_are_one_error_and_then_success(n_ranks: int) -> None:
    """Opens, writes, reads, syncs and renames fail on one rank or on all: told the same, nothing left open, no hang."""
    seed = os.environ.get("MPISTREAM_TEST_SEED", str(random.SystemRandom().randrange(2**32)))
    print(f"MPISTREAM_TEST_SEED={seed}")
    environment = {"LD_PRELOAD": _preloads(), "FIU_CTRL_FIFO": "", "FIU_ENABLE": ""}
    # In memory, where there is such a folder: how long a sync takes does not matter here.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="mpistream-fiu-", dir=memory if memory.is_dir() else None) as folder:
        words: list[str | Path] = ["-m", "mpi4py", fiu_job.__file__, folder, str(N_RUNS // 2), seed]
        done = mpiexec(n_ranks, words, timeout=120 + 5 * N_RUNS, env=environment)
    print(done.stdout)
    assert f"'runs': {N_RUNS // 2}" in done.stdout

"""A job on a real SLURM that is preempted and requeued until all its records are there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mpi_run import find_mpiexec

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_job_that_is_preempted_and_requeued_finishes() -> None:
    """Preempted at random and requeued on other numbers of ranks, its output is that of a run left alone."""
    if os.getuid() != 0 or shutil.which("slurmctld") is None or shutil.which("munged") is None:
        pytest.skip("needs root, slurm-wlm and munge")
    version = subprocess.run([*find_mpiexec(), "--version"], capture_output=True, text=True, check=False).stdout
    if "HYDRA" not in version:
        pytest.skip("needs MPICH's mpiexec")
    done = subprocess.run(
        [sys.executable, ROOT / "ci/lab/slurm.py", "1", "preempted"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slurm: loop 0: 100 records" in done.stdout

"""The cores of a process, by what the system, the launcher and the batch system say."""

from __future__ import annotations

import os

import pytest

from mpistream.cores import n_cores


@pytest.mark.parametrize(
    ("affinity", "environment", "expected"),
    [
        (8, {}, 8),
        (3, {}, 3),
        (8, {"SLURM_CPUS_PER_TASK": "2"}, 2),
        (2, {"SLURM_CPUS_PER_TASK": "4"}, 2),
        (8, {"MPI_LOCALNRANKS": "4"}, 2),
        (8, {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 2),
        (8, {"MPI_LOCALNRANKS": "16"}, 1),
        # Bound to cores of their own, ranks don't share them.
        (2, {"MPI_LOCALNRANKS": "4"}, 2),
        (8, {"MPI_LOCALNRANKS": "many", "SLURM_CPUS_PER_TASK": "0"}, 8),
    ],
)
def test_cores_of_a_process(affinity, environment, expected, monkeypatch) -> None:
    """Those it is bound to; what ranks of a node may all use, they share; never more than the job asked for."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    assert n_cores(environment) == expected
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if environment:
        assert n_cores() == expected

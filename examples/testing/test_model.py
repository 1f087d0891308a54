"""Tests of a model's output, to be copied: the same on any number of ranks, and after a resume.

mpiexec -n 3 python -m mpi4py -m pytest --with-mpi examples/testing
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpistream as ms
from mpistream.testing import assert_stores_equal

N = 48


def run_model(url: Path, comm: Any, n_steps: int) -> None:
    """Stand for your model: waves on a grid, one record a step, going on where the store ends."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": N, "x": N},
        time=ms.AppendTime(units="s"),
        variables={"height": ms.Variable(("time", "y", "x"), "float64", attrs={"units": "m"})},
    )
    w = ms.write_resume(url, comm=comm) if url.exists() else ms.write_open(url, schema, comm=comm)
    with w:
        y, x = (np.arange(*w.region[dim]) for dim in ("y", "x"))
        for step in range(w.n_records, n_steps):
            w.write_record(float(step), {"height": np.sin(0.1 * (y[:, None] + step)) * np.cos(0.1 * x)})


@pytest.fixture
def folder() -> Iterator[Path]:
    """One folder for all ranks; pytest's own tmp_path is another one on each."""
    comm = MPI.COMM_WORLD
    with tempfile.TemporaryDirectory(prefix="model-") as made:
        yield Path(comm.bcast(made, root=0))
        comm.Barrier()  # nobody removes it while others read


@pytest.mark.mpi
def test_output_does_not_depend_on_the_number_of_ranks(folder: Path) -> None:
    comm = MPI.COMM_WORLD
    run_model(folder / "all.zarr", comm, 5)
    if comm.rank == 0:
        run_model(folder / "one.zarr", MPI.COMM_SELF, 5)
    # Every rank calls it, so it also waits for rank 0; all raise the same AssertionError, which names the first cell.
    assert_stores_equal(folder / "all.zarr", folder / "one.zarr", comm=comm)


@pytest.mark.mpi
def test_a_resumed_run_is_the_whole_run(folder: Path) -> None:
    comm = MPI.COMM_WORLD
    run_model(folder / "whole.zarr", comm, 6)
    run_model(folder / "resumed.zarr", comm, 4)
    run_model(folder / "resumed.zarr", comm, 6)
    assert_stores_equal(folder / "resumed.zarr", folder / "whole.zarr", comm=comm)

"""`mpistream.benchmarking` over MPI: all ranks measure together, and fail together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import mpistream as ms
from mpistream.benchmarking import benchmark

pytestmark = pytest.mark.mpi


def test_every_rank_has_the_same_figures(comm: Any, mpi_tmp_path: Path) -> None:
    """What was written is that of all ranks, and it is removed before any of them returns."""
    mpi_tmp_path.mkdir(exist_ok=True)
    found = benchmark(
        mpi_tmp_path, comm=comm, block_nbytes=4096, profiles=["none"], n_records=1, n_rounds=1, durability="none"
    )
    assert comm.allgather(found) == [found] * comm.size
    assert found["ranks"] == comm.size
    # Rows of 1,024 records fill a shard of 4 MiB; each of the inner chunks has a checksum of 4 bytes.
    assert found["trials"][0]["ratio"] == 4096 / 4100
    assert list(mpi_tmp_path.iterdir()) == []


def test_a_disk_that_is_full_on_one_rank_is_the_same_error_on_all(
    comm: Any, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = comm.size - 1

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    if comm.rank == last:
        monkeypatch.setattr(os, "writev", full)
    with pytest.raises(ms.StoreError, match=f"rank {last}: .*No space left on device"):
        benchmark(mpi_tmp_path, comm=comm, block_nbytes=4096, profiles=["none"], n_rounds=1)
    comm.Barrier()
    assert list(mpi_tmp_path.iterdir()) == []


def test_bad_settings_are_refused_on_all(comm: Any, mpi_tmp_path: Path) -> None:
    with pytest.raises(ms.SchemaError, match="records 0, rounds 3"):
        benchmark(mpi_tmp_path, comm=comm, n_records=0)

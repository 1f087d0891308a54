"""`mpistream.testing` on every rank: what rank 0 finds, all raise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import mpistream as ms
from mpistream.testing import assert_stores_equal
from tests.support.collective import OPTIONS, error_on_all
from tests.support.plain import append_schema

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


def test_all_ranks_raise_the_same(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Nothing, an AssertionError with the difference, or the error of a store that can't be read: on every rank."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        schema = append_schema({"y": 8}, {"v": ms.Variable(("time", "y"), "f4")}, shard_shape={"y": 1})
        with ms.write_open(mpi_tmp_path / name, schema, comm=comm, options=OPTIONS) as w:
            w.write_record(0.0, {"v": value})
    assert_stores_equal(mpi_tmp_path / "a", mpi_tmp_path / "a", comm=comm)
    with pytest.raises(AssertionError, match=r"v: first at record 0, y\[0\]: 1.0 and 2.0; 8 cells differ"):
        assert_stores_equal(mpi_tmp_path / "a", mpi_tmp_path / "b", comm=comm)
    error_on_all(comm, lambda: assert_stores_equal(mpi_tmp_path / "a", mpi_tmp_path / "c", comm=comm))

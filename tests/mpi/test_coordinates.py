"""Strings and boundary variables over all ranks: the owner writes them, whatever the others own or pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, error_on_all, on_root
from tests.support.scene import plain

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

MEMBERS = ["a", "bé", "", "long" * 50, "e"]


def make_schema(**changes: Any) -> ms.StreamSchema:
    parts: dict[str, Any] = {
        "dims": {"time": None, "member": 5, "x": 4, "k": 3, "nv": 2},
        "time": ms.AppendTime(units="days since 2000-01-01", attrs={"bounds": "time_bnds"}),
        "variables": {
            "u": ms.Variable(("time", "member", "x"), "float32"),
            "time_bnds": ms.Variable(("time", "nv"), "float64"),
        },
        "statics": {"note": ms.Variable((), str), "labels": ms.Variable(("k",), "U8")},
        "coords": {
            "member": ms.Coordinate(("member",), MEMBERS, dtype=str),
            "x": ms.Coordinate(("x",), [0.5, 1.5, 2.5, 3.5], attrs={"bounds": "x_bnds"}),
            "x_bnds": ms.Coordinate(("x", "nv"), None, dtype="float64"),
            "kind": ms.Coordinate((), "test"),
        },
        "shard_shape": {"time": 2, "member": 1},
    }
    return ms.StreamSchema(**{**parts, **changes})


def write(w: ms.StreamWriter, rank: int, record: int) -> None:
    x = slice(*w.region["x"])
    block = 100.0 * record + 10.0 * np.arange(*w.region["member"])[:, np.newaxis] + np.arange(4.0)[x]
    # Ranks that don't write the bounds pass them or leave them out.
    ends = {} if rank % 2 else {"time_bnds": np.array([record, record + 1.0])}
    w.write_record(record + 0.5, {"u": block, **ends})


def write_statics(w: ms.StreamWriter) -> None:
    w.write_static("note", "h\0é")
    w.write_static("labels", ["one", "", "três"])
    start, stop = w.region["x"]
    ends = np.arange(start, stop, dtype="float64")[:, np.newaxis] + [0.0, 1.0]
    w.write_static("x_bnds", ends)


def test_the_owner_writes_what_is_not_partitioned(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """On any number of ranks, over a resume with another decomposition: strings, bounds of time, bounds by region."""
    url = mpi_tmp_path / "s"
    with ms.write_open(url, make_schema(), comm=comm, options=OPTIONS) as w:
        assert set(w.region) == {"member", "x"}
        write_statics(w)
        for record in range(3):
            write(w, comm.rank, record)
    on_root(comm, lambda: None)
    with ms.write_resume(url, schema=make_schema(), comm=comm, at=1.5, options=OPTIONS) as w:
        with pytest.raises(ms.SchemaError, match="static 'note' is committed already"):
            w.write_static("note", "again")
        for record in range(2, 5):
            write(w, comm.rank, record)

    def check() -> None:
        group, reader = plain(url), ms.open_reader(url)
        expected = 100.0 * np.arange(5)[:, None, None] + 10.0 * np.arange(5)[:, None] + np.arange(4.0)
        np.testing.assert_array_equal(group["u"][...], expected)
        ends = np.arange(5.0)[:, np.newaxis] + [0.0, 1.0]
        np.testing.assert_array_equal(group["time_bnds"][...], ends)
        np.testing.assert_array_equal(group["x_bnds"][...], ends[:4])
        strings = {"note": "h\0é", "labels": ["one", "", "três"], "member": MEMBERS, "kind": "test"}
        for name, values in strings.items():
            assert reader.read_static(name).tolist() == values
            found = group[name][...]
            assert (found if isinstance(found, str) else found.tolist()) == values

    on_root(comm, check)


def test_the_owners_strings_are_what_is_committed(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The other ranks may leave a static out that is not partitioned; without the owner's nothing is committed."""
    with ms.write_open(mpi_tmp_path / "s", make_schema(), comm=comm, options=OPTIONS) as w:
        if comm.rank == 0:
            w.write_static("note", "mine")
        w.commit()
        assert w.is_committed("note")
        if comm.rank != 0:
            w.write_static("labels", "same")
        if comm.size > 1:
            error = error_on_all(comm, w.commit)
            assert "rank 0: 0 cells of 'labels' are in place, its part of 1 record has 3" in str(error)
        if comm.rank == 0:
            w.write_static("labels", "same")
        w.commit()
        assert w.reader.read_static("labels").tolist() == ["same"] * 3


def test_strings_that_differ_between_ranks_are_refused_at_the_opening(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Coordinates are compared over ranks like everything else in the schema."""
    if comm.size == 1:
        return
    members = [*MEMBERS[:-1], f"rank {comm.rank}"]
    schema = make_schema(coords={"member": ms.Coordinate(("member",), members)}, time=ms.AppendTime(units="s"))
    error = error_on_all(comm, lambda: ms.write_open(mpi_tmp_path / "s", schema, comm=comm, options=OPTIONS))
    assert error.kind == "mismatch"

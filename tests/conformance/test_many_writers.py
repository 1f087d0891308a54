"""Plain readers of a store that several ranks wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.mpi_run import mpiexec
from tests.support.plain import READERS, any_bits, differing

NY, NX = 23, 9
N_FIRST, N_RECORDS = 6, 9

# Each rank writes its part, reads it back through a reader on all ranks, and says so.
JOB = f"""
import sys
from mpi4py import MPI
import mpistream as ms
from tests.support.plain import any_bits, append_schema

comm, path, row = MPI.COMM_WORLD, sys.argv[1], int(sys.argv[2])
first, stop = int(sys.argv[3]), int(sys.argv[4])
if first == 0:
    schema = append_schema(
        {{"y": {NY}, "x": {NX}}},
        {{
            "u": ms.Variable(("time", "y", "x"), "float32"),
            "z": ms.Variable(("time", "y"), "complex128"),
            "ice": ms.Variable(("time", "y", "x"), "bool"),
            "n": ms.Variable(("time",), "int64"),
        }},
        statics={{"topo": ms.Variable(("y", "x"), "float16")}},
        coords={{"y": ms.Coordinate(("y",), any_bits("float64", ({NY},), 7))}},
        shard_shape={{"time": row, "y": 4, "x": 8}},
        chunk_shape={{"time": min(row, 2), "y": 2, "x": 4}},
    )
    writer = ms.write_open(path, schema, comm=comm)
else:
    writer = ms.write_resume(path, comm=comm, at=first - 1.0)
with writer:
    y, x = slice(*writer.region["y"]), slice(*writer.region["x"])
    if first == 0:
        writer.write_static("topo", any_bits("float16", ({NY}, {NX}), 8)[y, x])
    for i in range(first, stop):
        u, ice = (any_bits(dtype, ({NY}, {NX}), i) for dtype in ("float32", "bool"))
        z = any_bits("complex128", ({NY},), i)
        writer.write_record(float(i), {{"u": u[y, x], "ice": ice[y, x], "z": z[y], "n": i}})
        if i % 3 == 1:
            writer.commit()
with ms.open_reader(path, comm=comm) as reader:
    mine = reader.read_record("u", -1, writer.region)
    assert mine.tobytes() == any_bits("float32", ({NY}, {NX}), stop - 1)[y, x].tobytes()
    print(f"rank {{comm.rank}} of {{comm.size}}: {{reader.n_records}} records")
"""


@pytest.mark.parametrize("row", [1, 4])
def test_every_reader_sees_what_all_ranks_wrote(tmp_path: Path, row: int) -> None:
    """What 3 ranks began and 2 ranks went on with, from an earlier time, is read bitwise by each plain reader."""
    path = tmp_path / "run.zarr"
    for n_ranks, first, stop in [(3, 0, N_FIRST + 1), (2, N_FIRST, N_RECORDS)]:
        numbers = [str(n) for n in (row, first, stop)]
        done = mpiexec(n_ranks, ["-m", "mpi4py", "-c", JOB, path, *numbers], timeout=60)
        assert sorted(done.stdout.splitlines()) == [f"rank {r} of {n_ranks}: {stop} records" for r in range(n_ranks)]
    expected = {
        "u": np.stack([any_bits("float32", (NY, NX), i) for i in range(N_RECORDS)]),
        "z": np.stack([any_bits("complex128", (NY,), i) for i in range(N_RECORDS)]),
        "ice": np.stack([any_bits("bool", (NY, NX), i) for i in range(N_RECORDS)]),
        "n": np.arange(N_RECORDS),
        "topo": any_bits("float16", (NY, NX), 8),
        "y": any_bits("float64", (NY,), 7),
        "time": np.arange(N_RECORDS, dtype="float64"),
    }
    found = {name: differing(read(path, list(expected)), expected) for name, read in READERS.items()}
    assert found == {name: [] for name in READERS}

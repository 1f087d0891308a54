"""A model that ends in good order when it is told to, and goes on when it is started again: see job.sh.

    mpiexec -n 4 python -m mpi4py model.py run.zarr 100

Output goes to run.zarr, the state that it goes on from to run.zarr.restart. It ends with 0 when all records are there,
with 75 when it is to be started again.
"""

import sys
import time

import numpy as np
from mpi4py import MPI

import mpistream as ms

NY, NX, EVERY = 32, 48, 5  # a restart state every so many records


def next_step(height: np.ndarray, t: float) -> np.ndarray:
    return 0.5 * height + np.sin(height + t)


comm = MPI.COMM_WORLD
if not 3 <= len(sys.argv) <= 4:
    sys.exit("usage: mpiexec -n 4 python -m mpi4py model.py run.zarr N_RECORDS [SECONDS_A_STEP]")
url, n_records = sys.argv[1], int(sys.argv[2])
seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0  # what a step takes, for those who want to watch

dims = {"time": None, "y": NY, "x": NX}
variables = {"height": ms.Variable(("time", "y", "x"), "float64", attrs={"units": "m"})}
schema = ms.StreamSchema(
    dims=dims, time=ms.AppendTime(units="hours since 2000-01-01"), variables=variables, shard_shape={"time": 10}
)
states = ms.CheckpointPair(f"{url}.restart", schema)

with ms.PreemptionGuard(comm, margin=120) as guard:  # signals, and the end of the job, if a scheduler knows it
    found = states.restore(comm)
    if found is None:
        w = ms.write_open(url, schema, comm=comm, overwrite=True)
    else:
        # Output behind the state is computed again: the two must not differ.
        w = ms.write_resume(url, comm=comm, at=found[1])
    with w:
        rows = slice(*w.region["y"])
        if found is None:
            height = np.hypot(*np.mgrid[0:NY, 0:NX])[rows, slice(*w.region["x"])]
        else:
            reader, t = found
            height = next_step(reader.read_record("height", 0, w.region), t)
            reader.close()
        while w.n_records < n_records:
            t = float(w.n_records)
            w.write_record(t, {"height": height})
            is_last = w.n_records == n_records
            if (stops := guard.should_stop()) or is_last or w.n_records % EVERY == 0:
                w.commit()  # first the output, then the state: a state is never ahead of it
                states.save(t, {"height": height}, comm=comm, region=w.region)
            if stops:
                break
            height = next_step(height, t)
            time.sleep(seconds)
        is_done = w.n_records == n_records

if comm.rank == 0:
    print(f"{w.n_records} of {n_records} records; {guard.reason or 'not told to end'}", flush=True)
sys.exit(0 if is_done else guard.exit_code)

"""Heat spreads over a plate: a small MPI model that writes with mpistream and goes on where it stopped.

    mpiexec -n 4 python -m mpi4py examples/heat.py heat.zarr

Stop it whenever you like and start it again with the same command, on any number of ranks up to 8.
"""

import sys

import numpy as np
from mpi4py import MPI

import mpistream as ms

N, MAX_RANKS, N_RECORDS, STEPS_PER_RECORD, RECORDS_PER_COMMIT = 512, 8, 100, 50, 10
WEST, EAST = np.s_[1:-1, :-2], np.s_[1:-1, 2:]
SOUTH, NORTH, OWN = np.s_[:-2, 1:-1], np.s_[2:, 1:-1], np.s_[1:-1, 1:-1]


def main(url: str) -> None:
    comm = MPI.COMM_WORLD
    if comm.size > MAX_RANKS:
        sys.exit(f"heat: a record has {MAX_RANKS} shards, so use at most {MAX_RANKS} ranks")
    south, north = (r if 0 <= r < comm.size else MPI.PROC_NULL for r in (comm.rank - 1, comm.rank + 1))
    schema = ms.StreamSchema(
        dims={"time": None, "y": N, "x": N},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={"temperature": ms.Variable(("time", "y", "x"), "float64", attrs={"units": "K"})},
        shard_shape={"time": 20, "y": N // MAX_RANKS, "x": N},  # bands of rows; a rank owns whole shards
    )
    try:
        writer = ms.write_resume(url, schema=schema, comm=comm)
    except ms.ResumeError as error:  # the same on every rank
        if error.kind != "no_store":
            raise
        writer = ms.write_open(url, schema, comm=comm)

    with writer as w:
        start, stop = w.region["y"]  # this rank's rows
        plate = np.full((stop - start + 2, N + 2), 280.0)  # with a halo; the rim of the plate stays at 280 K
        if w.n_records:
            plate[OWN] = w.reader.read_record("temperature", -1, region=w.region)
        else:
            plate[OWN][max(0, 200 - start) : max(0, 260 - start), 100:300] = 400.0
        for record in range(w.n_records, N_RECORDS):
            for _ in range(STEPS_PER_RECORD):
                comm.Sendrecv(plate[1], south, recvbuf=plate[-1], source=north)
                comm.Sendrecv(plate[-2], north, recvbuf=plate[0], source=south)
                plate[OWN] += 0.2 * (plate[WEST] + plate[EAST] + plate[SOUTH] + plate[NORTH] - 4.0 * plate[OWN])
            w.write_record((record + 1) * STEPS_PER_RECORD, {"temperature": plate[OWN]})
            if (record + 1) % RECORDS_PER_COMMIT == 0:
                w.commit()
                if comm.rank == 0:
                    print(f"heat: {record + 1} of {N_RECORDS} records", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: mpiexec -n 4 python -m mpi4py examples/heat.py heat.zarr")
    main(sys.argv[1])

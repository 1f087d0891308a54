"""An ensemble: six members of a chaotic model, spread over the ranks, in one store that knows them by name.

    mpiexec -n 3 python -m mpi4py examples/ensemble.py ensemble.zarr
    python examples/ensemble.py ensemble.zarr

Any number of ranks will do: a rank has some of the members, and of more than six ranks some have none. Afterwards
``xarray.open_zarr("ensemble.zarr").sel(member="strong").x`` is one member.
"""

import sys

import numpy as np
from mpi4py import MPI

import mpistream as ms

FORCINGS = {"weakest": 5.0, "weaker": 6.0, "weak": 7.0, "control": 8.0, "strong": 9.0, "stronger": 10.0}
N, N_RECORDS, STEPS_PER_RECORD, RECORDS_PER_COMMIT, DT = 40, 50, 5, 10, 0.01


def slope(x: np.ndarray, forcing: np.ndarray) -> np.ndarray:
    """Return dx/dt of Lorenz' model of 1996, on a ring of sites along the last axis."""
    return (np.roll(x, -1, -1) - np.roll(x, 2, -1)) * np.roll(x, 1, -1) - x + forcing


def main(url: str) -> None:
    comm = MPI.COMM_WORLD
    schema = ms.StreamSchema(
        dims={"time": None, "member": len(FORCINGS), "site": N, "nv": 2},
        time=ms.AppendTime(units="days since 2000-01-01", attrs={"bounds": "time_bnds"}),
        variables={
            "x": ms.Variable(("time", "member", "site"), "float64", attrs={"cell_methods": "time: mean"}),
            "time_bnds": ms.Variable(("time", "nv"), "float64"),  # not partitioned: rank 0 writes it
        },
        coords={
            "member": ms.Coordinate(("member",), list(FORCINGS), attrs={"standard_name": "realization"}),
            "model": ms.Coordinate((), "Lorenz 96"),
        },
        shard_shape={
            "time": RECORDS_PER_COMMIT,
            "member": 1,
            "site": N,
        },  # a member is one shard, and belongs to one rank
    )
    # Whole members, as evenly as they go; without a region seven ranks would share six of them.
    members = (len(FORCINGS) * comm.rank // comm.size, len(FORCINGS) * (comm.rank + 1) // comm.size)
    with ms.write_open(url, schema, comm=comm, region={"member": members}, overwrite=True) as w:
        forcing = np.array(list(FORCINGS.values()))[slice(*members), np.newaxis]  # this rank's members
        x = np.repeat(forcing, N, axis=1)
        x[:, 0] += 0.01
        for record in range(N_RECORDS):
            mean = np.zeros_like(x)
            for _ in range(STEPS_PER_RECORD):
                x = x + DT * slope(x + 0.5 * DT * slope(x, forcing), forcing)
                mean += x / STEPS_PER_RECORD
            ends = np.array([record, record + 1]) * STEPS_PER_RECORD * DT
            w.write_record(ends.mean(), {"x": mean, "time_bnds": ends})
            if (record + 1) % RECORDS_PER_COMMIT == 0:
                w.commit()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: mpiexec -n 4 python -m mpi4py examples/ensemble.py ensemble.zarr")
    main(sys.argv[1])

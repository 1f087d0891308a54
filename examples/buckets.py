"""Rainfall to runoff at 5,000 gauges, one after the other: each is a bucket that rain fills and that drains.

    mpiexec -n 3 python -m mpi4py examples/buckets.py buckets.zarr

Any number of ranks will do, and a run that was killed goes on with the same command, on any number again: a gauge is
run once. Afterwards ``xarray.open_zarr("buckets.zarr").flow.sel(id="cat-4711")`` is the flow of one of them.
"""

import sys

import numpy as np
from mpi4py import MPI

import mpistream as ms

N_LOCATIONS, N_STEPS, LOCATIONS_PER_COMMIT = 5000, 2000, 250
IDS = [f"cat-{i}" for i in range(N_LOCATIONS)]


def run(location: int) -> dict[str, np.ndarray]:
    """Return rain (mm/h), storage (mm) and flow (mm/h) of a gauge, for all hours."""
    random = np.random.default_rng(location)
    rain = np.where(random.random(N_STEPS) < 0.1, random.exponential(4.0, N_STEPS), 0.0)
    drained = random.uniform(0.005, 0.05)  # of what is in the bucket, each hour
    # storage[t] is the sum of what is left of the rain of all hours: first of two of them, then of four, of eight, ...
    storage, n = rain.copy(), 1
    while n < N_STEPS:
        storage[n:] += (1.0 - drained) ** n * storage[:-n].copy()
        n *= 2
    return {"rain": rain, "storage": storage, "flow": drained * storage}


def opened(url: str, comm: MPI.Comm) -> ms.LocationSeriesWriter:
    try:
        return ms.write_resume(url, comm=comm)  # type: ignore[return-value]
    except ms.ResumeError as error:
        if error.kind != "no_store":
            raise
    gauges = np.random.default_rng(0).uniform([6.0, 46.0], [10.0, 48.0], (N_LOCATIONS, 2))
    return ms.write_open_locations(
        url,
        IDS,
        np.arange(N_STEPS),
        {
            "rain": ms.Variable(("id", "time"), "float32", attrs={"units": "mm h-1"}),
            "storage": ms.Variable(("id", "time"), "float32", attrs={"units": "mm"}),
            "flow": ms.Variable(("id", "time"), "float32", attrs={"units": "mm h-1"}),
        },
        units="hours since 2000-01-01",
        coords={
            "lon": ms.Coordinate(("id",), gauges[:, 0], attrs={"units": "degrees_east"}),
            "lat": ms.Coordinate(("id",), gauges[:, 1], attrs={"units": "degrees_north"}),
        },
        chunk_locations=LOCATIONS_PER_COMMIT,
        comm=comm,
    )


def main(url: str) -> None:
    comm = MPI.COMM_WORLD
    with opened(url, comm) as w:
        mine = w.missing()
        # Every rank commits as often as the one with most to do.
        for start in range(0, comm.allreduce(len(mine), MPI.MAX), LOCATIONS_PER_COMMIT):
            for location in mine[start : start + LOCATIONS_PER_COMMIT]:
                w.write_location(location, run(location))
            w.commit()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: mpiexec -n 4 python -m mpi4py examples/buckets.py buckets.zarr")
    main(sys.argv[1])

"""An acoustic wave in 3-D: Devito computes and decomposes, mpistream writes twenty snapshots of it.

    mpiexec -n 3 python -m mpi4py examples/devito/wave.py wave.zarr --check

Devito splits the grid over the ranks as it likes, off every shard edge; what it calls its local indices is the region.
With --check each snapshot is also kept in Devito's own way, gathered on rank 0 (``data_gather``) and saved with numpy,
and all snapshots of both are compared bit for bit. At the end rank 0 prints how long the model stood in output.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

os.environ["DEVITO_MPI"] = "1"  # read when devito is imported
os.environ.setdefault("DEVITO_LOGGING", "ERROR")

import numpy as np
from devito import Eq, Function, Grid, Operator, TimeFunction, solve
from mpi4py import MPI

import mpistream as ms

SPACING, DT = 10.0, 1.0  # metres and milliseconds
N_SNAPSHOTS, STEPS, COMMIT_EVERY = 20, 10, 5  # time steps from one snapshot to the next, snapshots to a commit


def wave(shape: tuple[int, int, int]) -> tuple[TimeFunction, Operator]:
    """A pressure pulse in the middle of two layers, and what steps it: of order 2 in time and 8 in space."""
    grid = Grid(shape=shape, extent=tuple(SPACING * (n - 1) for n in shape), dtype=np.float32, comm=MPI.COMM_WORLD)
    speed = Function(name="c", grid=grid, space_order=0)
    speed.data[:] = 1.5  # km/s, which is m/ms
    speed.data[:, :, shape[2] // 2 :] = 2.5
    pressure = TimeFunction(name="p", grid=grid, time_order=2, space_order=8)
    x, y, z = np.ogrid[tuple(slice(0, n) for n in shape)]
    squares = sum(((a - n / 2) * SPACING) ** 2 for a, n in zip((x, y, z), shape, strict=True))
    pulse = np.exp(-squares / (2 * (3 * SPACING) ** 2)).astype("float32")
    for level in range(3):
        pressure.data[level] = pulse  # indices are global: each rank takes its part
    step = Eq(pressure.forward, solve(pressure.dt2 - speed**2 * pressure.laplace, pressure.forward))
    return pressure, Operator([step])


def schema_of(shape: tuple[int, int, int]) -> ms.StreamSchema:
    axes = dict(zip("xyz", shape, strict=True))
    return ms.StreamSchema(
        dims={"time": None, **axes},
        time=ms.AppendTime(units="milliseconds since 2000-01-01"),
        variables={"pressure": ms.Variable(("time", *axes), "float32", attrs={"units": "1", "long_name": "pressure"})},
        coords={name: ms.Coordinate((name,), SPACING * np.arange(n), attrs={"units": "m"}) for name, n in axes.items()},
        attrs={"title": "an acoustic wave in two layers"},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", type=Path)
    parser.add_argument("--shape", type=int, nargs=3, default=(101, 89, 97))
    parser.add_argument("--check", action="store_true", help="keep each snapshot in Devito's own way too, and compare")
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD
    shape = tuple(arguments.shape)
    pressure, operator = wave(shape)
    region = {d: (int(s.start), int(s.stop)) for d, s in zip("xyz", pressure.local_indices[1:], strict=True)}
    gathered = arguments.url.with_suffix(".gathered")
    if arguments.check and comm.rank == 0:
        gathered.mkdir(exist_ok=True)
    seconds = {"mpistream": 0.0, "gather and numpy.save": 0.0}
    with ms.write_open(arguments.url, schema_of(shape), comm=comm, region=region, overwrite=True) as w:
        for i in range(N_SNAPSHOTS):
            first = 1 + i * STEPS
            operator(time_m=first, time_M=first + STEPS - 1, dt=DT)
            now = (first + STEPS) % 3  # where Devito put the newest of its three levels
            comm.Barrier()
            began = time.perf_counter()
            w.write_record((first + STEPS - 1) * DT, {"pressure": pressure.data[now]})
            if (i + 1) % COMMIT_EVERY == 0:
                w.commit()
            comm.Barrier()
            seconds["mpistream"] += time.perf_counter() - began
            if arguments.check:
                began = time.perf_counter()
                whole = pressure.data_gather(start=(now, 0, 0, 0), stop=(now + 1, *shape), rank=0)
                if comm.rank == 0:
                    np.save(gathered / f"{i}.npy", np.asarray(whole)[0])
                comm.Barrier()
                seconds["gather and numpy.save"] += time.perf_counter() - began
    if comm.rank > 0:
        return 0
    print(f"wave: {N_SNAPSHOTS} snapshots of {shape} on {comm.size} ranks, topology {pressure._distributor.topology}")
    if not arguments.check:
        return 0
    for name, value in seconds.items():
        print(f"wave: the model stood {1e3 * value / N_SNAPSHOTS:.1f} ms a snapshot in {name}")
    reader = ms.open_reader(arguments.url)
    kept = [np.load(gathered / f"{i}.npy") for i in range(N_SNAPSHOTS)]
    differing = [i for i, own in enumerate(kept) if reader.read_record("pressure", i).tobytes() != own.tobytes()]
    moved = all((a != b).any() for a, b in itertools.pairwise(kept))
    print(f"wave: compared pressure, records 0 to {N_SNAPSHOTS - 1}: {len(differing)} differ, all move: {moved}")
    return 0 if not differing and moved else 1


if __name__ == "__main__":
    sys.exit(main())

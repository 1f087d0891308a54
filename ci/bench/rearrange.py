"""What rearranging costs:  python ci/bench/rearrange.py

Each rank holds 64 MiB of a field. *aligned*: its box is what it writes, so nothing moves. *shift*: every box lies half
a box beside the shards, as far off as a shift can be: half of the field moves. *pencils*: the ranks hold columns, the
shards are rows, so all but one part of each box moves, in pieces that are not contiguous. *gather*: as *shift*, but the
usual way: everything is gathered on rank 0, which writes it. *hdf5*: as *shift*, with parallel HDF5 (collective
writes, no filter) through Debian's python3-h5py-mpi, which root on a Debian gets installed if it is missing.

The first four take turns record by record in one process group, hdf5 in one of its own; medians. Cost is
(x - aligned) / aligned. What is asked is what moving costs in memory, messages and time of the cores, so the files lie
in memory unless --folder says otherwise: a disk that stalls for the time of a record or two hides all of it. The last
line is JSON. Fails if the cost of *shift* is above --target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NY, NX = 4096, 4096  # cells a rank: 64 MiB of float32
N_WARM, N_RECORDS = 2, 6

_TURN_SECONDS = 60

DEBIAN_PYTHON = "/usr/bin/python3"
DEBIAN_MPIEXEC = "mpiexec.openmpi --allow-run-as-root --oversubscribe"


def field_of(y: NDArray[Any], x: NDArray[Any]) -> NDArray[np.float32]:
    """Return waves with noise in the last bits, at these rows and columns."""
    smooth = 280 + 15 * np.sin(3e-4 * y)[:, None] * np.cos(5e-4 * x) + 2 * np.sin(0.01 * (y[:, None] + x))
    noise = np.random.default_rng(int(y[0])).standard_normal((len(y), len(x)), "float32")
    return np.asarray(smooth + 0.01 * noise, "float32")


def boxes_of(case: str, rank: int, size: int) -> list[dict[str, tuple[int, int]]]:
    """Return what a rank holds."""
    rows = {"y": (rank * NY, (rank + 1) * NY), "x": (0, NX)}
    if case == "aligned":
        return [rows]
    if case == "pencils":
        return [{"y": (0, size * NY), "x": (rank * NX // size, (rank + 1) * NX // size)}]
    half, n = NY // 2, size * NY
    start = rank * NY + half
    if start + NY <= n:
        return [{"y": (start, start + NY), "x": (0, NX)}]
    return [{"y": (start, n), "x": (0, NX)}, {"y": (0, half), "x": (0, NX)}]


def blocks_of(boxes: list[dict[str, tuple[int, int]]]) -> list[NDArray[np.float32]]:
    return [field_of(np.arange(*box["y"]), np.arange(*box["x"])) for box in boxes]


@contextlib.contextmanager
def stream(folder: Path, comm: Any, n_rows: int, boxes: Any) -> Iterator[Any]:
    """Open a store of one field, in shards of 64 MiB and inner chunks of 1 MiB."""
    import mpistream as ms

    schema = ms.StreamSchema(
        dims={"time": None, "y": n_rows, "x": NX},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={"u": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape={"time": 1, "y": NY, "x": NX},
        chunk_shape={"time": 1, "y": 64, "x": NX},
    )
    # Encoded and written in the caller: what moving costs is then not hidden by anything.
    options = ms.Options(durability="none", threads=0)
    with ms.write_open(folder, schema, comm=comm, region=boxes, options=options) as writer:
        yield writer


@contextlib.contextmanager
def mpistream(case: str, folder: Path) -> Iterator[Callable[[int], None]]:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    boxes = boxes_of(case, comm.rank, comm.size)
    blocks = blocks_of(boxes)
    with stream(folder, comm, NY * comm.size, boxes) as writer:

        def write(i: int) -> None:
            writer.write_record(float(i), {"u": blocks if len(blocks) > 1 else blocks[0]})
            writer.commit()

        yield write


@contextlib.contextmanager
def gather(folder: Path) -> Iterator[Callable[[int], None]]:
    """The usual way: rank 0 gathers the field and writes it, with the same codec and chunks."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    block = np.concatenate(blocks_of(boxes_of("shift", comm.rank, comm.size)))
    if comm.rank > 0:
        yield lambda i: comm.Gather(block, None, root=0)  # noqa: ARG005 (the record is rank 0's)
        return
    whole = np.empty((comm.size * NY, NX), "float32")
    with stream(folder, MPI.COMM_SELF, NY * comm.size, None) as writer:

        def write(i: int) -> None:
            comm.Gather(block, whole, root=0)
            writer.write_record(float(i), {"u": np.roll(whole, NY // 2, axis=0)})
            writer.commit()

        yield write


def times_of_cases(folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each record, all ranks together; the cases take turns record by record."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        writes = {c: stack.enter_context(mpistream(c, folder / c)) for c in ("aligned", "shift", "pencils")}
        writes["gather"] = stack.enter_context(gather(folder / "gather"))
        for i in range(N_WARM + N_RECORDS):
            for case, write in writes.items():
                comm.Barrier()
                began = time.perf_counter()
                write(i)
                comm.Barrier()
                if i >= N_WARM:
                    found.setdefault(case, []).append(time.perf_counter() - began)
    return found


def write_nothing(data: Any) -> None:
    """Take part in a collective write without cells.

    Assigning an empty selection does not: h5py leaves the call out, and the other ranks wait for ever (h5py 965).
    """
    import h5py

    nowhere = data.id.get_space()
    nowhere.select_none()
    nothing = h5py.h5s.create_simple((1,))
    nothing.select_none()
    data.id.write(nothing, nowhere, np.empty(1, "float32"), dxpl=data._dxpl)


def times_of_hdf5(folder: Path) -> dict[str, list[float]]:
    """Parallel HDF5: every rank writes its boxes of a dataset, collectively, without a filter."""
    import h5py
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    boxes = boxes_of("shift", comm.rank, comm.size)
    blocks = blocks_of(boxes)
    n = N_WARM + N_RECORDS
    found = []
    with h5py.File(folder / "run.h5", "w", driver="mpio", comm=comm) as file:
        data = file.create_dataset("u", (n, comm.size * NY, NX), "float32")
        for i in range(n):
            comm.Barrier()
            began = time.perf_counter()
            for k in range(2):
                with data.collective:
                    if k < len(boxes):
                        data[i, slice(*boxes[k]["y"]), :] = blocks[k]
                    else:
                        write_nothing(data)
            file.flush()
            comm.Barrier()
            found.append(time.perf_counter() - began)
    return {"hdf5": found[N_WARM:]}


TURNS: dict[str, Callable[[Path], dict[str, list[float]]]] = {"mpistream": times_of_cases, "hdf5": times_of_hdf5}


def turn(name: str, n_ranks: int, arguments: argparse.Namespace) -> dict[str, list[float]] | None:
    python, mpiexec = sys.executable, os.environ.get("MPIEXEC", "mpiexec")
    environment = dict(os.environ)
    if name == "hdf5":
        python, mpiexec = DEBIAN_PYTHON, DEBIAN_MPIEXEC
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory(prefix="mpistream-rearrange-", dir=arguments.folder) as folder:
        command = [*shlex.split(mpiexec), "-n", str(n_ranks), python, __file__, "--turn", name, "--folder", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=_TURN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None
    return json.loads(output.splitlines()[-1]) if process.returncode == 0 else None


def why_no_hdf5() -> str | None:
    """Return why there is no parallel HDF5 here, None if there is; install it if that can be done."""
    probe = [*shlex.split(DEBIAN_MPIEXEC), "-n", "2", DEBIAN_PYTHON, "-c"]
    probe += ["import mpi4py.MPI, h5py; assert h5py.get_config().mpi"]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def works() -> bool:
        try:
            return subprocess.run(probe, check=False, capture_output=True, timeout=60, env=environment).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    if works():
        return None
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "python3-h5py-mpi is not installed, and only root on a Debian can do that here"
    command = ["apt-get", "install", "-y", "--no-install-recommends", "python3-h5py-mpi", "openmpi-bin"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    return None if works() else f"python3-h5py-mpi can't be installed: {done.stderr.strip()[-200:]}"


def measure(n_ranks: int, arguments: argparse.Namespace) -> dict[str, float]:
    names = [name for name in TURNS if name != "hdf5" or arguments.has_hdf5]
    found: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name in tuple(names):
            times = turn(name, n_ranks, arguments)
            for case, seconds in (times or {}).items():
                found.setdefault(case, []).extend(seconds)
            if times is None and name == "hdf5":
                # Once is enough to wait for what does not end.
                arguments.has_hdf5 = False
                names.remove(name)
    return {case: statistics.median(seconds) for case, seconds in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    parser.add_argument("--folder", default=memory, help="where to write; /dev/shm by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--target", type=float, default=0.25)
    parser.add_argument("--turn", choices=TURNS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        from mpi4py import MPI

        found = TURNS[arguments.turn](Path(arguments.folder))
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(found))
        return 0
    reason = why_no_hdf5()
    arguments.has_hdf5 = reason is None
    document: dict[str, Any] = {"benchmark": "rearrange", "target": arguments.target}
    is_met = True
    for n_ranks in arguments.ranks:
        medians = measure(n_ranks, arguments)
        print(f"{n_ranks} ranks x 64 MiB a record")
        for name, seconds in medians.items():
            cost = seconds / medians["aligned"] - 1
            speed = n_ranks * NY * NX * 4 / seconds / 1e6
            print(f"  {name:8} {1e3 * seconds:8.1f} ms {speed:7.0f} MB/s  cost {100 * cost:6.1f} %")
        if "hdf5" not in medians:
            print(f"  hdf5     not measured: {reason or 'it failed'}")
        document[str(n_ranks)] = {name: round(s, 5) for name, s in medians.items()}
        is_met &= medians["shift"] / medians["aligned"] - 1 <= arguments.target
    print(json.dumps(document))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())

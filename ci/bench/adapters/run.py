"""One turn of one library, on every rank:  mpiexec -n 2 python adapters/run.py MODULE '{job as JSON}'

Rank 0 prints one line of JSON: what was measured, or why it could not be. Memory is what the rank took at most beyond
what it held before the store was opened: interpreter, libraries and the field itself are not in it.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapters.data import field_of
from adapters.job import Job, MissingError, Peer

_BUSY_SECONDS = 0.12  # of a model's step between two records, about: found by running it
_N_LOOKS = 3  # passes over all records when reading


def status_nbytes(name: str) -> int:
    """Return VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def begin_peak() -> int:
    """Return the memory that is held now; from here on the largest is kept (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_nbytes("VmRSS")


def blocks_of(job: Job, rank: int) -> list[Any]:
    """Return a block a variable; that of the first one is the field as it is."""
    field = field_of(job.data, rank, job.ny * job.n_variables, job.nx)
    return list(np.ascontiguousarray(field.reshape(job.n_variables, job.ny, job.nx)))


def mark(blocks: list[Any], i: int) -> None:
    """Make a record differ from the others, and show who still looks at a block that was given back."""
    for block in blocks:
        block[0] = i


def checked(job: Job, peer: Peer, blocks: list[Any]) -> int:
    """Return the checksum of this rank's box of a record in the middle, read back; it has to be what was written."""
    i, k = job.n_all - 1 if peer.keeps_last_only else job.n_all // 2, job.n_variables // 2
    mark(blocks, i)
    peer.begin_reading()
    found = np.ascontiguousarray(peer.read(i, job.names[k], 0, job.ny))
    peer.end_reading()
    if found.shape != blocks[k].shape or not np.array_equal(found, blocks[k]):
        raise AssertionError(f"record {i} does not read back as it was written")
    return zlib.crc32(found)


def left_in(folder: str) -> tuple[int, int]:
    """Return files and bytes."""
    sizes = [p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()]
    return len(sizes), sum(sizes)


def run_write(job: Job, peer: Peer, comm: Any) -> dict[str, Any]:
    """Time records from the first one that counts until all are handed to the operating system."""
    blocks = blocks_of(job, comm.rank)
    held = begin_peak()
    peer.open()
    for i in range(job.n_warm):
        mark(blocks, i)
        peer.write(i, blocks)
    comm.Barrier()
    began = time.perf_counter()
    for i in range(job.n_warm, job.n_all):
        mark(blocks, i)
        peer.write(i, blocks)
    peer.close()
    comm.Barrier()
    seconds = time.perf_counter() - began
    peak = status_nbytes("VmHWM") - held
    n_files, nbytes = left_in(job.folder)
    return {
        "seconds": seconds / job.n_records,
        "peaks": comm.gather(peak),
        "n_files": n_files,
        "nbytes": nbytes / job.n_all,
        "checksum": comm.gather(checked(job, peer, blocks)),
    }


def python_step(state: list[float]) -> None:
    """Step a model without numpy: 1,000 cells that diffuse."""
    for i in range(1, len(state) - 1):
        state[i] += 0.1 * (state[i - 1] - 2 * state[i] + state[i + 1])


def numpy_step(state: Any) -> None:
    """Step a model of a field that diffuses, in place."""
    state[1:-1, 1:-1] += 0.1 * (state[:-2, 1:-1] + state[2:, 1:-1] + state[1:-1, :-2] + state[1:-1, 2:]) - (
        0.4 * state[1:-1, 1:-1]
    )


def stepper(model: str, block: Any) -> Callable[[], None]:
    """Return what steps the model: python (no numpy), small (64 x 64 cells) or large (the block itself)."""
    if model == "python":
        cells = [float(i % 7) for i in range(1000)]
        return lambda: python_step(cells)
    state = block if model == "large" else np.array(block[:64, :64], "float32")
    return lambda: numpy_step(state)


def n_steps_of(step: Callable[[], None]) -> int:
    """Return how many steps a model makes between two records, so that it computes about as long as others."""
    step()
    began, n = time.perf_counter(), 0
    while time.perf_counter() - began < _BUSY_SECONDS:
        step()
        n += 1
    return max(n, 1)


def run_blocked(job: Job, peer: Peer, comm: Any) -> dict[str, Any]:
    """Time what the simulation waits in each write, with a model that leaves the output time to keep up."""
    blocks = blocks_of(job, comm.rank)
    step = stepper("small", blocks[0])
    n_steps = 2 * n_steps_of(step)
    held = begin_peak()
    peer.open()
    waits = []
    for i in range(job.n_all):
        for _ in range(n_steps):
            step()
        mark(blocks, i)
        began = time.perf_counter()
        peer.write(i, blocks)
        waits.append(time.perf_counter() - began)
    peer.close()
    peak = status_nbytes("VmHWM") - held
    counted = waits[job.n_warm :]
    return {
        "seconds": statistics.median(counted),
        "longest": max(counted),
        "peaks": [peak],
        "checksum": [checked(job, peer, blocks)],
    }


def run_model(job: Job, peer: Peer, comm: Any) -> dict[str, Any]:
    """Time a model with output, and the same steps without, half of them before and half after it."""
    blocks = blocks_of(job, comm.rank)
    step = stepper(job.model, blocks[0])
    n_steps = n_steps_of(step)

    held_up = 0.0

    def write(i: int) -> None:
        nonlocal held_up
        start = time.perf_counter()
        peer.write(i, blocks)
        held_up += time.perf_counter() - start

    def steps(n_records: int, write: Callable[[int], None] | None = None) -> float:
        began = time.perf_counter()
        for i in range(n_records):
            for _ in range(n_steps):
                step()
            if write is not None:
                mark(blocks, i)
                write(i)
        return time.perf_counter() - began

    before = steps(job.n_all // 2)
    held = begin_peak()
    peer.open()
    began = time.perf_counter()
    stepped = steps(job.n_all, write)
    peer.close()
    seconds = time.perf_counter() - began
    peak = status_nbytes("VmHWM") - held
    without = (before + steps(job.n_all // 2)) / (job.n_all // 2 * 2) * job.n_all
    peer.begin_reading()
    # The large model steps the block itself, so what record 0 was is gone; its mark and its shape are not.
    found = np.asarray(peer.read(0, job.names[0], 0, job.ny))
    peer.end_reading()
    if found.shape != blocks[0].shape or (found[0] != 0).any():
        raise AssertionError("record 0 does not read back as it was written")
    # What it costs: the calls, closing, and steps that take longer because something runs beside them.
    parts = {"held_up": held_up, "closing": seconds - stepped, "slower": stepped - held_up - without}
    return {
        "seconds": seconds / job.n_all,
        "without": without / job.n_all,
        **{name: value / job.n_all for name, value in parts.items()},
        "peaks": [peak],
    }


def run_read(job: Job, peer: Peer, comm: Any) -> dict[str, Any]:
    """Time whole boxes, and one inner chunk a shard, when all of it lies in the cache of the operating system."""
    blocks = blocks_of(job, comm.rank)
    peer.open()
    for i in range(job.n_all):
        mark(blocks, i)
        peer.write(i, blocks)
    peer.close()
    comm.Barrier()
    checksum = checked(job, peer, blocks)
    held = begin_peak()
    peer.begin_reading()
    found: dict[str, float] = {}
    start = job.ny // 2 // job.chunk_ny * job.chunk_ny
    for name, box in (("whole", (0, job.ny)), ("chunk", (start, start + job.chunk_ny))):
        for i in range(job.n_all):
            peer.read(i, job.names[0], *box)
        comm.Barrier()
        began = time.perf_counter()
        for _ in range(_N_LOOKS):
            for i in range(job.n_all):
                peer.read(i, job.names[0], *box)
        comm.Barrier()
        found[name] = (time.perf_counter() - began) / (_N_LOOKS * job.n_all)
    peak = status_nbytes("VmHWM") - held
    peer.end_reading()
    return {"seconds": found["whole"], **found, "peaks": comm.gather(peak), "checksum": comm.gather(checksum)}


TASKS = {"write": run_write, "blocked": run_blocked, "model": run_model, "read": run_read}


def main() -> int:
    module, job = sys.argv[1], Job(**json.loads(sys.argv[2]))
    if job.n_cores:
        # Before a library looks how many there are, or starts a thread.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.n_cores])
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    missing = None
    try:
        peer = importlib.import_module(f"adapters.{module}").Peer(job, comm)
    except (ImportError, MissingError) as error:
        missing = f"{type(error).__name__}: {error}" if isinstance(error, ImportError) else str(error)
    missing = next((m for m in comm.allgather(missing) if m is not None), None)
    if missing is None:
        try:
            found = TASKS[job.task](job, peer, comm)
        except BaseException:  # noqa: BLE001 (see below)
            # One rank alone can't end this; what it says goes to the driver, and all ranks end.
            traceback.print_exc()
            sys.stderr.flush()
            comm.Abort(1)
            os._exit(1)
    else:
        found = {"missing": missing}
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

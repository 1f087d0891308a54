"""How long a simulation is blocked by its output:  python ci/bench/blocked.py

One rank, which has a core to spare, computes and writes a record of 32 MiB, a smooth field plus noise, again and again.
*background* is the time inside ``write_record`` where a thread encodes and writes; *copy* is the time of nothing but a
copy of the block into an array that is there already; *synchronous* is ``write_record`` with ``threads=0``. The step
of the model in between, numpy over an array of its own, is long enough for the thread to keep up; what it is slowed
down by that is shown, too. All take turns, each turn in a new process. Medians over the turns; the last line is JSON.
Fails if background / copy is above --target.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistream as ms

NY, NX = 2048, 4096  # cells of the block: 32 MiB of float32
CHUNK_NY = 64  # 64 rows of it are 1 MiB
STEP_SECONDS = 0.25


def block_of() -> NDArray[np.float32]:
    """Return the block: waves of several lengths, and noise in the last bits."""
    y, x = np.arange(NY)[:, None] / NY, np.arange(NX) / NX
    smooth = 280 + 15 * np.sin(3 * y) * np.cos(5 * x) + 2 * np.sin(40 * (x + y))
    noise = np.random.default_rng(0).standard_normal((NY, NX), "float32")
    return np.asarray(smooth + 0.01 * noise, "float32")


def schema() -> ms.StreamSchema:
    return ms.StreamSchema(
        dims={"time": None, "y": NY, "x": NX},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={"u": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape={"time": 1, "y": NY, "x": NX},
        chunk_shape={"time": 1, "y": CHUNK_NY, "x": NX},
        codec="fast",
    )


class Model:
    """What computes between two records: as many steps as take `STEP_SECONDS` alone."""

    def __init__(self) -> None:
        self._field = np.linspace(0, 1, 2**18, dtype="float32")
        began, self._n = time.perf_counter(), 0
        while time.perf_counter() - began < STEP_SECONDS:
            self._one()
            self._n += 1

    def _one(self) -> None:
        np.sin(self._field, out=self._field)

    def step(self) -> float:
        """Compute; return how long it took."""
        began = time.perf_counter()
        for _ in range(self._n):
            self._one()
        return time.perf_counter() - began


def memory_nbytes(name: str) -> int:
    """Return what the kernel says of this process's memory: ``VmRSS`` now, ``VmHWM`` its peak (proc_pid_status(5))."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def run_copy(folder: Path, n_records: int) -> dict[str, Any]:
    """Copy the block, and nothing else."""
    del folder
    block, model = block_of(), Model()
    target = np.zeros_like(block)
    blocked, steps = [], []
    for _ in range(n_records):
        began = time.perf_counter()
        np.copyto(target, block)
        blocked.append(time.perf_counter() - began)
        steps.append(model.step())
    return {"blocked": blocked, "steps": steps, "peak": 0}


def run_writer(folder: Path, n_records: int, threads: int) -> dict[str, Any]:
    """Write with mpistream; records are committed as they become durable."""
    block, model = block_of(), Model()
    blocked, steps, commits = [], [], []
    options = ms.Options(durability="none", threads=threads)
    with ms.write_open(folder / "run.zarr", schema(), options=options) as writer:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory_nbytes("VmRSS")
        for i in range(n_records):
            began = time.perf_counter()
            writer.write_record(float(i), {"u": block})
            blocked.append(time.perf_counter() - began)
            steps.append(model.step())
            began = time.perf_counter()
            writer.commit(wait=False)
            commits.append(time.perf_counter() - began)
        stats = writer.stats
    return {
        "blocked": blocked,
        "steps": steps,
        "commits": commits,
        "peak": memory_nbytes("VmHWM") - before,
        "waited": stats.seconds["wait"],
        "mode": stats.mode,
        "n_buffers": stats.n_buffers,
    }


LOOPS = {
    "copy": run_copy,
    "background": lambda folder, n: run_writer(folder, n, 1),
    "synchronous": lambda folder, n: run_writer(folder, n, 0),
}


def turn(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one loop in a process of its own, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="mpistream-blocked-", dir=arguments.folder) as folder:
        command = [sys.executable, __file__, "--loop", name, "--folder", folder, "--records", str(arguments.records)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(found: dict[str, list[dict[str, Any]]], target: float) -> bool:
    """Print table and JSON; return whether the target is met."""

    def median(name: str, what: str) -> float:
        # The first record of a turn is not counted: its memory is touched for the first time, here and there.
        return statistics.median(statistics.median(t[what][1:]) for t in found[name])

    print(f"a record of 32 MiB, {len(found['copy'])} turns, {len(os.sched_getaffinity(0))} cores")
    for name, turns in found.items():
        commit = f", commit {1e3 * median(name, 'commits'):5.1f} ms" if "commits" in turns[0] else ""
        peak = max(t["peak"] for t in turns) / 2**20
        print(
            f"{name:12} blocked {1e3 * median(name, 'blocked'):6.1f} ms a record, step of the model "
            f"{1e3 * median(name, 'steps'):6.1f} ms{commit}, memory {peak:5.0f} MiB"
        )
    ratio = median("background", "blocked") / median("copy", "blocked")
    to_synchronous = median("background", "blocked") / median("synchronous", "blocked")
    print("memory: the peak beyond that before the first record, at most 64 MiB (max_pending_nbytes) and a shard")
    print(f"background / copy {ratio:.3f}, target {target}; background / synchronous {to_synchronous:.3f}")
    print(json.dumps({"benchmark": "blocked", "ratio": round(ratio, 4), "target": target, "turns": found}))
    return ratio <= target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where to write; the system's folder for temporary files by default")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each loop")
    parser.add_argument("--records", type=int, default=12, help="records a turn")
    parser.add_argument("--target", type=float, default=1.25)
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)  # one turn
    arguments = parser.parse_args()
    if arguments.loop:
        print(json.dumps(LOOPS[arguments.loop](Path(arguments.folder), arguments.records)))
        return 0
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in LOOPS}
    for _ in range(arguments.rounds):
        for name in LOOPS:
            turns[name].append(turn(name, arguments))
    return 0 if report(turns, arguments.target) else 1


if __name__ == "__main__":
    sys.exit(main())

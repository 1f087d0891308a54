"""How much of the speed of a bare codec loop a parallel writer keeps:  python ci/bench/ratio.py

Each of two ranks has one block of 32 MiB, a smooth field plus noise. *mpistream* writes it as a record and commits,
again and again; *bare* does only what can't be left out: the same codec calls on the same inner chunks of 1 MiB, their
checksums, one file a rank and record with the same number of bytes, and a barrier. Both write to the same disk, in
turns, each turn in new processes, all in one run.

*tuned* is the bare loop in a process whose allocator keeps freed memory, as a writer of mpistream asks it to: what is
left when that gain is taken out. With ``--codec none`` nobody copies anything. Medians over the turns; the last line is
JSON. Fails if bare / mpistream is below --target.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numcodecs.blosc
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import mpistream as ms

# A rank has one core, here and there. mpistream sets the same switch; here it is seen to be set.
numcodecs.blosc.use_threads = False

N_RANKS = 2
NY, NX = 2048, 4096  # cells of a rank's block: 32 MiB of float32
CHUNK_NY = 64  # 64 rows of it are 1 MiB
N_CHUNKS = NY // CHUNK_NY
BLOCK_NBYTES = NY * NX * 4
# Shard index: an offset and a length of 8 bytes an inner chunk, and a checksum.
INDEX_NBYTES = 16 * N_CHUNKS + 4


def block_of(rank: int) -> NDArray[np.float32]:
    """Return a rank's block: waves of several lengths, and noise in the last bits."""
    y, x = np.arange(NY)[:, None] / NY + rank, np.arange(NX) / NX
    smooth = 280 + 15 * np.sin(3 * y) * np.cos(5 * x) + 2 * np.sin(40 * (x + y))
    noise = np.random.default_rng(rank).standard_normal((NY, NX), "float32")
    return np.asarray(smooth + 0.01 * noise, "float32")


def schema_of(size: int, codec: str) -> ms.StreamSchema:
    return ms.StreamSchema(
        dims={"time": None, "y": NY * size, "x": NX},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={"u": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape={"time": 1, "y": NY, "x": NX},
        chunk_shape={"time": 1, "y": CHUNK_NY, "x": NX},
        codec=codec,
    )


def timed(comm: MPI.Intracomm, n_warm: int, n_records: int, write: Callable[[int], None]) -> float:
    """Return the seconds a record that all ranks together take, after some that are not counted."""
    for i in range(n_warm):
        write(i)
    comm.Barrier()
    began = time.perf_counter()
    for i in range(n_warm, n_warm + n_records):
        write(i)
    comm.Barrier()
    return (time.perf_counter() - began) / n_records


def run_mpistream(comm: MPI.Intracomm, folder: Path, codec_name: str, n_warm: int, n_records: int) -> dict[str, Any]:
    """Write records with mpistream, a commit each; opening and closing are not counted."""
    block = block_of(comm.rank)
    options = ms.Options(durability="none", threads=0)
    with ms.write_open(folder / "run.zarr", schema_of(comm.size, codec_name), comm=comm, options=options) as writer:

        def write(i: int) -> None:
            writer.write_record(float(i), {"u": block})
            writer.commit()

        seconds = timed(comm, n_warm, n_records, write)
        n = n_warm + n_records
        return {
            "seconds": seconds,
            "nbytes": writer.stats.nbytes_encoded // n,
            "inside": {name: spent / n for name, spent in writer.stats.seconds.items()},
        }


def run_bare(comm: MPI.Intracomm, folder: Path, codec_name: str, n_warm: int, n_records: int) -> dict[str, Any]:
    """Do the same codec calls and file writes in a plain loop."""
    block = block_of(comm.rank)
    codec = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE, blocksize=0, typesize=4)
    index = bytes(INDEX_NBYTES)
    total = 0

    def write(i: int) -> None:
        nonlocal total
        pieces: list[Any] = []
        for k in range(N_CHUNKS):
            raw = block[k * CHUNK_NY : (k + 1) * CHUNK_NY].reshape(-1).view(np.uint8)
            data = raw if codec_name == "none" else codec.encode(raw)
            pieces += [data, google_crc32c.value(data).to_bytes(4, "little")]
        pieces.append(index)
        total = sum(map(len, pieces))
        fd = os.open(folder / f"{i}.{comm.rank}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        written = os.writev(fd, pieces)
        os.close(fd)
        assert written == total, "the disk is full"
        comm.Barrier()

    return {"seconds": timed(comm, n_warm, n_records, write), "nbytes": total}


def run_tuned(comm: MPI.Intracomm, folder: Path, codec_name: str, n_warm: int, n_records: int) -> dict[str, Any]:
    """Do as `run_bare` with an allocator that keeps freed memory (mallopt(3), "M_MMAP_THRESHOLD")."""
    np.empty(31 * 1024 * 1024, np.uint8)
    return run_bare(comm, folder, codec_name, n_warm, n_records)


LOOPS = {"mpistream": run_mpistream, "bare": run_bare, "tuned": run_tuned}


def turn(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one loop in processes of its own, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="mpistream-ratio-", dir=arguments.folder) as folder:
        command = [*shlex.split(os.environ.get("MPIEXEC", "mpiexec")), "-n", str(N_RANKS), sys.executable, __file__]
        command += ["--loop", name, "--folder", folder, "--records", str(arguments.records)]
        command += ["--codec", arguments.codec]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(found: dict[str, list[dict[str, Any]]], target: float) -> bool:
    """Print table and JSON; return whether the target is met."""
    nbytes = BLOCK_NBYTES * N_RANKS
    seconds = {name: [turn["seconds"] for turn in turns] for name, turns in found.items()}
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    print(f"{N_RANKS} ranks x 32 MiB a record, {len(seconds['bare'])} turns")
    print(f"{'':10} {'median':>10} {'fastest':>10} {'slowest':>10} {'speed':>12} {'written a rank':>16}")
    for name, s in seconds.items():
        print(
            f"{name:10} {1e3 * medians[name]:7.1f} ms {1e3 * min(s):7.1f} ms {1e3 * max(s):7.1f} ms "
            f"{nbytes / medians[name] / 1e6:7.0f} MB/s {found[name][0]['nbytes']:12d} B"
        )
    names = found["mpistream"][0]["inside"]
    inside = {n: statistics.median(turn["inside"][n] for turn in found["mpistream"]) for n in names}
    print("inside mpistream, on rank 0: " + ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in inside.items()))
    ratios = {name: medians[name] / medians["mpistream"] for name in ("bare", "tuned")}
    print(f"bare / mpistream {ratios['bare']:.3f}, target {target}; tuned / mpistream {ratios['tuned']:.3f}")
    document = {
        "benchmark": "ratio",
        "ranks": N_RANKS,
        "ratio": round(ratios["bare"], 4),
        "ratio_to_tuned": round(ratios["tuned"], 4),
        "target": target,
        "seconds_per_record": {name: [round(x, 6) for x in s] for name, s in seconds.items()},
        "seconds_inside": {name: round(s, 6) for name, s in inside.items()},
    }
    print(json.dumps(document))
    return ratios["bare"] >= target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where to write; the system's folder for temporary files by default")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each loop")
    parser.add_argument("--records", type=int, default=12, help="records a turn")
    parser.add_argument("--codec", choices=["fast", "none"], default="fast")
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)  # one turn, under mpiexec
    arguments = parser.parse_args()
    if arguments.loop:
        comm = MPI.COMM_WORLD
        n = arguments.records
        found = LOOPS[arguments.loop](comm, Path(arguments.folder), arguments.codec, n // 3, n)
        if comm.rank == 0:
            print(json.dumps(found))
        return 0
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in LOOPS}
    for _ in range(arguments.rounds):
        for name in LOOPS:
            turns[name].append(turn(name, arguments))
    return 0 if report(turns, arguments.target) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How much of the speed of a bare codec loop a parallel writer keeps:  mpiexec -n 2 python ci/bench/ratio.py

Each rank has one block of 32 MiB, a smooth field plus noise. *mpistream* writes it as a record and commits, again and
again; *bare* does only what can't be left out: the same codec calls on the same inner chunks of 1 MiB, their checksums,
one file a rank and record with the same number of bytes, and a barrier. Both write to the same disk, in turns, in one
run; the first turn of each is not counted. The last line is JSON. Fails if the ratio is below --target.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
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


def schema_of(size: int) -> ms.StreamSchema:
    return ms.StreamSchema(
        dims={"time": None, "y": NY * size, "x": NX},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={"u": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape={"time": 1, "y": NY, "x": NX},
        chunk_shape={"time": 1, "y": CHUNK_NY, "x": NX},
        codec="fast",
    )


class Turns:
    """The two loops, over the same block and folder."""

    def __init__(self, comm: MPI.Intracomm, folder: Path, n_records: int) -> None:
        self.comm = comm
        self.folder = folder
        self.n_records = n_records
        self.block = block_of(comm.rank)
        self.nbytes: dict[str, int] = {}
        self.seconds: dict[str, list[float]] = {"write": [], "commit": []}

    def _timed(self, loop: Callable[[], None]) -> float:
        """Return the seconds that all ranks together take for the loop."""
        self.comm.Barrier()
        began = time.perf_counter()
        loop()
        self.comm.Barrier()
        return time.perf_counter() - began

    def mpistream(self) -> float:
        """Write records with mpistream, a commit each, into a new store; its opening and closing are not counted."""
        path = self.folder / "run.zarr"
        options = ms.Options(durability="none", threads=0)
        with ms.write_open(path, schema_of(self.comm.size), comm=self.comm, options=options) as writer:

            def loop() -> None:
                for i in range(self.n_records):
                    writer.write_record(float(i), {"u": self.block})
                    writer.commit()

            seconds = self._timed(loop)
            self.nbytes["mpistream"] = writer.stats.nbytes_encoded // self.n_records
            for name, spent in writer.stats.seconds.items():
                self.seconds[name].append(spent / self.n_records)
        self._clear()
        return seconds / self.n_records

    def bare(self) -> float:
        """Do the same codec calls and file writes in a plain loop."""
        path = self.folder / "bare"
        path.mkdir(exist_ok=True)
        codec = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE, blocksize=0, typesize=4)
        index = bytes(INDEX_NBYTES)

        def loop() -> None:
            for i in range(self.n_records):
                pieces: list[Any] = []
                for k in range(N_CHUNKS):
                    raw = self.block[k * CHUNK_NY : (k + 1) * CHUNK_NY].reshape(-1).view(np.uint8)
                    data = codec.encode(raw)
                    pieces += [data, google_crc32c.value(data).to_bytes(4, "little")]
                pieces.append(index)
                total = sum(map(len, pieces))
                fd = os.open(path / f"{i}.{self.comm.rank}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                written = os.writev(fd, pieces)
                os.close(fd)
                assert written == total, "the disk is full"
                self.nbytes["bare"] = total
                self.comm.Barrier()

        seconds = self._timed(loop)
        self._clear()
        return seconds / self.n_records

    def _clear(self) -> None:
        """Remove what a turn has written, so that the next one finds as much room and as few dirty pages."""
        self.comm.Barrier()
        if self.comm.rank == 0:
            for name in ("run.zarr", "bare"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        self.comm.Barrier()


def measure(turns: Turns, n_rounds: int) -> dict[str, list[float]]:
    """Return the seconds per record of each loop, round by round, without the first round."""
    found: dict[str, list[float]] = {"mpistream": [], "bare": []}
    for _ in range(n_rounds + 1):
        found["mpistream"].append(turns.mpistream())
        found["bare"].append(turns.bare())
    return {name: seconds[1:] for name, seconds in found.items()}


def report(turns: Turns, found: dict[str, list[float]], target: float) -> bool:
    """Print table and JSON; return whether the target is met."""
    nbytes = BLOCK_NBYTES * turns.comm.size
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratio = medians["bare"] / medians["mpistream"]
    print(f"{turns.comm.size} ranks x 32 MiB a record, {turns.n_records} records a turn, {len(found['bare'])} rounds")
    print(f"{'':10} {'median':>10} {'fastest':>10} {'slowest':>10} {'speed':>12} {'written a rank':>16}")
    for name, seconds in found.items():
        print(
            f"{name:10} {1e3 * medians[name]:7.1f} ms {1e3 * min(seconds):7.1f} ms {1e3 * max(seconds):7.1f} ms "
            f"{nbytes / medians[name] / 1e6:7.0f} MB/s {turns.nbytes[name]:12d} B"
        )
    inside = {name: statistics.median(seconds[1:]) for name, seconds in turns.seconds.items()}
    print("inside mpistream, on rank 0: " + ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in inside.items()))
    fastest = min(found["bare"]) / min(found["mpistream"])
    print(f"ratio {ratio:.3f}, target {target}; of the fastest rounds, where others disturb least, {fastest:.3f}")
    document = {
        "benchmark": "ratio",
        "ranks": turns.comm.size,
        "ratio": round(ratio, 4),
        "ratio_of_fastest": round(fastest, 4),
        "target": target,
        "seconds_per_record": {name: round(s, 6) for name, s in medians.items()},
        "seconds_inside": {name: round(s, 6) for name, s in inside.items()},
        "rounds": {name: [round(s, 6) for s in seconds] for name, seconds in found.items()},
    }
    print(json.dumps(document))
    return ratio >= target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where to write; the system's folder for temporary files by default")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each loop that count")
    parser.add_argument("--records", type=int, default=6, help="records a turn")
    parser.add_argument("--target", type=float, default=0.85)
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD
    made = tempfile.mkdtemp(prefix="mpistream-ratio-", dir=arguments.folder) if comm.rank == 0 else None
    folder = Path(comm.bcast(made, root=0))
    try:
        turns = Turns(comm, folder, arguments.records)
        found = measure(turns, arguments.rounds)
        is_met = report(turns, found, arguments.target) if comm.rank == 0 else None
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if comm.bcast(is_met, root=0) else 1


if __name__ == "__main__":
    sys.exit(main())

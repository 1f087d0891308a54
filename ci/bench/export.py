"""Memory and speed of an export to netCDF-4:  python ci/bench/export.py [--gib 4]

A store of 4 GiB is written, records of 64 MiB with inner chunks of one record and then of eight, and exported by a
process of its own. Printed are MB/s and the peak of its memory beyond that before the export (VmHWM of
proc_pid_status(5)), and beside it the speed of a plain copy of the file. Both sync what they wrote at the end. Fails if
the peak is above --target MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import mpistream as ms

NY, NX = 4096, 4096  # cells of a record: 64 MiB of float32
EXTENTS = (1, 8)


def write(path: Path, n_records: int, extent: int) -> None:
    """Write the store: waves, and noise in the last bits."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": NY, "x": NX},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={"u": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape={"time": 8, "y": NY // 4, "x": NX},
        chunk_shape={"time": extent, "y": 64 // extent, "x": NX},
    )
    y, x = np.arange(NY)[:, None] / NY, np.arange(NX) / NX
    noise = np.random.default_rng(0).standard_normal((NY, NX), "float32")
    block = (280 + 15 * np.sin(3 * y) * np.cos(5 * x)).astype("float32") + 0.01 * noise
    with ms.write_open(path, schema, options=ms.Options(durability="none")) as writer:
        for i in range(n_records):
            writer.write_record(float(i), {"u": block})
            writer.commit(partial_rows=False)


def memory_nbytes(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def export(path: Path, out: Path) -> dict[str, Any]:
    """Export in this process; return what it took."""
    import h5py

    del h5py  # loaded before the memory is looked at
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_nbytes("VmRSS")
    done = ms.export(path, out)
    return {"nbytes": done.nbytes, "seconds": done.seconds, "peak": memory_nbytes("VmHWM") - before}


def copy(out: Path, to: Path) -> float:
    began = time.perf_counter()
    shutil.copyfile(out, to)
    descriptor = os.open(to, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where to write; the system's folder for temporary files by default")
    parser.add_argument("--gib", type=float, default=4.0, help="bytes of values")
    parser.add_argument("--target", type=float, default=256.0, help="MiB")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(export(*map(Path, arguments.job))))
        return 0
    found = {}
    for extent in EXTENTS:
        with tempfile.TemporaryDirectory(prefix="mpistream-export-", dir=arguments.folder) as folder:
            path, out = Path(folder) / "run.zarr", Path(folder) / "out.nc"
            write(path, max(1, round(arguments.gib * 2**30 / (NY * NX * 4))), extent)
            command = [sys.executable, __file__, "--job", str(path), str(out)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1200)
            of_this: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            of_this["copy"] = copy(out, Path(folder) / "copy.nc")
        found[extent] = of_this
        mb = of_this["nbytes"] / 1e6
        print(
            f"inner chunks of {extent} records: {mb:.0f} MB in {of_this['seconds']:.1f} s, "
            f"{mb / of_this['seconds']:.0f} MB/s (a copy of the file {mb / of_this['copy']:.0f} MB/s), "
            f"peak memory {of_this['peak'] / 2**20:.0f} MiB",
            flush=True,
        )
    print(json.dumps({"benchmark": "export", "target": arguments.target, "found": found}))
    return 0 if max(f["peak"] for f in found.values()) <= arguments.target * 2**20 else 1


if __name__ == "__main__":
    sys.exit(main())

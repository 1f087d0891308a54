"""How long it takes to look at a store of many records:  python ci/bench/looks.py

A store of 100,000 small records is written, each an object of its own (``--row 1``, the worst layout there is) or many
of them in one, a commit every 10,000. Then ``mpistream info``, ``mpistream watch --once`` and ``mpistream verify`` are
started as a user starts them, imports and all, several times each; the best and the worst time are printed, and the
least processor time, which says what they would take on a machine that does nothing else. Fails if the worst of
``info`` or ``watch`` is above --target.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import mpistream as ms

NY, NX = 8, 8
COMMIT_EVERY = 10_000
LOOKS = {"info": ["info"], "watch": ["watch", "--once"], "verify": ["verify"]}


def write(path: Path, n_records: int, row: int) -> None:
    """Write the store."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": NY, "x": NX},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={"u": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape={"time": row, "y": NY, "x": NX},
        chunk_shape={"time": 1, "y": NY, "x": NX},
    )
    block = np.arange(NY * NX, dtype="float32").reshape(NY, NX)
    with ms.write_open(path, schema, options=ms.Options(durability="none", threads=0)) as writer:
        for i in range(n_records):
            writer.write_record(float(i), {"u": block + i})
            if i % COMMIT_EVERY == COMMIT_EVERY - 1:
                writer.commit()


def look(verb: list[str], path: Path) -> tuple[float, float]:
    """Return the seconds of one verb of the command line, from its start to its end, and those of the processor."""
    command = [sys.executable, "-m", "mpistream", verb[0], str(path), *verb[1:]]
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return time.perf_counter() - began, spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where to write; the system's folder for temporary files by default")
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--row", type=int, default=1, help="records an object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", type=float, default=2.0, help="seconds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mpistream-looks-", dir=arguments.folder) as folder:
        path = Path(folder) / "run.zarr"
        began = time.perf_counter()
        write(path, arguments.records, arguments.row)
        print(f"{arguments.records} records, {arguments.row} an object, written in {time.perf_counter() - began:.1f} s")
        found = {
            name: [look(verb, path) for _ in range(1 if name == "verify" else arguments.rounds)]
            for name, verb in LOOKS.items()
        }
    for name, looks in found.items():
        seconds = [wall for wall, _ in looks]
        cpu = min(spent for _, spent in looks)
        print(f"{name:8} {min(seconds):6.2f} to {max(seconds):6.2f} s, processor {cpu:6.2f} s")
    is_quick = all(wall <= arguments.target for name in ("info", "watch") for wall, _ in found[name])
    print(json.dumps({"benchmark": "looks", "target": arguments.target, "seconds": found}))
    return 0 if is_quick else 1


if __name__ == "__main__":
    sys.exit(main())

"""What a commit of many small variables costs, and on what:  mpiexec -n 2 python -m mpi4py ci/bench/small_commits.py

20 variables of 32 KiB a rank, a commit each record, no sync but those that a commit needs (as work (c) of `peers.py`).
The calls below are timed from the outside, while they run one after the other in one thread:

* *codec*: compression and checksums;
* *files*: open, write, rename, stat and close of objects, documents and manifest;
* *folders*: mkdir;
* *syncs*: fsync of what replaces committed data, and of the manifest;
* *waits*: polls and sleeps of the agreements, and the gather of tokens: other ranks are at work;
* *rest*: our own Python.

Prints the share of each on rank 0, in ms a record. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
from mpi4py import MPI

import mpistream as ms
from mpistream import agreement
from mpistream.zarr3 import codecs

N_VARIABLES, NY, NX = 20, 64, 128
N_WARM = 10

spent = dict.fromkeys(("codec", "files", "folders", "syncs", "waits"), 0.0)
_is_inside = False


def timed(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that counts its seconds, but for those of a timed call that it makes."""

    def run(*args: Any, **more: Any) -> Any:
        global _is_inside  # noqa: PLW0603
        if _is_inside:
            return call(*args, **more)
        _is_inside = True
        began = time.perf_counter()
        try:
            return call(*args, **more)
        finally:
            spent[what] += time.perf_counter() - began
            _is_inside = False

    return run


class _Codec:
    """A compressor that is timed."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._codec = _BLOSC(*args, **more)
        self.encode = timed("codec", self._codec.encode)


_BLOSC = numcodecs.Blosc


def watch() -> None:
    """Put the timed calls in the place of the others."""
    numcodecs.Blosc = _Codec
    codecs.crc32c = timed("codec", codecs.crc32c)
    for name in ("open", "writev", "close", "rename", "lstat", "stat", "fstat", "unlink"):
        setattr(os, name, timed("files", getattr(os, name)))
    os.mkdir = timed("folders", os.mkdir)
    os.fsync = timed("syncs", os.fsync)
    for name in ("_votes", "_await_answer", "gather", "await_announcement"):
        setattr(agreement.Channel, name, timed("waits", getattr(agreement.Channel, name)))


def writer_of(folder: Path, *, is_growing: bool, n: int) -> ms.StreamWriter:
    """Return a writer of small variables."""
    world = MPI.COMM_WORLD
    units = "seconds since 2000-01-01"
    schema = ms.StreamSchema(
        dims={"time": None, "y": NY * world.size, "x": NX},
        time=ms.AppendTime(units=units) if is_growing else ms.IndexedTime(np.arange(float(n)), units=units),
        variables={f"v{k:02}": ms.Variable(("time", "y", "x"), "float32") for k in range(N_VARIABLES)},
        shard_shape={"time": 1, "y": NY, "x": NX},
        chunk_shape={"time": 1, "y": NY, "x": NX},
    )
    region = {"y": (world.rank * NY, (world.rank + 1) * NY)}
    options = ms.Options(durability="none", threads=0)
    return ms.write_open(folder, schema, comm=world, region=region, options=options)


def measure(folder: Path, *, is_growing: bool, n: int) -> dict[str, float]:
    """Return ms a record of each kind, on this rank."""
    writer = writer_of(folder, is_growing=is_growing, n=n)
    field = np.cumsum(np.random.default_rng(MPI.COMM_WORLD.rank).standard_normal((N_VARIABLES, NY, NX)), axis=2)
    blocks = dict(zip(writer.schema.variables, field.astype("float32"), strict=True))
    began = 0.0
    for i in range(n):
        if i == N_WARM:
            MPI.COMM_WORLD.barrier()
            spent.update(dict.fromkeys(spent, 0.0))
            began = time.perf_counter()
        if is_growing:
            writer.write_record(float(i), blocks)
        else:
            writer.write_record_at(i, float(i), blocks)
        writer.commit()
    total = time.perf_counter() - began
    found = {**spent, "rest": total - sum(spent.values()), "all": total}
    writer.close()
    return {what: 1e3 * seconds / (n - N_WARM) for what, seconds in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=110)
    parser.add_argument("--folder", help="where the stores lie; by default a temporary folder")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    folder = world.bcast(Path(tempfile.mkdtemp(dir=args.folder)) if world.rank == 0 else None)
    watch()
    found = {}
    try:
        for name, is_growing in (("growing", True), ("preallocated", False)):
            found[name] = measure(folder / name, is_growing=is_growing, n=args.records)
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if world.rank == 0:
        for name, of in found.items():
            print(f"{name:12}", *(f"{what} {value:.2f}" for what, value in of.items()), "ms a record")
        print(json.dumps({"benchmark": "small_commits", "ranks": world.size, "found": found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

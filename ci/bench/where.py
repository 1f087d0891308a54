"""On what the time of a record goes, beside the bare loop:  mpiexec -n 2 python -m mpi4py ci/bench/where.py

Works (a), (b) and (c) of `peers.py`: records of 32 MiB a rank in inner chunks of 1 MiB and of 32 KiB, with and without
codec, and 20 variables of 32 KiB a rank. mpistream runs without threads and commits each record; what it runs is timed
from the outside, beside *limit*, the same codec calls and writes in a bare loop without a commit:

* *codec*: compression;
* *checksum*: CRC32C;
* *write*: writev of objects, documents and manifest;
* *files*: open, rename, stat and close of these;
* *folders*: mkdir;
* *syncs*: fsync of what replaces committed data, and of the manifest;
* *waits*: the agreements and the gather of tokens, most of it for other ranks that are at work;
* *rest*: Python.

Prints ms a record of each on each rank, medians over rounds in which both take turns. *in step* is what it takes where
each record lasts as long as on its slowest rank, as a commit each record has it. The last line is JSON.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
from adapters import limit, stream
from adapters.data import field_of
from adapters.job import Job
from mpi4py import MPI

from mpistream import agreement
from mpistream.zarr3 import codecs, shard

KINDS = ("codec", "checksum", "write", "files", "folders", "syncs", "waits")
_N_WARM = 2
_LARGE = {"ny": 2048, "nx": 4096, "n_variables": 1, "n_records": 8}
_SMALL = {"ny": 64, "nx": 128, "chunk_ny": 64, "n_variables": 20, "n_records": 100, "codec": "lz4 shuffle"}
CASES: dict[str, dict[str, Any]] = {
    "(a) 1 MiB, lz4": {**_LARGE, "chunk_ny": 64, "codec": "lz4 shuffle"},
    "(a) 1 MiB, no codec": {**_LARGE, "chunk_ny": 64, "codec": "none"},
    "(b) 32 KiB, lz4": {**_LARGE, "chunk_ny": 2, "codec": "lz4 shuffle"},
    "(b) 32 KiB, no codec": {**_LARGE, "chunk_ny": 2, "codec": "none"},
    "(c) growing": {**_SMALL, "layout": "growing"},
    "(c) preallocated": _SMALL,
}

spent = dict.fromkeys(KINDS, 0.0)
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


_BLOSC = numcodecs.Blosc


class _Codec:
    """A compressor that is timed."""

    SHUFFLE, BITSHUFFLE = _BLOSC.SHUFFLE, _BLOSC.BITSHUFFLE

    def __init__(self, *args: Any, **more: Any) -> None:
        self._codec = _BLOSC(*args, **more)
        self.encode = timed("codec", self._codec.encode)


def watch() -> None:
    """Put the timed calls in the place of the others."""
    numcodecs.Blosc = _Codec
    codecs.crc32c = shard.crc32c = timed("checksum", codecs.crc32c)
    google_crc32c.value = timed("checksum", google_crc32c.value)
    for name in ("open", "close", "rename", "lstat", "stat", "fstat", "unlink"):
        setattr(os, name, timed("files", getattr(os, name)))
    os.writev = timed("write", os.writev)
    os.mkdir = timed("folders", os.mkdir)
    os.fsync = timed("syncs", os.fsync)
    for name in ("_votes", "_await_answer", "gather", "await_announcement"):
        setattr(agreement.Channel, name, timed("waits", getattr(agreement.Channel, name)))


def measure(peer: Any, blocks: list[Any]) -> tuple[dict[str, float], list[float]]:
    """Return the seconds of each kind a record on this rank, and those of each record."""
    job, comm = peer.job, peer.comm
    peer.open()
    each = []
    for i in range(job.n_all):
        if i == job.n_warm:
            comm.Barrier()
            spent.update(dict.fromkeys(spent, 0.0))
        began = time.perf_counter()
        peer.write(i, blocks)
        each.append(time.perf_counter() - began)
    found = dict(spent)
    counted = each[job.n_warm :]
    peer.close()
    comm.Barrier()
    found["rest"] = sum(counted) - sum(found.values())
    found["all"] = sum(counted)
    return {what: seconds / job.n_records for what, seconds in found.items()}, counted


def rounds_of(name: str, folder: Path, n_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return ms a record of each kind, a number a rank, on rank 0: medians over the rounds."""
    world = MPI.COMM_WORLD
    common = {"layout": "preallocated", "data": "smooth", "n_warm": _N_WARM, "task": "write", "peer": ""}
    job = Job(**{**common, **CASES[name], "options": {"threads": 0}, "folder": ""})
    blocks = list(field_of("smooth", world.rank, job.ny * job.n_variables, job.nx).reshape(-1, job.ny, job.nx))
    turns: dict[str, list[Any]] = {"limit": [], "mpistream": []}
    for k in range(n_rounds):
        for peer in list(turns)[:: -1 if k % 2 else 1]:  # neither always follows the other
            path = folder / f"{k} {peer}"
            if world.rank == 0:
                path.mkdir()
                os.sync()  # what an earlier turn left in memory is not written while this one is timed
            world.Barrier()
            module = limit if peer == "limit" else stream
            kinds, each = measure(module.Peer(replace(job, folder=str(path)), world), blocks)
            # As long as the slowest rank, record by record.
            slowest = np.empty(len(each))
            world.Allreduce(np.array(each), slowest, MPI.MAX)
            turns[peer].append(world.gather({**kinds, "in step": float(slowest.mean())}))
            if world.rank == 0 and job.n_variables == 1:
                shutil.rmtree(path)  # many small files stay: ext4 is slow to make new ones after it removed many
            world.Barrier()
    if world.rank != 0:
        return {}
    return {
        peer: {kind: [1e3 * statistics.median(t[r][kind] for t in of) for r in range(world.size)] for kind in of[0][0]}
        for peer, of in turns.items()
    }


def show(name: str, found: dict[str, dict[str, list[float]]]) -> None:
    """Print a case: a line a peer and rank."""
    print(f"\n{name}: ms a record")
    print(f"  {'':14}" + "".join(f"{kind:>10}" for kind in (*KINDS, "rest", "all", "in step")))
    for peer, kinds in found.items():
        for rank in range(len(kinds["all"])):
            print(f"  {peer:10} {rank:3}" + "".join(f"{of[rank]:10.2f}" for of in kinds.values()))
    whole, in_step = found["limit"]["all"], found["limit"]["in step"][0]
    ours = found["mpistream"]["in step"][0]
    print(f"  limit / mpistream: {max(whole) / ours:.3f}; limit in step / mpistream: {in_step / ours:.3f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="the cases whose names begin so, for example '(a)'")
    parser.add_argument("--folder", help="where the stores lie; by default a temporary folder")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    folder = world.bcast(Path(tempfile.mkdtemp(dir=args.folder)) if world.rank == 0 else None)
    watch()
    found = {}
    try:
        for name in CASES:
            if name.startswith(args.only):
                (folder / name.replace(" ", "_")).mkdir(exist_ok=True)
                found[name] = rounds_of(name, folder / name.replace(" ", "_"), args.rounds)
                if world.rank == 0:
                    show(name, found[name])
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if world.rank == 0:
        print(json.dumps({"benchmark": "where", "ranks": world.size, "found": found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

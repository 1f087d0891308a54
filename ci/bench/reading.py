#!/usr/bin/env python3
"""The speed of reads beside that of other readers of the same store, from a warm cache.

A store of 64 MiB fields in shards of 32 MiB and inner chunks of 1 MiB, the profile ``fast``, is read by mpistream,
tensorstore and zarr-python in turn, round after round: a whole field, as a restart reads it, and one inner chunk of
each shard of all records. Every reader opens the array once; opening is not timed. What is not installed is named as
missing.

Run as ``ci/bench/reading.py``. It ends with 1 when mpistream is slower than tensorstore.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistream as ms

NY, NX = 4096, 4096  # 64 MiB of float32
SHARD_NY, CHUNK_NY = 2048, 64  # 32 MiB and 1 MiB
PEERS = ("mpistream", "tensorstore", "zarr")

Read = Callable[[int, tuple[int, int]], NDArray[Any]]
"""Record, rows -> those rows of it."""


def field_of(record: int) -> NDArray[np.float32]:
    """Return waves of several lengths, and noise in the last bits."""
    y, x = np.arange(NY)[:, None] / NY + record, np.arange(NX) / NX
    smooth = 280 + 15 * np.sin(3 * y) * np.cos(5 * x) + 2 * np.sin(40 * (x + y))
    noise = np.random.default_rng(record).standard_normal((NY, NX), "float32")
    return np.asarray(smooth + 0.01 * noise, "float32")


def write_store(folder: str, n_records: int) -> None:
    schema = ms.StreamSchema(
        dims={"time": None, "y": NY, "x": NX},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={"u": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape={"time": 1, "y": SHARD_NY, "x": NX},
        chunk_shape={"time": 1, "y": CHUNK_NY, "x": NX},
    )
    with ms.write_open(folder, schema, options=ms.Options(durability="none")) as writer:
        for record in range(n_records):
            writer.write_record(float(record), {"u": field_of(record)})


def mpistream_reader(folder: str) -> Read:
    reader = ms.open_reader(folder)
    return lambda record, rows: reader.read_record("u", record, {"y": rows})


def tensorstore_reader(folder: str) -> Read:
    import tensorstore

    array = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/u/"}}, read=True
    ).result()

    def read(record: int, rows: tuple[int, int]) -> NDArray[Any]:
        found: NDArray[Any] = array[record, rows[0] : rows[1]].read().result()
        return found

    return read


def zarr_reader(folder: str) -> Read:
    import zarr

    array = zarr.open_array(f"{folder}/u", mode="r")
    return lambda record, rows: np.asarray(array[record, rows[0] : rows[1]])


READERS = {"mpistream": mpistream_reader, "tensorstore": tensorstore_reader, "zarr": zarr_reader}


def whole_field(read: Read, n_records: int) -> int:
    """A restart: one record, all of it."""
    return read(n_records - 1, (0, NY)).nbytes


def chunk_per_shard(read: Read, n_records: int) -> int:
    """The first inner chunk of every shard of all records."""
    return sum(
        read(record, (start, start + CHUNK_NY)).nbytes
        for record in range(n_records)
        for start in range(0, NY, SHARD_NY)
    )


def report(seconds: dict[str, dict[str, list[float]]], nbytes: dict[str, int], missing: list[str]) -> bool:
    """Print table and JSON; return whether mpistream is as fast as tensorstore."""
    medians = {work: {peer: statistics.median(s) for peer, s in found.items()} for work, found in seconds.items()}
    for work, found in medians.items():
        for peer, median in found.items():
            ratio = median / found["mpistream"]
            print(
                f"{work:16} {peer:12} {1e3 * median:8.2f} ms  {nbytes[work] / median / 1e6:7.0f} MB/s  "
                f"{ratio:6.2f} x the time of mpistream"
            )
    for peer in missing:
        print(f"{peer}: missing")
    ratios = {
        work: {peer: round(m / found["mpistream"], 3) for peer, m in found.items()} for work, found in medians.items()
    }
    print(json.dumps({"benchmark": "reading", "ratio": ratios, "missing": missing, "seconds": medians}))
    return all(found.get("tensorstore", 1.0) >= 1.0 for found in ratios.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where to write; the system's folder for temporary files by default")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each reader")
    parser.add_argument("--records", type=int, default=8)
    arguments = parser.parse_args()
    missing = [peer for peer in PEERS if importlib.util.find_spec(peer) is None]
    work = {"whole field": whole_field, "chunk per shard": chunk_per_shard}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in work}
    nbytes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="mpistream-reading-", dir=arguments.folder) as folder:
        store = str(Path(folder, "run.zarr"))
        write_store(store, arguments.records)
        readers = {peer: READERS[peer](store) for peer in PEERS if peer not in missing}
        expected = field_of(arguments.records - 1)
        for peer, read in readers.items():
            assert np.array_equal(read(arguments.records - 1, (0, NY)), expected), peer
        for _ in range(arguments.rounds):
            for name, do in work.items():
                for peer, read in readers.items():
                    began = time.perf_counter()
                    nbytes[name] = do(read, arguments.records)
                    seconds[name].setdefault(peer, []).append(time.perf_counter() - began)
    return 0 if report(seconds, nbytes, missing) else 1


if __name__ == "__main__":
    sys.exit(main())

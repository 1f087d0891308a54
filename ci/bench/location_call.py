"""What `write_location` costs its caller, beside a copy of the series:  python ci/bench/location_call.py

One process, 4 float32 variables, chunks as `mpistream.chunk_locations` chooses them. The same series, at hand as a
model has them, are copied into arrays that are there, ``arrays[name][k] = values`` for each, and given to
`write_location`; the two take turns, a chunk at a time, and after each the threads have the time that they need.
Counted is the processor time of the calling thread alone, where a chunk begins and ends included; the figures are
medians over chunks. For long series both wait for memory, for short ones they show what a call costs.

The last line is JSON. Fails if the factor to the copy is above ``--most``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import mpistream as ms

NAMES = ("rain", "soil", "flow", "evaporation")
# Steps of a series -> chunks that are filled.
CHUNKS = {1_000: 24, 10_000: 24, 100_000: 48}


def opened(url: Path, n_times: int, n_chunks: int) -> ms.LocationSeriesWriter:
    """Return a writer of so many chunks."""
    length = ms.chunk_locations(n_times, 1_000_000)
    return ms.write_open_locations(
        url,
        [f"cat-{i}" for i in range(length * n_chunks)],
        np.arange(n_times) * 3600.0,
        dict.fromkeys(NAMES, "float32"),
        units="seconds since 2000-01-01",
        chunk_locations=length,
        options=ms.Options(durability="none"),
    )


def measure(url: Path, n_times: int) -> dict[str, Any]:
    """Return microseconds a location."""
    writer = opened(url, n_times, CHUNKS[n_times])
    length = writer.schema.arrays[NAMES[0]].row_length
    series = {name: np.sin(np.arange(n_times) / (50 + k)).astype("float32") for k, name in enumerate(NAMES)}
    arrays = {name: np.zeros((length, n_times), "float32") for name in NAMES}
    copies, calls = [], []
    for first in range(0, length * CHUNKS[n_times], length):
        began = time.thread_time()
        for k in range(length):
            for name, values in series.items():
                arrays[name][k] = values
        copied = time.thread_time()
        for location in range(first, first + length):
            writer.write_location(location, series)
        copies.append((copied - began) / length * 1e6)
        calls.append((time.thread_time() - copied) / length * 1e6)
        writer._writer._stager.wait()
    writer.close()
    copy, call = statistics.median(copies), statistics.median(calls)
    return {"n_times": n_times, "chunk": length, "copy_us": copy, "call_us": call, "factor": call / copy}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=float, default=2.0, help="largest factor to a copy")
    parser.add_argument("--folder", help="where the stores lie; by default a temporary folder")
    args = parser.parse_args()
    found = []
    for n_times in CHUNKS:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="mpistream-call-") as folder:
            found.append(measure(Path(folder) / "series.zarr", n_times))
        print(
            "{n_times:7} steps, {chunk:4} a chunk: copy {copy_us:7.2f} us, call {call_us:7.2f} us, {factor:.2f}".format(
                **found[-1]
            )
        )
    print(json.dumps({"benchmark": "location_call", "most": args.most, "factors": found}))
    return int(any(of["factor"] > args.most for of in found))


if __name__ == "__main__":
    sys.exit(main())

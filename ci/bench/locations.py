"""What writing whole series costs a model of points:  mpiexec -n 2 python -m mpi4py ci/bench/locations.py

Each rank runs its part of 20,000 locations, one after the other, and has 1,000 steps of 4 float32 variables of each
at the end. Three ways to write them, with the same codec (Zstandard 3) and nothing synced:

* *stream*: `write_location`, a commit at the end;
* *usual*: zarr-python, an array with chunks of one location, ``array[i] = series``;
* *blocks*: zarr-python, chunks as those of *stream*; the model gathers a chunk, then ``array[a:b] = chunk``.

Beside them *limit*, what nobody can leave out: the chunks of *stream*, a turn copied at one go, the same calls of the
codec and one file each. *copy* is a bare copy of each series into an array that is there.

They take turns, a few hundred locations at a time, so whatever else the machine does meets all of them. Series are
made outside the clock. *seconds* is the time until all is written, *cpu* the processor time of all threads, and
*blocked* the part of *seconds* that the model spends in calls, closing included: what *stream* encodes while the model
computes the next location is not in it, and here each turn waits for that, which is in *seconds* alone. All encode
alike, so without a spare core *seconds* and *cpu* of *stream* and of *blocks* are much the same; *codec* is the part of
*cpu* that *limit* spends inside the codec.

The last line is JSON. Fails if *stream* is less than ``--usual`` times as fast as *usual* in *seconds*, or if *blocks*
is blocked less than ``--blocks`` times as long as *stream*.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numcodecs
import numpy as np
import zarr
from mpi4py import MPI
from numpy.typing import NDArray

import mpistream as ms

N_TIMES = 1000
NAMES = ("rain", "soil", "flow", "evaporation")
TURN = 256  # locations of a rank


def series_of(locations: range) -> dict[str, NDArray[np.float32]]:
    """Return reservoirs that fill with bursts of rain and drain, as a model has them: with all bits of a float32."""
    random = np.random.default_rng(locations.start)
    shape = len(locations), N_TIMES
    rain = np.where(random.random(shape) < 0.1, random.exponential(8.0, shape), 0.0)
    soil = np.empty(shape)
    state = np.zeros(shape[0])
    for t in range(N_TIMES):
        state = 0.97 * state + rain[:, t]
        soil[:, t] = state
    season = 2 + np.sin(np.arange(N_TIMES) / 58)
    found = (rain, soil, 0.03 * soil, season + 0.1 * random.standard_normal(shape))
    return {name: values.astype("float32") for name, values in zip(NAMES, found, strict=True)}


class Case(Protocol):
    """One way to write."""

    def put(self, locations: range, series: dict[str, NDArray[np.float32]]) -> None:
        """Write some locations, one after the other."""

    def end(self) -> None:
        """Write what is left, and close."""


class Copy:
    """No writing: each series is copied once."""

    def __init__(self) -> None:
        self._arrays = {name: np.zeros((TURN, N_TIMES), "float32") for name in NAMES}

    def put(self, locations: range, series: dict[str, NDArray[np.float32]]) -> None:
        for k in range(len(locations)):
            for name, values in series.items():
                self._arrays[name][k] = values[k]

    def end(self) -> None:
        pass


class Stream:
    """`write_location`."""

    def __init__(self, url: Path, n: int) -> None:
        ids = [f"cat-{i}" for i in range(n)]
        self.writer = ms.write_open_locations(
            url,
            ids,
            np.arange(N_TIMES) * 3600.0,
            dict.fromkeys(NAMES, "float32"),
            units="seconds since 2000-01-01",
            comm=MPI.COMM_WORLD,
            options=ms.Options(durability="none"),
        )

    def put(self, locations: range, series: dict[str, NDArray[np.float32]]) -> None:
        for k, location in enumerate(locations):
            self.writer.write_location(location, {name: values[k] for name, values in series.items()})

    def end(self) -> None:
        self.writer.close()


class Usual:
    """zarr-python, a chunk a location."""

    def __init__(self, url: Path, n: int) -> None:
        self._arrays = arrays(url, n, 1)

    def put(self, locations: range, series: dict[str, NDArray[np.float32]]) -> None:
        for k, location in enumerate(locations):
            for name, values in series.items():
                self._arrays[name][location] = values[k]

    def end(self) -> None:
        pass


class Blocks:
    """zarr-python, a chunk a block of locations that the model gathers."""

    def __init__(self, url: Path, n: int, length: int) -> None:
        self._arrays = arrays(url, n, length)
        self._blocks = {name: np.empty((length, N_TIMES), "float32") for name in NAMES}
        self._length = length
        self._start = self._stop = 0

    def put(self, locations: range, series: dict[str, NDArray[np.float32]]) -> None:
        for k, location in enumerate(locations):
            if location % self._length == 0:
                self._flush()
                self._start = location
            for name, values in series.items():
                self._blocks[name][location - self._start] = values[k]
            self._stop = location + 1

    def _flush(self) -> None:
        for name, array in self._arrays.items():
            if self._stop > self._start:
                array[self._start : self._stop] = self._blocks[name][: self._stop - self._start]

    def end(self) -> None:
        self._flush()


class Limit:
    """The codec and the files alone."""

    def __init__(self, folder: Path, length: int) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._length = length
        self._codec = numcodecs.Zstd(level=3)
        self._chunks = {name: np.full((length, N_TIMES), np.nan, "float32") for name in NAMES}
        self._rows = 0
        self.codec = 0.0
        """Processor time inside the codec."""

    def put(self, locations: range, series: dict[str, NDArray[np.float32]]) -> None:
        done = 0
        while done < len(locations):
            location = locations[done]
            at = location % self._length
            n = min(len(locations) - done, self._length - at)
            for name, chunk in self._chunks.items():
                chunk[at : at + n] = series[name][done : done + n]
            done, self._rows = done + n, at + n
            if self._rows == self._length:
                self._write(location)

    def _write(self, location: int) -> None:
        for name, chunk in self._chunks.items():
            began = time.process_time()
            data = self._codec.encode(chunk.reshape(-1).view(np.uint8))
            self.codec += time.process_time() - began
            (self._folder / f"{name}-{location // self._length}").write_bytes(data)
        self._rows = 0

    def end(self) -> None:
        if self._rows:
            self._write(-1)


def arrays(url: Path, n: int, length: int) -> dict[str, Any]:
    """Return zarr-python's arrays, made by rank 0."""
    if MPI.COMM_WORLD.rank == 0:
        group = zarr.create_group(url)
        for name in NAMES:
            group.create_array(
                name,
                shape=(n, N_TIMES),
                chunks=(length, N_TIMES),
                dtype="float32",
                fill_value=float("nan"),
                compressors=zarr.codecs.ZstdCodec(level=3),
            )
    MPI.COMM_WORLD.barrier()
    group = zarr.open_group(url, mode="r+")
    return {name: group[name] for name in NAMES}


def turns(share: tuple[int, int], steps: int) -> Iterator[range]:
    """Yield a rank's locations, a few at a time, in as many turns on every rank."""
    start, stop = share
    for k in range(steps):
        yield range(min(start + k * TURN, stop), min(start + (k + 1) * TURN, stop))


def timed(call: Callable[[], None]) -> NDArray[np.float64]:
    """Return the seconds that a call took, and the processor time of this process meanwhile."""
    began = time.perf_counter(), time.process_time()
    call()
    return np.array([time.perf_counter() - began[0], time.process_time() - began[1]])


def measure(folder: Path, n: int) -> dict[str, dict[str, float]]:
    """Return, of each case, what it took the slowest rank, and its files."""
    comm = MPI.COMM_WORLD
    stream = Stream(folder / "stream.zarr", n)
    share, length = stream.writer.share, stream.writer.schema.arrays[NAMES[0]].row_length
    limit = Limit(folder / "limit.zarr", length)
    cases: dict[str, Case] = {
        "copy": Copy(),
        "stream": stream,
        "usual": Usual(folder / "usual.zarr", n),
        "blocks": Blocks(folder / "blocks.zarr", n, length),
        "limit": limit,
    }
    blocked, total = ({name: np.zeros(2) for name in cases} for _ in range(2))
    for locations in turns(share, -(-comm.allreduce(share[1] - share[0], MPI.MAX) // TURN)):
        series = series_of(locations) if locations else {}
        for name, case in cases.items():
            comm.barrier()
            spent = timed(partial(case.put, locations, series))
            blocked[name] += spent
            # What goes on behind the model's back is not another case's to pay.
            total[name] += spent + (timed(stream.writer._writer._stager.wait) if case is stream else 0.0)
    for name, case in cases.items():
        comm.barrier()
        spent = timed(case.end)
        blocked[name] += spent
        total[name] += spent
    nbytes = 4 * N_TIMES * len(NAMES) * n
    found = {}
    for name in cases:
        seconds, cpu = (comm.allreduce(float(value), MPI.MAX) for value in total[name])
        found[name] = {
            "seconds": seconds,
            "cpu": cpu,
            "blocked": comm.allreduce(float(blocked[name][0]), MPI.MAX),
            "MB/s": nbytes / 1e6 / seconds,
            "files": sum(len(files) for _, _, files in os.walk(folder / f"{name}.zarr")),
        }
    found["limit"]["codec"] = comm.allreduce(limit.codec, MPI.MAX)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--locations", type=int, default=20_000)
    parser.add_argument("--folder", help="where the stores lie; by default a temporary folder")
    parser.add_argument("--usual", type=float, default=5.0, help="least factor of seconds to the usual way")
    parser.add_argument("--blocks", type=float, default=1.5, help="least factor of blocked to blocks")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    folder = comm.bcast(Path(tempfile.mkdtemp(dir=args.folder)) if comm.rank == 0 else None)
    try:
        found = measure(folder, args.locations)
    finally:
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    ratios = {
        key: {name: of[key] / found["stream"][key] for name, of in found.items() if name != "stream"}
        for key in ("seconds", "cpu", "blocked")
    }
    if comm.rank == 0:
        for name, of in found.items():
            print(f"{name:8}", *(f"{key} {value:10.2f}" for key, value in of.items()))
        share = found["limit"]["codec"] / found["stream"]["cpu"]
        print(f"the codec alone takes {share:.0%} of the processor time of stream")
        facts = {"locations": args.locations, "ranks": comm.size, "cases": found, "to stream": ratios, "codec": share}
        print(json.dumps(facts), flush=True)
    # A rank that ends with 1 ends all.
    comm.barrier()
    return int(ratios["seconds"]["usual"] < args.usual or ratios["blocked"]["blocks"] < args.blocks)


if __name__ == "__main__":
    sys.exit(main())

"""The jobs that a simulation runs, and the oracle: data is a closed form of record, index and run.

A *state* is what is committed: the run that wrote each record, or None before there is a store. Jobs say what they
were told (`SimDisk.ack`), by the number of the state in a list that the driver keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistream as ms
from mpistream.errors import FormatError
from tests.support.sim_disk import ROOT, ProcessStore, SimDisk
from tests.support.sim_ranks import Process, Sim, SimTransport, System

__all__ = [
    "OPTIONS",
    "ROW",
    "State",
    "ViolationError",
    "add_job",
    "check_left",
    "check_tidy",
    "create_main",
    "make_schema",
    "resume_main",
    "run_job",
    "shown_lengths",
    "state_of",
]

NY = 4
ROW = 2
_LOOK = 99  # the process that looks at what is there

OPTIONS = ms.Options(threads=0, lease_ttl=100_000, timeout=30, writers="all")

State = tuple[int, ...] | None
Main = Callable[[SimTransport, SimDisk], object]


class ViolationError(AssertionError):
    """A promise was broken."""


def value(record: int, run: int) -> NDArray[np.int32]:
    return (100 * record + 7 * np.arange(NY) + 1000 * run + 1).astype(np.int32)


def series(record: int, run: int) -> int:
    return 100 * record + run + 1


COORDINATE = np.arange(NY) / 4
STATIC = (3 * np.arange(NY) + 1).astype(np.int32)


def time_of(record: int) -> float:
    return record + 0.25


def blob(rank: int, record: int, run: int) -> bytes:
    return f"{rank} {record} {run}".encode()


def make_schema() -> ms.StreamSchema:
    """Return a schema of four shards in space and rows of two records."""
    return ms.StreamSchema(
        dims={"time": None, "y": NY},
        time=ms.AppendTime(units="s"),
        variables={"u": ms.Variable(("time", "y"), "int32"), "n": ms.Variable(("time",), "int32")},
        statics={"s": ms.Variable(("y",), "int32")},
        coords={"y": ms.Coordinate(("y",), COORDINATE)},
        shard_shape={"time": ROW, "y": 1},
        chunk_shape={"time": 1, "y": 1},
        codec="none",
    )


_SCHEMA = make_schema()


def write(w: ms.StreamWriter, rank: int, record: int, run: int) -> None:
    """Write one record, on the last rank with a blob."""
    w.write_record(time_of(record), {"u": value(record, run)[slice(*w.region["y"])], "n": series(record, run)})
    if rank == w._channel.size - 1:
        w.write_blob("b", blob(rank, record, run), record)


def create_main(n_records: int) -> Main:
    """Return a job that makes a store, commits so many records one by one, and acknowledges states 1, 2, ..."""

    def main(comm: SimTransport, disk: SimDisk) -> ms.StreamWriter:
        store: Any = ProcessStore(comm.who)
        w = ms.write_open(store, _SCHEMA, comm=comm, takeover=True, options=OPTIONS)
        disk.ack(comm.who, 1)
        w.write_static("s", STATIC[slice(*w.region["y"])])
        for i in range(n_records):
            write(w, comm.rank, i, 0)
            w.commit()
            disk.ack(comm.who, 2 + i)
            disk.told.add((i, 0))
        w.close()
        return w

    return main


def resume_main(n_more: int, run: int, *, at: float | None = None, is_alone: bool = True) -> Main:
    """Return a job that resumes, acknowledges state 1, and goes on with records of this run.

    If it is alone on its store, nothing may be left over when the resume returns.
    """

    def main(comm: SimTransport, disk: SimDisk) -> int:
        store: Any = ProcessStore(comm.who)
        w = ms.write_resume(store, comm=comm, at=at, takeover=True, options=OPTIONS)
        disk.ack(comm.who, 1)
        n = w.n_records
        if is_alone and comm.rank == 0:
            check_left(disk, n, has_static=w.is_committed("s"), n_packs=w.reader.manifest.n_packs)
        if not w.is_committed("s"):
            w.write_static("s", STATIC[slice(*w.region["y"])])
        for i in range(n_more):
            write(w, comm.rank, n + i, run)
            w.commit()
            disk.ack(comm.who, 2 + i)
            disk.told.add((n + i, run))
        w.close()
        return n

    return main


def add_job(sim: Sim, n: int, main: Main, first: int = 0) -> list[Process]:
    """Add the ranks of a job to a simulation."""
    world: list[SimTransport] = []
    transports = [SimTransport(sim, first, rank, world) for rank in range(n)]
    return sim.add([partial(main, transport, sim.disk) for transport in transports], first)


def run_job(system: System, disk: SimDisk, n: int, main: Main, *, generation: int) -> list[Process]:
    """Run a job to its end."""
    system.restart(disk, generation)
    sim = Sim(disk)
    processes = add_job(sim, n, main)
    sim.run()
    sim.kill()
    return processes


def _decoded(found: NDArray[Any], record: int) -> int:
    run = int(found[0] - value(record, 0)[0]) // 1000
    if not np.array_equal(found, value(record, run)) or found.dtype != np.int32:
        raise ViolationError(f"record {record} is damaged: {found.tolist()}")
    return run


def state_of(system: System, disk: SimDisk) -> State:
    """Return what a reader finds committed, all of it read and compared; None where there is no store.

    Raises
    ------
    ViolationError
        When anything that is committed is wrong, or a plain reader sees more than that.
    """
    system.disk = disk
    store: Any = ProcessStore(_LOOK)
    try:
        reader = ms.open_reader(store)
    except FormatError as error:
        if error.kind == "no_manifest":
            return None
        raise ViolationError(f"the manifest is damaged: {error}") from error
    try:
        runs = []
        for i in range(reader.n_records):
            run = _decoded(reader.read_record("u", i), i)
            if int(reader.read_record("n", i)) != series(i, run):
                raise ViolationError(f"record {i} is of run {run}, its series is not")
            runs.append(run)
            names = [b for b in reader.blobs() if b[1] == i]
            if len(names) != 1 or reader.read_blob("b", i, names[0][0]) != blob(names[0][0], i, run):
                raise ViolationError(f"record {i} of run {run} has the blobs {names}")
        if reader.times.tolist() != [time_of(i) for i in range(reader.n_records)]:
            raise ViolationError(f"times are {reader.times}")
        for name in reader.manifest.statics:
            if not np.array_equal(reader.read_static(name), STATIC):
                raise ViolationError(f"static {name} is damaged")
        if not np.array_equal(reader.read_static("y"), COORDINATE):
            raise ViolationError("the coordinate is damaged")
    except ms.MPIStreamError as error:
        raise ViolationError(f"what is committed can't be read: {error}") from error
    return tuple(runs)


def shown_lengths(files: dict[str, bytes]) -> set[int]:
    """Return how many records the Zarr documents show; a damaged document is a violation."""
    found = set()
    for path, data in files.items():
        if not path.endswith("zarr.json") or "/.mpistream/" in path:
            continue
        try:
            document = json.loads(data)
        except ValueError:
            raise ViolationError(f"{path} is damaged: {data[:40]!r}") from None
        inside = document.get("consolidated_metadata", {}).get("metadata", {})
        if document["node_type"] == "array":
            inside = {path.split("/")[1]: document}
        found |= {d["shape"][0] for name, d in inside.items() if name in ("u", "n", "time")}
    return found


def _expected(n_records: int, has_static: bool) -> set[str]:
    """Return the paths of all objects of a store in which nothing is left over, without ``.mpistream``."""
    keys = {"zarr.json", "y/c/0", *(f"{name}/zarr.json" for name in ("time", "u", "n", "s", "y"))}
    keys |= {f"{name}/c/0" for name in ("time", "n") if n_records}
    keys |= {f"u/c/{row}/{y}" for row in range(-(-n_records // ROW)) for y in range(NY)}
    keys |= {f"s/c/{y}" for y in range(NY) if has_static}
    return {f"{ROOT}/{key}" for key in keys}


def check_left(disk: SimDisk, n_records: int, *, has_static: bool, n_packs: int | None) -> None:
    """Assert that nothing is left over of what was never committed."""
    files, _ = disk.tree()
    left = {p for p in files if not p.startswith(f"{ROOT}/.mpistream/")} ^ _expected(n_records, has_static)
    packs = [p for p in files if p.startswith(f"{ROOT}/.mpistream/blobs/")]
    if left or n_packs not in (None, len(packs)):
        raise ViolationError(f"left over: {sorted(left)}, {len(packs)} packs of blobs, {n_packs} are committed")


def check_tidy(disk: SimDisk, state: Sequence[int]) -> None:
    """Assert of a closed store that nothing is left over, and that documents show what is committed."""
    files, folders = disk.tree()
    if shown_lengths(files) != {len(state)}:
        raise ViolationError(f"documents show {shown_lengths(files)} records, {len(state)} are committed")
    # Packs of records that were dropped stay, which the manifest counts.
    check_left(disk, len(state), has_static=True, n_packs=None)
    if stage := [p for p in folders if p.startswith(f"{ROOT}/.mpistream/stage/")]:
        raise ViolationError(f"left over: {stage}")

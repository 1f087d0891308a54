"""The jobs that a simulation runs, and the oracle: data is a closed form of record, index and run.

A *state* is what is committed: the run that wrote each record, None for one that is not (where times are fixed), or
None before there is a store. Jobs say what they were told (`SimDisk.ack`), by the number of the state in a list that
the driver keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistream as ms
from mpistream.errors import FormatError
from tests.support.sim_disk import ROOT, ProcessStore, SimDisk
from tests.support.sim_ranks import Process, Sim, SimTransport, System

__all__ = [
    "ALIGNED",
    "COORDINATE",
    "NY",
    "OFF_EDGES",
    "OPTIONS",
    "ROW",
    "SCATTERED",
    "STATIC",
    "Layout",
    "Main",
    "State",
    "ViolationError",
    "add_job",
    "blob",
    "cells_of",
    "check_left",
    "check_no_stage",
    "check_tidy",
    "create_main",
    "decoded",
    "make_schema",
    "resume_main",
    "run_job",
    "series",
    "shown_lengths",
    "state_of",
    "time_of",
    "value",
    "write",
    "write_static",
]

NY = 4
ROW = 2

OPTIONS = ms.Options(threads=0, lease_ttl=100_000, timeout=30, writers="all")

State = tuple[int | None, ...] | None
Main = Callable[[SimTransport, SimDisk], object]


class ViolationError(AssertionError):
    """A promise was broken."""


_CELLS = 7 * np.arange(NY) + 1


def value(record: int, run: int) -> NDArray[np.int32]:
    return (_CELLS + (100 * record + 1000 * run)).astype(np.int32)


def series(record: int, run: int) -> int:
    return 100 * record + run + 1


COORDINATE = np.arange(NY) / 4
STATIC = (3 * np.arange(NY) + 1).astype(np.int32)


def time_of(record: int) -> float:
    return record + 0.25


def blob(rank: int, record: int, run: int) -> bytes:
    return f"{rank} {record} {run}".encode()


def make_schema(n_shards: int = NY, times: Sequence[float] | None = None) -> ms.StreamSchema:
    """Return a schema of so many shards in space and rows of two records; with times they are fixed."""
    return ms.StreamSchema(
        dims={"time": None, "y": NY},
        time=ms.AppendTime(units="s") if times is None else ms.IndexedTime(times=list(times), units="s"),
        variables={"u": ms.Variable(("time", "y"), "int32"), "n": ms.Variable(("time",), "int32")},
        statics={"s": ms.Variable(("y",), "int32")},
        coords={"y": ms.Coordinate(("y",), COORDINATE)},
        shard_shape={"time": ROW, "y": NY // n_shards},
        chunk_shape={"time": 1, "y": 1},
        codec="none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What lies in one shard, and what each rank holds."""

    n_shards: int
    schema: ms.StreamSchema
    region: Callable[[int, int], Any] = lambda rank, size: None
    """From rank and size to what is given as ``region=``."""


def _off_edges(rank: int, size: int) -> Any:
    """One cell each, and the rest for the last one; what is left without a cell holds none."""
    start = min(rank, NY)
    return {"y": (start, NY if rank == size - 1 else min(rank + 1, NY))}


def _scattered(rank: int, size: int) -> Any:
    """Every cell after the next, from the back."""
    return ms.Indices({"y": np.arange(NY)[rank::size][::-1]})


ALIGNED = Layout(n_shards=NY, schema=make_schema())
# Shards of two cells: the ranks must send each other what they hold of them.
OFF_EDGES = Layout(n_shards=2, schema=make_schema(2), region=_off_edges)
SCATTERED = Layout(n_shards=2, schema=make_schema(2), region=_scattered)


def cells_of(w: ms.StreamWriter) -> Any:
    """Return which cells this rank holds, as an index of the whole."""
    return slice(*w.region["y"]) if w.indices is None else w.indices["y"]


def write(w: ms.StreamWriter, rank: int, record: int, run: int) -> None:
    """Write one record, on the last rank with a blob; then the block is the caller's again."""
    block = value(record, run)[cells_of(w)]
    arrays = {"u": block, "n": series(record, run)}
    if w.schema.n_total is None:
        w.write_record(time_of(record), arrays)
    else:
        w.write_record_at(record, time_of(record), arrays)
    block[...] = -1
    if rank == w._channel.size - 1:
        w.write_blob("b", blob(rank, record, run), record)


def write_static(w: ms.StreamWriter) -> None:
    """Write the static, unless it is committed."""
    if not w.is_committed("s"):
        w.write_static("s", STATIC[cells_of(w)])


def create_main(n_records: int, layout: Layout = ALIGNED) -> Main:
    """Return a job that makes a store, commits so many records one by one, and acknowledges states 1, 2, ..."""

    def main(comm: SimTransport, disk: SimDisk) -> ms.StreamWriter:
        store: Any = ProcessStore(comm.who)
        region = layout.region(comm.rank, comm.size)
        w = ms.write_open(store, layout.schema, comm=comm, region=region, takeover=True, options=OPTIONS)
        disk.ack(comm.who, 1)
        write_static(w)
        for i in range(n_records):
            write(w, comm.rank, i, 0)
            w.commit()
            disk.ack(comm.who, 2 + i)
            disk.told.add((i, 0))
        w.close()
        return w

    return main


def resume_main(
    n_more: int, run: int, *, at: float | None = None, is_alone: bool = True, layout: Layout = ALIGNED
) -> Main:
    """Return a job that resumes, acknowledges state 1, and goes on with records of this run.

    If it is alone on its store, nothing may be left over when the resume returns.
    """

    def main(comm: SimTransport, disk: SimDisk) -> int:
        store: Any = ProcessStore(comm.who)
        region = layout.region(comm.rank, comm.size)
        w = ms.write_resume(store, comm=comm, region=region, at=at, takeover=True, options=OPTIONS)
        disk.ack(comm.who, 1)
        n = w.n_records
        if is_alone and comm.rank == 0:
            manifest = w.reader.manifest
            check_left(disk, n, has_static=w.is_committed("s"), n_packs=manifest.n_packs, n_shards=layout.n_shards)
        write_static(w)
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


def decoded(found: NDArray[Any], record: int) -> int:
    """Return the run that wrote a record, once it is compared."""
    run = int(found[0] - int(_CELLS[0]) - 100 * record) // 1000
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
    found: State = system.looks.find(disk, _state)
    return found


def _state(store: Any) -> State:
    try:
        reader = ms.open_reader(store)
    except FormatError as error:
        if error.kind == "no_manifest":
            return None
        raise ViolationError(f"the manifest is damaged: {error}") from error
    try:
        is_there = dict.fromkeys((r for a, b in reader.committed for r in range(a, b)), True)
        blobs = reader.blobs()
        runs = [_run_of(reader, i, blobs) if i in is_there else None for i in range(reader.n_records)]
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


def _run_of(reader: ms.StoreReader, i: int, blobs: Sequence[tuple[int, int | str, str]]) -> int:
    """Return the run of a record, all of which is read."""
    run = decoded(reader.read_record("u", i), i)
    if int(reader.read_record("n", i)) != series(i, run):
        raise ViolationError(f"record {i} is of run {run}, its series is not")
    names = [b for b in blobs if b[1] == i]
    if len(names) != 1 or reader.read_blob("b", i, names[0][0]) != blob(names[0][0], i, run):
        raise ViolationError(f"record {i} of run {run} has the blobs {names}")
    return run


def shown_lengths(files: Mapping[str, bytes]) -> set[int]:
    """Return how many records the Zarr documents show; a damaged document is a violation."""
    found: set[int] = set()
    for path, data in files.items():
        if path.endswith("zarr.json") and "/.mpistream/" not in path:
            found |= _lengths_in(path, data)
    return found


@lru_cache(1 << 12)
def _lengths_in(path: str, data: bytes) -> frozenset[int]:
    try:
        document = json.loads(data)
    except ValueError:
        raise ViolationError(f"{path} is damaged: {data[:40]!r}") from None
    inside = document.get("consolidated_metadata", {}).get("metadata", {})
    if document["node_type"] == "array":
        inside = {path.split("/")[1]: document}
    return frozenset(d["shape"][0] for name, d in inside.items() if name in ("u", "n", "time"))


def _expected(n_records: int, has_static: bool, n_shards: int) -> set[str]:
    """Return the paths of all objects of a store in which nothing is left over, without ``.mpistream``."""
    keys = {"zarr.json", "y/c/0", *(f"{name}/zarr.json" for name in ("time", "u", "n", "s", "y"))}
    keys |= {f"{name}/c/0" for name in ("time", "n") if n_records}
    keys |= {f"u/c/{row}/{y}" for row in range(-(-n_records // ROW)) for y in range(n_shards)}
    keys |= {f"s/c/{y}" for y in range(n_shards) if has_static}
    return {f"{ROOT}/{key}" for key in keys}


def check_left(disk: SimDisk, n_records: int, *, has_static: bool, n_packs: int | None, n_shards: int = NY) -> None:
    """Assert that nothing is left over of what was never committed."""
    files, _ = disk.tree()
    left = {p for p in files if not p.startswith(f"{ROOT}/.mpistream/")} ^ _expected(n_records, has_static, n_shards)
    packs = [p for p in files if p.startswith(f"{ROOT}/.mpistream/blobs/")]
    if left or n_packs not in (None, len(packs)):
        raise ViolationError(f"left over: {sorted(left)}, {len(packs)} packs of blobs, {n_packs} are committed")


def check_tidy(disk: SimDisk, state: Sequence[int | None], n_shards: int = NY) -> None:
    """Assert of a closed store that nothing is left over, and that documents show what is committed."""
    files, _ = disk.tree()
    if shown_lengths(files) != {len(state)}:
        raise ViolationError(f"documents show {shown_lengths(files)} records, {len(state)} are committed")
    # Packs of records that were dropped stay, which the manifest counts.
    check_left(disk, len(state), has_static=True, n_packs=None, n_shards=n_shards)
    check_no_stage(disk)


def check_no_stage(disk: SimDisk) -> None:
    """Assert that no stage folder is left."""
    _, folders = disk.tree()
    if stage := [p for p in folders if p.startswith(f"{ROOT}/.mpistream/stage/")]:
        raise ViolationError(f"left over: {stage}")

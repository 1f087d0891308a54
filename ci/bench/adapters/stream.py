"""mpistream.

Options: ``threads`` (0, or None for the default), ``durability``, and ``commits`` (True). A commit a record; where
output runs in the background, the commit does not wait for it either, and closing waits for all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistream as ms
from adapters.job import Job
from adapters.job import Peer as Base


class Peer(Base):
    def __init__(self, job: Job, comm: Any) -> None:
        super().__init__(job, comm)
        if comm.rank == 0:
            import zarr  # noqa: F401 (the owner of a store does; here before memory is counted)
        self.times = np.arange(float(job.n_all))
        self.reader: Any = None

    def chain(self) -> list[dict[str, Any]]:
        chain: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if self.job.blosc is not None:
            name, level, shuffle = self.job.blosc
            blosc = {"cname": name, "clevel": level, "shuffle": shuffle, "typesize": 4, "blocksize": 0}
            chain.append({"name": "blosc", "configuration": blosc})
        return [*chain, {"name": "crc32c"}]

    def open(self) -> None:
        job = self.job
        units = "seconds since 2000-01-01"
        # Inner chunks that are all fill are not stored.
        u = ms.Variable(("time", "y", "x"), "float32", fill_value=0 if job.has_empty_chunks else None)
        time = ms.AppendTime(units=units) if job.is_growing else ms.IndexedTime(self.times, units=units)
        schema = ms.StreamSchema(
            dims={"time": None, "y": job.ny * self.comm.size, "x": job.nx},
            time=time,
            variables=dict.fromkeys(job.names, u),
            shard_shape={"time": 1, "y": job.ny, "x": job.nx},
            chunk_shape={"time": 1, "y": job.chunk_ny, "x": job.nx},
            codec=self.chain(),
        )
        threads = job.options.get("threads")
        options = ms.Options(durability=job.options.get("durability", "none"), threads=threads)
        region = {"y": (self.rows.start, self.rows.stop)}
        path = self.folder / "run.zarr"
        self.writer = ms.write_open(path, schema, comm=self.comm, region=region, options=options)
        self.waits = threads == 0

    def write(self, i: int, blocks: list[Any]) -> None:
        arrays = dict(zip(self.job.names, blocks, strict=True))
        if self.job.is_growing:
            self.writer.write_record(self.times[i], arrays)
        else:
            self.writer.write_record_at(i, self.times[i], arrays)
        if self.job.options.get("commits", True):
            self.writer.commit(wait=self.waits)

    def close(self) -> None:
        self.writer.close()

    def begin_reading(self) -> None:
        self.reader = ms.open_reader(self.folder / "run.zarr")

    def read(self, i: int, name: str, start: int, stop: int) -> Any:
        first = self.rows.start
        return self.reader.read_record(name, i, region={"y": (first + start, first + stop)})

    def end_reading(self) -> None:
        self.reader.close()

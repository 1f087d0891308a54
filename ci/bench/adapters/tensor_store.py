"""tensorstore's driver zarr3.

Its manual: whole shards are written at a time, all variables of a record at once through the asynchronous interface
("Asynchronous support"). ``file_io_sync`` is off but for ``durability: fsync`` (its default is to sync each file), and
``file_io_locking`` is off since no two processes write one shard ("file Key-Value Store driver"). With ``is_async`` a
write returns when the block has been copied, as ``WriteFutures.copy`` says, and closing waits for ``commit``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import tensorstore as ts

from adapters.job import Job
from adapters.job import Peer as Base

_N_WAITING = 2  # records that may be under way, as in mpistream


class Peer(Base):
    def __init__(self, job: Job, comm: Any) -> None:
        super().__init__(job, comm)
        is_durable = job.options.get("durability") == "fsync"
        self.context = ts.Context({"file_io_sync": is_durable, "file_io_locking": {"mode": "none"}})
        self.waiting: deque[list[Any]] = deque()

    def spec(self, name: str) -> dict[str, Any]:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{self.job.folder}/run.zarr/{name}/"}}
        # Only so does a rank that has the array open see that another one has made it longer.
        return {**spec, "recheck_cached_metadata": True} if self.job.is_growing else spec

    def metadata(self) -> dict[str, Any]:
        job = self.job
        inner: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if job.blosc is not None:
            name, level, shuffle = job.blosc
            blosc = {"cname": name, "clevel": level, "shuffle": shuffle, "typesize": 4, "blocksize": 0}
            inner.append({"name": "blosc", "configuration": blosc})
        inner.append({"name": "crc32c"})
        sharding = {"chunk_shape": [1, job.chunk_ny, job.nx], "codecs": inner}
        return {
            "shape": [0 if job.is_growing else job.n_all, job.ny * self.comm.size, job.nx],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, job.ny, job.nx]}},
            "data_type": "float32",
            "fill_value": 0.0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }

    def open_arrays(self, **how: Any) -> None:
        found = [ts.open(self.spec(name), context=self.context, open=True, **how) for name in self.job.names]
        self.arrays = dict(zip(self.job.names, (f.result() for f in found), strict=True))

    def open(self) -> None:
        if self.comm.rank == 0:
            for name in self.job.names:
                spec: dict[str, Any] = {**self.spec(name), "metadata": self.metadata()}
                spec["store_data_equal_to_fill_value"] = not self.job.has_empty_chunks
                ts.open(spec, create=True, context=self.context).result()
        self.comm.Barrier()
        self.open_arrays()

    def write(self, i: int, blocks: list[Any]) -> None:
        if self.job.is_growing:
            if self.comm.rank == 0:
                shape = [i + 1, self.job.ny * self.comm.size, self.job.nx]
                grown = [array.resize(exclusive_max=shape, expand_only=True) for array in self.arrays.values()]
                self.arrays = dict(zip(self.arrays, (f.result() for f in grown), strict=True))
            self.comm.Barrier()
            if self.comm.rank != 0:
                found = [array.resolve() for array in self.arrays.values()]
                self.arrays = dict(zip(self.arrays, (f.result() for f in found), strict=True))
        futures = [array[i, self.rows].write(block) for array, block in zip(self.arrays.values(), blocks, strict=True)]
        self.waiting.append(futures)
        if self.job.options.get("is_async"):
            for future in futures:
                future.copy.result()
            self.wait(_N_WAITING)
        else:
            self.wait(0)

    def wait(self, n: int) -> None:
        while len(self.waiting) > n:
            for future in self.waiting.popleft():
                future.result()

    def close(self) -> None:
        self.wait(0)

    def begin_reading(self) -> None:
        self.open_arrays(read=True)

    def read(self, i: int, name: str, start: int, stop: int) -> Any:
        return np.asarray(self.arrays[name][i, self.rows.start + start : self.rows.start + stop].read().result())

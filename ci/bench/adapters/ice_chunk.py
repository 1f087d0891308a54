"""Icechunk, a commit a record: rank 0 forks a session, every rank writes into its own fork, rank 0 merges them.

Its manual ("Parallel Writes", cooperative distributed writes; "Performance"): one session, forked and pickled to the
writers, merged and committed by who coordinates; ``async.concurrency`` of zarr raised to 128; whole shards. Arrays that
grow are resized in a commit of their own, since only a session without changes can be forked.
"""

from __future__ import annotations

import pickle
from typing import Any

import icechunk
import zarr

from adapters.job import Job, resized
from adapters.job import Peer as Base
from adapters.zarr_python import create_arrays


class Peer(Base):
    def __init__(self, job: Job, comm: Any) -> None:
        super().__init__(job, comm)
        zarr.config.set({"async.concurrency": 128, "array.write_empty_chunks": not job.has_empty_chunks})
        self.storage = icechunk.local_filesystem_storage(str(self.folder / "repo"))

    def open(self) -> None:
        if self.comm.rank == 0:
            self.repo = icechunk.Repository.create(self.storage)
            session = self.repo.writable_session("main")
            create_arrays(session.store, self.job, self.comm.size)
            session.commit("arrays")
        self.comm.Barrier()
        if self.comm.rank != 0:
            self.repo = icechunk.Repository.open(self.storage)

    def write(self, i: int, blocks: list[Any]) -> None:
        session: Any = None
        if self.comm.rank == 0:
            if self.job.is_growing:
                session = self.repo.writable_session("main")
                for name in self.job.names:
                    resized(zarr.open_array(session.store, path=name, mode="r+"), i, self.comm)
                session.commit(f"room for record {i}")
            session = self.repo.writable_session("main")
            fork = session.fork()
            self.comm.bcast(pickle.dumps(fork))
        else:
            fork = pickle.loads(self.comm.bcast(None))
        for name, block in zip(self.job.names, blocks, strict=True):
            zarr.open_array(fork.store, path=name, mode="r+")[i, self.rows] = block
        forks = self.comm.gather(None if self.comm.rank == 0 else pickle.dumps(fork))
        if forks is not None:
            session.merge(fork, *(pickle.loads(other) for other in forks[1:]))
            session.commit(f"record {i}")

    def close(self) -> None:
        """Each record is committed when it is written."""

    def begin_reading(self) -> None:
        store = icechunk.Repository.open(self.storage).readonly_session("main").store
        self.arrays = {name: zarr.open_array(store, path=name, mode="r") for name in self.job.names}

    def read(self, i: int, name: str, start: int, stop: int) -> Any:
        return self.arrays[name][i, self.rows.start + start : self.rows.start + stop]

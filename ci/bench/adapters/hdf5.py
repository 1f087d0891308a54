"""Parallel HDF5: h5py with the driver mpio, one file, collective writes.

The manuals (h5py "Parallel HDF5", HDF5 "Parallel Compression"): filters need collective writes; chunks that one rank
alone writes; ``libver="latest"``; nothing is filled in advance. Option ``filter``: lzf, gzip (level 1 after shuffle) or
blosc (the codec of the job, through hdf5plugin). HDF5 has chunks but no shards, and its checksum (fletcher32) is left
out, to its advantage.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from adapters.job import Job, MissingError
from adapters.job import Peer as Base

_BLOSC = 32001
_COMPRESSORS = {"lz4": 1, "zstd": 5}
_SHUFFLES = {"shuffle": 1, "bitshuffle": 2}


class Peer(Base):
    def __init__(self, job: Job, comm: Any) -> None:
        super().__init__(job, comm)
        if not h5py.get_config().mpi:
            raise MissingError("this h5py is built without MPI")
        if self.filter == "blosc":
            import hdf5plugin  # noqa: F401 (importing it registers the filters)

            if not h5py.h5z.filter_avail(_BLOSC):
                raise MissingError("hdf5plugin's Blosc does not load into this HDF5")
        self.path = str(self.folder / "run.h5")

    @property
    def filter(self) -> str:
        return str(self.job.options.get("filter", ""))

    def filters(self) -> dict[str, Any]:
        if self.filter == "lzf":
            return {"compression": "lzf"}
        if self.filter == "gzip":
            return {"compression": "gzip", "compression_opts": 1, "shuffle": True}
        if self.filter == "blosc" and self.job.blosc is not None:
            name, level, shuffle = self.job.blosc
            options = (0, 0, 0, 0, level, _SHUFFLES[shuffle], _COMPRESSORS[name])
            return {"compression": _BLOSC, "compression_opts": options}
        return {}

    def open(self) -> None:
        job = self.job
        self.file = h5py.File(self.path, "w", driver="mpio", comm=self.comm, libver="latest")
        shape = (0 if job.is_growing else job.n_all, job.ny * self.comm.size, job.nx)
        how = self.filters()
        if self.filter or job.is_growing:
            how.update(chunks=(1, job.chunk_ny, job.nx), maxshape=(None, *shape[1:]))
        self.sets = []
        for name in job.names:
            plain = h5py.h5p.create(h5py.h5p.DATASET_CREATE)  # one each: h5py adds the filters to it
            plain.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            self.sets.append(self.file.create_dataset(name, shape, "float32", dcpl=plain, **how))

    def write(self, i: int, blocks: list[Any]) -> None:
        for data, block in zip(self.sets, blocks, strict=True):
            if self.job.is_growing:
                data.resize(i + 1, 0)
            with data.collective:
                data[i, self.rows] = block

    def close(self) -> None:
        self.file.close()

    def begin_reading(self) -> None:
        self.file = h5py.File(self.path, "r", driver="mpio", comm=self.comm)

    def read(self, i: int, name: str, start: int, stop: int) -> Any:
        return np.asarray(self.file[name][i, self.rows.start + start : self.rows.start + stop])

    def end_reading(self) -> None:
        self.file.close()

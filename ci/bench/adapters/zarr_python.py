"""zarr-python 3, and with ``pipeline: zarrs`` the codec pipeline of zarrs in it.

Its manual (user guide, "Optimizing performance"): shards are what is written efficiently, so one whole shard is
assigned at a time; ``write_empty_chunks=True`` where chunks are hardly ever empty, since looking for empty ones costs;
processes write to different chunks and need no locks then. zarrs' manual (its README): ``codec_pipeline.path``, and its
defaults. Arrays that grow are resized by rank 0, then opened again by the others.
"""

from __future__ import annotations

from typing import Any

import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from adapters.job import Job, resized
from adapters.job import Peer as Base


def compressors_of(job: Job) -> list[Any]:
    compressors: list[Any] = []
    if job.blosc is not None:
        name, level, shuffle = job.blosc
        compressors.append(BloscCodec(cname=name, clevel=level, shuffle=shuffle, typesize=4, blocksize=0))
    return [*compressors, Crc32cCodec()]


def create_arrays(store: Any, job: Job, n_ranks: int) -> None:
    group = zarr.create_group(store, zarr_format=3)
    for name in job.names:
        group.create_array(
            name,
            shape=(0 if job.is_growing else job.n_all, job.ny * n_ranks, job.nx),
            shards=(1, job.ny, job.nx),
            chunks=(1, job.chunk_ny, job.nx),
            dtype="float32",
            compressors=compressors_of(job),
            config={"write_empty_chunks": not job.has_empty_chunks},
            dimension_names=("time", "y", "x"),
        )


class Peer(Base):
    def __init__(self, job: Job, comm: Any) -> None:
        super().__init__(job, comm)
        zarr.config.set({"array.write_empty_chunks": not job.has_empty_chunks})
        if job.options.get("pipeline") == "zarrs":
            import zarrs  # noqa: F401 (the pipeline is named by its path)

            zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        self.path = str(self.folder / "run.zarr")

    def open_arrays(self, mode: str) -> None:
        group = zarr.open_group(self.path, mode=mode, zarr_format=3, use_consolidated=False)
        self.arrays: dict[str, Any] = {name: group[name] for name in self.job.names}

    def open(self) -> None:
        if self.comm.rank == 0:
            create_arrays(self.path, self.job, self.comm.size)
        self.comm.Barrier()
        self.open_arrays("r+")

    def write(self, i: int, blocks: list[Any]) -> None:
        if self.job.is_growing:
            for array in self.arrays.values():
                resized(array, i, self.comm)
            self.comm.Barrier()
            if self.comm.rank != 0:
                self.open_arrays("r+")
        for array, block in zip(self.arrays.values(), blocks, strict=True):
            array[i, self.rows] = block

    def close(self) -> None:
        """All is written."""

    def begin_reading(self) -> None:
        self.open_arrays("r")

    def read(self, i: int, name: str, start: int, stop: int) -> Any:
        return self.arrays[name][i, self.rows.start + start : self.rows.start + stop]

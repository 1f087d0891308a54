"""acquire-zarr: a stream a rank, since one process writes a store.

Its manual (README and the docstrings of ``StreamSettings``): dims from slow to fast, time the one that is appended to,
a frame at a time; ``max_threads`` at its default. Streams always grow. Inner chunks carry no checksum of their own,
and what it wrote is read by zarr-python.
"""

from __future__ import annotations

from typing import Any

import acquire_zarr as aqz
import zarr

from adapters.job import Job
from adapters.job import Peer as Base

_SHUFFLES = {"shuffle": 1, "bitshuffle": 2}


class Peer(Base):
    def __init__(self, job: Job, comm: Any) -> None:
        super().__init__(job, comm)
        aqz.set_log_level(aqz.LogLevel.ERROR)
        self.path = str(self.folder / f"{comm.rank}.zarr")

    def dimension(self, name: str, kind: Any, n: int, n_chunk: int, n_shard: int) -> Any:
        return aqz.Dimension(name=name, kind=kind, array_size_px=n, chunk_size_px=n_chunk, shard_size_chunks=n_shard)

    def open(self) -> None:
        job = self.job
        compression = None
        if job.blosc is not None:
            name, level, shuffle = job.blosc
            codec = {"lz4": aqz.CompressionCodec.BLOSC_LZ4, "zstd": aqz.CompressionCodec.BLOSC_ZSTD}[name]
            compression = aqz.CompressionSettings(
                compressor=aqz.Compressor.BLOSC1, codec=codec, level=level, shuffle=_SHUFFLES[shuffle]
            )
        dims = [
            self.dimension("t", aqz.DimensionType.TIME, 0, 1, 1),
            self.dimension("y", aqz.DimensionType.SPACE, job.ny, job.chunk_ny, job.ny // job.chunk_ny),
            self.dimension("x", aqz.DimensionType.SPACE, job.nx, job.nx, 1),
        ]
        arrays = []
        for name in job.names:
            settings = aqz.ArraySettings(output_key=name, data_type=aqz.DataType.FLOAT32, dimensions=dims)
            if compression is not None:
                settings.compression = compression
            arrays.append(settings)
        self.stream = aqz.ZarrStream(aqz.StreamSettings(arrays=arrays, store_path=self.path, overwrite=True))

    def write(self, i: int, blocks: list[Any]) -> None:  # noqa: ARG002 (a stream counts by itself)
        for name, block in zip(self.job.names, blocks, strict=True):
            self.stream.append(block, name)

    def close(self) -> None:
        self.stream.close()
        del self.stream

    def begin_reading(self) -> None:
        self.arrays = {name: zarr.open_array(self.path, path=name, mode="r") for name in self.job.names}

    def read(self, i: int, name: str, start: int, stop: int) -> Any:
        return self.arrays[name][i, start:stop]

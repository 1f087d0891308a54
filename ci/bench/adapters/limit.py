"""The limit: the codec calls, checksums and file writes that can't be left out, in a bare loop.

One file a rank, record and variable, as large as a shard of the others: inner chunks, their CRC32C, an index. Nothing
is renamed, agreed upon or described. The process's allocator keeps freed memory, as it does in a writer of mpistream:
without that the loop is slower.

*copy* is the limit of what the simulation waits: one copy of the block, into memory that is there.
"""

from __future__ import annotations

import os
from typing import Any

import google_crc32c
import numcodecs
import numcodecs.blosc
import numpy as np

from adapters.job import Job
from adapters.job import Peer as Base

numcodecs.blosc.use_threads = False

_IOV_MAX = 1024
_SHUFFLES = {"shuffle": numcodecs.Blosc.SHUFFLE, "bitshuffle": numcodecs.Blosc.BITSHUFFLE}


class Peer(Base):
    def __init__(self, job: Job, comm: Any) -> None:
        super().__init__(job, comm)
        self.codec = None
        if job.blosc is not None:
            name, level, shuffle = job.blosc
            self.codec = numcodecs.Blosc(name, level, _SHUFFLES[shuffle], 0, 4)
        self.n_chunks = job.ny // job.chunk_ny
        self.copies: list[Any] = []

    def open(self) -> None:
        np.empty(31 * 1024 * 1024, np.uint8)  # mallopt(3), M_MMAP_THRESHOLD: freeing it raises the dynamic threshold
        if self.job.options.get("copy"):
            self.keeps_last_only = True
            self.copies = [np.ones((self.job.ny, self.job.nx), "float32") for _ in self.job.names]

    def path(self, i: int, k: int) -> str:
        return f"{self.job.folder}/{k}.{i}.{self.comm.rank}"

    def write(self, i: int, blocks: list[Any]) -> None:
        if self.copies:
            for copy, block in zip(self.copies, blocks, strict=True):
                np.copyto(copy, block)
            return
        for k, block in enumerate(blocks):
            pieces: list[Any] = []
            index = np.empty((self.n_chunks, 2), "<u8")
            at = 0
            for c in range(self.n_chunks):
                raw = block[c * self.job.chunk_ny : (c + 1) * self.job.chunk_ny].reshape(-1).view(np.uint8)
                data = raw if self.codec is None else self.codec.encode(raw)
                pieces += [data, google_crc32c.value(data).to_bytes(4, "little")]
                index[c] = at, len(data) + 4
                at += len(data) + 4
            pieces += [index, google_crc32c.value(index.tobytes()).to_bytes(4, "little")]
            fd = os.open(self.path(i, k), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            n = sum(os.writev(fd, pieces[p : p + _IOV_MAX]) for p in range(0, len(pieces), _IOV_MAX))
            os.close(fd)
            assert n == at + index.nbytes + 4, "the disk is full"

    def close(self) -> None:
        """All is written."""

    def read(self, i: int, name: str, start: int, stop: int) -> Any:
        k, n = self.job.names.index(name), self.job.chunk_ny
        if self.copies:
            return self.copies[k][start:stop]
        out = np.empty((stop - start, self.job.nx), "float32")
        fd = os.open(self.path(i, k), os.O_RDONLY)
        nbytes = 16 * self.n_chunks + 4
        index = np.frombuffer(os.pread(fd, nbytes, os.fstat(fd).st_size - nbytes)[:-4], "<u8").reshape(-1, 2)
        chunks = index[start // n : stop // n].astype(int).tolist()
        # Neighbours lie together: one read for all of them.
        begin = chunks[0][0]
        data = memoryview(os.pread(fd, chunks[-1][0] + chunks[-1][1] - begin, begin))
        os.close(fd)
        for c, (at, size) in enumerate(chunks):
            body, crc = data[at - begin : at - begin + size - 4], data[at - begin + size - 4 : at - begin + size]
            assert google_crc32c.value(bytes(body)) == int.from_bytes(crc, "little")
            into = out[c * n : (c + 1) * n].reshape(-1).view(np.uint8)
            if self.codec is None:
                into[:] = body
            else:
                numcodecs.blosc.decompress(body, into)
        return out

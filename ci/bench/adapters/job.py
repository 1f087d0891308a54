"""What a rank is asked to do, and what it has to offer for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# name -> (compressor, level, shuffle); all of them Blosc's.
CODECS: dict[str, tuple[str, int, str] | None] = {
    "lz4 shuffle": ("lz4", 5, "shuffle"),
    "lz4 bitshuffle": ("lz4", 5, "bitshuffle"),
    "zstd-1 shuffle": ("zstd", 1, "shuffle"),
    "none": None,
}


@dataclass(frozen=True)
class Job:
    """One turn of one library.

    The field is cut into rows of ranks; each rank's box of a record is one shard of ``ny`` x ``nx`` cells, in inner
    chunks of ``chunk_ny`` rows.
    """

    peer: str
    options: dict[str, Any]
    task: str  # write, blocked, model or read
    layout: str  # preallocated or growing
    codec: str
    data: str
    ny: int
    nx: int
    chunk_ny: int
    n_variables: int
    n_warm: int
    n_records: int
    folder: str
    model: str = ""
    n_cores: int = 0  # 0: as many as there are

    @property
    def n_all(self) -> int:
        """Records that the store holds in the end."""
        return self.n_warm + self.n_records

    @property
    def is_growing(self) -> bool:
        return self.layout == "growing"

    @property
    def blosc(self) -> tuple[str, int, str] | None:
        return CODECS[self.codec]

    @property
    def names(self) -> list[str]:
        return [f"v{k}" for k in range(self.n_variables)]

    @property
    def has_empty_chunks(self) -> bool:
        """Whether whole inner chunks are likely to be fill value: libraries advise to look for them only then."""
        return self.data in ("zeros", "plume")


class MissingError(Exception):
    """What this library can't do, in one line."""


class Peer:
    """A library that writes records, one after the other, and reads them.

    ``open`` to ``close`` are called once, ``read`` after that. What raises NotImplementedError here is what every
    library must give; the methods without a body may be left as they are.
    """

    keeps_last_only = False
    """Whether only the record that was written last can be read."""

    def __init__(self, job: Job, comm: Any) -> None:
        """Import the library; what its code takes is not counted as memory of its output."""
        self.job, self.comm = job, comm
        self.rows = slice(comm.rank * job.ny, (comm.rank + 1) * job.ny)
        self.folder = Path(job.folder)

    def open(self) -> None:
        """Create the store and open it for writing; every rank calls it."""
        raise NotImplementedError

    def write(self, i: int, blocks: list[Any]) -> None:
        """Write record ``i``, a block a variable, and commit it if the library can; every rank calls it.

        The caller overwrites the blocks as soon as it returns.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Return when all has been handed to the operating system; every rank calls it."""
        raise NotImplementedError

    def begin_reading(self) -> None:
        """Open for reading what `close` left."""

    def read(self, i: int, name: str, start: int, stop: int) -> Any:
        """Return rows ``start`` to ``stop`` of this rank's box of a record."""
        raise NotImplementedError

    def end_reading(self) -> None:
        """Close what `begin_reading` opened."""


def resized(array: Any, i: int, comm: Any) -> None:
    """Let rank 0 grow a zarr-python array to hold record ``i``."""
    if comm.rank == 0:
        array.resize((i + 1, *array.shape[1:]))

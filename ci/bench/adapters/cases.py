"""What is measured: the works (a) to (f), and the rows of each, a library in one way of using it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adapters.job import CODECS

MIB = 2**20
BOTH = ("preallocated", "growing")
WORKS = {
    "a": "8 records of 32 MiB a rank, inner chunks of 1 MiB, 2 ranks",
    "b": "8 records of 32 MiB a rank, inner chunks of 32 KiB, 2 ranks",
    "c": "20 variables of 32 KiB a rank, a commit each record, 2 ranks",
    "d": "what the simulation waits for a record of 32 MiB, 1 rank, a spare core",
    "e": "a model with output, 1 rank",
    "f": "reading back 32 MiB a rank, inner chunks of 1 MiB, warm cache, 2 ranks",
}


@dataclass(frozen=True)
class Case:
    """Rows that are compared with each other: same data, codec, chunks and ranks."""

    work: str
    title: str
    task: str
    n_ranks: int
    job: dict[str, Any]

    @property
    def has_many_files(self) -> bool:
        """Whether what is written stays until the end of the case: for some minutes after many files were removed, ext4
        is slow to make new ones (it looks for inodes that were not used of late)."""
        return self.work == "c"


@dataclass(frozen=True)
class Row:
    """One way to use a library."""

    peer: str
    how: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = BOTH
    works: str = "abcdef"
    packages: tuple[str, ...] = ()
    codecs: tuple[str, ...] = tuple(CODECS)

    def layouts_of(self, case: Case) -> tuple[str, ...]:
        """Return the layouts of a case: beyond throughput one is enough, that in which the library is used most."""
        if case.work in "abc":
            return self.layouts
        return ("growing",) if self.peer == "mpistream" else self.layouts[:1]


H5 = ("h5py",)
ROWS = (
    Row("limit", "bare loop", "limit", layouts=("preallocated",), works="abcf"),
    Row("limit", "copy of the block", "limit", {"copy": True}, ("preallocated",), "d"),
    Row("mpistream", "threads=0", "stream", {"threads": 0}, works="abcdef"),
    Row("mpistream", "background", "stream", works="abcde"),
    Row("mpistream", "threads=0, no commit", "stream", {"threads": 0, "commits": False}, ("growing",), "ab"),
    Row("mpistream", "background, no commit", "stream", {"commits": False}, ("growing",), "d"),
    Row("mpistream", "background, fsync", "stream", {"durability": "fsync"}, ("growing",), "abc"),
    Row("zarr-python", "", "zarr_python"),
    Row("zarr-python", "with zarrs", "zarr_python", {"pipeline": "zarrs"}, packages=("zarrs",)),
    Row("tensorstore", "", "tensor_store", packages=("tensorstore",), works="abcdf"),
    Row("tensorstore", "asynchronous", "tensor_store", {"is_async": True}, packages=("tensorstore",), works="abde"),
    Row("tensorstore", "fsync", "tensor_store", {"durability": "fsync"}, BOTH[:1], "abc", ("tensorstore",)),
    Row("Icechunk", "", "ice_chunk", packages=("icechunk",)),
    Row("ADIOS2", "", "adios", {}, ("growing",), "abcf", ("adios2",)),
    Row("ADIOS2", "AsyncWrite", "adios", {"is_async": True}, ("growing",), "abde", ("adios2",)),
    Row("h5py mpio", "no filter", "hdf5", {}, BOTH, "ab", H5, ("none",)),
    Row("h5py mpio", "Blosc", "hdf5", {"filter": "blosc"}, BOTH, "abcdef", (*H5, "hdf5plugin"), tuple(CODECS)[:3]),
    Row("h5py mpio", "lzf", "hdf5", {"filter": "lzf"}, BOTH, "abc", H5, ("lz4 shuffle",)),
    Row("h5py mpio", "gzip-1 + shuffle", "hdf5", {"filter": "gzip"}, BOTH, "abc", H5, ("lz4 shuffle",)),
    Row("acquire-zarr", "", "acquire", {}, ("growing",), "abcde", ("acquire-zarr",)),
)

# What the rows use beyond the defaults, and where that is advised.
_NOTES = """
- a turn is a process group of its own, after a sync of the disk, in rounds of alternating direction; time runs from the
  third record until all is closed; one record is read back and compared in every turn
- limit: codec calls, CRC32C, one file a rank and record, nothing else, with an allocator that keeps freed memory
- mpistream: a commit a record, but for the rows that say no commit: what is written is committed when it is closed, as
  nothing of the others is; durability none but for the rows that say fsync; fill_value=0 for data with empty chunks
- zarr-python: whole shards; write_empty_chunks=True for data without empty chunks (user guide, Optimizing
  performance); growing: rank 0 resizes, the others open again
- zarrs: codec_pipeline.path, its defaults (README of zarrs-python)
- tensorstore: whole shards, all variables at once; file_io_sync off but for the row that says fsync,
  file_io_locking none, as no two processes write one shard (file Key-Value Store driver); asynchronous: up to 2
  records under way, copied before the write returns (Asynchronous support)
- Icechunk: a session forked to the ranks, merged and committed each record (Parallel Writes, cooperative
  distributed writes); zarr's async.concurrency 128 (Performance)
- ADIOS2: BP5, a stream a rank as the wheel has no MPI; deferred puts, BufferChunkSize 2147381248, StatsLevel 0 (BP5
  engine); no checksums
- h5py mpio: collective writes, chunks of one rank each, libver latest, nothing filled in advance (Parallel HDF5;
  Parallel Compression); lzf and gzip stand beside lz4; no checksums
- acquire-zarr: a stream a rank; max_threads at its default (docstrings); no checksums of inner chunks; read by
  zarr-python
"""
NOTES = [" ".join(note.split()) for note in _NOTES.split("\n- ") if note.strip()]


def cases_of(works: list[str], *, is_quick: bool) -> list[Case]:
    """Return the cases, in the order of the table."""
    found = []
    codecs = ("lz4 shuffle", "none") if is_quick else tuple(CODECS)
    for work, chunk_ny in (("a", 64), ("b", 2)):
        pairs = [(codec, "smooth") for codec in codecs]
        if work == "a" and not is_quick:
            pairs += [("lz4 shuffle", data) for data in ("noise", "zeros", "plume")]
        for codec, data in pairs:
            job = {"ny": 2048, "nx": 4096, "chunk_ny": chunk_ny, "codec": codec, "data": data}
            found.append(Case(work, f"{codec}, {data}", "write", 2, job))
    n = 40 if is_quick else 200
    small = {"ny": 64, "nx": 128, "chunk_ny": 64, "n_variables": 20, "n_records": n}
    found.append(Case("c", f"lz4 shuffle, smooth, {n} records", "write", 2, small))
    large = {"ny": 2048, "nx": 4096, "chunk_ny": 64, "n_warm": 2, "n_records": 8 if is_quick else 12}
    found.append(Case("d", "lz4 shuffle, smooth, inner chunks of 1 MiB", "blocked", 1, large))
    # What a model without numpy holds is small, and in small pieces.
    models = {
        "python": ("a step in pure Python, 8 MiB a record, inner chunks of 32 KiB", 512, 2),
        "small": ("steps of 64 x 64 cells in numpy, 8 MiB a record, inner chunks of 1 MiB", 512, 64),
        "large": ("steps of the record's 32 MiB in numpy, inner chunks of 1 MiB", 2048, 64),
    }
    for model, (title, ny, chunk_ny) in models.items():
        for n_cores in (1, 2):
            job = {"ny": ny, "nx": 4096, "chunk_ny": chunk_ny, "model": model, "n_cores": n_cores}
            job |= {"n_warm": 0, "n_records": 8 if is_quick else 16}
            found.append(Case("e", f"{title}, {n_cores} core{'s' * (n_cores - 1)}", "model", 1, job))
    found.append(Case("f", "lz4 shuffle, smooth", "read", 2, {"ny": 2048, "nx": 4096, "chunk_ny": 64}))
    return [case for case in found if case.work in works]

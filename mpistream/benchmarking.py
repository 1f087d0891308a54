"""How fast a machine writes with us, beside a bare loop of codec and write: what `mpistream bench` measures.

Rules of this room:

* A turn is one loop over a few records with one commit at the end, on all ranks together. The *limit* makes the same
  codec calls on the same inner chunks, with the same checksums, and writes one file for each of its shards.
* Blocks under 4 MiB are measured as they should be written: in rows, records that share a shard.
* Loops and profiles take turns, round after round, and medians are compared: what else runs on the machine, and what
  the disk does in between, hits all of them.
* Between loops there is an agreement, so a rank that fails ends the measurement on all.
* Whatever happens, the folder is left as empty as it was found.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.agreement import Channel
from mpistream.comm import connect
from mpistream.description import AppendTime, Variable
from mpistream.errors import MPIStreamError, SchemaError, StoreError
from mpistream.layout import SMALL_OBJECT_NBYTES
from mpistream.options import Options, resolve_options
from mpistream.schema import StreamSchema
from mpistream.session import write_open
from mpistream.zarr3.codecs import PROFILES, ChunkCodec, profile_chain

__all__ = ["Advice", "Trial", "advise", "benchmark", "parse_nbytes"]

_NX = 1024  # cells of a row: 4 KiB of float32
_ROW_NBYTES = 4 * _NX
_MAX_BLOCK_NBYTES = 1024**3
_CHUNK_NBYTES = 1024**2
_CHUNKS_TRIED = (_CHUNK_NBYTES // 4, _CHUNK_NBYTES, 4 * _CHUNK_NBYTES)
_UNITS = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
# Among what is hardly slower than the fastest, the smallest output is the better choice; so is the usual layout.
_HARDLY_SLOWER = 0.9
_IOV_MAX = 1024
_NOISE = 0.01
# Options(threads=) of the loops beside the limit.
_THREADS: dict[str, int | None] = {"threads=0": 0, "default": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was measured of one profile and length of inner chunks, all ranks together.

    Parameters
    ----------
    profile
        Name of the codec profile.
    chunk_nbytes
        Bytes of an inner chunk before compression.
    ratio
        Bytes of values by bytes of the files of the limit.
    limit, threads_0, default
        Bytes of values a second: of the bare loop, of a writer with ``Options(threads=0)``, and with the default.
    """

    profile: str
    chunk_nbytes: int
    ratio: float
    limit: float
    threads_0: float
    default: float

    @property
    def fastest(self) -> float:
        """Bytes of values a second of the better of the two writers."""
        return max(self.threads_0, self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to take on this machine, for blocks of this size.

    Parameters
    ----------
    profile
        ``codec`` of a schema or variable.
    chunk_nbytes, shard_nbytes
        Bytes before compression that an inner chunk and a shard should have.
    row_length
        Records that should share a shard.
    threads
        ``Options(threads=)``: 0, or None for the default.
    """

    profile: str
    chunk_nbytes: int
    shard_nbytes: int
    row_length: int
    threads: int | None


def parse_nbytes(text: str) -> int:
    """Return the bytes of ``"32MiB"`` or ``"256KiB"``.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``option`` for anything else than whole rows of 4 KiB, up to 1 GiB.
    """
    found = re.fullmatch(r"([0-9]{1,9})(KiB|MiB|GiB)", text)
    nbytes = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < nbytes <= _MAX_BLOCK_NBYTES or nbytes % _ROW_NBYTES:
        raise SchemaError(
            f"block {text!r}: give a multiple of 4KiB up to 1GiB, with its unit, for example 32MiB", kind="option"
        )
    return nbytes


def benchmark(
    folder: str | os.PathLike[str],
    *,
    comm: Any = None,
    block_nbytes: int = 32 * 1024**2,
    profiles: Sequence[str] = tuple(PROFILES),
    n_records: int = 4,
    n_rounds: int = 3,
    durability: str = "fsync",
) -> dict[str, Any]:
    """Measure the profiles, then inner chunks of other lengths with the best one.

    Collective.

    Parameters
    ----------
    folder
        An empty folder on the file system in question, which all ranks share.
    comm
        An mpi4py communicator; without it this process is the only rank.
    block_nbytes
        What a rank writes a record, see `parse_nbytes`.
    profiles
        Codec profiles that are compared.
    n_records, n_rounds
        Records a turn, rounded up to whole rows, and turns of each loop.
    durability
        As in `Options`; the limit, too, syncs its files, or does not.

    Returns
    -------
    JSON types, the same on every rank: the settings, ``trials`` (`Trial`), ``layouts`` (`Trial` of other inner chunks)
    and ``advice`` (`Advice`).

    Raises
    ------
    SchemaError
        On every rank: kind ``option`` for bad settings.
    StoreError
        On every rank: kind ``exists`` for a folder that is not empty, kind ``missing`` for one that is not there;
        what the disk says.
    """
    timeout = resolve_options(None).timeout
    channel = Channel(connect(comm, timeout), timeout)
    row_length = _row_length(block_nbytes)
    n_rows = -(-n_records // row_length)
    settings = {
        "ranks": channel.size,
        "block_nbytes": block_nbytes,
        "n_records": n_rows * row_length,
        "n_rounds": n_rounds,
        "durability": durability,
        "cores": len(os.sched_getaffinity(0)),
    }
    try:
        failure = _what_is_wrong(Path(folder), profiles, n_records, n_rounds, durability)
        channel.exchange("bench", failure=failure)
        bench = _Bench(channel, comm, Path(folder), block_nbytes, n_rows, durability)
        trials = bench.trials([(profile, _rows_near(_CHUNK_NBYTES, block_nbytes)) for profile in profiles], n_rounds)
        best = advise(trials, [], block_nbytes).profile
        lengths = dict.fromkeys(_rows_near(nbytes, block_nbytes) for nbytes in _CHUNKS_TRIED)
        layouts = bench.trials([(best, rows) for rows in lengths], n_rounds) if len(lengths) > 1 else []
    except MPIStreamError:
        channel.close_failed()
        raise
    channel.close()
    return {
        **settings,
        "trials": [asdict(trial) for trial in trials],
        "layouts": [asdict(trial) for trial in layouts],
        "advice": asdict(advise(trials, layouts, block_nbytes)),
    }


def advise(trials: Sequence[Trial], layouts: Sequence[Trial], block_nbytes: int) -> Advice:
    """Return what to take: the smallest output, and inner chunks near 1 MiB, unless others are clearly faster.

    Not collective.

    Parameters
    ----------
    trials
        Of the profiles, at least one.
    layouts
        Of other inner chunks, or none.
    block_nbytes
        What a rank writes a record; under 4 MiB records should share shards.
    """
    enough = _HARDLY_SLOWER * max(trial.fastest for trial in trials)
    best = max((t for t in trials if t.fastest >= enough), key=lambda t: (t.ratio, t.fastest))
    if layouts:
        enough = _HARDLY_SLOWER * max(trial.fastest for trial in layouts)
        best = min((t for t in layouts if t.fastest >= enough), key=lambda t: abs(t.chunk_nbytes - _CHUNK_NBYTES))
    row_length = _row_length(block_nbytes)
    return Advice(
        profile=best.profile,
        chunk_nbytes=best.chunk_nbytes,
        shard_nbytes=row_length * block_nbytes,
        row_length=row_length,
        threads=0 if best.threads_0 > best.default else None,
    )


def _what_is_wrong(
    folder: Path, profiles: Sequence[str], n_records: int, n_rounds: int, durability: str
) -> MPIStreamError | None:
    """Return the error of bad settings or a folder that is not empty."""
    if not profiles:
        return SchemaError(f"no profiles: give one or more of {', '.join(PROFILES)}", kind="option")
    if n_records < 1 or n_rounds < 1:
        return SchemaError(f"records {n_records}, rounds {n_rounds}: give numbers above 0", kind="option")
    try:
        Options(durability=durability)
        for profile in profiles:
            profile_chain(profile, np.dtype("float32"))
        names = sorted(path.name for path in folder.iterdir())
    except MPIStreamError as error:
        return error
    except (FileNotFoundError, NotADirectoryError):
        return StoreError(f"{folder} is not a folder: make an empty one on the file system in question", kind="missing")
    except OSError as error:
        return StoreError(f"{folder}: {error.strerror or error}", kind="io", errno=error.errno)
    if names:
        return StoreError(
            f"{folder} is not empty ({len(names)} entries, the first is {names[0]!r}): give an empty folder, what is "
            "measured is written into it and removed again",
            kind="exists",
        )
    return None


def _row_length(block_nbytes: int) -> int:
    """Return how many records should share a shard, so that it is no small object."""
    return -(-SMALL_OBJECT_NBYTES // block_nbytes)


def _rows_near(chunk_nbytes: int, block_nbytes: int) -> int:
    """Return the rows of inner chunks of about that size, of which a block has a whole number."""
    n, limit = block_nbytes // _ROW_NBYTES, chunk_nbytes // _ROW_NBYTES
    return next(rows for rows in range(min(limit, n), 0, -1) if n % rows == 0)


def _block_of(rank: int, n_rows: int) -> NDArray[np.float32]:
    """Return a rank's block: waves of several lengths, and noise in the last bits."""
    y, x = np.arange(n_rows)[:, None] / n_rows + rank, np.arange(_NX) / _NX
    smooth = 280 + 15 * np.sin(3 * y) * np.cos(5 * x) + 2 * np.sin(40 * (x + y))
    noise = np.random.default_rng(rank).standard_normal((n_rows, _NX), "float32")
    return np.asarray(smooth + _NOISE * noise, "float32")


class _Bench:
    """The loops, on one rank."""

    def __init__(
        self, channel: Channel, comm: Any, folder: Path, block_nbytes: int, n_rows: int, durability: str
    ) -> None:
        self._channel, self._comm, self._folder = channel, comm, folder
        self._n_rows, self._row_length, self._durability = n_rows, _row_length(block_nbytes), durability
        self._n_records = n_rows * self._row_length
        self._block = _block_of(channel.rank, block_nbytes // _ROW_NBYTES)
        self._nbytes = channel.size * block_nbytes * self._n_records

    def trials(self, cases: Sequence[tuple[str, int]], n_rounds: int) -> list[Trial]:
        """Return a trial of each profile and rows of an inner chunk."""
        seconds: dict[tuple[str, int, str], list[float]] = {}
        encoded: dict[tuple[str, int], int] = {}
        for _ in range(n_rounds):
            for profile, rows in cases:
                spent, encoded[profile, rows] = self._limit(profile, rows)
                seconds.setdefault((profile, rows, "limit"), []).append(spent)
                for name in _THREADS:
                    seconds.setdefault((profile, rows, name), []).append(self._stream(profile, rows, name))
        speed = {key: self._nbytes / statistics.median(found) for key, found in seconds.items()}
        return [
            Trial(
                profile=profile,
                chunk_nbytes=rows * _ROW_NBYTES,
                ratio=self._nbytes / encoded[profile, rows],
                limit=speed[profile, rows, "limit"],
                threads_0=speed[profile, rows, "threads=0"],
                default=speed[profile, rows, "default"],
            )
            for profile, rows in cases
        ]

    def _together(self, run: Callable[[], int]) -> tuple[float, int]:
        """Return the seconds of the slowest rank and the sum of what ``run`` returns; what fails, fails on all."""
        self._channel.exchange("begin")
        failure: MPIStreamError | None = None
        began, n = time.perf_counter(), 0
        try:
            n = run()
        except MPIStreamError as error:
            failure = error
        except OSError as error:
            rank = self._channel.rank
            failure = StoreError(f"rank {rank}: {error}", kind="io", errno=error.errno, rank=rank)
        spent = time.perf_counter() - began

        def slowest(payloads: list[Any]) -> list[Any]:
            return [[max(p[0] for p in payloads), sum(p[1] for p in payloads)]] * len(payloads)

        seconds, total = self._channel.exchange("end", payload=[spent, n], failure=failure, answer=slowest)
        return float(seconds), int(total)

    def _limit(self, profile: str, rows: int) -> tuple[float, int]:
        """Encode and write in a bare loop; return seconds and encoded bytes."""
        codec = ChunkCodec(profile_chain(profile, self._block.dtype), self._block.dtype)
        paths = [self._folder / f"limit-{self._channel.rank}-{i}" for i in range(self._n_rows)]

        def run() -> int:
            return sum(self._write_file(path, codec, rows) for path in paths)

        try:
            return self._together(run)
        finally:
            for path in paths:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _write_file(self, path: Path, codec: ChunkCodec, rows: int) -> int:
        pieces: list[Any] = []
        for _ in range(self._row_length):
            for at in range(0, len(self._block), rows):
                pieces += codec.encode(self._block[at : at + rows])
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            n = sum(os.writev(fd, pieces[at : at + _IOV_MAX]) for at in range(0, len(pieces), _IOV_MAX))
            if n < sum(map(len, pieces)):
                raise StoreError(f"{path}: only {n} bytes were written: the disk is full", kind="io")
            if self._durability == "fsync":
                os.fsync(fd)
        finally:
            os.close(fd)
        return n

    def _stream(self, profile: str, rows: int, name: str) -> float:
        """Write with a writer, one commit at the end; return seconds."""
        n_rows = len(self._block)
        schema = StreamSchema(
            dims={"time": None, "y": n_rows * self._channel.size, "x": _NX},
            time=AppendTime(units="seconds since 2000-01-01"),
            variables={"u": Variable(("time", "y", "x"), "float32")},
            shard_shape={"time": self._row_length, "y": n_rows, "x": _NX},
            chunk_shape={"time": 1, "y": rows, "x": _NX},
            codec=profile,
        )
        options = Options(durability=self._durability, threads=_THREADS[name])
        start = n_rows * self._channel.rank
        with self._removed("bench.zarr") as path:
            region = {"y": (start, start + n_rows)}
            with write_open(path, schema, comm=self._comm, region=region, options=options) as writer:

                def run() -> int:
                    for i in range(self._n_records):
                        writer.write_record(float(i), {"u": self._block})
                    writer.commit()
                    return 0

                return self._together(run)[0]

    @contextlib.contextmanager
    def _removed(self, name: str) -> Iterator[Path]:
        """Name a folder that is gone afterwards, before any rank makes the next one."""
        path = self._folder / name
        try:
            yield path
        finally:
            if self._channel.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
        self._channel.exchange("removed")

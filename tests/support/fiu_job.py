"""Ranks whose calls of the system fail at random: ``fiu_job.py folder n_runs seed``, with libfiu preloaded.

Each run makes a store, writes, closes, resumes and writes again, whatever happens on the way, while libfiu lets one
kind of call fail on one rank or on all. After each error a rank does what a program would do: it tries the commit
again, or, when the writer is dead, opens the store again. After some errors the fault is over. All ranks must have had
the same errors, no file may be left open, and the store must be that of a run without a fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpistream as ms
import mpistream.rank_writer
from tests.support.scene import assert_holds
from tests.support.verified import assert_sound
from tests.support.writing_job import CHUNK, SCENE, SHARD

__all__ = ["main"]

# What a store calls; nothing that MPI needs to talk. Of close(2) libfiu would leave the file open, Linux never does.
_POINTS = {
    "posix/io/oc/open": (errno.EIO, errno.EMFILE, errno.ENOSPC, errno.ESTALE),
    "posix/io/rw/writev": (errno.EIO, errno.ENOSPC),
    "posix/io/rw/pread": (errno.EIO, errno.ESTALE),
    "posix/io/sync/fsync": (errno.EIO, errno.ENOSPC),
    "posix/io/dir/rename": (errno.EIO, errno.ENOSPC, errno.ESTALE),
    "posix/io/dir/unlink": (errno.EIO,),
    "posix/io/dir/opendir": (errno.EIO, errno.EMFILE),
}
_ONCE = 1  # FIU_ONETIME
_N_RECORDS = 3
_CLOSED_AT = 2
_MAX_TRIES = 40
# What a rank is told when others do not come: with a fault of the disk nobody has to be waited for.
_HANGS = {"timeout", "left", "mismatch"}


class _Fault:
    """Calls that fail at random, from `arm` on."""

    def __init__(self, rng: random.Random, rank: int, size: int) -> None:
        self.point = rng.choice(list(_POINTS))
        self.number = rng.choice(_POINTS[self.point])
        self.probability = rng.choice([0.1, 0.3, 1.0])
        self.flags = rng.choice([0, _ONCE])
        self.who = rng.choice([*range(size), None])
        self.n_errors = rng.randint(1, 4)  # after which it is over
        self._seed = rng.randrange(2**31) + rank
        self.is_here = self.who in (None, rank)
        self._fiu = ctypes.CDLL("libfiu.so.0")
        self._fiu.fiu_set_prng_seed(self._seed)

    def arm(self) -> None:
        if self.is_here:
            done = self._fiu.fiu_enable_random(
                self.point.encode(), 1, ctypes.c_void_p(self.number), self.flags, ctypes.c_float(self.probability)
            )
            assert done == 0, "libfiu does not know it"

    def disarm(self) -> None:
        self._fiu.fiu_disable(self.point.encode())

    def __str__(self) -> str:
        who = "all ranks" if self.who is None else f"rank {self.who}"
        return f"{self.point} {errno.errorcode[self.number]} {self.probability} {'once' if self.flags else ''} on {who}"


class _Run:
    """One run on one rank."""

    def __init__(self, url: str, comm: Any, fault: _Fault, options: ms.Options) -> None:
        self.errors: list[tuple[Any, ...]] = []
        self._url, self._comm, self._fault, self._options = url, comm, fault, options
        self._n_committed: int | None = None

    def _tried(self, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        try:
            return call(*args, **more)
        except ms.MPIStreamError as error:
            number = getattr(error, "errno", None)
            self.errors.append((type(error).__name__, error.kind, error.rank, number, str(error)))
            self._fault.disarm()
            self._check_told(error)
            if len(self.errors) < self._fault.n_errors:
                self._fault.arm()
            return None

    def _check_told(self, error: ms.MPIStreamError) -> None:
        if self._comm.rank == 0 and isinstance(error, ms.CommitError) and error.kind != "outcome_unknown":
            n = ms.open_reader(self._url).n_records
            assert n == self._n_committed, f"{n} records, not {self._n_committed}, after {error}"

    def _opened(self) -> ms.StreamWriter:
        w: ms.StreamWriter | None
        for _ in range(_MAX_TRIES):
            more: dict[str, Any] = {"comm": self._comm, "takeover": True, "options": self._options}
            w = self._tried(ms.write_resume, self._url, **more)
            if w is None and self.errors[-1][1] == "no_store":
                self.errors.pop()
                schema = SCENE.schema(shard_shape=SHARD, chunk_shape=CHUNK)
                w = self._tried(ms.write_open, self._url, schema, **more)
            if w is not None:
                return w
        raise AssertionError(f"the store can't be opened: {self.errors}")

    def _commits(self, w: ms.StreamWriter) -> bool:
        """Commit, again and again while the writer lives; False when it does not."""
        self._n_committed = w.n_committed
        for _ in range(_MAX_TRIES):
            if self._tried(w.commit) is not None:
                return True
            if w._channel.failure is not None:
                break
        return False

    def run(self) -> None:
        """Do all of it."""
        self._fault.arm()
        w = self._opened()
        while w.n_committed < _N_RECORDS:
            n = w.n_committed
            if not w.is_committed("topo"):
                self._tried(SCENE.write_statics, w)
            if w.n_records == n:
                self._tried(SCENE.write, w, n)
            if not self._commits(w) or w.n_committed == _CLOSED_AT:
                self._tried(w.close)
                w = self._opened()
        self._tried(w.close)
        self._fault.disarm()
        # What could not be deleted, or brought in step with the manifest, was a warning: the next opening does it.
        ms.write_resume(self._url, comm=self._comm, takeover=True, options=self._options).close()


def _one(url: str, comm: Any, rng: random.Random, counts: Counter[str], *, is_first: bool = False) -> None:
    fault = _Fault(rng, comm.rank, comm.size)
    fault.is_here = fault.is_here and not is_first
    options = ms.Options(timeout=20, exit_timeout=5, lease_ttl=100_000, threads=rng.choice([0, 1]))
    n_open = len(os.listdir("/proc/self/fd"))
    run = _Run(url, comm, fault, options)
    try:
        run.run()
        told = comm.allgather(run.errors)
        assert told == [told[0]] * comm.size, f"the ranks were told different things: {told}"
        for _, kind, rank, number, text in run.errors:
            is_of_disk = number in (None, fault.number) and (rank is None or fault.who in (None, rank))
            assert kind not in _HANGS and is_of_disk, f"{kind}, rank {rank}, errno {number}: {text}"  # noqa: PT018
        left = len(os.listdir("/proc/self/fd")) - n_open
        assert left <= 0 or is_first, f"{left} files are left open after {run.errors}"
        if comm.rank == 0:
            assert_holds(url, SCENE, [0] * _N_RECORDS)
            assert_sound(url)
    except BaseException as error:
        error.add_note(f"{fault}, {options.threads} threads, rank {comm.rank} of {comm.size}; told: {run.errors}")
        raise
    counts["runs"] += 1
    counts["runs with errors"] += bool(run.errors)
    counts["errors"] += len(run.errors)
    counts.update(f"errors at {fault.point.rpartition('/')[2]}" for _ in run.errors)


def main() -> None:
    """Do the runs that the command line asks for."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    folder, n_runs, seed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    logging.getLogger("mpistream").setLevel(logging.CRITICAL)
    # The inner chunks here are small; threads are to encode them all the same.
    mpistream.rank_writer._MIN_BACKGROUND_NBYTES = 0
    counts: Counter[str] = Counter()
    # Without a fault: what is imported, and what libraries open once for all, is there after it.
    _one(str(folder / "first"), comm, random.Random(seed), Counter(), is_first=True)
    comm.Barrier()
    for k in range(n_runs):
        url = str(folder / f"{k}")
        try:
            _one(url, comm, random.Random(f"{seed} {comm.size} {k}"), counts)
        except BaseException as error:
            error.add_note(f"run {k} of seed {seed}")
            raise
        comm.Barrier()
        if comm.rank == 0:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(url)
    if comm.rank == 0:
        print(dict(counts))


if __name__ == "__main__":
    main()

"""Real MPI jobs, started from a serial test: watched, killed when late, found again whatever became of them.

::

    done = mpiexec(3, ["script.py", "arg"])             # waits, checks the exit code, returns the output
    with start_mpiexec(3, ["-m", "mpi4py", "script.py"]) as job:
        job.wait_for_ranks()
        job.kill_ranks()                                # SIGKILL to all, or to those named
        job.wait(timeout=30)
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.rank_main import RANK_VARIABLES
from tests.support.wait import wait_until
from tests.support.zygote import pids_of, zygote

__all__ = ["MPIJob", "find_mpiexec", "mpiexec", "start_mpiexec"]

Arguments = Sequence[str | Path]
Changes = Mapping[str, str | None]

_ROOT = Path(__file__).parents[2]
_RANK_MAIN = Path(__file__).with_name("rank_main.py")
_RANK_CLIENT = Path(__file__).with_name("rank_client.py")
# In the environment of everything that belongs to a job. A process group is not enough: launchers put ranks
# into groups of their own, and ranks whose mpiexec was killed have no parent to be found by.
_JOB_VARIABLE = "MPISTREAM_TEST_JOB"
# The folder where rank_main.py puts tracebacks.
_TRACES_VARIABLE = "MPISTREAM_TEST_TRACES"
# What the launcher and the ranks of a surrounding job leave in the environment.
_OTHER_JOB_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_", "HYDI_", "HYDRA_")


def find_mpiexec() -> list[str]:
    """Return the command that starts ranks; skip the test if there is none."""
    command = shlex.split(os.environ.get("MPIEXEC", "")) or ["mpiexec"]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs an MPI launcher: no {command[0]} on PATH, and MPIEXEC does not name one")
    return command


class MPIJob:
    """A running job; leaving its ``with`` body kills what is left of it.

    Parameters
    ----------
    n
        How many ranks it has.
    args
        What each rank runs: a script with arguments, or ``-m module``, or ``-c code``.
    env
        Additions to the environment; None as a value takes the variable out.
    """

    def __init__(self, n: int, args: Arguments, env: Changes | None = None) -> None:
        self.n = n
        self.args = [
            *find_mpiexec(),
            *("-n", str(n)),
            *_rank_command(),
            *map(str, args),
        ]
        self._name = uuid.uuid4().hex
        self._shared: set[Path] = set()
        # Files, not pipes: a rank that outlives its launcher must not keep us reading.
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115 - closed in kill()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in kill()
        # A file for each rank: tracebacks that several write to one are mixed up in mid line.
        self._traces = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            self.args,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            env=self._environment(env or {}),
            start_new_session=True,
        )

    def __enter__(self) -> MPIJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.output())
        self.kill()
        self._stdout.close()
        self._stderr.close()
        self._traces.cleanup()

    @property
    def launcher_pid(self) -> int:
        """Process id of mpiexec."""
        return self._process.pid

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id of the ranks that are alive now."""
        found = pids_of(self._traces.name)
        for pid in self._processes():
            # The launcher names rank_main.py as well, but not as its own first argument.
            words = _proc_words(pid, "cmdline")
            if words[1:2] != [str(_RANK_MAIN)]:
                continue
            environment = dict(w.split("=", 1) for w in _proc_words(pid, "environ") if "=" in w)
            rank = next((environment[name] for name in RANK_VARIABLES if name in environment), None)
            if rank is not None:
                found[int(rank)] = pid
        return found

    def wait_for_ranks(self, timeout: float = 30) -> dict[int, int]:
        """Return `pids` once all ranks have started."""

        def all_ranks() -> dict[int, int] | None:
            pids = self.pids
            return pids if len(pids) == self.n else None

        return wait_until(all_ranks, timeout, f"{self.n} ranks to start") or {}

    def signal_ranks(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to these ranks, or to all."""
        for rank, pid in self.pids.items():
            if ranks is None or rank in set(ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill_ranks(self, number: int = signal.SIGKILL, ranks: Iterable[int] | None = None) -> None:
        """Kill these ranks, or all, and leave the launcher to notice."""
        # MPI removes its shared memory when all ranks have it, or at the end: the killed leave theirs for good.
        self._shared |= {file for pid in self.pids.values() for file in _shared_memory(pid)}
        self.signal_ranks(number, ranks)

    def wait(self, timeout: float = 60) -> int:
        """Return the launcher's exit code; after ``timeout`` seconds kill the job and raise TimeoutError.

        The error holds the output with a traceback of each thread of each rank.
        """
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            traces = self._trace_ranks()
            self.kill()
            raise TimeoutError(
                f"no end after {timeout:g} s of {shlex.join(self.args)}\n{self.output()}\n{traces}"
            ) from None

    def _trace_ranks(self) -> str:
        """Return where each thread of each rank stands, also when it hangs in a call of MPI."""
        pids = self.pids
        self.signal_ranks(signal.SIGUSR2)
        files = {rank: Path(self._traces.name, str(pid)) for rank, pid in sorted(pids.items())}
        seen: list[str] = []

        def are_whole() -> bool:
            seen.append("".join(f"--- rank {rank}\n{_text_of(file)}" for rank, file in files.items()))
            return all(map(_text_of, files.values())) and seen[-1:] == seen[-2:-1]

        # A rank that is stopped, or dies, writes none: what the others wrote is told all the same.
        with contextlib.suppress(TimeoutError):
            wait_until(are_whole, 2, "tracebacks", every=0.1)
        return seen[-1]

    def kill(self) -> None:
        """Kill the launcher, the ranks and whatever else they started, until nothing is left."""
        if self._process.poll() is None:
            self.kill_ranks()
            self._process.kill()

        def nothing_left() -> bool:
            left = self._processes()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_until(nothing_left, 30, "the job's processes to go")
        self._process.wait()
        for file in self._shared:
            file.unlink(missing_ok=True)

    def stdout(self) -> str:
        """Return what the job has written to its standard output until now."""
        return _read_all(self._stdout.fileno())

    def stderr(self) -> str:
        """Return what the job has written to its standard error until now."""
        return _read_all(self._stderr.fileno())

    def output(self) -> str:
        """Return all that the job has written until now, for an error's text."""
        return f"--- stdout of the job\n{self.stdout()}--- stderr of the job\n{self.stderr()}---"

    def _environment(self, changes: Changes) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith(_OTHER_JOB_PREFIXES)}
        path = os.pathsep.join(filter(None, [str(_ROOT), own.get("PYTHONPATH")]))
        full = {**own, "PYTHONPATH": path, **changes, _JOB_VARIABLE: self._name, _TRACES_VARIABLE: self._traces.name}
        return {k: v for k, v in full.items() if v is not None}

    def _processes(self) -> list[int]:
        entry = f"{_JOB_VARIABLE}={self._name}"
        found = [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdigit() and entry in _proc_words(int(folder.name), "environ")
        ]
        return [*found, *pids_of(self._traces.name).values()]  # a forked rank shows the environment of its zygote


def start_mpiexec(n: int, args: Arguments, *, env: Changes | None = None) -> MPIJob:
    """Start ``args`` on n ranks and return the running job, to be used in a ``with`` statement."""
    return MPIJob(n, args, env)


def mpiexec(
    n: int,
    args: Arguments,
    *,
    timeout: float = 60,
    env: Changes | None = None,
    expect: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Run ``args`` on n ranks to the end and return what it printed.

    Parameters
    ----------
    n
        How many ranks there are.
    args
        What each rank runs: a script with arguments, or ``-m module``, or ``-c code``.
    timeout
        Seconds after which the job is killed and TimeoutError is raised, with where each rank stood.
    env
        Additions to the environment; None as a value takes the variable out.
    expect
        The exit code that the launcher must end with; None: any.
    """
    with MPIJob(n, args, env) as job:
        code = job.wait(timeout)
        if expect is not None and code != expect:
            raise AssertionError(f"exit code {code}, not {expect}, of {shlex.join(job.args)}")
        return subprocess.CompletedProcess(job.args, code, job.stdout(), job.stderr())


def _rank_command() -> list[str]:
    """Return what the launcher starts for each rank."""
    if os.environ.get("MPISTREAM_TEST_FORK"):
        return [sys.executable, "-I", "-S", str(_RANK_CLIENT), zygote()]
    return [sys.executable, str(_RANK_MAIN)]


def _shared_memory(pid: int) -> list[Path]:
    """Return the files of shared memory that MPI has made for a rank and others of its job."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    return [Path(line.split()[-1]) for line in lines if line.split()[-1].startswith("/dev/shm/")]


def _proc_words(pid: int, name: str) -> list[str]:
    """Return the words of a file under /proc/<pid>; none if the process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _read_all(descriptor: int) -> str:
    # Not read(): the job writes at the same file position.
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

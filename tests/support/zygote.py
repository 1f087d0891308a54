"""Ranks that need not import: a process that has imported everything forks each of them.

``python -m tests.support.zygote SOCKET`` is that process, with one thread and without MPI. What the launcher starts in
the place of a rank is `rank_client`: it hands over its environment, folder, arguments, standard streams and the
launcher's descriptor (PMI_FD), and stays for as long as the rank lives. So

- a rank is a process of its own that runs `rank_main`, loads and initialises MPI itself, and is killed by its own pid;
- the launcher sees its child end as the rank did, with the same code or by the same signal;
- what ends the client ends the rank.

The pid of a rank is what a link in the job's folder of traces points to, from before it runs until it is reaped.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support import rank_main
from tests.support.wait import wait_until

__all__ = ["main", "pids_of", "zygote"]

_BASE = 200  # descriptors of the zygote lie below, and so do those that a rank inherits


@functools.cache
def zygote() -> str:
    """Start the zygote of this process, unless it runs, and return the path of its socket."""
    folder = tempfile.mkdtemp(prefix="mpistream-zygote-")
    path = f"{folder}/socket"
    # It ends with us, whatever ends us: when its standard input does.
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.zygote", path],
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # else numpy's starts threads when it is imported
    )

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    wait_until(lambda: os.path.exists(path) or process.poll() is not None, 60, "the zygote")
    if process.poll() is not None:
        raise ChildProcessError("the zygote has ended")
    return path


def pids_of(traces: str) -> dict[int, int]:
    """Return rank -> pid of the ranks of a job that are alive."""
    found = {}
    for link in Path(traces).glob("rank-*"):
        with contextlib.suppress(FileNotFoundError):
            found[int(link.name.removeprefix("rank-"))] = int(os.readlink(link))
    return found


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return what a client asks for: a line of JSON, and the descriptors that came with its first byte."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 8)
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:
            for descriptor in descriptors:  # the launcher waits for their end
                os.close(descriptor)
            raise EOFError("a client died before it had said what it wants")
        data += more
    return json.loads(data), descriptors


def _link_of(environment: dict[str, str]) -> str:
    rank = next(environment[name] for name in rank_main.RANK_VARIABLES if name in environment)
    return f"{environment['MPISTREAM_TEST_TRACES']}/rank-{rank}"


def _take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this new process what the client would have been."""
    kept = [fcntl.fcntl(d, fcntl.F_DUPFD, _BASE) for d in descriptors]
    os.closerange(0, _BASE)
    for descriptor, number in zip(kept, request["numbers"], strict=True):
        os.dup2(descriptor, number)
    os.closerange(_BASE, _BASE + 50)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [rank_main.__file__, *request["arguments"]]
    # Fails if the job is over already.
    os.symlink(str(os.getpid()), _link_of(request["environment"]))


def _reap(pid: int, link: str, connection: socket.socket) -> None:
    """Tell a client how its rank has ended."""
    # First: until it is reaped no other process has this pid.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    connection.close()


def _serve(listener: socket.socket) -> bool:
    """Fork a rank for each client; return True in each rank, False in the zygote when its parent is gone."""
    ranks: dict[int, tuple[int, str, socket.socket]] = {}  # by the descriptor of the process
    clients: dict[int, int] = {}  # descriptor of the connection -> pid
    while True:
        poll = select.poll()  # has no descriptor that a rank would inherit
        for descriptor in (0, listener.fileno(), *ranks, *clients):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll():
            if descriptor == 0:
                for pid in clients.values():
                    os.kill(pid, signal.SIGKILL)
                return False
            if descriptor in ranks:
                pid, link, connection = ranks.pop(descriptor)
                clients.pop(connection.fileno(), None)
                os.close(descriptor)
                _reap(pid, link, connection)
            elif descriptor in clients:  # it has died
                os.kill(clients.pop(descriptor), signal.SIGKILL)
            elif descriptor == listener.fileno():
                connection = listener.accept()[0]
                try:
                    request, descriptors = _receive(connection)
                except (EOFError, OSError):
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    # So that no object closes what takes its number.
                    for other in (listener, connection, *(c for _, _, c in ranks.values())):
                        other.detach()
                    _take_over(request, descriptors)
                    return True
                for d in descriptors:
                    os.close(d)
                ranks[os.pidfd_open(pid)] = pid, _link_of(request["environment"]), connection
                clients[connection.fileno()] = pid


def main() -> None:
    """Import what the ranks of tests use, and fork ranks."""
    # Loading these takes a rank most of its time. MPI is not among them.
    for name in ("mpi4py.run", "zarr", "tests.support.writing_job"):
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1] + ".new")
    listener.listen(64)
    # A fork has but the thread that calls it.
    assert len(os.listdir("/proc/self/task")) == 1
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    if _serve(listener):
        rank_main.main()


if __name__ == "__main__":
    main()

"""The room of messages without MPI: who is one of many, the only process, and how it waits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from mpistream.comm import SerialTransport, connect, is_one_of_many, waiting, world
from mpistream.errors import ProtocolError


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, False),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "128"}, True),
        ({"PMIX_RANK": "0"}, False),
        ({"PMIX_RANK": "3"}, True),
        ({"PMI_SIZE": ""}, False),
        ({"PMI_SIZE": "many"}, False),
        ({"PMI_SIZE": "-4"}, False),
        ({"PMI_SIZE": "²"}, False),
        ({"SLURM_NTASKS": "64", "SLURM_PROCID": "3"}, False),
    ],
    ids=str,
)
def test_environment_tells_whether_there_are_other_ranks(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What MPICH's and Open MPI's launchers say counts; what a batch system says of tasks does not."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert is_one_of_many(environment) is expected


class _World:
    def __init__(self, size: int) -> None:
        self._size = size

    def Get_size(self) -> int:
        return self._size


class _MPI:
    """As much of mpi4py.MPI as is asked."""

    def __init__(self, size: int, *, initialized: bool = True, finalized: bool = False) -> None:
        self.COMM_WORLD = _World(size)
        self._state = initialized, finalized

    def Is_initialized(self) -> bool:
        return self._state[0]

    def Is_finalized(self) -> bool:
        return self._state[1]


@pytest.mark.parametrize(
    ("mpi", "environment", "expected"),
    [
        (_MPI(1), {"PMI_SIZE": "4"}, False),
        (_MPI(4), {}, True),
        (_MPI(4, initialized=False), {}, False),
        (_MPI(1, initialized=False), {"PMI_SIZE": "4"}, True),
        (_MPI(4, finalized=True), {}, False),
    ],
)
def test_mpi_that_runs_knows_better_than_the_environment(
    mpi: Any, environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of an initialised MPI's world counts; before and after that, only the environment is left."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    assert is_one_of_many(environment) is expected


def test_without_a_launcher_there_is_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert world() is None


@pytest.mark.parametrize(("name", "value"), [("PMI_SIZE", "3"), ("OMPI_COMM_WORLD_SIZE", "3"), ("PMIX_RANK", "1")])
def test_one_of_several_processes_needs_a_communicator(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without comm, a process that a launcher started with others is refused, and told what to pass."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ProtocolError, match=r"comm=MPI\.COMM_WORLD") as caught:
        connect(None, 1)
    assert caught.value.kind == "no_comm"


def test_process_of_its_own_is_all_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without comm and without other ranks the transport is that of one process."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(connect(None, 1), SerialTransport)


def test_serial_transport_has_one_rank_and_no_messages() -> None:
    """It gathers its own bytes, sends to nobody and hears from nobody."""
    transport = SerialTransport()
    assert (transport.rank, transport.size, transport.is_usable()) == (0, 1, True)
    transport.send(0, 1, b"x")
    assert transport.poll(1) is None
    assert transport.gather(b"token", 1) == [b"token"]
    transport.swap([], [], 1, 0, lambda: None)
    transport.free()
    assert transport.is_usable() is True


def test_connecting_alone_starts_no_mpi() -> None:
    """A process that writes alone never imports mpi4py.MPI, which would initialise MPI."""
    code = "import sys; from mpistream.comm import connect; connect(None, 1); print('mpi4py.MPI' in sys.modules)"
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI"))}
    found = subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "False"


def test_waiting_ends_after_the_timeout_and_looks_once_more() -> None:
    """The wait lasts as long as it is told, and what came in its last moment is still seen."""
    began = time.monotonic()
    seen = [time.monotonic() - began for _ in waiting(0.2)]
    assert 0.2 <= seen[-1] < 1
    assert seen[0] < 0.1


@pytest.mark.parametrize("timeout", [0, -1])
def test_waiting_for_no_time_looks_at_least_once(timeout: float) -> None:
    """Without any time to wait there is one look."""
    assert len(list(waiting(timeout))) >= 1


def test_waiting_leaves_the_core_to_others() -> None:
    """After the first millisecond it sleeps: a second of waiting takes little processor time and few looks."""
    cpu = time.thread_time()
    n_looks = sum(1 for _ in waiting(1.0))
    assert time.thread_time() - cpu < 0.3
    # The millisecond of spinning, then sleeps of up to 5 ms.
    assert n_looks < 5000


def test_waiting_is_quick_to_see_what_comes_soon() -> None:
    """What comes in the first milliseconds is seen within some more."""
    due = time.monotonic() + 0.003
    for _ in waiting(5):
        if time.monotonic() >= due:
            break
    assert time.monotonic() - due < 0.1

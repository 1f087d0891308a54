"""Processes that run one at a time, in an order that is the same in every run: threads that pass a baton.

A process keeps the baton until it waits for a message that has not come, is told to stop before one of its calls of
the disk, or ends. There is no clock: whoever waits is told that its time is over when nobody else can go on.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar
from unittest import mock

from numpy.typing import NDArray

from mpistream import agreement, lease, local_store, owner, parallel, publishing, session
from mpistream.comm import SwapTimeoutError
from mpistream.pipeline import pool_of
from tests.support.sim_disk import Clock, Looks, SimDisk, SimOS
from tests.support.sim_memo import memoised

__all__ = ["Process", "Sim", "SimTransport", "Stopped", "System", "here", "simulated"]


def _nothing(*_: object) -> None:
    """Do nothing."""


def _taken() -> threading.Lock:
    """Return a lock that is held: whoever takes it waits until somebody gives it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Stopped(BaseException):
    """The process is dead; no handler for errors is meant for it."""


class _Runner:
    """A thread that runs processes one after the other: to start one for each would take longer than some processes."""

    idle: ClassVar[list[_Runner]] = []

    def __init__(self) -> None:
        self.baton = _taken()
        self._run: Callable[[], None] = _nothing
        threading.Thread(target=self._serve, daemon=True).start()

    @classmethod
    def of(cls, run: Callable[[], None]) -> _Runner:
        """Return one that runs this when it is given the baton."""
        runner = cls.idle.pop() if cls.idle else cls()
        runner._run = run
        return runner

    def _serve(self) -> None:
        while True:
            self.baton.acquire()
            self._run()


class Process:
    """One process: what it runs, what it waits for, how it ended."""

    def __init__(self, sim: Sim, who: int, main: Callable[[], object]) -> None:
        self.who = who
        self.result: Any = None
        self.error: BaseException | None = None
        self.has_ended = False
        self.is_frozen = False
        self.is_killed = False
        self.ready: Callable[[], bool] | None = None
        """What it waits for, None: nothing."""
        self.n_mail = 0
        self.pool: Any = None
        """What works for it in the background; None: threads, if the options say so."""
        self.freeze_at: int | None = None
        """Before which of its calls of the disk it is frozen."""
        self._sim = sim
        self._main = main
        self._runner = _Runner.of(self._run)
        self._baton = self._runner.baton

    def _run(self) -> None:
        _here.process = self
        try:
            if not self.is_killed:
                self.result = self._main()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever looks at this process
            self.error = error
        self.has_ended = True
        _Runner.idle.append(self._runner)
        self._sim.back.release()

    def go(self) -> None:
        """Give it the baton until it waits, is frozen or ends."""
        self._baton.release()
        self._sim.back.acquire()

    def wait(self, ready: Callable[[], bool]) -> bool:
        """Give the baton back until something is ready; False when nobody is left who could make it so."""
        if not ready():
            self.ready = ready
            self._pause()
            self.ready = None
        return ready()

    def freeze(self) -> None:
        """Give the baton back until somebody lets this process go on."""
        self.is_frozen = True
        self._pause()

    def _pause(self) -> None:
        self._sim.back.release()
        self._baton.acquire()
        if self.is_killed:
            raise Stopped

    def has_mail_behind(self, n: int) -> bool:
        """Whether more messages have come than so many."""
        return self.n_mail > n

    def can_go(self) -> bool:
        """Whether it has something to do."""
        return not (self.has_ended or self.is_frozen) and (self.ready is None or self.ready())


class _Here(threading.local):
    process: Process | None = None


_here = _Here()


def here() -> Process | None:
    """Return the process that runs, None outside a simulation."""
    return _here.process


class Sim:
    """The processes over one disk."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.back = _taken()
        self.processes: list[Process] = []
        disk.watch = self._watch

    def add(self, mains: Sequence[Callable[[], object]], first: int = 0) -> list[Process]:
        """Add processes with these numbers from ``first`` on."""
        new = [Process(self, first + i, main) for i, main in enumerate(mains)]
        self.processes += new
        return new

    def _watch(self, who: int, call: str, path: str) -> None:
        process = _here.process
        if process is None:
            return
        if process.is_killed:
            raise Stopped
        if process.freeze_at is not None and self.disk.n_calls[who] >= process.freeze_at:
            process.freeze_at = None
            process.freeze()

    def run(self, among: Sequence[Process] | None = None) -> None:
        """Let these processes go on, by default all, until each has ended or is frozen."""
        chosen = self.processes if among is None else among
        while True:
            able = next((p for p in chosen if p.can_go()), None)
            if able is None:
                # Nobody can go on: the time of the first one that waits is over.
                able = next((p for p in chosen if not p.has_ended and not p.is_frozen), None)
                if able is None or any(p.is_frozen for p in chosen):
                    return
            able.go()

    def kill(self, processes: Sequence[Process] | None = None) -> None:
        """End processes where they are."""
        for process in self.processes if processes is None else processes:
            if not process.has_ended:
                process.is_killed = True
                process.go()


class SimTransport:
    """One rank's end of the mailboxes of a job; the methods are those of `mpistream.comm.Transport`."""

    def __init__(self, sim: Sim, first: int, rank: int, world: list[SimTransport]) -> None:
        self.rank = rank
        self.who = first + rank
        self.communicator = (id(sim), self.who)
        self.is_free = False
        self._sim = sim
        self.world = world
        self._mail: defaultdict[int, deque[tuple[int, bytes, Clock]]] = defaultdict(deque)
        self._gathered: deque[tuple[bytes, Clock]] = deque()
        self._arrays: defaultdict[tuple[int, int], deque[tuple[NDArray[Any], Clock]]] = defaultdict(deque)
        self._process: Process | None = None
        world.append(self)

    @property
    def size(self) -> int:
        return len(self.world)

    def _clock(self) -> Clock:
        return dict(self._sim.disk.clock(self.who))

    def _woken(self) -> None:
        if self._process is None:
            self._process = next(p for p in self._sim.processes if p.who == self.who)
        self._process.n_mail += 1

    def send(self, dest: int, tag: int, data: bytes) -> None:
        assert not self.is_free
        self.world[dest]._mail[tag].append((self.rank, bytes(data), self._clock()))
        self.world[dest]._woken()

    def poll(self, tag: int) -> tuple[int, bytes] | None:
        assert not self.is_free
        if not self._mail[tag]:
            return None
        rank, data, clock = self._mail[tag].popleft()
        self._sim.disk.learn(self.who, clock)
        return rank, data

    def gather(self, data: bytes, timeout: float) -> list[bytes] | None:
        assert not self.is_free
        self._gathered.append((bytes(data), self._clock()))
        if self.rank != 0:
            return None
        process = _here.process
        assert process is not None
        if not process.wait(lambda: all(t._gathered for t in self.world)):
            raise TimeoutError
        found = [t._gathered.popleft() for t in self.world]
        for _, clock in found:
            self._sim.disk.learn(self.who, clock)
        return [data for data, _ in found]

    def swap(self, sends: Any, receives: Any, timeout: float, tag: int, look: Callable[[], None]) -> None:
        process = _here.process
        assert process is not None
        boxes = [(peer, self.world[peer]._arrays[self.rank, tag]) for peer, _ in sends]
        for (_, box), (_, array) in zip(boxes, sends, strict=True):
            # As by MPI_Isend of a large array: it is read when the other rank takes it.
            box.append((array, self._clock()))
        for peer, array in receives:
            box = self._arrays[peer, tag]
            if not process.wait(partial(bool, box)):
                raise SwapTimeoutError([peer])
            found, clock = box.popleft()
            array[...] = found
            self._sim.disk.learn(self.who, clock)
        for peer, box in boxes:
            if not process.wait(partial(operator.not_, box)):
                raise SwapTimeoutError([peer])

    def has_ranks_of(self, other: Any) -> bool:
        return other is self

    def is_usable(self) -> bool:
        return not self.is_free

    def free(self) -> None:
        self.is_free = True


def _waiting(timeout: float) -> Iterator[None]:
    """In the place of `mpistream.comm.waiting`: until a message has come, or nobody is left who could send one."""
    process = _here.process
    if process is None:  # alone, outside a simulation
        yield
        return
    while True:
        seen = process.n_mail
        yield
        if not process.wait(partial(process.has_mail_behind, seen)):
            return


class System(SimOS):
    """The system that all processes call."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = Looks()
        self.restart(SimDisk(), 0)

    def restart(self, disk: SimDisk, generation: int) -> None:
        """Put a disk in, and let what is random be the same in each run of a job, another one in another job."""
        self.disk = disk
        self._random = itertools.count(generation << 32)

    def urandom(self, n: int) -> bytes:
        return next(self._random).to_bytes(n, "big")


def _pool_of(communicator: Hashable) -> Any:
    process = _here.process
    return pool_of(communicator) if process is None or process.pool is None else process.pool


def _one_by_one(calls: Sequence[Any], _: int) -> None:
    """In the place of `mpistream.together.run_together`: in an order that is the same in every run."""
    for call in sorted(calls, key=lambda c: c.args):
        call()


def _in_order(calls: Sequence[Any], _: int) -> None:
    for call in calls:
        call()


@contextmanager
def simulated() -> Iterator[System]:
    """Put simulated calls of the system, time and messages in the place of the real ones; give the system."""
    system = System()

    def connect(comm: Any, timeout: float) -> Any:
        return comm

    with (
        memoised(),
        mock.patch.object(local_store, "os", system),
        mock.patch.object(local_store, "shutil", system),
        mock.patch.object(local_store, "run_together", _one_by_one),
        mock.patch.object(owner, "run_together", _in_order),
        mock.patch.object(publishing, "run_together", _in_order),
        mock.patch.object(agreement, "waiting", _waiting),
        mock.patch.object(session, "connect", connect),
        mock.patch.object(session, "pool_of", _pool_of),
        mock.patch.object(parallel.StreamWriter, "_log_open", _nothing),
        mock.patch.object(parallel, "_say", _nothing),
        mock.patch.object(lease.LeaseKeeper, "start", _nothing),
        mock.patch.object(os, "urandom", system.urandom),
    ):
        try:
            yield system
        finally:
            parallel._open_writers.clear()

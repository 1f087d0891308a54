"""What goes on behind the caller's back: the threads, the memory that waits for them, and its bound.

Theory of operation
-------------------
A *job* is something to do: encode a block into a shard, write an object. Jobs whose order matters, those of one shard,
stand in one *line*; different lines may be worked on at the same time. A job that fails stops its line: it stays at
its head, with the memory that it reads, until it is tried again (`Pool.resume`) or given up (`Pool.drop`).

Small objects wait for the disk far longer than anybody computes on them. Their lines *wait*, and have threads of their
own that are begun with the first of them, more than there are cores: twenty variables are durable after about the time
of one.

Blocks wait in *loans*: memory of the pool, lent for one block of one record, that comes back when the last job which
reads it is done, and is then lent again. So a program that writes records in a steady rhythm allocates nothing.

Rules of this room:

* The writers of one communicator share a `Pool`: its threads, its memory, and one bound for the bytes on their way. So
  a program with ten streams has the memory and the threads of one.
* Who would exceed the bound waits, but only while jobs are on their way: they end without the caller's help, whatever
  happens, so a wait ends. What failed is not on its way, and neither is memory that a caller holds.
* The pool knows `Member`s, not writers: a writer that nobody closed can still go.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import ProtocolError
from mpistream.stats import WriterStats
from mpistream.together import Monitor
from mpistream.zarr3.shard import Scratch

__all__ = ["Line", "Loan", "Member", "Pool", "pool_of"]

# A sync waits and does nothing else, so these are no matter of cores: so many wait together.
_MAX_WAITERS = 8


@dataclass(slots=True, eq=False)
class Member:
    """One writer, as a pool knows it. All is guarded by the pool, but for ``has_left``."""

    n_threads: int
    max_pending_nbytes: int
    stats: WriterStats
    n_pending: int = 0
    """Jobs on their way."""
    n_running: int = 0
    lines: set[Line] = field(default_factory=set)
    """Those with jobs."""
    has_left: bool = False
    """Whether nothing more shall be done."""


@dataclass(slots=True, eq=False)
class Line:
    """Jobs that are done one after the other."""

    member: Member
    waits: bool = False
    """Whether its jobs wait for a disk and need next to nothing of a core."""
    jobs: deque[_Job] = field(default_factory=deque)
    is_on_its_way: bool = False
    """Whether it is queued, or a thread works on it."""
    is_dropped: bool = False
    error: BaseException | None = None
    """Why it stopped."""


@dataclass(slots=True, eq=False)
class Loan:
    """Pooled memory for one block of one record."""

    array: NDArray[Any]
    memory: NDArray[np.uint8]
    n_holders: int = 1
    """The caller, and the jobs that read it."""


@dataclass(slots=True, eq=False)
class _Job:
    do: Callable[[Scratch], None]
    loan: Loan | None
    nbytes: int
    """What it holds in memory beside the loan."""


class Pool:
    """The threads that work for several writers of this process, and the bytes that may wait for them.

    Number of threads and bound are the largest of theirs. The threads begin with the first writer that joins and end
    with the last.
    """

    def __init__(self) -> None:
        # A line with jobs, or None: a writer has left. Its `put` alone may be called by the garbage collector, which
        # can run in any thread, at any line, and so whatever lock is held.
        self._queue: SimpleQueue[Line | None] = SimpleQueue()
        self._waiting: SimpleQueue[Line | None] = SimpleQueue()
        # All below is guarded by _changed.
        self._changed = Monitor()
        self._pending_nbytes = 0
        self._members: list[Member] = []
        self._threads: set[threading.Thread] = set()
        # Those for lines that wait.
        self._waiters: set[threading.Thread] = set()
        # Memory that nobody borrows at present, by its size, and the bytes of all there is.
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._allocated_nbytes = 0
        _all.add(self)

    def forget_threads(self) -> None:
        """In a forked child, which has none of its parent's threads: nothing is on its way, and no lock is held."""
        self._queue, self._waiting, self._changed = SimpleQueue(), SimpleQueue(), Monitor()
        self._waiters = set()
        self._threads, self._pending_nbytes = set(), 0
        for member in self._members:
            member.n_pending = member.n_running = 0
            for line in member.lines:
                line.is_dropped = True
            member.lines.clear()

    # Members

    def join(self, member: Member) -> None:
        """Let the threads work for a writer, too."""
        with self._changed.lock:
            self._members.append(member)
            while len(self._threads) < max(m.n_threads for m in self._members):
                try:
                    self._begin(self._threads, self._queue)
                except RuntimeError:  # a limit on threads: one is enough
                    if self._threads:
                        break
                    self._members.remove(member)
                    raise

    def leave(self, member: Member) -> None:
        """Do nothing more for a writer; what is queued of it is dropped. It takes no lock."""
        member.has_left = True
        self._queue.put(None)
        self._waiting.put(None)

    def close(self, member: Member) -> None:
        """Leave, and wait for what is being done; with the last writer, for the end of the threads."""
        with self._changed.lock:
            self.leave(member)
            self._forget_left()
            ending = set() if self._members else self._threads | self._waiters
            while member.n_running or (not self._members and ending & (self._threads | self._waiters)):
                self._changed.wait()
            ended = ending - self._threads - self._waiters
        for thread in ended:
            thread.join()

    # Jobs

    def add(self, line: Line, do: Callable[[Scratch], None], *, loan: Loan | None = None, nbytes: int = 0) -> None:
        """Put a job at the end of a line.

        A thread calls it with a scratch of its own. It reads a loan, and holds so many bytes beside that, which
        `reserve` has counted.
        """
        with self._changed.lock:
            if not self._threads:
                raise ProtocolError("a writer is used in a process that was forked from its own", kind="forked")
            if line.is_dropped:
                raise ProtocolError("jobs of a shard were dropped; call rollback() on every rank", kind="dropped")
            if loan is not None:
                loan.n_holders += 1
            line.jobs.append(_Job(do, loan, nbytes))
            line.member.lines.add(line)
            if line.error is None:
                self._start(line)
                self._count(line.member, 1)

    def reserve(self, member: Member, nbytes: int) -> None:
        """Count bytes as on their way; wait while that exceeds the bound and jobs are on their way."""
        with self._changed.lock:
            bound = max((m.max_pending_nbytes for m in self._members), default=0)
            if self._must_wait(nbytes, bound):
                began = time.perf_counter()
                while self._must_wait(nbytes, bound):
                    self._changed.wait()
                member.stats.seconds["wait"] += time.perf_counter() - began
            self._pending_nbytes += nbytes

    def count(self, nbytes: int) -> None:
        """Count bytes that came to be, or went, without a wait."""
        with self._changed.lock:
            self._pending_nbytes += nbytes
            self._changed.notify_all()

    def wait(self, member: Member) -> None:
        """Wait until nothing of a writer is on its way."""
        with self._changed.lock:
            while member.n_pending > 0:
                self._changed.wait()

    def wait_for(self, line: Line, timeout: float | None = None) -> bool:
        """Wait until nothing of a line is on its way, or for so many seconds; return whether nothing is."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed.lock:
            # In a forked process there are no threads, whatever was on its way.
            while line.is_on_its_way and self._threads:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def resume(self, member: Member) -> None:
        """Try again what has failed in lines that stopped."""
        with self._changed.lock:
            for line in member.lines:
                if line.error is not None:
                    line.error = None
                    self._count(member, len(line.jobs))
                    self._start(line)

    def failure(self, member: Member) -> BaseException | None:
        """Return why a line of a writer stopped, None when none has."""
        with self._changed.lock:
            return next((line.error for line in member.lines if line.error is not None), None)

    def drop(self, member: Member) -> None:
        """Give up all jobs of a writer; wait for those that are being done."""
        with self._changed.lock:
            self._drop(member)
            while member.n_pending > 0:
                self._changed.wait()

    # Memory

    def lend(self, member: Member, blocks: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Loan]:
        """Lend memory for the blocks of a record, given as shapes and dtypes; wait for room for all of them.

        When there is no memory, nothing is lent.
        """
        sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in blocks]
        self.reserve(member, sum(sizes))
        loans: list[Loan] = []
        try:
            for (shape, dtype), nbytes in zip(blocks, sizes, strict=True):
                memory = self._memory(member, nbytes)
                loans.append(Loan(memory.view(dtype).reshape(shape), memory))
        except BaseException:
            self.count(-sum(sizes[len(loans) :]))
            self.give_back(loans)
            raise
        return loans

    def give_back(self, loans: Sequence[Loan]) -> None:
        """Say that the caller is done with what it borrowed; jobs may still read it."""
        with self._changed.lock:
            for loan in loans:
                self._let_go(loan)
            self._changed.notify_all()

    def _memory(self, member: Member, nbytes: int) -> NDArray[np.uint8]:
        with self._changed.lock:
            free = self._free.get(nbytes)
            if free:
                return free.pop()
            # Blocks of another size that are not used now make room: what is allocated stays near the bound.
            bound = max((m.max_pending_nbytes for m in self._members), default=0)
            while self._allocated_nbytes + nbytes > bound and (
                size := next((n for n, f in self._free.items() if f), 0)
            ):
                self._free[size].pop()
                self._allocated_nbytes -= size
        memory = np.empty(nbytes, np.uint8)
        with self._changed.lock:
            self._allocated_nbytes += nbytes
        member.stats.n_buffers += 1
        return memory

    def _let_go(self, loan: Loan) -> None:
        loan.n_holders -= 1
        if not loan.n_holders:
            self._pending_nbytes -= loan.memory.nbytes
            self._free.setdefault(loan.memory.nbytes, []).append(loan.memory)

    # Guarded by _changed

    @staticmethod
    def _count(member: Member, n: int) -> None:
        member.n_pending += n

    def _is_busy(self) -> bool:
        # Not counted apart: Ctrl-C between two counts would leave them different for ever.
        return any(m.n_pending > 0 for m in self._members)

    def _must_wait(self, nbytes: int, bound: int) -> bool:
        # Where nothing is held a wait frees nothing.
        return self._pending_nbytes > 0 and self._is_busy() and self._pending_nbytes + nbytes > bound

    def _start(self, line: Line) -> None:
        if not line.is_on_its_way:
            # What takes time, and Ctrl-C can end, comes first.
            queue = self._waiting if line.waits and self._has_waiters() else self._queue
            line.is_on_its_way = True
            queue.put(line)

    def _has_waiters(self) -> bool:
        if len(self._waiters) < _MAX_WAITERS:
            # Beyond the limit of a job, or while the interpreter ends: those that there are do it.
            with contextlib.suppress(RuntimeError):
                self._begin(self._waiters, self._waiting)
        return bool(self._waiters)

    def _begin(self, threads: set[threading.Thread], queue: SimpleQueue[Line | None]) -> None:
        thread = threading.Thread(target=self._run, args=(threads, queue), name="mpistream-stage", daemon=True)
        thread.start()
        threads.add(thread)

    def _release(self, job: _Job) -> None:
        if job.loan is not None:
            self._let_go(job.loan)
        self._pending_nbytes -= job.nbytes

    def _drop(self, member: Member) -> None:
        for line in member.lines:
            line.is_dropped = True
            while line.jobs:
                # Out of the line first: whoever is interrupted here must not release it twice.
                self._release(line.jobs.popleft())
        member.lines.clear()
        # Only what is being done is left, also where Ctrl-C came in the middle of `add`.
        self._count(member, member.n_running - member.n_pending)
        self._changed.notify_all()

    def _forget_left(self) -> None:
        for member in self._members:
            if member.has_left:
                self._drop(member)
        self._members = [m for m in self._members if not m.has_left]
        if not self._members:
            self._allocated_nbytes -= sum(nbytes * len(free) for nbytes, free in self._free.items())
            self._free.clear()
        self._changed.notify_all()

    # The threads

    def _run(self, threads: set[threading.Thread], queue: SimpleQueue[Line | None]) -> None:
        with self._changed.lock:
            # Ctrl-C can end `_begin` between its two lines; one that is not known would not tell the others to end.
            threads.add(threading.current_thread())
        # Narrowing a float can overflow to infinity: that is what the caller's dtype asked for.
        with np.errstate(over="ignore", invalid="ignore"):
            scratch = Scratch()
            while self._has_more(threads, queue, scratch):
                pass

    def _has_more(self, threads: set[threading.Thread], queue: SimpleQueue[Line | None], scratch: Scratch) -> bool:
        """Wait for the next line and work on it; False at the end of the thread. While it waits it holds no memory."""
        line = queue.get()
        if line is not None:
            while (job := self._next_job(line)) is not None:
                error: BaseException | None = None
                try:
                    job.do(scratch)
                except BaseException as caught:  # noqa: BLE001 (kept for the next arrive; a dead thread would hang flush)
                    error = caught.with_traceback(None)
                self._end_job(line, job, error)
                del job, error
            return True
        with self._changed.lock:
            self._forget_left()
            if self._members:
                return True
            threads.discard(threading.current_thread())
            if threads:
                queue.put(None)
            self._changed.notify_all()
            return False

    def _next_job(self, line: Line) -> _Job | None:
        with self._changed.lock:
            if line.member.has_left:
                self._drop(line.member)
            if not line.jobs or line.error is not None:
                line.is_on_its_way = False
                if not line.jobs:
                    line.member.lines.discard(line)
                self._changed.notify_all()
                return None
            line.member.n_running += 1
            return line.jobs.popleft()

    def _end_job(self, line: Line, job: _Job, error: BaseException | None) -> None:
        with self._changed.lock:
            line.member.n_running -= 1
            self._count(line.member, -1)
            if error is None or line.is_dropped:
                self._release(job)
            else:
                # What is behind it waits, too, and no longer is on its way.
                self._count(line.member, -len(line.jobs))
                line.jobs.appendleft(job)
                line.error = error
            self._changed.notify_all()


_all: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forget_threads() -> None:
    for pool in list(_all):
        pool.forget_threads()


os.register_at_fork(after_in_child=_forget_threads)

_pools: weakref.WeakValueDictionary[tuple[int, Hashable], Pool] = weakref.WeakValueDictionary()
_pools_lock = threading.Lock()


def pool_of(communicator: Hashable) -> Pool:
    """Return the pool of the writers of one communicator in this process.

    Not collective.

    Parameters
    ----------
    communicator
        What stands for it.
    """
    # A forked child has none of its parent's threads.
    key = os.getpid(), communicator
    with _pools_lock:
        pool = _pools.get(key)
        if pool is None:
            pool = _pools[key] = Pool()
        return pool

"""Lines of jobs, and the memory that is lent to them."""

from __future__ import annotations

import functools
import os
import signal
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from mpistream.errors import ProtocolError
from mpistream.pipeline import Line, Member, Pool
from mpistream.stats import WriterStats
from tests.support.stager import DEADLINE, in_time
from tests.support.wait import wait_until

U1 = np.dtype("u1")


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def member(pool: Pool) -> Iterator[Member]:
    found = Member(2, 100, WriterStats())
    pool.join(found)
    yield found
    in_time(pool.close, found)


def held(pool: Pool, line: Line, *, nbytes: int = 0) -> threading.Event:
    """Put a job into a line that waits for the event, and wait until it has begun."""
    has_begun, gate = threading.Event(), threading.Event()

    def do(_: object) -> None:
        has_begun.set()
        gate.wait(DEADLINE)

    pool.add(line, do, nbytes=nbytes)
    assert has_begun.wait(DEADLINE)
    return gate


def _append(done: list[int], i: int, _: object) -> None:
    done.append(i)


def test_jobs_of_a_line_keep_their_order_and_lines_run_side_by_side(pool: Pool, member: Member) -> None:
    """A line that is held up does not hold up another one, and overtakes itself nowhere."""
    done: list[int] = []
    first, second = Line(member), Line(member)
    gate = held(pool, first)
    for i in range(5):
        pool.add(first, functools.partial(_append, done, i))
    pool.add(second, lambda _: done.append(9))
    in_time(pool.wait_for, second)
    assert done == [9]
    gate.set()
    in_time(pool.wait, member)
    assert done == [9, 0, 1, 2, 3, 4]


def test_job_that_fails_stops_its_line_until_it_is_tried_again(pool: Pool, member: Member) -> None:
    """With the memory that it reads; nothing behind it is done before, and nobody waits for it."""
    line, done = Line(member), []
    errors = [MemoryError("no memory"), None]
    (loan,) = pool.lend(member, [((4,), U1)])
    loan.array[...] = 7

    def do(_: object) -> None:
        if (error := errors.pop(0)) is not None:
            raise error
        done.append(loan.array.tolist())

    pool.add(line, do, loan=loan)
    pool.add(line, lambda _: done.append("behind"))
    pool.give_back([loan])
    in_time(pool.wait, member)
    pool.add(line, lambda _: done.append("later"))
    in_time(pool.wait, member)
    assert isinstance(pool.failure(member), MemoryError)
    (other,) = pool.lend(member, [((4,), U1)])
    other.array[...] = 1
    assert done == []
    pool.resume(member)
    in_time(pool.wait, member)
    assert pool.failure(member) is None
    assert done == [[7, 7, 7, 7], "behind", "later"]


def test_memory_is_lent_again_and_not_allocated_anew(pool: Pool, member: Member) -> None:
    """In a steady rhythm there are as many pieces of it as wait at the same time."""
    line = Line(member)
    for _ in range(20):
        loans = pool.lend(member, [((2, 3), np.dtype("f8")), ((4,), U1)])
        assert [(loan.array.shape, loan.array.dtype) for loan in loans] == [((2, 3), np.dtype("f8")), ((4,), U1)]
        for loan in loans:
            pool.add(line, lambda _: None, loan=loan)
        pool.give_back(loans)
        in_time(pool.wait, member)
    assert member.stats.n_buffers == 2
    assert pool._pending_nbytes == 0


def test_memory_of_another_size_makes_room(pool: Pool, member: Member) -> None:
    """What is allocated and not used does not add up."""
    for nbytes in (60, 61, 62, 63):
        pool.give_back(pool.lend(member, [((nbytes,), U1)]))
    assert pool._allocated_nbytes == 63


def test_who_exceeds_the_bound_waits_until_jobs_are_done(pool: Pool, member: Member) -> None:
    """Copies and encoded bytes count together; how long it took is counted."""
    gate = held(pool, Line(member), nbytes=0)
    (loan,) = pool.lend(member, [((60,), U1)])
    pool.count(40)
    is_lent = threading.Event()

    def lend() -> None:
        pool.give_back(pool.lend(member, [((1,), U1)]))
        is_lent.set()

    threading.Thread(target=lend, daemon=True).start()
    assert not is_lent.wait(0.05)
    pool.count(-40)
    assert is_lent.wait(DEADLINE)
    pool.give_back([loan])
    gate.set()
    assert member.stats.seconds["wait"] > 0.04


def test_nobody_waits_where_nothing_is_on_its_way(pool: Pool, member: Member) -> None:
    """A record above the bound goes alone, and memory that a caller holds, or that failed, ends no wait."""
    (held_by_caller,) = pool.lend(member, [((90,), U1)])
    in_time(lambda: pool.give_back(pool.lend(member, [((500,), U1)])))
    pool.give_back([held_by_caller])


def test_dropped_jobs_are_not_done_and_give_their_memory_back(pool: Pool, member: Member) -> None:
    """What is being done is waited for; what fails then is not kept."""
    line, done = Line(member), []
    has_begun, gate = threading.Event(), threading.Event()

    def do(_: object) -> None:
        has_begun.set()
        gate.wait(DEADLINE)
        raise MemoryError("no memory")

    loans = pool.lend(member, [((4,), U1), ((4,), U1)])
    pool.add(line, do, loan=loans[0])
    pool.add(line, lambda _: done.append(1), loan=loans[1])
    pool.give_back(loans)
    assert has_begun.wait(DEADLINE)
    dropping = threading.Thread(target=pool.drop, args=[member], daemon=True)
    dropping.start()
    dropping.join(0.05)
    assert dropping.is_alive()
    gate.set()
    dropping.join(DEADLINE)
    assert not dropping.is_alive()
    assert (done, pool.failure(member), pool._pending_nbytes, member.n_pending) == ([], None, 0, 0)


def test_number_of_threads_is_the_largest_of_the_members(pool: Pool, member: Member) -> None:
    """They end with the last one."""
    more = Member(3, 10, WriterStats())
    before = set(pool._threads)
    pool.join(more)
    assert (len(before), len(pool._threads)) == (2, 3)
    in_time(pool.close, more)
    assert all(t.is_alive() for t in pool._threads)


@pytest.mark.parametrize("n_left", [0, 1])
def test_limit_on_threads(pool: Pool, monkeypatch: pytest.MonkeyPatch, n_left: int) -> None:
    """One is enough; without any the writer is not opened, and the pool is as before."""
    start, left = threading.Thread.start, [n_left]

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    found = Member(3, 10, WriterStats())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        if n_left:
            pool.join(found)
        else:
            with pytest.raises(RuntimeError):
                pool.join(found)
    assert (len(pool._threads), len(pool._members)) == (n_left, n_left)
    if n_left:
        pool.add(Line(found), lambda _: None)
        in_time(pool.wait, found)
        in_time(pool.close, found)


def test_lines_that_wait_do_so_together_whatever_the_number_of_threads(pool: Pool) -> None:
    """With one thread, and that busy: eight syncs take the time of one. Their threads end with the last writer."""
    member = Member(1, 1000, WriterStats())
    pool.join(member)
    busy = held(pool, Line(member))
    all_there = threading.Barrier(9)

    def sync(_: object) -> None:
        all_there.wait(DEADLINE)

    for _ in range(16):
        pool.add(Line(member, waits=True), sync)
    for _ in range(2):
        all_there.wait(DEADLINE)
    busy.set()
    in_time(pool.wait, member)
    assert (len(pool._threads), len(pool._waiters)) == (1, 8)
    in_time(pool.close, member)
    assert not pool._threads
    assert not pool._waiters


def test_lines_that_wait_are_worked_on_without_threads_of_their_own(
    pool: Pool, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When none can be started: the others do it."""

    def limited(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        pool.add(Line(member, waits=True), functools.partial(_append, done, 7))
    in_time(pool.wait, member)
    assert (done, pool._waiters) == ([7], set())


def test_a_forked_child_has_no_threads_and_hangs_nowhere(pool: Pool, member: Member) -> None:
    """Its parent goes on; in the child a wait ends, and writing is refused."""
    gate = held(pool, Line(member))
    with warnings.catch_warnings():
        # Python says from 3.12 on that such a child may deadlock.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        code = 1
        try:
            pool.wait(member)
            pool.add(Line(member), lambda _: None)
        except ProtocolError:
            pool.close(member)
            code = 0
        finally:
            os._exit(code)
    status: list[int] = []

    def has_ended() -> bool:
        found, code = os.waitpid(pid, os.WNOHANG)
        status.extend([code] if found else [])
        return bool(found)

    try:
        wait_until(has_ended, DEADLINE, "the child to end", every=0.01)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    assert status == [0]
    gate.set()
    in_time(pool.wait, member)

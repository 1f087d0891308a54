"""Jobs in a few threads: all of them, or the first failure, and no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from mpistream.together import run_together

each_number = pytest.mark.parametrize("n_threads", [1, 2, 5])


class BrokenJobError(Exception):
    pass


def threads() -> int:
    """The helpers that live, and the caller."""
    return 1 + sum(thread.name == "mpistream-help" for thread in threading.enumerate())


@each_number
def test_every_job_is_done_once(n_threads) -> None:
    """In any of the threads; when the call returns all is done."""
    done: list[int] = []
    run_together([lambda i=i: done.append(i) for i in range(50)], n_threads)  # type: ignore[misc]
    assert sorted(done) == list(range(50))
    assert n_threads > 1 or done == sorted(done)
    run_together([], n_threads)


def test_jobs_run_at_the_same_time() -> None:
    """Three that wait for each other come through with three threads, the calling one included."""
    meeting = threading.Barrier(3)
    names: set[str] = set()

    def meet() -> None:
        meeting.wait(30)
        names.add(threading.current_thread().name)

    run_together([meet] * 3, 3)
    assert threading.current_thread().name in names
    assert threads() == 1


@each_number
def test_the_first_failure_is_raised_and_nothing_begun_after_it(n_threads) -> None:
    """The first in the order of the jobs, whichever thread was quicker; so many as were at work end."""
    begun: list[int] = []

    def job(i: int) -> None:
        begun.append(i)
        if i in (7, 8, 20):
            raise BrokenJobError(i)

    with pytest.raises(BrokenJobError, match="7"):
        run_together([lambda i=i: job(i) for i in range(30)], n_threads)  # type: ignore[misc]
    assert len(begun) <= 7 + n_threads
    assert threads() == 1


@each_number
def test_jobs_that_are_made_on_the_way(n_threads) -> None:
    """The iterable is asked by one thread at a time; what it raises comes after what earlier jobs did."""
    asked, done = threading.Lock(), []

    def jobs(stop: int) -> Iterator[Callable[[], None]]:
        for i in range(stop):
            assert asked.acquire(blocking=False)
            asked.release()
            yield lambda i=i: done.append(i)  # type: ignore[misc]
        raise BrokenJobError("no more")

    with pytest.raises(BrokenJobError, match="no more"):
        run_together(jobs(20), n_threads)
    assert sorted(done) == list(range(20))


@pytest.mark.parametrize("n_started", [0, 1])
def test_without_helpers_the_caller_does_it(n_started, monkeypatch) -> None:
    """While the interpreter ends no thread can be started: the work is done all the same."""
    start, calls = threading.Thread.start, []

    def refuse(self: threading.Thread) -> None:
        calls.append(self)
        if len(calls) > n_started:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    run_together([lambda i=i: done.append(i) for i in range(9)], 4)  # type: ignore[misc]
    assert sorted(done) == list(range(9))

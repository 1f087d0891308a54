"""A few threads for work that waits for disks or for a codec, for the length of one call.

The calling thread takes part, so the work is done whatever becomes of the helpers: none can be started while the
interpreter ends, or beyond the limit of a job. They live as long as the call: that costs some ten microseconds, and a
process that forks has none of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

__all__ = ["Monitor", "run_together"]


def run_together(jobs: Iterable[Callable[[], object]], n_threads: int) -> None:
    """Do all jobs, each in one of some threads; return when none of them is at work any more.

    Not collective.

    Parameters
    ----------
    jobs
        They are given out in this order, one after the other; the iterable is asked by one thread at a time.
    n_threads
        At most so many, the calling one included.

    Raises
    ------
    BaseException
        What the first job that failed raised, or the iterable; no job is begun after a failure.
    """
    if n_threads <= 1:
        for job in jobs:
            job()
        return
    work = _Work(jobs)
    helpers = [threading.Thread(target=work.run, name="mpistream-help", daemon=True) for _ in range(n_threads - 1)]
    started: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):
            for helper in helpers:
                helper.start()
                started.append(helper)
        work.run()
    finally:
        work.stop()
        for helper in started:
            helper.join()
    work.raise_first()


class _Work:
    """Jobs that are given out one after the other."""

    def __init__(self, jobs: Iterable[Callable[[], object]]) -> None:
        self._lock = threading.Lock()
        # All below is guarded by _lock.
        self._jobs: Iterator[Callable[[], object]] = iter(jobs)
        self._n_given = 0
        self._is_stopped = False
        # Number of a job -> what went wrong. They are given out in order, so the first of all is among them.
        self._errors: dict[int, BaseException] = {}

    def run(self) -> None:
        while (given := self._next()) is not None:
            number, job = given
            try:
                job()
            except BaseException as error:  # noqa: BLE001 (raised by the calling thread)
                with self._lock:
                    self._fail(number, error)

    def _next(self) -> tuple[int, Callable[[], object]] | None:
        with self._lock:
            if self._is_stopped:
                return None
            try:
                job = next(self._jobs, None)
            except BaseException as error:  # noqa: BLE001 (raised by the calling thread)
                self._fail(self._n_given, error)
                return None
            self._is_stopped = job is None
            self._n_given += 1
            return None if job is None else (self._n_given - 1, job)

    def _fail(self, number: int, error: BaseException) -> None:
        self._errors[number] = error
        self._is_stopped = True

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True

    def raise_first(self) -> None:
        if self._errors:
            raise self._errors[min(self._errors)]


class Monitor:
    """What threads wait for, and the lock that guards it: held by ``with monitor.lock`` around every call, once.

    Notes
    -----
    Ctrl-C leaves both as they were. While `threading.Condition.wait` waits the lock is free, and between some of
    its lines too. A KeyboardInterrupt there comes out of a ``with`` whose lock is not held: its end then raises
    RuntimeError, "cannot release un-acquired lock", and that is what a user sees. And ``with condition`` is a call
    in Python, which Ctrl-C can end when it has the lock and the body has not begun: nobody would release it. ``with
    monitor.lock`` is neither.
    """

    __slots__ = ("_condition", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._condition = threading.Condition(self.lock)

    def notify_all(self) -> None:
        """Wake all that wait."""
        self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is notified, or for so many seconds."""
        self._held(lambda: self._condition.wait(timeout))

    def wait_for(self, is_true: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait until it is true, or for so many seconds."""
        self._held(lambda: self._condition.wait_for(is_true, timeout))

    def _held(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except BaseException:
            # Held or not: whoever is around releases it.
            with contextlib.suppress(RuntimeError):
                self.lock.release()
            self.lock.acquire()
            raise

"""A wait that Ctrl-C ends, wherever it comes."""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any

import pytest

from mpistream.together import Monitor

WAIT = threading.Condition.wait.__code__


def interrupt_at(code: CodeType, n: int) -> Any:
    """Return a trace function that raises at the n-th line of a function that is run."""
    left = n

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code is not code:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return trace


def is_free(monitor: Monitor) -> bool:
    """Return whether another thread gets the lock."""
    found = []

    def take() -> None:
        found.append(monitor.lock.acquire(timeout=5))
        if found[0]:
            monitor.lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("how", ["wait", "wait_for"])
def test_ctrl_c_at_any_line_of_a_wait_is_what_the_caller_sees(how: str) -> None:
    """And no RuntimeError of a lock that is not held; afterwards it is free for others."""
    before = sys.gettrace()
    for n in range(100):
        monitor = Monitor()
        is_interrupted = False
        sys.settrace(interrupt_at(WAIT, n))
        try:
            with monitor.lock:
                if how == "wait":
                    monitor.wait(0.001)
                else:
                    monitor.wait_for(lambda: False, 0.001)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            sys.settrace(before)
        assert is_free(monitor)
        if not is_interrupted:
            break
    assert 10 < n < 99  # it was interrupted at every line


def test_a_wait_ends_when_it_is_notified() -> None:
    monitor, is_done = Monitor(), False

    def work() -> None:
        nonlocal is_done
        with monitor.lock:
            is_done = True
            monitor.notify_all()

    thread = threading.Thread(target=work)
    with monitor.lock:
        thread.start()
        while not is_done:
            monitor.wait(60)
    thread.join()
    with monitor.lock:
        monitor.wait_for(lambda: is_done, 60)

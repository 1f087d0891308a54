"""Wait for a condition with a deadline, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout: float, what: str, *, every: float = 0.01) -> T:
    """Return the first true value of ``predicate()``.

    Parameters
    ----------
    predicate
        Called again and again until what it returns is true.
    timeout
        Seconds after which TimeoutError is raised.
    what
        What is waited for, for the error.
    every
        Seconds between two calls.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        time.sleep(every)

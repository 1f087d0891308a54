"""A lock, and a wait for what others do under it, that Ctrl-C leaves as they were.

While `threading.Condition.wait` waits the lock is free, and between some of its lines too. A KeyboardInterrupt there
comes out of a ``with`` whose lock is not held: its end then raises RuntimeError, "cannot release un-acquired lock", and
that is what a user sees. And ``with condition`` is a call in Python, which Ctrl-C can end when it has the lock and the
body has not begun: nobody would release it. ``with monitor.lock`` is neither.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

__all__ = ["Monitor"]


class Monitor:
    """What threads wait for, and the lock that guards it: held by ``with monitor.lock`` around every call, once."""

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

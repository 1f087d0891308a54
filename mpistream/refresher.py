"""The thread that refreshes what has to be refreshed while a program computes: one a process, however many writers."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from mpistream.together import Monitor

__all__ = ["Refreshable", "Refresher"]

# What another thread is just refreshing is still due.
_MIN_PAUSE = 0.01


class Refreshable(Protocol):
    """What is refreshed at a pace of its own."""

    def due_in(self) -> float | None:
        """Return the seconds until the next refresh, None when there will be none."""

    def refresh_if_due(self) -> None:
        """Refresh if it is time; never raises."""


class Refresher:
    """A thread that ends with the last of what it refreshes, and begins anew with the next.

    A refresh that hangs in one file system holds up the others: what must not rely on that refreshes itself, too.
    """

    def __init__(self) -> None:
        # Guards what follows; no refresh is made under it.
        self._changed = Monitor()
        # Weakly: what is forgotten can go.
        self._items: weakref.WeakSet[Refreshable] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def add(self, item: Refreshable) -> threading.Thread:
        """Refresh this from now on; return the thread.

        Raises
        ------
        RuntimeError
            When the system lets no thread start.
        """
        if os.getpid() != self._pid:
            # A forked child has no thread, and a lock that may be held for ever.
            self.__init__()  # type: ignore[misc]
        with self._changed.lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="mpistream-lease", daemon=True)
                thread.start()
                self._thread = thread
            self._items.add(item)
            self._changed.notify_all()
            return self._thread

    def remove(self, item: Refreshable, timeout: float) -> None:
        """Let this alone; where it was the last one, wait so long for the thread to end."""
        with self._changed.lock:
            self._items.discard(item)
            self._changed.notify_all()
            thread = self._thread
            if thread is None:
                return
            # It may hang in a file system; and it goes on when something else came meanwhile.
            self._changed.wait_for(lambda: self._thread is not thread or self._next() is not None, timeout)
            has_ended = self._thread is not thread
        if has_ended:
            thread.join(timeout)

    def _run(self) -> None:
        while self._wait():
            self._refresh()

    def _wait(self) -> bool:
        """Wait until something is due; False, and the end of the thread, when there is none."""
        # While the thread waits it holds no reference to anything.
        with self._changed.lock:
            pause = self._next()
            if pause is None:
                self._thread = None
                self._changed.notify_all()
                return False
            self._changed.wait(max(pause, _MIN_PAUSE))
            return True

    def _next(self) -> float | None:
        return min((t for item in self._items if (t := item.due_in()) is not None), default=None)

    def _refresh(self) -> None:
        with self._changed.lock:
            items = list(self._items)
        for item in items:
            item.refresh_if_due()

"""The background of a simulated process: jobs that are done when the script says so, or when somebody waits for them.

Real threads do them at any time and in any order of their lines. Which of them are done when a rank comes to a commit
is all that another process can notice of it, and that is what a job's main chooses.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from mpistream.pipeline import Line, Member, Pool
from mpistream.staged import StagedObject
from mpistream.zarr3.shard import Scratch
from tests.support.sim_ranks import here

__all__ = ["SimPool", "own_pool"]


class _Working:
    """In the place of a monitor: processes run one at a time, and whoever waits does the work."""

    def __init__(self, pool: SimPool) -> None:
        self.lock = contextlib.nullcontext()
        self._pool = pool

    def notify_all(self) -> None:
        """Nobody waits."""

    def wait(self, timeout: float | None = None) -> None:
        assert self._pool.todo, "this waits for ever"
        self._pool.work(1)


class SimPool(Pool):
    """A pool without threads."""

    def __init__(self) -> None:
        super().__init__()
        self.todo: deque[Line] = deque()
        self.is_working = False
        self._late: dict[int, str] = {}
        self._scratch = Scratch()
        changed: Any = _Working(self)
        self._changed = changed
        # As if there were one: without any a pool is that of a forked process.
        one: Any = {self}
        self._threads = one

    def join(self, member: Member) -> None:
        self._members.append(member)

    def close(self, member: Member) -> None:
        self.leave(member)
        self._forget_left()

    def add(self, line: Line, do: Callable[[Scratch], None], **more: Any) -> None:
        item = getattr(do, "args", (None,))[0]
        if isinstance(item, StagedObject):
            self._late[id(do)] = item.key
        super().add(line, do, **more)

    def _start(self, line: Line) -> None:
        if not line.is_on_its_way:
            line.is_on_its_way = True
            self.todo.append(line)

    def late(self) -> list[str]:
        """Return the keys of the objects whose jobs are not done."""
        return list(self._late.values())

    def work(self, n: int) -> None:
        """Do so many jobs, from the back if ``n`` is below 0."""
        for _ in range(abs(n)):
            if not self.todo:
                return
            line = self.todo.pop() if n < 0 else self.todo.popleft()
            self._work_on(line)

    def _work_on(self, line: Line) -> None:
        job = self._next_job(line)
        if job is None:
            return
        error: BaseException | None = None
        self.is_working = True
        try:
            job.do(self._scratch)
            self._late.pop(id(job.do), None)
        except Exception as caught:  # noqa: BLE001 - kept in the line, as a thread keeps it
            error = caught
        finally:
            self.is_working = False
        self._end_job(line, job, error)
        if line.jobs and line.error is None:
            self.todo.appendleft(line)
        else:
            self._next_job(line)


def own_pool() -> SimPool:
    """Give the writers of this process a pool of this kind; return it."""
    process = here()
    assert process is not None
    process.pool = pool = SimPool()
    return pool

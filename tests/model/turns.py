"""Ranks as threads that take turns, so that a seed gives the same run again; and their deaths.

One thread runs at a time. Whoever waits for a message lets another one go on, drawn at random from those that can;
so does, now and then, whoever is about to touch the store. When all wait for each other, time-outs end it.

A killed job stops everywhere at once: from then on every call of a store or transport raises `Killed`, so that no
clean-up of ours can do what a process that is gone does not do.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

__all__ = ["Killed", "Turns", "writers_here"]

# Seconds that one operation may take on all ranks.
_DEADLINE = 60.0

_here = threading.local()


class Killed(BaseException):
    """This rank does not exist any more."""


class Turns:
    """The ranks of one opening.

    Parameters
    ----------
    size
        How many.
    seed
        Of the order in which they run.
    """

    def __init__(self, size: int, seed: int | str) -> None:
        self.size = size
        self.is_killed = False
        self._random = random.Random(seed)
        # Invariant: only the thread whose turn it is touches what follows.
        self._mail: defaultdict[tuple[int, int], deque[tuple[int, bytes]]] = defaultdict(deque)
        self._gathered: list[deque[bytes]] = [deque() for _ in range(size)]
        self._alive: set[int] = set()
        self._idle: set[int] = set()
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._fn: Callable[[int], Any] | None = None
        self._outcomes: list[Any] = []

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        """Run ``fn(rank)`` on every rank; return what each returned or raised."""
        self._fn, self._outcomes = fn, [None] * self.size
        if self.size == 1:
            self._run_rank(0)
            _here.turns = None
            return self._outcomes
        self._alive, self._idle = set(range(self.size)), set()
        self._ended.clear()
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, args=(r,), name=f"rank-{r}", daemon=True) for r in range(self.size)
            ]
            for thread in self._threads:
                thread.start()
        self._gates[self._choose()].release()
        if not self._ended.wait(_DEADLINE):
            raise TimeoutError(f"ranks {sorted(self._alive)} did not end")
        return self._outcomes

    def _run_rank(self, rank: int) -> None:
        assert self._fn is not None
        _here.turns, _here.rank = self, rank
        try:
            self._outcomes[rank] = self._fn(rank)
        except BaseException as error:  # noqa: BLE001 (it belongs to whoever compares the ranks)
            self._outcomes[rank] = error

    def _work(self, rank: int) -> None:
        """What a rank's thread does: one call after the other, each when its turn comes."""
        while True:
            self._gates[rank].acquire()
            if self._fn is None:
                return
            self._run_rank(rank)
            self._alive.discard(rank)
            if self._alive:
                self._gates[self._choose()].release()
            else:
                self._ended.set()

    def end(self) -> None:
        """Let the processes be gone."""
        self.is_killed = True
        self._fn = None
        for gate in self._gates:
            gate.release()

    def transport(self, rank: int) -> _Transport:
        """Return one rank's end."""
        return _Transport(self, rank)

    def pause(self) -> None:
        """Maybe let another rank go on; nothing outside a rank."""
        if getattr(_here, "turns", None) is self and len(self._alive) > 1 and self._random.random() < 0.1:
            self._hand_over(_here.rank)

    def die(self) -> None:
        """End whoever calls."""
        if getattr(_here, "turns", None) is self:
            raise Killed
        # A writer's own thread only has to do nothing more; what it did not do concerns nobody.
        raise RuntimeError("killed")

    def _choose(self) -> int:
        return self._random.choice(sorted(self._alive - self._idle or self._alive))

    def _hand_over(self, rank: int) -> None:
        chosen = self._choose()
        if chosen != rank:
            self._gates[chosen].release()
            self._gates[rank].acquire()

    def _wait(self, rank: int) -> bool:
        """Let others go on until something may have come; False when all wait."""
        self._idle.add(rank)
        if self._alive <= self._idle:
            return False
        self._hand_over(rank)
        return True


class _Transport:
    """The methods are those of `mpistream.comm.Transport`."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self.rank, self.size = rank, turns.size
        self.turns = turns
        # Of this rank alone, as in a process of its own: threads must not share one here.
        self.communicator = object()
        self._is_free = False

    def _check(self) -> None:
        if self.turns.is_killed:
            raise Killed
        assert not self._is_free, f"rank {self.rank} uses its transport after free()"

    def send(self, dest: int, tag: int, data: bytes) -> None:
        self._check()
        self.turns._mail[dest, tag].append((self.rank, bytes(data)))
        self.turns._idle.discard(dest)

    def poll(self, tag: int) -> tuple[int, bytes] | None:
        box = self.turns._mail[self.rank, tag]
        self._check()
        while not box and self.turns._wait(self.rank):
            self._check()
        self.turns._idle.discard(self.rank)
        return box.popleft() if box else None

    def gather(self, data: bytes, timeout: float) -> list[bytes] | None:
        self._check()
        gathered = self.turns._gathered
        gathered[self.rank].append(bytes(data))
        self.turns._idle.discard(0)
        if self.rank:
            return None
        while not all(gathered):
            if not self.turns._wait(0):
                raise TimeoutError
            self._check()
        self.turns._idle.discard(0)
        return [queue.popleft() for queue in gathered]

    def has_ranks_of(self, other: Any) -> bool:
        return self.turns is other.turns

    def is_usable(self) -> bool:
        return not self._is_free

    def free(self) -> None:
        self._check()
        self._is_free = True


def writers_here(every: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    """Return `mpistream.parallel._all_open` as each rank sees it: its own writers, as each process does."""

    def find() -> list[Any]:
        ends = [(w, w._channel._transport) for w in every()]
        here = getattr(_here, "turns", None)
        return [w for w, end in ends if end.turns is here and end.rank == _here.rank]

    return find

"""N ranks as threads of one process, over a transport in memory.

The transport keeps to what MPI promises, and to no more: messages of one sender arrive in order; a send ends
before it is received; a gather ends on a rank that is not 0 as soon as its part is on its way, so that its
return proves nothing about the others. Only the waiting is shorter: a gather that waits for a rank which is
gone times out at once, and any rank ends with an error after the deadline of the whole run.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

from numpy.typing import NDArray

from mpistream.comm import SwapTimeoutError

__all__ = ["MemoryTransport", "MemoryWorld", "run_ranks"]

T = TypeVar("T")


class MemoryWorld:
    """The mailboxes that the transports of N ranks share.

    Parameters
    ----------
    size
        How many ranks there are.
    timeout
        Seconds from now after which whoever waits in a collective call gets TimeoutError.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.deadline = time.monotonic() + timeout
        self.changed = threading.Condition()
        # Invariant: these change under `changed` only.
        self.mail: defaultdict[tuple[int, int], deque[tuple[int, bytes]]] = defaultdict(deque)
        self.arrays: defaultdict[tuple[int, int, int], deque[NDArray[Any]]] = defaultdict(deque)
        self.gathered: list[deque[bytes]] = [deque() for _ in range(size)]
        self.maxima: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        self.has_ended = [False] * size

    def end(self, rank: int) -> None:
        """Note that a rank will send nothing more."""
        with self.changed:
            self.has_ended[rank] = True
            self.changed.notify_all()


class MemoryTransport:
    """One rank's end of a `MemoryWorld`; the methods are those of `mpistream.comm.Transport`."""

    def __init__(self, world: MemoryWorld, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.communicator = (id(world), rank)
        self.is_free = False
        self._n_maxima = 0
        self._world = world

    def send(self, dest: int, tag: int, data: bytes) -> None:
        """Put a message into the mailbox of ``dest``; never waits."""
        self._check(data)
        if not 0 <= dest < self.size:
            raise ValueError(f"rank {self.rank} sends to rank {dest} of {self.size}")
        with self._world.changed:
            self._world.mail[dest, tag].append((self.rank, bytes(data)))

    def poll(self, tag: int) -> tuple[int, bytes] | None:
        """Return the sender and the bytes of the oldest message with this tag, None if there is none."""
        self._check(b"")
        with self._world.changed:
            box = self._world.mail[self.rank, tag]
            return box.popleft() if box else None

    def gather(self, data: bytes, timeout: float) -> list[bytes] | None:
        """Return every rank's bytes on rank 0; on others return None, at once."""
        self._check(data)
        world = self._world
        deadline = min(world.deadline, time.monotonic() + timeout)
        with world.changed:
            world.gathered[self.rank].append(bytes(data))
            world.changed.notify_all()
            if self.rank != 0:
                return None
            while missing := [r for r in range(self.size) if not world.gathered[r]]:
                gone = [r for r in missing if world.has_ended[r]]
                if gone:
                    raise TimeoutError(f"rank 0 waits in gather for ranks {gone}, which have ended")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"rank 0 waits in gather for ranks {missing}")
                world.changed.wait(left)
            return [queue.popleft() for queue in world.gathered]

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int] | None]:
        """Begin to find the highest of each number; the n-th call of every rank belongs together."""
        self._check(b"")
        self._n_maxima += 1
        n, world = self._n_maxima, self._world
        with world.changed:
            world.maxima[n][self.rank] = list(values)

        def found() -> list[int] | None:
            with world.changed:
                all_of_them = list(world.maxima[n].values())
            return (
                [max(numbers) for numbers in zip(*all_of_them, strict=True)] if len(all_of_them) == self.size else None
            )

        return found

    def swap(
        self,
        sends: Sequence[tuple[int, NDArray[Any]]],
        receives: Sequence[tuple[int, NDArray[Any]]],
        timeout: float,
        tag: int,
        look: Callable[[], None],
    ) -> None:
        """Copy arrays to the mailboxes of others, and those that come into ``receives``."""
        self._check(b"")
        world = self._world
        deadline = min(world.deadline, time.monotonic() + timeout)
        with world.changed:
            for peer, array in sends:
                world.arrays[self.rank, peer, tag].append(array.copy())
            world.changed.notify_all()
            for peer, array in receives:
                while not world.arrays[peer, self.rank, tag]:
                    look()
                    left = deadline - time.monotonic()
                    if left <= 0 or world.has_ended[peer]:
                        raise SwapTimeoutError([peer])
                    world.changed.wait(min(left, 0.01))
                found = world.arrays[peer, self.rank, tag].popleft()
                assert (found.shape, found.dtype) == (array.shape, array.dtype)
                array[...] = found

    def has_ranks_of(self, other: Any) -> bool:
        """Whether the other is this rank's end of a world of as many ranks."""
        return (other.rank, other.size) == (self.rank, self.size)

    def is_usable(self) -> bool:
        """Whether `free` was not called."""
        return not self.is_free

    def free(self) -> None:
        """Give the transport back; any later call is an error."""
        self._check(b"")
        self.is_free = True

    def _check(self, data: bytes) -> None:
        if self.is_free:
            raise RuntimeError(f"rank {self.rank} uses its transport after free()")
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"rank {self.rank} sends {type(data).__name__}, not bytes")


@overload
def run_ranks(
    n: int,
    fn: Callable[[MemoryTransport], T],
    timeout: float = 60,
    *,
    return_exceptions: Literal[False] = False,
) -> list[T]: ...
@overload
def run_ranks(
    n: int, fn: Callable[[MemoryTransport], T], timeout: float = 60, *, return_exceptions: Literal[True]
) -> list[T | BaseException]: ...
def run_ranks(
    n: int, fn: Callable[[MemoryTransport], Any], timeout: float = 60, *, return_exceptions: bool = False
) -> list[Any]:
    """Run ``fn(transport)`` as ranks 0 to n - 1 and return their results in the order of ranks.

    Parameters
    ----------
    n
        How many ranks there are, each a thread.
    fn
        What each rank does.
    timeout
        Seconds that all may take together. After that TimeoutError tells where each remaining rank stands,
        and its thread is left behind as a daemon.
    return_exceptions
        Return what a rank raised in the place of its result. Otherwise one exception group carries them all,
        each with a note that names its rank.
    """
    world = MemoryWorld(n, timeout)
    outcomes: list[Any] = [None] * n
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            outcomes[rank] = fn(MemoryTransport(world, rank))
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller, whatever it is
            error.add_note(f"on rank {rank} of {n}")
            outcomes[rank] = failures[rank] = error
        finally:
            world.end(rank)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank-{r}", daemon=True) for r in range(n)]
    for thread in threads:
        thread.start()
    # A second more than the ranks have: one that waits in gather gets to say what for.
    for thread in threads:
        thread.join(max(0.0, world.deadline + 1 - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(_where_they_stand(threads, failures, timeout))
    if failures and not return_exceptions:
        ranks = sorted(failures)
        raise BaseExceptionGroup(f"ranks {ranks} of {n} failed", [failures[r] for r in ranks])
    return outcomes


def _where_they_stand(threads: list[threading.Thread], failures: dict[int, BaseException], timeout: float) -> str:
    frames = sys._current_frames()
    text = [f"after {timeout:g} s"]
    for rank, thread in enumerate(threads):
        frame = frames.get(thread.ident or 0)
        if thread.is_alive() and frame is not None:
            text.append(f"rank {rank} stands at:\n" + "".join(traceback.format_stack(frame)))
        elif rank in failures:
            text.append(f"rank {rank} failed:\n" + "".join(traceback.format_exception(failures[rank])))
        else:
            text.append(f"rank {rank} is done")
    return "\n".join(text)

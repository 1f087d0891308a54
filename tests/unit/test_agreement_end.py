"""How agreements between ranks end: a rank leaves, the last one is reached, or it failed and nothing may be left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mpistream import agreement
from mpistream.agreement import Channel
from mpistream.comm import SerialTransport
from mpistream.errors import CommitError, MPIStreamError, SchemaError
from tests.support.ranks import MemoryTransport, run_ranks


@pytest.fixture(autouse=True, params=["straight", "by leaders"])
def _ways(request, monkeypatch) -> None:
    """All of it holds for few ranks, and for so many that leaders stand between them and rank 0."""
    if request.param == "by leaders":
        monkeypatch.setattr(agreement, "_LEADERS_ABOVE", 1)


def _channels(n: int, fn: Callable[[Channel], Any], timeout: float = 10) -> list[Any]:
    return run_ranks(n, lambda transport: fn(Channel(transport, timeout)), timeout=30)


def _facts(error: MPIStreamError) -> tuple[Any, ...]:
    return type(error), error.kind, error.rank, error.errno, str(error)


def _error(call: Callable[[], object]) -> MPIStreamError:
    with pytest.raises(MPIStreamError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_rank_that_leaves_ends_the_agreement_of_the_others(bad: int) -> None:
    """Those who wait, and those who come later, get an error at once that names the rank and its exception."""
    left = threading.Event()

    def rank(channel: Channel) -> Any:
        if channel.rank == bad:
            channel.post_leave(ValueError("negative density"))
            channel.wait_left(5)
            left.set()
            return _facts(_error(lambda: channel.exchange("commit")))
        if channel.rank == 2:
            assert left.wait(10)
        began = time.monotonic()
        found = _facts(_error(lambda: channel.exchange("commit")))
        assert time.monotonic() - began < 5
        assert channel.is_usable() is False
        return found

    text = f"rank {bad} left with ValueError: negative density; nothing more is committed by this writer"
    assert _channels(4, rank, timeout=20) == [(CommitError, "left", bad, None, text)] * 4


def test_leaving_waits_no_longer_than_it_is_told() -> None:
    """A rank that leaves while rank 0 never comes is kept for the exit timeout only."""

    def rank(channel: Channel) -> float:
        if channel.rank == 0:
            return 0.3
        began = time.monotonic()
        channel.post_leave(ValueError("x"))
        channel.wait_left(0.3)
        return time.monotonic() - began

    _, waited = _channels(2, rank, timeout=20)
    assert 0.3 <= waited < 5


def test_ranks_that_all_leave_do_not_wait_for_each_other() -> None:
    """When every rank leaves by an exception of its own, each hears of rank 0's and goes."""

    def rank(channel: Channel) -> Any:
        channel.post_leave(ValueError(f"of {channel.rank}"))
        channel.wait_left(5)
        return str(channel.failure).split(";")[0]

    began = time.monotonic()
    assert _channels(4, rank) == [f"rank {r} left with ValueError: of {r}" for r in range(4)]
    assert time.monotonic() - began < 5


def test_channel_of_one_rank_needs_nobody() -> None:
    """Alone, agreements are function calls, leaving is nothing, and nothing is sent."""
    channel = Channel(SerialTransport(), 1)
    assert channel.exchange("x", payload=2, answer=lambda p: [p[0] + 1]) == 3
    assert channel.exchange("x") is None
    assert channel.gather(b"t") == [b"t"]
    channel.announce(1)
    channel.post_leave(ValueError("x"))
    channel.wait_left(1)
    assert channel.is_usable() is True
    channel.close()


def test_close_gives_the_communicator_back_once_all_have_agreed() -> None:
    """A channel frees its communicator, but not one on which a rank may still be inside a call."""

    def run(transport: MemoryTransport) -> list[bool]:
        channel = Channel(transport, 0.3)
        channel.exchange("close")
        channel.close()
        return [transport.is_free]

    assert run_ranks(3, run) == [[True]] * 3

    def dead(transport: MemoryTransport) -> list[bool]:
        channel = Channel(transport, 0.3)
        if transport.rank != 1:
            _error(lambda: channel.exchange("x"))
            channel.close()
        return [transport.is_free]

    assert run_ranks(3, dead) == [[False]] * 3


def test_failed_agreement_leaves_no_message_in_what_is_freed() -> None:
    """After an agreement that failed before all had voted, one more is reached, so that all votes are received."""
    has_failed = threading.Event()
    all_done = threading.Barrier(4)

    def run(transport: MemoryTransport) -> tuple[bool, Any, Any]:
        channel = Channel(transport, 10)
        if transport.rank == 2:
            assert has_failed.wait(10)
        failure = SchemaError("no") if transport.rank == 0 else None
        assert str(_error(lambda: channel.exchange("open", failure=failure))) == "no"
        has_failed.set()
        # What a rank has not received when it frees stays in its mailbox, where the next communicator finds it.
        channel.close_failed()
        all_done.wait(20)
        is_free, transport.is_free = transport.is_free, False
        return is_free, transport.poll(1), transport.poll(2)

    assert run_ranks(4, run) == [(True, None, None)] * 4


def test_failed_agreement_keeps_the_communicator_of_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one more agreement is not reached within a moment, nothing is freed, and nobody waits for long."""
    monkeypatch.setattr("mpistream.agreement._FAREWELL_SECONDS", 0.5)

    def run(transport: MemoryTransport) -> bool:
        channel = Channel(transport, 60)
        _error(lambda: channel.exchange("open", failure=SchemaError("no") if transport.rank == 0 else None))
        if transport.rank != 1:
            channel.close_failed()
        return transport.is_free

    began = time.monotonic()
    assert run_ranks(3, run) == [False] * 3
    assert time.monotonic() - began < 10


def test_rank_that_leaves_is_heard_in_a_later_agreement() -> None:
    """A rank that never came to an agreement that failed, and leaves then, ends the next one of the others as well."""
    has_failed = threading.Event()

    def rank(channel: Channel) -> Any:
        if channel.rank == 1:
            assert has_failed.wait(10)
            channel.post_leave(ValueError("negative density"))
            return None
        _error(lambda: channel.exchange("commit", failure=SchemaError("no") if channel.rank == 0 else None))
        if channel.rank == 0:
            has_failed.set()
        return _facts(_error(lambda: channel.exchange("rollback")))[:3]

    began = time.monotonic()
    assert _channels(3, rank, timeout=20) == [(CommitError, "left", 1), None, (CommitError, "left", 1)]
    assert time.monotonic() - began < 10

"""Agreements of many ranks: who hears whom, who is named when a leader does not come, and answers that overtake."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mpistream import agreement
from mpistream.agreement import Channel
from mpistream.errors import MPIStreamError, ProtocolError, SchemaError
from tests.support.ranks import MemoryTransport, MemoryWorld, run_ranks

ARRIVE, ANSWER = 1, 2


@pytest.fixture(autouse=True)
def _low(monkeypatch) -> None:
    """Groups of three: of 0, of 3, of 6, and of 9 with less."""
    monkeypatch.setattr(agreement, "_LEADERS_ABOVE", 9)


class Counting(MemoryTransport):
    """A transport that notes to whom it sends."""

    def __init__(self, inner: MemoryTransport) -> None:
        super().__init__(inner._world, inner.rank)
        self.sent: list[tuple[int, int]] = []

    def send(self, dest: int, tag: int, data: bytes) -> None:
        self.sent.append((dest, tag))
        super().send(dest, tag, data)


def _error(call: Callable[[], object]) -> MPIStreamError:
    with pytest.raises(MPIStreamError) as caught:
        call()
    return caught.value


def test_rank_0_talks_to_leaders_and_to_its_own_group() -> None:
    """Every rank votes to its leader; rank 0 answers once a group, and each leader its own."""

    def run(transport: MemoryTransport) -> Any:
        counting = Counting(transport)
        channel = Channel(counting, 20)
        value = channel.exchange("x", payload=channel.rank, answer=lambda p: [[r, sum(p)] for r in p])
        if channel.rank == 0:
            channel.announce("done")
            told = "done"
        else:
            told = channel.await_announcement()
        return value, told, {s for s in counting.sent if s[1] == ARRIVE}, [s for s in counting.sent if s[1] == ANSWER]

    found = run_ranks(11, run)
    assert [f[:2] for f in found] == [([r, 55], "done") for r in range(11)]
    assert [f[2] for f in found] == [set()] + [{(0 if r % 3 == 0 else r - r % 3, ARRIVE)} for r in range(1, 11)]
    assert [dest for dest, _ in found[0][3]] == [1, 2, 3, 6, 9] * 2
    for leader, members in ((3, [4, 5]), (6, [7, 8]), (9, [10])):
        assert [dest for dest, _ in found[leader][3]] == members * 2
    assert all(found[r][3] == [] for r in (1, 2, 4, 5, 7, 8, 10))


def test_up_to_the_threshold_all_is_straight() -> None:
    """Nine ranks here, a thousand otherwise."""

    def run(transport: MemoryTransport) -> Any:
        counting = Counting(transport)
        Channel(counting, 20).exchange("x")
        return [dest for dest, _ in counting.sent]

    assert run_ranks(9, run) == [list(range(1, 9)), *[[0]] * 8]


@pytest.mark.parametrize(
    ("absent", "named"), [([3], "rank 3"), ([4], "rank 4"), ([3, 4, 7], "rank 3, 7"), ([6, 9, 10], "rank 6, 9")]
)
def test_the_leader_that_does_not_come_is_named_and_not_its_group(absent: list[int], named: str) -> None:
    """Of those that wait behind it nobody knows; all that came hear of it, also they."""

    def run(transport: MemoryTransport) -> Any:
        channel = Channel(transport, 0.5)
        return None if channel.rank in absent else str(_error(lambda: channel.exchange("commit")))

    found = run_ranks(11, run)
    texts = {text for rank, text in enumerate(found) if rank not in absent}
    assert len(texts) == 1
    assert f"commit: {named} did not come within 0.5 s" in texts.pop()


def test_what_a_group_votes_is_seen_though_one_of_it_is_late() -> None:
    """A leader sends on what has come: a failure of one rank ends the agreement before another has come."""
    has_failed = threading.Event()

    def run(transport: MemoryTransport) -> Any:
        channel = Channel(transport, 20)
        if channel.rank == 4:
            assert has_failed.wait(10)
        failure = SchemaError("no") if channel.rank == 5 else None
        error = _error(lambda: channel.exchange("commit", failure=failure))
        if channel.rank == 0:
            has_failed.set()
        return type(error), error.rank, str(error)

    assert run_ranks(11, run) == [(SchemaError, 5, "no")] * 11


@pytest.mark.parametrize("bad", [3, 5])
def test_who_leaves_is_heard_at_once(bad: int) -> None:
    """A leader, or one whose leader is in no call: it says so to rank 0 itself, and rank 0 to every rank."""
    is_heard = threading.Event()

    def run(transport: MemoryTransport) -> Any:
        channel = Channel(transport, 20)
        if channel.rank == bad:
            channel.post_leave(ValueError("negative density"))
            channel.wait_left(5)
            return bad
        if channel.rank == 3:
            assert is_heard.wait(10)
        error = _error(lambda: channel.exchange("commit"))
        is_heard.set()
        return error.rank

    assert run_ranks(11, run, timeout=15) == [bad] * 11


def test_a_group_that_calls_another_writer_is_refused() -> None:
    """A leader that waits in one writer's agreement sends on what its group votes in another's."""
    worlds = [MemoryWorld(11, 30), MemoryWorld(11, 30)]

    def run(transport: MemoryTransport) -> Any:
        first, second = (Channel(MemoryTransport(world, transport.rank), 20) for world in worlds)
        called, other = (second, first) if first.rank == 5 else (first, second)
        error = _error(lambda: called.exchange("commit", others=[other]))
        return type(error), error.rank

    assert run_ranks(11, run, timeout=15) == [(ProtocolError, 5)] * 11


class Overtaking(MemoryTransport):
    """A transport on which the second message is there before the first, and a while passes between them."""

    def poll(self, tag: int) -> tuple[int, bytes] | None:
        if tag != ANSWER:
            return super().poll(tag)
        return COMING.pop(0) if COMING else None


COMING: list[tuple[int, bytes] | None] = []


def test_an_answer_that_was_overtaken_is_waited_for() -> None:
    """An error straight from rank 0 can come before the answer to an earlier agreement, which a leader hands on."""
    error = {"class": "SchemaError", "message": "no", "kind": "schema", "rank": 1, "errno": None, "cause_text": None}
    COMING[:] = [
        (0, json.dumps({"n": 1, "error": error}).encode()),
        None,
        (3, json.dumps({"n": 0, "value": "go"}).encode()),
    ]
    channel = Channel(Overtaking(MemoryWorld(11, 10), 4), 10)
    assert channel.exchange("first") == "go"
    assert str(_error(lambda: channel.exchange("second"))) == "no"

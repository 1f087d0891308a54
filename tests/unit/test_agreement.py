"""Agreements between ranks as threads: one outcome on every rank, whoever fails, differs or does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpistream import agreement
from mpistream.agreement import Channel
from mpistream.errors import CommitError, FormatError, MPIStreamError, ProtocolError, SchemaError, StoreError
from tests.support.ranks import MemoryTransport, MemoryWorld, run_ranks
from tests.support.wait import wait_until

SIZES = [1, 2, 3, 8]


@pytest.fixture(autouse=True, params=["straight", "by leaders"])
def _ways(request, monkeypatch) -> None:
    """All of it holds for few ranks, and for so many that leaders stand between them and rank 0."""
    if request.param == "by leaders":
        monkeypatch.setattr(agreement, "_LEADERS_ABOVE", 1)


def _channels(n: int, fn: Callable[[Channel], Any], timeout: float = 10) -> list[Any]:
    """Run ``fn`` on a channel per rank; return values, and MPIStreamErrors as what they say."""

    def run(transport: MemoryTransport) -> Any:
        channel = Channel(transport, timeout)
        try:
            return fn(channel)
        except MPIStreamError as error:
            return _facts(error)

    return run_ranks(n, run, timeout=30)


def _facts(error: MPIStreamError) -> tuple[Any, ...]:
    return type(error), error.kind, error.rank, error.errno, str(error)


def _error(call: Callable[[], object]) -> MPIStreamError:
    with pytest.raises(MPIStreamError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("n", SIZES)
def test_answer_gets_all_payloads_and_gives_each_rank_its_own_value(n: int) -> None:
    """Rank 0 sees the payloads in the order of ranks, and each rank gets the value made for it."""

    def rank(channel: Channel) -> Any:
        def answer(payloads: list[Any]) -> list[Any]:
            return [[r, payloads] for r in range(len(payloads))]

        return channel.exchange("x", payload={"r": channel.rank}, answer=answer if channel.rank == 0 else None)

    assert _channels(n, rank) == [[r, [{"r": i} for i in range(n)]] for r in range(n)]


@pytest.mark.parametrize("n", SIZES)
def test_many_agreements_in_a_row_keep_apart(n: int) -> None:
    """A hundred agreements, also after failed ones, give each rank its values in order."""

    def rank(channel: Channel) -> list[Any]:
        found = []
        for i in range(100):
            failure = SchemaError(f"no {i}") if i % 7 == 3 and channel.rank == i % n else None
            try:
                found.append(
                    channel.exchange(f"op {i}", failure=failure, payload=i, answer=lambda p: [sum(p) for _ in p])
                )
            except SchemaError as error:
                found.append(str(error))
        return found

    assert _channels(n, rank) == [[f"no {i}" if i % 7 == 3 else n * i for i in range(100)]] * n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("who", ["first", "last"])
def test_failure_of_one_rank_is_the_same_error_on_every_rank(n: int, who: str) -> None:
    """Class, kind, rank, errno and text of what is wrong on one rank; a rank that the error names itself is kept."""
    bad = 0 if who == "first" else n - 1
    for named in (None, 5):

        def rank(channel: Channel, named: int | None = named) -> None:
            failure = StoreError("disk full", kind="io", errno=28, rank=named) if channel.rank == bad else None
            channel.exchange("commit", failure=failure)

        assert _channels(n, rank) == [(StoreError, "io", bad if named is None else named, 28, "disk full")] * n


def test_failure_is_told_without_waiting_for_the_others() -> None:
    """Who has come learns of a failure at once, though another rank has not come; and that one, when it comes."""
    late = threading.Event()

    def rank(channel: Channel) -> tuple[Any, ...]:
        if channel.rank == 3:
            assert late.wait(10)
        found = _facts(_error(lambda: channel.exchange("x", failure=SchemaError("no") if channel.rank == 1 else None)))
        if channel.rank == 0:
            late.set()
        return found

    assert _channels(4, rank) == [(SchemaError, "schema", 1, None, "no")] * 4


@pytest.mark.parametrize("n", SIZES)
def test_what_the_answer_raises_every_rank_raises(n: int) -> None:
    """An error of ours travels as it is, without a rank that it does not name."""

    def rank(channel: Channel) -> None:
        def answer(payloads: list[Any]) -> list[Any]:
            raise FormatError("bad manifest", kind="checksum")

        channel.exchange("x", answer=answer)

    assert _channels(n, rank) == [(FormatError, "checksum", None, None, "bad manifest")] * n


@pytest.mark.parametrize("n", SIZES)
def test_foreign_exception_of_the_answer_is_named_on_every_rank(n: int) -> None:
    """Any other exception on rank 0 becomes an error of ours with its class in it."""

    def rank(channel: Channel) -> None:
        def answer(payloads: list[Any]) -> list[Any]:
            raise MemoryError("none left")

        channel.exchange("x", answer=answer)

    assert _channels(n, rank) == [(MPIStreamError, "exception", 0, None, "MemoryError: none left")] * n


def test_interrupt_of_the_answer_goes_on_and_is_told() -> None:
    """KeyboardInterrupt on rank 0 leaves rank 0 as it is, and the others hear of it."""

    def run(transport: MemoryTransport) -> Any:
        def answer(payloads: list[Any]) -> list[Any]:
            raise KeyboardInterrupt

        with pytest.raises((KeyboardInterrupt, MPIStreamError)) as caught:
            Channel(transport, 10).exchange("x", answer=answer)
        return type(caught.value), "KeyboardInterrupt" in repr(caught.value)

    assert run_ranks(3, run) == [(KeyboardInterrupt, True), (MPIStreamError, True), (MPIStreamError, True)]


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("what", ["operation", "digest"])
def test_calls_that_differ_are_a_protocol_error_on_every_rank(odd: int, what: str) -> None:
    """Another operation or other arguments on one rank name a rank that differs from rank 0, and both calls."""

    def rank(channel: Channel) -> None:
        is_odd = channel.rank == odd
        channel.exchange(
            "rollback" if is_odd and what == "operation" else "commit",
            digest="b" if is_odd and what == "digest" else "a",
        )

    found = _channels(4, rank)
    assert found == [found[0]] * 4
    cls, kind, named, _, text = found[0]
    assert (cls, kind) == (ProtocolError, "mismatch")
    assert named in ([1, 2, 3] if odd == 0 else [odd])
    assert all(part in text for part in (f"rank {named}", "rank 0", "commit"))
    assert ("rollback" if what == "operation" else "arguments") in text


def test_what_ranks_called_with_is_named() -> None:
    """By both ranks' own words, where they are words and no digest."""

    def rank(channel: Channel) -> str:
        return str(_error(lambda: channel.exchange("write_record", digest=f"record 3 at t = {channel.rank / 4}")))

    for text in _channels(2, rank):
        assert text == (
            "rank 1 called write_record with record 3 at t = 0.25, rank 0 with record 3 at t = 0.0; every rank must "
            "make the same calls with the same arguments"
        )

    def hashed(channel: Channel) -> str:
        return str(_error(lambda: channel.exchange("save", digest=f"{channel.rank}" * 64)))

    assert all("rank 1 called save with other arguments, rank 0 save;" in text for text in _channels(2, hashed))


def test_channel_goes_on_after_a_mismatch() -> None:
    """After calls that did not match, or a failure, the next agreement is as good as any."""

    def rank(channel: Channel) -> Any:
        _error(lambda: channel.exchange("a" if channel.rank else "b"))
        return channel.exchange("c", payload=channel.rank, answer=lambda p: [p] * len(p))

    assert _channels(3, rank) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(("n", "absent", "names"), [(3, [2], "rank 2"), (5, [1, 3], "rank 1, 3")])
def test_ranks_that_do_not_come_are_named_on_all_that_did(n: int, absent: list[int], names: str) -> None:
    """After the timeout every rank that came says who did not, and its channel is dead from then on."""

    def rank(channel: Channel) -> Any:
        if channel.rank in absent:
            return None
        error = _error(lambda: channel.exchange("commit"))
        assert channel.is_usable() is False
        assert _error(lambda: channel.exchange("commit")) is error
        return _facts(error)

    found = _channels(n, rank, timeout=1)
    came = [f for r, f in enumerate(found) if r not in absent]
    assert came == [came[0]] * len(came)
    assert came[0][:3] == (CommitError, "timeout", absent[0])
    assert f"{names} did not come within 1 s" in came[0][4]


def test_of_many_ranks_that_do_not_come_eight_are_named(monkeypatch) -> None:
    """The message stays short on a large machine."""
    monkeypatch.setattr(agreement, "_LEADERS_ABOVE", 1000)

    def rank(channel: Channel) -> Any:
        return str(_error(lambda: channel.exchange("commit"))) if channel.rank < 2 else None

    text = _channels(20, rank, timeout=0.3)[0]
    assert "rank 2, 3, 4, 5, 6, 7, 8, 9 and 10 more did not come" in text


def test_rank_that_comes_late_finds_the_error_at_once() -> None:
    """A rank that comes after the timeout does not wait for one of its own."""
    given_up = threading.Event()

    def rank(channel: Channel) -> Any:
        if channel.rank == 1:
            assert given_up.wait(20)
            began = time.monotonic()
            error = _error(lambda: channel.exchange("commit"))
            assert time.monotonic() - began < 0.2
            return _facts(error)[:3]
        error = _error(lambda: channel.exchange("commit"))
        if channel.rank == 0:
            given_up.set()
        return _facts(error)[:3]

    assert _channels(3, rank, timeout=0.5) == [(CommitError, "timeout", 1)] * 3


def test_rank_0_that_does_not_come_is_blamed_and_hears_of_it() -> None:
    """The others give up on rank 0; should it come later, it fails at once and does not go on without them."""
    others_gave_up = threading.Barrier(3)

    def rank(channel: Channel) -> Any:
        if channel.rank == 0:
            others_gave_up.wait(20)
            error = _error(lambda: channel.exchange("commit", answer=lambda payloads: payloads))
        else:
            error = _error(lambda: channel.exchange("commit"))
            others_gave_up.wait(20)
        return _facts(error)[:3]

    found = _channels(3, rank, timeout=0.3)
    assert found[1:] == [(CommitError, "timeout", 0)] * 2
    assert found[0][:2] == (CommitError, "timeout")


@pytest.mark.parametrize("n", SIZES)
def test_gather_brings_all_bytes_to_rank_0(n: int) -> None:
    """Rank 0 gets every rank's bytes in the order of ranks, also none at all; the others get nothing."""
    found = _channels(n, lambda c: c.gather(b"x" * c.rank))
    assert found == [[b"x" * r for r in range(n)], *[None] * (n - 1)]


def test_gather_without_one_rank_ends_the_channel_of_rank_0() -> None:
    """A token that does not come is a timeout: the channel is dead."""

    def rank(channel: Channel) -> Any:
        if channel.rank == 1:
            return None
        if channel.rank == 2:
            return channel.gather(b"")
        error = _error(lambda: channel.gather(b""))
        assert channel.failure is error
        return _facts(error)[:2]

    assert _channels(3, rank, timeout=0.3) == [(CommitError, "timeout"), None, None]


@pytest.mark.parametrize("error", [None, CommitError("no", kind="io", rank=0, errno=5), FormatError("bad")])
def test_announcement_is_what_every_rank_believes(error: MPIStreamError | None) -> None:
    """What rank 0 announces, a value or an error, is the outcome everywhere, and the channel goes on."""

    def rank(channel: Channel) -> Any:
        if channel.rank == 0:
            channel.announce({"seq": 3}, error)
            outcome: Any = {"seq": 3} if error is None else _facts(error)
        else:
            try:
                outcome = channel.await_announcement()
            except MPIStreamError as found:
                outcome = _facts(found)
        assert channel.exchange("next", answer=lambda p: [1] * len(p)) == 1
        return outcome

    assert _channels(3, rank) == [{"seq": 3} if error is None else _facts(error)] * 3


def test_announced_unknown_outcome_is_raised_as_it_is_and_ends_the_channel() -> None:
    """Its text and errno are rank 0's, and no rank uses the channel again."""
    error = CommitError("rename failed", kind="outcome_unknown", rank=0, errno=5)

    def rank(channel: Channel) -> Any:
        found: MPIStreamError = error
        if channel.rank == 0:
            channel.announce(error=error)
        else:
            found = _error(channel.await_announcement)
        assert _facts(_error(lambda: channel.exchange("next"))) == _facts(error)
        assert channel.is_usable() is False
        return _facts(found)

    assert _channels(3, rank) == [_facts(error)] * 3


def test_silence_of_rank_0_is_an_unknown_outcome() -> None:
    """A rank that is not told within the timeout does not know, says so, and its channel is dead."""

    def rank(channel: Channel) -> Any:
        if channel.rank == 0:
            return None
        error = _error(channel.await_announcement)
        assert channel.failure is error
        return _facts(error)[:3]

    assert _channels(2, rank, timeout=0.3) == [None, (CommitError, "outcome_unknown", 0)]


def test_swap_brings_arrays_in_their_order() -> None:
    """Of any strides, several between two ranks, and none elsewhere."""

    def rank(channel: Channel) -> list[list[int]]:
        source = np.arange(12).reshape(3, 4) + 100 * channel.rank
        to = (channel.rank + 1) % channel.size
        into = [np.zeros((3, 2), int), np.zeros(3, int)[::-1]]
        channel.swap([(to, source[:, ::2]), (to, source[:, 1])], [((channel.rank - 1) % channel.size, a) for a in into])
        return [into[0].ravel().tolist(), into[1].tolist()]

    base = [[0, 2, 4, 6, 8, 10], [1, 5, 9]]
    assert _channels(3, rank) == [[[n + 100 * r for n in part] for part in base] for r in (2, 0, 1)]


def test_swap_with_a_rank_that_does_not_come_ends_the_channel() -> None:
    """After the timeout, with an error that says so; whoever tries again gets the same one."""

    def rank(channel: Channel) -> Any:
        if channel.rank == 1:
            return None
        calls: list[Callable[[], object]] = [
            lambda: channel.swap([], [(1, np.zeros(2))]),
            lambda: channel.exchange("x"),
        ]
        found = [_error(call) for call in calls]
        assert found[0] is found[1] is channel.failure
        return _facts(found[0])

    found = _channels(2, rank, timeout=0.2)
    assert found[0][:3] == (CommitError, "timeout", 1)
    assert "rank 0: not all pieces of a record to or from rank 1 went and came within 0.2 s" in found[0][4]


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_who_waits_in_a_swap_hears_that_a_rank_has_left(leaver: int) -> None:
    """At once, whichever rank it is and whether or not its own pieces come from there; the channel is dead."""

    def rank(channel: Channel) -> Any:
        if channel.rank == leaver:
            channel.post_leave(KeyboardInterrupt("enough"))
            # So that it has not ended when the others look.
            channel.wait_left(10)
            return None
        other = 3 - leaver - channel.rank
        error = _error(lambda: channel.swap([], [(other, np.zeros(2))]))
        assert channel.failure is error
        return _facts(error)

    began = time.monotonic()
    found = _channels(3, rank)
    assert time.monotonic() - began < 8
    expected = (CommitError, "left", leaver)
    assert [f and f[:3] for f in found] == [None if r == leaver else expected for r in range(3)]
    assert all("KeyboardInterrupt: enough" in f[4] for f in found if f)


def test_what_comes_while_pieces_move_is_kept_for_its_turn() -> None:
    """Votes on rank 0, an answer on another rank: an error of the next agreement does not end the swap before it."""
    channels: dict[int, Channel] = {}
    has_come = threading.Barrier(3)

    def rank(channel: Channel) -> Any:
        channels[channel.rank] = channel
        has_come.wait(10)
        into = np.zeros(2)
        if channel.rank == 0:
            # The other ranks are in a swap while this one fails in the next agreement.
            error = _error(lambda: channel.exchange("next", failure=StoreError("no space", kind="io", errno=28)))
        elif channel.rank == 1:
            channel.swap([], [(2, into)])
            error = _error(lambda: channel.exchange("next"))
        else:
            wait_until(lambda: channels[1]._answers, 10, "the answer at rank 1")
            channel.swap([(1, np.array([3.0, 4.0]))], [])
            error = _error(lambda: channel.exchange("next"))
        # A vote that comes while rank 0 waits for a piece counts in the agreement that follows.
        if channel.rank == 0:
            channel.swap([], [(2, into)])
            values = channel.exchange("last", answer=lambda payloads: [payloads] * 3)
        elif channel.rank == 1:
            values = channel.exchange("last", payload="early")
        else:
            wait_until(lambda: any(v["operation"] == "last" for v in channels[0]._seen), 10, "the vote at rank 0")
            channel.swap([(0, np.array([5.0, 6.0]))], [])
            values = channel.exchange("last")
        return (*_facts(error)[:2], into.tolist(), values)

    assert _channels(3, rank) == [
        (StoreError, "io", [5.0, 6.0], [None, "early", None]),
        (StoreError, "io", [3.0, 4.0], [None, "early", None]),
        (StoreError, "io", [0.0, 0.0], [None, "early", None]),
    ]


# ---- several channels --------------------------------------------------------------------------------


def _pairs(n: int, fn: Callable[[Channel, Channel], Any], timeout: float = 10) -> list[Any]:
    """Run ``fn`` on two channels per rank."""
    second = MemoryWorld(n, 30)

    def run(transport: MemoryTransport) -> Any:
        return fn(Channel(transport, timeout), Channel(MemoryTransport(second, transport.rank), timeout))

    return run_ranks(n, run, timeout=30)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_rank_that_votes_in_another_channel_ends_both_agreements(odd: int) -> None:
    """Neither would ever end: all ranks get the same error at once, and later agreements are in step."""

    def rank(a: Channel, b: Channel) -> Any:
        mine, other = (b, a) if a.rank == odd else (a, b)
        name = "rollback" if a.rank == odd else "commit"
        began = time.monotonic()
        error = _error(lambda: mine.exchange(name, others=[other]))
        assert time.monotonic() - began < 5
        # What rank 0 said to the ranks that did not come.
        if a.rank and other is not a:
            assert _facts(_error(lambda: other.exchange("commit"))) == _facts(error)
        elif a.rank:
            assert _facts(_error(lambda: other.exchange("rollback"))) == _facts(error)
        return _facts(error), a.exchange("x"), b.exchange("y")

    found = _pairs(3, rank)
    assert [f[1:] for f in found] == [(None, None)] * 3
    kinds = {f[0][:2] for f in found}
    assert kinds == {(ProtocolError, "mismatch")}
    bad = 1 if odd == 0 else odd
    assert {f[0][2] for f in found} == {bad}
    calls = ("commit", "rollback") if odd == 0 else ("rollback", "commit")
    assert all(f"rank {bad} called {calls[0]} of another writer, rank 0 {calls[1]};" in f[0][4] for f in found)


def test_vote_that_another_channel_saw_is_not_lost() -> None:
    """A vote of a rank that has come here, too, or an old one, is none of another channel's business."""

    def rank(a: Channel, b: Channel) -> Any:
        if a.rank == 0:
            # Rank 1 has left b with a vote for an agreement that is over.
            b._n = 1
            found = a.exchange("x", payload=0, answer=lambda votes: [votes] * 2, others=[b])
            return found, b.exchange("y", payload=0, answer=lambda votes: [votes] * 2, others=[a])
        b._send_vote(0, "old")
        b._n = 1
        time.sleep(0.05)
        return a.exchange("x", payload=1), b.exchange("y", payload=1)

    assert _pairs(2, rank) == [([0, 1], [0, 1])] * 2


def test_rank_that_leaves_is_told_by_its_own_vote() -> None:
    """What it says on every channel is no call of another writer."""

    def rank(a: Channel, b: Channel) -> Any:
        if a.rank == 1:
            # On the other channel first.
            b.post_leave(ValueError("negative density"))
            time.sleep(0.05)
            a.post_leave(ValueError("negative density"))
            return None
        return [_error(lambda: a.exchange("commit", others=[b])).kind, _error(lambda: b.exchange("commit")).kind]

    assert _pairs(2, rank)[0] == ["left", "left"]


def test_channels_of_the_same_ranks() -> None:
    """By what their transports say."""
    assert all(_pairs(3, lambda a, b: a.has_ranks_of(b)))

"""Messages over a duplicate of the user's communicator: in order, never mixed with the user's, never without an end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mpistream.comm import MPITransport, SwapTimeoutError, connect
from mpistream.errors import ProtocolError
from tests.support.collective import sync
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

TAG = 1


def _receive(transport: MPITransport, tag: int, n: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []

    def all_there() -> bool:
        while (message := transport.poll(tag)) is not None:
            found.append(message)
        return len(found) >= n

    wait_until(all_there, 20, f"{n} messages")
    return found


@pytest.fixture
def transport(comm: MPI.Intracomm) -> MPITransport:
    return MPITransport(comm, 20)


def test_ranks_and_size_are_the_communicator_s(comm: MPI.Intracomm, transport: MPITransport) -> None:
    """A transport has the ranks of what it was made of, and is usable until MPI ends."""
    assert (transport.rank, transport.size, transport.is_usable()) == (comm.rank, comm.size, True)
    transport.free()


def test_messages_of_one_sender_arrive_in_order_with_their_sender(transport: MPITransport) -> None:
    """Each rank sends rank 0 messages of growing size, empty ones and large ones as well."""
    sizes = [0, 1, 100, 10_000, 300_000]
    for n in sizes:
        transport.send(0, TAG, bytes([transport.rank]) * n)
    if transport.rank == 0:
        found = _receive(transport, TAG, len(sizes) * transport.size)
        for rank in range(transport.size):
            assert [data for source, data in found if source == rank] == [bytes([rank]) * n for n in sizes]
        for rank in range(transport.size):
            transport.send(rank, TAG + 1, b"all there")
    assert _receive(transport, TAG + 1, 1) == [(0, b"all there")]
    assert transport.poll(TAG) is None
    transport.free()


def test_messages_are_apart_from_the_user_s_and_from_another_transport_s(
    comm: MPI.Intracomm, transport: MPITransport
) -> None:
    """What the program sends on its communicator with any tag, or another writer on its own, is not received."""
    other = MPITransport(comm, 20)
    requests = [comm.isend("mine", dest=0, tag=TAG)]
    other.send(0, TAG, b"other")
    sync(comm)
    if comm.rank == 0:
        for _ in range(100):
            assert transport.poll(TAG) is None
        assert sorted(_receive(other, TAG, comm.size)) == [(r, b"other") for r in range(comm.size)]
        assert [comm.recv(source=r, tag=TAG) for r in range(comm.size)] == ["mine"] * comm.size
    for request in requests:
        request.wait()
    sync(comm)
    other.free()
    transport.free()


@pytest.mark.parametrize("scale", [0, 1, 50_000])
def test_gather_brings_bytes_of_any_length_to_rank_0(transport: MPITransport, scale: int) -> None:
    """Ranks give as many bytes as they like, none included."""
    mine = bytes([transport.rank + 1]) * (transport.rank * scale)
    expected = [bytes([r + 1]) * (r * scale) for r in range(transport.size)]
    assert transport.gather(mine, 20) == (expected if transport.rank == 0 else None)
    transport.free()


@pytest.mark.mpi(min_size=2)
def test_gather_ends_when_a_rank_does_not_come(comm: MPI.Intracomm, transport: MPITransport) -> None:
    """Rank 0 gives up on a rank that is missing after the time it was given."""
    if comm.rank == 0:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            transport.gather(b"0", 0.5)
        assert time.monotonic() - began < 10
    sync(comm)
    if comm.rank != 0:
        # So that every rank has made the same calls, and MPI can end.
        transport.gather(b"x", 20)


def _forms(rank: int) -> list[np.ndarray[Any, Any]]:
    """Arrays of all kinds of strides and items, with values of the rank's own."""
    base = np.arange(240.0).reshape(4, 5, 12) + 1000 * rank
    return [
        base.copy(),
        np.asfortranarray(base[1:]),
        base[::2, 1:, ::3],
        base[::-1, :, ::-1],
        base.T,
        np.broadcast_to(base[0, 0], (3, 12)),
        base[0, 0, 0:1],
        np.array(base[1, 2, 3]),
        base[:, :0],
        base.astype(">f4")[:, 2],
        (base % 2 == 0)[1, :, 1:],
        (base * (1 + 2j)).astype("complex64")[:, :, 3],
        base.view([("a", "i2"), ("b", "f4"), ("c", "i2")])["b"],
    ]


def _place_for(form: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Zeros of the same shape, which lie apart from each other."""
    spaced = np.zeros([2 * n for n in form.shape], form.dtype)
    found: np.ndarray[Any, Any] = spaced[(slice(None, None, 2),) * form.ndim] if form.ndim else spaced
    return found


def _nothing() -> None:
    """Nobody leaves."""


def test_swap_brings_arrays_of_any_strides(transport: MPITransport) -> None:
    """From one array into another that lies otherwise, in the order of each pair of ranks; with oneself, too."""
    size, rank = transport.size, transport.rank
    sends = [(peer, form) for peer in sorted({rank, (rank + 1) % size, (rank + 2) % size}) for form in _forms(rank)]
    sources = sorted({rank, (rank - 1) % size, (rank - 2) % size})
    expected = [(source, form) for source in sources for form in _forms(source)]
    places = [_place_for(form) for _, form in expected]
    transport.swap(
        sends, [(source, place) for (source, _), place in zip(expected, places, strict=True)], 20, 0, _nothing
    )
    for place, (_, form) in zip(places, expected, strict=True):
        np.testing.assert_array_equal(place, form)
        # Nothing was written between the cells.
        if place.ndim and place.size:
            assert place.base is not None
            assert np.count_nonzero(place.base) == np.count_nonzero(form)
    transport.gather(b"", 20)
    transport.free()


def test_swap_of_nothing_returns(transport: MPITransport) -> None:
    """A rank without a part in an exchange waits for nobody."""
    transport.swap([], [], 0.0, 0, _nothing)
    transport.gather(b"", 20)
    transport.free()


@pytest.mark.mpi(min_size=2)
def test_swap_ends_when_a_rank_does_not_come(comm: MPI.Intracomm, transport: MPITransport) -> None:
    """Whoever waits for a piece gives up after the time it was given."""
    if comm.rank == 0:
        began = time.monotonic()
        looks: list[float] = []
        with pytest.raises(SwapTimeoutError, match="arrays to or from rank 1 did not go or come") as caught:
            transport.swap([], [(1, np.zeros(3))], 0.5, 0, lambda: looks.append(time.monotonic()))
        assert caught.value.ranks == (1,)
        # Now and then all the time, not once a round of the loop.
        assert 5 < len(looks) < 260
        assert 0.5 <= time.monotonic() - began < 10
    sync(comm)
    if comm.rank == 1:
        # So that MPI can end: the message that rank 0 still waits for.
        transport.swap([(0, np.ones(3))], [], 20, 0, _nothing)


@pytest.mark.mpi(min_size=2)
def test_constructor_ends_when_a_rank_does_not_come(comm: MPI.Intracomm) -> None:
    """A duplicate that some ranks don't make is an error after the timeout, which names the rank that waited."""
    team = comm.Dup()
    if comm.rank:
        with pytest.raises(ProtocolError, match=f"rank {comm.rank}") as caught:
            MPITransport(team, 0.5)
        assert caught.value.kind == "timeout"
    sync(comm)


def test_connect_takes_communicators_and_fortran_handles(comm: MPI.Intracomm) -> None:
    """connect gives the transport of a communicator or of its integer handle."""
    for given in (comm, comm.py2f()):
        transport = connect(given, 20)
        assert (type(transport), transport.rank, transport.size) == (MPITransport, comm.rank, comm.size)
        transport.free()


def test_many_transports_come_and_go(comm: MPI.Intracomm) -> None:
    """More communicators, one after the other, than MPICH has at one time (2,048): none may be left."""
    pair = comm.Split(comm.rank // 2, comm.rank)
    for _ in range(2100):
        MPITransport(pair, 20).free()


def test_messages_that_have_not_left_keep_the_communicator(transport: MPITransport) -> None:
    """free with a large message that nobody has received yet neither hangs nor loses it."""
    if transport.size > 1 and transport.rank == 1:
        transport.send(0, TAG, b"x" * 3_000_000)
        transport.free()
        transport.poll(TAG)
    elif transport.size > 1 and transport.rank == 0:
        assert _receive(transport, TAG, 1) == [(1, b"x" * 3_000_000)]
    transport.gather(b"", 20)

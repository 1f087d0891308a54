"""Objects on their way: staged at once or in the background, and kept in memory while that fails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpistream.errors import StoreError
from mpistream.manifest import stage_folder
from mpistream.pipeline import Pool, pool_of
from mpistream.staging import Stager
from tests.support.scripted_store import ScriptedStore
from tests.support.stager import DEADLINE, EPOCH, FOLDER, in_time, item, new_store, no_space, stagers
from tests.support.wait import wait_until

FOLDER_2 = stage_folder(EPOCH, 2)

both = pytest.mark.parametrize("threads", [0, 1])


@pytest.fixture
def store() -> ScriptedStore:
    found = new_store()
    found.make_folder(FOLDER_2)
    return found


@pytest.fixture
def make(store) -> Iterator[Any]:
    with stagers(store) as found:
        yield found


# ---- stage -------------------------------------------------------------------------------------------


@both
def test_an_object_is_staged_and_its_memory_released(store, make, threads) -> None:
    """Whole, under a new name in the stage folder; its end is kept to know it again."""
    stager = make(threads)
    first, second = item("t/c/0", b"a" * 100, b"b" * 100), item("t/c/1", b"cd", must_sync=True)
    stager.submit(first)
    stager.submit(second)
    stager.wait()
    assert first.staged_key is not None
    assert second.staged_key is not None
    assert store.read(first.staged_key) == b"a" * 100 + b"b" * 100
    assert store.read(second.staged_key) == b"cd"
    assert [key.rpartition("/")[0] for key in (first.staged_key, second.staged_key)] == [FOLDER] * 2
    # The small one that is synced may be done by another thread.
    assert set(store.keys("stage")) == {(first.staged_key, False), (second.staged_key, True)}
    assert (first.pieces, first.error, first.tail, first.is_placed) == (None, None, b"b" * 64, False)
    assert second.tail == b"cd"
    assert store.list("t") == []


@pytest.mark.parametrize("piece", [np.arange(3, dtype="u1"), memoryview(b"\0\1\2"), bytearray(b"\0\1\2")], ids=type)
def test_pieces_are_buffers(store, make, piece) -> None:
    """Whatever an encoder gives."""
    found = item("t/c/0", b"x")
    found.pieces = [b"x", piece]
    make().submit(found)
    assert store.read(found.staged_key) == b"x\0\1\2"
    assert found.tail == b"\0\1\2"


@both
@pytest.mark.parametrize(
    "error", [no_space(), MemoryError("no memory"), ValueError("odd")], ids=lambda e: type(e).__name__
)
def test_a_failure_is_kept_and_tried_again(store, make, threads, error) -> None:
    """submit raises nothing; the object stays in memory, and the next try writes a new file."""
    stager = make(threads)
    found = item()
    store.fail("stage", error)
    stager.submit(found)
    stager.wait()
    assert (found.error, found.staged_key) == (error, None)
    assert found.pieces
    stager.retry([found])
    assert found.error is None
    assert not found.pieces
    keys = [key for key, _ in store.keys("stage")]
    assert len(set(keys)) == 2
    assert keys[1] == found.staged_key
    assert store.read(found.staged_key) == b"head tail"


@both
def test_the_first_failure_that_remains_is_raised(store, make, threads) -> None:
    """What could be staged is, the others are tried again by the next call."""
    stager = make(threads)
    items = [item(f"t/c/{i}") for i in range(3)]
    first, second = no_space(), no_space()
    store.fail("stage", first, None, second)
    for each in items:
        stager.submit(each)
    again = no_space()
    stager.wait()
    store.fail("stage", again, None)
    with pytest.raises(StoreError) as caught:
        stager.retry(items)
    assert caught.value is again
    assert [i.staged_key is None for i in items] == [True, False, False]
    stager.retry(items)
    assert all(i.staged_key is not None for i in items)


def test_what_is_placed_is_not_staged_again(store, make) -> None:
    """retry looks at all objects of a commit."""
    stager = make()
    found = item()
    stager.submit(found)
    stager.place([found], sync=False)
    found.staged_key = None
    stager.retry([found])
    assert len(store.keys("stage")) == 1


# ---- in the background -------------------------------------------------------------------------------


def test_the_caller_goes_on_while_the_thread_writes(store, make) -> None:
    """Up to the bound nothing waits for the disk."""
    stager = make(1, max_pending_nbytes=18)
    store.gate.clear()
    items = [item("t/c/0"), item("t/c/1")]
    for each in items:
        in_time(stager.submit, each)
    assert store.keys("stage") == []
    store.gate.set()
    in_time(stager.wait)
    assert all(i.staged_key is not None for i in items)


@pytest.mark.parametrize("bound", [17, 9, 1])
def test_more_than_the_bound_waits(store, make, bound) -> None:
    """The caller is held up until enough is on disk; an object above the bound goes alone."""
    stager = make(1, max_pending_nbytes=bound)
    store.gate.clear()
    in_time(stager.submit, item("t/c/0"))
    is_submitted = threading.Event()

    def submit() -> None:
        stager.submit(item("t/c/1"))
        is_submitted.set()

    threading.Thread(target=submit, daemon=True).start()
    wait_until(lambda: store.n_held, DEADLINE, "the first object to be taken up", every=0.001)
    assert not is_submitted.wait(0.05)
    store.gate.set()
    assert is_submitted.wait(DEADLINE)
    in_time(stager.wait)
    assert len(store.keys("stage")) == 2


def test_wait_waits_for_what_is_in_flight(store, make) -> None:
    """An empty queue is not enough."""
    stager = make(1)
    store.gate.clear()
    found = item()
    stager.submit(found)
    wait_until(lambda: store.n_held, DEADLINE, "the object to be taken up", every=0.001)
    waiting = threading.Thread(target=stager.wait, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    store.gate.set()
    waiting.join(DEADLINE)
    assert not waiting.is_alive()
    assert found.staged_key is not None


def test_a_stager_that_nobody_closed_takes_its_thread_along(store) -> None:
    """A writer that is lost holds no thread for the rest of the process."""
    stager = Stager(store, FOLDER, EPOCH, threads=1, max_pending_nbytes=100)
    found = item()
    stager.submit(found)
    stager.wait()
    (writing,) = (t for t in threading.enumerate() if t.name == "mpistream-stage")
    del stager
    gc.collect()
    writing.join(DEADLINE)
    assert not writing.is_alive()
    assert found.staged_key is not None


def test_close_ends_the_thread_and_drops_the_queue(store, make) -> None:
    """What is being written is finished, what waits is not begun; closing twice is nothing."""
    stager = make(1)
    store.gate.clear()
    items = [item(f"t/c/{i}") for i in range(3)]
    for each in items:
        stager.submit(each)
    wait_until(lambda: store.n_held, DEADLINE, "the first object to be taken up", every=0.001)
    (writing,) = (t for t in threading.enumerate() if t.name == "mpistream-stage")
    closing = threading.Thread(target=stager.close, daemon=True)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    store.gate.set()
    closing.join(DEADLINE)
    assert not closing.is_alive()
    assert [i.staged_key is not None for i in items] == [True, False, False]
    assert not writing.is_alive()
    assert "mpistream-stage" not in {t.name for t in threading.enumerate()}
    stager.close()
    in_time(stager.wait)


# ---- several writers ---------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Pool:
    return Pool()


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "mpistream-stage"]


def test_stagers_of_a_pool_share_one_thread(store, pool) -> None:
    """It begins with the first and ends with the last; then it can begin again."""
    for _ in range(2):
        made = [Stager(store, FOLDER, EPOCH, threads=1, max_pending_nbytes=9, pool=pool) for _ in range(3)]
        (writing,) = threads()
        items = [item(f"t/c/{i}") for i in range(3)]
        for stager, each in zip(made, items, strict=True):
            in_time(stager.submit, each)
        for stager in made:
            in_time(stager.wait)
        assert all(i.error is None or i.staged_key is None for i in items)
        for stager in made:
            assert writing.is_alive()
            in_time(stager.close)
        assert not writing.is_alive()
        store.delete_tree(FOLDER)
        store.make_folder(FOLDER)


def test_bound_is_that_of_all_together(store, pool) -> None:
    """Bytes of one writer hold up the other; the largest bound counts."""
    first = Stager(store, FOLDER, EPOCH, threads=1, max_pending_nbytes=1, pool=pool)
    second = Stager(store, FOLDER_2, EPOCH, threads=1, max_pending_nbytes=18, pool=pool)
    store.gate.clear()
    in_time(first.submit, item("t/c/0"))
    in_time(second.submit, item("t/c/1"))
    is_submitted = threading.Event()

    def submit() -> None:
        first.submit(item("t/c/2"))
        is_submitted.set()

    threading.Thread(target=submit, daemon=True).start()
    assert not is_submitted.wait(0.05)
    store.gate.set()
    assert is_submitted.wait(DEADLINE)
    in_time(first.close)
    in_time(second.close)


def test_one_of_a_pool_waits_for_its_own_only(store, pool) -> None:
    """What another writer has on its way is no reason to wait; what a closed one had is dropped."""
    first = Stager(store, FOLDER, EPOCH, threads=1, max_pending_nbytes=100, pool=pool)
    second = Stager(store, FOLDER_2, EPOCH, threads=1, max_pending_nbytes=100, pool=pool)
    store.gate.clear()
    mine, others = item("t/c/0"), [item("t/c/1"), item("t/c/2")]
    first.submit(mine)
    wait_until(lambda: store.n_held, DEADLINE, "the first object to be taken up", every=0.001)
    for each in others:
        second.submit(each)
    in_time(second.close)
    store.gate.set()
    in_time(first.wait)
    assert [i.staged_key is not None for i in (mine, *others)] == [True, False, False]
    in_time(first.close)
    assert threads() == []


def test_writer_that_is_lost_takes_no_lock(store, pool) -> None:
    """The garbage collector may find it in any thread, also in one that the holder of the lock waits for."""
    made = [Stager(store, FOLDER, EPOCH, threads=1, max_pending_nbytes=100, pool=pool)]
    (writing,) = threads()
    with pool._changed.lock:
        in_time(made.clear)
    writing.join(DEADLINE)
    assert not writing.is_alive()


def test_pool_of_a_communicator() -> None:
    """The same as long as a writer has it, another one for another communicator."""
    pool = pool_of(("a communicator", 1))
    assert pool_of(("a communicator", 1)) is pool
    assert pool_of(("a communicator", 2)) is not pool


def test_a_failure_of_the_background_outlives_an_object_staged_meanwhile(store, make) -> None:
    """One that is told as its own error is forgotten; one that nobody was told of is not."""
    stager = make(1)
    store.fail("stage", no_space())
    stager.submit(item("t/c/0", b"a"))
    wait_until(lambda: stager.failure is not None, DEADLINE, "the failure")
    known = stager.failure
    stager.stage([item("t/c/1", b"b")])
    store.fail("stage", MemoryError("no memory"))
    with pytest.raises(MemoryError):
        stager.stage([item("t/c/2", b"c")])
    assert stager.failure is known

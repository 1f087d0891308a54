"""Objects on their way: what a missing stage folder means, renames to their keys, and what is taken back."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mpistream.errors import FencedError, StoreError
from mpistream.fence import fenced, highest_epoch
from mpistream.manifest import epoch_key
from tests.support.scripted_store import ScriptedStore
from tests.support.stager import DEADLINE, EPOCH, FOLDER, gone, in_time, item, new_store, no_space, staged, stagers

both = pytest.mark.parametrize("threads", [0, 1])


@pytest.fixture
def store() -> ScriptedStore:
    return new_store()


@pytest.fixture
def make(store) -> Iterator[Any]:
    with stagers(store) as found:
        yield found


# ---- fenced ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [([], None), (["3"], 3), (["2", "10", "9"], 10), (["x", "07", "1.partial"], None), (["1", "zz"], 1)],
)
def test_the_highest_epoch(names, expected) -> None:
    """Of all that were ever claimed, as numbers; other names claim nothing."""
    store = ScriptedStore()
    store.make_folder(".mpistream/epochs")
    for name in names:
        store.create(f".mpistream/epochs/{name}", b"")
    assert highest_epoch(store) == expected
    assert highest_epoch(ScriptedStore()) is None


@both
def test_a_writer_whose_stage_folder_is_gone_was_fenced(store, make, threads) -> None:
    """With a higher epoch in the store: the error names both."""
    stager = make(threads)
    store.create(epoch_key(6), b"")
    store.delete_tree(FOLDER)
    found = item()
    stager.submit(found)
    stager.wait()
    assert type(found.error) is FencedError
    assert str(found.error) == (
        "memory: epoch 6 took the store over from epoch 4; this writer must stop, what it has not committed is lost"
    )
    with pytest.raises(FencedError):
        stager.retry([found])


@both
def test_a_stage_folder_that_is_gone_without_a_successor_is_a_failure(store, make, threads) -> None:
    """Somebody deleted it: the store's error stands."""
    stager = make(threads)
    store.delete_tree(FOLDER)
    found = item()
    stager.submit(found)
    stager.wait()
    assert isinstance(found.error, StoreError)
    assert found.error.kind == "gone"


@both
def test_a_failure_to_find_out_leaves_the_first_error(store, make, threads) -> None:
    """The thread lives on, wait returns, and the next object is staged."""
    stager = make(threads)
    first, second, error = item("t/c/0"), item("t/c/1"), gone()
    store.fail("stage", error)
    store.fail("list", StoreError("list: input/output error", kind="io", errno=errno.EIO))
    stager.submit(first)
    stager.submit(second)
    in_time(stager.wait)
    assert first.error is error
    assert second.staged_key is not None


@pytest.mark.parametrize(
    ("error", "highest", "is_fenced"),
    [(gone(), 5, True), (gone(), 4, False), (gone(), 3, False), (no_space(), 5, False)],
)
def test_what_a_failure_means_to_a_writer(error, highest, is_fenced) -> None:
    """Fenced is who finds his folder gone and a higher epoch in the store; otherwise the failure is itself."""
    store = ScriptedStore()
    store.make_folder(".mpistream/epochs")
    store.create(epoch_key(highest), b"")
    found = fenced(store, EPOCH, error)
    assert type(found) is (FencedError if is_fenced else StoreError)
    assert is_fenced or found is error


# ---- remove ------------------------------------------------------------------------------------------


def test_objects_and_folders_are_removed_by_way_of_the_stage_folder(store, make) -> None:
    """Nothing of them is left; what is not there is no failure."""
    stager = make()
    for key in ("t/c/0", "t/c/1/0", "u"):
        store.make_folder(key.rpartition("/")[0])
        store.create(key, b"x")
    stager.remove("t/c/1")
    stager.remove("u")
    stager.remove("missing")
    assert store.read("t/c/0") == b"x"
    assert (store.list("t/c"), store.list("")) == (["0"], [".mpistream", "t"])
    assert store.list(FOLDER) == []


def test_a_fenced_writer_removes_nothing(store, make) -> None:
    """Its stage folder is gone, so the object stays where it is; any other failure is the store's."""
    stager = make()
    store.make_folder("t")
    store.create("t/c", b"x")
    store.fail("move", no_space())
    with pytest.raises(StoreError, match="no space left"):
        stager.remove("t/c")
    store.create(epoch_key(5), b"")
    store.delete_tree(FOLDER)
    with pytest.raises(FencedError, match="epoch 5 took the store over from epoch 4") as caught:
        stager.remove("t/c")
    assert isinstance(caught.value.__cause__, StoreError)
    assert store.read("t/c") == b"x"


# ---- place -------------------------------------------------------------------------------------------


def test_objects_are_renamed_to_their_keys_and_the_folders_synced(store, make) -> None:
    """All of them durable; a second call renames nothing again but syncs again."""
    stager = make()
    items = staged(stager, item("t/c/0"), item("u/c/0"))
    stager.place(items, sync=True)
    assert [store.read(i.key) for i in items] == [b"head tail"] * 2
    assert store.list(FOLDER) == []
    assert all(i.is_placed for i in items)
    stager.place(items, sync=True)
    assert store.keys("place") == ["t/c/0", "u/c/0"]
    assert store.keys("sync_folders") == [["t/c/0", "u/c/0"]] * 2


def test_without_durability_no_folder_is_synced(store, make) -> None:
    """A name that is replaced was there before; without objects there is nothing to sync."""
    stager = make()
    stager.place(staged(stager, item("t/c/0"), item("u/c/0", must_sync=True)), sync=False)
    stager.place([], sync=True)
    assert store.keys("sync_folders") == []
    assert store.keys("place") == ["t/c/0", "u/c/0"]


def test_an_object_that_is_not_staged_can_not_be_placed(make) -> None:
    """flush raised before."""
    with pytest.raises(AssertionError, match="only what is staged can be placed"):
        make().place([item()], sync=False)


def test_a_failure_to_place_leaves_the_rest_for_the_next_try(store, make) -> None:
    """What is placed stays, what failed is still staged."""
    stager = make()
    items = staged(stager, item("t/c/0"), item("t/c/1"), item("t/c/2"))
    error = no_space()
    store.fail("place", None, error)
    with pytest.raises(StoreError) as caught:
        stager.place(items, sync=True)
    assert caught.value is error
    assert [i.is_placed for i in items] == [True, False, False]
    stager.place(items, sync=True)
    assert all(i.is_placed for i in items)
    assert store.keys("place") == ["t/c/0", "t/c/1", "t/c/1", "t/c/2"]


def test_a_writer_that_is_fenced_while_it_places(store, make) -> None:
    """The stage folder is renamed away by the next opening: no key changes."""
    stager = make()
    items = staged(stager, item("t/c/0"))
    store.create(epoch_key(5), b"")
    store.move(FOLDER, f"{FOLDER}.fenced-by-5")
    with pytest.raises(FencedError, match="epoch 5 took the store over from epoch 4") as caught:
        stager.place(items, sync=True)
    assert isinstance(caught.value.__cause__, StoreError)
    assert store.list("t") == []


def test_a_rename_that_was_done_twice_is_done(store, make) -> None:
    """NFS sends it again when the answer was lost, and says ENOENT: the object at the key is this one."""
    stager = make()
    (found,) = staged(stager, item("t/c/0", b"x" * 100))
    assert found.staged_key is not None
    store.place(found.staged_key, found.key)
    stager.place([found], sync=True)
    assert found.is_placed
    assert store.n_open == 0


@pytest.mark.parametrize("there", [None, b"head", b"head tail!", b"head tali", b""], ids=repr)
def test_a_staged_file_that_is_gone_is_a_failure(store, make, there) -> None:
    """Nothing at the key, or another object: of another size, or with another end."""
    stager = make()
    (found,) = staged(stager, item("t/c/0"))
    store.delete(found.staged_key)
    if there is not None:
        store.make_folder("t/c")
        store.create("t/c/0", there)
    with pytest.raises(StoreError) as caught:
        stager.place([found], sync=True)
    assert caught.value.kind == "gone"
    assert not found.is_placed
    assert store.n_open == 0


def test_another_failure_is_not_looked_into(store, make) -> None:
    """Only ENOENT can be a rename that was done."""
    stager = make()
    (found,) = staged(stager, item("t/c/0"))
    store.make_folder("t/c")
    store.create("t/c/0", b"head tail")
    store.fail("place", no_space())
    with pytest.raises(StoreError, match="no space left"):
        stager.place([found], sync=True)
    assert not found.is_placed


def test_names_that_may_not_be_durable_are_taken_back(store, make) -> None:
    """A failed sync is never tried again on the same file: the objects are read, staged and renamed anew."""
    stager = make()
    items = staged(stager, item("t/c/0", b"abc"), item("t/c/1", b"def"))
    store.fail("sync_folders", StoreError("sync: input/output error", kind="io", errno=errno.EIO))
    with pytest.raises(StoreError, match="input/output error"):
        stager.place(items, sync=True)
    assert [(i.is_placed, i.staged_key) for i in items] == [(False, None)] * 2
    stager.retry(items)
    stager.place(items, sync=True)
    assert [store.read(i.key) for i in items] == [b"abc", b"def"]
    assert store.keys("place") == ["t/c/0", "t/c/1"] * 2
    assert len(store.keys("stage")) == 4


def test_an_object_that_can_not_be_read_back_is_lost(store, make) -> None:
    """Somebody removed it, or the disk fails again: the next try says so, and the one after it goes on."""
    stager = make()
    items = staged(stager, item("t/c/0"), item("t/c/1"))
    store.fail("sync_folders", no_space())
    with pytest.raises(StoreError):
        stager.place(items, sync=True)
    store.fail("read", StoreError("read: input/output error", kind="io", errno=errno.EIO))
    with pytest.raises(StoreError, match="input/output error"):
        stager.retry(items)
    store.delete("t/c/0")
    with pytest.raises(StoreError, match="t/c/0: gone after the sync of its folder failed; roll back"):
        stager.retry(items)
    assert [i.staged_key is not None for i in items] == [False, True]


# ---- discard -----------------------------------------------------------------------------------------


@both
def test_discarded_objects_leave_the_stage_folder(store, make, threads) -> None:
    """What is placed stays, what is not staged is forgotten, and a failure to delete does not matter."""
    stager = make(threads)
    placed, unstaged = item("t/c/0"), item("t/c/3")
    staged(stager, placed)
    stager.place([placed], sync=True)
    items = staged(stager, item("t/c/1"), item("t/c/2"))
    store.fail("delete", no_space())
    stager.discard([placed, *items, unstaged])
    assert store.keys("delete") == [i.staged_key for i in items]
    assert store.list(FOLDER) == [str(items[0].staged_key).rpartition("/")[2]]
    assert store.read("t/c/0") == b"head tail"


def test_discard_waits_for_what_is_on_its_way(store, make) -> None:
    """An object is not staged after it was discarded."""
    stager = make(1)
    store.gate.clear()
    found = item()
    stager.submit(found)
    discarding = threading.Thread(target=stager.discard, args=([found],), daemon=True)
    discarding.start()
    discarding.join(0.05)
    assert discarding.is_alive()
    store.gate.set()
    discarding.join(DEADLINE)
    assert not discarding.is_alive()
    assert store.list(FOLDER) == []


def test_names_in_the_stage_folder_are_new(make) -> None:
    """Never one twice."""
    stager = make()
    names = [stager.name() for _ in range(5)]
    assert len(set(names)) == 5
    assert all(name.startswith(f"{FOLDER}/") for name in names)

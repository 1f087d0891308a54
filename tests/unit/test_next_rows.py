"""Folders of the rows that come next: made by rank 0 after a commit, for all ranks, and never by a fenced owner."""

from __future__ import annotations

from typing import Any

import pytest

import mpistream as ms
from mpistream.epoch import prove_epoch
from mpistream.errors import StoreError
from mpistream.layout import resolve_layout, shard_regions
from mpistream.manifest import stage_folder
from mpistream.publishing import folders_of_row, make_rows, shared_rows
from mpistream.staging import Stager
from tests.support.scripted_store import ScriptedStore

STAGE = stage_folder(1, 0)


@pytest.mark.parametrize(
    ("n_shards", "expected"),
    [
        ((4,), []),
        ((2, 9), ["0", "1"]),
        ((2, 2, 9), ["0", "1", "0/0", "0/1", "1/0", "1/1"]),
        ((1000, 1001, 5), [str(i) for i in range(1000)]),
        ((1001, 2), []),
    ],
)
def test_folders_of_a_row(n_shards, expected) -> None:
    """All levels above the objects, while a level has no more than 1,000 folders."""
    assert folders_of_row(n_shards) == expected


def make(store: Any, n_records: int, *, n_writers: int = 2, separator: str = "/", sync: bool = True) -> None:
    """Make the rows behind so many records, in rows of 1 (u, four shards of two ranks) and of 2 (v)."""
    schema = resolve_layout(
        ms.StreamSchema(
            dims={"time": None, "y": 4, "x": 4},
            time=ms.AppendTime(units="s"),
            variables={
                "u": ms.Variable(("time", "y", "x"), "i1", shard_shape={"time": 1, "y": 2, "x": 2}),
                "v": ms.Variable(("time", "y"), "i1", shard_shape={"time": 2, "y": 2}),
                "count": ms.Variable(("time",), "i4"),
            },
            key_separator=separator,
        ),
        n_writers,
    )
    epoch = prove_epoch(schema, shard_regions(schema, n_writers))
    for folder in (STAGE, "u/c", "v/c"):
        store.make_folder(folder)
    stager = Stager(store, STAGE, 1, threads=0, max_pending_nbytes=1)
    make_rows(store, stager, shared_rows(schema, epoch), n_records, sync=sync)


def test_rows_that_begin_with_the_next_record_are_made() -> None:
    """Whole, by one rename each; a row that has begun is there. Their names are durable before anyone needs them."""
    store = ScriptedStore()
    make(store, 3)
    assert (store.list("u/c"), store.list("u/c/3"), store.list("v/c")) == (["3"], ["0", "1"], [])
    assert store.keys("sync_folders")[-1] == ["u/c/3/"]
    make(store, 4)
    assert (store.list("u/c"), store.list("v/c"), store.list("v/c/2")) == (["3", "4"], ["2"], [])
    assert store.keys("sync_folders")[-1] == ["u/c/4/", "v/c/2/"]
    assert store.list(STAGE) == []


@pytest.mark.parametrize("changes", [{"n_writers": 1}, {"separator": "."}])
def test_none_is_made_that_no_rank_shares(changes) -> None:
    """One writer makes its own, and keys with dots have none."""
    store = ScriptedStore()
    make(store, 4, **changes)
    assert (store.list("u/c"), store.list("v/c")) == ([], [])


def test_nothing_is_synced_that_need_not_be() -> None:
    """Without durability the folders are made all the same."""
    store = ScriptedStore()
    make(store, 4, sync=False)
    assert (store.list("u/c"), store.keys("sync_folders")) == (["4"], [])


def test_a_row_that_is_there_stays_as_it_is() -> None:
    """What a failed commit has placed in it is replaced by the next one, and not by an empty folder."""
    store = ScriptedStore()
    store.make_folder("u/c/4/0")
    store.create("u/c/4/0/0", b"placed")
    make(store, 4)
    assert store.read("u/c/4/0/0") == b"placed"
    assert store.list("v/c") == ["2"]
    assert store.list(STAGE) == []


def test_a_fenced_owner_makes_none() -> None:
    """Its stage folder is gone: a folder of its making could stand where a later epoch puts a row back."""

    class Fencing(ScriptedStore):
        """A resume of another process takes the store over while the row is made."""

        def make_folder(self, key: str, *, parents: bool = True) -> None:
            super().make_folder(key, parents=parents)
            if key.startswith(f"{STAGE}/"):
                self.delete_tree(STAGE)

    store = Fencing()
    make(store, 4)
    assert (store.list("u/c"), store.list("v/c")) == ([], [])


def test_a_failure_is_met_by_who_places() -> None:
    """A folder that can't be made is no warning of a commit that is done."""
    store = ScriptedStore()
    store.fail("move", StoreError("no space", kind="io", errno=28))
    make(store, 4)
    assert (store.list("u/c"), store.list("v/c")) == ([], ["2"])

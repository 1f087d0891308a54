"""Tokens that a caller carries, at unlucky moments: two who commit at once, an owner that leaves, fixed times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.memory_store import MemoryStore
from mpistream.token import times_sha256
from tests.support.killed import InterruptedStore, Killed, KilledStore, copy_of

N_PARTS = 2
TIMES = [0.5, 1.5, 2.5, 3.5]


def make_schema(**changes: Any) -> ms.StreamSchema:
    given: dict[str, Any] = {
        "dims": {"time": None, "y": 4},
        "time": ms.AppendTime(units="s"),
        "variables": {"v": ms.Variable(("time", "y"), "int32")},
        "shard_shape": {"time": 2, "y": 2},
        "chunk_shape": {"time": 1, "y": 2},
    }
    return ms.StreamSchema(**{**given, **changes})


def open_part(store: Any, writer: int, **changes: Any) -> ms.PartWriter:
    return ms.write_open_part(
        store, make_schema(**changes), writer=writer, n_writers=N_PARTS, options=ms.Options(timeout=5)
    )


@contextmanager
def parts_of(store: Any, **changes: Any) -> Iterator[list[ms.PartWriter]]:
    parts = [open_part(store, i, **changes) for i in range(N_PARTS)]
    yield parts
    for part in parts:
        part.close()


def tokens_of_two_states(store: Any) -> tuple[list[ms.CommitToken], list[ms.CommitToken]]:
    """Return what all parts flushed after two records, and after a third one."""
    found: tuple[list[ms.CommitToken], list[ms.CommitToken]] = [], []
    with parts_of(store) as parts:
        for part in parts:
            for i in range(3):
                part.write_record(TIMES[i], {"v": 10 * i + part.region["y"][0]})
                if i > 0:
                    found[i - 1].append(part.flush())
    return found


def assert_holds(store: Any, n_records: int) -> None:
    reader = ms.open_reader(store)
    assert reader.times.tolist() == TIMES[:n_records]
    for i in range(n_records):
        assert reader.read_record("v", i).tolist() == [10 * i, 10 * i, 10 * i + 2, 10 * i + 2]


@pytest.mark.parametrize("is_first_larger", [False, True])
def test_of_two_who_commit_different_tokens_at_once_none_is_lost(is_first_larger: bool) -> None:
    """Wherever the other comes in between, one gets a receipt and is what the store holds, the other is refused."""
    start: Any = MemoryStore()
    two, three = tokens_of_two_states(start)
    first, second = (three, two) if is_first_larger else (two, three)
    winners = set()
    for n_calls in range(100):
        found = copy_of(start)
        receipts: dict[str, ms.CommitReceipt | ms.CommitError] = {}

        def commit(name: str, where: Any, tokens: list[ms.CommitToken], receipts: Any = receipts) -> None:
            try:
                receipts[name] = ms.commit_tokens(where, tokens)
            except ms.CommitError as error:
                receipts[name] = error

        def other(found: Any = found, commit: Callable[..., None] = commit) -> None:
            commit("second", found, second)

        store: Any = InterruptedStore(found, n_calls, other)
        commit("first", store, first)
        if not store.is_interrupted:
            break
        (winner,) = [n for n, r in receipts.items() if isinstance(r, ms.CommitReceipt)]
        (refused,) = [r for r in receipts.values() if isinstance(r, ms.CommitError)]
        assert (refused.kind, "base commit 0, not 1" in str(refused)) == ("token", True)
        winners.add(winner)
        assert receipts[winner].n_records == ms.open_reader(found).n_records  # type: ignore[union-attr]
        assert_holds(found, len(first[0].times or ()) if winner == "first" else len(second[0].times or ()))
        assert found._objects["zarr.json"] == repaired_document(found)
    assert winners == {"first", "second"}
    assert n_calls > 5


def repaired_document(store: Any) -> bytes:
    """Return the group's document as a resume would write it."""
    again = copy_of(store)
    ms.repair(again, takeover=True)
    return bytes(again._objects["zarr.json"])


def test_two_who_commit_the_same_tokens_at_once_get_the_same_receipt() -> None:
    """Wherever the other comes in between; and whoever is killed, the next one commits."""
    start: Any = MemoryStore()
    tokens, _ = tokens_of_two_states(start)
    for n_calls in range(100):
        found = copy_of(start)
        others: list[ms.CommitReceipt] = []

        def other(found: Any = found, others: list[ms.CommitReceipt] = others) -> None:
            others.append(ms.commit_tokens(found, tokens[::-1]))

        store: Any = InterruptedStore(found, n_calls, other)
        receipt = ms.commit_tokens(store, tokens)
        if not store.is_interrupted:
            break
        assert others == [receipt]
        assert_holds(found, 2)
        killed: Any = KilledStore(start, n_calls)
        try:
            ms.commit_tokens(killed, tokens)
        except Killed:
            left = copy_of(killed)
            assert ms.commit_tokens(left, tokens) == receipt
            assert_holds(left, 2)
    assert n_calls > 5


def test_who_finds_the_commit_of_one_that_was_killed_brings_the_documents_in_step() -> None:
    """Between its look at the manifest and its fence another one commits, and dies before it has published."""
    start: Any = MemoryStore()
    tokens, _ = tokens_of_two_states(start)
    for n_calls in range(100):
        found = copy_of(start)
        killed: Any = KilledStore(found, n_calls)
        killed._objects, killed._folders = found._objects, found._folders

        def other(killed: Any = killed) -> None:
            with contextlib.suppress(Killed):
                ms.commit_tokens(killed, tokens)

        store: Any = InterruptedStore(found, 0, other)
        receipt = ms.commit_tokens(store, tokens)
        assert receipt.n_records == 2
        assert found._objects["zarr.json"] == repaired_document(found)
        assert ms.commit_tokens(found, tokens) == receipt
        if killed.n_left >= 0:
            break
    assert n_calls > 5


def test_an_owner_that_raises_leaves_the_other_parts_alone() -> None:
    """Their stage folders stay: they flush, and their tokens are committed with its own."""
    store: Any = MemoryStore()
    owner, other = open_part(store, 0), open_part(store, 1)
    tokens = []

    def run() -> None:
        with owner:
            owner.write_record(TIMES[0], {"v": 0})
            tokens.append(owner.flush())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    with other:
        other.write_record(TIMES[0], {"v": 2})
        tokens.append(other.flush())
    assert ms.commit_tokens(store, tokens).n_records == 1
    assert_holds(store, 1)


def test_fixed_times_in_tokens_are_those_of_the_store() -> None:
    """All parts agree on another time: it is refused, and nothing is committed."""
    store: Any = MemoryStore()
    tokens = []
    with parts_of(store, time=ms.IndexedTime(TIMES, units="s")) as parts:
        for part in parts:
            part.write_record_at(2, TIMES[2], {"v": 20 + part.region["y"][0]})
            tokens.append(part.flush())
    wrong_times = (np.nextafter(TIMES[2], 9),)
    wrong = [replace(t, times=wrong_times, times_sha256=times_sha256(wrong_times)) for t in tokens]
    with pytest.raises(ms.CommitError, match="not those of the commit") as caught:
        ms.commit_tokens(store, wrong)
    assert caught.value.kind == "times"
    assert ms.open_reader(store).committed == ()
    assert ms.commit_tokens(store, tokens).n_records == 1
    assert ms.open_reader(store).read_record("v", 2).tolist() == [20, 20, 22, 22]


def test_a_store_is_created_from_a_schema_with_values() -> None:
    """One that comes from a store has digests in their place; the same for every part and for write_open."""
    store: Any = MemoryStore()
    with parts_of(store, time=ms.IndexedTime(TIMES, units="s")):
        pass
    schema = ms.open_reader(store).schema
    calls: list[Callable[[], object]] = [
        lambda: ms.write_open(MemoryStore(), schema),  # type: ignore[arg-type]
        *(lambda i=i: ms.write_open_part(MemoryStore(), schema, writer=i, n_writers=2) for i in range(2)),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(ms.SchemaError, match="'time' has a digest and no values") as caught:
            call()
        assert caught.value.kind == "values"
    with pytest.raises(ms.SchemaError, match="give the time of every record"):
        ms.IndexedTime(None, units="s", n_records=5)

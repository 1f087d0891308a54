"""Zarr documents that are published behind the caller's back: after the commit, before the next one."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.errors import StoreError
from mpistream.local_store import LocalStore
from tests.support.stager import DEADLINE
from tests.support.wait import wait_until

OPTIONS = ms.Options(durability="fsync", threads=1, max_pending_nbytes=10**6)


class SlowStore(LocalStore):
    """A folder in which no document is renamed into place while ``gate`` is cleared, and no thread stages while
    ``stages`` is.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate, self.stages = threading.Event(), threading.Event()
        self.gate.set()
        self.stages.set()
        self.is_held = False
        self.error: StoreError | None = None
        self.threads: list[str] = []
        """Of each document that is placed, the thread."""

    def stage(self, key: str, pieces: Any, *, sync: bool) -> int:
        if threading.current_thread().name == "mpistream-stage":
            self.is_held = not self.stages.is_set()
            self.stages.wait(DEADLINE)
            self.is_held = False
        return super().stage(key, pieces, sync=sync)

    def place(self, staged: str, key: str) -> None:
        if key.endswith("zarr.json"):
            self.threads.append(threading.current_thread().name)
            self.is_held = True
            self.gate.wait(DEADLINE)
            self.is_held = False
            if self.error is not None:
                raise self.error
        super().place(staged, key)


def opened(root: Path, options: ms.Options = OPTIONS) -> tuple[ms.StreamWriter, SlowStore]:
    store = SlowStore(root)
    schema = ms.StreamSchema(
        dims={"time": None, "x": 2},
        time=ms.AppendTime(units="s"),
        variables={"u": ms.Variable(("time", "x"), "i4", shard_shape={"time": 1, "x": 2})},
    )
    return ms.write_open(store, schema, options=options), store  # type: ignore[arg-type]


def put(writer: ms.StreamWriter, i: int) -> None:
    """Write a record, and wait until a commit that does not wait can have it."""
    writer.write_record(float(i), {"u": np.array([i, -i], "i4")})
    wait_until(lambda: all(o.is_staged for o in writer._writer._objects.values()), DEADLINE, "the record", every=0.001)


def length(root: Path) -> int:
    """Return how many records plain Zarr readers see."""
    found: list[int] = json.loads((root / "u/zarr.json").read_text())["shape"]
    return found[0]


def held(store: SlowStore) -> None:
    wait_until(lambda: store.is_held, DEADLINE, "a document", every=0.001)


def test_commit_that_does_not_wait_returns_before_the_documents_are_there(tmp_path: Path) -> None:
    """The record is committed, plain readers see it later, and another thread is at work on that."""
    writer, store = opened(tmp_path / "s")
    with writer:
        put(writer, 0)
        store.threads.clear()
        store.gate.clear()
        assert writer.commit(wait=False).n_records == 1
        assert ms.open_reader(tmp_path / "s").n_records == 1
        held(store)
        assert length(tmp_path / "s") == 0
        assert set(store.threads) == {"mpistream-stage"}
        store.gate.set()
        wait_until(lambda: length(tmp_path / "s") == 1, DEADLINE, "the documents", every=0.001)


def test_next_commit_waits_for_the_documents_of_the_one_before(tmp_path: Path) -> None:
    """The next commit begins when they are in step with the first: two never write documents at the same time."""
    writer, store = opened(tmp_path / "s")
    with writer:
        put(writer, 0)
        store.gate.clear()
        writer.commit(wait=False)
        held(store)
        put(writer, 1)
        seen: list[int] = []
        prepare = writer._owner.prepare  # type: ignore[union-attr]

        def noted(*args: Any) -> Any:
            found = prepare(*args)
            seen.append(length(tmp_path / "s"))
            return found

        writer._owner.prepare = noted  # type: ignore[union-attr, method-assign]
        opener = threading.Timer(0.05, store.gate.set)
        opener.start()
        writer.commit(wait=False)
        opener.join()
        assert seen == [1]
    assert length(tmp_path / "s") == 2


@pytest.mark.parametrize("end", ["fail", "rollback"])
def test_end_of_a_writer_and_rollback_wait_for_the_documents(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are dropped there, also those that no thread has begun, but what was committed is published first."""
    monkeypatch.setattr("mpistream.pipeline._MAX_WAITERS", 0)  # one thread does it all, one after the other
    writer, store = opened(tmp_path / "s")
    put(writer, 0)
    store.stages.clear()
    writer.write_record(1.0, {"u": np.array([1, -1], "i4")})
    wait_until(lambda: store.is_held, DEADLINE, "the thread", every=0.001)
    assert writer.commit(wait=False).n_records == 1
    opener = threading.Timer(0.05, store.stages.set)
    opener.start()
    if end == "rollback":
        writer.rollback()
    else:
        with pytest.raises(ZeroDivisionError), writer:
            _ = 1 / 0
    opener.join()
    assert length(tmp_path / "s") == 1
    writer.close()


def test_failure_behind_is_a_warning_of_the_next_commit_which_does_it_again(tmp_path: Path) -> None:
    """Nobody is told too late to mend it: the commit stands, the next receipt says what was wrong, and it is redone."""
    writer, store = opened(tmp_path / "s")
    with writer:
        put(writer, 0)
        store.error = StoreError("no room", kind="io", errno=errno.ENOSPC)
        assert writer.commit(wait=False).warnings == ()
        assert writer._owner is not None
        writer._owner.settle()
        assert length(tmp_path / "s") == 0
        store.error = None
        put(writer, 1)
        receipt = writer.commit(wait=False)
        assert receipt.n_records == 2
        assert ["no room" in text for text in receipt.warnings] == [True]
        put(writer, 2)
        assert writer.commit().warnings == ()
        assert length(tmp_path / "s") == 3


@pytest.mark.parametrize(
    ("options", "wait"),
    [
        (OPTIONS, True),
        (ms.Options(durability="none", threads=1), False),
        (ms.Options(durability="fsync", threads=0), False),
    ],
)
def test_documents_are_there_on_return_where_nothing_is_gained_by_a_thread(
    tmp_path: Path, options: ms.Options, wait: bool
) -> None:
    """A commit that waits, one that needs no disk, and one of a writer without threads publish before they return."""
    writer, store = opened(tmp_path / "s", options)
    with writer:
        put(writer, 0)
        store.threads.clear()
        writer.commit(wait=wait)
        assert length(tmp_path / "s") == 1
        assert set(store.threads) == {threading.current_thread().name}

"""Zarr documents that are published behind the caller's back: after the commit, before the next one."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.errors import StoreError
from mpistream.local_store import LocalStore
from tests.support.scene import plain
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
        self.is_held = self.is_staging = False
        self.error: StoreError | None = None
        self.threads: list[str] = []
        """Of each document that is placed, the thread."""

    def stage(self, key: str, pieces: Any, *, sync: bool) -> int:
        if threading.current_thread().name == "mpistream-stage":
            self.is_staging = True
            self.stages.wait(DEADLINE)
            self.is_staging = False
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
    wait_until(lambda: store.is_staging, DEADLINE, "the thread", every=0.001)
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


def test_rows_are_made_before_anything_of_the_next_commit_is_placed(tmp_path: Path) -> None:
    """Renamed over a folder that another rank has just made, a row would take the place from under its objects."""
    writer, store = opened(tmp_path / "s")
    with writer:
        put(writer, 0)
        store.gate.clear()
        writer.commit(wait=False)
        held(store)
        put(writer, 1)
        placed: list[bool] = []
        place = writer._writer.place

        def noted(*args: Any) -> None:
            placed.append(store.is_held)
            place(*args)

        writer._writer.place = noted  # type: ignore[method-assign, assignment]
        opener = threading.Timer(0.05, store.gate.set)
        opener.start()
        writer.commit(wait=False)
        opener.join()
        assert placed == [False]


def test_interrupt_while_it_waits_leaves_no_documents_to_an_old_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C right behind the beginning of it: the next commit waits all the same, and its documents are the last."""
    writer, store = opened(tmp_path / "s")
    with writer:
        put(writer, 0)
        do_in = writer._writer.stager.do_in

        def interrupted(*args: Any) -> None:
            do_in(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(writer._writer.stager, "do_in", interrupted)
        store.gate.clear()
        with pytest.raises(KeyboardInterrupt):
            writer.commit(wait=False)
        monkeypatch.undo()
        held(store)
        opener = threading.Timer(0.05, store.gate.set)
        opener.start()
        put(writer, 1)
        writer.commit(wait=False)
        opener.join()
    assert length(tmp_path / "s") == 2


def test_interrupt_of_the_wait_at_the_end_still_releases_everything(tmp_path: Path) -> None:
    """Ctrl-C there: the lease is given back, and the same process can open the store again."""
    writer, _ = opened(tmp_path / "s")
    put(writer, 0)
    writer.commit()
    owner = writer._owner
    assert owner is not None

    def interrupted(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    owner.settle = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        writer._release(failed=True)
    with ms.write_resume(tmp_path / "s") as again:
        assert again.n_records == 1


def test_large_record_does_not_wait_for_documents(tmp_path: Path) -> None:
    """Documents hold no memory: a wait for them would free none for a record above the bound."""
    writer, store = opened(tmp_path / "s", ms.Options(durability="fsync", threads=1, max_pending_nbytes=1))
    with writer:
        put(writer, 0)
        store.gate.clear()
        writer.commit(wait=False)
        held(store)
        writer.write_record(1.0, {"u": np.array([1, -1], "i4")})
        assert store.is_held
        store.gate.set()


def test_what_a_failed_write_may_have_named_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync of the array `committed` failed: an invalidation makes it stop naming the record all the same."""
    schema = ms.StreamSchema(
        dims={"time": None, "x": 2},
        time=ms.IndexedTime(times=[0.0, 1.0], units="s"),
        variables={"u": ms.Variable(("time", "x"), "i4", shard_shape={"time": 1, "x": 2})},
    )
    sync = LocalStore.sync_folders

    def failing(self: LocalStore, keys: Any, known: Any = None) -> None:
        found = list(keys)
        sync(self, found, known)
        if any(key.startswith("committed/") for key in found):
            raise StoreError("sync failed", kind="io", errno=errno.EIO)

    with ms.write_open(tmp_path / "s", schema, options=OPTIONS) as writer:
        writer.write_record_at(0, 0.0, {"u": 0})
        writer.commit()
        writer.write_record_at(1, 1.0, {"u": 1})
        with monkeypatch.context() as patched:
            patched.setattr(LocalStore, "sync_folders", failing)
            assert len(writer.commit().warnings) == 1
        assert plain(tmp_path / "s")["committed"][...].tolist() == [True, True]
        writer.invalidate([1])
        assert plain(tmp_path / "s")["committed"][...].tolist() == [True, False]


_LEAVES = """
import sys, time
import numpy as np
import mpistream as ms
from tests.unit.test_publishing_behind import SlowStore, opened, put
from pathlib import Path
writer, store = opened(Path(sys.argv[1]))
put(writer, 0)
place = store.place
def slowly(staged, key):
    if key.endswith("zarr.json"):
        time.sleep(0.05)
        if len(sys.argv) > 2:
            raise ms.StoreError("no room", kind="io")
    place(staged, key)
store.place = slowly
writer.commit(wait=False)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_program_that_ends_without_closing_publishes_what_it_has_committed(tmp_path: Path, fails: bool) -> None:
    """It waits for the thread that is at it, and says so if that came to nothing."""
    command = [sys.executable, "-c", _LEAVES, str(tmp_path / "s"), *(["fails"] if fails else [])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert length(tmp_path / "s") == (0 if fails else 1)
    assert ("plain Zarr readers don't see the last commit" in done.stderr) is fails


_CLEANS_UP = """
import atexit, sys
from pathlib import Path
from tests.unit.test_publishing_behind import opened, put
writer = None
atexit.register(lambda: writer.close())
writer, _ = opened(Path(sys.argv[1]))
put(writer, 0)
"""


def test_clean_up_of_the_program_at_exit_comes_first(tmp_path: Path) -> None:
    """A handler that was registered before the stream was opened may still close it, and nothing is lost."""
    command = [sys.executable, "-c", _CLEANS_UP, str(tmp_path / "s")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "not committed" in done.stderr) == (0, False), done.stderr
    assert length(tmp_path / "s") == 1
    lease = json.loads((tmp_path / "s/.mpistream/lease").read_text())
    assert (lease["closed"], lease["failed"]) == (True, False)


@pytest.mark.parametrize("end", ["raise KeyError", ""])
def test_program_that_an_exception_ends_has_failed(tmp_path: Path, end: str) -> None:
    """All that was written is committed, but nobody who waits for the run may take it for whole."""
    program = f"{_CLEANS_UP}writer.commit()\n{end}"
    program = program.replace("atexit.register(lambda: writer.close())", "")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "s")], check=False, timeout=60)
    assert done.returncode == bool(end)
    lease = json.loads((tmp_path / "s/.mpistream/lease").read_text())
    assert (lease["closed"], lease["failed"]) == (True, bool(end))


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

"""What every store promises: one suite, run over each of them."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistream.errors import StoreError
from mpistream.local_store import LocalStore
from mpistream.memory_store import MemoryStore
from mpistream.store import Listable, Readable, Store, Writable, open_readable, open_store

DEADLINE = 30.0


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path) -> Store:
    made: Store = LocalStore(tmp_path / "run.zarr") if request.param == "local" else MemoryStore()
    made.make_folder("")
    return made


@pytest.fixture
def local(tmp_path) -> LocalStore:
    made = LocalStore(tmp_path / "run.zarr")
    made.make_folder("stage")
    return made


@pytest.fixture(autouse=True)
def _no_locks_and_links(monkeypatch) -> None:
    """Network file systems of clusters often lack locks and hard links: a store must use neither."""
    import fcntl

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a store must not lock or link")

    for module, name in [(fcntl, "flock"), (fcntl, "lockf"), (fcntl, "fcntl"), (os, "link"), (os, "lockf")]:
        monkeypatch.setattr(module, name, refuse)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.001)


def put(store: Store, key: str, data: bytes) -> None:
    store.make_folder("staging")
    store.stage("staging/put", [data], sync=False)
    store.place("staging/put", key)


class TestReadable:
    def test_an_object_reads_back_whole(self, store):
        put(store, "a/b", b"hello")
        assert store.read("a/b") == b"hello"

    def test_an_empty_object_is_not_an_absent_one(self, store):
        put(store, "a", b"")
        assert store.read("a") == b""

    @pytest.mark.parametrize("key", ["none", "none/below", "object/below", "folder"])
    def test_absence_is_none(self, store, key):
        put(store, "object", b"x")
        store.make_folder("folder")
        assert store.read(key) is None
        assert store.open(key) is None

    def test_an_opened_object_gives_ranges(self, store):
        put(store, "a", b"0123456789")
        reader = store.open("a")
        assert reader is not None
        assert reader.nbytes == 10
        assert reader.read(2, 3) == b"234"
        assert reader.read(8, 100) == b"89"
        assert reader.read(10, 1) == b""
        assert reader.read(3, 0) == b""
        reader.close()
        reader.close()

    def test_an_opened_object_fills_buffers(self, store):
        put(store, "a", b"0123456789")
        reader = store.open("a")
        assert reader is not None
        for offset, expected in [(2, b"234"), (8, b"89-"), (10, b"---"), (12, b"---")]:
            buffer = np.frombuffer(b"---", np.uint8).copy()
            assert reader.read_into(offset, buffer) == len(expected.rstrip(b"-"))
            assert buffer.tobytes() == expected
        assert reader.read_into(3, np.empty(0, np.uint8)) == 0
        reader.close()

    def test_an_opened_object_stays_the_same_when_it_is_replaced(self, store):
        put(store, "a", b"old")
        reader = store.open("a")
        assert reader is not None
        put(store, "a", b"newer")
        assert (reader.nbytes, reader.read(0, 10)) == (3, b"old")
        reader.close()
        assert store.read("a") == b"newer"


class TestListable:
    def test_names_right_below_a_prefix_are_sorted(self, store):
        for key in ["b", "a/2", "a/10", "a/deep/er", "ab"]:
            put(store, key, b"")
        store.make_folder("a/empty")
        store.delete_tree("staging")
        assert store.list() == ["a", "ab", "b"]
        assert store.list("a") == ["10", "2", "deep", "empty"]
        assert store.list("a/deep") == ["er"]

    @pytest.mark.parametrize("prefix", ["none", "none/below", "object", "object/below", "folder"])
    def test_nothing_below_is_an_empty_list(self, store, prefix):
        put(store, "object", b"x")
        store.make_folder("folder")
        assert store.list(prefix) == []


class TestFolders:
    def test_parents_are_made_and_a_folder_may_exist(self, store):
        store.make_folder("a/b/c")
        store.make_folder("a/b/c")
        store.make_folder("a/b/c", parents=False)
        assert store.list("a/b") == ["c"]

    def test_without_parents_only_the_last_folder_is_made(self, store):
        store.make_folder("a")
        store.make_folder("a/b", parents=False)
        assert store.list("a") == ["b"]

    def test_without_parents_a_missing_folder_above_means_gone(self, store):
        with pytest.raises(StoreError) as caught:
            store.make_folder("none/1", parents=False)
        assert (caught.value.kind, caught.value.errno) == ("gone", errno.ENOENT)
        assert store.list() == []

    @pytest.mark.parametrize("parents", [True, False])
    def test_an_object_is_no_folder(self, store, parents):
        put(store, "a", b"x")
        with pytest.raises(StoreError) as caught:
            store.make_folder("a", parents=parents)
        assert (caught.value.kind, caught.value.errno) == ("io", errno.EEXIST)

    def test_a_folder_below_an_object_is_an_error_that_leaves_the_object(self, store):
        put(store, "a", b"x")
        with pytest.raises(StoreError):
            store.make_folder("a/b")
        assert store.read("a") == b"x"


class TestCreate:
    def test_only_the_first_one_creates(self, store):
        assert store.create("claim", b"first") is True
        assert store.create("claim", b"second") is False
        assert store.read("claim") == b"first"

    def test_of_many_threads_one_creates(self, store):
        start = threading.Barrier(4)
        won: list[int] = []

        def claim(i: int) -> None:
            start.wait(DEADLINE)
            if store.create("claim", b"%d" % i):
                won.append(i)

        threads = [threading.Thread(target=claim, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert [store.read("claim")] == [b"%d" % i for i in won]

    def test_a_missing_folder_is_an_error(self, store):
        with pytest.raises(StoreError) as caught:
            store.create("none/claim", b"")
        assert (caught.value.kind, caught.value.errno) == ("io", errno.ENOENT)
        assert store.list() == []


class TestStageAndPlace:
    @pytest.mark.parametrize("sync", [True, False])
    def test_pieces_are_joined_and_counted(self, store, sync):
        store.make_folder("stage")
        pieces = [
            b"ab",
            b"",
            np.arange(3, dtype="uint8"),
            np.empty(0, dtype="uint8"),
            np.empty((0, 3), dtype="float32"),
            bytearray(b"z"),
            memoryview(b"xyz")[1:],
            np.ones((2, 2), dtype="<u2"),
        ]
        assert store.stage("stage/1", pieces, sync=sync) == 16
        assert store.read("stage/1") == b"ab\0\1\2zyz" + b"\1\0" * 4

    def test_no_pieces_make_an_empty_object(self, store):
        store.make_folder("stage")
        assert store.stage("stage/1", [], sync=True) == 0
        assert store.read("stage/1") == b""

    def test_the_caller_may_change_the_pieces_afterwards(self, store):
        store.make_folder("stage")
        piece = np.zeros(4, dtype="uint8")
        store.stage("stage/1", [piece], sync=False)
        piece[:] = 7
        assert store.read("stage/1") == b"\0\0\0\0"

    def test_staging_without_the_stage_folder_means_gone_and_leaves_nothing(self, store):
        with pytest.raises(StoreError) as caught:
            store.stage("stage/1/0/x", [b"data"], sync=True)
        assert (caught.value.kind, caught.value.errno) == ("gone", errno.ENOENT)
        assert store.list() == []

    def test_a_staged_name_is_never_overwritten(self, store):
        store.make_folder("stage")
        store.stage("stage/1", [b"one"], sync=False)
        with pytest.raises(StoreError) as caught:
            store.stage("stage/1", [b"two"], sync=False)
        assert (caught.value.kind, caught.value.errno) == ("io", errno.EEXIST)
        assert store.read("stage/1") == b"one"

    def test_place_moves_the_object_and_makes_the_folders_of_its_key(self, store):
        store.make_folder("stage")
        store.stage("stage/1", [b"data"], sync=True)
        store.place("stage/1", "v/c/0/1/2")
        assert store.read("v/c/0/1/2") == b"data"
        assert store.list("stage") == []

    def test_place_replaces_what_is_there(self, store):
        put(store, "a", b"old")
        put(store, "a", b"new")
        assert store.read("a") == b"new"

    @pytest.mark.parametrize("key", ["a", "v/c/0"])
    def test_placing_a_staged_object_that_is_gone_changes_nothing(self, store, key):
        put(store, "a", b"old")
        store.delete_tree("staging")
        with pytest.raises(StoreError) as caught:
            store.place("staging/put", key)
        assert (caught.value.kind, caught.value.errno) == ("gone", errno.ENOENT)
        assert (store.list(), store.read("a")) == (["a"], b"old")

    def test_a_writer_whose_stage_folder_was_moved_away_is_fenced(self, store):
        store.make_folder("stage/1/0")
        store.stage("stage/1/0/x", [b"late"], sync=True)
        assert store.move("stage/1", "trash/1") is True
        for act in (
            lambda: store.place("stage/1/0/x", "a"),
            lambda: store.stage("stage/1/0/y", [b""], sync=False),
            lambda: store.make_folder("stage/1/0", parents=False),
        ):
            with pytest.raises(StoreError) as caught:
                act()
            assert caught.value.kind == "gone"
        assert store.read("a") is None

    def test_a_reader_sees_whole_old_or_new_objects_only(self, store):
        n_replaced, size = 200, 100_000
        put(store, "a", bytes(size))
        done = threading.Event()
        seen: list[bytes | None] = []

        def read() -> None:
            while not done.is_set():
                data = store.read("a")
                if not seen or seen[-1] != data:
                    seen.append(data)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for i in range(1, n_replaced + 1):
                put(store, "a", bytes([i]) * size)
            wait_for(lambda: seen and seen[-1] == bytes([n_replaced]) * size)
        finally:
            done.set()
            thread.join(DEADLINE)
        assert None not in seen
        firsts = [data[0] for data in seen if data is not None]
        assert [data == bytes([first]) * size for data, first in zip(seen, firsts, strict=True)] == [True] * len(seen)
        assert firsts == sorted(set(firsts))


class TestMoveCopyDelete:
    def test_move_renames_an_object_and_replaces(self, store):
        put(store, "a", b"new")
        put(store, "b/c", b"old")
        assert store.move("a", "b/c") is True
        assert (store.read("a"), store.read("b/c")) == (None, b"new")

    def test_move_renames_a_folder_with_all_below(self, store):
        put(store, "v/c/0/1", b"01")
        put(store, "v/c/0/deep/2", b"02")
        put(store, "v/c/01", b"not below")
        assert store.move("v/c/0", "dropped/3/v/0") is True
        assert (store.read("dropped/3/v/0/1"), store.read("dropped/3/v/0/deep/2")) == (b"01", b"02")
        assert store.list("v/c") == ["01"]

    def test_move_of_nothing_makes_nothing(self, store):
        assert store.move("none", "b/c") is False
        assert store.list() == []

    def test_move_never_merges_folders(self, store):
        put(store, "a/1", b"a")
        put(store, "b/2", b"b")
        with pytest.raises(StoreError) as caught:
            store.move("a", "b")
        assert (caught.value.kind, caught.value.errno) == ("io", errno.ENOTEMPTY)
        assert (store.read("a/1"), store.list("b")) == (b"a", ["2"])

    def test_copy_keeps_the_source_and_makes_folders(self, store):
        put(store, "a", b"data")
        put(store, "c/d", b"old")
        assert store.copy("a", "b/c") is True
        assert store.copy("a", "c/d") is True
        assert [store.read(key) for key in ("a", "b/c", "c/d")] == [b"data"] * 3
        assert (store.list("b"), store.list("c")) == (["c"], ["d"])

    def test_copy_of_nothing_makes_nothing(self, store):
        assert store.copy("none", "b/c") is False
        assert store.list() == []

    def test_delete_says_whether_there_was_something(self, store):
        put(store, "a", b"data")
        assert [store.delete("a"), store.delete("a"), store.read("a")] == [True, False, None]

    @pytest.mark.parametrize("key", ["none", "none/below", "object/below"])
    def test_delete_of_nothing_is_false(self, store, key):
        put(store, "object", b"")
        assert store.delete(key) is False

    def test_delete_tree_removes_all_below_and_nothing_beside(self, store):
        for key in ["v/a", "v/b/c/d", "v2", "w/v"]:
            put(store, key, b"")
        store.delete_tree("v")
        store.delete_tree("v")
        store.delete_tree("none/below")
        assert store.list() == ["staging", "v2", "w"]
        assert store.read("v/a") is None

    def test_delete_tree_takes_an_object_too(self, store):
        put(store, "a", b"")
        store.delete_tree("a")
        assert store.read("a") is None

    def test_a_store_can_be_made_again_after_all_of_it_was_deleted(self, store):
        put(store, "a/b", b"")
        store.delete_tree("")
        assert store.list() == []
        store.make_folder("")
        assert store.create("a", b"again") is True

    def test_sync_folders_takes_keys_at_every_depth(self, store):
        put(store, "a", b"")
        put(store, "v/c/0", b"")
        store.sync_folders([])
        store.sync_folders(["a", "v/c/0", "v/zarr.json"])


class TestLocalFaults:
    """What a POSIX file system does to us, and what the caller learns."""

    def test_many_pieces_need_several_calls(self, local, monkeypatch):
        """One writev takes at most 1,024 pieces."""
        calls: list[int] = []
        writev = os.writev

        def count(fd: int, views: list[memoryview]) -> int:
            calls.append(len(views))
            return writev(fd, views)

        monkeypatch.setattr(os, "writev", count)
        pieces: list[Any] = [np.full(i % 3, i % 251, dtype="uint8") for i in range(5000)]
        expected = b"".join(p.tobytes() for p in pieces)
        assert local.stage("stage/1", pieces, sync=False) == len(expected)
        assert local.read("stage/1") == expected
        assert max(calls) <= 1024

    @pytest.mark.parametrize("at_most", [1, 3, 7])
    def test_short_writes_are_continued(self, local, monkeypatch, at_most):
        def short(fd: int, views: list[memoryview]) -> int:
            return os.write(fd, b"".join(views)[:at_most])

        monkeypatch.setattr(os, "writev", short)
        pieces = [b"abc", b"", b"d", np.arange(10, dtype="uint8"), b"ef"]
        assert local.stage("stage/1", pieces, sync=True) == 16
        assert local.read("stage/1") == b"abcd" + bytes(range(10)) + b"ef"

    def test_short_reads_are_continued(self, local, monkeypatch):
        put(local, "a", bytes(range(100)))
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 7), offset))
        assert local.read("a") == bytes(range(100))
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:7]], offset))
        buffer, reader = bytearray(95), local.open("a")
        assert reader.read_into(10, buffer) == 90
        assert bytes(buffer) == bytes(range(10, 100)) + bytes(5)
        reader.close()

    @pytest.mark.parametrize("n_good_calls", [0, 1])
    @pytest.mark.parametrize("act", ["stage", "create"])
    def test_a_full_disk_leaves_no_partial_file_and_can_be_tried_again(self, local, monkeypatch, n_good_calls, act):
        calls: list[int] = []

        def full(fd: int, views: list[memoryview]) -> int:
            calls.append(fd)
            if len(calls) > n_good_calls:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.write(fd, views[0][:2])

        def write() -> object:
            if act == "create":
                return local.create("stage/1", b"data")
            return local.stage("stage/1", [b"data"], sync=True)

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            with pytest.raises(StoreError) as caught:
                write()
        assert (caught.value.kind, caught.value.errno) == ("io", errno.ENOSPC)
        assert f"{local.root}/stage/1" in str(caught.value)
        assert os.strerror(errno.ENOSPC) in str(caught.value)
        assert local.list("stage") == []
        write()
        assert local.read("stage/1") == b"data"

    @pytest.mark.parametrize("call", ["fsync", "close"])
    def test_an_error_that_comes_with_sync_or_close_is_an_error_of_stage(self, local, monkeypatch, call):
        """Network file systems report a full disk as late as at fsync or close."""
        real = getattr(os, call)
        failed: list[int] = []

        def fail(fd: int) -> None:
            real(fd)
            if not failed and not os.path.isdir(f"/proc/self/fd/{fd}"):
                failed.append(fd)
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(StoreError) as caught:
                local.stage("stage/1", [b"data"], sync=True)
        assert (caught.value.kind, caught.value.errno) == ("io", errno.EDQUOT)
        assert local.list("stage") == []

    @pytest.mark.parametrize("call", ["writev", "fsync"])
    def test_a_stale_handle_while_writing_means_gone(self, local, monkeypatch, call):
        """NFS answers ESTALE when another host removed the folder of an open file."""

        def stale(*args: object) -> int:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, stale)
            with pytest.raises(StoreError) as caught:
                local.stage("stage/1", [b"data"], sync=True)
        assert (caught.value.kind, caught.value.errno) == ("gone", errno.ESTALE)

    def test_an_object_replaced_between_open_and_read_is_read_again(self, local, monkeypatch):
        put(local, "a", b"data")
        pread, stale = os.pread, [True, True]

        def once_stale(fd: int, nbytes: int, offset: int) -> bytes:
            if stale and stale.pop():
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return pread(fd, nbytes, offset)

        monkeypatch.setattr(os, "pread", once_stale)
        assert local.read("a") == b"data"

    def test_a_handle_that_stays_stale_is_an_error(self, local, monkeypatch):
        put(local, "a", b"data")

        def stale(*args: object) -> bytes:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(os, "pread", stale)
        with pytest.raises(StoreError) as caught:
            local.read("a")
        assert caught.value.errno == errno.ESTALE

    @pytest.mark.parametrize(
        ("call", "act"),
        [
            ("open", lambda s: s.read("a")),
            ("open", lambda s: s.create("b", b"")),
            ("open", lambda s: s.stage("stage/1", [b""], sync=False)),
            ("open", lambda s: s.sync_folders(["v/c/0"])),
            ("pread", lambda s: s.read("a")),
            ("preadv", lambda s: s.open("a").read_into(0, bytearray(1))),
            ("listdir", lambda s: s.list("v")),
            ("mkdir", lambda s: s.make_folder("w/x")),
            ("mkdir", lambda s: s.make_folder("w", parents=False)),
            ("rename", lambda s: s.place("stage/0", "b")),
            ("rename", lambda s: s.move("v", "w")),
            ("unlink", lambda s: s.delete("a")),
            ("unlink", lambda s: s.delete_tree("v")),
        ],
    )
    def test_errors_carry_errno_and_name_the_path(self, local, monkeypatch, call, act):
        put(local, "a", b"data")
        put(local, "v/c/0", b"data")
        local.stage("stage/0", [b"data"], sync=False)

        def fail(*args: object, **kwargs: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(StoreError) as caught:
                act(local)
        assert (caught.value.kind, caught.value.errno) == ("io", errno.EIO)
        assert f"{local.root}/" in str(caught.value)
        assert isinstance(caught.value, OSError)

    def test_place_names_both_paths_when_it_fails(self, local):
        local.make_folder("v")
        local.stage("stage/1", [b""], sync=False)
        with pytest.raises(StoreError) as caught:
            local.place("stage/1", "v")
        assert (caught.value.kind, caught.value.errno) == ("io", errno.EISDIR)
        assert f"{local.root}/stage/1" in str(caught.value)
        assert f"{local.root}/v" in str(caught.value)
        assert local.list("stage") == ["1"]

    def test_place_is_one_rename_or_two_when_the_folder_is_missing(self, local, monkeypatch):
        renames: list[tuple[str, str]] = []
        rename = os.rename

        def log(a: str, b: str) -> None:
            renames.append((a, b))
            rename(a, b)

        monkeypatch.setattr(os, "rename", log)
        for name in ("1", "2"):
            local.stage(f"stage/{name}", [b""], sync=False)
            local.place(f"stage/{name}", f"v/c/{name}")
        root = local.root
        assert renames == [(f"{root}/stage/1", f"{root}/v/c/1")] * 2 + [(f"{root}/stage/2", f"{root}/v/c/2")]

    def test_move_that_loses_a_race_for_the_source_is_false(self, local, monkeypatch):
        put(local, "v/0", b"")
        rename = os.rename

        def late(source: str, target: str) -> None:
            rename(source, f"{source}.taken")
            rename(source, target)

        monkeypatch.setattr(os, "rename", late)
        assert local.move("v", "w") is False

    def test_no_descriptor_is_left_open(self, local, monkeypatch):
        before = sorted(os.listdir("/proc/self/fd"))
        put(local, "a/b", b"data")
        local.create("c", b"")
        local.copy("c", "d")
        local.move("d", "e")
        local.read("a/b")
        local.read("a")
        local.sync_folders(["a/b", "c"])
        local.list()
        with pytest.raises(StoreError):
            local.stage("none/1", [b""], sync=True)
        local.delete_tree("a")
        assert sorted(os.listdir("/proc/self/fd")) == before

    def test_delete_tree_ends_while_another_thread_creates_files(self, local):
        local.make_folder("busy")
        ended: list[StoreError] = []

        def create() -> None:
            i = 0
            while not ended:
                try:
                    local.stage(f"busy/{i}", [b"x"], sync=False)
                except StoreError as error:
                    ended.append(error)
                i += 1
                # A writer that was fenced makes some files a millisecond, not as many as a loop can.
                time.sleep(0.0005)

        thread = threading.Thread(target=create)
        thread.start()
        try:
            wait_for(lambda: len(local.list("busy")) > 10)
            local.delete_tree("busy")
            wait_for(lambda: ended)
        finally:
            ended.append(StoreError("the end of the test"))
            thread.join(DEADLINE)
        assert ended[0].kind == "gone"
        assert not os.path.exists(f"{local.root}/busy")

    def test_two_that_delete_the_same_tree_both_succeed(self, local):
        for i in range(300):
            local.stage(f"stage/{i}", [b""], sync=False)
        failures: list[StoreError] = []
        start = threading.Barrier(2)

        def delete() -> None:
            start.wait(DEADLINE)
            try:
                local.delete_tree("stage")
            except StoreError as error:
                failures.append(error)

        threads = [threading.Thread(target=delete) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert (failures, local.list()) == ([], [])

    @pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.ENOENT])
    def test_delete_tree_never_returns_with_the_tree_still_there(self, local, monkeypatch, number):
        """A stage folder that was not removed would be a fence that is open."""

        def fail(path: str, *args: object, **kwargs: object) -> None:
            raise OSError(number, os.strerror(number), path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rmdir", fail)
            with pytest.raises(StoreError) as caught:
                local.delete_tree("stage")
        assert caught.value.errno == number

    def test_delete_tree_removes_a_symbolic_link_and_not_its_target(self, local, tmp_path):
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept" / "file").touch()
        os.symlink(tmp_path / "kept", f"{local.root}/link")
        local.delete_tree("link")
        assert (local.list(), (tmp_path / "kept" / "file").exists()) == (["stage"], True)

    def test_a_relative_root_is_fixed_when_the_store_is_made(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        made = LocalStore("run.zarr")
        monkeypatch.chdir("/")
        made.make_folder("a")
        assert (tmp_path / "run.zarr" / "a").is_dir()
        assert made.url == str(tmp_path / "run.zarr")


class TestLocalDurability:
    """Which files and folders are synced, and in which order."""

    @pytest.fixture
    def events(self, local, monkeypatch) -> list[str]:
        seen: list[str] = []
        fsync, rename, mkdir = os.fsync, os.rename, os.mkdir
        above = os.path.dirname(local.root)

        def name(path: Any) -> str:
            return os.path.relpath(path, above)

        def log_fsync(fd: int) -> None:
            seen.append(f"fsync {name(os.readlink(f'/proc/self/fd/{fd}'))}")
            fsync(fd)

        def log_rename(a: Any, b: Any) -> None:
            seen.append(f"rename {name(a)} {name(b)}")
            rename(a, b)

        def log_mkdir(path: Any, *args: Any) -> None:
            mkdir(path, *args)
            seen.append(f"mkdir {name(path)}")

        monkeypatch.setattr(os, "fsync", log_fsync)
        monkeypatch.setattr(os, "rename", log_rename)
        monkeypatch.setattr(os, "mkdir", log_mkdir)
        return seen

    def test_a_file_is_synced_before_its_rename_and_all_its_folders_after_it(self, local, events):
        local.stage("stage/1", [b"x"], sync=True)
        local.place("stage/1", "v/c/0/1")
        local.sync_folders(["v/c/0/1"])
        found = [e for e in events if not e.startswith("mkdir")]
        assert found[:3] == [
            "fsync run.zarr/stage/1",
            "rename run.zarr/stage/1 run.zarr/v/c/0/1",  # the folder is missing
            "rename run.zarr/stage/1 run.zarr/v/c/0/1",
        ]
        assert sorted(found[3:]) == ["fsync run.zarr/v", "fsync run.zarr/v/c", "fsync run.zarr/v/c/0"]

    def test_nothing_is_synced_that_was_not_asked_for(self, local, events):
        local.stage("stage/1", [b"x"], sync=False)
        local.place("stage/1", "a")
        local.make_folder("stage/2", parents=False)
        assert [e for e in events if e.startswith("fsync")] == []

    def test_shared_folders_are_synced_once_and_the_root_last(self, local, events):
        for i, key in enumerate(["v/c/0/0", "v/c/0/1", "v/c/1/0", "w/zarr.json", "zarr.json"]):
            local.stage(f"stage/{i}", [b""], sync=False)
            local.place(f"stage/{i}", key)
        events.clear()
        local.sync_folders(["zarr.json", "v/c/0/0", "v/c/0/1", "v/c/1/0", "w/zarr.json"])
        *below, root = events
        assert sorted(below) == [f"fsync run.zarr{folder}" for folder in ["/v", "/v/c", "/v/c/0", "/v/c/1", "/w"]]
        assert root == "fsync run.zarr"

    def test_the_way_up_ends_at_a_folder_that_is_known(self, local, events):
        known: dict[str, None] = {}
        expected = (["v", "v/c", "v/c/0"], ["v/c/0"], ["v/c", "v/c/1"])
        for key, folders in zip(["v/c/0/0", "v/c/0/1", "v/c/1/0"], expected, strict=True):
            local.stage("stage/1", [b""], sync=False)
            local.place("stage/1", key)
            events.clear()
            local.sync_folders([key], known)
            assert sorted(events) == [f"fsync run.zarr/{folder}" for folder in folders]
        assert sorted(known) == ["v/c", "v/c/0", "v/c/1"]

    def test_a_folder_is_not_known_when_a_sync_has_failed(self, local, monkeypatch):
        local.make_folder("v/c/0")
        known: dict[str, None] = {}

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError):
            local.sync_folders(["v/c/0/1"], known)
        assert known == {}

    def test_known_folders_that_were_of_no_use_for_long_are_forgotten(self, local, monkeypatch):
        monkeypatch.setattr("mpistream.local_store._MAX_KNOWN_FOLDERS", 3)
        known: dict[str, None] = {}
        for row in range(5):
            local.make_folder(f"v/c/{row}")
            local.sync_folders([f"v/c/{row}/0"], known)
        assert sorted(known) == ["v/c", "v/c/3", "v/c/4"]

    def test_folders_wait_for_the_disk_together(self, local, monkeypatch):
        local.make_folder("v/c/0")
        fsync, meeting = os.fsync, threading.Barrier(3)

        def meet(fd: int) -> None:
            meeting.wait(DEADLINE)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", meet)
        local.sync_folders(["v/c/0/1", "v/c/0/2"])

    def test_a_created_object_and_its_name_are_synced(self, local, events):
        assert local.create("stage/1", b"x") is True
        assert events == ["fsync run.zarr/stage/1", "fsync run.zarr/stage"]

    def test_new_folders_are_synced_up_to_the_first_that_was_there(self, tmp_path, events):
        """Else a loss of power could take away the whole store, however well its files were synced."""
        LocalStore(tmp_path / "deep" / "run.zarr").make_folder("a/b")
        assert events == [
            "mkdir deep",
            "fsync .",
            "mkdir deep/run.zarr",
            "fsync deep",
            "mkdir deep/run.zarr/a",
            "fsync deep/run.zarr",
            "mkdir deep/run.zarr/a/b",
            "fsync deep/run.zarr/a",
        ]

    def test_a_folder_above_that_may_not_be_read_is_no_obstacle(self, tmp_path, monkeypatch):
        real = os.open

        def unreadable(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if path == str(tmp_path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", unreadable)
        made = LocalStore(tmp_path / "run.zarr")
        made.make_folder("a")
        assert made.list() == ["a"]

    @pytest.mark.parametrize(("number", "is_failure"), [(errno.EROFS, True), (errno.EIO, True), (errno.EMFILE, False)])
    def test_a_sync_is_not_believed_when_nothing_can_be_changed_any_more(self, local, monkeypatch, number, is_failure):
        """A journal that could not be written is told once, to whoever waited for it; few files are no such thing."""
        local.create("a", b"")
        real = os.open

        def dead(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(number, os.strerror(number))
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", dead)
        if not is_failure:
            local.sync_folders(["a"])
            return
        with pytest.raises(StoreError, match=r"sync folders of .*run\.zarr") as caught:
            local.sync_folders(["a"])
        assert (caught.value.kind, caught.value.errno) == ("io", number)

    def test_a_move_is_synced_on_both_sides(self, local, events):
        local.make_folder("v/c")
        local.create("v/c/0", b"")
        events.clear()
        local.move("v/c/0", "dropped/1/0")
        rename, *syncs = [e for e in events if not e.startswith("mkdir")]
        assert rename == "rename run.zarr/v/c/0 run.zarr/dropped/1/0"
        assert sorted(syncs) == [f"fsync run.zarr/{folder}" for folder in ("dropped", "dropped/1", "v", "v/c")]

    def test_a_copy_is_synced_before_it_gets_its_name(self, local, events):
        local.make_folder("v")
        local.create("a", b"x")
        events.clear()
        local.copy("a", "v/b")
        assert events == [
            "fsync run.zarr/v/b.partial",
            "rename run.zarr/v/b.partial run.zarr/v/b",
            "fsync run.zarr/v",
        ]

    def test_syncing_a_folder_that_was_taken_away_means_gone(self, local):
        with pytest.raises(StoreError) as caught:
            local.sync_folders(["none/0"])
        assert (caught.value.kind, caught.value.errno) == ("gone", errno.ENOENT)


class TestOpenStore:
    @pytest.mark.parametrize("form", [str, Path, "file://{}".format])
    def test_a_path_or_a_file_url_is_a_local_store(self, tmp_path, form):
        opened = open_store(form(tmp_path / "run.zarr"))
        assert isinstance(opened, LocalStore)
        assert opened.root == str(tmp_path / "run.zarr")

    def test_a_store_is_passed_through(self):
        store = MemoryStore()
        assert open_store(store) is store

    @pytest.mark.parametrize("url", ["s3://bucket/run.zarr", "gs://b", "https://host/run.zarr"])
    def test_another_scheme_is_refused_by_name(self, url):
        with pytest.raises(StoreError, match=url.partition(":")[0]) as caught:
            open_store(url)
        assert caught.value.kind == "scheme"

    @pytest.mark.parametrize("missing", [Readable, Listable, Writable])
    def test_an_object_that_lacks_a_capability_is_refused_by_name(self, missing):
        with pytest.raises(StoreError, match=f"Half can't hold a stream: .*{missing.__name__}") as caught:
            open_store(store_without(missing))
        assert caught.value.kind == "capability"

    @pytest.mark.parametrize("missing", [Readable, Listable])
    def test_a_reader_needs_a_store_that_can_be_read_and_listed(self, missing):
        with pytest.raises(StoreError, match=f"Half can't be read: .*{missing.__name__}") as caught:
            open_readable(store_without(missing))
        assert caught.value.kind == "capability"

    def test_a_reader_needs_no_store_that_can_be_written(self):
        half = store_without(Writable)
        assert open_readable(half) is half
        assert isinstance(open_readable("run.zarr"), LocalStore)
        with pytest.raises(StoreError, match="scheme 's3'"):
            open_readable("s3://bucket/run.zarr")


def store_without(missing: type) -> Any:
    have = [c for c in (Readable, Listable, Writable) if c is not missing]
    methods = {name: getattr(MemoryStore, name) for c in have for name in vars(c) if not name.startswith("_")}
    return type("Half", (), methods)()

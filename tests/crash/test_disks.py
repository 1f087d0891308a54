"""Real file systems that lose power, fill up, or turn read-only under ranks that are threads."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mpistream as ms
from mpistream import session
from mpistream.errors import StoreError
from mpistream.local_store import LocalStore
from tests.support.disks import BadDisk, LoopDisk, remount, tmpfs
from tests.support.ranks import MemoryTransport, run_ranks
from tests.support.scene import PLANE, assert_holds
from tests.support.verified import assert_no_damage, assert_sound
from tests.support.wait import wait_until

SHARD = {"time": 4, "y": 2, "x": 6}
OPTIONS = ms.Options(timeout=60, lease_ttl=100_000, writers="all")
N_CUTS = int(os.environ.get("MPISTREAM_TEST_CUTS", "10"))
N_BAD = int(os.environ.get("MPISTREAM_TEST_BAD", "2"))


@pytest.fixture(autouse=True)
def _threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "connect", lambda comm, timeout: comm)


def _opened(url: Path, comm: MemoryTransport) -> ms.StreamWriter:
    # Another writer of this process, which was cut off, may seem to be alive.
    if (url / ".mpistream/manifest.json").exists():
        return ms.write_resume(url, comm=comm, takeover=True, options=OPTIONS)
    schema = PLANE.schema(shard_shape=SHARD, chunk_shape={"time": 2})
    return ms.write_open(url, schema, comm=comm, takeover=True, options=OPTIONS)


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopDisk]:
    """A file system of the kind that the test names."""
    found = LoopDisk(tmp_path, request.param)
    yield found
    found.unmount()


@pytest.fixture
def bad_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BadDisk]:
    """A file system of the kind that the test names, on a disk where so many of the writes fail when it is told to."""
    found = BadDisk(tmp_path, *request.param)
    yield found
    found.mend()
    found.unmount()
    found.remove()


def _has_reached(told: list[int], goal: int) -> bool:
    return told[0] >= goal


def _check_told(url: Path, told: list[int]) -> int:
    """Check that all that was acknowledged is there, whole, and at most one commit more; return how many there are."""
    n = ms.open_reader(url).n_records
    assert told[0] <= n <= told[0] + 1
    for i in range(n):
        assert ms.read_record(url, "u", i).tobytes() == PLANE.whole("u", i).tobytes()
    assert_no_damage(url)
    told[0] = n
    return n


def _finish(url: Path, n: int) -> None:
    """Resume with n records, write one more, and look at all."""

    def last(comm: MemoryTransport) -> None:
        with _opened(url, comm) as w:
            assert w.n_records == n
            PLANE.write(w, n)

    run_ranks(2, last)
    assert_holds(url, PLANE, [0] * (n + 1))
    assert_sound(url)


@pytest.mark.parametrize("disk", ["xfs", "ext4"], indirect=True)
def test_power_that_is_lost_again_and_again_takes_nothing_that_was_acknowledged(disk: LoopDisk) -> None:
    """Cut off at random points of commits of 1 to 3 ranks, the store has all that was told, whole, and goes on."""
    seed = int(os.environ.get("MPISTREAM_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"MPISTREAM_TEST_SEED={seed}")
    rng = random.Random(seed)
    url, n, told = disk.path / "s", 0, [0]

    def job(comm: MemoryTransport) -> None:
        try:
            w = _opened(url, comm)
            if not w.is_committed("topo"):
                PLANE.write_statics(w)
            while True:
                PLANE.write(w, w.n_records)
                receipt = w.commit()
                told[0] = max(told[0], receipt.n_records)
        except ms.MPIStreamError:
            return

    for _ in range(N_CUTS):
        size, goal = rng.randint(1, 3), n + rng.randint(1, 3)
        ranks = threading.Thread(target=run_ranks, args=(size, job))
        ranks.start()
        wait_until(partial(_has_reached, told, goal), 60, f"{goal} records", every=0.002)
        threading.Event().wait(rng.random() * 0.05)  # a random point of the next commits
        disk.cut()
        ranks.join(60)
        assert not ranks.is_alive()
        disk.power_on()
        n = _check_told(url, told)
    _finish(url, n)


@pytest.mark.parametrize("disk", ["xfs", "ext4"], indirect=True)
def test_folder_of_a_disk_that_is_cut_off_is_never_synced(disk: LoopDisk) -> None:
    """XFS says that it synced a folder, of which it has thrown away what was to be written."""
    store = LocalStore(str(disk.path))
    store.stage("staged", [b"x"], sync=True)
    store.place("staged", "key")
    folder = os.open(disk.path, os.O_RDONLY)
    disk.cut()
    with pytest.MonkeyPatch.context() as patch:
        # Opened before it was cut off: a later open would meet that by itself.
        patch.setattr(os, "open", lambda *_: folder)
        with pytest.raises(StoreError) as caught:
            store.sync_folders(["key"])
    assert caught.value.errno == errno.EIO
    disk.power_on()
    assert store.read("key") is None


_BAD_DISKS = [("xfs", 100), ("xfs", 20), ("ext4", 100), ("ext4", 20)]


@pytest.mark.parametrize("bad_disk", _BAD_DISKS, indirect=True, ids=lambda kind: f"{kind[0]} {kind[1]}")
def test_disk_that_fails_to_write_again_and_again_is_one_error_and_takes_nothing(bad_disk: BadDisk) -> None:
    """With EIO from the device at random points every rank has the same errors, and what was told is on the disk.

    Where the file system lets it, the same writer tries again. Each round ends with a loss of power: what the system
    holds in memory is not what the disk has got.
    """
    seed = int(os.environ.get("MPISTREAM_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"MPISTREAM_TEST_SEED={seed}")
    rng = random.Random(seed)
    url, n, told, n_errors = bad_disk.path / "s", 0, [0], 0

    def job(comm: MemoryTransport) -> None:
        def tried(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except ms.MPIStreamError as error:
                number = getattr(error, "errno", None)
                errors[comm.rank].append((type(error).__name__, error.kind, error.rank, number, str(error)))
                return None

        w = tried(lambda: _opened(url, comm))
        if w is None:
            return
        if not w.is_committed("topo"):
            PLANE.write_statics(w)
        for _ in range(20):
            if w.n_records == w.n_committed:
                PLANE.write(w, w.n_records)
            receipt = tried(w.commit)
            if receipt is not None:
                told[0] = max(told[0], receipt.n_records)
            elif w._channel.failure is not None:
                return

    for _ in range(N_BAD):
        size, goal = rng.randint(1, 3), n + rng.randint(1, 3)
        errors: list[list[Any]] = [[] for _ in range(size)]
        ranks = threading.Thread(target=run_ranks, args=(size, job))
        ranks.start()
        wait_until(partial(_has_reached, told, goal), 60, f"{goal} records", every=0.002)
        threading.Event().wait(rng.random() * 0.05)  # a random point of the next commits
        bad_disk.go_bad()
        ranks.join(60)
        assert not ranks.is_alive()
        bad_disk.mend()
        assert errors == [errors[0]] * size
        assert {number for *_, number, _ in errors[0]} <= {errno.EIO, errno.EROFS}, errors[0]
        n_errors += len(errors[0])
        bad_disk.cut()
        bad_disk.power_on()
        n = _check_told(url, told)
    print(f"{N_BAD} rounds, {n_errors} errors, {n} records")
    assert n_errors
    _finish(url, n)


@pytest.mark.parametrize("bad_disk", [("xfs", 100), ("ext4", 100)], indirect=True, ids=lambda kind: kind[0])
def test_folder_is_not_synced_when_the_disk_failed_before_it_was(bad_disk: BadDisk) -> None:
    """That a journal could not be written is told once, to whoever waited for it: here, another program."""
    store = LocalStore(str(bad_disk.path))
    store.stage("staged", [b"old"], sync=True)
    store.place("staged", "key")
    store.stage("other", [b"x"], sync=True)
    store.stage("staged", [b"new"], sync=True)
    store.sync_folders(["key"])
    store.place("staged", "key")
    bad_disk.go_bad()
    other = os.open(bad_disk.path / "other", os.O_WRONLY)
    os.ftruncate(other, 0)
    with pytest.raises(OSError, match="Input/output error"):
        os.fsync(other)
    os.close(other)
    bad_disk.mend()
    with pytest.raises(StoreError) as caught:
        store.sync_folders(["key"])
    assert caught.value.errno in (errno.EIO, errno.EROFS)
    bad_disk.cut()
    bad_disk.power_on()
    assert store.read("key") == b"old"


def _fill(folder: Path) -> Callable[[], None]:
    """Take all bytes that are left; return what gives them back."""
    with open(folder / "ballast", "wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return (folder / "ballast").unlink


def _fill_inodes(folder: Path) -> Callable[[], None]:
    made = []
    try:
        for i in range(100_000):
            (folder / f"ballast-{i}").touch()
            made.append(folder / f"ballast-{i}")
    except OSError as error:
        assert error.errno == errno.ENOSPC

    def give_back() -> None:
        for path in made:
            path.unlink()

    return give_back


def _forbid(folder: Path) -> Callable[[], None]:
    remount(folder, "ro")
    return lambda: remount(folder, "rw")


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("take", "number", "options"),
    [
        (_fill, errno.ENOSPC, "size=2m"),
        (_fill_inodes, errno.ENOSPC, "nr_inodes=200"),
        (_forbid, errno.EROFS, "size=2m"),
    ],
    ids=["no bytes", "no inodes", "read-only"],
)
def test_disk_that_is_full_or_read_only_is_one_error_and_then_goes_on(
    tmp_path: Path, take: Any, number: int, options: str, n_ranks: int
) -> None:
    """Every rank has the same error, readers see what is committed, and with room the same writer goes on."""
    errors: list[tuple[Any, ...]] = []
    with tmpfs(tmp_path / "disk", options) as folder:
        url = folder / "s"

        def job(comm: MemoryTransport) -> None:
            with _opened(url, comm) as w:
                PLANE.write_statics(w)
                for i in range(3):
                    PLANE.write(w, i)
                w.commit()
                w._channel.exchange("all here")
                if comm.rank == 0:
                    give_back.append(take(folder))
                w._channel.exchange("all here")
                PLANE.write(w, 3)
                for _ in range(2):
                    try:
                        w.commit()
                    except ms.CommitError as error:
                        errors.append((error.kind, error.errno, str(error)))
                w._channel.exchange("all here")
                if comm.rank == 0:
                    assert_holds(url, PLANE, [0] * 3)
                    give_back[0]()
                w._channel.exchange("all here")
                assert w.commit().n_records == 4
                PLANE.write(w, 4)

        give_back: list[Callable[[], None]] = []
        run_ranks(n_ranks, job)
        assert len(errors) == 2 * n_ranks
        assert {(kind, found) for kind, found, _ in errors} == {("io", number)}
        assert len({text for _, _, text in errors}) <= 2
        assert_holds(url, PLANE, [0] * 5)
        assert_sound(url)

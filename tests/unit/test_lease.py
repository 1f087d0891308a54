"""The lease: how a writer is judged, how the next one waits, and how the keeper refreshes."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistream.lease as lease_module
from mpistream.errors import FormatError, StoreError
from mpistream.lease import Lease, LeaseKeeper, is_dead_at_once, read_lease, wait_until_free
from mpistream.local_store import LocalStore
from mpistream.manifest import LEASE_KEY, stage_folder
from mpistream.memory_store import MemoryStore
from mpistream.refresher import Refresher
from mpistream.store import Store

DEADLINE = 30.0
FOLDER = stage_folder(1, 0)
NO_PROC = not os.path.exists("/proc/self/stat")


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path) -> Store:
    made: Store = LocalStore(tmp_path / "run.zarr") if request.param == "local" else MemoryStore()
    made.make_folder(FOLDER)
    return made


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.001)


def child_env() -> dict[str, str]:
    """Return an environment in which a child process finds the library where this one did."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def elsewhere(**changes: Any) -> Lease:
    """Return a lease of a writer on another host: only waiting tells."""
    here = Lease.of_this_process("run-a", 120)
    there = {"host": "node17", "boot_id": "another boot", "pid": 4711, **changes}
    return dataclasses.replace(here, **there)


def put(store: Store, data: Lease | bytes) -> None:
    store.delete(LEASE_KEY)
    assert store.create(LEASE_KEY, data.to_bytes() if isinstance(data, Lease) else data)


class FakeTime:
    """A clock that moves only in `sleep`, and then does what was planned for the time it passes."""

    def __init__(self, plan: dict[float, Callable[[], object]] | None = None) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.plan = {self.now + after: act for after, act in (plan or {}).items()}

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds
        for when in sorted(self.plan):
            if when <= self.now:
                self.plan.pop(when)()


def wait(store: Store, fake: FakeTime, *, takeover: bool = False, poll: float = 1.0) -> None:
    wait_until_free(store, takeover=takeover, clock=fake.clock, sleep=fake.sleep, poll=poll)


@contextlib.contextmanager
def child(code: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python code in a child process that ends, at the latest, with the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_env(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


HOLD = """
import sys
from mpistream.lease import Lease
print(Lease.of_this_process("run-child", 120).to_bytes().decode().replace("\\n", ""), flush=True)
sys.stdin.read()
"""


def lease_of(process: subprocess.Popen[str]) -> Lease:
    assert process.stdout is not None
    return Lease.from_bytes(process.stdout.readline().encode())


class TestDocument:
    def test_it_describes_this_process(self):
        lease = Lease.of_this_process("run-a", 60)
        assert (lease.pid, lease.host) == (os.getpid(), os.uname().nodename)
        assert (lease.run_id, lease.counter, lease.ttl, lease.closed) == ("run-a", 0, 60, False)
        assert (lease.slurm_job_id, lease.slurm_restart_count) == (None, None)

    @pytest.mark.skipif(NO_PROC, reason="needs /proc")
    def test_the_start_time_is_field_22_of_the_stat_file(self):
        with open("/proc/self/stat") as file:
            text = file.read()
        # No blank in the name of this process's command, or this simple split is wrong.
        expected = int(text.split()[21]) if text.count(" ") == 51 else int(text.rpartition(") ")[2].split()[19])
        assert Lease.of_this_process("run-a", 60).pid_started == expected

    def test_slurm_variables_are_noted(self, monkeypatch):
        monkeypatch.setenv("SLURM_JOB_ID", "42")
        first = Lease.of_this_process("run-a", 60)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
        fourth = Lease.of_this_process("run-a", 60)
        assert (first.slurm_job_id, first.slurm_restart_count) == ("42", 0)
        assert (fourth.slurm_job_id, fourth.slurm_restart_count) == ("42", 3)

    def test_a_system_without_proc_gives_none(self, monkeypatch):
        without_proc(monkeypatch)
        lease = Lease.of_this_process("run-a", 60)
        assert (lease.boot_id, lease.pid_namespace, lease.pid_started) == (None, None, None)
        assert Lease.from_bytes(lease.to_bytes()) == lease

    @given(
        st.builds(
            Lease,
            pid=st.integers(1, 2**31 - 1),
            ttl=st.floats(1e-3, 1e8),
        )
    )
    def test_it_reads_back_as_it_was_written(self, lease):
        assert Lease.from_bytes(lease.to_bytes()) == lease

    def test_keys_of_a_later_version_are_passed_over(self):
        lease = elsewhere()
        document = {**json.loads(lease.to_bytes()), "later": [1]}
        assert Lease.from_bytes(json.dumps(document).encode()) == lease

    @pytest.mark.parametrize(
        "data",
        [b"", b"\0" * 4096, b"{", b"[]", b"null", b'"lease"', b"\xff\xfe", b"[" * 100_000, b"9" * 10_000],
        ids=["empty", "zeros", "cut", "list", "null", "text", "no-utf-8", "deep", "long"],
    )
    def test_damaged_bytes_are_a_format_error_that_names_the_key(self, data):
        with pytest.raises(FormatError, match=LEASE_KEY) as caught:
            Lease.from_bytes(data)
        assert caught.value.__context__ is None, "no traceback of a parser"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("host", None),
            ("host", 1),
            ("boot_id", 1),
            ("pid", "1"),
            ("pid", 1.0),
            ("pid", True),
            ("pid", 0),
            ("pid", -1),
            ("pid", 2**31),
            ("pid_started", "1"),
            ("slurm_restart_count", 1.5),
            ("run_id", None),
            ("counter", None),
            ("counter", False),
            ("ttl", 0),
            ("ttl", -1.0),
            ("ttl", float("nan")),
            ("ttl", float("inf")),
            ("ttl", True),
            ("closed", 0),
            ("closed", None),
        ],
    )
    def test_a_wrong_value_is_a_format_error_that_names_it(self, name, value):
        document = {**json.loads(elsewhere().to_bytes()), name: value}
        with pytest.raises(FormatError, match=f"{LEASE_KEY}.*{name} is"):
            Lease.from_bytes(json.dumps(document).encode())

    @pytest.mark.parametrize("name", ["host", "pid", "run_id", "counter", "ttl", "closed"])
    def test_a_missing_value_is_a_format_error_that_names_it(self, name):
        document = json.loads(elsewhere().to_bytes())
        del document[name]
        with pytest.raises(FormatError, match=f"{LEASE_KEY}.*{name} is"):
            Lease.from_bytes(json.dumps(document).encode())

    def test_a_store_without_a_lease_gives_none(self, store):
        assert read_lease(store) is None
        put(store, elsewhere())
        assert read_lease(store) == elsewhere()
        put(store, b"")
        with pytest.raises(FormatError):
            read_lease(store)


def without_proc(monkeypatch: pytest.MonkeyPatch, below: str = "/proc/") -> None:
    """Take away what lies below a folder of /proc."""
    real_open, real_readlink = builtins.open, os.readlink

    def no_open(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).startswith(below):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real_open(path, *args, **kwargs)

    def no_readlink(path: Any, **kwargs: Any) -> str:
        if str(path).startswith(below):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real_readlink(path, **kwargs)

    monkeypatch.setattr(builtins, "open", no_open)
    monkeypatch.setattr(os, "readlink", no_readlink)


class TestVerdict:
    def test_a_closed_lease_is_dead(self):
        assert is_dead_at_once(elsewhere(closed=True)) is True
        assert is_dead_at_once(dataclasses.replace(Lease.of_this_process("r", 1), closed=True)) is True

    def test_another_boot_only_waiting_tells(self):
        assert is_dead_at_once(elsewhere()) is None

    def test_another_pid_namespace_only_waiting_tells(self):
        """In another container the same pid is another process."""
        lease = dataclasses.replace(Lease.of_this_process("r", 1), pid_namespace="pid:[1]")
        assert is_dead_at_once(lease) is None

    @pytest.mark.parametrize("name", ["boot_id", "pid_namespace"])
    def test_a_lease_without_identity_only_waiting_tells(self, name, monkeypatch):
        nothing: dict[str, Any] = {name: None}
        lease = dataclasses.replace(Lease.of_this_process("r", 1), **nothing)
        assert is_dead_at_once(lease) is None
        without_proc(monkeypatch)
        assert is_dead_at_once(lease) is None
        assert is_dead_at_once(Lease.of_this_process("r", 1)) is None

    @pytest.mark.skipif(NO_PROC, reason="needs /proc")
    def test_two_systems_that_hide_their_boot_id_are_not_the_same(self, monkeypatch):
        """The first pid namespace has the same number on every Linux host."""
        without_proc(monkeypatch, "/proc/sys/")
        lease = dataclasses.replace(Lease.of_this_process("r", 1), pid_started=1)
        assert (lease.boot_id, lease.pid_namespace is None) == (None, False)
        assert is_dead_at_once(lease) is None

    @pytest.mark.skipif(NO_PROC, reason="needs /proc")
    class TestByPid:
        def test_this_process_is_alive(self):
            assert is_dead_at_once(Lease.of_this_process("r", 1)) is False

        def test_the_host_name_does_not_count(self):
            """Containers that share the pid namespace have names of their own."""
            lease = dataclasses.replace(Lease.of_this_process("r", 1), host="another")
            assert is_dead_at_once(lease) is False

        def test_a_killed_process_is_dead_as_a_zombie_and_after(self):
            with child(HOLD) as process:
                lease = lease_of(process)
                assert lease.pid == process.pid
                assert is_dead_at_once(lease) is False
                process.kill()
                # Wait until it has ended, but leave it a zombie.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                with open(f"/proc/{process.pid}/stat") as file:
                    assert ") Z " in file.read()
                assert is_dead_at_once(lease) is True
                process.wait(DEADLINE)
                assert is_dead_at_once(lease) is True

        def test_a_stopped_process_is_alive(self):
            with child(HOLD) as process:
                lease = lease_of(process)
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
                assert is_dead_at_once(lease) is False

        def test_a_pid_that_was_given_to_another_process_is_dead(self):
            lease = Lease.of_this_process("r", 1)
            assert lease.pid_started is not None
            other = dataclasses.replace(lease, pid_started=lease.pid_started - 1)
            assert is_dead_at_once(other) is True

        def test_a_command_with_blanks_and_parentheses_is_read_right(self):
            name = "open('/proc/self/comm', 'w').write(') Z 1 (')\n"
            with child(name + HOLD) as process:
                lease = lease_of(process)
                with open(f"/proc/{process.pid}/stat") as file:
                    assert ") Z 1 (" in file.read()
                assert is_dead_at_once(lease) is False

        def test_a_process_of_another_user_is_alive(self, monkeypatch):
            def refuse(pid: int, signal: int) -> None:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

            monkeypatch.setattr(os, "kill", refuse)
            assert is_dead_at_once(Lease.of_this_process("r", 1)) is False

        def test_a_process_that_proc_hides_is_not_taken_for_dead(self, monkeypatch):
            """With hidepid the files of other users' processes are not there, though they live."""
            lease = Lease.of_this_process("r", 1)
            without_proc(monkeypatch, f"/proc/{os.getpid()}/")
            assert is_dead_at_once(lease) is None

        def test_without_a_noted_start_time_only_waiting_tells(self):
            lease = dataclasses.replace(Lease.of_this_process("r", 1), pid_started=None)
            assert is_dead_at_once(lease) is None

        def test_a_live_pid_counts_more_than_a_requeued_job(self, monkeypatch):
            monkeypatch.setenv("SLURM_JOB_ID", "42")
            lease = Lease.of_this_process("r", 1)
            monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
            assert is_dead_at_once(lease) is False

    @pytest.mark.parametrize(
        ("theirs", "ours", "expected"),
        [
            (("42", 0), ("42", "1"), True),
            (("42", 1), ("42", "2"), True),
            (("42", None), ("42", "1"), True),
            (("42", 0), ("42", None), None),
            (("42", 1), ("42", "1"), None),
            (("42", 2), ("42", "1"), None),
            (("42", 0), ("43", "1"), None),
            (("42", 0), ("42", "many"), None),
            (("42", 0), (None, "1"), None),
            ((None, None), ("42", "1"), None),
            ((None, None), (None, "1"), None),
        ],
    )
    def test_a_slurm_job_that_was_requeued_since_is_dead(self, monkeypatch, theirs, ours, expected):
        for name, value in zip(("SLURM_JOB_ID", "SLURM_RESTART_COUNT"), ours, strict=True):
            if value is not None:
                monkeypatch.setenv(name, value)
        lease = elsewhere(slurm_job_id=theirs[0], slurm_restart_count=theirs[1])
        assert is_dead_at_once(lease) is expected


class TestWait:
    def test_a_store_without_a_lease_is_free(self, store):
        fake = FakeTime()
        wait(store, fake)
        assert fake.slept == []

    def test_a_closed_lease_is_free(self, store):
        put(store, elsewhere(closed=True))
        fake = FakeTime()
        wait(store, fake)
        assert fake.slept == []

    def test_a_requeued_job_does_not_wait_for_itself(self, store, monkeypatch):
        put(store, elsewhere(slurm_job_id="42", slurm_restart_count=0))
        monkeypatch.setenv("SLURM_JOB_ID", "42")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        fake = FakeTime()
        wait(store, fake)
        assert fake.slept == []

    @pytest.mark.parametrize("data", [Lease.of_this_process("run-a", 120), elsewhere(), b"", b"{}"])
    def test_takeover_never_waits(self, store, data):
        put(store, data)
        fake = FakeTime()
        wait(store, fake, takeover=True)
        assert fake.slept == []

    @pytest.mark.skipif(NO_PROC, reason="needs /proc")
    def test_an_open_writer_of_this_process_is_refused_at_once(self, store):
        put(store, Lease.of_this_process("run-a", 120))
        fake = FakeTime()
        with pytest.raises(StoreError, match="this same process") as caught:
            wait(store, fake)
        assert (caught.value.kind, fake.slept) == ("lease", [])

    @pytest.mark.skipif(NO_PROC, reason="needs /proc")
    def test_the_refusal_tells_all_that_is_known_and_the_ways_out(self, store, monkeypatch):
        monkeypatch.setenv("SLURM_JOB_ID", "4242")
        with child(HOLD) as process:
            lease = lease_of(process)
            put(store, lease)
            with pytest.raises(StoreError) as caught:
                wait(store, FakeTime())
        known = [store.url, lease.host, str(lease.pid), "run-child", "4242", "wait", "takeover=True"]
        assert [k for k in known if k not in str(caught.value)] == []

    @pytest.mark.skipif(NO_PROC, reason="needs /proc")
    def test_the_store_of_a_killed_writer_is_free_at_once(self, store):
        with child(HOLD) as process:
            put(store, lease_of(process))
            process.kill()
            process.wait(DEADLINE)
        fake = FakeTime()
        wait(store, fake)
        assert fake.slept == []

    @pytest.mark.parametrize("poll", [0.3, 1.0, 7.0, 500.0])
    def test_an_unchanged_lease_is_free_after_its_ttl(self, store, poll):
        put(store, elsewhere(ttl=30))
        fake = FakeTime()
        wait(store, fake, poll=poll)
        assert sum(fake.slept) == pytest.approx(30)
        assert max(fake.slept) <= poll

    @pytest.mark.parametrize("after", [0.5, 15, 29.9, 30])
    def test_a_refreshed_lease_is_refused_as_soon_as_it_is_seen(self, store, after):
        put(store, elsewhere(ttl=30, slurm_job_id="42", slurm_restart_count=1))
        fake = FakeTime({after: lambda: put(store, elsewhere(ttl=30, counter=1))})
        with pytest.raises(StoreError, match=r"node17.*4711.*takeover") as caught:
            wait(store, fake)
        assert caught.value.kind == "lease"
        assert sum(fake.slept) <= after + 1

    def test_a_waiter_that_was_stopped_itself_looks_once_more(self, store):
        """Both were stopped and go on: the time is over, but the other one has refreshed."""
        put(store, elsewhere(ttl=30))
        fake = FakeTime()

        def long_sleep(seconds: float) -> None:
            fake.now += 1000
            put(store, elsewhere(ttl=30, counter=1))

        with pytest.raises(StoreError, match="alive"):
            wait_until_free(store, takeover=False, clock=fake.clock, sleep=long_sleep)

    def test_a_waiter_that_was_stopped_right_after_a_look_looks_once_more(self):
        fake = FakeTime()

        class SlowStore(MemoryStore):
            def read(self, key: str) -> bytes | None:
                data = super().read(key)
                if fake.slept and data == elsewhere(ttl=30).to_bytes():
                    fake.now += 1000
                    put(self, elsewhere(ttl=30, counter=1))
                return data

        store = SlowStore()
        store.make_folder(FOLDER)
        put(store, elsewhere(ttl=30))
        with pytest.raises(StoreError, match="alive"):
            wait(store, fake)

    def test_a_writer_that_closes_meanwhile_sets_it_free(self, store):
        put(store, elsewhere(ttl=30))
        fake = FakeTime({10: lambda: put(store, elsewhere(ttl=30, counter=1, closed=True))})
        wait(store, fake)
        assert sum(fake.slept) == pytest.approx(10)

    def test_a_lease_that_cannot_be_read_and_changes_is_somebodys(self, store):
        put(store, b"{}")
        fake = FakeTime({10: lambda: put(store, b"{ }")})
        with pytest.raises(StoreError, match="its lease can't be read, and changes") as caught:
            wait(store, fake)
        assert caught.value.kind == "lease"
        assert sum(fake.slept) == pytest.approx(10)

    def test_a_lease_without_the_newest_field_is_one(self, store):
        document = json.loads(elsewhere(closed=True).to_bytes())
        del document["failed"]
        put(store, json.dumps(document).encode())
        fake = FakeTime()
        wait(store, fake)
        assert fake.slept == []
        assert read_lease(store) == elsewhere(closed=True)

    def test_a_lease_that_vanishes_sets_it_free(self, store):
        put(store, elsewhere(ttl=30))
        fake = FakeTime({10: lambda: store.delete(LEASE_KEY)})
        wait(store, fake)
        assert sum(fake.slept) == pytest.approx(10)

    def test_another_run_is_waited_for_anew(self, store):
        put(store, elsewhere(ttl=30))
        fake = FakeTime({20: lambda: put(store, elsewhere(ttl=50, run_id="run-b"))})
        wait(store, fake)
        assert sum(fake.slept) == pytest.approx(20 + 50)

    def test_another_run_that_goes_on_is_refused_by_its_own_name(self, store):
        put(store, elsewhere(ttl=30))
        fake = FakeTime(
            {
                20: lambda: put(store, elsewhere(ttl=50, run_id="run-b")),
                40: lambda: put(store, elsewhere(ttl=50, run_id="run-b", counter=1)),
            }
        )
        with pytest.raises(StoreError, match="run-b"):
            wait(store, fake)

    @pytest.mark.skipif(NO_PROC, reason="needs /proc")
    def test_another_run_that_is_certainly_alive_is_refused_at_once(self, store):
        put(store, elsewhere(ttl=30))
        fake = FakeTime({20: lambda: put(store, Lease.of_this_process("run-b", 50))})
        with pytest.raises(StoreError, match="run-b"):
            wait(store, fake)
        assert sum(fake.slept) == pytest.approx(20)

    @pytest.mark.parametrize("data", [b"", b"\0\0", b"{}"])
    def test_a_damaged_lease_is_free_after_the_default_ttl(self, store, data):
        """A loss of power may leave one; the store must not stay closed for good."""
        put(store, data)
        fake = FakeTime()
        wait(store, fake)
        assert sum(fake.slept) == pytest.approx(120)

    def test_a_damaged_lease_that_is_mended_is_waited_for_like_any_other(self, store):
        put(store, b"")
        fake = FakeTime(
            {
                50: lambda: put(store, elsewhere(counter=7)),
                65: lambda: put(store, elsewhere(counter=8)),
            }
        )
        with pytest.raises(StoreError, match="alive"):
            wait(store, fake)
        assert sum(fake.slept) == pytest.approx(65)

    def test_waiting_is_announced_once(self, store, caplog):
        put(store, elsewhere(ttl=30))
        wait(store, FakeTime())
        assert len(caplog.records) == 1
        for known in (store.url, "node17", "30 s", "run-a"):
            assert known in caplog.text

    def test_an_error_of_the_store_is_passed_on(self):
        store = FailingStore()
        store.failures["read"] = StoreError("disk", kind="io", errno=errno.EIO)
        with pytest.raises(StoreError, match="disk"):
            wait(store, FakeTime())


class FailingStore(MemoryStore):
    """A memory store with calls that are counted and can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.make_folder(FOLDER)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failures:
            raise self.failures[name]

    def read(self, key: str) -> bytes | None:
        self._call("read")
        return super().read(key)

    def stage(self, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        self._call("stage")
        return super().stage(key, pieces, sync=sync)

    def place(self, staged: str, key: str) -> None:
        self._call("place")
        super().place(staged, key)


@pytest.fixture
def fake() -> FakeTime:
    return FakeTime()


@pytest.fixture
def keeper(store, fake) -> LeaseKeeper:
    made = LeaseKeeper(store, Lease.of_this_process("run-a", 80), FOLDER, clock=fake.clock)
    made.write()
    return made


class TestKeeper:
    def test_the_first_lease_is_staged_and_placed(self, store, keeper):
        assert read_lease(store) == keeper.lease
        assert keeper.lease.counter == 0
        assert store.list(FOLDER) == []

    def test_without_the_stage_folder_the_first_lease_is_refused(self, store):
        store.delete_tree("")
        keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 80), FOLDER)
        with pytest.raises(StoreError) as caught:
            keeper.write()
        assert caught.value.kind == "gone"
        assert read_lease(store) is None

    def test_it_refreshes_when_an_eighth_of_the_ttl_has_passed(self, store, keeper, fake):
        seen = []
        for _ in range(35):
            fake.now += 1
            keeper.refresh_if_due()
            lease = read_lease(store)
            assert lease is not None
            seen.append(lease.counter)
        assert seen == [0] * 9 + [1] * 10 + [2] * 10 + [3] * 6
        assert (keeper.lost, keeper.last_error, store.list(FOLDER)) == (None, None, [])

    def test_a_refresh_changes_the_counter_only(self, store, keeper, fake):
        first = keeper.lease
        fake.now += 10
        keeper.refresh_if_due()
        assert read_lease(store) == dataclasses.replace(first, counter=1)

    def test_a_call_before_it_is_due_touches_no_file(self, fake):
        store = FailingStore()
        keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 80), FOLDER, clock=fake.clock)
        keeper.write()
        store.calls.clear()
        fake.now += 9.9
        keeper.refresh_if_due()
        assert store.calls == []

    def test_it_stops_at_a_foreign_run_and_leaves_that_lease_alone(self, store, keeper, fake):
        foreign = elsewhere(run_id="run-b")
        put(store, foreign)
        for _ in range(3):
            fake.now += 10
            keeper.refresh_if_due()
        keeper.close()
        assert (keeper.lost, read_lease(store)) == ("run-b", foreign)

    def test_close_leaves_a_foreign_lease_alone(self, store, keeper):
        foreign = elsewhere(run_id="run-b")
        put(store, foreign)
        keeper.close()
        assert (keeper.lost, read_lease(store)) == ("run-b", foreign)

    def test_it_stops_when_it_is_fenced(self, store, keeper, fake):
        """The stage folder is the fence: without it not even the lease can be replaced."""
        before = read_lease(store)
        store.move("/".join(FOLDER.split("/")[:-1]), "trash")
        fake.now += 10
        keeper.refresh_if_due()
        assert isinstance(keeper.last_error, StoreError)
        assert keeper.last_error.kind == "gone"
        store.make_folder(FOLDER)
        fake.now += 10
        keeper.refresh_if_due()
        keeper.close()
        assert read_lease(store) == before

    def test_fenced_between_stage_and_place_it_does_not_replace_the_lease_of_the_next_writer(self, fake):
        store = FailingStore()
        keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 80), FOLDER, clock=fake.clock)
        keeper.write()
        real_place = store.place

        def late(staged: str, key: str) -> None:
            store.delete_tree(FOLDER)
            put(store, elsewhere(run_id="run-b"))
            real_place(staged, key)

        store.place = late  # type: ignore[method-assign]
        fake.now += 10
        keeper.refresh_if_due()
        keeper.close()
        assert read_lease(store) == elsewhere(run_id="run-b")

    @pytest.mark.parametrize("call", ["read", "stage", "place"])
    @pytest.mark.parametrize(
        "error", [StoreError("full", kind="io", errno=errno.ENOSPC), ValueError("a bug"), MemoryError()]
    )
    def test_a_failing_refresh_is_kept_and_tried_again_at_the_next_interval(self, fake, call, error):
        store = FailingStore()
        keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 80), FOLDER, clock=fake.clock)
        keeper.write()
        store.failures[call] = error
        fake.now += 10
        keeper.refresh_if_due()
        assert keeper.last_error is error
        store.calls.clear()
        keeper.refresh_if_due()
        assert store.calls == []
        store.failures.clear()
        fake.now += 10
        keeper.refresh_if_due()
        lease = read_lease(store)
        assert lease is not None
        assert lease.counter == keeper.lease.counter > 0

    def test_what_could_not_be_placed_is_removed(self, fake):
        store = FailingStore()
        keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 80), FOLDER, clock=fake.clock)
        store.failures["place"] = StoreError("quota", kind="io", errno=errno.EDQUOT)
        with pytest.raises(StoreError, match="quota"):
            keeper.write()
        fake.now += 10
        keeper.refresh_if_due()
        assert store.list(FOLDER) == []

    def test_a_rename_that_was_sent_twice_is_no_fence(self, fake):
        """NFS repeats a rename whose answer was lost, and then says that the source is gone."""
        store = FailingStore()
        keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 80), FOLDER, clock=fake.clock)
        keeper.write()
        real_place = store.place

        def twice(staged: str, key: str) -> None:
            real_place(staged, key)
            real_place(staged, key)

        store.place = twice  # type: ignore[method-assign]
        for _ in range(2):
            fake.now += 10
            keeper.refresh_if_due()
        lease = read_lease(store)
        assert lease is not None
        assert (lease.counter, keeper.last_error) == (2, None)

    @pytest.mark.parametrize("data", [None, b"", b"{}"])
    def test_a_lost_or_damaged_lease_is_written_again(self, store, keeper, fake, data):
        store.delete(LEASE_KEY)
        if data is not None:
            put(store, data)
        fake.now += 10
        keeper.refresh_if_due()
        assert read_lease(store) == keeper.lease
        assert keeper.lease.counter == 1

    def test_close_writes_a_closed_lease_once(self, store, keeper, fake):
        keeper.close()
        closed = read_lease(store)
        assert closed is not None
        assert (closed.closed, closed.counter) == (True, 1)
        wait(store, fake)
        fake.now += 100
        keeper.refresh_if_due()
        keeper.close()
        assert read_lease(store) == closed
        assert store.list(FOLDER) == []

    def test_a_refresh_that_meets_close_does_not_open_the_lease_again(self, store, keeper, fake):
        lock = keeper._lock

        class LateLock:
            """Let the close run between the check and the lock of a refresh."""

            def acquire(self, blocking: bool = True) -> bool:
                keeper._lock = lock
                keeper.close()
                return lock.acquire(blocking=blocking)

        keeper._lock = LateLock()
        fake.now += 10
        keeper.refresh_if_due()
        closed = read_lease(store)
        assert closed is not None
        assert (closed.closed, closed.counter) == (True, 1)

    def test_close_never_raises(self, fake):
        store = FailingStore()
        keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 80), FOLDER, clock=fake.clock)
        keeper.write()
        error = store.failures["stage"] = StoreError("full", kind="io", errno=errno.ENOSPC)
        keeper.close()
        assert keeper.last_error is error

    @pytest.mark.skipif(NO_PROC, reason="needs /proc")
    def test_a_second_writer_is_refused_until_the_first_one_closes(self, store, keeper, fake):
        with pytest.raises(StoreError, match="this same process"):
            wait(store, fake)
        keeper.close()
        wait(store, fake)


def counter_of(store: Store) -> int:
    lease = read_lease(store)
    assert lease is not None
    return lease.counter


@pytest.fixture
def running(store, refresher) -> Iterator[LeaseKeeper]:
    """A keeper that refreshes every 0.05 s from its thread."""
    made = LeaseKeeper(store, Lease.of_this_process("run-a", 0.01), FOLDER)
    made.write()
    made.start()
    yield made
    made.close()


def thread_of(keeper: LeaseKeeper) -> threading.Thread:
    assert keeper._thread is not None
    return keeper._thread


@pytest.fixture
def refresher(monkeypatch: pytest.MonkeyPatch) -> Refresher:
    """A process without other writers: its thread ends with the keepers of the test."""
    made = Refresher()
    monkeypatch.setattr(lease_module, "_refresher", made)
    return made


@pytest.mark.usefixtures("refresher")
class TestThread:
    def test_it_refreshes_until_close_joins_it(self, store, running):
        wait_for(lambda: counter_of(store) >= 3)
        thread = thread_of(running)
        assert (thread.daemon, thread.is_alive()) == (True, True)
        running.close()
        assert not thread.is_alive()
        closed = read_lease(store)
        assert closed is not None
        assert closed.closed
        assert (running.last_error, running.lost, store.list(FOLDER)) == (None, None, [])

    def test_a_waiting_writer_sees_it_refresh(self, store, running, monkeypatch):
        """As from another host, where the pid says nothing."""
        monkeypatch.setattr(lease_module, "_system", lambda: ("another boot", "pid:[1]"))
        end = time.monotonic() + DEADLINE

        def sleep(seconds: float) -> None:
            assert time.monotonic() < end, "it did not refresh in time"
            time.sleep(0.02)

        with pytest.raises(StoreError, match="alive"):
            wait_until_free(store, takeover=False, clock=lambda: 0, sleep=sleep)

    def test_it_ends_at_a_foreign_run(self, store, running):
        # Whatever refresh is under way: the foreign lease is there to stay once it was seen.
        def is_lost() -> bool:
            if running.lost is None:
                put_over(store, elsewhere(run_id="run-b"))
            return running.lost is not None

        wait_for(is_lost)
        wait_for(lambda: not thread_of(running).is_alive())
        assert running.lost == "run-b"

    def test_it_ends_when_it_is_fenced(self, store, running):
        store.delete_tree(FOLDER)
        wait_for(lambda: not thread_of(running).is_alive())
        assert isinstance(running.last_error, StoreError)
        assert running.last_error.kind == "gone"

    def test_it_goes_on_after_other_failures(self):
        store = FailingStore()
        keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 0.01), FOLDER)
        keeper.write()
        store.failures["stage"] = StoreError("full", kind="io", errno=errno.ENOSPC)
        keeper.start()
        wait_for(lambda: keeper.last_error is not None)
        store.failures.clear()
        counter = counter_of(store)
        wait_for(lambda: counter_of(store) > counter)
        keeper.close()

    def test_it_ends_with_a_writer_that_was_forgotten(self, store):
        keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 0.01), FOLDER)
        keeper.write()
        keeper.start()
        thread = thread_of(keeper)
        wait_for(lambda: counter_of(store) >= 1)
        del keeper
        gc.collect()
        wait_for(lambda: not thread.is_alive())

    def test_a_process_that_may_start_no_thread_refreshes_in_its_calls(self, store, keeper, fake, monkeypatch):
        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        keeper.start()
        assert "can't start" in str(keeper.last_error)
        fake.now += 10
        keeper.refresh_if_due()
        keeper.close()
        closed = read_lease(store)
        assert closed is not None
        assert (closed.counter, closed.closed) == (2, True)

    def test_a_refresh_that_hangs_holds_up_neither_calls_nor_close(self, monkeypatch):
        monkeypatch.setattr(lease_module, "_CLOSE_TIMEOUT", 0.05)
        is_hanging, go_on = threading.Event(), threading.Event()

        class HangingStore(FailingStore):
            def read(self, key: str) -> bytes | None:
                is_hanging.set()
                assert go_on.wait(DEADLINE)
                return super().read(key)

        store = HangingStore()
        keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 0.01), FOLDER)
        keeper.write()
        keeper.start()
        try:
            assert is_hanging.wait(DEADLINE)
            # Each of these would wait for `go_on` if it took part in the refresh.
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                keeper.refresh_if_due()
            keeper.close()
            assert thread_of(keeper).is_alive()
        finally:
            go_on.set()
            thread_of(keeper).join(DEADLINE)
        assert not thread_of(keeper).is_alive()

    def test_all_keepers_of_a_process_share_one_thread(self):
        """Each is refreshed at its own pace, and the thread ends with the last of them."""
        stores = [MemoryStore() for _ in range(3)]
        keepers = []
        for store, ttl in zip(stores, (0.01, 0.01, 1000.0), strict=True):
            store.make_folder(FOLDER)
            keeper = LeaseKeeper(store, Lease.of_this_process("run-a", ttl), FOLDER)
            keeper.write()
            keeper.start()
            keepers.append(keeper)
        (thread,) = {thread_of(keeper) for keeper in keepers}
        wait_for(lambda: min(counter_of(store) for store in stores[:2]) >= 2)
        assert counter_of(stores[2]) == 0
        keepers[0].close()
        closed, counter = counter_of(stores[0]), counter_of(stores[1])
        wait_for(lambda: counter_of(stores[1]) > counter)
        assert counter_of(stores[0]) == closed
        keepers[1].close()
        assert thread.is_alive()
        keepers[2].close()
        assert not thread.is_alive()
        again = LeaseKeeper(stores[0], Lease.of_this_process("run-a", 0.01), FOLDER)
        again.start()
        counter = counter_of(stores[0])
        wait_for(lambda: counter_of(stores[0]) != counter)
        again.close()

    def test_a_lease_with_a_short_ttl_is_refreshed_beside_one_with_a_long_ttl(self):
        """The thread that waits for a lease of long life is woken when another writer opens."""
        slow, fast = MemoryStore(), MemoryStore()
        keepers = []
        for store, ttl in ((slow, 100_000.0), (fast, 0.01)):
            store.make_folder(FOLDER)
            keeper = LeaseKeeper(store, Lease.of_this_process("run-a", ttl), FOLDER)
            keeper.write()
            keeper.start()
            keepers.append(keeper)
        wait_for(lambda: counter_of(fast) >= 2)
        for keeper in keepers:
            keeper.close()


def put_over(store: Store, lease: Lease) -> None:
    store.make_folder("other")
    store.stage("other/lease", [lease.to_bytes()], sync=False)
    store.place("other/lease", LEASE_KEY)


KEEP = """
import os, sys, time
from mpistream.lease import Lease, LeaseKeeper, read_lease
from mpistream.store import LocalStore
store = LocalStore(sys.argv[1])
store.make_folder({folder!r})
keeper = LeaseKeeper(store, Lease.of_this_process("run-a", 0.01), {folder!r})
keeper.write()
keeper.start()
while read_lease(store).counter < 2:
    time.sleep(0.001)
"""

FORK = """
keeper._lock.acquire()  # no refresh is under way at the fork, so that nothing but the pid holds back the child
pid = os.fork()
keeper._lock.release()
if pid == 0:
    before = keeper.lease
    time.sleep(0.06)
    keeper.refresh_if_due()
    keeper.close()
    os._exit(0 if keeper.lease == before else 1)
_, status = os.waitpid(pid, 0)
lease = read_lease(store)
assert not lease.closed and lease.pid == os.getpid(), lease
sys.exit(os.waitstatus_to_exitcode(status))
"""


class TestProcess:
    @staticmethod
    def run(code: str, tmp_path: Any) -> tuple[int, str, str]:
        code = KEEP.format(folder=FOLDER) + code
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, str(tmp_path / "run.zarr")],
            capture_output=True,
            env=child_env(),
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    @pytest.mark.parametrize("end", ["", "sys.exit(3)", "store.delete_tree('')", "keeper.close()"])
    def test_the_end_of_the_interpreter_prints_nothing(self, tmp_path, end):
        code = 3 if "3" in end else 0
        assert self.run(end, tmp_path) == (code, "", "")

    def test_a_forked_child_leaves_the_lease_to_its_parent(self, tmp_path):
        assert self.run(FORK, tmp_path) == (0, "", "")

    @pytest.mark.skipif(NO_PROC, reason="needs /proc")
    def test_a_writer_that_ended_without_close_is_dead_at_once(self, tmp_path):
        self.run("os._exit(1)", tmp_path)
        store = LocalStore(tmp_path / "run.zarr")
        lease = read_lease(store)
        assert lease is not None
        assert (lease.closed, is_dead_at_once(lease)) == (False, True)
        wait_until_free(store, takeover=False)


def test_process_that_is_still_dying_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after SIGKILL a process can be seen for a moment: the next writer looks again before it is refused."""
    store = MemoryStore()
    store.make_folder("stage")
    lease = dataclasses.replace(Lease.of_this_process("killed", 60.0), pid=os.getpid() + 1)
    LeaseKeeper(store, lease, "stage").write()
    looks = iter([False, False, False, True])
    monkeypatch.setattr("mpistream.lease.is_dead_at_once", lambda _: next(looks))
    slept: list[float] = []
    wait_until_free(store, takeover=False, clock=lambda: sum(slept), sleep=slept.append)
    assert list(looks) == []
    assert 0 < sum(slept) < 1

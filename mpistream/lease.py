"""The lease: who writes this store, and is that writer still alive.

A lease only saves from mistakes: a job submitted twice, a restart that overtakes a run which still
goes on. No guarantee rests on it: a lease may be lost or judged wrongly (a program that holds the
interpreter for longer than ``ttl`` looks dead from another host), and the fence must hold without
it: a writer whose stage folder was taken away can neither stage nor place, not even its lease.

How the next writer judges a lease. Closed: dead. The same boot and the same pid namespace: by pid.
The same SLURM job, requeued since: dead. Else only waiting tells: dead when the counter has not
changed for ``ttl`` seconds of the waiting process's own clock; clocks of two hosts are never compared.

A lease is replaced by rename and never synced, so a loss of power may leave an empty one. A damaged
lease is waited for like any other: a store that could not be resumed would be the greater harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
import typing
from collections.abc import Callable
from typing import Any

from mpistream.errors import FormatError, StoreError
from mpistream.manifest import LEASE_KEY
from mpistream.refresher import Refresher
from mpistream.store import Store

__all__ = ["Lease", "LeaseKeeper", "is_dead_at_once", "node_name", "read_lease", "wait_until_free"]

_log = logging.getLogger("mpistream")

# A refresh may be late by several time-outs of a network, or be hidden for a minute by the cache of
# another NFS client, before the writer looks dead.
_REFRESHES_PER_TTL = 8
_MIN_INTERVAL = 0.05
_DAMAGED_TTL = 120.0  # the ttl of a lease that can't be read
_MAX_TTL = 1e9
_MAX_NBYTES = 65_536  # a lease has some hundred
_START_TIME = 22 - 3  # among the fields of /proc/<pid>/stat after the second, which ends with ")", see proc(5)
_DYING_SECONDS = 3.0
_DYING_POLL = 0.05
_CLOSE_TIMEOUT = 5.0  # for a refresh that hangs in the file system


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The document under ``.mpistream/lease``; what a system can't tell about itself is None."""

    host: str
    boot_id: str | None
    pid_namespace: str | None
    pid: int
    pid_started: int | None  # clock ticks since boot
    slurm_job_id: str | None
    slurm_restart_count: int | None
    run_id: str
    counter: int
    ttl: int | float
    closed: bool
    failed: bool  # once closed: by an exception, or with records that were not committed

    @classmethod
    def of_this_process(cls, run_id: str, ttl: float) -> Lease:
        """Return a first lease that describes this process.

        Not collective.
        """
        boot_id, pid_namespace = _system()
        job_id, restarts = _slurm()
        return cls(
            host=socket.gethostname(),
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            pid=os.getpid(),
            pid_started=_state_and_start(os.getpid())[1],
            slurm_job_id=job_id,
            slurm_restart_count=restarts if job_id else None,
            run_id=run_id,
            counter=0,
            ttl=ttl,
            closed=False,
            failed=False,
        )

    def to_bytes(self) -> bytes:
        """Return the document as it is stored: JSON.

        Not collective.
        """
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Lease:
        """Return the lease that `to_bytes` wrote, or raise FormatError; unknown keys are passed over.

        Not collective.
        """
        document: object = None
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(data) if len(data) <= _MAX_NBYTES else None
        if not isinstance(document, dict):
            raise FormatError(f"{LEASE_KEY} is damaged: {len(data)} bytes that are no JSON object")
        values: dict[str, Any] = {name: document.get(name) for name in _TYPES}
        values["failed"] = document.get("failed", False)
        # JSON's true is no number, though Python says so.
        flags = ("closed", "failed")
        wrong = [n for n, v in values.items() if not isinstance(v, _TYPES[n]) or isinstance(v, bool) != (n in flags)]
        # kill(2) gives pids below 1 a meaning of their own, and a pid is a C int. NaN fails this, too.
        if not wrong and not (0 < values["pid"] < 2**31 and 0 < values["ttl"] < _MAX_TTL):
            wrong = ["pid", "ttl"]
        if wrong:
            raise FormatError(f"{LEASE_KEY} is damaged: {', '.join(f'{n} is {values[n]!r}' for n in wrong)}")
        return cls(**values)

    def __str__(self) -> str:
        job = f", SLURM job {self.slurm_job_id} (restart {self.slurm_restart_count})"
        return f"run {self.run_id} on host {self.host}, pid {self.pid}{job if self.slurm_job_id else ''}"


_TYPES = typing.get_type_hints(Lease)


def read_lease(store: Store) -> Lease | None:
    """Return the lease of a store, None when there is none; a damaged one is FormatError.

    Not collective.
    """
    data = store.read(LEASE_KEY)
    return None if data is None else Lease.from_bytes(data)


def is_dead_at_once(lease: Lease) -> bool | None:
    """Judge a lease without waiting: True if certainly dead, False if certainly alive, else None.

    Not collective.
    """
    if lease.closed:
        return True
    # None is no identity: two systems that can't tell are not the same system.
    is_here = lease.boot_id and lease.pid_namespace and (lease.boot_id, lease.pid_namespace) == _system()
    verdict = _is_process_dead(lease.pid, lease.pid_started) if is_here else None
    if verdict is not None:
        return verdict
    job_id, restarts = _slurm()
    # SLURM ends every process of a job before it starts the job again.
    is_requeued = lease.slurm_job_id == job_id and restarts > (lease.slurm_restart_count or 0)
    return True if job_id and is_requeued else None


def wait_until_free(
    store: Store,
    *,
    takeover: bool,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    poll: float = 1.0,
) -> bool:
    """Return when no other writer holds the store, looking every ``poll`` seconds; at once on takeover.

    Not collective.

    Returns
    -------
    Whether the last one ended well; also where there was none.

    Raises
    ------
    StoreError
        Kind ``lease``: the holder is alive. An open writer of this same process counts.

    Notes
    -----
    Two processes may both find the store free: the claim of an epoch lets one of them through.
    """
    if takeover:
        with contextlib.suppress(StoreError):
            return _ended_well(store.read(LEASE_KEY))
        return False
    seen: bytes | None = None
    watched: Lease | None = None
    deadline = 0.0
    while True:
        # Before the look: one that was stopped in between still sees a refresh of the same moment.
        is_over = seen is not None and clock() >= deadline
        data = store.read(LEASE_KEY)
        if data is None or (is_over and data == seen):
            return data is None
        if data != seen:
            lease: Lease | None = None
            with contextlib.suppress(FormatError):
                lease = Lease.from_bytes(data)
            if lease is not None:
                is_dead = is_dead_at_once(lease)
                # A process that was killed can be seen for some moments more, until the system has taken it down.
                last = clock() + _DYING_SECONDS
                while is_dead is False and lease.pid != os.getpid() and clock() < last:
                    sleep(_DYING_POLL)
                    is_dead = is_dead_at_once(lease)
                if is_dead:
                    return _ended_well(data)
                # Another run id is another writer: judged anew, and waited for anew.
                if is_dead is False or (watched is not None and watched.run_id == lease.run_id):
                    raise _refusal(store, lease)
            elif seen is not None and watched is None:
                # Two that can't be read, one after the other: somebody refreshes them, of another version maybe.
                raise StoreError(
                    f"{store.url} is being written: its lease can't be read, and changes; wait for the writer to end, "
                    "or pass takeover=True if it shall lose the store",
                    kind="lease",
                )
            ttl = _DAMAGED_TTL if lease is None else lease.ttl
            owner = "a writer whose lease is damaged" if lease is None else lease
            _log.warning("%s: waiting up to %g s to see whether it is alive: %s", store.url, ttl, owner)
            seen, watched, deadline = data, lease, clock() + ttl
        sleep(max(min(poll, deadline - clock()), 0.0))


def _ended_well(data: bytes | None) -> bool:
    with contextlib.suppress(FormatError):
        return data is None or ((lease := Lease.from_bytes(data)).closed and not lease.failed)
    return False


def _refusal(store: Store, lease: Lease) -> StoreError:
    way_out = "wait for it to end, or pass takeover=True if it shall lose the store"
    if (lease.host, lease.pid) == (socket.gethostname(), os.getpid()):
        way_out = "that is an open writer of this same process: close it first, or pass takeover=True"
    return StoreError(f"{store.url} is being written by {lease}, which is alive; {way_out}", kind="lease")


class LeaseKeeper:
    """Keeps the lease of an open writer fresh, by the thread of all keepers and by the writer's own calls.

    ``folder`` is the owner's stage folder, and the fence: without it no lease can be replaced.
    ``lost`` is the run id of another writer that was found, ``last_error`` the last refresh's failure.
    """

    def __init__(self, store: Store, lease: Lease, folder: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease = lease
        self.lost: str | None = None
        self.last_error: Exception | None = None
        self._store = store
        self._folder = folder
        self._clock = clock
        self._interval = max(lease.ttl / _REFRESHES_PER_TTL, _MIN_INTERVAL)
        self._due = clock() + self._interval
        self._lock = threading.Lock()  # held while the lease and its object change
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self) -> None:
        """Write the lease for the first time; the stage folders of older writers must be gone.

        Not collective.
        """
        with self._lock:
            self._put(self.lease)
            self._due = self._clock() + self._interval

    def start(self) -> None:
        """Let the thread refresh it, until `close`, or until nothing else refers to this keeper.

        Not collective.
        """
        try:
            self._thread = _refresher.add(self)
        except RuntimeError as error:  # a limit on threads: the writer's calls refresh, too
            self.last_error = error

    def refresh_if_due(self) -> None:
        """Refresh the lease when it is time; cheap otherwise. Never raises.

        Not collective.
        """
        # When the lock is held, the other thread is just doing it.
        if self._clock() >= self._due and self._is_active() and self._lock.acquire(blocking=False):
            self._refresh_and_release(closed=False)

    def close(self, *, failed: bool = False) -> None:
        """Stop, and mark the lease closed if it is still ours. Never raises.

        Not collective.

        Parameters
        ----------
        failed
            Whether the run ended by an exception, or without committing what it had.
        """
        if not self._is_active():
            return
        # A refresh that hangs in the file system keeps the lock: then the lease stays as it is.
        if self._lock.acquire(timeout=_CLOSE_TIMEOUT):
            self._refresh_and_release(closed=True, failed=failed)
        self._ended.set()
        _refresher.remove(self, _CLOSE_TIMEOUT)

    def due_in(self) -> float | None:
        """Return the seconds until the next refresh, None when there will be none.

        Not collective.
        """
        return max(self._due - self._clock(), 0.0) if self._is_active() else None

    def _is_active(self) -> bool:
        # A forked child has copies of this object, but the lease is its parent's.
        return not self._ended.is_set() and os.getpid() == self.lease.pid

    def _refresh_and_release(self, *, closed: bool, failed: bool = False) -> None:
        # The next time is set first: a failing store is tried at the same pace, not in every call.
        self._due = self._clock() + self._interval
        try:
            # A lease that is missing or damaged is ours to mend: we still have the stage folder.
            with contextlib.suppress(FormatError):
                found = read_lease(self._store)
                if found is not None and found.run_id != self.lease.run_id:
                    self.lost = found.run_id
            if self.lost is None and not self._ended.is_set():
                # Counted before it is written: the name of a staged file is never used twice.
                counter = self.lease.counter + 1
                self.lease = dataclasses.replace(self.lease, counter=counter, closed=closed, failed=failed)
                self._put(self.lease)
        except Exception as error:  # noqa: BLE001 - a hint that can't be given must not harm the run
            self.last_error = error
        finally:
            if closed or self.lost is not None or getattr(self.last_error, "kind", None) == "gone":
                self._ended.set()
            self._lock.release()

    def _put(self, lease: Lease) -> None:
        data, staged = lease.to_bytes(), f"{self._folder}/lease-{lease.counter}"
        self._store.stage(staged, [data], sync=False)
        try:
            self._store.place(staged, LEASE_KEY)
        except StoreError as error:
            # NFS may send a rename twice and report the failure of the second.
            if error.kind != "gone" or self._store.read(LEASE_KEY) != data:
                with contextlib.suppress(StoreError):
                    self._store.delete(staged)
                raise


_refresher = Refresher()


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def node_name() -> str:
    """Return a name that processes have in common when they share a kernel, and so its memory.

    Not collective.
    """
    return _system()[0] or socket.gethostname()


def _system() -> tuple[str | None, str | None]:
    """Return the boot id of the kernel and the pid namespace of this process."""
    namespace = None
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return _read_text("/proc/sys/kernel/random/boot_id") or None, namespace


def _slurm() -> tuple[str | None, int]:
    # SLURM sets the count only in a job that was restarted.
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return os.environ.get("SLURM_JOB_ID") or None, int(count) if count.isdecimal() else 0


def _state_and_start(pid: int) -> tuple[str | None, int | None]:
    """Return the state of a process (field 3) and its start time (field 22)."""
    # The command (field 2) stands in parentheses, and may hold blanks and parentheses itself.
    rest = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (rest[0], int(rest[_START_TIME])) if len(rest) > _START_TIME else (None, None)


def _is_process_dead(pid: int, started: int | None) -> bool | None:
    # By signal 0, not by /proc: that may hide the processes of other users (hidepid).
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    state, start = _state_and_start(pid)
    if state is None or started is None:
        return None  # the pid exists, but may have been given to another process
    return state in "ZXx" or start != started

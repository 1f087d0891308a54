"""Verify a store: everything that is committed is read, and everything else is listed. Nothing is written.

Rank 0 looks at the store as a whole (`mpistream.inspection`); the objects (`mpistream.checks`) are dealt out to all
ranks, one after the other. Every second or so the ranks agree on how far they are, so no rank waits for another
for long, whatever the sizes of the objects are.

A store may be written meanwhile. The state that is verified is the one of the beginning: what of it was dropped or
replaced since is no finding.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mpistream.agreement import Channel
from mpistream.checks import Checker, Finding, Task
from mpistream.comm import SerialTransport, connect
from mpistream.errors import FormatError, MPIStreamError, StoreError
from mpistream.foreign import no_stream_text
from mpistream.inspection import Inspection
from mpistream.manifest import MANIFEST_KEY, Manifest, raised_inside
from mpistream.ranges import Ranges
from mpistream.store import ReadableStore, open_readable

__all__ = ["Report", "verify"]

_TIMEOUT = 600.0
_ROUND_SECONDS = 1.0
# Of a store in which everything is damaged nobody reads all.
_MAX_FINDINGS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found."""

    url: str
    epoch: int
    commit_seq: int
    n_records: int
    """Length of the time dim."""
    n_objects: int
    """Objects that were read, besides documents and times."""
    nbytes: int
    """Their bytes."""
    seconds: float = field(compare=False)
    """How long it took."""
    damage: tuple[Finding, ...]
    leftovers: tuple[Finding, ...]
    in_flight: tuple[Finding, ...]
    writer: str | None
    """Who writes the store at present, or may."""
    is_complete: bool
    """Whether everything was looked at; not so after very many findings."""
    record_noun: str = "record"
    """What a record is: ``"location"`` in a location series."""

    @property
    def exit_code(self) -> int:
        """0: all is well; 1: there are leftovers, which ``mpistream repair`` removes; 2: there is damage."""
        return 2 if self.damage else 1 if self.leftovers else 0

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types.

        Not collective.
        """
        names = [f.name for f in fields(self) if f.name not in ("damage", "leftovers", "in_flight")]
        findings = {n: [f.to_json() for f in getattr(self, n)] for n in ("damage", "leftovers", "in_flight")}
        return {**{name: getattr(self, name) for name in names}, "exit_code": self.exit_code, **findings}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Report:
        """Return the report that `to_json` described.

        Not collective.
        """
        findings = {n: tuple(map(Finding.from_json, document[n])) for n in ("damage", "leftovers", "in_flight")}
        return cls(**{**{k: v for k, v in document.items() if k != "exit_code"}, **findings})


def verify(
    url: str | os.PathLike[str],
    *,
    comm: Any = None,
    progress: Callable[[int, int], object] | None = None,
) -> Report:
    """Read everything that is committed in a store, and list what is damaged and what is left over.

    Collective.

    Parameters
    ----------
    url
        Folder of the store, the same on every rank.
    comm
        An mpi4py communicator or a Fortran handle (int), whose ranks share the work. Without it, this process does
        all; that is fine under MPI, too.
    progress
        Called on rank 0 now and then with the objects that were read, and all there are.

    Returns
    -------
    The same report on every rank.

    Raises
    ------
    FormatError
        On every rank: no store of ours there, a damaged manifest, or one of a newer version. Then there is nothing
        that the rest could be compared with.
    StoreError
        On every rank: the manifest can't be read, or the store was replaced meanwhile (kind ``superseded``).

    Notes
    -----
    Nothing is written, and no writer is disturbed. Objects that a live writer has put in place and not committed yet
    are in flight, and no fault. Links, FIFOs and devices in a store are damage: they are not followed and not read.
    """
    failure: MPIStreamError | None = None
    store: ReadableStore | None = None
    try:
        store = open_readable(url)
    except MPIStreamError as error:
        failure = error
    transport = SerialTransport() if comm is None else connect(comm, _TIMEOUT)
    channel = Channel(transport, _TIMEOUT)
    session: _Session | None = None

    def begin(votes: list[Any]) -> list[Any]:
        nonlocal session
        assert store is not None
        session = _Session(store)
        return [session.begin()] * len(votes)

    try:
        plan = channel.exchange("verify", digest=str(url), failure=failure, answer=begin)
        assert store is not None
        report = _run(channel, store, plan, session, progress)
    except MPIStreamError:
        channel.close_failed()
        raise
    channel.close()
    return report


def _run(
    channel: Channel,
    store: ReadableStore,
    plan: dict[str, Any],
    session: _Session | None,
    progress: Callable[[int, int], object] | None,
) -> Report:
    manifest = Manifest.from_bytes(plan["manifest"].encode()) if session is None else session.manifest
    checker = Checker(store, manifest)
    rows: dict[str, Ranges] = {name: tuple((a, b) for a, b in found) for name, found in plan["rows"].items()}
    tasks = checker.tasks(rows, [tuple(pack) for pack in plan["packs"]])
    mine = itertools.islice(tasks, channel.rank, None, channel.size)
    while True:
        share = _work(mine)

        def gather(votes: list[Any]) -> list[Any]:
            assert session is not None
            session.take(votes)
            if progress is not None:
                progress(session.n_objects, plan["n_tasks"])
            return [session.report(plan["n_tasks"])] * len(votes)

        found = channel.exchange("verify", payload=share, answer=gather)
        if found is not None:
            return Report.from_json(found)


def _work(tasks: Iterator[Task]) -> dict[str, Any]:
    """Do tasks for a while."""
    until = time.monotonic() + _ROUND_SECONDS
    n, nbytes, found, is_done = 0, 0, [], True
    for task in tasks:
        findings, size = task()
        n, nbytes = n + 1, nbytes + size
        found += [f.to_json() for f in findings]
        if time.monotonic() > until or len(found) > _MAX_FINDINGS:
            is_done = False
            break
    return {"n": n, "nbytes": nbytes, "findings": found, "is_done": is_done}


class _Session:
    """What rank 0 does between the agreements."""

    def __init__(self, store: ReadableStore) -> None:
        self._store = store
        self._began = time.monotonic()
        self._findings: list[Finding] = []
        self._is_done = False
        self.n_objects = 0
        self._nbytes = 0

    def begin(self) -> dict[str, Any]:
        data = self._store.read(MANIFEST_KEY)
        if data is None:
            raise FormatError(no_stream_text(self._store), kind="no_manifest")
        self._data, self.manifest = data, Manifest.from_bytes(data)
        inspection = Inspection(self._store, self.manifest)
        inspection.run()
        self._inspection = inspection
        self._take(inspection.findings)
        n_tasks = Checker(self._store, self.manifest).n_tasks(inspection.rows, len(inspection.packs))
        return {"manifest": data.decode(), "rows": inspection.rows, "packs": inspection.packs, "n_tasks": n_tasks}

    def take(self, shares: Sequence[dict[str, Any]]) -> None:
        self.n_objects += sum(s["n"] for s in shares)
        self._nbytes += sum(s["nbytes"] for s in shares)
        self._take([Finding.from_json(f) for s in shares for f in s["findings"]])
        self._is_done = all(s["is_done"] for s in shares)

    def _take(self, findings: Sequence[Finding]) -> None:
        """Add findings, but those about what was dropped or replaced since."""
        if not findings:
            return
        data = self._store.read(MANIFEST_KEY)
        known = self.manifest
        newest = None if data is None else known if data == self._data else Manifest.from_bytes(data)
        if newest is None or newest.store_id != known.store_id:
            raise StoreError(f"{self._store.url} was replaced while it was verified; verify again", kind="superseded")
        for f in findings:
            is_superseded = f.records is not None and raised_inside(newest.floors, *f.records, known.commit_seq)
            # What was uncommitted when the work began may be committed now, and its folders may be gone.
            is_late = f.level != "damage" and newest.commit_seq != known.commit_seq
            if not is_superseded and not is_late:
                self._findings.append(f)

    def report(self, n_tasks: int) -> dict[str, Any] | None:
        """Return the report once there is nothing more to do."""
        is_full = len(self._findings) >= _MAX_FINDINGS
        if not self._is_done and not is_full:
            return None
        of = {
            level: tuple(f for f in self._findings[:_MAX_FINDINGS] if f.level == level)
            for level in ("damage", "leftover", "in_flight")
        }
        return Report(
            url=self._store.url,
            epoch=self.manifest.epoch,
            commit_seq=self.manifest.commit_seq,
            n_records=self.manifest.n_records,
            n_objects=self.n_objects,
            nbytes=self._nbytes,
            seconds=time.monotonic() - self._began,
            damage=of["damage"],
            leftovers=of["leftover"],
            in_flight=of["in_flight"],
            writer=self._inspection.writer,
            is_complete=self._is_done and self.n_objects == n_tasks and len(self._findings) <= _MAX_FINDINGS,
            record_noun=self.manifest.schema.record_noun,
        ).to_json()

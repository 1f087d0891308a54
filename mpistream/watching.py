"""How a run that writes a store is getting on: what is committed, how fast, and whether its writer lives.

`Watch.look` costs the same at record 10 as at record 100,000 but for the size, which is counted file by file and
therefore neither at the first look nor at every later one. It looks at the manifest as `StoreReader.follow` does, and
judges the lease as the next writer would: by pid on the same host, elsewhere by waiting.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mpistream.errors import FormatError, StoreError
from mpistream.info import decode_time, size_on_disk
from mpistream.lease import Lease, is_dead_at_once, read_lease
from mpistream.ranges import count
from mpistream.reader import open_reader
from mpistream.store import open_store

__all__ = ["Sight", "Watch"]

# The rate is that of the last commits: a model that slows down is seen to.
_N_COMMITS = 16
# Counting files takes at most this share of the time.
_SIZE_SHARE = 0.05
_MIN_SIZE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen at one look; None is not known."""

    state: str
    """``running``, ``closed``, ``failed`` (it has ended by an exception, or without committing what it had), ``dead``,
    ``unknown`` (on another host, no sign of life yet) or ``none`` (no lease)."""
    writer: str | None
    """Who holds the lease."""
    n_records: int
    """Committed records."""
    n_total: int | None
    """Records there will be: those of an indexed stream, or what the caller expects."""
    commit_seq: int
    last_t: float | None
    last_date: str | None
    time_units: str
    rate: float | None
    """Records a second, over the last commits that were seen."""
    eta: float | None
    """Seconds until ``n_total`` at that rate."""
    nbytes: int | None
    """Of files, as of the last count; the first look counts none."""
    seconds_since_commit: float | None
    """Since a commit was last seen to come."""
    record_noun: str = "record"
    """What a record is: ``"location"`` in a location series."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types.

        Not collective.
        """
        return asdict(self)


class Watch:
    """Looks at a store again and again.

    Parameters
    ----------
    url
        Folder of the store.
    n_total
        Records that are expected, where the store does not say it.
    clock
        Seconds.

    Raises
    ------
    FormatError, StoreError
        There is no stream, or none that can be read.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, n_total: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = open_store(url)
        self._reader = open_reader(url)
        self._n_total = self._reader.schema.n_total or n_total
        self._clock = clock
        self._commits: deque[tuple[float, int]] = deque(maxlen=_N_COMMITS)
        self._commits.append((clock(), self._n_records()))
        self._came: float | None = None
        self._sign: tuple[Lease, float] | None = None
        self._is_moving = False
        self._size: int | None = None
        # Not at the first look: whoever looks once wants an answer at once.
        self._size_due = clock() + _MIN_SIZE_SECONDS

    def look(self) -> Sight:
        """Return how it stands now.

        Not collective.

        Raises
        ------
        FormatError
            The manifest is gone or damaged.
        """
        now = self._clock()
        if self._reader.refresh():
            n = self._n_records()
            if n < self._commits[-1][1]:
                self._commits.clear()  # a resume went back
            self._commits.append((now, n))
            self._came = now
        manifest, schema = self._reader.manifest, self._reader.schema
        state, writer = self._writer(now)
        rate = self._rate(now)
        missing = None if self._n_total is None else max(0, self._n_total - self._n_records())
        return Sight(
            state=state,
            writer=writer,
            n_records=self._n_records(),
            n_total=self._n_total,
            commit_seq=manifest.commit_seq,
            last_t=manifest.last_t,
            last_date=decode_time(manifest.last_t, schema.time.units, schema.time.calendar),
            time_units=schema.time.units,
            rate=rate,
            eta=missing / rate if state in ("running", "unknown") and missing is not None and rate else None,
            nbytes=self._nbytes(now),
            seconds_since_commit=None if self._came is None else now - self._came,
            record_noun=schema.record_noun,
        )

    def _n_records(self) -> int:
        return count(self._reader.committed)

    def _rate(self, now: float) -> float | None:
        (began, first), (_, last) = self._commits[0], self._commits[-1]
        return (last - first) / (now - began) if last > first and now > began else None

    def _writer(self, now: float) -> tuple[str, str | None]:
        try:
            lease = read_lease(self._store)
        except FormatError:
            return "unknown", "a writer whose lease is damaged"
        if lease is None:
            return "none", None
        if lease.closed:
            return ("failed" if lease.failed else "closed"), str(lease)
        is_dead = is_dead_at_once(lease)
        if is_dead is not None:
            return ("dead" if is_dead else "running"), str(lease)
        # On another host only time tells: whether its counter moves.
        if self._sign is None or self._sign[0] != lease:
            self._is_moving = self._sign is not None and self._sign[0].run_id == lease.run_id
            self._sign = lease, now
        if now - self._sign[1] > lease.ttl:
            return "dead", str(lease)
        return ("running" if self._is_moving else "unknown"), str(lease)

    def _nbytes(self, now: float) -> int | None:
        if now >= self._size_due:
            with contextlib.suppress(StoreError):
                self._size = size_on_disk(self._store)
            self._size_due = now + max(_MIN_SIZE_SECONDS, (self._clock() - now) / _SIZE_SHARE)
        return self._size

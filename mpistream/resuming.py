"""A store that is there: what ``write_resume`` does on the owner."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpistream.block import time_number
from mpistream.commit import recover
from mpistream.epoch import EpochState
from mpistream.errors import FormatError, ResumeError, SchemaError, counted
from mpistream.foreign import no_stream_text
from mpistream.hierarchy import warn_if_hidden
from mpistream.manifest import (
    MANIFEST_KEY,
    Manifest,
    stage_folder,
)
from mpistream.opening import Claim, put_layout, put_manifest, settled
from mpistream.options import Options
from mpistream.owner import Owner
from mpistream.publishing import put_committed, put_documents
from mpistream.ranges import count, inside, members
from mpistream.recovery import remove_uncommitted, remove_uncommitted_blobs, set_aside_dropped, tidy
from mpistream.schema import StreamSchema
from mpistream.series import read_series_chunk
from mpistream.staging import Stager
from mpistream.store import Store
from mpistream.times import TimeLike, date_text, encode_time, is_date
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import GROUP_KEY, Documents, chunk_key, make_documents

__all__ = ["ResumeRequest", "Resumed", "StoredTimes", "no_stream", "read_manifest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What `write_resume` found and did."""

    n_dropped: int
    """Committed records behind ``at`` that are no longer committed."""
    last_t: float | None
    """Time of the last record that is kept."""
    at: float | None
    previous_epoch: int


def read_manifest(store: Store) -> Manifest | None:
    """Return the committed state of a store, None when there is none.

    Not collective.

    Raises
    ------
    FormatError
        When the manifest is damaged.
    """
    data = store.read(MANIFEST_KEY)
    return None if data is None else Manifest.from_bytes(data)


def no_stream(store: Store, what_for: str) -> ResumeError:
    """Return the error for a place without a manifest.

    Not collective.
    """
    return ResumeError(f"{no_stream_text(store)}; there is nothing to {what_for}", kind="no_store")


class ResumeRequest:
    """A call of ``write_resume``.

    Parameters
    ----------
    schema
        The caller's schema, to be compared, or None.
    at
        Records behind this time are dropped; None keeps all. A number or a date.
    expect_last_t
        The time that the last kept record must have, None: any. A number or a date.
    """

    def __init__(self, schema: StreamSchema | None, *, at: TimeLike | None, expect_last_t: TimeLike | None) -> None:
        self._given = schema
        self.schema: StreamSchema
        """That of the store, once it was checked."""
        # As they were given: what a date is in numbers only the store's schema can say.
        self._times = {"at": _number("at", at), "expect_last_t": _number("expect_last_t", expect_last_t)}
        self._at: float | None = None
        self._expect: float | None = None
        self._votes: Sequence[Mapping[str, Any]] = ()
        # The schema of a store, and what was planned for it and these votes: the second look plans nothing anew.
        self._planned: tuple[dict[str, Any], EpochState] | None = None
        self.leftovers: list[str] = []

    def arguments(self) -> dict[str, Any]:
        """Return what must be the same on every rank, as JSON types by name."""
        times = {name: date_text(t) if is_date(t) else t for name, t in self._times.items()}
        return {"schema": None if self._given is None else self._given.to_json(), **times}

    def check(self, store: Store, votes: Sequence[Mapping[str, Any]], options: Options) -> EpochState:
        """Check the request against the store; nothing is written.

        Parameters
        ----------
        store, votes, options
            As in `mpistream.creating.CreateRequest.check`.

        Raises
        ------
        ResumeError
            When there is nothing to resume, the schema is another one, or the last time is not as expected.
        SchemaError, AlignmentError, TilingError
            For regions that don't fit, and for dates that the schema's units and calendar have no number for.
        """
        self._votes = votes
        manifest = self._read(store)
        time = manifest.schema.time
        if manifest.schema.is_location_series and any(t is not None for t in self._times.values()):
            raise SchemaError(
                f"{store.url} is a location series, whose records are locations and have no time; leave at and "
                "expect_last_t out, w.missing() says what is to run",
                kind="mode",
            )
        self._at, self._expect = (encode_time(t, time.units, time.calendar) for t in self._times.values())
        if self._given is not None:
            _check_same_schema(self._given, manifest)
        if not manifest.schema.is_location_series:
            _check_last_time(store, manifest)
        n_keep, last_t, _ = self._cut(store, manifest)
        n_kept = count(inside(manifest.committed, 0, n_keep))
        if self._expect is not None and last_t != self._expect:
            raise ResumeError(
                f"the last record that is kept has t = {last_t!r}, expected was {self._expect!r} "
                f"({n_kept} of {counted(count(manifest.committed), 'record')} kept): the checkpoint and the output "
                "differ; start from an older checkpoint, or pass at= to drop records",
                kind="last_t",
            )
        stored = manifest.schema.to_json()
        # What is missing of a location series is what is shared out.
        stored |= {"committed": manifest.committed} if manifest.schema.is_location_series else {}
        if self._planned is None or self._planned[0] != stored:
            self.schema, epoch = settled(manifest.schema, votes, options, manifest.committed)
            self._planned = stored, epoch
        return self._planned[1]

    def _read(self, store: Store) -> Manifest:
        manifest = read_manifest(store)
        if manifest is None:
            raise no_stream(store, "resume, use write_open")
        return manifest

    def _cut(self, store: Store, manifest: Manifest) -> tuple[int, float | None, list[float]]:
        """Return the first record number that goes, the time of the last record that stays, and the times that go."""
        n = manifest.n_records
        if self._at is None or not manifest.committed:
            return n, manifest.last_t, []
        times = StoredTimes(store, manifest)
        n_keep = bisect.bisect_right(range(n), self._at, key=times.at)
        kept = inside(manifest.committed, 0, n_keep)
        dropped = inside(manifest.committed, n_keep, n)
        return n_keep, times.at(kept[-1][1] - 1) if kept else None, [times.at(i) for i in members(dropped)]

    def foreseen(self, store: Store) -> Resumed:
        """Return what `begin` would do now, once `check` was called; nothing is written."""
        manifest = self._read(store)
        _, last_t, dropped_times = self._cut(store, manifest)
        return Resumed(n_dropped=len(dropped_times), last_t=last_t, at=self._at, previous_epoch=manifest.epoch)

    def begin(self, store: Store, claimed: Claim, epoch: EpochState | None, options: Options) -> tuple[Owner, Resumed]:
        """Recover: new manifest, then documents, then set aside what was dropped.

        Every step can be done again from the manifest, so a resume that dies is finished by the next one.

        Parameters
        ----------
        store, claimed, options
            What is opened.
        epoch
            What the ranks have agreed on; None for one process that writes nothing.
        """
        stager = Stager(store, stage_folder(claimed.epoch, 0), claimed.epoch, threads=0, max_pending_nbytes=1)
        # Once more, behind the fence: between the check and the claim a writer may have committed, or another store
        # may have come in the place of this one; from here on nobody can.
        before = self._planned
        found = self.check(store, self._votes, options)
        if epoch is None:
            epoch = found
        elif self._planned is not before:
            if epoch.indexed:
                # What each rank holds of which box was agreed on for that schema.
                raise ResumeError(f"{store.url} was replaced while it was opened; try again", kind="replaced")
            epoch = found
        old = self._read(store)
        n_keep, last_t, dropped_times = self._cut(store, old)
        manifest = recover(
            old,
            epoch=claimed.epoch,
            run_id=claimed.run_id,
            n_keep=n_keep,
            last_t=last_t,
            dropped_times=dropped_times,
            layout_digest=put_layout(store, claimed.epoch, len(epoch.regions), epoch.layout_regions),
        )
        remove_uncommitted_blobs(store, stager, old)
        put_manifest(store, stager, manifest)
        documents = make_documents(manifest.schema)
        _put_all_documents(store, stager, documents, manifest.n_records)
        if (array := manifest.schema.committed_array) is not None:
            chunks = range(-(-manifest.n_records // array.resolved_chunk_shape[0]))
            put_committed(store, stager, manifest, chunks, sync=True)
        set_aside_dropped(store, stager, manifest)
        remove_uncommitted(store, stager, manifest)
        tidy(store, stager, manifest)
        warn_if_hidden(store)
        resumed = Resumed(n_dropped=len(dropped_times), last_t=last_t, at=self._at, previous_epoch=old.epoch)
        return Owner(store, manifest, epoch, documents, claimed.keeper, options), resumed


def _number(what: str, t: Any) -> Any:
    """Return a time as a float, unless it is a date."""
    if t is None:
        return None
    if is_date(t):
        date_text(t)  # NaT is refused before anything else happens
        return t
    value = time_number(what, t)
    if math.isnan(value):
        raise SchemaError(f"{what} is NaN; give a time in the schema's units, or leave it out", kind="time")
    return value


def _check_same_schema(given: StreamSchema, manifest: Manifest) -> None:
    given = given.with_layout_of(manifest.schema)
    stored = manifest.schema
    if given.fingerprint() != manifest.fingerprint:
        differing = [
            f"{name!r}"
            for name in sorted({*given.arrays, *stored.arrays})
            if name not in given.arrays
            or name not in stored.arrays
            or (given.arrays[name].to_json() != stored.arrays[name].to_json())
        ]
        if dict(given.dims) != dict(stored.dims):
            differing.insert(0, f"dims {dict(given.dims)} instead of {dict(stored.dims)}")
        raise ResumeError(
            f"the given schema is not the store's: they differ in {', '.join(differing) or 'time or key separator'}; "
            "leave schema out to take the store's",
            kind="schema",
        )
    if given.coordinates_digest() != manifest.coordinates_digest and any(
        a.values is not None for a in given.arrays.values()
    ):
        raise ResumeError("the given schema's coordinate values are not the store's", kind="coordinates")


def _check_last_time(store: Store, manifest: Manifest) -> None:
    if not manifest.committed:
        return
    t = StoredTimes(store, manifest).at(manifest.committed[-1][1] - 1)
    if t != manifest.last_t:
        raise FormatError(
            f"{store.url}: the last committed record has t = {t!r}, the manifest says {manifest.last_t!r}; the store "
            "is damaged",
            kind="times",
        )


class StoredTimes:
    """Stored times by index; reads the chunks it is asked for, each once.

    Parameters
    ----------
    store
        The store.
    manifest
        The committed state.
    find
        Where a chunk lies, by its key.
    """

    def __init__(self, store: Store, manifest: Manifest, find: Callable[[str], str] = str) -> None:
        self._store = store
        self._find = find
        self._array = manifest.schema.time_array
        self._separator = manifest.schema.key_separator
        self._codec = ChunkCodec(self._array.chain, self._array.dtype)
        self._chunks: dict[int, Any] = {}

    def at(self, i: int) -> float:
        """Return the time of a record.

        Raises
        ------
        FormatError
            With the key of its chunk, when that is missing or damaged.
        """
        length = self._array.resolved_chunk_shape[0]
        chunk, offset = divmod(i, length)
        if chunk not in self._chunks:
            key = chunk_key(self._array.name, self._separator, (chunk,))
            self._chunks[chunk] = read_series_chunk(self._store, self._codec, self._find(key), length)
        return float(self._chunks[chunk][offset])


def _put_all_documents(store: Store, stager: Stager, documents: Documents, n_records: int) -> None:
    put_documents(
        store,
        stager,
        {GROUP_KEY: documents.group(n_records), **documents.arrays(n_records, growing_only=False)},
        sync=True,
    )

"""Opening a store on the owner: a new one, or one that is there. No communication.

Both go the same way, and no step before the claim writes anything:

1. `check` the request against what lies there.
2. `claim`: wait for the lease, claim the next epoch, fence all older writers, make the stage folder.
3. Every rank finds the nonce through its own path and makes its own stage folder.
4. `begin`: the first manifest of the epoch, then the documents.

The order inside the claim is the fence. A resume claims its epoch, then renames the stage folders of
older epochs away, and only then reads the manifest; a writer of an older epoch, however late it wakes,
can neither stage nor rename. A claimer that was overtaken itself finds a higher epoch after it made its
stage folder, or loses that folder to the one that overtook it.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpistream.arrays import SERIES_CHUNK
from mpistream.commit import recover
from mpistream.epoch import EpochState, prove_epoch
from mpistream.errors import FencedError, FormatError, ResumeError, SchemaError, StoreError
from mpistream.layout import decompose, plan, resolve_layout
from mpistream.lease import Lease, LeaseKeeper, wait_until_free
from mpistream.manifest import (
    EPOCHS_FOLDER,
    FOLDER,
    MANIFEST_KEY,
    STAGE_FOLDER,
    Manifest,
    epoch_key,
    fenced_folder,
    layout_bytes,
    layout_key,
    nonce_key,
    parse_epoch,
    parse_json,
    stage_folder,
)
from mpistream.options import Options
from mpistream.owner import Owner, put_documents
from mpistream.recovery import remove_uncommitted, set_aside_dropped, tidy
from mpistream.region import Region
from mpistream.rows import encode_whole, read_series_chunk
from mpistream.schema import StreamSchema
from mpistream.staging import Stager, highest_epoch
from mpistream.store import Store
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.metadata import GROUP_KEY, Documents, chunk_key, make_documents

__all__ = ["Claim", "CreateRequest", "ResumeRequest", "Resumed", "claim", "read_manifest"]

_log = logging.getLogger("mpistream")

_REPLACED_FOLDER = f"{FOLDER}/replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What `write_resume` found and did."""

    n_dropped: int
    """Committed records behind ``at`` that are no longer committed."""
    last_t: float | None
    """Time of the last record that is kept."""
    at: float | None
    previous_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An epoch that is ours, with the stage folder that goes with it."""

    run_id: str
    epoch: int
    nonce: str
    keeper: LeaseKeeper


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


def claim(store: Store, options: Options, *, takeover: bool) -> Claim:
    """Claim the next epoch and fence all older writers.

    Not collective.

    Raises
    ------
    StoreError
        Kind ``lease`` when another writer is alive.
    FencedError
        When another process claimed a later epoch at the same time.
    """
    wait_until_free(store, takeover=takeover)
    run_id = uuid.uuid4().hex
    store.make_folder(EPOCHS_FOLDER)
    store.make_folder(STAGE_FOLDER)
    epoch = (highest_epoch(store) or 0) + 1
    while not store.create(epoch_key(epoch), run_id.encode()):
        epoch += 1
    for name in store.list(STAGE_FOLDER):
        other = parse_epoch(name)
        if other is None:
            # An earlier claim fenced it and died before it had deleted it.
            store.delete_tree(f"{STAGE_FOLDER}/{name}")
        elif other < epoch:
            # One rename fences all writers of that epoch at once; deleting file by file would not.
            fenced = fenced_folder(name, epoch)
            if store.move(f"{STAGE_FOLDER}/{name}", fenced):
                store.delete_tree(fenced)
    store.make_folder(stage_folder(epoch), parents=False)
    store.make_folder(stage_folder(epoch, 0), parents=False)
    highest = highest_epoch(store)
    if highest != epoch:
        raise FencedError(f"{store.url}: epoch {highest} was claimed at the same time as epoch {epoch}; this one ends")
    keeper = LeaseKeeper(store, Lease.of_this_process(run_id, options.lease_ttl), stage_folder(epoch, 0))
    nonce = uuid.uuid4().hex
    store.create(nonce_key(epoch), nonce.encode())
    keeper.write()
    keeper.start()
    return Claim(run_id=run_id, epoch=epoch, nonce=nonce, keeper=keeper)


def _regions(given: Sequence[Any], schema: StreamSchema) -> list[Region] | None:
    """Return the ranks' regions, None when no rank gave one."""
    if all(g is None for g in given):
        return None
    regions = []
    for rank, region in enumerate(given):
        if region is None:
            raise SchemaError(
                f"rank {rank} gave no region, other ranks did; every rank gives one or none does",
                kind="region",
                rank=rank,
            )
        try:
            regions.append(Region.from_mapping(region, schema.partitioned_sizes))
        except SchemaError as error:
            raise SchemaError(f"rank {rank}: {error}", kind=error.kind, rank=rank) from error
    return regions


def _log_plan(store: Store, schema: StreamSchema, epoch: EpochState) -> None:
    cost = plan(schema, epoch.regions)
    _log.info("%s: %s", store.url, cost)
    for warning in cost.warnings:
        _log.warning("%s: %s", store.url, warning)


def _put_layout(store: Store, epoch: int, regions: Sequence[Region]) -> str:
    data = layout_bytes(epoch, regions)
    store.create(layout_key(epoch), data)
    return hashlib.sha256(data).hexdigest()


def _put_manifest(store: Store, stager: Stager, manifest: Manifest) -> None:
    name = stager.name()
    store.stage(name, [manifest.to_bytes()], sync=True)
    store.place(name, MANIFEST_KEY)
    store.sync_folders([MANIFEST_KEY])


class CreateRequest:
    """A call of ``write_open``.

    Parameters
    ----------
    schema
        The schema as given.
    overwrite
        Whether what is there may be replaced.
    """

    def __init__(self, schema: StreamSchema, *, overwrite: bool) -> None:
        self._given = schema
        self._overwrite = overwrite

    def digest_parts(self) -> list[Any]:
        """Return what must be the same on every rank."""
        return [self._given.to_json(), self._overwrite]

    def check(self, store: Store, regions: Sequence[Any]) -> EpochState:
        """Check the request; nothing is written.

        Raises
        ------
        SchemaError, AlignmentError, TilingError
            For regions that don't fit.
        StoreError
            For a store that exists.
        """
        given = _regions(regions, self._given)
        self.schema = resolve_layout(self._given, len(regions), given)
        epoch = prove_epoch(self.schema, given or decompose(self.schema, len(regions)))
        self._names = _check_target(store, overwrite=self._overwrite)
        return epoch

    def begin(self, store: Store, claimed: Claim, epoch: EpochState, options: Options) -> tuple[Owner, None]:
        """Write everything of a new store, the manifest last but for the group's document."""
        stager = Stager(store, stage_folder(claimed.epoch, 0), claimed.epoch, threads=0, max_pending_nbytes=1)
        self._set_aside_old(store, claimed.epoch)
        digest = _put_layout(store, claimed.epoch, epoch.regions)
        schema = self.schema
        documents = make_documents(schema)
        for array in schema.arrays.values():
            if array.values is not None:
                objects = encode_whole(array, schema.key_separator, array.values)
                for item in objects:
                    stager.submit(item)
                stager.retry(objects)
                stager.place(objects, sync=True)
        put_documents(store, stager, documents.arrays(0, growing_only=False), sync=True)
        manifest = Manifest.first(
            store_id=uuid.uuid4().hex,
            run_id=claimed.run_id,
            epoch=claimed.epoch,
            schema=schema,
            layout_digest=digest,
        )
        _put_manifest(store, stager, manifest)
        # Before its group document a store is not a Zarr store: plain readers see it whole or not at all.
        put_documents(store, stager, {GROUP_KEY: documents.group(0)}, sync=True)
        store.delete_tree(_REPLACED_FOLDER)
        _log_plan(store, schema, epoch)
        return Owner(store, manifest, epoch, documents, claimed.keeper, options), None

    def _set_aside_old(self, store: Store, epoch: int) -> None:
        """Rename what was there out of the way, the manifest first: from then on it is no store."""
        store.delete(MANIFEST_KEY)
        for name in store.list(FOLDER):
            if f"{FOLDER}/{name}" not in (
                EPOCHS_FOLDER,
                STAGE_FOLDER,
                _REPLACED_FOLDER,
                nonce_key(epoch),
            ) and (name != "lease"):
                store.delete_tree(f"{FOLDER}/{name}")
        for name in self._names:
            if name != FOLDER:
                store.move(name, f"{_REPLACED_FOLDER}/{epoch}/{name}")


def _check_target(store: Store, *, overwrite: bool) -> list[str]:
    """Return what lies where the store shall be, if it may be replaced."""
    names = store.list()
    if not names:
        try:
            store.make_folder("")
        except StoreError as error:
            raise StoreError(
                f"{store.url}: can't be made a folder ({error}); give a path that is free or a folder",
                kind="not_a_folder",
                errno=error.errno,
            ) from error
        return []
    manifest = store.read(MANIFEST_KEY)
    document = store.read(GROUP_KEY)
    if manifest is not None or (document is not None and FOLDER not in names):
        what = "a stream" if manifest is not None else "a Zarr node"
        if not overwrite:
            continues = "; write_resume continues it" if manifest is not None else ""
            raise StoreError(f"{store.url} holds {what} already; overwrite=True replaces it{continues}", kind="exists")
        if manifest is None and _node_type(document) != "group":
            raise StoreError(
                f"{store.url} is a Zarr {_node_type(document)}, not a group; it is not replaced, give another path",
                kind="exists",
            )
    elif FOLDER not in names:
        raise StoreError(
            f"{store.url} is a folder with other things in it ({names[0]!r}); it is not replaced, give another path",
            kind="not_empty",
        )
    if (below := _stream_below(store, "")) is not None:
        raise StoreError(f"{store.url}: a stream lies below it, in {below!r}; remove that one first", kind="exists")
    # A folder with .mpistream but no manifest was never created: it is taken over like an empty one.
    return names


def _node_type(document: bytes | None) -> str:
    try:
        return str(parse_json(GROUP_KEY, document or b"").get("node_type"))
    except FormatError:
        return "node"


def _stream_below(store: Store, prefix: str) -> str | None:
    """Return a stream in a subgroup, if there is one; arrays have none below them."""
    for name in store.list(prefix):
        path = f"{prefix}/{name}" if prefix else name
        if name.startswith(".") or _node_type(store.read(f"{path}/{GROUP_KEY}")) == "array":
            continue
        if store.read(f"{path}/{MANIFEST_KEY}") is not None:
            return path
        if store.read(f"{path}/{GROUP_KEY}") is not None and (below := _stream_below(store, path)) is not None:
            return below
    return None


class ResumeRequest:
    """A call of ``write_resume``.

    Parameters
    ----------
    schema
        The caller's schema, to be compared, or None.
    at
        Records behind this time are dropped; None keeps all.
    expect_last_t
        The time that the last kept record must have, None: any.
    """

    def __init__(self, schema: StreamSchema | None, *, at: float | None, expect_last_t: float | None) -> None:
        self._given = schema
        self._at = _time("at", at)
        self._expect = _time("expect_last_t", expect_last_t)

    def digest_parts(self) -> list[Any]:
        """Return what must be the same on every rank."""
        return [None if self._given is None else self._given.to_json(), self._at, self._expect]

    def check(self, store: Store, regions: Sequence[Any]) -> EpochState:
        """Check the request against the store; nothing is written.

        Raises
        ------
        ResumeError
            When there is nothing to resume, the schema is another one, or the last time is not as expected.
        SchemaError, AlignmentError, TilingError
            For regions that don't fit.
        """
        manifest = self._read(store)
        if self._given is not None:
            _check_same_schema(self._given, manifest)
        n_keep, last_t, _ = self._cut(store, manifest)
        if self._expect is not None and last_t != self._expect:
            raise ResumeError(
                f"the last record that is kept has t = {last_t!r}, expected was {self._expect!r} "
                f"({n_keep} of {manifest.n_records} records kept): the checkpoint and the output differ; "
                "start from an older checkpoint, or pass at= to drop records",
                kind="last_t",
            )
        given = _regions(regions, manifest.schema)
        return prove_epoch(manifest.schema, given or decompose(manifest.schema, len(regions)))

    def _read(self, store: Store) -> Manifest:
        manifest = read_manifest(store)
        if manifest is None:
            what = "was never created whole" if FOLDER in store.list() else "is not a stream"
            raise ResumeError(f"{store.url} {what}; there is nothing to resume, use write_open", kind="no_store")
        return manifest

    def _cut(self, store: Store, manifest: Manifest) -> tuple[int, float | None, list[float]]:
        """Return how many records stay, the last of their times, and the times that go."""
        n = manifest.n_records
        if self._at is None or n == 0:
            return n, manifest.last_t, []
        times = _Times(store, manifest)
        n_keep = bisect.bisect_right(range(n), self._at, key=times.at)
        return n_keep, times.at(n_keep - 1) if n_keep else None, [times.at(i) for i in range(n_keep, n)]

    def begin(self, store: Store, claimed: Claim, epoch: EpochState, options: Options) -> tuple[Owner, Resumed]:
        """Recover: new manifest, then documents, then set aside what was dropped.

        Every step can be done again from the manifest, so a resume that dies is finished by the next one.
        """
        stager = Stager(store, stage_folder(claimed.epoch, 0), claimed.epoch, threads=0, max_pending_nbytes=1)
        # Read again: between the check and the claim a writer may have committed, from here on none can.
        old = self._read(store)
        n_keep, last_t, dropped_times = self._cut(store, old)
        manifest = recover(
            old,
            epoch=claimed.epoch,
            run_id=claimed.run_id,
            n_keep=n_keep,
            last_t=last_t,
            dropped_times=dropped_times,
            layout_digest=_put_layout(store, claimed.epoch, epoch.regions),
        )
        _put_manifest(store, stager, manifest)
        documents = make_documents(manifest.schema)
        _put_all_documents(store, stager, documents, n_keep)
        set_aside_dropped(store, manifest)
        remove_uncommitted(store, manifest)
        tidy(store, claimed.epoch)
        _log_plan(store, manifest.schema, epoch)
        resumed = Resumed(n_dropped=len(dropped_times), last_t=last_t, at=self._at, previous_epoch=old.epoch)
        return Owner(store, manifest, epoch, documents, claimed.keeper, options), resumed


def _time(what: str, t: Any) -> float | None:
    if t is None:
        return None
    try:
        value = float(t)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"{what} = {t!r} is not a number; give it in the schema's time units", kind="time") from error
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


class _Times:
    """Stored times by index; reads the chunks it is asked for, each once."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self._array = manifest.schema.time_array
        self._separator = manifest.schema.key_separator
        self._codec = ChunkCodec(self._array.chain, self._array.dtype)
        self._chunks: dict[int, Any] = {}

    def at(self, i: int) -> float:
        chunk, offset = divmod(i, SERIES_CHUNK)
        if chunk not in self._chunks:
            key = chunk_key(self._array.name, self._separator, (chunk,))
            self._chunks[chunk] = read_series_chunk(self._store, self._codec, key)
        return float(self._chunks[chunk][offset])


def _put_all_documents(store: Store, stager: Stager, documents: Documents, n_records: int) -> None:
    put_documents(
        store,
        stager,
        {GROUP_KEY: documents.group(n_records), **documents.arrays(n_records, growing_only=False)},
        sync=True,
    )

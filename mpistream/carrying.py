"""Tokens that the caller carried: verified and committed by whatever process has all of them.

The decision is that of any commit (`mpistream.commit`). As there is no rank 0 here that alone commits, whoever
does fences the others first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mpistream.comm import waiting
from mpistream.commit import Decision, decide, timed
from mpistream.epoch import EpochState, prove_epoch
from mpistream.errors import CommitError, FencedError, FormatError, MPIStreamError, StoreError
from mpistream.fence import fenced
from mpistream.foreign import no_stream_text
from mpistream.manifest import Manifest, layout_key, parse_layout, stage_folder
from mpistream.options import Options, resolve_options
from mpistream.owner import Owner, fault_error
from mpistream.ranges import inside, members
from mpistream.region import AnyRegion
from mpistream.resuming import StoredTimes, read_manifest
from mpistream.store import Store, open_store
from mpistream.token import CommitReceipt, CommitToken
from mpistream.zarr3.metadata import chunk_key, make_documents
from mpistream.zarr3.shard import parse_index

__all__ = ["commit_carried", "commit_tokens", "read_layout"]

_MAX_PAUSE = 0.1


def read_layout(store: Store, manifest: Manifest) -> tuple[int, list[AnyRegion] | None]:
    """Return the number of writers of the manifest's epoch, and their regions where the store has them.

    Not collective.

    Raises
    ------
    FormatError
        Kind ``layout``, with the key.
    """
    key = layout_key(manifest.epoch)
    data = store.read(key)
    if data is None or hashlib.sha256(data).hexdigest() != manifest.layout_digest:
        raise FormatError(f"{key}: missing or not the one that the manifest names", kind="layout")
    return parse_layout(key, data)


def commit_tokens(
    url: str | os.PathLike[str],
    tokens: Sequence[CommitToken | Mapping[str, Any]],
    *,
    options: Options | None = None,
) -> CommitReceipt:
    """Verify and commit the tokens of all parts, in a process that wrote none of them.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    tokens
        As in `PartWriter.commit`.
    options
        As in `write_open`.

    Raises
    ------
    CommitError, FormatError
        As `PartWriter.commit`.
    FencedError
        The store was opened again since; the tokens are of no use any more.

    Notes
    -----
    The same tokens again give the same receipt and change nothing. Of processes that commit at once one goes on, and
    the others see what it has committed.
    """
    return commit_carried(open_store(url), tokens, resolve_options(options))


def _as_token(token: CommitToken | Mapping[str, Any]) -> CommitToken:
    return token if isinstance(token, CommitToken) else CommitToken.from_json(token)


def commit_carried(store: Store, given: Sequence[CommitToken | Mapping[str, Any]], options: Options) -> CommitReceipt:
    """Decide, then commit alone; once more whenever another process has committed meanwhile.

    Not collective. See `commit_tokens`.
    """
    tokens = sorted(map(_as_token, given), key=lambda t: t.writer)
    plain = json.dumps([t.to_json() for t in tokens], sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(plain.encode()).hexdigest()
    for _ in waiting(options.timeout):
        manifest = _manifest_of(store, tokens)
        carried = manifest.carried
        if carried is not None and carried["digest"] == digest:
            return CommitReceipt.from_json(carried["receipt"])
        decision, times = _decide(store, manifest, tokens)
        assert decision.manifest is not None
        assert decision.receipt is not None
        carried = {"digest": digest, "receipt": asdict(decision.receipt)}
        decision = replace(decision, manifest=replace(decision.manifest, carried=carried))
        receipt = _commit_alone(store, manifest, decision, times, options)
        if receipt is not None:
            return receipt
        # Two that fence each other at the same time shall not do so for ever.
        time.sleep(random.uniform(0, _MAX_PAUSE))
    raise CommitError(
        f"{store.url}: other processes have been committing for {options.timeout:g} s; nothing was committed",
        kind="busy",
    )


def _manifest_of(store: Store, tokens: Sequence[CommitToken]) -> Manifest:
    """Return the committed state, of the opening from which the tokens are."""
    manifest = read_manifest(store)
    if manifest is None:
        raise FormatError(no_stream_text(store), kind="no_manifest")
    for token in tokens:
        if (token.store_id, token.run_id, token.epoch) != (manifest.store_id, manifest.run_id, manifest.epoch):
            raise CommitError(
                f"token of writer {token.writer} is of epoch {token.epoch} and run {token.run_id}, {store.url} is in "
                f"epoch {manifest.epoch} of run {manifest.run_id}: another attempt; nothing was committed",
                kind="token",
                rank=token.writer,
            )
    return manifest


def _decide(store: Store, manifest: Manifest, tokens: Sequence[CommitToken]) -> tuple[Decision, Sequence[float]]:
    """Return what the tokens make, and the times of their records."""
    n_writers, regions = read_layout(store, manifest)
    if regions is None:
        if [t.writer for t in tokens] != list(range(n_writers)):
            raise CommitError(
                f"tokens of writers {[t.writer for t in tokens]}, one is needed of each of {n_writers} parts; nothing "
                "was committed",
                kind="token",
            )
        regions = [t.region for t in tokens]
    try:
        epoch = prove_epoch(manifest.schema, regions)
    except MPIStreamError as error:
        raise CommitError(f"{error}; nothing was committed", kind=error.kind, rank=error.rank) from error
    times: Sequence[float] = tokens[0].times or () if tokens else ()
    if manifest.schema.is_location_series:
        times = ()
    elif manifest.schema.n_total is not None:
        # Fixed ones lie in the store. A part has compared its own with them; what arrives is what the caller carried.
        stored = StoredTimes(store, manifest)
        named = inside(tokens[0].records, 0, manifest.schema.n_total) if tokens else ()
        times = [stored.at(record) for record in members(named)]
    decision = decide(manifest, epoch, tokens, times)
    if decision.faults:
        raise fault_error(decision.faults)
    for token in tokens:
        _look(store, manifest, epoch, token)
    return decision, times


def _commit_alone(
    store: Store, manifest: Manifest, decision: Decision, times: Sequence[float], options: Options
) -> CommitReceipt | None:
    """Commit a decision over a manifest; None when another process has committed, or is committing, meanwhile.

    The fence is that of an opening, on a smaller scale: make a stage folder, take those of all others away, and only
    then read the manifest. Whoever had read it before can stage and rename nothing any more.
    """
    folder, name = stage_folder(manifest.epoch), f"commit-{os.urandom(8).hex()}"
    owner = None
    try:
        store.make_folder(f"{folder}/{name}", parents=False)
    except StoreError as error:
        raise fenced(store, manifest.epoch, error) from error
    try:
        for other in store.list(folder):
            if other.startswith("commit-") and other != name:
                taken = f"{folder}/{name}/{other}"
                if store.move(f"{folder}/{other}", taken, parents=False, sync=False):
                    store.delete_tree(taken)
        newest = read_manifest(store)
        if newest is None or (newest.store_id, newest.run_id) != (manifest.store_id, manifest.run_id):
            return None
        is_same = newest.commit_seq == manifest.commit_seq
        owner = Owner(
            store,
            newest,
            None,
            make_documents(newest.schema),
            None,
            options,
            folder=f"{folder}/{name}",
            is_published=is_same,
        )
        if not is_same:
            # Whoever has committed may have been fenced before the documents were in step.
            owner.publish(CommitReceipt.of(newest))
            return None
        assert decision.manifest is not None
        assert decision.receipt is not None
        owner.commit(owner.prepare(decision.manifest, timed(decision.records, times)))
        return owner.publish(decision.receipt)
    except (CommitError, StoreError) as error:
        meaning = fenced(store, manifest.epoch, error) if isinstance(error, StoreError) else error
        if not isinstance(meaning, FencedError) and name not in store.list(folder):
            return None
        raise meaning from error
    finally:
        if owner is not None:
            owner.close()
        with contextlib.suppress(StoreError):
            store.delete_tree(f"{folder}/{name}")


def _look(store: Store, manifest: Manifest, epoch: EpochState, token: CommitToken) -> None:
    """Look at the first and last shard of each variable of a part: a token may outlive what it names."""
    if not token.records:
        return
    for array in manifest.schema.arrays.values():
        boxes = epoch.boxes[array.name][token.writer] if array.is_sharded and array.has_time else ()
        if not boxes:
            continue
        shards = [next(iter(array.grid.shards_in(boxes[0]))), list(array.grid.shards_in(boxes[-1]))[-1]]
        rows = [token.records[0][0] // array.row_length, (token.records[-1][1] - 1) // array.row_length]
        for row, shard in zip(rows, shards, strict=True):
            key = chunk_key(array.name, manifest.schema.key_separator, (row, *shard))
            opened = store.open(key)
            if opened is None:
                raise CommitError(
                    f"rank {token.writer}: {key} is not in place, though its token says so; nothing was committed",
                    kind="token",
                    rank=token.writer,
                )
            try:
                spec = array.shard_spec()
                parse_index(
                    opened.read(max(opened.nbytes - spec.index_nbytes, 0), spec.index_nbytes), spec, opened.nbytes
                )
            except FormatError as error:
                raise CommitError(
                    f"rank {token.writer}: {key}: {error}; nothing was committed", kind="token", rank=token.writer
                ) from error
            finally:
                opened.close()

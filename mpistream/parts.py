"""The roles without MPI: independent processes write their parts, and the caller carries their tokens.

Writer 0 is the owner: it creates the store and its epoch. The others join that epoch when it is there. Each
part writes its region and calls ``flush``, which puts everything in place and returns a token; whoever has
all tokens commits them, the owner or, later and elsewhere, `commit_tokens`. The decision is the same as
with MPI.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mpistream.agreement import Channel
from mpistream.comm import SerialTransport, waiting
from mpistream.creating import CreateRequest
from mpistream.epoch import EpochState, Share, prove_epoch
from mpistream.errors import CommitError, FormatError, MPIStreamError, ProtocolError, SchemaError
from mpistream.layout import decompose, resolve_layout
from mpistream.manifest import Manifest, layout_key, nonce_key, parse_layout, stage_folder
from mpistream.opening import claim
from mpistream.options import Options, resolve_options
from mpistream.owner import Owner
from mpistream.parallel import StreamWriter
from mpistream.ranges import members
from mpistream.rank_writer import RankWriter
from mpistream.region import Region
from mpistream.resuming import read_manifest
from mpistream.schema import StreamSchema
from mpistream.store import Store, open_store
from mpistream.tiling import Box
from mpistream.token import CommitReceipt, CommitToken
from mpistream.zarr3.metadata import chunk_key, make_documents
from mpistream.zarr3.shard import parse_index

__all__ = ["PartWriter", "commit_tokens", "write_open_part"]


class PartWriter(StreamWriter):
    """One part of a store that independent processes write; made by `write_open_part`."""

    def flush(self) -> CommitToken:
        """Put everything since the last commit in place, durably, and name it in a token.

        Not collective.

        Returns
        -------
        The token, to be carried to whoever commits; ``json.dumps(token.to_json())`` is its form on the way.

        Raises
        ------
        StoreError, FencedError
            For what could not be written; a later call tries again.

        Notes
        -----
        Durable, but not committed. What a commit took in since the last call is not named again.
        """
        self._check_open("flush")
        self._catch_up()
        records = self._writer.stage(partial_rows=True)
        self._writer.place(records)
        return replace(self._writer.token(records), times=tuple(self._writer.times(records)))

    def _catch_up(self) -> None:
        """Build on what was committed meanwhile, by the owner or by `commit_tokens`."""
        newest = read_manifest(self._store)
        if newest is None or (newest.run_id, newest.epoch) != (self._manifest.run_id, self._manifest.epoch):
            raise CommitError(
                f"{self._store.url}: another attempt owns the store; this part belongs to epoch {self.epoch}",
                kind="token",
            )
        if newest.commit_seq != self._manifest.commit_seq:
            self._manifest = newest
            self._writer.committed(newest)

    def commit(
        self, tokens: Sequence[CommitToken | Mapping[str, Any]] | None = None, *, partial_rows: bool = True
    ) -> CommitReceipt:
        """Verify and commit the tokens of all parts.

        Not collective.

        The owner's call; `commit_tokens` does the same in any other process.

        Parameters
        ----------
        tokens
            One of each part, from its last ``flush``, as tokens or in their JSON form.
        partial_rows
            Must be True: a part puts whole what it flushes.

        Raises
        ------
        CommitError
            Nothing was committed: a token is missing, duplicate, late, or of another store or attempt, or the
            regions overlap or leave a hole.
        FormatError
            A token is damaged.

        Notes
        -----
        The same tokens again give the same receipt and change nothing.
        """
        self._check_open("commit")
        if self._owner is None or tokens is None or not partial_rows:
            raise ProtocolError(
                "without MPI the owner (writer 0) commits with commit(tokens), or any process with commit_tokens(url, "
                "tokens)",
                kind="role",
            )
        self._catch_up()
        self._owner.follow(self._manifest)
        self._receipt = _commit(self._store, self._owner, tokens)
        self._manifest = self._owner.manifest
        self._writer.committed(self._manifest)
        return self._receipt

    def invalidate(self, indices: Iterable[int]) -> CommitReceipt:
        """Not possible without MPI: the other parts would not know.

        Not collective.

        Parameters
        ----------
        indices
            The records.

        Raises
        ------
        ProtocolError
            Always.
        """
        raise ProtocolError(
            f"invalidate({indices!r}): parts without MPI can't; open the store with write_resume, which can",
            kind="role",
        )

    def close(self) -> None:
        """Release everything; what was not committed stays in place for its tokens.

        Not collective.
        """
        if not self._is_closed:
            # The stage folder is the right to commit that `commit_tokens` needs.
            self._release(keep_stage=True)


def write_open_part(
    url: str | os.PathLike[str],
    schema: StreamSchema,
    *,
    writer: int,
    n_writers: int,
    region: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> PartWriter:
    """Open one part of a store that independent processes write, without MPI.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store, on a file system that all parts share.
    schema
        What it holds, the same for every part.
    writer
        Number of this part. Writer 0 is the owner and creates the store; the others wait for it.
    n_writers
        Number of parts.
    region
        What this part owns; by default its box of ``decompose(schema, n_writers)``. With regions of its own the
        schema must give all shard shapes, and every variable must have all partitioned dims.
    options
        As in `write_open`; a part waits ``timeout`` seconds for the owner.

    Returns
    -------
    The writer of this part.

    Raises
    ------
    SchemaError, AlignmentError
        A region that does not fit.
    StoreError
        On the owner: the store exists or is in use.
    ProtocolError
        Elsewhere: the owner did not create the store in time, or with another schema or number of parts.
    """
    chosen, store = resolve_options(options), open_store(url)
    if not 0 <= writer < n_writers:
        raise SchemaError(f"writer {writer} of {n_writers}: give a number from 0 to {n_writers - 1}", kind="writer")
    schema = resolve_layout(schema, n_writers) if region is None else schema
    if region is None:
        epoch: EpochState | None = prove_epoch(schema, decompose(schema, n_writers))
        assert epoch is not None
        share = epoch.share(writer)
    else:
        epoch, share = None, _own_share(schema, writer, Region.from_mapping(region, schema.partitioned_sizes))
    if writer == 0:
        request = CreateRequest(schema, overwrite=False)
        request.check_target(store)
        claimed = claim(store, chosen, takeover=False)
        try:
            owner = request.create(store, claimed, epoch, n_writers, chosen)
        except BaseException:
            claimed.keeper.close()
            raise
        store.delete(nonce_key(claimed.epoch))
        manifest = owner.manifest
    else:
        owner, manifest = None, _wait_for_owner(store, schema, n_writers, chosen.timeout)
        store.make_folder(stage_folder(manifest.epoch, writer), parents=False)
    rank_writer = RankWriter(store, manifest, share, chosen)
    channel = Channel(SerialTransport(), chosen.timeout)
    return PartWriter(channel, store, rank_writer, owner, manifest, chosen, None)


def _own_share(schema: StreamSchema, writer: int, region: Region) -> Share:
    """Return what a part writes that does not know the others' regions."""
    boxes: dict[str, tuple[Box, ...]] = {}
    for array in schema.arrays.values():
        if not array.is_sharded:
            continue
        lacks = set(schema.partitioned_dims) - set(array.space_dims)
        if lacks == set(schema.partitioned_dims) and array.is_resolved:
            # The owner writes it, whatever the regions are.
            boxes[array.name] = (tuple((0, n) for n in array.shape),) if writer == 0 else ()
            continue
        if lacks or not array.is_resolved:
            what = f"lacks the dims {sorted(lacks)}" if lacks else "has no shard_shape and chunk_shape"
            raise SchemaError(
                f"variable {array.name!r} {what}: a part with a region of its own can't tell who writes it; leave "
                "region out",
                kind="region",
            )
        own = region.project([d for d in array.space_dims if d in schema.partitioned_dims])
        boxes[array.name] = own.boxes
        for box in own.boxes:
            array.grid.check_aligned(box, writer)
    return Share(writer=writer, region=region, boxes=boxes)


def _wait_for_owner(store: Store, schema: StreamSchema, n_writers: int, timeout: float) -> Manifest:
    for _ in waiting(timeout):
        manifest = read_manifest(store)
        if manifest is None:
            continue
        found, _ = _layout(store, manifest)
        if found != n_writers or manifest.fingerprint != schema.fingerprint():
            raise ProtocolError(
                f"{store.url} was created for {found} writers with another schema or number of parts than this one's "
                f"{n_writers}; give all parts the same",
                kind="mismatch",
            )
        return manifest
    raise ProtocolError(f"{store.url}: writer 0 did not create the store within {timeout:g} s", kind="timeout")


def _layout(store: Store, manifest: Manifest) -> tuple[int, list[Region] | None]:
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
    The same tokens again give the same receipt and change nothing. No two processes may commit different tokens at
    once.
    """
    store = open_store(url)
    manifest = read_manifest(store)
    if manifest is None:
        raise FormatError(f"{store.url}: no manifest; this is not a store of mpistream", kind="no_manifest")
    for token in map(_as_token, tokens):
        if (token.store_id, token.run_id, token.epoch) != (manifest.store_id, manifest.run_id, manifest.epoch):
            raise CommitError(
                f"token of writer {token.writer} is of epoch {token.epoch} and run {token.run_id}, {store.url} is in "
                f"epoch {manifest.epoch} of run {manifest.run_id}: another attempt; nothing was committed",
                kind="token",
                rank=token.writer,
            )
    _, regions = _layout(store, manifest)
    epoch = None if regions is None else prove_epoch(manifest.schema, regions)
    documents = make_documents(manifest.schema)
    # Not the pid: processes of several hosts may commit the same tokens at once.
    folder = f"{stage_folder(manifest.epoch)}/commit-{os.urandom(8).hex()}"
    owner = Owner(store, manifest, epoch, documents, None, resolve_options(options), folder=folder)
    try:
        return _commit(store, owner, tokens)
    finally:
        owner.close()
        store.delete_tree(folder)


def _as_token(token: CommitToken | Mapping[str, Any]) -> CommitToken:
    return token if isinstance(token, CommitToken) else CommitToken.from_json(token)


def _commit(store: Store, owner: Owner, given: Sequence[CommitToken | Mapping[str, Any]]) -> CommitReceipt:
    tokens = sorted(map(_as_token, given), key=lambda t: t.writer)
    plain = json.dumps([t.to_json() for t in tokens], sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(plain.encode()).hexdigest()
    carried = owner.manifest.carried
    if carried is not None and carried["digest"] == digest:
        return CommitReceipt.from_json(carried["receipt"])
    epoch = owner.epoch
    if epoch is None:
        n_writers, _ = _layout(store, owner.manifest)
        if [t.writer for t in tokens] != list(range(n_writers)):
            raise CommitError(
                f"tokens of writers {[t.writer for t in tokens]}, one is needed of each of {n_writers} parts; nothing "
                "was committed",
                kind="token",
            )
        try:
            epoch = prove_epoch(owner.manifest.schema, [t.region for t in tokens])
        except MPIStreamError as error:
            raise CommitError(f"{error}; nothing was committed", kind=error.kind, rank=error.rank) from error
    times = tokens[0].times if tokens and tokens[0].times is not None else ()
    decision = owner.decide(tokens, times, epoch)
    for token in tokens:
        _look(store, owner.manifest, epoch, token)
    assert decision.manifest is not None
    assert decision.receipt is not None
    carried = {"digest": digest, "receipt": asdict(decision.receipt)}
    manifest = replace(decision.manifest, carried=carried)
    owner.commit(owner.prepare(manifest, dict(zip(members(decision.records), times, strict=True))))
    return owner.publish(decision.receipt)


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

"""The roles without MPI: independent processes write their parts, and the caller carries their tokens.

Writer 0 is the owner: it creates the store and its epoch. The others join that epoch when it is there. Each
part writes its region and calls ``flush``, which puts everything in place and returns a token; whoever has
all tokens commits them, the owner or, later and elsewhere, `commit_tokens`. The decision is the same as
with MPI.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpistream.agreement import Channel
from mpistream.carrying import commit_carried, read_layout
from mpistream.comm import SerialTransport, waiting
from mpistream.creating import CreateRequest
from mpistream.epoch import EpochState, Share, prove_epoch
from mpistream.errors import AlignmentError, CommitError, ProtocolError, SchemaError
from mpistream.grid import held_boxes
from mpistream.holding import checked_holdings, plain_region
from mpistream.layout import resolve_layout, shard_regions
from mpistream.location_rank_writer import rank_writer_of
from mpistream.location_writer import LocationSeriesWriter
from mpistream.locations import row_length, written_records
from mpistream.manifest import Manifest, nonce_key, stage_folder
from mpistream.mover import Mover
from mpistream.opening import claim
from mpistream.options import Options, resolve_options
from mpistream.parallel import StreamWriter
from mpistream.region import AnyRegion, Region, RegionLike
from mpistream.resuming import read_manifest
from mpistream.schema import StreamSchema
from mpistream.stats import RunStats
from mpistream.store import Store, open_store
from mpistream.tiling import Box, box_n_cells
from mpistream.token import CommitReceipt, CommitToken

__all__ = ["PartWriter", "write_open_part"]


class PartWriter(StreamWriter):
    """One part of a store that independent processes write; made by `write_open_part`."""

    _commits_tokens = True

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
        with self.stats.during("commit"):
            self._catch_up()
            records = self._writer.stage(partial_rows=True)
            self._writer.place(records)
            return replace(self._writer.token(records), times=tuple(self._writer.times(records)))

    def _catch_up(self) -> None:
        """Build on what was committed meanwhile, by the owner or by `commit_tokens`."""
        newest = read_manifest(self._store)
        ours = self._stream.manifest
        if newest is None or (newest.run_id, newest.epoch) != (ours.run_id, ours.epoch):
            raise CommitError(
                f"{self._store.url}: another attempt owns the store; this part belongs to epoch {self.epoch}",
                kind="token",
            )
        if newest.commit_seq != ours.commit_seq:
            self._stream.manifest = newest
            self._writer.committed(newest)

    def commit(
        self,
        tokens: Sequence[CommitToken | Mapping[str, Any]] | None = None,
        *,
        partial_rows: bool = True,
        wait: bool = True,
    ) -> CommitReceipt:
        """Verify and commit the tokens of all parts.

        Not collective.

        The owner's call; `commit_tokens` does the same in any other process.

        Parameters
        ----------
        tokens
            One of each part, from its last ``flush``, as tokens or in their JSON form.
        partial_rows, wait
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
        if self._owner is None or tokens is None or not (partial_rows and wait):
            raise ProtocolError(
                "without MPI the owner (writer 0) commits with commit(tokens), or any process with commit_tokens(url, "
                "tokens)",
                kind="role",
            )
        began, seq = time.perf_counter(), self._stream.receipt.commit_seq
        with self.stats.during("commit"):
            self._catch_up()
            self._stream.receipt = commit_carried(self._store, tokens, self._options)
            self._catch_up()
        self._keep_lease()
        if self._stream.receipt.commit_seq != seq:
            self._log_commit(time.perf_counter() - began)
        return self._stream.receipt

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
        if not (self._is_closed or self._is_forked()):
            self._release(failed=False)
            # What became of its records, whoever commits them knows.
            own = {**self.stats.to_json(), "elapsed": time.perf_counter() - self._began}
            self.stats.run = RunStats.of(
                [own],
                n_records=self.stats.n_records,
                n_commits=self.stats.n_commits,
                record_noun=self.schema.record_noun,
            )
            self._log(logging.INFO, "part %d closed: %s", self._writer.writer, self.stats.run)

    def _log_open(self) -> None:
        # Every part is a process of its own, that nobody else speaks for.
        self._log(logging.INFO, "part %d, epoch %d, %s", self._writer.writer, self.epoch, self.stats.mode)

    def _release(self, *, failed: bool) -> None:  # noqa: ARG002 (whether the run is whole, its tokens say)
        """Give back what is this part's own.

        The epoch's stage folder stays, also when a ``with`` body has raised: the other parts stage below it, and
        `commit_tokens` needs it.
        """
        self._release_own(failed=False)


class LocationPartWriter(PartWriter, LocationSeriesWriter):
    """One part of a location series that independent processes write; made by `write_open_part`."""

    def close(self, *, partial: bool = False) -> None:
        """Release everything; what was not committed stays in place for its tokens.

        Not collective.

        Parameters
        ----------
        partial
            Of no meaning here: what other parts have written only `commit_tokens` can tell.
        """
        del partial
        PartWriter.close(self)


def write_open_part(
    url: str | os.PathLike[str],
    schema: StreamSchema,
    *,
    writer: int,
    n_writers: int,
    region: RegionLike | None = None,
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
        What this part owns, boxes on shard edges as in `write_open`; by default a balanced box of whole shards. With
        regions of its own the schema must give all shard shapes, and every variable must have all dims that its region
        names.
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
        epoch: EpochState | None = prove_epoch(schema, shard_regions(schema, n_writers))
        assert epoch is not None
        share = epoch.shares()[writer]
    else:
        epoch, share = None, _own_share(schema, writer, _own_region(schema, writer, region))
    request = CreateRequest(schema, overwrite=False)
    if writer == 0:
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
    rank_writer = rank_writer_of(store, manifest, share, chosen)
    channel = Channel(SerialTransport(), chosen.timeout)
    mover = Mover(channel, share, rank_writer)
    part = LocationPartWriter if schema.is_location_series else PartWriter
    return part(channel, store, rank_writer, mover, owner, manifest, chosen, None, None)


def _own_region(schema: StreamSchema, writer: int, region: RegionLike) -> AnyRegion:
    held = checked_holdings([plain_region(region)], schema, [writer])
    if held.indexed_dims:
        raise SchemaError(
            f"writer {writer}: Indices are rearranged, which parts without MPI can't; give boxes on shard edges, or "
            "open with comm=",
            kind="region",
        )
    assert held.regions is not None
    return held.regions[0]


def _own_share(schema: StreamSchema, writer: int, region: AnyRegion) -> Share:
    """Return what a part writes that does not know the others' regions."""
    if schema.is_location_series:
        return _own_locations(schema, writer, region)
    boxes: dict[str, tuple[Box, ...]] = {}
    for array in schema.arrays.values():
        if not array.is_sharded:
            continue
        own = region.of(array.name)
        lacks = set(own.dims) - set(array.base_dims)
        if lacks == set(own.dims) and array.is_resolved:
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
        held = held_boxes(array.grid, own.dims, own)
        boxes[array.name] = tuple(box for box in held if box_n_cells(box))
        for box in boxes[array.name]:
            array.grid.check_aligned(box, writer)
    return Share(writer=writer, region=region, boxes=boxes)


def _own_locations(schema: StreamSchema, writer: int, region: AnyRegion) -> Share:
    if not isinstance(region, Region):
        raise SchemaError(f"part {writer} gave {region!r}; a share is one range, (start, stop)", kind="region")
    if not schema.is_resolved:
        raise SchemaError(
            "a part with a share of its own can't tell how many locations a chunk has; give chunk_locations, or leave "
            "region out",
            kind="region",
        )
    length, n, share = row_length(schema), schema.n_total or 0, region.box[0]
    if any(edge % length and edge != n for edge in share):
        raise AlignmentError(
            f"part {writer} has the locations {share[0]} to {share[1] - 1}, which do not lie on the edges of chunks of "
            f"{length}; parts share no chunk",
            rank=writer,
        )
    boxes = {a.name: (tuple((0, n) for n in a.shape),) for a in schema.arrays.values() if a.is_sharded}
    return Share(writer=writer, region=region, boxes=boxes, records=written_records(share, length, n))


def _wait_for_owner(store: Store, schema: StreamSchema, n_writers: int, timeout: float) -> Manifest:
    for _ in waiting(timeout):
        manifest = read_manifest(store)
        if manifest is None:
            continue
        found, _ = read_layout(store, manifest)
        if found != n_writers or manifest.fingerprint != schema.fingerprint():
            raise ProtocolError(
                f"{store.url} was created for {found} writers with another schema or number of parts than this one's "
                f"{n_writers}; give all parts the same",
                kind="mismatch",
            )
        return manifest
    raise ProtocolError(f"{store.url}: writer 0 did not create the store within {timeout:g} s", kind="timeout")

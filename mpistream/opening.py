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

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpistream.decomposition import settle, settle_indexed
from mpistream.epoch import EpochState
from mpistream.errors import FencedError, FormatError, ProtocolError, SchemaError
from mpistream.fence import highest_epoch
from mpistream.holding import checked_holdings
from mpistream.lease import Lease, LeaseKeeper, wait_until_free
from mpistream.manifest import (
    DROPPED_FOLDER,
    EPOCHS_FOLDER,
    MANIFEST_KEY,
    STAGE_FOLDER,
    Manifest,
    dropped_folder,
    epoch_key,
    fenced_folder,
    layout_bytes,
    layout_key,
    nonce_key,
    parse_epoch,
    parse_open_dropped,
    stage_folder,
)
from mpistream.options import Options
from mpistream.ranges import Ranges
from mpistream.region import AnyRegion
from mpistream.schema import StreamSchema
from mpistream.staging import Stager
from mpistream.store import Store

__all__ = ["Claim", "check_alike", "claim", "no_claims", "put_layout", "put_manifest", "settled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An epoch that is ours, with the stage folder that goes with it."""

    run_id: str
    epoch: int
    nonce: str
    keeper: LeaseKeeper
    ended_well: bool  # the run before this one, as far as its lease tells


# A message names so many ranks.
_MAX_NAMED = 8

# Why this process must not write at present; see `no_claims`.
_why_no_claims: list[str] = []


@contextlib.contextmanager
def no_claims(why: str) -> Iterator[None]:
    """Refuse to open anything for writing in the body.

    Not collective.
    """
    _why_no_claims.append(why)
    try:
        yield
    finally:
        _why_no_claims.pop()


def claim(store: Store, options: Options, *, takeover: bool) -> Claim:
    """Claim the next epoch and fence all older writers.

    Not collective.

    Raises
    ------
    StoreError
        Kind ``lease`` when another writer is alive.
    FencedError
        When another process claimed a later epoch at the same time.
    ProtocolError
        Kind ``planning`` inside `no_claims`.
    """
    if _why_no_claims:
        raise ProtocolError(f"{store.url}: nothing is opened for writing here: {_why_no_claims[-1]}", kind="planning")
    ended_well = wait_until_free(store, takeover=takeover)
    run_id = os.urandom(16).hex()
    store.make_folder(EPOCHS_FOLDER)
    store.make_folder(STAGE_FOLDER)
    epoch = max(highest_epoch(store) or 0, _manifest_epoch(store)) + 1
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
    for name in store.list(DROPPED_FOLDER):
        other = parse_open_dropped(name)
        if other is not None and other < epoch:
            # The same fence for a resume that was setting records aside: what it has moved stays there.
            store.move(f"{DROPPED_FOLDER}/{name}", dropped_folder(other))
    store.make_folder(stage_folder(epoch), parents=False)
    store.make_folder(stage_folder(epoch, 0), parents=False)
    highest = highest_epoch(store)
    if highest != epoch:
        raise FencedError(f"{store.url}: epoch {highest} was claimed at the same time as epoch {epoch}; this one ends")
    keeper = LeaseKeeper(store, Lease.of_this_process(run_id, options.lease_ttl), stage_folder(epoch, 0))
    nonce = os.urandom(16).hex()
    store.create(nonce_key(epoch), nonce.encode())
    keeper.write()
    keeper.start()
    return Claim(run_id=run_id, epoch=epoch, nonce=nonce, keeper=keeper, ended_well=ended_well)


def _manifest_epoch(store: Store) -> int:
    """Return the manifest's epoch: claims may have been left out when a store was copied."""
    data = store.read(MANIFEST_KEY)
    try:
        return 0 if data is None else Manifest.from_bytes(data).epoch
    except FormatError:
        return 0


def check_alike(operation: str, votes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse arguments that are not the same on every rank, by name and rank.

    Raises
    ------
    ProtocolError
        Kind ``mismatch``.
    """
    mine = votes[0]["arguments"]
    differing: dict[str, list[int]] = {}
    for rank, vote in enumerate(votes):
        for name, text in vote["arguments"].items():
            if text != mine[name]:
                differing.setdefault(name, []).append(rank)
    if not differing:
        return
    said = []
    for name, ranks in differing.items():
        more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
        who = f"rank {', '.join(map(str, ranks[:_MAX_NAMED]))}{more}"
        theirs = {votes[rank]["arguments"][name] for rank in ranks}
        is_short = name != "schema" and len(theirs) == 1
        said.append(
            f"{name} is {theirs.pop()} on {who}, {mine[name]} on rank 0"
            if is_short
            else f"{name} of {who} is not rank 0's"
        )
    raise ProtocolError(
        f"{operation}: {'; '.join(said)}; give every rank the same arguments",
        kind="mismatch",
        rank=min(ranks[0] for ranks in differing.values()),
    )


def settled(
    schema: StreamSchema, votes: Sequence[Any], options: Options, committed: Ranges = ()
) -> tuple[StreamSchema, EpochState]:
    """Return the schema with its layout and the epoch, for what the ranks hold.

    Raises
    ------
    SchemaError, AlignmentError, TilingError
        For regions that don't fit.
    """
    nodes = [vote["node"] for vote in votes]
    held = checked_holdings([vote["region"] for vote in votes], schema)
    if held.indexed_dims:
        if schema.is_location_series:
            raise SchemaError("a share of a location series is one range, (start, stop), not Indices", kind="region")
        if options.rearrange == "never":
            raise SchemaError("Indices need rearranging; leave rearrange='never' out", kind="option")
        assert held.regions is not None
        return settle_indexed(schema, held.regions, held.indexed_dims, held.groups, nodes, writers=options.writers)
    return settle(
        schema, held.regions, nodes, writers=options.writers, rearrange=options.rearrange, committed=committed
    )


def put_layout(store: Store, epoch: int, n_writers: int, regions: Sequence[AnyRegion] | None) -> str:
    """Write the layout document of an epoch; return its digest."""
    data = layout_bytes(epoch, n_writers, regions)
    store.create(layout_key(epoch), data)
    return hashlib.sha256(data).hexdigest()


def put_manifest(store: Store, stager: Stager, manifest: Manifest) -> None:
    name = stager.name()
    store.stage(name, [manifest.to_bytes()], sync=True)
    store.place(name, MANIFEST_KEY)
    store.sync_folders([MANIFEST_KEY])

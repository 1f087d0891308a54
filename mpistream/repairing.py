"""A store that is there, brought in order or cut back without a run: ``mpistream repair`` and ``mpistream truncate``.

It is an opening like any other: it claims an epoch under the lease, fences all older writers and recovers as a
resume does, on one process. What it restores it then puts in place and commits as a writer would, so every
crash leaves the state of before or the one of after:

* A row that lies aside whole is written anew from there. Until the manifest names it, it is a row that was
  placed and never committed, which the next recovery removes; what lies aside stays there until then.
* A row that kept records may have been replaced since by one with records that were never committed. Its
  inner chunks stay at their offsets, so that plain readers of the kept records stay right; those of the
  restored records follow.
* The time chunks and the manifest go the way of any commit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import numpy as np

from mpistream.arrays import ArraySpec, Role
from mpistream.commit import restore
from mpistream.errors import FormatError, ResumeError, StoreError
from mpistream.fence import fenced
from mpistream.manifest import Dropped, Manifest, nonce_key, stage_folder
from mpistream.opening import claim
from mpistream.options import Options, resolve_options
from mpistream.owner import Owner
from mpistream.ranges import Ranges, count, inside, members, union
from mpistream.recovery import SetAside
from mpistream.resuming import Resumed, ResumeRequest, StoredTimes, no_stream, read_manifest
from mpistream.staged import StagedObject
from mpistream.staging import Stager
from mpistream.store import MAX_READ_NBYTES, Store, open_store, read_whole
from mpistream.times import TimeLike
from mpistream.token import CommitReceipt
from mpistream.zarr3.metadata import chunk_key
from mpistream.zarr3.shard import parse_index
from mpistream.zarr3.splice import with_records_of

__all__ = ["repair", "truncate"]


def repair(
    url: str | os.PathLike[str],
    *,
    restore_dropped: bool = False,
    takeover: bool = False,
    options: Options | None = None,
) -> CommitReceipt:
    """Finish what a writer that died has left undone, and bring dropped records back if asked to.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    restore_dropped
        Commit again the records that resumes with ``at`` have dropped since the last commit, all of them.
    takeover
        Go on even if a writer of the store seems to be alive; that one is fenced.
    options
        As in `write_open`.

    Returns
    -------
    What is committed now; ``n_new_records`` is the number of restored records.

    Raises
    ------
    ResumeError
        Kind ``nothing_dropped``: there are no dropped records, or a commit since has deleted them. Nothing is changed.
        Kind ``no_store``: there is no store.
    StoreError
        Kind ``lease``: a writer is alive. Otherwise the storage failed; a later call tries again.
    FormatError
        The store, or what was set aside, is damaged; nothing was restored.
    CommitError, FencedError
        As in `StreamWriter.commit`.

    Notes
    -----
    When it returns, the state is durable, documents are in step with it, and writers of earlier openings, parts
    without MPI too, are fenced: what they have not committed is lost.
    """
    request = ResumeRequest(None, at=None, expect_last_t=None)

    def look(store: Store) -> bool:
        if restore_dropped:
            _check_dropped(store, read_manifest(store))
        return True

    with _opened(url, request, "repair", look, takeover=takeover, options=options) as opened:
        assert opened is not None
        store, owner, _ = opened
        if not restore_dropped:
            return CommitReceipt.of(owner.manifest)
        _check_dropped(store, owner.manifest)
        return _restore(store, owner)


def truncate(
    url: str | os.PathLike[str],
    at: TimeLike,
    *,
    takeover: bool = False,
    options: Options | None = None,
) -> Resumed:
    """Drop the committed records behind a time, as `write_resume` does with ``at``, without a run.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    at
        Records with t > at are dropped; a number or a date as in `StreamWriter.write_record`.
    takeover
        Go on even if a writer of the store seems to be alive; that one is fenced.
    options
        As in `write_open`.

    Returns
    -------
    How many records were dropped, and the time of the last one that is kept.

    Raises
    ------
    SchemaError
        A time that the store's units and calendar have no number for.
    ResumeError
        Kind ``no_store``: there is no store.
    StoreError
        Kind ``lease``: a writer is alive. Otherwise the storage failed; a later call tries again.
    FormatError
        The store is damaged.
    FencedError
        Another opening took the store over meanwhile.

    Notes
    -----
    When it returns, the new state is durable. What was dropped is kept aside until the next commit, and `repair` with
    ``restore_dropped`` brings it back. Where nothing lies behind the time, nothing is written.
    """
    request = ResumeRequest(None, at=at, expect_last_t=None)

    def look(store: Store) -> bool:
        return request.foreseen(store).n_dropped > 0

    with _opened(url, request, "truncate", look, takeover=takeover, options=options) as opened:
        return request.foreseen(open_store(url)) if opened is None else opened[2]


@contextlib.contextmanager
def _opened(
    url: str | os.PathLike[str],
    request: ResumeRequest,
    what_for: str,
    look: Callable[[Store], bool],
    *,
    takeover: bool,
    options: Options | None,
) -> Iterator[tuple[Store, Owner, Resumed] | None]:
    """Open a store as the only writer, with what a resume does; None if, on a look before, nothing is to be done."""
    store, chosen = open_store(url), resolve_options(options)
    if read_manifest(store) is None:
        raise no_stream(store, what_for)
    # One writer; a look before the claim, so that a call in vain changes nothing.
    request.check(store, [{"region": None, "node": ""}], chosen)
    if not look(store):
        yield None
        return
    claimed = claim(store, chosen, takeover=takeover)
    owner: Owner | None = None
    try:
        owner, resumed = request.begin(store, claimed, None, chosen)
        yield store, owner, resumed
    except StoreError as error:
        raise fenced(store, claimed.epoch, error) from error
    finally:
        # Whoever follows a run that failed or died waits for a resume of it, and this is none.
        (claimed.keeper if owner is None else owner).close(failed=not claimed.ended_well)
        with contextlib.suppress(StoreError):
            store.delete(nonce_key(claimed.epoch))
            store.delete_tree(stage_folder(claimed.epoch))


def _check_dropped(store: Store, manifest: Manifest | None) -> None:
    if manifest is None or not manifest.dropped:
        raise ResumeError(
            f"{store.url}: no dropped records are kept aside, so there is nothing to restore: no resume has dropped "
            "any, or a commit since has deleted them",
            kind="nothing_dropped",
        )


def _restore(store: Store, owner: Owner) -> CommitReceipt:
    manifest = owner.manifest
    aside = SetAside(store, manifest)
    records = _records(manifest.dropped)
    times = _times(store, manifest, aside, records)
    # Everything is found before anything is put.
    found = list(_objects(manifest, aside, records))
    stager = Stager(store, stage_folder(manifest.epoch, 0), manifest.epoch, threads=0, max_pending_nbytes=1)
    items = []
    for array, row, key, source in found:
        pieces = _pieces(store, array, row, key, source, records)
        if pieces is not None:
            items.append(_staged(stager, array, key, pieces))
    stager.place(items, sync=False)
    # Of all: what lies in place already may be there since a restore that died before this.
    store.sync_folders([key for _, _, key, _ in found])
    new = restore(manifest, times)
    receipt = CommitReceipt(
        commit_seq=new.commit_seq,
        epoch=new.epoch,
        n_records=count(new.committed),
        last_t=new.last_t,
        n_new_records=count(records),
        new_statics=(),
        n_packs=0,
        n_objects=len(items),
        nbytes=sum(item.nbytes for item in items),
    )
    owner.commit(owner.prepare(new, dict(zip(members(records), times, strict=True))))
    return owner.publish(receipt)


def _records(dropped: tuple[Dropped, ...]) -> Ranges:
    return union(*(((d.start, d.stop),) for d in dropped))


def _times(store: Store, manifest: Manifest, aside: SetAside, records: Ranges) -> list[float]:
    """Return the times of the records: fixed ones lie in place, others were set aside."""
    is_fixed = manifest.schema.n_total is not None
    stored = StoredTimes(store, manifest, str if is_fixed else lambda key: _found(aside, key))
    times = [stored.at(i) for i in members(records)]
    if not is_fixed:
        known = [t for t in (manifest.last_t,) if t is not None] + times
        if not (np.isfinite(known).all() and (np.diff(known) > 0).all()):
            raise FormatError(
                f"{store.url}: the times of the dropped records do not go on behind t = {manifest.last_t!r}; what was "
                "set aside is damaged",
                kind="times",
            )
    return times


def _found(aside: SetAside, key: str) -> str:
    if (found := aside.find(key)) is None:
        raise FormatError(
            f"{key}: not among what was set aside under .mpistream/dropped, though its records were dropped; it can't "
            "be restored",
            kind="missing",
        )
    return found


def _objects(manifest: Manifest, aside: SetAside, records: Ranges) -> Iterator[tuple[ArraySpec, int, str, str]]:
    """Yield (array, row, key, where it lies aside) of all objects that hold any of the records, but for times."""
    for array in manifest.schema.arrays.values():
        if not array.has_time:
            continue
        n = array.row_length
        shards = [()] if array.role is Role.SERIES else list(np.ndindex(*array.grid.grid_shape))
        for row in sorted({r for a, b in records for r in range(a // n, -(-b // n))}):
            for shard in shards:
                key = chunk_key(array.name, manifest.schema.key_separator, (row, *shard))
                yield array, row, key, _found(aside, key)


def _pieces(store: Store, array: ArraySpec, row: int, key: str, source: str, records: Ranges) -> list[bytes] | None:
    """Return the bytes of an object with the restored records, None when it lies in place as it is aside."""
    most = array.shard_spec().max_nbytes if array.is_sharded else MAX_READ_NBYTES
    kept, current = read_whole(store, source, most), read_whole(store, key, most)
    if kept is None:
        raise FormatError(f"{source}: gone while it was restored", kind="missing")
    if kept == current:
        return None
    if array.role is Role.SERIES:
        return [kept]
    spec, start = array.shard_spec(), row * array.row_length
    try:
        if current is None:
            parse_index(kept[-spec.index_nbytes :], spec, len(kept))
            return [kept]
        there = members(inside(records, start, start + array.row_length))
        return with_records_of(spec, current, kept, [r - start for r in there])
    except FormatError as error:
        raise FormatError(f"{source}: {error}", kind=error.kind) from error


def _staged(stager: Stager, array: ArraySpec, key: str, pieces: list[bytes]) -> StagedObject:
    """Stage an object, so that its memory is free for the next one."""
    item = StagedObject(
        name=array.name,
        key=key,
        records=None,
        n_cells=0,
        pieces=pieces,
        nbytes=sum(map(len, pieces)),
        must_sync=True,
    )
    stager.submit(item)
    stager.retry([item])
    return item

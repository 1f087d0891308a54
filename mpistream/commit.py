"""The decision: which tokens make a commit. No I/O, no communication, no clock.

Theory of operation
-------------------
A commit has eight steps, and their order is what keeps the promises:

1. *Stage.* Every file is written under its writer's stage folder and synced.
2. *Arrive.* Every rank tells rank 0 what it is about to do and whether it is ready. Anything but
   "ready" from all, and every rank raises; no key of the store has changed.
3. *Place.* Rank 0 answers "go"; each rank renames its staged files to their keys and syncs the folders.
4. *Gather.* Rank 0 gathers one `CommitToken` a rank: what lies in place, durably, or what went wrong. One that came
   with the vote is confirmed, and does not travel again.
5. *Decide.* `decide` checks that the tokens belong together and tile every variable exactly once.
6. *Commit.* The owner renames the time chunk, then the manifest. The manifest's rename is the commit.
7. *Outcome.* Rank 0 sends the receipt or the error. A contributor believes nothing else.
8. *Publish.* The owner brings the Zarr documents in step with the manifest.

This room is step 5, and the same decision for a resume: `recover`. Where several streams are committed together, each
step is done for all of them before the next, but for the manifests, which are renamed one after the other. A commit
that does not wait for step 1 says in step 2 what is staged by now, and takes what all have: `mpistream.committing`.

Invariants
----------
I1  A record is committed iff the manifest says so. There is one manifest, and an invalid one is
    FormatError, never a silent fall-back.
I2  A manifest names only what was durable and in place before its token was gathered.
I3  The shards of a committed record cover each variable's box exactly.
I4  Within an epoch every shard key has one writer.
I5  While a record stays committed, its decoded content never changes.
I6  After any crash, recovery finds the last committed state or the one whose manifest was being
    renamed, nothing else; running recovery twice gives the same but for epoch and commit_seq.

With ``durability="none"`` I2 and I6 hold for the death of processes, not for that of the machine; even
then an object that replaces one with committed records is synced, and so is the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpistream.arrays import Role
from mpistream.epoch import EpochState
from mpistream.errors import counted
from mpistream.manifest import (
    Dropped,
    Manifest,
    add_times,
    floors_inside,
    raise_floors,
    set_floors,
    subtract_times,
)
from mpistream.ranges import Ranges, count, difference, inside, members, overlap, union
from mpistream.token import CommitReceipt, CommitToken, times_sha256

__all__ = ["Decision", "Fault", "decide", "next_manifest", "recover", "restore", "timed", "without_records"]

# A message names so many ranks; of 10,000 that differ nobody reads all.
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One reason against a commit."""

    kind: str
    text: str
    writer: int | None = None
    errno: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A new manifest with its receipt, or the reasons against it."""

    manifest: Manifest | None = None
    receipt: CommitReceipt | None = None
    records: Ranges = ()
    """The records that become committed."""
    faults: tuple[Fault, ...] = ()


def decide(manifest: Manifest, epoch: EpochState, tokens: Sequence[CommitToken], times: Sequence[float]) -> Decision:
    """Return the manifest that the tokens make, or all reasons against it.

    Not collective.

    Parameters
    ----------
    manifest
        The last committed state.
    epoch
        Who writes what.
    tokens
        One per writer, in any order.
    times
        The owner's times of the record set; every token must have the same, bitwise. In a location series there
        are none, and each writer has records of its own.
    """
    faults = [
        Fault(
            kind=str(t.failure["kind"]),
            text=f"rank {t.writer}: {t.failure['message']}",
            writer=t.writer,
            errno=t.failure["errno"],
        )
        for t in tokens
        if t.failure is not None
    ]
    faults = faults or _identity_faults(manifest, epoch, tokens)
    if manifest.schema.is_location_series:
        faults = faults or _location_faults(manifest, epoch, tokens)
    else:
        faults = faults or _record_faults(manifest, tokens, times)
    faults = faults or [*_region_faults(epoch, tokens), *_cover_faults(manifest, epoch, tokens)]
    if faults:
        return Decision(faults=tuple(faults))
    names = sorted({name for t in tokens for name in t.statics})
    n_packs = sum(t.n_packs for t in tokens)
    is_of_each = manifest.schema.is_location_series
    records = union(*(t.records for t in tokens)) if is_of_each else tokens[0].records
    new = next_manifest(manifest, records, times, names, n_packs)
    receipt = CommitReceipt(
        commit_seq=new.commit_seq,
        epoch=new.epoch,
        n_records=count(new.committed),
        last_t=new.last_t,
        n_new_records=count(records),
        new_statics=tuple(names),
        n_packs=n_packs,
        n_objects=sum(t.n_objects for t in tokens),
        nbytes=sum(t.nbytes for t in tokens),
    )
    return Decision(manifest=new, receipt=receipt, records=records)


def timed(records: Ranges, times: Sequence[float]) -> Mapping[int, float]:
    """Return record -> its time; nothing for the records of a location series, which have none.

    Not collective.
    """
    return dict(zip(members(records), times, strict=True)) if times else {}


def next_manifest(
    manifest: Manifest, records: Ranges, times: Sequence[float], statics: Sequence[str], n_packs: int = 0
) -> Manifest:
    """Return the committed state after a commit: every rank computes the same.

    Not collective.

    Parameters
    ----------
    manifest
        The state before.
    records
        The new records.
    times
        Their times.
    statics
        Names of the new statics.
    n_packs
        New packs of blobs.
    """
    last = manifest.committed[-1][1] if manifest.committed else 0
    return replace(
        manifest,
        committed=union(manifest.committed, records),
        last_t=times[-1] if times and records[-1][1] > last else manifest.last_t,
        times_digest=add_times(manifest.times_digest, timed(records, times).items()),
        commit_seq=manifest.commit_seq + 1,
        statics=tuple(sorted({*manifest.statics, *statics})),
        n_packs=manifest.n_packs + n_packs,
        # The first commit of an epoch makes what its resume dropped unreachable; only then is it deleted.
        dropped=(),
        carried=None,
    )


def without_records(manifest: Manifest, records: Ranges, times: Sequence[float], last_t: float | None) -> Manifest:
    """Return the committed state after committed records were given up: dropped by a resume, or invalidated.

    Not collective.

    Parameters
    ----------
    manifest
        The state before.
    records
        The records; all of them are committed.
    times
        Their times.
    last_t
        Time of the last record that stays.
    """
    commit_seq = manifest.commit_seq + 1
    return replace(
        manifest,
        committed=difference(manifest.committed, records),
        last_t=last_t,
        times_digest=subtract_times(manifest.times_digest, timed(records, times).items()),
        commit_seq=commit_seq,
        floors=raise_floors(manifest.floors, records, commit_seq),
        blob_floors=raise_floors(manifest.blob_floors, records, commit_seq),
        carried=None,
    )


def restore(manifest: Manifest, times: Sequence[float]) -> Manifest:
    """Return the committed state with everything that is kept aside committed again.

    Not collective.

    Parameters
    ----------
    manifest
        The state before.
    times
        Times of the dropped records, ascending by record.
    """
    records = union(*(((d.start, d.stop),) for d in manifest.dropped))
    new = next_manifest(manifest, records, times, ())
    blob_floors = manifest.blob_floors
    for d in manifest.dropped:
        blob_floors = set_floors(blob_floors, d.start, d.stop, d.blob_floors)
    # Blobs are found as before the drop. A reader that knows a state of that time may have met what was written
    # meanwhile in their place and never committed, so the other floors rise.
    return replace(new, floors=raise_floors(manifest.floors, records, new.commit_seq), blob_floors=blob_floors)


# A commit of a million ranks has a million tokens: one expression over all of them finds those that are not right, and
# only these are taken apart.


def _identity_faults(manifest: Manifest, epoch: EpochState, tokens: Sequence[CommitToken]) -> list[Fault]:
    """One token per writer, all of this store, opening and base."""
    ours = (manifest.store_id, manifest.fingerprint, manifest.epoch, manifest.run_id, manifest.commit_seq)
    faults = []
    for t in [t for t in tokens if (t.store_id, t.fingerprint, t.epoch, t.run_id, t.base_seq) != ours]:
        theirs = (t.store_id, t.fingerprint, t.epoch, t.run_id, t.base_seq)
        what, a, b = next(
            (what, a, b)
            for what, a, b in zip(
                ("store", "schema fingerprint", "epoch", "run", "base commit"), theirs, ours, strict=True
            )
            if a != b
        )
        faults.append(Fault(kind="token", text=f"rank {t.writer}: token of {what} {a}, not {b}", writer=t.writer))
    faults += [
        Fault(
            kind="token", text=f"rank {t.writer}: {t.n_packs} packs of blobs, a writer has one or none", writer=t.writer
        )
        for t in tokens
        if t.n_packs not in (0, 1)
    ]
    seen, n_writers = Counter([t.writer for t in tokens]), len(epoch.regions)
    for writer in [w for w in range(n_writers) if seen.get(w) != 1]:
        text = f"rank {writer}: no token" if writer not in seen else f"rank {writer}: {seen[writer]} tokens"
        faults.append(Fault(kind="token", text=text, writer=writer))
    faults += [
        Fault(kind="token", text=f"token of rank {w}, there are {n_writers} ranks", writer=w)
        for w in sorted(w for w in seen if not 0 <= w < n_writers)
    ]
    return faults


def _record_faults(manifest: Manifest, tokens: Sequence[CommitToken], times: Sequence[float]) -> list[Fault]:
    """The same record set, behind what is committed, at bitwise the same times."""
    first = min(tokens, key=lambda t: t.writer)
    if any(t.records != first.records for t in tokens):
        said = ", ".join(f"rank {t.writer} {count(t.records)} records to t = {t.last_t}" for t in tokens[:_MAX_NAMED])
        more = f" and {len(tokens) - _MAX_NAMED} more ranks" if len(tokens) > _MAX_NAMED else ""
        return [
            Fault(
                kind="records",
                text=f"the ranks wrote different records: {said}{more}; call rollback() on every rank and write again",
            )
        ]
    n_total = manifest.schema.n_total
    fits = count(first.records) == len(times) and first.records == union(first.records)
    if n_total is None:
        start = count(manifest.committed)
        fits = fits and first.records in ((), ((start, start + len(times)),))
    else:
        fits = fits and inside(first.records, 0, n_total) == first.records
        fits = fits and not overlap(first.records, manifest.committed)
    if not fits:
        text = f"records {first.records} with {len(times)} times do not fit to the committed ones, {manifest.committed}"
        return [Fault(kind="records", text=text)]
    sha = times_sha256(times)
    return [
        Fault(
            kind="times",
            text=f"rank {t.writer}: its times are not those of the commit: {_last_times(t.last_t, times)}; call "
            "rollback() on every rank and write again",
            writer=t.writer,
        )
        for t in tokens
        if t.times_sha256 != sha
    ]


def _last_times(theirs: float | None, times: Sequence[float]) -> str:
    ours = times[-1] if times else None
    # By their texts: -0.0 is another time than 0.0.
    if repr(theirs) == repr(ours):
        return f"one of {counted(len(times), 'record')} differs, the last has t = {ours!r} in both"
    return f"its last t = {theirs!r}, the one of the commit is {ours!r}"


def _location_faults(manifest: Manifest, epoch: EpochState, tokens: Sequence[CommitToken]) -> list[Fault]:
    """Records of each writer's own: its part of the epoch's, which are disjoint, and not committed yet."""
    faults = []
    for t in tokens:
        start, stop = epoch.records[t.writer]
        if t.records != union(t.records) or inside(t.records, start, stop) != t.records:
            text = f"rank {t.writer}: locations {t.records}, it writes those from {start} to {stop}"
            faults.append(Fault(kind="records", text=text, writer=t.writer))
        elif taken := overlap(t.records, manifest.committed):
            text = f"rank {t.writer}: locations {taken} are committed already"
            faults.append(Fault(kind="records", text=text, writer=t.writer))
        elif t.times_sha256 != times_sha256(()):
            faults.append(Fault(kind="times", text=f"rank {t.writer}: a location has no time", writer=t.writer))
    return faults


def _region_faults(epoch: EpochState, tokens: Sequence[CommitToken]) -> list[Fault]:
    """The regions that were proven to tile every variable when the epoch began."""
    return [
        Fault(
            kind="tiling",
            text=f"rank {t.writer}: token over {t.region!r}, the epoch's layout says {epoch.regions[t.writer]!r}",
            writer=t.writer,
        )
        for t in tokens
        if t.region != epoch.regions[t.writer]
    ]


def _cover_faults(manifest: Manifest, epoch: EpochState, tokens: Sequence[CommitToken]) -> list[Fault]:
    """Every cell of every variable and record, and of every static that anybody wrote, exactly once."""
    faults = []
    named = {name for t in tokens for name in t.statics}
    faults += [
        Fault(kind="static", text=f"static {name!r} is committed already; it is written once")
        for name in sorted(named & set(manifest.statics))
    ]
    streaming = [a.name for a in manifest.schema.arrays.values() if a.has_time]
    statics = {a.name for a in manifest.schema.arrays.values() if a.role is Role.STATIC}
    n_of = [count(tokens[0].records)] * len(epoch.regions)  # the same in all of them
    if manifest.schema.is_location_series:
        for t in tokens:
            n_of[t.writer] = count(t.records)
    new = sorted(named & statics)
    wrong = [t for t in tokens if not (t.n_cells.keys() <= set(streaming) and t.statics.keys() <= statics)]
    for name in streaming:
        cells = epoch.n_cells[name]
        wrong += [t for t in tokens if t.n_cells.get(name, 0) != cells[t.writer] * n_of[t.writer]]
    for name in new:
        cells = epoch.n_cells[name]
        wrong += [t for t in tokens if t.statics.get(name, 0) != cells[t.writer]]
    at_fault = {t.writer for t in wrong}
    for t in [t for t in tokens if t.writer in at_fault] if at_fault else ():
        unknown = {*(set(t.n_cells) - set(streaming)), *(set(t.statics) - statics)}
        faults += [
            Fault(kind="tiling", text=f"rank {t.writer}: unknown variable {name!r}", writer=t.writer)
            for name in sorted(unknown)
        ]
        wanted = [(name, n_of[t.writer], t.n_cells.get(name, 0)) for name in streaming]
        wanted += [(name, 1, t.statics.get(name, 0)) for name in new]
        for name, n, found in wanted:
            cells = epoch.n_cells[name]
            if found != cells[t.writer] * n:
                held = epoch.regions[t.writer].of(name)
                faults.append(
                    Fault(
                        kind="tiling",
                        text=f"rank {t.writer}: {found} cells of {name!r} are in place, its part of "
                        f"{counted(n, manifest.schema.record_noun)} has {cells[t.writer] * n} in {held!r}",
                        writer=t.writer,
                    )
                )
    return faults


def recover(
    manifest: Manifest,
    *,
    epoch: int,
    run_id: str,
    n_keep: int,
    last_t: float | None,
    dropped_times: Sequence[float],
    layout_digest: str,
) -> Manifest:
    """Return the first manifest of a new epoch, with the first ``n_keep`` records.

    Not collective.

    Parameters
    ----------
    manifest
        The last committed state.
    epoch, run_id
        The new opening's.
    n_keep
        Records to keep.
    last_t
        Time of the last of them.
    dropped_times
        Times of the records behind them.
    layout_digest
        Digest of the new epoch's layout document.
    """
    dropped = inside(manifest.committed, n_keep, manifest.n_records)
    new = without_records(manifest, dropped, dropped_times, last_t)
    return replace(
        new,
        run_id=run_id,
        epoch=epoch,
        commit_seq=manifest.commit_seq + 1,
        first_seq=manifest.commit_seq + 1,
        carried=None,
        dropped=(
            *manifest.dropped,
            *(
                Dropped(epoch=epoch, start=a, stop=b, blob_floors=floors_inside(manifest.blob_floors, a, b))
                for a, b in dropped
            ),
        ),
        layout_digest=layout_digest,
    )

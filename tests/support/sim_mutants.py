"""The protocol, broken in one place: each mutant must end in a violation in the simulation that it names.

A mutant replaces a function of the project, or one of its calls of the store, for as long as its body lasts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from mpistream import carrying, commit, committing, local_store, mover, opening, owner, publishing, ranges, resuming
from mpistream.agreement import Channel
from mpistream.errors import CommitError, FencedError, StoreError
from mpistream.fence import highest_epoch
from mpistream.local_store import LocalStore
from mpistream.manifest import EPOCHS_FOLDER, MANIFEST_KEY
from mpistream.opening import put_manifest
from mpistream.owner import Owner
from mpistream.parallel import StreamWriter
from mpistream.pipeline import Line, Member
from mpistream.rank_writer import RankWriter
from mpistream.recovery import set_aside_dropped
from mpistream.resuming import read_manifest
from mpistream.rows import ShardRows
from mpistream.staged import StagedObject
from mpistream.staging import Stager
from mpistream.stats import WriterStats
from mpistream.token import CommitReceipt, CommitToken
from tests.support import sim_scenarios
from tests.support.sim_ranks import here

__all__ = ["MUTANTS", "Mutant", "mutated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One place where the protocol is broken."""

    name: str
    scenario: str
    """The function of `sim_scenarios` that must find it."""
    patches: Callable[[], Sequence[tuple[Any, str, Any]]]
    """(object, attribute, what is put there)."""


@contextmanager
def mutated(mutant: Mutant) -> Iterator[Callable[..., Counter[str]]]:
    """Break the protocol for the body; give the scenario."""
    with ExitStack() as stack:
        for target, name, new in mutant.patches():
            stack.enter_context(mock.patch.object(target, name, new))
        yield getattr(sim_scenarios, mutant.scenario)


MUTANTS: list[Mutant] = []


class _SystemOfStore:
    def __getattr__(self, name: str) -> Any:
        return getattr(vars(local_store)["os"], name)


# The calls of the system that `mpistream.local_store` makes, simulated by then.
system: Any = _SystemOfStore()


def _mutant(name: str, scenario: str) -> Callable[[Callable[[], Sequence[tuple[Any, str, Any]]]], None]:
    def add(patches: Callable[[], Sequence[tuple[Any, str, Any]]]) -> None:
        MUTANTS.append(Mutant(name=name, scenario=scenario, patches=patches))

    return add


# What is synced


def _stage_unsynced(is_meant: Callable[[bytes], bool]) -> Sequence[tuple[Any, str, Any]]:
    stage = LocalStore.stage

    def unsynced(self: LocalStore, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        return stage(self, key, pieces, sync=sync and not is_meant(b"".join(bytes(p) for p in pieces)))

    return [(LocalStore, "stage", unsynced)]


def _folders_unsynced(is_meant: Callable[[str], bool]) -> Sequence[tuple[Any, str, Any]]:
    sync = LocalStore.sync_folders

    def unsynced(self: LocalStore, keys: Any, known: Any = None) -> None:
        sync(self, [k for k in keys if not is_meant(k)], known)

    return [(LocalStore, "sync_folders", unsynced)]


@_mutant("what is staged is not synced", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return _stage_unsynced(lambda data: True)


@_mutant("a manifest is not synced before its rename", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return _stage_unsynced(lambda data: b'"commit_seq"' in data)


@_mutant("documents are not synced before their rename", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return _stage_unsynced(lambda data: b'"zarr_format"' in data)


@_mutant("shards are not synced before their rename", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return _stage_unsynced(lambda data: b'"zarr_format"' not in data and b'"commit_seq"' not in data)


@_mutant("no folder is synced", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return _folders_unsynced(lambda key: True)


@_mutant("the folders of shards are not synced", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return _folders_unsynced(lambda key: key.startswith("u/c/"))


@_mutant("the folder of time is not synced", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return _folders_unsynced(lambda key: key.startswith("time/c/"))


@_mutant("the folder of blobs is not synced", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return _folders_unsynced(lambda key: key.startswith(".mpistream/blobs/"))


@_mutant("the folder of the manifest is not synced", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return _folders_unsynced(lambda key: key == MANIFEST_KEY)


@_mutant("the root is not synced before the first manifest", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    sync = LocalStore.sync_folders

    def unsynced(self: LocalStore, keys: Any, known: Any = None) -> None:
        if keys != ["zarr.json"]:
            sync(self, keys, known)

    return [(LocalStore, "sync_folders", unsynced)]


@_mutant("only the innermost folder is synced", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(local_store, "_folders_of", lambda keys, known: sorted({k.rpartition("/")[0] for k in keys}))]


@_mutant("a folder counts as durable when the one above it was durable before", "rows")
def _() -> Sequence[tuple[Any, str, Any]]:
    find = local_store._folders_of

    def known_too_soon(keys: Any, known: Any) -> set[str]:
        above = {folder.rpartition("/")[0] for folder in known} | set(known)
        return set(
            find(keys, {folder for key in keys if (folder := key.rpartition("/")[0]).rpartition("/")[0] in above})
        )

    return [(local_store, "_folders_of", known_too_soon)]


@_mutant("folders are synced before what is renamed into them", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    place = Stager.place

    def early(self: Stager, items: Any, *, sync: bool) -> None:
        if sync:
            for item in items:
                self._store.make_folder(item.key.rpartition("/")[0])
            self._store.sync_folders([i.key for i in items])
        place(self, items, sync=False)

    return [(Stager, "place", early)]


@_mutant("folders that are made are not synced", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    make = LocalStore.make_folder

    def unsynced(self: LocalStore, key: str, *, parents: bool = True) -> None:
        if parents:
            system.makedirs(self._path(key), exist_ok=True)
        else:
            make(self, key, parents=False)

    return [(LocalStore, "make_folder", unsynced)]


# In which order


@_mutant("documents are published before the manifest", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    commit_ = Owner.commit

    def early(self: Owner, prepared: Any) -> None:
        before, self.manifest, self._is_published = self.manifest, prepared.manifest, False
        self.publish(CommitReceipt.of(prepared.manifest))
        self.manifest = before
        commit_(self, prepared)

    return [(Owner, "commit", early)]


@_mutant("the manifest is renamed before the time chunk", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    commit_, place = Owner.commit, Owner.place_times

    def late(self: Owner, prepared: Any) -> None:
        commit_(self, prepared)
        place(self, prepared)

    return [(Owner, "commit", late), (Owner, "place_times", lambda self, prepared: None)]


@_mutant("the owner commits before it gathers", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    announce = committing._Commit._announce

    def gathered(self: Any, receipts: Any, error: Any) -> Any:
        self.channel.gather(b"[]")
        return announce(self, receipts, error)

    return [
        (committing._Commit, "_gather", lambda self, pending, tokens: None),
        (committing._Commit, "_announce", gathered),
    ]


@_mutant("a rank that has sent its token takes that for the commit", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    exchange = Channel.exchange
    sent: dict[int, Any] = {}

    def noted(self: Channel, operation: str, *, payload: Any = None, **more: Any) -> Any:
        if operation == "commit":
            sent[id(self)] = payload
        return exchange(self, operation, payload=payload, **more)

    def believed(self: Channel) -> Any:
        self._n += 1
        token = CommitToken.from_text(sent[id(self)][0]["token"])
        receipt = CommitReceipt(
            commit_seq=token.base_seq + 1,
            epoch=token.epoch,
            n_records=token.records[-1][1],
            last_t=token.last_t,
            n_new_records=1,
            new_statics=tuple(sorted(token.statics)),
            n_packs=1,
            n_objects=0,
            nbytes=0,
        )
        return {"receipts": [receipt.to_json()], "records": [token.records], "error": None}

    return [(Channel, "exchange", noted), (Channel, "await_announcement", believed)]


@_mutant("a resume moves what it drops before its manifest", "drop")
def _() -> Sequence[tuple[Any, str, Any]]:
    def late(store: Any, stager: Any, manifest: Any) -> None:
        set_aside_dropped(store, stager, manifest)
        put_manifest(store, stager, manifest)

    return [(resuming, "put_manifest", late)]


@_mutant("a resume leaves rows that were never committed", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(resuming, "remove_uncommitted", lambda store, stager, manifest: None)]


@_mutant("a resume leaves blobs that were never committed", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(resuming, "remove_uncommitted_blobs", lambda store, stager, manifest: None)]


@_mutant("a row with committed records is not read back", "crash")
def _() -> Sequence[tuple[Any, str, Any]]:
    def forgetful(self: ShardRows, committed: Any) -> None:
        self._committed, self._open, self._staged = (), {}, {}

    return [(ShardRows, "reset", forgetful)]


# The fence


def _keep_stage_folders() -> tuple[Any, str, Any]:
    move = LocalStore.move

    def kept(self: LocalStore, source: str, target: str, **more: Any) -> bool:
        return ".fenced-by-" not in target and move(self, source, target, **more)

    return LocalStore, "move", kept


@_mutant("an epoch is looked up before a rename, in the place of the fence", "zombie")
def _() -> Sequence[tuple[Any, str, Any]]:
    place = LocalStore.place

    def checked(self: LocalStore, staged: str, key: str) -> None:
        epoch = int(staged.split("/")[2])
        if (highest_epoch(self) or 0) > epoch:
            raise StoreError(f"{staged} is of an older epoch", kind="gone")
        place(self, staged, key)

    return [_keep_stage_folders(), (LocalStore, "place", checked)]


@_mutant("the manifest is read before the fence", "zombie")
def _() -> Sequence[tuple[Any, str, Any]]:
    read = resuming.ResumeRequest._read
    known: dict[int, Any] = {}

    def early(self: Any, store: Any) -> Any:
        # Kept with the request, so that no other one gets its number.
        return known.setdefault(id(self), (self, read(self, store)))[1]

    return [(resuming.ResumeRequest, "_read", early)]


@_mutant("an epoch is used again", "zombie")
def _() -> Sequence[tuple[Any, str, Any]]:
    create, claimed = LocalStore.create, []

    def again(self: LocalStore, key: str, data: bytes) -> bool:
        if key.startswith(EPOCHS_FOLDER):
            claimed.append(int(key.rpartition("/")[2]))
            create(self, key, data)
            return True
        return create(self, key, data)

    manifest_epoch = opening._manifest_epoch
    return [
        (LocalStore, "create", again),
        (opening, "_manifest_epoch", lambda store: manifest_epoch(store) - 1),
        (opening, "highest_epoch", lambda store: claimed.pop() if claimed else 0),
    ]


@_mutant("a stage folder that is gone is made again", "zombie")
def _() -> Sequence[tuple[Any, str, Any]]:
    stage = LocalStore.stage

    def anew(self: LocalStore, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        system.makedirs(self._path(key.rpartition("/")[0]), exist_ok=True)
        return stage(self, key, pieces, sync=sync)

    return [(LocalStore, "stage", anew)]


@_mutant("a file that is gone counts as placed", "zombie")
def _() -> Sequence[tuple[Any, str, Any]]:
    place = LocalStore.place

    def placed(self: LocalStore, staged: str, key: str) -> None:
        try:
            place(self, staged, key)
        except StoreError as error:
            if error.kind != "gone":
                raise

    return [(LocalStore, "place", placed)]


@_mutant("what is removed does not go through the stage folder", "claims")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(Stager, "remove", lambda self, key, sync=False: self._store.delete_tree(key))]


@_mutant("nobody looks for a higher epoch after a claim", "claims")
def _() -> Sequence[tuple[Any, str, Any]]:
    create, claimed = LocalStore.create, []

    def noted(self: LocalStore, key: str, data: bytes) -> bool:
        is_new = create(self, key, data)
        if is_new and key.startswith(EPOCHS_FOLDER):
            claimed.append((self.root, int(key.rpartition("/")[2])))
        return is_new

    def blind(store: Any) -> int | None:
        mine = [epoch for root, epoch in claimed if root == store.root]
        claimed[:] = [c for c in claimed if c[0] != store.root]
        return mine[-1] if mine else highest_epoch(store)

    return [(LocalStore, "create", noted), (opening, "highest_epoch", blind)]


@_mutant("two may claim the same epoch", "claims")
def _() -> Sequence[tuple[Any, str, Any]]:
    create = LocalStore.create

    def shared(self: LocalStore, key: str, data: bytes) -> bool:
        return create(self, key, data) or key.startswith(EPOCHS_FOLDER)

    return [(LocalStore, "create", shared)]


# The decision


@_mutant("a failure in a token is passed over", "faults")
def _() -> Sequence[tuple[Any, str, Any]]:
    token = RankWriter.token

    def fine(self: RankWriter, records: Any, failure: Any = None, statics: Any = None) -> CommitToken:
        return token(self, records, None, statics)

    return [(RankWriter, "token", fine)]


@_mutant("whose tokens they are is not checked", "tokens")
def _() -> Sequence[tuple[Any, str, Any]]:
    check = commit._identity_faults

    def partly(manifest: Any, epoch: Any, tokens: Any) -> Any:
        return [f for f in check(manifest, epoch, tokens) if " token" in f.text and ": token of" not in f.text]

    return [
        (commit, "_identity_faults", partly),
        (carrying, "_manifest_of", lambda store, tokens: read_manifest(store)),
    ]


@_mutant("tokens are not counted", "tokens")
def _() -> Sequence[tuple[Any, str, Any]]:
    check = commit._identity_faults

    def partly(manifest: Any, epoch: Any, tokens: Any) -> Any:
        return [f for f in check(manifest, epoch, tokens) if ": token of" in f.text]

    return [(commit, "_identity_faults", partly)]


@_mutant("a token's own base is not checked", "tokens")
def _() -> Sequence[tuple[Any, str, Any]]:
    check = commit._identity_faults

    def partly(manifest: Any, epoch: Any, tokens: Any) -> Any:
        return [f for f in check(manifest, epoch, tokens) if "base commit" not in f.text]

    return [(commit, "_identity_faults", partly)]


@_mutant("the records of tokens are not compared", "tokens")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(commit, "_record_faults", lambda manifest, tokens, times: [])]


@_mutant("the regions of tokens are not compared", "tokens")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(commit, "_region_faults", lambda epoch, tokens: [])]


@_mutant("cells are not counted", "tokens")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(commit, "_cover_faults", lambda manifest, epoch, tokens: [])]


# What goes wrong


@_mutant("an error is told on one rank alone", "faults")
def _() -> Sequence[tuple[Any, str, Any]]:
    run = committing._Commit.run

    def alone(self: Any, failure: Any, others: Any) -> None:
        for stream in self.streams:
            stream.writer.stage(partial_rows=self.partial_rows)
        run(self, failure, others)

    return [(committing._Commit, "run", alone)]


@_mutant("a short write is taken for a whole one", "faults")
def _() -> Sequence[tuple[Any, str, Any]]:
    def once(fd: int, pieces: Sequence[Any]) -> int:
        views = [memoryview(p).cast("B") for p in pieces if memoryview(p).nbytes]
        system.writev(fd, views)
        return sum(v.nbytes for v in views)

    return [(local_store, "_write_all", once)]


@_mutant("a failed open or sync of a folder leaves a descriptor", "faults")
def _() -> Sequence[tuple[Any, str, Any]]:
    def leaky(folder: str) -> None:
        fd = system.open(folder, system.O_RDONLY | system.O_DIRECTORY | system.O_CLOEXEC)
        system.fsync(fd)
        system.close(fd)

    return [(local_store, "_sync_path", leaky)]


@_mutant("a manifest whose rename failed counts as not committed", "faults")
def _() -> Sequence[tuple[Any, str, Any]]:
    place = Owner._place_manifest

    def sure(self: Owner, staged: str, data: bytes) -> None:
        try:
            place(self, staged, data)
        except FencedError:
            raise
        except CommitError as error:
            raise CommitError(str(error), kind="io", rank=0, errno=error.errno) from error

    return [(Owner, "_place_manifest", sure)]


# Commits that do not wait


@_mutant("a commit takes a record whose sync is still under way on one rank", "pipelined")
def _() -> Sequence[tuple[Any, str, Any]]:
    stage = LocalStore.stage

    def later(self: LocalStore, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        process = here()
        pool = None if process is None or process.who != 1 else process.pool
        if pool is None or not pool.is_working:
            return stage(self, key, pieces, sync=sync)
        nbytes = stage(self, key, pieces, sync=False)
        fd = system.open(self._path(key), system.O_RDONLY)

        def sync_it(_: Any) -> None:
            system.fsync(fd)
            system.close(fd)

        pool.add(Line(Member(1, 1, WriterStats())), sync_it)
        return nbytes

    return [(LocalStore, "stage", later)]


@_mutant("a commit that does not wait takes what rank 0 has", "pipelined")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(committing, "overlap", lambda ours, theirs: ours)]


@_mutant("records behind one that is on its way are ready", "pipelined")
def _() -> Sequence[tuple[Any, str, Any]]:
    ready = RankWriter.ready

    def eager(self: RankWriter) -> Any:
        _, statics = ready(self)
        return self.records_to_commit(partial_rows=False), statics

    return [(RankWriter, "ready", eager)]


@_mutant("a record that one rank still stages is not waited for by close", "pipelined")
def _() -> Sequence[tuple[Any, str, Any]]:
    commit_ = StreamWriter.commit

    def hasty(self: StreamWriter, tokens: Any = None, *, partial_rows: bool = True, wait: bool = False) -> Any:
        return commit_(self, tokens, partial_rows=partial_rows, wait=wait)

    return [(StreamWriter, "commit", hasty)]


@_mutant("a static that one rank still stages is committed", "pipelined")
def _() -> Sequence[tuple[Any, str, Any]]:
    agree = committing._Commit._agree

    def eager(self: Any, i: int, votes: Any) -> Any:
        every = sorted({name for vote in votes for name in vote["statics"]})
        agreed = agree(self, i, votes)
        return agreed if agreed is None and not every else {"records": (), **(agreed or {}), "statics": every}

    return [(committing._Commit, "_agree", eager)]


# Pieces that move


@_mutant("a record is taken before its pieces have come", "moving")
def _() -> Sequence[tuple[Any, str, Any]]:
    move = mover.Mover.move

    def early(self: Any, load: Any) -> Any:
        blocks = {name: [block.copy() for block in of] for name, of in load.blocks.items()}
        move(self, load)
        return blocks

    return [(mover.Mover, "move", early)]


@_mutant("pieces move before all ranks have agreed", "refused")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(StreamWriter, "_agreed", lambda self, call, names, make, digest: make())]


@_mutant("what a rank holds of another's shard stays where it is", "moving")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(Channel, "swap", lambda self, sends, receives: None)]


# Records that are written again


@_mutant("a rewritten record is placed before the manifest withdrew it", "fixed")
def _() -> Sequence[tuple[Any, str, Any]]:
    commit_ = Owner.commit

    def late(self: Owner, prepared: Any) -> None:
        if sum(b - a for a, b in prepared.manifest.committed) >= sum(b - a for a, b in self.manifest.committed):
            commit_(self, prepared)
        else:  # the next one says it, too
            self.discard(prepared)
            self.manifest, self._is_published = prepared.manifest, False

    return [(Owner, "commit", late)]


@_mutant("the array committed names a record while it is written again", "fixed")
def _() -> Sequence[tuple[Any, str, Any]]:
    publish = Owner._publish_committed

    def growing(self: Owner) -> None:
        if not ranges.difference(self._named[1], self.manifest.committed):
            publish(self)

    return [(Owner, "_publish_committed", growing)]


@_mutant("the array committed is withdrawn but not synced", "fixed")
def _() -> Sequence[tuple[Any, str, Any]]:
    put = publishing.put_committed
    return [(owner, "put_committed", lambda *args, sync: put(*args, sync=False))]


@_mutant("a resume leaves the array committed as it is", "fixed")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(resuming, "put_committed", lambda *args, sync: None)]


@_mutant("a row is begun anew for a record of it that is written again", "fixed")
def _() -> Sequence[tuple[Any, str, Any]]:
    read = ShardRows._read_row

    def anew(self: ShardRows, row: int) -> Any:
        committed, self._committed = self._committed, ()
        try:
            return read(self, row)
        finally:
            self._committed = committed

    return [(ShardRows, "_read_row", anew)]


@_mutant("blobs of a record that was invalidated stay", "fixed")
def _() -> Sequence[tuple[Any, str, Any]]:
    return [(commit, "raise_floors", lambda floors, records, commit_seq: floors)]


@_mutant("the series of a record that is written again is not placed", "fixed")
def _() -> Sequence[tuple[Any, str, Any]]:
    place = Stager.place

    def partly(self: Stager, items: Sequence[StagedObject], *, sync: bool) -> None:
        place(self, [i for i in items if i.name != "n" or self._store.read(i.key) is None], sync=sync)

    return [(Stager, "place", partly)]

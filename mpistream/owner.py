"""The owner's part of a commit: time chunk, manifest, documents. No communication."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mpistream.commit import Decision, Fault, decide
from mpistream.epoch import EpochState
from mpistream.errors import CommitError, FencedError, MPIStreamError, StoreError
from mpistream.lease import LeaseKeeper
from mpistream.local_store import MAX_SYNC_THREADS
from mpistream.manifest import DROPPED_FOLDER, MANIFEST_KEY, Manifest, stage_folder
from mpistream.options import Options
from mpistream.pipeline import Line
from mpistream.publishing import make_rows, put_committed, put_documents, shared_rows
from mpistream.ranges import difference, overlap, union
from mpistream.series import SeriesRows
from mpistream.staged import StagedObject
from mpistream.staging import Stager
from mpistream.store import Store
from mpistream.together import run_together
from mpistream.token import CommitReceipt, CommitToken
from mpistream.zarr3.metadata import GROUP_KEY, Documents

__all__ = ["Owner", "Prepared", "commit_error", "fault_error"]

_log = logging.getLogger("mpistream")

_MAX_FAULTS = 8


def commit_error(error: MPIStreamError, rank: int) -> MPIStreamError:
    """Return what a failure of one rank's part of a commit is on every rank.

    Not collective.
    """
    if isinstance(error, CommitError | FencedError):
        return error
    return CommitError(
        f"rank {rank}: {error}; nothing was committed",
        kind="io" if isinstance(error, StoreError) else error.kind,
        rank=error.rank if error.rank is not None else rank,
        errno=getattr(error, "errno", None),
        cause_text=str(error),
    )


def fault_error(faults: Sequence[Fault]) -> CommitError | FencedError:
    """Return the error that names the faults of a decision.

    Not collective.
    """
    texts = [f.text for f in faults[:_MAX_FAULTS]]
    if len(faults) > _MAX_FAULTS:
        texts.append(f"and {len(faults) - _MAX_FAULTS} more")
    first = faults[0]
    if first.kind == "fenced":
        return FencedError(first.text, rank=first.writer)
    return CommitError(
        f"nothing was committed: {'; '.join(texts)}",
        kind=first.kind,
        rank=first.writer,
        errno=first.errno,
        cause_text=first.text,
    )


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A commit whose files are staged."""

    manifest: Manifest
    data: bytes
    """The manifest's bytes."""
    staged: str
    """The key under which they are staged."""
    time_objects: list[StagedObject] = field(default_factory=list)
    are_times_placed: bool = False


class Owner:
    """What only rank 0 does for an open store.

    Parameters
    ----------
    store
        The store.
    manifest
        The committed state.
    epoch
        Who writes what in this epoch; None where the tokens say it.
    documents
        The Zarr documents.
    keeper
        The lease, None in a process that only commits.
    options
        The options.
    folder
        Its stage folder, which exists; by default one below that of writer 0, which is made here.
    is_published
        Whether the documents are in step with the manifest.

    Raises
    ------
    FormatError
        When the last chunk of the time coordinate can't be read.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        epoch: EpochState | None,
        documents: Documents,
        keeper: LeaseKeeper | None,
        options: Options,
        *,
        folder: str | None = None,
        is_published: bool = True,
    ) -> None:
        self._store = store
        self.manifest = manifest
        self.epoch = epoch
        self._documents = documents
        self.keeper = keeper
        self._is_durable = options.durability == "fsync"
        # A stage of its own beside the writer's, in the same epoch's folder: both are fenced by one rename.
        if folder is None:
            folder = f"{stage_folder(manifest.epoch, 0)}/owner"
            self._store.make_folder(folder, parents=False)
        self._stager = Stager(store, folder, manifest.epoch, threads=0, max_pending_nbytes=1)
        schema = manifest.schema
        self._time: SeriesRows | None = None
        if schema.n_total is None:
            self._time = SeriesRows(schema.time_array, schema.key_separator, store)
            self._time.reset(manifest.committed)
        # What the array `committed` on disk names: at least, and at most. They differ while it is being written, and
        # after that has failed.
        self._named = manifest.committed if is_published else (), manifest.committed
        self._is_published = is_published
        # The group's document as it was last written here.
        self._group = b""
        # What is being published behind the caller's back, and what went wrong there.
        self._behind: tuple[Stager, Line] | None = None
        self._warning = ""
        self._must_delete_dropped = False
        self._shared = () if epoch is None else shared_rows(schema, epoch)

    def decide(self, tokens: Sequence[CommitToken], times: Sequence[float]) -> Decision:
        """Return the decision over tokens; it raises the faults as one error.

        Raises
        ------
        CommitError
            Naming rank, variable and box.
        """
        assert self.epoch is not None
        decision = decide(self.manifest, self.epoch, tokens, times)
        if decision.faults:
            raise fault_error(decision.faults)
        return decision

    def prepare(self, manifest: Manifest, times: Mapping[int, float]) -> Prepared:
        """Stage the time chunks and the manifest of a commit; nothing that a reader sees has changed.

        Parameters
        ----------
        manifest
            The state to commit.
        times
            New record -> its time.

        Raises
        ------
        CommitError
            Kind ``io``: a later try may succeed.
        FencedError
            When a newer epoch owns the store.
        """
        self.settle()
        # Whatever ended an earlier try: its times must not lie before these.
        self._drop_times()
        prepared = Prepared(manifest=manifest, data=manifest.to_bytes(), staged=self._stager.name())
        try:
            if self._time is not None and times:
                for record, t in times.items():
                    self._time.put(record, t)
                prepared.time_objects = self._time.objects(manifest.committed)
            # Together, so that they wait for the disk once.
            jobs: list[Callable[[], object]] = [partial(self._stager.submit, item) for item in prepared.time_objects]
            jobs.append(partial(self._store.stage, prepared.staged, [prepared.data], sync=True))
            run_together(jobs, min(len(jobs), MAX_SYNC_THREADS) if self._is_durable else 1)
            self._stager.retry(prepared.time_objects)
        except MPIStreamError as error:
            self.discard(prepared)
            raise commit_error(self._stager.fenced(error) if isinstance(error, StoreError) else error, 0) from error
        return prepared

    def discard(self, prepared: Prepared) -> None:
        """Forget what was prepared for a commit that will not be."""
        self._stager.discard(prepared.time_objects)
        with contextlib.suppress(StoreError):
            self._store.delete(prepared.staged)

    def place_times(self, prepared: Prepared) -> None:
        """Rename the time chunks of a commit; `commit` does it where it was not done before.

        Raises
        ------
        CommitError
            Kind ``io``: nothing was committed, a later commit may succeed.
        FencedError
            When a newer epoch owns the store; nothing was committed.
        """
        if prepared.are_times_placed:
            return
        try:
            # Beyond the visible length a new time chunk harms nobody, so it goes first; a manifest never
            # names a time that is not there (I2).
            self._stager.place(prepared.time_objects, sync=self._is_durable)
        except MPIStreamError as error:
            self.discard(prepared)
            raise commit_error(self._stager.fenced(error) if isinstance(error, StoreError) else error, 0) from error
        prepared.are_times_placed = True

    def commit(self, prepared: Prepared) -> None:
        """Rename the time chunks, then the manifest: after this call the records are committed.

        Raises
        ------
        CommitError
            Kind ``io``: nothing was committed, a later commit may succeed. Kind ``outcome_unknown``: the
            manifest's rename or its folder's sync failed.
        FencedError
            When a newer epoch owns the store; nothing was committed.
        """
        self.place_times(prepared)
        self._place_manifest(prepared.staged, prepared.data)
        if self._time is not None:
            self._time.committed(prepared.manifest.committed)
        self._must_delete_dropped |= bool(self.manifest.dropped) and not prepared.manifest.dropped
        self.manifest = prepared.manifest
        self._is_published = False

    def _drop_times(self) -> None:
        if self._time is not None:
            self._time.drop_uncommitted()

    def _place_manifest(self, staged: str, data: bytes) -> None:
        """The commit itself."""
        try:
            try:
                self._store.place(staged, MANIFEST_KEY)
            except StoreError as error:
                # NFS sends a rename again when the answer was lost: ENOENT, though it was done.
                if error.kind != "gone" or self._store.read(MANIFEST_KEY) != data:
                    meaning = self._stager.fenced(error)
                    if isinstance(meaning, FencedError):
                        self._drop_times()
                    raise meaning from error
            if self._is_durable:
                self._store.sync_folders([MANIFEST_KEY])
        except FencedError:
            raise
        except Exception as error:
            # The rename was tried: from here on only the store knows.
            raise CommitError(
                f"the manifest's rename or the sync of its folder failed ({error}): whether the commit took place is "
                "not known; this writer is dead, write_resume tells what is committed",
                kind="outcome_unknown",
                rank=0,
                errno=getattr(error, "errno", None),
            ) from error

    def publish(self, receipt: CommitReceipt, behind: Stager | None = None) -> CommitReceipt:
        """Bring the documents in step with the manifest; what fails is a warning and is done again later.

        Parameters
        ----------
        receipt
            Of the last commit.
        behind
            Whose threads do it while the caller goes on, if it waits for a disk: what does not is done sooner by one
            thread than by two that take turns in the interpreter. The next commit waits for it.

        Returns
        -------
        The receipt with what is wrong; of what is done by threads that is found in a later one.
        """
        self.settle()
        if self._is_published:
            return receipt
        if behind is None or behind.is_synchronous or not self._is_durable:
            self._publish()
            warning = self._warning
        else:
            # That of the one before: if it goes well this time nobody would know that plain readers were late.
            warning = self._warning
            # Known before it begins: whoever is interrupted in between must not miss it.
            line = behind.new_line(waits=True)
            self._behind = behind, line
            behind.do_in(line, self._publish)
        return replace(receipt, warnings=(*receipt.warnings, warning)) if warning else receipt

    def settle(self, timeout: float | None = None) -> None:
        """Wait for what is published behind the caller's back: one thread at a time is in this object."""
        if self._behind is not None:
            stager, line = self._behind
            if stager.wait_for(line, timeout):
                self._behind = None

    @property
    def is_published(self) -> bool:
        """Whether the documents are known to be in step with the manifest."""
        return self._is_published and self._behind is None

    def _publish(self) -> None:
        n = self.manifest.n_records
        self._warning = ""
        try:
            # The group first: for readers of consolidated metadata all variables grow at once.
            group = self._documents.group(n)
            documents = {} if group == self._group else {GROUP_KEY: group}
            documents |= self._documents.arrays(n, growing_only=True)
            put_documents(self._store, self._stager, documents, sync=self._is_durable)
            self._group = group
            self._publish_committed()
            if self._must_delete_dropped:
                self._stager.remove(DROPPED_FOLDER)
                self._must_delete_dropped = False
            self._is_published = True
            make_rows(self._store, self._stager, self._shared, n, sync=self._is_durable)
        except Exception as error:  # noqa: BLE001 (the other ranks know that it is committed, and go on)
            self._warning = f"committed, but the Zarr documents lag behind until the next commit or resume: {error}"
            _log.warning("%s: %s", self._store.url, self._warning)

    def withdraw(self) -> None:
        """Make the array ``committed`` stop naming records that were invalidated, if it still does.

        Before that nothing may be placed where they lie, nor anything while folders of rows are still being made.

        Raises
        ------
        FencedError, StoreError
            When it can't be written; a later call tries again.
        """
        self.settle()
        if difference(self._named[1], self.manifest.committed):
            try:
                self._publish_committed()
            except StoreError as error:
                raise self._stager.fenced(error) from error

    def _publish_committed(self) -> None:
        """Bring the ``committed`` array in step; only chunks that change are written."""
        array, now = self.manifest.schema.committed_array, self.manifest.committed
        if array is None:
            return
        length = array.resolved_chunk_shape[0]
        at_least, at_most = self._named
        changed = union(difference(now, at_least), difference(at_most, now))
        chunks = {c for a, b in changed for c in range(a // length, -(-b // length))}
        self._named = overlap(at_least, now), union(at_most, now)
        put_committed(self._store, self._stager, self.manifest, sorted(chunks), sync=self._is_durable)
        self._named = now, now

    def close(self, *, failed: bool = False) -> None:
        """Give the lease back and remove this epoch's stage folders."""
        if self.keeper is not None:
            self.keeper.close(failed=failed)
        self._stager.close()

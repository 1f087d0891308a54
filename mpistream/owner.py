"""The owner's part of a commit: time chunk, manifest, documents. No communication."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpistream.commit import Decision, Fault, decide
from mpistream.epoch import EpochState
from mpistream.errors import CommitError, FencedError, MPIStreamError, StoreError
from mpistream.lease import LeaseKeeper
from mpistream.manifest import DROPPED_FOLDER, MANIFEST_KEY, Manifest, stage_folder
from mpistream.options import Options
from mpistream.rows import SeriesRows
from mpistream.staging import StagedObject, Stager
from mpistream.store import Store
from mpistream.token import CommitReceipt, CommitToken
from mpistream.zarr3.metadata import GROUP_KEY, Documents

__all__ = ["Owner", "commit_error", "fault_error"]

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


class Owner:
    """What only rank 0 does for an open store.

    Parameters
    ----------
    store
        The store.
    manifest
        The committed state.
    epoch
        Who writes what in this epoch.
    documents
        The Zarr documents.
    keeper
        The lease.
    options
        The options.

    Raises
    ------
    FormatError
        When the last chunk of the time coordinate can't be read.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        epoch: EpochState,
        documents: Documents,
        keeper: LeaseKeeper,
        options: Options,
    ) -> None:
        self._store = store
        self.manifest = manifest
        self.epoch = epoch
        self._documents = documents
        self.keeper = keeper
        self._is_durable = options.durability == "fsync"
        folder = stage_folder(manifest.epoch, 0)
        # A stage of its own beside the writer's, below it: both are fenced by one rename.
        self._stager = Stager(store, f"{folder}/owner", manifest.epoch, threads=0, max_pending_nbytes=1)
        self._store.make_folder(f"{folder}/owner", parents=False)
        self._time = SeriesRows(manifest.schema.time_array, manifest.schema.key_separator)
        self._time.reset(store, manifest.n_records)
        self._is_published = True
        self._must_delete_dropped = False

    def decide(self, tokens: Sequence[CommitToken], times: Sequence[float]) -> Decision:
        """Return the decision over tokens; it raises the faults as one error.

        Raises
        ------
        CommitError
            Naming rank, variable and box.
        """
        decision = decide(self.manifest, self.epoch, tokens, times)
        if decision.faults:
            raise fault_error(decision.faults)
        return decision

    def commit(self, decision: Decision, times: Sequence[float]) -> CommitReceipt:
        """Rename the time chunk, then the manifest: after this call the records are committed.

        Raises
        ------
        CommitError
            Kind ``io``: nothing was committed, a later commit may succeed. Kind ``outcome_unknown``: the
            manifest's rename or its folder's sync failed.
        FencedError
            When a newer epoch owns the store; nothing was committed.
        """
        assert decision.manifest is not None
        assert decision.receipt is not None
        # Whatever ended an earlier try: its times must not lie before these.
        self._time.drop_uncommitted()
        for t in times:
            self._time.add(t)
        objects: list[StagedObject] = []
        staged = self._stager.name()
        try:
            # Beyond the visible length a new time chunk harms nobody, so it goes first; a manifest never
            # names a time that is not there (I2).
            if times:
                objects = self._time.objects(decision.manifest.n_records)
                for item in objects:
                    self._stager.submit(item)
                self._stager.retry(objects)
            self._store.stage(staged, [data := decision.manifest.to_bytes()], sync=True)
            self._stager.place(objects, sync=self._is_durable)
        except MPIStreamError as error:
            self._stager.discard(objects)
            with contextlib.suppress(StoreError):
                self._store.delete(staged)
            raise commit_error(self._stager.fenced(error) if isinstance(error, StoreError) else error, 0) from error
        self._place_manifest(staged, data)
        self._time.committed(decision.manifest.n_records)
        self._must_delete_dropped |= bool(self.manifest.dropped)
        self.manifest = decision.manifest
        self._is_published = False
        return decision.receipt

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
                        self._time.drop_uncommitted()
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

    def publish(self, receipt: CommitReceipt) -> CommitReceipt:
        """Bring the documents in step with the manifest; what fails is a warning and is done again later."""
        if self._is_published:
            return receipt
        n = self.manifest.n_records
        try:
            # The group first: for readers of consolidated metadata all variables grow at once.
            put_documents(
                self._store,
                self._stager,
                {GROUP_KEY: self._documents.group(n), **self._documents.arrays(n, growing_only=True)},
                sync=self._is_durable,
            )
            if self._must_delete_dropped:
                self._stager.remove(DROPPED_FOLDER)
                self._must_delete_dropped = False
            self._is_published = True
        except (FencedError, StoreError) as error:
            text = f"committed, but the Zarr documents lag behind until the next commit or resume: {error}"
            _log.warning("%s: %s", self._store.url, text)
            return replace(receipt, warnings=(*receipt.warnings, text))
        return receipt

    def close(self) -> None:
        """Give the lease back and remove this epoch's stage folders."""
        self.keeper.close()
        self._stager.close()


def put_documents(store: Store, stager: Stager, documents: Mapping[str, bytes], *, sync: bool) -> None:
    """Stage all documents, then rename them one after the other.

    Not collective.
    """
    staged: dict[str, str] = {}
    try:
        for key, data in documents.items():
            staged[key] = stager.name()
            store.stage(staged[key], [data], sync=sync)
    except StoreError:
        # On a full disk what is staged already is what the next try needs.
        for name in staged.values():
            with contextlib.suppress(StoreError):
                store.delete(name)
        raise
    for key, name in staged.items():
        store.place(name, key)
    if sync:
        store.sync_folders(documents)

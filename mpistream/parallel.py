"""The collective driver: what a rank of a simulation calls.

A `StreamWriter` is one rank's writer, the channel to the other ranks and, on rank 0, the owner. The steps
of a commit are those at the head of `mpistream.commit`, in that order.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from numpy.typing import ArrayLike, NDArray

from mpistream.agreement import Channel
from mpistream.commit import Decision, next_manifest
from mpistream.errors import (
    CommitError,
    MPIStreamError,
    ProtocolError,
    StoreError,
    error_from_json,
    error_to_json,
)
from mpistream.manifest import Manifest, stage_folder
from mpistream.options import Options
from mpistream.owner import Owner, Prepared, commit_error
from mpistream.ranges import Ranges, members
from mpistream.rank_writer import RankWriter, WriterStats
from mpistream.reader import StoreReader
from mpistream.record import Record
from mpistream.region import Region
from mpistream.resuming import Resumed
from mpistream.schema import StreamSchema
from mpistream.store import Store
from mpistream.token import CommitReceipt, CommitToken

__all__ = ["StreamWriter"]

_log = logging.getLogger("mpistream")

_open_writers: weakref.WeakSet[StreamWriter] = weakref.WeakSet()


class StreamWriter:
    """An open store, on one rank; made by `write_open` and `write_resume`.

    It is a context manager: a body that ends commits what is pending and closes; a body that raises
    commits nothing, tells the other ranks at once, and the exception goes on.
    """

    def __init__(
        self,
        channel: Channel,
        store: Store,
        writer: RankWriter,
        owner: Owner | None,
        manifest: Manifest,
        options: Options,
        resumed: Resumed | None,
    ) -> None:
        self._channel = channel
        self._store = store
        self._writer = writer
        self._owner = owner
        self._manifest = manifest
        self._options = options
        self._buffers: dict[str, NDArray[Any]] = {}
        self._record: Record | None = None
        self._is_closed = False
        self._began = time.perf_counter()
        self.resumed = resumed
        """What `write_resume` found and did; None after `write_open`."""
        self._receipt = CommitReceipt.of(manifest)
        # On rank 0: the tokens of the commit in progress, as they arrived, and what they make.
        self._arrived: list[str] = []
        self._decision: Decision | None = None
        _open_writers.add(self)

    # What it is

    @property
    def schema(self) -> StreamSchema:
        """The schema, with its layout; coordinates have digests in the place of values."""
        return self._manifest.schema

    @property
    def region(self) -> Region:
        """What this rank owns: partitioned dim -> (start, stop)."""
        return self._writer.region

    @property
    def n_records(self) -> int:
        """Records written, committed or not."""
        return self._writer.n_records

    @property
    def n_committed(self) -> int:
        """Records committed."""
        return self._writer.n_committed

    @property
    def last_t(self) -> float | None:
        """Time of the last record written, None when there is none."""
        return self._writer.last_t

    @property
    def epoch(self) -> int:
        """Number of this opening of the store for writing."""
        return self._manifest.epoch

    @property
    def stats(self) -> WriterStats:
        """Counts of this rank."""
        return self._writer.stats

    @property
    def reader(self) -> StoreReader:
        """A reader of what is committed by now, on this rank alone."""
        return StoreReader(self._store, self._manifest)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's block of a variable or static, without time.

        Not collective.
        """
        return self._writer.block_shape(name)

    def is_committed(self, name: str) -> bool:
        """Return whether a static is committed.

        Not collective.
        """
        self._writer.block_shape(name)
        return name in self._manifest.statics

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.n_records} records, {self.n_committed} committed"
        return f"StreamWriter({self._store.url!r}, rank {self._channel.rank} of {self._channel.size}, {state})"

    # Writing

    def write_record(self, t: float, arrays: Mapping[str, ArrayLike]) -> None:
        """Put one record at the end of the stream.

        Logically collective.

        Parameters
        ----------
        t
            Time of the record in the schema's time units, the same on every rank; greater than ``last_t``.
        arrays
            Variable -> this rank's block, shape ``shape_of(variable)``, any strides and byte order, a dtype
            that casts to the schema's without losing values (floats may be rounded); a Python scalar
            broadcasts. A rank whose region is empty may pass ``{}``. Every array may be overwritten as
            soon as the call returns.

        Raises
        ------
        SchemaError
            On the calling rank, before anything of the record is taken: t does not increase or is not
            finite, a variable is missing or unknown, a block has another shape or dtype.
        ProtocolError
            On the calling rank, when the writer is closed or a record is open.

        Notes
        -----
        Nothing is durable or visible until `commit` returns. Failures of the store are kept for it.
        """
        self._check_open("write_record")
        self._check_no_record("write_record")
        self._writer.write_record(t, arrays)
        self._keep_lease()

    def write_record_at(self, index: int, t: float, arrays: Mapping[str, ArrayLike]) -> None:
        """Put one record of a fixed time dim, in any order.

        Logically collective.

        Parameters
        ----------
        index
            The record.
        t
            Its time, bitwise ``times[index]`` of the schema.
        arrays
            As in `write_record`.

        Raises
        ------
        SchemaError
            On the calling rank, before anything of the record is taken: as `write_record`, and when the index is
            out of range, the time is another one, or the record is written or committed already.
        ProtocolError
            As `write_record`.

        Notes
        -----
        Nothing is durable or visible until `commit` returns. Failures of the store are kept for it.
        """
        self._check_open("write_record_at")
        self._check_no_record("write_record_at")
        self._writer.write_record_at(index, t, arrays)
        self._keep_lease()

    @contextlib.contextmanager
    def record(self, t: float) -> Iterator[Record]:
        """Put one record variable by variable; a body that raises puts nothing.

        Logically collective.

        Parameters
        ----------
        t
            As in `write_record`.

        Raises
        ------
        SchemaError, ProtocolError
            As `write_record`, on the calling rank, when the body has ended.
        """
        self._check_open("record")
        self._check_no_record("record")
        self._record = Record(self._writer, self._buffers)
        try:
            yield self._record
            self._writer.write_record(t, self._record.arrays)
        finally:
            self._record = None
        self._keep_lease()

    def write_static(self, name: str, array: ArrayLike) -> None:
        """Put this rank's part of a static, or of a coordinate that is written by region.

        Logically collective.

        Parameters
        ----------
        name
            The static. It is committed whole, once.
        array
            This rank's block, as in `write_record`. Without partitioned dims, and so for strings, rank 0's counts; the
            other ranks may pass it or leave the call out.

        Raises
        ------
        SchemaError
            On the calling rank: unknown static, one that is written already, wrong shape or dtype.

        Notes
        -----
        Nothing is durable or visible until `commit` returns.
        """
        self._check_open("write_static")
        self._writer.write_static(name, array)

    def write_blob(self, key: str, payload: bytes, scope: int | str = "static") -> None:
        """Put a small payload of this rank, such as the state of its random numbers.

        Not collective.

        Parameters
        ----------
        key
            Its name; a rank writes a static key once an epoch, and a key of a record once a commit.
        payload
            At most 64 MiB of bytes; copied.
        scope
            ``"static"``, or the index of the record it belongs to: it is readable as long as that record is
            committed and is not dropped or invalidated.

        Raises
        ------
        SchemaError
            On the calling rank, before anything is taken.

        Notes
        -----
        Nothing is durable or visible until `commit` returns; a blob of a record that this commit leaves pending waits
        with it.
        """
        self._check_open("write_blob")
        self._writer.write_blob(key, payload, scope)

    def flush(self) -> CommitToken:
        """Make everything since the last commit durable, rows that are filled in part too.

        Not collective.

        Returns
        -------
        The token that names it. Without MPI everything is also in its place.

        Raises
        ------
        StoreError, FencedError
            On the calling rank, for what could not be written; a later call tries again.

        Notes
        -----
        Durable, but not committed: a resume drops it.
        """
        self._check_open("flush")
        records = self._writer.stage(partial_rows=True)
        if self._channel.size == 1:
            self._writer.place(records)
        return self._writer.token(records)

    # Committing

    def commit(
        self, tokens: Sequence[CommitToken | Mapping[str, Any]] | None = None, *, partial_rows: bool = True
    ) -> CommitReceipt:
        """Commit what every rank has written since the last commit.

        Collective.

        Parameters
        ----------
        tokens
            None: over MPI tokens travel by themselves. See `write_open_part` for roles without MPI.
        partial_rows
            False: records of a row that is not full stay pending, so a row is written once.

        Returns
        -------
        The same receipt on every rank. With nothing pending it is the last one, and no file is touched.

        Raises
        ------
        CommitError
            The same on every rank, with ``.rank``, ``.errno``, ``.kind`` and ``.cause_text``. Nothing was
            committed, but for kind ``outcome_unknown``; what was written is still pending.
        ProtocolError
            On every rank, when the ranks call different things.
        FencedError
            On every rank, when a newer opening owns the store.

        Notes
        -----
        When it returns, the records are durable (as `Options.durability` says) and visible.
        """
        self._check_open("commit")
        self._check_no_record("commit")
        if tokens is not None:
            raise ProtocolError(
                "commit(tokens) is for parts without MPI, see write_open_part; call commit() on every rank", kind="role"
            )
        began = time.perf_counter()
        try:
            return self._commit(partial_rows)
        finally:
            self.stats.seconds["commit"] += time.perf_counter() - began
            self._keep_lease()

    def _commit(self, partial_rows: bool) -> CommitReceipt:
        writer, channel = self._writer, self._channel
        # 1 Stage.
        failure: MPIStreamError | None = None
        records: Ranges = ()
        try:
            records = writer.stage(partial_rows=partial_rows)
        except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
            failure = _on_every_rank(error, channel.rank)
        # 2 Arrive: rank 0 sees what every rank is about to place, and says go only if it would be committed.
        token = None if failure else writer.token(records).to_text()
        payload = {"is_pending": writer.has_pending(records), "token": token}
        go = channel.exchange(
            "commit",
            digest=str(partial_rows),
            payload=payload,
            failure=failure,
            answer=lambda payloads: self._answer_arrival(payloads, records),
        )
        if not go:
            return self._redo_publish()
        # 3 Place.
        failure = None
        try:
            writer.place(records)
        except Exception as error:  # noqa: BLE001 (it travels in the token: the gather must be complete)
            failure = _as_ours(error, channel.rank)
        # 4 Gather, 5 decide, 6 commit, 7 outcome.
        if failure is not None:
            token = writer.token(records, failure).to_text()
        assert token is not None
        times = writer.times(records)
        if self._owner is not None:
            receipt = self._lead_commit(self._owner, token, records, times)
        else:
            channel.gather(token.encode())
            receipt = CommitReceipt.from_json(channel.await_announcement())
        self._manifest = next_manifest(self._manifest, records, times, receipt.new_statics)
        writer.committed(self._manifest)
        self._receipt = receipt
        # 8 Publish.
        if self._owner is not None:
            self._receipt = self._owner.publish(receipt)
            self._show_progress()
        return self._receipt

    def _answer_arrival(self, payloads: list[Any], records: Ranges) -> list[bool]:
        assert self._owner is not None
        is_pending = any(p["is_pending"] for p in payloads)
        if is_pending:
            self._arrived = [p["token"] for p in payloads]
            tokens = [CommitToken.from_text(t) for t in self._arrived]
            self._decision = self._owner.decide(tokens, self._writer.times(records))
        return [is_pending] * len(payloads)

    def _lead_commit(self, owner: Owner, token: str, records: Ranges, times: list[float]) -> CommitReceipt:
        """Steps 4 to 7 on rank 0: whatever happens, every rank is told."""
        assert self._decision is not None
        prepared: Prepared | None = None
        try:
            # While the others place: what would be committed is known, and the stage folder is nobody else's.
            failure: Exception | None = None
            try:
                assert self._decision.manifest is not None
                prepared = owner.prepare(self._decision.manifest, dict(zip(members(records), times, strict=True)))
            except Exception as error:  # noqa: BLE001 (the gather must be complete first)
                failure = error
            gathered = [data.decode() for data in self._channel.gather(token.encode()) or ()]
            # The same tokens give the same decision; others carry what went wrong since.
            if gathered != self._arrived:
                owner.decide([CommitToken.from_text(t) for t in gathered], times)
                raise ProtocolError("a token has changed since its rank arrived; nothing was committed", kind="token")
            if failure is not None:
                raise failure
            assert prepared is not None
            owner.commit(prepared)
            receipt = self._decision.receipt
            assert receipt is not None
        except Exception as error:
            if prepared is not None:
                owner.discard(prepared)
            told = _on_every_rank(error, 0)
            self._channel.announce(error=told)
            raise told from error
        except BaseException as error:
            # Ctrl-C, say, in the middle of it: whether the manifest is in place is for the store to tell.
            unknown = CommitError(
                f"rank 0 was interrupted in a commit ({type(error).__name__}); this writer is dead, write_resume tells "
                "what is committed",
                kind="outcome_unknown",
                rank=0,
            )
            self._channel.announce(error=unknown)
            raise
        self._channel.announce(receipt.to_json())
        return receipt

    def _redo_publish(self) -> CommitReceipt:
        if self._owner is not None:
            # What it warned of is done now, or warned of anew.
            self._receipt = self._owner.publish(replace(self._receipt, warnings=()))
        return self._receipt

    def rollback(self) -> None:
        """Drop what is not committed, on every rank.

        Collective.

        Raises
        ------
        CommitError
            On every rank, when a rank could not read back a row that is filled in part.

        Notes
        -----
        Afterwards ``n_records`` and ``last_t`` are those of the last commit.
        """
        self._check_open("rollback")
        self._check_no_record("rollback")
        failure = None
        try:
            self._writer.rollback()
        except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
            failure = _on_every_rank(error, self._channel.rank)
        self._channel.exchange("rollback", failure=failure)

    def invalidate(self, indices: Iterable[int]) -> CommitReceipt:
        """Mark committed records of a fixed time dim as not committed, so that they may be rewritten.

        Collective.

        Parameters
        ----------
        indices
            The records, the same on every rank; all of them are committed.

        Returns
        -------
        The same receipt on every rank.

        Raises
        ------
        SchemaError
            On every rank: an index that is not committed, or a time dim that grows.
        CommitError, FencedError, ProtocolError
            As `commit`.

        Notes
        -----
        When it returns, the change is durable, and the array ``committed`` says so to plain readers. What is
        pending stays pending.
        """
        self._check_open("invalidate")
        self._check_no_record("invalidate")
        failure: MPIStreamError | None = None
        records: Ranges = ()
        manifest = self._manifest
        try:
            records = self._writer.checked_for_invalidate(indices)
            manifest = self._writer.without(records)
            if records:
                self._writer.take_pack_back()
        except MPIStreamError as error:
            failure = error

        def answer(votes: list[Any]) -> list[Any]:
            assert self._owner is not None
            try:
                if records:
                    self._owner.commit(self._owner.prepare(manifest, {}))
            except Exception as error:
                raise _on_every_rank(error, 0) from error
            return [None] * len(votes)

        self._channel.exchange("invalidate", digest=str(records), failure=failure, answer=answer)
        if not records:
            return self._receipt
        self._manifest = manifest
        self._writer.invalidated(manifest)
        self._receipt = CommitReceipt.of(manifest)
        if self._owner is not None:
            self._receipt = self._owner.publish(self._receipt)
        # A rank must not rewrite a record before plain readers know.
        self._channel.exchange("invalidated")
        return self._receipt

    def close(self) -> None:
        """Commit what is pending and release everything; a second call does nothing.

        Collective.

        Raises
        ------
        CommitError
            On every rank, when the last commit failed; everything is released all the same.
        """
        if self._is_closed:
            return
        self._check_no_record("close")
        if not self._channel.is_usable():
            self._say_what_is_lost("MPI is finalised or a rank has failed")
            self._release()
            if self._channel.failure is not None:
                raise self._channel.failure
            return
        try:
            self.commit()
            self._channel.exchange("close")
        except BaseException as error:
            # This rank has nothing more to say; the others, if they go on, must not wait for it.
            if self._channel.is_usable():
                self._channel.post_leave(error)
            raise
        finally:
            self._release()
        self._channel.close()

    def _release(self, *, keep_stage: bool = False) -> None:
        """Give back everything that needs no other rank."""
        self._is_closed = True
        _open_writers.discard(self)
        self._writer.close()
        if self._owner is not None:
            self._owner.close()
            if not keep_stage:
                # What was staged and not committed is of no use to anybody.
                with contextlib.suppress(StoreError):
                    self._store.delete_tree(stage_folder(self.epoch))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self.close()
            return
        if self._is_closed:
            return
        # All open writers first, then wait: a rank must not wait for this one in any of them.
        for other in list(_open_writers):
            if other._channel.is_usable():
                other._channel.post_leave(exc)
        self._channel.wait_left(self._options.exit_timeout)
        self._release()

    # Small things

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise ProtocolError(f"{call} on a closed writer; open the store again with write_resume", kind="closed")
        if self._channel.failure is not None:
            raise self._channel.failure

    def _check_no_record(self, call: str) -> None:
        if self._record is not None:
            raise ProtocolError(f"{call} inside a record(); end that one first", kind="nested")

    def _keep_lease(self) -> None:
        if self._owner is not None and self._owner.keeper is not None:
            self._owner.keeper.refresh_if_due()

    def _say_what_is_lost(self, why: str) -> None:
        if n := self.n_records - self.n_committed:
            _say(f"{self._store.url}: {n} records were not committed: {why}")

    def _show_progress(self) -> None:
        if self._options.progress:
            _say(
                f"{self._store.url}: {self.n_committed} records, t = {self.last_t}, commit {self._receipt.commit_seq} "
                f"of {self._receipt.nbytes / 1e6:.1f} MB, {time.perf_counter() - self._began:.1f} s"
            )


def _say(text: str) -> None:
    sys.stderr.write(f"mpistream: {text}\n")
    sys.stderr.flush()


def _as_ours(error: BaseException, rank: int) -> MPIStreamError:
    return error if isinstance(error, MPIStreamError) else error_from_json(error_to_json(error, rank=rank))


def _on_every_rank(error: BaseException, rank: int) -> MPIStreamError:
    return commit_error(_as_ours(error, rank), rank)


@atexit.register
def _at_exit() -> None:
    """No MPI here: it may be finalised by now, and the other ranks may be anywhere."""
    for writer in list(_open_writers):
        writer._say_what_is_lost("the writer was not closed")
        if writer._owner is not None and writer._owner.keeper is not None:
            writer._owner.keeper.close()

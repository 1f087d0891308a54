"""The collective driver: what a rank of a simulation calls.

A `StreamWriter` is one rank's writer, the channel to the other ranks and, on rank 0, the owner. What a commit
does is in `mpistream.committing`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike, NDArray

from mpistream.agreement import Channel
from mpistream.arrays import Role
from mpistream.committing import OpenStream, commit_streams, on_every_rank
from mpistream.errors import (
    CommitError,
    MPIStreamError,
    ProtocolError,
    SchemaError,
    StoreError,
    counted,
    error_from_json,
    error_to_json,
)
from mpistream.fence import displaced
from mpistream.indices import Indices, indices_of
from mpistream.lease import node_name
from mpistream.lent import Lent
from mpistream.manifest import Manifest, stage_folder
from mpistream.mover import Load, Mover
from mpistream.options import Options
from mpistream.owner import Owner
from mpistream.plan import Plan, size_text
from mpistream.progress import ProgressLine
from mpistream.ranges import Ranges, count
from mpistream.rank_writer import CheckedRecord, RankWriter
from mpistream.reader import StoreReader
from mpistream.record import Record
from mpistream.region import Region
from mpistream.resuming import Resumed
from mpistream.schema import StreamSchema
from mpistream.stats import RunStats, WriterStats
from mpistream.store import Store
from mpistream.times import TimeLike
from mpistream.token import CommitReceipt, CommitToken

__all__ = ["StreamWriter", "commit_writers", "others_of"]

_log = logging.getLogger("mpistream")

T = TypeVar("T")

# Number -> writer, in the order in which they were opened; ranks open those of one communicator in the same order.
_open_writers: weakref.WeakValueDictionary[int, StreamWriter] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class StreamWriter:
    """An open store, on one rank; made by `write_open` and `write_resume`.

    It is a context manager: a body that ends commits what is pending and closes; a body that raises
    commits nothing, tells the other ranks at once, and the exception goes on.
    """

    _commits_tokens = False

    def __init__(
        self,
        channel: Channel,
        store: Store,
        writer: RankWriter,
        mover: Mover,
        owner: Owner | None,
        manifest: Manifest,
        options: Options,
        plan: Plan | None,
        resumed: Resumed | None,
    ) -> None:
        self._channel = channel
        self._store = store
        self._writer = writer
        self._mover = mover
        self._sharded = [a.name for a in manifest.schema.arrays.values() if a.role is Role.VARIABLE]
        self._owner = owner
        self._stream = OpenStream(
            store=store, writer=writer, owner=owner, manifest=manifest, receipt=CommitReceipt.of(manifest)
        )
        self._options = options
        self._plan = plan
        self._buffers: dict[str, list[NDArray[Any]]] = {}
        self._record: Record | None = None
        self._is_closed = False
        self._pid = os.getpid()
        self._began = time.perf_counter()
        self._n_new_records = 0
        self._number = next(_numbers)
        self._progress: ProgressLine | None = None
        if owner is not None and options.progress:
            self._progress = ProgressLine(
                store.url, manifest.schema.n_total, count(manifest.committed), noun=manifest.schema.record_noun
            )
        self.resumed = resumed
        """What `write_resume` found and did; None after `write_open`."""
        _open_writers[self._number] = self
        self._log_open()

    # What it is

    @property
    def schema(self) -> StreamSchema:
        """The schema, with its layout; coordinates have digests in the place of values."""
        return self._stream.manifest.schema

    @property
    def region(self) -> Region:
        """What this rank holds: partitioned dim -> (start, stop).

        Raises
        ------
        ProtocolError
            When the writer was opened with `Indices`, see ``indices``, or a region for each variable, see `region_of`.
        """
        region, indices = self._writer.region, self._writer.indices
        if isinstance(indices, Indices):
            raise ProtocolError("this rank holds indices, not a region; see w.indices", kind="region")
        if not isinstance(region, Region):
            raise ProtocolError("this rank holds a region for each variable; see w.region_of(name)", kind="region")
        return region

    def region_of(self, name: str) -> Region | Indices:
        """Return what this rank holds of a variable or static.

        Not collective.

        Parameters
        ----------
        name
            The variable or static. One without partitioned dims has a region without dims where each variable has a
            region of its own; it is passed whole.

        Raises
        ------
        SchemaError
            For an unknown name.
        """
        self._writer.held(name)
        indices = indices_of(self._writer.indices, name)
        return self._writer.region.of(name) if indices is None else indices

    @property
    def indices(self) -> Indices | None:
        """The indices that the writer was opened with for all variables, None if it was opened otherwise."""
        indices = self._writer.indices
        return indices if isinstance(indices, Indices) else None

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
        return self._stream.manifest.epoch

    @property
    def stats(self) -> WriterStats:
        """Counts of this rank; after `close` ``stats.run`` has those of all ranks."""
        return self._writer.stats

    @property
    def reader(self) -> StoreReader:
        """A reader of what is committed by now, on this rank alone."""
        return StoreReader(self._store, self._stream.manifest)

    def plan(self) -> Plan | None:
        """Return on rank 0 what a record costs, who writes it and what moves for it; None on the others.

        Not collective.
        """
        return self._plan

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's block of a variable or static, without time.

        Not collective.

        Raises
        ------
        SchemaError
            For an unknown name, and when this rank's region has several boxes: see `shapes_of`.
        """
        shapes = self._writer.block_shapes(name)
        if len(shapes) > 1:
            raise SchemaError(
                f"this rank's region has {len(shapes)} boxes, so {name!r} has as many blocks; use shapes_of",
                kind="region",
            )
        return shapes[0]

    def shapes_of(self, name: str) -> list[tuple[int, ...]]:
        """Return the shapes of this rank's blocks of a variable or static, one per box of its region.

        Not collective.
        """
        return self._writer.block_shapes(name)

    def is_committed(self, name: str) -> bool:
        """Return whether a static is committed.

        Not collective.
        """
        self._writer.held(name)
        return name in self._stream.manifest.statics

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self._counted(self.n_records)}, {self.n_committed} committed"
        return f"StreamWriter({self._store.url!r}, rank {self._channel.rank} of {self._channel.size}, {state})"

    # Writing

    def write_record(self, t: TimeLike, arrays: Mapping[str, ArrayLike]) -> None:
        """Put one record at the end of the stream.

        Logically collective.

        Parameters
        ----------
        t
            Time of the record, the same on every rank; greater than ``last_t``. A number in the schema's time
            units, or a date: numpy.datetime64, datetime.datetime (in UTC if it has no zone), both for the calendars
            ``standard`` and ``proleptic_gregorian``, or cftime.datetime of the schema's calendar. A date becomes the
            float64 that is nearest to the exact number.
        arrays
            Variable -> this rank's block, shape ``shape_of(variable)``, any strides and byte order, a dtype
            that casts to the schema's without losing values (floats may be rounded); a scalar of Python or
            numpy broadcasts, and its value decides whether it fits. An array of JAX, PyTorch or another library
            must lie in this process's memory. A rank whose region is empty may pass ``{}``. Every array may be
            overwritten as soon as the call returns.

        Raises
        ------
        SchemaError
            On the calling rank, before anything of the record is taken: t does not increase or is not
            finite, a variable is missing or unknown, a block has another shape or dtype. On every rank, if pieces
            of the record move between ranks; the call is then collective.
        ProtocolError
            On the calling rank, when the writer is closed or a record is open. On every rank, if pieces move and the
            ranks differ in record or time.
        CommitError
            If pieces move, kind ``timeout``: a rank did not come.

        Notes
        -----
        Nothing is durable or visible until `commit` returns. Failures of the store are kept for it.
        """
        self._check_open("write_record")
        self._check_no_record("write_record")
        with self.stats.during("record"), self._writer.lent() as lent:
            self._take("write_record", lambda: self._writer.checked_record(t, arrays), lent)

    def write_record_at(self, index: int, t: TimeLike, arrays: Mapping[str, ArrayLike]) -> None:
        """Put one record of a fixed time dim, in any order.

        Logically collective.

        Parameters
        ----------
        index
            The record.
        t
            Its time, a number or a date as in `write_record`: as a float64 bitwise ``times[index]`` of the schema.
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
        with self.stats.during("record"), self._writer.lent() as lent:
            self._take("write_record_at", lambda: self._writer.checked_record_at(index, t, arrays), lent)

    @contextlib.contextmanager
    def record(self, t: TimeLike) -> Iterator[Record]:
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
        with self._writer.lent() as lent:
            self._record = Record(self._writer, self._buffers, lent)
            try:
                yield self._record
                arrays = self._record.arrays
            finally:
                self._record = None
            with self.stats.during("record"):
                self._take("write_record", lambda: self._writer.checked_record(t, arrays), lent)

    def _take(self, call: str, check: Callable[[], CheckedRecord], lent: Lent) -> None:
        """Check a record, move what others write of it, and take it."""
        names = self._sharded

        def loaded() -> tuple[CheckedRecord, Load]:
            checked = check()
            return checked, self._mover.load(names, checked.blocks, lent)

        checked, load = self._agreed(call, names, loaded, _arguments)
        self._writer.take(replace(checked, blocks=self._mover.move(load)), lent)
        self._keep_lease()

    def _agreed(self, call: str, names: Sequence[str], make: Callable[[], T], digest: Callable[[T], str]) -> T:
        """Return what ``make`` returns; if any of these arrays moves, once all ranks have it: then data may move."""
        if not self._mover.is_moving(names):
            return make()
        found, failure = None, None
        try:
            found = make()
        except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
            failure = _of_rank(error, self._channel)
        self._exchange(call, digest="" if found is None else digest(found), failure=failure)
        assert found is not None
        return found

    def write_static(self, name: str, array: ArrayLike | Mapping[str, ArrayLike]) -> None:
        """Put this rank's part of a static, or of a coordinate that is written by region.

        Logically collective.

        Parameters
        ----------
        name
            The static. It is committed whole, once.
        array
            This rank's block, as in `write_record`; a rank whose region is empty may pass ``{}`` or, where nothing
            moves between ranks, leave the call out. Without partitioned dims, and so for strings, rank 0's counts; the
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

        def loaded() -> Load:
            return self._mover.load([name], {name: self._writer.checked_static(name, array)})

        with self.stats.during("record"):
            load = self._agreed("write_static", [name], loaded, lambda _: repr(name))
            self._writer.take_static(name, self._mover.move(load)[name])

    def write_blob(self, key: str, payload: bytes, scope: int | str = "static") -> None:
        """Put a small payload of this rank, such as the state of its random numbers.

        Not collective.

        Parameters
        ----------
        key
            Its name; a rank writes a static key once an epoch, and a key of a record once as long as that record is
            committed.
        payload
            At most 64 MiB of bytes; copied.
        scope
            ``"static"``, or the index of the record it belongs to: it is committed with that record, or later if
            that is committed already, and readable until the record is dropped or invalidated.

        Raises
        ------
        SchemaError
            On the calling rank, before anything is taken.
        StoreError, FormatError
            As `SchemaError`, for a record that is committed: its blobs could not be read, so whether the key is one of
            them is not known. A later call tries again.

        Notes
        -----
        Nothing is durable or visible until `commit` returns; a blob of a record that this commit leaves pending waits
        with it.
        """
        self._check_open("write_blob")
        # Only for a record that is committed: before that it has no committed blobs, and nothing is read.
        if self._writer.is_committed_record(scope) and (self._writer.writer, scope, key) in self.reader.blobs():
            raise SchemaError(
                f"blob {key!r} of record {scope} is committed already; it is written once, give another key",
                kind="blob",
            )
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
        with self.stats.during("commit"):
            records = self._writer.stage(partial_rows=True)
            if self._channel.size == 1:
                if self._owner is not None:
                    self._owner.withdraw()
                self._writer.place(records)
            return self._writer.token(records)

    # Committing

    def commit(
        self,
        tokens: Sequence[CommitToken | Mapping[str, Any]] | None = None,
        *,
        partial_rows: bool = True,
        wait: bool = True,
    ) -> CommitReceipt:
        """Commit what every rank has written since the last commit.

        Collective.

        Parameters
        ----------
        tokens
            None: over MPI tokens travel by themselves. See `write_open_part` for roles without MPI.
        partial_rows
            False: records of a row that is not full stay pending, so a row is written once.
        wait
            False: commit the records that are durable on every rank by now, and the statics, without a wait for those
            that are still on their way; they stay pending. In append mode these are the first ones, up to one that
            some rank still writes. A row that is not full stays pending, whatever ``partial_rows`` says.

        Returns
        -------
        The same receipt on every rank. With nothing to commit it is the last one, and no file is touched.

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
        When it returns, the records are durable (as `Options.durability` says) and visible to `open_reader`; with
        ``wait`` to plain Zarr readers, too. Without it a thread may bring the Zarr documents in step while the caller
        goes on; the next commit, rollback or invalidation waits for that, and `close` for all. What fails there is
        logged, stands in the next receipt's warnings, and is done again by the next commit or resume.
        """
        self._check_open("commit")
        self._check_no_record("commit")
        if tokens is not None:
            raise ProtocolError(
                "commit(tokens) is for parts without MPI, see write_open_part; call commit() on every rank", kind="role"
            )
        commit_writers(self._channel, [self], partial_rows, wait)
        return self._stream.receipt

    def _commit_or_raise(self, failure: MPIStreamError | None) -> CommitReceipt:
        """Commit, unless this rank or another one has a failure; then every rank raises it."""
        commit_writers(self._channel, [self], True, True, failure)
        return self._stream.receipt

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
            if self._owner is not None:
                # The writer drops its jobs, and this one is not of what is rolled back.
                self._owner.settle()
            self._writer.rollback()
        except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
            failure = on_every_rank(error, self._channel.rank)
        self._exchange("rollback", failure=failure)
        self._log(
            logging.INFO, "rolled back to commit %d, %s", self._stream.receipt.commit_seq, self._counted(self.n_records)
        )

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
        CommitError
            As `commit`, and kind ``not_published``: the records are invalidated, but the array ``committed`` could not
            be written and still names them to plain readers. The next commit, invalidation or resume writes it
            before anything else.
        FencedError, ProtocolError
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
        manifest = self._stream.manifest
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
                raise on_every_rank(error, 0) from error
            return [None] * len(votes)

        self._exchange("invalidate", digest=f"records {records}", failure=failure, answer=answer)
        if not records:
            return self._stream.receipt
        self._stream.manifest = manifest
        self._writer.invalidated(manifest)
        self._stream.receipt = CommitReceipt.of(manifest)
        failure = None
        if self._owner is not None:
            try:
                self._owner.withdraw()
                self._stream.receipt = self._owner.publish(self._stream.receipt)
            except MPIStreamError as error:
                failure = _not_published(error, self._stream.receipt, self.schema.record_noun)
        # A rank must not rewrite a record before plain readers know.
        self._exchange("invalidated", failure=failure)
        self._log(logging.INFO, "invalidated %s", self._counted(count(records)))
        return self._stream.receipt

    def close(self) -> None:
        """Commit what is pending and release everything; a second call does nothing.

        Collective.

        Raises
        ------
        CommitError
            On every rank, when the last commit failed; everything is released all the same.
        FencedError
            On every rank, when a newer opening owns the store, also where nothing was pending.
        """
        if self._is_closed or self._is_forked():
            return
        self._check_no_record("close")
        if not self._channel.is_usable():
            self._say_what_is_lost("MPI is finalised or a rank has failed")
            self._release(failed=self._channel.failure is not None or self._has_uncommitted())
            if self._channel.failure is not None:
                raise self._channel.failure
            return
        is_done = False
        try:
            self.commit()
            self._agree_on_close()
            is_done = True
        except BaseException as error:
            # This rank has nothing more to say; the others, if they go on, must not wait for it.
            if self._channel.is_usable():
                self._channel.post_leave(error)
            raise
        finally:
            self._release(failed=not is_done)
        self._channel.close()
        self._log(logging.INFO, "closed: %s", self.stats.run)

    def _agree_on_close(self) -> None:
        """Hear that no rank has anything against it; what each has done goes with its vote."""

        def answer(votes: list[Any]) -> list[Any]:
            totals = {"n_records": self._n_new_records, "n_commits": self.stats.n_commits}
            return [RunStats.of(votes, **totals, record_noun=self.schema.record_noun).to_json()] * len(votes)

        own = {**self.stats.to_json(), "elapsed": time.perf_counter() - self._began}
        # A commit of nothing has touched no file, and so met no fence.
        fenced = None if self._owner is None else displaced(self._store, self.epoch)
        wrong = fenced or self._why_not_close()
        self.stats.run = RunStats(**self._exchange("close", payload=own, failure=wrong, answer=answer))

    def _why_not_close(self) -> MPIStreamError | None:
        """Return why a stream whose last commit went well is not whole."""
        return None

    def _before_commit(self, channel: Channel, failure: MPIStreamError | None) -> MPIStreamError | None:  # noqa: ARG002 (of other streams)
        """Do what ranks do together before a commit; return why this one can't take part in it."""
        return failure

    def _after_commit(self) -> None:
        """Go on from a new committed state."""

    def _release(self, *, failed: bool) -> None:
        """Give back everything that needs no other rank, and say in the lease how the run ended."""
        self._release_own(failed=failed)
        if self._owner is not None:
            # What was staged and not committed is of no use to anybody.
            with contextlib.suppress(StoreError):
                self._store.delete_tree(stage_folder(self.epoch))

    def _release_own(self, *, failed: bool) -> None:
        """Give back everything but the epoch's stage folder."""
        self._is_closed = True
        _open_writers.pop(self._number, None)
        if self._progress is not None:
            self._progress.end()
        # Ctrl-C in one of them, while it waits for a disk, does not leave the others undone.
        try:
            if self._owner is not None:
                self._owner.settle()
        finally:
            try:
                self._writer.close()
            finally:
                if self._owner is not None:
                    self._owner.close(failed=failed)

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
        if self._is_closed or self._is_forked():
            return
        # All open writers first, then wait: a rank must not wait for this one in any of them. But what all ranks have
        # agreed on leaves this body on all of them, and says nothing of other writers.
        for other in [self] if self._channel.has_agreed_on(exc) else _all_open():
            if other._channel.is_usable():
                other._channel.post_leave(exc)
        self._channel.wait_left(self._options.exit_timeout)
        self._release(failed=True)
        n = self.n_committed
        self._log(logging.INFO, "left with %r, %d of %s are committed", exc, n, self._counted(self.n_records))

    # Small things

    def _exchange(self, operation: str, **more: Any) -> Any:
        return self._channel.exchange(operation, others=others_of(self._channel), **more)

    def _log(self, level: int, text: str, *values: object) -> None:
        """Log on rank 0, which speaks for all."""
        if self._channel.rank == 0:
            _log.log(level, f"%s: {text}", self._store.url, *values, stacklevel=2)

    def _log_open(self) -> None:
        resumed, receipt, stats = self.resumed, self._stream.receipt, self.stats
        how = "created"
        if resumed is not None:
            dropped = f", {resumed.n_dropped} dropped" if resumed.n_dropped else ""
            how = f"resumed with {self._counted(receipt.n_records)}{self._last_t_text()}{dropped}"
        if self._plan is not None:
            self._log(logging.INFO, "%s, epoch %d; %s", how, self.epoch, self._plan)
            for warning in self._plan.warnings:
                self._log(logging.WARNING, "%s", warning)
            for name, (shard_shape, chunk_shape) in self._plan.layouts.items():
                self._log(logging.DEBUG, "%s: shards %s, inner chunks %s", name, shard_shape, chunk_shape)
        # Of this rank: every one says it.
        who, cores = f"rank {self._channel.rank} on {node_name()}", stats.n_cores
        _log.debug("%s: %s: %s, %d threads, %d cores", self._store.url, who, stats.mode, stats.threads, cores)

    def _log_commit(self, seconds: float) -> None:
        r = self._stream.receipt
        what = f"{self._counted(r.n_new_records)}, {r.n_objects} objects of {size_text(r.nbytes)}, {seconds:.3g} s"
        state = self._counted(r.n_records) + self._last_t_text()
        self._log(logging.DEBUG, "commit %d: %s; %s", r.commit_seq, what, state)

    def _counted(self, n: int) -> str:
        return counted(n, self.schema.record_noun)

    def _last_t_text(self) -> str:
        """Return the time of the last record, for a message; a location has none."""
        return "" if self.schema.is_location_series else f", t {self._stream.receipt.last_t!r}"

    def _check_open(self, call: str) -> None:
        if self._is_forked():
            raise ProtocolError(
                f"{call} in a process that was forked from the writer's; only that one may use it; hand it the values",
                kind="forked",
            )
        if self._is_closed:
            raise ProtocolError(f"{call} on a closed writer; open the store again with write_resume", kind="closed")
        if self._channel.failure is not None:
            raise self._channel.failure

    def _is_forked(self) -> bool:
        """Whether this is a process that was forked from the writer's: what is open there is not its to close."""
        return self._pid != os.getpid()

    def _check_no_record(self, call: str) -> None:
        if self._record is not None:
            raise ProtocolError(f"{call} inside a record(); end that one first", kind="nested")

    def _keep_lease(self) -> None:
        if self._owner is not None and self._owner.keeper is not None:
            self._owner.keeper.refresh_if_due()

    def _has_uncommitted(self) -> bool:
        return self._writer.has_pending(self._writer.records_to_commit(partial_rows=True))

    def _say_what_is_lost(self, why: str) -> None:
        if n := self.n_records - self.n_committed:
            _say(f"{self._store.url}: {self._counted(n)} {'was' if n == 1 else 'were'} not committed: {why}")

    def _show_progress(self) -> None:
        if self._progress is not None:
            receipt = self._stream.receipt
            self._progress.show(self.n_committed, self.last_t, receipt.commit_seq, receipt.nbytes)


def _arguments(found: tuple[CheckedRecord, Load]) -> str:
    # The shortest decimal number of a float is no other's.
    return f"record {found[0].record} at t = {float(found[0].t)!r}"


def _of_rank(error: Exception, channel: Channel) -> MPIStreamError:
    """Return what is wrong on this rank as every rank is to read it."""
    document = error_to_json(error, rank=channel.rank)
    if channel.size > 1:
        document["message"] = f"rank {channel.rank}: {document['message']}"
    return error_from_json(document)


def _not_published(error: MPIStreamError, receipt: CommitReceipt, noun: str) -> MPIStreamError:
    if not isinstance(error, StoreError):
        return error
    return CommitError(
        f"the {noun}s are invalidated (commit {receipt.commit_seq}), but the array 'committed' could not be written "
        f"and still names them to plain readers: {error}; the next commit writes it before anything else",
        kind="not_published",
        rank=0,
        errno=error.errno,
        cause_text=str(error),
    )


def _all_open() -> list[StreamWriter]:
    # By a list of references: another thread may open or drop one meanwhile.
    return [w for ref in _open_writers.valuerefs() if (w := ref()) is not None]


def others_of(channel: Channel) -> list[Channel]:
    """Return the channels of other writers, where a rank that does not come here may wait.

    Not collective.
    """
    return [w._channel for w in _all_open() if w._channel is not channel and w._channel.has_ranks_of(channel)]


def commit_writers(
    channel: Channel,
    writers: Sequence[StreamWriter],
    partial_rows: bool,
    wait: bool,
    failure: MPIStreamError | None = None,
) -> None:
    """Commit what is pending in these writers, in one agreement.

    Collective.

    Parameters
    ----------
    channel
        That of one of the writers.
    writers
        The same on every rank, in the same order.
    partial_rows, wait
        As in `StreamWriter.commit`.
    failure
        Why this rank can't take part.

    Raises
    ------
    CommitError, FencedError, ProtocolError
        On every rank.
    """
    began = time.perf_counter()
    before = [w._stream.receipt.commit_seq for w in writers]
    try:
        dead = next((w for w in writers if w._channel is not channel and w._channel.failure is not None), None)
        if dead is not None and failure is None:
            # Of another kind than what ended it: the others of the list are not dead.
            failure = ProtocolError(
                f"commit_all: the writer of {dead._store.url} is dead, leave it out: {dead._channel.failure}",
                kind="dead",
            )
        for writer in writers:
            failure = writer._before_commit(channel, failure)
        commit_streams(
            channel,
            [w._stream for w in writers],
            partial_rows=partial_rows,
            wait=wait,
            failure=failure,
            others=others_of(channel),
        )
        for writer, seq in zip(writers, before, strict=True):
            writer._after_commit()
            if writer._stream.receipt.commit_seq != seq:
                writer._show_progress()
    finally:
        if channel.failure is not None:
            # Nobody may count on any of them: what this rank knows of one commit, it knows of all.
            for writer in writers:
                writer._channel.note(channel.failure)
        seconds = time.perf_counter() - began
        for writer, seq in zip(writers, before, strict=True):
            writer.stats.seconds["commit"] += seconds
            writer._keep_lease()
            # Also of a commit that went wrong in another stream.
            if writer._stream.receipt.commit_seq != seq:
                writer._n_new_records += writer._stream.receipt.n_new_records
                writer._log_commit(seconds)


def _say(text: str) -> None:
    sys.stderr.write(f"mpistream: {text}\n")
    sys.stderr.flush()


def _at_exit() -> None:
    """No MPI here: it may be finalised by now, and the other ranks may be anywhere."""
    for writer in (w for w in _all_open() if not w._is_forked()):
        writer._say_what_is_lost("the writer was not closed")
        if writer._owner is not None:
            writer._owner.settle(writer._options.exit_timeout)
            if not writer._owner.is_published:
                _say(f"{writer._store.url}: plain Zarr readers don't see the last commit: a resume or repair shows it")
        if writer._owner is not None and writer._owner.keeper is not None:
            # What Python sets when nobody caught an exception, before this is called.
            has_raised = getattr(sys, "last_value", None) is not None
            writer._owner.keeper.close(failed=not writer._commits_tokens and (has_raised or writer._has_uncommitted()))


# Handlers are called in reverse order: this one behind what a program registers once it has opened a stream, and before
# weakref.finalize tells the threads of pools to end, which registers its own with the first finalizer there is.
weakref.finalize(_at_exit, bool).atexit = False
atexit.register(_at_exit)

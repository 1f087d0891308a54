"""The collective driver: what a rank of a simulation calls.

A `StreamWriter` is one rank's writer, the channel to the other ranks and, on rank 0, the owner. The steps
of a commit are those at the head of `mpistream.commit`, in that order.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import operator
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpistream.block import check_block
from mpistream.comm import Channel, connect
from mpistream.commit import CommitReceipt, CommitToken, Decision, EpochState, Share, next_manifest
from mpistream.errors import MPIStreamError, ProtocolError, SchemaError, StoreError, error_from_json, error_to_json
from mpistream.grid import Region
from mpistream.manifest import Manifest, nonce_key, stage_folder
from mpistream.opening import Claim, CreateRequest, Resumed, ResumeRequest, claim
from mpistream.options import Options, resolve_options
from mpistream.owner import Owner, commit_error
from mpistream.rank_writer import RankWriter, WriterStats
from mpistream.reader import StoreReader
from mpistream.schema import StreamSchema
from mpistream.store import Store, open_store

__all__ = ["Record", "StreamWriter", "write_open", "write_resume"]

_log = logging.getLogger("mpistream")

_open_writers: weakref.WeakSet[StreamWriter] = weakref.WeakSet()


class Record:
    """One record, put variable by variable; made by `StreamWriter.record`."""

    def __init__(self, writer: RankWriter, buffers: dict[str, NDArray[Any]]) -> None:
        self._writer = writer
        self._buffers = buffers
        self.arrays: dict[str, NDArray[Any]] = {}
        """Variable -> block, as far as they are put."""

    def put(self, name: str, block: ArrayLike) -> None:
        """Put this rank's block of one variable.

        Not collective.

        Parameters
        ----------
        name
            The variable.
        block
            As in `StreamWriter.write_record`; it is copied, and may be overwritten when the call returns.

        Raises
        ------
        SchemaError
            On this rank: unknown variable, wrong shape or dtype.
        """
        shape = self._writer.block_shape(name)
        array = self._writer.schema.arrays[name]
        checked = check_block(name, block, shape, array.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            self.buffer(name)[...] = checked

    def buffer(self, name: str) -> NDArray[Any]:
        """Return the array that will be written for a variable, to be filled in place.

        Not collective.

        Parameters
        ----------
        name
            The variable. Its array has the block's shape and the dtype on disk; it is used again for the
            next record, and what it holds before it is filled is undefined.
        """
        shape = self._writer.block_shape(name)
        array = self._writer.schema.arrays[name]
        if not array.has_time:
            raise SchemaError(f"{name!r} is not a streaming variable; use write_static", kind="unknown")
        if name not in self._buffers:
            self._buffers[name] = np.empty(shape, array.dtype)
        self.arrays[name] = self._buffers[name]
        return self._buffers[name]


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
        self._receipt = CommitReceipt(
            commit_seq=manifest.commit_seq,
            epoch=manifest.epoch,
            n_records=manifest.n_records,
            last_t=manifest.last_t,
            n_new_records=0,
            new_statics=(),
            n_objects=0,
            nbytes=0,
        )
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
        if self._record is not None:
            raise ProtocolError("write_record inside a record(); end that one first", kind="nested")
        self._writer.write_record(t, arrays)
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
        if self._record is not None:
            raise ProtocolError("record() inside a record(); end that one first", kind="nested")
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
            This rank's block, as in `write_record`.

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
        stop = self._writer.stage(partial_rows=True)
        if self._channel.size == 1:
            self._writer.place(stop)
        return self._writer.token(stop)

    # Committing

    def commit(self, *, partial_rows: bool = True) -> CommitReceipt:
        """Commit what every rank has written since the last commit.

        Collective.

        Parameters
        ----------
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
        if self._record is not None:
            raise ProtocolError("commit inside a record(); end that one first", kind="nested")
        began = time.perf_counter()
        try:
            return self._commit(partial_rows)
        finally:
            self.stats.seconds["commit"] += time.perf_counter() - began
            self._keep_lease()

    def _commit(self, partial_rows: bool) -> CommitReceipt:
        writer, channel = self._writer, self._channel
        # 1 Stage.
        failure, stop = None, writer.n_committed
        try:
            stop = writer.stage(partial_rows=partial_rows)
        except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
            failure = _on_every_rank(error, channel.rank)
        # 2 Arrive: rank 0 sees what every rank is about to place, and says go only if it would be committed.
        payload = {
            "is_pending": writer.has_pending(stop),
            "token": None if failure else writer.token(stop).to_json(),
        }
        go = channel.exchange(
            "commit",
            digest=str(partial_rows),
            payload=payload,
            failure=failure,
            answer=lambda payloads: self._answer_arrival(payloads, stop),
        )
        if not go:
            return self._redo_publish()
        # 3 Place.
        failure = None
        try:
            writer.place(stop)
        except Exception as error:  # noqa: BLE001 (it travels in the token: the gather must be complete)
            failure = _on_every_rank(error, channel.rank)
        # 4 Gather.
        token = writer.token(stop, failure)
        gathered = channel.gather(json.dumps(token.to_json()).encode())
        times = writer.times[: stop - writer.n_committed]
        # 5 Decide, 6 commit, 7 outcome.
        if self._owner is not None:
            assert gathered is not None
            receipt = self._decide_and_announce(gathered, times)
        else:
            receipt = CommitReceipt.from_json(channel.await_announcement())
        self._manifest = next_manifest(self._manifest, times, receipt.new_statics)
        writer.committed(self._manifest)
        self._receipt = receipt
        # 8 Publish.
        if self._owner is not None:
            self._receipt = self._owner.publish(receipt)
            self._show_progress()
        return self._receipt

    def _answer_arrival(self, payloads: list[Any], stop: int) -> list[bool]:
        assert self._owner is not None
        is_pending = any(p["is_pending"] for p in payloads)
        if is_pending:
            tokens = [CommitToken.from_json(p["token"]) for p in payloads]
            self._owner.decide(tokens, self._writer.times[: stop - self._writer.n_committed])
        return [is_pending] * len(payloads)

    def _decide_and_announce(self, gathered: list[bytes], times: list[float]) -> CommitReceipt:
        assert self._owner is not None
        try:
            tokens = [CommitToken.from_json(json.loads(data)) for data in gathered]
            decision: Decision = self._owner.decide(tokens, times)
            receipt = self._owner.commit(decision, times)
        except BaseException as error:
            if isinstance(error, MPIStreamError) and error.kind == "outcome_unknown":
                self._channel.announce(error=error)
                self._channel.failure = error
                raise
            found = _on_every_rank(error, 0) if isinstance(error, Exception) else error
            self._channel.announce(error=found)
            raise found from error
        self._channel.announce(receipt.to_json())
        return receipt

    def _redo_publish(self) -> CommitReceipt:
        if self._owner is not None:
            self._receipt = self._owner.publish(self._receipt)
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
        self._record = None
        failure = None
        try:
            self._writer.rollback()
        except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
            failure = _on_every_rank(error, self._channel.rank)
        self._channel.exchange("rollback", failure=failure)

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
        if not self._channel.is_usable():
            self._say_what_is_lost("MPI is finalised or a rank has failed")
            self._release()
            if self._channel.failure is not None:
                raise self._channel.failure
            return
        self._record = None
        try:
            self.commit()
        except BaseException:
            self._release()
            raise
        try:
            self._channel.exchange("close")
        finally:
            self._release()
        self._channel.close()

    def _release(self) -> None:
        """Give back everything that needs no other rank."""
        self._is_closed = True
        _open_writers.discard(self)
        self._writer.close()
        if self._owner is not None:
            self._owner.close()
            with contextlib.suppress(StoreError):
                # What was staged and not committed is of no use to anybody.
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

    def _keep_lease(self) -> None:
        if self._owner is not None:
            self._owner.keeper.refresh_if_due()

    def _say_what_is_lost(self, why: str) -> None:
        n = self.n_records - self.n_committed
        if n:
            print(f"mpistream: {self._store.url}: {n} records were not committed: {why}", file=sys.stderr, flush=True)

    def _show_progress(self) -> None:
        if self._options.progress:
            seconds = time.perf_counter() - self._began
            print(
                f"mpistream: {self._store.url}: {self.n_committed} records, t = {self.last_t}, "
                f"commit {self._receipt.commit_seq} of {self._receipt.nbytes / 1e6:.1f} MB, {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )


def _on_every_rank(error: BaseException, rank: int) -> MPIStreamError:
    found = error if isinstance(error, MPIStreamError) else error_from_json(error_to_json(error, rank=rank))
    return commit_error(found, rank)


@atexit.register
def _at_exit() -> None:
    """No MPI here: it may be finalised by now, and the other ranks may be anywhere."""
    for writer in list(_open_writers):
        writer._say_what_is_lost("the writer was not closed")
        if writer._owner is not None:
            writer._owner.keeper.close()


# Opening


def _plain_region(region: Mapping[str, Any] | None) -> dict[str, list[int]] | None:
    """Return a region as JSON types; whether it fits is for the owner to say, who knows the dims."""
    if region is None:
        return None
    if not isinstance(region, Mapping):
        raise SchemaError(f"region {region!r}: give a mapping dim -> (start, stop)", kind="region")
    if isinstance(region, Region) and region.is_empty:
        return {dim: [0, 0] for dim in region.dims}
    plain = {}
    for dim, bounds in region.items():
        try:
            start, stop = (bounds.start, bounds.stop) if isinstance(bounds, slice) else bounds
            plain[str(dim)] = [operator.index(start), operator.index(stop)]
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"region {region!r}: bounds {bounds!r} of dim {dim!r}; give (start, stop), two integers", kind="region"
            ) from error
    return plain


def _open(
    url: str | os.PathLike[str],
    request: CreateRequest | ResumeRequest,
    *,
    comm: Any,
    region: Mapping[str, Any] | None,
    takeover: bool,
    options: Options | None,
) -> StreamWriter:
    """Open a store on all ranks; see `mpistream.opening` for the order."""
    failure: MPIStreamError | None = None
    chosen, store, plain = Options(), None, None
    try:
        chosen = resolve_options(options)
        store = open_store(url)
        plain = _plain_region(region)
    except MPIStreamError as error:
        failure = error
    channel = Channel(connect(comm, chosen.timeout), chosen.timeout)
    try:
        return _open_on(channel, url, store, request, plain, takeover, chosen, failure)
    except MPIStreamError:
        # Every rank raises out of one of the agreements, so every rank comes here.
        channel.close()
        raise


def _open_on(
    channel: Channel,
    url: Any,
    store: Store | None,
    request: CreateRequest | ResumeRequest,
    region: dict[str, list[int]] | None,
    takeover: bool,
    options: Options,
    failure: MPIStreamError | None,
) -> StreamWriter:
    session = _OwnerSession(store, request, options, takeover=takeover) if channel.rank == 0 and store else None
    parts = [str(url), request.digest_parts(), takeover, options.to_json()]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    try:
        claimed = channel.exchange(
            request.operation, digest=digest, payload=region, failure=failure, answer=session and session.claim
        )
        assert store is not None
        failure = _enter(channel.rank, store, claimed["epoch"], claimed["nonce"])
        entered = channel.exchange("enter", failure=failure, answer=session and session.begin)
        manifest = Manifest.from_bytes(entered["manifest"].encode())
        writer, failure = None, None
        try:
            writer = RankWriter(store, manifest, Share.from_json(entered["share"]), options)
        except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
            failure = error if isinstance(error, MPIStreamError) else error_from_json(error_to_json(error))
        try:
            channel.exchange("ready", failure=failure)
        except MPIStreamError:
            if writer is not None:
                writer.close()
            raise
    except BaseException:
        if session is not None:
            session.close()
        raise
    assert writer is not None
    if session is not None:
        store.delete(nonce_key(manifest.epoch))
    resumed = entered["resumed"]
    return StreamWriter(
        channel,
        store,
        writer,
        session.owner if session is not None else None,
        manifest,
        options,
        None if resumed is None else Resumed(**resumed),
    )


def _enter(rank: int, store: Store, epoch: int, nonce: str) -> MPIStreamError | None:
    """Find the owner's nonce through this rank's own path, and make this rank's stage folder."""
    try:
        found = store.read(nonce_key(epoch))
        if found != nonce.encode():
            return StoreError(
                f"rank {rank} on {socket.gethostname()}: {store.url} is not the folder that rank 0 sees "
                f"({'no' if found is None else 'another'} nonce of epoch {epoch}); give a path on a file system that "
                "all ranks share",
                kind="not_shared",
                rank=rank,
            )
        # Made here and never again: that it is gone is how this writer learns that it was fenced.
        store.make_folder(stage_folder(epoch, rank), parents=False)
    except MPIStreamError as error:
        return error
    return None


class _OwnerSession:
    """What rank 0 does between the agreements of an opening."""

    def __init__(
        self, store: Store, request: CreateRequest | ResumeRequest, options: Options, *, takeover: bool
    ) -> None:
        self._store = store
        self._request = request
        self._options = options
        self._takeover = takeover
        self._claim: Claim | None = None
        self._epoch: EpochState | None = None
        self.owner: Owner | None = None

    def claim(self, regions: list[Any]) -> list[dict[str, Any]]:
        self._epoch = self._request.check(self._store, regions)
        self._claim = claim(self._store, self._options, takeover=self._takeover)
        return [{"epoch": self._claim.epoch, "nonce": self._claim.nonce}] * len(regions)

    def begin(self, votes: list[Any]) -> list[dict[str, Any]]:
        assert self._claim is not None and self._epoch is not None
        there = self._store.list(stage_folder(self._claim.epoch))
        for rank in range(len(votes)):
            if str(rank) not in there:
                raise StoreError(
                    f"rank {rank}'s stage folder in {self._store.url} is not seen by rank 0 on {socket.gethostname()}; "
                    "give a path on a file system that all ranks share",
                    kind="not_shared",
                    rank=rank,
                )
        self.owner, resumed = self._request.begin(self._store, self._claim, self._epoch, self._options)
        common = {
            "manifest": self.owner.manifest.to_bytes().decode(),
            "resumed": None
            if resumed is None
            else {name: getattr(resumed, name) for name in Resumed.__dataclass_fields__},
        }
        return [{**common, "share": self._epoch.share(rank).to_json()} for rank in range(len(votes))]

    def close(self) -> None:
        """After a failure: give the lease back, so that the next try need not wait for it."""
        if self._claim is not None:
            self._claim.keeper.close()
            with contextlib.suppress(StoreError):
                self._store.delete_tree(stage_folder(self._claim.epoch))


def write_open(
    url: str | os.PathLike[str],
    schema: StreamSchema,
    *,
    comm: Any = None,
    region: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    takeover: bool = False,
    options: Options | None = None,
) -> StreamWriter:
    """Create a store and open it for writing.

    Collective.

    Parameters
    ----------
    url
        Folder of the new store, on a file system that all ranks share.
    schema
        What it holds, the same on every rank.
    comm
        An mpi4py communicator or a Fortran handle (int); without it this process is the only writer.
    region
        What this rank owns, dim -> (start, stop); a dim left out is whole. On every rank or on none, where
        the grid is split into balanced boxes.
    overwrite
        Replace a store or a Zarr group that is there.
    takeover
        Open even if another writer of that store seems to be alive; that one is fenced.
    options
        By default those of the TOML file named by ``$MPISTREAM_OPTIONS``.

    Returns
    -------
    The writer of this rank.

    Raises
    ------
    SchemaError, AlignmentError, TilingError
        On every rank: regions that don't lie on shard edges, overlap or leave a hole; bad options.
    StoreError
        On every rank: the store exists, is in use, can't be written, or not all ranks see it.
    ProtocolError
        On every rank: no ``comm`` in one of several MPI processes, or ranks that call differently.

    Notes
    -----
    When it returns, the store is durable and has no records.
    """
    if not isinstance(schema, StreamSchema):
        raise SchemaError(f"schema is a {type(schema).__name__}; give a StreamSchema", kind="schema")
    request = CreateRequest(schema, overwrite=overwrite)
    return _open(url, request, comm=comm, region=region, takeover=takeover, options=options)


def write_resume(
    url: str | os.PathLike[str],
    *,
    schema: StreamSchema | None = None,
    comm: Any = None,
    region: Mapping[str, Any] | None = None,
    at: float | None = None,
    expect_last_t: float | None = None,
    takeover: bool = False,
    options: Options | None = None,
) -> StreamWriter:
    """Open a store again, on any number of ranks, and go on behind its last committed record.

    Collective.

    Parameters
    ----------
    url
        Folder of the store.
    schema
        Compared with the store's; the store's is taken in any case.
    comm, region, takeover, options
        As in `write_open`.
    at
        Drop committed records with t > at. They are kept aside until the first commit.
    expect_last_t
        Time that the last kept record must have: guards against a checkpoint that is ahead of the output.

    Returns
    -------
    The writer of this rank; ``w.resumed`` says what was found and dropped.

    Raises
    ------
    ResumeError
        On every rank: no store, another schema, another last time.
    FormatError
        On every rank: the store is damaged.
    SchemaError, AlignmentError, TilingError, StoreError, ProtocolError
        As in `write_open`.

    Notes
    -----
    When it returns, the new state is durable; all writers of earlier openings are fenced.
    """
    request = ResumeRequest(schema, at=at, expect_last_t=expect_last_t)
    return _open(url, request, comm=comm, region=region, takeover=takeover, options=options)

"""Opening a store on all ranks: the agreements around `mpistream.opening`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpistream.agreement import Channel
from mpistream.comm import connect
from mpistream.cores import cores_of_this_process, cores_per_rank
from mpistream.creating import CreateRequest
from mpistream.epoch import EpochState, Route, Share
from mpistream.errors import MPIStreamError, SchemaError, StoreError, error_from_json, error_to_json
from mpistream.fence import fenced
from mpistream.holding import given_indices, plain_region
from mpistream.indexing import agree_on_owners, described, owners_answer
from mpistream.indices import Indices
from mpistream.lease import node_name
from mpistream.location_rank_writer import rank_writer_of
from mpistream.location_writer import writer_class
from mpistream.manifest import Manifest, nonce_key, stage_folder
from mpistream.mover import Mover
from mpistream.opening import Claim, check_alike, claim
from mpistream.options import Options, resolve_options
from mpistream.owner import Owner
from mpistream.parallel import StreamWriter
from mpistream.pipeline import pool_of
from mpistream.plan import Plan, plan_of
from mpistream.region import RegionLike
from mpistream.resuming import Resumed, ResumeRequest
from mpistream.schema import StreamSchema
from mpistream.store import Store, open_store
from mpistream.times import TimeLike

__all__ = ["open_stream", "write_open", "write_resume"]

# Arguments up to so many characters are shown where they differ.
_MAX_TEXT = 64


def write_open(
    url: str | os.PathLike[str],
    schema: StreamSchema,
    *,
    comm: Any = None,
    region: RegionLike | None = None,
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
        What this rank holds, dim -> (start, stop); a dim left out is whole. A list of such mappings is a region of
        several boxes, and `Indices` one of cells in any order. A mapping variable -> region gives each variable one of
        its own; it names every variable, static and coordinate with partitioned dims that is written by region. The
        ranks' regions tile the grid in any way; on every rank or on none, where the grid is split into balanced boxes.
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
        On every rank: regions that overlap, leave a hole or, with ``rearrange="never"``, don't lie on shard edges;
        bad options.
    StoreError
        On every rank: the store exists, is in use, can't be written, or not all ranks see it.
    ProtocolError
        On every rank: no ``comm`` in one of several MPI processes, or ranks that call differently.

    Notes
    -----
    When it returns, the store is durable and has no records.
    """

    def request() -> CreateRequest:
        if not isinstance(schema, StreamSchema):
            raise SchemaError(f"schema is a {type(schema).__name__}; give a StreamSchema", kind="schema")
        return CreateRequest(schema, overwrite=overwrite)

    return open_stream("write_open", url, request, comm=comm, region=region, takeover=takeover, options=options)


def write_resume(
    url: str | os.PathLike[str],
    *,
    schema: StreamSchema | None = None,
    comm: Any = None,
    region: RegionLike | None = None,
    at: TimeLike | None = None,
    expect_last_t: TimeLike | None = None,
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
        Drop committed records with t > at, a number or a date as in `StreamWriter.write_record`. They are kept aside
        until the first commit.
    expect_last_t
        Time that the last kept record must have, a number or a date: guards against a checkpoint that is ahead of the
        output.

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

    def request() -> ResumeRequest:
        return ResumeRequest(schema, at=at, expect_last_t=expect_last_t)

    return open_stream("write_resume", url, request, comm=comm, region=region, takeover=takeover, options=options)


def open_stream(
    operation: str,
    url: str | os.PathLike[str],
    make_request: Callable[[], CreateRequest | ResumeRequest],
    *,
    comm: Any,
    region: RegionLike | None,
    takeover: bool,
    options: Options | None,
) -> StreamWriter:
    """Open a store on all ranks; see `mpistream.opening` for the order.

    Collective.
    """
    failure: MPIStreamError | None = None
    chosen, call = Options(), None
    try:
        chosen = resolve_options(options)
        call = _Call(
            operation=operation,
            url=str(url),
            store=open_store(url),
            request=make_request(),
            region=plain_region(region),
            indices=given_indices(region),
            takeover=takeover,
            options=chosen,
        )
    except MPIStreamError as error:
        # Not raised yet: the other ranks would wait for this one.
        failure = error
    channel = Channel(connect(comm, chosen.timeout), chosen.timeout)
    try:
        if call is None:
            channel.exchange(operation, failure=failure)
            raise AssertionError("an agreement with a failure raises")
        return _open_on(channel, call)
    except MPIStreamError:
        # Every rank raises out of one of the agreements, so every rank comes here.
        channel.close_failed()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What one rank was asked to open."""

    operation: str
    url: str
    store: Store
    request: CreateRequest | ResumeRequest
    region: Any
    """As JSON types."""
    indices: Indices | Mapping[str, Indices] | None
    takeover: bool
    options: Options

    def arguments(self) -> dict[str, str]:
        """Return by name what must be the same on every rank: what is short as its text, what is not as a digest."""
        options = {f"Options.{name}": value for name, value in self.options.to_json().items()}
        every = {"url": self.url, **self.request.arguments(), "takeover": self.takeover, **options}
        texts = {name: json.dumps(value, sort_keys=True) for name, value in every.items()}
        return {
            name: text if len(text) <= _MAX_TEXT else hashlib.sha256(text.encode()).hexdigest()
            for name, text in texts.items()
        }


def _open_on(channel: Channel, call: _Call) -> StreamWriter:
    store = call.store
    session = _OwnerSession(call) if channel.rank == 0 else None
    try:
        plan = channel.exchange(
            call.operation,
            payload={
                "arguments": call.arguments(),
                "region": call.region,
                "node": node_name(),
                "cores": cores_of_this_process(),
            },
            answer=None if session is None else session.check,
        )
        routes, wrong = _routes(channel, call, plan, session)
        claimed = channel.exchange("claim", failure=wrong, answer=None if session is None else session.claim)
        failure = _enter(channel.rank, store, claimed["epoch"], claimed["nonce"])
        entered = channel.exchange("enter", failure=failure, answer=None if session is None else session.begin)
        manifest = Manifest.from_bytes(entered["manifest"].encode())
        writer, failure = None, None
        share = replace(Share.from_json(entered["share"]), indices=call.indices, routes=routes)
        try:
            pool, n_cores = pool_of(channel.communicator), claimed["n_cores"]
            writer = rank_writer_of(store, manifest, share, call.options, pool, n_cores)
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
        # Every rank has its writer: what fails from here on, and only harms tidiness, must not end one of them alone.
        with contextlib.suppress(StoreError):
            store.delete(nonce_key(manifest.epoch))
            for name in call.request.leftovers:
                store.delete_tree(name)
    resumed = entered["resumed"]
    return writer_class(manifest.schema)(
        channel,
        store,
        writer,
        Mover(channel, share, writer),
        session.owner if session is not None else None,
        manifest,
        call.options,
        session.plan if session is not None else None,
        None if resumed is None else Resumed(**resumed),
    )


def _routes(
    channel: Channel, call: _Call, plan: Any, session: _OwnerSession | None
) -> tuple[Mapping[str, tuple[Route, ...]], MPIStreamError | None]:
    """Agree on who writes what ranks with indices hold; return this rank's routes, and what is wrong with them."""
    if plan is None:
        return {}, None
    try:
        return agree_on_owners(channel, call.indices, plan, None if session is None else session.assign)
    except MPIStreamError:
        raise
    except Exception as error:
        # Between agreements: the others must not wait for this rank.
        channel.post_leave(error)
        raise


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

    def __init__(self, call: _Call) -> None:
        self._operation = call.operation
        self._store = call.store
        self._request = call.request
        self._options = call.options
        self._takeover = call.takeover
        self._claim: Claim | None = None
        self._epoch: EpochState | None = None
        self._nodes: list[str] = []
        self._cores: list[int] = []
        self.plan: Plan | None = None
        self.owner: Owner | None = None

    def check(self, votes: list[Any]) -> list[Any]:
        check_alike(self._operation, votes)
        self._nodes = [vote["node"] for vote in votes]
        self._cores = cores_per_rank([(vote["node"], vote["cores"]) for vote in votes])
        self._epoch = self._request.check(self._store, votes, self._options)
        plan = described(self._request.schema, self._epoch) if self._epoch.indexed else None
        return [plan] * len(votes)

    def assign(self, votes: list[Any]) -> list[dict[str, Any]]:
        assert self._epoch is not None
        self._epoch, answers = owners_answer(self._request.schema, self._epoch, votes)
        return answers

    def claim(self, _: list[Any]) -> list[dict[str, Any]]:
        self._claim = claim(self._store, self._options, takeover=self._takeover)
        return [{"epoch": self._claim.epoch, "nonce": self._claim.nonce, "n_cores": n} for n in self._cores]

    def begin(self, votes: list[Any]) -> list[dict[str, Any]]:
        assert self._claim is not None
        assert self._epoch is not None
        there = self._store.list(stage_folder(self._claim.epoch))
        for rank in range(len(votes)):
            if str(rank) not in there:
                raise StoreError(
                    f"rank {rank}'s stage folder in {self._store.url} is not seen by rank 0 on {socket.gethostname()}; "
                    "give a path on a file system that all ranks share",
                    kind="not_shared",
                    rank=rank,
                )
        try:
            self.owner, resumed = self._request.begin(self._store, self._claim, self._epoch, self._options)
        except StoreError as error:
            raise fenced(self._store, self._claim.epoch, error) from error
        common = {
            "manifest": self.owner.manifest.to_bytes().decode(),
            "resumed": None
            if resumed is None
            else {name: getattr(resumed, name) for name in Resumed.__dataclass_fields__},
        }
        assert self.owner.epoch is not None
        self.plan = plan_of(
            self.owner.manifest.schema,
            self.owner.epoch,
            self._nodes,
            writers=self._options.writers,
            max_pending_nbytes=0 if self._options.threads == 0 else self._options.max_pending_nbytes,
        )
        return [{**common, "share": share.to_json()} for share in self.owner.epoch.shares()]

    def close(self) -> None:
        """After a failure: give the lease back, so that the next try need not wait for it."""
        if self._claim is not None:
            self._claim.keeper.close(failed=True)
            with contextlib.suppress(StoreError):
                self._store.delete_tree(stage_folder(self._claim.epoch))

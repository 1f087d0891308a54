"""The commit of one or of several streams: the steps at the head of `mpistream.commit`, in that order.

However many streams take part, there is one agreement: one vote of each rank, one gather, one outcome. So a failure
of any stream on any rank before the first manifest is renamed ends in the same error on every rank, and nothing is
committed in any stream.

Only the renames of the manifests come one after the other, and no file system makes them one. What can go wrong
between the first and the last of them is little: all files are staged and synced, and all time chunks placed. Where it
does, the outcome says of each stream whether it is committed, every rank goes on from just that, and the error names
the streams (kinds ``partly_committed`` and ``outcome_unknown``).

A commit that does not wait differs in three steps. Step 1 is left out: a rank's vote says what it has staged by now. In
step 2 rank 0 does not see tokens yet; it answers what all ranks have, the intersection. In step 3 a rank stages what
only this commit makes, small objects, and places that and what was agreed on; its token is made then. So the decision
falls once, over the gathered tokens, and all that is said of the manifest holds (I2: what a token names was durable and
in place before it was gathered; I3: each token counts every cell of the agreed records). What the decision refuses was
placed all the same, as after any step that fails behind the third: no manifest names it, the records stay pending, and
an object with committed records in it keeps them where they were (I5).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpistream.agreement import Channel
from mpistream.commit import Decision, next_manifest, timed
from mpistream.errors import CommitError, MPIStreamError, ProtocolError, as_ours, error_from_json, error_to_json
from mpistream.manifest import Manifest
from mpistream.owner import Owner, Prepared, commit_error
from mpistream.ranges import Ranges, overlap, union
from mpistream.rank_writer import RankWriter
from mpistream.store import Store
from mpistream.token import CommitReceipt, CommitToken

__all__ = ["OpenStream", "commit_streams", "on_every_rank"]


@dataclass(slots=True, kw_only=True, eq=False)
class OpenStream:
    """What one rank holds of an open stream."""

    store: Store
    writer: RankWriter
    owner: Owner | None
    """On rank 0."""
    manifest: Manifest
    """The last committed state."""
    receipt: CommitReceipt


def on_every_rank(error: BaseException, rank: int) -> MPIStreamError:
    """Return what a failure of one rank's part of a commit is on every rank.

    Not collective.
    """
    return commit_error(as_ours(error, rank), rank)


def commit_streams(
    channel: Channel,
    streams: Sequence[OpenStream],
    *,
    partial_rows: bool,
    wait: bool,
    failure: MPIStreamError | None = None,
    others: Sequence[Channel] = (),
) -> None:
    """Commit what is pending in these streams; their manifests and receipts are then the new ones.

    Collective.

    Parameters
    ----------
    channel
        Of the ranks that all streams have.
    streams
        At least one, the same on every rank, in the same order.
    partial_rows, wait
        As in `mpistream.parallel.StreamWriter.commit`.
    failure
        Why this rank can't take part; then every rank raises it.
    others
        Channels of the same ranks, where one that calls something else may wait.

    Raises
    ------
    CommitError, FencedError, ProtocolError
        On every rank.
    """
    _Commit(channel, streams, partial_rows, wait).run(failure, others)


@dataclass(slots=True)
class _Commit:
    """One commit on one rank."""

    channel: Channel
    streams: Sequence[OpenStream]
    partial_rows: bool
    wait: bool
    records: list[Ranges] = field(default_factory=list)
    """Of each stream, what this rank commits."""
    statics: list[Sequence[str] | None] = field(default_factory=list)
    """Of each stream, which statics; None: all."""
    arrived: list[list[str]] = field(default_factory=list)
    """On rank 0, of each rank, the tokens of the streams with something pending, as they arrived."""
    decisions: list[Decision] = field(default_factory=list)
    """On rank 0, what these make."""

    def run(self, failure: MPIStreamError | None, others: Sequence[Channel]) -> None:
        rank = self.channel.rank
        # 1 Stage.
        votes: list[dict[str, Any]] = []
        for stream in self.streams if failure is None else ():
            try:
                votes.append(self._stage(stream) if self.wait else self._look(stream))
            except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
                failure = on_every_rank(self._named(stream, as_ours(error, rank)), rank)
                break
        # 2 Arrive: rank 0 sees what every rank is about to place, and says go only if it would be committed.
        go: list[dict[str, Any] | None] = self.channel.exchange(
            "commit",
            digest=f"partial_rows={self.partial_rows}, wait={self.wait}",
            payload=votes,
            failure=failure,
            answer=self._answer_arrival,
            others=others,
        )
        pending = [i for i, agreed in enumerate(go) if agreed is not None]
        outcome: dict[str, Any] = {"receipts": [], "records": [], "error": None}
        if pending:
            try:
                if not self.wait:
                    self._take_agreed(go, votes)
                # 3 Place.
                tokens = [self._place(i, votes[i].get("token")) for i in pending]
                # 4 Gather, 5 decide, 6 commit, 7 outcome.
                if rank == 0:
                    outcome = self._lead(pending, tokens)
                else:
                    self.channel.gather(json.dumps(tokens).encode())
                    outcome = self.channel.await_announcement()
                for i, receipt, records in zip(pending, outcome["receipts"], outcome["records"], strict=False):
                    self._committed(i, CommitReceipt.from_json(receipt), _ranges(records))
            except MPIStreamError:
                raise  # every rank has it
            except BaseException as error:
                # Ctrl-C, say: this rank does not know what is committed, or has not gone on from it.
                self.channel.post_leave(error)
                self.channel.failure = self.channel.failure or _interrupted(error, rank)
                raise
        # 8 Publish: what was committed now, and what an earlier commit could not.
        for stream in self.streams:
            if stream.owner is not None:
                # What an earlier one warned of is done now, or warned of anew.
                behind = None if self.wait else stream.writer.stager
                stream.receipt = stream.owner.publish(replace(stream.receipt, warnings=()), behind)
        if outcome["error"] is not None:
            told = error_from_json(outcome["error"])
            self.channel.note(told)
            raise told

    def _stage(self, stream: OpenStream) -> dict[str, Any]:
        """Stage on this rank; return its vote."""
        records = stream.writer.stage(partial_rows=self.partial_rows)
        self.records.append(records)
        self.statics.append(None)
        return {
            "run_id": stream.manifest.run_id,
            "is_pending": stream.writer.has_pending(records),
            "token": stream.writer.token(records).to_text(),
        }

    @staticmethod
    def _look(stream: OpenStream) -> dict[str, Any]:
        """Return this rank's vote: what it has staged, and whether it has blobs that wait for no record."""
        records, statics = stream.writer.ready()
        return {
            "run_id": stream.manifest.run_id,
            "is_pending": stream.writer.has_blobs(),
            "records": records,
            "statics": statics,
        }

    def _answer_arrival(self, votes: list[list[dict[str, Any]]]) -> list[list[dict[str, Any] | None]]:
        """On rank 0: what is committed of each stream, None: nothing; what raises ends the commit before anything is
        placed."""
        self._check_same_streams(votes)
        go: list[dict[str, Any] | None]
        if self.wait:
            go = [{} if any(v[i]["is_pending"] for v in votes) else None for i in range(len(self.streams))]
            pending = [i for i, agreed in enumerate(go) if agreed is not None]
            self.arrived = [[v[i]["token"] for i in pending] for v in votes]
            self.decisions = [self._decide(i, [t[k] for t in self.arrived]) for k, i in enumerate(pending)]
        else:
            go = [self._agree(i, [v[i] for v in votes]) for i in range(len(self.streams))]
            pending = [i for i, agreed in enumerate(go) if agreed is not None]
        for i in pending:
            try:
                self._owner(i).withdraw()
            except MPIStreamError as error:
                raise commit_error(self._named(self.streams[i], error), 0) from error
        return [go] * len(votes)

    def _agree(self, i: int, votes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """On rank 0: what every rank has staged of a stream; in a location series what any rank has, of its own."""
        records = _ranges(votes[0]["records"])
        is_of_each = self.streams[i].manifest.schema.is_location_series
        for vote in votes[1:]:
            theirs = _ranges(vote["records"])
            records = union(records, theirs) if is_of_each else overlap(records, theirs)
        epoch = self._owner(i).epoch
        assert epoch is not None
        # A rank that has no part in a static need not have written it.
        statics = [
            name
            for name in sorted({name for vote in votes for name in vote["statics"]})
            if all(name in vote["statics"] or not n for vote, n in zip(votes, epoch.n_cells[name], strict=True))
        ]
        if not (records or statics or any(vote["is_pending"] for vote in votes)):
            return None
        return {"records": records, "statics": statics}

    def _take_agreed(self, go: Sequence[Mapping[str, Any] | None], votes: Sequence[Mapping[str, Any]]) -> None:
        for agreed, vote in zip(go, votes, strict=True):
            own = _ranges(vote["records"])
            self.records.append(() if agreed is None else overlap(_ranges(agreed["records"]), own))
            self.statics.append(() if agreed is None else agreed["statics"])

    def _check_same_streams(self, votes: list[list[dict[str, Any]]]) -> None:
        names = {s.manifest.run_id: s.store.url for s in self.streams}
        ours = list(names)
        for rank, vote in enumerate(votes):
            if (theirs := [v["run_id"] for v in vote]) != ours:
                said = [names.get(run_id, "another stream") for run_id in theirs]
                raise ProtocolError(
                    f"rank {rank} commits {_list(said)}, rank 0 {_list(names.values())}; every rank must name the same "
                    "writers in the same order",
                    kind="mismatch",
                    rank=rank,
                )

    def _decide(self, i: int, texts: Sequence[str]) -> Decision:
        stream = self.streams[i]
        assert stream.owner is not None
        try:
            return stream.owner.decide([CommitToken.from_text(t) for t in texts], stream.writer.times(self.records[i]))
        except MPIStreamError as error:
            raise self._named(stream, error) from error

    def _place(self, i: int, token: str | None) -> str | None:
        """Place on this rank; return the token that is gathered, None for the one that came with the vote."""
        stream, records, statics = self.streams[i], self.records[i], self.statics[i]
        try:
            if token is None:
                stream.writer.stage_small(records)
            stream.writer.place(records, statics)
        except Exception as error:  # noqa: BLE001 (it travels in the token: the gather must be complete)
            return stream.writer.token(records, as_ours(error, self.channel.rank), statics).to_text()
        return stream.writer.token(records, statics=statics).to_text() if token is None else None

    def _lead(self, pending: Sequence[int], tokens: list[str | None]) -> dict[str, Any]:
        """Steps 4 to 7 on rank 0: whatever happens, every rank is told."""
        prepared: dict[int, Prepared] = {}
        receipts: list[dict[str, Any]] = []
        try:
            failure: Exception | None = None
            if self.wait:
                # While the others place: what would be committed is known, and the stage folder is nobody else's.
                try:
                    self._prepare_all(pending, prepared)
                except Exception as error:  # noqa: BLE001 (the gather must be complete first)
                    failure = error
            self._gather(pending, tokens)
            if failure is not None:
                raise failure
            if not self.wait:
                self._prepare_all(pending, prepared)
            for i in pending:
                self._owner(i).place_times(prepared[i])
            for i, decision in zip(pending, self.decisions, strict=True):
                self._owner(i).commit(prepared[i])
                del prepared[i]
                assert decision.receipt is not None
                receipts.append(decision.receipt.to_json())
        except Exception as error:
            for i, item in prepared.items():
                self._owner(i).discard(item)
            told = self._of_all(pending, len(receipts), on_every_rank(error, 0))
            if not receipts:
                self.channel.announce(error=told)
                raise told from error
            return self._announce(receipts, told)
        except BaseException as error:
            # Ctrl-C, say, in the middle of it: whether the manifest is in place is for the store to tell.
            unknown = _interrupted(error, 0)
            self._announce(receipts, self._of_all(pending, len(receipts), unknown))
            raise
        return self._announce(receipts, None)

    def _owner(self, i: int) -> Owner:
        owner = self.streams[i].owner
        assert owner is not None
        return owner

    def _prepare_all(self, pending: Sequence[int], prepared: dict[int, Prepared]) -> None:
        for i, decision in zip(pending, self.decisions, strict=True):
            prepared[i] = self._prepare(i, decision)

    def _prepare(self, i: int, decision: Decision) -> Prepared:
        stream, records = self.streams[i], self.records[i]
        assert decision.manifest is not None
        try:
            return self._owner(i).prepare(decision.manifest, timed(records, stream.writer.times(records)))
        except MPIStreamError as error:
            raise self._named(stream, error) from error

    def _gather(self, pending: Sequence[int], tokens: list[str | None]) -> None:
        gathered = [json.loads(data) for data in self.channel.gather(json.dumps(tokens).encode()) or ()]
        if not self.wait:
            self.decisions = [self._decide(i, [tokens[k] for tokens in gathered]) for k, i in enumerate(pending)]
            return
        # Where none travels again, that of the vote stands, and what was decided; others carry what went wrong since.
        if any(sent != [None] * len(pending) for sent in gathered):
            both = list(zip(gathered, self.arrived, strict=True))
            for k, i in enumerate(pending):
                self._decide(i, [known[k] if sent[k] is None else sent[k] for sent, known in both])
            raise ProtocolError("a token has changed since its rank arrived; nothing was committed", kind="token")

    def _announce(self, receipts: list[dict[str, Any]], error: MPIStreamError | None) -> dict[str, Any]:
        """Tell every rank which streams are committed, the first ones, and what is wrong with the others."""
        outcome = {
            "receipts": receipts,
            # In a location series a rank knows its own only.
            "records": [d.records for d in self.decisions[: len(receipts)]],
            "error": None if error is None else error_to_json(error),
        }
        if error is not None and not receipts:
            self.channel.announce(error=error)
        else:
            self.channel.announce(outcome)
            if error is not None:
                self.channel.note(error)
        return outcome

    def _committed(self, i: int, receipt: CommitReceipt, records: Ranges) -> None:
        """Go on from the new state of a stream: every rank computes the same."""
        stream = self.streams[i]
        times = stream.writer.times(records)
        stream.manifest = next_manifest(stream.manifest, records, times, receipt.new_statics, receipt.n_packs)
        stream.writer.committed(stream.manifest)
        stream.receipt = receipt

    # What is said when there are several streams

    def _named(self, stream: OpenStream, error: MPIStreamError) -> MPIStreamError:
        if len(self.streams) == 1:
            return error
        return error_from_json({**error_to_json(error), "message": f"{stream.store.url}: {error}"})

    def _of_all(self, pending: Sequence[int], n_done: int, error: MPIStreamError) -> MPIStreamError:
        """Return what a failure on rank 0 is after ``n_done`` of the manifests were renamed."""
        is_unknown = isinstance(error, CommitError) and error.kind == "outcome_unknown"
        if len(self.streams) == 1 or not (n_done or is_unknown):
            return error
        urls = [self.streams[i].store.url for i in pending]
        texts = [f"{_list(urls[:n_done])}: committed"] if n_done else []
        texts += [f"{urls[n_done]}: not known whether it is committed"] if is_unknown and urls[n_done:] else []
        rest = urls[n_done + is_unknown :]
        texts += [f"{_list(rest)}: not committed"] if rest else []
        cause = error.cause_text if isinstance(error, CommitError) else str(error)
        way_out = (
            "these writers are dead, write_resume tells of each stream what is committed"
            if is_unknown
            else "what is not committed is still pending"
        )
        return CommitError(
            f"the streams were committed in part ({'; '.join(texts)}): {cause}; {way_out}",
            kind="outcome_unknown" if is_unknown else "partly_committed",
            rank=0,
            errno=error.errno,
            cause_text=cause,
        )


def _interrupted(error: BaseException, rank: int) -> CommitError:
    what = f"rank {rank} was interrupted in a commit ({type(error).__name__}); this writer is dead"
    return CommitError(f"{what}, write_resume tells what is committed", kind="outcome_unknown", rank=rank)


def _ranges(pairs: Iterable[Sequence[int]]) -> Ranges:
    """Return ranges that travelled as JSON."""
    return tuple((start, stop) for start, stop in pairs)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"

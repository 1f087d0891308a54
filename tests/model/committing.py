"""Operations that all ranks do together: commit, rollback, invalidate, close."""

from __future__ import annotations

import random
from typing import Any

import mpistream as ms
from mpistream.zarr3.codecs import ChunkCodec
from tests.model.state import State, visible
from tests.model.turns import Killed
from tests.model.writing import Writing

__all__ = ["Committing"]


class Committing(Writing):
    """Operations that change what is committed."""

    def end_crew(self) -> None:
        """The crew has nothing more to say."""
        assert self.crew is not None
        self.crew.abandon()
        self.crew = None

    def either(self, *states: State | None) -> None:
        """Find out which of these is committed; the comparison follows."""
        if self.store.read(".mpistream/manifest.json") is None:
            assert None in states
            self.state = self.old = None
            return
        manifest = ms.open_reader(self.store).manifest  # type: ignore[arg-type]
        for state in states:
            if state is not None:
                epoch = manifest.epoch if state.epoch < 0 else state.epoch
                if (manifest.epoch, manifest.commit_seq) == (epoch, state.seq):
                    state.epoch, self.state = epoch, state
                    return
        raise AssertionError(f"epoch {manifest.epoch}, commit {manifest.commit_seq} is none of {states}")

    def failed(self, error: BaseException, before: State, after: State) -> bool:
        """After a collective call that raised: whether the crew goes on."""
        assert self.crew is not None
        if isinstance(error, Killed):
            self.say("    killed")
            self.end_crew()
            self.either(before, after)
            return False
        assert isinstance(error, ms.CommitError), error
        self.say(f"    {error.kind}: {error}")
        if error.kind == "outcome_unknown":
            assert self.is_faulty
            again = self.crew.call("commit")
            assert isinstance(again, ms.CommitError), again
            self.end_crew()
            self.either(before, after)
            return False
        assert error.kind not in ("timeout", "left")
        return True

    def commit(self, draw: random.Random, *, again: bool = False) -> None:
        """All or nothing of what is pending."""
        assert self.crew is not None
        assert self.state is not None
        crew, before = self.crew, self.state
        partial = again or draw.random() < 0.7
        can = crew.are_equal() and not crew.is_broken()
        partial = partial or not can
        # Without threads everything is durable when it is written, so that it is known what does not wait: full rows.
        wait = partial or bool(crew.options.threads) or draw.random() < 0.5
        after = crew.committed(before, partial_rows=partial)
        seen = visible(self.store)
        found = crew.call("commit", partial_rows=partial, wait=wait)
        if isinstance(found, BaseException):
            if self.failed(found, before, after):
                assert self.is_faulty or not can, found
            return
        assert can, "a commit of different records went well"
        self.say(f"    {after.seq - before.seq} commit of {len(after.records) - len(before.records)} records")
        self.committed(found, before, after)
        if after.seq == before.seq and crew.is_published:
            assert visible(self.store) == seen
        crew.is_published = not found.warnings

    def committed(self, receipt: Any, before: State, after: State) -> None:
        """Compare a receipt, and go on from the new state."""
        assert self.crew is not None
        assert (receipt.commit_seq, receipt.epoch) == (after.seq, after.epoch)
        assert (receipt.n_records, receipt.last_t) == (len(after.records), after.last_t)
        if after.seq > before.seq:
            assert receipt.n_new_records == len(after.records.keys() - before.records.keys())
            assert set(receipt.new_statics) == after.statics.keys() - before.statics.keys()
            self.crew.note_committed(after)
            if not receipt.warnings:
                assert not [k for k in list(self.store._objects) if k.startswith(".mpistream/dropped/")]
        assert self.is_faulty or not receipt.warnings
        self.crew.last_receipt = receipt
        self.state = after

    def rollback(self, draw: random.Random) -> None:
        """Nothing of it was ever written."""
        assert self.crew is not None
        before = visible(self.store)
        found = self.crew.call("rollback")
        if isinstance(found, Killed):
            assert self.state is not None
            self.failed(found, self.state, self.state)
            return
        if found is not None:
            assert self.is_faulty, found
            self.crew.heal()
            found = self.crew.call("rollback")
        assert found is None
        for p in self.crew.pending:
            p.clear()
        assert visible(self.store) == before

    def invalidate(self, draw: random.Random) -> None:
        """Give committed records up."""
        assert self.crew is not None
        assert self.state is not None
        before, records = self.state, sorted(self.state.records)
        n_total = self.shape.n_total
        chosen = draw.sample(records, draw.randint(0, min(3, len(records))))
        is_bad = n_total is None
        if n_total is not None and draw.random() < 0.15:
            chosen.append(draw.randrange(n_total + 2))
            is_bad = chosen[-1] not in before.records
        self.say(f"    {chosen}{', refused' if is_bad else ''}")
        after = before.copy()
        if chosen and not is_bad:
            after.drop(set(chosen))
        found = self.crew.call("invalidate", chosen)
        if is_bad and not isinstance(found, Killed):
            # A fault, or a pack that could not be taken back, may come first only where it is looked for.
            assert isinstance(found, ms.SchemaError) or self.is_faulty, found
            return
        if isinstance(found, ms.StoreError):
            assert self.is_faulty, found
            return
        if isinstance(found, ms.CommitError) and found.kind == "not_published":
            assert self.is_faulty, found
            self.say(f"    {found.kind}: {found}")
            self.crew.is_published, self.state = False, after
            return
        if isinstance(found, BaseException):
            if self.failed(found, before, after):
                assert self.is_faulty, found
            return
        assert (found.commit_seq, found.n_records, found.last_t) == (after.seq, len(after.records), after.last_t)
        if chosen:
            self.crew.is_published = not found.warnings
            if not found.warnings:
                self.check_committed_array(after)
        self.state = after

    def check_committed_array(self, state: State) -> None:
        """Plain readers know before anybody may write one of the records again."""
        array = self.shape.schema.committed_array
        assert array is not None
        data = self.store.read(f"committed/{'c'}{self.shape.separator}0")
        assert data is not None
        found = ChunkCodec(array.chain, array.dtype).decode(data, array.resolved_chunk_shape)
        assert found.tolist() == [r in state.records for r in range(array.shape[0])]

    def close(self, draw: random.Random) -> None:
        """The last commit, and the end of the crew."""
        assert self.crew is not None
        assert self.state is not None
        before, crew = self.state, self.crew
        can = crew.are_equal() and not crew.is_broken()
        after = crew.committed(before, partial_rows=True)
        found = crew.call("close")
        if found is None:
            assert can
            self.state = after
        elif isinstance(found, Killed):
            self.failed(found, before, after)
            return
        else:
            assert isinstance(found, ms.CommitError), found
            assert self.is_faulty or not can, found
            if found.kind == "outcome_unknown":
                self.either(before, after)
        assert crew.call("close") is None
        assert isinstance(crew.call("commit"), ms.ProtocolError)
        self.end_crew()

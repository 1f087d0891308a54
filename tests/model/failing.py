"""Ranks and stores that fail, jobs that die, and writers that wake up when they are nobody any more."""

from __future__ import annotations

import random
from typing import Any

import mpistream as ms
from tests.model.committing import Committing
from tests.model.state import State, visible
from tests.model.turns import Killed
from tests.model.views import Fault

__all__ = ["Failing"]


class Failing(Committing):
    """Operations in which something goes wrong."""

    def abandon(self, draw: random.Random) -> None:
        """All processes die between two calls."""
        self.end_crew()

    def leave(self, draw: random.Random) -> None:
        """One rank's body raises; the others hear of it in their next call."""
        assert self.crew is not None
        crew, leaver = self.crew, draw.randrange(self.crew.size)
        seen = visible(self.store)

        def body(rank: int) -> Any:
            w, error = crew.writers[rank], None
            try:
                if rank == leaver:
                    raise ValueError("no more")
                w.commit()
            except (ValueError, ms.CommitError) as found:
                error = found
            w.__exit__(None if error is None else type(error), error, None)
            return error

        outcomes = crew.turns.run(body)
        for rank, error in enumerate(outcomes):
            if rank == leaver:
                assert isinstance(error, ValueError), error
            else:
                assert isinstance(error, ms.CommitError), error
                assert (error.kind, error.rank) == ("left", leaver)
        assert visible(self.store) == seen
        self.end_crew()

    def lag(self, draw: random.Random) -> None:
        """One rank lacks a record: the commit fails on all, until it comes or all roll back."""
        assert self.crew is not None
        records = self.next_records(draw, 1)
        if not records or self.crew.size == 1 or not self.crew.are_equal() or self.crew.is_broken():
            return
        (record, t), late = records[0], draw.randrange(self.crew.size)
        self.version += 1
        for rank in range(self.crew.size):
            if rank != late:
                assert self.put(rank, record, t, self.version)
        found = self.crew.call("commit")
        assert isinstance(found, ms.CommitError), found
        assert found.kind == "records"
        if draw.random() < 0.5:
            assert self.put(late, record, t, self.version)
        else:
            self.rollback(draw)

    def mismatch(self, draw: random.Random) -> None:
        """One rank calls something else: all ranks hear of it, and what it dropped is missing from then on."""
        assert self.crew is not None
        if self.crew.size == 1 or not self.crew.are_equal() or self.crew.is_broken():
            return
        crew, odd = self.crew, draw.randrange(self.crew.size)
        found = crew.collective(lambda r: crew.writers[r].rollback() if r == odd else crew.writers[r].commit())
        assert isinstance(found, ms.ProtocolError), found
        crew.pending[odd].clear()

    def fault(self, draw: random.Random) -> None:
        """One rank's store fails for a while, in the midst of other operations; then all can go on."""
        assert self.crew is not None
        crew, rank = self.crew, draw.randrange(self.crew.size)
        # There must be something that can fail.
        self.write(draw)
        if draw.random() < 0.5:
            self.blob(draw)
        calls, key = draw.choice(
            [
                ({"stage"}, ""),
                ({"place"}, ""),
                ({"sync_folders"}, ""),
                ({"read", "open"}, ""),
                ({"stage", "place"}, ""),
                ({"move"}, ""),
                ({"place"}, draw.choice(["manifest.json", "blobs/", "zarr.json", "time/"])),
                ({"sync_folders"}, draw.choice(["manifest.json", "blobs/", "zarr.json"])),
            ]
        )
        n, after = draw.choice([1, 2, 10**6]), draw.choice([0, 0, 1, 2, 3, 5])
        fault = Fault(frozenset(calls), 0 if key else after, n, key, is_resent=draw.random() < 0.2)
        crew.views[0 if key else rank].fault = fault
        self.is_faulty = True
        try:
            for _ in range(draw.randint(1, 3)):
                name = draw.choice(["write", "static", "blob", "flush", "commit", "commit", "commit", "invalidate"])
                self.say(f"    {name} with {fault}")
                getattr(self, name)(draw)
                if self.crew is None:
                    return
                faults = [view.fault for view in crew.views]
                for view in crew.views:
                    view.fault = None
                self.check(draw)
                for view, kept in zip(crew.views, faults, strict=True):
                    view.fault = kept
            if draw.random() < 0.2:
                self.say("    close")
                self.close(draw)
        finally:
            self.is_faulty = False
            crew.heal()
        if self.crew is not None and draw.random() < 0.7:
            self.say("    healed")
            # Whatever was placed already must not come back with what is committed next.
            for name in draw.choice(
                ["commit", "rollback", "rollback write commit", "rollback invalidate", "invalidate"]
            ).split():
                if name != "commit" or (crew.are_equal() and not crew.is_broken()):
                    self.say(f"    {name}")
                    getattr(self, name)(draw)
                    self.check(draw)

    def kill(self, draw: random.Random) -> None:
        """The job dies at some change of the store, in an operation or in an opening."""
        n, is_behind = draw.choice([draw.randrange(6), draw.randrange(40)]), draw.random() < 0.5
        if self.crew is None or draw.random() < 0.3:
            self.kill_opening(draw, n, is_behind=is_behind)
            return
        self.write(draw)
        crew = self.crew
        crew.light(n, is_behind=is_behind)
        name = draw.choice(["commit", "commit", "close", "invalidate", "rollback"])
        self.say(f"    {name}, {n} changes")
        getattr(self, name)(draw)
        if self.crew is not None:
            crew.heal()

    def kill_opening(self, draw: random.Random, n: int, *, is_behind: bool) -> None:
        """It dies while it opens the store, or fails in that."""
        assert self.state is not None
        crew, before = self.new_crew(draw), self.state
        if self.crew is not None:
            self.ghosts.append(self.crew)
            self.crew = None
        at = draw.choice([None, *self.resume_times()])
        is_new = draw.random() < 0.1
        after = State(epoch=-1) if is_new else self.resumed(at, -1)
        if draw.random() < 0.4 and not is_new:
            calls = draw.choice([{"stage"}, {"place"}, {"read", "open"}, {"move", "sync_folders"}, {"create"}])
            crew.views[draw.randrange(crew.size)].fault = Fault(frozenset(calls), n, draw.choice([1, 10**6]))
        else:
            crew.light(n, is_behind=is_behind)
        self.say(f"    {'overwrite' if is_new else f'resume at {at}'} on {crew.size} ranks, {n} changes")
        if is_new:
            error = crew.open(ms.write_open, self.shape.schema, overwrite=True, takeover=True)
        else:
            error = crew.open(ms.write_resume, at=at, takeover=True)
        crew.heal()
        if error is None:
            if is_new:
                self.crew, self.state = crew, State(epoch=crew.writers[0].epoch)
                self.old = None
            else:
                self.settle(crew, after)
            return
        assert isinstance(error, Killed | ms.StoreError | ms.CommitError), error
        crew.abandon()
        self.say(f"    {type(error).__name__}: {error}")
        self.either(before, after, *([None] if is_new else []))
        if is_new:
            self.old = None

    def ghost(self, draw: random.Random) -> None:
        """Writers of an older epoch wake up: they are told, and change nothing."""
        if not self.ghosts:
            return
        crew = self.ghosts.pop(draw.randrange(len(self.ghosts)))
        seen = visible(self.store)
        if crew.turns.is_killed or not crew.writers:
            return
        name = draw.choice(["commit", "commit", "close", "rollback"])
        has_any = any(p.records or p.statics or "static" in {s for s, _ in p.blobs} for p in crew.pending)
        can = crew.are_equal() and not crew.is_broken()
        found = crew.call(name)
        self.say(f"    {name}: {type(found).__name__}: {found}")
        assert visible(self.store) == seen
        if can and (name == "close" or (name == "commit" and has_any)):
            assert isinstance(found, ms.FencedError), found
        crew.abandon()

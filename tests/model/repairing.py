"""Stores that are brought in order without a run, and records that come back."""

from __future__ import annotations

import random
from typing import Any

import mpistream as ms
from tests.model.crew import Crew
from tests.model.failing import Failing
from tests.model.state import State, visible
from tests.model.turns import Killed
from tests.model.views import Fault

__all__ = ["Repairing"]


class Repairing(Failing):
    """Operations that repair."""

    def repair(self, draw: random.Random) -> None:
        """Repair, and bring back what was dropped; a crew that is open is fenced."""
        assert self.state is not None
        if self.crew is not None and not self.state.dropped and draw.random() < 0.8:
            self.drop_some(draw)
            if self.crew is None:
                return
        restores = draw.random() < (0.8 if self.state.dropped else 0.3)
        crew = self.new_repairer()
        if draw.random() < 0.3:
            n = draw.choice([draw.randrange(10), draw.randrange(60)])
            if draw.random() < 0.4:
                calls = draw.choice([{"stage"}, {"place"}, {"read", "open"}, {"move", "sync_folders"}, {"create"}])
                crew.views[0].fault = Fault(frozenset(calls), n, draw.choice([1, 10**6]), is_resent=draw.random() < 0.2)
            else:
                crew.light(n, is_behind=draw.random() < 0.5)
            self.say(f"    {n} changes, {crew.views[0].fault}")
        if restores and not self.state.dropped:
            self.check_nothing_dropped(crew)
            return
        before, middle = self.state, self.resumed(None, -1)
        after = middle.copy()
        if restores:
            after.restore()
        self.say(f"    {sorted(after.records.keys() - before.records.keys())} come back")
        fenced, self.crew = self.crew, None
        if fenced is not None:
            self.ghosts.append(fenced)
        found = self.call_repair(crew, restores=restores)
        crew.abandon()
        if isinstance(found, BaseException):
            assert isinstance(found, Killed | ms.StoreError | ms.CommitError), found
            self.say(f"    {type(found).__name__}: {found}")
            self.either(before, middle, after)
            return
        self.check_repaired(found, before, after)

    def drop_some(self, draw: random.Random) -> None:
        """Resume so that records are dropped; then maybe leave things undone where these have been."""
        assert self.state is not None
        if self.crew is not None and not self.state.records:
            self.write(draw)
            self.blob(draw)
            if self.crew.are_equal() and not self.crew.is_broken():
                self.commit(draw)
        self.say("    resume")
        self.opened(draw, draw.choice(self.resume_times()))
        self.check(draw)
        for name in draw.choice(["", "", "write flush", "write blob", "fault", "kill", "invalidate", "resume"]).split():
            if self.crew is not None:
                self.say(f"    {name}")
                getattr(self, name)(draw)
                self.check(draw)

    def new_repairer(self) -> Crew:
        """Return a process without MPI."""
        return Crew(self.store, self.shape, 1, f"{self.seed} {self.i} crew", threads=0)

    def call_repair(self, crew: Crew, *, restores: bool) -> Any:
        view: Any = crew.views[0]
        more: dict[str, Any] = {"restore_dropped": restores, "takeover": True, "options": crew.options}
        return crew.collective(lambda _: ms.repair(view, **more))

    def check_nothing_dropped(self, crew: Crew) -> None:
        """Without records aside nothing is changed, and whoever is open goes on."""
        seen = visible(self.store)
        found = self.call_repair(crew, restores=True)
        crew.abandon()
        self.say(f"    {type(found).__name__}: {found}")
        if isinstance(found, ms.ResumeError):
            assert found.kind == "nothing_dropped"
        else:
            # A fault in the look at what is there.
            assert isinstance(found, ms.StoreError), found
            assert crew.views[0].fault is not None
        assert visible(self.store) == seen

    def check_repaired(self, receipt: Any, before: State, after: State) -> None:
        """Compare the receipt, and what lies in the store."""
        assert receipt.epoch > before.epoch
        after.epoch, self.state = receipt.epoch, after
        assert (receipt.commit_seq, receipt.n_records, receipt.last_t) == (
            after.seq,
            len(after.records),
            after.last_t,
        )
        assert receipt.n_new_records == len(after.records) - len(before.records)
        self.check_objects()
        if not after.aside and not receipt.warnings:
            assert not [k for k in list(self.store._objects) if k.startswith(".mpistream/dropped/")]

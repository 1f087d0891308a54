"""The store and the crew of one sequence, the comparison after each operation, and everything that opens."""

from __future__ import annotations

import functools
import random
from collections.abc import Collection
from typing import Any

import numpy as np

import mpistream as ms
from mpistream.manifest import MANIFEST_KEY
from mpistream.memory_store import MemoryStore
from tests.model.crew import Crew
from tests.model.shape import Shape
from tests.model.state import Checker, State, visible

__all__ = ["N_OPERATIONS", "Opening"]

N_OPERATIONS = 16

# Successive sequences over one stream: to make one costs as much as a sequence.
_N_PER_SHAPE = 8
_shape = functools.lru_cache(maxsize=4)(Shape)


class Opening:
    """Operations that open the store.

    Parameters
    ----------
    seed
        Its number.
    skip
        Operations to leave out.
    """

    def __init__(self, seed: int, skip: Collection[int] = ()) -> None:
        self.seed = seed
        self.skip = skip
        self.log: list[str] = []
        self.shape = _shape(seed // _N_PER_SHAPE)
        self.store = MemoryStore(f"memory-{seed}")
        self.checker = Checker(self.store, self.shape)
        self.state: State | None = None
        """What is committed; None: there is no store."""
        self.crew: Crew | None = None
        self.ghosts: list[Crew] = []
        """Crews that were fenced while they were open."""
        self.old: tuple[ms.StoreReader, State] | None = None
        """A reader of an earlier state."""
        self.version = 0
        self.i = 0
        self.is_faulty = False

    def say(self, text: str) -> None:
        """Note what is done."""
        self.log.append(f"{self.i:3} {text}")

    def check(self, draw: random.Random) -> None:
        """Compare everything that can be seen with the model."""
        if self.state is None:
            return
        reader = self.checker.check(self.state)
        if self.crew is not None:
            self.crew.check(self.state, self.store._objects[MANIFEST_KEY], is_new=reader is not None)
        if reader is None:
            return
        if self.old is not None:
            self.check_old(*self.old)
        if self.old is None or draw.random() < 0.2:
            self.old = reader, self.state.copy()

    def check_old(self, reader: ms.StoreReader, then: State) -> None:
        """A reader that was not refreshed reads what it knew, or says that it was superseded."""
        assert self.state is not None
        for record, (_, version) in list(then.records.items())[-3:]:
            try:
                found = reader.read_record("u", record)
            except ms.StoreError as error:
                assert error.kind == "superseded"
                assert self.state.floors.get(record, 0) > then.seq
            else:
                assert self.state.floors.get(record, 0) <= then.seq
                assert found.tobytes() == self.shape.whole("u", record, version).tobytes()

    def new_crew(self, draw: random.Random) -> Crew:
        size = draw.choice([1, 1, 2, 2, 3, 4, 6])
        threads = 1 if draw.random() < 0.1 else 0
        return Crew(self.store, self.shape, size, f"{self.seed} {self.i} crew", threads=threads)

    def open(self, draw: random.Random) -> None:
        """Create the store; whatever a death has left in its place is taken over or replaced."""
        crew = self.new_crew(draw)
        error = crew.open(ms.write_open, self.shape.schema, overwrite=True, takeover=True)
        self.say(f"    on {crew.size} ranks")
        assert error is None, error
        self.crew, self.state = crew, State(epoch=crew.writers[0].epoch)
        self.old = None

    def overwrite(self, draw: random.Random) -> None:
        """Replace the store by a new one."""
        if self.crew is not None:
            self.ghosts.append(self.crew)
        before = self.state
        self.open(draw)
        assert before is not None
        assert self.state is not None
        assert self.state.epoch > before.epoch

    def resume(self, draw: random.Random) -> None:
        """Open the store again, behind some record."""
        assert self.state is not None
        at = None
        if draw.random() < 0.5:
            at = draw.choice([*self.resume_times(), draw.uniform(-3, 8)])
        self.opened(draw, at)

    def resume_times(self) -> list[float]:
        """Return times to resume at: those of records, what lies beside them, and beyond all."""
        assert self.state is not None
        times = [t for t, _ in self.state.records.values()]
        return [-9.0, 1e9, *times, *(float(np.nextafter(t, -np.inf)) for t in times)]

    def resumed(self, at: float | None, epoch: int) -> State:
        """Return the state after a resume."""
        assert self.state is not None
        new = self.state.copy()
        dropped = [r for r, (t, _) in new.records.items() if at is not None and t > at]
        for key in (key for r in dropped for name in self.shape.dims for key in self.shape.row_keys(name, r)):
            new.aside.setdefault(key, self.store._objects[key])
        new.set_aside(dropped)
        new.epoch = epoch
        return new

    def opened(self, draw: random.Random, at: float | None) -> None:
        """Resume; a crew that is open is fenced."""
        assert self.state is not None
        crew, before = self.new_crew(draw), self.state
        new = self.resumed(at, -1)
        self.say(f"    on {crew.size} ranks, at {at}: {len(new.records)} of {len(before.records)} records stay")
        expect: dict[str, Any] = {}
        if self.i < N_OPERATIONS and draw.random() < 0.2 and new.last_t is not None:
            expect = {"expect_last_t": new.last_t + (1 if draw.random() < 0.5 else 0)}
        if draw.random() < 0.5:
            expect["schema"] = self.shape.schema
        fenced, self.crew = self.crew, None
        error = crew.open(ms.write_resume, at=at, takeover=True, **expect)
        if expect.get("expect_last_t", new.last_t) != new.last_t:
            assert isinstance(error, ms.ResumeError), error
            # Nothing was claimed, so whoever was open goes on.
            self.crew = fenced
            crew.abandon()
            return
        assert error is None, error
        if fenced is not None:
            self.ghosts.append(fenced)
        self.settle(crew, new)

    def settle(self, crew: Crew, new: State) -> None:
        """A resume went well: compare what it says, and what lies in the store."""
        before, first = self.state, crew.writers[0]
        assert before is not None
        assert first.epoch > before.epoch
        new.epoch = first.epoch
        self.crew, self.state = crew, new
        for w in crew.writers:
            assert w.resumed is not None
            assert w.resumed.n_dropped == len(before.records) - len(new.records)
            assert w.resumed.last_t == new.last_t
        self.check_objects()

    def check_objects(self) -> None:
        """Behind a recovery everything of the hierarchy is committed, and what was dropped lies aside."""
        assert self.state is not None
        self.check_dropped()
        new = self.state
        found = {k for k in list(self.store._objects) if not k.startswith(".mpistream/")}
        assert found == self.shape.keys(new.records, new.statics), found ^ self.shape.keys(new.records, new.statics)

    def check_dropped(self) -> None:
        """What was dropped lies aside until the first commit."""
        assert self.state is not None
        found: dict[str, list[bytes]] = {}
        for key, data in dict(self.store._objects).items():
            if key.startswith(".mpistream/dropped/"):
                found.setdefault(key.split("/", 3)[3], []).append(data)
        for key, data in self.state.aside.items():
            assert data in found.get(key, []), f"{key} of a dropped record is lost"

    def second(self, draw: random.Random) -> None:
        """While a writer is open nobody else gets in, and nothing changes."""
        before = visible(self.store)
        crew = self.new_crew(draw)
        error = crew.open(ms.write_resume)
        assert isinstance(error, ms.StoreError), error
        assert error.kind == "lease"
        error = crew.open(ms.write_open, self.shape.schema)
        assert isinstance(error, ms.StoreError), error
        crew.abandon()
        assert visible(self.store) == before

"""Random sequences of operations against the model: ``python -m tests.model.sequences [--seed N] [--n N] [-v]``.

A sequence is a number. From it come the stream, the order in which ranks run, and one generator for each operation,
so that an operation that is left out changes none of the others: that is how a failing sequence is made shorter.
"""

from __future__ import annotations

import argparse
import functools
import logging
import random
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

import mpistream as ms
from mpistream.manifest import MANIFEST_KEY
from mpistream.memory_store import MemoryStore
from tests.model.crew import Crew, in_one_process
from tests.model.shape import Shape
from tests.model.state import Checker, State, assert_plain, visible
from tests.model.turns import Killed
from tests.model.views import Fault

__all__ = ["Failed", "run_sequence", "run_sequences"]

N_OPERATIONS = 16

# Successive sequences over one stream: to make one costs as much as a sequence.
_N_PER_SHAPE = 8
_shape = functools.lru_cache(maxsize=4)(Shape)

# What is drawn, and how often; some of it has to wait for what it needs.
WEIGHTS = {
    "write": 24,
    "static": 4,
    "blob": 7,
    "bad_call": 6,
    "flush": 5,
    "commit": 18,
    "rollback": 4,
    "invalidate": 6,
    "close": 3,
    "resume": 6,
    "abandon": 3,
    "leave": 2,
    "lag": 3,
    "mismatch": 2,
    "fault": 10,
    "kill": 8,
    "ghost": 4,
    "second": 2,
    "overwrite": 1,
}


class Failed(AssertionError):  # noqa: N818 (no error of ours: a test's verdict)
    """A sequence found a difference; the message says how to run it again."""


class Sequence:
    """One sequence.

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
        self.aside: dict[str, bytes] = {}
        """Key -> object of every record that was dropped since the last commit: it must not be lost yet."""
        self.version = 0
        self.i = 0
        self.is_faulty = False

    def run(self) -> None:
        """Run it; what differs is an AssertionError."""
        try:
            for self.i in range(N_OPERATIONS):
                draw = random.Random(f"{self.seed} {self.i}")
                if self.i not in self.skip:
                    self.step(draw)
            self.finish(random.Random(f"{self.seed} end"))
        finally:
            for crew in (self.crew, *self.ghosts):
                if crew is not None:
                    crew.abandon()

    def step(self, draw: random.Random) -> None:
        """One operation, and all comparisons."""
        if self.crew is None:
            name = "open" if self.state is None else draw.choice(["resume", "resume", "resume", "overwrite", "kill"])
            if name == "overwrite" and draw.random() < 0.9:
                name = "resume"
        else:
            name = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        self.say(name)
        getattr(self, name)(draw)
        self.check(draw)

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

    def finish(self, draw: random.Random) -> None:
        """Close, resume and let zarr-python read it."""
        self.i = N_OPERATIONS
        if self.state is None:
            return
        if self.crew is not None:
            self.say("close")
            self.close(draw)
            self.check(draw)
        self.say("resume")
        self.opened(draw, None)
        self.check(draw)
        self.close(draw)
        self.check(draw)
        assert not [k for k in self.store._objects if k.startswith(".mpistream/stage/")]
        if draw.random() < 0.2:
            assert_plain(self.store, self.shape, self.state)

    # Opening

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
        self.old, self.aside = None, {}

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
        new.drop([r for r, (t, _) in new.records.items() if at is not None and t > at])
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
        aside = dict(self.aside)
        self.note_dropped(before, new)
        error = crew.open(ms.write_resume, at=at, takeover=True, **expect)
        if expect.get("expect_last_t", new.last_t) != new.last_t:
            assert isinstance(error, ms.ResumeError), error
            # Nothing was claimed, so whoever was open goes on.
            self.crew, self.aside = fenced, aside
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
        self.check_dropped()
        found = {k for k in self.store._objects if not k.startswith(".mpistream/")}
        assert found == self.shape.keys(new.records, new.statics), found ^ self.shape.keys(new.records, new.statics)

    def note_dropped(self, before: State, after: State) -> None:
        """Note the objects of records that a resume drops, as they were."""
        for record in before.records.keys() - after.records.keys():
            for name in self.shape.dims:
                for key in self.shape.row_keys(name, record):
                    self.aside.setdefault(key, self.store._objects[key])

    def check_dropped(self) -> None:
        """What was dropped lies aside until the first commit."""
        found: dict[str, list[bytes]] = {}
        for key, data in self.store._objects.items():
            if key.startswith(".mpistream/dropped/"):
                found.setdefault(key.split("/", 3)[3], []).append(data)
        for key, data in self.aside.items():
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

    # Writing

    def next_records(self, draw: random.Random, n: int) -> list[tuple[int, float]]:
        """Return records that can be written next, with their times."""
        assert self.crew is not None
        assert self.state is not None
        taken = {*self.state.records, *(r for p in self.crew.pending for r in p.records)}
        if self.shape.n_total is not None:
            free = [r for r in range(self.shape.n_total) if r not in taken]
            return [(r, self.shape.times[r]) for r in draw.sample(free, min(n, len(free)))]
        every = {**self.state.records, **self.crew.pending[0].records}
        t = every[max(every)][0] if every else draw.choice([-1.5, 0.0])
        found = []
        for i in range(n):
            t = draw.choice([t + 0.25, t + 1 / 3, float(np.nextafter(t, np.inf)), t + 1])
            found.append((len(every) + i, t))
        return found

    def put(self, rank: int, record: int, t: float, version: int, *, by_variable: bool = False) -> bool:
        """Write one record on one rank; False if its store failed."""
        assert self.crew is not None
        w = self.crew.writers[rank]
        arrays = self.shape.record(w.region, record, version)
        try:
            if self.shape.is_indexed:
                w.write_record_at(record, t, arrays)
            elif by_variable:
                with w.record(t) as put:
                    for name, block in arrays.items():
                        put.put(name, block)
            else:
                w.write_record(t, arrays)
        except (ms.StoreError, ms.ProtocolError):
            assert self.is_faulty or self.crew.is_broken()
            return False
        self.crew.pending[rank].records[record] = t, version
        return True

    def write(self, draw: random.Random) -> None:
        """Records on every rank; in a fixed time dim each has an order of its own."""
        assert self.crew is not None
        before = visible(self.store)
        if not self.crew.are_equal():
            return
        records = self.next_records(draw, draw.randint(1, 4))
        self.version += 1
        by_variable = draw.random() < 0.2
        self.say(f"    {records} as {self.version}")
        for rank in draw.sample(range(self.crew.size), self.crew.size):
            order = draw.sample(records, len(records)) if self.shape.is_indexed else records
            for record, t in order:
                if not self.put(rank, record, t, self.version, by_variable=by_variable) and not self.shape.is_indexed:
                    break
        assert visible(self.store) == before

    def static(self, draw: random.Random) -> None:
        """A static that is not there yet."""
        assert self.crew is not None
        assert self.state is not None
        free = [n for n in self.shape.statics if n not in self.state.statics and n not in self.crew.pending[0].statics]
        if not free or not self.crew.are_equal():
            return
        name = draw.choice(free)
        self.version += 1
        self.say(f"    {name} as {self.version}")
        for w, p in zip(self.crew.writers, self.crew.pending, strict=True):
            w.write_static(name, self.shape.block(name, w.region, 0, self.version))
            p.statics[name] = self.version

    def blob(self, draw: random.Random) -> None:
        """Blobs of some ranks, of records that are there or of none."""
        assert self.crew is not None
        assert self.state is not None
        for rank in draw.sample(range(self.crew.size), draw.randint(1, self.crew.size)):
            w, p = self.crew.writers[rank], self.crew.pending[rank]
            n = self.shape.n_total if self.shape.n_total is not None else w.n_records
            scopes: list[Any] = ["static", *range(n)]
            scope, key = draw.choice(scopes[-4:] + scopes[:1]), draw.choice("abc")
            is_taken = (scope, key) in p.blobs or (scope == "static" and key in self.crew.static_keys[rank])
            payload = draw.randbytes(draw.choice([0, 1, 40]))
            self.say(f"    rank {rank}: {key} of {scope}{' again' if is_taken else ''}")
            try:
                w.write_blob(key, payload, scope)
            except ms.SchemaError:
                assert is_taken
            else:
                assert not is_taken
                p.blobs[scope, key] = payload

    def bad_call(self, draw: random.Random) -> None:
        """A call that is refused on one rank, where nothing changes."""
        assert self.crew is not None
        assert self.state is not None
        rank = draw.randrange(self.crew.size)
        w, region = self.crew.writers[rank], self.crew.writers[rank].region
        records = self.next_records(draw, 1)
        if not records or self.crew.is_broken():
            return
        record, t = records[0]
        good = self.shape.record(region, record, 0)

        def write(arrays: Any, t: Any = t, record: Any = record) -> None:
            if self.shape.is_indexed:
                w.write_record_at(record, t, arrays)
            else:
                w.write_record(t, arrays)

        bad: list[Callable[[], object]] = [
            lambda: write({**good, "nothing": 1.0}),
            lambda: write({**good, "u": np.zeros((1, 2, 3), "int8")}),
            lambda: write({**good, "u": np.array("text")}),
            lambda: write(good, t=float("nan")),
            lambda: write(good, t="noon"),
            lambda: w.write_static("nothing", 1.0),
            lambda: w.write_static("topo", np.zeros((1, 2, 3), "int8")),
            lambda: w.write_blob("a", b"", 10_000),
            lambda: w.write_blob("a/../b", b""),
            lambda: w.write_blob("d", 7, "static"),  # type: ignore[arg-type]
        ]
        if rank == 0:
            bad.append(lambda: write({n: b for n, b in good.items() if n != "u"}))
        if self.shape.is_indexed:
            bad += [lambda: write(good, record=-1), lambda: write(good, record=99), lambda: w.write_record(t, good)]
            bad += [lambda: write(good, t=t + 1), lambda: write(good, record=1.0)]
        else:
            bad += [lambda: w.write_record_at(0, t, good)]
        there = {**self.state.records, **self.crew.pending[rank].records}
        if there:
            last = max(there)
            bad.append(lambda: write(good, t=there[last][0], record=last))
        chosen = draw.randrange(len(bad))
        self.say(f"    number {chosen} on rank {rank}")
        try:
            bad[chosen]()
        except ms.SchemaError:
            return
        raise AssertionError("a bad call was taken")

    def flush(self, draw: random.Random) -> None:
        """Some ranks make durable what they have."""
        assert self.crew is not None
        for rank in draw.sample(range(self.crew.size), draw.randint(1, self.crew.size)):
            try:
                token = self.crew.writers[rank].flush()
            except (ms.StoreError, ms.ProtocolError):
                assert self.is_faulty or self.crew.is_broken()
                continue
            records = {r for a, b in token.records for r in range(a, b)}
            assert records == set(self.crew.pending[rank].records)

    # Committing

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
            if self.state is after:
                self.aside = {}
            return False
        assert isinstance(error, ms.CommitError), error
        self.say(f"    {error.kind}: {error}")
        if error.kind == "outcome_unknown":
            assert self.is_faulty
            again = self.crew.call("commit")
            assert isinstance(again, ms.CommitError), again
            self.end_crew()
            self.either(before, after)
            if self.state is after:
                self.aside = {}
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
        after = crew.committed(before, partial_rows=partial)
        seen = visible(self.store)
        found = crew.call("commit", partial_rows=partial)
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
            self.aside = {}
            if not receipt.warnings:
                assert not [k for k in self.store._objects if k.startswith(".mpistream/dropped/")]
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
        from mpistream.zarr3.codecs import ChunkCodec

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
            if after.seq > before.seq:
                self.aside = {}
            self.state = after
        elif isinstance(found, Killed):
            self.failed(found, before, after)
            return
        else:
            assert isinstance(found, ms.CommitError), found
            assert self.is_faulty or not can, found
            if found.kind == "outcome_unknown":
                self.either(before, after)
                if self.state is after:
                    self.aside = {}
        assert crew.call("close") is None
        assert isinstance(crew.call("commit"), ms.ProtocolError)
        self.end_crew()

    # Ranks and stores that fail

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
        calls = draw.choice([{"stage"}, {"place"}, {"sync_folders"}, {"read", "open"}, {"stage", "place"}, {"move"}])
        is_resent = draw.random() < 0.2
        n = draw.choice([1, 2, 10**6])
        crew.views[rank].fault = fault = Fault(frozenset(calls), draw.randrange(8), n, is_resent)
        self.is_faulty = True
        try:
            for _ in range(draw.randint(1, 4)):
                name = draw.choice(["write", "write", "static", "blob", "flush", "commit", "commit", "invalidate"])
                self.say(f"    {name} with {fault}")
                getattr(self, name)(draw)
                if self.crew is None:
                    return
                crew.views[rank].fault, keep = None, crew.views[rank].fault
                self.check(draw)
                crew.views[rank].fault = keep
            if draw.random() < 0.2:
                self.say("    close")
                self.close(draw)
        finally:
            self.is_faulty = False
            crew.heal()
        if self.crew is not None and draw.random() < 0.7:
            self.say("    healed")
            if crew.are_equal() and not crew.is_broken() and draw.random() < 0.7:
                self.commit(draw, again=True)
            else:
                self.rollback(draw)

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
        crew, before, aside = self.new_crew(draw), self.state, dict(self.aside)
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
            self.note_dropped(before, after)
            error = crew.open(ms.write_resume, at=at, takeover=True)
        crew.heal()
        if error is None:
            if is_new:
                self.crew, self.state = crew, State(epoch=crew.writers[0].epoch)
                self.old, self.aside = None, {}
            else:
                self.settle(crew, after)
            return
        assert isinstance(error, Killed | ms.StoreError | ms.CommitError), error
        crew.abandon()
        self.say(f"    {type(error).__name__}: {error}")
        self.either(before, after, *([None] if is_new else []))
        if is_new:
            self.old, self.aside = None, {}
        elif self.state is before:
            self.aside = aside

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
        if name in ("commit", "close") and has_any and can:
            assert isinstance(found, ms.FencedError), found
        crew.abandon()


def run_sequence(seed: int) -> None:
    """Run one sequence; what it finds is made as short as it gets and raised as `Failed`."""
    sequence = Sequence(seed)
    try:
        sequence.run()
        return
    except Exception as error:  # noqa: BLE001 (whatever it is, the seed must be told)
        first, log, text = error, sequence.log, traceback.format_exc()
    skip: set[int] = set(range(sequence.i + 1, N_OPERATIONS)) if sequence.i < N_OPERATIONS else set()
    for i in reversed(range(min(sequence.i + 1, N_OPERATIONS))):
        shorter = Sequence(seed, {*skip, i})
        try:
            shorter.run()
        except Exception:  # noqa: BLE001 (the same failure, we hope; another one is as good)
            skip, log, text = {*skip, i}, shorter.log, traceback.format_exc()
    about = f"{sequence.shape.schema.mode}, rows {sequence.shape.row}; without the operations {sorted(skip)}:"
    raise Failed(
        "\n".join(
            [
                f"sequence {seed}: {type(first).__name__}: {first}",
                f"again: python -m tests.model.sequences --seed {seed} --n 1",
                about,
                *log,
                text,
            ]
        )
    ) from first


def run_sequences(first: int, n: int) -> None:
    """Run sequences by number."""
    with in_one_process():
        for seed in range(first, first + n):
            run_sequence(seed)


def main() -> None:
    """Run sequences by number, and go on after failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="number of the first sequence")
    parser.add_argument("--n", type=int, default=2000, help="how many")
    arguments = parser.parse_args()
    logging.getLogger("mpistream").setLevel(logging.CRITICAL)
    began, n_failed = time.perf_counter(), 0
    for seed in range(arguments.seed, arguments.seed + arguments.n):
        try:
            run_sequences(seed, 1)
        except Failed as error:
            n_failed += 1
            print(error, flush=True)
    print(f"{arguments.n} sequences, {n_failed} failed, {time.perf_counter() - began:.0f} s")
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()

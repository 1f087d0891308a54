"""The ranks of one opening, and what each of them has written and not committed."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import mpistream as ms
import mpistream.creating
import mpistream.lease
import mpistream.parallel
import mpistream.rank_writer
import mpistream.resuming
import mpistream.session
from mpistream.layout import resolve_layout, shard_regions
from mpistream.manifest import Manifest
from mpistream.memory_store import MemoryStore
from mpistream.token import CommitReceipt
from mpistream.zarr3.metadata import make_documents
from tests.model.shape import Shape
from tests.model.state import Scope, State
from tests.model.turns import Killed, Turns, writers_here
from tests.model.views import Fuse, View

__all__ = ["Crew", "Pending", "in_one_process"]


@contextlib.contextmanager
def in_one_process() -> Iterator[None]:
    """Let threads be ranks: `Turns` in the place of MPI, and nothing that runs by a clock of its own.

    What is slow, pure and the same again and again is computed once.
    """

    def once(fn: Callable[[Any], Any], key: Callable[[Any], Any]) -> Callable[[Any], Any]:
        found: dict[Any, Any] = {}

        def call(argument: Any) -> Any:
            name = key(argument)
            if name not in found:
                if len(found) > 100:
                    found.clear()
                found[name] = argument, fn(argument)
            return found[name][1]

        return call

    make_once = once(make_documents, lambda schema: json.dumps(schema.to_json()))
    with (
        mock.patch.object(Manifest, "from_bytes", once(Manifest.from_bytes, bytes)),
        mock.patch.object(ms.StreamSchema, "from_json", once(ms.StreamSchema.from_json, json.dumps)),
        mock.patch.object(ms.StreamSchema, "fingerprint", once(ms.StreamSchema.fingerprint, id)),
        mock.patch.object(mpistream.session, "connect", lambda comm, timeout: comm),
        mock.patch.object(mpistream.creating, "make_documents", make_once),
        mock.patch.object(mpistream.resuming, "make_documents", make_once),
        mock.patch.object(mpistream.lease.LeaseKeeper, "start"),
        # Where there are threads, they encode.
        mock.patch.object(mpistream.rank_writer, "_MIN_BACKGROUND_NBYTES", 0),
        mock.patch.object(mpistream.parallel, "_all_open", writers_here(mpistream.parallel._all_open)),
    ):
        yield


@dataclass(slots=True)
class Pending:
    """What one rank has written and not committed."""

    records: dict[int, tuple[float, int]] = field(default_factory=dict)
    statics: dict[str, int] = field(default_factory=dict)
    blobs: dict[tuple[Scope, str], bytes] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget it all."""
        self.records, self.statics, self.blobs = {}, {}, {}


class Crew:
    """The ranks of one opening.

    Parameters
    ----------
    store
        What they share.
    shape
        What is written.
    size
        How many ranks.
    seed
        Of the order in which they run.
    threads
        1: each writer has a thread of its own, which the seed does not rule.
    """

    def __init__(self, store: MemoryStore, shape: Shape, size: int, seed: str, *, threads: int) -> None:
        self.size = size
        self.shape = shape
        self.turns = Turns(size, seed)
        self.views = [View(store, self.turns) for _ in range(size)]
        self.writers: list[ms.StreamWriter] = []
        self.pending = [Pending() for _ in range(size)]
        self.static_keys: list[set[str]] = [set() for _ in range(size)]
        """Per rank the keys of static blobs that this epoch has committed."""
        self.is_published = True
        self.last_receipt: CommitReceipt | None = None
        draw = random.Random(seed)
        self.regions: list[ms.Region] | None = None
        if draw.random() < 0.3:
            # Given by the ranks, in another order than that of the grid.
            self.regions = draw.sample(shard_regions(resolve_layout(shape.schema, size), size), size)
        bound = draw.choice([None, None, 200])
        self.options = ms.Options(
            writers="all",
            durability=draw.choice(["fsync", "none"]),
            threads=threads,
            timeout=3,
            exit_timeout=2,
            lease_ttl=1e6,
            max_pending_nbytes=bound,
        )

    # Running

    def open(self, call: Callable[..., ms.StreamWriter], *args: Any, **more: Any) -> BaseException | None:
        """Open on every rank; return the error, the same on all."""

        def open_one(rank: int) -> ms.StreamWriter:
            region = None if self.regions is None else self.regions[rank]
            comm = self.turns.transport(rank)
            return call(self.views[rank], *args, comm=comm, region=region, options=self.options, **more)

        found = self.collective(open_one, has_value=False)
        if isinstance(found, BaseException):
            return found
        self.writers = found
        return None

    def collective(self, fn: Callable[[int], Any], *, has_value: bool = True) -> Any:
        """Return what every rank returned, or the error that every rank raised; of a killed job `Killed`."""
        outcomes = self.turns.run(fn)
        if self.turns.is_killed:
            return Killed()
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ms.MPIStreamError):
                raise outcome
        errors = [o if isinstance(o, ms.MPIStreamError) else None for o in outcomes]
        facts = [None if e is None else (type(e), str(e), e.kind, e.rank, e.errno) for e in errors]
        assert facts == [facts[0]] * self.size, f"the ranks raised different things: {facts}"
        if errors[0] is not None:
            return errors[0]
        if not has_value:
            return outcomes
        assert outcomes == [outcomes[0]] * self.size, f"the ranks returned different things: {outcomes}"
        return outcomes[0]

    def call(self, name: str, *args: Any, **more: Any) -> Any:
        """Call a method of the writer on every rank."""
        return self.collective(lambda r: getattr(self.writers[r], name)(*args, **more))

    def light(self, n: int, *, is_behind: bool) -> list[Fuse]:
        """Let the job die at its n-th change of the store from now."""
        fuse = [Fuse(n, is_behind)]
        for view in self.views:
            view.fuse = fuse
        return fuse

    def heal(self) -> None:
        """Let nothing fail any more."""
        for view in self.views:
            view.fault, view.fuse = None, []

    def abandon(self) -> None:
        """Let the processes be gone, with all that they held."""
        self.turns.end()
        for w in self.writers:
            mpistream.parallel._open_writers.pop(w._number, None)
            w._writer._stager.close()
        self.writers = []

    # Pending

    @functools.cached_property
    def group_length(self) -> int:
        """Records of the shortest run of rows that end together for all variables."""
        return math.lcm(*(self.shape.row[n] for n, d in self.shape.dims.items() if len(d) > 1))

    def is_broken(self) -> bool:
        """Whether some rank has taken a record in part."""
        return any(w._writer._broken is not None for w in self.writers)

    def are_equal(self) -> bool:
        """Whether every rank has written the same."""
        if any(p.records != self.pending[0].records for p in self.pending):
            return False
        # Whoever writes no part of a static may lack it.
        names = {name for p in self.pending for name in p.statics}
        return all(n in p.statics or not self._writes(w, n) for w, p in self._ranks() for n in names)

    def _ranks(self) -> Iterator[tuple[ms.StreamWriter, Pending]]:
        return zip(self.writers, self.pending, strict=True)

    def _writes(self, w: ms.StreamWriter, name: str) -> bool:
        share = w._writer._share
        return share.n_cells(name) > 0 if self.shape.statics[name] else share.writer == 0

    def to_commit(self, state: State, *, partial_rows: bool) -> dict[int, tuple[float, int]]:
        """Return the records that a commit takes, when all ranks have the same."""
        pending = self.pending[0].records
        if partial_rows:
            return dict(pending)
        length, n_total = self.group_length, self.shape.n_total
        there = {*pending, *state.records}

        def is_full(group: int) -> bool:
            stop = (group + 1) * length
            return all(r in there for r in range(group * length, stop if n_total is None else min(stop, n_total)))

        return {r: v for r, v in pending.items() if is_full(r // length)}

    def committed(self, state: State, *, partial_rows: bool) -> State:
        """Return the state after a commit."""
        taken = self.to_commit(state, partial_rows=partial_rows)
        new = state.copy()
        new.records |= taken
        # A blob of a record waits for it.
        ready = [self._ready(p, new) for p in self.pending]
        if not taken and not any(ready) and not any(p.statics for p in self.pending):
            return new
        new.commit()
        for rank, (p, blobs) in enumerate(zip(self.pending, ready, strict=True)):
            new.statics |= p.statics
            if blobs:
                new.packs.append((new.epoch, new.seq, rank, blobs))
        return new

    @staticmethod
    def _ready(p: Pending, state: State) -> dict[tuple[Scope, str], bytes]:
        return {(s, k): data for (s, k), data in p.blobs.items() if s == "static" or s in state.records}

    def note_committed(self, state: State) -> None:
        """Forget what is committed now."""
        for rank, p in enumerate(self.pending):
            p.records = {r: v for r, v in p.records.items() if r not in state.records}
            p.statics = {}
            self.static_keys[rank] |= {key for scope, key in p.blobs if scope == "static"}
            ready = self._ready(p, state)
            p.blobs = {name: data for name, data in p.blobs.items() if name not in ready}

    # Comparing

    def check(self, state: State, manifest: bytes, *, is_new: bool) -> None:
        """Assert that every writer says of itself what the model knows."""
        for w, p in self._ranks():
            every = {**state.records, **p.records}
            assert w.epoch == state.epoch
            assert (w.n_records, w.n_committed) == (len(every), len(state.records))
            assert w.last_t == (every[max(every)][0] if every else None)
            if not is_new:
                continue
            assert w.reader.manifest.to_bytes() == manifest
            for name in self.shape.statics:
                assert w.is_committed(name) is (name in state.statics)

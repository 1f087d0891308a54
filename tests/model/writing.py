"""Operations that write: records, statics, blobs, and calls that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

import mpistream as ms
from tests.model.opening import Opening
from tests.model.state import visible

__all__ = ["Writing"]


class Writing(Opening):
    """Operations that write."""

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
            scope, key = draw.choice(["static", *scopes[-4:]]), draw.choice("ab")
            is_taken = (scope, key) in p.blobs or (
                key in self.crew.static_keys[rank] if scope == "static" else (rank, scope, key) in self.state.blobs()
            )
            payload = draw.randbytes(draw.choice([0, 1, 40]))
            self.say(f"    rank {rank}: {key} of {scope}{' again' if is_taken else ''}")
            try:
                w.write_blob(key, payload, scope)
            except ms.SchemaError:
                assert is_taken
            except ms.StoreError:
                # Whether it is committed already could not be read.
                assert self.is_faulty
                assert scope in self.state.records
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
        if w._writer._share.n_cells("u"):
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

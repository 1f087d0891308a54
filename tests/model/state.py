"""The model: what is committed, as dicts, and the comparison of a store with it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mpistream as ms
from mpistream.memory_store import MemoryStore
from tests.model.shape import Shape
from tests.support.plain import differing

__all__ = ["Checker", "State", "assert_plain", "ranges", "visible"]

Scope = int | str


def ranges(records: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the half-open runs of successive numbers."""
    found: list[list[int]] = []
    for r in sorted(records):
        if found and found[-1][1] == r:
            found[-1][1] = r + 1
        else:
            found.append([r, r + 1])
    return tuple((a, b) for a, b in found)


@dataclass(slots=True)
class State:
    """What is committed."""

    epoch: int
    seq: int = 0
    records: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Record -> time and number of the write that it comes from."""
    statics: dict[str, int] = field(default_factory=dict)
    packs: list[tuple[int, int, int, dict[tuple[Scope, str], bytes]]] = field(default_factory=list)
    """(epoch, commit_seq, writer, blobs) of every commit's blobs."""
    floors: dict[int, int] = field(default_factory=dict)
    """Record -> commit_seq behind which an older state may not read it."""
    blob_floors: dict[int, int] = field(default_factory=dict)
    """Record -> commit_seq behind which its blobs count."""
    dropped: dict[int, tuple[tuple[float, int], int]] = field(default_factory=dict)
    """Record -> what it was, and the floor of its blobs, of all that resumes dropped since the last commit."""
    aside: dict[str, bytes] = field(default_factory=dict)
    """Key -> object of every such record, as it was: it must not be lost yet."""

    def copy(self) -> State:
        """Return a state of its own."""
        return State(
            self.epoch,
            self.seq,
            dict(self.records),
            dict(self.statics),
            list(self.packs),
            dict(self.floors),
            dict(self.blob_floors),
            dict(self.dropped),
            dict(self.aside),
        )

    @property
    def last_t(self) -> float | None:
        """Time of the last record."""
        return self.records[max(self.records)][0] if self.records else None

    def blobs(self) -> dict[tuple[int, Scope, str], bytes]:
        """Return (writer, scope, key) -> payload of every blob that can be read."""
        newest: dict[str, int] = {}
        for epoch, _, _, blobs in self.packs:
            for scope, key in blobs:
                if scope == "static":
                    newest[key] = max(newest.get(key, 0), epoch)
        found = {}
        for epoch, seq, writer, blobs in sorted(self.packs, key=lambda p: p[1]):
            for (scope, key), payload in blobs.items():
                if isinstance(scope, str):
                    is_there = newest[key] == epoch
                else:
                    is_there = scope in self.records and seq > self.blob_floors.get(scope, 0)
                if is_there:
                    found[writer, scope, key] = payload
        return found

    def drop(self, records: Iterable[int]) -> None:
        """Give records up, as a commit of its own."""
        self.seq += 1
        for r in records:
            del self.records[r]
            self.floors[r] = self.blob_floors[r] = self.seq

    def set_aside(self, records: Iterable[int]) -> None:
        """Give records up so that they may come back."""
        given_up = {r: (self.records[r], self.blob_floors.get(r, 0)) for r in records}
        self.drop(given_up)
        self.dropped |= given_up

    def commit(self) -> None:
        """Count a commit: what is aside is then given up for good."""
        self.seq += 1
        self.dropped, self.aside = {}, {}

    def restore(self) -> None:
        """Commit again what is aside, with its blobs."""
        for r, (record, blob_floor) in self.dropped.items():
            self.records[r], self.floors[r], self.blob_floors[r] = record, self.seq + 1, blob_floor
        self.commit()

    def times_digest(self) -> str:
        """Return the digest of all times, as FORMAT.md describes it."""
        sums = (hashlib.sha256(struct.pack("<qd", r, t)).digest() for r, (t, _) in self.records.items())
        return f"{sum(int.from_bytes(s, 'big') for s in sums) % 2**256:064x}"


def visible(store: MemoryStore) -> dict[str, bytes]:
    """Return all objects but those that only writers see."""
    hidden = (".mpistream/stage/", ".mpistream/lease")
    objects = dict(store._objects)  # at once: a writer's thread may be staging
    return {k: v for k, v in objects.items() if not k.startswith(hidden)}


class Checker:
    """Compares what `mpistream.open_reader` finds in a store with a state, bit by bit.

    What was compared once and lies in the very same objects is not decoded again.
    """

    def __init__(self, store: MemoryStore, shape: Shape) -> None:
        self._store = store
        self._shape = shape
        self._seen: dict[tuple[str, int], tuple[int, list[Any]]] = {}
        self._last: tuple[State, dict[str, bytes]] | None = None

    def check(self, state: State) -> ms.StoreReader | None:
        """Assert that the store holds exactly this; None if neither has changed since it was looked at."""
        last, self._last = self._last, (state.copy(), visible(self._store))
        if last == self._last:
            return None
        shape, reader = self._shape, ms.open_reader(self._store)  # type: ignore[arg-type]
        manifest = reader.manifest
        assert (manifest.epoch, manifest.commit_seq) == (state.epoch, state.seq)
        assert reader.committed == ranges(state.records)
        assert manifest.last_t == state.last_t
        assert manifest.times_digest == state.times_digest()
        assert manifest.statics == tuple(sorted(state.statics))
        n = shape.n_total if shape.n_total is not None else len(state.records)
        assert reader.n_records == n
        times = [state.records[r][0] for r in range(n)] if shape.n_total is None else shape.times
        assert reader.times.tobytes() == np.array(times, "<f8").tobytes()
        for name in shape.dims:
            for record, (_, version) in state.records.items():
                self._check(name, record, version, shape.row_keys(name, record), reader)
        for name, version in state.statics.items():
            self._check(name, -1, version, shape.static_keys(name), reader)
        assert reader.read_static("y").tobytes() == (0.5 * np.arange(shape.sizes["y"])).tobytes()
        self._check_refused(reader, state)
        self._check_blobs(reader, state)
        return reader

    def _check(self, name: str, record: int, version: int, keys: list[str], reader: ms.StoreReader) -> None:
        objects = [self._store._objects.get(k) for k in keys]
        seen = self._seen.get((name, record))
        if seen is not None and seen[0] == version and all(a is b for a, b in zip(seen[1], objects, strict=True)):
            return
        found = reader.read_record(name, record) if record >= 0 else reader.read_static(name)
        expected = self._shape.whole(name, max(record, 0), version)
        assert not differing({f"{name} {record}": found}, {f"{name} {record}": expected})
        self._seen[name, record] = version, objects

    def _check_refused(self, reader: ms.StoreReader, state: State) -> None:
        """What is not committed is refused, though objects of it may lie in place."""
        absent = next((r for r in range(reader.n_records + 1) if r not in state.records), reader.n_records)
        for call in (
            lambda: reader.read_record("u", absent),
            *(lambda n=n: reader.read_static(n) for n in self._shape.statics if n not in state.statics),
        ):
            try:
                call()
            except ms.SchemaError as error:
                assert error.kind in ("index", "not_committed")
            else:
                raise AssertionError("what is not committed was read")

    @staticmethod
    def _check_blobs(reader: ms.StoreReader, state: State) -> None:
        expected = state.blobs()
        assert set(reader.blobs()) == set(expected)
        for (writer, scope, key), payload in expected.items():
            assert reader.read_blob(key, scope, writer) == payload


def assert_plain(store: MemoryStore, shape: Shape, state: State) -> None:
    """Assert that zarr-python reads the same."""
    import zarr
    from zarr.core.buffer import cpu
    from zarr.storage import MemoryStore as ZarrStore

    objects: dict[str, Any] = {
        k: cpu.Buffer.from_bytes(v) for k, v in visible(store).items() if not k.startswith(".mpistream")
    }
    group: Any = zarr.open_group(ZarrStore(objects), mode="r")
    n = shape.n_total if shape.n_total is not None else len(state.records)
    if shape.is_indexed:
        assert group["time"][...].tolist() == shape.times
        assert group["committed"][...].tolist() == [r in state.records for r in range(n)]
    else:
        assert group["time"][...].tolist() == [state.records[r][0] for r in range(n)]
    for name in shape.dims:
        whole = group[name][...]
        assert whole.shape[0] == n
        found = {f"{name} {r}": whole[r] for r in state.records}
        expected = {f"{name} {r}": shape.whole(name, r, v) for r, (_, v) in state.records.items()}
        assert not differing(found, expected)
    for name, version in state.statics.items():
        assert not differing({name: group[name][...]}, {name: shape.whole(name, 0, version)})

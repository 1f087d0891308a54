"""Writers without communication: all ranks of an epoch in one process, over one store in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistream as ms
from mpistream.commit import decide
from mpistream.epoch import EpochState, prove_epoch
from mpistream.layout import shard_regions
from mpistream.manifest import Manifest, stage_folder
from mpistream.rank_writer import RankWriter
from mpistream.rows import encode_whole
from mpistream.zarr3.metadata import chunk_key
from tests.support.scripted_store import ScriptedStore
from tests.support.shards import read_whole

__all__ = ["Crew", "read_array", "read_record"]


class Crew:
    """All writers of an epoch, and the owner's part of a commit that a test needs.

    Parameters
    ----------
    schema
        A resolved schema.
    n_writers, regions
        How many, over the default decomposition, or their regions.
    store, manifest
        To go on from a committed state.
    options
        Of every writer.
    """

    def __init__(
        self,
        schema: ms.StreamSchema,
        n_writers: int = 1,
        *,
        regions: Sequence[ms.Region] | None = None,
        store: ScriptedStore | None = None,
        manifest: Manifest | None = None,
        **options: Any,
    ) -> None:
        self.schema = schema
        self.store = store or ScriptedStore()
        self.epoch: EpochState = prove_epoch(schema, regions or shard_regions(schema, n_writers))
        self.manifest = manifest or Manifest.first(
            store_id="store", run_id="run", epoch=1, schema=schema, layout_digest="d"
        )
        self.store.make_folder(".mpistream/epochs")
        n = len(self.epoch.regions)
        for writer in range(n):
            self.store.make_folder(stage_folder(self.manifest.epoch, writer))
        found = ms.Options(**{"threads": 0, **options})
        if schema.n_total is not None and store is None:
            self._put_times()
        self.writers = [RankWriter(self.store, self.manifest, self.epoch.shares()[w], found) for w in range(n)]

    def _put_times(self) -> None:
        """Put the fixed times where the creation of a store puts them."""
        array = self.schema.time_array
        assert array.values is not None
        for item in encode_whole(array, self.schema.key_separator, array.values):
            self.store.make_folder(item.key.rpartition("/")[0])
            self.store.create(item.key, b"".join(bytes(p) for p in item.pieces or ()))

    def blocks(self, writer: RankWriter, record: dict[str, Any]) -> dict[str, Any]:
        """Cut a writer's blocks out of whole arrays."""
        found = {}
        for name, whole in record.items():
            array = self.schema.arrays[name]
            if not array.shape:
                found[name] = whole
                continue
            region = writer.region.of(name)
            box = [region.get(d, (0, n)) for d, n in zip(array.space_dims, array.shape, strict=True)]
            found[name] = np.asarray(whole)[tuple(slice(a, b) for a, b in box)]
        return found

    def write(self, t: float, record: dict[str, Any]) -> None:
        """Let every writer write its part of a record."""
        for writer in self.writers:
            writer.write_record(t, self.blocks(writer, record))

    def write_at(self, index: int, t: float, record: dict[str, Any]) -> None:
        """Let every writer write its part of one record of a fixed time dim."""
        for writer in self.writers:
            writer.write_record_at(index, t, self.blocks(writer, record))

    def write_static(self, name: str, whole: Any) -> None:
        """Let every writer write its part of a static."""
        for writer in self.writers:
            writer.write_static(name, self.blocks(writer, {name: whole})[name])

    def commit(self, *, partial_rows: bool = True) -> Manifest:
        """Stage, place, decide; every writer goes on from the new state."""
        found = [w.stage(partial_rows=partial_rows) for w in self.writers]
        for writer, records in zip(self.writers, found, strict=True):
            writer.place(records)
        tokens = [w.token(records) for w, records in zip(self.writers, found, strict=True)]
        decision = decide(self.manifest, self.epoch, tokens, self.writers[0].times(found[0]))
        assert decision.faults == ()
        assert decision.manifest is not None
        self.manifest = decision.manifest
        for writer in self.writers:
            writer.committed(self.manifest)
        return self.manifest

    def invalidate(self, *indices: int) -> Manifest:
        """Give committed records of a fixed time dim up; every writer goes on from the new state."""
        for writer in self.writers:
            manifest = writer.without(writer.checked_for_invalidate(indices))
            writer.take_pack_back()
        self.manifest = manifest
        for writer in self.writers:
            writer.invalidated(self.manifest)
        return self.manifest

    def close(self) -> None:
        """End all threads."""
        for writer in self.writers:
            writer.close()


def read_array(store: ScriptedStore, schema: ms.StreamSchema, name: str, n_records: int = 0) -> NDArray[Any]:
    """Return a whole array from its objects in a store; every shard of a record has to be there."""
    array = schema.arrays[name]
    spec = array.shard_spec()
    n = n_records if array.has_time else 1
    out = np.empty((n, *array.shape), array.dtype)
    rows = range(-(-n // array.row_length))
    for row, index in itertools.product(rows, np.ndindex(*array.grid.grid_shape)):
        key = chunk_key(name, schema.key_separator, (*((row,) if array.has_time else ()), *index))
        data = store.read(key)
        assert data is not None, key
        box = array.grid.shard_box(index)
        there = (slice(row * array.row_length, min((row + 1) * array.row_length, n)), *(slice(a, b) for a, b in box))
        part = out[there]
        part[...] = read_whole(spec, data)[tuple(slice(k) for k in part.shape)]
    return out if array.has_time else out[0]


def read_record(store: ScriptedStore, schema: ms.StreamSchema, name: str, record: int) -> NDArray[Any]:
    """Return one record of a sharded variable from its objects in a store; all of them have to be there."""
    array = schema.arrays[name]
    spec = array.shard_spec()
    row, in_row = divmod(record, array.row_length)
    out = np.empty(array.shape, array.dtype)
    for index in np.ndindex(*array.grid.grid_shape):
        key = chunk_key(name, schema.key_separator, (row, *index))
        data = store.read(key)
        assert data is not None, key
        part = out[tuple(slice(a, b) for a, b in array.grid.shard_box(index))]
        part[...] = read_whole(spec, data)[in_row][tuple(slice(k) for k in part.shape)]
    return out

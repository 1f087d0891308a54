"""One writer, no communication: records in, staged and placed objects and a token out.

Data flows one way: block -> open shard -> staged object -> placed object -> token. What the writer holds
beyond the last commit it can make again from the caller's next calls (`RankWriter.rollback`) or has whole
(a commit that failed is tried again from memory or from the stage folder).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import ArraySpec, Role
from mpistream.block import check_block, check_time
from mpistream.epoch import Share
from mpistream.errors import MPIStreamError, ProtocolError, SchemaError, error_to_json
from mpistream.grid import block_box
from mpistream.manifest import Manifest, stage_folder
from mpistream.options import Options
from mpistream.rows import SeriesRows, ShardRows, encode_whole
from mpistream.staging import StagedObject, Stager
from mpistream.store import Store
from mpistream.token import CommitToken, times_sha256

__all__ = ["RankWriter", "WriterStats"]


@dataclass(slots=True, kw_only=True)
class WriterStats:
    """Counts of one writer since it was opened."""

    threads: int = 0
    """Threads that write behind the caller's back."""
    n_records: int = 0
    nbytes_in: int = 0
    """Bytes of blocks in the dtype on disk."""
    nbytes_encoded: int = 0
    """Bytes of objects that were given to the store."""
    n_objects: int = 0
    n_commits: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"write": 0.0, "commit": 0.0})
    """Time that the caller was inside our calls."""


class RankWriter:
    """The part of one rank.

    Parameters
    ----------
    store
        The store.
    manifest
        The state on which it builds; its epoch is this opening's.
    share
        What this writer writes in this epoch.
    options
        The options.
    """

    def __init__(self, store: Store, manifest: Manifest, share: Share, options: Options) -> None:
        self._store = store
        self._share = share
        self._is_durable = options.durability == "fsync"
        self.writer = share.writer
        self.schema = manifest.schema
        self.region = share.region
        self.stats = WriterStats(threads=options.writer_threads)
        self._rows: dict[str, ShardRows] = {}
        self._series: dict[str, SeriesRows] = {}
        self._statics: dict[str, list[StagedObject]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for array in self.schema.arrays.values():
            if array.role is Role.SERIES:
                self._shapes[array.name] = ()
                if self.writer == 0:
                    self._series[array.name] = SeriesRows(array, self.schema.key_separator)
            elif array.is_sharded:
                box = block_box(array.grid, self.schema.partitioned_dims, self.region)
                self._shapes[array.name] = tuple(b - a for a, b in box)
                if array.role is Role.VARIABLE:
                    self._rows[array.name] = self._shard_rows(array)
        # Invariant: at most one object a key. A row that has grown replaces the object it was before.
        self._objects: dict[str, StagedObject] = {}
        self._broken: BaseException | None = None
        self._set_base(manifest)
        if manifest.n_records:
            self._reset_rows()
        # Last: its thread must not outlive a row that can't be read back.
        self._stager = Stager(
            store,
            stage_folder(manifest.epoch, self.writer),
            manifest.epoch,
            threads=options.writer_threads,
            max_pending_nbytes=options.max_pending_nbytes or 2 * self._record_nbytes(),
        )

    def _set_base(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._times: list[float] = []

    def _shard_rows(self, array: ArraySpec) -> ShardRows:
        box = block_box(array.grid, self.schema.partitioned_dims, self.region)
        return ShardRows(
            array,
            self.schema.key_separator,
            box,
            self._share.boxes[array.name],
            is_durable=self._is_durable,
        )

    def _record_nbytes(self) -> int:
        return sum(r.array.dtype.itemsize * self._share.n_cells(name) for name, r in self._rows.items())

    # State

    @property
    def n_committed(self) -> int:
        """Committed records."""
        return self._manifest.n_records

    @property
    def n_records(self) -> int:
        """Records that were written or are committed."""
        return self.n_committed + len(self._times)

    @property
    def last_t(self) -> float | None:
        """Time of the last of them."""
        return self._times[-1] if self._times else self._manifest.last_t

    @property
    def times(self) -> list[float]:
        """Times of the records that are not committed."""
        return list(self._times)

    @property
    def base_seq(self) -> int:
        """The commit_seq on which this writer builds."""
        return self._manifest.commit_seq

    def has_pending(self, stop: int) -> bool:
        """Whether a commit of the records to ``stop`` would commit anything."""
        return stop > self.n_committed or bool(self._statics) or self._broken is not None

    def stop_of_commit(self, *, partial_rows: bool) -> int:
        """Return the end of the record set of a commit now.

        Without partial rows that is the last record at which a row of every variable ends, the same on
        every rank whatever it writes.
        """
        if partial_rows:
            return self.n_records
        length = math.lcm(*(a.row_length for a in self.schema.arrays.values() if a.role is Role.VARIABLE))
        return max(self.n_records // length * length, self.n_committed)

    # Writing

    def block_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's block of a variable or static, without time."""
        if name not in self._shapes:
            raise self._unknown(name, tuple(self._shapes))
        return self._shapes[name]

    def _unknown(self, name: str, known: tuple[str, ...]) -> SchemaError:
        return SchemaError(f"{name!r} is not among {known}", kind="unknown")

    def check_record(self, arrays: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return the checked blocks of a record; nothing is taken before all of them are right.

        Raises
        ------
        SchemaError
            Missing or unknown variable, wrong shape or dtype.
        """
        streaming = [a for a in self.schema.arrays.values() if a.has_time]
        for name in arrays:
            if not any(a.name == name for a in streaming):
                raise self._unknown(name, tuple(a.name for a in streaming))
        blocks = {}
        for a in streaming:
            writes = a.name in self._series or (a.name in self._rows and self._rows[a.name].writes)
            if a.name in arrays:
                block = check_block(a.name, arrays[a.name], self._shapes[a.name], a.dtype)
                if writes:
                    blocks[a.name] = block
            elif writes:
                raise SchemaError(
                    f"variable {a.name!r} is missing from the record; rank {self.writer} writes a part of it, "
                    f"shape {self._shapes[a.name]}, so pass it with every record",
                    kind="missing",
                )
        return blocks

    def write_record(self, t: Any, arrays: Mapping[str, Any]) -> None:
        """Put one record; see `mpistream.parallel.StreamWriter.write_record`."""
        began = time.perf_counter()
        t = check_time(t, self.last_t)
        blocks = self.check_record(arrays)
        if self._broken is not None:
            raise ProtocolError(
                f"an earlier record was taken in part ({self._broken}); call rollback() on every rank",
                kind="broken",
            )
        try:
            # Narrowing a float can overflow to infinity: that is what the caller's dtype asked for.
            with np.errstate(over="ignore", invalid="ignore"):
                for name, block in blocks.items():
                    if name in self._series:
                        self._series[name].add(block.astype(self._series[name].array.dtype)[()])
                    else:
                        self._submit(self._rows[name].add(block))
        except BaseException as error:
            # Some variables have the record, others not: the next arrive tells all ranks, rollback mends it.
            self._broken = error
            raise
        self._times.append(t)
        self.stats.n_records += 1
        self.stats.nbytes_in += sum(
            self._rows[n].array.dtype.itemsize * b.size for n, b in blocks.items() if n in self._rows
        )
        self.stats.seconds["write"] += time.perf_counter() - began

    def write_static(self, name: str, value: Any) -> None:
        """Put this rank's part of a static; see `mpistream.parallel.StreamWriter.write_static`."""
        array = self.schema.arrays.get(name)
        if array is None or array.role is not Role.STATIC:
            raise self._unknown(name, tuple(a.name for a in self.schema.arrays.values() if a.role is Role.STATIC))
        if name in self._manifest.statics or name in self._statics:
            state = "committed" if name in self._manifest.statics else "written"
            raise SchemaError(f"static {name!r} is {state} already; it is written once", kind="static")
        block = check_block(name, value, self._shapes[name], array.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            if not array.dims:
                objects = encode_whole(array, self.schema.key_separator, block) if self.writer == 0 else []
            else:
                rows = self._shard_rows(array)
                objects = rows.add(block) if rows.writes else []
        self._statics[name] = objects
        self._submit(objects, keep=False)

    def _submit(self, objects: list[StagedObject], *, keep: bool = True) -> None:
        for item in objects:
            if keep:
                if (old := self._objects.get(item.key)) is not None:
                    self._stager.discard([old])
                self._objects[item.key] = item
            self.stats.n_objects += 1
            self.stats.nbytes_encoded += item.nbytes
            self._stager.submit(item)

    # Committing

    def stage(self, *, partial_rows: bool) -> int:
        """Make everything of the next commit durable under the stage folder; return its last record's end.

        Raises
        ------
        MPIStreamError
            For what could not be staged; a later call tries again.
        """
        if self._broken is not None:
            raise ProtocolError(
                f"a record was taken in part ({type(self._broken).__name__}: {self._broken}); call rollback()",
                kind="broken",
            )
        stop = self.stop_of_commit(partial_rows=partial_rows)
        if partial_rows:
            self._submit([o for rows in self._rows.values() if rows.writes for o in rows.partial()])
        if stop > self.n_committed:
            self._submit([o for series in self._series.values() for o in series.objects(stop)])
        self._stager.retry(self._pending())
        return stop

    def _pending(self) -> list[StagedObject]:
        return [*self._objects.values(), *(o for objects in self._statics.values() for o in objects)]

    def place(self, stop: int) -> None:
        """Rename what belongs to the records before ``stop``, and the statics, to their keys."""
        self._stager.place(self._of_commit(stop), sync=self._is_durable)

    def _of_commit(self, stop: int) -> list[StagedObject]:
        return [
            *(o for o in self._objects.values() if o.start < stop),
            *(o for objects in self._statics.values() for o in objects),
        ]

    def token(self, stop: int, failure: MPIStreamError | None = None) -> CommitToken:
        """Return the token of a commit of the records before ``stop``, counted from the objects themselves."""
        base = self.n_committed
        n_cells = {name: 0 for name, a in self.schema.arrays.items() if a.has_time}
        statics = dict.fromkeys(self._statics, 0)
        of_commit = self._of_commit(stop)
        for o in of_commit:
            if o.name in statics:
                statics[o.name] += o.n_cells
            else:
                n_cells[o.name] += o.n_cells * (min(o.stop, stop) - max(o.start, base))
        times = self._times[: stop - base]
        return CommitToken(
            store_id=self._manifest.store_id,
            run_id=self._manifest.run_id,
            fingerprint=self._manifest.fingerprint,
            epoch=self._manifest.epoch,
            base_seq=self._manifest.commit_seq,
            writer=self.writer,
            start=base,
            stop=stop,
            last_t=times[-1] if times else self._manifest.last_t,
            times_sha256=times_sha256(times),
            n_cells=n_cells,
            statics=statics,
            region=self.region,
            n_objects=len(of_commit),
            nbytes=sum(o.nbytes for o in of_commit),
            failure=None if failure is None else error_to_json(failure, rank=self.writer),
        )

    def committed(self, manifest: Manifest) -> None:
        """Build on a new committed state."""
        stop = manifest.n_records
        times = self._times[stop - self.n_committed :]
        # An object that also holds a pending record is in place already, but still to be counted.
        self._objects = {key: o for key, o in self._objects.items() if o.stop > stop}
        self._statics = {}
        self._set_base(manifest)
        self._times = times
        for rows in self._rows.values():
            rows.committed(stop)
        for series in self._series.values():
            series.committed(stop)
        self.stats.n_commits += 1

    def rollback(self) -> None:
        """Drop what is not committed; rows that are filled in part are read back from the store.

        Raises
        ------
        FormatError, StoreError
            When that can't be read; the writer is then not usable.
        """
        self._stager.discard(self._pending())
        self._objects, self._statics = {}, {}
        self._set_base(self._manifest)
        # Until every row is read back, a record could start a new row in the place of a committed one.
        self._broken = self._broken or ProtocolError("a rollback that failed", kind="broken")
        self._reset_rows()
        self._broken = None

    def _reset_rows(self) -> None:
        for rows in self._rows.values():
            if rows.writes:
                rows.reset(self._store, self.n_committed)
        for series in self._series.values():
            series.reset(self._store, self.n_committed)

    def close(self) -> None:
        """End the thread; nothing more is written."""
        self._stager.close()

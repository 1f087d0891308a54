"""One writer, no communication: records in, staged and placed objects and a token out.

Data flows one way: block -> open shard -> staged object -> placed object -> token. In the background there is a loan
between block and shard: pooled memory into which a block is copied before the call returns. What the writer holds
beyond the last commit it can make again from the caller's next calls (`RankWriter.rollback`) or has whole
(a commit that failed is tried again from memory or from the stage folder).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpistream.array_reader import ArrayReader
from mpistream.arrays import ArraySpec, Role
from mpistream.blobs import MAX_BLOB_NBYTES, Scope, pack_pieces
from mpistream.block import check_blocks, check_time
from mpistream.commit import without_records
from mpistream.cores import cores_of_this_process, cores_per_rank, workers_of
from mpistream.epoch import Share
from mpistream.errors import MPIStreamError, ProtocolError, SchemaError, error_to_json
from mpistream.lent import Lent
from mpistream.manifest import Manifest, blob_key, stage_folder
from mpistream.names import check_name
from mpistream.options import Options
from mpistream.pipeline import Loan, Pool
from mpistream.ranges import Ranges, count, covers, difference, inside, members, n_covered, overlap, ranges_of, union
from mpistream.rows import ShardRows, encode_whole, rounded
from mpistream.series import SeriesRows
from mpistream.staged import StagedObject
from mpistream.staging import Stager
from mpistream.stats import WriterStats
from mpistream.store import Store
from mpistream.strings import is_string
from mpistream.tiling import Box
from mpistream.times import encode_time
from mpistream.token import CommitToken, times_sha256

__all__ = ["Blocks", "CheckedRecord", "RankWriter", "Rows"]

# glibc gives freed memory at the end of its heap back to the system above a threshold: twice the size of the largest
# block that was mapped alone and freed, up to 32 MiB (mallopt(3), "M_MMAP_THRESHOLD"). Encoded chunks are freed with
# each record, and to get their pages anew for the next one can cost as much as a fast codec.
_KEPT_NBYTES = 31 * 1024 * 1024


# Smaller inner chunks are encoded by the caller: a thread that takes the interpreter for each of them is slow beside a
# busy program, and slows it down (9 MB/s and a quarter of the program's speed were measured with chunks of 32 KiB).
_MIN_BACKGROUND_NBYTES = 256 * 1024


class Rows(Protocol):
    """The open rows of one array, of `mpistream.rows` or `mpistream.location_rows`."""

    array: ArraySpec
    is_background: bool

    @property
    def writes(self) -> bool:
        """Whether this writer has shards of the array."""

    @property
    def borrowed(self) -> dict[int, tuple[int, ...]]:
        """Of the blocks that `put` gets those that must be lent."""

    @property
    def raw_nbytes(self) -> int:
        """Bytes of all records in the open rows, before they are encoded."""

    @property
    def nbytes(self) -> int:
        """Bytes that the open rows hold in memory."""

    @property
    def n_open(self) -> int:
        """Rows in memory."""

    def put(
        self, record: int, blocks: Sequence[NDArray[Any]], loans: Mapping[int, Loan] | None = None
    ) -> Iterable[StagedObject]:
        """Take a record; yield its row's objects when the row is full."""

    def leave_oldest(self) -> Iterable[StagedObject]:
        """Take the oldest row out of memory; yield its objects."""

    def leave(self, records: Ranges) -> Iterable[StagedObject]:
        """Take the rows that hold any of these records out of memory; yield their objects."""

    def partial(self) -> Iterable[StagedObject]:
        """Yield the objects of rows that are filled in part and have grown since they were last made."""

    def committed(self, committed: Ranges) -> None:
        """Note which records are committed now."""

    def reset(self, committed: Ranges) -> None:
        """Forget what is not committed."""


Blocks = dict[str, list[NDArray[Any]]]
"""Variable -> the blocks of one record, without time."""


@dataclass(frozen=True, slots=True)
class CheckedRecord:
    """A record that may be taken: nothing is wrong with it on this rank."""

    record: int
    t: float
    blocks: Blocks


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
    pool
        Whose threads work in the background; by default those of one of its own.
    n_cores
        Cores that this rank has; by default all that this process may use.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        share: Share,
        options: Options,
        pool: Pool | None = None,
        n_cores: int | None = None,
    ) -> None:
        self._store = store
        self._share = share
        self._is_durable = options.durability == "fsync"
        self.writer = share.writer
        self.schema = manifest.schema
        self.region = share.region
        self.indices = share.indices
        if n_cores is None:
            (n_cores,) = cores_per_rank([("", cores_of_this_process())])
        self._workers = workers_of(options.threads, n_cores)
        self.stats = WriterStats(threads=self._workers.n_threads, n_cores=n_cores)
        np.empty(_KEPT_NBYTES, np.uint8)  # freed at once, never touched
        self._series: dict[str, SeriesRows] = {}
        self._statics: dict[str, list[StagedObject]] = {}
        # Blobs that are not committed, and the keys of static ones that this epoch has committed.
        self._blobs: dict[tuple[Scope, str], bytes] = {}
        self._static_blobs: set[str] = set()
        # Those in the pack that was made last, in the one that was placed last, and the key of that one while it may
        # lie there and is not committed.
        self._packed_blobs: set[tuple[Scope, str]] = set()
        self._placed_blobs: set[tuple[Scope, str]] = set()
        self._pack_in_place: str | None = None
        self._streaming = {a.name: a for a in self.schema.arrays.values() if a.has_time}
        # The boxes of the blocks that this rank passes, without time.
        self._held = {a.name: self._held_boxes(a) for a in self.schema.arrays.values()}
        # Invariant: at most one object a key. A row that has grown replaces the object it was before.
        self._objects: dict[str, StagedObject] = {}
        self._broken: BaseException | None = None
        self._fixed_times: NDArray[Any] | None = None
        self._manifest = manifest
        # Record -> time of what was written and is not committed.
        self._pending: dict[int, float] = {}
        self._stager, self._rows = self._open_rows(store, options, pool)
        self.stats.background = tuple(name for name, rows in self._rows.items() if rows.is_background and rows.writes)
        self._borrowed = {name: self._rows[name].borrowed for name in self.stats.background}
        try:
            self._reset_rows()
        except BaseException:
            # Its threads must not outlive a row that can't be read back.
            self._stager.close()
            raise

    def _open_rows(self, store: Store, options: Options, pool: Pool | None) -> tuple[Stager, dict[str, Rows]]:
        variables = [a for a in self.schema.arrays.values() if a.role is Role.VARIABLE and a.is_sharded]
        self._max_open_nbytes = options.max_pending_nbytes or 2 * sum(map(self._write_nbytes, variables))
        stager = Stager(
            store,
            stage_folder(self._manifest.epoch, self.writer),
            self._manifest.epoch,
            threads=self._workers.n_threads,
            max_pending_nbytes=self._max_open_nbytes,
            pool=pool,
            stats=self.stats,
        )
        rows = {array.name: self._shard_rows(array, stager) for array in variables}
        # What is encoded in the background comes first: it is on its way while the caller encodes the rest.
        return stager, dict(sorted(rows.items(), key=lambda item: not item[1].is_background))

    def _held_boxes(self, array: ArraySpec) -> list[Box]:
        if array.role is Role.SERIES:
            if self.writer == 0:
                self._series[array.name] = SeriesRows(array, self.schema.key_separator, self._store)
            return [()]
        if array.is_sharded:
            return self._share.held_boxes(array.grid)
        return [tuple((0, n) for n in array.shape)]

    def _write_nbytes(self, array: ArraySpec) -> int:
        """What is written of an array at a time, before compression: a record."""
        return array.dtype.itemsize * self._share.n_cells(array.name)

    def _shard_rows(self, array: ArraySpec, stager: Stager) -> Rows:
        boxes = self._share.boxes[array.name]
        return ShardRows(
            array,
            self.schema.key_separator,
            boxes if self._share.is_rearranged(array.name) else self._held[array.name],
            boxes,
            store=self._store,
            n_total=self.schema.n_total,
            is_durable=self._is_durable,
            stager=stager,
            is_background=self._is_background(array),
        )

    def _is_background(self, array: ArraySpec) -> bool:
        chunk_nbytes = math.prod(array.resolved_chunk_shape) * array.dtype.itemsize
        # A static is written once, and strings are encoded in Python from cells that lie elsewhere.
        return (
            self._workers.are_encoding
            and array.role is Role.VARIABLE
            and not is_string(array.dtype)
            and chunk_nbytes >= _MIN_BACKGROUND_NBYTES
        )

    # State

    @property
    def n_committed(self) -> int:
        """Committed records."""
        return count(self._manifest.committed)

    @property
    def n_records(self) -> int:
        """Records that were written or are committed."""
        return self.n_committed + len(self._pending)

    @property
    def last_t(self) -> float | None:
        """Time of the last record, written or committed."""
        if not self._pending:
            return self._manifest.last_t
        last = max(self._pending)
        committed = self._manifest.committed
        return self._manifest.last_t if committed and committed[-1][1] > last else self._pending[last]

    def times(self, records: Ranges) -> list[float]:
        """Times of records that are not committed."""
        return [self._pending[r] for r in members(records)]

    @property
    def base_seq(self) -> int:
        """The commit_seq on which this writer builds."""
        return self._manifest.commit_seq

    def has_pending(self, records: Ranges) -> bool:
        """Whether a commit of these records would commit anything."""
        return bool(records or self._statics or self._due_blobs(records)) or self._broken is not None

    def has_blobs(self) -> bool:
        """Whether there are blobs that wait for no record."""
        return bool(self._due_blobs(()))

    def records_to_commit(self, *, partial_rows: bool) -> Ranges:
        """Return the record set of a commit now.

        Without partial rows these are the records of rows that are full for every variable, the same on every
        rank whatever it writes: rows are looked at in groups as long as their least common multiple.
        """
        pending = ranges_of(self._pending)
        if partial_rows:
            return pending
        length = math.lcm(*(a.row_length for a in self.schema.arrays.values() if a.role is Role.VARIABLE))
        n_total = self.schema.n_total
        there = union(self._manifest.committed, pending)
        full: list[tuple[int, int]] = []
        for group in sorted({r // length for r in self._pending}):
            start, stop = group * length, (group + 1) * length
            if n_total is not None:
                stop = min(stop, n_total)
            if inside(there, start, stop) == ((start, stop),):
                full.append((start, stop))
        return overlap(pending, union(full))

    # Writing

    def block_shapes(self, name: str) -> list[tuple[int, ...]]:
        """Return the shapes of this rank's blocks of a variable or static, without time."""
        return [tuple(b - a for a, b in box) for box in self.held(name)]

    def held(self, name: str) -> list[Box]:
        """Return the boxes of this rank's blocks of a variable or static, without time."""
        if name not in self._held:
            raise self._unknown(name, tuple(self._held))
        return self._held[name]

    def _unknown(self, name: str, known: tuple[str, ...]) -> SchemaError:
        return SchemaError(f"{name!r} is not among {known}", kind="unknown")

    def _check_record(self, arrays: Mapping[str, Any]) -> Blocks:
        """Return the checked blocks of a record; nothing is taken before all of them are right.

        Raises
        ------
        SchemaError
            Missing or unknown variable, wrong shape or dtype.
        """
        for name in arrays:
            if name not in self._streaming:
                raise self._unknown(name, tuple(self._streaming))
        blocks = {}
        for a in self._streaming.values():
            is_needed = a.name in self._series or (a.name in self._rows and self._share.holds(a.name))
            if a.name in arrays:
                found = check_blocks(a.name, arrays[a.name], self.block_shapes(a.name), a.dtype)
                if is_needed:
                    blocks[a.name] = found
            elif is_needed:
                raise SchemaError(
                    f"variable {a.name!r} is missing from the record; rank {self.writer} has a part of it, "
                    f"shape {', '.join(map(str, self.block_shapes(a.name)))}, so pass it with every record",
                    kind="missing",
                )
        return blocks

    def checked_record(self, t: Any, arrays: Mapping[str, Any]) -> CheckedRecord:
        """Return the next record, checked; nothing of it is taken."""
        self._check_mode("write_record", is_indexed=False)
        self._check_whole()
        t = check_time(self._encoded(t), self.last_t)
        return CheckedRecord(self.n_records, t, self._check_record(arrays))

    def checked_record_at(self, index: Any, t: Any, arrays: Mapping[str, Any]) -> CheckedRecord:
        """Return a record of a fixed time dim, checked; nothing of it is taken."""
        self._check_mode("write_record_at", is_indexed=True)
        self._check_whole()
        n_total = self.schema.n_total
        assert n_total is not None
        try:
            record = operator.index(index)
        except TypeError as error:
            raise SchemaError(f"index {index!r} is not an integer", kind="index") from error
        if not 0 <= record < n_total:
            raise SchemaError(f"index {record}: there are {n_total} times, 0 to {n_total - 1}", kind="index")
        t = check_time(self._encoded(t), None)
        expected = self._time_of(record)
        # Bitwise: 0.0 == -0.0, but they have different digests.
        if t.hex() != expected.hex():
            raise SchemaError(
                f"t = {t!r} at index {record}, the schema's time is {expected!r}; pass times[index] itself", kind="time"
            )
        if covers(self._manifest.committed, record):
            raise SchemaError(
                f"record {record} is committed; call invalidate([{record}]) on every rank before it is rewritten",
                kind="committed",
            )
        if record in self._pending:
            raise SchemaError(
                f"record {record} was written since the last commit; rollback() drops what is not committed",
                kind="written",
            )
        return CheckedRecord(record, t, self._check_record(arrays))

    def write_record(self, t: Any, arrays: Mapping[str, Any]) -> None:
        """Put the next record; see `mpistream.parallel.StreamWriter.write_record`."""
        checked = self.checked_record(t, arrays)
        with self.lent() as lent:
            self.take(checked, lent)

    def write_record_at(self, index: Any, t: Any, arrays: Mapping[str, Any]) -> None:
        """Put one record of a fixed time dim; see `mpistream.parallel.StreamWriter.write_record_at`."""
        checked = self.checked_record_at(index, t, arrays)
        with self.lent() as lent:
            self.take(checked, lent)

    def _encoded(self, t: Any) -> Any:
        return encode_time(t, self.schema.time.units, self.schema.time.calendar)

    def _check_mode(self, call: str, *, is_indexed: bool) -> None:
        """Refuse a call that belongs to the other kind of time dim."""
        is_location_series = self.schema.is_location_series
        if is_location_series or (self.schema.n_total is not None) is not is_indexed:
            other = "write_record_at(index, t, arrays)" if not is_indexed else "write_record(t, arrays)"
            other = "write_location(location, series)" if is_location_series else other
            raise SchemaError(f"{call} does not fit the schema's time; use {other}", kind="mode")

    def _time_of(self, record: int) -> float:
        """Return the fixed time of a record, from the store: a schema that comes from there has no values."""
        if self._fixed_times is None:
            array = self.schema.time_array
            self._fixed_times = np.empty(array.shape, array.dtype)
            box = ((0, array.shape[0]),)
            ArrayReader(self._store, self.schema.key_separator).read_chunks(array, box, self._fixed_times)
        return float(self._fixed_times[record])

    def _check_whole(self) -> None:
        if self._broken is not None:
            noun = self.schema.record_noun
            raise ProtocolError(
                f"an earlier {noun} was taken in part ({self._broken}); call rollback() on every rank",
                kind="broken",
            )

    def lent(self) -> Lent:
        """Return the memory for the next record."""
        return Lent(self._stager, self._borrowed, {name: self._streaming[name].dtype for name in self._borrowed})

    @property
    def stager(self) -> Stager:
        """Who stages its objects, and has the threads."""
        return self._stager

    def is_rearranged(self, name: str) -> bool:
        """Return whether what is written of an array comes from elsewhere than this rank's own blocks."""
        return self._share.is_rearranged(name)

    def take(self, checked: CheckedRecord, lent: Lent) -> None:
        """Put a record that was checked; of a rearranged array the blocks are those of the boxes written here."""
        record = checked.record
        # Narrowing a float can overflow to infinity: that is what the caller's dtype asked for.
        with np.errstate(over="ignore", invalid="ignore"):
            blocks = self._copied(checked.blocks, lent)
            try:
                for name, series in self._series.items():
                    series.put(record, rounded(series.array, blocks[name][0])[()])
                for name, rows in self._rows.items():
                    if rows.writes:
                        self._submit(rows.put(record, blocks[name], lent.loans.get(name)))
                self._bound_open_rows()
                # In here: what is in the rows and not pending would be put into them again.
                self._pending[record] = checked.t
            except BaseException as error:
                # Some variables have the record, others not: the next arrive tells all ranks, rollback mends it.
                self._broken = error
                raise
        self.stats.n_records += 1
        self.stats.nbytes_in += sum(
            rows.array.dtype.itemsize * sum(b.size for b in blocks.get(name, ())) for name, rows in self._rows.items()
        )

    def _copied(self, blocks: Blocks, lent: Lent) -> Blocks:
        """Copy what is encoded in the background, unless it lies there already; what fails here has taken nothing."""
        found = dict(blocks)
        for name in self._borrowed:
            arrays = list(found[name])
            for k, view in lent.arrays(name).items():
                if arrays[k] is not view:
                    view[...] = arrays[k]
                    self.stats.nbytes_copied += view.nbytes
                    arrays[k] = view
            found[name] = arrays
        return found

    def _bound_open_rows(self) -> None:
        """In indexed mode any number of rows can be open: the oldest leave memory for the stage folder."""
        if all(rows.n_open <= 1 for rows in self._rows.values()):
            return
        # Encoded they hardly ever need more than twice their raw size; to know it, what is on its way must be done.
        if 2 * sum(rows.raw_nbytes for rows in self._rows.values()) <= self._max_open_nbytes:
            return
        self._stager.wait()
        while sum(rows.nbytes for rows in self._rows.values()) > self._max_open_nbytes:
            several = [rows for rows in self._rows.values() if rows.n_open > 1]
            if not several:
                return
            for rows in several:
                self._submit(rows.leave_oldest())

    def write_static(self, name: str, value: Any) -> None:
        """Put this rank's part of a static; see `mpistream.parallel.StreamWriter.write_static`."""
        self.take_static(name, self.checked_static(name, value))

    def checked_static(self, name: str, value: Any) -> list[NDArray[Any]]:
        """Return this rank's blocks of a static, checked; nothing of it is taken."""
        array = self.schema.arrays.get(name)
        if array is None or array.role is not Role.STATIC:
            raise self._unknown(name, tuple(a.name for a in self.schema.arrays.values() if a.role is Role.STATIC))
        if name in self._manifest.statics or name in self._statics:
            state = "committed" if name in self._manifest.statics else "written"
            raise SchemaError(f"static {name!r} is {state} already; it is written once", kind="static")
        return check_blocks(name, value, self.block_shapes(name), array.dtype)

    def take_static(self, name: str, blocks: list[NDArray[Any]]) -> None:
        """Put a static that was checked; if it is rearranged the blocks are those of the boxes written here."""
        array = self.schema.arrays[name]
        objects: list[StagedObject] = []
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                for item in self._static_objects(array, blocks):
                    objects.append(item)
                    self._submit([item], keep=False)
        except BaseException:
            self._stager.discard(objects)
            raise
        self._statics[name] = objects
        if objects:
            self.stats.nbytes_in += array.dtype.itemsize * sum(b.size for b in blocks)

    def _static_objects(self, array: ArraySpec, blocks: list[NDArray[Any]]) -> Iterable[StagedObject]:
        if array.is_whole:
            values = rounded(array, blocks[0])
            return encode_whole(array, self.schema.key_separator, values) if self.writer == 0 else []
        rows = self._shard_rows(array, self._stager)
        return rows.put(0, blocks) if rows.writes else []

    def write_blob(self, key: str, payload: Any, scope: Any) -> None:
        """Put a payload; see `mpistream.parallel.StreamWriter.write_blob`."""
        check_name("blob", key)
        try:
            data = bytes(memoryview(payload))
        except TypeError as error:
            raise SchemaError(f"blob {key!r} is a {type(payload).__name__}; give bytes", kind="blob") from error
        if len(data) > MAX_BLOB_NBYTES:
            raise SchemaError(
                f"blob {key!r} has {len(data)} bytes, at most {MAX_BLOB_NBYTES} are possible; a field belongs into a "
                "variable or a static",
                kind="blob",
            )
        if scope != "static":
            n = self.schema.n_total if self.schema.n_total is not None else self.n_records
            if isinstance(scope, bool) or not isinstance(scope, int | np.integer) or not 0 <= scope < n:
                noun = self.schema.record_noun
                raise SchemaError(
                    f"blob {key!r}: scope {scope!r}; give 'static' or the index of a {noun}, 0 to {n - 1}",
                    kind="blob",
                )
            scope = int(scope)
        if (scope, key) in self._blobs or (scope == "static" and key in self._static_blobs):
            raise SchemaError(f"blob {key!r} of scope {scope!r} is written already; it is written once", kind="blob")
        self._blobs[scope, key] = data

    def is_committed_record(self, scope: Any) -> bool:
        """Return whether a blob's scope is a committed record."""
        return isinstance(scope, int | np.integer) and covers(self._manifest.committed, int(scope))

    def _due_blobs(self, records: Ranges) -> dict[tuple[Scope, str], bytes]:
        """Return the blobs of a commit: one of a record is committed with it, or later, never before."""
        there = union(self._manifest.committed, records)
        return {k: data for k, data in self._blobs.items() if not isinstance(k[0], int) or covers(there, k[0])}

    def _pack(self, records: Ranges) -> list[StagedObject]:
        """Return the object of all blobs of a commit."""
        due = self._due_blobs(records)
        self._packed_blobs = set(due)
        # A pack that a failed commit placed has the name of the next commit: without blobs an empty one replaces it.
        if not due and self._pack_in_place != self._pack_key():
            # One that a failed commit only staged.
            self._stager.discard([o for o in (self._objects.pop(self._pack_key(), None),) if o is not None])
            return []
        pieces = pack_pieces(due)
        return [
            StagedObject(
                name="",
                key=self._pack_key(),
                records=None,
                n_cells=len(due),
                pieces=pieces,
                nbytes=sum(len(p) for p in pieces),
                must_sync=self._is_durable,
            )
        ]

    def _pack_key(self) -> str:
        return blob_key(self._manifest.epoch, self.base_seq + 1, self.writer)

    def take_pack_back(self) -> None:
        """Remove a pack that a failed commit placed, before something without blobs takes its commit_seq.

        Raises
        ------
        FencedError, StoreError
            When it could not be removed; a later call tries again.
        """
        if self._pack_in_place == self._pack_key():
            # Durably: the commit_seq is given to something else next, and makes a pack of that name committed.
            self._stager.remove(self._pack_in_place, sync=True)
            self._pack_in_place = None

    def _submit(self, objects: Iterable[StagedObject], *, keep: bool = True) -> None:
        for item in objects:
            if keep:
                self._keep(item)
            self.stats.n_objects += 1
            self._stager.submit(item)

    def _keep(self, item: StagedObject) -> None:
        if (old := self._objects.get(item.key)) is not None:
            self._stager.discard([old])
        self._objects[item.key] = item

    # Committing

    def stage(self, *, partial_rows: bool) -> Ranges:
        """Make everything of the next commit durable under the stage folder; return its record set.

        Raises
        ------
        MPIStreamError
            For what could not be staged; a later call tries again.
        """
        self._check_not_broken()
        records = self.records_to_commit(partial_rows=partial_rows)
        if partial_rows:
            for rows in self._rows.values():
                if rows.writes:
                    self._submit(rows.partial())
        self._submit(self._small_objects(records))
        self._stager.retry(self._all_objects())
        return records

    def ready(self) -> tuple[Ranges, list[str]]:
        """Return the records and the statics that are durable under the stage folder by now; nothing is waited for.

        Of records only full rows count, and without fixed times only those that follow what is committed. `stage_small`
        makes the rest of a commit of any of them durable.

        Raises
        ------
        MPIStreamError
            For what could not be staged; it is tried again in the background.
        """
        self._check_not_broken()
        self._stager.kick(self._all_objects())
        late = {r for o in self._objects.values() if o.records is not None and not o.is_staged for r in o.records}
        found = difference(self.records_to_commit(partial_rows=False), ranges_of(late))
        if self.schema.n_total is None:
            found = tuple((a, b) for a, b in found if a == self.n_committed)
        return found, [name for name, objects in self._statics.items() if all(o.is_staged for o in objects)]

    def stage_small(self, records: Ranges) -> None:
        """Make durable what only a commit makes: chunks of series, and the blobs of these records.

        Raises
        ------
        MPIStreamError
            For what could not be staged.
        """
        items = self._small_objects(records)
        for item in items:
            self._keep(item)
            self.stats.n_objects += 1
        self._stager.stage(items)

    def _small_objects(self, records: Ranges) -> list[StagedObject]:
        return [*(o for series in self._series.values() for o in series.objects(records)), *self._pack(records)]

    def _check_not_broken(self) -> None:
        if self._broken is not None:
            noun = self.schema.record_noun
            raise ProtocolError(
                f"a {noun} was taken in part ({type(self._broken).__name__}: {self._broken}); call rollback()",
                kind="broken",
            )

    def _all_objects(self) -> list[StagedObject]:
        return [*self._objects.values(), *(o for objects in self._statics.values() for o in objects)]

    def place(self, records: Ranges, statics: Collection[str] | None = None) -> None:
        """Rename what holds these records, and these statics, by default all, to their keys."""
        of_commit = self._of_commit(records, self._these(statics))
        if any(o.name == "" for o in of_commit):
            self._pack_in_place = self._pack_key()
        self._stager.place(of_commit, sync=self._is_durable)
        self._placed_blobs = self._packed_blobs

    def _these(self, statics: Collection[str] | None) -> Collection[str]:
        return self._statics if statics is None else [name for name in self._statics if name in statics]

    def _of_commit(self, records: Ranges, statics: Collection[str]) -> list[StagedObject]:
        return [
            *(o for o in self._objects.values() if o.records is None or n_covered(records, o.records)),
            *(o for name in statics for o in self._statics[name]),
        ]

    def token(
        self, records: Ranges, failure: MPIStreamError | None = None, statics: Collection[str] | None = None
    ) -> CommitToken:
        """Return the token of a commit of these records and statics, counted from the objects themselves."""
        n_cells = {name: 0 for name, a in self.schema.arrays.items() if a.has_time}
        of_commit = self._of_commit(records, self._these(statics))
        n_statics = dict.fromkeys(self._these(statics), 0)
        n_blobs = 0
        for o in of_commit:
            if o.name == "":
                n_blobs += o.n_cells
            elif o.records is None:
                n_statics[o.name] += o.n_cells
            else:
                n_cells[o.name] += o.n_cells * n_covered(records, o.records)
        times = self.times(records)
        return CommitToken(
            store_id=self._manifest.store_id,
            run_id=self._manifest.run_id,
            fingerprint=self._manifest.fingerprint,
            epoch=self._manifest.epoch,
            base_seq=self._manifest.commit_seq,
            writer=self.writer,
            records=records,
            last_t=times[-1] if times else self._manifest.last_t,
            times_sha256=times_sha256(times),
            n_cells=n_cells,
            statics=n_statics,
            n_blobs=n_blobs,
            n_packs=sum(o.name == "" for o in of_commit),
            region=self.region,
            n_objects=len(of_commit),
            nbytes=sum(o.nbytes for o in of_commit),
            failure=None if failure is None else error_to_json(failure, rank=self.writer),
        )

    def committed(self, manifest: Manifest) -> None:
        """Build on a new committed state."""
        self._leave_rows_without(manifest)
        # An object that holds a newer record as well, which a part may have written meanwhile, is still to be placed.
        self._objects = {
            key: o
            for key, o in self._objects.items()
            if o.records is not None and n_covered(manifest.committed, o.records) < len(o.records)
        }
        # Without MPI the caller may have written more since it was placed.
        self._statics = {name: objects for name, objects in self._statics.items() if name not in manifest.statics}
        self._static_blobs |= {key for scope, key in self._placed_blobs if scope == "static"}
        self._blobs = {key: data for key, data in self._blobs.items() if key not in self._placed_blobs}
        self._placed_blobs = set()
        self._manifest = manifest
        is_rest = n_covered(manifest.committed, self._pending) < len(self._pending)
        left = self._pending.items() if is_rest else ()
        self._pending = {r: t for r, t in left if not covers(manifest.committed, r)}
        self._note_committed()
        self.stats.n_commits += 1

    def invalidated(self, manifest: Manifest) -> None:
        """Build on a state in which fewer records are committed."""
        self._leave_rows_without(manifest)
        # A pack is named after the commit that it waited for; the next commit has another number.
        packs = [o for o in self._objects.values() if o.name == ""]
        self._stager.discard(packs)
        self._objects = {key: o for key, o in self._objects.items() if o.name != ""}
        self._placed_blobs = set()
        self._manifest = manifest
        self._note_committed()

    def checked_for_invalidate(self, indices: Iterable[int]) -> Ranges:
        """Return the records to invalidate; all of them must be committed."""
        if not self.schema.is_location_series:
            self._check_mode("invalidate", is_indexed=True)
        try:
            records = ranges_of(operator.index(i) for i in indices)
        except TypeError as error:
            raise SchemaError(f"invalidate({indices!r}): give a sequence of integers", kind="index") from error
        missing = difference(records, self._manifest.committed)
        if missing:
            what = f"{self.schema.record_noun} {missing[0][0]}"
            raise SchemaError(f"{what} is not committed, so it need not be invalidated", kind="index")
        return records

    def without(self, records: Ranges) -> Manifest:
        """Return the committed state without some records of it."""
        if self.schema.is_location_series:
            return without_records(self._manifest, records, (), None)
        kept = difference(self._manifest.committed, records)
        times = [self._time_of(r) for r in members(records)]
        last_t = self._time_of(kept[-1][1] - 1) if kept else None
        return without_records(self._manifest, records, times, last_t)

    def _leave_rows_without(self, manifest: Manifest) -> None:
        """An open row holds the committed records that it was read back with: one that lost some is read anew."""
        gone = difference(self._manifest.committed, manifest.committed)
        for rows in self._rows.values():
            self._submit(rows.leave(gone))

    def _note_committed(self) -> None:
        for rows in self._rows.values():
            rows.committed(self._manifest.committed)
        for series in self._series.values():
            series.committed(self._manifest.committed)

    def rollback(self) -> None:
        """Drop what is not committed; rows that are filled in part are read back from the store.

        Raises
        ------
        FormatError, StoreError
            When that can't be read; the writer is then not usable.
        """
        # Until every row is read back nothing may be written or committed: a row that can't be read must not be started
        # anew, and of what is dropped from now on objects and records still tell. Ctrl-C can end it anywhere.
        self._broken = self._broken or ProtocolError("a rollback that failed", kind="broken")
        self._stager.drop(self._all_objects())
        self._objects, self._statics, self._pending, self._blobs = {}, {}, {}, {}
        self._placed_blobs = set()
        self._reset_rows()
        self._broken = None

    def _reset_rows(self) -> None:
        for rows in self._rows.values():
            rows.reset(self._manifest.committed)
        for series in self._series.values():
            series.reset(self._manifest.committed)

    def close(self) -> None:
        """End the threads; nothing more is written."""
        self._stager.close()

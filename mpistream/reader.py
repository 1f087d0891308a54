"""Reading a store: committed records only, by region, without MPI or on every rank of a communicator.

A store that holds no stream is read as well, as far as Zarr goes: see `mpistream.foreign`.
"""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from mpistream.agreement import Channel
from mpistream.array_reader import ArrayReader
from mpistream.arrays import QUANTIZATION_NAME, ArraySpec, Role
from mpistream.blobs import BlobEntry, read_pack_index, read_payload
from mpistream.comm import SerialTransport, connect
from mpistream.errors import FormatError, MPIStreamError, SchemaError, StoreError, counted, there_are
from mpistream.foreign import ForeignStore, meant_instead, no_stream_text
from mpistream.grid import held_boxes, with_extra
from mpistream.indices import Axis, Indices, axes_of, axis_lengths, numbers_of, parts_of
from mpistream.manifest import (
    BLOBS_FOLDER,
    FOLDER,
    MANIFEST_KEY,
    Manifest,
    blob_key,
    floor_of,
    parse_blob,
    parse_json,
    raised_inside,
)
from mpistream.node import Node, box_of_region, stream_nodes
from mpistream.ranges import Ranges, covers, difference, members, ranges_of
from mpistream.region import Region, box_of_mapping
from mpistream.schema import StreamSchema
from mpistream.store import ReadableStore, open_readable
from mpistream.tiling import Box, Interval

__all__ = ["StoreReader", "open_reader", "read_blob", "read_output_manifest", "read_record", "read_static"]

_COLLECTIVE_TIMEOUT = 600.0
_POLL_SECONDS = 0.2


def _manifest_bytes(store: ReadableStore) -> bytes:
    data = store.read(MANIFEST_KEY)
    if data is None:
        raise FormatError(no_stream_text(store), kind="no_manifest")
    return data


class StoreReader:
    """The committed state of a store at one moment; made by `open_reader`, or a writer's ``reader``.

    Of a Zarr store that is no stream of mpistream it has `hierarchy`, `attrs`, `attrs_of` and `read_array`; all
    else then raises FormatError of kind ``no_manifest``.

    Parameters
    ----------
    store
        The store.
    manifest
        The state; None where there is no stream.
    channel
        For a reader that was opened on a communicator.
    """

    def __init__(self, store: ReadableStore, manifest: Manifest | None, channel: Channel | None = None) -> None:
        self._store = store
        self._packs: dict[tuple[int, int, int], list[BlobEntry]] = {}
        self._channel = channel or Channel(SerialTransport(), _COLLECTIVE_TIMEOUT)
        self._foreign = ForeignStore(store)
        self._manifest = manifest
        if manifest is not None:
            self._set(manifest)

    def _set(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._arrays = ArrayReader(self._store, manifest.schema.key_separator)
        self._times: NDArray[np.float64] | None = None
        # The newest manifest that was seen, with its bytes: most looks at it find the same again.
        self._newest: tuple[bytes, Manifest] = b"", manifest

    @property
    def manifest(self) -> Manifest:
        """What is committed."""
        if self._manifest is None:
            text = (
                f"{self._store.url}: no {MANIFEST_KEY}; this Zarr store is no stream of mpistream and has no records, "
                "hierarchy() lists its arrays and read_array() reads them"
            )
            raise FormatError(meant_instead(self._store) or text, kind="no_manifest")
        return self._manifest

    @property
    def is_stream(self) -> bool:
        """Whether a stream of mpistream lies here, and not another Zarr group or array."""
        return self._manifest is not None

    @property
    def schema(self) -> StreamSchema:
        """The schema, with its layout; coordinates have digests in the place of values."""
        return self.manifest.schema

    @property
    def n_records(self) -> int:
        """Length of the dim of records: where time grows the committed ones, else all."""
        return self.manifest.n_records

    @property
    def committed(self) -> tuple[tuple[int, int], ...]:
        """Ranges of committed records, half-open."""
        return self.manifest.committed

    @property
    def times(self) -> NDArray[np.float64]:
        """Times of the records, in the schema's units; in a location series those of every series."""
        array = self.schema.time_array
        if self._times is None:
            if array.has_time:
                self._times = self._series(array, 0, self.n_records)
            else:
                self._times = self._read(array, None, ((0, array.shape[0]),))
            self._times.flags.writeable = False
        return self._times

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the group that the store is, or of the array, where it is one."""
        return self.attrs_of("")

    def attrs_of(self, path: str) -> dict[str, Any]:
        """Return the attributes of an array or a group.

        Not collective.

        Parameters
        ----------
        path
            As in `hierarchy`: in a stream the array's name.

        Raises
        ------
        SchemaError
            Kind ``unknown`` when there is none.
        FormatError
            With the key, when its document is damaged.
        """
        return dict(self._node(path).attrs)

    def hierarchy(self) -> dict[str, Node]:
        """Return path -> node of all groups and arrays, sorted; the path of the store's own folder is empty.

        Not collective.

        Raises
        ------
        FormatError
            With the key, when a document or a manifest is damaged.

        Notes
        -----
        A stream, here or in a group, is listed as its manifest has it: with what is committed.
        """
        return self._foreign.nodes() if self._manifest is None else stream_nodes("", self._manifest)

    def _node(self, path: str) -> Node:
        if self._manifest is None:
            return self._foreign.node(path)
        nodes = stream_nodes("", self._manifest)
        if path not in nodes:
            raise SchemaError(f"{path!r} is not among the arrays {sorted(nodes)[1:]}", kind="unknown")
        return nodes[path]

    def read_array(self, path: str, region: Any = None) -> NDArray[Any]:
        """Return a region of an array, whoever wrote it.

        Not collective.

        Parameters
        ----------
        path
            As in `hierarchy`: in a stream the array's name.
        region
            Dim -> (start, stop), a dim left out is whole; or a sequence of one (start, stop) for each axis,
            which is the way where an axis has no name. A writer's ``region`` may name dims that the array lacks,
            where all of its axes have names.

        Returns
        -------
        The region's cells, in native byte order; of a stream's variable with the time dim first.

        Raises
        ------
        SchemaError
            No such array, or one in another stream; a region outside the array, or with records that are not
            committed.
        FormatError
            With the key: a damaged document or chunk, or an array that zarr-python can't read either.
        StoreError
            As `read_record`.

        Notes
        -----
        Chunks that are absent are fill value, but in a stream. What our own codec chain does not speak (other
        codecs and data types, Zarr v2) is read by zarr-python, which only then is imported.
        """
        if self._manifest is None:
            return self._foreign.read(path, region)
        node = self._node(path)
        if node.kind == "group":
            raise SchemaError(f"{path!r} is a group; hierarchy() lists its arrays", kind="unknown")
        array = self.schema.arrays.get(path)
        if isinstance(region, Region) and array is not None:
            # In a location series a region is one of records.
            records = region.project((self.schema.record_dim,)).box[0] if self.schema.is_location_series else None
            box = (*[records or (0, self.n_records)][: array.has_time], *self._box(array, region))
        elif isinstance(region, Mapping) and array is not None and not isinstance(region, Indices):
            dim = self.schema.record_dim
            lead: Box = ()
            if array.has_time:
                lead = box_of_mapping({d: at for d, at in region.items() if d == dim}, {dim: self.n_records})
                region = {d: at for d, at in region.items() if d != dim}
            box = (*lead, *self._box(array, region))
        else:
            box = box_of_region(node, region)
        if array is None:
            return self._own(path, box)
        if not array.has_time:
            return self.read_static(path, dict(zip(array.dims, box, strict=True)))
        (start, stop), *others = box
        for i in difference(((start, stop),), self.committed)[:1]:
            raise self._not_committed(path, i[0])
        if array.role is Role.SERIES:
            return self._series(array, start, stop)
        return self._read(array, (start, stop), tuple(others))

    def _own(self, path: str, box: Box) -> NDArray[Any]:
        """Return a region of an array that no caller describes."""
        if path == QUANTIZATION_NAME:
            # It is there for its attributes: nobody writes a value.
            return np.zeros((), "int8")
        values = self.times if path == self.schema.time_dim else self._mask()
        return np.array(values[slice(*box[0])])

    def _mask(self) -> NDArray[np.bool_]:
        mask = _room("committed", [self.n_records], np.dtype(bool))
        mask[:] = False
        for start, stop in self.committed:
            mask[start:stop] = True
        return mask

    def __repr__(self) -> str:
        if self._manifest is None:
            return f"StoreReader({self._store.url!r}, no stream)"
        return (
            f"StoreReader({self._store.url!r}, {counted(self.n_records, self.schema.record_noun)}, "
            f"commit {self.manifest.commit_seq})"
        )

    def read_record(self, name: str, index: int, region: Mapping[str, Any] | None = None) -> NDArray[Any]:
        """Return one record of a variable.

        Not collective.

        Parameters
        ----------
        name
            The variable.
        index
            The record; negative counts from the last committed one.
        region
            Dim -> (start, stop), a dim left out is whole; or `Indices`, of which only the shards are read that have
            such cells, one after the other.

        Returns
        -------
        The region's cells without the time dim, in native byte order; with indices in their order.

        Raises
        ------
        SchemaError
            Unknown variable, a record that is not committed, a region outside the array.
        FormatError
            With the key, when a shard is missing or damaged.
        StoreError
            Kind ``superseded`` when the store was opened for writing since: call `refresh`.
        """
        array = self._array(name, has_time=True)
        i = operator.index(index)
        if not -self.n_records <= i < self.n_records:
            noun = self.schema.record_noun
            raise SchemaError(
                f"{noun} {i} of {name!r}: {there_are(self.n_records, noun)}; refresh() looks for newer ones",
                kind="index",
            )
        i %= self.n_records
        if not covers(self.committed, i):
            raise self._not_committed(name, i)
        if array.role is Role.SERIES:
            self._axes(array, region)
            return np.asarray(self._series(array, i, i + 1)[0])
        return np.asarray(self._read(array, (i, i + 1), self._axes(array, region))[0])

    def _not_committed(self, name: str, record: int) -> SchemaError:
        what = f"{self.schema.record_noun} {record} of {name!r}"
        return SchemaError(f"{what} is not committed; refresh() looks again", kind="not_committed")

    def read_location(
        self, name: str, location: SupportsIndex | str, times: tuple[int, int] | None = None
    ) -> NDArray[Any]:
        """Return the series of one location of a location series.

        Not collective.

        Parameters
        ----------
        name
            The variable.
        location
            Its number or its id.
        times
            (start, stop) of the times to read, by default all.

        Raises
        ------
        SchemaError
            Unknown variable or location, one that is not committed, or a stream that is no location series.
        FormatError, StoreError
            As `read_record`.
        """
        schema = self.schema
        if not schema.is_location_series:
            raise SchemaError(f"{self._store.url} is no location series; use read_record", kind="mode")
        if isinstance(location, str):
            numbers = np.flatnonzero(self.read_static(schema.record_dim) == location)
            if not numbers.size:
                raise SchemaError(f"location {location!r} is none of the {self.n_records} ids", kind="unknown")
            location = int(numbers[0])
        return self.read_record(name, operator.index(location), None if times is None else {schema.time_dim: times})

    def read_static(self, name: str, region: Mapping[str, Any] | None = None) -> NDArray[Any]:
        """Return a static or a coordinate.

        Not collective.

        Parameters
        ----------
        name
            The static or coordinate.
        region
            As in `read_record`.

        Raises
        ------
        SchemaError
            Unknown name, a static that is not committed, a region outside the array.
        FormatError, StoreError
            As `read_record`.
        """
        if name == self.schema.time_dim:
            return self.times
        array = self._array(name, has_time=False)
        if array.role is Role.STATIC and name not in self.manifest.statics:
            raise SchemaError(f"static {name!r} is not committed", kind="not_committed")
        return self._read(array, None, self._axes(array, region))

    def read_blob(self, key: str, scope: int | str = "static", writer: int = 0) -> bytes:
        """Return a committed blob.

        Not collective.

        Parameters
        ----------
        key
            Its name.
        scope
            ``"static"`` or the index of the record.
        writer
            The rank that wrote it.

        Raises
        ------
        SchemaError
            Kind ``unknown`` when there is none that is committed.
        FormatError
            With the key of the pack, when it is damaged.
        """
        for pack, entry in self._visible_blobs():
            if (entry.key, entry.scope, pack[2]) == (key, scope, writer):
                name = blob_key(*pack)
                opened = self._store.open(name)
                if opened is None:
                    raise FormatError(f"{name}: the pack of committed blobs is missing", kind="missing")
                try:
                    return read_payload(name, entry, opened.read)
                finally:
                    opened.close()
        raise SchemaError(f"blob {key!r} of scope {scope!r} and writer {writer} is not committed", kind="unknown")

    def blobs(self) -> list[tuple[int, int | str, str]]:
        """Return (writer, scope, key) of every committed blob, sorted by writer.

        Not collective.
        """
        found = {(pack[2], entry.scope, entry.key) for pack, entry in self._visible_blobs()}
        return sorted(found, key=lambda b: (b[0], str(b[1]), b[2]))

    def _visible_blobs(self) -> Iterator[tuple[tuple[int, int, int], BlobEntry]]:
        """Yield the entries that can be read, newest commit first."""
        manifest = self.manifest
        packs = [p for name in self._store.list(BLOBS_FOLDER) if (p := parse_blob(name)) is not None]
        packs = sorted((p for p in packs if manifest.names_pack(*p[:2])), key=lambda p: (p[1], p[2]), reverse=True)
        if len(packs) < manifest.n_packs:
            # What stood in the missing one, and whether an older pack holds the same keys, nobody can tell.
            text = f"{BLOBS_FOLDER}: {len(packs)} packs of committed blobs, the manifest counts {manifest.n_packs}"
            self._confirm(0, 0, FormatError(f"{text}; packs were deleted", kind="missing"))
        indices = {p: self._pack_index(p) for p in packs}
        # A static key that a later epoch wrote replaces that key for all writers.
        newest: dict[str, int] = {}
        for pack, entries in indices.items():
            for entry in entries:
                if entry.scope == "static":
                    newest[entry.key] = max(newest.get(entry.key, 0), pack[0])
        for pack, entries in indices.items():
            for entry in entries:
                scope = entry.scope
                if isinstance(scope, int):
                    is_visible = covers(self.committed, scope) and pack[1] > floor_of(manifest.blob_floors, scope)
                else:
                    is_visible = pack[0] == newest[entry.key]
                if is_visible:
                    yield pack, entry

    def _pack_index(self, pack: tuple[int, int, int]) -> list[BlobEntry]:
        # A committed pack never changes, so its index is read once.
        if pack not in self._packs:
            name = blob_key(*pack)
            opened = self._store.open(name)
            if opened is None:
                raise FormatError(f"{name}: the pack of committed blobs is missing", kind="missing")
            try:
                self._packs[pack] = read_pack_index(name, opened.nbytes, opened.read)
            finally:
                opened.close()
        return self._packs[pack]

    def _array(self, name: str, *, has_time: bool) -> ArraySpec:
        array = self.schema.arrays.get(name)
        if array is None or array.has_time is not has_time:
            known = [a.name for a in self.schema.arrays.values() if a.has_time is has_time]
            what = "streaming variables" if has_time else "statics and coordinates"
            raise SchemaError(f"{name!r} is not among the {what} {known}", kind="unknown")
        return array

    def _box(self, array: ArraySpec, region: Mapping[str, Any] | None) -> Box:
        region = {} if region is None else region
        if isinstance(region, Region) and set(region.dims) <= set(self.schema.partitioned_dims):
            return _held_box(array, region)
        if isinstance(region, Indices):
            raise SchemaError("indices are for read_record and read_static; give a box here", kind="region")
        if not isinstance(region, Mapping):
            raise SchemaError(f"a region is a mapping dim -> (start, stop), not {type(region).__name__}", kind="region")
        self._check_dims(array, region)
        lengths: dict[str, int] = {d: n for d, n in self.schema.dims.items() if n is not None}
        lengths |= zip(array.space_dims, array.shape, strict=True)
        named = {dim: lengths[dim] for dim in region}
        given = dict(zip(named, box_of_mapping(region, named), strict=True))
        return tuple(self._interval(dim, given, lengths) for dim in array.space_dims)

    def _interval(self, dim: str, given: Mapping[str, Interval], lengths: Mapping[str, int]) -> Interval:
        """Return what a region says of a dim: a staggered one follows the other one, as it does where it is written."""
        whole = (0, lengths[dim])
        staggered = self.schema.staggered.get(dim)
        if dim in given or staggered is None or staggered.dim not in given:
            return given.get(dim, whole)
        return with_extra(given[staggered.dim], staggered.n_extra, lengths[dim])

    def _check_dims(self, array: ArraySpec, region: Mapping[str, Any]) -> None:
        # A rank's region names all partitioned dims, also those that this array lacks.
        known = set(self.schema.dims) - {self.schema.record_dim} | set(array.space_dims)
        if unknown := [dim for dim in region if dim not in known]:
            noun = self.schema.record_noun
            raise SchemaError(
                f"region: {unknown[0]!r} is no dim of a {noun} of {array.name!r}; it has {array.space_dims}",
                kind="region",
            )

    def _axes(self, array: ArraySpec, region: Mapping[str, Any] | None) -> Sequence[Axis]:
        if not isinstance(region, Indices):
            return self._box(array, region)
        self._check_dims(array, region)
        for dim, numbers in region.items():
            length = self.schema.dims[dim]
            if numbers.max(initial=-1) >= (length or 0):
                raise SchemaError(
                    f"indices of dim {dim!r} contain {numbers.max()}, its length is {length}", kind="region"
                )
        # A staggered dim may be named itself; otherwise it follows the other one, as it does where it is written.
        axes = zip(array.space_dims, axes_of(array.grid, region), strict=True)
        return [region.get(dim, axis) for dim, axis in axes]

    def _read(self, array: ArraySpec, records: tuple[int, int] | None, axes: Sequence[Axis]) -> NDArray[Any]:
        """Return a part of an array without time, or of records, which are then the first dim."""
        start, stop = records or (0, 0)
        out = _room(array.name, [*((stop - start,) if records else ()), *axis_lengths(axes)], array.dtype)
        if out.size == 0:
            return out
        error = None
        box = tuple(axis for axis in axes if isinstance(axis, tuple))
        by_record = out if records else out[np.newaxis]
        try:
            if len(box) == len(axes):
                self._decode(array, start, box, by_record)
            else:
                self._decode_cells(array, start, axes, by_record)
        except FormatError as found:
            error = found
        self._confirm(start, stop, error)
        return out

    def _decode(self, array: ArraySpec, start: int, box: Box, out: NDArray[Any]) -> None:
        if array.is_whole:
            self._arrays.read_chunks(array, box, out[0, ...])  # ... keeps an array without dims an array
        else:
            self._arrays.read_shards(array, start, box, out)

    def _decode_cells(self, array: ArraySpec, start: int, axes: Sequence[Axis], out: NDArray[Any]) -> None:
        """Decode shard by shard what has cells of an index list, so that no more than a shard is held beside them."""
        parts = [list(parts_of(axis, n)) for axis, n in zip(axes, array.grid.shard_shape, strict=True)]
        records = np.arange(len(out))
        for part in itertools.product(*parts):
            box = tuple(interval for interval, _, _ in part)
            block = np.empty([len(out), *(b - a for a, b in box)], array.dtype)
            self._decode(array, start, box, block)
            into = np.ix_(records, *(numbers_of(at) for _, _, at in part))
            out[into] = block[np.ix_(records, *(numbers_of(at) for _, at, _ in part))]

    def _confirm(self, start: int, stop: int, error: FormatError | None = None) -> None:
        """After a read of records, make sure that they are still those of this state.

        A resume with ``at``, or a new store in the place of this one, may have replaced them meanwhile, and then
        what was read, or was missing, belongs to another run.
        """
        data = self._store.read(MANIFEST_KEY)
        if data is not None and data != self._newest[0]:
            self._newest = data, Manifest.from_bytes(data)
        known, newest = self.manifest, self._newest[1]
        if (
            data is None
            or newest.store_id != known.store_id
            or raised_inside(newest.floors, start, stop, known.commit_seq)
        ):
            raise StoreError(
                f"{self._store.url}: what was read as of commit {known.commit_seq} was dropped or replaced since "
                f"(epoch {newest.epoch}, read as of {known.epoch}): call refresh()",
                kind="superseded",
            ) from error
        if error is not None:
            raise error

    def _series(self, array: ArraySpec, start: int, stop: int) -> NDArray[Any]:
        out, error = _room(array.name, [stop - start], array.dtype), None
        try:
            self._arrays.read_series(array, start, out)
        except FormatError as found:
            error = found
        if stop > start:
            self._confirm(start, stop, error)
        return out

    def refresh(self) -> bool:
        """Look for a newer committed state; return whether there is one.

        Collective.

        Raises
        ------
        FormatError
            On every rank, when the manifest is gone or damaged.
        """
        known = self.manifest
        data = self._channel.exchange(
            "refresh", answer=lambda votes: [_checked_manifest(self._store).decode()] * len(votes)
        )
        manifest = Manifest.from_bytes(data.encode())
        is_new = (manifest.run_id, manifest.commit_seq) != (known.run_id, known.commit_seq)
        if is_new:
            self._set(manifest)
        return is_new

    def follow(self, timeout: float = 60.0) -> Iterator[int]:
        """Yield the number of each record, those committed by now first and then as they come.

        Not collective.

        Parameters
        ----------
        timeout
            End when nothing new was committed for so many seconds.

        Notes
        -----
        It polls the manifest, which always exists, and never the name of a record that is not there yet:
        a network file system may remember for half a minute that a name was missing.
        """
        seen: Ranges = ()
        deadline = time.monotonic() + timeout
        while True:
            for record in members(difference(self.committed, seen)):
                yield record
                deadline = time.monotonic() + timeout
            seen, known = self.committed, self.manifest
            if self.refresh():
                if self.manifest.store_id != known.store_id:
                    seen = ()  # another store in the place of this one
                # Records that were dropped or invalidated were replaced, or will be: those are yielded again.
                floors = self.manifest.floors
                seen = ranges_of(r for r in members(seen) if floor_of(floors, r) <= known.commit_seq)
                continue
            if time.monotonic() > deadline:
                return
            time.sleep(min(_POLL_SECONDS, timeout))

    def to_zarr(self) -> Any:
        """Return the store as a read-only ``zarr.Group``, exactly as it is committed.

        Not collective.
        """
        from mpistream.zarr3.snapshot import open_group  # noqa: PLC0415 (it imports zarr)

        return open_group(self._store, self.manifest)

    def to_xarray(self) -> Any:
        """Return the store as an ``xarray.Dataset``, lazily read, exactly as it is committed.

        Not collective.
        """
        import xarray  # noqa: PLC0415

        return xarray.open_zarr(self.to_zarr().store, consolidated=True)

    def close(self) -> None:
        """Release the communicator of a reader that was opened with one.

        Collective.
        """
        if self._channel.size > 1 and self._channel.is_usable():
            self._channel.exchange("close")
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
        else:
            # The other ranks must not wait for this one in their next call.
            self._channel.post_leave(exc)


def _room(name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array for what is read; how large it is may be what a store claims."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise SchemaError(
            f"{name!r}: {' x '.join(map(str, shape))} values of {dtype.name} are too many for memory; read a smaller "
            "region",
            kind="region",
        ) from error


def _held_box(array: ArraySpec, region: Region) -> Box:
    """The box of an array that a rank with this region holds; of a staggered dim what follows from the other one."""
    boxes = held_boxes(array.grid, region.dims, region)
    if len(boxes) > 1:
        raise SchemaError(f"{region!r} has {len(boxes)} boxes; read them one by one, see .boxes", kind="region")
    return boxes[0]


def open_reader(url: str | os.PathLike[str], *, comm: Any = None) -> StoreReader:
    """Open a store for reading.

    Collective.

    Parameters
    ----------
    url
        Folder of the store: a stream, or any Zarr hierarchy or array.
    comm
        An mpi4py communicator or a Fortran handle (int): rank 0 alone reads the manifest, and all ranks see
        the same state. Without it, this process reads for itself; that is fine under MPI, too.

    Raises
    ------
    FormatError
        On every rank: no Zarr store there, or a damaged manifest.

    Notes
    -----
    A Zarr store that is no stream has no records, but `StoreReader.hierarchy` lists it and
    `StoreReader.read_array` reads its arrays.
    """
    store: ReadableStore | None = None
    failure: MPIStreamError | None = None
    try:
        store = open_readable(url)
    except MPIStreamError as error:
        failure = error
    transport = SerialTransport() if comm is None else connect(comm, _COLLECTIVE_TIMEOUT)
    channel = Channel(transport, _COLLECTIVE_TIMEOUT)

    def answer(votes: list[Any]) -> list[str | None]:
        assert store is not None
        return [_found(store)] * len(votes)

    try:
        data = channel.exchange("open_reader", digest=str(url), failure=failure, answer=answer)
    except MPIStreamError:
        channel.close_failed()
        raise
    assert store is not None
    return StoreReader(store, None if data is None else Manifest.from_bytes(data.encode()), channel)


def _found(store: ReadableStore) -> str | None:
    """Return the manifest, None for a Zarr store without one."""
    data = store.read(MANIFEST_KEY)
    if data is None:
        if FOLDER not in store.list() and ForeignStore(store).has_root():
            return None
        data = _manifest_bytes(store)
    Manifest.from_bytes(data)
    return data.decode()


def _checked_manifest(store: ReadableStore) -> bytes:
    data = _manifest_bytes(store)
    Manifest.from_bytes(data)
    return data


def read_record(
    url: str | os.PathLike[str], name: str, index: int, region: Mapping[str, Any] | None = None
) -> NDArray[Any]:
    """Return one committed record of a variable; see `StoreReader.read_record`.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    name, index, region
        As in `StoreReader.read_record`.
    """
    return open_reader(url).read_record(name, index, region)


def read_static(url: str | os.PathLike[str], name: str, region: Mapping[str, Any] | None = None) -> NDArray[Any]:
    """Return a committed static or a coordinate; see `StoreReader.read_static`.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    name, region
        As in `StoreReader.read_static`.
    """
    return open_reader(url).read_static(name, region)


def read_output_manifest(url: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest as JSON types, once its checksum is verified.

    Not collective.

    Raises
    ------
    FormatError
        No store of mpistream there, or a damaged manifest.
    """
    return parse_json(MANIFEST_KEY, _checked_manifest(open_readable(url)))


def read_blob(url: str | os.PathLike[str], key: str, scope: int | str = "static", writer: int = 0) -> bytes:
    """Return a committed blob; see `StoreReader.read_blob`.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    key, scope, writer
        As in `StoreReader.read_blob`.
    """
    return open_reader(url).read_blob(key, scope, writer)

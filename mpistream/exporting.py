"""A stream as one netCDF-4 file, by one process or by all ranks of a communicator.

Order: all ranks see the same committed state and check what is asked for; rank 0 makes the file under another name,
with all metadata and what is small; then every rank reads its boxes of every record and writes them; when all are
done, rank 0 gives the file its name. So under that name there is never a part of an export.

Memory: a rank holds its box of one record of one variable. Where inner chunks hold several records, it is the box of
these, so that each chunk is decoded once: up to 64 MiB, and of larger ones a part, in slabs of about a record. HDF5
serves one thread at a time: every block is read from the store before HDF5 is called, and never inside such a call.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.agreement import Channel
from mpistream.array_reader import slices
from mpistream.arrays import ArraySpec, Role
from mpistream.comm import Transport, connect, for_mpi_library
from mpistream.errors import MPIStreamError, SchemaError, StoreError, as_ours
from mpistream.grid import split_units
from mpistream.netcdf import attribute_value, file_values, netcdf_variable
from mpistream.netcdf_file import FileLayout, create_file, h5py_package
from mpistream.ranges import covers
from mpistream.reader import StoreReader, open_reader
from mpistream.selection import Selection, groups_of, select, slabs_of
from mpistream.tiling import Box, box_intersection, box_n_cells

__all__ = ["Exported", "export"]

_SUFFIXES = (".nc", ".nc4", ".h5", ".hdf5")
_TIMEOUT = 600.0
_MAX_DEFLATE = 9
# Records of an inner chunk are read together up to so many bytes.
_MAX_TOGETHER = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was exported."""

    path: str
    n_records: int
    n_gaps: int
    """Records among them that are not committed: their cells are fill value."""
    nbytes: int
    """Of values in the file, before compression."""
    left_out: tuple[str, ...]
    """Statics that are not committed."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types.

        Not collective.
        """
        return {
            "path": self.path,
            "n_records": self.n_records,
            "n_gaps": self.n_gaps,
            "nbytes": self.nbytes,
            "left_out": list(self.left_out),
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box that one rank reads and writes."""

    array: ArraySpec
    records: range | None
    """Ascending, and all that lie between are committed, too; None of an array without time."""
    box: Box
    target: tuple[slice, ...]


def export(
    url: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    comm: Any = None,
    variables: Iterable[str] | None = None,
    records: int | slice | range | Sequence[int] | None = None,
    region: Mapping[str, Any] | None = None,
    deflate: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Exported:
    """Write the committed records of a stream into a netCDF-4 file, which is an HDF5 file.

    Collective.

    Parameters
    ----------
    url
        Folder of the store.
    path
        The file, named ``*.nc``, ``*.nc4``, ``*.h5`` or ``*.hdf5``; all ranks must see it.
    comm
        An mpi4py communicator or a Fortran handle: all its ranks read and write, which takes an h5py that was built
        with the same MPI. Without it this process does it alone.
    variables
        Names of variables, statics and coordinates; by default all. Coordinates of what is named come along.
    records
        A number, a slice, a range or (start, stop); by default all.
    region
        Dim -> (start, stop); a dim left out is whole, one that is staggered over a named one follows it.
    deflate
        Level of compression from 1 to 9, 0 for none; several ranks can't compress.
    overwrite
        Whether a file of that name may be replaced.
    progress
        Called on rank 0 now and then with the bytes that are done and those there are.

    Returns
    -------
    What was exported, the same on every rank.

    Raises
    ------
    SchemaError
        On every rank, before anything is written: a bad name, record, region or level, or a file that is there.
    FormatError, StoreError
        On every rank: the store can't be read, the file can't be written, h5py is missing or has no MPI. The file
        under that name is as it was.

    Notes
    -----
    Values are those of the store, bit by bit; floats of 16 bits become 32. Blobs are not exported.
    """
    began = time.monotonic()
    reader = open_reader(url, comm=comm)
    with reader:
        transport = connect(comm, _TIMEOUT)
        channel = Channel(transport, _TIMEOUT)
        try:
            job = _agree(channel, reader, os.fspath(path), variables, records, region, deflate, overwrite)
            job.run(transport, progress)
        except MPIStreamError:
            channel.close_failed()
            raise
        channel.close()
    n_gaps = sum(not covers(reader.committed, i) for i in job.selection.records)
    return Exported(
        path=job.path,
        n_records=len(job.selection.records),
        n_gaps=n_gaps,
        nbytes=job.nbytes,
        left_out=job.selection.left_out,
        seconds=time.monotonic() - began,
    )


def _agree(
    channel: Channel,
    reader: StoreReader,
    path: str,
    variables: Any,
    records: Any,
    region: Any,
    deflate: int,
    overwrite: bool,
) -> _Job:
    """Return the job, once every rank has found it right and the same."""
    job, failure = None, None
    names = variables if variables is None or isinstance(variables, str) else list(variables)
    try:
        selection = select(reader.manifest, variables=names, records=records, region=region)
        _check_target(path, deflate, channel.size, overwrite)
        job = _Job(channel, reader, path, selection, deflate)
    except MPIStreamError as error:
        failure = error
    asked = f"{path} {names} {records} {region} {deflate} {overwrite}"
    channel.exchange("export", digest=asked, failure=failure)
    assert job is not None
    return job


def _check_target(path: str, deflate: Any, n_ranks: int, overwrite: bool) -> None:
    if not path.endswith(_SUFFIXES):
        raise SchemaError(f"export to {path!r}: name the file {', '.join('*' + s for s in _SUFFIXES)}", kind="path")
    if isinstance(deflate, bool) or not isinstance(deflate, int) or not 0 <= deflate <= _MAX_DEFLATE:
        raise SchemaError(f"deflate {deflate!r}: give a level from 0 to {_MAX_DEFLATE}", kind="deflate")
    if deflate and n_ranks > 1:
        raise SchemaError(
            f"deflate {deflate} on {n_ranks} ranks: HDF5 compresses in parallel in collective writes only; leave it "
            "out, or export on one process",
            kind="deflate",
        )
    if os.path.lexists(path) and not overwrite:
        raise SchemaError(f"{path} is there already; choose another name, or pass overwrite=True", kind="exists")
    h5py = h5py_package()
    if n_ranks > 1 and not h5py.get_config().mpi:
        raise StoreError(
            f"h5py {h5py.version.version} was built without MPI, so {n_ranks} ranks can't write one file; export on "
            "one process, or install an h5py that was built with this MPI (HDF5_MPI=ON)",
            kind="no_parallel_hdf5",
        )


class _Job:
    """One export, as every rank sees it."""

    def __init__(self, channel: Channel, reader: StoreReader, path: str, selection: Selection, deflate: int) -> None:
        self.path = path
        self.selection = selection
        self._channel = channel
        self._reader = reader
        # Beside the file, so that it can be renamed.
        self._part = f"{path}.part"
        self._variables = [
            netcdf_variable(
                a,
                selection.shape_of(a),
                is_over_time=selection.is_over_time(a),
                is_packed=deflate > 0,
            )
            for a in selection.arrays
        ]
        self._deflate = deflate
        self.nbytes = sum(
            int(np.prod(v.shape, dtype=np.int64)) * v.dtype.itemsize for v in self._variables if v.dtype is not None
        )

    def run(self, transport: Transport, progress: Callable[[int, int], object] | None) -> None:
        channel = self._channel
        is_placed = False
        try:
            channel.exchange("make the file", answer=self._make)
            self._write(transport, progress if channel.rank == 0 else None)
            channel.exchange("name the file", answer=self._place)
            is_placed = True
        finally:
            if channel.rank == 0 and not is_placed:
                with contextlib.suppress(OSError):
                    os.unlink(self._part)

    def _make(self, votes: list[Any]) -> list[Any]:
        """Make the file with all that the owner of a stream writes."""
        selection = self.selection
        used = {d for a in selection.arrays for d in a.dims}
        lengths = {d: stop - start for d, (start, stop) in selection.box.items() if d in used}
        layout = FileLayout(
            time_dim=selection.time_dim,
            dims={selection.time_dim: len(selection.records), **lengths},
            variables=self._variables,
            attrs={name: attribute_value(value) for name, value in self._reader.schema.attrs.items()},
            deflate=self._deflate,
            is_allocated=self._channel.size > 1,
            has_gaps=any(not covers(self._reader.committed, i) for i in selection.records),
        )
        values = {a.name: file_values(self._small(a)) for a in selection.arrays if not a.is_sharded}
        with _hdf5_errors(self._part):
            create_file(self._part, layout, values)
        return [None] * len(votes)

    def _small(self, array: ArraySpec) -> NDArray[Any]:
        """Return what the owner wrote of an array."""
        reader, selection = self._reader, self.selection
        if array.name not in reader.schema.arrays:
            values = reader.read_array(array.name)
            return values[selection.records] if array.dims else values
        if array.role is not Role.SERIES:
            return reader.read_static(array.name, dict(zip(array.dims, selection.box_of(array), strict=True)))
        records = selection.records
        # One look at the store for all of them, where they are all committed.
        if all(covers(reader.committed, i) for i in records):
            if not records:
                return np.empty(0, array.dtype)
            return reader.read_array(array.name, [(records[0], records[-1] + 1)])[:: records.step]
        found = np.full(len(records), array.fill)
        for k, i in enumerate(records):
            if covers(reader.committed, i):
                found[k] = reader.read_record(array.name, i)
        return found

    def _write(self, transport: Transport, progress: Callable[[int, int], object] | None) -> None:
        """Write this rank's boxes, record by record; what goes wrong on one rank is raised on all."""
        h5py, comm = h5py_package(), for_mpi_library(transport)
        access = {} if comm is None else {"driver": "mpio", "comm": comm}
        with _hdf5_errors(self._part):
            # Collective with MPI: all have just had rank 0's answer, so all come here.
            file = h5py.File(self._part, "r+", **access)
        n_done, error = 0, None
        try:
            for pieces in self._steps():
                if progress is not None:
                    # The other ranks have boxes of about the same size.
                    progress(min(self.nbytes, n_done * self._channel.size), self.nbytes)
                n_done += self._write_together(file, pieces)
        except MPIStreamError as found:
            error = found
            raise
        finally:
            # Closing is collective, too: not where a rank may be missing.
            if comm is None or error is None or error.kind not in ("timeout", "left"):
                with _hdf5_errors(self._part):
                    file.close()
        if progress is not None:
            progress(self.nbytes, self.nbytes)

    def _write_together(self, file: Any, pieces: Sequence[_Piece]) -> int:
        """Write the pieces of one step and wait for the other ranks: the deadline is one of a record, not of a file."""
        failure, n_done = None, 0
        try:
            for piece in pieces:
                values = file_values(self._read(piece))
                with _hdf5_errors(self._part):
                    file[piece.array.name][piece.target] = values
                n_done += values.nbytes
        except Exception as error:  # noqa: BLE001 - every rank has to hear of it, whatever it is
            failure = as_ours(error, self._channel.rank)
            failure.__cause__ = error
        self._channel.exchange("write the file", failure=failure)
        return n_done

    def _read(self, piece: _Piece) -> NDArray[Any]:
        name, records = piece.array.name, piece.records
        region: dict[str, Any] = dict(zip(piece.array.space_dims, piece.box, strict=True))
        if records is None:
            return self._reader.read_static(name, region)
        if len(records) == 1:
            return self._reader.read_record(name, records[0], region)[np.newaxis]
        region[self.selection.time_dim] = records[0], records[-1] + 1
        return self._reader.read_array(name, region)[:: records.step]

    def _steps(self) -> Iterator[list[_Piece]]:
        """Yield what this rank writes: statics, then record by record; of an array always the same box.

        Records that share inner chunks come with the first of them. There are as many steps on every rank.
        """
        boxes = {a.name: self._own_box(a) for a in self.selection.arrays if a.is_sharded}
        mine = [(a, box) for a in self.selection.arrays if a.is_sharded and (box := boxes[a.name]) is not None]
        yield [self._piece(a, None, box, ()) for a, box in mine if not a.has_time]
        records, committed = self.selection.records, self._reader.committed
        over_time = [a for a in self.selection.arrays if a.is_sharded and a.has_time]
        groups = {a.name: dict(groups_of(records, committed, a.resolved_chunk_shape[0])) for a in over_time}
        for k in sorted({k for of_array in groups.values() for k in of_array}):
            yield [
                self._piece(a, records[k : k + n], slab, (slice(k, k + n),))
                for a, box in mine
                if a.has_time and (n := groups[a.name].get(k, 0))
                for slab in self._slabs(a, records[k : k + n], box)
            ]

    def _slabs(self, array: ArraySpec, records: range, box: Box) -> list[Box]:
        if not box:
            return [box]
        # On edges of inner chunks, which are decoded whole; of chunks of the file, where those are encoded whole.
        file_chunks = {v.array.name: v.chunk_shape for v in self._variables}[array.name] if self._deflate else None
        nbytes = array.dtype.itemsize * box_n_cells(box) * (records[-1] + 1 - records[0])
        n = min(len(records), -(-nbytes // _MAX_TOGETHER))
        return slabs_of(box, n, (file_chunks or array.resolved_chunk_shape)[1])

    def _piece(self, array: ArraySpec, records: range | None, box: Box, lead: tuple[slice, ...]) -> _Piece:
        whole = self.selection.box_of(array)
        within = tuple((a - start, b - start) for (a, b), (start, _) in zip(box, whole, strict=True))
        return _Piece(array, records, box, (*lead, *slices(within)))

    def _own_box(self, array: ArraySpec) -> Box | None:
        units = split_units(array.grid.grid_shape, self._channel.size)[self._channel.rank]
        lengths = zip(units, array.grid.shard_shape, array.shape, strict=True)
        own = tuple((start * s, min(stop * s, n)) for (start, stop), s, n in lengths)
        return box_intersection(own, self.selection.box_of(array))

    def _place(self, votes: list[Any]) -> list[Any]:
        with _hdf5_errors(self.path):
            descriptor = os.open(self._part, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(self._part, self.path)
        return [None] * len(votes)


@contextlib.contextmanager
def _hdf5_errors(path: str) -> Iterator[None]:
    """Turn what h5py and the system raise into an error of ours that names the file."""
    try:
        yield
    except MPIStreamError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{path}: {type(error).__name__}: {error}", kind="hdf5", errno=getattr(error, "errno", None)
        ) from error

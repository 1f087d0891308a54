"""Reading a netCDF-4 or HDF5 file by region, so that every rank can take its own part of what a run starts from.

Each process opens the file for itself, without MPI. Values are those of the file: no scale, offset or missing value is
applied. The names of methods are those of `StoreReader`.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mpistream.array_reader import slices
from mpistream.errors import FormatError, MPIStreamError, SchemaError, StoreError, there_are
from mpistream.names import dtype_name
from mpistream.netcdf import DIMENSION_ONLY, own_values
from mpistream.netcdf_file import h5py_package
from mpistream.node import Node, box_of_region
from mpistream.strings import ANY_LENGTH, is_string

__all__ = ["HDF5Reader", "open_hdf5"]

# What the format keeps for itself ("NetCDF-4 format", "Attributes").
_HIDDEN = {
    *("CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS", "_NCProperties"),
    *("_Netcdf4Dimid", "_Netcdf4Coordinates", "_nc3_strict", "_NCCOPY"),
}


class HDF5Reader:
    """A netCDF-4 or HDF5 file; made by `open_hdf5`.

    Parameters
    ----------
    path
        The file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._h5py = h5py_package()
        try:
            self._file = self._h5py.File(path, "r")
        except FileNotFoundError as error:
            raise FormatError(f"{path}: no such file", kind="no_file") from error
        except OSError as error:
            # HDF5 says with one class that it can't read the file, and that it is none.
            raise FormatError(f"{path}: HDF5 can't open it: {error}", kind="hdf5") from error
        # Shapes and attributes are looked up once.
        self._known: dict[str, Node] = {}

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the file."""
        return self.attrs_of("")

    def attrs_of(self, path: str) -> dict[str, Any]:
        """Return the attributes of an array or a group, without those that netCDF keeps for itself.

        Not collective.

        Parameters
        ----------
        path
            As in `hierarchy`.

        Raises
        ------
        SchemaError
            Kind ``unknown`` when there is none.
        """
        return dict(self._node(path).attrs)

    def hierarchy(self) -> dict[str, Node]:
        """Return path -> node of all groups and arrays, sorted; the path of the file itself is empty.

        Not collective.
        """
        found = {"": self._node("")}

        def visit(name: str) -> None:
            node = self._found(name)
            if node is not None:
                found[name] = node

        with self._errors(""):
            self._file.visit(visit)
        return dict(sorted(found.items(), key=lambda item: item[0].split("/")))

    @property
    def record_dim(self) -> str | None:
        """The dim that is unlimited, if the file has exactly one."""
        with self._errors(""):
            names = [n for n, d in self._file.items() if self._is_scale(d) and d.maxshape == (None,)]
        return names[0] if len(names) == 1 else None

    @property
    def n_records(self) -> int:
        """Length of the unlimited dim."""
        with self._errors(""):
            return int(self._file[self._record_dim()].shape[0])

    @property
    def times(self) -> NDArray[Any]:
        """Values of the unlimited dim's coordinate, in the file's units."""
        return self.read_array(self._record_dim())

    def read_array(self, path: str, region: Any = None) -> NDArray[Any]:
        """Return a region of an array.

        Not collective.

        Parameters
        ----------
        path
            As in `hierarchy`.
        region
            Dim -> (start, stop), a dim left out is whole; or a sequence of one (start, stop) for each axis,
            which is the way where an axis has no name. A writer's ``region`` may name dims that the array lacks,
            where all of its axes have names.

        Returns
        -------
        The region's cells, in native byte order; strings as numpy's ``StringDType``.

        Raises
        ------
        SchemaError
            No such array; a region outside it.
        FormatError
            HDF5 can't read it, or it has a type that numpy has no form for.
        """
        node = self._array(path)
        box = box_of_region(node, region)
        with self._errors(path):
            dataset = self._file[path]
            values = dataset.asstr()[slices(box)] if self._is_text(dataset) else dataset[slices(box)]
        found = np.asarray(values)
        if found.dtype.kind == "O" or self._is_text(dataset):
            return found.astype(ANY_LENGTH)
        return own_values(found, node.attrs)

    def read_record(self, name: str, index: int, region: Mapping[str, Any] | None = None) -> NDArray[Any]:
        """Return one record of a variable whose first dim is the unlimited one.

        Not collective.

        Parameters
        ----------
        name
            The variable.
        index
            The record; negative counts from the last.
        region
            Dim -> (start, stop); a dim left out is whole.

        Raises
        ------
        SchemaError
            An array without records, a record that is not there, a region outside the array.
        FormatError
            As `read_array`.
        """
        node, time_dim = self._array(name), self._record_dim()
        if (node.dims or ())[:1] != (time_dim,):
            raise SchemaError(f"{name!r} with dims {node.dims} has no records; read_array() reads it", kind="unknown")
        assert node.shape is not None
        n, i = node.shape[0], operator.index(index)
        if not -n <= i < n:
            raise SchemaError(f"record {i} of {name!r}: {there_are(n, 'record')}", kind="index")
        box = box_of_region(node, region)[1:]
        return np.asarray(self.read_array(name, [(i % n, i % n + 1), *box])[0])

    def read_static(self, name: str, region: Mapping[str, Any] | None = None) -> NDArray[Any]:
        """Return an array; see `read_array`.

        Not collective.

        Parameters
        ----------
        name, region
            As in `read_array`.
        """
        return self.read_array(name, region)

    def close(self) -> None:
        """Close the file.

        Not collective.
        """
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HDF5Reader({self.path!r})"

    def _record_dim(self) -> str:
        name = self.record_dim
        if name is None:
            raise SchemaError(
                f"{self.path}: not exactly one dim is unlimited, so nothing says what a record is; read_array() reads "
                "by region",
                kind="records",
            )
        return name

    def _array(self, path: str) -> Node:
        node = self._node(path)
        if node.kind == "group":
            raise SchemaError(f"{path!r} is a group; hierarchy() lists its arrays", kind="unknown")
        return node

    def _node(self, path: str) -> Node:
        node = self._found(path) if isinstance(path, str) else None
        if node is None:
            raise SchemaError(f"there is no array or group {path!r} in {self.path}; see hierarchy()", kind="unknown")
        return node

    def _found(self, path: str) -> Node | None:
        """Return the node at a path; None for what is none: types, and dims that are no variables."""
        if path in self._known:
            return self._known[path]
        with self._errors(path):
            item = self._file.get(path or "/")
            if isinstance(item, self._h5py.Group):
                node = Node(path=path, kind="group", attrs=self._attributes(item))
            elif isinstance(item, self._h5py.Dataset) and item.shape is not None and not self._is_dim_only(item):
                node = self._array_node(path, item)
            else:
                return None
        self._known[path] = node
        return node

    def _array_node(self, path: str, item: Any) -> Node:
        attrs = self._attributes(item)
        is_bool = item.dtype == np.int8 and attrs.get("dtype") == "bool"
        dtype = np.dtype(bool) if is_bool else ANY_LENGTH if self._is_text(item) else item.dtype
        return Node(
            path=path,
            kind="array",
            attrs=attrs,
            shape=item.shape,
            dtype=dtype_name(dtype) if dtype.kind in "biufcT" or is_string(dtype) else str(dtype),
            dims=self._dims(path, item),
            chunk_shape=item.chunks or item.shape,
        )

    def _dims(self, path: str, item: Any) -> tuple[str | None, ...]:
        if self._is_scale(item) and len(item.shape) == 1:
            return (path.rpartition("/")[2],)
        attached = [list(axis.values()) for axis in item.dims]
        return tuple(scales[0].name.rpartition("/")[2] if scales else None for scales in attached)

    @staticmethod
    def _is_scale(item: Any) -> bool:
        return bytes(np.asarray(item.attrs.get("CLASS", b"")).astype("S")) == b"DIMENSION_SCALE"

    def _is_dim_only(self, item: Any) -> bool:
        name = item.attrs.get("NAME", b"")
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        return self._is_scale(item) and text.startswith(DIMENSION_ONLY)

    def _is_text(self, item: Any) -> bool:
        return self._h5py.check_string_dtype(item.dtype) is not None

    def _attributes(self, item: Any) -> dict[str, Any]:
        return {name: self._plain(value) for name, value in item.attrs.items() if name not in _HIDDEN}

    def _plain(self, value: Any) -> Any:
        """Return an attribute as a str, a number, or a list; netCDF has numbers in arrays of one."""
        if isinstance(value, self._h5py.Empty):
            return ""
        if isinstance(value, np.ndarray):
            items = [self._plain(item) for item in value.reshape(-1)]
            return items[0] if len(items) == 1 else items
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        return value.item() if isinstance(value, np.generic) else value

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        if not self._file:
            raise StoreError(f"{self.path} is closed; open it again", kind="closed")
        try:
            yield
        except MPIStreamError:
            raise
        # Whatever h5py makes of a file that is damaged, or of a type that it does not know.
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            what = f"array {path!r} of {self.path}" if path else self.path
            raise FormatError(f"{what}: HDF5 can't read it: {error}", kind="hdf5") from error


def open_hdf5(path: str | os.PathLike[str]) -> HDF5Reader:
    """Open a netCDF-4 or HDF5 file for reading by region.

    Not collective.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    FormatError
        No such file, or none that HDF5 can open.
    StoreError
        Kind ``missing_package`` without h5py.

    Notes
    -----
    Every rank may open the same file and read its own part; that takes no h5py with MPI.
    """
    return HDF5Reader(os.fspath(path))

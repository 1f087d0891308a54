"""Making a netCDF-4 file with h5py: dims as dimension scales, variables with attributes, no values but the owner's.

One process makes the file and closes it; then whoever writes the large variables opens it again. So everything that
HDF5 can't do in parallel without every process (metadata) or at all (strings) is done by the time it is opened
through MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream._version import __version__
from mpistream.errors import StoreError
from mpistream.netcdf import COMPLEX_TYPES, DIMENSION_ONLY, NetcdfVariable

__all__ = ["FileLayout", "create_file", "h5py_package"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """What the file is to hold."""

    time_dim: str
    dims: Mapping[str, int]
    """Dim -> length, the time dim first; it is unlimited."""
    variables: Sequence[NetcdfVariable]
    attrs: Mapping[str, Any]
    deflate: int
    """Level of compression, 0 for none."""
    is_allocated: bool
    """Whether all chunks get their place now: whoever opens the file through MPI can't give it them later."""
    has_gaps: bool
    """Whether cells will be left that nobody writes."""


def h5py_package() -> Any:
    """Return the package h5py.

    Not collective.

    Raises
    ------
    StoreError
        Kind ``missing_package``, with how to get it.
    """
    try:
        import h5py  # noqa: PLC0415 (optional, and heavy)
    except ImportError as error:
        raise StoreError(f'h5py is missing ({error}): pip install "mpistream[hdf5]"', kind="missing_package") from error
    return h5py


def create_file(path: str, layout: FileLayout, values: Mapping[str, NDArray[Any]]) -> None:
    """Make a netCDF-4 file; one that is there is replaced.

    Not collective.

    Parameters
    ----------
    path
        Where.
    layout
        What it holds.
    values
        Variable -> its values as they stand in the file, for those that are written now.
    """
    h5py = h5py_package()
    # netCDF-C reads dims and variables in the order in which they were made, and asks for that order to be kept.
    with h5py.File(path, "w", track_order=True) as file:
        for variable in layout.variables:
            _create_variable(h5py, file, layout, variable)
        for number, (dim, length) in enumerate(layout.dims.items()):
            _create_dim(file, dim, length, number)
        for variable in layout.variables:
            dataset = file[variable.array.name]
            for axis, dim in enumerate(variable.array.dims):
                if dim != variable.array.name:
                    dataset.dims[axis].attach_scale(file[dim])
            for name, value in variable.attrs.items():
                _set_attribute(h5py, dataset.attrs, name, value)
            if variable.array.name in values:
                dataset[...] = values[variable.array.name]
        for name, value in layout.attrs.items():
            _set_attribute(h5py, file.attrs, name, value)
        versions = f"version=2,mpistream={__version__},h5py={h5py.version.version},hdf5={h5py.version.hdf5_version}"
        _set_attribute(h5py, file.attrs, "_NCProperties", versions)


def _create_variable(h5py: Any, file: Any, layout: FileLayout, variable: NetcdfVariable) -> None:
    dtype = h5py.string_dtype("utf-8") if variable.dtype is None else variable.dtype
    if dtype in COMPLEX_TYPES and COMPLEX_TYPES[dtype] not in file:
        file[COMPLEX_TYPES[dtype]] = dtype
    given: dict[str, Any] = {"dtype": file[COMPLEX_TYPES[dtype]] if dtype in COMPLEX_TYPES else dtype}
    if variable.fill is not None:
        given["fillvalue"] = variable.fill
    if variable.chunk_shape is not None:
        given["chunks"] = variable.chunk_shape
        is_over_time = variable.array.dims[:1] == (layout.time_dim,)
        given["maxshape"] = (None if is_over_time else variable.shape[0], *variable.shape[1:])
        if layout.deflate and variable.dtype is not None:
            given |= {"compression": "gzip", "compression_opts": layout.deflate, "shuffle": True}
    if layout.is_allocated and variable.dtype is not None:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5py.h5d.FILL_TIME_ALLOC if layout.has_gaps else h5py.h5d.FILL_TIME_NEVER)
        given["dcpl"] = creation
    file.create_dataset(variable.array.name, variable.shape, **given)


def _create_dim(file: Any, dim: str, length: int, number: int) -> None:
    if dim not in file:
        # Big-endian as netCDF-C has it; nobody writes a value, so it takes no room.
        file.create_dataset(dim, (length,), dtype=">f4")
        file[dim].make_scale(f"{DIMENSION_ONLY}{length:10}")
    else:
        file[dim].make_scale(dim)
    file[dim].attrs["_Netcdf4Dimid"] = np.int32(number)


def _set_attribute(h5py: Any, attrs: Any, name: str, value: Any) -> None:
    if isinstance(value, str):
        # Text of a fixed length is what netCDF calls char, and what every reader of netCDF takes.
        data = value.encode()
        if not data:
            attrs.create(name, value, dtype=h5py.string_dtype("utf-8"))
        else:
            attrs.create(name, np.array(data), dtype=h5py.string_dtype("utf-8", len(data)))
    elif isinstance(value, list):
        attrs.create(name, np.array(value, object), dtype=h5py.string_dtype("utf-8"))
    else:
        attrs.create(name, value)

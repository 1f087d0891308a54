"""A picture of one variable: a map with its coordinates, or a line, as PNG or whatever the file's name asks for.

matplotlib is imported here alone, inside the call, and without pyplot: nothing looks for a screen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import ArraySpec
from mpistream.cf import with_encoded_fill_value
from mpistream.errors import SchemaError, StoreError
from mpistream.info import decode_time
from mpistream.reader import StoreReader, open_reader
from mpistream.strings import is_string

__all__ = ["Picture", "draw", "picture"]

# More points than pixels only take time.
_MAX_CELLS = 1500
_MAP_DIMS = 2
_SIZE_INCHES = {1: (8.0, 4.5), 2: (8.0, 6.0)}
_DPI = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What stands along one dim."""

    dim: str
    values: NDArray[Any]
    """Of one dim, or of both dims of a map."""
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Values and what they are drawn over; a map has its second axis along x."""

    values: NDArray[Any]
    axes: tuple[Axis, ...]
    label: str
    title: str


def picture(
    url: str | os.PathLike[str], name: str, *, record: int | None = None, at: Mapping[str, str] | None = None
) -> Picture:
    """Read what is to be drawn.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    name
        A variable, static or coordinate.
    record
        Of a variable over time; by default the last committed one, or all of them, over time, where ``at`` leaves
        no other dim.
    at
        Dim -> value of its coordinate, of which the nearest is taken; of a dim without coordinate the index.

    Raises
    ------
    SchemaError
        An unknown name or dim, a record that is not committed, or more than two dims left.
    FormatError, StoreError
        As `StoreReader.read_record`.
    """
    with open_reader(url) as reader:
        array = reader.schema.arrays.get(name)
        if array is None:
            raise SchemaError(f"{name!r} is not among the arrays {list(reader.schema.arrays)}", kind="unknown")
        if is_string(array.dtype) or array.dtype.kind == "M":
            raise SchemaError(f"{name!r} holds {array.dtype}, which is not drawn", kind="dtype")
        chosen = {dim: _index_at(reader, array, dim, text) for dim, text in (at or {}).items()}
        left = tuple(d for d in array.space_dims if d not in chosen)
        region = {dim: (i, i + 1) for dim, (i, _) in chosen.items()}
        where = [label for _, label in chosen.values()]
        over_time = array.has_time and not left and record is None
        if over_time:
            values = np.array([reader.read_record(name, i, region).reshape(()) for i in _committed(reader)])
        elif array.has_time and reader.schema.is_location_series:
            raise SchemaError(
                f"{name!r} has a series at each location, which is not drawn; read_location gives one as an array",
                kind="mode",
            )
        elif array.has_time:
            i = _last_committed(reader) if record is None else record
            values = reader.read_record(name, i, region)
            where.insert(0, _time_text(reader, i))
        elif record is not None:
            raise SchemaError(f"{name!r} has no time; leave the record out", kind="index")
        else:
            values = reader.read_static(name, region)
        axes = (_time_axis(reader),) if over_time else tuple(_axis(reader, d) for d in left)
        values = values.reshape([len(values)] if over_time else [n for d, n in _sizes(array) if d in left])
        if not 1 <= len(axes) <= _MAP_DIMS:
            raise SchemaError(
                f"{name!r} has the dims {left} left, and one or two can be drawn; "
                f"{'choose another record' if not left else 'fix the others with --sel DIM=VALUE'}",
                kind="dims",
            )
        if len(axes) == _MAP_DIMS:
            axes = _with_auxiliary(reader, axes)
        return _thinned(_without_missing(array, values), axes, _label(array), ", ".join(w for w in where if w), name)


def _sizes(array: ArraySpec) -> list[tuple[str, int]]:
    return list(zip(array.space_dims, array.shape, strict=True))


def _committed(reader: StoreReader) -> list[int]:
    return [i for start, stop in reader.committed for i in range(start, stop)]


def _last_committed(reader: StoreReader) -> int:
    if not reader.committed:
        raise SchemaError("no record is committed yet", kind="index")
    return reader.committed[-1][1] - 1


def _time_text(reader: StoreReader, record: int) -> str:
    i = record % reader.n_records
    t = float(reader.read_array(reader.schema.time_dim, [(i, i + 1)])[0])
    time = reader.schema.time
    date = decode_time(t, time.units, time.calendar)
    return f"record {i}, {date or f't = {t:g} {time.units}'}"


def _time_axis(reader: StoreReader) -> Axis:
    time = reader.schema.time
    name = reader.schema.time_dim
    return Axis(dim=name, values=reader.times[_committed(reader)], label=f"{name} [{time.units}]")


def _index_at(reader: StoreReader, array: ArraySpec, dim: str, text: str) -> tuple[int, str]:
    """Return the index along a dim that a text names, and what to write about it."""
    sizes = dict(_sizes(array))
    if dim not in sizes:
        raise SchemaError(f"{array.name!r} has no dim {dim!r} without time; it has {array.space_dims}", kind="dims")
    coordinate = reader.schema.arrays.get(dim)
    values = np.arange(sizes[dim]) if coordinate is None else reader.read_static(dim)
    if is_string(values.dtype):
        found = np.flatnonzero(values == text)
        if not found.size:
            raise SchemaError(f"{dim} has no {text!r}; it has {values[:8].tolist()}", kind="sel")
        return int(found[0]), f"{dim} = {text}"
    try:
        wanted = values.dtype.type(text) if values.dtype.kind in "mM" else float(text)
    except ValueError:
        raise SchemaError(f"{dim} = {text!r}: give a number", kind="sel") from None
    i = int(np.abs(values - wanted).argmin())
    if coordinate is None and values[i] != wanted:
        raise SchemaError(f"{dim} has no coordinate: give an index from 0 to {sizes[dim] - 1}, not {text}", kind="sel")
    units = "" if coordinate is None else coordinate.attrs.get("units", "")
    return i, f"{dim} = {values[i]:g} {units}".rstrip() if values.dtype.kind not in "mM" else f"{dim} = {values[i]}"


def _axis(reader: StoreReader, dim: str) -> Axis:
    array = reader.schema.arrays.get(dim)
    length = reader.schema.dims[dim]
    n = reader.n_records if length is None else length  # of locations
    if array is None:
        return Axis(dim=dim, values=np.arange(n), label=f"{dim} (index)")
    values = reader.read_static(dim)
    # Names have no place on a scale: the index has.
    return Axis(dim=dim, values=np.arange(n) if is_string(values.dtype) else values, label=_label(array))


def _with_auxiliary(reader: StoreReader, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Put two-dimensional coordinates, such as latitude and longitude, in the place of indices."""
    if any(a.label != f"{a.dim} (index)" for a in axes):
        return axes
    dims = tuple(a.dim for a in axes)
    found: dict[str, Axis] = {}
    for name in reader.schema.coords:
        array = reader.schema.arrays[name]
        axis = _geographic(array)
        is_there = array.values is not None or array.digest is not None or name in reader.manifest.statics
        if array.dims == dims and axis and is_there:
            found[axis] = Axis(dim=name, values=reader.read_static(name), label=_label(array))
    return (found["Y"], found["X"]) if {"X", "Y"} <= set(found) else axes


def _geographic(array: ArraySpec) -> str:
    """Return which axis a coordinate is (CF conventions, section 4): Y, X or none."""
    units, standard = str(array.attrs.get("units", "")), str(array.attrs.get("standard_name", ""))
    if standard == "latitude" or units in ("degrees_north", "degree_north", "degrees_N"):
        return "Y"
    if standard == "longitude" or units in ("degrees_east", "degree_east", "degrees_E"):
        return "X"
    return str(array.attrs.get("axis", ""))


def _label(array: ArraySpec) -> str:
    attrs = array.zarr_attrs
    name = attrs.get("long_name") or attrs.get("standard_name") or array.name
    units = attrs.get("units")
    return f"{name} [{units}]" if units else str(name)


def _without_missing(array: ArraySpec, values: NDArray[Any]) -> NDArray[Any]:
    """Return values as real numbers, NaN where one is missing."""
    if values.dtype.kind == "m":
        return np.where(np.isnat(values), np.nan, values.view("int64").astype("float64"))
    if values.dtype.kind == "c":
        return np.asarray(np.abs(values))
    _, missing = with_encoded_fill_value(array.name, array.attrs, array.dtype)
    numbers = values.astype("float64")
    return numbers if missing is None else np.where(values == missing, np.nan, numbers)


def _thinned(values: NDArray[Any], axes: tuple[Axis, ...], label: str, where: str, name: str) -> Picture:
    steps = [-(-n // _MAX_CELLS) for n in values.shape] if len(axes) == _MAP_DIMS else [1]
    picked = tuple(slice(None, None, step) for step in steps)
    thin = tuple(
        Axis(dim=a.dim, values=a.values[picked if a.values.ndim > 1 else picked[i]], label=a.label)
        for i, a in enumerate(axes)
    )
    return Picture(values=values[picked], axes=thin, label=label, title=f"{name}: {where}" if where else name)


def draw(found: Picture, path: str | os.PathLike[str]) -> None:
    """Draw a picture into a file.

    Not collective.

    Parameters
    ----------
    found
        What to draw.
    path
        The file; its suffix says in which form.

    Raises
    ------
    StoreError
        matplotlib is missing, does not know the suffix, or the file can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (optional, and heavy)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise StoreError(
            f'matplotlib is missing ({error}): pip install "mpistream[plot]"', kind="missing_package"
        ) from error
    figure = Figure(figsize=_SIZE_INCHES[len(found.axes)], dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    if len(found.axes) == _MAP_DIMS:
        y, x = found.axes
        drawn = ax.pcolormesh(x.values, y.values, np.ma.masked_invalid(found.values), shading="nearest")
        figure.colorbar(drawn, ax=ax).set_label(_plain(found.label))
        ax.set_xlabel(_plain(x.label))
        ax.set_ylabel(_plain(y.label))
    else:
        ax.plot(found.axes[0].values, found.values)
        ax.set_xlabel(_plain(found.axes[0].label))
        ax.set_ylabel(_plain(found.label))
        ax.grid(alpha=0.3)
    ax.set_title(_plain(found.title))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"{os.fspath(path)}: {error}", kind="io", errno=getattr(error, "errno", None)) from error


def _plain(text: str) -> str:
    # Names are the user's: a dollar in them begins no formula.
    return text.replace("$", r"\$")

"""What of a stream is to be exported or compared: arrays by name, a range of records, a box of the grid."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpistream.arrays import ArraySpec, Role
from mpistream.errors import SchemaError, there_are
from mpistream.manifest import Manifest
from mpistream.ranges import Ranges, covers
from mpistream.region import box_of_mapping
from mpistream.schema import StreamSchema
from mpistream.tiling import Box, Interval

__all__ = ["Selection", "groups_of", "parse_bounds", "select", "slabs_of"]

_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Arrays, records and a box."""

    arrays: tuple[ArraySpec, ...]
    """In the schema's order, time and its companions first."""
    left_out: tuple[str, ...]
    """Statics that would belong to it and are not committed."""
    time_dim: str
    records: range
    box: Mapping[str, Interval]
    """(start, stop) of every dim but time."""

    def is_over_time(self, array: ArraySpec) -> bool:
        """Return whether an array's first dim is time: also the times themselves, where they are fixed."""
        return array.dims[:1] == (self.time_dim,)

    def box_of(self, array: ArraySpec) -> Box:
        """Return the box over an array's dims without time."""
        return tuple(self.box[d] for d in array.dims if d != self.time_dim)

    def shape_of(self, array: ArraySpec) -> tuple[int, ...]:
        """Return the shape of what is selected of an array, the time dim first where it has one."""
        lead = (len(self.records),) if self.is_over_time(array) else ()
        return (*lead, *(stop - start for start, stop in self.box_of(array)))


def select(
    manifest: Manifest,
    *,
    variables: Iterable[str] | None = None,
    records: int | slice | range | Sequence[int] | None = None,
    region: Mapping[str, Any] | None = None,
) -> Selection:
    """Return what a caller chose of a stream.

    Not collective.

    Parameters
    ----------
    manifest
        What is committed.
    variables
        Names of variables, statics and coordinates; None is all. The coordinates of what is named come along.
    records
        A number, a slice, a range or (start, stop); None is all. Negative numbers count from the end.
    region
        Dim -> (start, stop); a dim left out is whole. A dim that is staggered over a named one follows it.

    Raises
    ------
    SchemaError
        An unknown name or dim, records that are not there, no record at all, a static that is not committed.
    """
    schema = manifest.schema
    if schema.is_location_series:
        text = "a location series has locations as its records, and is not exported; xarray's to_netcdf writes it"
        raise SchemaError(text, kind="mode")
    chosen = _records(records, manifest.n_records)
    box = _box(schema, region)
    names, left_out = _names(manifest, variables)
    own = tuple(a for a in schema.own_arrays if a.dims or any(schema.arrays[n].keep_bits is not None for n in names))
    return Selection(
        arrays=(*own, *(a for name, a in schema.arrays.items() if name in names)),
        left_out=left_out,
        time_dim=schema.time_dim,
        records=chosen,
        box=box,
    )


def groups_of(records: range, committed: Ranges, extent: int) -> Iterator[tuple[int, int]]:
    """Yield which selected records are read together, first and number: committed ones that share inner chunks.

    Not collective.

    Parameters
    ----------
    records
        The selected ones.
    committed
        Those that can be read. Where others lie among them each is read by itself.
    extent
        Records of an inner chunk.
    """
    k = 0
    while k < len(records):
        first = records[k]
        n = min(len(records) - k, len(range(first, (first // extent + 1) * extent, records.step)))
        if not all(covers(committed, i) for i in range(first, records[k + n - 1] + 1)):
            n = 1
        if covers(committed, first):
            yield k, n
        k += n


def slabs_of(box: Box, n: int, edge: int) -> list[Box]:
    """Return a box, which has cells, in about so many parts along its first dim, cut on multiples of ``edge``.

    Not collective.
    """
    (start, stop), *others = box
    first = start - start % edge
    length = -(-(stop - first) // (n * edge)) * edge
    return [((max(start, a), min(stop, a + length)), *others) for a in range(first, stop, length)]


def parse_bounds(text: str) -> tuple[int | None, int | None]:
    """Return the bounds that ``"3"``, ``"2:10"``, ``":10"`` or ``"-2:"`` names; a number alone is that one.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``bounds``.
    """
    first, colon, last = text.partition(":")
    try:
        start = int(first) if first.strip() else None
        stop = int(last) if last.strip() else None
    except ValueError:
        start, colon = None, ""
    if not colon:
        if start is None:
            raise SchemaError(f"{text!r} is neither a number nor START:STOP", kind="bounds")
        # -1 is the last, and what follows it has no number.
        return start, (None if start == -1 else start + 1)
    return start, stop


def _records(records: Any, n: int) -> range:
    if records is None:
        return range(n)
    if isinstance(records, slice):
        # Not cut at the end, as Python does: who names records that are not there is told so.
        found = range(n)[records] if records.stop is None or records.stop <= n else range(0)
    elif isinstance(records, range):
        found = records
    elif isinstance(records, Sequence) and len(records) == _PAIR and not isinstance(records, str):
        found = range(*map(operator.index, records))
    else:
        try:
            i = operator.index(records)
        except TypeError:
            raise SchemaError(f"records {records!r}: give a number, a slice or (start, stop)", kind="records") from None
        found = range(i + n if i < 0 else i, (i + n if i < 0 else i) + 1)
    if not found or found.step < 1 or found[0] < 0 or found[-1] >= n:
        raise SchemaError(
            f"records {_records_text(records)}: {there_are(n, 'record')}; give a number or a range, ascending, "
            f"within 0:{n}",
            kind="records",
        )
    return found


def _records_text(records: Any) -> str:
    """Return what was asked for as ``START:STOP`` where it was a slice, as the command line has it."""
    if not isinstance(records, slice):
        return repr(records)
    parts = [records.start, records.stop, *(() if records.step is None else (records.step,))]
    return ":".join("" if part is None else str(part) for part in parts)


def _box(schema: StreamSchema, region: Mapping[str, Any] | None) -> dict[str, Interval]:
    sizes = {d: n for d, n in schema.dims.items() if n is not None}
    given = {} if region is None else region
    if not isinstance(given, Mapping):
        raise SchemaError(f"a region is a mapping dim -> (start, stop), not {type(given).__name__}", kind="region")
    if unknown := [d for d in given if d not in sizes]:
        raise SchemaError(f"region: {unknown[0]!r} is no dim without time; there are {list(sizes)}", kind="region")
    box = dict(zip(sizes, box_of_mapping(given, sizes), strict=True))
    for dim, staggered in schema.staggered.items():
        if dim not in given and staggered.dim in given:
            # Cells and the faces around them.
            start, stop = box[staggered.dim]
            box[dim] = start, stop + staggered.n_extra
    if empty := [d for d, (start, stop) in box.items() if start == stop]:
        raise SchemaError(f"region dim {empty[0]!r}: {box[empty[0]]} is empty", kind="region")
    return box


def _names(manifest: Manifest, variables: Iterable[str] | None) -> tuple[set[str], tuple[str, ...]]:
    schema = manifest.schema
    missing = {n for n, a in schema.arrays.items() if a.role is Role.STATIC and n not in manifest.statics}
    if variables is None:
        return set(schema.arrays) - missing, tuple(n for n in schema.arrays if n in missing)
    named = {variables} if isinstance(variables, str) else set(variables)
    own = {a.name for a in schema.own_arrays}
    if unknown := sorted(named - set(schema.arrays) - own):
        raise SchemaError(f"{unknown[0]!r} is not among the arrays {list(schema.arrays)}", kind="unknown")
    if absent := sorted(named & missing):
        raise SchemaError(f"static {absent[0]!r} is not committed", kind="not_committed")
    named -= own
    dims = {d for n in named for d in schema.arrays[n].space_dims}
    coordinates = {n for n in schema.coords if set(schema.arrays[n].dims) <= dims}
    # Boundary variables have a dim that nothing else has.
    parents = (schema.time_array, *(schema.arrays[n] for n in named | coordinates))
    bounds = {a.attrs[key] for a in parents for key in ("bounds", "climatology") if a.attrs.get(key) in schema.arrays}
    named |= coordinates | bounds
    return named - missing, tuple(n for n in schema.arrays if n in named & missing)

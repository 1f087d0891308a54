"""Location series: what lies in their store, and which rank writes which locations.

A model of points runs one location after the other and has the whole series of it at the end. Here a location is a
record: it is written once, whole, by one rank, and it is committed or not. A row is a chunk of ``row_length``
locations, with all of their times, and has one writer, so ranks share no object:

* Without shares of their own, ranks get whole chunks: as many each that have locations to run, so that those who
  resume find the same work.
* A share that a caller gives may end amid a chunk. The chunk is then written by the rank that holds its first
  location; the others send it what they have of it when they commit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from mpistream.arrays import Role
from mpistream.block import as_array
from mpistream.description import Coordinate, IndexedTime, LocationTime, Variable
from mpistream.errors import SchemaError
from mpistream.ranges import Ranges, count, difference, union
from mpistream.region import AnyRegion, Region
from mpistream.schema import StreamSchema
from mpistream.tiling import Interval, prove_tiling

__all__ = [
    "LOCATION_DIM",
    "TIME_DIM",
    "chunk_locations",
    "location_schema",
    "prove_shares",
    "resolve_locations",
    "row_length",
    "shares_of",
    "written_records",
]

# On disk. Do not change; see FORMAT.md. The dim has the name of its coordinate, so that xarray selects by it.
LOCATION_DIM = "id"
TIME_DIM = "time"

_TARGET_NBYTES = 8 * 1024 * 1024
_MAX_LOCATIONS = 1024
# Each has a file a chunk, and a buffer of a chunk in memory.
_MAX_VARIABLES = 1000


def chunk_locations(
    n_times: int,
    per_worker: int,
    *,
    itemsize: int = 4,
    target_nbytes: int = _TARGET_NBYTES,
    cap: int = _MAX_LOCATIONS,
) -> int:
    """Return how many locations share a chunk, so that it holds about ``target_nbytes``.

    Not collective.

    Parameters
    ----------
    n_times
        Length of a series.
    per_worker
        Locations of one rank: a chunk has no more.
    itemsize
        Bytes of a value.
    target_nbytes
        Bytes of a chunk before compression.
    cap
        Most locations of a chunk.

    Raises
    ------
    SchemaError
        Kind ``layout``, for numbers that are no integers above 0.
    """
    given = {
        "n_times": n_times,
        "per_worker": per_worker,
        "itemsize": itemsize,
        "target_nbytes": target_nbytes,
        "cap": cap,
    }
    for name, n in given.items():
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise SchemaError(f"{name} {n!r}: give an integer above 0", kind="layout")
    return int(max(1, min(target_nbytes // (n_times * itemsize), cap, per_worker)))


def location_schema(
    ids: ArrayLike,
    times: IndexedTime | ArrayLike,
    variables: Mapping[str, Variable | DTypeLike],
    *,
    units: str | None = None,
    calendar: str = "proleptic_gregorian",
    chunk_locations: int | None = None,
    inner_locations: int | None = None,
    coords: Mapping[str, Coordinate | ArrayLike] | None = None,
    codec: str | Sequence[Mapping[str, Any]] = "series",
    attrs: Mapping[str, Any] | None = None,
) -> StreamSchema:
    """Describe a location series: arrays of locations x times, chunked by location.

    Not collective.

    Parameters
    ----------
    ids
        Name of every location, each another string.
    times
        The time axis of all series: numbers in ``units``, dates, or an `IndexedTime`, which has units of its own.
    variables
        Name -> dtype, or a `Variable` with the dims ``("id", "time")``.
    units, calendar
        CF units and calendar of ``times``; numbers need units, dates are counted in seconds since 1970 without.
    chunk_locations
        Locations of a chunk; by default chosen by `mpistream.chunk_locations` when the number of ranks is known.
    inner_locations
        Locations of an inner chunk, for readers that take one location: a divisor of ``chunk_locations``, which by
        default is not divided.
    coords
        What each location has once, such as ``lon``, ``lat`` and ``altitude``: name -> values, or a `Coordinate` with
        the dims ``("id",)``.
    codec
        Of variables and coordinates: by default Zstandard of level 3.
    attrs
        More attributes of the group.

    Raises
    ------
    SchemaError
        For ids that are no different strings, for more than one time axis, and as in `StreamSchema`.
    """
    if isinstance(times, Mapping):
        raise SchemaError(
            f"times of {', '.join(map(repr, times))}: a location series has one time axis; write a store for each",
            kind="time",
        )
    if isinstance(times, IndexedTime):
        axis = times
    elif units is None and as_array("times", times).dtype.kind in "iuf":
        raise SchemaError(
            "times are numbers: give units=, such as 'hours since 2000-01-31', or dates instead of numbers", kind="time"
        )
    else:
        axis = IndexedTime(times, units=units or "seconds since 1970-01-01", calendar=calendar)
    names = Coordinate((LOCATION_DIM,), _checked_ids(ids), dtype=str, attrs={"cf_role": "timeseries_id"})
    n_locations, n_times = len(np.asarray(names.values)), axis.n_records
    if not isinstance(variables, Mapping) or not variables:
        raise SchemaError(f"variables {variables!r}: give a mapping name -> dtype or Variable", kind="schema")
    if len(variables) > _MAX_VARIABLES:
        raise SchemaError(
            f"{len(variables)} variables, at most {_MAX_VARIABLES} are possible in a location series: each is a file a "
            "chunk; put what belongs together along another store's time axis, or leave some out",
            kind="schema",
        )
    whole = {TIME_DIM: n_times}
    inner = inner_locations or chunk_locations
    return StreamSchema(
        dims={LOCATION_DIM: None, TIME_DIM: n_times},
        time=LocationTime(
            axis.times, n_records=n_locations, units=axis.units, calendar=axis.calendar, attrs=axis.attrs
        ),
        variables={n: v if isinstance(v, Variable) else Variable(_DIMS, v) for n, v in variables.items()},
        coords={LOCATION_DIM: names, **{n: _coordinate(c) for n, c in (coords or {}).items()}},
        shard_shape=whole if chunk_locations is None else {LOCATION_DIM: chunk_locations, **whole},
        chunk_shape=whole if inner is None else {LOCATION_DIM: inner, **whole},
        codec=codec,
        # CF conventions, section 9.4: a series a location, all with the same times (H.2.1).
        attrs={"Conventions": "CF-1.11", **(attrs or {}), "featureType": "timeSeries", "variables": list(variables)},
    )


_DIMS = (LOCATION_DIM, TIME_DIM)


def _coordinate(given: Coordinate | ArrayLike) -> Coordinate:
    return given if isinstance(given, Coordinate) else Coordinate((LOCATION_DIM,), given)


def _checked_ids(ids: ArrayLike) -> list[str]:
    # Not by numpy, which would make strings of anything.
    cells = list(np.asarray(ids, object).reshape(-1)) if not isinstance(ids, str) else []
    for i, cell in enumerate(cells):
        if not isinstance(cell, str) or not cell:
            raise SchemaError(f"id {cell!r} of location {i}: give a string", kind="ids")
    if not cells:
        raise SchemaError(f"ids {ids!r}: give one string for each location", kind="ids")
    found: dict[str, int] = {}
    for i, cell in enumerate(cells):
        if found.setdefault(cell, i) != i:
            raise SchemaError(f"id {cell!r} is that of locations {found[cell]} and {i}; ids differ", kind="ids")
    return [str(cell) for cell in cells]


def resolve_locations(schema: StreamSchema, n_writers: int) -> StreamSchema:
    """Return the schema of a location series with the chunks of its variables chosen.

    Not collective.

    Parameters
    ----------
    schema
        Lengths that it gives stand.
    n_writers
        Number of ranks.
    """
    variables = [a for a in schema.arrays.values() if a.role is Role.VARIABLE]
    n_times, n_records = variables[0].shape[0], schema.n_total or 0
    itemsize = max(a.dtype.itemsize for a in variables)
    given = [a.shard_shape[0] for a in variables if a.shard_shape[0] is not None]
    unit = math.lcm(*(a.chunk_shape[0] or 1 for a in variables))
    length = -(-chunk_locations(n_times, -(-n_records // n_writers), itemsize=itemsize) // unit) * unit
    length = given[0] if given else length
    layout = {
        a.name: (
            (a.shard_shape[0] or length, a.shard_shape[1] or n_times),
            (a.chunk_shape[0] or length, a.chunk_shape[1] or n_times),
        )
        for a in variables
    }
    return schema.with_layout(layout)


def _check_chunks(schema: StreamSchema) -> None:
    """Ranks share locations, not times, and so many locations for all variables."""
    length = row_length(schema)
    for a in schema.arrays.values():
        if a.role is not Role.VARIABLE:
            continue
        shard, (n_times,) = a.resolved_shard_shape, a.shape
        if shard[0] != length or shard[1] < n_times:
            raise SchemaError(
                f"variable {a.name!r} has chunks of {shard[0]} locations and {shard[1]} times; here all variables have "
                f"{length} locations a chunk, with all {n_times} times",
                kind="layout",
            )


def row_length(schema: StreamSchema) -> int:
    """Return how many locations share a chunk.

    Not collective.

    Parameters
    ----------
    schema
        A resolved schema.
    """
    return next(a.row_length for a in schema.arrays.values() if a.role is Role.VARIABLE)


def shares_of(schema: StreamSchema, n_writers: int, committed: Ranges = ()) -> list[Region]:
    """Return a share of the locations for each rank: whole chunks, as many each in which locations are missing.

    Not collective.

    Parameters
    ----------
    schema
        A resolved schema.
    n_writers
        Number of ranks; the last ones may get fewer chunks than the others, or none.
    committed
        Locations that are not missing.
    """
    n, length = schema.n_total or 0, row_length(schema)
    missing = difference(((0, n),), committed)
    chunks = union(*(((a // length, -(-b // length)),) for a, b in missing))
    each = -(-count(chunks) // n_writers)
    starts = [0]
    for rank in range(1, n_writers):
        first = _member(chunks, rank * each)
        starts.append(n if first is None else first * length)
    return [
        Region.of_box((schema.record_dim,), ((start, stop),))
        for start, stop in zip(starts, [*starts[1:], n], strict=True)
    ]


def _member(ranges: Ranges, at: int) -> int | None:
    """The number at a position of a set, None behind its end."""
    for start, stop in ranges:
        if at < stop - start:
            return start + at
        at -= stop - start
    return None


def prove_shares(schema: StreamSchema, regions: Sequence[AnyRegion]) -> list[Region]:
    """Prove that each location is in the share of one rank; return the shares.

    Not collective.

    Raises
    ------
    TilingError
        Shares that overlap or leave a hole, naming the ranks.
    SchemaError
        Kind ``region``, for a share that is not one range; kind ``layout``, for chunks that differ between variables.
    """
    _check_chunks(schema)
    shares: list[Region] = []
    for rank, region in enumerate(regions):
        if not isinstance(region, Region) or len(region.boxes) > 1:
            raise SchemaError(
                f"rank {rank} gave {region!r}; a share is one range, (start, stop)", kind="region", rank=rank
            )
        shares.append(region)
    prove_tiling("locations", (schema.record_dim,), (schema.n_total or 0,), [r.boxes for r in shares])
    return shares


def written_records(share: Interval, length: int, n_records: int) -> Interval:
    """Return the locations that the holder of a share writes: chunks whose first location it holds.

    Not collective.

    Parameters
    ----------
    share
        What the rank holds.
    length
        Locations of a chunk.
    n_records
        Number of locations.
    """
    start, stop = (min(-(-edge // length) * length, n_records) for edge in share)
    return (start, stop) if start < stop else (start, start)

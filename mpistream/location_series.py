"""The opening of a new location series: `mpistream.session.write_open` with the arguments of a model of points."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike, DTypeLike

from mpistream.creating import CreateRequest
from mpistream.description import Coordinate, IndexedTime, Variable
from mpistream.location_writer import LocationSeriesWriter
from mpistream.locations import LOCATION_DIM, location_schema
from mpistream.options import Options
from mpistream.session import open_stream

__all__ = ["write_open_locations"]


def write_open_locations(
    url: str | os.PathLike[str],
    ids: ArrayLike,
    times: IndexedTime | ArrayLike,
    variables: Mapping[str, Variable | DTypeLike],
    *,
    comm: Any = None,
    chunk_locations: int | None = None,
    share: tuple[int, int] | None = None,
    options: Options | None = None,
    units: str | None = None,
    calendar: str = "proleptic_gregorian",
    inner_locations: int | None = None,
    coords: Mapping[str, Coordinate | ArrayLike] | None = None,
    codec: str | Sequence[Mapping[str, Any]] = "series",
    attrs: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    takeover: bool = False,
) -> LocationSeriesWriter:
    """Create the store of a location series and open it for writing.

    Collective.

    Parameters
    ----------
    url, comm, options, overwrite, takeover
        As in `write_open`.
    ids, times, variables, units, calendar, chunk_locations, inner_locations, coords, codec, attrs
        As in `location_schema`, the same on every rank.
    share
        The locations that this rank writes, (start, stop). The ranks' shares together are all locations; on every
        rank or on none, where each gets whole chunks. A share that ends amid a chunk costs a message at each commit.

    Returns
    -------
    The writer of this rank.

    Raises
    ------
    SchemaError
        On every rank: what `location_schema` refuses.
    TilingError
        On every rank: shares that overlap or leave a location out.
    StoreError, ProtocolError
        As in `write_open`.

    Notes
    -----
    It is `write_open` of a `location_schema`. A job array over locations opens its parts with `write_open_part` of
    the same schema.
    """

    def request() -> CreateRequest:
        schema = location_schema(
            ids,
            times,
            variables,
            units=units,
            calendar=calendar,
            chunk_locations=chunk_locations,
            inner_locations=inner_locations,
            coords=coords,
            codec=codec,
            attrs=attrs,
        )
        return CreateRequest(schema, overwrite=overwrite)

    region = None if share is None else {LOCATION_DIM: share}
    writer = open_stream(
        "write_open_locations", url, request, comm=comm, region=region, takeover=takeover, options=options
    )
    assert isinstance(writer, LocationSeriesWriter)
    return writer

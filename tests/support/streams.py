"""A small stream with one array of each kind, for rooms that need a schema but no store."""

from __future__ import annotations

from typing import Any

import mpistream as ms
from mpistream.layout import resolve_layout

__all__ = ["SIZES", "make_schema", "resolved"]

SIZES = {"y": 8, "x": 6}


def make_schema(**changes: Any) -> ms.StreamSchema:
    """Return a schema with a variable over space, one over time alone, a static and two coordinates."""
    given: dict[str, Any] = {
        "dims": {"time": None, **SIZES},
        "time": ms.AppendTime(units="seconds since 2000-01-01"),
        "variables": {
            "temperature": ms.Variable(("time", "y", "x"), "float32", attrs={"units": "K"}),
            "energy": ms.Variable(("time",), "float64"),
        },
        "statics": {"topography": ms.Variable(("y", "x"), "int16")},
        "coords": {
            "y": ms.Coordinate(("y",), [0.5 * i for i in range(SIZES["y"])], attrs={"axis": "Y"}),
            "lat": ms.Coordinate(("y", "x"), dtype="float64"),
        },
    }
    return ms.StreamSchema(**{**given, **changes})


def resolved(n_writers: int = 2, **changes: Any) -> ms.StreamSchema:
    """Return `make_schema` with shards of 4 x 3 cells, unless ``changes`` say otherwise."""
    layout = {"shard_shape": {"y": 4, "x": 3}, "chunk_shape": {"y": 2, "x": 3}}
    return resolve_layout(make_schema(**{**layout, **changes}), n_writers)

"""A small store for `mpistream info`: every kind of array, one static that is written and two that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import mpistream as ms

__all__ = ["files_below", "make_schema", "make_store", "size_of"]


def make_schema(*, key_separator: str = "/", title: Any = "A [bold]plate[/bold] :smile:") -> ms.StreamSchema:
    """Return the schema: 2 shards a record of 7 x 5 cells, rows of 4 records, inner chunks of 2."""
    return ms.StreamSchema(
        dims={"time": None, "y": 7, "x": 5},
        time=ms.AppendTime(units="hours since 2000-02-28 12:00"),
        variables={
            "temperature": ms.Variable(("time", "y", "x"), "float32"),
            "energy": ms.Variable(("time",), "float64"),
        },
        statics={"depth": ms.Variable(("y", "x"), "int16"), "n_stations": ms.Variable((), "int32")},
        coords={"y": ms.Coordinate(("y",), np.arange(7.0)), "lat": ms.Coordinate(("y", "x"), None, dtype="float64")},
        shard_shape={"time": 4, "y": 4, "x": 5},
        chunk_shape={"time": 2, "y": 2, "x": 5},
        key_separator=key_separator,
        attrs={"title": title},
    )


def make_store(url: Path, schema: ms.StreamSchema, n_records: int = 6) -> Path:
    """Write records and one static of several, and commit them."""
    with ms.write_open(url, schema, options=ms.Options(durability="none", threads=0)) as w:
        if "depth" in schema.statics:
            w.write_static("depth", np.full((7, 5), 12, "int16"))
        for i in range(n_records):
            w.write_record(12.0 * i, {name: np.float32(i + 1) for name in schema.variables} | _blocks(schema, i))
    return url


def _blocks(schema: ms.StreamSchema, record: int) -> dict[str, Any]:
    noise = np.random.default_rng(record).random((7, 5), "float32")
    return {name: noise for name, v in schema.variables.items() if len(v.dims) > 1}


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return [p for p in folder.rglob("*") if p.is_file()]


def size_of(*paths: Path) -> int:
    """Return the bytes of files."""
    return sum(p.stat().st_size for p in paths)

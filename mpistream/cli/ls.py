"""`mpistream ls`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mpistream.cli.terminal import Column, app, console_of, failed, instead_of, line, say, shape_text, table_of
from mpistream.errors import MPIStreamError, counted
from mpistream.info import decode_time
from mpistream.node import Node
from mpistream.ranges import count
from mpistream.reader import StoreReader, open_reader

__all__ = ["ls"]

_EXAMPLE = "Example: mpistream ls run.zarr"


@app.command(name="ls", help="List the groups and arrays of a store, with dims and units.", epilog=_EXAMPLE)
def ls(
    url: Annotated[str, typer.Argument(help="Folder of a store, or of a group above some.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the groups and arrays of a store, with dims and units.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    as_json
        Print one JSON object: ``n_records``, ``first_t``, ``last_t`` (None where there is no stream) and ``nodes``.

    Notes
    -----
    Reads documents and the first and last time, whatever the number of records; `mpistream info` also counts files.
    Exit code 1 and one line on stderr when there is no store, or a damaged one.
    """
    try:
        with open_reader(url) as reader:
            facts = _facts(url, reader)
        title = "" if as_json else _title(facts)
    except MPIStreamError as error:
        raise failed(error) from None
    if as_json:
        say(json.dumps(facts, indent=2, allow_nan=False))
        return
    console = console_of()
    with console.capture() as captured:
        # Not as the title of the table, which would be folded to its width.
        console.print(title, soft_wrap=True)
        console.print(table_of("", _COLUMNS, facts["nodes"]))
    say("\n".join(text.rstrip() for text in captured.get().splitlines()))


def _facts(url: str, reader: StoreReader) -> dict[str, Any]:
    times: list[float | None] = [None, None]
    units = None
    if reader.is_stream:
        time = reader.schema.time
        units = {"units": time.units, "calendar": time.calendar}
        if reader.committed:
            first, last = reader.committed[0][0], reader.committed[-1][1] - 1
            if reader.schema.is_location_series:
                # Each record is a location, and has all times.
                first, last = 0, len(reader.times) - 1
            name = reader.schema.time_dim
            times = [float(reader.read_array(name, [(i, i + 1)])[0]) for i in (first, last)]
    return {
        "url": url,
        "record_noun": reader.schema.record_noun if reader.is_stream else None,
        "n_records": reader.n_records if reader.is_stream else None,
        "n_committed": count(reader.committed) if reader.is_stream else None,
        "first_t": times[0],
        "last_t": times[1],
        "time": units,
        "nodes": [_node(node) for node in reader.hierarchy().values()],
    }


def _node(node: Node) -> dict[str, Any]:
    def text(name: str) -> str | None:
        value = node.attrs.get(name)
        return value if isinstance(value, str) else None

    return {
        "path": node.path,
        "kind": "stream" if node.is_stream else node.kind,
        "dtype": node.dtype,
        "dims": None if node.dims is None else list(node.dims),
        "shape": None if node.shape is None else list(node.shape),
        "units": text("units"),
        "long_name": text("long_name") or text("standard_name") or text("title"),
    }


def _title(facts: dict[str, Any]) -> str:
    if facts["n_records"] is None:
        return line(instead_of(facts["url"]) or f"{facts['url']}: no stream")
    found = f"{line(facts['url'])}: {counted(facts['n_records'], facts['record_noun'])}"
    if facts["n_committed"] != facts["n_records"]:
        found += f", {facts['n_committed']} committed"
    if facts["last_t"] is None:
        return found
    units, calendar = facts["time"]["units"], facts["time"]["calendar"]
    dates = [decode_time(facts[name], units, calendar) for name in ("first_t", "last_t")]
    span = f"t {facts['first_t']!r} to {facts['last_t']!r} {line(units)}"
    return f"{found}, {span}" + (f" ({dates[0]} to {dates[1]})" if None not in dates else "")


_COLUMNS: Sequence[Column] = (
    ("path", False, lambda n: "/" + line(n["path"])),
    ("kind", False, lambda n: n["kind"]),
    ("dtype", False, lambda n: "-" if n["dtype"] is None else line(n["dtype"])),
    ("dims", False, lambda n: ", ".join("-" if d is None else line(d) for d in n["dims"] or ()) or "-"),
    ("shape", True, lambda n: shape_text(n["shape"])),
    ("units", False, lambda n: "-" if n["units"] is None else line(n["units"])),
    ("name", False, lambda n: "-" if n["long_name"] is None else line(n["long_name"])),
)

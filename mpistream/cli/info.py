"""`mpistream info`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mpistream.cli.terminal import (
    Column,
    app,
    console_of,
    failed,
    instead_of,
    line,
    named,
    say,
    shape_text,
    size_text,
    table_of,
)
from mpistream.errors import MPIStreamError, counted
from mpistream.info import describe, short_chain

__all__ = ["info"]


@app.command(
    help="Print what a store holds, how it lies on disk and how large it is.", epilog="Example: mpistream info run.zarr"
)
def info(
    url: Annotated[str, typer.Argument(help="Folder of the store.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    count_all: Annotated[
        bool, typer.Option("--count-all", help="Count every file; of more than 20,000 sizes are estimated otherwise.")
    ] = False,
) -> None:
    """Print what a store holds, how it lies on disk and how large it is.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    as_json
        Print one JSON object, see `mpistream.info.describe`.
    count_all
        Count every file, however long that takes.

    Notes
    -----
    Writes nothing and reads no chunk. Of a Zarr store that is no stream, its groups and arrays are listed. Exit
    code 1 and one line on stderr when there is no store, or a damaged one.
    """
    try:
        facts = describe(url, count_all=count_all)
        summary = {} if as_json else _no_stream(facts["url"]) if "nodes" in facts else _summary(facts)
    except MPIStreamError as error:
        raise failed(error) from None
    if as_json:
        say(json.dumps(facts, indent=2, allow_nan=False))
    else:
        console = console_of()
        with console.capture() as captured:
            _show(facts, summary, console)
        # Tables pad their last column, too.
        say("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _show(facts: Mapping[str, Any], summary: Mapping[str, str], console: Console) -> None:
    lines = Table.grid(padding=(0, 2), pad_edge=False)
    lines.add_column(style="bold")
    lines.add_column(overflow="fold")
    for name, text in summary.items():
        lines.add_row(name, text)
    console.print(lines)
    console.print()
    if "nodes" in facts:
        console.print(table_of("Nodes", _NODES, facts["nodes"]))
        return
    console.print(table_of("Layout", _LAYOUT, facts["arrays"]))
    console.print()
    title = "On disk" if facts["is_exact"] else "On disk, estimated"
    console.print(table_of(title, named(_ON_DISK, facts["record_noun"]), facts["arrays"]))


def _no_stream(url: str) -> dict[str, str]:
    return {"store": line(url), "stream": line(instead_of(url) or "none: written by others")}


def _summary(facts: Mapping[str, Any]) -> dict[str, str]:
    noun, last_t = facts["record_noun"], "none"
    if facts["last_t"] is not None:
        date = f" ({facts['last_date']})" if facts["last_date"] is not None else ""
        last_t = f"{facts['last_t']!r} {line(facts['time_units'])}{date}"
    statics = [f"{line(n)} {'committed' if c else 'not committed'}" for n, c in facts["statics"].items()]
    dropped = "none"
    if facts["n_dropped"]:
        parts = [f"{d['start']} to {d['stop'] - 1} by epoch {d['epoch']}" for d in facts["dropped"]]
        dropped = f"{counted(facts['n_dropped'], noun)} kept aside until the next commit: {', '.join(parts)}"
    is_whole = facts["n_committed"] == facts["n_records"]
    return {
        "store": line(facts["url"]),
        "title": "none" if facts["title"] is None else line(facts["title"]),
        f"{noun}s": str(facts["n_records"]) + ("" if is_whole else f", {facts['n_committed']} committed"),
        "last t": last_t,
        "dims": ", ".join(f"{line(d)} {n}" for d, n in facts["dims"].items()),
        "commit": f"{facts['commit_seq']} in epoch {facts['epoch']}",
        "run id": line(facts["run_id"]),
        "statics": ", ".join(statics) or "none",
        "dropped": dropped,
        "on disk": f"{'' if facts['is_exact'] else 'about '}{size_text(facts['nbytes_on_disk'])} in "
        f"{counted(facts['n_files'], 'file')}, {size_text(facts['nbytes'])} of values, ratio {_ratio(facts['ratio'])}",
    }


# Heading, whether numbers stand in it, text of an array.
_LAYOUT: Sequence[Column] = (
    ("array", False, lambda a: line(a["name"])),
    ("dims", False, lambda a: ", ".join(map(line, a["dims"])) or "-"),
    ("dtype", False, lambda a: a["dtype"]),
    ("shape", True, lambda a: shape_text(a["shape"])),
    ("shard", True, lambda a: shape_text(a["shard_shape"])),
    ("inner chunk", True, lambda a: shape_text(a["chunk_shape"])),
    ("row", True, lambda a: "-" if a["row_length"] is None else str(a["row_length"])),
)
_ON_DISK: Sequence[Column] = (
    ("array", False, lambda a: line(a["name"])),
    ("codecs", False, lambda a: _rounding(a["keep_bits"]) + line(short_chain(a["codecs"]))),
    ("objects a record", True, lambda a: _per_record(a["n_objects_per_record"])),
    ("objects", True, lambda a: str(a["n_objects"])),
    ("values", True, lambda a: size_text(a["nbytes"])),
    ("size", True, lambda a: size_text(a["nbytes_on_disk"])),
    ("ratio", True, lambda a: _ratio(a["ratio"])),
)
_NODES: Sequence[Column] = (
    ("path", False, lambda n: "/" + line(n["path"])),
    ("kind", False, lambda n: n["kind"]),
    ("dims", False, lambda n: ", ".join("-" if d is None else line(d) for d in n["dims"] or ()) or "-"),
    ("dtype", False, lambda n: "-" if n["dtype"] is None else line(n["dtype"])),
    ("shape", True, lambda n: shape_text(n["shape"])),
    ("shard", True, lambda n: shape_text(n["shard_shape"])),
    ("chunk", True, lambda n: shape_text(n["chunk_shape"])),
)


def _rounding(keep_bits: int | None) -> str:
    return "" if keep_bits is None else f"bitround {keep_bits} + "


def _per_record(value: float | None) -> str:
    if value is None:
        return "-"
    # A row of many records: 1/1024 says more than 0.0009766.
    return f"1/{1 / value:.0f}" if value < 1 and (1 / value).is_integer() else f"{value:.4g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

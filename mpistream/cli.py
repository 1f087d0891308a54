"""The command line. Only `mpistream.__main__` imports this room: it loads typer and rich."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mpistream._version import __version__
from mpistream.carrying import commit_tokens
from mpistream.decomposition import settle
from mpistream.errors import FormatError, MPIStreamError, SchemaError
from mpistream.info import describe, short_chain
from mpistream.manifest import parse_json
from mpistream.opening import no_claims
from mpistream.options import Options
from mpistream.plan import plan_of
from mpistream.ranges import ranges_of
from mpistream.reader import open_reader
from mpistream.repairing import repair as repair_store
from mpistream.schema import StreamSchema
from mpistream.token import CommitReceipt, CommitToken

__all__ = ["app"]

_MAX_NAMED = 8  # ranges of ranks in a line

# Without a terminal nothing limits a line: whoever reads a log or a pipe must not get half a table.
_NO_LIMIT = 100_000

app = typer.Typer(
    name="mpistream",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"mpistream {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look into stores that mpistream wrote, commit what independent parts wrote, and repair."""


@app.command(help="Print what a store holds, how it lies on disk and how large it is.")
def info(
    url: Annotated[str, typer.Argument(help="Folder of the store.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what a store holds, how it lies on disk and how large it is.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    as_json
        Print one JSON object, see `mpistream.info.describe`.

    Notes
    -----
    Writes nothing and reads no chunk. Of a Zarr store that is no stream, its groups and arrays are listed. Exit
    code 1 and one line on stderr when there is no store, or a damaged one.
    """
    try:
        facts = describe(url)
    except MPIStreamError as error:
        raise _failed(error) from None
    if as_json:
        _print(json.dumps(facts, indent=2, allow_nan=False))
    else:
        console = _console()
        with console.capture() as captured:
            _show(facts, console)
        # Tables pad their last column, too.
        _print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@app.command(help="Commit what independent parts wrote, with the tokens of all of them.")
def commit(
    url: Annotated[str, typer.Argument(help="Folder of the store.", show_default=False)],
    tokens: Annotated[list[Path], typer.Argument(help="JSON files, one token of each part.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as one JSON object.")] = False,
) -> None:
    """Commit what independent parts wrote, with the tokens of all of them.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    tokens
        Files, each with the token of one part: ``json.dumps(token.to_json())``.
    as_json
        Print the receipt as one JSON object.

    Notes
    -----
    See `mpistream.commit_tokens`. Exit code 1 and one line on stderr when nothing was committed. The same tokens
    again print the same receipt and change nothing.
    """
    try:
        receipt = commit_tokens(url, [_read_token(path) for path in tokens])
    except MPIStreamError as error:
        raise _failed(error) from None
    if as_json:
        _print(json.dumps(receipt.to_json(), indent=2, allow_nan=False))
    else:
        _print(_receipt_line(receipt))
    _show_warnings(receipt)


@app.command(help="Finish what a run that died has left undone; --restore-dropped brings dropped records back.")
def repair(
    url: Annotated[str, typer.Argument(help="Folder of the store.", show_default=False)],
    restore_dropped: Annotated[
        bool,
        typer.Option("--restore-dropped", help="Bring back what resumes have dropped since the last commit."),
    ] = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Go on even if a writer seems to be alive; it loses the store.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as one JSON object.")] = False,
) -> None:
    """Finish what a run that died has left undone, and bring dropped records back if asked to.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    restore_dropped
        Commit again what resumes with ``at`` have dropped since the last commit.
    takeover
        Go on even if a writer seems to be alive.
    as_json
        Print the receipt as one JSON object.

    Notes
    -----
    See `mpistream.repair`. Exit code 1 and one line on stderr when nothing was done.
    """
    try:
        receipt = repair_store(url, restore_dropped=restore_dropped, takeover=takeover)
    except MPIStreamError as error:
        raise _failed(error) from None
    if as_json:
        _print(json.dumps(receipt.to_json(), indent=2, allow_nan=False))
    else:
        done = f"{receipt.n_new_records} dropped records restored" if restore_dropped else "in order"
        last_t = "none" if receipt.last_t is None else repr(receipt.last_t)
        _print(f"epoch {receipt.epoch}: {done}; {receipt.n_records} records committed, last t {last_t}")
    _show_warnings(receipt)


def _show_warnings(receipt: CommitReceipt) -> None:
    for warning in receipt.warnings:
        typer.echo(f"warning: {_line(warning)}", err=True)


@app.command(help="Print what a run will write and move, before it writes anything.")
def plan(
    schema: Annotated[
        str,
        typer.Argument(help="Folder of a store, or FILE.py:NAME or MODULE:NAME of a StreamSchema.", show_default=False),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the run.", show_default=False)],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes on which they run, filled one after the other.")] = 1,
    writers: Annotated[str, typer.Option(help="As Options(writers=): auto, all, node or a number.")] = "auto",
    records: Annotated[int, typer.Option(min=1, help="Records of the run.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what a run will write and move, before it writes anything.

    Not collective.

    Parameters
    ----------
    schema
        Folder of a store, whose schema is taken, or ``FILE.py:NAME`` or ``MODULE:NAME`` of a `StreamSchema`: that
        file or module is run to get it.
    ranks, nodes
        How many; each rank has a balanced box of the grid.
    writers
        As in `Options`.
    records
        Records of the run.
    as_json
        Print one JSON object, see `mpistream.Plan.to_json`.

    Notes
    -----
    Exit code 1 and one line on stderr when there is no such schema.
    """
    try:
        # Options knows what may be said for writers.
        options = Options(writers=int(writers) if writers.isdecimal() else writers)
        names = [str(rank * nodes // ranks) for rank in range(ranks)]
        settled = settle(_schema_of(schema), None, names, writers=options.writers, rearrange=options.rearrange)
        found = plan_of(*settled, names)
    except MPIStreamError as error:
        raise _failed(error) from None
    if as_json:
        _print(json.dumps(found.to_json(), indent=2, allow_nan=False))
        return
    _print(str(found))
    _print(f"writers: {_ranks(found.writers)}; {found.n_objects(records)} objects in {records} records")
    for name, (shard, chunk) in found.layouts.items():
        _print(f"{_line(name)}: shards {_shape(shard)}, inner chunks {_shape(chunk)}")
    for warning in found.warnings:
        _print(f"warning: {_line(warning)}")


def _schema_of(text: str) -> StreamSchema:
    where, colon, name = text.rpartition(":")
    if not colon:
        with open_reader(text) as reader:
            return reader.schema
    try:
        # What is looked for is a schema; a script without a guard would start its run.
        with no_claims(f"{text} is read for its schema alone; put the schema into a module that writes nothing"):
            is_file = where.endswith(".py")
            found = runpy.run_path(where)[name] if is_file else getattr(importlib.import_module(where), name)
    except MPIStreamError:
        raise
    except (AttributeError, ImportError, KeyError, OSError) as error:
        raise SchemaError(f"{text}: {type(error).__name__}: {error}; give FILE.py:NAME", kind="schema") from error
    if not isinstance(found, StreamSchema):
        raise SchemaError(f"{text} is a {type(found).__name__}; give the name of a StreamSchema", kind="schema")
    return found


def _ranks(ranks: Sequence[int]) -> str:
    parts = [str(a) if b - a == 1 else f"{a} to {b - 1}" for a, b in ranges_of(ranks)]
    return ", ".join(parts[:_MAX_NAMED]) + (
        f" and {len(parts) - _MAX_NAMED} more ranges" if len(parts) > _MAX_NAMED else ""
    )


def _read_token(path: Path) -> CommitToken:
    try:
        return CommitToken.from_json(parse_json(str(path), path.read_bytes()))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}", kind="token") from error
    except FormatError as error:
        text = str(error)
        raise FormatError(text if text.startswith(str(path)) else f"{path}: {text}", kind=error.kind) from error


def _receipt_line(receipt: CommitReceipt) -> str:
    last_t = "none" if receipt.last_t is None else repr(receipt.last_t)
    statics = f", statics {', '.join(map(_line, receipt.new_statics))}" if receipt.new_statics else ""
    return (
        f"commit {receipt.commit_seq} in epoch {receipt.epoch}: {receipt.n_new_records} new records{statics}, "
        f"{_size(receipt.nbytes)} in {receipt.n_objects} objects; {receipt.n_records} records committed, "
        f"last t {last_t}"
    )


def _failed(error: MPIStreamError) -> typer.Exit:
    """Say what is wrong in one line, and return how to end."""
    typer.echo(f"error: {_line(error)}", err=True)
    return typer.Exit(1)


def _print(text: str) -> None:
    # Flushed here, where typer handles a pipe that is closed; not typer.echo, which has its own mind about encodings.
    print(text, flush=True)


def _console() -> Console:
    is_terminal = sys.stdout.isatty()
    return Console(
        width=None if is_terminal else _NO_LIMIT,
        color_system="auto" if is_terminal else None,
        # Names and titles are the user's: brackets and colons in them mean nothing.
        markup=False,
        emoji=False,
        highlight=False,
    )


def _line(value: object) -> str:
    """Return a value's text as one line without control characters."""
    return "".join(c if c.isprintable() else " " for c in " ".join(str(value).split()))


def _show(facts: Mapping[str, Any], console: Console) -> None:
    is_stream = "nodes" not in facts
    summary = {"store": _line(facts["url"]), "stream": "none: written by others, or the groups above streams"}
    lines = Table.grid(padding=(0, 2), pad_edge=False)
    lines.add_column(style="bold")
    lines.add_column(overflow="fold")
    for name, text in (_summary(facts) if is_stream else summary).items():
        lines.add_row(name, text)
    console.print(lines)
    console.print()
    if not is_stream:
        console.print(_table("Nodes", _NODES, facts["nodes"]))
        return
    console.print(_table("Layout", _LAYOUT, facts["arrays"]))
    console.print()
    console.print(_table("On disk", _ON_DISK, facts["arrays"]))


def _summary(facts: Mapping[str, Any]) -> dict[str, str]:
    last_t = "none"
    if facts["last_t"] is not None:
        date = f" ({facts['last_date']})" if facts["last_date"] is not None else ""
        last_t = f"{facts['last_t']!r} {_line(facts['time_units'])}{date}"
    statics = [f"{_line(n)} {'committed' if c else 'not committed'}" for n, c in facts["statics"].items()]
    dropped = "none"
    if facts["n_dropped"]:
        parts = [f"{d['start']} to {d['stop'] - 1} by epoch {d['epoch']}" for d in facts["dropped"]]
        dropped = f"{facts['n_dropped']} records kept aside until the next commit: {', '.join(parts)}"
    return {
        "store": _line(facts["url"]),
        "title": "none" if facts["title"] is None else _line(facts["title"]),
        "records": str(facts["n_records"]),
        "last t": last_t,
        "dims": ", ".join(f"{_line(d)} {n}" for d, n in facts["dims"].items()),
        "commit": f"{facts['commit_seq']} in epoch {facts['epoch']}",
        "run id": _line(facts["run_id"]),
        "statics": ", ".join(statics) or "none",
        "dropped": dropped,
        "on disk": f"{_size(facts['nbytes_on_disk'])} in {facts['n_files']} files, {_size(facts['nbytes'])} of values, "
        f"ratio {_ratio(facts['ratio'])}",
    }


_Column = tuple[str, bool, Callable[[Mapping[str, Any]], str]]

# Heading, whether numbers stand in it, text of an array.
_LAYOUT: Sequence[_Column] = (
    ("array", False, lambda a: _line(a["name"])),
    ("dims", False, lambda a: ", ".join(map(_line, a["dims"])) or "-"),
    ("dtype", False, lambda a: a["dtype"]),
    ("shape", True, lambda a: _shape(a["shape"])),
    ("shard", True, lambda a: _shape(a["shard_shape"])),
    ("inner chunk", True, lambda a: _shape(a["chunk_shape"])),
    ("row", True, lambda a: "-" if a["row_length"] is None else str(a["row_length"])),
)
_ON_DISK: Sequence[_Column] = (
    ("array", False, lambda a: _line(a["name"])),
    ("codecs", False, lambda a: _rounding(a["keep_bits"]) + _line(short_chain(a["codecs"]))),
    ("objects a record", True, lambda a: _per_record(a["n_objects_per_record"])),
    ("objects", True, lambda a: str(a["n_objects"])),
    ("values", True, lambda a: _size(a["nbytes"])),
    ("size", True, lambda a: _size(a["nbytes_on_disk"])),
    ("ratio", True, lambda a: _ratio(a["ratio"])),
)
_NODES: Sequence[_Column] = (
    ("path", False, lambda n: "/" + _line(n["path"])),
    ("kind", False, lambda n: n["kind"]),
    ("dims", False, lambda n: ", ".join("-" if d is None else _line(d) for d in n["dims"] or ()) or "-"),
    ("dtype", False, lambda n: "-" if n["dtype"] is None else _line(n["dtype"])),
    ("shape", True, lambda n: _shape(n["shape"])),
    ("shard", True, lambda n: _shape(n["shard_shape"])),
    ("chunk", True, lambda n: _shape(n["chunk_shape"])),
)


def _table(title: str, columns: Sequence[_Column], arrays: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, is_number, _ in columns:
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for array in arrays:
        table.add_row(*(text(array) for _, _, text in columns))
    return table


def _rounding(keep_bits: int | None) -> str:
    return "" if keep_bits is None else f"bitround {keep_bits} + "


def _shape(shape: Sequence[int] | None) -> str:
    return " x ".join(map(str, shape)) if shape else "-"


def _per_record(value: float | None) -> str:
    if value is None:
        return "-"
    # A row of many records: 1/1024 says more than 0.0009766.
    return f"1/{1 / value:.0f}" if value < 1 and (1 / value).is_integer() else f"{value:.4g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:  # noqa: PLR2004
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"

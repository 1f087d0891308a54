"""What all verbs share: the app, how they end, and how text comes to the terminal."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mpistream._version import __version__
from mpistream.errors import FormatError, MPIStreamError
from mpistream.foreign import meant_instead
from mpistream.manifest import MANIFEST_KEY
from mpistream.plan import size_text
from mpistream.reader import open_reader
from mpistream.store import open_readable
from mpistream.token import CommitReceipt

__all__ = [
    "Column",
    "app",
    "check_one_stream",
    "console_of",
    "failed",
    "in_options",
    "instead_of",
    "line",
    "named",
    "noun_of",
    "say",
    "shape_text",
    "show_warnings",
    "size_text",
    "table_of",
]

# What messages of the library tell a program to do, as a verb has it.
_OPTIONS = {
    "pass takeover=True": "give --takeover",
    "pass overwrite=True": "give --overwrite",
    "leave the record out": "leave --record out",
    "leave it out, or export on one process": "leave --deflate out, or export on one process",
    "; refresh() looks for newer ones": "",
    "; refresh() looks again": "",
    "hierarchy() lists its arrays and read_array() reads them": "`mpistream ls` lists its arrays",
    "hierarchy()": "`mpistream ls`",
}
_WRITERS = re.compile(r"Options\(writers=(\w+)\)")
# Without a terminal nothing limits a line: whoever reads a log or a pipe must not get half a table.
_NO_LIMIT = 100_000

app = typer.Typer(
    name="mpistream",
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
    """Look into stores that mpistream wrote, watch runs, compare, plot, export, commit, repair, plan and measure."""


# Heading, whether numbers stand in it, text of a row.
Column = tuple[str, bool, Callable[[Mapping[str, Any]], str]]


def show_warnings(receipt: CommitReceipt) -> None:
    for warning in receipt.warnings:
        typer.echo(f"warning: {line(warning)}", err=True)


def failed(error: MPIStreamError) -> typer.Exit:
    """Say what is wrong in one line, and return how to end."""
    typer.echo(f"error: {line(in_options(str(error)))}", err=True)
    return typer.Exit(1)


def in_options(text: str) -> str:
    """Return a message that speaks of arguments and calls of Python as one of a command line."""
    for python, option in _OPTIONS.items():
        text = text.replace(python, option)
    return _WRITERS.sub(r"--writers \1", text)


def say(text: str) -> None:
    # Flushed here, where typer handles a pipe that is closed; not typer.echo, which has its own mind about encodings.
    print(text, flush=True)


def console_of() -> Console:
    is_terminal = sys.stdout.isatty()
    return Console(
        width=None if is_terminal else _NO_LIMIT,
        color_system="auto" if is_terminal else None,
        # Names and titles are the user's: brackets and colons in them mean nothing.
        markup=False,
        emoji=False,
        highlight=False,
    )


def line(value: object) -> str:
    """Return a value's text as one line without control characters."""
    return "".join(c if c.isprintable() else " " for c in " ".join(str(value).split()))


def named(columns: Sequence[Column], noun: str) -> list[Column]:
    """Return columns whose headings call a record what it is in a stream."""
    return [(heading.replace("record", noun), is_number, text) for heading, is_number, text in columns]


def instead_of(url: str) -> str | None:
    """Return which stream was meant with a folder above some, or with an array of one; None for any other place.

    The rule of all verbs: those that list (ls and info) list what lies there and say this, all others refuse.
    """
    store = open_readable(url)
    return None if store.read(MANIFEST_KEY) is not None else meant_instead(store)


def check_one_stream(url: str) -> None:
    """Refuse a folder above streams, and an array of one, for a verb that would take it for a store of others.

    Raises
    ------
    FormatError
        Kind ``no_manifest``, with the stream to give.
    """
    if (text := instead_of(url)) is not None:
        raise FormatError(text, kind="no_manifest")


def noun_of(url: str) -> str:
    """Return what a record of a stream is called; of a receipt only its store tells."""
    # Whatever has become of the store since: the receipt stands, and is said.
    with contextlib.suppress(MPIStreamError), open_reader(url) as reader:
        return reader.schema.record_noun
    return "record"


def table_of(title: str, columns: Sequence[Column], arrays: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, is_number, _ in columns:
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for array in arrays:
        table.add_row(*(text(array) for _, _, text in columns))
    return table


def shape_text(shape: Sequence[int] | None) -> str:
    return " x ".join(map(str, shape)) if shape else "-"

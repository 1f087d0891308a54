"""`mpistream plan`."""

from __future__ import annotations

import importlib
import json
import runpy
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from mpistream.cli.terminal import app, failed, in_options, line, say, shape_text
from mpistream.decomposition import settle
from mpistream.errors import MPIStreamError, SchemaError, counted
from mpistream.opening import no_claims
from mpistream.options import resolve_options
from mpistream.plan import plan_of
from mpistream.ranges import ranges_of
from mpistream.reader import open_reader
from mpistream.schema import StreamSchema

__all__ = ["plan"]

_MAX_NAMED = 8  # ranges of ranks in a line


@app.command(
    help="Print what a run will write and move, before it writes anything.",
    epilog="Example: mpistream plan schema.py:schema --ranks 4096 --nodes 64 --records 1000",
)
def plan(
    schema: Annotated[
        str,
        typer.Argument(help="Folder of a store, or FILE.py:NAME or MODULE:NAME of a StreamSchema.", show_default=False),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the run.", show_default=False)],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes on which they run, filled one after the other.")] = 1,
    writers: Annotated[
        str | None,
        typer.Option(
            help="As Options(writers=): auto, all, node or a number; by default as $MPISTREAM_OPTIONS says.",
            show_default=False,
        ),
    ] = None,
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
        As in `Options`; by default, as everything else in them, that of the site's file.
    records
        Records of the run.
    as_json
        Print one JSON object, see `mpistream.Plan.to_json`.

    Notes
    -----
    Exit code 1 and one line on stderr when there is no such schema.
    """
    try:
        options = resolve_options(None)
        if writers is not None:
            # Options knows what may be said for writers.
            options = replace(options, writers=int(writers) if writers.isdecimal() else writers)
        names = [str(rank * nodes // ranks) for rank in range(ranks)]
        settled = settle(_schema_of(schema), None, names, writers=options.writers, rearrange=options.rearrange)
        pending = 0 if options.threads == 0 else options.max_pending_nbytes
        found = plan_of(*settled, names, writers=options.writers, max_pending_nbytes=pending)
    except MPIStreamError as error:
        raise failed(error) from None
    if as_json:
        say(json.dumps(found.to_json(), indent=2, allow_nan=False))
        return
    say(str(found))
    objects = f"{counted(found.n_objects(records), 'object')} in {counted(records, found.record_noun)}"
    say(f"writers: {_ranks(found.writers)}; {objects}")
    for name, (shard, chunk) in found.layouts.items():
        say(f"{line(name)}: shards {shape_text(shard)}, inner chunks {shape_text(chunk)}")
    for warning in found.warnings:
        say(f"warning: {line(in_options(warning))}")


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
    except Exception as error:
        # The file is the user's, and may raise anything.
        raise SchemaError(f"{text}: {type(error).__name__}: {error}; give FILE.py:NAME", kind="schema") from error
    if not isinstance(found, StreamSchema):
        raise SchemaError(f"{text} is a {type(found).__name__}; give the name of a StreamSchema", kind="schema")
    return found


def _ranks(ranks: Sequence[int]) -> str:
    parts = [str(a) if b - a == 1 else f"{a} to {b - 1}" for a, b in ranges_of(ranks)]
    return ", ".join(parts[:_MAX_NAMED]) + (
        f" and {len(parts) - _MAX_NAMED} more ranges" if len(parts) > _MAX_NAMED else ""
    )

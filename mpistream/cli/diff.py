"""`mpistream diff`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mpistream.cli.terminal import app, check_one_stream, failed, line, say
from mpistream.compare import compare
from mpistream.errors import MPIStreamError

__all__ = ["diff"]

_TROUBLE = 2  # as diff(1) and cmp(1) have it
_EXAMPLE = "Example: mpistream diff run.zarr reference.zarr --rtol 1e-12"


@app.command(help="Compare two stores; exit 0 if they are the same, 1 if they differ, 2 for trouble.", epilog=_EXAMPLE)
def diff(
    a: Annotated[str, typer.Argument(help="Folder of one store.", show_default=False)],
    b: Annotated[str, typer.Argument(help="Folder of the other.", show_default=False)],
    rtol: Annotated[float, typer.Option(help="Tolerance relative to the other's value.")] = 0.0,
    atol: Annotated[float, typer.Option(help="Absolute tolerance. Without one, every bit counts.")] = 0.0,
    variables: Annotated[
        list[str] | None, typer.Option("--var", help="Only this array; may be repeated.", show_default=False)
    ] = None,
    attrs: Annotated[bool, typer.Option("--attrs", help="Attributes count, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two stores.

    Not collective.

    Parameters
    ----------
    a, b, rtol, atol, variables, attrs
        As in `mpistream.compare.compare`.
    as_json
        Print one JSON object, see `mpistream.compare.Comparison.to_json`.

    Notes
    -----
    Exit code 0 when they are the same, 1 when they differ, 2 and one line on stderr when one can't be read.
    """
    try:
        check_one_stream(a)
        check_one_stream(b)
        found = compare(a, b, rtol=rtol, atol=atol, variables=variables or None, attrs=attrs)
    except MPIStreamError as error:
        failed(error)
        raise typer.Exit(_TROUBLE) from None
    if as_json:
        say(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        first, *others = str(found).splitlines()
        # Names and values are the user's; the two blanks before a difference are ours.
        say("\n".join([line(first), *(f"  {line(text)}" for text in others)]))
    if not found.is_same:
        raise typer.Exit(1)

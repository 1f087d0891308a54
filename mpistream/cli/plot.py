"""`mpistream plot`."""

from __future__ import annotations

from typing import Annotated

import typer

from mpistream.cli.terminal import app, failed, line, say
from mpistream.errors import MPIStreamError, SchemaError
from mpistream.plotting import draw, picture

__all__ = ["plot"]

_EXAMPLE = "Example: mpistream plot run.zarr temperature --record 10 --sel z=500 -o temperature.png"


@app.command(help="Draw a variable: a map with its coordinates and units, or a line.", epilog=_EXAMPLE)
def plot(
    url: Annotated[str, typer.Argument(help="Folder of the store.", show_default=False)],
    var: Annotated[str, typer.Argument(help="Variable, static or coordinate.", show_default=False)],
    record: Annotated[
        int | None,
        typer.Option(help="Record, negative from the end; by default the last committed one.", show_default=False),
    ] = None,
    sel: Annotated[
        list[str] | None,
        typer.Option(help="DIM=VALUE of its coordinate, the nearest; may be repeated.", show_default=False),
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="File; by default VAR.png.", show_default=False)
    ] = None,
) -> None:
    """Draw a variable into a file.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    var
        A variable, static or coordinate.
    record
        Record of a variable over time.
    sel
        ``DIM=VALUE`` each.
    output
        The file; its suffix says in which form, PNG without one.

    Notes
    -----
    See `mpistream.plotting.picture`. Prints the file and what is in it, such as the record. Exit code 1 and one line on
    stderr when nothing was drawn.
    """
    path = output or f"{var}.png"
    try:
        pairs = [text.partition("=") for text in sel or []]
        if bad := [dim for dim, equals, _ in pairs if not equals]:
            raise SchemaError(f"--sel {bad[0]!r}: give DIM=VALUE", kind="sel")
        drawn = picture(url, var, record=record, at={dim: value for dim, _, value in pairs})
        draw(drawn, path)
    except MPIStreamError as error:
        raise failed(error) from None
    say(f"{line(path)}: {line(drawn.title)}" if drawn.title else line(path))

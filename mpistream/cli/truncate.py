"""`mpistream truncate`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import numpy as np
import typer

from mpistream.cli.terminal import app, failed, say
from mpistream.errors import MPIStreamError, SchemaError, counted
from mpistream.repairing import truncate as truncate_store
from mpistream.times import TimeLike

__all__ = ["truncate"]


@app.command(
    help="Drop the records behind a time, without a run; they are kept aside until the next commit.",
    epilog="Example: mpistream truncate run.zarr --at 3600",
)
def truncate(
    url: Annotated[str, typer.Argument(help="Folder of the store.", show_default=False)],
    at: Annotated[
        str,
        typer.Option(
            help="The last time to keep: a number in the store's time units, or a date such as 2000-01-31T12:00.",
            show_default=False,
        ),
    ],
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Go on even if a writer seems to be alive; it loses the store.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Drop the records behind a time, without a run.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    at
        The last time to keep: a number, or an ISO 8601 date in UTC.
    takeover
        Go on even if a writer seems to be alive.
    as_json
        Print one JSON object.

    Notes
    -----
    See `mpistream.truncate`. Exit code 1 and one line on stderr when nothing was done.
    """
    try:
        done = truncate_store(url, _time(at), takeover=takeover)
    except MPIStreamError as error:
        raise failed(error) from None
    if as_json:
        say(json.dumps(dataclasses.asdict(done), indent=2, allow_nan=False))
        return
    last_t = "none" if done.last_t is None else repr(done.last_t)
    aside = "; `mpistream repair --restore-dropped` brings them back until the next commit" if done.n_dropped else ""
    say(f"{counted(done.n_dropped, 'record')} dropped, last t {last_t}{aside}")


def _time(text: str) -> TimeLike:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return np.datetime64(text)
    except ValueError as error:
        raise SchemaError(
            f"--at {text!r} is neither a number nor a date; give one, such as 3600 or 2000-01-31T12:00", kind="time"
        ) from error

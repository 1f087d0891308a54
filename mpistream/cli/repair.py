"""`mpistream repair`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mpistream.cli.terminal import app, failed, noun_of, say, show_warnings
from mpistream.errors import MPIStreamError, counted
from mpistream.repairing import repair as repair_store

__all__ = ["repair"]


@app.command(
    help="Finish what a run that died has left undone; --restore-dropped brings dropped records back.",
    epilog="Example: mpistream repair run.zarr --restore-dropped",
)
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
        raise failed(error) from None
    if as_json:
        say(json.dumps(receipt.to_json(), indent=2, allow_nan=False))
    else:
        last_t = "none" if receipt.last_t is None else repr(receipt.last_t)
        state = f"{counted(receipt.n_records, noun_of(url))} committed, last t {last_t}"
        if restore_dropped:
            say(f"epoch {receipt.epoch}: {counted(receipt.n_new_records, 'dropped record')} restored; {state}")
        else:
            say(
                f"epoch {receipt.epoch}: what runs left undone is finished, documents are in step; {state}; data were "
                "not read, `mpistream verify` does that"
            )
    show_warnings(receipt)

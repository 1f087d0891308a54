"""`mpistream commit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mpistream.carrying import commit_tokens
from mpistream.cli.terminal import app, failed, line, noun_of, say, show_warnings, size_text
from mpistream.errors import FormatError, MPIStreamError, counted
from mpistream.manifest import parse_json
from mpistream.token import CommitReceipt, CommitToken

__all__ = ["commit"]


@app.command(
    help="Commit what independent parts wrote, with the tokens of all of them.",
    epilog="Example: mpistream commit run.zarr tokens/*.json",
)
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
        raise failed(error) from None
    if as_json:
        say(json.dumps(receipt.to_json(), indent=2, allow_nan=False))
    else:
        say(_receipt_line(receipt, noun_of(url)))
    show_warnings(receipt)


def _read_token(path: Path) -> CommitToken:
    try:
        return CommitToken.from_json(parse_json(str(path), path.read_bytes()))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}", kind="token") from error
    except FormatError as error:
        text = str(error)
        raise FormatError(text if text.startswith(str(path)) else f"{path}: {text}", kind=error.kind) from error


def _receipt_line(receipt: CommitReceipt, noun: str) -> str:
    last_t = "none" if receipt.last_t is None else repr(receipt.last_t)
    statics = f", statics {', '.join(map(line, receipt.new_statics))}" if receipt.new_statics else ""
    objects = f"{size_text(receipt.nbytes)} in {counted(receipt.n_objects, 'object')}"
    return (
        f"commit {receipt.commit_seq} in epoch {receipt.epoch}: {counted(receipt.n_new_records, f'new {noun}')}"
        f"{statics}, {objects}; {counted(receipt.n_records, noun)} committed, last t {last_t}"
    )

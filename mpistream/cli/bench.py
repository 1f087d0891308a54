"""`mpistream bench`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from mpistream.benchmarking import benchmark, parse_nbytes
from mpistream.cli.terminal import Column, app, console_of, failed, say, size_text, table_of
from mpistream.comm import world
from mpistream.errors import MPIStreamError, counted
from mpistream.zarr3.codecs import PROFILES

__all__ = ["bench"]

_HELP = """Measure how fast this machine writes, and recommend a codec profile and a layout.

Under mpiexec all ranks write together:  mpiexec -n 4 mpistream bench DIR --block 64MiB

DIR has to be there and empty; what is written into it is removed. With the defaults each rank writes
10 GiB, some 6 GiB after compression.
"""


@app.command(help=_HELP, epilog="Example: mpistream bench /scratch/me/empty-folder --block 64MiB")
def bench(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="Empty folder on the file system in question.", show_default=False)
    ],
    block: Annotated[str, typer.Option(help="What a rank writes a record, for example 512KiB or 64MiB.")] = "32MiB",
    codec: Annotated[
        list[str] | None,
        typer.Option(help=f"Profile to measure, several times for several: {', '.join(PROFILES)}. All by default."),
    ] = None,
    records: Annotated[
        int, typer.Option(min=1, help="Records a turn; blocks under 4MiB: rounded up to shards of 4MiB.")
    ] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each loop; medians are compared.")] = 3,
    durability: Annotated[str, typer.Option(help="As in Options: fsync or none.")] = "fsync",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how fast this machine writes, and recommend a codec profile and a layout.

    Collective, over the ranks that mpiexec has started; rank 0 prints.

    Parameters
    ----------
    folder
        Empty folder on the file system in question; it is left empty.
    block
        What a rank writes a record, a multiple of 4KiB.
    codec
        Profiles that are compared.
    records, rounds
        Records a turn, turns of each loop.
    durability
        As in `Options`.
    as_json
        Print one JSON object, see `mpistream.benchmarking.benchmark`.

    Notes
    -----
    Exit code 1 and one line on stderr when nothing was measured.
    """
    comm = world()
    is_first = comm is None or comm.rank == 0
    try:
        found = benchmark(
            folder,
            comm=comm,
            block_nbytes=parse_nbytes(block),
            profiles=tuple(codec or PROFILES),
            n_records=records,
            n_rounds=rounds,
            durability=durability,
        )
    except MPIStreamError as error:
        # Every rank has it; one says it.
        raise failed(error) if is_first else typer.Exit(1) from None
    if not is_first:
        return
    if as_json:
        say(json.dumps(found, indent=2, allow_nan=False))
        return
    console = console_of()
    with console.capture() as captured:
        console.print(table_of("Profiles", _COLUMNS, found["trials"]))
        if found["layouts"]:
            console.print()
            console.print(table_of("Inner chunks", _COLUMNS, found["layouts"]))
    say(_heading(folder, found))
    say("\n".join(text.rstrip() for text in captured.get().splitlines()))
    say("")
    for text in _advice(found):
        say(text)


def _speed(trial: Mapping[str, Any], name: str) -> str:
    return f"{trial[name] / 1e6:.0f}"


def _share(trial: Mapping[str, Any], name: str) -> str:
    return f"{trial[name] / trial['limit']:.2f}"


_COLUMNS: Sequence[Column] = (
    ("codec", False, lambda t: t["profile"]),
    ("inner chunk", True, lambda t: size_text(t["chunk_nbytes"])),
    ("ratio", True, lambda t: f"{t['ratio']:.2f}"),
    ("limit MB/s", True, lambda t: _speed(t, "limit")),
    ("threads=0 MB/s", True, lambda t: _speed(t, "threads_0")),
    ("of limit", True, lambda t: _share(t, "threads_0")),
    ("default MB/s", True, lambda t: _speed(t, "default")),
    ("of limit", True, lambda t: _share(t, "default")),
)


def _heading(folder: str, found: Mapping[str, Any]) -> str:
    ranks, rounds = found["ranks"], found["n_rounds"]
    return (
        f"{os.path.abspath(folder)}: {counted(ranks, 'rank')} on {counted(found['cores'], 'core')} of this node, "
        f"{size_text(found['block_nbytes'])} a rank and record, {counted(found['n_records'], 'record')} a turn, "
        f"{counted(rounds, 'round')}, durability {found['durability']}\n"
    )


def _advice(found: Mapping[str, Any]) -> list[str]:
    advice = found["advice"]
    chunk, shard = size_text(advice["chunk_nbytes"]), size_text(advice["shard_nbytes"])
    layout = f"inner chunks of {chunk}, shards of {shard}"
    lines = [f'recommended: codec="{advice["profile"]}", {layout}, Options(threads={advice["threads"]})']
    if advice["row_length"] > 1:
        block, n = size_text(found["block_nbytes"]), advice["row_length"]
        lines.append(f"blocks of {block} are small: {n} records a shard (its length in time), whole rows committed")
    return lines

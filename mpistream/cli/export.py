"""`mpistream export`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from mpistream.cli.terminal import app, failed, line, say, size_text
from mpistream.comm import world
from mpistream.errors import MPIStreamError, SchemaError, counted
from mpistream.exporting import export as export_stream
from mpistream.selection import parse_bounds

__all__ = ["export", "parse_region"]

_EXAMPLE = "Example: mpistream export run.zarr out.nc --var temperature --records 0:100 --region y=0:256"


@app.command(
    help="Write committed records into one netCDF-4 (HDF5) file; under mpiexec all ranks write.", epilog=_EXAMPLE
)
def export(
    url: Annotated[str, typer.Argument(help="Folder of the store.", show_default=False)],
    path: Annotated[str, typer.Argument(help="The file: *.nc, *.nc4, *.h5 or *.hdf5.", show_default=False)],
    variables: Annotated[
        list[str] | None,
        typer.Option("--var", help="Only this array and its coordinates; may be repeated.", show_default=False),
    ] = None,
    records: Annotated[
        str | None, typer.Option(help="Only this record or these: N or START:STOP.", show_default=False)
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option(help="Only a part of a dim: DIM=START:STOP; may be repeated.", show_default=False),
    ] = None,
    deflate: Annotated[int, typer.Option(help="Level of compression, 0 to 9; on one process only.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file of that name.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write committed records into one netCDF-4 file.

    Collective.

    Parameters
    ----------
    url
        Folder of the store.
    path
        The file.
    variables, records, region, deflate, overwrite
        As in `mpistream.export`.
    as_json
        Print what was exported as one JSON object.

    Notes
    -----
    Under mpiexec all ranks take part, and rank 0 speaks. Exit code 1 and one line on stderr when nothing was exported.
    """
    comm = world()
    is_speaker = comm is None or comm.rank == 0
    try:
        bounds = None if records is None else slice(*parse_bounds(records))
        with _bar(is_shown=is_speaker and not as_json) as progress:
            found = export_stream(
                url,
                path,
                comm=comm,
                variables=variables or None,
                records=bounds,
                region=parse_region(region or []),
                deflate=deflate,
                overwrite=overwrite,
                progress=progress,
            )
    except MPIStreamError as error:
        if is_speaker:
            raise failed(error) from None
        raise typer.Exit(1) from None
    if not is_speaker:
        return
    if as_json:
        say(json.dumps(found.to_json(), indent=2, allow_nan=False))
        return
    gaps = f", {found.n_gaps} of them not committed and so fill value" if found.n_gaps else ""
    speed = size_text(found.nbytes / max(found.seconds, 1e-9))
    records = f"{counted(found.n_records, 'record')}{gaps}"
    say(f"{line(found.path)}: {records}, {size_text(found.nbytes)} of values, {speed}/s")
    for name in found.left_out:
        typer.echo(f"warning: static {line(name)} is not committed and was left out", err=True)


def parse_region(texts: list[str]) -> dict[str, Any]:
    """Return the region that ``DIM=START:STOP`` texts name.

    Not collective.
    """
    region: dict[str, Any] = {}
    for text in texts:
        dim, equals, bounds = text.rpartition("=")
        if not equals or ":" not in bounds:
            raise SchemaError(f"--region {text!r}: give DIM=START:STOP", kind="region")
        region[dim] = slice(*parse_bounds(bounds))
    return region


@contextlib.contextmanager
def _bar(*, is_shown: bool) -> Iterator[Callable[[int, int], object] | None]:
    """Yield what moves a bar on a terminal's standard error, None where nobody looks."""
    if not is_shown or not sys.stderr.isatty():
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("export")
        yield lambda n_done, n_total: bar.update(task, completed=n_done, total=n_total)

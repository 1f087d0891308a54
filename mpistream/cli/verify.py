"""`mpistream verify`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mpistream.cli.terminal import Column, app, console_of, failed, line, named, say, size_text, table_of
from mpistream.comm import world
from mpistream.errors import MPIStreamError, counted
from mpistream.verifying import Report
from mpistream.verifying import verify as verify_store

__all__ = ["verify"]

_DAMAGED = 2


@app.command(
    help="Read everything that is committed; list damage and leftovers. Writes nothing.",
    epilog="Example: mpistream verify run.zarr",
)
def verify(
    url: Annotated[str, typer.Argument(help="Folder of the store.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read everything that is committed; list damage and leftovers.

    Collective. Started with mpiexec, all ranks share the work, and rank 0 speaks.

    Parameters
    ----------
    url
        Folder of the store.
    as_json
        Print one JSON object, see `mpistream.verify.Report.to_json`.

    Notes
    -----
    Exit code 0: all is well, 1: there are leftovers, which ``mpistream repair`` removes, 2: there is damage, or no
    store that could be verified. Objects in flight, of a writer that is alive, don't count.
    """
    comm = world()
    is_first = comm is None or comm.rank == 0
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (is_first and console.is_terminal)) as bar:
        task = bar.add_task("objects", total=None)
        try:
            report = verify_store(url, comm=comm, progress=lambda n, total: bar.update(task, completed=n, total=total))
        except MPIStreamError as error:
            bar.stop()
            if is_first:
                failed(error)
            raise typer.Exit(_DAMAGED) from None
    if is_first:
        if as_json:
            say(json.dumps(report.to_json(), indent=2, allow_nan=False))
        else:
            _show(report)
    raise typer.Exit(report.exit_code)


def _show(report: Report) -> None:
    console = console_of()
    columns = named(_COLUMNS, report.record_noun)
    with console.capture() as captured:
        for title, findings in (
            ("Damage", report.damage),
            ("Leftovers, which repair removes", report.leftovers),
            (f"In flight, of {report.writer or 'parts without MPI'}", report.in_flight),
        ):
            if findings:
                console.print(table_of(line(title), columns, [f.to_json() for f in findings]))
                console.print()
    text = "\n".join(row.rstrip() for row in captured.get().splitlines())
    if text:
        say(text)
    if not report.is_complete:
        typer.echo("too many findings: not everything was looked at", err=True)
    verdict = ("all is well", "leftovers, no damage", "DAMAGED")[report.exit_code]
    say(
        f"{line(report.url)}: {verdict}; {counted(report.n_records, report.record_noun)}, commit {report.commit_seq} "
        f"in epoch {report.epoch}, {counted(report.n_objects, 'object')} with {size_text(report.nbytes)} read in "
        f"{report.seconds:.3g} s"
    )


def _records(finding: Mapping[str, Any]) -> str:
    if finding["records"] is None:
        return "-"
    start, stop = finding["records"]
    return str(start) if stop == start + 1 else f"{start} to {stop - 1}"


def _box(finding: Mapping[str, Any]) -> str:
    bounds: Sequence[Sequence[int]] | None = finding["box"]
    return ", ".join(f"{a}:{b}" for a, b in bounds) if bounds else "-"


_COLUMNS: Sequence[Column] = (
    ("variable", False, lambda f: "-" if f["variable"] is None else line(f["variable"])),
    ("records", True, _records),
    ("box", False, _box),
    ("kind", False, lambda f: f["kind"]),
    ("key", False, lambda f: line(f["key"])),
    ("what", False, lambda f: line(f["text"])),
)

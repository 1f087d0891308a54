"""`mpistream watch`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.live import Live

from mpistream.cli.terminal import app, check_one_stream, console_of, failed, line, say, size_text
from mpistream.errors import FormatError, MPIStreamError, counted
from mpistream.watching import Sight, Watch

__all__ = ["watch"]

_DEAD, _LATE, _SHORT = 3, 4, 5
_WAIT_POLL = 0.2
_EXAMPLE = "Example: mpistream watch run.zarr --total 1000, or in a script: mpistream watch run.zarr --once --json"


@app.command(
    help="Follow a run: records, rate, last t, time left, size, and whether its writer lives. Ends with the run: 0 "
    "when it was closed, 3 when its writer died or an exception ended it, 4 when --timeout passed without a commit, 5 "
    "when it was closed with fewer records than are expected.",
    epilog=_EXAMPLE,
)
def watch(
    url: Annotated[str, typer.Argument(help="Folder of the store.", show_default=False)],
    total: Annotated[int | None, typer.Option(min=1, help="Records that are expected.", show_default=False)] = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="End after so many seconds without a commit; while --wait waits for a resume they do not count.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Wait so many seconds for a store that is not there yet, and for a resume of a run that did not end "
            "with 0.",
        ),
    ] = 0.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end; 0 for a run that goes on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, at every change.")] = False,
) -> None:
    """Follow a run.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    total
        Records that are expected; an indexed stream says it itself.
    interval
        Seconds between two looks.
    timeout
        End after so many seconds without a commit; while ``wait`` waits for a resume they do not count.
    wait
        Seconds to wait for a store that is not there yet, and each time for a resume of a run that died, failed or
        was closed with fewer records than are expected.
    once
        Look once and end.
    as_json
        Print one JSON object a line, see `mpistream.watching.Sight`.

    Notes
    -----
    Exit code 0 when the run was closed, or with ``once`` when it goes on; 3 when its writer died or an exception ended
    it, 4 after ``timeout``, 5 when it was closed with fewer records than are expected, 1 and one line on stderr when
    there is no stream. On a terminal one line is kept up to date, elsewhere a line is printed at every change.
    """
    try:
        seen = _found(url, total, wait)
        if once:
            sight = seen.look()
            _print(sight, as_json=as_json)
            raise typer.Exit(_code(sight))
        if sys.stdout.isatty() and not as_json:
            with Live(console=console_of(), auto_refresh=False) as live:
                code = _follow(
                    seen, interval, timeout, wait, lambda s: live.update(_text(s), refresh=True), is_live=True
                )
        else:
            code = _follow(seen, interval, timeout, wait, lambda s: _print(s, as_json=as_json), is_live=False)
    except MPIStreamError as error:
        raise failed(error) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def _follow(
    seen: Watch, interval: float, timeout: float | None, wait: float, show: Callable[[Sight], object], *, is_live: bool
) -> int:
    """Show what is seen until the run has ended, and return the exit code."""
    shown: tuple[str, int, int] | None = None
    began = changed = time.monotonic()
    was_over = False
    while True:
        sight = seen.look()
        news = sight.state, sight.commit_seq, sight.n_records
        if news != shown:
            changed = time.monotonic()
        if is_live or news != shown:
            show(sight)
            shown = news
        is_over = sight.state in ("closed", "failed", "dead")
        if was_over and not is_over:
            # A resume has come, whose first commit may be as late as that of any run.
            began = time.monotonic()
        was_over = is_over
        if is_over:
            # A job in a queue may go on with it; only what is whole is over for good.
            left = changed + wait - time.monotonic()
            if not _code(sight) or left <= 0:
                return _code(sight)
            time.sleep(min(interval, left))
            continue
        waited = time.monotonic() - began
        if sight.seconds_since_commit is not None:
            waited = min(waited, sight.seconds_since_commit)
        if timeout is not None and waited >= timeout:
            return _LATE
        time.sleep(interval)


def _found(url: str, total: int | None, wait: float) -> Watch:
    """Return the watch of a store once it is there."""
    last = time.monotonic() + wait
    is_said = False
    while True:
        # That is never the folder of a stream that is yet to come.
        check_one_stream(url)
        try:
            return Watch(url, n_total=total)
        except FormatError as error:
            if error.kind != "no_manifest":
                raise
            if not wait:
                hint = "--wait SECONDS waits for a store that is yet to come"
                raise FormatError(f"{error}; {hint}", kind=error.kind) from error
            if not is_said:
                typer.echo(f"waiting up to {wait:g} s for {line(url)}", err=True)
                is_said = True
            if (left := last - time.monotonic()) <= 0:
                raise
        time.sleep(min(left, _WAIT_POLL))


def _code(sight: Sight) -> int:
    if sight.state in ("failed", "dead"):
        return _DEAD
    is_short = sight.n_total is not None and sight.n_records < sight.n_total
    return _SHORT if sight.state == "closed" and is_short else 0


def _print(sight: Sight, *, as_json: bool) -> None:
    say(json.dumps(sight.to_json(), allow_nan=False) if as_json else _text(sight))


def _text(sight: Sight) -> str:
    total = "" if sight.n_total is None else f" of {sight.n_total} ({sight.n_records / sight.n_total:.0%})"
    noun = sight.record_noun
    records = f"{sight.n_records}{total} {noun}s" if total else counted(sight.n_records, noun)
    parts = [f"{sight.state}: {records}"]
    if sight.last_t is not None:
        date = "" if sight.last_date is None else f" ({sight.last_date})"
        parts.append(f"t {sight.last_t!r} {line(sight.time_units)}{date}")
    if sight.rate is not None:
        parts.append(f"{sight.rate:.3g} {noun}s/s")
    if sight.eta is not None:
        parts.append(f"{_duration(sight.eta)} left")
    if sight.nbytes is not None:
        parts.append(size_text(sight.nbytes))
    if sight.writer is not None and sight.state != "closed":
        parts.append(line(sight.writer))
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"

"""`Options(progress=True)`: how a run is getting on, on standard error, by rank 0.

On a terminal one line is kept up to date, with a bar where it is known how many records there will be; in the log of a
batch job there is a line a commit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from mpistream.errors import counted

__all__ = ["ProgressLine"]

_BAR_LENGTH = 24
# ECMA-48: back to the begin of the line, and erase it.
_ANEW = "\r\x1b[K"


class ProgressLine:
    """The line of one writer.

    Parameters
    ----------
    name
        The store.
    n_total
        Records there will be, None where the time dim grows.
    n_records
        Records that are there already.
    noun
        What a record is called.
    stream
        Where it is written; by default what ``sys.stderr`` is at that time.
    clock
        Seconds.
    """

    def __init__(
        self,
        name: str,
        n_total: int | None,
        n_records: int,
        *,
        noun: str = "record",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name, self._n_total, self._n_before = name, n_total, n_records
        self._noun, self._stream, self._clock = noun, stream, clock
        self._began = clock()
        self._is_open = False

    def show(self, n_records: int, t: float | None, commit_seq: int, nbytes: int) -> None:
        """Show the state after a commit of so many bytes.

        Not collective.
        """
        seconds = self._clock() - self._began
        rate = (n_records - self._n_before) / seconds if seconds > 0 else 0.0
        text = counted(n_records, self._noun)
        if self._n_total is not None:
            n_full = _BAR_LENGTH * n_records // self._n_total
            bar = "#" * n_full + "." * (_BAR_LENGTH - n_full)
            text = f"[{bar}] {n_records} of {counted(self._n_total, self._noun)}"
        text += "" if t is None else f", t = {t}"
        text += f", commit {commit_seq} of {nbytes / 1e6:.1f} MB, {seconds:.1f} s"
        if rate > 0:
            text += f", {rate:.3g} {self._noun}s/s"
            if self._n_total is not None:
                text += f", {(self._n_total - n_records) / rate:.0f} s left"
        out = sys.stderr if self._stream is None else self._stream
        is_terminal = out.isatty()
        out.write(f"{_ANEW if is_terminal else ''}mpistream: {self._name}: {text}{'' if is_terminal else chr(10)}")
        out.flush()
        self._is_open = is_terminal

    def end(self) -> None:
        """Leave the line as it is, and begin a new one.

        Not collective.
        """
        if self._is_open:
            self._is_open = False
            out = sys.stderr if self._stream is None else self._stream
            out.write("\n")
            out.flush()

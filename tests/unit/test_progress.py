"""What `Options(progress=True)` writes to a terminal, and to the log of a batch job."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

import mpistream as ms
from mpistream.progress import ProgressLine
from tests.support.plain import append_schema


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def line(stream: io.StringIO, n_total: int | None, now: list[float]) -> ProgressLine:
    return ProgressLine("run.zarr", n_total, 2, stream=stream, clock=lambda: now[0])


def test_a_log_has_a_line_a_commit() -> None:
    out, now = io.StringIO(), [100.0]
    found = line(out, None, now)
    found.show(2, None, 1, 0)
    now[0] += 4
    found.show(10, 60.0, 2, 1_500_000)
    found.end()
    assert out.getvalue().splitlines() == [
        "mpistream: run.zarr: 2 records, commit 1 of 0.0 MB, 0.0 s",
        "mpistream: run.zarr: 10 records, t = 60.0, commit 2 of 1.5 MB, 4.0 s, 2 records/s",
    ]


def test_a_terminal_has_one_line_with_a_bar() -> None:
    """It is written over at each commit; the rate is that of this run, not of what was there before."""
    out, now = Screen(), [0.0]
    found = line(out, 12, now)
    now[0] += 2
    found.show(6, 1.0, 1, 0)
    found.show(12, 2.0, 2, 0)
    found.end()
    found.end()
    first, second = out.getvalue().split("\r\x1b[K")[1:]
    assert first == (
        "mpistream: run.zarr: [############............] 6 of 12 records, t = 1.0, commit 1 of 0.0 MB, 2.0 s, "
        "2 records/s, 3 s left"
    )
    assert re.search(r"\[#{24}\] 12 of 12 records.*, 0 s left\n$", second)


def test_a_writer_shows_it_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once a commit that commits something, and not otherwise."""
    schema = append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")})
    for is_asked in (True, False):
        options = ms.Options(durability="none", threads=0, progress=is_asked)
        with ms.write_open(tmp_path / "s", schema, overwrite=True, options=options) as w:
            for i in range(2):
                w.write_record(float(i), {"v": 1.0})
                w.commit()
        lines = [text for text in capsys.readouterr().err.splitlines() if "commit" in text]
        assert [text.split(", commit")[0].split(": ", 2)[2] for text in lines] == (
            ["1 record, t = 0.0", "2 records, t = 1.0"] if is_asked else []
        )

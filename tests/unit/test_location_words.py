"""What is said of a location series speaks of locations: logs, progress, errors, and every verb."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mpistream as ms
from mpistream.cli.verbs import app
from mpistream.parts import LocationPartWriter
from tests.support.location_series import DTYPES, IDS, TIMES, series

OPTIONS = ms.Options(durability="none", threads=0, progress=True)
N = len(IDS)


def opened(url: Path, **more: Any) -> ms.LocationSeriesWriter:
    return ms.write_open_locations(url, IDS, TIMES, DTYPES, options=OPTIONS, chunk_locations=5, **more)


def run(*args: Any) -> str:
    return CliRunner().invoke(app, [str(arg) for arg in args]).output


def speaks_of_records(text: str) -> bool:
    return re.search(r"\brecords?\b", text.replace("record_noun", "").replace("read_record", "")) is not None


def message(call: Callable[[], object]) -> str:
    with pytest.raises(ms.MPIStreamError) as caught:
        call()
    return str(caught.value)


def test_writers_and_readers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Log, progress, errors and what they print as."""
    url = tmp_path / "s"
    w = opened(url)
    with caplog.at_level(logging.DEBUG, "mpistream"):
        for i in range(3):
            w.write_location(i, series(i))
        w.commit()
        w.rollback()
        said = [message(lambda: w.write_blob("seed", b"x", 99)), message(lambda: w.invalidate([9]))]
        w.invalidate([2])
        w.close(partial=True)
        with pytest.raises(ZeroDivisionError), ms.write_resume(url, options=OPTIONS) as again:
            1 / 0  # noqa: B018 (it raises)
        assert isinstance(again, ms.LocationSeriesWriter)
        ms.write_resume(url, options=OPTIONS).rollback()
    texts = caplog.messages
    assert [speaks_of_records(text) for text in texts] == [False] * len(texts), texts
    for text in (
        *("rolled back to commit 1, 3 locations", "invalidated 1 location", "closed: 3 locations in 1 commit"),
        *("resumed with 2 locations, epoch 2", "2 of 2 locations are committed", "commit 1: 3 locations, "),
    ):
        assert any(text in found for found in texts), (text, texts)
    progress = capsys.readouterr().err
    assert f"3 of {N} locations, commit 1 of " in progress
    assert not speaks_of_records(progress)
    reader = ms.open_reader(url)
    said += [message(partial(reader.read_location, "flow", n)) for n in (7, N)]
    said += [message(lambda: reader.read_record("flow", 0, {"x": (0, 1)})), repr(reader)]
    assert [speaks_of_records(text) for text in said] == [False] * len(said), said
    assert said[-3] == f"location {N} of 'flow': there are {N} locations; refresh() looks for newer ones"


def test_verbs(tmp_path: Path) -> None:
    """Their tables, their lines, and of the missing shard what verify says."""
    url, other = tmp_path / "s", tmp_path / "other"
    for path in (url, other):
        with opened(path) as w:
            for i in range(N):
                w.write_location(i, series(i, version=int(path == other and i == 7)))
    looks = [("info", url), ("ls", url), ("watch", url), ("diff", url, other), ("diff", url, url), ("verify", url)]
    for args in (*looks, ("plan", url, "--ranks", 2, "--records", N), ("repair", url)):
        text = run(*args)
        assert re.search(rf"\b{N}( of {N} \(100%\))? locations|^locations +{N}$", text, re.MULTILINE), text
        assert not speaks_of_records(text), text
    assert "first at location 7, time[0]" in run("diff", url, other)
    assert [json.loads(run(verb, url, "--json"))["record_noun"] for verb in ("info", "ls", "verify")] == [
        "location"
    ] * 3
    next(path for path in (url / "flow/c").rglob("*") if path.is_file()).unlink()
    text = run("verify", url)
    assert " locations " in text.splitlines()[1]
    assert not speaks_of_records(text)


def test_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The account of a part, and the receipt that `mpistream commit` prints."""
    url, token = tmp_path / "s", tmp_path / "token.json"
    schema = ms.location_schema(IDS, TIMES, DTYPES, chunk_locations=5)
    with (
        caplog.at_level(logging.INFO, "mpistream"),
        ms.write_open_part(url, schema, writer=0, n_writers=1, options=OPTIONS) as part,
    ):
        assert isinstance(part, LocationPartWriter)
        part.write_location(3, series(3))
        token.write_text(json.dumps(part.flush().to_json()))
    assert "part 0 closed: 1 location in 0 commits" in caplog.text
    assert ": 1 new location, " in run("commit", url, token)

"""``mpistream repair``: what it prints, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mpistream as ms

pytest.importorskip("typer", reason="needs typer, from the extra cli")
pytest.importorskip("rich", reason="needs rich, from the extra cli")

from typer.testing import CliRunner, Result

from mpistream.cli.verbs import app


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["repair", *(str(a) for a in args)])


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """Return a store with five records, of which a resume has dropped three."""
    url = tmp_path / "run.zarr"
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4},
        time=ms.AppendTime(units="s since 2000-01-01"),
        variables={"v": ms.Variable(("time", "y"), "int32")},
    )
    with ms.write_open(url, schema) as w:
        for i in range(5):
            w.write_record(0.5 + i, {"v": i})
    ms.write_resume(url, at=1.5).close()
    return url


def test_repair_prints_what_it_did(url: Path) -> None:
    """Without the flag nothing comes back; with it all, once."""
    done = run(url)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        "epoch 3: what runs left undone is finished, documents are in step; 2 records committed, last t 1.5; data were "
        "not read, `mpistream verify` does that\n"
    )
    done = run(url, "--restore-dropped")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "epoch 4: 3 dropped records restored; 5 records committed, last t 4.5\n"
    assert [ms.read_record(url, "v", i)[0] for i in range(5)] == [0, 1, 2, 3, 4]
    done = run(url, "--restore-dropped")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "nothing to restore" in done.stderr
    assert done.stderr.count("\n") == 1


def test_json_is_the_receipt(url: Path) -> None:
    done = run(url, "--restore-dropped", "--json")
    receipt = json.loads(done.stdout)
    expected = {"epoch": 3, "n_records": 5, "n_new_records": 3, "last_t": 4.5, "warnings": []}
    assert {k: receipt[k] for k in expected} == expected


def test_a_live_writer_loses_the_store_only_if_asked_to(url: Path) -> None:
    w = ms.write_resume(url)
    done = run(url, "--restore-dropped")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "which is alive" in done.stderr
    assert "give --takeover" in done.stderr
    assert "=True" not in done.stderr
    assert run(url, "--restore-dropped", "--takeover").exit_code == 0
    w.write_record(9.5, {"v": 9})
    with pytest.raises(ms.FencedError):
        w.close()


def test_repair_of_what_is_no_store(tmp_path: Path) -> None:
    done = run(tmp_path / "none")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"error: no such folder: {tmp_path}/none; there is nothing to repair\n"
    assert "write_open" not in done.stderr
    assert list(tmp_path.iterdir()) == []

"""``mpistream plan``: what a run will write, from a store or from a file that makes a schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import mpistream as ms
from mpistream.cli.verbs import app

SCHEMA = """
import mpistream as ms
schema = ms.StreamSchema(
    dims={"time": None, "y": 64, "x": 32},
    time=ms.AppendTime(units="s since 2000-01-01"),
    variables={"u": ms.Variable(("time", "y", "x"), "float32")},
    shard_shape={"time": 1, "y": 16, "x": 32},
)
"""


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, args)])


def test_plan_of_a_file_and_of_a_store_agree(tmp_path: Path) -> None:
    """Four shards a record, on four of four ranks; nothing moves."""
    file = tmp_path / "described.py"
    file.write_text(SCHEMA)
    found = run(f"{file}:schema", "--ranks", "4", "--nodes", "2", "--records", "10", "--json")
    assert found.exit_code == 0, found.output
    plan = json.loads(found.stdout)
    assert (plan["n_ranks"], plan["writers"], plan["n_objects_per_record"]) == (4, [0, 1, 2, 3], 4)
    assert (plan["nbytes_per_record"], plan["nbytes_moved_per_record"]) == (64 * 32 * 4, 0)
    namespace: dict[str, ms.StreamSchema] = {}
    exec(SCHEMA, namespace)
    ms.write_open(tmp_path / "s", namespace["schema"]).close()
    again = json.loads(run(tmp_path / "s", "--ranks", "4", "--nodes", "2", "--json").stdout)
    assert again == plan
    text = run(f"{file}:schema", "--ranks", "4", "--records", "10").stdout
    assert "4 of 4 ranks write 8 KiB a record in 4 objects" in text
    assert "writers: 0 to 3; 40 objects in 10 records" in text


@pytest.mark.parametrize("call", ["ms.write_open(url, schema, overwrite=True)", "ms.write_resume(url)"])
def test_a_script_that_writes_is_not_run(tmp_path: Path, call: str) -> None:
    """It would overwrite, or go on with, a run that is there; the store stays as it is."""
    url = tmp_path / "s"
    file = tmp_path / "run.py"
    file.write_text(f"{SCHEMA}\nurl = {str(url)!r}\nwith {call} as w:\n    w.write_record(1.0, {{'u': 1.0}})\n")
    namespace: dict[str, ms.StreamSchema] = {}
    exec(SCHEMA, namespace)
    with ms.write_open(url, namespace["schema"]) as w:
        w.write_record(0.0, {"u": 0.0})
    before = (url / ".mpistream" / "manifest.json").read_bytes()
    found = run(f"{file}:schema", "--ranks", "4")
    assert found.exit_code == 1
    assert "is read for its schema alone; put the schema into a module that writes nothing" in found.stderr
    assert (url / ".mpistream" / "manifest.json").read_bytes() == before
    # Only while it is read.
    ms.write_resume(url).close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing.py:schema", "FileNotFoundError"),
        ("json:dumps", "is a function; give the name of a StreamSchema"),
        ("json:nothing", "AttributeError"),
    ],
)
def test_what_is_no_schema_is_named(text: str, message: str) -> None:
    """In one line."""
    found = run(text, "--ranks", "2")
    assert found.exit_code == 1
    assert message in found.stderr


def test_a_site_s_options_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the run that is planned: writers, and what may wait in memory; --writers goes before the file."""
    file = tmp_path / "described.py"
    file.write_text(SCHEMA)
    site = tmp_path / "site.toml"
    site.write_text("writers = 1\nmax_pending_nbytes = 1000000\n")
    ask = f"{file}:schema", "--ranks", "4", "--json"
    plain = json.loads(run(*ask).stdout)
    monkeypatch.setenv("MPISTREAM_OPTIONS", str(site))
    found = json.loads(run(*ask).stdout)
    assert found["writers"] == [0]
    # One rank has all four shards of 2 KiB, and then what waits.
    assert found["writer_memory_nbytes"] >= 1_000_000 > plain["writer_memory_nbytes"]
    given = json.loads(run(*ask, "--writers", "all").stdout)
    assert (given["writers"], given["n_ranks"]) == ([0, 1, 2, 3], 4)
    site.write_text("threads = 0\nwriters = 1\n")
    # The record that comes in, and the shards of it.
    assert json.loads(run(*ask).stdout)["writer_memory_nbytes"] == 2 * 64 * 32 * 4
    site.write_text("wait = 3\n")
    refused = run(*ask)
    assert (refused.exit_code, f"$MPISTREAM_OPTIONS = {site}: unknown options ['wait']" in refused.stderr) == (1, True)

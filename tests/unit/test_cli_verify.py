"""``mpistream verify`` and ``mpistream truncate``: what they print, and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mpistream as ms

pytest.importorskip("typer", reason="needs typer, from the extra cli")
pytest.importorskip("rich", reason="needs rich, from the extra cli")

from typer.testing import CliRunner, Result

from mpistream.cli.verbs import app
from tests.support.collective import tree


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """Return a store with five records in two rows."""
    url = tmp_path / "run.zarr"
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4},
        time=ms.AppendTime(units="hours since 2000-01-01"),
        variables={"v": ms.Variable(("time", "y"), "int32")},
        shard_shape={"time": 3, "y": 4},
    )
    with ms.write_open(url, schema) as w:
        for i in range(5):
            w.write_record(float(i), {"v": i + 1})
    return url


def test_a_sound_store(url: Path) -> None:
    done = run("verify", url)
    assert (done.exit_code, done.stderr) == (0, "")
    first, _, rest = done.stdout.partition("; ")
    assert first == f"{url}: all is well"
    assert rest.startswith("5 records, commit 1 in epoch 1, 2 objects with ")
    seconds = float(rest.split(" read in ")[1].removesuffix(" s\n"))
    assert 0 <= seconds < 60
    assert 0 < json.loads(run("verify", url, "--json").stdout)["seconds"] < 60


def test_leftovers_are_listed(url: Path) -> None:
    (url / "v/c/9").mkdir()
    assert run("verify", url).exit_code == 0  # folders alone are made ahead of use
    (url / "v/c/9/0").write_bytes(b"x")
    done = run("verify", url)
    assert (done.exit_code, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "Leftovers, which repair removes"
    assert lines[2].split()[:3] == ["v", "27", "to"]
    assert lines[-1].startswith(f"{url}: leftovers, no damage; ")
    assert run("repair", url).exit_code == 0
    assert run("verify", url).exit_code == 0


def test_damage_is_a_table_by_variable_records_and_box(url: Path) -> None:
    (url / "v/c/1/0").write_bytes(b"")
    done = run("verify", url)
    assert done.exit_code == 2
    title, head, row, *_ = done.stdout.splitlines()
    assert title == "Damage"
    assert head.split() == ["variable", "records", "box", "kind", "key", "what"]
    assert row.split()[:6] == ["v", "3", "to", "4", "0:4", "index"]
    assert "DAMAGED" in done.stdout.splitlines()[-1]
    report = json.loads(run("verify", url, "--json").stdout)
    assert report["exit_code"] == 2
    (found,) = report["damage"]
    assert (found["variable"], found["records"], found["box"]) == ("v", [3, 5], [[0, 4]])
    assert (found["kind"], found["key"]) == ("index", "v/c/1/0")


@pytest.mark.parametrize("what", ["nothing", "manifest cut"])
def test_what_can_not_be_verified_is_one_line_and_the_code_of_damage(url: Path, what: str) -> None:
    """No traceback (P-14)."""
    manifest = url / ".mpistream/manifest.json"
    if what == "nothing":
        manifest.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[:100])
    done = run("verify", url)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("at", ["2.5", "2000-01-01T02:30"])
def test_truncate_drops_what_lies_behind(url: Path, at: str) -> None:
    """By number or date; the rest is untouched, and repair brings it back."""
    before = tree(url / "v/c/0")
    done = run("truncate", url, "--at", at)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("2 records dropped, last t 2.0; `mpistream repair --restore-dropped` brings")
    assert [ms.read_record(url, "v", i)[0] for i in range(ms.open_reader(url).n_records)] == [1, 2, 3]
    assert tree(url / "v/c/0") == before
    assert run("verify", url).exit_code == 0
    assert run("repair", url, "--restore-dropped").exit_code == 0
    assert ms.open_reader(url).n_records == 5


def test_truncate_behind_the_end_writes_nothing(url: Path) -> None:
    before = tree(url)
    done = run("truncate", url, "--at", "4", "--json")
    assert json.loads(done.stdout) == {"n_dropped": 0, "last_t": 4.0, "at": 4.0, "previous_epoch": 1}
    assert tree(url) == before


@pytest.mark.parametrize(("at", "text"), [("soon", "neither a number nor a date"), ("nan", "is NaN")])
def test_truncate_at_what_is_no_time(url: Path, at: str, text: str) -> None:
    before = tree(url)
    done = run("truncate", url, "--at", at)
    assert (done.exit_code, done.stdout) == (1, "")
    assert text in done.stderr
    assert tree(url) == before


def test_truncate_respects_a_live_writer(url: Path) -> None:
    w = ms.write_resume(url)
    done = run("truncate", url, "--at", "1")
    assert done.exit_code == 1
    assert "which is alive" in done.stderr
    assert run("truncate", url, "--at", "1", "--takeover").exit_code == 0
    w.write_record(9.5, {"v": 9})
    with pytest.raises(ms.FencedError):
        w.close()
    assert ms.open_reader(url).n_records == 2
    assert run("truncate", url.parent / "none", "--at", "1").exit_code == 1

"""A folder above streams, and an array of one: every verb says which stream to give, in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import mpistream as ms
from tests.support.plain import QUICK, append_schema

pytest.importorskip("typer", reason="needs typer, from the extra cli")

from typer.testing import CliRunner

from mpistream.cli.verbs import app

SCHEMA = append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")})
# With what each is called; {} is the place. `bench` takes no store.
CALLS: dict[str, tuple[str, ...]] = {
    "commit": ("{}", "token.json"),
    "diff": ("{}", "{}"),
    "export": ("{}", "out.nc"),
    "info": ("{}",),
    "ls": ("{}",),
    "plan": ("{}", "--ranks", "2"),
    "plot": ("{}", "v"),
    "repair": ("{}",),
    "truncate": ("{}", "--at", "0"),
    "verify": ("{}",),
    "watch": ("{}", "--wait", "60"),
}
LISTING = ("info", "ls")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two streams in a Zarr group, in a plain folder, and in a group below a group; and the token of a part."""
    path = tmp_path_factory.mktemp("places")
    for name in ("run.zarr/a", "run.zarr/b", "plain/a", "plain/b", "deep.zarr/run/a", "deep.zarr/run/b"):
        with ms.write_open(path / name, SCHEMA, options=QUICK) as w:
            w.write_record(0.0, {"v": 1.0})
    with ms.write_open_part(path / "parts", SCHEMA, writer=0, n_writers=1, options=QUICK) as part:
        part.write_record(0.0, {"v": 1.0})
        (path / "token.json").write_text(json.dumps(part.flush().to_json()))
    return path


def streams(place: Path) -> str:
    below = place / "run" if place.name == "deep.zarr" else place
    return f"{place} is not a stream, it holds streams; give the folder of one: {below}/a, {below}/b"


def array(place: Path) -> str:
    return f"{place} is not a stream, it is an array of the stream {place.parent}; give that one"


def test_every_verb_is_here() -> None:
    """A new one is held to the rule, too."""
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert verbs == set(CALLS) | {"bench"}


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize(
    ("name", "says"),
    [("run.zarr", streams), ("plain", streams), ("deep.zarr", streams), ("run.zarr/a/v", array)],
)
def test_the_stream_to_give_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, name: str, says: Callable[[Path], str]
) -> None:
    """Those that list do it all the same, where there is a Zarr node; nothing is written, and nothing is waited for."""
    monkeypatch.chdir(folder)
    place = folder / name
    before = sorted(folder.rglob("*"))
    done = CliRunner().invoke(app, [verb, *(arg.format(place) for arg in CALLS[verb])])
    lists = verb in LISTING and (place / "zarr.json").exists()
    said = done.stdout if lists else done.stderr
    assert says(place) in said, done.output
    assert (done.exit_code, len(done.stderr.splitlines())) == (
        (0, 0) if lists else (2 if verb in ("diff", "verify") else 1, 1)
    )
    assert sorted(folder.rglob("*")) == before


def test_diff_looks_at_both(folder: Path) -> None:
    """Also where the first is a stream."""
    done = CliRunner().invoke(app, ["diff", str(folder / "run.zarr/a"), str(folder / "run.zarr")])
    assert (done.exit_code, done.stderr) == (2, f"error: {streams(folder / 'run.zarr')}\n")


def test_a_stream_that_is_being_made_is_waited_for(tmp_path: Path) -> None:
    """Its group is there before its manifest."""
    url = tmp_path / "s"
    ms.write_open(url, SCHEMA, options=QUICK).close()
    (url / ".mpistream/manifest.json").unlink()
    done = CliRunner().invoke(app, ["watch", str(url), "--wait", "0.01"])
    assert done.stderr.splitlines() == [
        f"waiting up to 0.01 s for {url}",
        f"error: {url} was never created whole: it has .mpistream and no .mpistream/manifest.json",
    ]
    assert CliRunner().invoke(app, ["diff", str(url), str(url)]).stderr.splitlines() == done.stderr.splitlines()[1:]


def test_links_of_others_are_followed(tmp_path: Path) -> None:
    """Documents that are links, as git-annex has them, hide neither a store of others nor that it is no stream."""
    url = tmp_path / "annexed"
    url.mkdir()
    (tmp_path / "kept").write_text('{"zarr_format": 3, "node_type": "group"}')
    (url / "zarr.json").symlink_to(tmp_path / "kept")
    for args in (("ls", url), ("info", url), ("diff", url, url)):
        done = CliRunner().invoke(app, list(map(str, args)))
        assert (done.exit_code, done.stderr) == (0, ""), done.output
    with ms.open_reader(url) as reader, pytest.raises(ms.FormatError) as caught:
        _ = reader.schema
    assert caught.value.kind == "no_manifest"


@pytest.mark.parametrize("verb", LISTING)
def test_a_failure_behind_the_listing_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """The look at what was meant is a read like any other."""

    def fails(url: str) -> str:
        raise ms.StoreError(f"{url}: gone", kind="storage")

    monkeypatch.setattr(f"mpistream.cli.{verb}.instead_of", fails)
    done = CliRunner().invoke(app, [verb, str(folder / "run.zarr")])
    assert (done.exit_code, done.stderr) == (1, f"error: {folder}/run.zarr: gone\n")


def test_what_others_put_into_a_stream_is_theirs(tmp_path: Path) -> None:
    """Only what the manifest names is an array of the stream."""
    for name in ("a", "b"):
        ms.write_open(tmp_path / name, SCHEMA, options=QUICK).close()
        place = tmp_path / name / "analysis"
        place.mkdir()
        (place / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    a, b = (str(tmp_path / name / "analysis") for name in ("a", "b"))
    assert CliRunner().invoke(app, ["diff", a, b]).exit_code == 0
    assert CliRunner().invoke(app, ["ls", a]).stdout.splitlines()[0] == f"{a}: no stream"
    done = CliRunner().invoke(app, ["verify", a])
    assert "it is a Zarr store that others wrote" in done.stderr
    # A damaged manifest names nothing.
    (tmp_path / "a/.mpistream/manifest.json").write_text("{")
    assert CliRunner().invoke(app, ["ls", a]).exit_code == 0

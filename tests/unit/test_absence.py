"""A path where no stream lies: the message says what does, and which path may have been meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import mpistream as ms
from mpistream.memory_store import MemoryStore
from tests.support.plain import QUICK, append_schema

SCHEMA = append_schema({"y": 4}, {"v": ms.Variable(("time", "y"), "f4")})


def _folder(path: Path) -> None:
    path.mkdir()


def _others(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("x")


def _group(path: Path) -> None:
    path.mkdir()
    (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')


def _streams(path: Path) -> None:
    for name in ("a", "b"):
        ms.write_open(path / name, SCHEMA, options=QUICK).close()


def _many(path: Path) -> None:
    for i in range(6):
        ms.write_open(path / f"s{i}", SCHEMA, options=QUICK).close()


def _states(path: Path) -> None:
    """Three saves in two slots: the newest is in the first one."""
    states = ms.CheckpointPair(path, SCHEMA)
    for t in (1.0, 2.0, 3.0):
        states.save(t, {"v": 0.0}, options=QUICK)


def _damaged(path: Path) -> None:
    """Of two states the newest is damaged."""
    ms.CheckpointPair(path, SCHEMA).save(1.0, {"v": 0.0}, options=QUICK)
    ms.CheckpointPair(path, SCHEMA).save(2.0, {"v": 0.0}, options=QUICK)
    (path / "1/.mpistream/manifest.json").write_bytes(b"{")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda _: None, "no such folder: {}"),
        (lambda path: path.write_text("x"), "{} is a file, and not the folder of a store"),
        (_folder, "{} is not a stream: it is empty"),
        (
            _others,
            "{} is not a stream: there is no .mpistream/manifest.json, and no document of another Zarr store either",
        ),
        (
            lambda path: (path / ".mpistream").mkdir(parents=True),
            "{} was never created whole: it has .mpistream and no .mpistream/manifest.json",
        ),
        (_streams, "{0} is not a stream, it holds streams; give the folder of one: {0}/a, {0}/b"),
        (
            _many,
            "{0} is not a stream, it holds streams; give the folder of one: {0}/s0, {0}/s1, {0}/s2, {0}/s3 and 2 more",
        ),
        (
            _states,
            (
                "{0} is not a stream, it holds the states of a CheckpointPair, each a stream; give the folder of one: "
                "{0}/0, {0}/1, of which {0}/0 is the newest"
            ),
        ),
        (
            _damaged,
            (
                "{0} is not a stream, it holds the states of a CheckpointPair, each a stream; give the folder of one: "
                "{0}/0, of which {0}/0 is the newest"
            ),
        ),
    ],
)
def test_what_is_said_of_a_path_without_a_stream(tmp_path: Path, make: Callable[[Path], object], text: str) -> None:
    """The same by reading, verifying and repairing."""
    path = tmp_path / "run"
    make(path)
    said = text.format(path)
    for call in (ms.open_reader, ms.verify):
        with pytest.raises(ms.FormatError) as caught:
            call(path)
        assert (caught.value.kind, str(caught.value)) == ("no_manifest", said)
    with pytest.raises(ms.ResumeError) as refused:
        ms.repair(path, options=QUICK)
    assert (refused.value.kind, str(refused.value)) == ("no_store", f"{said}; there is nothing to repair")


def test_a_zarr_store_of_others_is_named_as_one(tmp_path: Path) -> None:
    """A reader opens it; what takes a stream says why it does not."""
    _group(tmp_path / "run")
    assert not ms.open_reader(tmp_path / "run").is_stream
    with pytest.raises(ms.FormatError) as caught:
        ms.verify(tmp_path / "run")
    text = "is not a stream: it is a Zarr store that others wrote, without .mpistream/manifest.json"
    assert str(caught.value) == f"{tmp_path}/run {text}"


def test_a_store_that_is_no_folder() -> None:
    with pytest.raises(ms.FormatError, match=r"^memory is not a stream: it is empty$"):
        ms.open_reader(MemoryStore())  # type: ignore[arg-type]

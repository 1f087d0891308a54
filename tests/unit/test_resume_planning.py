"""A resume plans who writes what once, though it looks at the store twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream import resuming, session
from mpistream.opening import claim, settled

OPTIONS = ms.Options(durability="none", threads=0)


def make(url: Path, n: int, **how: Any) -> None:
    """Create a stream of one record over n points."""
    schema = ms.StreamSchema(
        dims={"time": None, "x": n},
        time=ms.AppendTime(units="s since 2000-01-01"),
        variables={"u": ms.Variable(("time", "x"), "int32")},
    )
    with ms.write_open(url, schema, options=OPTIONS, **how) as w:
        w.write_record(0, {"u": np.arange(n, dtype="int32")})


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of x for which it was planned."""
    found: list[int] = []

    def counted(schema: ms.StreamSchema, *args: Any) -> Any:
        found.append(schema.partitioned_sizes["x"])
        return settled(schema, *args)

    monkeypatch.setattr(resuming, "settled", counted)
    return found


@pytest.fixture
def replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the resume has the store, another writer puts a longer one in its place."""
    real = claim

    def late(*args: Any, **how: Any) -> Any:
        monkeypatch.setattr(session, "claim", real)
        make(tmp_path / "s", 8, overwrite=True)
        return real(*args, **how)

    make(tmp_path / "s", 5)
    monkeypatch.setattr(session, "claim", late)


def test_a_store_that_stays_is_planned_once(tmp_path: Path, plans: list[int]) -> None:
    """The look behind the fence finds the schema of the one before it."""
    make(tmp_path / "s", 5)
    with ms.write_resume(tmp_path / "s", options=OPTIONS, region=[{"x": (3, 5)}, {"x": (0, 3)}]) as w:
        assert w.shapes_of("u") == [(2,), (3,)]
    assert plans == [5]


@pytest.mark.usefixtures("replaced")
def test_a_store_that_was_replaced_meanwhile_is_planned_anew(tmp_path: Path, plans: list[int]) -> None:
    """What is resumed is the one that is there now."""
    with ms.write_resume(tmp_path / "s", options=OPTIONS) as w:
        assert w.shape_of("u") == (8,)
    assert plans == [5, 8]


@pytest.mark.usefixtures("replaced")
def test_indices_into_a_store_that_was_replaced_are_refused(tmp_path: Path) -> None:
    """They were compared with the boxes of the other one."""
    with pytest.raises(ms.ResumeError, match="was replaced while it was opened; try again") as caught:
        ms.write_resume(tmp_path / "s", options=OPTIONS, region=ms.Indices({"x": [4, 3, 2, 1, 0]}))
    assert caught.value.kind == "replaced"
    assert ms.open_reader(tmp_path / "s").read_record("u", 0).tolist() == list(range(8))

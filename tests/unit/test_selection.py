"""What of a stream is chosen for a file: names, records, boxes, and what comes along."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.errors import SchemaError
from mpistream.manifest import Manifest
from mpistream.memory_store import MemoryStore
from mpistream.selection import Selection, groups_of, parse_bounds, select, slabs_of

N_RECORDS = 6


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4, "x": 6, "x_u": ms.Staggered("x"), "nv": 2},
        time=ms.AppendTime(units="s since 2000-01-01", attrs={"bounds": "time_bnds"}),
        variables={
            "u": ms.Variable(("time", "y", "x_u"), "f4"),
            "t": ms.Variable(("time", "y", "x"), "f4"),
            "time_bnds": ms.Variable(("time", "nv"), "f8"),
            "z": ms.Variable(("time", "y", "x"), "f4", keep_bits=4),
        },
        statics={"depth": ms.Variable(("y", "x"), "f4"), "late": ms.Variable(("y", "x"), "f4")},
        coords={
            "y": ms.Coordinate(("y",), np.arange(4.0), attrs={"bounds": "y_bnds"}),
            "y_bnds": ms.Coordinate(("y", "nv"), np.zeros((4, 2))),
            "lat": ms.Coordinate(("y", "x"), dtype="f8"),
            "height": ms.Coordinate((), 2.0),
        },
    )
    store: Any = MemoryStore()
    with ms.write_open(store, schema, options=ms.Options(threads=0)) as w:
        w.write_static("depth", 1.0)
        for i in range(N_RECORDS):
            w.write_record(float(i), dict.fromkeys(schema.variables, 0.0))
        w.commit()
        return w.reader.manifest


def names(found: Selection) -> list[str]:
    return [a.name for a in found.arrays]


def test_everything_that_is_committed_is_chosen_by_default(manifest: Manifest) -> None:
    """Time and what names the rounding come first; statics that nobody wrote are named."""
    found = select(manifest)
    assert names(found) == [
        *("time", "quantization_info", "u", "t", "time_bnds", "z", "depth", "y", "y_bnds", "height"),
    ]
    assert found.left_out == ("late", "lat")
    assert found.records == range(6)
    assert dict(found.box) == {"y": (0, 4), "x": (0, 6), "x_u": (0, 7), "nv": (0, 2)}
    shapes = {a.name: found.shape_of(a) for a in found.arrays}
    assert (shapes["u"], shapes["depth"], shapes["time"], shapes["height"]) == ((6, 4, 7), (4, 6), (6,), ())


def test_coordinates_and_bounds_come_along(manifest: Manifest) -> None:
    """Of a variable those over its dims, and the bounds of them and of time."""
    found = select(manifest, variables=["t"])
    assert names(found) == ["time", "t", "time_bnds", "y", "y_bnds", "height"]
    assert found.left_out == ("lat",)
    assert names(select(manifest, variables="time")) == ["time", "time_bnds", "height"]
    assert "quantization_info" in names(select(manifest, variables=["z"]))


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (2, range(2, 3)),
        (-1, range(5, 6)),
        (np.int64(3), range(3, 4)),
        (slice(None, 4), range(4)),
        (slice(-2, None), range(4, 6)),
        (slice(0, 6, 2), range(0, 6, 2)),
        (range(1, 5, 3), range(1, 5, 3)),
        ((1, 4), range(1, 4)),
    ],
)
def test_records(manifest: Manifest, records: Any, expected: range) -> None:
    assert select(manifest, records=records).records == expected


@pytest.mark.parametrize(
    "records",
    [
        6,
        -7,
        slice(3, 3),
        slice(2, 7),
        slice(7, 50),
        slice(None, None, -1),
        (4, 9),
        range(-1, 3),
        (5, 2),
        "1",
        1.5,
        (1, 2, 3),
    ],
)
def test_records_that_are_not_there(manifest: Manifest, records: Any) -> None:
    with pytest.raises(SchemaError, match="records") as caught:
        select(manifest, records=records)
    assert caught.value.kind == "records"


def test_a_staggered_dim_follows_the_other(manifest: Manifest) -> None:
    """Cells 2 to 4 have the faces 2 to 5; a box of its own goes before."""
    assert select(manifest, region={"x": (2, 5)}).box["x_u"] == (2, 6)
    assert select(manifest, region={"x": slice(2, 5), "x_u": (0, 1)}).box["x_u"] == (0, 1)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"variables": ["nothing"]}, "unknown", "'nothing'"),
        ({"variables": ["late"]}, "not_committed", "'late'"),
        ({"region": {"time": (0, 1)}}, "region", "'time'"),
        ({"region": {"y": (2, 9)}}, "region", "length 4"),
        ({"region": {"y": (2, 2)}}, "region", "empty"),
        ({"region": [("y", 1)]}, "region", "list"),
    ],
)
def test_what_is_not_there(manifest: Manifest, given: dict[str, Any], kind: str, text: str) -> None:
    with pytest.raises(SchemaError, match=text) as caught:
        select(manifest, **given)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", (3, 4)), ("-1", (-1, None)), ("-2", (-2, -1)), ("2:10", (2, 10)), (":4", (None, 4)), ("-3:", (-3, None))],
)
def test_bounds_as_text(text: str, expected: tuple[int | None, int | None]) -> None:
    assert parse_bounds(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1:b", "1.5", "1:2:3"])
def test_bounds_that_are_none(text: str) -> None:
    with pytest.raises(SchemaError, match="START:STOP"):
        parse_bounds(text)


@pytest.mark.parametrize("step", [1, 2, 3, 5])
@pytest.mark.parametrize("committed", [((0, 12),), ((0, 5), (6, 7), (9, 12)), ()])
@pytest.mark.parametrize("first", [0, 1])
def test_groups_are_the_committed_records_of_inner_chunks(
    step: int, committed: tuple[tuple[int, int], ...], first: int
) -> None:
    """Each committed record is in one group; a group lies in one chunk of 4 records, and so does all between."""
    there = {i for a, b in committed for i in range(a, b)}
    records = range(first, 12, step)
    found = [records[k : k + n] for k, n in groups_of(records, committed, 4)]
    assert [i for group in found for i in group] == [i for i in records if i in there]
    for group in found:
        assert len({i // 4 for i in group}) == 1
        assert set(range(group[0], group[-1] + 1)) <= there
    if there == set(range(12)):
        assert len(found) == len({i // 4 for i in records})


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (3, 10), (3, 4), (9, 10)])
@pytest.mark.parametrize("n", [1, 2, 3, 20])
def test_slabs_are_a_box_cut_on_edges(start: int, stop: int, n: int) -> None:
    found = slabs_of(((start, stop), (1, 5)), n, 4)
    assert len(found) <= n
    assert [i for (a, b), _ in found for i in range(a, b)] == list(range(start, stop))
    assert {rest for _, *rests in found for rest in rests} == {(1, 5)}
    assert all(a % 4 == 0 for (a, _), _ in found[1:])

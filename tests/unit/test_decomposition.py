"""The choice between ranks that write what they hold and few that write for all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import mpistream as ms
from mpistream.decomposition import decompose, settle, settle_indexed
from mpistream.errors import AlignmentError, TilingError
from mpistream.indexing import owners_answer
from mpistream.region import Region
from mpistream.tiling import box_n_cells


def stream(sizes: dict[str, int], **layout: Any) -> ms.StreamSchema:
    variables = {"u": ms.Variable(("time", *sizes), "f4"), "e": ms.Variable(("time",), "f8")}
    return ms.StreamSchema(dims={"time": None, **sizes}, time=ms.AppendTime(units="s"), variables=variables, **layout)


def columns(*edges: int) -> list[Region]:
    """Regions over x between these edges, from left to right."""
    return [Region.of_box(("x",), (pair,)) for pair in itertools.pairwise(edges)]


def found(schema: ms.StreamSchema, regions: Any, nodes: Any, writers: Any = "auto", rearrange: str = "auto") -> Any:
    """Whether pieces move, the ranks that write ``u``, and how many objects it has."""
    resolved, epoch = settle(schema, regions, nodes, writers=writers, rearrange=rearrange)
    writing = [rank for rank, boxes in enumerate(epoch.boxes["u"]) if sum(map(box_n_cells, boxes))]
    return bool(epoch.exchanges), writing, resolved.arrays["u"].grid.n_shards


GIVEN = stream({"x": 12}, shard_shape={"time": 1, "x": 3}, chunk_shape={"time": 1, "x": 3})
OPEN = stream({"x": 12})
# 12 Mi cells of 4 bytes: 48 MiB, and 16 MiB a third.
LARGE = stream({"x": 12 * 2**20})
MIB = 2**20


@pytest.mark.parametrize(
    ("schema", "regions", "writers", "expected"),
    [
        # On edges of shards that are given: whoever holds writes, unless fewer shall write.
        pytest.param(GIVEN, columns(0, 3, 6, 12), "auto", (False, [0, 1, 2], 4), id="aligned"),
        pytest.param(GIVEN, columns(0, 3, 6, 12), "all", (False, [0, 1, 2], 4), id="aligned-all"),
        pytest.param(GIVEN, columns(0, 3, 6, 12), 3, (False, [0, 1, 2], 4), id="aligned-3"),
        pytest.param(GIVEN, columns(0, 3, 6, 12), 2, (True, [0, 2], 4), id="aligned-2"),
        pytest.param(GIVEN, columns(0, 3, 6, 12), "node", (True, [2], 4), id="aligned-node"),
        # Off the edges.
        pytest.param(GIVEN, columns(0, 2, 7, 12), "auto", (True, [0, 1, 2], 4), id="unaligned"),
        pytest.param(GIVEN, columns(0, 2, 7, 12), 1, (True, [1], 4), id="unaligned-1"),
        pytest.param(GIVEN, columns(0, 2, 7, 12), 9, (True, [0, 1, 2], 4), id="unaligned-9"),
        # Small fields whose layout is open are one object, large ones are written where they are.
        pytest.param(OPEN, columns(0, 4, 8, 12), "auto", (True, [0], 1), id="small"),
        pytest.param(OPEN, columns(0, 4, 8, 12), "all", (False, [0, 1, 2], 3), id="small-all"),
        pytest.param(LARGE, columns(0, 4 * MIB, 8 * MIB, 12 * MIB), "auto", (False, [0, 1, 2], 3), id="large"),
        pytest.param(OPEN, columns(0, 12, 12, 12), "auto", (False, [0], 1), id="one-has-all"),
        # Where no region is given.
        pytest.param(GIVEN, None, "auto", (False, [0, 1, 2], 4), id="chosen"),
        pytest.param(OPEN, None, "auto", (True, [0], 1), id="chosen-small"),
        pytest.param(OPEN, None, "all", (False, [0, 1, 2], 3), id="chosen-small-all"),
        pytest.param(LARGE, None, "auto", (False, [0, 1, 2], 3), id="chosen-large"),
    ],
)
def test_who_writes(schema, regions, writers, expected) -> None:
    """Three ranks on one node: nothing moves where the regions lie on shard edges and the objects are large."""
    assert found(schema, regions, ["n"] * 3, writers) == expected


def test_more_ranks_than_shards_hold_their_part() -> None:
    """Of one given shard each of three ranks holds a third, though one writes it."""
    schema = stream({"x": 12}, shard_shape={"time": 1, "x": 12}, chunk_shape={"time": 1, "x": 12})
    _, epoch = settle(schema, None, ["n"] * 3, writers="auto", rearrange="auto")
    assert [r.of("u").box for r in epoch.regions] == [((0, 4),), ((4, 8),), ((8, 12),)]
    assert [bool(boxes) for boxes in epoch.boxes["u"]].count(True) == 1


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "schema",
    [GIVEN, OPEN, LARGE, stream({"x": 12}, shard_shape={"x": 12}), stream({"y": 500, "x": 4}, shard_shape={"y": 128})],
)
def test_decompose_gives_the_regions_that_an_opening_would_choose(schema: ms.StreamSchema, n: int) -> None:
    """Also where there are fewer shards than ranks, and where the nodes decide."""
    for nodes in (["n"] * n, [str(rank) for rank in range(n)]):
        chosen = settle(schema, None, nodes, writers="auto", rearrange="auto")[1].regions
        assert decompose(schema, n, nodes=nodes) == list(chosen)
    assert decompose(stream({"x": 12}, shard_shape={"x": 12}), 3) == columns(0, 4, 8, 12)


def test_each_node_has_a_writer() -> None:
    """Three nodes of two ranks; a field of 48 bytes would need one writer alone."""
    nodes = ["a", "a", "b", "b", "c", "c"]
    for writers in ("auto", "node"):
        is_moving, writing, n_objects = found(OPEN, columns(0, 2, 4, 6, 8, 10, 12), nodes, writers)
        assert (is_moving, len(writing), n_objects) == (True, 3, 3)
        assert [nodes[rank] for rank in writing] == ["a", "b", "c"]


def test_as_many_write_as_make_objects_of_64_mib() -> None:
    """64 MiB in 16 parts of 4 MiB less one cell: too small, so one rank writes; 256 MiB are four objects."""
    edges = [k * MIB - (k > 0) for k in range(16)]
    assert found(stream({"x": 16 * MIB}), columns(*edges, 16 * MIB), ["n"] * 16)[1:] == ([15], 1)
    edges = [k * MIB - (k > 0) for k in range(64)]
    is_moving, writing, n_objects = found(stream({"x": 64 * MIB}), columns(*edges, 64 * MIB), ["n"] * 64)
    assert (is_moving, len(writing), n_objects) == (True, 4, 4)


def test_without_rearranging_unaligned_regions_are_refused() -> None:
    """As the options say; aligned ones are taken, and where none are given they are chosen on shard edges."""
    with pytest.raises(AlignmentError, match=r"rank 0 owns \[0:2\] of 12.* the nearest that does is \[0:3\]"):
        found(GIVEN, columns(0, 2, 7, 12), ["n"] * 3, rearrange="never")
    assert found(GIVEN, columns(0, 3, 6, 12), ["n"] * 3, rearrange="never") == (False, [0, 1, 2], 4)
    assert found(GIVEN, None, ["n"] * 3, rearrange="never") == (False, [0, 1, 2], 4)
    assert found(OPEN, None, ["n"] * 3, rearrange="never") == (False, [0, 1, 2], 3)


def test_a_shard_that_no_rank_holds_whole_is_rearranged() -> None:
    """Of an array of fewer dims, whose shards are longer than the regions."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4, "x": 12},
        time=ms.AppendTime(units="s"),
        variables={
            "u": ms.Variable(("time", "y", "x"), "f4", shard_shape=(1, 4, 3), chunk_shape=(1, 4, 3)),
            "top": ms.Variable(("time", "x"), "f4", shard_shape=(1, 12), chunk_shape=(1, 12)),
        },
    )
    regions = [Region.of_box(("y", "x"), ((0, 4), pair)) for pair in ((0, 6), (6, 12))]
    with pytest.raises(TilingError, match="no rank holds its shard") as caught:
        settle(schema, regions, ["n"] * 2, writers="auto", rearrange="never")
    assert caught.value.kind == "projection"
    _, epoch = settle(schema, regions, ["n"] * 2, writers="auto", rearrange="auto")
    assert epoch.boxes["top"] == ((((0, 12),),), ())
    assert [p.box for p in epoch.exchanges["top"].pieces] == [((0, 6),), ((6, 12),)]


@pytest.mark.parametrize("rearrange", ["auto", "never"])
@pytest.mark.parametrize(("edges", "kind"), [((0, 3, 9), "hole"), ((0, 2, 9), "hole")])
def test_what_does_not_tile_is_refused_in_any_case(edges, kind, rearrange) -> None:
    """On shard edges or off them."""
    with pytest.raises((TilingError, AlignmentError)) as caught:
        found(GIVEN, columns(*edges), ["n"] * 2, rearrange=rearrange)
    assert caught.value.kind == kind or rearrange == "never"


def test_indices_are_written_by_as_many_ranks() -> None:
    """The layout is chosen for them as if they were boxes; who writes what is to be agreed on."""
    for writers, n_objects in (("all", 3), (2, 2), ("node", 1), ("auto", 1)):
        resolved, epoch = settle_indexed(
            OPEN, [Region.empty(("x",))] * 3, {"u": ("x",)}, {"u": 0}, ["n"] * 3, writers=writers
        )
        assert resolved.arrays["u"].grid.n_shards == n_objects
        assert len(epoch.indexed["u"]) == n_objects
        assert epoch.boxes == {}


def test_one_writer_a_node_is_one_on_each() -> None:
    """Where the ranks of one node hold nearly all cells, too; as boxes and as indices."""
    nodes, edges = ["a", "a", "a", "b", "c"], (0, 3, 6, 10, 11, 12)
    is_moving, writing, n_objects = found(OPEN, columns(*edges), nodes, "node")
    assert (is_moving, [nodes[rank] for rank in writing], n_objects) == (True, ["a", "b", "c"], 3)
    resolved, epoch = settle_indexed(OPEN, [Region.empty(("x",))] * 5, {"u": ("x",)}, {"u": 0}, nodes, writers="node")
    targets = [box for (box,) in epoch.indexed["u"]]
    shared = [[max(min(b, d) - max(a, c), 0) for c, d in targets] for a, b in itertools.pairwise(edges)]
    votes = [[[[k, [n]] for k, n in enumerate(of_rank) if n]] for of_rank in shared]
    settled, _ = owners_answer(resolved, epoch, votes)
    assert sorted(nodes[rank] for rank, boxes in enumerate(settled.boxes["u"]) if boxes) == ["a", "b", "c"]

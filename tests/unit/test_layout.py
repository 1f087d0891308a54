"""The default layout: shapes by hand, its limits, and that what ranks write tiles every array."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import mpistream as ms
from mpistream import layout
from mpistream.errors import AlignmentError, SchemaError, TilingError
from mpistream.layout import assign_writers, resolve_layout, shard_regions, suggest_layout
from mpistream.plan import plan
from mpistream.region import Region
from mpistream.schema import MAX_SHARDS
from tests.support.boxes import painted
from tests.support.streams import SIZES, make_schema, resolved

MIB = 2**20


def stream(sizes: dict[str, int], dtype: str = "float32", **more: Any) -> ms.StreamSchema:
    """A stream of the one variable ``t`` over all dims."""
    return ms.StreamSchema(
        dims={"time": None, **sizes},
        time=ms.AppendTime(units="s"),
        variables={"t": ms.Variable(("time", *sizes), dtype, **more)},
    )


def shapes_of(schema: ms.StreamSchema, name: str = "t") -> tuple[tuple[int, ...], tuple[int, ...]]:
    array = schema.arrays[name]
    return array.resolved_shard_shape, array.resolved_chunk_shape


# ---- by hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "dtype", "n_writers", "given_", "shard", "chunk"),
    [
        # The whole rank's box is one inner chunk and one shard.
        ({"y": 512, "x": 512}, "f4", 1, {}, (1, 512, 512), (1, 512, 512)),
        ({"y": 512, "x": 512}, "f4", 4, {}, (1, 256, 256), (1, 256, 256)),
        ({"y": 512, "x": 512}, "f4", 7, {}, (1, 74, 512), (1, 74, 512)),
        # 131 rows of 8,000 bytes fit 1 MiB: eight equal parts of 125, not seven of 131 and a rest.
        ({"y": 1000, "x": 1000}, "f8", 1, {}, (1, 1000, 1000), (1, 125, 1000)),
        ({"y": 1000, "x": 1000}, "f8", 4, {}, (1, 500, 500), (1, 250, 500)),
        # A row that is larger than 1 MiB is cut itself.
        ({"y": 4, "x": 10**6}, "f8", 1, {}, (1, 4, 10**6), (1, 1, 125_000)),
        # 256 MiB in four objects of 64 MiB.
        ({"y": 8192, "x": 8192}, "f4", 1, {}, (1, 2048, 8192), (1, 32, 8192)),
        # 141 inner chunks of 1 MiB: three even parts; of 139, a prime, the first three parts that do.
        ({"y": 9000, "x": 4096}, "f4", 1, {}, (1, 47 * 64, 4096), (1, 64, 4096)),
        ({"y": 64 * 139, "x": 4096}, "f4", 1, {}, (1, 47 * 64, 4096), (1, 64, 4096)),
        # The slowest dim is one inner chunk already: the next one is cut.
        ({"z": 1, "y": 8192, "x": 8192}, "f4", 1, {}, (1, 1, 2048, 8192), (1, 1, 32, 8192)),
        # A row of ten records counts ten times; inner chunks stay one record.
        ({"y": 2048, "x": 2048}, "f4", 1, {"shard_shape": {"time": 10}}, (10, 512, 2048), (1, 128, 2048)),
        ({"y": 256, "x": 256}, "f4", 1, {"chunk_shape": {"time": 4}}, (4, 256, 256), (4, 256, 256)),
        ({"y": 512, "x": 512}, "f4", 1, {"chunk_shape": {"time": 4}}, (4, 512, 512), (4, 128, 512)),
        ({"y": 512, "x": 1024}, "f4", 1, {"shard_shape": {"time": 100}}, (100, 256, 1024), (1, 256, 1024)),
        # Given lengths stand, what is open fits them.
        ({"y": 512, "x": 512}, "f4", 1, {"chunk_shape": {"x": 100}}, (1, 512, 600), (1, 512, 100)),
        ({"y": 600, "x": 1000}, "f8", 2, {"shard_shape": (1, 300, 500)}, (1, 300, 500), (1, 150, 500)),
        ({"y": 8192, "x": 8192}, "f4", 1, {"shard_shape": {"y": 4096}}, (1, 4096, 8192), (1, 32, 8192)),
        ({"y": 7, "x": 5}, "f4", 1, {"shard_shape": (2, 4, 5), "chunk_shape": (1, 2, 1)}, (2, 4, 5), (1, 2, 1)),
        # More ranks than cells.
        ({"x": 3}, "f4", 8, {}, (1, 1), (1, 1)),
    ],
)
def test_shapes_by_hand(sizes, dtype, n_writers, given_, shard, chunk) -> None:
    """Inner chunks near 1 MiB in whole fastest dims; shards as the ranks' boxes, towards 64 MiB."""
    assert shapes_of(resolve_layout(stream(sizes, dtype, **given_), n_writers)) == (shard, chunk)


def test_a_resolved_schema_stays_as_it_is() -> None:
    """There is nothing to choose."""
    schema = resolved()
    assert resolve_layout(schema, 5) is schema


def test_every_array_lies_on_the_edges_of_the_largest() -> None:
    """Variables and statics of fewer dims have shards as long as the largest variable's, or their own."""
    schema = ms.StreamSchema(
        dims={"time": None, "z": 5, "y": 100, "x": 60},
        time=ms.AppendTime(units="s"),
        variables={
            "t": ms.Variable(("time", "z", "y", "x"), "f8"),
            "surface": ms.Variable(("time", "x", "y"), "f4"),
            "rows": ms.Variable(("time", "y"), "f4", shard_shape={"time": 6}),
            "own": ms.Variable(("time", "y"), "f4", chunk_shape={"y": 15}),
        },
        statics={"depth": ms.Variable(("y", "x"), "f4"), "zero": ms.Variable((), "f4")},
        coords={"lat": ms.Coordinate(("y",), dtype="f8")},
    )
    found = resolve_layout(schema, 4)
    # 4 writers: 100 x 60 cells in 2 x 2, the level whole, are 2,500 cells in the smallest of surfaces
    assert shapes_of(found) == ((1, 5, 50, 30), (1, 5, 50, 30))
    assert shapes_of(found, "surface") == ((1, 30, 50), (1, 30, 50))
    assert shapes_of(found, "rows") == ((6, 50), (1, 50))
    assert shapes_of(found, "own") == ((1, 60), (1, 15))
    assert shapes_of(found, "depth") == ((50, 30), (50, 30))
    assert shapes_of(found, "zero") == ((), ())
    assert shapes_of(found, "lat") == ((50,), (50,))


def test_the_largest_of_equals_decides() -> None:
    """Two halves of 64 MiB for eight bytes an item are two halves for one byte, whatever comes first."""
    variables = {n: ms.Variable(("time", "y", "x"), d) for n, d in (("mask", "i1"), ("t", "f8"), ("u", "f4"))}
    sizes = {"time": None, "y": 4096, "x": 4096}
    found = resolve_layout(ms.StreamSchema(dims=sizes, time=ms.AppendTime(units="s"), variables=variables), 1)
    assert {shapes_of(found, name)[0] for name in variables} == {(1, 2048, 4096)}


def test_a_static_with_a_dim_of_its_own_is_cut_on_the_edges_of_the_others() -> None:
    """6.25 GiB in rows of 32, a divisor of the 4,096 of the variable; inner chunks of 800 KiB."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4096, "x": 4096, "band": 100},
        time=ms.AppendTime(units="s"),
        variables={"t": ms.Variable(("time", "y", "x"), "f4")},
        statics={"s": ms.Variable(("y", "x", "band"), "f4"), "spectrum": ms.Variable(("band", "y"), "f4")},
    )
    found = resolve_layout(schema, 1)
    assert shapes_of(found) == ((1, 4096, 4096), (1, 64, 4096))
    assert shapes_of(found, "s") == ((32, 4096, 100), (1, 2048, 100))
    assert shapes_of(found, "spectrum") == ((100, 4096), (50, 4096))


def test_a_stream_of_series_has_statics_for_its_grid() -> None:
    """Without a variable over space the largest static decides, and without one there is nothing to cut."""
    series = {"e": ms.Variable(("time",), "f4")}
    schema = make_schema(variables=series, coords={})
    assert shapes_of(resolve_layout(schema, 2), "topography") == ((4, 6), (4, 6))
    schema = make_schema(variables=series, statics={}, coords={})
    assert schema.is_resolved
    assert shard_regions(schema, 3) == [Region.whole((), {})] * 3


def test_the_bounds_of_time_decide_nothing() -> None:
    """Without a variable over space the statics are cut as if there were no bounds, and vertices never are."""
    schema = make_schema(
        dims={"time": None, **SIZES, "nv": 2},
        time=ms.AppendTime(units="s", attrs={"bounds": "ends"}),
        variables={"e": ms.Variable(("time",), "f4"), "ends": ms.Variable(("time", "nv"), "f8")},
        coords={},
    )
    found = resolve_layout(schema, 2)
    assert shapes_of(found, "topography") == ((4, 6), (4, 6))
    assert shapes_of(found, "ends") == ((1, 2), (1, 2))
    assert [dict(r) for r in shard_regions(schema, 2)] == [{"y": (0, 4), "x": (0, 6)}, {"y": (4, 8), "x": (0, 6)}]


# ---- given regions -----------------------------------------------------------------------------------


def along(dim: str, *lengths: int) -> list[Region]:
    edges = np.cumsum([0, *lengths]).tolist()
    return [Region.of_box((dim,), (pair,)) for pair in itertools.pairwise(edges)]


def boxes(*found: Any, dims: tuple[str, ...] = ("y", "x")) -> list[Region]:
    return [Region.of_box(dims, box) for box in found]


@pytest.mark.parametrize(
    ("sizes", "dtype", "regions", "shard", "chunk"),
    [
        ({"x": 24}, "f4", along("x", 8, 8, 8), (1, 8), (1, 8)),
        ({"x": 21}, "f4", along("x", 8, 8, 5), (1, 8), (1, 8)),
        ({"x": 20}, "f4", along("x", 4, 16), (1, 4), (1, 4)),
        ({"x": 20}, "f4", [Region.empty(("x",)), *along("x", 20)], (1, 20), (1, 20)),
        ({"y": 512, "x": 512}, "f4", boxes(((0, 256), (0, 512)), ((256, 512), (0, 512))), (1, 256, 512), (1, 256, 512)),
        # 9,000 rows can only be divided: 60 of them an inner chunk under 1 MiB, a third of them a shard.
        (
            {"y": 27_000, "x": 4096},
            "f4",
            boxes(((0, 9000), (0, 4096)), ((9000, 27_000), (0, 4096))),
            (1, 3000, 4096),
            (1, 60, 4096),
        ),
        # 7 rows of 1.1 MiB: 7 is prime.
        (
            {"y": 14, "x": 2**18 + 2**15},
            "f4",
            boxes(((0, 7), (0, 2**18 + 2**15)), ((7, 14), (0, 2**18 + 2**15))),
            (1, 7, 2**18 + 2**15),
            (1, 1, (2**18 + 2**15) // 2),
        ),
    ],
)
def test_shards_divide_the_given_regions(sizes, dtype, regions, shard, chunk) -> None:
    """Every edge is one of a shard's; only the last region may end anywhere."""
    schema = resolve_layout(stream(sizes, dtype), len(regions), regions)
    assert shapes_of(schema) == (shard, chunk)
    assign_writers(schema, regions)


def test_lengths_without_a_common_divisor_are_refused() -> None:
    """Local sizes (7, 9, 8), case P-05: no file explosion, but a length that would do."""
    with pytest.raises(AlignmentError) as caught:
        resolve_layout(stream({"x": 24}), 3, along("x", 7, 9, 8))
    text = str(caught.value)
    for part in (
        "'x'",
        "[7, 8, 9]",
        "multiples of 1",
        "24 objects",
        "3 writers",
        "for example 8",
        "leave region or rearrange out",
    ):
        assert part in text
    assert caught.value.kind == "layout"
    suggested = along("x", 8, 8, 8)
    schema = resolve_layout(stream({"x": 24}), 3, suggested)
    assert plan(schema, suggested).n_objects_per_record == 3


def test_a_given_shard_is_not_replaced_for_the_regions() -> None:
    """Regions that don't lie on its edges are refused by name, wherever they could have been put."""
    schema = stream({"x": 24}, shard_shape={"x": 4})
    assert shapes_of(resolve_layout(schema, 3, along("x", 8, 8, 8))) == ((1, 4), (1, 4))
    regions = along("x", 7, 9, 8)
    with pytest.raises(AlignmentError, match=r"array 't', dim 'x': rank 0 owns \[0:7\] of 24"):
        assign_writers(resolve_layout(schema, 3, regions), regions)


@pytest.mark.parametrize(
    ("regions", "error", "parts"),
    [
        (along("x", 8, 8), TilingError, ("none of the 2 ranks owns x[16:24]",)),
        ([*along("x", 16, 8), *along("x", 8)], TilingError, ("rank 0", "rank 2", "x[0:8]")),
    ],
    ids=["hole", "overlap"],
)
def test_regions_that_do_not_tile_are_refused(regions, error, parts) -> None:
    """The proof names array, ranks and box."""
    schema = resolve_layout(stream({"x": 24}), len(regions), regions)
    with pytest.raises(error) as caught:
        assign_writers(schema, regions)
    for part in ("array 't'", *parts):
        assert part in str(caught.value)


# ---- limits ------------------------------------------------------------------------------------------

lengths = st.integers(1, 12).flatmap(lambda e: st.integers(1, 3**e))
dtypes = st.sampled_from(["int8", "float16", "float32", "float64", "complex128"])


@given(st.lists(lengths, min_size=1, max_size=3), dtypes, st.sampled_from([1, 2, 3, 7, 64, 1000]))
@settings(max_examples=200)
def test_sizes_stay_within_the_limits(sizes, dtype, n_writers) -> None:
    """Inner chunks of half to one MiB and shards of 16 to 128 MiB, or the rank's whole box if that is less."""
    # A record of some TiB and more can need more shards of that size than there may be.
    assume(np.dtype(dtype).itemsize * math.prod(sizes) < MAX_SHARDS * 4 * MIB)
    schema = resolve_layout(stream(dict(zip("zyx", sizes, strict=False)), dtype), n_writers)
    shard, chunk = shapes_of(schema)
    itemsize = np.dtype(dtype).itemsize
    shard_nbytes, chunk_nbytes = itemsize * math.prod(shard), itemsize * math.prod(chunk)
    assert chunk_nbytes <= MIB
    assert shard_nbytes < 128 * MIB
    assert all(s % c == 0 for s, c in zip(shard, chunk, strict=True))
    assert all(s < n + c for s, c, n in zip(shard[1:], chunk[1:], sizes, strict=True))
    if n_writers == 1:
        whole = itemsize * math.prod(sizes)
        assert chunk_nbytes == whole or chunk_nbytes > MIB // 2
        assert shard_nbytes >= whole or shard_nbytes > 16 * MIB


@pytest.mark.parametrize(
    ("dims", "variables", "statics"),
    [
        (
            {"level": 200_000, "y": 4096, "x": 70_000},
            {"a": (("time", "y", "x"), "f8"), "b": (("time", "level", "y"), "f4")},
            {},
        ),
        ({"y": 4096, "x": 4096, "band": 100}, {"a": (("time", "y", "x"), "f4")}, {"s": (("y", "x", "band"), "f4")}),
        ({"y": 1000, "band": 10**7}, {"a": (("time", "y"), "f4")}, {"s": (("band", "y"), "f4")}),
    ],
)
@pytest.mark.parametrize("n_writers", [1, 4])
def test_every_array_is_cut_to_sensible_objects(dims, variables, statics, n_writers) -> None:
    """Not only the largest variable: another one with a long dim of its own, or a static, too."""
    schema = ms.StreamSchema(
        dims={"time": None, **dims},
        time=ms.AppendTime(units="s"),
        variables={n: ms.Variable(*v) for n, v in variables.items()},
        statics={n: ms.Variable(*v) for n, v in statics.items()},
    )
    found = resolve_layout(schema, n_writers)
    for name in (*variables, *statics):
        shard, chunk = shapes_of(found, name)
        itemsize = found.arrays[name].dtype.itemsize
        assert itemsize * math.prod(chunk) <= MIB
        assert itemsize * math.prod(shard) < 256 * MIB
    assign_writers(found, shard_regions(schema, n_writers))


# ---- what ranks write --------------------------------------------------------------------------------


@st.composite
def small_streams(draw: st.DrawFn) -> ms.StreamSchema:
    """Draw a stream of several arrays, some with lengths of their own, and on points of their own."""
    dims: dict[str, Any] = {"time": None, **{d: draw(st.integers(1, 30)) for d in "zyx"[: draw(st.integers(1, 3))]}}
    dims["z_face"] = ms.Staggered("z", draw(st.integers(0, 2)))

    def variable(lead: tuple[str, ...]) -> ms.Variable:
        without = draw(st.sampled_from(["z", "z_face"]))
        own = draw(st.permutations([d for d in dims if d not in ("time", without)]))[: draw(st.integers(0, 3))]
        some = st.dictionaries(st.sampled_from(own), st.sampled_from([1, 2, 4, 6]), max_size=2) if own else st.just({})
        chunk = draw(some)
        shard = {d: n * draw(st.integers(1, 3)) for d, n in chunk.items() if draw(st.booleans())}
        return ms.Variable((*lead, *own), draw(dtypes), shard_shape=shard, chunk_shape=chunk)

    return ms.StreamSchema(
        dims=dims,
        time=ms.AppendTime(units="s"),
        variables={f"v{i}": variable(("time",)) for i in range(draw(st.integers(1, 3)))},
        statics={f"s{i}": variable(()) for i in range(draw(st.integers(0, 2)))},
    )


def small_limits() -> Any:
    """Limits that small grids reach."""
    return mock.patch.multiple(layout, _CHUNK_NBYTES=64, _OBJECT_NBYTES=1024)


def check_tiling(schema: ms.StreamSchema, regions: list[Region]) -> None:
    for name, by_rank in assign_writers(schema, regions).items():
        array = schema.arrays[name]
        assert (painted(array.shape, [box for boxes in by_rank for box in boxes]) == 1).all()
        shard, chunk = shapes_of(schema, name)
        assert all(s % c == 0 for s, c in zip(shard, chunk, strict=True))
        assert len(by_rank) == len(regions)


@given(small_streams(), st.integers(1, 12))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_the_default_decomposition_tiles_every_array(schema, n_writers) -> None:
    """Whatever arrays and lengths: each cell has one writer, each region is a box of the partitioned dims."""
    with small_limits():
        regions = shard_regions(schema, n_writers)
        check_tiling(resolve_layout(schema, n_writers), regions)
    assert len(regions) == n_writers
    sizes = schema.partitioned_sizes
    assert all(r.dims == tuple(sizes) and len(r.boxes) <= 1 for r in regions)
    if sizes:
        assert (painted(tuple(sizes.values()), [r.box for r in regions if not r.is_empty]) == 1).all()


@given(small_streams(), st.integers(1, 12))
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_what_decompose_gives_is_accepted_as_given(schema, n_writers) -> None:
    """A caller may ask for the regions first and hand them in."""
    with small_limits():
        regions = shard_regions(schema, n_writers)
        check_tiling(resolve_layout(schema, n_writers, regions), regions)
        plan(schema, regions)


def test_regions_of_a_large_grid_are_accepted_as_given() -> None:
    """110 objects of 62 MiB for 7 writers are no file explosion."""
    schema = stream({"z": 3407, "y": 272, "x": 1928})
    regions = shard_regions(schema, 7)
    found = plan(schema, regions)
    assert (found.n_objects_per_record, found.n_writers) == (110, 7)


def test_regions_are_balanced_and_the_last_may_be_empty() -> None:
    """With more ranks than shards some have nothing; the others differ by one shard at most."""
    regions = shard_regions(stream({"x": 10}, shard_shape={"x": 3}), 6)
    assert [r.box for r in regions] == [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),), ((0, 0),), ((0, 0),)]
    regions = shard_regions(stream({"y": 12, "x": 10}, shard_shape={"y": 2, "x": 5}), 4)
    assert [r.box for r in regions] == [((a, a + 6), (b, b + 5)) for a in (0, 6) for b in (0, 5)]


def test_regions_lie_on_the_edges_of_all_arrays() -> None:
    """Shards of 4 and of 6 meet every 12 cells."""
    schema = ms.StreamSchema(
        dims={"time": None, "x": 30},
        time=ms.AppendTime(units="s"),
        variables={
            "a": ms.Variable(("time", "x"), "f4", shard_shape={"x": 4}),
            "b": ms.Variable(("time", "x"), "f4", shard_shape={"x": 6}),
        },
    )
    assert [r.box for r in shard_regions(schema, 2)] == [((0, 12),), ((12, 30),)]


# ---- staggered dims ----------------------------------------------------------------------------------


def test_faces_are_split_as_the_cells_are() -> None:
    """The same shard edges, and the extra face with the last cell."""
    schema = resolve_layout(
        ms.StreamSchema(
            dims={"time": None, "y": 6, "x": 12, "x_face": ms.Staggered("x"), "x_out": ms.Staggered("x", 0)},
            time=ms.AppendTime(units="s"),
            variables={
                "t": ms.Variable(("time", "y", "x"), "f4"),
                "u": ms.Variable(("time", "y", "x_face"), "f4"),
                "w": ms.Variable(("time", "x_out", "y"), "f4"),
            },
            shard_shape={"x": 4},
        ),
        3,
    )
    assert [a.resolved_shard_shape for a in schema.arrays.values()] == [(1, 6, 4), (1, 6, 4), (1, 4, 6)]
    regions = shard_regions(schema, 3)
    assert [dict(r) for r in regions] == [{"y": (0, 6), "x": (a, a + 4)} for a in (0, 4, 8)]
    boxes = assign_writers(schema, regions)
    assert [found[0][1] for found in boxes["u"]] == [(0, 4), (4, 8), (8, 13)]
    assert [found[0][0] for found in boxes["w"]] == [(0, 4), (4, 8), (8, 12)]


def test_faces_alone_can_be_decomposed() -> None:
    """Also where nothing lies on the cells themselves."""
    schema = ms.StreamSchema(
        dims={"time": None, "x": 12, "x_face": ms.Staggered("x", 2)},
        time=ms.AppendTime(units="s"),
        variables={"u": ms.Variable(("time", "x_face"), "f4")},
    )
    regions = shard_regions(schema, 3)
    assert [dict(r) for r in regions] == [{"x": (a, a + 4)} for a in (0, 4, 8)]
    check_tiling(resolve_layout(schema, 3, regions), regions)


# ---- suggestions -------------------------------------------------------------------------------------


def test_a_suggestion_is_what_a_schema_without_layout_gets() -> None:
    """For so many ranks; it can be passed on as it is."""
    sizes = {"z": 40, "y": 1093, "x": 1441}
    found = suggest_layout(sizes, "f8", n_ranks=6)
    chosen = resolve_layout(stream(sizes, "float64"), 6)
    given = ms.StreamSchema(
        dims={"time": None, **sizes},
        time=ms.AppendTime(units="s"),
        variables={"t": ms.Variable(("time", *sizes), "f8")},
        shard_shape=found["shard_shape"],
        chunk_shape=found["chunk_shape"],
    )
    assert given.is_resolved
    assert shapes_of(given) == shapes_of(chosen)


@pytest.mark.parametrize(
    "sizes",
    [
        {"x": 7},
        {"y": 1093, "x": 1441},
        {"z": 13, "y": 4099, "x": 8191},
        {"cell": 104_729_003},
        {"y": 1, "x": 2**27 + 29},
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "n_ranks"), [("f4", None), ("f8", 7), ("i1", 1)])
def test_suggestions_are_few_large_objects(sizes, dtype, n_ranks) -> None:
    """Also of prime extents: objects of up to 64 MiB, and no more of them than twice what they would fill."""
    found = suggest_layout(sizes, dtype, n_ranks=n_ranks)
    shard = [found["shard_shape"][d] for d in sizes]
    nbytes = np.dtype(dtype).itemsize * math.prod(sizes.values())
    n_objects = math.prod(-(-n // s) for n, s in zip(sizes.values(), shard, strict=True))
    assert np.dtype(dtype).itemsize * math.prod(shard) <= 1.6 * 64 * MIB
    assert n_objects <= max(2 * -(-nbytes // (64 * MIB)), n_ranks or 1)
    assert all(s % found["chunk_shape"][d] == 0 for d, s in zip(sizes, shard, strict=True))


@pytest.mark.parametrize(
    ("n_records", "row"),
    [(1, 1), (12, 12), (64, 64), (100, 50), (97, 1), (1000, 50)],
)
def test_records_of_one_commit_share_objects(n_records, row) -> None:
    """64 records of 1 MiB fill one; the row divides the records of a commit, so that every commit ends with a row."""
    found = suggest_layout({"y": 512, "x": 512}, "f4", n_records=n_records)
    assert found["shard_shape"] == {"time": row, "y": 512, "x": 512}
    assert found["chunk_shape"]["time"] == 1


def test_a_suggestion_is_for_the_dims_without_time() -> None:
    """The whole dims of a schema are refused by name."""
    with pytest.raises(SchemaError, match="name 'time': give the lengths of the other dims"):
        suggest_layout({"time": 8, "y": 4})


@pytest.mark.parametrize("changes", [{"n_ranks": 0}, {"n_ranks": 2.0}, {"n_records": 0}, {"n_records": True}], ids=str)
def test_numbers_that_are_none_are_refused(changes) -> None:
    """By their name."""
    with pytest.raises(SchemaError, match=f"{next(iter(changes))} .*: give an integer above 0") as caught:
        suggest_layout({"x": 8}, **changes)
    assert caught.value.kind == "layout"

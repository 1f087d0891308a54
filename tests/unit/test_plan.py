"""The plan of a run: its numbers by hand, its line, its warnings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistream as ms
from mpistream.errors import TilingError
from mpistream.layout import shard_regions
from mpistream.manifest import CHECKPOINT_ATTR
from mpistream.plan import Plan, plan
from mpistream.region import Region


def stream(sizes: dict[str, int], variables: dict[str, ms.Variable], **more: Any) -> ms.StreamSchema:
    return ms.StreamSchema(dims={"time": None, **sizes}, time=ms.AppendTime(units="s"), variables=variables, **more)


# ---- by hand -----------------------------------------------------------------------------------------


def test_a_plane_over_four_ranks() -> None:
    """512 x 512 float32 in 2 x 2 boxes: 4 objects of 256 KiB under c/<t>, c/<t>/0 and c/<t>/1."""
    schema = stream({"y": 512, "x": 512}, {"t": ms.Variable(("time", "y", "x"), "f4")})
    found = plan(schema, shard_regions(schema, 4), writers="all")
    assert found == Plan(
        n_ranks=4,
        writers=(0, 1, 2, 3),
        layouts={"t": ((1, 256, 256), (1, 256, 256))},
        n_objects_per_record=4,
        n_folders_per_record=3,
        nbytes_per_record=2**20,
        nbytes_moved_per_record=0,
        max_writer_nbytes_per_record=2**18,
        max_object_nbytes=2**18,
        writer_memory_nbytes=3 * 2**18,
        node_memory_nbytes=3 * 2**20,
        warnings=(
            (
                "objects of variable 't' have 256 KiB before compression, under 4 MiB: raise shard_shape, "
                "for example its 'time' from 1 to 16"
            ),
        ),
    )
    assert str(found) == (
        "4 of 4 ranks write 1 MiB a record in 4 objects of at most 256 KiB, 3 folders; "
        "at most 256 KiB a rank and record, 768 KiB in memory"
    )


def test_rows_of_several_records_and_a_variable_of_fewer_dims() -> None:
    """Rows count a fraction, memory holds a row, a slab and two records, statics and series don't count."""
    schema = stream(
        {"y": 100, "x": 64},
        {
            # 3 x 2 shards a row of 8 records, inner chunks of 2 records: 1 row and 1 slab in memory
            "t": ms.Variable(("time", "y", "x"), "f8", shard_shape=(8, 40, 32), chunk_shape=(2, 20, 32)),
            # 3 shards a record, written by the ranks of the first column
            "rows": ms.Variable(("time", "y"), "f4", shard_shape=(1, 40), chunk_shape=(1, 40)),
            "energy": ms.Variable(("time",), "f4"),
        },
        statics={"depth": ms.Variable(("y", "x"), "f8", shard_shape=(40, 32), chunk_shape=(40, 32))},
    )
    dims = ("y", "x")
    regions = [
        Region.of_box(dims, ((0, 80), (0, 32))),
        Region.of_box(dims, ((0, 80), (32, 64))),
        Region.of_box(dims, ((80, 100), (0, 64))),
        Region.empty(dims),
    ]
    found = plan(schema, iter(regions))
    largest = 80 * 32 * 8  # of t on ranks 0 and 1; on rank 0 also 80 rows
    assert (found.n_ranks, found.n_writers) == (4, 3)
    assert found.n_objects_per_record == 6 / 8 + 3
    # c/<t> and c/<t>/0..2 of t an eighth each, c/<t> of rows
    assert found.n_folders_per_record == 4 / 8 + 1
    assert found.nbytes_per_record == 100 * 64 * 8 + 100 * 4
    assert found.max_writer_nbytes_per_record == largest + 80 * 4
    assert found.max_object_nbytes == 8 * 40 * 32 * 8
    assert found.writer_memory_nbytes == largest * (8 + 2 + 2) + 80 * 4 * (1 + 2)
    assert found.warnings == (
        (
            "objects of variable 'rows' have 160 B before compression, under 4 MiB: raise shard_shape, "
            "up to the whole array"
        ),
    )


def test_keys_with_dots_need_no_folders() -> None:
    """All objects of an array lie in its own folder."""
    schema = stream({"y": 8, "x": 8}, {"t": ms.Variable(("time", "y", "x"), "f4")}, key_separator=".")
    assert plan(schema, shard_regions(schema, 4)).n_folders_per_record == 0


def test_a_stream_of_series_writes_no_objects_a_record() -> None:
    """They are in the owner's chunks of 1,024 records."""
    schema = stream({}, {"energy": ms.Variable(("time",), "f4")})
    found = plan(schema, shard_regions(schema, 2))
    assert (found.n_objects_per_record, found.nbytes_per_record, found.max_object_nbytes) == (0, 0, 0)
    assert found.warnings == ()


def test_the_plan_proves_the_tiling() -> None:
    """Wrong regions fail here as they would at the opening."""
    schema = stream({"x": 24}, {"t": ms.Variable(("time", "x"), "f4")})
    with pytest.raises(TilingError, match=r"none of the 1 rank owns x\[8:24\]"):
        plan(schema, [Region.of_box(("x",), ((0, 8),))])


# ---- rearranged --------------------------------------------------------------------------------------


def test_a_rearranged_plane() -> None:
    """Of 8 x 8 float32 in two halves, shards of 8 x 3: one of 3 columns stays on each rank, and 1 + 1 columns move."""
    schema = stream(
        {"y": 8, "x": 8},
        {"t": ms.Variable(("time", "y", "x"), "f4", shard_shape=(2, 8, 3), chunk_shape=(1, 8, 3))},
        statics={"depth": ms.Variable(("y", "x"), "f8", shard_shape=(8, 3), chunk_shape=(8, 3))},
    )
    halves = [Region.of_box(("y", "x"), ((0, 8), (a, a + 4))) for a in (0, 4)]
    found = plan(schema, halves)
    # 3 shards over 2 ranks are columns 0 to 3 and 3 to 8: rank 0 holds column 3, which rank 1 writes.
    assert (found.n_ranks, found.n_writers) == (2, 2)
    assert found.nbytes_moved_per_record == 8 * 1 * 4
    assert found.nbytes_per_record == 8 * 8 * 4
    assert found.max_writer_nbytes_per_record == 8 * 5 * 4
    assert found.n_objects_per_record == 3 / 2
    # A row of two records, the record that is received, and two records on their way.
    assert found.writer_memory_nbytes == 8 * 5 * 4 * (2 + 1 + 2)
    assert str(found).endswith(" in memory, 32 B moved between ranks")


def test_a_region_for_each_variable() -> None:
    """Columns of one and rows of the other, both on shard edges; indices are not for a plan."""
    layout = {"shard_shape": {"time": 1, "y": 2, "x": 2}, "chunk_shape": {"time": 1, "y": 2, "x": 2}}
    variables = {name: ms.Variable(("time", "y", "x"), "f4") for name in ("t", "u")}
    schema = stream({"y": 4, "x": 4}, variables, **layout)
    found = plan(schema, [{"t": {"x": half}, "u": {"y": half}} for half in ((0, 2), (2, 4))])
    assert (found.n_writers, found.nbytes_moved_per_record) == (2, 0)
    moved = plan(schema, [{"t": {"x": half}, "u": {"y": half}} for half in ((0, 1), (1, 4))])
    assert moved.nbytes_moved_per_record > 0
    with pytest.raises(ms.SchemaError, match=r"Indices cost .* plan.. of a writer"):
        plan(schema, [ms.Indices({"x": [0]})])


def test_one_writer_a_node() -> None:
    """Eight ranks on two nodes, each with an eighth: one of each half gets the three other eighths of it."""
    schema = stream({"x": 64}, {"t": ms.Variable(("time", "x"), "f4")})
    regions = [Region.of_box(("x",), ((8 * r, 8 * r + 8),)) for r in range(8)]
    nodes = ["a"] * 4 + ["b"] * 4
    found = plan(schema, regions, nodes=nodes, writers="node")
    assert (found.n_ranks, found.n_writers, found.n_objects_per_record) == (8, 2, 2)
    assert found.nbytes_moved_per_record == 2 * 3 * 8 * 4
    # The row of one record, the record that is received, and two records on their way.
    assert found.writer_memory_nbytes == found.node_memory_nbytes == 32 * 4 * 4
    assert plan(schema, regions, writers="node").n_writers == 1
    assert plan(schema, regions, writers=3).n_writers == 3
    assert plan(schema, regions, writers=20).n_writers == 8
    # Both that write on one node.
    assert plan(schema, regions, nodes=["a"] * 8, writers=2).node_memory_nbytes == 64 * 4 * 4


def test_what_waits_for_threads_counts() -> None:
    """As it is bounded, for each rank that writes; without threads nothing waits."""
    schema = stream({"x": 64}, {"t": ms.Variable(("time", "x"), "f4")})
    regions = [Region.of_box(("x",), ((32 * r, 32 * r + 32),)) for r in range(2)]
    for bound, pending in ((None, 2 * 32 * 4), (1000, 1000), (0, 0)):
        found = plan(schema, regions, writers="all", max_pending_nbytes=bound)
        assert (found.writer_memory_nbytes, found.node_memory_nbytes) == (128 + pending, 2 * (128 + pending))
    one = plan(schema, [*regions, Region.of_box(("x",), ((0, 0),))], writers="all", max_pending_nbytes=1000)
    assert one.node_memory_nbytes == 2 * 1128


@pytest.mark.parametrize(("threads", "pending"), [(0, 0), (1, 1000)])
def test_the_plan_of_a_writer_knows_its_options(tmp_path: Path, threads: int, pending: int) -> None:
    """What may wait for its threads is what they say."""
    schema = stream({"x": 64}, {"t": ms.Variable(("time", "x"), "f4")})
    options = ms.Options(threads=threads, max_pending_nbytes=1000)
    with ms.write_open(tmp_path / "s", schema, options=options) as w:
        assert w.plan().writer_memory_nbytes == 64 * 4 + pending  # type: ignore[union-attr]


def test_objects_of_a_run_are_counted_up() -> None:
    """Three shards a row of two records: five records are three rows, of which the last one is filled in part."""
    schema = stream({"x": 64}, {"t": ms.Variable(("time", "x"), "f4", shard_shape=(2, 30), chunk_shape=(1, 30))})
    found = plan(schema, shard_regions(schema, 1))
    assert found.n_objects_per_record == 1.5
    assert [found.n_objects(n) for n in (0, 2, 4, 5)] == [0, 3, 6, 8]


def test_a_plan_survives_json() -> None:
    """from_json takes back what to_json wrote."""
    schema = stream({"y": 8, "x": 8}, {"t": ms.Variable(("time", "y", "x"), "f4"), "e": ms.Variable(("time",), "f8")})
    found = plan(schema, shard_regions(schema, 3), writers=2)
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found


# ---- warnings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "is_warned"), [(1, False), (1100, True), (1000, False)])
def test_arrays_that_are_small_as_a_whole_need_no_warning(n: int, is_warned: bool) -> None:
    """Of n float32 in one shard; 1,000 records of 1,100 of them fill 4 MiB, and no row should be longer."""
    schema = stream({"x": n}, {"t": ms.Variable(("time", "x"), "f4")})
    assert bool(plan(schema, shard_regions(schema, 1)).warnings) is is_warned


def test_arrays_of_few_fixed_times_need_no_warning() -> None:
    """Ten records of 40,000 float32 are less than 4 MiB together, so no row could help; eleven times as many could."""
    for n, is_warned in ((10, False), (110, True)):
        schema = ms.StreamSchema(
            dims={"time": None, "x": 40_000},
            time=ms.IndexedTime(list(range(n)), units="s"),
            variables={"t": ms.Variable(("time", "x"), "f4")},
        )
        assert bool(plan(schema, shard_regions(schema, 1)).warnings) is is_warned


def test_more_writers_than_ranks_are_said() -> None:
    """No error: a site may say for all runs how many ranks write."""
    schema = stream({"x": 1000}, {"t": ms.Variable(("time", "x"), "f4")})
    regions = shard_regions(schema, 2)
    said = "Options(writers=3), but only 2 ranks: no more than those write"
    assert said in plan(schema, regions, writers=3).warnings
    assert not any("Options" in warning for warning in plan(schema, regions, writers=2).warnings)


def test_objects_of_4_mib_need_no_warning() -> None:
    """The limit is exclusive, a row counts whole, and the smallest variable is named."""
    shapes: dict[str, Any] = {"shard_shape": {"y": 1024, "x": 1024}}
    schema = stream({"y": 1024, "x": 1024}, {"t": ms.Variable(("time", "y", "x"), "f4", **shapes)})
    assert plan(schema, shard_regions(schema, 1)).warnings == ()
    schema = stream(
        {"y": 1024, "x": 1023},
        {
            "t": ms.Variable(("time", "y", "x"), "f4"),
            "u": ms.Variable(("time", "y", "x"), "i1", shard_shape={"time": 4}),
            "v": ms.Variable(("time", "y", "x"), "i1", shard_shape={"time": 3}),
        },
    )
    assert plan(schema, shard_regions(schema, 1)).warnings == (
        (
            "objects of variable 'v' have 2.997 MiB before compression, under 4 MiB: raise shard_shape, "
            "for example its 'time' from 3 to 6"
        ),
    )


@pytest.mark.parametrize(("n_objects", "is_warned"), [(10_000, False), (10_001, True)])
def test_many_objects_are_warned_of(n_objects, is_warned) -> None:
    """More than 10,000 a record."""
    schema = stream({"x": n_objects}, {"t": ms.Variable(("time", "x"), "i1", shard_shape={"x": 1})})
    warnings = plan(schema, shard_regions(schema, 1)).warnings
    assert warnings[0].startswith("objects of variable 't' have 1 B before compression, under 4 MiB")
    assert warnings[1:] == (
        (f"{n_objects:g} objects a record, over 10,000: raise shard_shape, or its 'time' length",) if is_warned else ()
    )


# ---- sizes in words ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1000 * 2**10, "1000 KiB"),
        (64 * 2**20, "64 MiB"),
        (2**31, "2 GiB"),
        (2**43, "8 TiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(nbytes, words) -> None:
    """The largest unit that fits, and no exponent."""
    shown = Plan(
        n_ranks=1,
        writers=(0,),
        layouts={},
        n_objects_per_record=0.5,
        n_folders_per_record=0,
        nbytes_per_record=nbytes,
        nbytes_moved_per_record=0,
        max_writer_nbytes_per_record=0,
        max_object_nbytes=0,
        writer_memory_nbytes=0,
        node_memory_nbytes=0,
        warnings=(),
    )
    assert str(shown).startswith(f"1 of 1 rank writes {words} a record in 0.5 objects")


@pytest.mark.parametrize("n_objects", [10_000, 10_001])
def test_a_restart_state_has_one_record(n_objects: int) -> None:
    """Each save makes such a store: it is not told to share shards over time, which one record can't."""
    schema = stream({"x": n_objects}, {"t": ms.Variable(("time", "x"), "i1", shard_shape={"x": 1})})
    schema = schema.with_attrs({CHECKPOINT_ATTR: 3})
    expected = ("10001 objects a record, over 10,000: raise shard_shape",) if n_objects > 10_000 else ()
    assert plan(schema, shard_regions(schema, 1)).warnings == expected


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 9), st.sampled_from(["i1", "f4", "c16"]))
def test_numbers_are_those_of_the_regions(ny, nx, n_writers, dtype) -> None:
    """Bytes are cells times the size of an item; objects are those of the shard grid."""
    schema = stream({"y": ny, "x": nx}, {"t": ms.Variable(("time", "y", "x"), dtype)})
    regions = shard_regions(schema, n_writers)
    found = plan(schema, regions, writers="all")
    itemsize = np.dtype(dtype).itemsize
    assert found.nbytes_per_record == ny * nx * itemsize
    assert found.max_writer_nbytes_per_record == itemsize * max(r.n_cells for r in regions)
    assert found.n_writers == sum(r.n_cells > 0 for r in regions) <= found.n_objects_per_record
    assert found.max_object_nbytes <= found.max_writer_nbytes_per_record


def test_what_is_not_partitioned_needs_no_warning() -> None:
    """The bounds of time have 16 bytes a record, and no shard shape would make sense of that."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 1024, "x": 1024, "nv": 2},
        time=ms.AppendTime(units="s", attrs={"bounds": "ends"}),
        variables={"t": ms.Variable(("time", "y", "x"), "f4"), "ends": ms.Variable(("time", "nv"), "f8")},
    )
    found = plan(schema, shard_regions(schema, 1))
    assert (found.n_objects_per_record, found.nbytes_per_record) == (2, 4 * 2**20 + 16)
    assert found.warnings == ()


def test_bad_arguments_are_named() -> None:
    schema = stream({"x": 12}, {"u": ms.Variable(("time", "x"), "f4")})
    regions = ms.decompose(schema, 4)
    for more, text in (
        ({"writers": "nodes"}, "option writers 'nodes': use 'all'"),
        ({"rearrange": "no"}, "option rearrange 'no': use 'auto'"),
        ({"nodes": ["a", "b"]}, "2 nodes for 4 regions"),
    ):
        with pytest.raises(ms.SchemaError, match=text):
            ms.plan(schema, regions, **more)
    with pytest.raises(ms.SchemaError, match="regions 4: give the region of each rank"):
        ms.plan(schema, 4)  # type: ignore[arg-type]

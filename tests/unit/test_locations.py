"""Location series, without a store: chunks, schemas, shares, and the decision over sets of locations."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistream as ms
from mpistream.commit import decide
from mpistream.decomposition import decompose, settle
from mpistream.epoch import EpochState, Share, prove_epoch
from mpistream.layout import resolve_layout, shard_regions
from mpistream.locations import row_length, shares_of
from mpistream.manifest import Manifest
from mpistream.ranges import ranges_of
from mpistream.token import CommitToken, times_sha256
from mpistream.zarr3.codecs import ChunkCodec
from mpistream.zarr3.shard import ChunkEncoder, OpenShard, ShardSpec
from tests.support.location_series import DTYPES, IDS, TIMES
from tests.support.shards import read_whole


def make_schema(n: int = 23, **changes: Any) -> ms.StreamSchema:
    given: dict[str, Any] = {"ids": IDS[:n], "times": TIMES, "variables": DTYPES, "chunk_locations": 5}
    return ms.location_schema(**{**given, **changes})


@pytest.mark.parametrize(
    ("n_times", "per_worker", "given", "expected"),
    [
        (1000, 10**6, {}, 1024),  # at most the cap
        (100_000, 10**6, {}, 20),  # 8 MiB of 4 bytes
        (100_000, 10**6, {"itemsize": 8}, 10),
        (100_000, 7, {}, 7),  # at most one worker's share
        (10**8, 10**6, {}, 1),  # at least one
        (10, 50, {"target_nbytes": 100, "cap": 30}, 2),
    ],
)
def test_a_chunk_holds_about_eight_mib(n_times: int, per_worker: int, given: dict[str, int], expected: int) -> None:
    """At least one location, at most the cap and one worker's share."""
    assert ms.chunk_locations(n_times, per_worker, **given) == expected


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "9"])
def test_numbers_of_a_chunk_are_integers(bad: Any) -> None:
    """Anything else is named."""
    with pytest.raises(ms.SchemaError, match=r"n_times .*: give an integer above 0"):
        ms.chunk_locations(bad, 3)


def test_what_a_schema_says() -> None:
    """Dims, coordinates, CF attributes and codecs, and that all of it survives JSON."""
    lat = ms.Coordinate(("id",), np.arange(23.0), attrs={"units": "degrees_north"})
    schema = make_schema(coords={"lon": np.arange(23.0), "lat": lat}, attrs={"title": "t"}, inner_locations=5)
    assert dict(schema.dims) == {"id": None, "time": 7}
    assert (schema.mode, schema.n_total, schema.record_dim, schema.time_dim) == ("locations", 23, "id", "time")
    assert dict(schema.attrs) == {
        "Conventions": "CF-1.11",
        "title": "t",
        "featureType": "timeSeries",
        "variables": ["flow", "soil", "code"],
    }
    arrays = schema.arrays
    assert dict(arrays["id"].attrs) == {"cf_role": "timeseries_id"}
    assert arrays["flow"].attrs["coordinates"] == "lon lat"
    assert {name: arrays[name].dtype.name for name in DTYPES} == DTYPES
    assert [c["name"] for c in arrays["flow"].chain] == ["bytes", "zstd", "crc32c"]
    assert arrays["id"].chain[1] == {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
    assert schema.time_array.attrs["units"] == "seconds since 1970-01-01"
    assert schema.time_array.shape == (7,)
    assert (schema.partitioned_dims, schema.partitioned_sizes) == (("id",), {"id": 23})
    assert schema.committed_array is not None
    assert schema.committed_array.dims == ("id",)
    again = ms.StreamSchema.from_json(json.loads(json.dumps(schema.to_json())))
    assert (again.fingerprint(), again.coordinates_digest()) == (schema.fingerprint(), schema.coordinates_digest())
    assert again.to_json() == schema.to_json()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ids": "abc"}, "give one string for each"),
        ({"ids": []}, "give one string for each"),
        ({"ids": ["a", 1]}, "id 1 of location 1: give a string"),
        ({"ids": ["a", ""]}, "id '' of location 1"),
        ({"ids": ["a", "b", "a"]}, "id 'a' is that of locations 0 and 2"),
        (
            {"times": {"hourly": TIMES, "daily": TIMES}},
            "times of 'hourly', 'daily': a location series has one",
        ),
        ({"variables": {}}, "give a mapping name -> dtype"),
        ({"variables": ["flow"]}, "give a mapping name -> dtype"),
        ({"variables": {f"v{i}": "f4" for i in range(1001)}}, "1001 variables, at most 1000"),
        (
            {"variables": {"q": ms.Variable(("id", "day"), "f4")}},
            r"'q' of a location series has the dims .'id', 'd",
        ),
        ({"variables": {"q": ms.Variable(("id",), "f4")}}, "give it .'id', 'time'."),
        ({"coords": {"lon": ms.Coordinate(("id",), None, dtype="f8")}}, "is a coordinate with values"),
        ({"coords": {"lon": np.arange(3.0)}}, r"values of shape \(3,\), its dims have \(23,\)"),
        ({"variables": {"time": "f4"}}, "name 'time' is used twice"),
        ({"inner_locations": 2}, "not a multiple of the inner chunk's 2"),
    ],
)
def test_what_a_schema_refuses(changes: dict[str, Any], match: str) -> None:
    """Each by name."""
    with pytest.raises(ms.SchemaError, match=match):
        make_schema(**changes)


def test_a_time_axis_has_the_dims_of_its_series() -> None:
    """A description that does not fit its dims, as a damaged manifest may have it, is refused."""
    with pytest.raises(ms.SchemaError, match="give the time dim alone, of length 7"):
        ms.StreamSchema(dims={"id": None, "time": 8}, time=make_schema().time, variables={})


@pytest.mark.parametrize(
    ("changes", "n_writers", "expected"),
    [
        ({}, 4, (5, 5)),
        ({"chunk_locations": None}, 4, (6, 6)),
        ({"chunk_locations": None, "inner_locations": 4}, 4, (8, 4)),
        ({"chunk_locations": 12, "inner_locations": 3}, 1, (12, 3)),
    ],
)
def test_chunks_are_chosen_for_the_number_of_ranks(
    changes: dict[str, Any], n_writers: int, expected: tuple[int, int]
) -> None:
    """What is given stands; a chunk is whole inner chunks, and no larger than a rank's share asks."""
    schema = resolve_layout(make_schema(**changes), n_writers)
    array = schema.arrays["soil"]
    assert (array.resolved_shard_shape, array.resolved_chunk_shape) == ((expected[0], 7), (expected[1], 7))
    assert resolve_layout(schema, 9) is schema


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        ((5, 6), "'b' has chunks of 6 locations and 7 times; here all variables have 5"),
        ((5, 5, 3), "'a' has chunks of 5 locations and 3 times; here .* with all 7 times"),
    ],
)
def test_variables_share_their_chunks(shapes: tuple[int, ...], match: str) -> None:
    """Whole series, and as many locations for each variable: else ranks could share no share."""
    first, second, *times = shapes
    shape = {"id": first, **({"time": times[0]} if times else {})}
    variables = {
        "a": ms.Variable(("id", "time"), "f4", shard_shape=shape, chunk_shape=shape),
        "b": ms.Variable(("id", "time"), "f4", shard_shape={"id": second}, chunk_shape={"id": second}),
    }
    schema = make_schema(variables=variables, chunk_locations=None)
    with pytest.raises(ms.SchemaError, match=match):
        ms.plan(schema, decompose(schema, 2))


def boxes(regions: Any) -> list[tuple[int, int]]:
    return [r.box[0] for r in regions]


@pytest.mark.parametrize(
    ("n", "n_writers", "committed", "expected"),
    [
        (23, 4, (), [(0, 10), (10, 20), (20, 23), (0, 0)]),
        (23, 2, ((0, 11),), [(0, 20), (20, 23)]),
        (23, 2, ((0, 4), (5, 15)), [(0, 20), (20, 23)]),
        (23, 3, ((5, 20),), [(0, 20), (20, 23), (0, 0)]),
        (23, 2, ((0, 23),), [(0, 23), (0, 0)]),
        (7, 9, (), [(0, 5), (5, 7), *[(0, 0)] * 7]),
    ],
)
def test_shares_are_chunks_with_work(n: int, n_writers: int, committed: Any, expected: list[tuple[int, int]]) -> None:
    """Whole chunks, as many each in which locations are missing."""
    assert boxes(shares_of(make_schema(n), n_writers, committed)) == expected
    if not committed:
        assert boxes(decompose(make_schema(n), n_writers)) == expected
        assert boxes(shard_regions(make_schema(n), n_writers)) == expected


@given(st.data())
def test_any_shares_have_one_writer_a_chunk(data: st.DataObject) -> None:
    """Whatever the shares, each chunk has the one writer that holds its first location, who gets what others hold."""
    n, length = data.draw(st.integers(1, 23)), data.draw(st.integers(1, 8))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=0, max_size=5)))
    edges = [0, *cuts, n]
    schema = make_schema(n, chunk_locations=length)
    regions = [ms.Region.of_box(("id",), ((a, b),)) for a, b in itertools.pairwise(edges)]
    shares = prove_epoch(schema, regions).shares()
    held = [(s.writer, s.region) for s in shares]
    holder = {i: w for w, r in held if isinstance(r, ms.Region) for i in range(*r.box[0])}
    assert sorted(holder) == list(range(n))
    for share in shares:
        assert Share.from_json(json.loads(json.dumps(share.to_json()))) == share
        assert share.records is not None
        assert share.is_lending == any(holder[i] != holder[i // length * length] for i in range(n))
        assert [i for i in range(n) if holder[i // length * length] == share.writer] == list(range(*share.records))
        others = [i for i, h in holder.items() if h == share.writer and holder[i // length * length] != share.writer]
        assert others == ([] if share.lent is None else list(range(*share.lent[:2])))
        assert {holder[i // length * length] for i in others} == (set() if share.lent is None else {share.lent[2]})


def settled(regions: Any, **changes: Any) -> EpochState:
    given = [ms.Region.of_box(("id",), (r,)) for r in regions]
    return settle(make_schema(), given, [""] * len(given), writers="auto", **{"rearrange": "auto", **changes})[1]


def test_edges_amid_a_chunk_are_refused_where_nothing_may_move() -> None:
    """With ``rearrange="never"``, by name; on the edges of chunks nothing moves."""
    with pytest.raises(ms.AlignmentError, match=r"rank 1 has the locations from 7 on.*the nearest are 5 and 10"):
        settled([(0, 7), (7, 23)], rearrange="never")
    assert settled([(0, 10), (10, 23)], rearrange="never").records == ((0, 10), (10, 23))


def test_a_share_is_one_range() -> None:
    """Several ranges are refused."""
    region = ms.Region.from_boxes([{"id": (0, 5)}, {"id": (10, 23)}], {"id": 23})
    with pytest.raises(ms.SchemaError, match=r"rank 0 gave .*; a share is one range"):
        prove_epoch(make_schema(), [region])


def test_a_plan_counts_each_location_once() -> None:
    """Bytes are those of a location, writers the ranks with locations, and small chunks are named."""
    plan = ms.plan(make_schema(), [{"id": (0, 10)}, {"id": (10, 23)}, {"id": (0, 0)}])
    assert (plan.writers, plan.nbytes_per_record, plan.n_objects(23)) == ((0, 1), 7 * (4 + 8 + 4), 14)
    assert "raise chunk_locations from 5 to 8" in plan.warnings[0]
    # Chunks of 5 locations: by default two of each variable are being filled, and two are on their way.
    assert (plan.writer_memory_nbytes, plan.node_memory_nbytes) == (4 * 5 * 7 * 16, 8 * 5 * 7 * 16)
    large = ms.plan(make_schema(chunk_locations=23), [{"id": (0, 23)}])
    assert large.warnings == ()


def tokens_of(schema: ms.StreamSchema, manifest: Manifest, epoch: EpochState, sets: list[Any]) -> list[CommitToken]:
    return [
        CommitToken(
            store_id="s",
            run_id="r",
            fingerprint=manifest.fingerprint,
            epoch=1,
            base_seq=0,
            writer=writer,
            records=ranges_of(records),
            last_t=None,
            times_sha256=times_sha256(()),
            n_cells={name: 7 * len(records) for name in DTYPES},
            statics={},
            n_blobs=0,
            n_packs=0,
            region=epoch.regions[writer],
            n_objects=1,
            nbytes=1,
        )
        for writer, records in enumerate(sets)
    ]


def decided(sets: list[Any], committed: Any = (), **changes: Any) -> Any:
    schema = make_schema()
    epoch = prove_epoch(schema, decompose(schema, 3))
    manifest = Manifest.first(store_id="s", run_id="r", epoch=1, schema=schema, layout_digest="d")
    manifest = replace(manifest, committed=committed)
    first, *others = tokens_of(schema, manifest, epoch, sets)
    return decide(manifest, epoch, [replace(first, **changes), *others], ())


def test_a_commit_is_what_all_ranks_have() -> None:
    """Each rank's own locations, none at all too, make one set."""
    decision = decided([[1, 3], [], [21, 22]], committed=((0, 1),))
    assert decision.faults == ()
    assert decision.manifest.committed == ((0, 2), (3, 4), (21, 23))
    assert (decision.receipt.n_new_records, decision.receipt.n_records, decision.receipt.last_t) == (4, 5, None)
    assert Manifest.from_bytes(decision.manifest.to_bytes()).committed == decision.manifest.committed


@pytest.mark.parametrize(
    ("sets", "changes", "text"),
    [
        ([[3, 10], [], []], {}, "rank 0: locations ((3, 4), (10, 11)), it writes those from 0 to 10"),
        ([[], [9, 10], []], {}, "rank 1: locations ((9, 11),), it writes those from 10 to 20"),
        ([[3, 4], [], []], {"records": ((3, 4), (4, 5))}, "rank 0: locations"),
        ([[0], [], []], {}, "rank 0: locations ((0, 1),) are committed already"),
        ([[3], [], []], {"times_sha256": times_sha256((1.0,))}, "rank 0: a location has no time"),
        ([[3], [], []], {"n_cells": {"flow": 7, "soil": 6, "code": 7}}, "6 cells of 'soil'"),
    ],
)
def test_sets_that_make_no_commit(sets: list[Any], changes: dict[str, Any], text: str) -> None:
    """Outside the writer's share, twice, committed already, with times or in part."""
    decision = decided(sets, committed=((0, 1),), **changes)
    assert decision.manifest is None
    assert text in decision.faults[0].text


@pytest.mark.parametrize("inner", [5, 1])
def test_rows_put_at_once_are_those_put_one_by_one(inner: int) -> None:
    """The same bytes, and inner chunks without a record are left out."""
    codec = ChunkCodec([{"name": "bytes", "configuration": {"endian": "little"}}], np.dtype("f4"))
    spec = ShardSpec(shard_shape=(5, 3), chunk_shape=(inner, 3), codec=codec, fill=np.array(np.nan, "f4"))
    values = np.arange(15, dtype="f4").reshape(5, 3)
    values[[0, 3]] = np.nan
    whole, single = (OpenShard(ChunkEncoder(spec), (3,)) for _ in range(2))
    whole.put_rows(values, {1, 2, 4})
    for at in (1, 2, 4):
        single.put(at, values[at])
    data = b"".join(whole.finish())
    assert data == b"".join(single.finish())
    np.testing.assert_array_equal(read_whole(spec, data), values)


def test_the_row_length_is_that_of_the_variables() -> None:
    """Not that of a coordinate."""
    assert row_length(make_schema(chunk_locations=4)) == 4


def test_numbers_need_units() -> None:
    """Else they would silently be seconds since 1970; dates need none."""
    with pytest.raises(ms.SchemaError, match="times are numbers: give units=") as caught:
        ms.location_schema(["a"], [0.0, 1.0], {"v": "f4"})
    assert caught.value.kind == "time"
    dates = np.array(["2000-01-01", "2000-01-02"], "datetime64[s]")
    assert ms.location_schema(["a"], dates, {"v": "f4"}).time.units == "seconds since 1970-01-01"

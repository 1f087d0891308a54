"""Writers of one epoch without communication: records and statics in, a commit out, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistream as ms
from mpistream.errors import SchemaError
from mpistream.layout import resolve_layout
from mpistream.manifest import stage_folder
from tests.support.writers import Crew, read_array

DIMS = ("y", "x")
SIZES = (10, 6)


def schema(rows: int = 1, inner: int = 1, **more: Any) -> ms.StreamSchema:
    """10 x 6 cells in shards of 4 x 3, rows and inner chunks of so many records."""
    shapes: dict[str, Any] = {
        "shard_shape": {"time": rows, "y": 4, "x": 3},
        "chunk_shape": {"time": inner, "y": 2, "x": 3},
    }
    given_: dict[str, Any] = {
        "dims": {"time": None, "y": 10, "x": 6},
        "time": ms.AppendTime(units="s"),
        "variables": {
            "t": ms.Variable(("time", "y", "x"), "f4", **shapes),
            "rows": ms.Variable(("time", "y"), "f8", shard_shape={"time": 1, "y": 4}),
            "energy": ms.Variable(("time",), "f8"),
        },
        "statics": {"depth": ms.Variable(("y", "x"), "i2"), "scalar": ms.Variable((), "f4")},
        "coords": {"y": ms.Coordinate(("y",), range(10))},
    }
    return resolve_layout(ms.StreamSchema(**{**given_, **more}), 1)


def record(i: int) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    return {
        "t": rng.standard_normal(SIZES).astype("f4"),
        "rows": rng.standard_normal(10),
        "energy": np.float64(rng.standard_normal()),
    }


DEPTH = np.arange(60, dtype="i2").reshape(SIZES)


# ---- commits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("n_writers", [1, 3, 8])
def test_what_all_writers_wrote_is_in_the_store(n_writers, rows, inner, separator, threads) -> None:
    """Seven records in commits of 1, 2 and 4: every variable, every record, bitwise, and the static."""
    crew = Crew(schema(rows, inner, key_separator=separator), n_writers, threads=threads)
    i = 0
    for n in (1, 2, 4):
        for _ in range(n):
            crew.write(float(i), record(i))
            i += 1
        if n == 2:
            crew.write_static("depth", DEPTH)
            crew.write_static("scalar", 2.5)
        crew.commit()
    crew.close()
    assert (crew.manifest.n_records, crew.manifest.last_t) == (7, 6.0)
    assert crew.manifest.statics == ("depth", "scalar")
    for name in ("t", "rows"):
        expected = np.stack([record(k)[name] for k in range(7)])
        assert read_array(crew.store, crew.schema, name, 7).tobytes() == expected.tobytes()
    assert read_array(crew.store, crew.schema, "depth").tolist() == DEPTH.tolist()
    for writer in range(n_writers):
        assert crew.store.list(stage_folder(1, writer)) == []


@given(
    st.integers(1, 5),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]),
    st.lists(st.sampled_from(["write", "write", "commit", "whole rows", "rollback"]), max_size=25),
)
@settings(max_examples=60)
def test_any_order_of_calls_keeps_what_is_committed(n_writers, extents, calls) -> None:
    """Records, commits with and without partial rows, rollbacks: the store holds the committed records."""
    crew = Crew(schema(*extents), n_writers)
    written: list[int] = []
    committed: list[int] = []
    for step, call in enumerate(calls):
        if call == "write":
            crew.write(float(step), record(step))
            written.append(step)
        elif call == "rollback":
            for writer in crew.writers:
                writer.rollback()
            written = list(committed)
        else:
            crew.commit(partial_rows=call == "commit")
            n = len(written) if call == "commit" else max(len(written) // extents[0] * extents[0], len(committed))
            committed = written[:n]
        assert [(w.n_records, w.n_committed) for w in crew.writers] == [(len(written), len(committed))] * n_writers
        assert crew.manifest.n_records == len(committed)
    for name in ("t", "rows"):
        expected = np.array([record(k)[name] for k in committed]).reshape(-1, *SIZES[: 2 if name == "t" else 1])
        found = read_array(crew.store, crew.schema, name, len(committed))
        assert found.tobytes() == expected.astype(found.dtype).tobytes()


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("threads", [0, 1])
def test_the_callers_arrays_are_free_after_each_call(rows, threads) -> None:
    """Overwritten with 0xFF, they leave no trace."""
    crew = Crew(schema(rows), 1, threads=threads)
    block, line, depth = np.empty(SIZES, "f4"), np.empty(10), DEPTH.copy()
    for i in range(5):
        block[...], line[...] = record(i)["t"], record(i)["rows"]
        crew.writers[0].write_record(i, {**record(i), "t": block, "rows": line})
        for array in (block, line):
            array.view(np.uint8)[...] = 0xFF
    crew.writers[0].write_static("depth", depth)
    depth[...] = -1
    crew.write_static("scalar", 0)
    crew.commit()
    crew.close()
    expected = np.stack([record(i)["t"] for i in range(5)])
    assert read_array(crew.store, crew.schema, "t", 5).tobytes() == expected.tobytes()
    assert read_array(crew.store, crew.schema, "depth").tolist() == DEPTH.tolist()


def test_floats_may_overflow_into_fewer_bits() -> None:
    """1e300 in float32 is infinity, without a warning: that is what the dtype asks for."""
    crew = Crew(schema())
    crew.write(0.0, {**record(0), "t": np.full(SIZES, 1e300)})
    crew.commit()
    assert np.isposinf(read_array(crew.store, crew.schema, "t", 1)).all()


# ---- state -------------------------------------------------------------------------------------------


def test_a_writer_knows_where_it_stands() -> None:
    """Records and times of those that are not committed, and the last of both."""
    crew = Crew(schema())
    (writer,) = crew.writers
    assert (writer.n_records, writer.n_committed, writer.last_t, writer.base_seq) == (0, 0, None, 0)
    assert writer.records_to_commit(partial_rows=True) == ()
    assert not writer.has_pending(())
    crew.write(1.5, record(0))
    assert (writer.n_records, writer.n_committed, writer.last_t) == (1, 0, 1.5)
    assert writer.records_to_commit(partial_rows=True) == ((0, 1),)
    assert writer.times(((0, 1),)) == [1.5]
    assert writer.has_pending(((0, 1),))
    crew.commit()
    assert (writer.n_records, writer.n_committed, writer.last_t, writer.base_seq) == (1, 1, 1.5, 1)
    assert writer.records_to_commit(partial_rows=True) == ()
    assert not writer.has_pending(())
    crew.write_static("depth", DEPTH)
    assert writer.has_pending(())
    assert dict(writer.region.of("t")) == {"y": (0, 10), "x": (0, 6)}
    assert writer.block_shapes("t") == writer.block_shapes("depth") == [SIZES]
    assert [writer.block_shapes(name) for name in ("rows", "energy", "scalar")] == [[(10,)], [()], [()]]


def test_a_commit_of_whole_rows_ends_where_all_rows_end() -> None:
    """Rows of 2 and of 3 records end together every 6."""
    variables = {n: ms.Variable(("time", "x"), "f4", shard_shape={"time": k, "x": 6}) for n, k in (("a", 2), ("b", 3))}
    crew = Crew(schema(variables=variables))
    (writer,) = crew.writers
    values = np.arange(6, dtype="f4")
    found = []
    for i in range(14):
        crew.write(float(i), {"a": values + i, "b": values - i})
        found.append(writer.records_to_commit(partial_rows=False))
    assert found == [()] * 5 + [((0, 6),)] * 6 + [((0, 12),)] * 3
    assert writer.records_to_commit(partial_rows=True) == ((0, 14),)
    crew.commit(partial_rows=False)
    assert (crew.manifest.n_records, writer.times(((12, 14),)), writer.n_records) == (12, [12.0, 13.0], 14)
    assert writer.records_to_commit(partial_rows=False) == ()
    crew.commit()
    assert read_array(crew.store, crew.schema, "b", 14)[:, 0].tolist() == [-float(i) for i in range(14)]


def test_counts_of_a_writer() -> None:
    """Records, bytes in the dtype on disk, objects and commits."""
    crew = Crew(schema(), threads=1)
    (writer,) = crew.writers
    for i in range(2):
        crew.write(float(i), record(i))
    crew.commit()
    crew.close()
    stats = writer.stats
    assert (stats.threads, stats.n_records, stats.n_commits) == (1, 2, 1)
    assert stats.nbytes_in == 2 * (60 * 4 + 10 * 8)
    # 6 shards of t and 3 of rows a record, and one chunk of energy
    assert stats.n_objects == 2 * (6 + 3) + 1
    assert stats.nbytes_encoded == sum(len(v) for k, v in crew.store._objects.items() if "/c/" in k)
    assert min(stats.seconds["encode"], stats.seconds["write"]) > 0


# ---- what is refused ---------------------------------------------------------------------------------


def refused(call: Any, kind: str, *parts: str) -> None:
    with pytest.raises(SchemaError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("t", "changes", "kind", "parts"),
    [
        (1.0, {}, "time", ("t = 1.0 does not come after the last record's 1.0",)),
        (0.5, {}, "time", ("t = 0.5 does not come after the last record's 1.0",)),
        (float("nan"), {}, "time", ("t = nan",)),
        ("2", {}, "time", ("t = '2'",)),
        (2.0, {"t": ...}, "missing", ("variable 't' is missing", "rank 0 has a part of it, shape (10, 6)")),
        (2.0, {"energy": ...}, "missing", ("variable 'energy' is missing", "shape ()")),
        (2.0, {"salt": 1.0}, "unknown", ("'salt' is not among ('t', 'rows', 'energy')",)),
        (2.0, {"depth": DEPTH}, "unknown", ("'depth' is not among ('t', 'rows', 'energy')",)),
        (2.0, {"t": np.zeros((6, 10), "f4")}, "shape", ("variable 't'", "(6, 10)", "(10, 6)")),
        (2.0, {"energy": np.zeros(1)}, "shape", ("variable 'energy'", "(1,)", "()")),
        (2.0, {"rows": np.zeros(10, "c8")}, "dtype", ("variable 'rows'", "complex64", "float64")),
    ],
)
def test_a_bad_record_changes_nothing(t, changes, kind, parts) -> None:
    """All variables are checked before any is taken, and the next commit is as if nothing had been."""
    crew = Crew(schema(4))
    (writer,) = crew.writers
    crew.write(1.0, record(0))
    bad = {k: v for k, v in {**record(1), **changes}.items() if v is not ...}
    refused(lambda: writer.write_record(t, bad), kind, *parts)
    assert (writer.n_records, writer.times(((0, 1),))) == (1, [1.0])
    crew.write(2.0, record(2))
    crew.commit()
    expected = np.stack([record(0)["t"], record(2)["t"]])
    assert read_array(crew.store, crew.schema, "t", 2).tobytes() == expected.tobytes()


REGIONS = [ms.Region.of_box(DIMS, ((0, 10), (0, 6))), ms.Region.empty(DIMS)]


def test_a_rank_with_nothing_to_write_may_pass_nothing() -> None:
    """Or its empty blocks; of a variable that another rank writes for it, too."""
    crew = Crew(schema(), regions=REGIONS)
    first, second = crew.writers
    empty = {"t": np.empty((0, 0), "f4"), "rows": np.empty(0), "energy": 1.0}
    passed: list[dict[str, Any]] = [{}, empty, {"t": 5.0}]
    for i, arrays in enumerate(passed):
        first.write_record(i, record(i))
        second.write_record(i, arrays)
    crew.commit()
    assert crew.manifest.n_records == 3
    assert second.block_shapes("t") == [(0, 0)]
    assert (second.stats.n_objects, second.stats.nbytes_in) == (0, 0)


def test_what_a_rank_passes_in_vain_is_checked_all_the_same() -> None:
    """A wrong shape is a mistake on any rank."""
    writer = Crew(schema(), regions=REGIONS).writers[1]
    refused(lambda: writer.write_record(0, {"t": np.zeros(SIZES, "f4")}), "shape", "(10, 6)", "(0, 0)")
    refused(lambda: writer.write_record(0, {"energy": 1j}), "dtype", "'energy'")
    refused(lambda: writer.write_record(0, {"salt": 1}), "unknown", "'salt'")
    assert writer.n_records == 0


def test_unknown_names_are_refused_with_those_there_are() -> None:
    """For a static, a block's shape, and a variable in the place of a static."""
    (writer,) = Crew(schema()).writers
    refused(lambda: writer.write_static("salt", 1), "unknown", "'salt' is not among ('depth', 'scalar')")
    refused(lambda: writer.write_static("t", record(0)["t"]), "unknown", "'t' is not among ('depth', 'scalar')")
    refused(lambda: writer.block_shapes("salt"), "unknown", "'salt' is not among", "'t'", "'energy'", "'depth'")


def test_a_static_is_written_once() -> None:
    """Before its commit and after it; a bad block is no try."""
    crew = Crew(schema())
    (writer,) = crew.writers
    refused(lambda: writer.write_static("depth", DEPTH.T), "shape", "(6, 10)", "(10, 6)")
    refused(lambda: writer.write_static("depth", DEPTH * 0.5), "dtype", "float64", "int16")
    crew.write_static("depth", DEPTH)
    refused(lambda: writer.write_static("depth", DEPTH), "static", "'depth' is written already; it is written once")
    crew.commit()
    refused(lambda: writer.write_static("depth", DEPTH), "static", "'depth' is committed already; it is written once")
    crew.write_static("scalar", 1)
    writer.rollback()
    crew.write_static("scalar", 2)
    crew.commit()
    assert crew.manifest.statics == ("depth", "scalar")
    assert read_array(crew.store, crew.schema, "depth").tolist() == DEPTH.tolist()

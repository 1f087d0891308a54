"""Location series on disk: any order, any shares, failures behind the caller's back, parts, and readers."""

from __future__ import annotations

import collections
import errno
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpistream as ms
from mpistream.compare import compare
from mpistream.info import describe
from mpistream.location_rank_writer import LocationRankWriter
from mpistream.location_rows import _memory_dtype
from tests.support.faults import FaultyStore
from tests.support.location_series import DTYPES, IDS, N_TIMES, TIMES, expected, read_zarr, series
from tests.support.plain import append_schema, open_xarray
from tests.support.ranks import MemoryTransport, MemoryWorld, run_ranks

OPTIONS: dict[str, Any] = {"durability": "none", "timeout": 20}
CHUNK_NBYTES = 5 * N_TIMES * (4 + 8 + 4)


@pytest.fixture(autouse=True)
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator is a world and a rank."""
    from mpistream.comm import connect

    def connected_to(comm: Any, timeout: float) -> Any:
        return MemoryTransport(*comm) if isinstance(comm, tuple) else connect(comm, timeout)

    monkeypatch.setattr("mpistream.session.connect", connected_to)


def opened(url: Any, *, options: dict[str, Any] | None = None, **given: Any) -> ms.LocationSeriesWriter:
    changes = {"chunk_locations": 5, **given}
    return ms.write_open_locations(url, IDS, TIMES, DTYPES, options=ms.Options(**OPTIONS, **(options or {})), **changes)


def resumed(url: Any, **given: Any) -> ms.LocationSeriesWriter:
    w = ms.write_resume(url, options=ms.Options(**OPTIONS), **given)
    assert isinstance(w, ms.LocationSeriesWriter)
    return w


def write(w: ms.LocationSeriesWriter, locations: Iterable[int]) -> None:
    for i in locations:
        w.write_location(i, series(i))


def assert_holds(url: Path, locations: Iterable[int], **more: Any) -> None:
    found = read_zarr(url)
    for name, values in expected(list(locations), **more).items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    report = ms.verify(url)
    assert (report.damage, report.leftovers) == ((), ())


@st.composite
def runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Openings one after the other: ranks, their shares, and what each writes before each commit, in which order."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 3))
        edges = None
        if draw(st.booleans()):
            edges = [0, *sorted(draw(st.lists(st.integers(0, 23), min_size=size - 1, max_size=size - 1))), 23]
        order = draw(st.permutations(range(23)))
        cuts = sorted(draw(st.lists(st.integers(0, 23), max_size=3)))
        found.append(
            {
                "size": size,
                "edges": edges,
                "steps": [order[a:b] for a, b in zip([0, *cuts], [*cuts, draw(st.integers(0, 23))], strict=True)],
                "partial_rows": draw(st.booleans()),
                "wait": draw(st.booleans()),
                "rollback": draw(st.booleans()),
                "options": {
                    "threads": draw(st.integers(0, 1)),
                    "max_pending_nbytes": draw(st.sampled_from([None, 1, CHUNK_NBYTES, 3 * CHUNK_NBYTES])),
                },
            }
        )
    return found


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=runs(), inner=st.sampled_from([None, 1]))
def test_any_order_any_shares_any_resumes(
    runs: list[dict[str, Any]], inner: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whoever writes what, when it is committed and resumed: plain readers find each location that is committed."""
    url = tmp_path_factory.mktemp("run") / "series.zarr"
    done: set[int] = set()
    for k, run in enumerate(runs):
        world = MemoryWorld(run["size"], 30)

        def rank_of(transport: MemoryTransport, run: dict[str, Any] = run, k: int = k, world: Any = world) -> Any:
            comm, rank = (world, transport.rank), transport.rank
            share = None if run["edges"] is None else (run["edges"][rank], run["edges"][rank + 1])
            options = ms.Options(**OPTIONS, **run["options"])
            if k == 0:
                w = ms.write_open_locations(
                    url,
                    IDS,
                    TIMES,
                    DTYPES,
                    comm=comm,
                    share=share,
                    options=options,
                    chunk_locations=5,
                    inner_locations=inner,
                )
            else:
                region = None if share is None else {"id": share}
                again = ms.write_resume(url, comm=comm, region=region, options=options)
                assert isinstance(again, ms.LocationSeriesWriter)
                w = again
            for step in run["steps"]:
                write(w, [i for i in step if i in w.missing()])
                w.commit(partial_rows=run["partial_rows"], wait=run["wait"])
            if run["rollback"]:
                w.rollback()
            w.close(partial=True)
            return w._stream.manifest.committed

        found = run_ranks(run["size"], rank_of, timeout=60)
        assert found == [found[0]] * run["size"]
        there = {i for a, b in found[0] for i in range(a, b)}
        wanted = done | {i for step in run["steps"] for i in step}
        if not run["rollback"] or (run["partial_rows"] and run["wait"]):
            assert there == wanted
        assert done <= there <= wanted
        done = there
        reader = ms.open_reader(url)
        assert reader.committed == found[0]
        everything = expected(done)
        for i in done:
            for name in DTYPES:
                np.testing.assert_array_equal(reader.read_location(name, i), everything[name][i])
    resume = resumed(url)
    assert resume.missing() == sorted(set(range(23)) - done)
    write(resume, resume.missing())
    resume.close()
    assert_holds(url, range(23))


@pytest.mark.parametrize("threads", [0, 1])
def test_a_failure_in_the_background(tmp_path: Path, threads: int) -> None:
    """It is raised by the next call, with its traceback, and by the commit; nothing is lost when the disk is back."""
    store = FaultyStore(tmp_path / "series.zarr")
    w = opened(store, options={"threads": threads})
    store.fail("stage", errno.ENOSPC, when=lambda key, data: "/owner" not in key)
    write(w, range(5))
    w._writer._stager.wait()
    for _ in range(2):
        with pytest.raises(ms.StoreError, match="No space left") as caught:
            w.write_location(5, series(5))
        assert "in stage" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ms.CommitError, match=r"rank 0: .*No space left.*nothing was committed"):
        w.commit()
    store.heal()
    assert w.commit().n_records == 5
    write(w, range(5, 23))
    w.close()
    assert_holds(tmp_path / "series.zarr", range(23))


def test_a_chunk_that_can_not_be_read_back(tmp_path: Path) -> None:
    """A part-filled chunk that is damaged is named by the commit, and rolled back."""
    url = tmp_path / "series.zarr"
    w = opened(url)
    write(w, range(3))
    w.commit()
    data = (url / "flow/c/0/0").read_bytes()
    (url / "flow/c/0/0").write_bytes(data[:-1] + b"?")
    write(w, [3])
    with pytest.raises(ms.CommitError, match="flow/c/0/0: the index's stored CRC32C differs"):
        w.commit()
    (url / "flow/c/0/0").write_bytes(data)
    w.commit()
    (url / "flow/c/0/0").unlink()
    write(w, [4])
    with pytest.raises(ms.CommitError, match="flow/c/0/0: the shard of committed locations is missing"):
        w.commit()
    w.rollback()
    assert w.missing() == list(range(4, 23))
    w.close(partial=True)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """In any order no more rows are open than the bound allows; those that left memory are completed all the same."""
    url = tmp_path / "series.zarr"
    order = np.random.default_rng(3).permutation(23)
    w = opened(url, options={"max_pending_nbytes": 2 * CHUNK_NBYTES})
    for i in order:
        write(w, [int(i)])
        assert sum(rows.nbytes for rows in w._writer._series_rows.values()) <= 2 * CHUNK_NBYTES
        # What is known of a row holds its memory.
        assert all(set(w._writer._chunks) <= set(rows._open) for rows in w._writer._series_rows.values())
    w.close()
    assert_holds(url, range(23))
    assert {name: len(list((url / name / "c").rglob("0"))) for name in DTYPES} == dict.fromkeys(DTYPES, 6)


def test_in_order_a_chunk_is_encoded_and_written_once(tmp_path: Path) -> None:
    """One object for each variable and full chunk, while the caller goes on; `stats` counts them."""
    w = opened(tmp_path / "series.zarr")
    write(w, range(20))
    assert w.stats.n_objects == 4 * len(DTYPES)
    assert w.stats.n_records == 20
    receipt = w.commit()
    assert (receipt.n_objects, w.stats.nbytes_encoded) == (12, receipt.nbytes)
    w.close(partial=True)


def test_committed_locations_keep_their_bytes(tmp_path: Path) -> None:
    """A chunk that grows keeps what a reader with the old index reads, and what a later commit leaves pending waits."""
    url = tmp_path / "series.zarr"
    w = opened(url)
    write(w, [0, 3])
    w.commit()
    before = (url / "flow/c/0/0").read_bytes()
    write(w, [1, 2, *range(5, 10)])
    assert w.commit(partial_rows=False).n_records == 7
    assert (url / "flow/c/0/0").read_bytes() == before
    write(w, [4])
    assert w.commit().n_records == 10
    assert (url / "flow/c/0/0").read_bytes().startswith(before[:-20])
    w.close(partial=True)
    assert_holds(url, range(10))


def test_what_was_placed_and_never_committed_is_run_again(tmp_path: Path) -> None:
    """A writer that died between placing and committing leaves nothing that a resume takes for committed."""
    url = tmp_path / "series.zarr"
    store = FaultyStore(url)
    w = opened(store)
    write(w, [0, 1])
    w.commit()
    write(w, [2, 7, 8])
    store.fail("place", when=lambda key, data: key.endswith("manifest.json"))
    with pytest.raises(ms.CommitError):
        w.commit()
    assert (url / "flow/c/1/0").exists()
    w._release_own(failed=True)
    again = resumed(url)
    assert again.missing() == list(range(2, 23))
    assert not (url / "flow/c/1/0").exists()
    for i in again.missing():
        again.write_location(i, series(i, version=1))
    again.close()
    assert_holds(url, range(23), versions=dict.fromkeys(range(2, 23), 1))


def test_series_that_are_refused(tmp_path: Path) -> None:
    """By name, before anything of the location is taken."""
    w = opened(tmp_path / "series.zarr")
    write(w, [0])
    for location, values, match in (
        ("cat-1", {}, "location 'cat-1' is none of the 23 ids"),
        (23, {}, "location 23: give an id, or the number of a location, 0 to 22"),
        (-1, {}, "location -1: give an id"),
        (True, {}, "location True: give an id"),
        (1.0, {}, r"location 1\.0: give an id"),
        (0, series(0), "location 0 .'cat-4700'. was written since the last commit"),
        (1, [1.0], "location 1: a list; give a mapping variable -> series"),
        (1, None, "location 1: a NoneType; give a mapping variable -> series"),
        (1, {"flux": [1.0]}, "'flux' is not among .'flow', 'soil', 'code'."),
        (1, {"flow": series(1)["flow"], "soil": series(1)["soil"], "flux": [1.0]}, "'flux' is not among"),
        (1, {"flow": np.zeros(8, "f4")}, r"location 1, variable 'flow': series of shape .8,.; give at most 7 values"),
        (1, {"flow": np.zeros((7, 1), "f4")}, "series of shape .7, 1."),
        (1, {"flow": 1.0}, "series of shape .."),
        (1, {"code": np.zeros(7, "f8")}, "float64 into int32 can lose values"),
        (1, {"code": np.zeros(7, "f4")}, "float32 into int32 can lose values"),
        (1, {"flow": np.ma.masked_less(np.arange(7, dtype="f4"), 3)}, "variable 'flow': the block is masked"),
    ):
        # Alone, and among series with which nothing is wrong.
        for passed in (values, {**series(1), **values} if isinstance(values, dict) else values):
            with pytest.raises(ms.SchemaError, match=match):
                w.write_location(location, passed)  # type: ignore[arg-type]
    assert w.missing()[0] == 1
    w.commit()
    with pytest.raises(ms.SchemaError, match=r"location 0 .'cat-4700'. is committed; call invalidate"):
        w.write_location("cat-4700", {})
    for call in (
        lambda: w.write_record(0.0, {}),
        lambda: w.write_record_at(0, 0.0, {}),
    ):
        with pytest.raises(ms.SchemaError, match="does not fit the schema's time; use write_location"):
            call()
    w.write_location(np.int64(1), {"flow": np.arange(7.0), "soil": np.zeros(0), "code": np.arange(7, dtype="i2")})
    assert (w.n_records, w.last_t, w.share) == (2, None, (0, 23))
    assert repr(w).endswith("rank 0 of 1, 2 locations, 1 committed)")
    w.close(partial=True)
    assert ms.open_reader(tmp_path / "series.zarr").read_location("flow", 1).tolist() == list(range(7))
    with pytest.raises(ms.ProtocolError, match="write_location on a closed writer"):
        w.write_location(2, series(2))


def test_series_of_other_dtypes_and_strides(tmp_path: Path) -> None:
    """Floats are rounded, to infinity too, integers widened, and strides followed, beside series as they are stored."""
    url = tmp_path / "series.zarr"
    passed: dict[int, dict[str, Any]] = {i: series(i) for i in range(23)}
    for i in (1, 2):
        passed[i] = {
            "flow": np.array([1e300, *np.arange(6)]),
            "soil": np.arange(7, dtype="f4"),
            "code": np.arange(7)[::-1].astype("i2"),
        }
    passed[3] = {name: np.repeat(values, 3)[::3] for name, values in series(3).items()}
    passed[4] = {name: values.astype(values.dtype.newbyteorder(">")) for name, values in series(4).items()}
    w = opened(url)
    for i in (np.int64(6), 0, *range(1, 5), 5, *range(7, 23)):
        w.write_location(i, passed[int(i)])
    assert w.stats.nbytes_in == sum(
        len(v) * np.dtype(DTYPES[n]).itemsize for found in passed.values() for n, v in found.items()
    )
    w.close()
    whole = expected(range(23))
    for i in (1, 2):
        whole["flow"][i] = [np.inf, *range(6)]
        whole["soil"][i], whole["code"][i] = range(7), range(6, -1, -1)
    found = read_zarr(url)
    for name, values in whole.items():
        np.testing.assert_array_equal(found[name], values)


def test_times_and_complex_numbers(tmp_path: Path) -> None:
    """Which have no format in Python; a time that the dtype can't hold is refused after one that it can."""
    url = tmp_path / "series.zarr"
    dtypes = {"day": "datetime64[ns]", "wave": "complex64", "flow": "float32"}
    days = np.array("2000-01-01", "datetime64[D]") + np.arange(N_TIMES).astype("timedelta64[D]")
    values = {"day": days, "wave": np.arange(7) * 1j, "flow": np.arange(7, dtype="f4")}
    with ms.write_open_locations(url, IDS, TIMES, dtypes, chunk_locations=5, options=ms.Options(**OPTIONS)) as w:
        for i in range(23):
            w.write_location(i, {**values, "wave": (values["wave"] * i).astype("c8")})
            if i < 22:
                with pytest.raises(ms.SchemaError, match="beyond the range of datetime64"):
                    w.write_location(i + 1, {**values, "day": days + np.timedelta64(500 * 365, "D")})
    found: Any = open_xarray(url)
    np.testing.assert_array_equal(found["day"].values, np.tile(days.astype("M8[ns]"), (23, 1)))
    np.testing.assert_array_equal(found["wave"].values, np.arange(23)[:, None] * np.arange(7) * 1j)
    np.testing.assert_array_equal(found["flow"].values, np.tile(np.arange(7.0), (23, 1)))


@pytest.mark.parametrize(("dtype", "known"), [("<f4", sys.byteorder == "little"), (">f4", sys.byteorder == "big")])
def test_memory_of_another_byte_order_has_no_format(dtype: str, known: bool) -> None:
    """Values as they come are copied as they are, so what lies in a row must be as this machine has it."""
    assert (_memory_dtype(np.dtype(dtype)) is not None) is known


def test_whatever_happens_to_an_open_chunk(tmp_path: Path) -> None:
    """A location that comes after a flush, a commit, an invalidation or a rollback is there like those before."""
    url = tmp_path / "series.zarr"
    w = opened(url)
    write(w, [0, 1])
    w.flush()
    write(w, [2])
    w.commit()
    write(w, [3, 5, 6])
    with pytest.raises(ms.SchemaError, match=r"location 2 .* is committed"):
        write(w, [2])
    w.invalidate([1])
    write(w, [7])
    w.commit()
    assert_holds(url, [0, 2, 3, 5, 6, 7])
    write(w, [8])
    w.rollback()
    write(w, [1, 8, 9])
    w.commit()
    w.close(partial=True)
    assert_holds(url, [*range(4), *range(5, 10)])


def test_a_failure_is_raised_amid_the_next_chunk(tmp_path: Path) -> None:
    """What goes wrong behind the caller's back ends the next call, though its chunk is open and has room."""
    store = FaultyStore(tmp_path / "series.zarr")
    w = opened(store)
    write(w, [0, 1, 2, 3, 5, 6])
    store.fail("stage", errno.ENOSPC, when=lambda key, data: "/owner" not in key)
    write(w, [4])
    w._writer._stager.wait()
    with pytest.raises(ms.StoreError, match="No space left"):
        write(w, [7])
    store.heal()
    w.commit()
    write(w, w.missing())
    w.close()
    assert_holds(tmp_path / "series.zarr", range(23))


class _Interrupts(dict[int, Any]):
    """Rows, the first of which Ctrl-C keeps out."""

    is_done = False

    def __setitem__(self, row: int, value: Any) -> None:
        if not self.is_done:
            self.is_done = True
            raise KeyboardInterrupt
        super().__setitem__(row, value)


def test_an_interrupted_call_is_rolled_back_and_nothing_made_up_is_committed(tmp_path: Path) -> None:
    """Ctrl-C amid a call may have lost a row of one variable: no later call counts what that row no longer holds."""
    w = opened(tmp_path / "s", options={"threads": 0})
    write(w, range(4))
    rows: Any = w._writer._series_rows["flow"]
    rows._staged = _Interrupts()
    with pytest.raises(KeyboardInterrupt):
        write(w, [4])
    for call in (lambda: write(w, [4]), lambda: write(w, [5]), w.commit):
        with pytest.raises(ms.MPIStreamError, match="was taken in part") as caught:
            call()
        assert caught.value.kind == "broken"
    w.rollback()
    write(w, range(5))
    w.commit()
    w.close(partial=True)
    assert_holds(tmp_path / "s", range(5))


def test_a_row_that_lost_its_series_is_not_known(tmp_path: Path) -> None:
    """What is known of a chunk counts for all variables: one whose row holds other series is left to the long way."""
    w = opened(tmp_path / "s", options={"threads": 0})
    write(w, [0, 1])
    rows = w._writer._series_rows["flow"]
    assert rows.target(0, {0, 1}) is not None
    assert rows.target(0, {0, 1, 2}) is None
    w.rollback()
    w.close(partial=True)


def test_a_mapping_that_makes_values_as_they_are_asked(tmp_path: Path) -> None:
    """Also in a chunk that is open, a name that is none of the variables is refused, and nothing is added to it."""
    w = opened(tmp_path / "s")
    write(w, [0])
    given = collections.defaultdict(lambda: np.zeros(N_TIMES, "f4"), series(1))
    given["folw"] = given.pop("flow")
    with pytest.raises(ms.SchemaError, match="'folw'"):
        w.write_location(1, given)
    assert "flow" not in given
    w.close(partial=True)


def test_a_chunk_is_not_looked_for_where_a_dtype_has_no_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In vain, it would be looked for at each call, location by location."""
    looked: list[int] = []
    monkeypatch.setattr(LocationRankWriter, "_know", lambda self, row: looked.append(row))
    for name, dtype in (("c8", "complex64"), ("f4", "float32")):
        w = ms.write_open_locations(tmp_path / name, IDS, TIMES, {"u": dtype}, chunk_locations=5)
        w.write_location(0, {"u": np.zeros(N_TIMES, dtype)})
        w.close(partial=True)
        assert looked == ([] if name == "c8" else [0])


def test_a_writer_that_ended_takes_nothing(tmp_path: Path) -> None:
    """Closed, or after what every rank was told, though the chunk is open and has room."""
    (part,) = parts_of(tmp_path / "part.zarr", 1)
    write(part, [0, 1])
    part.close()
    with pytest.raises(ms.ProtocolError, match="write_location on a closed writer"):
        write(part, [2])
    w = opened(tmp_path / "series.zarr")
    write(w, [0, 1])
    w._channel.failure = ms.ProtocolError("rank 7 did not come", kind="timeout")
    with pytest.raises(ms.ProtocolError, match="rank 7 did not come"):
        write(w, [2])
    w._channel.failure = None
    w.close(partial=True)


def test_calls_keep_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those into an open chunk, too, but not every one."""
    now, kept = [0.0], []
    monkeypatch.setattr("mpistream.location_writer.perf_counter", lambda: now[0])
    w = opened(tmp_path / "series.zarr")
    monkeypatch.setattr(w, "_keep_lease", lambda: kept.append(now[0]))
    for i in range(4):
        now[0] = (100.0, 100.001, 100.02, 100.021)[i]
        write(w, [i])
    assert kept == [100.0, 100.02]
    monkeypatch.undo()
    w.close(partial=True)


def test_a_forked_child_puts_nothing(tmp_path: Path) -> None:
    """It is told so, though the chunk is open; the writer goes on."""
    w = opened(tmp_path / "series.zarr")
    write(w, [0, 1])
    with warnings.catch_warnings():
        # Python says from 3.12 on that such a child may deadlock.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            write(w, [2])
        except ms.ProtocolError as error:
            os._exit(0 if error.kind == "forked" else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    write(w, w.missing())
    w.close()
    assert_holds(tmp_path / "series.zarr", range(23))


def test_damage_is_found(tmp_path: Path) -> None:
    """The checker names the variable and the locations of a chunk that is damaged, and compares times and ids."""
    url = tmp_path / "series.zarr"
    with opened(url) as w:
        write(w, w.missing())
    for key in ("flow/c/1/0", "time/c/0", "id/c/0"):
        data = (url / key).read_bytes()
        (url / key).write_bytes(data[:3] + b"?" + data[4:])
    found = {(f.key, f.variable, f.records) for f in ms.verify(url).damage}
    assert found == {("flow/c/1/0", "flow", (5, 10)), ("time/c/0", "time", None), ("id/c/0", "id", None)}


def test_other_tools(tmp_path: Path) -> None:
    """What knows times alone says so; two series are compared location by location."""
    with opened(tmp_path / "a.zarr", coords={"lon": np.arange(23.0)}) as w:
        write(w, w.missing())
    w = opened(tmp_path / "b.zarr", coords={"lon": np.arange(23.0)})
    for i in w.missing():
        w.write_location(i, series(i, version=int(i == 4)))
    w.close()
    with pytest.raises(ms.SchemaError, match="a location series has locations as its records, and is not exported"):
        ms.export(tmp_path / "a.zarr", tmp_path / "a.nc")
    same, other = (compare(tmp_path / "a.zarr", tmp_path / f"{name}.zarr") for name in "ab")
    assert same.is_same
    assert not other.is_same


def test_resume_takes_no_times(tmp_path: Path) -> None:
    """A location has no time to go back to."""
    url = tmp_path / "series.zarr"
    opened(url).close(partial=True)
    for times in ({"at": 0.0}, {"expect_last_t": 0.0}):
        with pytest.raises(ms.SchemaError, match="is a location series, whose records are locations"):
            ms.write_resume(url, **times)  # type: ignore[arg-type]
    with pytest.raises(ms.SchemaError, match="is a location series, whose records are locations"):
        ms.truncate(url, at=0.0)
    with pytest.raises(ms.SchemaError, match="a share of a location series is one range"):
        ms.write_resume(url, region=ms.Indices({"id": np.arange(23)}))


def test_any_opening_knows_the_mode(tmp_path: Path) -> None:
    """`write_open` of the same schema gives the same writer."""
    schema = ms.location_schema(IDS, TIMES, DTYPES, chunk_locations=5)
    with ms.write_open(tmp_path / "series.zarr", schema) as w:
        assert isinstance(w, ms.LocationSeriesWriter)
        write(w, w.missing())
    assert_holds(tmp_path / "series.zarr", range(23))


def parts_of(url: Path, n: int, regions: list[Any] | None = None) -> list[Any]:
    schema = ms.location_schema(IDS, TIMES, DTYPES, chunk_locations=5)
    return [
        ms.write_open_part(
            url,
            schema,
            writer=i,
            n_writers=n,
            region=None if regions is None else {"id": regions[i]},
            options=ms.Options(**OPTIONS),
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("regions", [None, [(0, 5), (5, 20), (20, 23)]])
def test_a_job_array_over_locations(tmp_path: Path, regions: list[Any] | None) -> None:
    """Parts without MPI write their shares; their tokens commit what is there, and more later."""
    url = tmp_path / "series.zarr"
    parts = parts_of(url, 3, regions)
    for part in parts:
        write(part, part.missing()[:2])
    tokens = [json.loads(json.dumps(part.flush().to_json())) for part in parts]
    assert ms.commit_tokens(url, tokens).n_records == 6
    for part in parts:
        part.flush()
        write(part, part.missing())
    assert parts[0].commit([part.flush() for part in parts]).n_records == 23
    for part in parts:
        part.close()
    assert_holds(url, range(23))


def test_parts_share_no_chunk(tmp_path: Path) -> None:
    """A share of a part that ends amid a chunk is refused; so is one where chunks are not known."""
    schema = ms.location_schema(IDS, TIMES, DTYPES, chunk_locations=5)
    with pytest.raises(ms.AlignmentError, match=r"part 0 has the locations 0 to 6.*parts share no chunk"):
        ms.write_open_part(tmp_path / "a.zarr", schema, writer=0, n_writers=2, region={"id": (0, 7)})
    schema = ms.location_schema(IDS, TIMES, DTYPES)
    with pytest.raises(ms.SchemaError, match="give chunk_locations"):
        ms.write_open_part(tmp_path / "b.zarr", schema, writer=0, n_writers=2, region={"id": (0, 5)})


def test_readers(tmp_path: Path) -> None:
    """By number and by id, in ours and in xarray; what is not there is named."""
    url = tmp_path / "series.zarr"
    lon = np.linspace(7, 8, 23)
    with opened(url, coords={"lon": lon}, attrs={"title": "t"}) as w:
        write(w, w.missing())
    reader, whole = ms.open_reader(url), expected(range(23))
    assert reader.read_location("flow", "cat-4711").tolist() == whole["flow"][11].tolist()
    assert reader.read_location("soil", 2, times=(2, 4)).tolist() == whole["soil"][2, 2:4].tolist()
    np.testing.assert_array_equal(reader.read_array("soil", {"id": (3, 14), "time": (1, 5)}), whole["soil"][3:14, 1:5])
    np.testing.assert_array_equal(reader.read_array("flow"), whole["flow"])
    held = ms.Region.of_box(("id",), ((3, 9),))
    np.testing.assert_array_equal(reader.read_array("flow", held), whole["flow"][3:9])
    assert reader.read_array("lon", held).tolist() == lon[3:9].tolist()
    assert reader.read_array("id").tolist() == list(IDS)
    assert reader.times.tolist() == TIMES.astype("int64").tolist()
    with pytest.raises(ms.SchemaError, match="'cat-1' is none of the 23 ids"):
        reader.read_location("flow", "cat-1")
    for data in (open_xarray(url), reader.to_xarray()):
        assert data["flow"].sel(id="cat-4711").values.tolist() == whole["flow"][11].tolist()
        assert data["flow"].dims == ("id", "time")
        assert data["flow"].sel(id="cat-4702").coords["lon"].item() == lon[2]
        np.testing.assert_array_equal(data["time"].values, TIMES)
        assert data.attrs["featureType"] == "timeSeries"
        assert data.attrs["variables"] == list(DTYPES)
        assert data["id"].attrs["cf_role"] == "timeseries_id"
    facts = describe(url)
    assert (facts["mode"], facts["n_records"], facts["n_committed"]) == ("locations", 23, 23)
    assert facts["dims"] == {"id": 23, "time": 7}


def test_a_stream_of_fields_has_no_locations(tmp_path: Path) -> None:
    """`read_location` says what it is for."""
    schema = append_schema({"x": 2}, {"u": ms.Variable(("time", "x"), "f4")})
    ms.write_open(tmp_path / "a.zarr", schema).close()
    with pytest.raises(ms.SchemaError, match="is no location series; use read_record"):
        ms.open_reader(tmp_path / "a.zarr").read_location("u", 0)


def test_repair_finishes_what_a_writer_left(tmp_path: Path) -> None:
    """As in any other stream; nothing is dropped that could be restored."""
    url = tmp_path / "series.zarr"
    w = opened(url)
    write(w, range(7))
    w.commit()
    write(w, range(7, 10))
    w.flush()
    w._release_own(failed=True)
    assert ms.repair(url).n_records == 7
    with pytest.raises(ms.ResumeError, match="nothing to restore"):
        ms.repair(url, restore_dropped=True)
    with resumed(url) as again:
        write(again, again.missing())
    assert_holds(url, range(23))


def test_an_inner_chunk_serves_one_location(tmp_path: Path) -> None:
    """With inner chunks of one location the objects are the same in number, and plain readers see both shapes."""
    import zarr

    url = tmp_path / "series.zarr"
    with opened(url, inner_locations=1) as w:
        write(w, w.missing())
    group: Any = zarr.open_group(url, mode="r")
    assert (group["flow"].shards, group["flow"].chunks) == ((5, 7), (1, 7))
    assert_holds(url, range(23))
    with opened(tmp_path / "whole.zarr") as w:
        write(w, w.missing())
    group = zarr.open_group(tmp_path / "whole.zarr", mode="r")
    assert group["flow"].chunks == (5, 7)


def test_a_series_that_was_handed_over_is_not_lost(tmp_path: Path) -> None:
    """Where the rank that writes a chunk can't take what it got, all ranks hear of it, and the next commit has it."""
    url, world = tmp_path / "series.zarr", MemoryWorld(2, 30)

    def rank_of(transport: MemoryTransport) -> list[Any]:
        share = (0, 7) if transport.rank == 0 else (7, 23)
        w = ms.write_open_locations(
            url,
            IDS,
            TIMES,
            DTYPES,
            comm=(world, transport.rank),
            share=share,
            chunk_locations=5,
            options=ms.Options(**OPTIONS),
        )
        write(w, w.missing())
        for i in (4, 6, 7, 9):
            if not share[0] <= i < share[1]:
                with pytest.raises(ms.SchemaError, match=f"location {i} .* is not in the share of rank"):
                    write(w, [i])
        taking = w._writer.take_series
        if transport.rank == 0:
            w._writer.take_series = _failing  # type: ignore[method-assign]
        with pytest.raises(ms.CommitError) as caught:
            w.commit()
        w._writer.take_series = taking  # type: ignore[method-assign]
        assert w.missing() == []
        if transport.rank == 1:
            with pytest.raises(ms.SchemaError, match=r"location 8 .* was written since"):
                w.write_location(8, series(8))
        receipt = w.commit()
        w.close()
        return [str(caught.value), receipt.n_records]

    found = run_ranks(2, rank_of, timeout=60)
    assert found == [["rank 0: no memory; nothing was committed", 23]] * 2
    assert_holds(url, range(23))


def test_series_that_are_handed_over_are_cast(tmp_path: Path) -> None:
    """As those of the rank's own: to infinity, without a warning."""
    url, world = tmp_path / "series.zarr", MemoryWorld(2, 30)

    def rank_of(transport: MemoryTransport) -> None:
        share = (0, 7) if transport.rank == 0 else (7, 23)
        w = opened(url, share=share, comm=(world, transport.rank))
        for i in w.missing():
            w.write_location(i, {"flow": np.full(7, 1e300 * (-1) ** i)})
        w.close()

    run_ranks(2, rank_of, timeout=60)
    np.testing.assert_array_equal(read_zarr(url)["flow"], np.tile([[np.inf], [-np.inf]], (12, 7))[:23])


def _failing(record: int, series: Any) -> None:
    raise ms.StoreError("no memory", kind="io")

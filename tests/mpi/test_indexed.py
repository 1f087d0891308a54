"""A fixed time dim: records in any order, rewritten after `invalidate`, on any number of ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, error_on_all, on_root, options, subcomm, sync, tree
from tests.support.plain import open_xarray
from tests.support.scene import PLANE, Scene, plain
from tests.support.shards import entries_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SCENE = Scene(
    sizes={"y": 12, "x": 5},
    variables={"u": ("y x", "float32"), "zonal": ("y", "float64"), "total": ("", "float64")},
)
SPACE = {"y": 2, "x": 5}
N = 23
# No two steps are equal, and none of the times has an end in binary.
TIMES = np.array([(i + 0.01 * i * i) / 3 for i in range(N)])

LAYOUTS = [(1, 1), (4, 1), (4, 2), (4, 4), (8, 4), (3, 3)]


def _schema(row: int = 4, inner: int = 1, times: Any = TIMES, scene: Scene = SCENE) -> ms.StreamSchema:
    return ms.StreamSchema(
        dims={"time": None, **scene.sizes},
        time=ms.IndexedTime(times, units="seconds since 2000-01-01"),
        variables={n: ms.Variable(("time", *dims.split()), dtype) for n, (dims, dtype) in scene.variables.items()},
        shard_shape={"time": row, **SPACE},
        chunk_shape={"time": inner},
    )


def _opened(comm: MPI.Intracomm, url: Path, row: int = 4, inner: int = 1, **changes: Any) -> ms.StreamWriter:
    return ms.write_open(url, _schema(row, inner), comm=comm, options=options(**changes))


def _write(w: ms.StreamWriter, records: Iterable[int], version: int = 0) -> None:
    for i in records:
        w.write_record_at(i, TIMES[i], SCENE.record(w.region, i, version))


def _ranges(records: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the half-open runs of successive numbers."""
    runs = itertools.groupby(enumerate(sorted(records)), lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return tuple((run[0], run[-1] + 1) for run in found)


def _assert_holds(url: Path, versions: Mapping[int, int], *, with_zarr: bool = True, with_xarray: bool = False) -> None:
    """Assert that exactly these records are committed, each as its version says, for plain readers and for ours."""
    reader = ms.open_reader(url)
    sources = [plain(url)] * with_zarr + [open_xarray(url, decode_times=False)] * with_xarray
    is_committed = np.array([i in versions for i in range(N)])
    assert reader.times.tobytes() == TIMES.tobytes()
    for source in sources:
        assert np.asarray(source["time"][...]).tobytes() == TIMES.tobytes()
        np.testing.assert_array_equal(np.asarray(source["committed"][...]), is_committed, strict=True)
    assert reader.committed == _ranges(versions)
    assert ms.read_output_manifest(url)["committed"] == [list(r) for r in _ranges(versions)]
    assert reader.n_records == N
    for name in SCENE.variables:
        wholes = [np.asarray(source[name][...]) for source in sources]
        assert [whole.shape for whole in wholes] == [(N, *SCENE.shape(name))] * len(sources)
        for i in range(N):
            if i not in versions:
                with pytest.raises(ms.SchemaError, match=f"record {i} of '{name}' is not committed") as caught:
                    reader.read_record(name, i)
                assert caught.value.kind == "not_committed"
                continue
            expected = SCENE.whole(name, i, versions[i])
            for found in (*(whole[i] for whole in wholes), reader.read_record(name, i)):
                np.testing.assert_array_equal(np.asarray(found), expected, err_msg=f"{name} {i}", strict=True)


# What is committed


@pytest.mark.parametrize(("row", "inner"), LAYOUTS)
def test_records_in_any_order_and_any_subset_a_commit(
    comm: MPI.Intracomm, mpi_tmp_path: Path, row: int, inner: int
) -> None:
    """After each commit exactly the records until then are there, whatever their order was."""
    url = mpi_tmp_path / "s"
    batches = [[17], [3, 0, 22], [5, 4, 6, 16], [2, 21, 1], [20, 9, 8, 7]]
    batches.append([i for i in reversed(range(N)) if not any(i in b for b in batches)])
    done: set[int] = set()
    with _opened(comm, url, row, inner) as w:
        on_root(comm, lambda: _assert_holds(url, {}))
        for seq, batch in enumerate(batches, 1):
            _write(w, batch)
            assert (w.n_records, w.n_committed) == (len(done) + len(batch), len(done))
            receipt = w.commit()
            done |= set(batch)
            assert comm.allgather(receipt) == [receipt] * comm.size
            facts = (receipt.commit_seq, receipt.n_records, receipt.n_new_records, receipt.last_t)
            assert facts == (seq, len(done), len(batch), TIMES[max(done)])
            assert (w.n_committed, w.last_t, w.reader.committed) == (len(done), TIMES[max(done)], _ranges(done))
            on_root(comm, lambda d=done: _assert_holds(url, dict.fromkeys(d, 0)))  # type: ignore[misc]
    assert done == set(range(N))
    on_root(comm, lambda: _assert_holds(url, dict.fromkeys(done, 0), with_xarray=True))


def test_each_rank_may_have_an_order_of_its_own(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The ranks agree on the records of a commit, not on the order in which they came."""
    url, records = mpi_tmp_path / "s", [2, 3, 7, 11, 12, 20]
    with _opened(comm, url) as w:
        _write(w, random.Random(comm.rank).sample(records, len(records)))
    on_root(comm, lambda: _assert_holds(url, dict.fromkeys(records, 0)))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_wrote_other_records_commit_nothing(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """As many records, but one is another on the last rank: every rank gets one error, and rollback mends it."""
    url = mpi_tmp_path / "s"
    with _opened(comm, url) as w:
        _write(w, [1, 2, 5 if comm.rank < comm.size - 1 else 6])
        error = error_on_all(comm, w.commit)
        assert (type(error), error.kind) == (ms.CommitError, "records")
        on_root(comm, lambda: _assert_holds(url, {}))
        w.rollback()
        assert (w.n_records, w.last_t) == (0, None)
        _write(w, [1, 2, 5], version=1)
    on_root(comm, lambda: _assert_holds(url, {1: 1, 2: 1, 5: 1}))


def test_manifest_grows_with_the_gaps_alone(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Neither the number of times nor that of records makes it longer; each gap does, and is gone when it is filled."""
    sizes = {}

    def nbytes(url: Path) -> int:
        return on_root(comm, lambda: (url / ".mpistream/manifest.json").stat().st_size)

    scene = Scene(sizes={"y": 12, "x": 5}, variables={"total": ("", "float64")})
    for n in (200, 20_000):
        url, times = mpi_tmp_path / str(n), np.arange(float(n))

        def put(w: ms.StreamWriter, records: Iterable[int], times: Any = times) -> None:
            for i in records:
                w.write_record_at(i, times[i], scene.record(w.region, i))
            w.commit()

        with ms.write_open(url, _schema(times=times, scene=scene), comm=comm, options=OPTIONS) as w:
            found = [nbytes(url)]
            for records in (range(10), range(10, 100), range(101, 199, 2), range(100, 200, 2)):
                put(w, records)
                found.append(nbytes(url))
            sizes[n] = found
            assert on_root(comm, lambda u=url: ms.read_output_manifest(u)["committed"]) == [[0, 199]]  # type: ignore[misc]
    for empty, ten, hundred, with_gaps, without in sizes.values():
        # Some numbers have more digits than before, and last_t is none at first.
        assert max(ten - empty, hundred - ten, without - hundred) < 24
        # "[101,102]," and so on, 49 times.
        assert with_gaps - hundred == pytest.approx(49 * len("[101,102],"), abs=16)
    assert abs(sizes[20_000][0] - sizes[200][0]) < 24


# What is refused


def test_another_time_or_index_is_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The time is bitwise times[index], the index an integer within: anything else is SchemaError on the rank."""
    url = mpi_tmp_path / "s"
    times = [-1.0, 0.0, 0.1, 0.3]
    with ms.write_open(url, _schema(times=times), comm=comm, options=OPTIONS) as w:
        block = SCENE.record(w.region, 2)
        bad: list[tuple[Any, Any, str]] = [
            (2, np.nextafter(0.1, 1), "time"),
            (2, np.nextafter(0.1, 0), "time"),
            (2, np.float32(0.1), "time"),
            (2, 0.3, "time"),
            (1, -0.0, "time"),
            (2, np.nan, "time"),
            (4, 0.3, "index"),
            (-1, 0.3, "index"),
            (2.0, 0.1, "index"),
            ("2", 0.1, "index"),
        ]
        for index, t, kind in bad:
            with pytest.raises(ms.SchemaError) as caught:
                w.write_record_at(index, t, block)
            assert (index, t, caught.value.kind) == (index, t, kind)
        assert w.n_records == 0
        w.write_record_at(np.int16(2), np.float64(0.1), block)  # type: ignore[arg-type]
        w.commit()
        assert w.reader.committed == ((2, 3),)


def test_each_kind_of_time_has_its_own_call(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """write_record is for a time dim that grows, write_record_at and invalidate for one that is fixed."""
    with _opened(comm, mpi_tmp_path / "fixed") as w:
        with pytest.raises(ms.SchemaError, match="use write_record_at") as caught:
            w.write_record(TIMES[0], SCENE.record(w.region, 0))
        assert caught.value.kind == "mode"
    with ms.write_open(mpi_tmp_path / "grows", PLANE.schema(), comm=comm, options=OPTIONS) as w:
        with pytest.raises(ms.SchemaError, match="use write_record") as caught:
            w.write_record_at(0, 0.0, PLANE.record(w.region, 0))
        assert caught.value.kind == "mode"
        PLANE.write(w, 0)
        w.commit()
        error = error_on_all(comm, lambda: w.invalidate([0]))
        assert (type(error), error.kind) == (ms.SchemaError, "mode")


@pytest.mark.parametrize("row", [1, 4])
def test_writing_a_record_twice_is_refused_before_anything_is_written(
    comm: MPI.Intracomm, mpi_tmp_path: Path, row: int
) -> None:
    """A committed record, or one that is pending, is refused: no file of the store changes, nor of the stage."""
    url = mpi_tmp_path / "s"
    with _opened(comm, url, row, threads=0) as w:
        _write(w, [2, 9])
        receipt = w.commit()
        before, n_objects = on_root(comm, lambda: tree(mpi_tmp_path)), w.stats.n_objects
        with pytest.raises(ms.SchemaError, match=r"invalidate\(\[9\]\)") as caught:
            _write(w, [9], version=1)
        assert caught.value.kind == "committed"
        assert w.commit() == receipt
        assert on_root(comm, lambda: tree(mpi_tmp_path)) == before
        assert (w.n_records, w.stats.n_objects) == (2, n_objects)

        _write(w, [3])
        sync(comm)
        before, n_objects = on_root(comm, lambda: tree(mpi_tmp_path)), w.stats.n_objects
        with pytest.raises(ms.SchemaError, match="record 3 was written since the last commit") as caught:
            _write(w, [3], version=1)
        assert caught.value.kind == "written"
        assert on_root(comm, lambda: tree(mpi_tmp_path)) == before
        assert (w.n_records, w.stats.n_objects) == (3, n_objects)
    on_root(comm, lambda: _assert_holds(url, {2: 0, 3: 0, 9: 0}))


# Invalidate


@pytest.mark.parametrize(("row", "inner"), LAYOUTS)
def test_invalidated_records_are_rewritten(comm: MPI.Intracomm, mpi_tmp_path: Path, row: int, inner: int) -> None:
    """On every rank they are uncommitted, plain readers know when the call returns, and then they take new values."""
    url = mpi_tmp_path / "s"
    with _opened(comm, url, row, inner) as w:
        _write(w, range(12))
        assert w.commit().commit_seq == 1
        receipt = w.invalidate([5, 0, 6, 11])
        # At once, and not only when all ranks have come so far.
        seen = np.asarray(plain(url)["committed"][...]).nonzero()[0].tolist()
        assert seen == [1, 2, 3, 4, 7, 8, 9, 10]
        assert comm.allgather(receipt) == [receipt] * comm.size
        assert (receipt.commit_seq, receipt.n_records, receipt.last_t) == (2, 8, TIMES[10])
        assert (w.n_committed, w.n_records, w.last_t) == (8, 8, TIMES[10])
        assert w.reader.committed == ((1, 5), (7, 11))
        assert w.commit() == receipt
        on_root(comm, lambda: _assert_holds(url, dict.fromkeys(seen, 0)))

        _write(w, [6, 0], version=1)
        on_root(comm, lambda: _assert_holds(url, dict.fromkeys(seen, 0)))
        assert w.commit().commit_seq == 3
        on_root(comm, lambda: _assert_holds(url, {**dict.fromkeys(seen, 0), 6: 1, 0: 1}))
        w.invalidate([6])
        _write(w, [11, 6], version=2)
    on_root(comm, lambda: _assert_holds(url, {**dict.fromkeys(seen, 0), 0: 1, 6: 2, 11: 2}, with_xarray=True))


@pytest.mark.parametrize("row", [1, 4])
def test_what_is_pending_stays_pending_over_an_invalidate(comm: MPI.Intracomm, mpi_tmp_path: Path, row: int) -> None:
    """Records in the same rows, written before, are committed with the rewritten ones."""
    url = mpi_tmp_path / "s"
    with _opened(comm, url, row) as w:
        _write(w, [0, 1, 5, 8, 9])
        w.commit()
        _write(w, [2, 7], version=1)
        w.invalidate([1, 5, 8])
        assert (w.n_committed, w.n_records) == (2, 4)
        on_root(comm, lambda: _assert_holds(url, {0: 0, 9: 0}))
        _write(w, [1], version=2)
        w.commit()
        on_root(comm, lambda: _assert_holds(url, {0: 0, 1: 2, 2: 1, 7: 1, 9: 0}))
        _write(w, [3, 8], version=3)
    on_root(comm, lambda: _assert_holds(url, {0: 0, 1: 2, 2: 1, 3: 3, 7: 1, 8: 3, 9: 0}))


@pytest.mark.parametrize("indices", [[4], [0, 4], [N], [-1], ["0"], [0.0]])
def test_only_committed_records_are_invalidated(
    comm: MPI.Intracomm, mpi_tmp_path: Path, indices: Sequence[Any]
) -> None:
    """One index that is not committed is SchemaError on every rank, and none is invalidated."""
    url = mpi_tmp_path / "s"
    with _opened(comm, url) as w:
        _write(w, [0, 1])
        receipt = w.commit()
        _write(w, [4])
        before = on_root(comm, lambda: tree(url))
        error = error_on_all(comm, lambda: w.invalidate(indices))
        assert (type(error), error.kind) == (ms.SchemaError, "index")
        assert w.invalidate([]) == receipt
        assert on_root(comm, lambda: tree(url)) == before
    on_root(comm, lambda: _assert_holds(url, {0: 0, 1: 0, 4: 0}))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_invalidate_other_records_are_told(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """It is ProtocolError on every rank, and nothing is invalidated."""
    url = mpi_tmp_path / "s"
    w = _opened(comm, url)
    _write(w, range(4))
    w.commit()
    error = error_on_all(comm, lambda: w.invalidate([0 if comm.rank else 1]))
    assert isinstance(error, ms.ProtocolError)
    on_root(comm, lambda: _assert_holds(url, dict.fromkeys(range(4), 0)))


def test_reader_of_before_is_told_that_a_record_was_invalidated(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """It reads the other records as before; that one is superseded, until refresh has seen the new state."""
    url = mpi_tmp_path / "s"
    with _opened(comm, url) as w:
        _write(w, range(6))
        w.commit()
        reader = ms.open_reader(url)
        sync(comm)
        w.invalidate([2])
        for _ in range(2):
            with pytest.raises(ms.StoreError) as caught:
                reader.read_record("u", 2)
            assert caught.value.kind == "superseded"
            for i in (0, 1, 3, 4, 5):
                np.testing.assert_array_equal(reader.read_record("u", i), SCENE.whole("u", i), strict=True)
            sync(comm)
            if w.n_committed == 5:
                _write(w, [2], version=1)
                w.commit()
        assert reader.refresh()
        np.testing.assert_array_equal(reader.read_record("u", 2), SCENE.whole("u", 2, 1), strict=True)


# Rows of several records


def _inner_chunks(url: Path, row: int) -> dict[tuple[Any, ...], bytes]:
    """Return (variable, shard, position in it) -> stored bytes of every inner chunk in a row of four."""
    arrays = ms.open_reader(url).schema.arrays
    found: dict[tuple[Any, ...], bytes] = {}
    for name in ("u", "zonal"):
        for path in (url / name / "c" / str(row)).rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                for position, (offset, nbytes) in entries_of(arrays[name].shard_spec(), data).items():
                    found[name, str(path.relative_to(url)), position] = data[offset : offset + nbytes]
    return found


def test_committed_neighbours_keep_their_bytes(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """When other records come to a row, or are rewritten, the inner chunks of those that stay are the same bytes."""
    url = mpi_tmp_path / "s"
    with _opened(comm, url, 4, 1) as w:
        _write(w, [5, 7])
        w.commit()
        first = on_root(comm, lambda: _inner_chunks(url, 1))
        # Six shards over y and one over x.
        assert {key[2][0] for key in first} == {1, 3}
        assert len({key[:2] for key in first}) == 2 * 6
        _write(w, [6, 4])
        w.commit()
        second = on_root(comm, lambda: _inner_chunks(url, 1))
        assert {key[2][0] for key in second} == {0, 1, 2, 3}
        assert {k: second[k] for k in first} == first
        w.invalidate([5, 6])
        _write(w, [6], version=1)
        w.commit()
        third = on_root(comm, lambda: _inner_chunks(url, 1))
        kept = [k for k in second if k[2][0] in (0, 3)]
        assert {k: third[k] for k in kept} == {k: second[k] for k in kept}
        changed = {k: v for k, v in third.items() if k[2][0] == 2}
        assert all(v != second[k] for k, v in changed.items())
    on_root(comm, lambda: _assert_holds(url, {4: 0, 6: 1, 7: 0}))


def _staged(url: Path) -> int:
    return sum(p.is_file() for p in (url / ".mpistream/stage").rglob("*") if "owner" not in p.parts)


@pytest.mark.parametrize("inner", [1, 2, 4])
def test_open_rows_are_bounded(comm: MPI.Intracomm, mpi_tmp_path: Path, inner: int) -> None:
    """Rows beyond max_pending_nbytes leave memory for the stage folder, and are read back when more of them comes."""
    staged: dict[Any, Any] = {}
    for limit in (1, 100_000_000):
        url = mpi_tmp_path / str(limit)
        with _opened(comm, url, 4, inner, threads=0, max_pending_nbytes=limit) as w:
            # The first record of every row, then the third, ...: six rows are open all the time.
            for first in (0, 2, 1):
                for i in range(first, N, 4):
                    _write(w, [i])
                    rows = w._writer._rows.values()
                    assert limit > 1 or all(r.n_open <= 1 for r in rows)
                    assert sum(r.nbytes for r in rows) <= limit or all(r.n_open <= 1 for r in rows)
                staged.setdefault(limit, on_root(comm, lambda u=url: _staged(u)))  # type: ignore[misc]
            on_root(comm, lambda u=url: _assert_holds(u, {}))  # type: ignore[misc]
            w.commit()
            on_root(comm, lambda u=url: _assert_holds(u, {i: 0 for i in range(N) if i % 4 != 3}))  # type: ignore[misc]
            _write(w, range(3, N, 4), version=1)
        on_root(comm, lambda u=url: _assert_holds(u, {i: int(i % 4 == 3) for i in range(N)}))  # type: ignore[misc]
    # Of six rows, of six shards of two variables, all but one left memory.
    assert staged == {1: 5 * 6 * 2, 100_000_000: 0}


def test_commit_without_partial_rows_takes_whole_rows(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Rows that are full, the short one at the end too, are committed and written once; the others stay pending."""
    url = mpi_tmp_path / "s"

    def rows(*numbers: int) -> dict[str, tuple[int, int, int]]:
        wanted = tuple(f"u/c/{n}/" for n in numbers)
        return on_root(comm, lambda: {k: v for k, v in tree(url).items() if k.startswith(wanted)})

    with _opened(comm, url, 4, 2) as w:
        _write(w, [5, 3, 1, 9])
        assert w.commit(partial_rows=False).commit_seq == 0
        assert (w.n_committed, w.n_records) == (0, 4)
        _write(w, [21, 0, 2, 20, 22])
        assert w.commit(partial_rows=False).n_records == 7
        assert (w.n_committed, w.n_records, w.reader.committed) == (7, 9, ((0, 4), (20, 23)))
        on_root(comm, lambda: _assert_holds(url, dict.fromkeys([0, 1, 2, 3, 20, 21, 22], 0)))
        assert rows(1, 2) == {}
        before = rows(0, 5)
        assert len(before) >= 2 * 6
        _write(w, [4, 7, 6])
        assert w.commit(partial_rows=False).n_records == 11
        assert w.reader.committed == ((0, 8), (20, 23))
        # A row with committed records is full when the last of it comes.
        assert w.commit().n_records == 12
        _write(w, [11, 8])
        assert w.commit(partial_rows=False).n_records == 12
        _write(w, [10])
        assert w.commit(partial_rows=False).n_records == 15
        assert rows(0, 5) == before
        _write(w, [13])
    on_root(comm, lambda: _assert_holds(url, dict.fromkeys([*range(12), 13, 20, 21, 22], 0)))


# Resume


@pytest.mark.parametrize(("row", "inner"), [(1, 1), (4, 1), (4, 4), (8, 2)])
def test_resume_on_another_number_of_ranks(comm: MPI.Intracomm, mpi_tmp_path: Path, row: int, inner: int) -> None:
    """Without `at` all is kept, with it what lies behind is dropped, and gaps are filled in either way."""
    url = mpi_tmp_path / "s"
    versions = dict.fromkeys([14, 2, 3, 9, 7, 18], 0)
    with _opened(comm, url, row, inner) as w:
        _write(w, versions)
    steps: list[tuple[float | None, list[int]]] = [
        (None, [0, 8, 15, 22]),
        (TIMES[14], [10, 19]),  # just this one stays
        (float(np.nextafter(TIMES[14], 0)), [14, 1, 21]),  # and goes
        (None, []),
        (TIMES[5], [5, 4]),  # no record has been written there
        (TIMES[0] - 1, [22, 6]),
        (TIMES[22] + 1, [0]),
    ]
    for version, (at, more) in enumerate(steps, 1):
        size = 1 + (comm.size - 1 + version) % comm.size
        team = subcomm(comm, size)
        kept = {i: v for i, v in versions.items() if at is None or TIMES[i] <= at}
        if team is not None:
            with ms.write_resume(url, comm=team, at=at, options=OPTIONS) as w:
                last_t = TIMES[max(kept)] if kept else None
                assert (w.n_committed, w.n_records, w.last_t, w.epoch) == (len(kept), len(kept), last_t, version + 1)
                assert w.resumed is not None
                assert (w.resumed.n_dropped, w.resumed.last_t) == (len(versions) - len(kept), last_t)
                on_root(team, lambda k=kept: _assert_holds(url, k, with_zarr=False))  # type: ignore[misc]
                _write(w, more, version)
                if kept:
                    with pytest.raises(ms.SchemaError, match="is committed"):
                        _write(w, [min(kept)], version)
        versions = {**kept, **dict.fromkeys(more, version)}
        on_root(comm, lambda v=versions: _assert_holds(url, v))  # type: ignore[misc]


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(("n_before", "n_after"), [(1, 4), (4, 1), (2, 3), (3, 2), (4, 3)])
def test_records_are_rewritten_by_other_ranks(
    comm: MPI.Intracomm, mpi_tmp_path: Path, n_before: int, n_after: int
) -> None:
    """Rows that some ranks filled in part are read back, changed and filled by ranks with other regions."""
    url = mpi_tmp_path / "s"
    before, after = subcomm(comm, n_before), subcomm(comm, n_after)
    if before is not None:
        with _opened(before, url, 4, 2) as w:
            _write(w, [0, 2, 5, 6, 7, 12])
    sync(comm)
    if after is not None:
        with ms.write_resume(url, comm=after, options=OPTIONS) as w:
            w.invalidate([2, 7])
            _write(w, [1, 2, 4, 13], version=1)
    on_root(comm, lambda: _assert_holds(url, {0: 0, 1: 1, 2: 1, 4: 1, 5: 0, 6: 0, 12: 0, 13: 1}))


# All of it


# What is called, and how often.
_CALLS = {"write": 8, "commit": 3, "whole rows": 3, "invalidate": 3, "rollback": 1, "flush": 1, "resume": 2}


def _full_rows(committed: Iterable[int], pending: Iterable[int], row: int) -> set[int]:
    there = {*committed, *pending}
    return {i for i in pending if all(k in there for k in range(i // row * row, min(i // row * row + row, N)))}


@pytest.mark.parametrize(("row", "inner"), [(1, 1), (4, 2), (8, 1)])
def test_any_sequence_of_calls(comm: MPI.Intracomm, mpi_tmp_path: Path, row: int, inner: int) -> None:
    """Writes, commits, rollbacks, invalidates and resumes in a random order agree with a dict.

    Another sequence for each number of ranks; zarr-python, which takes longest, looks at every fourth state.
    """
    url, rng = mpi_tmp_path / "s", random.Random(f"{comm.size} {row}")
    committed: dict[int, int] = {}
    pending: dict[int, int] = {}
    team: MPI.Intracomm | None = comm
    w: ms.StreamWriter | None = _opened(comm, url, row, inner, max_pending_nbytes=rng.choice([None, 2000]))

    def on_team(call: Callable[[ms.StreamWriter], object]) -> None:
        if w is not None:
            call(w)

    for version in range(20):
        op = rng.choices([*_CALLS], [*_CALLS.values()])[0]
        left = [i for i in range(N) if i not in committed and i not in pending]
        if op == "write":
            chosen = rng.sample(left, min(len(left), rng.randint(1, 6)))
            on_team(lambda w, c=chosen, v=version: _write(w, c, v))  # type: ignore[misc]
            pending |= dict.fromkeys(chosen, version)
        elif op == "commit":
            on_team(lambda w: w.commit())
            committed, pending = {**committed, **pending}, {}
        elif op == "whole rows":
            on_team(lambda w: w.commit(partial_rows=False))
            full = _full_rows(committed, pending, row)
            committed |= {i: pending[i] for i in full}
            pending = {i: v for i, v in pending.items() if i not in full}
        elif op == "invalidate":
            chosen = rng.sample(sorted(committed), min(len(committed), 3))
            on_team(lambda w, c=chosen: w.invalidate(c))  # type: ignore[misc]
            committed = {i: v for i, v in committed.items() if i not in chosen}
        elif op == "rollback":
            on_team(lambda w: w.rollback())
            pending = {}
        elif op == "flush":
            on_team(lambda w: w.flush())
        else:
            on_team(lambda w: w.close())
            committed, pending = {**committed, **pending}, {}
            at = rng.choice([None, None, float(TIMES[rng.randrange(N)])])
            committed = {i: v for i, v in committed.items() if at is None or TIMES[i] <= at}
            sync(comm)
            team = subcomm(comm, rng.randint(1, comm.size))
            w = None if team is None else ms.write_resume(url, comm=team, at=at, options=OPTIONS)
        if w is not None:
            assert (w.n_committed, w.n_records) == (len(committed), len(committed) + len(pending))
            assert w.reader.committed == _ranges(committed)
        if op != "write":
            sync(comm)
            on_root(comm, lambda c=committed, v=version: _assert_holds(url, c, with_zarr=v % 4 == 3))  # type: ignore[misc]
    on_team(lambda w: w.close())
    on_root(comm, lambda: _assert_holds(url, {**committed, **pending}, with_xarray=True))

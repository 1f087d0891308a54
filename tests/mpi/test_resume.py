"""Any number of ranks resumes at any record: what is kept is untouched, what is dropped leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, keys, on_root, subcomm, sync, tree
from tests.support.scene import PLANE, Scene, assert_holds, time_of
from tests.support.verified import assert_sound

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SCENE = Scene(
    sizes={"y": 7, "x": 5},
    variables={
        "u": ("y x", "float32"),
        "zonal": ("y", "int16"),
        "total": ("", "float64"),
    },
    statics={"topo": ("y x", "float32"), "gravity": ("", "float64")},
    coords={"y": ("y", "float64"), "lat": ("y x", "float32")},
)
SPACE = {"y": 2, "x": 3}


def _create(comm: MPI.Intracomm, url: Path, n: int, row: int, inner: int, separator: str = "/") -> None:
    """Write n records with a commit that ends inside a row, and statics."""
    schema = SCENE.schema(
        shard_shape={"time": row, **SPACE}, chunk_shape={"time": inner, "y": 1}, key_separator=separator
    )
    with ms.write_open(url, schema, comm=comm, options=OPTIONS) as w:
        SCENE.write_statics(w)
        for i in range(n):
            SCENE.write(w, i)
            if i % 4 == 2:
                w.commit()


def _continue(
    comm: MPI.Intracomm, url: Path, stop: int, run: int, at: float | None = None
) -> tuple[int, ms.StreamWriter]:
    """Resume at a time, write until there are `stop` records; return how many were kept."""
    with ms.write_resume(url, comm=comm, at=at, options=OPTIONS) as w:
        kept = w.n_records
        for i in range(kept, stop):
            SCENE.write(w, i, run)
            if i % 3 == 1:
                w.commit()
    return kept, w


def _check(comm: MPI.Intracomm, url: Path, runs: list[int], row: int, separator: str = "/") -> None:
    """Assert that exactly these records are there, and not one object more."""
    on_root(comm, lambda: assert_holds(url, SCENE, runs))
    assert on_root(comm, lambda: keys(url)) == SCENE.keys(len(runs), {"time": row, **SPACE}, separator)
    on_root(comm, lambda: assert_sound(url))


LAYOUTS = [(4, 1, "/"), (4, 4, "."), (1, 1, "/"), (8, 4, "/"), (4, 2, "/"), (1, 1, "."), (3, 3, ".")]


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("n_after", [1, 2, 3, 4])
@pytest.mark.parametrize("n_before", [1, 2, 3, 4])
def test_any_number_of_ranks_goes_on_after_any_other(
    comm: MPI.Intracomm, mpi_tmp_path: Path, n_before: int, n_after: int
) -> None:
    """Ten records, then resumes within a row, further back (P-11), at the very beginning and at the end, all exact."""
    url = mpi_tmp_path / "s"
    row, inner, separator = LAYOUTS[(4 * n_before + n_after) % len(LAYOUTS)]
    before, after = subcomm(comm, n_before), subcomm(comm, n_after)
    if before is not None:
        _create(before, url, 10, row, inner, separator)
    sync(comm)

    runs = [0] * 10
    for run, (team, at, n_kept, stop) in enumerate(
        [
            (after, time_of(5), 6, 9),  # inside a row and, where it is 4, inside an inner chunk
            (before, time_of(4) - 0.1, 4, 6),  # between records, on the edge of a row of 4
            (after, None, 6, 7),
            (before, time_of(0) - 1, 0, 3),  # before the first record
            (after, time_of(100), 3, 5),  # behind the last one
        ],
        1,
    ):
        if team is not None:
            kept, _ = _continue(team, url, stop, run, at)
            assert kept == n_kept
        sync(comm)
        runs = runs[:n_kept] + [run] * (stop - n_kept)
        if run in (1, 3, 5):
            _check(comm, url, runs, row, separator)


@pytest.mark.parametrize(
    ("row", "inner", "n_kept"),
    [(1, 1, 0), (1, 1, 4), (4, 1, 0), (4, 1, 3), (4, 1, 4), (4, 2, 3), (4, 4, 0), (4, 4, 3), (4, 4, 4), (4, 4, 6)],
)
def test_resume_at_a_record_drops_what_follows(
    comm: MPI.Intracomm, mpi_tmp_path: Path, row: int, inner: int, n_kept: int
) -> None:
    """t > at is dropped, at itself is kept, times go on without a double (P-10), and ``resumed`` tells of it."""
    url = mpi_tmp_path / "s"
    _create(comm, url, 9, row, inner)
    at = time_of(n_kept - 1) if n_kept else -7.0
    with ms.write_resume(url, comm=comm, at=at, options=OPTIONS) as w:
        last_t = at if n_kept else None
        assert (w.n_records, w.n_committed, w.last_t, w.epoch) == (n_kept, n_kept, last_t, 2)
        assert w.resumed is not None
        facts = (w.resumed.n_dropped, w.resumed.last_t, w.resumed.at, w.resumed.previous_epoch)
        assert facts == (9 - n_kept, last_t, at, 1)
        # Plain readers see the shorter store at once.
        on_root(comm, lambda: assert_holds(url, SCENE, [0] * n_kept))
        for i in range(n_kept, 11):
            SCENE.write(w, i, run=1)
            w.commit()
    _check(comm, url, [0] * n_kept + [1] * (11 - n_kept), row)


@pytest.mark.parametrize(("row", "inner", "n"), [(4, 1, 6), (4, 4, 6), (8, 2, 3), (1, 1, 3)])
def test_resume_without_at_goes_on_in_a_row_filled_in_part(
    comm: MPI.Intracomm, mpi_tmp_path: Path, row: int, inner: int, n: int
) -> None:
    """Nothing is dropped, and rows and the time chunk that are filled in part go on (P-45), again and again."""
    url = mpi_tmp_path / "s"
    _create(comm, url, n, row, inner)
    for run in (1, 2, 3):
        kept, w = _continue(comm, url, n + run, run)
        assert kept == n + run - 1
        assert w.resumed is not None
        assert (w.resumed.n_dropped, w.resumed.at) == (0, None)
        assert w.epoch == run + 1
    _check(comm, url, [0] * n + [1, 2, 3], row)


def test_statics_and_coordinates_survive(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Statics stay committed over resumes that drop all records, and those not yet written can be written then."""
    url = mpi_tmp_path / "s"
    with ms.write_open(url, SCENE.schema(shard_shape=SPACE), comm=comm, options=OPTIONS) as w:
        w.write_static("topo", SCENE.block("topo", w.region))
        SCENE.write(w, 0)
    before = on_root(comm, lambda: {k: v for k, v in tree(url).items() if k.startswith(("topo/", "y/"))})
    with ms.write_resume(url, comm=comm, at=-1.0, options=OPTIONS) as w:
        assert [w.is_committed(name) for name in SCENE.region_statics] == [True, False, False]
        for name in ("gravity", "lat"):
            w.write_static(name, SCENE.block(name, w.region))
        SCENE.write(w, 0, run=1)
    on_root(comm, lambda: assert_holds(url, SCENE, [1]))
    after = on_root(comm, lambda: tree(url))
    assert {k: after[k] for k in before if "/c/" in k} == {k: v for k, v in before.items() if "/c/" in k}


def _objects(url: Path, rows: range) -> dict[str, tuple[tuple[int, int, int], bytes]]:
    """Return inode, time, size and bytes of the shards of these rows."""
    return {
        k: (v, (url / k).read_bytes())
        for k, v in tree(url).items()
        if any(k.startswith(f"{name}/c/{row}/") and (url / k).is_file() for name in ("u", "zonal") for row in rows)
    }


@pytest.mark.parametrize("at", [7, 8, None])
def test_rows_of_kept_records_are_never_rewritten(comm: MPI.Intracomm, mpi_tmp_path: Path, at: int | None) -> None:
    """Neither a resume nor the commits after it touch an object of a row that lies wholly before `at` (P-20)."""
    url = mpi_tmp_path / "s"
    _create(comm, url, 11, 4, 2)
    # Rows 0 and 1 hold the records 0 to 7.
    before = on_root(comm, lambda: _objects(url, range(2)))
    assert len(before) == 2 * (8 + 4)
    _continue(comm, url, 14, 1, None if at is None else time_of(at))
    assert on_root(comm, lambda: _objects(url, range(2))) == before


@pytest.mark.parametrize("n_kept", [0, 3, 4, 6])
def test_dropped_records_are_kept_aside_until_the_first_commit(
    comm: MPI.Intracomm, mpi_tmp_path: Path, n_kept: int
) -> None:
    """Every object that held a dropped record lies under dropped/<epoch>, bytes as they were (P-12); then it goes."""
    url, dropped = mpi_tmp_path / "s", mpi_tmp_path / "s/.mpistream/dropped"
    _create(comm, url, 9, 4, 1)
    names = ("u", "zonal", "total", "time")

    def content(root: Path) -> dict[str, bytes]:
        return {
            k: (root / k).read_bytes()
            for k in (str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
            if k.startswith(tuple(f"{n}/c/" for n in names))
        }

    old = on_root(comm, lambda: content(url))
    # Time, and what lies over time alone, is one chunk; of the others a row of four is one.
    lost = {k: v for k, v in old.items() if k.startswith(("time", "total")) or int(k.split("/")[2]) >= n_kept // 4}
    w = ms.write_resume(url, comm=comm, at=time_of(n_kept - 1), options=OPTIONS)
    assert on_root(comm, lambda: content(dropped / "2")) == lost
    assert on_root(comm, lambda: keys(url)) == SCENE.keys(n_kept, {"time": 4, **SPACE})
    assert w.commit().n_records == n_kept  # nothing is pending: it deletes nothing
    assert on_root(comm, lambda: content(dropped / "2")) == lost
    SCENE.write(w, n_kept, run=1)
    w.commit()
    assert on_root(comm, dropped.exists) is False
    w.close()
    _check(comm, url, [0] * n_kept + [1], 4)


def test_restarts_that_fail_at_once_destroy_nothing(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Resumes one after the other, each further back and without a commit, keep aside what each of them dropped."""
    url = mpi_tmp_path / "s"
    _create(comm, url, 10, 1, 1)
    old = on_root(comm, lambda: {i: (url / f"u/c/{i}/0/0").read_bytes() for i in range(10)})
    for n_kept in (8, 6, 6, 3):
        w = ms.write_resume(url, comm=comm, at=time_of(n_kept - 1), options=OPTIONS)
        assert w.n_records == n_kept
        w.close()

    def aside() -> dict[int, bytes]:
        found = (url / ".mpistream/dropped").glob("*/u/c/*/0/0")
        return {int(p.parts[-3]): p.read_bytes() for p in found}

    assert on_root(comm, aside) == {i: old[i] for i in range(3, 10)}
    on_root(comm, lambda: assert_holds(url, SCENE, [0] * 3))
    _continue(comm, url, 5, 1)
    assert on_root(comm, aside) == {}
    _check(comm, url, [0, 0, 0, 1, 1], 1)


def test_resume_twice_without_a_commit_gives_the_same(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Recovery done again changes epoch and commit_seq alone, and no object (I6)."""
    url = mpi_tmp_path / "s"
    _create(comm, url, 7, 4, 1)

    def state() -> tuple[dict[str, Any], set[str]]:
        document = ms.read_output_manifest(url)
        own = ("epoch", "run_id", "commit_seq", "first_seq", "layout_digest", "checksum")
        return {k: v for k, v in document.items() if k not in own}, keys(url)

    seen = []
    for _ in range(3):
        ms.write_resume(url, comm=comm, at=time_of(4), options=OPTIONS).close()
        seen.append(on_root(comm, state))
    assert seen[1:] == [seen[0]] * 2
    _check(comm, url, [0] * 5, 4)


@pytest.mark.mpi(min_size=2)
def test_resume_takes_other_regions(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The ranks may own other parts of the grid than before, as long as they lie on the store's shards."""
    url = mpi_tmp_path / "s"
    schema = PLANE.schema(shard_shape={"time": 4, "y": 1, "x": 3})
    halves = [{"y": (0, 8), "x": (0, 3)}, {"y": (0, 8), "x": (3, 6)}]
    thirds = [{"y": (0, 5)}, {"y": (5, 8)}]
    none = {"y": (0, 0)}
    with ms.write_open(
        url, schema, comm=comm, region=halves[comm.rank] if comm.rank < 2 else none, options=OPTIONS
    ) as w:
        PLANE.write_statics(w)
        for i in range(3):
            PLANE.write(w, i)
    back = comm.size - 1 - comm.rank
    with ms.write_resume(url, comm=comm, region=thirds[back] if back < 2 else none, options=OPTIONS) as w:
        for i in range(3, 6):
            PLANE.write(w, i, run=1)
    on_root(comm, lambda: assert_holds(url, PLANE, [0, 0, 0, 1, 1, 1]))

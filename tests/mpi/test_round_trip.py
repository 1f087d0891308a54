"""What all ranks wrote together is what zarr-python and the reader find, whatever the layout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, keys, on_root, options
from tests.support.scene import FULL, PLANE, Scene, assert_holds, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"z": 2, "y": 4, "x": 6}
CHUNK = {"z": 1, "y": 4, "x": 3}


def _written(
    comm: MPI.Intracomm,
    url: Path,
    scene: Scene,
    n_records: int,
    *,
    schema: ms.StreamSchema,
    region: dict[str, tuple[int, int]] | None = None,
    every: int = 2,
    **changes: Any,
) -> None:
    """Write statics and records, with a commit after every so many records and one by leaving the body."""
    with ms.write_open(url, schema, comm=comm, region=region, options=options(**changes)) as w:
        scene.write_statics(w)
        for i in range(n_records):
            scene.write(w, i)
            if i % every == every - 1:
                w.commit()


@pytest.mark.parametrize(
    ("row", "inner", "separator"),
    [(1, 1, "/"), (1, 1, "."), (4, 1, "/"), (4, 2, "."), (4, 4, "/"), (8, 4, "/"), (8, 2, ".")],
)
def test_records_of_every_row_length_and_inner_time_extent_come_back(
    comm: MPI.Intracomm, mpi_tmp_path: Path, row: int, inner: int, separator: str
) -> None:
    """Variables and statics of all dims, over an automatic decomposition that no shard divides, are bitwise right."""
    url, n = mpi_tmp_path / "s", row + 1
    schema = FULL.schema(
        shard_shape={"time": row, **SHARD}, chunk_shape={"time": inner, **CHUNK}, key_separator=separator
    )
    _written(comm, url, FULL, n, schema=schema)

    on_root(comm, lambda: assert_holds(url, FULL, [0] * n))
    assert on_root(comm, lambda: keys(url)) == FULL.keys(n, {"time": row, **SHARD}, separator)


@pytest.mark.parametrize(("durability", "threads"), [("fsync", 1), ("none", 0)])
def test_neither_durability_nor_threads_change_what_is_written(
    comm: MPI.Intracomm, mpi_tmp_path: Path, durability: str, threads: int
) -> None:
    """With and without syncs, and with and without a thread behind the caller's back, the data is the same."""
    schema = FULL.schema(shard_shape={"time": 4, **SHARD}, chunk_shape={"time": 2, **CHUNK})
    _written(comm, mpi_tmp_path / "s", FULL, 5, schema=schema, durability=durability, threads=threads)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0] * 5))


def test_default_layout_holds_the_data(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Without any shape given, a layout is chosen on which the data comes back."""
    _written(comm, mpi_tmp_path / "s", FULL, 3, schema=FULL.schema())

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0] * 3))


def test_rows_of_different_lengths_come_back(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Each variable may have a row length of its own."""
    rows = {"u": 3, "p": 2, "ice": 1, "zonal": 4, "merid": 5}
    overrides: dict[str, dict[str, Any]] = {v: {"shard_shape": {"time": row}} for v, row in rows.items()}
    _written(comm, mpi_tmp_path / "s", FULL, 6, schema=FULL.schema(overrides, shard_shape=SHARD, chunk_shape=SHARD))

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0] * 6))


def _strip(comm: MPI.Intracomm, size: int, shard: int) -> tuple[int, int]:
    """Split a dim into strips of whole shards, the first ranks taking what is over; the last may be empty."""
    n, over = divmod(-(-size // shard), comm.size)
    first = comm.rank * n + min(comm.rank, over)
    stop = first + n + (comm.rank < over)
    return min(first * shard, size), min(stop * shard, size)


@pytest.mark.parametrize("dim", ["y", "x", "z"])
def test_own_regions_on_shard_edges_come_back(comm: MPI.Intracomm, mpi_tmp_path: Path, dim: str) -> None:
    """Ranks may choose strips of one dim, of unequal size and partly empty; the other dims are whole then."""
    region = {dim: _strip(comm, FULL.sizes[dim], SHARD[dim])}
    schema = FULL.schema(shard_shape={"time": 4, **SHARD}, chunk_shape={"time": 1, **CHUNK})
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, region=region, options=OPTIONS) as w:
        empty = region[dim][0] == region[dim][1]
        assert dict(w.region) == {d: (0, 0) if empty else (0, n) for d, n in FULL.sizes.items()} | (
            {} if empty else region
        )
        FULL.write_statics(w)
        for i in range(5):
            FULL.write(w, i)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0] * 5))


def test_default_layout_fits_own_regions(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Given regions without any shape, shards are chosen whose edges are the regions' edges."""
    scene = Scene(
        sizes={"y": 4 * comm.size + 3, "x": 5},
        variables={"u": ("y x", "float32")},
        statics={"topo": ("y x", "float64")},
    )
    last = scene.sizes["y"] if comm.rank == comm.size - 1 else 4 * (comm.rank + 1)
    region = {"y": (4 * comm.rank, last)}
    _written(comm, mpi_tmp_path / "s", scene, 3, schema=scene.schema(), region=region)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", scene, [0] * 3))


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(("edges", "shard"), [((0, 2, 4, 6, 8), 2), ((0, 3, 6, 8, 10), 1)], ids=["even", "uneven"])
def test_staggered_grids_share_one_decomposition(
    comm: MPI.Intracomm, mpi_tmp_path: Path, edges: tuple[int, ...], shard: int
) -> None:
    """Cells, and the edges between them, of which the last rank has one more (P-08): each is one Zarr grid."""
    n = edges[-1]
    scene = Scene(
        sizes={"y": n, "y_edge": n + 1, "x": 3},
        variables={"rho": ("y x", "float32"), "v": ("y_edge x", "float64")},
        statics={"mask": ("y_edge x", "bool")},
    )
    region = {"y": (n, n), "y_edge": (n + 1, n + 1)}
    if comm.rank < 4:
        a, b = edges[comm.rank : comm.rank + 2]
        region = {"y": (a, b), "y_edge": (a, b + (b == n))}
    schema = scene.schema(shard_shape={"y": shard, "y_edge": shard, "x": 3})
    _written(comm, mpi_tmp_path / "s", scene, 3, schema=schema, region=region)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", scene, [0] * 3))


@pytest.mark.parametrize("shard_y", [1, 3])
def test_ranks_without_a_part_of_the_grid_may_pass_nothing(
    comm: MPI.Intracomm, mpi_tmp_path: Path, shard_y: int
) -> None:
    """With more ranks than shards (P-23) the regions left over are empty, and their ranks pass an empty record."""
    scene = Scene(
        sizes={"y": 3, "x": 4},
        variables={"u": ("y x", "float32"), "zonal": ("y", "float64")},
        statics={"topo": ("y x", "float32")},
    )
    schema = scene.schema(shard_shape={"time": 2, "y": shard_y, "x": 4}, chunk_shape={"time": 1, "y": 1, "x": 4})
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, options=OPTIONS) as w:
        is_empty = comm.allgather(w.region.is_empty)
        scene.write_statics(w)
        for i in range(3):
            w.write_record(time_of(i), {} if w.region.is_empty else scene.record(w.region, i))
            w.commit()

    n_boxes = min(comm.size, 3 // shard_y)
    assert is_empty == [rank >= n_boxes for rank in range(comm.size)]
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", scene, [0] * 3))


def test_ranks_that_do_not_write_a_variable_may_leave_it_out(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A variable that lacks partitioned dims is written by the lowest rank that holds a shard whole."""
    scene = Scene(
        sizes={"y": 4, "x": 7}, variables={"u": ("y x", "float32"), "zonal": ("y", "float32"), "n": ("", "i4")}
    )
    region = {"x": (comm.rank, comm.rank + 1 if comm.rank < comm.size - 1 else 7)}
    schema = scene.schema(shard_shape={"y": 2, "x": 1})
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, region=region, options=OPTIONS) as w:
        for i in range(2):
            blocks = scene.record(w.region, i)
            w.write_record(time_of(i), blocks if comm.rank == 0 else {"u": blocks["u"]})

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", scene, [0, 0]))


def test_owner_with_an_empty_region_still_writes_what_has_no_partitioned_dims(
    comm: MPI.Intracomm, mpi_tmp_path: Path
) -> None:
    """Series, and statics without partitioned dims, are rank 0's even if it owns no part of the grid."""
    scene = Scene(
        sizes={"y": 4, "k": 3},
        variables={"u": ("y", "float32"), "total": ("", "float64")},
        statics={"levels": ("k", "float64"), "gravity": ("", "float32")},
    )
    last = comm.size - 1
    region = {"y": (0, 4) if comm.rank == last else (0, 0)}
    schema = scene.schema(shard_shape={"y": 2})
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, region=region, options=OPTIONS) as w:
        scene.write_statics(w)
        for i in range(2):
            if comm.rank in (0, last):
                scene.write(w, i)
            else:
                w.write_record(time_of(i), {})

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", scene, [0, 0]))


def test_more_than_1024_records_go_on_in_the_next_time_chunk(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Time, and variables over time alone, cross the edge of their chunks of 1,024 records."""
    scene = Scene(sizes={}, variables={"total": ("", "float64")})
    with ms.write_open(mpi_tmp_path / "s", scene.schema(), comm=comm, options=OPTIONS) as w:
        for i in range(2060):
            scene.write(w, i)
            if i in (500, 1023, 1500):
                w.commit()

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", scene, [0] * 2060))


def test_writer_reads_what_is_committed(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Every rank can read all ranks' committed records through the open writer, and a reader on the communicator."""
    schema = PLANE.schema(shard_shape={"time": 4, "y": 2, "x": 3})
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, options=OPTIONS) as w:
        PLANE.write(w, 0)
        w.commit()
        PLANE.write(w, 1)
        assert w.reader.n_records == 1
        assert w.reader.read_record("u", -1).tobytes() == PLANE.whole("u", 0).tobytes()
        with ms.open_reader(mpi_tmp_path / "s", comm=comm) as r:
            assert r.n_records == 1
            w.commit()
            assert r.refresh() is True
            assert r.read_record("u", 1).tobytes() == PLANE.whole("u", 1).tobytes()


@pytest.mark.mpi(min_size=2)
def test_only_the_owner_needs_zarr(comm: MPI.Intracomm, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contributor opens, writes, commits, rolls back, resumes and reads where zarr can't be imported."""
    url = mpi_tmp_path / "s"
    if comm.rank:
        monkeypatch.setitem(sys.modules, "zarr", None)
    _written(comm, url, FULL, 3, schema=FULL.schema(shard_shape={"time": 2, **SHARD}))
    with ms.write_resume(url, comm=comm, at=time_of(1), options=OPTIONS) as w:
        FULL.write(w, 2, run=1)
        w.rollback()
        FULL.write(w, 2)
        w.commit()
        assert w.reader.read_record("p", 2).tobytes() == FULL.whole("p", 2).tobytes()

    on_root(comm, lambda: assert_holds(url, FULL, [0] * 3))

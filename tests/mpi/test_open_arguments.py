"""Wrong arguments of an opening are one clear error on every rank, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, at_most, error_on_all, on_root, options, tree
from tests.support.scene import PLANE, Scene, assert_holds, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"time": 2, "y": 2, "x": 3}


def _schema(**layout: Any) -> ms.StreamSchema:
    return PLANE.schema(shard_shape={**SHARD, **layout})


def _refused(comm: MPI.Intracomm, root: Path, call: Callable[[Path], object]) -> ms.MPIStreamError:
    """Return the error of opening a new store, which must be quick and leave nothing."""
    before = on_root(comm, lambda: tree(root))
    with at_most(10):
        error = error_on_all(comm, lambda: call(root / "s"))
    assert on_root(comm, lambda: tree(root)) == before
    return error


# Pieces of records move only where they may.
STILL = options(rearrange="never")


def _open_with_regions(
    comm: MPI.Intracomm,
    root: Path,
    scene: Scene,
    regions: list[Any],
    chosen: ms.Options = OPTIONS,
    **layout: Any,
) -> ms.MPIStreamError:
    """Return the error of opening with these regions on the first ranks, an empty one on the others."""
    empty = dict.fromkeys(scene.sizes, (0, 0))
    region = regions[comm.rank] if comm.rank < len(regions) else empty
    schema = scene.schema(**layout)
    return _refused(comm, root, lambda url: ms.write_open(url, schema, comm=comm, region=region, options=chosen))


@pytest.mark.mpi(min_size=2)
def test_overlapping_regions_name_both_ranks_and_the_cells(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Two ranks that own the same cells are a TilingError with both ranks and the cells in it."""
    error = _open_with_regions(comm, mpi_tmp_path, PLANE, [{"y": (0, 6)}, {"y": (4, 8)}], shard_shape=SHARD)
    assert (type(error), error.kind) == (ms.TilingError, "overlap")
    assert all(part in str(error) for part in ("rank 0", "rank 1", "y[4:6] x[0:6]"))


@pytest.mark.mpi(min_size=3)
def test_cells_that_nobody_owns_are_named(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """One shard that no rank owns is a TilingError with its box in it (P-07)."""
    regions = [{"y": (0, 4)}, {"y": (4, 6)}, {"y": (6, 8), "x": (0, 3)}]
    error = _open_with_regions(comm, mpi_tmp_path, PLANE, regions, shard_shape=SHARD)
    assert (type(error), error.kind) == (ms.TilingError, "hole")
    assert "y[6:8] x[3:6]" in str(error)


def test_grid_that_nobody_owns_is_a_hole(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Empty regions on all ranks are a TilingError, not a store that can hold nothing."""
    error = _open_with_regions(comm, mpi_tmp_path, PLANE, [], shard_shape=SHARD)
    assert (type(error), error.kind) == (ms.TilingError, "hole")
    assert "y[0:8] x[0:6]" in str(error)


@pytest.mark.mpi(min_size=2)
def test_region_off_the_shard_edges_names_rank_and_bounds(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Ten cells split 3 to 7 over shards of 5 are an AlignmentError that names rank 0 and [0:3] (P-02)."""
    scene = Scene(sizes={"y": 10}, variables={"u": ("y", "float32")})
    error = _open_with_regions(comm, mpi_tmp_path, scene, [{"y": (0, 3)}, {"y": (3, 10)}], STILL, shard_shape={"y": 5})
    assert (type(error), error.rank) == (ms.AlignmentError, 0)
    assert all(part in str(error) for part in ("rank 0", "'y'", "[0:3]", "5"))


@pytest.mark.mpi(min_size=4)
def test_ranks_that_own_parts_of_one_shard_are_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Four ranks with an inner chunk each of shards of two are an AlignmentError: nobody may share a shard (P-01)."""
    scene = Scene(sizes={"y": 100}, variables={"u": ("y", "float32")})
    regions = [{"y": (25 * r, 25 * r + 25)} for r in range(4)]
    error = _open_with_regions(comm, mpi_tmp_path, scene, regions, STILL, shard_shape={"y": 50}, chunk_shape={"y": 25})
    assert type(error) is ms.AlignmentError


@pytest.mark.mpi(min_size=3)
def test_coprime_regions_without_a_shard_length_are_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Local sizes 7, 9, 8 would force shards of one cell: refused with a length that works (P-05)."""
    scene = Scene(sizes={"y": 24}, variables={"u": ("y", "float32")})
    error = _open_with_regions(comm, mpi_tmp_path, scene, [{"y": (0, 7)}, {"y": (7, 16)}, {"y": (16, 24)}], STILL)
    assert type(error) is ms.AlignmentError
    assert "'y'" in str(error)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("giver", [0, 1])
def test_region_on_some_ranks_only_names_a_rank_without(comm: MPI.Intracomm, mpi_tmp_path: Path, giver: int) -> None:
    """A region on some ranks and none on others is a SchemaError that names a rank that gave none."""
    region = {"y": (0, 8)} if comm.rank == giver else None
    error = _refused(
        comm, mpi_tmp_path, lambda url: ms.write_open(url, _schema(), comm=comm, region=region, options=OPTIONS)
    )
    without = 1 if giver == 0 else 0
    assert (type(error), error.kind, error.rank) == (ms.SchemaError, "region", without)
    assert f"rank {without}" in str(error)


@pytest.mark.parametrize(
    "region",
    [
        {"k": (0, 2)},
        {"time": (0, 1)},
        {"y": (0, 9)},
        {"y": (-2, 4)},
        {"y": (4, 2)},
        {"y": (0.0, 2.5)},
        {"y": (False, 8)},
        {"y": slice(False, 8)},
        {"y": "all"},
        {"y": 3},
        {"y": (0, 2, 4)},
        {"y": slice(0, 8, 2)},
        {"y": None},
        "y",
        [("y", (0, 8))],
    ],
    ids=str,
)
def test_malformed_region_of_one_rank_is_an_error_on_every_rank(
    comm: MPI.Intracomm, mpi_tmp_path: Path, region: Any
) -> None:
    """A region with an unknown dim, bounds outside the grid or of a wrong type names the rank that gave it."""
    last = comm.size - 1
    own = region if comm.rank == last else {"y": (0, 0)}
    error = _refused(
        comm, mpi_tmp_path, lambda url: ms.write_open(url, _schema(), comm=comm, region=own, options=OPTIONS)
    )
    assert (type(error), error.kind, error.rank) == (ms.SchemaError, "region", last)


@pytest.mark.parametrize("bounds", [(np.int32(0), np.int64(8)), slice(0, 8), slice(None), np.array([0, 8])], ids=str)
def test_region_bounds_of_any_integer_form_are_good(comm: MPI.Intracomm, mpi_tmp_path: Path, bounds: Any) -> None:
    """Bounds may be numpy integers, lists, arrays or slices."""
    region = {"y": bounds} if comm.rank == 0 else {"y": (0, 0)}
    with ms.write_open(mpi_tmp_path / "s", _schema(), comm=comm, region=region, options=OPTIONS) as w:
        assert dict(w.region) == ({"y": (0, 8), "x": (0, 6)} if comm.rank == 0 else {"y": (0, 0), "x": (0, 0)})
        w.write_static("topo", PLANE.block("topo", w.region))
        PLANE.write(w, 0)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0]))


OTHERS: Mapping[str, Mapping[str, Any]] = {
    "schema": {"schema": PLANE.schema(shard_shape=SHARD, attrs={"title": "other"})},
    "layout": {"schema": _schema(y=4)},
    "options": {"options": options(durability="fsync")},
    "timeout": {"options": options(timeout=25)},
    "overwrite": {"overwrite": True},
    "takeover": {"takeover": True},
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", ["first", "last"])
@pytest.mark.parametrize("what", [*OTHERS, "url"])
def test_arguments_that_differ_on_one_rank_are_refused_on_all(
    comm: MPI.Intracomm, mpi_tmp_path: Path, what: str, odd: str
) -> None:
    """Another schema, url, option or flag on one rank is a ProtocolError that names a rank that differs from rank 0."""
    is_odd = comm.rank == (0 if odd == "first" else comm.size - 1)
    arguments: dict[str, Any] = {"schema": _schema(), "options": OPTIONS}
    if is_odd:
        arguments |= OTHERS.get(what, {})

    def call(url: Path) -> object:
        return ms.write_open(url.with_name("t") if is_odd and what == "url" else url, comm=comm, **arguments)

    error = _refused(comm, mpi_tmp_path, call)
    assert (type(error), error.kind) == (ms.ProtocolError, "mismatch")
    assert error.rank is not None
    assert (error.rank > 0) if odd == "first" else (error.rank == comm.size - 1)
    assert f"rank {error.rank}" in str(error)
    names = {"layout": "schema", "options": "Options.durability", "timeout": "Options.timeout"}
    assert f"write_open: {names.get(what, what)} " in str(error)


@pytest.mark.mpi(min_size=2)
def test_what_differs_is_named_with_all_ranks(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Each argument by name, with both values where they are short, and the ranks that differ from rank 0."""
    chosen = OPTIONS if comm.rank == 0 else options(timeout=25)
    schema = PLANE.schema(shard_shape=SHARD, attrs={"title": "other"}) if comm.rank == 1 else _schema()
    error = _refused(comm, mpi_tmp_path, lambda url: ms.write_open(url, schema, comm=comm, options=chosen))
    others = ", ".join(map(str, range(1, comm.size)))
    assert str(error) == (
        f"write_open: schema of rank 1 is not rank 0's; Options.timeout is 25 on rank {others}, "
        f"{OPTIONS.timeout} on rank 0; give every rank the same arguments"
    )
    assert error.rank == 1


@pytest.mark.mpi(min_size=2)
def test_different_at_on_one_rank_is_refused_on_all(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A resume with another at, expect_last_t or operation on one rank is a ProtocolError, and drops nothing."""
    with ms.write_open(mpi_tmp_path / "s", _schema(), comm=comm, options=OPTIONS) as w:
        PLANE.write_statics(w)
        for i in range(3):
            PLANE.write(w, i)
    before = on_root(comm, lambda: tree(mpi_tmp_path))
    is_odd = comm.rank == 1
    calls: list[Callable[[], object]] = [
        lambda: ms.write_resume(mpi_tmp_path / "s", comm=comm, at=time_of(int(is_odd)), options=OPTIONS),
        lambda: ms.write_resume(mpi_tmp_path / "s", comm=comm, at=0.5 if is_odd else None, options=OPTIONS),
        lambda: ms.write_resume(mpi_tmp_path / "s", comm=comm, expect_last_t=3.5 if is_odd else None, options=OPTIONS),
        lambda: ms.write_resume(mpi_tmp_path / "s", comm=comm, schema=_schema() if is_odd else None, options=OPTIONS),
        lambda: (
            ms.write_open(mpi_tmp_path / "s", _schema(), comm=comm, overwrite=True, options=OPTIONS)
            if is_odd
            else ms.write_resume(mpi_tmp_path / "s", comm=comm, options=OPTIONS)
        ),
    ]
    for call in calls:
        error = error_on_all(comm, call)
        assert (type(error), error.kind, error.rank) == (ms.ProtocolError, "mismatch", 1)
    assert on_root(comm, lambda: tree(mpi_tmp_path)) == before


@pytest.mark.mpi(min_size=2)
def test_wrong_schema_object_on_one_rank_is_an_error_on_all(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A rank that passes something else than a schema does not leave the others waiting."""
    schema: Any = {"dims": {}} if comm.rank == 1 else _schema()
    error = _refused(comm, mpi_tmp_path, lambda url: ms.write_open(url, schema, comm=comm, options=OPTIONS))
    assert (type(error), error.rank) == (ms.SchemaError, 1)


@pytest.mark.mpi(min_size=2)
def test_broken_options_file_of_one_rank_is_an_error_on_all(
    comm: MPI.Intracomm, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's options file that one rank can't read is a SchemaError on every rank, naming the file."""
    monkeypatch.setenv("MPISTREAM_OPTIONS", str(mpi_tmp_path / f"options-{comm.rank}.toml"))
    if comm.rank != 1:
        (mpi_tmp_path / f"options-{comm.rank}.toml").write_text("timeout = 20\n")
    comm.Barrier()
    error = _refused(comm, mpi_tmp_path, lambda url: ms.write_open(url, _schema(), comm=comm))
    assert (type(error), error.kind, error.rank) == (ms.SchemaError, "option", 1)
    assert "options-1.toml" in str(error)


@pytest.mark.parametrize("wrong", [{"timeout": 20}, 20, "fsync"], ids=str)
def test_options_of_a_wrong_type_are_an_error_on_every_rank(
    comm: MPI.Intracomm, mpi_tmp_path: Path, wrong: Any
) -> None:
    """Something else than Options on one rank is a SchemaError on all, naming the rank."""
    last = comm.size - 1
    given: Any = wrong if comm.rank == last else OPTIONS
    error = _refused(comm, mpi_tmp_path, lambda url: ms.write_open(url, _schema(), comm=comm, options=given))
    assert (type(error), error.kind, error.rank) == (ms.SchemaError, "option", last)

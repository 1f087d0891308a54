"""What guards a resume: the given schema, the expected time, the lease, and the fence behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, at_most, error_on_all, keys, on_root, sync, tree
from tests.support.scene import PLANE, Scene, assert_holds, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"time": 4, "y": 1, "x": 6}


def _schema(**changes: Any) -> ms.StreamSchema:
    return PLANE.schema(**{"shard_shape": SHARD, **changes})


def _create(comm: MPI.Intracomm, url: Path, n: int = 3) -> None:
    with ms.write_open(url, _schema(), comm=comm, options=OPTIONS) as w:
        PLANE.write_statics(w)
        for i in range(n):
            PLANE.write(w, i)


def _refused(comm: MPI.Intracomm, root: Path, **how: Any) -> ms.MPIStreamError:
    """Return the error of a resume, which must leave everything as it is."""
    before = on_root(comm, lambda: tree(root))
    with at_most(10):
        error = error_on_all(comm, lambda: ms.write_resume(root / "s", comm=comm, options=OPTIONS, **how))
    assert on_root(comm, lambda: tree(root)) == before
    return error


def test_same_schema_is_taken(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The schema that the store was made with is accepted, also if it leaves the layout to the store."""
    _create(comm, mpi_tmp_path / "s")
    for i, schema in enumerate([_schema(), PLANE.schema(), PLANE.schema(shard_shape={"time": 4})]):
        with ms.write_resume(mpi_tmp_path / "s", schema=schema, comm=comm, options=OPTIONS) as w:
            PLANE.write(w, 3 + i)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 6))


OTHER_SCENES = {
    "'u'": Scene(sizes=PLANE.sizes, variables={"u": ("y x", "float64")}, statics=PLANE.statics),
    "'u' ": Scene(sizes=PLANE.sizes, variables={"u": ("x y", "float32")}, statics=PLANE.statics),
    "dims": Scene(sizes={"y": 8, "x": 7}, variables=PLANE.variables, statics=PLANE.statics),
    "'v'": Scene(sizes=PLANE.sizes, variables={**PLANE.variables, "v": ("y x", "float32")}, statics=PLANE.statics),
    "'topo'": Scene(sizes=PLANE.sizes, variables=PLANE.variables),
}


def test_another_schema_is_refused_by_name(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A schema with another dtype, dims, size, variable or static is a ResumeError that names what differs."""
    _create(comm, mpi_tmp_path / "s")
    for name, scene in OTHER_SCENES.items():
        error = _refused(comm, mpi_tmp_path, schema=scene.schema())
        assert (name, type(error), error.kind) == (name, ms.ResumeError, "schema")
        assert name.strip() in str(error)


def test_another_layout_codec_or_attribute_is_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """What would make other bytes than the store has, or describe them in another way, is a ResumeError."""
    _create(comm, mpi_tmp_path / "s")
    changes: list[dict[str, Any]] = [
        {"shard_shape": {**SHARD, "time": 2}},
        {"shard_shape": {**SHARD, "y": 2}},
        {"codec": "compact"},
        {"key_separator": "."},
        {"overrides": {"u": {"fill_value": 0.0}}},
        {"overrides": {"u": {"attrs": {"units": "K"}}}},
    ]
    for change in changes:
        error = _refused(comm, mpi_tmp_path, schema=_schema(**change))
        assert (change, type(error), error.kind) == (change, ms.ResumeError, "schema")


def test_other_coordinate_values_are_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A grid of the same shape at another place is a ResumeError."""

    def schema(first: float) -> ms.StreamSchema:
        return ms.StreamSchema(
            dims={"time": None, "y": 4},
            time=ms.AppendTime(units="days since 2000-01-01"),
            variables={"u": ms.Variable(("time", "y"), "float32")},
            coords={"y": ms.Coordinate(("y",), first + np.arange(4.0))},
        )

    ms.write_open(mpi_tmp_path / "s", schema(0), comm=comm, options=OPTIONS).close()
    error = _refused(comm, mpi_tmp_path, schema=schema(0.5))
    assert (type(error), error.kind) == (ms.ResumeError, "coordinates")
    ms.write_resume(mpi_tmp_path / "s", schema=schema(0), comm=comm, options=OPTIONS).close()


def test_expected_last_time_guards_against_another_checkpoint(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """expect_last_t is compared with the last record that is kept, and nothing changes when it differs."""
    _create(comm, mpi_tmp_path / "s", 5)
    for how in (
        {"expect_last_t": time_of(5)},
        {"expect_last_t": time_of(3)},
        {"expect_last_t": time_of(4), "at": time_of(2)},
        {"expect_last_t": time_of(0), "at": time_of(0) - 1},
    ):
        error = _refused(comm, mpi_tmp_path, **how)
        assert (type(error), error.kind) == (ms.ResumeError, "last_t")
        assert repr(how["expect_last_t"]) in str(error)
    for i, how in enumerate(
        [
            {"expect_last_t": time_of(4)},
            {"expect_last_t": time_of(2), "at": time_of(3) - 0.1},
            {"expect_last_t": time_of(2)},
        ]
    ):
        with ms.write_resume(
            mpi_tmp_path / "s", comm=comm, at=how.get("at"), expect_last_t=how["expect_last_t"], options=OPTIONS
        ) as w:
            assert w.n_records == (5, 3, 3)[i]


def test_times_of_a_resume_may_be_numbers_of_any_type(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """at and expect_last_t may be numpy numbers, as models hold them."""
    numbers: list[Callable[[float], Any]] = [np.float64, np.float32, np.int64, int, np.array]
    with ms.write_open(mpi_tmp_path / "s", _schema(), comm=comm, options=OPTIONS) as w:
        for i in range(8):
            w.write_record(float(i), PLANE.record(w.region, i))
    for n_kept, number in zip(range(7, 2, -1), numbers, strict=True):
        t = number(n_kept - 1)
        with ms.write_resume(mpi_tmp_path / "s", comm=comm, at=t, expect_last_t=t, options=OPTIONS) as w:
            assert w.n_records == n_kept


def test_times_of_a_resume_may_be_dates(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The same date, whatever holds it, is the same argument on all ranks; another one on one rank is refused."""
    start, step = np.datetime64("2000-01-01T00:00:00.500", "us"), np.timedelta64(1500, "ms")
    with ms.write_open(mpi_tmp_path / "s", _schema(), comm=comm, options=OPTIONS) as w:
        for i in range(4):
            w.write_record(start + i * step, PLANE.record(w.region, i))
    t = start + 2 * step
    mine: Any = t.astype("M8[ns]") if comm.rank % 2 else t.item()
    with ms.write_resume(mpi_tmp_path / "s", comm=comm, at=mine, expect_last_t=3.5, options=OPTIONS) as w:
        assert (w.n_records, w.last_t) == (3, time_of(2))
        assert w.resumed is not None
        assert (w.resumed.at, w.resumed.n_dropped) == (time_of(2), 1)
    if comm.size > 1:
        error = _refused(comm, mpi_tmp_path, at=t + np.timedelta64(comm.rank == 1, "us"))
        assert (type(error), error.kind) == (ms.ProtocolError, "mismatch")
    error = _refused(comm, mpi_tmp_path, expect_last_t=t - step)
    assert (type(error), error.kind) == (ms.ResumeError, "last_t")
    with ms.write_resume(mpi_tmp_path / "s", comm=comm, expect_last_t=mine, options=OPTIONS) as w:
        PLANE.write_statics(w)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 3))


@pytest.mark.parametrize("at", [float("nan"), "yesterday", "2", b"2", 1j, [1.0], np.datetime64("NaT")], ids=str)
def test_time_that_is_none_is_refused(comm: MPI.Intracomm, mpi_tmp_path: Path, at: Any) -> None:
    """An `at` that is NaN or no number is an error on every rank, and drops nothing."""
    _create(comm, mpi_tmp_path / "s")
    error = _refused(comm, mpi_tmp_path, at=at)
    assert isinstance(error, ms.ResumeError | ms.SchemaError)
    assert "at" in str(error)


def test_infinite_times_keep_all_or_nothing(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """at=inf drops no record, at=-inf all of them."""
    _create(comm, mpi_tmp_path / "s")
    for at, n in ((float("inf"), 3), (-float("inf"), 0)):
        with ms.write_resume(mpi_tmp_path / "s", comm=comm, at=at, options=OPTIONS) as w:
            assert w.n_records == n


def _nothing(path: Path) -> None:
    pass


def _folder(path: Path) -> None:
    path.mkdir()


def _file(path: Path) -> None:
    path.write_bytes(b"precious")


def _zarr_group(path: Path) -> None:
    import zarr

    zarr.create_group(path)


def _half_made(path: Path) -> None:
    (path / ".mpistream/epochs").mkdir(parents=True)
    (path / ".mpistream/epochs/1").write_bytes(b"x")


@pytest.mark.parametrize("make", [_nothing, _folder, _file, _zarr_group, _half_made])
def test_what_is_no_store_is_not_resumed(comm: MPI.Intracomm, mpi_tmp_path: Path, make: Callable[[Path], None]) -> None:
    """No path, an empty folder, a file, a foreign group or a store that was never created whole is a ResumeError."""
    on_root(comm, lambda: make(mpi_tmp_path / "s"))
    error = _refused(comm, mpi_tmp_path)
    assert (type(error), error.kind) == (ms.ResumeError, "no_store")
    assert "write_open" in str(error)


@pytest.mark.parametrize(
    "damage", [lambda d: d[: len(d) // 2], lambda d: b"", lambda d: d.replace(b'"epoch":1', b'"epoch":3')]
)
def test_damaged_manifest_is_not_resumed(
    comm: MPI.Intracomm, mpi_tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    """A manifest cut short, emptied or changed is a FormatError on every rank, never a silent fall-back (I1)."""
    _create(comm, mpi_tmp_path / "s")
    manifest = mpi_tmp_path / "s/.mpistream/manifest.json"
    on_root(comm, lambda: manifest.write_bytes(damage(manifest.read_bytes())))
    error = _refused(comm, mpi_tmp_path)
    assert type(error) is ms.FormatError
    assert "manifest.json" in str(error)


@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_damaged_shard_of_a_row_filled_in_part_is_not_resumed(
    comm: MPI.Intracomm, mpi_tmp_path: Path, damage: str
) -> None:
    """The rank that must read it back says its key, and every rank raises that within seconds."""
    _create(comm, mpi_tmp_path / "s")
    shard = mpi_tmp_path / "s/u/c/0/7/0"  # the last rank's

    def spoil() -> None:
        data = bytearray(shard.read_bytes())
        if damage == "missing":
            shard.unlink()
        elif damage == "short":
            shard.write_bytes(data[: len(data) // 2])
        else:
            data[len(data) - 9] ^= 0x40
            shard.write_bytes(data)

    on_root(comm, spoil)
    with at_most(10):
        error = error_on_all(comm, lambda: ms.write_resume(mpi_tmp_path / "s", comm=comm, options=OPTIONS))
    assert type(error) is ms.FormatError
    assert "u/c/0/7/0" in str(error)


@pytest.mark.parametrize("way", ["resume", "overwrite"])
def test_second_writer_is_refused_while_the_first_is_open(comm: MPI.Intracomm, mpi_tmp_path: Path, way: str) -> None:
    """The lease of an open writer refuses a second one by all that is known of it (P-32); the first goes on."""
    _create(comm, mpi_tmp_path / "s")
    w = ms.write_resume(mpi_tmp_path / "s", comm=comm, options=OPTIONS)
    PLANE.write(w, 3)

    def second() -> ms.StreamWriter:
        if way == "resume":
            return ms.write_resume(mpi_tmp_path / "s", comm=comm, options=OPTIONS)
        return ms.write_open(mpi_tmp_path / "s", _schema(), comm=comm, overwrite=True, options=OPTIONS)

    with at_most(10):
        error = error_on_all(comm, second)
    assert (type(error), error.kind) == (ms.StoreError, "lease")
    assert "takeover=True" in str(error)
    w.close()
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 4))


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("row", [1, 4])
def test_takeover_fences_the_first_writer(comm: MPI.Intracomm, mpi_tmp_path: Path, row: int, threads: int) -> None:
    """After a takeover the first writer's next commit is FencedError on every rank, and changes nothing any more."""
    url, shard = mpi_tmp_path / "s", {**SHARD, "time": row}
    options = ms.Options(durability="none", timeout=20, lease_ttl=100_000, threads=threads)
    old = ms.write_open(url, _schema(shard_shape=shard), comm=comm, options=options)
    PLANE.write_statics(old)
    for i in range(3):
        PLANE.write(old, i)
    old.commit()
    PLANE.write(old, 3, run=7)

    new = ms.write_resume(url, comm=comm, takeover=True, options=OPTIONS)
    assert (new.n_records, new.epoch) == (3, 2)
    PLANE.write(old, 4, run=7)
    PLANE.write(new, 3, run=1)
    for _ in range(2):
        error = error_on_all(comm, old.commit)
        assert (type(error), error.kind) == (ms.FencedError, "fenced")
        new.commit()
        PLANE.write(new, new.n_records, run=1)
    assert type(error_on_all(comm, old.close)) is ms.FencedError
    new.close()
    on_root(comm, lambda: assert_holds(url, PLANE, [0, 0, 0, 1, 1, 1]))
    assert on_root(comm, lambda: keys(url)) == PLANE.keys(6, shard)
    # The old writer's close did not take the new one's lease.
    with at_most(10), ms.write_resume(url, comm=comm, options=OPTIONS) as last:
        assert last.epoch == 3


def test_fenced_writer_with_nothing_pending_touches_nothing(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A writer that was taken over is told so when it closes, and does no harm."""
    _create(comm, mpi_tmp_path / "s")
    old = ms.write_resume(mpi_tmp_path / "s", comm=comm, options=OPTIONS)
    new = ms.write_resume(mpi_tmp_path / "s", comm=comm, takeover=True, options=OPTIONS)
    PLANE.write(new, 3)
    new.commit()
    before = on_root(comm, lambda: tree(mpi_tmp_path))
    error = error_on_all(comm, old.close)
    assert (type(error), "epoch 3 took the store over from epoch 2" in str(error)) == (ms.FencedError, True)
    sync(comm)
    after = on_root(comm, lambda: tree(mpi_tmp_path))
    assert after == before
    PLANE.write(new, 4)
    new.close()
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 5))


def test_takeover_by_overwrite_fences_the_first_writer(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A writer whose store was replaced can't put anything into the new one."""
    url = mpi_tmp_path / "s"
    old = ms.write_open(url, _schema(), comm=comm, options=OPTIONS)
    PLANE.write_statics(old)
    PLANE.write(old, 0, run=7)
    new = ms.write_open(url, _schema(), comm=comm, overwrite=True, takeover=True, options=OPTIONS)
    PLANE.write_statics(new)
    PLANE.write(new, 0)
    assert type(error_on_all(comm, old.commit)) is ms.FencedError
    new.commit()
    assert type(error_on_all(comm, old.close)) is ms.FencedError
    new.close()
    on_root(comm, lambda: assert_holds(url, PLANE, [0]))
    assert on_root(comm, lambda: keys(url)) == PLANE.keys(1, SHARD)

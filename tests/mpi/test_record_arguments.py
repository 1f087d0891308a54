"""Wrong arguments of a write raise at once on the rank that gave them, change nothing and spoil no commit."""

from __future__ import annotations

import fractions
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, at_most, on_root, options, tree
from tests.support.scene import Scene, assert_holds, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SCENE = Scene(
    sizes={"y": 8, "x": 6},
    variables={"u": ("y x", "float32"), "n": ("y x", "int16"), "zonal": ("y", "float64"), "s": ("", "float64")},
    statics={"topo": ("y x", "float32"), "gravity": ("", "float32")},
)
Blocks = dict[str, Any]
Change = Callable[[Blocks], Blocks]


def _opened(comm: MPI.Intracomm, url: Path) -> ms.StreamWriter:
    return ms.write_open(
        url, SCENE.schema(shard_shape={"time": 2, "y": 1, "x": 6}), comm=comm, options=options(threads=0)
    )


class _OnDevice:
    """An array that is not in this process's memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA, first device


BAD_BLOCKS: dict[str, tuple[str, Change]] = {
    "a missing variable": ("missing", lambda b: {k: v for k, v in b.items() if k != "n"}),
    "nothing at all": ("missing", lambda b: {}),
    "an unknown variable": ("unknown", lambda b: {**b, "v": b["u"]}),
    "a static as a variable": ("unknown", lambda b: {**b, "topo": b["u"]}),
    "the time dim in a block": ("shape", lambda b: {**b, "u": b["u"][np.newaxis]}),
    "a row too few": ("shape", lambda b: {**b, "u": b["u"][1:]}),
    "a row too many": ("shape", lambda b: {**b, "n": np.zeros((len(b["n"]) + 1, 6), "int16")}),
    "swapped dims": ("shape", lambda b: {**b, "u": np.zeros((6, b["u"].shape[0] + 7), "float32")}),
    "an array of one value": ("shape", lambda b: {**b, "u": np.zeros(())}),
    "a shape in a series": ("shape", lambda b: {**b, "s": np.zeros(1)}),
    "complex into float": ("dtype", lambda b: {**b, "u": b["u"] + 1j}),
    "float into int": ("dtype", lambda b: {**b, "n": b["u"]}),
    "a wider int": ("dtype", lambda b: {**b, "n": b["n"].astype("int64")}),
    "an unsigned int": ("dtype", lambda b: {**b, "n": b["n"].astype("uint16")}),
    "int64 into float32": ("dtype", lambda b: {**b, "u": b["u"].astype("int64")}),
    "strings": ("dtype", lambda b: {**b, "u": b["u"].astype(str)}),
    "objects": ("dtype", lambda b: {**b, "u": b["u"].astype(object)}),
    "an array on a device": ("device", lambda b: {**b, "u": _OnDevice()}),
    "dates": ("dtype", lambda b: {**b, "u": b["u"].astype("datetime64[s]")}),
    "a float for an int": ("dtype", lambda b: {**b, "n": 1.5}),
    "NaN for an int": ("dtype", lambda b: {**b, "n": float("nan")}),
    "an int that is too large": ("dtype", lambda b: {**b, "n": 40000}),
    "a complex number": ("dtype", lambda b: {**b, "u": 1j}),
}


def test_wrong_blocks_of_one_rank_are_its_error_alone(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """The rank gets a SchemaError that names the variable, passes the right blocks instead, and all commit."""
    stage = mpi_tmp_path / "s/.mpistream/stage/1" / str(comm.rank)
    with _opened(comm, mpi_tmp_path / "s") as w:
        SCENE.write_statics(w)
        SCENE.write(w, 0)
        for i, (bad, (kind, change)) in enumerate(BAD_BLOCKS.items(), 1):
            if i % comm.size == comm.rank:
                good = SCENE.record(w.region, i)
                blocks = change({k: np.array(v) for k, v in good.items()})
                before = tree(stage)
                with at_most(5), pytest.raises(ms.SchemaError) as caught:
                    w.write_record(time_of(i), blocks)
                assert (bad, caught.value.kind) == (bad, kind)
                names = [k for k in {**good, **blocks} if blocks.get(k) is not good.get(k)]
                assert any(repr(name) in str(caught.value) for name in names)
                assert (w.n_records, w.last_t) == (i, time_of(i - 1))
                assert tree(stage) == before
            SCENE.write(w, i)
        assert w.commit().n_records == len(BAD_BLOCKS) + 1

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", SCENE, [0] * (len(BAD_BLOCKS) + 1)))


BAD_TIMES = [time_of(1), time_of(0), -1e9, float("nan"), float("inf"), -float("inf"), "9", None, 1j, np.zeros(2)]
BAD_TIMES += [np.datetime64("2000-01-01"), np.datetime64("NaT"), np.timedelta64(9, "s")]


@pytest.mark.parametrize("way", ["write_record", "record"])
def test_wrong_time_of_one_rank_is_its_error_alone(comm: MPI.Intracomm, mpi_tmp_path: Path, way: str) -> None:
    """A time that does not increase, is not finite or is no number is a SchemaError, and the record is not taken."""
    with _opened(comm, mpi_tmp_path / "s") as w:
        SCENE.write_statics(w)
        SCENE.write(w, 0)
        SCENE.write(w, 1)
        for i, t in enumerate(BAD_TIMES):
            if i % comm.size != comm.rank:
                continue
            blocks = SCENE.record(w.region, 5)
            with pytest.raises(ms.SchemaError) as caught:  # noqa: PT012 (the body that raises is what is tested)
                if way == "write_record":
                    w.write_record(t, blocks)  # type: ignore[arg-type]
                else:
                    with w.record(t) as rec:  # type: ignore[arg-type]
                        for name, block in blocks.items():
                            rec.put(name, block)
            assert (i, caught.value.kind) == (i, "time")
            assert (w.n_records, w.last_t) == (2, time_of(1))
        SCENE.write(w, 2)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", SCENE, [0, 0, 0]))


def test_times_of_any_real_type_are_good(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Times may be numpy numbers, arrays of one value or other real numbers, on one rank these, on another those."""
    forms: list[Callable[[int], Any]] = [np.float32, np.int64, np.float16, fractions.Fraction, np.array, np.uint8]
    with _opened(comm, mpi_tmp_path / "s") as w:
        SCENE.write_statics(w)
        for i in range(6):
            w.write_record(forms[(i + comm.rank) % 6](i), SCENE.record(w.region, i))

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", SCENE, [0] * 6, times=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]))


def test_record_that_raises_puts_nothing(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A record() body that raises, a missing variable at its end or a wrong put leaves the writer as it was."""

    class OddError(Exception):
        pass

    with _opened(comm, mpi_tmp_path / "s") as w:
        SCENE.write_statics(w)
        if comm.rank == comm.size - 1:
            blocks = SCENE.record(w.region, 0)
            with pytest.raises(OddError), w.record(0) as rec:  # noqa: PT012 (the body that raises is what is tested)
                for name, block in blocks.items():
                    rec.put(name, block)
                raise OddError
            with pytest.raises(ms.SchemaError, match="'n'") as caught, w.record(0) as rec:
                rec.put("u", blocks["u"])
            assert caught.value.kind == "missing"
            bad: Blocks = {"u": blocks["u"][:, :-1], "n": blocks["u"], "v": blocks["u"], "topo": 1.0}
            for name, block in bad.items():
                with pytest.raises(ms.SchemaError, match=repr(name)), w.record(0) as rec:
                    rec.put(name, block)
                with pytest.raises(ms.SchemaError), w.record(0) as rec:
                    rec.buffer({"u": "v", "n": "topo"}.get(name, name))
            assert (w.n_records, w.last_t) == (0, None)
        with w.record(time_of(0)) as rec:
            for name, block in SCENE.record(w.region, 0).items():
                rec.put(name, block)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", SCENE, [0]))


def test_calls_inside_a_record_are_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Inside a record() the other calls are ProtocolErrors, and the record goes on."""
    with _opened(comm, mpi_tmp_path / "s") as w:
        SCENE.write_statics(w)
        with w.record(time_of(0)) as rec:
            for call in (lambda: SCENE.write(w, 0), lambda: w.record(9.0).__enter__(), w.commit, w.rollback, w.close):
                with pytest.raises(ms.ProtocolError) as caught:
                    call()
                assert caught.value.kind == "nested"
            for name, block in SCENE.record(w.region, 0).items():
                rec.put(name, block)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", SCENE, [0]))


def test_wrong_statics_of_one_rank_are_its_error_alone(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """An unknown static, a wrong shape or dtype, and a static written again are SchemaErrors on that rank."""
    with _opened(comm, mpi_tmp_path / "s") as w:
        if comm.rank == comm.size - 1:
            topo = SCENE.block("topo", w.region)
            bad: list[tuple[str, Any, str]] = [
                ("v", topo, "unknown"),
                ("u", topo, "unknown"),
                ("time", topo, "unknown"),
                ("topo", topo[np.newaxis], "shape"),
                ("topo", topo + 1j, "dtype"),
                ("gravity", np.zeros(2), "shape"),
            ]
            for name, block, kind in bad:
                with pytest.raises(ms.SchemaError, match=repr(name)) as caught:
                    w.write_static(name, block)
                assert caught.value.kind == kind
        SCENE.write_statics(w)
        with pytest.raises(ms.SchemaError, match="'topo'") as again:
            SCENE.write_statics(w)
        assert again.value.kind == "static"
        w.commit()
        with pytest.raises(ms.SchemaError, match="committed") as again:
            SCENE.write_statics(w)
        assert again.value.kind == "static"

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", SCENE, []))


def test_what_a_rank_passes_without_writing_it_is_checked(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Every rank's block of a variable that only some ranks write must have its shape all the same."""
    scene = Scene(sizes={"y": 4, "x": 7}, variables={"u": ("y x", "float32"), "zonal": ("y", "float32")})
    region = {"x": (comm.rank, comm.rank + 1 if comm.rank < comm.size - 1 else 7)}
    schema = scene.schema(shard_shape={"y": 2, "x": 1})
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, region=region, options=OPTIONS) as w:
        blocks = scene.record(w.region, 0)
        with pytest.raises(ms.SchemaError, match="'zonal'"):
            w.write_record(time_of(0), {**blocks, "zonal": np.zeros(3, "float32")})
        scene.write(w, 0)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", scene, [0]))

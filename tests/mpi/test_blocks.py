"""Blocks of every form are taken as they are when the call is made, and may be overwritten when it returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import on_root, options
from tests.support.scene import FULL, PLANE, Scene, assert_holds, plain, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"z": 3, "y": 2, "x": 13}
CHUNK = {"z": 3, "y": 1, "x": 13}
PLANE_SHARD = {"y": 2, "x": 3}


def _spoil(block: np.ndarray[Any, Any]) -> None:
    """Overwrite a caller's array with 0xFF bytes."""
    block.reshape(-1).view(np.uint8)[...] = 0xFF


@pytest.mark.parametrize(
    ("row", "inner", "threads", "codec"),
    [(1, 1, 1, "fast"), (1, 1, 0, "none"), (1, 1, 1, "none"), (4, 1, 1, "none"), (4, 4, 0, "fast"), (4, 4, 1, "none")],
)
def test_every_array_may_be_overwritten_when_the_call_returns(
    comm: MPI.Intracomm, mpi_tmp_path: Path, row: int, inner: int, threads: int, codec: str
) -> None:
    """Overwriting each array with 0xFF right after write_static and write_record changes nothing."""
    schema = FULL.schema(shard_shape={"time": row, **SHARD}, chunk_shape={"time": inner, **CHUNK}, codec=codec)
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, options=options(threads=threads)) as w:
        for name in FULL.region_statics:
            block = np.array(FULL.block(name, w.region))
            w.write_static(name, block)
            _spoil(block)
        for i in range(5):
            blocks = {name: np.array(block) for name, block in FULL.record(w.region, i).items()}
            w.write_record(time_of(i), blocks)
            for block in blocks.values():
                _spoil(block)
            if i == 2:
                w.commit()

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0] * 5))


@pytest.mark.parametrize("row", [1, 4])
def test_arrays_that_were_put_may_be_overwritten_before_the_record_ends(
    comm: MPI.Intracomm, mpi_tmp_path: Path, row: int
) -> None:
    """What put took is a copy; buffers are the caller's to fill, and may be spoiled when the record has ended."""
    schema = FULL.schema(shard_shape={"time": row, **SHARD}, chunk_shape={"time": 1, **CHUNK})
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, options=options()) as w:
        FULL.write_statics(w)
        for i in range(5):
            with w.record(time_of(i)) as rec:
                for k, name in enumerate(FULL.variables):
                    block = np.array(FULL.block(name, w.region, i))
                    if (k + i) % 2:
                        rec.put(name, block)
                        _spoil(block)
                    else:
                        rec.buffer(name)[...] = block
            for name in FULL.variables:
                _spoil(rec.arrays[name])

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0] * 5))


def test_buffer_is_the_array_that_is_written(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """It has the shape and dtype on disk; where the caller encodes, it is the same array for the next record."""
    schema = PLANE.schema(shard_shape={"time": 2, **PLANE_SHARD})
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, options=options()) as w:
        PLANE.write_statics(w)
        seen = []
        for i in range(3):
            with w.record(time_of(i)) as rec:
                buffer = rec.buffer("u")
                seen.append(buffer)
                assert (buffer.shape, buffer.dtype) == (w.shape_of("u"), np.dtype("float32"))
                buffer[...] = PLANE.block("u", w.region, i)
        assert all(b is seen[0] for b in seen)

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0] * 3))


def test_last_put_of_a_variable_counts(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A variable may be put again in the same record."""
    with ms.write_open(mpi_tmp_path / "s", PLANE.schema(shard_shape=PLANE_SHARD), comm=comm, options=options()) as w:
        PLANE.write_statics(w)
        with w.record(time_of(0)) as rec:
            rec.put("u", PLANE.block("u", w.region, 7))
            rec.put("u", PLANE.block("u", w.region, 0))

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0]))


def _read_only(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    block = np.array(block)
    block.flags.writeable = False
    return block


def _padded(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The inner part of an array with a halo, as models hold it."""
    return np.pad(block, 1)[(slice(1, -1),) * block.ndim]


def _reversed(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Negative strides in every dim."""
    back = (slice(None, None, -1),) * block.ndim
    return np.array(block[back], order="C")[back]


FORMS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "big-endian": lambda b: b.astype(b.dtype.newbyteorder(">")),
    "fortran": lambda b: np.array(b, order="F"),
    "big-endian fortran": lambda b: np.array(b, b.dtype.newbyteorder(">"), order="F"),
    "with a halo": _padded,
    "reversed": _reversed,
    "every second": lambda b: np.repeat(b, 2, axis=-1)[..., ::2] if b.ndim else b,
    "read-only": _read_only,
    "broadcast": lambda b: np.broadcast_to(b, b.shape),
    "nested lists": lambda b: b if b.size == 0 or b.dtype.kind != "f" else b.tolist(),
}


def test_arrays_of_any_memory_layout_are_good_input(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Big-endian (P-46), Fortran-ordered, non-contiguous and read-only arrays, and lists, give the same values."""
    forms = list(FORMS.values())
    scene = Scene(
        sizes={"y": 5, "x": 7},
        variables={
            "f": ("y x", "float32"),
            "h": ("y x", "int16"),
            "d": ("y x", "float64"),
            "c": ("y", "complex64"),
            "s": ("", "float64"),
        },
        statics={"topo": ("y x", "float32")},
    )
    schema = scene.schema(shard_shape={"time": 2, "y": 2, "x": 4}, chunk_shape={"time": 1, "y": 2, "x": 2})
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, options=options()) as w:
        w.write_static("topo", forms[comm.rank % len(forms)](scene.block("topo", w.region)))
        for i, turn in enumerate(forms):
            w.write_record(time_of(i), {n: turn(b) for n, b in scene.record(w.region, i).items()})

    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", scene, [0] * len(forms)))


def test_python_numbers_fill_blocks_of_unequal_size(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A Python number broadcasts on every rank whatever its block's shape (P-30), also into shards (P-54)."""
    scene = Scene(
        sizes={"y": 11, "x": 5},
        variables={"u": ("y x", "float32"), "n": ("y x", "int16"), "flag": ("y", "bool"), "s": ("", "float64")},
        statics={"mask": ("y x", "uint8")},
    )
    schema = scene.schema(shard_shape={"time": 2, "y": 3, "x": 2}, chunk_shape={"time": 1, "y": 1, "x": 2})
    values: list[dict[str, Any]] = [
        {"u": 0.0, "n": 0, "flag": False, "s": 0},
        {"u": 1.5, "n": -3, "flag": True, "s": -0.5},
        {"u": 2, "n": 32767, "flag": 1, "s": True},
    ]
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, options=options()) as w:
        shapes = comm.allgather(w.shape_of("u"))
        w.write_static("mask", 7)
        w.write_record(0, values[0])
        w.write_record(1, values[1])
        with w.record(2) as rec:
            for name, value in values[2].items():
                rec.put(name, value)

    assert comm.size == 1 or len(set(shapes)) > 1

    def check() -> None:
        group = plain(mpi_tmp_path / "s")
        for name, (dims, dtype) in scene.variables.items():
            shape = tuple(scene.sizes[d] for d in dims.split())
            expected = np.stack([np.full(shape, v[name], dtype) for v in values])
            np.testing.assert_array_equal(group[name][...], expected, err_msg=name, strict=True)
        np.testing.assert_array_equal(group["mask"][...], np.full((11, 5), 7, np.uint8), strict=True)

    on_root(comm, check)


def test_floats_are_rounded_to_the_dtype_on_disk(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A float64 block goes into a float32 variable by rounding to nearest, one beyond its range becomes infinity."""
    scene = Scene(sizes={"y": 6}, variables={"u": ("y", "float32")})
    whole = np.array([0.1, -1 / 3, 1e300, np.nan, -0.0, 1e-46])
    with ms.write_open(mpi_tmp_path / "s", scene.schema(shard_shape={"y": 1}), comm=comm, options=options()) as w:
        w.write_record(0, {"u": whole[slice(*w.region["y"])]})

    def check() -> None:
        with np.errstate(over="ignore", under="ignore"):
            expected = whole.astype(np.float32)
        assert ms.read_record(mpi_tmp_path / "s", "u", 0).tobytes() == expected.tobytes()

    on_root(comm, check)

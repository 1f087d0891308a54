"""Shards of ours in zarr-python, and shards of zarr-python here: random shapes, dtypes, fill values and boxes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpistream.names import DTYPES, fill_array
from mpistream.zarr3.codecs import PROFILES, ChunkCodec, profile_chain
from mpistream.zarr3.shard import ShardSpec
from tests.support.shards import entries_of, read_box, write_shard
from tests.support.zarr_bytes import ZarrArray

FILLS: dict[str, list[Any]] = {
    "f": [np.nan, 0.0, -0.0, 1.5, np.inf],
    "c": [0, complex(1, -0.0), complex(np.nan, 2)],
    "b": [False, True],
    "i": [0, -7],
    "u": [0, 7],
}


def random_values(rng, shape, dtype, fill):
    """Values of which many are fill, other NaN, or zeros of either sign."""
    if dtype.kind in "fc":
        found = rng.choice(np.array([0.0, -0.0, 1.5, np.nan, 2.5, -3.25], dtype), shape)
        if dtype.kind == "c":
            found = found + 1j * rng.integers(0, 2, shape)
    elif dtype.kind == "b":
        found = rng.integers(0, 2, shape)
    else:
        found = rng.integers(0, 100, shape)
    return found.astype(dtype)


class Case:
    """One array: its extents, its values, and both forms of its shards."""

    def __init__(self, draw: st.DrawFn) -> None:
        n_dims = draw(st.integers(1, 4))
        sides = st.tuples(*[st.integers(1, 3)] * n_dims)
        self.chunk_shape = draw(sides)
        n_chunks = draw(sides)
        self.shard_shape = tuple(c * n for c, n in zip(self.chunk_shape, n_chunks, strict=True))
        self.shape = tuple(draw(st.integers(1, 2 * n)) for n in self.shard_shape)
        self.dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        self.fill = fill_array("t", self.dtype, draw(st.sampled_from(FILLS[self.dtype.kind])))
        self.chain = profile_chain(draw(st.sampled_from(list(PROFILES))), self.dtype)
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.values = random_values(rng, self.shape, self.dtype, self.fill)
        # Some boxes are fill, so that whole inner chunks and shards are.
        for _ in range(draw(st.integers(0, 3))):
            corner = [int(rng.integers(0, n)) for n in self.shape]
            self.values[tuple(slice(a, a + 2 * c) for a, c in zip(corner, self.chunk_shape, strict=True))] = self.fill
        self.rng = rng
        self.spec = ShardSpec(
            shard_shape=self.shard_shape,
            chunk_shape=self.chunk_shape,
            codec=ChunkCodec(self.chain, self.dtype),
            fill=self.fill,
        )
        self.theirs = ZarrArray(
            self.shape,
            self.dtype,
            self.chain,
            chunk_shape=self.chunk_shape,
            shard_shape=self.shard_shape,
            fill=self.fill.item(),
        )

    @property
    def shards(self) -> Any:
        """Index and clipped slices of every shard."""
        counts = [-(-n // s) for n, s in zip(self.shape, self.shard_shape, strict=True)]
        for index in itertools.product(*map(range, counts)):
            yield (
                index,
                tuple(
                    slice(i * s, min((i + 1) * s, n))
                    for i, s, n in zip(index, self.shard_shape, self.shape, strict=True)
                ),
            )

    def encoded(self, slices: Any) -> bytes:
        """One shard of the values, record by record, in any order."""
        part = self.values[slices]
        return write_shard(self.spec, part, order=self.rng.permutation(len(part)).tolist())


cases = st.composite(Case)()
some = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@given(cases)
@some
def test_zarr_python_reads_our_shards_bitwise(case) -> None:
    """Put under its keys, our objects are its array."""
    for index, slices in case.shards:
        case.theirs[index] = case.encoded(slices)
    assert case.theirs.array[...].tobytes() == case.values.tobytes()


@given(cases, st.data())
@some
def test_we_read_any_box_of_the_shards_of_zarr_python(case, data) -> None:
    """What it wrote is here what it is there; a shard that it left out is one of fill."""
    case.theirs.array[...] = case.values
    stored = np.asarray(case.theirs.array[...])  # it takes -0.0 for 0.0 when it looks for fill
    for index, slices in case.shards:
        expected = np.full(case.shard_shape, case.fill, case.dtype)
        part = stored[slices]
        expected[tuple(slice(n) for n in part.shape)] = part
        box = [tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in case.shard_shape]
        wanted = expected[tuple(slice(a, b) for a, b in box)]
        found = case.theirs[index]
        if found is None:
            assert (expected == case.fill).all() or np.isnan(case.fill)
        else:
            assert read_box(case.spec, found, box).tobytes() == wanted.tobytes()


@given(cases)
@some
def test_we_leave_out_exactly_the_inner_chunks_that_are_fill(case) -> None:
    """By their bytes, over the part that lies in the array."""
    for _, slices in case.shards:
        part = np.full(case.shard_shape, case.fill, case.dtype)
        block = case.values[slices]
        part[tuple(slice(n) for n in block.shape)] = block
        present = set()
        for position in np.ndindex(*case.spec.n_chunks):
            chunk = part[tuple(slice(p * c, (p + 1) * c) for p, c in zip(position, case.chunk_shape, strict=True))]
            if chunk.tobytes() != np.full(chunk.shape, case.fill, case.dtype).tobytes():
                present.add(position)
        assert set(entries_of(case.spec, case.encoded(slices))) == present


@pytest.mark.parametrize("fill", [0.0, -0.0, np.nan])
def test_the_sign_of_zero_survives_on_both_sides(fill) -> None:
    """A field of -0.0 in an array with the fill 0.0 is read as it was written."""
    dtype = np.dtype("float32")
    chain = profile_chain("fast", dtype)
    theirs = ZarrArray((2, 4), dtype, chain, chunk_shape=(1, 2), shard_shape=(2, 4), fill=fill)
    values = np.array([[0.0, -0.0, -0.0, -0.0], [0.0, 0.0, np.nan, np.nan]], dtype)
    spec = ShardSpec(shard_shape=(2, 4), chunk_shape=(1, 2), codec=ChunkCodec(chain, dtype), fill=np.array(fill, dtype))
    theirs[0, 0] = write_shard(spec, values)
    assert theirs.array[...].tobytes() == values.tobytes()

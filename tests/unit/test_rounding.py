"""Rounded mantissas against Python's own rounding of exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistream.errors import SchemaError
from mpistream.rounding import Rounding, checked_keep_bits
from mpistream.zarr3.codecs import ChunkCodec, profile_chain
from mpistream.zarr3.shard import ChunkEncoder, ShardSpec

# Explicit mantissa bits and the largest exponent (IEEE 754, tables 3.1 to 3.5).
FLOATS = {"float16": (10, 15), "float32": (23, 127), "float64": (52, 1023)}
each_float = pytest.mark.parametrize("dtype", FLOATS)


def exact(value: float, keep_bits: int, dtype: str) -> float:
    """Return the rounded value, with integers: round() of a fraction takes ties to the even one."""
    if value == 0 or not math.isfinite(value):
        return value
    most = FLOATS[dtype][1]
    # Below 2 ** (1 - most) numbers lie as far apart as above it.
    exponent = max(math.frexp(value)[1] - 1, 1 - most)
    unit = Fraction(2) ** (exponent - keep_bits)
    rounded = round(Fraction(value) / unit) * unit
    return math.copysign(math.inf if abs(rounded) >= Fraction(2) ** (most + 1) else float(rounded), value)


def rounded(values: np.ndarray, keep_bits: int, fill: object = np.nan) -> np.ndarray:
    found = values.copy()
    Rounding(keep_bits, np.array(fill, values.dtype.newbyteorder("="))).apply(found)
    return found


def any_bits(dtype: str, n: int) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    return np.random.default_rng(size).integers(0, 256, n * size, np.uint8).view(dtype)


@each_float
def test_values_are_those_of_exact_rounding(dtype) -> None:
    """Any finite number, subnormal ones and those next to infinity too, for every number of bits."""
    most = FLOATS[dtype][0]
    values = any_bits(dtype, 200)
    edges = [np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal, np.finfo(dtype).smallest_normal, 0.0, 1.0, 1.5]
    values = np.concatenate([values[np.isfinite(values)], edges, -np.array(edges, dtype)]).astype(dtype)
    for keep_bits in range(1, most + 1):
        expected = np.array([exact(float(v), keep_bits, dtype) for v in values], dtype)
        assert rounded(values, keep_bits).tobytes() == expected.tobytes()


@each_float
def test_nan_and_infinity_keep_their_bits(dtype) -> None:
    """Every NaN, whatever its sign and payload."""
    values = any_bits(dtype, 20_000) if dtype == "float16" else any_bits(dtype, 2000)
    word = f"u{values.itemsize}"
    values = (values.view(word) | np.array(np.inf, dtype).view(word)).view(dtype)
    assert not np.isfinite(values).any()
    for keep_bits in (1, FLOATS[dtype][0] - 1):
        assert rounded(values, keep_bits).tobytes() == values.tobytes()


@each_float
def test_rounding_twice_is_rounding_once(dtype) -> None:
    """Chunks of a row that grows, or that a resume reads back, are rounded again."""
    values = any_bits(dtype, 5000)
    for fill in (np.nan, 0.1):
        once = rounded(values, 3, fill)
        assert rounded(once, 3, fill).tobytes() == once.tobytes()


@pytest.mark.parametrize("fill", [1e20, -9999.9, float(np.finfo("float32").max)])
def test_the_fill_value_stays_what_it_is(fill) -> None:
    """A missing value that is rounded would be one no more; its neighbour is rounded."""
    missing = np.float32(fill)
    values = np.array([missing, np.nextafter(missing, np.float32(0)), 1.01, np.nan], "float32")
    found = rounded(values, 2, fill)
    assert found[0] == missing
    assert rounded(values, 2)[0] != missing
    assert found[1:].tobytes() == rounded(values, 2)[1:].tobytes()


@each_float
def test_all_bits_kept_is_nothing_done(dtype) -> None:
    """Any bit pattern stays."""
    values = any_bits(dtype, 1000)
    assert rounded(values, FLOATS[dtype][0], 0.1).tobytes() == values.tobytes()


@given(st.floats(width=32), st.integers(1, 22))
def test_either_byte_order(value, keep_bits) -> None:
    """What is encoded may be stored big-endian."""
    values = np.array([[value, 0.1]], ">f4")
    found = rounded(values, keep_bits, 0.1)
    assert found.astype("<f4").tobytes() == rounded(values.astype("<f4"), keep_bits, 0.1).tobytes()


@pytest.mark.parametrize(("dtype", "most"), [(d, m) for d, (m, _) in FLOATS.items()])
def test_bits_to_keep_are_one_to_all(dtype, most) -> None:
    """The bits that IEEE 754 stores, without the leading one."""
    assert checked_keep_bits("t", None, np.dtype(dtype)) is None
    for good in (1, np.int64(most)):
        found = checked_keep_bits("t", good, np.dtype(dtype))
        assert (type(found), found) == (int, good)
    for bad in (0, -1, most + 1, 3.0, "3", True):
        with pytest.raises(SchemaError) as caught:
            checked_keep_bits("t", bad, np.dtype(dtype))
        assert str(caught.value) == (
            f"variable 't': keep_bits {bad!r}; {dtype} has {most} explicit mantissa bits, "
            f"give an integer from 1 to {most}"
        )
        assert caught.value.kind == "keep_bits"


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "datetime64[s]"])
def test_only_floats_are_rounded(dtype) -> None:
    """The dtype stands in the message."""
    with pytest.raises(SchemaError, match="variable 't': keep_bits rounds floats, and its dtype is ") as caught:
        checked_keep_bits("t", 3, np.dtype(dtype))
    assert dtype in str(caught.value)
    assert caught.value.kind == "keep_bits"


def test_chunks_are_rounded_before_they_are_encoded() -> None:
    """What is given stays as it is; a chunk that is all fill value once it is rounded is left out."""
    dtype = np.dtype("float32")
    codec = ChunkCodec(profile_chain("none", dtype), dtype)
    fill = np.array(1.0, dtype)
    spec = ShardSpec(shard_shape=(1, 4), chunk_shape=(1, 2), codec=codec, fill=fill, rounding=Rounding(2, fill))
    given = np.array([[1.3, 2.9]], dtype)
    pieces = ChunkEncoder(spec).encode(given)
    assert pieces is not None
    assert pieces[0] == np.array([1.25, 3.0], "<f4").tobytes()
    assert given.tolist() == np.array([[1.3, 2.9]], dtype).tolist()
    assert ChunkEncoder(spec).encode(np.array([[1.0625, 0.96875]], dtype)) is None

"""The checks of dims, shapes and layouts: what is taken, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistream.arrays import Role, check_layout, checked_array_dims, checked_dims, coordinate_chunks, shape_over
from mpistream.errors import SchemaError

# ---- dims --------------------------------------------------------------------------------------------


def test_the_first_dim_is_time() -> None:
    """It has the length None; the others have integers, numpy's too."""
    dims: dict[str, Any] = {"t": None, "y": 3, "x": np.int64(5)}
    assert checked_dims(dims) == ("t", {"y": 3, "x": 5}, {})
    assert type(checked_dims(dims)[1]["x"]) is int
    assert checked_dims({"t": None}) == ("t", {}, {})
    assert checked_dims({"t": None, "one": 1}) == ("t", {"one": 1}, {})


@pytest.mark.parametrize(
    ("dims", "kind", "message"),
    [
        ({}, "dims", "dims {}: give a mapping dim -> length, the time dim first"),
        (["time", "y"], "dims", "dims ['time', 'y']: give a mapping dim -> length, the time dim first"),
        (
            {"y": 5, "time": None},
            "dims",
            "dim 'y' comes first, so it is the time dim: its length must be None, not 5",
        ),
        (
            {"time": None, "y": None},
            "dims",
            "dim 'y' has length None; only the first dim grows, give an integer above 0",
        ),
        ({"time": None, "y": 0}, "dims", "dim 'y' has length 0; only the first dim grows, give an integer above 0"),
        ({"time": None, "y": -4}, "dims", "dim 'y' has length -4; only the first dim grows, give an integer above 0"),
        ({"time": None, "y": 4.0}, "dims", "dim 'y' has length 4.0; only the first dim grows, give an integer above 0"),
        (
            {"time": None, "y": True},
            "dims",
            "dim 'y' has length True; only the first dim grows, give an integer above 0",
        ),
        ({"..": None}, "name", "dim '..' begins with a dot; choose another name"),
        ({"time": None, "a/b": 4}, "name", "dim 'a/b' contains a slash; choose another name"),
        ({"time": None, 5: 4}, "name", "dim 5 is not a string; choose another name"),
    ],
)
def test_wrong_dims_are_refused(dims, kind, message) -> None:
    """The dim and its length are in the message."""
    with pytest.raises(SchemaError) as caught:
        checked_dims(dims)
    assert (str(caught.value), caught.value.kind) == (message, kind)


SIZES = {"y": 10, "x": 6}


@pytest.mark.parametrize(
    ("role", "dims"),
    [
        (Role.VARIABLE, ["time", "x", "y"]),
        (Role.SERIES, ("time",)),
        (Role.STATIC, ()),
        (Role.STATIC, ("x",)),
        (Role.COORDINATE, ("y", "x")),
    ],
)
def test_dims_of_an_array(role, dims) -> None:
    """Known dims in any order, time first where there is time."""
    assert checked_array_dims("t", role, dims, "time", SIZES) == tuple(dims)


@pytest.mark.parametrize(
    ("role", "dims", "message"),
    [
        (Role.VARIABLE, "time", "variable 't': dims 'time': give a tuple of names"),
        (Role.VARIABLE, None, "variable 't': dims None: give a tuple of names"),
        (Role.VARIABLE, ("time", ["y"]), "variable 't': dims ('time', ['y']): give a tuple of names"),
        (Role.VARIABLE, ("time", 5), "variable 't': dims ('time', 5): give a tuple of names"),
        (Role.VARIABLE, ("time", "z"), "variable 't': dim 'z' is not among ('time', 'y', 'x')"),
        (Role.STATIC, ("y", "y"), "variable 't': dims ('y', 'y') name one dim twice"),
        (
            Role.VARIABLE,
            ("y", "time"),
            (
                "variable 't': dims ('y', 'time') must begin with the time dim 'time'; "
                "a variable without time belongs into statics"
            ),
        ),
        (
            Role.VARIABLE,
            ("y", "x"),
            (
                "variable 't': dims ('y', 'x') must begin with the time dim 'time'; "
                "a variable without time belongs into statics"
            ),
        ),
        (
            Role.VARIABLE,
            (),
            "variable 't': dims () must begin with the time dim 'time'; a variable without time belongs into statics",
        ),
        (
            Role.STATIC,
            ("time", "y"),
            "static 't': dims ('time', 'y') contain the time dim 'time'; put it into variables",
        ),
        (
            Role.COORDINATE,
            ("y", "time"),
            "coordinate 't': dims ('y', 'time') contain the time dim 'time'; put it into variables",
        ),
    ],
)
def test_wrong_dims_of_an_array_are_refused(role, dims, message) -> None:
    """The array, its dims and the way out are in the message."""
    with pytest.raises(SchemaError) as caught:
        checked_array_dims("t", role, dims, "time", SIZES)
    assert (str(caught.value), caught.value.kind) == (message, "dims")


# ---- shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "default", "expected"),
    [
        (None, None, [None, None]),
        ({"x": 3}, None, [None, 3]),
        ((4, 3), None, [4, 3]),
        ([np.int32(4), 3], {"y": 9, "x": 9}, [4, 3]),
        ({"x": 3}, {"y": 8, "x": 9}, [8, 3]),
        (None, {"y": 8}, [8, None]),
        (None, (1, 2), [None, None]),
    ],
)
def test_a_shape_is_a_sequence_over_the_dims_or_names_them(shape, default, expected) -> None:
    """What is left out comes from the default, which names dims; else it stays open."""
    found = shape_over("shard_shape", ("y", "x"), shape, default)
    assert found == expected
    assert all(n is None or type(n) is int for n in found)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (4, "shard_shape 4: give a mapping dim -> length or a sequence over the dims"),
        ((4,), "shard_shape (4,) has 1 lengths for 2 dims"),
        ((4, 3, 2), "shard_shape (4, 3, 2) has 3 lengths for 2 dims"),
        ((4, 0), "shard_shape: length 0 of dim 'x'; give an integer above 0"),
        ((4, -1), "shard_shape: length -1 of dim 'x'; give an integer above 0"),
        ((4.0, 3), "shard_shape: length 4.0 of dim 'y'; give an integer above 0"),
        ((True, 3), "shard_shape: length True of dim 'y'; give an integer above 0"),
        ({"y": "4"}, "shard_shape: length '4' of dim 'y'; give an integer above 0"),
        ({"z": 4}, "shard_shape names dim 'z', which is not among ('y', 'x')"),
    ],
)
def test_wrong_shapes_are_refused(shape, message) -> None:
    """The length, its dim and the way out are in the message."""
    with pytest.raises(SchemaError) as caught:
        shape_over("shard_shape", ("y", "x"), shape, None)
    assert (str(caught.value), caught.value.kind) == (message, "layout")


@pytest.mark.parametrize(
    ("shard", "chunk"),
    [((4, 6), (2, 3)), ((None, 6), (3, None)), ((4, None), (4, 5)), ((None, None), (None, None)), ((4, 6), (4, 6))],
)
def test_layouts_of_whole_inner_chunks_are_taken(shard, chunk) -> None:
    """A length that is still open is no reason to refuse the others."""
    check_layout("t", ("y", "x"), 4, shard, chunk)


@pytest.mark.parametrize(
    ("itemsize", "shard", "chunk", "message"),
    [
        (
            4,
            (4, 7),
            (2, 3),
            (
                "variable 't': shard length 7 of dim 'x' is not a multiple of the inner chunk's 3; "
                "use 9 or another chunk length"
            ),
        ),
        (
            4,
            (4, 6),
            (4, 12),
            (
                "variable 't': shard length 6 of dim 'x' is not a multiple of the inner chunk's 12; "
                "use 12 or another chunk length"
            ),
        ),
        (
            4,
            (4, 6),
            (0, 6),
            "variable 't': dim 'y' has shard length 4 and inner chunk length 0; both must be above 0",
        ),
        (
            4,
            (-4, 6),
            (None, 6),
            "variable 't': dim 'y' has shard length -4 and inner chunk length None; both must be above 0",
        ),
        (
            8,
            (2**14, 2**15),
            (2**13, 2**15),
            (
                "variable 't': inner chunk (8192, 32768) has 2147483648 bytes, at most 2147483631 are possible; "
                "give a smaller chunk_shape"
            ),
        ),
        (
            8,
            (2**14, 2**14),
            (2**13, 2**14),
            (
                "variable 't': shard (16384, 16384) has 2147483648 bytes, at most 2147483647 are possible; "
                "give a smaller shard_shape"
            ),
        ),
        (
            1,
            (2**31, None),
            (1, None),
            (
                "variable 't': shard (2147483648, None) has 2147483648 bytes, at most 2147483647 are possible; "
                "give a smaller shard_shape"
            ),
        ),
    ],
)
def test_impossible_layouts_are_refused(itemsize, shard, chunk, message) -> None:
    """Both numbers and a length that would do, or the limit of 2 GiB and what to make smaller."""
    with pytest.raises(SchemaError) as caught:
        check_layout("t", ("y", "x"), itemsize, shard, chunk)
    assert (str(caught.value), caught.value.kind) == (message, "layout")


def test_the_largest_layout_is_just_under_2_gib() -> None:
    """An inner chunk leaves the 16 bytes that Blosc 1 adds."""
    check_layout("t", ("y",), 1, (2**31 - 1,), (None,))
    check_layout("t", ("y",), 1, (2**31 - 17,), (2**31 - 17,))
    with pytest.raises(SchemaError, match="inner chunk"):
        check_layout("t", ("y",), 1, (2**31 - 16,), (2**31 - 16,))


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((), 8, ()),
        ((1000,), 8, (1000,)),
        ((4096, 4096), 4, (4096, 4096)),
        ((5000, 4096), 4, (4096, 4096)),
        ((3, 10**8), 4, (1, 2**24)),
        ((2, 3, 2**24), 4, (1, 1, 2**24)),
        ((2, 3, 2**24 + 1), 4, (1, 1, 2**24)),
    ],
)
def test_coordinate_chunks_keep_the_fastest_dims_whole(shape, itemsize, expected) -> None:
    """One chunk, or several of at most 64 MiB."""
    assert coordinate_chunks(shape, itemsize) == expected


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8, 16]))
def test_coordinate_chunks_are_as_large_as_64_mib_allow(shape, itemsize) -> None:
    """At most 64 MiB each; one dim is cut at most, those before it have the length 1, and the cut is tight."""
    limit = 64 * 2**20
    chunk = coordinate_chunks(tuple(shape), itemsize)
    nbytes = itemsize * int(np.prod(chunk, dtype=object))
    assert nbytes <= limit
    cut = [i for i, (c, n) in enumerate(zip(chunk, shape, strict=True)) if c < n]
    if cut:
        last = cut[-1]
        assert all(c == 1 for c in chunk[:last])
        assert nbytes // chunk[last] * (chunk[last] + 1) > limit

"""Blocks and times as callers give them: what is good input, and what is refused with which words."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistream.block import check_block, check_blocks, check_time
from mpistream.errors import SchemaError
from mpistream.names import DTYPES

F4 = np.dtype("float32")
BASE = np.arange(24, dtype="float32").reshape(4, 6)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


# ---- arrays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(BASE, id="c"),
        pytest.param(np.asfortranarray(BASE), id="fortran"),
        pytest.param(BASE.astype(">f4"), id="big-endian"),
        pytest.param(BASE.astype("float64"), id="wide"),
        pytest.param(BASE.astype("float16"), id="narrow"),
        pytest.param(BASE.astype("int16"), id="int16"),
        pytest.param(BASE.astype("uint8"), id="uint8"),
        pytest.param(np.repeat(BASE, 2, axis=1)[:, ::2], id="strided"),
        pytest.param(BASE[::-1, ::-1], id="reversed"),
        pytest.param(np.broadcast_to(BASE[:1], (4, 6)), id="broadcast"),
        pytest.param(read_only(BASE), id="read-only"),
        pytest.param(BASE.tolist(), id="list"),
        pytest.param(np.ma.array(BASE, mask=False), id="nothing-masked"),
    ],
)
def test_any_strides_byte_order_and_safe_dtype_are_good_input(block) -> None:
    """What comes back holds the same values, whatever lies in memory."""
    found = check_block("t", block, (4, 6), F4)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found.astype(F4), np.asarray(block).astype(F4))


def test_good_blocks_are_not_copied() -> None:
    """An array is looked at, not taken."""
    for block in (BASE, np.asfortranarray(BASE), BASE.astype(">f8")):
        assert np.shares_memory(check_block("t", block, (4, 6), F4), block)


@pytest.mark.parametrize("shape", [(6, 4), (4,), (4, 6, 1), (1, 4, 6), (4, 5), (), (0, 6)])
def test_a_block_of_another_shape_is_refused(shape) -> None:
    """No broadcasting of arrays: both shapes are in the message, and what is to be passed."""
    with pytest.raises(SchemaError) as caught:
        check_block("t", np.zeros(shape, F4), (4, 6), F4)
    assert str(caught.value) == (
        f"variable 't': block of shape {shape}, this rank's region has (4, 6); "
        "pass the region's cells only, without the time dim"
    )
    assert caught.value.kind == "shape"


def test_the_block_of_an_empty_region_has_no_cells() -> None:
    """Any array without cells and of as many dims is good; a rank that has cells can't pass one."""
    for empty in [(0, 6), (0, 0), (4, 0)]:
        assert check_block("t", np.zeros(empty, F4), (0, 6), F4).shape == (0, 6)
    bad: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((0,), (0, 6)),
        ((1, 6), (0, 6)),
        ((0, 6), (4, 6)),
        ((0, 0, 0), (0, 6)),
    ]
    for shape, wanted in bad:
        with pytest.raises(SchemaError, match="this rank's region has"):
            check_block("t", np.zeros(shape, F4), wanted, F4)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_dtypes_that_could_lose_values_are_refused(source, target) -> None:
    """Besides numpy's safe casts only the rounding of floats is allowed, into complex numbers too."""
    both = (np.dtype(source).kind, np.dtype(target).kind)
    if np.can_cast(source, target, "safe") or both in (("f", "f"), ("c", "c"), ("f", "c")):
        assert check_block("t", np.zeros(3, source), (3,), np.dtype(target)).dtype == np.dtype(source)
        return
    with pytest.raises(SchemaError) as caught:
        check_block("t", np.zeros(3, source), (3,), np.dtype(target))
    assert str(caught.value) == (
        f"variable 't': {source} into {target} can lose values; pass block.astype({target!r}) if that is meant"
    )
    assert caught.value.kind == "dtype"


@pytest.mark.parametrize(
    ("source", "target", "is_taken"),
    [
        ("float64", "float32", True),
        ("float64", "complex64", True),
        ("complex128", "float64", False),
        ("int64", "int32", False),
        ("int32", "float32", False),
        ("int16", "float32", True),
        ("int8", "uint8", False),
        ("uint8", "int16", True),
        ("float32", "int32", False),
        ("int8", "bool", False),
        ("bool", "int8", True),
    ],
)
def test_the_rule_by_example(source, target, is_taken) -> None:
    """float64 into float32 is fine; complex into float and int64 into int32 are not."""
    try:
        check_block("t", np.zeros(3, source), (3,), np.dtype(target))
    except SchemaError:
        assert not is_taken
    else:
        assert is_taken


@pytest.mark.parametrize("dtype", ["datetime64[s]", "timedelta64[s]", "U1", "S1", "O", [("a", "f4")]])
def test_blocks_that_hold_no_numbers_are_refused(dtype) -> None:
    """Times, text, objects and records are no values of a stream."""
    with pytest.raises(SchemaError, match="can lose values"):
        check_block("t", np.zeros(3, dtype), (3,), np.dtype("int64"))


@pytest.mark.parametrize(
    "block", [None, "abc", object(), [[1.0], [1.0, 2.0]]], ids=["None", "text", "object", "ragged"]
)
def test_what_is_no_array_is_refused_with_the_variable(block) -> None:
    """Ragged lists and other objects are SchemaError like every bad block."""
    with pytest.raises(SchemaError, match="variable 't'"):
        check_block("t", block, (2, 2), F4)


def test_a_masked_block_is_refused() -> None:
    """What lies under a mask is undefined, so the caller says what is to be written there."""
    with pytest.raises(SchemaError, match=r"variable 't': the block is masked; pass block\.filled\(value\)") as caught:
        check_block("t", np.ma.masked_equal(BASE, 5), (4, 6), F4)
    assert caught.value.kind == "mask"


# ---- times -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "is_taken"),
    [
        ("M8[s]", "M8[s]", True),
        (">M8[s]", "M8[s]", True),
        ("M8[D]", "M8[ns]", True),
        ("M8[ns]", "M8[s]", False),
        ("m8[h]", "m8[s]", True),
        ("m8[s]", "m8[h]", False),
        ("m8[s]", "M8[s]", False),
        ("M8[s]", "m8[s]", False),
        ("i8", "m8[s]", False),
        ("i8", "M8[s]", False),
        ("?", "m8[s]", False),
        ("M8[s]", "i8", False),
        ("m8[s]", "f8", False),
        ("m8", "m8[s]", False),
        ("M8", "M8[s]", False),
        ("m8[M]", "m8[s]", False),
    ],
)
def test_times_may_come_in_a_coarser_unit(source, target, is_taken) -> None:
    """Never in a finer one, nor as something else: then the message has the cast to write."""
    block = np.arange(3).astype("i1").astype(source) if source == "?" else np.arange(3, dtype="i8").astype(source)
    if is_taken:
        found = check_block("t", block, (3,), np.dtype(target))
        assert found.dtype == np.dtype(target)
        np.testing.assert_array_equal(found, block.astype(target))
        return
    with pytest.raises(SchemaError, match=r"can lose values; pass block\.astype\(") as caught:
        check_block("t", block, (3,), np.dtype(target))
    assert caught.value.kind == "dtype"


def test_a_time_beyond_the_range_of_the_unit_is_refused() -> None:
    """numpy would wrap it, without a word."""
    block = np.array(["2000-01-01", "NaT", "2500-01-01"], "M8[s]")
    found = check_block("t", block[:2], (2,), np.dtype("M8[ns]"))
    assert found.view("i8").tolist() == [946684800 * 10**9, -(2**63)]
    with pytest.raises(SchemaError) as caught:
        check_block("t", block, (3,), np.dtype("M8[ns]"))
    assert str(caught.value) == (
        "variable 't': a value of the datetime64[s] block is beyond the range of datetime64[ns]; "
        "give the variable a coarser unit"
    )
    assert caught.value.kind == "dtype"


def test_a_time_broadcasts() -> None:
    """Like Python's numbers, which in turn are no times."""
    found = check_block("t", np.datetime64("1970-01-02", "D"), (2, 3), np.dtype("M8[s]"))
    assert (found.shape, found.dtype, set(found.view("i8").flat)) == ((2, 3), np.dtype("M8[s]"), {86400})
    assert check_block("t", np.timedelta64("NaT", "s"), (), np.dtype("m8[s]")).view("i8")[()] == -(2**63)
    for value in (5, 0.5, True):
        with pytest.raises(SchemaError, match="does not fit datetime64"):
            check_block("t", value, (2, 3), np.dtype("M8[s]"))
    with pytest.raises(SchemaError, match="can lose values"):
        check_block("t", np.timedelta64(5, "M"), (2, 3), np.dtype("m8[s]"))


# ---- arrays of other libraries -----------------------------------------------------------------------


class WithArray:
    """What has a form for numpy, and perhaps says where it lies."""

    def __init__(self, array: Any, device: tuple[int, int] | Exception | None = None) -> None:
        self._array = array
        if device is not None:
            self.__dlpack_device__ = lambda: self._device(device)

    @staticmethod
    def _device(device: Any) -> Any:
        if isinstance(device, Exception):
            raise device
        return device

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if isinstance(self._array, Exception):
            raise self._array
        return self._array


class OnlyDlpack:
    """What has the DLPack protocol alone."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self._array, self._device = array, device

    def __dlpack__(self, **kwargs: Any) -> Any:
        if isinstance(self._array, Exception):
            raise self._array
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


CPU, CUDA, PINNED = (1, 0), (2, 0), (3, 0)
BLOCK = np.arange(6, dtype="float32").reshape(2, 3)


@pytest.mark.parametrize(
    "block",
    [
        WithArray(BLOCK),
        WithArray(BLOCK, CPU),
        WithArray(BLOCK, PINNED),
        WithArray(BLOCK, BufferError("lies on several devices")),
        OnlyDlpack(BLOCK),
    ],
)
def test_arrays_of_other_libraries_are_good_input(block) -> None:
    """By __array__, or by __dlpack__ where there is nothing else, without a copy of ours."""
    found = check_block("t", block, (2, 3), F4)
    assert np.shares_memory(found, BLOCK)
    np.testing.assert_array_equal(found, BLOCK)


class Cuda:
    """What has numba's and CuPy's protocol alone."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {"shape": (2, 3)}


@pytest.mark.parametrize("block", [WithArray(BLOCK, CUDA), OnlyDlpack(BLOCK, CUDA), WithArray(BLOCK, (10, 0)), Cuda()])
def test_an_array_on_a_device_is_refused_with_the_call_to_use(block) -> None:
    """The copy to the host takes time, so it is for the model to place."""
    with pytest.raises(SchemaError, match="lies in the memory of a device") as caught:
        check_block("t", block, (2, 3), F4)
    for part in ("variable 't'", type(block).__name__, "jax.device_get(block)", "block.cpu()", "block.get()"):
        assert part in str(caught.value)
    assert caught.value.kind == "device"


@pytest.mark.parametrize(
    "block",
    [
        WithArray(TypeError("Got unsupported ScalarType BFloat16")),
        WithArray(RuntimeError("Use tensor.detach().numpy() instead")),
        OnlyDlpack(BufferError("DLPack has no such dtype")),
    ],
)
def test_what_another_library_can_not_give_is_refused_in_its_words(block) -> None:
    """Its advice is better than ours."""
    with pytest.raises(SchemaError, match="variable 't': numpy can't take this ") as caught:
        check_block("t", block, (2, 3), F4)
    assert str(block._array) in str(caught.value)
    assert caught.value.kind == "dtype"


def test_floats_of_other_libraries_are_taken_where_they_fit() -> None:
    """Every bfloat16 is a float32; into float16 it does not fit."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")
    block = np.array([1.5, -2.0, np.inf], ml_dtypes.bfloat16)
    found = check_block("t", block, (3,), F4)
    np.testing.assert_array_equal(found.astype("f4"), np.array([1.5, -2.0, np.inf], "f4"))
    with pytest.raises(SchemaError, match=r"bfloat16 into float16 can lose values; pass block\.astype\('float16'\)"):
        check_block("t", block, (3,), np.dtype("float16"))


# ---- scalars -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (0.0, "float32", 0.0),
        (0.1, "float32", np.float32(0.1)),
        (np.float64(0.1), "float32", np.float32(0.1)),
        (math.nan, "float16", np.nan),
        (-math.inf, "float32", -np.inf),
        (1e300, "float32", np.inf),
        (70_000, "float16", np.inf),
        (2**24 + 1, "float32", np.float32(2**24)),
        (3, "int8", 3),
        (3.0, "int8", 3),
        (2**64 - 1, "uint64", 2**64 - 1),
        (True, "int32", 1),
        (True, "bool", True),
        (1, "bool", True),
        (0.0, "bool", False),
        (2, "complex64", 2 + 0j),
        (1 - 2j, "complex128", 1 - 2j),
        (np.float32(0.1), "float32", np.float32(0.1)),
        (np.float32(0.1), "float64", float(np.float32(0.1))),
        (np.longdouble(0.1), "float32", np.float32(0.1)),
        (np.float32(math.nan), "float64", np.nan),
        (np.int64(3), "int8", 3),
        (np.int64(2**24), "float32", 2.0**24),
        (np.float16(3), "int32", 3),
        (np.bool_(True), "float32", 1),
        (np.complex64(1j), "complex128", 1j),
    ],
)
def test_a_number_broadcasts(value, dtype, expected) -> None:
    """Its value decides, not its type: the block of that value everywhere, in the dtype on disk."""
    found = check_block("t", value, (2, 3), np.dtype(dtype))
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, np.full((2, 3), expected, dtype))


def test_a_scalar_is_the_block_of_a_variable_without_dims() -> None:
    """Python's and numpy's scalars are blocks of the shape ()."""
    assert check_block("t", 2.5, (), F4)[()] == np.float32(2.5)
    assert check_block("t", np.float32(2.5), (), F4)[()] == np.float32(2.5)
    assert check_block("t", np.array(2.5), (), F4)[()] == np.float64(2.5)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1j, "float32"),
        (1 + 0j, "int32"),
        (1.5, "int32"),
        (math.nan, "int32"),
        (math.inf, "int64"),
        (1e300, "int32"),
        (0.5, "bool"),
        (2, "bool"),
        (256, "uint8"),
        (-1, "uint8"),
        (2**63, "int64"),
        (10**400, "float64"),
        (np.int64(256), "uint8"),
        (np.int64(2**24 + 1), "float32"),  # as an array it would be refused, too
        (np.int64(2**60 + 1), "float32"),  # numpy compares it with the float as a float
        (np.int64(2**62 + 1), "complex64"),
        (np.float32(1.5), "int32"),
        (np.float32(math.nan), "int32"),
        (np.complex64(1), "float32"),
        (np.clongdouble(1), "float32"),
        (np.int64(3), "timedelta64[s]"),
    ],
)
def test_a_python_number_that_the_dtype_can_not_hold_is_refused(value, dtype) -> None:
    """The message shows both, and nothing else is said: no warning of numpy's."""
    with pytest.raises(SchemaError) as caught:
        check_block("t", value, (2, 3), np.dtype(dtype))
    assert str(caught.value) == f"variable 't': {value!r} does not fit {dtype}"
    assert caught.value.kind == "dtype"


# ---- blocks of several boxes -------------------------------------------------------------------------


def test_several_boxes_have_a_block_each() -> None:
    """In their order, each of its own shape and layout in memory; a number broadcasts into all."""
    shapes = [(4, 6), (1, 2)]
    given = (BASE, np.ones((1, 2), ">f8"))
    for found in (check_blocks("t", given, shapes, F4), check_blocks("t", list(given), shapes, F4)):
        assert found[0] is BASE
        assert found[1].tolist() == [[1, 1]]
    assert [b.tolist() for b in check_blocks("t", 2, [(2,), ()], F4)] == [[2, 2], 2]


def test_one_box_has_its_block() -> None:
    """A nested list is then the block itself; only a list of one block is not."""
    assert check_blocks("t", BASE, [(4, 6)], F4)[0] is BASE
    assert check_blocks("t", [BASE], [(4, 6)], F4)[0] is BASE
    assert check_blocks("t", [[1.0, 2.0]], [(1, 2)], F4)[0].tolist() == [[1, 2]]
    with pytest.raises(SchemaError, match=r"block of shape \(2, 4, 6\)"):
        check_blocks("t", [BASE, BASE], [(4, 6)], F4)


@pytest.mark.parametrize(
    ("value", "words"),
    [([BASE], "1 blocks"), ((BASE,) * 3, "3 blocks"), ([], "0 blocks"), (BASE, "a ndarray"), (None, "a NoneType")],
    ids=str,
)
def test_another_number_of_blocks_is_refused(value, words) -> None:
    """Also one array for all: which of its cells belong to which box, nobody said."""
    with pytest.raises(SchemaError) as caught:
        check_blocks("t", value, [(4, 6), (4, 6)], F4)
    assert str(caught.value) == (
        f"variable 't': {words}, this rank's region has 2 boxes; pass a list with one block per box, in the region's "
        "order"
    )
    assert caught.value.kind == "shape"


def test_each_block_is_checked() -> None:
    """The second one's shape and dtype, too."""
    for bad in (BASE.T, BASE.astype("complex64")):
        with pytest.raises(SchemaError, match="variable 't'"):
            check_blocks("t", [BASE, bad], [(4, 6), (4, 6)], F4)


# ---- time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [3, 3.0, np.float32(3), np.int64(3), np.array(3.0)])
def test_time_is_any_real_number(t) -> None:
    """It comes back as a float, also as the first one and below zero."""
    assert check_time(t, None) == 3.0
    assert check_time(t, 2.5) == 3.0
    assert type(check_time(t, -7)) is float


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_time_only_grows(t, last_t) -> None:
    """Equal and smaller times are refused with both numbers, in full."""
    if t > last_t:
        assert check_time(t, last_t) == t
        return
    with pytest.raises(SchemaError) as caught:
        check_time(t, last_t)
    assert str(caught.value) == f"t = {t!r} does not come after the last record's {last_t!r}"
    assert caught.value.kind == "time"


@pytest.mark.parametrize("t", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_time_is_finite(t) -> None:
    """NaN and infinity are refused, as a first time too."""
    for last_t in (None, 0.0):
        with pytest.raises(SchemaError, match="give a finite time") as caught:
            check_time(t, last_t)
        assert caught.value.kind == "time"


@pytest.mark.parametrize(
    "t",
    [
        None,
        "abc",
        "5",
        b"5",
        1j,
        [1.0],
        np.array([1.0, 2.0]),
        np.datetime64("2000-01-01", "D"),
        np.datetime64("2000-01-01", "ns"),
        np.timedelta64(5, "s"),
        10**400,
    ],
    ids=repr,
)
def test_what_is_no_number_is_no_time(t) -> None:
    """Text has no place on the time axis, and a date is a number by the time it comes here."""
    with pytest.raises(SchemaError, match=r"^t = ") as caught:
        check_time(t, None)
    assert caught.value.kind == "time"


# ---- strings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["U5", np.dtypes.StringDType()])
def test_strings_are_good_input_where_strings_are_stored(dtype) -> None:
    """Sequences and arrays of the shape; one string broadcasts, as a number does."""
    dtype = np.dtype(dtype)
    for value in (["a", "bé"], ("a", "bé"), np.array(["a", "bé"]), np.array(["a", "bé"], object)):
        found = check_block("t", value, (2,), dtype)
        assert (found.dtype, found.tolist()) == (dtype, ["a", "bé"])
    found = check_block("t", "ab", (2, 2), dtype)
    assert (found.dtype, found.tolist()) == (dtype, [["ab", "ab"], ["ab", "ab"]])


@pytest.mark.parametrize(
    ("value", "dtype", "kind", "message"),
    [
        (5, "U5", "dtype", "variable 't': 5 is a int; give str"),
        (["a", 1.5], "U5", "dtype", "variable 't': 1.5 is a float; give str"),
        (["a"], "U5", "shape", "variable 't': block of shape (1,), this rank's region has (2,)"),
        (["a", "abcdef"], "U5", "dtype", "variable 't': a string has 6 characters, U5 holds 5"),
        ("abcdef", "U5", "dtype", "variable 't': a string has 6 characters, U5 holds 5"),
        ("a", "float32", "shape", "variable 't': block of shape (), this rank's region has (2,)"),
        (["1", "2"], "float32", "dtype", "variable 't': <U1 into float32 can lose values"),
    ],
)
def test_text_and_numbers_are_not_taken_for_each_other(value, dtype, kind, message) -> None:
    """Neither becomes the other on the way."""
    with pytest.raises(SchemaError) as caught:
        check_block("t", value, (2,), np.dtype(dtype))
    assert str(caught.value).startswith(message)
    assert caught.value.kind == kind


def test_numbers_of_numpy_broadcast_into_all_blocks_of_a_rank() -> None:
    """An array without dims does not: it may be a block that was reduced too far."""
    assert [b.tolist() for b in check_blocks("t", np.float32(2), [(2,), (1, 1)], F4)] == [[2.0, 2.0], [[2.0]]]
    with pytest.raises(SchemaError, match=r"block of shape \(\)"):
        check_block("t", np.array(2.0), (2,), F4)


def test_dates_broadcast_into_all_blocks_of_a_rank() -> None:
    """As any scalar does."""
    date = np.datetime64("2000-01-02", "s")
    found = check_blocks("t", date, [(2,), (1, 3)], np.dtype("datetime64[s]"))
    assert [b.shape for b in found] == [(2,), (1, 3)]
    assert all((b == date).all() for b in found)


@pytest.mark.parametrize(
    ("value", "shape"), [([np.zeros((1, 4))], (1, 4)), ([[0.0, 0.0]], (1, 2)), ([], (0, 0)), ({}, (0, 4))]
)
def test_a_rank_of_one_box_or_none_may_pass_a_list_too(value, shape) -> None:
    """As it would with several; a nested list is still a block."""
    assert [b.shape for b in check_blocks("t", value, [shape], F4)] == [shape]

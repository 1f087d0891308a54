"""Strings as callers give them: the two dtypes, and what would not come back and is therefore refused."""

from __future__ import annotations

import numpy as np
import pytest

import mpistream.strings
from mpistream.errors import SchemaError
from mpistream.names import dtype_name, fill_array, fill_from_json, fill_to_json, stored_dtype
from mpistream.strings import ANY_LENGTH, is_string, string_array

U3 = np.dtype("U3")


class Wrapped:
    """Something of another library that knows how to become an array, as xarray's and pandas' do."""

    def __init__(self, values) -> None:
        self._values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._values, dtype)


@pytest.mark.parametrize(
    ("request_", "dtype", "name"),
    [
        (str, ANY_LENGTH, "string"),
        ("str", ANY_LENGTH, "string"),
        ("string", ANY_LENGTH, "string"),
        ("U", ANY_LENGTH, "string"),
        (np.dtypes.StringDType(na_object=None), ANY_LENGTH, "string"),
        ("U3", U3, "U3"),
        (">U3", U3, "U3"),
        (np.dtype("<U3"), U3, "U3"),
    ],
    ids=repr,
)
def test_dtypes_of_strings_have_a_name(request_, dtype, name) -> None:
    """A length makes it fixed, native byte order included; the name leads back to the dtype."""
    found = stored_dtype("t", request_)
    assert (found, found.isnative) == (dtype, True)
    assert dtype_name(found) == name
    assert stored_dtype("t", name) == dtype
    assert is_string(found)
    assert not is_string(np.dtype("f4"))


@pytest.mark.parametrize(
    ("value", "dtype", "expected", "found_dtype"),
    [
        (["a", "bé", ""], None, ["a", "bé", ""], "<U2"),
        ([["", ""], ["", ""]], None, [["", ""], ["", ""]], "<U1"),
        ("abc", None, "abc", "<U3"),
        (np.array(["a", "bc"], ">U7"), None, ["a", "bc"], "<U7"),
        (np.array(["a", "b\0"], object), None, ["a", "b\0"], ANY_LENGTH),
        (np.array(["a", "b"], np.dtypes.StringDType()), None, ["a", "b"], ANY_LENGTH),
        (Wrapped(["a", "b"]), None, ["a", "b"], "<U1"),
        (np.str_("ab"), None, "ab", "<U2"),
        (["a", "b\0"], ANY_LENGTH, ["a", "b\0"], ANY_LENGTH),
        (["a\0b"], U3, ["a\0b"], U3),
        (np.array(["abc"], "U9"), U3, ["abc"], U3),
        (np.asfortranarray([["a", "b"], ["c", "d"]]), ANY_LENGTH, [["a", "b"], ["c", "d"]], ANY_LENGTH),
        ([], None, [], "<U1"),
    ],
)
def test_each_string_is_kept_whole(value, dtype, expected, found_dtype) -> None:
    """Lists and arrays of any kind; without a dtype it is numpy's, and any length for objects."""
    found = string_array("t", value, dtype)
    assert found.dtype == np.dtype(found_dtype)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (["a", 1], None, "t: 1 is a int; give str"),
        (["a", None], ANY_LENGTH, "t: None is a NoneType; give str"),
        ([["a"], ["b", "c"]], ANY_LENGTH, "t: ['a'] is a list; give str"),
        (np.array(["a", np.nan], object), None, "t: nan is a float; give str"),
        ([b"a"], None, "t: b'a' is a bytes; give str"),
        (np.array([b"a"]), None, "t: |S1 instead of strings; pass np.char.decode(values, 'utf-8') if that is meant"),
        (np.arange(3), U3, "t: int64 instead of strings; pass values.astype(str) if that is meant"),
        (["abcde"], U3, "t: a string has 5 characters, U3 holds 3; give dtype='U5' or dtype=str"),
        (["ab\0"], None, "t: U3 drops the NUL at the end of a string; give dtype=str"),
        (["\ud800"], None, "t: '\\ud800' is not valid Unicode, so it has no UTF-8 form"),
    ],
)
def test_what_would_not_come_back_is_refused(value, dtype, message) -> None:
    """Nothing is turned into text, cut or dropped on the way; the message says what to give."""
    with pytest.raises(SchemaError) as caught:
        string_array("t", value, dtype)
    assert (str(caught.value), caught.value.kind) == (message, "dtype")


def test_strings_of_any_length_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bytes and its UTF-8 count for each string; a reader decodes no more than that."""
    monkeypatch.setattr(mpistream.strings, "MAX_TEXT_NBYTES", 16)
    assert string_array("t", ["abcdé"[:3], "abcde"], ANY_LENGTH).tolist() == ["abc", "abcde"]
    with pytest.raises(SchemaError, match="t: the strings have 17 bytes in UTF-8, at most 16 are possible; give int"):
        string_array("t", ["abcé"[1:], "abcde"], ANY_LENGTH)
    assert string_array("t", ["abcé", "abcde"]).dtype == "U5"


@pytest.mark.parametrize("dtype", [U3, ANY_LENGTH])
def test_the_fill_value_of_strings(dtype) -> None:
    """By default it is empty; another one comes back from JSON, and what is no string is refused."""
    assert fill_array("t", dtype, None).item() == ""
    fill = fill_array("t", dtype, "n/é")
    assert (fill.dtype, fill.shape, fill_to_json(fill)) == (dtype, (), "n/é")
    assert fill_from_json(dtype, "n/é") == fill
    for bad, message in ((5, "5 is a int; give str"), (["a"], r"\['a'\] is not one string")):
        with pytest.raises(SchemaError, match=f"t: fill value:? {message}") as caught:
            fill_array("t", dtype, bad)
        assert caught.value.kind == "fill_value"
        with pytest.raises(SchemaError):
            fill_from_json(dtype, bad)

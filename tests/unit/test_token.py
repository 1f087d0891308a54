"""Tokens and receipts on their way as JSON."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistream.errors import FormatError, StoreError, error_to_json
from mpistream.region import Region
from mpistream.token import CommitReceipt, CommitToken, times_sha256
from tests.support.json_damage import paths, replaced, values
from tests.support.tokens import BASE, HOLES

TOKEN = CommitToken(
    store_id="store",
    run_id="run",
    fingerprint="ab",
    epoch=3,
    base_seq=2**40,
    writer=1,
    records=((5, 7), (9, 10)),
    last_t=0.1 + 0.2,
    times_sha256="cd",
    n_cells={"temperature": 2**50, "energy": 0},
    statics={"topography": 24},
    n_blobs=2,
    n_packs=1,
    region=Region.of_box(("y", "x"), ((0, 4), (3, 6))),
    n_objects=8,
    nbytes=12_345,
)
FAILED = CommitToken(
    **{
        **{f: getattr(TOKEN, f) for f in CommitToken.__dataclass_fields__},
        "failure": error_to_json(StoreError("no space", kind="io", errno=28), rank=1),
    }
)
CARRIED = CommitToken(
    **{**{f: getattr(TOKEN, f) for f in CommitToken.__dataclass_fields__}, "times": (0.5, 0.1 + 0.2, -0.0)}
)
RECEIPT = CommitReceipt(
    commit_seq=18,
    epoch=3,
    n_records=7,
    last_t=1.5,
    n_new_records=2,
    new_statics=("topography",),
    n_packs=1,
    n_objects=8,
    nbytes=12_345,
    warnings=("publish: no space",),
)


def through_json(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


@pytest.mark.parametrize("token", [TOKEN, FAILED, CARRIED], ids=["good", "failed", "carried"])
def test_a_token_survives_json(token) -> None:
    """Equal, with plain types and its region."""
    again = CommitToken.from_json(through_json(token.to_json()))
    assert again == token
    assert type(again.region) is Region
    assert through_json(again.to_json()) == through_json(token.to_json())


def test_a_token_does_not_grow_with_the_array() -> None:
    """A name, a count and a region: the same bytes for a thousand times the cells but for digits."""
    large = CommitToken.from_json(
        {**TOKEN.to_json(), "n_cells": {"temperature": 2**60, "energy": 0}, "n_objects": 10**6}
    )
    assert len(json.dumps(large.to_json())) < len(json.dumps(TOKEN.to_json())) + 12


@pytest.mark.parametrize("name", CommitToken.__dataclass_fields__)
def test_a_token_without_a_field_is_refused(name) -> None:
    """Every field is needed; the message names it."""
    document = TOKEN.to_json()
    del document[name]
    with pytest.raises(FormatError, match=f"damaged token: KeyError: '{name}'") as caught:
        CommitToken.from_json(document)
    assert caught.value.kind == "token"


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": "3"},
        {"epoch": 3.0},
        {"writer": None},
        {"n_cells": 5},
        {"n_cells": {"t": "5"}},
        {"n_cells": [1]},
        {"statics": None},
        {"region": "y"},
        {"region": {"dims": ["y"], "boxes": [[[2, 1]]]}},
        {"last_t": "x"},
        {"last_t": 10**400},
        {"last_t": "1.5"},
        {"last_t": math.nan},
        {"times": [0.5, math.inf]},
        {"times": ["0.5"]},
        {"times": 0.5},
        {"records": 5},
        {"records": [5, 6]},
        {"records": [[5]]},
        {"records": [[5, 6.0]]},
        {"n_blobs": None},
        {"failure": 5},
        {"failure": {}},
    ],
    ids=lambda c: str(c)[:40],
)
def test_a_damaged_token_is_refused(changes) -> None:
    """Where tokens are carried by the caller, any JSON can come in."""
    with pytest.raises(FormatError, match=r"^damaged token: ") as caught:
        CommitToken.from_json({**TOKEN.to_json(), **changes})
    assert caught.value.kind == "token"


DOCUMENTS = [through_json(TOKEN.to_json()), through_json(FAILED.to_json()), through_json(CARRIED.to_json())]


@given(st.sampled_from(DOCUMENTS), st.data(), values | st.just(...))
def test_no_token_ends_in_another_error(document, data, value) -> None:
    """One value replaced or left out: a token that can be written again, or FormatError."""
    path = data.draw(st.sampled_from(paths(document)))
    try:
        token = CommitToken.from_json(replaced(document, path, value))
    except FormatError as error:
        assert error.kind == "token"
    else:
        assert CommitToken.from_json(through_json(token.to_json())) == token


@given(values)
def test_what_is_no_document_is_refused(value) -> None:
    """Any other JSON in the place of a token."""
    with pytest.raises(FormatError, match=r"^damaged token: "):
        CommitToken.from_json(value)


@pytest.mark.parametrize("receipt", [RECEIPT, CommitReceipt.from_json({**RECEIPT.to_json(), "last_t": None})])
def test_a_receipt_survives_json(receipt) -> None:
    """Equal, with its warnings."""
    again = CommitReceipt.from_json(through_json(receipt.to_json()))
    assert again == receipt
    assert again.warnings == ("publish: no space",)
    assert again.new_statics == ("topography",)


def test_a_receipt_is_the_same_whatever_its_warnings() -> None:
    """They are the owner's alone."""
    assert CommitReceipt.from_json({**RECEIPT.to_json(), "warnings": []}) == RECEIPT
    assert CommitReceipt.from_json({**RECEIPT.to_json(), "nbytes": 1}) != RECEIPT


@pytest.mark.parametrize(("manifest", "n_records", "last_t"), [(BASE, 2, 1.5), (HOLES, 4, 7.0)])
def test_the_receipt_of_a_state(manifest, n_records, last_t) -> None:
    """Nothing is new; the records are those that are committed, not the length of the time dim."""
    assert CommitReceipt.of(manifest) == CommitReceipt(
        commit_seq=9,
        epoch=4,
        n_records=n_records,
        last_t=last_t,
        n_new_records=0,
        new_statics=(),
        n_packs=0,
        n_objects=0,
        nbytes=0,
    )


@given(st.lists(st.floats(), max_size=5), st.lists(st.floats(), max_size=5))
def test_the_digest_of_times_is_equal_iff_they_are_bitwise(a, b) -> None:
    """Little-endian float64, one after the other."""
    packed = [struct.pack(f"<{len(x)}d", *x) for x in (a, b)]
    assert times_sha256(a) == hashlib.sha256(packed[0]).hexdigest()
    assert (times_sha256(a) == times_sha256(b)) is (packed[0] == packed[1])


def test_text_round_trip() -> None:
    """A token is the same after it travelled as text, and the same token is the same text."""
    assert CommitToken.from_text(TOKEN.to_text()) == TOKEN
    assert CommitToken.from_text(TOKEN.to_text()).to_text() == TOKEN.to_text()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "{}", "[" * 100_000, "\n\n", "{}\n{}\n{}\n"])
def test_damaged_text_is_named(text: str) -> None:
    """Text that is no token is an error of its own, never one of json."""
    with pytest.raises(FormatError, match="damaged token") as caught:
        CommitToken.from_text(text)
    assert caught.value.kind == "token"


def test_what_many_tokens_say_alike_is_held_once() -> None:
    """Of the tokens of very many writers only what differs takes memory; a token that differs has its own."""
    first, second, other = (
        CommitToken.from_text(token.to_text())
        for token in (TOKEN, replace(TOKEN, writer=2, nbytes=7), replace(TOKEN, n_cells={"temperature": 1}))
    )
    assert (first.writer, second.writer, second.nbytes) == (1, 2, 7)
    shared = ("store_id", "run_id", "fingerprint", "records", "times_sha256", "n_cells", "statics")
    assert all(getattr(first, name) is getattr(second, name) for name in shared)
    assert (first.n_cells, other.n_cells) == (TOKEN.n_cells, {"temperature": 1})


@given(st.sampled_from([TOKEN, FAILED, CARRIED]), st.data(), values | st.just(...))
def test_no_text_ends_in_another_error(token, data, value) -> None:
    """One value of one line replaced or left out: a token that can be written again, or FormatError."""
    lines = token.to_text().split("\n")
    i = data.draw(st.integers(0, len(lines) - 1))
    document = json.loads(lines[i])
    lines[i] = json.dumps(replaced(document, data.draw(st.sampled_from(paths(document))), value))
    try:
        found = CommitToken.from_text("\n".join(lines))
    except FormatError as error:
        assert error.kind == "token"
    else:
        assert CommitToken.from_text(found.to_text()) == found

"""Packs of blobs: what goes in comes out, and damage is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream.blobs import MAX_BLOB_NBYTES, BlobEntry, Scope, pack_pieces, read_pack_index, read_payload
from mpistream.errors import FormatError
from tests.support.json_damage import paths, replaced, values

KEY = ".mpistream/blobs/3-17-0"
BLOBS: dict[tuple[Scope, str], bytes] = {
    ("static", "seed"): b"\x00\x01\x02",
    (5, "tracker"): b"some bytes",
    (5, "empty"): b"",
    (2**40, "seed"): bytes(range(256)),
}


def reader(data: bytes) -> Callable[[int, int], bytes]:
    """As a store reads: nothing from before the object, and from behind its end what there is."""

    def read(offset: int, nbytes: int) -> bytes:
        assert offset >= 0
        assert nbytes >= 0
        return data[offset : offset + nbytes]

    return read


def entries_of(data: bytes) -> list[BlobEntry]:
    return read_pack_index(KEY, len(data), reader(data))


def contents(data: bytes) -> dict[tuple[Scope, str], bytes]:
    return {(e.scope, e.key): read_payload(KEY, e, reader(data)) for e in entries_of(data)}


def crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(4, "little")


def sealed(payloads: bytes, document: Any) -> bytes:
    """A pack with any index, its length and checksum made right."""
    index = document if isinstance(document, bytes) else json.dumps(document).encode()
    return payloads + index + len(index).to_bytes(8, "little") + crc(index)


PACK = b"".join(pack_pieces(BLOBS))
PAYLOADS = b"".join(BLOBS.values())
DOCUMENT = json.loads(PACK[len(PAYLOADS) : -12])

scopes = st.just("static") | st.integers(0, 10**12)
blobs = st.dictionaries(st.tuples(scopes, st.text(max_size=5)), st.binary(max_size=20), max_size=6)


@given(blobs)
def test_what_goes_in_comes_out(given_blobs) -> None:
    """Each payload under its key and scope, whatever bytes it has; an empty pack too."""
    data = b"".join(pack_pieces(given_blobs))
    assert contents(data) == given_blobs
    assert all(type(p) is bytes for p in contents(data).values())


def test_the_bytes_of_a_pack() -> None:
    """Payloads, JSON index, its length and its CRC32C; anybody can read them from the text of the format."""
    start, entries = 0, []
    for (scope, key), payload in BLOBS.items():
        entries.append([key, scope, start, len(payload), crc(payload).hex()])
        start += len(payload)
    index = json.dumps({"blobs": entries}, separators=(",", ":")).encode()
    assert PAYLOADS + index + len(index).to_bytes(8, "little") + crc(index) == PACK
    assert MAX_BLOB_NBYTES == 64 * 2**20


def test_payloads_are_not_copied() -> None:
    """A pack is written from where its payloads lie."""
    payload = bytes(1000)
    assert pack_pieces({(0, "k"): payload})[0] is payload


def test_one_payload_costs_its_bytes_alone() -> None:
    """The index is read with two reads, a payload with one."""
    asked: list[tuple[int, int]] = []

    def read(offset: int, nbytes: int) -> bytes:
        asked.append((offset, nbytes))
        return PACK[offset : offset + nbytes]

    entries = read_pack_index(KEY, len(PACK), read)
    assert sum(n for _, n in asked) == len(PACK) - len(PAYLOADS)
    assert read_payload(KEY, entries[1], read) == b"some bytes"
    assert asked[2:] == [(3, 10)]


def test_no_truncation_is_a_pack() -> None:
    """However many bytes are missing at the end, down to none."""
    for n in range(len(PACK)):
        with pytest.raises(FormatError, match=f"^{KEY}: ") as caught:
            entries_of(PACK[:n])
        assert caught.value.kind == "blob"


def test_a_pack_that_shrinks_while_it_is_read_is_told() -> None:
    """Its length was asked for before: a read gives fewer bytes than there should be."""
    for n in range(len(PACK)):
        with pytest.raises(FormatError, match=f"^{KEY}: "):
            read_pack_index(KEY, len(PACK), reader(PACK[:n]))
    entry = entries_of(PACK)[-1]
    with pytest.raises(FormatError, match=f"^{KEY}: ") as caught:
        read_payload(KEY, entry, reader(PACK[: len(PAYLOADS) - 1]))
    assert caught.value.kind == "checksum"


def test_every_flipped_bit_is_told() -> None:
    """In the index or its footer by the pack, in a payload by that payload, and the others are still read."""
    for i in range(len(PACK)):
        flipped = bytearray(PACK)
        flipped[i] ^= 1 << (i % 8)
        data = bytes(flipped)
        if i >= len(PAYLOADS):
            with pytest.raises(FormatError, match=f"^{KEY}: "):
                entries_of(data)
            continue
        hit = [e.offset <= i < e.offset + e.nbytes for e in entries_of(data)]
        assert sum(hit) == 1
        for entry, is_hit in zip(entries_of(data), hit, strict=True):
            if is_hit:
                with pytest.raises(FormatError, match=f"^{KEY}: .* blob {entry.key!r} ") as caught:
                    read_payload(KEY, entry, reader(data))
                assert caught.value.kind == "checksum"
            else:
                assert read_payload(KEY, entry, reader(data)) == BLOBS[entry.scope, entry.key]


@pytest.mark.parametrize(
    ("document", "part"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        ({}, "KeyError: 'blobs'"),
        ({"blobs": 5}, "TypeError"),
        ({"blobs": ["abc"]}, "ValueError"),
        ({"blobs": [["k", 0, 0, 1]]}, "ValueError"),
        ({"blobs": [["k", "dynamic", 0, 1, "ab"]]}, "ValueError"),
        ({"blobs": [["k", 0, None, 1, "ab"]]}, "TypeError"),
        ({"blobs": [["k", 0, -1, 1, "ab"]]}, "outside the pack"),
        ({"blobs": [["k", 0, 3, 3, "ab"]]}, "outside the pack"),
        ({"blobs": [["k", 0, 3, -1, "ab"]]}, "outside the pack"),
    ],
    ids=lambda c: str(c)[:40],
)
def test_a_forged_index_is_refused(document, part) -> None:
    """Its checksum is right, but it is none, or it points out of the payloads."""
    with pytest.raises(FormatError, match=f"^{KEY}: ") as caught:
        entries_of(sealed(b"12345", document))
    assert part in str(caught.value)
    assert caught.value.kind == "blob"


def test_an_index_longer_than_the_pack_is_refused() -> None:
    """No read begins before the object."""
    data = b"12345" + (6).to_bytes(8, "little") + crc(b"")
    with pytest.raises(FormatError, match="a pack of 17 bytes with an index of 6 bytes") as caught:
        entries_of(data)
    assert caught.value.kind == "blob"


@given(st.sampled_from(paths(DOCUMENT)), values | st.just(...))
@settings(max_examples=200)
def test_no_forged_index_ends_in_another_error(path, value) -> None:
    """One value replaced or left out and the checksum made right: payloads, or FormatError."""
    try:
        contents(sealed(PAYLOADS, replaced(DOCUMENT, path, value)))
    except FormatError as error:
        assert error.kind in ("blob", "checksum")

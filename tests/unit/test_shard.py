"""Shards: bytes and index, fill, edges, and damage."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream.errors import FormatError
from mpistream.names import DTYPES
from mpistream.zarr3.codecs import crc32c
from mpistream.zarr3.shard import ChunkEncoder, OpenShard, index_bytes, parse_index
from tests.support.shards import entries_of, joined, make_spec, read_whole, write_shard

MISSING = 2**64 - 1
SPEC = make_spec((1, 4, 6), (1, 2, 3))
RECORD = np.arange(1, 25, dtype="float32").reshape(4, 6)
CHUNK_NBYTES = 2 * 3 * 4 + 4
each_dtype = pytest.mark.parametrize("name", DTYPES)


# ---- bytes -------------------------------------------------------------------------------------------


def test_the_bytes_of_a_shard_by_hand() -> None:
    """Inner chunks in C order, each with its CRC32C; then offset and size of each, little-endian, and a CRC32C."""
    chunks = [RECORD[y : y + 2, x : x + 3].astype("<f4").tobytes() for y in (0, 2) for x in (0, 3)]
    body = b"".join(chunk + crc32c(chunk) for chunk in chunks)
    index = struct.pack("<8Q", 0, 28, 28, 28, 56, 28, 84, 28)
    assert write_shard(SPEC, [RECORD]) == body + index + crc32c(index)
    assert SPEC.n_chunks == (1, 2, 2)
    assert SPEC.index_nbytes == 4 * 16 + 4


def test_the_index_says_what_is_missing() -> None:
    """Both numbers of an inner chunk that is left out are 2**64 - 1."""
    entries = np.array([[0, 28], [MISSING, MISSING]], np.uint64)
    data = struct.pack("<4Q", 0, 28, MISSING, MISSING)
    assert index_bytes(entries) == data + crc32c(data)
    spec = make_spec((1, 4, 3), (1, 2, 3))
    assert parse_index(data + crc32c(data), spec, 28 + spec.index_nbytes).tolist() == entries.tolist()


@each_dtype
@pytest.mark.parametrize("change", ["none", "big-endian", "fortran", "strided", "reversed", "wide"])
def test_any_block_gives_the_same_bytes(name, change) -> None:
    """Byte order, strides and a wider dtype of the caller leave no trace."""
    dtype = np.dtype(name)
    spec = make_spec((1, 4, 6), (1, 2, 3), dtype=name, profile="fast")
    block = (np.arange(24) % 2 if name == "bool" else np.arange(24)).reshape(4, 6).astype(dtype)
    changed: dict[str, Any] = {
        "none": block,
        "big-endian": block.astype(dtype.newbyteorder(">")),
        "fortran": np.asfortranarray(block),
        "strided": np.repeat(block, 2, axis=1)[:, ::2],
        "reversed": block[::-1].copy()[::-1],
        "wide": block.astype("complex128") if dtype.kind == "c" else block.astype("float64").astype(dtype),
    }
    assert write_shard(spec, [changed[change]]) == write_shard(spec, [block])
    assert read_whole(spec, write_shard(spec, [changed[change]]))[0].tolist() == block.tolist()


# ---- fill --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fill", "value", "is_fill"),
    [
        ("float32", 0.0, 0.0, True),
        ("float32", 0.0, -0.0, False),
        ("float32", -0.0, -0.0, True),
        ("float32", -0.0, 0.0, False),
        ("float64", np.nan, np.nan, True),
        ("float64", np.nan, -np.nan, False),
        ("float16", 1.5, 1.5, True),
        ("int32", -7, -7, True),
        ("bool", False, False, True),
        ("bool", True, False, False),
        ("complex64", 1 + 2j, 1 + 2j, True),
        ("complex64", 0, complex(0, -0.0), False),
        ("complex128", complex(1, np.nan), complex(1, np.nan), True),
        ("complex128", 1 + 2j, 1 + 3j, False),
        ("complex128", 1 + 1j, 1 + 1j, True),
    ],
)
def test_an_inner_chunk_is_left_out_when_it_is_bytewise_fill(name, fill, value, is_fill) -> None:
    """-0.0 is not 0.0, and a NaN of other bits is not the fill; what is left out reads as fill, bitwise."""
    spec = make_spec((1, 4, 6), (1, 2, 3), dtype=name, fill=fill)
    record = np.full((4, 6), value, name)
    data = write_shard(spec, [record])
    assert bool(entries_of(spec, data)) is not is_fill
    if is_fill:
        assert len(data) == spec.index_nbytes
    assert read_whole(spec, data).tobytes() == record.tobytes()


def test_one_value_that_is_not_fill_keeps_its_inner_chunk() -> None:
    """Wherever it stands in the chunk; the others stay left out, and the pieces close up."""
    for y, x in np.ndindex(4, 6):
        record = np.zeros((4, 6), "float32")
        record[y, x] = 1
        data = write_shard(SPEC, [record])
        assert entries_of(SPEC, data) == {(0, y // 2, x // 3): (0, CHUNK_NBYTES)}
        assert read_whole(SPEC, data)[0].tolist() == record.tolist()


# ---- edges -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box_shape", [(4, 6), (3, 6), (4, 4), (1, 1), (2, 3), (3, 5)])
@pytest.mark.parametrize("fill", [0, np.nan])
def test_a_shard_at_the_edge_of_the_array_is_padded_with_fill(box_shape, fill) -> None:
    """Inner chunks that are cut are filled up, those beyond the edge are left out."""
    spec = make_spec((1, 4, 6), (1, 2, 3), fill=fill)
    record = RECORD[tuple(slice(n) for n in box_shape)]
    data = write_shard(spec, [record])
    expected = np.full((4, 6), fill, "float32")
    expected[tuple(slice(n) for n in box_shape)] = record
    assert read_whole(spec, data)[0].tobytes() == expected.tobytes()
    inside = {(0, y, x) for y in range(-(-box_shape[0] // 2)) for x in range(-(-box_shape[1] // 3))}
    assert set(entries_of(spec, data)) == inside


def test_a_shard_of_time_alone() -> None:
    """No dims but time: one value a record."""
    spec = make_spec((4,), (2,))
    data = write_shard(spec, np.array([5, 6, 7], "float32"), ())
    assert read_whole(spec, data).tolist() == [5, 6, 7, 0]


def test_a_full_shard_takes_no_record() -> None:
    """The row above has to open the next one."""
    shard = OpenShard(ChunkEncoder(SPEC), (4, 6))
    shard.put(0, RECORD)
    with pytest.raises(IndexError):
        shard.put(1, RECORD)
    assert joined(shard) == write_shard(SPEC, [RECORD])


def test_a_record_is_put_once() -> None:
    """What is raw in a slab is not replaced."""
    shard = OpenShard(ChunkEncoder(make_spec((2, 4, 6), (2, 2, 3))), (4, 6))
    shard.put(1, RECORD)
    with pytest.raises(AssertionError, match="a record is put once"):
        shard.put(1, RECORD)


def test_a_shard_without_records_is_an_index() -> None:
    """Everything in it is fill."""
    data = joined(OpenShard(ChunkEncoder(SPEC), (4, 6)))
    assert len(data) == SPEC.index_nbytes
    assert not read_whole(SPEC, data).any()


# ---- damage ------------------------------------------------------------------------------------------


def sealed(spec, data, entries):
    """The object with another index, its checksum right."""
    return data[: -spec.index_nbytes] + index_bytes(np.array(entries, np.uint64))


DATA = write_shard(SPEC, [RECORD])
ROOM = 4 * CHUNK_NBYTES
GOOD = [[i * CHUNK_NBYTES, CHUNK_NBYTES] for i in range(4)]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([0, ROOM + 1], f"names bytes 0 to {ROOM + 1}, the chunks end at {ROOM}"),
        ([ROOM, 1], f"names bytes {ROOM} to {ROOM + 1}, the chunks end at {ROOM}"),
        ([ROOM + 1, 0], f"names bytes {ROOM + 1} to {ROOM + 1}"),
        ([2**63, 2**63], f"names bytes {2**63} to {2**64}"),
        ([MISSING - 1, 2], f"names bytes {MISSING - 1} to {MISSING + 1}"),
        ([0, MISSING], f"names bytes 0 to {MISSING}"),
        ([CHUNK_NBYTES, MISSING], f"names bytes {CHUNK_NBYTES} to {MISSING + CHUNK_NBYTES}"),
    ],
)
def test_an_entry_that_points_outside_is_refused(entry, message) -> None:
    """Its checksum is right, but sums beyond 2**64 and ends beyond the chunks are not believed."""
    data = sealed(SPEC, DATA, [GOOD[0], GOOD[1], entry, GOOD[3]])
    with pytest.raises(FormatError) as caught:
        read_whole(SPEC, data)
    assert str(caught.value).startswith(f"index entry 2 {message}")
    assert caught.value.kind == "index"


@pytest.mark.parametrize("entry", [[0, 0], [ROOM, 0], [1, CHUNK_NBYTES], [0, 2 * CHUNK_NBYTES], [0, 3]])
def test_an_entry_that_points_at_other_bytes_is_refused(entry) -> None:
    """Inside the object, but no inner chunk: the chunk's own checksum tells."""
    with pytest.raises(FormatError) as caught:
        read_whole(SPEC, sealed(SPEC, DATA, [entry, *GOOD[1:]]))
    assert caught.value.kind in ("checksum", "chunk")


def test_every_bit_of_the_index_counts() -> None:
    """A flipped one is found before an entry is used."""
    for bit in range(8 * SPEC.index_nbytes):
        data = bytearray(DATA)
        data[-1 - bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError, match="index's stored CRC32C differs") as caught:
            read_whole(SPEC, bytes(data))
        assert caught.value.kind == "index"


def test_a_truncated_object_is_refused() -> None:
    """Every length that a crash could leave, down to nothing; also when a resume reads it back."""
    for n in range(len(DATA)):
        with pytest.raises(FormatError) as caught:
            read_whole(SPEC, DATA[:n])
        assert caught.value.kind == "index"
        with pytest.raises(FormatError):
            OpenShard.from_object(ChunkEncoder(SPEC), (4, 6), DATA[:n], [0])
    with pytest.raises(FormatError, match="object of 10 bytes has no room for an index of 68 bytes"):
        read_whole(SPEC, DATA[:10])


@given(st.data())
@settings(max_examples=200)
def test_damage_is_found_or_does_no_harm(data) -> None:
    """Any bytes changed anywhere: FormatError, or the values are right."""
    found = bytearray(DATA)
    start = data.draw(st.integers(0, len(found)))
    found[start : start + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    try:
        values = read_whole(SPEC, bytes(found))
    except FormatError:
        return
    assert values[0].tolist() == RECORD.tolist()

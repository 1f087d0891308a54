"""Chunks that are damaged or lie: FormatError, never another error, and no memory for what is only claimed."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib
from typing import Any

import numcodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream.errors import FormatError
from mpistream.zarr3.codecs import PROFILES, ChunkCodec, crc32c, profile_chain

DTYPE = np.dtype("float32")
SHAPE = (6, 8)
CHUNK = np.arange(48, dtype=DTYPE).reshape(SHAPE)
RAW = CHUNK.tobytes()
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
BLOSC = {"name": "blosc", "configuration": {"typesize": 4, "cname": "zstd", "clevel": 3, "shuffle": "shuffle"}}
BARE: dict[str, Any] = {
    "plain": [],
    "lz4": [{"name": "blosc", "configuration": {**BLOSC["configuration"], "cname": "lz4"}}],  # type: ignore[dict-item]
    "blosclz": [{"name": "blosc", "configuration": {**BLOSC["configuration"], "cname": "blosclz"}}],  # type: ignore[dict-item]
    "blosc": [BLOSC],
    "zstd": [{"name": "zstd", "configuration": {"level": 1}}],
    "zstd with its own checksum": [{"name": "zstd", "configuration": {"level": 1, "checksum": True}}],
    "gzip": [{"name": "gzip", "configuration": {"level": 5}}],
}
# Chains without crc32c, so that the damage reaches the decompressors.
CODECS = {name: ChunkCodec([BYTES, *middle], DTYPE) for name, middle in BARE.items()}
each_profile = pytest.mark.parametrize("profile", PROFILES)
each_codec = pytest.mark.parametrize("name", CODECS)


def encoded(codec, chunk=CHUNK):
    return b"".join(map(bytes, codec.encode(chunk)))


def decode(data, codec, shape=SHAPE):
    """Decode, or return the kind of the FormatError; any other error goes on."""
    try:
        found = codec.decode(data, shape)
    except FormatError as error:
        return error.kind
    assert (found.dtype, found.shape) == (DTYPE, shape)
    return found


# ---- with the checksum -------------------------------------------------------------------------------


@each_profile
def test_no_flipped_bit_goes_unseen(profile) -> None:
    """Every single bit of a chunk, those of the checksum too."""
    codec = ChunkCodec(profile_chain(profile, DTYPE), DTYPE)
    data = encoded(codec)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError, match="stored CRC32C differs") as caught:
            codec.decode(bytes(flipped), SHAPE)
        assert caught.value.kind == "checksum"


@each_profile
def test_no_truncation_goes_unseen(profile) -> None:
    """Every length that is too short, down to nothing, and bytes behind the end."""
    codec = ChunkCodec(profile_chain(profile, DTYPE), DTYPE)
    data = encoded(codec)
    for n in range(len(data)):
        assert decode(data[:n], codec) in ("checksum", "chunk")  # four zero bytes are the checksum of nothing
    assert decode(data + b"\0", codec) == "checksum"
    with pytest.raises(FormatError, match="chunk of 3 bytes has no room for its checksum"):
        codec.decode(data[:3], SHAPE)


@each_profile
def test_a_good_chunk_of_another_size_is_refused(profile) -> None:
    """Its checksum is right, but it is not the chunk that the shape asks for."""
    codec = ChunkCodec(profile_chain(profile, DTYPE), DTYPE)
    data = encoded(codec)
    for shape in [(6, 7), (7, 8), (1,), (6, 8, 2)]:
        with pytest.raises(FormatError, match=f"chunk does not decode to {4 * int(np.prod(shape))} bytes") as caught:
            codec.decode(data, shape)
        assert caught.value.kind == "chunk"


# ---- without it --------------------------------------------------------------------------------------


@each_codec
@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_random_bytes_are_a_format_error(name, data) -> None:
    """No chunk that was not written decodes, but plain bytes of the right number."""
    found = decode(data, CODECS[name])
    if name == "plain" and len(data) == len(RAW):
        assert found.tobytes() == data
    else:
        assert found == "chunk"


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a chunk with bytes changed, cut out, put in or moved."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(found)))
        stop = min(start + draw(st.integers(0, 8)), len(found))
        new = draw(st.sampled_from(["change", "drop", "insert", "double", "extreme"]))
        if new == "change":
            found[start:stop] = draw(st.binary(min_size=stop - start, max_size=stop - start))
        elif new == "drop":
            del found[start:stop]
        elif new == "insert":
            found[start:start] = draw(st.binary(max_size=8))
        elif new == "double":
            found[start:start] = found[start:stop]
        else:
            found[start:stop] = draw(st.sampled_from([b"\0", b"\xff", b"\x80"])) * (stop - start)
    return bytes(found)


@each_codec
@given(st.data())
@settings(max_examples=300)
def test_a_mutated_chunk_is_a_chunk_or_a_format_error(name, data) -> None:
    """Without a checksum the values may be wrong, but nothing else happens."""
    changed = data.draw(mutated(encoded(CODECS[name])))
    found = decode(changed, CODECS[name])
    assert isinstance(found, np.ndarray) or found == "chunk"


@each_codec
def test_every_truncation_of_a_bare_chunk_is_a_format_error(name) -> None:
    """A short object is what a crash leaves: it never decodes."""
    data = encoded(CODECS[name])
    for n in range(len(data)):
        assert decode(data[:n], CODECS[name]) == "chunk"


# ---- sizes that lie ----------------------------------------------------------------------------------


def sealed(body):
    return body + crc32c(body)


def peak_nbytes(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("nbytes", "cbytes"),
    [(2**31, None), (2**32 - 1, None), (0, None), (191, None), (193, None), (None, 2**31), (None, 0), (None, 16)],
)
def test_a_blosc_header_that_lies_is_refused(nbytes, cbytes) -> None:
    """Both sizes of the header are compared before a byte is decoded; the checksum is right here."""
    codec = ChunkCodec([BYTES, BLOSC, {"name": "crc32c"}], DTYPE)
    body = bytearray(encoded(codec)[:-4])
    if nbytes is not None:
        body[4:8] = struct.pack("<I", nbytes)
    if cbytes is not None:
        body[12:16] = struct.pack("<I", cbytes)
    with pytest.raises(FormatError, match="its header claims") as caught:
        codec.decode(sealed(bytes(body)), SHAPE)
    assert caught.value.kind == "chunk"


def test_a_chunk_shorter_than_a_blosc_header_is_refused() -> None:
    """Fifteen bytes are no header."""
    with pytest.raises(FormatError, match="it has 15 bytes, less than a Blosc header"):
        CODECS["blosc"].decode(bytes(15), SHAPE)


def zstd_frame(content, claim, size_flag, *, single_segment, dictionary_flag=0):
    """A Zstandard frame with one raw block, byte by byte (RFC 8878, 3.1.1)."""
    descriptor = size_flag << 6 | single_segment << 5 | dictionary_flag
    header = b"\x28\xb5\x2f\xfd" + bytes([descriptor])
    header += b"" if single_segment else b"\x50"  # window of 1 MiB
    header += bytes((0, 1, 2, 4)[dictionary_flag])  # dictionary 0: none
    n = (single_segment, 2, 4, 8)[size_flag]
    header += (claim - (256 if n == 2 else 0)).to_bytes(n, "little") if n else b""
    return header + (len(content) << 3 | 1).to_bytes(3, "little") + content


@pytest.mark.parametrize("dictionary_flag", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("n_values", "size_flag", "single_segment"),
    [(48, 0, 1), (64, 1, 0), (64, 1, 1), (48, 2, 0), (48, 2, 1), (48, 3, 0), (48, 3, 1)],
)
def test_every_form_of_a_zstandard_header_is_read(n_values, size_flag, single_segment, dictionary_flag) -> None:
    """A content size of 1, 2, 4 or 8 bytes, behind a window and a dictionary's number."""
    content = np.arange(n_values, dtype="<f4").tobytes()
    frame = zstd_frame(content, len(content), size_flag, single_segment=single_segment, dictionary_flag=dictionary_flag)
    assert bytes(numcodecs.Zstd().decode(frame)) == content
    found = CODECS["zstd"].decode(frame, (n_values,))
    assert found.tolist() == list(range(n_values))
    for n in range(len(frame) - len(content)):
        assert decode(frame[:n], CODECS["zstd"], (n_values,)) == "chunk"


@pytest.mark.parametrize(
    ("claim", "size_flag", "message"),
    [
        (2**40, 3, "its header claims 1099511627776 bytes"),
        (2**64 - 1, 3, "its header claims 18446744073709551615 bytes"),
        (191, 2, "its header claims 191 bytes"),
    ],
)
def test_a_zstandard_header_that_lies_is_refused(claim, size_flag, message) -> None:
    """A frame that claims too much or too little is not decoded."""
    frame = zstd_frame(RAW, claim, size_flag, single_segment=0)
    with pytest.raises(FormatError, match=message) as caught:
        CODECS["zstd"].decode(frame, SHAPE)
    assert caught.value.kind == "chunk"


def test_a_zstandard_frame_without_a_size_is_decoded_if_it_fits() -> None:
    """Encoders that stream leave the size out: then the content must have the size that the shape asks for."""
    codec = CODECS["zstd"]
    assert codec.decode(zstd_frame(RAW, 0, 0, single_segment=0), SHAPE).tobytes() == RAW
    for content in (RAW[:-4], RAW + bytes(4), b""):
        assert decode(zstd_frame(content, 0, 0, single_segment=0), codec) == "chunk"


@pytest.mark.parametrize("content", [RAW[:-4], RAW + bytes(4), b""])
def test_a_zstandard_frame_with_another_content_than_it_claims_is_refused(content) -> None:
    """The header is as the shape wants it, the block is not."""
    assert decode(zstd_frame(content, len(RAW), 2, single_segment=0), CODECS["zstd"]) == "chunk"


@pytest.mark.parametrize("name", ["blosc", "zstd", "gzip"])
def test_two_chunks_in_one_are_refused(name) -> None:
    """What a compressor could take for one stream is not one chunk."""
    half = ChunkCodec([BYTES, *BARE[name]], DTYPE)
    first, second = encoded(half, CHUNK[:3]), encoded(half, CHUNK[3:])
    assert decode(first + second, CODECS[name]) == "chunk"


def test_a_gzip_bomb_is_not_unpacked() -> None:
    """Of 256 MiB in a few hundred KiB no more is unpacked than the chunk may have."""
    bomb = gzip.compress(bytes(2**28), 9, mtime=0)
    assert len(bomb) < 2**20
    peak = peak_nbytes(lambda: decode(bomb, CODECS["gzip"]))
    assert peak < 2 * len(bomb) + 2**16
    with pytest.raises(FormatError, match="chunk does not decode to 192 bytes: it gives more bytes"):
        CODECS["gzip"].decode(bomb, SHAPE)


@pytest.mark.parametrize("content", [RAW[:-1], b"", RAW + b"\0"])
def test_a_gzip_chunk_of_another_size_is_refused(content) -> None:
    """Too few or too many bytes; both are named."""
    n = "more" if len(content) > len(RAW) else len(content)
    with pytest.raises(FormatError, match=f"it gives {n} bytes") as caught:
        CODECS["gzip"].decode(gzip.compress(content), SHAPE)
    assert caught.value.kind == "chunk"


def test_a_stream_of_another_wrapper_is_no_gzip_chunk() -> None:
    """zlib and raw deflate hold the same values, but no reader of gzip takes them."""
    raw = zlib.compressobj(wbits=-15)
    for data in (zlib.compress(RAW), raw.compress(RAW) + raw.flush()):
        assert decode(data, CODECS["gzip"]) == "chunk"


def test_a_gzip_chunk_without_its_end_is_refused() -> None:
    """All values are there, but the checksum behind them is not."""
    data = gzip.compress(RAW)
    for n in range(1, 9):
        assert decode(data[:-n], CODECS["gzip"]) == "chunk"
    broken = bytearray(data)
    broken[-5] ^= 1
    assert decode(bytes(broken), CODECS["gzip"]) == "chunk"


# ---- strings -----------------------------------------------------------------------------------------

TEXT = np.dtypes.StringDType()
WORDS = np.array(["a", "bé", "", "long" * 9], TEXT)
PLAIN_TEXT = b"".join([b"\4\0\0\0", *(len(w.encode()).to_bytes(4, "little") + w.encode() for w in WORDS.tolist())])
TEXT_CODECS = {n: ChunkCodec([{"name": "vlen-utf8"}, *middle], TEXT) for n, middle in BARE.items()}


def decode_text(data, codec, shape=(4,)):
    try:
        found = codec.decode(data, shape)
    except FormatError as error:
        return error.kind
    assert (found.dtype, found.shape) == (TEXT, shape)
    return found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it ends at byte 0, amid its strings"),
        (b"\4\0\0", "it ends at byte 3, amid its strings"),
        (b"\5" + PLAIN_TEXT[1:], "it claims 5 strings, not 4"),
        (b"\xff\xff\xff\xff" + PLAIN_TEXT[4:], "it claims 4294967295 strings, not 4"),
        (PLAIN_TEXT[:-1], "its strings end at byte 60 of 59"),
        (PLAIN_TEXT + b"\0", "its strings end at byte 60 of 61"),
        (PLAIN_TEXT[:4] + b"\xff\xff\xff\xff" + PLAIN_TEXT[8:], "it ends at byte 60, amid its strings"),
        (PLAIN_TEXT.replace("é".encode(), b"\xc3\x28"), "'utf-8' codec can't decode byte 0xc3"),
        (PLAIN_TEXT.replace("é".encode(), b"\xed\xa0"), "'utf-8' codec can't decode byte 0xed"),
    ],
)
def test_strings_that_lie_are_refused(data, message) -> None:
    """Their number, each length and the end are compared with what is there, before any of it is believed."""
    with pytest.raises(FormatError, match=rf"chunk does not decode to \(4,\) strings: {message}") as caught:
        TEXT_CODECS["plain"].decode(data, (4,))
    assert caught.value.kind == "chunk"


@each_codec
@given(st.data())
@settings(max_examples=100)
def test_a_mutated_chunk_of_strings_is_a_chunk_or_a_format_error(name, data) -> None:
    """Whatever stands in it, headers of compressors too."""
    changed = data.draw(mutated(encoded(TEXT_CODECS[name], WORDS)))
    found = decode_text(changed, TEXT_CODECS[name])
    assert isinstance(found, np.ndarray) or found == "chunk"


@each_codec
def test_every_truncation_of_a_chunk_of_strings_is_a_format_error(name) -> None:
    """A short object never decodes."""
    data = encoded(TEXT_CODECS[name], WORDS)
    assert decode_text(data, TEXT_CODECS[name]).tolist() == WORDS.tolist()
    for n in range(len(data)):
        assert decode_text(data[:n], TEXT_CODECS[name]) == "chunk"


@pytest.mark.parametrize("name", ["blosc", "zstd", "gzip"])
def test_no_memory_for_strings_that_are_only_claimed(name) -> None:
    """More than 64 MiB and a count are not decoded, whatever a header says; the limit itself is."""
    limit = 2**26 + 4
    compressor = {"blosc": numcodecs.Blosc("zstd"), "zstd": numcodecs.Zstd(), "gzip": numcodecs.GZip(1)}[name]
    too_much = bytes(compressor.encode(bytes(limit + 1)))
    assert peak_nbytes(lambda: decode_text(too_much, TEXT_CODECS[name])) < 2**20
    with pytest.raises(FormatError, match=f"it claims {limit + 1} bytes, at most {limit} are read"):
        TEXT_CODECS[name].decode(too_much, (4,))
    at_limit = bytes(compressor.encode(b"\1\0\0\0" + (limit - 8).to_bytes(4, "little") + b"a" * (limit - 8)))
    assert len(TEXT_CODECS[name].decode(at_limit, (1,)).item()) == limit - 8

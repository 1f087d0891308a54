"""Codec chains: our own bytes, those of zarr-python, and what a chain must look like."""

from __future__ import annotations

import copy
from typing import Any

import numcodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpistream.errors import FormatError, SchemaError
from mpistream.names import DTYPES
from mpistream.zarr3.codecs import MAX_CHUNK_NBYTES, PROFILES, ChunkCodec, crc32c, profile_chain
from tests.support.zarr_bytes import ZarrArray

SHAPE = (5, 7)
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
CRC = {"name": "crc32c"}
GZIP = {"name": "gzip", "configuration": {"level": 4}}
ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": True}}


def blosc(**changes: Any) -> dict[str, Any]:
    configuration = {"typesize": 4, "cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0, **changes}
    return {"name": "blosc", "configuration": configuration}


each_profile = pytest.mark.parametrize("profile", PROFILES)
each_dtype = pytest.mark.parametrize("name", DTYPES)
# What other writers use, beyond the profiles.
CHAINS: dict[str, list[dict[str, Any]]] = {
    "plain": [LITTLE],
    "big": [BIG],
    "big, crc32c": [BIG, CRC],
    "gzip": [LITTLE, GZIP],
    "big, gzip, crc32c": [BIG, GZIP, CRC],
    "zstd with its own checksum": [LITTLE, ZSTD],
    "zstd, crc32c": [LITTLE, ZSTD, CRC],
    "blosc without shuffle": [LITTLE, blosc(shuffle="noshuffle")],
    "blosc lz4hc": [LITTLE, blosc(cname="lz4hc", shuffle="bitshuffle"), CRC],
    "blosc zlib": [LITTLE, blosc(cname="zlib", blocksize=64), CRC],
    "blosc blosclz": [LITTLE, blosc(cname="blosclz"), CRC],
}
each_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)


def values(dtype, shape=SHAPE):
    """Numbers of every byte pattern; NaN and both zeros among them."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(3)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def encoded(codec, chunk):
    return b"".join(bytes(piece) for piece in codec.encode(np.ascontiguousarray(chunk, codec.stored_dtype)))


# ---- our own bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"", 0), (b"123456789", 0xE3069283), (b"\0" * 32, 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_crc32c_has_the_values_of_its_standard(data, value) -> None:
    """RFC 3720, appendix B.4, as four little-endian bytes."""
    assert crc32c(data) == value.to_bytes(4, "little")
    assert crc32c(np.frombuffer(data, np.uint8)) == value.to_bytes(4, "little")


@each_profile
@each_dtype
def test_every_profile_gives_back_every_dtype_bitwise(profile, name) -> None:
    """NaN payloads, signs of zero and every bit pattern come back in native byte order."""
    dtype = np.dtype(name)
    codec = ChunkCodec(profile_chain(profile, dtype), dtype)
    found = codec.decode(encoded(codec, values(dtype)), SHAPE)
    assert (found.dtype, found.shape) == (dtype, SHAPE)
    assert found.tobytes() == values(dtype).tobytes()


@each_chain
@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=4, max_side=5)))
def test_every_chain_gives_back_random_chunks(chain, chunk) -> None:
    """Of any shape, bitwise."""
    codec = ChunkCodec(chain, chunk.dtype)
    assert codec.decode(encoded(codec, chunk), chunk.shape).tobytes() == chunk.tobytes()


def test_the_chains_of_the_profiles() -> None:
    """Zarr v3 JSON; one byte has no byte order, and bool gets bit shuffle."""
    assert profile_chain("fast", np.dtype("float32")) == [LITTLE, blosc(), CRC]
    assert profile_chain("fast", np.dtype("bool")) == [
        {"name": "bytes"},
        blosc(typesize=1, shuffle="bitshuffle"),
        CRC,
    ]
    assert profile_chain("compact", np.dtype("int8")) == [
        {"name": "bytes"},
        blosc(typesize=1, cname="zstd", clevel=3),
        CRC,
    ]
    assert profile_chain("diagnostic", np.dtype("float64"))[1] == blosc(typesize=8, cname="zstd", clevel=5)
    assert profile_chain("checkpoint", np.dtype("complex128"))[1] == blosc(typesize=16, cname="zstd", clevel=7)
    assert profile_chain("wasm", np.dtype("float64")) == [
        LITTLE,
        {"name": "zstd", "configuration": {"level": 5, "checksum": False}},
        CRC,
    ]
    assert profile_chain("none", np.dtype("float64")) == [LITTLE, CRC]


def test_an_unknown_profile_is_refused_with_those_there_are() -> None:
    """The names stand in the message."""
    with pytest.raises(SchemaError) as caught:
        profile_chain("best", np.dtype("float32"))
    assert str(caught.value) == (
        "codec 'best' is unknown; use one of fast, compact, diagnostic, checkpoint, wasm, series, none"
    )
    assert caught.value.kind == "codec"


@each_profile
def test_the_chunk_may_be_overwritten_after_the_call(profile) -> None:
    """Encoded bytes share nothing with the caller's memory."""
    dtype = np.dtype("float32")
    codec = ChunkCodec(profile_chain(profile, dtype), dtype)
    chunk = np.arange(35, dtype=dtype).reshape(SHAPE)
    pieces = codec.encode(chunk)
    chunk.view(np.uint8)[...] = 0xFF
    found = codec.decode(b"".join(map(bytes, pieces)), SHAPE)
    assert found.tolist() == np.arange(35).reshape(SHAPE).tolist()


def test_what_a_configuration_leaves_out_has_a_default() -> None:
    """The typesize is the item's, Blosc chooses the block size, and zstd has no checksum of its own."""
    dtype = np.dtype("float64")
    short = {"cname": "zstd", "clevel": 3, "shuffle": "shuffle"}
    for bare, full in (
        ({"name": "blosc", "configuration": short}, blosc(**short, typesize=8, blocksize=0)),
        (
            {"name": "zstd", "configuration": {"level": 3}},
            {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
        ),
    ):
        chunk = np.arange(100_000.0)
        assert encoded(ChunkCodec([LITTLE, bare], dtype), chunk) == encoded(ChunkCodec([LITTLE, full], dtype), chunk)


def test_every_inner_chunk_ends_with_its_checksum() -> None:
    """All profiles have crc32c last: four bytes over all that stand before them."""
    dtype = np.dtype("float32")
    for profile in PROFILES:
        codec = ChunkCodec(profile_chain(profile, dtype), dtype)
        data = encoded(codec, values(dtype))
        assert codec.has_crc
        assert data[-4:] == crc32c(data[:-4])
    assert not ChunkCodec([LITTLE], dtype).has_crc


def test_the_stored_dtype_has_the_order_of_the_bytes() -> None:
    """Little-endian without a word; a byte has none."""
    dtype = np.dtype("float32")
    assert ChunkCodec([LITTLE], dtype).stored_dtype == np.dtype("<f4")
    assert ChunkCodec([BIG], dtype).stored_dtype == np.dtype(">f4")
    assert ChunkCodec([{"name": "bytes"}], dtype).stored_dtype == np.dtype("<f4")
    assert ChunkCodec([BIG], np.dtype("uint8")).stored_dtype == np.dtype("uint8")
    assert MAX_CHUNK_NBYTES == 2**31 - 1 - 16


# ---- zarr-python -------------------------------------------------------------------------------------


def exchange(chain, dtype):
    """Compare both ways: its chunk is decoded here, our chunk is read there."""
    chunk = values(dtype)
    theirs = ZarrArray(SHAPE, dtype, chain, chunk_shape=SHAPE)
    theirs.array[...] = chunk
    data = theirs[0, 0]
    assert data is not None
    codec = ChunkCodec(chain, dtype)
    assert codec.decode(data, SHAPE).tobytes() == chunk.tobytes()
    other = values(dtype)[::-1]
    theirs[0, 0] = encoded(codec, other)
    assert theirs.array[...].tobytes() == other.tobytes()


@each_profile
@each_dtype
def test_zarr_python_and_we_read_each_others_profiles(profile, name) -> None:
    """Every profile and dtype, bitwise."""
    exchange(profile_chain(profile, np.dtype(name)), np.dtype(name))


@each_chain
def test_zarr_python_and_we_read_each_others_chains(chain) -> None:
    """Chains that are not ours, too: big-endian, gzip, without checksum."""
    exchange(chain, np.dtype("float32"))


# ---- chains that are not spoken ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ([], "codec chain : only bytes, one of blosc, zstd or gzip, and crc32c are known"),
        ([CRC], "codec chain crc32c: only"),
        ([blosc(), CRC], "codec chain blosc -> crc32c: only"),
        ([LITTLE, GZIP, ZSTD], "codec chain bytes -> gzip -> zstd: only"),
        ([LITTLE, CRC, GZIP], "codec chain bytes -> crc32c -> gzip: only"),
        ([LITTLE, {"name": "lzma"}], "codec chain bytes -> lzma: only"),
        ([{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE], "codec chain transpose -> bytes: only"),
        ([LITTLE, "crc32c"], "codec 'crc32c': not an object with a name"),
        ([LITTLE, {}], "codec {}: not an object with a name"),
        ([LITTLE, {"name": 5}], "codec {'name': 5}: not an object with a name"),
        ([LITTLE, {"name": "gzip", "configuration": [4]}], "codec 'gzip': configuration is not an object"),
        ([{"name": "bytes", "configuration": {"endian": "middle"}}], "codec 'bytes': endian 'middle' is neither"),
        ([{"name": "bytes", "configuration": {"name": "u"}}], "codec 'bytes': unknown configuration ['name']"),
        ([LITTLE, blosc(nthreads=4)], "codec 'blosc': unknown configuration ['nthreads']"),
        ([LITTLE, blosc(cname="best")], "codec 'blosc': bad configuration"),
        ([LITTLE, blosc(shuffle="mix")], "codec 'blosc': bad configuration"),
        ([LITTLE, blosc(clevel="x")], "codec 'blosc': bad configuration"),
        ([LITTLE, blosc(clevel=None)], "codec 'blosc': bad configuration"),
        ([LITTLE, {"name": "blosc"}], "codec 'blosc': bad configuration"),
        ([LITTLE, {"name": "zstd"}], "codec 'zstd': bad configuration"),
        ([LITTLE, {"name": "zstd", "configuration": {"level": float("inf")}}], "codec 'zstd': bad configuration"),
        ([LITTLE, {"name": "gzip", "configuration": {"level": None}}], "codec 'gzip': bad configuration"),
    ],
)
def test_a_chain_that_is_not_spoken_is_a_format_error(chain, message) -> None:
    """Kind ``codec``, with the chain or the codec, for which a reader may turn to zarr-python."""
    with pytest.raises(FormatError) as caught:
        ChunkCodec(chain, np.dtype("float32"))
    assert message in str(caught.value)
    assert caught.value.kind == "codec"


@pytest.mark.parametrize(
    "codec",
    [
        blosc(clevel=10),
        blosc(clevel=-1),
        blosc(clevel=5.7),
        blosc(typesize=0),
        blosc(typesize=2**40),
        blosc(blocksize=2**31),
        blosc(cname="snappy"),
        {"name": "gzip", "configuration": {"level": 10}},
        {"name": "gzip", "configuration": {"level": -1}},
        {"name": "zstd", "configuration": {"level": 10**30}},
        {"name": "zstd", "configuration": {"level": "5"}},
    ],
    ids=str,
)
def test_a_configuration_that_could_not_encode_is_refused_at_once(codec) -> None:
    """Not by the first record, on every rank."""
    with pytest.raises(FormatError, match=f"codec '{codec['name']}': bad configuration") as caught:
        ChunkCodec([LITTLE, codec], np.dtype("float32"))
    assert caught.value.kind == "codec"


odd: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3) | st.just([]) | st.just({})
)


@given(st.sampled_from([c for c in CHAINS.values() if len(c) > 1]), st.data(), st.sampled_from(DTYPES))
def test_no_chain_ends_in_another_error(chain, data, name) -> None:
    """One value of a good chain replaced by any JSON: a codec that works, or FormatError."""
    chain = copy.deepcopy(chain)
    codec = data.draw(st.sampled_from(chain))
    inside = codec.get("configuration")
    place = data.draw(st.sampled_from([codec, inside])) if inside else codec
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(odd)
    dtype = np.dtype(name)
    try:
        spoken = ChunkCodec(chain, dtype)
    except FormatError as error:
        assert error.kind == "codec"
        return
    chunk = np.ones(3, spoken.stored_dtype)
    assert spoken.decode(encoded(spoken, chunk), (3,)).tolist() == [1, 1, 1]


# ---- strings -----------------------------------------------------------------------------------------

TEXT = np.dtypes.StringDType()
WORDS = ["", "a", "bé", "\0", "x\0", "𝄞", "long" * 1000]
VLEN: dict[str, Any] = {"name": "vlen-utf8"}


def test_the_chains_of_strings() -> None:
    """Of any length they are no bytes to be shuffled; of fixed length a character is what shuffle takes apart."""
    assert profile_chain("fast", TEXT) == [VLEN, blosc(typesize=1, shuffle="noshuffle"), CRC]
    assert profile_chain("none", TEXT) == [VLEN, CRC]
    assert profile_chain("fast", np.dtype("U99")) == [LITTLE, blosc(), CRC]


@pytest.mark.parametrize("middle", [[], [GZIP], [ZSTD], [blosc(typesize=1)]], ids=["plain", "gzip", "zstd", "blosc"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_strings_of_any_length_come_back(middle, is_sealed) -> None:
    """Empty, long, beyond the basic plane and with NUL, in any shape; the bytes are numcodecs' own."""
    codec = ChunkCodec([VLEN, *middle, *([CRC] if is_sealed else [])], TEXT)
    chunk = np.array([WORDS, WORDS[::-1]], TEXT)
    data = encoded(codec, chunk)
    found = codec.decode(data, (2, len(WORDS)))
    assert found.dtype == TEXT
    assert found.tolist() == chunk.tolist()
    if not middle:
        body = data[:-4] if is_sealed else data
        assert body == numcodecs.VLenUTF8().encode(np.array(WORDS + WORDS[::-1], object))


@each_profile
def test_every_profile_gives_back_strings(profile) -> None:
    """Of fixed and of any length; an array without dims is one string."""
    for dtype in (TEXT, np.dtype("U64")):
        codec = ChunkCodec(profile_chain(profile, dtype), dtype)
        for words in (["a", "bé", ""], "abc"):
            chunk = np.array(words, dtype)
            found = codec.decode(encoded(codec, chunk), chunk.shape)
            assert (found.dtype, found.tolist()) == (dtype, words)


def test_strings_and_numbers_have_chains_of_their_own() -> None:
    """vlen-utf8 is for strings of any length alone, and they have no other."""
    for chain, dtype, message in (
        ([LITTLE], TEXT, "codec chain bytes: only vlen-utf8, one of blosc"),
        ([VLEN], np.dtype("f4"), "codec chain vlen-utf8: only bytes, one of blosc"),
        ([VLEN], np.dtype("U3"), "codec chain vlen-utf8: only bytes, one of blosc"),
    ):
        with pytest.raises(FormatError, match=message):
            ChunkCodec(chain, dtype)

"""The codec chain of an inner chunk: Zarr v3 JSON on one side, numcodecs on the other.

Rules of this room: a chain is ``bytes``, or ``vlen-utf8`` for strings of any length, then at most one
compressor, then at most one ``crc32c``.
That is what we write, and what we read ourselves; any other chain is a `FormatError` of kind
``codec``, for which a reader may turn to zarr-python. Decoding treats its input as untrusted: the
checksum is compared first, and the size that a compressed chunk claims is compared with the size its
shape allows before a byte is decoded.

Sources: Zarr v3 core specification and the codec specifications ``bytes`` 1.0, ``blosc`` 1.0,
``zstd``, ``gzip`` 1.0, ``crc32c`` 1.0 and ``vlen-utf8``.
"""

from __future__ import annotations

import math
import operator
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import numcodecs
import numcodecs.blosc
import numcodecs.zstd
import numpy as np
from numpy.typing import NDArray

from mpistream.errors import FormatError, SchemaError
from mpistream.strings import MAX_TEXT_NBYTES

__all__ = ["MAX_CHUNK_NBYTES", "PROFILES", "ChunkCodec", "crc32c", "profile_chain", "vlen_utf8"]

# A rank is one core's worth of work: with Blosc's own pool, N ranks on N cores would run N x N threads.
# zarr-python sets the same switch for its own reasons.
numcodecs.blosc.use_threads = False

# Blosc 1 holds sizes in 32 bits and adds at most 16 bytes (c-blosc README_HEADER.rst).
MAX_CHUNK_NBYTES = 2**31 - 1 - 16

# name -> (compressor, level, shuffle). "fast" was chosen by measurement over eight fields: lz4-5 encodes at
# about 1,900 MB/s a core for the ratio (1.65) that zstd-1 (1.72) reaches at 685 MB/s.
PROFILES: dict[str, tuple[str, int, str] | None] = {
    "fast": ("lz4", 5, "shuffle"),
    "compact": ("zstd", 3, "shuffle"),
    "diagnostic": ("zstd", 5, "shuffle"),
    "checkpoint": ("zstd", 7, "shuffle"),
    "wasm": ("plain-zstd", 5, ""),
    "series": ("plain-zstd", 3, ""),
    "none": None,
}

_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
_BLOSC_NAMES = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")  # snappy is not in numcodecs' build
_CRC_NBYTES = 4
_UINT8 = np.dtype(np.uint8)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOSC_HEADER = struct.Struct("<4xIII")  # version, versionlz, flags, typesize; nbytes, blocksize, cbytes
_LENGTH = struct.Struct("<I")


def crc32c(data: bytes | NDArray[np.uint8]) -> bytes:
    """Return the CRC32C of ``data`` as the four little-endian bytes that the ``crc32c`` codec appends.

    Not collective.
    """
    return int(google_crc32c.value(data)).to_bytes(_CRC_NBYTES, "little")


def vlen_utf8(cells: NDArray[Any]) -> bytes:
    """Return what the ``vlen-utf8`` codec makes of strings: their number, then of each its length and its UTF-8.

    Not collective.

    Parameters
    ----------
    cells
        Strings, in C order.
    """
    parts = [_LENGTH.pack(cells.size)]
    for cell in cells.reshape(-1).tolist():
        data = cell.encode()
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def _strings_of(data: bytes, n_cells: int) -> list[str]:
    """Return the strings of `vlen_utf8`.

    Raises
    ------
    ValueError
        For anything else than so many strings and nothing behind them.
    """

    def length_at(at: int) -> int:
        if len(data) < at + _LENGTH.size:
            raise ValueError(f"it ends at byte {len(data)}, amid its strings")
        return int(_LENGTH.unpack_from(data, at)[0])

    if length_at(0) != n_cells:
        raise ValueError(f"it claims {length_at(0)} strings, not {n_cells}")
    cells, at = [], _LENGTH.size
    for _ in range(n_cells):
        start = at + _LENGTH.size
        at = start + length_at(at)
        cells.append(data[start:at].decode())
    if at != len(data):
        raise ValueError(f"its strings end at byte {at} of {len(data)}")
    return cells


def _itemsize(dtype: np.dtype[Any]) -> int:
    """Return the size of what a shuffle may take apart: of text a character."""
    return {"U": 4, "T": 1}.get(dtype.kind, dtype.itemsize)


def profile_chain(profile: str, dtype: np.dtype[Any], *, is_rounded: bool = False) -> list[dict[str, Any]]:
    """Return the codec chain, as Zarr v3 JSON, of a profile for a dtype.

    Not collective.

    Parameters
    ----------
    profile
        A key of `PROFILES`.
    dtype
        The dtype on disk; bool gets bit shuffle, where neighbouring values share whole bit planes.
    is_rounded
        Whether mantissas are rounded: bit shuffle, too, gathers the bits that are zero in all of them.

    Raises
    ------
    SchemaError
        For an unknown profile, naming those there are.
    """
    if profile not in PROFILES:
        raise SchemaError(f"codec {profile!r} is unknown; use one of {', '.join(PROFILES)}", kind="codec")
    chain: list[dict[str, Any]] = [{"name": _serializer(dtype)}]
    if _itemsize(dtype) > 1:
        chain[0]["configuration"] = {"endian": "little"}
    choice = PROFILES[profile]
    if choice is not None:
        name, level, shuffle = choice
        if name == "plain-zstd":
            chain.append({"name": "zstd", "configuration": {"level": level, "checksum": False}})
        else:
            blosc = {
                "typesize": _itemsize(dtype),
                "cname": name,
                "clevel": level,
                "shuffle": "bitshuffle"
                if is_rounded
                else {"b": "bitshuffle", "T": "noshuffle"}.get(dtype.kind, shuffle),
                "blocksize": 0,
            }
            chain.append({"name": "blosc", "configuration": blosc})
    chain.append({"name": "crc32c"})
    return chain


def _serializer(dtype: np.dtype[Any]) -> str:
    return "vlen-utf8" if dtype.kind == "T" else "bytes"


_CONFIGURATIONS: dict[str, set[str]] = {
    "bytes": {"endian"},
    "vlen-utf8": set(),
    "blosc": {"typesize", "cname", "clevel", "shuffle", "blocksize"},
    "zstd": {"level", "checksum"},
    "gzip": {"level"},
    "crc32c": set(),
}


def _part(codec: Any) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(codec, Mapping) or not isinstance(codec.get("name"), str):
        raise FormatError(f"codec {codec!r}: not an object with a name", kind="codec")
    configuration = codec.get("configuration", {})
    if not isinstance(configuration, Mapping):
        raise FormatError(f"codec {codec['name']!r}: configuration is not an object", kind="codec")
    # Zarr v3 core, "Extensions": what a configuration says and nobody knows may not be passed over.
    unknown = sorted(set(configuration) - _CONFIGURATIONS.get(codec["name"], set(configuration)))
    if unknown:
        raise FormatError(f"codec {codec['name']!r}: unknown configuration {unknown}", kind="codec")
    return codec["name"], configuration


def _compressor(name: str, configuration: Mapping[str, Any], itemsize: int) -> Any:
    """Return the numcodecs codec of one compressor of the chain."""

    def number(key: str, low: int, high: int, default: int | None = None) -> int:
        value = operator.index(configuration[key] if default is None else configuration.get(key, default))
        if not low <= value <= high:
            raise ValueError(f"{key} {value} is not in {low} to {high}")
        return value

    # The ranges are those of the codecs' specifications and of the libraries behind them.
    try:
        if name == "blosc":
            if configuration["cname"] not in _BLOSC_NAMES:
                raise ValueError(f"cname {configuration['cname']!r}")
            return numcodecs.Blosc(
                cname=configuration["cname"],
                clevel=number("clevel", 0, 9),
                shuffle=_SHUFFLES[configuration["shuffle"]],
                blocksize=number("blocksize", 0, MAX_CHUNK_NBYTES, 0),
                typesize=number("typesize", 1, 255, itemsize),
            )
        if name == "zstd":
            return numcodecs.Zstd(
                level=number("level", -131072, 22), checksum=bool(configuration.get("checksum", False))
            )
        return numcodecs.GZip(level=number("level", 0, 9))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"codec {name!r}: bad configuration, {error!r}", kind="codec") from error


def _zstd_content_nbytes(header: bytes) -> int | None:
    """Return the content size that a Zstandard frame claims, None when it claims none (RFC 8878, 3.1.1.1)."""
    if len(header) <= len(_ZSTD_MAGIC) or not header.startswith(_ZSTD_MAGIC):
        return None
    descriptor = header[4]
    size_flag, single_segment, dictionary_flag = descriptor >> 6, descriptor >> 5 & 1, descriptor & 3
    n = (single_segment, 2, 4, 8)[size_flag]
    start = 5 + (1 - single_segment) + (0, 1, 2, 4)[dictionary_flag]
    if n == 0 or len(header) < start + n:
        return None
    return int.from_bytes(header[start : start + n], "little") + (256 if n == 2 else 0)  # noqa: PLR2004


class ChunkCodec:
    """The codec chain of one array's inner chunks.

    Parameters
    ----------
    chain
        Zarr v3 JSON, as in an array's ``codecs``.
    dtype
        The array's dtype in native byte order.

    Raises
    ------
    FormatError
        Kind ``codec`` for a chain that this room does not speak.
    """

    def __init__(self, chain: Sequence[Mapping[str, Any]], dtype: np.dtype[Any]) -> None:
        parts = [_part(c) for c in chain]
        names = [name for name, _ in parts]
        self.has_crc = names[-1:] == ["crc32c"]
        middle = parts[1:-1] if self.has_crc else parts[1:]
        head = _serializer(dtype)
        if names[:1] != [head] or len(middle) > 1 or any(n not in ("blosc", "zstd", "gzip") for n, _ in middle):
            raise FormatError(
                f"codec chain {' -> '.join(names)}: only {head}, one of blosc, zstd or gzip, and crc32c are known",
                kind="codec",
            )
        endian = parts[0][1].get("endian", "little")
        if endian not in ("little", "big"):
            raise FormatError(f"codec 'bytes': endian {endian!r} is neither little nor big", kind="codec")
        self.dtype = dtype
        self._is_text = dtype.kind == "T"
        self._stored = dtype if self._is_text else dtype.newbyteorder("<" if endian == "little" else ">")
        self._name = middle[0][0] if middle else ""
        self._compressor = _compressor(*middle[0], _itemsize(dtype)) if middle else None

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype with the byte order of the stored bytes."""
        return self._stored

    @property
    def is_text(self) -> bool:
        """Whether the chunks hold strings of any length."""
        return self._is_text

    def decodes_into(self, out: NDArray[Any]) -> bool:
        """Return whether `decode_into` takes an array as it is.

        Not collective.
        """
        return not self._is_text and out.dtype == self._stored and out.flags.c_contiguous

    def max_nbytes(self, shape: tuple[int, ...]) -> int:
        """Return more bytes than an encoded chunk of a shape has.

        Not collective. What can't be compressed grows by less than an eighth: blosc adds 16 bytes, zstd 1 in 256 and
        gzip 5 in 16,384, each and some for headers.
        """
        raw = MAX_TEXT_NBYTES if self._is_text else math.prod(shape) * self._stored.itemsize
        return raw + raw // 8 + 1024

    def encode(self, chunk: NDArray[Any], *, is_borrowed: bool = False) -> list[Any]:
        """Return the encoded chunk as buffers to be written one after the other.

        Not collective.

        Parameters
        ----------
        chunk
            C-contiguous, of `stored_dtype`. It may be overwritten as soon as the call returns.
        is_borrowed
            It stays as it is until the buffers are written: without a compressor one of them is the chunk itself.
        """
        raw = np.frombuffer(vlen_utf8(chunk), np.uint8) if self._is_text else chunk.ravel().view(_UINT8)
        if self._compressor is not None:
            data = self._compressor.encode(raw)
        else:
            data = raw if is_borrowed else raw.tobytes()
        return [data, crc32c(data)] if self.has_crc else [data]

    def decode(self, data: bytes | NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the chunk that ``data`` encodes, in native byte order.

        Not collective.

        Parameters
        ----------
        data
            The whole encoded chunk.
        shape
            The shape of the chunk; nothing of another size is decoded.

        Raises
        ------
        FormatError
            Kind ``checksum`` when the CRC32C differs, kind ``chunk`` when the chunk does not decode
            to the size that the shape asks for.
        """
        body = self._checked(data)
        if self._is_text:
            return self._decode_text(body, shape)
        out = np.empty(shape, self._stored)
        self._decode_body(body, out)
        return out.astype(self.dtype, copy=False)

    def decode_into(self, data: bytes | NDArray[np.uint8], out: NDArray[Any]) -> None:
        """Decode a chunk into an array.

        Not collective.

        Parameters
        ----------
        data
            The whole encoded chunk.
        out
            C-contiguous, of `stored_dtype`, of the shape of the chunk; no strings. After an error its cells are
            anything.

        Raises
        ------
        FormatError
            As `decode`.
        """
        self._decode_body(self._checked(data), out)

    def _checked(self, data: bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return what the compressor made, once its checksum is verified."""
        body = np.frombuffer(data, np.uint8)
        if not self.has_crc:
            return body
        if len(data) < _CRC_NBYTES:
            raise FormatError(f"chunk of {len(data)} bytes has no room for its checksum", kind="checksum")
        body, stored = body[:-_CRC_NBYTES], body[-_CRC_NBYTES:]
        if crc32c(body) != stored.tobytes():
            raise FormatError("the stored CRC32C differs from that of the data", kind="checksum")
        return body

    def _decode_body(self, body: NDArray[np.uint8], out: NDArray[Any]) -> None:
        try:
            self._decompress(body, out.reshape(-1).view(np.uint8))
        except (RuntimeError, ValueError, zlib.error) as error:
            raise FormatError(f"chunk does not decode to {out.nbytes} bytes: {error}", kind="chunk") from error

    def _decode_text(self, body: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[Any]:
        try:
            nbytes = self._claimed_nbytes(body)
            if nbytes > MAX_TEXT_NBYTES + _LENGTH.size:
                raise ValueError(f"it claims {nbytes} bytes, at most {MAX_TEXT_NBYTES + _LENGTH.size} are read")
            raw = np.empty(nbytes, np.uint8)
            self._decompress(body, raw)
            cells = _strings_of(raw.tobytes(), math.prod(shape))
        except (RuntimeError, ValueError, zlib.error) as error:
            raise FormatError(f"chunk does not decode to {shape} strings: {error}", kind="chunk") from error
        return np.array(cells, self.dtype).reshape(shape)

    def _claimed_nbytes(self, body: NDArray[np.uint8]) -> int:
        """Return the size that a chunk claims to decode to, where its shape does not say it."""
        if self._name == "":
            return body.nbytes
        if self._name == "zstd":
            return _zstd_content_nbytes(body[:18].tobytes()) or 0
        # Blosc has it behind four bytes, gzip at the end (RFC 1952, ISIZE); what is too short decodes to nothing.
        return int.from_bytes((body[4:8] if self._name == "blosc" else body[-4:]).tobytes(), "little")

    def _decompress(self, body: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        if self._name == "":
            if body.nbytes != out.nbytes:
                raise ValueError(f"it has {body.nbytes} bytes")
            out[...] = body
        elif self._name == "blosc":
            if body.nbytes < _BLOSC_HEADER.size:
                raise ValueError(f"it has {body.nbytes} bytes, less than a Blosc header")
            nbytes, _, cbytes = _BLOSC_HEADER.unpack(body[: _BLOSC_HEADER.size].tobytes())
            if nbytes != out.nbytes or cbytes != body.nbytes:
                raise ValueError(f"its header claims {cbytes} -> {nbytes} bytes, it has {body.nbytes}")
            numcodecs.blosc.decompress(body, out)
        elif self._name == "zstd":
            # numcodecs fills only the front of a buffer that is larger than the claimed content, without a word; of
            # a frame that claims nothing, as others write them, it compares the size itself.
            claim = _zstd_content_nbytes(body[:18].tobytes())
            if claim not in (None, out.nbytes) or body[:4].tobytes() != _ZSTD_MAGIC:
                raise ValueError(f"its header claims {claim} bytes")
            numcodecs.zstd.decompress(body, out)
        else:
            inflate = zlib.decompressobj(wbits=31)  # 31: gzip wrapper, largest window (zlib manual, inflateInit2)
            plain = inflate.decompress(body.tobytes(), out.nbytes + 1)
            if len(plain) != out.nbytes or not inflate.eof:
                raise ValueError(f"it gives {'more' if len(plain) > out.nbytes else len(plain)} bytes")
            out[...] = np.frombuffer(plain, np.uint8)

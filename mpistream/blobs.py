"""Blob packs: the small rank-local payloads of one writer and commit, in one object.

A pack is payloads, one after the other; then its index, JSON; then the bytes of the index as 8 bytes
little-endian and the index's CRC32C. Each entry of the index has key, scope, offset, nbytes and the
payload's own CRC32C.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpistream.errors import FormatError
from mpistream.manifest import MAX_JSON_NBYTES, parse_json
from mpistream.zarr3.codecs import crc32c

__all__ = ["MAX_BLOB_NBYTES", "BlobEntry", "Scope", "pack_pieces", "read_payload", "read_pack_index"]

MAX_BLOB_NBYTES = 64 * 1024 * 1024

Scope = int | str
"""The record a blob belongs to, or ``"static"``."""

_FOOTER_NBYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobEntry:
    """Where one payload lies in its pack."""

    key: str
    scope: Scope
    offset: int
    nbytes: int
    crc32c: str


def pack_pieces(blobs: Mapping[tuple[Scope, str], bytes]) -> list[bytes]:
    """Return a pack, as buffers to be written one after the other.

    Not collective.
    """
    entries, offset = [], 0
    for (scope, key), payload in blobs.items():
        entries.append([key, scope, offset, len(payload), crc32c(payload).hex()])
        offset += len(payload)
    index = json.dumps({"blobs": entries}, separators=(",", ":")).encode()
    return [*blobs.values(), index, len(index).to_bytes(8, "little") + crc32c(index)]


def read_pack_index(key: str, nbytes: int, read: Callable[[int, int], bytes]) -> list[BlobEntry]:
    """Return the entries of a pack.

    Not collective.

    Parameters
    ----------
    key
        The pack, for messages.
    nbytes
        Bytes of the object.
    read
        ``read(offset, nbytes) -> bytes`` over the object.

    Raises
    ------
    FormatError
        Kind ``blob``, with the key.
    """
    footer = read(max(nbytes - _FOOTER_NBYTES, 0), _FOOTER_NBYTES)
    n = int.from_bytes(footer[:8], "little")
    if len(footer) < _FOOTER_NBYTES or n > min(nbytes - _FOOTER_NBYTES, MAX_JSON_NBYTES):
        raise FormatError(f"{key}: a pack of {nbytes} bytes with an index of {n} bytes", kind="blob")
    start = nbytes - _FOOTER_NBYTES - n
    data = read(start, n)
    if crc32c(data) != footer[8:]:
        raise FormatError(f"{key}: the index's stored CRC32C differs from that of the data", kind="blob")
    try:
        entries = [
            BlobEntry(
                key=str(k), scope=s if s == "static" else int(s), offset=int(o), nbytes=int(size), crc32c=str(crc)
            )
            for k, s, o, size, crc in parse_json(key, data)["blobs"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{key}: damaged index: {type(error).__name__}: {error}", kind="blob") from error
    if any(not 0 <= e.offset <= e.offset + e.nbytes <= start for e in entries):
        raise FormatError(f"{key}: an entry of the index points outside the pack", kind="blob")
    if largest := max((e.nbytes for e in entries if e.nbytes > MAX_BLOB_NBYTES), default=0):
        raise FormatError(f"{key}: a blob of {largest} bytes, at most {MAX_BLOB_NBYTES} are possible", kind="blob")
    return entries


def read_payload(key: str, entry: BlobEntry, read: Callable[[int, int], bytes]) -> bytes:
    """Return one payload of a pack.

    Not collective.

    Parameters
    ----------
    key
        The pack, for messages.
    entry
        From `read_pack_index`.
    read
        ``read(offset, nbytes) -> bytes`` over the object.

    Raises
    ------
    FormatError
        Kind ``checksum``, with the key.
    """
    data: Any = read(entry.offset, entry.nbytes)
    if len(data) != entry.nbytes or crc32c(data).hex() != entry.crc32c:
        raise FormatError(
            f"{key}: the stored CRC32C of blob {entry.key!r} differs from that of the data", kind="checksum"
        )
    return bytes(data)

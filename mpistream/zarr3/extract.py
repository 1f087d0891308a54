"""Boxes out of shards: which bytes of an object hold a box, and the cells that they decode to.

Theory of operation
-------------------
`plan_reads` reads the index, sets what is absent to fill, and returns the rest as *batches*: neighbouring inner chunks
that are read with one call. Batches depend on nothing but the opened object and their part of the output, and no two of
them share a cell, so threads may do them in any order.

An inner chunk that is wanted whole, and is one stretch of memory in the output, is decoded right there. Any other goes
through the `DecodeScratch` of its thread, which holds one batch of encoded bytes and one decoded chunk, whatever is
read.

Everything in an object is untrusted: an index entry is compared with the object's size before a byte of it is read, and
a chunk's checksum, and the size that its header claims, before a byte of it is decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import FormatError
from mpistream.zarr3.shard import MISSING, ShardSpec, Slices, parse_index

__all__ = ["Batch", "OpenedObject", "DecodeScratch", "plan_reads"]

# Neighbours with a gap of at most this are read in one call: a seek costs more than the bytes between.
_MAX_GAP_NBYTES = 64 * 1024
# What is read in one call is still in the cache of a core when it is decoded, and makes enough batches for threads.
_MAX_READ_NBYTES = 2 * 1024 * 1024


class OpenedObject(Protocol):
    """An object that is read by range."""

    nbytes: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return at most ``nbytes`` bytes from ``offset``; fewer only at the end."""

    def read_into(self, offset: int, buffer: NDArray[np.uint8]) -> int:
        """Fill a buffer from ``offset``; return the number of bytes, fewer only at the end."""


class DecodeScratch:
    """What one thread reads and decodes through, used again and again."""

    def __init__(self) -> None:
        self._encoded: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._chunk: NDArray[Any] | None = None

    def encoded(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a buffer of so many bytes; what was in it is gone."""
        if self._encoded.nbytes < nbytes:
            self._encoded = np.empty(nbytes, np.uint8)
        return self._encoded[:nbytes]

    def decoded(self, spec: ShardSpec, data: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the inner chunk that ``data`` encodes; it is good until the next call.

        Raises
        ------
        FormatError
            For a damaged chunk.
        """
        if spec.codec.is_text:
            return spec.codec.decode(data, spec.chunk_shape)
        if self._chunk is None or (self._chunk.shape, self._chunk.dtype) != (spec.chunk_shape, spec.codec.stored_dtype):
            self._chunk = np.empty(spec.chunk_shape, spec.codec.stored_dtype)
        spec.codec.decode_into(data, self._chunk)
        return self._chunk


@dataclass(frozen=True, slots=True)
class _Part:
    """An inner chunk, and which of its cells go where."""

    offset: int
    nbytes: int
    target: Slices
    source: Slices | None
    """None: all of them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Inner chunks of one shard that are read with one call."""

    spec: ShardSpec
    opened: OpenedObject
    parts: Sequence[_Part]
    """Sorted by offset."""
    out: NDArray[Any]

    def decode(self, scratch: DecodeScratch) -> None:
        """Read the inner chunks, and decode them into the output.

        Not collective.

        Raises
        ------
        FormatError
            For a damaged inner chunk.
        """
        first = self.parts[0].offset
        data = scratch.encoded(max(p.offset + p.nbytes for p in self.parts) - first)
        data = data[: self.opened.read_into(first, data)]
        for part in self.parts:
            start = part.offset - first
            encoded, target = data[start : start + part.nbytes], self.out[part.target]
            if part.source is None and self.spec.codec.decodes_into(target):
                self.spec.codec.decode_into(encoded, target)
            else:
                chunk = scratch.decoded(self.spec, encoded)
                target[...] = chunk if part.source is None else chunk[part.source]


def plan_reads(spec: ShardSpec, opened: OpenedObject, box: Sequence[tuple[int, int]], out: NDArray[Any]) -> list[Batch]:
    """Return what is to be read of a shard for a box of it; only the inner chunks that it touches are.

    Not collective.

    Parameters
    ----------
    spec
        The array's shards.
    opened
        The object. Its index is read here.
    box
        Half-open bounds in the shard, one pair a dim, time first.
    out
        Array of the box's shape. Where nothing is stored it is set to fill here.

    Raises
    ------
    FormatError
        For a damaged index, and for an inner chunk that claims more bytes than it can have.
    """
    # Never more than there is: the size of an index is what a document claims.
    nbytes = min(spec.index_nbytes, opened.nbytes)
    data = opened.read(0 if spec.is_index_first else opened.nbytes - nbytes, nbytes)
    entries = parse_index(data, spec, opened.nbytes).reshape(*spec.n_chunks, 2)
    ranges = [range(lo // c, -(-hi // c)) for (lo, hi), c in zip(box, spec.chunk_shape, strict=True)]
    found = entries[tuple(slice(r.start, r.stop) for r in ranges)].reshape(-1, 2).tolist()
    most = spec.codec.max_nbytes(spec.chunk_shape)
    parts = []
    for (offset, n), along in zip(found, itertools.product(*map(_along, ranges, spec.chunk_shape, box)), strict=True):
        target = tuple(t for t, _, _ in along)
        if offset == MISSING:
            out[target] = spec.fill
        elif n > most:
            # Said before it is read: memory is what a wrong number would cost.
            raise FormatError(f"an inner chunk claims {n} bytes, it can have at most {most}", kind="chunk")
        else:
            is_whole = all(whole for _, _, whole in along)
            parts.append(_Part(offset, n, target, None if is_whole else tuple(s for _, s, _ in along)))
    parts.sort(key=lambda p: (p.offset, p.nbytes))
    return [Batch(spec, opened, group, out) for group in _grouped(parts)]


def _along(indices: range, length: int, bounds: tuple[int, int]) -> list[tuple[slice, slice, bool]]:
    """Return of each inner chunk along one dim: where it goes, what of it, and whether that is all."""
    low, high = bounds
    found = []
    for i in indices:
        first, last = max(low, i * length), min(high, (i + 1) * length)
        inside = slice(first - i * length, last - i * length)
        found.append((slice(first - low, last - low), inside, last - first == length))
    return found


def _grouped(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Join neighbouring byte ranges, so that a whole row of inner chunks is few reads."""
    groups: list[list[_Part]] = []
    end = 0
    for part in parts:
        last = part.offset + part.nbytes
        if not groups or part.offset > end + _MAX_GAP_NBYTES or last - groups[-1][0].offset > _MAX_READ_NBYTES:
            groups.append([])
            end = last
        end = max(end, last)
        groups[-1].append(part)
    return groups

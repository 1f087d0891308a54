"""What a store holds and what it costs on disk, as plain values: the facts behind ``mpistream info``.

Only the manifest is read, and the sizes of files: no chunk, so a damaged one is not found here. Nothing is
written, and no MPI is needed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np

from mpistream.arrays import ArraySpec, Role
from mpistream.errors import StoreError
from mpistream.local_store import LocalStore
from mpistream.manifest import Manifest
from mpistream.names import dtype_name
from mpistream.node import Node
from mpistream.ranges import count
from mpistream.reader import open_reader
from mpistream.store import Store, open_store
from mpistream.zarr3.metadata import GROUP_KEY

__all__ = ["decode_time", "describe", "short_chain", "size_on_disk"]

# CF conventions, section 4.4; months and years have no fixed length there.
_MICROSECONDS = {
    **dict.fromkeys(("day", "days", "d"), 86_400_000_000),
    **dict.fromkeys(("hour", "hours", "hr", "hrs", "h"), 3_600_000_000),
    **dict.fromkeys(("minute", "minutes", "min", "mins"), 60_000_000),
    **dict.fromkeys(("second", "seconds", "sec", "secs", "s"), 1_000_000),
    **dict.fromkeys(("millisecond", "milliseconds", "msec", "msecs", "ms"), 1_000),
    **dict.fromkeys(("microsecond", "microseconds"), 1),
}
# A reference time in another zone than UTC is not decoded.
_UNITS = re.compile(
    r"\s*(?P<unit>[a-z]+)\s+since\s+(?P<date>\d{4}-\d{1,2}-\d{1,2})"
    r"(?:(?:T|\s+)(?P<time>\d{1,2}:\d{1,2}(?::\d{1,2}(?:\.\d{1,6})?)?))?"
    r"\s*(?:Z|UTC|GMT|[+-]0?0(?::?00)?)?\s*",
    re.IGNORECASE | re.ASCII,
)
# Before that day the standard calendar is the Julian one; numpy's is proleptic Gregorian.
_GREGORIAN_BEGINS = np.datetime64("1582-10-15", "us")
_MAX_MICROSECONDS = 2**62

# So many files and folders are counted one by one, in a fraction of a second on a local disk; of more, so many are
# looked at. A server of metadata takes some tenths of a millisecond for each.
_MAX_COUNTED = 20_000
_N_SAMPLED = 4_000


@dataclass(slots=True)
class _Sizes:
    """Files below a store: of each array its objects without its document, and all there are."""

    n_objects: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, float] = field(default_factory=dict)
    n_files: float = 0
    nbytes_total: float = 0
    is_exact: bool = True


def describe(url: str | os.PathLike[str], *, count_all: bool = False) -> dict[str, Any]:
    """Return what a store holds, how it lies on disk and how large it is, as JSON types.

    Not collective.

    Parameters
    ----------
    url
        Folder of the store.
    count_all
        Whether to count every file, however many there are. Otherwise files and sizes of a store of more than
        20,000 files and folders are estimated from some that lie evenly among them.

    Returns
    -------
    The facts, by names that stay: ``nbytes`` are bytes of committed values before compression,
    ``nbytes_on_disk`` sizes of files, those of records that are not committed yet too; ``ratio`` is the
    first by the second, None where there is nothing; ``is_exact`` says whether all files were counted. Of a Zarr
    store that is no stream, its ``url`` and its ``nodes``.

    Raises
    ------
    FormatError
        No Zarr store there, or a damaged manifest or document.
    StoreError
        It can't be read, or is no local folder.
    """
    store = open_store(url)
    if not isinstance(store, LocalStore):
        raise StoreError(f"{store.url}: only a local folder can be described", kind="not_local")
    reader = open_reader(store.root)
    if not reader.is_stream:
        return {"url": store.url, "nodes": [_describe_node(n) for n in reader.hierarchy().values()]}
    manifest = reader.manifest
    schema = manifest.schema
    sizes = _sizes(store.root, count_all=count_all)
    arrays = [_describe_array(a, manifest, sizes) for a in (schema.time_array, *schema.arrays.values())]
    nbytes = sum(a["nbytes"] for a in arrays)
    return {
        "url": store.url,
        "title": schema.attrs.get("title"),
        "store_id": manifest.store_id,
        "run_id": manifest.run_id,
        "epoch": manifest.epoch,
        "commit_seq": manifest.commit_seq,
        "fingerprint": manifest.fingerprint,
        "mode": schema.mode,
        "record_noun": schema.record_noun,
        "n_records": manifest.n_records,
        "n_committed": count(manifest.committed),
        "last_t": manifest.last_t,
        "last_date": decode_time(manifest.last_t, schema.time.units, schema.time.calendar),
        "time_dim": schema.time_dim,
        "time_units": schema.time.units,
        "time_calendar": schema.time.calendar,
        "dims": {d: manifest.n_records if n is None else n for d, n in schema.dims.items()},
        "key_separator": schema.key_separator,
        "statics": {a["name"]: a["is_committed"] for a in arrays if a["role"] == Role.STATIC.value},
        "n_dropped": sum(d.stop - d.start for d in manifest.dropped),
        "dropped": [{"epoch": d.epoch, "start": d.start, "stop": d.stop} for d in manifest.dropped],
        "n_files": round(sizes.n_files),
        "is_exact": sizes.is_exact,
        "nbytes": nbytes,
        "nbytes_on_disk": round(sizes.nbytes_total),
        "ratio": _ratio(nbytes, sizes.nbytes_total),
        "arrays": arrays,
    }


def _describe_array(array: ArraySpec, manifest: Manifest, sizes: _Sizes) -> dict[str, Any]:
    is_committed = array.role is not Role.STATIC or array.name in manifest.statics
    n_steps = manifest.n_records if array.has_time else int(is_committed)
    # Only their values tell how long strings of any length are: they don't count.
    itemsize = 0 if array.dtype.kind == "T" else array.dtype.itemsize
    nbytes = n_steps * prod(array.shape) * itemsize
    on_disk = round(sizes.nbytes.get(array.name, 0))
    per_record = None
    if array.has_time:
        per_record = (array.grid.n_shards if array.is_sharded else 1) / array.row_length
    return {
        "name": array.name,
        "role": array.role.value,
        "dims": list(array.dims),
        "dtype": dtype_name(array.dtype),
        "shape": [manifest.n_records, *array.shape] if array.has_time else list(array.shape),
        "shard_shape": list(array.resolved_shard_shape) if array.is_sharded else None,
        "chunk_shape": list(array.resolved_chunk_shape),
        "row_length": array.row_length if array.has_time else None,
        "keep_bits": array.keep_bits,
        "codecs": [dict(c) for c in array.chain],
        "is_committed": is_committed,
        "n_objects_per_record": per_record,
        "n_objects": round(sizes.n_objects.get(array.name, 0)),
        "nbytes": nbytes,
        "nbytes_on_disk": on_disk,
        "ratio": _ratio(nbytes, on_disk),
    }


def _describe_node(node: Node) -> dict[str, Any]:
    def plain(values: Sequence[Any] | None) -> list[Any] | None:
        return None if values is None else list(values)

    return {
        "path": node.path,
        "kind": "stream" if node.is_stream else node.kind,
        "dims": plain(node.dims),
        "dtype": node.dtype,
        "shape": plain(node.shape),
        "shard_shape": plain(node.shard_shape),
        "chunk_shape": plain(node.chunk_shape),
    }


def _ratio(nbytes: int, on_disk: float) -> float | None:
    return nbytes / on_disk if nbytes and on_disk else None


def size_on_disk(store: Store) -> int:
    """Return the bytes of all files of a store; of very many they are estimated, as `describe` does it.

    Not collective.

    Raises
    ------
    StoreError
        It can't be listed, or is no local folder.
    """
    if not isinstance(store, LocalStore):
        raise StoreError(f"{store.url}: only the files of a local folder can be counted", kind="not_local")
    return round(_sizes(store.root).nbytes_total)


def _sizes(root: str, *, count_all: bool = False) -> _Sizes:
    """Walk a store; what a running writer renames or removes meanwhile is passed over."""
    try:
        return _walked(root, None if count_all else _MAX_COUNTED)
    except _TooManyError:
        return _sampled(root)


class _TooManyError(Exception):
    """There are more files and folders than shall be counted."""


def _walked(root: str, at_most: int | None) -> _Sizes:
    sizes, n = _Sizes(), 0
    # (folder, the array it belongs to)
    waiting: list[tuple[str, str | None]] = [(root, None)]
    while waiting:
        folder, array = waiting.pop()
        with _listed(folder) as entries:
            for entry in entries:
                n += 1
                if at_most is not None and n > at_most:
                    raise _TooManyError
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, entry.name if folder == root else array))
                else:
                    _count(sizes, array, entry, 1)
    return sizes


def _sampled(root: str) -> _Sizes:
    """Estimate sizes from few files: of the many in a folder some stand for all, and so do folders.

    What a folder may look at it gives to those below it in equal parts. Records lie evenly in a listing, by name, by
    age or by a hash.
    """
    sizes = _Sizes(is_exact=False)
    waiting: list[tuple[str, str | None, int, float]] = [(root, None, _N_SAMPLED, 1.0)]
    while waiting:
        folder, array, n_looks, weight = waiting.pop()
        folders: list[os.DirEntry[str]] = []
        files: list[os.DirEntry[str]] = []
        with _listed(folder) as entries:
            for entry in entries:
                if entry.name == GROUP_KEY:  # no object, and one stands for none
                    _count(sizes, array, entry, weight)
                else:
                    (folders if entry.is_dir(follow_symlinks=False) else files).append(entry)
        some = _some(files, n_looks)
        for entry in some:
            _count(sizes, array, entry, weight * len(files) / len(some))
        below = _some(folders, n_looks)
        for entry in below:
            owner = entry.name if folder == root else array
            each = max(1, n_looks // len(below))
            waiting.append((entry.path, owner, each, weight * len(folders) / len(below)))
    return sizes


def _some(entries: list[os.DirEntry[str]], n: int) -> list[os.DirEntry[str]]:
    """Return at most ``n`` of them, evenly spaced."""
    return entries if len(entries) <= n else [entries[(2 * k + 1) * len(entries) // (2 * n)] for k in range(n)]


@contextlib.contextmanager
def _listed(folder: str) -> Iterator[Iterable[os.DirEntry[str]]]:
    try:
        try:
            found = os.scandir(folder)
        except (FileNotFoundError, NotADirectoryError):
            yield ()
            return
        with found:
            yield found
    except OSError as error:
        raise StoreError(f"list {folder}: {error.strerror or error}", kind="io", errno=error.errno) from error


def _count(sizes: _Sizes, array: str | None, entry: os.DirEntry[str], weight: float) -> None:
    """Count a file that stands for ``weight`` files."""
    try:
        nbytes = weight * entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return
    sizes.n_files += weight
    sizes.nbytes_total += nbytes
    if array is not None and entry.name != GROUP_KEY:
        sizes.n_objects[array] = sizes.n_objects.get(array, 0) + weight
        sizes.nbytes[array] = sizes.nbytes.get(array, 0) + nbytes


def decode_time(t: float | None, units: str, calendar: str) -> str | None:
    """Return a time as an ISO 8601 date in UTC, None where that takes more than numpy's calendar.

    Not collective.

    Parameters
    ----------
    t
        The time; None gives None.
    units, calendar
        CF units and calendar (CF conventions, section 4.4).
    """
    found = _UNITS.fullmatch(units)
    calendar = calendar.lower()
    if t is None or found is None or calendar not in ("standard", "gregorian", "proleptic_gregorian"):
        return None
    scale = _MICROSECONDS.get(found["unit"].lower())
    year, month, day = found["date"].split("-")
    clock = ":".join(part.rjust(2, "0") for part in (found["time"] or "0:0").split(":"))
    if scale is None:
        return None
    # As a fraction the product is exact; a float of it would show digits that t does not have.
    delta = round(Fraction(t) * scale)
    try:
        base = np.datetime64(f"{year}-{month:0>2}-{day:0>2}T{clock}", "us")
    except ValueError:
        return None
    if abs(delta) > _MAX_MICROSECONDS:
        return None
    date = base + np.timedelta64(delta, "us")
    if calendar != "proleptic_gregorian" and min(base, date) < _GREGORIAN_BEGINS:
        return None
    seconds, _, fraction = str(date).partition(".")
    return f"{seconds}.{fraction}".rstrip("0").rstrip(".")


def short_chain(chain: Sequence[Mapping[str, Any]]) -> str:
    """Return a codec chain in a few words, for example ``blosc lz4-5 shuffle + crc32c``.

    Not collective.
    """
    words = []
    for codec in chain:
        name, c = codec["name"], codec.get("configuration", {})
        if name == "bytes":
            words += ["big-endian"] if c.get("endian") == "big" else []
        elif name == "blosc":
            words.append(f"blosc {c['cname']}-{c['clevel']} {c['shuffle']}")
        elif "level" in c:
            words.append(f"{name}-{c['level']}")
        else:
            words.append(name)
    return " + ".join(words) or "none"

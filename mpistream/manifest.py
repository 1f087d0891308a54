"""The manifest, its bytes, and the names of everything below ``.mpistream/``.

The manifest is the one truth about a store: a record is committed iff the manifest says so. It holds
digests, never arrays of values, so its size does not grow with records, ranks or grid.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mpistream.arrays import Role
from mpistream.errors import FormatError
from mpistream.ranges import Ranges, count, inside, union
from mpistream.region import AnyRegion, region_from_json
from mpistream.schema import StreamSchema

__all__ = [
    "BLOBS_FOLDER",
    "CHECKPOINT_ATTR",
    "DROPPED_FOLDER",
    "EPOCHS_FOLDER",
    "FOLDER",
    "LEASE_KEY",
    "MANIFEST_KEY",
    "MAX_JSON_NBYTES",
    "STAGE_FOLDER",
    "Dropped",
    "Floors",
    "Manifest",
    "add_times",
    "blob_key",
    "dropped_folder",
    "epoch_key",
    "fenced_folder",
    "floor_of",
    "floors_inside",
    "layout_bytes",
    "layout_key",
    "nonce_key",
    "parse_blob",
    "parse_epoch",
    "parse_json",
    "parse_layout",
    "parse_open_dropped",
    "raise_floors",
    "raised_inside",
    "set_floors",
    "stage_folder",
    "subtract_times",
]

# On disk. Do not change; see FORMAT.md.
FORMAT_NAME = "mpistream"
FORMAT_VERSION = 1
FOLDER = ".mpistream"
MANIFEST_KEY = ".mpistream/manifest.json"
LEASE_KEY = ".mpistream/lease"
EPOCHS_FOLDER = ".mpistream/epochs"
STAGE_FOLDER = ".mpistream/stage"
DROPPED_FOLDER = ".mpistream/dropped"
BLOBS_FOLDER = ".mpistream/blobs"
# Of the group of a restart state.
CHECKPOINT_ATTR = "mpistream_checkpoint"

Floors = tuple[tuple[int, int], ...]

_NO_TIMES = "0" * 64
_MODULUS = 2**256
# A manifest has a few hundred bytes an array, a layout some ten a rank; one with more than this is not ours. Parsed,
# JSON can take twenty times its bytes.
MAX_JSON_NBYTES = 8 * 1024 * 1024
_COUNT_LIMIT = 2**63


def epoch_key(epoch: int) -> str:
    """Return the key of the claim of an epoch."""
    return f"{EPOCHS_FOLDER}/{epoch}"


def parse_epoch(name: str) -> int | None:
    """Return the epoch that a name in the epochs folder claims, None for another name."""
    return int(name) if name.isascii() and name.isdigit() and str(int(name)) == name else None


def stage_folder(epoch: int, writer: int | None = None) -> str:
    """Return the folder where a writer of an epoch stages its files, or that of the whole epoch."""
    return f"{STAGE_FOLDER}/{epoch}" if writer is None else f"{STAGE_FOLDER}/{epoch}/{writer}"


def fenced_folder(name: str, by_epoch: int) -> str:
    """Return where an older epoch's stage folder is renamed to, which fences its writers in one step."""
    return f"{STAGE_FOLDER}/{name}.fenced-by-{by_epoch}"


def layout_key(epoch: int) -> str:
    """Return the key of the document that holds the writers' regions of an epoch."""
    return f"{FOLDER}/layout-{epoch}.json"


def blob_key(epoch: int, commit_seq: int, writer: int) -> str:
    """Return the key of the blobs of one writer and commit."""
    return f"{BLOBS_FOLDER}/{epoch}-{commit_seq}-{writer}"


def parse_blob(name: str) -> tuple[int, int, int] | None:
    """Return epoch, commit_seq and writer of a name in the blobs folder, None for another name."""
    numbers = [parse_epoch(part) for part in name.split("-")]
    if len(numbers) != 3 or None in numbers:  # noqa: PLR2004 (epoch, commit_seq, writer)
        return None
    return numbers[0], numbers[1], numbers[2]  # type: ignore[return-value]


def nonce_key(epoch: int) -> str:
    """Return the key of the nonce that proves that all ranks see one file system."""
    return f"{FOLDER}/nonce-{epoch}"


def dropped_folder(epoch: int, *, is_open: bool = False) -> str:
    """Return the folder where the resume of an epoch sets aside what was dropped, while it does and afterwards."""
    return f"{DROPPED_FOLDER}/{epoch}.open" if is_open else f"{DROPPED_FOLDER}/{epoch}"


def parse_open_dropped(name: str) -> int | None:
    """Return the epoch of a folder that a resume was filling, None for another name."""
    stem, _, suffix = name.rpartition(".")
    return parse_epoch(stem) if suffix == "open" else None


def parse_json(key: str, data: bytes, *, is_strict: bool = True) -> dict[str, Any]:
    """Return the JSON object in ``data``.

    Not collective.

    Parameters
    ----------
    key
        Where it lies, for messages.
    data
        Its bytes.
    is_strict
        Refuse the words NaN and Infinity, which JSON does not have, numbers beyond float64, and halves of surrogate
        pairs, which are no text (RFC 8259, section 8.2).

    Raises
    ------
    FormatError
        Kind ``json``, with the key: not JSON, not an object, too large, too deep, or a name given twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice in one object")
        return found

    def finite(text: str) -> float:
        if not math.isfinite(value := float(text)) and is_strict:
            raise ValueError(f"{text} is not a finite number")
        return value

    if len(data) > MAX_JSON_NBYTES:
        raise FormatError(f"{key}: {len(data)} bytes, at most {MAX_JSON_NBYTES} are read", kind="json")
    try:
        document = json.loads(data, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
        if is_strict and (b"\\ud" in data.lower() or b"\xed" in data):
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{key}: not valid JSON: {error}", kind="json") from error
    if not isinstance(document, dict):
        raise FormatError(f"{key}: not a JSON object", kind="json")
    return document


def _dump(document: Mapping[str, Any]) -> bytes:
    # repr of a float gives back the same float, so last_t survives bitwise.
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


# A schema does not change, and of many variables it is most of what a manifest says: it is rendered once.
_schemas: WeakKeyDictionary[StreamSchema, bytes] = WeakKeyDictionary()


def _schema_bytes(schema: StreamSchema) -> bytes:
    data = _schemas.get(schema)
    if data is None:
        data = _schemas[schema] = _dump(schema.to_json())
    return data


def _with_schema(document: Mapping[str, Any], schema: bytes) -> bytes:
    """Return what `_dump` returns of a document with a schema in it; other names stand before and behind it."""
    before, behind = ({k: v for k, v in document.items() if (k < "schema") is first} for first in (True, False))
    return _dump(before)[:-1] + b',"schema":' + schema + b"," + _dump(behind)[1:]


def _times_sum(times: Iterable[tuple[int, float]]) -> int:
    return sum(
        int.from_bytes(hashlib.sha256(i.to_bytes(8, "little") + np.float64(t).astype("<f8").tobytes()).digest(), "big")
        for i, t in times
    )


def add_times(digest: str, times: Iterable[tuple[int, float]]) -> str:
    """Return the digest of all committed times after some were added.

    Not collective.

    Parameters
    ----------
    digest
        The digest before.
    times
        Pairs of record and time.

    Notes
    -----
    The sum, modulo 2**256, of sha256(index, 8 bytes little-endian; time, float64 little-endian): so a
    commit costs what it adds, a resume what it drops, and neither grows with what is committed.
    """
    return f"{(int(digest, 16) + _times_sum(times)) % _MODULUS:064x}"


def subtract_times(digest: str, times: Iterable[tuple[int, float]]) -> str:
    """Return the digest of all committed times without some of them.

    Not collective.

    Parameters
    ----------
    digest, times
        As in `add_times`.
    """
    return f"{(int(digest, 16) - _times_sum(times)) % _MODULUS:064x}"


def raise_floors(floors: Floors, records: Ranges, commit_seq: int) -> Floors:
    """Return the floors after other records than before lie, or will lie, at some numbers.

    Not collective.

    Parameters
    ----------
    floors
        Pairs (start, commit_seq), ascending by start: the floor from there to the next pair; 0 before the first.
    records
        The numbers.
    commit_seq
        Their new floor, higher than any before.
    """
    levels = dict(floors)
    for start, stop in records:
        behind = max((s for s in levels if s <= stop), default=None)
        after = 0 if behind is None else levels[behind]
        levels = {s: seq for s, seq in levels.items() if not start <= s <= stop}
        levels[start], levels[stop] = commit_seq, after
    return tuple(sorted(levels.items()))


def raised_inside(floors: Floors, start: int, stop: int, commit_seq: int) -> bool:
    """Return whether other records lie at any number from ``start`` to ``stop`` than at a commit.

    Not collective.

    Parameters
    ----------
    floors
        As in `raise_floors`.
    start, stop
        The records.
    commit_seq
        The commit.
    """
    edges = [s for s, _ in floors if start < s < stop]
    return start < stop and any(floor_of(floors, r) > commit_seq for r in (start, *edges))


def floor_of(floors: Floors, record: int) -> int:
    """Return the commit_seq before which other records lay at a number.

    Not collective.

    Parameters
    ----------
    floors
        As in `raise_floors`.
    record
        The record.
    """
    return max(((start, seq) for start, seq in floors if start <= record), default=(0, 0))[1]


def floors_inside(floors: Floors, start: int, stop: int) -> Floors:
    """Return the floors from ``start`` to ``stop``, in the same form; none where all are 0.

    Not collective.

    Parameters
    ----------
    floors
        As in `raise_floors`.
    start, stop
        The records.
    """
    first = floor_of(floors, start)
    return (*(((start, first),) if first else ()), *((s, seq) for s, seq in floors if start < s < stop))


def set_floors(floors: Floors, start: int, stop: int, found: Floors) -> Floors:
    """Return the floors with those from ``start`` to ``stop`` as they once were.

    Not collective.

    Parameters
    ----------
    floors
        As in `raise_floors`.
    start, stop
        The records.
    found
        What `floors_inside` gave for them.
    """
    levels = {start: 0, stop: floor_of(floors, stop)}
    levels |= {s: seq for s, seq in floors if not start <= s <= stop} | dict(found)
    merged: list[tuple[int, int]] = []
    for pair in sorted(levels.items()):
        if pair[1] != (merged[-1][1] if merged else 0):
            merged.append(pair)
    return tuple(merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Records that a resume dropped, kept aside until its first commit."""

    epoch: int
    start: int
    stop: int
    blob_floors: Floors = ()
    """Those of these records before they were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is committed."""

    store_id: str
    run_id: str
    """The opening that wrote this manifest."""
    epoch: int
    commit_seq: int
    first_seq: int
    """The commit_seq of this epoch's first manifest."""
    last_t: float | None
    """Time of the last committed record."""
    committed: Ranges
    """Ranges of committed records, half-open, ascending, not touching."""
    statics: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    floors: Floors
    """(start, commit_seq), ascending by start: before that commit, other records lay from ``start`` on."""
    blob_floors: Floors
    """In the same form: blobs of older commits belong to other records. Not raised where records were restored."""
    n_packs: int
    """Committed packs of blobs."""
    schema: StreamSchema
    fingerprint: str
    coordinates_digest: str
    times_digest: str
    layout_digest: str
    carried: Mapping[str, Any] | None = None
    """After a commit of tokens that the caller carried: their digest, and the receipt they got."""

    @classmethod
    def first(cls, *, store_id: str, run_id: str, epoch: int, schema: StreamSchema, layout_digest: str) -> Manifest:
        """Return the manifest of a store without records.

        Not collective.
        """
        return cls(
            store_id=store_id,
            run_id=run_id,
            epoch=epoch,
            commit_seq=0,
            first_seq=0,
            last_t=None,
            committed=(),
            statics=(),
            dropped=(),
            floors=(),
            blob_floors=(),
            n_packs=0,
            schema=schema,
            fingerprint=schema.fingerprint(),
            coordinates_digest=schema.coordinates_digest(),
            times_digest=_NO_TIMES,
            layout_digest=layout_digest,
        )

    @property
    def n_records(self) -> int:
        """Length of the time dim: all records in indexed mode, the committed ones in append mode."""
        if self.schema.n_total is not None:
            return self.schema.n_total
        return self.committed[-1][1] if self.committed else 0

    def names_pack(self, epoch: int, commit_seq: int) -> bool:
        """Return whether a pack of blobs is committed.

        Not collective. A pack of an older epoch that was placed and never committed has a commit_seq that this
        epoch's first manifest took.
        """
        if epoch == self.epoch:
            return self.first_seq < commit_seq <= self.commit_seq
        return epoch < self.epoch and commit_seq < self.first_seq

    def to_bytes(self) -> bytes:
        """Return the manifest's bytes, its own checksum included.

        Not collective.
        """
        document: dict[str, Any] = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "store_id": self.store_id,
            "run_id": self.run_id,
            "epoch": self.epoch,
            "commit_seq": self.commit_seq,
            "first_seq": self.first_seq,
            "n_records": self.n_records,
            "last_t": self.last_t,
            "committed": [list(r) for r in self.committed],
            "statics": list(self.statics),
            "dropped": [
                {"epoch": d.epoch, "start": d.start, "stop": d.stop, "blob_floors": [list(f) for f in d.blob_floors]}
                for d in self.dropped
            ],
            "floors": [list(f) for f in self.floors],
            "blob_floors": [list(f) for f in self.blob_floors],
            "n_packs": self.n_packs,
            "fingerprint": self.fingerprint,
            "coordinates_digest": self.coordinates_digest,
            "times_digest": self.times_digest,
            "layout_digest": self.layout_digest,
            "carried": None if self.carried is None else dict(self.carried),
        }
        schema = _schema_bytes(self.schema)
        checksum = hashlib.sha256(_with_schema(document, schema)).hexdigest()
        return _with_schema({**document, "checksum": checksum}, schema)

    @classmethod
    def from_bytes(cls, data: bytes, key: str = MANIFEST_KEY) -> Manifest:
        """Return the manifest in ``data``.

        Not collective.

        Raises
        ------
        FormatError
            With the key: damaged, of another format or version, or not consistent in itself.
        """
        document = parse_json(key, data)
        if document.get("format") != FORMAT_NAME:
            raise FormatError(f"{key}: format {document.get('format')!r} is not {FORMAT_NAME!r}", kind="foreign")
        if document.get("version") != FORMAT_VERSION:
            raise FormatError(
                f"{key}: format version {document.get('version')!r}, this mpistream reads {FORMAT_VERSION}; "
                "use a newer mpistream",
                kind="version",
            )
        checksum = document.pop("checksum", None)
        if hashlib.sha256(_dump(document)).hexdigest() != checksum:
            raise FormatError(f"{key}: the checksum does not match; the manifest is damaged", kind="checksum")
        try:
            manifest = cls(
                store_id=str(document["store_id"]),
                run_id=str(document["run_id"]),
                epoch=_count(document["epoch"]),
                commit_seq=_count(document["commit_seq"]),
                first_seq=_count(document["first_seq"]),
                last_t=None if document["last_t"] is None else float(document["last_t"]),
                committed=tuple((_count(a), _count(b)) for a, b in document["committed"]),
                statics=tuple(str(s) for s in document["statics"]),
                dropped=tuple(
                    Dropped(
                        epoch=_count(d["epoch"]),
                        start=_count(d["start"]),
                        stop=_count(d["stop"]),
                        blob_floors=_floors(d["blob_floors"]),
                    )
                    for d in document["dropped"]
                ),
                floors=_floors(document["floors"]),
                blob_floors=_floors(document["blob_floors"]),
                n_packs=_count(document["n_packs"]),
                schema=StreamSchema.from_json(document["schema"]),
                fingerprint=str(document["fingerprint"]),
                coordinates_digest=str(document["coordinates_digest"]),
                times_digest=f"{int(document['times_digest'], 16):064x}",
                layout_digest=str(document["layout_digest"]),
                carried=_checked_carried(document["carried"]),
            )
            _check_consistent(manifest, document["n_records"])
        except FormatError as error:
            raise FormatError(f"{key}: {error}", kind=error.kind) from error
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{key}: damaged: {type(error).__name__}: {error}", kind="manifest") from error
        return manifest


def _check_consistent(manifest: Manifest, n_records: Any) -> None:
    """Refuse a manifest that contradicts itself."""
    committed, n_total = manifest.committed, manifest.schema.n_total
    if (
        manifest.n_records != n_records
        or union(committed) != committed
        or (n_total is None and len(committed) > 1)
        or inside(committed, 0, manifest.n_records) != committed
        or (n_total is None and count(committed) != manifest.n_records)
    ):
        raise FormatError(f"{n_records} records, but committed ranges {committed}", kind="manifest")
    known = {a.name for a in manifest.schema.arrays.values() if a.role is Role.STATIC}
    if unknown := sorted(set(manifest.statics) - known):
        raise FormatError(f"statics {unknown} are none of the schema's", kind="manifest")
    if any(d.start >= d.stop or d.epoch > manifest.epoch for d in manifest.dropped):
        raise FormatError("dropped ranges that are empty, or of an epoch to come", kind="manifest")
    if not manifest.schema.is_resolved or manifest.schema.fingerprint() != manifest.fingerprint:
        raise FormatError("the schema does not have the fingerprint that stands beside it", kind="manifest")


def _count(value: Any) -> int:
    """Return a number of something: JSON's true and 1.0 are none, nor is what offsets have no room for."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _COUNT_LIMIT:
        raise ValueError(f"{str(value)[:40]} is no number from 0 to 2**63 - 1")
    return value


def _floors(value: Any) -> Floors:
    return tuple((_count(start), _count(commit_seq)) for start, commit_seq in value)


def _checked_carried(value: Any) -> Mapping[str, Any] | None:
    if value is None:
        return None
    found = {"digest": value["digest"], "receipt": value["receipt"]}
    if not isinstance(found["digest"], str) or not isinstance(found["receipt"], dict):
        raise TypeError(f"carried tokens with digest {found['digest']!r} and receipt {found['receipt']!r}")
    return found


def layout_bytes(epoch: int, n_writers: int, regions: Sequence[AnyRegion] | None) -> bytes:
    """Return the document that holds the writers' regions of an epoch.

    Not collective.

    Parameters
    ----------
    epoch
        The epoch.
    n_writers
        Number of writers.
    regions
        One each; None where each writer brings its own with its token.
    """
    plain = None if regions is None else [r.to_json() for r in regions]
    return _dump({"epoch": epoch, "n_writers": n_writers, "regions": plain})


def parse_layout(key: str, data: bytes) -> tuple[int, list[AnyRegion] | None]:
    """Return the number of writers of an epoch, and their regions where they were known when it began.

    Not collective.

    Raises
    ------
    FormatError
        With the key.
    """
    document = parse_json(key, data)
    try:
        regions = document["regions"]
        return int(document["n_writers"]), None if regions is None else [region_from_json(r) for r in regions]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{key}: damaged: {type(error).__name__}: {error}", kind="layout") from error

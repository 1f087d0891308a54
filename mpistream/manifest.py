"""The manifest, its bytes, and the names of everything below ``.mpistream/``.

The manifest is the one truth about a store: a record is committed iff the manifest says so. It holds
digests, never arrays of values, so its size does not grow with records, ranks or grid.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpistream.errors import FormatError
from mpistream.region import Region
from mpistream.schema import StreamSchema

__all__ = [
    "DROPPED_FOLDER",
    "EPOCHS_FOLDER",
    "FOLDER",
    "LEASE_KEY",
    "MANIFEST_KEY",
    "STAGE_FOLDER",
    "Dropped",
    "Manifest",
    "add_times",
    "dropped_folder",
    "epoch_key",
    "fenced_folder",
    "layout_bytes",
    "layout_key",
    "nonce_key",
    "parse_epoch",
    "parse_json",
    "parse_open_dropped",
    "regions_of_layout",
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

_NO_TIMES = "0" * 64
_MODULUS = 2**256
# A manifest has a few hundred bytes an array; one that claims more than this is not ours.
_MAX_NBYTES = 64 * 1024 * 1024


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


def parse_json(key: str, data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``.

    Not collective.

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
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text} is not a finite number")
        return value

    if len(data) > _MAX_NBYTES:
        raise FormatError(f"{key}: {len(data)} bytes, at most {_MAX_NBYTES} are read", kind="json")
    try:
        document = json.loads(data, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{key}: not valid JSON: {error}", kind="json") from error
    if not isinstance(document, dict):
        raise FormatError(f"{key}: not a JSON object", kind="json")
    return document


def _dump(document: Mapping[str, Any]) -> bytes:
    # repr of a float gives back the same float, so last_t survives bitwise.
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _times_sum(start: int, times: Iterable[float]) -> int:
    return sum(
        int.from_bytes(hashlib.sha256(i.to_bytes(8, "little") + np.float64(t).astype("<f8").tobytes()).digest(), "big")
        for i, t in enumerate(times, start)
    )


def add_times(digest: str, start: int, times: Sequence[float]) -> str:
    """Return the digest of all times after ``times`` were put at ``start`` and behind it.

    Not collective.

    Notes
    -----
    The sum, modulo 2**256, of sha256(index, 8 bytes little-endian; time, float64 little-endian): so a
    commit costs what it adds, a resume what it drops, and neither grows with what is committed.
    """
    return f"{(int(digest, 16) + _times_sum(start, times)) % _MODULUS:064x}"


def subtract_times(digest: str, start: int, times: Sequence[float]) -> str:
    """Return the digest of all times without those at ``start`` and behind it.

    Not collective.
    """
    return f"{(int(digest, 16) - _times_sum(start, times)) % _MODULUS:064x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Records that a resume dropped, kept aside until its first commit."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is committed."""

    store_id: str
    run_id: str
    """The opening that wrote this manifest."""
    epoch: int
    commit_seq: int
    n_records: int
    last_t: float | None
    committed: tuple[tuple[int, int], ...]
    """Ranges of committed records, half-open, ascending, not touching."""
    statics: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    floors: tuple[tuple[int, int], ...]
    """(start, commit_seq), ascending in both: before that commit, other records lay from ``start`` on."""
    schema: StreamSchema
    fingerprint: str
    coordinates_digest: str
    times_digest: str
    layout_digest: str

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
            n_records=0,
            last_t=None,
            committed=(),
            statics=(),
            dropped=(),
            floors=(),
            schema=schema,
            fingerprint=schema.fingerprint(),
            coordinates_digest=schema.coordinates_digest(),
            times_digest=_NO_TIMES,
            layout_digest=layout_digest,
        )

    def with_records(self, n_records: int, last_t: float | None, times_digest: str) -> Manifest:
        """Return this manifest with another number of records.

        Not collective.
        """
        return replace(
            self,
            n_records=n_records,
            last_t=last_t,
            times_digest=times_digest,
            committed=((0, n_records),) if n_records else (),
        )

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
            "n_records": self.n_records,
            "last_t": self.last_t,
            "committed": [list(r) for r in self.committed],
            "statics": list(self.statics),
            "dropped": [{"epoch": d.epoch, "start": d.start, "stop": d.stop} for d in self.dropped],
            "floors": [list(f) for f in self.floors],
            "schema": self.schema.to_json(),
            "fingerprint": self.fingerprint,
            "coordinates_digest": self.coordinates_digest,
            "times_digest": self.times_digest,
            "layout_digest": self.layout_digest,
        }
        return _dump({**document, "checksum": hashlib.sha256(_dump(document)).hexdigest()})

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
                epoch=int(document["epoch"]),
                commit_seq=int(document["commit_seq"]),
                n_records=int(document["n_records"]),
                last_t=None if document["last_t"] is None else float(document["last_t"]),
                committed=tuple((int(a), int(b)) for a, b in document["committed"]),
                statics=tuple(str(s) for s in document["statics"]),
                dropped=tuple(
                    Dropped(epoch=int(d["epoch"]), start=int(d["start"]), stop=int(d["stop"]))
                    for d in document["dropped"]
                ),
                floors=tuple((int(a), int(b)) for a, b in document["floors"]),
                schema=StreamSchema.from_json(document["schema"]),
                fingerprint=str(document["fingerprint"]),
                coordinates_digest=str(document["coordinates_digest"]),
                times_digest=f"{int(document['times_digest'], 16):064x}",
                layout_digest=str(document["layout_digest"]),
            )
            if manifest.n_records < 0 or manifest.committed != (
                ((0, manifest.n_records),) if manifest.n_records else ()
            ):
                raise FormatError(
                    f"{manifest.n_records} records, but committed ranges {manifest.committed}",
                    kind="manifest",
                )
            if not manifest.schema.is_resolved or manifest.schema.fingerprint() != manifest.fingerprint:
                raise FormatError("the schema does not have the fingerprint that stands beside it", kind="manifest")
        except FormatError as error:
            raise FormatError(f"{key}: {error}", kind=error.kind) from error
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{key}: damaged: {type(error).__name__}: {error}", kind="manifest") from error
        return manifest


def layout_bytes(epoch: int, regions: Sequence[Region]) -> bytes:
    """Return the document that holds the writers' regions of an epoch.

    Not collective.
    """
    return _dump({"epoch": epoch, "regions": [r.to_json() for r in regions]})


def regions_of_layout(key: str, data: bytes) -> list[Region]:
    """Return the writers' regions of an epoch.

    Not collective.

    Raises
    ------
    FormatError
        With the key.
    """
    document = parse_json(key, data)
    try:
        return [Region.from_json(r) for r in document["regions"]]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{key}: damaged: {type(error).__name__}: {error}", kind="layout") from error

"""What is wrong with a store as a whole: names that lie in it, times, documents. Nothing is written.

One process does this; what is looked at object by object is in `mpistream.checks`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpistream.arrays import ArraySpec, Role
from mpistream.checks import Checker, Finding, committed_rows
from mpistream.errors import FormatError, MPIStreamError, counted
from mpistream.lease import Lease, is_dead_at_once
from mpistream.manifest import (
    BLOBS_FOLDER,
    DROPPED_FOLDER,
    EPOCHS_FOLDER,
    FOLDER,
    LEASE_KEY,
    MANIFEST_KEY,
    STAGE_FOLDER,
    Manifest,
    add_times,
    epoch_key,
    layout_key,
    parse_blob,
    parse_epoch,
    parse_json,
)
from mpistream.ranges import Ranges, count, difference, inside, members, overlap, ranges_of
from mpistream.recovery import SetAside, growing
from mpistream.schema import values_digest
from mpistream.store import ReadableStore
from mpistream.zarr3.metadata import GROUP_KEY, array_key, chunk_key, make_documents

__all__ = ["Inspection"]

_NO_TIMES = "0" * 64
# What FORMAT.md says a document has; what else a version of zarr-python writes or leaves out means nothing.
_FIELDS = (
    *("data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs", "attributes", "dimension_names"),
    *("zarr_format", "node_type"),
)


class Inspection:
    """One look at everything but the contents of shards.

    Parameters
    ----------
    store
        The store.
    manifest
        The committed state.
    """

    def __init__(self, store: ReadableStore, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._checker = Checker(store, manifest)
        self.findings: list[Finding] = []
        self.rows: dict[str, Ranges] = {}
        """Array -> rows that are committed and lie in place."""
        self.packs: list[tuple[int, int, int]] = []
        self.writer: str | None = None
        """Who writes the store at present, or may."""

    def run(self) -> None:
        """Look at everything."""
        steps = (self._lease, self._rows, self._packs, self._times, self._documents, self._ours, self._root)
        for step in steps:
            try:
                step()
            except MPIStreamError as error:
                self._damage(error.kind, self._store.url, str(error))

    def _damage(self, kind: str, key: str, text: str, variable: str | None = None, **more: Any) -> None:
        text = text.removeprefix(f"{key}: ")
        self.findings.append(Finding(level="damage", kind=kind, key=key, text=text, variable=variable, **more))

    def _uncommitted(self, kind: str, key: str, text: str, variable: str | None = None, **more: Any) -> None:
        """Note what a live writer may be about to commit, and what is left over without one."""
        level = "leftover" if self.writer is None else "in_flight"
        self.findings.append(Finding(level=level, kind=kind, key=key, text=text, variable=variable, **more))

    def _left(self, kind: str, key: str, text: str, variable: str | None = None) -> None:
        self.findings.append(Finding(level="leftover", kind=kind, key=key, text=text, variable=variable))

    def _lease(self) -> None:
        data = self._store.read(LEASE_KEY)
        if data is None:
            return
        try:
            lease = Lease.from_bytes(data)
        except FormatError as error:
            self._left("lease", LEASE_KEY, str(error))
            return
        is_dead = is_dead_at_once(lease)
        if not is_dead:
            self.writer = str(lease) if is_dead is False else f"{lease}, which may be alive"

    def _rows(self) -> None:
        """Compare the rows that lie in place with those that are committed."""
        noun = self._manifest.schema.record_noun
        for array in growing(self._manifest.schema):
            try:
                there = ranges_of(self._checker.rows_in_place(array))
            except MPIStreamError as error:
                self.rows[array.name] = ()
                self._damage(error.kind, array.name, str(error), array.name)
                continue
            wanted = tuple(committed_rows(self._manifest.committed, array.row_length))
            self.rows[array.name] = overlap(there, wanted)
            n = array.row_length
            for a, b in difference(wanted, there):
                records = inside(self._manifest.committed, a * n, b * n)
                text = f"all objects of rows {a} to {b - 1} are missing, which hold committed {noun}s"
                self._damage("missing", f"{array.name}/c", text, array.name, records=(records[0][0], records[-1][1]))
            # Folders alone are ahead of use.
            beyond = difference(there, wanted)
            for a, b in ranges_of(row for row in members(beyond) if self._checker.has_objects(array, row)):
                text = f"rows {a} to {b - 1} are in place and hold no committed {noun}"
                self._uncommitted("uncommitted", f"{array.name}/c", text, array.name, records=(a * n, b * n))
        for array in self._manifest.schema.arrays.values():
            is_open = array.role is Role.STATIC and array.name not in self._manifest.statics
            if is_open and any(name != GROUP_KEY for name in self._store.list(array.name)):
                self._uncommitted("uncommitted", f"{array.name}/c", "objects of a static not committed", array.name)

    def _packs(self) -> None:
        named = 0
        for name in self._store.list(BLOBS_FOLDER):
            pack = parse_blob(name)
            if pack is not None and self._manifest.names_pack(*pack[:2]):
                self.packs.append(pack)
                named += 1
            else:
                text = "a pack of blobs that is not committed" if pack is not None else "no pack of blobs"
                self._uncommitted("uncommitted" if pack is not None else "unknown", f"{BLOBS_FOLDER}/{name}", text)
        if named < self._manifest.n_packs:
            text = f"{named} committed packs of blobs, the manifest counts {self._manifest.n_packs}"
            self._damage("missing", BLOBS_FOLDER, text)

    def _times(self) -> None:
        """Compare the stored times with the manifest's digests, bitwise, and look whether they ascend."""
        array, manifest = self._manifest.schema.time_array, self._manifest
        length, is_fixed = array.resolved_chunk_shape[0], not array.has_time
        # In a location series times are those of every series, and records have none.
        committed = () if manifest.schema.is_location_series else manifest.committed
        n_times = array.shape[0] if is_fixed else manifest.n_records
        if array.has_time:
            wanted = tuple(committed_rows(manifest.committed, array.row_length))
            if difference(wanted, self.rows.get(array.name, ())):
                return  # said already
        n_chunks = -(-n_times // length)
        there = len(self._store.list(f"{array.name}/c" if manifest.schema.key_separator == "/" else array.name))
        if there < n_chunks:
            self._damage("missing", f"{array.name}/c", f"{there} chunks of times, there must be {n_chunks}", array.name)
            return
        digest, last, found = _NO_TIMES, -math.inf, []
        for chunk in range(n_chunks):
            start = chunk * length
            try:
                values = self._checker.chunk(array, (chunk,))[: n_times - start]
            except MPIStreamError as error:
                records = inside(committed, start, start + length)
                key = chunk_key(array.name, manifest.schema.key_separator, (chunk,))
                span = (records[0][0], records[-1][1]) if records else None
                self._damage(error.kind, key, str(error), array.name, records=span)
                return
            steps = np.diff(np.concatenate(([last], values)))
            wrong = np.flatnonzero(~(np.isfinite(values) & (steps > 0)))
            if wrong.size:
                i = start + int(wrong[0])
                text = f"record {i} has t = {float(values[wrong[0]])!r}, which does not follow the one before"
                self._damage("times", f"{array.name}/c", text, array.name, records=(i, i + 1))
            last = values[-1]
            spans = inside(committed, start, start + length)
            digest = add_times(digest, ((i, float(values[i - start])) for a, b in spans for i in range(a, b)))
            if is_fixed:
                found.append(values)
        if digest != manifest.times_digest:
            text = "the times of the committed records have another digest than the manifest says"
            self._damage("times", f"{array.name}/c", text, array.name)
        if found and values_digest(np.concatenate(found)) != array.digest:
            self._damage(
                "digest", f"{array.name}/c", "the times have another digest than the manifest says", array.name
            )
        if committed:
            i = committed[-1][1] - 1
            stored = float(self._checker.chunk(array, (i // length,))[i % length])
            if stored != manifest.last_t:
                text = f"record {i} has t = {stored!r}, the manifest says {manifest.last_t!r}"
                self._damage("times", f"{array.name}/c", text, array.name, records=(i, i + 1))

    def _documents(self) -> None:
        """Compare the Zarr documents with those of the schema; that they lag behind is no damage."""
        manifest = self._manifest
        documents = make_documents(manifest.schema)
        n = manifest.n_records
        wanted = {k: parse_json(k, data) for k, data in documents.arrays(n, growing_only=False).items()}
        names = {a.name for a in growing(manifest.schema)}
        for key, expected in wanted.items():
            name = key.rpartition("/")[0]
            self._document(key, self._store.read(key), expected, name, name in names)
        data = self._store.read(GROUP_KEY)
        if data is None and manifest.commit_seq == 0:
            self._left("documents", GROUP_KEY, "missing: the store was made and not finished")
            return
        group = self._document(GROUP_KEY, data, parse_json(GROUP_KEY, documents.group(n)), None, False)
        entries = (group.get("consolidated_metadata") or {}) if group else {}
        entries = entries.get("metadata") if isinstance(entries, dict) else None
        if group and (not isinstance(entries, dict) or sorted(entries) != sorted(k.rpartition("/")[0] for k in wanted)):
            self._damage("documents", GROUP_KEY, "its consolidated metadata does not name the arrays of the store")
            return
        for key, expected in wanted.items() if group else ():
            name = key.rpartition("/")[0]
            self._compare(f"{GROUP_KEY}, {name}", entries[name], expected, name, name in names)  # type: ignore[index]

    def _document(
        self, key: str, data: bytes | None, expected: Mapping[str, Any], name: str | None, is_growing: bool
    ) -> Mapping[str, Any] | None:
        if data is None:
            self._damage("missing", key, "the document is missing", name)
            return None
        try:
            found = parse_json(key, data, is_strict=False)
        except FormatError as error:
            self._damage(error.kind, key, str(error), name)
            return None
        self._compare(key, found, expected, name, is_growing)
        return found

    def _compare(self, key: str, found: Any, expected: Mapping[str, Any], name: str | None, is_growing: bool) -> None:
        shape, wanted = (d.get("shape") if isinstance(d, Mapping) else None for d in (found, expected))
        wrong = [f for f in _FIELDS if not isinstance(found, Mapping) or found.get(f) != expected.get(f)]
        if is_growing and isinstance(shape, list) and len(shape) == len(wanted or []) and isinstance(shape[0], int):
            if shape[0] != (wanted or [0])[0] and not wrong:
                text = (
                    f"says {counted(shape[0], self._manifest.schema.record_noun)}, {(wanted or [0])[0]} are committed"
                )
                self._uncommitted("documents", key, text, name)
            shape = [*(wanted or [])[:1], *shape[1:]]
        if shape != wanted:
            wrong.append("shape")
        if wrong:
            self._damage("documents", key, f"{', '.join(wrong)} are not what the manifest's schema says", name)

    def _ours(self) -> None:
        """Look at what lies under ``.mpistream``."""
        manifest, epoch = self._manifest, self._manifest.epoch
        known = {k.rpartition("/")[2] for k in (MANIFEST_KEY, LEASE_KEY, EPOCHS_FOLDER, STAGE_FOLDER, DROPPED_FOLDER)}
        known |= {BLOBS_FOLDER.rpartition("/")[2], layout_key(epoch).rpartition("/")[2]}
        for name in self._store.list(FOLDER):
            if name not in known:
                self._uncommitted("unknown", f"{FOLDER}/{name}", "not of this epoch, or unknown")
        data = self._store.read(layout_key(epoch))
        if data is None or hashlib.sha256(data).hexdigest() != manifest.layout_digest:
            self._damage("layout", layout_key(epoch), "missing, or not the one that the manifest names")
        claim = self._store.read(epoch_key(epoch))
        # In a copy of the store it may be missing.
        if claim is not None and claim != manifest.run_id.encode():
            self._damage("claim", epoch_key(epoch), "claimed by another run than the manifest's")
        for name in self._store.list(EPOCHS_FOLDER):
            found = parse_epoch(name)
            if found is None or found > epoch:
                text = "claimed by an opening that has written no manifest" if found is not None else "no claim"
                self._uncommitted("claim", f"{EPOCHS_FOLDER}/{name}", text)
        for name in self._store.list(STAGE_FOLDER):
            self._stage(name)
        self._dropped()

    def _stage(self, name: str) -> None:
        key = f"{STAGE_FOLDER}/{name}"
        data = self._store.read(LEASE_KEY)
        # An owner that closes removes it, and one that failed may leave it. Parts without MPI may still commit what
        # they have staged.
        is_of_parts = name == str(self._manifest.epoch) and data is not None and self._closed_well(data)
        if is_of_parts:
            text = "the stage folder of parts without MPI, until the next opening"
            self.findings.append(Finding(level="in_flight", kind="stage", key=key, text=text))
        else:
            self._uncommitted("stage", key, "a stage folder")

    @staticmethod
    def _closed_well(data: bytes) -> bool:
        try:
            lease = Lease.from_bytes(data)
            return lease.closed and not lease.failed
        except FormatError:
            return False

    def _dropped(self) -> None:
        """See whether what is kept aside can be restored; folders without records to restore are left over."""
        manifest = self._manifest
        names = self._store.list(DROPPED_FOLDER)
        if not manifest.dropped:
            for name in names:
                self._uncommitted("dropped", f"{DROPPED_FOLDER}/{name}", "records set aside before the last commit")
            return
        aside = SetAside(self._store, manifest)
        for array in growing(manifest.schema):
            n = array.row_length
            for d in manifest.dropped:
                # Those that are found are few; those that a manifest claims may be any number.
                for row in range(d.start // n, min(-(-d.stop // n), d.start // n + _MAX_ROWS)):
                    if not self._is_kept(aside, array, row):
                        text = f"row {row} of dropped records is neither aside nor in place; it can't be restored"
                        self._damage("dropped", f"{array.name}/c", text, array.name, records=(d.start, d.stop))
                        break

    def _is_kept(self, aside: SetAside, array: ArraySpec, row: int) -> bool:
        first = [0] * (len(array.space_dims) if array.role is Role.VARIABLE else 0)
        key = chunk_key(array.name, self._manifest.schema.key_separator, (row, *first))
        if aside.find(key) is not None:
            return True
        opened = self._store.open(key)
        if opened is None:
            return False
        opened.close()
        return True

    def _root(self) -> None:
        """Find what is neither an array nor ours."""
        schema = self._manifest.schema
        arrays = {a.name: a for a in (*schema.own_arrays, *schema.arrays.values())}
        for name in self._store.list():
            if name not in (FOLDER, GROUP_KEY) and name not in arrays:
                self._left("unknown", name, "no array of this store")
        for name in arrays:
            for below in self._store.list(name):
                if array_key(name) != f"{name}/{below}" and below != "c" and not below.startswith("c."):
                    self._left("unknown", f"{name}/{below}", "no object of this array", name)
        if schema.key_separator == "/":
            for array in growing(schema):
                for name in self._store.list(f"{array.name}/c"):
                    if parse_epoch(name) is None:
                        self._left("unknown", f"{array.name}/c/{name}", "no row of this array", array.name)
        if (committed := schema.committed_array) is not None:
            self._committed(committed)

    def _committed(self, array: ArraySpec) -> None:
        """See whether what plain readers are told to be committed is."""
        manifest, length = self._manifest, array.resolved_chunk_shape[0]
        separator = manifest.schema.key_separator
        names = self._store.list(f"{array.name}/c" if separator == "/" else array.name)
        there = [i for name in names if (i := parse_epoch(name.removeprefix("c."))) is not None]
        wanted = tuple(committed_rows(manifest.committed, length))
        if missing := count(difference(wanted, ranges_of(there))):
            self._uncommitted("documents", f"{array.name}/c", f"{missing} chunks of what is committed are missing")
        for chunk in there:
            try:
                values = self._checker.chunk(array, (chunk,))
            except MPIStreamError as error:
                key = chunk_key(array.name, separator, (chunk,))
                self._damage(error.kind, key, str(error), array.name)
                continue
            told = np.zeros(length, bool)
            for a, b in inside(manifest.committed, chunk * length, (chunk + 1) * length):
                told[a - chunk * length : b - chunk * length] = True
            if (values != told).any():
                key = chunk_key(array.name, separator, (chunk,))
                self._uncommitted("documents", key, "does not say what is committed", array.name)


_MAX_ROWS = 100_000

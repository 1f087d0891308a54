"""Restart states in a rolling pair of stores: one whole state is always there.

A state is a stream of its own with one record, in a numbered folder, a *slot*. Each save creates the store of one
slot anew, the one whose state is oldest, and does not touch the others: whatever happens, and at whatever moment,
the newest committed state is either the one of before or the new one. A stream that dropped its old record would
do with one folder, but then damage to that one would be the end.

States are ordered by a number that each save raises, and that stands in the manifest, among the attributes of the
group. Not by their time: a run that starts again at an earlier time would be behind its own past.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import ArrayLike

from mpistream.agreement import Channel
from mpistream.comm import connect
from mpistream.description import AppendTime
from mpistream.errors import FormatError, MPIStreamError, ResumeError, SchemaError
from mpistream.manifest import CHECKPOINT_ATTR, MANIFEST_KEY, Manifest, parse_epoch
from mpistream.options import Options, resolve_options
from mpistream.reader import StoreReader, open_reader
from mpistream.region import RegionLike
from mpistream.resuming import read_manifest
from mpistream.schema import StreamSchema
from mpistream.session import write_open
from mpistream.store import open_store
from mpistream.times import TimeLike
from mpistream.token import CommitReceipt

__all__ = ["CheckpointPair"]

_log = logging.getLogger("mpistream")

_MIN_KEEP = 2


class CheckpointPair:
    """The newest restart states of a run, each a store of its own below one folder.

    Parameters
    ----------
    url
        Folder of the pair, on a file system that all ranks share; it is made by the first `save`.
    schema
        What a state holds: streaming variables, of which a state has one record, statics and coordinates.
    keep
        Number of states that are kept, at least 2.

    Raises
    ------
    SchemaError
        Fewer than 2 states, fixed times, or no schema.
    """

    def __init__(self, url: str | os.PathLike[str], schema: StreamSchema, keep: int = _MIN_KEEP) -> None:
        if not isinstance(schema, StreamSchema) or not isinstance(schema.time, AppendTime):
            raise SchemaError(
                "schema: give a StreamSchema with AppendTime; a state has a time of its own", kind="schema"
            )
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < _MIN_KEEP:
            raise SchemaError(
                f"keep {keep!r}: give {_MIN_KEEP} or more; while one state is replaced another must be there",
                kind="option",
            )
        self._url = os.fspath(url).rstrip("/")
        self._schema = schema
        self._keep = keep

    def __repr__(self) -> str:
        return f"CheckpointPair({self._url!r}, keep={self._keep})"

    def save(
        self,
        t: TimeLike,
        arrays: Mapping[str, ArrayLike],
        *,
        blobs: Mapping[str, bytes] | None = None,
        comm: Any = None,
        region: RegionLike | None = None,
        takeover: bool = False,
        options: Options | None = None,
    ) -> CommitReceipt:
        """Commit a state in the place of the oldest one.

        Collective.

        Parameters
        ----------
        t
            Its time, as in `StreamWriter.write_record`; any, also one before that of an older state.
        arrays
            Name -> this rank's block, of all streaming variables and statics.
        blobs
            Key -> bytes of this rank, such as the state of its random numbers.
        comm, region, takeover, options
            As in `write_open`.

        Returns
        -------
        The receipt of its commit.

        Raises
        ------
        MPIStreamError
            As `write_open`, `StreamWriter.write_record` and `StreamWriter.commit`: nothing was saved, and the newest
            state is the one of before.

        Notes
        -----
        When it returns, the state is committed and durable. One that was restored is replaced, at the earliest, by
        the second save after it.
        """
        slot, number = self._agreed("CheckpointPair.save", comm, resolve_options(options).timeout, self._place)
        schema = self._schema.with_attrs({CHECKPOINT_ATTR: number})
        statics = {name: arrays[name] for name in schema.arrays if name in arrays and not schema.arrays[name].has_time}
        with write_open(
            f"{self._url}/{slot}",
            schema,
            comm=comm,
            region=region,
            overwrite=True,
            takeover=takeover,
            options=options,
        ) as w:
            failure = None
            try:
                for name, array in statics.items():
                    w.write_static(name, array)
                w.write_record(t, {name: array for name, array in arrays.items() if name not in statics})
                for key, payload in (blobs or {}).items():
                    w.write_blob(key, payload, 0)
            except MPIStreamError as error:
                # One rank's wrong block: every rank hears of it in the commit, and other writers go on.
                failure = error
            return w._commit_or_raise(failure)

    def restore(self, comm: Any = None) -> tuple[StoreReader, float] | None:
        """Open the newest committed state, on any number of ranks.

        Collective.

        Parameters
        ----------
        comm
            An mpi4py communicator or a Fortran handle (int).

        Returns
        -------
        A reader, whose record 0 is the state, and the state's time in the schema's units; None when there is no state
        yet. Blobs are read with `StoreReader.read_blob` and the scope 0.

        Raises
        ------
        ResumeError
            On every rank, kind ``schema``: the newest state is one of another schema.
        FormatError
            On every rank: there are states, and the manifests of all of them are damaged.
        """
        found = self._agreed("CheckpointPair.restore", comm, Options().timeout, self._newest)
        if found is None:
            return None
        slot, t = found
        return open_reader(f"{self._url}/{slot}", comm=comm), float(t)

    def _agreed(self, operation: str, comm: Any, timeout: float, look: Callable[[], Any]) -> Any:
        """Return on every rank what rank 0 finds."""
        digest = hashlib.sha256(json.dumps([self._url, self._keep, self._schema.to_json()]).encode()).hexdigest()
        channel = Channel(connect(comm, timeout), timeout)
        try:
            found = channel.exchange(operation, digest=digest, answer=lambda votes: [look()] * len(votes))
        except MPIStreamError:
            channel.close_failed()
            raise
        channel.close()
        return found

    def _states(self) -> tuple[dict[int, tuple[int, Manifest]], list[tuple[int, FormatError]]]:
        """Return slot -> number and manifest of each state that is whole, and the slots with damaged ones."""
        whole, damaged = {}, []
        store = open_store(self._url)
        if os.path.isfile(self._url) or store.read(MANIFEST_KEY) is not None:
            what = "a file" if os.path.isfile(self._url) else "a stream"
            raise FormatError(f"{self._url} is {what}, and not the folder of a CheckpointPair", kind="foreign")
        # Of more than are kept now, too: the newest may be among them.
        for slot in (s for name in store.list() if (s := parse_epoch(name)) is not None):
            try:
                manifest = read_manifest(open_store(f"{self._url}/{slot}"))
                number = None if manifest is None else manifest.schema.attrs.get(CHECKPOINT_ATTR)
                if manifest is not None and (isinstance(number, bool) or not isinstance(number, int)):
                    raise FormatError(
                        f"no attribute {CHECKPOINT_ATTR!r}; this is no state of a CheckpointPair", kind="foreign"
                    )
            except FormatError as error:
                damaged.append((slot, error))
                continue
            # Without a record it is a save that did not come to its end.
            if manifest is not None and manifest.committed:
                assert number is not None
                whole[slot] = number, manifest
        return whole, damaged

    def _place(self) -> tuple[int, int]:
        """Return the slot to be written, and the number of the state that is."""
        whole, damaged = self._states()
        for slot, error in damaged:
            if error.kind in ("foreign", "version"):
                raise FormatError(f"{self._url}/{slot}: {error}; it is not replaced", kind=error.kind)
        number = 1 + max((n for n, _ in whole.values()), default=0)
        # One that holds no whole state first; the newest is never the oldest of two or more.
        return min(range(self._keep), key=lambda slot: whole[slot][0] if slot in whole else -1), number

    def _newest(self) -> tuple[int, float] | None:
        whole, damaged = self._states()
        for slot, error in damaged:
            _log.warning("%s/%d: damaged, an older state is taken if there is one: %s", self._url, slot, error)
        if not whole:
            if damaged:
                raise FormatError(f"{self._url}/{damaged[0][0]}: {damaged[0][1]}", kind=damaged[0][1].kind)
            return None
        slot = max(whole, key=lambda s: whole[s][0])
        manifest = whole[slot][1]
        if self._schema.with_layout_of(manifest.schema).fingerprint() != manifest.fingerprint:
            raise ResumeError(
                f"{self._url}/{slot}: the state has another schema than the one given; give the one it was saved with",
                kind="schema",
            )
        assert manifest.last_t is not None
        return slot, manifest.last_t

"""Options of a writer, from the call or from the file that a site names in ``$MPISTREAM_OPTIONS``."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mpistream.errors import SchemaError
from mpistream.names import check_writers

__all__ = ["Options", "resolve_options"]

_VARIABLE = "MPISTREAM_OPTIONS"
# Thirty years; clocks and JSON have no infinity.
_MAX_TTL = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a writer.

    Parameters
    ----------
    durability
        ``"fsync"``: a committed record survives the loss of power. ``"none"``: it survives the death of
        processes; the manifest, and objects that replace committed records, are synced all the same.
    threads
        0: blocks are encoded, written and synced in the calling thread, straight from the caller's arrays. A number:
        so many threads do it in the background, from copies, but for variables with inner chunks under 256 KiB, which
        the caller encodes. None (default): as many as the rank has cores to spare, at most four; where it has
        less than two cores to itself, the caller encodes and one thread writes and syncs. ``w.stats`` says what was
        chosen. What the caller has encoded into small objects is written by up to eight threads more, which do
        little but wait for syncs. Writers of one communicator share the threads, the largest number of theirs.
    max_pending_nbytes
        Bytes, copied or encoded, that may wait for those threads before the caller waits; by default twice this rank's
        bytes per record. Writers of one communicator share one bound, the largest of theirs. In a location series,
        where the threads encode whatever the size of its chunks, it also bounds the chunks that are being filled; by
        default it is twice a chunk of each variable.
    writers
        How many ranks write what all of them hold: ``"all"``, a number, ``"node"`` (one on each node), or ``"auto"``
        (default): all where the regions lie on shard edges and make objects of 4 MiB or more, else as few as give
        objects of about 64 MiB, at least one on each node. They are spread over the nodes as evenly as can be, such
        that few bytes leave a node. The others only send. A number above that of the ranks is all of them, and the
        plan says so.
    rearrange
        ``"auto"`` (default): regions may lie anywhere. ``"never"``: those that don't lie on shard edges are
        refused, and nothing moves between ranks.
    timeout
        Seconds that rank 0 waits for the other ranks in a collective call; they wait a quarter longer for its
        answer, which names the rank that did not come.
    exit_timeout
        Seconds that a rank whose ``with`` body raised waits for the others to hear of it.
    lease_ttl
        Seconds without a sign of life after which another host's writer counts as dead.
    progress
        Whether rank 0 shows on stderr how the run is getting on: on a terminal in one line, with a bar where the time
        dim is fixed; elsewhere in a line a commit.

    Raises
    ------
    SchemaError
        Kind ``option``.
    """

    durability: str = "fsync"
    threads: int | None = None
    max_pending_nbytes: int | None = None
    writers: str | int = "auto"
    rearrange: str = "auto"
    timeout: float = 600.0
    exit_timeout: float = 30.0
    lease_ttl: float = 120.0
    progress: bool = False

    def __post_init__(self) -> None:
        if self.durability not in ("fsync", "none"):
            raise SchemaError(f"option durability {self.durability!r}: use 'fsync' or 'none'", kind="option")
        if self.threads is not None and not (type(self.threads) is int and self.threads >= 0):
            raise SchemaError(
                f"option threads {self.threads!r}: use None or a number of threads, 0 or more", kind="option"
            )
        check_writers(self.writers, self.rearrange)
        if not isinstance(self.progress, bool):
            raise SchemaError(f"option progress {self.progress!r}: use True or False", kind="option")
        if self.max_pending_nbytes is not None and not _is_positive(self.max_pending_nbytes):
            raise SchemaError(
                f"option max_pending_nbytes {self.max_pending_nbytes!r}: give a number of bytes above 0",
                kind="option",
            )
        for name in ("timeout", "exit_timeout", "lease_ttl"):
            if not _is_positive(getattr(self, name)):
                raise SchemaError(f"option {name} {getattr(self, name)!r}: give seconds above 0", kind="option")
        if self.lease_ttl > _MAX_TTL:
            raise SchemaError(f"option lease_ttl {self.lease_ttl!r}: give at most {_MAX_TTL:g} seconds", kind="option")

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON types.

        Not collective.
        """
        return asdict(self)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def resolve_options(options: Options | None, environment: Mapping[str, str] | None = None) -> Options:
    """Return the options of the call, else those of the site's file, else the defaults.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``option`` when the file can't be read or names an unknown option.
    """
    if options is not None and not isinstance(options, Options):
        raise SchemaError(f"options is a {type(options).__name__}; give Options(...)", kind="option")
    path = (os.environ if environment is None else environment).get(_VARIABLE)
    if options is not None or not path:
        return options or Options()
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SchemaError(f"${_VARIABLE} = {path}: not valid TOML: {error}", kind="option") from error
    except OSError as error:
        raise SchemaError(f"${_VARIABLE} = {path}: {error}", kind="option") from error
    known = {f.name for f in fields(Options)}
    unknown = sorted(set(found) - known)
    if unknown:
        raise SchemaError(f"${_VARIABLE} = {path}: unknown options {unknown}; known are {sorted(known)}", kind="option")
    try:
        return Options(**found)
    except SchemaError as error:
        raise SchemaError(f"${_VARIABLE} = {path}: {error}", kind="option") from error

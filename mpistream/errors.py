"""The errors of mpistream: one tree, drawn by what a caller can do about each.

::

    MPIStreamError                 catch-all; ``.kind`` is a short stable code
    +-- SchemaError                (ValueError) the description or an argument is wrong: mend the call
    +-- AlignmentError             (ValueError) a region does not lie on shard edges: change region or shards
    +-- TilingError                (ValueError) the regions overlap or leave a hole: change the regions
    +-- ProtocolError              (RuntimeError) calls in a wrong order, or differing over ranks: mend the program
    +-- CommitError                (OSError) this commit did not happen: mend the cause, commit again or roll back
    +-- ResumeError                (RuntimeError) the store can't be resumed as asked: change ``at`` or the schema
    +-- FencedError                (RuntimeError) a newer opening owns the store: stop writing
    +-- FormatError                (ValueError) what lies in the store is damaged, foreign or too new
    +-- StoreError                 (OSError) the storage failed: disk, permissions, wrong directory

A message names the variable or dim, both numbers, and what to do.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlignmentError",
    "CommitError",
    "FencedError",
    "FormatError",
    "MPIStreamError",
    "ProtocolError",
    "ResumeError",
    "SchemaError",
    "StoreError",
    "TilingError",
    "counted",
    "error_from_json",
    "error_to_json",
    "there_are",
]


class MPIStreamError(Exception):
    """Base of all errors of mpistream.

    Parameters
    ----------
    message
        What is wrong, with both numbers, and the way out.
    kind
        Short stable code for handlers, for example ``"shape"``.
    rank
        MPI rank where the cause lies, or None when it is not one rank's.
    errno
        The system's error number, where the system gave one.
    """

    default_kind = "error"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        rank: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind if kind is not None else self.default_kind
        self.rank = rank
        # OSError has a descriptor of this name: set it last, so that both kinds of class carry it.
        self.errno = errno

    def __str__(self) -> str:
        return self.message


class SchemaError(MPIStreamError, ValueError):
    """A schema, an option or an argument is wrong."""

    default_kind = "schema"


class AlignmentError(MPIStreamError, ValueError):
    """A region does not lie on shard edges."""

    default_kind = "alignment"


class TilingError(MPIStreamError, ValueError):
    """The ranks' regions overlap or leave a hole."""

    default_kind = "tiling"


class ProtocolError(MPIStreamError, RuntimeError):
    """Calls came in a wrong order, or differed over the ranks."""

    default_kind = "protocol"


class CommitError(MPIStreamError, OSError):
    """This commit did not happen.

    Every kind promises that nothing was committed, except three. ``outcome_unknown``: the writer is dead, and
    ``write_resume`` tells what was committed. ``partly_committed``, of `commit_all` alone: the message names the
    streams that are committed, every writer goes on from what is, and the rest is still pending. And
    ``not_published``: records are invalidated, and plain readers don't know it yet.
    """

    default_kind = "commit"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        rank: int | None = None,
        errno: int | None = None,
        cause_text: str | None = None,
    ) -> None:
        super().__init__(message, kind=kind, rank=rank, errno=errno)
        self.cause_text = cause_text if cause_text is not None else message


class ResumeError(MPIStreamError, RuntimeError):
    """The store can't be resumed as asked."""

    default_kind = "resume"


class FencedError(MPIStreamError, RuntimeError):
    """A newer opening of the store owns it; this writer must stop."""

    default_kind = "fenced"


class FormatError(MPIStreamError, ValueError):
    """What lies in the store is damaged, foreign or of a newer format."""

    default_kind = "format"


class StoreError(MPIStreamError, OSError):
    """The storage failed or is not what it should be."""

    default_kind = "store"


_BY_NAME: dict[str, type[MPIStreamError]] = {
    c.__name__: c
    for c in (
        MPIStreamError,
        SchemaError,
        AlignmentError,
        TilingError,
        ProtocolError,
        CommitError,
        ResumeError,
        FencedError,
        FormatError,
        StoreError,
    )
}


def error_to_json(error: BaseException, *, rank: int | None = None) -> dict[str, Any]:
    """Return what another rank needs to raise the same error.

    Not collective.

    Parameters
    ----------
    error
        Any exception; one that is not ours becomes a plain `MPIStreamError` of kind
        ``"exception"`` that names its class.
    rank
        The rank it happened on, used when the error does not name one itself.
    """
    if isinstance(error, MPIStreamError):
        name, text, kind = type(error).__name__, error.message, error.kind
        own_rank = error.rank
    elif isinstance(error, OSError):
        name, text, kind, own_rank = "StoreError", f"{type(error).__name__}: {error}", "io", None
    else:
        name, text, kind = "MPIStreamError", f"{type(error).__name__}: {error}", "exception"
        own_rank = None
    return {
        "class": name,
        "message": text,
        "kind": kind,
        "rank": own_rank if own_rank is not None else rank,
        "errno": getattr(error, "errno", None),
        "cause_text": getattr(error, "cause_text", None),
    }


def error_from_json(document: dict[str, Any]) -> MPIStreamError:
    """Return the error that `error_to_json` described.

    Not collective.
    """
    cls = _BY_NAME[document["class"]]
    error = cls(document["message"], kind=document["kind"], rank=document["rank"], errno=document["errno"])
    if isinstance(error, CommitError) and document["cause_text"] is not None:
        error.cause_text = document["cause_text"]
    return error


def as_ours(error: BaseException, rank: int) -> MPIStreamError:
    """Return an error of ours that says what ``error`` says.

    Not collective.
    """
    return error if isinstance(error, MPIStreamError) else error_from_json(error_to_json(error, rank=rank))


def counted(n: float, noun: str) -> str:
    """Return a number with what it counts, for a message: ``1 record``, ``2 records``.

    Not collective.
    """
    text = f"{n}" if isinstance(n, int) else f"{n:g}"
    return f"{text} {noun}" if n == 1 else f"{text} {noun}{'es' if noun.endswith('x') else 's'}"


def there_are(n: int, noun: str) -> str:
    """Return that so many are there, for a message.

    Not collective.
    """
    return f"there {'is' if n == 1 else 'are'} {counted(n, noun)}"

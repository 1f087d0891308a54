"""What travels: the token of a writer, the receipt of a commit."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from mpistream.errors import FormatError
from mpistream.manifest import Manifest
from mpistream.ranges import Ranges, count
from mpistream.region import AnyRegion, region_from_json

__all__ = ["CommitReceipt", "CommitToken", "times_sha256"]


# What `mpistream.errors.error_to_json` gives.
_FAILURE = ("class", "message", "kind", "rank", "errno", "cause_text")


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def times_sha256(times: Sequence[float]) -> str:
    """Return the sha256 of times as little-endian float64: equal iff they are bitwise the same.

    Not collective.
    """
    return hashlib.sha256(np.asarray(times, "<f8").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitToken:
    """What one writer has put in place since the last committed state.

    Its size depends neither on the array nor on the number of shards.
    """

    store_id: str
    run_id: str
    fingerprint: str
    epoch: int
    base_seq: int
    """The commit_seq on which it builds."""
    writer: int
    records: Ranges
    """Record set."""
    last_t: float | None
    times_sha256: str
    n_cells: Mapping[str, int]
    """Variable -> cells in place, over all records of the set."""
    statics: Mapping[str, int]
    """Static -> cells in place."""
    n_blobs: int
    n_packs: int
    """Packs of blobs in place, 0 or 1."""
    region: AnyRegion
    n_objects: int
    nbytes: int
    """Bytes on disk."""
    times: tuple[float, ...] | None = None
    """Without MPI the times themselves: whoever commits has no other source for them."""
    failure: Mapping[str, Any] | None = None
    """What went wrong while placing, as `mpistream.errors.error_to_json` describes it."""

    def to_json(self) -> dict[str, Any]:
        """Return the token as JSON types.

        Not collective.
        """
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **plain,
            "n_cells": dict(self.n_cells),
            "statics": dict(self.statics),
            "region": self.region.to_json(),
            "failure": None if self.failure is None else dict(self.failure),
        }

    def to_text(self) -> str:
        """Return the token as text: three lines of JSON, the first two of which many writers have in common.

        Not collective.
        """
        document = self.to_json()
        return "\n".join(
            json.dumps({name: document[name] for name in names}, separators=(",", ":"), allow_nan=False)
            for names in (_OF_COMMIT, _OF_COUNTS, _OF_WRITER)
        )

    @classmethod
    def from_text(cls, text: str) -> CommitToken:
        """Return the token that `to_text` wrote.

        Not collective.

        Raises
        ------
        FormatError
            Kind ``token`` when it is not such a text.
        """
        try:
            of_commit, of_counts, of_writer = text.split("\n")
            return cls(**_commit_of(of_commit), **_counts_of(of_counts), **_writer_fields(json.loads(of_writer)))
        except (*_DAMAGE, RecursionError) as error:
            raise _damaged(error) from error

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CommitToken:
        """Return the token that `to_json` described.

        Not collective.

        Raises
        ------
        FormatError
            Kind ``token`` when it is not such a description.
        """
        try:
            return cls(**_commit_fields(document), **_counts_fields(document), **_writer_fields(document))
        except _DAMAGE as error:
            raise _damaged(error) from error


# The fields of a token by who has them in common: all writers of a commit, all with as much of it, nobody.
_OF_COMMIT = (
    *("store_id", "run_id", "fingerprint", "epoch", "base_seq", "records", "last_t", "times_sha256", "times"),
    "failure",
)
_OF_COUNTS = ("n_cells", "statics", "n_blobs", "n_packs", "n_objects")
_OF_WRITER = ("writer", "nbytes", "region")
_DAMAGE = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)


def _damaged(error: BaseException) -> FormatError:
    return FormatError(f"damaged token: {type(error).__name__}: {error}", kind="token")


def _commit_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "store_id": str(document["store_id"]),
        "run_id": str(document["run_id"]),
        "fingerprint": str(document["fingerprint"]),
        "epoch": operator.index(document["epoch"]),
        "base_seq": operator.index(document["base_seq"]),
        "records": tuple((operator.index(a), operator.index(b)) for a, b in document["records"]),
        "last_t": None if document["last_t"] is None else _number(document["last_t"]),
        "times_sha256": str(document["times_sha256"]),
        "times": None if document["times"] is None else tuple(_number(t) for t in document["times"]),
        "failure": None if document["failure"] is None else {k: document["failure"][k] for k in _FAILURE},
    }


def _counts_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_cells": {str(k): operator.index(n) for k, n in document["n_cells"].items()},
        "statics": {str(k): operator.index(n) for k, n in document["statics"].items()},
        "n_blobs": operator.index(document["n_blobs"]),
        "n_packs": operator.index(document["n_packs"]),
        "n_objects": operator.index(document["n_objects"]),
    }


def _writer_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "writer": operator.index(document["writer"]),
        "nbytes": operator.index(document["nbytes"]),
        "region": region_from_json(document["region"]),
    }


# Of very many writers most have the same first two lines: they are taken apart once, and held once. A token is not
# changed once it is made, and neither is what it holds.


@lru_cache(maxsize=64)
def _commit_of(text: str) -> dict[str, Any]:
    return _commit_fields(json.loads(text))


@lru_cache(maxsize=64)
def _counts_of(text: str) -> dict[str, Any]:
    return _counts_fields(json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReceipt:
    """What a commit did: the same on every rank."""

    commit_seq: int
    epoch: int
    n_records: int
    last_t: float | None
    n_new_records: int
    new_statics: tuple[str, ...]
    n_packs: int
    """Packs of blobs that this commit added, over all ranks."""
    n_objects: int
    nbytes: int
    """Bytes that this commit put on disk, over all ranks, documents left out."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """On the owner: what did not go well after the commit and will be done again by the next one."""

    @classmethod
    def of(cls, manifest: Manifest) -> CommitReceipt:
        """Return the receipt of a state to which nothing was added.

        Not collective.
        """
        return cls(
            commit_seq=manifest.commit_seq,
            epoch=manifest.epoch,
            n_records=count(manifest.committed),
            last_t=manifest.last_t,
            n_new_records=0,
            new_statics=(),
            n_packs=0,
            n_objects=0,
            nbytes=0,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the receipt as JSON types.

        Not collective.
        """
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> CommitReceipt:
        """Return the receipt that `to_json` described.

        Not collective.
        """
        return cls(
            **{
                **document,
                "new_statics": tuple(document["new_statics"]),
                "warnings": tuple(document["warnings"]),
            }
        )

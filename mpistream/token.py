"""What travels: the token of a writer, the receipt of a commit."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
        """Return the token as JSON text.

        Not collective.
        """
        return json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False)

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
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"damaged token: {error}", kind="token") from error
        return cls.from_json(document)

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
            return cls(
                store_id=str(document["store_id"]),
                run_id=str(document["run_id"]),
                fingerprint=str(document["fingerprint"]),
                epoch=operator.index(document["epoch"]),
                base_seq=operator.index(document["base_seq"]),
                writer=operator.index(document["writer"]),
                records=tuple((operator.index(a), operator.index(b)) for a, b in document["records"]),
                n_blobs=operator.index(document["n_blobs"]),
                n_packs=operator.index(document["n_packs"]),
                times_sha256=str(document["times_sha256"]),
                n_objects=operator.index(document["n_objects"]),
                nbytes=operator.index(document["nbytes"]),
                last_t=None if document["last_t"] is None else _number(document["last_t"]),
                n_cells={str(k): operator.index(n) for k, n in document["n_cells"].items()},
                statics={str(k): operator.index(n) for k, n in document["statics"].items()},
                region=region_from_json(document["region"]),
                times=None if document["times"] is None else tuple(_number(t) for t in document["times"]),
                failure=None if document["failure"] is None else {k: document["failure"][k] for k in _FAILURE},
            )
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"damaged token: {type(error).__name__}: {error}", kind="token") from error


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

"""What a writer has done, and how; and what all ranks have, at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mpistream.plan import size_text

__all__ = ["RunStats", "WriterStats"]


@dataclass(slots=True, kw_only=True)
class WriterStats:
    """Counts of one writer since it was opened; those of its threads may still grow until the next commit."""

    threads: int = 0
    """Threads that work behind the caller's back."""
    background: tuple[str, ...] = ()
    """Variables that these threads encode; the caller encodes the others."""
    n_cores: int = 0
    """Cores that this rank was found to have."""
    n_records: int = 0
    nbytes_in: int = 0
    """Bytes of blocks in the dtype on disk that this rank writes, of records and statics."""
    nbytes_copied: int = 0
    """Bytes of them that were copied, for those threads to read."""
    nbytes_encoded: int = 0
    """Bytes of objects that were given to the store."""
    n_objects: int = 0
    n_commits: int = 0
    n_buffers: int = 0
    """Blocks of memory that were allocated for such copies; they are used again."""
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("record", "commit", "wait", "encode", "write", "sync"), 0.0)
    )
    """Time that the caller was inside our calls: ``record``, those that take records and statics, ``commit``, which
    ``flush`` counts as, and ``wait``, the part of these that it was held up because ``max_pending_nbytes`` were on
    their way. And, whoever did it: ``encode``, encoding variables, ``write``, writing objects, and ``sync``, waiting
    until objects and their names are durable."""
    run: RunStats | None = None
    """What all ranks have done, once `StreamWriter.close` has gone well; of a part without MPI, what it has done."""

    @property
    def mode(self) -> str:
        """What was chosen: ``"background"``, threads encode and write; ``"write-behind"``, the caller encodes and a
        thread writes; or ``"synchronous"``."""
        if not self.threads:
            return "synchronous"
        return "background" if self.background else "write-behind"

    @property
    def ratio(self) -> float | None:
        """Bytes of blocks a byte of objects, None before there are any; a row that was written again counts again."""
        return self.nbytes_in / self.nbytes_encoded if self.nbytes_encoded else None

    @property
    def blocked(self) -> float:
        """Seconds that the caller was inside our calls."""
        return self.seconds["record"] + self.seconds["commit"]

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Count what the body takes as the caller's time.

        Not collective.
        """
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - began

    def to_json(self) -> dict[str, Any]:
        """Return what `RunStats.of` needs of this rank, as JSON types.

        Not collective.
        """
        counts = {name: getattr(self, name) for name in ("nbytes_in", "nbytes_encoded", "n_objects")}
        return {**counts, "seconds": {**self.seconds, "blocked": self.blocked}}


def _of(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """What the ranks of one opening did, from its beginning to its end."""

    n_ranks: int
    n_records: int
    """Records that were committed; of a part, that it wrote."""
    n_commits: int
    nbytes_in: int
    """Bytes of blocks in the dtype on disk, over all ranks."""
    nbytes_encoded: int
    """Bytes of objects, over all ranks."""
    n_objects: int
    elapsed: float
    """Seconds from the opening to the last commit, of the rank that was at it for longest."""
    seconds: Mapping[str, float]
    """The most that any rank has of each of `WriterStats.seconds`, and of ``blocked``."""
    record_noun: str = "record"
    """What the records are: ``"location"`` in a location series."""

    @classmethod
    def of(
        cls, votes: Sequence[Mapping[str, Any]], *, n_records: int, n_commits: int, record_noun: str = "record"
    ) -> RunStats:
        """Return the account of all ranks.

        Not collective.

        Parameters
        ----------
        votes
            `WriterStats.to_json` of each rank, and its ``elapsed``.
        n_records, n_commits, record_noun
            As here.
        """
        return cls(
            n_ranks=len(votes),
            n_records=n_records,
            n_commits=n_commits,
            record_noun=record_noun,
            nbytes_in=sum(v["nbytes_in"] for v in votes),
            nbytes_encoded=sum(v["nbytes_encoded"] for v in votes),
            n_objects=sum(v["n_objects"] for v in votes),
            elapsed=max(v["elapsed"] for v in votes),
            seconds={what: max(v["seconds"][what] for v in votes) for what in votes[0]["seconds"]},
        )

    @property
    def ratio(self) -> float | None:
        """Bytes of blocks a byte of objects, None where there are none; a row that was written again counts again."""
        return self.nbytes_in / self.nbytes_encoded if self.nbytes_encoded else None

    @property
    def blocked(self) -> float:
        """Seconds that the rank was blocked that was blocked longest."""
        return self.seconds["blocked"]

    def to_json(self) -> dict[str, Any]:
        """Return the account as JSON types.

        Not collective.
        """
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f" (ratio {self.ratio:.2f})"
        share = f"{self.blocked / self.elapsed:.1%}" if self.elapsed > 0 else "all"
        speed = f", {size_text(self.nbytes_in / self.blocked)}/s" if self.blocked > 0 else ""
        times = ", ".join(f"{what} {self.seconds[what]:.3g}" for what in ("wait", "encode", "write", "sync"))
        return (
            f"{_of(self.n_records, self.record_noun)} in {_of(self.n_commits, 'commit')} by "
            f"{_of(self.n_ranks, 'rank')}, {size_text(self.nbytes_in)} as {size_text(self.nbytes_encoded)}{ratio} in "
            f"{_of(self.n_objects, 'object')}; seconds of the slowest rank: blocked {self.blocked:.3g} of "
            f"{self.elapsed:.3g} ({share}{speed}), {times}"
        )

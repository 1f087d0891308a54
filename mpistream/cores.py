"""Cores: how many a rank has, and what it does with those that the simulation leaves idle.

A rank counts the cores on which it may run, each divided by the number of ranks of its node that may run there, too:
so ranks that are bound to cores of their own keep them, and ranks that are not bound share the node. SLURM may promise
a rank fewer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Workers", "cores_of_this_process", "cores_per_rank", "workers_of"]

_SLURM_VARIABLE = "SLURM_CPUS_PER_TASK"
# A rank's output rarely needs more: one core encodes some 2 GB/s, and more threads take turns at the interpreter.
_MAX_AUTO_THREADS = 4


@dataclass(frozen=True, slots=True)
class Workers:
    """What is done behind the caller's back."""

    n_threads: int
    """0: nothing."""
    are_encoding: bool
    """Whether these threads encode, too; else they only write what the caller has encoded."""


def cores_of_this_process(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return on which cores this process may run, and how many it was promised, as JSON types.

    Not collective.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    else:  # macOS has no affinity
        allowed = list(range(os.cpu_count() or 1))
    promised = (os.environ if environment is None else environment).get(_SLURM_VARIABLE, "")
    return {
        # A mask: of 10,000 ranks with 256 cores each this is what rank 0 reads.
        "mask": f"{sum(1 << core for core in allowed):x}",
        "promised": int(promised) if promised.isdecimal() and int(promised) else None,
    }


def cores_per_rank(votes: Sequence[tuple[str, Mapping[str, Any]]]) -> list[int]:
    """Return how many cores each rank has to itself.

    Not collective.

    Parameters
    ----------
    votes
        Of each rank the name of its node, and what `cores_of_this_process` said there.
    """
    sharing: dict[str, Counter[str]] = {}
    for node, cores in votes:
        sharing.setdefault(node, Counter())[cores["mask"]] += 1
    # Most ranks of a node have the same mask.
    known = {(node, mask): _cores_of(mask, masks) for node, masks in sharing.items() for mask in masks}
    found = []
    for node, cores in votes:
        n, promised = known[node, cores["mask"]], cores["promised"]
        found.append(n if promised is None else min(n, promised))
    return found


def _cores_of(mask: str, masks: Mapping[str, int]) -> int:
    bits = {other: int(other, 16) for other in masks}
    mine = bits[mask]
    by_core = [
        sum(n for other, n in masks.items() if bits[other] >> core & 1)
        for core in range(mine.bit_length())
        if mine >> core & 1
    ]
    # Equal shares of equally shared cores, exactly: 1/3 + 1/3 + 1/3 is a whole core.
    return sum(n // n_ranks for n_ranks, n in Counter(by_core).items())


def workers_of(threads: int | None, n_cores: int) -> Workers:
    """Return what a rank with so many cores does behind the caller's back.

    Not collective.

    Parameters
    ----------
    threads
        `mpistream.options.Options.threads`.
    n_cores
        Cores of the rank.
    """
    if threads is not None:
        return Workers(threads, are_encoding=threads > 0)
    if n_cores < 2:  # noqa: PLR2004 (one for the simulation, one for its output)
        return Workers(1, are_encoding=False)
    return Workers(min(n_cores - 1, _MAX_AUTO_THREADS), are_encoding=True)

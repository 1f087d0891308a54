"""How many cores this process may count on."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["n_cores"]

# Ranks on this node, as MPICH and its children, and Open MPI, tell each process.
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


def n_cores(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of cores of this process, at least 1.

    Not collective.

    Parameters
    ----------
    environment
        Process environment: a launcher names in it the ranks on a node, and a job its cores a task.

    Notes
    -----
    Ranks that may all run on every core of the node share them.
    """
    known = os.environ if environment is None else environment

    def number(name: str) -> int | None:
        text = known.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None

    n_node = os.cpu_count() or 1
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else n_node
    n_ranks = next((found for name in _LOCAL_SIZES if (found := number(name)) is not None), 1)
    if n == n_node:
        n //= n_ranks
    return max(1, min(n, number("SLURM_CPUS_PER_TASK") or n))

"""Which rank writes which part of an array.

Theory of operation
-------------------
Each part goes to the node that holds most of it, and there to the rank that holds most of it, such that as few cells
as possible leave their node, and of those that stay as few as possible their rank. A writer has memory for what it
writes and a core for the codec, and those of one node share both: so a node has as many writers as it must have for
all parts to be written, and no more. With one writer a node, that is one on each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_owners"]

# Up to this many pairs of rank and part the assignment is exact; its cost grows with the square of the parts.
_MAX_EXACT_PAIRS = 250_000


def best_owners(
    nodes: Sequence[int],
    n_targets: int,
    ranks: NDArray[np.int64],
    targets: NDArray[np.int64],
    n_cells: NDArray[np.int64],
) -> list[int]:
    """Return the rank that writes each target, each rank at most one.

    Not collective.

    Parameters
    ----------
    nodes
        The number of the node that each rank runs on.
    n_targets
        How many targets there are; not more than ranks.
    ranks, targets, n_cells
        Cells of a target that a rank holds, pair by pair.
    """
    node_of, n_ranks = np.unique(nodes, return_inverse=True)[1], len(nodes)
    sizes = np.bincount(node_of)
    # For all of them alike: exact within nodes of an assignment that is not would gain little.
    is_exact = n_ranks * n_targets <= _MAX_EXACT_PAIRS
    chosen = _assigned(_room(sizes, n_targets), n_targets, node_of[ranks], targets, n_cells, is_exact=is_exact)
    stays = np.flatnonzero(node_of[ranks] == chosen[targets])
    order = stays[np.argsort(node_of[ranks[stays]], kind="stable")]
    bounds = np.concatenate(([0], np.cumsum(np.bincount(node_of[ranks[order]], minlength=len(sizes)))))
    members, firsts = np.argsort(node_of, kind="stable"), np.cumsum(sizes) - sizes
    at = np.empty(n_ranks, dtype=np.int64)  # which one of its node a rank is
    at[members] = np.arange(n_ranks) - np.repeat(firsts, sizes)
    owners = np.empty(n_targets, dtype=np.int64)
    for node in np.unique(chosen):
        own = np.flatnonzero(chosen == node)
        pairs = order[bounds[node] : bounds[node + 1]]
        found = _assigned(
            np.ones(sizes[node], dtype=np.int64),
            len(own),
            at[ranks[pairs]],
            np.searchsorted(own, targets[pairs]),
            n_cells[pairs],
            is_exact=is_exact,
        )
        owners[own] = members[firsts[node] + found]
    return [int(rank) for rank in owners]


def _room(sizes: NDArray[np.int64], n_targets: int) -> NDArray[np.int64]:
    """Return how many targets a node may have: the least number for all that leaves none over."""
    low, high = 1, int(sizes.max())
    while low < high:
        middle = (low + high) // 2
        if np.minimum(sizes, middle).sum() >= n_targets:
            high = middle
        else:
            low = middle + 1
    return np.minimum(sizes, low)


def _assigned(
    room: NDArray[np.int64],
    n_targets: int,
    bins: NDArray[np.int64],
    targets: NDArray[np.int64],
    n_cells: NDArray[np.int64],
    *,
    is_exact: bool,
) -> NDArray[np.int64]:
    """Return the bin of each target, none with more of them than it has room for, such that many cells stay."""
    if len(room) == 1:
        return np.zeros(n_targets, dtype=np.int64)
    pairs, which = np.unique(bins * n_targets + targets, return_inverse=True)
    stays = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(stays, which, n_cells)
    if not is_exact:
        return _greedy(room, n_targets, pairs, stays)
    # A bin has a column for each target that it may have.
    columns = np.repeat(np.arange(len(room)), room)
    gain = np.zeros((n_targets, len(room)), dtype=np.int64)
    gain[pairs % n_targets, pairs // n_targets] = stays
    return columns[_best_assignment(gain[:, columns])]


def _greedy(
    room: NDArray[np.int64], n_targets: int, pairs: NDArray[np.int64], stays: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Give the pairs with most cells first."""
    left = room.tolist()
    found = [-1] * n_targets
    for pair in pairs[np.argsort(-stays, kind="stable")].tolist():
        place, target = divmod(pair, n_targets)
        if found[target] < 0 and left[place]:
            found[target] = place
            left[place] -= 1
    free = iter(np.repeat(np.arange(len(room)), left).tolist())
    return np.array([place if place >= 0 else next(free) for place in found], dtype=np.int64)


def _best_assignment(gain: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each row its column, such that the sum of the gains is largest.

    The Hungarian method with potentials, row by row along shortest augmenting paths (R. Jonker and A. Volgenant,
    Computing 38, 1987), exact in integers.
    """
    n_rows, n_columns = gain.shape
    cost = -gain
    unseen = np.iinfo(np.int64).max
    row_potential = np.zeros(n_rows, dtype=np.int64)
    column_potential = np.zeros(n_columns, dtype=np.int64)
    row_of = np.full(n_columns, -1, dtype=np.int64)
    for row in range(n_rows):
        shortest = np.full(n_columns, unseen, dtype=np.int64)
        before = np.full(n_columns, -1, dtype=np.int64)
        is_done = np.zeros(n_columns, dtype=bool)
        at, column, reached = row, -1, 0
        while True:
            length = reached + cost[at] - row_potential[at] - column_potential
            better = ~is_done & (length < shortest)
            shortest[better], before[better] = length[better], column
            column = int(np.where(is_done, unseen, shortest).argmin())
            reached = int(shortest[column])
            if row_of[column] < 0:
                break
            is_done[column] = True
            at = int(row_of[column])
        done = np.flatnonzero(is_done)
        row_potential[row] += reached
        row_potential[row_of[done]] += reached - shortest[done]
        column_potential[done] += shortest[done] - reached
        while column >= 0:
            previous = int(before[column])
            row_of[column] = row if previous < 0 else row_of[previous]
            column = previous
    column_of = np.empty(n_rows, dtype=np.int64)
    taken = np.flatnonzero(row_of >= 0)
    column_of[row_of[taken]] = taken
    return column_of

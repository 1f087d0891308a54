"""The agreement of ranks that hold `Indices`: who writes which box, and which cells come from where.

Each rank finds its cells in the boxes that will be written and says how many they are; rank 0 gives each box to the
rank that holds most of it; the others tell that rank where their cells belong; and it proves that every cell comes
once. All of it comes before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.agreement import Channel
from mpistream.assigning import best_owners
from mpistream.epoch import EpochState, Route
from mpistream.errors import MPIStreamError, as_ours
from mpistream.grid import ShardGrid
from mpistream.indices import (
    Indices,
    Selection,
    as_range,
    axes_of,
    axis_lengths,
    crossing,
    indices_of,
    numbers_of,
    prove_coverage,
    selected_shape,
)
from mpistream.schema import StreamSchema
from mpistream.tiling import Box

__all__ = ["agree_on_owners", "described", "owners_answer"]

_Crossing = tuple[tuple[Selection, ...], tuple[Selection, ...]]


def described(schema: StreamSchema, epoch: EpochState) -> dict[str, Any]:
    """Return as JSON types what the ranks must know: the shapes of arrays, and the boxes that are written of them.

    Not collective.
    """
    shapes: dict[Any, int] = {}  # of the arrays that have cells, shards and indices in common
    of: dict[str, int] = {}
    grids: list[dict[str, Any]] = []
    for name, boxes in epoch.indexed.items():
        grid = schema.arrays[name].grid
        key = (grid.dims, grid.bases, grid.shape, grid.shard_shape, epoch.indexed_groups[name])
        if key not in shapes:
            shapes[key] = len(grids)
            split = {"bases": grid.bases, "n_extra": grid.n_extra}
            grids.append({"name": name, "dims": grid.dims, "shape": grid.shape, **split, "boxes": boxes})
        of[name] = shapes[key]
    return {"grids": grids, "of": of}


def owners_answer(
    schema: StreamSchema, epoch: EpochState, votes: Sequence[Any]
) -> tuple[EpochState, list[dict[str, Any]]]:
    """Return on rank 0 the epoch with its owners, and what each rank must know of them.

    Not collective.

    Parameters
    ----------
    schema, epoch
        What is written.
    votes
        Of each rank, for each of the `described` grids, pairs of a box's number and how many cells of each axis it
        holds of it.
    """
    plan = described(schema, epoch)
    owners: list[list[int]] = []
    incoming: list[list[list[Any]]] = [[[] for _ in plan["grids"]] for _ in votes]
    n_moved: list[int] = []
    for k, grid in enumerate(plan["grids"]):
        held = [(rank, box, math.prod(lengths)) for rank, vote in enumerate(votes) for box, lengths in vote[k]]
        ranks, boxes, n_cells = np.array(held, dtype=np.int64).reshape(-1, 3).T
        owners.append(best_owners(epoch.nodes, len(grid["boxes"]), ranks, boxes, n_cells))
        n_moved.append(sum(n for rank, box, n in held if owners[k][box] != rank))
        for rank, vote in enumerate(votes):
            for box, lengths in vote[k]:
                incoming[owners[k][box]][k].append([rank, box, lengths])
    of = plan["of"].items()
    found = epoch.with_owners(schema, {name: owners[k] for name, k in of}, {name: n_moved[k] for name, k in of})
    return found, [{"owners": owners, "incoming": incoming[rank]} for rank in range(len(votes))]


def agree_on_owners(
    channel: Channel, indices: Indices | Mapping[str, Indices] | None, plan: Mapping[str, Any], answer: Any
) -> tuple[dict[str, tuple[Route, ...]], MPIStreamError | None]:
    """Return this rank's routes by array, and what is wrong with the boxes that it will write.

    Collective.

    Parameters
    ----------
    channel
        To the other ranks.
    indices
        What this rank holds, of all arrays or array by array.
    plan
        As `described`.
    answer
        On rank 0, from all votes to the answers: see `owners_answer`.
    """
    grids = [
        ShardGrid(
            name=g["name"],
            dims=tuple(g["dims"]),
            shape=tuple(g["shape"]),
            shard_shape=tuple(g["shape"]),
            bases=tuple(g["bases"]),
            n_extra=tuple(g["n_extra"]),
        )
        for g in plan["grids"]
    ]
    boxes: list[list[Box]] = [[tuple((a, b) for a, b in box) for box in g["boxes"]] for g in plan["grids"]]
    crossings: list[dict[int, _Crossing]] = []
    failure: MPIStreamError | None = None
    own: list[Indices] = []
    try:
        own = [_indices(indices, grid) for grid in grids]
        crossings = [_crossings(channel.rank, *held) for held in zip(grids, own, boxes, strict=True)]
    except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
        failure = as_ours(error, channel.rank)
    votes = [[[box, list(selected_shape(target))] for box, (_, target) in found.items()] for found in crossings]
    agreed = channel.exchange("indices", payload=votes, failure=failure, answer=answer)
    routes: list[list[Route]] = []
    for k, grid in enumerate(grids):
        owners, incoming = agreed["owners"][k], agreed["incoming"][k]
        places = _swap_places(channel, crossings[k], owners, incoming)
        found = []
        for source, box, _ in incoming:
            part = _part(owners, box)
            here = source == channel.rank
            source_at = crossings[k][box][0] if here else ()
            target_at = crossings[k][box][1] if here else places[source, box]
            found.append(
                Route(source=source, patch=0, target=channel.rank, part=part, source_at=source_at, target_at=target_at)
            )
        for box, (source_at, _) in crossings[k].items():
            if owners[box] != channel.rank:
                part = _part(owners, box)
                found.append(
                    Route(
                        source=channel.rank, patch=0, target=owners[box], part=part, source_at=source_at, target_at=()
                    )
                )
        routes.append(sorted(found, key=lambda r: (r.target, r.part, r.source)))
        for box, owner in enumerate(owners):
            if owner == channel.rank and failure is None:
                here = [(r.source, r.target_at) for r in found if r.target == owner and r.part == _part(owners, box)]
                failure = _proof(channel.rank, grid, boxes[k][box], own[k], here)
    return {name: tuple(routes[k]) for name, k in plan["of"].items()}, failure


def _indices(indices: Indices | Mapping[str, Indices] | None, grid: ShardGrid) -> Indices:
    found = indices_of(indices, grid.name)
    assert found is not None, grid.name
    return found


def _part(owners: Sequence[int], box: int) -> int:
    """The number of a box among those of its owner."""
    return sum(owner == owners[box] for owner in owners[:box])


def _crossings(rank: int, grid: ShardGrid, indices: Indices, boxes: Sequence[Box]) -> dict[int, _Crossing]:
    if not set(grid.bases) & set(indices) and rank != 0:
        # All ranks have all of it: it comes from rank 0.
        return {}
    axes = axes_of(grid, indices)
    if 0 in axis_lengths(axes):
        return {}
    found = {}
    for k, box in enumerate(boxes):
        if (cells := crossing(axes, box)) is not None:
            found[k] = cells
    return found


def _swap_places(
    channel: Channel, crossings: Mapping[int, _Crossing], owners: Sequence[int], incoming: Sequence[Any]
) -> dict[tuple[int, int], tuple[Selection, ...]]:
    """Tell the owners of boxes where this rank's cells belong in them; return what others told this one."""
    sends: list[tuple[int, NDArray[np.int64]]] = []
    for box in sorted(crossings):
        if owners[box] != channel.rank:
            sends += [(owners[box], numbers_of(s)) for s in crossings[box][1]]
    receives: list[tuple[int, NDArray[np.int64]]] = []
    found: dict[tuple[int, int], tuple[NDArray[np.int64], ...]] = {}
    for source, box, lengths in sorted(incoming, key=lambda i: (i[1], i[0])):
        if source != channel.rank:
            found[source, box] = tuple(np.empty(n, dtype=np.int64) for n in lengths)
            receives += [(source, numbers) for numbers in found[source, box]]
    if sends or receives:
        channel.swap(sends, receives)
    return {key: tuple(as_range(numbers) for numbers in at) for key, at in found.items()}


def _proof(
    rank: int, grid: ShardGrid, box: Box, indices: Indices, pieces: Sequence[tuple[int, Sequence[Selection]]]
) -> MPIStreamError | None:
    try:
        prove_coverage(grid, box, indices, pieces)
    except Exception as error:  # noqa: BLE001 (whatever it is, every rank must hear of it)
        return as_ours(error, rank)
    return None

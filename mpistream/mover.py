"""Moving the pieces of a record from the ranks that hold them to those that write them.

Rules of this room:

* Before data move, all ranks have agreed that nothing is wrong with the record, and have made ready whatever could
  still fail: a block of a wrong shape on one rank is an error on all, and no message is left behind.
* Data go straight from the caller's block into the array that the writer encodes from; nothing is packed. Copied are
  blocks in another dtype, and cells that an index list scatters, which a datatype would walk one by one.
* The call returns when everything has left and has come: the caller may then overwrite its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.agreement import Channel
from mpistream.epoch import Route, Share
from mpistream.indices import Selection, numbers_of, selected_shape
from mpistream.lent import Lent
from mpistream.rank_writer import Blocks, RankWriter
from mpistream.rearrange import split_piece
from mpistream.tiling import Box, slices_in

__all__ = ["Load", "Mover"]


@dataclass(slots=True)
class Load:
    """What one rank sends and gets of a record or static."""

    blocks: Blocks
    """Array -> the blocks to take; of rearranged ones, those of the boxes that this rank writes, once all has come."""
    sends: list[tuple[int, NDArray[Any]]] = field(default_factory=list)
    receives: list[tuple[int, NDArray[Any]]] = field(default_factory=list)
    late: list[tuple[NDArray[Any], NDArray[Any], Any]] = field(default_factory=list)
    """Places in those blocks, and the cells that come for scattered ones of them."""


class Mover:
    """One rank's part of the exchange of rearranged arrays.

    Parameters
    ----------
    channel
        To the other ranks.
    share
        What this rank holds and writes.
    writer
        Its writer.
    """

    def __init__(self, channel: Channel, share: Share, writer: RankWriter) -> None:
        self._channel = channel
        self._share = share
        self._writer = writer
        self._routes = {
            name: share.routes[name] if name in share.routes else routes_of(share, name, writer.held(name))
            for name in (*share.pieces, *share.routes)
        }
        # What is received, box by box; used again for each record.
        self._buffers: dict[str, dict[int, NDArray[Any]]] = {}

    def is_moving(self, names: Iterable[str]) -> bool:
        """Whether a call with these arrays is collective: some rank sends a piece of one of them."""
        return not set(self._share.moving).isdisjoint(names)

    def load(self, names: Sequence[str], blocks: Mapping[str, list[NDArray[Any]]], lent: Lent | None = None) -> Load:
        """Make ready what this rank sends and gets of some arrays: all that can fail does so here.

        Not collective.

        Parameters
        ----------
        names
            The arrays, in an order that is the same on every rank.
        blocks
            Array name -> this rank's checked blocks; those of which it holds nothing may be left out.
        lent
            The memory that is encoded from in the background; what comes lands there.
        """
        load = Load(dict(blocks))
        me = self._share.writer
        for name in names:
            if name not in self._routes:
                continue
            dtype = self._writer.schema.arrays[name].dtype
            with np.errstate(over="ignore", invalid="ignore"):
                held = [block.astype(dtype, copy=False) for block in blocks.get(name, ())]
            whole = self._held_whole(name, held)
            load.blocks[name] = targets = self._targets_of(name, whole, lent)
            for route in self._routes[name]:
                if route.source != me:
                    for at in _messages(route.target_at, dtype.itemsize):
                        place = targets[route.part]
                        into = place[at] if _is_view(at) else np.empty(selected_shape(at), dtype)
                        load.receives.append((route.source, into))
                        if not _is_view(at):
                            load.late.append((place, into, _index(at)))
                elif route.target != me:
                    parts = _messages(route.source_at, dtype.itemsize)
                    load.sends += [(route.target, held[route.patch][_index(at)]) for at in parts]
                elif route.part not in whole:
                    targets[route.part][_index(route.target_at)] = held[route.patch][_index(route.source_at)]
        return load

    def move(self, load: Load) -> Blocks:
        """Return the blocks of the boxes that this rank writes, once all pieces have come and gone.

        Collective, if `is_moving`: after an agreement that every rank has its load.

        Raises
        ------
        CommitError
            Kind ``timeout``: a rank did not send or take its part; the channel is dead.
        """
        if load.sends or load.receives:
            self._channel.swap(load.sends, load.receives)
        for place, cells, at in load.late:
            place[at] = cells
        return load.blocks

    def _held_whole(self, name: str, held: Sequence[NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """Return those boxes, of the ones that this rank writes, that lie in one of its own blocks as they are."""
        shapes = [tuple(b - a for a, b in box) for box in self._share.boxes[name]]
        return {
            route.part: held[route.patch][route.source_at]
            for route in self._routes[name]
            if route.source == route.target and _is_view(route.source_at) and _is_whole(route, shapes[route.part])
        }

    def _targets_of(self, name: str, whole: Mapping[int, NDArray[Any]], lent: Lent | None) -> list[NDArray[Any]]:
        """Return the arrays to encode from: the caller's own where it holds all of a box, else lent ones or buffers."""
        boxes = self._share.boxes[name]
        ready = {**({} if lent is None else lent.arrays(name)), **whole}
        buffers = self._buffers.setdefault(name, {})
        dtype = self._writer.schema.arrays[name].dtype
        for part, box in enumerate(boxes):
            if part not in ready and part not in buffers:
                buffers[part] = np.empty([b - a for a, b in box], dtype)
        return [ready[part] if part in ready else buffers[part] for part in range(len(boxes))]


def routes_of(share: Share, name: str, held: Sequence[Box]) -> tuple[Route, ...]:
    """Return the pieces of an array as its two ends see them.

    Not collective.

    Parameters
    ----------
    share
        What this rank holds and writes.
    name
        The array.
    held
        The boxes of its blocks here.
    """
    return tuple(
        Route(
            source=p.source,
            patch=p.patch,
            target=p.target,
            part=p.part,
            source_at=slices_in(held[p.patch], p.box) if p.source == share.writer else (),
            target_at=slices_in(share.boxes[name][p.part], p.box) if p.target == share.writer else (),
        )
        for p in share.pieces[name]
    )


def _is_view(at: Sequence[Selection]) -> bool:
    return all(isinstance(s, slice) for s in at)


def _is_whole(route: Route, shape: tuple[int, ...]) -> bool:
    return all(
        isinstance(s, slice) and (s.start, s.stop) == (0, n) for s, n in zip(route.target_at, shape, strict=True)
    )


def _index(at: Sequence[Selection]) -> Any:
    """What selects these cells of an array: a view where they are a box."""
    return tuple(at) if _is_view(at) else np.ix_(*map(numbers_of, at))


def _messages(at: tuple[Selection, ...], itemsize: int) -> list[tuple[Selection, ...]]:
    """Return a selection as parts that are a message each; both ends part it alike."""
    return [
        tuple(
            slice(s.start + a, s.start + b) if isinstance(s, slice) else s[a:b]
            for s, (a, b) in zip(at, box, strict=True)
        )
        for box in split_piece(tuple((0, n) for n in selected_shape(at)), itemsize)
    ]

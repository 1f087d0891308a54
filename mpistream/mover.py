"""Moving the pieces of a record from the ranks that hold them to those that write them.

Rules of this room:

* Before data move, all ranks have agreed that nothing is wrong with the record: a block of a wrong shape on one
  rank is an error on all, and no message is left behind.
* Data go straight from the caller's block into the array that the writer encodes from; nothing is packed, and the
  only copies made are of blocks in another dtype.
* The call returns when everything has left and has come: the caller may then overwrite its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistream.agreement import Channel
from mpistream.epoch import Share
from mpistream.rank_writer import Blocks, RankWriter
from mpistream.rearrange import split_piece
from mpistream.tiling import Box, slices_in

__all__ = ["Mover"]


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
        # What is received, box by box; used again for each record.
        self._buffers: dict[str, dict[int, NDArray[Any]]] = {}

    def is_moving(self, names: Iterable[str]) -> bool:
        """Whether a call with these arrays is collective: some rank sends a piece of one of them."""
        return not set(self._share.moving).isdisjoint(names)

    def move(self, names: Sequence[str], blocks: Mapping[str, list[NDArray[Any]]]) -> Blocks:
        """Return the blocks of the boxes that this rank writes, from those that it and others hold.

        Collective, if `is_moving`.

        Parameters
        ----------
        names
            The arrays, in an order that is the same on every rank.
        blocks
            Array name -> this rank's checked blocks; those of which it holds nothing may be left out.

        Raises
        ------
        CommitError
            Kind ``timeout``: a rank did not send or take its part; the channel is dead.
        """
        found = dict(blocks)
        sends: list[tuple[int, NDArray[Any]]] = []
        receives: list[tuple[int, NDArray[Any]]] = []
        me = self._share.writer
        for name in names:
            if name not in self._share.pieces:
                continue
            dtype = self._writer.schema.arrays[name].dtype
            with np.errstate(over="ignore", invalid="ignore"):
                held = [block.astype(dtype, copy=False) for block in blocks.get(name, ())]
            found[name] = targets = self._targets_of(name, held)
            for piece in self._share.pieces[name]:
                if piece.source != me:
                    outer = self._share.boxes[name][piece.part]
                    receives += [(piece.source, part) for part in _messages(targets[piece.part], outer, piece.box)]
                    continue
                outer = self._writer.held(name)[piece.patch]
                if piece.target != me:
                    sends += [(piece.target, part) for part in _messages(held[piece.patch], outer, piece.box)]
                elif piece.box != self._share.boxes[name][piece.part]:
                    target = targets[piece.part][slices_in(self._share.boxes[name][piece.part], piece.box)]
                    target[...] = held[piece.patch][slices_in(outer, piece.box)]
        if sends or receives:
            self._channel.swap(sends, receives)
        return found

    def _targets_of(self, name: str, held: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the arrays to encode from: the caller's own where it holds all of a box, else buffers."""
        whole = {
            piece.part: held[piece.patch][slices_in(self._writer.held(name)[piece.patch], piece.box)]
            for piece in self._share.pieces[name]
            if piece.source == piece.target and piece.box == self._share.boxes[name][piece.part]
        }
        if name not in self._buffers:
            dtype = self._writer.schema.arrays[name].dtype
            self._buffers[name] = {
                part: np.empty([b - a for a, b in box], dtype)
                for part, box in enumerate(self._share.boxes[name])
                if part not in whole
            }
        return [
            whole[part] if part in whole else self._buffers[name][part] for part in range(len(self._share.boxes[name]))
        ]


def _messages(array: NDArray[Any], outer: Box, box: Box) -> list[NDArray[Any]]:
    """Return the views of an array of a box's cells that are a message each."""
    return [array[slices_in(outer, part)] for part in split_piece(box, array.dtype.itemsize)]

"""One record, put variable by variable."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpistream.block import check_blocks
from mpistream.errors import SchemaError
from mpistream.lent import Lent
from mpistream.rank_writer import RankWriter

__all__ = ["Record"]


class Record:
    """One record, put variable by variable; made by `StreamWriter.record`."""

    def __init__(self, writer: RankWriter, buffers: dict[str, list[NDArray[Any]]], lent: Lent) -> None:
        self._writer = writer
        self._lent = lent
        self._buffers = buffers
        self.arrays: dict[str, Any] = {}
        """Variable -> block, as far as they are put."""

    def put(self, name: str, block: ArrayLike) -> None:
        """Put this rank's block of one variable.

        Not collective.

        Parameters
        ----------
        name
            The variable.
        block
            As in `StreamWriter.write_record`; it is copied, and may be overwritten when the call returns.

        Raises
        ------
        SchemaError
            On this rank: unknown variable, wrong shape or dtype.
        """
        with self._writer.stats.during("record"):
            shapes = self._writer.block_shapes(name)
            checked = check_blocks(name, block, shapes, self._writer.schema.arrays[name].dtype)
            buffers = self._found(name)
            with np.errstate(over="ignore", invalid="ignore"):
                for buffer, part in zip(buffers, checked, strict=True):
                    buffer[...] = part

    def buffer(self, name: str) -> Any:
        """Return the array that will be written for a variable, to be filled in place.

        Not collective.

        Parameters
        ----------
        name
            The variable. Its array has the block's shape and the dtype on disk; it is this record's until the
            ``with`` body ends, and then lent to another one, so ask for it anew each time. What it holds before it is
            filled is undefined. For a region of several boxes it is a list of arrays, one per box.

        Notes
        -----
        It waits while more than ``max_pending_nbytes`` of earlier records are on their way.
        """
        with self._writer.stats.during("record"):
            found = self._found(name)
        return found[0] if len(found) == 1 else found

    def _found(self, name: str) -> list[NDArray[Any]]:
        shapes = self._writer.block_shapes(name)
        array = self._writer.schema.arrays[name]
        if not array.has_time:
            raise SchemaError(f"{name!r} is not a streaming variable; use write_static", kind="unknown")
        # What moves between ranks is received in the memory of those who write it, and only sent from here.
        lent = {} if self._writer.is_rearranged(name) else self._lent.arrays(name)
        if name not in self._buffers and len(lent) < len(shapes):
            self._buffers[name] = [np.empty(shape, array.dtype) for shape in shapes]
        found = [lent[k] if k in lent else self._buffers[name][k] for k in range(len(shapes))]
        self.arrays[name] = found[0] if len(found) == 1 else found
        return found

"""One record, put variable by variable."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpistream.block import check_blocks
from mpistream.errors import SchemaError
from mpistream.rank_writer import RankWriter

__all__ = ["Record"]


class Record:
    """One record, put variable by variable; made by `StreamWriter.record`."""

    def __init__(self, writer: RankWriter, buffers: dict[str, list[NDArray[Any]]]) -> None:
        self._writer = writer
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
        shapes = self._writer.block_shapes(name)
        checked = check_blocks(name, block, shapes, self._writer.schema.arrays[name].dtype)
        self.buffer(name)
        with np.errstate(over="ignore", invalid="ignore"):
            for buffer, part in zip(self._buffers[name], checked, strict=True):
                buffer[...] = part

    def buffer(self, name: str) -> Any:
        """Return the array that will be written for a variable, to be filled in place.

        Not collective.

        Parameters
        ----------
        name
            The variable. Its array has the block's shape and the dtype on disk; it is used again for the
            next record, and what it holds before it is filled is undefined. For a region of several boxes it is a
            list of arrays, one per box.
        """
        shapes = self._writer.block_shapes(name)
        array = self._writer.schema.arrays[name]
        if not array.has_time:
            raise SchemaError(f"{name!r} is not a streaming variable; use write_static", kind="unknown")
        if name not in self._buffers:
            self._buffers[name] = [np.empty(shape, array.dtype) for shape in shapes]
        found = self._buffers[name]
        self.arrays[name] = found[0] if len(found) == 1 else found
        return self.arrays[name]

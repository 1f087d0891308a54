"""Who writes what in an epoch, once it is proven that it tiles every array exactly once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpistream.arrays import Role
from mpistream.layout import assign_writers
from mpistream.region import Region
from mpistream.schema import StreamSchema
from mpistream.tiling import Box, box_n_cells

__all__ = ["EpochState", "Share", "prove_epoch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """What is fixed for an epoch: who writes which boxes of which array. Made by `prove_epoch` only."""

    regions: tuple[Region, ...]
    boxes: Mapping[str, Sequence[tuple[Box, ...]]]
    """Array name -> per writer the boxes it writes, over the dims without time; proven to tile it."""
    n_cells: Mapping[str, tuple[int, ...]]
    """Array name -> per writer the cells it writes of one record."""

    def share(self, writer: int) -> Share:
        """Return what one writer writes."""
        boxes = {name: by_writer[writer] for name, by_writer in self.boxes.items()}
        return Share(writer=writer, region=self.regions[writer], boxes=boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one writer writes in an epoch."""

    writer: int
    region: Region
    boxes: Mapping[str, tuple[Box, ...]]
    """Sharded array -> the boxes it writes, over the dims without time."""

    def n_cells(self, name: str) -> int:
        """Return the cells of one record of an array that it writes."""
        return sum(map(box_n_cells, self.boxes[name]))

    def to_json(self) -> dict[str, Any]:
        """Return the share as JSON types.

        Not collective.
        """
        return {"writer": self.writer, "region": self.region.to_json(), "boxes": dict(self.boxes)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Share:
        """Return the share that `to_json` described.

        Not collective.
        """
        boxes = {
            name: tuple(tuple((int(a), int(b)) for a, b in box) for box in found)
            for name, found in document["boxes"].items()
        }
        return cls(writer=document["writer"], region=Region.from_json(document["region"]), boxes=boxes)


def prove_epoch(schema: StreamSchema, regions: Sequence[Region]) -> EpochState:
    """Return who writes what, once it is proven that it tiles every array exactly once.

    Not collective.

    Raises
    ------
    AlignmentError, TilingError
        As `mpistream.layout.assign_writers`.
    """
    boxes = assign_writers(schema, regions)
    n_cells = {name: tuple(sum(map(box_n_cells, b)) for b in by_writer) for name, by_writer in boxes.items()}
    # What has no shards is the owner's: one cell a record of a variable over time alone, a static that is whole.
    for array in schema.arrays.values():
        if array.role is Role.SERIES or (array.role is Role.STATIC and array.is_whole):
            n_cells[array.name] = (math.prod(array.shape), *[0] * (len(regions) - 1))
    return EpochState(regions=tuple(regions), boxes=boxes, n_cells=n_cells)

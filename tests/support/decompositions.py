"""Streams over random grids whose ranks hold random boxes or cells, and the same stream from one rank to compare."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistream as ms
from mpistream.names import DTYPES
from mpistream.tiling import Box, Interval, box_n_cells
from tests.support.scene import Scene, time_of

__all__ = ["Decomposed", "deal", "most_that_can_stay", "objects_of", "spoil", "tile"]

N_RECORDS = 4
_NAMES = "wzyx"


def tile(rng: random.Random, shape: Sequence[int], n: int) -> list[Box]:
    """Return a grid cut into at most ``n`` boxes, in any order."""
    boxes: list[Box] = [tuple((0, s) for s in shape)]
    for _ in range(n - 1):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        cut = rng.randint(*box[dim])
        halves = [(*box[:dim], side, *box[dim + 1 :]) for side in ((box[dim][0], cut), (cut, box[dim][1]))]
        boxes += [half for half in halves if box_n_cells(half)]
    rng.shuffle(boxes)
    return boxes


def deal(rng: random.Random, boxes: Sequence[Box], n_ranks: int) -> list[list[Box]]:
    """Give boxes to ranks; some may get none."""
    held: list[list[Box]] = [[] for _ in range(n_ranks)]
    for box in boxes:
        held[rng.randrange(n_ranks)].append(box)
    return held


def spoil(array: NDArray[Any]) -> None:
    """Overwrite a caller's array with 0xFF bytes, whatever its strides."""
    array[...] = np.frombuffer(b"\xff" * array.itemsize, array.dtype)[0]


def objects_of(root: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return every file of the Zarr hierarchy with its bytes."""
    paths = (p for p in Path(root).rglob("*") if p.is_file())
    return {str(k): p.read_bytes() for p in paths if (k := p.relative_to(root)).parts[0] != ".mpistream"}


@dataclass(frozen=True)
class _Held:
    """What each rank holds of an array: boxes, or cells of a dim."""

    boxes: list[list[dict[str, Interval]]] | None
    cells: list[dict[str, list[int]]] | None

    def region(self, rank: int) -> Any:
        return ms.Indices(self.cells[rank]) if self.cells is not None else self.boxes[rank] if self.boxes else []


class Decomposed:
    """A stream, what each of some ranks holds of it, and the calls of each rank, all drawn from a seed.

    Parameters
    ----------
    seed
        Everything but the number of ranks comes from it.
    n_ranks
        How many there are.
    by_variable
        Whether each array has a region of its own: boxes over its own dims or over all, or cells; some share theirs.
    """

    def __init__(self, seed: int, n_ranks: int, *, by_variable: bool = False) -> None:
        rng = random.Random(seed)
        dims = _NAMES[-rng.randint(1, 4) :]
        self.sizes = {d: rng.randint(1, 13 if len(dims) < 3 else 5) for d in dims}
        self.n_extra = rng.randint(0, 2)
        few = [d for d in dims if rng.random() < 0.6]
        mixed = rng.sample(dims, len(dims))
        faces = " ".join(dims).replace("x", "x_face")
        self.scene = Scene(
            sizes={**self.sizes, "level": 2, "x_face": self.sizes["x"] + self.n_extra},
            variables={
                "u": (" ".join(dims), rng.choice(DTYPES)),
                "v": (" ".join(dims), rng.choice(DTYPES)),
                "mixed": (" ".join(mixed), "float32"),
                "few": (" ".join(few), rng.choice(DTYPES)),
                "flux": (faces, "float64"),
                "total": ("", "float64"),
            },
            statics={"topo": (" ".join(dims), "float32"), "soil": (" ".join(["level", *few]), "int16")},
            coords={"lat": (faces, "float64")},
        )
        self.row = rng.choice([1, 1, 3])
        self.layout: dict[str, Any] = {}
        if rng.random() < 0.7:
            chunk = {d: rng.randint(1, 4) for d in dims}
            shard = {d: n * rng.randint(1, 3) for d, n in chunk.items()}
            self.layout = {
                "shard_shape": {"time": self.row, **shard},
                "chunk_shape": {"time": rng.choice([1, self.row]), **chunk},
            }
        self.held = deal(rng, tile(rng, list(self.sizes.values()), rng.randint(1, 10)), n_ranks)
        self.indices = _deal_indices(rng, self.sizes, n_ranks) if rng.random() < 0.3 else None
        self.options: dict[str, Any] = {
            "threads": rng.choice([0, 1]),
            "writers": rng.choice(["auto", "all", "node", 1, 2, 3]),
        }
        self.commits = [rng.random() < 0.4 for _ in range(N_RECORDS)]
        self.order = rng.choice([None, rng.sample(range(N_RECORDS), N_RECORDS)])
        self.seed = seed
        # Array -> what each rank holds of it: boxes over some dims, or cells of one.
        self.own: dict[str, _Held] = {}
        if by_variable:
            rng = random.Random(f"{seed} by variable")
            for name in (*self.scene.variables, *self.scene.region_statics):
                base = [d for d in dict.fromkeys(d.replace("x_face", "x") for d in self._dims(name)) if d in self.sizes]
                if not base:
                    continue
                kind = rng.choice(["boxes", "boxes", "cells", "all dims", "shared"])
                if kind == "cells":
                    self.own[name] = _Held(None, _deal_indices(rng, {d: self.sizes[d] for d in base}, n_ranks))
                elif kind == "boxes":
                    boxes = tile(rng, [self.sizes[d] for d in base], rng.randint(1, 10))
                    held = deal(rng, boxes, n_ranks)
                    self.own[name] = _Held([[dict(zip(base, b, strict=True)) for b in mine] for mine in held], None)
                elif kind == "all dims" or not self.own:
                    self.own[name] = _Held(self._boxes(), None)
                else:
                    like = rng.choice(list(self.own))
                    is_alike = sorted(self._dims(like)) == sorted(self._dims(name))
                    self.own[name] = self.own[like] if is_alike else _Held(self._boxes(), None)

    def _dims(self, name: str) -> list[str]:
        return {**self.scene.variables, **self.scene.statics, **self.scene.coords}[name][0].split()

    def _boxes(self) -> list[list[dict[str, Interval]]]:
        return [[dict(zip(self.sizes, box, strict=True)) for box in held] for held in self.held]

    def schema(self) -> ms.StreamSchema:
        """Return the schema; with a fixed time dim if the records come in an order of their own."""
        units = "seconds since 2000-01-01"
        times = [time_of(i) for i in range(N_RECORDS)]
        return ms.StreamSchema(
            dims={"time": None, **self.sizes, "level": 2, "x_face": ms.Staggered("x", self.n_extra)},
            time=ms.AppendTime(units=units) if self.order is None else ms.IndexedTime(times, units=units),
            variables=self._described(self.scene.variables, "time"),
            statics=self._described(self.scene.statics),
            coords={name: ms.Coordinate(tuple(d.split()), dtype=t) for name, (d, t) in self.scene.coords.items()},
            **self.layout,
        )

    @staticmethod
    def _described(kinds: Any, *lead: str) -> dict[str, ms.Variable]:
        return {name: ms.Variable((*lead, *dims.split()), dtype) for name, (dims, dtype) in kinds.items()}

    def region(self, rank: int) -> Any:
        """Return what a rank passes as its region."""
        if self.own:
            made = {id(held): held.region(rank) for held in self.own.values()}
            return {name: made[id(held)] for name, held in self.own.items()}
        if self.indices is not None:
            return ms.Indices(self.indices[rank])
        return [dict(zip(self.sizes, box, strict=True)) for box in self.held[rank]]

    def write(self, writer: ms.StreamWriter, rank: int | None) -> None:
        """Make the calls of a rank; each array is overwritten as soon as the call has returned. None: of all ranks."""
        rng = random.Random(f"{self.seed} {rank}")
        for name in self.scene.region_statics:
            blocks = self._blocks(name, rank, 0, rng)
            writer.write_static(name, _as_passed(blocks))
            _spoil_all(blocks)
        for k, record in enumerate(self.order or range(N_RECORDS)):
            self._write_record(writer, rank, record, rng)
            if self.commits[k]:
                writer.commit()
        writer.close()

    def _write_record(self, writer: ms.StreamWriter, rank: int | None, record: int, rng: random.Random) -> None:
        blocks = {name: self._blocks(name, rank, record, rng) for name in self.scene.variables}
        t = time_of(record)
        if self.order is not None:
            writer.write_record_at(record, t, {name: _as_passed(b) for name, b in blocks.items()})
        elif rng.random() < 0.6:
            writer.write_record(t, {name: _as_passed(b) for name, b in blocks.items()})
        else:
            with writer.record(t) as put:
                for name, found in blocks.items():
                    if rng.random() < 0.5:
                        put.put(name, _as_passed(found))
                        _spoil_all(found)
                        continue
                    buffers = put.buffer(name)
                    for buffer, block in zip(buffers if len(found) > 1 else [buffers], found, strict=True):
                        buffer[...] = block
        for found in blocks.values():
            _spoil_all(found)

    def _blocks(self, name: str, rank: int | None, record: int, rng: random.Random) -> list[Any]:
        """Return a rank's blocks of a whole array, each in a form of its own."""
        dims = self._dims(name)
        whole = np.array(self.scene.whole(name, record))
        held = self.own.get(name, _Held(None if self.indices else self._boxes(), self.indices))
        if rank is not None and held.cells is not None:
            for axis, dim in enumerate(dims):
                if (base := dim.replace("x_face", "x")) in held.cells[rank]:
                    cells = held.cells[rank][base]
                    if dim == "x_face" and self.sizes["x"] - 1 in cells:
                        cells = [*cells, *range(self.sizes["x"], self.sizes["x"] + self.n_extra)]
                    whole = whole.take(cells, axis)
            return [_formed(whole, rng)]
        if rank is None or not any(d in self.sizes or d == "x_face" for d in dims):
            return [whole]
        assert held.boxes is not None
        regions = held.boxes[rank] or [dict.fromkeys(self.sizes, (0, 0))]
        return [_formed(whole[tuple(self._slice(region, dim) for dim in dims)], rng) for region in regions]

    def _slice(self, region: dict[str, tuple[int, int]], dim: str) -> slice:
        """Where a region lies in a dim: who has the last cell has the faces behind it, too."""
        if dim != "x_face":
            return slice(*region.get(dim, (None, None)))
        start, stop = region["x"]
        return slice(start, stop + self.n_extra if start < stop == self.sizes["x"] else stop)


def _deal_indices(rng: random.Random, sizes: dict[str, int], n_ranks: int) -> list[dict[str, list[int]]]:
    """Give the cells of one dim to ranks, in any order."""
    dim = rng.choice(list(sizes))
    found: list[dict[str, list[int]]] = [{dim: []} for _ in range(n_ranks)]
    for cell in rng.sample(range(sizes[dim]), sizes[dim]):
        found[rng.randrange(n_ranks)][dim].append(cell)
    return found


def _formed(block: NDArray[Any], rng: random.Random) -> NDArray[Any]:
    """Return a block in another memory order or byte order, or with other strides."""
    form = rng.randrange(6)
    if not block.ndim:
        return block.copy()
    if form == 0:
        return np.array(block, order="F")
    if form == 1:
        return block.astype(block.dtype.newbyteorder(">"))
    if form == 2:
        flips = tuple(slice(None, None, rng.choice([1, -1])) for _ in block.shape)
        return np.array(block[flips])[flips]
    if form == 3:
        steps = tuple(slice(None, None, rng.choice([1, 2])) for _ in block.shape)
        spaced = np.zeros([n * s.step for n, s in zip(block.shape, steps, strict=True)], block.dtype)
        spaced[steps] = block
        return spaced[steps]
    if form == 4 and block.dtype.kind == "f":
        return block.astype(np.float64)
    return block.copy()


def _as_passed(blocks: list[Any]) -> Any:
    return blocks[0] if len(blocks) == 1 else blocks


def _spoil_all(blocks: list[Any]) -> None:
    for block in blocks:
        spoil(block)


def most_that_can_stay(gain: NDArray[np.int64]) -> int:
    """The best of all assignments of columns to rows, tried one by one."""
    n_rows, n_columns = gain.shape
    chosen = itertools.permutations(range(n_columns), n_rows)
    return max(sum(int(gain[row, column]) for row, column in enumerate(columns)) for columns in chosen)

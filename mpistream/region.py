"""Which cells a rank owns: `Region`, a mapping dim -> (start, stop), and `RegionByVariable`, one of them for each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpistream.errors import SchemaError
from mpistream.tiling import Box, Interval, box_n_cells, format_box

__all__ = [
    "AnyRegion",
    "Region",
    "RegionByVariable",
    "RegionLike",
    "as_bound",
    "box_of_mapping",
    "region_from_json",
    "regions_of",
]

RegionLike = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Region(Mapping[str, Interval]):
    """The cells of the partitioned dims that one rank owns.

    Immutable and hashable. As a mapping it takes a dim to the (start, stop) of its only box; the empty
    region takes every dim to (0, 0). With several boxes there is no such mapping: use ``.boxes``.

    Parameters
    ----------
    dims
        The partitioned dims, in the schema's order.
    boxes
        One interval per dim each. Boxes without cells are dropped.
    """

    __slots__ = ("_boxes", "_dims")

    def __init__(self, dims: Iterable[str], boxes: Iterable[Box] = ()) -> None:
        self._dims = tuple(dims)
        kept = []
        for box in boxes:
            plain = tuple([(operator.index(start), operator.index(stop)) for start, stop in box])
            if len(plain) != len(self._dims) or any(a < 0 or a > b for a, b in plain):
                raise SchemaError(
                    f"region over dims {self._dims}: box {plain} must have one 0 <= start <= stop per dim",
                    kind="region",
                )
            if box_n_cells(plain):
                kept.append(plain)
        # In the order given: it is that of the blocks that the rank passes.
        self._boxes = tuple(kept)

    @classmethod
    def whole(cls, dims: Iterable[str], sizes: Mapping[str, int]) -> Region:
        """Return the region of all cells.

        Not collective.

        Parameters
        ----------
        dims
            The partitioned dims, in order.
        sizes
            Dim -> length.
        """
        names = tuple(dims)
        return cls(names, (tuple((0, sizes[d]) for d in names),))

    @classmethod
    def empty(cls, dims: Iterable[str]) -> Region:
        """Return the region of no cells.

        Not collective.
        """
        return cls(dims)

    @classmethod
    def of_box(cls, dims: Iterable[str], box: Box) -> Region:
        """Return the region of one box; a box without cells gives the empty region.

        Not collective.

        Parameters
        ----------
        dims
            The partitioned dims, in order.
        box
            (start, stop) of each of them.
        """
        return cls(dims, (box,))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None, sizes: Mapping[str, int]) -> Region:
        """Return the region that a caller described, checked against the dims.

        Not collective.

        Parameters
        ----------
        mapping
            Dim -> (start, stop) or a slice without step; a dim left out is whole; None is everything.
            A `Region` keeps all its boxes. Start equal to stop in any dim gives the empty region.
        sizes
            Partitioned dim -> length, in the schema's order.

        Raises
        ------
        SchemaError
            Kind ``"region"``: an unknown dim, something that is not an integer, or bounds out of
            0 <= start <= stop <= length.
        """
        given: Mapping[str, Any] = {} if mapping is None else mapping
        if not isinstance(given, Mapping):
            raise SchemaError(f"a region is a mapping dim -> (start, stop), not {type(given).__name__}", kind="region")
        if isinstance(given, Region):
            _check_dims(given.dims, sizes)
            return cls.from_boxes([dict(zip(given.dims, box, strict=True)) for box in given.boxes], sizes)
        return cls.from_boxes([given], sizes)

    @classmethod
    def from_boxes(cls, mappings: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> Region:
        """Return the region of several boxes that a caller described, in their order.

        Not collective.

        Parameters
        ----------
        mappings
            Each as in `from_mapping`; none is the empty region. Of several, none may be empty.
        sizes
            Partitioned dim -> length, in the schema's order.

        Raises
        ------
        SchemaError
            As `from_mapping`.
        """
        for mapping in mappings:
            _check_dims(mapping, sizes)
        boxes = [box_of_mapping(mapping, sizes) for mapping in mappings]
        if len(boxes) > 1 and not all(map(box_n_cells, boxes)):
            # Blocks are passed in the order of the boxes: one that is left out silently would shift them.
            k = next(k for k, box in enumerate(boxes) if not box_n_cells(box))
            raise SchemaError(f"region: box {k} of {len(boxes)} is empty; leave it out", kind="region")
        return cls(sizes, boxes)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Region:
        """Return the region that `to_json` described.

        Not collective.
        """
        return cls(document["dims"], document["boxes"])

    def to_json(self) -> dict[str, Any]:
        """Return dims and boxes as lists; equal regions give equal documents.

        Not collective.
        """
        return {"dims": list(self._dims), "boxes": [[list(pair) for pair in box] for box in self._boxes]}

    @property
    def dims(self) -> tuple[str, ...]:
        """The partitioned dims, in the schema's order."""
        return self._dims

    @property
    def boxes(self) -> tuple[Box, ...]:
        """All boxes, in the order given; none for the empty region."""
        return self._boxes

    @property
    def is_empty(self) -> bool:
        """Whether the region has no cells."""
        return not self._boxes

    @property
    def n_cells(self) -> int:
        """Number of cells of all boxes together."""
        return sum(map(box_n_cells, self._boxes))

    @property
    def box(self) -> Box:
        """The only box; (0, 0) in every dim for the empty region."""
        if len(self._boxes) > 1:
            raise SchemaError(f"{self!r} has {len(self._boxes)} boxes, not 1: go through .boxes", kind="region")
        return self._boxes[0] if self._boxes else ((0, 0),) * len(self._dims)

    def of(self, name: str) -> Region:  # noqa: ARG002 (it is that of every variable)
        """Return the region of a variable: this one.

        Not collective.
        """
        return self

    def project(self, dims: Iterable[str]) -> Region:
        """Return the region's shadow on some of its dims, in the order given.

        Not collective.
        """
        names = tuple(dims)
        assert set(names) <= set(self._dims), f"{names} is no subset of {self._dims}"
        at = [self._dims.index(d) for d in names]
        return Region(names, dict.fromkeys(tuple(box[k] for k in at) for box in self._boxes))

    def __getitem__(self, dim: str) -> Interval:
        if dim not in self._dims:
            raise KeyError(
                f"{dim!r}: this region is over {', '.join(self._dims) or 'no dims'}; a staggered dim has the start and "
                "stop of the dim that it follows, and the extra points are with the last cell"
            )
        return self.box[self._dims.index(dim)]

    def __contains__(self, dim: object) -> bool:
        return dim in self._dims

    def __iter__(self) -> Iterator[str]:
        return iter(self._dims)

    def __len__(self) -> int:
        return len(self._dims)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Region):
            if self._dims != other._dims:
                return False
            return self._boxes == other._boxes or sorted(self._boxes) == sorted(other._boxes)
        if isinstance(other, Mapping):
            return len(self._boxes) <= 1 and dict(self) == dict(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self._dims, frozenset(self._boxes)))

    def __repr__(self) -> str:
        if not self._boxes:
            return f"Region({', '.join(self._dims)}: empty)"
        return f"Region({' + '.join(format_box(self._dims, box) for box in self._boxes)})"


class RegionByVariable:
    """The cells that one rank owns where each variable has a region of its own.

    Immutable and hashable.

    Parameters
    ----------
    regions
        Variable -> its region, over its own partitioned dims at least. What is not named is whole: it is not
        partitioned.
    """

    __slots__ = ("_regions",)

    def __init__(self, regions: Mapping[str, Region]) -> None:
        self._regions = dict(sorted(regions.items()))

    def of(self, name: str) -> Region:
        """Return the region of a variable.

        Not collective.
        """
        return self._regions.get(name, _WHOLE)

    @property
    def is_empty(self) -> bool:
        """Whether no variable has a cell here."""
        return all(region.is_empty for region in self._regions.values())

    def to_json(self) -> dict[str, Any]:
        """Return the regions as JSON types; variables of the same region share it.

        Not collective.
        """
        # Not by their equality: it is that of the cells, and blocks are passed in the order of the boxes.
        key = {name: (region.dims, region.boxes) for name, region in self._regions.items()}
        shared = {k: n for n, k in enumerate(dict.fromkeys(key.values()))}
        return {
            "of": {name: shared[k] for name, k in key.items()},
            "regions": [Region(*k).to_json() for k in shared],
        }

    def __eq__(self, other: object) -> bool:
        return self._regions == other._regions if isinstance(other, RegionByVariable) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._regions.items()))

    def __repr__(self) -> str:
        return f"RegionByVariable({', '.join(f'{name}: {region!r}' for name, region in self._regions.items())})"


AnyRegion = Region | RegionByVariable
_WHOLE = Region((), ((),))


def region_from_json(document: Mapping[str, Any]) -> AnyRegion:
    """Return what `Region.to_json` or `RegionByVariable.to_json` described.

    Not collective.
    """
    if "of" not in document:
        return Region.from_json(document)
    shared = [Region.from_json(region) for region in document["regions"]]
    return RegionByVariable({str(name): shared[k] for name, k in document["of"].items()})


def regions_of(name: str, regions: Sequence[AnyRegion]) -> list[Region]:
    """Return each rank's region of an array; all of them are over the same dims.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``region``: they are not, which only regions that come from a file can be.
    """
    found = [region.of(name) for region in regions]
    for rank, region in enumerate(found):
        if region.dims != found[0].dims:
            raise SchemaError(
                f"array {name!r}: rank {rank} has a region over {region.dims}, rank 0 over {found[0].dims}",
                kind="region",
                rank=rank,
            )
    return found


def _check_dims(dims: Iterable[str], sizes: Mapping[str, int]) -> None:
    unknown = [dim for dim in dims if dim not in sizes]
    if unknown:
        raise SchemaError(
            f"region: {unknown[0]!r} is no partitioned dim; name only {', '.join(sizes) or 'no dim'}", kind="region"
        )


def box_of_mapping(mapping: Mapping[str, Any], sizes: Mapping[str, int]) -> Box:
    """Return the box that a mapping dim -> (start, stop) describes; a dim left out is whole, one may be empty.

    Not collective.

    Parameters
    ----------
    mapping
        Dim -> (start, stop) or a slice without step.
    sizes
        Dim -> length; the box has these dims in this order.

    Raises
    ------
    SchemaError
        Kind ``"region"``, as `Region.from_mapping`.
    """
    return tuple(_interval(dim, mapping.get(dim, (0, n)), n) for dim, n in sizes.items())


def as_bound(value: Any) -> int:
    """Return a caller's bound of a region as a plain int.

    Not collective.

    Raises
    ------
    TypeError
        It is no integer; a bool is none, though Python counts with it, and an older numpy with its own.
    """
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{value!r} is a bool")
    return operator.index(value)


def _interval(dim: str, value: Any, size: int) -> Interval:
    """One dim of a caller's region as plain ints, or SchemaError."""
    if isinstance(value, slice):
        if value.step not in (None, 1):
            raise SchemaError(f"region dim {dim!r}: {value} has a step; leave it out", kind="region")
        value = (0 if value.start is None else value.start, size if value.stop is None else value.stop)
    try:
        low, high = value
        start, stop = as_bound(low), as_bound(high)
    except (TypeError, ValueError):
        raise SchemaError(f"region dim {dim!r}: {value!r} must be (start, stop), two integers", kind="region") from None
    if not 0 <= start <= stop <= size:
        raise SchemaError(
            f"region dim {dim!r} of length {size}: [{start}:{stop}] must be 0 <= start <= stop <= {size}",
            kind="region",
        )
    return start, stop

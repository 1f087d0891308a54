"""What the ranks of a run hold: as each of them says it, as it travels, and as rank 0 checks it.

A rank gives nothing, one region for all arrays, or one for each; a region is boxes or `Indices`. On its way to rank 0
it is JSON types, and of index lists only the highest number is sent: nobody has them whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpistream.errors import SchemaError
from mpistream.indices import Indices
from mpistream.region import AnyRegion, Region, RegionByVariable, as_bound
from mpistream.schema import StreamSchema

__all__ = ["Holdings", "checked_holdings", "given_indices", "plain_region"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What each rank holds."""

    regions: tuple[AnyRegion, ...] | None
    """Of arrays that are held by region; None: no rank gave one, and the grid is to be split."""
    indexed_dims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Array that is held by `Indices` -> the dims that they name."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Such an array -> a number that arrays share of which each rank holds the same indices."""


def plain_region(region: Any) -> Any:
    """Return what a rank holds as JSON types; whether it fits is for rank 0 to say, which knows the schema.

    Not collective.

    Raises
    ------
    SchemaError
        Kind ``region``: it is no region, whatever the schema is.
    """
    if region is None:
        return None
    if not _is_by_variable(region):
        return _plain_one("region", region)
    shared: list[Any] = []
    of: dict[str, int] = {}
    at: dict[Any, int] = {}
    items = dict(region)  # holds them, so that no two have one id
    for name, own in items.items():
        plain = _plain_one(f"region of variable {name!r}", own)
        # Most variables have the region of another one.
        key = id(own) if isinstance(own, Indices) else json.dumps(plain)
        if key not in at:
            at[key] = len(shared)
            shared.append(plain)
        of[str(name)] = at[key]
    return {"of": of, "regions": shared}


def given_indices(region: Any) -> Indices | dict[str, Indices] | None:
    """Return the indices of what a rank holds, of all arrays or array by array.

    Not collective.
    """
    if isinstance(region, Indices):
        return region
    if not _is_by_variable(region):
        return None
    return {str(name): own for name, own in region.items() if isinstance(own, Indices)}


def _is_by_variable(region: Any) -> bool:
    """Whether keys are variables: their values are regions, those of dims are bounds. A name may be both."""
    if isinstance(region, Region | Indices) or not isinstance(region, Mapping):
        return False
    is_region = {name: _is_region(value) for name, value in region.items()}
    if len(set(is_region.values())) == 2:  # noqa: PLR2004
        bounds, own = (next(name for name, is_one in is_region.items() if is_one is which) for which in (False, True))
        raise SchemaError(
            f"region: {bounds!r} has bounds, as a dim has, and {own!r} a region, as a variable has; give a mapping "
            "dim -> (start, stop), or one variable -> region",
            kind="region",
        )
    return True in is_region.values()


def _is_region(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and all(isinstance(v, Mapping) for v in value)
    )


def _plain_one(what: str, region: Any) -> Any:
    if isinstance(region, Indices):
        return {"indices": {dim: int(array.max(initial=-1)) for dim, array in region.items()}}
    if isinstance(region, Region):
        return [{dim: list(bounds) for dim, bounds in zip(region.dims, box, strict=True)} for box in region.boxes]
    boxes = region if isinstance(region, Sequence) and not isinstance(region, str) else [region]
    return [_plain_box(what, box) for box in boxes]


def _plain_box(what: str, box: Any) -> dict[str, list[int | None]]:
    if not isinstance(box, Mapping):
        raise SchemaError(f"{what} {box!r}: give a mapping dim -> (start, stop), or a list of them", kind="region")
    plain = {}
    for dim, bounds in box.items():
        try:
            if isinstance(bounds, slice):
                if bounds.step not in (None, 1):
                    raise ValueError(bounds.step)
                bounds = bounds.start, bounds.stop
                plain[str(dim)] = [None if n is None else as_bound(n) for n in bounds]
            else:
                start, stop = bounds
                plain[str(dim)] = [as_bound(start), as_bound(stop)]
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"{what} {box!r}: bounds {bounds!r} of dim {dim!r}; give (start, stop), two integers", kind="region"
            ) from error
    return plain


def checked_holdings(given: Sequence[Any], schema: StreamSchema, ranks: Sequence[int] | None = None) -> Holdings:
    """Return what the ranks hold, checked against the schema, but for the tiling.

    Not collective.

    Parameters
    ----------
    given
        What each of them gave, from `plain_region`.
    schema
        The schema.
    ranks
        Their numbers, for messages; by default from 0.

    Raises
    ------
    SchemaError
        Kind ``region``, naming the rank and the variable or dim.
    """
    who = range(len(given)) if ranks is None else ranks
    if all(g is None for g in given):
        return Holdings(regions=None)
    _check_kinds(
        given,
        who,
        (
            (lambda g: g is not None, "no region", "a region"),
            (lambda g: isinstance(g, dict) and "of" in g, "one region for all variables", "one for each"),
        ),
    )
    sharded = [a.name for a in schema.arrays.values() if a.is_sharded]
    if "of" not in given[0]:
        dims = _indexed_dims("", given, who, schema)
        if dims is None:
            return Holdings(regions=tuple(_regions("", given, who, schema.partitioned_sizes, schema)))
        none = Region.empty(schema.partitioned_dims)
        return Holdings(
            regions=(none,) * len(given),
            indexed_dims=dict.fromkeys(sharded, dims),
            groups=dict.fromkeys(sharded, 0),
        )
    for rank, g in zip(who, given, strict=True):
        _check_names(g["of"], rank, schema)
    return _by_variable(given, who, schema)


def _check_staggered(what: str, dims: Iterable[str], rank: int, schema: StreamSchema) -> None:
    for dim in dims:
        if dim in schema.staggered:
            raise SchemaError(
                f"{what}rank {rank}: region: {dim!r} is staggered over {schema.staggered[dim].dim!r}; name that dim "
                "alone, the other one follows it",
                kind="region",
                rank=rank,
            )


_Kind = tuple[Callable[[Any], bool], str, str]


def _check_kinds(given: Sequence[Any], ranks: Sequence[int], kinds: Sequence[_Kind], what: str = "") -> None:
    """Refuse what some ranks gave and others did not."""
    for is_one, without, with_it in kinds:
        found = [is_one(g) for g in given]
        if any(found) and not all(found):
            rank = ranks[found.index(False)]
            raise SchemaError(
                f"{what}rank {rank} gave {without}, other ranks {with_it}; every rank gives {with_it} or none does",
                kind="region",
                rank=rank,
            )


def _check_names(names: Mapping[str, Any], rank: int, schema: StreamSchema) -> None:
    """A region for each variable: none is left out, so that none is whole by mistake."""
    for name in names:
        if name not in schema.arrays:
            text = "is a dim, give it (start, stop)" if name in schema.dims else "is no variable, static or coordinate"
            raise SchemaError(f"rank {rank}: region: {name!r} {text}", kind="region", rank=rank)
    cut = set(schema.partitioned_dims)
    missing = [
        a.name for a in schema.arrays.values() if a.is_sharded and cut & set(a.base_dims) and a.name not in names
    ]
    if missing:
        raise SchemaError(
            f"rank {rank}: region: {', '.join(map(repr, missing))} missing; a mapping variable -> region names every "
            "variable, static and coordinate with partitioned dims that is written by region",
            kind="region",
            rank=rank,
        )


def _by_variable(given: Sequence[Any], ranks: Sequence[int], schema: StreamSchema) -> Holdings:
    cut = schema.partitioned_sizes
    arrays = [a for a in schema.arrays.values() if a.is_sharded and set(cut) & set(a.base_dims)]
    found: list[dict[str, Region]] = [{} for _ in given]
    indexed: dict[str, tuple[str, ...]] = {}
    groups: dict[str, int] = {}
    numbers: dict[tuple[int, ...], int] = {}
    known: dict[Any, list[Region]] = {}
    for array in arrays:
        of = tuple(g["of"][array.name] for g in given)
        own = [g["regions"][k] for g, k in zip(given, of, strict=True)]
        what = f"variable {array.name!r}: "
        dims = _indexed_dims(what, own, ranks, schema)
        if dims is not None:
            if not set(dims) & set(array.base_dims):
                raise SchemaError(
                    f"{what}its indices are of dims {', '.join(dims)}, and it has none of them; name one of "
                    f"{', '.join(d for d in array.base_dims if d in cut)}",
                    kind="region",
                )
            indexed[array.name] = dims
            groups[array.name] = numbers.setdefault(of, len(numbers))
            continue
        # The array's own dims must be tiled. Where a rank names others, too, many may hold the same cells of it.
        used = {*array.base_dims, *(dim for boxes in own for box in boxes for dim in box if dim in cut)}
        sizes = {dim: n for dim, n in cut.items() if dim in used}
        key = of, tuple(sizes)
        if key not in known:
            known[key] = _regions(what, own, ranks, sizes, schema)
        for regions, region in zip(found, known[key], strict=True):
            regions[array.name] = region
    return Holdings(regions=tuple(map(RegionByVariable, found)), indexed_dims=indexed, groups=groups)


def _regions(
    what: str, given: Sequence[Any], ranks: Sequence[int], sizes: Mapping[str, int], schema: StreamSchema
) -> list[Region]:
    found = []
    for rank, boxes in zip(ranks, given, strict=True):
        for box in boxes:
            _check_staggered(what, box, rank, schema)
        try:
            found.append(Region.from_boxes([{dim: slice(*b) for dim, b in box.items()} for box in boxes], sizes))
        except SchemaError as error:
            raise SchemaError(f"{what}rank {rank}: {error}", kind=error.kind, rank=rank) from error
    return found


def _indexed_dims(
    what: str, given: Sequence[Any], ranks: Sequence[int], schema: StreamSchema
) -> tuple[str, ...] | None:
    """Return the dims that the ranks' indices name, None where they gave boxes."""
    _check_kinds(given, ranks, ((lambda g: isinstance(g, dict), "no Indices", "Indices"),), what)
    if not isinstance(given[0], dict):
        return None
    dims = tuple(d for d in schema.partitioned_dims if d in given[0]["indices"])
    for rank, g in zip(ranks, given, strict=True):
        highest = g["indices"]
        _check_staggered(what, highest, rank, schema)
        if wrong := [dim for dim in (*highest, *dims) if dim not in dims or dim not in highest]:
            raise SchemaError(
                f"{what}rank {rank}: indices of dim {wrong[0]!r}; every rank gives indices of the same partitioned "
                f"dims, of {', '.join(schema.partitioned_dims)}",
                kind="region",
                rank=rank,
            )
        for dim in dims:
            if highest[dim] >= schema.partitioned_sizes[dim]:
                raise SchemaError(
                    f"{what}rank {rank}: indices of dim {dim!r} contain {highest[dim]}, its length is "
                    f"{schema.partitioned_sizes[dim]}",
                    kind="region",
                    rank=rank,
                )
    return dims

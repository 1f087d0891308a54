"""Sets of record numbers as half-open ranges: ascending, not touching, so their number follows the gaps."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence

__all__ = ["Ranges", "count", "covers", "difference", "inside", "members", "n_covered", "overlap", "ranges_of", "union"]

Ranges = tuple[tuple[int, int], ...]

_start = operator.itemgetter(0)


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return the ranges of a set of numbers.

    Not collective.
    """
    ordered = sorted(set(numbers))
    if not ordered:
        return ()
    found: list[tuple[int, int]] = []
    start = stop = ordered[0]
    for n in ordered:
        if n != stop:
            found.append((start, stop))
            start = n
        stop = n + 1
    return (*found, (start, stop))


def union(*parts: Sequence[tuple[int, int]]) -> Ranges:
    """Return the numbers that are in any of the parts.

    Not collective.
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(r for part in parts for r in part):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def overlap(a: Ranges, b: Ranges) -> Ranges:
    """Return the numbers that are in both.

    Not collective.
    """
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def difference(a: Ranges, b: Ranges) -> Ranges:
    """Return the numbers that are in ``a`` and not in ``b``.

    Not collective.
    """
    found: list[tuple[int, int]] = []
    for start, stop in a:
        for taken_start, taken_stop in overlap(((start, stop),), b):
            if start < taken_start:
                found.append((start, taken_start))
            start = taken_stop
        if start < stop:
            found.append((start, stop))
    return tuple(found)


def inside(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the numbers from ``start`` to ``stop``.

    Not collective.
    """
    return overlap(ranges, ((start, stop),)) if start < stop else ()


def covers(ranges: Ranges, number: int) -> bool:
    """Return whether a number is in the set.

    Not collective.
    """
    at = bisect.bisect_right(ranges, number, key=_start) - 1
    return at >= 0 and number < ranges[at][1]


def n_covered(ranges: Ranges, numbers: Collection[int]) -> int:
    """Return how many of some numbers are in the set; where one range has them all, none is looked up alone.

    Not collective.

    Parameters
    ----------
    ranges
        The set.
    numbers
        Each another one.
    """
    if not numbers:
        return 0
    at = bisect.bisect_right(ranges, min(numbers), key=_start) - 1
    if at >= 0 and max(numbers) < ranges[at][1]:
        return len(numbers)
    return sum(covers(ranges, n) for n in numbers)


def members(ranges: Ranges) -> Iterator[int]:
    """Yield the numbers, ascending.

    Not collective.
    """
    for start, stop in ranges:
        yield from range(start, stop)


def count(ranges: Ranges) -> int:
    """Return how many numbers there are.

    Not collective.
    """
    return sum(stop - start for start, stop in ranges)

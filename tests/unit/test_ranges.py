"""Sets of record numbers as ranges, held against Python's own sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistream.ranges import Ranges, count, covers, difference, inside, members, n_covered, overlap, ranges_of, union

numbers = st.integers(-3, 20)
sets = st.sets(numbers, max_size=12)
pairs = st.lists(st.tuples(numbers, numbers), max_size=6)


def assert_is(ranges: Ranges, expected: set[int]) -> None:
    """The numbers are those expected, and their ranges the only ones of that set: ascending, not touching."""
    assert {n for a, b in ranges for n in range(a, b)} == expected
    starts = sorted(n for n in expected if n - 1 not in expected)
    stops = sorted(n + 1 for n in expected if n + 1 not in expected)
    assert ranges == tuple(zip(starts, stops, strict=True))


@given(st.lists(numbers, max_size=12))
def test_numbers_become_ranges(given_numbers) -> None:
    """In any order, some twice."""
    assert_is(ranges_of(given_numbers), set(given_numbers))


@given(st.lists(pairs, max_size=4))
def test_union(parts) -> None:
    """Of any pairs: empty, touching, one inside the other, not in order."""
    expected = {n for part in parts for a, b in part for n in range(a, b)}
    assert_is(union(*parts), expected)


@given(sets, sets)
def test_two_sets(a, b) -> None:
    """What is in both, and what is in one alone."""
    x, y = ranges_of(a), ranges_of(b)
    assert_is(overlap(x, y), a & b)
    assert_is(difference(x, y), a - b)
    assert_is(union(x, y), a | b)
    assert (x == y) is (a == b)


@given(sets, numbers, numbers)
def test_a_part_of_a_set(a, start, stop) -> None:
    """From one number to another; nothing where the second is not behind the first."""
    assert_is(inside(ranges_of(a), start, stop), a & set(range(start, stop)))


@given(sets)
def test_the_numbers_of_a_set(a) -> None:
    """One by one, ascending, and how many."""
    ranges = ranges_of(a)
    assert list(members(ranges)) == sorted(a)
    assert count(ranges) == len(a)
    assert {n for n in range(-5, 25) if covers(ranges, n)} == a


@given(sets, sets)
def test_how_many_of_some_numbers(a, b) -> None:
    """Whether one range has them all, or several, or none."""
    assert n_covered(ranges_of(a), b) == len(a & b)


@pytest.mark.parametrize("n", [1, 10**15])
def test_work_follows_the_gaps(n) -> None:
    """A range of any length is one pair."""
    ranges: Ranges = ((0, 3 * n),)
    assert difference(ranges, ((n, 2 * n),)) == ((0, n), (2 * n, 3 * n))
    assert overlap(ranges, ((n, 5 * n),)) == ((n, 3 * n),)
    assert count(union(ranges, ((3 * n, 4 * n),))) == 4 * n

"""JSON documents with one thing wrong: every place in a document, and any value in it."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

__all__ = ["paths", "replaced", "values"]

Path = tuple[Any, ...]

_numbers = st.integers(-2, 3) | st.sampled_from([2**31, 2**63, 10**30, 10**400, 0.5, 1e300])
_words = st.sampled_from(["", "time", "y", "/", "fast", "NaN", "\ud800", "bytes"])
_scalars = st.none() | st.booleans() | _numbers | _words
# Any JSON value, small enough that hypothesis tries many.
values: st.SearchStrategy[Any] = st.recursive(
    _scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from("ya"), v, max_size=2)
)


def paths(value: Any, at: Path = ()) -> list[Path]:
    """Return all places in a document, the outer ones first."""
    if not isinstance(value, dict | list):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [path for key, inner in items for path in [(*at, key), *paths(inner, (*at, key))]]


def replaced(document: Any, path: Path, value: Any) -> Any:
    """Return a copy with another value at one place; with ``...`` it is left out."""
    found = copy.deepcopy(document)
    place = found
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return found

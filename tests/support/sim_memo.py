"""What is pure and slow in the package, computed once for each input in a simulation.

A simulation opens the same few schemas thousands of times, and does not change them: one that was parsed, or got its
layout, is the same object from then on, and what follows from it is known by the object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from mpistream import creating, lease, opening, resuming
from mpistream.decomposition import settle
from mpistream.manifest import Manifest
from mpistream.schema import StreamSchema
from mpistream.zarr3.metadata import make_documents

__all__ = ["memoised"]

_MAX = 1 << 12


class _Memo:
    """A function that keeps what it returned, and with it the arguments: an id in a key is that of a living object."""

    def __init__(self, call: Callable[..., Any], key: Callable[..., Hashable]) -> None:
        self._call = call
        self._key = key
        self._found: dict[Hashable, tuple[Any, object]] = {}

    def __call__(self, *args: Any, **more: Any) -> Any:
        key = self._key(*args, **more)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MAX:
                self._found.clear()
            found = self._found[key] = self._call(*args, **more), (args, more)
        return found[0]

    def method(self) -> Callable[..., Any]:
        """Return this as what a class takes for a method."""

        def method(*args: Any, **more: Any) -> Any:
            return self(*args, **more)

        return method


def _key_of_settle(schema: StreamSchema, regions: Any, nodes: Any, **more: Any) -> Hashable:
    return id(schema), None if regions is None else tuple(regions), tuple(nodes), repr(more)


@contextmanager
def memoised() -> Iterator[None]:
    """Keep results of what is named here, while the body runs."""
    documents = _Memo(make_documents, id)
    with_layout = _Memo(StreamSchema.with_layout, lambda schema, layout: (id(schema), repr(layout)))
    fingerprint = _Memo(StreamSchema.fingerprint, id)
    patches = [
        (resuming, "make_documents", documents),
        (creating, "make_documents", documents),
        (opening, "settle", _Memo(settle, _key_of_settle)),
        (lease, "_system", _Memo(lease._system, lambda: None)),
        # Of a process that is alive, which all are that are asked for here: they are this one.
        (lease, "_state_and_start", _Memo(lease._state_and_start, lambda pid: pid)),
        (Manifest, "from_bytes", staticmethod(_Memo(Manifest.from_bytes, lambda data, *_: data))),
        (StreamSchema, "from_json", staticmethod(_Memo(StreamSchema.from_json, json.dumps))),
        (StreamSchema, "with_layout", with_layout.method()),
        (StreamSchema, "fingerprint", fingerprint.method()),
    ]
    with ExitStack() as stack:
        for target, name, new in patches:
            stack.enter_context(mock.patch.object(target, name, new))
        yield

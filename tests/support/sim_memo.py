"""What is pure and slow in the package, computed once for each input in a simulation.

A simulation opens the same few schemas thousands of times, and does not change them: one that was parsed, or got its
layout, is the same object from then on, and what follows from it is known by the object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from mpistream import array_reader, creating, lease, opening, resuming
from mpistream.arrays import ArraySpec
from mpistream.decomposition import settle
from mpistream.manifest import Manifest
from mpistream.schema import StreamSchema
from mpistream.shard_reads import Wanted, read_boxes
from mpistream.tiling import Box
from mpistream.zarr3.metadata import make_documents
from mpistream.zarr3.shard import ShardSpec
from tests.support.sim_disk import LookStore

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


class _One:
    """A store of one object."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def open(self, key: str) -> Any:
        return self._opened


def _decoded(spec: ShardSpec, data: bytes, key: str, box: Box, opened: Any) -> NDArray[Any]:
    out = np.empty([b - a for a, b in box], spec.fill.dtype)
    store: Any = _One(opened)
    read_boxes(store, spec, [(key, box, out)], out.nbytes, lambda key, out: None)
    return out


class _Boxes:
    """In the place of `mpistream.shard_reads.read_boxes`, for somebody who looks: of equal shards one is decoded."""

    def __init__(self) -> None:
        self._decoded = _Memo(_decoded, lambda spec, data, key, box, opened: (id(spec), data, box))

    def read(self, store: Any, spec: ShardSpec, wanted: Iterable[Wanted], nbytes: int, absent: Any) -> None:
        if not isinstance(store, LookStore):
            read_boxes(store, spec, wanted, nbytes, absent)
            return
        for key, box, out in wanted:
            opened = store.open(key)
            if opened is None:
                absent(key, out)
            else:
                out[...] = self._decoded(spec, opened.data, key, box, opened)


@contextmanager
def memoised() -> Iterator[None]:
    """Keep results of what is named here, while the body runs."""
    documents = _Memo(make_documents, id)
    with_layout = _Memo(StreamSchema.with_layout, lambda schema, layout: (id(schema), repr(layout)))
    fingerprint = _Memo(StreamSchema.fingerprint, id)
    shard_spec = _Memo(ArraySpec.shard_spec, id)
    patches = [
        (resuming, "make_documents", documents),
        (creating, "make_documents", documents),
        (array_reader, "read_boxes", _Boxes().read),
        (ArraySpec, "shard_spec", shard_spec.method()),
        (opening, "settle", _Memo(settle, _key_of_settle)),
        (lease, "_system", _Memo(lease._system, lambda: None)),
        # Of a process that is alive, which all are that are asked for here: they are this one.
        (lease, "_state_and_start", _Memo(lease._state_and_start, lambda pid: pid)),
        (Manifest, "from_bytes", staticmethod(_Memo(Manifest.from_bytes, lambda *args: args))),
        (StreamSchema, "from_json", staticmethod(_Memo(StreamSchema.from_json, json.dumps))),
        (StreamSchema, "with_layout", with_layout.method()),
        (StreamSchema, "fingerprint", fingerprint.method()),
    ]
    with ExitStack() as stack:
        for target, name, new in patches:
            stack.enter_context(mock.patch.object(target, name, new))
        yield

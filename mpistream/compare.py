"""Whether two stores hold the same: array by array, record by record, bitwise or within a tolerance.

What is compared is what a reader gets: dims, dtypes, committed records, times, values, and on request attributes. How
it lies on disk (shards, chunks, codecs, who wrote it, in how many commits) is not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpistream.arrays import Role
from mpistream.errors import FormatError, SchemaError, StoreError, counted
from mpistream.node import Node
from mpistream.ranges import Ranges, count, difference, members, overlap
from mpistream.reader import StoreReader, open_reader

__all__ = ["Comparison", "Difference", "compare"]

# A static is compared in slabs of about this size, so that memory does not grow with it.
_SLAB_NBYTES = 64 * 1024 * 1024
_MAX_LISTED = 8
_ORDER = "first", "second"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which two stores differ."""

    array: str
    """Path of the array; empty for the store itself."""
    kind: str
    """``missing``, ``dims``, ``dtype``, ``shape``, ``attrs``, ``records`` or ``values``."""
    text: str
    """What differs, in one line."""
    record: int | None = None
    """Of values over time: the first record that differs."""
    index: tuple[int, ...] | None = None
    """Of values: the first cell that differs, in C order, within that record."""
    n_cells: int | None = None
    """Of values: how many cells differ."""
    max_abs: float | None = None
    """Of numbers: the largest absolute difference; None where there is none, as between NaN and a number."""
    max_rel: float | None = None
    """Of numbers: the largest difference relative to the second store's value."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types.

        Not collective.
        """
        found = asdict(self)
        found["index"] = None if self.index is None else list(self.index)
        for name in ("max_abs", "max_rel"):
            if found[name] is not None and not math.isfinite(found[name]):
                found[name] = str(found[name])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two stores have in common, and what not."""

    a: str
    b: str
    rtol: float
    atol: float
    n_arrays: int
    """Arrays that were compared."""
    n_records: int
    """Records that both have."""
    differences: tuple[Difference, ...]
    record_noun: str = "record"
    """What a record is: ``"location"`` in location series."""

    @property
    def is_same(self) -> bool:
        """Whether no difference was found."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types.

        Not collective.
        """
        return asdict(self) | {"is_same": self.is_same, "differences": [d.to_json() for d in self.differences]}

    def __str__(self) -> str:
        how = "bitwise" if not self.rtol and not self.atol else f"within rtol {self.rtol:g}, atol {self.atol:g}"
        what = f"{counted(self.n_arrays, 'array')}, {counted(self.n_records, self.record_noun)}"
        if self.is_same:
            return f"{self.a} and {self.b} are the same {how}: {what}"
        lines = [f"{self.a} and {self.b} differ ({how}; {what} in common):"]
        lines += [f"  {d.array or 'store'}: {d.text}" for d in self.differences]
        return "\n".join(lines)


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    variables: Iterable[str] | None = None,
    attrs: bool = False,
) -> Comparison:
    """Compare two stores, streams or other Zarr hierarchies.

    Not collective.

    Parameters
    ----------
    a, b
        Folders of the stores.
    rtol, atol
        Numbers are the same when ``abs(a - b) <= atol + rtol * abs(b)``, or when both are NaN. With both 0 every
        value must be the same bit by bit.
    variables
        Paths of the arrays to compare; by default all. Of a stream the records and their times are compared anyway.
    attrs
        Whether attributes must be the same, too.

    Raises
    ------
    SchemaError
        A tolerance below 0, or a variable that neither store has.
    FormatError, StoreError
        One of them can't be read.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise SchemaError(f"{name} {value!r}: give a number from 0 on", kind="tolerance")
    urls = os.fspath(a), os.fspath(b)
    with _of(0, urls, partial(open_reader, a)) as reader_a, _of(1, urls, partial(open_reader, b)) as reader_b:
        comparer = _Comparer(reader_a, reader_b, urls, (rtol, atol), attrs=attrs)
        return comparer.run(None if variables is None else list(variables))


def _of(k: int, urls: tuple[str, str], look: Callable[[], _T]) -> _T:
    """Return what a look into one of two stores gives; what is wrong with it names the store, not only the key."""
    try:
        return look()
    except (FormatError, StoreError) as error:
        if error.kind == "no_manifest":
            raise  # it says the folder itself
        raise type(error)(f"{urls[k]}, the {_ORDER[k]}: {error}", kind=error.kind, errno=error.errno) from error


class _Values:
    """The differences of one array's values so far."""

    def __init__(self, dtype: np.dtype[Any], rtol: float, atol: float) -> None:
        self._rtol, self._atol = rtol, atol
        self._is_number = dtype.kind in "iufcmM"
        self.n_cells = 0
        self.first: tuple[int | None, tuple[int, ...], str, str] | None = None
        self.max_abs: float | None = None
        self.max_rel: float | None = None

    def add(self, record: int | None, offset: int, a: NDArray[Any], b: NDArray[Any]) -> None:
        """Compare a block; ``offset`` is where it begins along its first dim."""
        differs = self._differs(a, b)
        n = int(differs.sum())
        if not n:
            return
        self.n_cells += n
        if self.first is None:
            at = tuple(int(i) for i in np.unravel_index(int(differs.argmax()), differs.shape))
            index = (at[0] + offset, *at[1:]) if at else at
            self.first = record, index, _text(a[at]), _text(b[at])
        if self._is_number:
            self._measure(a[differs], b[differs])

    def _differs(self, a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
        is_bitwise = not (self._rtol or self._atol)
        if a.dtype.kind in "UT":
            return np.asarray(a != b)
        if is_bitwise or a.dtype.kind not in "iufc":
            # Cell by cell as bytes: -0.0 is not 0.0, and a NaN is itself.
            bytes_a, bytes_b = (
                np.ascontiguousarray(x).reshape(-1).view("u1").reshape(x.size, x.itemsize) for x in (a, b)
            )
            return np.asarray((bytes_a != bytes_b).any(axis=1).reshape(a.shape))
        a, b = _wide(a), _wide(b)
        with np.errstate(all="ignore"):
            is_close = np.abs(a - b) <= self._atol + self._rtol * np.abs(b)
            # Infinities are close to themselves alone.
            return np.asarray(~((is_close & np.isfinite(a) & np.isfinite(b)) | (a == b) | (np.isnan(a) & np.isnan(b))))

    def _measure(self, a: NDArray[Any], b: NDArray[Any]) -> None:
        if a.dtype.kind in "mM":
            a, b = a.view("int64"), b.view("int64")
        a, b = _wide(a), _wide(b)
        with np.errstate(all="ignore"):
            gap = np.abs(a - b)
            gap = gap[~np.isnan(gap)]
            relative = np.abs(a - b) / np.abs(b)
            relative = relative[~np.isnan(relative)]
        if gap.size:
            self.max_abs = max(self.max_abs or 0.0, float(gap.max()))
        if relative.size:
            self.max_rel = max(self.max_rel or 0.0, float(relative.max()))


def _wide(values: NDArray[Any]) -> NDArray[Any]:
    # The difference of two unsigned integers, or of halves, would wrap or overflow.
    return values.astype("complex128" if values.dtype.kind == "c" else "longdouble")


def _text(value: Any) -> str:
    return repr(value.item()) if isinstance(value, np.generic) and value.dtype.kind in "biufc" else repr(str(value))


class _Comparer:
    """Two readers, and what was found."""

    def __init__(
        self, a: StoreReader, b: StoreReader, urls: tuple[str, str], tolerances: tuple[float, float], *, attrs: bool
    ) -> None:
        self._a, self._b, self._urls = a, b, urls
        self._rtol, self._atol = tolerances
        self._attrs = attrs
        self._found: list[Difference] = []
        nouns = {reader.schema.record_noun for reader in (a, b) if reader.is_stream}
        self._noun = nouns.pop() if len(nouns) == 1 else "record"

    def _both(self, look: Callable[[StoreReader], _T]) -> tuple[_T, _T]:
        return _of(0, self._urls, lambda: look(self._a)), _of(1, self._urls, lambda: look(self._b))

    def run(self, variables: list[str] | None) -> Comparison:
        nodes = self._both(lambda reader: reader.hierarchy())
        arrays = [{p: n for p, n in side.items() if n.kind == "array"} for side in nodes]
        paths = sorted(set(arrays[0]) | set(arrays[1]))
        if variables is not None:
            if unknown := [v for v in variables if v not in paths]:
                raise SchemaError(f"{unknown[0]!r} is in neither store; there are {paths}", kind="unknown")
            time_dims = {r.schema.time_dim for r in (self._a, self._b) if r.is_stream}
            paths = [p for p in paths if p in variables or p in time_dims]
        if self._attrs and variables is None and dict(nodes[0][""].attrs) != dict(nodes[1][""].attrs):
            self._say("", "attrs", _attrs_text(nodes[0][""], nodes[1][""]))
        records = self._records()
        n_arrays = 0
        for path in paths:
            sides = [side.get(path) for side in arrays]
            if sides[0] is None or sides[1] is None:
                self._say(path, "missing", f"only in the {'first' if sides[1] is None else 'second'}")
            elif self._is_comparable(sides[0], sides[1]):
                n_arrays += 1
                self._compare_values(sides[0], sides[1], records)
        return Comparison(
            a=self._urls[0],
            b=self._urls[1],
            rtol=self._rtol,
            atol=self._atol,
            n_arrays=n_arrays,
            n_records=count(records),
            differences=tuple(self._found),
            record_noun=self._noun,
        )

    def _say(self, array: str, kind: str, text: str, **facts: Any) -> None:
        self._found.append(Difference(array=array, kind=kind, text=text, **facts))

    def _records(self) -> Ranges:
        """Return the records that both have."""
        if not (self._a.is_stream and self._b.is_stream):
            return ()
        a, b = self._a.committed, self._b.committed
        if self._a.n_records != self._b.n_records:
            first = counted(self._a.n_records, self._noun)
            self._say("", "records", f"{first} in the first, {self._b.n_records} in the second")
        elif a != b:
            only = [_ranges_text(difference(*sides)) for sides in ((a, b), (b, a))]
            self._say("", "records", f"committed only in the first: {only[0]}; only in the second: {only[1]}")
        return overlap(a, b)

    def _is_comparable(self, a: Node, b: Node) -> bool:
        if self._attrs and dict(a.attrs) != dict(b.attrs):
            self._say(a.path, "attrs", _attrs_text(a, b))
        if a.dims != b.dims:
            self._say(a.path, "dims", f"dims {a.dims} and {b.dims}")
        elif a.dtype != b.dtype:
            self._say(a.path, "dtype", f"dtype {a.dtype} and {b.dtype}")
        elif self._own_shape(self._a, a) != self._own_shape(self._b, b):
            self._say(a.path, "shape", f"shape {a.shape} and {b.shape}")
        else:
            return True
        return False

    def _own_shape(self, reader: StoreReader, node: Node) -> tuple[int, ...]:
        """Return a shape, without the time dim, of which `_records` has said what there is to say."""
        assert node.shape is not None
        both = self._a.is_stream and self._b.is_stream
        return node.shape[1:] if both and self._is_over_time(reader, node) else node.shape

    @staticmethod
    def _is_over_time(reader: StoreReader, node: Node) -> bool:
        if not reader.is_stream or (node.dims or ())[:1] != (reader.schema.record_dim,):
            return False
        # Locations have coordinates, which are compared whole.
        array = reader.schema.arrays.get(node.path)
        return array is None or array.has_time

    def _compare_values(self, a: Node, b: Node, records: Ranges) -> None:
        path = a.path
        for reader, order in zip((self._a, self._b), _ORDER, strict=True):
            if reader.is_stream and path in reader.schema.arrays and not _is_there(reader, path):
                other = self._b if reader is self._a else self._a
                if not other.is_stream or _is_there(other, path):
                    self._say(path, "missing", f"not committed in the {order}")
                return
        is_over_time = self._is_over_time(self._a, a) and self._is_over_time(self._b, b)
        blocks = self._by_record(path, a, records) if is_over_time else self._by_slab(path, a)
        values: _Values | None = None
        for record, offset, block_a, block_b in blocks:
            if values is None:
                values = _Values(block_a.dtype, self._rtol, self._atol)
            values.add(record, offset, block_a, block_b)
        if values is not None and values.first is not None:
            self._say_values(path, a, values)

    def _by_record(
        self, path: str, node: Node, records: Ranges
    ) -> Iterator[tuple[int | None, int, NDArray[Any], NDArray[Any]]]:
        if path != self._a.schema.time_dim and path not in self._a.schema.arrays:
            return  # the mask of what is committed, which `_records` has compared
        assert node.shape is not None
        if len(node.shape) == 1:
            for start, stop in records:
                box = [(start, stop)]
                yield None, start, *self._both(lambda reader: reader.read_array(path, box))  # noqa: B023 (called here)
            return
        for record in members(records):
            yield record, 0, *self._both(lambda reader: reader.read_record(path, record))  # noqa: B023

    def _by_slab(self, path: str, node: Node) -> Iterator[tuple[int | None, int, NDArray[Any], NDArray[Any]]]:
        assert node.shape is not None
        if not node.shape:
            yield None, 0, *self._both(lambda reader: reader.read_array(path))
            return
        n, others = node.shape[0], node.shape[1:]
        step = max(1, _SLAB_NBYTES // max(1, 16 * math.prod(others)))
        # Whole chunks, so that none is read twice.
        length = (node.shard_shape or node.chunk_shape or (1,))[0]
        step = max(length, step // length * length)
        for start in range(0, n, step):
            box = [(start, min(start + step, n)), *((0, m) for m in others)]
            yield None, start, *self._both(lambda reader: reader.read_array(path, box))  # noqa: B023

    def _say_values(self, path: str, node: Node, values: _Values) -> None:
        assert values.first is not None
        record, index, text_a, text_b = values.first
        if record is None and self._is_over_time(self._a, node):
            record, index = index[0], index[1:]
        # Without names the axes have none; of a record the time dim has no index.
        dims = (node.dims or (None,) * len(index))[-len(index) :] if index else ()
        at = [] if record is None else [f"{self._noun} {record}"]
        at += [" ".join(f"{d or 'axis'}[{i}]" for d, i in zip(dims, index, strict=True))] if index else []
        n_cells = counted(values.n_cells, "cell") + (" differs" if values.n_cells == 1 else " differ")
        text = f"first at {', '.join(at) or 'its value'}: {text_a} and {text_b}; {n_cells}"
        if values.max_abs is not None:
            text += f", by at most {values.max_abs:.6g}"
        if values.max_rel is not None:
            text += f", relatively {values.max_rel:.6g}"
        self._say(
            path,
            "values",
            text,
            record=record,
            index=index,
            n_cells=values.n_cells,
            max_abs=values.max_abs,
            max_rel=values.max_rel,
        )


def _is_there(reader: StoreReader, path: str) -> bool:
    return reader.schema.arrays[path].role is not Role.STATIC or path in reader.manifest.statics


def _attrs_text(a: Node, b: Node) -> str:
    names = sorted(n for n in {*a.attrs, *b.attrs} if a.attrs.get(n) != b.attrs.get(n))
    return "attributes: " + "; ".join(f"{n} {a.attrs.get(n)!r} and {b.attrs.get(n)!r}" for n in names[:_MAX_LISTED])


def _ranges_text(ranges: Ranges) -> str:
    parts = [str(start) if stop - start == 1 else f"{start} to {stop - 1}" for start, stop in ranges[:_MAX_LISTED]]
    return ", ".join(parts) + (" and more" if len(ranges) > _MAX_LISTED else "") or "none"

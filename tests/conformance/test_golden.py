"""Stores that were written once and are kept: every later version and every plain reader finds the same in them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.golden import CASES, FOLDER, Golden, payload
from tests.support.plain import QUICK, READERS, differing, open_xarray

each_store = pytest.mark.parametrize("name", CASES)


def url_of(name: str) -> Path:
    return FOLDER / f"{name}.zarr"


def assert_read_by_us(url: Path, case: Golden) -> None:
    """Times, committed records, statics, coordinates and blobs, and no more."""
    with ms.open_reader(url) as reader:
        assert reader.times.tolist() == list(case.times)
        assert [i for a, b in reader.committed for i in range(a, b)] == list(case.records)
        for name in case.variables:
            found = {str(i): reader.read_record(name, i) for i in case.records}
            assert differing(found, {str(i): case.value(name, i) for i in case.records}) == []
        for name in (*case.statics, *case.coords):
            assert differing({name: reader.read_static(name)}, {name: case.value(name)}) == []
        # The order of blobs says nothing.
        blobs = {(w, scope, key) for key, scope, w in case.blobs if scope == "static" or scope in case.records}
        assert set(reader.blobs()) == blobs
        for w, scope, key in blobs:
            assert reader.read_blob(key, scope, w) == payload(key, scope, w)


def test_there_is_a_golden_store_of_each_kind() -> None:
    """None is missing, and none is there that nothing is known of."""
    found = sorted(path.name for path in FOLDER.glob("*"))
    assert found == sorted(f"{name}.zarr" for name in CASES), "python -m tests.data.make_golden makes what is missing"


@each_store
def test_golden_store_is_read_by_us(name: str) -> None:
    """Our reader finds the closed forms."""
    assert_read_by_us(url_of(name), CASES[name])


@each_store
@pytest.mark.parametrize("reader", READERS)
def test_golden_store_is_read_by_plain_readers(name: str, reader: str) -> None:
    """So does each plain reader, bit by bit; of a fixed time dim it is told which records are committed."""
    case = CASES[name]
    records = list(case.records)
    streaming = ["time", *case.variables]
    own = ["committed"] if case.is_indexed else []
    found = dict(READERS[reader](url_of(name), [*streaming, *case.statics, *case.coords, *own]))
    expected: dict[str, Any] = {n: case.value(n) for n in (*case.statics, *case.coords)}
    expected |= {n: np.stack([case.value(n, i) for i in records]) for n in case.variables}
    expected["time"] = np.array([case.times[i] for i in records])
    if own:
        assert np.flatnonzero(found.pop("committed")).tolist() == records
    assert {n: len(found[n]) for n in streaming} == dict.fromkeys(streaming, len(case.times))
    found |= {n: found[n][records] for n in streaming}
    assert differing(found, expected) == []


@each_store
def test_golden_store_is_a_dataset(name: str) -> None:
    """xarray decodes its times and attributes, and knows its coordinates."""
    case = CASES[name]
    dataset = open_xarray(url_of(name))
    start = np.datetime64("2000-01-01", "ns")
    expected = [start + np.timedelta64(round(t * 3600), "s") for t in case.times]
    assert dataset["time"].values.tolist() == np.array(expected, "datetime64[ns]").tolist()
    assert dataset.attrs["title"] == "golden"
    assert set(case.coords) < set(dataset.coords)


@each_store
def test_golden_store_is_resumed(name: str, tmp_path: Path) -> None:
    """A copy takes another record, by one writer, and keeps what it had."""
    case = CASES[name]
    url = tmp_path / "run.zarr"
    shutil.copytree(url_of(name), url)
    with ms.write_resume(url, schema=case.schema(), options=QUICK) as w:
        assert w.n_committed == len(case.records) or case.is_indexed
        if case.is_indexed:
            w.write_record_at(1, case.times[1], case.record(1, w.region))
            records, times = tuple(sorted({*case.records, 1})), case.times
        else:
            times = (*case.times, case.times[-1] + 2)
            w.write_record(times[-1], case.record(len(case.times), w.region))
            records = tuple(range(len(times)))
    grown: dict[str, Any] = {**vars(case), "times": times, "committed": records}
    assert_read_by_us(url, Golden(**grown))

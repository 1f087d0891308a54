"""Stores that were written once and are kept: every later version and every plain reader finds the same in them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from tests.support.golden import CASES, FOLDER, LOCATIONS, Golden, payload
from tests.support.plain import QUICK, READERS, Arrays, differing, open_xarray

each_store = pytest.mark.parametrize("name", CASES)


def url_of(name: str) -> Path:
    return FOLDER / f"{name}.zarr"


def with_text(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Return arrays with strings of any length in cells, where they can be compared byte by byte."""
    # zarr gives a single one as a str.
    is_text = {n: v.dtype.kind == "T" or (v.dtype.kind == "U" and v.ndim == 0) for n, v in arrays.items()}
    return {n: v.astype("U16") if is_text[n] else v for n, v in arrays.items()}


def kind_of(case: Golden, name: str) -> str:
    return "f" if name == "time" else np.dtype(case.described(name).dtype).kind


def assert_read_by_us(url: Path, case: Golden) -> None:
    """Times, committed records, statics, coordinates and blobs, and no more."""
    with ms.open_reader(url) as reader:
        assert reader.times.tolist() == list(case.times)
        assert [i for a, b in reader.committed for i in range(a, b)] == list(case.records)
        for name in case.variables:
            found = {str(i): reader.read_record(name, i) for i in case.records}
            assert differing(found, {str(i): case.value(name, i) for i in case.records}) == []
        for name in (*case.statics, *case.coords):
            assert differing(with_text({name: reader.read_static(name)}), with_text({name: case.value(name)})) == []
        # The order of blobs says nothing.
        blobs = {(w, scope, key) for key, scope, w in case.blobs if scope == "static" or scope in case.records}
        assert set(reader.blobs()) == blobs
        for w, scope, key in blobs:
            assert reader.read_blob(key, scope, w) == payload(key, scope, w)


def test_there_is_a_golden_store_of_each_kind() -> None:
    """None is missing, and none is there that nothing is known of."""
    found = sorted(path.name for path in FOLDER.glob("*"))
    assert found == sorted(f"{name}.zarr" for name in (*CASES, "locations")), (
        "python -m tests.data.make_golden makes what is missing"
    )


@each_store
def test_golden_store_is_read_by_us(name: str) -> None:
    """Our reader finds the closed forms."""
    assert_read_by_us(url_of(name), CASES[name])


@each_store
def test_every_array_that_is_listed_is_read_by_region(name: str) -> None:
    """Those that no caller describes too: each record as zarr-python finds it in the whole array."""
    with ms.open_reader(url_of(name)) as reader:
        nodes = {path: node for path, node in reader.hierarchy().items() if node.kind == "array"}
        whole = READERS["zarr"](url_of(name), list(nodes))
        for path, node in nodes.items():
            records = CASES[name].records if node.dims and node.dims[0] == "time" else [None]
            for i in records:
                region = None if i is None else {"time": (i, i + 1)}
                found = reader.read_array(path, region)
                found = found.view("int64") if found.dtype.kind in "mM" else found
                expected = whole[path] if i is None else whole[path][i : i + 1]
                assert differing(with_text({path: found}), with_text({path: expected})) == []


@each_store
@pytest.mark.parametrize("reader", READERS)
def test_golden_store_is_read_by_plain_readers(name: str, reader: str) -> None:
    """So does each plain reader, bit by bit; of a fixed time dim it is told which records are committed."""
    case = CASES[name]
    records = list(case.records)
    streaming = ["time", *case.variables]
    own = ["committed"] if case.is_indexed else []
    lacks = {"tensorstore": "TU", "zarrs": "U"}.get(reader, "")
    names = [n for n in (*streaming, *case.statics, *case.coords) if kind_of(case, n) not in lacks]
    found = dict(READERS[reader](url_of(name), [*names, *own]))
    timed = [n for n in names if kind_of(case, n) in "mM"]
    if timed and reader.startswith("xarray"):
        # It does not leave the integer of NaT alone, unless it is told to decode nothing.
        undecoded = open_xarray(url_of(name), consolidated=reader == "xarray", decode_cf=False)
        found |= {n: undecoded[n].values for n in timed}
    expected: dict[str, Any] = {n: case.value(n) for n in (*case.statics, *case.coords) if n in names}
    expected |= {n: np.stack([case.value(n, i) for i in records]) for n in case.variables}
    expected |= {n: expected[n].view("int64") for n in timed}
    expected["time"] = np.array([case.times[i] for i in records])
    if own:
        assert np.flatnonzero(found.pop("committed")).tolist() == records
    assert {n: len(found[n]) for n in streaming} == dict.fromkeys(streaming, len(case.times))
    found |= {n: found[n][records] for n in streaming}
    assert differing(with_text(found), with_text(expected)) == []


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
    for n in (*case.statics, *case.coords):
        if kind_of(case, n) in "mM":
            np.testing.assert_array_equal(dataset[n].values, case.value(n))
    for n in case.variables:
        if kind_of(case, n) in "mM":
            np.testing.assert_array_equal(dataset[n].values, np.stack([case.value(n, i) for i in case.records]))


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


def test_golden_locations_are_read_by_us_and_resumed(tmp_path: Path) -> None:
    """Committed locations and no others; a copy takes the rest, and keeps what it had."""
    url = tmp_path / "run.zarr"
    shutil.copytree(url_of("locations"), url)
    with ms.open_reader(url) as reader:
        assert [i for a, b in reader.committed for i in range(a, b)] == list(LOCATIONS.committed)
        assert reader.read_static("id").tolist() == list(LOCATIONS.ids)
        assert reader.times.tolist() == list(LOCATIONS.times)
        assert reader.read_static("lon").tolist() == [0, 1, 2, 3, 4]
        for name in LOCATIONS.variables:
            for i in LOCATIONS.committed:
                expected = LOCATIONS.values(name, LOCATIONS.committed)[i]
                assert differing({name: reader.read_location(name, LOCATIONS.ids[i])}, {name: expected}) == []
    with ms.write_resume(url, schema=LOCATIONS.schema(), options=QUICK) as w:
        assert isinstance(w, ms.LocationSeriesWriter)
        assert w.missing() == [2, 4]
        for i in w.missing():
            w.write_location(i, LOCATIONS.series(i))
    with ms.open_reader(url) as reader:
        for name in LOCATIONS.variables:
            assert differing({name: reader.read_array(name)}, {name: LOCATIONS.values(name, range(5))}) == []


@pytest.mark.parametrize("reader", READERS)
def test_golden_locations_are_read_by_plain_readers(reader: str) -> None:
    """Bit by bit, fill value where no location is committed; those that know strings know the ids."""
    names = [*LOCATIONS.variables, "committed", "time", "lon", *([] if reader == "tensorstore" else ["id"])]
    found = dict(READERS[reader](url_of("locations"), names))
    assert np.flatnonzero(found.pop("committed")).tolist() == list(LOCATIONS.committed)
    if "id" in found:
        assert found.pop("id").tolist() == list(LOCATIONS.ids)
    expected = {name: LOCATIONS.values(name, LOCATIONS.committed) for name in LOCATIONS.variables}
    assert differing(found, {**expected, "time": np.array(LOCATIONS.times), "lon": np.arange(5.0)}) == []

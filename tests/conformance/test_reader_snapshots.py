"""What a reader hands out while the store goes on: a committed state, never parts of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from mpistream.memory_store import MemoryStore
from tests.support.plain import QUICK, append_schema, differing, open_xarray

NAMES = ("u", "v")


def schema_of(row: int = 1, inner_time: int = 1, separator: str = "/") -> ms.StreamSchema:
    return append_schema(
        {"y": 4},
        {
            **{name: ms.Variable(("time", "y"), "float32") for name in NAMES},
            "count": ms.Variable(("time",), "int64"),
        },
        statics={"topo": ms.Variable(("y",), "float64")},
        coords={"y": ms.Coordinate(("y",), [0.5, 1.5, 2.5, 3.5])},
        shard_shape={"time": row, "y": 4},
        chunk_shape={"time": inner_time, "y": 2},
        key_separator=separator,
    )


def value(i: int, run: int = 0) -> dict[str, NDArray[Any]]:
    """Return record i as the run with this number computes it."""
    field = np.arange(4, dtype="float32") + 10 * i + 1000 * run
    return {"u": field, "v": -field, "count": np.array(i + 1000 * run)}


def append(writer: ms.StreamWriter, stop: int, run: int = 0) -> None:
    """Write records up to this one, a commit each."""
    for i in range(writer.n_records, stop):
        writer.write_record(float(i), value(i, run))
        writer.commit()


def create(url: Any, n_records: int, schema: ms.StreamSchema) -> None:
    with ms.write_open(url, schema, options=QUICK) as writer:
        writer.write_static("topo", np.arange(4) / 3)
        append(writer, n_records)


def resume(url: Any, keep: int, stop: int, run: int = 1) -> None:
    """Resume with so many records, then write up to ``stop``."""
    with ms.write_resume(url, at=keep - 1.0, options=QUICK) as writer:
        assert writer.n_records == keep
        append(writer, stop, run)


def expected_arrays(n_records: int) -> dict[str, NDArray[Any]]:
    records = {name: np.stack([value(i)[name] for i in range(n_records)]) for name in (*NAMES, "count")}
    return {**records, "time": np.arange(n_records) * 1.0, "topo": np.arange(4) / 3, "y": np.arange(4) + 0.5}


def documents(path: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in path.rglob("zarr.json") if ".mpistream" not in p.parts}


@pytest.mark.parametrize(("row", "inner_time", "separator"), [(1, 1, "/"), (4, 2, "."), (8, 1, "/")])
@pytest.mark.parametrize("lag", ["behind", "ahead", "damaged"])
def test_snapshots_do_not_depend_on_published_documents(
    tmp_path: Path, lag: str, row: int, inner_time: int, separator: str
) -> None:
    """to_zarr and to_xarray give exactly the committed state, whatever the documents on disk say."""
    path = tmp_path / "run.zarr"
    create(path, 2, schema_of(row, inner_time, separator))
    old = documents(path)
    resume(path, 2, 5, run=0)
    reader = ms.open_reader(path)
    if lag == "ahead":
        old = {p: data.replace(b'"shape": [\n    5', b'"shape": [\n    7') for p, data in documents(path).items()}
        assert old != documents(path)
    for p, data in old.items():
        p.write_bytes(b"{" if lag == "damaged" else data)
    if lag == "behind":
        # What a plain reader sees is older, and whole.
        assert open_xarray(path)["u"].values.tolist() == [value(i)["u"].tolist() for i in range(2)]
    expected = expected_arrays(5)
    group = reader.to_zarr()
    assert differing({name: group[name][...] for name in expected}, expected) == []
    assert sorted(group.array_keys()) == sorted(expected)
    dataset = reader.to_xarray()
    untimed = {name: values for name, values in expected.items() if name != "time"}
    assert differing({name: dataset[name].values for name in untimed}, untimed) == []
    seconds = (dataset["time"].values - np.datetime64("2000-01-01", "ns")) / np.timedelta64(1, "s")
    assert seconds.tolist() == expected["time"].tolist()


def test_snapshot_stays_while_the_store_grows(tmp_path: Path) -> None:
    """A dataset or group that was handed out keeps its length and values when records are appended."""
    path = tmp_path / "run.zarr"
    create(path, 3, schema_of(8, 4))
    reader = ms.open_reader(path)
    group, dataset = reader.to_zarr(), reader.to_xarray()
    resume(path, 3, 7, run=0)
    expected = expected_arrays(3)
    assert differing({name: group[name][...] for name in expected}, expected) == []
    assert differing({name: dataset[name].values for name in NAMES}, {name: expected[name] for name in NAMES}) == []


def test_snapshot_is_read_only(tmp_path: Path) -> None:
    """Nothing can be written through a snapshot."""
    path = tmp_path / "run.zarr"
    create(path, 2, schema_of())
    group = ms.open_reader(path).to_zarr()
    with pytest.raises(ValueError, match="read-only"):
        group["u"][...] = 0
    assert differing({"u": ms.read_record(path, "u", 0)}, {"u": value(0)["u"]}) == []


def test_snapshot_of_a_store_that_is_no_folder_is_refused() -> None:
    """Only a local folder can be given to zarr; another store is StoreError of kind not_local."""
    store: Any = MemoryStore()
    create(store, 1, schema_of())
    with pytest.raises(ms.StoreError, match="only a local folder") as caught:
        ms.open_reader(store).to_zarr()
    assert caught.value.kind == "not_local"


@pytest.mark.parametrize("separator", ["/", "."])
def test_dropped_record_is_superseded(tmp_path: Path, separator: str) -> None:
    """Who still holds the state before a resume that dropped records is told to refresh, as soon as one is missing."""
    path = tmp_path / "run.zarr"
    create(path, 6, schema_of(separator=separator))
    reader = ms.open_reader(path)
    resume(path, 3, 3)
    with pytest.raises(ms.StoreError, match=r"epoch 2, read as of 1.*call refresh\(\)") as caught:
        reader.read_record("u", 4)
    assert caught.value.kind == "superseded"
    assert differing({"u": reader.read_record("u", 2)}, {"u": value(2)["u"]}) == []
    assert reader.refresh()
    assert reader.n_records == 3
    with pytest.raises(ms.SchemaError, match="there are 3 records"):
        reader.read_record("u", 4)


def test_missing_shard_of_the_same_epoch_is_damage(tmp_path: Path) -> None:
    """A missing shard is FormatError with its key when nobody has opened the store for writing since."""
    path = tmp_path / "run.zarr"
    create(path, 2, schema_of())
    reader = ms.open_reader(path)
    (path / "u" / "c" / "1" / "0").unlink()
    with pytest.raises(ms.FormatError, match=r"^u/c/1/0: .*missing") as caught:
        reader.read_record("u", 1)
    assert caught.value.kind == "missing"


def read_or_kind(reader: ms.StoreReader, name: str, i: int) -> Any:
    """Return the value that is read, or the kind of the error."""
    try:
        return reader.read_record(name, i).tolist()
    except ms.StoreError as error:
        return error.kind


@pytest.mark.parametrize(("row", "inner_time"), [(1, 1), (8, 1), (8, 4)])
@pytest.mark.parametrize("stop", [5, 6, 9])
def test_reader_of_an_older_epoch_mixes_nothing(tmp_path: Path, row: int, inner_time: int, stop: int) -> None:
    """A state from before a resume gives each record as it was then, or is superseded: no fill, no other run."""
    path = tmp_path / "run.zarr"
    create(path, 7, schema_of(row, inner_time))
    reader = ms.open_reader(path)
    resume(path, 4, stop)
    for name in (*NAMES, "count"):
        found = [read_or_kind(reader, name, i) for i in range(7)]
        then = [value(i)[name].tolist() for i in range(7)]
        assert [f for f, t in zip(found, then, strict=True) if f not in (t, "superseded")] == [], name


@pytest.mark.parametrize("stop", [4, 5, 9])
def test_times_of_an_older_epoch_are_superseded_or_right(tmp_path: Path, stop: int) -> None:
    """Times that were not read before a resume dropped some of them are never NaN or those of another run."""
    path = tmp_path / "run.zarr"
    create(path, 7, schema_of())
    reader = ms.open_reader(path)
    with ms.write_resume(path, at=3.0, options=QUICK) as writer:
        for i in range(4, stop):
            writer.write_record(i + 0.25, value(i))
            writer.commit()
    try:
        found = reader.times.tolist()
    except ms.StoreError as error:
        assert error.kind == "superseded"
    else:
        assert found == [0, 1, 2, 3, 4, 5, 6]


def test_overwritten_store_is_superseded(tmp_path: Path) -> None:
    """A reader of a store that was replaced is told so."""
    path = tmp_path / "run.zarr"
    create(path, 3, schema_of())
    reader = ms.open_reader(path)
    ms.write_open(path, schema_of(), overwrite=True, options=QUICK).close()
    with pytest.raises(ms.StoreError, match=r"call refresh\(\)") as caught:
        reader.read_record("u", 0)
    assert caught.value.kind == "superseded"
    assert reader.refresh()
    assert reader.n_records == 0

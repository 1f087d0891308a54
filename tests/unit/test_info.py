"""What `describe` says about a store, against the files, the manifest's own bytes and xarray's dates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.info import decode_time, describe, short_chain
from tests.support.info_store import files_below, make_schema, make_store, size_of

BLOSC = {"typesize": 4, "cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("info") / "run.zarr", make_schema())


def test_names_of_facts_stay(store: Path) -> None:
    """Programs read them: a name may be added, none is renamed or taken away."""
    assert list(describe(store)) == [
        *("url", "title", "store_id", "run_id", "epoch", "commit_seq", "fingerprint", "mode"),
        *("record_noun", "n_records", "n_committed"),
        *("last_t", "last_date", "time_dim", "time_units", "time_calendar", "dims", "key_separator", "statics"),
        *("n_dropped", "dropped", "n_files", "is_exact", "nbytes", "nbytes_on_disk", "ratio", "arrays"),
    ]


def test_describe_tells_what_the_manifest_says(store: Path) -> None:
    facts = describe(store)
    manifest = json.loads((store / ".mpistream/manifest.json").read_bytes())
    same = ("store_id", "run_id", "epoch", "commit_seq", "n_records", "last_t", "fingerprint")
    assert {n: facts[n] for n in same} == {n: manifest[n] for n in same}
    assert (facts["n_records"], facts["last_t"], facts["epoch"], facts["commit_seq"]) == (6, 60.0, 1, 1)
    assert facts["last_date"] == "2000-03-02T00:00:00"  # 60 h behind noon of 28 February, in a leap year
    assert facts["url"] == str(store)
    assert facts["title"] == "A [bold]plate[/bold] :smile:"
    assert facts["dims"] == {"time": 6, "y": 7, "x": 5}
    assert facts["statics"] == {"depth": True, "n_stations": False, "lat": False}
    assert (facts["n_dropped"], facts["dropped"]) == (0, [])


def test_describe_tells_how_an_array_lies_on_disk(store: Path) -> None:
    arrays = {a.pop("name"): a for a in describe(store)["arrays"]}
    assert list(arrays) == ["time", "temperature", "energy", "depth", "n_stations", "y", "lat"]
    nbytes = size_of(*files_below(store / "temperature" / "c"))
    assert arrays["temperature"] == {
        "role": "variable",
        "dims": ["time", "y", "x"],
        "dtype": "float32",
        "shape": [6, 7, 5],
        "shard_shape": [4, 4, 5],
        "chunk_shape": [2, 2, 5],
        "row_length": 4,
        "keep_bits": None,
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "blosc", "configuration": BLOSC},
            {"name": "crc32c"},
        ],
        "is_committed": True,
        "n_objects_per_record": 0.5,  # 2 shards over y, 4 records share them
        "n_objects": 4,
        "nbytes": 6 * 7 * 5 * 4,
        "nbytes_on_disk": nbytes,
        "ratio": 6 * 7 * 5 * 4 / nbytes,
    }
    shapes = {name: (a["shape"], a["shard_shape"], a["chunk_shape"], a["row_length"]) for name, a in arrays.items()}
    assert shapes["time"] == shapes["energy"] == ([6], None, [1024], 1024)
    assert shapes["depth"] == ([7, 5], [4, 5], [2, 5], None)
    assert shapes["n_stations"] == ([], None, [], None)
    assert shapes["y"] == ([7], None, [7], None)
    assert arrays["energy"]["n_objects_per_record"] == 1 / 1024


def test_describe_counts_committed_values_only(store: Path) -> None:
    """A static that is not committed has no bytes, no objects and no ratio."""
    facts = describe(store)
    nbytes = {a["name"]: a["nbytes"] for a in facts["arrays"]}
    expected = {"time": 48, "temperature": 840, "energy": 48, "depth": 70, "n_stations": 0, "y": 56, "lat": 0}
    assert nbytes == expected
    assert facts["nbytes"] == sum(expected.values())
    lat = facts["arrays"][-1]
    assert (lat["is_committed"], lat["n_objects"], lat["nbytes_on_disk"], lat["ratio"]) == (False, 0, 0, None)


@pytest.mark.parametrize("separator", ["/", "."])
def test_describe_measures_every_file(tmp_path: Path, separator: str) -> None:
    """Sizes are those of the files, whatever the chunk keys look like; documents belong to no array."""
    url = make_store(tmp_path / "run.zarr", make_schema(key_separator=separator))
    facts = describe(url)
    found = files_below(url)
    assert facts["n_files"] == len(found)
    assert facts["nbytes_on_disk"] == size_of(*found)
    assert facts["ratio"] == facts["nbytes"] / size_of(*found)
    for array in facts["arrays"]:
        own = [p for p in files_below(url / array["name"]) if p.name != "zarr.json"]
        assert (array["n_objects"], array["nbytes_on_disk"]) == (len(own), size_of(*own)), array["name"]


@pytest.mark.parametrize("separator", ["/", "."])
def test_sizes_of_very_many_files_are_estimated(
    tmp_path: Path, separator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a bound only some files are looked at, evenly; where all rows are alike, the estimate is what there is."""
    url = make_store(tmp_path / "run.zarr", make_schema(key_separator=separator), n_records=240)
    exact = describe(url)
    monkeypatch.setattr("mpistream.info._MAX_COUNTED", 100)
    monkeypatch.setattr("mpistream.info._N_SAMPLED", 80)
    facts = describe(url)
    assert (exact["is_exact"], facts["is_exact"], describe(url, count_all=True)["is_exact"]) == (True, False, True)
    assert (facts["n_files"], facts["arrays"][1]["n_objects"]) == (exact["n_files"], 2 * 60)
    assert facts["nbytes_on_disk"] == pytest.approx(exact["nbytes_on_disk"], rel=0.1)
    others = [
        {k: v for k, v in f.items() if k not in ("is_exact", "nbytes_on_disk", "ratio", "arrays")}
        for f in (facts, exact)
    ]
    assert others[0] == others[1]


def test_describe_tells_what_a_resume_keeps_aside(tmp_path: Path) -> None:
    """Dropped records are named until the first commit; their bytes count as on disk, not as values."""
    url = make_store(tmp_path / "run.zarr", make_schema())
    w = ms.write_resume(url, at=15.0)
    facts = describe(url)
    w.close()
    assert (facts["n_records"], facts["last_t"], facts["epoch"]) == (2, 12.0, 2)
    assert (facts["n_dropped"], facts["dropped"]) == (4, [{"epoch": 2, "start": 2, "stop": 6}])
    assert facts["arrays"][1]["nbytes"] == 2 * 7 * 5 * 4


def test_describe_of_a_store_without_records(tmp_path: Path) -> None:
    url = make_store(tmp_path / "run.zarr", make_schema(), n_records=0)
    facts = describe(url)
    assert (facts["n_records"], facts["last_t"], facts["last_date"]) == (0, None, None)


def test_describe_takes_a_local_folder_only(tmp_path: Path) -> None:
    from mpistream.memory_store import MemoryStore

    with pytest.raises(ms.StoreError, match="only a local folder can be described"):
        describe(MemoryStore())  # type: ignore[arg-type]


def test_describe_reads_no_chunk(tmp_path: Path) -> None:
    """A shard that was cut is seen in its size alone, a time chunk that is gone not at all."""
    url = make_store(tmp_path / "run.zarr", make_schema())
    shard = url / "temperature/c/0/0/0"
    os.truncate(shard, shard.stat().st_size // 2)
    (url / "time/c/0").unlink()
    facts = describe(url)
    assert (facts["n_records"], facts["last_t"]) == (6, 60.0)
    assert facts["arrays"][1]["nbytes_on_disk"] == size_of(*files_below(url / "temperature" / "c"))


def test_describe_passes_over_what_vanishes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer renames files and removes folders while the sizes are taken."""
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/energy/c"):
            raise FileNotFoundError(2, "No such file or directory")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = {a["name"]: a["n_objects"] for a in describe(store)["arrays"]}
    assert (found["energy"], found["temperature"]) == (0, 4)


# Dates and codecs in a few words


@pytest.mark.parametrize(
    ("t", "units", "calendar", "expected"),
    [
        (0.0, "seconds since 2000-01-01", "proleptic_gregorian", "2000-01-01T00:00:00"),
        (90.5, "seconds since 2000-01-01T00:00:00Z", "standard", "2000-01-01T00:01:30.5"),
        (0.1, "days since 1970-1-1 6:30 UTC", "gregorian", "1970-01-01T08:54:00"),
        (0.29, "hours since 2000-01-01", "standard", "2000-01-01T00:17:24"),  # 0.29 * 3.6e9 is 1043999999.9999999
        (-36.0, "hours since 2000-03-01 00:00:00 +00:00", "STANDARD", "2000-02-28T12:00:00"),
        (1.0, "milliseconds since 0001-01-01", "proleptic_gregorian", "0001-01-01T00:00:00.001"),
        (250.0, "microseconds since 2000-01-01 23:59:59.5", "standard", "2000-01-01T23:59:59.50025"),
        # What numpy's calendar does not give: nothing rather than something wrong.
        (None, "seconds since 2000-01-01", "standard", None),
        (0.0, "days since 1582-10-14", "standard", None),
        (-1.0, "days since 1582-10-15", "standard", None),
        (0.0, "days since 2000-01-01", "noleap", None),
        (0.0, "months since 2000-01-01", "standard", None),
        (0.0, "days since 2000-02-30", "standard", None),
        (0.0, "hours since 2000-01-01 00:00 +05:30", "standard", None),
        (0.0, "fortnights", "standard", None),
        (1e300, "days since 2000-01-01", "standard", None),
    ],
)
def test_decode_time(t: float | None, units: str, calendar: str, expected: str | None) -> None:
    assert decode_time(t, units, calendar) == expected


@pytest.mark.parametrize("unit", ["days", "hours", "minutes", "seconds"])
@pytest.mark.parametrize("calendar", ["standard", "proleptic_gregorian"])
@pytest.mark.parametrize("t", [0.0, 1.0, 59.0, -1000.0, 36524.25, 1234.5])
def test_decode_time_agrees_with_xarray(t: float, unit: str, calendar: str) -> None:
    xarray = pytest.importorskip("xarray", reason="needs xarray")
    units = f"{unit} since 1900-03-01 18:30:00"
    encoded = xarray.Dataset({"time": ("time", [t], {"units": units, "calendar": calendar})})
    (date,) = xarray.decode_cf(encoded)["time"].values
    found = decode_time(t, units, calendar)
    assert found is not None
    assert np.datetime64(found, "us") == date


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ([{"name": "bytes", "configuration": {"endian": "little"}}], "none"),
        ([{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}], "big-endian + crc32c"),
        ([{"name": "bytes"}, {"name": "blosc", "configuration": BLOSC}], "blosc lz4-5 shuffle"),
        ([{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 5, "checksum": False}}], "zstd-5"),
        ([{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 9}}, {"name": "crc32c"}], "gzip-9 + crc32c"),
    ],
)
def test_short_chain(chain: list[dict[str, Any]], expected: str) -> None:
    assert short_chain(chain) == expected


def test_strings_are_described(tmp_path: Path) -> None:
    """By their names in the schema; only values tell the size of those of any length, so these don't count."""
    schema = ms.StreamSchema(
        dims={"time": None, "k": 3},
        time=ms.AppendTime(units="s"),
        variables={"n": ms.Variable(("time",), "int32")},
        coords={
            "any": ms.Coordinate(("k",), ["a", "b", "c"], dtype=str),
            "fixed": ms.Coordinate(("k",), ["a", "bc", ""]),
        },
    )
    ms.write_open(tmp_path / "run.zarr", schema, options=ms.Options(durability="none", threads=0)).close()
    arrays = {a["name"]: a for a in describe(tmp_path / "run.zarr")["arrays"]}
    found = {n: tuple(arrays[n][k] for k in ("dtype", "nbytes", "n_objects")) for n in ("any", "fixed")}
    assert found == {"any": ("string", 0, 1), "fixed": ("U2", 24, 1)}
    assert arrays["any"]["ratio"] is None

"""Times, odd fill values and rounded floats, as plain readers, xarray and our own reader see them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from tests.support.plain import DTYPES, QUICK, READERS, any_bits, append_schema, differing, open_xarray

UNITS = ("D", "h", "m", "s", "ms", "us", "ns")
TIMES = (*(f"datetime64[{u}]" for u in UNITS), *(f"timedelta64[{u}]" for u in UNITS))
NAT = -(2**63)
NY, NX, N_RECORDS = 5, 3, 5


def name_of(dtype: str) -> str:
    return dtype.replace("[", "_").rstrip("]")


def is_timed(name: str) -> bool:
    """Return whether an array of `write_times` holds times."""
    return name.startswith(("datetime64", "timedelta64", "s_", "c_", "n_"))


def times_of(dtype: str, shape: tuple[int, ...], *key: int) -> NDArray[Any]:
    """Values around zero that every unit of xarray has room for, some of them NaT, none where ``key`` has 2."""
    rng = np.random.default_rng([len(dtype), *key])
    values = rng.integers(-(10**4), 10**4, shape, np.int64)
    values[rng.random(shape) < 0.3] = NAT
    if key[0] == 2:
        values[...] = NAT
    return values.view(dtype)


def write_times(path: Path) -> dict[str, NDArray[Any]]:
    """Write variables, a series, statics and coordinates of all times; return what must be in the store."""
    expected = {
        **{name_of(d): np.stack([times_of(d, (NY, NX), i) for i in range(N_RECORDS)]) for d in TIMES},
        "n_launch": times_of("datetime64[ns]", (N_RECORDS,), 7),
        **{f"s_{name_of(d)}": times_of(d, (NY, NX), 8) for d in ("datetime64[s]", "timedelta64[ns]")},
        "s_start": np.array("2000-01-01", "datetime64[D]"),
        "c_season": times_of("datetime64[us]", (NY,), 9),
        "c_lag": times_of("timedelta64[s]", (NY, NX), 10),
    }
    schema = append_schema(
        {"y": NY, "x": NX},
        {
            **{name_of(d): ms.Variable(("time", "y", "x"), d) for d in TIMES},
            "n_launch": ms.Variable(("time",), ">M8[ns]"),
        },
        statics={
            **{f"s_{name_of(d)}": ms.Variable(("y", "x"), d) for d in ("datetime64[s]", "timedelta64[ns]")},
            "s_start": ms.Variable((), "datetime64[D]", fill_value=np.datetime64("1970-01-01")),
        },
        coords={
            "c_season": ms.Coordinate(("y",), expected["c_season"].astype(">M8[us]")),
            "c_lag": ms.Coordinate(("y", "x"), None, dtype="m8[s]"),
        },
        # Rows of four records, two in an inner chunk: what is committed amid them is encoded anew.
        shard_shape={"time": 4, "y": 4, "x": 3},
        chunk_shape={"time": 2, "y": 2, "x": 3},
    )
    with ms.write_open(path, schema, options=QUICK) as writer:
        for name in (*schema.statics, "c_lag"):
            writer.write_static(name, expected[name])
        for i in range(N_RECORDS):
            record = {name: expected[name][i] for name in schema.variables}
            # Big-endian, and with strides of its own.
            record["datetime64_ns"] = np.asfortranarray(record["datetime64_ns"].astype(">M8[ns]"))
            writer.write_record(float(i), record)
            if i in (0, 3):
                writer.commit()
    return expected


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, NDArray[Any]]]:
    path = tmp_path_factory.mktemp("times") / "run.zarr"
    return path, write_times(path)


@pytest.mark.parametrize("reader", READERS)
def test_times_are_integers_for_plain_readers(times: Any, reader: str) -> None:
    """Bit by bit the int64 that numpy has, the least one for NaT."""
    path, expected = times
    found = READERS[reader](path, list(expected)) if not reader.startswith("xarray") else undecoded(path, reader)
    assert differing(found, {name: values.view("int64") for name, values in expected.items()}) == []


def undecoded(path: Path, reader: str) -> dict[str, NDArray[Any]]:
    dataset = open_xarray(path, consolidated=reader == "xarray", decode_cf=False)
    return {name: dataset[name].values for name in dataset.variables if is_timed(str(name))}


def test_times_are_times_for_our_reader(times: Any) -> None:
    """With the dtype of the schema, whole and by region, after the schema came back from the manifest."""
    path, expected = times
    reader = ms.open_reader(path)
    found = {
        name: np.stack([reader.read_record(name, i) for i in range(N_RECORDS)])
        if reader.schema.arrays[name].has_time
        else reader.read_static(name)
        for name in reader.schema.arrays
    }
    assert differing(found, expected) == []
    part = reader.read_record("datetime64_D", 3, {"y": (3, 5), "x": (1, 2)})
    assert part.tobytes() == expected["datetime64_D"][3, 3:5, 1:2].tobytes()
    assert reader.schema.variables["datetime64_D"].dtype == "datetime64[D]"


@pytest.mark.parametrize("consolidated", [True, False], ids=["consolidated", "not consolidated"])
def test_xarray_decodes_times(times: Any, consolidated: bool) -> None:
    """With its defaults, without a warning: the same points in time and the same durations, NaT where NaT was."""
    path, expected = times
    dataset = open_xarray(path, consolidated=consolidated)
    for name, values in expected.items():
        found = dataset[name].values
        assert found.dtype.kind == values.dtype.kind, name
        np.testing.assert_array_equal(np.isnat(found), np.isnat(values), name)
        there = ~np.isnat(values)
        assert (found[there] == values[there]).all(), name
    assert {"c_season", "c_lag"} <= set(dataset.coords)
    with ms.open_reader(path) as reader:
        assert reader.to_xarray().identical(dataset)


def test_times_survive_a_resume(times: Any, tmp_path: Path) -> None:
    """A row with times that is filled in part goes on with the same bits."""
    import shutil

    path, expected = times
    path = shutil.copytree(path, tmp_path / "run.zarr")
    names = [name for name in expected if not name.startswith(("s_", "c_"))]
    with ms.write_resume(path, at=3.0, options=QUICK) as writer:
        writer.write_record(5.0, {name: expected[name][1] for name in names})
    reader = ms.open_reader(path)
    for name in names:
        found = np.stack([reader.read_record(name, i) for i in range(5)])
        assert found.tobytes() == expected[name][[0, 1, 2, 3, 1]].tobytes()


# ---- fill values -------------------------------------------------------------------------------------

FILLS = [
    *((d, v) for d in ("float16", "float32", "float64") for v in (math.nan, math.inf, -math.inf, -0.0, 0.0)),
    *((d, v) for d in ("float16", "float32", "float64") for v in (float(np.finfo(d).max), float(np.finfo(d).tiny))),
    *((d, complex(a, b)) for d in ("complex64", "complex128") for a, b in ((math.nan, -0.0), (-math.inf, math.nan))),
    *((d, f(np.iinfo(d))) for d in DTYPES if "int" in d for f in (lambda i: int(i.min), lambda i: int(i.max))),
    *(("bool", v) for v in (True, False)),
    *((d, np.dtype(d).type("NaT", "s")) for d in ("datetime64[s]", "timedelta64[s]")),
    *((d, np.dtype(d).type(v, "s")) for d in ("datetime64[s]", "timedelta64[s]") for v in (0, 2**63 - 1, 1 - 2**63)),
]


def bits_of(dtype: str, fill: Any) -> bytes:
    return np.array(fill, dtype).tobytes()


def test_fill_values_keep_their_bits_everywhere(tmp_path: Path) -> None:
    """In documents, in the manifest, in inner chunks that are left out and in those that are not."""
    path = tmp_path / "run.zarr"
    variables = {f"v{i}": ms.Variable(("time", "y"), d, fill_value=v) for i, (d, v) in enumerate(FILLS)}
    schema = append_schema({"y": 4}, variables, shard_shape={"y": 4}, chunk_shape={"y": 2})
    # The second inner chunk is not all fill.
    blocks: dict[str, NDArray[Any]] = {}
    for i, (dtype, fill) in enumerate(FILLS):
        blocks[f"v{i}"] = np.full(4, fill, dtype)
        blocks[f"v{i}"].view("u1")[-1] ^= 1
    with ms.write_open(path, schema, options=QUICK) as writer:
        writer.write_record(0.0, blocks)
    expected = {name: block[np.newaxis] for name, block in blocks.items()}
    plain = {n: v.view("int64") if v.dtype.kind in "mM" else v for n, v in expected.items()}
    for reader in ("zarr", "zarrs", "tensorstore"):
        assert (reader, differing(READERS[reader](path, list(plain)), plain)) == (reader, [])
    found = ms.open_reader(path)
    assert differing({n: found.read_record(n, 0)[np.newaxis] for n in blocks}, expected) == []
    for i, (dtype, fill) in enumerate(FILLS):
        assert found.schema.arrays[f"v{i}"].fill.tobytes() == bits_of(dtype, fill)
        shard = (path / f"v{i}" / "c" / "0" / "0").read_bytes()
        # The index's first entry: the inner chunk that is all fill is not there, the other one is (section 6).
        assert (shard[-36:-20] == b"\xff" * 16, shard[-20:-4] == b"\xff" * 16) == (True, False)


def test_a_nan_with_payload_is_data(tmp_path: Path) -> None:
    """NaNs of other bits than the fill value's keep them, in each reader, though the fill value is NaN."""
    path = tmp_path / "run.zarr"
    odd = {
        "float16": np.array([0x7E01, 0xFE00], "u2").view("f2"),
        "float32": np.array([0x7FC00123, 0xFFC00000], "u4").view("f4"),
        "float64": np.array([0x7FF8000000000ABC, 0xFFF8000000000000], "u8").view("f8"),
        "complex64": np.array([0x7FC00123, 0, 0x80000000, 0xFFC00000], "u4").view("c8"),
    }
    variables = {d: ms.Variable(("time", "y"), d, fill_value=math.nan) for d in odd}
    with ms.write_open(path, append_schema({"y": 2}, variables), options=QUICK) as writer:
        writer.write_record(0.0, odd)
    expected = {d: v[np.newaxis] for d, v in odd.items()}
    for reader in ("zarr", "zarrs", "tensorstore", "xarray"):
        assert (reader, differing(READERS[reader](path, list(odd)), expected)) == (reader, [])


@pytest.mark.parametrize("dtype", [*DTYPES, "datetime64[s]", "timedelta64[ns]"])
def test_big_endian_input(tmp_path: Path, dtype: str) -> None:
    """As variable, static, coordinate and fill value: what is stored is the value, not the bytes."""
    swapped = np.dtype(dtype).newbyteorder(">")
    values = np.arange(12).reshape(3, 4).astype("i1").astype("i8").astype(dtype)
    schema = append_schema(
        {"y": 3, "x": 4},
        {"v": ms.Variable(("time", "y", "x"), swapped, fill_value=values[0, 1].astype(swapped))},
        statics={"s": ms.Variable(("y", "x"), swapped)},
        coords={"c": ms.Coordinate(("y", "x"), values.astype(swapped))},
    )
    path = tmp_path / "run.zarr"
    with ms.write_open(path, schema, options=QUICK) as writer:
        writer.write_static("s", values.astype(swapped))
        writer.write_record(0.0, {"v": values.astype(swapped)})
    reader = ms.open_reader(path)
    assert reader.schema.arrays["v"].fill.tobytes() == values[0, 1].tobytes()
    expected = {"v": values, "s": values, "c": values}
    found = {"v": reader.read_record("v", 0), "s": reader.read_static("s"), "c": reader.read_static("c")}
    assert differing(found, expected) == []


# ---- rounding ----------------------------------------------------------------------------------------


def rounded(values: NDArray[Any], keep_bits: int) -> NDArray[Any]:
    """numcodecs' filter, which is an implementation of the same algorithm; it spoils NaN, so NaN is put back."""
    from numcodecs import BitRound

    found = np.asarray(BitRound(keep_bits).encode(values.copy())).view(values.dtype).reshape(values.shape)
    return np.where(np.isnan(values), values, found)


@pytest.mark.parametrize("codec", ["fast", "none"])
@pytest.mark.parametrize("inner_time", [1, 2, 4])
def test_rounded_floats(tmp_path: Path, inner_time: int, codec: str) -> None:
    """Variables, series and statics, through rows that grow and a resume amid an inner chunk."""
    path = tmp_path / "run.zarr"
    bits = {"float16": 4, "float32": 7, "float64": 23}
    given = {d: any_bits(d, (6, NY, NX), 1) for d in bits}
    series, static, scalar = any_bits("float32", (6,), 2), any_bits("float32", (NY, NX), 3), np.float32(math.pi)
    kept = {name: values.copy() for name, values in given.items()}
    schema = append_schema(
        {"y": NY, "x": NX},
        {
            **{d: ms.Variable(("time", "y", "x"), d, keep_bits=b) for d, b in bits.items()},
            "series": ms.Variable(("time",), "float32", keep_bits=5),
        },
        statics={
            "static": ms.Variable(("y", "x"), "float32", keep_bits=3, fill_value=0.1),
            "scalar": ms.Variable((), "float32", keep_bits=2),
        },
        shard_shape={"time": 4, "y": 4, "x": 3},
        chunk_shape={"time": inner_time, "y": 2, "x": 3},
        codec=codec,
    )
    static[0, 0] = 0.1
    writer = ms.write_open(path, schema, options=QUICK)
    writer.write_static("static", static)
    writer.write_static("scalar", scalar)
    for i in range(6):
        if i == 3:
            writer.close()
            writer = ms.write_resume(path, schema=schema, options=QUICK)
        writer.write_record(float(i), {**{d: given[d][i] for d in bits}, "series": series[i]})
        writer.commit()
    writer.close()
    assert differing(given, kept) == []
    expected = {d: rounded(given[d], b) for d, b in bits.items()}
    expected["series"], expected["static"] = rounded(series, 5), rounded(static, 3)
    expected["static"][0, 0] = 0.1
    # pi is 0x1.921fb6p+1; two bits behind the point leave 0x1.8p+1.
    expected["scalar"] = np.array(3.0, "float32")
    for reader in ("zarr", "zarrs", "tensorstore", "xarray"):
        assert (reader, differing(READERS[reader](path, list(expected)), expected)) == (reader, [])
    assert ms.open_reader(path).schema.fingerprint() == ms.read_output_manifest(path)["fingerprint"]


def test_rounding_is_recorded_as_cf_says(tmp_path: Path) -> None:
    """CF conventions, section 8.4: a quantization variable, and two attributes of each variable that is rounded."""
    path = tmp_path / "run.zarr"
    variables = {
        "u": ms.Variable(("time", "y"), "float32", attrs={"units": "m s-1"}, keep_bits=9),
        "v": ms.Variable(("time", "y"), "float32"),
    }
    with ms.write_open(path, append_schema({"y": 4}, variables), options=QUICK) as writer:
        writer.write_record(0.0, {"u": np.zeros(4, "float32"), "v": np.zeros(4, "float32")})
    for consolidated in (True, False):
        dataset = open_xarray(path, consolidated=consolidated)
        assert dataset["u"].attrs == {"units": "m s-1", "quantization": "quantization_info", "quantization_nsb": 9}
        assert dataset["v"].attrs == {}
        container = dataset["quantization_info"]
        assert (container.shape, container.attrs["algorithm"]) == ((), "bitround")
        assert container.attrs["implementation"].startswith("mpistream version")
    codecs = json.loads((path / "u" / "zarr.json").read_text())["codecs"][0]["configuration"]["codecs"]
    assert codecs[1]["configuration"]["shuffle"] == "bitshuffle"


def test_rounding_makes_stores_smaller(tmp_path: Path) -> None:
    """Seven bits of noise take less than half of the space of 23."""
    sizes = {}
    noise = np.random.default_rng(1).standard_normal((64, 64)).astype("float32")
    for bits in (None, 7):
        path = tmp_path / f"{bits}.zarr"
        schema = append_schema({"y": 64, "x": 64}, {"u": ms.Variable(("time", "y", "x"), "float32", keep_bits=bits)})
        with ms.write_open(path, schema, options=QUICK) as writer:
            writer.write_record(0.0, {"u": noise})
        sizes[bits] = (path / "u" / "c" / "0" / "0" / "0").stat().st_size
    assert sizes[7] < sizes[None] / 2


# ---- times of records --------------------------------------------------------------------------------


def test_records_at_dates(tmp_path: Path) -> None:
    """Times of records may be dates, in write_record, write_record_at, and at= and expect_last_t= of a resume."""
    import datetime as dt

    path = tmp_path / "append.zarr"
    schema = append_schema({"y": 2}, {"u": ms.Variable(("time", "y"), "float64")}, units="days since 2000-01-01")
    block = {"u": np.zeros(2)}
    with ms.write_open(path, schema, options=QUICK) as writer:
        writer.write_record(np.datetime64("2000-01-01T00:20"), block)
        writer.write_record(dt.datetime(2000, 1, 1, 6), block)
        with writer.record(dt.datetime(2000, 1, 1, 14, tzinfo=dt.timezone(dt.timedelta(hours=2)))) as record:
            record.put("u", block["u"])
        writer.write_record(0.75, block)
        with pytest.raises(ms.SchemaError, match=r"t = 0\.5 does not come after the last record's 0\.75"):
            writer.write_record(dt.datetime(2000, 1, 1, 12), block)
    assert ms.open_reader(path).times.tolist() == [1 / 72, 0.25, 0.5, 0.75]
    found = open_xarray(path)["time"].values
    assert (
        found.tolist()
        == np.array(["2000-01-01T00:20", *(f"2000-01-01T{h}" for h in ("06", "12", "18"))], "M8[ns]").tolist()
    )
    with ms.write_resume(path, at=np.datetime64("2000-01-01T13"), options=QUICK) as writer:
        assert writer.resumed is not None
        assert (writer.resumed.at, writer.resumed.n_dropped, writer.last_t) == (13 / 24, 1, 0.5)
    with pytest.raises(ms.ResumeError, match=r"the last record that is kept has t = 0\.5, expected was 0\.75"):
        ms.write_resume(path, expect_last_t=dt.datetime(2000, 1, 1, 18), options=QUICK)
    ms.write_resume(path, expect_last_t=np.datetime64("2000-01-01T12"), options=QUICK).close()
    for bad in (np.datetime64("NaT", "s"), "2000-01-01"):
        with pytest.raises(ms.SchemaError):
            ms.write_resume(path, at=bad, options=QUICK)  # type: ignore[arg-type]


def test_fixed_times_at_dates(tmp_path: Path) -> None:
    """A record's date has the bits of its fixed time, however either was given; another date is refused."""
    path = tmp_path / "indexed.zarr"
    dates = np.datetime64("2000-01-01", "m") + np.arange(72) * np.timedelta64(20, "m")
    schema = ms.StreamSchema(
        dims={"time": None, "y": 2},
        time=ms.IndexedTime(dates, units="days since 1970-01-01"),
        variables={"u": ms.Variable(("time", "y"), "float64")},
    )
    with ms.write_open(path, schema, options=QUICK) as writer:
        for i, t in (
            (5, dates[5]),
            (70, dates[70].astype("M8[ns]")),
            (2, dates[2].item()),
            (3, writer.reader.times[3]),
        ):
            writer.write_record_at(i, t, {"u": np.zeros(2)})
        with pytest.raises(ms.SchemaError, match="at index 6, the schema's time is"):
            writer.write_record_at(6, dates[5], {"u": np.zeros(2)})
    assert ms.open_reader(path).committed == ((2, 4), (5, 6), (70, 71))


def test_records_at_dates_of_another_calendar(tmp_path: Path) -> None:
    """cftime's objects, with the schema's calendar; xarray gives them back."""
    cftime = pytest.importorskip("cftime", reason="needs cftime")
    path = tmp_path / "run.zarr"
    schema = ms.StreamSchema(
        dims={"time": None, "y": 2},
        time=ms.AppendTime(units="days since 2000-01-01", calendar="360_day"),
        variables={"u": ms.Variable(("time", "y"), "float64")},
    )
    dates = [cftime.datetime(2000, 2, 30, 12, calendar="360_day"), cftime.datetime(2001, 1, 1, calendar="360_day")]
    with ms.write_open(path, schema, options=QUICK) as writer:
        for t in dates:
            writer.write_record(t, {"u": np.zeros(2)})
        with pytest.raises(ms.SchemaError, match=r"give it as cftime\.datetime\(\.\.\., calendar='360_day'\)"):
            writer.write_record(np.datetime64("2002-01-01"), {"u": np.zeros(2)})
    assert ms.open_reader(path).times.tolist() == [59.5, 360.0]
    assert open_xarray(path)["time"].values.tolist() == dates
    with ms.write_resume(path, at=dates[0], options=QUICK) as writer:
        assert writer.last_t == 59.5

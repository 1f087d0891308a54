"""What plain readers make of coordinates of every kind: strings, bounds, scalars, and of missing values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.plain import DTYPES, QUICK, READERS, append_schema, differing, open_xarray

WORDS = ["", "bé", "x\0", "𝄞", "long" * 300]
NAMES = ["", "bé", "x\0y", "𝄞", "long" * 300]
STRINGS = ("any", "any_scalar", "any_static", "any_grid")
FIXED = ("fixed", "fixed_scalar", "fixed_static")
EITHER_WAY = pytest.mark.parametrize("consolidated", [True, False], ids=["consolidated", "not consolidated"])


def write_strings(path: Path, **more: Any) -> dict[str, Any]:
    """Write a store with strings of both kinds in all places where they may be; return what is in it."""
    schema = append_schema(
        {"member": 5, "y": 2, "k": 3},
        {"u": ms.Variable(("time", "member", "y"), "float32")},
        coords={
            "member": ms.Coordinate(("member",), list("abcde")),
            "any": ms.Coordinate(("member",), WORDS, dtype=str),
            "any_scalar": ms.Coordinate((), "a\0b", dtype=str),
            "any_grid": ms.Coordinate(("y", "member"), np.array([WORDS, WORDS[::-1]], object)),
            "fixed": ms.Coordinate(("member",), np.array(NAMES, ">U1200")),
            "fixed_scalar": ms.Coordinate((), "historical"),
        },
        statics={
            "any_static": ms.Variable(("k",), np.dtypes.StringDType(), attrs={"long_name": "labels"}),
            "fixed_static": ms.Variable((), "U8"),
            "later": ms.Variable(("k",), str, fill_value="?"),
        },
        **more,
    )
    with ms.write_open(path, schema, options=QUICK) as writer:
        writer.write_static("any_static", ["one", "", "drei"])
        writer.write_static("fixed_static", "sí")
        writer.write_record(0.0, {"u": np.arange(10, dtype="float32").reshape(5, 2)})
    return {
        "member": list("abcde"),
        "any": WORDS,
        "any_scalar": "a\0b",
        "any_static": ["one", "", "drei"],
        "any_grid": [WORDS, WORDS[::-1]],
        "fixed": NAMES,
        "fixed_scalar": "historical",
        "fixed_static": "sí",
    }


@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize(
    "codec", ["fast", "wasm", "none", [{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}]]
)
def test_strings_come_back_in_every_reader(tmp_path: Path, codec: Any, separator: str) -> None:
    """Empty, long, non-ASCII, with NUL; of any length in all that know the data type, of fixed length in Python's."""
    path = tmp_path / "run.zarr"
    expected = write_strings(path, codec=codec, key_separator=separator)
    for reader in ("zarr", "zarrs", "xarray", "xarray not consolidated"):
        names = (*STRINGS, "u") if reader == "zarrs" else (*STRINGS, *FIXED, "member", "u")
        found = dict(READERS[reader](path, names))
        assert found.pop("u").tolist() == [np.arange(10).reshape(5, 2).tolist()]
        assert {name: values.tolist() for name, values in found.items()} == {n: expected[n] for n in found}, reader
        assert {found[n].dtype for n in STRINGS if found[n].ndim} == {np.dtypes.StringDType()}
        if "fixed" in found:
            assert [found[n].dtype.str for n in ("fixed", "member")] == ["<U1200", "<U1"]
    ours = ms.open_reader(path)
    assert {name: ours.read_static(name).tolist() for name in expected} == expected
    assert [ours.read_static(n).dtype for n in ("any", "fixed")] == [np.dtypes.StringDType(), np.dtype("U1200")]
    assert ours.read_static("any_grid", {"y": (1, 2), "member": (0, 2)}).tolist() == [WORDS[:-3:-1]]


@EITHER_WAY
def test_xarray_selects_by_name(tmp_path: Path, consolidated: bool) -> None:
    """A string coordinate is an index; other ones, and scalar ones, come along with the variable."""
    path = tmp_path / "run.zarr"
    write_strings(path)
    for dataset in (open_xarray(path, consolidated=consolidated), ms.open_reader(path).to_xarray()):
        assert dataset["u"].sel(member="c").values.tolist() == [[4, 5]]
        assert dataset["u"].sel(member=["e", "a"]).values.tolist() == [[[8, 9], [0, 1]]]
        assert set(dataset["u"].coords) == {"time", "member", *STRINGS, *FIXED} - {"any_static", "fixed_static"}
        assert dataset.swap_dims(member="any")["u"].sel(any="bé").values.tolist() == [[2, 3]]
        assert dataset["u"].coords["fixed_scalar"].item() == "historical"
        assert dataset["any_static"].attrs["long_name"] == "labels"
        # Not committed: what it reads as is what it was described with.
        assert dataset["later"].values.tolist() == ["?"] * 3
    with pytest.raises(ms.SchemaError, match="static 'later' is not committed"):
        ms.open_reader(path).read_static("later")


def test_documents_of_strings_are_those_of_their_specifications(tmp_path: Path) -> None:
    """Data types ``string`` and ``fixed_length_utf32``, as they are registered with Zarr."""
    import json

    path = tmp_path / "run.zarr"
    write_strings(path)
    documents = {n: json.loads((path / n / "zarr.json").read_text()) for n in ("any", "fixed", "later")}
    assert (documents["any"]["data_type"], documents["any"]["fill_value"]) == ("string", "")
    assert documents["any"]["codecs"][0]["name"] == "vlen-utf8"
    assert documents["later"]["fill_value"] == "?"
    assert documents["fixed"]["data_type"] == {"name": "fixed_length_utf32", "configuration": {"length_bytes": 4800}}
    assert documents["fixed"]["codecs"][0] == {"name": "bytes", "configuration": {"endian": "little"}}


# ---- bounds ------------------------------------------------------------------------------------------


def write_bounds(path: Path, **more: Any) -> None:
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4, "x": 3, "nv": 2, "corner": 4},
        time=ms.AppendTime(units="days since 2000-01-01", attrs={"bounds": "time_bnds"}),
        variables={
            "u": ms.Variable(("time", "y", "x"), "float32"),
            "time_bnds": ms.Variable(("time", "nv"), "float64"),
        },
        coords={
            "y": ms.Coordinate(("y",), [0.5, 1.5, 2.5, 3.5], attrs={"bounds": "y_bnds"}),
            "y_bnds": ms.Coordinate(("y", "nv"), [[i, i + 1.0] for i in range(4)]),
            "lat": ms.Coordinate(("y", "x"), None, dtype="float64", attrs={"bounds": "lat_bnds"}),
            "height": ms.Coordinate((), 2.0, attrs={"units": "m"}),
        },
        statics={"lat_bnds": ms.Variable(("y", "x", "corner"), "float64")},
        **more,
    )
    with ms.write_open(path, schema, options=QUICK) as writer:
        assert dict(writer.region) == {"y": (0, 4), "x": (0, 3)}
        writer.write_static("lat", np.full((4, 3), 50.0))
        writer.write_static("lat_bnds", np.arange(48.0).reshape(4, 3, 4))
        for i in range(3):
            writer.write_record(i + 0.5, {"u": np.zeros((4, 3), "float32"), "time_bnds": [float(i), i + 1.0]})


def write_more(path: Path, start: int) -> None:
    with ms.write_resume(path, at=start - 0.5, options=QUICK) as writer:
        for i in range(start, start + 3):
            writer.write_record(i + 0.5, {"u": np.zeros((4, 3), "float32"), "time_bnds": [float(i), i + 1.0]})


@EITHER_WAY
def test_bounds_are_found_by_their_coordinates(tmp_path: Path, consolidated: bool) -> None:
    """Those of time are dates like it, and touch across a restart; all are coordinates for who asks (P-57)."""
    path = tmp_path / "run.zarr"
    write_bounds(path, shard_shape={"time": 4})
    write_more(path, 2)
    dataset = open_xarray(path, consolidated=consolidated)
    days = np.datetime64("2000-01-01", "ns") + np.arange(6) * np.timedelta64(1, "D")
    assert dataset["time"].attrs["bounds"] == "time_bnds"
    assert dataset["time_bnds"].values.tolist() == np.stack([days[:-1], days[1:]], axis=1).tolist()
    assert dataset["time"].values.tolist() == (days[:-1] + np.timedelta64(12, "h")).tolist()
    assert dataset["y"].attrs["bounds"] == "y_bnds"
    assert dataset["y_bnds"].values.tolist() == [[i, i + 1] for i in range(4)]
    assert set(dataset["u"].coords) == {"time", "y", "lat", "height"}
    assert "coordinates" not in dataset["time_bnds"].encoding
    decoded = open_xarray(path, consolidated=consolidated, decode_coords="all")
    assert set(decoded.coords) == {"time", "y", "lat", "height", "time_bnds", "y_bnds", "lat_bnds"}
    assert decoded["lat_bnds"].values.tolist() == np.arange(48.0).reshape(4, 3, 4).tolist()


@EITHER_WAY
def test_bounds_of_time_are_dates_as_they_are_given(tmp_path: Path, consolidated: bool) -> None:
    """Bounds of dtype datetime64 beside time as numbers in the same units: xarray decodes both to the same dates."""
    path = tmp_path / "run.zarr"
    schema = ms.StreamSchema(
        dims={"time": None, "nv": 2},
        time=ms.AppendTime(units="seconds since 1970-01-01", attrs={"bounds": "time_bnds"}),
        variables={"time_bnds": ms.Variable(("time", "nv"), "datetime64[s]")},
    )
    edges = np.datetime64("2000-01-01", "s") + np.arange(4) * np.timedelta64(1, "h")
    with ms.write_open(path, schema, options=QUICK) as writer:
        for i in range(3):
            writer.write_record(edges[i], {"time_bnds": edges[i : i + 2]})
    dataset = open_xarray(path, consolidated=consolidated)
    assert dataset["time"].values.astype("datetime64[s]").tolist() == edges[:3].tolist()
    found = dataset["time_bnds"].values.astype("datetime64[s]")
    assert found.tolist() == np.stack([edges[:-1], edges[1:]], axis=1).tolist()


# ---- missing values ----------------------------------------------------------------------------------

MISSING: dict[str, Any] = {"b": True, "i": -7, "u": 250, "f": -1e4, "c": 3 - 2j}


@EITHER_WAY
def test_zeros_are_zeros_where_something_else_is_missing(tmp_path: Path, consolidated: bool) -> None:
    """With ``_FillValue`` only its own cells are masked, in every dtype; zeros are zeros."""
    path = tmp_path / "run.zarr"
    missing = {dtype: MISSING[np.dtype(dtype).kind] for dtype in DTYPES}
    variables = {d: ms.Variable(("time", "y"), d, attrs={"_FillValue": missing[d]}) for d in DTYPES}
    variables["nan"] = ms.Variable(("time", "y"), "float32", attrs={"_FillValue": math.nan})
    with ms.write_open(path, append_schema({"y": 3}, variables), options=QUICK) as writer:
        blocks = {d: np.array([0, 0, missing[d]]).astype(d) for d in DTYPES}
        writer.write_record(0.0, {**blocks, "nan": np.array([0, 1, math.nan], "float32")})
    dataset = open_xarray(path, consolidated=consolidated)
    for name in (*DTYPES, "nan"):
        values = dataset[name].values[0]
        assert values[0] == 0, name
        assert [bool(v) for v in dataset[name].isnull().values[0]] == [False, False, True], name
    raw = open_xarray(path, consolidated=consolidated, mask_and_scale=False)
    assert differing({d: raw[d].values[0] for d in DTYPES}, blocks) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_nobody_wrote_reads_as_the_fill_value(tmp_path: Path, dtype: str) -> None:
    """Uncommitted records: the fill value as it is, or missing where ``_FillValue`` says so."""
    path = tmp_path / "run.zarr"
    kind = np.dtype(dtype).kind
    schema = ms.StreamSchema(
        dims={"time": None, "y": 2},
        time=ms.IndexedTime([0.0, 1.0, 2.0], units="days since 2000-01-01"),
        variables={
            "plain": ms.Variable(("time", "y"), dtype),
            "filled": ms.Variable(("time", "y"), dtype, fill_value=1),
            "masked": ms.Variable(("time", "y"), dtype, attrs={"_FillValue": MISSING[kind]}),
        },
    )
    with ms.write_open(path, schema, options=QUICK) as writer:
        writer.write_record_at(1, 1.0, dict.fromkeys(("plain", "filled", "masked"), np.zeros(2, dtype)))
    dataset = open_xarray(path)
    assert dataset["committed"].values.tolist() == [False, True, False]
    expected = np.full((3, 2), math.nan if kind == "f" else 0, dtype)
    expected[1] = 0
    np.testing.assert_array_equal(dataset["plain"].values, expected, strict=True)
    expected[[0, 2]] = 1
    np.testing.assert_array_equal(dataset["filled"].values, expected, strict=True)
    assert dataset["masked"].isnull().values.tolist() == [[True] * 2, [False] * 2, [True] * 2]
    assert (dataset["masked"].values[1] == 0).all()

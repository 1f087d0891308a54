"""Names and paths that are not plain ASCII words."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import mpistream as ms
from tests.support.plain import QUICK, READERS, append_schema, differing

NAMES = (
    "größe",
    "температура",
    "速度",
    "🌊",
    "e\u0301",  # decomposed: nothing may normalise it
    "two words",
    " space around ",
    "dot.ted",
    "100%41",
    "#1?*[x]&=+",
    "quote'\"`$HOME",
    "c",
    "n" * 200,
)


@pytest.mark.parametrize("separator", ["/", "."])
def test_names_of_variables_arrive_as_they_are(tmp_path: Path, separator: str) -> None:
    """Names in UTF-8 and with special characters are the names that every reader finds."""
    path = tmp_path / "run.zarr"
    schema = append_schema(
        {"höhe ➜": 3},
        {name: ms.Variable(("time", "höhe ➜"), "int32") for name in NAMES},
        coords={"höhe ➜": ms.Coordinate(("höhe ➜",), [1.0, 2.0, 3.0])},
        key_separator=separator,
        attrs={"título": "ñ"},
    )
    expected = {name: np.arange(6, dtype="int32").reshape(2, 3) + 10 * k for k, name in enumerate(NAMES)}
    with ms.write_open(path, schema, options=QUICK) as writer:
        for i in range(2):
            writer.write_record(float(i), {name: values[i] for name, values in expected.items()})
    found = {reader: differing(read(path, NAMES), expected) for reader, read in READERS.items()}
    assert found == {reader: [] for reader in READERS}
    reader = ms.open_reader(path)
    assert (
        differing({name: reader.read_record(name, 1) for name in NAMES}, {n: v[1] for n, v in expected.items()}) == []
    )
    assert set(os.listdir(path)) == {"zarr.json", ".mpistream", "time", "höhe ➜", *NAMES}


def round_trip(url: str | Path, path: Path) -> None:
    """Write at ``url`` and resume there; then the store must lie at ``path``."""
    schema = append_schema({"y": 3}, {"u": ms.Variable(("time", "y"), "float64")})
    values = np.arange(6.0).reshape(2, 3) / 7
    with ms.write_open(url, schema, options=QUICK) as writer:
        writer.write_record(0.0, {"u": values[0]})
    with ms.write_resume(url, options=QUICK) as writer:
        writer.write_record(1.0, {"u": values[1]})
    assert differing({"u": ms.read_record(url, "u", 1)}, {"u": values[1]}) == []
    expected = {"u": values, "time": np.array([0.0, 1.0])}
    found = {reader: differing(read(path, ["u", "time"]), expected) for reader, read in READERS.items()}
    assert found == {reader: [] for reader in READERS}


@pytest.mark.parametrize("name", ["with space", "größe ➜ 速度.zarr", "100%41 #?[a]", " -x ", "a'b\"c"])
def test_paths_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    """A path with spaces, Unicode or characters that mean something elsewhere is that path, as text and as Path."""
    for kind, above in ((str, tmp_path / "as text"), (Path, tmp_path / "as path")):
        path = above / name
        round_trip(kind(path), path)
        assert os.listdir(above) == [name]


def test_relative_path_is_that_of_the_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path goes on meaning the same folder when the process changes its directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    schema = append_schema({"y": 3}, {"u": ms.Variable(("time", "y"), "float64")})
    with ms.write_open("run.zarr", schema, options=QUICK) as writer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.write_record(0.0, {"u": 1.0})
    assert os.listdir(tmp_path / "elsewhere") == []
    assert ms.read_record(tmp_path / "run.zarr", "u", 0).tolist() == [1.0, 1.0, 1.0]


def test_file_url(tmp_path: Path) -> None:
    """A file:// URL names the folder behind it."""
    round_trip(f"file://{tmp_path}/run.zarr", tmp_path / "run.zarr")


def test_file_url_is_percent_decoded(tmp_path: Path) -> None:
    """What Path.as_uri() gives names that very path: RFC 8089 has spaces and Unicode percent-encoded."""
    path = tmp_path / "größe with space"
    round_trip(path.as_uri(), path)


@pytest.mark.parametrize(
    "url", ["s3://bucket/run.zarr", "https://host/run.zarr", "memory://run", "file://host/run.zarr"]
)
def test_other_urls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Another scheme, or a file on another host, is StoreError of kind scheme for writers and readers."""
    monkeypatch.chdir(tmp_path)
    schema = append_schema({"y": 3}, {"u": ms.Variable(("time", "y"), "float64")})
    for call in (lambda: ms.write_open(url, schema), lambda: ms.write_resume(url), lambda: ms.open_reader(url)):
        with pytest.raises(ms.StoreError) as caught:
            call()
        assert caught.value.kind == "scheme"
    assert os.listdir(tmp_path) == []

"""Options: what may be said, and where a site says it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from mpistream.errors import SchemaError
from mpistream.options import Options, resolve_options

SECONDS = ("timeout", "exit_timeout", "lease_ttl")


def test_the_defaults() -> None:
    """Durable, as many threads as there are cores for, ten minutes of patience."""
    assert Options().to_json() == {
        "durability": "fsync",
        "threads": None,
        "max_pending_nbytes": None,
        "writers": "auto",
        "rearrange": "auto",
        "timeout": 600.0,
        "exit_timeout": 30.0,
        "lease_ttl": 120.0,
        "progress": False,
    }
    assert Options(lease_ttl=1e9).lease_ttl == 1e9
    assert [Options(threads=n).threads for n in (0, 1, 7)] == [0, 1, 7]


def test_options_are_compared_over_ranks_as_json() -> None:
    """They are plain, and nobody changes them afterwards."""
    options = Options(durability="none", threads=0, max_pending_nbytes=2**40, timeout=1, progress=True, writers=3)
    assert Options(**json.loads(json.dumps(options.to_json()))) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.timeout = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"durability": "disk"}, "option durability 'disk': use 'fsync' or 'none'"),
        ({"durability": None}, "option durability None: use 'fsync' or 'none'"),
        *[
            ({"threads": v}, f"option threads {v!r}: use None or a number of threads, 0 or more")
            for v in (-1, "1", 1.0, True)
        ],
        ({"max_pending_nbytes": 0}, "option max_pending_nbytes 0: give a number of bytes above 0"),
        ({"max_pending_nbytes": -5}, "option max_pending_nbytes -5: give a number of bytes above 0"),
        ({"max_pending_nbytes": "5"}, "option max_pending_nbytes '5': give a number of bytes above 0"),
        ({"max_pending_nbytes": True}, "option max_pending_nbytes True: give a number of bytes above 0"),
        *[
            ({"writers": v}, f"option writers {v!r}: use 'all', 'node', 'auto' or a number above 0")
            for v in (0, -1, True, 2.0, "few", None)
        ],
        ({"rearrange": "always"}, "option rearrange 'always': use 'auto' or 'never'"),
        *[({n: v}, f"option {n} {v!r}: give seconds above 0") for n in SECONDS for v in (0, -1.0, math.nan, "1", True)],
        ({"lease_ttl": math.inf}, "option lease_ttl inf: give at most 1e+09 seconds"),
        ({"lease_ttl": 2e9}, "option lease_ttl 2000000000.0: give at most 1e+09 seconds"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(changes, message) -> None:
    """The option, its value and what may stand there."""
    with pytest.raises(SchemaError) as caught:
        Options(**changes)
    assert (str(caught.value), caught.value.kind) == (message, "option")


# ---- the site's file ---------------------------------------------------------------------------------


def site(path) -> dict[str, str]:
    return {"MPISTREAM_OPTIONS": str(path)}


def test_without_a_file_the_defaults_hold(monkeypatch) -> None:
    """An empty variable is none; the process's environment is looked at when none is given."""
    monkeypatch.delenv("MPISTREAM_OPTIONS", raising=False)
    assert resolve_options(None) == Options()
    assert resolve_options(None, {}) == Options()
    assert resolve_options(None, {"MPISTREAM_OPTIONS": ""}) == Options()


def test_a_site_tunes_without_touching_the_model(tmp_path, monkeypatch) -> None:
    """The TOML file that the environment names."""
    path = tmp_path / "options.toml"
    path.write_text('durability = "none"\nthreads = 0\ntimeout = 5\nprogress = true\n')
    expected = Options(durability="none", threads=0, timeout=5, progress=True)
    assert resolve_options(None, site(path)) == expected
    monkeypatch.setenv("MPISTREAM_OPTIONS", str(path))
    assert resolve_options(None) == expected


def test_options_of_the_call_win(tmp_path) -> None:
    """The file is not even read."""
    assert resolve_options(Options(timeout=7), site(tmp_path / "missing.toml")) == Options(timeout=7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"timeout = ", "Invalid value"),
        (b"\xff\xfe", "decode"),
        (b"time_out = 5\ndurable = true", r"unknown options \['durable', 'time_out'\]; known are \['durability', "),
    ],
)
def test_a_file_that_can_not_be_used_is_refused(tmp_path, content, message) -> None:
    """Variable, path and reason are in the message: not TOML, not text, an option that there is not."""
    path = tmp_path / "options.toml"
    path.write_bytes(content)
    with pytest.raises(SchemaError, match=message) as caught:
        resolve_options(None, site(path))
    assert str(caught.value).startswith(f"$MPISTREAM_OPTIONS = {path}: ")
    assert caught.value.kind == "option"


def test_a_wrong_value_in_the_file_is_refused(tmp_path) -> None:
    """As in a call."""
    path = tmp_path / "options.toml"
    path.write_text("lease_ttl = -1\n")
    with pytest.raises(SchemaError, match="option lease_ttl -1: give seconds above 0"):
        resolve_options(None, site(path))


def test_a_missing_file_and_a_folder_are_refused(tmp_path) -> None:
    """A path that was mistyped must not silently mean the defaults."""
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(SchemaError) as caught:
            resolve_options(None, site(path))
        assert str(caught.value).startswith(f"$MPISTREAM_OPTIONS = {path}: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('progress = "no"', "option progress 'no': use True or False"),
        ('timeout = "long"', "option timeout 'long': give seconds above 0"),
        ("timeout = ", "not valid TOML: Invalid value"),
    ],
)
def test_what_is_wrong_in_the_file_of_a_site_names_the_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(SchemaError) as caught:
        resolve_options(None, {"MPISTREAM_OPTIONS": str(path)})
    assert str(caught.value).startswith(f"$MPISTREAM_OPTIONS = {path}: {says}")

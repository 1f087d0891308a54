"""What ``write_open`` may take the place of, and what it leaves alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import mpistream as ms
from tests.support.plain import QUICK, append_schema, differing, open_xarray


def schema_of(*names: str) -> ms.StreamSchema:
    return append_schema(
        {"y": 4},
        {name: ms.Variable(("time", "y"), "float32") for name in names},
        statics={"topo": ms.Variable(("y",), "float32")},
    )


def write(path: Path, *names: str, n_records: int = 3, **more: Any) -> None:
    with ms.write_open(path, schema_of(*names), options=QUICK, **more) as writer:
        writer.write_static("topo", 1.0)
        for i in range(n_records):
            writer.write_record(float(i), dict.fromkeys(names, float(i)))
            writer.commit()


def tree(path: Path) -> dict[str, bytes | None]:
    """Return all files and folders below a path, with the files' bytes."""
    return {
        p.relative_to(path).as_posix(): p.read_bytes() if p.is_file() and not p.is_symlink() else None
        for p in sorted(path.rglob("*"))
    }


def outside(path: Path) -> set[str]:
    """Return the names of everything that is not below .mpistream."""
    return {name for name in tree(path) if not name.startswith(".mpistream/")}


def make_stream(path: Path) -> None:
    write(path, "old")


def make_group(path: Path) -> None:
    group = zarr.create_group(path, attributes={"title": "old"})
    group.create_array("a/b/old", shape=(8,), chunks=(4,), dtype="float32")[...] = 1
    group.create_array("u", shape=(8,), chunks=(4,), dtype="float32")[...] = 1


def make_array(path: Path) -> None:
    zarr.create_array(path, shape=(8,), chunks=(4,), dtype="float32")[...] = 1


def make_group_v2(path: Path) -> None:
    zarr.create_group(path, zarr_format=2)


def make_folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")


def make_folder_with_a_hidden_file(path: Path) -> None:
    path.mkdir()
    (path / ".bashrc").write_text("")


def make_folder_with_an_empty_folder(path: Path) -> None:
    (path / "data").mkdir(parents=True)


def move_in(path: Path, below: str) -> None:
    """Put a stream where none can be made."""
    made = path.with_name("made")
    write(made, "u")
    (path / below).parent.mkdir(parents=True, exist_ok=True)
    made.rename(path / below)


def make_group_with_a_stream_below(path: Path) -> None:
    zarr.create_group(path).create_group("exp")
    write(path / "exp" / "run.zarr", "u")


def make_group_with_a_stream_in_a_plain_folder(path: Path) -> None:
    zarr.create_group(path)
    move_in(path, "exp/2024/run.zarr")


def make_group_with_a_stream_in_a_hidden_folder(path: Path) -> None:
    zarr.create_group(path)
    move_in(path, ".old/run.zarr")


def make_group_with_a_stream_beside_an_array(path: Path) -> None:
    zarr.create_group(path).create_array("a", shape=(2,), dtype="int8")
    write(path / "run.zarr", "u")


def make_stream_with_a_stream_below(path: Path) -> None:
    write(path, "old")
    move_in(path, "nested")


def make_remains_with_a_stream_below(path: Path) -> None:
    make_remains(path)
    move_in(path, "nested")


def make_remains(path: Path) -> None:
    """What a creation leaves that died before the manifest."""
    write(path, "old")
    (path / ".mpistream" / "manifest.json").unlink()
    (path / "zarr.json").unlink()


def make_file(path: Path) -> None:
    path.write_bytes(b"CDF\x01")


def make_link_to_nowhere(path: Path) -> None:
    path.symlink_to("nowhere/at/all")


Make = Callable[[Path], None]


def refusal(path: Path, *, overwrite: bool) -> ms.StoreError:
    """Return the error of an opening; nothing may have changed."""
    before = tree(path.parent)
    with pytest.raises(ms.StoreError) as caught:
        ms.write_open(path, schema_of("u"), overwrite=overwrite, options=QUICK)
    assert tree(path.parent) == before
    assert str(caught.value).startswith(str(path))
    return caught.value


@pytest.mark.parametrize("make", [make_stream, make_group, make_array])
def test_what_exists_is_refused_without_overwrite(tmp_path: Path, make: Make) -> None:
    """A stream or a Zarr node is not replaced unless it is asked for; the message names the way out."""
    path = tmp_path / "run.zarr"
    make(path)
    error = refusal(path, overwrite=False)
    assert error.kind == "exists"
    assert "overwrite=True" in str(error)
    assert ("write_resume" in str(error)) is (make is make_stream)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (make_folder_with_a_file, "not_empty", r"'thesis\.tex'"),
        (make_folder_with_a_hidden_file, "not_empty", r"'\.bashrc'"),
        (make_folder_with_an_empty_folder, "not_empty", r"'data'"),
        (make_group_v2, "not_empty", r"other things"),
        (make_file, "not_a_folder", r"a folder"),
        (make_remains_with_a_stream_below, "exists", r"'nested'"),
    ],
)
def test_what_is_not_ours_is_refused_in_any_case(
    tmp_path: Path, make: Make, kind: str, message: str, overwrite: bool
) -> None:
    """A folder with other things, a file, and what holds another stream is refused, also with overwrite=True."""
    path = tmp_path / "run.zarr"
    make(path)
    error = refusal(path, overwrite=overwrite)
    assert error.kind == kind
    assert re.search(message, str(error)), str(error)


@pytest.mark.parametrize(
    ("make", "below"),
    [
        (make_group_with_a_stream_below, "exp/run.zarr"),
        (make_group_with_a_stream_in_a_plain_folder, "exp/2024/run.zarr"),
        (make_group_with_a_stream_in_a_hidden_folder, ".old/run.zarr"),
        (make_group_with_a_stream_beside_an_array, "run.zarr"),
        (make_stream_with_a_stream_below, "nested"),
    ],
)
def test_overwrite_spares_streams_below(tmp_path: Path, make: Make, below: str) -> None:
    """A group or stream below which another stream lies is not replaced, however deep that one lies."""
    path = tmp_path / "run.zarr"
    make(path)
    error = refusal(path, overwrite=True)
    assert error.kind == "exists"
    assert repr(below) in str(error)
    assert differing({"u": ms.read_record(path / below, "u", 2)}, {"u": np.full(4, 2.0, "float32")}) == []


def test_overwrite_refuses_a_zarr_array(tmp_path: Path) -> None:
    """A Zarr array is no store of streams, and is not replaced."""
    path = tmp_path / "run.zarr"
    make_array(path)
    error = refusal(path, overwrite=True)
    assert error.kind == "exists"
    assert "Zarr array, not a group" in str(error)


def expected_files(*names: str, n_records: int) -> set[str]:
    """Return what lies outside .mpistream in a new store with records, rows of 1 and one shard each."""
    found = {"zarr.json", ".mpistream", "topo/c/0", "time/c/0"}
    found |= {f"{name}/c/{i}/0" for name in names for i in range(n_records)}
    found |= {f"{name}/zarr.json" for name in (*names, "topo", "time")}
    return found | {parent.as_posix() for name in found for parent in Path(name).parents if parent != Path()}


@pytest.mark.parametrize("make", [make_stream, make_group])
def test_overwrite_replaces(tmp_path: Path, make: Make) -> None:
    """With overwrite=True a stream or a Zarr group is replaced: no content, attribute or record of it is left."""
    path = tmp_path / "run.zarr"
    make(path)
    write(path, "u", n_records=2, overwrite=True)
    assert outside(path) == expected_files("u", n_records=2)
    dataset = open_xarray(path)
    assert dataset.attrs == {}
    assert sorted(dataset.variables) == ["time", "topo", "u"]
    assert dataset["u"].values.tolist() == [[0.0] * 4, [1.0] * 4]
    assert os.listdir(tmp_path) == ["run.zarr"]


def test_overwritten_store_has_no_records_and_counts_its_epochs_on(tmp_path: Path) -> None:
    """A store that replaces one of ours begins with no record, another identity and the next epoch."""
    path = tmp_path / "run.zarr"
    make_stream(path)
    old = ms.read_output_manifest(path)
    with ms.write_open(path, schema_of("u", "v"), overwrite=True, options=QUICK) as writer:
        assert (writer.epoch, writer.n_records, writer.last_t, writer.is_committed("topo")) == (2, 0, None, False)
        assert open_xarray(path).sizes["time"] == 0
    new = ms.read_output_manifest(path)
    assert (old["epoch"], new["epoch"]) == (1, 2)
    assert (new["n_records"], new["statics"], new["commit_seq"]) == (0, [], 0)
    assert new["store_id"] != old["store_id"]
    assert sorted(os.listdir(path / ".mpistream" / "epochs")) == ["1", "2"]
    below = {name for name in os.listdir(path / ".mpistream") if name.startswith("layout")}
    assert below == {"layout-2.json"}
    with ms.write_open(path, schema_of("u"), overwrite=True, options=QUICK) as writer:
        assert writer.epoch == 3


def test_overwrite_in_use_is_refused(tmp_path: Path) -> None:
    """A store that a live writer holds is not replaced; with takeover it is, and that writer can't commit any more."""
    path = tmp_path / "run.zarr"
    first = ms.write_open(path, schema_of("u"), options=QUICK)
    with pytest.raises(ms.StoreError) as caught:
        ms.write_open(path, schema_of("u"), overwrite=True, options=QUICK)
    assert caught.value.kind == "lease"
    first.write_record(0.0, {"u": 1.0})
    first.commit()
    assert ms.read_record(path, "u", 0).tolist() == [1.0] * 4
    write(path, "u", n_records=1, overwrite=True, takeover=True)
    first.write_record(1.0, {"u": 2.0})
    with pytest.raises(ms.FencedError, match="epoch 2"):
        first.commit()
    with pytest.raises(ms.FencedError):
        first.close()
    assert ms.read_record(path, "u", -1).tolist() == [0.0] * 4
    assert outside(path) == expected_files("u", n_records=1)


@pytest.mark.parametrize("overwrite", [False, True])
def test_empty_folder_is_taken(tmp_path: Path, overwrite: bool) -> None:
    """A folder without anything in it, and one that is not there yet, need no overwrite."""
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "new" / "below"):
        write(path, "u", n_records=1, overwrite=overwrite)
        assert outside(path) == expected_files("u", n_records=1)


@pytest.mark.parametrize("overwrite", [False, True])
def test_store_that_was_never_created_whole_is_taken_over(tmp_path: Path, overwrite: bool) -> None:
    """A folder with .mpistream and no manifest counts as never created: write_open takes it, and epochs go on."""
    path = tmp_path / "run.zarr"
    make_remains(path)
    write(path, "u", n_records=2, overwrite=overwrite)
    assert outside(path) == expected_files("u", n_records=2)
    assert ms.read_output_manifest(path)["epoch"] == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_remains, "was never created whole"),
        (make_group, "is not a stream"),
        (make_folder_with_a_file, "is not a stream"),
        (make_file, "is a file"),
    ],
)
def test_resume_says_what_is_wrong(tmp_path: Path, make: Make, message: str) -> None:
    """write_resume refuses what is no whole store, says which of the two it is, and changes nothing."""
    path = tmp_path / "run.zarr"
    make(path)
    before = tree(tmp_path)
    with pytest.raises(ms.ResumeError, match=rf"^{path} {message}.*; .*use write_open") as caught:
        ms.write_resume(path, options=QUICK)
    assert caught.value.kind == "no_store"
    assert tree(tmp_path) == before


def test_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    """A dangling link is no place for a store: StoreError, and nothing is made behind it."""
    path = tmp_path / "run.zarr"
    make_link_to_nowhere(path)
    assert refusal(path, overwrite=True).kind == "not_a_folder"


def test_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    """A link to a folder stands for that folder, and stays a link when the store is replaced."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run.zarr").symlink_to("scratch")
    write(tmp_path / "run.zarr", "old")
    write(tmp_path / "run.zarr", "u", n_records=1, overwrite=True)
    assert (tmp_path / "run.zarr").is_symlink()
    assert outside(tmp_path / "scratch") == expected_files("u", n_records=1)

"""The checker: what it finds, where, and that it writes nothing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.checks import Checker, committed_rows
from mpistream.manifest import Manifest
from mpistream.memory_store import MemoryStore
from mpistream.verifying import Report
from tests.support.collective import tree
from tests.support.plain import QUICK
from tests.support.ranks import run_ranks
from tests.support.verified import assert_no_damage, assert_sound

N = 5

# Under the name of the module the package has the function.
MODULE = sys.modules["mpistream.verifying"]


def make_schema(*, indexed: bool = False, separator: str = "/") -> ms.StreamSchema:
    times = [0.5 * i for i in range(N + 2)]
    return ms.StreamSchema(
        dims={"time": None, "y": 6, "x": 4},
        time=ms.IndexedTime(times, units="s") if indexed else ms.AppendTime(units="s"),
        variables={
            "u": ms.Variable(("time", "y", "x"), "float32"),
            "n": ms.Variable(("time",), "int64"),
        },
        statics={"topo": ms.Variable(("y", "x"), "float64"), "g": ms.Variable((), "float64")},
        coords={"x": ms.Coordinate(("x",), np.arange(4.0)), "name": ms.Coordinate(("y",), list("abcdef"), dtype=str)},
        shard_shape={"time": 4, "y": 4, "x": 4},
        chunk_shape={"time": 2, "y": 2, "x": 2},
        key_separator=separator,
    )


def write(url: Any, **more: Any) -> None:
    """Write five records, of which three are committed one by one, with statics and blobs."""
    with ms.write_open(url, make_schema(**more), options=QUICK) as w:
        w.write_static("topo", np.arange(24.0).reshape(6, 4))
        w.write_static("g", 9.81)
        for i in range(N):
            arrays: dict[str, Any] = {"u": np.arange(24.0).reshape(6, 4) + i + 1, "n": i}
            if w.schema.n_total is None:
                w.write_record(0.5 * i, arrays)
            else:
                w.write_record_at(i, 0.5 * i, arrays)
            w.write_blob("rng", b"state", i)
            if i >= 2:
                w.commit()


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / "run.zarr"
    write(path)
    return path


@pytest.fixture
def store(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "run.zarr"))


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("separator", ["/", "."])
def test_a_store_that_was_written_is_sound(tmp_path: Path, indexed: bool, separator: str) -> None:
    """Every role, both modes, both separators; nothing is written, and every object is read."""
    path = tmp_path / "run.zarr"
    write(path, indexed=indexed, separator=separator)
    before = tree(path)
    seen: list[tuple[int, int]] = []
    report = ms.verify(path, progress=lambda n, total: seen.append((n, total)))
    assert tree(path) == before
    assert_sound(path)
    # 2 rows of 2 shards, n, 2 shards and one chunk of statics, 2 coordinates, 3 packs.
    assert (report.n_objects, report.n_records, report.writer) == (4 + 1 + 2 + 1 + 2 + 3, N + 2 * indexed, None)
    assert seen[-1] == (report.n_objects, report.n_objects)
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# What is done to the store, and of the one finding: kind, key, variable, records, box.
DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[Any, ...]]] = {
    "inner chunk": (
        lambda p: flip(p / "u/c/0/0/0", 3),
        ("checksum", "u/c/0/0/0", "u", (0, 2), ((0, 2), (0, 2))),
    ),
    "index": (lambda p: flip(p / "u/c/1/1/0", -20), ("index", "u/c/1/1/0", "u", (4, 5), ((4, 6), (0, 4)))),
    "shard missing": (lambda p: (p / "u/c/0/1/0").unlink(), ("missing", "u/c/0/1/0", "u", (0, 4), ((4, 6), (0, 4)))),
    "shard empty": (
        lambda p: (p / "u/c/0/1/0").write_bytes(b""),
        ("index", "u/c/0/1/0", "u", (0, 4), ((4, 6), (0, 4))),
    ),
    "row missing": (lambda p: shutil.rmtree(p / "u/c/1"), ("missing", "u/c", "u", (4, 5), None)),
    "all rows missing": (lambda p: shutil.rmtree(p / "u/c"), ("missing", "u/c", "u", (0, 5), None)),
    "series": (lambda p: flip(p / "n/c/0", 30), ("checksum", "n/c/0", "n", (0, 5), None)),
    "static": (lambda p: flip(p / "topo/c/1/0", 3), ("checksum", "topo/c/1/0", "topo", None, ((4, 6), (0, 2)))),
    "static without dims": (lambda p: (p / "g/c").unlink(), ("missing", "g/c", "g", None, None)),
    "coordinate": (lambda p: (p / "x/c/0").unlink(), ("missing", "x/c", "x", None, None)),
    "strings": (lambda p: flip(p / "name/c/0", 9), ("checksum", "name/c/0", "name", None, None)),
    "times": (lambda p: flip(p / "time/c/0", 30), ("checksum", "time/c/0", "time", (0, 5), None)),
    "blob": (lambda p: flip(p / ".mpistream/blobs/1-2-0", 0), ("checksum", ".mpistream/blobs/1-2-0", None, None, None)),
    "pack missing": (
        lambda p: (p / ".mpistream/blobs/1-2-0").unlink(),
        ("missing", ".mpistream/blobs", None, None, None),
    ),
    "layout": (
        lambda p: flip(p / ".mpistream/layout-1.json", 3),
        ("layout", ".mpistream/layout-1.json", None, None, None),
    ),
    "claim": (lambda p: flip(p / ".mpistream/epochs/1", 3), ("claim", ".mpistream/epochs/1", None, None, None)),
    "document missing": (lambda p: (p / "u/zarr.json").unlink(), ("missing", "u/zarr.json", "u", None, None)),
    "document cut": (lambda p: (p / "u/zarr.json").write_bytes(b"{"), ("json", "u/zarr.json", "u", None, None)),
    "document of another fill value": (
        lambda p: edit(p / "u/zarr.json", lambda d: d.update(fill_value=0.0)),
        ("documents", "u/zarr.json", "u", None, None),
    ),
    "document of another shape": (
        lambda p: edit(p / "u/zarr.json", lambda d: d.update(shape=[5, 6, 5])),
        ("documents", "u/zarr.json", "u", None, None),
    ),
    "group without an array": (
        lambda p: edit(p / "zarr.json", lambda d: d["consolidated_metadata"]["metadata"].pop("u")),
        ("documents", "zarr.json", None, None, None),
    ),
    "group with another array": (
        lambda p: edit(p / "zarr.json", lambda d: d["consolidated_metadata"]["metadata"]["u"].update(data_type="int8")),
        ("documents", "zarr.json, u", "u", None, None),
    ),
    "group missing": (lambda p: (p / "zarr.json").unlink(), ("missing", "zarr.json", None, None, None)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_by_variable_records_and_box(store: Path, name: str) -> None:
    """One finding each, with exit code 2, and nothing is written (P-14)."""
    damage, expected = DAMAGE[name]
    damage(store)
    before = tree(store)
    report = ms.verify(store)
    found = [(f.kind, f.key, f.variable, f.records, f.box) for f in report.damage]
    assert found == [expected]
    assert report.leftovers == ()
    assert report.exit_code == 2
    assert tree(store) == before


def with_manifest(path: Path, **changes: Any) -> None:
    from dataclasses import replace

    manifest = path / ".mpistream/manifest.json"
    manifest.write_bytes(replace(Manifest.from_bytes(manifest.read_bytes()), **changes).to_bytes())


def test_times_are_compared_with_the_manifest_bitwise(store: Path) -> None:
    """The digest of all times, and the last one."""
    digest = Manifest.from_bytes((store / ".mpistream/manifest.json").read_bytes()).times_digest
    with_manifest(store, times_digest="1" * 64)
    assert [(f.kind, f.key) for f in ms.verify(store).damage] == [("times", "time/c")]
    with_manifest(store, times_digest=digest, last_t=float(np.nextafter(2.0, 3.0)))
    (found,) = ms.verify(store).damage
    assert (found.kind, found.records) == ("times", (4, 5))


@pytest.mark.parametrize("wrong", [1.0, 0.5, float("nan"), float("inf")])
def test_times_must_ascend(store: Path, wrong: float) -> None:
    """Equal, falling or not finite: the record is named."""
    from mpistream.rows import encode_whole

    array = ms.open_reader(store).schema.time_array
    values = np.full(1024, np.nan)
    values[:N] = [0.0, 0.5, 1.0, wrong, 2.0]
    (item,) = encode_whole(array, "/", values)
    assert item.pieces is not None
    (store / "time/c/0").write_bytes(b"".join(item.pieces))
    findings = ms.verify(store).damage
    assert findings[0].text.startswith("record 3 has t = ")
    assert findings[0].records == (3, 4)


def test_coordinates_are_compared_with_their_digest(tmp_path: Path, store: Path) -> None:
    other = tmp_path / "other.zarr"
    schema = ms.StreamSchema(
        dims={"time": None, "x": 4},
        time=ms.AppendTime(units="s"),
        variables={"u": ms.Variable(("time", "x"), "float32")},
        coords={"x": ms.Coordinate(("x",), np.arange(4.0) + 1)},
    )
    ms.write_open(other, schema, options=QUICK).close()
    shutil.copy(other / "x/c/0", store / "x/c/0")
    assert [(f.kind, f.key, f.variable) for f in ms.verify(store).damage] == [("digest", "x/c", "x")]


def test_index_entries_that_overlap_are_damage(store: Path) -> None:
    """With a right checksum: two inner chunks of one place."""
    import google_crc32c

    path = store / "u/c/0/0/0"
    data = path.read_bytes()
    index = np.frombuffer(data[-16 * 8 - 4 : -4], "<u8").copy()
    index[2] = index[0]
    path.write_bytes(data[: -16 * 8 - 4] + index.tobytes() + google_crc32c.value(index.tobytes()).to_bytes(4, "little"))
    (found,) = ms.verify(store).damage
    assert (found.kind, found.key) == ("index", "u/c/0/0/0")
    assert "overlap" in found.text


# What is left, by whom, and of the findings: kind and key.
LEFT: dict[str, tuple[Callable[[Path], object], list[tuple[str, str]]]] = {
    "row": (lambda p: shutil.copytree(p / "u/c/1", p / "u/c/2"), [("uncommitted", "u/c")]),
    "time chunk": (lambda p: shutil.copy(p / "time/c/0", p / "time/c/1"), [("uncommitted", "time/c")]),
    "shard of no grid": (lambda p: shutil.copy(p / "u/c/0/0/0", p / "u/c/0/0/1"), [("unknown", "u/c/0/0/1")]),
    "temporary file": (lambda p: (p / "u/c/0/0/0.tmp").touch(), [("unknown", "u/c/0/0/0.tmp")]),
    "file in the root": (lambda p: (p / "notes.txt").touch(), [("unknown", "notes.txt")]),
    "file of an array": (lambda p: (p / "u/notes.txt").touch(), [("unknown", "u/notes.txt")]),
    "row of no number": (lambda p: (p / "u/c/x").mkdir(), [("unknown", "u/c/x")]),
    "stage folder": (lambda p: (p / ".mpistream/stage/0/0").mkdir(parents=True), [("stage", ".mpistream/stage/0")]),
    "pack": (
        lambda p: shutil.copy(p / ".mpistream/blobs/1-2-0", p / ".mpistream/blobs/1-9-0"),
        [("uncommitted", ".mpistream/blobs/1-9-0")],
    ),
    "no pack": (lambda p: (p / ".mpistream/blobs/x").touch(), [("unknown", ".mpistream/blobs/x")]),
    "old layout": (
        lambda p: (p / ".mpistream/layout-0.json").touch(),
        [("unknown", ".mpistream/layout-0.json")],
    ),
    "claim": (lambda p: (p / ".mpistream/epochs/9").touch(), [("claim", ".mpistream/epochs/9")]),
    "dropped": (lambda p: (p / ".mpistream/dropped/1").mkdir(parents=True), [("dropped", ".mpistream/dropped/1")]),
    "lease": (lambda p: (p / ".mpistream/lease").write_bytes(b""), [("lease", ".mpistream/lease")]),
    "document behind": (
        lambda p: edit(p / "u/zarr.json", lambda d: d.update(shape=[4, 6, 4])),
        [("documents", "u/zarr.json")],
    ),
    "documents ahead": (
        lambda p: edit(p / "zarr.json", lambda d: d["consolidated_metadata"]["metadata"]["n"].update(shape=[9])),
        [("documents", "zarr.json, n")],
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_leftovers_are_listed_and_repair_removes_them(store: Path, name: str) -> None:
    """Exit code 1; after a repair 0, but for what others put into the folder."""
    leave, expected = LEFT[name]
    leave(store)
    report = ms.verify(store)
    assert [(f.kind, f.key) for f in report.leftovers] == expected
    assert (report.damage, report.in_flight, report.exit_code) == ((), (), 1)
    ms.repair(store, takeover=True)
    kinds = {f.kind for f in ms.verify(store).leftovers}
    assert kinds <= {"unknown"}
    assert ms.verify(store).damage == ()


def test_what_a_live_writer_has_put_is_in_flight(tmp_path: Path) -> None:
    """Placed and not committed, while it is open: no leftover, and the writer is named."""
    path = tmp_path / "run.zarr"
    with ms.write_open(path, make_schema(), options=QUICK) as w:
        w.write_record(0.0, {"u": 1.0, "n": 0})
        w.commit()
        for i in range(1, 5):
            w.write_record(0.5 * i, {"u": 1.0, "n": i})
        w.flush()
        report = ms.verify(path)
        assert (report.damage, report.leftovers, report.exit_code) == ((), (), 0)
        assert {f.kind for f in report.in_flight} == {"stage", "uncommitted"}
        assert f"pid {os.getpid()}" in (report.writer or "")
    assert_sound(path)


def test_a_state_that_goes_on_while_it_is_verified_is_no_damage(tmp_path: Path) -> None:
    """Records that are dropped meanwhile are no findings; another store in the place of this one is an error."""
    path = tmp_path / "run.zarr"
    write(path)
    changes: list[Callable[[], object]] = []

    def meanwhile(n: int, total: int) -> None:
        while changes:
            changes.pop()()

    class Watched(Checker):
        def tasks(self, *args: Any) -> Any:
            for task in super().tasks(*args):
                meanwhile(0, 0)
                yield task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "Checker", Watched)
        changes.append(lambda: ms.truncate(path, 0.5, options=QUICK))
        report = ms.verify(path)
        assert (report.damage, report.n_records) == ((), N)
        ms.repair(path, restore_dropped=True, options=QUICK)
        assert_sound(path)

        def replace() -> None:
            shutil.rmtree(path)
            write(path)
            (path / "u/c/0/0/0").unlink()

        changes.append(replace)
        with pytest.raises(ms.StoreError, match="was replaced while it was verified") as caught:
            ms.verify(path)
        assert caught.value.kind == "superseded"


def test_many_findings_end_it(tmp_path: Path) -> None:
    """A store in which everything is damaged is not listed to the end, and says so."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 1500},
        time=ms.AppendTime(units="s"),
        variables={"u": ms.Variable(("time", "y"), "int8")},
        shard_shape={"time": 1, "y": 1},
    )
    store: Any = MemoryStore()
    with ms.write_open(store, schema, options=QUICK) as w:
        w.write_record(0.0, {"u": 1})
    for key in [k for k in store._objects if k.startswith("u/c/")]:
        store._objects[key] = b""
    report = ms.verify(store)
    assert len(report.damage) == 1000
    assert not report.is_complete


@pytest.mark.parametrize("make", ["nothing", "folder", "half"])
def test_what_is_no_store_is_an_error(store: Path, tmp_path: Path, make: str) -> None:
    url = store if make == "half" else tmp_path / "none"
    if make == "half":
        (store / ".mpistream/manifest.json").unlink()
    elif make == "folder":
        url.mkdir()
    with pytest.raises(ms.FormatError, match=str(url)) as caught:
        ms.verify(url)
    assert caught.value.kind == "no_manifest"


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_share_the_work_and_have_the_same_report(store: Path, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one process finds it, with every object read once."""
    monkeypatch.setattr(MODULE, "connect", lambda comm, timeout: comm)
    flip(store / "u/c/0/0/0", 3)
    (store / "topo/c/1/0").unlink()
    alone = ms.verify(store)
    assert len(alone.damage) == 2
    key = [(f.key, f.kind) for f in alone.damage]
    for report in run_ranks(n, lambda transport: ms.verify(store, comm=transport)):
        assert sorted((f.key, f.kind) for f in report.damage) == sorted(key)
        assert (report.n_objects, report.nbytes, report.is_complete) == (alone.n_objects, alone.nbytes, True)


def test_parts_without_mpi_are_sound_before_and_after_their_commit(tmp_path: Path) -> None:
    """Their stage folders stay, by design."""
    path = tmp_path / "run.zarr"
    parts = [ms.write_open_part(path, make_schema(), writer=i, n_writers=2, options=QUICK) for i in range(2)]
    for part in parts:
        part.write_record(0.0, {"u": 1.0, "n": 1})
    tokens = [part.flush() for part in parts]
    for part in parts:
        part.close()
    assert_no_damage(path)
    ms.commit_tokens(path, tokens, options=QUICK)
    report = ms.verify(path)
    assert (report.damage, report.leftovers, report.exit_code) == ((), (), 0)
    assert [f.kind for f in report.in_flight] == ["stage"]


def test_dropped_records_are_looked_for(tmp_path: Path) -> None:
    """Kept aside they are no leftover; gone they are damage, since a restore would fail."""
    path = tmp_path / "run.zarr"
    write(path)
    ms.truncate(path, 0.5, options=QUICK)
    assert_sound(path)
    shutil.rmtree(path / ".mpistream/dropped/2/u/c/1")
    (found,) = ms.verify(path).damage
    assert (found.kind, found.variable, found.records) == ("dropped", "u", (2, 5))


def test_committed_array_that_lags_is_a_leftover(tmp_path: Path) -> None:
    """In indexed mode what plain readers are told is compared, too."""
    path = tmp_path / "run.zarr"
    write(path, indexed=True)
    kept = (path / "committed/c/0").read_bytes()
    ms.write_resume(path, options=QUICK).close()
    with ms.write_resume(path, options=QUICK) as w:
        w.invalidate([1])
    assert_sound(path)
    (path / "committed/c/0").write_bytes(kept)
    assert [(f.kind, f.key) for f in ms.verify(path).leftovers] == [("documents", "committed/c/0")]
    (path / "committed/c/0").unlink()
    assert [(f.kind, f.key) for f in ms.verify(path).leftovers] == [("documents", "committed/c")]
    (path / "committed/c/0").write_bytes(b"")
    assert [(f.kind, f.key) for f in ms.verify(path).damage] == [("checksum", "committed/c/0")]


@pytest.mark.parametrize(
    ("committed", "length", "rows"),
    [
        ((), 4, []),
        (((0, 5),), 4, [(0, 2)]),
        (((1, 2), (3, 4), (5, 6)), 4, [(0, 1), (1, 2)]),
        (((0, 2**62),), 2, [(0, 2**61)]),
        (((0, 1), (8, 9)), 4, [(0, 1), (2, 3)]),
    ],
)
def test_committed_rows(committed: Any, length: int, rows: list[tuple[int, int]]) -> None:
    assert list(committed_rows(committed, length)) == rows


def test_attributes_changed_between_two_openings_are_those_of_each(tmp_path: Path) -> None:
    """One schema for two stores: what is rendered once for the first is not the second's."""
    schema = ms.StreamSchema(
        dims={"time": None, "x": 2},
        time=ms.AppendTime(units="s"),
        variables={"v": ms.Variable(("time", "x"), "f4", shard_shape=(1, 2), chunk_shape=(1, 2))},
        attrs={"n": {"k": 1}},
    )
    for k in (1, 3):
        schema.attrs["n"]["k"] = k
        with ms.write_open(tmp_path / str(k), schema, options=ms.Options(durability="none", threads=0)) as w:
            w.write_record(0.0, {"v": 1.0})
        report = ms.verify(tmp_path / str(k))
        assert (report.exit_code, report.damage) == (0, ())
        assert ms.open_reader(tmp_path / str(k)).schema.attrs["n"] == {"k": k}

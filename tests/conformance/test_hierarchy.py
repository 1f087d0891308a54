"""Several streams in one Zarr hierarchy: which groups are made, what plain readers see, and where no stream may lie."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import mpistream as ms
from tests.support.plain import QUICK, append_schema
from tests.support.wait import wait_until

ATMOSPHERE = append_schema({"y": 4, "x": 6}, {"t": ms.Variable(("time", "y", "x"), "float32")})
OCEAN = append_schema({"z": 3}, {"salt": ms.Variable(("time", "z"), "float64")}, units="days since 1950-01-01")

Tree = dict[str, bytes | None]


def tree(path: Path) -> Tree:
    return {p.relative_to(path).as_posix(): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def opened(path: Path, schema: ms.StreamSchema = OCEAN, **more: Any) -> ms.StreamWriter:
    return ms.write_open(path, schema, options=QUICK, **more)


def groups(path: Path) -> list[str]:
    """Return the folders below a path with the document of a plain group that are no streams."""
    plain = {"attributes": {}, "zarr_format": 3, "node_type": "group"}
    return sorted(
        p.parent.relative_to(path).as_posix()
        for p in path.rglob("zarr.json")
        if json.loads(p.read_text()) == plain and not (p.parent / ".mpistream").exists()
    )


def put(writer: ms.StreamWriter, i: int) -> None:
    for name, a in writer.schema.arrays.items():
        writer.write_record(float(i), {name: np.full(a.shape, 10 * i + 1, a.dtype)})


# ---- groups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("run", []),
        ("a/b/run", []),
        ("run.zarr", []),
        ("run.zarr/ocean", ["run.zarr"]),
        ("a/run.zarr/ocean", ["a/run.zarr"]),
        ("run.zarr/exp 1/b/ocean", ["run.zarr", "run.zarr/exp 1", "run.zarr/exp 1/b"]),
        ("all.zarr/b/one.zarr/ocean", ["all.zarr", "all.zarr/b", "all.zarr/b/one.zarr"]),
        (".zarr/ocean", []),
    ],
)
def test_parents_that_become_groups(tmp_path: Path, url: str, expected: list[str]) -> None:
    """From the uppermost folder whose name ends with .zarr down to the stream."""
    opened(tmp_path / url).close()
    assert groups(tmp_path) == expected
    assert ms.open_reader(tmp_path / url).n_records == 0


def test_group_that_is_there_is_not_touched(tmp_path: Path) -> None:
    """A group of any name begins the hierarchy; its document, attributes and other members stay as they are."""
    group = zarr.create_group(tmp_path / "project", attributes={"title": "mine"})
    group.create_array("mask", data=np.arange(3))
    before = tree(tmp_path)
    opened(tmp_path / "project" / "runs" / "ocean").close()
    opened(tmp_path / "project" / "runs" / "atmosphere", ATMOSPHERE).close()
    assert groups(tmp_path) == ["project/runs"]
    after = tree(tmp_path)
    assert {key: after[key] for key in before} == before
    assert sorted(zarr.open_group(tmp_path / "project", mode="r").group_keys()) == ["runs"]


def test_writers_that_make_the_same_group_at_once(tmp_path: Path) -> None:
    """Whoever comes second finds the group and goes on."""
    n = 6
    start = threading.Barrier(n)
    failed: list[BaseException] = []

    def make(i: int) -> None:
        try:
            start.wait(30)
            with opened(tmp_path / "run.zarr" / "exp" / str(i)) as w:
                put(w, 0)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=make, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert failed == []
    assert groups(tmp_path) == ["run.zarr", "run.zarr/exp"]
    assert [ms.open_reader(tmp_path / "run.zarr" / "exp" / str(i)).n_records for i in range(n)] == [1] * n


def test_group_document_that_is_just_being_written(tmp_path: Path) -> None:
    """Between its creation and its last byte the loser of a race waits for the winner."""
    root = tmp_path / "run.zarr"
    root.mkdir()
    (root / "zarr.json").write_bytes(b"")
    done = threading.Event()

    def make() -> None:
        opened(root / "ocean").close()
        done.set()

    threading.Thread(target=make, daemon=True).start()
    assert not done.wait(0.3)
    (root / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    wait_until(done.is_set, 30, "the opening")
    assert ms.open_reader(root / "ocean").n_records == 0


# ---- readers -----------------------------------------------------------------------------------------


def test_plain_readers_see_all_streams(tmp_path: Path) -> None:
    """zarr lists every member, and xarray opens the tree, while the streams have different lengths."""
    root = tmp_path / "run.zarr"
    a, o = opened(root / "atmosphere", ATMOSPHERE), opened(root / "deep" / "ocean")
    for n_a, n_o in ((0, 1), (2, 3)):
        while a.n_records < n_a:
            put(a, a.n_records)
        while o.n_records < n_o:
            put(o, o.n_records)
        ms.commit_all([a, o])
        check_tree(root, n_a, n_o)
    a.close()
    o.close()
    check_tree(root, 2, 3)


def check_tree(root: Path, n_a: int, n_o: int) -> None:
    import xarray

    group = zarr.open_group(root, mode="r")
    with pytest.warns(match="mpistream"):
        members = dict(group.members(max_depth=None))
    arrays = {name: m.shape for name, m in members.items() if isinstance(m, zarr.Array)}
    assert arrays == {
        "atmosphere/t": (n_a, 4, 6),
        "atmosphere/time": (n_a,),
        "deep/ocean/salt": (n_o, 3),
        "deep/ocean/time": (n_o,),
    }
    assert {name for name, m in members.items() if isinstance(m, zarr.Group)} == {"atmosphere", "deep", "deep/ocean"}
    for is_default in (True, False):
        if is_default:
            # xarray says that it looked for consolidated metadata first.
            with pytest.warns(RuntimeWarning, match="consolidated metadata"):
                found = xarray.open_datatree(root, engine="zarr", zarr_format=3, decode_times=False)
        else:
            found = xarray.open_datatree(root, engine="zarr", zarr_format=3, consolidated=False, decode_times=False)
        assert set(found.groups) == {"/", "/atmosphere", "/deep", "/deep/ocean"}
        for name, n, shape in (("atmosphere/t", n_a, (4, 6)), ("deep/ocean/salt", n_o, (3,))):
            expected = np.stack([np.full(shape, 10 * i + 1) for i in range(n)]) if n else np.empty((0, *shape))
            np.testing.assert_array_equal(found[name].values, expected)
            np.testing.assert_array_equal(found[f"{name.rpartition('/')[0]}/time"].values, np.arange(float(n)))
        found.close()


# ---- where no stream may lie -------------------------------------------------------------------------


def a_stream(path: Path) -> None:
    opened(path).close()


def remains_of_a_stream(path: Path) -> None:
    opened(path).close()
    (path / ".mpistream" / "manifest.json").unlink()
    (path / "zarr.json").unlink()


def an_array(path: Path) -> None:
    zarr.create_array(path, data=np.arange(3))


def a_consolidated_group(path: Path) -> None:
    zarr.create_group(path).create_array("mask", data=np.arange(3))
    zarr.consolidate_metadata(path)


def a_group_v2(path: Path) -> None:
    zarr.create_group(path, zarr_format=2)


def an_array_v2(path: Path) -> None:
    zarr.create_array(path, data=np.arange(3), zarr_format=2)


def refused(path: Path, top: Path, **more: Any) -> ms.MPIStreamError:
    """Return the error of an opening, before which and after which every byte is the same."""
    before = tree(top)
    with pytest.raises(ms.MPIStreamError) as caught:
        opened(path, **more)
    assert tree(top) == before
    return caught.value


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("below", ["ocean", "u/ocean", "a/b/ocean"])
@pytest.mark.parametrize(
    ("make", "way_out"),
    [
        (a_stream, "which is a stream, and a stream holds no other; give a path beside it"),
        (remains_of_a_stream, "/.mpistream if nobody makes it"),
        (an_array, "a Zarr array, which has no nodes below it; give a path outside"),
        (a_consolidated_group, "take 'consolidated_metadata' out of "),
        (a_group_v2, "a Zarr v2 group, in which readers see no stream"),
        (an_array_v2, "a Zarr v2 array"),
    ],
)
def test_stream_inside_what_can_not_hold_it(
    tmp_path: Path, make: Callable[[Path], None], way_out: str, below: str, overwrite: bool
) -> None:
    """At any depth: inside a stream, its remains, an array, a group with consolidated metadata, a Zarr v2 node."""
    make(tmp_path / "top")
    error = refused(tmp_path / "top" / below, tmp_path, overwrite=overwrite)
    assert (type(error), error.kind) == (ms.StoreError, "hierarchy")
    assert str(error).startswith(f"{tmp_path / 'top' / below} lies inside {tmp_path / 'top'}, ")
    assert way_out in str(error)


def test_way_out_of_a_consolidated_group(tmp_path: Path) -> None:
    """Without its consolidated metadata the group holds the new stream, and readers find it."""
    top = tmp_path / "run.zarr"
    a_consolidated_group(top)
    document = json.loads((top / "zarr.json").read_text())
    del document["consolidated_metadata"]
    (top / "zarr.json").write_text(json.dumps(document))
    with opened(top / "ocean") as w:
        put(w, 0)
    assert sorted(zarr.open_group(top, mode="r").array_keys()) == ["mask"]
    assert zarr.open_group(top, mode="r")["ocean/salt"].shape == (1, 3)  # type: ignore[union-attr]


def test_array_of_a_stream_holds_no_stream(tmp_path: Path) -> None:
    """The folder of one of a stream's own arrays lies inside that stream."""
    a_stream(tmp_path / "run")
    error = refused(tmp_path / "run" / "salt", tmp_path, overwrite=True)
    assert error.kind == "hierarchy"


def test_upper_group_is_no_place_for_a_stream(tmp_path: Path) -> None:
    """A stream over a group with streams below it is refused, with and without overwrite, and names one of them."""
    a_stream(tmp_path / "run.zarr" / "exp" / "ocean")
    for path, name in (("run.zarr", "'exp/ocean'"), ("run.zarr/exp", "'ocean'")):
        for overwrite in (False, True):
            error = refused(tmp_path / path, tmp_path, overwrite=overwrite)
            assert (type(error), error.kind) == (ms.StoreError, "exists")
            assert name in str(error)


@pytest.mark.parametrize("name", ["__ocean", ".ocean"])
@pytest.mark.parametrize("url", ["run.zarr/{}", "run.zarr/{}/b"])
def test_name_that_is_none_of_a_zarr_node(tmp_path: Path, url: str, name: str) -> None:
    """Inside a hierarchy readers would not find such a node."""
    error = refused(tmp_path / url.format(name), tmp_path)
    assert (type(error), error.kind) == (ms.SchemaError, "name")
    assert repr(name) in str(error)
    opened(tmp_path / name).close()


def test_group_document_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a creation leaves that died with its first byte is refused, and is made anew once it is removed."""
    monkeypatch.setattr("mpistream.hierarchy._BEING_MADE_SECONDS", 0.1)
    root = tmp_path / "run.zarr"
    root.mkdir()
    (root / "zarr.json").write_bytes(b"")
    error = refused(root / "ocean", tmp_path)
    assert (type(error), error.kind) == (ms.StoreError, "hierarchy")
    assert f"{root}/zarr.json is damaged" in str(error)
    (root / "zarr.json").unlink()
    a_stream(root / "ocean")
    assert groups(tmp_path) == ["run.zarr"]


# ---- the rules of nodes ------------------------------------------------------------------------------


def test_array_over_a_group(tmp_path: Path) -> None:
    """A stream whose array has the name of a group that is there: with a stream in it never, else only by overwrite."""
    zarr.create_group(tmp_path / "run").create_group("salt")
    assert refused(tmp_path / "run", tmp_path).kind == "exists"
    opened(tmp_path / "run", overwrite=True).close()
    assert zarr.open_array(tmp_path / "run" / "salt", mode="r").shape == (0, 3)


def test_array_over_an_array(tmp_path: Path) -> None:
    """A stream whose array has the name of an array that is there, in a group or in a plain folder."""
    zarr.create_group(tmp_path / "run").create_array("salt", data=np.arange(3))
    assert refused(tmp_path / "run", tmp_path).kind == "exists"
    (tmp_path / "run" / "zarr.json").unlink()
    for overwrite in (False, True):
        assert refused(tmp_path / "run", tmp_path, overwrite=overwrite).kind == "not_empty"


def test_group_over_an_array(tmp_path: Path) -> None:
    """A stream is a group, and takes no array's place."""
    an_array(tmp_path / "run")
    for overwrite in (False, True):
        error = refused(tmp_path / "run", tmp_path, overwrite=overwrite)
        assert (type(error), error.kind) == (ms.StoreError, "exists")


def test_group_over_a_group(tmp_path: Path) -> None:
    """A stream takes a group's place only by overwrite, in a hierarchy, too; the groups above stay."""
    zarr.create_group(tmp_path / "run.zarr", attributes={"title": "mine"}).create_group("ocean")
    assert refused(tmp_path / "run.zarr" / "ocean", tmp_path).kind == "exists"
    document = (tmp_path / "run.zarr" / "zarr.json").read_bytes()
    opened(tmp_path / "run.zarr" / "ocean", overwrite=True).close()
    opened(tmp_path / "run.zarr" / "ocean", overwrite=True).close()
    assert (tmp_path / "run.zarr" / "zarr.json").read_bytes() == document
    assert ms.open_reader(tmp_path / "run.zarr" / "ocean").n_records == 0


# ---- races, parts, resume ----------------------------------------------------------------------------


def test_folder_above_that_becomes_a_stream_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the claim it is looked at once more: of two openings one inside the other, not both go on."""
    from mpistream import session
    from mpistream.opening import claim

    def late(*args: Any, **more: Any) -> Any:
        (tmp_path / "run" / ".mpistream" / "epochs").mkdir(parents=True)
        return claim(*args, **more)

    monkeypatch.setattr(session, "claim", late)
    with pytest.raises(ms.StoreError) as caught:
        opened(tmp_path / "run" / "ocean")
    assert caught.value.kind == "hierarchy"
    assert not (tmp_path / "run" / "ocean" / ".mpistream" / "manifest.json").exists()


def test_parts_without_mpi_lie_in_a_hierarchy(tmp_path: Path) -> None:
    """The owner of a part makes the groups, and refuses the same places."""
    part = ms.write_open_part(tmp_path / "run.zarr" / "ocean", OCEAN, writer=0, n_writers=1, options=QUICK)
    put(part, 0)
    part.commit([part.flush()])
    part.close()
    assert groups(tmp_path) == ["run.zarr"]
    assert zarr.open_group(tmp_path / "run.zarr", mode="r")["ocean/salt"].shape == (1, 3)  # type: ignore[union-attr]
    with pytest.raises(ms.StoreError) as caught:
        ms.write_open_part(tmp_path / "run.zarr" / "ocean" / "b", OCEAN, writer=0, n_writers=1, options=QUICK)
    assert caught.value.kind == "hierarchy"


def test_resume_under_a_group_that_was_consolidated_meanwhile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A restart is not refused for it, but who opens the upper group sees an old state: the log says so."""
    root = tmp_path / "run.zarr"
    with opened(root / "ocean") as w:
        put(w, 0)
    with caplog.at_level(logging.WARNING, "mpistream"):
        ms.write_resume(root / "ocean", options=QUICK).close()
        assert "consolidated" not in caplog.text
        with pytest.warns(match="mpistream"):
            zarr.consolidate_metadata(root)
        ms.write_resume(root / "ocean", options=QUICK).close()
    assert f"the group {root} has consolidated metadata" in caplog.text

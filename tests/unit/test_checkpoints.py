"""A pair of restart states: the newest committed one comes back, whatever happens to the save after it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.local_store import LocalStore
from tests.support.killed import Killed

OPTIONS = ms.Options(durability="none", threads=0, lease_ttl=100_000)
CHANGES = ("make_folder", "create", "stage", "place", "sync_folders", "move", "copy", "delete", "delete_tree")


def make_schema(**more: Any) -> ms.StreamSchema:
    return ms.StreamSchema(
        dims={"time": None, "y": 4},
        time=ms.AppendTime(units="s"),
        variables={"v": ms.Variable(("time", "y"), "float64")},
        statics={"mask": ms.Variable(("y",), "int8")},
        attrs={"title": "restart"},
        **more,
    )


def state(n: int) -> np.ndarray:
    return n + np.arange(4) / 3


def save(pair: ms.CheckpointPair, n: int, **more: Any) -> ms.CommitReceipt:
    arrays: dict[str, Any] = {"v": state(n), "mask": n}
    return pair.save(float(n), arrays, blobs={"rng": b"%d" % n}, options=OPTIONS, **more)


def restored(pair: ms.CheckpointPair) -> int | None:
    """Return which state comes back, once all of it was compared."""
    found = pair.restore()
    if found is None:
        return None
    reader, t = found
    n = int(t)
    assert reader.n_records == 1
    assert reader.read_record("v", 0).tolist() == state(n).tolist()
    assert reader.read_static("mask").tolist() == [n] * 4
    assert reader.read_blob("rng", 0) == b"%d" % n
    assert reader.attrs["title"] == "restart"
    return n


@pytest.mark.parametrize("keep", [2, 3])
def test_the_newest_state_comes_back_and_the_oldest_is_replaced(tmp_path: Path, keep: int) -> None:
    """As many states as are kept lie there, also those of earlier times than the ones before."""
    pair = ms.CheckpointPair(tmp_path / "restart", make_schema(), keep=keep)
    assert restored(pair) is None
    assert not (tmp_path / "restart").exists()
    times = [1, 2, 3, 2, 7, 0]
    for i, n in enumerate(times):
        receipt = save(pair, n)
        assert (receipt.n_records, receipt.last_t) == (1, n)
        assert restored(pair) == n
        lying = [ms.open_reader(slot).times[0] for slot in (tmp_path / "restart").iterdir()]
        assert sorted(lying) == sorted(times[: i + 1][-keep:])


def test_plain_readers_find_the_states(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    save(ms.CheckpointPair(tmp_path / "restart.zarr", make_schema()), 5)
    assert zarr.open_group(tmp_path / "restart.zarr", mode="r")["0/v"][0].tolist() == state(5).tolist()


def test_a_save_that_is_killed_at_any_call_leaves_a_whole_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes back is the state of before, or the new one once its manifest is in place; and the next save works."""
    pair = ms.CheckpointPair(tmp_path / "restart", make_schema())
    save(pair, 1)
    save(pair, 2)
    shutil.copytree(tmp_path / "restart", tmp_path / "kept")
    found = []
    n_calls = 0
    while True:
        left = n_calls

        def before(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(self: LocalStore, *args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return call(self, *args, **kwargs)

            return wrapped

        with monkeypatch.context() as patch:
            for name in CHANGES:
                patch.setattr(LocalStore, name, before(getattr(LocalStore, name)))
            try:
                save(pair, 3, takeover=True)
                is_done = True
            except Killed:
                is_done = False
        found.append(restored(pair))
        if is_done:
            break
        if n_calls % 8 == 0:
            save(pair, 4, takeover=True)
            assert restored(pair) == 4
        shutil.rmtree(tmp_path / "restart")
        shutil.copytree(tmp_path / "kept", tmp_path / "restart")
        n_calls += 1
    first = found.index(3)
    assert found == [2] * first + [3] * (len(found) - first)
    assert first > 20


def test_a_damaged_state_is_passed_over_with_a_warning_and_replaced_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = ms.CheckpointPair(tmp_path, make_schema())
    save(pair, 1)
    save(pair, 2)
    manifests = [tmp_path / slot / ".mpistream/manifest.json" for slot in ("0", "1")]
    manifests[1].write_bytes(b"{")
    assert restored(pair) == 1
    assert f"{tmp_path}/1: damaged" in caplog.text
    save(pair, 3)
    assert (restored(pair), ms.open_reader(tmp_path / "0").times[0]) == (3, 1)
    for manifest in manifests:
        manifest.write_bytes(b"{")
    with pytest.raises(ms.FormatError, match=rf"{tmp_path}/0: .*not valid JSON"):
        pair.restore()


def test_a_store_that_is_no_state_is_not_replaced(tmp_path: Path) -> None:
    """A stream of the user's own at a slot's place, or a state of a newer version, is refused and stays."""
    with ms.write_open(tmp_path / "0", make_schema(), options=OPTIONS) as w:
        w.write_record(0.0, {"v": 1.0})
    pair = ms.CheckpointPair(tmp_path, make_schema())
    with pytest.raises(ms.FormatError, match=r"no state of a CheckpointPair; it is not replaced") as caught:
        save(pair, 1)
    assert caught.value.kind == "foreign"
    manifest = tmp_path / "0/.mpistream/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 2}))
    with pytest.raises(ms.FormatError, match=r"use a newer mpistream; it is not replaced"):
        save(pair, 1)
    assert not (tmp_path / "1").exists()


def test_a_state_beyond_those_kept_now_still_counts(tmp_path: Path) -> None:
    """Who keeps fewer states than before finds the newest of all."""
    for n in (1, 2, 3):
        save(ms.CheckpointPair(tmp_path, make_schema(), keep=3), n)
    pair = ms.CheckpointPair(tmp_path, make_schema())
    assert restored(pair) == 3
    save(pair, 4)
    assert restored(pair) == 4


def test_another_schema_is_refused(tmp_path: Path) -> None:
    save(ms.CheckpointPair(tmp_path, make_schema()), 1)
    with pytest.raises(ms.ResumeError, match=rf"{tmp_path}/0: the state has another schema") as caught:
        ms.CheckpointPair(tmp_path, make_schema(codec="none")).restore()
    assert caught.value.kind == "schema"


@pytest.mark.parametrize("keep", [1, 0, True, 2.0])
def test_fewer_than_two_states_are_refused(keep: Any) -> None:
    with pytest.raises(ms.SchemaError, match=rf"keep {keep!r}: give 2 or more"):
        ms.CheckpointPair("restart", make_schema(), keep)


def test_fixed_times_are_refused() -> None:
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4},
        time=ms.IndexedTime([0.0], units="s"),
        variables={"v": ms.Variable(("time", "y"), "float64")},
    )
    for wrong in (schema, None):
        with pytest.raises(ms.SchemaError, match="StreamSchema with AppendTime"):
            ms.CheckpointPair("restart", wrong)  # type: ignore[arg-type]
    assert repr(ms.CheckpointPair("restart/", make_schema())) == "CheckpointPair('restart', keep=2)"


def test_what_is_no_pair_is_not_a_pair_without_states(tmp_path: Path) -> None:
    """None means to start from scratch: a path that was mistaken must not."""
    (tmp_path / "file").write_text("x")
    with ms.write_open(tmp_path / "stream", make_schema(), options=OPTIONS) as w:
        w.write_static("mask", np.zeros(4, "int8"))
    for name, what in (("file", "a file"), ("stream", "a stream")):
        pair = ms.CheckpointPair(tmp_path / name, make_schema())
        for call in (pair.restore, lambda pair=pair: save(pair, 1)):
            with pytest.raises(ms.FormatError, match=f"is {what}, and not the folder of a CheckpointPair"):
                call()
    assert ms.CheckpointPair(tmp_path / "new", make_schema()).restore() is None


def test_a_save_is_not_told_to_share_shards_over_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A state has one record; a stream of the same schema is told, and to have longer rows."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 100, "x": 100},
        time=ms.AppendTime(units="s"),
        variables={"v": ms.Variable(("time", "y", "x"), "float32")},
    )
    with caplog.at_level("WARNING", "mpistream"):
        ms.CheckpointPair(tmp_path / "restart", schema).save(0.0, {"v": 1.0}, options=OPTIONS)
        assert caplog.messages == []
        ms.write_open(tmp_path / "s", schema, options=OPTIONS).close()
    assert "raise shard_shape, for example its 'time'" in caplog.messages[0]

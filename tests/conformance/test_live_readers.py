"""Plain readers in processes of their own, while a store grows under them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from tests.support.plain import QUICK, append_schema
from tests.support.wait import wait_until

DEADLINE = 60.0
N_COMMITS = 50
NAMES = ("u", "v", "w")
# Large enough for inner chunks to be compressed, so that one with more records in it has another size.
NY = 96

# It reads from the first moment to the writer's end. Each look appends a byte to a file, whose size says how
# many there were; what is wrong is collected, and told at the end.
READER = """
import json, os, sys, traceback
from pathlib import Path
import numpy as np

path, looks_path, stop = sys.argv[1:4]
looks = os.open(looks_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
wrong = []
seen = 0

def check(what, found, expected):
    if found != expected:
        wrong.append(f"{what}: {found}, expected {expected}")

BODY

while True:
    is_last = os.path.exists(stop)
    try:
        seen = max(seen, look())
    except Exception:
        wrong.append(traceback.format_exc())
    os.write(looks, b".")
    if is_last or len(wrong) > 5:
        break
print(json.dumps({"wrong": wrong, "seen": seen}))
"""

LOOK_WITH_XARRAY = """
import xarray

def look():
    dataset = xarray.open_zarr(path)
    n = dataset.sizes["time"]
    lengths = {name: len(dataset[name]) for name in ("time", "u", "v", "w")}
    check("lengths", lengths, dict.fromkeys(lengths, n))
    if n:
        for k, name in enumerate(("u", "v", "w")):
            check(f"{name}[{n - 1}]", dataset[name][-1].values.tolist(), [100.0 * k + n - 1 + j for j in range(96)])
        seconds = (dataset["time"][-1].values - np.datetime64("2000-01-01", "ns")) / np.timedelta64(1, "s")
        check(f"time of {n - 1}", float(seconds), n - 1.0)
    return n
"""

# An array is opened once and read again and again: each read looks into the index and then for the inner chunks, and
# the object may have been replaced in between.
LOOK_WITH_ZARR = """
import zarr

opened = zarr.open_array(path + "/u", mode="r")

def look():
    newer = zarr.open_array(path + "/u", mode="r")
    n = newer.shape[0]
    first_of_row = (n - 1) // 8 * 8
    for _ in range(10):
        found = newer[first_of_row]
        check(f"record {first_of_row}", found.tolist(), [first_of_row + j for j in range(96)])
    check("record 0", opened[0].tolist(), [float(j) for j in range(96)])
    return n
"""


class Watcher:
    """A reader in a process of its own; `ends` tells it that the writer has ended and returns what it saw."""

    def __init__(self, path: Path, look: str, folder: Path) -> None:
        self._looks, self._stop = folder / "looks", folder / "stop"
        code = READER.replace("BODY", look)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, str(path), str(self._looks), str(self._stop)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},  # nothing of ours
        )

    def n_looks(self) -> int:
        return self._looks.stat().st_size if self._looks.exists() else 0

    def wait_for_a_look(self) -> None:
        """Wait until the reader has ended a look since now, so that it reads beside every commit."""
        before = self.n_looks()
        wait_until(lambda: self.n_looks() > before or self.process.poll() is not None, DEADLINE, "a look", every=0.001)

    def ends(self) -> dict[str, Any]:
        self._stop.touch()
        out, errors = self.process.communicate(timeout=DEADLINE)
        assert errors == ""
        return dict(json.loads(out))


@contextmanager
def watched(path: Path, look: str, folder: Path) -> Iterator[Watcher]:
    watcher = Watcher(path, look, folder)
    try:
        yield watcher
    finally:
        watcher.process.kill()
        watcher.process.communicate()


def row(i: int, k: int = 0) -> NDArray[np.float32]:
    return (np.arange(NY) + 100 * k + i).astype("float32")


@pytest.mark.parametrize(("rows", "inner_time"), [(1, 1), (8, 4)])
def test_xarray_never_sees_part_of_a_commit(tmp_path: Path, rows: int, inner_time: int) -> None:
    """Who opens a store while it grows finds all lengths equal and the last record whole, each time (P-09)."""
    path = tmp_path / "run.zarr"
    schema = append_schema(
        {"y": NY},
        {name: ms.Variable(("time", "y"), "float32") for name in NAMES},
        shard_shape={"time": rows, "y": NY // 2},
        chunk_shape={"time": inner_time, "y": NY // 2},
    )
    with ms.write_open(path, schema, options=QUICK) as writer, watched(path, LOOK_WITH_XARRAY, tmp_path) as watcher:
        for i in range(N_COMMITS):
            watcher.wait_for_a_look()
            writer.write_record(float(i), {name: row(i, k) for k, name in enumerate(NAMES)})
            writer.commit()
        assert watcher.ends() == {"wrong": [], "seen": N_COMMITS}


@pytest.mark.parametrize("inner_time", [1, 4])
def test_zarr_reads_a_committed_record_while_its_row_grows(tmp_path: Path, inner_time: int) -> None:
    """A plain reader of a committed record never fails and never sees another value, though its object is replaced."""
    path = tmp_path / "run.zarr"
    schema = append_schema(
        {"y": NY},
        {"u": ms.Variable(("time", "y"), "float32")},
        shard_shape={"time": 8, "y": NY},
        chunk_shape={"time": inner_time, "y": NY // 2},
    )
    n = 40
    with ms.write_open(path, schema, options=QUICK) as writer:
        writer.write_record(0.0, {"u": row(0)})
        writer.commit()
        with watched(path, LOOK_WITH_ZARR, tmp_path) as watcher:
            for i in range(1, n):
                watcher.wait_for_a_look()
                writer.write_record(float(i), {"u": row(i)})
                writer.commit()
            assert watcher.ends() == {"wrong": [], "seen": n}


def store_with_pause(path: Path, pause: Callable[[str], None]) -> Any:
    """Return zarr's own local store, which calls ``pause(key)`` behind each read of a shard's index."""
    import zarr.storage
    from zarr.abc.store import SuffixByteRequest

    class Paused(zarr.storage.WrapperStore[zarr.storage.LocalStore]):
        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            found = await super().get(key, prototype, byte_range)
            if isinstance(byte_range, SuffixByteRequest):
                pause(key)
            return found

    return Paused(zarr.storage.LocalStore(path, read_only=True))


@pytest.mark.parametrize("codec", ["fast", "none"])
@pytest.mark.parametrize("inner_time", [1, 2, 4, 8])
def test_old_index_fits_every_later_object_of_the_row(tmp_path: Path, inner_time: int, codec: str) -> None:
    """zarr-python reads a shard's index, then the row grows: what it reads next is what the old index promised."""
    import zarr

    path = tmp_path / "run.zarr"
    schema = append_schema(
        {"y": NY},
        {"u": ms.Variable(("time", "y"), "float32")},
        shard_shape={"time": 8, "y": NY},
        chunk_shape={"time": inner_time, "y": NY // 2},
        codec=codec,
    )
    with ms.write_open(path, schema, options=QUICK) as writer:

        def grow(key: str) -> None:
            if key.startswith("u/"):
                n = writer.n_records
                writer.write_record(float(n), {"u": row(n)})
                writer.commit()

        writer.write_record(0.0, {"u": row(0)})
        writer.commit()
        array: Any = zarr.open_group(store_with_pause(path, grow), mode="r")["u"]
        for n in range(1, 8):
            # The row has n records; the read commits the next one between the index and the inner chunks.
            assert writer.n_committed == n
            # Half of the grid: who needs every inner chunk of a shard reads the object at once.
            assert array[0, NY // 2 :].tolist() == row(0)[NY // 2 :].tolist()
    grown: Any = zarr.open_array(path / "u", mode="r")
    assert grown[...].tolist() == [row(i).tolist() for i in range(8)]


@pytest.mark.parametrize("inner_time", [1, 4])
def test_inner_chunks_of_committed_records_stay_at_their_offsets(tmp_path: Path, inner_time: int) -> None:
    """Each inner chunk that an object's index names lies at the same place, byte for byte, in every later object."""
    path = tmp_path / "run.zarr"
    schema = append_schema(
        {"y": NY},
        {"u": ms.Variable(("time", "y"), "float32")},
        shard_shape={"time": 8, "y": NY},
        chunk_shape={"time": inner_time, "y": NY // 2},
    )
    index_nbytes = 16 * (8 // inner_time) * 2 + 4
    promised: dict[tuple[int, int], bytes] = {}
    with ms.write_open(path, schema, options=QUICK) as writer:
        for i in range(8):
            writer.write_record(float(i), {"u": row(i)})
            writer.commit()
            data = (path / "u" / "c" / "0" / "0").read_bytes()
            assert {at: data[at[0] : sum(at)] for at in promised} == promised
            entries = np.frombuffer(data[-index_nbytes:-4], "<u8").reshape(-1, 2).tolist()
            promised |= {(o, n): data[o : o + n] for o, n in entries if o != 2**64 - 1}
    # With inner time 4 the chunk of records 0 to 3 was written four times, each time at a new place.
    assert len(promised) == 16

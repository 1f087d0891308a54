"""How often the bytes of a row that grows are written:  python ci/bench/rows.py

80 records in rows of 8, a commit after each. A commit makes a record durable and visible, so by default it writes the
row as far as it is filled; with ``partial_rows=False`` it leaves a row that is not full pending, and a row is written
once. Counted is every byte that goes into a file of the store, whatever it is; compared with the data encoded once,
inner chunk by inner chunk, by numcodecs alone. The last line is JSON. Fails if the factor with ``partial_rows=False``
is above 1.3.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
from numpy.typing import NDArray

import mpistream as ms
from mpistream.store import open_store

N_RECORDS, ROW = 80, 8
NY, NX = 256, 1024  # 1 MiB of float32 a record
SHARD_NY, CHUNK_NY = 128, 64
LIMIT = 1.3


def record_of(i: int) -> NDArray[np.float32]:
    """Return waves that move, and noise in the last bits."""
    y, x = np.arange(NY)[:, None] / NY, np.arange(NX) / NX
    noise = np.random.default_rng(i).standard_normal((NY, NX), "float32")
    return np.asarray(280 + 15 * np.sin(3 * y + i / 20) * np.cos(5 * x - i / 30) + 0.01 * noise, "float32")


def encoded_once(inner_time: int) -> int:
    """Return the bytes of all inner chunks, each encoded once, with a checksum of 4 bytes each."""
    codec = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE, blocksize=0, typesize=4)
    total = 0
    for start in range(0, N_RECORDS, inner_time):
        records = np.stack([record_of(i) for i in range(start, start + inner_time)])
        for y in range(0, NY, CHUNK_NY):
            total += len(codec.encode(np.ascontiguousarray(records[:, y : y + CHUNK_NY]))) + 4
    return total


class Counted:
    """A store of which the bytes are counted that are staged or created; all else is the store's own."""

    def __init__(self, path: Path) -> None:
        self._store = open_store(path)
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def stage(self, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        nbytes = self._store.stage(key, pieces, sync=sync)
        self.nbytes += nbytes
        return nbytes

    def create(self, key: str, data: bytes) -> bool:
        self.nbytes += len(data)
        return self._store.create(key, data)


def write(path: Path, inner_time: int, *, partial_rows: bool) -> tuple[int, int]:
    """Write all records; return the bytes that were written and those of the shards that are left."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": NY, "x": NX},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={"u": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape={"time": ROW, "y": SHARD_NY, "x": NX},
        chunk_shape={"time": inner_time, "y": CHUNK_NY, "x": NX},
        codec="fast",
    )
    store: Any = Counted(path)
    with ms.write_open(store, schema, options=ms.Options(durability="none", threads=0)) as writer:
        for i in range(N_RECORDS):
            writer.write_record(float(i), {"u": record_of(i)})
            writer.commit(partial_rows=partial_rows)
    for i in (0, ROW - 1, N_RECORDS - 1):
        assert np.array_equal(ms.read_record(path, "u", i), record_of(i))
    return store.nbytes, sum(p.stat().st_size for p in (path / "u" / "c").rglob("*") if p.is_file())


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="mpistream-rows-"))
    document: dict[str, Any] = {"benchmark": "rows", "limit": LIMIT, "factors": []}
    print(f"{N_RECORDS} records of 1 MiB in rows of {ROW}, a commit a record; factors of the data encoded once")
    print(f"{'inner time':>10}  {'partial_rows':12} {'written':>8} {'on disk':>8}")
    is_met = True
    try:
        for inner_time in (1, 4):
            once = encoded_once(inner_time)
            for partial_rows in (False, True):
                path = folder / f"{inner_time}-{partial_rows}.zarr"
                written, left = (n / once for n in write(path, inner_time, partial_rows=partial_rows))
                print(f"{inner_time:10}  {partial_rows!s:12} {written:8.3f} {left:8.3f}")
                document["factors"].append(
                    {
                        "inner_time": inner_time,
                        "partial_rows": partial_rows,
                        "written": round(written, 4),
                        "on_disk": round(left, 4),
                    }
                )
                is_met &= partial_rows or written <= LIMIT
                shutil.rmtree(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"with partial_rows=False: {'at most' if is_met else 'MORE THAN'} {LIMIT}")
    print(json.dumps(document))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())

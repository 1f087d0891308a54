"""A simulation to be killed: ``writing_job.py url n_records [how, as JSON]``, on any number of ranks.

It makes the store, or resumes it if it is there, and writes records until there are ``n_records``. Rank 0 says in a
line of JSON what was acknowledged: ``opened``, ``committed``, ``closed``. A rank that stops for good at the place that
``how["hang"]`` names says ``hanging``. They say it in a file beside the store: what goes through a launcher is lost
with the launcher.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mpistream as ms
import mpistream.rank_writer
from mpistream.local_store import LocalStore
from tests.support.collective import keys
from tests.support.scene import Scene

__all__ = ["SCENE", "SHARD", "main", "said_path"]

SCENE = Scene(
    sizes={"y": 7, "x": 5},
    variables={"u": ("y x", "float32"), "zonal": ("y", "float64"), "total": ("", "int32")},
    statics={"topo": ("y x", "float32")},
    coords={"y": ("y", "float64")},
)
SHARD = {"time": 4, "y": 2, "x": 5}
CHUNK = {"time": 2, "y": 1, "x": 5}


def said_path(url: str | os.PathLike[str]) -> Path:
    """Return the file to which a job that writes this store says what it has done."""
    return Path(f"{os.fspath(url)}.said")


def _say(url: str, **what: Any) -> None:
    """Append one line, whole."""
    descriptor = os.open(said_path(url), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(descriptor, json.dumps(what).encode() + b"\n")
    os.close(descriptor)


class HangingStore(LocalStore):
    """A folder whose n-th call of one kind, on a key with some prefix, hangs: until a file is there, or for ever."""

    def __init__(
        self, root: str, *, call: str, prefix: str, after: int = 0, is_armed: bool = True, until: str = ""
    ) -> None:
        super().__init__(root)
        self._until = until
        self._hang = call, prefix
        self._left = after
        self.is_armed = is_armed

    def _meets(self, call: str, key: str) -> bool:
        if not self.is_armed or (call, key[: len(self._hang[1])]) != self._hang:
            return False
        self._left -= 1
        return self._left < 0

    def _stop(self, key: str) -> None:
        _say(self.root, hanging=key)
        while not (self._until and os.path.exists(self._until)):
            time.sleep(0.1)

    def stage(self, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        if "/lease-" not in key and self._meets("stage", key):
            if not self._until:
                data = b"".join(bytes(p) for p in pieces)
                super().stage(key, [data[: len(data) // 2]], sync=sync)
            self._stop(key)
        return super().stage(key, pieces, sync=sync)

    def place(self, staged: str, key: str) -> None:
        if self._meets("place", key):
            self._stop(key)
        super().place(staged, key)

    def sync_folders(self, keys: Iterable[str], known: dict[str, None] | None = None) -> None:
        found = list(keys)
        if any(self._meets("sync_folders", key) for key in found):
            self._stop(found[0])
        super().sync_folders(found, known)

    def move(self, source: str, target: str, *, parents: bool = True, sync: bool = True) -> bool:
        if self._meets("move", source):
            self._stop(source)
        return super().move(source, target, parents=parents, sync=sync)

    def delete_tree(self, key: str) -> None:
        if self._meets("delete_tree", key):
            self._stop(key)
        super().delete_tree(key)


def _region(how: dict[str, Any], comm: Any) -> dict[str, tuple[int, int]] | None:
    """Return rows whose edges lie within shards, if the job is to rearrange."""
    if not how.get("rearranged") or comm.size == 1:
        return None
    edges = {2: [3], 3: [1, 5], 4: [1, 3, 5]}[comm.size]
    bounds = [0, *edges, SCENE.sizes["y"]]
    return {"y": (bounds[comm.rank], bounds[comm.rank + 1])}


def _open(url: str, how: dict[str, Any], comm: Any) -> tuple[ms.StreamWriter, LocalStore]:
    options = ms.Options(**{"timeout": 30, "exit_timeout": 5, **how.get("options", {})})
    region = _region(how, comm)
    hang = dict(how.get("hang", {}))
    store = LocalStore(url)
    if hang and hang.pop("rank") == comm.rank:
        store = HangingStore(url, is_armed=not how.get("arm_at"), **hang)
    if how.get("create", not os.path.exists(f"{url}/.mpistream/manifest.json")):
        schema = SCENE.schema(shard_shape=SHARD, chunk_shape=CHUNK)
        return ms.write_open(store, schema, comm=comm, region=region, options=options), store  # type: ignore[arg-type]
    return ms.write_resume(store, comm=comm, region=region, at=how.get("at"), options=options), store  # type: ignore[arg-type]


def main() -> None:
    """Run the job that the command line describes."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    url, n_records, how = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}")
    # The inner chunks here are small; threads are to encode them all the same.
    mpistream.rank_writer._MIN_BACKGROUND_NBYTES = 0
    comm.Barrier()
    w, store = _open(url, how, comm)
    if comm.rank == 0:
        statics = w.reader.manifest.statics
        stray = keys(url) ^ SCENE.keys(w.n_records, SHARD, statics=statics)
        stage = sorted(os.listdir(Path(url) / ".mpistream/stage"))
        _say(url, opened=w.n_records, epoch=w.epoch, stray=sorted(stray), stage=stage)
    while how.get("only_open"):
        time.sleep(1)
    if not w.is_committed("topo"):
        SCENE.write_statics(w)
    while w.n_records < n_records:
        if isinstance(store, HangingStore) and w.n_records >= how.get("arm_at", 0):
            store.is_armed = True
        SCENE.write(w, w.n_records, how.get("run", 0))
        time.sleep(how.get("pause", 0))
        if w.n_records % how.get("every", 1) == 0:
            receipt = w.commit(wait=how.get("wait", True))
            if comm.rank == 0:
                _say(url, committed=receipt.n_records)
    w.close()
    if comm.rank == 0:
        _say(url, closed=w.n_committed)


if __name__ == "__main__":
    main()

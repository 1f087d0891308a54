#!/usr/bin/env python3
"""What the decision of a commit costs rank 0, with made-up tokens of very many writers.

For 1,000 to 1,000,000 writers, each in a process of its own: the bytes of their tokens as they are gathered, the time
to take these apart, the time of ``decide()``, and the largest memory of the process, all of it included: the epoch,
the tokens and their text. No communication and no disk takes part, so the times are those of the processor.

Run as ``ci/bench/scale.py``. It ends with 1 when ``decide()`` of the largest number takes more than 3 s or 2 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from mpistream.commit import decide
from mpistream.epoch import EpochState
from mpistream.layout import resolve_layout
from mpistream.manifest import Manifest
from mpistream.region import Region
from mpistream.schema import AppendTime, StreamSchema, Variable
from mpistream.token import CommitToken, times_sha256

WRITERS = (1_000, 10_000, 100_000, 1_000_000)
MAX_SECONDS, MAX_NBYTES = 3.0, 2 * 10**9
TIMES = [10.0]


def stream_of(n: int) -> tuple[Manifest, EpochState]:
    """Return a state and an epoch of so many writers, each with one shard of one row of cells."""
    schema = resolve_layout(
        StreamSchema(
            dims={"time": None, "y": n, "x": 16},
            time=AppendTime(units="s"),
            variables={name: Variable(("time", "y", "x"), "float32") for name in ("u", "v", "w")},
            shard_shape={"time": 1, "y": 1, "x": 16},
        ),
        1,
    )
    manifest = Manifest.first(store_id="0" * 32, run_id="1" * 32, epoch=1, schema=schema, layout_digest="2" * 64)
    boxes = [(((i, i + 1), (0, 16)),) for i in range(n)]
    regions = tuple(Region(("y", "x"), b) for b in boxes)
    counts = (16,) * n
    return manifest, EpochState(
        regions=regions, boxes=dict.fromkeys("uvw", boxes), n_cells=dict.fromkeys("uvw", counts)
    )


def text_of(manifest: Manifest, epoch: EpochState, writer: int) -> str:
    return CommitToken(
        store_id=manifest.store_id,
        run_id=manifest.run_id,
        fingerprint=manifest.fingerprint,
        epoch=manifest.epoch,
        base_seq=manifest.commit_seq,
        writer=writer,
        records=((0, 1),),
        last_t=TIMES[-1],
        times_sha256=times_sha256(TIMES),
        n_cells=dict.fromkeys("uvw", 16),
        statics={},
        n_blobs=0,
        n_packs=0,
        region=epoch.regions[writer],
        n_objects=3,
        nbytes=200 + writer % 1000,
    ).to_text()


def measured(n: int) -> dict[str, Any]:
    """Return what the tokens of so many writers cost."""
    manifest, epoch = stream_of(n)
    texts = [text_of(manifest, epoch, writer).encode() for writer in range(n)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.process_time()
    tokens = [CommitToken.from_text(text.decode()) for text in texts]
    parsed = time.process_time()
    decision = decide(manifest, epoch, tokens, TIMES)
    decided = time.process_time()
    assert decision.receipt is not None, decision.faults[:3]
    assert decision.receipt.n_objects == 3 * n
    return {
        "writers": n,
        "gathered": sum(map(len, texts)),
        "parse": parsed - began,
        "decide": decided - parsed,
        "before": before,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, nargs="+", default=WRITERS)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # one number, in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one)))
        return 0
    found = []
    print(f"{'writers':>10} {'gathered':>12} {'taken apart':>12} {'decide()':>10} {'peak memory':>12}")
    for n in arguments.writers:
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(n)], check=True, stdout=subprocess.PIPE, text=True, timeout=1200
        )
        row = json.loads(done.stdout)
        found.append(row)
        print(
            f"{n:10d} {row['gathered'] / 1e6:9.1f} MB {row['parse']:10.2f} s {row['decide']:8.2f} s "
            f"{row['peak'] / 1e6:9.0f} MB"
        )
    print(json.dumps({"benchmark": "scale", "rows": found}))
    return 0 if found[-1]["decide"] <= MAX_SECONDS and found[-1]["peak"] <= MAX_NBYTES else 1


if __name__ == "__main__":
    sys.exit(main())

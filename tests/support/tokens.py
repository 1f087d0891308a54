"""A committed state and what the writers of its next commit say when all went well."""

from __future__ import annotations

from dataclasses import replace

import mpistream as ms
from mpistream.epoch import EpochState, prove_epoch
from mpistream.manifest import Manifest, add_times
from mpistream.ranges import Ranges, count
from mpistream.region import Region
from mpistream.token import CommitToken, times_sha256
from tests.support.streams import resolved

__all__ = ["BASE", "EPOCH", "HOLES", "REGIONS", "SCHEMA", "TIMES", "ZEROS", "right_tokens"]

ZEROS = "0" * 64
DIMS = ("y", "x")
SCHEMA = resolved()
REGIONS = [Region.of_box(DIMS, ((0, 8), (0, 3))), Region.of_box(DIMS, ((0, 8), (3, 6))), Region.empty(DIMS)]
EPOCH = prove_epoch(SCHEMA, REGIONS)
# Two records are committed.
BASE = replace(
    Manifest.first(store_id="store", run_id="run", epoch=4, schema=SCHEMA, layout_digest="d"),
    committed=((0, 2),),
    last_t=1.5,
    times_digest=add_times(ZEROS, enumerate([0.5, 1.5])),
    commit_seq=9,
    first_seq=7,
)
TIMES = [2.5, 3.5, 4.5]
# Indexed mode: ten records, of which 2 to 4 and 7 are committed.
INDEXED = resolved(time=ms.IndexedTime([float(i) for i in range(10)], units="s"))
HOLES = replace(
    Manifest.first(store_id="store", run_id="run", epoch=4, schema=INDEXED, layout_digest="d"),
    committed=((2, 5), (7, 8)),
    last_t=7.0,
    times_digest=add_times(ZEROS, [(i, float(i)) for i in (2, 3, 4, 7)]),
    commit_seq=9,
)


def right_tokens(
    manifest: Manifest,
    epoch: EpochState,
    times: list[float],
    statics: tuple[str, ...] = (),
    records: Ranges | None = None,
) -> list[CommitToken]:
    """What every writer says when all went well: cells by the arithmetic of its own box.

    Without ``records`` they are the next ones behind those that are committed.
    """
    if records is None:
        start = count(manifest.committed)
        records = ((start, start + len(times)),) if times else ()
    n, last_t = len(times), times[-1] if times else manifest.last_t
    return [
        CommitToken(
            store_id=manifest.store_id,
            run_id=manifest.run_id,
            fingerprint=manifest.fingerprint,
            epoch=manifest.epoch,
            base_seq=manifest.commit_seq,
            writer=writer,
            records=records,
            last_t=last_t,
            times_sha256=times_sha256(times),
            n_cells={a.name: n * epoch.n_cells[a.name][writer] for a in manifest.schema.arrays.values() if a.has_time},
            statics={name: epoch.n_cells[name][writer] for name in statics},
            n_blobs=writer,
            n_packs=int(writer > 0),
            region=region,
            n_objects=10 + writer,
            nbytes=1000 * (writer + 1),
        )
        for writer, region in enumerate(epoch.regions)
    ]

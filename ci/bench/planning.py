"""What planning costs for many ranks, without MPI:  python ci/bench/planning.py

100,000 ranks hold boxes of a grid of 40,000 x 20,000 x 100 float32 (298 GiB a record), 128 ranks a node. Printed is the
plan for writers="all" and "node" where the layout is chosen, the time that rank 0 needs for it, and the bytes that it
sends to a rank. Then the plan for 10,000 ranks, 50 variables and 10,000 records, with shards of about 64 MiB on edges
that the boxes don't have. Then 20,000 ranks with boxes as a load balancer makes them, of a grid of 1,000 x 4,000 x
4,000, and a second variable over y and x alone: the shadows of their boxes overlap. The last line is JSON.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from typing import Any

import mpistream as ms
from mpistream.decomposition import settle
from mpistream.plan import plan_of

SIZES = {"z": 100, "y": 40_000, "x": 20_000}
PER_NODE = 128


def schema_of(n_variables: int, **layout: Any) -> ms.StreamSchema:
    return ms.StreamSchema(
        dims={"time": None, **SIZES},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={f"v{i}": ms.Variable(("time", *SIZES), "float32") for i in range(n_variables)},
        **layout,
    )


def boxes(n_y: int, n_x: int) -> list[ms.Region]:
    """Return n_y x n_x columns, as even as they go."""
    ny, nx = SIZES["y"], SIZES["x"]
    return [
        ms.Region(SIZES, [((0, 100), (i * ny // n_y, (i + 1) * ny // n_y), (k * nx // n_x, (k + 1) * nx // n_x))])
        for i in range(n_y)
        for k in range(n_x)
    ]


def bisected(rng: random.Random, box: tuple[tuple[int, int], ...], n: int) -> list[tuple[tuple[int, int], ...]]:
    """Return n boxes of about the same size: the longest side is cut near its middle, again and again."""
    if n == 1:
        return [box]
    dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])
    start, stop = box[dim]
    cut = start + max(1, min(stop - start - 1, round((stop - start) * (n // 2) / n * rng.uniform(0.9, 1.1))))
    sides = [(*box[:dim], side, *box[dim + 1 :]) for side in ((start, cut), (cut, stop))]
    return bisected(rng, sides[0], n // 2) + bisected(rng, sides[1], n - n // 2)


def shadows(n_ranks: int) -> tuple[ms.StreamSchema, list[ms.Region]]:
    """Return a stream of a volume and a plane, and boxes of the volume."""
    sizes = {"z": 1000, "y": 4000, "x": 4000}
    schema = ms.StreamSchema(
        dims={"time": None, **sizes},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={
            "volume": ms.Variable(("time", *sizes), "float32"),
            "plane": ms.Variable(("time", "y", "x"), "float32"),
        },
    )
    boxes = bisected(random.Random(1), tuple((0, n) for n in sizes.values()), n_ranks)
    return schema, [ms.Region(sizes, [box]) for box in boxes]


def planned(schema: ms.StreamSchema, regions: list[ms.Region], writers: str) -> dict[str, Any]:
    nodes = [str(rank // PER_NODE) for rank in range(len(regions))]
    began = time.perf_counter()
    resolved, epoch = settle(schema, regions, nodes, writers=writers, rearrange="auto")
    cost = plan_of(resolved, epoch, nodes, writers=writers)
    shares = epoch.shares()
    seconds = time.perf_counter() - began
    sizes = [len(json.dumps(share.to_json())) for share in shares[:: max(len(shares) // 100, 1)]]
    print(f'{len(regions)} ranks, writers="{writers}": {cost}')
    print(f"  planned in {seconds:.1f} s on rank 0, {max(sizes)} bytes to a rank")
    print(f"  {cost.n_objects(10_000)} objects in 10,000 records")
    for warning in cost.warnings:
        print(f"  {warning}")
    return {
        "ranks": len(regions),
        "variables": len(resolved.variables),
        "writers": writers,
        "seconds": round(seconds, 2),
        "nbytes_to_a_rank": max(sizes),
        "n_writers": cost.n_writers,
        "objects_per_record": cost.n_objects_per_record,
        "moved_share": round(cost.nbytes_moved_per_record / cost.nbytes_per_record, 3),
        "object_nbytes": cost.max_object_nbytes,
        "node_memory_nbytes": cost.node_memory_nbytes,
    }


def main() -> int:
    many, fewer = boxes(400, 250), boxes(100, 100)
    given = schema_of(50, **ms.suggest_layout(SIZES, n_ranks=4096))
    found = [planned(schema_of(1), many, writers) for writers in ("all", "node")]
    found += [planned(given, fewer, writers) for writers in ("all", "node")]
    found.append(planned(*shadows(20_000), "node"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory of this process: {peak / 2**30:.2f} GiB")
    print(json.dumps({"benchmark": "planning", "plans": found, "peak_nbytes": peak}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

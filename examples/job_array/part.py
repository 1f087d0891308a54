"""One part of a store that independent processes write, without MPI: a wave in a channel, a band of rows a part.

    sbatch --array=0-3 --wrap "python part.py wave.zarr --parts 4"
    sbatch --dependency=afterok:<job> --wrap "mpistream commit wave.zarr wave.zarr.tokens/*.json"

Each task writes its region and drops a token beside the store; all tokens together are committed at once.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np

import mpistream as ms

NX, NY, ROWS = 96, 64, 4  # a shard has so many rows, so there may be at most 16 parts


def wave(t: float, start: int, stop: int) -> np.ndarray:
    """Return the height of the surface in some rows at a time."""
    y, x = np.mgrid[start:stop, 0:NX]
    return np.sin(2.0 * np.pi * (x / NX - t / 12.0)) * np.cos(np.pi * y / NY)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write one part of a store.")
    parser.add_argument("url", help="folder of the store, the same for all parts")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    parser.add_argument(
        "--part", type=int, default=task, required=task is None, help="number of this part (default: the array task)"
    )
    parser.add_argument("--parts", type=int, required=True, help="number of parts")
    parser.add_argument("--records", type=int, default=6, help="number of records")
    parser.add_argument("--wait", type=float, default=3600.0, help="seconds to wait for part 0 to create the store")
    args = parser.parse_args()

    schema = ms.StreamSchema(
        dims={"time": None, "y": NY, "x": NX},
        time=ms.AppendTime(units="hours since 2000-01-01"),
        variables={"height": ms.Variable(("time", "y", "x"), "float64", attrs={"units": "m"})},
        shard_shape={"time": 12, "y": ROWS, "x": NX},
    )
    options = ms.Options(timeout=args.wait)  # tasks of an array may start hours apart
    with ms.write_open_part(args.url, schema, writer=args.part, n_writers=args.parts, options=options) as w:
        start, stop = w.region["y"]
        for record in range(args.records):
            w.write_record(float(record), {"height": wave(record, start, stop)})
        token = w.flush()  # everything is in place and durable; committed it is only with all tokens

    tokens = Path(f"{args.url}.tokens")
    tokens.mkdir(exist_ok=True)
    half = tokens / f"part-{args.part}.tmp"
    half.write_text(json.dumps(token.to_json()))
    half.rename(tokens / f"part-{args.part}.json")  # whoever collects the tokens finds whole ones only


if __name__ == "__main__":
    main()

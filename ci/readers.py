"""Read every golden store with every reader, and print what came back as it was written; see ci/readers.

What was written is what mpistream's own reader says, which tests/conformance/test_golden.py holds against closed forms.
Each reader runs in a process of its own: one that crashes on a store must not take the table with it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "golden"
SECONDS = 120
# Readers that must read everything, but for what they have no data type for.
MUST = {"zarr-python": "", "zarr-python with zarrs": "", "xarray": "", "tensorstore": "data_type"}

Read = Callable[[Path, str], NDArray[Any]]


def written(store: Path) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """Return the arrays of a store, decoded by mpistream, and the records that are committed.

    Of arrays with time they hold those records only: what stands in others is nobody's.
    """
    import mpistream as ms

    found = {}
    with ms.open_reader(store) as reader:
        records = [i for start, stop in reader.committed for i in range(start, stop)]
        for path, node in reader.hierarchy().items():
            if (
                node.kind == "array"
                and path != "time"
                and "time" in (node.dims or ())
                and path in reader.schema.variables
            ):
                found[path] = np.stack([reader.read_record(path, i) for i in records])
            elif node.kind == "array":
                found[path] = reader.read_array(path)
    # Readers that decode no times see the integers that are stored.
    return {name: a.view("int64") if a.dtype.kind in "mM" else a for name, a in found.items()}, records


def with_zarr(store: Path, name: str) -> NDArray[Any]:
    import zarr

    return np.asarray(zarr.open_group(store, mode="r")[name][...])


def with_zarrs(store: Path, name: str) -> NDArray[Any]:
    import zarr

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    return with_zarr(store, name)


def with_xarray(store: Path, name: str) -> NDArray[Any]:
    import xarray as xr

    with xr.open_zarr(store, consolidated=True, chunks=None, mask_and_scale=False, decode_times=False) as dataset:
        return np.asarray(dataset[name].values)


def with_tensorstore(store: Path, name: str) -> NDArray[Any]:
    import tensorstore as ts

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{store / name}/"}}
    return np.asarray(ts.open(spec, read=True).result().read().result())


def with_netcdf(store: Path, name: str) -> NDArray[Any]:
    import netCDF4

    with netCDF4.Dataset(f"file://{store}#mode=zarr,file") as dataset:
        dataset.set_auto_mask(False)
        dataset.set_auto_scale(False)
        return np.asarray(dataset[name][...])


def with_gdal(store: Path, name: str) -> NDArray[Any]:
    import rasterio

    with rasterio.open(f'ZARR:"{store}":/{name}') as dataset:
        bands = dataset.read()
    return np.asarray(bands if len(bands) > 1 else bands[0])


READERS: dict[str, tuple[Read, Callable[[], str]]] = {
    "zarr-python": (with_zarr, lambda: metadata.version("zarr")),
    "zarr-python with zarrs": (with_zarrs, lambda: metadata.version("zarrs")),
    "xarray": (with_xarray, lambda: metadata.version("xarray")),
    "tensorstore": (with_tensorstore, lambda: metadata.version("tensorstore")),
    "netCDF-C (nczarr)": (with_netcdf, lambda: __import__("netCDF4").__netcdf4libversion__),
    "GDAL": (with_gdal, lambda: __import__("rasterio").__gdal_version__),
}


def compare(reader: str, store: Path) -> dict[str, str]:
    """Return array -> what is wrong with it, empty where every bit is as it was written."""
    read, _ = READERS[reader]
    found = {}
    arrays, records = written(store)
    for name, expected in arrays.items():
        try:
            got = read(store, name)
            if got.ndim and expected.ndim and len(got) > len(expected) == len(records):
                got = got[records]
        except Exception as error:  # noqa: BLE001 (whatever a reader says is its answer)
            found[name] = f"{type(error).__name__}: {error}".replace(str(store), store.name)
        else:
            found[name] = "" if is_same(got, expected) else f"{got.dtype} {got.shape}, other values"
    return found


def is_same(got: NDArray[Any], expected: NDArray[Any]) -> bool:
    if expected.dtype.kind in "OTUS" or got.dtype.kind in "OTUS":
        return bool(got.shape == expected.shape and [str(v) for v in got.flat] == [str(v) for v in expected.flat])
    return bool(got.shape == expected.shape and got.dtype == expected.dtype and got.tobytes() == expected.tobytes())


def in_its_own_process(reader: str, store: Path) -> dict[str, str] | str:
    command = [sys.executable, __file__, "--reader", reader, "--store", store]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end after {SECONDS} s"
    if done.returncode != 0:
        return f"ended with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader:
        print(json.dumps(compare(arguments.reader, arguments.store)))
        return 0
    stores = sorted(GOLDEN.glob("*.zarr"))
    print("| reader | " + " | ".join(s.stem for s in stores) + " |")
    print("|---|" + "---|" * len(stores))
    notes: dict[str, list[str]] = {}
    is_good = True
    for reader, (_, version) in READERS.items():
        cells = []
        for store in stores:
            found = in_its_own_process(reader, store)
            wrong = {found: ["all"]} if isinstance(found, str) else {}
            if not isinstance(found, str):
                for name, text in found.items():
                    if text:
                        wrong.setdefault(text, []).append(name)
            n = 0 if isinstance(found, str) else sum(not text for text in found.values())
            cells.append("all" if not wrong else f"{n} of {'?' if isinstance(found, str) else len(found)}")
            for text, names in wrong.items():
                notes.setdefault(reader, []).append(f"{store.stem}: {', '.join(names)}: {text}")
            is_good &= reader not in MUST or all(MUST[reader] and MUST[reader] in text for text in wrong)
        print(f"| {reader} {version()} | " + " | ".join(cells) + " |", flush=True)
    for reader, texts in notes.items():
        print(f"\n{reader}:")
        for text in texts:
            print(f"* {text}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

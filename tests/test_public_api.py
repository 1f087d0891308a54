"""What the package offers, and what importing it loads."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import mpistream
import mpistream.errors

NAMES = [
    "AlignmentError",
    "AppendTime",
    "CheckpointPair",
    "CommitError",
    "CommitReceipt",
    "CommitToken",
    "Coordinate",
    "Exported",
    "FencedError",
    "FormatError",
    "HDF5Reader",
    "IndexedTime",
    "Indices",
    "LocationSeriesWriter",
    "MPIStreamError",
    "Node",
    "Options",
    "PartWriter",
    "Plan",
    "PreemptionGuard",
    "ProtocolError",
    "Region",
    "ResumeError",
    "SchemaError",
    "Staggered",
    "StoreError",
    "StoreReader",
    "StreamSchema",
    "StreamWriter",
    "TilingError",
    "Variable",
    "__version__",
    "chunk_locations",
    "commit_all",
    "commit_tokens",
    "decompose",
    "export",
    "location_schema",
    "open_hdf5",
    "open_reader",
    "plan",
    "read_blob",
    "read_output_manifest",
    "read_record",
    "read_static",
    "repair",
    "schema_fingerprint",
    "suggest_layout",
    "truncate",
    "verify",
    "write_open",
    "write_open_locations",
    "write_open_part",
    "write_resume",
]


def test_public_names() -> None:
    assert sorted(mpistream.__all__) == NAMES


def test_public_names_exist() -> None:
    assert [name for name in NAMES if not hasattr(mpistream, name)] == []


def test_every_error_is_public() -> None:
    errors = {
        name
        for name, value in vars(mpistream.errors).items()
        if isinstance(value, type) and issubclass(value, mpistream.errors.MPIStreamError)
    }
    assert sorted(errors - set(mpistream.__all__)) == []


def test_star_import_brings_nothing_else() -> None:
    code = "from mpistream import *; print(*sorted(n for n in dir() if n[:2] != '__' or n == '__version__'))"
    assert in_a_new_python(code).split() == NAMES


def test_import_loads_nothing_heavy() -> None:
    """Thousands of ranks import the package at once, and every file that one opens costs the file system."""
    heavy = ["mpi4py.MPI", "zarr", "h5py", "typer", "rich", "xarray", "pandas", "cftime", "matplotlib", "asyncio"]
    code = f"import mpistream, sys; print(*(m for m in {heavy} if m in sys.modules))"
    assert in_a_new_python(code).split() == []


def test_version_is_that_of_the_project() -> None:
    root = Path(__file__).parents[1]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["version"]["path"] == "mpistream/_version.py"
    assert mpistream.__version__ == "0.1.0"


def in_a_new_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout

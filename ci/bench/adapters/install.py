"""The environment of the peers: a venv below `.peers`, and h5py with MPI from Debian. Made once, then kept.

A package that can't be installed is named with the reason; what does not need it goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rearrange import DEBIAN_PYTHON, why_no_hdf5

ROOT = Path(__file__).parents[3]
HOME = ROOT / ".peers"
VENV = HOME / "venv"

# What the limit and mpistream need, too; without them nothing can be measured.
BASE = ["numpy", "numcodecs", "google-crc32c", "zarr", "mpi4py", "mpich"]
PEERS = ["zarrs", "tensorstore", "icechunk", "adios2", "acquire-zarr"]
PLUGIN = "hdf5plugin"

_SECONDS = 600


def say(text: str) -> None:
    print(f"peers: {text}", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    """Return this process's, without what would bring other packages in; each rank gets one thread of BLAS."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**kept, **settings, "PIP_ROOT_USER_ACTION": "ignore"}


def pip(*arguments: str) -> str | None:
    """Return None, or why pip failed."""
    command = [str(VENV / "bin/python"), "-m", "pip", "install", "--quiet", *arguments]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_SECONDS, env=environment(), cwd=HOME
        )
    except subprocess.TimeoutExpired:
        return f"pip did not end within {_SECONDS} s"
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or done.stderr.splitlines() or ["pip failed without a word"])[-1].strip()


def make(*, is_fresh: bool) -> dict[str, str]:
    """Return package -> why it is missing; make the venv if it is not there, or not for this list of packages."""
    HOME.mkdir(exist_ok=True)
    key = json.dumps([sys.version, BASE, PEERS, PLUGIN, str(HOME)])
    stamp = HOME / "made.json"
    with open(HOME / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_fresh and stamp.exists():
            found = json.loads(stamp.read_text())
            if found["key"] == key:
                return dict(found["missing"])
        say(f"installing into {VENV}")
        stamp.unlink(missing_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True, timeout=_SECONDS)
        reason = pip(*BASE)
        if reason is not None:
            raise SystemExit(f"{', '.join(BASE)}: {reason}")
        missing = {package: reason for package in PEERS if (reason := pip(package)) is not None}
        # For Debian's Python: beside the venv, and without h5py from PyPI, which has no MPI.
        reason = pip("--no-deps", "--upgrade", "--target", str(HOME / PLUGIN), PLUGIN)
        if reason is not None:
            missing[PLUGIN] = reason
        stamp.write_text(json.dumps({"key": key, "missing": missing, "made": time.strftime("%Y-%m-%d")}))
        return missing


def without_hdf5() -> str | None:
    """Return why there is no h5py with MPI."""
    return why_no_hdf5()


def versions() -> dict[str, str]:
    """Return package -> version, of what is there."""
    code = (
        "import json, sys; from importlib.metadata import version, PackageNotFoundError\nfound = {}\n"
        "for name in sys.argv[1:]:\n    try: found[name] = version(name)\n    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )

    def ask(python: str, names: list[str], **more: str) -> dict[str, Any]:
        done = subprocess.run(
            [python, "-c", code, *names],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env={**environment(), **more},
        )
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    found = ask(str(VENV / "bin/python"), [*BASE, *PEERS])
    debian = ask(DEBIAN_PYTHON, ["h5py", PLUGIN], PYTHONPATH=str(HOME / PLUGIN))
    return {"python": sys.version.split()[0], **found, **debian}

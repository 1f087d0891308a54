"""The example that is there to be read runs as its first lines say, and goes on where it was stopped."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from tests.support.mpi_run import mpiexec, start_mpiexec
from tests.support.wait import wait_until

HEAT = Path(__file__).parents[2] / "examples" / "heat.py"


def constants(path: Path) -> dict[str, Any]:
    """Return the literal constants of a script, which can't be imported here: it would start MPI."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            (target,) = node.targets
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            found |= {n.id: v for n, v in zip(names, value if len(names) > 1 else [value], strict=True)}  # type: ignore[attr-defined]
    return found


def n_committed(url: Path) -> int:
    try:
        return ms.open_reader(url).n_records
    except ms.FormatError as error:
        if error.kind != "no_manifest":  # not there yet
            raise
        return 0


def diffused(plate: NDArray[np.float64], n_steps: int) -> NDArray[np.float64]:
    """Let heat spread over a whole plate whose rim stays at 280 K (explicit scheme in five points, number 0.2)."""
    field = np.pad(plate, 1, constant_values=280.0)
    for _ in range(n_steps):
        around = field[1:-1, :-2] + field[1:-1, 2:] + field[:-2, 1:-1] + field[2:, 1:-1]
        field[1:-1, 1:-1] += 0.2 * (around - 4.0 * field[1:-1, 1:-1])
    return field[1:-1, 1:-1].copy()


@pytest.mark.slow
def test_heat_goes_on_after_a_kill_and_ends_at_once_when_it_is_done(tmp_path: Path) -> None:
    """Killed on 2 ranks, started again and then once more, it has every record once, as a serial model computes it."""
    xarray = pytest.importorskip("xarray", reason="needs xarray")
    heat = constants(HEAT)
    n, n_steps = heat["N_RECORDS"], heat["STEPS_PER_RECORD"]
    url = tmp_path / "heat.zarr"
    command: list[str | Path] = ["-m", "mpi4py", HEAT, url]

    with start_mpiexec(2, command) as job:
        wait_until(lambda: n_committed(url) >= 2 * heat["RECORDS_PER_COMMIT"], 120, "two commits")
        job.kill_ranks()
        assert job.wait(60) != 0
    n_kept = n_committed(url)
    assert n_kept < n

    mpiexec(2, command, timeout=180)
    data = xarray.open_zarr(url, decode_times=False)
    assert data.sizes == {"time": n, "y": heat["N"], "x": heat["N"]}
    np.testing.assert_array_equal(data["time"], np.arange(1, n + 1) * n_steps)
    assert ms.open_reader(url).manifest.epoch == 2

    # The first record, the one after the kill, and the last: each is what its predecessor becomes.
    first = np.full((heat["N"], heat["N"]), 280.0)
    first[200:260, 100:300] = 400.0
    temperature = data["temperature"]
    for i in {0, n_kept, n - 1}:
        before = first if i == 0 else temperature[i - 1].values
        np.testing.assert_array_equal(temperature[i].values, diffused(before, n_steps), err_msg=f"record {i}")

    shards = sorted((p, p.stat().st_mtime_ns) for p in (url / "temperature" / "c").rglob("*") if p.is_file())
    again = mpiexec(2, command, timeout=60)
    assert (again.stdout, again.stderr) == ("", "")
    assert sorted((p, p.stat().st_mtime_ns) for p, _ in shards) == shards
    assert ms.open_reader(url).n_records == n

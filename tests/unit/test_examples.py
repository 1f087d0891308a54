"""The examples that are there to be read run as their first lines say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from tests.support.mpi_run import mpiexec, start_mpiexec
from tests.support.wait import wait_until

HEAT = Path(__file__).parents[2] / "examples" / "heat.py"
ENSEMBLE = HEAT.with_name("ensemble.py")
BUCKETS = HEAT.with_name("buckets.py")


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


def lorenz_means(forcing: float, n: int, n_records: int, n_steps: int, dt: float) -> NDArray[np.float64]:
    """Integrate Lorenz' ring of 1996, site by site, with midpoint steps; return the mean state of each record."""

    def slope(x: list[float]) -> list[float]:
        return [(x[(i + 1) % n] - x[i - 2]) * x[i - 1] - x[i] + forcing for i in range(n)]

    x = [forcing + 0.01, *[forcing] * (n - 1)]
    means = []
    for _ in range(n_records):
        states = []
        for _ in range(n_steps):
            half = [a + 0.5 * dt * b for a, b in zip(x, slope(x), strict=True)]
            x = [a + dt * b for a, b in zip(x, slope(half), strict=True)]
            states.append(x)
        means.append(np.mean(states, axis=0))
    return np.array(means)


@pytest.mark.parametrize("n_ranks", [0, 7], ids=["without mpiexec", "more ranks than members"])
def test_ensemble_has_every_member_under_its_name(tmp_path: Path, n_ranks: int) -> None:
    """Without and with MPI: members by name, intervals that touch, and what a serial model computes."""
    xarray = pytest.importorskip("xarray", reason="needs xarray")
    ensemble = constants(ENSEMBLE)
    n_steps, dt = ensemble["STEPS_PER_RECORD"], ensemble["DT"]
    url = tmp_path / "ensemble.zarr"
    if n_ranks:
        mpiexec(n_ranks, ["-m", "mpi4py", ENSEMBLE, url], timeout=100)
    else:
        subprocess.run([sys.executable, ENSEMBLE, url], check=True, timeout=100)

    data = xarray.open_zarr(url)
    assert list(data["member"].values) == list(ensemble["FORCINGS"])
    assert data["x"].dims == ("time", "member", "site")
    assert data["x"].coords["model"].item() == "Lorenz 96"
    for name in ("weakest", "control", "stronger"):
        expected = lorenz_means(ensemble["FORCINGS"][name], ensemble["N"], ensemble["N_RECORDS"], n_steps, dt)
        np.testing.assert_allclose(data["x"].sel(member=name), expected, rtol=1e-6)
    bounds = data["time_bnds"].values
    assert (bounds[:-1, 1] == bounds[1:, 0]).all()
    days = (bounds - np.datetime64("2000-01-01")) / np.timedelta64(1, "D")
    np.testing.assert_allclose(days[:, 1], np.arange(1, ensemble["N_RECORDS"] + 1) * n_steps * dt)


@pytest.mark.slow
def test_buckets_go_on_after_a_kill(tmp_path: Path) -> None:
    """Killed on 2 ranks and resumed on 3, the gauges have bitwise what one process gives, found by their ids."""
    xarray = pytest.importorskip("xarray", reason="needs xarray")
    buckets = constants(BUCKETS)
    n, n_steps = buckets["N_LOCATIONS"], buckets["N_STEPS"]
    url, alone = tmp_path / "buckets.zarr", tmp_path / "alone.zarr"
    subprocess.run([sys.executable, BUCKETS, alone], check=True, timeout=100)

    def n_there() -> int:
        return sum(b - a for a, b in ms.open_reader(url).committed) if n_committed(url) else 0

    with start_mpiexec(2, ["-m", "mpi4py", BUCKETS, url]) as job:
        wait_until(lambda: n_there() >= 2 * buckets["LOCATIONS_PER_COMMIT"], 120, "a commit")
        job.kill_ranks()
        assert job.wait(60) != 0
    assert n_there() < n
    mpiexec(3, ["-m", "mpi4py", BUCKETS, url], timeout=100)

    found, expected = xarray.open_zarr(url), xarray.open_zarr(alone)
    assert found["committed"].values.all()
    for name in ("rain", "storage", "flow"):
        assert found[name].values.tobytes() == expected[name].values.tobytes()
    gauge = found.sel(id="cat-4711")
    state, drained = 0.0, float((gauge["flow"] / gauge["storage"]).mean())
    for t in range(n_steps):
        state = (1 - drained) * state + float(gauge["rain"][t])
    np.testing.assert_allclose(gauge["storage"][-1], state, rtol=1e-5)
    assert 46 < gauge["lat"].item() < 48


def test_tests_of_a_model_run_and_find_what_differs(tmp_path: Path) -> None:
    """The template passes on two ranks; where the output depends on the ranks it fails, and says where."""
    template = HEAT.with_name("testing") / "test_model.py"
    call = ("-m", "mpi4py", "-m", "pytest", "-q", "--with-mpi", "--color=no", "-p", "no:cacheprovider")
    done = mpiexec(2, (*call, template))
    assert "2 passed" in done.stdout
    broken = tmp_path / "test_broken.py"
    broken.write_text(template.read_text().replace("np.cos(0.1 * x)", "np.cos(0.1 * x) + (comm.size > 1)"))
    # Not on top of this project's settings, which end the whole job at a failure.
    done = mpiexec(2, (*call, "-c", "/dev/null", "--rootdir", tmp_path, broken), expect=None)
    assert "1 failed, 1 passed" in done.stdout
    assert "height: first at record 0, y[0] x[0]: 1.0 and 0.0; 11520 cells differ" in done.stdout


def test_examples_say_how_they_are_called(tmp_path: Path) -> None:
    """Started without arguments, in one line and with exit code 1; nothing is written."""
    scripts = [HEAT, ENSEMBLE, BUCKETS, HEAT.parent / "slurm/model.py"]
    how = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen([sys.executable, script], **how) for script in scripts]  # type: ignore[call-overload]
    for script, job in zip(scripts, jobs, strict=True):
        _, said = job.communicate(timeout=60)
        assert (job.returncode, said.count("\n")) == (1, 1)
        assert said.startswith("usage: mpiexec -n 4 python -m mpi4py ")
        assert script.name in said
    assert list(tmp_path.iterdir()) == []

"""Kill a simulation, resume it on fewer ranks, and compare it with one that ran through. See ci/demo."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import zarr
from numpy.typing import NDArray

import mpistream as ms

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import LightSource, LinearSegmentedColormap

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "demo-output"
N_RECORDS = 48
N_COMMITTED, N_WRITTEN = 20, 22  # records when the ranks are killed, between two commits in mid-row
RUN_DEADLINE = 240.0  # s, of each of the three runs: far more than they need


class DemoError(Exception):
    """The demo can't go on; the message is all that there is to say."""


class Simulation:
    """One mpiexec of the tsunami, in a process group of its own; its lines are shown as they come."""

    def __init__(self, name: str, n_ranks: int, *more: str) -> None:
        self.n_ranks, self._name = n_ranks, name
        self.out, self.checkpoint = OUTPUT / f"{name}.zarr", OUTPUT / f"{name}-checkpoint.zarr"
        stores = ("--out", shown(self.out), "--checkpoint", shown(self.checkpoint))
        command = [
            *(os.environ.get("MPIEXEC", "mpiexec"), "-n", str(n_ranks), sys.executable, "-m", "mpi4py"),
            *("examples/tsunami.py", *stores, "--records", str(N_RECORDS), *more),
        ]
        say("$ " + shlex.join(["mpiexec", "-n", str(n_ranks), "python", *command[4:]]))
        self._lines: list[str] = []
        self._is_shown = True
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._deadline = time.monotonic() + RUN_DEADLINE
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if self._is_shown:
                print("    " + line, end="", flush=True)

    @property
    def n_written(self) -> int:
        """Records that it has reported as written, committed or not."""
        return sum(": record " in line for line in self._lines)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait while it runs until something is so."""
        while not condition():
            if self._process.poll() is not None:
                raise self._failure(f"ended too early, with code {self._process.returncode}")
            self._check_deadline()
            time.sleep(0.02)

    def kill_ranks(self) -> list[int]:
        """Send SIGKILL to every rank, not to mpiexec, and return their process ids."""
        ranks = [pid for pid in descendants(self._process.pid) if not children(pid)]
        self._is_shown = False  # what follows is mpiexec's report of the very thing that was done to it
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        if len(ranks) != self.n_ranks:
            raise self._failure(f"has {len(ranks)} processes at work, not {self.n_ranks} ranks")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        return ranks

    def finish(self) -> None:
        """Wait for a good end."""
        while self._process.poll() is None:
            self._check_deadline()
            time.sleep(0.02)
        self._reading.join(10)
        if self._process.returncode:
            raise self._failure(f"failed with code {self._process.returncode}")

    def stop(self) -> None:
        """Kill whatever is left of it."""
        if self._process.poll() is None:
            for pid in list(descendants(self._process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        self._reading.join(10)

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            raise self._failure(f"took longer than {RUN_DEADLINE:.0f} s")

    def _failure(self, what: str) -> DemoError:
        self.stop()
        said = "see its lines above" if self._is_shown else "it said:\n" + "".join(self._lines[-60:])
        return DemoError(f"the run {self._name!r} {what}; {said}")


def children(pid: int) -> list[int]:
    """Return the child processes of all threads of a process (Linux, proc_pid_task_children(5))."""
    try:
        return [int(c) for f in Path(f"/proc/{pid}/task").glob("*/children") for c in f.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []


def descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from descendants(child)


def committed_records(store: Path) -> int:
    """Return how many records a store holds; a store that is still being made holds none."""
    try:
        return ms.open_reader(str(store)).n_records
    except ms.FormatError as error:
        if error.kind != "no_manifest":
            raise
        return 0


def compare(mine: ms.StoreReader, plain: zarr.Group) -> dict[str, bool]:
    """Compare two stores bit by bit; one is read by mpistream, the other by zarr-python alone."""
    same = {}
    for name in mine.schema.variables:
        array = plain[name]
        n_equal = sum(bits_equal(mine.read_record(name, i), array[i]) for i in range(N_RECORDS))
        same[name] = mine.n_records == array.shape[0] == n_equal == N_RECORDS
        n_bytes = array.nbytes / 1e6
        say(f"  {name:10} {n_equal:3} of {array.shape[0]} records equal, {n_bytes:.0f} MB  {verdict(same[name])}")
    for name in (*mine.schema.statics, *mine.schema.coords, "time"):
        values = mine.read_static(name)
        same[name] = bits_equal(values, plain[name][...])
        say(f"  {name:10} {' x '.join(map(str, values.shape))} values  {verdict(same[name])}")
    return same


def bits_equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two arrays are the same to the last bit, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a.view("u1"), b.view("u1"))


def verdict(is_equal: bool) -> str:
    return "bitwise equal" if is_equal else "DIFFERS"


def draw(reader: ms.StoreReader, target: Path, records: tuple[int, ...]) -> None:
    """Draw the surface elevation of six records over the land, in the part of the map where the waves are."""
    lat, lon = reader.read_static("lat"), reader.read_static("lon")
    rows, columns = np.flatnonzero(lat > 48.7), np.flatnonzero((lon > -125.2) & (lon < -122.65))
    region = {"lat": (int(rows[0]), int(rows[-1]) + 1), "lon": (int(columns[0]), int(columns[-1]) + 1)}
    lat, lon = lat[rows], lon[columns]
    depth = reader.read_static("depth", region=region)
    relief = LightSource(315, 40).hillshade(-depth, vert_exag=2, dx=200, dy=200)
    relief = np.ma.masked_where(depth > 0, relief)
    rock = LinearSegmentedColormap.from_list("rock", ["#6e6352", "#d8ccb4", "#f6f0e2"])
    where: dict[str, Any] = {
        "extent": (lon[0], lon[-1], lat[0], lat[-1]),
        "origin": "lower",
        "aspect": 1.0 / np.cos(np.radians(lat.mean())),
    }

    figure, panels = plt.subplots(2, 3, figsize=(15.5, 8.6), sharex=True, sharey=True, layout="constrained")
    for panel, record in zip(panels.flat, records, strict=True):
        eta = reader.read_record("eta", record, region=region)
        waves = panel.imshow(eta, "RdBu_r", vmin=-0.5, vmax=0.5, **where)
        panel.imshow(relief, rock, vmin=0, vmax=1, **where)
        panel.contour(lon, lat, depth, levels=[100.0, 200.0, 300.0], colors="0.55", linewidths=0.3)
        panel.contour(lon, lat, depth, levels=[0.0], colors="0.2", linewidths=0.6)
        minutes, seconds = divmod(round(float(reader.times[record])), 60)
        panel.set_title(f"{minutes} min {seconds:02} s  (record {record})", fontsize=11)
        panel.xaxis.set_major_formatter(lambda x, _: f"{-x:.1f}°W")
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:.1f}°N")
    figure.colorbar(waves, ax=panels, extend="both", shrink=0.8, pad=0.015, label="surface elevation (m)")
    figure.suptitle("A tsunami in the Strait of Georgia (isobaths at 100, 200 and 300 m)", fontsize=15)
    figure.savefig(target, dpi=110)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    began = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()

    def chapter(title: str) -> None:
        say(f"\n== {title}  [{time.monotonic() - began:.0f} s]")

    chapter("1. A simulation on 4 ranks, until SIGKILL hits all of them in the middle")
    with Simulation("killed", 4) as killed:
        killed.wait_until(lambda: committed_records(killed.out) >= N_COMMITTED)
        killed.wait_until(lambda: killed.n_written >= N_WRITTEN)
        ranks = killed.kill_ranks()
    reader = ms.open_reader(shown(killed.out))
    say(f"SIGKILL to {len(ranks)} ranks, processes {', '.join(map(str, ranks))}")
    say(f"they had written {killed.n_written} records, each in {killed.n_ranks} parts")
    say(f"{shown(killed.out)} holds {reader.n_records} committed records, up to t = {reader.times[-1]} s")
    state = ms.open_reader(shown(killed.checkpoint))
    say(f"{shown(killed.checkpoint)} holds the model's state at t = {state.times[-1]} s")

    chapter("2. It goes on from there on 3 ranks")
    with Simulation("killed", 3, "--resume") as resumed:
        resumed.finish()

    chapter("3. The same simulation on 2 ranks, uninterrupted")
    with Simulation("whole", 2) as whole:
        whole.finish()

    chapter(f"4. {shown(killed.out)} (read by mpistream) against {shown(whole.out)} (read by zarr-python alone)")
    reader = ms.open_reader(shown(killed.out))
    same = compare(reader, zarr.open_group(shown(whole.out), mode="r"))

    chapter("5. What is in the store")
    say(f"$ mpistream info {shown(killed.out)}")
    subprocess.run([sys.executable, "-m", "mpistream", "info", shown(killed.out)], check=True, timeout=60)

    picture = OUTPUT / "tsunami.png"
    draw(reader, picture, records=(0, 6, 14, 24, 35, 47))
    chapter(f"6. A picture: {shown(picture)}")

    is_equal = all(same.values())
    seconds = time.monotonic() - began
    say(f"\ndemo: {reader.n_records} records, bitwise equal: {'yes' if is_equal else 'NO'} ({seconds:.0f} s)")
    return 0 if is_equal else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        sys.exit(main())
    except DemoError as error:
        sys.exit(f"demo: {error}")

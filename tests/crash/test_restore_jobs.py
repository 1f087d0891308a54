"""Real MPI jobs: a resume that drops records is killed, a repair brings them back, another job goes on from there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpistream as ms
from tests.support import writing_job
from tests.support.mpi_run import mpiexec, start_mpiexec
from tests.support.scene import assert_holds, time_of
from tests.support.verified import assert_no_damage, assert_sound
from tests.support.wait import wait_until
from tests.support.writing_job import SCENE, said_path

pytest.importorskip("typer", reason="needs typer, from the extra cli")
pytest.importorskip("rich", reason="needs rich, from the extra cli")

ROOT = Path(__file__).parents[2]


def _args(url: Path, n_records: int, **how: Any) -> list[str]:
    said_path(url).unlink(missing_ok=True)
    return ["-m", "mpi4py", writing_job.__file__, str(url), str(n_records), json.dumps(how)]


def _repair(url: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpistream", "repair", str(url), "--restore-dropped"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("sizes", "hang"),
    [
        # While it sets the dropped rows aside; and in its own first commit, with new rows in place of the dropped ones.
        ((6, 2, 3), {"call": "move", "prefix": "u/c/"}),
        ((1, 3, 4), {"call": "place", "prefix": ".mpistream/manifest.json", "after": 1}),
    ],
    ids=str,
)
def test_dropped_records_are_restored_after_a_kill(
    tmp_path: Path, sizes: tuple[int, int, int], hang: dict[str, Any]
) -> None:
    """On the command line, whatever the killed resume had done; and a resume on other ranks goes on bitwise."""
    url = tmp_path / "s"
    before, killed, after = sizes
    mpiexec(before, _args(url, 10, every=4))
    assert_holds(url, SCENE, [0] * 10)

    args = _args(url, 12, at=time_of(5), run=1, every=3, hang={**hang, "rank": 0})
    with start_mpiexec(killed, args):
        wait_until(lambda: said_path(url).exists() and "hanging" in said_path(url).read_text(), 60, "the hanging call")
    assert_holds(url, SCENE, [0] * 6)
    assert_no_damage(url)

    done = _repair(url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"epoch 3: 4 dropped records restored; 10 records committed, last t {time_of(9)}\n"
    assert_holds(url, SCENE, [0] * 10)
    assert_sound(url)
    again = _repair(url)
    assert (again.returncode, again.stdout) == (1, "")
    assert "nothing to restore" in again.stderr

    mpiexec(after, _args(url, 11, at=time_of(8), run=2, every=1))
    assert_holds(url, SCENE, [0] * 9 + [2] * 2)
    assert ms.open_reader(url).manifest.dropped == ()
    assert_sound(url)

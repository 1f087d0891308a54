"""Stores that anybody may have made: a reader, the checker and a resume come to an end, and do no harm."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import CASES, run_mutations

ROOT = Path(__file__).parents[2]
N_MUTATIONS = int(os.environ.get("MPISTREAM_HOSTILE_MUTATIONS", "5000"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Do all cases by hand in a process of their own, so that its memory is theirs."""
    command = [sys.executable, "-m", "tests.support.hostile", str(tmp_path_factory.mktemp("hostile"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_there_are_many_cases_and_they_take_little_memory(results: dict[str, Any]) -> None:
    """Though some claim a terabyte; the process has 512 MiB at most, Python and numpy included."""
    assert len(CASES) >= 60
    assert results["cases"].keys() == CASES.keys()
    assert results["peak"] < 512 * 2**20


@pytest.mark.parametrize("name", CASES)
def test_a_store_that_means_harm_is_an_error_and_does_none(results: dict[str, Any], name: str) -> None:
    """One documented class of error, within seconds; reader and checker write nothing, and nobody writes outside."""
    found = results["cases"][name]
    assert found["verify"] == CASES[name][1]
    assert found["written"] == "False"
    assert found["outside"] == "False"
    # Of the three calls together.
    assert found["seconds"] < 15


def test_mutations_by_someone_who_makes_checksums_right() -> None:
    """Whatever is changed in a manifest, an index, an inner chunk, a pack or a document, and whatever is moved."""
    seed = int(os.environ.get("MPISTREAM_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"MPISTREAM_TEST_SEED={seed}")
    outcomes = run_mutations(seed, N_MUTATIONS)
    # Enough of them got so far that it meant something.
    kinds = {outcome.rpartition(" ")[2] for outcome in outcomes}
    assert {"ok", "missing", "checksum", "index", "chunk", "documents", "manifest", "schema", "blob"} <= kinds

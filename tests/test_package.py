"""What is cheap to hold of the package; `ci/package` builds it, installs it and tries every extra."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_the_types_are_shipped() -> None:
    """PEP 561: without the file nobody's mypy looks at ours."""
    assert (ROOT / "mpistream/py.typed").read_bytes() == b""


def test_all_is_every_extra_for_users_but_the_mpi_libraries() -> None:
    """Whoever installs it gets no linter and no test tools."""
    assert EXTRAS["all"] == [f"mpistream[{','.join(sorted(set(EXTRAS) - {'all', 'mpich', 'openmpi', 'test'}))}]"]


def test_ci_package_tries_every_extra() -> None:
    script = (ROOT / "ci/package").read_text()
    tried = re.search(r"^    set -- (.+)$", script, re.MULTILINE)
    assert tried is not None
    assert set(tried[1].split()) == set(EXTRAS) - {"all"}
    cases = re.findall(r"^    ([\w |]+)\)$", script, re.MULTILINE)
    assert {name.strip() for case in cases for name in case.split("|")} == {*EXTRAS, "none"} - {"all"}

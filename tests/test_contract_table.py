"""The README's table of operations: what it names exists, tests too, and no public operation is missing."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import mpistream
from mpistream.record import Record

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"

# How the table calls them.
OWNERS = {
    "ms": mpistream,
    "w": mpistream.StreamWriter,
    "rec": Record,
    "part": mpistream.PartWriter,
    "ls": mpistream.LocationSeriesWriter,
    "r": mpistream.StoreReader,
    "h": mpistream.HDF5Reader,
}


def rows() -> list[tuple[str, list[str], str]]:
    """Return operation, names and test of every line of the table."""
    lines = README.read_text().split("### Every operation, and a test of it\n")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [(operation, re.findall("`([^`]+)`", here), test.strip("`")) for operation, here, test in cells[2:]]


ROWS = rows()
each_row = pytest.mark.parametrize(("operation", "names", "test"), ROWS, ids=[row[0] for row in ROWS])


@each_row
def test_names_exist(operation: str, names: list[str], test: str) -> None:
    """A name is an attribute of the package, or of the class that its letter stands for."""
    assert names
    for name in names:
        owner, _, attribute = name.partition(".")
        assert hasattr(OWNERS[owner], attribute), name


@each_row
def test_test_exists(operation: str, names: list[str], test: str) -> None:
    """The file has a test of this name, in the class that is named, if any."""
    path, *parts = test.split("::")
    body: list[ast.stmt] = ast.parse((TESTS / path).read_text()).body
    for part in parts:
        found = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        assert len(found) == 1, f"{path} has no {part}"
        body = found[0].body
    assert parts[-1].startswith("test_")


def test_every_operation_is_listed() -> None:
    """Public functions, and public methods and properties of writers, records and readers."""
    public = {f"ms.{name}" for name in mpistream.__all__ if inspect.isfunction(getattr(mpistream, name))}
    for letter, owner in OWNERS.items():
        if inspect.isclass(owner):
            public |= {f"{letter}.{name}" for name in vars(owner) if not name.startswith("_")}
    listed = [name for _, names, _ in ROWS for name in names]
    assert sorted(public - set(listed)) == []
    assert len(listed) == len(set(listed))

"""The tree of errors, and errors on their way to another rank."""

from __future__ import annotations

import errno
import json

import pytest

from mpistream import errors
from mpistream.errors import (
    CommitError,
    MPIStreamError,
    SchemaError,
    StoreError,
    counted,
    error_from_json,
    error_to_json,
    there_are,
)

TREE = {
    "MPIStreamError": (Exception, "error"),
    "SchemaError": (ValueError, "schema"),
    "AlignmentError": (ValueError, "alignment"),
    "TilingError": (ValueError, "tiling"),
    "ProtocolError": (RuntimeError, "protocol"),
    "CommitError": (OSError, "commit"),
    "ResumeError": (RuntimeError, "resume"),
    "FencedError": (RuntimeError, "fenced"),
    "FormatError": (ValueError, "format"),
    "StoreError": (OSError, "store"),
}
each_class = pytest.mark.parametrize("name", TREE)


def test_the_tree_is_complete() -> None:
    """Every error that the module offers is one of the tree."""
    assert {n for n in errors.__all__ if n.endswith("Error")} == set(TREE)


@each_class
def test_each_error_is_ours_and_one_of_python(name) -> None:
    """A handler may catch our base or the builtin; the kind has a default, the text is the message alone."""
    builtin, kind = TREE[name]
    error = getattr(errors, name)("dim 'y' has 3 cells, not 4")
    assert isinstance(error, MPIStreamError)
    assert isinstance(error, builtin)
    assert str(error) == error.message == "dim 'y' has 3 cells, not 4"
    assert (error.kind, error.rank, error.errno) == (kind, None, None)
    assert error.args == ("dim 'y' has 3 cells, not 4",)


@each_class
def test_each_error_carries_kind_rank_and_errno(name) -> None:
    """What is given by keyword is on the error, for the children of OSError too."""
    error = getattr(errors, name)("no space", kind="io", rank=2, errno=errno.ENOSPC)
    assert (error.kind, error.rank, error.errno) == ("io", 2, errno.ENOSPC)
    assert str(error) == "no space"


def test_commit_error_has_the_text_of_its_cause() -> None:
    """``cause_text`` is the message unless it is given."""
    assert CommitError("rank 1: no space").cause_text == "rank 1: no space"
    assert CommitError("rank 1: no space", cause_text="no space").cause_text == "no space"


@each_class
def test_our_errors_travel_whole(name) -> None:
    """Class, message, kind, rank and errno survive JSON."""
    sent = getattr(errors, name)("why", kind="odd", rank=3, errno=5)
    got = error_from_json(json.loads(json.dumps(error_to_json(sent, rank=1))))
    assert type(got) is type(sent)
    assert (got.message, got.kind, got.rank, got.errno) == ("why", "odd", 3, 5)


@pytest.mark.parametrize("cause_text", ["no space", ""])
def test_the_cause_of_a_commit_error_travels(cause_text) -> None:
    """Every rank can show it; without one it is the message, and other errors have none."""
    sent = CommitError("rank 1: no space", cause_text=cause_text)
    got = error_from_json(json.loads(json.dumps(error_to_json(sent))))
    assert isinstance(got, CommitError)
    assert got.cause_text == cause_text
    without = error_from_json({**error_to_json(sent), "cause_text": None})
    assert isinstance(without, CommitError)
    assert without.cause_text == "rank 1: no space"
    other = error_from_json({**error_to_json(SchemaError("x")), "cause_text": "y"})
    assert not hasattr(other, "cause_text")


def test_the_sender_names_the_rank_that_the_error_does_not() -> None:
    """Rank 0 counts as a rank: an error of rank 0 keeps it."""
    assert error_to_json(SchemaError("x"), rank=4)["rank"] == 4
    assert error_to_json(SchemaError("x", rank=0), rank=4)["rank"] == 0
    assert error_to_json(SchemaError("x"))["rank"] is None


def test_an_error_of_the_system_becomes_a_store_error() -> None:
    """Its class is named in the text, its errno stays."""
    got = error_from_json(error_to_json(FileNotFoundError(errno.ENOENT, "no such file", "a"), rank=1))
    assert type(got) is StoreError
    assert got.message == "FileNotFoundError: [Errno 2] no such file: 'a'"
    assert (got.kind, got.rank, got.errno) == ("io", 1, errno.ENOENT)


def test_any_other_error_becomes_one_of_the_base_class() -> None:
    """Its class is named in the text; it has no errno."""
    got = error_from_json(error_to_json(ZeroDivisionError("division by zero"), rank=1))
    assert type(got) is MPIStreamError
    assert got.message == "ZeroDivisionError: division by zero"
    assert (got.kind, got.rank, got.errno) == ("exception", 1, None)


def test_what_is_counted_has_its_number() -> None:
    """One alone is singular, also as a float; there is one, and there are others."""
    assert [counted(n, "record") for n in (0, 1, 2)] == ["0 records", "1 record", "2 records"]
    assert [counted(n, "box") for n in (1.0, 0.5, 12.0)] == ["1 box", "0.5 boxes", "12 boxes"]
    assert [there_are(n, "file") for n in (0, 1, 2)] == ["there are 0 files", "there is 1 file", "there are 2 files"]

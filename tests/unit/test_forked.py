"""A process that was forked from a writer's."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.plain import append_schema


@pytest.mark.parametrize("threads", [0, 1])
def test_a_forked_child_is_told_that_the_writer_is_not_its_own(tmp_path: Path, threads: int) -> None:
    """By every call that writes; it leaves the store alone, and the parent goes on."""
    schema = append_schema({"y": 4}, {"v": ms.Variable(("time", "y"), "f4")})
    w = ms.write_open(tmp_path / "s", schema, options=ms.Options(durability="none", threads=threads))
    w.write_record(0.0, {"v": 1.0})
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python says from 3.12 on that such a child may deadlock.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            os.write(write, " ".join(map(told, calls(w))).encode())
            w.close()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    assert said == " ".join(["forked"] * len(calls(w)))
    w.write_record(1.0, {"v": 2.0})
    w.close()
    assert np.array_equal([ms.read_record(tmp_path / "s", "v", i)[0] for i in range(2)], [1.0, 2.0])


def calls(w: ms.StreamWriter) -> list[Any]:
    return [
        lambda: w.write_record(5.0, {"v": 1.0}),
        lambda: w.record(5.0).__enter__(),
        lambda: w.write_blob("k", b"x"),
        w.flush,
        w.commit,
        w.rollback,
        lambda: w.invalidate([0]),
        lambda: ms.commit_all([w]),
    ]


def told(call: Any) -> str:
    try:
        call()
    except ms.ProtocolError as error:
        return error.kind if "forked from the writer's" in str(error) else str(error)
    except BaseException as error:  # noqa: BLE001 (told to the parent)
        return repr(error)
    return "nothing"

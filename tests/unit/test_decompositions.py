"""Ranks as threads that hold any boxes: what lies on the disk is what one rank writes, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream import rearrange, session
from tests.support.decompositions import N_RECORDS, Decomposed, objects_of
from tests.support.ranks import MemoryTransport, run_ranks
from tests.support.scene import time_of

BASE: dict[str, Any] = {"durability": "none", "timeout": 20, "lease_ttl": 100_000}


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport that a rank was given stands for its communicator."""
    monkeypatch.setattr(session, "connect", lambda comm, timeout: comm)


def on_ranks(n: int, fn: Callable[[MemoryTransport], Any]) -> list[Any]:
    return run_ranks(n, fn, timeout=60)


def assert_as_serial(folder: Any, case: Decomposed, n_ranks: int) -> None:
    """Write a stream from some ranks and, in the same layout, from one; compare every file, and the values."""

    def rank(comm: MemoryTransport) -> ms.StreamSchema:
        options = ms.Options(**BASE, **case.options)
        writer = ms.write_open(
            folder / "many", case.schema(), comm=comm, region=case.region(comm.rank), options=options
        )
        case.write(writer, comm.rank)
        return writer.schema

    layout = on_ranks(n_ranks, rank)[0]

    def alone(comm: MemoryTransport) -> None:
        schema = case.schema().with_layout_of(layout)
        case.write(ms.write_open(folder / "one", schema, comm=comm, options=ms.Options(**BASE, threads=0)), None)

    on_ranks(1, alone)
    many, one = objects_of(folder / "many"), objects_of(folder / "one")
    assert many.keys() == one.keys()
    assert [key for key in many if many[key] != one[key]] == []
    assert_holds(folder / "many", case)


def assert_holds(url: Any, case: Decomposed) -> None:
    reader = ms.open_reader(url)
    assert reader.times.tolist() == [time_of(i) for i in range(N_RECORDS)]
    for name in case.scene.variables:
        for i in range(N_RECORDS):
            np.testing.assert_array_equal(reader.read_record(name, i), case.scene.whole(name, i), err_msg=name)
    for name in case.scene.region_statics:
        np.testing.assert_array_equal(reader.read_static(name), case.scene.whole(name), err_msg=name)


@pytest.mark.parametrize("seed", range(28))
def test_any_decomposition_gives_the_bytes_of_one_rank(tmp_path, seed) -> None:
    """Grids of up to 4 dims, boxes or cells anywhere, all dtypes, strides and byte orders, few or all ranks writing."""
    n_ranks = seed % 7 + 1
    assert_as_serial(tmp_path, Decomposed(seed, n_ranks), n_ranks)


@pytest.mark.parametrize("seed", range(200, 214))
def test_each_variable_may_have_a_region_of_its_own(tmp_path, seed) -> None:
    """Boxes over its own dims, or over more than those, or cells, in any mixture."""
    n_ranks = seed % 7 + 1
    assert_as_serial(tmp_path, Decomposed(seed, n_ranks, by_variable=True), n_ranks)


@pytest.mark.parametrize("seed", range(100, 104))
def test_pieces_beyond_a_message_travel_in_parts(tmp_path, monkeypatch, seed) -> None:
    """As they do beyond a gibibyte; here a message has 64 bytes."""
    monkeypatch.setattr(rearrange, "_MAX_MESSAGE_NBYTES", 64)
    assert_as_serial(tmp_path, Decomposed(seed, 4), 4)

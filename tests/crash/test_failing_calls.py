"""Each call of the system fails once, or until the job has heard of it: one error on all ranks, then success."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.sim_faults import NUMBERS, fail_every_call
from tests.support.sim_job import OPTIONS
from tests.support.sim_ranks import simulated

pytestmark = pytest.mark.slow


def _in_turn(n: int) -> Iterator[tuple[int, bool]]:
    """Both ways for each call; errors take turns."""
    yield NUMBERS[n % len(NUMBERS)], False
    yield NUMBERS[(n + 2) % len(NUMBERS)], True


def _one(n: int) -> Iterator[tuple[int, bool]]:
    yield NUMBERS[(n + n // len(NUMBERS)) % len(NUMBERS)], n % 2 == 0


@pytest.mark.parametrize(("who", "threads"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_any_call_may_fail(caplog: pytest.LogCaptureFixture, who: int, threads: int) -> None:
    """EIO, ENOSPC, EMFILE, ESTALE or a short write at any call of one of two ranks: the same on both, and no leak.

    The n-th call fails, for all n until a run has no more calls; each run ends with the store of a run without a fault.
    """
    caplog.set_level(logging.CRITICAL, "mpistream")
    with simulated() as system:
        counts = fail_every_call(system, 2, who, _one if threads else _in_turn, replace(OPTIONS, threads=threads))
    print(dict(counts))
    assert counts["calls"] > (400 if who == 0 else 80)

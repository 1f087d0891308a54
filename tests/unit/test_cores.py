"""Cores: what a rank has to itself, and what it does with them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mpistream.cores import Workers, cores_of_this_process, cores_per_rank, workers_of


def vote(cores: set[int], promised: int | None = None, node: str = "a") -> tuple[str, dict[str, Any]]:
    return node, {"mask": f"{sum(1 << c for c in cores):x}", "promised": promised}


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([vote({0, 1, 2, 3})], [4]),
        ([vote({0, 1, 2, 3})] * 4, [1, 1, 1, 1]),
        ([vote(set(range(8)))] * 3, [2, 2, 2]),
        # Bound to cores of their own.
        ([vote({0, 1}), vote({2, 3})], [2, 2]),
        # Bound in pairs: each pair shares four.
        ([vote({0, 1, 2, 3})] * 2 + [vote({4, 5, 6, 7})] * 2, [2, 2, 2, 2]),
        # One rank is bound to a core that the others may use, too.
        ([vote({0}), vote(set(range(5)))], [0, 4]),
        # Other nodes have other cores.
        ([vote({0, 1}), vote({0, 1}, node="b")], [2, 2]),
        ([vote({0, 1, 2, 3}, promised=2), vote({4, 5, 6, 7}, promised=9)], [2, 4]),
        ([vote({200, 300})], [2]),
    ],
)
def test_cores_are_shared_by_the_ranks_that_may_use_them(votes: Any, expected: list[int]) -> None:
    """By affinity and node; SLURM may promise fewer."""
    assert cores_per_rank(votes) == expected


@pytest.mark.parametrize(
    ("threads", "n_cores", "expected"),
    [
        (None, 0, Workers(1, are_encoding=False)),
        (None, 1, Workers(1, are_encoding=False)),
        (None, 2, Workers(1, are_encoding=True)),
        (None, 4, Workers(3, are_encoding=True)),
        (None, 64, Workers(4, are_encoding=True)),
        (0, 64, Workers(0, are_encoding=False)),
        (1, 1, Workers(1, are_encoding=True)),
        (7, 1, Workers(7, are_encoding=True)),
    ],
)
def test_one_core_is_the_simulations(threads: int | None, n_cores: int, expected: Workers) -> None:
    """What is asked for is done; else threads encode where a core is spare."""
    assert workers_of(threads, n_cores) == expected


@pytest.mark.parametrize(("value", "promised"), [("3", 3), ("0", None), ("", None), ("2(x4)", None), (None, None)])
def test_this_process_says_where_it_may_run(value: str | None, promised: int | None) -> None:
    """By its affinity, and by what SLURM set."""
    found = cores_of_this_process({} if value is None else {"SLURM_CPUS_PER_TASK": value})
    assert int(found["mask"], 16) == sum(1 << core for core in os.sched_getaffinity(0))
    assert found["promised"] == promised

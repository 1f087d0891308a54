"""Who writes which part: against all assignments there are."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpistream import assigning
from mpistream.assigning import best_owners
from tests.support.decompositions import most_that_can_stay

gains = st.tuples(st.integers(1, 4), st.integers(0, 2)).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, 9) | st.integers(0, 2**45), min_size=n[0] + n[1], max_size=n[0] + n[1]),
        min_size=n[0],
        max_size=n[0],
    )
)


def owners_of(gain):
    """The owners that are found for a table of gains, target by rank; zeros are not told."""
    targets, ranks = np.nonzero(gain)
    return best_owners([0] * gain.shape[1], gain.shape[0], ranks, targets, gain[targets, ranks])


@given(gains)
def test_owners_are_the_best_of_all_assignments(table) -> None:
    """Each rank has at most one target, and no other assignment keeps more cells, be they billions."""
    gain = np.array(table, dtype=np.int64)
    owners = owners_of(gain)
    assert len(set(owners)) == len(owners) == gain.shape[0]
    assert all(0 <= owner < gain.shape[1] for owner in owners)
    assert sum(int(gain[k, owner]) for k, owner in enumerate(owners)) == most_that_can_stay(gain)


def test_cells_of_a_pair_add_up() -> None:
    """A rank may hold a target in several boxes."""
    assert best_owners([0, 0], 1, np.array([0, 1, 1]), np.array([0, 0, 0]), np.array([5, 3, 3])) == [1]


def test_ranks_that_hold_nothing_write_when_there_are_too_few_others() -> None:
    """One rank holds everything, three write."""
    owners = best_owners([0] * 9, 3, np.array([4, 4, 4]), np.array([0, 1, 2]), np.array([1, 7, 2]))
    assert owners[1] == 4
    assert len(set(owners)) == 3


def test_of_many_pairs_the_largest_are_given_first(monkeypatch) -> None:
    """Where an exact answer would take too long; it may keep less, and every target still has its own rank."""
    gain = np.array([[5, 4], [4, 0]])
    assert owners_of(gain) == [1, 0]
    monkeypatch.setattr(assigning, "_MAX_EXACT_PAIRS", 0)
    assert owners_of(gain) == [0, 1]
    rng = np.random.default_rng(0)
    for _ in range(50):
        n_targets, n_more = rng.integers(1, 5), rng.integers(0, 3)
        gain = rng.integers(0, 4, (n_targets, n_targets + n_more))
        owners = owners_of(gain)
        assert len(set(owners)) == len(owners) == n_targets
        assert all(0 <= owner < gain.shape[1] for owner in owners)
        # At least half of what the best one keeps.
        assert 2 * sum(gain[k, owner] for k, owner in enumerate(owners)) >= most_that_can_stay(gain)


# ---- nodes -------------------------------------------------------------------------------------------

on_nodes = st.lists(st.integers(0, 2), min_size=1, max_size=6).flatmap(
    lambda nodes: st.tuples(
        st.just(nodes),
        st.integers(1, min(len(nodes), 4)).flatmap(
            lambda n: st.lists(
                st.lists(st.integers(0, 9), min_size=len(nodes), max_size=len(nodes)), min_size=n, max_size=n
            )
        ),
    )
)


def least_crowd(nodes, n_targets) -> int:
    """The smallest number of targets that the fullest node can have."""
    chosen = itertools.combinations(nodes, n_targets)
    return min(max(map(ranks.count, ranks)) for ranks in chosen)


@given(on_nodes)
def test_no_node_is_crowded_and_the_most_cells_stay_on_their_node(case) -> None:
    """And within the nodes chosen the most stay on their rank."""
    nodes, table = case
    gain = np.array(table, dtype=np.int64)
    targets, ranks = np.nonzero(gain)
    owners = best_owners(nodes, len(gain), ranks, targets, gain[targets, ranks])
    assert len(set(owners)) == len(owners)
    crowd = least_crowd(nodes, len(gain))
    chosen = [nodes[owner] for owner in owners]
    assert max(map(chosen.count, chosen)) <= crowd
    of_node = {node: gain[:, np.array(nodes) == node].sum(axis=1) for node in set(nodes)}

    def stays(places) -> int:
        return sum(int(of_node[node][k]) for k, node in enumerate(places))

    allowed = [p for p in itertools.permutations(nodes, len(gain)) if max(map(p.count, p)) <= crowd]
    assert stays(chosen) == max(map(stays, allowed))
    for node in set(chosen):
        own = [k for k, place in enumerate(chosen) if place == node]
        there = gain[own][:, np.array(nodes) == node]
        assert sum(int(gain[k, owners[k]]) for k in own) == most_that_can_stay(there)


def test_one_writer_a_node_is_one_on_each(monkeypatch) -> None:
    """Where one node holds nearly everything, too, and where nodes have ranks in turn."""
    for nodes in ([0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 2]):
        for limit in (0, 10**6):
            monkeypatch.setattr(assigning, "_MAX_EXACT_PAIRS", limit)
            owners = best_owners(nodes, 3, np.array([0, 3, 0]), np.array([0, 1, 2]), np.array([90, 80, 70]))
            assert sorted(nodes[owner] for owner in owners) == [0, 1, 2]
            assert owners[0] == 0


def test_numbers_of_nodes_may_leave_gaps() -> None:
    """They are names."""
    assert best_owners([7, 2], 2, np.array([0, 1]), np.array([1, 0]), np.array([1, 1])) == [1, 0]

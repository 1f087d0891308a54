"""The first manifest of a new epoch: what a resume keeps, and what it notes of the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpistream.commit import next_manifest, recover, restore
from mpistream.manifest import Dropped, Manifest, add_times
from tests.support.tokens import BASE, HOLES, TIMES, ZEROS


def recovered(manifest: Manifest, n_keep: int, times: list[float], epoch: int = 5) -> Manifest:
    return recover(
        manifest,
        epoch=epoch,
        run_id=f"run {epoch}",
        n_keep=n_keep,
        last_t=times[n_keep - 1] if n_keep else None,
        dropped_times=times[n_keep:],
        layout_digest=f"layout {epoch}",
    )


ALL_TIMES = [0.5, 1.5, *TIMES]
COMMITTED = next_manifest(BASE, ((2, 5),), TIMES, ["lat"])


@pytest.mark.parametrize("n_keep", range(6))
def test_a_resume_keeps_the_first_records(n_keep) -> None:
    """The new epoch's first manifest: what is dropped is noted, kept aside, and a floor for readers."""
    found = recovered(COMMITTED, n_keep, ALL_TIMES)
    assert (found.epoch, found.run_id, found.layout_digest) == (5, "run 5", "layout 5")
    assert (found.commit_seq, found.first_seq) == (11, 11)
    assert (found.n_records, found.committed) == (n_keep, ((0, n_keep),) if n_keep else ())
    assert found.last_t == (ALL_TIMES[n_keep - 1] if n_keep else None)
    assert found.times_digest == add_times(ZEROS, enumerate(ALL_TIMES[:n_keep]))
    assert found.statics == ("lat",)
    if n_keep == 5:
        assert (found.dropped, found.floors) == ((), ())
    else:
        assert found.dropped == (Dropped(epoch=5, start=n_keep, stop=5),)
        assert found.floors == ((n_keep, 11), (5, 0))
    assert Manifest.from_bytes(found.to_bytes()).to_bytes() == found.to_bytes()


def test_recovery_twice_is_recovery_once() -> None:
    """I6: but for epoch, run, layout and commit_seq the second is as the first."""
    once = recovered(COMMITTED, 3, ALL_TIMES)
    twice = recovered(once, 3, ALL_TIMES[:3], epoch=6)
    assert (twice.epoch, twice.commit_seq) == (6, 12)
    assert replace(twice, epoch=5, run_id="run 5", layout_digest="layout 5", commit_seq=11, first_seq=11) == once


def test_what_several_resumes_dropped_is_kept_until_a_commit() -> None:
    """A restart that fails at once has destroyed nothing; a number's floor is the last resume that dropped it."""
    first = recovered(COMMITTED, 4, ALL_TIMES)
    second = recovered(first, 1, ALL_TIMES[:4], epoch=6)
    assert second.dropped == (Dropped(epoch=5, start=4, stop=5), Dropped(epoch=6, start=1, stop=4))
    assert second.floors == ((1, 12), (4, 11), (5, 0))
    after = next_manifest(second, ((1, 3),), [7.5, 8.5], [])
    assert after.dropped == ()
    third = recovered(after, 2, [0.5, 7.5, 8.5], epoch=7)
    assert third.floors == ((1, 12), (2, 14), (3, 12), (4, 11), (5, 0))
    fourth = recovered(next_manifest(third, ((2, 3),), [9.5], []), 2, [0.5, 7.5, 9.5], epoch=8)
    assert fourth.floors == ((1, 12), (2, 16), (3, 12), (4, 11), (5, 0))


def test_times_that_are_not_the_dropped_ones_are_a_mistake_of_ours() -> None:
    """Kept and dropped records are all records."""
    with pytest.raises(ValueError, match="zip"):
        recovered(COMMITTED, 3, ALL_TIMES[:4])


@pytest.mark.parametrize(
    ("n_keep", "committed", "dropped"),
    [
        (10, ((2, 5), (7, 8)), ()),
        (8, ((2, 5), (7, 8)), ()),
        (7, ((2, 5),), ((7, 8),)),
        (4, ((2, 4),), ((4, 5), (7, 8))),
        (0, (), ((2, 5), (7, 8))),
    ],
)
def test_a_resume_with_holes(n_keep, committed, dropped) -> None:
    """In indexed mode: what was committed from that number on is dropped and has a floor, nothing else."""
    gone = [float(i) for a, b in dropped for i in range(a, b)]
    kept = [i for a, b in committed for i in range(a, b)]
    found = recover(
        HOLES,
        epoch=5,
        run_id="run 5",
        n_keep=n_keep,
        last_t=float(kept[-1]) if kept else None,
        dropped_times=gone,
        layout_digest="layout 5",
    )
    assert (found.committed, found.n_records) == (committed, 10)
    assert found.dropped == tuple(Dropped(epoch=5, start=a, stop=b) for a, b in dropped)
    assert found.floors == tuple(floor for a, b in dropped for floor in ((a, 10), (b, 0)))
    assert found.times_digest == add_times(ZEROS, [(i, float(i)) for i in kept])


def test_a_restore_is_as_if_nothing_had_been_dropped() -> None:
    """But for epoch and commit_seq, and floors that tell readers of before to look again."""
    whole = next_manifest(BASE, ((2, 5),), TIMES, ["lat"], 3)
    blob_floors = ((1, 4), (3, 0))
    whole = replace(whole, floors=blob_floors, blob_floors=blob_floors)
    first = recovered(whole, 4, ALL_TIMES)
    second = recovered(first, 2, ALL_TIMES[:4], epoch=6)
    assert second.blob_floors == second.floors == ((1, 4), (2, 12), (4, 11), (5, 0))
    found = restore(second, ALL_TIMES[2:])
    same = ("committed", "n_records", "last_t", "times_digest", "statics", "n_packs", "blob_floors", "schema")
    assert {name: getattr(found, name) for name in same} == {name: getattr(whole, name) for name in same}
    assert (found.dropped, found.commit_seq, found.first_seq, found.epoch) == ((), 13, 12, 6)
    assert found.floors == ((1, 4), (2, 13), (5, 0))


def test_a_restore_with_holes() -> None:
    """In indexed mode: the last time is that of the highest record, dropped or kept."""
    gone = [float(i) for a, b in HOLES.committed for i in range(a, b) if i >= 4]
    found = recover(HOLES, epoch=5, run_id="run 5", n_keep=4, last_t=3.0, dropped_times=gone, layout_digest="layout 5")
    assert found.committed != HOLES.committed
    again = restore(found, gone)
    assert (again.committed, again.last_t, again.times_digest) == (HOLES.committed, HOLES.last_t, HOLES.times_digest)

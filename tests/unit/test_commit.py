"""The decision: each reason against a commit by name, and that nothing but a full set of right tokens is one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from mpistream.commit import Decision, decide, next_manifest, without_records
from mpistream.epoch import prove_epoch
from mpistream.errors import CommitError, StoreError, error_to_json
from mpistream.layout import resolve_layout
from mpistream.manifest import Dropped, Manifest, add_times
from mpistream.token import CommitReceipt, CommitToken, times_sha256
from tests.support.tokens import BASE, EPOCH, HOLES, REGIONS, SCHEMA, TIMES, ZEROS, right_tokens

GOOD = right_tokens(BASE, EPOCH, TIMES, ("topography",))


def judge(tokens: list[CommitToken], manifest: Manifest = BASE, times: list[float] | None = None) -> Decision:
    return decide(manifest, EPOCH, tokens, TIMES if times is None else times)


def changed(writer: int, **changes: Any) -> list[CommitToken]:
    return [replace(t, **changes) if t.writer == writer else t for t in GOOD]


def assert_refused(decision: Decision, *expected: tuple[str, int | None, str]) -> None:
    """Exactly these faults: kind, rank and text; and no manifest."""
    assert (decision.manifest, decision.receipt) == (None, None)
    assert [(f.kind, f.writer, f.text) for f in decision.faults] == list(expected)


# ---- a commit ----------------------------------------------------------------------------------------


def test_a_full_set_of_right_tokens_is_a_commit() -> None:
    """I1: the new manifest names the records; counts are those of all writers together."""
    found = judge(GOOD)
    assert found.faults == ()
    manifest, receipt = found.manifest, found.receipt
    assert manifest is not None
    assert receipt == CommitReceipt(
        commit_seq=10,
        epoch=4,
        n_records=5,
        last_t=4.5,
        n_new_records=3,
        new_statics=("topography",),
        n_packs=2,
        n_objects=10 + 11 + 12,
        nbytes=6000,
    )
    assert (manifest.n_records, manifest.committed, manifest.last_t) == (5, ((0, 5),), 4.5)
    assert (manifest.commit_seq, manifest.epoch, manifest.statics) == (10, 4, ("topography",))
    assert manifest.n_packs == BASE.n_packs + 2
    assert manifest.times_digest == add_times(ZEROS, enumerate([0.5, 1.5, *TIMES]))
    unchanged = ("store_id", "run_id", "schema", "fingerprint", "coordinates_digest", "layout_digest", "floors")
    assert all(getattr(manifest, name) == getattr(BASE, name) for name in unchanged)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_order_of_the_tokens_does_not_matter(order) -> None:
    """They are a set."""
    assert judge([GOOD[i] for i in order]) == judge(GOOD)


def test_a_commit_of_statics_alone() -> None:
    """No record is new: the last time stays."""
    found = judge(right_tokens(BASE, EPOCH, [], ("lat",)), times=[])
    assert found.manifest is not None
    assert found.receipt is not None
    assert (found.manifest.n_records, found.manifest.last_t) == (2, 1.5)
    assert found.manifest.times_digest == BASE.times_digest
    assert (found.receipt.n_new_records, found.receipt.new_statics) == (0, ("lat",))


def test_the_first_commit_of_an_epoch_clears_what_was_dropped() -> None:
    """Only then may it be deleted; the floors stay."""
    base = replace(
        BASE, dropped=(Dropped(epoch=4, start=2, stop=7),), floors=((2, 9),), carried={"digest": "d", "receipt": {}}
    )
    found = judge(GOOD, base).manifest
    assert found is not None
    assert found.dropped == ()
    assert found.floors == ((2, 9),)
    assert found.carried is None


def test_every_rank_computes_the_manifest_of_the_decision() -> None:
    """next_manifest, from times and names alone, is what decide returns; names are a sorted set."""
    base = replace(BASE, statics=("lat",))
    found = judge(right_tokens(base, EPOCH, TIMES, ("topography",)), base).manifest
    assert found == next_manifest(base, ((2, 5),), TIMES, ["topography"], 2)
    assert found is not None
    assert found.statics == ("lat", "topography")
    assert next_manifest(base, (), [], []) == replace(base, commit_seq=10)


# ---- identity ----------------------------------------------------------------------------------------


def test_a_missing_token() -> None:
    """A rank that said nothing is named."""
    assert_refused(judge(GOOD[:1] + GOOD[2:]), ("token", 1, "rank 1: no token"))
    assert_refused(
        judge([]),
        ("token", 0, "rank 0: no token"),
        ("token", 1, "rank 1: no token"),
        ("token", 2, "rank 2: no token"),
    )


def test_a_token_twice() -> None:
    """The same one again does not stand for another."""
    assert_refused(judge([*GOOD, GOOD[1]]), ("token", 1, "rank 1: 2 tokens"))
    assert_refused(
        judge([GOOD[0], GOOD[0], GOOD[2]]), ("token", 0, "rank 0: 2 tokens"), ("token", 1, "rank 1: no token")
    )


def test_a_token_of_a_rank_that_is_none() -> None:
    """Beyond the number of ranks, or below zero."""
    assert_refused(judge([*GOOD, replace(GOOD[1], writer=7)]), ("token", 7, "token of rank 7, there are 3 ranks"))
    assert_refused(judge([*GOOD, replace(GOOD[1], writer=-1)]), ("token", -1, "token of rank -1, there are 3 ranks"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"store_id": "other"}, "token of store other, not store"),
        ({"fingerprint": "ff"}, f"token of schema fingerprint ff, not {BASE.fingerprint}"),
        ({"epoch": 3}, "token of epoch 3, not 4"),
        ({"run_id": "old"}, "token of run old, not run"),
        ({"base_seq": 8}, "token of base commit 8, not 9"),
        ({"store_id": "other", "epoch": 3, "base_seq": 8}, "token of store other, not store"),
    ],
)
def test_a_foreign_or_late_token(changes, text) -> None:
    """Of another store, run, epoch, schema or commit: both values are in the text, the first difference is enough."""
    assert_refused(judge(changed(1, **changes)), ("token", 1, f"rank 1: {text}"))


def test_all_foreign_ranks_are_named() -> None:
    """One fault a rank."""
    decision = judge([replace(t, epoch=t.epoch + t.writer) for t in GOOD])
    assert_refused(
        decision, ("token", 1, "rank 1: token of epoch 5, not 4"), ("token", 2, "rank 2: token of epoch 6, not 4")
    )


# ---- records and times -------------------------------------------------------------------------------


def test_ranks_that_wrote_different_records() -> None:
    """The fault names each rank's number of records and last t, and the way out."""
    decision = judge(changed(1, records=((2, 4),), last_t=3.5))
    assert_refused(
        decision,
        (
            "records",
            None,
            (
                "the ranks wrote different records: rank 0 3 records to t = 4.5, rank 1 2 records to t = 3.5, "
                "rank 2 3 records to t = 4.5; call rollback() on every rank and write again"
            ),
        ),
    )
    assert [f.kind for f in judge(changed(2, records=((1, 5),))).faults] == ["records"]


def test_of_many_ranks_eight_are_named() -> None:
    """The text stays readable with 10,000 of them."""
    schema = resolve_layout(SCHEMA, 10)
    epoch = prove_epoch(schema, [*REGIONS, *[REGIONS[2]] * 7])
    tokens = right_tokens(BASE, epoch, TIMES)
    tokens[9] = replace(tokens[9], records=((2, 4),))
    (fault,) = decide(BASE, epoch, tokens, TIMES).faults
    assert fault.text.count("records to t =") == 8
    assert " and 2 more ranks; call rollback()" in fault.text
    assert "rank 8 " not in fault.text
    epoch = prove_epoch(schema, [*REGIONS, *[REGIONS[2]] * 5])
    tokens = right_tokens(BASE, epoch, TIMES)
    tokens[7] = replace(tokens[7], records=((2, 4),))
    (fault,) = decide(BASE, epoch, tokens, TIMES).faults
    assert fault.text.count("records to t =") == 8
    assert "more ranks" not in fault.text


@pytest.mark.parametrize(
    ("records", "times"),
    [
        (((3, 6),), TIMES),
        (((1, 4),), TIMES),
        (((2, 5),), TIMES[:2]),
        (((2, 1),), TIMES),
        (((2, 4), (5, 6)), TIMES),
        (((2, 3), (3, 5)), TIMES),
        (((2, 2),), []),
    ],
)
def test_records_that_do_not_follow_the_committed_ones(records, times) -> None:
    """All agree, but with something else than the manifest and the owner's times."""
    decision = judge([replace(t, records=records) for t in GOOD], times=times)
    text = f"records {records} with {len(times)} times do not fit to the committed ones, ((0, 2),)"
    assert_refused(decision, ("records", None, text))


@pytest.mark.parametrize(
    ("records", "committed", "last_t"),
    [
        (((5, 6),), ((2, 6), (7, 8)), 7.0),
        (((5, 7),), ((2, 8),), 7.0),
        (((0, 2), (9, 10)), ((0, 5), (7, 8), (9, 10)), 9.0),
        (((0, 2), (5, 7), (8, 10)), ((0, 10),), 9.0),
        ((), ((2, 5), (7, 8)), 7.0),
    ],
)
def test_records_in_any_order(records, committed, last_t) -> None:
    """In indexed mode a commit may fill any hole; the last time is that of the highest record."""
    numbers = [i for a, b in records for i in range(a, b)]
    times = [float(i) for i in numbers]
    found = decide(HOLES, EPOCH, right_tokens(HOLES, EPOCH, times, records=records), times)
    assert found.faults == ()
    assert found.records == records
    assert found.manifest is not None
    assert found.receipt is not None
    assert (found.manifest.committed, found.manifest.last_t, found.manifest.n_records) == (committed, last_t, 10)
    assert found.manifest.times_digest == add_times(ZEROS, [(i, float(i)) for i in sorted([2, 3, 4, 7, *numbers])])
    assert (found.receipt.n_records, found.receipt.n_new_records) == (4 + len(numbers), len(numbers))
    assert found.receipt.last_t == last_t


@pytest.mark.parametrize(
    ("records", "n_times"),
    [
        (((4, 6),), 2),
        (((9, 11),), 2),
        (((-1, 1),), 2),
        (((5, 6), (6, 7)), 2),
        (((8, 9), (5, 6)), 2),
        (((5, 7),), 1),
        (((5, 5),), 0),
    ],
)
def test_records_that_can_not_be_committed(records, n_times) -> None:
    """Committed already, outside the time dim, not the ranges of a set, or not as many as there are times."""
    times = [5.0, 6.0][:n_times]
    decision = decide(HOLES, EPOCH, right_tokens(HOLES, EPOCH, times, records=records), times)
    text = f"records {records} with {n_times} times do not fit to the committed ones, ((2, 5), (7, 8))"
    assert_refused(decision, ("records", None, text))


def test_records_that_are_given_up() -> None:
    """They leave ranges and digest, and no reader takes what comes in their place for them."""
    found = without_records(HOLES, ((3, 4), (7, 8)), [3.0, 7.0], 4.0)
    assert (found.committed, found.last_t, found.commit_seq) == (((2, 3), (4, 5)), 4.0, 10)
    assert found.times_digest == add_times(ZEROS, [(2, 2.0), (4, 4.0)])
    assert found.floors == ((3, 10), (4, 0), (7, 10), (8, 0))
    again = next_manifest(found, ((3, 4),), [3.0], [])
    assert (again.committed, again.last_t, again.floors) == (((2, 5),), 4.0, found.floors)


def test_times_that_differ_bitwise() -> None:
    """One unit in the last place is another time; each rank that differs is named with both."""
    other = math.nextafter(4.5, 5)
    sha = times_sha256([2.5, 3.5, other])
    decision = judge(changed(1, times_sha256=sha, last_t=other))
    assert_refused(
        decision,
        (
            "times",
            1,
            (
                "rank 1: its times are not those of the commit: its last t = 4.500000000000001, the one of the commit "
                "is 4.5; call rollback() on every rank and write again"
            ),
        ),
    )
    minus = right_tokens(BASE, EPOCH, [-0.0])
    assert [f.writer for f in judge(minus, times=[0.0]).faults] == [0, 1, 2]
    empty = [replace(t, times_sha256="no") for t in right_tokens(BASE, EPOCH, [])]
    assert "the one of the commit is None" in judge(empty, times=[]).faults[0].text
    earlier = judge(changed(1, times_sha256=times_sha256([2.5, 3.0, 4.5])))
    assert "one of 3 records differs, the last has t = 4.5 in both" in earlier.faults[0].text


# ---- regions and cells -------------------------------------------------------------------------------


def test_a_token_over_another_region() -> None:
    """I3: the cells are counted in the region that was proven when the epoch began."""
    decision = judge(changed(1, region=REGIONS[0]))
    assert_refused(
        decision,
        (
            "tiling",
            1,
            "rank 1: token over Region(y[0:8] x[0:3]), the epoch's layout says Region(y[0:8] x[3:6])",
        ),
    )


@pytest.mark.parametrize("found", [0, 71, 73, 144, -72])
def test_too_few_or_too_many_cells(found) -> None:
    """I3: 3 records of 8 x 3 cells are 72, no more and no less; variable, rank and both numbers are named."""
    decision = judge(changed(1, n_cells={"temperature": found, "energy": 0}))
    text = f"rank 1: {found} cells of 'temperature' are in place, its part of 3 records has 72 in {REGIONS[1]!r}"
    assert_refused(decision, ("tiling", 1, text))


def test_a_variable_left_out_or_written_by_the_wrong_rank() -> None:
    """Nothing in place counts as no cells; the owner alone writes a series, and every record of it."""
    assert [f.text for f in judge(changed(1, n_cells={})).faults] == [
        f"rank 1: 0 cells of 'temperature' are in place, its part of 3 records has 72 in {REGIONS[1]!r}"
    ]
    decision = judge(changed(0, n_cells={"temperature": 72}))
    assert [f.text for f in decision.faults] == [
        f"rank 0: 0 cells of 'energy' are in place, its part of 3 records has 3 in {REGIONS[0]!r}"
    ]
    decision = judge(changed(2, n_cells={"temperature": 1, "energy": 1}))
    assert [(f.kind, f.writer) for f in decision.faults] == [("tiling", 2), ("tiling", 2)]


def test_an_unknown_variable() -> None:
    """A name that the schema lacks, or one in the wrong place: a static among the records, or the reverse."""
    cells = GOOD[1].n_cells
    for name in ("salinity", "topography", "y", "time"):
        decision = judge(changed(1, n_cells={**cells, name: 24}))
        assert_refused(decision, ("tiling", 1, f"rank 1: unknown variable {name!r}"))
    for name in ("salinity", "temperature", "energy", "y"):
        statics = [replace(t, statics={**t.statics, name: EPOCH.n_cells.get(name, (0, 0, 0))[t.writer]}) for t in GOOD]
        decision = judge(statics)
        expected = [("tiling", w, f"rank {w}: unknown variable {name!r}") for w in range(3)]
        assert [(f.kind, f.writer, f.text) for f in decision.faults] == expected


# ---- statics -----------------------------------------------------------------------------------------


def test_a_static_that_is_committed_already() -> None:
    """It is written once, whoever tries."""
    base = replace(BASE, statics=("topography",))
    decision = judge(GOOD, base)
    assert_refused(decision, ("static", None, "static 'topography' is committed already; it is written once"))


def test_a_static_that_one_rank_did_not_write() -> None:
    """A static is committed whole: the rank whose part is missing is named."""
    decision = judge(changed(1, statics={}))
    text = f"rank 1: 0 cells of 'topography' are in place, its part of 1 record has 24 in {REGIONS[1]!r}"
    assert_refused(decision, ("tiling", 1, text))


def test_a_static_that_one_rank_wrote_alone() -> None:
    """Its name on one token is enough to ask the others for it."""
    tokens = [replace(t, statics={**t.statics, "lat": 24} if t.writer == 0 else t.statics) for t in GOOD]
    (fault,) = judge(tokens).faults
    assert (fault.kind, fault.writer) == ("tiling", 1)
    assert "0 cells of 'lat' are in place" in fault.text


# ---- failures ----------------------------------------------------------------------------------------


def test_a_failure_while_placing() -> None:
    """Its kind, rank, text and errno are the fault; what else may be wrong is not said."""
    failure = error_to_json(StoreError("place t/c/2: no space left", kind="io", errno=28), rank=1)
    decision = judge([*changed(1, failure=failure, n_cells={}), GOOD[0]])
    assert_refused(decision, ("io", 1, "rank 1: place t/c/2: no space left"))
    assert decision.faults[0].errno == 28


def test_every_failure_is_named() -> None:
    """In the order of the tokens; an error that is not the system's has no errno."""
    tokens = [
        replace(
            t, failure=error_to_json(CommitError("gone", kind="gone") if t.writer else ValueError("no"), rank=t.writer)
        )
        for t in GOOD
    ]
    decision = judge(tokens)
    assert_refused(
        decision,
        ("exception", 0, "rank 0: ValueError: no"),
        ("gone", 1, "rank 1: gone"),
        ("gone", 2, "rank 2: gone"),
    )
    assert [f.errno for f in decision.faults] == [None, None, None]

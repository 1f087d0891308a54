"""The decision over any tiling: right tokens are a commit, and whatever else is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpistream as ms
from mpistream.commit import decide, next_manifest
from mpistream.epoch import EpochState, prove_epoch
from mpistream.errors import StoreError, error_to_json
from mpistream.layout import resolve_layout, shard_regions
from mpistream.manifest import Manifest, add_times
from mpistream.ranges import Ranges, members, ranges_of
from mpistream.region import Region
from mpistream.token import CommitToken
from tests.support.tokens import ZEROS, right_tokens

N_TOTAL = 12


class Case(NamedTuple):
    """A committed state and what is to be committed next."""

    manifest: Manifest
    epoch: EpochState
    records: Ranges
    times: list[float]
    statics: tuple[str, ...]

    def tokens(self) -> list[CommitToken]:
        return right_tokens(self.manifest, self.epoch, self.times, self.statics, self.records)


@st.composite
def epochs(draw: st.DrawFn) -> Case:
    """Draw a schema of either time mode, writers, records and statics."""
    is_indexed = draw(st.booleans())
    indexed = ms.IndexedTime([10.0 * i for i in range(N_TOTAL)], units="s")
    dims = {"time": None, "y": draw(st.integers(1, 9)), "x": draw(st.integers(1, 9))}
    schema = ms.StreamSchema(
        dims=dims,
        time=indexed if is_indexed else ms.AppendTime(units="s"),
        variables={
            "a": ms.Variable(("time", "y", "x"), "f4", shard_shape={"y": draw(st.integers(1, 4)), "time": 2}),
            "b": ms.Variable(("time", "x"), "f8"),
            "e": ms.Variable(("time",), "f8"),
        },
        statics={"s": ms.Variable(("y",), "i4"), "z": ms.Variable((), "i4")},
    )
    n_writers = draw(st.integers(1, 6))
    schema = resolve_layout(schema, n_writers)
    epoch = prove_epoch(schema, shard_regions(schema, n_writers))
    if is_indexed:
        order = draw(st.permutations(range(N_TOTAL)))
        n_old, n_new = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        old, new = sorted(order[:n_old]), sorted(order[n_old : n_old + n_new])
        times = [10.0 * i for i in new]
    else:
        old = list(range(draw(st.integers(0, 3))))
        times = sorted(draw(st.sets(st.floats(100, 1000), max_size=4)))
        new = list(range(len(old), len(old) + len(times)))
    manifest = replace(
        Manifest.first(store_id="s", run_id="r", epoch=1, schema=schema, layout_digest="d"),
        committed=ranges_of(old),
        last_t=10.0 * old[-1] if old else None,
        times_digest=add_times(ZEROS, [(i, 10.0 * i) for i in old]),
    )
    statics = tuple(sorted(draw(st.sets(st.sampled_from(["s", "z"])))))
    return Case(manifest, epoch, ranges_of(new), times, statics)


def old_times(manifest: Manifest) -> list[tuple[int, float]]:
    return [(i, 10.0 * i) for i in members(manifest.committed)]


# A whole epoch is proven for each example.
some = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])

# Only what stands in a receipt or in a message may be another: no proof hangs on it.
FREE = {"n_objects", "n_blobs", "nbytes", "last_t", "times"}
OTHER: dict[str, Any] = {
    "store_id": "x",
    "run_id": "x",
    "fingerprint": "x",
    "times_sha256": "x",
    "region": Region(("y", "x"), [((90, 91), (90, 91))]),
    "failure": error_to_json(StoreError("x"), rank=0),
}


@given(epochs(), st.data())
@some
def test_right_tokens_commit_and_any_mutated_field_is_refused(case, data) -> None:
    """I1 and I3: for any tiling and records, a single wrong field of a single token is a fault that names its rank."""
    manifest, epoch, records, times, statics = case
    tokens = case.tokens()
    found = decide(manifest, epoch, tokens, times)
    assert found.faults == ()
    assert found.manifest == next_manifest(manifest, records, times, statics, sum(t.n_packs for t in tokens))
    assert found.manifest is not None
    again = Manifest.from_bytes(found.manifest.to_bytes())
    assert set(members(again.committed)) == {*members(manifest.committed), *members(records)}
    expected = dict([*old_times(manifest), *zip(members(records), times, strict=True)])
    assert again.last_t == (expected[max(expected)] if expected else None)
    assert again.times_digest == add_times(ZEROS, expected.items())

    i = data.draw(st.integers(0, len(tokens) - 1))
    name = data.draw(st.sampled_from(sorted(set(CommitToken.__dataclass_fields__) - FREE)))
    value = getattr(tokens[i], name)
    if name in OTHER:
        wrong = OTHER[name]
    elif name == "records":
        # Moved, or without its last record, or with one more. Where one writer alone says which of the fixed times it
        # wrote, as many others are as good: that they are its own is for that writer to see.
        numbers = set(members(value))
        is_told = len(tokens) > 1 or manifest.schema.n_total is None
        wrong = data.draw(
            st.sampled_from(
                [((a + 1, b + 1), *value[1:]) for a, b in value[: int(is_told)]]
                + [ranges_of(numbers - {max(numbers, default=0)})] * bool(numbers)
                + [ranges_of(numbers | {max(numbers, default=manifest.n_records) + 1})]
            )
        )
    elif name in ("n_cells", "statics"):
        key = data.draw(st.sampled_from([*value, "unknown"]))
        wrong = {**value, key: value.get(key, 0) + data.draw(st.sampled_from([-1, 1, 2**40]))}
    elif name == "n_packs":
        wrong = data.draw(st.sampled_from([-1, 2, 2**40]))
    else:
        wrong = value + data.draw(st.sampled_from([-1, 1, 2**40]))
    tokens[i] = replace(tokens[i], **{name: wrong})
    refused = decide(manifest, epoch, tokens, times)
    assert refused.faults
    assert (refused.manifest, refused.receipt) == (None, None)
    if name != "records":
        assert i in {f.writer for f in refused.faults}


@given(epochs(), st.data())
@some
def test_a_set_that_is_not_complete_is_refused(case, data) -> None:
    """A token left out, doubled or in the place of another."""
    tokens = case.tokens()
    n = len(tokens)
    chosen = data.draw(st.lists(st.integers(0, n - 1), max_size=n + 2))
    found = decide(case.manifest, case.epoch, [tokens[i] for i in chosen], case.times)
    assert (not found.faults) is (sorted(chosen) == list(range(n)))

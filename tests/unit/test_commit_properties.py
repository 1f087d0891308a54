"""The decision over any tiling: right tokens are a commit, and whatever else is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpistream as ms
from mpistream.commit import decide, next_manifest
from mpistream.epoch import EpochState, prove_epoch
from mpistream.errors import StoreError, error_to_json
from mpistream.layout import decompose, resolve_layout
from mpistream.manifest import Manifest, add_times
from mpistream.region import Region
from mpistream.token import CommitToken
from tests.support.tokens import ZEROS, right_tokens


@st.composite
def epochs(draw: st.DrawFn) -> tuple[Manifest, EpochState, list[float], tuple[str, ...]]:
    """Draw a schema, writers, records and statics."""
    dims = {"time": None, "y": draw(st.integers(1, 9)), "x": draw(st.integers(1, 9))}
    schema = ms.StreamSchema(
        dims=dims,
        time=ms.AppendTime(units="s"),
        variables={
            "a": ms.Variable(("time", "y", "x"), "f4", shard_shape={"y": draw(st.integers(1, 4)), "time": 2}),
            "b": ms.Variable(("time", "x"), "f8"),
            "e": ms.Variable(("time",), "f8"),
        },
        statics={"s": ms.Variable(("y",), "i4"), "z": ms.Variable((), "i4")},
    )
    n_writers = draw(st.integers(1, 6))
    schema = resolve_layout(schema, n_writers)
    epoch = prove_epoch(schema, decompose(schema, n_writers))
    n_committed = draw(st.integers(0, 3))
    old = np.arange(float(n_committed)).tolist()
    manifest = Manifest.first(store_id="s", run_id="r", epoch=1, schema=schema, layout_digest="d")
    manifest = manifest.with_records(n_committed, old[-1] if old else None, add_times(ZEROS, 0, old))
    times = sorted(draw(st.sets(st.floats(10, 100), max_size=4)))
    statics = tuple(sorted(draw(st.sets(st.sampled_from(["s", "z"])))))
    return manifest, epoch, times, statics


# A whole epoch is proven for each example.
some = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])

# Only what stands in a receipt or in a message may be another: no proof hangs on it.
FREE = {"n_objects", "nbytes", "last_t"}
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
    manifest, epoch, times, statics = case
    tokens = right_tokens(manifest, epoch, times, statics)
    found = decide(manifest, epoch, tokens, times)
    assert found.faults == ()
    assert found.manifest == next_manifest(manifest, times, statics)
    assert found.manifest is not None
    assert Manifest.from_bytes(found.manifest.to_bytes()).n_records == manifest.n_records + len(times)

    i = data.draw(st.integers(0, len(tokens) - 1))
    name = data.draw(st.sampled_from(sorted(set(CommitToken.__dataclass_fields__) - FREE)))
    value = getattr(tokens[i], name)
    if name in OTHER:
        wrong = OTHER[name]
    elif name in ("n_cells", "statics"):
        key = data.draw(st.sampled_from([*value, "unknown"]))
        wrong = {**value, key: value.get(key, 0) + data.draw(st.sampled_from([-1, 1, 2**40]))}
    else:
        wrong = value + data.draw(st.sampled_from([-1, 1, 2**40]))
    tokens[i] = replace(tokens[i], **{name: wrong})
    refused = decide(manifest, epoch, tokens, times)
    assert refused.faults
    assert (refused.manifest, refused.receipt) == (None, None)
    if name not in ("start", "stop"):
        assert i in {f.writer for f in refused.faults}


@given(epochs(), st.data())
@some
def test_a_set_that_is_not_complete_is_refused(case, data) -> None:
    """A token left out, doubled or in the place of another."""
    manifest, epoch, times, statics = case
    tokens = right_tokens(manifest, epoch, times, statics)
    n = len(tokens)
    chosen = data.draw(st.lists(st.integers(0, n - 1), max_size=n + 2))
    found = decide(manifest, epoch, [tokens[i] for i in chosen], times)
    assert (not found.faults) is (sorted(chosen) == list(range(n)))

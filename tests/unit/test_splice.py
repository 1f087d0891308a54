"""Two versions of a shard to one: every reader of either index finds its inner chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream.errors import FormatError
from mpistream.zarr3.shard import ChunkEncoder, OpenShard
from mpistream.zarr3.splice import with_records_of
from tests.support.shards import entries_of, joined, make_spec, read_whole, write_shard

N = 6
BOX = (4, 3)


@given(st.integers(0, N), st.sampled_from([1, 2, 3]), st.integers(0, N), st.sampled_from(["none", "compact"]))
@settings(max_examples=60, deadline=None)
def test_dropped_records_are_put_back(n_kept: int, extent: int, n_new: int, profile: str) -> None:
    """Kept records stay where they lie, dropped ones have their old values, also where those are fill."""
    spec = make_spec((N, *BOX), (extent, 2, 3), profile=profile)
    cells = np.arange(12, dtype="float32").reshape(BOX)
    old = [cells + 100 * i if i % 2 else np.zeros(BOX, "float32") for i in range(N)]
    aside = write_shard(spec, old)
    shard = OpenShard.from_object(ChunkEncoder(spec), BOX, aside, set(range(n_kept)))
    for i in range(n_kept, min(n_kept + n_new, N)):
        shard.put(i, cells + 7000 + i)
    current = joined(shard)
    found = b"".join(with_records_of(spec, current, aside, range(n_kept, N)))
    np.testing.assert_array_equal(read_whole(spec, found), np.stack(old))
    assert found[: len(current) - spec.index_nbytes] == current[: -spec.index_nbytes]
    first = -(-n_kept // extent) if n_kept == N else n_kept // extent
    kept = {p: e for p, e in entries_of(spec, current).items() if p[0] < first}
    assert {p: e for p, e in entries_of(spec, found).items() if p[0] < first} == kept


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_index_is_refused(which: int) -> None:
    spec = make_spec((2, 2), (1, 2))
    good = write_shard(spec, [np.array([1, 2], "float32"), np.array([3, 4], "float32")])
    for damaged in (good[:-1] + bytes([good[-1] ^ 1]), good[:5], b""):
        pair = (damaged, good) if which == 0 else (good, damaged)
        with pytest.raises(FormatError):
            with_records_of(spec, *pair, [1])

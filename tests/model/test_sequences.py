"""2,000 random sequences of operations, each compared with a model after every operation."""

from __future__ import annotations

import pytest

from tests.model.sequences import run_sequences

N_PER_BATCH = 100


@pytest.mark.parametrize("batch", range(20))
def test_random_sequences_do_what_the_model_says(batch: int) -> None:
    """Whatever ranks do, and whatever fails, exactly what was committed can be read, on every rank the same."""
    run_sequences(batch * N_PER_BATCH, N_PER_BATCH)

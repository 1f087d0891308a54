"""Random sequences of operations against the model: ``python -m tests.model.sequences [--seed N] [--n N]``.

A sequence is a number. From it come the stream, the order in which ranks run, and one generator for each operation,
so that an operation that is left out changes none of the others: that is how a failing sequence is made shorter.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback

from tests.model.crew import in_one_process
from tests.model.opening import N_OPERATIONS
from tests.model.repairing import Repairing
from tests.model.state import assert_plain
from tests.support.verified import assert_no_damage, assert_sound

__all__ = ["Failed", "Sequence", "run_sequence", "run_sequences"]

# What is drawn, and how often; some of it has to wait for what it needs.
WEIGHTS = {
    "write": 24,
    "static": 4,
    "blob": 10,
    "bad_call": 6,
    "flush": 5,
    "commit": 18,
    "rollback": 4,
    "invalidate": 6,
    "close": 3,
    "resume": 6,
    "abandon": 3,
    "leave": 2,
    "lag": 3,
    "mismatch": 2,
    "fault": 10,
    "kill": 8,
    "repair": 5,
    "ghost": 4,
    "second": 2,
    "overwrite": 1,
}


class Failed(AssertionError):  # noqa: N818 (no error of ours: a test's verdict)
    """A sequence found a difference; the message says how to run it again."""


class Sequence(Repairing):
    """One sequence."""

    def run(self) -> None:
        """Run it; what differs is an AssertionError."""
        try:
            for self.i in range(N_OPERATIONS):
                draw = random.Random(f"{self.seed} {self.i}")
                if self.i not in self.skip:
                    self.step(draw)
            self.finish(random.Random(f"{self.seed} end"))
        finally:
            for crew in (self.crew, *self.ghosts):
                if crew is not None:
                    crew.abandon()

    def step(self, draw: random.Random) -> None:
        """One operation, and all comparisons."""
        if self.crew is None:
            others = ["resume", "resume", "resume", "repair", "overwrite", "kill"]
            name = "open" if self.state is None else draw.choice(others)
            if name == "overwrite" and draw.random() < 0.9:
                name = "resume"
        else:
            name = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        self.say(name)
        getattr(self, name)(draw)
        self.check(draw)

    def finish(self, draw: random.Random) -> None:
        """Close, resume and let zarr-python read it."""
        self.i = N_OPERATIONS
        if self.state is None:
            return
        if self.crew is not None:
            self.say("close")
            self.close(draw)
            self.check(draw)
        # Before what a crew that was killed has left over is removed, and after.
        if draw.random() < 0.2:
            assert_no_damage(self.store)
        self.say("resume")
        self.opened(draw, None)
        self.check(draw)
        self.close(draw)
        self.check(draw)
        assert not [k for k in list(self.store._objects) if k.startswith(".mpistream/stage/")]
        if draw.random() < 0.2:
            assert_plain(self.store, self.shape, self.state)
            assert_sound(self.store)


def run_sequence(seed: int) -> None:
    """Run one sequence; what it finds is made as short as it gets and raised as `Failed`."""
    sequence = Sequence(seed)
    try:
        sequence.run()
        return
    except Exception as error:  # noqa: BLE001 (whatever it is, the seed must be told)
        first, log, text = error, sequence.log, traceback.format_exc()
    skip: set[int] = set(range(sequence.i + 1, N_OPERATIONS)) if sequence.i < N_OPERATIONS else set()
    for i in reversed(range(min(sequence.i + 1, N_OPERATIONS))):
        shorter = Sequence(seed, {*skip, i})
        try:
            shorter.run()
        except Exception:  # noqa: BLE001 (the same failure, we hope; another one is as good)
            skip, log, text = {*skip, i}, shorter.log, traceback.format_exc()
    about = f"{sequence.shape.schema.mode}, rows {sequence.shape.row}; without the operations {sorted(skip)}:"
    raise Failed(
        "\n".join(
            [
                f"sequence {seed}: {type(first).__name__}: {first}",
                f"again: python -m tests.model.sequences --seed {seed} --n 1",
                about,
                *log,
                text,
            ]
        )
    ) from first


def run_sequences(first: int, n: int) -> None:
    """Run sequences by number."""
    with in_one_process():
        for seed in range(first, first + n):
            run_sequence(seed)


def main() -> None:
    """Run sequences by number, and go on after failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="number of the first sequence")
    parser.add_argument("--n", type=int, default=2000, help="how many")
    arguments = parser.parse_args()
    logging.getLogger("mpistream").setLevel(logging.CRITICAL)
    began, n_failed = time.perf_counter(), 0
    for seed in range(arguments.seed, arguments.seed + arguments.n):
        try:
            run_sequences(seed, 1)
        except Failed as error:
            n_failed += 1
            print(error, flush=True)
    print(f"{arguments.n} sequences, {n_failed} failed, {time.perf_counter() - began:.0f} s")
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()

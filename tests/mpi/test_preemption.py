"""Guards and pairs of restart states on real ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, error_on_all, on_root, subcomm, sync
from tests.support.scene import PLANE, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


def test_signal_to_one_rank_stops_all_in_the_same_call(comm: MPI.Intracomm) -> None:
    """The last rank alone gets one, twice; every rank leaves its loop in the step after (P-62)."""
    with ms.PreemptionGuard(comm, signals=[signal.SIGUSR1], timeout=20) as guard:
        steps = 0
        while not guard.should_stop():
            steps += 1
            if steps == 3 and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert guard.should_stop()
    assert comm.allgather((steps, guard.exit_code, guard.reason)) == [(3, 75, "signal SIGUSR1")] * comm.size


@pytest.mark.parametrize("poll_every", [1, 4])
def test_many_calls(comm: MPI.Intracomm, poll_every: int) -> None:
    """Some thousand reductions, and one function that is met on rank 0."""
    calls = [0]

    def is_met() -> bool:
        calls[0] += 1
        return comm.rank == 0 and calls[0] == 200

    with ms.PreemptionGuard(comm, any_of=[is_met], poll_every=poll_every, timeout=20) as guard:
        n = 0
        while not guard.should_stop():
            n += 1
    assert comm.allgather(n) == [199 * poll_every] * comm.size


def test_function_that_raises_on_one_rank_is_the_same_error_on_all(comm: MPI.Intracomm) -> None:
    """And the guard goes on once it is mended."""
    broken = [comm.rank == comm.size - 1]
    with ms.PreemptionGuard(comm, any_of=[lambda: broken[0] and 1 // 0], timeout=20) as guard:
        with pytest.raises(ms.ProtocolError, match=f"rank {comm.size - 1}: a function of any_of raised"):
            guard.should_stop()
        broken[0] = False
        assert guard.should_stop() is False
        sync(comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("leaver", [0, -1])
def test_rank_that_raises_in_the_body_ends_the_others(comm: MPI.Intracomm, leaver: int) -> None:
    leaver %= comm.size

    def run() -> None:
        with ms.PreemptionGuard(comm, timeout=20) as guard:
            guard.should_stop()
            if comm.rank == leaver:
                raise ZeroDivisionError
            guard.should_stop()

    with pytest.raises(ZeroDivisionError if comm.rank == leaver else ms.CommitError) as caught:
        run()
    if comm.rank != leaver:
        assert (caught.value.kind, caught.value.rank) == ("left", leaver)  # type: ignore[attr-defined]
    sync(comm)


def test_bad_argument_of_one_rank_is_refused_on_all(comm: MPI.Intracomm) -> None:
    guard = ms.PreemptionGuard(comm, margin=-1.0 if comm.rank == comm.size - 1 else 1.0, timeout=20)
    error = error_on_all(comm, guard.__enter__)
    assert (type(error), error.rank) == (ms.SchemaError, comm.size - 1)


@pytest.mark.parametrize("shard", [2, 3])
def test_state_comes_back_on_another_number_of_ranks(comm: MPI.Intracomm, mpi_tmp_path: Path, shard: int) -> None:
    """Saved three times on all ranks, restored on fewer; with regions on shard edges, and off them."""
    schema = PLANE.schema(shard_shape={"time": 1, "y": shard, "x": 6})
    pair = ms.CheckpointPair(mpi_tmp_path / "restart", schema)
    assert pair.restore(comm) is None
    region = {"y": (8 * comm.rank // comm.size, 8 * (comm.rank + 1) // comm.size)}
    for i in range(3):
        arrays = {**PLANE.record(region, i), "topo": PLANE.block("topo", region)}
        pair.save(time_of(i), arrays, blobs={"rng": b"%d" % comm.rank}, comm=comm, region=region, options=OPTIONS)
    sync(comm)
    sub = subcomm(comm, max(1, comm.size - 1))
    if sub is not None:
        found = pair.restore(sub)
        assert found is not None
        reader, t = found
        assert t == time_of(2)
        mine = {"y": (8 * sub.rank // sub.size, 8 * (sub.rank + 1) // sub.size)}
        assert reader.read_record("u", 0, mine).tobytes() == PLANE.block("u", mine, 2).tobytes()
        assert reader.read_static("topo", mine).tobytes() == PLANE.block("topo", mine).tobytes()
        assert reader.read_blob("rng", 0, writer=comm.size - 1) == b"%d" % (comm.size - 1)
        reader.close()
    sync(comm)
    assert on_root(comm, lambda: sorted(os.listdir(mpi_tmp_path / "restart"))) == ["0", "1"]


def test_save_that_fails_on_one_rank_leaves_the_state_of_before(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A block of a wrong shape on the last rank; all ranks hear of it."""
    pair = ms.CheckpointPair(mpi_tmp_path / "restart", PLANE.schema(shard_shape={"time": 1, "y": 1, "x": 6}))
    region = {"y": (8 * comm.rank // comm.size, 8 * (comm.rank + 1) // comm.size)}
    pair.save(time_of(0), PLANE.record(region, 0), comm=comm, region=region, options=OPTIONS)
    wrong = PLANE.record(region, 1)
    if comm.rank == comm.size - 1:
        wrong["u"] = wrong["u"][:, :-1]
    with pytest.raises((ms.CommitError, ms.SchemaError)):
        pair.save(time_of(1), wrong, comm=comm, region=region, options=OPTIONS)
    sync(comm)
    found = pair.restore(comm)
    assert found is not None
    assert found[1] == time_of(0)
    found[0].close()


def test_a_save_that_fails_leaves_other_writers_alone(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A block of a wrong shape on one rank: the error of all, in the save alone; then both stores go on."""
    pair = ms.CheckpointPair(mpi_tmp_path / "state", PLANE.schema())
    region = {"y": (8 * comm.rank // comm.size, 8 * (comm.rank + 1) // comm.size)}
    state = {**PLANE.record(region, 0), **{name: PLANE.block(name, region) for name in PLANE.region_statics}}
    with ms.write_open(mpi_tmp_path / "run", PLANE.schema(), comm=comm, region=region, options=OPTIONS) as w:
        PLANE.write_statics(w)
        PLANE.write(w, 0)
        bad = {**state, "u": np.zeros((1, 1, 1))} if comm.rank == comm.size - 1 else state
        error = error_on_all(comm, lambda: pair.save(0.0, bad, comm=comm, region=region, options=OPTIONS))
        assert (error.kind, error.rank) == ("shape", comm.size - 1)
        assert w.commit().n_records == 1
        pair.save(1.0, state, comm=comm, region=region, options=OPTIONS)
        PLANE.write(w, 1)
    sync(comm)
    assert ms.open_reader(mpi_tmp_path / "run").n_records == 2
    found = pair.restore(comm)
    assert found is not None
    assert found[1] == 1.0
    found[0].close()

"""The helpers that the tests stand on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistream.comm import SwapTimeoutError, Transport
from tests.support.mpi_run import mpiexec, start_mpiexec
from tests.support.ranks import MemoryTransport, MemoryWorld, run_ranks
from tests.support.wait import wait_until

# A rank that says its number, then sleeps.
SLEEPER = [
    "-c",
    "from mpi4py import MPI; import time; print(MPI.COMM_WORLD.rank, flush=True); time.sleep(300)",
]


class TestWaitUntil:
    def test_returns_the_first_true_value(self) -> None:
        values = iter([0, "", 7, 8])
        assert wait_until(lambda: next(values), 5, "a value") == 7

    def test_says_what_it_waited_for(self) -> None:
        with pytest.raises(TimeoutError, match=r"^waited 0\.05 s for the moon$"):
            wait_until(lambda: False, 0.05, "the moon")


class TestRanks:
    def test_is_a_transport(self) -> None:
        transport: Transport = MemoryTransport(MemoryWorld(1, timeout=5), 0)
        assert transport.is_usable()
        transport.free()
        assert not transport.is_usable()

    def test_results_come_in_the_order_of_ranks(self) -> None:
        assert run_ranks(4, lambda t: (t.rank, t.size)) == [(0, 4), (1, 4), (2, 4), (3, 4)]

    def test_messages_keep_sender_tag_and_order(self) -> None:
        def fn(transport: MemoryTransport) -> list[tuple[int, bytes]]:
            for text in (b"a", b"b"):
                transport.send(0, 5, text)
            transport.send(0, 6, b"other tag")
            if transport.rank:
                return []
            return [wait_until(lambda: transport.poll(5), 5, "a message") or (0, b"") for _ in range(6)]

        got = run_ranks(3, fn)[0]
        assert [[text for rank, text in got if rank == r] for r in range(3)] == [[b"a", b"b"]] * 3

    def test_poll_finds_nothing(self) -> None:
        assert run_ranks(2, lambda t: t.poll(1)) == [None, None]

    def test_swap_copies_arrays_in_the_order_of_each_pair(self) -> None:
        def fn(transport: MemoryTransport) -> list[list[int]]:
            other = 1 - transport.rank
            mine = [np.array([transport.rank, k]) for k in range(3)]
            into = [np.zeros(2, int) for _ in mine]
            transport.swap([(other, a) for a in mine], [(other, a) for a in into], 5, 0, lambda: None)
            for a in mine:
                a[...] = -1
            return [a.tolist() for a in into]

        assert run_ranks(2, fn) == [[[1, 0], [1, 1], [1, 2]], [[0, 0], [0, 1], [0, 2]]]

    def test_swap_with_a_rank_that_has_ended_is_an_error(self) -> None:
        def fn(transport: MemoryTransport) -> None:
            if transport.rank == 0:
                with pytest.raises(SwapTimeoutError) as caught:
                    transport.swap([], [(1, np.zeros(2))], 30, 0, lambda: None)
                assert caught.value.ranks == (1,)

        run_ranks(2, fn, timeout=20)

    def test_gather_is_in_the_order_of_ranks_and_of_calls(self) -> None:
        def fn(transport: MemoryTransport) -> list[list[bytes] | None]:
            time.sleep(0.01 * (3 - transport.rank))
            return [transport.gather(f"{i}{transport.rank}".encode(), 5) for i in range(2)]

        assert run_ranks(3, fn) == [[[b"00", b"01", b"02"], [b"10", b"11", b"12"]], [None] * 2, [None] * 2]

    def test_gather_returns_on_others_before_all_are_there(self) -> None:
        """What MPI allows: a rank that is not 0 knows nothing of the others when gather returns."""

        def fn(transport: MemoryTransport) -> list[bytes] | None:
            if transport.rank == 0:
                wait_until(lambda: transport.poll(1), 5, "rank 1 to be out of gather")
            result = transport.gather(b"x", 5)
            if transport.rank == 1:
                transport.send(0, 1, b"out")
            return result

        assert run_ranks(2, fn) == [[b"x", b"x"], None]

    def test_gather_with_a_rank_that_died_ends(self) -> None:
        def fn(transport: MemoryTransport) -> list[bytes] | None:
            if transport.rank == 1:
                raise KeyError("gone")
            return transport.gather(b"", 60)

        results = run_ranks(3, fn, return_exceptions=True)
        assert isinstance(results[0], TimeoutError)
        assert str(results[0]) == "rank 0 waits in gather for ranks [1], which have ended"
        assert isinstance(results[1], KeyError)
        assert results[2] is None

    def test_gather_ends_with_its_timeout(self) -> None:
        def fn(transport: MemoryTransport) -> list[bytes] | None:
            if transport.rank == 1:
                wait_until(lambda: transport.poll(1), 5, "rank 0 to have given up")
                return None
            with pytest.raises(TimeoutError, match=r"^rank 0 waits in gather for ranks \[1\]$"):
                transport.gather(b"", 0.01)
            transport.send(1, 1, b"given up")
            return []

        assert run_ranks(2, fn) == [[], None]

    def test_every_failure_is_raised_with_its_rank(self) -> None:
        def fn(transport: MemoryTransport) -> None:
            if transport.rank != 1:
                raise ValueError(f"no {transport.rank}")

        with pytest.raises(ExceptionGroup, match=r"ranks \[0, 2\] of 3 failed") as caught:
            run_ranks(3, fn)
        assert [str(e) for e in caught.value.exceptions] == ["no 0", "no 2"]
        assert [e.__notes__ for e in caught.value.exceptions] == [["on rank 0 of 3"], ["on rank 2 of 3"]]

    def test_a_hanging_rank_is_shown(self) -> None:
        def fn(transport: MemoryTransport) -> None:
            if transport.rank == 1:
                time.sleep(3)  # the deadline is earlier

        with pytest.raises(TimeoutError, match=r"rank 0 is done\nrank 1 stands at:\n(.*\n)*.*time.sleep\(3\)"):
            run_ranks(2, fn, timeout=0.1)

    def test_free_ends_the_transport(self) -> None:
        def fn(transport: MemoryTransport) -> None:
            transport.free()
            transport.send(0, 1, b"")

        results = run_ranks(1, fn, return_exceptions=True)
        assert str(results[0]) == "rank 0 uses its transport after free()"

    def test_only_bytes_are_sent(self) -> None:
        text: Any = "text"
        results = run_ranks(1, lambda t: t.gather(text, 5), return_exceptions=True)
        assert isinstance(results[0], TypeError)


@pytest.fixture(params=["", "1"], ids=["started", "forked"])
def how_ranks_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank a new interpreter, or a fork of one with the imports done."""
    monkeypatch.setenv("MPISTREAM_TEST_FORK", request.param)


@pytest.mark.usefixtures("how_ranks_start")
class TestMPIRun:
    def test_output_and_code(self) -> None:
        code = "from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.allreduce(c.rank), c.size)"
        done = mpiexec(3, ["-m", "mpi4py", "-c", code])
        assert done.stdout.split() == ["3", "3"] * 3

    def test_script_has_its_arguments_and_environment(self, tmp_path: os.PathLike[str]) -> None:
        script = os.path.join(tmp_path, "a script.py")
        with open(script, "w") as file:
            file.write("import os, sys\nprint(sys.argv[1:], os.environ['GIVEN'], os.environ.get('TAKEN'))")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TAKEN", "x")
            done = mpiexec(1, [script, "one two", "-x"], env={"GIVEN": "y", "TAKEN": None})
        assert done.stdout == "['one two', '-x'] y None\n"

    def test_wrong_exit_code_shows_the_output(self) -> None:
        with pytest.raises(AssertionError, match="exit code") as caught:
            mpiexec(1, ["-c", "import sys; print('spoke'); sys.exit(3)"])
        assert "spoke" in "".join(caught.value.__notes__)
        assert mpiexec(1, ["-c", "raise SystemExit(3)"], expect=3).returncode == 3

    def test_late_job_says_where_it_stood_and_is_gone(self) -> None:
        with start_mpiexec(2, SLEEPER) as job:
            wait_until(lambda: len(job.stdout().split()) == 2, 30, "both ranks to speak")
            with pytest.raises(TimeoutError) as caught:
                job.wait(timeout=0.1)
            assert job.pids == {}
        assert str(caught.value).count('File "<string>", line 1 in <module>') == 2

    def test_killed_rank_ends_the_job(self) -> None:
        with start_mpiexec(3, SLEEPER) as job:
            assert sorted(job.wait_for_ranks()) == [0, 1, 2]
            wait_until(lambda: len(job.stdout().split()) == 3, 30, "all ranks to speak")
            job.kill_ranks(ranks=[1])
            assert job.wait(timeout=30) != 0

    def test_what_a_killed_rank_shared_is_removed(self) -> None:
        with start_mpiexec(2, SLEEPER) as job:
            wait_until(lambda: len(job.stdout().split()) == 2, 30, "both ranks to speak")
            maps = [Path(f"/proc/{pid}/maps").read_text() for pid in job.pids.values()]
            shared = {line.split()[-1] for text in maps for line in text.splitlines() if " /dev/shm/" in line}
            job.kill_ranks()
        assert len(maps) == 2
        assert not any(map(os.path.exists, shared))

    def test_nothing_outlives_the_body(self) -> None:
        """Not even ranks whose launcher was killed."""
        with start_mpiexec(2, SLEEPER) as job:
            job.wait_for_ranks()
            os.kill(job.launcher_pid, signal.SIGKILL)
        assert job.pids == {}

"""The guard on one process: what it does with signals, ends of jobs and functions; and with ranks that are threads."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpistream as ms
from mpistream.agreement import Channel
from mpistream.walltime import SCHEDULERS, end_of_job
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may itself belong to a batch job."""
    for variable in (*SCHEDULERS.values(), "SLURM_JOB_END_TIME", "PBS_WALLTIME", "PBS_NODEFILE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put commands on PATH: what they are called, and their lines; each call of one is noted in a file."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    calls = tmp_path / "calls"

    def put(name: str, body: str) -> Path:
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{calls}\n{body}\n')
        (tmp_path / name).chmod(0o755)
        return calls

    return put


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_stops_and_does_not_kill(number: signal.Signals) -> None:
    """However often it comes; the answer stays yes, and after the body everything is as before."""
    before = signal.getsignal(number)
    with ms.PreemptionGuard() as guard:
        assert (guard.should_stop(), guard.exit_code, guard.reason) == (False, 0, None)
        os.kill(os.getpid(), number)
        assert guard.should_stop()
        os.kill(os.getpid(), number)
        assert guard.should_stop()
    assert (guard.exit_code, guard.reason) == (75, f"signal {number.name}")
    assert signal.getsignal(number) is before


def test_handlers_of_the_program_are_called_and_come_back() -> None:
    """Also when the body raises; of two guards the outer one hears of a signal, too."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        own = signal.getsignal(signal.SIGUSR1)
        with ms.PreemptionGuard() as outer:
            with contextlib.suppress(ZeroDivisionError), ms.PreemptionGuard(signals=[signal.SIGUSR1]) as inner:
                os.kill(os.getpid(), signal.SIGUSR1)
                assert inner.should_stop()
                raise ZeroDivisionError
            assert outer.should_stop()
        assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_from_the_keyboard_is_a_wish_to_end_if_it_is_asked_for() -> None:
    with ms.PreemptionGuard(signals=[signal.SIGINT]) as guard:
        os.kill(os.getpid(), signal.SIGINT)
        assert guard.should_stop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_during_the_commit_does_not_end_it(tmp_path: Path) -> None:
    """The record that is committed when it comes is committed."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4},
        time=ms.AppendTime(units="s"),
        variables={"v": ms.Variable(("time", "y"), "int32")},
    )

    class Interrupted(ms.StreamWriter):
        def commit(self, *args: Any, **kwargs: Any) -> ms.CommitReceipt:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().commit(*args, **kwargs)

    with ms.PreemptionGuard() as guard, ms.write_open(tmp_path / "s", schema) as w:
        w.__class__ = Interrupted
        os.kill(os.getpid(), signal.SIGTERM)
        w.write_record(0.0, {"v": 7})
        assert guard.should_stop()
        w.commit()
    assert ms.read_record(tmp_path / "s", "v", 0).tolist() == [7] * 4


@pytest.mark.parametrize(
    ("deadline", "margin", "is_over"),
    [
        (lambda: time.time() + 50, 60, True),
        (lambda: time.time() + 5000, 60, False),
        (lambda: dt.datetime.now(dt.UTC) + dt.timedelta(seconds=50), 60, True),
        (lambda: dt.datetime.now(dt.UTC) + dt.timedelta(seconds=50), 0, False),
        (lambda: 0, 0, True),
    ],
)
def test_deadline_less_the_margin_is_when_to_stop(deadline: Callable[[], Any], margin: float, is_over: bool) -> None:
    with ms.PreemptionGuard(deadline=deadline(), margin=margin) as guard:
        assert guard.should_stop() is is_over
    assert guard.reason == ("time is nearly over" if is_over else None)


def test_functions_are_combined_by_or() -> None:
    wanted: list[bool] = [False, False]
    with ms.PreemptionGuard(any_of=[lambda: wanted[0], lambda: wanted[1]]) as guard:
        assert not guard.should_stop()
        wanted[1] = True
        assert guard.should_stop()
    assert guard.reason == "function 2 of any_of"


def test_a_function_that_raises_is_an_error_that_names_it() -> None:
    with ms.PreemptionGuard(any_of=[lambda: 1 // 0]) as guard:
        with pytest.raises(ms.ProtocolError, match=r"rank 0: a function of any_of raised ZeroDivisionError") as caught:
            guard.should_stop()
        assert caught.value.kind == "predicate"


def test_only_every_so_many_calls_look() -> None:
    """With poll_every=3 the calls 1, 4 and 7 do, the others answer no."""
    n_looks = [0]

    def look() -> bool:
        n_looks[0] += 1
        return n_looks[0] == 3

    with ms.PreemptionGuard(any_of=[look], poll_every=3) as guard:
        assert [guard.should_stop() for _ in range(8)] == [False] * 6 + [True] * 2
    assert n_looks == [3]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"signals": [9999]}, "9999 is no signal"),
        ({"signals": ["SIGTERM"]}, "'SIGTERM' is no signal"),
        ({"walltime": "cobalt"}, "'cobalt': use 'slurm', 'pbs', 'lsf', 'auto' or None"),
        ({"margin": -1}, "margin -1"),
        ({"timeout": float("nan")}, "timeout nan"),
        ({"poll_every": 0}, "poll_every 0"),
        ({"poll_every": 1.5}, "poll_every 1.5"),
        ({"any_of": [True]}, "any_of: give a list of functions"),
        ({"deadline": dt.datetime(2030, 1, 1)}, "has no zone"),
        ({"deadline": "tomorrow"}, "deadline 'tomorrow'"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_when_it_is_opened(arguments: dict[str, Any], text: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ms.SchemaError, match=text) as caught, ms.PreemptionGuard(**arguments):
        pass
    assert caught.value.kind == "option"
    assert signal.getsignal(signal.SIGTERM) is before


def in_thread(call: Callable[[], object]) -> object:
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except ms.MPIStreamError as error:
            found.append(error)

    thread = threading.Thread(target=run, name="worker")
    thread.start()
    thread.join(30)
    return found[0]


def test_outside_the_main_thread_there_are_no_signals() -> None:
    """They are refused with the way out, and without them the guard works."""

    def open_one(**more: Any) -> bool:
        with ms.PreemptionGuard(deadline=0, **more) as guard:
            return guard.should_stop()

    refused = in_thread(open_one)
    assert isinstance(refused, ms.ProtocolError)
    assert refused.kind == "thread"
    assert "thread 'worker'" in str(refused)
    assert "signals=()" in str(refused)
    assert in_thread(lambda: open_one(signals=())) is True


def test_a_guard_answers_in_its_body_only() -> None:
    guard = ms.PreemptionGuard()
    with pytest.raises(ms.ProtocolError, match="not open"):
        guard.should_stop()
    with guard, pytest.raises(ms.ProtocolError, match="open already"), guard:
        pass


# ---- the end of a job -----------------------------------------------------------------------------------


def end_text() -> tuple[str, float]:
    """Return an end half an hour from now as squeue prints it, and in seconds since the epoch."""
    end = dt.datetime.now().replace(microsecond=0) + dt.timedelta(minutes=30)
    return end.isoformat(), end.timestamp()


def test_slurm_is_asked_once_and_by_rank_0(
    program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before version 23 the environment does not tell; the margin is kept."""
    text, _ = end_text()
    calls = program("squeue", f'[ "$SLURM_TIME_FORMAT" = standard ] && echo {text}')
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    for margin, is_over in ((1700, False), (1900, True)):
        with ms.PreemptionGuard(walltime="slurm", margin=margin) as guard:
            assert [guard.should_stop() for _ in range(3)] == [is_over] * 3
    assert calls.read_text() == "squeue -h -j 17 -o %e\n" * 2


def test_ends_of_jobs(program: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Each scheduler in the ways it tells; what it does not tell is None."""
    text, end = end_text()
    slurm, pbs, lsf = {"SLURM_JOB_ID": "17"}, {"PBS_JOBID": "17.host"}, {"LSB_JOBID": "17"}
    assert end_of_job("slurm", {**slurm, "SLURM_JOB_END_TIME": "1700000000"}) == 1_700_000_000
    program("squeue", "exit 1")
    program("scontrol", f"echo JobId=17 StartTime=2020-01-01T00:00:00 EndTime={text} Deadline=N/A")
    assert end_of_job("slurm", slurm) == end
    program("scontrol", "echo EndTime=Unknown")
    assert end_of_job("slurm", slurm) is None
    program("squeue", "echo NONE")
    assert end_of_job("slurm", slurm) is None

    nodes = tmp_path / "nodes"
    nodes.touch()
    os.utime(nodes, (1000, 1000))
    assert end_of_job("pbs", {**pbs, "PBS_WALLTIME": "3600", "PBS_NODEFILE": str(nodes)}) == 4600
    assert end_of_job("pbs", {**pbs, "PBS_WALLTIME": "3600", "PBS_NODEFILE": str(nodes) + "x"}) is None
    assert end_of_job("pbs", pbs) is None

    program("bjobs", "echo '1:30 L'")
    left = (end_of_job("lsf", lsf) or 0) - time.time()
    assert 5390 < left <= 5400
    program("bjobs", "echo -")
    assert end_of_job("lsf", lsf) is None
    assert end_of_job("lsf", {}) is None


def test_a_scheduler_that_was_named_must_tell(
    program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Named: an error with the way out. Found by itself: a warning, since signals still work."""
    program("squeue", "exit 1")
    program("scontrol", "exit 1")
    with pytest.raises(ms.ProtocolError, match=r"slurm does not say when this job ends.*deadline=") as caught:
        ms.PreemptionGuard(walltime="slurm").__enter__()
    assert caught.value.kind == "walltime"
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with ms.PreemptionGuard() as guard:
        assert not guard.should_stop()
    assert "slurm does not say when this job ends" in caplog.text


# ---- ranks ----------------------------------------------------------------------------------------------


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ms.PreemptionGuard]:
    """Guards of ranks that are threads: their communicator is the transport."""
    monkeypatch.setattr("mpistream.preemption.connect", lambda comm, timeout: comm)
    return lambda transport, **more: ms.PreemptionGuard(transport, signals=(), **more)


@pytest.mark.parametrize("n", [2, 5])
def test_what_one_rank_knows_all_do_in_the_same_call(n: int, channels: Callable[..., ms.PreemptionGuard]) -> None:
    def run(transport: Any) -> tuple[list[bool], str | None]:
        calls = [0]

        def is_met() -> bool:
            calls[0] += 1
            return transport.rank == n - 1 and calls[0] == 4

        with channels(transport, any_of=[is_met]) as guard:
            return [guard.should_stop() for _ in range(6)], guard.reason

    assert run_ranks(n, run) == [([False] * 3 + [True] * 3, "function 1 of any_of")] * n


def test_rank_0_alone_judges_time(channels: Callable[..., ms.PreemptionGuard], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has asked; another rank has no time to stop at."""
    end = time.time() + 10

    def run(transport: Any) -> list[bool]:
        with channels(transport, deadline=end, margin=60) as guard:
            assert (guard._stop_at < time.monotonic()) is (transport.rank == 0)
            return [guard.should_stop()]

    assert run_ranks(3, run) == [[True]] * 3


def test_arguments_that_differ_are_refused_on_every_rank(channels: Callable[..., ms.PreemptionGuard]) -> None:
    def run(transport: Any) -> None:
        with channels(transport, margin=transport.rank):
            pass

    found = run_ranks(3, run, return_exceptions=True)
    assert [(type(e), getattr(e, "kind", None)) for e in found] == [(ms.ProtocolError, "mismatch")] * 3


def test_bad_arguments_of_one_rank_are_an_error_on_all(channels: Callable[..., ms.PreemptionGuard]) -> None:
    def run(transport: Any) -> None:
        with channels(transport, margin="x" if transport.rank == 1 else 1):
            pass

    found = run_ranks(3, run, return_exceptions=True)
    assert [(type(e), getattr(e, "rank", None)) for e in found] == [(ms.SchemaError, 1)] * 3


def test_a_function_that_raises_on_one_rank_is_named_on_all(channels: Callable[..., ms.PreemptionGuard]) -> None:
    def run(transport: Any) -> None:
        with channels(transport, any_of=[lambda: 1 // (transport.rank - 1)]) as guard:
            guard.should_stop()

    found = run_ranks(3, run, return_exceptions=True)
    assert [(type(e), getattr(e, "kind", None), getattr(e, "rank", None)) for e in found] == [
        (ms.ProtocolError, "predicate", 1)
    ] * 3


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_with_an_exception_is_heard_of_at_once(
    leaver: int, channels: Callable[..., ms.PreemptionGuard]
) -> None:
    def run(transport: Any) -> None:
        with channels(transport) as guard:
            guard.should_stop()
            if transport.rank == leaver:
                raise ZeroDivisionError
            guard.should_stop()

    began = time.monotonic()
    found = run_ranks(3, run, return_exceptions=True)
    assert time.monotonic() - began < 8
    for rank, error in enumerate(found):
        if rank == leaver:
            assert isinstance(error, ZeroDivisionError)
        else:
            assert isinstance(error, ms.CommitError)
            assert (error.kind, error.rank) == ("left", leaver)


def test_a_rank_that_leaves_the_loop_alone_is_an_error_and_no_hang(
    channels: Callable[..., ms.PreemptionGuard],
) -> None:
    """Rank 1 ends its body one call early: rank 0 hears it, rank 2 is told."""

    def run(transport: Any) -> None:
        with channels(transport) as guard:
            for _ in range(2 if transport.rank == 1 else 3):
                guard.should_stop()

    found = run_ranks(3, run, return_exceptions=True)
    assert [(type(e), getattr(e, "kind", None)) for e in found] == [(ms.ProtocolError, "mismatch")] * 3


def test_a_rank_that_never_comes_is_an_error_after_the_timeout() -> None:
    def run(transport: Any) -> str:
        channel = Channel(transport, 0.1)
        if transport.rank == 1:
            return ""
        with pytest.raises(ms.CommitError, match=r"not all ranks came within 0.1 s") as caught:
            channel.highest("should_stop", [0])
        assert not channel.is_usable()
        with pytest.raises(ms.CommitError):
            channel.highest("should_stop", [0])
        return caught.value.kind

    assert run_ranks(3, run) == ["timeout", "", "timeout"]


def test_a_vote_that_comes_before_a_reduction_has_ended_here_is_kept() -> None:
    """Rank 1 is done with the reduction and has voted for what follows when rank 0 looks for the first time."""
    voted = threading.Event()

    def run(transport: Any) -> tuple[list[int], Any]:
        channel = Channel(transport, 5)
        if transport.rank == 0:
            start = transport.start_max

            def late(values: Any) -> Callable[[], list[int] | None]:
                found, n_looks = start(values), itertools.count()
                assert voted.wait(5)
                # Not seen to be complete at the first looks, when the vote is there already.
                return lambda: None if next(n_looks) < 2 else found()

            transport.start_max = late
            return channel.highest("a", [3]), channel.exchange("b", answer=lambda votes: votes)
        ask = transport.start_max([7])
        channel._n += 1
        channel._send_vote(1, "b", payload="early")
        voted.set()
        while (found := ask()) is None:
            pass
        channel._n += 1
        return found, channel._await_answer(1)

    assert run_ranks(2, run) == [([7], None), ([7], "early")]


def test_an_end_that_is_nearer_than_the_margin_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A deadline in seconds from now, say: the run would stop and be started again, and again."""
    with ms.PreemptionGuard(deadline=time.time() + 600, margin=1):
        pass
    assert caplog.text == ""
    with ms.PreemptionGuard(deadline=12.0) as guard:
        assert guard.should_stop()
    assert "s are left before the end of the job, and the margin is 120 s: it is to stop at once" in caplog.text

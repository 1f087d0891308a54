"""Fixtures, and what makes a failing or hanging MPI test end the job instead of hanging it.

pytest knows nothing of the other ranks: one that fails leaves the test while the others wait for it in a
collective call. So when an MPI test fails on one of several ranks, that rank prints the failure and aborts
the job; and each MPI test runs under a watchdog that prints where every thread of the rank stands before it
ends the rank.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from mpi4py import MPI

pytest.register_assert_rewrite("tests.support")

# Ranks share cores with each other, so no example has a time limit of its own.
hypothesis.settings.register_profile("mpistream", deadline=None, print_blob=True)
hypothesis.settings.load_profile("mpistream")

# Seconds that one MPI test may take on all ranks.
MPI_TEST_DEADLINE = float(os.environ.get("MPISTREAM_TEST_DEADLINE", "120"))

# The process's own standard error, beyond what pytest captures.
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # Here, not when this file is imported: that happens under capture.
    config.stash[_stderr] = os.dup(2)
    if config.getoption("--with-mpi", default=False):
        # What a launcher sends to the ranks that are left, and `timeout` to the launcher: they too say where they
        # stand before they end.
        faulthandler.register(signal.SIGTERM, file=config.stash[_stderr], chain=True)


@pytest.fixture(scope="session")
def comm() -> MPI.Intracomm:
    """All ranks that run the tests."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def mpi_tmp_path(comm: MPI.Intracomm) -> Iterator[Path]:
    """One new folder, the same for all ranks, removed when all are done with it."""
    made = tempfile.mkdtemp(prefix="mpistream-test-") if comm.rank == 0 else None
    path = Path(comm.bcast(made, root=0))
    yield path
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # ci/test collects this folder alone on the ranks; and pytest-mpi takes whatever stands in a folder of this
    # name for an MPI test, so that one without the mark would run nowhere.
    folder = Path(__file__).with_name("mpi")
    for item in items:
        if (item.get_closest_marker("mpi") is not None) != (folder in item.path.parents):
            raise pytest.UsageError(f"{item.nodeid}: tests in tests/mpi, and no others, are marked mpi")


def _runs_on_ranks(item: pytest.Item) -> bool:
    return item.config.getoption("--with-mpi", default=False) and item.get_closest_marker("mpi") is not None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    if _runs_on_ranks(item):
        # In the place of pytest's own timer, which ends nothing; pytest cancels it after the teardown.
        faulthandler.dump_traceback_later(MPI_TEST_DEADLINE, exit=True, file=item.config.stash[_stderr])
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and _runs_on_ranks(item):
        _abort_if_parallel(report, item.config.stash[_stderr])
    return report


def _abort_if_parallel(report: pytest.TestReport, stderr: int) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size == 1:
        return  # nobody waits: pytest reports it in its own way
    lines = [
        f"\n=== rank {world.rank} of {world.size} failed in {report.when} of {report.nodeid}",
        report.longreprtext,
        *(f"--- {name}\n{content}" for name, content in report.sections if content),
        "=== the job is aborted\n",
    ]
    data = "\n".join(lines).encode(errors="replace")
    while data:
        data = data[os.write(stderr, data) :]
    world.Abort(1)
    os._exit(1)  # MPICH's Abort() was seen to return

"""Several streams in one commit, with ranks as threads: what can't be staged with MPI, and calls that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistream as ms
from mpistream.agreement import Channel
from mpistream.manifest import MANIFEST_KEY
from tests.support.faults import FaultyStore
from tests.support.plain import append_schema
from tests.support.ranks import MemoryTransport, MemoryWorld, run_ranks

SCHEMA = append_schema({"x": 8}, {"u": ms.Variable(("time", "x"), "int32")}, shard_shape={"x": 1})
OPTIONS = ms.Options(durability="none", threads=0, timeout=20, writers="all")

Stores = list[FaultyStore]


class Stopped(BaseException):
    """What a signal handler raises, say."""


@pytest.fixture(autouse=True)
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator is a world and a rank."""
    monkeypatch.setattr("mpistream.session.connect", lambda comm, timeout: MemoryTransport(*comm))


def on_ranks(n: int, root: Path, fn: Callable[[list[ms.StreamWriter], Stores], Any], n_streams: int = 3) -> list[Any]:
    """Run ``fn`` on writers of one record each, committed, and one more that is not; return values and errors."""
    worlds = [MemoryWorld(n, 30) for _ in range(n_streams)]

    def run(transport: MemoryTransport) -> Any:
        stores = [FaultyStore(root / str(i)) for i in range(n_streams)]
        comms = [(world, transport.rank) for world in worlds]
        writers = [
            ms.write_open(store, SCHEMA, comm=comm, options=OPTIONS)  # type: ignore[arg-type]
            for store, comm in zip(stores, comms, strict=True)
        ]
        for w in writers:
            put(w)
            w.commit()
            put(w)
        try:
            return fn(writers, stores)
        except (ms.MPIStreamError, Stopped) as error:
            return error

    return run_ranks(n, run, timeout=60)


def put(writer: ms.StreamWriter) -> None:
    i = writer.n_records
    writer.write_record(float(i), {"u": np.arange(8, dtype="int32")[slice(*writer.region["x"])] + i})


def test_a_token_travels_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the vote; what is gathered says of each stream that it stands."""
    sent: list[bytes] = []
    gather = Channel.gather

    def noted(self: Channel, data: bytes) -> list[bytes] | None:
        sent.append(data)
        return gather(self, data)

    monkeypatch.setattr(Channel, "gather", noted)
    on_ranks(2, tmp_path, lambda writers, _: ms.commit_all(writers))
    assert sent == [b"[null]"] * 6 + [b"[null, null, null]"] * 2
    assert lengths(tmp_path) == [2, 2, 2]


def lengths(root: Path, n_streams: int = 3) -> list[int]:
    return [ms.open_reader(root / str(i)).n_records for i in range(n_streams)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_are_committed(tmp_path: Path, n: int) -> None:
    """On any number of ranks; every rank gets the same receipts."""
    found = on_ranks(n, tmp_path, lambda writers, _: ms.commit_all(writers))
    assert found == [found[0]] * n
    assert [(r.commit_seq, r.n_records, r.n_new_records) for r in found[0]] == [(2, 2, 1)] * 3
    assert lengths(tmp_path) == [2, 2, 2]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_interrupt_between_the_manifests(tmp_path: Path, n: int, at: int) -> None:
    """Rank 0's exception goes on, the others are told of each stream what is known, and nobody hangs."""

    def commit(writers: list[ms.StreamWriter], stores: Stores) -> Any:
        stores[at].fail("place", error=Stopped("stop"), when=lambda key, _: key == MANIFEST_KEY)
        try:
            return ms.commit_all(writers)
        finally:
            for w in writers:
                with pytest.raises(ms.CommitError) as caught:
                    w.commit()
                assert caught.value.kind == "outcome_unknown"

    found = on_ranks(n, tmp_path, commit)
    assert isinstance(found[0], Stopped)
    urls = [str(tmp_path / str(i)) for i in range(3)]
    parts = [f"{', '.join(urls[:at])}: committed"] if at else []
    parts.append(f"{urls[at]}: not known whether it is committed")
    if at < 2:
        parts.append(f"{', '.join(urls[at + 1 :])}: not committed")
    for error in found[1:]:
        assert (type(error), error.kind, error.rank) == (ms.CommitError, "outcome_unknown", 0)
        assert f"({'; '.join(parts)}): rank 0 was interrupted in a commit (Stopped)" in str(error)
    assert lengths(tmp_path) == [2] * at + [1] * (3 - at)


@pytest.mark.parametrize("n", [1, 3])
def test_token_that_changes_after_the_arrival_commits_nothing(tmp_path: Path, n: int) -> None:
    """A failure to place travels in the token; it ends every stream, and the next try takes all."""

    def commit(writers: list[ms.StreamWriter], stores: Stores) -> Any:
        if writers[0]._channel.rank == n - 1:
            stores[2].fail("place", when=lambda key, _: key.startswith("u/c"))
        with pytest.raises(ms.CommitError) as caught:
            ms.commit_all(writers)
        before = lengths(tmp_path)
        stores[2].heal()
        return caught.value.kind, caught.value.rank, str(caught.value), before, ms.commit_all(writers)[2].n_records

    found = on_ranks(n, tmp_path, commit)
    assert found == [found[0]] * n
    kind, rank, text, before, after = found[0]
    assert (kind, rank, before, after) == ("io", n - 1, [1, 1, 1], 2)
    assert text.startswith(f"{tmp_path / '2'}: nothing was committed: rank {n - 1}: ")


def test_commit_of_one_is_the_commit_of_that_writer(tmp_path: Path) -> None:
    """With the texts of a single stream."""

    def commit(writers: list[ms.StreamWriter], stores: Stores) -> Any:
        stores[1].fail("stage")
        errors = []
        for call in (lambda: ms.commit_all([writers[1]]), writers[1].commit):
            with pytest.raises(ms.CommitError) as caught:
                call()
            errors.append(str(caught.value))
        stores[1].heal()
        assert errors[0] == errors[1]
        return ms.commit_all([writers[1]])[0].n_records, writers[1].commit().n_records

    assert on_ranks(2, tmp_path, commit) == [(2, 2)] * 2
    assert lengths(tmp_path) == [1, 2, 1]


def test_dead_writer_in_the_list(tmp_path: Path) -> None:
    """Every rank is told why it is dead, and the others of the list go on without it."""

    def commit(writers: list[ms.StreamWriter], stores: Stores) -> Any:
        stores[1].fail("place", when=lambda key, _: key == MANIFEST_KEY)
        with pytest.raises(ms.CommitError):
            writers[1].commit()
        with pytest.raises(ms.ProtocolError, match="/1 is dead, leave it out: the manifest's rename") as caught:
            ms.commit_all(writers)
        return caught.value.kind, ms.commit_all([writers[0], writers[2]])[1].n_records

    assert on_ranks(2, tmp_path, commit) == [("dead", 2)] * 2


def test_parts_without_mpi_are_refused(tmp_path: Path) -> None:
    """They are committed by the tokens that the caller carries."""
    part = ms.write_open_part(tmp_path / "p", SCHEMA, writer=0, n_writers=1, options=OPTIONS)
    with pytest.raises(ms.ProtocolError, match="parts without MPI") as caught:
        ms.commit_all([part])
    assert caught.value.kind == "role"
    part.close()


@pytest.mark.parametrize("given", [[], None, 3, "ab"])
def test_nothing_that_could_be_committed(given: Any) -> None:
    """Without an open writer there is nobody to agree with."""
    with pytest.raises(ms.ProtocolError) as caught:
        ms.commit_all(given)
    assert caught.value.kind == "writers"


def test_one_writer_without_a_list(tmp_path: Path) -> None:
    """A single writer is taken for a list of one."""
    assert on_ranks(2, tmp_path, lambda writers, _: ms.commit_all(writers[0])[0].n_records, 1) == [2, 2]  # type: ignore[arg-type]

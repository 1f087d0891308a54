"""Small payloads of single ranks: committed with records, read back by writer, gone with the records they belong to."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from tests.support.collective import OPTIONS, at_most, on_root, subcomm, sync, tree
from tests.support.scene import PLANE, Scene, assert_holds

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"time": 4, "y": 2, "x": 3}
FOLDER = ".mpistream/blobs"
Found = dict[tuple[int, int | str, str], bytes]


def _payload(writer: int, key: str, scope: int | str, version: int = 0) -> bytes:
    """Return bytes that depend on the arguments alone, as does their number; some have none."""
    rng = random.Random(f"{writer} {key} {scope} {version}")
    return rng.randbytes(rng.choice([0, 1, 100, 5000]))


def _put(w: ms.StreamWriter, rank: int, key: str, scope: int | str, version: int = 0) -> None:
    w.write_blob(key, _payload(rank, key, scope, version), scope)


def _expected(*entries: tuple[int, int | str, str, int]) -> Found:
    return {(rank, scope, key): _payload(rank, key, scope, version) for rank, scope, key, version in entries}


def _assert_blobs(url: Path, expected: Found) -> None:
    """Assert that exactly these are there, with the bytes that were written."""
    reader = ms.open_reader(url)
    assert sorted(reader.blobs(), key=str) == sorted(expected, key=str)
    for (writer, scope, key), payload in expected.items():
        assert reader.read_blob(key, scope, writer) == payload
        assert ms.read_blob(url, key, scope, writer) == payload


def _assert_gone(url: Path, key: str, scope: int | str, writer: int) -> None:
    with pytest.raises(ms.SchemaError) as caught:
        ms.read_blob(url, key, scope, writer)
    assert caught.value.kind == "unknown"


def _packs(url: Path) -> set[str]:
    folder = url / FOLDER
    return {p.name for p in folder.iterdir()} if folder.exists() else set()


def _opened(comm: MPI.Intracomm, url: Path) -> ms.StreamWriter:
    w = ms.write_open(url, PLANE.schema(shard_shape=SHARD), comm=comm, options=OPTIONS)
    PLANE.write_statics(w)
    return w


def _written(comm: MPI.Intracomm, url: Path, n: int) -> Found:
    """Write n records, a commit each, with a blob of each rank and record and a static one; return what is there."""
    with _opened(comm, url) as w:
        _put(w, comm.rank, "seed", "static")
        for i in range(n):
            PLANE.write(w, i)
            _put(w, comm.rank, "rng", i)
            w.commit()
    ranks = range(comm.size)
    return _expected(*((r, "static", "seed", 0) for r in ranks), *((r, i, "rng", 0) for r in ranks for i in range(n)))


def _indexed(comm: MPI.Intracomm, url: Path, n: int) -> ms.StreamWriter:
    schema = ms.StreamSchema(
        dims={"time": None, **PLANE.sizes},
        time=ms.IndexedTime(np.arange(n) / 3, units="seconds since 2000-01-01"),
        variables={"u": ms.Variable(("time", "y", "x"), "float32")},
        shard_shape=SHARD,
    )
    return ms.write_open(url, schema, comm=comm, options=OPTIONS)


def _write_at(w: ms.StreamWriter, i: int, version: int = 0) -> None:
    w.write_record_at(i, i / 3, PLANE.record(w.region, i, version))


def test_blobs_of_every_rank_come_back(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Static ones and those of records, several keys and sizes, lie in one object a writer and commit."""
    url = mpi_tmp_path / "s"
    with _opened(comm, url) as w:
        _put(w, comm.rank, "seed", "static")
        for i in range(3):
            PLANE.write(w, i)
            for key in ("rng", "clock", "state.1"):
                _put(w, comm.rank, key, i)
        on_root(comm, lambda: _assert_blobs(url, {}))
        w.commit()
        assert on_root(comm, lambda: _packs(url)) == {f"1-1-{r}" for r in range(comm.size)}
        PLANE.write(w, 3)
        w.commit()
        # To a record that is committed already; rank 0 alone has one, and nothing else is pending.
        if comm.rank == 0:
            _put(w, 0, "late", 1)
        receipt = w.commit()
        assert comm.allgather(receipt) == [receipt] * comm.size
        assert (receipt.commit_seq, receipt.n_records, receipt.n_new_records, receipt.n_objects) == (3, 4, 0, 1)
    packs = {"1-3-0", *(f"1-1-{r}" for r in range(comm.size))}
    assert on_root(comm, lambda: _packs(url)) == packs
    keys: list[tuple[int | str, str]] = [
        ("static", "seed"),
        *((i, key) for i in range(3) for key in ("rng", "clock", "state.1")),
    ]
    expected = _expected(*((r, s, k, 0) for r in range(comm.size) for s, k in keys), (0, 1, "late", 0))
    on_root(comm, lambda: _assert_blobs(url, expected))
    _assert_gone(url, "rng", 3, 0)
    _assert_gone(url, "rng", 0, comm.size)
    _assert_gone(url, "seed", 0, 0)


def test_payload_is_copied(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Any buffer of bytes may be given, and be overwritten when the call returns."""
    url, given = mpi_tmp_path / "s", np.arange(8, dtype="uint8")
    with _opened(comm, url) as w:
        w.write_blob("a", memoryview(given))  # type: ignore[arg-type]
        given[:] = 0
    assert on_root(comm, lambda: ms.read_blob(url, "a", writer=comm.size - 1)) == bytes(range(8))


def test_bad_blobs_are_refused(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A key, payload or scope that can't be, or one that is written already, is SchemaError; nothing is taken."""
    url = mpi_tmp_path / "s"
    with _opened(comm, url) as w:
        PLANE.write(w, 0)
        w.write_blob("a", b"1")
        w.write_blob("a", b"2", 0)
        bad: list[tuple[Any, Any, Any]] = [
            ("", b"", "static"),
            (7, b"", "static"),
            ("b", "text", "static"),
            ("b", 5, "static"),
            ("b", b"", "records"),
            ("b", b"", 1),
            ("b", b"", -1),
            ("b", b"", True),
            ("b", b"", 0.0),
            ("a", b"", "static"),
            ("a", b"", 0),
        ]
        for key, payload, scope in bad:
            with pytest.raises(ms.SchemaError):
                w.write_blob(key, payload, scope)
        if comm.rank == 0:
            with pytest.raises(ms.SchemaError, match="67108864"):
                w.write_blob("b", bytes(64 * 1024 * 1024 + 1))
        receipt = w.commit()
        with pytest.raises(ms.SchemaError, match="written once"):
            w.write_blob("a", b"3")
        before = on_root(comm, lambda: tree(url))
        assert w.commit() == receipt
        assert on_root(comm, lambda: tree(url)) == before
    expected: Found = {}
    for rank in range(comm.size):
        expected |= {(rank, "static", "a"): b"1", (rank, 0, "a"): b"2"}
    on_root(comm, lambda: _assert_blobs(url, expected))


def test_rollback_drops_blobs_and_flush_shows_none(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Until a commit nobody reads them; after a rollback they may be written anew."""
    url = mpi_tmp_path / "s"
    with _opened(comm, url) as w:
        w.commit()
        PLANE.write(w, 0)
        for key, scope in (("seed", "static"), ("rng", 0)):
            _put(w, comm.rank, key, scope, version=7)
        w.flush()
        on_root(comm, lambda: _assert_blobs(url, {}))
        w.rollback()
        PLANE.write(w, 0)
        for key, scope in (("seed", "static"), ("rng", 0)):
            _put(w, comm.rank, key, scope)
    ranks = range(comm.size)
    expected = _expected(*((r, "static", "seed", 0) for r in ranks), *((r, 0, "rng", 0) for r in ranks))
    on_root(comm, lambda: _assert_blobs(url, expected))


def test_blobs_are_read_by_writer_after_a_resume(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Another number of ranks finds those of all the ranks there were, and adds its own."""
    url = mpi_tmp_path / "s"
    expected = _written(comm, url, 3)
    team = subcomm(comm, max(1, comm.size // 2))
    if team is not None:
        with ms.write_resume(url, comm=team, options=OPTIONS) as w:
            on_root(team, lambda: _assert_blobs(url, expected))
            for rank in range(comm.size):
                assert w.reader.read_blob("rng", 2, rank) == _payload(rank, "rng", 2)
            PLANE.write(w, 3)
            _put(w, team.rank, "rng", 3, version=1)
    expected |= _expected(*((r, 3, "rng", 1) for r in range(max(1, comm.size // 2))))
    on_root(comm, lambda: _assert_blobs(url, expected))


def test_blobs_of_dropped_records_are_gone(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A resume with `at` takes them with the records, and records that come there later have only their own."""
    url = mpi_tmp_path / "s"
    everything = _written(comm, url, 5)
    kept = {k: v for k, v in everything.items() if k[1] in ("static", 0, 1)}
    team = subcomm(comm, max(1, comm.size - 1))
    if team is not None:
        with ms.write_resume(url, comm=team, at=2.0, options=OPTIONS) as w:
            assert w.n_records == 2
            on_root(team, lambda: _assert_blobs(url, kept))
            for i in (2, 3, 4):
                PLANE.write(w, i, run=1)
            if team.rank == 0:
                _put(w, 0, "rng", 3, version=1)
    expected = kept | _expected((0, 3, "rng", 1))
    on_root(comm, lambda: _assert_blobs(url, expected))


def test_blobs_of_invalidated_records_are_gone(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """They do not come back with the record that is written in its place; what is pending outlives the call."""
    url, ranks = mpi_tmp_path / "s", range(comm.size)
    with _indexed(comm, url, 9) as w:
        for i in (7, 1, 4):
            _write_at(w, i)
            _put(w, comm.rank, "rng", i)
        w.commit()
        # Of a record that is not there yet, before the commit number that it will have is known.
        _write_at(w, 5)
        _put(w, comm.rank, "rng", 5)
        w.flush()
        w.invalidate([4, 7])
        first = _expected(*((r, 1, "rng", 0) for r in ranks))
        on_root(comm, lambda: _assert_blobs(url, first))
        _write_at(w, 7, version=1)
        w.commit()
        second = first | _expected(*((r, 5, "rng", 0) for r in ranks))
        on_root(comm, lambda: _assert_blobs(url, second))
        _write_at(w, 4, version=1)
        _put(w, comm.rank, "rng", 4, version=1)
    third = second | _expected(*((r, 4, "rng", 1) for r in ranks))
    on_root(comm, lambda: _assert_blobs(url, third))


def test_static_key_of_a_later_epoch_replaces_it_for_all_writers(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """When one rank writes it after a resume, those of all ranks of before are gone; other keys stay."""
    url, ranks = mpi_tmp_path / "s", range(comm.size)
    with _opened(comm, url) as w:
        for key in ("seed", "other"):
            _put(w, comm.rank, key, "static")
    with ms.write_resume(url, comm=comm, options=OPTIONS) as w:
        if comm.rank == comm.size - 1:
            _put(w, comm.rank, "seed", "static", version=1)
        w.commit()
        last = comm.size - 1
        expected = _expected(*((r, "static", "other", 0) for r in ranks), (last, "static", "seed", 1))
        on_root(comm, lambda: _assert_blobs(url, expected))
    # And a resume without any changes nothing.
    ms.write_resume(url, comm=comm, options=OPTIONS).close()
    on_root(comm, lambda: _assert_blobs(url, expected))


def test_uncommitted_packs_are_removed_by_a_resume(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A pack that was placed for a commit that never came is not read, and is gone before its number is taken."""
    url = mpi_tmp_path / "s"
    expected = _written(comm, url, 2)
    names = {f"1-{c}-{r}" for c in (1, 2) for r in range(comm.size)}

    def leave_behind() -> set[str]:
        for name in ("1-3-0", f"1-3-{comm.size - 1}", "1-9-0", "2-1-0", "left over"):
            (url / FOLDER / name).write_bytes((url / FOLDER / "1-2-0").read_bytes())
        _assert_blobs(url, expected)
        return _packs(url)

    assert on_root(comm, leave_behind) > names
    for _ in range(2):
        w = ms.write_resume(url, comm=comm, options=OPTIONS)
        assert on_root(comm, lambda: _packs(url)) == names
        w.close()
    sync(comm)
    on_root(comm, lambda: _assert_blobs(url, expected))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("damage", ["deleted", "cut", "flipped"])
def test_rank_without_its_blob_does_not_keep_the_others(comm: MPI.Intracomm, mpi_tmp_path: Path, damage: str) -> None:
    """One rank can't read its restart state: it and all others raise within seconds, with what it is (P-18)."""
    url, bad = mpi_tmp_path / "s", comm.size - 1
    with _opened(comm, url) as w:
        PLANE.write(w, 0)
        w.write_blob("rng", b"state of %d" % comm.rank, 0)
    pack = url / FOLDER / f"1-1-{bad}"

    def spoil() -> None:
        data = pack.read_bytes()
        pack.unlink()
        if damage != "deleted":
            # The payload comes first: a bit of it is wrong for who reads it alone, a lost end for all.
            pack.write_bytes(data[:50] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])

    on_root(comm, spoil)

    def restart() -> None:
        with ms.write_resume(url, comm=comm, options=OPTIONS) as w:
            assert w.reader.read_blob("rng", 0, comm.rank) == b"state of %d" % comm.rank
            PLANE.write(w, 1)
            w.commit()

    with at_most(10), pytest.raises(ms.MPIStreamError) as caught:
        restart()
    # A pack that is missing may be the one with the key, whoever wrote it.
    text = f"{FOLDER}: {comm.size - 1} packs" if damage == "deleted" else f"{FOLDER}/1-1-{bad}"
    assert text in str(caught.value)
    if damage == "flipped" and comm.rank != bad:
        assert (type(caught.value), caught.value.rank) == (ms.CommitError, bad)
    else:
        assert type(caught.value) is ms.FormatError
    on_root(comm, lambda: assert_holds(url, PLANE, [0]))


def test_damaged_pack_is_named(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """A flipped bit of a payload or of the index, or an end that is missing, is FormatError with its key."""
    url = mpi_tmp_path / "s"
    scene = Scene(sizes=PLANE.sizes, variables=PLANE.variables)
    with ms.write_open(url, scene.schema(shard_shape=SHARD), comm=comm, options=OPTIONS) as w:
        w.write_blob("a", b"payload")

    def check() -> None:
        path = url / FOLDER / "1-1-0"
        data = path.read_bytes()
        damaged = [bytes([b ^ (k == i) for k, b in enumerate(data)]) for i in range(len(data))]
        for content in (*damaged, data[:5], b""):
            path.write_bytes(content)
            with pytest.raises(ms.FormatError, match=rf"^{FOLDER}/1-1-0: "):
                ms.read_blob(url, "a")

    on_root(comm, check)

"""Roles without MPI: parts that know nothing of each other, and tokens that the caller carries."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms

NY, NX = 12, 6
FULL = np.arange(NY * NX, dtype="float32").reshape(NY, NX)
# Whole shards of three rows: a part of one, one of two and one of one.
CUTS = [(0, 3), (3, 9), (9, 12)]
TIMES = (0.5, 1.5, 2.5)
MODES = ["own", "default"]

Token = dict[str, Any]


def make_schema(**changes: Any) -> ms.StreamSchema:
    given: dict[str, Any] = {
        "dims": {"time": None, "y": NY, "x": NX},
        "time": ms.AppendTime(units="s since 2000-01-01"),
        "variables": {
            "height": ms.Variable(("time", "y", "x"), "float32"),
            "energy": ms.Variable(("time",), "float64"),
        },
        "statics": {"depth": ms.Variable(("y", "x"), "float32")},
        "shard_shape": {"time": 2, "y": 3, "x": NX},
        "chunk_shape": {"time": 1, "y": 3, "x": NX},
    }
    return ms.StreamSchema(**{**given, **changes})


def open_part(url: Path, writer: int, mode: str = "own", **changes: Any) -> ms.PartWriter:
    given: dict[str, Any] = {
        "writer": writer,
        "n_writers": len(CUTS),
        "region": {"y": CUTS[writer]} if mode == "own" else None,
        "options": ms.Options(timeout=20),
        "schema": make_schema(),
    }
    schema = {**given, **changes}.pop("schema")
    return ms.write_open_part(url, schema, **{k: v for k, v in {**given, **changes}.items() if k != "schema"})


def height(record: int) -> NDArray[np.float32]:
    return FULL + np.float32(100 * record)


def write(part: ms.PartWriter, record: int, t: float | None = None) -> None:
    rows = slice(*part.region["y"])
    part.write_record(TIMES[0] + record if t is None else t, {"height": height(record)[rows], "energy": 10.0 * record})


def carried(token: ms.CommitToken) -> Token:
    """Return the token as it arrives: through JSON."""
    return dict(json.loads(json.dumps(token.to_json())))


@contextmanager
def all_parts(url: Path, mode: str = "own") -> Iterator[list[ms.PartWriter]]:
    parts = [open_part(url, i, mode) for i in range(len(CUTS))]
    try:
        yield parts
    finally:
        for part in parts:
            part.close()


def write_all(url: Path, mode: str = "own", n_records: int = len(TIMES)) -> list[Token]:
    """Write a store up to the tokens of all parts; nothing is committed."""
    tokens = []
    with all_parts(url, mode) as parts:
        for part in parts:
            part.write_static("depth", FULL[slice(*part.region["y"])])
            for i in range(n_records):
                write(part, i)
            tokens.append(carried(part.flush()))
    return tokens


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Token]]]:
    found = {}
    for mode in MODES:
        url = tmp_path_factory.mktemp(mode) / "run.zarr"
        found[mode] = url, write_all(url, mode)
    return found


@pytest.fixture
def url(tmp_path: Path) -> Path:
    return tmp_path / "run.zarr"


Placed = Callable[..., list[Token]]


@pytest.fixture
def placed(written: dict[str, tuple[Path, list[Token]]], url: Path) -> Placed:
    """Return a function that puts a store whose parts have flushed at ``url``, and gives their tokens."""

    def place(mode: str = "own") -> list[Token]:
        source, tokens = written[mode]
        shutil.copytree(source, url)
        return [dict(t) for t in tokens]

    return place


def check(url: Path, n_records: int) -> None:
    """Compare every committed value with what was to be written."""
    reader = ms.open_reader(url)
    assert reader.n_records == n_records
    np.testing.assert_array_equal(reader.times, TIMES[0] + np.arange(n_records))
    for i in range(n_records):
        np.testing.assert_array_equal(reader.read_record("height", i), height(i))
        assert reader.read_record("energy", i) == 10.0 * i
    np.testing.assert_array_equal(reader.read_static("depth"), FULL)


def state(url: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(p.relative_to(url)): (s.st_ino, s.st_size, s.st_mtime_ns)
        for p in url.rglob("*")
        if p.is_file()
        for s in [p.stat()]
    }


# What is committed


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_all_parts_make_a_commit(url: Path, placed: Placed, mode: str) -> None:
    """In a process that wrote none of them, in any order, whole in every variable."""
    tokens = placed(mode)
    assert ms.open_reader(url).n_records == 0
    receipt = ms.commit_tokens(url, tokens[::-1])
    assert (receipt.commit_seq, receipt.epoch, receipt.n_records, receipt.n_new_records) == (1, 1, 3, 3)
    assert (receipt.last_t, receipt.new_statics) == (TIMES[-1], ("depth",))
    # Two rows and a static of four shards each, and the chunk of the series.
    assert receipt.n_objects == 2 * 4 + 4 + 1
    check(url, 3)


@pytest.mark.parametrize("mode", MODES)
def test_the_owner_commits(url: Path, mode: str) -> None:
    with all_parts(url, mode) as parts:
        tokens = []
        for part in parts:
            part.write_static("depth", FULL[slice(*part.region["y"])])
            for i in range(3):
                write(part, i)
            tokens.append(part.flush())
        receipt = parts[0].commit(tokens)
        assert (parts[0].n_committed, receipt.n_records) == (3, 3)
        check(url, 3)


def test_several_commits(url: Path) -> None:
    """By turns the owner and another process; rows go on, and each part builds on what was committed meanwhile."""
    with all_parts(url) as parts:
        for part in parts:
            part.write_static("depth", FULL[slice(*part.region["y"])])
        for i in range(5):
            tokens = []
            for part in parts:
                write(part, i)
                tokens.append(carried(part.flush()))
            assert [t["base_seq"] for t in tokens] == [i] * 3
            assert {tuple(map(tuple, t["records"])) for t in tokens} == {((i, i + 1),)}
            receipt = parts[0].commit(tokens) if i % 2 else ms.commit_tokens(url, tokens)
            assert (receipt.commit_seq, receipt.n_records, receipt.n_new_records) == (i + 1, i + 1, 1)
            check(url, i + 1)


def test_a_part_may_go_on_before_the_commit(url: Path) -> None:
    """What it writes after its flush is in the next token, and the row that both share holds both."""
    with all_parts(url) as parts:
        first, second = [], []
        for part in parts:
            part.write_static("depth", FULL[slice(*part.region["y"])])
            write(part, 0)
            first.append(part.flush())
        for part in parts[1:]:
            write(part, 1)
        ms.commit_tokens(url, first)
        write(parts[0], 1)
        second = [part.flush() for part in parts]
        assert {t.records for t in second} == {((1, 2),)}
        ms.commit_tokens(url, second)
        check(url, 2)


def test_nothing_is_lost_between_a_flush_and_its_commit(url: Path) -> None:
    """A static and blobs that a part wrote after its flush are in the next token, not in this commit."""
    with all_parts(url) as parts:
        first = []
        for part in parts:
            write(part, 0)
            part.write_blob("early", b"1")
            first.append(part.flush())
        for part in parts:
            part.write_static("depth", FULL[slice(*part.region["y"])])
            part.write_blob("late", b"2")
            part.write_blob("rng", b"3", scope=0)
        receipt = ms.commit_tokens(url, first)
        assert (receipt.n_new_records, receipt.new_statics) == (1, ())
        assert {key for _, _, key in ms.open_reader(url).blobs()} == {"early"}
        second = [part.flush() for part in parts]
        assert [(t.records, t.n_blobs, sorted(t.statics)) for t in second] == [((), 2, ["depth"])] * 3
        assert ms.commit_tokens(url, second).new_statics == ("depth",)
        assert [part.flush().n_blobs for part in parts] == [0, 0, 0]
    check(url, 1)
    blobs = ms.open_reader(url).blobs()
    assert blobs == [(i, s, k) for i in range(3) for s, k in ((0, "rng"), ("static", "early"), ("static", "late"))]
    assert [ms.read_blob(url, k, s, 2) for k, s in (("early", "static"), ("late", "static"), ("rng", 0))] == [
        *(b"1", b"2", b"3")
    ]


def test_a_part_may_start_again(url: Path) -> None:
    """One that died before its token does all it did again, in the same epoch."""
    with all_parts(url) as parts:
        for part in parts:
            part.write_static("depth", FULL[slice(*part.region["y"])])
            write(part, 0)
        tokens = [parts[0].flush(), parts[2].flush()]
        parts[1].flush()  # its token is lost
        with open_part(url, 1) as again:
            again.write_static("depth", FULL[slice(*again.region["y"])])
            write(again, 0)
            tokens.append(again.flush())
        ms.commit_tokens(url, tokens)
    check(url, 1)


def test_a_later_flush_takes_the_place_of_an_earlier_one(url: Path) -> None:
    with all_parts(url) as parts:
        early = []
        for part in parts:
            part.write_static("depth", FULL[slice(*part.region["y"])])
            write(part, 0)
            early.append(part.flush())
            write(part, 1)
        late = [part.flush() for part in parts]
        with pytest.raises(ms.CommitError, match="different records"):
            ms.commit_tokens(url, [*early[:1], *late[1:]])
        assert ms.commit_tokens(url, late).n_new_records == 2
        check(url, 2)


def test_blobs_of_parts(url: Path) -> None:
    with all_parts(url) as parts:
        tokens = []
        for i, part in enumerate(parts):
            write(part, 0)
            part.write_blob("rng", b"part %d" % i, scope=0)
            tokens.append(carried(part.flush()))
        assert [t["n_blobs"] for t in tokens] == [1, 1, 1]
        assert ms.open_reader(url).blobs() == []
        ms.commit_tokens(url, tokens)
    assert [ms.read_blob(url, "rng", 0, writer=i) for i in range(3)] == [b"part 0", b"part 1", b"part 2"]


def test_parts_of_a_fixed_time_dim(url: Path) -> None:
    """Records in any order, gaps between them, through tokens."""
    schema = make_schema(time=ms.IndexedTime(TIMES, units="s since 2000-01-01"), statics={})
    parts = [open_part(url, i, schema=schema) for i in range(3)]
    tokens = []
    for part in parts:
        rows = slice(*part.region["y"])
        for i in (2, 0):
            part.write_record_at(i, TIMES[i], {"height": height(i)[rows], "energy": 10.0 * i})
        tokens.append(carried(part.flush()))
        part.close()
    assert {json.dumps(t["records"]) for t in tokens} == {"[[0, 1], [2, 3]]"}
    receipt = ms.commit_tokens(url, tokens)
    assert (receipt.n_records, receipt.last_t) == (2, TIMES[2])
    reader = ms.open_reader(url)
    assert reader.committed == ((0, 1), (2, 3))
    for i in (0, 2):
        np.testing.assert_array_equal(reader.read_record("height", i), height(i))


def test_parts_of_different_sizes_are_read_by_zarr(url: Path, placed: Placed) -> None:
    zarr = pytest.importorskip("zarr", reason="needs zarr")
    ms.commit_tokens(url, placed())
    np.testing.assert_array_equal(zarr.open_group(url, mode="r")["height"][:], [height(i) for i in range(3)])


# The same tokens again


@pytest.mark.parametrize("mode", MODES)
def test_the_same_tokens_again_give_the_same_receipt_and_touch_nothing(url: Path, placed: Placed, mode: str) -> None:
    """Whoever carries tokens may not know whether a commit came through."""
    tokens = placed(mode)
    receipt = ms.commit_tokens(url, tokens)
    before = state(url)
    assert ms.commit_tokens(url, tokens) == receipt
    assert ms.commit_tokens(url, tokens[::-1]) == receipt
    assert state(url) == before


def test_the_owner_knows_tokens_that_another_process_committed(url: Path) -> None:
    with all_parts(url) as parts:
        tokens = []
        for part in parts:
            write(part, 0)
            tokens.append(part.flush())
        receipt = ms.commit_tokens(url, tokens)
        before = state(url)
        assert parts[0].commit([carried(t) for t in tokens]) == receipt
        assert state(url) == before


def test_several_processes_commit_the_same_tokens_at_once(url: Path, placed: Placed) -> None:
    """A caller that is started twice does no harm."""
    tokens = placed()
    barrier = threading.Barrier(3)
    receipts: list[ms.CommitReceipt] = []

    def commit() -> None:
        barrier.wait(30)
        receipts.append(ms.commit_tokens(url, tokens))

    threads = [threading.Thread(target=commit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(receipts) == 3
    assert len(set(receipts)) == 1  # one that was overtaken while it published says so in its warnings
    assert list((url / ".mpistream" / "stage" / "1").glob("commit-*")) == []
    check(url, 3)


# What is refused, by name


def other_region(tokens: list[Token], i: int, rows: Sequence[int]) -> list[Token]:
    region = {"dims": ["y", "x"], "boxes": [[list(rows), [0, NX]]]}
    return [{**t, "region": region} if t["writer"] == i else t for t in tokens]


def changed(i: int, **changes: Any) -> Callable[[list[Token]], list[Token]]:
    return lambda tokens: [{**t, **changes} if t["writer"] == i else t for t in tokens]


def without(i: int, field: str) -> Callable[[list[Token]], list[Token]]:
    return lambda tokens: [{k: v for k, v in t.items() if k != field} if t["writer"] == i else t for t in tokens]


# What is done to good tokens; the class, the kind, the part (None: of no single one) and words of the error.
BAD: dict[str, tuple[Callable[[list[Token]], list[Any]], type[ms.MPIStreamError], str, int | None, str]] = {
    "none": (lambda t: [], ms.CommitError, "token", None, ""),
    "missing": (lambda t: t[:2], ms.CommitError, "token", None, ""),
    "duplicate": (lambda t: [*t, t[0]], ms.CommitError, "token", None, ""),
    "one twice, one missing": (lambda t: [t[0], t[1], t[1]], ms.CommitError, "token", None, ""),
    "of a part too many": (lambda t: [*t, {**t[2], "writer": 3}], ms.CommitError, "token", None, ""),
    "another store": (changed(2, store_id="f" * 32), ms.CommitError, "token", 2, "another"),
    "another attempt": (changed(1, run_id="f" * 32), ms.CommitError, "token", 1, "another attempt"),
    "another epoch": (changed(1, epoch=7), ms.CommitError, "token", 1, "epoch 7"),
    "another schema": (changed(1, fingerprint="f" * 64), ms.CommitError, "token", 1, "fingerprint"),
    "another base": (changed(1, base_seq=7), ms.CommitError, "token", 1, "base commit 7"),
    "other records": (changed(1, records=[[0, 2]]), ms.CommitError, "records", None, "different records"),
    "other times": (changed(1, times_sha256="f" * 64), ms.CommitError, "times", 1, "times are not those"),
    "too few cells": (changed(1, n_cells={"height": 7, "energy": 0}), ms.CommitError, "tiling", 1, "7 cells"),
    "no static": (changed(1, statics={}), ms.CommitError, "tiling", 1, "0 cells of 'depth'"),
    "a failure": (
        changed(
            *(1,),
            failure={
                "class": "StoreError",
                "message": "disk full",
                "kind": "io",
                "rank": 1,
                "errno": 28,
                "cause_text": "disk full",
            },
        ),
        *(ms.CommitError, "io", 1, "disk full"),
    ),
    "a field is missing": (without(1, "region"), ms.FormatError, "token", None, "region"),
    "no number": (changed(1, base_seq="x"), ms.FormatError, "token", None, "damaged token"),
    "no object": (lambda t: [*t[:2], "token"], ms.FormatError, "token", None, "damaged token"),
    "empty": (lambda t: [*t[:2], {}], ms.FormatError, "token", None, "damaged token"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", BAD)
def test_bad_tokens_are_refused_by_name(url: Path, placed: Placed, what: str, mode: str) -> None:
    """Nothing is committed and nothing changes; the good tokens are as good as before."""
    tokens = placed(mode)
    change, error_class, kind, rank, words = BAD[what]
    before = state(url)
    with pytest.raises(error_class) as caught:
        ms.commit_tokens(url, change(tokens))
    assert (type(caught.value), caught.value.kind) == (error_class, kind)
    assert words in str(caught.value)
    if rank is not None:
        assert caught.value.rank == rank
    assert state(url) == before
    assert ms.commit_tokens(url, tokens).n_records == 3
    check(url, 3)


@pytest.mark.parametrize(
    ("what", "part", "rows"),
    [("overlap", 1, (3, 12)), ("overlap", 2, (6, 12)), ("hole", 1, (3, 6)), ("hole", 0, (0, 0)), ("edge", 1, (4, 9))],
)
def test_regions_that_do_not_tile_are_refused(
    url: Path, placed: Placed, what: str, part: int, rows: tuple[int, int]
) -> None:
    """Only the tokens of parts with regions of their own say who wrote what; the cells are named."""
    tokens = placed()
    before = state(url)
    with pytest.raises(ms.CommitError, match=r"height|depth") as caught:
        ms.commit_tokens(url, other_region(tokens, part, rows))
    assert "nothing was committed" in str(caught.value)
    assert state(url) == before
    check_after = ms.commit_tokens(url, tokens)
    assert check_after.n_records == 3


def test_parts_that_overlap_are_refused(url: Path) -> None:
    """Not a token that was changed, but a part that wrote a neighbour's shard too."""
    tokens = []
    for i, rows in enumerate([(0, 3), (3, 9), (6, 12)]):
        with open_part(url, i, region={"y": rows}) as part:
            write(part, 0)
            tokens.append(carried(part.flush()))
    with pytest.raises(ms.CommitError, match=r"rank.* 1.*rank.* 2") as caught:
        ms.commit_tokens(url, tokens)
    assert "nothing was committed" in str(caught.value)
    assert ms.open_reader(url).n_records == 0


def test_the_layout_says_who_writes_what(url: Path, placed: Placed) -> None:
    """With default regions a token over another one is refused, though all of them would tile."""
    tokens = placed("default")
    a, b = tokens[0]["region"], tokens[2]["region"]
    assert a != b
    swapped = [{**tokens[0], "region": b}, tokens[1], {**tokens[2], "region": a}]
    with pytest.raises(ms.CommitError, match="the epoch's layout says") as caught:
        ms.commit_tokens(url, swapped)
    assert caught.value.kind == "tiling"


def test_late_tokens_are_refused(url: Path) -> None:
    """Tokens of before the last commit, of which the store has moved on."""
    with all_parts(url) as parts:
        rounds = []
        for i in range(2):
            tokens = []
            for part in parts:
                write(part, i)
                tokens.append(part.flush())
            ms.commit_tokens(url, tokens)
            rounds.append(tokens)
        before = state(url)
        for late in (rounds[0], [rounds[1][0], rounds[0][1], rounds[1][2]]):
            with pytest.raises(ms.CommitError, match="base commit 0, not 2") as caught:
                ms.commit_tokens(url, late)
            assert caught.value.kind == "token"
        assert state(url) == before


def test_tokens_of_before_a_resume_are_refused(url: Path, placed: Placed) -> None:
    """The resume removed what they name."""
    tokens = placed()
    ms.commit_tokens(url, tokens)
    ms.write_resume(url, takeover=True).close()
    with pytest.raises(ms.CommitError, match="another attempt"):
        ms.commit_tokens(url, tokens)
    check(url, 3)


def test_tokens_of_a_store_of_the_same_name_are_refused(url: Path) -> None:
    """The first store was removed, and another written in its place with the same schema."""
    old = write_all(url)
    shutil.rmtree(url)
    new = write_all(url)
    with pytest.raises(ms.CommitError, match="another attempt"):
        ms.commit_tokens(url, [old[0], new[1], new[2]])
    ms.commit_tokens(url, new)
    check(url, 3)


def test_a_part_of_an_attempt_that_is_over_does_not_flush(url: Path) -> None:
    with all_parts(url) as parts:
        write(parts[1], 0)
        parts[0].close()
        ms.write_resume(url, takeover=True).close()
        with pytest.raises(ms.CommitError, match="another attempt owns the store"):
            parts[1].flush()


def shard_of(url: Path, row: int, rows: int) -> Path:
    return url / "height" / "c" / str(row) / str(rows) / "0"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("row", "rows", "part"), [(0, 0, 0), (0, 1, 1), (1, 2, 1), (1, 3, 2)])
def test_files_missing_under_a_token_are_noticed(
    url: Path, placed: Placed, damage: str, row: int, rows: int, part: int
) -> None:
    """A token may outlive what it names: first and last shard of each part are looked at."""
    tokens = placed()
    DAMAGE[damage](shard_of(url, row, rows))
    before = state(url)
    with pytest.raises(ms.CommitError, match=f"height/c/{row}/{rows}/0") as caught:
        ms.commit_tokens(url, tokens)
    assert (caught.value.kind, caught.value.rank) == ("token", part)
    assert state(url) == before


@pytest.mark.parametrize("what", ["nothing", "folder", "damaged"])
def test_what_is_no_store_is_refused(url: Path, placed: Placed, what: str) -> None:
    tokens = placed()
    if what == "damaged":
        path = url / ".mpistream" / "manifest.json"
        path.write_bytes(path.read_bytes()[:-9])
    else:
        shutil.rmtree(url)
    if what == "folder":
        url.mkdir()
    with pytest.raises(ms.FormatError):
        ms.commit_tokens(url, tokens)
    assert url.exists() is (what != "nothing")


# Who comes when


def test_a_part_that_starts_before_the_owner_waits_for_it(url: Path) -> None:
    """In the worst order, each in its own thread."""
    parts: dict[int, ms.PartWriter] = {}

    def run(i: int) -> None:
        parts[i] = open_part(url, i)

    threads = [threading.Thread(target=run, args=(i,)) for i in (2, 1)]
    for thread in threads:
        thread.start()
    assert not parts
    run(0)
    for thread in threads:
        thread.join(30)
    tokens = []
    for i in range(3):
        write(parts[i], 0)
        tokens.append(parts[i].flush())
        parts[i].close()
    assert ms.commit_tokens(url, tokens).n_records == 1


def test_a_part_comes_after_the_owner_has_ended(url: Path) -> None:
    """Tasks of a job array may run one after the other."""
    tokens = []
    for i in range(3):
        with open_part(url, i) as part:
            part.write_static("depth", FULL[slice(*part.region["y"])])
            write(part, 0)
            tokens.append(carried(part.flush()))
    ms.commit_tokens(url, tokens)
    check(url, 1)


def test_a_part_without_an_owner_gives_up(url: Path) -> None:
    with pytest.raises(ms.ProtocolError, match=r"writer 0 did not create the store within 0\.2 s") as caught:
        open_part(url, 1, options=ms.Options(timeout=0.2))
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize(
    "changes",
    [
        {"n_writers": 4},
        {"schema": make_schema(variables={"height": ms.Variable(("time", "y", "x"), "float64")})},
        {"schema": make_schema(dims={"time": None, "y": NY, "x": 2 * NX}, shard_shape={"time": 2, "y": 3, "x": NX})},
    ],
    ids=["parts", "dtype", "dims"],
)
def test_parts_of_different_minds_do_not_start(url: Path, changes: dict[str, Any]) -> None:
    with open_part(url, 0), pytest.raises(ms.ProtocolError, match="created for 3 writers") as caught:
        open_part(url, 1, **changes)
    assert caught.value.kind == "mismatch"


@pytest.mark.parametrize("writer", [-1, 3])
def test_number_of_a_part_out_of_range(url: Path, writer: int) -> None:
    with pytest.raises(ms.SchemaError, match=f"writer {writer} of 3"):
        open_part(url, writer, "default")
    assert not (url).exists()


def test_a_store_that_is_there_is_not_replaced(url: Path, placed: Placed) -> None:
    ms.commit_tokens(url, placed())
    with pytest.raises(ms.StoreError, match="holds a stream already") as caught:
        open_part(url, 0)
    assert caught.value.kind == "exists"
    check(url, 3)


# Regions of one's own


def test_a_region_that_cuts_a_shard_is_refused(url: Path) -> None:
    with pytest.raises(ms.AlignmentError):
        open_part(url, 0, region={"y": (0, 4)})
    assert not (url).exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shard_shape": None, "chunk_shape": None}, "has no shard_shape and chunk_shape"),
        ({"statics": {"lat": ms.Variable(("y",), "float32")}}, r"lacks the dims \['x'\]"),
    ],
)
def test_a_region_needs_a_schema_that_says_all(url: Path, changes: dict[str, Any], words: str) -> None:
    """Nobody can tell who writes an array that lacks some partitioned dims, nor derive shards from regions unknown."""
    with pytest.raises(ms.SchemaError, match=words) as caught:
        open_part(url, 0, schema=make_schema(**changes))
    assert caught.value.kind == "region"
    assert not (url).exists()


def test_the_owner_writes_what_is_not_partitioned(url: Path) -> None:
    """Strings, scalars and the bounds of time, also where every part has a region of its own."""
    schema = make_schema(
        dims={"time": None, "y": NY, "x": NX, "nv": 2},
        time=ms.AppendTime(units="s since 2000-01-01", attrs={"bounds": "ends"}),
        variables={
            "height": ms.Variable(("time", "y", "x"), "float32"),
            "ends": ms.Variable(("time", "nv"), "float64", shard_shape=(2, 2), chunk_shape=(1, 2)),
        },
        statics={"note": ms.Variable((), str), "labels": ms.Variable(("nv",), "U4"), "n": ms.Variable((), "int32")},
        coords={"y": ms.Coordinate(("y",), [f"row {i}" for i in range(NY)])},
    )
    tokens = []
    for i in range(len(CUTS)):
        with open_part(url, i, schema=schema) as part:
            for name, value in (("note", "é"), ("labels", ["a", ""]), ("n", 7)):
                part.write_static(name, value)
            for record in range(3):
                rows = slice(*part.region["y"])
                ends = {"ends": [record, record + 1.0]} if i == 0 else {}
                part.write_record(TIMES[record], {"height": height(record)[rows], **ends})
            tokens.append(carried(part.flush()))
    ms.commit_tokens(url, tokens)
    reader = ms.open_reader(url)
    assert [reader.read_record("ends", i).tolist() for i in range(3)] == [[0, 1], [1, 2], [2, 3]]
    found = {n: reader.read_static(n).tolist() for n in ("note", "labels", "n", "y")}
    assert found == {"note": "é", "labels": ["a", ""], "n": 7, "y": [f"row {i}" for i in range(NY)]}
    np.testing.assert_array_equal(reader.read_record("height", 2), height(2))


def test_parts_with_regions_write_staggered_and_whole_dims(url: Path) -> None:
    """The part at the upper end has the extra point; a dim that is not partitioned is whole in every part."""
    schema = ms.StreamSchema(
        dims={"time": None, "lev": 3, "x": 20, "x_u": ms.Staggered("x")},
        time=ms.AppendTime(units="s since 2000-01-01"),
        variables={"u": ms.Variable(("time", "x_u"), "int32"), "v": ms.Variable(("time", "x"), "int32")},
        statics={"soil": ms.Variable(("lev", "x"), "int32")},
        shard_shape={"time": 1, "lev": 3, "x": 5},
        chunk_shape={"time": 1, "lev": 1, "x": 5},
    )
    u, v, soil = np.arange(21), np.arange(20) + 100, np.arange(60).reshape(3, 20)
    tokens = []
    parts = [
        ms.write_open_part(url, schema, writer=i, n_writers=2, region={"x": r})
        for i, r in ((0, (0, 10)), (1, (10, 20)))
    ]
    for i, part in enumerate(parts):
        lo, hi = 10 * i, 10 * (i + 1)
        part.write_static("soil", soil[:, lo:hi].astype("int32"))
        part.write_record(0.0, {"u": u[lo : hi + i].astype("int32"), "v": v[lo:hi].astype("int32")})
        tokens.append(part.flush())
    ms.commit_tokens(url, tokens)
    for part in parts:
        part.close()
    reader = ms.open_reader(url)
    assert reader.read_record("u", 0).tolist() == u.tolist()
    assert reader.read_record("v", 0).tolist() == v.tolist()
    assert reader.read_static("soil").tolist() == soil.tolist()


def test_parts_with_a_region_for_each_variable(url: Path) -> None:
    """Each is proven over its own dims when the tokens come, so one may lack what another has."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4, "cell": 6},
        time=ms.AppendTime(units="s since 2000-01-01"),
        variables={"t": ms.Variable(("time", "y"), "int32"), "runoff": ms.Variable(("time", "cell"), "int32")},
        shard_shape={"time": 1, "y": 1, "cell": 3},
        chunk_shape={"time": 1, "y": 1, "cell": 1},
    )
    t, runoff = np.arange(4, dtype="int32"), np.arange(6, dtype="int32") * 10
    cuts: Any = [({"y": (0, 1)}, {"cell": (3, 6)}), ([{"y": (2, 4)}, {"y": (1, 2)}], {"cell": (0, 3)})]
    tokens = []
    for i, (rows, cells) in enumerate(cuts):
        with ms.write_open_part(url, schema, writer=i, n_writers=2, region={"t": rows, "runoff": cells}) as part:
            blocks = {"t": t[:1] if i == 0 else [t[2:4], t[1:2]], "runoff": runoff[slice(*cells["cell"])]}
            part.write_record(0.0, blocks)
            tokens.append(carried(part.flush()))
    half = {**tokens[1], "region": {**tokens[1]["region"], "of": {"t": 0, "runoff": 0}}}
    with pytest.raises(ms.CommitError, match=r"array 't': rank 1 has a region over .* nothing was committed"):
        ms.commit_tokens(url, [tokens[0], half])
    ms.commit_tokens(url, tokens)
    reader = ms.open_reader(url)
    np.testing.assert_array_equal(reader.read_record("t", 0), t)
    np.testing.assert_array_equal(reader.read_record("runoff", 0), runoff)


def test_parts_take_no_indices(url: Path) -> None:
    """Their cells would have to move."""
    with pytest.raises(ms.SchemaError, match=r"writer 1: Indices are rearranged, .* open with comm="):
        open_part(url, 1, region=ms.Indices({"y": [3]}))
    assert not url.exists()


# Calls of the wrong part


def test_only_the_owner_commits_and_only_with_tokens(url: Path) -> None:
    with all_parts(url) as parts:
        tokens = []
        for part in parts:
            write(part, 0)
            tokens.append(part.flush())
        for call in (
            lambda: parts[1].commit(tokens),
            parts[0].commit,
            lambda: parts[0].commit(tokens, partial_rows=False),
        ):
            with pytest.raises(ms.ProtocolError, match="commit_tokens") as caught:
                call()
            assert caught.value.kind == "role"
        assert parts[0].commit(tokens).n_records == 1


def test_parts_invalidate_nothing(url: Path) -> None:
    """The other parts would not know; once the store is opened in one process again, it can be done."""
    schema = make_schema(time=ms.IndexedTime(TIMES, units="s since 2000-01-01"), statics={})
    tokens = []
    parts = [open_part(url, i, schema=schema) for i in range(3)]
    for part in parts:
        part.write_record_at(0, TIMES[0], {"height": 1.0, "energy": 2.0})
        tokens.append(part.flush())
    ms.commit_tokens(url, tokens)
    before = state(url)
    for part in parts:
        with pytest.raises(ms.ProtocolError, match="write_resume") as caught:
            part.invalidate([0])
        assert caught.value.kind == "role"
    assert state(url) == before
    for part in parts:
        part.close()
    with ms.write_resume(url, takeover=True) as w:
        w.invalidate([0])
    assert ms.open_reader(url).committed == ()


@pytest.mark.parametrize("call", ["flush", "commit"])
def test_a_closed_part_does_nothing(url: Path, call: str) -> None:
    with open_part(url, 0) as part:
        pass
    with pytest.raises(ms.ProtocolError, match="closed"):
        getattr(part, call)()
    part.close()


def test_a_writer_over_mpi_takes_no_tokens(url: Path) -> None:
    with ms.write_open(url, make_schema()) as w, pytest.raises(ms.ProtocolError) as caught:
        w.commit([])
    assert caught.value.kind == "role"

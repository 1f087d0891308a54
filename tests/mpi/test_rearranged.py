"""Regions that lie anywhere, few ranks that write for many: the bytes of one rank, and one outcome on every rank."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mpistream as ms
from mpistream import rearrange
from tests.support.collective import at_most, error_on_all, on_root, options, subcomm, sync, tree
from tests.support.decompositions import Decomposed, objects_of
from tests.support.scene import FULL, PLANE, assert_holds, time_of

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

SHARD = {"time": 2, "z": 3, "y": 4, "x": 5}


def _columns(comm: MPI.Intracomm, n: int = 13) -> dict[str, tuple[int, int]]:
    """Uneven parts of x off the edges of shards, the first one on the last rank."""
    edges = [round(n * (k / comm.size) ** 1.2) for k in range(comm.size + 1)]
    k = comm.size - 1 - comm.rank
    return {"x": (edges[k], edges[k + 1])}


def _opened(comm: MPI.Intracomm, url: Path, **changes: Any) -> ms.StreamWriter:
    """Open a store on unaligned columns, with statics and one committed record."""
    schema = FULL.schema(shard_shape=SHARD)
    chosen = options(**{"writers": "auto", **changes})
    w = ms.write_open(url, schema, comm=comm, region=_columns(comm), options=chosen)
    FULL.write_statics(w)
    FULL.write(w, 0)
    w.commit()
    return w


# ---- bytes -------------------------------------------------------------------------------------------


def _assert_as_serial(comm: MPI.Intracomm, folder: Path, case: Decomposed) -> None:
    """Write a stream from all ranks and, in the same layout, from one; compare every file."""
    from mpi4py import MPI

    w = ms.write_open(
        folder / "many", case.schema(), comm=comm, region=case.region(comm.rank), options=options(**case.options)
    )
    case.write(w, comm.rank)

    def compare() -> None:
        schema = case.schema().with_layout_of(w.schema)
        case.write(ms.write_open(folder / "one", schema, comm=MPI.COMM_SELF, options=options(threads=0)), None)
        many, one = objects_of(folder / "many"), objects_of(folder / "one")
        assert many.keys() == one.keys()
        assert [key for key in many if many[key] != one[key]] == []

    on_root(comm, compare)


@pytest.mark.parametrize("seed", range(1000, 1008))
def test_any_decomposition_gives_the_bytes_of_one_rank(comm: MPI.Intracomm, mpi_tmp_path: Path, seed: int) -> None:
    """Boxes anywhere, several or none a rank, any strides and byte order; arrays are overwritten after each call."""
    _assert_as_serial(comm, mpi_tmp_path, Decomposed(seed, comm.size))


def test_pieces_beyond_a_message_travel_in_parts(
    comm: MPI.Intracomm, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do beyond a gibibyte; here a message has 48 bytes."""
    monkeypatch.setattr(rearrange, "_MAX_MESSAGE_NBYTES", 48)
    _assert_as_serial(comm, mpi_tmp_path, Decomposed(2000, comm.size))


# ---- who writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("writers", [1, 2, "node", "all"])
@pytest.mark.parametrize("is_given", [True, False])
def test_as_many_ranks_write_as_the_options_say(
    comm: MPI.Intracomm, mpi_tmp_path: Path, writers: int | str, is_given: bool
) -> None:
    """The others only send, regions of their own or chosen ones; all of this machine's ranks are on one node."""
    schema = PLANE.schema(shard_shape={"time": 1, "y": 1, "x": 2})
    region = _columns(comm, 6) if is_given else None
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, region=region, options=options(writers=writers)) as w:
        PLANE.write_statics(w)
        for i in range(2):
            PLANE.write(w, i)
        writing = comm.allgather(w.stats.nbytes_in > 0)
        planned = w.plan()
    if planned is not None:
        assert planned.writers == tuple(rank for rank, writes in enumerate(writing) if writes)
        assert planned.nbytes_per_record == 8 * 6 * 4
    if writers == "all":
        assert sum(writing) > comm.size / 2
    else:
        assert sum(writing) == (1 if writers == "node" else min(int(writers), comm.size))
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0, 0]))


def test_a_few_writers_make_the_objects_of_a_small_field(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """By default 192 bytes are one object, whoever holds them; with all ranks writing they would be one a rank."""
    with ms.write_open(mpi_tmp_path / "s", PLANE.schema(), comm=comm, options=options(writers="auto")) as w:
        PLANE.write_statics(w)
        PLANE.write(w, 0)
        assert comm.allreduce(int(w.stats.nbytes_in > 0)) == 1
        # Each rank holds its part of the cells, as far as they go.
        assert comm.allreduce(w.region.n_cells) == 48
        assert max(comm.allgather(w.region.n_cells)) < 48 or comm.size == 1
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0]))


def test_a_rank_of_several_boxes_passes_a_list(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """One block per box in their order, or a scalar for all; anything else says how many blocks there have to be."""
    schema = PLANE.schema(shard_shape={"y": 3, "x": 6})
    mine = range(comm.rank, 8, comm.size)
    boxes = [{"y": (k, k + 1), "x": half} for k in reversed(mine) for half in ((3, 6), (0, 3))]
    with ms.write_open(mpi_tmp_path / "s", schema, comm=comm, region=boxes, options=options(writers="auto")) as w:
        assert w.shapes_of("u") == ([(1, 3)] * len(boxes) or [(0, 0)])
        if boxes:
            with pytest.raises(ms.SchemaError, match="use shapes_of"):
                w.shape_of("u")

        def blocks(name: str, record: int = 0) -> Any:
            return [PLANE.block(name, box, record) for box in boxes] or np.empty((0, 0), "f4")

        w.write_static("topo", blocks("topo"))
        w.write_record(time_of(0), {"u": blocks("u")})
        with w.record(time_of(1)) as put:
            buffers = put.buffer("u")
            for buffer, block in zip(buffers if boxes else [buffers], blocks("u", 1) if boxes else [], strict=False):
                buffer[...] = block
        if comm.rank == 0:
            bad = [*blocks("u", 2), blocks("u", 2)[0]]
        else:
            bad = blocks("u", 2)
        error = error_on_all(comm, lambda: w.write_record(time_of(2), {"u": bad}))
        assert f"{len(range(0, 8, comm.size)) * 2 + 1} blocks" in str(error)
        w.write_record(time_of(2), {"u": blocks("u", 2)})
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", PLANE, [0, 0, 0]))


LAND_AND_SEA = ms.StreamSchema(
    dims={"time": None, "y": 6, "x": 9, "cell": 10},
    time=ms.AppendTime(units="s since 2000-01-01"),
    variables={
        "temperature": ms.Variable(("time", "y", "x"), "float32"),
        "runoff": ms.Variable(("time", "cell"), "int32"),
    },
    statics={"area": ms.Variable(("cell",), "int32"), "lat": ms.Variable(("y",), "int32")},
)


def test_each_variable_may_have_a_region_of_its_own(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Rows of one, cells of another; and a resume may go on with any others, or with one for all."""
    url = mpi_tmp_path / "s"
    temperature, area = np.arange(54, dtype="float32").reshape(6, 9), np.arange(10, dtype="int32") * 7
    rows = {"y": (comm.rank * 6 // comm.size, (comm.rank + 1) * 6 // comm.size)}
    cells = np.arange(10)[::-1][comm.rank :: comm.size]
    numbers = ms.Indices({"cell": cells})
    held = {"temperature": rows, "lat": rows, "runoff": numbers, "area": numbers}
    with ms.write_open(url, LAND_AND_SEA, comm=comm, region=held, options=options()) as w:
        assert sum(map(math.prod, w.shapes_of("temperature"))) == (rows["y"][1] - rows["y"][0]) * 9
        assert w.shape_of("runoff") == (len(cells),)
        assert (w.region_of("area"), w.indices) == (numbers, None)
        assert isinstance(lat := w.region_of("lat"), ms.Region)
        assert lat["y"][1] - lat["y"][0] == w.shape_of("lat")[0]
        with pytest.raises(ms.ProtocolError, match=r"see w.region_of"):
            w.region  # noqa: B018 (a property)
        w.write_static("area", area[cells])
        rank_lat: Any = np.arange(*rows["y"], dtype="int32")
        w.write_static("lat", rank_lat if len(rank_lat) else {})
        for k in range(2):
            own = w.region_of("temperature")
            assert isinstance(own, ms.Region)
            w.write_record(k, {"temperature": temperature[slice(*own["y"])] + k, "runoff": area[cells] + k})
    part = (comm.rank * 10 // comm.size, (comm.rank + 1) * 10 // comm.size)
    columns = [{"x": (k, k + 1)} for k in range(comm.rank, 9, comm.size)]
    other = {**held, "temperature": columns, "runoff": {"cell": part}}
    with ms.write_resume(url, comm=comm, region=other, options=options()) as w:
        blocks = [temperature[:, k : k + 1] + 2 for k in range(comm.rank, 9, comm.size)]
        w.write_record(2, {"temperature": blocks, "runoff": area[slice(*part)] + 2})
    with ms.write_resume(url, comm=comm, options=options()) as w:
        y, x = (slice(*w.region[d]) for d in ("y", "x"))
        w.write_record(3, {"temperature": temperature[y, x] + 3, "runoff": area[slice(*w.region["cell"])] + 3})

    def compare() -> None:
        reader = ms.open_reader(url)
        for k in range(4):
            np.testing.assert_array_equal(reader.read_record("temperature", k), temperature + k)
            np.testing.assert_array_equal(reader.read_record("runoff", k), area + k)
        np.testing.assert_array_equal(reader.read_static("area"), area)
        np.testing.assert_array_equal(reader.read_static("lat"), np.arange(6))

    on_root(comm, compare)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("first_row", "kind", "words"),
    [
        (1, "hole", r"array 'temperature': none .* owns y\[0:1\] x\[0:9\]"),
        (0, "overlap", r"'runoff': cell\[3\] stands in"),
    ],
)
def test_regions_of_variables_are_proven_one_by_one(
    comm: MPI.Intracomm, mpi_tmp_path: Path, first_row: int, kind: str, words: str
) -> None:
    """A hole in the boxes of one, a cell twice in the lists of another: it is named, and nothing is written."""
    start, stop = comm.rank * 6 // comm.size, (comm.rank + 1) * 6 // comm.size
    held = {
        "lat": {"y": (start, stop)},
        "temperature": {"y": (min(max(start, first_row), stop), stop)},
        "area": {"cell": (0, 10) if comm.rank == 0 else (0, 0)},
        "runoff": ms.Indices({"cell": range(10) if comm.rank == 0 else [3]}),
    }
    error = error_on_all(
        comm, lambda: ms.write_open(mpi_tmp_path / "s", LAND_AND_SEA, comm=comm, region=held, options=options())
    )
    assert isinstance(error, ms.TilingError)
    assert error.kind == kind
    assert re.search(words, str(error)), str(error)
    assert not tree(mpi_tmp_path / "s" / ".mpistream")


# ---- refused at open ---------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("shift", "kind", "message"),
    [
        (1, "overlap", r"rank 0 owns .*x\[0:6\] and rank 1 owns .*x\[5:13\]; both own .*x\[5:6\]"),
        (-1, "hole", r"none of the \d ranks owns .*x\[4:5\]"),
    ],
)
def test_regions_that_do_not_tile_are_refused_on_every_rank(
    comm: MPI.Intracomm, mpi_tmp_path: Path, shift: int, kind: str, message: str
) -> None:
    """With the ranks and their boxes, before anything is written."""
    region = {"x": {0: (0, 5 + shift), 1: (5, 13)}.get(comm.rank, (0, 0))}
    schema = FULL.schema(shard_shape={**SHARD, "x": 4})
    error = error_on_all(
        comm,
        lambda: ms.write_open(mpi_tmp_path / "s", schema, comm=comm, region=region, options=options(writers="auto")),
    )
    assert isinstance(error, ms.TilingError)
    assert error.kind == kind
    with pytest.raises(ms.TilingError, match=message):
        raise error
    assert on_root(comm, lambda: list(mpi_tmp_path.rglob("*"))) in ([], [mpi_tmp_path / "s"])


@pytest.mark.mpi(min_size=2)
def test_without_rearranging_the_nearest_edges_are_named(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Options(rearrange="never") refuses what does not lie on shard edges; with "auto" the same is written."""
    region = {"x": {0: (0, 6), 1: (6, 13)}.get(comm.rank, (0, 0))}

    def opened(rearrange: str) -> ms.StreamWriter:
        chosen = options(rearrange=rearrange)
        return ms.write_open(
            mpi_tmp_path / "s", FULL.schema(shard_shape=SHARD), comm=comm, region=region, options=chosen
        )

    error = error_on_all(comm, lambda: opened("never"))
    assert isinstance(error, ms.AlignmentError)
    assert "rank 0 owns [0:6] of 13" in str(error)
    assert "the nearest that does is [0:5]" in str(error)
    with opened("auto") as w:
        FULL.write_statics(w)
        FULL.write(w, 0)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0]))


# ---- one outcome on every rank -----------------------------------------------------------------------


def _without(w: ms.StreamWriter) -> Any:
    return {name: block for name, block in FULL.record(w.region, 1).items() if name != "u"}


BAD: dict[str, tuple[str, Callable[[ms.StreamWriter], Any]]] = {
    "shape": ("shape", lambda w: {**FULL.record(w.region, 1), "u": np.zeros((3, 11, 99))}),
    "dtype": ("dtype", lambda w: {**FULL.record(w.region, 1), "zonal": FULL.block("zonal", w.region) * 0.5}),
    "unknown": ("unknown", lambda w: {**FULL.record(w.region, 1), "salt": 1.0}),
    "missing": ("missing", _without),
}


@pytest.mark.parametrize("who", [0, -1])
def test_a_wrong_block_of_one_rank_is_the_error_of_all(comm: MPI.Intracomm, mpi_tmp_path: Path, who: int) -> None:
    """A SchemaError, as it is on its own rank; nothing of the record is taken or on its way, and the next one works."""
    bad = who % comm.size
    with _opened(comm, mpi_tmp_path / "s") as w:
        before = on_root(comm, lambda: tree(mpi_tmp_path / "s"))
        for kind, change in BAD.values():
            blocks = change(w) if comm.rank == bad else FULL.record(w.region, 1)
            error = error_on_all(comm, lambda blocks=blocks: w.write_record(time_of(1), blocks))  # type: ignore[misc]
            assert (type(error), error.kind) == (ms.SchemaError, kind)
            assert error.rank == bad or comm.size == 1
            assert (w.n_records, w.last_t) == (1, time_of(0))
        t = float("nan") if comm.rank == bad else time_of(1)
        assert error_on_all(comm, lambda: w.write_record(t, FULL.record(w.region, 1))).kind == "time"
        assert on_root(comm, lambda: tree(mpi_tmp_path / "s")) == before
        FULL.write(w, 1)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0, 0]))


@pytest.mark.mpi(min_size=2)
def test_what_fails_before_pieces_move_is_an_error_of_all(
    comm: MPI.Intracomm, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without memory for what it gets: nothing is left on its way that a later record could be taken for."""
    with _opened(comm, mpi_tmp_path / "s") as w:
        with monkeypatch.context() as patched:
            if comm.rank == 0:
                patched.setattr(w._mover, "_targets_of", lambda *_: np.empty(-1))
            blocks = FULL.record(w.region, 2)
            error = error_on_all(comm, lambda: w.write_record(time_of(1), blocks))
        assert error.rank in (0, None)
        assert w.n_records == 1
        for i in (1, 2):
            FULL.write(w, i)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0, 0, 0]))


@pytest.mark.mpi(min_size=2)
def test_what_fails_while_pieces_move_ends_the_writer(
    comm: MPI.Intracomm, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some pieces may be on their way, and must not be taken for those of another record."""
    w = _opened(comm, mpi_tmp_path / "s")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    last = comm.size - 1
    if comm.rank == last:
        with monkeypatch.context() as patched:
            patched.setattr(w._channel._transport, "swap", interrupted)
            with pytest.raises(KeyboardInterrupt):
                FULL.write(w, 1)
        assert w._channel.failure is not None
        with pytest.raises(ms.CommitError) as caught:
            w.commit()
    else:

        def write_and_commit() -> None:
            FULL.write(w, 1)
            w.commit()

        with pytest.raises(ms.CommitError) as caught:
            write_and_commit()
    # Also those that waited for its pieces: they were told, long before any timeout.
    assert (caught.value.kind, caught.value.rank) == ("left", last)
    with pytest.raises(ms.MPIStreamError):
        w.close()
    sync(comm)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0]))


def test_a_wrong_static_of_one_rank_is_the_error_of_all(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """It may be passed right afterwards; a static that is written already is refused as on one rank."""
    schema = FULL.schema(shard_shape=SHARD)
    w = ms.write_open(mpi_tmp_path / "s", schema, comm=comm, region=_columns(comm), options=options(writers="auto"))
    block = FULL.block("topo", w.region)
    passed = np.zeros((1, 1, 1)) if comm.rank == comm.size - 1 else block
    error = error_on_all(comm, lambda: w.write_static("topo", passed))
    assert (type(error), error.kind) == (ms.SchemaError, "shape")
    FULL.write_statics(w)
    assert error_on_all(comm, lambda: w.write_static("topo", block)).kind == "static"
    w.close()
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, []))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_write_at_different_times_are_told(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Before anything moves; with the right time the record is taken."""
    with _opened(comm, mpi_tmp_path / "s") as w:
        t = time_of(1) + (comm.rank == comm.size - 1)
        error = error_on_all(comm, lambda: w.write_record(t, FULL.record(w.region, 1)))
        assert (type(error), error.kind, error.rank) == (ms.ProtocolError, "mismatch", comm.size - 1)
        assert w.n_records == 1
        FULL.write(w, 1)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0, 0]))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_write_different_records_are_told(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Of a fixed time dim; also if one writes a static."""
    schema = ms.StreamSchema(
        dims={"time": None, "x": 13},
        time=ms.IndexedTime([0.0, 1.0, 2.0], units="s"),
        variables={"u": ms.Variable(("time", "x"), "f8", shard_shape=(1, 5), chunk_shape=(1, 5))},
        statics={"s": ms.Variable(("x",), "f8", shard_shape=(5,), chunk_shape=(5,))},
    )
    w = ms.write_open(mpi_tmp_path / "s", schema, comm=comm, region=_columns(comm), options=options(writers="auto"))
    start, stop = w.region["x"]
    block = np.arange(13.0)[start:stop]
    index = 2 if comm.rank == comm.size - 1 else 1
    error = error_on_all(comm, lambda: w.write_record_at(index, float(index), {"u": block}))
    assert (type(error), error.kind) == (ms.ProtocolError, "mismatch")

    def differs() -> None:
        if comm.rank == 0:
            w.write_static("s", block)
        else:
            w.write_record_at(1, 1.0, {"u": block})

    error = error_on_all(comm, differs)
    assert (type(error), error.kind) == (ms.ProtocolError, "mismatch")
    for record in (2, 0):
        w.write_record_at(record, float(record), {"u": block + record})
    w.close()
    reader = on_root(comm, lambda: [ms.open_reader(mpi_tmp_path / "s").read_record("u", k).tolist() for k in (0, 2)])
    assert reader == [np.arange(13.0).tolist(), (np.arange(13.0) + 2).tolist()]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("who", [0, -1])
def test_a_rank_that_does_not_come_is_an_error_of_all(comm: MPI.Intracomm, mpi_tmp_path: Path, who: int) -> None:
    """After the timeout; the writer is dead on every rank, also on the one that comes late."""
    late = who % comm.size
    w = _opened(comm, mpi_tmp_path / "s", timeout=3)

    def write() -> None:
        with pytest.raises(ms.CommitError) as caught:
            FULL.write(w, 1)
        assert caught.value.kind == "timeout"
        assert caught.value.rank == late

    with at_most(20):
        if comm.rank != late:
            write()
        sync(comm)
        if comm.rank == late:
            write()
    with pytest.raises(ms.CommitError):
        FULL.write(w, 1)
    with pytest.raises(ms.CommitError):
        w.close()
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0]))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("who", [0, -1])
def test_a_rank_whose_body_raises_ends_all(comm: MPI.Intracomm, mpi_tmp_path: Path, who: int) -> None:
    """The others hear of it in their next record, and need not wait for the timeout; a resume goes on."""

    class ModelError(Exception):
        pass

    def run() -> None:
        with _opened(comm, mpi_tmp_path / "s") as w:
            FULL.write(w, 1)
            if comm.rank == who % comm.size:
                raise ModelError
            for i in range(2, 4):
                FULL.write(w, i)

    with at_most(15):
        if comm.rank == who % comm.size:
            with pytest.raises(ModelError):
                run()
        else:
            with pytest.raises(ms.CommitError) as caught:
                run()
            assert (caught.value.kind, caught.value.rank) == ("left", who % comm.size)
    sync(comm)
    with ms.write_resume(mpi_tmp_path / "s", comm=comm, region=_columns(comm), options=options()) as w:
        FULL.write(w, 1)
    on_root(comm, lambda: assert_holds(mpi_tmp_path / "s", FULL, [0, 0]))


# ---- resumes, and what MPI holds ---------------------------------------------------------------------


@pytest.mark.parametrize("writers", ["auto", 1, "all"])
def test_a_resume_goes_on_with_another_decomposition(
    comm: MPI.Intracomm, mpi_tmp_path: Path, writers: int | str
) -> None:
    """And other numbers of ranks, within a row: committed records are read back by who writes their shards now."""
    url = mpi_tmp_path / "s"
    _opened(comm, url, writers=writers).close()
    pair = subcomm(comm, 2)
    if pair is not None:
        edge = {"y": (0, 7) if pair.rank else (7, 11)} if pair.size > 1 else {}
        with ms.write_resume(url, comm=pair, region=edge, options=options(writers=writers)) as w:
            FULL.write(w, 1)
            w.commit()
            FULL.write(w, 2)
        pair.Free()
    sync(comm)
    rng = random.Random(comm.size)
    cells = [(z, y) for z in range(3) for y in range(11)]
    rng.shuffle(cells)
    mine = [{"z": (z, z + 1), "y": (y, y + 1)} for z, y in cells[comm.rank :: comm.size]]
    with ms.write_resume(url, comm=comm, region=mine, options=options(writers=writers)) as w:
        for i in (3, 4):
            dims = {name: kind[0].split() for name, kind in FULL.variables.items()}
            blocks = {
                name: [FULL.block(name, {"x": (0, 13), **box}, i) for box in mine]
                if dims[name]
                else FULL.whole(name, i)
                for name in FULL.variables
            }
            w.write_record(
                time_of(i), {k: b[0] if isinstance(b, list) and len(b) == 1 else b for k, b in blocks.items()}
            )
    on_root(comm, lambda: assert_holds(url, FULL, [0] * 5))


def test_datatypes_are_made_once_and_freed(comm: MPI.Intracomm, mpi_tmp_path: Path) -> None:
    """Blocks of the same strides need no new ones in the next record, and the end of the writer frees them all."""
    from mpi4py import MPI

    w = _opened(comm, mpi_tmp_path / "s")
    made = list(w._channel._transport._datatypes.values())  # type: ignore[attr-defined]
    for i in range(1, 4):
        FULL.write(w, i)
    kept = list(w._channel._transport._datatypes.values())  # type: ignore[attr-defined]
    assert [a is b for a, b in zip(made, kept, strict=True)] == [True] * len(made)
    assert comm.allreduce(len(made)) > 0 or comm.size == 1
    w.close()
    assert [datatype == MPI.DATATYPE_NULL for datatype in kept] == [True] * len(kept)

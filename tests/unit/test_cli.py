"""``mpistream info``: its text, its JSON, and one line for whatever is wrong."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpistream as ms
from mpistream.info import describe
from tests.support.info_store import files_below, make_schema, make_store, size_of

pytest.importorskip("typer", reason="needs typer, from the extra cli")
pytest.importorskip("rich", reason="needs rich, from the extra cli")

from typer.testing import CliRunner, Result

from mpistream.cli.verbs import app

ROOT = Path(__file__).parents[2]
LONG_NAME = "sea_water_potential_temperature_at_sea_floor_expressed_as_heat_content_" + "x" * 100


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("cli") / "run.zarr", make_schema())


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def python_m(*args: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
    return subprocess.run(
        [sys.executable, "-m", "mpistream", *map(str, args)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def columns(text: str, title: str) -> dict[str, list[str]]:
    """Return the rows of one table by array; columns are two blanks apart."""
    _, heading, *lines = text[text.index(f"{title}\n") :].splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines[: lines.index("") if "" in lines else None]]
    assert {len(r) for r in rows} == {len(re.split(r"\s{2,}", heading))}
    return {name: cells for name, *cells in rows}


# The text


def test_info_prints_the_facts(store: Path) -> None:
    done = run("info", store)
    facts = describe(store)
    assert done.exit_code == 0
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.output.split("\n\n")[0].splitlines())
    on_disk = lines.pop("on disk")
    assert lines == {
        "store": str(store),
        "title": "A [bold]plate[/bold] :smile:",
        "records": "6",
        "last t": "60.0 hours since 2000-02-28 12:00 (2000-03-02T00:00:00)",
        "dims": "time 6, y 7, x 5",
        "commit": "1 in epoch 1",
        "run id": facts["run_id"],
        "statics": "depth committed, n_stations not committed, lat not committed",
        "dropped": "none",
    }
    total = size_of(*files_below(store))
    assert on_disk == (
        f"{total / 1024:.4g} KiB in {len(files_below(store))} files, 1.037 KiB of values, ratio {1062 / total:.2f}"
    )


def test_info_prints_the_layout(store: Path) -> None:
    table = columns(run("info", store).output, "Layout")
    assert table == {
        "time": ["time", "float64", "6", "-", "1024", "1024"],
        "temperature": ["time, y, x", "float32", "6 x 7 x 5", "4 x 4 x 5", "2 x 2 x 5", "4"],
        "energy": ["time", "float64", "6", "-", "1024", "1024"],
        "depth": ["y, x", "int16", "7 x 5", "4 x 5", "2 x 5", "-"],
        "n_stations": ["-", "int32", "-", "-", "-", "-"],
        "y": ["y", "float64", "7", "-", "7", "-"],
        "lat": ["y, x", "float64", "7 x 5", "4 x 5", "2 x 5", "-"],
    }


def test_info_prints_sizes(store: Path) -> None:
    table = columns(run("info", store).output, "On disk")
    nbytes = size_of(*files_below(store / "temperature" / "c"))
    size = f"{nbytes} B" if nbytes < 1024 else f"{nbytes / 1024:.4g} KiB"
    lz4, zstd = "blosc lz4-5 shuffle + crc32c", "blosc zstd-3 shuffle + crc32c"
    assert table["temperature"] == [lz4, "1/2", "4", "840 B", size, f"{840 / nbytes:.2f}"]
    assert table["time"][:4] == [zstd, "1/1024", "1", "48 B"]
    assert table["lat"] == [lz4, "-", "0", "0 B", "0 B", "-"]


def test_info_tells_how_values_were_rounded(tmp_path: Path) -> None:
    """The bits that are kept stand before the codecs, as CF calls the rounding; in JSON they have a name."""
    url = tmp_path / "run.zarr"
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4},
        time=ms.AppendTime(units="s"),
        variables={n: ms.Variable(("time", "y"), "float32", keep_bits=b) for n, b in (("u", 7), ("v", None))},
        codec="wasm",
    )
    ms.write_open(url, schema, options=ms.Options(durability="none", threads=0)).close()
    table = columns(run("info", url).output, "On disk")
    assert (table["u"][0], table["v"][0]) == ("bitround 7 + zstd-5 + crc32c", "zstd-5 + crc32c")
    arrays = json.loads(run("info", url, "--json").output)["arrays"]
    assert {a["name"]: a["keep_bits"] for a in arrays} == {"time": None, "u": 7, "v": None}


def test_info_tells_what_a_resume_keeps_aside(tmp_path: Path) -> None:
    url = make_store(tmp_path / "run.zarr", make_schema())
    w = ms.write_resume(url, at=15.0)
    text = run("info", url).output
    w.close()
    assert "dropped  4 records kept aside until the next commit: 2 to 5 by epoch 2\n" in text


def test_info_of_a_store_without_records(tmp_path: Path) -> None:
    url = make_store(tmp_path / "run.zarr", make_schema(), n_records=0)
    text = run("info", url).output
    assert "last t   none\n" in text
    assert columns(text, "Layout")["temperature"][2] == "0 x 7 x 5"


def test_info_is_not_cut_and_has_no_colours_in_a_pipe(tmp_path: Path) -> None:
    """A name of 170 characters stands whole in one line, also where the environment asks for colours."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 7, "x": 5},
        time=ms.AppendTime(units="days since 2000-01-01"),
        variables={LONG_NAME: ms.Variable(("time", "y", "x"), "float32")},
    )
    url = make_store(tmp_path / "run.zarr", schema)
    done = python_m("info", url, FORCE_COLOR="1", COLUMNS="40", TERM="xterm-256color")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert columns(done.stdout, "Layout")[LONG_NAME][0] == "time, y, x"
    assert len(columns(done.stdout, "On disk")[LONG_NAME]) == 6
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


def test_info_loses_nothing_on_a_narrow_terminal(store: Path) -> None:
    """Cells are folded there; none is cut with an ellipsis, and no line is wider than the terminal."""
    parent, child = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "50", "TERM": "xterm", "NO_COLOR": "1"}
    job = subprocess.Popen([sys.executable, "-m", "mpistream", "info", str(store)], stdout=child, env=env)
    os.close(child)
    text = read_all(parent)
    assert job.wait(60) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert max(map(len, lines)) <= 50
    assert "…" not in text
    # A folded name goes on at the begin of the next line.
    first_column = "".join(line.split(" ")[0] for line in lines)
    assert "temperature" in first_column
    assert "n_stations" in first_column


def read_all(descriptor: int) -> str:
    found = b""
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # EIO: the other end is closed (Linux, pty(7))
            data = b""
        if not data:
            os.close(descriptor)
            return found.decode()
        found += data


@pytest.mark.parametrize("title", ["two\nlines\x1b[31m \x07", 5, ["a"], None])
def test_info_shows_any_title_in_one_line(tmp_path: Path, title: Any) -> None:
    """A title is the user's: control characters do not reach the terminal, and it need not be a string."""
    url = make_store(tmp_path / "run.zarr", make_schema(title=title))
    line = run("info", url).output.splitlines()[1]
    expected = {"two\nlines\x1b[31m \x07": "two lines [31m", "5": "5", "['a']": "['a']", "None": "none"}[str(title)]
    assert line == f"title    {expected}"
    assert json.loads(run("info", url, "--json").output)["title"] == title


@pytest.mark.parametrize(("encoding", "expected"), [("ascii", "T\\xe9 \\u8336"), ("latin-1", "T\xe9 \\u8336")])
def test_info_survives_a_terminal_that_lacks_characters(tmp_path: Path, encoding: str, expected: str) -> None:
    url = make_store(tmp_path / "run.zarr", make_schema(title="Té 茶"))
    command = [sys.executable, "-m", "mpistream", "info", str(url)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=env, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"title    {expected}\n" in done.stdout.decode(encoding)


def test_info_survives_a_reader_that_goes(store: Path) -> None:
    """``mpistream info ... | head -1`` ends without a word on standard error."""
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONUNBUFFERED", None)  # the text must meet the closed pipe before Python's own last flush does
    command = [sys.executable, "-m", "mpistream", "info", str(store)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=env, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


# --json


def test_json_is_the_facts(store: Path) -> None:
    """One JSON object, numbers as numbers, and nothing else on standard output."""
    done = python_m("info", store, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == describe(store)


# Errors


def break_manifest(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(url: Path) -> None:
        path = url / ".mpistream/manifest.json"
        path.write_bytes(change(path.read_bytes()))

    return apply


def remove_manifest(url: Path) -> None:
    (url / ".mpistream/manifest.json").unlink()


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "not there": (remove_manifest, "no .mpistream/manifest.json"),
    "empty": (break_manifest(lambda data: b""), "not valid JSON"),
    "half of it": (break_manifest(lambda data: data[: len(data) // 2]), "not valid JSON"),
    "another value": (break_manifest(lambda data: data.replace(b'"n_records":6', b'"n_records":7')), "checksum"),
    "not text": (break_manifest(lambda data: b"\xff\x00" + data), "not valid JSON"),
    "no number": (break_manifest(lambda data: data.replace(b"60.0", b"NaN")), "NaN"),
    "newer": (break_manifest(lambda data: data.replace(b'"version":1', b'"version":2')), "use a newer mpistream"),
    "foreign": (break_manifest(lambda data: b"{}"), "format None"),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_info_of_a_damaged_store_says_so_in_one_line(tmp_path: Path, what: str, more: list[str]) -> None:
    """A diagnosis and exit code 1, no traceback (ornladios/ADIOS2 #5162)."""
    url = make_store(tmp_path / "run.zarr", make_schema())
    damage, text = BROKEN[what]
    damage(url)
    done = run("info", url, *more)
    assert isinstance(done.exception, SystemExit), done.exception
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr


def test_info_of_a_manifest_cut_anywhere_is_an_error(store: Path, tmp_path: Path) -> None:
    data = (store / ".mpistream/manifest.json").read_bytes()
    cut = tmp_path / ".mpistream/manifest.json"
    cut.parent.mkdir()
    codes = set()
    for n in range(0, len(data), 61):
        cut.write_bytes(data[:n])
        done = run("info", tmp_path)
        codes.add((done.exit_code, type(done.exception), done.stderr[:7], done.stderr.count("\n")))
    assert codes == {(1, SystemExit, "error: ", 1)}


@pytest.mark.parametrize("url", ["nothing-here", "s3://bucket/run.zarr", __file__, ""])
def test_info_of_what_is_no_store(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("info", url)
    assert (done.exit_code, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .+\n", done.stderr)


def test_describe_names_a_folder_that_cannot_be_listed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the file system is one line, too."""
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/temperature"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    done = run("info", store)
    assert (done.exit_code, done.stderr) == (1, f"error: list {store}/temperature: Permission denied\n")


def test_info_of_another_zarr_store_lists_it(tmp_path: Path) -> None:
    """A store that is no stream is listed, groups and arrays, and the streams below it with what is committed."""
    array = {"shape": [5, 7], "data_type": "int16", "fill_value": 0, "dimension_names": ["y", None]}
    array |= {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4]}}, "codecs": ["bytes"]}
    array |= {"zarr_format": 3, "node_type": "array", "chunk_key_encoding": "default"}
    (tmp_path / "g/v").mkdir(parents=True)
    (tmp_path / "g/zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    (tmp_path / "g/v/zarr.json").write_text(json.dumps(array))
    make_store(tmp_path / "g/run", make_schema())
    done = run("info", tmp_path / "g")
    assert done.exit_code == 0
    about = f"{tmp_path}/g is not a stream, it holds streams; give the folder of one: {tmp_path}/g/run"
    assert done.output.startswith(f"store   {tmp_path}/g\nstream  {about}\n")
    rows = columns(done.output, "Nodes")
    assert rows["/"] == ["group", "-", "-", "-", "-", "-"]
    assert rows["/v"] == ["array", "y, -", "int16", "5 x 7", "-", "4 x 4"]
    assert rows["/run"][0] == "stream"
    assert rows["/run/temperature"] == ["array", "time, y, x", "float32", "6 x 7 x 5", "4 x 4 x 5", "2 x 2 x 5"]
    facts = json.loads(run("info", tmp_path / "g", "--json").output)
    assert facts["url"] == str(tmp_path / "g")
    assert facts["nodes"][-1] == {
        "path": "v",
        "kind": "array",
        "dims": ["y", None],
        "dtype": "int16",
        "shape": [5, 7],
        "shard_shape": None,
        "chunk_shape": [4, 4],
    }
    (tmp_path / "g/v/zarr.json").write_text("{")
    done = run("info", tmp_path / "g")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: v/zarr.json: not valid JSON")


# The command itself


def test_info_changes_nothing(store: Path) -> None:
    def state() -> dict[str, tuple[int, int, int]]:
        found = [store, *store.rglob("*")]
        return {str(p): (s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p in found for s in [p.stat()]}

    before = state()
    assert (run("info", store).exit_code, run("info", store, "--json").exit_code) == (0, 0)
    assert state() == before


def test_version() -> None:
    assert run("--version").output == f"mpistream {ms.__version__}\n"


def test_info_starts_no_mpi_and_loads_no_zarr(store: Path) -> None:
    """It runs on a login node, where MPI may not start, and under mpirun."""
    code = """
import sys
from mpistream.__main__ import main
try:
    main()
finally:
    print(*(m for m in ("mpi4py.MPI", "zarr", "xarray") if m in sys.modules), "typer" in sys.modules, file=sys.stderr)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PMI_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4"}
    done = subprocess.run(
        [sys.executable, "-c", code, "info", str(store)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "True\n")
    assert "temperature" in done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_packages_the_command_names_the_extra(missing: str, store: Path) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from mpistream.__main__ import main
main()
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, "info", str(store)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f'mpistream: {missing} is missing: pip install "mpistream[cli]"\n'


def test_an_error_of_our_own_import_is_not_taken_for_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistream.__main__ import main

    monkeypatch.setitem(sys.modules, "mpistream.cli.verbs", None)
    with pytest.raises(ModuleNotFoundError, match=r"mpistream\.cli"):
        main()

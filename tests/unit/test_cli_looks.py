"""``mpistream diff``, ``ls``, ``plot``, ``watch`` and ``export``: text, JSON, exit codes, and one line for errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mpistream as ms
from mpistream.compare import compare
from mpistream.lease import Lease
from mpistream.watching import Watch
from tests.support.info_store import make_schema, make_store
from tests.support.plain import QUICK, append_schema

pytest.importorskip("typer", reason="needs typer, from the extra cli")

from typer.testing import CliRunner, Result

from mpistream.cli import verbs
from mpistream.cli.verbs import app

ROOT = Path(__file__).parents[2]
VERBS = [name for name in verbs.__all__ if name != "app"]


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def is_one_line(done: Result, code: int, text: str) -> bool:
    """Return whether an error is one line on standard error and nothing else."""
    return (done.exit_code, done.stdout, done.stderr.count("\n"), text in done.stderr) == (code, "", 1, True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("looks") / "run.zarr", make_schema())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example(verb: str) -> None:
    """In its --help, beginning with what one would type."""
    text = " ".join(run(verb, "--help").output.split())
    assert f"Example: mpistream {verb} " in text


def test_the_shell_completes_it() -> None:
    """What bash would source, and what it would be answered."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    code = "from mpistream.__main__ import main; import sys; sys.argv[0] = 'mpistream'; main()"
    answers = []
    for args, more in (
        (["--show-completion", "bash"], {}),
        ([], {"_MPISTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "mpistream wa", "COMP_CWORD": "1"}),
    ):
        command = [sys.executable, "-c", code, *args]
        done = subprocess.run(command, env={**env, **more}, capture_output=True, text=True, timeout=60, check=False)
        answers.append(done.stdout)
    assert "_MPISTREAM_COMPLETE=complete_bash" in answers[0]
    assert answers[1].split() == ["watch"]


def test_diff(store: Path, tmp_path: Path) -> None:
    """0 when they are the same, 1 with what differs, 2 for what can't be compared."""
    other = make_store(tmp_path / "other.zarr", make_schema(), n_records=5)
    done = run("diff", store, store)
    assert (done.exit_code, done.stdout) == (0, f"{compare(store, store)}\n")
    done = run("diff", store, other)
    assert (done.exit_code, done.stdout) == (1, f"{compare(store, other)}\n")
    assert "\n  store: 6 records in the first, 5 in the second\n" in done.stdout
    done = run("diff", store, other, "--json", "--rtol", "0.5", "--var", "energy")
    assert (done.exit_code, json.loads(done.stdout)) == (
        *(1, compare(store, other, rtol=0.5, variables=["energy"]).to_json()),
    )
    assert is_one_line(run("diff", store, tmp_path / "nothing"), 2, f"no such folder: {tmp_path}/nothing")


def test_diff_says_which_of_two_stores_is_damaged(store: Path, tmp_path: Path) -> None:
    """Keys are the same in both: an object, and the manifest."""
    rows = sorted(p.relative_to(store).as_posix() for p in (store / "temperature/c").rglob("*") if p.is_file())
    for key in (rows[-1], ".mpistream/manifest.json"):
        bad = tmp_path / f"bad-{len(key)}"
        shutil.copytree(store, bad)
        (bad / key).write_bytes(b"x")
        for order, pair in (("first", (bad, store)), ("second", (store, bad))):
            done = run("diff", *pair)
            assert is_one_line(done, 2, f"error: {bad}, the {order}: "), done.stderr
            assert key in done.stderr


def test_ls(store: Path, tmp_path: Path) -> None:
    """Every node with dims, shape and units; of a stream records and times."""
    done = run("ls", store)
    assert done.exit_code == 0
    first, _, *rows = done.stdout.splitlines()
    assert first == (
        f"{store}: 6 records, t 0.0 to 60.0 hours since 2000-02-28 12:00 (2000-02-28T12:00:00 to 2000-03-02T00:00:00)"
    )
    assert [row.split()[0] for row in rows] == [
        *("/", "/depth", "/energy", "/lat", "/n_stations", "/temperature", "/time", "/y"),
    ]
    facts = json.loads(run("ls", store, "--json").stdout)
    assert (facts["n_records"], facts["first_t"], facts["last_t"]) == (6, 0.0, 60.0)
    assert facts["nodes"][5] == {
        "path": "temperature",
        "kind": "array",
        "dtype": "float32",
        "dims": ["time", "y", "x"],
        "shape": [6, 7, 5],
        "units": None,
        "long_name": None,
    }
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    assert run("ls", tmp_path).stdout.startswith(f"{tmp_path}: no stream\n")
    assert "0 records\n" in run("ls", make_store(tmp_path / "empty", make_schema(), n_records=0)).stdout
    assert is_one_line(run("ls", tmp_path / "nothing"), 1, "error: ")


def test_plot(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG named after the variable, or as told; one line says which, and what is in it."""
    pytest.importorskip("matplotlib", reason="needs matplotlib, from the extra plot")
    monkeypatch.chdir(tmp_path)
    done = run("plot", store, "temperature", "--record", "2")
    assert (done.exit_code, done.stdout) == (*(0, "temperature.png: temperature: record 2, 2000-02-29T12:00:00\n"),)
    assert run("plot", store, "temperature", "--sel", "y=3", "-o", "line.pdf").stdout == (
        "line.pdf: temperature: record 5, 2000-03-02T00:00:00, y = 3\n"
    )
    assert (Path("temperature.png").read_bytes()[:4], Path("line.pdf").read_bytes()[:4]) == (b"\x89PNG", b"%PDF")
    assert is_one_line(run("plot", store, "temperature", "--sel", "y"), 1, "DIM=VALUE")
    assert is_one_line(run("plot", store, "nothing"), 1, "'nothing'")


def test_watch(store: Path, tmp_path: Path) -> None:
    """0 for a run that was closed, 3 for one that died, 4 when no commit came in time, 5 for one that is not whole."""
    assert run("watch", store).exit_code == run("watch", store, "--total", "6", "--once").exit_code == 0
    done = run("watch", store, "--total", "12")
    assert (done.exit_code, run("watch", store, "--total", "12", "--once").exit_code) == (5, 5)
    assert done.stdout == ("closed: 6 of 12 (50%) records, t 60.0 hours since 2000-02-28 12:00 (2000-03-02T00:00:00)\n")
    url = tmp_path / "s"
    schema = append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")})
    with ms.write_open(url, schema, options=QUICK) as w:
        w.write_record(0.0, {"v": 1.0})
        w.commit()
        done = run("watch", url, "--timeout", "0", "--json")
        assert done.exit_code == 4
        assert [json.loads(text)["state"] for text in done.stdout.splitlines()] == ["running"]
        assert run("watch", url, "--once").exit_code == 0
    lease = dataclasses.replace(Lease.of_this_process("run-1", 60.0), pid=2**31 - 1)
    (url / ".mpistream/lease").write_bytes(lease.to_bytes())
    for more in ([], ["--once"]):
        done = run("watch", url, *more)
        assert (done.exit_code, done.stdout[:16]) == (3, "dead: 1 record, ")
    assert is_one_line(run("watch", tmp_path / "nothing"), 1, "error: no such folder: ")


def test_watch_of_a_run_that_an_exception_ended(tmp_path: Path) -> None:
    """It says so and ends with 3, also where the writer was never closed; a resume that is closed makes it good."""
    url = tmp_path / "s"
    schema = append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")})
    with pytest.raises(ZeroDivisionError), ms.write_open(url, schema, options=QUICK) as w:  # noqa: PT012
        w.write_record(0.0, {"v": 1.0})
        w.commit()
        raise ZeroDivisionError
    for more in ([], ["--once"]):
        done = run("watch", url, *more)
        assert (done.exit_code, done.stdout[:18]) == (3, "failed: 1 record, ")
    code = (
        "import sys, mpistream as ms; w = ms.write_resume(sys.argv[1]); w.write_record(1.0, {'v': 1.0}); w.commit()\n"
        "w.write_record(2.0, {'v': 1.0}); w.flush(); 1 / 0"
    )
    command = [sys.executable, "-c", code, str(url)]
    assert b"ZeroDivisionError" in subprocess.run(command, capture_output=True, timeout=60, check=False).stderr
    done = run("watch", url)
    assert (done.exit_code, done.stdout[:19]) == (3, "failed: 2 records, ")
    # What it had staged is no matter of parts without MPI, and nobody will commit it.
    done = run("verify", url)
    assert (done.exit_code, "a stage folder" in done.stdout, "parts" in done.stdout) == (1, True, False)
    ms.write_resume(url, options=QUICK).close()
    done = run("watch", url)
    assert (done.exit_code, done.stdout[:19]) == (0, "closed: 2 records, ")


def test_watch_waits_for_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the run has failed or is not whole, so long; then with the exit code of how it ended."""
    url, now, slept = tmp_path / "s", [0.0], []
    schema = append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")})
    with pytest.raises(ZeroDivisionError), ms.write_open(url, schema, options=QUICK) as w:  # noqa: PT012
        w.write_record(0.0, {"v": 1.0})
        w.commit()
        raise ZeroDivisionError

    def sleep(seconds: float) -> None:
        """Pass time; after 9 s, and after 9 s more, a job comes that writes a record."""
        slept.append(seconds)
        now[0] += seconds
        if now[0] in (9.0, 18.0) and resumes:
            with ms.write_resume(url, options=QUICK) as w:
                w.write_record(now[0], {"v": 1.0})

    monkeypatch.setattr(verbs.watch, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    resumes = False
    args = ("watch", url, "--total", "3", "--interval", "3", "--timeout", "1", "--wait", "10")
    done = run(*args)
    assert (done.exit_code, done.stdout[:25], slept) == (3, "failed: 1 of 3 (33%) reco", [3.0, 3.0, 3.0, 1.0])
    now[0], resumes = 0.0, True
    done = run(*args)
    assert [text.split(" records")[0] for text in done.stdout.splitlines()] == [
        *("failed: 1 of 3 (33%)", "closed: 2 of 3 (67%)", "closed: 3 of 3 (100%)")
    ]
    assert (done.exit_code, now[0]) == (0, 18.0)


@pytest.mark.parametrize(("closes", "code", "at"), [(True, 0, 15.0), (False, 4, 17.0)])
def test_the_timeout_begins_anew_with_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, closes: bool, code: int, at: float
) -> None:
    """Between its lease and its first manifest, the last commit is the one of the run that died."""
    url, now = tmp_path / "s", [0.0]
    alive = Lease.of_this_process("run", 60.0)

    def put(lease: Lease) -> None:
        (url / ".mpistream/lease").write_bytes(lease.to_bytes())

    def commit() -> None:
        with ms.write_resume(url, takeover=True, options=QUICK) as w:
            w.write_record(1.0, {"v": 1.0})
        put(alive)

    plan = {
        1.0: commit,
        2.0: lambda: put(dataclasses.replace(alive, pid=2**31 - 1)),
        12.0: lambda: put(alive),
        **({15.0: lambda: put(dataclasses.replace(alive, closed=True))} if closes else {}),
    }

    def sleep(seconds: float) -> None:
        now[0] += seconds
        plan.pop(now[0], lambda: None)()

    ms.write_open(url, append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")}), options=QUICK).close()
    put(alive)
    monkeypatch.setattr(verbs.watch, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(verbs.watch, "Watch", functools.partial(Watch, clock=lambda: now[0]))
    done = run("watch", url, "--timeout", "5", "--wait", "20")
    assert (done.exit_code, now[0]) == (code, at), done.output


def test_watch_waits_for_a_store_that_is_yet_to_come(tmp_path: Path) -> None:
    """With --wait; without it the message names that option."""
    assert is_one_line(run("watch", tmp_path / "s"), 1, "; --wait SECONDS waits for a store that is yet to come")
    done = run("watch", tmp_path / "s", "--wait", "0.01")
    assert (done.exit_code, done.stderr) == (
        *(1, f"waiting up to 0.01 s for {tmp_path}/s\nerror: no such folder: {tmp_path}/s\n"),
    )
    schema = append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")})
    opening = threading.Timer(0.1, lambda: ms.write_open(tmp_path / "s", schema, options=QUICK).close())
    opening.start()
    done = run("watch", tmp_path / "s", "--wait", "60")
    opening.join()
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "closed: 0 records"


def test_export(store: Path, tmp_path: Path) -> None:
    """A file with what was asked for; a line, or JSON, says what it holds; a second time it is refused."""
    pytest.importorskip("h5py", reason="needs h5py, from the extra hdf5")
    out = tmp_path / "out.nc"
    done = run("export", store, out, "--var", "temperature", "--records", "-2:", "--region", "y=2:7")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{out}: 2 records, 256 B of values, ")
    assert "static lat is not committed" in done.stderr
    with ms.open_hdf5(out) as r:
        assert r.read_array("y").tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
        expected = ms.read_record(store, "temperature", 4, {"y": (2, 7)})
        np.testing.assert_array_equal(r.read_record("temperature", 0), expected)
    assert is_one_line(run("export", store, out), 1, "choose another name, or give --overwrite")
    done = run("export", store, out, "--overwrite", "--deflate", "1", "--json")
    assert json.loads(done.stdout)["n_records"] == 6
    for more in (["--records", "x"], ["--region", "y"], ["--region", "y=3"]):
        assert is_one_line(run("export", store, tmp_path / "more.nc", *more), 1, "START:STOP")


def test_one_of_a_kind_is_singular(store: Path, tmp_path: Path) -> None:
    """Whatever verb counts it."""
    url = tmp_path / "s"
    schema = append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")})
    with ms.write_open(url, schema, options=QUICK) as w:
        w.write_record(0.0, {"v": 1.0})
    texts = [
        run(*args).output
        for args in (
            *(("ls", url), ("info", url), ("verify", url), ("watch", url), ("diff", url, url), ("diff", url, store)),
            *(
                ("plan", url, "--ranks", "1"),
                ("plot", url, "v", "--record", "7"),
                ("export", url, "x.nc", "--records", 7),
            ),
            *(("repair", url), ("truncate", url, "--at", "-1")),
        )
    ]
    assert all("1 record" in text for text in texts[4:]), texts
    assert [text for text in texts if re.search(r"\b1 (records|objects|arrays|ranks|files)\b", text)] == []


def test_messages_name_options_and_not_arguments(store: Path, tmp_path: Path) -> None:
    """What the library tells a program to do, a verb tells its user."""
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    done = run("export", tmp_path, tmp_path / "x.nc")
    assert done.stderr == (
        f"error: {tmp_path}: no .mpistream/manifest.json; this Zarr store is no stream of mpistream and has no "
        "records, `mpistream ls` lists its arrays\n"
    )
    assert run("plot", store, "temperature", "--record", "7").stderr == (
        "error: record 7 of 'temperature': there are 6 records\n"
    )
    done = run("plan", store, "--ranks", "2", "--writers", "7")
    assert "warning: --writers 7, but only 2 ranks: no more than those write\n" in done.stdout


def test_a_location_series_has_all_its_times_and_plots_where_it_lies(tmp_path: Path) -> None:
    """More locations than times, or fewer: `ls` names the time axis; `plot` draws a coordinate, and no series."""
    pytest.importorskip("matplotlib", reason="needs matplotlib, from the extra plot")
    ids = [f"cat-{i}" for i in range(5)]
    coords = {"lat": np.linspace(40.0, 50.0, 5)}
    url = tmp_path / "s"
    with ms.write_open_locations(
        url, ids, np.arange(3.0), {"flow": "f4"}, units="hours since 2000-01-01", coords=coords, options=QUICK
    ) as w:
        for i in range(5):
            w.write_location(i, {"flow": np.arange(3, dtype="f4")})
    done = run("ls", url)
    assert done.stdout.startswith(f"{url}: 5 locations, t 0.0 to 2.0 hours since 2000-01-01 ")
    assert run("plot", url, "lat", "-o", tmp_path / "lat.png").exit_code == 0
    assert (tmp_path / "lat.png").stat().st_size > 1000
    done = run("plot", url, "flow")
    assert is_one_line(done, 1, "'flow' has a series at each location, which is not drawn; read_location")


def test_ls_says_what_is_committed_of_fixed_times(tmp_path: Path) -> None:
    schema = ms.StreamSchema(
        dims={"time": None, "x": 2},
        time=ms.IndexedTime([0.0, 1.0, 2.0], units="hours since 2000-01-01"),
        variables={"v": ms.Variable(("time", "x"), "f4")},
    )
    with ms.write_open(tmp_path / "s", schema, options=QUICK) as w:
        w.write_record_at(1, 1.0, {"v": 1.0})
    assert run("ls", tmp_path / "s").stdout.startswith(f"{tmp_path / 's'}: 3 records, 1 committed, t 1.0 to 1.0")


def test_diff_with_a_plain_copy_compares_the_values(store: Path, tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    copy = tmp_path / "copy.zarr"
    data = xarray.open_zarr(store, decode_times=False, consolidated=True)[["temperature"]].drop_encoding()
    data.to_zarr(copy, zarr_format=3)
    assert run("diff", store, copy, "--var", "temperature").exit_code == 0
    data["temperature"][3, 2, 1] += 1
    data.to_zarr(copy, mode="w", zarr_format=3)
    done = run("diff", store, copy, "--var", "temperature")
    assert (done.exit_code, "record 3" in done.stdout, "y[2] x[1]" in done.stdout) == (1, True, True)


def test_no_time_is_left_of_a_run_that_is_over(tmp_path: Path) -> None:
    """Records came while it was watched; then it was closed below its goal."""
    url = tmp_path / "s"
    schema = append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")})
    w = ms.write_open(url, schema, options=QUICK)
    now = [0.0]
    watcher = Watch(url, n_total=10, clock=lambda: now[0])
    watcher.look()
    for i in range(2):
        w.write_record(float(i), {"v": 1.0})
        w.commit()
        now[0] += 1.0
        seen = watcher.look()
    assert seen.eta is not None
    w.close()
    now[0] += 1.0
    seen = watcher.look()
    assert (seen.state, seen.n_records, seen.eta) == ("closed", 2, None)


def test_a_schema_file_that_is_no_python_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = (")
    done = run("plan", f"{tmp_path / 'bad.py'}:schema", "--ranks", "4")
    assert is_one_line(done, 1, "SyntaxError: '(' was never closed")


def test_a_script_that_ends_with_all_committed_has_not_failed(tmp_path: Path) -> None:
    """Nothing is missing, though the writer was never closed."""
    with ms.write_open(tmp_path / "s", append_schema({"y": 2}, {"v": ms.Variable(("time", "y"), "f4")})):
        pass
    code = "import sys, mpistream as ms; w = ms.write_resume(sys.argv[1]); w.write_record(0.0, {'v': 1.0}); w.commit()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], timeout=60, check=True)
    done = run("watch", tmp_path / "s")
    assert (done.exit_code, done.stdout[:18]) == (0, "closed: 1 record, ")

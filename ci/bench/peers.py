"""How fast mpistream is beside the others, on the same work:  python ci/bench/peers.py

Works: (a) large records, inner chunks of 1 MiB; (b) the same, 32 KiB; (c) many small variables, a commit each record;
(d) what the simulation waits; (e) what output costs a model; (f) reading back. Each turn of each library is a process
group of its own, with a deadline, in a folder of its own, which is removed; the libraries take turns, round after
round, and medians are printed. What can't be installed, fails or hangs is named with its reason. At the end: which of
the targets are reached.

The libraries live in `.peers`, made at the first run (a venv from PyPI; h5py with MPI from Debian, which root gets
installed). The last line is JSON, with every turn. Ends with 1 if a target is missed, with 2 if mpistream or the limit
could not be measured.

    python ci/bench/peers.py --quick                          two rounds, two codecs, one kind of data
    python ci/bench/peers.py --work a,b --peers mpistream,tensorstore --rounds 7
    python ci/bench/peers.py --work a --only plume            the cases whose titles have this
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from adapters import install
from adapters.cases import MIB, NOTES, ROWS, WORKS, Case, Row, cases_of
from adapters.targets import best, is_durable, verdicts_of
from rearrange import DEBIAN_MPIEXEC, DEBIAN_PYTHON

_TURN_SECONDS = 120
_GRACE_SECONDS = 10
_PARTS = ("held_up", "closing", "slower")  # of what output costs a model
_SLOW_SECONDS = 8  # a row whose turn takes longer gets one turn only
_RUN = str(Path(__file__).parent / "adapters/run.py")
_JOB = {"layout": "", "codec": "lz4 shuffle", "data": "smooth", "n_variables": 1, "n_warm": 2, "n_records": 8}


def command_of(row: Row, case: Case, job: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return what starts a turn, and its environment."""
    environment = install.environment()
    if row.module == "hdf5":
        start = [*shlex.split(DEBIAN_MPIEXEC), "--bind-to", "none"]
        python = DEBIAN_PYTHON
        environment["PYTHONPATH"] = str(install.HOME / install.PLUGIN)
    else:
        start = [str(install.VENV / "bin/mpiexec")]
        python = str(install.VENV / "bin/python")
        environment["PYTHONPATH"] = str(install.ROOT)
        environment["PATH"] = f"{install.VENV}/bin:{environment['PATH']}"
    return [*start, "-n", str(case.n_ranks), python, _RUN, row.module, json.dumps(job)], environment


def reason_in(errors: str) -> str:
    """Return the line of a traceback that says what went wrong, or the last one there is."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and set(line) != {"-"}]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception")) or "signal" in line]
    return (named or lines or ["it ended without a word"])[-1][:200]


def end(process: subprocess.Popen[str], mark: str) -> None:
    """End a launcher and its ranks, which have process groups of their own, and may outlive it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE_SECONDS)
            break
    # Until none is left: what still runs would write into a folder that is being removed.
    until = time.monotonic() + _GRACE_SECONDS
    while (pids := with_mark(mark)) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def with_mark(mark: str) -> list[int]:
    """Return the processes that have this in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def turn(row: Row, layout: str, case: Case, home: str) -> dict[str, Any]:
    """Run one turn; return what rank 0 says, or {"failed": why}."""
    # What an earlier turn left in memory is written now, and not while this one is timed.
    os.sync()
    with contextlib.ExitStack() as stack:
        path = tempfile.mkdtemp(dir=home)
        if not case.has_many_files:
            stack.callback(shutil.rmtree, path, ignore_errors=True)
        job = {**_JOB, **case.job, "peer": row.peer, "options": row.options, "task": case.task}
        job |= {"layout": layout, "folder": path}
        command, environment = command_of(row, case, job)
        mark = f"MPISTREAM_PEERS_FOLDER={path}"
        environment |= dict([mark.split("=", 1)])
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=_TURN_SECONDS)
        except subprocess.TimeoutExpired:
            end(process, mark)
            return {"failed": f"no end within {_TURN_SECONDS} s"}
        except BaseException:
            end(process, mark)
            raise
        found = [line for line in output.splitlines() if line.startswith("{")]
        if process.returncode != 0 or not found:
            return {"failed": reason_in(errors)}
        return dict(json.loads(found[-1]))


def measure(case: Case, arguments: argparse.Namespace, missing: dict[str, str]) -> list[dict[str, Any]]:
    """Return the rows of a case."""
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        if case.work not in row.works or (arguments.peers and row.peer not in arguments.peers):
            continue
        if case.job.get("codec", _JOB["codec"]) not in row.codecs:
            continue
        for layout in row.layouts_of(case):
            shown = "" if row.peer == "limit" else layout
            found: dict[str, Any] = {"peer": row.peer, "how": row.how, "layout": shown, "turns": [], "row": row}
            why = next((f"{name}: {missing[name]}" for name in row.packages if name in missing), None)
            rows.append({**found, "missing": why} if why else found)
            rows[-1]["job_layout"] = layout
    with tempfile.TemporaryDirectory(
        prefix="mpistream-peers-", dir=arguments.folder, ignore_cleanup_errors=True
    ) as home:
        take_turns(case, rows, arguments.rounds, home)
    wholes = [entry for entry in rows if not entry["row"].options.get("copy")]  # a copy has the last record alone
    checksums = {json.dumps(t["checksum"]) for entry in wholes for t in entry["turns"] if "checksum" in t}
    assert len(checksums) <= 1, f"({case.work}) {case.title}: the libraries were not given the same data"
    for entry in rows:
        summarise(case, entry)
        del entry["row"], entry["job_layout"]
    return rows


def take_turns(case: Case, rows: list[dict[str, Any]], rounds: int, home: str) -> None:
    """Let the rows take turns, each round in the other direction: none always follows the same one."""
    for k in range(rounds):
        for entry in rows[:: -1 if k % 2 else 1]:
            turns = entry["turns"]
            is_slow = turns and turns[-1]["seconds"] * (case.job.get("n_records", 8) + 2) > _SLOW_SECONDS
            if "missing" in entry or "failed" in entry or is_slow:
                continue
            said = turn(entry["row"], entry["job_layout"], case, home)
            if "seconds" in said:
                turns.append(said)
            else:
                entry.update(said)


def summarise(case: Case, entry: dict[str, Any]) -> None:
    """Put medians into a row."""
    turns = entry["turns"]
    if not turns:
        return
    for key in ("seconds", "longest", "without", *_PARTS, "whole", "chunk", "nbytes", "n_files"):
        if key in turns[0]:
            entry[key] = statistics.median(t[key] for t in turns)
    entry["peak"] = statistics.median(max(t["peaks"]) for t in turns)
    if "without" in entry:
        # Of each turn: what else runs on the machine hits both.
        entry["cost"] = statistics.median(t["seconds"] / t["without"] for t in turns)
    cells = case.job["ny"] * case.job["nx"] * case.job.get("n_variables", 1) * case.n_ranks
    entry["mb_per_s"] = 4e-6 * cells / entry["seconds"]
    entry["shards_per_s"] = case.n_ranks * case.job.get("n_variables", 1) / entry["seconds"]


def columns_of(case: Case, entry: dict[str, Any], limit: float | None) -> str:
    """Return the figures of a row as text."""
    ratio = f"{limit / entry['seconds']:6.2f}" if limit else "     -"
    peak = f"{entry['peak'] / MIB:7.1f}"
    spread = [1e3 * t["seconds"] for t in entry["turns"]]
    ms = f"{1e3 * entry['seconds']:9.2f} {min(spread):9.2f} {max(spread):9.2f}"
    if case.task == "write":
        return f"{ms} {entry['mb_per_s']:8.0f} {entry['shards_per_s']:9.0f} {ratio} {peak} {entry['n_files']:7.0f}"
    if case.task == "blocked":
        return f"{ms} {1e3 * entry['longest']:9.2f} {ratio} {peak}"
    if case.task == "model":
        parts = " ".join(f"{1e3 * entry[part]:8.2f}" for part in _PARTS)
        return f"{ms} {1e3 * entry['without']:9.2f} {entry['cost']:8.3f} {parts} {peak}"
    return f"{ms} {entry['mb_per_s']:8.0f} {1e3 * entry['chunk']:9.3f} {ratio} {peak}"


_TIMES = f"{'ms':>9} {'fastest':>9} {'slowest':>9}"
HEADINGS = {
    "write": f"{_TIMES} {'MB/s':>8} {'shards/s':>9} {'limit':>6} {'MiB':>7} {'files':>7}",
    "blocked": f"{_TIMES} {'longest':>9} {'copy':>6} {'MiB':>7}",
    "model": f"{_TIMES} {'without':>9} {'with/w.o':>8} {'held up':>8} {'closing':>8} {'slower':>8} {'MiB':>7}",
    "read": f"{_TIMES} {'MB/s':>8} {'chunk ms':>9} {'limit':>6} {'MiB':>7}",
}


def show(case: Case, rows: list[dict[str, Any]]) -> None:
    """Print the table of a case: fastest first, then what could not be measured, then the best row of each."""
    print(f"\n({case.work}) {WORKS[case.work]}: {case.title}")
    print(f"  {'':12} {'':18} {'':12} {HEADINGS[case.task]}")
    limit = best(rows, "limit")
    for entry in sorted((r for r in rows if r["turns"]), key=lambda r: r.get("cost", r["seconds"])):
        name = f"  {entry['peer']:12} {entry['how']:18} {entry['layout']:12}"
        print(f"{name} {columns_of(case, entry, limit)}")
    for entry in rows:
        for key in ("missing", "failed"):
            if key in entry:
                print(f"  {entry['peer']:12} {entry['how']:18} {entry['layout']:12} {key}: {entry[key]}")
    times: dict[str, float] = {}
    for peer in dict.fromkeys(r["peer"] for r in rows if r["turns"] and not is_durable(r)):
        times[peer] = best(rows, peer) or 0.0
    if case.task != "model":
        text = ", ".join(f"{peer} {1e3 * s:.2f}" for peer, s in sorted(times.items(), key=lambda item: item[1]))
        print(f"  best rows, ms: {text}")
    sys.stdout.flush()


# Task -> what the table of best rows says of it: name, key of a row, factor, format.
BEST: dict[str, tuple[tuple[str, str, float, str], ...]] = {
    "write": (("MB/s", "mb_per_s", 1, ".0f"),),
    "blocked": (("ms", "seconds", 1e3, ".1f"),),
    "model": (("times as long as without output", "cost", 1, ".2f"),),
    "read": (("MB/s", "mb_per_s", 1, ".0f"), ("ms, one inner chunk", "chunk", 1e3, ".2f")),
}
SMALL = (("shards/s", "shards_per_s", 1, ".0f"),)


def best_rows(cases: list[tuple[Case, list[dict[str, Any]]]]) -> list[str]:
    """Return a table in Markdown: the best row of each library, those with fsync left out."""
    peers = [
        peer for peer in dict.fromkeys(row.peer for row in ROWS) if any(e["peer"] == peer for _, r in cases for e in r)
    ]
    lines = [f"| | {' | '.join(peers)} |", "|---|" + "---|" * len(peers)]
    for case, rows in cases:
        for unit, key, factor, shape in SMALL if case.work == "c" else BEST[case.task]:
            cells = []
            for peer in peers:
                found = [e[key] for e in rows if e["peer"] == peer and key in e and not is_durable(e)]
                choose = max if unit.endswith("/s") else min
                cells.append(f"{factor * choose(found):{shape}}" if found else "-")
            lines.append(f"| ({case.work}) {case.title}: {unit} | {' | '.join(cells)} |")
    return lines


def settings_of(arguments: argparse.Namespace, missing: dict[str, str]) -> dict[str, Any]:
    """Return what a reader of the figures has to know, and print it."""
    folder = arguments.folder or tempfile.gettempdir()
    found = subprocess.run(["df", "--output=fstype", folder], check=False, capture_output=True, text=True).stdout
    load = os.getloadavg()[0]
    about = {
        "cores": len(os.sched_getaffinity(0)),
        "file_system": found.split()[-1] if found else "unknown",
        "load_at_begin": round(load, 2),
        "rounds": arguments.rounds,
        "versions": install.versions(),
        "missing": missing,
        "notes": NOTES,
    }
    print(
        f"{about['cores']} cores, {about['file_system']}, {arguments.rounds} rounds, load {load:.2f} before the first"
    )
    if load > 0.5:
        print("SOMETHING ELSE RUNS ON THIS MACHINE: these figures are noise")
    print(", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")
    for note in NOTES:
        print(f"- {note}")
    print(
        "Columns: ms a record (the median turn, the fastest, the slowest); limit or copy: times the speed of it; MiB: "
        "the most that a rank held beyond its own block; files: those that are left; of what output costs a model, in "
        "ms a record: held up in the calls, closing, slower steps"
    )
    return about


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(row.peer for row in ROWS))
    parser.add_argument("--work", default="a,b,c,d,e,f", help="which of a to f, with commas")
    parser.add_argument("--only", default="", help="only cases with this in their titles, such as 'zeros'")
    parser.add_argument("--peers", default="", help=f"which of {','.join(names)}; all by default")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each row: 5, or 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, codecs, kinds of data and records")
    parser.add_argument("--folder", help="where to write; the system's folder for temporary files by default")
    parser.add_argument("--fresh", action="store_true", help="install the peers anew")
    arguments = parser.parse_args()
    arguments.work = arguments.work.split(",")
    arguments.peers = [name for name in arguments.peers.split(",") if name]
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    for given, known in ((arguments.work, list(WORKS)), (arguments.peers, names)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    return arguments


def main() -> int:
    arguments = parsed()
    # So that what is under way is ended and removed, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    missing = install.make(is_fresh=arguments.fresh)
    if not arguments.peers or "h5py mpio" in arguments.peers:
        reason = install.without_hdf5()
        if reason is not None:
            missing["h5py"] = reason
    document: dict[str, Any] = {"benchmark": "peers", **settings_of(arguments, missing), "cases": []}
    verdicts, measured_cases = [], []
    for case in cases_of(arguments.work, is_quick=arguments.quick):
        if arguments.only not in case.title:
            continue
        rows = measure(case, arguments, missing)
        show(case, rows)
        measured_cases.append((case, rows))
        verdicts += verdicts_of(case.work, case.title, rows)
        document["cases"].append({"work": case.work, "title": case.title, "ranks": case.n_ranks, "rows": rows})
    print("\nBest rows (- : not measured, see above)")
    print("\n".join(best_rows(measured_cases)))
    print("\nTargets")
    for verdict in verdicts:
        print(f"  {verdict}")
    measured = {v.work for v in verdicts}
    for work in arguments.work:
        if work not in measured:
            print(f"  ({work}) not decided: it takes rows of mpistream and of those it is compared with")
    document["targets"] = [
        {"work": v.work, "text": v.text, "value": v.value, "target": v.target, "is_reached": v.is_reached}
        for v in verdicts
    ]
    print(json.dumps(document))
    ours = [r for c in document["cases"] for r in c["rows"] if r["peer"] in ("limit", "mpistream")]
    if any(not r["turns"] for r in ours):
        return 2
    return 0 if all(v.is_reached for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

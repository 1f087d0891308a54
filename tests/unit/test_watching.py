"""How a run is getting on, by a clock of the test's own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import mpistream as ms
from mpistream.lease import Lease
from mpistream.watching import Watch
from tests.support.info_store import files_below, size_of
from tests.support.plain import QUICK, append_schema


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(url: Path) -> ms.StreamWriter:
    schema = append_schema({"y": 4}, {"v": ms.Variable(("time", "y"), "f4")}, units="hours since 2000-01-01")
    return ms.write_open(url, schema, options=QUICK)


def test_records_rate_and_what_is_left(tmp_path: Path) -> None:
    """Two records every ten seconds are 0.2 a second; 4 of 10 leave half a minute."""
    clock = Clock()
    w = opened(tmp_path / "s")
    watch = Watch(tmp_path / "s", n_total=10, clock=clock)
    first = watch.look()
    assert (first.state, first.n_records, first.rate, first.eta, first.seconds_since_commit) == (
        *("running", 0, None, None, None),
    )
    for i in range(4):
        w.write_record(float(i), {"v": 0.0})
        if i % 2:
            w.commit()
            clock.now += 10
            seen = watch.look()
    assert (seen.n_records, seen.n_total, seen.rate, seen.eta) == (4, 10, 0.2, 30.0)
    assert (seen.last_t, seen.last_date, seen.seconds_since_commit) == (3.0, "2000-01-01T03:00:00", 0.0)
    assert seen.nbytes == size_of(*files_below(tmp_path / "s"))
    assert seen.writer is not None
    assert "pid" in seen.writer
    clock.now += 5
    assert watch.look().seconds_since_commit == 5.0
    w.close()
    assert watch.look().state == "closed"
    json.dumps(seen.to_json(), allow_nan=False)


def test_a_resume_that_goes_back_begins_the_rate_anew(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path / "s") as w:
        for i in range(6):
            w.write_record(float(i), {"v": 0.0})
    watch = Watch(tmp_path / "s", clock=clock)
    w = ms.write_resume(tmp_path / "s", at=1.0, options=QUICK)
    clock.now += 10
    assert (watch.look().n_records, watch.look().rate) == (2, None)
    w.write_record(2.0, {"v": 0.0})
    w.commit()
    clock.now += 10
    assert watch.look().rate == 0.1
    w.close()


def test_an_indexed_stream_says_how_many_there_will_be(tmp_path: Path) -> None:
    schema = ms.StreamSchema(
        dims={"time": None, "y": 2},
        time=ms.IndexedTime([0.0, 1.0, 2.0], units="s"),
        variables={"v": ms.Variable(("time", "y"), "f4")},
    )
    with ms.write_open(tmp_path / "s", schema, options=QUICK) as w:
        w.write_record_at(1, 1.0, {"v": 0.0})
    seen = Watch(tmp_path / "s").look()
    assert (seen.n_records, seen.n_total) == (1, 3)


def put_lease(url: Path, **changes: object) -> None:
    """Write the lease of a writer on another host."""
    there = {"boot_id": "another", "host": "node7", "slurm_job_id": None, "ttl": 60.0, **changes}
    lease = dataclasses.replace(Lease.of_this_process("run-1", 60.0), **there)  # type: ignore[arg-type]
    (url / ".mpistream/lease").write_bytes(lease.to_bytes())


def test_a_writer_on_another_host_is_judged_by_its_counter(tmp_path: Path) -> None:
    """Unknown at first, running once the counter moves, dead when it has stood still for longer than its ttl."""
    clock, url = Clock(), tmp_path / "s"
    opened(url).close()
    watch = Watch(url, clock=clock)
    put_lease(url, counter=1)
    assert watch.look().state == "unknown"
    clock.now += 30
    put_lease(url, counter=2)
    assert watch.look().state == "running"
    clock.now += 61
    assert watch.look().state == "dead"
    put_lease(url, counter=3, run_id="run-2")
    assert watch.look().state == "unknown"


def test_leases_that_say_something_else(tmp_path: Path) -> None:
    """A dead process here is dead; no lease is none; a damaged one is not known."""
    url = tmp_path / "s"
    opened(url).close()
    lease = dataclasses.replace(Lease.of_this_process("run-1", 60.0), pid=2**31 - 1)
    (url / ".mpistream/lease").write_bytes(lease.to_bytes())
    assert Watch(url).look().state == "dead"
    (url / ".mpistream/lease").write_bytes(b"{")
    assert Watch(url).look().state == "unknown"
    (url / ".mpistream/lease").unlink()
    assert Watch(url).look().state == "none"


@pytest.mark.parametrize("end", ["killed", "failed", "damaged", "alive", "well"])
def test_a_repair_is_no_good_end_of_a_run_that_had_none(tmp_path: Path, end: str) -> None:
    """Nor is a truncation; a resume that ends well is one."""
    url = tmp_path / "s"
    with opened(url) as w:
        w.write_record(0.0, {"v": 0.0})
    lease = dataclasses.replace(Lease.of_this_process("run-1", 60.0), closed=end in ("failed", "well"))
    if end != "alive":
        lease = dataclasses.replace(lease, pid=2**31 - 1, failed=end == "failed")
    (url / ".mpistream/lease").write_bytes(b"{" if end == "damaged" else lease.to_bytes())
    ms.repair(url, takeover=end in ("alive", "damaged"), options=QUICK)
    state = "closed" if end == "well" else "failed"
    assert Watch(url).look().state == state
    ms.truncate(url, -1.0, options=QUICK)
    assert Watch(url).look().state == state
    ms.write_resume(url, options=QUICK).close()
    assert Watch(url).look().state == "closed"


def test_there_must_be_a_stream(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    with pytest.raises(ms.FormatError):
        Watch(tmp_path)

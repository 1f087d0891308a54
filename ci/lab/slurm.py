"""Jobs on SLURM that are ended and requeued, again and again, until 100 records are there.

SLURM runs here on one node, with two partitions. Preempted: a job in `high` preempts the one in `low`, which gets
SIGTERM, then SIGKILL, and is requeued; where it left off the next run resumes, on one rank more or less. Signalled:
examples/slurm/job.sh, to which SLURM sends USR1 some time before its time limit; its guard lets it commit and ask for a
requeue. The output is in the end that of a run that was left alone. For root on Linux, with SLURM and munge installed.
See ci/soak.

    python ci/lab/slurm.py [N [preempted | signalled]]
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import mpistream as ms
from tests.crash.test_preempted_jobs import assert_whole
from tests.support import writing_job
from tests.support.scene import assert_holds
from tests.support.wait import wait_until
from tests.support.writing_job import SCENE

ROOT = Path(__file__).resolve().parents[2]
N_RECORDS = 100
DEADLINE = 300.0

_CONFIG = """
ClusterName=soak
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmUser=root
SlurmdUser=root
KillWait=5
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=2000 State=UNKNOWN
PartitionName=low Nodes={host} PriorityTier=1 GraceTime=2 Default=YES
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF
"""

# The ranks of each run: one more or one less than those of the last.
_SCRIPT = """#!/bin/sh
#SBATCH --partition=low --ntasks=8 --time=10 --requeue --open-mode=append --output={folder}/out
cd {root}
n=$((1 + ${{SLURM_RESTART_COUNT:-0}} % 4))
echo "run ${{SLURM_RESTART_COUNT:-0}} on $n ranks"
trap : TERM
mpiexec -launcher fork -n $n {python} -m mpi4py {job} {url} {n_records} '{how}' && exit
# Preempted: a script that ended now would have failed, and SLURM would not requeue it.
sleep 60
exit 1
"""


def run(*words: str | Path) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """Run SLURM on this machine."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        print(f"slurm: skipped: {', '.join(missing)} not installed")
        raise SystemExit(0)
    munge = folder / "munge"
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir()
    (munge / "key").write_bytes(os.urandom(1024))
    shutil.chown(munge, "munge", "munge")
    shutil.chown(munge / "key", "munge", "munge")
    (munge / "key").chmod(0o400)
    folder.chmod(0o755)
    (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, host=socket.gethostname()))
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    options = [f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={munge}/pid"]
    options += [f"--log-file={munge}/log", f"--seed-file={munge}/seed", "--foreground"]
    log = open(folder / "log", "ab")  # noqa: SIM115 - the servers' own
    servers = [subprocess.Popen(["runuser", "-u", "munge", "--", "munged", *options], stdout=log, stderr=log)]
    try:
        wait_until((munge / "socket").exists, 30, "munged")
        servers.append(subprocess.Popen(["slurmctld", "-D", "-c"], stdout=log, stderr=log))
        servers.append(subprocess.Popen(["slurmd", "-D", "-N", socket.gethostname()], stdout=log, stderr=log))
        wait_until(_is_idle, 60, f"SLURM, see {folder}", every=0.5)
        yield
    finally:
        for server in reversed(servers):
            server.terminate()
            server.wait(30)


def _is_idle() -> bool:
    with contextlib.suppress(RuntimeError):
        return "idle" in run("sinfo", "-h", "-o", "%T")
    return False


def _n_records(url: Path) -> int:
    try:
        return ms.open_reader(url).n_records
    except ms.FormatError:
        return 0


def _is_due(url: Path, goal: int, job: str) -> bool:
    return _n_records(url) >= goal or state_of(job) != "RUNNING"


def _is_stopped(job: str) -> bool:
    return state_of(job) != "RUNNING"


def state_of(job: str) -> str:
    return run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()


def loop(folder: Path, rng: random.Random) -> str:
    """Run one job to its end; return what happened."""
    url, script = folder / "s", folder / "script"
    script.write_text(
        _SCRIPT.format(
            folder=folder,
            root=ROOT,
            python=sys.executable,
            job=writing_job.__file__,
            url=url,
            n_records=N_RECORDS,
            how=json.dumps({"options": {"timeout": 20}, "pause": 0.1}),
        )
    )
    job = run("sbatch", "--parsable", script).strip()
    n_preempted, deadline = 0, time.monotonic() + DEADLINE
    while (state := state_of(job)) not in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", ""):
        assert time.monotonic() < deadline, (state, (folder / "out").read_text())
        if state == "PENDING" and _reason(job) == "BeginTime":
            # A job that is requeued else waits for two minutes.
            run("scontrol", "update", f"jobid={job}", "StartTime=now")
        if state in ("TIMEOUT", "PREEMPTED"):
            # The grace of a preemption ends as a time limit does; SLURM requeues then only if it is asked.
            run("scontrol", "requeue", job)
        n = _n_records(url)
        if state == "RUNNING" and n and n < N_RECORDS - 30:
            goal = min(n + rng.randint(3, 20), N_RECORDS - 1)
            wait_until(partial(_is_due, url, goal, job), 120, "records", every=0.2)
            time.sleep(rng.random() * 0.2)
            run("sbatch", "--partition=high", "--ntasks=8", "--output=/dev/null", "--wrap=true")
            wait_until(partial(_is_stopped, job), 60, "the preemption", every=0.2)
            n_preempted += 1
        time.sleep(0.5)
    assert state in ("COMPLETED", ""), (state, (folder / "out").read_text())
    assert_holds(url, SCENE, [0] * N_RECORDS)
    runs = (folder / "out").read_text().count(" ranks\n")
    assert runs > 1, "the job was never requeued"
    return f"{N_RECORDS} records, {n_preempted} times preempted, {runs} runs"


# USR1 comes 180 s before the limit or up to a minute earlier: in the first minute, when 85 records are there at most.
# The guard of the example would end the job by itself 120 s before the limit.
_SIGNALLED = ("--ntasks=2", "--time=4", "--signal=B:USR1@180", "--requeue", "--open-mode=append")
_STEP_SECONDS = "0.7"
_N_AT_ONCE = 4  # of the 8 cores that the node says it has


def signalled(folder: Path) -> str:
    """Run some jobs of the example at once, each to its end; return what happened."""
    example = ROOT / "examples" / "slurm"
    jobs = {}
    for k in range(_N_AT_ONCE):
        url = folder / f"{k}.zarr"
        words = ["sbatch", "--parsable", *_SIGNALLED, f"--chdir={example}", f"--output={folder}/{k}.out"]
        jobs[run(*words, example / "job.sh", url, str(N_RECORDS), _STEP_SECONDS).strip()] = url
    left, failed, deadline = dict(jobs), dict.fromkeys(jobs, 0.0), time.monotonic() + 2 * DEADLINE
    hurried: set[str] = set()  # those that are requeued, and will not wait for two minutes
    while left:
        for job, url in list(left.items()):
            # A job that is requeued by its own script may be COMPLETED, FAILED or CANCELLED on the way, for a moment.
            state = state_of(job)
            if state == "RUNNING":
                hurried.discard(job)
            failed[job] = failed[job] + 0.5 if state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") else 0.0
            if failed[job] > 30 or time.monotonic() > deadline:
                raise AssertionError(f"{run('scontrol', 'show', 'job', job)}\n{_said(url)}")
            if not state or (state == "COMPLETED" and f"{N_RECORDS} of {N_RECORDS} records" in _said(url)):
                del left[job]
            elif state == "PENDING" and job not in hurried and _reason(job) == "BeginTime":
                hurried.add(job)
                # Not at once: a job that starts before its last run is cleared away fails with code 1, silently.
                run("scontrol", "update", f"jobid={job}", "StartTime=now+10seconds")
        time.sleep(0.5)
    texts = []
    for url in jobs.values():
        said = [line for line in _said(url).splitlines() if f" of {N_RECORDS} records; " in line]
        assert "signal SIGUSR1" in said[0], said
        assert said[-1].startswith(f"{N_RECORDS} of"), said
        assert_whole(url, N_RECORDS)
        texts.append(f"{len(said)} runs ({', '.join(line.split()[0] for line in said)} records)")
    return "; ".join(texts)


def _reason(job: str) -> str:
    return run("squeue", "-h", "-j", job, "-o", "%r").strip()


def _said(url: Path) -> str:
    return url.with_suffix(".out").read_text()


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    kinds = sys.argv[2:] or ["preempted", "signalled"]
    seed = int(os.environ.get("MPISTREAM_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"MPISTREAM_TEST_SEED={seed}", flush=True)
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="mpistream-slurm-") as name, slurm(Path(name)):
        for k in range(n if "preempted" in kinds else 0):
            folder = Path(name) / str(k)
            folder.mkdir()
            print(f"slurm: loop {k}: {loop(folder, rng)}", flush=True)
        for k in range(-(-n // _N_AT_ONCE) if "signalled" in kinds else 0):
            folder = Path(name) / f"signalled-{k}"
            folder.mkdir()
            print(f"slurm: USR1, {_N_AT_ONCE} loops at once: {signalled(folder)}", flush=True)


if __name__ == "__main__":
    main()

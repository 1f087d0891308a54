"""When this job's time is over, as the batch scheduler knows it.

Asked once, by one rank: thousands of ranks that ask a scheduler are what brings it down. Everything here is
seconds since the epoch. What a scheduler does not say is None, and then only signals tell that a job is about to
be ended.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import time
from collections.abc import Callable, Mapping

__all__ = ["SCHEDULERS", "end_of_job", "scheduler_of"]

_ASK_SECONDS = 30.0  # a scheduler under load may take its time; without an answer the run goes on

# Name -> the variable that says that a process belongs to a job of it.
SCHEDULERS: Mapping[str, str] = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID", "lsf": "LSB_JOBID"}

_TIME_LEFT = re.compile(r"(\d+):(\d\d) [LE]")  # of LSF: hours and minutes to the limit, or as estimated


def scheduler_of(environment: Mapping[str, str]) -> str | None:
    """Return the scheduler in whose job this process runs, None for none.

    Not collective.
    """
    return next((name for name, variable in SCHEDULERS.items() if environment.get(variable)), None)


def end_of_job(scheduler: str, environment: Mapping[str, str]) -> float | None:
    """Return when a job ends, None when the scheduler does not say.

    Not collective.

    Parameters
    ----------
    scheduler
        A key of `SCHEDULERS`.
    environment
        Process environment of the job.
    """
    job = environment.get(SCHEDULERS[scheduler])
    if not job:
        return None
    ends: dict[str, Callable[[str, Mapping[str, str]], float | None]] = {"slurm": _slurm, "pbs": _pbs, "lsf": _lsf}
    return ends[scheduler](job, environment)


def _slurm(job: str, environment: Mapping[str, str]) -> float | None:
    # From version 23 on the job has it in its environment; before, the controller has to be asked.
    if (end := _number(environment.get("SLURM_JOB_END_TIME"))) is not None:
        return end
    found = _local_time(_answer(["squeue", "-h", "-j", job, "-o", "%e"]))
    if found is not None:
        return found
    text = _answer(["scontrol", "show", "job", "-o", job])
    return _local_time(next((w.removeprefix("EndTime=") for w in text.split() if w.startswith("EndTime=")), ""))


def _pbs(job: str, environment: Mapping[str, str]) -> float | None:  # noqa: ARG001 (as the others)
    # The limit is in the environment and the start is not: the file with the job's nodes is made right before it.
    seconds, nodes = _number(environment.get("PBS_WALLTIME")), environment.get("PBS_NODEFILE")
    if seconds is None or not nodes:
        return None
    try:
        return os.stat(nodes).st_mtime + seconds
    except OSError:
        return None


def _lsf(job: str, environment: Mapping[str, str]) -> float | None:  # noqa: ARG001 (as the others)
    found = _TIME_LEFT.fullmatch(_answer(["bjobs", "-noheader", "-o", "time_left", job]))
    return None if found is None else time.time() + 3600 * int(found[1]) + 60 * int(found[2])


def _number(text: str | None) -> float | None:
    return float(text) if text and text.isascii() and text.isdigit() else None


def _local_time(text: str) -> float | None:
    """Return a time without a zone, as squeue prints it; None for ``NONE``, ``N/A`` and the like."""
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except (OverflowError, ValueError):
        return None


def _answer(command: list[str]) -> str:
    """Return what a command prints, an empty string when it fails or is not there."""
    import subprocess  # noqa: PLC0415 (nobody else needs it)

    # What a user has set for reading must not change what is parsed.
    environment = {**os.environ, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

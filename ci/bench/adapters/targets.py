"""Which of the targets a run has reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adapters.cases import MIB

# What a writer with threads=0 may hold beside the encoded bytes of a shard: two inner chunks and small things, and on
# rank 0 what zarr-python took when it made the documents of the store, about 5 MiB.
_SCRATCH_NBYTES = 12 * MIB


# What the simulation waits for -> the row.
_BLOCKED = {"a block": "background, no commit", "a block and a commit": "background"}


@dataclass(frozen=True)
class Verdict:
    """One target: what was found, what it should be, and whether it is."""

    work: str
    text: str
    value: float
    target: float
    is_at_most: bool = False

    @property
    def is_reached(self) -> bool:
        return self.value <= self.target if self.is_at_most else self.value >= self.target

    def __str__(self) -> str:
        word = "reached" if self.is_reached else "MISSED "
        sign = "at most" if self.is_at_most else "at least"
        return f"({self.work}) {word}  {self.value:7.2f}, {sign} {self.target:g}: {self.text}"


def is_durable(row: dict[str, Any]) -> bool:
    return "fsync" in row["how"]


def best(
    rows: list[dict[str, Any]], *peers: str, how: str | None = None, key: str = "seconds", commits: bool | None = None
) -> float | None:
    """Return the shortest time of rows of these peers, without fsync; none given: all but mpistream and the limit."""
    wanted = [
        row[key]
        for row in rows
        if "seconds" in row
        and not is_durable(row)
        and (row["peer"] in peers if peers else row["peer"] not in ("limit", "mpistream"))
        and how in (None, row["how"])
        and commits in (None, "no commit" not in row["how"])
    ]
    return min(wanted, default=None)


def speed_verdicts(work: str, title: str, rows: list[dict[str, Any]]) -> list[Verdict]:
    """Return those of (a), (b), (c): how many times as fast as others."""
    found: list[Verdict] = []

    def compare(other: float | None, target: float, text: str, mine: float | None = None) -> None:
        if mine is not None and other is not None:
            found.append(Verdict(work, f"{title}: {text}", other / mine, target))
            return
        # The others commit nothing, so a run that commits at its end is what they do.
        for commits, when in ((False, ", one commit"), (True, ", a commit each record")):
            ours = best(rows, "mpistream", commits=commits)
            if other is not None and ours is not None:
                found.append(Verdict(work, f"{title}: {text}{when}", other / ours, target))

    if work == "a":
        for how in ("threads=0, no commit", "threads=0"):
            ours = best(rows, "mpistream", how=how)
            if ours is not None:
                compare(best(rows, "limit"), 0.95, f"{how} / limit", ours)
        if title.startswith("none"):
            compare(best(rows, "tensorstore"), 1.0, "mpistream / tensorstore")
        else:
            compare(best(rows), 1.5, "mpistream / best peer")
    else:
        compare(best(rows, "tensorstore"), 1.5 if work == "b" else 1.0, "mpistream / tensorstore")
        compare(best(rows, "zarr-python", how=""), 5.0, "mpistream / zarr-python")
    return found


def memory_verdicts(work: str, title: str, rows: list[dict[str, Any]]) -> list[Verdict]:
    """Return those of the peak memory beyond the user's block, in MiB; a shard has 32 MiB, and so has a record."""
    found = []
    for row in rows:
        if row["peer"] != "mpistream" or "seconds" not in row:
            continue
        if row["how"].startswith("threads=0"):
            allowed, what = row["nbytes"] / 2 + _SCRATCH_NBYTES, "a shard's encoded bytes + scratch"
        else:
            allowed, what = 2 * 32 * MIB + 32 * MIB, "max_pending_nbytes + a shard"
        text = f"{title}: MiB of {row['how']}, {row['layout']}: {what}"
        found.append(Verdict(work, text, row["peak"] / MIB, round(allowed / MIB, 1), is_at_most=True))
    return found


def model_verdicts(title: str, rows: list[dict[str, Any]]) -> list[Verdict]:
    """Return those of (e): what output costs a model, as a multiple of its time without."""
    cost = {row["how"]: row["cost"] for row in rows if row["peer"] == "mpistream" and "cost" in row}
    if not {"threads=0", "background"} <= set(cost):
        return []
    found = [Verdict("e", f"{title}: background / threads=0", cost["background"] / cost["threads=0"], 1.0, True)]
    if "32 MiB in numpy" in title and title.endswith("2 cores"):
        found.append(Verdict("e", f"{title}: background / no output", cost["background"], 1.1, is_at_most=True))
    return found


def verdicts_of(work: str, title: str, rows: list[dict[str, Any]]) -> list[Verdict]:
    """Return the targets that a case decides."""
    if work in "abc":
        is_smooth = "smooth" in title
        found = speed_verdicts(work, title, rows) if is_smooth else []
        return found + (memory_verdicts(work, title, rows) if work == "a" and is_smooth else [])
    if work == "d":
        copy = best(rows, "limit")
        ours = {what: best(rows, "mpistream", how=how) for what, how in _BLOCKED.items()}
        return [Verdict("d", f"{what} / copy of it", t / copy, 1.25, True) for what, t in ours.items() if copy and t]
    if work == "e":
        return model_verdicts(title, rows)
    found = []
    for key, text in (("whole", "whole field"), ("chunk", "one inner chunk a shard")):
        theirs, ours = best(rows, "tensorstore", key=key), best(rows, "mpistream", key=key)
        if theirs and ours:
            found.append(Verdict("f", f"mpistream / tensorstore, {text}", theirs / ours, 1.0))
    return found

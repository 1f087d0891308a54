"""Tokens that are late, double, missing, or of overlapping parts: every choice of a few, against the one right one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mpistream as ms
from mpistream.token import CommitToken
from tests.support.sim_disk import ProcessStore, SimDisk
from tests.support.sim_job import OPTIONS, STATIC, State, ViolationError, make_schema, series, state_of, time_of, value
from tests.support.sim_job import blob as blob_of
from tests.support.sim_ranks import System

__all__ = ["commit_every_choice"]

_N = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What two parts have put in place, and the tokens that are about."""

    tree: tuple[Mapping[str, bytes], Sequence[str]]
    before: tuple[CommitToken, ...]
    """Of what is committed."""
    now: tuple[CommitToken, ...]
    """Of what is to be committed."""
    wrong: tuple[CommitToken, ...]


def _opened(disk: SimDisk) -> list[ms.PartWriter]:
    stores: list[Any] = [ProcessStore(i) for i in range(_N)]
    return [ms.write_open_part(stores[i], make_schema(), writer=i, n_writers=_N, options=OPTIONS) for i in range(_N)]


def _write(w: ms.PartWriter, i: int, record: int) -> None:
    w.write_record(time_of(record), {"u": value(record, 0)[slice(*w.region["y"])], "n": series(record, 0)})
    if i == _N - 1:
        w.write_blob("b", blob_of(i, record, 0), record)


def _parts(system: System) -> _Parts:
    """Write two records in two parts; the first is committed, of the second there are tokens."""
    other = SimDisk()
    system.restart(other, 1)
    strangers = _opened(other)
    for i, w in enumerate(strangers):
        _write(w, i, 0)
    strange = [w.flush() for w in strangers]
    disk = SimDisk()
    system.restart(disk, 2)
    parts = _opened(disk)
    for i, w in enumerate(parts):
        w.write_static("s", STATIC[slice(*w.region["y"])])
        _write(w, i, 0)
    before = tuple(w.flush() for w in parts)
    store: Any = ProcessStore(5)
    ms.commit_tokens(store, before, options=OPTIONS)
    for i, w in enumerate(parts):
        _write(w, i, 1)
    now = tuple(w.flush() for w in parts)
    wrong = (
        strange[1],
        replace(now[1], region=now[0].region),
        replace(now[1], region=now[0].region, n_cells=dict(now[0].n_cells)),
        replace(now[1], n_cells={**now[1].n_cells, "u": now[1].n_cells["u"] - 1}),
        replace(now[1], times=(time_of(7),), times_sha256=before[0].times_sha256),
        replace(now[1], base_seq=now[1].base_seq + 1),
        replace(now[1], epoch=now[1].epoch + 1),
        replace(now[1], run_id=strange[1].run_id),
        replace(now[1], writer=_N),
        replace(now[0], records=((1, 3),)),
    )
    return _Parts(tree=disk.tree(), before=before, now=now, wrong=wrong)


def commit_every_choice(system: System, n_max: int = 3) -> Counter[str]:
    """Commit every multiset of at most so many tokens on a store of its own; only the right one commits anything."""
    parts = _parts(system)
    counts: Counter[str] = Counter()
    pool = (*parts.before, *parts.now, *parts.wrong)
    for n in range(n_max + 1):
        for chosen in itertools.combinations_with_replacement(range(len(pool)), n):
            disk = SimDisk(*parts.tree)
            system.restart(disk, 3)
            store: Any = ProcessStore(6)
            tokens = [pool[i] for i in chosen]
            is_right, is_again = tokens == list(parts.now), tokens == list(parts.before)
            error: Exception | None = None
            try:
                ms.commit_tokens(store, tokens, options=OPTIONS)
            except Exception as found:  # noqa: BLE001 - another error than ours is a violation, too
                error = found
            if error is not None and not isinstance(error, ms.MPIStreamError):
                raise ViolationError(f"tokens {chosen} of {len(pool)}: {error!r}") from error
            state: State = state_of(system, disk)
            if state != ((0, 0) if is_right else (0,)) or (error is None) != (is_right or is_again):
                raise ViolationError(f"tokens {chosen} of {len(pool)}: {state}, {error!r}")
            counts["choices"] += 1
            counts["commits"] += is_right
    return counts

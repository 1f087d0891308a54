"""What jobs do in a simulation: how they commit, what ranks hold, and whether time grows.

* `Growing`: records one by one at the end, each committed with a wait, as in `tests.support.sim_job`; ranks may hold
  what does not lie on the edges of shards.
* `Pipelined`: the same with commits that do not wait. What is staged by then is up to the pace of each rank's
  background (`tests.support.sim_pool`).
* `Indexed`: fixed times in any order, some of them invalidated and written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import google_crc32c
import numpy as np
from numcodecs import Blosc

import mpistream as ms
from tests.support.sim_disk import ROOT, ProcessStore, SimDisk
from tests.support.sim_job import (
    ALIGNED,
    NY,
    OPTIONS,
    ROW,
    Layout,
    Main,
    State,
    ViolationError,
    check_no_stage,
    check_tidy,
    create_main,
    decoded,
    make_schema,
    resume_main,
    shown_lengths,
    time_of,
    write,
    write_static,
)
from tests.support.sim_pool import own_pool
from tests.support.sim_ranks import SimTransport

__all__ = ["N_TIMES", "Growing", "Indexed", "Kind", "Pace", "Pipelined", "Script"]


class Kind(Protocol):
    """What a driver must know of its jobs."""

    def again(self, state: State) -> tuple[Main, Sequence[State]]:
        """Return a job for what a crash has left, whose ranks return how many records they find, and its states."""

    def check_shown(self, files: Mapping[str, bytes], state: State, states: Sequence[State]) -> None:
        """Check what plain readers see after a crash: what is committed, and what may have been so far."""

    def check_tidy(self, disk: SimDisk, state: Sequence[int | None]) -> None:
        """Check that a closed store has nothing left over."""


class Growing:
    """Records that are committed one by one.

    Parameters
    ----------
    layout
        What the ranks hold.
    """

    def __init__(self, layout: Layout = ALIGNED) -> None:
        self.layout = layout

    def again(self, state: State) -> tuple[Main, Sequence[State]]:
        if state is None:
            return create_main(1, self.layout), [None, (), (0,)]
        run = _next_run(state)
        return resume_main(1, run, layout=self.layout), [state, state, (*state, run)]

    def check_shown(self, files: Mapping[str, bytes], state: State, states: Sequence[State]) -> None:
        # A resume that drops records says so first, and shortens what is shown then.
        n_max = max(len(state or ()), len(states[0] or ()))
        shown = shown_lengths(files)
        if any(n > n_max for n in shown):
            raise ViolationError(f"documents show {shown} records, {n_max} are committed")

    def check_tidy(self, disk: SimDisk, state: Sequence[int | None]) -> None:
        check_tidy(disk, state, self.layout.n_shards)


def _next_run(state: State) -> int:
    return 1 + max((run for run in state or () if run is not None), default=0)


# Commits that do not wait

# With room for all, so that nobody waits for the background but who is meant to.
_LAZY = replace(OPTIONS, threads=1, max_pending_nbytes=1 << 20)

Pace = Sequence[Sequence[int]]
"""Of each rank, by turns, how many jobs its background does before each commit, from the back if it is below 0."""


class _Outcomes:
    """What each commit of a job must commit, from what the background of each rank has done by then."""

    def __init__(self, states: list[State], n_ranks: int, run: int, n_found: int) -> None:
        del states[2:]
        if len(states[1] or ()) != n_found:
            # Another job has come between; of which run those are is not for this one to say.
            states[1] = (None,) * n_found
        self.states = states
        self._n_ranks = n_ranks
        self._run = run
        self._late: list[dict[int, set[str]]] = []
        self._numbers: list[int] = []
        self._number_of_close: int | None = None
        self._has_static = False

    def note(self, commit: int, rank: int, late: Iterable[str]) -> None:
        """Note the keys that a rank has not staged when it comes to a commit."""
        while len(self._late) <= commit:
            self._late.append({})
        self._late[commit][rank] = set(late)

    def of(self, commit: int, n_written: int, *, has_static: bool) -> int:
        """Return the number of the state after a commit; every rank has come to it."""
        while len(self._numbers) <= commit:
            self._numbers.append(self._decided(len(self._numbers), n_written, has_static))
        return self._numbers[commit]

    def _decided(self, commit: int, n_written: int, has_static: bool) -> int:
        late = set().union(*self._late[commit].values())
        assert len(self._late[commit]) == self._n_ranks
        last = self.states[-1]
        assert last is not None
        n, is_new = len(last), False
        while (n // ROW + 1) * ROW <= n_written and not any(key.startswith(f"u/c/{n // ROW}/") for key in late):
            n = (n // ROW + 1) * ROW
        if not self._has_static and not has_static and not any(key.startswith("s/c/") for key in late):
            self._has_static = is_new = True
        return self._committed(n, is_new=is_new)

    def _committed(self, n: int, *, is_new: bool) -> int:
        last = self.states[-1] or ()
        if n > len(last) or is_new:
            self.states.append((*last, *[self._run] * (n - len(last))))
        return len(self.states) - 1

    def of_close(self, n_written: int, *, has_static: bool) -> int:
        """Return the number of the state after the close, which takes all; every rank has come to the last commit."""
        if self._number_of_close is None:
            self._number_of_close = self._committed(n_written, is_new=not (self._has_static or has_static))
        return self._number_of_close


class Pipelined(Growing):
    """Records of which each commit takes those that are staged on every rank; close takes the rest.

    Parameters
    ----------
    pace
        How fast the background is.
    layout
        What the ranks hold.
    """

    def __init__(self, pace: Pace, layout: Layout = ALIGNED) -> None:
        super().__init__(layout)
        self._pace = pace

    def create(self, n_records: int) -> tuple[Main, list[State]]:
        """Return a job that makes a store, and its states, which are there once it has run."""
        states: list[State] = [None, ()]
        return self._main(n_records, 0, states, is_new=True), states

    def resume(self, state: State, n_more: int, run: int) -> tuple[Main, list[State]]:
        """Return a job that resumes a store, and its states, which are there once it has run."""
        states = [state, state]
        return self._main(n_more, run, states, is_new=False), states

    def again(self, state: State) -> tuple[Main, Sequence[State]]:
        return self.create(ROW) if state is None else self.resume(state, ROW, _next_run(state))

    def _main(self, n_records: int, run: int, states: list[State], *, is_new: bool) -> Main:
        # Of the run that goes on, with its world: a driver may run the same job again, in another one.
        running: list[tuple[object, _Outcomes]] = []

        def main(comm: SimTransport, disk: SimDisk) -> int:
            pool = own_pool()
            store: Any = ProcessStore(comm.who)
            more = {"comm": comm, "region": self.layout.region(comm.rank, comm.size), "takeover": True}
            if is_new:
                w = ms.write_open(store, self.layout.schema, options=_LAZY, **more)
            else:
                w = ms.write_resume(store, options=_LAZY, **more)
            disk.ack(comm.who, 1)
            first, has_static = w.n_records, w.is_committed("s")
            if not running or running[0][0] is not comm.world:
                running[:] = [(comm.world, _Outcomes(states, comm.size, run, first))]
            outcome = running[0][1]
            write_static(w)
            pace = self._pace[comm.rank % len(self._pace)]
            n_told = first
            for i in range(n_records):
                write(w, comm.rank, first + i, run)
                pool.work(pace[i % len(pace)])
                outcome.note(i, comm.rank, pool.late())
                receipt = w.commit(wait=False)
                number = outcome.of(i, first + i + 1, has_static=has_static)
                expected = states[number]
                assert expected is not None
                if receipt.n_records != len(expected):
                    raise ViolationError(f"commit {i} has {receipt.n_records} records, of which {expected} are staged")
                disk.ack(comm.who, number)
                disk.told |= {(r, run) for r in range(n_told, len(expected))}
                n_told = len(expected)
            number = outcome.of_close(first + n_records, has_static=has_static)
            w.close()
            disk.ack(comm.who, number)
            disk.told |= {(r, run) for r in range(n_told, first + n_records)}
            return first

        return main


# Fixed times

N_TIMES = 5
_TIMES = [time_of(i) for i in range(N_TIMES)]
_N_SHARDS = 2
_FIXED = Layout(n_shards=_N_SHARDS, schema=make_schema(_N_SHARDS, _TIMES))

Step = tuple[str, tuple[int, ...]]
"""``write`` or ``invalidate`` with records, ``commit`` or ``take`` (a commit that does not wait)."""
Script = Sequence[Step]


class Indexed:
    """Records of fixed times, in the order of a script. What is written after an invalidation is of the next run."""

    def create(self, script: Script) -> tuple[Main, list[State]]:
        """Return a job that makes a store, and its states."""
        return self._main(script, 0, is_new=True), [None, *self.states((None,) * N_TIMES, script, 0)]

    def resume(
        self,
        state: State,
        script: Script,
        run: int,
        n_kept: int = N_TIMES,
        *,
        is_alone: bool = True,
        has_static: bool | None = None,
    ) -> tuple[Main, list[State]]:
        """Return a job that resumes a store, and its states.

        Records from number ``n_kept`` on are dropped. By default the static is committed if any record is.
        """
        assert state is not None
        kept = (*state[:n_kept], *[None] * (N_TIMES - n_kept))
        main = self._main(script, run, is_new=False, n_kept=n_kept, is_alone=is_alone)
        if has_static is None:
            has_static = any(r is not None for r in state)
        return main, [state, *self.states(kept, script, run, has_static=has_static)]

    def again(self, state: State) -> tuple[Main, Sequence[State]]:
        """Fill a gap, and write one again that is committed."""
        if state is None:
            return self.create([("write", (3,)), ("commit", ())])
        there = [i for i, run in enumerate(state) if run is not None]
        missing = [i for i, run in enumerate(state) if run is None]
        script: list[Step] = []
        if there:
            script += [("invalidate", (there[-1],)), ("write", (there[-1],))]
        script += [("write", tuple(missing[:1])), ("commit", ())]
        return self.resume(state, script, _next_run(state))

    @staticmethod
    def states(state: State, script: Script, run: int, *, has_static: bool = False) -> list[State]:
        """Return what is committed first and after each manifest of a script."""
        assert state is not None
        now, pending = list(state), dict[int, int]()
        found: list[State] = [state]
        for what, records in script:
            if what == "write":
                pending |= dict.fromkeys(records, run)
                continue
            if what == "invalidate":
                run += 1
                for r in records:
                    now[r] = None
                is_new = bool(records)
            else:
                there = pending.keys() | {r for r in range(N_TIMES) if now[r] is not None}
                taken = {r for r in pending if what == "commit" or there >= set(_row_of(r))}
                is_new = bool(taken) or not has_static
                has_static = True
                for r in taken:
                    now[r] = pending.pop(r)
            if is_new:
                found.append(tuple(now))
        if pending or not has_static:  # close commits what is left
            found.append(tuple(pending.get(r, now[r]) for r in range(N_TIMES)))
        return found

    def _main(self, script: Script, run: int, *, is_new: bool, n_kept: int = N_TIMES, is_alone: bool = True) -> Main:
        at = None if n_kept == N_TIMES else time_of(n_kept - 1) if n_kept else -1.0

        def main(comm: SimTransport, disk: SimDisk) -> int:
            store: Any = ProcessStore(comm.who)
            if is_new:
                w = ms.write_open(store, _FIXED.schema, comm=comm, takeover=True, options=OPTIONS)
            else:
                w = ms.write_resume(store, comm=comm, at=at, takeover=True, options=OPTIONS)
            disk.ack(comm.who, 1)
            found = w.n_committed
            first = w._stream.receipt.commit_seq
            if comm.rank == 0 and not is_new and is_alone:
                self.check_in_step(disk, [any(a <= i < b for a, b in w.reader.committed) for i in range(N_TIMES)])
            write_static(w)
            version = run
            for what, records in script:
                if what == "write":
                    for record in records:
                        write(w, comm.rank, record, version)
                    continue
                version += what == "invalidate"
                receipt = w.invalidate(records) if what == "invalidate" else w.commit(wait=what == "commit")
                disk.ack(comm.who, 1 + receipt.commit_seq - first)
            w.close()
            disk.ack(comm.who, 1 + w._stream.receipt.commit_seq - first)
            return found

        return main

    # What plain readers see

    def check_shown(self, files: Mapping[str, bytes], state: State, states: Sequence[State]) -> None:
        """Check that what the array ``committed`` names is a whole record that is, or was, committed."""
        if (shown := shown_lengths(files)) - {N_TIMES}:
            raise ViolationError(f"documents show {shown} records of {N_TIMES}")
        for i, is_named in enumerate(_named(files)):
            if is_named:
                run = _plain_run(files, i)
                if run not in {s[i] for s in states if s is not None}:
                    raise ViolationError(f"plain readers see record {i} of run {run}, which was never committed")

    def check_in_step(self, disk: SimDisk, committed: Sequence[bool]) -> None:
        """Check that the array ``committed`` is what the manifest says."""
        files, _ = disk.tree()
        if _named(files) != list(committed):
            raise ViolationError(f"the array 'committed' is {_named(files)}, the manifest says {list(committed)}")

    def check_tidy(self, disk: SimDisk, state: Sequence[int | None]) -> None:
        """Check that the array ``committed`` is in step, and that there is nothing but what was committed."""
        self.check_in_step(disk, [run is not None for run in state])
        files, _ = disk.tree()
        rows = {int(p.split("/")[3]) for p in files if p.startswith(f"{ROOT}/u/c/")}
        if not {i // ROW for i, run in enumerate(state) if run is not None} <= rows:
            raise ViolationError(f"rows {rows} are there, committed are {state}")
        check_no_stage(disk)


def _row_of(record: int) -> range:
    start = record - record % ROW
    return range(start, min(start + ROW, N_TIMES))


def _named(files: Mapping[str, bytes]) -> list[bool]:
    """Return the array ``committed``, decoded as its Zarr document says: crc32c, then Blosc, then a byte a record."""
    data = files.get(f"{ROOT}/committed/c/0")
    if data is None:
        return [False] * N_TIMES
    flags = Blosc().decode(_checked(data, "the array 'committed'"))
    return np.frombuffer(flags, bool).tolist()


def _checked(data: bytes, what: str) -> bytes:
    body, crc = data[:-4], int.from_bytes(data[-4:], "little")
    if not body or google_crc32c.value(body) != crc:
        raise ViolationError(f"{what} is damaged: {data!r}")
    return body


def _plain_run(files: Mapping[str, bytes], record: int) -> int:
    """Return the run of a record as the Zarr document alone describes it, with no manifest: chunk by chunk."""
    found = np.zeros(NY, np.int32)
    row, in_row = divmod(record, ROW)
    width = NY // _N_SHARDS
    for y in range(NY):
        shard, in_shard = divmod(y, width)
        data = files.get(f"{ROOT}/u/c/{row}/{shard}")
        if data is None:
            raise ViolationError(f"plain readers see record {record}, of which shard {shard} is not there")
        # An index of (offset, length) for each inner chunk, at the end, with a checksum.
        index = _checked(data[-(16 * ROW * width + 4) :], f"index of shard {shard}")
        offset, n = map(int, np.frombuffer(index, "<u8").reshape(ROW, width, 2)[in_row, in_shard])
        if offset == 2**64 - 1:
            raise ViolationError(f"plain readers see record {record}, which shard {shard} does not have")
        found[y] = np.frombuffer(_checked(data[offset : offset + n], f"record {record}"), "<i4")[0]
    return decoded(found, record)

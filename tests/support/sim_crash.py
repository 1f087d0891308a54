"""Every state in which a loss of power can leave the disk of a run, from the events of that run.

Which *cuts* there are: processes agree by messages, and what they do between two messages concerns names of their own,
so the states that are possible, whoever is fast or slow, are those of the consistent cuts of one run: a number of
events of each process, with every event also all that it knows of. That is one run for all orders.

What *survives* a cut: a change of a name is durable once its folder was synced by somebody who knew of it, data once
its file was. Of what is not durable any part may be there. Of that are taken: nothing; all, as when processes die;
each change alone, with the folders above it; all but each; each beginning of the list, as a journal has it; all of one
process only; and every subset where there are no more than `ALL_SUBSETS` changes. Data that is not durable is whole,
empty or half there. A rename is never half lost: a file may be there under both names, as long as
the folder of the old one was not synced, never under none.

Left out, since nothing rests on it: what lies in stage folders (removed unread), and the lease.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from tests.support.sim_disk import ROOT, Event, SimDisk

__all__ = ["ALL_SUBSETS", "Crash", "Tree", "crashes", "crashes_after", "cuts"]

ALL_SUBSETS = 4

Cut = tuple[int, ...]
_STAGE = f"{ROOT}/.mpistream/stage/"
_LEASE = f"{ROOT}/.mpistream/lease"


Tree = tuple[dict[str, bytes], list[str]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Crash:
    """What is there after a loss of power; it is put together when somebody looks at it."""

    build: Callable[[], Tree]
    told: int
    """The highest state that any process was told to be committed."""
    n_manifests: int
    """How many renames of the manifest were begun."""
    cut: Cut
    text: str

    @cached_property
    def tree(self) -> Tree:
        """All files and all folders by path."""
        return self.build()

    @property
    def files(self) -> dict[str, bytes]:
        return self.tree[0]

    @property
    def folders(self) -> list[str]:
        return self.tree[1]

    @cached_property
    def seen(self) -> SimDisk:
        """A disk that holds this, to be looked at and not changed."""
        return self.disk()

    def disk(self) -> SimDisk:
        """Return a disk that holds this."""
        return SimDisk(*self.tree)


def cuts(log: Sequence[Event]) -> Iterator[Cut]:
    """Yield all consistent cuts that differ in what is seen outside the stage folders."""
    who = sorted({e.who for e in log})
    index = {w: i for i, w in enumerate(who)}
    events: list[list[Event]] = [[e for e in log if e.who == w] for w in who]
    needs = [[[(index[w], n) for w, n in e.clock.items() if w != e.who and w in index] for e in of] for of in events]

    def is_enabled(cut: list[int], i: int) -> bool:
        return cut[i] < len(events[i]) and all(cut[j] >= n for j, n in needs[i][cut[i]])

    def closed(cut: list[int]) -> Cut:
        # What is not visible makes no other state; it is as if it was done at once.
        moved = True
        while moved:
            moved = False
            for i in range(len(who)):
                while is_enabled(cut, i) and not events[i][cut[i]].is_visible:
                    cut[i] += 1
                    moved = True
        return tuple(cut)

    todo = [closed([0] * len(who))]
    seen = set(todo)
    while todo:
        cut = todo.pop()
        yield cut
        for i in range(len(who)):
            if is_enabled(list(cut), i):
                more = list(cut)
                more[i] += 1
                if (found := closed(more)) not in seen:
                    seen.add(found)
                    todo.append(found)


class _Log:
    """A log over what lay there before, ready to be cut."""

    def __init__(self, before: SimDisk, log: Sequence[Event]) -> None:
        self.log = log
        self.who = sorted({e.who for e in log})
        self.number: list[int] = []
        counts: dict[int, int] = {}
        self.base: dict[int, dict[str, int]] = {}
        self.base_data: dict[int, bytes] = {}
        todo = [before.root]
        while todo:
            node = todo.pop()
            if node.names is None:
                self.base_data[node.number] = node.data
                continue
            self.base[node.number] = {name: child.number for name, child in node.names.items()}
            todo += node.names.values()
        self.root = before.root.number
        index = {w: i for i, w in enumerate(self.who)}
        # Of each file or folder its syncs: (index of the process, number of the event, event).
        self.syncs: dict[int, list[tuple[int, int, Event]]] = {}
        for e in log:
            counts[e.who] = counts.get(e.who, 0) + 1
            self.number.append(counts[e.who])
            if e.kind.startswith("sync"):
                self.syncs.setdefault(e.node, []).append((index[e.who], counts[e.who], e))
        self.index = index
        self._covers: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def _is_synced(self, k: int, node: int, cut: Cut) -> bool:
        """Whether a file or folder was synced before a cut by somebody who knew of event ``k``."""
        if node not in self.syncs:
            return False
        covers = self._covers.get((k, node))
        if covers is None:
            who, n = self.log[k].who, self.number[k]
            covers = self._covers[k, node] = [
                (i, number) for i, number, sync in self.syncs[node] if sync.clock.get(who, 0) >= n
            ]
        return any(cut[i] >= n for i, n in covers)

    def crashes(self, cut: Cut, known: tuple[int, int], seen: set[tuple[object, ...]]) -> Iterator[Crash]:
        """Yield what can be there after a cut, but for what was seen with the same of ``known``."""
        told, n_manifests = known
        inside = [k for k, e in enumerate(self.log) if self.number[k] <= cut[self.index[e.who]]]
        fixed: list[int] = []
        loose: list[int] = []
        writes: dict[int, tuple[bytes, bytes]] = {}
        for k in inside:
            e = self.log[k]
            if e.kind == "write":
                durable, _ = writes.get(e.node, (b"", b""))
                writes[e.node] = (e.data if self._is_synced(k, e.node, cut) else durable, e.data)
            elif e.kind in ("link", "unlink", "rename"):
                is_durable = not e.is_visible or self._is_synced(k, e.target if e.kind == "rename" else e.folder, cut)
                is_durable = is_durable or (e.kind == "rename" and self._is_synced(k, e.folder, cut))
                (fixed if is_durable else loose).append(k)
        # Under its old name, too, unless the folder of that was synced.
        double = frozenset(
            k
            for k in inside
            if (e := self.log[k]).kind == "rename"
            and e.is_visible
            and not e.is_folder
            and not self._is_synced(k, e.folder, cut)
        )
        outside = self._outside(inside)
        is_loose_data = any(a != b for n, (a, b) in writes.items() if n in outside)
        for chosen, is_double, text in self._choices(loose):
            applied = sorted([*fixed, *chosen])
            doubled = double.intersection(applied) if is_double else frozenset[int]()
            loose_data = frozenset(n for n, (a, b) in writes.items() if a != b) if is_loose_data else None
            for data in ("whole", "empty", "half") if is_loose_data else ("whole",):
                key = (*known, tuple(applied), doubled, data, loose_data)
                if key not in seen:
                    seen.add(key)
                    build = partial(self._build, applied, writes, data, doubled)
                    text_of = f"{text}, data {data}"
                    yield Crash(build=build, told=told, n_manifests=n_manifests, cut=cut, text=text_of)

    def _outside(self, inside: Sequence[int]) -> set[int]:
        """Return the files that had a name outside the stage folders."""
        return {self.log[k].node for k in inside if self.log[k].is_visible and self.log[k].kind in ("link", "rename")}

    def _choices(self, loose: Sequence[int]) -> Iterator[tuple[tuple[int, ...], bool, str]]:
        found: dict[tuple[int, ...], str] = {(): "nothing", tuple(loose): "everything"}
        if len(loose) <= ALL_SUBSETS:
            for n in range(1, len(loose)):
                for chosen in itertools.combinations(loose, n):
                    found.setdefault(chosen, f"only {self._named(chosen)}")
        else:
            for k in loose:
                found.setdefault(self._with_folders(k, loose), f"only {self._named([k])}")
                found.setdefault(tuple(j for j in loose if j != k), f"all but {self._named([k])}")
            for n in range(1, len(loose)):
                found.setdefault(tuple(loose[:n]), f"the first {n}")
            for who in self.who:
                found.setdefault(tuple(k for k in loose if self.log[k].who == who), f"those of process {who}")
        for chosen, text in found.items():
            yield chosen, False, text
        if any(self.log[k].kind == "rename" for k in loose):
            yield tuple(loose), True, "everything, renamed files twice"

    def _with_folders(self, k: int, loose: Sequence[int]) -> tuple[int, ...]:
        found, todo = {k}, [k]
        while todo:
            e = self.log[todo.pop()]
            above = e.target if e.kind == "rename" else e.folder
            for j in loose:
                if self.log[j].is_folder and self.log[j].node == above and j not in found:
                    found.add(j)
                    todo.append(j)
        return tuple(sorted(found))

    def _named(self, chosen: Sequence[int]) -> str:
        return " ".join(f"{self.log[k].kind} {self.log[k].name} {self.log[k].target_name}".strip() for k in chosen)

    def _build(
        self, applied: Sequence[int], writes: Mapping[int, tuple[bytes, bytes]], data: str, double: frozenset[int]
    ) -> tuple[dict[str, bytes], list[str]]:
        names = {number: dict(of) for number, of in self.base.items()}
        folders = set(self.base)
        for k in applied:
            e = self.log[k]
            if e.is_folder:
                folders.add(e.node)
            if e.kind == "link":
                names.setdefault(e.folder, {})[e.name] = e.node
            elif names.get(e.folder, {}).get(e.name) == e.node and k not in double:
                del names[e.folder][e.name]
            if e.kind == "rename":
                names.setdefault(e.target, {})[e.target_name] = e.node
        files: dict[str, bytes] = {}
        found: list[str] = []
        todo = [("", self.root)]
        while todo:
            above, folder = todo.pop()
            for name, node in names.get(folder, {}).items():
                path = f"{above}{name}"
                if path == _LEASE:
                    continue
                if node in folders:
                    found.append(path)
                    # What is staged is removed unread; that there is a folder is all that counts.
                    if not path.startswith(_STAGE):
                        todo.append((f"{path}/", node))
                elif node in writes:
                    durable, last = writes[node]
                    loose = {"whole": last, "empty": durable, "half": last[: len(last) // 2]}[data]
                    files[path] = durable if durable == last else loose
                else:
                    files[path] = self.base_data.get(node, b"")
        return files, sorted(found)


def crashes(before: SimDisk, log: Sequence[Event]) -> Iterator[Crash]:
    """Yield every crash of a run; some are equal.

    Parameters
    ----------
    before
        What lay there when the run began, as an own disk: the nodes are those of the run.
    log
        The events of the run.
    """
    ready = _Log(before, log)
    index = ready.index
    seen: set[tuple[object, ...]] = set()
    for cut in cuts(log):
        inside = [e for e, n in zip(log, ready.number, strict=True) if n <= cut[index[e.who]]]
        told = max((e.value for e in inside if e.kind == "ack"), default=0)
        n_manifests = sum(e.is_manifest for e in inside)
        yield from ready.crashes(cut, (told, n_manifests), seen)


def crashes_after(before: SimDisk, log: Sequence[Event], n: int) -> Iterator[Crash]:
    """Yield every crash after the first so many events, in the order in which they came.

    Parameters
    ----------
    before, log
        As in `crashes`.
    n
        How many events.
    """
    ready = _Log(before, log)
    inside = log[:n]
    cut = tuple(sum(e.who == who for e in inside) for who in ready.who)
    told = max((e.value for e in inside if e.kind == "ack"), default=0)
    n_manifests = sum(e.is_manifest for e in inside)
    yield from ready.crashes(cut, (told, n_manifests), set())

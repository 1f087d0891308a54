"""Stores that mean harm: one small store, what can be done to it by hand and by chance, and what may come of it.

``python -m tests.support.hostile FOLDER`` does all cases by hand in a process of its own, and prints one JSON object:
what each came to, how long it took, and the process's peak of memory.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

import mpistream as ms
from mpistream.memory_store import MemoryStore
from mpistream.zarr3.metadata import Documents, make_documents
from tests.support.json_damage import paths, replaced
from tests.support.plain import QUICK
from tests.support.verified import assert_sound

__all__ = ["CASES", "run_mutations"]

MANIFEST = ".mpistream/manifest.json"
N = 5
NEVER = ms.Options(durability="none", threads=0, lease_ttl=100_000)

# What a store that anybody may have made can come to. Whatever else is raised is a fault of ours.
ALLOWED = (ms.FormatError, ms.StoreError, ms.ResumeError, ms.SchemaError)


def write(store: Any) -> None:
    """Write a store with one of everything: two rows, the second filled in part, and records set aside."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4, "x": 4},
        time=ms.AppendTime(units="s"),
        variables={"u": ms.Variable(("time", "y", "x"), "float32"), "n": ms.Variable(("time",), "int64")},
        statics={"topo": ms.Variable(("y", "x"), "int16")},
        coords={"x": ms.Coordinate(("x",), np.arange(4.0)), "name": ms.Coordinate(("y",), list("abcd"), dtype=str)},
        shard_shape={"time": 4, "y": 2, "x": 4},
        chunk_shape={"time": 2, "y": 2, "x": 2},
    )
    with ms.write_open(store, schema, options=QUICK) as w:
        w.write_static("topo", 7)
        for i in range(N + 1):
            w.write_record(0.5 * i, {"u": np.arange(16.0).reshape(4, 4) + i + 1, "n": i})
            w.write_blob("rng", b"state", i)
        w.commit()
    ms.truncate(store, 0.5 * (N - 1), options=QUICK)


def read_all(store: Any) -> None:
    """Read what a reader may be asked for; after an error the rest as well."""
    reader = ms.open_reader(store)
    calls: list[Callable[[], Any]] = [lambda: reader.times, reader.blobs, lambda: reader.read_blob("rng", 0)]
    calls += [lambda name=name: reader.read_static(name) for name in ("topo", "x", "name")]  # type: ignore[misc]
    for i in (0, 3, reader.n_records - 1):
        calls += [lambda i=i: reader.read_record("u", i), lambda i=i: reader.read_record("n", i)]  # type: ignore[misc]
    failure: ms.MPIStreamError | None = None
    for call in calls:
        try:
            call()
        except ALLOWED as error:
            failure = failure or error
    if failure is not None:
        raise failure


def attempts(store: Any, *, resumes: bool = True) -> dict[str, str]:
    """Return what a reader, the checker and a resume come to; an error that is not allowed goes on."""
    found = {}
    calls: dict[str, Callable[[], Any]] = {"reader": lambda: read_all(store), "verify": lambda: verified(store)}
    if resumes:
        calls["resume"] = lambda: ms.write_resume(store, takeover=True, options=NEVER).close()
    for name, call in calls.items():
        try:
            found[name] = call() or "ok"
        except ALLOWED as error:
            found[name] = f"{type(error).__name__}: {error.kind}"
    return found


def verified(store: Any) -> str:
    report = ms.verify(store)
    return ", ".join(sorted({f.kind for f in report.damage})) or "ok"


# ---- by hand --------------------------------------------------------------------------------------------


def resealed(document: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest whose checksum, and fingerprint if it can have one, are right."""
    document = copy.deepcopy(document)
    document.pop("checksum", None)
    with contextlib.suppress(KeyError, TypeError, ValueError):  # it may be no schema any more
        document["fingerprint"] = ms.schema_fingerprint(json.dumps(document["schema"]))
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(
        {**document, "checksum": hashlib.sha256(data).hexdigest()}, sort_keys=True, separators=(",", ":")
    ).encode()


Case = Callable[[Path], object]


def manifest(change: Callable[[dict[str, Any]], object]) -> Case:
    """Change the manifest, and make its checksum right."""

    def apply(path: Path) -> None:
        document = json.loads((path / MANIFEST).read_bytes())
        change(document)
        (path / MANIFEST).write_bytes(resealed(document))

    return apply


def named(name: Any) -> Case:
    """Give the first variable another name."""

    def change(d: dict[str, Any]) -> None:
        d["schema"]["arrays"][0]["name"] = name

    return manifest(change)


def array(number: int, **values: Any) -> Case:
    return manifest(lambda d: d["schema"]["arrays"][number].update(values))


def put(key: str, data: bytes) -> Case:
    return lambda path: (path / key).write_bytes(data)


def instead(key: str, make: Callable[[Path], object]) -> Case:
    """Put something else in the place of an object or a folder."""

    def apply(path: Path) -> None:
        target = path / key
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        make(target)

    return apply


def link(to: str) -> Callable[[Path], object]:
    """Make a link to what lies beside the store."""
    return lambda path: path.symlink_to(OUTSIDE / to)


def sparse(key: str, nbytes: int) -> Case:
    return lambda path: os.truncate(path / key, nbytes)


def device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # zero


def socket_at(path: Path) -> None:
    import socket

    # A path of a socket is short.
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path.name)
    finally:
        os.chdir("/")


SHARD, SHARD_CHUNKS = "u/c/0/0/0", 2 * 1 * 2


def with_crc(data: bytes) -> bytes:
    return data + google_crc32c.value(data).to_bytes(4, "little")


def with_index(data: bytes, change: Callable[[Any], object], n: int = SHARD_CHUNKS) -> bytes:
    """Return a shard with another index, and the right checksum of it."""
    index = np.frombuffer(data[-16 * n - 4 : -4], "<u8").copy()
    change(index)
    return data[: -16 * n - 4] + with_crc(index.tobytes())


def entries(*values: tuple[int, int]) -> Case:
    """Set numbers of the index."""

    def change(index: Any) -> None:
        for place, value in values:
            index[place] = value

    return lambda path: (path / SHARD).write_bytes(with_index((path / SHARD).read_bytes(), change))


def chunk(change: Callable[[bytes], bytes], key: str = SHARD) -> Case:
    """Put another inner chunk in front of the index, whose own checksum and entry are right."""

    def apply(path: Path) -> None:
        data = (path / key).read_bytes()
        index = np.frombuffer(data[-16 * SHARD_CHUNKS - 4 : -4], "<u8").copy()
        offset, nbytes = int(index[0]), int(index[1])
        body = with_crc(change(data[offset : offset + nbytes - 4]))
        head = data[: -16 * SHARD_CHUNKS - 4]
        index[:2] = len(head), len(body)
        (path / key).write_bytes(head + body + with_crc(index.tobytes()))

    return apply


def blosc(nbytes: int, **parts: int) -> Callable[[bytes], bytes]:
    """Return a chunk whose header claims to hold so many bytes."""

    def change(data: bytes) -> bytes:
        head = bytearray(data[:16])
        struct.pack_into("<I", head, 4, nbytes)
        for at, value in ((8, parts.get("block")), (12, parts.get("cbytes"))):
            if value is not None:
                struct.pack_into("<I", head, at, value)
        return bytes(head) + data[16:]

    return change


def pack_index(text: bytes) -> Case:
    body = b"x" * 10 + text
    return put(".mpistream/blobs/1-1-0", body + len(text).to_bytes(8, "little") + with_crc(text)[-4:])


OUTSIDE = Path("/nonexistent")  # set by whoever does the cases
FLOOD = b"[" * 100_000
HUGE = 2**62
_EVIL = ("..", "../../evil", "/etc", "a/../../b", "a\\..\\b", "a\0b", "", ".", ".mpistream", "zarr.json", "x" * 300, 7)

# Name -> (what is done, what the checker says).
CASES: dict[str, tuple[Case, str]] = {
    **{f"a variable is called {n!r:.20}": (named(n), "FormatError: schema") for n in _EVIL},
    "a static is called ../../evil": (manifest(lambda d: d.update(statics=["../../evil"])), "FormatError: manifest"),
    "a dim is called ..": (manifest(lambda d: d["schema"]["dims"][1].__setitem__(0, "..")), "FormatError: schema"),
    "separator of keys": (manifest(lambda d: d["schema"].update(key_separator="/../")), "FormatError: schema"),
    "epoch of 400 digits": (manifest(lambda d: d.update(epoch=10**400)), "FormatError: manifest"),
    "epoch below zero": (manifest(lambda d: d.update(epoch=-1)), "FormatError: manifest"),
    "epoch with a way out": (manifest(lambda d: d.update(epoch="../../1")), "FormatError: manifest"),
    "newer version": (manifest(lambda d: d.update(version=2)), "FormatError: version"),
    "other format": (manifest(lambda d: d.update(format="zip")), "FormatError: foreign"),
    "JSON deep": (put(MANIFEST, FLOOD), "FormatError: json"),
    "JSON huge": (put(MANIFEST, b'{"a":[' + b"[]," * 3_000_000 + b"1]}"), "FormatError: json"),
    "JSON as large as may be": (put(MANIFEST, b'{"a":[' + b"[]," * 2_700_000 + b"1]}"), "FormatError: foreign"),
    "JSON truncated": (lambda p: os.truncate(p / MANIFEST, 300), "FormatError: json"),
    "JSON with a name twice": (put(MANIFEST, b'{"format":"mpistream","format":"x"}'), "FormatError: json"),
    "JSON with a number of a million digits": (put(MANIFEST, b'{"a":' + b"9" * 10**6 + b"}"), "FormatError: json"),
    "JSON with NaN": (put(MANIFEST, b'{"last_t":NaN}'), "FormatError: json"),
    "manifest of a terabyte": (sparse(MANIFEST, 2**40), "FormatError: size"),
    "more records than there are": (
        manifest(lambda d: d.update(committed=[[0, HUGE]], n_records=HUGE)),
        "missing",
    ),
    "fewer times than records": (manifest(lambda d: d.update(committed=[[0, 2000]], n_records=2000)), "missing"),
    "records dropped without end": (
        manifest(lambda d: d.update(dropped=[{"epoch": 2, "start": 5, "stop": HUGE, "blob_floors": []}])),
        "dropped",
    ),
    "a shape without end": (
        manifest(lambda d: [d["schema"]["dims"][i].__setitem__(1, 2**40) for i in (1, 2)]),
        "FormatError: schema",
    ),
    "shards without number": (
        array(0, shard_shape=[4, 2**20, 2**20], chunk_shape=[1, 1, 1]),
        "FormatError: schema",
    ),
    "an inner chunk of 3 GiB": (
        array(0, shard_shape=[4, 2**14, 2**14], chunk_shape=[4, 2**14, 2**14]),
        "FormatError: schema",
    ),
    "a chain of codecs that nobody knows": (array(0, codecs=[{"name": "rm -rf"}]), "FormatError: schema"),
    "a dtype of objects": (array(0, dtype="object"), "FormatError: schema"),
    "packs without number": (manifest(lambda d: d.update(n_packs=HUGE)), "missing"),
    "manifest is a link": (instead(MANIFEST, link("secret")), "StoreError: link"),
    "manifest is a FIFO": (instead(MANIFEST, os.mkfifo), "StoreError: not_a_file"),
    "manifest is a device": (instead(MANIFEST, device), "StoreError: not_a_file"),
    "manifest is a socket": (instead(MANIFEST, socket_at), "StoreError: not_a_file"),
    "our folder is a link": (instead(".mpistream", link("ours")), "StoreError: link"),
    "shard is a link": (instead(SHARD, link("shard")), "link"),
    "shard is a link to itself": (instead(SHARD, lambda p: p.symlink_to(p.name)), "link"),
    "shard is a FIFO": (instead(SHARD, os.mkfifo), "not_a_file"),
    "shard is a device": (instead(SHARD, device), "not_a_file"),
    "shard of the row that goes on is a FIFO": (instead("u/c/1/0/0", os.mkfifo), "not_a_file"),
    "row is a link": (instead("u/c/0", link("row")), "link"),
    "array is a link": (instead("u", link("array")), "link"),
    "chunks are a link": (instead("u/c", link("chunks")), "link"),
    "time chunk is a FIFO": (instead("time/c/0", os.mkfifo), "not_a_file"),
    "document is a FIFO": (instead("u/zarr.json", os.mkfifo), "not_a_file"),
    "group is a FIFO": (instead("zarr.json", os.mkfifo), "not_a_file"),
    "stage is a link": (instead(".mpistream/stage", link("stage")), "link"),
    "epochs are a link": (instead(".mpistream/epochs", link("epochs")), "link"),
    "what was dropped is a link": (instead(".mpistream/dropped/2", link("dropped")), "link"),
    "lease is a FIFO": (instead(".mpistream/lease", os.mkfifo), "not_a_file"),
    "blobs are a link": (instead(".mpistream/blobs", link("blobs")), "link"),
    "index past the end": (entries((0, 10**6)), "index"),
    "index past 2**64": (entries((0, 2**64 - 2), (1, 2**64 - 2)), "index"),
    "index with the whole object as one chunk": (entries((0, 0), (1, 200)), "index"),
    "index that overlaps": (entries((2, 0)), "index"),
    "index of another number": (
        lambda p: (p / SHARD).write_bytes((p / SHARD).read_bytes() + with_crc(bytes(16))),
        "index",
    ),
    "shard of a terabyte": (sparse(SHARD, 2**40), "index"),
    "row that goes on, of a terabyte": (sparse("u/c/1/0/0", 2**40), "index"),
    "an inner chunk of most of a terabyte": (
        lambda p: grown(p / SHARD, 2**40),
        "chunk",
    ),
    "chunk claims 2 GiB": (chunk(blosc(2**31 - 100)), "chunk"),
    "chunk claims nothing": (chunk(blosc(0)), "chunk"),
    "chunk of a wrong compressed size": (chunk(blosc(32, cbytes=2**31)), "chunk"),
    "chunk of large blocks": (chunk(blosc(32, block=2**31 - 1)), "chunk"),
    "chunk of no bytes": (chunk(lambda data: b""), "chunk"),
    "time chunk of a terabyte": (sparse("time/c/0", 2**40), "size"),
    "strings that claim more": (
        lambda p: (p / "name/c/0").write_bytes(with_crc(b"\xff" * 16 + (p / "name/c/0").read_bytes()[16:-4])),
        "chunk",
    ),
    "pack of entries outside": (pack_index(b'{"blobs":[["rng",0,0,4000,"00000000"]]}'), "blob"),
    "pack of entries below zero": (pack_index(b'{"blobs":[["rng",0,-5,5,"00000000"]]}'), "blob"),
    "pack of another form": (pack_index(b'{"blobs":{"a":1}}'), "blob"),
    "pack deep": (pack_index(b'{"blobs":' + FLOOD), "blob"),
    "pack of a terabyte": (sparse(".mpistream/blobs/1-1-0", 2**40), "blob"),
    "document deep": (put("u/zarr.json", FLOOD), "json"),
    "document of a terabyte": (sparse("zarr.json", 2**40), "size"),
    "lease deep": (put(".mpistream/lease", FLOOD), "ok"),
    "lease of a process 1": (put(".mpistream/lease", b'{"pid":-1}'), "ok"),
    "layout of a terabyte": (sparse(".mpistream/layout-2.json", 2**40), "size"),
    "claim of 200 digits": (lambda p: (p / ".mpistream/epochs" / ("9" * 200)).touch(), "ok"),
}


def grown(path: Path, nbytes: int) -> None:
    """Make a shard sparse in the middle, with one entry of the index over the hole."""
    data = path.read_bytes()
    n = 16 * SHARD_CHUNKS
    index = np.frombuffer(data[-n - 4 : -4], "<u8").copy()
    index[:2] = len(data), nbytes - len(data) - n - 4
    os.truncate(path, nbytes)
    with open(path, "r+b") as file:
        file.seek(nbytes - n - 4)
        file.write(with_crc(index.tobytes()))


def outside_of(folder: Path, intact: Path) -> None:
    """Put beside a store what its links lead to: the same as they replace, so that who follows them finds it."""
    (folder / "secret").write_bytes((intact / MANIFEST).read_bytes())
    shutil.copy(intact / SHARD, folder / "shard")
    for name, key in (("ours", ".mpistream"), ("row", "u/c/0"), ("array", "u"), ("chunks", "u/c")):
        shutil.copytree(intact / key, folder / name)
    for name in ("stage", "epochs", "blobs"):
        shutil.copytree(intact / ".mpistream" / name, folder / name)
    shutil.copytree(intact / ".mpistream/dropped/2", folder / "dropped")


def state_of(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return what lies below a folder, with times and sizes, links and FIFOs as they are."""
    found = []
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(above, name))
            found.append((os.path.join(above, name), status.st_ino, status.st_mtime_ns, status.st_size))
    return sorted(found)


def main() -> None:
    """Do all cases by hand."""
    global OUTSIDE
    folder = Path(sys.argv[1])
    intact, OUTSIDE = folder / "intact", folder / "outside"
    OUTSIDE.mkdir()
    write(intact)
    assert_sound(intact)
    outside_of(OUTSIDE, intact)
    beside = state_of(OUTSIDE)
    results = {}
    for i, (name, (apply, _)) in enumerate(CASES.items()):
        path = folder / str(i) / "run.zarr"
        shutil.copytree(intact, path)
        apply(path)
        before = state_of(path)
        began = time.process_time()
        found = attempts(path, resumes=False)
        found["written"] = str(state_of(path) != before)
        found |= {"resume": attempts(path)["resume"]}
        found["outside"] = str(state_of(OUTSIDE) != beside or sorted(os.listdir(folder / str(i))) != ["run.zarr"])
        results[name] = {**found, "seconds": time.process_time() - began}
        shutil.rmtree(folder / str(i))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"cases": results, "peak": peak * 1024}))


# ---- by chance ------------------------------------------------------------------------------------------

_NUMBERS = (0, 1, 2, -1, 255, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1, 10**30, 0.5, -0.0, 1e308)
_TEXTS = ("", "..", "../x", "/x", "a\\b", "\0", "u", "time", "zarr.json", "fast", "float64", "NaN", "\ud800", "x" * 500)
_VALUES: tuple[Any, ...] = (*_NUMBERS, *_TEXTS, None, True, [], {}, [[0, 1]], [[0, 2**62]], [1] * 50, {"name": "u"})


def mutated(base: dict[str, bytes], dice: random.Random) -> dict[str, bytes]:
    """Return the objects of a store with one or two things wrong, by someone who makes checksums right."""
    objects = dict(base)
    for _ in range(dice.choice([1, 1, 1, 2])):
        key = dice.choice([MANIFEST, *dice.choices(sorted(objects), k=2)])
        if key not in objects:
            continue
        kind = dice.randrange(4)
        if key == MANIFEST or key.endswith(".json"):
            objects[key] = _json(objects[key], key, dice)
        elif key.startswith(("u/c", "topo/c")) and kind < 2:
            objects[key] = _shard(objects[key], dice, 1 if key[0] == "t" else 2)
        elif "/blobs/" in key and kind < 3:
            objects[key] = _pack(objects[key], dice)
        elif kind < 3:
            objects[key] = _bytes(objects[key], dice)
        else:
            data = objects.pop(key)
            objects[dice.choice(sorted(base)) if dice.random() < 0.5 else f"{key}{dice.choice('0/x.')}"] = data
    return objects


def _json(data: bytes, key: str, dice: random.Random) -> bytes:
    try:
        document = json.loads(data)
    except ValueError:
        return data
    for _ in range(dice.choice([1, 1, 2])):
        places = paths(document)
        if places:
            document = replaced(document, dice.choice(places), ... if dice.random() < 0.1 else dice.choice(_VALUES))
    if key != MANIFEST:
        return json.dumps(document).encode()
    return resealed(document) if isinstance(document, dict) else b"[]"


def _shard(data: bytes, dice: random.Random, n_times: int) -> bytes:
    n = 2 * n_times
    if len(data) < 16 * n + 4:
        return data
    if dice.random() < 0.6:

        def change(index: Any) -> None:
            for _ in range(dice.choice([1, 2, 4])):
                value = dice.choice([0, 1, len(data), 2**63, 2**64 - 1, 2**64 - 2, dice.randrange(2 * len(data))])
                index[dice.randrange(len(index))] = value

        return with_index(data, change, n)
    # An inner chunk with other bytes in it, mostly in its header, and the right checksum.
    index = np.frombuffer(data[-16 * n - 4 : -4], "<u8").tolist()  # whose sums may be beyond 64 bits
    there = [i for i in range(n) if index[2 * i] != 2**64 - 1 and index[2 * i] + index[2 * i + 1] <= len(data)]
    if not there:
        return data
    i = dice.choice(there)
    offset, size = index[2 * i], index[2 * i + 1]
    body = bytearray(data[offset : offset + max(size - 4, 0)])
    for _ in range(dice.choice([1, 2, 4])):
        if body:
            body[dice.randrange(min(len(body), dice.choice([16, 16, 10**6])))] = dice.choice(
                [0, 255, dice.randrange(256)]
            )
    cut = data[:offset] + with_crc(bytes(body)) + data[offset + len(body) + 4 :]
    return cut[: len(data)]


def _pack(data: bytes, dice: random.Random) -> bytes:
    if len(data) < 12:
        return data
    n = int.from_bytes(data[-12:-4], "little")
    body, text = data[: -12 - n], data[-12 - n : -12]
    text = _json(text, "", dice) if dice.random() < 0.7 else _bytes(text, dice)
    size = len(text) if dice.random() < 0.8 else dice.choice([0, 2**63, 10**6])
    return body + text + size.to_bytes(8, "little") + with_crc(text)[-4:]


def _bytes(data: bytes, dice: random.Random) -> bytes:
    if not data:
        return dice.randbytes(dice.randrange(1, 40))
    at = dice.randrange(len(data))
    changed = bytearray(data)
    match dice.randrange(5):
        case 0:
            changed[at] ^= 1 << dice.randrange(8)
        case 1:
            del changed[at:]
        case 2:
            changed[at:at] = dice.randbytes(dice.randrange(1, 40))
        case 3:
            changed = bytearray(with_crc(bytes(changed[:-4])[:at] + dice.randbytes(2)))
        case 4:
            changed[at:] = bytes(len(changed) - at)
    return bytes(changed)


def store_of(objects: dict[str, bytes]) -> Any:
    """Return a store in memory with these objects."""
    store = MemoryStore()
    for key, data in objects.items():
        store.make_folder(key.rpartition("/")[0]) if key.rpartition("/")[0] not in objects else None
        store._objects[key] = data
    return store


@contextlib.contextmanager
def known_documents() -> Iterator[None]:
    """Let zarr-python make the documents of each schema once: that is most of what a small store costs."""
    made: dict[str, Documents] = {}

    def cached(schema: ms.StreamSchema) -> Documents:
        key = json.dumps(schema.to_json())
        if key not in made:
            made[key] = make_documents(schema)
        return made[key]

    modules = [importlib.import_module(f"mpistream.{name}") for name in ("inspection", "resuming")]
    for module in modules:
        module.make_documents = cached  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.make_documents = make_documents  # type: ignore[attr-defined]


def run_mutations(seed: int, n: int, *, start: int = 0, resumes_every: int = 8) -> dict[str, int]:
    """Try so many mutations; return how often which outcome came. A wrong one names its seed and number."""
    base: Any = MemoryStore()
    write(base)
    outcomes: dict[str, int] = {}
    with known_documents():
        for i in range(start, start + n):
            _try_mutation(base, seed, i, outcomes, resumes=i % resumes_every == 0)
    return outcomes


def _try_mutation(base: Any, seed: int, i: int, outcomes: dict[str, int], *, resumes: bool) -> None:
    dice = random.Random(f"{seed} {i}")
    began = time.process_time()
    try:
        objects = mutated(base._objects, dice)
        found = attempts(store_of(objects), resumes=resumes)
    except BaseException as error:
        error.add_note(f"mutation {i} of seed {seed}")
        raise
    assert time.process_time() - began < 5, f"mutation {i} of seed {seed}"
    for call, outcome in found.items():
        outcomes[f"{call} {outcome}"] = outcomes.get(f"{call} {outcome}", 0) + 1


if __name__ == "__main__":
    main()

"""Damaged and foreign stores: the right values or an error that names what is wrong, never a traceback from inside."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mpistream as ms
from tests.support.plain import QUICK, any_bits, append_schema

MANIFEST = ".mpistream/manifest.json"
N_RECORDS = 5
CODECS = ("fast", "compact", "wasm", "none")
SHARD = "u/c/1/0/0"


def u_of(i: int) -> NDArray[Any]:
    values = any_bits("float32", (6, 4), i)
    values[:2] = np.nan  # an inner chunk that is not stored
    return values


TOPO = any_bits("float64", (6, 4), 50)
X = any_bits("float64", (4,), 51)


def write(path: Path, codec: str = "fast", row: int = 4) -> None:
    schema = append_schema(
        {"y": 6, "x": 4},
        {"u": ms.Variable(("time", "y", "x"), "float32"), "n": ms.Variable(("time",), "int64")},
        statics={"topo": ms.Variable(("y", "x"), "float64")},
        coords={"x": ms.Coordinate(("x",), X)},
        shard_shape={"time": row, "y": 4, "x": 4},
        chunk_shape={"time": min(row, 2), "y": 2, "x": 2},
        codec=codec,
    )
    with ms.write_open(path, schema, options=QUICK) as writer:
        writer.write_static("topo", TOPO)
        for i in range(N_RECORDS):
            writer.write_record(i * 0.5, {"u": u_of(i), "n": i})
            writer.commit()


@pytest.fixture(scope="module", params=CODECS)
def intact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that is never touched, one for each compressor."""
    path = tmp_path_factory.mktemp("intact") / "run.zarr"
    write(path, request.param)
    return path


@pytest.fixture
def store(intact: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return Path(shutil.copytree(intact, tmp_path / "run.zarr"))


def read_u(path: Path) -> object:
    return ms.read_record(path, "u", 4)


def read_n(path: Path) -> object:
    return ms.read_record(path, "n", 4)


def read_topo(path: Path) -> object:
    return ms.read_static(path, "topo")


def read_x(path: Path) -> object:
    return ms.read_static(path, "x")


def read_times(path: Path) -> object:
    return ms.open_reader(path).times


OBJECTS = [(SHARD, read_u), ("topo/c/0/0", read_topo), ("x/c/0", read_x), ("n/c/0", read_n), ("time/c/0", read_times)]

Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "last byte missing": lambda data: data[:-1],
    "first byte missing": lambda data: data[1:],
    "one byte more": lambda data: data + b"\0",
    "garbage": lambda data: random.Random(1).randbytes(len(data)),
    "zeros": lambda data: bytes(len(data)),
    "ones": lambda data: b"\xff" * len(data),
    "text": lambda data: b"<html>503 Service Unavailable</html>" * 9,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("key", "read"), OBJECTS, ids=[key for key, _ in OBJECTS])
def test_damaged_object_is_named(store: Path, key: str, read: Callable[[Path], object], damage: str) -> None:
    """Reading what lies in a damaged shard or chunk is FormatError that begins with its key."""
    target = store / key
    target.write_bytes(DAMAGES[damage](target.read_bytes()))
    with pytest.raises(ms.FormatError, match=rf"^{key}: "):
        read(store)


@pytest.mark.parametrize(("key", "read"), OBJECTS, ids=[key for key, _ in OBJECTS])
@pytest.mark.parametrize("put", [None, "a folder"])
def test_missing_object_is_named(store: Path, key: str, read: Callable[[Path], object], put: str | None) -> None:
    """A shard or chunk that is gone, or is a folder, is FormatError of kind missing with its key."""
    (store / key).unlink()
    if put is not None:
        (store / key).mkdir()
    with pytest.raises(ms.FormatError, match=rf"^{key}: .*missing") as caught:
        read(store)
    assert caught.value.kind == "missing"


def test_damage_in_one_shard_leaves_the_others_readable(store: Path) -> None:
    """What does not lie in the damaged shard is still read."""
    (store / SHARD).write_bytes(b"")
    reader = ms.open_reader(store)
    for i in range(4):
        assert reader.read_record("u", i).tobytes() == u_of(i).tobytes()
    assert reader.read_record("u", 4, {"y": (4, 6)}).tobytes() == u_of(4)[4:].tobytes()


def test_object_that_can_not_be_read_is_a_store_error(store: Path) -> None:
    """A shard that the system refuses to open is StoreError with its errno and path, not damage."""
    import errno

    (store / SHARD).unlink()
    os.symlink(SHARD.rpartition("/")[2], store / SHARD)  # a link to itself
    with pytest.raises(ms.StoreError, match=SHARD) as caught:
        read_u(store)
    assert caught.value.errno == errno.ELOOP


def changed(**values: Any) -> Damage:
    """Return the damage that sets values of a manifest and leaves its checksum as it is."""
    return lambda data: json.dumps({**json.loads(data), **values}).encode()


def twice(name: str) -> Damage:
    return lambda data: data.replace(b'"%s":' % name.encode(), b'"%s":1,"%s":' % (name.encode(), name.encode()), 1)


MANIFESTS: dict[str, tuple[Damage, str, str]] = {
    "half": (DAMAGES["half"], "json", "not valid JSON"),
    "empty": (DAMAGES["empty"], "json", "not valid JSON"),
    "garbage": (DAMAGES["garbage"], "json", "not valid JSON"),
    "zeros": (DAMAGES["zeros"], "json", "not valid JSON"),
    "text": (DAMAGES["text"], "json", "not valid JSON"),
    "a list": (lambda data: b"[1, 2]", "json", "not a JSON object"),
    "deeply nested": (lambda data: b"[" * 100_000, "json", "not valid JSON"),
    "duplicated name": (twice("n_records"), "json", "stands twice"),
    "duplicated name inside": (twice("dims"), "json", "stands twice"),
    "other format": (changed(format="icechunk"), "foreign", "'icechunk' is not 'mpistream'"),
    "no format": (lambda data: b"{}", "foreign", "format None"),
    "newer version": (changed(version=2), "version", r"version 2, .* reads 1; use a newer mpistream"),
    "changed number": (changed(n_records=4), "checksum", "checksum does not match"),
    "changed schema": (changed(schema={}), "checksum", "checksum does not match"),
    "no checksum": (changed(checksum=None), "checksum", "checksum does not match"),
}


@pytest.mark.parametrize("damage", MANIFESTS)
@pytest.mark.parametrize("call", [ms.open_reader, ms.read_output_manifest, ms.write_resume])
def test_damaged_manifest_is_named(tmp_path: Path, damage: str, call: Callable[[Path], object]) -> None:
    """A damaged, foreign or newer manifest is FormatError that names it, for readers and for a resume."""
    change, kind, message = MANIFESTS[damage]
    path = tmp_path / "run.zarr"
    write(path)
    target = path / MANIFEST
    bad = change(target.read_bytes())
    target.write_bytes(bad)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(ms.FormatError, match=rf"^{MANIFEST}: .*{message}") as caught:
        call(path)
    assert caught.value.kind == kind
    # Nothing falls back to something else, and nothing was written.
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before


def nothing(path: Path) -> None:
    return None


def a_folder(path: Path) -> None:
    path.mkdir()


def a_file(path: Path) -> None:
    path.write_bytes(b"CDF\x01")


def without_manifest(path: Path) -> None:
    write(path)
    (path / MANIFEST).unlink()


@pytest.mark.parametrize("make", [nothing, a_folder, a_file, without_manifest])
def test_what_is_no_store_of_ours_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A path that does not exist, a folder, a file, half a store: FormatError with the path and what lies there."""
    path = tmp_path / "run.zarr"
    make(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ms.FormatError, match=str(path)) as caught:
        ms.open_reader(path)
    assert caught.value.kind == "no_manifest"
    with pytest.raises(ms.ResumeError, match=rf"{path}.*nothing to resume, use write_open"):
        ms.write_resume(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_foreign_group_has_no_records(tmp_path: Path) -> None:
    """Of a group that others wrote the reader has no records: FormatError with the path and the way out."""
    import zarr

    path = tmp_path / "run.zarr"
    zarr.create_group(path).create_array("u", shape=(2,), dtype="float32")
    reader = ms.open_reader(path)
    calls: list[Callable[[], Any]] = [
        *(partial(getattr, reader, name) for name in ("manifest", "schema", "n_records", "committed", "times")),
        *(partial(reader.read_record, "u", 0), partial(reader.read_static, "u"), partial(reader.read_blob, "u")),
        *(reader.blobs, reader.refresh, lambda: next(reader.follow()), reader.to_zarr, reader.to_xarray),
    ]
    for call in calls:
        with pytest.raises(ms.FormatError, match=rf"^{path}: no {MANIFEST}.*hierarchy\(\).*read_array\(\)") as caught:
            call()
        assert caught.value.kind == "no_manifest"
    assert repr(reader) == f"StoreReader({str(path)!r}, no stream)"
    with pytest.raises(ms.FormatError, match=rf"^{path} is not a stream: .* others wrote, without {MANIFEST}"):
        ms.read_output_manifest(path)
    with pytest.raises(ms.ResumeError, match=rf"^{path} .*nothing to resume, use write_open"):
        ms.write_resume(path)


def read_everything(path: Path) -> dict[str, bytes]:
    """Return all that is committed, as bytes; the errors a reader may raise leave their names in its place."""
    found: dict[str, bytes] = {}
    try:
        reader = ms.open_reader(path)
    except (ms.FormatError, ms.StoreError):
        return found
    part = {"y": (1, 5), "x": (1, 2)}
    calls: dict[str, Callable[[], Any]] = {name: partial(reader.read_static, name) for name in ("topo", "x", "time")}
    for i in range(N_RECORDS):
        calls[f"u {i}"] = partial(reader.read_record, "u", i)
        calls[f"part {i}"] = partial(reader.read_record, "u", i, part)
        calls[f"n {i}"] = partial(reader.read_record, "n", i)
    for name, call in calls.items():
        try:
            found[name] = call().tobytes()
        except (ms.FormatError, ms.StoreError):
            continue
    return found


EXPECTED = {
    **{f"u {i}": u_of(i).tobytes() for i in range(N_RECORDS)},
    **{f"part {i}": u_of(i)[1:5, 1:2].tobytes() for i in range(N_RECORDS)},
    **{f"n {i}": np.int64(i).tobytes() for i in range(N_RECORDS)},
    "topo": TOPO.tobytes(),
    "x": X.tobytes(),
    "time": (np.arange(N_RECORDS) * 0.5).tobytes(),
}


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Return data with some bits flipped, a piece cut out, doubled, moved or overwritten."""
    if not data:
        return dice.randbytes(dice.randrange(1, 40))
    at = dice.randrange(len(data))
    n = dice.randrange(1, 1 + min(32, len(data) - at))
    changed = bytearray(data)
    match dice.choice(["flip", "flip", "flip", "cut", "double", "fill", "swap", "tail"]):
        case "flip":
            for _ in range(dice.choice([1, 1, 2, 8])):
                changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        case "cut":
            del changed[at : at + n]
        case "double":
            changed[at:at] = changed[at : at + n]
        case "fill":
            changed[at : at + n] = bytes([dice.choice([0, 255, dice.randrange(256)])]) * n
        case "swap":
            changed[at : at + n] = changed[at : at + n][::-1]
        case "tail":
            changed[at:] = changed[:at]
    return bytes(changed)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_store_gives_right_values_or_one_of_two_errors(store: Path, seed: int) -> None:
    """After any mutation of any file a reader gives the right values, FormatError or StoreError (P-14)."""
    assert read_everything(store) == EXPECTED
    dice = random.Random(seed)
    files = sorted(p for p in store.rglob("*") if p.is_file() and p.name != "zarr.json" and "epochs" not in p.parts)
    for _ in range(25):
        target = dice.choice(files)
        data = target.read_bytes()
        target.write_bytes(mutated(data, dice))
        wrong = [name for name, value in read_everything(store).items() if value != EXPECTED[name]]
        assert wrong == [], target
        target.write_bytes(data)


def with_right_checksums(data: bytes, dice: random.Random, n_entries: int) -> bytes:
    """Return a shard whose index was changed by someone who knows how to make its checksum right."""
    import google_crc32c

    nbytes = 16 * n_entries
    body, index = data[: -nbytes - 4], np.frombuffer(data[-nbytes - 4 : -4], "<u8").copy()
    index[dice.randrange(len(index))] = dice.choice(
        [0, 1, len(body), len(body) + 1, 2**31, 2**63, 2**64 - 1, 2**64 - 2, dice.randrange(2 * len(data))]
    )
    return body + index.tobytes() + google_crc32c.value(index.tobytes()).to_bytes(4, "little")


@pytest.mark.parametrize("seed", range(2))
def test_index_with_a_right_checksum_and_wrong_entries_is_harmless(store: Path, seed: int) -> None:
    """Entries that point anywhere end in FormatError, in fill or in what lies there: never in another exception."""
    dice = random.Random(seed)
    target = store / SHARD
    data = target.read_bytes()
    for _ in range(40):
        target.write_bytes(with_right_checksums(data, dice, 2 * 2 * 2))
        found = {name: value for name, value in read_everything(store).items() if name not in ("u 4", "part 4")}
        assert found == {name: value for name, value in EXPECTED.items() if name not in ("u 4", "part 4")}

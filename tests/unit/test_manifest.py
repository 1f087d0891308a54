"""The manifest and its neighbours under ``.mpistream/``: bytes, checks, digests and names."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistream import manifest as module
from mpistream.errors import FormatError
from mpistream.manifest import (
    Dropped,
    Manifest,
    add_times,
    layout_bytes,
    parse_epoch,
    parse_json,
    parse_open_dropped,
    regions_of_layout,
    subtract_times,
)
from mpistream.region import Region
from tests.support.json_damage import paths, replaced, values
from tests.support.streams import resolved

ZEROS = "0" * 64
KEY = ".mpistream/manifest.json"

FIRST = Manifest.first(store_id="store", run_id="run", epoch=3, schema=resolved(), layout_digest="digest")
FULL = replace(
    FIRST.with_records(5, 0.1 + 0.2, "ab" * 32),
    commit_seq=17,
    statics=("topography",),
    dropped=(Dropped(epoch=2, start=5, stop=9), Dropped(epoch=3, start=5, stop=6)),
    floors=((2, 4), (5, 16)),
)


DOCUMENT = json.loads(FULL.to_bytes())


def dumped(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def sealed(document: dict[str, Any]) -> bytes:
    """The bytes of a document, its checksum made right."""
    plain = {k: v for k, v in document.items() if k != "checksum"}
    return dumped({**plain, "checksum": hashlib.sha256(dumped(plain)).hexdigest()})


def same(a: Manifest, b: Manifest) -> bool:
    return a.to_bytes() == b.to_bytes() and replace(a, schema=b.schema) == b


# ---- bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", [FIRST, FULL], ids=["first", "full"])
def test_a_manifest_survives_its_bytes(manifest) -> None:
    """Everything comes back, the time of the last record bitwise."""
    again = Manifest.from_bytes(manifest.to_bytes())
    assert same(again, manifest)
    assert again.schema.to_json() == manifest.schema.to_json()
    if manifest.last_t is not None:
        assert again.last_t is not None
        assert again.last_t.hex() == (0.1 + 0.2).hex()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_time_survives(t) -> None:
    """The shortest decimal that gives the same float, the sign of zero too."""
    again = Manifest.from_bytes(FIRST.with_records(1, t, ZEROS).to_bytes())
    assert again.last_t is not None
    assert struct.pack("<d", again.last_t) == struct.pack("<d", t)


def test_the_document() -> None:
    """Sorted keys without spaces, digests and ranges, no arrays of values; the checksum is over all the rest."""
    document = json.loads(FULL.to_bytes())
    assert FULL.to_bytes() == sealed(document)
    assert document.pop("schema") == json.loads(json.dumps(FULL.schema.to_json()))
    checksum = document.pop("checksum")
    assert len(checksum) == 64
    assert document == {
        "format": "mpistream",
        "version": 1,
        "store_id": "store",
        "run_id": "run",
        "epoch": 3,
        "commit_seq": 17,
        "n_records": 5,
        "last_t": 0.1 + 0.2,
        "committed": [[0, 5]],
        "statics": ["topography"],
        "dropped": [{"epoch": 2, "start": 5, "stop": 9}, {"epoch": 3, "start": 5, "stop": 6}],
        "floors": [[2, 4], [5, 16]],
        "fingerprint": FULL.schema.fingerprint(),
        "coordinates_digest": FULL.schema.coordinates_digest(),
        "times_digest": "ab" * 32,
        "layout_digest": "digest",
    }


def test_a_new_store_has_no_records() -> None:
    """The first manifest is that of commit 0."""
    assert (FIRST.n_records, FIRST.last_t, FIRST.committed, FIRST.commit_seq) == (0, None, (), 0)
    assert (FIRST.statics, FIRST.dropped, FIRST.floors) == ((), (), ())
    assert FIRST.times_digest == ZEROS
    back = FULL.with_records(0, None, ZEROS)
    assert (back.n_records, back.last_t, back.committed, back.commit_seq) == (0, None, (), 17)


def test_its_size_does_not_grow_with_records() -> None:
    """A million records cost no more than their number has digits."""
    assert len(FULL.with_records(10**6, 1.5, ZEROS).to_bytes()) < len(FULL.to_bytes()) + 12


# ---- damage ------------------------------------------------------------------------------------------


def refused(data: bytes, kind: str, *parts: str) -> None:
    with pytest.raises(FormatError) as caught:
        Manifest.from_bytes(data)
    assert str(caught.value).startswith(f"{KEY}: ")
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.kind == kind


def test_no_truncation_and_no_flipped_bit_is_a_manifest() -> None:
    """I1: an invalid manifest is FormatError with its key, whatever is wrong, and nothing else."""
    data = FIRST.to_bytes()
    for n in range(0, len(data), 7):
        refused(data[:n], "json")
    for i in range(0, len(data), 3):
        for bit in (0, 5, 7):
            flipped = bytearray(data)
            flipped[i] ^= 1 << bit
            with pytest.raises(FormatError, match=f"^{KEY}: "):
                Manifest.from_bytes(bytes(flipped))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"5",
        b"\xff\xfe\xfd",
        b"{",
        b'{"a":1}{}',
        b'{"format":"mpistream","format":"mpistream"}',
        b'{"format":"mpistream","schema":{"dims":[],"a":{"x":1,"x":2}}}',
        b'{"last_t":NaN}',
        b'{"last_t":-Infinity}',
        b'{"last_t":1e999}',
        b'{"n":' + b"1" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda d: repr(d[:40]),
)
def test_what_is_no_json_object_is_refused(data) -> None:
    """Not JSON, not an object, a name twice, a number that no float holds, or deeper than any document."""
    refused(data, "json")


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_no_depth_ends_in_another_error(opening) -> None:
    """Also where Python's parser can still follow and its writer can't."""
    closing = b"]" if opening == b"[" else b"}"
    for depth in range(100, 1100, 3):
        inner = opening * depth + b"1" + closing * depth
        data = b'{"format":"mpistream","version":1,"checksum":"","a":' + inner + b"}"
        with pytest.raises(FormatError, match=f"^{KEY}: "):
            Manifest.from_bytes(data)


def test_a_document_too_large_is_not_parsed(monkeypatch) -> None:
    """64 MiB are far more than any manifest has."""
    assert module._MAX_NBYTES == 64 * 2**20
    monkeypatch.setattr(module, "_MAX_NBYTES", 10)
    refused(b'{"a": "bcd"}', "json", "12 bytes, at most 10 are read")
    assert parse_json("k", b'{"a": 123}') == {"a": 123}


@pytest.mark.parametrize(
    ("changes", "kind", "parts"),
    [
        ({"format": "icechunk"}, "foreign", ("format 'icechunk' is not 'mpistream'",)),
        ({"format": None}, "foreign", ("format None",)),
        ({"version": 2}, "version", ("format version 2, this mpistream reads 1", "use a newer mpistream")),
        ({"version": "1"}, "version", ("format version '1'",)),
        ({"n_records": 4}, "manifest", ("4 records, but committed ranges ((0, 5),)",)),
        ({"n_records": -1, "committed": []}, "manifest", ("-1 records",)),
        ({"n_records": 0}, "manifest", ("0 records, but committed ranges ((0, 5),)",)),
        ({"committed": [[0, 2], [2, 5]]}, "manifest", ("5 records, but committed ranges ((0, 2), (2, 5))",)),
        ({"committed": [[1, 5]]}, "manifest", ("((1, 5),)",)),
        ({"committed": []}, "manifest", ("5 records, but committed ranges ()",)),
        ({"committed": [[0]]}, "manifest", ("damaged",)),
        ({"committed": 5}, "manifest", ("damaged: TypeError",)),
        ({"epoch": "x"}, "manifest", ("damaged: ValueError",)),
        ({"last_t": [1]}, "manifest", ("damaged: TypeError",)),
        ({"last_t": 10**400}, "manifest", ("damaged: OverflowError",)),
        ({"times_digest": "xyz"}, "manifest", ("damaged: ValueError",)),
        ({"dropped": [{"epoch": 1, "start": 2}]}, "manifest", ("damaged: KeyError: 'stop'",)),
        ({"fingerprint": ZEROS}, "manifest", ("the schema does not have the fingerprint that stands beside it",)),
        ({"schema": {}}, "schema", ("the schema is damaged",)),
        ({"schema": None}, "schema", ("the schema is damaged",)),
    ],
    ids=lambda c: str(c)[:40],
)
def test_a_document_that_contradicts_itself_is_refused(changes, kind, parts) -> None:
    """Its checksum is right: foreign, newer, or not consistent in itself."""
    refused(sealed({**json.loads(FULL.to_bytes()), **changes}), kind, *parts)


def test_a_schema_without_layout_is_no_manifest() -> None:
    """What is committed has its shapes; null does not stand for a length."""
    at = [a["name"] for a in DOCUMENT["schema"]["arrays"]].index("temperature")
    for name in ("shard_shape", "chunk_shape"):
        changed = replaced(DOCUMENT, ("schema", "arrays", at, name), [1, None, 3])
        with pytest.raises(FormatError, match=f"^{KEY}: "):
            Manifest.from_bytes(sealed(changed))


def test_a_wrong_checksum_is_named() -> None:
    """Any other value of any field, or no checksum at all."""
    document = DOCUMENT
    for changed in ({**document, "n_records": 6}, {**document, "checksum": ZEROS}, {**document, "checksum": None}):
        refused(dumped(changed), "checksum", "the checksum does not match; the manifest is damaged")
    refused(dumped({k: v for k, v in document.items() if k != "checksum"}), "checksum")


@given(st.sampled_from([p for p in paths(DOCUMENT) if p[0] != "schema"]), values | st.just(...))
@settings(max_examples=200)
def test_a_forged_document_is_a_manifest_or_a_format_error(path, value) -> None:
    """One value replaced or left out and the checksum made right: never another error."""
    try:
        found = Manifest.from_bytes(sealed(replaced(DOCUMENT, path, value)))
    except FormatError:
        return
    assert same(Manifest.from_bytes(found.to_bytes()), found)


# ---- times -------------------------------------------------------------------------------------------


def digest_of(times: dict[int, float]) -> str:
    """The digest by its definition: a sum of sha256 of index and time, modulo 2**256."""
    total = sum(int(hashlib.sha256(struct.pack("<Qd", i, t)).hexdigest(), 16) for i, t in times.items())
    return f"{total % 2**256:064x}"


times_lists = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=12)


@given(times_lists, st.lists(st.integers(0, 12), max_size=3))
def test_the_digest_does_not_know_how_times_came(times, cuts) -> None:
    """In one commit or in many, and what is subtracted leaves no trace."""
    expected = digest_of(dict(enumerate(times)))
    assert add_times(ZEROS, 0, times) == expected
    edges = sorted({0, len(times), *(min(c, len(times)) for c in cuts)})
    found = ZEROS
    for start, stop in itertools.pairwise(edges):
        found = add_times(found, start, times[start:stop])
    assert found == expected
    for start, stop in itertools.pairwise(edges):
        found = subtract_times(found, start, times[start:stop])
    assert found == ZEROS


@given(times_lists, st.integers(0, 12))
def test_a_resume_is_a_run_that_ended_there(times, n_keep) -> None:
    """Dropping the last records gives the digest of those that were kept."""
    n_keep = min(n_keep, len(times))
    whole = digest_of(dict(enumerate(times)))
    assert subtract_times(whole, n_keep, times[n_keep:]) == digest_of(dict(enumerate(times[:n_keep])))


def test_the_digest_tells_times_apart_bitwise() -> None:
    """0.0 and -0.0, another order, another place."""
    assert (
        len({add_times(ZEROS, *a) for a in ((0, [0.0]), (0, [-0.0]), (1, [0.0]), (0, [math.nextafter(0.0, 1)]))}) == 4
    )
    assert add_times(ZEROS, 0, [1.0, 2.0]) != add_times(ZEROS, 0, [2.0, 1.0])
    assert add_times("f" * 64, 0, [1.0]) == f"{int(digest_of({0: 1.0}), 16) - 1:064x}"


# ---- names -------------------------------------------------------------------------------------------


def test_names_below_the_folder() -> None:
    """Where everything lies; FORMAT.md has the same names."""
    assert module.FOLDER == ".mpistream"
    assert module.MANIFEST_KEY == ".mpistream/manifest.json"
    assert module.LEASE_KEY == ".mpistream/lease"
    assert module.epoch_key(12) == ".mpistream/epochs/12"
    assert module.stage_folder(12) == ".mpistream/stage/12"
    assert module.stage_folder(12, 0) == ".mpistream/stage/12/0"
    assert module.fenced_folder("12", 13) == ".mpistream/stage/12.fenced-by-13"
    assert module.layout_key(12) == ".mpistream/layout-12.json"
    assert module.nonce_key(12) == ".mpistream/nonce-12"
    assert module.dropped_folder(12) == ".mpistream/dropped/12"
    assert module.dropped_folder(12, is_open=True) == ".mpistream/dropped/12.open"


@given(st.integers(0, 10**20))
def test_an_epoch_is_found_by_its_name(epoch) -> None:
    """parse_epoch takes back what epoch_key gives."""
    assert parse_epoch(module.epoch_key(epoch).rpartition("/")[2]) == epoch


@pytest.mark.parametrize("name", ["", "01", "00", "-1", "+1", "1.0", " 1", "1\n", "1_0", "x", "٣", "²", "1.partial"])
def test_other_names_are_no_epochs(name) -> None:
    """Digits of other scripts, leading zeros and leftovers claim nothing."""
    assert parse_epoch(name) is None


@pytest.mark.parametrize(
    ("name", "epoch"),
    [("12.open", 12), ("0.open", 0), ("12", None), ("12.close", None), ("x.open", None), ("open", None), ("", None)],
)
def test_a_folder_that_a_resume_was_filling_is_known_by_its_name(name, epoch) -> None:
    """And no other one."""
    assert parse_open_dropped(name) == epoch


# ---- the layout document -----------------------------------------------------------------------------


def test_regions_survive_the_layout_document() -> None:
    """Every writer's region, the empty one too, in their order."""
    dims = ("y", "x")
    regions = [Region.of_box(dims, ((0, 4), (0, 6))), Region.empty(dims), Region.of_box(dims, ((4, 8), (0, 6)))]
    data = layout_bytes(3, regions)
    assert json.loads(data)["epoch"] == 3
    assert regions_of_layout("k", data) == regions


@pytest.mark.parametrize(
    "data", [b"{}", b'{"regions":5}', b'{"regions":[{}]}', b'{"regions":[{"dims":["y"],"boxes":[[[2,1]]]}]}']
)
def test_a_damaged_layout_document_is_refused(data) -> None:
    """With its key."""
    with pytest.raises(FormatError, match=r"^\.mpistream/layout-3\.json: damaged: ") as caught:
        regions_of_layout(".mpistream/layout-3.json", data)
    assert caught.value.kind == "layout"


@given(values)
def test_no_layout_document_ends_in_another_error(value) -> None:
    """Whatever stands in the place of the regions or of one of them."""
    for document in ({"regions": value}, {"regions": [value]}, {"regions": [{"dims": ["y"], "boxes": value}]}):
        try:
            regions_of_layout("k", dumped(document))
        except FormatError as error:
            assert error.kind == "layout"

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

import mpistream as ms
from mpistream import manifest as module
from mpistream.errors import FormatError
from mpistream.manifest import (
    Dropped,
    Manifest,
    add_times,
    floor_of,
    floors_inside,
    layout_bytes,
    parse_blob,
    parse_epoch,
    parse_json,
    parse_layout,
    parse_open_dropped,
    raise_floors,
    raised_inside,
    set_floors,
    subtract_times,
)
from mpistream.ranges import ranges_of
from mpistream.region import Region
from tests.support.json_damage import paths, replaced, values
from tests.support.streams import resolved

ZEROS = "0" * 64
KEY = ".mpistream/manifest.json"

FIRST = Manifest.first(store_id="store", run_id="run", epoch=3, schema=resolved(), layout_digest="digest")
FULL = replace(
    FIRST,
    committed=((0, 5),),
    last_t=0.1 + 0.2,
    times_digest="ab" * 32,
    commit_seq=17,
    first_seq=16,
    statics=("topography",),
    dropped=(Dropped(epoch=2, start=5, stop=9, blob_floors=((6, 3),)), Dropped(epoch=3, start=5, stop=6)),
    floors=((2, 4), (5, 16)),
    blob_floors=((2, 3), (5, 16)),
    n_packs=7,
    carried={"digest": "cd", "receipt": {"commit_seq": 17, "warnings": []}},
)
INDEXED = replace(
    Manifest.first(
        store_id="store",
        run_id="run",
        epoch=3,
        schema=resolved(time=ms.IndexedTime([float(i) for i in range(20)], units="s")),
        layout_digest="digest",
    ),
    committed=((0, 2), (5, 9), (19, 20)),
    last_t=0.1 + 0.2,
    floors=((6, 3), (8, 0)),
)


DOCUMENT = json.loads(FULL.to_bytes())
INDEXED_DOCUMENT = json.loads(INDEXED.to_bytes())


def dumped(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def sealed(document: dict[str, Any]) -> bytes:
    """The bytes of a document, its checksum made right."""
    plain = {k: v for k, v in document.items() if k != "checksum"}
    return dumped({**plain, "checksum": hashlib.sha256(dumped(plain)).hexdigest()})


def same(a: Manifest, b: Manifest) -> bool:
    return a.to_bytes() == b.to_bytes() and replace(a, schema=b.schema) == b


# ---- bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", [FIRST, FULL, INDEXED], ids=["first", "full", "indexed"])
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
    again = Manifest.from_bytes(replace(FIRST, committed=((0, 1),), last_t=t).to_bytes())
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
        "first_seq": 16,
        "n_records": 5,
        "last_t": 0.1 + 0.2,
        "committed": [[0, 5]],
        "statics": ["topography"],
        "dropped": [
            {"epoch": 2, "start": 5, "stop": 9, "blob_floors": [[6, 3]]},
            {"epoch": 3, "start": 5, "stop": 6, "blob_floors": []},
        ],
        "floors": [[2, 4], [5, 16]],
        "blob_floors": [[2, 3], [5, 16]],
        "n_packs": 7,
        "fingerprint": FULL.schema.fingerprint(),
        "coordinates_digest": FULL.schema.coordinates_digest(),
        "times_digest": "ab" * 32,
        "layout_digest": "digest",
        "carried": {"digest": "cd", "receipt": {"commit_seq": 17, "warnings": []}},
    }


def test_a_new_store_has_no_records() -> None:
    """The first manifest is that of commit 0."""
    assert (FIRST.n_records, FIRST.last_t, FIRST.committed, FIRST.commit_seq) == (0, None, (), 0)
    assert (FIRST.statics, FIRST.dropped, FIRST.floors) == ((), (), ())
    assert FIRST.times_digest == ZEROS
    assert (FIRST.first_seq, FIRST.carried) == (0, None)
    assert (FIRST.blob_floors, FIRST.n_packs) == ((), 0)


def test_in_indexed_mode_all_records_have_their_place() -> None:
    """The length of the time dim is fixed, whatever is committed."""
    document = json.loads(INDEXED.to_bytes())
    assert (INDEXED.n_records, document["n_records"]) == (20, 20)
    assert document["committed"] == [[0, 2], [5, 9], [19, 20]]
    assert replace(INDEXED, committed=()).n_records == 20


def test_its_size_does_not_grow_with_records() -> None:
    """A million records cost no more than their number has digits."""
    assert len(replace(FULL, committed=((0, 10**6),), last_t=1.5).to_bytes()) < len(FULL.to_bytes()) + 12


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
        rb'{"run_id":"\ud800"}',
        rb'{"run_id":"\UDC00"}'.lower(),
        b'{"run_id":"\xed\xa0\x80"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda d: repr(d[:40]),
)
def test_what_is_no_json_object_is_refused(data) -> None:
    """Not JSON, not an object, a name twice, a number that no float holds, half a character, or deeper than any."""
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
    assert module.MAX_JSON_NBYTES == 8 * 2**20
    monkeypatch.setattr(module, "MAX_JSON_NBYTES", 10)
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
        ({"carried": {"digest": "cd"}}, "manifest", ("damaged: KeyError: 'receipt'",)),
        ({"carried": {"digest": 5, "receipt": {}}}, "manifest", ("damaged: TypeError: carried tokens with digest 5",)),
        ({"carried": {"digest": "cd", "receipt": []}}, "manifest", ("damaged: TypeError", "receipt []")),
        ({"carried": []}, "manifest", ("damaged: TypeError",)),
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


@pytest.mark.parametrize("value", [-1, 2**63, True, 1.0, "1", None, 10**400])
@pytest.mark.parametrize("place", ["epoch", "commit_seq", "first_seq", "n_packs", "committed", "floors", "dropped"])
def test_numbers_that_count_nothing_are_refused(place, value) -> None:
    """Below 0, beyond 63 bits, true, a float, text, nothing."""
    drop = {"epoch": 1, "start": 0, "stop": value, "blob_floors": []}
    wrong = {"committed": [[0, value]], "floors": [[value, 1]], "dropped": [drop]}.get(place, value)
    refused(sealed({**INDEXED_DOCUMENT, place: wrong}), "manifest", "is no number from 0 to 2**63 - 1")


@pytest.mark.parametrize(
    "changes",
    [
        {"statics": ["../../etc"]},
        {"statics": ["nothing"]},
        {"dropped": [{"epoch": 1, "start": 3, "stop": 3, "blob_floors": []}]},
        {"dropped": [{"epoch": 2**60, "start": 3, "stop": 4, "blob_floors": []}]},
    ],
    ids=str,
)
def test_names_and_ranges_that_can_not_be_are_refused(changes) -> None:
    """A static that the schema does not have; dropped records that are none, or of an epoch to come."""
    refused(sealed({**INDEXED_DOCUMENT, **changes}), "manifest")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_records": 19},
        {"n_records": 7},
        {"committed": [[0, 2], [2, 9]]},
        {"committed": [[5, 9], [0, 2]]},
        {"committed": [[0, 2], [1, 9]]},
        {"committed": [[19, 21]]},
        {"committed": [[3, 3]]},
        {"committed": [[4, 3]]},
    ],
    ids=str,
)
def test_ranges_that_are_no_set_of_records_are_refused(changes) -> None:
    """In indexed mode: ascending, not touching, not empty, inside the time dim."""
    refused(sealed({**INDEXED_DOCUMENT, **changes}), "manifest", " records, but committed ranges ")


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


@given(st.sampled_from([DOCUMENT, INDEXED_DOCUMENT]), st.data(), values | st.just(...))
@settings(max_examples=200)
def test_a_forged_document_is_a_manifest_or_a_format_error(document, data, value) -> None:
    """One value replaced or left out and the checksum made right: never another error."""
    path = data.draw(st.sampled_from([p for p in paths(document) if p[0] != "schema"]))
    try:
        found = Manifest.from_bytes(sealed(replaced(document, path, value)))
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
    pairs = list(enumerate(times))
    assert add_times(ZEROS, pairs) == expected
    assert add_times(ZEROS, reversed(pairs)) == expected
    edges = sorted({0, len(times), *(min(c, len(times)) for c in cuts)})
    found = ZEROS
    for start, stop in itertools.pairwise(edges):
        found = add_times(found, pairs[start:stop])
    assert found == expected
    for start, stop in itertools.pairwise(edges):
        found = subtract_times(found, pairs[start:stop])
    assert found == ZEROS


@given(times_lists, st.integers(0, 12))
def test_a_resume_is_a_run_that_ended_there(times, n_keep) -> None:
    """Dropping the last records gives the digest of those that were kept."""
    n_keep = min(n_keep, len(times))
    whole = digest_of(dict(enumerate(times)))
    assert subtract_times(whole, list(enumerate(times))[n_keep:]) == digest_of(dict(enumerate(times[:n_keep])))


def test_the_digest_tells_times_apart_bitwise() -> None:
    """0.0 and -0.0, another order, another place."""
    pairs = [(0, 0.0), (0, -0.0), (1, 0.0), (0, math.nextafter(0.0, 1))]
    assert len({add_times(ZEROS, [pair]) for pair in pairs}) == 4
    assert add_times(ZEROS, enumerate([1.0, 2.0])) != add_times(ZEROS, enumerate([2.0, 1.0]))
    assert add_times("f" * 64, [(0, 1.0)]) == f"{int(digest_of({0: 1.0}), 16) - 1:064x}"


# ---- floors ------------------------------------------------------------------------------------------

raised = st.lists(st.lists(st.integers(0, 11), max_size=5), max_size=5)


@given(raised, st.integers(0, 12), st.integers(0, 12), st.integers(0, 6))
def test_each_number_has_the_floor_it_was_raised_to_last(rounds, start, stop, commit_seq) -> None:
    """As if every number had a floor of its own; the pairs are as few as they can be."""
    expected = dict.fromkeys(range(14), 0)
    floors: module.Floors = ()
    for seq, numbers in enumerate(rounds, start=1):
        floors = raise_floors(floors, ranges_of(numbers), seq)
        expected.update(dict.fromkeys(numbers, seq))
    assert {n: floor_of(floors, n) for n in expected} == expected
    edges = [(n, expected[n]) for n in expected if expected[n] != expected.get(n - 1, 0)]
    assert list(floors) == edges
    inside = any(expected[n] > commit_seq for n in range(start, stop))
    assert raised_inside(floors, start, stop, commit_seq) is inside


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
    assert module.blob_key(12, 0, 345) == ".mpistream/blobs/12-0-345"
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


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_pack_is_known_by_its_name(epoch, commit_seq, writer) -> None:
    """parse_blob takes back what blob_key gives."""
    assert parse_blob(module.blob_key(epoch, commit_seq, writer).rpartition("/")[2]) == (epoch, commit_seq, writer)


@pytest.mark.parametrize("name", ["", "1", "1-2", "1-2-3-4", "1-2-", "1--3", "01-2-3", "1-2-x", "1-2-3.partial"])
def test_other_names_are_no_packs(name) -> None:
    """Too few or too many numbers, leading zeros, leftovers."""
    assert parse_blob(name) is None


@pytest.mark.parametrize(
    ("epoch", "commit_seq", "is_named"),
    [
        (3, 16, False),
        (3, 17, True),
        (3, 18, False),
        (2, 15, True),
        (2, 16, False),
        (2, 17, False),
        (0, 1, True),
        (4, 1, False),
        (4, 17, False),
    ],
)
def test_the_packs_that_a_manifest_names(epoch, commit_seq, is_named) -> None:
    """Epoch 3 began with commit 16 and is at 17: what older epochs placed and did not commit is none of them."""
    assert FULL.names_pack(epoch, commit_seq) is is_named


# ---- the layout document -----------------------------------------------------------------------------


def test_regions_survive_the_layout_document() -> None:
    """Every writer's region, the empty one too, in their order."""
    dims = ("y", "x")
    regions = [Region.of_box(dims, ((0, 4), (0, 6))), Region.empty(dims), Region.of_box(dims, ((4, 8), (0, 6)))]
    data = layout_bytes(3, 3, regions)
    assert (json.loads(data)["epoch"], json.loads(data)["n_writers"]) == (3, 3)
    assert parse_layout("k", data) == (3, regions)


def test_a_layout_without_regions_has_the_number_of_writers() -> None:
    """Where each writer brings its own with its token."""
    assert parse_layout("k", layout_bytes(3, 5, None)) == (5, None)


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b'{"regions":null}',
        b'{"n_writers":1}',
        b'{"n_writers":"x","regions":null}',
        b'{"n_writers":1,"regions":5}',
        b'{"n_writers":1,"regions":[{}]}',
        b'{"n_writers":1,"regions":[{"dims":["y"],"boxes":[[[2,1]]]}]}',
    ],
)
def test_a_damaged_layout_document_is_refused(data) -> None:
    """With its key."""
    with pytest.raises(FormatError, match=r"^\.mpistream/layout-3\.json: damaged: ") as caught:
        parse_layout(".mpistream/layout-3.json", data)
    assert caught.value.kind == "layout"


@given(values)
def test_no_layout_document_ends_in_another_error(value) -> None:
    """Whatever stands in the place of the regions or of one of them."""
    documents: list[dict[str, Any]] = [
        {"n_writers": value, "regions": None},
        {"n_writers": 1, "regions": value},
        {"n_writers": 1, "regions": [value]},
        {"n_writers": 1, "regions": [{"dims": ["y"], "boxes": value}]},
    ]
    for document in documents:
        try:
            parse_layout("k", dumped(document))
        except FormatError as error:
            assert error.kind in ("layout", "json")  # half a character is no JSON


# ---- floors as they once were ------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=4),
    st.tuples(st.integers(0, 12), st.integers(1, 6)),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=2),
)
def test_floors_of_a_range_are_set_back(raised, dropped, later) -> None:
    """Number by number: inside the range what `floors_inside` kept of it, elsewhere what they are now."""
    floors: tuple[tuple[int, int], ...] = ()
    for seq, (start, n) in enumerate(raised, 1):
        floors = raise_floors(floors, ((start, start + n),), seq)
    start, stop = dropped[0], sum(dropped)
    kept = floors_inside(floors, start, stop)
    now = raise_floors(floors, ((start, stop),), 50)
    for seq, (first, n) in enumerate(later, 60):
        now = raise_floors(now, ((first, first + n),), seq)
    found = set_floors(now, start, stop, kept)
    for i in range(25):
        assert floor_of(found, i) == floor_of(floors if start <= i < stop else now, i)
    assert [s for s, _ in found] == sorted({s for s, _ in found})
    assert all(a[1] != b[1] for a, b in itertools.pairwise([(0, 0), *found]))
    assert floors_inside(floors, 20, 30) == ()
    if not later:
        assert [floor_of(found, i) for i in range(25)] == [floor_of(floors, i) for i in range(25)]

"""FORMAT.md says what the code does: its examples, tables and numbers, one by one."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest

import mpistream as ms
from mpistream.arrays import check_layout
from mpistream.commit import next_manifest, recover
from mpistream.lease import Lease
from mpistream.manifest import Manifest, layout_bytes, parse_json
from mpistream.memory_store import MemoryStore
from mpistream.names import DTYPES, TIME_UNITS, check_name, fill_from_json, fill_to_json, stored_dtype
from mpistream.rounding import Rounding
from mpistream.strings import MAX_TEXT_NBYTES
from mpistream.token import CommitReceipt
from mpistream.zarr3.codecs import PROFILES, ChunkCodec, profile_chain
from mpistream.zarr3.metadata import chunk_key, make_documents, make_group_document
from mpistream.zarr3.shard import ChunkEncoder, OpenShard, ShardSpec

TEXT = (Path(ms.__file__).parent / "FORMAT.md").read_text()
TIMES = (0.0, 60.0, 120.0, 180.5)


def example(name: str) -> str:
    """Return the fenced block behind a mark."""
    (block,) = re.findall(rf"^<!-- example: {name} -->\n```\w*\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return str(block)


def table(mark: str) -> list[list[str]]:
    """Return the rows of the table that a mark stands right above, without its heading."""
    (lines,) = re.findall(rf"^{mark}\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[2:]]


def fields(name: str) -> set[str]:
    return {field for row in table(f"<!-- fields: {name} -->") for field in re.findall(r"`(\w+)`", row[0])}


def canonical(value: Any) -> bytes:
    """Return section 8.1's bytes, made by Python's json alone."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def make_schema() -> ms.StreamSchema:
    return ms.StreamSchema(
        dims={"time": None, "y": 4, "x": 6},
        time=ms.AppendTime(units="seconds since 2000-01-01"),
        variables={"temperature": ms.Variable(("time", "y", "x"), "float32", attrs={"units": "K"})},
        statics={"depth": ms.Variable(("y", "x"), "float64", fill_value=-9999.5, codec="compact")},
        coords={"y": ms.Coordinate(("y",), np.array([0.0, 10.0, 20.0, 30.0]), attrs={"units": "m"})},
        shard_shape={"time": 2, "y": 2, "x": 6},
        chunk_shape={"time": 1, "y": 2, "x": 3},
        attrs={"title": "An example"},
    )


def make_layout() -> bytes:
    return layout_bytes(2, 1, ms.decompose(make_schema(), 1))


def make_manifest() -> Manifest:
    """Return the example's state: four records in two commits, then a resume that dropped the last one."""
    schema = make_schema()
    first = layout_bytes(1, 2, ms.decompose(schema, 2))
    manifest = Manifest.first(
        store_id=f"{1:032}",
        run_id=f"{2:032}",
        epoch=1,
        schema=schema,
        layout_digest=hashlib.sha256(first).hexdigest(),
    )
    manifest = next_manifest(manifest, ((0, 2),), TIMES[:2], ["depth"])
    manifest = next_manifest(manifest, ((2, 4),), TIMES[2:], [])
    return recover(
        manifest,
        epoch=2,
        run_id=f"{3:032}",
        n_keep=3,
        last_t=TIMES[2],
        dropped_times=TIMES[3:],
        layout_digest=hashlib.sha256(make_layout()).hexdigest(),
    )


# The manifest


def test_manifest_example_is_what_the_code_writes() -> None:
    assert canonical(json.loads(example("manifest"))) == make_manifest().to_bytes()


def test_manifest_example_is_read() -> None:
    """A reader takes it, white space and all, and gives its canonical bytes back."""
    manifest = Manifest.from_bytes(example("manifest").encode())
    assert (manifest.n_records, manifest.last_t, manifest.commit_seq) == (3, 120.0, 3)
    assert manifest.to_bytes() == make_manifest().to_bytes()


def test_checksum_is_over_the_bytes_without_it() -> None:
    """Section 8.1: without parsing, it is the SHA-256 of the file without the first 78 bytes that look so."""
    assert 'without the 78 bytes `"checksum":"...",`: the first that look so' in " ".join(TEXT.split())
    pattern = rb'^(.*?)("checksum":"[0-9a-f]{64}",)(.*)$'
    receipt = {**CommitReceipt.of(make_manifest()).to_json(), "new_statics": ["checksum"], "warnings": ['"checksum":"']}
    carried = replace(make_manifest(), carried={"digest": "0" * 64, "receipt": receipt})
    store: Any = MemoryStore("attrs")
    schema = ms.StreamSchema(
        dims={"time": None, "y": 2},
        time=ms.AppendTime(units="s"),
        variables={"v": ms.Variable(("time", "y"), "int32")},
        attrs={"checksum": "f" * 64, "z": 1},
    )
    ms.write_open(store, schema).close()
    named = store.read(".mpistream/manifest.json")
    assert named.count(b'"checksum":"') == 2
    for data in (make_manifest().to_bytes(), carried.to_bytes(), named):
        ((before, found, behind),) = re.findall(pattern, data)
        assert len(found) == 78
        assert found == b'"checksum":"%b",' % hashlib.sha256(before + behind).hexdigest().encode()


def test_fields_of_the_manifest() -> None:
    """The tables name every field that is written, and no other."""
    document = json.loads(make_manifest().to_bytes())
    assert fields("manifest") == set(document)
    assert fields("schema") == set(document["schema"])
    for array in document["schema"]["arrays"]:
        assert fields("array") == set(array)
    assert set(document["dropped"][0]) == {"epoch", "start", "stop", "blob_floors"}
    assert fields("time") == set(document["schema"]["time"])


def test_unknown_fields_are_ignored() -> None:
    """Section 8.5: they change nothing, but stand under the checksum."""
    document = {**json.loads(make_manifest().to_bytes()), "later": 1}
    del document["checksum"]
    data = canonical({**document, "checksum": hashlib.sha256(canonical(document)).hexdigest()})
    assert Manifest.from_bytes(data).to_bytes() == make_manifest().to_bytes()
    with pytest.raises(ms.FormatError, match="checksum"):
        Manifest.from_bytes(data.replace(b'"later":1', b'"later":2'))


def test_fields_of_the_lease() -> None:
    lease = json.loads(Lease.of_this_process("0" * 32, 120.0).to_bytes())
    assert fields("lease") == set(lease) == {f.name for f in dataclasses.fields(Lease)}


def test_times_digest_formula() -> None:
    """Section 8.4, over the three records that are committed."""
    total = sum(
        int.from_bytes(hashlib.sha256(struct.pack("<Qd", i, t)).digest(), "big") for i, t in enumerate(TIMES[:3])
    )
    assert json.loads(example("manifest"))["times_digest"] == f"{total % 2**256:064x}"


@pytest.mark.parametrize(("name", "field"), [("fingerprint", "fingerprint"), ("coordinates", "coordinates_digest")])
def test_digest_is_over_the_example(name: str, field: str) -> None:
    """The canonical bytes of the example have the digest that the manifest holds."""
    digest = hashlib.sha256(canonical(json.loads(example(name)))).hexdigest()
    assert json.loads(example("manifest"))[field] == digest


def test_fingerprint_writes_floats_in_hexadecimal() -> None:
    fills = {a["name"]: a["fill_value"] for a in json.loads(example("fingerprint"))["arrays"]}
    assert fills == {"depth": (-9999.5).hex(), "temperature": "NaN"}


def test_digest_of_a_coordinate() -> None:
    values = struct.pack("<4d", 0.0, 10.0, 20.0, 30.0)
    digests = {a["name"]: a["digest"] for a in json.loads(example("manifest"))["schema"]["arrays"]}
    assert digests == {"temperature": None, "depth": None, "y": hashlib.sha256(values).hexdigest()}


def test_layout_example() -> None:
    assert example("layout").strip().encode() == make_layout()
    assert json.loads(example("manifest"))["layout_digest"] == hashlib.sha256(make_layout()).hexdigest()


# Documents, keys, codecs


def test_array_document() -> None:
    documents = make_documents(make_schema()).arrays(3, growing_only=False)
    assert json.loads(example("array")) == json.loads(documents["temperature/zarr.json"])


def test_group_document() -> None:
    """Its entries, left out in the text, are the arrays' documents."""
    documents = make_documents(make_schema())
    group = json.loads(documents.group(3))
    entries = group["consolidated_metadata"]["metadata"]
    arrays = {key.split("/")[0]: json.loads(d) for key, d in documents.arrays(3, growing_only=False).items()}
    assert entries == arrays
    group["consolidated_metadata"]["metadata"] = {name: {} for name in entries}
    assert json.loads(example("group")) == group


def test_document_of_an_upper_group() -> None:
    assert json.loads(example("upper group")) == json.loads(make_group_document())


def test_keys() -> None:
    rows = table("<!-- keys -->")
    assert len(rows) == 4
    for array, index, *keys in rows:
        place = [int(i) for i in index.split(",") if i]
        expected = [f"`{chunk_key(array.strip('`'), separator, place)}`" for separator in "/."]
        assert keys == expected


def test_profiles() -> None:
    dtype = np.dtype("float32")
    assert json.loads(example("profiles")) == {name: profile_chain(name, dtype) for name in PROFILES}


def test_profile_for_bool() -> None:
    """Arrays with keep_bits have its shuffle."""
    assert json.loads(example("profile for bool")) == {"fast": profile_chain("fast", np.dtype("bool"))}
    chain = profile_chain("fast", np.dtype("float32"))
    chain[1]["configuration"]["shuffle"] = "bitshuffle"
    schema = one_array(ms.Variable(("time",), "float32", keep_bits=7))
    assert list(schema.arrays["v"].chain) == chain


def test_profile_for_strings() -> None:
    assert json.loads(example("profile for strings")) == {"fast": profile_chain("fast", np.dtypes.StringDType())}
    assert profile_chain("fast", np.dtype("U9")) == profile_chain("fast", np.dtype("float32"))


def test_strings_example() -> None:
    """Its bytes are those of a chunk of the three strings, as numcodecs' own codec makes them."""
    data = hex_of(example("strings"))
    words = np.array(["a", "", "bé"], np.dtypes.StringDType())
    codec = ChunkCodec(profile_chain("none", words.dtype), words.dtype)
    assert b"".join(codec.encode(words)) == data
    assert numcodecs.VLenUTF8().decode(data[:-4]).tolist() == words.tolist()
    assert data[-4:] == crc32c_by_bits(data[:-4])


def test_dtypes_of_strings() -> None:
    """Their names in the manifest and their data types in the documents."""
    schema = ms.StreamSchema(
        dims={"time": None},
        time=ms.AppendTime(units="days since 2000-01-01"),
        variables={"v": ms.Variable(("time",), "float32")},
        coords={"s": ms.Coordinate((), "a", dtype=str), "u": ms.Coordinate((), "a", dtype="U8")},
    )
    assert [a["dtype"] for a in schema.to_json()["arrays"]] == ["float32", "string", "U8"]
    documents = {k: json.loads(d) for k, d in make_documents(schema).arrays(0, growing_only=False).items()}
    assert documents["s/zarr.json"]["data_type"] == "string"
    expected = {"name": "fixed_length_utf32", "configuration": {"length_bytes": 4 * 8}}
    assert documents["u/zarr.json"]["data_type"] == expected


def test_fill_value_attribute() -> None:
    """Section 4: base64 of a float64, of two of them, or a number."""
    given = {"float32": 0.1, "complex64": 1 - 2j, "int16": -7}
    schema = ms.StreamSchema(
        dims={"time": None},
        time=ms.AppendTime(units="days since 2000-01-01"),
        variables={d: ms.Variable(("time",), d, attrs={"_FillValue": v}) for d, v in given.items()},
    )

    def text(value: float) -> str:
        return base64.b64encode(struct.pack("<d", value)).decode()

    expected = {"float32": text(float(np.float32(0.1))), "complex64": [text(1.0), text(-2.0)], "int16": -7}
    assert {n: a.attrs["_FillValue"] for n, a in schema.arrays.items()} == expected
    assert [a.fill.item() for a in schema.arrays.values()] == [np.float32(0.1), 1 - 2j, -7]


def test_time_has_the_profile_compact() -> None:
    time = make_schema().time_array
    assert list(time.chain) == profile_chain("compact", np.dtype("float64"))
    assert (time.resolved_chunk_shape, time.dtype.name, fill_to_json(time.fill)) == ((1024,), "float64", "NaN")
    assert list(time.attrs) == ["standard_name", "axis", "units", "calendar"]


def test_dtypes() -> None:
    sentence = re.search(r"^Dtypes are (.*?)\. ", TEXT, re.DOTALL | re.MULTILINE)
    assert sentence is not None
    assert re.findall(r"`(\w+)`", sentence[1]) == list(DTYPES)
    assert {unit.strip("`"): name.strip("`") for unit, name in table("<!-- time units -->")} == TIME_UNITS


def one_array(variable: ms.Variable) -> ms.StreamSchema:
    return ms.StreamSchema(
        dims={"time": None}, time=ms.AppendTime(units="days since 2000-01-01"), variables={"v": variable}
    )


@pytest.mark.parametrize("unit", ["D", "h", "m", "s", "ms", "us", "ns"])
def test_documents_of_times(unit: str) -> None:
    """Section 7: int64, with the attributes of the table."""
    rows = dict(table("<!-- time attributes -->"))
    name = dict(table("<!-- time units -->"))[f"`{unit}`"].strip("`")
    coarse = "s" if unit in ("D", "h", "m") else unit
    assert "but `timedelta64[s]` for `D`, `h` and `m`" in rows["`timedelta64[U]`"]
    expected = {
        "datetime64": {"units": f"{name} since 1970-01-01", "calendar": "proleptic_gregorian", "_FillValue": -(2**63)},
        "timedelta64": {"units": name, "dtype": f"timedelta64[{coarse}]", "_FillValue": -(2**63)},
    }
    for kind, attributes in expected.items():
        assert re.findall(r"`(\w+)`:", rows[f"`{kind}[U]`"]) == list(attributes)
        documents = make_documents(one_array(ms.Variable(("time",), f"{kind}[{unit}]"))).arrays(3, growing_only=False)
        document = json.loads(documents["v/zarr.json"])
        assert (document["data_type"], document["fill_value"]) == ("int64", -(2**63))
        assert document["attributes"] == attributes


def test_rounding() -> None:
    """Section 7's examples, with the document that says so."""
    rows = table("<!-- rounding -->")
    assert len(rows) == 6
    for bits, value, rounded in rows:
        values = np.array([float.fromhex(value)], "float32")
        Rounding(int(bits), np.array(np.nan, "float32")).apply(values)
        assert values[0] == (np.inf if rounded == "infinity" else float.fromhex(rounded))
    documents = make_documents(one_array(ms.Variable(("time",), "float32", keep_bits=7)))
    found = {key: json.loads(d) for key, d in documents.arrays(3, growing_only=False).items()}
    assert found["v/zarr.json"]["attributes"] == {"quantization": "quantization_info", "quantization_nsb": 7}
    container = found["quantization_info/zarr.json"]
    assert (container["data_type"], container["shape"]) == ("int8", [])
    assert container["attributes"]["algorithm"] == "bitround"
    assert container["attributes"]["implementation"].startswith("mpistream version 1 ")
    assert "quantization_info" in json.loads(documents.group(3))["consolidated_metadata"]["metadata"]


def test_fill_values() -> None:
    values = {
        ("bool", "true"): True,
        ("int16", "-7"): -7,
        ("float32", "NaN"): np.nan,
        ("float64", "negative infinity"): -np.inf,
        ("float64", "0.1"): 0.1,
        ("complex64", "1 + infinity i"): complex(1.0, np.inf),
        ("datetime64[s]", "1970-01-02"): np.datetime64("1970-01-02", "s"),
        ("timedelta64[ns]", "NaT"): np.timedelta64("NaT", "ns"),
        ("string", "no name"): "no name",
        ("U8", "no name"): "no name",
    }
    rows = {
        (dtype.strip("`"), value): json.loads(text.strip("`")) for dtype, value, text in table("<!-- fill values -->")
    }
    assert list(rows) == list(values)
    for (dtype, value), text in rows.items():
        stored = stored_dtype("v", dtype)
        fill = np.array(values[dtype, value], stored)
        assert fill_to_json(fill) == text
        found = fill_from_json(stored, text)
        assert (found.dtype, repr(found)) == (stored, repr(fill))


def test_fill_value_nan_has_one_bit_pattern() -> None:
    given = np.array(0xFFC00001, np.uint32).view(np.float32)
    schema = ms.StreamSchema(
        dims={"time": None},
        time=ms.AppendTime(units="days since 2000-01-01"),
        variables={"v": ms.Variable(("time",), "float32", fill_value=given)},
    )
    assert schema.arrays["v"].fill.view(np.uint32) == 0x7FC00000


def grown_shard() -> list[bytes]:
    """Return the object of section 6 after its first and after its second record."""
    dtype = np.dtype("uint8")
    codec = ChunkCodec(profile_chain("none", dtype), dtype)
    spec = ShardSpec(shard_shape=(2, 2), chunk_shape=(1, 1), codec=codec, fill=np.zeros((), dtype))
    shard = OpenShard(ChunkEncoder(spec), (2,))
    objects = []
    for i, record in enumerate(((7, 0), (8, 9))):
        shard.put(i, np.array(record, dtype))
        objects.append(b"".join(bytes(piece) for piece in shard.finish()))
    return objects


def hex_of(block: str) -> bytes:
    return bytes.fromhex("".join(re.split(r"\s{2,}", line)[0] for line in block.splitlines()))


@pytest.mark.parametrize(("name", "i"), [("shard of one record", 0), ("shard of two records", 1)])
def test_shard_example(name: str, i: int) -> None:
    assert hex_of(example(name)) == grown_shard()[i]


@pytest.mark.parametrize(("name", "n"), [("shard of one record", 1), ("shard of two records", 2)])
def test_shard_example_is_read_by_zarr(name: str, n: int) -> None:
    """The bytes as they stand in the text, read by zarr-python as an array of so many records."""
    zarr = pytest.importorskip("zarr", reason="needs zarr")
    store: dict[str, Any] = {}
    memory = zarr.storage.MemoryStore(store)
    array = zarr.create_array(
        memory,
        shape=(n, 2),
        dtype="uint8",
        shards=(2, 2),
        chunks=(1, 1),
        compressors=[{"name": "crc32c"}],
        filters=(),
        fill_value=0,
    )
    store["c/0/0"] = zarr.core.buffer.cpu.Buffer.from_bytes(hex_of(example(name)))
    np.testing.assert_array_equal(array[:], [[7, 0], [8, 9]][:n])


# Indexed mode, blobs, tokens


def indexed_schema(separator: str = "/") -> ms.StreamSchema:
    return ms.StreamSchema(
        dims={"time": None, "y": 4},
        time=ms.IndexedTime(TIMES, units="days since 2000-01-01"),
        variables={"v": ms.Variable(("time", "y"), "int32"), "s": ms.Variable(("time",), "int32")},
        shard_shape={"time": 3, "y": 2},
        key_separator=separator,
    )


def write_indexed(store: Any, records: Sequence[int]) -> ms.StreamWriter:
    w = ms.write_open(store, indexed_schema())
    for i in records:
        w.write_record_at(i, TIMES[i], {"v": np.full(4, i, "int32"), "s": i})
    w.commit()
    return w


def test_time_in_indexed_mode() -> None:
    """Section 8.3's digest, and both places where section 8.4 puts length and digest of a fixed time dim."""
    schema = indexed_schema()
    digest = hashlib.sha256(struct.pack("<4d", *TIMES)).hexdigest()
    time = schema.to_json()["time"]
    assert fields("time") == set(time)
    assert (time["mode"], time["n_records"], time["digest"]) == ("indexed", 4, digest)
    assert schema.to_json()["dims"] == [["time", None], ["y", 4]]
    described = {
        **{name: json.loads(example("fingerprint"))[name] for name in ("time_dim", "key_separator", "calendar")},
        "dims": [["time", 4], ["y", 4]],
        "mode": "indexed",
        "units": "days since 2000-01-01",
        "times_digest": digest,
        "arrays": [
            {
                "name": name,
                "role": role,
                "dims": dims,
                "dtype": "int32",
                "units": None,
                "fill_value": 0,
                "keep_bits": None,
                "chunk_shape": chunk,
                "shard_shape": shard,
                "codecs": profile_chain("fast", np.dtype("int32")),
            }
            for name, role, dims, chunk, shard in (
                ("s", "series", ["time"], [1024], [1024]),
                ("v", "variable", ["time", "y"], [3, 2], [3, 2]),
            )
        ],
    }
    resolved = schema.with_layout({"v": ([3, 2], [3, 2])})
    assert resolved.fingerprint() == hashlib.sha256(canonical(described)).hexdigest()


def test_arrays_of_indexed_mode() -> None:
    """Section 5: all times lie there from the beginning; `committed` is what plain readers are told."""
    zarr = pytest.importorskip("zarr", reason="needs zarr")
    store: Any = MemoryStore("indexed")
    write_indexed(store, [3, 1]).close()
    document = json.loads(store.read("committed/zarr.json"))
    assert (document["shape"], document["data_type"], document["fill_value"]) == ([4], "bool", False)
    assert document["codecs"] == profile_chain("compact", np.dtype("bool"))
    assert list(document["attributes"]) == ["long_name"]
    group = json.loads(store.read("zarr.json"))["consolidated_metadata"]["metadata"]
    assert sorted(group) == ["committed", "s", "time", "v"]
    assert group["committed"] == document
    memory = zarr.storage.MemoryStore(
        {key: zarr.core.buffer.cpu.Buffer.from_bytes(store.read(key)) for key in store._objects if key[0] != "."}
    )
    root = zarr.open_group(memory, mode="r")
    np.testing.assert_array_equal(root["time"][:], TIMES)
    np.testing.assert_array_equal(root["committed"][:], [False, True, False, True])
    np.testing.assert_array_equal(root["v"][1], [1, 1, 1, 1])


def test_fields_of_indexed_mode() -> None:
    """Section 8.2 with gaps: n_records is the dim's length, and an invalidation raises the floors it touches alone."""
    store: Any = MemoryStore("indexed")
    w = write_indexed(store, [3, 1, 0])
    w.invalidate([1])
    document = ms.read_output_manifest(store)
    w.close()
    assert (document["n_records"], document["committed"]) == (4, [[0, 1], [3, 4]])
    assert (document["commit_seq"], document["last_t"]) == (2, TIMES[3])
    assert document["floors"] == [[1, 2], [2, 0]]
    total = sum(int.from_bytes(hashlib.sha256(struct.pack("<Qd", i, TIMES[i])).digest(), "big") for i in (0, 3))
    assert document["times_digest"] == f"{total % 2**256:064x}"


def crc32c_by_bits(data: bytes) -> bytes:
    """Return the CRC32C of RFC 3720, appendix B.4, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return struct.pack("<I", crc ^ 0xFFFFFFFF)


def test_pack_example_is_what_a_writer_places() -> None:
    """Section 9.7's key and bytes."""
    store: Any = MemoryStore("packs")
    w = write_indexed(store, [0])
    w.write_blob("rng", b"\xab", scope=0)
    w.write_blob("n", b"7")
    w.commit()
    assert store.list(".mpistream/blobs") == ["1-2-0"]
    assert store.read(".mpistream/blobs/1-2-0") == hex_of(example("pack"))
    w.close()


def test_pack_example_is_as_its_text_says() -> None:
    data = hex_of(example("pack"))
    n, crc = struct.unpack("<Q4s", data[-12:])
    index = data[-12 - n : -12]
    assert crc == crc32c_by_bits(index)
    entries = json.loads(index)["blobs"]
    assert [(key, scope) for key, scope, *_ in entries] == [("rng", 0), ("n", "static")]
    payloads = [data[offset : offset + nbytes] for _, _, offset, nbytes, _ in entries]
    assert payloads == [b"\xab", b"7"]
    assert [crc for *_, crc in entries] == [crc32c_by_bits(p).hex() for p in payloads]
    assert sum(map(len, payloads)) + n + 12 == len(data)


@pytest.mark.parametrize(
    ("epoch", "commit_seq", "is_committed"),
    [(1, 1, True), (1, 2, True), (1, 3, False), (2, 3, False), (2, 4, True), (2, 5, False), (3, 1, False)],
)
def test_which_pack_is_committed(epoch: int, commit_seq: int, is_committed: bool) -> None:
    """Section 9.7's rule on the example after one more commit: epoch 2 began with the manifest 3."""
    manifest = next_manifest(make_manifest(), ((3, 4),), TIMES[3:], [])
    assert (manifest.epoch, manifest.first_seq, manifest.commit_seq) == (2, 3, 4)
    assert manifest.names_pack(epoch, commit_seq) is is_committed


def test_which_blob_is_visible() -> None:
    """Section 9.7: a record's blobs go with it, and a later epoch's static key replaces that key."""
    store: Any = MemoryStore("packs")
    w = write_indexed(store, [0, 1])
    for i in range(2):
        w.write_blob("rng", b"old", scope=i)
    w.write_blob("n", b"old")
    w.write_blob("m", b"old")
    w.commit()
    w.invalidate([1])
    w.close()
    assert ms.open_reader(store).blobs() == [(0, 0, "rng"), (0, "static", "m"), (0, "static", "n")]
    with ms.write_resume(store) as w:
        w.write_record_at(1, TIMES[1], {"v": np.full(4, 1, "int32"), "s": 1})
        w.write_blob("n", b"new")
    reader = ms.open_reader(store)
    assert reader.blobs() == [(0, 0, "rng"), (0, "static", "m"), (0, "static", "n")]
    assert (reader.read_blob("n"), reader.read_blob("m")) == (b"new", b"old")


def test_packs_are_counted() -> None:
    """Section 9.7: one of them is missing iff fewer lie there than the manifest says."""
    store: Any = MemoryStore("packs")
    w = write_indexed(store, [0, 1])
    w.write_blob("rng", b"1", scope=0)
    w.commit()
    w.write_blob("rng", b"2", scope=1)
    w.close()
    assert ms.read_output_manifest(store)["n_packs"] == 2
    store.delete(".mpistream/blobs/1-2-0")
    with pytest.raises(ms.FormatError, match="1 packs of committed blobs, the manifest counts 2"):
        ms.read_blob(store, "rng", 1)


def test_a_restore() -> None:
    """Section 11: what `dropped` names is committed again, `floors` rise, `blob_floors` are as before the drop."""
    store: Any = MemoryStore("restored")
    w = write_indexed(store, [0, 1, 2])
    w.commit()
    w.invalidate([1])
    w.write_record_at(1, TIMES[1], {"v": np.full(4, 1, "int32"), "s": 1})
    w.close()
    before = ms.read_output_manifest(store)
    assert before["floors"] == before["blob_floors"] == [[1, 2], [2, 0]]
    ms.write_resume(store, at=TIMES[0]).close()
    dropped = ms.read_output_manifest(store)
    assert dropped["dropped"] == [{"epoch": 2, "start": 1, "stop": 3, "blob_floors": [[1, 2], [2, 0]]}]
    assert dropped["floors"] == dropped["blob_floors"] == [[1, 4], [3, 0]]
    ms.repair(store, restore_dropped=True)
    after = ms.read_output_manifest(store)
    changed = {"epoch": 3, "run_id": after["run_id"], "commit_seq": 6, "first_seq": 5, "floors": [[1, 6], [3, 0]]}
    left_out = {"checksum": after["checksum"], "layout_digest": after["layout_digest"]}
    assert after == {**before, **changed, **left_out}


def test_tokens_and_carried(tmp_path: Path) -> None:
    """Section 9.8's fields, a layout without regions, and section 8.2's digest of what a caller carried."""
    url = tmp_path / "run.zarr"
    parts = [
        ms.write_open_part(url, make_schema(), writer=i, n_writers=2, region={"y": (2 * i, 2 * i + 2), "x": (0, 6)})
        for i in range(2)
    ]
    layout = (url / ".mpistream" / "layout-1.json").read_bytes()
    assert layout == canonical({"epoch": 1, "n_writers": 2, "regions": None})
    tokens = []
    for part in parts:
        part.write_record(0.0, {"temperature": 1.0})
        tokens.append(part.flush().to_json())
        assert fields("token") == set(tokens[-1])
        assert (tokens[-1]["records"], tokens[-1]["times"]) == (((0, 1),), (0.0,))
        part.close()
    receipt = ms.commit_tokens(url, tokens[::-1])
    carried = ms.read_output_manifest(url)["carried"]
    assert set(carried) == {"digest", "receipt"}
    assert carried["digest"] == hashlib.sha256(canonical(tokens)).hexdigest()
    assert carried["receipt"] == json.loads(json.dumps(receipt.to_json()))


# The folder


def described_below(folder: str) -> list[str]:
    """Return what section 2 draws below a folder, as regular expressions."""
    tree = TEXT[TEXT.index("run.zarr/\n") :].split("```")[0]
    indent = 4 if folder else 2
    lines = tree.split("  .mpistream/\n")[1 if folder else 0].splitlines()
    words = [w for line in lines if line.startswith(" " * indent) for w in re.split(r"\s{4,}", line.strip())[0].split()]
    return [
        re.sub(r"<\w+>", "[^/]+", re.escape(w).replace(r"\.\.\.", ".+")) + (".*" if w.endswith("/") else "")
        for w in words
    ]


class WatchedStore(MemoryStore):
    """A store that remembers every key there ever was."""

    def __init__(self) -> None:
        super().__init__("watched")
        self.seen: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in ("create", "stage", "place", "move", "copy", "delete_tree"):
            self.seen.update(self._objects)
        return super().__getattribute__(name)


@pytest.mark.parametrize("separator", ["/", "."])
def test_section_2_names_every_file(separator: str) -> None:
    """Whatever there is while a store is made, grows, loses records to a resume and is replaced is drawn there."""
    schema = ms.StreamSchema(
        dims={"time": None, "y": 4},
        time=ms.AppendTime(units="days since 2000-01-01"),
        variables={"v": ms.Variable(("time", "y"), "int32"), "s": ms.Variable(("time",), "int32")},
        statics={"n": ms.Variable((), "int32"), "d": ms.Variable(("y",), "int32")},
        shard_shape={"time": 3, "y": 2},
        key_separator=separator,
    )
    store: Any = WatchedStore()
    w = ms.write_open(store, schema)
    w.write_static("n", 1)
    w.write_blob("b", b"1")
    for i in range(8):
        w.write_record(i, {"v": np.full(4, i, "int32"), "s": i})
        w.commit()
    ms.write_resume(store, at=3.0, takeover=True).close()
    with pytest.raises(ms.FencedError):
        w.close()
    ms.write_open(store, schema, overwrite=True).close()
    with ms.write_open(store, indexed_schema(separator), overwrite=True) as w:
        w.write_record_at(2, TIMES[2], {"v": 1, "s": 1})
    ours = {key.removeprefix(".mpistream/") for key in store.seen if key.startswith(".mpistream/")}
    theirs = {key for key in store.seen if not key.startswith(".mpistream/")}
    assert unmatched(ours, described_below(".mpistream")) == []
    # The tree shows the separator "/" only, see section 3, and no array without dims.
    assert unmatched({re.sub(r"/c\.(?=[\d.]+$)", "/c/", key) for key in theirs}, described_below("")) == ["n/c"]
    drawn = {re.match(r"\w+", pattern)[0] for pattern in described_below(".mpistream")}  # type: ignore[index]
    assert {re.match(r"[a-z]+", key)[0] for key in ours} == drawn  # type: ignore[index]


def unmatched(names: set[str], patterns: Sequence[str]) -> list[str]:
    return sorted(n for n in names if not any(re.fullmatch(p, n) for p in patterns))


# Choices within Zarr, and what goes beyond it


def test_choices_within_zarr(tmp_path: Path) -> None:
    """Section 14's list, as far as documents and the folder show it."""
    sections = set(re.findall(r"^## (\d+)\.", TEXT, re.MULTILINE))
    assert {row[1] for row in table("<!-- zarr -->")} <= sections
    with ms.write_open(tmp_path / "s", make_schema()):
        pass
    documents = {p.parent.name: json.loads(p.read_text()) for p in (tmp_path / "s").glob("*/zarr.json")}
    assert documents.keys() == {"time", "temperature", "depth", "y"}
    group = json.loads((tmp_path / "s/zarr.json").read_text())
    assert group.keys() == {"zarr_format", "node_type", "attributes", "consolidated_metadata"}
    assert group["consolidated_metadata"]["must_understand"] is False
    assert not list((tmp_path / "s/.mpistream").rglob("zarr.json"))
    for document in documents.values():
        assert document.keys() == {
            *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value"),
            *("codecs", "attributes", "storage_transformers", "dimension_names"),
        }
        assert (document["storage_transformers"], document["chunk_key_encoding"]["name"]) == ([], "default")
        chain = document["codecs"]
        if chain[0]["name"] == "sharding_indexed":
            (sharding,) = (c["configuration"] for c in chain)
            assert sharding["index_location"] == "end"
            assert [c["name"] for c in sharding["index_codecs"]] == ["bytes", "crc32c"]
            chain = sharding["codecs"]
        names = [c["name"] for c in chain]
        assert (names[0], names[-1], len(names) <= 3) == ("bytes", "crc32c", True)


# Limits


def limit(what: str) -> int:
    (row,) = [r for r in table("<!-- limits -->") if r[0].startswith(what)]
    return int(row[1].split()[0])


@pytest.mark.parametrize(("what", "is_shard"), [("inner chunk", False), ("shard", True)])
def test_limits_of_chunks_and_shards(what: str, is_shard: bool) -> None:
    """The number in the text is the last that is accepted."""
    n = limit(what)
    for length in (n, n + 1):
        shapes = ([length], [None]) if is_shard else ([None], [length])
        if length == n:
            check_layout("v", ["x"], 1, *shapes)
        else:
            with pytest.raises(ms.SchemaError, match=str(n)):
                check_layout("v", ["x"], 1, *shapes)


def test_limit_of_inner_chunks() -> None:
    n = limit("index of a shard")
    check_layout("v", ["x", "y"], 1, [n // 4, 4], [1, 1])
    with pytest.raises(ms.SchemaError, match=f"has {n + 4} inner chunks .* at most {n} are possible"):
        check_layout("v", ["x", "y"], 1, [n // 4 + 1, 4], [1, 1])


def test_limit_of_shards() -> None:
    n = limit("array with time")

    def laid_out(n_shards: int) -> ms.StreamSchema:
        schema = ms.StreamSchema(
            dims={"time": None, "x": n_shards},
            time=ms.AppendTime(units="s"),
            variables={"v": ms.Variable(("time", "x"), "int8")},
        )
        return schema.with_layout({"v": ((1, 1), (1, 1))})

    assert laid_out(n).is_resolved
    with pytest.raises(ms.SchemaError, match=f"{n + 1} shards of .* at most {n} are possible"):
        laid_out(n + 1)


def test_limit_of_documents() -> None:
    n = limit("manifest")
    assert parse_json("key", b'{"a":1}'.ljust(n)) == {"a": 1}
    with pytest.raises(ms.FormatError, match=f"{n + 1} bytes, at most {n} are read"):
        parse_json("key", b'{"a":1}'.ljust(n + 1))


def test_limit_of_strings() -> None:
    """Each string counts with four bytes more; what a chunk claims may have the number in front besides."""
    n = limit("strings of an array")
    assert n == MAX_TEXT_NBYTES
    codec = ChunkCodec(
        [{"name": "vlen-utf8"}, {"name": "zstd", "configuration": {"level": 1}}], np.dtypes.StringDType()
    )
    for nbytes, message in ((n + 4, "it claims 0 strings"), (n + 5, f"at most {n + 4} are read")):
        with pytest.raises(ms.FormatError, match=message):
            codec.decode(bytes(numcodecs.Zstd().encode(bytes(nbytes))), (1,))


def test_limit_of_names() -> None:
    n = limit("name")
    assert check_name("dim", "x" * n) == "x" * n
    with pytest.raises(ms.SchemaError, match=f"at most {n}"):
        check_name("dim", "x" * (n + 1))


def test_limit_of_the_manifest() -> None:
    n = limit("manifest")
    with pytest.raises(ms.FormatError, match=f"at most {n} are read"):
        Manifest.from_bytes(b" " * (n + 1))
    with pytest.raises(ms.FormatError, match="not valid JSON"):
        Manifest.from_bytes(b" " * n)


def test_limit_of_records_a_chunk_and_of_coordinates() -> None:
    from mpistream.arrays import coordinate_chunks

    assert limit("records") == make_schema().time_array.resolved_chunk_shape[0]
    n = limit("chunk of a")
    assert coordinate_chunks((n,), 1) == (n,)
    assert coordinate_chunks((n + 1,), 1) == (n,)
    assert coordinate_chunks((3, n // 2), 1) == (2, n // 2)

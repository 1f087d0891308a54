"""Write the golden stores:  python -m tests.data.make_golden [--anew]

They lie beside this file, under ``golden``, and stay: a store that was released is never written again, and every later
version has to read it (`tests/conformance/test_golden.py`). What is there is left alone, unless ``--anew`` is given,
which is for formats that nobody has yet. Apart from the versions of the codecs, the bytes depend on this file alone.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import mpistream as ms
from tests.support.golden import CASES, FOLDER, LOCATIONS, Golden, payload

# Nothing waits, and no thread changes the order in which things are done.
OPTIONS = ms.Options(durability="none", threads=0)


def write(w: ms.StreamWriter, case: Golden, records: range | list[int]) -> None:
    """Write some records with their blobs."""
    for i in records:
        if case.is_indexed:
            w.write_record_at(i, case.times[i], case.record(i, w.region))
        else:
            w.write_record(case.times[i], case.record(i, w.region))
        put_blobs(w, case, i)


def put_blobs(w: ms.StreamWriter, case: Golden, scope: int | str, writer: int = 0) -> None:
    """Write the blobs of one scope and writer."""
    for key, its_scope, its_writer in case.blobs:
        if (its_scope, its_writer) == (scope, writer):
            w.write_blob(key, payload(key, scope, writer), scope)


def rows_of_one(url: Path, case: Golden) -> None:
    with ms.write_open(url, case.schema(), options=OPTIONS) as w:
        for i in range(3):
            write(w, case, [i])
            w.commit()


def rows_of_four(url: Path, case: Golden) -> None:
    with ms.write_open(url, case.schema(), options=OPTIONS) as w:
        for records in (range(3), range(3, 4), range(4, 6)):
            write(w, case, records)
            w.commit()


def indexed(url: Path, case: Golden) -> None:
    with ms.write_open(url, case.schema(), options=OPTIONS) as w:
        write(w, case, [5, 0])
        w.commit()
        write(w, case, [1, 3])
        w.commit()
        w.invalidate([0, 1])
        write(w, case, [0])


def blobs_and_statics(url: Path, case: Golden) -> None:
    with ms.write_open(url, case.schema(), options=OPTIONS) as w:
        for name in (*case.statics, "lat"):
            w.write_static(name, case.block(name, w.region))
        put_blobs(w, case, "static")
        write(w, case, range(3))
        w.commit()
        w.write_record(case.times[3] + 100, case.record(7, w.region))
        w.write_blob("step", b"of a record that is dropped", 3)
    with ms.write_resume(url, at=case.times[2], options=OPTIONS) as w:
        write(w, case, [3])


def parts(url: Path, case: Golden) -> None:
    opened = [ms.write_open_part(url, case.schema(), writer=i, n_writers=2, options=OPTIONS) for i in range(2)]
    for records in (range(2), range(2, 3)):
        for i, part in enumerate(opened):
            if records.start == 0:
                part.write_static("topo", case.block("topo", part.region))
            for record in records:
                part.write_record(case.times[record], case.record(record, part.region))
                put_blobs(part, case, record, writer=i)
        ms.commit_tokens(url, [part.flush() for part in opened])
    for part in opened:
        part.close()


def dtypes(url: Path, case: Golden) -> None:
    with ms.write_open(url, case.schema(), options=OPTIONS) as w:
        for name in (*case.statics, "start"):
            w.write_static(name, case.block(name, w.region))
        write(w, case, range(3))


def locations(url: Path) -> None:
    w = ms.write_open(url, LOCATIONS.schema(), options=OPTIONS)
    assert isinstance(w, ms.LocationSeriesWriter)
    for some in ((3, 0), (1,)):
        for i in some:
            w.write_location(i, LOCATIONS.series(i))
        w.commit()
    w.close(partial=True)


MAKERS: dict[str, Callable[[Path, Golden], None]] = {
    "rows-of-one": rows_of_one,
    "rows-of-four": rows_of_four,
    "indexed": indexed,
    "blobs-and-statics": blobs_and_statics,
    "parts": parts,
    "dtypes": dtypes,
}


def make(folder: Path) -> list[str]:
    """Write the stores that a folder lacks; return their names."""
    missing = [name for name in (*CASES, "locations") if not (folder / f"{name}.zarr").exists()]
    for name in missing:
        url = folder / f"{name}.zarr"
        numbers = itertools.count()

        def urandom(n: int, name: str = name, numbers: itertools.count[int] = numbers) -> bytes:
            return hashlib.sha256(f"{name} {next(numbers)}".encode()).digest()[:n]

        with mock.patch("os.urandom", urandom):
            if name in CASES:
                MAKERS[name](url, CASES[name])
            else:
                locations(url)
        # It tells of the process that wrote, and is not needed once that has ended.
        (url / ".mpistream" / "lease").unlink()
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden stores that are missing.")
    parser.add_argument("--anew", action="store_true", help="remove those that are there first")
    if parser.parse_args().anew:
        shutil.rmtree(FOLDER, ignore_errors=True)
    for name in make(FOLDER):
        print(f"{FOLDER / name}.zarr")


if __name__ == "__main__":
    main()

"""The text of documents, rendered once and cut where the number of records stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpistream.zarr3.metadata import Documents

# Whatever a user writes into attributes must not be taken for a place where text is cut.
ATTRS: dict[str, Any] = {"shape": [0, 0], "title": '0 {} "shape": [\n    0', "consolidated_metadata": {"metadata": {}}}
GROUP = {"attributes": ATTRS, "zarr_format": 3, "node_type": "group"}
ARRAYS: dict[str, dict[str, Any]] = {
    "u": {"shape": [0, 10, 20], "attributes": ATTRS, "fill_value": 0},
    "time": {"attributes": {}, "shape": [0], "fill_value": "NaN"},
    "a 0 {}": {"shape": [0, 4], "attributes": ATTRS},
}


@pytest.mark.parametrize("growing", [[], ["u"], ["time", "u"], ["a 0 {}", "time", "u"]])
@pytest.mark.parametrize("n", [0, 7, 1_000_000])
def test_only_first_lengths_change(growing: list[str], n: int) -> None:
    """A document is the given one, with the number of records as the first length of what grows."""
    documents = Documents(GROUP, ARRAYS, growing)
    expected = {name: {**d, "shape": [n, *d["shape"][1:]]} if name in growing else d for name, d in ARRAYS.items()}
    group = json.loads(documents.group(n))
    consolidated = group.pop("consolidated_metadata")
    assert (group, consolidated) == (GROUP, {"kind": "inline", "must_understand": False, "metadata": expected})
    assert list(consolidated["metadata"]) == sorted(ARRAYS)
    all_of_them = {k: json.loads(v) for k, v in documents.arrays(n, growing_only=False).items()}
    assert all_of_them == {f"{name}/zarr.json": d for name, d in expected.items()}
    assert sorted(documents.arrays(n, growing_only=True)) == [f"{name}/zarr.json" for name in sorted(growing)]


def test_the_text_is_indented_throughout() -> None:
    """People read these documents: the text is what json.dumps gives for the whole, but for the order of keys."""
    text = Documents(GROUP, ARRAYS, ["time", "u"]).group(3).decode()
    assert text == json.dumps(json.loads(text), indent=2)

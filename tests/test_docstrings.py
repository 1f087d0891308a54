"""The form of the docstrings of everything public.

Public is what ``mpistream.__all__`` names, and the classes of ours that public calls return.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import mpistream

KINDS = ("Collective.", "Logically collective.", "Not collective.")

# First words that a third person or a noun would have; words of the imperative that end like it.
IMPERATIVES_IN_S = {"Pass", "Process", "Discuss", "Compress", "Address", "Access", "Express", "Focus"}


@dataclass(frozen=True)
class Call:
    """A public function or method."""

    name: str
    function: Callable[..., Any]

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.function) or ""

    @property
    def parameters(self) -> list[str]:
        return [p for p in inspect.signature(self.function).parameters if p not in ("self", "cls")]


def is_ours(value: object) -> bool:
    return getattr(value, "__module__", "").split(".")[0] == "mpistream"


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public attributes that a class of ours defines, in its own body or a base of ours."""
    for base in cls.__mro__:
        if is_ours(base):
            yield from ((name, value) for name, value in vars(base).items() if not name.startswith("_"))


def returned_classes(function: Callable[..., Any]) -> Iterator[type]:
    """Yield the classes of ours that the return annotation names."""
    for word in re.findall(r"\w+", str(inspect.signature(function).return_annotation)):
        value = getattr(inspect.unwrap(function), "__globals__", {}).get(word)
        if isinstance(value, type) and is_ours(value):
            yield value


def collect() -> tuple[dict[str, type], dict[str, Call], dict[str, Any]]:
    """Return public classes, calls and properties by name."""
    classes: dict[str, type] = {}
    calls: dict[str, Call] = {}
    properties: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [(n, getattr(mpistream, n)) for n in mpistream.__all__]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, type) and value not in classes.values():
            classes[name] = value
            waiting += [(f"{name}.{attribute}", method) for attribute, method in methods_of(value)]
        elif isinstance(value, property):
            properties[name] = value
        elif isinstance(value, staticmethod | classmethod):
            waiting.append((name, value.__func__))
        elif inspect.isfunction(value) and is_ours(value):
            calls[name] = Call(name, value)
            waiting += [(cls.__name__, cls) for cls in returned_classes(value)]
    return classes, calls, properties


CLASSES, CALLS, PROPERTIES = collect()
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def summary(doc: str | None) -> str:
    return (doc or "").split("\n\n")[0].strip()


@pytest.mark.parametrize("name", [*CLASSES, *CALLS, *PROPERTIES])
def test_summary_is_a_sentence(name: str) -> None:
    """The summary is there, is one paragraph, and ends with a full stop."""
    value = CLASSES.get(name) or PROPERTIES.get(name) or CALLS[name].function
    # A dataclass without a docstring gets its own signature for one.
    assert not summary(inspect.getdoc(value)).startswith(f"{name}(")
    assert summary(inspect.getdoc(value)).endswith(".")


@each_call
def test_summary_is_in_the_imperative(call: Call) -> None:
    first = summary(call.doc).split(" ")[0]
    assert re.fullmatch(r"[A-Z][a-z]+,?", first), f"{call.name} begins with {first!r}"
    assert not first.endswith("s") or first in IMPERATIVES_IN_S, f"{call.name} begins with {first!r}"
    assert first not in {"This", "The", "A", "An"}


@each_call
def test_says_whether_it_is_collective(call: Call) -> None:
    """Exactly one line of the docstring is one of the three kinds."""
    kinds = [line for line in call.doc.splitlines() if line in KINDS]
    assert len(kinds) == 1, f"{call.name} needs one of the lines {', '.join(KINDS)}"


@each_call
def test_parameters_are_documented(call: Call) -> None:
    """Two parameters or more: each has its entry, and none is invented."""
    documented = documented_parameters(call.doc)
    if len(call.parameters) < 2 and not documented:
        return
    assert sorted(documented) == sorted(call.parameters)


def documented_parameters(doc: str) -> list[str]:
    """Return the names of a numpydoc section Parameters."""
    found = re.search(r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n-+$|\Z)", doc, re.DOTALL | re.MULTILINE)
    if found is None:
        return []
    entries = [line for line in found[1].splitlines() if line and not line.startswith(" ")]
    return [name.strip(" *") for entry in entries for name in entry.split(" :")[0].split(",")]


def test_documented_parameters_of_an_example() -> None:
    doc = "Do it.\n\nParameters\n----------\na, b\n    Text.\n*c : int\n    Text.\n\nRaises\n------\nE\n"
    assert documented_parameters(doc) == ["a", "b", "c"]

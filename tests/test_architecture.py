"""The import rule, the pure rooms, and the size of files and functions, read from the source with ``ast``."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mpistream"

# The layers, lowest first. A module may import those of the rows above its own, and those to its left.
LAYERS = """
    _version  errors  zarr3  together  refresher  progress
    strings  names  times  block  rounding  tiling  ranges  options  cores
    local_store  store  memory_store  comm  agreement
    walltime  preemption
    zarr3.codecs  zarr3.shard  zarr3.splice  zarr3.extract
    description  region  grid  indices  assigning  rearrange  arrays  cf  schema
    locations
    layout  manifest  blobs  node  holding  netcdf  selection
    zarr3.metadata  zarr3.snapshot  zarr3.document
    shard_reads  array_reader  foreign  netcdf_file
    token  epoch  decomposition  plan  commit
    fence  lease  stats  pipeline  staged  staging  publishing  lent  rows  series  location_rows  recovery  hierarchy
    rank_writer  location_rank_writer  record  mover
    owner
    reader
    committing  indexing  opening  creating  resuming  repairing  carrying
    parallel  location_writer  several  session  location_series  parts  checkpoints  exporting  hdf5
    checks  inspection  verifying
    __init__
    info  compare  benchmarking
    testing  watching  plotting
    cli  cli.terminal
    cli.bench  cli.commit  cli.diff  cli.export  cli.info  cli.ls  cli.plan  cli.plot  cli.repair
    cli.truncate  cli.verify  cli.watch
    cli.verbs
    __main__
"""
ORDER = LAYERS.split()

# No I/O, no clock, no thread, no MPI: tested without disk, and to the last branch.
PURE = {
    "arrays",
    "assigning",
    "blobs",
    "block",
    "cf",
    "commit",
    "decomposition",
    "description",
    "epoch",
    "errors",
    "grid",
    "holding",
    "indices",
    "layout",
    "locations",
    "manifest",
    "names",
    "netcdf",
    "node",
    "plan",
    "ranges",
    "rearrange",
    "region",
    "rounding",
    "schema",
    "selection",
    "strings",
    "tiling",
    "times",
    "token",
    "zarr3.codecs",
    "zarr3.document",
    "zarr3.extract",
    "zarr3.shard",
    "zarr3.splice",
}
IMPURE_PACKAGES = {
    *("os", "io", "time", "threading", "multiprocessing", "subprocess", "socket", "shutil", "tempfile"),
    *("asyncio", "concurrent", "select", "signal", "mpi4py", "zarr", "h5py"),
}
IMPURE_CALLS = {"open", "print", "input"}

# Heavy or optional packages: never imported when the module is, so that `import mpistream` loads none.
# Package -> the modules that may import it inside a function; empty: every module may.
LOCAL_IMPORTS: dict[str, set[str]] = {
    "mpi4py": {"comm"},
    "zarr": set(),
    "h5py": set(),
    "xarray": {"reader"},
    "subprocess": {"walltime"},
    "typer": set(),
    "rich": set(),
    "matplotlib": set(),
}
# The exceptions: module -> what it loads at once. Such a module is itself imported inside functions only.
LOADS_AT_IMPORT = {
    "zarr3.snapshot": {"zarr"},  # its store is a subclass of one of zarr's
    # One module a verb; all of them are loaded by the command line.
    **{module: {"typer", "rich"} for module in ORDER if module.startswith("cli.")},
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # without its docstring
# "file" or "file:function" -> why it may be longer.
LONGER: dict[str, str] = {
    "mpistream/manifest.py": "one document; a third of it is its names, another its documentation",
    "mpistream/commit.py": "one decision; a third of it is its documentation",
    "mpistream/rank_writer.py": "one class; a quarter of it is its documentation",
    "mpistream/parallel.py": "the writer that users see; half of it is their documentation",
    "mpistream/schema.py": "one class; a quarter of it is its documentation",
    "mpistream/local_store.py": "one store; a quarter of it is why each call is as it is",
    "mpistream/zarr3/codecs.py": "one chain of codecs, both ways; a third of it is its documentation",
    "mpistream/pipeline.py": "one pool; a third of it is its documentation",
    "mpistream/comm.py": "the one room that speaks MPI; a quarter of it is its documentation",
    "mpistream/zarr3/shard.py": "one format; a third of it is its documentation",
    "mpistream/agreement.py": "one protocol; a third of it is its documentation",
    "mpistream/arrays.py": "one class and the checks that make it; a third of it is its documentation",
    "mpistream/reader.py": "the reader that users see; a third of it is their documentation",
}


@dataclass(frozen=True)
class Import:
    """One imported name: ``from a.b import c`` is ``a.b.c``."""

    target: str
    line: int
    is_local: bool


def module_name(path: Path) -> str:
    """Return ``zarr3.codecs`` for ``mpistream/zarr3/codecs.py``, ``zarr3`` for a package below ours."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in SOURCES.items()}
each_module = pytest.mark.parametrize("module", SOURCES)


def imports_of(module: str) -> Iterator[Import]:
    """Yield every import of a module, those under TYPE_CHECKING and inside functions too."""

    def visit(node: ast.AST, is_local: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, is_local)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    yield Import(f"{child.module}.{alias.name}", child.lineno, is_local)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from visit(child, is_local or is_function)

    yield from visit(TREES[module], is_local=False)


def own_target(target: str) -> str | None:
    """Return the module of ours that ``target`` names or stands in, None if it is none of ours."""
    package, *rest = target.split(".")
    if package != "mpistream":
        return None
    while rest and ".".join(rest) not in SOURCES:
        rest.pop()
    return ".".join(rest) or "__init__"


def where(module: str, line: int) -> str:
    return f"{SOURCES[module].relative_to(ROOT)}:{line}"


@each_module
def test_module_is_placed_in_a_layer(module: str) -> None:
    assert module in ORDER, f"place {module} in LAYERS of {Path(__file__).name}, and in PURE if it is"


def test_lists_name_existing_modules() -> None:
    """What is listed exists: a renamed module must not leave a hole in a rule."""
    assert sorted(set(ORDER) - set(SOURCES)) == []
    assert sorted(PURE - set(SOURCES)) == []
    assert len(ORDER) == len(set(ORDER))


@each_module
def test_imports_run_down(module: str) -> None:
    below = set(ORDER[: ORDER.index(module)])
    wrong = [
        f"{where(module, i.line)}: {module} imports {target}, which does not stand below it"
        for i in imports_of(module)
        if (target := own_target(i.target)) is not None and target not in below
    ]
    assert wrong == []


@each_module
def test_only_what_is_heavy_is_imported_inside_functions(module: str) -> None:
    wrong = []
    for i in imports_of(module):
        package = i.target.split(".")[0]
        if not i.is_local or own_target(i.target) in LOADS_AT_IMPORT:
            continue
        allowed = LOCAL_IMPORTS.get(package)
        if allowed is None:
            wrong.append(f"{where(module, i.line)}: import {i.target} at the top")
        elif allowed and module not in allowed:
            wrong.append(f"{where(module, i.line)}: only {', '.join(sorted(allowed))} may import {package}")
    assert wrong == []


@each_module
def test_what_is_heavy_is_not_loaded_with_the_module(module: str) -> None:
    loaded = LOADS_AT_IMPORT.get(module, set())
    heavy = set(LOCAL_IMPORTS) - loaded
    allowed = type_checking_lines(module)
    wrong = [
        f"{where(module, i.line)}: import {i.target} inside the function that needs it"
        for i in imports_of(module)
        if not i.is_local and i.line not in allowed
        if i.target.split(".")[0] in heavy or not LOADS_AT_IMPORT.get(own_target(i.target) or "", set()) <= loaded
    ]
    assert wrong == []


def type_checking_lines(module: str) -> set[int]:
    """Return the lines under ``if TYPE_CHECKING``."""
    return {
        line
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_rooms_do_no_io(module: str) -> None:
    wrong = [
        f"{where(module, i.line)}: a pure room imports {i.target}"
        for i in imports_of(module)
        if i.target.split(".")[0] in IMPURE_PACKAGES or (own_target(i.target) or "errors") not in PURE
    ]
    wrong += [
        f"{where(module, node.lineno)}: a pure room calls {node.func.id}"
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS
    ]
    assert wrong == []


def test_coverage_is_demanded_of_the_pure_rooms() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    measured = settings["tool"]["coverage"]["report"]["include"]
    assert measured == [f"mpistream/{module.replace('.', '/')}.py" for module in sorted(PURE)]


@each_module
def test_only_comm_knows_mpi(module: str) -> None:
    """No import of mpi4py, nor a look for it in ``sys.modules``, outside `comm`; prose may name it."""
    if module == "comm":
        return
    wrong = [where(module, i.line) for i in imports_of(module) if i.target.split(".")[0] == "mpi4py"]
    wrong += [
        where(module, node.lineno)
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Constant) and node.value in ("mpi4py", "mpi4py.MPI")
    ]
    assert wrong == []


@each_module
def test_files_and_functions_are_short(module: str) -> None:
    name = str(SOURCES[module].relative_to(ROOT))
    sizes = {name: (len(SOURCES[module].read_text().splitlines()), MAX_FILE_LINES)}
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            sizes[f"{name}:{node.name}"] = (function_lines(node), MAX_FUNCTION_LINES)
    too_long = [
        f"{what} has {n} lines, at most {limit}: split it, or say in LONGER why not"
        for what, (n, limit) in sizes.items()
        if n > limit and what not in LONGER
    ]
    assert too_long == []
    no_longer = [what for what, (n, limit) in sizes.items() if n <= limit and what in LONGER]
    assert no_longer == [], "take it out of LONGER"


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    n = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        n -= (first.end_lineno or first.lineno) - first.lineno + 1
    return n

"""The rooms of the house are layers: an import points downwards, and no two rooms know each other.

A room is a folder of the package, or a module at its top. Imports for type checkers count like others: a room that
needs the shape of something above it says so with a protocol of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "laplace"

LAYERS: tuple[tuple[str, ...], ...] = (  # lowest first; rooms of one layer do not import each other
    ("errors", "_version"),
    ("checks", "budget"),
    ("keywords",),
    ("distributed",),
    ("linalg",),
    ("predictive",),
    ("likelihoods",),
    ("curvature",),
    ("network",),
    ("weights",),
    ("backprop",),
    ("structures",),
    ("priors",),
    ("posterior",),
    ("spec",),
    ("inference",),
    ("decisions", "rivals", "serving"),
    ("evaluation",),
    ("tuning",),
    ("checkpoints",),
    ("conformal",),
    ("laplace",),
    ("online", "preview", "comparison", "layers", "testing"),
    ("integrations",),
    ("compat",),
    ("utils", "baselaplace", "lllaplace", "subnetlaplace", "marglik_training"),  # where laplace-torch has its names
    ("__init__",),
    ("demo", "commands"),
    ("cli",),
)
DOORS = {f"curvature.{name}" for name in ("asdfghjkl", "asdl", "backpack", "curvature", "curvlinops")}
"""Modules at paths of laplace-torch inside a room of ours. They re-export names of compat, and belong above it."""
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def modules(package: Path) -> dict[str, Path]:
    """All modules by their dotted name within the package; the package itself is '__init__'."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
        found[".".join(parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, wherever in it and for whatever reason."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: write absolute imports")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "laplace":
            base = node.module.removeprefix("laplace").removeprefix(".")
            for alias in node.names:
                full = f"{base}.{alias.name}" if base else alias.name
                yield full if full in known else base or "__init__"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "laplace":
                    yield alias.name.removeprefix("laplace").removeprefix(".") or "__init__"


def room(module: str) -> str:
    return "utils" if module in DOORS else module.split(".")[0]


def upward(package: Path) -> list[str]:
    """Imports that do not point to a lower layer."""
    known = modules(package)
    pairs = [(name, target) for name, path in sorted(known.items()) for target in imported(path, known)]
    unknown = sorted({room(name) for name in known} - LEVEL.keys())
    assert not unknown, f"rooms in no layer: {unknown}"
    return [
        f"{name} imports {target}"
        for name, target in pairs
        if room(name) != room(target) and LEVEL[room(target)] >= LEVEL[room(name)]
    ]


def test_imports_point_downwards():
    assert upward(PACKAGE) == []


def test_a_door_holds_nothing_but_imports_from_compat_and_the_list_of_them():
    known = modules(PACKAGE)
    assert known.keys() >= DOORS
    doors = [name for name in known if room(name) in ("utils", "baselaplace", "lllaplace", "subnetlaplace")]
    for name in doors:
        kinds = {type(node) for node in ast.parse(known[name].read_text()).body}
        assert kinds == {ast.Expr, ast.ImportFrom, ast.Assign}, name
        assert {target.split(".")[0] for target in imported(known[name], known)} == {"compat"}, name


def test_only_compat_and_its_doors_know_names_of_laplace_torch():
    known = modules(PACKAGE)
    outside = [n for n in known if room(n) not in ("compat", "utils", "baselaplace", "lllaplace", "subnetlaplace")]
    names = ("KronLLLaplace", "CurvlinopsGGN", "FeatureExtractor", "functional_variance_fast", "assemble_full_samples")
    found = {(n, name) for n in outside for name in names if name in known[n].read_text() and n != "__init__"}
    assert found == set()


def test_every_room_of_the_list_is_there():
    assert {room(name) for name in modules(PACKAGE)} == LEVEL.keys()


def drawn(page: str) -> list[tuple[str, ...]]:
    """The layers of the picture in ARCHITECTURE.md, highest first: its lines, up to the words on what they hold."""
    picture = page.partition("## The layers\n")[2].partition("\n`tests/")[0]
    lines = [line.strip() for line in picture.splitlines() if line.startswith(" " * 8)]
    names = [re.split(r"\s{2,}", line)[0] for line in lines]
    return [tuple(name.removesuffix("/") for name in line.split(", ")) for line in names]


def test_the_picture_in_architecture_is_that_of_the_layers():
    page = (PACKAGE.parents[1] / "ARCHITECTURE.md").read_text()
    assert [set(layer) for layer in drawn(page)] == [set(layer) for layer in reversed(LAYERS)]
    named = re.findall(r"^- `([\w/]+)`:", page, re.M)
    assert {name.removesuffix("/") for name in named} <= LEVEL.keys()
    folders = {room(name) for name, path in modules(PACKAGE).items() if path.name == "__init__.py"}
    assert folders - {name.removesuffix("/") for name in named} == {"__init__", "commands", "utils"}
    files = {path.name for folder in (PACKAGE.parent, Path(__file__).parent) for path in folder.rglob("*.py")}
    assert {name.rpartition("/")[2] for name in re.findall(r"[\w/]+\.py", page)} - files == set()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("linalg/symmetric.py", "from laplace.structures import Structure"),
        ("structures/diag.py", "import laplace.posterior.posterior"),
        ("network/batches.py", "from laplace import weights"),
        ("curvature/ggn.py", "def late():\n    from laplace.laplace import Laplace"),
        ("likelihoods/base.py", "if TYPE_CHECKING:\n    from laplace.network.batches import Batch"),
        ("online/calls.py", "from laplace.preview import plan"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, module, line):
    for name, path in modules(PACKAGE).items():
        copy = tmp_path / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text() if name != "__init__" else "")
    (tmp_path / module).write_text((tmp_path / module).read_text() + "\n" + line + "\n")
    found = upward(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(module.removesuffix(".py").replace("/", "."))


def private(tree: ast.AST, of_self: bool) -> set[str]:
    """Names of underscore attributes that are read or set, of `self` or of anything else."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr[0] == "_"]
    own = {"self", "cls"}
    return {
        node.attr
        for node in nodes
        if (isinstance(node.value, ast.Name) and node.value.id in own) == of_self and not node.attr.startswith("__")
    }


def test_nothing_outside_reads_an_underscore_attribute_of_laplace():
    facade = PACKAGE / "laplace.py"
    own = private(ast.parse(facade.read_text()), of_self=True)
    assert own == {"_with"}  # what it holds is public: a runner and values
    others = {path: private(ast.parse(path.read_text()), of_self=False) & own for path in PACKAGE.rglob("*.py")}
    assert {str(path): names for path, names in others.items() if names and path != facade} == {}

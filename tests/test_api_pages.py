"""Every public name, with its members and arguments, is described and on a page of docs/api."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import laplace
from laplace import errors
from laplace.predictive.reshape import PredictionAtPositions
from laplace.structures import Pass, Structure
from laplace.tuning import Tuned
from laplace.utils import SubnetMask

PAGES = sorted((Path(__file__).parents[1] / "docs" / "api").glob("*.md"))
ROOMS = (
    "conformal",
    "curvature",
    "decisions",
    "distributed",
    "errors",
    "evaluation",
    "integrations.huggingface",
    "integrations.botorch",
    "integrations.lightning",
    "integrations.sklearn",
    "layers",
    "likelihoods",
    "predictive",
    "priors",
    "rivals",
    "structures",
    "tuning",
    "utils",
    "weights",
)
NAMES = [
    f"{room}.{name}" for room in ("laplace", *(f"laplace.{r}" for r in ROOMS)) for name in import_module(room).__all__
]
CALLED = (laplace.Laplace, laplace.Prediction, PredictionAtPositions, Tuned, SubnetMask)
METHODS = (staticmethod, classmethod, property, cached_property)


def found(path: str) -> Any:
    """What a dotted path names: a member of a module, or a member of that."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            thing = import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            owners = thing.__mro__ if inspect.isclass(thing) else [thing]
            thing = next(vars(owner)[part] for owner in owners if part in vars(owner))
        return thing
    raise AssertionError(path)


def directives() -> Iterator[tuple[str, bool]]:
    """What the pages show, and whether with its members."""
    for page in PAGES:
        for path, options in re.findall(r"^::: (\S+)\n(?:    options: \{(.*)\})?", page.read_text(), re.MULTILINE):
            yield path, "members: false" not in options


SHOWN = {path: found(path) for path, _ in directives()}
WITH_MEMBERS = [SHOWN[path] for path, whole in directives() if whole]
PUBLIC = {name: found(name) for name in NAMES} | SHOWN
CLASSES = {name: thing for name, thing in PUBLIC.items() if inspect.isclass(thing) and not issubclass(thing, str)}


def members(cls: type) -> Iterator[tuple[str, list[type], Any]]:
    """The public members of a class and its value of each, with those classes of ours that have it."""
    ours = [c for c in cls.__mro__ if c.__module__.startswith("laplace")]
    if issubclass(cls, Structure):  # of one of ours, how it is made and what all have is public, not how it works
        ours = [c for c in ours if c in (Structure, Pass)]
    for name in sorted({name for c in ours for name in [*vars(c), *inspect.get_annotations(c)] if name[0] != "_"}):
        having = [c for c in ours if name in vars(c)]
        value = vars(having[0])[name] if having else None
        if re.fullmatch(r"set_\w+_request", name):  # which scikit-learn adds to every estimator
            continue
        if not isinstance(value, Enum):  # compat sets the members of its enum on `Likelihood`; they are on its page
            yield name, having, value


def describes(thing: Any, name: str) -> bool:
    """Whether a docstring has a line on this argument or attribute."""
    return re.search(rf"^ +\**{name}: ", thing.__doc__ or "", re.MULTILINE) is not None


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_described_and_on_a_page(name):
    thing = PUBLIC[name]
    assert any(thing is shown for shown in SHOWN.values()), f"write `::: {name}` on a page in docs/api"
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert thing.__doc__
        assert not thing.__doc__.startswith(f"{thing.__name__}("), "that docstring is what dataclasses make up"


@pytest.mark.parametrize("path", CLASSES)
def test_every_public_member_is_described_and_on_a_page(path):
    """By itself, or with the members of a class of the API that has it and says what it is."""
    missing = []
    for name, owners, value in members(CLASSES[path]):
        there = any(describes(c, name) for c in CLASSES[path].__mro__)
        if inspect.isfunction(value) or isinstance(value, METHODS):
            there |= bool(value.__doc__) and any(value is shown for shown in SHOWN.values())
            there |= any(owner in WITH_MEMBERS and bool(vars(owner)[name].__doc__) for owner in owners)
        missing += [] if there else [f"{path}.{name}"]
    assert not missing, f"without a docstring, or not in docs/api: write `::: {missing[0]}` there"


def imported_by(page: Path) -> Iterator[tuple[str, str]]:
    """The modules and names of ours that the code blocks of a page import."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "laplace":
                yield from ((node.module, alias.name) for alias in node.names)


def test_what_the_docs_import_is_public():
    root = PAGES[0].parents[2]
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    names = {pair for page in pages if page.name != "coming-from-laplace-torch.md" for pair in imported_by(page)}
    things = {f"{module}.{name}": found(f"{module}.{name}") for module, name in names}
    assert len(things) > 60
    shown = [*SHOWN.values(), *PUBLIC.values(), *(import_module(f"laplace.{room}") for room in ROOMS)]
    assert [name for name, thing in things.items() if not any(thing is other for other in shown)] == []


def test_no_name_is_shown_twice():
    shown = [path for path, _ in directives()]
    assert len(shown) > 100
    assert sorted(shown) == sorted(set(shown))


def test_every_argument_of_a_public_call_is_described():
    calls = {name: PUBLIC[name] for name in NAMES if inspect.isfunction(PUBLIC[name])}
    calls |= {name: PUBLIC[name] for name in NAMES if name in CLASSES and "__init__" in vars(CLASSES[name])}
    arguments = [
        (name, call, argument)
        for name, call in calls.items()
        for argument in inspect.signature(call).parameters
        if argument != "self"
    ]
    for cls in CALLED:
        methods = {
            name: getattr(value, "__func__", value) for name, _, value in members(cls) if not describes(cls, name)
        }
        for name, method in methods.items():
            if inspect.isfunction(method):  # the first argument is the object, whatever it is called
                _, *others = inspect.signature(method).parameters
                arguments += [(f"{cls.__name__}.{name}", method, argument) for argument in others]
    missing = [f"{name}({a})" for name, call, a in arguments if not describes(call, a)]
    assert len(arguments) > 200
    assert not missing


def test_what_is_said_to_be_raised_exists():
    things = [*PUBLIC.values(), *(value for cls in CLASSES.values() for _, _, value in members(cls))]
    parts = [part for thing in things for part in (thing.__doc__ or "").split("Raises:\n")[1:]]
    raised = {name for part in parts for name in re.findall(r"^ +(\w+): ", part, re.MULTILINE)}
    assert {"OptionError", "InputError", "NotFittedError"} <= raised <= {*errors.__all__, "ImportError"}

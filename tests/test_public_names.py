"""What `dir(laplace)` shows is public: a handful of concepts and the rooms that parts are found in."""

from __future__ import annotations

import pydoc
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import laplace
from laplace.compat import enums

CONCEPTS = {
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Laplace",
    "Likelihood",
    "Ordinal",
    "Prediction",
    "compare",
    "from_log_prob",
    "marglik_training",
    "plan",
    "register_rule",
    "report",
}
ROOMS = {
    "compat",
    "conformal",
    "curvature",
    "decisions",
    "distributed",
    "errors",
    "evaluation",
    "layers",
    "likelihoods",
    "predictive",
    "priors",
    "rivals",
    "structures",
    "tuning",
    "utils",
    "weights",
}
PARTS = {"curvature", "likelihoods", "structures", "weights"}
ENUMS = [name for name, value in vars(enums).items() if isinstance(value, type) and value.__module__ == enums.__name__]


def test_the_package_shows_its_concepts_and_rooms():
    assert {name for name in dir(laplace) if not name.startswith("_")} == CONCEPTS | ROOMS
    assert set(laplace.__all__) == CONCEPTS
    assert "__version__" in dir(laplace)
    for name in dir(laplace):
        assert getattr(laplace, name) is not None
    for name in ROOMS:
        assert isinstance(getattr(laplace, name), ModuleType)


def test_a_room_shows_what_it_declares():
    for room in {*ROOMS, "testing"}:
        module = import_module(f"laplace.{room}")
        assert module.__all__ == sorted(module.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
        if room not in ("compat", "utils"):  # whose other names laplace-torch's scripts look up
            assert dir(module) == sorted(module.__all__)


def test_the_concepts_are_on_one_screen_of_the_docs():
    page = (Path(__file__).parents[1] / "docs" / "api" / "index.md").read_text().splitlines()[:40]
    named = "\n".join(page)
    assert [name for name in CONCEPTS if f"`{name}`" not in named] == []
    assert [name for name in ROOMS if f"`laplace.{name}`" not in named] == []


def test_likelihood_is_the_class_that_a_user_may_subclass():
    assert laplace.Likelihood is laplace.likelihoods.Likelihood
    assert issubclass(laplace.Categorical, laplace.Likelihood)

    class Mine(laplace.Categorical):
        name = "mine"

    la = laplace.Laplace(nn.Linear(3, 2), Mine()).fit([(torch.eye(3), torch.tensor([0, 1, 0]))])
    assert "mine" in repr(la)


@pytest.mark.parametrize("name", ENUMS)
def test_the_enums_of_laplace_torch_stay_importable(name):
    found = getattr(enums, name)
    assert pydoc.locate(f"laplace.compat.enums.{name}") is found
    if name not in ("_Name", "Likelihood"):
        assert getattr(laplace, name) is found
        assert name not in dir(laplace)


def test_the_words_of_the_enum_of_likelihoods_still_work():
    for word in (enums.Likelihood.CLASSIFICATION, "classification"):
        assert laplace.Laplace(nn.Linear(3, 2), word).likelihood == enums.Likelihood.CLASSIFICATION


def test_the_package_loads_nothing_that_draws():
    code = "import sys, laplace; print([m for m in ('matplotlib', 'sklearn', 'transformers') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

"""Imports of laplace-torch's scripts work: its modules, its names, and what a checker or a pickle makes of them."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import laplace
from compat.peer_names import NAMES


@pytest.mark.parametrize("path", NAMES)
def test_every_public_name_is_at_its_path(path):
    module = importlib.import_module(path)
    assert {name for name in NAMES[path] if not hasattr(module, name)} == set()


def test_there_are_171_names():
    assert sum(map(len, NAMES.values())) == 171


def test_marglik_training_is_a_function_and_a_module():
    code = (
        "import laplace; f = laplace.marglik_training; assert callable(f)\n"
        "import laplace.marglik_training\n"
        "from laplace.marglik_training import marglik_training\n"
        "assert laplace.marglik_training is f is marglik_training\n"
        "from laplace import marglik_training as again\n"
        "assert again is f\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_may_be_imported_first():
    for path in ("laplace.curvature.curvlinops", "laplace.utils.matrix", "laplace.baselaplace"):
        subprocess.run([sys.executable, "-c", f"import {path}"], check=True)


def test_names_are_the_same_objects_at_all_paths():
    from laplace.baselaplace import KronLaplace
    from laplace.curvature.curvature import GGNInterface
    from laplace.utils import Kron
    from laplace.utils.matrix import Kron as SameKron

    assert laplace.KronLaplace is KronLaplace
    assert laplace.curvature.GGNInterface is GGNInterface
    assert Kron is SameKron


def test_the_package_shows_none_of_them():
    assert not {"KronLaplace", "baselaplace", "lllaplace"} & set(dir(laplace))
    assert "CurvlinopsGGN" not in laplace.curvature.__all__


def test_likelihood_has_the_members_of_the_enum():
    la = laplace.Laplace(nn.Linear(3, 2), laplace.Likelihood.CLASSIFICATION)
    assert la.likelihood == laplace.Likelihood.CLASSIFICATION
    assert la.likelihood in {"classification", "regression"}
    assert la.likelihood in {laplace.Likelihood.CLASSIFICATION}
    assert la.likelihood not in {"regression"}


def test_an_object_of_a_combination_survives_a_pickle():
    x, y = torch.randn(9, 3), torch.randint(2, (9,))
    la = laplace.KronLLLaplace(nn.Linear(3, 2), "classification").fit([(x, y)])
    again = pickle.loads(pickle.dumps(la))  # noqa: S301
    assert type(again) is laplace.KronLLLaplace
    torch.testing.assert_close(again(x), la(x))

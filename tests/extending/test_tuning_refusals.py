"""What is said of a tuning method that cannot be used."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import OptionError, UnsupportedError
from laplace.tuning import Method, register_method


class Stay(Method):
    def tune(self, problem):
        problem.losses([problem.start])
        return problem.tuned("stay")


class Quiet(Stay):
    scored = False


@pytest.fixture
def la():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(12, 3).double(), torch.randint(2, (12,))
    return Laplace(model, "classification", "all", "diag").fit([(x, y)])


def test_an_object_a_function_and_a_name_are_the_same(la):
    register_method("stay", Stay)
    scores = [la.tune(method=method).score for method in (Stay(), Stay().tune, "stay")]
    assert scores == [float(la.log_marginal_likelihood())] * 3


def test_what_a_problem_tells(la):
    def look(problem):
        x = problem.start + 0.5
        assert problem.space.kinds == ["prior_precision"] * 4
        assert problem.losses([x]) == [-problem.evidence(x)]
        low, high = problem.box
        torch.testing.assert_close(torch.stack([low, high]).exp()[:, 0], torch.tensor([0.1, 10]).double())
        return problem.tuned("look")

    tuned = la.tune(method=look, prior_structure="layerwise", bounds={"prior_precision": (0.1, 10)})
    torch.testing.assert_close(la.prior_precision, torch.full((4,), 0.5).double().exp())
    assert tuned.method == "look"


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (Stay, {}, r"method=Stay is a class; give an object: Stay\(\)"),
        ("stray", {}, r"method='stray' is not an option. Valid: 'auto', 'evidence', 'loo', 'validation', 'bayesian'"),
        (Stay(), {"n_steps": 3}, r"n_steps= goes with method='auto' or 'evidence'; 'Stay' has no use for it"),
        (Quiet(), {"bounds": {"prior_precision": (1, 2)}}, r"bounds= goes with .*; 'Quiet' has no use for it"),
        (lambda problem: 3, {}, r"returned 3; a laplace.tuning.Tuned is needed"),
        (lambda problem: problem.tuned("idle"), {}, r"'idle' has seen no point"),
        (
            lambda problem: problem.losses([torch.zeros(2)]),
            {},
            r"got the point tensor.* shape \(1,\) with",
        ),
        (
            lambda problem: problem.losses([problem.start * torch.nan]),
            {},
            r"finite logarithms of prior_",
        ),
    ],
)
def test_a_method_that_cannot_be_used_is_refused(la, method, options, message):
    before = la.prior_precision.clone()
    with pytest.raises(OptionError, match=message):
        la.tune(method=method, **options)
    assert torch.equal(la.prior_precision, before)


def test_the_evidence_has_no_temperature(la):
    with pytest.raises(UnsupportedError, match=r"no optimum in the temperature. Give val_loader="):
        la.tune("temperature", method=Stay())


@pytest.mark.parametrize(("name", "method"), [("evidence", Stay), ("CV", Stay), ("", Stay), ("mine", Stay())])
def test_a_registration_that_cannot_be_is_refused(name, method):
    with pytest.raises(OptionError, match=r"register_method\("):
        register_method(name, method)

"""Rules that users register: they are used, they are checked, and what is wrong with them is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import laplace
import oracle
from exact import assert_close, assert_exact, labels
from laplace import Laplace
from laplace.backprop.layers import RULES
from laplace.errors import ModelError, OptionError
from laplace.layers import outer
from networks import cut

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T * self.scale


class Averaged(nn.Module):
    """Sequences (N, T, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.mine, self.head = Scaled(), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mine(x)).mean(1))


def right(layer, x, g):
    return {"weight": outer(x, g * layer.scale), "scale": (g * (x @ layer.weight.T)).sum(2)}


@pytest.fixture
def model():
    torch.manual_seed(0)
    yield Averaged().double()
    RULES.pop(Scaled, None)


X = torch.linspace(-2, 2, 7 * 3 * 4, dtype=torch.float64).reshape(7, 3, 4).sin()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_registered_rule_is_used_and_exact(model, task):
    assert laplace.register_rule(Scaled)(right) is right
    assert_exact(model, X, task, rules={"mine": "registered for Scaled"})


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_outer_products_get_kronecker_factors(model, sharing):
    laplace.register_rule(Scaled)(right)
    y = labels("regression", 7, 2)
    la = Laplace(model, "regression", "all", "kron", weight_sharing=sharing).fit(cut(X, y, 4))
    plain = Averaged().double()
    plain.mine = nn.Sequential(nn.Linear(4, 5, bias=False), Times(model.mine.scale.detach())).double()
    plain.mine[0].weight.data = model.mine.weight.data
    plain.head = model.head
    expected = oracle.kron_all(plain, ["mine.0.weight"], X, torch.eye(2, dtype=torch.float64).expand(7, 2, 2), sharing)
    assert_close(la.H.to_matrix()[:20, :20], expected["mine.0.weight"])


class Times(nn.Module):
    def __init__(self, by: Tensor) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


WRONG = {
    "a factor": (lambda m, x, g: right(m, x, g) | {"scale": 2 * (g * (x @ m.weight.T)).sum(2)},
                 r"registered for Scaled gives another gradient of 'mine.scale' \(layer 'mine'\).*difference is \d"),
    "a sign": (lambda m, x, g: right(m, x, g) | {"weight": outer(x, -g * m.scale)}, r"gradient of 'mine.weight'"),
    "nothing": (lambda m, x, g: {"weight": outer(x, g)}, r"returns nothing for 'scale'; it returned \['weight'\]"),
    "a shape": (lambda m, x, g: right(m, x, g) | {"scale": g}, r"shape \(1, 5, 3, 5\) for 'scale' of shape \(5,\)"),
    "sides": (lambda m, x, g: right(m, x, g) | {"weight": outer(g[0], g)}, r"gives outer\(.*'weight' of shape"),
    "a mistake": (lambda m, x, g: {"weight": x @ g.T, "scale": None}, r"registered for Scaled fails on a call"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The use of .x.T. on tensors")
@pytest.mark.parametrize(("rule", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_rule_is_said(model, rule, message):
    laplace.register_rule(Scaled)(rule)
    with pytest.raises(ModelError, match=message):
        Laplace(model, "regression", "all", "diag").fit([(X, labels("regression", 7, 2))])


def test_only_classes_of_layers_and_functions_are_registered(model):
    with pytest.raises(OptionError, match="give the class of a layer"):
        laplace.register_rule(model.mine)
    with pytest.raises(OptionError, match="is not a rule: give a function"):
        laplace.register_rule(Scaled)("rule")
    assert Scaled not in RULES


def test_predictions_do_not_lead_back_to_the_weights(model):
    laplace.register_rule(Scaled)(right)
    la = Laplace(model, "regression", "all", "diag").fit([(X, labels("regression", 7, 2))])
    assert not la(X)[1].requires_grad

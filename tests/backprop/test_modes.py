"""Modes in which a network may be, or be called: grad mode, training mode, checkpointing, compilation."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from exact import assert_close, assert_exact, close_in_blocks, labels
from laplace import Laplace
from laplace.errors import ModelError
from networks import cut
from traps import Net, inputs, seeded
from zoo import build

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")
TASKS = ["classification", "regression"]


@pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_callers_grad_mode_does_not_matter(structure, mode):
    model, x, y, _ = build("residual", "classification")
    outside = Laplace(model, "classification", "all", structure).fit(cut(x, y, 4))

    def predictions(la, x):
        draws = la(x, pred_type="nn", n_samples=2, generator=torch.Generator().manual_seed(0))
        return la(x), la.predict(x).epistemic, draws

    expected = predictions(outside, x)
    with mode():
        la = Laplace(model, "classification", "all", structure).fit(cut(x.clone(), y.clone(), 4))
        inside = predictions(la, x.clone())
        la.optimize_prior_precision()
        la.optimize_prior_precision(method="gridsearch", val_loader=cut(x, y, 4), grid_size=3)
    for one, other in zip(inside, expected, strict=True):
        assert_close(one.clone(), other)
    la.prior_precision = 1.0
    close_in_blocks(
        la.posterior.fit.curvature.matrix(), outside.posterior.fit.curvature.matrix(), la.posterior.fit.layout.sizes
    )
    assert_close(la.log_marginal_likelihood(), outside.log_marginal_likelihood())


def test_a_posterior_that_was_fitted_in_inference_mode_can_be_differentiated():
    model, x, y, _ = build("mlp", "regression")
    with torch.inference_mode():
        la = Laplace(model, "regression", "all", "kron", enable_backprop=True).fit(cut(x.clone(), y.clone(), 4))
    precision = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(precision), precision)
    assert float(gradient) != 0
    new = x[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda inputs: la(inputs)[1], (new,), atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_dropout_is_off_in_a_network_in_training_mode(task):
    model = seeded(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 5), nn.Dropout(0.9), nn.ReLU(),
                              nn.Linear(5, 3))
    )  # fmt: skip
    model.train()
    assert_exact(model, inputs(9, 4), task)
    assert model.training


def test_batchnorm_uses_its_running_statistics_in_a_network_in_training_mode():
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)))
    model(inputs(20, 4, seed=3))
    before = copy.deepcopy(model.state_dict())
    assert_exact(model.train(), inputs(9, 4))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("network", ["linear", "conv"])
def test_batchnorm_without_running_statistics_is_refused_by_the_name_of_a_parameter(network, structure):
    if network == "linear":
        model = seeded(
            lambda: nn.Sequential(
                nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.ReLU(), nn.Linear(5, 2)
            )
        )
        x = inputs(9, 4)
    else:
        model = seeded(
            lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3, track_running_stats=False), nn.Flatten(),
                                  nn.Tanh(), nn.Linear(9, 2))
        )  # fmt: skip
        x = inputs(9, 1, 4)
    with pytest.raises(ModelError, match=r"'(0|1|3|4)\.(weight|bias)'.*running statistics"):
        Laplace(model, "regression", "all", structure).fit([(x, labels("regression", 9, 2))])


def test_examples_that_look_at_each_other_are_refused():
    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.head(h - h.mean(0))

    model = seeded(lambda: Net(forward, a=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    with pytest.raises(ModelError, match="examples interact"):
        Laplace(model, "regression", "all", "full").fit([(inputs(9, 4), labels("regression", 9, 2))])


@pytest.mark.parametrize("task", TASKS)
def test_checkpointing_without_reentry_is_exact(task):
    def forward(self, x):
        h = checkpoint(self.body, x, use_reentrant=False)
        h = checkpoint(lambda h: torch.tanh(self.mix(h)), h, use_reentrant=False)
        return self.head(h)

    model = seeded(
        lambda: Net(forward, body=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), mix=nn.Linear(4, 4), head=nn.Linear(4, 3))
    )
    assert_exact(model, inputs(9, 4), task)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("grad_input", [False, True])
def test_checkpointing_with_reentry_is_refused_by_the_name_of_the_layer(grad_input):
    def forward(self, x):
        if grad_input:
            x = self.first(x)
        h = checkpoint(self.body, x, use_reentrant=True)
        return self.head(h)

    model = seeded(
        lambda: Net(
            forward, first=nn.Linear(4, 4), body=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), head=nn.Linear(4, 3)
        )
    )
    with pytest.raises(ModelError, match=r"'body(\.0)?.*use_reentrant=False"):
        Laplace(model, "classification", "all", "full").fit([(inputs(9, 4), labels("classification", 9, 3))])


@pytest.mark.parametrize("part", ["network", "module", "method"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_compiled_networks_and_parts(part, subset):
    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, backend="eager")
    model, x, y, names = build("mlp", "regression")
    plain = Laplace(copy.deepcopy(model), "regression", subset, "full").fit(cut(x, y, 4))
    if part == "network":
        model = compiled(model)
    elif part == "module":
        model[2] = compiled(model[2])
    else:
        model[0].compile(backend="eager")
    model(x)
    la = Laplace(model, "regression", subset, "full").fit(cut(x, y, 4))
    assert_close(la.H, plain.H)
    assert la.posterior.fit.layout.names == plain.posterior.fit.layout.names
    assert subset == "last_layer" or list(la.posterior.fit.layout.names) == names
    assert_close(la(x)[1], plain(x)[1])
    draws = []
    for network in (model, plain.model):
        diag = Laplace(network, "regression", subset, "diag").fit(cut(x, y, 4))
        draws.append(diag.functional_samples(x, "nn", 2, generator=torch.Generator().manual_seed(0)))
    assert_close(*draws)
    again = Laplace(copy.deepcopy(plain.model), "regression", subset, "full")
    again.load_state_dict(la.state_dict())
    assert_close(again(x)[1], plain(x)[1])

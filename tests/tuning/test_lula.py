"""Learned uncertainty units: the same outputs, the same variance on the data, a larger one far from it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.errors import InputError, ModelError, OptionError
from laplace.tuning import with_uncertainty_units
from laplace.tuning.lula import variances
from laplace.tuning.units import chain


class Wrapped(nn.Module):
    """Not a chain, so that the units go beside the features."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.body, self.head = net[:-1], net[-1]

    def forward(self, x):
        return self.head(self.body(x))


def trained(activation=nn.ReLU, outputs=1):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, outputs))
    x = 2 * torch.rand(200, 2) - 1
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(200, 1)
    y = y if outputs == 1 else (y[:, 0] > 0).long()
    loss = nn.functional.mse_loss if outputs == 1 else nn.functional.cross_entropy
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    far = 12 * torch.rand(300, 2) - 6
    return net, x, y, far[far.abs().amax(1) > 2]


def contrast(la, inputs):
    """Mean variance of the output, or of the difference of two logits: a shift of both means nothing."""
    outputs = la.predict(inputs).outputs
    signs = torch.tensor([1.0, -1.0])[: outputs.mean.shape[1]]
    return torch.einsum("c,ncd,d->n", signs, outputs.covariance, signs).mean()


@pytest.mark.parametrize("form", [nn.Identity, Wrapped])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("outputs", [1, 2])
def test_outputs_stay_and_variance_grows_outside_alone(form, activation, outputs):
    net, x, y, far = trained(activation, outputs)
    net = Wrapped(net) if form is Wrapped else net
    task, noise = ("regression", {"sigma_noise": 0.1}) if outputs == 1 else ("classification", {})
    before = copy.deepcopy(net.state_dict())
    wider = with_uncertainty_units(net, task, [(x[:100], y[:100]), (x[100:], y[100:])], [far], units=8, **noise)
    torch.testing.assert_close(wider(x), net(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(wider(far), net(far), atol=1e-6, rtol=0)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert not {p.data_ptr() for p in wider.parameters()} & {p.data_ptr() for p in net.parameters()}
    ratios = []
    for inputs in (x, far):
        new, old = (contrast(Laplace(each, task, **noise).fit([(x, y)]), inputs) for each in (wider, net))
        ratios.append(float(new / old))
    assert ratios[0] < 1.3
    assert ratios[1] > 4


def test_the_objectives_variance_is_the_last_layers():
    net, x, y, far = trained()
    net = net.double()
    bare = nn.Sequential(*net[:-1], nn.Linear(16, 1, bias=False)).double()
    la = Laplace(bare, "regression", prior_precision=0.7, sigma_noise=0.4).fit([(x.double(), y.double())])
    phi, far_phi = net[:-1](x.double()), net[:-1](far.double())
    inside, outside = variances(phi, far_phi, beta=len(x) / 0.4**2, delta=0.7)
    torch.testing.assert_close(inside, la.predict(x.double()).epistemic.mean())
    torch.testing.assert_close(outside, la.predict(far.double()).epistemic.mean())


def test_which_networks_are_chains():
    hidden = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    assert chain(nn.Sequential(nn.Flatten(), hidden, nn.Linear(3, 1))) == ["0", "1.0", "1.1", "2"]
    assert chain(nn.Sequential(hidden, nn.LayerNorm(3), nn.Linear(3, 1))) is None
    assert chain(nn.Sequential(nn.Linear(2, 1))) is None
    assert chain(nn.Sequential(hidden, nn.Linear(3, 1), nn.Tanh())) is None
    assert chain(Wrapped(nn.Sequential(*hidden, nn.Linear(3, 1)))) is None


def test_layers_without_bias_frozen_ones_and_the_mode_are_kept():
    net, x, y, far = trained()
    net[2] = nn.Linear(16, 16, bias=False)
    net[0].requires_grad_(False)
    wider = with_uncertainty_units(net.train(), "regression", [(x, y)], far, units=3, steps=2, max_inputs=50)
    torch.testing.assert_close(wider(x), net(x), atol=1e-6, rtol=0)
    assert wider.training
    assert wider[2].training
    assert not wider[0].weight.requires_grad
    assert not wider[0].bias.requires_grad
    assert wider[2].weight.requires_grad
    assert [wider[i].weight.shape for i in (0, 2, 4)] == [(19, 2), (19, 19), (1, 19)]
    assert float(wider[4].weight[:, 16:].detach().abs().max()) == 0


def test_bad_calls_are_refused():
    net, x, y, far = trained()
    for arguments, options, error, match in (
        (([], far), {}, InputError, "the training loader gave no batch"),
        (([(x, y)], []), {}, InputError, "the out-of-distribution loader gave no batch"),
        (([(x, y)], far), {"units": 0}, OptionError, "units=0 must be a whole number of at least 1"),
        (([(x, y)], far), {"prior_precision": -1}, OptionError, "prior_precision must be positive"),
        (([(x, y)], 3), {}, InputError, "a DataLoader is needed"),
    ):
        with pytest.raises(error, match=match):
            with_uncertainty_units(net, "regression", *arguments, **options)
    with pytest.raises(ModelError):
        with_uncertainty_units(nn.Sequential(net, nn.Tanh()), "regression", [(x, y)], far)


def test_a_network_of_one_layer_gets_units_beside_its_inputs():
    torch.manual_seed(0)
    net, x, y = nn.Linear(2, 1), torch.randn(30, 2), torch.randn(30, 1)
    far = 5 + torch.randn(30, 2)
    wider = with_uncertainty_units(net, "regression", [(x, y)], far, units=8, steps=100)
    torch.testing.assert_close(wider(x), net(x))
    spreads = [Laplace(each, "regression").fit([(x, y)])(far)[1].mean() for each in (net, wider)]
    assert spreads[1] > 1.05 * spreads[0]

"""Uncertainty units of networks with outputs at positions, and of those that read their last layer's attributes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import UnsupportedError
from laplace.tuning import with_uncertainty_units


class Words(nn.Module):
    """(N, T, 3) -> (N, T, 2), not as a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class Pixels(nn.Module):
    """(N, 3, H, W) -> (N, 2, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class ReadsWeight(Words):
    def forward(self, x: Tensor) -> Tensor:
        assert self.head.weight.shape == (2, 6)
        assert self.head.bias.shape == (2,)
        return self.head(self.body(x).relu().to(self.head.weight.dtype))


class ReadsSize(Words):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu().reshape(len(x), -1, self.head.in_features)).reshape(
            *x.shape[:-1], self.head.out_features
        )


class ReadsKind(Words):
    """Does another thing if its last layer is not the one that it had."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if isinstance(self.head, nn.Linear) else 2 * out


NETWORKS = {
    "chain": (lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)), (5, 3), -1),
    "words": (Words, (5, 3), -1),
    "pixels": (Pixels, (3, 4, 4), 1),
    "reads weight": (ReadsWeight, (5, 3), -1),
    "reads size": (ReadsSize, (5, 3), -1),
}


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("case", NETWORKS)
def test_outputs_stay_and_variance_grows_outside(case, task):
    torch.manual_seed(0)
    make, shape, class_dim = NETWORKS[case]
    net, x = make(), torch.randn(30, *shape)
    far = 8 * torch.randn(30, *shape)
    f = net(x).detach()
    y = f.argmax(class_dim) if task == "classification" else f
    wider = with_uncertainty_units(net, task, [(x[:20], y[:20]), (x[20:], y[20:])], far, units=8)
    torch.testing.assert_close(wider(x), net(x), atol=1e-5, rtol=0)
    torch.testing.assert_close(copy.deepcopy(wider)(far), net(far), atol=1e-4, rtol=0)
    ratios = []
    for inputs in (x, far):
        spreads = []
        for each in (wider, net):
            la = Laplace(each, task, class_dim=class_dim).fit([(x, y)])
            spreads.append(la.predict(inputs).rows.outputs.variance.mean())
        ratios.append(float(spreads[0] / spreads[1]))
    assert ratios[1] > 1.2 * ratios[0]


def test_sequences_of_different_lengths():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    batches = [(torch.randn(4, t, 3), torch.randint(0, 2, (4, t))) for t in (5, 2)]
    wider = with_uncertainty_units(net, "classification", batches, [torch.randn(3, 7, 3)], units=4, steps=3)
    torch.testing.assert_close(wider(batches[0][0]), net(batches[0][0]))


def test_network_that_does_more_with_its_last_layer_is_refused():
    torch.manual_seed(0)
    x, y = torch.randn(10, 3), torch.randint(0, 2, (10,))
    with pytest.raises(UnsupportedError, match=r"last layer 'head'.*other outputs.*call the layer"):
        with_uncertainty_units(ReadsKind(), "classification", [(x, y)], 5 * x, units=4, steps=2)

"""Many outputs of a last layer inside a network: exact, and linear in their number where the network is."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from laplace import Laplace
from laplace.network.inputs import Inputs

KRONECKER = ("kron", "ekfac", "diag", "inf", "block")


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def fitted(model: nn.Module, structure: str, subset: str = "all", **options: object) -> Laplace:
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(24, 5, dtype=dtype), torch.randint(_outputs(model), (24,))
    return Laplace(model, "classification", subset, structure, **options).fit([(x[:11], y[:11]), (x[11:], y[11:])])


def _outputs(model: nn.Module) -> int:
    return model(torch.zeros(1, 5, dtype=next(model.parameters()).dtype)).shape[1]


def jacobian_of(la: Laplace, x: Tensor, outputs: Tensor | None = None):
    return next(iter(la.runner.runs(la.posterior.fit, Inputs(x, {}, la.runner.spec.keys)))).jacobian(outputs)


def dense_jacobian(model: nn.Module, x: Tensor) -> Tensor:  # (N, C, P)
    named = dict(model.named_parameters())

    def outputs(*tensors: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(named, tensors, strict=True)), (x,))

    parts = torch.autograd.functional.jacobian(outputs, tuple(named.values()))
    return torch.cat([part.flatten(2) for part in parts], 2).detach()


class Shifted(nn.Module):
    """The head's output is changed before it is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()).relu() + 0.1


class InPlace(Shifted):
    """The head's output is written to in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()).mul_(2.0)


class Around(Shifted):
    """A hook adds a path around the head, which its weight's gradients do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Linear(4, 7, bias=False).requires_grad_(False)
        self.head.register_forward_hook(lambda module, args, out: out + self.skip(args[0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Normed(Shifted):
    """The head's weight is computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Twice(Shifted):
    """The head is used below as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.head(self.body(x).tanh()).tanh())


class Plain(Shifted):
    """Nothing between the two layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.filterwarnings("ignore:kron keeps")  # a weight that is computed has no Kronecker form
@pytest.mark.parametrize(
    ("kind", "structure"),
    [
        *((kind, structure) for kind in (None, Twice) for structure in (*KRONECKER, "full", "lowrank")),
        *((kind, "kron") for kind in ("no bias", Plain, Shifted, InPlace, Around, Normed)),
    ],
)
def test_outputs_have_the_covariance_that_the_dense_jacobian_gives(kind, structure):
    torch.manual_seed(0)
    model = mlp(5, 4, 6, 9, bias=kind is None) if kind in (None, "no bias") else kind()
    model = model.double()
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    la = fitted(model, structure)
    x = torch.randn(6, 5, dtype=torch.float64)
    j = dense_jacobian(model, x)
    kept = torch.cat([torch.full((p.numel(),), name in names) for name, p in model.named_parameters()])
    j = j[..., kept]
    sigma, ours = la.posterior.gaussian.covariance_matrix(), la.posterior.gaussian
    joint = torch.einsum("ncp,pq,mdq->ncmd", j, sigma, j)
    covariance = torch.stack([joint[n, :, n] for n in range(len(x))])
    v = torch.randn(6, j.shape[1], dtype=torch.float64)
    got = jacobian_of(la, x)
    torch.testing.assert_close(ours.variance(got), covariance.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(ours.covariance(got), covariance)
    torch.testing.assert_close(ours.joint(got), joint)
    torch.testing.assert_close(ours.product(got, v), (covariance @ v.unsqueeze(2)).squeeze(2))
    some = torch.tensor([2, 0])
    got = jacobian_of(la, x, some)
    torch.testing.assert_close(ours.variance(got), covariance.diagonal(dim1=1, dim2=2)[:, some])
    torch.testing.assert_close(ours.covariance(got), covariance[:, some][:, :, some])
    torch.testing.assert_close(ours.joint(got), joint[:, some][..., some])
    steps = torch.randn(3, j.shape[2], dtype=torch.float64)
    torch.testing.assert_close(got.along(steps), torch.einsum("ncp,sp->snc", j[:, some], steps))


@pytest.mark.parametrize("structure", [*KRONECKER, "full", "lowrank"])
def test_last_layers_outputs_have_the_covariance_that_the_dense_jacobian_gives(structure):
    torch.manual_seed(0)
    model = mlp(5, 4, 6).double()
    la = fitted(model, structure, "last_layer")
    x = torch.randn(6, 5, dtype=torch.float64)
    j = dense_jacobian(model, x)[..., -la.n_params :]
    ours = la.posterior.gaussian
    joint = torch.einsum("ncp,pq,mdq->ncmd", j, ours.covariance_matrix(), j)
    covariance = torch.stack([joint[n, :, n] for n in range(len(x))])
    for some in (torch.arange(6), torch.tensor([4, 1])):
        got = jacobian_of(la, x, some)
        torch.testing.assert_close(ours.variance(got), covariance.diagonal(dim1=1, dim2=2)[:, some])
        torch.testing.assert_close(ours.covariance(got), covariance[:, some][:, :, some])
        torch.testing.assert_close(ours.joint(got), joint[:, some][..., some])
    torch.testing.assert_close(ours.covariance(jacobian_of(la, x)), covariance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_variances_are_those_of_float32(dtype):
    torch.manual_seed(0)
    model = mlp(5, 4, 6, 9)
    x = torch.randn(6, 5)
    la, half = fitted(model, "kron"), fitted(mlp_like(model, dtype), "kron")
    torch.testing.assert_close(half(x.to(dtype)).float(), la(x), rtol=0.05, atol=0.02)


def mlp_like(model: nn.Sequential, dtype: torch.dtype) -> nn.Sequential:
    other = mlp(5, 4, 6, 9)
    other.load_state_dict(model.state_dict())
    return other.to(dtype)


def test_gradients_of_variances_reach_the_inputs():
    torch.manual_seed(0)
    model = mlp(5, 4, 6, 7).double()
    la = fitted(model, "kron", enable_backprop=True)
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: la(x), (x,))


def flops(la: Laplace, ask: str, x: Tensor) -> int:
    def run() -> None:
        got, ours = jacobian_of(la, x), la.posterior.gaussian
        if ask == "product":
            ours.product(got, torch.ones(len(x), got.parameters[0].shape[0]))
        else:
            getattr(ours, ask)(got)

    run()  # what is made once
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("structure", "ask", "growth"),
    [
        ("diag", "variance", 2.05),
        ("diag", "product", 2.05),
        ("kron", "variance", 2.3),  # N C^2 of the head are left, until its variances by output are formed
        ("kron", "product", 2.8),
        ("ekfac", "variance", 2.3),
        ("ekfac", "product", 2.8),
        ("inf", "variance", 2.05),
        ("inf", "product", 2.05),
    ],
)
def test_work_of_predictions_with_all_weights_grows_linearly_with_outputs(structure, ask, growth):
    x = torch.randn(8, 5)
    options = {"curvature": "ef", **({"rank": 10} if structure == "inf" else {})}
    few, many = (flops(fitted(mlp(5, 64, 64, c), structure, **options), ask, x) for c in (200, 400))
    assert many <= growth * few


@pytest.mark.parametrize(
    ("structure", "ask", "growth"),
    [
        *((structure, "variance", 2.05) for structure in ("diag", "kron", "ekfac", "inf", "lowrank")),
        *((structure, "product", 4.05) for structure in ("kron", "ekfac")),  # two turns by C x C
        *((structure, "product", 2.05) for structure in ("diag", "inf", "lowrank")),
    ],
)
def test_work_of_a_last_layers_predictions_grows_as_its_formula_says(structure, ask, growth):
    x = torch.randn(80, 5)  # more than there are features, from where variances by output are formed
    options = {"curvature": "ef", **({"rank": 10} if structure in ("inf", "lowrank") else {})}
    few, many = (flops(fitted(mlp(5, 64, c), structure, "last_layer", **options), ask, x) for c in (200, 400))
    assert many <= growth * few


@pytest.mark.parametrize("structure", ["block", "full"])
def test_a_dense_last_layer_costs_its_outputs_own_blocks(structure):
    n, i = 8, 33  # features and the constant of the bias
    x = torch.randn(n, 5)
    few, many = (flops(fitted(mlp(5, 32, c), structure, "last_layer", curvature="ef"), "variance", x) for c in (5, 10))
    forward = 2 * n * 32 * (5 + 10)
    assert many <= forward + 2 * n * 10 * i**2
    assert many <= 2.05 * few

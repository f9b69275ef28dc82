"""Backends give Jacobians, gradients and curvatures of a batch, each compared with autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import AsdlEF, BackPackGGN, CurvatureInterface, CurvlinopsEF, CurvlinopsGGN, CurvlinopsHessian
from laplace.errors import UnsupportedError
from laplace.utils import FeatureExtractor

torch.manual_seed(0)
X, TARGETS, CLASSES = torch.randn(7, 3).double(), torch.randn(7, 2).double(), torch.randint(2, (7,))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def jacobian_by_autograd(model: nn.Module, x: Tensor) -> Tensor:  # (N, C, P)
    f, parameters = model(x), list(model.parameters())
    rows = [torch.autograd.grad(v, parameters, retain_graph=True) for v in f.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).reshape(*f.shape, -1)


def hessian_of_outputs(likelihood: str, f: Tensor) -> Tensor:  # (N, C, C)
    if likelihood == "regression":
        return torch.eye(f.shape[-1], dtype=f.dtype).expand(len(f), -1, -1)
    p = f.softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None]


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_jacobians_and_curvature_are_those_of_autograd(likelihood):
    model, y = network(), TARGETS if likelihood == "regression" else CLASSES
    J, f = jacobian_by_autograd(model, X), model(X).detach()
    backend = CurvlinopsGGN(model, likelihood)
    for found, expected in zip(backend.jacobians(X), (J, f), strict=True):
        torch.testing.assert_close(found, expected)
    H = torch.einsum("ncp,ncd,ndq->pq", J, hessian_of_outputs(likelihood, f), J)
    loss, full = backend.full(X, y)
    torch.testing.assert_close(full, H)
    torch.testing.assert_close(backend.diag(X, y)[1], H.diagonal())
    torch.testing.assert_close(loss, backend.factor * backend.lossfunc(f, y))
    _, _, _, Lambda = backend.gp_quantities(X, y)
    torch.testing.assert_close(Lambda, hessian_of_outputs(likelihood, f))
    chosen = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    torch.testing.assert_close(backend.selected_output_jacobians(X, chosen)[0][:, 0], J[range(7), chosen])


def test_gradients_make_the_empirical_fisher():
    backend = CurvlinopsEF(network(), "classification")
    G, loss = backend.gradients(X, CLASSES)
    assert G.shape == (7, 26)
    torch.testing.assert_close(backend.full(X, CLASSES)[1], G.T @ G)
    torch.testing.assert_close(AsdlEF(network(), "classification").diag(X, CLASSES)[1], (G**2).sum(0))
    torch.testing.assert_close(loss, backend.lossfunc(network()(X), CLASSES))


def test_the_hessian_is_autograds():
    model = network()
    names = [name for name, _ in model.named_parameters()]

    def loss(*parameters: Tensor) -> Tensor:
        f = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (X,))
        return nn.functional.cross_entropy(f, CLASSES, reduction="sum")

    blocks = torch.autograd.functional.hessian(loss, tuple(p.detach() for p in model.parameters()))
    sizes = [p.numel() for p in model.parameters()]
    H = torch.cat([torch.cat([b.reshape(n, -1) for b in row], 1) for row, n in zip(blocks, sizes, strict=True)])
    backend = CurvlinopsHessian(model, "classification")
    torch.testing.assert_close(backend.full(X, CLASSES)[1], H)
    vectors, values, _ = backend.eig_lowrank([(X, CLASSES)])
    kept = torch.linalg.eigvalsh(H)
    torch.testing.assert_close(values, kept[kept > 1e-14 * kept.max()])
    torch.testing.assert_close((vectors.T @ H @ vectors).diagonal(), values)


def test_a_stochastic_ggn_draws_labels():
    torch.manual_seed(0)
    backend = BackPackGGN(network(), "classification", stochastic=True, num_samples=2000)
    exact = BackPackGGN(network(), "classification").diag(X, CLASSES)[1]
    drawn = backend.diag(X, CLASSES)[1]
    assert not torch.equal(drawn, exact)
    torch.testing.assert_close(drawn, exact, atol=0.05, rtol=0.1)


def test_kron_is_the_posteriors():
    la = Laplace(network(), "classification", "all", "kron").fit([(X, CLASSES)])
    loss, kron = CurvlinopsGGN(network(), "classification").kron(X, CLASSES, N=7)
    torch.testing.assert_close(kron.to_matrix(), la.H.to_matrix())
    assert float(loss) == pytest.approx(float(la.loss))


@pytest.mark.parametrize("bias", [True, False])
def test_the_last_layer_alone(bias):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=bias)).double()
    J = jacobian_by_autograd(model, X)[..., 16:]
    backend = CurvlinopsGGN(FeatureExtractor(model), "classification", last_layer=True)
    torch.testing.assert_close(backend.last_layer_jacobians(X)[0], J)
    H = torch.einsum("ncp,ncd,ndq->pq", J, hessian_of_outputs("classification", model(X).detach()), J)
    torch.testing.assert_close(backend.full(X, CLASSES)[1], H)
    assert sum(p.numel() for p in backend.params) == J.shape[-1]


def test_a_subnetwork_in_the_order_of_its_indices():
    indices = torch.tensor([20, 0, 7])
    whole = CurvlinopsGGN(network(), "classification")
    part = CurvlinopsGGN(network(), "classification", subnetwork_indices=indices)
    H = whole.full(X, CLASSES)[1]
    torch.testing.assert_close(part.full(X, CLASSES)[1], H[indices][:, indices])
    torch.testing.assert_close(part.diag(X, CLASSES)[1], H.diagonal()[indices])
    torch.testing.assert_close(part.jacobians(X)[0], whole.jacobians(X)[0][..., indices])
    torch.testing.assert_close(part.gradients(X, CLASSES)[0], whole.gradients(X, CLASSES)[0][:, indices])


def test_frozen_parameters_are_left_out():
    model = network()
    model[0].requires_grad_(False)
    Js, _ = CurvlinopsGGN(model, "classification").jacobians(X)
    torch.testing.assert_close(Js, CurvlinopsGGN(network(), "classification").jacobians(X)[0][..., 16:])


def test_gradients_flow_if_asked_for():
    x = X.clone().requires_grad_()
    Js, _ = CurvlinopsGGN(network(), "regression").jacobians(x, enable_backprop=True)
    assert torch.autograd.grad(Js.sum(), x)[0].abs().max() > 0
    assert not CurvlinopsGGN(network(), "regression").jacobians(x)[0].requires_grad


def test_the_interface_names_no_curvature():
    with pytest.raises(UnsupportedError, match="CurvlinopsGGN"):
        CurvatureInterface(network(), "regression").full(X, TARGETS)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_posteriors_backend_has_the_jacobians_of_its_weights(weights, structure):
    la = Laplace(network(), "regression", weights, structure, backend=BackPackGGN).fit([(X, TARGETS)])
    assert isinstance(la.backend, BackPackGGN)
    assert la.backend.last_layer == (weights == "last_layer")
    Js = la.backend.last_layer_jacobians(X)[0] if weights == "last_layer" else la.backend.jacobians(X)[0]
    torch.testing.assert_close(la.functional_variance(Js), la(X)[1])

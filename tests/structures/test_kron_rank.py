"""`Kron(rank=)`: sketches of wide factors, against dense matrices and against whole factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.backprop.covariances import ReflectedBasis
from laplace.errors import OptionError
from laplace.linalg.sketch import columns_for, nystroem, reflections, sketched, sketched_rows
from laplace.structures import Kron

close = torch.testing.assert_close


class Tokens(nn.Module):
    """A linear layer at every position, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(7, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).tanh().mean(1))


def network(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "tokens":
        return Tokens().double(), torch.randn(11, 4, 7, dtype=torch.float64)
    if kind == "conv":
        body = nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)
        return nn.Sequential(*body).double(), torch.randn(11, 4, 4, 4, dtype=torch.float64)
    body = nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 3)
    return nn.Sequential(*body).double(), torch.randn(11, 8, dtype=torch.float64)


def batches(kind: str, size: int = 4) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Tensor]:
    model, x = network(kind)
    y = torch.arange(len(x)) % 3
    return model, list(zip(x.split(size), y.split(size), strict=True)), x


def approximated(matrix: Tensor, rank: int) -> Tensor:
    """The Nystroem approximation by its formula, with the rest of the trace on all other directions."""
    d = len(matrix)
    if d <= rank:
        return matrix
    s = columns_for(d, rank, matrix)
    low = matrix @ s @ torch.linalg.pinv(s.T @ matrix @ s, rtol=1e-10, hermitian=True) @ s.T @ matrix
    vectors = torch.linalg.eigh((low + low.T) / 2).eigenvectors
    others = vectors[:, : d - rank]
    return low + (matrix.trace() - low.trace()).clamp(min=0) / (d - rank) * others @ others.T


def test_a_sketch_of_enough_columns_is_the_matrix_itself():
    rows = torch.randn(2, 5, 20, dtype=torch.float64)
    a = rows.mT @ rows
    for sketch, trace in (sketched(a, 6), sketched_rows(rows, 6)):
        values, vectors = nystroem(sketch, trace)
        close((vectors * values[:, None, :6]) @ vectors.mT, a, atol=1e-9, rtol=1e-9)
        assert float(values[:, 6:].max()) < 1e-9


def test_fewer_columns_find_the_largest_eigenvalues_and_keep_the_trace():
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64)).Q
    true = 2.0 ** -torch.arange(40, dtype=torch.float64)
    a = ((q * true) @ q.T).unsqueeze(0)
    values, vectors = nystroem(*sketched(a, 12))
    close(values[0].sum(), true.sum())
    close(values[0, :4], true[:4], rtol=0.01, atol=0)
    found = (vectors[0] * values[0, :12]) @ vectors[0].T
    close(
        found, approximated(a[0], 12) - values[0, 12] * (torch.eye(40) - vectors[0] @ vectors[0].T), atol=1e-8, rtol=0
    )


@pytest.mark.parametrize("rank", [1, 3])
def test_reflections_are_an_orthonormal_basis_that_begins_with_the_vectors(rank):
    u = torch.linalg.qr(torch.randn(2, 6, rank, dtype=torch.float64)).Q
    u[1] = torch.eye(6, dtype=torch.float64)[:, :rank]  # nothing to reflect
    basis = ReflectedBasis(*reflections(u))
    q = basis.vectors
    close(q.mT @ q, torch.eye(6, dtype=torch.float64).expand(2, 6, 6), atol=1e-12, rtol=0)
    close(q[..., :rank].abs(), u.abs(), atol=1e-12, rtol=0)
    x = torch.randn(5, 2, 3, 6, dtype=torch.float64)
    close(basis.into(x), x @ q)
    close(basis.out_of(x), x @ q.mT)
    variances = torch.rand(2, 4, 6, dtype=torch.float64)
    variances[..., rank:] = variances[..., rank : rank + 1]
    close(basis.weighed(variances), variances @ q.square().mT)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("kind", "examples"), [("mlp", 2), ("tokens", 2), ("conv", 2)])
def test_enough_columns_give_the_posterior_of_whole_factors(kind, examples, sharing):
    model, data, x = batches(kind, examples)
    few = data[:1]  # as many rows as the sketch has columns, or fewer
    whole = Laplace(model, "classification", "all", Kron(weight_sharing=sharing)).fit(few)
    la = Laplace(model, "classification", "all", Kron(weight_sharing=sharing, rank=8)).fit(few)
    assert any("sketch" in key for key in la.posterior.fit.sums)
    close(la.log_marginal_likelihood(), whole.log_marginal_likelihood(), rtol=1e-5, atol=0)
    close(la(x), whole(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize("damping", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "tokens"])
def test_few_columns_give_the_posterior_of_the_approximated_factors(kind, damping):
    model, data, x = batches(kind)
    structure = Kron(damping=damping, rank=4)
    la = Laplace(model, "classification", "all", structure, prior_precision=0.7).fit(data)
    whole = Laplace(model, "classification", "all", Kron()).fit([data[i] for i in (2, 0, 1)]).posterior.fit
    precisions = []
    for name, shape in zip(whole.layout.names, whole.layout.shapes, strict=True):
        own = {key.rpartition("/")[2]: value for key, value in whole.sums.items() if key.startswith(f"{name}/")}
        a, b = approximated(own["A"][0] / own["count"], 4), approximated(own["B"][0], 4)
        root = 0.7**0.5 if damping and len(shape) > 1 else 0.0
        eyes = torch.eye(len(b)).double(), torch.eye(len(a)).double()
        exact = 0.0 if root else 0.7 * torch.eye(len(b) * len(a)).double()
        precisions.append(torch.kron(b + root * eyes[0], a + root * eyes[1]) + exact)
    expected = torch.block_diag(*precisions)
    sigma = torch.linalg.inv(expected)
    close(la.posterior_variance, sigma.diagonal())
    parameters = dict(model.named_parameters())
    names = whole.layout.names
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)
    j = torch.cat([jacobians[name].detach().flatten(2) for name in names], 2)  # (N, C, P)
    prediction: Any = la.predict(x)
    close(prediction.outputs.variance, (j @ sigma * j).sum(2))
    close(la.posterior.gaussian.logdet(), torch.linalg.slogdet(expected).logabsdet)
    drawn = la.sample(3000, generator=torch.Generator().manual_seed(0)) - la.mean
    close(drawn.T @ drawn / 3000, sigma, atol=0.15, rtol=0)


def test_the_last_layer_takes_it_too():
    model, data, x = batches("mlp")
    la = Laplace(model, "classification", "last_layer", Kron(rank=12)).fit(data)
    same = Laplace(model, "classification", "last_layer", Kron()).fit(data)
    close(la(x), same(x))
    few = Laplace(model, "classification", "last_layer", Kron(rank=4)).fit(data)
    close(few.module("probit")(x)["mean"], few(x), atol=1e-6, rtol=1e-6)
    assert "kron rank 4 of 3 x 10" in str(few.coverage())


def test_batches_add_and_files_bring_it_back(tmp_path):
    model, data, x = batches("mlp")
    la = Laplace(model, "classification", "all", "kron", rank=4).fit(data)
    parts = Laplace(model, "classification", "all", Kron(rank=4)).fit(data[:1])
    parts.fit(data[1:], override=False)
    close(parts(x), la(x))
    la.save(tmp_path / "la.safetensors")
    close(Laplace.load(tmp_path / "la.safetensors", model)(x), la(x))


@pytest.mark.parametrize("rank", [0, -1, 2.5, True, "few"])
def test_a_rank_is_a_whole_number(rank):
    with pytest.raises(OptionError, match="rank="):
        Kron(rank=rank)

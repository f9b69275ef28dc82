"""Every likelihood at positions, with weights of positions and examples, under the rules of many layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
from laplace import Laplace
from laplace.errors import InputError, UnsupportedError
from laplace.likelihoods import Categorical, Likelihood, Ordinal, from_log_prob
from networks import Tagger

pytestmark = pytest.mark.filterwarnings("ignore:the best prior precision", "ignore:kron keeps")


class Words(nn.Module):
    """Tokens (N, T) -> (N, T, 3) through a table, a recurrent layer and attention to what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(6, 4), nn.GRU(4, 4, batch_first=True)
        self.attend, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h, later = self.mix(self.table(ids))[0], torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        return self.head(h + self.attend(h, h, h, attn_mask=later, need_weights=False)[0])


TASKS: dict[str, tuple[Likelihood | str, int, str]] = {  # likelihood, outputs, labels
    "classification": ("classification", 3, "classes"),
    "regression": ("regression", 2, "numbers"),
    "binary": ("binary", 1, "coins"),
    "multilabel": ("multilabel", 2, "coins"),
    "poisson": ("poisson", 2, "counts"),
    "heteroscedastic": ("heteroscedastic", 2, "numbers of half"),
    "ordinal": (Ordinal(oracle.CUTS), 1, "classes"),
}


def exact(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got.detach(), want.detach().to(got), rtol=tolerance, atol=tolerance)


def made(task: str) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network, inputs, labels in the network's shape, and weights of positions, some of them 0."""
    _, outputs, kind = TASKS[task]
    torch.manual_seed(0)
    model, x = Tagger(outputs).double(), torch.randn(5, 4, 3).double()
    width = outputs // 2 if kind == "numbers of half" else outputs
    y = torch.randn(5, 4, width).double()
    if kind == "classes":
        y = torch.randint(3, (5, 4))
    elif kind in ("coins", "counts"):
        y = torch.randint(2 if kind == "coins" else 5, (5, 4, width)).double()
    weights = torch.rand(5, 4).double() + 0.5
    weights[torch.rand(5, 4) < 0.3] = 0
    return model, x, y, weights


def names_of(model: nn.Module, subset: str) -> list[str]:
    return [k for k, _ in model.named_parameters() if subset == "all" or k.startswith("head")]


def fitted(model: nn.Module, likelihood: Likelihood | str, data: list, subset: str, structure: str, **kw) -> Laplace:
    kw = {"curvature": "ggn", "prior_precision": 0.7, **kw}
    return Laplace(model, likelihood, subset, structure, **kw).fit(data)


def dense(la: Laplace) -> Tensor:
    h = la.H
    return h if isinstance(h, Tensor) and h.dim() == 2 else h.diag() if isinstance(h, Tensor) else h.to_matrix()


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("task", list(TASKS))
def test_every_likelihood_counts_positions_by_their_weights(task, subset, structure):
    model, x, y, weights = made(task)
    rows = y.flatten(0, 1)
    h, loglik = oracle.weighted_at_positions(model, names_of(model, subset), x, rows, task, weights)
    keyed = {"x": x, "labels": y, "weights": weights + (weights == 0), "mask": weights > 0}
    for data in ([(x, y, weights)], [(x[:2], y[:2], weights[:2]), (x[2:], y[2:], weights[2:])], [keyed]):
        la = fitted(model, TASKS[task][0], data, subset, structure, dict_key_x="x")
        exact(dense(la), h if structure == "full" else h.diag().diag())
        exact(la.log_likelihood, loglik)
        assert la.n_data == 5


@pytest.mark.parametrize("task", list(TASKS))
def test_predictions_have_the_shape_of_the_outputs(task):
    model, x, y, weights = made(task)
    la = fitted(model, TASKS[task][0], [(x, y, weights)], "all", "kron")
    prediction = la.predict(x)
    exact(prediction.mean, prediction.rows.mean.unflatten(0, (5, 4)), 1e-12)
    assert prediction.mean.shape[:2] == prediction.epistemic.shape[:2] == (5, 4)
    out = la(x)
    mean = out[0] if isinstance(out, tuple) else out
    assert mean.shape == prediction.mean.shape
    assert la.predictive_samples(x, n_samples=3).shape[:3] == (3, 5, 4)
    la.tune("prior_precision", method="validation", val_loader=[(x, y, weights)], grid_size=3)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_an_exact_lambda_of_any_form_has_no_entries_between_positions(subset):
    model, x, y, weights = made("classification")
    own = from_log_prob(lambda f, y: f.log_softmax(-1).gather(1, y[:, None])[:, 0])
    same = fitted(model, "classification", [(x, y, weights)], subset, "full")
    exact(dense(fitted(model, own, [(x, y, weights)], subset, "full")), dense(same))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag"])
def test_an_example_of_weight_two_is_two_examples_and_padding_is_none(structure, sharing):
    torch.manual_seed(0)
    model, ids, y = Words().double(), torch.randint(6, (4, 5)), torch.randint(3, (4, 5))
    kw = {} if structure == "diag" else {"weight_sharing": sharing}
    weights, lengths = torch.tensor([1.0, 2.0, 1.0, 2.0]).double(), [5, 3, 2, 4]
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
    la = fitted(model, "classification", [(ids, y, weights.unsqueeze(1) * mask)], "all", structure, **kw)
    twice = [(ids[i : i + 1, :n], y[i : i + 1, :n]) for i, n in enumerate(lengths) for _ in range(int(weights[i]))]
    exact(dense(la), dense(fitted(model, "classification", twice, "all", structure, **kw)), 1e-7)
    whole = fitted(model, "classification", [(ids, y, weights)], "all", structure, **kw)
    again = torch.arange(4).repeat_interleave(weights.long())
    exact(dense(whole), dense(fitted(model, "classification", [(ids[again], y[again])], "all", structure, **kw)), 1e-7)


@pytest.mark.parametrize("structure", ["full", "block", "kron", "diag"])
def test_covariances_at_positions_under_the_rules_of_many_layers(structure):
    torch.manual_seed(0)
    model, ids = Words().double(), torch.randint(6, (4, 5))
    la = fitted(model, "regression", [(ids, torch.randn(4, 5, 3).double())], "all", structure)
    jac = oracle.rows_jacobian(model, names_of(model, "all"), ids)
    mean, covariance = la(ids)
    exact(mean, model(ids))
    exact(covariance, jac @ la.posterior_covariance @ jac.mT, 1e-8)
    exact(la(ids, diagonal_output=True)[1], covariance.diagonal(dim1=2, dim2=3))


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_subnetwork_at_positions(structure):
    torch.manual_seed(0)
    model, ids, y = Words().double(), torch.randint(6, (4, 5)), torch.randn(4, 5, 3).double()
    names = names_of(model, "all")
    index = torch.randperm(sum(p.numel() for p in model.parameters()))[:40].sort().values
    la = fitted(model, "regression", [(ids, y)], "subnetwork", structure, subnetwork_indices=index)
    jac = oracle.rows_jacobian(model, names, ids)[..., index]
    exact(la(ids)[1], jac @ la.posterior_covariance @ jac.mT, 1e-8)


@pytest.mark.parametrize("task", ["classification", "binary", "ordinal"])
def test_padding_is_the_label_that_stands_for_none(task):
    model, x, y, weights = made(task)
    kept = weights > 0
    marked = torch.where(kept if y.dim() == 2 else kept.unsqueeze(-1), y, torch.as_tensor(-100).to(y))
    likelihood = TASKS[task][0]
    exact(
        dense(fitted(model, likelihood, [(x, marked)], "all", "full")),
        dense(fitted(model, likelihood, [(x, y, kept)], "all", "full")),
        1e-12,
    )
    if task == "classification":
        other = fitted(model, Categorical(ignore_index=-1), [(x, marked.clamp(min=-1))], "all", "full")
        exact(dense(other), dense(fitted(model, likelihood, [(x, marked)], "all", "full")), 1e-12)


def test_noise_may_be_given_for_examples_positions_and_outputs():
    model, x, y, _ = made("regression")
    noise = torch.rand(5).double() + 0.5
    at = noise.unsqueeze(1).expand(5, 4)
    want = fitted(model, "given_noise", [(x, y, noise)], "all", "full")
    for given in (at, at.unsqueeze(-1).expand(5, 4, 2)):
        exact(dense(fitted(model, "given_noise", [(x, y, given)], "all", "full")), dense(want), 1e-12)
    h, _ = oracle.weighted_at_positions(model, names_of(model, "all"), x, y.flatten(0, 1), "regression", at.pow(-2))
    exact(dense(want), h)


class Number(nn.Module):
    """(N, 3) -> (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()).squeeze(-1)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("likelihood", ["binary", "poisson", "reward_modeling", Ordinal(oracle.CUTS)])
def test_networks_that_give_one_number_serve_every_likelihood_of_one_output(likelihood, subset):
    torch.manual_seed(0)
    model, pairs = Number().double(), likelihood == "reward_modeling"
    x, y = torch.randn(6, 2, 3).double() if pairs else torch.randn(6, 3).double(), torch.randint(2, (6,))
    la = fitted(model, likelihood, [(x, y)], subset, "full")
    kept = nn.Sequential(model.body, nn.Tanh(), model.head)
    two = fitted(kept, likelihood, [(x, y)], subset, "full")
    exact(dense(la), dense(two), 1e-12)
    single = x[:, 0] if pairs else x
    if pairs:
        exact(la.preference(single, x[:, 1]), two.preference(single, x[:, 1]), 1e-12)
        exact(la(single)[0], two(single)[0].squeeze(-1), 1e-12)
    else:
        exact(la(single), two(single).squeeze(-1), 1e-12)


def test_the_empirical_fisher_refuses_weights_within_an_example():
    model, x, y, weights = made("classification")
    with pytest.raises(UnsupportedError, match="squares the score of a whole example"):
        fitted(model, "classification", [(x, y, weights)], "all", "full", curvature="ef")
    fitted(model, "classification", [(x, y, weights > 0)], "all", "full", curvature="ef")


def test_a_saved_posterior_knows_where_the_classes_are(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1)).double()
    x, y = torch.randn(3, 1, 4, 2).double(), torch.randint(3, (3, 4, 2))
    la = fitted(model, "classification", [(x, y)], "last_layer", "kron", class_dim=1)
    la.save(tmp_path / "posterior")
    exact(Laplace.load(tmp_path / "posterior", model)(x), la(x), 1e-12)


@pytest.mark.parametrize("task", ["classification", "poisson"])
def test_kron_weighs_positions_alike_in_a_head_and_in_a_network(task):
    model, x, y, weights = made(task)
    head = dense(fitted(model, task, [(x, y, weights)], "last_layer", "kron"))
    whole = dense(fitted(model, task, [(x, y, weights)], "all", "kron"))
    exact(whole[-len(head) :, -len(head) :], head)
    seen = []
    handle = model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().flatten(0, 1)))
    f = model(x).detach().flatten(0, 1)
    handle.remove()
    (phi,), w = seen, weights.flatten()
    a = torch.einsum("n,ni,nj->ij", w, phi, phi) / w.sum()
    b = torch.einsum("n,ncd->cd", w, oracle.fisher(task, f))
    exact(head, torch.block_diag(torch.kron(b, a), b))


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_weights_may_come_with_a_dimension_for_the_outputs(subset):
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3).double(), torch.randn(5, 2, 4).double(), torch.randint(3, (5, 2))
    weights = torch.rand(5, 2).double().round(decimals=1)
    flat = Laplace(model, "classification", subset).fit([(x, y, weights)])
    shaped = Laplace(model, "classification", subset).fit([(x, y, weights.unsqueeze(2))])
    torch.testing.assert_close(shaped.log_marginal_likelihood(), flat.log_marginal_likelihood())
    with pytest.raises(InputError, match=r"the weights have shape \(\d+, 3\); one per example"):
        Laplace(model, "classification", subset).fit([(x, y, weights.unsqueeze(2).expand(-1, -1, 3))])

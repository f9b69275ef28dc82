"""An ensemble predicts the mean of its networks' predictions, and its epistemic part is what they disagree about."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Poisson as Counts
from torch.utils.data import DataLoader, TensorDataset

from laplace import Ordinal
from laplace.decisions import acquire, choose, draw_functions, score
from laplace.errors import InputError, OptionError, UnsupportedError
from laplace.evaluation import accuracy, ece, nll
from laplace.predictive.reshape import PredictionAtPositions
from laplace.rivals import Ensemble

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
WEIGHTS = (0.5, 0.2, 0.3)


def networks(outputs: int, count: int = 3) -> list[nn.Module]:
    """Networks of different depths."""
    torch.manual_seed(outputs)
    made = [nn.Sequential(nn.Linear(3, 5 + k), nn.Tanh(), nn.Linear(5 + k, outputs)) for k in range(count)]
    return [net.double() for net in made]


def values(models: list[nn.Module], x: Tensor = X) -> Tensor:  # (K, N, C)
    with torch.no_grad():
        return torch.stack([model(x) for model in models])


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(-1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("link", [None, "probit", "mc", "bridge", "delta"])
def test_class_probabilities_are_the_mean_of_softmaxes_whatever_the_link(weights, link):
    models = networks(4)
    w = torch.tensor(weights or [1 / 3] * 3, dtype=torch.float64)
    p = values(models).softmax(-1)
    mean = torch.einsum("k,knc->nc", w, p)
    found = Ensemble(models, "classification", weights).predict(X, link_approx=link)
    close(found.mean, mean)
    close(found.total, entropy(mean))
    close(found.epistemic, entropy(mean) - torch.einsum("k,kn->n", w, entropy(p)))  # the mutual information
    close(Ensemble(models, "classification", weights)(X, link_approx=link), mean)


def test_a_temperature_divides_the_logits_of_every_network():
    models = networks(4)
    found = Ensemble(models, "classification", softmax_temperature=2.5).predict(X)
    close(found.mean, (values(models) / 2.5).softmax(-1).mean(0))


def test_quantiles_of_probabilities_are_those_of_the_weighted_networks():
    models = networks(4)
    found = Ensemble(models, "classification", WEIGHTS).predict(X)
    p, order = values(models).softmax(-1).sort(0)
    reached = torch.tensor(WEIGHTS)[order].cumsum(0)
    for q in (0.1, 0.25, 0.6, 0.95):
        at = (reached < q).sum(0, keepdim=True)
        close(found.quantile(q), p.gather(0, at)[0])
    low, high = found.interval(0.98)
    close(low, p[0])
    close(high, p[-1])


@pytest.mark.parametrize("likelihood", ["binary", "multilabel"])
def test_labels_have_the_mean_of_sigmoids(likelihood):
    models = networks(1 if likelihood == "binary" else 3)
    p = values(models).sigmoid()
    w = torch.tensor(WEIGHTS, dtype=torch.float64)
    mean = torch.einsum("k,knc->nc", w, p)
    found = Ensemble(models, likelihood, WEIGHTS).predict(X)
    close(found.mean, mean)
    both = torch.stack([p, 1 - p], -1)
    close(found.epistemic, entropy(torch.stack([mean, 1 - mean], -1)) - torch.einsum("k,knc->nc", w, entropy(both)))


def test_ordered_classes_have_the_mean_of_probabilities():
    models, ordered = networks(1), Ordinal(4)
    close(Ensemble(models, ordered).predict(X).mean, ordered.inverse_link(values(models)).mean(0))


@pytest.mark.parametrize("outputs", [1, 2])
def test_regression_obeys_the_law_of_total_variance(outputs):
    models, w = networks(outputs), torch.tensor(WEIGHTS, dtype=torch.float64)
    ensemble = Ensemble(models, "regression", WEIGHTS, sigma_noise=0.3)
    f = values(models)
    mean = torch.einsum("k,knc->nc", w, f)
    off = f - mean
    covariance = torch.einsum("k,knc,knd->ncd", w, off, off)
    variance = covariance.diagonal(dim1=1, dim2=2)
    found = ensemble.predict(X)
    close(found.mean, mean)
    close(found.epistemic, variance)
    close(found.aleatoric, torch.full_like(mean, 0.09))
    close(found.distribution.variance, variance + 0.09)
    if outputs > 1:
        close(found.distribution.covariance_matrix, covariance + 0.09 * torch.eye(outputs).double())
        assert isinstance(ensemble.predict(X, diagonal_output=True).distribution, torch.distributions.Normal)
    low, high = found.interval(0.9)
    close((high + low) / 2, mean)
    close((high - low) / 2, 1.6448536269514722 * (variance + 0.09).sqrt())
    for got, expected in zip(ensemble(X), (mean, covariance), strict=True):
        close(got, expected)
    close(ensemble(X, diagonal_output=True)[1], variance)
    flat = off.flatten(1)
    close(ensemble(X, joint=True)[1], torch.einsum("k,ki,kj->ij", w, flat, flat))
    close(ensemble(X, outputs=[outputs - 1])[0], mean[:, -1:])


def test_predicted_noise_is_averaged():
    models, w = networks(4), torch.tensor(WEIGHTS, dtype=torch.float64)
    m, s = values(models).chunk(2, -1)
    found = Ensemble(models, "heteroscedastic", WEIGHTS).predict(X)
    mean = torch.einsum("k,knc->nc", w, m)
    close(found.mean, mean)
    close(found.variance, torch.einsum("k,knc->nc", w, s.exp() + m.square()) - mean.square())


def test_counts_are_a_mixture_of_poissons():
    models, w = networks(2), torch.tensor(WEIGHTS, dtype=torch.float64)
    rates = values(models).exp()
    found, y = Ensemble(models, "poisson", WEIGHTS).predict(X), torch.tensor([0.0, 3.0]).double().expand(7, 2)
    mean = torch.einsum("k,knc->nc", w, rates)
    close(found.mean, mean)
    close(found.epistemic, torch.einsum("k,knc->nc", w, (rates - mean).square()))
    close(found.aleatoric, mean)
    p = torch.einsum("k,knc->nc", w, Counts(rates).log_prob(y).exp())
    torch.testing.assert_close(found.distribution.log_prob(y), p.log(), rtol=1e-7, atol=1e-9)
    upto = sum(torch.einsum("k,knc->nc", w, Counts(rates).log_prob(torch.full_like(y, k)).exp()) for k in range(4))
    torch.testing.assert_close(found.distribution.cdf(torch.full_like(y, 3)), upto, rtol=1e-7, atol=1e-9)
    close(found[2:4].distribution.mean, mean[2:4])


def test_functions_are_those_of_the_networks_in_proportion_to_their_weights():
    models = networks(4)
    ensemble = Ensemble(models, "classification", WEIGHTS)
    drawn = ensemble.functional_samples(X, n_samples=10, generator=torch.Generator().manual_seed(0))
    f = values(models)
    counts = [sum(torch.equal(one, member) for one in drawn) for member in f]
    assert counts == [5, 2, 3]
    close(
        ensemble.predictive_samples(X, n_samples=10).mean(0), torch.einsum("k,knc->nc", ensemble.weights, f.softmax(-1))
    )
    close(ensemble.predict(X, pred_type="nn", n_samples=10).mean, ensemble.predict(X).mean)
    functions = draw_functions(ensemble, 4, generator=torch.Generator().manual_seed(1))
    close(functions(X), functions(X))
    singles = {draw_functions(ensemble, 1).seed for _ in range(3)}
    assert len(singles) == 3


def test_active_learning_scores_the_disagreement_of_the_networks():
    models = networks(4)
    ensemble, p = Ensemble(models, "classification"), values(models).softmax(-1)
    information = entropy(p.mean(0)) - entropy(p).mean(0)
    close(score(ensemble, X, "bald", n_samples=30), information)
    close(ensemble.predict(X).epistemic, information)
    chosen = acquire(ensemble, X, 2, n_samples=30)
    assert chosen.indices.tolist() == information.topk(2).indices.tolist()
    assert len(acquire(ensemble, X, 3, "batch_bald", n_samples=30).indices) == 3
    assert len(acquire(Ensemble(networks(1), "binary"), X, 2, n_samples=30).indices) == 2
    regression = Ensemble(networks(1), "regression", sigma_noise=0.5)
    bald = 0.5 * torch.log1p(regression.predict(X).epistemic.squeeze(1) / 0.25)
    close(score(regression, X, "bald"), bald)
    assert len(acquire(regression, X, 2, "epig").indices) == 2


def test_bandits_choose_by_an_ensemble():
    ensemble, options = Ensemble(networks(1), "regression"), X[:6].reshape(2, 3, 3)
    assert (
        choose(ensemble, options, "greedy").tolist()
        == ensemble(options.flatten(0, 1))[0].reshape(2, 3).argmax(1).tolist()
    )
    assert choose(ensemble, options, "thompson").shape == (2,)
    with pytest.raises(UnsupportedError, match="one reward each"):
        choose(Ensemble(networks(2), "regression"), options)


def test_networks_are_run_in_eval_mode_and_left_alone():
    models = [
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).double() for _ in range(2)
    ]
    before = [{key: value.clone() for key, value in model.state_dict().items()} for model in models]
    found = Ensemble(models, "classification").predict(X).mean
    assert all(model.training for model in models)
    for model, kept in zip(models, before, strict=True):
        assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    close(found, values([model.eval() for model in models]).softmax(-1).mean(0))


def test_batches_loaders_and_metrics():
    models, y = networks(4), torch.arange(7) % 4
    ensemble = Ensemble(models, "classification")
    whole = ensemble.predict(X)
    close(ensemble.predict(DataLoader(TensorDataset(X, y), batch_size=3)).mean, whole.mean)
    close(type(whole).cat([ensemble.predict(X[:2]), ensemble.predict(X[2:])]).mean, whole.mean)
    assert nll(whole.mean, y) > 0
    assert 0 <= accuracy(whole.mean, y) <= 1
    assert 0 <= ece(whole.mean, y) <= 1
    assert ensemble.predict(X.numpy()).mean.shape == (7, 4)
    many = torch.randn(2500, 3).double()  # runs in parts
    close(ensemble.predict(many).mean, values(models, many).softmax(-1).mean(0))


def test_outputs_at_positions_keep_the_networks_shape():
    models, x = networks(4), torch.randn(5, 6, 3).double()  # (N, T, C)
    found = Ensemble(models, "classification").predict(x)
    assert isinstance(found, PredictionAtPositions)
    close(found.mean, values(models, x).softmax(-1).mean(0))
    flipped = [nn.Sequential(nn.Conv2d(3, 4, 1)).double() for _ in range(2)]
    images = torch.randn(2, 3, 5, 5).double()
    found = Ensemble(flipped, "classification", class_dim=1).predict(images)
    close(found.mean, values(flipped, images).softmax(2).mean(0))


def test_inputs_may_be_a_mapping():
    class Named(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.net(input_ids)

    models = networks(4)
    found = Ensemble([Named(model) for model in models], "classification").predict({"input_ids": X})
    close(found.mean, values(models).softmax(-1).mean(0))


def test_wrong_use_is_refused():
    models = networks(2)
    with pytest.raises(OptionError, match="an empty list"):
        Ensemble([], "classification")
    with pytest.raises(OptionError, match=r"write Ensemble\(\[model\]"):
        Ensemble(models[0], "classification")
    with pytest.raises(OptionError, match="models is Linear, str"):
        Ensemble([nn.Linear(2, 2), "net"], "classification")
    with pytest.raises(OptionError, match="each of the 3 members"):
        Ensemble(models, "classification", [1.0, 2.0])
    with pytest.raises(OptionError, match="not all 0"):
        Ensemble(models, "classification", [0.0, 0.0, 0.0])
    with pytest.raises(OptionError, match="divides logits"):
        Ensemble(models, "regression", softmax_temperature=2.0)
    with pytest.raises(InputError, match="network 1"):
        Ensemble([models[0], *networks(3)], "classification").predict(X)
    with pytest.raises(InputError, match="NaN"):
        Ensemble(models, "classification").predict(X * float("nan"))
    assert Ensemble(models, "classification").n_outputs is None

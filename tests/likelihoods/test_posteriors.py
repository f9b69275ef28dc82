"""Every likelihood through fit, evidence, prediction and tuning, against the dense oracle."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import oracle
from laplace import Laplace, marglik_training, plan
from laplace.errors import InputError, OptionError, UnsupportedError
from laplace.likelihoods import Categorical, Gaussian, GivenNoise, Ordinal, from_log_prob
from laplace.predictive.logistic import expected_sigmoid
from networks import cut

pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.BoundaryWarning")  # grids of three points

F64 = torch.float64
OUTPUTS = {
    "classification": 3,
    "regression": 2,
    "binary": 1,
    "multilabel": 2,
    "poisson": 2,
    "heteroscedastic": 2,
    "ordinal": 1,
    "reward_modeling": 1,
}
TASKS = list(OUTPUTS)
every = pytest.mark.parametrize("task", TASKS)


def named(task):
    return Ordinal(oracle.CUTS) if task == "ordinal" else task


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def problem(task, n=12):
    """A network, inputs, labels drawn from it, and the labels as users give them."""
    model = network(OUTPUTS[task])
    x = torch.randn(n, *([2] if task == "reward_modeling" else []), 3, dtype=F64)
    f = model(x).detach()
    f = f[:, 1] - f[:, 0] if task == "reward_modeling" else f
    labels = [oracle.all_labels(task, row) for row in f]
    y = torch.stack([y[int(torch.multinomial(p.clamp(min=0), 1))] for y, p in labels])
    given = y.squeeze(1).long() if task in ("reward_modeling", "binary") else y
    return model, x, y, given


def names_of(model, subset):
    names = [k for k, _ in model.named_parameters()]
    return names[-2:] if subset == "last_layer" else names


def close(a, b, tol=1e-7):
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tol * max(1.0, float(b.abs().max()))


@every
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("weighted", [False, True])
def test_curvature_evidence_and_variances_are_the_oracles(task, subset, weighted):
    model, x, y, given = problem(task)
    weights = torch.rand(len(x), dtype=F64) * 2 if weighted else torch.ones(len(x), dtype=F64)
    weights[3] = 0 if weighted else 1
    batches = cut(x, given, [5, 1, 6])
    if weighted:
        batches = [(a, b, w) for (a, b), w in zip(batches, weights.split([5, 1, 6]), strict=True)]
    la = Laplace(model, named(task), subset, "full", prior_precision=0.7).fit(batches)
    names = names_of(model, subset)
    dense = oracle.weighted_fit(model, names, x, y, task, weights, task == "reward_modeling")
    close(la.H, dense.h)
    assert la.n_data == len(x)
    delta = dense.expand(0.7)
    close(la.log_marginal_likelihood(), dense.evidence(delta))
    single = x[:, 0] if task == "reward_modeling" else x
    jac = oracle.jacobian(model, names, single)
    close(la.predict(single).outputs.covariance, jac @ dense.covariance(delta) @ jac.mT)
    diag = Laplace(model, named(task), subset, "diag").fit(batches)
    close(diag.H, dense.h.diagonal())


TWICE = [(task, "kron") for task in TASKS]
TWICE += [(task, kind) for task in ("classification", "reward_modeling") for kind in ("ekfac", "diag", "full", "gp")]


@pytest.mark.parametrize(("task", "structure"), TWICE)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_a_weight_of_two_is_an_example_seen_twice(task, structure, subset):
    model, x, _, given = problem(task)
    weights = torch.tensor([1.0, 2.0, 3.0, 0.0] * 3, dtype=F64)
    repeats = weights.long()
    heavy = Laplace(model, named(task), subset, structure).fit([(x, given, weights)])
    twice = Laplace(model, named(task), subset, structure).fit(
        [(x.repeat_interleave(repeats, 0), given.repeat_interleave(repeats, 0))]
    )
    close(heavy.log_marginal_likelihood(), twice.log_marginal_likelihood())
    single = x[:, 0] if task == "reward_modeling" else x
    close(heavy.predict(single).outputs.variance, twice.predict(single).outputs.variance)


@every
def test_estimated_curvatures_average_to_the_exact_one(task):
    model, x, _, given = problem(task)
    exact = Laplace(model, named(task), hessian_structure="diag").fit([(x, given)]).H
    for kind in ("mc", "sketch"):
        options = {"curvature": kind, "curvature_samples": 4000}
        la = Laplace(model, named(task), hessian_structure="diag", **options)
        la.fit([(x, given)], generator=torch.Generator().manual_seed(0))
        assert float(((la.H - exact).abs() / exact.max()).max()) < 0.1


@every
def test_predictions_have_the_promised_form(task):
    model, x, _, given = problem(task)
    la = Laplace(model, named(task)).fit([(x, given)])
    single = x[:, 0] if task == "reward_modeling" else x
    n, columns = len(x), {"ordinal": 4, "heteroscedastic": 1}.get(task, OUTPUTS[task])
    found, sampled = la(single), la(single, pred_type="nn", n_samples=50)
    if task in ("regression", "heteroscedastic", "reward_modeling"):
        mean, covariance = found
        assert mean.shape == (n, columns)
        assert covariance.shape == (n, columns, columns)
        assert la(single, diagonal_output=True)[1].shape == mean.shape
        assert sampled[1].shape == mean.shape
    else:
        mean = found
        assert mean.shape == sampled.shape == (n, columns)
        for link in la.likelihood.links:
            p = la(single, link_approx=link, n_samples=400, generator=torch.Generator().manual_seed(0))
            assert float((p - mean).abs().max()) < 0.15 * max(1.0, float(mean.max()))
    for pred_type in ("glm", "nn"):
        prediction = la.predict(single, pred_type=pred_type)
        assert prediction.mean.shape == (n, columns)
        assert (prediction.epistemic >= 0).all()
        assert (prediction.aleatoric >= 0).all()
        lower, upper = prediction.interval(0.9)
        assert lower.shape == upper.shape == (n, columns)
        assert (lower <= upper).all()
        assert "Prediction" in repr(prediction)
    usual = la.likelihood.response.default_link or None
    torch.testing.assert_close(la.predict(single).mean, la(single, link_approx=usual) if usual else mean)
    draws = la.predictive_samples(single, n_samples=3)
    assert draws.shape == (3, n, columns)


@every
def test_tuning_works_by_evidence_and_by_validation(task):
    model, x, _, given = problem(task, n=30)
    la = Laplace(model, named(task), hessian_structure="full").fit([(x[:20], given[:20])])
    tuned = la.tune(method="evidence")
    slope = [float(la.log_marginal_likelihood(float(tuned.prior_precision) * s)) for s in (0.98, 1.0, 1.02)]
    assert slope[1] >= max(slope)
    validation = [(x[20:25], given[20:25]), (x[25:], given[25:])]
    for pred_type in ("glm", "nn"):
        found = la.tune(method="validation", val_loader=validation, grid_size=4, pred_type=pred_type, n_samples=20)
        assert math.isfinite(found.score)
    la.optimize_prior_precision(method="gridsearch", val_loader=validation, grid_size=3)


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("regression", "classification")])
def test_a_validation_score_is_the_weighted_mean_of_log_predictives(task):
    model, x, y, given = problem(task, n=6)
    la = Laplace(model, named(task), hessian_structure="full").fit([(x, given)])
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, 0.5], dtype=F64)
    bounds = {"prior_precision": (0.9999, 1.0001)}
    found = la.tune(method="validation", val_loader=[(x, given, weights)], bounds=bounds, grid_size=2)
    la.prior_precision = 1.0
    if task == "reward_modeling":
        p = la.preference(x[:, 1], x[:, 0])
        expected = torch.where(given == 1, p, 1 - p).log()
    else:
        prediction = la.predict(x)
        if task == "ordinal":
            expected = prediction.mean.gather(1, y[:, None])[:, 0].log()
        else:
            expected = prediction.distribution.log_prob(y).sum(-1)
    assert found.score == pytest.approx(float(-(weights * expected).sum() / weights.sum()), rel=1e-3)


def test_poisson_predictive_is_the_integral_and_its_mean_the_closed_form():
    model, x, _, given = problem("poisson")
    la = Laplace(model, "poisson", hessian_structure="full").fit([(x, given)])
    outputs = la.predict(x).outputs
    close(la(x), (outputs.mean + outputs.variance / 2).exp())
    z, w = oracle.normal_nodes(1, 60)
    rates = (outputs.mean[0, 0] + outputs.variance[0, 0].sqrt() * z[:, 0]).exp()
    for k in (0, 1, 4):
        exact = w @ torch.distributions.Poisson(rates).log_prob(torch.tensor(float(k))).exp()
        counts = torch.full_like(outputs.mean, k)
        assert float(la.predict(x).distribution.log_prob(counts)[0, 0]) == pytest.approx(float(exact.log()), rel=1e-5)


def test_binary_is_two_class_classification_with_a_fixed_logit():
    model, x, _, given = problem("binary")
    la = Laplace(model, "binary", hessian_structure="full").fit([(x, given)])
    same = Laplace(model, "binary", hessian_structure="full").fit([(x, given.double().unsqueeze(1))])
    close(la.H, same.H)
    outputs = la.predict(x).outputs
    close(la(x), (outputs.mean / (1 + math.pi / 8 * outputs.variance).sqrt()).sigmoid())


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "gp", "lowrank"])
def test_preference_is_the_probability_of_the_difference(subset, structure):
    model, x, _, given = problem("reward_modeling")
    la = Laplace(model, "reward_modeling", subset, structure).fit([(x[:7], given[:7]), (x[7:], given[7:])])
    a, b = x[:5, 1], x[:5, 0]
    mean, joint = la(torch.cat([a, b]), joint=True)
    picks = torch.cat([torch.eye(5), -torch.eye(5)], 1).double()
    f, variance = picks @ mean, (picks @ joint @ picks.T).diagonal()
    close(la.preference(a, b, "probit"), (f / (1 + math.pi / 8 * variance).sqrt()).sigmoid())
    close(la.preference(a, b), expected_sigmoid(f, variance))
    close(la.preference(a, b) + la.preference(b, a), torch.ones(5, dtype=F64))
    with pytest.raises(InputError, match="same shapes"):
        la.preference(a, b[:2])


def test_preference_is_for_rewards():
    model, x, _, given = problem("binary")
    with pytest.raises(UnsupportedError, match="reward_modeling"):
        Laplace(model, "binary").fit([(x, given)]).preference(x, x)


def test_rewards_from_mappings():
    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network(1)

        def forward(self, input_ids, scale):
            return self.net(input_ids * scale)

    model, (_, x, _, given) = Reward(), problem("reward_modeling")
    batch = {"input_ids": x, "scale": torch.full((len(x), 2, 1), 1.0, dtype=F64), "labels": given}
    la = Laplace(model, "reward_modeling", hessian_structure="full").fit([batch])
    plain = Laplace(model.net, "reward_modeling", hessian_structure="full").fit([(x, given)])
    close(la.H, plain.H)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_noise_per_output_is_honoured_and_tuned_as_a_whole(subset):
    model, x, y, _ = problem("regression")
    noise = torch.tensor([0.3, 1.2], dtype=F64)
    la = Laplace(model, "regression", subset, "full", sigma_noise=noise).fit(cut(x, y, [5, 7]))
    torch.testing.assert_close(la.sigma_noise, noise)
    names = names_of(model, subset)
    jac, f = oracle.jacobian(model, names, x), model(x).detach()
    precision = torch.einsum("ncp,c,ncq->pq", jac, noise**-2, jac) + torch.eye(jac.shape[2], dtype=F64)
    close(la.posterior_precision, precision)
    mean = la.mean
    evidence = torch.distributions.Normal(f, noise).log_prob(y).sum() - 0.5 * (mean @ mean + torch.logdet(precision))
    close(la.log_marginal_likelihood(), evidence)
    close(la.predict(x).aleatoric, (noise**2).expand_as(f))
    before = float(la.log_marginal_likelihood())
    la.tune("sigma_noise")
    assert float(la.log_marginal_likelihood()) > before
    torch.testing.assert_close(la.sigma_noise[0] / la.sigma_noise[1], noise[0] / noise[1])
    la.sigma_noise = 2 * noise
    torch.testing.assert_close(la.sigma_noise, 2 * noise)
    with pytest.raises(OptionError, match="make a new Laplace"):
        la.sigma_noise = torch.tensor([1.0, 1.0])
    other = Laplace(model, "regression", subset, "full", sigma_noise=noise)
    other.load_state_dict(la.state_dict())
    close(other.log_marginal_likelihood(), la.log_marginal_likelihood())


def test_noise_given_with_every_example():
    model, x, y, _ = problem("regression")
    noise = torch.rand(len(x), 2, dtype=F64) + 0.2
    la = Laplace(model, "given_noise", hessian_structure="full", sigma_noise=1.5).fit([(x, y, noise)])
    jac, f = oracle.jacobian(model, names_of(model, "last_layer"), x), model(x).detach()
    precision = torch.einsum("ncp,nc,ncq->pq", jac, (1.5 * noise) ** -2, jac) + torch.eye(jac.shape[2], dtype=F64)
    close(la.posterior_precision, precision)
    loglik = torch.distributions.Normal(f, 1.5 * noise).log_prob(y).sum()
    close(la.log_marginal_likelihood(), loglik - 0.5 * (la.mean @ la.mean + torch.logdet(precision)))
    weights = torch.rand(len(x), dtype=F64)
    both = Laplace(model, GivenNoise(), hessian_structure="full").fit([(x, y, noise, weights)])
    close(both.H, torch.einsum("ncp,nc,n,ncq->pq", jac, noise**-2, weights, jac))
    mapped = [{"input_ids": x, "labels": y, "noise": noise, "weights": weights}]
    named_ = Laplace(_Named(model), GivenNoise(), hessian_structure="full").fit(mapped)
    close(named_.H, both.H)
    assert la.predict(x).aleatoric.eq(0).all()
    la.tune("sigma_noise")
    assert math.isfinite(la.tune(method="validation", val_loader=[(x, y, noise)], grid_size=3).score)
    loss = lambda mean, variance, y: ((mean - y) ** 2 / variance).mean()  # noqa: E731
    assert la.tune(method="validation", val_loader=[(x, y, noise)], grid_size=3, loss=loss).score > 0


class _Named(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, input_ids):
        return self.net(input_ids)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_ignored_examples_count_for_nothing(structure, subset):
    model, x, _, given = problem("classification")
    kept = torch.arange(len(x)) % 3 != 0
    labels = torch.where(kept, given, -100)
    some = Laplace(model, Categorical(ignore_index=-100), subset, structure).fit(cut(x, labels, [5, 7]))
    few = Laplace(model, "classification", subset, structure).fit([(x[kept], given[kept])])
    close(some.log_marginal_likelihood(), few.log_marginal_likelihood())
    close(some(x), few(x))
    validation = {"method": "validation", "grid_size": 3}
    assert some.tune(**validation, val_loader=[(x, labels)]).score == pytest.approx(
        few.tune(**validation, val_loader=[(x[kept], given[kept])]).score
    )
    with pytest.raises(InputError, match="none of the"):
        some.fit([(x, torch.full_like(labels, -100))])


def test_an_own_log_density_goes_all_the_way():
    model, x, _, given = problem("poisson")

    def log_prob(f, y):
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)

    for inverse_link in (None, torch.exp):
        own = from_log_prob(log_prob, inverse_link)
        la = Laplace(model, own, "all", "full").fit([(x, given)])
        named_ = Laplace(model, "poisson", "all", "full").fit([(x, given)])
        close(la.H, named_.H)
        close(la.log_marginal_likelihood(), named_.log_marginal_likelihood())
        if inverse_link is None:
            assert la(x)[1].shape == (len(x), 2, 2)
        else:
            draws = la(x, n_samples=4000, generator=torch.Generator().manual_seed(0))
            assert float((draws / named_(x) - 1).abs().max()) < 0.1
            rates, known = la.predict(x, n_samples=4000), named_.predict(x)
            assert float((rates.epistemic / known.epistemic - 1).abs().max()) < 0.5  # by 256 draws
            torch.testing.assert_close(rates.distribution.mean, rates.mean)
        la.tune()
        found = la.tune(method="validation", val_loader=[(x, given)], grid_size=3)
        assert math.isfinite(found.score)
        hessian = Laplace(model, own, "all", "full", curvature="hessian").fit([(x, given)])
        named_ = Laplace(model, "poisson", "all", "full", curvature="hessian").fit([(x, given)])
        close(hessian.H, named_.H)
    with pytest.raises(UnsupportedError, match="sample="):
        Laplace(model, from_log_prob(log_prob), curvature="mc").fit([(x, given)])


@every
def test_posteriors_are_saved_copied_planned_and_trained(task, capsys):
    model, x, _, given = problem(task)
    la = Laplace(model, named(task)).fit([(x, given)])
    other = Laplace(model, named(task))
    other.load_state_dict(la.state_dict())
    close(other.log_marginal_likelihood(), la.log_marginal_likelihood())
    single = x[:, 0] if task == "reward_modeling" else x
    for twin in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):  # noqa: S301
        close(twin.predict(single).mean, la.predict(single).mean)
    assert plan(model, (x, given), named(task))["kron"].fits
    options = {"n_epochs": 2, "n_hypersteps": 2}
    trained, *_ = marglik_training(copy.deepcopy(model), [(x, given)], named(task), **options)
    assert trained.log_marginal_likelihood().isfinite()
    assert task in repr(la)


def test_states_of_other_options_are_refused():
    model, x, _, given = problem("classification")
    la = Laplace(model, Categorical(label_smoothing=0.1)).fit([(x, given)])
    with pytest.raises(InputError, match="label_smoothing"):
        Laplace(model, "classification").load_state_dict(la.state_dict())


def test_small_batches_with_weights_are_joined(gathering):
    model, x, _, given = problem("binary")
    weights = torch.rand(len(x), dtype=F64)
    parts = [(x[i : i + 1], given[i : i + 1], weights[i : i + 1]) for i in range(len(x))]
    for structure in ("kron", "full"):
        joined = Laplace(model, "binary", "all", structure).fit(parts)
        whole = Laplace(model, "binary", "all", structure).fit([(x, given, weights)])
        close(joined.log_marginal_likelihood(), whole.log_marginal_likelihood())


def test_weights_of_convolutions_count_in_both_kronecker_factors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 1)).double()
    x, y = torch.randn(6, 1, 4, 4, dtype=F64), torch.tensor([0, 1, 1, 0, 1, 0])
    repeats = torch.tensor([1, 2, 0, 1, 3, 1])
    for sharing in ("expand", "reduce"):
        heavy = Laplace(model, "binary", "all", weight_sharing=sharing).fit([(x, y, repeats)])
        twice = Laplace(model, "binary", "all", weight_sharing=sharing).fit(
            [(x.repeat_interleave(repeats, 0), y.repeat_interleave(repeats, 0))]
        )
        close(heavy.log_marginal_likelihood(), twice.log_marginal_likelihood())


def test_likelihood_objects_and_names_mean_the_same():
    model, x, y, _ = problem("regression")
    close(
        Laplace(model, Gaussian()).fit([(x, y)]).H.to_matrix(), Laplace(model, "regression").fit([(x, y)]).H.to_matrix()
    )


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_class_weights_are_the_weights_of_the_examples_of_each_class(subset, structure):
    model, x, _, y = problem("classification")
    weights = torch.linspace(0.5, 2, int(model(x).shape[1]), dtype=torch.float64)
    by_class = Laplace(model, Categorical(class_weights=weights), subset, structure).fit(cut(x, y, [5, 7]))
    by_example = Laplace(model, "classification", subset, structure)
    by_example.fit([(x[:5], y[:5], weights[y[:5]]), (x[5:], y[5:], weights[y[5:]])])
    close(by_class.log_marginal_likelihood(), by_example.log_marginal_likelihood())
    close(by_class(x), by_example(x))
    plain = Laplace(model, "classification", subset, structure).fit(cut(x, y, [5, 7]))
    assert not torch.allclose(by_class(x), plain(x))


@pytest.mark.parametrize("size", [1, 5, 12])
def test_noise_of_one_output_counts_whatever_the_batch_size(size):
    model, x, y, _ = problem("binary")
    noise = torch.rand(len(x), dtype=F64) + 0.5
    batches = [(a, b, n) for a, b, n in zip(x.split(size), y.to(F64).split(size), noise.split(size), strict=True)]
    la = Laplace(model, "given_noise", "all", "full").fit(batches)
    expected = torch.distributions.Normal(model(x).detach(), noise.unsqueeze(1)).log_prob(y.to(F64)).sum()
    torch.testing.assert_close(la.log_likelihood, expected)
    one = Laplace(model, Gaussian(per_output=[0.5]), "all", "full").fit(cut(x, y.to(F64), size))
    expected = torch.distributions.Normal(model(x).detach(), 0.5).log_prob(y.to(F64)).sum()
    torch.testing.assert_close(one.log_likelihood, expected)
    if len(batches) > 1:
        parts = batches[:1], batches[1:]
        halves = [Laplace(model, "given_noise", "all", "full").fit(part) for part in parts]
        torch.testing.assert_close((halves[0] + halves[1]).log_likelihood, la.log_likelihood)


def test_a_loss_sees_the_noise_that_is_given():
    model, x, y, _ = problem("regression")
    noise, seen = torch.rand_like(y) + 0.5, []

    def loss(mean, variance, labels):
        seen.append(variance)
        return variance.mean()

    la = Laplace(model, "given_noise", "all", "full").fit([(x, y, noise)])
    la.tune(method="validation", val_loader=[(x, y, noise)], loss=loss, grid_size=2)
    la.prior_precision = 1e-4
    _, covariance = la(x)
    torch.testing.assert_close(seen[0], covariance.diagonal(dim1=1, dim2=2) + noise.square())

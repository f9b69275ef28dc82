"""`la.tune()` does no harm: what it sets is looked at on the training data, and the result says what was done."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.errors import LaplaceWarning
from laplace.priors import StudentT
from laplace.tuning import guard
from laplace.tuning.training_data import Sample
from networks import cut, make

CLASSES = 4


def overfitted(n=60, seed=0, outputs=CLASSES):
    """A network that knows its few training examples by heart: the evidence leaves a posterior that is far too wide."""
    torch.manual_seed(seed)
    means = 2 * torch.randn(CLASSES, 8)
    y = torch.arange(n + 400) % CLASSES
    x = means[y] + torch.randn(n + 400, 8)
    labels = y if outputs > 1 else (y[:, None] % 2).float()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, outputs))
    loss = nn.functional.cross_entropy if outputs > 1 else nn.functional.binary_cross_entropy_with_logits
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(200):
        optimiser.zero_grad()
        loss(model(x[:n]), labels[:n]).backward()
        optimiser.step()
    return model.eval(), (x[:n], labels[:n]), (x[n:], labels[n:])


def nll(la, data):
    x, y = data
    return -float(la.predict(x).distribution.log_prob(y).mean())


def own_nll(model, data):
    return float(nn.functional.cross_entropy(model(data[0]).detach(), data[1]))


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_no_classifier_is_made_worse(subset, structure):
    model, training, testing = overfitted()
    la = Laplace(model, "classification", subset, structure).fit(cut(*training, 16))
    with pytest.warns(LaplaceWarning, match=r"the network's own .*la\.calibrate\(val_loader\)"):
        by_evidence = la.tune(method="evidence")
    assert nll(la, testing) > own_nll(model, testing) + 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned = la.tune()
    assert tuned.method == "guarded evidence"
    assert float(la.prior_precision) == float(tuned.prior_precision) > float(by_evidence.prior_precision)
    assert tuned.score == pytest.approx(float(la.log_marginal_likelihood()))
    assert "raised" in tuned.notes[0]
    assert nll(la, testing) <= own_nll(model, testing) + guard.ALLOWED
    assert nll(la, training) <= own_nll(model, training) + guard.ALLOWED + 1e-6


def test_a_network_that_knows_its_data_by_heart_is_sent_to_validation_data():
    model, training, testing = overfitted()
    assert own_nll(model, training) < 0.02 < own_nll(model, testing)
    la = Laplace(model, "classification")
    assert "la.calibrate(val_loader)" in la.fit([training]).tune().notes[-1]
    told = la.fit([testing]).tune().notes  # data that it does not know by heart
    assert not any("la.calibrate" in note for note in told)


def test_it_is_raised_no_further_than_it_must_be():
    model, training, _ = overfitted()
    la = Laplace(model, "classification").fit([training])
    la.tune()
    la.prior_precision = la.prior_precision / 10 ** (1 / 8)
    assert nll(la, training) > own_nll(model, training) + guard.ALLOWED


def test_one_precision_per_tensor_keeps_its_proportions():
    model, training, _ = overfitted()
    la = Laplace(model, "classification", "all").fit([training])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_evidence = la.tune(method="evidence", prior_structure="layerwise").prior_precision
    raised = la.tune(prior_structure="layerwise").prior_precision / by_evidence
    assert torch.allclose(raised, raised[0], rtol=1e-4)
    assert raised[0] > 1


@pytest.mark.parametrize("method", ["auto", "evidence"])
def test_a_prior_that_cannot_be_narrowed_is_not_promised_to_be(method):
    model, training, _ = overfitted()
    la = Laplace(model, "classification", "all", "diag", prior=StudentT(df=4, scale=1.0)).fit([training])
    with pytest.warns(
        LaplaceWarning, match=r"prior_precision= in place of StudentT, la\.tune\(\) finds a prior"
    ) as seen:
        la.tune(method=method)
    assert not any("method='auto'" in str(warning.message) for warning in seen)
    assert Laplace(model, "classification", "all", "diag").fit([training]).tune().method == "guarded evidence"


def test_where_the_evidence_does_no_harm_it_is_taken():
    model, x, y = make("mlp", "classification", n=40)
    y = torch.distributions.Categorical(logits=model(x).detach()).sample()
    la = Laplace(model, "classification").fit(cut(x, y, 9))
    tuned, again = la.tune(), la.tune(method="evidence")
    assert (tuned.method, again.method) == ("evidence", "evidence")
    assert float(tuned.prior_precision) == float(again.prior_precision)
    assert "taken as it is" in tuned.notes[-1]


def test_without_training_data_the_evidence_is_taken_and_that_is_said(tmp_path):
    model, training, _ = overfitted()
    la = Laplace(model, "classification").fit([training])
    la.save(tmp_path / "la")
    others = [Laplace.load(tmp_path / "la", model), copy.deepcopy(la), pickle.loads(pickle.dumps(la)), copy.copy(la)]  # noqa: S301
    others += [Laplace(model, "classification").fit(iter([training])), sum([la, la])]
    for other in others:
        assert other.training_data is None
        tuned = other.tune()
        assert tuned.method == "evidence"
        assert "no training data" in tuned.notes[-1]
    assert others[0].tune(train_loader=[training]).method == "guarded evidence"


def test_data_that_cannot_be_read_again_do_not_cost_the_result():
    class File(list):
        closed = False

        def __iter__(self):
            if self.closed:
                raise OSError("closed")
            return super().__iter__()

    model, training, _ = overfitted()
    data = File([training])
    la = Laplace(model, "classification").fit(data)
    data.closed = True
    tuned = la.tune()
    assert tuned.method == "evidence"
    assert "could not be read" in tuned.notes[-1]


def test_binary_labels_are_looked_at_too():
    model, training, _ = overfitted(outputs=1)
    la = Laplace(model, "binary").fit([training])
    with pytest.warns(LaplaceWarning, match="mean confidence"):
        la.tune(method="evidence")
    assert la.tune().method == "guarded evidence"


def test_the_network_runs_on_at_most_a_fifth_of_the_data():
    calls = []

    class Counting(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    torch.manual_seed(0)
    x, y = torch.randn(2000, 3), torch.randint(3, (2000,))
    la = Laplace(Counting(3, 3), "classification").fit(DataLoader(TensorDataset(x, y), batch_size=100))
    seen = sum(calls)
    calls.clear()
    la.tune()
    assert sum(calls) <= 0.3 * seen
    assert guard.size(2000) == 400


def regression(n=120, body=True, seed=0, outputs=1):
    torch.manual_seed(seed)
    x = torch.randn(n + 500, 3, dtype=torch.float64)
    y = torch.sin(2 * x[:, :outputs]) + 0.3 * torch.randn(n + 500, outputs, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, outputs)).double()
    if not body:
        model[0].requires_grad_(False)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        (model(x[:n]) - y[:n]).square().mean().backward()
        optimiser.step()
    return model, (x[:n], y[:n]), (x[n:], y[n:])


def residual(model, data):
    return float((model(data[0]) - data[1]).detach().square().mean().sqrt())


def evidence_noise(model, training, subset, structure="kron"):
    """The noise at the joint maximum of the evidence."""
    la = Laplace(model, "regression", subset, structure).fit([training])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return la.tune("prior_precision", "sigma_noise", method="evidence").sigma_noise


def shares(model, training):
    """Noise and mean of S at the training inputs, by the evidence of the dense GGN of all weights: the reference."""
    noise = evidence_noise(model, training, "all", "full")
    return noise, noise**2 - residual(model, training) ** 2


def mean_variance(la, x):
    """The mean of S, without the noise."""
    return float(la(x)[1].mean())


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_noise_and_variance_of_all_weights_are_those_of_the_dense_linear_model(structure):
    model, training, _ = regression(n=100)
    la = Laplace(model, "regression", "all", structure).fit(cut(*training, 32))
    assert la.tune().method == "residuals and evidence"
    noise, variance = shares(model, training)
    assert float(la.sigma_noise) == pytest.approx(noise, rel=1e-3)
    assert mean_variance(la, training[0]) == pytest.approx(variance, rel=0.02)


def test_a_network_that_interpolates_its_data_is_warned_of():
    model, training, _ = regression(n=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Laplace(model, "regression").fit([training]).tune()
    model, training, _ = regression(n=10)
    la = Laplace(model, "regression").fit([training])
    with pytest.warns(LaplaceWarning, match=r"^The network has used \d+ % of the training data .*la\.calibrate"):
        tuned = la.tune()
    assert "may be far too narrow" in tuned.notes[-2]


def test_the_notes_of_a_regression_say_where_intervals_are_so_wide_and_what_was_checked():
    model, training, _ = regression(n=100)
    la = Laplace(model, "regression", "all", "kron").fit([training])
    (where, checked) = la.tune().notes
    assert re.search(
        r"with [\d.e+]+ times the prior precision of the evidence, .* wide at the training inputs\.$", where
    )
    assert re.search(r"^checked: standardised residuals .*\(more than 1\.5 would mean overconfident\)\.$", checked)


def test_a_dense_posterior_of_all_weights_keeps_the_prior_of_the_evidence():
    model, training, _ = regression(n=100)
    la = Laplace(model, "regression", "all", "full").fit([training])
    tuned = float(la.tune().prior_precision)
    la.tune("prior_precision", method="evidence")
    assert tuned == pytest.approx(float(la.prior_precision), rel=0.02)


def test_one_precision_per_tensor_keeps_its_proportions_in_a_regression():
    model, training, _ = regression(n=100)
    la = Laplace(model, "regression", "all", "kron").fit([training])
    found = la.tune(prior_structure="layerwise").prior_precision
    la.tune("prior_precision", method="evidence", prior_structure="layerwise")
    ratio = found / la.prior_precision
    assert torch.allclose(ratio, ratio[0], rtol=1e-3)
    assert ratio[0] > 1


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_noise_of_a_last_layer_counts_the_body(outputs):
    model, (x, y), _ = regression(n=100, outputs=outputs)
    la = Laplace(model, "regression", "last_layer", "full").fit(cut(x, y, 32))
    la.tune()
    noise, variance = shares(model, (x, y))
    found = la(x)[1].diagonal(dim1=1, dim2=2).mean()
    assert float(la.sigma_noise) ** 2 + float(found) == pytest.approx(noise**2 + variance, rel=0.02)


def test_a_noise_per_output_scales_what_is_unknown_with_it():
    """In units of its noise the second output is the same as without: so are both shares."""
    model, (x, y), _ = regression(n=100, outputs=2)
    scales = torch.tensor([1.0, 5.0], dtype=torch.float64)
    wide = nn.Sequential(*model[:2], nn.Linear(40, 2).double())
    wide[2].weight.data = model[2].weight.data * scales[:, None]
    wide[2].bias.data = model[2].bias.data * scales
    la = Laplace(wide, "regression", "last_layer", sigma_noise=scales).fit([(x, y * scales)])
    same = Laplace(model, "regression", "last_layer").fit([(x, y)])
    for each in (la, same):
        each.tune("sigma_noise")
    assert la.sigma_noise[1] / la.sigma_noise[0] == pytest.approx(5.0)
    assert float(la.sigma_noise[0]) == pytest.approx(float(same.sigma_noise), rel=0.1)


def test_the_noise_on_a_frozen_body_is_the_evidences():
    model, training, _ = regression(body=False)
    la = Laplace(model, "regression", "last_layer", "kron").fit(cut(*training, 32))
    la.tune()
    assert float(la.sigma_noise) == pytest.approx(evidence_noise(model, training, "last_layer"), rel=1e-4)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_intervals_hold_nearly_what_they_say(subset):
    held = []
    for seed in range(3):
        model, training, (x, y) = regression(seed=seed)
        la = Laplace(model, "regression", subset).fit([training])
        la.tune()
        low, high = la.predict(x).interval(0.9)
        held.append(float(((low <= y) & (y <= high)).double().mean()))
    assert 0.85 <= sum(held) / 3 <= 0.95


def test_without_training_data_narrow_intervals_are_warned_of():
    model, training, _ = regression()
    la = Laplace(model, "regression").fit(iter([training]))
    with pytest.warns(LaplaceWarning, match="too narrow"):
        la.tune()
    assert float(la.sigma_noise) == pytest.approx(evidence_noise(model, training, "last_layer"), rel=1e-4)


def test_without_training_data_the_noise_of_all_weights_is_a_guess_and_that_is_said():
    model, training, _ = regression()
    la = Laplace(model, "regression", "all").fit(iter([training]))
    with pytest.warns(LaplaceWarning, match=r"a guess .* la\.calibrate"):
        tuned = la.tune()
    assert residual(model, training) < tuned.sigma_noise < evidence_noise(model, training, "all")
    assert "train_loader=" in tuned.notes[-2]


def test_a_noise_far_from_the_residuals_is_warned_of():
    model, training, _ = regression()
    la = Laplace(model, "regression", sigma_noise=5.0).fit([training])
    with pytest.warns(LaplaceWarning, match=r"sigma_noise is .* times the residuals'"):
        la.tune("prior_precision", method="evidence")
    la.sigma_noise = 1e-3
    with pytest.warns(LaplaceWarning, match="root mean square"):
        la.tune("prior_precision")


def test_the_noise_alone_may_be_tuned():
    model, training, _ = regression()
    la = Laplace(model, "regression", "all", prior_precision=3.0).fit([training])
    tuned = la.tune("sigma_noise")
    assert float(la.prior_precision) == 3.0
    assert residual(model, training) <= tuned.sigma_noise < evidence_noise(model, training, "all")


def test_known_noise_is_not_tuned():
    model, (x, y), _ = regression()
    la = Laplace(model, "given_noise").fit([(x, y, torch.full_like(y, 0.3))])
    la.tune()
    assert float(la.sigma_noise) == 1.0


def test_a_sample_is_spread_over_the_data():
    model, x, _ = make("mlp", "classification", n=23)
    runner = Laplace(model, "classification").runner
    x, y = x.repeat(50, 1), torch.arange(1150)
    lists = {"many": cut(x, y, 10), "one": [(x, y)], "few": cut(x, y, 300)}
    for loader in [*lists.values(), DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)]:
        seen = torch.cat([batch.y for batch in Sample(loader, 100).batches(runner, "x")])
        assert 90 <= len(seen) <= 100, len(seen)
        assert len(seen.unique()) == len(seen)
        assert seen.double().mean() == pytest.approx(575, abs=120)
    stream = (pair for pair in lists["many"])
    first = Sample(type("Stream", (), {"__iter__": lambda self: stream})(), 25)
    seen = torch.cat([batch.y for batch in first.batches(runner, "x")])
    assert len(seen) == 25
    assert seen.max() < 30

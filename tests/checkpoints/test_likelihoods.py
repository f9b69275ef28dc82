"""Every likelihood, with options that are not the usual ones, goes through fit, save and load as it was."""

from __future__ import annotations

import io
import json

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.checkpoints import container
from laplace.checkpoints.posteriors import KIND
from laplace.errors import CheckpointError
from laplace.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    Gaussian,
    GivenNoise,
    HeteroscedasticGaussian,
    Multilabel,
    Ordinal,
    Poisson,
    Preference,
    from_log_prob,
)

N = 24
CUTS = [-1.0 / 3.0, 0.1, 2.0 / 7.0]


def smooth_l1(f, y):
    return -torch.nn.functional.huber_loss(f, y, reduction="none").sum(-1)


class Graded(Ordinal):
    """A likelihood of a user's, with the name of ours."""


CASES = {
    "regression": (lambda: Gaussian(), 2, {"sigma_noise": 0.3}),
    "regression, noise per output": (lambda: Gaussian(), 2, {"sigma_noise": torch.tensor([0.1, 0.7])}),
    "regression, relative noise": (lambda: Gaussian(per_output=[1.0, 5.0 / 3.0]), 2, {"sigma_noise": 0.37}),
    "given_noise": (lambda: GivenNoise(), 2, {"sigma_noise": 1.3}),
    "heteroscedastic": (lambda: HeteroscedasticGaussian(), 4, {}),
    "classification": (lambda: Categorical(), 3, {}),
    "classification, all options": (
        lambda: Categorical(label_smoothing=0.1, class_weights=[1.0, 2.0 / 3.0, 5.0], ignore_index=-1),
        3,
        {},
    ),
    "binary": (lambda: Bernoulli(), 1, {}),
    "multilabel": (lambda: Multilabel(), 3, {}),
    "poisson": (lambda: Poisson(), 2, {}),
    "ordinal, cut points": (lambda: Ordinal(CUTS), 1, {}),
    "ordinal, number": (lambda: Ordinal(4), 1, {}),
    "reward_modeling": (lambda: Preference(), 1, {}),
    "from_log_prob": (lambda: from_log_prob(smooth_l1), 2, {}),
    "from_log_prob, all options": (
        lambda: from_log_prob(smooth_l1, inverse_link=torch.exp, name="robust"),
        2,
        {},
    ),
    "one's own": (lambda: Graded(CUTS), 1, {}),
}
OWN = {"from_log_prob", "from_log_prob, all options", "one's own"}


def batch(case, likelihood, outputs, dtype):
    """x and what a batch holds beside it."""
    torch.manual_seed(1)
    x = torch.randn(N, 2, 3, dtype=dtype) if likelihood.pairs else torch.randn(N, 3, dtype=dtype)
    if likelihood.name == "given_noise":
        return x, torch.randn(N, outputs, dtype=dtype), 0.1 + torch.rand(N, outputs, dtype=dtype)
    if likelihood.name in ("classification", "ordinal", "reward_modeling"):
        y = torch.randint({"classification": 3, "ordinal": 4}.get(likelihood.name, 2), (N,))
        return x, torch.where(torch.arange(N) == 3, -1, y) if "all options" in case else y
    if likelihood.name in ("binary", "multilabel", "poisson"):
        return x, torch.randint(2, (N, outputs)).to(dtype)
    return x, torch.randn(N, outputs // 2 if likelihood.name == "heteroscedastic" else outputs, dtype=dtype)


def fitted(case, dtype, structure):
    make, outputs, options = CASES[case]
    likelihood = make()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)
    x, *rest = batch(case, likelihood, outputs, dtype)
    la = Laplace(model, likelihood, "all", structure, prior_precision=0.7, temperature=0.9, **options)
    return la.fit([(x, *rest)]), model, (x, *rest)


def said(la, x):
    """All that is predicted, link by link."""
    x = x[:, 0] if la.likelihood.pairs else x
    found = []
    for link in la.likelihood.response.links or [None]:
        out = la(x, link_approx=link, generator=torch.Generator().manual_seed(0))
        found += [out] if isinstance(out, torch.Tensor) else [*out]
        p = la.predict(x, link_approx=link, generator=torch.Generator().manual_seed(0))
        found += [p.mean, p.epistemic, p.aleatoric, *p.interval(0.9)]
    return [*found, la.log_marginal_likelihood(), la.sigma_noise, la.prior_precision]


def same(a, b, x):
    assert a.runner.spec.described(a.curvature) == b.runner.spec.described(b.curvature)
    assert a.likelihood.options == b.likelihood.options
    assert type(a.likelihood) is type(b.likelihood)
    assert a.temperature == b.temperature
    for got, want in zip(said(a, x), said(b, x), strict=True):
        assert torch.equal(got, want)


def test_every_likelihood_is_among_the_cases():
    assert {type(make()) for make, _, _ in CASES.values()} >= set(LIKELIHOODS.values())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "structure"), [(torch.float32, "kron"), (torch.float64, "full")], ids=["kron", "full"]
)
def test_a_saved_posterior_comes_back_as_it_was(case, dtype, structure, tmp_path):
    la, model, data = fitted(case, dtype, structure)
    la.save(tmp_path / "la")
    given = {"likelihood": CASES[case][0]()} if case in OWN else {}
    again = Laplace.load(tmp_path / "la", model, **given)
    same(again, la, data[0])
    again.save(tmp_path / "again")
    same(Laplace.load(tmp_path / "again", model, **given), la, data[0])
    torch.testing.assert_close(again.fit([data]).log_marginal_likelihood(), la.log_marginal_likelihood())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_noise_per_output_is_the_same_after_any_number_of_ways(dtype):
    torch.manual_seed(0)
    for _ in range(100):
        likelihood, level = Gaussian(0.1 + torch.rand(3, dtype=torch.float64)), 0.1 + torch.rand((), dtype=dtype)
        again, found = likelihood.with_noise(likelihood.noise_at(level))
        assert again is likelihood
        assert torch.equal(likelihood.noise_at(found), likelihood.noise_at(level))


@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_comes_back_as_it_was(case):
    la, model, (x, *_) = fitted(case, torch.float64, "diag")
    file = io.BytesIO()
    torch.save(la.state_dict(), file)
    file.seek(0)
    make, _, options = CASES[case]
    again = Laplace(model, make(), "all", "diag", **options)
    again.load_state_dict(torch.load(file, weights_only=True))
    same(again, la, x)


@pytest.mark.parametrize("case", sorted(OWN))
def test_a_likelihood_that_is_code_is_asked_for(case, tmp_path):
    la, model, _ = fitted(case, torch.float64, "diag")
    la.save(tmp_path / "la")
    with pytest.raises(CheckpointError, match=r"your own likelihood.*likelihood="):
        Laplace.load(tmp_path / "la", model)


@pytest.mark.parametrize(
    "options", [{}, {"cut_points": None}, {"cut_points": [2, 1]}, {"points": [1]}, {"cut_points": 10**9}, [1], None]
)
def test_options_that_nobody_saved_are_a_damaged_file(options, tmp_path):
    la, model, _ = fitted("ordinal, number", torch.float64, "diag")
    la.save(tmp_path / "la")
    contents = container.read(tmp_path / "la", KIND)
    contents["options"]["likelihood"]["options"] = json.loads(json.dumps(options))
    container.write(tmp_path / "other", KIND, contents)
    with pytest.raises(CheckpointError, match="damaged: its likelihood 'ordinal'"):
        Laplace.load(tmp_path / "other", model)

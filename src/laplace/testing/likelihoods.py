"""Test what every likelihood must do."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from laplace.errors import UnsupportedError
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood, Targets
from laplace.linalg.sampling import Draws
from laplace.predictive.outputs import OutputGaussian
from laplace.testing.reference import close


class LikelihoodConformance:
    """Tests a likelihood. A subclass returns the likelihood, and outputs with labels.

    Attributes:
        draws: how many labels to draw in the test of their moments.
    """

    draws: int = 20_000

    def likelihood(self) -> Likelihood:
        """Return the likelihood under test."""
        raise NotImplementedError("write `def likelihood(self): return MyLikelihood()`")

    def data(self) -> tuple[Tensor, Tensor]:
        """Return outputs (N, C) in float64 and labels (N, ...) as a batch holds them, for four examples or more."""
        raise NotImplementedError("write `def data(self): return f, y`")

    def checked(self) -> tuple[Likelihood, Tensor, Tensor]:
        """Return the likelihood, outputs, and labels as the formulas get them."""
        likelihood, (f, y) = self.likelihood(), self.data()
        assert f.dim() == 2
        assert f.dtype == torch.float64
        assert len(f) >= 4
        likelihood.check_outputs(f)
        return likelihood, f, likelihood.check_targets(f, y)

    def test_examples_are_independent(self) -> None:
        """Check that log p has one number per example, which does not depend on the others."""
        likelihood, f, y = self.checked()
        whole = likelihood.log_prob(f, y)
        close(
            whole, torch.cat([likelihood.log_prob(f[i : i + 1], y[i : i + 1]) for i in range(len(f))]), what="log_prob"
        )
        assert whole.isfinite().all()
        lam = likelihood.fisher(f, y).dense()
        alone = torch.cat([likelihood.fisher(f[i : i + 1], y[i : i + 1]).dense() for i in range(len(f))])
        close(lam, alone, what="fisher")

    def test_the_score_is_the_derivative_of_log_prob(self) -> None:
        """Check score = d log p / df by autograd."""
        likelihood, f, y = self.checked()
        g = f.clone().requires_grad_()
        (expected,) = torch.autograd.grad(likelihood.log_prob(g, y).sum(), g)
        close(likelihood.score(f, y), expected, what="score")

    def test_lambda_is_symmetric_and_positive_semidefinite(self) -> None:
        """Check Lambda, and that it is -d2 log p / df2 if the likelihood says so."""
        likelihood, f, y = self.checked()
        lam = likelihood.fisher(f, y).dense()
        close(lam, lam.mT, what="fisher and its transpose")
        assert float(torch.linalg.eigvalsh(lam).min()) >= -1e-10 * float(lam.abs().max())
        if likelihood.hessian_is_fisher:
            hessians = [
                -torch.autograd.functional.hessian(lambda g, y=b: likelihood.log_prob(g[None], y[None]).sum(), a)
                for a, b in zip(f, y, strict=True)
            ]
            values, vectors = torch.linalg.eigh(torch.stack([torch.as_tensor(h) for h in hessians]))
            close(lam, (vectors * values.clamp(min=0).unsqueeze(1)) @ vectors.mT, 1e-7, "fisher, from autograd")

    def test_roots_are_roots_of_lambda(self) -> None:
        """Check root_times(f, eps) = L eps with L L^T = Lambda."""
        likelihood, f, y = self.checked()
        n, c = f.shape
        lam = likelihood.fisher(f, y)
        inner = c if lam.vectors is None or lam.diagonal is not None else len(lam.vectors)
        eye = torch.eye(inner, dtype=f.dtype).unsqueeze(1).expand(inner, n, inner)
        root = likelihood.root_times(f, eye, y)
        close(torch.einsum("knc,knd->ncd", root, root), lam.dense(), what="root_times")

    def test_drawn_labels_have_lambda_as_their_scores_second_moment(self) -> None:
        """Check E[score score^T] = Lambda and E[score] = 0 over drawn labels. Passes without `sample`."""
        likelihood, f, y = self.checked()
        if not likelihood.hessian_is_fisher:
            return
        try:
            scores = likelihood.drawn_scores(f, y, self.draws, torch.Generator().manual_seed(0))
        except UnsupportedError:
            return
        lam = likelihood.fisher(f, y).dense()
        size = lam.diagonal(dim1=1, dim2=2).sum(1).clamp(min=1e-12)  # (N,)
        moment = torch.einsum("knc,knd->ncd", scores, scores) / len(scores)
        assert float(((moment - lam).abs().amax((1, 2)) / size).max()) < 20 / self.draws**0.5
        assert float((scores.mean(0).abs().amax(1) / size.sqrt()).max()) < 6 / self.draws**0.5

    def test_sums_of_the_data_give_its_log_likelihood(self) -> None:
        """Check log p(data) from the sums, with and without weights, and that sums of two halves add up."""
        likelihood, f, y = self.checked()
        one = torch.ones((), dtype=torch.float64)
        weights = torch.linspace(0.5, 2, len(f), dtype=torch.float64)
        for targets in (Targets(y), Targets(y, weights)):
            sums = likelihood.sums(f, targets)
            assert "loss" in sums
            expected = targets.total(likelihood.log_prob(f, y)).double()
            close(likelihood.log_likelihood(sums, one), expected, what="log_likelihood of the sums")
            first, second = (likelihood.sums(f[s], targets.part(s)) for s in (slice(0, 2), slice(2, None)))
            for key, value in sums.items():
                close(first[key] + second[key], value, what=f"sums of {key}")

    def test_a_certain_output_gives_the_inverse_link(self) -> None:
        """Check that every link is the inverse link if nothing is uncertain. The Laplace bridge has no such limit."""
        likelihood, f, _ = self.checked()
        response, (n, c) = likelihood.response, f.shape
        tiny = 1e-12 * torch.eye(c, dtype=f.dtype).expand(n, c, c)
        outputs = OutputGaussian(f, tiny.diagonal(dim1=1, dim2=2), tiny)
        for name, link in response.links.items():
            if not name.startswith("bridge"):
                mean = link.apply(outputs, Draws(50, torch.Generator().manual_seed(0)))
                close(mean, response.inverse_link(f), 1e-4, f"link {name!r}")

    def test_a_prediction_has_a_density_and_two_uncertainties(self) -> None:
        """Check that the predictive density at labels is finite, and no uncertainty is negative."""
        likelihood, f, y = self.checked()
        n, c = f.shape
        spread = 0.3 * torch.eye(c, dtype=f.dtype).expand(n, c, c)
        outputs = OutputGaussian(f, spread.diagonal(dim1=1, dim2=2), spread)
        draws, one = Draws(200, torch.Generator().manual_seed(0)), torch.ones((), dtype=f.dtype)
        _, link = likelihood.link_of(None)
        p = None if link is None else link.apply(outputs, draws)
        assert likelihood.log_predictive(outputs, p, y, one).shape == (n,)
        assert likelihood.log_predictive(outputs, p, y, one).isfinite().all()
        response = likelihood.response
        _, link = response.link_of(None)
        p = None if link is None else link.apply(outputs, draws)
        epistemic, aleatoric = response.uncertainty(outputs, p, one, draws)
        assert float(epistemic.min()) >= -1e-12
        assert float(aleatoric.min()) >= -1e-12

    def test_a_laplace_approximation_with_it_predicts_and_is_loaded(self) -> None:
        """Fit a last layer, compute the evidence, predict, save and load."""
        likelihood, (f, y) = self.likelihood(), self.data()
        if likelihood.pairs or likelihood.further:  # batches hold more than inputs and labels
            return
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, f.shape[1])).double()
        x = torch.randn(len(f), 3, dtype=torch.float64)
        la = Laplace(model, likelihood, "last_layer", "full").fit([(x, y)])
        assert la.log_marginal_likelihood().isfinite()
        assert likelihood.described in repr(la)
        assert la.predict(x).mean.isfinite().all()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "posterior.safetensors"
            la.save(path)
            loaded = Laplace.load(path, model, likelihood=copy.deepcopy(likelihood))
        close(loaded.log_marginal_likelihood(), la.log_marginal_likelihood(), 0.0)

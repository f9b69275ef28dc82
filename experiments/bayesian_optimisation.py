"""Minimise Branin, Hartmann-6 and Ackley with a Laplace posterior of a network, a Gaussian process and random search.

    python experiments/bayesian_optimisation.py [--seeds 5] [--functions branin ...] [--methods gp ...] [--draw]

Every method starts from the same Sobol points. Then it chooses points one by one. The network has one hidden layer of
128 sines and is trained from scratch each time; its last layer is uncertain. The evidence tunes prior and noise, and
chooses among three initial frequencies. The Gaussian process is BoTorch's SingleTaskGP with its default priors. Both
use the logarithm of the expected improvement; 'thompson' maximises one drawn network instead. Simple regret: the best
value so far minus the minimum of the function. Writes results/bayesian-optimisation.json; --draw makes the figure
docs/figures/bayesian_optimisation.png.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from pathlib import Path

import torch
from botorch.acquisition import LogExpectedImprovement, PosteriorMean, qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Ackley, Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from laplace import Laplace
from laplace.integrations.botorch import LaplaceModel
from rows import Rows

FUNCTIONS = {"branin": (Branin(), 6), "hartmann6": (Hartmann(dim=6), 14), "ackley4": (Ackley(dim=4), 10)}
METHODS = ("laplace", "thompson", "gp", "random")
ITERATIONS, WIDTH, STEPS = 30, 128, 80
FREQUENCIES, LEAST_NOISE = (1.5, 3.0, 5.0), 0.01
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "bayesian_optimisation.png"


class Sine(nn.Module):
    """Makes features whose prior is the same everywhere: no input is more uncertain for lying far from the centre."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def trained(x: Tensor, y: Tensor, frequency: float, seed: int) -> nn.Sequential:
    """Return a network fitted to inputs in the unit cube and standardised outcomes, begun at some frequency."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], WIDTH), Sine(), nn.Linear(WIDTH, 1)).double()
    first, last = model[0], model[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        first.weight.normal_(0, frequency)
        first.bias.uniform_(0, 2 * math.pi)
        last.weight.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(x), y) + 1e-3 * last.weight.square().sum()).backward()
        optimizer.step()
    return model


def tuned(model: nn.Sequential, x: Tensor, y: Tensor) -> Laplace:
    """Return the posterior of the last layer, whose weights are set to its exact mean, with prior and noise tuned."""
    last = model[2]
    assert isinstance(last, nn.Linear)
    la = Laplace(model, "regression", "last_layer", "full", sigma_noise=0.1)
    with torch.no_grad():
        phi = model[:2](x)
    phi = torch.cat([phi, torch.ones_like(phi[:, :1])], 1)  # (n, H + 1)
    for step in range(4):
        ridge = la.prior_precision * la.sigma_noise**2 * torch.eye(phi.shape[1]).to(phi)
        mean = torch.linalg.solve(phi.T @ phi + ridge, phi.T @ y)
        with torch.no_grad():
            last.weight.copy_(mean[:-1].T)
            last.bias.copy_(mean[-1])
        la.fit([(x, y)])
        if step < 3:
            la.tune("prior_precision", "sigma_noise", method="evidence")
            la.sigma_noise = la.sigma_noise.clamp(min=LEAST_NOISE)
    return la


def laplace_model(x: Tensor, y: Tensor, seed: int) -> LaplaceModel:
    """Return the posterior with the best evidence among networks of different frequencies, as a BoTorch model."""
    standardize = Standardize(1)
    scaled, _ = standardize(y)
    found = [tuned(trained(x, scaled, frequency, seed), x, scaled) for frequency in FREQUENCIES]
    best = max(found, key=lambda la: float(la.log_marginal_likelihood()))
    return LaplaceModel(best, outcome_transform=standardize)


def gp_model(x: Tensor, y: Tensor) -> SingleTaskGP:
    """Return BoTorch's usual Gaussian process."""
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def next_point(method: str, x: Tensor, y: Tensor, seed: int) -> Tensor:  # (n, d), (n, 1) -> (1, d)
    """Return where to evaluate next, to find a large y."""
    torch.manual_seed(seed)
    if method == "random":
        return torch.rand(1, x.shape[1], dtype=x.dtype)
    box = torch.stack([torch.zeros(x.shape[1]), torch.ones(x.shape[1])]).to(x)
    model: Model = gp_model(x, y) if method == "gp" else laplace_model(x, y, seed)
    if method == "gp":
        acquisition = LogExpectedImprovement(model, best_f=y.max())
    elif method == "laplace":
        acquisition = qLogExpectedImprovement(model, best_f=y.max())
    else:
        assert isinstance(model, LaplaceModel)
        acquisition = PosteriorMean(model.path(torch.Generator().manual_seed(seed)))
    torch.manual_seed(seed)
    options = {"maxiter": 60, "sample_around_best": True}
    return optimize_acqf(acquisition, box, q=1, num_restarts=4, raw_samples=128, options=options)[0].detach()


def run(name: str, method: str, seed: int) -> dict:
    """Return the simple regret after each evaluation."""
    function, n = FUNCTIONS[name]
    began, bounds = time.process_time(), function.bounds.double()
    x = SobolEngine(function.dim, scramble=True, seed=seed).draw(n, dtype=torch.float64)

    def value(x: Tensor) -> Tensor:  # (n, d) in the unit cube -> (n, 1), larger is better
        return -function(bounds[0] + (bounds[1] - bounds[0]) * x).double().unsqueeze(-1)

    y = value(x)
    for step in range(ITERATIONS):
        new = next_point(method, x, y, 1000 * seed + step)
        x, y = torch.cat([x, new]), torch.cat([y, value(new)])
    regret = -y.squeeze(-1).cummax(0).values - function.optimal_value
    return {
        "regret": [round(float(r), 5) for r in regret[n - 1 :]],
        "seconds": round(time.process_time() - began, 1),
    }


def table(rows: dict[str, dict], seeds: int) -> None:
    """Print the median simple regret at the end, and the seeds one by one."""
    for name in FUNCTIONS:
        for method in METHODS:
            found = [rows[f"{name}/{method}/{seed}"]["regret"][-1] for seed in range(seeds)
                     if f"{name}/{method}/{seed}" in rows]  # fmt: skip
            if found:
                middle = sorted(found)[len(found) // 2]
                print(f"{name:10} {method:9} median {middle:8.4f}   " + " ".join(f"{r:.4f}" for r in sorted(found)))


def draw(rows: dict[str, dict], seeds: int) -> None:
    """Draw the median regret of each method with the range of all seeds."""
    from matplotlib.figure import Figure

    named = {"laplace": "network, log EI", "thompson": "network, Thompson", "gp": "Gaussian process, log EI"}
    colours = {"laplace": "#0072B2", "thompson": "#56B4E9", "gp": "#D55E00", "random": "#777777"}
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(FUNCTIONS)), FUNCTIONS, strict=True):
        for method in METHODS:
            regret = torch.tensor([rows[f"{name}/{method}/{seed}"]["regret"] for seed in range(seeds)]).clamp(min=1e-4)
            steps, label = range(regret.shape[1]), named.get(method, "random search")
            axes.plot(steps, regret.median(0).values, color=colours[method], label=label)
            axes.fill_between(steps, regret.amin(0), regret.amax(0), color=colours[method], alpha=0.12, linewidth=0)
        axes.set(yscale="log", title=name, xlabel="evaluations after the first points")
        axes.spines[["top", "right"]].set_visible(False)
        if name == next(iter(FUNCTIONS)):
            axes.set_ylabel("simple regret")
            figure.legend(loc="outside lower center", ncols=len(METHODS), frameon=False)
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # about jitter and scaling
    rows = Rows(
        "bayesian-optimisation",
        {"iterations": ITERATIONS, "width": WIDTH, "steps": STEPS, "frequencies": list(FREQUENCIES)},
    )
    for seed in range(args.seeds):
        for name in args.functions:
            for method in args.methods:
                rows.get(f"{name}/{method}/{seed}", lambda n=name, m=method, s=seed: run(n, m, s))
    table(rows.rows, args.seeds)
    print(f"{math.fsum(row['seconds'] for row in rows.rows.values()):.0f} CPU seconds")
    if args.draw:
        draw(rows.rows, args.seeds)


if __name__ == "__main__":
    main()

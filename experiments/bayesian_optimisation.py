"""Minimise Branin, Hartmann-6 and Ackley with a Laplace posterior of a network, a Gaussian process and random search.

    python experiments/bayesian_optimisation.py [--seeds 10] [--functions branin ...] [--methods network ...] [--draw]
    python experiments/bayesian_optimisation.py --choose     # networks on other functions: how the network was chosen

Every method starts from the same Sobol points. Then it chooses points one by one. The network is that of sines.py: one
hidden layer of sines of drawn frequencies and an uncertain last layer, whose evidence trains the length scales of the
inputs and the noise. The Gaussian process is BoTorch's SingleTaskGP with its default priors; 'gp_alike' has the kernel
and the noise that the network has. The acquisition function is q log NEI, which compares with the values at all points
so far; '_ei' takes the logarithm of the expected improvement in closed form, and 'thompson' maximises one drawn
network. Simple regret: the best value so far minus the minimum of the function. Writes
results/bayesian-optimisation.json and, with --choose, results/bayesian-optimisation-choice.json; --draw makes the
figure docs/figures/bayesian_optimisation.png.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from botorch.acquisition import LogExpectedImprovement, PosteriorMean, qLogNoisyExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.optim import optimize_acqf
from botorch.test_functions import (
    Ackley,
    Branin,
    Griewank,
    Hartmann,
    Levy,
    Michalewicz,
    Rosenbrock,
    StyblinskiTang,
    SyntheticTestFunction,
)
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from torch import Tensor
from torch.quasirandom import SobolEngine

from laplace.integrations.botorch import LaplaceModel
from rows import Rows
from sines import PAIRS, Network, laplace_model

FUNCTIONS = {"branin": Branin(), "hartmann6": Hartmann(dim=6), "ackley4": Ackley(dim=4)}
TRIALS = {
    "hartmann3": Hartmann(dim=3),
    "levy4": Levy(dim=4),
    "styblinski4": StyblinskiTang(dim=4),
    "rosenbrock4": Rosenbrock(dim=4),
    "michalewicz5": Michalewicz(dim=5),
    "griewank4": Griewank(dim=4),
}
NETWORKS = {  # those tried on TRIALS; noise priors: BoTorch's, and two for functions with less noise
    "normal": Network(None, -4.0, 1e-4),
    "matern52": Network(5, -4.0, 1e-4),
    "matern32": Network(3, -4.0, 1e-4),
    "matern52_quiet": Network(5, -6.0, 1e-5),
    "matern52_quieter": Network(5, -8.0, 1e-6),
    "matern32_quieter": Network(3, -8.0, 1e-6),
}
CHOSEN = NETWORKS["matern52_quiet"]
METHODS = ("network", "gp", "gp_alike", "random", "network_ei", "gp_ei", "thompson")
ITERATIONS, SEEDS = 30, 100  # the first of the seeds reported; none of them was run before the network was chosen
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "bayesian_optimisation.png"


def gp_model(x: Tensor, y: Tensor, alike: bool = False) -> SingleTaskGP:
    """Return BoTorch's usual Gaussian process, or the one that the network approaches with ever more sines."""
    if alike:
        noise = LogNormalPrior(CHOSEN.noise, 1.0)
        constraint = GreaterThan(CHOSEN.least, transform=None, initial_value=noise.mode)
        kernel = get_covar_module_with_dim_scaled_prior(x.shape[1], use_rbf_kernel=False)
        likelihood = GaussianLikelihood(noise_prior=noise, noise_constraint=constraint)
        model = SingleTaskGP(x, y, likelihood=likelihood, covar_module=kernel)
    else:
        model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def next_point(method: str, x: Tensor, y: Tensor, seed: int) -> Tensor:  # (n, d), (n, 1) -> (1, d)
    """Return where to evaluate next, to find a large y."""
    torch.manual_seed(seed)
    if method == "random":
        return torch.rand(1, x.shape[1], dtype=x.dtype)
    box = torch.stack([torch.zeros(x.shape[1]), torch.ones(x.shape[1])]).to(x)
    if method.startswith("gp"):
        model: Model = gp_model(x, y, method == "gp_alike")
    else:
        model = laplace_model(x, y, NETWORKS.get(method, CHOSEN), seed, "full" if method == "thompson" else "gp")
    torch.manual_seed(seed)
    if method.endswith("_ei"):
        acquisition = LogExpectedImprovement(model, best_f=y.max())
    elif method == "thompson":
        assert isinstance(model, LaplaceModel)
        acquisition = PosteriorMean(model.path(torch.Generator().manual_seed(seed)))
    else:
        acquisition = qLogNoisyExpectedImprovement(model, X_baseline=x)
    options = {"maxiter": 60, "sample_around_best": True}
    return optimize_acqf(acquisition, box, q=1, num_restarts=4, raw_samples=128, options=options)[0].detach()


def run(function: SyntheticTestFunction, method: str, seed: int) -> dict:
    """Return the simple regret after each evaluation."""
    began, bounds, d = time.process_time(), function.bounds.double(), function.dim
    n = 2 * d + 2
    x = SobolEngine(d, scramble=True, seed=seed).draw(n, dtype=torch.float64)

    def value(x: Tensor) -> Tensor:  # (n, d) in the unit cube -> (n, 1), larger is better
        return -function(bounds[0] + (bounds[1] - bounds[0]) * x).double().unsqueeze(-1)

    y = value(x)
    for step in range(ITERATIONS):
        new = next_point(method, x, y, 1000 * seed + step)
        x, y = torch.cat([x, new]), torch.cat([y, value(new)])
    regret = -y.squeeze(-1).cummax(0).values - function.optimal_value
    return {
        "regret": [float(f"{float(r):.4g}") for r in regret[n - 1 :]],
        "seconds": round(time.process_time() - began, 1),
    }


def last(rows: Mapping[str, dict], name: str, method: str, seeds: Iterable[int]) -> list[float]:
    """Return the regret at the end for the seeds that were run."""
    return [rows[key]["regret"][-1] for seed in seeds if (key := f"{name}/{method}/{seed}") in rows]


def table(rows: Mapping[str, dict], names: Iterable[str], methods: Iterable[str], seeds: Iterable[int]) -> None:
    """Print mean and median of the regret at the end, and how it compares with the Gaussian process seed by seed.

    'less gp' is the mean of the differences to the Gaussian process with the same first points, with standard error.
    'ratio' is the geometric mean of the regret over that of the Gaussian process, with one standard error up and
    down; regrets below 1e-4 count as 1e-4. 'wins' counts the seeds that end lower.
    """
    ratios = {method: [] for method in methods}
    for name in names:
        beside = last(rows, name, "gp", seeds)
        for method in methods:
            found = last(rows, name, method, seeds)
            if len(found) < 2 or len(found) != len(beside):
                continue
            less = [a - b for a, b in zip(found, beside, strict=True)]
            logs = [math.log(max(a, 1e-4) / max(b, 1e-4)) for a, b in zip(found, beside, strict=True)]
            ratios[method] += logs
            print(
                f"{name:12} {method:16} mean {statistics.fmean(found):9.4f} +- {error(found):.4f}  median "
                f"{statistics.median(found):9.4f}  less gp {statistics.fmean(less):8.4f} +- {error(less):.4f}  "
                f"{ratio(logs)}   " + " ".join(f"{r:.4g}" for r in found)
            )
    for method, logs in ratios.items():
        if len(logs) > 1:
            print(f"{'all':12} {method:16} {ratio(logs)}")


def error(values: list[float]) -> float:
    """Return the standard error of their mean."""
    return statistics.stdev(values) / len(values) ** 0.5


def ratio(logs: list[float]) -> str:
    """Describe the logarithms of some ratios."""
    mean = statistics.fmean(logs)
    low, high = math.exp(mean - error(logs)), math.exp(mean + error(logs))
    return f"ratio {math.exp(mean):.2f} ({low:.2f} to {high:.2f}) wins {sum(log < 0 for log in logs)} of {len(logs)}"


def draw(rows: Mapping[str, dict], seeds: Iterable[int]) -> None:
    """Draw the median regret of each method, with the middle half of the seeds for three of them."""
    from matplotlib.figure import Figure

    lines = {
        "network": ("network, q log NEI", "#0072B2", "-"),
        "gp": ("Gaussian process, q log NEI", "#D55E00", "-"),
        "gp_alike": ("Gaussian process alike, q log NEI", "#009E73", "-"),
        "network_ei": ("network, log EI", "#0072B2", ":"),
        "gp_ei": ("Gaussian process, log EI", "#D55E00", ":"),
        "thompson": ("network, Thompson", "#56B4E9", "--"),
        "random": ("random search", "#777777", "-"),
    }
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(FUNCTIONS)), FUNCTIONS, strict=True):
        for method, (label, colour, style) in lines.items():
            found = [rows[key]["regret"] for seed in seeds if (key := f"{name}/{method}/{seed}") in rows]
            if not found:
                continue
            regret = torch.tensor(found).clamp(min=1e-4)
            low, middle, high = regret.quantile(torch.tensor([0.25, 0.5, 0.75]), 0)
            steps = range(regret.shape[1])
            axes.plot(steps, middle, color=colour, linestyle=style, label=label)
            if style == "-":
                axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set(yscale="log", title=name, xlabel="evaluations after the first points")
        axes.spines[["top", "right"]].set_visible(False)
        if name == next(iter(FUNCTIONS)):
            axes.set_ylabel("simple regret")
            figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS | TRIALS)
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, *NETWORKS))
    parser.add_argument("--choose", action="store_true", help="networks on other functions, seeds 0, 1, 2")
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # about jitter and scaling
    functions = args.functions or list(TRIALS if args.choose else FUNCTIONS)
    methods = args.methods or (("gp", *NETWORKS) if args.choose else METHODS)
    if args.choose:
        rows = Rows("bayesian-optimisation-choice", {"iterations": ITERATIONS, "pairs": PAIRS})
        seeds = range(args.seeds or 3)
    else:
        rows = Rows("bayesian-optimisation", {"iterations": ITERATIONS, "pairs": PAIRS, "network": vars(CHOSEN)})
        seeds = range(SEEDS, SEEDS + (args.seeds or 10))
    for method in methods:
        for seed in seeds:
            for name in functions:
                function = (FUNCTIONS | TRIALS)[name]
                rows.get(f"{name}/{method}/{seed}", lambda f=function, m=method, s=seed: run(f, m, s))
    table(rows.rows, functions, methods, seeds)
    print(f"{math.fsum(row.get('seconds', 0) for row in rows.rows.values()):.0f} CPU seconds")
    if args.draw:
        draw(rows.rows, seeds)


if __name__ == "__main__":
    main()

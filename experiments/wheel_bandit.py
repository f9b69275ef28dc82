"""Play the wheel bandit (Riquelme et al. 2018) with Thompson sampling, an upper bound, and greedily.

    python experiments/wheel_bandit.py [--seeds 5] [--delta 0.95]

A context is a point of the unit disc. Option 0 always pays 1.2 on average. The other four pay 1.0, but outside the
radius delta the one of the point's own quadrant pays 50. Noise 0.01. Greedy play rarely learns of the 50. A network
maps a context with a one-hot option to the reward; it is trained again every 100 rounds, and its last layer is
uncertain. 'linear' is Thompson sampling with Bayesian linear regression on the context, for each option by itself.
Writes results/wheel-bandit.json: regret as a share of that of random play.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings

import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.decisions import choose
from rows import Rows

OPTIONS, BATCH, ROUNDS, STEPS = 5, 100, 1500, 150
REWARDS, NOISE = (1.2, 1.0, 50.0), 0.01
SCALE = 50.0  # rewards are divided by it for the network


def contexts(n: int, generator: torch.Generator) -> Tensor:  # (n, 2)
    """Draw points of the unit disc."""
    angle = 2 * math.pi * torch.rand(n, generator=generator, dtype=torch.float64)
    radius = torch.rand(n, generator=generator, dtype=torch.float64).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


def expected(x: Tensor, delta: float) -> Tensor:  # (n, 2) -> (n, 5)
    """Return the mean reward of each option."""
    out = torch.full((len(x), OPTIONS), REWARDS[1], dtype=x.dtype)
    out[:, 0] = REWARDS[0]
    own = 1 + (x[:, 0] < 0).long() + 2 * (x[:, 1] < 0).long()
    far = x.norm(dim=1) > delta
    out[far, own[far]] = REWARDS[2]
    return out


def options_at(x: Tensor) -> Tensor:  # (n, 2) -> (n, 5, 7)
    """Put each context beside each option."""
    eye = torch.eye(OPTIONS, dtype=x.dtype).expand(len(x), -1, -1)
    return torch.cat([x.unsqueeze(1).expand(-1, OPTIONS, -1), eye], -1)


def posterior(x: Tensor, y: Tensor, seed: int) -> Laplace:
    """Train a network on contexts with options, and return the posterior of its last layer."""
    torch.manual_seed(seed)
    layers = nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        index = torch.randint(len(x), (min(len(x), 256),))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[index]), y[index]).backward()
        optimizer.step()
    la = Laplace(model, "regression", "last_layer", "full").fit([(x, y)])
    la.tune("prior_precision", "sigma_noise", method="evidence")
    return la


class Linear:
    """Bayesian linear regression of each option's reward on (1, x), with noise and prior of variance 1."""

    def __init__(self) -> None:
        self.precision = torch.eye(3, dtype=torch.float64).repeat(OPTIONS, 1, 1)
        self.sums = torch.zeros(OPTIONS, 3, dtype=torch.float64)

    def update(self, x: Tensor, chosen: Tensor, reward: Tensor) -> None:
        phi = torch.cat([torch.ones_like(x[:, :1]), x], 1)
        for k in range(OPTIONS):
            mine = phi[chosen == k]
            self.precision[k] += mine.T @ mine
            self.sums[k] += mine.T @ reward[chosen == k]

    def choose(self, x: Tensor, generator: torch.Generator) -> Tensor:
        covariance = torch.linalg.inv(self.precision)
        mean = (covariance @ self.sums.unsqueeze(-1)).squeeze(-1)
        noise = torch.randn(OPTIONS, 3, 1, generator=generator, dtype=torch.float64)
        drawn = mean + (torch.linalg.cholesky(covariance) @ noise).squeeze(-1)
        return (torch.cat([torch.ones_like(x[:, :1]), x], 1) @ drawn.T).argmax(1)


def run(method: str, seed: int, delta: float) -> dict:
    """Return the regret in percent of that of random play."""
    began, generator = time.process_time(), torch.Generator().manual_seed(seed)
    x = contexts(ROUNDS, generator)
    means = expected(x, delta)
    noise = NOISE * torch.randn(ROUNDS, generator=generator, dtype=torch.float64)
    chosen = torch.arange(ROUNDS) % OPTIONS  # the first batch plays every option in turn; the rest is replaced
    linear, la = Linear(), None
    for start in range(0, ROUNDS, BATCH):
        now = slice(start, start + BATCH)
        if start and method == "linear":
            chosen[now] = linear.choose(x[now], generator)
        elif start and la is not None and method == "thompson":  # one draw of the weights for each context
            each = [
                choose(la, options_at(x[i : i + 1]), "thompson", generator=generator)
                for i in range(*now.indices(ROUNDS))
            ]
            chosen[now] = torch.cat(each)
        elif start and la is not None:
            chosen[now] = choose(la, options_at(x[now]), method)
        reward = means[torch.arange(ROUNDS), chosen] + noise
        past = slice(0, start + BATCH)
        if method == "linear":
            linear.update(x[now], chosen[now], reward[now])
        else:
            played = options_at(x[past])[torch.arange(start + BATCH), chosen[past]]
            la = posterior(played, reward[past].unsqueeze(1) / SCALE, seed)
    regret = (means.max(1).values - means[torch.arange(ROUNDS), chosen]).sum()
    random = (means.max(1).values - means.mean(1)).sum()
    last = slice(ROUNDS - 500, None)
    late = (means.max(1).values - means[torch.arange(ROUNDS), chosen])[last].sum()
    late_random = (means.max(1).values - means.mean(1))[last].sum()
    return {
        "regret": round(100 * float(regret / random), 1),
        "last 500": round(100 * float(late / late_random), 1),
        "seconds": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--delta", type=float, default=0.95)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # that residuals of training data are not as wide as the tuned noise
    rows = Rows("wheel-bandit", {"rounds": ROUNDS, "batch": BATCH, "steps": STEPS, "delta": args.delta})
    methods = ("thompson", "ucb", "greedy", "linear")
    for seed in range(args.seeds):
        for method in methods:
            rows.get(f"{method}/{seed}", lambda m=method, s=seed: run(m, s, args.delta))
    for method in methods:
        for column in ("regret", "last 500"):
            found = [rows.rows[f"{method}/{seed}"][column] for seed in range(args.seeds)]
            print(f"{method:9} {column:9} mean {sum(found) / len(found):6.1f}   " + " ".join(f"{r:.1f}" for r in found))


if __name__ == "__main__":
    main()

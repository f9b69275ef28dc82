"""Preferences: a reward is learned from pairs of which one was preferred. How sure is it that one beats the other?

Options have two properties. Somebody compared pairs of options and sometimes slipped; what they compared lies close
together, and the reward is then asked about options further and further out.

    python examples/preferences.py [--quick]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace

DISTANCES = (1.0, 2.0, 4.0, 8.0)


def true_reward(options: Tensor) -> Tensor:  # (..., 2) -> (...)
    """Much of the first property, and not too much nor too little of the second."""
    return 1.5 * torch.sin(options[..., 0]) - 0.5 * options[..., 1].square()


def decisions(pairs: Tensor) -> Tensor:  # (B, 2, 2) -> (B,)
    """0 where the first of a pair was preferred and 1 where the second was, in Bradley and Terry's model."""
    reward = true_reward(pairs)
    return torch.bernoulli(torch.sigmoid(reward[:, 1] - reward[:, 0])).long()


def distance_of(options: Tensor) -> float:
    """Their mean distance from 0."""
    return float(options.norm(dim=-1).mean())


def main(quick: bool = False) -> dict[str, Tensor]:
    """How sure the network is of its preferences, before and after, by the distance of what is compared."""
    torch.manual_seed(0)
    pairs = torch.randn(150 if quick else 300, 2, 2)  # B pairs of options with 2 properties
    preferred = decisions(pairs)

    print("Which of two options is better, and how sure is that?")
    print(
        f"Learned from {len(pairs)} comparisons; the mean distance of their options from 0 is {distance_of(pairs):.1f}."
    )
    print("Asked about 500 pairs at every distance. Sure: the mean probability of the option that is thought better.\n")

    model = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(150 if quick else 300):
        optimizer.zero_grad()
        difference = (model(pairs[:, 1]) - model(pairs[:, 0])).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(difference, preferred.float()).backward()
        optimizer.step()

    la = Laplace(model, "reward_modeling", "all", "full")
    la.fit(DataLoader(TensorDataset(pairs, preferred), batch_size=50))
    la.tune(method="evidence")

    print(f"{'distance':>8} {'right':>7} {'sure: network':>14} {'Laplace':>8} {'NLL: network':>13} {'Laplace':>8}")
    columns: dict[str, list[Tensor]] = {key: [] for key in ("right", "before", "after", "loss_before", "loss_after")}
    for distance in DISTANCES:
        a, b = (distance * nn.functional.normalize(torch.randn(500, 2)) for _ in range(2))
        with torch.no_grad():
            before = torch.sigmoid(model(a) - model(b)).squeeze(1)
        after = la.preference(a, b)  # the probability that a beats b
        truth = torch.sigmoid(true_reward(a) - true_reward(b))
        found = {
            "right": ((after > 0.5) == (truth > 0.5)).float().mean(),
            "before": torch.maximum(before, 1 - before).mean(),
            "after": torch.maximum(after, 1 - after).mean(),
            "loss_before": nn.functional.binary_cross_entropy(before, truth),
            "loss_after": nn.functional.binary_cross_entropy(after, truth),
        }
        for key, value in found.items():
            columns[key].append(value)
        print(
            f"{distance:8.0f} {float(found['right']):7.0%} {float(found['before']):14.1%}"
            f" {float(found['after']):8.1%} {float(found['loss_before']):13.3f} {float(found['loss_after']):8.3f}"
        )

    a, b = torch.tensor([[1.5, 0.0]]), torch.tensor([[-1.5, 0.0]])
    wins = float(la.preference(a, b))
    rewards, covariance = la(torch.cat([a, b]), joint=True)  # (2,) and (2, 2)
    alone = covariance.diagonal().sqrt()
    together = (covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]).sqrt()
    print(f"\n(1.5, 0) beats (-1.5, 0) with probability {wins:.2f}; the truth is ", end="")
    print(f"{float(torch.sigmoid(true_reward(a) - true_reward(b))):.2f}.")
    print(f"Their rewards are {rewards[0]:.2f} ± {alone[0]:.2f} and {rewards[1]:.2f} ± {alone[1]:.2f};", end=" ")
    print(f"the difference is {rewards[0] - rewards[1]:.2f} ± {together:.2f}.")
    print(f"Were the two independent, it would be ± {alone.norm():.2f}: what they have in common cancels.")
    columns_found = {key: torch.stack(values) for key, values in columns.items()}
    return columns_found | {"wins": torch.tensor(wins), "together": together, "independent": alone.norm()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer pairs, less training")
    main(parser.parse_args().quick)

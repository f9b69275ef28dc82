"""Fit one posterior to a network and a loader that accelerate has prepared.

accelerate launch --multi_gpu --num_processes 2 examples/many_processes/with_accelerate.py

(--multi_gpu starts one process for each, also on a CPU, where --cpu starts a single one.)
"""

from __future__ import annotations

import warnings

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace


def main() -> None:
    """Train, and fit."""
    accelerator = Accelerator(cpu=True)
    x = torch.randn(101, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 1] > x[:, 0].sin()).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
            optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*repeats examples"
        )  # the prepared loader does; `fit` leaves them out
        la = Laplace(model, "classification", "all").fit(loader, group=distributed.group.WORLD)
    accelerator.print(f"{la.n_data} examples, log evidence {float(la.log_marginal_likelihood()):.1f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

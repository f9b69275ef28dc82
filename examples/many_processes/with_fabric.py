"""Fit one posterior with Lightning Fabric.

python examples/many_processes/with_fabric.py

(`fabric.launch()` starts the processes.)
"""

from __future__ import annotations

import warnings

import torch
from lightning.fabric import Fabric
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace


def main() -> None:
    """Train, and fit."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    x = torch.randn(101, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 1] > x[:, 0].sin()).long()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    model, optimizer = fabric.setup(plain, torch.optim.Adam(plain.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), 8, shuffle=True))
    for _ in range(3):
        for batch, labels in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(batch), labels))
            optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*repeats examples")  # Fabric's sampler does; `fit` leaves them out
        la = Laplace(model, "classification", "all").fit(loader, group=distributed.group.WORLD)
    fabric.print(f"{la.n_data} examples, log evidence {float(la.log_marginal_likelihood()):.1f}")


if __name__ == "__main__":
    main()

"""How many products a solve takes with all weights of a ResNet-20, with and without a preconditioner.

    python -m experiments.matrix_free --data FOLDER [--examples 100] [--out FILE]
    python -m experiments.matrix_free --small [--out FILE]

The second form needs no data: a small network on made-up classes, with several prior precisions. FOLDER holds CIFAR-10
and the trained networks, as the top of `benchmarks/harm/data.py` says. Everything runs on one thread, and seconds are
those of the CPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from benchmarks.harm.data import Folder
from benchmarks.harm.networks import trained_resnet
from experiments.uq_cifar10.features import images, labels

from laplace import Laplace
from laplace.errors import LaplaceWarning
from laplace.structures import MatrixFree

PRECONDITIONERS = ("lowrank", "none", "ekfac", "kron")
BATCH = 50


def main() -> None:
    """Fit, predict, draw and estimate the evidence with each preconditioner, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--prior-precision", type=float, default=10.0)
    parser.add_argument("--preconditioners", nargs="+", default=list(PRECONDITIONERS))
    parser.add_argument("--answers", nargs="+", default=["variances", "draws", "evidence"])
    parser.add_argument("--most-iterations", type=int, default=60)
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    torch.set_num_threads(1)
    if told.small:
        small(told)
        return
    if told.data is None:
        parser.error("say where the data is with --data FOLDER, or write --small.")
    folder = Folder(told.data)
    network = trained_resnet(20, folder.model("cifar10_resnet20")).eval()
    x, y = images(folder, "train", told.examples), labels(folder)["train"][: told.examples]
    new = images(folder, "test", 1)
    loader = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    rows = []
    for preconditioner in told.preconditioners:
        rows.append(measured(network, loader, new, preconditioner, told))
        print(json.dumps(rows[-1]), flush=True)
        if told.out is not None:
            weights = sum(p.numel() for p in network.parameters())
            found = {"examples": len(x), "weights": weights, "prior_precision": told.prior_precision, "rows": rows}
            told.out.write_text(json.dumps(found, indent=1) + "\n")


def measured(network: Any, loader: list[Any], new: torch.Tensor, preconditioner: str, told: Any) -> dict[str, Any]:
    """Return what a fit and each kind of answer took with one preconditioner."""
    structure = MatrixFree(preconditioner=preconditioner, most_iterations=told.most_iterations, probes=told.probes)
    la = Laplace(network, "classification", "all", structure, prior_precision=told.prior_precision)
    row: dict[str, Any] = {"preconditioner": preconditioner}
    row["fit"] = {"seconds": _seconds(lambda: la.fit(loader))}
    if "variances" in told.answers:
        row["variances"] = _answer(la, lambda: la.predict(new, link_approx="probit"))
    if "draws" in told.answers:
        row["draws"] = _answer(la, lambda: la.sample(told.draws, generator=torch.Generator().manual_seed(0)))
    if "evidence" in told.answers:
        row["evidence"] = _answer(la, lambda: float(la.log_marginal_likelihood()))
        row["evidence"]["standard_error"] = la.solves.evidence_error
    row["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return row


def small(told: Any) -> None:
    """Print the blocks of products for the variances of one input, for a small network and several priors."""
    torch.manual_seed(0)
    x = torch.randn(5000, 4)
    y = (x[:, 0] + x[:, 1] ** 2 + 0.5 * torch.randn(len(x)) > 0).long() + (x[:, 2] > 0.5).long()
    widths = ((4, 16), (16, 16), (16, 3))
    layers = [layer for i, o in widths for layer in (torch.nn.Linear(i, o), torch.nn.Tanh())]
    network = torch.nn.Sequential(*layers[:-1])
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(300):
        index = torch.randint(len(x), (200,))
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(network(x[index]), y[index]).backward()
        optimiser.step()
    network, x, rows = network.double(), x.double(), []
    for preconditioner in (*told.preconditioners, "diag"):
        structure = MatrixFree(preconditioner=preconditioner, most_iterations=500)
        la = Laplace(network, "classification", "all", structure).fit([(x[:2500], y[:2500]), (x[2500:], y[2500:])])
        row: dict[str, Any] = {"preconditioner": preconditioner, "weights": la.n_params, "examples": len(x)}
        for delta in (0.1, 1.0, 10.0):
            la.prior_precision = delta
            row[f"precision {delta:g}"] = _answer(la, lambda la=la: la.predict(torch.zeros(1, 4).double()))
        rows.append(row)
        print(json.dumps(row), flush=True)
    if told.out is not None:
        told.out.write_text(json.dumps(rows, indent=1) + "\n")


def _answer(la: Laplace, ask: Any) -> dict[str, Any]:
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LaplaceWarning)  # of residuals that are not reached: the table has them
        seconds = _seconds(lambda: found.append(ask()))
    solves = la.solves
    told = {"seconds": seconds, "products": solves.products, "blocks": solves.iterations, "residual": solves.residual}
    return told | ({"value": found[0]} if isinstance(found[0], float) else {})


def _seconds(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()

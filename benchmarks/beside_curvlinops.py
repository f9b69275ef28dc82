"""KFAC and EKFAC of curvlinops 3 beside ours: factors of all weights, and their inverse times one vector.

    python benchmarks/beside_curvlinops.py [--network lenet]

curvlinops runs in a process of its own, from a folder that it is installed to on first use. Both sides report CPU
seconds on one thread, and those of a plain epoch beside them: the best of several turns. Weights of BatchNorm are left
out on both sides, because curvlinops has linear layers and convolutions only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import machine
import networks
from data import Batches, random_batches
from measure import best_seconds, use_one_thread, warmed

RESULTS = Path(__file__).parent / "results" / "curvlinops.json"
FOLDER = Path(__file__).parent / ".curvlinops"
PACKAGES = ("curvlinops-for-pytorch==3.0.1", "einops", "einconv", "unfoldNd", "linear_operator", "jaxtyping",
            "wadler-lindig", "scipy", "backpack-for-pytorch", "tqdm")  # fmt: skip
NETWORKS = {  # inputs, examples, batch size
    "digits_mlp": ((784,), 4000, 128),
    "lenet": ((1, 28, 28), 1500, 128),
    "resnet20": ((3, 32, 32), 256, 64),
    "small_transformer": ((16, 64), 1500, 128),
}
KINDS = ("kron exact", "kron one sample", "ekfac exact", "ekfac one sample")
PRIOR = 1.0


def main() -> None:
    """Measure both sides of each network, print a table and write it to a file."""
    options = _options()
    use_one_thread()
    if options.theirs is not None:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        sys.path.insert(0, str(options.theirs))
        print(json.dumps(_measured(options.network[0], theirs, options.turns)), file=answers, flush=True)
        return
    folder, results = installed(options.folder), []
    for network in options.network or NETWORKS:
        mine = _measured(network, ours, options.turns)
        command = [sys.executable, __file__, "--theirs", str(folder), "--network", network]
        done = subprocess.run([*command, "--turns", str(options.turns)], stdout=subprocess.PIPE, text=True, check=False)
        other = json.loads(done.stdout) if done.returncode == 0 else {}
        for kind in KINDS:
            found = {"network": network, "kind": kind, "ours": mine[kind], "epoch": mine["epoch"]}
            results.append(found | {"curvlinops": other.get(kind), "its epoch": other.get("epoch")})
            ratio = f"{other[kind] / mine[kind]:5.2f}" if other else "failed"
            print(
                f"{network:18} {kind:17} ours {mine[kind] / mine['epoch']:6.2f} x epoch   its seconds over ours {ratio}"
            )
        written = {"date": datetime.now(timezone.utc).date().isoformat(), "machine": asdict(machine.describe())}
        out = options.out or (None if options.network else RESULTS)
        if out is not None:
            out.write_text(json.dumps(written | {"results": results}, indent=2) + "\n")


def _measured(network: str, side: Callable[[nn.Module, Batches, str], object], turns: int) -> dict[str, float]:
    """Return CPU seconds of every kind, and of an epoch."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    shape, examples, size = NETWORKS[network]
    model = getattr(networks, network)()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    batches = random_batches(shape, 10, examples, size)
    works: dict[str, Any] = {kind: lambda kind=kind: lambda: side(model, batches, kind) for kind in KINDS}
    return best_seconds({"epoch": warmed(lambda: _epoch(model, batches))} | works, turns, at_least=0.0)


def _epoch(model: nn.Module, batches: Batches) -> None:
    """Run a forward and backward pass over all batches, up to the gradients of the weights that are measured."""
    params = [p for p in model.parameters() if p.requires_grad]
    for x, y in batches:
        torch.autograd.grad(nn.functional.cross_entropy(model(x), y), params)


def ours(model: nn.Module, batches: Batches, kind: str) -> Tensor:
    """Return the covariance times a vector."""
    from laplace import Laplace

    structure, _, how = kind.partition(" ")
    la = Laplace(model, "classification", "all", structure, curvature="ggn" if how == "exact" else "mc")
    gaussian = la.fit(batches).posterior.gaussian
    return gaussian.color(torch.ones(1, len(la.mean)))


def theirs(model: nn.Module, batches: Batches, kind: str) -> Any:
    """Return the inverse times a vector."""
    import curvlinops

    structure, _, how = kind.partition(" ")
    operator = {"kron": curvlinops.KFACLinearOperator, "ekfac": curvlinops.EKFACLinearOperator}[structure]
    fisher = curvlinops.FisherType.TYPE2 if how == "exact" else curvlinops.FisherType.MC
    params = [p for p in model.parameters() if p.requires_grad]
    loss = nn.CrossEntropyLoss(reduction="sum")
    made = operator(model, loss, params, batches, fisher_type=fisher, check_deterministic=False)
    inverse = curvlinops.KFACInverseLinearOperator(made, damping=PRIOR, use_exact_damping=True)
    return inverse @ torch.ones(sum(p.numel() for p in params))


def installed(folder: Path) -> Path:
    """Return the folder with curvlinops in it; torch comes from the running environment."""
    if not (folder / "curvlinops").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *PACKAGES]
        subprocess.run(pip, check=True)
    return folder


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", action="append", choices=NETWORKS, help="measure this one only; may be repeated")
    parser.add_argument("--turns", type=int, default=3, help="turns of each work, at least (default 3)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where curvlinops is, or is installed to")
    parser.add_argument(
        "--out", type=Path, help="where to write (default results/curvlinops.json, if all are measured)"
    )
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Train one task after another with a Laplace prior, and keep what each task leaves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from experiments.continual_limits.joining import prior_after
from experiments.continual_limits.tasks import Tasks, network
from experiments.uq.cache import Cache, Tensors
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from laplace import Laplace, marglik_training
from laplace.posterior.posterior import Fit

FREQUENCY, RATE, START = 5, 1e-3, 1e-3  # epochs between two uses of the evidence, learning rate, first delta


@dataclass(frozen=True)
class Variant:
    """How a network is trained.

    Attributes:
        epochs: of each task.
        prior_structure: 'scalar' or 'layerwise', for delta.
        joining: how the curvature of earlier tasks is joined (joining.py).
        tuned: whether delta is tuned on every task, or on the first alone.
        structure: what is kept of the curvature.
        examples: training images of each task.
    """

    epochs: int = 25
    prior_structure: str = "scalar"
    joining: str = "factors"
    tuned: bool = True
    structure: str = "kron"
    examples: int = 60_000

    def file(self, name: str, task: int, seed: int) -> str:
        """Return the name of a task's file. The first two tasks do not depend on how tasks are joined."""
        same = f"{self.structure}_{self.prior_structure}_{self.epochs}"
        own = name if task > 1 else same if task == 0 or self.tuned else f"{same}_first"
        return f"{own}_{self.examples}_seed{seed}_task{task}"


@dataclass(frozen=True)
class Learnt:
    """The network after a task.

    Attributes:
        model: the trained network.
        fits: the curvature of each task at its own weights.
        precision: delta, as tuned on the last task.
        seconds: CPU seconds of the last task's training.
    """

    model: nn.Module
    fits: list[Fit]
    precision: Tensor
    seconds: float


def learn(name: str, variant: Variant, tasks: Tasks, cache: Cache) -> Iterator[Learnt]:
    """Yield what is learnt after each task, trained or read from the cache."""
    model, fits = network(tasks.seed), list[Fit]()
    precision = torch.tensor(START)
    for task in range(len(tasks.orders)):
        kept = cache.get(variant.file(name, task, tasks.seed), _trained(model, fits, precision, variant, tasks, task))
        model.load_state_dict({key[6:]: value for key, value in kept.items() if key.startswith("model/")})
        precision = kept["precision"]
        sums = {key[5:]: value for key, value in kept.items() if key.startswith("sums/")}
        fits = [*fits, replace(_form(model, variant, tasks), sums=sums, n_data=len(tasks.x))]
        yield Learnt(model, fits, precision, float(kept["seconds"]))


def _trained(
    model: nn.Module, fits: list[Fit], precision: Tensor, variant: Variant, tasks: Tasks, task: int
) -> Callable[[], Tensors]:
    """Return a function that trains the next task, with the earlier ones as prior."""

    def make() -> Tensors:
        start, loader = time.process_time(), tasks.training(task)
        begin = {"prior": prior_after(fits, precision, variant.joining)} if fits else {"prior_prec_init": START}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a first delta that float32 rounds away, and of one that is not tuned
            la, *_ = marglik_training(
                model,
                loader,
                hessian_structure=variant.structure,
                curvature="ggn",
                optimizer_kwargs={"lr": RATE},
                scheduler_cls=CosineAnnealingLR,
                scheduler_kwargs={"T_max": variant.epochs * len(loader)},
                n_epochs=variant.epochs,
                n_epochs_burnin=0 if variant.tuned or not fits else variant.epochs,
                prior_structure=variant.prior_structure,
                marglik_frequency=FREQUENCY,
                **begin,
            )
        found = {f"model/{key}": value for key, value in model.state_dict().items()}
        found |= {f"sums/{key}": value for key, value in la.posterior.fit.sums.items()}
        seconds = torch.tensor(time.process_time() - start)
        return found | {"precision": la.prior_precision.detach(), "seconds": seconds}

    return make


def _form(model: nn.Module, variant: Variant, tasks: Tasks) -> Fit:
    """Return a fit at these weights on a few examples: it has the right form, and its sums are replaced."""
    la = Laplace(model, "classification", "all", variant.structure, curvature="ggn")
    return la.fit([(tasks.x[:20], tasks.y[:20])]).posterior.fit

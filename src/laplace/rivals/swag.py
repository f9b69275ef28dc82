"""SWAG (Maddox et al. 2019): a Gaussian over the weights from the iterates of SGD.

With the mean m and the variances d of the iterates, and the last K deviations D from the running mean, a draw is

    m + z_1 sqrt(d / 2) + D^T z_2 / sqrt(2 (K - 1)),    z_1, z_2 standard normal.

Statistics of BatchNorm belong to the weights: they are computed anew for every draw, by a run over the training data.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from laplace.checks import how_many, one_positive, whole_number
from laplace.errors import InputError, ModelError, NotFittedError, OptionError
from laplace.keywords import checked_before
from laplace.likelihoods import Likelihood
from laplace.linalg.autocast import plainly
from laplace.network.batches import training_batches
from laplace.network.inputs import Inputs
from laplace.network.loaders import dataloader_of
from laplace.network.replica import replicate
from laplace.rivals.base import Options, network_of
from laplace.rivals.ensemble import weights_of
from laplace.rivals.iterates import SGD, Moments, flat, iterates
from laplace.rivals.members import Members
from laplace.weights.selection import trainable_of


class SWAG(Members):
    """Puts a Gaussian over all trainable weights, diagonal plus low rank, from the iterates of SGD.

    Collect iterates in a training loop of your own, at a constant and rather large learning rate, or with `run`; then
    `draw` the networks that predictions average over.

        swag = SWAG(model, "classification")
        for epoch in range(20):
            ...                      # one epoch of SGD
            swag.collect()
        swag.draw(train_loader)      # renews the statistics of BatchNorm for each draw
        swag.predict(x)

    Args:
        model: the network that is trained. `collect` reads its weights; it is never changed.
        likelihood: what the outputs mean, as in `Laplace`.
        rank: how many of the last deviations are kept, K; 0 for a diagonal Gaussian.
        n_samples: how many networks are drawn, S. A prediction runs the network S times.
        scale: factor of the Gaussian's standard deviation.
        seed: what the weights are drawn by.
        sigma_noise: the standard deviation of the observation noise of a regression.
        softmax_temperature: T, by which all logits are divided. `calibrate` finds it.
        dict_key_x: for batches that are mappings, the key of the main input.
        dict_key_y: for batches that are mappings, the key of the labels.
        class_dim: which dimension of the outputs has the classes, as in `Laplace`.
        memory_budget: the number of bytes that may be used. By default the free memory.

    Attributes:
        rank: how many deviations are kept.
        n_samples: how many networks are drawn.
        scale: factor of the standard deviation.
        seed: what the weights are drawn by.

    Raises:
        OptionError: an option is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        rank: int = 20,
        n_samples: int = 30,
        *,
        scale: float = 1.0,
        seed: int = 0,
        sigma_noise: float | Tensor = 1.0,
        softmax_temperature: float = 1.0,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        class_dim: int | None = -1,
        memory_budget: int | None = None,
    ) -> None:
        self._model, self.rank = network_of(model), whole_number(rank, "rank", 0)
        if self.rank == 1:
            raise OptionError(
                "rank=1 is not allowed: a low-rank covariance needs two deviations. Write rank=2 or more, or rank=0 "
                "for a diagonal Gaussian."
            )
        self.n_samples = whole_number(n_samples, "n_samples", 2)
        self.scale, self.seed = one_positive(scale, "scale"), whole_number(seed, "seed", 0)
        self._moments, self._buffers = Moments(self.rank), list[dict[str, Tensor]]()
        options = Options.of(likelihood, dict_key_x, dict_key_y, class_dim, memory_budget)
        super().__init__(options, weights_of(None, self.n_samples), sigma_noise, softmax_temperature)

    if not TYPE_CHECKING:
        __new__ = checked_before(__init__)

    @property
    def model(self) -> nn.Module:
        """Return the network."""
        return self._model

    @property
    def n_collected(self) -> int:
        """Return how many iterates were collected."""
        return self._moments.count

    @property
    def mean(self) -> Tensor:  # (P,)
        """Return the mean of the iterates, in float64, in the order of the trainable parameters."""
        return self._collected().mean

    @property
    def variance(self) -> Tensor:  # (P,)
        """Return the variance of each weight over the iterates."""
        return self._collected().variance

    @property
    def deviations(self) -> Tensor:  # (K, P)
        """Return the last deviations of the iterates, each from the mean of all up to it."""
        return self._collected().deviations

    def collect(self) -> None:
        """Add the weights that the network has now."""
        vector = flat(p for _, p in trainable_of(self._model))
        if not vector.isfinite().all():
            raise ModelError("the weights hold NaN or infinite values: training has diverged. Lower the learning rate.")
        self._moments.add(vector)
        self._buffers = []

    @plainly
    def run(self, train_loader: Any, n_iterates: int = 20, epochs: int = 1, lr: float = 0.01) -> SWAG:
        """Run SGD with momentum 0.9 from the trained weights, on a copy of them, and collect its iterates.

        The network runs in eval mode, and is not changed.

        Args:
            train_loader: the training data, read `n_iterates` times `epochs` times.
            n_iterates: how many iterates are collected.
            epochs: how many epochs lie between two of them.
            lr: the learning rate, constant. Large enough to leave the trained weights, small enough to stay in their
                basin.

        Returns:
            The object itself.

        Raises:
            InputError: the data can be read only once, or holds no example.
            NumericalError: SGD diverges.
        """
        n, epochs = whole_number(n_iterates, "n_iterates"), whole_number(epochs, "epochs")
        loader = dataloader_of(train_loader, "train")
        step, frame = one_positive(lr, "lr"), self.frame
        walk = iterates(self._model, self.likelihood, loader, frame.keys, epochs, SGD(step), frame.class_dim)
        for vector in islice(walk, n):
            self._moments.add(vector)
        self._buffers = []
        return self

    @plainly
    def draw(self, train_loader: Any = None) -> SWAG:
        """Draw the networks that predictions average over, and compute the statistics of BatchNorm for each of them.

        Weights are drawn again from a seed when they are needed; only the statistics are kept.

        Args:
            train_loader: the training data, read once for each draw; not needed without BatchNorm.

        Returns:
            The object itself.

        Raises:
            NotFittedError: fewer than two iterates were collected.
            InputError: the network has BatchNorm, and there is no data.
        """
        self._collected()
        names = _statistics(self._model)
        if names and train_loader is None:
            raise InputError(
                "the network has BatchNorm, whose statistics belong to the weights: write draw(train_loader), which "
                "computes them for each draw."
            )
        loader = dataloader_of(train_loader, "train") if names else None
        self._buffers = [self._renewed(k, names, loader) if names else {} for k in range(self.n_samples)]
        return self

    def weights_drawn(self, member: int) -> dict[str, Tensor]:
        """Return the weights of one of the drawn networks, by name.

        Args:
            member: which, from 0 to `n_samples` - 1.
        """
        moments = self._collected()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + member)
        z = torch.randn(len(moments.mean), generator=generator, dtype=torch.float64).to(moments.mean.device)
        half = 0.5 if self.rank else 1.0
        move = z * (half * moments.variance).sqrt()
        if self.rank:
            found = moments.deviations
            z = torch.randn(len(found), generator=generator, dtype=torch.float64).to(found.device)
            move = move + z @ found / (2 * (len(found) - 1)) ** 0.5
        vector, drawn = moments.mean + self.scale * move, {}
        for name, p in trainable_of(self._model):
            own, vector = vector[: p.numel()], vector[p.numel() :]
            drawn[name] = own.reshape(p.shape).to(p)
        return drawn

    def _collected(self) -> Moments:
        if self._moments.count < 2:
            raise NotFittedError(
                f"{how_many(self._moments.count, 'iterate')} collected; two or more are needed. Call swag.collect() in "
                "the training loop, or swag.run(train_loader)."
            )
        return self._moments

    def _renewed(self, member: int, names: list[str], loader: Any) -> dict[str, Tensor]:
        """Return the statistics of BatchNorm over the training data with drawn weights."""
        drawn, network, seen = self.weights_drawn(member), replicate(self._model, written=names), 0
        for module in network.modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                module.reset_running_stats()
                module.momentum, module.training = None, True  # the mean over all batches
        with torch.inference_mode(False), torch.no_grad():
            for batch in training_batches(loader, self._model, self.frame.keys, False, "swag"):
                batch.inputs.map(torch.clone).call_with(network, drawn)
                seen += 1
        if not seen:
            raise InputError("the training loader gave no example. It must yield batches (x, y), at least one.")
        return {name: network.get_buffer(name).clone() for name in names}

    def _call(self, member: int, inputs: Inputs) -> Tensor:
        if not self._buffers:
            raise NotFittedError("no networks were drawn since the last iterate. Call swag.draw(train_loader).")
        with torch.inference_mode(False), torch.no_grad():
            tensors = self.weights_drawn(member) | self._buffers[member]
            return inputs.map(torch.clone).call_with(replicate(self._model), tensors)

    def __repr__(self) -> str:
        return f"SWAG of {how_many(self.n_collected, 'iterate')}, rank {self.rank}, {self.likelihood.described}"


def _statistics(model: nn.Module) -> list[str]:
    """Return the names of the running statistics of BatchNorm."""
    kept = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    return [f"{name}.{buffer}" if name else buffer for name, m in kept for buffer, _ in m.named_buffers(recurse=False)]

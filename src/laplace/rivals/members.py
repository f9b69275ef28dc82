"""Treat K networks with probabilities as a discrete distribution over functions, the same at every input."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from laplace.errors import InputError, within
from laplace.inference.source import FEWER, Answer, Part
from laplace.inference.targets import check_finite
from laplace.linalg.sampling import Draws
from laplace.network.batches import device_of
from laplace.network.inputs import Inputs
from laplace.network.sharing import Sharing
from laplace.predictive.outputs import OutputGaussian, OutputSamples
from laplace.predictive.positions import Positions
from laplace.predictive.queries import Contrasts, Functions, Joint, Products, Query, with_covariances
from laplace.rivals.base import Options, Rival

_EXAMPLES = 1024  # run at a time: more are no faster


class Members(Rival):
    """Is a rival with K networks, each with a probability. Its outputs are those of one of them."""

    def __init__(
        self, options: Options, weights: Tensor, sigma_noise: float | Tensor, softmax_temperature: float
    ) -> None:
        super().__init__(options, sigma_noise, softmax_temperature)
        self.weights, self._n_outputs, self._sharing = weights, None, Sharing()

    @abstractmethod
    def _call(self, member: int, inputs: Inputs) -> Tensor:
        """Run one of the networks, in eval mode, without touching what the user holds."""

    @property
    def n_outputs(self) -> int | None:
        """Return the number of outputs, C. None before the first run."""
        return self._n_outputs

    def outputs(self, inputs: Inputs, need: Query, answer: Answer | None = None) -> Iterator[Part]:
        """Yield the outputs of all networks, as one part.

        Args:
            inputs: what the networks are called with.
            need: how much of the distribution is asked for. All of it is known after one run of each network.
            answer: counts what the caller keeps, which is refused before it would not fit into memory.

        Raises:
            InputError: the outputs are not finite, or have different shapes.
            MemoryBudgetError: an answer that would not fit into memory.
        """
        if isinstance(need, Functions):
            which = chosen_members(self.weights, need.draws)
            used = which.unique()
            positions, values = self._values(inputs, used.tolist(), answer or Answer(self.frame.budget, FEWER))
            yield Part(positions, OutputSamples(values[torch.searchsorted(used, which).to(values.device)]))
            return
        positions, values = self._values(inputs, range(len(self.weights)), answer)
        if isinstance(need, Joint):
            values = values if need.chosen is None else values[..., need.chosen]
            yield Part(positions, self._jointly(values, need))
            return
        chosen = None if isinstance(need, (Products, Contrasts)) else need.chosen
        values = values if chosen is None else values[..., chosen]
        yield Part(positions, OutputSamples(values, self.weights, with_covariances(need)))

    def _jointly(self, values: Tensor, need: Joint) -> OutputGaussian:  # (K, N, C)
        """Return the Gaussian with the mean and covariance of all inputs' outputs together."""
        flat = values.flatten(1).unsqueeze(1)  # (K, 1, N C)
        size = 2 * flat.element_size() * flat.shape[-1] ** 2
        what = f"the joint covariance of {flat.shape[-1]:,} outputs"
        self.frame.budget.require(size, flat.device, what, need.instead)
        whole = OutputSamples(flat, self.weights, joint=True)
        return OutputGaussian(whole.mean, whole.variance, whole.covariance)

    def _values(
        self, inputs: Inputs, members: range | list[int], answer: Answer | None
    ) -> tuple[Positions, Tensor]:  # (K, N * T, C)
        """Run networks one after the other, each on consecutive parts of the inputs."""
        inputs = inputs.as_tensors(self.model).to(device_of(self.model))
        inputs, found = self._sharing.told_apart(inputs, self.model), []
        for member in members:
            with within(f"network {member}" if len(self.weights) > 1 else ""):
                f = torch.cat([self._call(member, part) for part in _parts(inputs)])
                positions = Positions.of(f, self.frame.class_dim)
                rows = positions.rows(f).to(torch.promote_types(f.dtype, torch.float32))
                self.likelihood.check_outputs(rows)
                check_finite(rows, "the network's outputs hold", positions.count)
                if found and positions != found[0][0]:
                    raise InputError(
                        f"the outputs of one network have shape {tuple(f.shape)}, which differs from those of the "
                        f"first: {found[0][0].c} at {found[0][0].grid}. All networks must return the same shape."
                    )
                if answer is not None:
                    answer.count(rows, rows.shape[1])
            found.append((positions, rows))
        self._n_outputs = found[0][0].c
        return found[0][0], torch.stack([rows for _, rows in found])


def chosen_members(weights: Tensor, draws: Draws) -> Tensor:  # (K,) -> (S,)
    """Return the member of each of S draws, in order. Each member gets S times its weight, to within one draw.

    If S is a multiple of K and the weights are equal, each has S / K of them.
    """
    device = None if draws.generator is None else draws.generator.device
    offset = torch.rand((), generator=draws.generator, device=device, dtype=torch.float64).cpu()
    points = (torch.arange(draws.n, dtype=torch.float64) + offset) / draws.n
    edges = weights.cpu().double().cumsum(0)
    return torch.searchsorted(edges / edges[-1], points, right=True).clamp(max=len(weights) - 1)


def _parts(inputs: Inputs) -> Iterator[Inputs]:
    n = inputs.size
    if n is None or n <= _EXAMPLES:
        yield inputs
        return
    yield from (inputs.part(start, start + _EXAMPLES) for start in range(0, n, _EXAMPLES))

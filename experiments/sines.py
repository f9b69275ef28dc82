"""A network of sines whose last layer is uncertain, as a model for Bayesian optimisation.

The hidden layer holds sines and cosines of frequencies w, drawn once. With a normal prior on the last layer's weights
the outputs are then nearly a Gaussian process whose kernel is the mean of cos(w (x - x')): normal frequencies give the
squared exponential, a Student-t with 5 or 3 degrees of freedom the Matern kernel of smoothness 5/2 or 3/2. The evidence
of the last layer trains the length scale of each input and the noise, under the priors that BoTorch gives them.

    python experiments/sines.py    # how far the prior's covariances are from the Matern kernel
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from botorch.models.transforms import Standardize
from botorch.optim.closures import ForwardBackwardClosure
from botorch.optim.core import scipy_minimize
from gpytorch.kernels import MaternKernel
from scipy.stats import chi2
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from laplace import Laplace
from laplace.integrations.botorch import LaplaceModel
from laplace.tuning import LastLayerRegression, regress_on_features

PAIRS = 512  # of a sine and a cosine of the same frequency
LEAST_LENGTH = 0.025  # of an input between 0 and 1; as in BoTorch


@dataclass(frozen=True)
class Network:
    """What is chosen about the network.

    Attributes:
        degrees: The degrees of freedom of the frequencies' Student-t. None: normal frequencies.
        noise: The mean of the logarithm of the noise variance under its prior; its standard deviation is 1.
        least: The least noise variance. Outcomes are standardised.
    """

    degrees: int | None
    noise: float
    least: float


class Lengths(nn.Module):
    """Divides each input by a length of its own: how slowly the function changes with it."""

    def __init__(self, log_length: Tensor) -> None:
        super().__init__()
        self.log_length = nn.Parameter(log_length)

    def forward(self, x: Tensor) -> Tensor:
        return x * (-self.log_length).exp()


class Sine(nn.Module):
    """Makes features whose prior is the same everywhere: no input is more uncertain for lying far from the centre."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def frequencies(d: int, degrees: int | None, seed: int) -> Tensor:  # (PAIRS, d)
    """Return quasi-random draws from a normal or a multivariate Student-t distribution."""
    n = d if degrees is None else d + 1
    uniform = SobolEngine(n, scramble=True, seed=seed).draw(PAIRS, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
    normals = torch.special.ndtri(uniform[:, :d])
    if degrees is None:
        return normals
    squares = torch.as_tensor(chi2.ppf(uniform[:, d].numpy(), degrees))
    return normals * (degrees / squares).sqrt().unsqueeze(1)


def untrained(d: int, degrees: int | None, seed: int) -> nn.Sequential:
    """Return the network without its last layer."""
    drawn = frequencies(d, degrees, seed)
    linear = nn.Linear(d, 2 * PAIRS).double().requires_grad_(False)
    linear.weight.copy_(torch.cat([drawn, drawn]))
    linear.bias.copy_(torch.tensor([0.0, math.pi / 2]).repeat_interleave(PAIRS))
    return nn.Sequential(Lengths(torch.zeros(d, dtype=torch.float64)), linear, Sine())


def trained(x: Tensor, y: Tensor, how: Network, seed: int) -> tuple[nn.Sequential, Tensor]:
    """Return the network with its last layer, and the noise: lengths and noise at the maximum of evidence times prior.

    The densities of the priors are those of BoTorch's Gaussian process: log-normal in the lengths and in the noise
    variance, whose modes lie below their medians. The search begins at these modes.

    Args:
        x: Inputs between 0 and 1, (n, d).
        y: Standardised outcomes, (n, 1).
        how: The choices.
        seed: The seed of the frequencies.
    """
    d = x.shape[1]
    usual = math.sqrt(2) + math.log(d) / 2
    hidden = untrained(d, how.degrees, seed)
    lengths = hidden[0]
    assert isinstance(lengths, Lengths)
    nn.init.constant_(lengths.log_length, max(usual - 3, math.log(1.2 * LEAST_LENGTH)))
    log_noise = torch.tensor(math.log(math.exp(how.noise - 1) - how.least), dtype=x.dtype, requires_grad=True)

    def regression() -> tuple[LastLayerRegression, Tensor]:
        variance = how.least + log_noise.exp()
        return regress_on_features(hidden(x), y, precisions().to(x), variance.sqrt()), variance

    def loss() -> Tensor:
        found, variance = regression()
        log_length, log_variance = lengths.log_length, variance.log()
        prior = -(log_length - usual).square().sum() / 6 - (log_variance - how.noise).square() / 2
        return -(found.log_evidence + prior - log_length.sum() - log_variance)

    parameters = {"log_length": lengths.log_length, "log_noise": log_noise}
    least = math.log(LEAST_LENGTH)
    bounds = {"log_length": (least, least + 12), "log_noise": (-20.0, 3.0)}
    scipy_minimize(ForwardBackwardClosure(loss, parameters), parameters, bounds, options={"maxiter": 200})
    with torch.no_grad():
        found, variance = regression()
    return nn.Sequential(*hidden, found.linear()), variance.sqrt()


def precisions() -> Tensor:
    """Return the prior precisions of the last layer's weights and bias: both parts of the outputs have variance 1."""
    return torch.tensor([float(PAIRS), 1.0])


def laplace_model(x: Tensor, y: Tensor, how: Network, seed: int, structure: str = "gp") -> LaplaceModel:
    """Return the posterior of the last layer as a BoTorch model.

    Args:
        x: Inputs between 0 and 1, (n, d).
        y: Outcomes, (n, 1).
        how: The choices about the network.
        seed: The seed of the frequencies.
        structure: 'gp' is the same posterior as 'full', from a matrix n x n. Drawn functions need 'full'.
    """
    standardize = Standardize(1)
    scaled, _ = standardize(y)
    model, noise = trained(x, scaled, how, seed)
    la = Laplace(model, "regression", "last_layer", structure, sigma_noise=noise, prior_precision=precisions().to(x))
    return LaplaceModel(la.fit([(x, scaled)]), outcome_transform=standardize, train_X=x, train_Y=y)


def kernel_errors(d: int, length: float, seeds: int = 5) -> tuple[float, float]:
    """Return root mean square and largest error of the prior's covariances as those of Matern 5/2, whose variance is 1.

    Args:
        d: The number of inputs; 400 points are drawn from the unit cube.
        length: The length scale of all inputs.
        seeds: How many draws of the frequencies.
    """
    x = torch.rand(400, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kernel = MaternKernel(2.5).double()
    kernel.lengthscale = length
    with torch.no_grad():
        exact, errors = kernel(x).to_dense(), []
        for seed in range(seeds):
            hidden = untrained(d, 5, seed)
            nn.init.constant_(hidden[0].log_length, math.log(length))  # pyright: ignore[reportArgumentType]
            phi = hidden(x)
            errors.append(phi @ phi.T / PAIRS - exact)
    every = torch.stack(errors)
    return float(every.square().mean().sqrt()), float(every.abs().max())


if __name__ == "__main__":
    for d in (2, 4, 6):
        for length in (0.3, 1.0):
            mean, largest = kernel_errors(d, length)
            print(f"{d} inputs, length {length}: root mean square {mean:.4f}, largest {largest:.3f}")

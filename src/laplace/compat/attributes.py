"""Provide the attributes that laplace-torch's objects have and `Laplace` has not, for scripts that read them.

`Laplace` looks here for names that it does not have itself (`Laplace.__getattr__`), so that `dir(Laplace)` shows only
its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from laplace.compat.backends import CurvatureInterface, backend_of
from laplace.compat.feature_extractor import FeatureExtractor
from laplace.compat.kept_factors import factors_of
from laplace.compat.matrix import Kron
from laplace.errors import UnsupportedError
from laplace.laplace import FURTHER, Laplace
from laplace.network.inputs import Inputs
from laplace.predictive.mixtures import joined
from laplace.predictive.outputs import OutputGaussian
from laplace.predictive.queries import Covariances, Joint, Variances

__all__ = ["register"]


def backend(la: Laplace) -> CurvatureInterface:
    """Return an object that computes Jacobians and curvatures of batches."""
    return backend_of(la)


def params(la: Laplace) -> list[nn.Parameter]:
    """Return the parameters with uncertain weights."""
    if la.values.fit is None:
        return [p for p in la.runner.model.parameters() if p.requires_grad]
    named = dict(la.runner.model.named_parameters())
    return [named[name] for name in la.posterior.fit.layout.names if name in named]


def n_params_subnet(la: Laplace) -> int:
    """Return the number of weights of the subnetwork."""
    return len(_indices(la))


def mean_subnet(la: Laplace) -> Tensor:
    """Return the weights of the subnetwork."""
    return all_weights(la)[_indices(la)]


def assemble_full_samples(la: Laplace, subnet_samples: Tensor) -> Tensor:  # (S, P') -> (S, P)
    """Return samples of all weights: the mean where they are not of the subnetwork."""
    full = all_weights(la).to(subnet_samples).repeat(len(subnet_samples), 1)
    full[:, _indices(la)] = subnet_samples
    return full


def all_weights(la: Laplace) -> Tensor:  # (P,)
    """Return all trainable weights as one vector."""
    return parameters_to_vector([p.detach() for p in la.runner.model.parameters() if p.requires_grad])


def output_gaussian(la: Laplace, X: Any, joint: bool = False, diagonal_output: bool = False) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the outputs, before the link, of any likelihood.

    Returns:
        (N, C) and (N, C, C), or (N, C) with `diagonal_output`; (N C,) and (N C, N C) with `joint`.
    """
    need = Joint("Take fewer inputs.") if joint else Variances() if diagonal_output else Covariances()
    with torch.set_grad_enabled(la.enable_backprop):
        out = joined([part.outputs for part in la.outputs(Inputs(X, {}, la.frame.keys), need)])
    assert isinstance(out, OutputGaussian)
    if out.covariance is None:
        return out.mean, out.variance
    return (out.mean[0], out.covariance[0]) if joint else (out.mean, out.covariance)


def functional_variance_fast(la: Laplace, X: Any) -> tuple[Tensor, Tensor]:
    """Return mean (N, C) and variance (N, C) of the outputs of a last layer."""
    return output_gaussian(la, X, diagonal_output=True)


def H_facs(la: Laplace) -> Kron:
    """Return the Kronecker factors of the curvature at unit noise."""
    return factors_of(la.posterior.fit)


def device(la: Laplace) -> torch.device:
    """Return the device of the network."""
    return next(la.runner.model.parameters()).device


def dtype(la: Laplace) -> torch.dtype:
    """Return the dtype of the network."""
    return next(la.runner.model.parameters()).dtype


def H_factor(la: Laplace) -> Tensor:
    """Return what the curvature at unit noise is multiplied by, 1 / (sigma^2 T)."""
    return 1 / (la.sigma_noise**2 * la.temperature)


def predictive(la: Laplace, x: Any, pred_type: str = "glm", link_approx: str = "probit", n_samples: int = 100) -> Any:
    """Return la(x, ...), with this order of arguments."""
    return la(x, pred_type=pred_type, link_approx=link_approx, n_samples=n_samples)


def glm_samples(la: Laplace, f_mu: Tensor, f_var: Tensor, n_samples: int, *args: Any, **kwargs: Any) -> Tensor:
    """Refuse: draws of outputs belong to inputs."""
    raise UnsupportedError("draws come from inputs here. Write la.functional_samples(x), or la.predictive_samples(x).")


def nn_functional_samples(
    la: Laplace, X: Any, n_samples: int = 100, generator: torch.Generator | None = None
) -> Tensor:
    """Return draws of the network's outputs, (S, N, C)."""
    return la.functional_samples(X, pred_type="nn", n_samples=n_samples, generator=generator)


def nn_predictive_samples(
    la: Laplace, X: Any, n_samples: int = 100, generator: torch.Generator | None = None
) -> Tensor:
    """Return draws of the network's predictions, (S, N, C)."""
    return la.predictive_samples(X, pred_type="nn", n_samples=n_samples, generator=generator)


def extractor(la: Laplace) -> FeatureExtractor:
    """Return the network as a `FeatureExtractor` with its last layer."""
    name = getattr(la.runner.weights, "module", None) or la.last_layer_name
    return FeatureExtractor(la.runner.model, name, la.enable_backprop, la.feature_reduction)


def last_layer(la: Laplace) -> nn.Module | None:
    """Return the last layer; None until it is known."""
    return extractor(la).last_layer


def _indices(la: Laplace) -> Tensor:
    indices = la.subnetwork_indices
    if indices is None:
        raise UnsupportedError(f"subset_of_weights={la.subset_of_weights!r} has no subnetwork_indices.")
    return indices


def register() -> None:
    """Let `Laplace` find these names."""
    FURTHER.update(
        {
            "H_facs": property(H_facs),
            "_H_factor": property(H_factor),
            "_device": property(device),
            "_dtype": property(dtype),
            "_glm_functional_samples": glm_samples,
            "_glm_predictive_distribution": output_gaussian,
            "_glm_predictive_samples": glm_samples,
            "_nn_functional_samples": nn_functional_samples,
            "_nn_predictive_samples": nn_predictive_samples,
            "assemble_full_samples": assemble_full_samples,
            "backend": property(backend),
            "functional_variance_fast": functional_variance_fast,
            "last_layer": property(last_layer),
            "mean_subnet": property(mean_subnet),
            "n_params_subnet": property(n_params_subnet),
            "params": property(params),
            "predictive": predictive,
            "predictive_moments": output_gaussian,
        }
    )

"""Provide laplace-torch's classes of posteriors over weights, one per combination: `KronLLLaplace(model, likelihood)`.

Each constructs a `Laplace`, takes laplace-torch's order of arguments, and may be subclassed. `isinstance` goes by the
combination, so that Laplace(model, "classification") is a KronLLLaplace. Who writes such a name comes from
laplace-torch; so these objects give hyperparameters, weights and samples the shapes that they have there.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from laplace.checkpoints import posteriors as files
from laplace.compat import attributes
from laplace.compat.feature_extractor import FeatureExtractor
from laplace.compat.kept_factors import factors_of, precision_of, sums_of
from laplace.compat.matrix import Kron, KronDecomposed
from laplace.compat.overrides import warn_of_overrides
from laplace.errors import OptionError
from laplace.inference import inspection
from laplace.inference import values as holding
from laplace.keywords import refuse_unknown_keywords
from laplace.laplace import Laplace
from laplace.likelihoods import Likelihood, likelihood_named
from laplace.tuning.calls import method_named

__all__ = [
    "BaseLaplace",
    "DiagLLLaplace",
    "DiagLaplace",
    "DiagSubnetLaplace",
    "FullLLLaplace",
    "FullLaplace",
    "FullSubnetLaplace",
    "KronLLLaplace",
    "KronLaplace",
    "LLLaplace",
    "LowRankLaplace",
    "ParametricLaplace",
    "SubnetLaplace",
]

VALUES = ("sigma_noise", "prior_precision", "prior_mean", "temperature")
KEYS = ("dict_key_x", "dict_key_y")

_init = refuse_unknown_keywords(Laplace.__init__)


class Combination(type):
    """Decides by weights and structure whether a `Laplace` object is an instance."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        _stands_for = vars(cls).get("_stands_for")  # a subclass of a user's own stands for nothing else
        return _stands_for is not None and isinstance(instance, Laplace) and _stands_for(instance)


def _require_vectors(given: dict[str, Any]) -> None:
    """Refuse hyperparameters with more than one dimension."""
    for name in ("sigma_noise", "prior_precision", "prior_mean"):
        value = given.get(name)
        if isinstance(value, Tensor) and value.dim() > 1:
            raise OptionError(f"{name} has shape {tuple(value.shape)}; give one number or a vector.")


def stands_for(weights: str | None = None, structure: str | None = None, functional: bool | None = None) -> Any:
    """Return a test whether a posterior has these weights and this structure."""

    def _stands_for(la: Laplace) -> bool:
        spec = la.runner.spec
        return (
            weights in (None, spec.weights.label)
            and structure in (None, spec.structure.name)
            and functional in (None, spec.structure.functional)
        )

    return staticmethod(_stands_for)


class BaseLaplace(Laplace, metaclass=Combination):
    """Covers every posterior, for isinstance. To make one, take `Laplace` or the class of a combination.

    Args:
        model: the trained network.
        likelihood: what its outputs mean.
        *args: laplace-torch's further arguments, in its order.
        **options: the same by name, and all other options of `Laplace`.
    """

    _stands_for: ClassVar[Any] = stands_for()
    _parts: ClassVar[tuple[str, str] | None] = None  # weights and structure, as `Laplace` takes them
    _order: ClassVar[tuple[str, ...]] = (*VALUES, "enable_backprop", *KEYS, "backend", "backend_kwargs")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        warn_of_overrides(cls)

    def __init__(self, model: nn.Module, likelihood: Any, *args: Any, **options: Any) -> None:
        cls = type(self)
        if cls._parts is None:
            raise OptionError(f"{cls.__name__} is the name of several classes. Write Laplace(model, likelihood, ...).")
        if len(args) > len(cls._order):
            raise OptionError(f"{cls.__name__} takes {len(cls._order)} arguments after likelihood; {len(args)} came.")
        given = dict(zip(cls._order, args, strict=False))
        if given.keys() & options.keys():
            raise OptionError(f"{cls.__name__} got {', '.join(given.keys() & options.keys())} twice.")
        given |= options
        if given.pop("asdl_fisher_kwargs", None):
            raise OptionError("asdl_fisher_kwargs= is for ASDL, which is not used here. Write curvature= instead.")
        _init(self, model, likelihood, *cls._parts, **cls._renamed(given))
        _require_vectors(given)
        self._require_lengths(given)

    @classmethod
    def _renamed(cls, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def _require_lengths(self, given: dict[str, Any]) -> None:
        """Refuse hyperparameters that fit no number of weights, already here, where it is known."""

    @property
    def likelihood(self) -> Likelihood:  # type: ignore[override]
        """Return the likelihood; setting it changes how outputs are read, not what was fitted."""
        return self.runner.spec.likelihood

    @likelihood.setter
    def likelihood(self, value: Any) -> None:
        self.runner.spec = replace(self.runner.spec, likelihood=likelihood_named(value))

    @classmethod
    def load(cls, *args: Any, **options: Any) -> Any:
        """Return the posterior that `save` wrote, as an object of this class; see `Laplace.load`."""
        found = files.load(cast(Any, Laplace), *args, **options)
        out = cls.__new__(cls)
        vars(out).update(vars(found))
        return out

    @property
    def prior_precision(self) -> Tensor:  # type: ignore[override]
        """Return the prior precision, (1,), one per parameter tensor or one per weight."""
        return holding.prior_precision(self).reshape(-1)

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        holding.set_prior_precision(self, value)

    @property
    def loss(self) -> Tensor:  # type: ignore[override]
        """Return the training loss as a tensor, 0 before `fit`."""
        value = inspection.loss(self) if self.is_fitted else 0.0
        return torch.tensor(value, dtype=attributes.dtype(self), device=attributes.device(self))

    def log_marginal_likelihood(self, *args: Any, **options: Any) -> Tensor:
        """Return the log evidence in the network's dtype; see `Laplace.log_marginal_likelihood`."""
        return Laplace.log_marginal_likelihood(self, *args, **options).to(attributes.dtype(self))

    def optimize_prior_precision(self, *args: Any, **options: Any) -> None:
        """Set the prior precision; see `Laplace.optimize_prior_precision`. A grid is searched by `_gridsearch`."""
        call = inspect.signature(Laplace.optimize_prior_precision).bind(self, *args, **options)
        call.apply_defaults()
        given = dict(call.arguments)
        given.pop("la")
        if method_named(given["method"]) == "marglik":
            Laplace.optimize_prior_precision(self, **given)
            return
        low, high = given.pop("log_prior_prec_min"), given.pop("log_prior_prec_max")
        grid = torch.logspace(low, high, given.pop("grid_size"), base=given.pop("log_prior_prec_base"))
        self.prior_precision = self._gridsearch(given.pop("loss"), grid, given.pop("val_loader"), **given)

    def _gridsearch(self, loss: Any, interval: Tensor, val_loader: Any, **options: Any) -> Tensor:
        """Return the prior precision of a grid, equally spaced in its logarithm, with the lowest loss."""
        ends = {f"log_prior_prec_{end}": float(interval[i].log10()) for end, i in (("min", 0), ("max", -1))}
        Laplace.optimize_prior_precision(
            self, loss=loss, val_loader=val_loader, grid_size=len(interval), **ends, **options
        )
        return self.prior_precision

    @property
    def n_params(self) -> int:  # type: ignore[override]
        """Return the number of weights."""
        if self.is_fitted:
            return inspection.n_params(self)
        return sum(p.numel() for p in attributes.params(self))

    @property
    def n_layers(self) -> int:  # type: ignore[override]
        """Return the number of parameter tensors."""
        return inspection.n_layers(self) if self.is_fitted else len(attributes.params(self))

    @property
    def mean(self) -> Any:  # type: ignore[override]
        """Return the weights at which the posterior was fitted; before `fit`, the prior's mean."""
        return self._mean_of_weights() if self.is_fitted else self._mean_before_fit()

    @mean.setter
    def mean(self, value: Tensor) -> None:
        fit = self.posterior.fit
        self.values = replace(self.values, fit=replace(fit, mean=value.detach().clone().to(fit.mean)))

    def _mean_of_weights(self) -> Tensor:
        return inspection.mean(self)

    def _mean_before_fit(self) -> Tensor | None:
        return self.prior_mean

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        """Return a prediction in the network's dtype; see `Laplace.__call__`. For classes, `joint` is not used."""
        if not self.likelihood.has_noise:
            options.pop("joint", None)
        out, dtype = super().__call__(x, *args, **options), attributes.dtype(self)
        return tuple(part.to(dtype) for part in out) if isinstance(out, tuple) else out.to(dtype)


class ParametricLaplace(BaseLaplace):
    """Covers every posterior over weights, for isinstance."""

    _stands_for = stands_for(functional=False)

    @property
    def H(self) -> Any:  # type: ignore[override]
        """Return the curvature at unit noise; zeros before `fit`."""
        if self.is_fitted:
            found = inspection.H(self)
            return found if not isinstance(found, Tensor) else found.to(attributes.dtype(self))
        return self._empty_H()

    @H.setter
    def H(self, value: Any) -> None:
        self._set_H(value)

    def _set_H(self, value: Any) -> None:
        """Replace the curvature of a fit by another one at unit noise. None forgets the data."""
        if value is None:
            self._init_H()
            return
        fit = self.posterior.fit
        self.values = replace(self.values, fit=replace(fit, sums=sums_of(fit, value)))

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Return the log-density of the posterior at some weights; before `fit`, of the prior.

        Args:
            value: weights, (P,) or (S, P).
            normalized: whether to add the constant.
        """
        if self.is_fitted:
            return Laplace.log_prob(self, value, normalized=normalized)
        delta = self.prior_precision if len(self.prior_precision) in (1, value.shape[-1]) else self._per_weight()
        out = -0.5 * (delta * (value - self.prior_mean) ** 2).sum(-1)
        return out + 0.5 * (delta / (2 * math.pi)).log().expand(value.shape[-1]).sum() if normalized else out

    def _per_weight(self) -> Tensor:
        sizes = torch.tensor([p.numel() for p in attributes.params(self)], device=self.prior_precision.device)
        return self.prior_precision.repeat_interleave(sizes)

    def _empty_H(self) -> Any:
        return None

    def _require_lengths(self, given: dict[str, Any]) -> None:
        n_params = self.n_params
        if n_params is None or self._parts is None or self._parts[0] == "subnetwork":
            return
        lengths = {1, self.n_layers} | ({n_params} if "diag" in self.structure.takes else set())
        for name, allowed in (("prior_precision", lengths), ("prior_mean", {1, n_params})):
            value = given.get(name)
            if isinstance(value, Tensor) and value.numel() not in allowed:
                wanted = " or ".join(map(str, sorted(allowed)))
                raise OptionError(f"{name} has {value.numel()} values; give {wanted}.")

    def _init_H(self) -> None:
        """Forget the data."""
        self.values = replace(self.values, fit=None)


class FullLaplace(ParametricLaplace):
    """Makes Laplace(model, likelihood, 'all', 'full')."""

    _stands_for, _parts = stands_for(structure="full"), ("all", "full")

    def _empty_H(self) -> Any:
        return torch.zeros(self.n_params, self.n_params, device=attributes.device(self), dtype=attributes.dtype(self))


class DiagLaplace(ParametricLaplace):
    """Makes Laplace(model, likelihood, 'all', 'diag')."""

    _stands_for, _parts = stands_for(structure="diag"), ("all", "diag")

    def _empty_H(self) -> Any:
        return torch.zeros(self.n_params, device=attributes.device(self), dtype=attributes.dtype(self))


class KronLaplace(ParametricLaplace):
    """Makes Laplace(model, likelihood, 'all', 'kron'). Its matrices are a `KronDecomposed`."""

    _stands_for, _parts = stands_for(structure="kron"), ("all", "kron")
    _order = (*VALUES, "enable_backprop", *KEYS, "backend", "damping", "backend_kwargs")

    @property
    def H(self) -> Any:  # type: ignore[override]
        """Return the curvature at unit noise, a `KronDecomposed`; a `Kron` of zeros before `fit`."""
        if not self.is_fitted:
            return Kron.init_from_model(attributes.params(self), attributes.device(self), attributes.dtype(self))
        return self._decomposed()

    @H.setter
    def H(self, value: Any) -> None:
        self._set_H(value)

    def _decomposed(self) -> KronDecomposed:
        factors = factors_of(self.posterior.fit)
        typed = Kron([[f.to(attributes.dtype(self)) for f in block] for block in factors.kfacs])
        return typed.decompose(damping=bool(self.damping))

    @property
    def posterior_precision(self) -> KronDecomposed:  # type: ignore[override]
        """Return the posterior precision, with `bmm`, `diag`, `logdet`, `to_matrix` of its powers."""
        return precision_of(self.posterior)


class LowRankLaplace(ParametricLaplace):
    """Makes Laplace(model, likelihood, 'all', 'lowrank')."""

    _stands_for, _parts = stands_for(structure="lowrank"), ("all", "lowrank")
    _order = ("backend", *VALUES, "enable_backprop", *KEYS, "backend_kwargs")


class LLLaplace(ParametricLaplace):
    """Covers every posterior over the weights of the last layer, for isinstance."""

    _stands_for = stands_for(weights="last_layer", functional=False)
    _order = (*VALUES, "enable_backprop", "feature_reduction", *KEYS, "backend", "last_layer_name", "backend_kwargs")

    @property
    def model(self) -> FeatureExtractor:  # type: ignore[override]
        """Return the network as a `FeatureExtractor`, with `last_layer`."""
        return attributes.extractor(self)

    @property
    def n_params(self) -> Any:  # type: ignore[override]
        """Return the number of weights of the last layer; None until it is known."""
        if self.is_fitted:
            return inspection.n_params(self)
        layer = attributes.last_layer(self)
        return None if layer is None else sum(p.numel() for p in layer.parameters())

    @property
    def n_layers(self) -> Any:  # type: ignore[override]
        """Return the number of parameter tensors of the last layer; None until it is known."""
        if self.is_fitted:
            return inspection.n_layers(self)
        layer = attributes.last_layer(self)
        return None if layer is None else len(list(layer.parameters()))

    def _mean_before_fit(self) -> Tensor | None:
        return None if self.n_params is None else self.prior_mean

    def _empty_H(self) -> Any:
        return None if self.n_params is None else super()._empty_H()


class FullLLLaplace(LLLaplace, FullLaplace):
    """Makes Laplace(model, likelihood, 'last_layer', 'full')."""

    _stands_for, _parts = stands_for("last_layer", "full"), ("last_layer", "full")


class DiagLLLaplace(LLLaplace, DiagLaplace):
    """Makes Laplace(model, likelihood, 'last_layer', 'diag')."""

    _stands_for, _parts = stands_for("last_layer", "diag"), ("last_layer", "diag")


class KronLLLaplace(LLLaplace, KronLaplace):
    """Makes Laplace(model, likelihood, 'last_layer', 'kron')."""

    _stands_for, _parts = stands_for("last_layer", "kron"), ("last_layer", "kron")
    _order = (*LLLaplace._order[:-1], "damping", "backend_kwargs")

    @property
    def H(self) -> Any:  # type: ignore[override]
        """Return the curvature at unit noise, a `KronDecomposed`; before `fit`, a `Kron` of zeros, or None."""
        if self.is_fitted:
            return self._decomposed()
        layer = attributes.last_layer(self)
        if layer is None:
            return None
        return Kron.init_from_model(layer, attributes.device(self), attributes.dtype(self))

    @H.setter
    def H(self, value: Any) -> None:
        self._set_H(value)


class SubnetLaplace(ParametricLaplace):
    """Covers every posterior over a subnetwork. `mean` and samples have all weights, as in laplace-torch."""

    _stands_for = stands_for(weights="subnetwork")
    _order = ("subnetwork_indices", *VALUES, "backend", "backend_kwargs")

    @property
    def n_params(self) -> int:  # type: ignore[override]
        """Return the number of all trainable weights; `n_params_subnet` counts those of the subnetwork."""
        return len(attributes.all_weights(self))

    def _mean_of_weights(self) -> Tensor:
        return attributes.all_weights(self)

    def sample(self, *args: Any, **options: Any) -> Tensor:
        """Draw weights, all of them: those outside the subnetwork are the mean's. See `Laplace.sample`."""
        return attributes.assemble_full_samples(self, Laplace.sample(self, *args, **options))


class FullSubnetLaplace(SubnetLaplace, FullLaplace):
    """Makes Laplace(model, likelihood, 'subnetwork', 'full')."""

    _stands_for, _parts = stands_for("subnetwork", "full"), ("subnetwork", "full")

    def _empty_H(self) -> Any:
        side = attributes.n_params_subnet(self)
        return torch.zeros(side, side, device=attributes.device(self), dtype=attributes.dtype(self))


class DiagSubnetLaplace(SubnetLaplace, DiagLaplace):
    """Makes Laplace(model, likelihood, 'subnetwork', 'diag')."""

    _stands_for, _parts = stands_for("subnetwork", "diag"), ("subnetwork", "diag")

    def _empty_H(self) -> Any:
        side = attributes.n_params_subnet(self)
        return torch.zeros(side, device=attributes.device(self), dtype=attributes.dtype(self))

"""Provide laplace-torch's classes of posteriors over functions: `FunctionalLaplace(model, likelihood, n_subset)`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace.compat.batches import regression_targets, split_batch, subset_loader, training_indices
from laplace.compat.classes import KEYS, VALUES, BaseLaplace, stands_for
from laplace.errors import OptionError, UnsupportedError, warn
from laplace.laplace import Laplace
from laplace.linalg.sampling import Keyed, uniforms
from laplace.structures.functional import Functional, Variational

__all__ = ["ELLA", "BaseFunctionalLaplace", "FunctionalLLLaplace", "FunctionalLaplace", "VaLLA"]

_OF_ELLA = {"subsample_size": "n_subset", "n_eigenvalues": "rank"}  # and what they are called here
_OF_VALLA = {"num_inducing": "n_subset", "inducing_locations": "inducing"}


class BaseFunctionalLaplace(BaseLaplace):
    """Covers every posterior over functions, for isinstance."""

    _stands_for = stands_for(functional=True)

    def state_dict(self, with_data: bool = True) -> dict[str, Any]:
        """Return everything of the posterior; it is made of points of the data, which are in it, as in laplace-torch.

        Args:
            with_data: False refuses, with what to write instead.
        """
        return Laplace.state_dict(self, with_data=with_data)

    def functional_samples(self, x: Any, pred_type: str = "glm", *args: Any, **options: Any) -> Tensor:
        """Draw outputs, (S, N, C); see `Laplace.functional_samples`. `pred_type='nn'` draws the same, as there."""
        return Laplace.functional_samples(self, x, _of_functions(pred_type), *args, **options)

    def predictive_samples(self, x: Any, pred_type: str = "glm", *args: Any, **options: Any) -> Tensor:
        """Draw predictions, (S, N, C); see `Laplace.predictive_samples`. `pred_type='nn'` draws the same, as there."""
        return Laplace.predictive_samples(self, x, _of_functions(pred_type), *args, **options)

    def _build_Sigma_inv(self) -> None:
        """Do nothing: the kernel is factorised when a prediction needs it, at the prior that is set then."""

    def _get_SoD_data_loader(self, train_loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of the points that `fit` keeps of a loader, if that reads its examples in order."""
        structure = self.runner.spec.structure
        assert isinstance(structure, Functional)
        indices = training_indices(train_loader)
        places = torch.arange(len(indices))
        drawn = uniforms(len(indices), 1, 1, torch.empty(0), Keyed(structure.seed, places)).flatten()
        kept = drawn.topk(min(structure.most, len(drawn)), largest=False).indices.sort().values
        return subset_loader(train_loader, indices[kept])


class FunctionalLaplace(BaseFunctionalLaplace):
    """Makes Laplace(model, likelihood, 'all', 'gp'): a Gaussian process on a subset of the data."""

    _stands_for, _parts = stands_for(structure="gp"), ("all", "gp")
    _order = (
        "n_subset",
        *VALUES,
        "enable_backprop",
        *KEYS,
        "backend",
        "backend_kwargs",
        "independent_outputs",
        "seed",
    )


class FunctionalLLLaplace(FunctionalLaplace):
    """Makes Laplace(model, likelihood, 'last_layer', 'gp')."""

    _stands_for, _parts = stands_for("last_layer", "gp"), ("last_layer", "gp")
    _order = (
        *("n_subset", *VALUES, "enable_backprop", "feature_reduction", *KEYS, "last_layer_name"),
        *("backend", "backend_kwargs", "independent_outputs", "seed"),
    )


class ELLA(BaseFunctionalLaplace):
    """Makes Laplace(model, likelihood, 'all', 'gp', functional_approximation='nystrom').

    `subsample_size` is `n_subset` here, and `n_eigenvalues` is `rank`.
    """

    _stands_for, _parts = stands_for(structure="gp, nystrom"), ("all", "gp")
    _order = (
        *("subsample_size", "n_eigenvalues", *VALUES, "enable_backprop", *KEYS),
        *("backend", "backend_kwargs", "seed"),
    )

    def __init__(self, model: nn.Module, likelihood: Any, *args: Any, **options: Any) -> None:
        super().__init__(model, likelihood, *args, **options)
        self.fit_history_: dict[str, list[Any]] = {"val_nll": [], "tuning": []}

    @classmethod
    def _renamed(cls, options: dict[str, Any]) -> dict[str, Any]:
        named = {_OF_ELLA.get(name, name): value for name, value in options.items()}
        return {"functional_approximation": "nystrom", **named}

    def fit(  # type: ignore[override]
        self,
        train_loader: Any,
        override: Any = True,
        progress_bar: bool | None = None,
        *,
        val_loader: Any = None,
        val_steps: int | None = None,
        balanced: bool = False,
        **options: Any,
    ) -> ELLA:
        """Fit to all data, in directions that are found on a subset of it.

        Args:
            train_loader: batches, which are read twice.
            override: as in `Laplace.fit`.
            progress_bar: whether one is shown.
            val_loader: batches for the negative log-likelihood in `fit_history_`.
            val_steps: accepted and not needed: the score is taken once, of the result.
            balanced: True is refused: the subset is drawn uniformly, whatever the classes are.
            **options: the others of `Laplace.fit`, such as `y` and `group`.

        Returns:
            The object itself.
        """
        if balanced:
            raise OptionError("balanced=True is not available: the subset is drawn uniformly. Leave it out.")
        Laplace.fit(self, train_loader, override, progress_bar, **options)
        self.fit_history_ = {"val_nll": [], "tuning": []}
        if val_loader is not None:
            self.fit_history_["val_nll"].append(_score(self, val_loader))
        return self

    def optimize_hyperparameters(self, val_loader: Any, grid: Iterable[Any]) -> None:
        """Set the prior precision, and the noise, to the pair of a grid with the lowest score on validation data.

        Args:
            val_loader: batches for the negative log-likelihood, which is kept in `fit_history_["tuning"]`.
            grid: prior precisions, or pairs (prior_precision, sigma_noise).

        Raises:
            OptionError: the grid is empty, or no score is finite.
        """
        chosen: tuple[Any, Any] = (self.prior_precision, self.sigma_noise)
        lowest = math.inf
        pairs: list[tuple[Any, Any]] = [
            tuple(pair) if isinstance(pair, (tuple, list)) else (pair, chosen[1]) for pair in grid
        ]
        try:
            for pair in pairs:
                self.prior_precision, self.sigma_noise = pair
                score = _score(self, val_loader)
                prior, noise = float(self.prior_precision), float(self.sigma_noise)
                self.fit_history_["tuning"] += [{"prior_precision": prior, "sigma_noise": noise, "val_nll": score}]
                if score < lowest:
                    chosen, lowest = pair, score
        finally:
            self.prior_precision, self.sigma_noise = chosen
        if lowest == math.inf:
            raise OptionError(
                f"no score of the {len(pairs)} values of the grid is finite; give a grid of other values."
            )


class VaLLA(BaseFunctionalLaplace):
    """Makes Laplace(model, likelihood, 'all', 'gp', functional_approximation='variational').

    `num_inducing` is `n_subset` here, and `inducing_locations` is `inducing`. The posterior is the optimum of the
    evidence's lower bound in closed form, so that `alpha` is 0 and nothing is sampled; all outputs of an inducing point
    count, not those of `inducing_classes` alone.
    """

    _stands_for, _parts = stands_for(structure="gp, variational"), ("all", "gp")
    _order = (
        *("inducing_locations", "num_inducing", "inducing_classes", *VALUES, "enable_backprop", *KEYS),
        *("backend", "backend_kwargs", "seed", "alpha", "mc_softmax_samples"),
    )

    def __init__(self, model: nn.Module, likelihood: Any, *args: Any, **options: Any) -> None:
        super().__init__(model, likelihood, *args, **options)
        self.fit_history_: dict[str, list[float]] = {"objective": [], "val_nll": []}

    @classmethod
    def _renamed(cls, options: dict[str, Any]) -> dict[str, Any]:
        named = {_OF_VALLA.get(name, name): value for name, value in options.items()}
        if isinstance(named.get("inducing", "random"), str) and named.get("n_subset") is None:
            raise OptionError("num_inducing= is needed with inducing_locations='random' or 'kmeans': a whole number.")
        alpha = named.pop("alpha", 0.0)
        if not 0 <= alpha <= 1:
            raise OptionError(f"alpha={alpha} must be between 0 and 1.")
        if alpha:
            warn(
                f"alpha={alpha} is not used: the posterior is the optimum of the lower bound of the evidence (alpha=0)."
            )
        for name in ("inducing_classes", "mc_softmax_samples"):
            named.pop(name, None)
        return {"functional_approximation": "variational", **named}

    def fit(  # type: ignore[override]
        self,
        train_loader: Any,
        *,
        iterations: int = 100,
        lr: float = 1e-3,
        val_loader: Any = None,
        val_steps: int | None = None,
        progress_bar: bool = False,
        override: bool = True,
    ) -> VaLLA:
        """Place the inducing points, take the best posterior given them, and tune prior and noise by its evidence.

        Args:
            train_loader: batches, which are read more than once.
            iterations: how many steps to move the inducing points by, if the inputs are one tensor of real numbers.
            lr: accepted and not needed.
            val_loader: batches for the negative log-likelihood in `fit_history_`.
            val_steps: accepted and not needed: the score is taken once, of the result.
            progress_bar: whether one is shown.
            override: False starts from the inducing points of the last fit.

        Returns:
            The object itself.
        """
        spec = self.runner.spec
        asked, structure = spec.structure, copy.copy(spec.structure)
        assert isinstance(asked, Variational)
        assert isinstance(structure, Variational)
        if override:
            self.fit_history_ = {"objective": [], "val_nll": []}
        elif self.inducing_locations is not None:
            structure.inducing, structure.locations = "given", self.inducing_locations
        x, _ = split_batch(next(iter(train_loader)), self.dict_key_y)
        structure.inducing_steps = iterations if isinstance(x, Tensor) and x.is_floating_point() else 0
        self.runner.spec = replace(spec, structure=structure)
        try:
            Laplace.fit(self, train_loader, progress_bar=progress_bar)
        finally:  # the steps are an argument of `fit` here: an object that loads this one's state has none
            structure.inducing, structure.inducing_steps = asked.inducing, asked.inducing_steps
        before = float(Laplace.log_marginal_likelihood(self))
        self.optimize_prior_precision(tune_sigma_noise=spec.likelihood.has_noise)
        self.fit_history_["objective"] += [-before, -float(Laplace.log_marginal_likelihood(self))]
        if val_loader is not None:
            self.fit_history_["val_nll"].append(_score(self, val_loader))
        return self

    @property
    def inducing_locations(self) -> Any:
        """Return the inducing points of the last fit; those that were given before it; None if they are not known."""
        structure = self.runner.spec.structure
        assert isinstance(structure, Variational)
        if structure.placed is None:
            return structure.locations
        parts = [part.inputs.x for part in structure.placed.parts]
        if len(parts) > 1 and not all(isinstance(x, Tensor) for x in parts):
            raise UnsupportedError("these inducing points have several shapes. See la.structure.placed.parts.")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def num_inducing(self) -> int | None:
        """Return the number of inducing points; None if they were given and are not placed yet."""
        structure = self.runner.spec.structure
        assert isinstance(structure, Variational)
        return structure.n_subset if structure.placed is None else len(structure.placed)


def _score(la: Laplace, loader: Any) -> float:
    """Return the mean negative log-likelihood of some batches."""
    total, count = 0.0, 0
    for x, y in (split_batch(batch, la.dict_key_y) for batch in loader):
        predicted = la.predict(x)
        labels = regression_targets(y, predicted.mean) if la.likelihood.has_noise else y
        total, count = total - float(predicted.distribution.log_prob(labels).sum()), count + len(y)
    return total / count


def _of_functions(pred_type: str) -> str:
    """Return the kind of draws that a posterior over functions has, where weights are asked for."""
    return "glm" if str(pred_type) == "nn" else pred_type

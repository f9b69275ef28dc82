"""Make a prior from any log p(theta) that is twice differentiable. Autograd computes its curvature."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.checks import choice, flag, positive, real
from laplace.errors import InputError, LaplaceError, OptionError
from laplace.linalg.symmetric import Clipped
from laplace.priors.base import Prior, clipped_matrix, clipped_values, require_form, require_known, rounding, slope
from laplace.priors.gaussian import own
from laplace.weights.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

LogDensity = Callable[..., Tensor]
_FORMS = {"weights": "diag", "tensors": "dense", "nothing": "whole"}


def from_log_density(
    fn: LogDensity,
    *,
    independent: str = "nothing",
    by_name: bool = False,
    unrestricted: Iterable[str] = (),
    name: str | None = None,
    **hyperparameters: Tensor | float,
) -> Custom:
    """Return the prior with log p = fn(weights, **hyperparameters), twice differentiable in both.

    `fn` gets weights and hyperparameters in float64. log p must be normalised if hyperparameters are to be tuned.

    Args:
        fn: a function from the weights to one number. The weights are one vector (P,), or {name: tensor} with
            `by_name`.
        independent: the parts that log p is a sum over. With 'weights', D is diagonal (for the structures 'diag',
            'full', 'block', 'lowrank' and 'inf'). With 'tensors', D has a matrix per tensor ('full' and 'block'). With
            'nothing', D is one matrix of all weights ('full').
        by_name: whether `fn` takes a dict of tensors by name, each in its own shape, instead of one vector.
        unrestricted: the names of hyperparameters that may be any real number. All others must be positive.
        name: the name by which saved states are compared. Defaults to the name of the function.
        **hyperparameters: numbers or tensors. `la.tune()` sets them by the evidence.

    Returns:
        A prior for `Laplace(..., prior=)`.

    Raises:
        OptionError: `fn` is not a function, or a hyperparameter is not positive.
        InputError: `fn` does not return a finite number at the weights.
    """
    if not callable(fn):
        raise OptionError(f"fn is a {type(fn).__name__}; a function is needed: from_log_density(fn).")
    return Custom(
        fn,
        choice(independent, _FORMS, "independent"),
        flag(by_name, "by_name"),
        (unrestricted,) if isinstance(unrestricted, str) else tuple(unrestricted),
        name or getattr(fn, "__qualname__", type(fn).__name__),
        hyperparameters,
    )


class Custom(Prior):
    """Computes everything from a log-density. See `from_log_density`."""

    name = "from_log_density"

    def __init__(
        self,
        fn: LogDensity,
        independent: str,
        by_name: bool,
        unrestricted: tuple[str, ...],
        called: str,
        hyperparameters: Mapping[str, Tensor | float],
    ) -> None:
        self.fn, self.independent, self.by_name, self.called = fn, independent, by_name, called
        self.unrestricted = unrestricted
        self._values = {name: self._checked(name, value) for name, value in hyperparameters.items()}
        require_known(self, unrestricted)

    @property
    def described(self) -> str:
        return f"{self.name}({self.called})"

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        return dict(self._values)

    def with_hyperparameters(self, **values: Tensor | float) -> Self:
        require_known(self, list(values))
        checked = {name: self._checked(name, value) for name, value in values.items()}
        for name, value in checked.items():
            if value.shape != self._values[name].shape:
                raise OptionError(
                    f"{name} has shape {tuple(value.shape)}; {self} needs shape {tuple(self._values[name].shape)}."
                )
        return self._with(self._values | checked)

    def log_density(self, theta: Tensor, layout: Layout) -> Tensor:
        return self._at(theta.double(), layout)

    def precision_at(self, theta: Tensor, layout: Layout) -> tuple[list[Tensor], Clipped]:
        keep = self.needs_grad and torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            weights = theta.detach().double().clone().requires_grad_()
            slopes = slope(self._at(weights, layout), weights, keep=True)
            found = self._bends(slopes, weights, layout, keep)
        pairs = [clipped_values(d) if d.dim() == 1 else clipped_matrix(d) for d in found]
        forms = [d if keep else d.detach() for d, _ in pairs]
        if not all(d.detach().isfinite().all() for d in forms):
            raise InputError(
                f"the second derivative of {self} is NaN or infinite at these weights. Write log p with functions that "
                "are twice differentiable there."
            )
        return [d.to(theta.dtype) for d in forms], sum((clipped for _, clipped in pairs), Clipped())

    def _bends(self, slopes: Tensor, weights: Tensor, layout: Layout, keep: bool) -> list[Tensor]:
        """Return -d2 log p. Independent weights take two Hessian-vector products, all others one per row.

        The second product shows whether they are independent: with D 1 = d, D v = d * v holds for a random v only if D
        is diagonal.
        """
        if self.independent == "weights":
            bend = -slope(slopes.sum(), weights, keep=True)
            v = torch.randn(len(weights), dtype=weights.dtype, generator=torch.Generator().manual_seed(0)).to(weights)
            self._require(-slope((slopes * v).sum(), weights, keep) - bend * v, rounding(bend, slopes))
            return layout.split(bend)
        rows = torch.stack([-slope(one, weights, keep=True) for one in slopes])
        rows = (rows + rows.T) / 2
        if self.independent == "nothing":
            return [rows]
        blocks = [part.split(layout.sizes, 1)[i] for i, part in enumerate(rows.split(layout.sizes))]
        self._require(rows - torch.block_diag(*blocks), rounding(rows, slopes))
        return blocks

    def _require(self, rest: Tensor, negligible: Tensor) -> None:
        if rest.detach().abs().max() > negligible:
            wider = "'tensors' or 'nothing'" if self.independent == "weights" else "'nothing'"
            raise OptionError(
                f"{self} is not a sum over independent {self.independent}: its second derivatives couple them. Write "
                f"independent={wider}, with hessian_structure='full'."
            )

    def check(self, layout: Layout, takes: Sequence[str] = ("diag",)) -> None:
        alone = self.independent == "nothing" and len(layout.names) == 1
        require_form(self, "dense" if alone else _FORMS[self.independent], takes)

    def require_structure(self, takes: Sequence[str]) -> None:
        if self.independent != "nothing" or "dense" not in takes:
            require_form(self, _FORMS[self.independent], takes)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self._with({name: change(value) for name, value in self._values.items()})

    def state(self, layout: Layout) -> dict[str, Any]:
        values = {name: value.detach().clone() for name, value in self._values.items()}
        return {"kind": self.name, "called": self.called, "hyperparameters": values}

    def __repr__(self) -> str:
        return super().__repr__().replace("Custom(", f"from_log_density({self.called}{', ' * bool(self._values)}", 1)

    def _with(self, values: dict[str, Tensor]) -> Self:
        other = copy.copy(self)
        other._values = values
        return other

    def _checked(self, name: str, value: Tensor | float) -> Tensor:
        return own((real if name in self.unrestricted else positive)(value, name))

    def _at(self, theta: Tensor, layout: Layout) -> Tensor:
        """Return log p at weights in float64."""
        values = {name: value.to(theta.device, torch.float64) for name, value in self._values.items()}
        named = zip(layout.names, layout.shapes, layout.split(theta), strict=True)
        weights = {name: part.reshape(shape) for name, shape, part in named} if self.by_name else theta
        try:
            out = self.fn(weights, **values)
        except LaplaceError:
            raise
        except Exception as error:
            shape = f"{{{', '.join(map(repr, layout.names))}}}" if self.by_name else f"({layout.n_params},)"
            raise InputError(f"the function of {self} failed with weights {shape} in float64: {error!r}.") from error
        if not isinstance(out, Tensor) or out.numel() != 1:
            came = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise InputError(f"the function of {self} returned {came}; it must return one number. Sum log p.")
        if not out.detach().isfinite():
            raise InputError(
                f"the function of {self} returned {float(out.detach())} at these weights; log p must be finite there."
            )
        return out.reshape(()).double()

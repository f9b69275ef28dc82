"""Draw functions from a posterior: draws of the weights that can be evaluated at any inputs, repeatedly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.checks import generator_or_none, whole_number
from laplace.decisions.arrays import require_source
from laplace.errors import UnsupportedError
from laplace.inference.arguments import pred_type_named
from laplace.inference.drawing import functional_samples
from laplace.inference.source import Source
from laplace.keywords import refuse_unknown_keywords
from laplace.linalg.sampling import seed_from


@dataclass(frozen=True)
class DrawnFunctions:
    """Computes S functions of x, each the network with one draw of its weights. Made by `draw_functions`.

    Called with N inputs, it returns the outputs f of every function, (S, N, C): the same functions in every call.
    Gradients flow to the inputs if the posterior has `enable_backprop=True`.

    Attributes:
        source: The posterior.
        n_samples: How many functions, S.
        pred_type: 'glm' or 'nn'.
        seed: The seed of the draws.
    """

    source: Source
    n_samples: int
    pred_type: str
    seed: int

    def __call__(self, x: Any, **model_kwargs: Any) -> Tensor:  # (S, N, C)
        """Return the outputs of every function at N inputs.

        Args:
            x: A tensor, a mapping, or a tuple of inputs.
            **model_kwargs: Passed on to the network.
        """
        generator = torch.Generator(self.source.noise_level.device).manual_seed(self.seed)
        drawn = self.pred_type, self.n_samples, False, generator
        return functional_samples(self.source, x, *drawn, **model_kwargs)


@refuse_unknown_keywords
def draw_functions(
    la: Source, n_samples: int = 1, pred_type: str = "glm", generator: torch.Generator | None = None
) -> DrawnFunctions:
    """Draw functions from a posterior, for example for Thompson sampling: maximise one of them over x.

    Nothing is stored but a seed: each call draws the same weights again, which costs what `la.sample` costs.

    Args:
        la: A fitted posterior over weights.
        n_samples: How many functions, S.
        pred_type: 'glm' linearises the network at its weights. 'nn' runs the network with the drawn weights. They are
            the same for a last layer.
        generator: The random generator. torch's global one by default.

    Returns:
        A callable: N inputs to outputs (S, N, C).

    Raises:
        OptionError: `la` is no posterior.
        NotFittedError: `fit` was not called yet.
        UnsupportedError: the posterior is over functions, and has no weights to draw.
    """
    require_source(la)
    if la.frame.functional:
        raise UnsupportedError(
            "a posterior over functions ('gp') has no weights whose draws could be evaluated anywhere. Take "
            "hessian_structure='full', 'kron' or 'diag', or la.functional_samples(x) at all inputs at once."
        )
    pred_type, n_samples = pred_type_named(pred_type, False), whole_number(n_samples, "n_samples")
    _ = la.n_outputs  # refuses a posterior that is not fitted
    generator = generator_or_none(generator)
    return DrawnFunctions(la, n_samples, pred_type, seed_from(generator))

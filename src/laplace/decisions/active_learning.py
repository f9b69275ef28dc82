"""Choose which inputs of a pool to label (active learning).

    chosen = acquire(la, pool, n=10, method="batch_bald")
    pool[chosen.indices]

Classes are scored from draws of whole functions, the same at all inputs, so that labels are dependent as the posterior
says they are. A regression is scored in closed form from joint covariances.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from laplace.checks import choice, generator_or_none, whole_number
from laplace.decisions import information
from laplace.decisions.arrays import inputs_for, require_source
from laplace.errors import InputError, OptionError, UnsupportedError, within
from laplace.inference.blocks import joint_blocks, noise_variance
from laplace.inference.source import FEWER, Answer, Source, scaled_outputs
from laplace.keywords import refuse_unknown_keywords
from laplace.likelihoods import Bernoulli
from laplace.likelihoods.classes import OneOfSeveral
from laplace.linalg.autocast import plainly
from laplace.linalg.sampling import Draws, seed_from
from laplace.network.batches import prediction_batches
from laplace.network.datasets import is_shuffled
from laplace.predictive.outputs import OutputSamples
from laplace.predictive.queries import Functions
from laplace.predictive.response import Latent

METHODS: Final = ("bald", "batch_bald", "epig", "entropy", "margin")
_USE = "Take 'classification', 'binary' with one output, 'ordinal' or 'regression'."


@dataclass(frozen=True)
class Acquisition:
    """Holds the inputs of a pool that were chosen.

    Attributes:
        indices: Which inputs, (n,), the best first.
        scores: The score of each, (n,). For 'batch_bald', the information of the batch up to and with it.
    """

    indices: Tensor
    scores: Tensor


@refuse_unknown_keywords
@plainly
@torch.no_grad()
def acquire(
    la: Source,
    pool: Any,
    n: int = 1,
    method: str = "bald",
    *,
    targets: Any = None,
    n_samples: int = 200,
    combinations: int = 1000,
    generator: torch.Generator | None = None,
) -> Acquisition:
    """Choose n inputs of a pool to be labelled.

    All methods but 'batch_bald' score each input separately and take the n best, which may all be nearly the same.
    'batch_bald' adds one input after the other, each time the one that makes the batch most informative.

    Args:
        la: A fitted posterior.
        pool: N inputs: a tensor, an array, a mapping, a tuple of inputs, or a DataLoader (in a fixed order; its labels
            are not used). A tensor or an array for regression.
        n: How many inputs to choose.
        method: 'bald', the information of a label about the function (Houlsby et al. 2011); 'batch_bald', of the labels
            of the whole batch (Kirsch et al. 2019); 'epig', of a label about the labels at `targets` (Smith et al.
            2023); 'entropy' of the prediction; 'margin', small between the two likeliest classes.
        targets: For 'epig', inputs where the predictions should be good, in the same form as `pool`. By default the
            pool itself.
        n_samples: For classes, how many functions are drawn.
        combinations: For 'batch_bald' with classes, how many combinations of labels are summed. If there are more, this
            many are drawn at random.
        generator: The random generator. torch's global one by default.

    Returns:
        The chosen indices and their scores.

    Raises:
        OptionError: `la` is no posterior, the method is unknown, or n is larger than the pool.
        UnsupportedError: the likelihood has no such score.
        InputError: the pool holds no example, or is a DataLoader that shuffles.
    """
    require_source(la)
    n, method = whole_number(n, "n"), choice(method, METHODS, "method")
    if method != "batch_bald":
        scores = score(la, pool, method, targets=targets, n_samples=n_samples, generator=generator)
        _require_enough(n, len(scores))
        best = scores.topk(n)
        return Acquisition(best.indices, best.values)
    if targets is not None:
        raise OptionError("targets= is for method='epig'; leave it out.")
    combinations = whole_number(combinations, "combinations")
    if _is_regression(la):
        return _gaussian_batch(la, _rows(la, pool, "pool"), n)
    p = _probabilities(la, pool, n_samples, generator_or_none(generator))
    _require_enough(n, p.shape[1])
    joint, chosen, gains = information.JointEntropy(p, combinations, generator), [], []
    bounds = p.new_full((p.shape[1],), torch.inf, dtype=torch.float64)
    for _ in range(n):
        best, gain = joint.best(bounds)
        bounds[best] = -torch.inf  # each input once
        chosen.append(best)
        gains.append(gain)
        joint.add(best)
    return Acquisition(torch.tensor(chosen, device=p.device), torch.stack(gains))


@refuse_unknown_keywords
@plainly
@torch.no_grad()
def score(
    la: Source,
    pool: Any,
    method: str = "bald",
    *,
    targets: Any = None,
    n_samples: int = 200,
    generator: torch.Generator | None = None,
) -> Tensor:  # (N,)
    """Return the score of each single input of a pool. Inputs with larger scores are more useful to label.

    Args:
        la: A fitted posterior.
        pool: N inputs, as in `acquire`.
        method: As in `acquire`. 'batch_bald' of single inputs is 'bald'.
        targets: For 'epig', as in `acquire`.
        n_samples: For classes, how many functions are drawn.
        generator: The random generator. torch's global one by default.

    Returns:
        (N,), float64, in nats except for 'margin'.

    Raises:
        OptionError: `la` is no posterior, the method is unknown, or `targets` are given to another one than 'epig'.
        UnsupportedError: the likelihood has no such score, or the posterior is over functions ('gp') and has targets.
        InputError: the pool holds no example.
    """
    require_source(la)
    method, generator = choice(method, METHODS, "method"), generator_or_none(generator)
    if targets is not None and method != "epig":
        raise OptionError(f"targets= is for method='epig', not {method!r}; leave it out.")
    if _is_regression(la):
        return _gaussian_scores(
            la, _rows(la, pool, "pool"), method, None if targets is None else _rows(la, targets, "targets")
        )
    if method != "epig":
        formulas = {"entropy": information.predictive_entropy, "margin": information.small_margin}
        formula = formulas.get(method, information.mutual_information)
        return torch.cat([formula(p) for p in _drawn(la, pool, n_samples, generator)])
    if targets is not None and la.frame.functional:
        raise UnsupportedError(
            "functions drawn from a 'gp' at the pool cannot be continued at targets=. Leave targets= out, or take "
            "hessian_structure='full', 'kron' or 'diag'."
        )
    seeded = torch.Generator().manual_seed(seed_from(generator))
    state = seeded.get_state()
    p = _probabilities(la, pool, n_samples, seeded)
    seeded.set_state(state)  # the same functions at the targets
    at_targets = p if targets is None else _probabilities(la, targets, n_samples, seeded, "targets")
    return information.information_about(p, at_targets)


# ---- classes ---------------------------------------------------------------------------------------------------------


def _is_regression(la: Source) -> bool:
    """Return whether y is real. Refuse likelihoods that are neither regression nor one of several classes."""
    likelihood = la.likelihood
    if isinstance(likelihood, (OneOfSeveral, Bernoulli)):
        return False
    if likelihood.response.links or isinstance(likelihood.response, Latent):
        raise UnsupportedError(f"{likelihood.name!r} has no scores for a pool. {_USE}")
    return True


def _drawn(
    la: Source, pool: Any, n_samples: int, generator: torch.Generator | None, what: str = "pool"
) -> Iterator[Tensor]:
    """Yield class probabilities at consecutive batches, (S, n, K). The functions are the same for all of them."""
    if is_shuffled(pool):
        raise InputError(
            f"{what}= is a DataLoader that shuffles, so that nobody could tell which inputs the indices mean. Write "
            "DataLoader(dataset, batch_size, shuffle=False)."
        )
    seed = seed_from(generator)
    draws, frame = whole_number(n_samples, "n_samples", 2), la.frame
    answer, seen = Answer(frame.budget, FEWER), 0
    for where, inputs in prediction_batches(pool, frame.keys, {}, False):
        if frame.functional and seen:
            raise UnsupportedError(
                "functions drawn from a 'gp' at one batch cannot be continued at the next. Give the pool as one tensor."
            )
        how = Functions(Draws(draws, torch.Generator(la.noise_level.device).manual_seed(seed)), exact=False)
        with within(where):
            for part in scaled_outputs(la, inputs, how, answer):
                assert isinstance(part.outputs, OutputSamples)
                if part.positions.several:
                    raise UnsupportedError("this network has outputs at many positions; a pool needs one label each.")
                p = la.likelihood.response.inverse_link(part.outputs.samples)
                seen += p.shape[1]
                yield torch.cat([1 - p, p], -1) if isinstance(la.likelihood, Bernoulli) else p
    if not seen:
        raise InputError(f"{what}= holds no example; give at least one.")


def _probabilities(
    la: Source, pool: Any, n_samples: int, generator: torch.Generator | None, what: str = "pool"
) -> Tensor:  # (S, N, K)
    return torch.cat(list(_drawn(la, pool, n_samples, generator, what)), 1)


# ---- regression ------------------------------------------------------------------------------------------------------


def _gaussian_scores(la: Source, x: Tensor, method: str, targets: Tensor | None) -> Tensor:  # (N,)
    if method == "margin":
        raise UnsupportedError("'margin' is the distance of two classes. For a regression take 'bald' or 'entropy'.")
    noise = _noise(la, x)
    if method != "epig":
        covariance = joint_blocks(la, x.unsqueeze(1)).covariance
        if method == "entropy":
            noisy = covariance.double() + noise.diag_embed()
            return 0.5 * torch.linalg.slogdet(2 * torch.pi * torch.e * noisy).logabsdet
        return information.gaussian_information(covariance, noise)
    targets = x if targets is None else targets
    blocks = joint_blocks(la, x.unsqueeze(1), targets)
    assert blocks.cross is not None
    assert blocks.further_covariance is not None
    c, m = blocks.mean.shape[-1], len(targets)
    wanted = blocks.further_covariance.reshape(m, c, m, c).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    noisy = wanted.double() + _noise(la, targets).diag_embed()
    own = blocks.covariance.double() + noise.diag_embed()
    return information.gaussian_information_about(own, blocks.cross.reshape(len(x), c, m, c), noisy)


def _gaussian_batch(la: Source, x: Tensor, n: int) -> Acquisition:
    """Choose the most informative batch greedily, one input after the other, by 1/2 log det(I + noise^-1 K)."""
    _require_enough(n, len(x))
    noise = _noise(la, x)
    left = joint_blocks(la, x.unsqueeze(1)).covariance.double()  # given the chosen, (N, C, C)
    columns: list[Tensor] = []  # (N, C, C) for each chosen: the factors of a block Cholesky decomposition
    chosen, total, gains = [], left.new_zeros(()), []
    for _ in range(n):
        found = information.gaussian_information(left, noise)
        found[chosen] = -torch.inf
        best = int(found.argmax())
        total = total + found[best]
        chosen.append(best)
        gains.append(total)
        if len(chosen) == n:
            break
        cross = joint_blocks(la, x.unsqueeze(1), x[best : best + 1]).cross
        assert cross is not None
        cross = cross.double() - sum((column @ column[best].mT for column in columns), torch.zeros_like(left))
        factor = torch.linalg.cholesky(left[best] + noise[best].diag_embed())
        columns.append(torch.linalg.solve_triangular(factor, cross.mT, upper=False).mT)
        left = left - columns[-1] @ columns[-1].mT
    return Acquisition(torch.tensor(chosen, device=left.device), torch.stack(gains))


def _noise(la: Source, x: Tensor) -> Tensor:  # (N, C)
    return noise_variance(la, x, _USE).double()


def _rows(la: Source, x: Any, what: str) -> Tensor:
    """Return inputs of a regression, whose joint covariances are needed."""
    x = inputs_for(la, x)
    if not isinstance(x, Tensor):
        raise InputError(
            f"{what}= is a {type(x).__name__}; for a regression a tensor of N inputs is needed, or an array."
        )
    if not len(x):
        raise InputError(f"{what}= holds no example; give at least one.")
    return x


def _require_enough(n: int, size: int) -> None:
    if n > size:
        raise OptionError(f"n={n} inputs cannot be chosen from a pool of {size}.")

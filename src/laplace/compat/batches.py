"""Provide laplace-torch's functions on batches, targets and loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Subset, SubsetRandomSampler

from laplace.errors import InputError

__all__ = [
    "batch_size",
    "classification_targets",
    "concatenate_rows",
    "draw_gaussian",
    "preserve_model_gradients",
    "regression_targets",
    "same_configuration",
    "select_rows",
    "split_batch",
    "subset_loader",
    "to_device",
    "training_indices",
]


def preserve_model_gradients(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method so that the `grad` of the weights of `self.model` is the same after it as before.

    Args:
        fit: the method.
    """

    @wraps(fit)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(p, None if p.grad is None else p.grad.clone()) for p in self.model.parameters()]
        try:
            return fit(self, *args, **kwargs)
        finally:
            for p, grad in before:
                p.grad = grad

    return wrapped


def same_configuration(left: Any, right: Any) -> bool:
    """Return whether two nested settings are equal, tensors by their values.

    Args:
        left: tensors, mappings, sequences, other values.
        right: the same.
    """
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left.cpu(), right.cpu())
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_configuration(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_configuration, left, right))
    return bool(left == right)


def draw_gaussian(mean: Tensor, covariance: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """Draw from Gaussians whose covariance may be singular.

    Args:
        mean: (B, C) or (n,).
        covariance: (B, C, C) or (n, n).
        n_samples: number of draws, S.
        generator: the only source of random numbers, if given.

    Returns:
        (S, B, C) or (S, n).
    """
    symmetric = (covariance + covariance.mT) / 2
    root, failed = torch.linalg.cholesky_ex(symmetric)
    if failed.any():
        values, vectors = torch.linalg.eigh(symmetric)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    noise = torch.randn(n_samples, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    return mean + (root @ noise.unsqueeze(-1)).squeeze(-1)


def to_device(value: Any, device: torch.device | str, dtype: torch.dtype) -> Any:
    """Return a nested input with its tensors moved, those of floating point in another dtype.

    Args:
        value: tensors, mappings, sequences, other values.
        device: where to.
        dtype: of floating-point tensors.
    """
    if isinstance(value, Tensor):
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)
    if isinstance(value, MutableMapping):
        return {key: to_device(item, device, dtype) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(item, device, dtype) for item in value)
    return value


def split_batch(batch: Any, dict_key_y: str) -> tuple[Any, Tensor]:
    """Return inputs and labels of a batch. A mapping is its own input.

    Args:
        batch: a pair, or a mapping.
        dict_key_y: the key of the labels.
    """
    return (batch, batch[dict_key_y]) if isinstance(batch, Mapping) else (batch[0], batch[1])


def regression_targets(targets: Tensor, outputs: Tensor) -> Tensor:
    """Return the targets in the shape of the outputs; (N,) fits (N, 1).

    Args:
        targets: (N,) or (N, C).
        outputs: (N, C).

    Raises:
        InputError: they do not fit.
    """
    if targets.dim() == 1 and outputs.shape == (*targets.shape, 1):
        targets = targets.unsqueeze(-1)
    if targets.shape != outputs.shape:
        raise InputError(f"targets have shape {tuple(targets.shape)}, the outputs {tuple(outputs.shape)}.")
    return targets.to(outputs)


def classification_targets(targets: Tensor) -> Tensor:  # (N,)
    """Return class indices from (N,), (N, 1) or one-hot (N, C).

    Args:
        targets: the labels.

    Raises:
        InputError: they have another form.
    """
    if targets.dim() == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if targets.dim() == 2 and ((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all():
        return targets.argmax(1)
    if targets.dim() != 1:
        raise InputError(f"targets have shape {tuple(targets.shape)}; give (N,), (N, 1), or one-hot (N, C).")
    return targets.long()


def training_indices(loader: DataLoader[Any]) -> Tensor:
    """Return the indices of the dataset that a loader visits, without drawing from its generator where it shuffles.

    Args:
        loader: the loader.

    Raises:
        InputError: it visits none.
    """
    sampler: Any = loader.sampler if loader.batch_size is not None else loader.batch_sampler
    size: Any = loader.dataset
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(size):
        found = list(range(len(size)))
    else:
        found = list(sampler.indices if isinstance(sampler, SubsetRandomSampler) else sampler)
    flat = [i for item in found for i in (item if isinstance(item, Sequence) else [item])]
    if not flat:
        raise InputError("the loader visits no example; give at least one.")
    return torch.as_tensor(flat, dtype=torch.long)


def subset_loader(loader: DataLoader[Any], indices: Tensor) -> DataLoader[Any]:
    """Return a loader of some examples, in their order.

    Args:
        loader: gives dataset, batch size and collate function.
        indices: which examples.
    """
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)
    return DataLoader(Subset(loader.dataset, indices.tolist()), batch_size=size, collate_fn=loader.collate_fn)


def batch_size(inputs: Any, dict_key_x: str) -> int:
    """Return the number of examples of an input.

    Args:
        inputs: a tensor, or a mapping.
        dict_key_x: the key of the main input.
    """
    return len(inputs[dict_key_x] if isinstance(inputs, Mapping) else inputs)


def concatenate_rows(chunks: Sequence[Any]) -> Any:
    """Return several inputs as one.

    Args:
        chunks: tensors, mappings or lists, all alike. Other values must be equal.

    Raises:
        InputError: they differ in their keys, or in a value.
    """
    first = chunks[0]
    if isinstance(first, Tensor):
        return torch.cat(list(chunks))
    if isinstance(first, Mapping):
        if any(chunk.keys() != first.keys() for chunk in chunks):
            raise InputError("the mappings have different keys.")
        return {key: concatenate_rows([chunk[key] for chunk in chunks]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(item for chunk in chunks for item in chunk)
    if any(chunk != first for chunk in chunks):
        raise InputError(f"a value is not the same in all inputs: {first!r}.")
    return first


def select_rows(inputs: Any, indices: Tensor, batch_size: int) -> Any:
    """Return some examples of an input.

    Args:
        inputs: tensors, mappings or lists; what has not `batch_size` rows is left as it is.
        indices: which examples.
        batch_size: how many examples the input has.
    """
    if isinstance(inputs, Mapping):
        return {key: select_rows(value, indices, batch_size) for key, value in inputs.items()}
    if isinstance(inputs, Tensor):
        return inputs[indices] if inputs.dim() and len(inputs) == batch_size else inputs
    if isinstance(inputs, (list, tuple)) and len(inputs) == batch_size:
        return type(inputs)(inputs[i] for i in indices.tolist())
    return inputs

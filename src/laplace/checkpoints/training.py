"""Training that can be interrupted: its state in one file, which runs no code when it is loaded."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laplace.checkpoints import container
from laplace.errors import CheckpointError
from laplace.nested import map_tensors

_KIND = "state of marglik_training"


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write beside `path` and move there, so that the file is always a whole one."""
    container.write(path, _KIND, state)


def load(path: str | os.PathLike[str], settings: Mapping[str, Any], device: torch.device) -> dict[str, Any] | None:
    """The state at `path`, if there is one; refused where it is of a training with other settings."""
    if not Path(path).exists():
        return None
    state = map_tensors(container.read(path, _KIND), lambda t: t.to(device, copy=True))
    then = state["settings"]
    differ = [f"{key} ({then.get(key)!r} there, {now!r} here)" for key, now in settings.items() if then.get(key) != now]
    if differ:
        raise CheckpointError(
            f"checkpoint={str(path)!r} is of another training: {'; '.join(differ)}. Use its settings, or another file."
        )
    return state


def generators_of(loader: Any, *others: torch.Generator | None) -> list[torch.Generator]:
    """The generators that a training draws from, beside the global ones."""
    samplers = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [*others, *(getattr(sampler, "generator", None) for sampler in samplers)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def random_state(generators: Iterable[torch.Generator]) -> dict[str, Any]:
    """Where all random numbers stand: torch's, Python's, NumPy's, and those of these generators."""
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "generators": [generator.get_state() for generator in generators],
    }


def set_random_state(state: Mapping[str, Any], generators: Iterable[torch.Generator]) -> None:
    """Go on from there."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"]:
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    random.setstate(state["python"])
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.cpu().numpy().astype(np.uint32), *rest))  # noqa: NPY002
    for generator, there in zip(generators, state["generators"], strict=True):
        generator.set_state(there.cpu())

"""Make training resumable: keep its state in one file. Loading the file runs no code."""

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
from laplace.network.pytree import map_tensors

_KIND = "state of marglik_training"
_KEYS = ("settings", "random", "model", "sigma", "optimizer", "scheduler", "margliks", "losses", "best")


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the state. A temporary file is moved to `path`, so that the file there is always complete."""
    container.write(path, _KIND, state)


def load(path: str | os.PathLike[str], settings: Mapping[str, Any], device: torch.device) -> dict[str, Any] | None:
    """Return the state at `path`, or None if there is no file. Refuse a training with other settings."""
    if not Path(path).exists():
        return None
    state = map_tensors(container.read(path, _KIND), lambda t: t.to(device, copy=True))
    if not isinstance(state, dict):
        raise damaged(path, f"it holds a {type(state).__name__}")
    if missing := [key for key in (*_KEYS, "prior" if "prior" in settings else "precision") if key not in state]:
        raise damaged(path, f"{missing[0]} is missing")
    then = state["settings"]
    if not isinstance(then, dict):
        raise damaged(path, f"its settings are a {type(then).__name__}")
    then = {"evidence": "epochs", "ranks": 1} | then  # of files from before there were others
    differ = [f"{key} ({then.get(key)!r} there, {now!r} here)" for key, now in settings.items() if then.get(key) != now]
    if differ:
        raise CheckpointError(
            f"checkpoint={str(path)!r} belongs to another training: {'; '.join(differ)}. Use its settings, or another "
            "file."
        )
    return state


def damaged(path: str | os.PathLike[str], why: object) -> CheckpointError:
    """Return the error for a file whose checksum is right but whose contents are not those of a training."""
    return CheckpointError(f"checkpoint={str(path)!r} is damaged: {why}. Take another copy, or another file.")


def generators_of(loader: Any, *others: torch.Generator | None) -> list[torch.Generator]:
    """Return the generators that a training draws from, besides the global ones."""
    samplers = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [*others, *(getattr(sampler, "generator", None) for sampler in samplers)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def random_state(generators: Iterable[torch.Generator]) -> dict[str, Any]:
    """Return the state of all random numbers: torch's, Python's, NumPy's, and these generators'."""
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "generators": [generator.get_state() for generator in generators],
    }


def set_random_state(state: Mapping[str, Any], generators: Iterable[torch.Generator]) -> None:
    """Set all random states. If that fails, leave them as they were."""
    generators = list(generators)
    before = random_state(generators)
    try:
        _set_random_state(state, generators)
    except Exception:
        _set_random_state(before, generators)
        raise


def _set_random_state(state: Mapping[str, Any], generators: Iterable[torch.Generator]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"]:
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    random.setstate(state["python"])
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.cpu().numpy().astype(np.uint32), *rest))  # noqa: NPY002
    for generator, there in zip(generators, state["generators"], strict=True):
        generator.set_state(there.cpu())

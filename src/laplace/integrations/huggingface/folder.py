"""Write and read a folder with a network of transformers and its posterior: safetensors and JSON, no code.

config.json, model.safetensors      the network, as transformers saves it
adapter_config.json, ...            of adapters: those of peft, and
network.safetensors                 all tensors of the adapted network, the frozen ones included
laplace.safetensors                 the posterior, with digests of the network's tensors
laplace.json                        the class of the network, and which parameters are trainable
README.md                           a short card, if there is none
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from safetensors.torch import load_model, save_model
from torch import nn

from laplace._version import __version__
from laplace.checkpoints.files import replacing
from laplace.checks import path_of
from laplace.errors import CheckpointError, OptionError
from laplace.laplace import Laplace

POSTERIOR: Final = "laplace.safetensors"
DETAILS: Final = "laplace.json"
_NETWORK: Final = "network.safetensors"
_CARD: Final = """---
tags: [laplace-approximation, uncertainty]
---

# {name} with a Laplace posterior

Class probabilities of this network are averaged over a Gaussian posterior of its weights.

    from laplace.integrations.huggingface import BayesianModel
    model = BayesianModel.from_pretrained(FOLDER)

{summary}
"""


def save(la: Laplace, folder: str | os.PathLike[str], tokenizer: Any, with_network: bool) -> None:
    """Write a posterior, and its network, to a folder."""
    path, model = Path(path_of(folder, "folder")), cast(Any, la.model)
    inner, adapter = _adapted(model)
    if with_network and not callable(getattr(model, "save_pretrained", None)):
        raise OptionError(
            f"a {type(model).__name__} has no save_pretrained. Write la.save(path) for the posterior alone, or "
            "with_network=False and save the network yourself."
        )
    path.mkdir(parents=True, exist_ok=True)
    la.save(path / POSTERIOR)
    if with_network:
        model.save_pretrained(path)
        if adapter is not None:
            inner.config.save_pretrained(path)
            with replacing(path / _NETWORK) as file:
                save_model(model, str(file))
    details = {
        "version": __version__,
        "architecture": type(inner).__name__,
        "adapter": adapter,
        "trainable": [name for name, p in model.named_parameters() if p.requires_grad],
    }
    with replacing(path / DETAILS) as file:
        file.write_text(json.dumps(details, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    if not (path / "README.md").exists():
        summary = "\n".join(f"    {line}" for line in repr(la).splitlines())
        (path / "README.md").write_text(_CARD.format(name=type(inner).__name__, summary=summary))


def load(folder: str | os.PathLike[str], model: nn.Module | None) -> Laplace:
    """Return the posterior in a folder on its network."""
    path = Path(path_of(folder, "folder"))
    if model is None:
        model = _network(path)
    return Laplace.load(path / POSTERIOR, model)


def _network(path: Path) -> nn.Module:
    """Make the network from the files of a folder, in eval mode."""
    try:
        details = json.loads((path / DETAILS).read_text())
        architecture, adapter, trainable = (details[key] for key in ("architecture", "adapter", "trainable"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{str(path)!r} has no usable {DETAILS} ({error}). Give a folder that save_pretrained wrote, or the "
            "network: from_pretrained(folder, model)."
        ) from error
    kind = getattr(transformers, str(architecture), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{str(path / DETAILS)!r} names the class {architecture!r}, which is no model of transformers "
            f"{transformers.__version__}. Make the network yourself: from_pretrained(folder, model)."
        )
    try:
        if adapter is None:
            model: nn.Module = kind.from_pretrained(path, use_safetensors=True, trust_remote_code=False)
        else:
            model = _with_adapters(kind, path, str(adapter))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"the network in {str(path)!r} cannot be loaded: {error}. If it was saved with with_network=False, write "
            "from_pretrained(folder, model)."
        ) from error
    for name, p in model.named_parameters():
        p.requires_grad_(name in set(trainable))
    return model.eval()


def _with_adapters(kind: Any, path: Path, adapter: str) -> nn.Module:
    """Make a network with adapters, and load all of its tensors."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("this network has adapters, which need peft: pip install 'laplace-redux[hf]'") from error
    config = kind.config_class.from_pretrained(path)
    base = kind(config).to(getattr(config, "dtype", None) or torch.float32)
    model = peft.get_peft_model(base, peft.PeftConfig.from_pretrained(str(path)), adapter_name=adapter)
    load_model(model, path / _NETWORK)
    return model


def _adapted(model: Any) -> tuple[Any, str | None]:
    """Return the network without its adapters' wrapper, and the name of the adapter, if there is one."""
    if not callable(getattr(model, "get_base_model", None)):
        return model, None
    return model.get_base_model(), str(model.active_adapter)

"""Stand in for packages that clients import and do not need here: any name of them is an empty class.

A plugin of pytest (`-p stand_ins`). torchvision's models are small convolutional networks whose last layer is `fc`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

from torch import nn

PACKAGES = (
    "torchvision",
    "timm",
    "kornia",
    "segmentation_models_pytorch",
    "vector_quantize_pytorch",
    "uncertainty_toolbox",
    "ema_pytorch",
    "omegaconf",
    "seaborn",
    "h5py",
    "jsonargparse",
    "cv2",
    "glest",
    "torch_uncertainty_datasets",
)


class Anything(type):
    """Gives a class for every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *args, **options: None})


class SmallNetwork(nn.Module):
    """Takes images (N, 3, H, W) and has 1,000 outputs, like those of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2048), nn.ReLU()
        )
        self.fc = nn.Linear(2048, 1000)

    def forward(self, x: Any) -> Any:
        """Return the outputs."""
        return self.fc(self.body(x))


class StandIn(ModuleType):
    """A module in which every name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "torchvision.models":
            return lambda *args, **options: SmallNetwork()
        return Anything(name, (), {"__init__": lambda self, *args, **options: None})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else has found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the packages of the list."""
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the empty module."""
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: there is no code."""


if importlib.util.find_spec("torchmetrics"):
    import torchmetrics  # noqa: F401  (it looks for torchvision itself, and must not find this one)

sys.meta_path.append(Finder())

"""Nothing is imported before it is used, and a package that is missing is named together with the extra to install."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONAL = (
    "accelerate", "botorch", "fastapi", "gpytorch", "lightning", "matplotlib", "onnx", "onnxruntime", "onnxscript",
    "pandas", "peft", "pytorch_lightning", "scipy", "sklearn", "skorch", "torch_geometric", "transformers",
)  # fmt: skip
NEEDS = {
    "laplace.integrations.botorch": "botorch",
    "laplace.integrations.huggingface": "hf",
    "laplace.integrations.lightning": "lightning",
    "laplace.integrations.sklearn": "sklearn",
}

# In a process of its own: other tests have imported the packages already.
_WITHOUT = """
import importlib, importlib.abc, json, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {optional}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import torch
from torch import nn
import laplace
from laplace import Laplace
from laplace.decisions import acquire
from laplace.evaluation import reliability
from laplace.evaluation.plots import reliability_diagram

torch.manual_seed(0)
x, y = torch.randn(20, 3), torch.arange(20) % 2
la = Laplace(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "classification").fit([(x, y)])
la.tune()
acquire(la, x, 2)
module = la.module()
module(x)
said = {{}}

def note(name, run):
    try:
        run()
    except ImportError as error:
        said[name] = str(error)

for name in {needs}:
    note(name, lambda: importlib.import_module(name))
note("onnx", lambda: module.to_onnx("never.onnx", x))
note("pandas", lambda: la.predict(x).to_pandas())
note("plots", lambda: reliability_diagram({{"la": reliability(la(x), y)}}))
note("bayesian", lambda: la.tune(method="bayesian", val_loader=[(x, y)]))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    code = _WITHOUT.format(optional=OPTIONAL, needs=tuple(NEEDS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


EXTRAS = NEEDS | {"onnx": "onnx", "pandas": "pandas", "plots": "plots", "bayesian": "botorch"}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_package_names_its_extra(name, said):
    assert f"pip install 'laplace-redux[{EXTRAS[name]}]'" in said[name]


def test_every_extra_is_declared_and_the_library_needs_four_packages():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    assert {*EXTRAS.values(), "graphs", "serve"} <= declared.keys()
    named = {name: {_package(each) for each in needed} for name, needed in declared.items()}
    assert {"transformers", "peft", "accelerate"} <= named["hf"]
    assert {"onnx", "onnxscript", "onnxruntime"} <= named["onnx"]
    packages = {"botorch": "botorch", "graphs": "torch_geometric", "lightning": "lightning", "pandas": "pandas"}
    packages |= {"plots": "matplotlib", "sklearn": "scikit-learn", "serve": "fastapi"}
    assert {name for name, package in packages.items() if package not in named[name]} == set()
    assert {_package(each) for each in project["dependencies"]} == {"torch", "numpy", "tqdm", "safetensors"}


def _package(requirement: str) -> str:
    return re.split(r"[<>=\[ ]", requirement)[0]


def test_the_library_itself_imports_none_of_them():
    code = f"import sys, laplace; print([name for name in {OPTIONAL} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

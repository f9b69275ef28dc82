"""An integration whose package is not installed says which extra to install."""

from __future__ import annotations

import importlib
import sys

import pytest

PACKAGES = {"sklearn": ["sklearn", "sklearn.base"], "lightning": ["lightning", "lightning.pytorch"]}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_names_its_extra(name, monkeypatch):
    for hidden in PACKAGES[name]:
        monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.delitem(sys.modules, f"laplace.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'laplace-redux\[{name}\]'"):
        importlib.import_module(f"laplace.integrations.{name}")

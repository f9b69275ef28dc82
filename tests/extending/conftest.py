"""What a test registers is gone after it."""

from __future__ import annotations

import pytest

from laplace.tuning.methods import METHODS


@pytest.fixture(autouse=True)
def registries_as_before(monkeypatch):
    for name in [*METHODS]:
        monkeypatch.setitem(METHODS, name, METHODS[name])
    before = dict(METHODS)
    yield
    for name in METHODS.keys() - before.keys():
        del METHODS[name]

"""For all tests: batches are run as they are cut, so that cutting them matters; `gathering` turns that off again."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def batches_as_cut(request, monkeypatch):
    if "gathering" not in request.fixturenames:
        monkeypatch.setattr("laplace.backprop.network._NARROW", 0)


@pytest.fixture
def gathering() -> None:
    """Small batches are run together, as they are for users."""

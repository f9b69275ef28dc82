"""The web service of examples/serving answers with what the posterior predicts, and refuses what it cannot answer."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "serving"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def app():
    for package in ("fastapi", "httpx", "sklearn"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("serving_app", FOLDER / "app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving_app"] = module  # where FastAPI looks up annotations
    spec.loader.exec_module(module)
    return module


def test_the_service_answers_from_its_files(app, tmp_path):
    from fastapi.testclient import TestClient

    app.write(tmp_path, steps=60, link="probit")
    _, x, _ = app.trained(steps=0)
    with TestClient(app.load(tmp_path)) as client:
        for n in (1, 3):
            rows = x[:n].flatten(1).tolist()
            found = client.post("/predict", json={"inputs": rows}).json()
            bare = client.post("/network", json={"inputs": rows}).json()
            mean = torch.tensor(found["mean"])
            assert mean.shape == torch.tensor(bare["mean"]).shape == (n, 10)
            assert (mean.sum(-1) - 1).abs().max() < 1e-5
            assert mean.max() < torch.tensor(bare["mean"]).max()  # less sure than the network
            assert torch.tensor(found["variance"]).min() > 0
            assert torch.tensor(found["epistemic"]).shape == (n,)
        far = client.post("/predict", json={"inputs": [[20 * v for v in rows[0]]]}).json()
        assert far["epistemic"][0] > 0
        for bad in ([], [[0.0]], [[1e999] * 64]):
            assert client.post("/predict", content=_json(bad)).status_code == 422


def _json(rows: list[list[float]]) -> str:
    numbers = ["[" + ", ".join("1e999" if math.isinf(v) else str(v) for v in row) + "]" for row in rows]
    return '{"inputs": [' + ", ".join(numbers) + "]}"

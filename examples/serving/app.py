"""A small web service that answers with probabilities, variances and epistemic uncertainty.

    pip install 'laplace-redux[serve,demo]'
    python examples/serving/app.py --port 8000
    curl 127.0.0.1:8000/predict -H 'content-type: application/json' -d '{"inputs": [[0.0, ... 64 numbers]]}'

A convolutional network learns handwritten digits (8 x 8 pixels), a posterior of its last layer is fitted, and both are
written to one file with torch.export. The service loads that file: it needs torch and FastAPI, and neither the training
code nor this library.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from torch import Tensor, nn

from laplace import Laplace

OUTPUTS = ("mean", "variance", "epistemic")
MOST = 256  # inputs in one request


class Request(BaseModel):
    """A batch of images, 64 numbers from 0 to 1 each."""

    inputs: list[list[float]]


def create_app(predict: Callable[[Tensor], dict[str, Tensor]], network: Callable[[Tensor], Tensor]) -> FastAPI:
    """Make the service from what was exported. `network` is there for comparison."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        print("ready", flush=True)
        yield

    app = FastAPI(title="Digits", lifespan=lifespan)

    def images(request: Request) -> Tensor:
        if not 1 <= len(request.inputs) <= MOST or any(len(row) != 64 for row in request.inputs):
            raise HTTPException(422, f"1 to {MOST} rows of 64 numbers are needed")
        x = torch.tensor(request.inputs)
        if not x.isfinite().all():  # the module checks no values: a service does
            raise HTTPException(422, "numbers must be finite")
        return x.reshape(-1, 1, 8, 8)

    @app.post("/predict")
    def answer(request: Request) -> dict[str, Any]:
        with torch.inference_mode():
            return {name: value.tolist() for name, value in predict(images(request)).items()}

    @app.post("/network")
    def bare(request: Request) -> dict[str, Any]:
        with torch.inference_mode():
            return {"mean": network(images(request)).softmax(-1).tolist()}

    return app


def trained(steps: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Train a small network on handwritten digits; return it with its data."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        chosen = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return model.eval(), x, y


def write(folder: Path, steps: int, link: str) -> None:
    """Train, fit, and write the two programs: the posterior predictive, and the bare network."""
    model, x, y = trained(steps)
    la = Laplace(model, "classification").fit(list(zip(x.split(200), y.split(200), strict=True)))
    module = la.module(link, OUTPUTS, example=x[:8])
    shapes = ({0: torch.export.Dim("batch", min=1, max=MOST)},)
    torch.export.save(torch.export.export(module, (x[:4],), dynamic_shapes=shapes), folder / "predictive.pt2")
    torch.export.save(torch.export.export(model, (x[:4],), dynamic_shapes=shapes), folder / "network.pt2")


def load(folder: Path) -> FastAPI:
    """Make the service from the files that `write` made."""
    programs = [torch.export.load(folder / f"{name}.pt2").module() for name in ("predictive", "network")]
    return create_app(*programs)


def main() -> None:
    """Write the programs to a temporary folder, and serve them on the loopback address."""
    import uvicorn

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--link", default="probit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tcp = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP  # asyncio sends at once if it knows that it is TCP
    with tempfile.TemporaryDirectory() as folder, socket.socket(*tcp) as listening:
        listening.bind(("127.0.0.1", options.port))
        listening.listen()
        write(Path(folder), options.steps, options.link)
        config = uvicorn.Config(load(Path(folder)), log_level="warning")
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()

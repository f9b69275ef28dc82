"""What runs in laplace-torch's process: a request as JSON in, what was found as JSON out.

Both libraries are imported as `laplace`, so nothing here is imported where ours is.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import networks
from data import epoch, forward, in_batches, inputs_of
from measure import best_seconds, cpu_seconds, use_one_thread

SLOW = 10.0  # seconds


def main(folder: Path, exchange: Path) -> None:
    """Answer the requests in the folder `exchange` with the laplace-torch that is installed in `folder`."""
    sys.path.insert(0, str(folder))
    warnings.simplefilter("ignore")
    use_one_thread()
    torch.manual_seed(0)
    problem = torch.load(exchange / "problem.pt", weights_only=True)
    requests = json.loads((exchange / "requests.json").read_text())
    answers = [_answer(folder, problem, request) for request in requests]
    (exchange / "answers.json").write_text(json.dumps(answers))


def _answer(folder: Path, problem: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        _check_origin(folder)
        return {"found": TASKS[request["task"]](Question(problem, request))}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"}


class Loader(list[tuple[Tensor, Tensor]]):
    """Ready batches with the `dataset` that laplace-torch takes the number of examples from."""

    @property
    def dataset(self) -> Tensor:
        return torch.cat([y for _, y in self])


class Question:
    """A network with its weights and data, and what is asked about it."""

    def __init__(self, problem: dict[str, Any], request: dict[str, Any]) -> None:
        self.model: nn.Module = getattr(networks, problem["network"])().to(problem["x"].dtype)
        self.model.load_state_dict(problem["weights"])
        self.batches = Loader(in_batches(problem["x"], problem["y"], problem["size"]))
        self.request = request

    def fitted(self) -> Any:
        """laplace-torch's posterior, with its evidence computed once."""
        from laplace import Laplace  # not ours: see _check_origin

        asked = self.request
        backend = {"stochastic": True} if asked.get("stochastic") else None
        likelihood, precision = asked.get("likelihood", "classification"), asked.get("prior_precision", 1.0)
        weights, structure = asked.get("weights", "all"), asked["structure"]
        la: Any = Laplace(self.model, likelihood, weights, structure, prior_precision=precision, backend_kwargs=backend)
        la.fit(self.batches)
        la.log_marginal_likelihood()
        return la


def fit(question: Question) -> dict[str, float]:
    """Seconds of a fit, and of an epoch."""
    return _timed(question.fitted, epoch=lambda: epoch(question.model, question.batches))


def predict(question: Question) -> dict[str, float]:
    """Seconds of predictions, and of a forward pass on the same inputs."""
    x, la = inputs_of(question.batches, question.request["n"]), question.fitted()
    return _timed(lambda: la(x), forward=lambda: forward(question.model, [x]))


def tune(question: Question) -> dict[str, float]:
    """Seconds of tuning by evidence after a fit."""

    def prepare() -> Callable[[], object]:
        la = question.fitted()
        return lambda: la.optimize_prior_precision(method="marglik", prior_structure="scalar")

    return {"laplace-torch": _seconds(prepare)}


def fit_tune_predict(question: Question) -> dict[str, float]:
    """Everything once, for its peak memory."""
    la = question.fitted()
    la.optimize_prior_precision(method="marglik", prior_structure="scalar")
    la(inputs_of(question.batches, question.request["n"]))
    return {}


def numbers(question: Question) -> dict[str, Any]:
    """The log evidence, and the predictions at the first inputs in one row."""
    la = question.fitted()
    out = la(inputs_of(question.batches, question.request["n"]))
    predictions = list(out) if isinstance(out, tuple) else [out]
    row = torch.cat([part.detach().flatten() for part in predictions])
    return {"evidence": float(la.log_marginal_likelihood()), "predictions": row.tolist()}


TASKS: Final[dict[str, Callable[[Question], dict[str, Any]]]] = {
    task.__name__: task for task in (fit, predict, tune, fit_tune_predict, numbers)
}


def _check_origin(folder: Path) -> None:
    laplace = importlib.import_module("laplace")
    if folder.resolve() not in Path(str(laplace.__file__)).resolve().parents:
        raise ImportError(f"laplace was imported from {laplace.__file__}, not from {folder}")


def _timed(work: Callable[[], object], **reference: Callable[[], object]) -> dict[str, float]:
    """Seconds of the work, and of the one reference before and after it.

    They do not take turns: where the work takes so long that there is one turn only, the reference would be measured
    once, on the caches that the work leaves, and come out several times too slow.
    """
    ((name, plain),) = reference.items()
    before = best_seconds({name: lambda: plain}, repeats=5, at_least=1.0)[name]
    found = _seconds(lambda: work)
    after = best_seconds({name: lambda: plain}, repeats=5, at_least=1.0)[name]
    return {"laplace-torch": found, name: min(before, after)}


def _seconds(prepare: Callable[[], Callable[[], object]]) -> float:
    """The best of several runs after a first one, or that one where it is slow: then being the first matters little."""
    first = cpu_seconds(prepare())
    return first if first > SLOW else best_seconds({"work": prepare}, repeats=1, at_least=3.0)["work"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""The works that are timed, by case: what a user waits for, and the plain passes that it is measured against.

A case is made once and gives its works by name. One whose name begins with `of_` is a plain pass of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final

import torch
from torch import nn

import all_weights
import last_layer
import networks
from data import forward, inputs_of
from laplace import Laplace
from measure import Work, warmed

Works = Mapping[str, Work]

PASSES: Final = {  # what a work is measured against
    "fit": "of_fit",
    "sketch": "of_fit",
    "predict": "of_predict",
    "la(x)": "of_one",
    "la.predict(x)": "of_one",
    "epistemic": "of_one",
    "default link": "of_one",
}


def with_all_weights(name: str) -> Works:
    """Fits over an epoch, predictions over a forward pass, tuning after a sketched fit."""
    case = all_weights.CASES[name]
    problem = all_weights.Problem(case)
    x, fitted = inputs_of(problem.batches, case.predictions), cache(problem.fitted)
    return {
        "of_fit": warmed(problem.epoch),
        "fit": lambda: problem.fitted,
        "sketch": lambda: problem.sketched,
        "of_predict": warmed(partial(forward, problem.model, [x])),
        "predict": lambda: partial(fitted(), x),
        "tune": problem.tuning,
    }


def with_last_layer(make: Callable[[], last_layer.Problem], n: int, asked: tuple[str, ...]) -> Works:
    """Fits and predictions over forward passes, tuning after a fit."""
    torch.manual_seed(0)
    problem = make()
    x, fitted = inputs_of(problem.batches, n), cache(problem.fitted)

    def tuning() -> Callable[[], object]:
        la = problem.fitted()
        return lambda: la.optimize_prior_precision(method="marglik")

    works: Works = {
        "of_fit": warmed(partial(forward, problem.model, [x for x, _ in problem.batches])),
        "fit": lambda: problem.fitted,
        "of_predict": warmed(partial(forward, problem.model, [x])),
        "predict": lambda: partial(fitted(), x),
        "tune": tuning,
    }
    return {name: works[name] for name in (*asked, *{PASSES[name] for name in asked if name in PASSES})}


def one_input(make: Callable[[], tuple[nn.Module, Any, Any, int]]) -> Works:
    """Predictions of one input over the network alone: the last layer, kron."""
    torch.manual_seed(0)
    model, batch, one, classes = make()
    n = len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
    y = torch.randint(classes, (n,))
    data = [{**batch, "labels": y}] if isinstance(batch, dict) else [(batch, y)]
    la = Laplace(model, "classification", "last_layer", "kron").fit(data)

    @torch.no_grad()
    def alone() -> None:
        model(**one) if isinstance(one, dict) else model(one)

    return {
        "of_one": warmed(alone),
        "la(x)": lambda: partial(la, one),
        "la.predict(x)": lambda: partial(la.predict, one, link_approx="probit"),
        "epistemic": lambda: lambda: la.predict(one, link_approx="probit").epistemic,
        "default link": lambda: partial(la.predict, one),
    }


def small_cnn() -> tuple[nn.Module, Any, Any, int]:
    """LeNet, 12 modules."""
    x = torch.randn(64, 1, 28, 28)
    return networks.lenet(), x, x[:1], 10


def deep_resnet() -> tuple[nn.Module, Any, Any, int]:
    """A ResNet of 155 modules."""
    x = torch.randn(16, 3, 32, 32)
    return networks.deep_resnet(), x, x[:1], 10


def distilbert() -> tuple[nn.Module, Any, Any, int]:
    """A DistilBERT by its configuration alone, 67 M weights, on 32 tokens."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig()
    config.num_labels = 4
    model = DistilBertForSequenceClassification(config).eval()
    batch = {"input_ids": torch.randint(1000, (8, 32)), "attention_mask": torch.ones(8, 32, dtype=torch.long)}
    return model, batch, {key: value[:1] for key, value in batch.items()}, 4


def _wide(structure: str) -> last_layer.Problem:
    return last_layer.thousand_classes(1, structure, "ef")


_EVERY, _PREDICT = ("fit", "predict", "tune"), ("predict",)

CASES: Final[Mapping[str, Callable[[], Works]]] = {
    **{f"all weights, {name}": partial(with_all_weights, name) for name in all_weights.CASES},
    "last layer, LeNet, kron": partial(with_last_layer, lambda: last_layer.ten_classes("kron", 1), 512, _EVERY),
    "last layer, LeNet, full": partial(with_last_layer, lambda: last_layer.ten_classes("full", 1), 256, _EVERY),
    "last layer, 1000 classes, kron": partial(with_last_layer, lambda: last_layer.thousand_classes(1), 64, _EVERY),
    **{
        f"last layer, 1000 classes, ef, {name}": partial(with_last_layer, partial(_wide, name), 64, _PREDICT)
        for name in last_layer.WIDE_HEADS
    },
    **{
        f"all weights, 1000 classes, {name}": partial(
            with_last_layer, partial(last_layer.wide_network, 1, name), 64, _PREDICT
        )
        for name in last_layer.WIDE_NETWORKS
    },
    "one input, small CNN": partial(one_input, small_cnn),
    "one input, ResNet of 155 modules": partial(one_input, deep_resnet),
    "one input, DistilBERT": partial(one_input, distilbert),
}

"""Tables: a scikit-learn estimator that knows how sure it is, beside the network that it holds.

Three sets that come with scikit-learn: diabetes (regression, 442 rows), breast cancer (two classes, 569 rows) and
digits (ten classes, 1,797 rows). Half of the rows train, the other half tests; each set is split several times.

    python examples/tabular.py [--quick]
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from laplace.errors import LaplaceWarning
from laplace.evaluation import ece, nll
from laplace.integrations.sklearn import LaplaceClassifier, LaplaceRegressor

KINDS: dict[str, dict[str, Any]] = {
    "last layer": {},
    "all weights": {"subset_of_weights": "all"},
    "last layer, calibrated on 20 %": {"validation_fraction": 0.2},
}


def normal_nll(y: np.ndarray, mean: np.ndarray, std: np.ndarray) -> float:
    """Return the mean negative log-density of y under normal distributions."""
    return float(np.mean(0.5 * ((y - mean) / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)))


def covered(y: np.ndarray, mean: np.ndarray, std: np.ndarray) -> float:
    """Return how many of y lie in the central 90 % interval of a normal distribution."""
    return float(np.mean(np.abs(y - mean) <= 1.6449 * std))


def regression(seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """Scores on diabetes, in units of the standard deviation of y, of the network and of its posteriors."""
    x, y = load_diabetes(return_X_y=True)
    x, new, y, truth = train_test_split(x, y / y.std(), test_size=0.5, random_state=seed)
    rows = {}
    for name, options in KINDS.items():
        model = make_pipeline(StandardScaler(), LaplaceRegressor(max_epochs=epochs, random_state=seed, **options))
        model.fit(x, y)
        mean, std = model.predict(new, return_std=True)
        rows[name] = {"nll": normal_nll(truth, mean, std), "covered": covered(truth, mean, std)}
        if name == "last layer":  # the network alone has the noise of its training residuals
            noise = np.full_like(mean, np.sqrt(np.mean((y - model.predict(x)) ** 2)))
            rows["network"] = {"nll": normal_nll(truth, mean, noise), "covered": covered(truth, mean, noise)}
    return rows


def classes(load: Any, seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """Scores on a set of classes, of the network and of its posteriors."""
    x, y = load(return_X_y=True)
    x, new, y, truth = train_test_split(x, y, test_size=0.5, random_state=seed, stratify=y)
    rows = {}
    for name, options in KINDS.items():
        model = make_pipeline(StandardScaler(), LaplaceClassifier(max_epochs=epochs, random_state=seed, **options))
        model.fit(x, y)
        p = model.predict_proba(new)
        rows[name] = {"nll": nll(p, truth), "ece": ece(p, truth)}
        if name == "last layer":
            network = model[-1].module_
            with torch.no_grad():
                q = network(torch.from_numpy(model[0].transform(new))).softmax(-1)
            rows["network"] = {"nll": nll(q, truth), "ece": ece(q, truth)}
    return rows


def main(quick: bool = False) -> dict[str, dict[str, dict[str, float]]]:
    """Print and return the scores of every set, averaged over its splits."""
    warnings.simplefilter("ignore", LaplaceWarning)
    torch.set_num_threads(1)
    seeds, epochs = range(1 if quick else 5), 20 if quick else 100
    tasks = {
        "diabetes": lambda seed: regression(seed, epochs),
        "breast cancer": lambda seed: classes(load_breast_cancer, seed, epochs),
        "digits": lambda seed: classes(load_digits, seed, epochs),
    }
    found = {}
    for task, scored in tasks.items():
        runs = [scored(seed) for seed in seeds]
        found[task] = {
            name: {key: float(np.mean([run[name][key] for run in runs])) for key in runs[0][name]}
            for name in ("network", *KINDS)
        }
        first, second = found[task]["network"]
        print(f"\n{task:<32}{first:>8}{second:>10}")
        for name, row in found[task].items():
            print(f"{name:<32}{row[first]:8.3f}{row[second]:10.3f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one split, few epochs")
    main(**vars(parser.parse_args()))

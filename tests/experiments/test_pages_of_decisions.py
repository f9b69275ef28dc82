"""The tables of the pages on decisions are those of the committed results, seed by seed."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def rows_of(name: str) -> dict[str, dict]:
    return json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())["rows"]


def cells(page: str, label: str, after: str = "") -> list[list[str]]:
    """The numbers of each cell of the first row of that label, after a string of the page."""
    text = (ROOT / "docs" / page).read_text()
    lines = text[text.index(after) :].splitlines()
    (line,) = [line for line in lines if re.match(rf"\|\s*{re.escape(label)}\s*\|", line)][:1]
    plain = line.replace("*", "").replace("−", "-")
    return [re.findall(r"[-+]?\d+(?:\.\d+)?", cell) for cell in plain.split("|")[2:-1]]


def assert_shown(shown: list[str], *values: float) -> None:
    """Each number is the value, rounded to as many digits as are shown."""
    assert len(shown) == len(values)
    for text, value in zip(shown, values, strict=True):
        digits = len(text.partition(".")[2])
        assert f"{value:.{digits}f}" == f"{float(text):.{digits}f}", (shown, values)


def error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


BAYESIAN = {
    "network": "network",
    "Gaussian process": "gp",
    "Gaussian process alike": "gp_alike",
    "network, log EI": "network_ei",
    "Gaussian process, log EI": "gp_ei",
    "network, Thompson": "thompson",
    "random": "random",
}


def regrets(function: str, method: str) -> list[float]:
    rows = rows_of("bayesian-optimisation")
    return [rows[f"{function}/{method}/{seed}"]["regret"][-1] for seed in range(100, 110)]


@pytest.mark.parametrize("label", BAYESIAN)
def test_regrets(label):
    shown = cells("bayesian-optimisation.md", label, "## What to expect")
    for cell, function in zip(shown, ("branin", "hartmann6", "ackley4"), strict=True):
        found = regrets(function, BAYESIAN[label])
        assert_shown(cell, statistics.fmean(found), error(found), statistics.median(found))


def test_the_network_beside_the_gaussian_process():
    less = cells("bayesian-optimisation.md", "network less Gaussian process, seed by seed")
    lower = cells("bayesian-optimisation.md", "seeds on which the network ends lower")
    for cell, seeds, function in zip(less, lower, ("branin", "hartmann6", "ackley4"), strict=True):
        pairs = zip(regrets(function, "network"), regrets(function, "gp"), strict=True)
        differences = [a - b for a, b in pairs]
        assert_shown(cell, statistics.fmean(differences), error(differences))
        assert_shown(seeds, sum(d < 0 for d in differences), 10)


LABELLING = {
    "random": "random",
    "BALD": "bald",
    "BatchBALD": "batch_bald",
    "EPIG": "epig",
    "entropy": "entropy",
    "margin": "margin",
}


@pytest.mark.parametrize("label", LABELLING)
@pytest.mark.parametrize(
    ("after", "name"), [("On scikit-learn's digits", "active-learning"), ("On MNIST", "active-learning-mnist")]
)
def test_accuracies(after, name, label):
    rows = rows_of(name)
    seeds = range(sum(key.startswith("random/") for key in rows))
    found = [rows[f"{LABELLING[label]}/{seed}"]["accuracy"][1:] for seed in seeds]  # the first labels are the same
    other = [rows[f"random/{seed}"]["accuracy"][1:] for seed in seeds]
    *means, gain, wins, span = cells("active-learning.md", label, after)
    columns = zip(*found, strict=True)
    assert_shown([number for cell in means for number in cell], *(statistics.fmean(column) for column in columns))
    if label != "random":
        pairs = zip(found, other, strict=True)
        gains = [statistics.fmean(a - b for a, b in zip(own, beside, strict=True)) for own, beside in pairs]
        assert_shown(gain, statistics.fmean(gains), error(gains))
        assert_shown(wins, sum(g > 0 for g in gains), len(seeds))
    last = [one[-1] for one in found]
    assert_shown(span, min(last), max(last))


PLAYING = {"Thompson": "thompson", "UCB, beta 2": "ucb", "greedy": "greedy", "linear Thompson": "linear"}


@pytest.mark.parametrize("label", PLAYING)
def test_regrets_of_bandits(label):
    rows = rows_of("wheel-bandit")
    found, late = ([rows[f"{PLAYING[label]}/{seed}"][key] for seed in range(20)] for key in ("regret", "last 500"))
    mean, median, worst, last, last_worst = cells("bandits.md", label)
    assert_shown(mean, statistics.fmean(found), error(found))
    assert_shown(median, statistics.median(found))
    assert_shown(worst, max(found))
    assert_shown(last, statistics.fmean(late), error(late))
    assert_shown(last_worst, max(late))

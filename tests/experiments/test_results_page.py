"""The page of results says what the committed results say: tables, figures, and the numbers in sentences."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CIFAR, MNIST, WHOLE = "uq-cifar10", "uq-mnist", "uq-cifar10-whole"
SCORES, KINDS = ("confidence", "epistemic"), ("diag", "kron", "ekfac", "block", "full")
PAPERS = ("mixture of LA paper", "mixture of LA* paper")
RIVALS = ROOT / "docs" / "ensembles-and-rivals.md"
RESULTS, PAGE = ROOT / "experiments" / "results", ROOT / "docs" / "results.md"
sys.path.append(str(ROOT))
page = pytest.importorskip("experiments.results_page")


@cache
def found(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


@cache
def table(name: str) -> dict[str, dict]:
    return page.by_method(found(name))


def q(value: float, digits: int) -> str:
    """Write a number as the page does: .05, -.32, 1.72."""
    return f"{value:.{digits}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:,.{digits}f}"


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def both(study: str, score: str = "nll") -> dict[str, list[float]]:
    """Return a score of each method on clean data, and its mean over all shifted sets."""
    values = {name: [scores[score] for scores in row["sets"].values()] for name, row in table(study).items()}
    return {name: [first, mean(others)] for name, (first, *others) in values.items()}


def span(ours: list[float], theirs: list[float]) -> str:
    """Return the range of ratios."""
    low, *_, high = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{q(low, 2)} to {q(high, 2)}"


def auroc(study: str, method: str, score: str = "confidence") -> float:
    return mean(row[score] for row in table(study)[method]["ood"].values())


def accuracy(study: str, method: str) -> float:
    return next(iter(table(study)[method]["sets"].values()))["accuracy"]


def moved(task: str, method: str, score: str = "nll", which: str = "out") -> float:
    """Return a score of `shift`, averaged over seeds and features."""
    by_task = page_shift()
    return by_task[task][method]["sets"][which][score]


@cache
def page_shift() -> dict:
    from experiments.shift.report import by_task

    return by_task(found("shift")["rows"])


def queries(method: str, score: str) -> float:
    return page_shift()["queries"][method]["ood"]["out-of-scope"][score]


@cache
def points(task: str) -> dict:
    from experiments.configurations.__main__ import by_task, references

    rows = found("configurations")["rows"]
    return by_task(rows)[task] | references(rows, task)


def cost(case: str, method: str, which: str) -> float:
    return found("cost")["rows"][case]["methods"][method][which]


def answer() -> list[str]:
    """Return what the tables at the top say."""
    c, m = both(CIFAR), both(MNIST)
    default, calibrated = (f"last_layer/kron/ggn/{how}/one_vs_rest" for how in ("auto", "calibrate"))
    fashion, films, gap = points("fmnist"), "films to products, frozen", "gaps, concrete"
    entropy = auroc(CIFAR, "LA calibrated", "entropy") - auroc(CIFAR, "temperature", "entropy")
    known = fashion[calibrated]["auroc_confidence"] - fashion["temperature"]["auroc_confidence"]
    gain = {score: fashion[default][f"auroc_{score}"] - fashion["MAP"]["auroc_confidence"] for score in SCORES}
    more = [cost(*each, "training") for each in (("resnet20", "mixture of 4 LA"), ("lenet", "mixture of LA"))]
    beside = [cost("resnet20", "ensemble of 4", "training"), cost("lenet", "DE-5", "training")]
    slower = [cost(*each, "mean") for each in (("resnet20", "mixture of 4 LA"), ("lenet", "mixture of LA"))]
    theirs = [cost("resnet20", "ensemble of 4", "mean"), cost("lenet", "DE-5", "mean")]
    rivals = [auroc(MNIST, name) - auroc(MNIST, "LA") for name in ("IVON", "VB", "MC dropout", "CSGHMC")]
    lost = {name: auroc(CIFAR, "ensemble") - auroc(CIFAR, name) for name in ("LA", "LA calibrated")}
    w = both(WHOLE)
    digits = {
        name: [scores["nll"] for scores in table(MNIST)[name]["sets"].values()] for name in ("mixture of LA", "DE-5")
    }
    worse = [a - b for a, b in zip(*digits.values(), strict=True)][1:]
    assert [value > 0 for value in worse] == [True] + 11 * [False]  # of the rotations, the first alone
    return [
        f"under every shift but one (digits rotated by 15 degrees, {q(worse[0], 4)} worse)",
        f"classifiers on unshifted data between {q(c['MAP'][0] - c['LA'][0], 2)} better",
        f"by confidence: level on CIFAR-10, MNIST and queries, {q(gain['confidence'], 2)} better on "
        "Fashion-MNIST. By the "
        f"epistemic part: {q(gain['epistemic'], 2)} better on Fashion-MNIST "
        f"({q(fashion[default]['auroc_epistemic'], 3)}), "
        f"worse on MNIST ({q(auroc(MNIST, 'LA', 'epistemic'), 3)} against {q(auroc(MNIST, 'MAP'), 3)}) and on queries "
        f"({q(queries('LA', 'epistemic'), 3)} against {q(queries('MAP', 'entropy'), 3)})",
        f"training {q(cost('resnet20', 'LA', 'training'), 3)}, prediction {q(cost('resnet20', 'LA', 'mean'), 2)} times "
        f"(ResNet-20); {q(cost('lenet', 'LA', 'training'), 2)} and {q(cost('lenet', 'LA', 'mean'), 2)} times (LeNet",
        f"{q(m['LA calibrated'][1] - m['temperature'][1], 2)} worse on rotated digits",
        f"far behind on CIFAR-10 ({q(c['LA'][1], 2)} against {q(c['temperature'][1], 2)}) and on products "
        f"({q(moved(films, 'LA'), 2)} against {q(moved(films, 'temperature'), 2)}), better on rotated digits "
        f"({q(m['LA'][1], 2)} against {q(m['temperature'][1], 2)})",
        f"calibrated: {q(entropy, 3)} better on CIFAR-10 by entropy, {q(known, 3)} on Fashion-MNIST by confidence",
        f"(CIFAR-10: {q(c['LA'][0], 3)}, calibrated {q(c['LA calibrated'][0], 3)}, ensemble {q(c['ensemble'][0], 3)})",
        f"One Laplace: {q(lost['LA'], 3)} worse, calibrated {q(lost['LA calibrated'], 3)}",
        f"mixture: {span(more, beside)} times the ensemble's training, {span(slower, theirs)} times its prediction",
        f"without validation data ({q(w['SWAG'][1], 2)} against {q(w['LA'][1], 2)}) and with it "
        f"({q(w['SWAG temperature'][1], 2)} against {q(w['LA calibrated'][1], 2)}, within noise); clean images with "
        f"it: LA calibrated ({q(w['LA calibrated'][0], 3)} against {q(w['SWAG temperature'][0], 3)})",
        f"CIFAR-10 {q(auroc(WHOLE, 'LA') - auroc(WHOLE, 'SWAG'), 3)} better, both with validation data "
        f"{q(auroc(WHOLE, 'LA calibrated') - auroc(WHOLE, 'SWAG temperature'), 3)}; MNIST "
        f"{q(auroc(MNIST, 'SWAG') - auroc(MNIST, 'LA'), 3)} worse",
        f"all four {q(min(rivals), 3)} to {q(max(rivals), 3)} better by confidence",
        f"{q(moved(gap, 'LA'), 2)} against {q(moved(gap, 'MAP'), 2)} of the network and "
        f"{q(moved(gap, 'noise scaling'), 2)} of rescaled noise (concrete)",
    ]


def of_cifar() -> list[str]:
    """Return what the page says of CIFAR-10, and of its part with the whole network."""
    c, w, e = both(CIFAR), both(WHOLE), both(CIFAR, "ece")
    scaled, known, sure = "SWAG temperature", "LA calibrated", both(WHOLE, "ece")
    mixtures = [name for name in table(CIFAR) if name.startswith("mixture")]
    ranges = {score: [auroc(CIFAR, name, score) for name in mixtures] for score in (*SCORES, "entropy")}
    spans = {
        score: f"({q(min(v), 3)} to {q(max(v), 3)} against {q(auroc(CIFAR, 'ensemble', score), 3)})"
        for score, v in ranges.items()
    }
    svhn = {score: [table(CIFAR)[name]["ood"]["svhn"][score] for name in PAPERS] for score in ("confidence", "entropy")}
    alone = {score: table(CIFAR)["ensemble"]["ood"]["svhn"][score] for score in svhn}
    ours = {name: [auroc(CIFAR, name, score) for score in SCORES] for name in ("LA calibrated", "ensemble")}
    best, stars = "mixture of LA calibrated", "mixture of LA* paper"
    return [
        f"(shifted mean {q(c['LA'][1], 3)} against {q(c['MAP'][1], 3)} nats), but far behind temperature scaling "
        f"({q(c['temperature'][1], 3)})",
        f"{q(c['LA calibrated'][1], 3)} against {q(c['temperature'][1], 3)}, and on clean images it loses "
        f"{q(c['LA calibrated'][0] - c['temperature'][0], 4)} nats",
        f"(shifted mean {q(c['LA paper'][1], 3)} against {q(c['LA'][1], 3)})",
        f"the lowest shifted NLL of a single network's posterior ({q(c['LA* paper'][1], 3)}) and the worst "
        "ECE on clean "
        f"images ({q(e['LA* paper'][0], 3)})",
        f"in accuracy ({q(accuracy(CIFAR, 'LA'), 3)} against {q(accuracy(CIFAR, 'ensemble'), 3)}), nor in AUROC "
        f"(calibrated {q(ours['LA calibrated'][0], 3)} by confidence, ensemble {q(ours['ensemble'][0], 3)}; "
        "by epistemic "
        f"{q(ours['LA calibrated'][1], 3)} and {q(ours['ensemble'][1], 3)})",
        f"by confidence {spans['confidence']}, by entropy {spans['entropy']} and by epistemic {spans['epistemic']}",
        *(
            f"by {score} ({q(svhn[score][0], 3)} and {q(svhn[score][1], 3)} against {q(alone[score], 3)})"
            for score in svhn
        ),
        f"best shifted NLL ({q(c[best][1], 3)} both; ensemble {q(c['ensemble'][1], 3)}, ensemble with a temperature "
        f"{q(c['ensemble temperature'][1], 3)}), but pay on clean images: {q(c[best][0], 3)} and {q(c[stars][0], 3)} "
        f"against {q(c['ensemble temperature'][0], 3)}, ECE {q(e[best][0], 3)} and {q(e[stars][0], 3)} against "
        f"{q(e['ensemble temperature'][0], 3)}",
        f"({q(w[scaled][1], 2)} against {q(w[known][1], 2)}, ECE {q(sure[scaled][1], 3)} against "
        f"{q(sure[known][1], 3)}), worse on clean images ({q(w[scaled][0], 3)} against {q(w[known][0], 3)}), and "
        f"worse by AUROC ({q(auroc(WHOLE, scaled), 3)} against {q(auroc(WHOLE, known), 3)})",
        f"NLL {q(w['LA all weights evidence'][0], 3)}, ECE {q(sure['LA all weights evidence'][0], 2)} on "
        f"clean images (MAP {q(w['MAP'][0], 3)})",
        f"{q(w['LA all weights'][0], 3)} on clean images (LA {q(w['LA'][0], 3)}), shifted "
        f"{q(w['LA all weights'][1], 2)} "
        f"(LA {q(w['LA'][1], 2)}, MAP {q(w['MAP'][1], 2)}), AUROC {q(auroc(WHOLE, 'LA all weights'), 3)} by "
        "confidence as "
        f"LA, {q(auroc(WHOLE, 'LA all weights', 'epistemic'), 3)} by epistemic "
        f"(LA {q(auroc(WHOLE, 'LA', 'epistemic'), 3)})",
        f"({q(w['LA all weights calibrated'][0], 3)} against {q(w['LA calibrated'][0], 3)} on clean images, shifted "
        f"{q(w['LA all weights calibrated'][1], 2)} against {q(w['LA calibrated'][1], 2)}, AUROC "
        f"{q(auroc(WHOLE, 'LA all weights calibrated'), 3)} for both)",
        f"in NLL ({q(w['SWAG'][0], 3)} against {q(w['MAP'][0], 3)}, shifted {q(w['SWAG'][1], 2)} against "
        f"{q(w['MAP'][1], 2)}), and loses accuracy ({100 * accuracy(WHOLE, 'SWAG'):.1f} against "
        f"{100 * accuracy(WHOLE, 'MAP'):.1f} %) and AUROC ({q(auroc(WHOLE, 'SWAG'), 3)} against "
        f"{q(auroc(WHOLE, 'MAP'), 3)})",
    ]


def of_mnist() -> list[str]:
    """Return what the page says of MNIST."""
    m, e = both(MNIST), both(MNIST, "ece")
    dropped, stars, mixed = (m[name] for name in ("MC dropout", "LA* paper", "mixture of LA* paper"))
    return [
        f"NLL {q(m['IVON'][0], 4)} on upright digits (LA {q(m['LA'][0], 4)}, mixture of LA "
        f"{q(m['mixture of LA'][0], 4)}), "
        f"{q(m['IVON'][1], 2)} under rotation ({q(m['LA'][1], 2)}, {q(m['mixture of LA'][1], 2)}), mean AUROC by "
        f"confidence {q(auroc(MNIST, 'IVON'), 3)} and by entropy {q(auroc(MNIST, 'IVON', 'entropy'), 3)}, the "
        "best of all "
        f"(mixture of LA {q(auroc(MNIST, 'mixture of LA'), 3)} and {q(auroc(MNIST, 'mixture of LA', 'entropy'), 3)}), "
        f"accuracy {100 * accuracy(MNIST, 'IVON'):.1f} %",
        f"under rotation ({q(e['IVON'][1], 3)} against {q(e['mixture of LA'][1], 3)}), and behind LA on upright digits "
        f"({q(e['IVON'][0], 4)} against {q(e['LA'][0], 4)})",
        f"({q(auroc(MNIST, 'IVON', 'epistemic'), 3)}; mixture of LA and DE-5 "
        f"{q(auroc(MNIST, 'mixture of LA', 'epistemic'), 3)} and {q(auroc(MNIST, 'DE-5', 'epistemic'), 3)})",
        f"by {q(m['LA'][0] - m['MAP'][0], 4)} nats ({q(m['LA'][0], 4)} against {q(m['MAP'][0], 4)}",
        f"cost {q(m['LA paper'][0] - m['MAP'][0], 3)} and {q(m['LA* paper'][0] - m['MAP'][0], 3)} nats here",
        f"temperature scaling loses {q(m['temperature'][1] - m['MAP'][1], 2)} nats to MAP",
        f"loses {q(m['LA calibrated'][1] - m['MAP'][1], 2)}. Without validation data LA gains "
        f"{q(m['MAP'][1] - m['LA'][1], 2)} nats on MAP",
        f"VB has the best NLL on upright digits ({q(m['VB'][0], 3)}), SWAG the next ({q(m['SWAG'][0], 3)})",
        f"{100 * accuracy(MNIST, 'VB'):.1f} and {100 * accuracy(MNIST, 'SWAG'):.1f} % against "
        f"{100 * accuracy(MNIST, 'MAP'):.1f}",
        f"apart worse ({q(auroc(MNIST, 'LA', 'epistemic'), 3)}) than by confidence ({q(auroc(MNIST, 'LA'), 3)})",
        f"LA* paper ({q(stars[1], 2)} nats), MC dropout ({q(dropped[1], 2)}), the mixture of LA* paper "
        f"({q(mixed[1], 2)}), against {q(m['MAP'][1], 2)} of MAP. All of them pay on upright digits (NLL "
        f"{q(min(dropped[0], stars[0], mixed[0]), 3)} to {q(max(dropped[0], stars[0], mixed[0]), 3)})",
        f"NLL {q(m['mixture of LA'][1], 2)} against {q(m['DE-5'][1], 2)} (on upright digits it loses, "
        f"{q(m['mixture of LA'][0], 4)} against {q(m['DE-5'][0], 4)}), mean AUROC by confidence "
        f"{q(auroc(MNIST, 'mixture of LA'), 4)} against {q(auroc(MNIST, 'DE-5'), 4)} (a tie), by entropy "
        f"{q(auroc(MNIST, 'mixture of LA', 'entropy'), 4)} against {q(auroc(MNIST, 'DE-5', 'entropy'), 4)}; "
        "by epistemic it "
        f"loses, {q(auroc(MNIST, 'mixture of LA', 'epistemic'), 4)} against {q(auroc(MNIST, 'DE-5', 'epistemic'), 4)}",
    ]


def of_cost() -> list[str]:
    """Return what the page says of prices."""
    lenet = {name: cost("lenet", name, "mean") for name in ("LA", "LA paper", "MAP", "LA calibrated")}
    resnet = [cost("resnet20", name, "mean") for name in ("LA", "LA calibrated", "LA paper", "LA* paper")]
    seconds = found("cost")["rows"]["lenet"]["seconds"]
    network = cost("resnet20", "MAP", "mb")
    return [
        f"training {q(cost('lenet', 'LA', 'training'), 2)} (paper 1.015), prediction {q(lenet['LA'], 2)} with "
        "the default "
        f"link, {q(lenet['LA paper'], 2)} with probit, where the network in its wrapper (MAP) has {q(lenet['MAP'], 2)}",
        f"takes {seconds['tune LA calibrated']:.0f} CPU seconds, which is another "
        f"{100 * (cost('lenet', 'LA calibrated', 'training') - cost('lenet', 'LA', 'training')):.0f} % of 5 epochs",
        f"for which the default link takes longer: {q(lenet['LA calibrated'], 2)}",
        f"dear in prediction: {cost('resnet20', 'LA all weights', 'mean'):.0f} times the ResNet-20, more than "
        "SWAG with "
        f"20 draws ({cost('resnet20', 'SWAG', 'mean'):.0f} times), and `la.tune()` takes "
        f"{found('cost')['rows']['resnet20']['seconds']['tune all weights']:.0f} CPU seconds",
        f"IVON trains for {q(cost('lenet', 'IVON', 'training'), 2)} times the network, VB for "
        f"{q(cost('lenet', 'VB', 'training'), 1)} times",
        f"training {q(cost('resnet20', 'LA', 'training'), 3)}, prediction {q(min(resnet), 2)} to "
        f"{q(max(resnet), 2)} (two "
        f"rounds), {100 * (cost('resnet20', 'LA', 'mb') / network - 1):.0f} % more memory",
        f"An ensemble costs 4 and {q(cost('resnet20', 'ensemble of 4', 'mean'), 1)} times. SWAG keeps its moments in "
        f"float64: {cost('resnet20', 'SWAG', 'mb') / network:.0f} times the network",
    ]


def of_the_rest() -> list[str]:
    """Return what the page says of structures, selection, configurations and realistic shift."""
    from experiments.structures_fmnist.__main__ import summary

    structures = summary(found("structures-fmnist")["rows"])
    level = {name: row["log_likelihood"] for name, row in structures.items()}
    alone = [row for name, row in found("structures-fmnist")["rows"].items() if name.startswith("MAP, best")]
    coolest = [q(row["softmax_temperature"], 2) for row in alone]
    area = {name: q(row["auroc"], 3) for name, row in structures.items()}
    worst, best = (f([level[name] for name in KINDS]) for f in (min, max))
    default, calibrated = (f"last_layer/kron/ggn/{how}/one_vs_rest" for how in ("auto", "calibrate"))
    c, f = points("cifar10"), points("fmnist")
    probit, every = "last_layer/kron/ggn/calibrate/probit", "all/kron/ggn/evidence/one_vs_rest"
    frozen, tuned, energy = "films to products, frozen", "films to products, fine-tuned", "gaps, energy"
    inside = {name: (moved(name, "LA", which="in"), moved(name, "MAP", which="in")) for name in (tuned, "cameras")}
    gaps = [
        f"{q(moved(f'gaps, {t}', 'LA'), d)} against {q(moved(f'gaps, {t}', 'noise scaling'), d)}"
        for t, d in (("concrete", 2), ("energy", 0), ("yacht", 2))
    ]
    return [
        f"the network alone has {q(level['MAP'], 3)}, the posteriors {q(best, 3)} to {q(worst, 3)}",
        f"on the test images themselves are {', '.join(coolest[:-1])} and {coolest[-1]}, and would gain "
        f"{q(level['MAP, best temperature'] - level['MAP'], 4)} nats",
        f"(accuracy {q(structures['kron']['accuracy'], 3)} against .90)",
        f"diag {area['diag']}, kron {area['kron']}, ekfac {area['ekfac']}, block {area['block']}, full {area['full']} "
        f"(paper: diag .832, kron .836, full .876); the network alone {area['MAP']}",
        f"NLL {q(c[calibrated]['nll'], 3)} instead of {q(c[default]['nll'], 3)} and AUROC "
        f"{q(c[calibrated]['auroc_confidence'], 3)} instead of {q(c[default]['auroc_confidence'], 3)}",
        f"({q(f[calibrated]['nll'], 4)} against {q(f[default]['nll'], 4)}, the network alone "
        f"{q(f['MAP']['nll'], 4)}) and "
        f"more AUROC: {q(f[calibrated]['auroc_confidence'], 3)} against {q(f[default]['auroc_confidence'], 3)} by "
        f"confidence, {q(f[calibrated]['auroc_epistemic'], 3)} against {q(f[default]['auroc_epistemic'], 3)} "
        "by epistemic",
        f"(Fashion-MNIST: NLL {q(f[probit]['nll'], 2)}, the network alone {q(f['MAP']['nll'], 3)}; CIFAR-10: "
        f"{q(c[probit]['nll'], 3)} and {q(c['MAP']['nll'], 3)})",
        f"AUROC {q(f[every]['auroc_confidence'], 3)} by confidence and {q(f[every]['auroc_epistemic'], 3)} by "
        "epistemic",
        f"films to products, frozen, out, {q(moved(frozen, 'LA'), 3)} nats against "
        f"{q(moved(frozen, 'MAP'), 3)} of MAP and "
        f"{q(moved(frozen, 'temperature'), 3)} of a temperature",
        f"{q(moved('cameras', 'LA'), 3)} (LA) and {q(moved('cameras', 'LA, calibrated'), 3)} (calibrated) against "
        f"{q(moved('cameras', 'MAP'), 3)} of MAP and {q(moved('cameras', 'temperature'), 3)} of a temperature",
        f"{q(moved('cameras', 'ensemble'), 3)}, their mixture {q(moved('cameras', 'mixture of LA'), 3)}",
        f"(AUROC {q(queries('LA', 'epistemic'), 3)}, entropy {q(queries('LA', 'entropy'), 3)})",
        f"By entropy the ensemble has {q(queries('ensemble', 'entropy'), 3)}, the mixture of calibrated ones "
        f"{q(queries('mixture of LA, calibrated', 'entropy'), 3)}",
        f"{q(moved(energy, 'MAP'), 0)} for MAP, {q(moved(energy, 'noise scaling'), 0)} with scaled noise, "
        f"{q(moved(energy, 'LA'), 0)} for LA, {q(moved(energy, 'ensemble'), 0)} for the ensemble and "
        f"{q(moved(energy, 'mixture of LA'), 0)} for the mixture",
        *(f"{q(a, 4)} against {q(b, 4)}" for a, b in inside.values()),
        f"(means: concrete {gaps[0]}, energy {gaps[1]}, yacht {gaps[2]})",
        f"cameras {q(moved('cameras', 'mixture of LA'), 3)} against {q(moved('cameras', 'ensemble'), 3)}, films "
        f"{q(moved(frozen, 'mixture of LA'), 3)} against {q(moved(frozen, 'ensemble'), 3)} and "
        f"{q(moved(tuned, 'mixture of LA'), 3)} against {q(moved(tuned, 'ensemble'), 3)}",
    ]


def of_rivals() -> list[str]:
    """Return what the table of the page on rivals says of prices."""
    lenet, resnet = (found("cost")["rows"][case]["methods"] for case in ("lenet", "resnet20"))
    one = sorted([lenet["LA"]["training"], resnet["LA"]["training"]])
    mixtures = [lenet["mixture of LA"]["mean"] / 5, resnet["mixture of 4 LA"]["mean"] / 4]
    both_swags = [resnet["SWAG"], lenet["SWAG"]]
    return [
        f"{q(one[0], 3)} to {q(one[1], 2)} | {q(resnet['LA']['mean'], 2)} to {q(lenet['LA']['mean'], 2)} (last layer), "
        f"{resnet['LA all weights']['mean']:.0f} (all weights)",
        f"| {q(resnet['mixture of 4 LA']['training'] / 4, 2)} K to {q(lenet['mixture of LA']['training'] / 5, 2)} K | "
        f"{q(min(mixtures), 1)} K to {q(max(mixtures), 1)} K",
        f"{q(lenet['MC dropout']['training'], 2)} | {lenet['MC dropout']['mean']:.0f} (20 masks)",
        f"{q(both_swags[0]['training'], 3)} to {q(both_swags[1]['training'], 1)} | {both_swags[0]['mean']:.0f} to "
        f"{both_swags[1]['mean']:.0f} (20 draws)",
    ]


def test_the_prices_of_rivals_are_those_of_the_results():
    text = RIVALS.read_text()
    missing = [sentence for sentence in of_rivals() if sentence not in text]
    assert not missing, "\n".join(["The page does not say:", *missing])


def test_the_sentences_of_the_page_have_the_numbers_of_the_results():
    text = re.sub(r"\s+", " ", PAGE.read_text().replace("**", ""))
    said = [*answer(), *of_cifar(), *of_mnist(), *of_cost(), *of_the_rest()]
    missing = [sentence for sentence in said if re.sub(r"\s+", " ", sentence) not in text]
    assert not missing, "\n".join(["The page does not say:", *missing])


def test_the_tables_of_the_page_are_those_of_the_results():
    assert page.written(PAGE.read_text()) == PAGE.read_text()


def test_the_figures_of_the_page_are_those_of_the_results():
    for name in page.PLACES:
        figure = RESULTS / f"{name}.png"
        if figure.exists():
            assert (page.FIGURES / f"{name.replace('-', '_')}.png").read_bytes() == figure.read_bytes(), name

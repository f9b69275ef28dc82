"""Fill the tables of docs/results.md from the results of the studies, with the paper's numbers beside them.

    python -m experiments.results_page

Each study has a place in the page, between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. A study without results is
said to be without.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.claims import verdicts
from experiments.spent import note
from experiments.spent import table as cpu_seconds
from experiments.uq.report import SPELT, markdown
from experiments.uq.scores import averaged

from experiments import paper

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
FIGURES = PAGE.parent / "figures"
STEPS = {  # what `three_steps` measures
    "share_of_path": "share of the path's variance along each axis of the plane",
    "posterior_sd_in_plane": "standard deviation of the posterior along them",
    "conditional_sd": "the same with all other directions at the mode",
    "sd_of_loss": "what the loss itself has there, by its second derivative",
    "truth_in_band_near_data": "share of the truth inside the 95 % band, near data",
    "band_in_gap_over_near_data": "width of the band in the gap over that near data",
    "log_evidence": "log evidence",
}
Beside = Mapping[str, tuple[float, ...]]


def main() -> None:
    """Write the page, and copy the figures to it."""
    for name in PLACES:
        figure = RESULTS / f"{name}.png"
        if figure.exists():
            shutil.copy(figure, _beside(name))
    PAGE.write_text(written(PAGE.read_text()))


def written(page: str) -> str:
    """Return the page with the tables of the results in their places."""
    files = {name: RESULTS / f"{name}.json" for name in PLACES}
    results = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    for name, fill in PLACES.items():
        text = fill(results[name]) if name in results else "Not measured yet."
        text = f"{note(files[name])}\n\n{text}" if name in results else text
        if (RESULTS / f"{name}.png").exists():
            text = f"![{name}](figures/{_beside(name).name})\n\n{text}"
        page = filled(page, name, text)
    studies = {name: by_method(results[name]) for name in ("uq-mnist", "uq-cifar10") if name in results}
    page = filled(page, "claims", verdicts(studies, results["cost"]["rows"] if "cost" in results else None))
    if (RESULTS / "quick.json").exists():
        page = filled(page, "spent", cpu_seconds(RESULTS))
    return page


def _beside(name: str) -> Path:
    return FIGURES / f"{name.replace('-', '_')}.png"


def filled(page: str, name: str, text: str) -> str:
    """Return the page with a text in the place of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n\n{text}\n\n{end}", page, flags=re.S)


def by_method(found: dict) -> dict[str, dict]:
    """Return the rows of each method, averaged over seeds or networks."""
    groups: dict[str, list[dict]] = {}
    for name, row in found["rows"].items():
        groups.setdefault(name.split("/")[0], []).append({"sets": row["sets"], "ood": row["ood"]})
    return {name: averaged(rows) for name, rows in groups.items()}


def shifted(table: dict[str, dict], score: str, beside: Beside, every: int = 1) -> str:
    """Return a score on every labelled set (or every second), its mean over all shifted ones, and the paper's."""
    sets = list(next(iter(table.values()))["sets"])
    lines = []
    for name, row in table.items():
        values = [row["sets"][s][score] for s in sets]
        mean, of_paper = sum(values[1:]) / len(values[1:]), " ".join(f"{v:.3f}" for v in beside.get(name, ())) or "-"
        lines.append([name, *(f"{v:.4f}" for v in values[::every]), f"{mean:.4f}", *([of_paper] if beside else [])])
    title = {"nll": "NLL", "ece": "ECE"}.get(score, score.capitalize())
    return markdown([title, *sets[::every], "mean of shifted", *(["paper"] if beside else [])], lines)


def outside(table: dict[str, dict], score: str, beside: Beside) -> str:
    """Return AUROC by a score, or the mean confidence, on unknown images, its mean over them, and the paper's."""
    sets, lines = list(next(iter(table.values()))["ood"]), []
    for name, row in table.items():
        values = [row["ood"][s].get(score) for s in sets]
        mean = "-" if None in values else f"{sum(values) / len(values):.3f}"
        of_paper = " ".join(f"{v:.3f}" for v in beside.get(name, ())) or "-"
        cells = ["-" if v is None else f"{v:.3f}" for v in values]
        lines.append([name, *cells, mean, *([of_paper] if beside else [])])
    title = "Mean confidence" if score == "mean_confidence" else f"AUROC by {score}"
    return markdown([title, *(SPELT[s] for s in sets), "mean", *(["paper"] if beside else [])], lines)


def uncertainty(table: dict[str, dict], beside: Mapping[str, Beside], every: int = 1, further: str = "") -> str:
    """Return the tables of a study of uncertainty. All but NLL and two AUROCs are folded, with what is `further`."""
    known = {
        score: shifted(table, score, beside.get(score, {}), every) for score in ("nll", "ece", "brier", "accuracy")
    }
    scores = ("confidence", "epistemic", "entropy", "mean_confidence")
    unknown = {score: outside(table, score, beside.get(score, {})) for score in scores}
    shown = [known.pop("nll"), unknown.pop("confidence"), unknown.pop("epistemic")]
    hidden = [*known.values(), *unknown.values(), *([further] if further else [])]
    names = "ECE, Brier score, accuracy, AUROC by entropy, mean confidence"
    return "\n\n".join([*shown, folded(f"{names}, CPU seconds" if further else names, *hidden)])


def folded(names: str, *texts: str) -> str:
    """Return texts that are shown when their names are clicked."""
    return "\n\n".join([f'<details markdown="1">\n<summary>{names}</summary>', *texts, "</details>"])


def cifar(found: dict) -> str:
    """Return the tables of `uq_cifar10`."""
    beside = {"nll": paper.CIFAR_C_NLL, "accuracy": paper.CIFAR_ACCURACY}
    beside |= {"confidence": paper.CIFAR_AUROC, "mean_confidence": paper.CIFAR_CONFIDENCE}
    return uncertainty(by_method(found), beside)


def why(found: dict) -> str:
    """Return the table of `uq_cifar10.why`."""
    keys = ("train", "test", "shifted", "evidence")
    precision = {name: float(name.split(", ")[0]) if ", " in name else 0.0 for name in found["rows"]}
    rows = sorted(found["rows"].items(), key=lambda item: precision[item[0]])
    lines = [[name, *(str(row.get(key, "-")) for key in keys)] for name, row in rows]
    return markdown(["prior precision, link", "NLL, training", "NLL, test", "NLL, shifted", "log evidence"], lines)


def mnist(found: dict) -> str:
    """Return the tables of `uq_mnist`."""
    beside = {"nll": paper.MNIST_NLL, "accuracy": paper.MNIST_ACCURACY}
    beside |= {"confidence": paper.MNIST_AUROC, "mean_confidence": paper.MNIST_CONFIDENCE}
    return uncertainty(by_method(found), beside, 2, spent(found))


def spent(found: dict) -> str:
    """Return the CPU seconds of each method, averaged over seeds: training, fit and tuning, all predictions."""
    groups: dict[str, list[dict]] = {}
    for name, row in found["rows"].items():
        own = {key: row[key] for key in ("train_seconds", "fit_seconds", "seconds")}
        groups.setdefault(name.split("/")[0], []).append(own)
    lines = [[name, *(f"{v:.1f}" for v in averaged(rows).values())] for name, rows in groups.items()]
    return markdown(["CPU seconds", "training", "fit and tuning", "all predictions"], lines)


def cost(found: dict) -> str:
    """Return the tables of `cost`."""
    parts = []
    for case, title in (("lenet", "LeNet, MNIST"), ("resnet20", "ResNet-20, CIFAR-10")):
        lines = []
        for name, row in found["rows"][case]["methods"].items():
            of_paper = paper.COST.get(name)
            beside = "-" if of_paper is None else " / ".join(map(str, of_paper))
            cells = [f"{row['training']:.3f}", f"{row['mean']:.2f}", f"{row['predict']:.2f}", f"{row['mb']:.2f}"]
            lines.append([name, *cells, beside])
        names = ["training", "probabilities", "predict(x)", "megabytes", "paper: training / prediction / MB"]
        parts.append(markdown([title, *names], lines))
    return "\n\n".join(parts)


def steps(found: dict) -> str:
    """Return the numbers of `three_steps`."""
    row = found["rows"]["measured"]
    return markdown(["measured", "value"], [[name, _numbers(row[key])] for key, name in STEPS.items()])


def _numbers(value: float | list[float]) -> str:
    return " and ".join(f"{v:.3g}" for v in value) if isinstance(value, list) else f"{value:.4g}"


def selection(found: dict) -> str:
    """Return the rank correlations of `selection`."""
    from experiments.selection.__main__ import table

    return table(found["rows"])


def structures(found: dict) -> str:
    """Return the table of `structures_fmnist`."""
    from experiments.structures_fmnist.__main__ import PAPER, summary

    lines, names = [], ("log_likelihood", "accuracy", "auroc", "train_seconds", "predict_seconds")
    for name, row in summary(found["rows"]).items():
        digits = (4, 4, 4, 0, 2)
        cells = [f"{row[key]:.{d}f}" if key in row else "-" for key, d in zip(names, digits, strict=True)]
        lines.append([name, *cells, " / ".join(map(str, PAPER.get(name, ("-",))))])
    titles = ["log-likelihood", "accuracy", "AUROC", "training, CPU s", "2,000 predictions, CPU s"]
    return markdown(["structure", *titles, "paper: log-likelihood / accuracy / AUROC"], lines)


def configurations(found: dict) -> str:
    """Return the Pareto fronts of `configurations`, and the medians of each component."""
    from experiments.configurations.__main__ import by_task, fronts, medians

    rows = found["rows"]
    return "\n\n".join(table for task in by_task(rows) for table in (fronts(rows, task), medians(rows, task)))


def shift(found: dict) -> str:
    """Return the tables of `shift`, one for each task."""
    from experiments.shift.report import by_task, tables

    return tables(by_task(found["rows"]))


def limits(found: dict) -> str:
    """Return the accuracies of `continual_limits`, with the paper's."""
    from experiments.continual_limits.report import table

    return table(found["rows"])


PLACES: dict[str, Callable[[dict], str]] = {
    "uq-cifar10": cifar,
    "uq-cifar10-why": why,
    "uq-cifar10-whole": cifar,
    "uq-mnist": mnist,
    "cost": cost,
    "structures-fmnist": structures,
    "three-steps": steps,
    "selection": selection,
    "configurations": configurations,
    "shift": shift,
    "continual-limits": limits,
}

if __name__ == "__main__":
    main()

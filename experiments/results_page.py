"""Fill the tables of docs/results.md from the results of the studies, with the paper's numbers beside them.

    python -m experiments.results_page

Each study has a place in the page, between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. A study without results is
said to be without.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from experiments.uq.report import markdown
from experiments.uq.scores import averaged

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results.md"
FIGURES = PAGE.parent / "figures"
PAPER_C = {  # NLL at severities 0 to 5, of a WideResNet-16-4
    "MAP": (0.178, 0.556, 0.964, 1.512, 1.890, 2.177),
    "LA paper": (0.155, 0.444, 0.772, 1.188, 1.474, 1.687),
    "LA* paper": (0.194, 0.443, 0.698, 1.014, 1.214, 1.360),
}
PAPER_CIFAR_OOD = {  # AUROC: SVHN, CIFAR-100
    "MAP": (0.918, 0.901),
    "ensemble": (0.954, 0.914),
    "LA paper": (0.920, 0.901),
    "LA* paper": (0.919, 0.902),
}
PAPER_MNIST_OOD = {  # AUROC: EMNIST, FMNIST, KMNIST
    "MAP": (0.935, 0.989, 0.970),
    "DE-5": (0.951, 0.992, 0.983),
    "VB": (0.923, 0.982, 0.970),
    "CSGHMC": (0.934, 0.977, 0.971),
    "LA paper": (0.934, 0.985, 0.966),
    "LA* paper": (0.943, 0.983, 0.966),
}
PAPER_COST = {  # training, prediction
    "MAP": (1.0, 1.0),
    "LA paper": (1.015, 1.0),
    "SWAG": (1.73, 12.9),
    "DE-5": (4.2, 2.5),
    "VB": (2.1, 4.4),
    "CSGHMC": (4.3, 5.2),
}


def main() -> None:
    """Write the page."""
    page = PAGE.read_text()
    for name, fill in PLACES.items():
        path = HERE / "results" / f"{name}.json"
        text = fill(json.loads(path.read_text())) if path.exists() else "Not measured yet."
        if path.with_suffix(".png").exists():
            shutil.copy(path.with_suffix(".png"), FIGURES / f"{name.replace('-', '_')}.png")
            text = f"![{name}](figures/{name.replace('-', '_')}.png)\n\n{text}"
        marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        page = re.sub(
            f"{marks[0]}.*{marks[1]}", lambda _, m=marks, t=text: f"{m[0]}\n\n{t}\n\n{m[1]}", page, flags=re.S
        )
    PAGE.write_text(page)


def by_method(found: dict) -> dict[str, dict]:
    """Return the rows of each method, averaged over seeds or networks."""
    groups: dict[str, list[dict]] = {}
    for name, row in found["rows"].items():
        groups.setdefault(name.split("/")[0], []).append({"sets": row["sets"], "ood": row["ood"]})
    return {name: averaged(rows) for name, rows in groups.items()}


def shifted(table: dict[str, dict], score: str, paper: dict[str, tuple[float, ...]]) -> str:
    """Return a score on every labelled set, its mean over the shifted ones, and the paper's."""
    sets = list(next(iter(table.values()))["sets"])
    lines = []
    for name, row in table.items():
        values = [row["sets"][s][score] for s in sets]
        mean = sum(values[1:]) / len(values[1:])
        beside = " ".join(f"{v:.3f}" for v in paper.get(name, ())) or "-"
        lines.append([name, *(f"{v:.4f}" for v in values), f"{mean:.4f}", *([beside] if paper else [])])
    return markdown([score.upper(), *sets, "mean of shifted", *(["paper"] if paper else [])], lines)


def outside(table: dict[str, dict], paper: dict[str, tuple[float, ...]]) -> str:
    """Return the AUROC by confidence and by epistemic, and the paper's, which is by confidence."""
    sets = list(next(iter(table.values()))["ood"])
    lines = []
    for name, row in table.items():
        cells = []
        for score in ("confidence", "entropy", "epistemic"):
            values = [row["ood"][s].get(score) for s in sets]
            cells += ["-" if v is None else f"{v:.3f}" for v in values]
        beside = " ".join(f"{v:.3f}" for v in paper.get(name, ())) or "-"
        lines.append([name, *cells, beside])
    names = [f"{s}, {score}" for score in ("confidence", "entropy", "epistemic") for s in sets]
    return markdown(["AUROC", *names, "paper, confidence"], lines)


def cifar(found: dict) -> str:
    """Return the tables of `uq_cifar10`."""
    table = by_method(found)
    parts = [shifted(table, "nll", PAPER_C), shifted(table, "ece", {}), shifted(table, "accuracy", {})]
    return "\n\n".join([*parts, outside(table, PAPER_CIFAR_OOD)])


def mnist(found: dict) -> str:
    """Return the tables of `uq_mnist`."""
    table = by_method(found)
    parts = [shifted(table, score, {}) for score in ("nll", "ece", "brier", "accuracy")]
    return "\n\n".join([*parts, outside(table, PAPER_MNIST_OOD)])


def cost(found: dict) -> str:
    """Return the table of `cost`."""
    lines = []
    for name, row in found["rows"]["costs"].items():
        paper = PAPER_COST.get(name)
        beside = "-" if paper is None else f"{paper[0]} / {paper[1]}"
        lines.append([name, *(f"{v:.2f}" for v in row.values()), beside])
    return markdown(
        ["method", "training", "probabilities", "predict(x)", "megabytes", "paper, training / prediction"], lines
    )


def steps(found: dict) -> str:
    """Return the numbers of `three_steps`."""
    return markdown(
        ["measured", "value"], [[k.replace("_", " "), str(v)] for k, v in found["rows"]["measured"].items()]
    )


def selection(found: dict) -> str:
    """Return the rank correlations of `selection`."""
    import torch
    from experiments.selection.__main__ import SETS, SUBSETS, spearman

    lines = []
    for name in SETS:
        rows = [row for key, row in found["rows"].items() if key.startswith(name)]
        score = torch.tensor([row["log_likelihood"] for row in rows])
        for subset in SUBSETS:
            evidence = torch.tensor([row[f"evidence_{subset}"] for row in rows])
            values = [spearman(evidence, score), *map(float, (score[evidence.argmax()], score.max(), score.median()))]
            lines.append([name, subset, *(f"{v:.3f}" for v in values)])
    return markdown(["set", "evidence of", "rank correlation", "chosen", "best", "median"], lines)


def configurations(found: dict) -> str:
    """Return the Pareto front of `configurations`."""
    from experiments.configurations.__main__ import PARTS, pareto

    rows = found["rows"]
    lines = [[*name.split("/"), *(f"{v:.4f}" for v in rows[name].values())] for name in pareto(rows)]
    return markdown([*PARTS, "NLL", "AUROC, confidence", "AUROC, epistemic"], lines)


def shift(found: dict) -> str:
    """Return the tables of `shift`, one for each task."""
    from experiments.shift.report import by_task, tables

    return tables(by_task(found["rows"]))


def limits(found: dict) -> str:
    """Return the accuracies of `continual_limits`, with the paper's."""
    from experiments.continual_limits.report import by_variant, table

    return table(by_variant(found["rows"]))


PLACES: dict[str, Callable[[dict], str]] = {
    "uq-cifar10": cifar,
    "uq-mnist": mnist,
    "cost": cost,
    "three-steps": steps,
    "selection": selection,
    "configurations": configurations,
    "shift": shift,
    "continual-limits": limits,
}

if __name__ == "__main__":
    main()

"""Results as tables of plain text and Markdown."""

from __future__ import annotations

Table = dict[str, dict]
SPELT = {  # sets of unknown images
    "emnist": "NIST digits",
    "fmnist": "Fashion-MNIST",
    "kmnist": "Kuzushiji-MNIST",
    "svhn": "SVHN",
    "cifar100": "CIFAR-100",
}


def text(table: Table) -> str:
    """Return all scores as Markdown: labelled sets first, then unknown inputs."""
    first = next(iter(table.values()))
    parts = []
    for score, digits in (("nll", 4), ("ece", 4), ("brier", 4), ("accuracy", 4)):
        lines = [[name, *(f"{row['sets'][s][score]:.{digits}f}" for s in first["sets"])] for name, row in table.items()]
        parts.append(markdown([score, *first["sets"]], lines))
    for score in ("mean_confidence", "confidence", "entropy", "epistemic"):
        title = score if score == "mean_confidence" else f"AUROC by {score}"
        rows = [(name, [row["ood"][s].get(score) for s in first["ood"]]) for name, row in table.items()]
        lines = [[name, *("-" if v is None else f"{v:.4f}" for v in values), _mean(values)] for name, values in rows]
        parts.append(markdown([title, *first["ood"], "mean"], lines))
    return "\n\n".join(parts)


def markdown(names: list[str], lines: list[list[str]]) -> str:
    """Return a table."""
    rule = ["---"] * len(names)
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, rule, *lines])


def _mean(values: list) -> str:
    return "-" if any(v is None for v in values) else f"{sum(values) / len(values):.4f}"

"""Results as a table: the accuracy over all tasks seen, after each task."""

from __future__ import annotations

from experiments.uq.report import markdown

PAPER = [0.9773, 0.9755, 0.9744, 0.9731, 0.9717, 0.9703, 0.9689, 0.9670, 0.9653, 0.9600]  # Daxberger et al. 2021


Found = dict[tuple[int, str], list[float]]  # (images of each task, variant) -> accuracy after each task


def by_variant(rows: dict[str, dict]) -> Found:
    """Return the mean accuracy over the tasks seen, after each task, averaged over seeds."""
    groups: dict[tuple[int, str], dict[int, list[float]]] = {}
    for key, row in rows.items():
        examples, name, _, seen = key.split("/")
        groups.setdefault((int(examples), name), {}).setdefault(int(seen), []).append(row["mean"])
    return {name: [sum(found[t]) / len(found[t]) for t in sorted(found)] for name, found in groups.items()}


def table(found: Found) -> str:
    """Return the accuracies as Markdown, the paper's beside them."""
    rows = {**found, (60_000, "paper, kron, 100 epochs"): PAPER}
    longest = max(map(len, rows.values()))
    lines = [
        [f"{examples:,}", name, *(f"{value:.4f}" for value in means), *["-"] * (longest - len(means))]
        for (examples, name), means in rows.items()
    ]
    return markdown(["images a task", "tasks seen", *map(str, range(1, longest + 1))], lines)

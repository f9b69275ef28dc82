"""Results as a table: the accuracy over all tasks seen, after each task."""

from __future__ import annotations

from experiments.uq.report import markdown

PAPER = [0.9773, 0.9755, 0.9744, 0.9731, 0.9717, 0.9703, 0.9689, 0.9670, 0.9653, 0.9600]  # Daxberger et al. 2021
Found = dict[tuple[int, str], list[float]]  # (images of each task, variant) -> accuracy after each task


def by_variant(rows: dict[str, dict]) -> Found:
    """Return the mean accuracy over the tasks seen, after each task, averaged over seeds."""
    return {name: [sum(each) / len(each) for each in found] for name, found in _by_seed(rows).items()}


def table(rows: dict[str, dict]) -> str:
    """Return the accuracies as Markdown, the paper's beside them, and how each seed differs from `kron` at the end."""
    found, each = by_variant(rows), _by_seed(rows)
    longest = max(len(means) for means in (*found.values(), PAPER))
    lines = []
    for (examples, name), means in [*found.items(), ((60_000, "paper, kron, 100 epochs"), PAPER)]:
        seeds, beside = each.get((examples, name), []), each.get((examples, "kron"), [])
        last = len(means) - 1
        pairs = zip(seeds[last], beside[last], strict=False) if seeds and name != "kron" and last < len(beside) else ()
        apart = ", ".join(f"{one - other:+.4f}" for one, other in pairs) or "-"
        cells = [*(f"{value:.4f}" for value in means), *["-"] * (longest - len(means))]
        lines.append([f"{examples:,}", name, str(len(seeds[0])) if seeds else "-", *cells, apart])
    names = [
        "images a task",
        "tasks seen",
        "seeds",
        *map(str, range(1, longest + 1)),
        "last one less kron's, each seed",
    ]
    return markdown(names, lines)


def _by_seed(rows: dict[str, dict]) -> dict[tuple[int, str], list[list[float]]]:
    """Return for each variant and each number of tasks seen the accuracy of every seed, in the order of the seeds."""
    groups: dict[tuple[int, str], dict[int, dict[int, float]]] = {}
    for key, row in rows.items():
        examples, name, seed, seen = key.split("/")
        groups.setdefault((int(examples), name), {}).setdefault(int(seen), {})[int(seed)] = row["mean"]
    return {
        name: [[found[seen][seed] for seed in sorted(found[seen])] for seen in sorted(found)]
        for name, found in groups.items()
    }

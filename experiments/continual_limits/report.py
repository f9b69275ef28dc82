"""Results as a table: the accuracy over all tasks seen, after each task."""

from __future__ import annotations

from experiments.uq.report import markdown

PAPER = [0.9773, 0.9755, 0.9744, 0.9731, 0.9717, 0.9703, 0.9689, 0.9670, 0.9653, 0.9600]  # Daxberger et al. 2021
Found = dict[tuple[int, str], list[float]]  # (images of each task, variant) -> accuracy after each task


def by_variant(rows: dict[str, dict]) -> Found:
    """Return the mean accuracy over the tasks seen, after each task.

    It is averaged over the seeds that all variants of that size have, because seeds differ, too.
    """
    found, seeds = _by_seed(rows), dict[int, set[int]]()
    for (examples, _), each in found.items():
        seeds[examples] = seeds.get(examples, set(each[0])) & set(each[0])
    return {
        name: [
            sum(values[s] for s in shared) / len(shared) for values in each if (shared := seeds[name[0]] & set(values))
        ]
        for name, each in found.items()
    }


def table(rows: dict[str, dict]) -> str:
    """Return the accuracies as Markdown, the paper's beside them, and how each seed differs from `kron` at the end."""
    found, each = by_variant(rows), _by_seed(rows)
    longest = max(len(means) for means in (*found.values(), PAPER))
    lines = []
    for (examples, name), means in [*found.items(), ((60_000, "paper, kron, 100 epochs"), PAPER)]:
        own, beside, last = each.get((examples, name), []), each.get((examples, "kron"), []), len(means) - 1
        apart = []
        if own and name != "kron" and last < len(beside):
            apart = [f"{own[last][s] - beside[last][s]:+.4f}" for s in sorted(set(own[last]) & set(beside[last]))]
        cells = [*(f"{value:.4f}" for value in means), *["-"] * (longest - len(means))]
        lines.append([f"{examples:,}", name, *cells, ", ".join(apart) or "-"])
    names = ["images a task", "tasks seen", *map(str, range(1, longest + 1)), "last one less kron's, in each seed"]
    return markdown(names, lines)


def _by_seed(rows: dict[str, dict]) -> dict[tuple[int, str], list[dict[int, float]]]:
    """Return for each variant, after each task, the mean accuracy over the tasks seen of every seed."""
    groups: dict[tuple[int, str], dict[int, dict[int, float]]] = {}
    for key, row in rows.items():
        examples, name, seed, seen = key.split("/")
        groups.setdefault((int(examples), name), {}).setdefault(int(seen), {})[int(seed)] = row["mean"]
    return {name: [found[seen] for seen in sorted(found)] for name, found in groups.items()}

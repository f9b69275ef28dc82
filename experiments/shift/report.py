"""Results as tables, one for each task: every method inside and outside of the training distribution."""

from __future__ import annotations

from experiments.uq.report import markdown
from experiments.uq.scores import averaged

Found = dict[str, dict[str, dict]]  # task -> method -> scores, averaged over seeds and features
COLUMNS = {
    "nll": "NLL",
    "median_nll": "median NLL",
    "ece": "ECE",
    "calibration_error": "calibration error",
    "accuracy": "accuracy",
}
COLUMNS |= {"rmse": "RMSE", "coverage_90": "90 % intervals hold"}


def by_task(rows: dict[str, dict]) -> Found:
    """Return the scores of each method on each task, from rows 'task/seed' of all methods."""
    groups: dict[str, dict[str, list[dict]]] = {}
    for key, methods in rows.items():
        for name, row in methods.items():
            kept = {"sets": row["sets"], "ood": row["ood"]}
            groups.setdefault(key.split("/")[0], {}).setdefault(name, []).append(kept)
    return {task: {name: averaged(each) for name, each in table.items()} for task, table in groups.items()}


def tables(found: Found) -> str:
    """Return all tables as Markdown."""
    return "\n\n".join(f"**{task[0].upper()}{task[1:]}**\n\n{_table(methods)}" for task, methods in found.items())


def _table(methods: dict[str, dict]) -> str:
    first = next(iter(methods.values()))
    sets = first["sets"]
    kept = [score for score in COLUMNS if score in next(iter(sets.values()))]
    names = [f"{COLUMNS[score]}, {which}" for score in kept for which in sets]
    unknown = [(which, score) for which in first["ood"] for score in ("confidence", "entropy", "epistemic")]
    names += [f"AUROC {which} by {score}" for which, score in unknown]
    lines = []
    for name, row in methods.items():
        values = [row["sets"][which][score] for score in kept for which in sets]
        values += [row["ood"][which].get(score) for which, score in unknown]
        lines.append([name, *("-" if value is None else f"{value:.3f}" for value in values)])
    return markdown(["", *names], lines)

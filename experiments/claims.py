"""Does Laplace hold what is expected of it? Each claim with the numbers that decide it."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.uq.report import markdown

from experiments import paper

Table = dict[str, dict]


def verdicts(tables: dict[str, Table], costs: dict | None) -> str:
    """Return a table of claims; `tables` are the scores of each study by method."""
    lines = []
    for study, table in tables.items():
        lines += [[study, *line] for line in (*_as_good_as_map(table), *_as_good_as_temperature(table))]
        lines += [[study, *line] for line in _mixture(table)]
    if costs is not None:
        lines += [["cost", *line] for line in _cost(costs)]
    return markdown(["study", "claim", "holds", "by how much"], lines)


def _as_good_as_map(table: Table) -> Iterator[list[str]]:
    sets = list(table["MAP"]["sets"])
    for name in ("LA", "LA calibrated"):
        worse = {s: table[name]["sets"][s]["nll"] - table["MAP"]["sets"][s]["nll"] for s in sets}
        lost = {s: v for s, v in worse.items() if v > 0}
        gains = [-v for s, v in worse.items() if s != sets[0]]
        known = f"{sets[0]} {-worse[sets[0]]:+.4f}, mean of shifted {sum(gains) / len(gains):+.3f} nats gained"
        where = f"; loses on {len(lost)} of {len(sets)}, most on {max(lost, key=lost.get)}" if lost else ""
        most = f" ({max(lost.values()):.4f})" if lost else ""
        claim = f"{name} is at least as good as MAP in NLL on every set"
        yield [claim, "no" if lost else "yes", known + where + most]


def _as_good_as_temperature(table: Table) -> Iterator[list[str]]:
    for name in ("LA", "LA calibrated"):
        ours, theirs = (_mean_shifted(table[key]) for key in (name, "temperature"))
        claim = f"{name} is at least as good as temperature scaling in NLL, mean of shifted sets"
        yield [claim, "yes" if ours <= theirs else "no", f"{ours:.3f} against {theirs:.3f} nats"]


def _mixture(table: Table) -> Iterator[list[str]]:
    ensemble = next(name for name in table if name == "ensemble" or (name.startswith("DE-") and " " not in name))
    for score in ("confidence", "entropy", "epistemic"):
        ours, theirs = (_mean_auroc(table[key], score) for key in ("mixture of LA", ensemble))
        claim = f"the mixture of LA beats the ensemble in mean AUROC by {score}"
        yield [claim, "yes" if ours > theirs else "no", f"{ours:.4f} against {theirs:.4f}"]


def _cost(costs: dict) -> Iterator[list[str]]:
    for case, found in costs.items():
        for name in ("LA", "LA paper"):
            row, (training, prediction, _) = found["methods"][name], paper.COST["LA paper"]
            holds = row["training"] <= training and row["mean"] <= prediction
            numbers = f"training {row['training']:.3f} ({training}), prediction {row['mean']:.2f} ({prediction})"
            yield [f"{name} costs no more than in the paper ({case})", "yes" if holds else "no", numbers]


def _mean_shifted(row: dict) -> float:
    values = [scores["nll"] for scores in list(row["sets"].values())[1:]]
    return sum(values) / len(values)


def _mean_auroc(row: dict, score: str) -> float:
    values = [scores[score] for scores in row["ood"].values()]
    return sum(values) / len(values)

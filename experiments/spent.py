"""What the studies take: the CPU seconds of whole runs, from the results themselves, beside those with --quick."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.uq.report import markdown

STUDIES = {  # the files of each study, and how often it is repeated in them
    "uq_cifar10": {"uq-cifar10": "4 networks", "uq-cifar10-whole": "1 network", "uq-cifar10-why": "1 network"},
    "uq_mnist": {"uq-mnist": "3 seeds"},
    "cost": {"cost": "2 or 3 rounds"},
    "structures_fmnist": {"structures-fmnist": "3 seeds"},
    "three_steps": {"three-steps": "1 seed"},
    "selection": {"selection": "3 splits"},
    "configurations": {"configurations": "3 seeds"},
    "shift": {"shift": "3 seeds"},
    "continual": {"continual": "1 seed"},
    "continual_limits": {"continual-limits": "1 or 2 seeds"},
}


def note(file: Path) -> str:
    """Return a line for the results of a file: how often, on what, and how long."""
    often = next(files[file.stem] for files in STUDIES.values() if file.stem in files)
    machine = json.loads(file.read_text())["machine"].replace("_", "-")
    took = seconds(file)
    return f"{often}; {machine}{'' if took is None else f'; {took:,.0f} CPU seconds'}."


def table(folder: Path) -> str:
    """Return the CPU seconds of each study: of the whole one, and of the one with --quick."""
    quick = json.loads((folder / "quick.json").read_text())["cpu_seconds"]
    lines, total = [], 0.0
    for name, files in STUDIES.items():
        known = [took for file in files if (took := seconds(folder / f"{file}.json")) is not None]
        whole = f"{sum(known):,.0f}" if len(known) == len(files) else "not recorded"
        lines.append([name, next(iter(files.values())), whole, f"{quick[name]:.0f}"])
        total += sum(known)
    lines.append(["all", "", f"{total:,.0f}", f"{sum(quick[name] for name in STUDIES):.0f}"])
    return markdown(["study", "repeated", "CPU seconds", "CPU seconds with --quick"], lines)


def seconds(file: Path) -> float | None:
    """Return the CPU seconds of a study: those of its runs, or else the sum of what its rows took, if they say so."""
    found = json.loads(file.read_text())
    if "cpu_seconds" in found:
        return found["cpu_seconds"]
    if "methods" in found:  # of `continual`
        return sum(row["cpu_seconds"] for rows in found["methods"].values() for row in rows)
    rows = found["rows"]
    if any(name.startswith("DE-") for name in rows):
        return _of_mnist(rows)
    if all(isinstance(row.get("seconds"), float) for row in rows.values()):
        return sum(row["seconds"] + row.get("fit_seconds", 0.0) for row in rows.values())
    return None


def _of_mnist(rows: dict[str, dict]) -> float:
    """Return the sum over seeds: the ensemble's networks, the rivals' own training, every fit and every prediction.

    A mixture's fits are those of all its members. SWAG and VB begin at a network of the ensemble, which counts once.
    """
    total = 0.0
    for name, row in rows.items():
        method, seed = name.split("/")
        total += row["seconds"]
        if method.startswith(("DE-", "mixture")):
            total += row["fit_seconds"]
        if method in ("mixture of LA", "MC dropout", "IVON", "CSGHMC"):
            total += row["train_seconds"]
        elif method in ("SWAG", "VB"):
            total += row["train_seconds"] - rows[f"MAP/{seed}"]["train_seconds"]
    return total

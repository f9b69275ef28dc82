"""Structure x curvature x tuning x link on CIFAR-10 features: NLL against how well unknown images are told apart.

    python -m experiments.configurations --data DIR [--quick] [--cache DIR]

DIR is that of `uq_cifar10`, whose features are used where the cache has them. The figure is the paper's Figure 3: one
point for each configuration of the last layer of a ResNet-20, coloured by each component in turn. Named is the Pareto
front: the configurations that no other one beats in both.
"""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path

import torch
from experiments.uq.cache import Cache
from experiments.uq.methods import BATCH, Method
from experiments.uq.report import markdown
from experiments.uq.scores import scores
from experiments.uq.start import Rows, started
from experiments.uq_cifar10.data import Images, read
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from laplace import Laplace

STRUCTURES, CURVATURES = ("kron", "full", "diag"), ("ggn", "ef")
TUNINGS, LINKS = ("evidence", "auto", "calibrate"), ("probit", "one_vs_rest", "mc", "bridge")
PARTS = {"structure": STRUCTURES, "curvature": CURVATURES, "tuning": TUNINGS, "link": LINKS}
TEST, OUTSIDE = 4000, 1000
COLOURS = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a")


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("configurations", __doc__.splitlines()[0], arguments)
    shared = Cache(study.cache.folder.parent / ("uq_cifar10-quick" if study.quick else "uq_cifar10"))
    images = read(study.folder, shared, 400 if study.quick else None)
    rows = Rows(study.results, {"images": 400 if study.quick else None, "test": TEST, "outside": OUTSIDE})
    for structure, curvature, tuning in product(STRUCTURES, CURVATURES, TUNINGS):
        names = {link: f"{structure}/{curvature}/{tuning}/{link}" for link in LINKS}
        if all(name in rows.rows for name in names.values()):
            continue
        la = tuned(images, structure, curvature, tuning)
        for link, name in names.items():
            rows.get(name, lambda link=link, la=la: point(images, Method("", la, link)))
    front = pareto(rows.rows)
    lines = [[*name.split("/"), *(f"{v:.4f}" for v in rows.rows[name].values())] for name in front]
    print(markdown([*PARTS, "NLL", "AUROC, confidence", "AUROC, epistemic"], lines))
    draw(rows.rows, front, study.results.with_suffix(".png"))


def tuned(images: Images, structure: str, curvature: str, tuning: str) -> Laplace:
    """Return a fitted posterior of the first network's last layer."""
    x, y = images.train
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    la = Laplace(images.networks[0], "classification", "last_layer", structure, curvature=curvature).fit(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if tuning == "calibrate":
            la.calibrate(images.validation)
        else:
            la.tune("prior_precision", method=tuning)
    return la


def point(images: Images, method: Method) -> dict:
    """Return where a configuration lies."""
    known = {"c0": tuple(t[:TEST] for t in images.labelled["c0"])}
    unknown: dict[str, Tensor] = {name: x[:OUTSIDE] for name, x in images.outside.items()}
    found = scores(method, known, unknown, "c0")
    apart = found["ood"].values()
    means = {score: sum(one[score] for one in apart) / len(apart) for score in ("confidence", "epistemic")}
    return {"nll": found["sets"]["c0"]["nll"]} | {f"auroc_{score}": round(value, 5) for score, value in means.items()}


def pareto(points: dict[str, dict]) -> list[str]:
    """Return the names of points that no other one beats in NLL and AUROC, by NLL."""
    found, best = [], -1.0
    for name, row in sorted(points.items(), key=lambda item: (item[1]["nll"], -item[1]["auroc_confidence"])):
        if row["auroc_confidence"] > best:
            found.append(name)
            best = row["auroc_confidence"]
    return found


def draw(points: dict[str, dict], front: list[str], file: Path) -> None:
    """Write the figure: the same points, coloured by each component."""
    fig = Figure(figsize=(14, 3.4), layout="constrained")
    FigureCanvasAgg(fig)
    panels = fig.subplots(1, len(PARTS), sharey=True)
    for i, (axes, (part, values)) in enumerate(zip(panels, PARTS.items(), strict=True)):
        for value, colour in zip(values, COLOURS, strict=False):
            own = [row for name, row in points.items() if name.split("/")[i] == value]
            xy = [[row[key] for row in own] for key in ("nll", "auroc_confidence")]
            axes.plot(*xy, "o", ms=4, color=colour, label=value)
        xy = [[points[name][key] for name in front] for key in ("nll", "auroc_confidence")]
        axes.step(*xy, where="post", color="#999999", lw=0.8, zorder=0)
        axes.set(title=part, xlabel="NLL, test images")
        axes.set_xscale("log")
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("AUROC, unknown images, by confidence")
    fig.savefig(file, dpi=150)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

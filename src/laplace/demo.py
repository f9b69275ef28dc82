"""`laplace demo`: a classifier and a regressor, each before and after its last layer is made Bayesian.

The classifier learns scikit-learn's digits twice: as they are, where the network is nearly calibrated already, and with
pixel noise, which it overfits and becomes overconfident on. Beside it stands temperature scaling, the baseline that a
posterior has to beat. The regressor has all its weights uncertain: doubt about the last layer alone is only as good as
its features, and past the data's end it held 11 and 17 % of the points in its 95 % interval, where all weights held 52
and 89 %.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace, report
from laplace import evaluation as metrics
from laplace.evaluation import Report, plots

Loss = Callable[[Tensor, Tensor], Tensor]

LEFT_OUT = (8, 9)
PARTS = (700, 200)  # images to train on and to validate with
METHODS = ("network", "scaled", ".tune()", ".calibrate()")
SIGMA = 0.1


@dataclass(frozen=True)
class Settings:
    """Holds the settings of a run; the defaults are those of the command line."""

    seed: int = 0
    noise: float = 0.5
    epochs: int = 40
    regression_epochs: int = 1500


@dataclass(frozen=True)
class Digits:
    """Holds 8x8 images of the digits 0 to 7 in three parts, and separately those of 8 and 9."""

    x_train: Tensor  # (N, 1, 8, 8)
    y_train: Tensor  # (N,)
    x_val: Tensor
    y_val: Tensor
    x_test: Tensor
    y_test: Tensor
    unknown: dict[str, Tensor]  # images of other kinds, (L, 1, 8, 8)


def missing_packages() -> list[str]:
    """Return the packages of the extra `demo` that are not installed."""
    packages = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}
    return [package for module, package in packages.items() if find_spec(module) is None]


def run(out: Path, settings: Settings) -> None:
    """Run the demo on one thread: print the results, and save two figures and two reports in the directory `out`."""
    start = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            files = [*_classification(out, settings), *_regression(out, settings)]
    finally:
        torch.set_num_threads(threads)
    print("FIGURES AND REPORTS: open the .html files in a browser")
    for file in files:
        print(f"  {file}")
    print(f"\nDone in {time.perf_counter() - start:.1f} s on one CPU thread (seed {settings.seed}).")


def _classification(out: Path, settings: Settings) -> list[Path]:
    print("CLASSIFICATION: is the network as sure as it should be?\n")
    levels = sorted({0.0, settings.noise})
    sizes = ", ".join(f"{count} to {purpose}" for count, purpose in zip(PARTS, ("train on", "validate"), strict=True))
    print(f"  Data      8x8 digits 0 to 7: {sizes}, the others to test. Two kinds of images are unknown,")
    print("            so that every answer is wrong: the digits 8 and 9, and patches of photographs.")
    print(f"  Network   a convnet of {_size(_convnet())} weights, trained once for each level of noise.")
    print("  scaled    the network with one temperature, found on the validation images.")
    print(f"  Laplace   a Gaussian over the {_size(_convnet()[-1])} weights of its last layer:")
    print("  .tune()       the prior without validation data,")
    print("  .calibrate()  prior and softmax temperature on the validation images.\n")
    print(f"  {'':29}" + "".join(f"{name:>14}" for name in METHODS) + "    best value: *")
    diagrams, title, said = {}, "", None
    for noise in levels:
        title = f"with pixel noise of sd {noise:g}" if noise else "clean images"
        digits = _load_digits(settings, noise)
        found, seconds, la = _compared(digits, settings)
        said = _report_digits(la, digits, out / "digits.html", f"Digits, {title}: how far can the network be trusted?")
        _print_table(title, found)
        print(f"    Fit and tuning of Laplace took {seconds[1]:.2f} s, training {seconds[0]:.1f} s.\n")
        diagrams = {name: metrics.reliability(one.inside, one.labels) for name, one in found.items()}
    print("  Validation data calibrates, by a temperature or by la.calibrate(). A network that is calibrated to begin")
    print("  with has nothing to gain, and la.tune() leaves it as it is. Which score finds unknown images depends on")
    print("  their kind and on the weights that are uncertain: docs/out-of-distribution.md.\n")
    path = out / "reliability.png"
    plots.reliability_diagram(diagrams, title=f"Is the confidence earned? Test digits {title}").savefig(path)
    _print_report(said)
    return [path, out / "digits.html"]


def _report_digits(la: Laplace, digits: Digits, path: Path, title: str) -> Report:
    val_loader = DataLoader(TensorDataset(digits.x_val, digits.y_val), batch_size=64)
    names = [str(digit) for digit in range(10) if digit not in LEFT_OUT]
    test = (digits.x_test, digits.y_test)
    return report(la, test, digits.unknown, val_loader, out=path, class_names=names, title=title)


def _print_report(found: Report | None) -> None:
    if found is not None:
        print(f"  The report says: {found.headline}")
        for verdict in found.verdicts:
            for i, line in enumerate(wrap(verdict.text, 92)):
                print(f"    {'- ' if i == 0 else '  '}{line}")
        print()


@dataclass(frozen=True)
class Scored:
    """Holds the scores of one method on the test images, and how well it separates them from unknown images (AUROC)."""

    inside: Tensor  # (M, C) probabilities
    labels: Tensor  # (M,)
    by_confidence: dict[str, float]
    by_epistemic: dict[str, float]


def _compared(digits: Digits, settings: Settings) -> tuple[dict[str, Scored], tuple[float, float], Laplace]:
    """Return what every method predicts, the seconds of training and of Laplace, and the calibrated posterior."""
    loader = DataLoader(TensorDataset(digits.x_train, digits.y_train), batch_size=64, shuffle=True)
    val_loader = DataLoader(TensorDataset(digits.x_val, digits.y_val), batch_size=64)
    model = _convnet()
    training = _train(model, loader, nn.functional.cross_entropy, settings.epochs, lr=3e-3, weight_decay=1e-3)
    with torch.no_grad():
        val, test = model(digits.x_val), model(digits.x_test)
        unknown = {name: model(x) for name, x in digits.unknown.items()}
    grid = torch.logspace(-1, 1.5, 200).tolist()
    best = min(grid, key=lambda t: float(nn.functional.cross_entropy(val / t, digits.y_val)))
    found = {}
    for name, t in zip(METHODS, (1.0, best), strict=False):
        p, sure = (test / t).softmax(-1), {kind: (f / t).softmax(-1).amax(-1) for kind, f in unknown.items()}
        found[name] = Scored(p, digits.y_test, {k: metrics.auroc(-p.amax(-1), -q) for k, q in sure.items()}, {})
    start = time.perf_counter()
    la = Laplace(model, "classification").fit(loader)
    la.tune()
    seconds = time.perf_counter() - start
    found[METHODS[2]] = _scored(la, digits)
    la = Laplace(model, "classification").fit(loader)
    la.calibrate(val_loader)
    found[METHODS[3]] = _scored(la, digits)
    return found, (training, seconds), la


def _scored(la: Laplace, digits: Digits) -> Scored:
    inside, outside = la.predict(digits.x_test), {kind: la.predict(x) for kind, x in digits.unknown.items()}
    sure, doubt = inside.mean.amax(-1), inside.epistemic
    by_confidence = {kind: metrics.auroc(-sure, -found.mean.amax(-1)) for kind, found in outside.items()}
    by_epistemic = {kind: metrics.auroc(doubt, found.epistemic) for kind, found in outside.items()}
    return Scored(inside.mean, digits.y_test, by_confidence, by_epistemic)


def _print_table(title: str, found: dict[str, Scored]) -> None:
    rows: list[tuple[str, Callable[[Scored], float | None], bool]] = [
        ("accuracy", lambda s: metrics.accuracy(s.inside, s.labels), True),
        ("NLL", lambda s: metrics.nll(s.inside, s.labels), False),
        ("ECE", lambda s: metrics.ece(s.inside, s.labels), False),
        ("Brier", lambda s: metrics.brier(s.inside, s.labels), False),
        ("AUROC of 8, 9: confidence", lambda s: s.by_confidence["8, 9"], True),
        ("AUROC of 8, 9: epistemic", lambda s: s.by_epistemic.get("8, 9"), True),
        ("AUROC of photos: confidence", lambda s: s.by_confidence["photos"], True),
        ("AUROC of photos: epistemic", lambda s: s.by_epistemic.get("photos"), True),
    ]
    print(f"  {title}")
    for name, score, higher_is_better in rows:
        values = [None if value is None else round(value, 3) for value in map(score, found.values())]
        known = [value for value in values if value is not None]
        best = max(known) if higher_is_better else min(known)
        cells = ["-" if value is None else f"{value:.3f}{'*' if value == best else ' '}" for value in values]
        print(f"    {name:27}" + "".join(f"{cell:>14}" for cell in cells))


def _regression(out: Path, settings: Settings) -> list[Path]:
    print("REGRESSION: does the network know where it has seen nothing?\n")
    x = torch.cat([_uniform(60, -3, -1), _uniform(60, 1, 3)])
    y = _observe(x)
    print(f"  Data     y = sin(2x) + x/2 + noise of sd {SIGMA}: {len(x)} points in [-3, -1] and [1, 3], none between.")
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    # Prior precision 1 and noise sigma mean a weight decay of 2 sigma^2 / N on the mean squared error.
    decay = 2 * SIGMA**2 / len(x)
    seconds = _train(model, loader, nn.functional.mse_loss, settings.regression_epochs, lr=1e-2, weight_decay=decay)
    print(f"  MAP      a tanh network of {_size(model)} weights, {seconds:.1f} s.")

    la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full")
    la.fit(loader)
    la.tune("prior_precision", "sigma_noise", method="evidence")
    sigma = float(la.sigma_noise)
    print(f"  Laplace  a Gaussian over all of them; noise of sd {sigma:.3f} found by maximising the evidence.\n")

    grid = torch.linspace(-3.5, 3.5, 351)
    mean, covariance = la(grid.unsqueeze(-1))
    sd = covariance.flatten().sqrt()
    seen = (grid.abs() >= 1) & (grid.abs() <= 3)
    print(f"  Its own doubt about the curve, as a sd: {sd[seen].mean():.2f} where there is data (on average),")
    print(f"  {sd[grid.abs() < 1].max():.2f} in the gap (at most). Share of new points that its 95 % interval holds:")
    print(f"    in the gap, |x| < 1        {_compare_intervals(model, la, _uniform(2000, -1, 1))}")
    print(f"    past the end, 3 < x < 3.5  {_compare_intervals(model, la, _uniform(2000, 3, 3.5))}")
    print(f"  {_truth_inside(grid, mean.flatten(), sd)}\n")
    path = out / "regression.png"
    title = "What the network does not know, and what is noise"
    plots.regression_band(grid, mean, sd, sigma, data=(x, y), truth=_curve(grid), title=title).savefig(path)
    test = torch.cat([_uniform(300, -3, -1), _uniform(300, 1, 3)])
    elsewhere = {"the gap": _uniform(300, -1, 1), "past the end": _uniform(300, 3, 3.5)}
    title = "A curve with a gap: how far can the network be trusted?"
    _print_report(report(la, (test, _observe(test)), elsewhere, out=out / "curve.html", title=title))
    return [path, out / "curve.html"]


def _truth_inside(grid: Tensor, mean: Tensor, sd: Tensor) -> str:  # (N,), (N,), (N,)
    """Say on which share of the axis the true curve lies inside two epistemic sd, and why not on all of it."""
    distance = (_curve(grid) - mean).abs() / sd
    share, worst = 100 * float((distance <= 2).double().mean()), float(grid[distance.argmax()])
    inside = f"In the figure, the truth lies in the inner band (mean +- 2 sd) on {share:.0f} % of the axis"
    if share == 100:
        return f"{inside}."
    return (
        f"{inside}; it is furthest out at x = {worst:.1f}.\n  Two sd leave out 5 % anyway; and where the band is "
        "narrow, a smooth network may be off by more than that."
    )


def _compare_intervals(model: nn.Module, la: Laplace, x: Tensor) -> str:
    y = _observe(x)
    with torch.no_grad():
        mean = model(x)
    alone = metrics.interval_coverage(mean - 1.96 * SIGMA, mean + 1.96 * SIGMA, y)
    lower, upper = la.predict(x).interval(0.95)
    covered = metrics.interval_coverage(lower, upper, y)
    return f"{100 * covered:3.0f} %   (network alone, given the true noise: {100 * alone:.0f} %)"


def _load_digits(settings: Settings, noise: float) -> Digits:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.as_tensor(labels, dtype=torch.long)
    x = x + noise * torch.randn(x.shape)
    known = ~torch.isin(y, torch.tensor(LEFT_OUT))
    order = known.nonzero().squeeze(-1)
    order = order[torch.randperm(len(order))]
    train, val, test = order.split([*PARTS, len(order) - sum(PARTS)])
    photos = _photographs()
    unknown = {"8, 9": x[~known], "photos": photos + noise * torch.randn(photos.shape)}
    return Digits(x[train], y[train], x[val], y[val], x[test], y[test], unknown)


def _photographs() -> Tensor:
    """Return 8x8 patches of scikit-learn's two photographs, averaged over 4x4 pixels, (L, 1, 8, 8)."""
    from sklearn.datasets import load_sample_images

    grey = [torch.tensor(image, dtype=torch.float32).mean(-1) / 255 for image in load_sample_images().images]
    small = [nn.functional.avg_pool2d(image[None], 4)[0] for image in grey]
    return torch.cat([image.unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 1, 8, 8) for image in small])


def _convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10 - len(LEFT_OUT)),
    )


def _train(model: nn.Module, loader: DataLoader, loss: Loss, epochs: int, lr: float, weight_decay: float) -> float:
    """Train in place, and return the seconds that the steps took."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    start = time.perf_counter()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        schedule.step()
    return time.perf_counter() - start


def _curve(x: Tensor) -> Tensor:
    return torch.sin(2 * x) + x / 2


def _observe(x: Tensor) -> Tensor:
    return _curve(x) + SIGMA * torch.randn(x.shape)


def _uniform(count: int, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(count, 1)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

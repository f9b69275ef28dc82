"""Figure 1 of the paper: the loss in the plane of the optimiser's path, the Gaussian at its end, and the predictions.

    python -m experiments.three_steps [--quick]

No data is needed. A small network is trained on a noisy sine with a gap. The plane is that of the two largest principal
components of the path. Drawn are the loss in that plane with the whole path, the loss near its end with the Gaussian
over it, and the band. Written are the shares of the path's variance in the plane, the standard deviations of the
posterior along both axes beside those of the loss itself (its second derivative there), and the band's coverage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from experiments.uq.start import Rows, started
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

from laplace import Laplace

NOISE, HIDDEN = 0.2, 15


@dataclass(frozen=True)
class Path:
    """A trained network, the weights on its way, and the plane that it moved in."""

    network: nn.Module
    weights: Tensor  # (T, P)
    axes: Tensor  # (2, P), orthonormal
    shares: list[float]

    @property
    def end(self) -> Tensor:  # (P,)
        """Return the trained weights."""
        return self.weights[-1]


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    study = started("three_steps", __doc__.splitlines()[0], arguments, needs_data=False)
    steps, cells = (200, 9) if study.quick else (4000, 61)
    rows = Rows(study.results, {"steps": steps, "cells": cells})
    torch.manual_seed(0)
    x, y = sine(60)
    path = trained(x, y, steps)
    precision = 0.1
    la = Laplace(path.network, "regression", "all", "full", sigma_noise=NOISE, prior_precision=precision).fit([(x, y)])
    spread = (path.axes @ la.posterior_covariance @ path.axes.T).diagonal().sqrt()  # of the marginal in the plane
    within = path.axes @ la.posterior_precision @ path.axes.T  # (2, 2): all else at its mode
    conditional = within.diagonal().rsqrt()
    grid = torch.linspace(-1, 1, cells).double()
    near = [6 * deviation * grid for deviation in conditional]
    new = torch.linspace(-6, 6, 200).double().unsqueeze(1)
    found, truth, away = la.predict(new), new.sin(), new.abs().squeeze(1)
    low, high = found.interval(0.95)
    inside, gap, width = (away > 1.5) & (away < 4.5), away < 1.5, high - low
    measured = {
        "share_of_path": [round(s, 4) for s in path.shares],
        "posterior_sd_in_plane": [round(float(s), 5) for s in spread],
        "conditional_sd": [round(float(s), 5) for s in conditional],
        "sd_of_loss": [round(float(s), 5) for s in curvature(path, x, y, precision, conditional)],
        "truth_in_band_near_data": float(((truth >= low) & (truth <= high))[inside].double().mean()),
        "band_in_gap_over_near_data": float(width[gap].mean() / width[inside].mean()),
        "log_evidence": round(float(la.log_marginal_likelihood()), 3),
    }
    print(rows.get("measured", lambda: measured))
    walked = (path.weights - path.end) @ path.axes.T  # (T, 2)
    middles, halves = (walked.amax(0) + walked.amin(0)) / 2, 0.65 * (walked.amax(0) - walked.amin(0))
    wide = [middle + half * grid for middle, half in zip(middles, halves, strict=True)]
    planes = [(*axes, landscape(path, x, y, precision, *axes)) for axes in (wide, near)]
    draw(walked, planes, within, (x, y), (new, found.mean, low, high), study.results.with_suffix(".png"))


def sine(n: int) -> tuple[Tensor, Tensor]:
    """Return noisy points of a sine, with a gap around 0."""
    x = torch.cat([-4.5 + 3 * torch.rand(n // 2, 1), 1.5 + 3 * torch.rand(n // 2, 1)]).double()
    return x, x.sin() + NOISE * torch.randn_like(x)


def energy(network: nn.Module, weights: Tensor, x: Tensor, y: Tensor, precision: float) -> Tensor:
    """Return minus the log joint density, up to a constant."""
    params, start = {}, 0
    for name, p in network.named_parameters():
        params[name] = weights[start : start + p.numel()].reshape(p.shape)
        start += p.numel()
    f = functional_call(network, params, (x,))
    return (f - y).square().sum() / (2 * NOISE**2) + precision / 2 * weights.square().sum()


def trained(x: Tensor, y: Tensor, steps: int) -> Path:
    """Train a small network by gradient descent and keep its path."""
    network = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()
    optimizer, seen = torch.optim.Adam(network.parameters(), lr=0.01), []
    for step in range(steps):
        optimizer.zero_grad()
        weights = parameters_to_vector(network.parameters())
        energy(network, weights, x, y, 0.1).backward()
        optimizer.step()
        if step % max(1, steps // 200) == 0:
            seen.append(weights.detach().clone())
    seen.append(parameters_to_vector(network.parameters()).detach().clone())
    path = torch.stack(seen)
    _, values, axes = torch.linalg.svd(path - path.mean(0), full_matrices=False)
    shares = (values.square() / values.square().sum())[:2].tolist()
    return Path(network, path, axes[:2], shares)


@torch.no_grad()
def landscape(path: Path, x: Tensor, y: Tensor, precision: float, first: Tensor, second: Tensor) -> Tensor:
    """Return minus the log joint density at places from the end of the path, less its value there, (cells, cells)."""
    rows = [[path.end + a * path.axes[0] + b * path.axes[1] for a in first] for b in second]
    found = torch.stack([torch.stack([energy(path.network, at, x, y, precision) for at in row]) for row in rows])
    return found - energy(path.network, path.end, x, y, precision)


@torch.no_grad()
def curvature(path: Path, x: Tensor, y: Tensor, precision: float, step: Tensor) -> list[float]:
    """Return the standard deviation that the loss itself has along both axes, from differences."""
    found = []
    for axis, h in zip(path.axes, 0.1 * step, strict=True):
        at = [energy(path.network, path.end + k * h * axis, x, y, precision) for k in (-1, 0, 1)]
        bend = float((at[0] - 2 * at[1] + at[2]) / h.square())
        found.append(bend**-0.5 if bend > 0 else math.nan)
    return found


def draw(walked: Tensor, planes: list, precision: Tensor, data: tuple, band: tuple, file) -> None:
    """Write the figure: the landscape with the path, near its end with the Gaussian over it, and the band."""
    fig = Figure(figsize=(11.5, 3.6), layout="constrained")
    FigureCanvasAgg(fig)
    left, middle, right = fig.subplots(1, 3)
    (wide_a, wide_b, wide), (a, b, near) = planes
    left.contourf(wide_a, wide_b, wide.clamp(min=0.1).log10(), 14, cmap="Greys_r", alpha=0.7)
    left.plot(*walked.T, color="#d95f02", lw=1.2, label="the optimiser's path")
    left.plot(0, 0, "o", ms=4, color="#d95f02", label="its end: the mode")
    corner = (float(a[0]), float(b[0]))
    square = Rectangle(corner, float(a[-1] - a[0]), float(b[-1] - b[0]), fill=False, ec="#1b9e77", lw=1.2)
    square.set_label("part shown in 2")
    left.add_patch(square)
    left.set(title="1. training finds a mode", xlim=_ends(wide_a), ylim=_ends(wide_b))
    levels = [0.5, 2, 4.5, 8, 12.5, 18]  # 1 to 6 standard deviations of a Gaussian
    moves = torch.stack(torch.meshgrid(a, b, indexing="xy"), -1)  # (cells, cells, 2)
    gaussian = torch.einsum("abi,ij,abj->ab", moves, precision, moves) / 2
    middle.contour(a, b, near, levels, colors="#888888", linewidths=1)
    middle.contour(a, b, gaussian, levels, colors="#1b9e77", linewidths=1, linestyles="--")
    middle.plot([], [], color="#888888", lw=1, label="the loss")
    middle.plot([], [], "--", color="#1b9e77", lw=1, label="the Gaussian")
    middle.plot(0, 0, "o", ms=4, color="#d95f02")
    middle.set(title="2. a Gaussian at it, 1 to 6 sd", xlim=_ends(a), ylim=_ends(b))
    x, mean, low, high = (t.squeeze(1).detach() for t in band)
    right.fill_between(x, low, high, color="#1b9e77", alpha=0.25, lw=0, label="95 % interval")
    right.plot(x, mean, color="#1b9e77", label="mean")
    right.plot(x, x.sin(), "--", color="#888888", lw=1, label="truth")
    right.plot(data[0], data[1], ".", ms=3, color="#333333", label="data")
    right.set(title="3. predictions", xlabel="x", ylabel="y", ylim=(-4, 4))
    for axes in (left, middle):
        axes.set(xlabel="first principal component", ylabel="second")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, loc="upper right" if axes is left else "lower left", framealpha=0.8)
    fig.savefig(file, dpi=130)


def _ends(values: Tensor) -> tuple[float, float]:
    return float(values[0]), float(values[-1])


if __name__ == "__main__":
    main()

"""Hold the result of `la.calibrate`: a few settings side by side, printed as a table."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from torch import Tensor

from laplace.checks import how_many

_WIDTH = 80


@dataclass(frozen=True)
class Gain:
    """Says by how many nats per example one setting is better than another on the validation data.

    Attributes:
        mean: The mean difference of the negative log-likelihoods; positive is better.
        error: Its standard error, over examples.
    """

    mean: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval."""
        return self.mean - 1.96 * self.error, self.mean + 1.96 * self.error

    def __str__(self) -> str:
        return f"{_short(self.mean)} ± {_short(self.error)}"


@dataclass(frozen=True)
class Calibration:
    """Describes one setting, and how it does on the validation data.

    Attributes:
        name: 'network', 'rescaled', 'before', 'best' or 'chosen'; 'profile' for a row of `Calibrated.profile`.
        nll: The mean negative log-likelihood.
        score: The same, minus `ood_weight` times the mean entropy on outside inputs if there are any.
        gain: The gain over the network.
        gain_on_rescaled: The gain over the network with the best softmax temperature, or noise.
        accuracy: The accuracy of the predicted classes or labels. None for other likelihoods.
        ece: The expected calibration error of the predicted classes or labels. None for other likelihoods.
        coverage: The share of labels that lie in their 90 % interval. None for other likelihoods.
        prior_precision: None for the network itself, which has no posterior.
        softmax_temperature: What the logits are divided by.
        sigma_noise: The observation noise of a regression.
    """

    name: str
    nll: float
    score: float
    gain: Gain
    gain_on_rescaled: Gain
    accuracy: float | None
    ece: float | None
    coverage: float | None
    prior_precision: Tensor | None
    softmax_temperature: float
    sigma_noise: Tensor | None

    def cells(self, first: bool, second: bool) -> dict[str, str]:
        """Return a row of the table. A setting has no gain over itself."""
        row = {"": self.name, "NLL": f"{self.nll:.4f}"}
        row["gain on network"] = "-" if first else str(self.gain)
        row["gain on rescaled"] = "-" if first or second else str(self.gain_on_rescaled)
        shares = {"ECE": self.ece, "accuracy": self.accuracy, "in 90 %": self.coverage}
        row |= {name: f"{value:.3f}" for name, value in shares.items() if value is not None}
        row["prior"] = "-" if self.prior_precision is None else _number(self.prior_precision)
        if self.sigma_noise is None:
            row["T"] = f"{self.softmax_temperature:.3g}"
        else:
            row["noise"] = _number(self.sigma_noise)
        return row


@dataclass(frozen=True, repr=False)
class Calibrated:
    """Tells what `la.calibrate` compared and what it set. Prints as a table.

    Attributes:
        n_data: How many validation examples there were.
        rule: 'one_se' or 'best'.
        network: The network itself, without a posterior.
        rescaled: The network with the best softmax temperature, or the best noise.
        before: The posterior as it was.
        best: The setting with the lowest score.
        chosen: The setting that was chosen and set.
        profile: Each prior precision of the grid with its best scale, the widest posterior first. Those that are
            hopeless at every softmax temperature are left out.
        notes: The warnings.
    """

    n_data: int
    rule: str
    network: Calibration
    rescaled: Calibration
    before: Calibration
    best: Calibration
    chosen: Calibration
    profile: tuple[Calibration, ...]
    notes: tuple[str, ...] = ()

    @property
    def prior_precision(self) -> Tensor | None:
        """Return the chosen prior precision. None: the network itself was chosen, and la's precision is very large."""
        return self.chosen.prior_precision

    @property
    def softmax_temperature(self) -> float:
        """Return the softmax temperature that was set."""
        return self.chosen.softmax_temperature

    @property
    def sigma_noise(self) -> Tensor | None:
        """Return the noise that was set; None for likelihoods without noise."""
        return self.chosen.sigma_noise

    @property
    def gain(self) -> Gain:
        """Return by how much the chosen setting is better than the network."""
        return self.chosen.gain

    def __repr__(self) -> str:
        named = [self.network, self.rescaled, self.before, self.best, self.chosen]
        rows = [each.cells(each is self.network, each is self.rescaled) for each in named]
        names = list(rows[0])
        widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
        lines = [_line({name: name for name in names}, widths), *(_line(row, widths) for row in rows)]
        rule = "-" * max(map(len, lines))
        said = [f"note: {note}" for note in self.notes]
        text = [line for each in [self._legend, *said] for line in wrap(each, _WIDTH)]
        title = f"Calibrated on {how_many(self.n_data, 'validation example')}, rule={self.rule!r}"
        return "\n".join([title, "", lines[0], rule, *lines[1:], "", *text])

    @property
    def _legend(self) -> str:
        scale = "softmax temperature T" if self.chosen.sigma_noise is None else "noise"
        chosen = {
            "best": "chosen: the lowest score",
            "one_se": "chosen: the widest posterior within one standard error of the best",
        }[self.rule]
        if self.chosen.prior_precision is None:
            chosen = "chosen: the network itself, for no posterior was better"
        return (
            f"NLL and gains (± one standard error) in nats per example. rescaled: the network with its best {scale}. "
            f"before: the posterior as it was. {chosen}."
        )


def _line(row: dict[str, str], widths: dict[str, int]) -> str:
    cells = [f"{row[name]:<{width}}" if not name else f"{row[name]:>{width}}" for name, width in widths.items()]
    return "  ".join(cells)


def _short(value: float) -> str:
    """Write a number with four digits behind the point, without the zero before it."""
    text = f"{value:.4f}"
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text


def _number(value: Tensor) -> str:
    """Write one number, or the range of several."""
    low, high = float(value.min()), float(value.max())
    return f"{low:.3g}" if value.numel() == 1 else f"{low:.2g}..{high:.2g}"

"""Draw charts as SVG text: axes, lines, dots, bars. Colours and fonts come from the page's style sheet.

A chart is drawn for a width of 380 pixels, and scales. Series differ in colour, in dashes and in the shape of their
dots, so that no reader depends on colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

WIDTH: Final = 380
HEIGHT: Final = 250
SERIES: Final = 6  # styles that the style sheet has
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 10, 42

Numbers = Sequence[float]


class Chart:
    """Draws on a pair of axes.

    Args:
        x: The ends of the horizontal axis.
        y: The ends of the vertical axis.
        labels: What the two axes show.
        log_x: Whether the horizontal axis is logarithmic.
        per_cent: Which axes are shares, written in per cent: '', 'x', 'y' or 'xy'.
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        labels: tuple[str, str],
        log_x: bool = False,
        per_cent: str = "",
    ) -> None:
        self.x, self.y, self.log_x = _apart(x, log_x), _apart(y, False), log_x
        self._parts: list[str] = []
        self._frame(labels, per_cent)

    def line(self, x: Numbers, y: Numbers, series: int, thin: bool = False) -> None:
        """Join points by a line."""
        style = f"line s{series % SERIES}{' thin' if thin else ''}"
        points = " ".join(f"{self._x(a):.1f},{self._y(b):.1f}" for a, b in zip(x, y, strict=True))
        self._parts.append(f'<polyline class="{style}" points="{points}"/>')

    def dots(self, x: Numbers, y: Numbers, series: int, sizes: Numbers | None = None, faint: bool = False) -> None:
        """Draw a dot at each point: a circle, a square, a diamond or a triangle, by series."""
        for i, (a, b) in enumerate(zip(x, y, strict=True)):
            size = 3.2 if sizes is None else sizes[i]
            style = f"dot s{series % SERIES}{' faint' if faint else ''}"
            self._parts.append(_dot(self._x(a), self._y(b), size, series % SERIES, style))

    def bars(self, x: Numbers, low: Numbers, high: Numbers, series: int, faint: bool = False) -> None:
        """Draw a thin vertical bar for each interval."""
        style = f"bar s{series % SERIES}{' faint' if faint else ''}"
        for a, b, c in zip(x, low, high, strict=True):
            at, bottom, top = self._x(a), self._y(b), self._y(c)
            self._parts.append(f'<path class="{style}" d="M{at:.1f} {bottom:.1f}V{top:.1f}"/>')

    def steps(self, edges: Numbers, heights: Numbers, series: int) -> None:
        """Draw a histogram as an outline."""
        d = [f"M{self._x(edges[0]):.1f} {self._y(0):.1f}"]
        for right, height in zip(edges[1:], heights, strict=True):
            d.append(f"V{self._y(height):.1f}H{self._x(right):.1f}")
        self._parts.append(f'<path class="line s{series % SERIES}" d="{"".join(d)}V{self._y(0):.1f}"/>')

    def band(self, low: float, high: float) -> None:
        """Shade a horizontal band."""
        top, bottom = self._y(high), self._y(low)
        width = WIDTH - _LEFT - _RIGHT
        self._parts.append(
            f'<rect class="band" x="{_LEFT}" y="{top:.1f}" width="{width}" height="{bottom - top:.1f}"/>'
        )

    def guide(self, x: Numbers, y: Numbers) -> None:
        """Draw a thin dashed line for comparison."""
        points = " ".join(f"{self._x(a):.1f},{self._y(b):.1f}" for a, b in zip(x, y, strict=True))
        self._parts.append(f'<polyline class="guide" points="{points}"/>')

    def note(self, x: float, y: float, text: str, end: bool = False) -> None:
        """Write a few words into the chart."""
        anchor = ' text-anchor="end"' if end else ""
        self._parts.append(f'<text class="t" x="{self._x(x):.1f}" y="{self._y(y):.1f}"{anchor}>{escape(text)}</text>')

    def svg(self, title: str, description: str) -> str:
        """Return the chart. The description is read out to those who do not see it."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}. {escape(description)}">'
            f"{''.join(self._parts)}</svg>"
        )

    def _x(self, value: float) -> float:
        low, high = self.x
        if self.log_x:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.x[0] * 1e-9))
        share = (value - low) / (high - low)
        return _LEFT + min(max(share, -0.02), 1.02) * (WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        low, high = self.y
        share = (value - low) / (high - low)
        return HEIGHT - _BOTTOM - min(max(share, -0.02), 1.03) * (HEIGHT - _TOP - _BOTTOM)

    def _frame(self, labels: tuple[str, str], per_cent: str) -> None:
        bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        for value in ticks(*self.y):
            at = self._y(value)
            text = _written(value, self.y, "y" in per_cent)
            self._parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>')
            self._parts.append(f'<text class="t" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
        for value in decades(*self.x) if self.log_x else ticks(*self.x):
            at = self._x(value)
            text = _power(value) if self.log_x else _written(value, self.x, "x" in per_cent)
            self._parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom}"/>')
            self._parts.append(f'<text class="t" x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
        self._parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
        middle, centre = (_LEFT + right) / 2, (_TOP + bottom) / 2
        self._parts.append(
            f'<text class="a" x="{middle}" y="{HEIGHT - 7}" text-anchor="middle">{escape(labels[0])}</text>'
            f'<text class="a" x="12" y="{centre}" text-anchor="middle" transform="rotate(-90 12 {centre})">'
            f"{escape(labels[1])}</text>"
        )


def swatch(series: int) -> str:
    """Return a small sample of a series, for a legend."""
    dot = _dot(14, 6, 3.2, series % SERIES, f"dot s{series % SERIES}")
    return (
        '<svg class="swatch" viewBox="0 0 28 12" aria-hidden="true">'
        f'<path class="line s{series % SERIES}" d="M1 6H27"/>{dot}</svg>'
    )


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers between two ends, at most `most` of them."""
    span = high - low
    for factor in (0.1, 0.2, 0.5, 1, 2, 5, 10):
        step = factor * 10 ** math.floor(math.log10(span))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [i * step for i in range(first, last + 1)]
    return [low, high]


def decades(low: float, high: float, most: int = 6) -> list[float]:
    """Return powers of ten between two ends, at most `most` of them; 1, 2 and 5 times these if they are few."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 2:
        finer = [k * 10.0**e for e in range(first - 1, last + 1) for k in (1, 2, 5)]
        return [value for value in finer if low <= value <= high] or [low, high]
    step = max(1, math.ceil((last - first + 1) / most))
    return [10.0**k for k in range(first, last + 1, step)]


def _apart(ends: tuple[float, float], logarithmic: bool) -> tuple[float, float]:
    """Return ends that differ, so that a scale can be made of them."""
    low, high = ends
    if high > low:
        return low, high
    return (low / 2, low * 2) if logarithmic and low > 0 else (low - 0.5, low + 0.5)


def _written(value: float, ends: tuple[float, float], per_cent: bool) -> str:
    if per_cent:
        return f"{100 * value:.3g} %"
    if abs(value) < 1e-12 * max(abs(ends[0]), abs(ends[1])):
        return "0"
    largest = max(abs(ends[0]), abs(ends[1]))
    divisor, unit = (1e6, "M") if largest >= 1e6 else (1e3, "k") if largest >= 1e4 else (1, "")
    return f"{value / divisor:.4g}{unit}".replace("-", "−")


def _power(value: float) -> str:
    exponent = math.log10(value)
    if abs(exponent - round(exponent)) > 1e-6:
        return f"{value:.2g}"
    k = round(exponent)
    if -2 <= k <= 3:
        return f"{10.0**k:g}"
    return f'10<tspan class="up" dy="-4">{str(k).replace("-", "−")}</tspan>'


def _dot(x: float, y: float, r: float, series: int, style: str) -> str:
    if series == 1:
        return f'<rect class="{style}" x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r:.1f}" height="{2 * r:.1f}"/>'
    if series in (3, 5):
        s = 1.35 * r
        return f'<path class="{style}" d="M{x:.1f} {y - s:.1f}l{s:.1f} {s:.1f}l{-s:.1f} {s:.1f}l{-s:.1f} {-s:.1f}z"/>'
    if series in (0, 4):
        s = 1.3 * r
        return f'<path class="{style}" d="M{x:.1f} {y - s:.1f}l{s:.1f} {1.8 * s:.1f}h{-2 * s:.1f}z"/>'
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"/>'

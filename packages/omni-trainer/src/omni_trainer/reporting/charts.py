"""Curves as inline SVG: no script, no font and no colour of its own; the page's style sheet colours the classes.

`line` with `main` or `faint` draws a series, `interval` a mean with its interval, `grid` the scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from markupsafe import Markup

from omni_trainer.reporting.intervals import Interval

Points = Sequence[tuple[float, float]]
"""(x, y), x ascending."""

MOST_POINTS = 400
"""Longer series are drawn as means of neighbours."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 8, 24
_LEFT_SMALL = 54


@attrs.frozen(kw_only=True)
class Line:
    """One series."""

    points: Points
    style: str = "main"
    """CSS class."""


@attrs.frozen(kw_only=True)
class Frame:
    """Where data lie on the picture."""

    width: int
    height: int
    left: int
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Turn data into pixels."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return (
            round(self.left + across * (self.width - self.left - _RIGHT), 1),
            round(self.height - _BOTTOM - up * (self.height - _TOP - _BOTTOM), 1),
        )


def chart(
    lines: Sequence[Line],
    intervals: Sequence[tuple[float, Interval]] = (),
    *,
    title: str,
    width: int = 320,
    height: int = 150,
) -> Markup:
    """Draw series, and means with their intervals, on one pair of axes.

    Args:
        lines: At least one point among them, or an interval.
        intervals: (x, mean with interval), joined by a line.
        title: Read out where the picture is not seen.
        width: Pixels of the drawing; it is scaled to its place.
        height: The same.

    Raises:
        ValueError: nothing to draw.
    """
    lines = [attrs.evolve(line, points=_thinned(line.points)) for line in lines if line.points]
    xs = [x for line in lines for x, _ in line.points] + [x for x, _ in intervals]
    ys = [y for line in lines for _, y in line.points]
    ys += [bound for _, one in intervals for bound in (one.low, one.high)]
    if not xs:
        msg = f"{title}: there is nothing to draw"
        raise ValueError(msg)
    across, up = _ticks(min(xs), max(xs), whole=True), _ticks(min(ys), max(ys))
    frame = Frame(
        width=width,
        height=height,
        left=_LEFT if width > 400 else _LEFT_SMALL,
        x=(min(xs), max(xs)) if min(xs) < max(xs) else (across[0], across[-1]),
        y=(min(*ys, up[0]), max(*ys, up[-1])),
    )
    parts = [_scale(frame, across, up), *(_line(frame, line) for line in lines)]
    parts += [_intervals(frame, intervals)] if intervals else []
    opened = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">')
    return opened.format(width, height, title) + Markup("").join(parts) + Markup("</svg>")


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    if low == high:
        low, high = (low - 1, high + 1) if whole or not low else (low - abs(low), high + abs(high))
        low = max(low, 0) if whole else low
    locator = MaxNLocator(nbins=4, steps=[1, 2, 5, 10], integer=whole)
    return [float(tick) for tick in locator.tick_values(low, high)]


def _thinned(points: Points) -> Points:
    """Mean of neighbours, so that a curve has at most `MOST_POINTS`."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-len(points) // MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(_mean([x for x, _ in part]), _mean([y for _, y in part])) for part in parts]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _scale(frame: Frame, across: Sequence[float], up: Sequence[float]) -> Markup:
    parts = []
    for tick in up:
        x, y = frame.at(frame.x[0], tick)
        parts.append(
            Markup(
                '<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>'
                '<text x="{}" y="{}" text-anchor="end">{}</text>'
            ).format(x, y, frame.width - _RIGHT, y, x - 5, y + 3.5, number(tick))
        )
    for tick in across:
        x, y = frame.at(tick, frame.y[0])
        if frame.left <= x <= frame.width - _RIGHT:
            text = Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>')
            parts.append(text.format(x, frame.height - 8, number(tick)))
    return Markup("").join(parts)


def _line(frame: Frame, line: Line) -> Markup:
    pixels = [frame.at(x, y) for x, y in line.points]
    if len(pixels) == 1:
        return Markup('<circle class="dot {}" cx="{}" cy="{}" r="2.5"/>').format(
            line.style, *pixels[0]
        )
    path = " ".join(f"{x},{y}" for x, y in pixels)
    return Markup('<polyline class="line {}" points="{}"/>').format(line.style, path)


def _intervals(frame: Frame, intervals: Sequence[tuple[float, Interval]]) -> Markup:
    parts = []
    means = [(x, one.mean) for x, one in intervals]
    if len(means) > 1:
        path = " ".join("{},{}".format(*frame.at(x, y)) for x, y in means)
        parts.append(Markup('<polyline class="line interval" points="{}"/>').format(path))
    for x, one in intervals:
        (across, middle), (_, low), (_, high) = (
            frame.at(x, value) for value in (one.mean, one.low, one.high)
        )
        parts.append(
            Markup(
                '<g><title>step {}: {}</title><path class="line interval" d="M{a} {low}V{high}'
                'M{l} {low}H{r}M{l} {high}H{r}"/><circle class="dot interval" cx="{a}" cy="{m}" r="4"/></g>'
            ).format(
                number(x),
                str(one),
                a=across,
                l=across - 4,
                r=across + 4,
                low=low,
                high=high,
                m=middle,
            )
        )
    return Markup("").join(parts)


def number(value: float) -> str:
    """Write a number as people read it: at most four digits."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"

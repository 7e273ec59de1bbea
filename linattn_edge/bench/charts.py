"""Charts as SVG, to stand in a page: colours come from the page's style, every figure is one of the report."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from linattn_edge.terminal import size

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 88, 18, 14, 54


@dataclass(frozen=True)
class Line:
    """A series. look: a class of the page's style, "s1" to "s5"; thin ones are drawn without points."""

    name: str
    look: str
    points: Points
    thin: bool = False


@dataclass(frozen=True)
class Mark:
    """A vertical line at x, and what it says."""

    x: float
    text: str


@dataclass(frozen=True)
class Axis:
    """An axis from low to high, logarithmic unless said otherwise, with ticks."""

    title: str
    low: float
    high: float
    ticks: list[float]
    label: Callable[[float], str]
    linear: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        if self.linear:
            share = (value - self.low) / (self.high - self.low)
        else:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        return start + (end - start) * min(1.0, max(0.0, share))


def plain_number(value: float) -> str:
    """1, 10, 1k, 100k, 1M"""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def log_axis(title: str, values: Iterable[float], room: float = 1.15) -> Axis:
    """Ticks at 1, 10, 100 …; at 2 and 5 as well where there are few."""
    found = [value for value in values if value > 0]
    low, high = min(found) / room, max(found) * room
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    parts = (1,) if high / low > 300 else (1, 2, 5)
    ticks = [part * 10.0**n for n in decades for part in parts if low <= part * 10.0**n <= high]
    return Axis(title, low, high, ticks, plain_number)


def round_size(count: float) -> str:
    """A number of bytes, without the digits of a round one."""
    return size(count).replace(".0 ", " ")


def share_axis(title: str, values: Iterable[float]) -> Axis:
    """0 % to 100 %, or further where a share is larger."""
    high = max(1.0, *values) * 1.04
    ticks = [0.25 * n for n in range(int(high / 0.25) + 1)]
    return Axis(title, 0, high, ticks, lambda value: f"{value:.0%}", linear=True)


def byte_axis(title: str, values: Iterable[float]) -> Axis:
    """Ticks at 1 KiB, 32 KiB, 1 MiB …"""
    found = list(values)
    low, high = min(found) / 2, max(found) * 2
    return Axis(title, low, high, [t for n in range(0, 12) if low <= (t := 32.0**n) <= high], round_size)


def words(look: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def axes(x: Axis, y: Axis, width: int = WIDTH, height: int = HEIGHT, left: int = LEFT) -> list[str]:
    """Grid, ticks and titles."""
    right, bottom = width - RIGHT, height - BOTTOM
    out = []
    for tick in y.ticks:
        at = y.place(tick, bottom, TOP)
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(
            f'<text class="tick" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(y.label(tick))}</text>'
        )
    for tick in x.ticks:
        at = x.place(tick, left, right)
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        out.append(
            f'<text class="tick" x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(x.label(tick))}</text>'
        )
    out.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    out.append(words("title", (left + right) / 2, height - 8, x.title))
    centre = (TOP + bottom) / 2
    turn = f'x="14" y="{centre:.0f}" transform="rotate(-90 14 {centre:.0f})"'
    out.append(f'<text class="title" {turn} text-anchor="middle">{escape(y.title)}</text>')
    return out


def svg(parts: Iterable[str], about: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(about)}">\n{body}\n</svg>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(look, name) of each series."""
    items = "".join(f'<li class="{look}">{escape(name)}</li>' for look, name in entries)
    return f'<ul class="legend">{items}</ul>'


def lines(about: str, x: Axis, y: Axis, series: Sequence[Line], marks: Sequence[Mark] = ()) -> str:
    """Lines with a point for each figure."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    out = axes(x, y)
    for mark in marks:
        at = x.place(mark.x, LEFT, right)
        end = at > (LEFT + right) * 0.6
        out.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        anchor, shift = ("end", -6) if end else ("start", 6)
        out.append(words("note", at + shift, TOP + 12, mark.text, anchor))
    for line in series:
        places = [(x.place(a, LEFT, right), y.place(b, bottom, TOP)) for a, b in line.points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        out.append(f'<polyline class="line {line.look}{" thin" if line.thin else ""}" points="{path}"/>')
        for (a, b), (px, py) in zip(line.points, places, strict=True):
            radius = 2 if line.thin else 3.5
            told = f"{line.name}: {y.label(b) if y.label is round_size else f'{b:.4g}'} at {a:,.0f}"
            out.append(
                f'<circle class="{line.look}" cx="{px:.1f}" cy="{py:.1f}" r="{radius}" data-x="{a!r}" data-y="{b!r}">'
                f"<title>{escape(told)}</title></circle>"
            )
    return legend((f"{line.look} thin" if line.thin else line.look, line.name) for line in series) + svg(out, about)


def bars(
    about: str, x: Axis, y: Axis, bins: Sequence[Sequence[float]], marks: Sequence[float], width: int = 1040
) -> str:
    """A histogram, [from, to, how many], with vertical lines at the marks."""
    height = 300
    right, bottom = width - RIGHT, height - BOTTOM
    out = axes(x, y, width, height)
    for low, high, many in bins:
        a, b = x.place(low, LEFT, right), x.place(high, LEFT, right)
        top = y.place(many, bottom, TOP)
        out.append(
            f'<rect class="s1" x="{a:.1f}" y="{top:.1f}" width="{max(b - a - 0.5, 0.5):.1f}" '
            f'height="{max(bottom - top, 1):.1f}" data-x="{low!r}" data-y="{many!r}">'
            f"<title>{many:,.0f} steps of {low:.3g} to {high:.3g} µs</title></rect>"
        )
    for mark in marks:
        at = x.place(mark, LEFT, right)
        out.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
    return svg(out, about, width, height)


@dataclass(frozen=True)
class Spot:
    """A figure in a row of `dots`."""

    name: str
    look: str
    value: float


@dataclass(frozen=True)
class Dots:
    """A row: what it is about, and its spots."""

    label: str
    spots: list[Spot] = field(default_factory=list)


def dots(about: str, x: Axis, rows: Sequence[Dots], line_at: float | None = None, left: int = 250) -> str:
    """A row for each case, a dot for each contestant."""
    step = 26
    height = TOP + step * len(rows) + BOTTOM
    right, bottom = WIDTH - RIGHT, height - BOTTOM
    out = []
    for tick in x.ticks:
        at = x.place(tick, left, right)
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        out.append(
            f'<text class="tick" x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(x.label(tick))}</text>'
        )
    if line_at is not None:
        at = x.place(line_at, left, right)
        out.append(f'<line class="base" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
    out.append(words("title", (left + right) / 2, height - 8, x.title))
    for i, row in enumerate(rows):
        middle = TOP + step * (i + 0.5)
        out.append(
            f'<text class="tick" x="{left - 12}" y="{middle + 4:.1f}" text-anchor="end">{escape(row.label)}</text>'
            f'<line class="grid" x1="{left}" x2="{right}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
        )
        for spot in row.spots:
            at = x.place(spot.value, left, right)
            out.append(
                f'<circle class="{spot.look}" cx="{at:.1f}" cy="{middle:.1f}" r="5" data-x="{spot.value!r}">'
                f"<title>{escape(f'{row.label}, {spot.name}: {spot.value:.3g}')}</title></circle>"
            )
    names = dict.fromkeys((spot.look, spot.name) for row in rows for spot in row.spots)
    return (legend(names) if len(names) > 1 else "") + svg(out, about, WIDTH, height)

"""Tables as data: what the terminal and the page both show. Every number in a cell is one of the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linattn_edge.terminal import size


@dataclass(frozen=True)
class Cell:
    """What is shown, and the figure behind it as it stands in the report (None for words)."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """The first `left` columns say what the row is about; the others are figures."""

    title: str
    text: str
    header: list[str]
    rows: list[list[Cell]]
    left: int = 1


ABSENT = Cell("–")


def word(text: Any) -> Cell:
    """No figure."""
    return Cell(str(text))


def layer_name(case: Mapping[str, Any]) -> str:
    """A rule, and its map where that is not the identity."""
    return f"{case['rule']}, elu" if case["map"] == "elu" else str(case["rule"])


def count(value: Any) -> Cell:
    """A whole number."""
    return Cell(f"{value:,}", value)


def short(value: float) -> str:
    """About three significant digits, without an exponent."""
    for limit, digits in ((0.1, 4), (1, 3), (10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def figure(value: float | None) -> Cell:
    """About three significant digits; a dash for None."""
    return ABSENT if value is None else Cell(short(value), value)


def figures(time: dict[str, float] | None, names: Sequence[str]) -> list[Cell]:
    """Some of a row's times."""
    return [figure((time or {}).get(name)) for name in names]


def times(value: float | None) -> Cell:
    """A ratio."""
    return ABSENT if value is None else Cell(f"{value:.2f}×" if value < 10 else f"{value:,.0f}×", value)


def percent(value: float | None) -> Cell:
    """A share."""
    return ABSENT if value is None else Cell(f"{value:.0%}", value)


def memory(value: float | None) -> Cell:
    """Bytes."""
    return ABSENT if value is None else Cell(size(value), value)

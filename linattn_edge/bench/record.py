"""What a run leaves: a report of groups of rows. JSON, CSV, the page and the tables are all made from it."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from linattn_edge.bench.clock import WALL
from linattn_edge.bench.machine import load

FORMAT = 1
KIND = "linattn-edge bench"
OURS = "linattn_edge"


@dataclass
class Row:
    """One contestant: its times in `unit` (per token, where nothing else is said), or the reason why there are none."""

    name: str
    case: dict[str, Any] = field(default_factory=dict)  # what sets it apart from the other rows of its group
    time: dict[str, float] | None = None  # of `statistics.summary`
    values: dict[str, float] = field(default_factory=dict)
    note: str = ""
    unit: str = "µs"
    clock: str = WALL
    histogram: list[list[float]] = field(default_factory=list)  # [from, to, samples]


@dataclass
class Group:
    """Rows that were measured in turn, in one stretch."""

    suite: str
    title: str
    case: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    load: list[float] = field(default_factory=load)
    controls: list[Row] = field(default_factory=list)  # what a comparison knows the machine's own changes by

    def row(self, name: str) -> Row | None:
        """The first row of that name that was timed."""
        return next((row for row in self.rows if row.name == name and row.time), None)

    def add_ratios(self, to: str = OURS) -> None:
        """Give every other timed row how many times as long it takes as `to`, by the least times."""
        base = self.row(to)
        for row in self.rows:
            if base is not None and base.time and row.time and row.name != to:
                row.values[f"times {to}"] = row.time["min"] / base.time["min"]


@dataclass
class Report:
    """All of a run."""

    command: str
    quick: bool
    machine: dict[str, Any]
    method: dict[str, Any]
    groups: list[Group] = field(default_factory=list)
    seconds: float = 0.0
    format: int = FORMAT
    kind: str = KIND
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    load_after: list[float] = field(default_factory=list)
    comparison: dict[str, Any] | None = None  # of `comparison.compare`

    def of(self, suite: str) -> list[Group]:
        """The groups of a suite."""
        return [group for group in self.groups if group.suite == suite]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Report":
        """The report that `to_dict` made; ValueError where it is something else."""
        if not isinstance(data, Mapping) or data.get("kind") != KIND:
            raise ValueError(f"not a report of {KIND}")
        if data.get("format") != FORMAT:
            raise ValueError(f"a report of format {data.get('format')!r}; this version reads format {FORMAT}")
        try:
            groups = [
                Group(**{**group, **{name: [Row(**row) for row in group[name]] for name in ("rows", "controls")}})
                for group in data["groups"]
            ]
            return cls(**{**data, "groups": groups})
        except (TypeError, KeyError) as error:
            raise ValueError(f"a damaged report ({error})") from None

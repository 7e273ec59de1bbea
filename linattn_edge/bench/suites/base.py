"""What all suites are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from linattn_edge.bench.clock import WALL
from linattn_edge.bench.record import Group, Row
from linattn_edge.bench.turns import Run, alternate
from linattn_edge.bench.views import Table


@dataclass(frozen=True)
class Settings:
    """How much to measure, and beside what."""

    quick: bool = False
    rounds: int = 60  # turns of each contestant
    turn: float = 5e-3  # seconds of a turn
    budget: float = 2.0  # seconds of a slow contestant, all turns together
    peers: tuple[str, ...] = ()  # packages, and "softmax"
    model: Path | None = None  # by default the bundled one

    @classmethod
    def short(cls, **options: object) -> "Settings":
        """Few rounds and small sizes: to see that all runs."""
        return cls(quick=True, rounds=5, turn=1e-3, budget=0.1, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Job:
    """One group that is still to be measured."""

    title: str
    run: Callable[[], Group]


@dataclass(frozen=True)
class Suite:
    """One entry of SUITES: what it measures, and how that is shown."""

    help: str
    plan: Callable[[Settings], list[Job]]
    tables: Callable[[list[Group]], list[Table]]


def measure(
    group: Group,
    settings: Settings,
    contestants: Mapping[str, Run],
    absent: Mapping[str, str] | None = None,
    clock: str = WALL,
    rounds: int | None = None,
) -> Group:
    """Let them take turns, and add a row for each; also for those that are absent, with the reason."""
    found = alternate(contestants, rounds or settings.rounds, settings.turn, settings.budget)
    group.rows += [Row(name, time=time, clock=clock) for name, time in found.items()]
    group.rows += [Row(name, note=reason) for name, reason in (absent or {}).items()]
    return group

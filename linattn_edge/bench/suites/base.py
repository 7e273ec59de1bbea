"""What all suites are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linattn_edge.bench.clock import WALL
from linattn_edge.bench.inputs import aligned
from linattn_edge.bench.record import Group, Row
from linattn_edge.bench.statistics import summary
from linattn_edge.bench.turns import Array, Run, take_turns, timed
from linattn_edge.bench.views import Table


@dataclass(frozen=True)
class Settings:
    """How much to measure, and beside what."""

    quick: bool = False
    rounds: int = 45  # turns of each contestant
    turn: float = 5e-3  # seconds of a turn
    budget: float = 1.5  # seconds of a slow contestant, all turns together
    builds: int = 3  # how often contestants are made anew, elsewhere in memory
    peers: tuple[str, ...] = ()  # packages, and "softmax"
    model: Path | None = None  # by default the bundled one

    @classmethod
    def short(cls, **options: object) -> "Settings":
        """Few rounds and small sizes: to see that all runs."""
        return cls(quick=True, rounds=6, turn=1e-3, budget=0.1, builds=2, **options)  # type: ignore[arg-type]


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


CONTROL = "NumPy's exp of 4096 numbers"


def control(clock: str) -> Run:
    """A contestant of every group in which none of our code is: arithmetic on numbers that stay in the first cache."""
    x, y = aligned((4096,)), aligned((4096,))
    return timed(lambda: np.exp(x, out=y), clock)


Built = tuple[Mapping[str, Run], Mapping[str, str]]  # contestants, and why others are absent


def measure(
    group: Group,
    settings: Settings,
    build: Callable[[], Built],
    clock: str = WALL,
    rounds: int | None = None,
    controlled: bool = True,
) -> Group:
    """Let them take turns, and add a row for each; also for those that are absent, with the reason.

    Contestants are built several times, each time in memory of their own, and share the rounds: where pages happen to
    lie can double a time. controlled: with a `control` among them; without, they bring one of their own.
    """
    taken: dict[str, list[Array]] = {}
    absent: dict[str, str] = {}
    kept = []  # so that the next ones can't get the same memory
    for _ in range(settings.builds):
        contestants, reasons = build()
        if controlled:
            contestants = {**contestants, CONTROL: control(clock)}
        kept.append(contestants)
        absent |= reasons
        share = -(-(rounds or settings.rounds) // settings.builds)
        for name, samples in take_turns(contestants, share, settings.turn, settings.budget / settings.builds).items():
            taken.setdefault(name, []).append(samples)
    if controlled:
        group.controls.append(Row(CONTROL, time=summary(np.concatenate(taken.pop(CONTROL))), clock=clock))
    for name, parts in taken.items():
        if name not in absent:
            group.rows.append(Row(name, time=summary(np.concatenate(parts)), clock=clock))
    group.rows += [Row(name, note=reason) for name, reason in absent.items()]
    return group

"""A run beside an older one: ratios, with a band that says how far they can be trusted."""

import math
from typing import Any

from linattn_edge.bench.peers import PEERS
from linattn_edge.bench.record import Group, Report, Row
from linattn_edge.bench.roofline import COPY, LARGE_COPY, SWEEP
from linattn_edge.bench.suites.context import SOFTMAX
from linattn_edge.bench.views import Table, figure, percent, times, word

LEAST_BAND = 0.05  # where memory happens to lie differs from process to process, and no run can see that
MACHINE = (SWEEP, COPY, LARGE_COPY)  # the memory's own speed
LEAST_SAMPLES = 3  # fewer say nothing of their noise
FOREIGN = {*MACHINE, SOFTMAX, *(name for builders in PEERS.values() for name in builders)}  # not our code
SLOWER, FASTER, SAME = "slower", "faster", "within noise"


class Regression(ValueError):
    """Something is slower than was allowed."""


def key(group: Group, row: Row) -> tuple[Any, ...]:
    """What a row is about, the same in every run."""
    return group.suite, group.title, row.name, *sorted((name, str(value)) for name, value in row.case.items())


def compare(old: Report, new: Report, fail_above: float | None = None) -> dict[str, Any]:
    """Ratios new / old of the least times of our own rows; those slower by more than fail_above percent, noise apart.

    A row's band is the root of the sum of the squares of the noise of both measurements and of how much the controls of
    its group, in which none of our code is, changed between the runs; at least LEAST_BAND. Slower or faster is what
    lies outside of it.
    """
    before = {key(group, row): row for group in old.groups for row in (*group.rows, *group.controls) if row.time}
    drifts = [drift for group in new.groups if (drift := machine_drift(before, group)) is not None]
    usual = sorted(drifts)[len(drifts) // 2] if drifts else 0.0
    rows, missing = [], 0
    for group in new.groups:
        own = machine_drift(before, group)
        drift = usual if own is None else own
        for row in group.rows:
            if not row.time or row.name in FOREIGN or "from" in row.case:  # a stretch of the stream: it has no turns
                continue
            past = before.get(key(group, row))
            if past is None or not past.time:
                missing += 1
                continue
            if min(past.time["samples"], row.time["samples"]) < LEAST_SAMPLES:
                continue
            ratio = row.time["min"] / past.time["min"]
            band = max(LEAST_BAND, math.hypot(past.time["noise"], row.time["noise"], drift))
            verdict = SLOWER if ratio > 1 + band else FASTER if ratio < 1 / (1 + band) else SAME
            rows.append(
                {
                    "suite": group.suite,
                    "title": group.title,
                    "name": row.name,
                    "case": row.case,
                    "unit": row.unit,
                    "old": past.time["min"],
                    "new": row.time["min"],
                    "ratio": ratio,
                    "band": band,
                    "verdict": verdict,
                    "fails": fail_above is not None and verdict == SLOWER and ratio > 1 + fail_above / 100,
                }
            )
    return {
        "old": {"date": old.date, "revision": old.machine.get("revision"), "cpu": old.machine["cpu"]},
        "fail_above": fail_above,
        "machine_drift": usual,
        "rows": rows,
        "notes": notes(old, new, len(rows), missing),
    }


def machine_drift(before: dict[tuple[Any, ...], Row], group: Group) -> float | None:
    """How much the group's controls, sweeps and copies changed, as a share; None where none is in both."""
    found = []
    for now in (*group.controls, *(row for row in group.rows if row.name in MACHINE)):
        past = before.get(key(group, now))
        if now.time and past is not None and past.time:
            ratio = now.time["min"] / past.time["min"]
            found.append(max(ratio, 1 / ratio) - 1)
    return max(found, default=None)


def notes(old: Report, new: Report, both: int, missing: int) -> list[str]:
    """What a reader must know before believing the ratios."""
    found = []
    if not both:
        raise ValueError(f"--compare: the two runs have no row in common with {LEAST_SAMPLES} samples or more")
    if old.machine["cpu"] != new.machine["cpu"]:
        found.append(f"The old run was on another CPU, {old.machine['cpu']}.")
    if old.machine.get("gpu") != new.machine.get("gpu"):
        found.append(f"The old run was on another GPU, {old.machine.get('gpu')}.")
    if old.quick != new.quick:
        found.append("One of the runs is a quick one.")
    if missing:
        found.append(f"{missing} rows are not in the old run.")
    return found


def failures(comparison: dict[str, Any]) -> int:
    """How many rows are slower by more than was allowed."""
    return sum(row["fails"] for row in comparison["rows"])


def about(row: dict[str, Any]) -> str:
    """A row in words."""
    case = ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else str(value) for name, value in row["case"].items()
    )
    name = "" if row["name"] == "linattn_edge" else f": {row['name']}"
    return f"{row['title']}{name}{f' ({case})' if case else ''}"


def table(comparison: dict[str, Any]) -> Table:
    """What changed first, the most changed on top; then how many did not."""
    rows = comparison["rows"]
    changed = sorted((row for row in rows if row["verdict"] != SAME), key=lambda row: -row["ratio"])
    cells = [
        [
            word(row["suite"]),
            word(about(row)),
            figure(row["old"]),
            figure(row["new"]),
            times(row["ratio"]),
            percent(row["band"]),
            word(row["verdict"] + (", FAILS" if row["fails"] else "")),
        ]
        for row in changed
    ]
    old = comparison["old"]
    revision = f" ({old['revision']})" if old["revision"] else ""
    text = (
        f"New over old, least times, with the run of {old['date']}{revision}. {len(rows) - len(changed)} of "
        f"{len(rows)} rows are the same within their noise band and not shown. The band of a row comes from how well "
        "both measurements repeat and from how much the machine itself changed in between, by code that is not ours "
        f"(mostly {comparison['machine_drift']:.0%})."
    )
    text += "".join(f" {note}" for note in comparison["notes"])
    if (limit := comparison["fail_above"]) is not None:
        text += f" Slower by more than {limit:g} % and beyond the band: {failures(comparison)}."
    header = ["suite", "what", "old", "new", "new / old", "band ±", ""]
    return Table("Beside the older run", text, header, cells, left=2)

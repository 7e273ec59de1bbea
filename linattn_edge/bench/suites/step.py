"""One token, by rule, heads, widths and batch; beside peers, and beside what memory allows."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from linattn_edge.attention import LinearAttention
from linattn_edge.bench.inputs import layer_inputs, make_layer, steppers
from linattn_edge.bench.peers import Builder, Problem, agreeing, builders
from linattn_edge.bench.record import OURS, Group
from linattn_edge.bench.roofline import SWEEP, roofline, step_bytes, sweep
from linattn_edge.bench.suites.base import Built, Job, Settings, measure
from linattn_edge.bench.turns import timed
from linattn_edge.bench.views import (
    ABSENT,
    Cell,
    Table,
    count,
    figure,
    figures,
    layer_name,
    memory,
    percent,
    times,
    word,
)

SIZES = ((1, 8, 64), (1, 32, 64), (1, 32, 128), (8, 8, 64))  # B, H, d
RULES = ("linear", "gated", "delta", "gated_delta")


def plan(settings: Settings) -> list[Job]:
    """Every size with every rule, and with the normalised elu layer of the first papers."""
    jobs = []
    for B, H, d in SIZES[:1] if settings.quick else SIZES:
        for rule in RULES:
            case = {"rule": rule, "map": "identity", "B": B, "H": H, "d": d}
            jobs.append(Job(title(case), partial(beside_peers, settings, case)))
        case = {"rule": "linear", "map": "elu", "B": B, "H": H, "d": d}
        jobs.append(Job(title(case), partial(alone, settings, case)))
    return jobs


def title(case: Mapping[str, Any]) -> str:
    phi = ", elu, normalised" if case["map"] == "elu" else ""
    return f"one token, {case['rule']}{phi}, B = {case['B']}, H = {case['H']}, d = {case['d']}"


def beside_peers(settings: Settings, case: dict[str, Any], candidates: Mapping[str, Builder] | None = None) -> Group:
    """Ours and the peers on the same tensors; who gives other answers is not timed."""
    problem = Problem(case["rule"], case["H"], case["d"], case["B"])
    found = builders(settings.peers) if candidates is None else candidates
    return finish(settings, case, problem.layer(), lambda: agreeing(problem, found))


def alone(settings: Settings, case: dict[str, Any]) -> Group:
    """A layer that the peers have no operator for."""
    attn = make_layer(case["rule"], case["d"], case["H"])
    return finish(settings, case, attn, lambda: ({OURS: timed(steppers([attn], case["B"])[0])}, {}))


def finish(settings: Settings, case: dict[str, Any], attn: LinearAttention, build: Callable[[], Built]) -> Group:
    """Measure, and hold the step beside a sweep of as much memory as the state takes."""
    group = Group("step", title(case), case)
    state = attn.init_state(case["B"])
    swept = state.S.nbytes

    def all_of_them() -> Built:
        contestants, absent = build()
        return {**contestants, SWEEP: sweep(swept)}, absent

    measure(group, settings, all_of_them)
    ours, control = group.row(OURS), group.row(SWEEP)
    if ours and ours.time and control and control.time:
        moved = step_bytes(attn, layer_inputs(attn, (case["B"],)))
        ours.values |= roofline(ours.time["min"], moved, control.time["min"], swept)
        ours.values["state bytes"] = state.nbytes
    group.add_ratios()
    return group


def tables(groups: list[Group]) -> list[Table]:
    """Ours, what memory allows, then the peers' ratios."""
    own, memory_, ratios = [], [], []
    timed_rows = [row for group in groups for row in group.rows if row.time]
    names = list(dict.fromkeys(row.name for row in timed_rows if row.name not in (OURS, SWEEP)))
    for group in groups:
        ours = group.row(OURS)
        if ours is None or ours.time is None:
            continue
        about, values = what(group), ours.values
        state = memory(values.get("state bytes"))
        own.append([*about, *figures(ours.time, ("min", "p50", "p99", "p999")), state])
        speeds = [figure(values.get(name)) for name in ("GB/s", "machine GB/s")]
        moved, share = memory(values.get("bytes moved")), percent(values.get("share of machine"))
        memory_.append([*about, moved, *speeds, share])
        rows = {row.name: row for row in group.rows if row.time}
        if any(name in rows for name in names):
            others = [times(rows[n].values.get(f"times {OURS}")) if n in rows else ABSENT for n in names]
            ratios.append([*about, figure(ours.time["min"]), *others])
    header = ["update rule", "streams", "heads × width"]
    texts = (
        "µs for one call from Python, all checks on: the least, the median, and what 1 call in 100 and 1 in 1000 "
        "exceeds (– where there are too few calls to say). φ is the identity; elu: elu(x) + 1, normalised. state: what "
        "a call reads and writes at any position.",
        "moved: what the call must read and write; GB/s: that, in the least time; possible: what this machine reaches "
        "when one thread does nothing but read and write as much memory, in the cache where that fits; share: how much "
        "of that the call reaches.",
        f"How many times as long as {OURS} each takes, least times, same numbers in and out, one thread each. Below 1 "
        f"it is faster than {OURS}. ONNX Runtime updates its state in place; with two state buffers it reads one and "
        "writes the other, in turn.",
    )
    speed = ["moved", "GB/s", "possible", "share"]
    found = [
        Table("A call of step()", texts[0], [*header, "least", "median", "p99", "p99.9", "state"], own),
        Table("Beside the memory's speed", texts[1], [*header, *speed], memory_),
    ]
    if ratios:
        found.append(Table("The same token by other means", texts[2], [*header, f"{OURS}, µs", *names], ratios))
    return found


def what(group: Group) -> list[Cell]:
    case = group.case
    return [word(layer_name(case)), count(case["B"]), word(f"{case['H']} × {case['d']}")]

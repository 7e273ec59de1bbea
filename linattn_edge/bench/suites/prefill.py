"""Many tokens in one call."""

from functools import partial

import numpy as np

from linattn_edge.bench.clock import CPU
from linattn_edge.bench.inputs import layer_inputs, make_layer
from linattn_edge.bench.record import Group, Row
from linattn_edge.bench.suites.base import Built, Job, Settings, measure
from linattn_edge.bench.turns import timed
from linattn_edge.bench.views import ABSENT, Table, count, figure, layer_name, word

RULES = ("linear", "gated", "gated_delta")
LENGTHS = (16, 64, 512, 4096)


def plan(settings: Settings) -> list[Job]:
    """Every rule at every width, prompts of several lengths in turn."""
    jobs = []
    for d in (64,) if settings.quick else (64, 128):
        for rule in RULES:
            lengths = LENGTHS[:2] if settings.quick else LENGTHS
            jobs.append(Job(f"prefill, {rule}, d = {d}", partial(prompt, settings, rule, d, lengths)))
    return jobs


def prompt(settings: Settings, rule: str, d: int, lengths: tuple[int, ...]) -> Group:
    """Per token of a prompt, by its length."""
    attn = make_layer(rule, d)
    case = {"rule": rule, "map": attn.layer.phi.name, "H": attn.layer.H, "d": d}
    group = Group("prefill", f"{rule}, H = {attn.layer.H}, d = {d}", case)

    def build() -> Built:
        contestants = {}
        for T in lengths:
            x = layer_inputs(attn, (1, T))
            call = partial(attn.prefill, **x, state=attn.init_state(), out=np.empty_like(x["v"]))
            contestants[f"T = {T}"] = timed(call, CPU, T)
        return contestants, {}

    measure(group, settings, build, clock=CPU)
    for row, T in zip(group.rows, lengths, strict=True):
        row.case["T"] = T
    return group


def tables(groups: list[Group]) -> list[Table]:
    """A row for each layer, a column for each length."""
    lengths = sorted({row.case["T"] for group in groups for row in group.rows})
    rows = []
    for group in groups:
        by_length: dict[int, Row] = {row.case["T"]: row for row in group.rows}
        cells = [figure((by_length[T].time or {}).get("min")) if T in by_length else ABSENT for T in lengths]
        rows.append([word(layer_name(group.case)), count(group.case["H"]), count(group.case["d"]), *cells])
    return [
        Table(
            "A prompt in one call",
            "µs of CPU time for each token of a prompt of T tokens given to prefill(), least of many. φ is the "
            "identity; elu: elu(x) + 1, normalised.",
            ["update rule", "heads", "width", *(f"T = {T:,}" for T in lengths)],
            rows,
        )
    ]

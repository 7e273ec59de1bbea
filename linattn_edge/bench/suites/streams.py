"""Many streams at once: one call for all of them, in one state or in a pool, beside a call for each."""

from functools import partial
from itertools import cycle

import numpy as np

from linattn_edge.bench.inputs import layer_inputs, make_layer, steppers
from linattn_edge.bench.record import Group
from linattn_edge.bench.suites.base import Built, Job, Settings, measure
from linattn_edge.bench.turns import timed
from linattn_edge.bench.views import Table, count, figure, figures, memory
from linattn_edge.streams import StreamPool

H, D = 8, 64
TOGETHER, POOL, APART = "one call", "one call of a pool", "a call for each"


def plan(settings: Settings) -> list[Job]:
    """By how many streams there are."""
    counts = (1, 8) if settings.quick else (1, 8, 64, 256)
    return [Job(f"{B} streams", partial(streams, settings, B)) for B in counts]


def streams(settings: Settings, B: int) -> Group:
    """One token of each of B streams."""
    attn = make_layer("gated", D, H)
    case = {"rule": "gated", "B": B, "H": H, "d": D}
    group = Group("streams", f"{B} streams, gated, H = {H}, d = {D}", case)

    def build() -> Built:
        x = layer_inputs(attn, (1,))
        out = np.empty_like(x["v"])
        pool = StreamPool(attn, B)
        inputs = layer_inputs(attn, (B,))
        q, k, v, g = (inputs[name] for name in "qkvg")
        ids, y = np.array([pool.open() for _ in range(B)]), np.empty_like(v)
        turn = cycle([partial(attn.step, **x, state=attn.init_state(), out=out) for _ in range(B)])
        return {
            TOGETHER: timed(steppers([attn], B)[0], units=B),
            POOL: timed(partial(pool.step, ids, q, k, v, g, out=y), units=B),
            APART: timed(lambda: next(turn)()),
        }, {}

    measure(group, settings, build)
    for row in group.rows:
        if row.time:
            row.values["tokens/s"] = 1e6 / row.time["p50"]
        row.values["state bytes"] = B * attn.init_state().nbytes
    return group


def tables(groups: list[Group]) -> list[Table]:
    """A row for each number of streams."""
    rows = []
    for group in groups:
        together, pooled, apart = group.row(TOGETHER), group.row(POOL), group.row(APART)
        if together and apart and together.time and apart.time:
            rows.append(
                [
                    count(group.case["B"]),
                    *figures(together.time, ("min", "p50", "p99")),
                    figure(together.values["tokens/s"]),
                    figure(pooled.time["min"] if pooled and pooled.time else None),
                    figure(apart.time["min"]),
                    memory(together.values["state bytes"]),
                ]
            )
    text = (
        f"µs for each stream's token, gated, {H} heads of width {D}, one thread. One call of step() moves all streams "
        "of one state on; one call of a pool's step() those that are named, here all; or a call for each, with a "
        "state of its own. tokens/s: of one state's streams together, at the median."
    )
    header = ["streams", "least", "median", "p99", "tokens/s", "a pool, least", "a call for each, least", "all states"]
    return [Table("A token of each stream", text, header, rows)]

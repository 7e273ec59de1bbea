"""What a token costs by how many came before it: the state, and softmax over a growing cache."""

import gc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from linattn_edge.attention import LinearAttention
from linattn_edge.bench.clock import CLOCKS, WALL
from linattn_edge.bench.machine import free_memory, resident_memory
from linattn_edge.bench.peers import TOLERANCE
from linattn_edge.bench.record import OURS, Group, Row
from linattn_edge.bench.statistics import histogram, summary
from linattn_edge.bench.suites.base import Built, Job, Settings, measure
from linattn_edge.bench.turns import Array, Run, timed
from linattn_edge.bench.views import ABSENT, Cell, Table, count, figure, figures, memory, times, word
from linattn_edge.kernels.layout import STEP
from linattn_edge.reference import softmax_attention
from linattn_edge.softmax import SoftmaxAttention, SoftmaxState
from linattn_edge.state import State
from linattn_edge.terminal import size

H, D = 8, 64
TOKENS = 1_000_000
MOST_CACHE = 1 << 30  # bytes that the softmax cache may take, where the machine has four times as much free
SOFTMAX = "softmax"
TIME_CROSSES, MEMORY_CROSSES = "time crosses at", "memory crosses at"  # tokens
OLD_OVER_FRESH, GROWN = "old / fresh", "resident bytes grown"


def plan(settings: Settings) -> list[Job]:
    """A stream, its end beside its beginning, and softmax."""
    tokens = 20_000 if settings.quick else TOKENS
    attn = LinearAttention(H, D)
    state = attn.init_state()
    jobs = [
        Job(f"a stream of {tokens:,} tokens", lambda: stream(attn, state, tokens)),
        Job("its end beside its beginning", lambda: ends(settings, attn, state)),
    ]
    if SOFTMAX in settings.peers:
        jobs.append(Job("softmax over a growing cache", lambda: softmax(settings, attn, tokens)))
    return jobs


def positions(last: int) -> list[int]:
    """1, 3, 10, 30 … up to last, which is one of them."""
    found = [n * 10**power for power in range(len(str(last))) for n in (1, 3)]
    return [n for n in found if n < last] + [last]


def few_tokens(count: int = 8) -> list[tuple[Array, Array, Array]]:
    """q, k and v [1, H, D] of some tokens."""
    draw = np.random.default_rng(0).standard_normal((count, 3, 1, H, D), dtype=np.float32)
    return [(q.copy(), k.copy(), v.copy()) for q, k, v in draw]


def stream(attn: LinearAttention, state: State, tokens: int) -> Group:
    """One stream, every step of it timed."""
    group = Group("context", f"a stream of {tokens:,} tokens", {"part": "stream", "H": H, "d": D, "tokens": tokens})
    times, out = np.full(tokens, np.nan), np.empty((1, H, D), np.float32)
    inputs, now, step = few_tokens(), CLOCKS[WALL], attn.step
    mask, stops = len(inputs) - 1, [at for at in positions(tokens) if at >= 10]
    other = attn.init_state()
    for i in range(2000):  # warm up, on a state of its own
        q, k, v = inputs[i & mask]
        begin = now()
        step(q, k, v, other, out=out)
        times[i] = now() - begin
    state.reset()  # touches its memory
    collecting = gc.isenabled()
    gc.disable()
    resident = []
    try:
        start = 0
        for end in stops:
            for i in range(start, end):
                q, k, v = inputs[i & mask]
                begin = now()
                step(q, k, v, state, out=out)
                times[i] = now() - begin
            start = end
            resident.append(resident_memory())
    finally:
        if collecting:
            gc.enable()
    times *= 1e-3
    start = 0
    for end, held in zip(stops, resident, strict=True):
        row = Row(OURS, {"from": start, "position": end}, summary(times[start:end]), {"state bytes": state.nbytes})
        if held is not None:
            row.values["resident bytes"] = held
        group.rows.append(row)
        start = end
    group.rows.append(Row("all of the stream", {}, summary(times), {}, histogram=histogram(times)))
    early = stops.index(min(1000, tokens))
    if (then := resident[early]) is not None and (last := resident[-1]) is not None:
        group.values[GROWN] = last - then
    return group


def ends(settings: Settings, attn: LinearAttention, state: State) -> Group:
    """The state at the end of the stream and a fresh one, in turn, in the same memory: only what it holds differs."""
    group = Group("context", "its end beside its beginning", {"part": "ends", "H": H, "d": D})
    q, k, v = few_tokens(1)[0]
    old, fresh = state.copy(), attn.init_state()

    def build() -> Built:
        here, out = attn.init_state(), np.empty((1, H, D), np.float32)

        def holding(kept: State) -> Run:
            run = timed(lambda: attn.step(q, k, v, here, out=out))

            def contestant(n: int) -> Array:
                assert kept.z is not None
                here.S, here.z, here.position = kept.S, kept.z, kept.position
                attn.step(q, k, v, here, out=out)
                return run(n)

            return contestant

        return {"old": holding(old), "fresh": holding(fresh)}, {}

    measure(group, settings, build, rounds=4 * settings.rounds)
    for row, kept in zip(group.rows, (old, fresh), strict=True):
        row.case["position"] = int(kept.position[0])
        row.values["state bytes"] = kept.nbytes
    group.add_ratios("fresh")
    group.values[OLD_OVER_FRESH] = group.rows[0].values["times fresh"]
    return group


def cache_positions(tokens: int, limit: int) -> list[int]:
    """Positions up to the last one whose cache fits."""
    most = min(tokens, limit // (4 * 2 * H * D))
    return positions(most)


def softmax(settings: Settings, attn: LinearAttention, tokens: int) -> Group:
    """A step at each position of one cache, and of a state, in turn."""
    group = Group("context", "softmax over a growing cache", {"part": "softmax", "H": H, "d": D})
    exact = SoftmaxAttention(H, D)
    wrong = softmax_disagreement(exact)
    if wrong:
        group.rows.append(Row(SOFTMAX, note=f"NOT TIMED, {wrong}"))
        return group
    limit = (1 << 22) if settings.quick else min(MOST_CACHE, free_memory() // 4)
    at = cache_positions(tokens, limit)
    cache = filled(exact, at[-1])
    q, k, v = few_tokens(1)[0]
    state = attn.init_state()

    def build() -> Built:
        own, out = attn.init_state(), np.empty((1, H, D), np.float32)
        step = compiled_step(exact, cache, q, k, v, out)
        contestants = {OURS: timed(lambda: attn.step(q, k, v, own, out=out))}
        for position in at:
            contestants[f"{SOFTMAX} {position}"] = timed(step, before=rewind(cache, position - 1))
        return contestants, {}

    measure(group, settings, build)
    ours, rest = group.rows[0], group.rows[1:]
    ours.values["state bytes"] = state.nbytes
    for row, position in zip(rest, at, strict=True):
        row.name, row.case["position"] = SOFTMAX, position
        row.values["cache bytes"] = 4 * 2 * H * D * position
    group.add_ratios()
    assert ours.time is not None
    scans = [row.time["min"] for row in rest if row.time]
    for name, limit_, series in (
        (TIME_CROSSES, ours.time["min"], scans),
        (MEMORY_CROSSES, state.nbytes, [row.values["cache bytes"] for row in rest]),
    ):
        found = crossing(at, series, limit_)
        if found is not None:
            group.values[name] = found
    if at[-1] < tokens:
        group.notes.append(
            f"The softmax cache ends at {at[-1]:,} tokens: at {tokens:,} it would take {size(4 * 2 * H * D * tokens)}."
        )
    return group


def filled(exact: SoftmaxAttention, tokens: int) -> SoftmaxState:
    """A cache of that many random tokens, and room for a few more."""
    cache = exact.init_state(1, capacity=tokens + 8)
    piece = np.random.default_rng(1).standard_normal((2, 1, 4096, H, D), dtype=np.float32)
    for start in range(0, tokens, 4096):
        n = min(4096, tokens - start)
        exact.write(piece[0, :, :n], piece[1, :, :n], cache)
    return cache


def compiled_step(exact: SoftmaxAttention, cache: SoftmaxState, q: Array, k: Array, v: Array, out: Array) -> Any:
    """The kernel behind `SoftmaxAttention.step`, without the Python around it: at its best, also over a short cache."""
    from linattn_edge.kernels import softmax as kernels

    attend, lengths, scale = kernels.attend("float32"), np.zeros(0, np.int64), np.float32(exact.scale)
    given, place = [x[:, None] for x in (q, k, v)], out[:, None]
    held = cache._keys, cache._values, cache._position, cache._scratch
    return lambda: attend(*given, lengths, place, *held, scale, exact.check_finite, STEP)


def rewind(cache: SoftmaxState, position: int) -> Any:
    def back() -> None:
        cache._position[...] = position

    return back


def softmax_disagreement(exact: SoftmaxAttention) -> str | None:
    """What the baseline gets wrong in some tokens, or None."""
    q, k, v = np.random.default_rng(2).standard_normal((3, 1, 300, H, D), dtype=np.float32)
    right = softmax_attention(q, k, v)
    cache = exact.init_state()
    got = np.stack([exact.step(q[:, t], k[:, t], v[:, t], cache) for t in range(q.shape[1])], axis=1)
    error = np.abs(got - right).max() / np.abs(right).max()
    return None if error <= TOLERANCE else f"its output is off by {error:.1e}"


def crossing(at: Sequence[int], series: Sequence[float], level: float) -> float | None:
    """From where on a series stays above the level, between its points along a line in logarithms; None if nowhere."""
    below = [i for i, value in enumerate(series) if value <= level]
    if not below:
        return float(at[0])
    if (i := below[-1]) == len(series) - 1:
        return None
    share = math.log(level / series[i]) / math.log(series[i + 1] / series[i])
    return float(at[i] * (at[i + 1] / at[i]) ** share)


def part(groups: list[Group], name: str) -> Group | None:
    """The group of that part, if it was measured."""
    return next((group for group in groups if group.case["part"] == name), None)


def tables(groups: list[Group]) -> list[Table]:
    """The stream and softmax side by side, then the end beside the beginning."""
    found = []
    flow, both, scan = (part(groups, name) for name in ("stream", "ends", "softmax"))
    exact = {row.case["position"]: row for row in scan.rows if row.name == SOFTMAX and row.time} if scan else {}
    if flow is not None:
        rows: list[list[Cell]] = []
        for row in flow.rows:
            if "position" not in row.case:
                continue
            mine = [
                count(row.case["position"]),
                *figures(row.time, ("min", "p50", "p99")),
                memory(row.values["state bytes"]),
            ]
            other = exact.pop(row.case["position"], None)
            theirs = [ABSENT, ABSENT]
            if other is not None and other.time:
                theirs = [figure(other.time["min"]), memory(other.values["cache bytes"])]
            rows.append([*mine, *theirs])
        total = flow.rows[-1]
        rows.append([word("all"), *figures(total.time, ("min", "p50", "p99")), ABSENT, ABSENT, ABSENT])
        text = (
            f"One stream of {flow.case['tokens']:,} tokens, linear with φ = elu(x) + 1, {H} heads of width {D}, every "
            "step timed; µs a token, of the tokens from the position in the row above to this one. softmax: one token "
            "over a cache of as many keys and values, the compiled scan alone, without the Python call and checks that "
            "are part of the other."
        )
        for name, what in ((TIME_CROSSES, "slower"), (MEMORY_CROSSES, "larger")):
            if scan is not None and (at := scan.values.get(name)) is not None:
                text += f" Softmax is {what} from position {at:,.0f} on."
        if scan is not None:
            text += "".join(f" {note}" for note in scan.notes)
        header = ["position", "least", "median", "p99", "state", "softmax, least", "its cache"]
        found.append(Table("A token at every position", text, header, rows))
    if both is not None:
        rows = [
            [word(f"{row.name} state"), count(row.case["position"]), *figures(row.time, ("min", "p50", "p99")),
             memory(row.values["state bytes"]), times(row.values.get("times fresh"))]
            for row in both.rows
        ]  # fmt: skip
        text = "The state at the end of that stream and a fresh one, in turn, in the same memory; µs a token."
        if flow is not None and GROWN in flow.values:
            text += f" From position 1,000 to the end the whole process grew by {flow.values[GROWN]:,} bytes of memory."
        header = ["", "position", "least", "median", "p99", "state", "over fresh"]
        found.append(Table("The end beside the beginning", text, header, rows))
    return found

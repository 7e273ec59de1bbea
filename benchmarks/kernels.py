"""What a token costs: our kernels beside a C yardstick, NumPy, ONNX Runtime and torch, taking turns in one process.

    python benchmarks/kernels.py --json kernels.json
    python benchmarks/table.py kernels.json docs/kernels.md

Compare only figures of one run. `min` is the least of many samples, `p10` their tenth percentile; a ratio "a / b" is
given for both. Ours is timed from Python, so the call, all checks and exp of g are in it; the yardstick is timed
inside C and has none of these.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported: one thread for every contestant
os.environ.setdefault("MKL_NUM_THREADS", "1")

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from yardstick import Yardstick

import linattn_edge as la
from linattn_edge.bench.clock import CPU, WALL
from linattn_edge.bench.inputs import layer_inputs, make_layer, steppers
from linattn_edge.bench.machine import load, machine
from linattn_edge.bench.peers import Problem, agreeing, builders
from linattn_edge.bench.statistics import ratio, summary
from linattn_edge.bench.suites.startup import first_call
from linattn_edge.bench.turns import Missing, Run, alternate, timed
from linattn_edge.terminal import status as progress

H = 32  # heads, unless said otherwise
FORMAT = 1  # of the JSON file


@dataclass
class Settings:
    """How much to measure."""

    quick: bool = False
    rounds: int = 150
    turn: float = 5e-3
    budget: float = 6.0
    yardstick: Yardstick | None = None
    why_no_yardstick: str = ""

    def widths(self) -> tuple[int, ...]:
        return (64,) if self.quick else (64, 128)


@dataclass
class Group:
    """Contestants that took turns, and what came out. Times are in `unit`, per token and layer."""

    suite: str
    title: str
    case: dict[str, Any]
    clock: str = WALL
    unit: str = "µs"
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    load: list[float] = field(default_factory=load)

    def measure(self, settings: Settings, contestants: dict[str, Run], many_states: bool = False) -> None:
        """Let them take turns; fewer and longer ones where each must first bring its states back into cache."""
        progress(f"{self.suite}: {self.title} …")
        rounds, turn = settings.rounds, settings.turn
        if many_states:
            rounds, turn = rounds // 4, turn * 8
        self.times |= alternate(contestants, rounds, turn, settings.budget)

    def compare(self, *pairs: tuple[str, str]) -> None:
        """Add a / b for each pair (a, b) of which both were timed."""
        for a, b in pairs:
            if a in self.times and b in self.times:
                self.ratios[f"{a} / {b}"] = ratio(self.times[a], self.times[b])

    def show(self) -> None:
        progress("")
        print(f"{self.suite}: {self.title} ({self.clock}, load {' '.join(map(str, self.load[:1])) or 'not known'})")
        width = max([len(name) for name in (*self.times, *self.ratios, *self.values)], default=0)
        digits = 2 if self.unit == "µs" else 3
        if self.times:
            print(f"  {'':<{width}}  {'min':>9}  {'p10':>9}  {self.unit}")
        for name, time_ in self.times.items():
            print(f"  {name:<{width}}  {time_['min']:>9.{digits}f}  {time_['p10']:>9.{digits}f}")
        for name, found in self.ratios.items():
            print(f"> {name:<{width}}  {found['min']:>9.2f}  {found['p10']:>9.2f}")
        for name, value in self.values.items():
            print(f"> {name:<{width}}  {value:>9.3g}")
        for note in self.notes:
            print(f"  {note}")
        print(flush=True)


def rotation(attn: la.LinearAttention, layers: int, dtype: str = "float32") -> Callable[[], object]:
    """One token through `layers` states, each a layer's own; inputs are shared."""
    if layers == 1:
        return steppers([attn], dtype=dtype)[0]
    x = layer_inputs(attn, (1,))
    out = np.empty_like(x["v"])
    calls = [partial(attn.step, **x, state=attn.init_state(1, dtype), out=out) for _ in range(layers)]

    def token() -> None:
        for call in calls:
            call()

    return token


def yardstick_note(settings: Settings, group: Group) -> bool:
    """True with a yardstick at hand; else the group says why there is none."""
    if settings.yardstick is None:
        group.notes.append(f"no C yardstick: {settings.why_no_yardstick}")
    return settings.yardstick is not None


def step(settings: Settings) -> Iterator[Group]:
    """One token, H = 32: one layer, and 24 layers' states in rotation (which leave the inner caches)."""
    for d in settings.widths():
        for layers in (1, 24):
            clock = WALL if layers == 1 else CPU
            plural = "" if layers == 1 else f"s, {layers * H * d * d * 4 / 2**20:.0f} MiB of states"
            group = Group("step", f"H = {H}, d = {d}, {layers} layer{plural}", {"d": d, "layers": layers}, clock)
            contestants: dict[str, Run] = {}
            if yardstick_note(settings, group):
                for kernel in Yardstick.KERNELS:
                    contestants[f"C {kernel}"] = settings.yardstick.contestant(kernel, H, d, layers, clock=clock)
            rules = {"linear": "linear, normalised", "gated": "gated", "delta": "delta", "gated_delta": "gated_delta"}
            for rule, name in rules.items():
                contestants[name] = timed(rotation(make_layer(rule, d), layers), clock, layers)
            group.measure(settings, contestants, many_states=layers > 1)
            group.compare(
                ("gated", "C gated"),
                ("gated_delta", "C gated_delta"),
                ("delta", "C gated_delta"),
                ("linear, normalised", "gated"),
            )
            yield group


def peers(settings: Settings) -> Iterator[Group]:
    """The same token by other means; who gives other answers is named and not timed."""
    for d in settings.widths():
        for rule in ("linear", "gated", "delta", "gated_delta"):
            group = Group("peers", f"{rule}, identity map, H = {H}, d = {d}", {"d": d, "rule": rule})
            contestants, reasons = agreeing(Problem(rule, H, d), builders(("numpy", "torch", "onnxruntime")))
            group.notes += [f"{name}: {reason}" for name, reason in reasons.items()]
            if rule.startswith("gated") and yardstick_note(settings, group):
                contestants["C"] = settings.yardstick.contestant(rule, H, d)
            group.measure(settings, contestants)
            others = [name for name in contestants if name not in ("linattn_edge", "C")]
            group.compare(*((name, "linattn_edge") for name in others), ("linattn_edge", "C"))
            yield group


def prefill(settings: Settings) -> Iterator[Group]:
    """Per token of a prompt, against the yardstick's prompt of 64 tokens."""
    lengths = (128, 512) if settings.quick else (512, 4096, 16384)
    for d in settings.widths():
        for rule in ("gated", "gated_delta"):
            group = Group("prefill", f"{rule}, H = {H}, d = {d}, per token", {"d": d, "rule": rule}, CPU)
            contestants: dict[str, Run] = {}
            if yardstick_note(settings, group):
                contestants["C, T = 64"] = settings.yardstick.contestant(rule, H, d, T=64, clock=CPU)
            attn = make_layer(rule, d)
            for T in lengths:
                x = layer_inputs(attn, (1, T))
                call = partial(attn.prefill, **x, state=attn.init_state(), out=np.empty_like(x["v"]))
                contestants[f"T = {T}"] = timed(call, CPU, T)
            group.measure(settings, contestants)
            first, last = lengths[0], lengths[-1]
            group.compare(*((f"T = {T}", "C, T = 64") for T in lengths), (f"T = {last}", f"T = {first}"))
            yield group


def threads(settings: Settings) -> Iterator[Group]:
    """Two threads against one, by the wall clock; also at sizes where a second thread can't pay."""
    sizes = [(1, 32, 128), (8, 32, 64)]
    if not settings.quick:
        sizes += [(1, 4, 32), (1, 8, 64), (1, 32, 64), (64, 8, 64)]
    for B, heads, d in sizes:
        group = Group("threads", f"gated, B = {B}, H = {heads}, d = {d}", {"B": B, "H": heads, "d": d})
        try:
            one, two = steppers([make_layer("gated", d, heads, num_threads=n) for n in (1, 2)], B)
        except (TypeError, ValueError, NotImplementedError) as error:
            group.notes.append(f"left out: num_threads=2 is refused ({error})")
            yield group
            return
        share = share_of_other_threads(two)
        group.values["CPU time spent outside the calling thread"] = share
        if share < 0.02 and (B, heads, d) == sizes[0]:
            group.notes.append("left out: num_threads=2 does no work on a second thread")
            yield group
            return
        group.measure(settings, {"1 thread": timed(one), "2 threads": timed(two)})
        group.compare(("1 thread", "2 threads"))
        yield group


def share_of_other_threads(call: Callable[[], object], seconds: float = 0.1) -> float:
    """How much of the process's CPU time during calls is not the calling thread's."""
    call()
    end = time.perf_counter() + seconds
    process, thread = time.process_time(), time.thread_time()
    while time.perf_counter() < end:
        for _ in repeat(None, 20):
            call()
    thread = time.thread_time() - thread
    process = time.process_time() - process
    return max(0.0, 1 - thread / process) if process else 0.0


def dispatch(settings: Settings) -> Iterator[Group]:
    """What the way from Python and back costs, and what the checks cost."""
    from numba import njit

    @njit(nogil=True)
    def nothing(q, k, v, S, out):
        return 0

    @njit(nogil=True)
    def nothing_gated(q, k, v, S, g, beta, out):
        return 0

    for rule in ("linear", "gated_delta"):
        group = Group("dispatch", f"{rule}, H = 4, d = 32, checks on, `out` given", {"H": 4, "d": 32, "rule": rule})
        attn = make_layer(rule, 32, 4)
        x, state = layer_inputs(attn, (1,)), attn.init_state()
        q, k, v, g, beta = (x.get(name) for name in ("q", "k", "v", "g", "beta"))
        S, out = state.S, np.empty_like(v)
        if rule == "linear":
            ours: Callable[[], object] = lambda: attn.step(q, k, v, state, out=out)  # noqa: B023, E731
            noop: Callable[[], object] = lambda: nothing(q, k, v, S, out)  # noqa: B023, E731
        else:
            ours = lambda: attn.step(q, k, v, state, g, beta, out=out)  # noqa: B023, E731
            noop = lambda: nothing_gated(q, k, v, S, g, beta, out)  # noqa: B023, E731
        group.measure(settings, {"step": timed(ours, batch=50), "no-op": timed(noop, batch=50)})
        group.values["step - no-op, min"] = group.times["step"]["min"] - group.times["no-op"]["min"]
        group.values["step - no-op, p10"] = group.times["step"]["p10"] - group.times["no-op"]["p10"]
        group.notes.append("no-op: a compiled function of the same arrays; the token's arithmetic is in the step")
        yield group
    for rule in ("linear", "gated", "gated_delta"):
        group = Group("dispatch", f"checks, {rule}, H = {H}, d = 64", {"H": H, "d": 64, "rule": rule})
        with_, without = steppers([make_layer(rule, 64, check_finite=check) for check in (True, False)])
        group.measure(settings, {"check_finite=True": timed(with_), "check_finite=False": timed(without)})
        a, b = group.times.values()
        group.values["share of the finiteness checks, min"] = 1 - b["min"] / a["min"]
        group.values["share of the finiteness checks, p10"] = 1 - b["p10"] / a["p10"]
        yield group


def half(settings: Settings) -> Iterator[Group]:
    """States of half the bytes: 24 layers' states in rotation, and the error after many tokens."""
    d, layers = 128, 24
    group = Group("half", f"gated, H = {H}, d = {d}, {layers} layers", {"d": d, "layers": layers}, CPU)
    attn = make_layer("gated", d)
    contestants = {"float32": timed(rotation(attn, layers), CPU, layers)}
    tokens = 2_000 if settings.quick else 100_000
    for dtype in ("float16", "bfloat16"):
        try:
            attn.init_state(1, dtype)
        except (TypeError, ValueError) as error:
            group.notes.append(f"{dtype}: left out, refused: {error}")
            continue
        contestants[dtype] = timed(rotation(attn, layers, dtype), CPU, layers)
        group.values[f"{dtype}: relative error after {tokens} tokens, decay 0.99"] = drift(dtype, tokens)
    if len(contestants) > 1:
        group.measure(settings, contestants, many_states=True)
        group.compare(("float32", "float16"), ("float32", "bfloat16"))
    yield group


def drift(dtype: str, tokens: int) -> float:
    """RMS error of the last 100 outputs, relative to theirs, against a float64 state."""
    heads, width = 2, 32
    attn = la.LinearAttention(heads, width, feature_map="identity", update_rule="gated", decay=np.log([0.99] * heads))
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, tokens, heads, width), dtype=np.float32)
    got, right = (attn.prefill(q, k, v, attn.init_state(1, kind))[:, -100:] for kind in (dtype, "float64"))
    return float(np.sqrt(np.mean((got - right) ** 2, dtype=np.float64) / np.mean(right**2, dtype=np.float64)))


WARM = "beyond it, warm cache"


def startup(settings: Settings) -> Iterator[Group]:
    """A new process: import Numba, import the library, make a layer, step once; with an empty and a filled cache."""
    group = Group("startup", "first step of a process, H = 8, d = 64", {"H": 8, "d": 64}, unit="s")
    taken: dict[str, list[float]] = {}

    def one(folder: str, kind: str) -> None:
        progress(f"startup: {kind} …")
        importing, numba, rest = first_call(folder)
        taken.setdefault("import linattn_edge", []).append(importing)
        taken.setdefault("import numba", []).append(numba)
        taken.setdefault(kind, []).append(rest)

    try:
        if settings.quick:
            group.notes.append("cold compile: left out by --quick")
            for _ in range(2):
                one("", WARM)
            taken[WARM].pop(0)  # it may have had to compile
        for _ in range(0 if settings.quick else 3):
            with tempfile.TemporaryDirectory() as folder:
                one(folder, "beyond it, cold: one configuration compiled")
                for _ in range(5):
                    one(folder, WARM)
    except Missing as reason:
        group.notes.append(str(reason))
    for name, seconds in taken.items():
        group.times[name] = summary(seconds)
    yield group


SUITES: dict[str, Callable[[Settings], Iterator[Group]]] = {
    suite.__name__: suite for suite in (step, peers, prefill, threads, dispatch, half, startup)
}


def yardstick_disagreement(yardstick: Yardstick) -> str | None:
    """What the yardstick gets wrong in three tokens of two equal heads, or None."""
    heads, T, d = 2, 3, 64
    q, k, v = np.random.default_rng(2).standard_normal((3, T, d), dtype=np.float32) * np.float32(0.2)
    factors = np.full(d, Yardstick.DECAY, np.float32)
    for rule in ("gated", "gated_delta"):
        attn = la.LinearAttention(heads, d, feature_map="identity", update_rule=rule, scale=1, backend="reference")
        state = attn.init_state(1, "float64")
        x = {name: np.repeat(a[None, :, None], heads, axis=2) for name, a in (("q", q), ("k", k), ("v", v))}
        x["g"] = np.full((1, T, heads), np.log(Yardstick.DECAY))
        if rule == "gated_delta":
            x["beta"] = np.full((1, T, heads), Yardstick.BETA)
        right = attn.prefill(**x, state=state)[0, :, 0]
        for pieces in ([slice(0, 3)], [slice(t, t + 1) for t in range(3)]):  # a prefill, and steps
            S = np.zeros((heads, d, d), np.float32)
            o = [yardstick.run(rule, [S], q[p].copy(), k[p].copy(), v[p].copy(), factors, WALL, 1)[1] for p in pieces]
            if not (np.allclose(np.concatenate(o), right, 1e-4, 1e-5) and np.allclose(S, state.S[0], 1e-4, 1e-5)):
                return f"its {rule} gives other numbers"
    return None


def command(options: argparse.Namespace) -> str:
    """How to make these figures again, without this machine's folders."""
    words = ["python benchmarks/kernels.py"]
    words += ["--quick"] if options.quick else []
    words += [f"--rounds {options.rounds}"] if options.rounds else []
    words += [f"--only {suite}" for suite in options.only or ()]
    words += [f"--json {options.json.name}"] if options.json else []
    return " ".join(words)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE too")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: to see that it runs")
    parser.add_argument("--only", action="append", choices=SUITES, metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--rounds", type=int, help="turns of each contestant (150; quick: 4)")
    options = parser.parse_args(arguments)
    settings = Settings(options.quick)
    if options.quick:
        settings.rounds, settings.turn, settings.budget = 4, 1e-3, 0.3
    if options.rounds:
        settings.rounds = options.rounds
    try:
        settings.yardstick = Yardstick()
        wrong = yardstick_disagreement(settings.yardstick)
        if wrong:
            settings.yardstick, settings.why_no_yardstick = None, wrong
    except Missing as reason:
        settings.why_no_yardstick = str(reason)

    about = machine()
    about["compiler"] = settings.yardstick.compiler if settings.yardstick else None
    print(f"{about['cpu']} ({about['llvm_cpu']}), {about['cores']} cores, {about['system']}, load {about['load']}")
    print(f"{about['date']} {about['time']}: {', '.join(f'{a} {b}' for a, b in about['versions'].items())}")
    print(f"yardstick: {about['compiler'] or settings.why_no_yardstick}\n")
    groups: list[Group] = []
    for name in options.only or SUITES:
        for group in SUITES[name](settings):
            group.show()
            groups.append(group)
    print(f"load at the end: {load()}")
    if options.json:
        report = {
            "format": FORMAT,
            "command": command(options),
            "quick": options.quick,
            "machine": about | {"load_after": load()},
            "groups": [vars(group) for group in groups],
        }
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Many streams: what a pool costs, beside single steps, a C yardstick and bare copies, taking turns in one process.

    python benchmarks/streams.py [--json FILE] [--quick]

Least times in µs unless another unit is named; compare only figures of one run. The yardstick (yardstick.c) takes the
same number of states in rotation.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import argparse
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from yardstick import Yardstick

import linattn_edge as la
from linattn_edge.bench.machine import machine
from linattn_edge.bench.turns import Missing, alternate, timed
from linattn_edge.pieces import cuts

STREAMS = 256
Figures = dict[str, Any]


def layer(H: int, D: int, rule: str = "gated_delta", **options: Any) -> la.LinearAttention:
    phi = {"feature_map": "identity", "qk_norm": True} if "delta" in rule else {}
    return la.LinearAttention(H, D, update_rule=rule, **(phi | options))


def tokens(attn: la.LinearAttention, B: int) -> list[Any]:
    """q, k, v, g, beta for B streams."""
    rng = np.random.default_rng(0)
    L = attn.layer
    q, k, v = rng.standard_normal((3, B, L.H, L.K), dtype=np.float32)
    g = -rng.random((B, L.N), dtype=np.float32) if L.rule.decay else None
    return [q, k, v, g, rng.random((B, L.N), dtype=np.float32) if L.rule.beta else None]


def rows(given: list[Any], i: int) -> list[Any]:
    return [None if a is None else a[i : i + 1] for a in given]


def least(calls: dict[str, Callable[[], Any]], rounds: int, between: Callable[[], Any] = lambda: None) -> Figures:
    """The least time of each, in turn."""
    times = dict.fromkeys(calls, np.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            call()
            times[name] = min(times[name], (time.perf_counter_ns() - start) / 1e3)
        between()
    return times


def steps(H: int, D: int, yardstick: Yardstick | None, rounds: int) -> Figures:
    """One call for all streams, a call for each, and the yardstick: µs for each stream."""
    attn = layer(H, D)
    pool = la.StreamPool(attn, STREAMS)
    ids = np.array([pool.open() for _ in range(STREAMS)])
    given = tokens(attn, STREAMS)
    out = np.empty_like(given[2])
    states = [attn.init_state() for _ in range(STREAMS)]
    each = [(rows(given, i), out[i : i + 1]) for i in range(STREAMS)]

    def single() -> None:
        for state, ((q, k, v, g, beta), y) in zip(states, each, strict=True):
            attn.step(q, k, v, state, g, beta, None, y)

    contestants = {
        "one call": timed(lambda: pool.step(ids, *given, out=out), units=STREAMS),
        "a call each": timed(single, units=STREAMS),
    }
    if yardstick is not None and D >= 32:
        contestants["yardstick in C"] = yardstick.contestant("gated_delta", H, D, STREAMS)
    times = alternate(contestants, rounds, 0.06)
    found = {name: times[name]["min"] for name in times}
    found["a call each / one call"] = found["a call each"] / found["one call"]
    if "yardstick in C" in found:
        found["one call / yardstick"] = found["one call"] / found["yardstick in C"]
    return found


def lifecycle(H: int, D: int, rounds: int) -> Figures:
    """Opening, closing, forking, checkpoints, rollback."""
    attn = layer(H, D)
    pool = la.StreamPool(attn, 4)
    marked, plain = pool.open(), pool.open()
    given = tokens(attn, 1)
    out = np.empty_like(given[2])
    image, other = np.ones(pool._slab.words), np.ones(pool._slab.words)
    made: list[int] = []
    found = least(
        {
            "open": lambda: made.append(pool.open()),
            "close": lambda: pool.close(made.pop()),
            "fork": lambda: made.append(pool.fork(marked)),
            "copy of a state": lambda: np.copyto(image, other),
            "checkpoint": lambda: pool.checkpoint(marked),
        },
        rounds,
        lambda: pool.close(made.pop()),
    )
    a, b = np.array([marked]), np.array([plain])
    pool.checkpoint(marked)
    times = {"step": np.inf, "step with a checkpoint": np.inf, "rollback of 16 tokens": np.inf}
    times |= {"rollback of 1 token after 16": np.inf}
    for turn in range(rounds // 10):
        pool.checkpoint(marked)
        for _ in range(16):
            now = least(
                {
                    "step with a checkpoint": lambda: pool.step(a, *given, out=out),
                    "step": lambda: pool.step(b, *given, out=out),
                },
                1,
            )
            times |= {name: min(times[name], value) for name, value in now.items()}
        n, name = (16, "rollback of 16 tokens") if turn % 2 else (1, "rollback of 1 token after 16")
        start = time.perf_counter_ns()
        pool.rollback(marked, n)
        times[name] = min(times[name], (time.perf_counter_ns() - start) / 1e3)
    found |= times
    found["step with a checkpoint / step"] = found["step with a checkpoint"] / found["step"]
    return found


def tails(H: int, D: int, count: int) -> Figures:
    """p50 and p99.9 of a step of 16 streams, another thread opening, stepping and closing 1,000 streams a second; and
    of the compiled kernel alone on a state of 16, under the same load and without."""
    attn = layer(H, D)
    pool = la.StreamPool(attn, 64)
    ids = np.array([pool.open() for _ in range(16)])
    given = tokens(attn, 16)
    out = np.empty_like(given[2])
    state = attn.init_state(16)
    one = tokens(attn, 1)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            id_ = pool.open()
            pool.step([id_], *one)
            pool.close(id_)
            time.sleep(1e-3)

    attn.step(*given[:3], state, *given[3:], None, out)
    entry, plan, _, _, _ = attn._entries["float32"]
    g, beta = given[3][:, :, None], given[4]
    kernel = partial(entry, given[0], given[1], given[2], g, beta, out, state._block, plan, 0)
    step = partial(pool.step, ids, *given, out=out)
    times: dict[str, list[int]] = {"step, quiet": [], "kernel, quiet": [], "step": [], "kernel": []}
    now = time.perf_counter_ns
    for loaded in (False, True) * 4:
        thread = threading.Thread(target=churn)
        stop.clear()
        if loaded:
            thread.start()
        for _ in range(count // 8):  # in turn, so that what disturbs one disturbs the other
            start = now()
            step()
            middle = now()
            kernel()
            end = now()
            times["step" if loaded else "step, quiet"].append(middle - start)
            times["kernel" if loaded else "kernel, quiet"].append(end - middle)
        stop.set()
        if loaded:
            thread.join()
    found: Figures = {}
    for name, values in times.items():
        found[f"{name}: p50"], found[f"{name}: p99.9"] = (float(np.percentile(values, p)) / 1e3 for p in (50, 99.9))
    found["p99.9 of a step / of the kernel"] = found["step: p99.9"] / found["kernel: p99.9"]
    found["the same, quiet"] = found["step, quiet: p99.9"] / found["kernel, quiet: p99.9"]
    return found


def prefill(H: int, D: int, T: int, rule: str, repeats: int) -> Figures:
    """Seconds of a prefill by one thread, and in pieces by two."""
    attn = layer(H, D, rule)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, T, H, D), dtype=np.float32) for _ in range(3))
    g = -rng.random((1, T, H), dtype=np.float32) if attn.layer.rule.decay else None
    out = np.empty_like(v)
    times = least(
        {
            "one thread": lambda: attn.prefill(q, k, v, attn.init_state(), g, out=out),
            "two threads": lambda: la.parallel_prefill(attn, q, k, v, attn.init_state(), g, num_threads=2, out=out),
        },
        repeats,
    )
    found = {f"{name}, s": value / 1e6 for name, value in times.items()}
    found["one / two"] = times["one thread"] / times["two threads"]
    # What that is with two cores to itself: the CPU time of what one thread waits for, each part measured alone.
    edges = cuts(T, 2, rule)
    parts = [slice(a, b) for a, b in pairwise(edges)]
    cost: dict[str, float] = {}

    def part(name: str, call: Callable[..., Any], at: slice, *rows: Any, **rest: Any) -> None:
        start = time.thread_time()
        decay = {} if g is None else {"g": g[:, at]}
        call(*(a[:, at] for a in rows), attn.init_state(track_decay=True), **decay, **rest)
        cost[name] = min(cost.get(name, np.inf), time.thread_time() - start)

    for _ in range(repeats):
        part("all", attn.prefill, slice(0, T), q, k, v, out=out)
        part("first", attn.prefill, parts[0], q, k, v, out=out[:, parts[0]])
        part("written", attn.write, parts[1], k, v)
        part("second", attn.prefill, parts[1], q, k, v, out=out[:, parts[1]])
        part("third", attn.prefill, parts[2], q, k, v, out=out[:, parts[2]])
    longest = max(cost["first"], cost["written"]) + max(cost["second"], cost["third"])
    found["write / prefill of a token"] = cost["written"] / cost["second"]
    found["one / two, by CPU time of the longest path"] = cost["all"] / longest
    return found


def compensated(H: int, D: int, rounds: int) -> Figures:
    """A step of a plain and of a compensated state; every 32nd step of the latter does more, so 32 are timed."""
    attn = layer(H, D, "linear")
    q, k, v, _, _ = tokens(attn, 1)
    out = np.empty_like(v)

    def steps_of(state: la.State) -> None:
        for _ in range(32):
            attn.step(q, k, v, state, out=out)

    calls = {
        "plain": partial(steps_of, attn.init_state()),
        "compensated": partial(steps_of, attn.init_state(compensated=True)),
    }
    found = {name: value / 32 for name, value in least(calls, rounds).items()}
    return found | {"compensated / plain": found["compensated"] / found["plain"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds and tokens")
    args = parser.parse_args()
    part = 10 if args.quick else 1
    try:
        yardstick = Yardstick()
    except Missing as reason:
        print(f"no yardstick: {reason}")
        yardstick = None
    report: dict[str, Any] = {"machine": machine(), "figures": {}}
    suites: list[tuple[str, Callable[[], Figures]]] = []
    for H, D in ((2, 16), (8, 64)):
        suites += [
            (f"step of {STREAMS} streams, {H}x{D}, µs a stream", partial(steps, H, D, yardstick, 30 // part + 3)),
            (f"one stream, {H}x{D}", partial(lifecycle, H, D, 3000 // part)),
            (f"tails of a step of 16 streams, {H}x{D}", partial(tails, H, D, 80_000 // part)),
        ]
    for rule in ("linear", "gated"):
        suites.append(
            (f"prefill of 1,000,000 tokens, 1x64, {rule}", partial(prefill, 1, 64, 1_000_000 // part, rule, 5))
        )
    for H, D in ((8, 64), (32, 64), (8, 128)):
        suites.append((f"compensated, {H}x{D}", partial(compensated, H, D, 2000 // part)))
    for title, suite in suites:
        report["figures"][title] = found = suite()
        print(title)
        for name, value in found.items():
            print(f"  {name:45s}{value:10.3f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()

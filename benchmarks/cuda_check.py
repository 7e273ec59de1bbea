"""What only a GPU can show: that the kernels are right there, how fast they are, that streams and graphs work.

python benchmarks/cuda_check.py [--json FILE] [--quick]

The grid is compared with the float64 oracles of tests/naive.py; the times are those of `linattn-edge bench --device
cuda`, in fewer turns. What fails is noted, and the rest goes on. Some five minutes.
Without a GPU it says why; in Numba's simulator (NUMBA_ENABLE_CUDASIM=1) it runs a small grid only.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import linattn_edge as la
from linattn_edge import gpu
from linattn_edge.bench import device, tables
from linattn_edge.bench.commands import chosen_peers
from linattn_edge.bench.record import Group, Row
from linattn_edge.bench.suites import ON_CUDA, REPORTED, Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import naive
from cases import SAMPLES, VARIANTS, make

BOUND = 1e-5  # relative RMS error, float32 against float64


def numba_cuda() -> Any:
    from numba import cuda

    return cuda


def cases(quick: bool) -> list[tuple[str, Any]]:
    """The correctness grid: every rule and layout at real sizes, then every map."""
    small = {"T": 2, "K": 3, "V": 5} if gpu.simulated() else {}
    grid = []
    for rule, gate in VARIANTS:
        for number, layout in enumerate(("mha", "gqa", "gva")):
            K, V = ((64, 64), (128, 128), (40, 24))[number]
            phi = "identity" if "delta" in rule else "elu"
            options = {"T": 150, "K": K, "V": V, "normalize": "delta" not in rule, "start": True} | small
            if quick and number != VARIANTS.index((rule, gate)) % 3:
                continue
            grid.append((f"{rule} {gate or ''} {layout} {K}x{V}", make(rule, gate, layout, phi, **options)))
    for name in SAMPLES[:: 4 if quick else 1]:
        options = {"T": 20, "K": 16, "V": 33, "position": 3} | small
        grid.append((f"map {name}", make("gated", "head", "gqa", name, hard=False, **options)))
    return grid


def compare(case: Any) -> float:
    """The largest relative RMS error of any row: a prefill, then the same tokens with arrays on the GPU."""
    attn = case.layer(backend="cuda")
    state = case.start(attn)
    results = [(case.prefill(state, attn=attn), state.to("cpu"))]
    cuda, state, y = numba_cuda(), case.start(attn), []
    T = 2 if gpu.simulated() else min(5, case.q.shape[1])
    for t in range(T):
        (q, k, v), rest = case.tokens(t)
        there = {n: cuda.to_device(np.ascontiguousarray(a)) for n, a in {"q": q, "k": k, "v": v, **rest}.items()}
        y.append(attn.step(there.pop("q"), there.pop("k"), there.pop("v"), state, **there).copy_to_host())
    state.check()
    want, S, _ = case.expected
    errors = [naive.rms_ratio(np.stack(y, axis=1)[b], want[b, : len(y)]) for b in range(len(want))]
    for got, final in results:
        errors += [naive.rms_ratio(got[b], want[b]) for b in range(len(want))]
        if S is not None:
            errors += [naive.rms_ratio(final.S[b], S[b]) for b in range(len(want))]
    return max(errors)


def correctness(quick: bool) -> dict[str, Any]:
    """How many cases are within the bound, and which are not."""
    failed, worst, grid = {}, 0.0, cases(quick)
    for name, case in grid:
        try:
            error = compare(case)
        except Exception as failure:
            failed[name] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            continue
        worst = max(worst, error)
        if not error <= BOUND:
            failed[name] = f"relative RMS error {error:.1e}"
    return {"cases": len(grid), "worst": worst, "failed": failed}


def empty_replay() -> float:
    """µs on the GPU to replay a graph of one kernel that does nothing: the least of 20."""
    cuda, timer = numba_cuda(), device.Timer()

    @cuda.jit
    def nothing(x):
        pass

    x = cuda.device_array(1, np.float32)
    replay = timer.capture(lambda stream: nothing[256, 128, stream](x), device.LAUNCHES)
    return float(device.by_events(timer, replay, device.LAUNCHES)(20).min())


def graph_is_right() -> float:
    """A captured step, replayed: the error against the same steps on the CPU, position included."""
    cuda, attn = numba_cuda(), la.LinearAttention(4, 64, backend="cuda")
    cpu = la.LinearAttention(4, 64)
    rng, state, other = np.random.default_rng(1), attn.init_state(3), cpu.init_state(3)
    main = [cuda.device_array((3, 4, 64), np.float32) for _ in range(3)]
    first = rng.standard_normal((3, 3, 4, 64), np.float32)
    for there, here in zip(main, first, strict=True):
        there.copy_to_device(here)
    out = cuda.device_array((3, 4, 64), np.float32)
    timer = device.Timer()
    replay = timer.capture(lambda stream: attn.step(*main, state, out=out, stream=stream))
    state.reset()
    for _ in range(4):
        here = rng.standard_normal((3, 3, 4, 64), np.float32)
        for there, array in zip(main, here, strict=True):
            there.copy_to_device(array)
        cuda.synchronize()
        replay()
        timer.wait()
        y = cpu.step(*here, other)
    if state.position.tolist() != [4, 4, 4]:
        return float("inf")
    return max(naive.rms_ratio(out.copy_to_host(), y), naive.rms_ratio(state.to("cpu").S, other.S))


def attempt(report: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
    """One measurement; what fails is noted, and the others go on."""
    try:
        return call()
    except Exception as error:
        report["failures"][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return None


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Everything, as plain data."""
    start = time.perf_counter()
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "card": gpu.card(),
        "version": la.__version__,
        "command": f"python benchmarks/cuda_check.py{' --quick' if quick else ''}",
        "failures": {},
        "groups": [],
    }
    progress("correctness")
    report["correctness"] = correctness(quick)
    if device.why_not() is None:
        progress("graph")
        report["graph_error"] = attempt(report, "graph", graph_is_right)
        report["empty_replay_us"] = attempt(report, "empty kernel", empty_replay)
        peers = chosen_peers(None, "cuda")
        settings = Settings.short(peers=peers) if quick else Settings(rounds=10, builds=1, peers=peers)
        for suite in ON_CUDA.values():
            for job in suite.plan(settings):
                progress(job.title)
                group = attempt(report, job.title, job.run)
                if group is not None:
                    report["groups"].append(asdict(group))
    report["seconds"] = time.perf_counter() - start
    return report


def text(report: dict[str, Any]) -> str:
    """The report in words and tables."""
    good = report["correctness"]
    lines = [
        f"Measured on {report['date']} on {report['card']}, with linattn_edge {report['version']}, by "
        f"`{report['command']}`, in {report['seconds']:.0f} s.",
        "",
        f"Correctness: {good['cases'] - len(good['failed'])} of {good['cases']} cases within {BOUND:.0e}, worst "
        f"{good['worst']:.1e}.",
        *(f"- FAILED {name}: {reason}" for name, reason in good["failed"].items()),
    ]
    if report.get("graph_error") is not None:
        lines.append(f"A step replayed from a graph: relative RMS error {report['graph_error']:.1e}.")
    if report.get("empty_replay_us") is not None:
        lines.append(f"A kernel that does nothing, in a graph: {report['empty_replay_us']:.1f} µs.")
    groups = [Group(**{**group, "rows": [Row(**row) for row in group["rows"]]}) for group in report["groups"]]
    for name in dict.fromkeys(group.suite for group in groups):
        for table in REPORTED[name].tables([group for group in groups if group.suite == name]):
            lines += ["", tables.plain(table)]
    lines += ["", *(f"- not timed: {g.title}: {row.name}: {row.note}" for g in groups for row in g.rows if row.note)]
    lines += [f"- not measured: {name}: {reason}" for name, reason in report["failures"].items()]
    return "\n".join(lines).rstrip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check and measure the GPU backend on a GPU.")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a part of everything, under a minute")
    arguments = parser.parse_args(argv)
    reason = gpu.why_not()
    if reason is not None:
        print(f"cuda_check: {reason}", file=sys.stderr)
        return 1
    show = (lambda name: print(f"… {name}", file=sys.stderr)) if sys.stderr.isatty() else (lambda name: None)
    report = measure(arguments.quick, show)
    print(text(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    wrong = any("NOT TIMED" in row["note"] for group in report["groups"] for row in group["rows"])
    return 1 if report["correctness"]["failed"] or report["failures"] or wrong else 0


if __name__ == "__main__":
    sys.exit(main())

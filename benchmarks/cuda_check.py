"""What only a GPU can show: that the kernels are right there, how fast they are, that streams and graphs work.

python benchmarks/cuda_check.py [--json FILE] [--quick]

Prints one table and takes less than five minutes. The grid is compared with the float64 oracles of tests/naive.py.
Bytes are those that a step must move (S in and out, and the tokens); the bandwidth is that of a device copy in the same
run.
Without a GPU it says why; in Numba's simulator (NUMBA_ENABLE_CUDASIM=1) it runs a small grid only.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import linattn_edge as la
from linattn_edge import gpu

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import naive
from cases import SAMPLES, VARIANTS, make

BOUND = 1e-5  # relative RMS error, float32 against float64
SIZES = ((8, 64), (32, 64), (32, 128))
RULES = ("linear", "gated", "gated_delta")
BATCHES = (1, 16, 256)
PROMPTS = (512, 4096, 65536)


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


class Graph:
    """What `call(stream)` launches, captured, to be replayed."""

    def __init__(self, call: Callable[[Any], object]) -> None:
        from cuda.bindings import driver

        self.driver, self.stream = driver, numba_cuda().stream()
        self.handle = driver.CUstream(int(self.stream.handle))
        call(self.stream)
        self.stream.synchronize()
        self._do(driver.cuStreamBeginCapture(self.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            call(self.stream)
        finally:
            graph = self._do(driver.cuStreamEndCapture(self.handle))
        self.graph = self._do(driver.cuGraphInstantiate(graph, 0))

    def _do(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"CUDA: {result[0]}")
        return result[1] if len(result) > 1 else None

    def replay(self) -> None:
        self._do(self.driver.cuGraphLaunch(self.graph, self.handle))


def event_us(call: Callable[[], object], stream: Any, times: int) -> float:
    """µs of one call between two events on the stream: the least of five runs of `times` calls."""
    cuda, best = numba_cuda(), float("inf")
    for _ in range(5):
        start, end = cuda.event(), cuda.event()
        start.record(stream)
        for _ in range(times):
            call()
        end.record(stream)
        end.synchronize()
        best = min(best, cuda.event_elapsed_time(start, end) / times * 1e3)
    return best


def wall_us(call: Callable[[], object], stream: Any, times: int) -> float:
    """µs of one call from Python, the GPU's work included: the least of three runs."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(times):
            call()
        stream.synchronize()
        best = min(best, (time.perf_counter() - start) / times * 1e6)
    return best


def copy_bandwidth() -> float:
    """GB/s of a copy on the device, read and write counted."""
    cuda = numba_cuda()
    source = cuda.device_array(1 << 27, np.float32)
    target = cuda.device_array_like(source)
    stream = cuda.stream()
    us = event_us(lambda: target.copy_to_device(source, stream=stream), stream, 10)
    return 2 * source.nbytes / us / 1e3


def empty_replay() -> float:
    """µs to replay a graph of one kernel that does nothing."""
    cuda = numba_cuda()

    @cuda.jit
    def nothing(x):
        pass

    x = cuda.device_array(1, np.float32)
    graph = Graph(lambda stream: nothing[256, 128, stream](x))
    return event_us(graph.replay, graph.stream, 200)


def layer(rule: str, H: int, d: int) -> la.LinearAttention:
    phi = {"linear": "elu", "gated": "identity", "gated_delta": "identity"}[rule]
    more: dict[str, Any] = {"qk_norm": True} if rule == "gated_delta" else {}
    return la.LinearAttention(H, d, feature_map=phi, update_rule=rule, backend="cuda", check_finite=False, **more)


def tokens(attn: la.LinearAttention, *lead: int) -> tuple[list[Any], dict[str, Any], int]:
    """q, k, v, then g and beta where the rule takes them, on the device; and their bytes, y's too."""
    cuda, rng, config = numba_cuda(), np.random.default_rng(0), attn.layer
    row = np.resize(rng.standard_normal(1 << 16, np.float32), (*lead, config.H, config.K))
    main = [cuda.to_device(row) for _ in range(3)]
    gates = {}
    if config.rule.decay:
        gates["g"] = cuda.to_device(np.full((*lead, config.N), -0.05, np.float32))
    if config.rule.beta:
        gates["beta"] = cuda.to_device(np.full((*lead, config.N), 0.5, np.float32))
    return main, gates, 4 * main[0].nbytes + sum(a.nbytes for a in gates.values())


def step_times(rule: str, H: int, d: int, B: int, quick: bool) -> dict[str, float]:
    """One step: kernel time by replaying a graph of 20, one replay of a graph of one, and from Python."""
    cuda, attn = numba_cuda(), layer(rule, H, d)
    state, (main, gates, moved) = attn.init_state(B), tokens(attn, B)
    out = cuda.device_array((B, H, d), np.float32)
    stream = cuda.stream()

    def step(on: Any) -> None:
        attn.step(*main, state, out=out, stream=on, **gates)

    many = Graph(lambda on: [step(on) for _ in range(20)])
    one = Graph(step)
    moved += 2 * state.S.nbytes
    kernel = event_us(many.replay, many.stream, 5 if quick else 20) / 20
    return {
        "kernel": kernel,
        "replay": event_us(one.replay, one.stream, 100),
        "python": wall_us(lambda: step(stream), stream, 50),
        "bytes": moved,
        "GB/s": moved / kernel / 1e3,
    }


def prefill_times(rule: str, H: int, d: int, T: int) -> dict[str, float]:
    attn = layer(rule, H, d)
    cuda, state, (main, gates, _) = numba_cuda(), attn.init_state(1), tokens(attn, 1, T)
    out, stream = cuda.device_array((1, T, H, d), np.float32), cuda.stream()

    def prefill() -> None:
        attn.prefill(*main, state, out=out, stream=stream, **gates)

    prefill()
    us = event_us(prefill, stream, 1)
    return {"ms": us / 1e3, "us per token": us / T}


def torch_step(rule: str, H: int, d: int, B: int) -> float | None:
    """The best in-place form in torch, captured in a graph: µs; None where torch or its CUDA is not there."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    q, k, v = (torch.randn(B, H, d, device="cuda") for _ in range(3))
    S, decay, beta = torch.zeros(B, H, d, d, device="cuda"), torch.full((B, H, 1, 1), 0.95, device="cuda"), 0.5

    def step() -> Any:
        if rule != "linear":
            S.mul_(decay)
        change = v
        if rule == "gated_delta":
            change = beta * (v - torch.einsum("bhfv,bhf->bhv", S, k))
        S.addcmul_(k.unsqueeze(-1), change.unsqueeze(-2))
        return torch.einsum("bhfv,bhf->bhv", S, q)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            step()
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / 20)
    return best


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
    graph = Graph(lambda stream: attn.step(*main, state, out=out, stream=stream))
    state.reset()
    for _ in range(4):
        here = rng.standard_normal((3, 3, 4, 64), np.float32)
        for there, array in zip(main, here, strict=True):
            there.copy_to_device(array)
        cuda.synchronize()
        graph.replay()
        graph.stream.synchronize()
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
        "steps": [],
        "prefills": [],
    }
    progress("correctness")
    report["correctness"] = correctness(quick)
    if not gpu.simulated():
        progress("graph")
        report["graph_error"] = attempt(report, "graph", graph_is_right)
        report["copy_GB/s"] = attempt(report, "device copy", copy_bandwidth)
        report["empty_replay_us"] = attempt(report, "empty kernel", empty_replay)
        for H, d in SIZES[:1] if quick else SIZES:
            for rule in RULES:
                for B in BATCHES:
                    name = f"{rule} {H}x{d} B={B}"
                    progress(name)
                    row = attempt(report, name, lambda r=rule, h=H, w=d, b=B: step_times(r, h, w, b, quick))
                    if row is not None:
                        row["torch"] = attempt(
                            report, f"torch {name}", lambda r=rule, h=H, w=d, b=B: torch_step(r, h, w, b)
                        )
                        report["steps"].append({"rule": rule, "H": H, "d": d, "B": B} | row)
                for T in PROMPTS[:1] if quick else PROMPTS:
                    name = f"{rule} {H}x{d} T={T}"
                    progress(name)
                    row = attempt(report, name, lambda r=rule, h=H, w=d, t=T: prefill_times(r, h, w, t))
                    if row is not None:
                        report["prefills"].append({"rule": rule, "H": H, "d": d, "T": T} | row)
    report["seconds"] = time.perf_counter() - start
    return report


def text(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    good = report["correctness"]
    lines = [
        f"Measured on {report['date']} on {report['card']}, with linattn_edge {report['version']}, by "
        f"`{report['command']}`, in {report['seconds']:.0f} s.",
        "",
        f"Correctness: {good['cases'] - len(good['failed'])} of {good['cases']} cases within {BOUND:.0e}, worst "
        f"{good['worst']:.1e}.",
        *(f"- FAILED {name}: {reason}" for name, reason in good["failed"].items()),
    ]
    copy, empty = report.get("copy_GB/s"), report.get("empty_replay_us")
    if report.get("graph_error") is not None:
        lines.append(f"A step replayed from a graph: relative RMS error {report['graph_error']:.1e}.")
    if copy and empty:
        lines.append(f"Device copy: {copy:.0f} GB/s. Replay of an empty kernel: {empty:.1f} µs.")
    if report["steps"]:
        lines += [
            "",
            "A step, µs:",
            "",
            "| rule | H×d | B | kernel | graph replay | Python | bytes at copy speed | GB/s | of copy | torch, graph |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in report["steps"]:
            ideal = f"{row['bytes'] / copy / 1e3:.1f}" if copy else "–"
            part = f"{row['GB/s'] / copy:.0%}" if copy else "–"
            torch = f"{row['torch']:.1f}" if row["torch"] else "–"
            lines.append(
                f"| `{row['rule']}` | {row['H']}×{row['d']} | {row['B']} | {row['kernel']:.1f} | {row['replay']:.1f} | "
                f"{row['python']:.1f} | {ideal} | {row['GB/s']:.0f} | {part} | {torch} |"
            )
    if report["prefills"]:
        lines += [
            "",
            "A prompt of one stream:",
            "",
            "| rule | H×d | T | ms | µs per token |",
            "|---|---:|---:|---:|---:|",
        ]
        lines += [
            f"| `{r['rule']}` | {r['H']}×{r['d']} | {r['T']} | {r['ms']:.2f} | {r['us per token']:.3f} |"
            for r in report["prefills"]
        ]
    lines += ["", *(f"- not measured: {name}: {reason}" for name, reason in report["failures"].items())]
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
    return 1 if report["correctness"]["failed"] or report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

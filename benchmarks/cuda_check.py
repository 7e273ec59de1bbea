"""What only a GPU can show: that the kernels are right there, how fast they are, that streams and graphs work.

python benchmarks/cuda_check.py [--json FILE] [--quick]

The grid is compared with the float64 oracles of tests/naive.py; the times are those of `linattn-edge bench --device
cuda`, in fewer turns. Most of the time goes into compiling: a kernel for each case.
Without a GPU it says why; in Numba's simulator (NUMBA_ENABLE_CUDASIM=1) it runs a small grid only.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import platform
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
from linattn_edge.errors import NotFiniteError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import naive
from cases import POSITIVE, SAMPLES, VARIANTS, make

PRINTED = """\
Printed: the card and the versions, how many cases are within the bound and which are not (FAILED), then tables of
times. Exit status: 0 where every case is right and no measurement failed; 1 where not, where there is no GPU, or where
FILE can't be written. With NUMBA_ENABLE_CUDASIM=1 the grid is small and nothing is timed.
"""
PACKAGES = ("numba-cuda", "numba", "numpy", "cuda-bindings", "cuda-core", "cuda-toolkit", "torch", "cupy-cuda13x")

BOUND = 1e-5  # relative RMS error, float32 against float64


def numba_cuda() -> Any:
    from numba import cuda

    return cuda


def upload(*arrays: Any) -> list[Any]:
    return [numba_cuda().to_device(np.ascontiguousarray(a)) for a in arrays]


def cases(quick: bool) -> list[tuple[str, Callable[[], float]]]:
    """The correctness grid: every rule and layout at real sizes, every map, then everything else that a call can have.

    What a case returns is its error.
    """
    small = {"T": 2, "K": 3, "V": 5} if gpu.simulated() else {}
    grid: list[tuple[str, Any]] = []
    for rule, gate in VARIANTS:
        for number, layout in enumerate(("mha", "gqa", "gva")):
            K, V = ((64, 64), (128, 128), (40, 24))[number]
            phi = "identity" if "delta" in rule else "elu"
            options = {"T": 150, "K": K, "V": V, "normalize": "delta" not in rule, "start": True} | small
            if quick and number != VARIANTS.index((rule, gate)) % 3:
                continue
            grid.append((f"{rule} {gate or ''} {layout} {K}x{V}", make(rule, gate, layout, phi, **options)))
    for name in SAMPLES[:: 4 if quick else 1]:
        options = {"T": 20, "K": 16, "V": 33, "position": 3, "normalize": name in POSITIVE} | small
        grid.append((f"map {name}", make("gated", "head", "gqa", name, hard=False, **options)))
    found: list[tuple[str, Callable[[], float]]] = [(name, lambda case=case: compare(case)) for name, case in grid]
    options = {"T": 20, "K": 16, "V": 33, "backend": "cuda"} | small  # one layer for all calls: it keeps its kernels
    layers = [
        ("gated gqa", make("gated", "head", "gqa", "elu", B=3, hard=False, normalize=True, **options)),
        ("gated_delta gva", make("gated_delta", "head", "gva", "identity", B=3, hard=False, **options)),
    ]
    calls = (lengths, active, write_and_read, flags, rows, own_stream)
    for name, case in layers[: 1 if quick else 2]:
        found += [(f"{call.__name__.replace('_', ' ')}, {name}", lambda c=case, f=call: f(c)) for call in calls]
    found += [(f"arrays of {name}", lambda n=name: of_library(n)) for name in libraries()]
    if device.why_not() is None:
        found.append(("a step replayed from a graph", graph_is_right))
    return found


def compare(case: Any) -> float:
    """The largest relative RMS error of any row: a prefill, then its first tokens with arrays on the GPU."""
    attn = case.layer(backend="cuda")
    state = case.start(attn)
    errors = [error_of(case, case.prefill(state, attn=attn), state)]
    T = 2 if gpu.simulated() else min(5, case.q.shape[1])
    given = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}
    part = case.with_(**{name: a if a is None else a[:, :T] for name, a in given.items()})
    state, y = part.start(attn), []
    for t in range(T):
        there, rest = on_gpu(part, t)
        y.append(attn.step(*there, state, **rest).copy_to_host())
    state.check()
    return max(*errors, error_of(part, np.stack(y, axis=1), state))


def on_gpu(case: Any, part: Any = slice(None)) -> tuple[list[Any], dict[str, Any]]:
    """The inputs of some tokens, there."""
    arrays, rest = case.tokens(part)
    return upload(*arrays), dict(zip(rest, upload(*rest.values()), strict=True))


def error_of(case: Any, y: Any, state: Any) -> float:
    """The largest relative RMS error of any row of y, S and z; the position must be right."""
    final, (want, S, z) = state.to("cpu"), case.expected
    seen = np.full(len(case.q), case.q.shape[1]) if case.lengths is None else case.lengths
    if (final.position != case.position + seen).any():
        raise ValueError(f"the position is {final.position.tolist()}, not {(case.position + seen).tolist()}")
    pairs = [(y, want), (final.S, S), *([(final.z, z)] if case.normalize else [])]
    return max(naive.rms_ratio(a[b], w[b]) for a, w in pairs if w is not None for b in range(len(w)))


def lengths(case: Any) -> float:
    """A prefill with lengths of each type, NaN in what is not looked at."""
    T = case.q.shape[1]
    ragged = case.with_(lengths=np.array([T // 2, 0, T]))
    ragged.expected  # noqa: B018  # before NaN is in
    ragged.q, ragged.k, ragged.v = (a.copy() for a in (case.q, case.k, case.v))
    for row, n in enumerate(ragged.lengths):
        for a in (ragged.q, ragged.k, ragged.v):
            a[row, n:] = np.nan
    attn, errors = case.attn, []
    for dtype in (np.int64, np.int32):
        state = attn.init_state(3)
        there, rest = on_gpu(ragged)
        (n,) = upload(ragged.lengths.astype(dtype))
        y = attn.prefill(*there, state, lengths=n, **rest).copy_to_host()
        state.check()
        errors.append(error_of(ragged, y, state))
    return max(errors)


def active(case: Any) -> float:
    """Steps of some streams."""
    T = case.q.shape[1]
    ragged = case.with_(lengths=np.array([T, 0, T]))
    attn, y = case.attn, []
    state = attn.init_state(3)
    (mask,) = upload(np.array([True, False, True]))
    for t in range(T):
        there, rest = on_gpu(case, t)
        y.append(attn.step(*there, state, active=mask, **rest).copy_to_host())
    state.check()
    return error_of(ragged, np.stack(y, axis=1), state)


def write_and_read(case: Any) -> float:
    """The two halves of a step."""
    attn, y = case.attn, []
    state = attn.init_state(3)
    for t in range(case.q.shape[1]):
        (q, k, v), rest = on_gpu(case, t)
        attn.write(k, v, state, **rest)
        y.append(attn.read(q, state).copy_to_host())
    return error_of(case, np.stack(y, axis=1), state)


def flags(case: Any) -> float:
    """NaN in a token is found by `check`, until the state is reset; the other calls are as before."""
    attn = case.attn
    state = attn.init_state(3)
    (q, k, v), rest = on_gpu(case)
    bad = case.k.copy()
    bad[1, -1] = np.nan
    attn.prefill(q, *upload(bad), v, state, **rest)
    try:
        state.check()
    except NotFiniteError:
        state.reset()
        state.check()
        return error_of(case, attn.prefill(q, k, v, state, **rest).copy_to_host(), state)
    raise ValueError("NaN in k was not found")


def rows(case: Any) -> float:
    """A copy goes on where the state was, and rows that are picked are what they were."""
    attn, T = case.attn, case.q.shape[1] // 2
    state, y = attn.init_state(3), []
    for part in (slice(0, T), slice(T, None)):
        there, rest = on_gpu(case, part)
        y.append(attn.prefill(*there, state, **rest).copy_to_host())
        state = state.copy()
    here, picked = state.to("cpu"), state.select([2, 0]).to("cpu")
    if not np.array_equal(picked.S, here.S[[2, 0]]) or picked.position.tolist() != here.position[[2, 0]].tolist():
        raise ValueError("the rows that were picked are others")
    return error_of(case, np.concatenate(y, axis=1), state)


def own_stream(case: Any) -> float:
    """Calls on a stream of the caller's, with NumPy arrays and with arrays on the GPU that were made on it."""
    cuda, attn = numba_cuda(), case.attn
    stream, T = cuda.stream(), case.q.shape[1] // 2
    state = attn.init_state(3)
    y = [case.prefill(state, slice(0, T), attn=attn, stream=stream)]
    arrays, rest = case.tokens(slice(T, None))
    here = [np.ascontiguousarray(a) for a in (*arrays, *rest.values())]  # to be there until the stream is done
    there = [cuda.to_device(a, stream=stream) for a in here]
    late = attn.prefill(*there[:3], state, stream=stream, **dict(zip(rest, there[3:], strict=True)))
    stream.synchronize()
    y.append(late.copy_to_host())
    return error_of(case, np.concatenate(y, axis=1), state)


def libraries() -> list[str]:
    """Those of torch and CuPy that are installed and can use the GPU."""
    if gpu.simulated():
        return []
    found = ["torch"] if device.has_torch() else []
    if importlib.util.find_spec("cupy") is not None:
        with contextlib.suppress(Exception):  # a CuPy that can't use it says so in many ways
            import cupy  # type: ignore[import-not-found]

            cupy.zeros(1).get()
            found.append("cupy")
    return found


def of_library(name: str) -> float:
    """Steps with arrays of torch or CuPy, on a stream that is current there."""
    library = importlib.import_module(name)
    case = make("gated", "head", "mha", "relu", T=5, K=16, V=33)
    attn, y = case.layer(backend="cuda"), []
    state = attn.init_state(2)
    stream = library.cuda.Stream(**({} if name == "torch" else {"non_blocking": True}))
    with library.cuda.stream(stream) if name == "torch" else stream:
        for t in range(5):
            arrays, rest = case.tokens(t)
            if name == "torch":
                there = [library.from_numpy(np.ascontiguousarray(a)).cuda() for a in (*arrays, *rest.values())]
            else:
                there = [library.asarray(np.ascontiguousarray(a)) for a in (*arrays, *rest.values())]
            y.append(attn.step(*there[:3], state, **dict(zip(rest, there[3:], strict=True))))
        stream.synchronize()
        if type(y[0]) is not type(there[0]):
            raise TypeError(f"the result is a {type(y[0]).__name__}")
        y = [a.cpu().numpy() if name == "torch" else a.get() for a in y]
    return error_of(case, np.stack(y, axis=1), state)


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def silence() -> str | None:
    """Why the GPU does not even copy a number, or None where it does: an illegal access spoils all that comes later."""
    try:
        numba_cuda().synchronize()
        upload(np.ones(1, np.float32))[0].copy_to_host()
    except Exception as error:
        return reason_of(error)
    return None


def stopped(name: str) -> str | None:
    """After a failure: why nothing later can be run, or None."""
    why = silence()
    return None if why is None else f"after {name!r} the GPU does not even copy a number ({why})"


def correctness(quick: bool) -> dict[str, Any]:
    """How many cases are within the bound, and which are not."""
    failed, errors, grid, stop = {}, {}, cases(quick), None
    for name, call in grid:
        try:
            errors[name] = call()
        except Exception as failure:
            failed[name] = reason_of(failure)
            stop = stopped(name)
            if stop is not None:
                break
            continue
        if not errors[name] <= BOUND:
            failed[name] = f"relative RMS error {errors[name]:.1e}"
    done = len(errors) + len(failed.keys() - errors.keys())
    worst = max(errors.values(), default=0.0)
    return {
        "cases": len(grid), "run": done, "worst": worst, "errors": errors, "failed": failed, "stopped": stop,
    }  # fmt: skip


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
        raise ValueError(f"the position is {state.position.tolist()} after four replays")
    return max(naive.rms_ratio(out.copy_to_host(), y), naive.rms_ratio(state.to("cpu").S, other.S))


def attempt(report: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
    """One measurement; what fails is noted, and the others go on where the GPU still answers."""
    if report["stopped"] is not None:
        return None
    try:
        return call()
    except Exception as error:
        report["failures"][name] = reason_of(error)
        report["stopped"] = stopped(name)
        return None


def versions() -> dict[str, str]:
    """Of what has a part in it."""
    found = {"system": platform.platform(), "Python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if not gpu.simulated():
        with contextlib.suppress(Exception):  # a report without it is better than none
            from numba.cuda.cudadrv.driver import driver

            found["driver, knows CUDA"] = ".".join(map(str, driver.get_version()))
            found["CUDA runtime"] = ".".join(map(str, numba_cuda().runtime.get_version()))
    return found


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Everything, as plain data."""
    start = time.perf_counter()
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "card": gpu.card(),
        "version": la.__version__,
        "versions": versions(),
        "command": f"python benchmarks/cuda_check.py{' --quick' if quick else ''}",
        "failures": {},
        "groups": [],
    }
    progress("correctness")
    report["correctness"] = correctness(quick)
    report["stopped"] = report["correctness"]["stopped"]
    if device.why_not() is None:
        progress("empty kernel")
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


def is_good(report: dict[str, Any]) -> bool:
    """Whether all is right, and all was measured."""
    wrong = any("NOT TIMED" in row["note"] for group in report["groups"] for row in group["rows"])
    return not (report["correctness"]["failed"] or report["failures"] or report["stopped"] or wrong)


def text(report: dict[str, Any]) -> str:
    """The report in words and tables."""
    good = report["correctness"]
    lines = [
        f"Measured on {report['date']} on {report['card']}, with linattn_edge {report['version']}, by "
        f"`{report['command']}`, in {report['seconds']:.0f} s.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in report['versions'].items())}.",
        "",
        f"Correctness: {good['run'] - len(good['failed'])} of {good['cases']} cases within {BOUND:.0e}, worst "
        f"{good['worst']:.1e}.",
        *(f"- FAILED {name}: {reason}" for name, reason in good["failed"].items()),
    ]
    if report["stopped"] is not None:
        left = good["cases"] - good["run"]
        rest = f"{left} of the cases and all times were" if good["stopped"] else "what came later was"
        lines.append(f"- STOPPED: {report['stopped']}; {rest} not run.")
    if report.get("empty_replay_us") is not None:
        lines.append(f"A kernel that does nothing, in a graph: {report['empty_replay_us']:.1f} µs.")
    groups = [Group(**{**group, "rows": [Row(**row) for row in group["rows"]]}) for group in report["groups"]]
    for name in dict.fromkeys(group.suite for group in groups):
        for table in REPORTED[name].tables([group for group in groups if group.suite == name]):
            lines += ["", tables.plain(table)]
    lines += ["", *(f"- not timed: {g.title}: {row.name}: {row.note}" for g in groups for row in g.rows if row.note)]
    lines += [f"- FAILED, not measured: {name}: {reason}" for name, reason in report["failures"].items()]
    return "\n".join(lines).rstrip()


def plain(value: Any) -> Any:
    """`value` as JSON can have it: null for what is not finite."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Check and measure the GPU backend on a GPU.",
        epilog=PRINTED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a part of everything")
    arguments = parser.parse_args(argv)
    reason, path = gpu.why_not(), arguments.json
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        reason = f"--json: {path} is a folder" if path.is_dir() else f"--json: {path.resolve().parent} is no folder"
    if reason is not None:
        print(f"cuda_check: {reason}", file=sys.stderr)
        return 1
    show = (lambda name: print(f"… {name}", file=sys.stderr)) if sys.stderr.isatty() else (lambda name: None)
    report = measure(arguments.quick, show)
    print(text(report))
    if path is not None:
        path.write_text(json.dumps(plain(report), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if is_good(report) else 1


if __name__ == "__main__":
    sys.exit(main())

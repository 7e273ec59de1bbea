"""What exported files cost in ONNX Runtime, beside a bare com.microsoft::LinearAttention node, in turn in one process.

    python benchmarks/onnx_files.py --json onnx.json

One thread, no spinning, all inputs and outputs bound, the present state in the past state's buffer. Every contestant's
answers are compared with the float64 reference first; one that is off is named and not timed. (A script called onnx.py
would hide the package of that name.)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kernels import Group, Settings

import linattn_edge as la
import linattn_export as lx
from linattn_edge.bench.machine import machine
from linattn_edge.bench.peers import operator_file
from linattn_edge.bench.turns import Array, Missing, Run, timed

FORMAT = 1
TOLERANCE = 1e-4  # of the largest number in the right answer


def inputs(attn: la.LinearAttention, T: int, decay: str) -> dict[str, Array]:
    """Packed inputs of one stream by name; keys of unit length, so that every rule stays bounded."""
    layer, draw = attn.layer, np.random.default_rng(0)
    q, k, v = draw.standard_normal((3, 1, T, layer.N, layer.K), dtype=np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    found = {"query": q, "key": k, "value": v}
    if layer.rule.decay:
        width = layer.F if decay == "channel" else 1
        found["decay"] = draw.uniform(-0.1, -0.01, (1, T, layer.N, width)).astype(np.float32)
    if layer.rule.beta:
        found["beta"] = draw.uniform(0.3, 0.9, (1, T, layer.N)).astype(np.float32)
    return {name: a.reshape(1, T, -1) for name, a in found.items()}


Buffers = dict[tuple[str, tuple[int, ...]], Any]
Maker = Callable[[Buffers], Run]


def bound(
    model: Any, feeds: dict[str, Array], state: tuple[int, ...], width: int, buffers: Buffers
) -> tuple[Callable[[], None], Any]:
    """A call of the model with everything bound, and its output's OrtValue. `state` begins with zeros.

    buffers: what contestants share, by name and shape: where pages happen to lie changes a time by 30 %.
    """
    try:
        import onnxruntime as ort
    except ImportError:
        raise Missing("onnxruntime is not installed") from None
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # a release without the operator
        raise Missing(f"onnxruntime {ort.__version__} does not run it ({type(error).__name__})") from None
    T = feeds["query"].shape[1]
    arrays = feeds | {"past_state": np.zeros(state, np.float32), "output": np.zeros((1, T, width), np.float32)}
    values = {
        name: buffers.setdefault((name, a.shape), ort.OrtValue.ortvalue_from_numpy(a)) for name, a in arrays.items()
    }
    values["past_state"].update_inplace(arrays["past_state"])
    binding = session.io_binding()
    for name in (*feeds, "past_state"):
        binding.bind_ortvalue_input(name, values[name])
    binding.bind_ortvalue_output("output", values["output"])
    binding.bind_ortvalue_output("present_state", values["past_state"])
    return lambda: session.run_with_iobinding(binding), values["output"]


def exported(buffers: Buffers, attn: la.LinearAttention, T: int, flavor: str, decay: str = "head", **sizes: int) -> Run:
    """A contestant: the layer's file, for T tokens a call. Raises Missing with the reason where it is wrong."""
    layer, feeds = attn.layer, inputs(attn, T, decay)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "layer.onnx")
        contract = lx.export_layer(attn, path, flavor, decay=decay, **sizes)  # type: ignore[arg-type]
        model = path.read_bytes()
    state = (1, *(int(n) for n in contract.states[0].shape[1:]))
    call, output = bound(model, feeds, state, layer.outputs * layer.V, buffers)
    call()
    check(attn, feeds, output.numpy())
    return timed(call)


def bare(buffers: Buffers, attn: la.LinearAttention, T: int, decay: str = "head") -> Run:
    """A contestant: nothing but the operator, for the layer's rule, without φ and normaliser."""
    layer, feeds = attn.layer, inputs(attn, T, decay)
    state = (1, layer.N, layer.K, layer.V)
    shapes = {name: a.shape for name, a in feeds.items()} | {"past_state": state}
    model = operator_file(shapes, layer.H, layer.rule.name, layer.scale)
    call, output = bound(model, feeds, state, layer.N * layer.V, buffers)
    call()
    check(attn, feeds, output.numpy())
    return timed(call)


def check(attn: la.LinearAttention, feeds: dict[str, Array], got: Array) -> None:
    """Raise Missing unless the first call gave what the float64 reference gives."""
    layer = attn.layer
    right = la.LinearAttention(
        layer.H,
        layer.K,
        feature_map=layer.phi,
        update_rule=layer.rule.name,
        normalize=layer.normalize,
        backend="reference",
    )
    x = {short: feeds[name] for short, name in zip("qkvgb", ("query", "key", "value", "decay", "beta"), strict=True)
         if name in feeds}  # fmt: skip
    T = feeds["query"].shape[1]
    q, k, v = (x.pop(n).reshape(1, T, layer.N, -1).astype(np.float64) for n in "qkv")
    g = x["g"].reshape(1, T, layer.N, -1) if "g" in x else None
    y = right.prefill(q, k, v, right.init_state(1, "float64"), g=g, beta=x.get("b"))
    error = np.abs(got.reshape(y.shape) - y).max() / np.abs(y).max()
    if not error <= TOLERANCE:
        raise Missing(f"its output is off by {error:.1e}")


def plain(rule: str, H: int, d: int) -> la.LinearAttention:
    return la.LinearAttention(H, d, feature_map="identity", update_rule=rule, normalize=False)


def compete(settings: Settings, group: Group, makers: dict[str, Maker], against: str) -> Group:
    contestants = {}
    buffers: Buffers = {}
    for name, make in makers.items():
        try:
            contestants[name] = make(buffers)
        except Missing as reason:
            group.notes.append(f"{name}: NOT TIMED, {reason}")
    if contestants:
        group.measure(settings, contestants)
        group.compare(*((name, against) for name in contestants if name != against))
    return group


def step(settings: Settings) -> Iterator[Group]:
    """One token: the files of an identity layer and of a normalised elu layer against the bare operator."""
    for H in (8,) if settings.quick else (8, 32):
        for rule in ("linear", "gated", "delta", "gated_delta"):
            attn, d = plain(rule, H, 64), 64
            makers: dict[str, Maker] = {
                "bare operator": lambda b, a=attn: bare(b, a, 1),
                "fused": lambda b, a=attn: exported(b, a, 1, "fused"),
                "portable step": lambda b, a=attn: exported(b, a, 1, "portable", tokens=1),
            }
            if not settings.quick:
                makers["portable block"] = lambda b, a=attn: exported(b, a, 1, "portable")
            if rule == "linear":
                elu = la.LinearAttention(H, d)
                makers["fused, elu normalised"] = lambda b, a=elu: exported(b, a, 1, "fused")
                makers["portable step, elu normalised"] = lambda b, a=elu: exported(b, a, 1, "portable", tokens=1)
            group = Group("step", f"{rule}, H = {H}, d = {d}", {"H": H, "d": d, "rule": rule})
            yield compete(settings, group, makers, "bare operator")


def block(settings: Settings) -> Iterator[Group]:
    """64 tokens in one call: the matrix form against the fused kernel."""
    T = 64
    for H, d in ((8, 64),) if settings.quick else ((32, 64), (32, 128)):
        for rule, decay in (("linear", "head"), ("gated", "head"), ("gated", "channel"), ("gated_delta", "head")):
            attn = plain(rule, H, d)
            makers: dict[str, Maker] = {
                "fused": lambda b, a=attn, g=decay: exported(b, a, T, "fused", g),
                "portable": lambda b, a=attn, g=decay: exported(b, a, T, "portable", g),
                "portable, sizes fixed": lambda b, a=attn, g=decay: exported(
                    b, a, T, "portable", g, batch_size=1, tokens=T
                ),
            }
            kind = f"{rule}, decay per {decay}" if "gated" in rule else rule
            group = Group("block", f"{kind}, T = {T}, H = {H}, d = {d}", {"H": H, "d": d, "rule": rule, "decay": decay})
            yield compete(settings, group, makers, "fused")


PEAK = """
import sys
sys.path[:0] = {folders!r}
from onnx_files import bound, exported, inputs, plain
import linattn_export as lx, tempfile, pathlib
attn = plain({rule!r}, {H}, {d})
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "layer.onnx")
    lx.export_layer(attn, path, {flavor!r}, decay={decay!r})
    model = path.read_bytes()
call, _ = bound(model, inputs(attn, {T}, {decay!r}), (1, {H}, {d}, {d}), {H} * {d}, {{}})
def held(what):
    return int(pathlib.Path("/proc/self/status").read_text().split(what + ":")[1].split()[0]) / 1024
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = held("VmRSS")
call()
print(held("VmHWM") - before)
"""


def memory(settings: Settings) -> Iterator[Group]:
    """How much the first call of a block adds to a fresh process: its temporaries. Linux only."""
    T, (H, d) = 64, (8, 64) if settings.quick else (32, 128)
    group = Group("memory", f"T = {T}, H = {H}, d = {d}, temporaries of a call", {"H": H, "d": d}, unit="MiB")
    folders = [str(Path(__file__).parent), *sys.path]
    for rule, decay in (("gated", "head"), ("gated", "channel"), ("gated_delta", "channel")):
        code = PEAK.format(folders=folders, rule=rule, H=H, d=d, T=T, decay=decay, flavor="portable")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            group.notes.append(f"{rule}: left out, {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
        else:
            group.values[f"portable, {rule}, decay per {decay}: MiB"] = float(done.stdout)
    yield group


SUITES = {suite.__name__: suite for suite in (step, block, memory)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE too")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: to see that it runs")
    parser.add_argument("--only", action="append", choices=SUITES, metavar="SUITE", help=f"of {', '.join(SUITES)}")
    options = parser.parse_args(arguments)
    settings = Settings(options.quick, rounds=60)
    if options.quick:
        settings.rounds, settings.turn, settings.budget = 4, 1e-3, 0.3
    about = machine()
    print(f"{about['cpu']} ({about['llvm_cpu']}), {about['cores']} cores, {about['system']}, load {about['load']}\n")
    groups: list[Group] = []
    for name in options.only or SUITES:
        for group in SUITES[name](settings):
            group.show()
            groups.append(group)
    if options.json:
        report = {"format": FORMAT, "quick": options.quick, "machine": about, "groups": [vars(g) for g in groups]}
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + os.linesep, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

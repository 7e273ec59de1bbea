"""Other ways to run one token on a CPU: NumPy, ONNX Runtime's fused operator, torch. Each in its best in-place form.

A peer is built from a `Problem` by one function of `PEERS`, which raises Missing where its package is not installed.
All do the full token: exp of g included, state in float32, updated in place, inputs and outputs in buffers of theirs.
Who gives other answers than the float64 reference is named and not timed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import numpy as np

from linattn_edge.attention import LinearAttention
from linattn_edge.bench.inputs import aligned
from linattn_edge.bench.record import OURS
from linattn_edge.bench.turns import Array, Missing, Run, timed
from linattn_edge.state import State

CHECKED_TOKENS = 3
TOLERANCE = 1e-4  # of the largest number in the right answer; float32 gives about 1e-6


@dataclass(frozen=True)
class Problem:
    """One layer, identity map, no normaliser: what all peers can do. The same token over and over, of B streams."""

    rule: str
    H: int
    d: int
    B: int = 1
    seed: int = 0
    empty: bool = False  # the state begins with zeros: many large ones take long to draw

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """S [B, H, d, d]; q, k (unit length), v [B, H, d]; g per channel for "gated", per head for "gated_delta"."""
        draw = np.random.default_rng(self.seed)
        q, k, v = draw.standard_normal((3, self.B, self.H, self.d), dtype=np.float32)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        shape: tuple[int, ...] = (self.B, self.H, self.d, self.d)
        found = {
            "S": np.zeros(shape, np.float32) if self.empty else draw.standard_normal(shape, dtype=np.float32) * 0.1,
            "q": q,
            "k": k,
            "v": v,
        }
        if self.rule in ("gated", "gated_delta"):
            shape = (self.B, self.H, self.d)[: 3 if self.rule == "gated" else 2]
            found["g"] = draw.uniform(-0.1, -0.01, shape).astype(np.float32)
        if self.rule in ("delta", "gated_delta"):
            found["beta"] = draw.uniform(0.3, 0.9, (self.B, self.H)).astype(np.float32)
        return found

    @property
    def scale(self) -> float:
        return self.d**-0.5

    def layer(self, **options: Any) -> LinearAttention:
        return LinearAttention(self.H, self.d, feature_map="identity", update_rule=self.rule, **options)

    @cached_property
    def answer(self) -> tuple[Array, Array]:
        """The last output [B, H, d] and the state [B, H, d, d] after CHECKED_TOKENS tokens, in float64."""
        x = dict(self.arrays)
        attn = self.layer(backend="reference")
        state = State.from_arrays(attn, x.pop("S").astype(np.float64), dtype="float64")
        for _ in range(CHECKED_TOKENS):
            y = attn.step(**x, state=state)
        return y, state.S


@dataclass
class Peer:
    """`step()` does one token; `read()` gives the last output and the state as they are then, any B and H first."""

    step: Callable[[], object]
    read: Callable[[], tuple[Array, Array]]
    keep: Any = None  # what must stay alive


def disagreement(peer: Peer, problem: Problem) -> str | None:
    """What a fresh peer gets wrong in its first tokens, or None."""
    for _ in range(CHECKED_TOKENS):
        peer.step()
    for name, got, right in zip(("output", "state"), peer.read(), problem.answer, strict=True):
        error = np.abs(got.reshape(right.shape) - right).max() / np.abs(right).max()
        if not error <= TOLERANCE:  # so that NaN counts as wrong
            return f"its {name} is off by {error:.1e}"
    return None


def own(a: Array) -> Array:
    """A copy at an address that suits vector loads, so that no peer is slow by chance."""
    copy = aligned(a.shape)
    copy[...] = a
    return copy


def ours(problem: Problem) -> Peer:
    attn, x = problem.layer(), dict(problem.arrays)
    state = State.from_arrays(attn, x.pop("S"))
    out = np.empty_like(x["v"])
    return Peer(partial(attn.step, **x, state=state, out=out), lambda: (out, state.S))


def numpy_peer(problem: Problem) -> Peer:
    """Whole-array operations with every result in a buffer: reading, decaying and writing are sweeps of their own."""
    x = {name: own(a.reshape(-1, *a.shape[2:])) for name, a in problem.arrays.items()}  # B · H heads
    S, q, k, v, scale = x["S"], x["q"], x["k"], x["v"], np.float32(problem.scale)
    row, column, value, write = k[:, None, :], k[:, :, None], v[:, None, :], own(S)
    read, y, factor = np.empty_like(value), np.empty_like(value), np.empty_like(x.get("g", q))
    wide = factor.reshape(len(S), -1, 1)

    def step() -> None:
        if "g" in x:
            np.exp(x["g"], out=factor)
            np.multiply(S, wide, out=S)
        if "beta" in x:
            np.matmul(row, S, out=read)
            np.subtract(value, read, out=read)
            np.multiply(read, x["beta"][:, None, None], out=read)
            np.multiply(column, read, out=write)
        else:
            np.multiply(column, value, out=write)
        np.add(S, write, out=S)
        np.matmul(q[:, None, :], S, out=y)
        np.multiply(y, scale, out=y)

    return Peer(step, lambda: (y[:, 0], S))


def operator_file(shapes: Mapping[str, tuple[int, ...]], heads: int, rule: str, scale: float) -> bytes:
    """An ONNX file of com.microsoft::LinearAttention alone, its inputs of these shapes, `past_state` among them."""
    from onnx import TensorProto, helper

    order = ("query", "key", "value", "past_state", "decay", "beta")
    names = [name if name in shapes else "" for name in order]
    while not names[-1]:
        names.pop()
    outputs = {"output": shapes["value"], "present_state": shapes["past_state"]}
    node = helper.make_node(
        "LinearAttention",
        names,
        list(outputs),
        domain="com.microsoft",
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule=rule,
        scale=scale,
    )
    given, made = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in side.items()]
        for side in (shapes, outputs)
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "operator", given, made)
    return bytes(helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString())


def onnxruntime_peer(problem: Problem, shared: bool = True) -> Peer:
    """com.microsoft::LinearAttention, one thread, all inputs and outputs bound.

    shared: one buffer is both the past and the present state, which spares the operator a copy (its documentation
    promises nothing; the answers are checked). Otherwise two buffers change places with each token.
    """
    try:
        import onnx  # noqa: F401  (operator_file)
        import onnxruntime as ort
    except ImportError as error:
        raise Missing(f"{error.name} is not installed") from None
    B, H, d = problem.B, problem.H, problem.d
    x = dict(problem.arrays)
    feeds = {"past_state": own(x["S"])}
    for symbol, name in (("q", "query"), ("k", "key"), ("v", "value"), ("g", "decay"), ("beta", "beta")):
        if symbol in x:
            feeds[name] = own(x[symbol].reshape(B, 1, -1))
    model = operator_file({name: a.shape for name, a in feeds.items()}, H, problem.rule, problem.scale)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # a release without the operator
        raise Missing(f"onnxruntime {ort.__version__} does not run it ({type(error).__name__})") from None
    buffers = {**feeds, "output": aligned((B, 1, H * d)), "other": own(feeds["past_state"])}
    values = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in buffers.items()}
    bindings = []
    for past, present in (
        [("past_state", "past_state")] if shared else [("past_state", "other"), ("other", "past_state")]
    ):
        binding = session.io_binding()
        for name in feeds:
            binding.bind_ortvalue_input(name, values[past if name == "past_state" else name])
        binding.bind_ortvalue_output("output", values["output"])
        binding.bind_ortvalue_output("present_state", values[present])
        bindings.append((binding, present))
    turns = cycle(bindings)
    newest = ["past_state"]

    def step() -> None:
        binding, newest[0] = next(turns)
        session.run_with_iobinding(binding)

    def read() -> tuple[Array, Array]:
        return values["output"].numpy().copy(), values[newest[0]].numpy().copy()

    return Peer(step, read, keep=(values, buffers))


def torch_peer(problem: Problem, device: str = "cpu") -> Peer:
    """Eager, one thread, in place; on "cuda" on the GPU."""
    try:
        import torch
    except (ImportError, OSError):
        raise Missing("torch is not installed") from None
    torch.set_num_threads(1)
    x = {name: torch.from_numpy(own(a.reshape(-1, *a.shape[2:]))).to(device) for name, a in problem.arrays.items()}
    S, q, k, v, scale = x["S"], x["q"][:, None], x["k"][:, :, None], x["v"][:, None], problem.scale
    row = x["k"][:, None]
    y, read = torch.empty_like(v), torch.empty_like(v)
    factor = torch.empty_like(x["g"]) if "g" in x else None
    beta = x["beta"][:, None, None] if "beta" in x else None

    def step() -> None:
        with torch.inference_mode():
            if factor is not None:
                torch.exp(x["g"], out=factor)
                S.mul_(factor.view(len(S), -1, 1))
            if beta is None:
                S.baddbmm_(k, v)
            else:
                torch.bmm(row, S, out=read)
                torch.sub(v, read, out=read)
                read.mul_(beta)
                S.baddbmm_(k, read)
            torch.bmm(q, S, out=y)
            y.mul_(scale)

    return Peer(step, lambda: (y[:, 0].cpu().numpy(), S.cpu().numpy()))


Builder = Callable[[Problem], Peer]

PEERS: dict[str, dict[str, Builder]] = {  # by package
    "numpy": {"NumPy": numpy_peer},
    "torch": {"torch": torch_peer},
    "onnxruntime": {
        "ONNX Runtime": onnxruntime_peer,
        "ONNX Runtime, two state buffers": partial(onnxruntime_peer, shared=False),
    },
}


def builders(packages: Iterable[str]) -> dict[str, Builder]:
    """Ours, and those of the named packages."""
    found: dict[str, Builder] = {OURS: ours}
    for package in packages:
        found |= PEERS.get(package, {})
    return found


def installed() -> list[str]:
    """The packages of `PEERS` that are here; none is imported."""
    return [package for package in PEERS if find_spec(package) is not None]


def agreeing(problem: Problem, candidates: Mapping[str, Builder]) -> tuple[dict[str, Run], dict[str, str]]:
    """Those that are here and give the right answers, as contestants; and why the others are not timed."""
    contestants, reasons = {}, {}
    for name, build in candidates.items():
        try:
            peer = build(problem)
        except Missing as reason:
            reasons[name] = f"left out, {reason}"
            continue
        wrong = disagreement(peer, problem)
        if wrong:
            reasons[name] = f"NOT TIMED, {wrong}"
        else:
            contestants[name] = timed(peer.step)
    return contestants, reasons

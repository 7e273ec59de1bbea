"""verify: run an exported file on other runtimes, beside the float64 definitions of the Python runtime."""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linattn_edge import reference
from linattn_edge.kernels.layout import STEP
from linattn_edge.layer import Layer
from linattn_edge.models import Model
from linattn_edge.state import layer_of
from linattn_export.contract import Contract, read_contract
from linattn_export.graph import Array, need
from linattn_export.handover import check_belongs, feeds_of
from linattn_export.runtimes import Run, open_file

Path = str | os.PathLike[str]
BOUNDS = {"float32": 2e-5, "float16": 1e-3}  # relative RMS error of a row of the batch
# Where int8 products round the activations too. The bits per byte of a model hardly change by that (4th digit), but
# single numbers do; so the same file is also run with exact products, to the bound of float32.
EXACT = ", exact products"
ROUNDED = {"logits": 0.1, "states": 0.3}


class ParityError(ValueError):
    """A runtime gave other numbers than the Python runtime; `report` has all figures."""

    def __init__(self, report: "Report") -> None:
        self.report = report
        wrong = [f for f in report.figures if not f.holds]
        named = "; ".join(f"{f.runtime}, {f.case}, {f.output}: {f.error:.1e} > {f.bound:.0e}" for f in wrong[:3])
        super().__init__(f"{report.path}: {len(wrong)} of {len(report.figures)} figures beyond their bound: {named}")


@dataclass(frozen=True)
class Figure:
    """The relative RMS error of one output in one case, the worst row of the batch; inf where not all is finite."""

    runtime: str
    case: str
    output: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the error is within its bound."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Report:
    """What `verify` found. Prints as a table."""

    path: str
    flavor: str
    figures: tuple[Figure, ...] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether every figure is within its bound."""
        return all(figure.holds for figure in self.figures)

    def worst(self, runtime: str, output: str) -> float:
        """The largest error of an output on a runtime."""
        return max(f.error for f in self.figures if (f.runtime, f.output) == (runtime, output))

    def __str__(self) -> str:
        outputs = list(dict.fromkeys(f.output for f in self.figures))
        rows = [["runtime", "case", *outputs]]
        for runtime, case in dict.fromkeys((f.runtime, f.case) for f in self.figures):
            found = {f.output: f for f in self.figures if (f.runtime, f.case) == (runtime, case)}
            cells = (found.get(name) for name in outputs)
            errors = ["" if f is None else f"{f.error:.1e}" + ("" if f.holds else " FAILED") for f in cells]
            rows.append([runtime, case, *errors])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        largest = {f.output: max(g.bound for g in self.figures if g.output == f.output) for f in self.figures}
        bounds = ", ".join(f"{name} {bound:.0e}" for name, bound in largest.items())
        head = f"{self.path} ({self.flavor}): relative RMS error, bound {bounds}"
        return "\n".join([head, *lines, "all within bounds" if self.passed else "FAILED"])


@dataclass(frozen=True)
class Case:
    """Streams that are run in pieces of those lengths, the first of them after `before` tokens."""

    name: str
    streams: int
    lengths: tuple[int, ...]
    before: int


def verify(path: Path, attn_or_model: Any, runtimes: Sequence[str] = ("onnxruntime",)) -> Report:
    """See `linattn_export.verify`."""
    contract = read_contract(path)
    check_belongs(contract, attn_or_model, path)
    if isinstance(runtimes, str) or not runtimes:
        raise ValueError(f"runtimes: expected a list of names, got {runtimes!r}")
    ready = {name: open_file(name, path) for name in runtimes}
    if rounds(contract, attn_or_model):
        with tempfile.TemporaryDirectory() as folder:
            copy = exact_copy(path, folder)
            ready |= {f"{name}{EXACT}": open_file(name, copy) for name in runtimes}
    figures = []
    for number, case in enumerate(cases(contract)):
        problem: LayerProblem | ModelProblem
        if isinstance(attn_or_model, Model):
            problem = ModelProblem(contract, attn_or_model, case, seed=number)
        else:
            problem = LayerProblem(contract, layer_of(attn_or_model), case, seed=number)
        for name, run in ready.items():
            figures += problem.figures(name, run)
    report = Report(os.fspath(path), contract.flavor, tuple(figures))
    if not report.passed:
        raise ParityError(report)
    return report


def rounds(contract: Contract, attn_or_model: Any) -> bool:
    """Whether the file's products round the activations to int8."""
    return isinstance(attn_or_model, Model) and attn_or_model.weights == "int8" and contract.flavor == "fused"


def exact_copy(path: Path, folder: str) -> str:
    """The file with activations left as they are in its products: slower, and comparable to the last digit."""
    onnx = need("onnx")
    model = onnx.load(os.fspath(path), format="protobuf")
    for node in model.graph.node:
        kept = [a for a in node.attribute if a.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend(kept)
    copy = os.path.join(folder, "exact.onnx")
    onnx.save(model, copy, save_as_external_data=True, location="exact.data")
    return copy


def cases(contract: Contract) -> list[Case]:
    """Token by token, in blocks, and mixed, as far as the file's fixed sizes and its horizon allow."""
    B, horizon = contract.batch_size, contract.horizon or 2**62
    if contract.tokens is not None:
        tokens = contract.tokens
        calls = max(1, min(9 if tokens == 1 else 3, (horizon - 5) // tokens))
        named = "token by token" if tokens == 1 else f"blocks of {tokens}"
        found = [Case(named, B or 1, (tokens,) * calls, 0)]
        if horizon >= calls * tokens + 5:
            found.append(Case(f"{named}, from a state", B or 3, (tokens,) * calls, 5))
        return found
    block = min(contract.block_length or 64, 64)
    found = [
        Case("token by token", B or 1, (1,) * 9, 0),
        Case("blocks", B or 1, (block, block), 0),
        Case("mixed, from a state", B or 3, (1, 7, 1, block // 2, 2, 1), 5),
    ]
    return [case for case in found if case.before + sum(case.lengths) <= horizon] or [
        Case("token by token", B or 1, (1,) * min(9, horizon), 0)
    ]


class LayerProblem:
    """Inputs for a layer's graph, and what the float64 token loop makes of them."""

    def __init__(self, contract: Contract, layer: Layer, case: Case, seed: int) -> None:
        self.contract, self.layer, self.case = contract, layer, case
        T = case.before + sum(case.lengths)
        self.tokens = self._draw(np.random.default_rng(seed), case.streams, T)
        B = case.streams
        S, z = np.zeros((B, layer.N, layer.F, layer.V)), np.zeros((B, layer.N, layer.F)) if layer.normalize else None
        position = np.zeros(B, np.int64)
        S, z, _ = self._loop(S, z, position, 0, case.before)
        self.S = _joined(S, z).astype(np.float32)  # what the graph starts from
        S, z = self.S[..., : layer.V].astype(np.float64), None if z is None else self.S[..., layer.V].astype(np.float64)
        S, z, y = self._loop(S, z, position + case.before, case.before, T)
        self.expected = {"output": y.reshape(B, T - case.before, -1), "present_state": _joined(S, z)}

    def _draw(self, rng: np.random.Generator, B: int, T: int) -> dict[str, Array]:
        """Packed inputs by name, in the file's dtypes: with resets among the decays, and delta rules kept stable."""
        layer = self.layer
        q, k = (0.7 * rng.standard_normal((B, T, heads, layer.K)) for heads in (layer.H, layer.HK))
        if layer.normalize and not layer.phi.positive:
            q, k = abs(q), abs(k)  # a signed φ would be divided by what happens to be near zero
        drawn = {"query": q, "key": k, "value": rng.standard_normal((B, T, layer.N, layer.V)) + 0.5}
        shapes = {tensor.name: tensor for tensor in self.contract.inputs}
        if "decay" in shapes:
            g = -0.1 * abs(rng.standard_normal((B, T, int(shapes["decay"].shape[-1]))))
            g[rng.random(g.shape) < 0.03] = -np.inf
            g[rng.random(g.shape) < 0.03] = -6e4
            drawn["decay"] = g
        if "beta" in shapes:
            x = reference.unit(k) if layer.qk_norm else k
            size = np.square(layer.phi.key(x, np.arange(T)[None, :, None])).sum(axis=-1)
            size = np.repeat(size, layer.N // layer.HK, axis=2)
            drawn["beta"] = rng.uniform(0.2, 1.5, (B, T, layer.N)) / np.maximum(size, 1)
        return {n: a.reshape(B, T, -1).astype(shapes[n].dtype) for n, a in drawn.items()}

    def _loop(self, S: Array, z: Array | None, position: Array, start: int, end: int) -> tuple[Array, Any, Array]:
        layer, T, B = self.layer, end - start, self.case.streams
        x = {n: a[:, start:end].astype(np.float64) for n, a in self.tokens.items()}
        q, k, v = (
            x[n].reshape(B, T, heads, -1 if T else width)
            for n, heads, width in (
                ("query", layer.H, layer.K),
                ("key", layer.HK, layer.K),
                ("value", layer.N, layer.V),
            )
        )
        g, beta = x.get("decay"), x.get("beta")
        if g is not None:
            g = g.reshape(B, T, layer.N, g.shape[-1] // layer.N)
        return reference.token_loop(layer, S, z, position, STEP, T, q, k, v, g, beta, None)

    def figures(self, runtime: str, run: Run) -> list[Figure]:
        """Run the graph piece by piece on its own state, and compare."""
        case, dtype = self.case, self.contract.outputs[0].dtype
        position = np.full(case.streams, case.before, np.int64)
        held: dict[str, Array] = {"recurrent": self.S, "position": position}
        first = {entry.past: held[entry.holds] for entry in self.contract.states}
        y, last = drive(run, self.contract, case, self.tokens, first)
        got = {"output": y, "present_state": last["past_state"]}
        bounds = {"output": BOUNDS[dtype], "present_state": BOUNDS["float32"]}
        errors = {name: error(got[name], self.expected[name]) for name in got}
        figures = [Figure(runtime, case.name, name, errors[name], bounds[name]) for name in got]
        if "past_position" in last:
            same = np.array_equal(last["past_position"], position + sum(case.lengths))
            figures.append(Figure(runtime, case.name, "present_position", 0.0 if same else math.inf, 0.0))
        return figures


class ModelProblem:
    """Random ids for a model's graph, and what the Python runtime makes of them."""

    def __init__(self, contract: Contract, model: Model, case: Case, seed: int) -> None:
        self.contract, self.case = contract, case
        T = case.before + sum(case.lengths)
        self.ids = np.random.default_rng(seed).integers(0, model.vocab_size, (case.streams, T))
        state = model.init_state(case.streams)
        model.prefill(self.ids[:, : case.before], state, logits="last")
        self.first = feeds_of(contract, state)
        self.logits = model.prefill(self.ids[:, case.before :], state).astype(np.float64)
        self.last = feeds_of(contract, state)
        self.rounds = rounds(contract, model)

    def figures(self, runtime: str, run: Run) -> list[Figure]:
        """Run the graph piece by piece on its own state, and compare; of all states the worst."""
        logits, last = drive(run, self.contract, self.case, {"input_ids": self.ids}, self.first)
        worst = max(error(last[name], want.astype(np.float64)) for name, want in self.last.items())
        errors = {"logits": error(logits, self.logits), "states": worst}
        loose = self.rounds and not runtime.endswith(EXACT)
        bounds = ROUNDED if loose else dict.fromkeys(errors, BOUNDS["float32"])
        return [Figure(runtime, self.case.name, name, found, bounds[name]) for name, found in errors.items()]


def drive(
    run: Run, contract: Contract, case: Case, tokens: Mapping[str, Array], carried: dict[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Run a graph on a case's pieces: its first output at every token, and the states it ends with, by past name."""
    start, pieces = case.before, []
    for length in case.lengths:
        feeds = {n: np.ascontiguousarray(a[:, start : start + length]) for n, a in tokens.items()}
        found = run(feeds | carried)
        pieces.append(found[contract.outputs[0].name])
        carried = {entry.past: found[entry.present] for entry in contract.states}
        start += length
    return np.concatenate(pieces, axis=1), carried


def error(got: Array, want: Array) -> float:
    """The relative RMS error of the worst row; inf where shapes differ or anything is not finite."""
    if got.shape != want.shape or not np.isfinite(got).all():
        return math.inf
    worst = 0.0
    for a, b in zip(got.astype(np.float64), want, strict=True):
        size, off = math.sqrt(np.mean(b * b)), math.sqrt(np.mean((a - b) ** 2))
        worst = max(worst, off / size if size else (math.inf if off else 0.0))
    return worst


def _joined(S: Array, z: Array | None) -> Array:
    return S if z is None else np.concatenate([S, z[..., None]], axis=-1)

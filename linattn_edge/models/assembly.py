"""Assembly: a model's operations (kernels/program.py), written one after another, with the arrays they point to."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn_edge.attention import make_plan
from linattn_edge.errors import CheckpointError
from linattn_edge.features import FeatureMap
from linattn_edge.kernels import program
from linattn_edge.layer import Layer
from linattn_edge.models.checkpoint import Tensors

F32 = NDArray[np.float32]

WEIGHTS = ("float32", "float16", "int8")
_ACTS = {
    "swish": program.SILU,
    "silu": program.SILU,
    "sigmoid": program.SIGMOID,
    "relu": program.RELU,
    "sqrelu": program.RELU2,
    "gelu": program.GELU,
    "logsigmoid": program.LOG_SIGMOID,
}


@dataclass
class Matrix:
    """A matrix [N, M] as kernels read it (see program.py): numbers, and for int8 a scale for each row."""

    kind: int
    numbers: NDArray[Any]
    scales: F32 | None

    @classmethod
    def pack(cls, name: str, matrix: F32, weights: str) -> "Matrix":
        """Store a matrix; int8 rounds each row to 127 steps of its largest number."""
        if weights == "float32":
            return cls(program.FLOAT32, _blocks(matrix), None)
        if weights == "float16":
            largest = float(np.abs(matrix).max(initial=0))
            if largest > 65504:
                raise CheckpointError(f"tensor {name} holds {largest:g}, which float16 can't")
            return cls(program.FLOAT16, _blocks(matrix.astype(np.float16).view(np.uint16)), None)
        scales = np.abs(matrix).max(axis=1, initial=0).astype(np.float32) / np.float32(127)
        scales[scales < np.finfo(np.float32).tiny] = 0
        steps = np.where(scales[:, None] > 0, matrix / np.where(scales > 0, scales, 1)[:, None], 0)
        return cls(program.INT8, _blocks(np.rint(steps).astype(np.int8)), _filled(scales))

    def rows(self, N: int) -> NDArray[Any]:
        """The numbers as [N, M] again, in the dtype they are kept in."""
        M = self.numbers.shape[1]
        rows = self.numbers.transpose(0, 2, 1).reshape(-1, M)[:N]
        return rows.view(np.float16) if self.kind == program.FLOAT16 else rows


def _filled(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows [N, ...], with rows of zeros up to a whole block."""
    out = np.zeros((program.filled(len(rows)), *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    return out


def _blocks(matrix: NDArray[Any]) -> NDArray[Any]:
    """[N, M] as [N / LANES, M, LANES]."""
    return np.ascontiguousarray(_filled(matrix).reshape(-1, program.LANES, matrix.shape[1]).transpose(0, 2, 1))


class Operation(NamedTuple):
    """An operation as it was asked for: its operands by name, before they became addresses, and what it is about."""

    code: int
    operands: dict[str, Any]
    of: Any  # a Matrix, a FeatureMap with a side, or a Layer


@dataclass
class Assembly:
    """Operations in the making. Buffers are named by where they begin, in numbers for each token.

    They are written twice: as rows for the kernels, and in `listing` for those who translate a model (the exporter).
    """

    tensors: Tensors
    hidden: int
    eps: float
    weights: str
    affine: bool  # whether norms have weights
    inner: int  # width of the MLPs
    named: dict[str, int] = field(default_factory=dict)
    width: int = 0  # numbers for each token that all buffers take
    operations: list[NDArray[np.int64]] = field(default_factory=list)
    listing: list[Operation] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # arrays whose addresses the operations hold
    layers: list[Layer] = field(default_factory=list)
    convolutions: list[list[tuple[int, int]]] = field(default_factory=list)  # for each layer (channels, tokens kept)
    most: int = 0  # the largest `width` there was

    def buffer(self, width: int, name: str | None = None) -> int:
        """Room for `width` numbers of each token; unnamed room is taken again by the next block."""
        at = self.width
        self.width += width
        if name is not None:
            self.named[name] = at
        return at

    def add(self, code: int, of: Any = None, **operands: Any) -> None:
        """Write one operation; arrays are kept, and become addresses."""
        self.listing.append(Operation(code, operands, of))
        row = np.zeros(program.WIDTH, np.int64)
        row[program.CODE] = code
        for name, value in operands.items():
            column = getattr(program, name)
            if isinstance(value, np.ndarray):
                value = np.ascontiguousarray(value)
                self.kept.append(value)
                row[column] = value.ctypes.data
            elif isinstance(value, float):
                row[column] = np.float64(value).view(np.int64)
            elif value is not None:
                row[column] = value
        self.operations.append(row)

    def at(self, buffer: int | str) -> int:
        """Where a buffer begins."""
        return self.named[buffer] if isinstance(buffer, str) else buffer

    def embed(self, name: str, vocab: int) -> Matrix:
        """h = the rows of the embedding."""
        matrix = Matrix.pack(name, self.tensors.take(name, (vocab, self.hidden)), self.weights)
        self.add(
            program.EMBED, matrix, OUT=self.at("h"), N=vocab, M=self.hidden, WEIGHT=matrix.numbers, SCALE=matrix.scales,
            KIND=matrix.kind,
        )  # fmt: skip
        return matrix

    def matmul(self, matrix: Matrix, x: int | str, y: int, N: int, M: int, bias: F32 | None, add: bool = False) -> None:
        """y [N] = W x, or added to y."""
        self.add(
            program.ADD_MATMUL if add else program.MATMUL, matrix, A=self.at(x), OUT=y, N=N, M=M, WEIGHT=matrix.numbers,
            SCALE=matrix.scales, KIND=matrix.kind, EXTRA=bias,
        )  # fmt: skip

    def linear(self, name: str, x: int | str, M: int, N: int, *, bias: bool = False, add_to: str | None = None) -> int:
        """The linear layer of that name, to a new buffer or added to one."""
        matrix = Matrix.pack(name, self.tensors.take(f"{name}.weight", (N, M)), self.weights)
        shift = _filled(self.tensors.take(f"{name}.bias", (N,))) if bias else None
        y = self.buffer(N) if add_to is None else self.at(add_to)
        self.matmul(matrix, x, y, N, M, shift, add=add_to is not None)
        return y

    def norm(self, name: str, x: int | str, y: int | str, width: int, eps: float, groups: int = 1) -> None:
        """RMSNorm of groups of numbers."""
        weight = self.tensors.take(f"{name}.weight", (width,)) if self.affine else None
        self.add(program.NORM, A=self.at(x), OUT=self.at(y), N=groups, M=width, WEIGHT=weight, REAL=float(eps))

    def act(self, kind: str, x: int, N: int) -> None:
        """x = act(x)."""
        self.add(program.ACT, A=x, N=N, EXTRA=_ACTS[kind])

    def act_multiply(self, kind: str, x: int, by: int, y: int, N: int) -> None:
        """x = act(x), y = x · by."""
        self.add(program.ACT_MULTIPLY, A=x, B=by, OUT=y, N=N, EXTRA=_ACTS[kind])

    def log_decay(self, x: int, N: int, normalizer: float, lowest: float) -> None:
        """x = max(log σ(x) / normalizer, lowest)."""
        self.add(program.LOG_DECAY, A=x, OUT=x, N=N, WEIGHT=np.array([normalizer, lowest], np.float32))

    def conv(self, name: str, x: int, channels: int, tokens: int) -> None:
        """x = silu of the causal convolution of that name; its past tokens belong to the layer's state."""
        weight = self.tensors.take(f"{name}.weight", (channels, 1, tokens))
        bias = self.tensors.take(f"{name}.bias", (channels,)) if f"{name}.bias" in self.tensors else None
        past = self.convolutions[-1]
        place = {"STATE": len(self.convolutions) - 1, "KIND": len(past)}
        self.add(program.CONV, A=x, OUT=x, N=channels, M=tokens, WEIGHT=weight, EXTRA=bias, **place)
        past.append((channels, tokens - 1))

    def features(self, phi: FeatureMap, x: int, heads: int, K: int, F: int, side: int, sum_norm: bool) -> int:
        """φ of each head, and if asked divided by its sum + 1e-4 as fla's norm_q and norm_k have it."""
        from linattn_edge.kernels.phi import pack

        y = self.buffer(heads * F)
        weights = np.ascontiguousarray(phi.weights(K), np.float32)
        sides, rows, P = weights.shape
        plan = np.array([pack(phi, "float32"), weights[side * (sides - 1)].ctypes.data, rows, P, F], np.int64)
        self.kept.append(weights)
        self.add(program.PHI, (phi, side), A=x, OUT=y, N=heads, M=K, WEIGHT=plan)
        if sum_norm:
            self.add(program.SUM_NORM, A=y, OUT=y, N=heads, M=F, REAL=1e-4)
        return y

    def attention(self, layer: Layer, q: int, k: int, v: int, g: int | None = None) -> int:
        """The state's part: y [outputs, V] of this layer."""
        y = self.buffer(layer.outputs * layer.V)
        self.add(
            program.ATTENTION, layer, A=q, B=k, OUT=y, EXTRA=v, WEIGHT=make_plan(layer, "float32", False, self.kept),
            STATE=len(self.convolutions) - 1, KIND=0 if g is None else g, N=0 if g is None else layer.F,
        )  # fmt: skip
        return y

    def block(self, index: int, mixer: Any, config: Any) -> None:
        """norm → mixer → residual → norm → SwiGLU → residual."""
        at = f"model.layers.{index}"
        start = self.width
        self.convolutions.append([])
        self.norm(f"{at}.attn_norm", "h", "x", self.hidden, self.eps)
        self.layers.append(mixer(config, self, index))
        self.norm(f"{at}.mlp_norm", "h", "x", self.hidden, self.eps)
        gate = self.linear(f"{at}.mlp.gate_proj", "x", self.hidden, self.inner)
        up = self.linear(f"{at}.mlp.up_proj", "x", self.hidden, self.inner)
        self.act_multiply("swish", gate, up, up, self.inner)
        self.linear(f"{at}.mlp.down_proj", up, self.inner, self.hidden, add_to="h")
        self.most, self.width = max(self.most, self.width), start  # the next block uses the room again

"""The feature maps φ: one entry each, with the NumPy definition and the loop that the kernels compile.

A similarity κ(q, k) = φ(q)ᵀφ(k) with a finite φ is what lets history be folded into a state. Two routes lead there:
kernels that are finite by construction (`identity`, `elu`, `relu`, `relu2`, `polynomial`, `dpfp`, `cosformer`, and the
learned `hedgehog`, `t2r` and `elementwise_product`), and finite approximations of the softmax kernel exp(qᵀk/√K)
(`taylor`, `favor`, `rff`). No map looks at any token but its own: a stabiliser that needs the largest exponent of a
sequence is not a stream.

To add a map, write one class and list it in `_TABLE`: `dim`, `define` (NumPy) and `loop` (bare loops). No Numba here.
A caller's own function becomes a map with `FunctionMap`, without touching this file.
"""

import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge.arrays import flag, real_array, whole
from linattn_edge.errors import ShapeError
from linattn_edge.kernels.maths import cos, dot, exp, multiply, sin

__all__ = [
    "T2R",
    "CosFormer",
    "Dpfp",
    "ElementwiseProduct",
    "Elu",
    "Favor",
    "FeatureMap",
    "FunctionMap",
    "Hedgehog",
    "Identity",
    "Polynomial",
    "Relu",
    "Relu2",
    "Rff",
    "Taylor",
    "feature_map",
]

Array = NDArray[Any]

MAX_FEATURES = 65536  # F above this is refused: a state of F·V numbers per head is no edge state


class FeatureMap:
    """φ: `[..., K]` to `[..., F]`, applied to queries and keys.

    Subclasses say `name`, `positive` (κ(q, k) ≥ 0 for all q and k, so the normaliser φ(q)ᵀz cannot change sign),
    `dim`, `define` and `loop`; `__init__` stores its arguments under their own names, which is how a map is
    compared, shown and saved. A map without a `loop` runs all the same: φ is then computed by `define`, in Python.
    """

    name: ClassVar[str]
    positive: bool = True
    elementwise: ClassVar[bool] = False  # F = K, and each y[i] depends on x[i] alone: one loop does all heads
    parameters: ClassVar[tuple[str, ...]] = ()  # the constructor's arguments
    horizon: int | None = None  # positions from here on have no φ
    given: ClassVar[bool] = False  # `weights` can't be worked out anywhere: they are saved with a layer

    def dim(self, K: int) -> int:
        """F, the feature width for head width K."""
        return K

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        """φ in NumPy, in x's own precision: x `[..., K]`, weights one row of `weights(K)`."""
        raise NotImplementedError

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        """φ of one vector, x `[K]` to y `[F]`: a bare loop over scalars that Numba can compile for CPU and CUDA."""
        raise NotImplementedError

    def numbers(self, K: int) -> NDArray[np.float64]:
        """What `define` and `loop` read, `[sides, heads, P]`: side 0 for keys, the last for queries."""
        return np.zeros((1, 1, 0))

    def bound(self, K: int, largest: float) -> float:
        """The norm of x up to which no number that φ makes on the way exceeds `largest`; inf for any norm."""
        return math.inf

    def limit(self, K: int, largest: float) -> float:
        """The norm up to which queries and keys are taken: the bound, less what rounding may add."""
        return self.bound(K, largest) * (1 - 1e-3)

    def heads(self, side: int) -> int:
        """Heads that have numbers of their own on that side, or 1 where all share them."""
        return 1

    def weights(self, K: int) -> NDArray[np.float64]:
        """`numbers(K)`, made once."""
        return _weights(self, K)

    def config(self) -> dict[str, Any]:
        """What `feature_map(**config)` needs to make this map again; a map of the caller's own is told by its class."""
        own = {} if type(self) in _TABLE else {"class": f"{type(self).__module__}.{type(self).__qualname__}"}
        return {"name": self.name, **own, **{p: getattr(self, p) for p in self.parameters}}

    @classmethod
    def restore(cls, parameters: dict[str, Any], K: int, weights: Array | None) -> "FeatureMap":
        """The map that was saved with these parameters and `weights(K)`."""
        return cls(**parameters)

    def checked_dim(self, K: int) -> int:
        """`dim(K)`, refused above MAX_FEATURES."""
        if K < 1:
            raise ShapeError(f"{self.name}: expected vectors [..., K] of K >= 1, got K = {K}")
        F = self.dim(K)
        if F > MAX_FEATURES:
            raise ValueError(f"{self!r} of key_dim {K} has F = {F} features; the limit is {MAX_FEATURES}")
        return F

    @property
    def has_loop(self) -> bool:
        """Whether kernels can compute φ; if not, `define` does before they run."""
        for cls in type(self).__mro__:  # a loop belongs to the `define` that it was written with
            if "loop" in cls.__dict__:
                return cls is not FeatureMap
            if "define" in cls.__dict__:
                return False
        return False

    def check_heads(self, H: int, HK: int) -> None:
        """Refuse a layer of H query and HK key heads that this map has no numbers for."""
        for side, what, there in ((-1, "query", H), (0, "key", HK)):
            if self.heads(side) not in (1, there):
                raise ShapeError(f"{self.name}: weights for {self.heads(side)} {what} heads, the layer has {there}")

    def check_layer(self, K: int, H: int, HK: int) -> None:
        """Refuse a layer of these sizes that this map does not fit."""
        self.check_heads(H, HK)

    def check_norms(self, name: str, x: Array, dtype: str) -> None:
        """Refuse vectors [..., K] for which φ would leave the range of dtype. Zeros always pass."""
        limit = self.limit(x.shape[-1], float(np.finfo(dtype).max))
        if limit == math.inf or x.size == 0:
            return
        size = np.maximum(np.abs(x).max(axis=-1), np.finfo(x.dtype).tiny).astype(np.float64)
        with np.errstate(over="ignore"):
            norms = size * np.sqrt(np.square(x / size[..., None]).sum(axis=-1))
        if not norms.max() <= limit * (1 - 1e-4):  # kernels sum in float32: what they refuse is refused here
            raise ValueError(
                f"{name}: {self!r} stays in the range of {dtype} for vectors of norm up to {limit:.6g}, got one of "
                f"norm {norms.max():.6g}"
            )

    def _apply(self, x: ArrayLike, side: int, position: ArrayLike | None) -> Array:
        x = real_array("x", x)
        x = x.astype(np.float64 if x.dtype == np.float64 else np.float32, copy=False)
        if x.ndim == 0:
            raise ShapeError(f"{self.name}: expected x of shape [..., K], got a scalar")
        K = x.shape[-1]
        self.checked_dim(K)
        now = self._positions(position, x)
        weights = self.weights(K)[side].astype(x.dtype)
        heads = self.heads(side)
        if heads == 1:
            return self.define(x, weights[0], now)
        if x.ndim < 2 or x.shape[-2] != heads:
            raise ShapeError(f"{self.name}: expected x of shape [..., {heads} heads, K], got {list(x.shape)}")
        return np.stack([self.define(x[..., h, :], weights[h], None) for h in range(heads)], axis=-2)

    def _positions(self, position: ArrayLike | None, x: Array) -> Array | None:
        if self.horizon is None:
            return None
        if position is None:
            raise ValueError(f"{self.name}: needs the position of each vector (whole numbers from 0), got none")
        now = np.asarray(position)
        if now.size and not (now.dtype.kind in "iu" and now.min() >= 0):
            raise ValueError(f"{self.name}: position: expected whole numbers from 0")
        if now.size and now.max() >= self.horizon:
            raise ValueError(f"{self.name}: position {now.max()} is beyond max_len = {self.horizon}")
        try:
            return np.broadcast_to(now, x.shape[:-1])
        except ValueError:
            raise ShapeError(
                f"{self.name}: position: expected a shape like x's, {list(x.shape[:-1])}, got {list(now.shape)}"
            ) from None

    def query(self, x: ArrayLike, position: ArrayLike | None = None) -> Array:
        """φ(q): `[..., K]` to `[..., F]`; float64 stays float64, everything else gives float32."""
        return self._apply(x, -1, position)

    def key(self, x: ArrayLike, position: ArrayLike | None = None) -> Array:
        """φ(k): `[..., K]` to `[..., F]`; float64 stays float64, everything else gives float32."""
        return self._apply(x, 0, position)

    def __call__(self, x: ArrayLike, position: ArrayLike | None = None) -> Array:
        """φ(x), for maps whose query and key sides agree."""
        return self.query(x, position)

    def kernel(
        self,
        q: ArrayLike,
        k: ArrayLike,
        q_position: ArrayLike | None = None,
        k_position: ArrayLike | None = None,
    ) -> Array:
        """κ(q, k) = φ(q)ᵀφ(k): `[..., K]` twice (broadcast) to `[...]`; positions only for maps that read them."""
        return np.asarray(np.sum(self.query(q, q_position) * self.key(k, k_position), axis=-1))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.config() == other.config()

    def __hash__(self) -> int:
        return hash(tuple((name, repr(value)) for name, value in self.config().items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{p}={getattr(self, p)!r}' for p in self.parameters)})"


@functools.lru_cache(maxsize=32)
def _weights(phi: FeatureMap, K: int) -> NDArray[np.float64]:
    made = np.ascontiguousarray(phi.numbers(K), np.float64)
    made.flags.writeable = False
    return made


class Identity(FeatureMap):
    """φ(x) = x, F = K: the linear kernel qᵀk, signed. What GLA, RetNet, DeltaNet and Mamba-2 use."""

    name = "identity"
    elementwise = True
    positive = False

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        return x.copy()

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        for i in range(x.size):
            y[i] = x[i]


class Elu(FeatureMap):
    """φ(x) = elu(x) + 1, F = K (Katharopoulos et al. 2020, eq. 7).

    Computed as x + 1 for x ≥ 0 and exp(x) else: adding 1 to elu(x) would lose everything below −18 in float32.
    """

    name = "elu"
    elementwise = True

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        return np.asarray(np.where(x >= 0, x + 1, np.exp(np.minimum(x, 0))))

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        one = x.dtype.type(1)
        zero = x.dtype.type(0)
        for i in range(x.size):
            y[i] = x[i] + one if x[i] >= zero else exp(min(x[i], zero))


class Relu(FeatureMap):
    """φ(x) = max(x, 0), F = K (Kasai et al. 2021, without their learned projection)."""

    name = "relu"
    elementwise = True

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        return np.maximum(x, 0)

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        zero = x.dtype.type(0)
        for i in range(x.size):
            y[i] = max(x[i], zero)


class Relu2(FeatureMap):
    """φ(x) = max(x, 0)², F = K (So et al. 2021, "squared ReLU")."""

    name = "relu2"
    elementwise = True

    def bound(self, K: int, largest: float) -> float:
        return math.sqrt(largest)

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        return np.square(np.maximum(x, 0))

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        zero = x.dtype.type(0)
        for i in range(x.size):
            r = max(x[i], zero)
            y[i] = r * r


class _Monomials(FeatureMap):
    """Shared by `polynomial` and `taylor`: every symmetric term once, φ_α(x) = c_α Π x_i^{α_i}, by rising degree.

    The terms of one degree are in lexical order, so those that begin with x_i are x_i times a tail of the degree below:
    the terms over x_i … x_{K−1}. `weights` holds the order, the lowest degree that has terms, the lengths of those
    tails [order, K] (row d − 1 is for degree d), and c [F].
    """

    def _order(self) -> int:
        raise NotImplementedError

    def _lowest(self) -> int:
        """The lowest degree that has terms."""
        return 0

    def _weight(self, degree: int, K: int) -> float:
        """What a term of that degree, x^α, is multiplied by, besides the multinomial √(degree!/α!)."""
        raise NotImplementedError

    def dim(self, K: int) -> int:
        order = self._order()
        if self._lowest() == order:
            return math.comb(K + order - 1, order)
        return math.comb(K + order, order)

    def bound(self, K: int, largest: float) -> float:
        order = self._order()
        scales = self.weights(K)[0, 0, 2 + order * K :]
        return largest if order == 0 else (largest / max(1.0, scales.max())) ** (1 / order)

    def numbers(self, K: int) -> NDArray[np.float64]:
        order, lowest = self._order(), self._lowest()
        try:
            largest = max(self._weight(d, K) * math.sqrt(math.factorial(d)) for d in range(lowest, order + 1))
        except OverflowError:
            largest = math.inf
        if largest > np.finfo(np.float32).max:
            raise ValueError(f"{self.name}: the coefficients of {self!r} exceed the range of float32")
        tails = [math.comb(K - i + d - 2, d - 1) for d in range(1, order + 1) for i in range(K)]
        scales = []
        for degree in range(lowest, order + 1):
            for term in itertools.combinations_with_replacement(range(K), degree):
                ways = math.factorial(degree)
                for i in set(term):
                    ways //= math.factorial(term.count(i))
                scales.append(self._weight(degree, K) * math.sqrt(ways))
        return np.array([order, lowest, *tails, *scales], np.float64)[None, None]

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        K, order = x.shape[-1], self._order()
        terms = [np.ones_like(x[..., :1])]
        for d in range(1, order + 1):
            tails = weights[2 + (d - 1) * K : 2 + d * K].astype(int)
            below = terms[-1]
            parts = [x[..., i : i + 1] * below[..., below.shape[-1] - n :] for i, n in enumerate(tails)]
            terms.append(np.concatenate(parts, axis=-1))
        return np.concatenate(terms[self._lowest() :], axis=-1) * weights[2 + order * K :]

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        K, F = x.size, y.size
        order, lowest = int(weights[0]), int(weights[1])
        y[0] = x.dtype.type(1)
        below, size = 0, 1  # where the terms of the degree below are, and how many
        for d in range(1, order + 1):
            at = 2 + (d - 1) * K
            start, many = below + size, 0
            for i in range(K):
                many += int(weights[at + i])
            if lowest > 0:  # only one degree is kept: its terms take the place of those below, moved to the end
                start = 0
                below = many - size
                for i in range(size - 1, -1, -1):
                    y[below + i] = y[i]
            to = start
            for i in range(K):
                tail = int(weights[at + i])
                multiply(y, to, x[i], below + size - tail, tail)
                to += tail
            below, size = start, many
        at = 2 + order * K
        for f in range(F):
            y[f] *= weights[at + f]


class Polynomial(_Monomials):
    """κ(q, k) = (qᵀk/√K + bias)^degree, exactly. F = C(K+degree, degree), or C(K+degree−1, degree) with bias 0.

    Each symmetric term is kept once: φ_α(x) = √(degree!/(α! j!)) · bias^{j/2} · (x/K^¼)^α with j = degree − |α|.
    Called signed for every degree: (x + bias)^2 reaches 0, where a normaliser is all rounding. Source: the binomial
    theorem; as attention, Kacham et al. 2023 (PolySketchFormer) and Arora et al. 2024 (Based) use degree 2.
    """

    name = "polynomial"
    positive = False
    parameters = ("degree", "bias")

    def __init__(self, degree: int = 2, bias: float = 1.0) -> None:
        self.degree = whole("polynomial: degree", degree, 1)
        if isinstance(bias, (str, bytes, bool)) or not (np.isreal(bias) and 0 <= bias < math.inf):
            raise ValueError(f"polynomial: bias: expected a finite number >= 0, got {bias!r}")
        self.bias = float(bias)

    def _order(self) -> int:
        return self.degree

    def _lowest(self) -> int:
        return self.degree if self.bias == 0 else 0

    def _weight(self, degree: int, K: int) -> float:
        rest = self.degree - degree
        return math.sqrt(math.comb(self.degree, degree) * self.bias**rest) * K ** (-degree / 4)


class Taylor(_Monomials):
    """exp(qᵀk/√K) cut after `order` terms: κ(q, k) = Σ_{n ≤ order} x^n/n!, x = qᵀk/√K. F = C(K+order, order).

    The truncation error is at most |x|^{order+1}/(order+1)! · max(1, eˣ). Odd orders go negative for x far below
    zero; even orders are positive for every x as a series, but φ is signed, so the packed inner product is certainly
    positive only while its rounding, ε·(F + order)·Σ_{n ≤ order} rⁿ/n! with r = ‖q‖‖k‖/√K, is below the series' least
    value: in float32 at K = 64 up to r = 60 for order 2. Each symmetric term is kept once: φ_α(x) = (x/K^¼)^α / √α!.
    Source: Taylor's theorem; as attention, Zhang et al. 2024 (Hedgehog) and Arora et al. 2024 (Based) use order 2.
    """

    name = "taylor"
    parameters = ("order",)

    def __init__(self, order: int = 2) -> None:
        self.order = whole("taylor: order", order, 0)
        self.positive = self.order % 2 == 0

    def _order(self) -> int:
        return self.order

    def _weight(self, degree: int, K: int) -> float:
        return 1 / math.sqrt(math.factorial(degree)) * K ** (-degree / 4)


class Dpfp(FeatureMap):
    """Deterministic parameter-free projection, F = 2·K·nu (Schlag et al. 2021, eq. 37-38).

    With r = relu([x, −x]): φ_{i + 2K(j−1)}(x) = r_i · r_{i−j}, j = 1 … nu, indices cyclic. `sum_norm`: divided by its
    sum, as that paper's delta rule wants it (their section 4.2); 0 stays 0.
    """

    name = "dpfp"
    parameters = ("nu", "sum_norm")

    def __init__(self, nu: int = 1, sum_norm: bool = False) -> None:
        self.nu = whole("dpfp: nu", nu, 1)
        self.sum_norm = flag("dpfp: sum_norm", sum_norm)

    def dim(self, K: int) -> int:
        return 2 * K * self.nu

    def numbers(self, K: int) -> NDArray[np.float64]:
        return np.full((1, 1, 1), float(self.sum_norm))

    def bound(self, K: int, largest: float) -> float:
        return math.sqrt(largest / (2 * K * self.nu if self.sum_norm else 1))

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        r = np.maximum(np.concatenate([x, -x], axis=-1), 0)
        y = np.concatenate([r * np.roll(r, j, axis=-1) for j in range(1, self.nu + 1)], axis=-1)
        if self.sum_norm:
            total = y.sum(axis=-1, keepdims=True)
            y = y / np.where(total > 0, total, 1)
        return y

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        K = x.size
        zero = x.dtype.type(0)
        total = zero
        for start in range(0, y.size, 2 * K):
            shift = start // (2 * K) + 1
            for i in range(2 * K):
                j = (i + 2 * K - shift) % (2 * K)
                a = max(x[i], zero) if i < K else max(-x[i - K], zero)
                b = max(x[j], zero) if j < K else max(-x[j - K], zero)
                y[start + i] = a * b
                total += a * b
        if weights[0] != zero and total > zero:
            for i in range(y.size):
                y[i] = y[i] / total


class CosFormer(FeatureMap):
    """φ_i(x) = [relu(x) cos(πi/2M), relu(x) sin(πi/2M)] at position i, F = 2K (Qin et al. 2022, eq. 10-12).

    κ(q_i, k_j) = relu(q)ᵀrelu(k) · cos(π(i − j)/2M): nearer tokens count more. M = `max_len` is a fixed horizon, since
    beyond it the cosine turns negative: positions from max_len on are refused. Positions count from 0, and are those of
    the state.
    """

    name = "cosformer"
    parameters = ("max_len",)

    def __init__(self, max_len: int) -> None:
        self.max_len = self.horizon = whole("cosformer: max_len", max_len, 1)

    def dim(self, K: int) -> int:
        return 2 * K

    def numbers(self, K: int) -> NDArray[np.float64]:
        return np.full((1, 1, 1), math.pi / 2 / self.max_len)

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        assert position is not None
        angle = (position * (math.pi / 2 / self.max_len))[..., None]
        r = np.maximum(x, 0)
        return np.concatenate([r * np.cos(angle), r * np.sin(angle)], axis=-1).astype(x.dtype, copy=False)

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        K = x.size
        zero = x.dtype.type(0)
        angle = x.dtype.type(position) * weights[0]
        c, s = cos(angle), sin(angle)
        for i in range(K):
            r = max(x[i], zero)
            y[i] = r * c
            y[K + i] = r * s


class _Learned(FeatureMap):
    """Shared by the maps with given weights: layers u = Wx + b, and what becomes of u.

    `weights` holds, for each side and head, a code that says how (0 unless a map has variants), then W [R, K], b [R].
    """

    given = True
    layers: ClassVar[int] = 1  # linear layers, stacked into R rows
    code: int = 0

    def _keep(self, pairs: list[tuple[Any, Any]], key: Any) -> None:
        """Check and keep the layers of the query side, and of the key side where it has its own."""
        rows = []
        for number, (weight, bias) in enumerate(pairs):
            label = f"{self.name}: weight{number + 1 if len(pairs) > 1 else ''}"
            w = np.array(real_array(label, weight), np.float64)
            if w.ndim not in (2, 3) or 0 in w.shape:
                raise ShapeError(f"{label}: expected shape [R, K] or [heads, R, K], got {list(w.shape)}")
            w = w if w.ndim == 3 else w[None]
            b = np.zeros(w.shape[:2])
            if bias is not None:
                b = np.array(real_array(label.replace("weight", "bias"), bias), np.float64)
                if b.shape not in (w.shape[1:2], w.shape[:2]):
                    raise ShapeError(f"{self.name}: bias: expected shape [R] or [heads, R], got {list(b.shape)}")
                b = np.broadcast_to(b, w.shape[:2])
            joined = np.concatenate([w, b[..., None]], axis=-1)
            if not np.isfinite(joined).all():
                raise ValueError(f"{label}: holds NaN or inf")
            rows.append(joined)
        if any(r.shape != rows[0].shape for r in rows):
            raise ShapeError(f"{self.name}: weight1 and weight2 differ in shape")
        self._query = np.concatenate(rows, axis=1)  # [heads, R, K + 1]
        self._key = self._query
        if key is not None:
            if type(key) is not type(self) or key.code != self.code or key._query.shape[1:] != self._query.shape[1:]:
                raise ValueError(f"{self.name}: key: expected another {type(self).__name__} of the same widths")
            self._key = key._query

    def heads(self, side: int) -> int:
        return int((self._key if side == 0 else self._query).shape[0])

    def _rows(self, K: int) -> int:
        if self._query.shape[2] != K + 1:
            raise ShapeError(f"{self.name}: weights for K = {self._query.shape[2] - 1}, got K = {K}")
        return int(self._query.shape[1])

    def numbers(self, K: int) -> NDArray[np.float64]:
        R = self._rows(K)
        table = np.zeros((2, max(self.heads(0), self.heads(-1)), 1 + R * (K + 1)))
        for side, kept in ((0, self._key), (1, self._query)):
            for h in range(table.shape[1]):
                own = kept[h % len(kept)]
                table[side, h] = np.concatenate([[self.code], own[:, :K].ravel(), own[:, K]])
        return table

    def _largest(self, K: int) -> tuple[float, float]:
        """The largest norm of a row of W, and the largest |b|."""
        both = np.concatenate([self._query.reshape(-1, K + 1), self._key.reshape(-1, K + 1)])
        return float(np.linalg.norm(both[:, :K], axis=1).max()), float(np.abs(both[:, K]).max())

    def config(self) -> dict[str, Any]:
        digest = hashlib.sha256(self._query.tobytes() + self._key.tobytes()).hexdigest()
        shapes = {"query_shape": list(self._query.shape), "key_shape": list(self._key.shape)}
        return super().config() | shapes | {"sha256": digest}

    @classmethod
    def restore(cls, parameters: dict[str, Any], K: int, weights: Array | None) -> "FeatureMap":
        shapes = [parameters.pop(name) for name in ("query_shape", "key_shape")]
        parameters.pop("sha256")
        if weights is None or weights.ndim != 3 or weights.shape[0] != 2:
            raise ValueError(f"{cls.name}: expected weights [2, heads, P]")
        sides = []
        for (heads, R, width), numbers in zip(shapes, weights[::-1], strict=True):
            if width != K + 1 or numbers.shape[0] < heads or numbers.shape[1] != 1 + R * width:
                raise ValueError(f"{cls.name}: weights of shape {list(weights.shape)} do not fit {[heads, R, K]}")
            w, b = numbers[:heads, 1 : 1 + R * K].reshape(heads, R, K), numbers[:heads, 1 + R * K :]
            parts = np.split(w, cls.layers, axis=1), np.split(b, cls.layers, axis=1)
            sides.append((*parts[0], *parts[1]))
        query, key = sides
        make: Any = cls
        return make(*query, key=make(*key, **parameters), **parameters)

    def __repr__(self) -> str:
        heads, R, width = self._query.shape
        options = "".join(f", {p}={getattr(self, p)!r}" for p in self.parameters)
        return f"{type(self).__name__}([{heads}, {R}, {width - 1}]{options})"


def _layer(x: Array, weights: Array) -> Array:
    """u = Wx + b of one row of a learned map's weights."""
    K = x.shape[-1]
    R = (weights.size - 1) // (K + 1)
    return x @ weights[1 : 1 + R * K].reshape(R, K).T + weights[1 + R * K :]


class T2R(_Learned):
    """φ(x) = relu(Wx + b), F = rows of W (Kasai et al. 2021, "T2R", eq. 5).

    W [F, K] for all heads or [heads, F, K], b [F] or [heads, F]. `key`: another T2R, for keys; else both sides agree.
    """

    name = "t2r"

    def __init__(self, weight: ArrayLike, bias: ArrayLike | None = None, key: "T2R | None" = None) -> None:
        self._keep([(weight, bias)], key)

    def dim(self, K: int) -> int:
        return self._rows(K)

    def bound(self, K: int, largest: float) -> float:
        norm, bias = self._largest(K)
        return min(largest, (largest - bias) / max(norm, 1.0))

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        return np.maximum(_layer(x, weights), 0)

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        K, F = x.size, y.size
        for f in range(F):
            u = weights[1 + F * K + f] + dot(weights, 1 + f * K, x)
            y[f] = max(u, x.dtype.type(0))


class ElementwiseProduct(_Learned):
    """φ(x) = (W₁x + b₁) ⊙ (W₂x + b₂), F = rows of W₁: fla's `elementwise_product` (HadamardFeatureMap). Signed.

    Weights [F, K] or [heads, F, K], biases [F] or [heads, F]. `key`: another ElementwiseProduct, for keys.
    """

    name = "elementwise_product"
    positive = False
    layers = 2

    def __init__(
        self,
        weight1: ArrayLike,
        weight2: ArrayLike,
        bias1: ArrayLike | None = None,
        bias2: ArrayLike | None = None,
        key: "ElementwiseProduct | None" = None,
    ) -> None:
        self._keep([(weight1, bias1), (weight2, bias2)], key)

    def dim(self, K: int) -> int:
        return self._rows(K) // 2

    def bound(self, K: int, largest: float) -> float:
        norm, bias = self._largest(K)
        return max(0.0, math.sqrt(largest) - bias) / max(norm, 1.0)

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        a, b = np.split(_layer(x, weights), 2, axis=-1)
        return np.asarray(a * b)

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        K, F = x.size, y.size
        for f in range(F):
            a = weights[1 + 2 * F * K + f] + dot(weights, 1 + f * K, x)
            b = weights[1 + 2 * F * K + F + f] + dot(weights, 1 + (F + f) * K, x)
            y[f] = a * b


class Hedgehog(_Learned):
    """φ of u = Wx + b and −u, F = 2 · rows of W (Zhang et al. 2024, "The Hedgehog & the Porcupine", section 4).

    Three things go by this name: `variant="exp"` is [exp(u), exp(−u)], the paper's eq. 5; "softmax" is [softmax(u),
    softmax(−u)], its numerically safer form; "joint" is softmax([2u, −2u]) over both halves, which is what fla has.
    W [R, K] for all heads or [heads, R, K], b [R] or [heads, R]. `key`: another Hedgehog, for keys.
    """

    name = "hedgehog"
    parameters = ("variant",)

    def __init__(
        self,
        weight: ArrayLike,
        bias: ArrayLike | None = None,
        key: "Hedgehog | None" = None,
        variant: str = "exp",
    ) -> None:
        if not isinstance(variant, str) or variant not in HEDGEHOGS:
            raise ValueError(f"hedgehog: variant: expected one of {', '.join(HEDGEHOGS)}; got {variant!r}")
        self.variant = variant
        self.code = HEDGEHOGS.index(variant)
        self._keep([(weight, bias)], key)

    def dim(self, K: int) -> int:
        return 2 * self._rows(K)

    def bound(self, K: int, largest: float) -> float:
        norm, bias = self._largest(K)
        most = math.log(largest) if self.variant == "exp" else largest / 4
        return max(0.0, most - 1e-6 * most - bias) / max(norm, 1e-30 if self.variant == "exp" else 1.0)

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        u = _layer(x, weights)
        if self.variant == "exp":
            return np.concatenate([np.exp(u), np.exp(-u)], axis=-1)
        if self.variant == "joint":
            e = np.exp(np.concatenate([2 * u, -2 * u], axis=-1) - 2 * np.abs(u).max(axis=-1, keepdims=True))
            return np.asarray(e / e.sum(axis=-1, keepdims=True))
        up, down = np.exp(u - u.max(axis=-1, keepdims=True)), np.exp(u.min(axis=-1, keepdims=True) - u)
        return np.concatenate([up / up.sum(axis=-1, keepdims=True), down / down.sum(axis=-1, keepdims=True)], axis=-1)

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        K, R = x.size, y.size // 2
        code = weights[0]
        zero = x.dtype.type(0)
        high = low = zero
        for f in range(R):
            u = weights[1 + R * K + f] + dot(weights, 1 + f * K, x)
            y[f] = u
            high = u if f == 0 else max(high, u)
            low = u if f == 0 else min(low, u)
        factor = x.dtype.type(1)
        if code == 0:
            high = low = zero
        elif code == 2:
            factor = x.dtype.type(2)
            high = max(high, -low)
            low = -high
        up = down = zero
        for f in range(R):
            u = y[f]
            y[f] = exp(factor * (u - high))
            y[R + f] = exp(factor * (low - u))
            up += y[f]
            down += y[R + f]
        if code != 0:
            if code == 2:
                up = down = up + down
            for f in range(R):
                y[f] = y[f] / up
                y[R + f] = y[R + f] / down


HEDGEHOGS = ("exp", "softmax", "joint")


class _Random(FeatureMap):
    """Shared by the random maps: draws w ~ N(0, I_K), as many as `num_features`, from `seed`.

    `weights` holds m, then the draws divided by K^¼ [m, K]. Draws come from NumPy's frozen legacy generator and
    are rounded to float32, so that they are the same on every platform; a saved layer brings its own.
    """

    given = True
    num_features: int
    seed: int
    orthogonal: bool

    def _keep(self, num_features: int, seed: int, orthogonal: bool) -> None:
        self.num_features = whole(f"{self.name}: num_features", num_features, 1, MAX_FEATURES)
        self.seed = whole(f"{self.name}: seed", seed, 0, 2**32 - 1)
        self.orthogonal = flag(f"{self.name}: orthogonal", orthogonal)

    def numbers(self, K: int) -> NDArray[np.float64]:
        m = self.num_features
        draws = gaussian_rows(m, K, self.seed, self.orthogonal) / math.sqrt(math.sqrt(K))
        return np.concatenate([[m], draws.reshape(-1)])[None, None]

    def _norm(self, K: int) -> float:
        """The largest norm of a row that x is multiplied with."""
        return float(np.linalg.norm(self.weights(K)[0, 0, 1:].reshape(-1, K), axis=1).max())

    @classmethod
    def restore(cls, parameters: dict[str, Any], K: int, weights: Array | None) -> "FeatureMap":
        phi = cls(**parameters)
        if weights is None or weights.shape != (1, 1, 1 + phi.num_features * K) or not np.isfinite(weights).all():
            raise ValueError(f"{cls.name}: expected {phi.num_features} draws of {K} finite numbers")
        kept = np.array(weights, np.float64)
        kept.flags.writeable = False
        if not np.array_equal(kept, phi.weights(K)):
            raise ValueError(f"{cls.name}: the saved draws are not those of seed {phi.seed}")
        return phi


def gaussian_rows(m: int, K: int, seed: int, orthogonal: bool) -> NDArray[np.float64]:
    """m draws of N(0, I_K), [m, K]; if orthogonal, blocks of K rows at right angles, with the norms of other draws.

    Yu et al. 2016 ("Orthogonal Random Features"); Choromanski et al. 2021, section 2.4.
    """
    generator = np.random.RandomState(seed)
    rows = generator.standard_normal((m, K)).astype(np.float32).astype(np.float64)
    if not orthogonal:
        return rows
    lengths = np.sqrt(np.square(generator.standard_normal((m, K))).sum(axis=1))
    for start in range(0, m, K):
        block = rows[start : start + K]
        for i in range(len(block)):  # Gram-Schmidt, twice is enough; exact sums, so every platform rounds alike
            for _ in range(2):
                for j in range(i):
                    block[i] -= math.fsum(block[i] * block[j]) * block[j]
            block[i] /= math.sqrt(math.fsum(block[i] * block[i]))
    return (rows * lengths[:, None]).astype(np.float32).astype(np.float64)


class Favor(_Random):
    """Positive random features for exp(qᵀk/√K): E[κ] is exact (Choromanski et al. 2021, FAVOR+, Lemma 1).

    With x = q/K^¼ and draws w_1 … w_m: φ_i(x) = exp(w_iᵀx − ‖x‖²/2)/√m, F = m = `num_features`; `hyperbolic` adds
    exp(−w_iᵀx − ‖x‖²/2) and divides by √2m, F = 2m (their SM^hyp+). The error falls as 1/√m and grows as
    exp(‖q + k‖²/√K): Lemma 2. `orthogonal` draws are at right angles, which lowers it (their section 2.4). Theirs
    subtracts the largest exponent of the sequence; a stream cannot.
    """

    name = "favor"
    parameters = ("num_features", "seed", "orthogonal", "hyperbolic")

    def __init__(
        self, num_features: int = 64, seed: int = 0, orthogonal: bool = True, hyperbolic: bool = False
    ) -> None:
        self._keep(num_features, seed, orthogonal)
        self.hyperbolic = flag("favor: hyperbolic", hyperbolic)

    def dim(self, K: int) -> int:
        return self.num_features * (2 if self.hyperbolic else 1)

    def bound(self, K: int, largest: float) -> float:
        # wᵀx − ‖x‖²/2 is at most ‖w‖²/2; where that is too much, up to the first x where it reaches log(largest)
        norm, most = self._norm(K) * K**0.25, math.log(largest) - 1
        whole_range = math.sqrt(largest) / max(1.0, norm)
        return whole_range if norm**2 <= 2 * most else (norm - math.sqrt(norm**2 - 2 * most)) * K**0.25

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        K = x.shape[-1]
        u = x @ weights[1:].reshape(-1, K).T
        less = np.square(x).sum(axis=-1, keepdims=True) * x.dtype.type(0.5 / math.sqrt(K))
        less = less + np.log(weights[0]) / 2
        if not self.hyperbolic:
            return np.exp(u - less)
        return np.concatenate([np.exp(u - less), np.exp(-u - less)], axis=-1) * x.dtype.type(math.sqrt(0.5))

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        K = x.size
        m = (weights.size - 1) // K
        half, less = x.dtype.type(0.5), x.dtype.type(0)
        for i in range(K):
            less += x[i] * x[i]
        less = half / math.sqrt(x.dtype.type(K)) * less + half * math.log(weights[0])
        for f in range(m):
            y[f] = dot(weights, 1 + f * K, x)
        if y.size == m:
            for f in range(m):
                y[f] = exp(y[f] - less)
        else:
            root = x.dtype.type(math.sqrt(half))
            for f in range(m):
                u = y[f]
                y[f] = exp(u - less) * root
                y[m + f] = exp(-u - less) * root


class Rff(_Random):
    """Trigonometric random features for exp(qᵀk/√K): E[κ] is exact (Rahimi & Recht 2007; Peng et al. 2021, RFA).

    With x = q/K^¼ and draws w_1 … w_m: φ(x) = exp(‖x‖²/2)/√m · [cos(w_iᵀx), sin(w_iᵀx)], F = 2m. κ is signed, and worst
    where exp(qᵀk/√K) is small (Choromanski et al. 2021, Lemma 2), so no layer normalises by it unless told to.
    """

    name = "rff"
    positive = False
    parameters = ("num_features", "seed", "orthogonal")

    def __init__(self, num_features: int = 64, seed: int = 0, orthogonal: bool = True) -> None:
        self._keep(num_features, seed, orthogonal)

    def dim(self, K: int) -> int:
        return 2 * self.num_features

    def bound(self, K: int, largest: float) -> float:
        return math.sqrt(2 * (math.log(largest) - 1)) * K**0.25

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        K = x.shape[-1]
        u = x @ weights[1:].reshape(-1, K).T
        size = np.square(x).sum(axis=-1, keepdims=True) * x.dtype.type(0.5 / math.sqrt(K))
        size = np.exp(size - np.log(weights[0]) / 2)
        return np.concatenate([np.cos(u) * size, np.sin(u) * size], axis=-1)

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        K = x.size
        m = y.size // 2
        half, size = x.dtype.type(0.5), x.dtype.type(0)
        for i in range(K):
            size += x[i] * x[i]
        size = exp(x.dtype.type(half / math.sqrt(x.dtype.type(K)) * size - half * math.log(weights[0])))
        for f in range(m):
            u = dot(weights, 1 + f * K, x)
            y[f] = cos(u) * size
            y[m + f] = sin(u) * size


class FunctionMap(FeatureMap):
    """φ from a function of the caller's own.

    Args:
        function: NumPy, `[..., K]` to `[..., F]`; it defines φ and is what every check compares with.
        features: F, a number, or a function of K.
        key_function: the same for keys, where they differ from queries.
        loop: `loop(x, y)` for one vector, x `[K]` to y `[F]`, scalars only, a plain or Numba-compiled function: then
            φ is computed inside the kernels, as the built-in maps are. Without it NumPy computes φ before each call.
            Not with key_function.
        positive: κ(q, k) ≥ 0 for all q and k.
        name: how it is shown and compared; two maps with one name, F and class count as equal.

    Such a map cannot be saved in a layer's file: code is not data. States of the layer can.
    """

    parameters = ("name", "features")

    def __init__(
        self,
        function: Callable[[Array], Array],
        features: int | Callable[[int], int],
        key_function: Callable[[Array], Array] | None = None,
        loop: Callable[[Array, Array], None] | None = None,
        positive: bool = False,
        name: str = "custom",
    ) -> None:
        for label, given in (("function", function), ("key_function", key_function), ("loop", loop)):
            if not callable(given) and (given is not None or label == "function"):
                raise TypeError(f"FunctionMap: {label}: expected a function, got {type(given).__name__}")
        if loop is not None and key_function is not None:
            raise ValueError("FunctionMap: a loop serves queries and keys alike; leave key_function out")
        if not isinstance(name, str) or not name or name in MAPS:
            raise ValueError(f"FunctionMap: name: expected a name that no built-in map has, got {name!r}")
        self.features = features if callable(features) else whole("FunctionMap: features", features, 1)
        self.positive = flag("FunctionMap: positive", positive)
        self.name = name  # type: ignore[misc]
        self._functions = (key_function or function, function)
        self._loop = getattr(loop, "py_func", loop)
        self._attach()

    def _attach(self) -> None:
        if self._loop is not None:
            self.loop = _with_numbers(self._loop)  # type: ignore[method-assign,assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "loop"}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__dict__.update(saved)
        self._attach()

    @property
    def has_loop(self) -> bool:
        return "loop" in self.__dict__

    def dim(self, K: int) -> int:
        return whole("FunctionMap: features", self.features(K), 1) if callable(self.features) else self.features

    def check_layer(self, K: int, H: int, HK: int) -> None:
        """Refuse a loop that makes something else of a vector than the function."""
        super().check_layer(K, H, HK)
        if self._loop is None:
            return
        x = 0.5 * np.cos(np.arange(1.0, K + 1))
        y = np.full(self.checked_dim(K), np.nan)
        self._loop(x.copy(), y)
        if not np.allclose(y, self.query(x), rtol=1e-3, atol=1e-6):
            raise ValueError(f"FunctionMap: loop and function of {self.name!r} differ at K = {K}")

    def config(self) -> dict[str, Any]:
        features = "a function" if callable(self.features) else self.features
        return super().config() | {"features": features, "loop": self.has_loop}

    def _apply(self, x: ArrayLike, side: int, position: ArrayLike | None) -> Array:
        x = real_array("x", x)
        x = x.astype(np.float64 if x.dtype == np.float64 else np.float32, copy=False)
        y = np.array(self._functions[side](x.copy()))  # a copy: the function may give the same array again
        expected = (*x.shape[:-1], self.checked_dim(x.shape[-1]))
        if y.shape != expected or y.dtype.kind not in "fiu":
            raise ShapeError(
                f"{self.name}: its function gave {y.dtype} of shape {list(y.shape)} for x of shape {list(x.shape)}; "
                f"expected numbers of shape {list(expected)}"
            )
        with np.errstate(over="ignore"):  # beyond float32 is inf, which whoever asked finds
            return y.astype(x.dtype, copy=False)


def _with_numbers(loop: Callable[[Array, Array], None]) -> Callable[[Array, Array, Array, int], None]:
    def with_numbers(x: Array, y: Array, weights: Array, position: int) -> None:
        loop(x, y)

    with_numbers.calls = loop  # type: ignore[attr-defined]  # what else the kernels must compile
    return with_numbers


_TABLE: tuple[type[FeatureMap], ...] = (
    Identity,
    Elu,
    Relu,
    Relu2,
    Polynomial,
    Taylor,
    Dpfp,
    CosFormer,
    Hedgehog,
    T2R,
    ElementwiseProduct,
    Favor,
    Rff,
)
MAPS: dict[str, type[FeatureMap]] = {cls.name: cls for cls in _TABLE}


def feature_map(name: str | FeatureMap, **parameters: Any) -> FeatureMap:
    """The map of that name: `feature_map("taylor", order=3)`. A FeatureMap is returned as it is."""
    if isinstance(name, FeatureMap):
        if parameters:
            raise ValueError(f"feature_map: {name!r} is made already; {', '.join(parameters)} can't be changed")
        return name
    if not isinstance(name, str) or name not in MAPS:
        raise ValueError(f"feature_map: expected a FeatureMap or one of {', '.join(MAPS)}; got {name!r}")
    cls = MAPS[name]
    arguments = inspect.signature(cls).parameters.values()
    missing = [a.name for a in arguments if a.default is a.empty and a.kind != a.VAR_POSITIONAL]
    missing = [a for a in missing if a not in parameters]
    if missing:
        raise ValueError(f"feature_map: {name!r} needs {', '.join(missing)}; give a map: {cls.__name__}(...)")
    return cls(**parameters)


def restore(config: Any, K: int, weights: Array | None) -> FeatureMap:
    """The map of a saved layer: its `config()` and its weights, neither of them trusted."""
    if not isinstance(config, dict) or not isinstance(config.get("name"), str) or config["name"] not in MAPS:
        raise ValueError(f"feature_map: expected one of {', '.join(MAPS)} in the file, got {config!r}")
    phi = MAPS[config["name"]].restore({n: v for n, v in config.items() if n != "name"}, K, weights)
    if phi.config() != config:
        raise ValueError(f"feature_map: the file's {config['name']} and its weights do not belong together")
    return phi

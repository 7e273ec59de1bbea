"""The feature maps φ: one entry each, with the NumPy definition and the loop that the kernels compile.

A similarity κ(q, k) = φ(q)ᵀφ(k) with a finite φ is what lets history be folded into a state. Two routes lead there:
kernels that are finite by construction (`identity`, `elu`, `relu`, `relu2`, `polynomial`, `dpfp`), and finite
approximations of the softmax kernel exp(qᵀk/√K) (`taylor`).

To add a map, write one class and list it in `_TABLE`: `dim`, `define` (NumPy) and `loop` (bare loops). No Numba here.
"""

import itertools
import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge.arrays import real_array, whole
from linattn_edge.errors import ShapeError
from linattn_edge.kernels.maths import exp

Array = NDArray[Any]

MAX_FEATURES = 65536  # F above this is refused: a state of F·V numbers per head is no edge state


class FeatureMap:
    """φ: `[..., K]` to `[..., F]`, applied to queries and keys.

    Subclasses say `name`, `positive` (κ(q, k) ≥ 0 for all q and k, so the normaliser φ(q)ᵀz cannot change sign),
    `dim`, `define` and `loop`; `__init__` stores its arguments under their own names, which is how a map is
    compared, shown and saved.
    """

    name: ClassVar[str]
    positive: bool = True
    elementwise: ClassVar[bool] = False  # F = K, and each y[i] depends on x[i] alone: one loop does all heads
    parameters: ClassVar[tuple[str, ...]] = ()  # the constructor's arguments

    def dim(self, K: int) -> int:
        """F, the feature width for head width K."""
        return K

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        """φ in NumPy, in x's own precision: x `[..., K]`, weights one row of `weights(K)`."""
        raise NotImplementedError

    def weights(self, K: int) -> NDArray[np.float64]:
        """Numbers that `define` and `loop` read, `[sides, heads, P]`: side 0 for keys, the last for queries."""
        return np.zeros((1, 1, 0))

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        """φ of one vector, x `[K]` to y `[F]`: a bare loop over scalars that Numba can compile for CPU and CUDA."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """What `feature_map(**config)` needs to make this map again; a map of the caller's own is told by its class."""
        own = {} if type(self) in _TABLE else {"class": f"{type(self).__module__}.{type(self).__qualname__}"}
        return {"name": self.name, **own, **{p: getattr(self, p) for p in self.parameters}}

    def checked_dim(self, K: int) -> int:
        """`dim(K)`, refused above MAX_FEATURES."""
        F = self.dim(K)
        if F > MAX_FEATURES:
            raise ValueError(f"{self!r} of key_dim {K} has F = {F} features; the limit is {MAX_FEATURES}")
        return F

    def _apply(self, x: ArrayLike, side: int, position: Array | None) -> Array:
        x = real_array("x", x)
        x = x.astype(np.float64 if x.dtype == np.float64 else np.float32, copy=False)
        if x.ndim == 0:
            raise ShapeError(f"{self.name}: expected x of shape [..., K], got a scalar")
        K = x.shape[-1]
        self.checked_dim(K)
        weights = self.weights(K)
        return self.define(x, weights[side, 0].astype(x.dtype), position)

    def query(self, x: ArrayLike, position: Array | None = None) -> Array:
        """φ(q): `[..., K]` to `[..., F]`; float64 stays float64, everything else gives float32."""
        return self._apply(x, -1, position)

    def key(self, x: ArrayLike, position: Array | None = None) -> Array:
        """φ(k): `[..., K]` to `[..., F]`; float64 stays float64, everything else gives float32."""
        return self._apply(x, 0, position)

    def __call__(self, x: ArrayLike, position: Array | None = None) -> Array:
        """φ(x), for maps whose query and key sides agree."""
        return self.query(x, position)

    def kernel(self, q: ArrayLike, k: ArrayLike) -> Array:
        """κ(q, k) = φ(q)ᵀφ(k): `[..., K]` twice (broadcast) to `[...]`."""
        return np.asarray(np.sum(self.query(q) * self.key(k), axis=-1))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.config() == other.config()

    def __hash__(self) -> int:
        return hash(tuple(self.config().items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{p}={getattr(self, p)!r}' for p in self.parameters)})"


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

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        return np.square(np.maximum(x, 0))

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        zero = x.dtype.type(0)
        for i in range(x.size):
            r = max(x[i], zero)
            y[i] = r * r


class _Monomials(FeatureMap):
    """Shared by `polynomial` and `taylor`: every symmetric term once, φ_α(x) = c_α Π x_i^{α_i}.

    A term is a row of `order` indices into (x, 1), in rising order; index K stands for the constant 1, so one table
    covers all degrees up to `order`. `weights` holds c [F], then the indices [order, F].
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

    def weights(self, K: int) -> NDArray[np.float64]:
        key = (type(self), self, K)
        if key not in _MONOMIAL_TABLES:
            _MONOMIAL_TABLES[key] = self._table(K)
        return _MONOMIAL_TABLES[key]

    def _table(self, K: int) -> NDArray[np.float64]:
        order = self._order()
        try:
            largest = max(self._weight(d, K) * math.sqrt(math.factorial(d)) for d in range(self._lowest(), order + 1))
        except OverflowError:
            largest = math.inf
        if largest > np.finfo(np.float32).max:
            raise ValueError(f"{self.name}: the coefficients of {self!r} exceed the range of float32")
        scales, rows = [], []
        for degree in range(self._lowest(), order + 1):
            for term in itertools.combinations_with_replacement(range(K), degree):
                ways = math.factorial(degree)
                for i in set(term):
                    ways //= math.factorial(term.count(i))
                scales.append(self._weight(degree, K) * math.sqrt(ways))
                rows.append(term + (K,) * (order - degree))
        indices = np.array(rows, dtype=np.float64).reshape(len(rows), order)
        table = np.concatenate([np.array(scales), indices.T.reshape(-1)])[None, None]
        table.flags.writeable = False
        return table

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        K, order = x.shape[-1], self._order()
        F = self.dim(K)
        extended = np.concatenate([x, np.ones_like(x[..., :1])], axis=-1)
        y = np.broadcast_to(weights[:F], (*x.shape[:-1], F)).copy()
        for index in weights[F:].astype(np.intp).reshape(order, F):
            y *= extended[..., index]
        return y

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        K, F = x.size, y.size
        for f in range(F):
            y[f] = weights[f]
        for start in range(F, weights.size, F):
            for f in range(F):
                i = int(weights[start + f])
                if i < K:
                    y[f] *= x[i]


_MONOMIAL_TABLES: dict[Any, NDArray[np.float64]] = {}


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
    zero; even orders are positive for every x as a series, but φ is signed, so in float32 the packed inner product
    of very long vectors can still round below zero. Each symmetric term is kept once: φ_α(x) = (x/K^¼)^α / √α!.
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

    With r = relu([x, −x]): φ_{i + 2K(j−1)}(x) = r_i · r_{i−j}, j = 1 … nu, indices cyclic. Not normalised by its sum;
    that is `normalize` here, or a step of the caller's for the delta rule.
    """

    name = "dpfp"
    parameters = ("nu",)

    def __init__(self, nu: int = 1) -> None:
        self.nu = whole("dpfp: nu", nu, 1)

    def dim(self, K: int) -> int:
        return 2 * K * self.nu

    def define(self, x: Array, weights: Array, position: Array | None) -> Array:
        r = np.maximum(np.concatenate([x, -x], axis=-1), 0)
        return np.concatenate([r * np.roll(r, j, axis=-1) for j in range(1, self.nu + 1)], axis=-1)

    @staticmethod
    def loop(x: Array, y: Array, weights: Array, position: int) -> None:
        K = x.size
        zero = x.dtype.type(0)
        for start in range(0, y.size, 2 * K):
            shift = start // (2 * K) + 1
            for i in range(2 * K):
                j = (i + 2 * K - shift) % (2 * K)
                a = max(x[i], zero) if i < K else max(-x[i - K], zero)
                b = max(x[j], zero) if j < K else max(-x[j - K], zero)
                y[start + i] = a * b


_TABLE: tuple[type[FeatureMap], ...] = (Identity, Elu, Relu, Relu2, Polynomial, Taylor, Dpfp)
MAPS: dict[str, type[FeatureMap]] = {cls.name: cls for cls in _TABLE}


def map_code(phi: FeatureMap) -> int:
    """Its place in the table, which is what the kernels choose by; -1 for a map that they don't know."""
    return _TABLE.index(type(phi)) if type(phi) in _TABLE else -1


def feature_map(name: str | FeatureMap, **parameters: Any) -> FeatureMap:
    """The map of that name: `feature_map("taylor", order=3)`. A FeatureMap is returned as it is."""
    if isinstance(name, FeatureMap):
        return name
    if not isinstance(name, str) or name not in MAPS:
        raise ValueError(f"feature_map: expected a FeatureMap or one of {', '.join(MAPS)}; got {name!r}")
    return MAPS[name](**parameters)

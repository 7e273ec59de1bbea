"""Hard inputs for the attention tests, each with the layer that takes them and the oracle's answer."""

import math
import os
import zlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

import linattn_edge as la
import naive
from linattn_edge.features import gaussian_rows

NOJIT = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")

# rule, and how g is given
VARIANTS = [
    ("linear", None),
    ("gated", "head"),
    ("gated", "channel"),
    ("delta", None),
    ("gated_delta", "head"),
    ("gated_delta", "channel"),
]
# query heads, key heads, value heads
LAYOUTS = {"mha": (2, 2, 2), "gqa": (4, 2, 2), "mqa": (3, 1, 1), "gva": (2, 2, 4), "gva3": (1, 1, 3)}
# the library's map, the oracle's
MAPS = {
    "identity": ("identity", naive.IDENTITY),
    "elu": ("elu", naive.ELU),
    "relu": ("relu", naive.RELU),
    "relu2": ("relu2", naive.RELU2),
    "dpfp": ("dpfp", naive.dpfp(1)),
    "dpfp3": (la.Dpfp(nu=3), naive.dpfp(3)),
    "polynomial": ("polynomial", naive.polynomial(2, 1.0)),
    "polynomial3": (la.Polynomial(degree=3, bias=0.5), naive.polynomial(3, 0.5)),
    "polynomial0": (la.Polynomial(degree=2, bias=0.0), naive.polynomial(2, 0.0)),
    "taylor1": (la.Taylor(order=1), naive.taylor(1)),
    "taylor": ("taylor", naive.taylor(2)),
    "taylor3": (la.Taylor(order=3), naive.taylor(3)),
}
POSITIVE = ("elu", "relu", "relu2", "dpfp", "dpfp3")


def numbers(name, *shape):
    """Weights for a map: of the size that training gives them, and always the same."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) / math.sqrt(shape[-1])


def learned(cls, oracle, name, K, heads=None, **options):
    """A learned map of 3 rows and its oracle; `heads`: weights for each of (query, key) heads."""
    layers = 2 if cls is la.ElementwiseProduct else 1
    sides = []
    for side, count in zip("qk", heads or (1, 1), strict=True):
        side = "" if heads is None else side
        w = [numbers(f"{name} {side} {i}", count, 3, K) for i in range(layers)]
        b = [0.3 * numbers(f"{name} bias {side} {i}", count, 3) for i in range(layers)]
        sides.append(([*w, *b], [oracle(*(a[h] for a in (*w, *b)), **options).features for h in range(count)]))
    (query, features), (key, keys) = sides
    if heads is None:
        return cls(*(a[0] for a in query), **options), naive.Map(features[0])
    return cls(*query, key=cls(*key, **options), **options), naive.Map(features, key=keys)


def doubled(x, y):
    for i in range(x.size):
        y[i] = 2 * x[i] * x[i]
        y[x.size + i] = x[i] + 1


def double(x):
    return np.concatenate([2 * x * x, x + 1], axis=-1)


def both(phi, K, H=1, HK=1):
    """The library's map of that name and the oracle's: one of MAPS, or made for K and the numbers of heads."""
    if phi in MAPS:
        return la.feature_map(MAPS[phi][0]), MAPS[phi][1]
    favor, rff = naive.favor, naive.rff
    hedgehog = (la.Hedgehog, naive.hedgehog, phi, K)
    makers = {
        "dpfp sum": lambda: (la.Dpfp(nu=2, sum_norm=True), naive.dpfp(2, sum_norm=True)),
        "cosformer": lambda: (la.CosFormer(max_len=90), naive.cosformer(90)),
        "hedgehog": lambda: learned(*hedgehog),
        "hedgehog softmax": lambda: learned(*hedgehog, variant="softmax"),
        "hedgehog joint": lambda: learned(*hedgehog, variant="joint"),
        "hedgehog heads": lambda: learned(*hedgehog, (H, HK)),
        "t2r": lambda: learned(la.T2R, naive.t2r, phi, K),
        "t2r heads": lambda: learned(la.T2R, naive.t2r, phi, K, (H, HK)),
        "product": lambda: learned(la.ElementwiseProduct, naive.elementwise_product, phi, K),
        "product heads": lambda: learned(la.ElementwiseProduct, naive.elementwise_product, phi, K, (H, HK)),
        "favor": lambda: (la.Favor(num_features=7, seed=3), favor(gaussian_rows(7, K, 3, True))),
        "favor hyperbolic": lambda: (la.Favor(5, 1, False, True), favor(gaussian_rows(5, K, 1, False), True)),
        "rff": lambda: (la.Rff(num_features=7, seed=2), rff(gaussian_rows(7, K, 2, True))),
        "function": lambda: (la.FunctionMap(double, 2 * K), naive.Map(double)),
        "function sides": lambda: (la.FunctionMap(np.cos, K, np.square), naive.Map(np.cos, key=np.square)),
        "function loop": lambda: (la.FunctionMap(double, lambda K: 2 * K, loop=doubled), naive.Map(double)),
    }
    return makers[phi]()


NEW = ["dpfp sum", "cosformer", "hedgehog", "hedgehog softmax", "hedgehog joint", "t2r", "product", "favor"]
NEW += ["favor hyperbolic", "rff"]
OF_HEADS = ["hedgehog heads", "t2r heads", "product heads"]
FUNCTIONS = ["function", "function sides", "function loop"]
SERIES = ["polynomial", "polynomial3", "polynomial0", "taylor1", "taylor", "taylor3"]  # no order of features
SAMPLES = [*MAPS, *NEW]  # every map of the library, weights for all heads
EVERY = [*SAMPLES, *OF_HEADS, *FUNCTIONS]


def sample(name, K=4):
    """A new map of that name, of EVERY, for one head of width K."""
    return both(name, K)[0]


@dataclass
class Case:
    """One stream: inputs, start, options. `attn` and `start()` are the library's side, `expected` is the oracle's."""

    rule: str
    layout: str
    phi: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray | None
    beta: np.ndarray | None
    S0: np.ndarray | None
    z0: np.ndarray | None
    normalize: bool
    lengths: np.ndarray | None = None
    options: dict | None = None
    position: object = 0  # of the first token, a number or [B]

    @property
    def maps(self):
        """The library's map and the oracle's."""
        H, HK, _ = LAYOUTS[self.layout]
        return both(self.phi, self.q.shape[-1], H, HK)

    def layer(self, **options):
        H, _, N = LAYOUTS[self.layout]
        heads = {"num_kv_heads": N} if N < H else {"num_value_heads": N} if N > H else {}
        given = {"feature_map": self.maps[0], "update_rule": self.rule, "normalize": self.normalize}
        sizes = {"num_heads": H, "key_dim": self.q.shape[-1], "value_dim": self.v.shape[-1]}
        return la.LinearAttention(**(sizes | heads | given | (self.options or {}) | options))

    @cached_property
    def attn(self):
        return self.layer()

    def start(self, attn=None, dtype="float32"):
        attn = attn or self.attn
        if self.S0 is None:
            state = attn.init_state(len(self.q), dtype=dtype)
        else:
            state = la.State.from_arrays(attn, self.S0, self.z0 if self.normalize else None, dtype=dtype)
        state.position = self.position
        return state

    @cached_property
    def expected(self):
        return self.oracle()

    def oracle(self, **changes):
        options = self.options or {}
        scale = options.get("scale", 1.0 if self.normalize else self.q.shape[-1] ** -0.5)
        rest = {name: options[name] for name in ("eps", "eps_mode", "qk_norm") if name in options}
        given = {
            "phi": self.maps[1],
            "normalize": self.normalize,
            "scale": scale,
            "S0": self.S0,
            "z0": self.z0 if self.normalize else None,
            "lengths": self.lengths,
            "start": self.position,
        }
        return naive.attention(self.q, self.k, self.v, self.g, self.beta, **(given | rest | changes))

    def tokens(self, part):
        """The inputs of some positions (a slice) or of one (a number), as `prefill` or `step` takes them."""
        q, k, v = (a[:, part] for a in (self.q, self.k, self.v))
        optional = {"g": self.g, "beta": self.beta}
        return (q, k, v), {name: a[:, part] for name, a in optional.items() if a is not None}

    def prefill(self, state, part=slice(None), attn=None, **more):
        arrays, given = self.tokens(part)
        return (attn or self.attn).prefill(*arrays, state, **given, **more)

    def steps(self, state, attn=None, quick=False, **more):
        """quick: with arrays as the compiled entry takes them, which slices of several rows are not."""
        attn = attn or self.attn
        y = []
        for t in range(self.q.shape[1]):
            arrays, given = self.tokens(t)
            if quick:
                arrays = [np.ascontiguousarray(a) for a in arrays]
                given = {name: np.ascontiguousarray(a) for name, a in given.items()}
            y.append(attn.step(*arrays, state, **given, **more))
            assert y[-1].dtype == self.q.dtype
        if not y:
            return np.zeros((len(self.q), 0, attn_heads(self.layout), self.v.shape[-1]), self.q.dtype)
        return np.stack(y, axis=1)

    def with_(self, **changes):
        return replace(self, **changes)

    def check(self, y, state, bound, what=""):
        """Outputs and final state against the oracle."""
        want, S, z = self.expected
        naive.assert_close(y, want, bound, f"{what} output")
        if S is not None:
            naive.assert_close(state.S, S, bound, f"{what} S")
        if z is not None:
            naive.assert_close(state.z, z, bound, f"{what} z")
        T = self.q.shape[1]
        seen = np.full(len(self.q), T) if self.lengths is None else self.lengths
        np.testing.assert_array_equal(state.position, self.position + seen)


def attn_heads(layout):
    return max(LAYOUTS[layout])


def feature_width(phi, K):
    return both(phi, K)[1].width(K)


def make(
    rule="linear", gate=None, layout="mha", phi="elu", *, B=2, T=15, K=4, V=5, normalize=False, start=False,
    hard=True, dtype=np.float32, position=0, **options,
):  # fmt: skip
    """Random tokens; `hard` puts resets, underflowing and vanishing decays into the middle of g.

    Keys have unit length under `identity`. Delta rules get β‖φ(k)‖² below 1.9: from 2 on the recurrence diverges.
    """
    name = f"{rule} {gate} {layout} {phi} {B} {T} {K} {V} {normalize} {start}"
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    H, Hk, N = LAYOUTS[layout]
    q = rng.standard_normal((B, T, H, K))
    k = rng.standard_normal((B, T, Hk, K))
    if phi == "identity":
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q, k, v = (a.astype(dtype) for a in (q, k, rng.standard_normal((B, T, N, V)) + 0.5))
    g = beta = S0 = z0 = None
    if rule in ("gated", "gated_delta"):
        shape = (B, T, N) if gate == "head" else (B, T, N, feature_width(phi, K))
        g = (-0.1 * np.abs(rng.standard_normal(shape))).astype(dtype)
        if hard:
            harden(g, rng)
    if rule in ("delta", "gated_delta"):
        size = both(phi, K, H, Hk)[1].diagonal(
            (naive.unit(k) if options.get("qk_norm") else k).astype(np.float64), position
        )
        beta = rng.uniform(0.2, 1.9, (B, T, N)) / np.maximum(np.repeat(size, N // Hk, axis=2), 1)
        beta = beta.astype(dtype)
    if start:
        F = feature_width(phi, K)
        S0 = rng.standard_normal((B, N, F, V)).astype(dtype)
        z0 = rng.uniform(0.5, 2, (B, N, F)).astype(dtype)
    return Case(rule, layout, phi, q, k, v, g, beta, S0, z0, normalize, options=options, position=position)


def harden(g, rng):
    """Hard decays in the middle: a run of 1e-12, then -25, -1e30 and -inf, for one head only or for some channels."""
    T, N = g.shape[1:3]
    if T == 0:
        return
    for place, value in ((2, np.log(1e-12)), (3, -25.0), (5, -1e30), (6, -np.inf)):
        t = min(T - 1, T * place // 8)
        run = slice(t, t + max(1, T // 10) if value > -28 and value < -26 else t + 1)
        head = rng.integers(N)
        if g.ndim == 3:
            g[:, run, head] = value
        else:
            g[:, run, head, rng.random(g.shape[3]) < 0.6] = value
    g[:, T // 2, :] = -np.inf if T % 2 else 0.0

"""Slow float64 oracles: attention as the papers write it, with no state carried from token to token.

The quadratic masked form gives `linear` and `gated`, a triangular solve gives the delta rules. Decay is summed over
each segment, never by subtracting prefix sums, so that -1e30 and -inf are exact. `token_loop` is the plain recurrence,
here to check the first oracle. Nothing is shared with the library.
"""

import math

import numpy as np


class Map:
    """A similarity: `features(x)` where φ has a natural order of its entries, else only `kernel(q, k)`.

    `features` may be a list, one function for each query head. `key`: the same for keys, where they differ.
    `placed`: the functions are called with x and its positions.
    """

    def __init__(self, features=None, series=None, key=None, placed=False):
        self.features = features
        self.series = series
        self.key = features if key is None else key
        self.placed = placed

    def kernel(self, q, k):
        """κ for every pair: q [T, K], k [U, K] to [T, U]; no positions, no heads."""
        if self.series is not None:
            return self.series(q @ k.T / math.sqrt(q.shape[-1]))
        return self.features(q) @ self.key(k).T

    def of(self, side, x, position):
        """φ of x [T, heads, K] at positions [T] to [T, heads, F]; side "q" or "k"."""
        own = self.features if side == "q" else self.key
        own = own if isinstance(own, list) else [own] * x.shape[1]
        assert len(own) == x.shape[1]
        rest = (position,) if self.placed else ()
        return np.stack([f(x[:, h], *rest) for h, f in enumerate(own)], axis=1)

    def diagonal(self, x, start=0):
        """κ(x, x) for keys x [B, T, heads, K], the first of them at `start`."""
        if self.series is not None:
            return self.series(np.sum(x * x, axis=-1) / math.sqrt(x.shape[-1]))
        first = np.broadcast_to(start, len(x))
        features = [self.of("k", row, n + np.arange(len(row))) for row, n in zip(x, first, strict=True)]
        return np.array([np.sum(f * f, axis=-1) for f in features]).reshape(x.shape[:3])

    def width(self, K):
        """F."""
        own = self.features[0] if isinstance(self.features, list) else self.features
        return own(np.zeros((1, K)), *([np.zeros(1, int)] if self.placed else [])).shape[1]


def dpfp(nu=1, sum_norm=False):
    """Schlag et al. 2021, eq. 37-38, in the order of their code: nu blocks of r_i · r_{i−j}, r = relu([x, −x])."""

    def features(x):
        r = np.concatenate([x * (x > 0), -x * (x < 0)], axis=-1)
        width = r.shape[-1]
        columns = [r[..., i] * r[..., (i - j) % width] for j in range(1, nu + 1) for i in range(width)]
        y = np.stack(columns, axis=-1)
        total = np.sum(y, axis=-1, keepdims=True)
        return y / np.where(total == 0, 1, total) if sum_norm else y

    return Map(features)


def polynomial(degree=2, bias=1.0):
    return Map(series=lambda x: (x + bias) ** degree)


def taylor(order=2):
    return Map(series=lambda x: sum(x**n / math.factorial(n) for n in range(order + 1)))


def cosformer(max_len):
    """Qin et al. 2022, eq. 10-12: relu(x) cos(πi/2M) and relu(x) sin(πi/2M) at position i."""

    def features(x, position):
        angle = np.pi * position[..., None] / (2 * max_len)
        r = x * (x > 0)
        return np.concatenate([r * np.cos(angle), r * np.sin(angle)], axis=-1)

    return Map(features, placed=True)


def hedgehog(weight, bias, variant="exp"):
    """Zhang et al. 2024, eq. 5 and what follows it; "joint" is fla's HedgehogFeatureMap."""

    def features(x):
        u = x @ weight.T + bias
        if variant == "softmax":
            return np.concatenate([softmax(u), softmax(-u)], axis=-1)
        if variant == "joint":
            return softmax(np.concatenate([2 * u, -2 * u], axis=-1))
        return np.exp(np.concatenate([u, -u], axis=-1))

    return Map(features)


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def t2r(weight, bias):
    """Kasai et al. 2021, eq. 5."""
    return Map(lambda x: np.maximum(x @ weight.T + bias, 0))


def elementwise_product(weight1, weight2, bias1, bias2):
    """fla's HadamardFeatureMap."""
    return Map(lambda x: (x @ weight1.T + bias1) * (x @ weight2.T + bias2))


def favor(draws, hyperbolic=False):
    """Choromanski et al. 2021, Lemma 1: rows of `draws` are w ~ N(0, I), x = q/K^¼."""

    def features(x):
        x = x / x.shape[-1] ** 0.25
        u = x @ draws.T
        u = np.concatenate([u, -u], axis=-1) if hyperbolic else u
        return np.exp(u - np.sum(x * x, axis=-1, keepdims=True) / 2) / math.sqrt(u.shape[-1])

    return Map(features)


def rff(draws):
    """Peng et al. 2021, eq. 4 and 5 with x = q/K^¼."""

    def features(x):
        x = x / x.shape[-1] ** 0.25
        u = x @ draws.T
        size = np.exp(np.sum(x * x, axis=-1, keepdims=True) / 2) / math.sqrt(len(draws))
        return size * np.concatenate([np.cos(u), np.sin(u)], axis=-1)

    return Map(features)


IDENTITY = Map(lambda x: x)
ELU = Map(lambda x: np.maximum(x, 0) + np.exp(np.minimum(x, 0)))
RELU = Map(lambda x: x * (x > 0))
RELU2 = Map(lambda x: x * x * (x > 0))


def _weights(g):
    """exp of g summed from after token s up to t: `[t + 2, C]` for t = 0, 1, …; row 0 is the initial state's."""
    total = np.zeros((1, g.shape[1]))
    for row in g:
        total = np.concatenate([total + row, np.zeros((1, g.shape[1]))])
        yield np.exp(total)


def _one_head(q, k, v, g, beta, phi, fq, fk, S0):
    """One stream of one head: q [R, T, K] (R query heads read it), k [T, K], v [T, V], g [T, C], beta [T] or None.

    fq [R, T, F] and fk [T, F] are their features, None for a map without any.
    """
    R, T, V = q.shape[0], v.shape[0], v.shape[1]
    plain = g.shape[1] == 1
    sees = np.zeros((R, T, T))
    knows = np.zeros((T, T))
    y = np.zeros((R, T, V))
    known = np.zeros((T, V))
    if plain and fk is None:
        pairs, among = np.stack([phi.kernel(each, k) for each in q]), phi.kernel(k, k)
    elif plain:
        pairs, among = fq @ fk.T, fk @ fk.T
    W = np.ones((1, g.shape[1]))
    for t, W in enumerate(_weights(g)):
        past = W[1:]
        if plain:
            sees[:, t, : t + 1] = pairs[:, t, : t + 1] * past[:, 0]
            knows[t, : t + 1] = among[t, : t + 1] * past[:, 0]
        else:
            sees[:, t, : t + 1] = fq[:, t] @ (fk[: t + 1] * past).T
            knows[t, : t + 1] = (fk[: t + 1] * past) @ fk[t]
        if S0 is not None:
            y[:, t] = fq[:, t] @ (W[0][:, None] * S0)
            known[t] = fk[t] @ (W[0][:, None] * S0)
    if beta is None:
        written = v
    else:  # u_t = β_t (v_t − what the state knew of k_t), a unit lower triangular system in u
        system = np.eye(T) + beta[:, None] * np.tril(knows, -1)
        written = np.linalg.solve(system, beta[:, None] * (v - known))
    y = y + sees @ written
    if fk is None:
        return y, None
    S = (fk * W[1:]).T @ written
    return y, S if S0 is None else S + W[0][:, None] * S0


def unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def divide(num, den, eps=1e-30, eps_mode="clamp"):
    if eps_mode == "add":
        return num / (den + eps)
    return num / (np.where(den < 0, -1.0, 1.0) * np.maximum(np.abs(den), eps))


def _float64(*arrays):
    return [None if a is None else np.asarray(a).astype(np.float64) for a in arrays]


def attention(
    q, k, v, g=None, beta=None, *, phi, normalize=False, scale=1.0, S0=None, z0=None, lengths=None,
    eps=1e-30, eps_mode="clamp", qk_norm=False, start=0,
):  # fmt: skip
    """y, S, z for q [B,T,H,K], k [B,T,Hk,K], v [B,T,Hv,V]; S is None for a map without an order of features.

    g makes the rule a gated one, beta a delta one. start: the position of the first token, a number or [B]. z is
    carried as one more column of v, all ones.
    """
    q, k, v, g, beta, S0, z0 = _float64(q, k, v, g, beta, S0, z0)
    B, T, H, _ = q.shape
    heads = v.shape[2]
    V = v.shape[3]
    outputs = max(H, heads)
    if qk_norm:
        q, k = unit(q), unit(k)
    if normalize:
        v = np.concatenate([v, np.ones((B, T, heads, 1))], axis=-1)
        if S0 is not None:
            S0 = np.concatenate([S0, z0[..., None]], axis=-1)
    y = np.zeros((B, T, outputs, v.shape[3]))
    states = []
    first = np.broadcast_to(start, B)
    for b in range(B):
        n = T if lengths is None else int(lengths[b])
        if phi.features:
            fq, fk = (phi.of(side, x[b, :n], first[b] + np.arange(n)) for side, x in (("q", q), ("k", k)))
        for head in range(heads):
            mine = [o for o in range(outputs) if o // (outputs // heads) == head]
            rows = np.stack([q[b, :n, o // (outputs // H)] for o in mine])
            gate = np.zeros((n, 1)) if g is None else g[b, :n, head]
            gate = gate[:, None] if gate.ndim == 1 else gate
            strength = None if beta is None else beta[b, :n, head]
            before = None if S0 is None else S0[b, head]
            side = head // (heads // k.shape[2])
            features = (None, None)
            if phi.features:
                features = np.stack([fq[:, o // (outputs // H)] for o in mine]), fk[:, side]
            out, S = _one_head(rows, k[b, :n, side], v[b, :n, head], gate, strength, phi, *features, before)
            y[b, :n, mine] = out
            states.append(S)
    S = z = None
    if phi.features:
        F = phi.width(k.shape[3])
        S = np.array(states).reshape(B, heads, F, v.shape[3])
    if normalize:
        y = divide(y[..., :V], y[..., V:], eps, eps_mode)
        if S is not None:
            S, z = S[..., :V], S[..., V]
        if lengths is not None:
            y = y * (np.arange(T)[None, :] < np.asarray(lengths)[:, None])[..., None, None]
    return y * scale, S, z


def token_loop(
    q, k, v, g=None, beta=None, *, phi, normalize=False, scale=1.0, S0=None, z0=None, lengths=None,
    eps=1e-30, eps_mode="clamp", qk_norm=False, start=0,
):  # fmt: skip
    """The recurrence, one token at a time, for maps with features: what `attention` is checked against."""
    q, k, v, g, beta, S0, z0 = _float64(q, k, v, g, beta, S0, z0)
    B, T, H, K = q.shape
    N, V = v.shape[2], v.shape[3]
    outputs = max(H, N)
    if qk_norm:
        q, k = unit(q), unit(k)
    F = phi.width(K)
    first = np.broadcast_to(start, B)
    S = np.zeros((B, N, F, V)) if S0 is None else S0.copy()
    z = np.zeros((B, N, F)) if z0 is None else z0.copy()
    y = np.zeros((B, T, outputs, V))
    for b in range(B):
        count = T if lengths is None else int(lengths[b])
        fq, fk = (phi.of(side, x[b, :count], first[b] + np.arange(count)) for side, x in (("q", q), ("k", k)))
        for t in range(count):
            for n in range(N):
                key = fk[t, n // (N // k.shape[2])]
                decay = np.ones(F) if g is None else np.exp(g[b, t, n]) * np.ones(F)
                S[b, n] *= decay[:, None]
                z[b, n] = decay * z[b, n] + key
                change = v[b, t, n] if beta is None else beta[b, t, n] * (v[b, t, n] - key @ S[b, n])
                S[b, n] += np.outer(key, change)
            for o in range(outputs):
                query = fq[t, o // (outputs // H)]
                n = o // (outputs // N)
                y[b, t, o] = scale * (query @ S[b, n])
                if normalize:
                    y[b, t, o] = divide(y[b, t, o], query @ z[b, n], eps, eps_mode)
    return y, S, z if normalize else None


def rms_ratio(got, want):
    """Relative RMS error. 0 for two empty or two all-zero arrays, inf where anything is not finite."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if got.size == 0:
        return 0.0
    if not np.isfinite(got).all():
        return math.inf
    error, size = np.sqrt(np.mean((got - want) ** 2)), np.sqrt(np.mean(want**2))
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return float(error / size)


def assert_close(got, want, bound, what="output"):
    """`rms_ratio` within bound for each batch row: a small row can't hide behind a large one."""
    got = np.asarray(got)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    for row in range(len(got)):
        ratio = rms_ratio(got[row], want[row])
        assert ratio <= bound, f"{what}, row {row}: relative RMS error {ratio:.2e}, bound {bound:.0e}"

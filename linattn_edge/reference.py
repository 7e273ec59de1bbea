"""Attention in float64 NumPy, written to be read beside the papers: slow, plain, and what everything else is held to.

Three views of the same thing: the quadratic form over all pairs (for any similarity κ, also those without a finite
feature map), the token loop over a state, and exact softmax attention by full scan.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge.kernels.layout import READ, WRITE
from linattn_edge.layer import Layer

F64 = NDArray[np.float64]


def quadratic_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    kernel: Callable[[F64, F64], F64],
    *,
    normalize: bool = True,
    scale: float = 1.0,
) -> F64:
    """Causal attention with any similarity: y_t = scale · Σ_{s ≤ t} κ(q_t, k_s) v_s, over Σ_{s ≤ t} κ(q_t, k_s) if
    normalised.

    q, k [B, T, H, K], v [B, T, H, V]; `kernel` takes two arrays [..., K] that broadcast and gives [...].
    Tsai et al. 2019 ("Transformer Dissection"), eq. 2. T² similarities are held at once.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    T = q.shape[1]
    weights = kernel(q[:, :, None], k[:, None, :])  # [B, T, T, H]
    weights = np.where(np.tri(T, dtype=bool)[None, :, :, None], weights, 0.0)
    y = np.einsum("btsh,bshv->bthv", weights, v)
    if normalize:
        y = y / weights.sum(axis=2)[..., None]
    return scale * y


def softmax_attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, *, scale: float | None = None) -> F64:
    """Exact causal softmax attention by full scan (Vaswani et al. 2017, eq. 1). q, k [B, T, H, K], v [B, T, H, V]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    T, K = q.shape[1], q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    logits = scale * np.einsum("bthk,bshk->bhts", q, k)
    logits = np.where(np.tri(T, dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-np.inf))
    return np.einsum("bhts,bshv->bthv", weights / weights.sum(axis=-1, keepdims=True), v)


def divisor(den: F64, eps: float, eps_mode: str) -> F64:
    """What y is divided by: den + eps, or den kept at least eps away from zero on its own side."""
    if eps_mode == "add":
        return den + eps
    return np.where(den < 0, np.minimum(den, -eps), np.maximum(den, eps))


def unit(x: F64) -> F64:
    """x / sqrt(Σx² + 1e-6), the L2 norm that delta-rule models put on q and k."""
    size = np.maximum(np.abs(x).max(axis=-1, keepdims=True, initial=0), 1)  # squares of what is left stay in range
    x = x / size
    return x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + 1e-6 / size / size)


def token_loop(
    layer: Layer,
    S: F64,
    z: F64 | None,
    position: NDArray[np.int64],
    mode: int,
    T: int,
    q: F64 | None,
    k: F64 | None,
    v: F64 | None,
    g: F64 | None,
    beta: F64 | None,
    lengths: NDArray[np.int64] | None,
) -> tuple[F64, F64 | None, F64]:
    """The recurrence, one token after another: the new S [B, N, F, V], z [B, N, F] and y [B, T, heads, V].

    g [B, T, N, 1 or F]. Nothing that is passed in is changed.
    """
    B = S.shape[0]
    shared_query, repeat = max(1, layer.N // layer.H), max(1, layer.H // layer.N)
    y = np.zeros((B, T, layer.outputs, layer.V))
    for t in range(T):
        alive = np.ones(B, bool) if lengths is None else t < lengths
        now = np.where(alive, position + t if mode != READ else np.maximum(position - 1, 0), 0)
        if mode != READ:
            assert k is not None and v is not None
            kt = np.where(alive[:, None, None], k[:, t], 0)
            kt = layer.phi.key(unit(kt) if layer.qk_norm else kt, now[:, None])
            kt = np.repeat(kt, layer.N // layer.HK, axis=1)
            vt = np.where(alive[:, None, None], v[:, t], 0)
            decay = np.ones((B, layer.N, layer.F))
            if layer.decay is not None:
                decay = decay * np.exp(layer.decay)
            elif g is not None:
                decay = decay * np.exp(np.where(alive[:, None, None], g[:, t], 0))
            write = np.ones((B, layer.N)) if beta is None else np.where(alive[:, None], beta[:, t], 0)
            S = np.where(alive[:, None, None, None], layer.rule.write(S, kt, vt, decay, write), S)
            if z is not None:
                z = np.where(alive[:, None, None], decay * z + kt, z)
        if mode != WRITE:
            assert q is not None
            qt = np.where(alive[:, None, None], q[:, t], 0)
            qt = layer.phi.query(unit(qt) if layer.qk_norm else qt, now[:, None])
            qt = np.repeat(qt, shared_query, axis=1)
            yt = np.einsum("bhfv,bhf->bhv", np.repeat(S, repeat, axis=1), qt)
            if z is not None:
                den = np.einsum("bhf,bhf->bh", np.repeat(z, repeat, axis=1), qt)
                yt = yt / divisor(den, layer.eps, layer.eps_mode)[..., None]
            y[:, t] = np.where(alive[:, None, None], layer.scale * yt, 0)
    return S, z, y


def sequence(state: Any, given: Mapping[str, F64], lengths: Any, out: Any, mode: int) -> None:
    """The reference backend: `token_loop` on a State, in place. Arguments are checked by the caller."""
    q, k, v, g, beta = (given.get(name) for name in ("q", "k", "v", "g", "beta"))
    first = k if q is None else q
    assert first is not None
    T = first.shape[1]
    S, z = state._exact()
    with np.errstate(invalid="ignore", over="ignore"):
        S, z, y = token_loop(state._layer, S, z, state.position, mode, T, q, k, v, g, beta, lengths)
        if mode != READ:
            origin = state._origin.copy()  # assigning forgets it
            state.S = S
            if z is not None:
                state.z = z
            state.position = state.position + (T if lengths is None else lengths)
            state._origin[...] = origin
        if out is not None:
            out[...] = y

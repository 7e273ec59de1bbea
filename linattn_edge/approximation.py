"""How far a feature map is from softmax, on given q, k and v, in float64 and without the T × T matrix."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge.arrays import check_finite, check_shape, real_array
from linattn_edge.errors import ShapeError
from linattn_edge.features import FeatureMap, feature_map

F64 = NDArray[np.float64]

_BLOCK = 1 << 20  # similarities that are held at once


@dataclass(frozen=True)
class SoftmaxError:
    """Relative errors of normalised linear attention against exact causal softmax attention.

    weights, outputs: float64 [B, T, H], for each stream, position and query head: ‖â − a‖/‖a‖ of the attention weights
    on all keys up to that position, and ‖ŷ − y‖/‖y‖ of the outputs, in the Euclidean norm. head_weights and
    head_outputs [H]: the same with the squares summed over streams and positions first.
    """

    weights: F64
    outputs: F64
    head_weights: F64
    head_outputs: F64


def softmax_error(phi: str | FeatureMap, q: ArrayLike, k: ArrayLike, v: ArrayLike) -> SoftmaxError:
    """Compare Σ κ(q_t, k_s) v_s / Σ κ(q_t, k_s), s ≤ t, with softmax over qᵀk/√K, on the caller's own vectors.

    phi: a map or its name. q [B, T, H, K], k [B, T, N, K], v [B, T, N, V], where N divides H (GQA). Positions count
    from 0. All is computed in float64, a block of rows of the T × T weights at a time. A map that is signed can have
    a sum near 0: then the error is as large as the layer's would be.

    Source: Tsai et al. 2019, eq. 2, with κ = φ(q)ᵀφ(k) against κ = exp(qᵀk/√K).
    """
    phi = feature_map(phi)
    arrays = {name: real_array(name, x).astype(np.float64) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, x in arrays.items():
        if x.ndim != 4:
            raise ShapeError(f"{name}: expected shape [B, T, heads, width], got {list(x.shape)}")
    q, k, v = arrays.values()
    (B, T, H, K), N, V = q.shape, k.shape[2], v.shape[3]
    if N == 0 or H % N:
        raise ShapeError(f"k: expected a number of heads that divides q's {H}, got {N}")
    check_shape("k", k, "B, T, N, K", (B, T, N, K))
    check_shape("v", v, "B, T, N, V", (B, T, N, V))
    check_finite(arrays, None)
    phi.check_heads(H, N)
    phi.check_norms("q", q, "float64")
    phi.check_norms("k", k, "float64")
    try:
        with np.errstate(over="raise", invalid="raise"):
            return _errors(phi, q, k, v)
    except FloatingPointError:
        raise ValueError("q, k, v: their products exceed the range of float64") from None


def _errors(phi: FeatureMap, q: F64, k: F64, v: F64) -> SoftmaxError:
    (B, T, H, K), N = q.shape, k.shape[2]
    position = None if phi.horizon is None else np.broadcast_to(np.arange(T)[:, None], (T, 1))
    weights, outputs = np.zeros((B, T, H)), np.zeros((B, T, H))
    sums = np.zeros((4, H))  # squares: weights' difference and size, outputs' difference and size
    rows = max(1, min(T, _BLOCK // max(T, 1)))
    for b in range(B):
        features_q, features_k = phi.query(q[b], position), phi.key(k[b], position)
        for h in range(H):
            n = h // (H // N)
            for start in range(0, T, rows):
                t = np.arange(start, min(T, start + rows))
                s = np.arange(t[-1] + 1)
                seen = s <= t[:, None]
                logits = np.where(seen, q[b, t, h] @ k[b, s, n].T / np.sqrt(K), -np.inf)
                exact = np.exp(logits - logits.max(axis=1, keepdims=True))
                exact /= exact.sum(axis=1, keepdims=True)
                ours = np.where(seen, features_q[t, h] @ features_k[s, n].T, 0)
                total = ours.sum(axis=1, keepdims=True)
                ours /= np.where(total < 0, np.minimum(total, -1e-30), np.maximum(total, 1e-30))
                y, ours_y = exact @ v[b, s, n], ours @ v[b, s, n]
                parts = [np.square(x).sum(axis=1) for x in (ours - exact, exact, ours_y - y, y)]
                weights[b, t, h] = np.sqrt(parts[0] / parts[1])
                outputs[b, t, h] = np.sqrt(parts[2] / np.maximum(parts[3], 1e-300))
                sums[:, h] += [part.sum() for part in parts]
    sizes = np.maximum(sums[[1, 3]], 1e-300)
    heads = np.sqrt(sums[[0, 2]] / sizes)
    return SoftmaxError(weights, outputs, heads[0], heads[1])

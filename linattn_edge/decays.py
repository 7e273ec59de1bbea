"""Constant log decays of published layers, for `LinearAttention(decay=...)` with a gated rule."""

import numpy as np
from numpy.typing import NDArray

from linattn_edge.arrays import whole


def retnet_decay(num_heads: int) -> NDArray[np.float64]:
    """RetNet: γ_h = 1 − 2^(−5−h) (Sun et al. 2023, section 3.1), as log γ_h, [num_heads]."""
    num_heads = whole("num_heads", num_heads, 1)
    return np.log1p(-np.exp2(-5.0 - np.arange(num_heads)))


def lightning_decay(num_heads: int, layer: int = 0, num_layers: int = 1) -> NDArray[np.float64]:
    """Lightning attention (Qin et al. 2023, TransNormerLLM): log λ_h = −(8h/H)(1 − l/L), h = 0 … H − 1, [num_heads].

    Heads count from 0, as in flash-linear-attention: the first one does not forget.

    `layer` counts from 0; the decay weakens with depth.
    """
    num_heads = whole("num_heads", num_heads, 1)
    num_layers = whole("num_layers", num_layers, 1)
    if whole("layer", layer, 0) >= num_layers:
        raise ValueError(f"layer: expected a number below num_layers = {num_layers}, got {layer!r}")
    return -8.0 * np.arange(num_heads) / num_heads * (1 - layer / num_layers)

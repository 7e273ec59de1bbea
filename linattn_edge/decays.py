"""Constant log decays of published layers, for `LinearAttention(decay=...)` with a gated rule."""

import numpy as np
from numpy.typing import NDArray


def retnet_decay(num_heads: int) -> NDArray[np.float64]:
    """RetNet: γ_h = 1 − 2^(−5−h) (Sun et al. 2023, section 3.1), as log γ_h, [num_heads]."""
    return np.log1p(-np.exp2(-5.0 - np.arange(num_heads)))


def lightning_decay(num_heads: int, layer: int = 0, num_layers: int = 1) -> NDArray[np.float64]:
    """Lightning attention (TransNormerLLM, Qin et al. 2023, eq. 3): log λ_h = −(8h/H)(1 − l/L), h = 1 … H,
    [num_heads].

    `layer` counts from 0; the decay weakens with depth.
    """
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer: expected 0 <= layer < num_layers = {num_layers}, got {layer}")
    return -8.0 * np.arange(1, num_heads + 1) / num_heads * (1 - layer / num_layers)

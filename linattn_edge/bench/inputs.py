"""The layers, states and tokens that are measured."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from linattn_edge.attention import LinearAttention
from linattn_edge.bench.turns import Array
from linattn_edge.state import aligned_bytes


def aligned(shape: tuple[int, ...]) -> Array:
    """Zeros, float32, at the alignment that a state has."""
    return aligned_bytes(int(np.prod(shape)) * 4).view(np.float32).reshape(shape)


def layer_inputs(attn: LinearAttention, lead: tuple[int, ...], seed: int = 0) -> dict[str, Array]:
    """Inputs of a step (lead = (B,)) or a prefill (lead = (B, T)); g per channel for "gated", per head else.

    Keys have unit length. A long sequence repeats the same 256 tokens.
    """
    layer, draw = attn.layer, np.random.default_rng(seed)
    distinct = (*lead[:-1], min(lead[-1], 256)) if len(lead) > 1 else lead
    q, k, v = draw.standard_normal((3, *distinct, layer.N, layer.K), dtype=np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    found = {"q": q, "k": k, "v": v}
    if layer.rule.decay:
        shape = (*distinct, layer.N, layer.F)[: None if layer.rule.name == "gated" else -1]
        found["g"] = draw.uniform(-0.1, -0.01, shape).astype(np.float32)
    if layer.rule.beta:
        found["beta"] = draw.uniform(0.3, 0.9, (*distinct, layer.N)).astype(np.float32)
    if distinct == lead:
        return found
    times = -(-lead[-1] // distinct[-1])
    return {name: np.concatenate([a] * times, axis=1)[:, : lead[1]].copy() for name, a in found.items()}


def make_layer(rule: str, d: int, heads: int = 32, **options: Any) -> LinearAttention:
    """The layer of each rule that is measured: elu and a normaliser for "linear", the identity map for the others."""
    phi = "elu" if rule == "linear" else "identity"
    return LinearAttention(heads, d, feature_map=phi, update_rule=rule, **options)


def steppers(layers: Sequence[LinearAttention], B: int = 1, dtype: str = "float32") -> list[Callable[[], object]]:
    """A call of `step`, with `out` given, for each layer, all on one state and the same inputs.

    They must agree on what a state is. The same memory matters: where pages happen to lie changes a time by 15 %.
    """
    x = layer_inputs(layers[0], (B,))
    state, out = layers[0].init_state(B, dtype), np.empty_like(x["v"])
    return [partial(attn.step, **x, state=state, out=out) for attn in layers]

"""A long stream in pieces: states of its parts are made apart and merged.

Under `linear` and `gated` a state is a sum over tokens, each under the decays that came after it, so the state of a
stream is what the decays of its later part left of the earlier part's state, plus the later part's own state:

    S = exp(Σ g of b) S_a + S_b        z = exp(Σ g of b) z_a + z_b
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge import arrays
from linattn_edge.attention import LinearAttention
from linattn_edge.errors import NotFiniteError, ShapeError, StateMismatchError
from linattn_edge.layer import Layer
from linattn_edge.state import State, compute_dtype, on_cpu

Array = NDArray[Any]

WRITE_COST = {"linear": 0.4, "gated": 0.54}  # of a token, over that of writing and reading it: for balance alone
SHORTEST = 256  # tokens of a piece below which nothing is gained


def merge(a: State, b: State) -> State:
    """The state of stream a followed by stream b, row by row: a new state; a and b stay as they are.

    For the rules `linear` and `gated`. b must have begun with nothing in it (`init_state`, a `reset`, or a merge of
    such); a may be any state of the layer, whatever it began with. Positions add. Under `gated`, b must know its total
    decay: `init_state(track_decay=True)`, unless the layer's decay is constant. Where φ reads positions, b must have
    begun where a ends: `init_state(position=a.position)`. The result knows its own decay where both do.

    StateMismatchError or ShapeError, which say why, where the two do not fit.
    """
    layer = _both(a, b)
    started = b._origin
    if (started < 0).any():
        row = int(np.argmax(started < 0))
        raise StateMismatchError(
            f"b: stream {row} may have begun with something in it (S, z or position were assigned, or it was loaded "
            "from an older file); only a state that began empty, by init_state or reset, can follow another"
        )
    if layer.phi.horizon is not None and (started != a.position).any():
        row = int(np.argmax(started != a.position))
        raise StateMismatchError(
            f"b: stream {row} began at position {started[row]}, but a ends at {a.position[row]}, and φ of "
            f"{layer.phi.name!r} depends on positions: make b by init_state(position=a.position)"
        )
    log_decay = b.log_decay
    if layer.rule.decay and log_decay is None:
        raise StateMismatchError(
            "b: its total decay is not known, and what it left of a depends on that: make b by "
            "init_state(track_decay=True)"
        )
    whole = a.copy()
    S, z = a._exact()
    later_S, later_z = b._exact()
    if layer.rule.decay and log_decay is not None:
        decay = np.exp(log_decay)
        S *= decay[..., None]
        z = None if z is None else z * decay
    whole.S = S + later_S
    if z is not None and later_z is not None:
        whole.z = z + later_z
    whole.position = a.position + (b.position - started)
    whole._origin[...] = a._origin
    if whole._log_decay is not None and log_decay is not None:
        whole._log_decay += log_decay
    return whole


def _both(a: Any, b: Any) -> Layer:
    """The layer that two states have in common, whose states merge."""
    for name, state in (("a", a), ("b", b)):
        on_cpu(name, state)
        if not isinstance(state, State):
            raise StateMismatchError(f"{name}: expected a State, got {type(state).__name__}")
    layer: Layer = a._layer
    if a._fingerprint != b._fingerprint:
        raise StateMismatchError(f"b: belongs to another layer: {layer.describe_difference(b._layer)}")
    check_merges(layer)
    if a.batch_size != b.batch_size:
        raise ShapeError(f"b: expected {a.batch_size} streams as in a, got {b.batch_size}")
    if a._dtype != b._dtype:
        raise StateMismatchError(f"b: expected a state of {a._dtype} as a is, got {b._dtype}")
    if (a._far_S is None) != (b._far_S is None):
        raise StateMismatchError("b: expected a compensated state where a is one, and only there")
    return layer


def check_merges(layer: Layer) -> None:
    """Refuse rules whose states do not merge."""
    if layer.rule.beta:
        raise StateMismatchError(
            f"the rule {layer.rule.name!r} writes what a value differs from what the state knew, so the later part of "
            "a stream depends on the earlier one; only states of 'linear' and 'gated' merge"
        )


def check_layer(attn: Any) -> None:
    """Refuse what is not a layer whose states merge."""
    if not isinstance(attn, LinearAttention):
        raise TypeError(f"attn: expected a LinearAttention, got {type(attn).__name__}")
    if attn.backend == "cuda":
        raise ValueError("attn: tokens are shared among CPUs here; with the backend 'cuda' use attn.prefill")
    check_merges(attn.layer)


def parallel_prefill(
    attn: LinearAttention,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    state: State,
    g: ArrayLike | None = None,
    num_threads: int = 2,
    out: Array | None = None,
) -> Array:
    """`attn.prefill` with the tokens shared among threads, for the rules `linear` and `gated`: y [B, T, heads, V].

    The state is updated in place. Each thread first writes a piece of the tokens to a state of its own, the states are
    merged, and from the state before its piece each thread then computes outputs: equal to `attn.prefill` to rounding.
    It pays for long sequences, and where `num_threads` of the layer does not: with few heads, or few streams. Where a
    token is refused (NaN, inf), the state is as it was, but `out` may have been written to.
    """
    n = arrays.whole("num_threads", num_threads, 1, 256)
    check_layer(attn)
    attn._check_state(state)
    tokens_ = {"q": q, "k": k, "v": v, "g": g}
    given, shape = attn._checked(4, tokens_, state.batch_size, out, {"the state": state._block})
    n = min(n, shape[1] // SHORTEST)
    if n < 2:
        return attn.prefill(q, k, v, state, g, out=out)
    y = np.empty(shape, arrays.output_dtype(given["q"])) if out is None else out
    edges = cuts(shape[1], n, attn.layer.rule.name)

    def tokens(i: int) -> dict[str, Array]:
        return {name: x[:, edges[i] : edges[i + 1]] for name, x in given.items()}

    def written(i: int) -> State:
        long = state._far_S is not None
        part = attn.init_state(state.batch_size, state._dtype, True, state.position + edges[i], long)
        a = tokens(i)
        attn.write(a["k"], a["v"], part, a.get("g"))
        return part

    def answered(i: int, start: State) -> State:
        a, target = tokens(i), y[:, edges[i] : edges[i + 1]]
        direct = target if target.flags.c_contiguous else None
        answer = attn.prefill(a["q"], a["k"], a["v"], start, a.get("g"), out=direct)
        if direct is None:
            target[...] = answer
        return start

    from concurrent.futures import ThreadPoolExecutor  # which imports logging

    try:
        with ThreadPoolExecutor(n) as threads:
            first = threads.submit(answered, 0, state.copy())
            parts = list(threads.map(written, range(1, n)))
            before = [first.result()]
            for part in parts:
                before.append(merge(before[-1], part))
            last = list(threads.map(answered, range(1, n + 1), before))[-1]
    except NotFiniteError:
        real = compute_dtype(state._dtype)  # the same, with the token counted from the first
        arrays.check_finite({name: arrays.as_dtype(a, real) for name, a in given.items()}, None)
        raise
    state._become(last)
    return y


def cuts(T: int, n: int, rule: str) -> list[int]:
    """Where T tokens are cut for n threads into n + 1 pieces: while one thread answers the first piece, the others
    write those that follow; then all answer the rest."""
    first = WRITE_COST[rule]
    piece = T / (n + first)
    return [0, *(round(piece * (first + i)) for i in range(n)), T]

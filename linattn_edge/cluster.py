"""Prefills in pieces over a Dask cluster, for sequences that are larger than one machine (extra `dask`).

As `parallel_prefill`: workers write each piece to a state of its own, the states are merged here, and workers answer
each piece from the state before it. Only states travel, of fixed size each; outputs stay where they were made.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge.attention import LinearAttention
from linattn_edge.pieces import _both, merge
from linattn_edge.state import State

Array = NDArray[Any]
Piece = Mapping[str, ArrayLike] | Callable[[], Mapping[str, ArrayLike]]


def cluster_prefill(client: Any, attn: LinearAttention, pieces: Sequence[Piece], state: State) -> list[Any]:
    """`attn.prefill` of a sequence in pieces, by the workers of a `dask.distributed.Client`.

    pieces: in order, each a mapping with q, k, v (and g) [B, T, ...], or a function without arguments that a worker
    calls to get one, twice: for data that is nowhere whole. Under a rule whose states merge (`linear`, `gated`).

    Returns a future of y [B, T, heads, V] for each piece, left on the cluster; `client.gather` fetches them. `state` is
    updated in place, once all pieces have been written. A worker that dies is replaced by Dask: what it held is done
    again by others. Errors in a piece are raised here, and `state` is as it was.
    """
    attn._check_state(state)
    _both(state, state)
    positions = [state.position] * len(pieces)
    if attn.layer.phi.horizon is not None:  # φ must know where a piece begins
        counts = client.gather(client.map(_count, list(pieces), pure=False))
        positions = [state.position + sum(counts[:i]) for i in range(len(counts))]
    kind = state.batch_size, state._dtype, state._far_S is not None
    parts = client.gather(client.map(_write, list(pieces), positions, attn=attn, kind=kind, pure=False))
    before = [state.copy()]
    for part in parts:
        before.append(merge(before[-1], part))
    answers: list[Any] = client.map(_answer, list(pieces), before[:-1], attn=attn, pure=False)
    state._become(before[-1])
    return answers


def _tokens(piece: Piece) -> Mapping[str, ArrayLike]:
    return piece() if callable(piece) else piece


def _count(piece: Piece) -> int:
    return int(np.shape(_tokens(piece)["k"])[1])


def _write(piece: Piece, position: Any, attn: LinearAttention, kind: tuple[int, str, bool]) -> State:
    a = _tokens(piece)
    B, dtype, compensated = kind
    state = attn.init_state(B, dtype, True, position, compensated)
    attn.write(a["k"], a["v"], state, a.get("g"))
    return state


def _answer(piece: Piece, before: State, attn: LinearAttention) -> Array:
    a = _tokens(piece)
    return attn.prefill(a["q"], a["k"], a["v"], before.copy(), a.get("g"))

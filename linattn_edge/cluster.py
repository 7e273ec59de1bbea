"""Prefills in pieces over a Dask cluster, for sequences that are larger than one machine (extra `dask`).

As `parallel_prefill`: workers write each piece to a state of its own, the states are merged here, and workers answer
each piece from the state before it. Only states travel, of fixed size each; outputs stay where they were made.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge import arrays
from linattn_edge.attention import LinearAttention
from linattn_edge.kernels.layout import READ
from linattn_edge.pieces import check_layer, merge
from linattn_edge.state import State, compute_dtype

Array = NDArray[Any]
Piece = Mapping[str, ArrayLike] | Callable[[], Mapping[str, ArrayLike]]


def cluster_prefill(client: Any, attn: LinearAttention, pieces: Iterable[Piece], state: State) -> list[Any]:
    """`attn.prefill` of a sequence in pieces, by the workers of a `dask.distributed.Client`.

    pieces: in order, each a mapping with q, k, v (and g) [B, T, ...] and nothing else, all of T tokens (there are no
    `lengths` here), or a function without arguments that a worker calls to get one, twice: for data that is nowhere
    whole. Under a rule whose states merge (`linear`, `gated`).

    Returns a future of y [B, T, heads, V] for each piece, left on the cluster; `client.gather` fetches them. `state` is
    updated in place, once all pieces have been checked and written. A worker that dies is replaced by Dask: what it
    held is done again by others. Errors in a piece are raised here, with its number (a note on those of its
    function), and `state` is as it was.
    """
    check_layer(attn)
    attn._check_state(state)
    if not hasattr(client, "gather"):
        raise TypeError(f"client: expected a dask.distributed.Client, got {type(client).__name__}")
    if isinstance(pieces, (str, Mapping)) or not isinstance(pieces, Iterable):
        raise TypeError(f"pieces: expected a list of mappings or functions, got {type(pieces).__name__}")
    pieces = list(pieces)
    numbers = range(len(pieces))
    positions = [state.position] * len(pieces)
    if attn.layer.phi.horizon is not None:  # φ must know where a piece begins
        counts = client.gather(client.map(_count, numbers, pieces, pure=False))
        positions = [state.position + sum(counts[:i]) for i in range(len(counts))]
    kind = state.batch_size, state._dtype, state._far_S is not None
    parts = client.gather(client.map(_write, numbers, pieces, positions, attn=attn, kind=kind, pure=False))
    before = [state.copy()]
    for part in parts:
        before.append(merge(before[-1], part))
    answers: list[Any] = client.map(_answer, numbers, pieces, before[:-1], attn=attn, pure=False)
    state._become(before[-1])
    return answers


def _tokens(number: int, piece: Piece) -> Mapping[str, ArrayLike]:
    try:
        tokens: Any = piece() if callable(piece) else piece
    except Exception as error:
        error.add_note(f"piece {number}: its function raised this")
        raise
    if not isinstance(tokens, Mapping):
        raise TypeError(f"piece {number}: expected a mapping with q, k, v (and g), got {type(tokens).__name__}")
    if not {"q", "k", "v"} <= set(tokens) <= {"q", "k", "v", "g"}:
        raise ValueError(f"piece {number}: expected q, k, v (and g), got {', '.join(map(str, tokens))}")
    return tokens


def _count(number: int, piece: Piece) -> int:
    shape = np.shape(_tokens(number, piece)["k"])
    return int(shape[1]) if len(shape) == 4 else 0  # what is wrong with it comes out when it is written


def _write(number: int, piece: Piece, position: Any, attn: LinearAttention, kind: tuple[int, str, bool]) -> State:
    tokens = _tokens(number, piece)
    B, dtype, compensated = kind
    try:
        given, _ = attn._checked(4, dict(tokens), B, None, {})
        state = attn.init_state(B, dtype, True, position, compensated)
        attn.write(given["k"], given["v"], state, given.get("g"))
        q = {"q": arrays.as_dtype(given["q"], compute_dtype(dtype))}
        if attn.check_finite:
            arrays.check_finite(q, None)
        attn._check_phi(READ, state, q, None)
    except (ValueError, TypeError) as error:
        raise type(error)(f"piece {number}: {error}") from None
    return state


def _answer(number: int, piece: Piece, before: State, attn: LinearAttention) -> Array:
    a = _tokens(number, piece)
    return attn.prefill(a["q"], a["k"], a["v"], before.copy(), a.get("g"))

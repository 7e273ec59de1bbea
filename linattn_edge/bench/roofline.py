"""What memory allows: a step can't be faster than reading and writing its state once."""

from collections.abc import Mapping

import numpy as np

from linattn_edge.attention import LinearAttention
from linattn_edge.bench.inputs import aligned
from linattn_edge.bench.turns import Array, Run, alternate, timed
from linattn_edge.state import State

# contestants' names: also the controls of a comparison, since no code of ours is in them
SWEEP = "read + write once"
COPY, LARGE_COPY = "a copy of as much", "a copy of 256 MiB"  # on a GPU


def step_bytes(attn: LinearAttention, x: Mapping[str, Array], dtype: str = "float32") -> int:
    """Bytes that a step must move: S and z read and written, inputs read, the output written."""
    B, layer = x["q"].shape[0], attn.layer
    state = State(layer, 0, dtype)
    numbers = B * layer.N * layer.F
    kept = numbers * layer.V * state.S.itemsize + (0 if state.z is None else numbers * state.z.itemsize)
    return 2 * kept + sum(a.nbytes for a in x.values()) + B * layer.outputs * layer.V * 4


def sweep(size: int) -> Run:
    """A contestant: every byte of a block of that size read and written once, by NumPy's vector loop."""
    block = aligned((max(1, size // 4),))
    block[...] = 1
    return timed(lambda: np.negative(block, out=block))


_CALL: list[float] = []  # measured once


def call_cost() -> float:
    """µs that NumPy needs to get to its loop and back: taken off a sweep."""
    if not _CALL:
        few = aligned((8,))
        run = timed(lambda: np.negative(few, out=few), batch=20)
        _CALL.append(alternate({"call": run}, 50, 1e-3)["call"]["min"])
    return _CALL[0]


def roofline(step_us: float, moved: int, sweep_us: float, swept: int) -> dict[str, float]:
    """GB/s that a step reaches, that a sweep of the same footprint reaches, and the share."""
    return share(step_us, moved, 2 * swept / max(sweep_us - call_cost(), 1e-3) * 1e-3)


def share(step_us: float, moved: int, possible: float) -> dict[str, float]:
    """GB/s that a step reaches, beside those that the machine does."""
    reached = moved / step_us * 1e-3
    return {"bytes moved": moved, "GB/s": reached, "machine GB/s": possible, "share of machine": reached / possible}
